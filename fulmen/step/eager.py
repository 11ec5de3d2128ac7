"""A step in plain PyTorch, all rows at once: the default on a CPU, right on any device.

States are gathered by slot, take in the tokens one after the other, and are scattered back. Nothing is read on the
host: a padding row repeats the first row that has a slot, and writes the same values to the same place. If no row has
one, each writes back what it read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.boundary import no_gradient
from fulmen.dispatch import register
from fulmen.step.rounding import to_bf16
from fulmen.step.spec import MAX_STEP_TOKENS, StepSpec, Tensors, empty_output, factors


def supports(spec: StepSpec) -> str | None:
    return None


def forward(spec: StepSpec, x: Tensors) -> Tensor:
    out = empty_output(spec, x)
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
    of_q, of_k, of_v = spec.group
    decay = x.decay[row] if spec.per_token and x.decay is not None else x.decay

    def enter(state: Tensor, k: Tensor, v: Tensor, t: int, decay: Tensor | None) -> Tensor:
        """k (B, heads, D) and v (B, heads, E), token t of each row, enter the states (B, H, D, E)."""
        k, v = k.to(compute).repeat_interleave(of_k, dim=1), v.to(compute).repeat_interleave(of_v, dim=1)
        decayed = state if decay is None else state * factors(decay, t, compute)
        return torch.addcmul(decayed, k[:, :, :, None], v[:, :, None, :])

    held = x.state[slot]  # (B, H, D, E)
    state = held.to(compute)
    q, k, v = x.q[row].to(compute).repeat_interleave(of_q, dim=1), x.k[row], x.v[row]
    stored = None
    if x.draft_k is not None and x.draft_v is not None and x.accepted is not None:
        draft_k, draft_v, accepted = x.draft_k[slot], x.draft_v[slot], x.accepted[row]
        old = x.draft_decay[slot] if x.draft_decay is not None else decay
        for t in range(MAX_STEP_TOKENS):  # a draft that is not accepted may hold NaN
            entered = enter(state, draft_k[:, :, t], draft_v[:, :, t], t, old)
            state = torch.where((t < accepted).view(-1, 1, 1, 1), entered, state)
        stored = state
        for pool, new in ((x.draft_k, k), (x.draft_v, v), (x.draft_decay, decay)):
            if pool is None or new is None:
                continue
            pool[slot, :, : spec.T] = torch.where(some, new, pool[slot, :, : spec.T])
    for t in range(spec.T):
        state = enter(state, k[:, :, t], v[:, :, t], t, decay)
        o = (q[:, :, t, None] @ state)[:, :, 0] * spec.scale
        out[:, :, t] = torch.where(taken.view(-1, 1, 1), o, 0.0).to(out.dtype)
    last, stored = (q[:, :, -1], state) if stored is None else (None, stored)
    stored = to_bf16(stored, last) if x.state.dtype == torch.bfloat16 else stored
    x.state[slot] = torch.where(some, stored, held)
    return out


register("step", "eager", supports=supports, forward=forward, backward=no_gradient("lightning_step"))
