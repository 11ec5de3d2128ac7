"""The gradient of the decay: against the definition, differentiated by PyTorch in fp64."""

from __future__ import annotations

import pytest
import torch

import fulmen
from fulmen import dispatch
from fulmen.lightning import eager
from fulmen.testing import lightning as testing

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = {
    "one chunk": {"N": 40},
    "chunks and a rest": {"N": 200},
    "one row": {"N": 1},
    "states": {"N": 150, "initial_state": True},
    "fewer heads of k and v": {"N": 130, "H": 4, "H_KV": 2},
    "E != D": {"N": 70, "D": 24, "E": 40},
    "packed": {"lengths": [70, 0, 1, 66], "initial_state": True},
}


def gradients(x: testing.Inputs, backend: str, dtype: torch.dtype | None = None):
    """(of q, of the decay) by one backend, through o and the final state."""
    kind = x.q.dtype if dtype is None else dtype
    states = torch.float64 if kind == torch.float64 else torch.float32
    q, k, v, do = (t.detach().to(kind).requires_grad_() for t in (x.q, x.k, x.v, x.do))
    slopes = x.decay.detach().clone().requires_grad_()
    initial = None if x.initial_state is None else x.initial_state.to(states)
    o, state = fulmen.lightning_attention_with_state(
        q, k, v, slopes, scale=0.7, initial_state=initial, cu_seqlens=x.cu_seqlens, backend=backend
    )
    return torch.autograd.grad([o, state], [q, slopes], [do.detach(), x.dstate.to(state.dtype)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "backend"), [*((case, "eager") for case in CASES), ("states", "triton"), ("states", "triton_split")]
)
def test_against_the_definition(case, backend, device):
    options = {"B": 2, "H": 3, "D": 16, "decay": "mixed", **CASES[case]}
    if "lengths" in options:
        options.pop("B")
        if device == "cuda":
            pytest.skip("refused on a GPU: see below")
    x = testing.inputs(**options, device=device)
    why = dispatch.reasons("lightning", fulmen.lightning.op.spec_of(x.q, x.k, x.v, x.decay))[backend]
    if why is not None:
        pytest.skip(why)
    exact = gradients(x, "reference", torch.float64)
    found = gradients(x, backend)
    for got, want in zip(found, exact, strict=True):
        assert (got.double() - want).norm() <= 2e-5 * want.norm()
    assert found[1].dtype == torch.float32


def test_panels_do_not_matter(monkeypatch):
    x = testing.inputs(2, 3, 300, 16, decay="mixed", initial_state=True)
    once = gradients(x, "eager")[1]
    monkeypatch.setattr(eager, "PANEL_BYTES", 1)
    torch.testing.assert_close(gradients(x, "eager")[1], once, rtol=1e-5, atol=1e-5)


def test_long_and_slow_decay():
    """(t - j) is large where little has decayed: the sum is not one of large numbers that cancel."""
    x = testing.inputs(1, 2, 3000, 16, decay=torch.tensor([1e-4, 0.5]))
    exact, found = gradients(x, "reference", torch.float64)[1], gradients(x, "eager")[1]
    assert ((found - exact).abs() <= 2e-5 * exact.abs()).all()


def test_shape_and_who_pays(monkeypatch):
    from fulmen.lightning import slopes

    x = testing.inputs(1, 3, 40, 16, decay="mixed")
    q = x.q.requires_grad_()
    calls = []
    real = slopes.gradient
    monkeypatch.setattr(slopes, "gradient", lambda *a: calls.append(0) or real(*a))
    fulmen.lightning_attention(q, x.k, x.v, x.decay).sum().backward()
    assert not calls, "nobody asked for it"
    wide = x.decay.view(3, 1, 1).clone().requires_grad_()
    o = fulmen.lightning_attention(x.q.detach(), x.k, x.v, wide)
    assert torch.autograd.grad(o.sum(), wide)[0].shape == (3, 1, 1)
    assert calls == [0]


def test_compiled():
    x = testing.inputs(1, 2, 70, 16, decay="mixed")
    slopes = x.decay.clone().requires_grad_()

    def loss(s):
        return (fulmen.lightning_attention(x.q, x.k, x.v, s) * x.do).sum()

    want = torch.autograd.grad(loss(slopes), slopes)[0]
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(slopes), slopes)[0]
    torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_packed_on_a_gpu_is_refused():
    x = testing.inputs(H=2, D=16, lengths=[30, 10], decay="mixed", device="cuda")
    with pytest.raises(NotImplementedError, match=r"would read cu_seqlens on the host.*decay.detach\(\)"):
        fulmen.lightning_attention(x.q, x.k, x.v, x.decay.requires_grad_(), cu_seqlens=x.cu_seqlens)
