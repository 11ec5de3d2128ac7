"""A step in plain PyTorch, all rows at once: the default on a CPU, right on any device.

States are gathered by slot, take in the tokens one after the other, and are scattered back. Nothing is read on the
host: a padding row repeats the first row that has a slot, and writes the same values to the same place. If no row has
one, each writes back what it read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.boundary import empty_rows, no_gradient
from fulmen.dispatch import register
from fulmen.step.rounding import to_bf16
from fulmen.step.spec import MAX_TOKENS, StepSpec, Tensors


def supports(spec: StepSpec) -> str | None:
    return None


def forward(spec: StepSpec, x: Tensors) -> Tensor:
    out = empty_rows(x.q, spec.H, spec.E)
    if not out.numel() or not spec.slots:
        return out.zero_()
    compute = torch.float64 if spec.dtype == torch.float64 else torch.float32
    row = torch.arange(spec.B, device=spec.device)
    slot, taken = row, torch.ones_like(row, dtype=torch.bool)
    if x.slots is not None:
        slot, taken = x.slots.long(), (x.slots >= 0) & (x.slots < spec.slots)
        row = torch.where(taken, row, taken.int().argmax())
        slot = slot[row].clamp(0, spec.slots - 1)
    some = taken.any()
    keep = None if x.decay is None else torch.exp(-x.decay.double()).to(compute).view(-1, 1, 1)

    def enter(state: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """k (B, H_KV, D) and v (B, H_KV, E), a token of each row, enter the states (B, H, D, E)."""
        k, v = (y.to(compute).repeat_interleave(spec.group, dim=1) for y in (k, v))
        decayed = state if keep is None else state * keep
        return torch.addcmul(decayed, k[:, :, :, None], v[:, :, None, :])

    held = x.state[slot]  # (B, H, D, E)
    state = held.to(compute)
    q, k, v = x.q[row].to(compute), x.k[row], x.v[row]
    stored = None
    if x.draft_k is not None and x.draft_v is not None and x.accepted is not None:
        draft_k, draft_v, accepted = x.draft_k[slot], x.draft_v[slot], x.accepted[row]
        for t in range(MAX_TOKENS):  # a draft that is not accepted may hold NaN
            state = torch.where(
                (t < accepted).view(-1, 1, 1, 1), enter(state, draft_k[:, :, t], draft_v[:, :, t]), state
            )
        stored = state
        for pool, new in ((x.draft_k, k), (x.draft_v, v)):
            pool[slot, :, : spec.T] = torch.where(some, new, pool[slot, :, : spec.T])
    for t in range(spec.T):
        state = enter(state, k[:, :, t], v[:, :, t])
        o = (q[:, :, t, None] @ state)[:, :, 0] * spec.scale
        out[:, :, t] = torch.where(taken.view(-1, 1, 1), o, 0.0).to(out.dtype)
    last, stored = (q[:, :, -1], state) if stored is None else (None, stored)
    stored = to_bf16(stored, last) if x.state.dtype == torch.bfloat16 else stored
    x.state[slot] = torch.where(some, stored, held)
    return out


register("step", "eager", supports=supports, forward=forward, backward=no_gradient("lightning_step"))
