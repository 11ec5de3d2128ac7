"""Every wrong argument of a step has one error that names it and says what would work. Nothing is silently cast."""

from __future__ import annotations

import re

import pytest
import torch

import fulmen
from fulmen import dispatch, hardware
from fulmen.step.spec import StepSpec
from fulmen.testing import step as testing

GOOD = testing.inputs(2, 4, 2, 16, E=24, H_KV=2, pool=3, slots=(2, 0), draft=True, decay="mixed")
META, CUDA = torch.device("meta"), torch.device("cuda", 0)
DRAFT_K, DRAFT_V = GOOD.draft


def call(**changes):
    x = GOOD.clone()._replace(**changes)
    return fulmen.lightning_step(
        x.q, x.k, x.v, x.decay, x.state, slots=x.slots, draft=x.draft, accepted=x.accepted, scale=x.scale
    )


def change(**arguments):
    return arguments


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# argument -> a value for it, and what the message must say (all of it)
WRONG = {
    "q of rank 3": (change(q=GOOD.q[0]), ["q has 3 dimensions"]),
    "q is no tensor": (change(q=[1.0]), ["q is a list", "torch.Tensor"]),
    "B of k": (change(k=GOOD.k[:1]), ["k must share B=2", "k (1, 2, 2, 16)"]),
    "T of v": (change(v=GOOD.v[:, :, :1]), ["v must share B=2 and N=2"]),
    "no tokens": (change(**{n: getattr(GOOD, n)[:, :, :0] for n in "qkv"}), ["q has T=0 tokens", "1 to 8"]),
    "9 tokens": (
        change(**{n: getattr(GOOD, n).repeat(1, 1, 5, 1)[:, :, :9] for n in "qkv"}),
        ["q has T=9 tokens", "1 to 8", "lightning_attention_with_state"],
    ),
    "D too large": (change(q=torch.ones(2, 4, 2, 257), k=torch.ones(2, 2, 2, 257)), ["head dims must be 1 to 256"]),
    "dtype of k": (change(k=GOOD.k.half()), ["k is torch.float16", "q's torch.float32"]),
    "strides of q": (change(q=GOOD.q.mT.contiguous().mT), ["q's last dimension", ".contiguous()"]),
    "zero scale": (change(scale=0.0), ["scale=0.0"]),
    "decay shape": (change(decay=torch.ones(2)), ["decay has shape (2,)", "H=4"]),
    "decay dtype": (change(decay=torch.ones(4).half()), ["decay is torch.float16", "float32"]),
    "negative decay": (change(decay=-torch.ones(4)), ["decay must be finite and >= 0"]),
    "state is missing": (change(state=None), ["state is a NoneType", "torch.Tensor"]),
    "state rank": (change(state=GOOD.state[0]), ["state has shape (4, 16, 24)", "(slots, H, D, E) = (slots, 4,"]),
    "state transposed": (change(state=GOOD.state.mT), ["state has shape (3, 4, 24, 16)"]),
    "state dtype": (change(state=GOOD.state.half()), ["state is torch.float16", "float32 or torch.bfloat16"]),
    "state device": (change(state=GOOD.state.to(META)), ["state is on meta", "q's cpu"]),
    "state strides": (change(state=GOOD.state.mT.contiguous().mT), ["state[i] must be contiguous", "in place"]),
    "state repeated": (change(state=GOOD.state[:1].expand(3, -1, -1, -1)), ["no two may overlap", "(0, 384, 24, 1)"]),
    "state negated": (change(state=torch._neg_view(GOOD.state)), ["state is a negated view", "resolve_neg"]),
    "slots shape": (change(slots=ints(0)), ["slots has shape (1,)", "(B,) = (2,)"]),
    "slots dtype": (change(slots=ints(0, 1).long()), ["slots is torch.int64", "int32"]),
    "slots device": (change(slots=ints(0, 1).to(META)), ["slots is on meta", "q's cpu"]),
    "slots twice": (change(slots=ints(1, 1)), ["slots must differ", "[1, 1]"]),
    "too few slots": (
        change(slots=None, state=GOOD.state[:1], draft=(DRAFT_K[:1], DRAFT_V[:1])),
        ["state has 1 slots for B=2 rows"],
    ),
    "draft alone": (change(accepted=None), ["draft and accepted go together"]),
    "accepted alone": (change(draft=None), ["draft and accepted go together"]),
    "draft of one": (change(draft=DRAFT_K), ["draft is a Tensor", "tuple (k, v)"]),
    "draft of three": (change(draft=(DRAFT_K, DRAFT_V, DRAFT_V)), ["draft is a tuple", "two tensors"]),
    "draft of four": (change(draft=(DRAFT_K,) * 4), ["draft is a tuple", "(k, v, decay) of three"]),
    "draft without decays": (change(decay=torch.ones(2, 4, 2)), ["draft must be (k, v, decay)", "(3, 4, 8)"]),
    "draft of other decays": (
        change(decay=torch.ones(2, 4, 2), draft=(*GOOD.draft, torch.ones(3, 4, 2))), ["draft[2] has", "(3, 4, 8)"]),
    "decay of other tokens": (change(decay=torch.ones(2, 4, 3)), ["decay has shape (2, 4, 3)", "= (2, 4, 2)"]),
    "draft of numbers": (change(draft=(1, 2)), ["draft[0] is a int"]),
    "draft k shape": (
        change(draft=(DRAFT_K[:, :, :7], DRAFT_V)),
        ["draft[0] has shape (3, 2, 7, 16)", "(slots, H_KV, 8, D)"],
    ),
    "draft v shape": (change(draft=(DRAFT_K, DRAFT_K)), ["draft[1] has shape (3, 2, 8, 16)", "= (3, 2, 8, 24)"]),
    "draft slots": (change(draft=(DRAFT_K[:2], DRAFT_V)), ["draft[0] has shape (2, 2, 8, 16)"]),
    "draft dtype": (change(draft=(DRAFT_K.half(), DRAFT_V)), ["draft[0] is torch.float16", "torch.float32"]),
    "draft strides": (change(draft=(DRAFT_K, DRAFT_V.mT.contiguous().mT)), ["draft[1][i] must be contiguous"]),
    "draft device": (change(draft=(DRAFT_K, DRAFT_V.to(META))), ["draft[1] is on meta"]),
    "accepted shape": (change(accepted=ints(1, 1, 1)), ["accepted has shape (3,)", "(B,) = (2,)"]),
    "accepted dtype": (change(accepted=ints(1, 1).long()), ["accepted is torch.int64", "int32"]),
}  # fmt: skip


def test_the_unchanged_arguments_are_good():
    assert call().shape == (2, 4, 2, 24)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_argument(what):
    changes, words = WRONG[what]
    with pytest.raises(ValueError) as error:  # noqa: PT011  the words are checked below
        call(**changes)
    for word in words:
        assert word in str(error.value)


def test_values_are_checked_at_every_call():
    """Also where a plan is there already."""
    for _ in range(3):
        call()
        with pytest.raises(ValueError, match="slots must differ"):
            call(slots=ints(1, 1))
        with pytest.raises(ValueError, match="decay must be finite"):
            call(decay=-torch.ones(4))


def test_rows_without_a_slot_need_not_differ():
    """Any number that is no slot is padding."""
    for slots in (ints(-1, -1), ints(3, 3), ints(7, 7)):
        assert not call(slots=slots).any()


def test_a_wrong_call_changes_nothing():
    x = GOOD.clone()
    with pytest.raises(ValueError, match="backend='fast': step has"):
        fulmen.lightning_step(x.q, x.k, x.v, x.decay, x.state, slots=x.slots, backend="fast")
    assert torch.equal(x.state.nan_to_num(7.0), GOOD.state.nan_to_num(7.0))


@pytest.mark.parametrize("backend", [3, None])
def test_a_backend_that_is_no_name(backend):
    with pytest.raises(ValueError, match=f"backend={backend}: step has"):
        fulmen.lightning_step(GOOD.q, GOOD.k, GOOD.v, GOOD.decay, GOOD.state, slots=GOOD.slots, backend=backend)


@pytest.mark.parametrize("name", ["q", "v", "state", "decay"])
def test_gradients_are_refused(name):
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"no gradient: call it under torch.no_grad\(\)"):
            call(**{name: getattr(GOOD, name).detach().clone().requires_grad_()})
        with torch.no_grad():
            call(**{name: getattr(GOOD, name).detach().clone().requires_grad_()})


def spec(**changes) -> StepSpec:
    return StepSpec(1, 2, 2, 1, 16, 16, torch.float32, torch.device("cpu"), slots=1)._replace(**changes)


SENTENCES = [
    (spec(dtype=torch.float64), {}, "computes in fp32 at most, and q is float64"),
    (spec(device=CUDA), {"fulmen.hardware.of": lambda device: hardware.Hardware(75, 40, 65_536, 4 << 20, "a T4")},
     "needs compute capability 8.0 or later, this GPU has 7.5"),
    (spec(dtype=torch.bfloat16), {"triton.knobs.runtime.interpret": True}, "Triton's interpreter has no bf16 products"),
    (spec(), {"triton.knobs.runtime.interpret": False},
     "needs a CUDA GPU (or, to test, Triton's interpreter), and the device is cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "facts", "sentence"), SENTENCES, ids=[s for *_, s in SENTENCES])
def test_what_triton_cannot(asked, facts, sentence, monkeypatch):
    for name, value in facts.items():
        monkeypatch.setattr(name, value)
    dispatch.pick.cache_clear()
    with pytest.raises(NotImplementedError, match=re.escape(f"backend='triton' cannot serve this call: {sentence}")):
        dispatch.pick("step", asked, "triton")
    dispatch.pick.cache_clear()


def test_a_draft_with_decays_says_that_a_decay_is_of_tokens():
    """(1, 1, 1) is the shape of a decay of heads and of tokens: with one head, row and token."""
    q, state, drafts = torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 8, 4)
    decays, accepted = torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int32)
    decay = torch.full((1, 1, 1), 0.5)
    fulmen.lightning_step(q, q, q, decay, state, draft=(drafts, drafts.clone(), decays), accepted=accepted)
    assert decays[0, 0].tolist() == [0.5, *[0.0] * 7]
