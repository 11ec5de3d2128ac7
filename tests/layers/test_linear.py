"""Linear layers of few rows in one launch: against fp64 and torch's own, and when a module must be called instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from fulmen.hardware import TARGETS
from fulmen.layers import (
    GroupedQueryAttention,
    KVCache,
    LightningAttention,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    Sequences,
)
from fulmen.layers.fused.projections import MAX_ROWS, Facts, few_rows, project
from fulmen.testing import assert_close, expected
from tests.aot_layers import LinearCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # B, N, K, widths
    (1, 1, 1024, (40,)),
    (1, 1, 520, (8, 1, 30)),
    (1, 1, 7, (5, 16)),
    (3, 1, 300, (33, 16, 8)),
    (2, 8, 512, (24,)),
    (1, 2, 31, (1, 50)),
]


def linears(K: int, widths: tuple[int, ...], dtype: torch.dtype, bias: str = "none") -> list[nn.Linear]:
    torch.manual_seed(0)
    given = {"none": (), "all": range(3), "some": (1,)}[bias]
    return [nn.Linear(K, n, bias=i in given, dtype=dtype, device=DEVICE) for i, n in enumerate(widths)]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bias", ["none", "all", "some"])
@pytest.mark.parametrize(("B", "N", "K", "widths"), SHAPES)
@torch.no_grad()
def test_products(B, N, K, widths, bias, dtype, ran) -> None:
    modules, x = linears(K, widths, dtype, bias), drawn(B, N, K, dtype=dtype)
    found = few_rows(x, *modules)
    assert found is not None
    for y, module in zip(found, modules, strict=True):
        given = [t.detach() for t in (x, module.weight, *([] if module.bias is None else [module.bias]))]
        (wanted,) = expected(F.linear, given, [y], terms=K)
        assert_close("y", y, *wanted)
    if DEVICE == "cpu":
        assert ran == ["linear_row_kernel" if B * N == 1 else "linear_rows_kernel"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_the_first_is_activated(rows, activation, dtype, ran) -> None:
    modules, x = linears(96, (20, 33), dtype, "all"), drawn(rows, 1, 96, dtype=dtype)
    first, second = few_rows(x, *modules, facts=Facts(activation))
    formula = lambda x, w, b: getattr(F, activation)(F.linear(x, w, b))  # noqa: E731
    (wanted,) = expected(formula, [x, modules[0].weight.detach(), modules[0].bias.detach()], [first], terms=96)
    assert_close("y", first, *wanted)
    assert torch.equal(second, few_rows(x, *modules)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bias", ["none", "all"])
@pytest.mark.parametrize("rows", [1, 3, 16])
@torch.no_grad()
def test_a_norm_between_products(rows, bias, dtype, ran) -> None:
    first, other = linears(96, (200, 24), dtype, bias)
    (last,) = linears(200, (100,), dtype)
    x, weight = drawn(rows, 1, 96, dtype=dtype), drawn(200, dtype=dtype, seed=2)
    c, y, squares = few_rows(x, first, other, norm=weight)
    assert squares.dtype == torch.float32
    assert torch.equal(y, few_rows(x, first, other)[1])
    (z,) = few_rows(c, last, squares=squares, facts=Facts(None, 1e-3))

    def formula(x, g, v, w, *b):
        return F.linear(F.rms_norm(F.linear(x, w, *b), (200,), g, 1e-3), v)

    given = [x, weight, last.weight, first.weight, *([] if first.bias is None else [first.bias])]
    (wanted,) = expected(formula, [t.detach() for t in given], [z], terms=96 + 200)
    assert_close("z", z, *wanted)


@torch.no_grad()
def test_rows_far_apart(ran) -> None:
    """The last token of longer sequences."""
    modules, x = linears(64, (24, 8), torch.float32), drawn(4, 5, 64, dtype=torch.float32)
    for y, module in zip(few_rows(x[:, -1:], *modules), modules, strict=True):
        torch.testing.assert_close(y, module(x[:, -1:]))
    assert few_rows(x[:, ::2], *modules) is None


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Adapted(nn.Linear):
    """As a library of adapters puts in place of a Linear."""

    def forward(self, x):
        return super().forward(x) + 1


def hooked(module: nn.Linear) -> nn.Linear:
    module.register_forward_hook(lambda module, given, y: y + 1)
    return module


def hooked_before(module: nn.Linear) -> nn.Linear:
    module.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
    return module


def wrapped(module: nn.Linear) -> nn.Linear:
    forward = module.forward
    module.forward = lambda x: forward(x) + 1  # type: ignore[method-assign]
    return module


def parametrised(module: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(module, "weight", Doubled())
    return module


def adapted(module: nn.Linear) -> nn.Linear:
    other = Adapted(module.in_features, module.out_features, bias=False)
    other.load_state_dict(module.state_dict())
    return other.to(module.weight.device)


def without_parameters(module: nn.Linear) -> nn.Linear:
    weight = module.weight.detach()
    del module.weight, module.bias
    module.weight, module.bias = weight, torch.ones(weight.shape[0], device=weight.device)
    return module


def sliced(module: nn.Linear) -> nn.Linear:
    module.weight = nn.Parameter(torch.cat([module.weight.detach(), module.weight.detach() + 1], 1)[:, :64])
    return module


def transposed(module: nn.Linear) -> nn.Linear:
    module.weight = nn.Parameter(module.weight.detach().T.contiguous().T)
    return module


@pytest.mark.parametrize(
    "change", [hooked, hooked_before, wrapped, parametrised, adapted, transposed, sliced, without_parameters]
)
@torch.no_grad()
def test_other_modules_are_called(change, ran) -> None:
    plain, x = linears(64, (24, 8), torch.float32), drawn(2, 1, 64, dtype=torch.float32)
    before = [m(x) for m in plain]
    torch.testing.assert_close(list(project(x, *plain)), before)
    modules = [change(plain[0]), plain[1]]
    ran.clear()
    assert few_rows(x, *modules) is None
    for y, module in zip(project(x, *modules), modules, strict=True):
        assert torch.equal(y, module(x))
    assert ran == []
    assert torch.allclose(project(x, *modules)[0], before[0], atol=1e-5) == (change in (transposed, sliced))


def test_calls_it_does_not_serve(ran) -> None:
    modules, x = linears(64, (24,), torch.float32), drawn(2, 1, 64, dtype=torch.float32)
    assert few_rows(x, *modules) is None  # gradients
    with torch.no_grad():
        assert few_rows(x, *modules) is not None
        more = drawn(MAX_ROWS + 1, 1, 64, dtype=torch.float32)
        assert few_rows(more, *modules) is None
        both = few_rows(more, *modules, *linears(64, (9,), torch.float32))
        torch.testing.assert_close(both[0], modules[0](more))
        assert few_rows(drawn(65, 1, 64, dtype=torch.float32), *modules, *modules) is None
        assert few_rows(x.half(), *modules) is None
        assert few_rows(x.double(), *linears(64, (24,), torch.float64)) is None
        with torch.autocast(DEVICE, torch.bfloat16):
            assert few_rows(x, *modules) is None
        compiled = torch.compile(lambda x: project(x, *modules)[0], fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), modules[0](x))


@torch.no_grad()
def test_the_cpu_calls_its_modules() -> None:
    modules = [nn.Linear(64, 24, dtype=torch.float16)]
    assert few_rows(torch.ones(1, 1, 64, dtype=torch.float16), *modules) is None


# ---------------------------------------------------------------------------------------------------- layers

LAYERS = {
    "lightning": lambda: LightningAttention(32, 2, layer=1, num_layers=4),
    "lightning, bias": lambda: LightningAttention(32, 2, bias=True, gate=False, activation="relu"),
    "ring": lambda: LightningAttention(32, 4, preset="ring", layer=1, num_layers=4),
    "fewer keys": lambda: LightningAttention(32, 4, num_kv_heads=2, value_dim=12),
    "grouped": lambda: GroupedQueryAttention(32, 4, 2, causal=True, rope={}, bias=True),
    "normed": lambda: GroupedQueryAttention(32, 4, 1, causal=True, rope={}, qk_norm="before"),
    "one product": lambda: GroupedQueryAttention(32, 2, 1, causal=True, fused_qkv=True),
    "latent": lambda: MultiHeadLatentAttention(
        32, 2, q_rank=24, kv_rank=40, nope_dim=24, rope_dim=8, value_dim=20, bias=True
    ),
    "latent, q directly": lambda: MultiHeadLatentAttention(
        32, 2, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16, rope={"interleaved": False}
    ),
}
LAYERS |= {  # smaller than any tile
    "tiny lightning": lambda: LightningAttention(32, 1, head_dim=2, value_dim=1, qk_norm="after", rope={"dim": 2}),
    "tiny grouped": lambda: GroupedQueryAttention(32, 1, 1, head_dim=2, causal=True, rope={}, bias=True),
    "tiny latent": lambda: MultiHeadLatentAttention(32, 1, q_rank=1, kv_rank=8, nope_dim=1, rope_dim=2, value_dim=1),
}
PRODUCTS = ["linear_row_kernel", "linear_rows_kernel"]


@pytest.mark.parametrize("B", [1, 3, MAX_ROWS + 1])
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_steps_on_pools_equal_those_of_modules(kind, B, ran, monkeypatch) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]().to(DEVICE)
    for p in layer.parameters():
        if p.ndim == 1:
            nn.init.uniform_(p, 0.5, 1.5)
    results = []
    for served in (True, False):
        ran.clear()
        with monkeypatch.context() as patch:
            if not served:
                patch.setattr("fulmen.layers.fused.on_gpu", lambda x: False)
                patch.setattr("fulmen.layers.fused.projections.on_gpu", lambda x: False)
                patch.setattr("fulmen.layers.latent.on_gpu", lambda x: False)
            sequences = Sequences(B, 48, pages=3 * B, page_size=16, slots=B, device=DEVICE)
            pool = layer.new_pool(sequences)
            rows, y = [sequences.new() for _ in range(B)], []
            for i, tokens in enumerate((3, 1, 2, 1)):
                sequences.step(rows, tokens)
                y.append(layer(drawn(B, tokens, 32, dtype=torch.float32, seed=i), cache=pool))
        results.append((torch.cat(y, 1), *pool.memory))
        if DEVICE == "cpu":
            assert bool(set(ran) & set(PRODUCTS)) == (served and (kind != "one product" or B <= MAX_ROWS))
            if served and kind == "latent" and B <= MAX_ROWS:
                assert "norm_kernel" not in ran[-4:]  # part of the products
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(
    ("B", "heads", "kv_heads", "value_dim"), [(1, 2, 2, 16), (3, 5, 5, 72), (2, 1, 1, 7), (2, 4, 2, 16)]
)
@torch.no_grad()
def test_norm_and_gate_are_part_of_a_lightning_step(
    B, heads, kv_heads, value_dim, gate, drafts, ran, monkeypatch
) -> None:
    """The step multiplies, the last projection divides; accepted and rejected drafts, an empty row, several tokens."""
    torch.manual_seed(0)
    sizes = {"head_dim": 16, "value_dim": value_dim, "gate": gate, "bias": drafts, "num_kv_heads": kv_heads}
    layer = LightningAttention(32, heads, layer=1, num_layers=4, norm_eps=0.1, **sizes).to(DEVICE)
    nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    results = []
    for joined in (True, False):
        with monkeypatch.context() as patch:
            if not joined:
                patch.setattr(LightningAttention, "_joins_norm", lambda *args: False)
            sequences = Sequences(B + 1, 48, slots=B + 1, drafts=drafts, device=DEVICE)
            pool = layer.new_pool(sequences)
            rows, y = [sequences.new() for _ in range(B)] + [None], []
            for i, tokens in enumerate((1, 3, 1, 2)):
                ran.clear()
                sequences.step(rows, tokens)
                y.append(layer(drawn(B + 1, tokens, 32, dtype=torch.float32, seed=i), cache=pool)[:B])
                if DEVICE == "cpu":
                    assert ("gate_kernel" in ran) == (not joined)
                    assert ran[-1] == "linear_rows_kernel"
                if drafts and i == 1:
                    sequences.crop(rows[0], 2)
        results.append((torch.cat(y, 1), *(t[: B + 1] for t in pool.memory)))
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change", ["a hook on the norm", "a hook on out_proj", "fp16", "groups", "groups, GQA", "more rows", "fp64 norm"]
)
@torch.no_grad()
def test_steps_whose_norm_is_a_launch_of_its_own(change, ran) -> None:
    """The hook is called; in fp16 what is not divided yet could overflow; groups have several divisors; a norm in
    another dtype would be cast by a launch that the step does not wait for."""
    options = {"output_norm": 2} if change.startswith("groups") else {}
    options |= {"num_kv_heads": 2} if change.endswith("GQA") else {}
    layer, B, seen = LightningAttention(32, 4, layer=1, num_layers=4, **options).to(DEVICE), 3, []
    x = drawn(B, 1, 32, dtype=torch.float32)
    if change == "a hook on the norm":
        layer.norm.register_forward_hook(lambda *args: seen.append(1))
    if change == "a hook on out_proj":
        layer.out_proj.register_forward_hook(lambda *args: seen.append(1))
    if change == "fp16":
        layer, x = layer.half(), x.half()
    if change == "fp64 norm":
        layer.norm.double()
    if change == "more rows":
        x, B = drawn(MAX_ROWS + 1, 1, 32, dtype=torch.float32), MAX_ROWS + 1
    sequences = Sequences(B, 48, slots=B, device=DEVICE)
    pool = layer.new_pool(sequences)
    sequences.step([sequences.new() for _ in range(B)])
    layer(x, cache=pool)
    assert len(seen) == change.startswith("a hook")
    if DEVICE == "cpu":
        assert ("gate_kernel" in ran) == (change != "a hook on the norm")


@torch.no_grad()
def test_steps_of_a_preallocated_cache(ran) -> None:
    layer = LAYERS["grouped"]().to(DEVICE)
    cache, x = KVCache(32), drawn(2, 12, 32, dtype=torch.float32)
    y = [layer(x[:, :9], cache=cache), *(layer(x[:, i : i + 1], cache=cache) for i in (9, 10, 11))]
    if DEVICE == "cpu":
        assert ran.count("linear_rows_kernel") == 6
    torch.testing.assert_close(torch.cat(y, 1), layer(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_hook_on_a_projection_of_a_layer_is_called(ran) -> None:
    layer, seen = LAYERS["grouped"]().to(DEVICE), []
    sequences = Sequences(1, 16, pages=2, page_size=16, device=DEVICE)
    pool, row = layer.new_pool(sequences), sequences.new()
    for _ in range(3):
        sequences.step([row])
        layer(drawn(1, 1, 32, dtype=torch.float32), cache=pool)
    handle = layer.k_proj.register_forward_hook(lambda *args: seen.append(1))
    sequences.step([row])
    layer(drawn(1, 1, 32, dtype=torch.float32), cache=pool)
    handle.remove()
    sequences.step([row])
    layer(drawn(1, 1, 32, dtype=torch.float32), cache=pool)
    assert len(seen) == 1


# ------------------------------------------------------------------------------------------------ compiled


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("arch", TARGETS)
def test_fits_and_does_not_spill(arch, rows, compiler) -> None:
    for usage in compiler(LinearCase(arch, rows)):
        assert usage.shared <= TARGETS[arch].smem_bytes, usage
        assert usage.stack == 0, usage


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 2, 16, 40])
@pytest.mark.parametrize("kind", LAYERS)
@torch.no_grad()
def test_on_a_gpu_and_in_a_graph(kind, B) -> None:
    """bf16: close to the modules' step, and the same bits from a captured graph."""
    layer = LAYERS[kind]().to("cuda", torch.bfloat16)
    sequences = Sequences(B, 48, pages=9 * B, page_size=16, slots=B, device="cuda")
    pool = layer.new_pool(sequences)
    rows = [sequences.new() for _ in range(B)]
    sequences.step(rows, 20)
    layer(drawn(B, 20, 32, dtype=torch.bfloat16), cache=pool)
    sequences.step(rows, 1)
    x, held = drawn(B, 1, 32, dtype=torch.bfloat16, seed=2), [t.clone() for t in pool.memory]

    def step(few: bool = True) -> torch.Tensor:
        sequences.steps += 1  # the same tokens again, of the same states
        for t, kept in zip(pool.memory, held, strict=True):
            t.copy_(kept)
        with pytest.MonkeyPatch.context() as patch:
            if not few:
                patch.setattr("fulmen.layers.fused.projections.are_few", lambda *args: False)
                patch.setattr("fulmen.layers.latent.are_few", lambda *args: False)
                patch.setattr("fulmen.layers.lightning.are_few", lambda *args: False)
            return layer(x, cache=pool)

    plain, y = step(few=False), [step() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    assert all(torch.equal(out, one) for one in y)
    assert (out - plain).float().norm() < 0.02 * plain.float().norm()


@torch.no_grad()
def test_projections_of_cross_attention(ran) -> None:
    """q of x in one launch, k and v of the context in another."""
    layer = MultiHeadAttention(32, 4, context_dim=24, bias=True).to(DEVICE)
    x, context = drawn(2, 1, 32, dtype=torch.float32), drawn(2, 5, 24, dtype=torch.float32, seed=2)
    y = layer(x, context=context)
    if DEVICE == "cpu":
        assert ran == ["linear_rows_kernel"] * 2
    with torch.enable_grad():
        want = layer(x, context=context)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
