"""The definition of a step, row by row and token by token: the oracle every backend is tested against.

It computes in fp64 for fp64 inputs and in fp32 otherwise, on any device, and reads slots on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.boundary import no_gradient
from fulmen.dispatch import register
from fulmen.step.rounding import to_bf16
from fulmen.step.spec import MAX_TOKENS, StepSpec, Tensors


def supports(spec: StepSpec) -> str | None:
    return None


def forward(spec: StepSpec, x: Tensors) -> Tensor:
    compute = torch.float64 if spec.dtype == torch.float64 else torch.float32
    o = x.q.new_zeros(spec.B, spec.H, spec.T, spec.E)
    keep = torch.ones((), dtype=compute, device=spec.device)
    if x.decay is not None:
        keep = torch.exp(-x.decay.double()).to(compute).view(-1, 1, 1)  # (H, 1, 1)

    def enter(state: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """k (H_KV, D) and v (H_KV, E), one token, enter the state (H, D, E)."""
        k, v = (y.to(compute).repeat_interleave(spec.group, dim=0) for y in (k, v))
        return keep * state + k[:, :, None] * v[:, None, :]

    slots = range(spec.B) if x.slots is None else x.slots.tolist()
    for b, slot in enumerate(slots):
        if not 0 <= slot < spec.slots:
            continue
        state = x.state[slot].to(compute)
        if x.draft_k is not None and x.draft_v is not None and x.accepted is not None:
            for t in range(min(int(x.accepted[b]), MAX_TOKENS)):
                state = enter(state, x.draft_k[slot, :, t], x.draft_v[slot, :, t])
            store(x.state[slot], state, None)
            x.draft_k[slot, :, : spec.T] = x.k[b]
            x.draft_v[slot, :, : spec.T] = x.v[b]
        for t in range(spec.T):
            state = enter(state, x.k[b, :, t], x.v[b, :, t])
            o[b, :, t] = ((x.q[b, :, t, None].to(compute) @ state)[:, 0] * spec.scale).to(o.dtype)
        if x.draft_k is None:
            store(x.state[slot], state, x.q[b, :, -1].to(compute))
    return o


def store(to: Tensor, state: Tensor, q: Tensor | None) -> None:
    to.copy_(to_bf16(state, q) if to.dtype == torch.bfloat16 else state)


register("step", "reference", supports=supports, forward=forward, backward=no_gradient("lightning_step"))
