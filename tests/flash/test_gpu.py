"""What only a GPU can show: no synchronisation, CUDA graphs, the same bits every run, huge tensors, memory."""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch
from fulmen.flash import sdpa
from fulmen.flash.spec import Residuals
from fulmen.testing import flash as testing

pytestmark = pytest.mark.gpu

BACKENDS = sorted(dispatch.kernels("flash"))
OURS = [b for b in BACKENDS if b.startswith(("triton", "cuda"))]
REPEATS = {"sdpa": ("o", "lse"), "cuda": ("o", "lse", "dk", "dv", "dsinks")}  # dq of `cuda`: if asked to
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
KINDS = {
    "short": {"N_Q": 300, "N_KV": 500},
    "short, causal, heads": {"N_Q": 512, "H_KV": 2, "causal": True},
    "full": {"N_Q": 1000, "N_KV": 1500},
    "causal, heads": {"N_Q": 2048, "H_KV": 2, "causal": True},
    "window, sinks": {"N_Q": 2048, "H_KV": 2, "causal": True, "window": (300, None), "sinks": True, "softcap": 20.0},
    "packed": {"H_KV": 2, "causal": True, "lengths_q": [500, 0, 1, 1547]},
    "packed, cross": {"lengths_q": [500, 0, 1, 1547], "lengths_k": [1000, 3, 0, 2000], "causal": True},
}  # fmt: skip


def made(kind: str, backend: str, D: int = 64) -> tuple[testing.Inputs, tuple[str, ...]]:
    """Inputs and the results whose gradients `backend` has; a skip with its own sentence if it cannot serve them."""
    x = testing.inputs(1, 4, D=D, **KINDS[kind], **BF16)
    kernel = dispatch.kernels("flash")[backend]
    if kernel.supports(x.spec(with_lse=True, needs_grad=True)) is None:
        return x, ("o", "lse")
    if (why := kernel.supports(x.spec(needs_grad=True))) is not None:
        pytest.skip(why)
    return x, ("o",)


def run(x: testing.Inputs, backend: str, use: tuple[str, ...]) -> testing.Outputs:
    return testing.evaluate(testing.backend(backend, with_lse="lse" in use), x, use)


def assert_same(a: testing.Outputs, b: testing.Outputs, names: tuple[str, ...] | None = None) -> None:
    for name, x, y in zip(a._fields, a, b, strict=True):
        if x is not None and (names is None or name in names):
            assert torch.equal(x, y), f"{name}: {(x - y).abs().max()}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_synchronisation(backend, kind):
    x, use = made(kind, backend)
    if dispatch.kernels("flash")[backend].backward is None:
        pytest.skip("an oracle may wait")
    run(x, backend, use)  # compile first: loading a module may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, backend, use)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cuda_graph(backend, kind):
    """Captured once, replayed on other numbers and, packed, on other lengths."""
    x, use = made(kind, backend)
    if dispatch.kernels("flash")[backend].backward is None:
        pytest.skip("an oracle is not captured")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(x, backend, use)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, backend, use)
    for name in ("q", "k", "v", "do", "dlse", "sinks"):
        if getattr(x, name) is not None:
            getattr(x, name).normal_()
    if x.cu_seqlens_q is not None:
        x.cu_seqlens_q.copy_(torch.tensor([0, 0, 3, 1900, 2048]))
    if x.cu_seqlens_k is not None:
        x.cu_seqlens_k.copy_(torch.tensor([0, 7, 7, 2500, 3003]))
    graph.replay()
    again = run(x, backend, use)
    assert_same(captured, again, REPEATS.get(backend))
    if backend in REPEATS:  # dq is summed in no fixed order
        for name in ("dq", "dk", "dv"):
            a, b = getattr(captured, name), getattr(again, name)
            assert (a - b).abs().max() <= 2 * torch.finfo(a.dtype).eps * b.abs().max(), name


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_same_bits_in_100_runs(backend, kind, D):
    """`cuda` in deterministic mode; the others without."""
    torch.use_deterministic_algorithms(backend == "cuda")
    x, use = made(kind, backend, D)
    first = run(x, backend, use)
    for _ in range(100):
        again = run(x, backend, use)
        assert_same(again, first, ("o", "lse") if backend == "sdpa" else None)


@pytest.mark.parametrize(("D", "E"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", OURS)
def test_what_lies_beyond_a_sequence_is_not_used(backend, causal, D, E):
    """The neighbours of a packed sequence may be NaN: a weight of zero would not hide that."""
    x = testing.inputs(1, 2, D=D, E=E, lengths_q=[70, 300, 5, 200], causal=causal, **BF16)
    if (why := dispatch.kernels("flash")[backend].supports(x.spec())) is not None:
        pytest.skip(why)
    part = slice(70, 370)
    want = fulmen.flash_attention(x.q, x.k, x.v, **x.options(), backend=backend)[:, :, part]
    for y in (x.k, x.v):
        y[:, :, : part.start] = y[:, :, part.stop :] = torch.nan
    assert torch.equal(fulmen.flash_attention(x.q, x.k, x.v, **x.options(), backend=backend)[:, :, part], want)


@pytest.mark.parametrize("backend", OURS)
def test_a_tensor_on_another_stream(backend):
    """Launched where the caller works, not on the default stream."""
    x, use = made("causal, heads", backend)
    want = run(x, backend, use)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = x._replace(q=x.q.clone())
        got = run(late, backend, use)
    side.synchronize()
    assert_same(got, want, REPEATS.get(backend))


# ------------------------------------------------------------------------------------------ huge tensors


def huge(B: int, H: int, N: int, D: int, window: tuple[int, int] | None) -> testing.Inputs:
    q, k, v, do = (torch.randn(B, H, N, D, **BF16) for _ in range(4))
    return testing.Inputs(q, k, v, None, None, None, True, window, None, None, do, torch.zeros(1, 1, 1, device="cuda"))


def evaluate_o(x: testing.Inputs, backend: str) -> testing.Outputs:
    if (why := dispatch.kernels("flash")[backend].supports(x.spec(needs_grad=True))) is not None:
        pytest.skip(why)
    q, k, v = (y.requires_grad_() for y in (x.q, x.k, x.v))
    o = fulmen.flash_attention(q, k, v, causal=True, window=x.window, backend=backend)
    return testing.Outputs(o.detach(), None, *torch.autograd.grad(o, (q, k, v), x.do), None)


@pytest.mark.slow
@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("shape", [(1, 1, 2**25 + 640, 64), (2**14 + 10, 2, 1024, 64)], ids=["long", "wide"])
def test_beyond_2_to_31_elements(shape, backend):
    """Offsets pass 2^31 along a head, or across heads. A narrow window makes both cheap, and local to check."""
    x = huge(*shape, window=(100, None))
    assert x.q.numel() > 2**31
    out = evaluate_o(x, backend)
    B, H, N, _ = shape
    tail = slice(N - 700, N)  # past what 32-bit offsets reach, in the last head
    for b, h in ((0, 0), (B - 1, H - 1)):
        part = (slice(b, b + 1), slice(h, h + 1), tail)
        one = x._replace(**{n: getattr(x, n)[part].detach() for n in ("q", "k", "v", "do")})
        one = one._replace(dlse=torch.zeros(1, 1, 700, device="cuda"))
        low, exact = testing.low_precision(one, ("o",)), testing.reference(one, ("o",))
        for name in ("o", "dq", "dk", "dv"):  # the first 200 rows also saw, or were seen by, rows before the part
            got, plain, true = (
                y[:, :, 200:] for y in (getattr(out, name)[part], getattr(low, name), getattr(exact, name))
            )
            factor = testing.FORWARD_FACTOR if name == "o" else testing.GRADIENT_FACTOR
            testing.assert_close(f"{name}[{b}, {h}]", got, plain, true, factor, testing.ROUNDINGS[name])


@pytest.mark.slow
@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("shape", [(700, 100), (70_000, 1), (1, 70_000)])
def test_more_than_65535_heads(shape, backend):
    x = huge(*shape, 33, 16, window=None)._replace(dlse=torch.zeros(*shape, 33, device="cuda"))
    out = evaluate_o(x, backend)
    x = x._replace(**{n: getattr(x, n).detach() for n in ("q", "k", "v")})
    with torch.no_grad():
        _, lse = fulmen.flash_attention_with_lse(x.q, x.k, x.v, causal=True, backend=backend)
    testing.compare(x, out._replace(lse=lse), ("o",))


# ------------------------------------------------------------------------------------------------ memory


def peak(x: testing.Inputs, forward, backward) -> int:
    """Bytes allocated by forward and backward at their highest, above the inputs."""
    spec = x.spec(needs_grad=True)
    tensors = Residuals(x.q, x.k, x.v)
    for _ in range(2):  # the first may allocate what stays
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        o, lse = forward(spec, tensors)
        gradients = backward(spec, tensors, o, lse, x.do, None)
        highest = torch.cuda.max_memory_allocated() - before
        del o, lse, gradients
    return highest


@pytest.mark.parametrize("shape", [(4, 32, 4096, 64, 32), (1, 40, 2048, 128, 8), (2, 16, 8192, 128, 16)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", OURS)
def test_peak_memory(backend, causal, shape):
    """Of forward and backward, not above that of FlashAttention-2 in torch."""
    B, H, N, D, H_KV = shape
    x = testing.inputs(B, H, N, D, H_KV=H_KV, causal=causal, **BF16)
    torch.use_deterministic_algorithms(False)  # no filling of what is allocated
    kernel = dispatch.kernels("flash")[backend]
    if (why := kernel.supports(x.spec(needs_grad=True))) is not None:
        pytest.skip(why)
    theirs = peak(
        x,
        lambda spec, tensors: sdpa.forward(spec, tensors, implementation="flash"),
        lambda *args: sdpa.backward(*args, implementation="flash"),
    )
    ours = peak(x, kernel.forward, kernel.backward)
    assert ours <= theirs, f"{ours / 2**20:.0f} MB, FlashAttention-2 {theirs / 2**20:.0f} MB"


def test_gradients_of_o_in_both_orders_of_memory():
    """torch keeps cuDNN's backward by the strides of q, k and v, so do must not come in another order the next time."""
    x = testing.inputs(1, 4, 2048, D=192, E=128, causal=True, layout="bnhd", **BF16)
    for do in (x.do, x.do.contiguous(), x.do):
        testing.check(x._replace(do=do), "sdpa", ("o",))
