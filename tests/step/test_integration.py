"""Decoding steps inside PyTorch: the operator's schema, compilers, modes, CUDA graphs, plans, memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fulmen
from fulmen import dispatch, plans
from fulmen.step.op import _planned
from fulmen.step.spec import Tensors
from fulmen.testing import step as testing

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = {
    "plain": {},
    "slots": {"slots": (3, -1), "pool": 4, "decay": "mixed"},
    "draft": {"slots": (1, 2), "pool": 3, "draft": True, "decay": "mixed", "T": 3},
    "bf16 states": {"decay": "mixed", "state_dtype": torch.bfloat16},
    "token decay": {"decay": "token", "T": 2, "draft": True, "groups": 2},
}


def step(x: testing.Inputs, backend: str = "auto") -> torch.Tensor:
    return fulmen.lightning_step(
        x.q, x.k, x.v, x.decay, x.state, slots=x.slots, draft=x.draft, accepted=x.accepted, scale=x.scale,
        backend=backend,
    )  # fmt: skip


def same(a: testing.Inputs, b: testing.Inputs) -> None:
    pools = ((a.state, b.state), *zip(a.draft or (), b.draft or (), strict=True))
    for x, y in pools:
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, layout, device):
    x = testing.inputs(2, 4, **{"T": 2} | KINDS[kind], layout=layout, device=device)
    for t in (x.state, *(x.draft or ())):  # NaN in free slots would never be equal
        t.nan_to_num_(0.0)
    draft = x.draft or (None, None)
    args = (x.q, x.k, x.v, x.decay, x.state, x.slots, *draft[:2], x.accepted, x.scale, "auto", *draft[2:])
    torch.library.opcheck(torch.ops.fulmen.lightning_step.default, args)


def test_the_schema_says_what_changes():
    schema = torch.ops.fulmen.lightning_step.default._schema
    changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert changed == ["state", "draft_k", "draft_v", "draft_decay"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, device):
    x = testing.inputs(2, 4, **KINDS[kind], device=device)
    a, b = x.clone(), x.clone()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for _ in range(3):
        assert torch.equal(compiled(a), step(b))
        same(a, b)


def test_compiled_for_other_numbers_of_heads_and_tokens():
    """Of later calls the compiler knows these numbers by a symbol alone."""
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for kind in ("plain", "token decay", "draft"):
        x = testing.inputs(2, 4, **KINDS[kind])
        a, b = x.clone(), x.clone()
        assert torch.equal(compiled(a), step(b))
        same(a, b)


def test_compiled_refuses_gradients():
    x = testing.inputs()
    with pytest.raises(Exception, match="no gradient"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(x._replace(q=x.q.requires_grad_()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_repeated_calls_take_the_plan(kind, device):
    """The first call, the prepared one and those after it do the same to pools at any address."""
    plans.clear()
    x = testing.inputs(2, 4, **KINDS[kind], device=device)
    eager = x.clone()
    for _ in range(4):
        x = x.clone()
        assert torch.allclose(step(x).float(), step(eager, "eager").float(), rtol=1e-4, atol=1e-4)
        if x.state.dtype == torch.float32:
            assert torch.allclose(x.state, eager.state, rtol=1e-4, atol=1e-4, equal_nan=True)
        else:
            eager.state.copy_(x.state)


def test_a_pool_at_an_odd_address():
    x = testing.inputs(2, 2, D=16)
    want = testing.evaluate(x, "auto")
    for _ in range(3):
        base = torch.zeros(x.state.numel() + 1)
        odd = base[1:].view_as(x.state).copy_(x.state)
        assert torch.equal(step(x._replace(state=odd)), want.o)
        assert torch.equal(odd, want.state)


def by_operator(x: testing.Inputs) -> torch.Tensor:
    tensors = (x.q, x.k, x.v, x.decay, x.state, x.slots, *(x.draft or (None, None)), x.accepted)
    return torch.ops.fulmen.lightning_step(*tensors, x.scale, "auto")


def in_a_mode(x: testing.Inputs) -> torch.Tensor:
    with FlopCounterMode(display=False):
        return step(x)


@pytest.mark.parametrize("call", [step, by_operator, in_a_mode])
def test_the_change_is_seen_by_autograd(call):
    """A product that saved the state for its backward must not be differentiated with what it is later."""
    x = testing.inputs()
    weight = torch.ones_like(x.state, requires_grad=True)
    y = (weight * x.state).sum()
    with torch.no_grad():
        call(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_the_operator_refuses_gradients():
    x = testing.inputs()
    leaf = x._replace(q=x.q.clone().requires_grad_())
    with pytest.raises(NotImplementedError, match="lightning_step has no gradient"):
        by_operator(leaf)
    with torch.no_grad():
        by_operator(leaf)


def test_fake_tensors_go_through_the_operator():
    x = testing.inputs(layout="bnhd", H=4)
    with FakeTensorMode() as mode:
        fake = Tensors(*(None if t is None else mode.from_tensor(t) for t in (*x[:6], None, None, None)))
        o = fulmen.lightning_step(*fake[:5])
    assert isinstance(o, FakeTensor)
    assert o.stride() == step(x.clone()).stride()


def test_inference_mode_and_autocast():
    x = testing.inputs(D=16)
    with torch.inference_mode():
        a = step(x.clone())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.clone()
        o = step(y)
    assert o.dtype == torch.bfloat16
    assert y.state.dtype == torch.float32
    torch.testing.assert_close(o.float(), a, rtol=0.05, atol=0.05)


def test_autocast_is_named_where_a_draft_does_not_match():
    x = testing.inputs(draft=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"torch\.autocast cast to it"):
        step(x)


@pytest.mark.parametrize("backend", sorted(dispatch.kernels("step")))
def test_tokens_are_not_modified(backend):
    x = testing.inputs(slots=(1, -1), pool=2, draft=True, decay="mixed")
    before = [t.clone() for t in (x.q, x.k, x.v, x.decay, x.slots, x.accepted)]
    testing.evaluate(x, backend)
    for a, b in zip(before, (x.q, x.k, x.v, x.decay, x.slots, x.accepted), strict=True):
        assert torch.equal(a, b)


def test_explain():
    x = testing.inputs()
    text = fulmen.explain("step", x.q, x.k, x.v, x.decay, x.state)
    assert text.endswith("auto: eager")


# --------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graph(kind, backend):
    """Captured once, replayed while rows, slots and what is accepted change."""
    options = {"slots": (3, -1, 1, 0), "pool": 5, "decay": "mixed"} | KINDS[kind]
    options |= {"slots": (3, -1, 1, 0), "pool": 5}
    x = testing.inputs(4, 8, D=64, **options, device="cuda", dtype=torch.bfloat16)
    for t in (x.state, *(x.draft or ())):
        t.nan_to_num_(0.5)
    y = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(y, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(y, backend)
    for after, before in ((y.state, x.state), *zip(y.draft or (), x.draft or (), strict=True)):
        after.copy_(before)
    for slots in ((3, -1, 1, 0), (-1, 4, 3, -1), (0, 1, 2, 3)):
        for t in (x.q, x.k, x.v):
            t.normal_()
        x.slots.copy_(torch.tensor(slots))
        if x.accepted is not None:
            x.accepted.random_(0, 4)
        graph.replay()
        assert torch.equal(o, step(x, backend))
        same(x, y)


@pytest.mark.gpu
def test_no_synchronisation():
    x = testing.inputs(2, 4, **KINDS["draft"], device="cuda")
    step(x), step(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_slots_beyond_2_to_31_elements(state_dtype):
    slots = 2**31 // (64 * 128 * 128) + 8
    x = testing.inputs(3, 64, D=128, decay="mixed", dtype=torch.bfloat16, state_dtype=state_dtype, device="cuda")
    pool = torch.empty(slots, 64, 128, 128, dtype=state_dtype, device="cuda")
    at = torch.tensor([slots - 1, 0, slots - 8], dtype=torch.int32, device="cuda")
    pool[at.long()] = x.state
    want = testing.evaluate(x, "triton")
    assert torch.equal(step(x._replace(state=pool, slots=at), "triton"), want.o)
    assert torch.equal(pool[at.long()], want.state)


@pytest.mark.gpu
def test_a_prepared_step_changes_the_state_once():
    """To prepare a launch must not run it."""
    plans.clear()
    x = testing.inputs(2, 4, D=64, device="cuda", decay="mixed")
    exact = x.clone()
    for _ in range(3):
        step(x, "triton")
        step(exact, "eager")
        torch.testing.assert_close(x.state, exact.state, rtol=1e-5, atol=1e-5)
    assert _planned(Tensors(*x[:6], None, None, None), 1.0, "triton").forward.prepare is not None
