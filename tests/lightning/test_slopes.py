"""The gradient of the decay: against the definition in fp64, by the tolerance of the other gradients.

It does not depend on the backend that computes the rest: those that are interpreted here run one case each.
"""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch
from fulmen.lightning import eager, slopes
from fulmen.lightning.spec import spec_of
from fulmen.testing import lightning as testing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BACKENDS = sorted(name for name, kernel in dispatch.kernels("lightning").items() if kernel.backward is not None)
CASES = {
    "one chunk": {"B": 2, "H": 5, "N": 40, "D": 16},
    "chunks and a rest": {"B": 2, "H": 5, "N": 200, "D": 16, "scale": 0.7},
    "whole chunks": {"B": 1, "H": 5, "N": 192, "D": 16, "initial_state": True},
    "one row": {"B": 2, "H": 5, "N": 1, "D": 16, "initial_state": True},
    "no rows": {"B": 2, "H": 5, "N": 0, "D": 16, "initial_state": True},
    "states": {"B": 2, "H": 5, "N": 150, "D": 16, "initial_state": True, "scale": -0.5},
    "fewer heads of k and v": {"B": 1, "H": 4, "H_KV": 2, "N": 130, "D": 16},
    "E != D": {"B": 1, "H": 3, "N": 70, "D": 24, "E": 40, "layout": "fused"},
    "packed": {"H": 5, "D": 16, "lengths": [70, 0, 1, 66, 64, 0, 128, 63, 0], "initial_state": True},
    "packed, no states": {"H": 2, "D": 16, "lengths": [1, 1, 0, 5], "layout": "bnhd"},
    "packed, all empty": {"H": 2, "D": 16, "lengths": [0, 0], "initial_state": True},
}
GPU_CASES = {
    "states": {"B": 2, "H": 5, "N": 1500, "D": 64, "initial_state": True, "scale": 0.7},
    "D=128": {"B": 1, "H": 5, "N": 777, "D": 128, "layout": "bnhd"},
    "many heads": {"B": 2, "H": 40, "N": 600, "D": 64},
    "packed": {"H": 5, "D": 64, "lengths": [700, 0, 1, 66, 1300, 0], "initial_state": True},
    "packed, D=128": {"H": 5, "D": 128, "lengths": [1, 64, 0, 513], "initial_state": True},
}


def inputs(dtype: str = "fp32", device: str = "cpu", decay: str = "mixed", **options) -> testing.Inputs:
    x = testing.inputs(**options, decay=decay, dtype=DTYPES[dtype], device=device)
    return x._replace(decay=x.decay.requires_grad_())


def check(x: testing.Inputs, backend: str, use=("o", "state")) -> None:
    why = dispatch.reasons("lightning", spec_of(x.q, x.k, x.v, x.decay, **x.options()))[backend]
    if why is not None:
        pytest.skip(why)
    assert testing.check(x, backend, use).ddecay is not None


@pytest.mark.parametrize("case", CASES)
def test_the_terms_add_up(case):
    """Two ways to the exact gradient: PyTorch through the definition, and the formula."""
    x = inputs(**CASES[case])
    for use in (("o",), ("state",), ("o", "state")):
        by_autograd, terms = testing.reference(x, use).ddecay, testing.decay_terms(x, use)
        torch.testing.assert_close(terms.sum(1), by_autograd, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_definition(dtype, case):
    check(inputs(dtype, **CASES[case]), "eager")


@pytest.mark.parametrize("use", [("o",), ("state",)], ids=["only o", "only state"])
@pytest.mark.parametrize("case", ["states", "packed"])
def test_only_one_result_used(case, use):
    check(inputs(**CASES[case]), "eager", use)


@pytest.mark.parametrize("case", ["one chunk", "packed, no states"])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "eager"])
def test_with_other_backends(backend, case):
    check(inputs(**CASES[case]), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_gpu(backend, dtype, case):
    check(inputs(dtype, "cuda", **GPU_CASES[case]), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["states", "packed"])
def test_no_synchronisation(case):
    """Also packed: where sequences begin is worked out on the device."""
    x = inputs("bf16", "cuda", **GPU_CASES[case])
    testing.evaluate(testing.backend("auto"), x)  # compile first
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        testing.evaluate(testing.backend("auto"), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("decay", ["zero", "steep"])
@pytest.mark.parametrize("case", ["states", "packed"])
def test_none_and_steep_decay(case, decay):
    """Without decay every row counts with its full age; of a steep one exp(-40) is left of a row's neighbour."""
    check(inputs(decay=decay, **CASES[case]), "eager")


@pytest.mark.parametrize("case", ["states", "packed"])
def test_panels_do_not_matter(case, monkeypatch):
    """One chunk a panel: the same sums, in fp64, of the same products."""
    x = inputs(**CASES[case])
    once = testing.evaluate(testing.backend("eager"), x).ddecay
    monkeypatch.setattr(eager, "PANEL_BYTES", 1)
    again = testing.evaluate(testing.backend("eager"), x).ddecay
    terms = testing.decay_terms(x).norm(dim=1)
    assert ((once - again).abs() <= torch.finfo(torch.float32).eps * terms).all()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(default):
    """Under which models are loaded: a scale that it rounds would be wrong."""
    x = inputs(**CASES["chunks and a rest"])
    want = testing.evaluate(testing.backend("eager"), x).ddecay
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(testing.evaluate(testing.backend("eager"), x).ddecay, want)
    finally:
        torch.set_default_dtype(before)


def test_long_and_slow_decay():
    """(t - j) is large where little has decayed: the sum is not one of large numbers that cancel."""
    x = testing.inputs(1, 2, 3000, 16, decay=torch.tensor([1e-4, 0.5]))
    check(x._replace(decay=x.decay.requires_grad_()), "eager")


def test_rows_of_no_sequence_and_foreign_rows_may_be_no_numbers():
    """Chunks are filled up with rows that are not theirs."""
    x = inputs(H=2, D=16, lengths=[10, 70, 5])
    clean = testing.evaluate(testing.backend("eager"), x).ddecay
    spoilt = {}
    for name in ("q", "k", "v", "do"):
        spoilt[name] = getattr(x, name).clone()
        spoilt[name][:, :, 10:80] = float("nan")
    x = x._replace(**spoilt)
    dirty = slopes.gradient(
        spec_of(x.q, x.k, x.v, x.decay, **x.options()), as_residuals(x, [0, 10, 10, 10]), x.do, None
    )
    assert dirty.isfinite().all()
    assert not torch.equal(dirty, clean)


def as_residuals(x: testing.Inputs, ends: list[int]):
    from fulmen.lightning.spec import Residuals

    return Residuals(x.q, x.k, x.v, x.decay.detach(), None, torch.tensor(ends, dtype=torch.int32))


def test_who_pays(monkeypatch):
    calls, real = [], slopes.gradient
    monkeypatch.setattr(slopes, "gradient", lambda *a: calls.append(0) or real(*a))
    x = testing.inputs(1, 3, 40, 16, decay="mixed")
    q = x.q.requires_grad_()
    fulmen.lightning_attention(q, x.k, x.v, x.decay).sum().backward()
    with torch.no_grad():
        fulmen.lightning_attention(q, x.k, x.v, x.decay.clone().requires_grad_())
    assert not calls, "nobody asked for it"
    wide = x.decay.view(3, 1, 1).clone().requires_grad_()
    o = fulmen.lightning_attention(x.q.detach(), x.k, x.v, wide)
    assert torch.autograd.grad(o.sum(), wide)[0].shape == (3, 1, 1)
    assert calls == [0]


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_compiled(packed):
    x = inputs(H=2, D=16, **({"lengths": [30, 0, 40]} if packed else {"N": 70}), initial_state=True)
    attend = testing.backend("auto")
    want = testing.evaluate(attend, x)
    got = testing.evaluate(torch.compile(attend, fullgraph=True, backend="aot_eager"), x)
    assert torch.equal(got.ddecay, want.ddecay)
    assert torch.equal(got.dq, want.dq)


@pytest.mark.parametrize("case", ["states", "packed"])
def test_opcheck(case):
    x = inputs(**CASES[case])
    tensors = (x.q, x.k, x.v, x.decay.detach(), x.initial_state, x.cu_seqlens, x.do)
    for dstate in (None, x.dstate):
        torch.library.opcheck(torch.ops.fulmen.lightning_backward.default, (*tensors, dstate, x.scale, True, "auto"))


def test_no_second_derivative():
    x = inputs(N=20, H=2, D=16)
    decay = x.decay
    o = fulmen.lightning_attention(x.q.requires_grad_(), x.k, x.v, decay)
    (first,) = torch.autograd.grad(o.sum(), decay, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("shape", [(3,), (2, 3, 9)], ids=str)
def test_a_decay_in_fp64(shape):
    """Of q in fp64: outputs, states and gradients are exact to its last digits."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, size, dtype=torch.float64, requires_grad=True) for size in (4, 4, 5))
    decay = (torch.rand(shape, dtype=torch.float64) + 0.1).requires_grad_()

    def attend(q, k, v, decay):
        return fulmen.lightning_attention_with_state(q, k, v, decay, backend="eager")

    assert torch.autograd.gradcheck(attend, (q, k, v, decay), fast_mode=True)
    want = fulmen.lightning_attention_with_state(q, k, v, decay, backend="reference")
    torch.testing.assert_close(attend(q, k, v, decay), want, rtol=1e-12, atol=1e-13)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(q, k, v, decay)[0].sum(), (q, k, v, decay)) for f in (attend, compiled)]
    torch.testing.assert_close(*grads)
    with pytest.raises(ValueError, match=r"decay is torch.float64, must be float32$"):
        attend(q.float(), k.float(), v.float(), decay)
    with pytest.raises(ValueError, match=r"decay is torch.float16, must be float32 or q's torch.float64"):
        attend(q, k, v, decay.half())


@torch.no_grad()
def test_steps_with_a_decay_in_fp64():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, size, dtype=torch.float64) for size in (4, 4, 5))
    decay, state = torch.rand(2, 3, 9, dtype=torch.float64), torch.zeros(2, 3, 4, 5, dtype=torch.float64)
    draft = tuple(torch.zeros(2, 3, 8, n, dtype=torch.float64) for n in (4, 5))
    stored, accepted, o = torch.zeros(2, 3, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int32), []
    for t in range(0, 9, 3):
        part = slice(t, t + 3)
        o.append(fulmen.lightning_step(
            q[:, :, part], k[:, :, part], v[:, :, part], decay[:, :, part], state, draft=(*draft, stored),
            accepted=accepted.fill_(min(t, 3)),
        ))  # fmt: skip
    torch.testing.assert_close(torch.cat(o, 2), fulmen.lightning_attention(q, k, v, decay), rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match=r"draft\[2\] has .* of torch.float64"):
        fulmen.lightning_step(
            q[:, :, :1], k[:, :, :1], v[:, :, :1], decay[:, :, :1], state, draft=(*draft, stored.float()),
            accepted=accepted,
        )  # fmt: skip
