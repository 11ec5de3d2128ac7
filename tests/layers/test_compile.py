"""torch.compile takes a layer as one graph, whatever the call, and computes the same."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fulmen import layers, testing

COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
ROPE = {"causal": True, "rope": {}, "qk_norm": "before"}
LAYERS = {
    "self": lambda: layers.MultiHeadSelfAttention(24, 4, bias=True, **ROPE),
    "grouped": lambda: layers.GroupedQueryAttention(24, 4, 2, sinks=True, softcap=4.0, window=(3, None), **ROPE),
    "separate": lambda: layers.MultiHeadAttention(24, 4),
    "dropout": lambda: layers.GroupedQueryAttention(24, 4, 2, dropout=1e-15, **ROPE),
}
SIZES = {"q_rank": 12, "kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
TRAINED = {name: LAYERS[name] for name in ("self", "grouped", "separate")} | {
    "minimax": lambda: layers.LightningAttention(24, 4, num_layers=2),
    "ring": lambda: layers.LightningAttention(24, 4, num_layers=2, head_dim=8, preset="ring"),
    "latent": lambda: layers.MultiHeadLatentAttention(24, 4, causal=True, **SIZES),
}
LATENT = {"q_rank": 64, "kv_rank": 64, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
NATIVE = {  # with heads that the CUDA kernels take
    "self": lambda: layers.MultiHeadSelfAttention(256, 2, **ROPE),
    "grouped": lambda: layers.GroupedQueryAttention(256, 4, 2, **ROPE),
    "minimax": lambda: layers.LightningAttention(256, 4, num_layers=2),
    "ring": lambda: layers.LightningAttention(256, 2, num_layers=2, preset="ring"),
    "latent": lambda: layers.MultiHeadLatentAttention(256, 2, causal=True, **LATENT),
}
MASK = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)


def results(f, layer, x, **arguments):
    at = x.clone().requires_grad_()
    y = f(at, **arguments)
    return y.detach(), *torch.autograd.grad(y.square().sum(), [at, *layer.parameters()])


def assert_same(f, layer, x, tolerance: float = 1e-10, **arguments) -> None:
    for got, want in zip(results(f, layer, x, **arguments), results(layer, layer, x, **arguments), strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("self", "plain"), ("self", "mask"), ("self", "packed"), ("grouped", "plain"), ("grouped", "mask"),
        ("grouped", "positions"), ("dropout", "mask"), ("dropout", "packed"), ("separate", "context"),
    ],
)  # fmt: skip
def test_fullgraph(kind, call):
    layer = LAYERS[kind]().double()
    x = torch.randn(1 if call == "packed" else 2, 6, 24, dtype=torch.float64)
    arguments = {
        "plain": {},
        "mask": {"mask": MASK},
        "packed": {"cu_seqlens": torch.tensor([0, 2, 2, 6], dtype=torch.int32)},
        "positions": {"positions": torch.arange(6) * 2},
        "context": {"mask": MASK, "context": torch.randn(2, 9, 24, dtype=torch.float64)},
    }[call]
    assert_same(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, x, **arguments)


@COMPILER
def test_inductor():
    layer = LAYERS["self"]().double()
    compiled = torch.compile(layer, fullgraph=True)
    assert_same(compiled, layer, torch.randn(2, 6, 24, dtype=torch.float64), 1e-6)  # its fp32 cosines are not torch's


def test_one_graph_for_every_shape():
    layer = LAYERS["grouped"]().double()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = set()
    for B, N in ((2, 6), (3, 70), (5, 41)):
        assert_same(compiled, layer, torch.randn(B, N, 24, dtype=torch.float64))
        graphs.add(counter.frame_count)
    assert len(graphs) == 1, "compiled again"


@pytest.mark.parametrize("max_length", [None, 16])
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_with_a_cache(padded, max_length):
    """In one graph for each call; lengths are symbols after the second step, so graphs do not add up."""
    layer, x = LAYERS["grouped"]().double(), torch.randn(2, 14, 24, dtype=torch.float64)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=counter)
    mask = MASK if padded else None
    with torch.no_grad():
        cache, plain = layers.KVCache(max_length), layers.KVCache(max_length)
        for i, part in enumerate(x.split([6] + [1] * 8, 1)):
            at = {"mask": mask} if i == 0 else {}
            torch.testing.assert_close(
                compiled(part, cache=cache, **at), layer(part, cache=plain, **at), atol=1e-10, rtol=0
            )
    assert counter.frame_count <= 6


@torch.no_grad()
def test_compiled_calls_and_others_share_a_cache():
    """And layers share their graphs, whoever wrote a cache before it was emptied."""
    counter = CompileCounterWithBackend("aot_eager")
    made = [LAYERS["self"]().double() for _ in range(3)]
    compiled = [torch.compile(layer, fullgraph=True, backend=counter) for layer in made]
    x, cache, graphs = torch.randn(2, 9, 24, dtype=torch.float64), layers.KVCache(16), []
    for layer, f in zip(made, compiled, strict=True):
        for calls in ((layer, f, f, f), (f, f, layer, f)):
            y = torch.cat([g(part, cache=cache) for g, part in zip(calls, x.split([6, 1, 1, 1], 1), strict=True)], 1)
            torch.testing.assert_close(y, layer(x), atol=1e-10, rtol=0)
            cache.reset()
        graphs.append(counter.frame_count)
    assert graphs == [graphs[0]] * 3, "compiled again"


def test_autocast_and_a_model_of_layers():
    model = torch.nn.Sequential(LAYERS["self"](), LAYERS["grouped"]())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 6, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("kind", TRAINED)
def test_lengths_beyond_the_second_share_a_graph(kind):
    """The first length is a constant, the second makes it a symbol."""
    layer, counter, graphs = TRAINED[kind]().double(), CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for N in (6, 70, 41, 133):
        assert_same(compiled, layer, torch.randn(2, N, 24, dtype=torch.float64))
        graphs.append(counter.frame_count)
    assert graphs == [1, 2, 2, 2]


def assert_right(f, layer, exact, x) -> None:
    """Outputs and all gradients of a compiled layer beside those of the layer, against fp64."""
    compiled = [t.clone() for t in results(f, layer, x)]  # a CUDA graph writes to the same memory again
    found = zip(compiled, results(layer, layer, x), results(exact, exact, x.double()), strict=True)
    for i, (actual, low, wanted) in enumerate(found):
        testing.assert_close(f"result {i}", actual, low, wanted, testing.GRADIENT_FACTOR)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", NATIVE)
def test_lengths_beyond_the_second_share_a_graph_on_a_gpu(kind):
    """Also where a length makes the policy choose another kernel, or split."""
    layer, counter, graphs = NATIVE[kind]().to("cuda", torch.bfloat16), CompileCounterWithBackend("inductor"), []
    exact, compiled = copy.deepcopy(layer).double(), torch.compile(layer, fullgraph=True, backend=counter)
    for N in (64, 700, 130, 5000, 2048):
        assert_right(compiled, layer, exact, torch.randn(2, N, 256, device="cuda", dtype=torch.bfloat16))
        graphs.append(counter.frame_count)
    assert graphs == [1, 2, 2, 2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize(("layers", "kind"), [*(("TRAINED", k) for k in TRAINED), *(("NATIVE", k) for k in NATIVE)])
def test_reduce_overhead_trains(layers, kind):
    """By CUDA graphs, of which the first calls warm up and the others replay."""
    layer = {"TRAINED": TRAINED, "NATIVE": NATIVE}[layers][kind]().to("cuda", torch.bfloat16)
    exact, compiled = copy.deepcopy(layer).double(), torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(2, 64, layer.embed_dim, device="cuda", dtype=torch.bfloat16)
        assert_right(compiled, layer, exact, x)
