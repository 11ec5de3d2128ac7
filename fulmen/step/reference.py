"""The definition of a step, row by row and token by token: the oracle every backend is tested against.

It computes in fp64 for fp64 inputs and in fp32 otherwise, on any device, and reads slots on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.boundary import no_gradient
from fulmen.dispatch import register
from fulmen.step.rounding import to_bf16
from fulmen.step.spec import MAX_STEP_TOKENS, StepSpec, Tensors, factors


def supports(spec: StepSpec) -> str | None:
    return None


def forward(spec: StepSpec, x: Tensors) -> Tensor:
    compute = torch.float64 if spec.dtype == torch.float64 else torch.float32
    o = x.q.new_zeros(spec.B, spec.H, spec.T, spec.E)
    of_q, of_k, of_v = spec.group

    def enter(state: Tensor, k: Tensor, v: Tensor, t: int, decay: Tensor | None) -> Tensor:
        """k (heads, D) and v (heads, E) of token t enter the state (H, D, E)."""
        k, v = k.to(compute).repeat_interleave(of_k, dim=0), v.to(compute).repeat_interleave(of_v, dim=0)
        return (state if decay is None else factors(decay, t, compute) * state) + k[:, :, None] * v[:, None, :]

    slots = range(spec.B) if x.slots is None else x.slots.tolist()
    for b, slot in enumerate(slots):
        if not 0 <= slot < spec.slots:
            continue
        state = x.state[slot].to(compute)
        decay = x.decay[b] if x.decay is not None and spec.per_token else x.decay
        if x.draft_k is not None and x.draft_v is not None and x.accepted is not None:
            for t in range(min(int(x.accepted[b]), MAX_STEP_TOKENS)):
                old = x.draft_decay[slot] if x.draft_decay is not None else decay
                state = enter(state, x.draft_k[slot, :, t], x.draft_v[slot, :, t], t, old)
            store(x.state[slot], state, None)
            x.draft_k[slot, :, : spec.T] = x.k[b]
            x.draft_v[slot, :, : spec.T] = x.v[b]
            if x.draft_decay is not None and decay is not None:
                x.draft_decay[slot, :, : spec.T] = decay
        for t in range(spec.T):
            state = enter(state, x.k[b, :, t], x.v[b, :, t], t, decay)
            q = x.q[b, :, t, None].to(compute).repeat_interleave(of_q, dim=0)
            o[b, :, t] = ((q @ state)[:, 0] * spec.scale).to(o.dtype)
        if x.draft_k is None:
            store(x.state[slot], state, q[:, 0])
    return o


def store(to: Tensor, state: Tensor, q: Tensor | None) -> None:
    to.copy_(to_bf16(state, q) if to.dtype == torch.bfloat16 else state)


register("step", "reference", supports=supports, forward=forward, backward=no_gradient("lightning_step"))
