"""Every registered backend of decoding steps against fp64: o, the states, the drafts, and what must stay untouched.

Slots no row has and drafts nobody accepted hold NaN. What a backend does not support is a skip with its own sentence.
"""

from __future__ import annotations

import math

import pytest
import torch

import fulmen
from fulmen import dispatch
from fulmen.step.spec import MAX_STEP_TOKENS, checked_spec
from fulmen.testing import step as testing

BACKENDS = sorted(dispatch.kernels("step"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STATES = {"fp32 states": torch.float32, "bf16 states": torch.bfloat16}
CASES = {
    "one token": {"decay": "mixed"},
    "no decay": {"T": 2},
    "strong decay": {"T": 8, "decay": "steep", "H": 3},
    "T=3": {"T": 3, "decay": "mixed", "scale": 0.25},
    "negative scale": {"scale": -3.0},
    "D=1": {"D": 1, "E": 16, "T": 2, "decay": "weak"},
    "D=5 E=1": {"D": 5, "E": 1, "decay": "mixed"},
    "D=80 E=48": {"H": 1, "D": 80, "E": 48, "T": 2, "decay": "mixed"},
    "D=128": {"B": 1, "H": 2, "D": 128, "decay": "mixed"},
    "D=256 E=20": {"B": 1, "H": 1, "D": 256, "E": 20, "T": 2},
    "D=16 E=192": {"B": 1, "H": 1, "D": 16, "E": 192},
    "heads 4/2": {"H": 4, "H_KV": 2, "T": 2, "decay": "mixed"},
    "heads 3/1": {"H": 3, "H_KV": 1, "E": 24, "T": 3},
    "bnhd": {"H": 4, "H_KV": 2, "T": 4, "layout": "bnhd", "decay": "mixed"},
    "no rows": {"B": 0, "pool": 3},
    "slots": {"B": 3, "slots": (4, 0, 2), "pool": 6, "decay": "mixed"},
    "padding": {"B": 4, "slots": (-1, 3, -1, 1), "pool": 5, "T": 2, "decay": "mixed"},
    "padding only": {"B": 2, "slots": (-1, -1), "pool": 2},
    "no such slot": {"B": 4, "slots": (5, 2**31 - 1, 0, -(2**31)), "pool": 5},
    "draft": {"B": 9, "T": 8, "draft": True, "accepted": tuple(range(9)), "decay": "mixed"},
    "draft, T=1": {"B": 3, "T": 1, "draft": True, "decay": "mixed"},
    "draft, slots": {"B": 4, "T": 3, "H": 4, "H_KV": 2, "E": 24, "slots": (5, -1, 0, 9), "pool": 7, "draft": True,
                     "decay": "mixed", "layout": "bnhd"},
    "accepted beyond a draft": {"B": 2, "T": 2, "draft": True, "accepted": (99, -5)},
    "token decay": {"B": 3, "H": 3, "T": 4, "decay": "token"},
    "extreme decay, slots": {"B": 4, "T": 8, "slots": (-1, 3, -1, 1), "pool": 5, "decay": "extreme", "layout": "bnhd"},
    "groups": {"H": 4, "groups": 2, "T": 2, "E": 24, "decay": "mixed"},
    "groups, token decay": {"B": 1, "H": 3, "groups": 1, "D": 80, "E": 48, "decay": "token", "layout": "bnhd"},
    "draft, token decay": {"B": 9, "T": 8, "draft": True, "accepted": tuple(range(9)), "decay": "token"},
    "draft, groups": {"B": 4, "T": 3, "H": 4, "groups": 2, "E": 24, "slots": (5, -1, 0, 9), "pool": 7, "draft": True,
                      "decay": "token"},
    "draft, groups, decay": {"B": 2, "T": 2, "H": 4, "groups": 1, "draft": True, "decay": "mixed"},
}  # fmt: skip
GPU_CASES = CASES | {
    "H64 D128": {"B": 3, "H": 64, "D": 128, "slots": (1, -1, 4), "pool": 5, "decay": "mixed"},
    "H64 D128 draft": {"B": 3, "H": 64, "D": 128, "T": 5, "draft": True, "decay": "mixed", "layout": "bnhd"},
    "H64 D128 T=8": {"B": 2, "H": 64, "D": 128, "T": 8, "decay": "mixed"},
}


def supported(backend: str, x: testing.Inputs) -> None:
    spec = checked_spec(x.q, x.k, x.v, x.decay, x.state, slots=x.slots, draft=x.draft, accepted=x.accepted)
    why = dispatch.reasons("step", spec)[backend]
    if why is not None:
        pytest.skip(why)


def check(backend: str, x: testing.Inputs) -> None:
    supported(backend, x)
    testing.check(x, backend)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_fp64(backend, dtype, states, case):
    check(backend, testing.inputs(**CASES[case], dtype=DTYPES[dtype], state_dtype=STATES[states]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gpu_against_fp64(backend, dtype, states, case):
    x = testing.inputs(**GPU_CASES[case], dtype=DTYPES[dtype], state_dtype=STATES[states], device="cuda")
    for _ in range(3):  # the first, a prepared and a repeated call
        check(backend, x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_may_lie_apart(backend):
    """As those of one layer in a pool of several layers; what lies between is not touched."""
    x = testing.inputs(B=2, H=2, D=16, draft=True, slots=(2, 0), pool=3, decay="mixed")
    supported(backend, x)
    wide = torch.full((3, 4, 2, 16, 16), torch.nan)
    wide[:, 1] = x.state
    o = fulmen.lightning_step(
        x.q, x.k, x.v, x.decay, wide[:, 1], slots=x.slots, draft=x.clone().draft, accepted=x.accepted, backend=backend
    )
    want = testing.evaluate(x, backend)
    assert torch.equal(o, want.o)
    assert torch.equal(wide[:, 1].nan_to_num(7.0), want.state.nan_to_num(7.0))
    assert wide[:, [0, 2, 3]].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_state_stays_nan(backend):
    """Rounded to bf16, too, where adding to its bits would make it a number."""
    for bits in (0x7FFFFFFF, -1, 0x7F800001):
        x = testing.inputs(B=1, H=1, D=16, state_dtype=torch.bfloat16)
        x.v[0, 0, 0, 3] = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
        supported(backend, x)
        out = testing.evaluate(x, backend)
        assert out.state[0, 0, :, 3].isnan().all()
        assert out.state[..., :3].isfinite().all()


# ----------------------------------------------------------------------------------------- steps in a row


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_schedule_of_accepting_equals_attention_over_the_accepted_tokens(backend, seed):
    """Rows come in another order at each step, some pause, and each accepts what it likes of its last draft."""
    H, H_KV, D, E, pool, generator = 4, 2, 16, 24, 3, torch.Generator().manual_seed(seed)
    x = testing.inputs(1, H, 1, D, E=E, H_KV=H_KV, draft=True, decay="mixed", pool=pool)
    supported(backend, x)
    state = torch.zeros(pool, H, D, E)
    draft = torch.full((pool, H_KV, 8, D), torch.nan), torch.full((pool, H_KV, 8, E), torch.nan)
    history = [(torch.zeros(1, H_KV, 0, D), torch.zeros(1, H_KV, 0, E)) for _ in range(pool)]
    last = [history[0]] * pool  # what a slot's draft holds

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    for _ in range(6):
        slots = torch.randperm(pool + 2, generator=generator)[:pool] - 2  # two may be padding
        slots = slots.clamp(min=-1).to(torch.int32)
        T = int(torch.randint(1, MAX_STEP_TOKENS + 1, (), generator=generator))
        q, k, v = drawn(pool, H, T, D), drawn(pool, H_KV, T, D), drawn(pool, H_KV, T, E)
        accepted = torch.zeros(pool, dtype=torch.int32)
        for b, slot in enumerate(slots.tolist()):
            if slot >= 0:
                accepted[b] = torch.randint(0, last[slot][0].shape[2] + 1, (), generator=generator)
        o = fulmen.lightning_step(
            q, k, v, x.decay, state, slots=slots, draft=draft, accepted=accepted, scale=0.5, backend=backend
        )
        for b, slot in enumerate(slots.tolist()):
            if slot < 0:
                assert not o[b].any()
                continue
            n = int(accepted[b])
            history[slot] = tuple(
                torch.cat([h, t[:, :, :n]], 2) for h, t in zip(history[slot], last[slot], strict=True)
            )
            last[slot] = k[b : b + 1], v[b : b + 1]
            ks, vs = (torch.cat([h, t], 2).double() for h, t in zip(history[slot], last[slot], strict=True))
            qs = torch.cat([torch.zeros(1, H, ks.shape[2] - T, D), q[b : b + 1]], 2).double()
            want = fulmen.lightning_attention(qs, ks, vs, x.decay, scale=0.5, backend="reference")[:, :, -T:]
            torch.testing.assert_close(o[b : b + 1].double(), want, rtol=1e-4, atol=1e-4)


def check_slow_state(backend, device, steps):
    """4,096 steps against fp64, with numbers that only add up, so that rounding to nearest stalls.

    A rounding is off by a spacing times sqrt(f (1 - f)) <= 1/2 on average, a spacing is at most 2^-7 of the value, and
    independent errors of N steps add up to sqrt(N) of them. Their mean over n elements is sqrt(n) times smaller.
    """
    H, D, E = 2, 32, 32
    x = testing.inputs(1, H, 1, D, E=E, state_dtype=torch.bfloat16, device=device)
    supported(backend, x)
    decay = torch.tensor([1e-4, 1e-3], device=device)
    exact, state, nearest = (torch.zeros(1, H, D, E, dtype=t, device=device)
                             for t in (torch.float64, torch.bfloat16, torch.bfloat16))  # fmt: skip
    keep = torch.exp(-decay.double()).view(H, 1, 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        k, v = (torch.rand(1, H, 1, size, generator=generator).to(device) for size in (D, E))
        fulmen.lightning_step(k, k, v, decay, state, backend=backend)
        exact = keep * exact + k.double().mT @ v.double()
        nearest = (keep.float() * nearest + k.mT @ v).to(torch.bfloat16)
    for h in range(H):
        remembered = min(steps, 1 / (2 * float(decay[h])))
        bound = 0.5 * 2.0**-7 * math.sqrt(remembered) * float(exact[:, h].norm())
        error = state[:, h].double() - exact[:, h]
        assert error.norm() <= bound
        deviations = 5 * bound / (D * E)
        assert error.mean().abs() <= deviations
        if steps == 4096:
            stalled = nearest[:, h].double() - exact[:, h]
            assert stalled.mean().abs() > deviations, "the test tells nothing: rounding to nearest passes"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slow_state_in_bf16_does_not_stall(backend):
    check_slow_state(backend, "cpu", 32 if backend == "triton" else 4096)  # triton is interpreted


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_gpu_a_slow_state_in_bf16_does_not_stall(backend):
    check_slow_state(backend, "cuda", 4096)


def test_a_token_that_repeats_does_not_stall():
    """Where k, v and so the change of every element are the same at each step, or zero."""
    state = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    ones = torch.ones(1, 1, 1, 64)
    for _ in range(2048):
        fulmen.lightning_step(ones, ones, ones, None, state)
    assert abs(float(state.float().mean()) / 2048 - 1) < 0.01
    decay = torch.tensor([1e-3])
    for q, rest in ((ones, math.exp(-1)), (0 * ones, math.exp(-2))):  # also where o is zero
        for _ in range(1000):
            fulmen.lightning_step(q, 0 * ones, ones, decay, state)
        assert abs(float(state.float().mean()) / 2048 / rest - 1) < 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_of_zeros_is_rounded_as_any(backend):
    """o is zero, and the state takes another draw at each step."""
    x = testing.inputs(B=1, H=1, D=16, E=32, state_dtype=torch.bfloat16)
    supported(backend, x)
    state, decay, zeros = torch.ones_like(x.state), torch.tensor([2.0**-10]), torch.zeros_like(x.q)
    for _ in range(64):
        o = fulmen.lightning_step(zeros, 0 * x.k, x.v, decay, state, backend=backend)
        assert not o.any()
    assert abs(float(state.float().mean()) / math.exp(-1 / 16) - 1) < 0.01


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_depend_on_the_row_alone(backend, states):
    """Not on its slot, its place in the batch or the other rows; and a call repeats."""
    x = testing.inputs(B=3, H=2, D=16, T=2, pool=4, slots=(3, 0, 1), decay="mixed", state_dtype=STATES[states])
    supported(backend, x)
    out = testing.evaluate(x, backend)
    assert torch.equal(testing.evaluate(x, backend).state[x.slots], out.state[x.slots])
    alone = x._replace(**{n: getattr(x, n)[2:] for n in "qkv"}, state=x.state[1:2], slots=None)
    o, state, _ = testing.evaluate(alone, backend)
    assert torch.equal(o[0], out.o[2])
    assert torch.equal(state[0], out.state[1])
