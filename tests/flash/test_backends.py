"""Every registered backend against fp64: o, lse and all gradients.

A new file in fulmen/flash/ is tested here with no other edit. What a backend does not support is a skip with its own
sentence; one without a gradient of lse is tested without. On a CPU the Triton kernels are interpreted, in fp16, so
those shapes are small.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fulmen import dispatch, hardware
from fulmen.flash import sdpa
from fulmen.flash.spec import Residuals
from fulmen.testing import flash as testing

BACKENDS = sorted(dispatch.kernels("flash"))
PLAIN = [b for b in BACKENDS if not b.startswith(("triton", "cuda"))]  # no interpreter
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SAME = {("reference", "bf16"), ("reference", "fp16")}  # fp64 within, whatever the dtype
TOP_LEFT = "top_left"


def case(**options):
    """One head unless heads matter: the interpreter takes its time."""
    return {"H": 1} | options


# One row per thing that can go wrong, each otherwise small: sizes around the tile edges (16, 64, 128), one below, one
# above; then the options, alone and together.
CASES = {
    "B=0": case(B=0, N_Q=5, causal=True),
    "no heads": case(B=2, H=0, N_Q=5),
    "no heads, sinks": case(B=2, H=0, N_Q=5, sinks=True),
    "N_Q=0": case(N_Q=0, N_KV=7, sinks=True),
    "N_KV=0": case(N_Q=7, N_KV=0),
    "N_KV=0, sinks": case(N_Q=7, N_KV=0, sinks=True, causal=True),
    "N=0": case(N_Q=0),
    "N=1": case(B=2, N_Q=1),
    "N=63": case(H=1, N_Q=63, D=64),
    "N=113": case(H=2, N_Q=113, D=64, causal=True),
    "N=200": case(H=1, N_Q=200, D=16, causal=True),
    "D=48": case(H=1, N_Q=70, D=48),
    "D=80": case(H=1, N_Q=70, D=80, causal=True),
    "D=128": case(H=1, N_Q=70, D=128),
    "D=192": case(H=1, N_Q=70, D=192, causal=True),
    "D=192 E=128": case(H=1, N_Q=70, D=192, E=128, causal=True),
    "D=256": case(H=1, N_Q=40, D=256),
    "D=16 E=48": case(N_Q=67, E=48),
    "D=64 E=16": case(N_Q=67, D=64, E=16, causal=True),
    "D=5 E=3": case(N_Q=67, D=5, E=3),
    "D=17": case(N_Q=67, D=17, causal=True),
    "heads 4/2": case(H=4, H_KV=2, N_Q=70, causal=True),
    "heads 3/1": case(H=3, H_KV=1, N_Q=70, N_KV=50),
    "heads 6/2, sinks": case(H=6, H_KV=2, N_Q=33, sinks=True),
    "bnhd": case(H=2, B=2, N_Q=70, layout="bnhd", causal=True),
    "bnhd, heads, E": case(B=2, H=4, H_KV=2, N_Q=70, E=24, layout="bnhd"),
    "fused": case(H=2, B=2, N_Q=70, layout="fused"),
    "fused, heads, causal": case(H=4, H_KV=2, N_Q=70, D=32, layout="fused", causal=True),
    "fused k, v": case(H=2, B=2, N_Q=20, N_KV=70, layout="fused"),
    "N_Q<N_KV": case(N_Q=50, N_KV=113),
    "N_Q<N_KV, bottom right": case(N_Q=50, N_KV=113, causal=True),
    "N_Q<N_KV, top left": case(N_Q=50, N_KV=113, causal=TOP_LEFT),
    "N_Q>N_KV": case(N_Q=113, N_KV=50),
    "N_Q>N_KV, bottom right": case(H=2, N_Q=113, N_KV=50, causal=True),
    "N_Q>N_KV, top left": case(N_Q=113, N_KV=50, causal=TOP_LEFT),
    "masked rows, sinks": case(H=2, N_Q=113, N_KV=50, causal=True, sinks=True),
    "masked rows, heads, softcap": case(H=4, H_KV=2, N_Q=90, N_KV=20, causal=True, softcap=3.0),
    "N_Q=1": case(N_Q=1, N_KV=113, causal=True),
    "N_Q=1, top left": case(N_Q=1, N_KV=113, causal=TOP_LEFT),
    "N_Q=1, heads": case(B=2, H=4, H_KV=1, N_Q=1, N_KV=70, layout="bnhd"),
    "N_KV=1": case(N_Q=70, N_KV=1),
    "window 0 0": case(N_Q=70, window=(0, 0)),
    "window 0 -": case(N_Q=70, window=(0, None)),
    "window - 0": case(N_Q=70, window=(None, 0)),
    "window 0 0, causal": case(N_Q=70, window=(0, 0), causal=True),
    "window 16 15": case(N_Q=130, window=(16, 15)),
    "window 33, causal": case(N_Q=130, window=(33, None), causal=True),
    "window, right ignored": case(N_Q=70, window=(20, 30), causal=True),
    "window larger than N": case(N_Q=70, window=(70, 1000)),
    "window larger than N, causal": case(N_Q=70, window=(1000, 0), causal=True),
    "window, N_Q<N_KV": case(N_Q=50, N_KV=113, window=(20, 7)),
    "window, N_Q<N_KV, bottom right": case(N_Q=50, N_KV=113, window=(20, None), causal=True),
    "window, N_Q<N_KV, top left": case(N_Q=50, N_KV=113, window=(20, None), causal=TOP_LEFT),
    "window, N_Q>N_KV": case(N_Q=113, N_KV=50, window=(20, 7)),
    "window, N_Q>N_KV, bottom right": case(N_Q=113, N_KV=50, window=(20, None), causal=True),
    "window, N_Q>N_KV, top left": case(N_Q=113, N_KV=50, window=(20, 3), causal=TOP_LEFT),
    "window, masked rows, sinks": case(N_Q=113, N_KV=50, window=(0, 0), causal=True, sinks=True),
    "softcap": case(N_Q=113, softcap=2.0, scale=1.0),
    "softcap, causal, window": case(N_Q=70, softcap=5.0, causal=True, window=(30, None), scale=0.5),
    "sinks": case(H=3, N_Q=113, sinks=True),
    "sinks, all": case(
        B=2, H=4, H_KV=2, N_Q=70, E=24, sinks=True, causal=True, window=(20, None), softcap=4.0, layout="bnhd"
    ),
    "scale": case(N_Q=70, scale=0.7, causal=True),
    "negative scale": case(N_Q=70, scale=-0.5, causal=True),
    "packed": case(H=2, D=16, lengths_q=[0, 1, 64, 0, 33, 0]),
    "packed, causal, heads": case(H=4, H_KV=2, lengths_q=[33, 1, 40], causal=True, layout="fused"),
    "packed, cross": case(lengths_q=[30, 0, 5, 1, 20], lengths_k=[20, 7, 0, 1, 40]),
    "packed, cross, bottom right": case(H=2, lengths_q=[30, 0, 5, 1, 20], lengths_k=[20, 7, 0, 1, 40], causal=True),
    "packed, cross, top left": case(lengths_q=[30, 0, 5, 1, 20], lengths_k=[20, 7, 0, 1, 40], causal=TOP_LEFT),
    "packed, everything": case(
        H=4, H_KV=2, E=24, lengths_q=[30, 0, 5, 20], lengths_k=[20, 7, 0, 40], causal=True, window=(9, None),
        softcap=4.0, sinks=True, scale=0.5,
    ),
    "packed, top left square": case(lengths_q=[30, 0, 20], causal=TOP_LEFT, window=(9, 3)),
    "packed, all empty": case(lengths_q=[0, 0], sinks=True),
}  # fmt: skip

# Only where a shape costs nothing in Python: many panels and tiles.
LONG_CASES = {
    "N=1000": case(H=1, N_Q=1000, D=64, causal=True),
    "N=600 full": case(H=2, H_KV=1, N_Q=600, D=32),
    "N=600/900, window": case(H=1, N_Q=600, N_KV=900, causal=True, window=(100, None)),
    "packed 700": case(H=1, D=48, lengths_q=[100, 0, 1, 599], causal=True),
}

# Compiled kernels at real tile sizes; odd head sizes again, because the interpreter knows no layouts.
GPU_CASES = {
    "D=64": case(B=2, H=4, N_Q=1000, D=64),
    "D=64 causal": case(B=2, H=4, N_Q=1000, D=64, causal=True),
    "D=128": case(B=2, H=4, N_Q=1024, D=128, layout="fused"),
    "D=128 causal": case(B=1, H=4, N_Q=2049, D=128, causal=True, layout="bnhd"),
    "D=192 E=128": case(B=1, H=4, N_Q=1000, D=192, E=128, causal=True),
    "D=192": case(B=1, H=2, N_Q=500, D=192, causal=True),
    "D=256": case(B=1, H=2, N_Q=1000, D=256),
    "D=256 causal": case(B=1, H=2, N_Q=1000, D=256, causal=True),
    "D=16": case(B=1, H=2, N_Q=200, D=16, causal=True),
    "D=48": case(B=1, H=2, N_Q=63, D=48),
    "D=80": case(B=1, H=2, N_Q=113, D=80, causal=True),
    "D=88 E=40": case(B=1, H=2, N_Q=300, D=88, E=40),
    "short D=64": case(B=1, H=1, N_Q=128, D=64),
    "short D=64, few": case(B=2, H=2, N_Q=77, N_KV=200, D=64, causal=True),
    "short D=64, some": case(B=4, H=8, N_Q=128, D=64),
    "short D=64, many": case(B=32, H=8, H_KV=4, N_Q=256, D=64, causal=True, layout="bnhd"),
    "short D=128": case(B=1, H=2, N_Q=100, N_KV=300, D=128, causal=TOP_LEFT),
    "short D=128, some": case(B=2, H=8, N_Q=250, D=128, layout="fused"),
    "short D=128, many": case(B=16, H=8, H_KV=1, N_Q=512, D=128, causal=True),
    "short, masked rows": case(B=2, H=2, N_Q=300, N_KV=100, D=64, causal=True),
    "heads 8/2": case(B=2, H=8, H_KV=2, N_Q=700, D=128, causal=True),
    "heads 16/1": case(B=1, H=16, H_KV=1, N_Q=300, D=64, layout="bnhd"),
    "N=1": case(B=2, H=2, N_Q=1, D=64),
    "N_Q=1": case(B=4, H=8, H_KV=2, N_Q=1, N_KV=1000, D=128, causal=True),
    "N_KV=1": case(B=2, H=2, N_Q=300, N_KV=1, D=64),
    "N_Q<N_KV, bottom right": case(H=2, N_Q=300, N_KV=1000, D=64, causal=True),
    "N_Q<N_KV, top left": case(H=2, N_Q=300, N_KV=1000, D=64, causal=TOP_LEFT),
    "N_Q>N_KV, bottom right": case(H=2, N_Q=1000, N_KV=300, D=64, causal=True),
    "N_Q>N_KV, top left": case(H=2, N_Q=1000, N_KV=300, D=64, causal=TOP_LEFT),
    "masked rows, sinks": case(H=2, N_Q=1000, N_KV=300, D=128, causal=True, sinks=True),
    "window": case(H=2, N_Q=1500, D=64, window=(100, 50)),
    "window 0 0": case(H=2, N_Q=500, D=64, window=(0, 0)),
    "window 0 -": case(H=2, N_Q=500, D=64, window=(0, None)),
    "window 128, causal": case(H=4, H_KV=2, N_Q=2000, D=64, window=(127, None), causal=True, sinks=True),
    "window, N_Q<N_KV": case(H=2, N_Q=300, N_KV=1000, D=128, window=(200, 0), causal=True),
    "window, N_Q>N_KV": case(H=2, N_Q=1000, N_KV=300, D=64, window=(50, 20)),
    "softcap": case(H=2, N_Q=1000, D=128, softcap=20.0, scale=1.0, causal=True),
    "everything": case(
        B=2, H=4, H_KV=2, N_Q=500, N_KV=700, D=64, sinks=True, causal=True, window=(300, None), softcap=30.0
    ),
    "scale": case(H=2, N_Q=500, D=64, scale=0.3),
    "negative scale": case(H=2, N_Q=500, D=64, scale=-0.2, causal=True),
    "packed": case(H=4, D=64, lengths_q=[0, 1, 999, 0, 65, 1, 2000, 0]),
    "packed, causal": case(H=4, H_KV=2, D=128, lengths_q=[700, 1, 63], causal=True, layout="bnhd"),
    "packed, cross": case(H=2, D=64, lengths_q=[300, 0, 5, 200], lengths_k=[20, 7, 0, 400], causal=True, sinks=True),
    "N_KV=0": case(N_Q=70, N_KV=0, D=64, sinks=True),
    "N_Q=0": case(N_Q=0, N_KV=70, D=64),
}  # fmt: skip

# All in bf16; in the others, where the code differs.
GPU_RUNS = [("bf16", name) for name in GPU_CASES] + [
    (dtype, name)
    for dtype in ("fp16", "fp32")
    for name in (
        "short D=64",
        "short D=64, many",
        "D=64 causal",
        "D=128",
        "D=192 E=128",
        "D=256 causal",
        "D=80",
        "heads 8/2",
        "everything",
        "packed",
    )
]


def usable(backend: str, x: testing.Inputs) -> tuple[str, ...]:
    """The results whose gradients `backend` has for this call; a skip with its own sentence if it has none."""
    kernel = dispatch.kernels("flash")[backend]
    if kernel.supports(x.spec(with_lse=True, needs_grad=True)) is None:
        return ("o", "lse")
    for spec in (x.spec(needs_grad=True), x.spec(with_lse=True)):
        if (why := kernel.supports(spec)) is not None:
            pytest.skip(why)
    return ("o",)


def check(backend: str, x: testing.Inputs, use: tuple[str, ...] | None = None) -> testing.Outputs:
    have = usable(backend, x)
    if use is not None and not set(use) <= set(have):
        pytest.skip(f"{backend} has no gradient of lse")
    return testing.check(x, backend, use or have)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "dtype"), [(b, d) for b in BACKENDS for d in DTYPES if (b, d) not in SAME])
def test_against_fp64(backend, dtype, case):
    check(backend, testing.inputs(**CASES[case], dtype=DTYPES[dtype]))


@pytest.mark.parametrize("case", LONG_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", [b for b in PLAIN if b != "reference"])
def test_long_against_fp64(backend, dtype, case):
    check(backend, testing.inputs(**LONG_CASES[case], dtype=DTYPES[dtype]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_sequences(backend):
    x = testing.inputs(H=2, D=16, lengths_q=[], dtype=torch.float16)
    usable(backend, x)
    o, lse = testing.backend(backend)(x)
    assert (o.shape, lse.shape) == ((1, 2, 0, 16), (1, 2, 0))


@pytest.mark.parametrize("use", [("o",), ("lse",), ("o", "lse")], ids=["only o", "only lse", "both"])
@pytest.mark.parametrize("kind", ["batch", "packed", "sinks and masked rows"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_which_results_are_used(backend, kind, use):
    options = {
        "batch": case(H=2, H_KV=1, N_Q=50, N_KV=70),
        "packed": case(lengths_q=[30, 0, 20]),
        "sinks and masked rows": case(N_Q=70, N_KV=30, sinks=True),
    }[kind]
    check(backend, testing.inputs(**options, causal=kind != "batch", dtype=torch.float16), use)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend, causal, dtype):
    """One key takes nearly all the weight of a row, and exp of a logit would overflow."""
    x = testing.inputs(1, 2, 113, 64, causal=causal, dtype=DTYPES[dtype])
    x = x._replace(q=x.q * 30)
    out = check(backend, x)
    assert out.lse.max() > 90


# ---------------------------------------------------------------------------------------------- strides


def gradients_of_views(x: testing.Inputs, kind: str) -> testing.Inputs:
    """`x` with gradients as autograd hands them over: expanded ones of a sum, transposed ones of a .mT."""
    if kind == "expanded":
        return x._replace(**{n: getattr(x, n).new_ones(()).expand_as(getattr(x, n)) for n in ("do", "dlse")})
    return x._replace(do=x.do.mT.contiguous().mT, dlse=x.dlse.mT.contiguous().mT)


@pytest.mark.parametrize("kind", ["expanded", "transposed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_incoming_gradients(backend, kind):
    x = testing.inputs(1, 2, 70, 16, causal=True, dtype=torch.float16)
    check(backend, gradients_of_views(x, kind))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sum_backward(backend):
    """The same through the ordinary interface: .sum() sends back a stride-0 tensor."""
    x = testing.inputs(1, 2, 70, 16, causal=True, dtype=torch.float16)
    usable(backend, x)
    q, k, v = (y.clone().requires_grad_() for y in (x.q, x.k, x.v))
    o, _ = testing.backend(backend, with_lse=False)(x._replace(q=q, k=k, v=v))
    o.sum().backward()
    ones = gradients_of_views(x, "expanded")
    want = testing.evaluate(testing.backend(backend, with_lse=False), ones._replace(do=ones.do.contiguous()), ("o",))
    for name, y in (("dq", q), ("dk", k), ("dv", v)):
        assert torch.equal(y.grad, getattr(want, name)), name


@pytest.mark.parametrize("argument", ["q", "k", "v", "sinks", "cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_arguments(backend, argument):
    """Views that are not contiguous: every other row of a larger tensor."""
    packed = {"lengths_q": [30, 40], "lengths_k": [50, 20]} if argument.startswith("cu") else {}
    x = testing.inputs(1, 2, 70, 16, causal=True, sinks=argument == "sinks", dtype=torch.float16, **packed)
    y = getattr(x, argument)
    dim = 0 if y.ndim == 1 else y.ndim - 2
    spread = y.repeat_interleave(2, dim)
    spread.index_fill_(dim, torch.arange(1, spread.shape[dim], 2), 3)  # what must not be read
    view = spread.transpose(dim, -1)[..., ::2].transpose(dim, -1)
    assert not view.is_contiguous()
    check(backend, x._replace(**{argument: view}))


@pytest.mark.parametrize("backend", BACKENDS)
def test_broadcast_operands(backend):
    """Expanded over batch and rows (stride 0) is legal: only the last dimension must be contiguous."""
    x = testing.inputs(2, 2, 70, 16, causal=True, dtype=torch.float16)
    check(backend, x._replace(q=x.q[:1].expand_as(x.q), v=x.v[:, :, :1].expand_as(x.v)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_start_anywhere(backend):
    """Rows of 16 numbers, 17 apart, from the third on: no address is a multiple of 16 bytes."""
    x = testing.inputs(1, 2, 70, 16, causal=True, dtype=torch.float16)
    odd = {}
    for name in ("q", "k", "v", "do"):
        wide = getattr(x, name).new_full((1, 2, 70, 17), 3.0)
        odd[name] = wide[..., 1:].copy_(getattr(x, name))
    check(backend, x._replace(**odd))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_heads_are_summed_in_fp32(backend):
    """32 query heads on one stored head, in fp16: partial sums rounded to fp16 would show."""
    check(backend, testing.inputs(1, 32, 33, 16, H_KV=1, dtype=torch.float16, causal=True))


# -------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "case"), GPU_RUNS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_gpu(backend, dtype, case):
    check(backend, testing.inputs(**GPU_CASES[case], dtype=DTYPES[dtype], device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["expanded", "transposed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_incoming_gradients_on_gpu(backend, kind):
    x = testing.inputs(2, 2, 600, 64, causal=True, dtype=torch.bfloat16, device="cuda")
    check(backend, gradients_of_views(x, kind))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["spread", "broadcast", "anywhere"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_arguments_on_gpu(backend, kind):
    x = testing.inputs(2, 2, 300, 64, causal=True, dtype=torch.bfloat16, device="cuda")
    if kind == "broadcast":
        x = x._replace(q=x.q[:1].expand_as(x.q), v=x.v[:, :, :1].expand_as(x.v))
    else:
        shape, part = ((2, 2, 300, 128), slice(64)) if kind == "spread" else ((2, 2, 300, 65), slice(1, None))
        views = {n: x.q.new_full(shape, 3.0)[..., part].copy_(getattr(x, n)) for n in ("q", "k", "v", "do")}
        x = x._replace(**views)
    check(backend, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_on_gpu(backend, dtype):
    x = testing.inputs(1, 2, 1000, 128, causal=True, dtype=DTYPES[dtype], device="cuda")
    check(backend, x._replace(q=x.q * 30))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", ["D=64", "D=64 causal", "D=128 causal", "D=192 E=128", "D=256", "D=80", "D=88 E=40",
                                  "heads 8/2", "N=1", "N_Q=1", "N_Q<N_KV, top left", "N_Q>N_KV, top left"])  # fmt: skip
@pytest.mark.parametrize("implementation", sdpa.ON_CUDA)
def test_each_implementation_of_sdpa(implementation, case, dtype):
    """Also those that are not the first choice for a call."""
    x = testing.inputs(**GPU_CASES[case], dtype=DTYPES[dtype], device="cuda")
    spec = x.spec(needs_grad=True)
    for why in (sdpa.supports(spec), sdpa.unsupported_reason(spec, hardware.of(spec.device), implementation)):
        if why is not None:
            pytest.skip(why)
    tensors = Residuals(x.q, x.k, x.v)
    o, lse = sdpa.forward(spec, tensors, implementation=implementation)
    gradients = sdpa.backward(spec, tensors, o, lse, x.do, None, implementation=implementation)
    testing.compare(x, testing.Outputs(o, lse, *gradients), ("o",))
    alone, nothing = sdpa.forward(spec._replace(needs_grad=False), tensors, implementation=implementation)
    assert nothing is None
    testing.compare(x, testing.Outputs(alone, lse, *gradients), ("o",))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("do_layout", ["bhnd", "bnhd"])
def test_cudnn_gets_o_and_do_in_the_order_of_q(monkeypatch, layout, do_layout):
    """torch keeps cuDNN's backward by the strides of q, k and v alone: another order of do would be read wrong."""
    x = testing.inputs(2, 3, 16, D=16, E=8, layout=layout, dtype=torch.bfloat16)
    o, do = (testing.inputs(2, 3, 16, D=16, E=8, layout=do_layout, dtype=torch.bfloat16).do for _ in range(2))
    lse, seen = torch.zeros(2, 3, 16), []

    def cudnn(do, q, k, v, o, *rest, **options):
        seen.extend([o, do])
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    fake = SimpleNamespace(_scaled_dot_product_cudnn_attention_backward=SimpleNamespace(default=cudnn))
    monkeypatch.setattr(sdpa, "aten", fake)
    given = x.spec(needs_grad=True), Residuals(x.q, x.k, x.v), o, lse, do, None, "cudnn"
    sdpa.backward(*given)
    strides = testing.inputs(2, 3, 16, D=16, E=8, layout=layout, dtype=torch.bfloat16).do.stride()
    assert [t.stride() for t in seen] == [strides, strides]
    assert torch.equal(seen[0], o)
    assert torch.equal(seen[1], do)
    assert (sdpa.prepare_backward(*given) is None) == (layout != do_layout)
