"""Inputs and oracles for decoding steps; see `fulmen.testing` for the tolerance.

    x = inputs(B=3, H=4, T=2, D=64, draft=True, slots=(2, -1, 0))
    check(x, backend="triton")          # o, the states and the draft after the call, against fp64

The yardstick is the recurrence in fp32, whatever the inputs' dtype: a step computes in fp32 and rounds its results
once. A state in bf16 is rounded stochastically, up to a whole spacing: two roundings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.step.op import lightning_step
from fulmen.step.spec import MAX_STEP_TOKENS
from fulmen.testing import Expected, assert_close, normal, rows
from fulmen.testing.lightning import TOKEN_DECAYS, slopes, token_decays


class Inputs(NamedTuple):
    """The arguments of one call; `state` and `draft` are what it starts from."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    state: Tensor
    slots: Tensor | None
    draft: tuple[Tensor, ...] | None
    accepted: Tensor | None
    scale: float

    def to(self, dtype: torch.dtype) -> Inputs:
        """Tokens and states in another dtype."""
        cast: dict[str, Any] = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "state")}
        if self.draft is not None:
            cast["draft"] = (*(x.to(dtype) for x in self.draft[:2]), *self.draft[2:])
        return self._replace(**cast)

    def clone(self) -> Inputs:
        """With pools of its own: a call changes them."""
        draft = None if self.draft is None else tuple(x.clone() for x in self.draft)
        return self._replace(state=self.state.clone(), draft=draft)


class Outputs(NamedTuple):
    o: Tensor
    state: Tensor
    draft: tuple[Tensor, ...] | None


def inputs(
    B: int = 2,
    H: int = 2,
    T: int = 1,
    D: int = 16,
    *,
    E: int | None = None,
    H_KV: int | None = None,
    groups: int | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    layout: str = "bhnd",
    decay: str | None = None,
    scale: float = 1.0,
    slots: Sequence[int] | None = None,
    pool: int | None = None,
    draft: bool = False,
    accepted: Sequence[int] | None = None,
    seed: int = 0,
) -> Inputs:
    """Random arguments. `pool`: how many slots there are; those no row has, and drafts not accepted, are NaN."""
    E, H_KV, pool = E or D, H_KV or H, pool or B
    generator = torch.Generator().manual_seed(seed)
    make: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    heads = (groups or H, groups or H_KV, H_KV)
    q, k, v = (rows(B, h, T, s, layout=layout, **make) for h, s in zip(heads, (D, D, E), strict=True))
    state = normal((pool, H, D, E), generator, device).to(state_dtype)
    used = range(B) if slots is None else slots
    free = [slot for slot in range(pool) if slot not in used]
    state[free] = torch.nan
    kept: tuple[Tensor, ...] | None = None
    counts, per_token = None, decay in TOKEN_DECAYS
    if draft:
        kept = rows(pool, heads[1], MAX_STEP_TOKENS, D, **make), rows(pool, H_KV, MAX_STEP_TOKENS, E, **make)
        if per_token and decay is not None:
            kept = (*kept, token_decays(decay, pool, H, MAX_STEP_TOKENS, device, generator))
        accepted = [(3 * b + 1) % (MAX_STEP_TOKENS + 1) for b in range(B)] if accepted is None else accepted
        counts = torch.tensor(accepted, dtype=torch.int32, device=device)
        for x in kept:
            x[free] = torch.nan
            for slot, count in zip(used, accepted, strict=True):
                if 0 <= slot < pool:
                    x[slot, :, max(count, 0) :] = torch.nan
    at = None if slots is None else torch.tensor(slots, dtype=torch.int32, device=device)
    if per_token and decay is not None:
        each = token_decays(decay, B, H, T, device, generator)
        return Inputs(q, k, v, each, state, at, kept, counts, scale)
    return Inputs(q, k, v, slopes(decay, H, device), state, at, kept, counts, scale)


def evaluate(x: Inputs, backend: str) -> Outputs:
    """A backend's results; x keeps its pools."""
    x = x.clone()
    o = lightning_step(
        x.q, x.k, x.v, x.decay, x.state, slots=x.slots, draft=x.draft, accepted=x.accepted, scale=x.scale,
        backend=backend,
    )  # fmt: skip
    return Outputs(o, x.state, x.draft)


def expected(x: Inputs) -> dict[str, Expected]:
    """What o and the states of the rows' slots must be."""
    low, exact = (evaluate(x.to(dtype), "reference") for dtype in (torch.float32, torch.float64))
    at = used_slots(x)
    return {
        "o": Expected(low.o, exact.o),
        "state": Expected(low.state[at], exact.state[at], roundings=1 + (x.state.dtype == torch.bfloat16)),
    }


def used_slots(x: Inputs) -> list[int]:
    given = range(x.q.shape[0]) if x.slots is None else x.slots.tolist()
    return [slot for slot in given if 0 <= slot < x.state.shape[0]]


def check(x: Inputs, backend: str) -> Outputs:
    """A backend's results against fp64, and that it left alone what it must; returns them."""
    actual, wanted = evaluate(x, backend), expected(x)
    assert (actual.o.dtype, actual.state.dtype) == (x.q.dtype, x.state.dtype)
    at = used_slots(x)
    assert_close("o", actual.o, *wanted["o"])
    assert_close("state", actual.state[at], *wanted["state"])
    free = [slot for slot in range(x.state.shape[0]) if slot not in at]
    for after, before in ((actual.state, x.state), *zip(actual.draft or (), x.draft or (), strict=True)):
        assert torch.equal(after[free].nan_to_num(7.0), before[free].nan_to_num(7.0)), "a free slot was changed"
    T, given = x.q.shape[2], range(x.q.shape[0]) if x.slots is None else x.slots.tolist()
    for after, before, new in zip(actual.draft or (), x.draft or (), (x.k, x.v, x.decay), strict=False):
        for b, slot in enumerate(given):
            if slot in at and new is not None:
                assert torch.equal(after[slot, :, :T], new[b]), "the new tokens are not stored"
                assert torch.equal(after[slot, :, T:].nan_to_num(7.0), before[slot, :, T:].nan_to_num(7.0))
    return actual
