"""The gradient of the decay's slopes, for every backend: plain PyTorch, and only run when it is asked for.

With w_tj = scale lambda^(t-j) (q_t . k_j) (v_j . do_t) and lambda = exp(-s), the gradient of s is -sum (t - j) w_tj.
Chunks of C rows, as in `eager`. Within a chunk the sum is taken as it stands. Of earlier rows the chunk sees the state
S that enters it, and beside it Z, in which every row is weighted with how long ago it was:

    Z' = whole (Z + C S) + sum_r (C-1-r) left_r k_r v_r^T                      as S' = whole S + sum_r left_r k_r v_r^T
    sum over the chunk = <S, sum_r (r+1) into_r q_r do_r^T> + <Z, sum_r into_r q_r do_r^T>

An initial state counts as a row before the first, and a final state's gradient meets Z at the end. (sum t q_t . dq_t -
sum j k_j . dk_j is the same number, and loses it where t is large and little of the past is left.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.lightning.eager import added, initial_states, masked, panels, powers, scan, sequences
from fulmen.lightning.op import LightningSpec, Residuals


def gradient(spec: LightningSpec, x: Residuals, do: Tensor, dstate: Tensor | None) -> Tensor:
    """(H,), fp32."""
    assert x.decay is not None
    states = initial_states(spec, x)
    exact = torch.float32 if x.q.device.type == "mps" else torch.float64
    total = torch.zeros(spec.H, dtype=exact, device=x.q.device)
    group = spec.H // max(spec.H_KV, 1)

    def add(a: Tensor, b: Tensor) -> None:
        nonlocal total
        products = (a * b).transpose(0, 1).flatten(1)
        total = total + products.sum(1, dtype=exact)

    for begin, end, which in sequences(spec, x):
        state, late = states[which], torch.zeros_like(states[which])
        for panel in panels(begin, end, spec.B * spec.H):
            w = powers(x.decay, spec.scale, panel.C, state)
            assert w.left is not None
            assert w.whole is not None
            r = torch.arange(panel.C, device=state.device, dtype=state.dtype)
            parts = panel.parts(spec)
            q, do_, k, v = (panel.of(t, g, state.dtype) for t, g in ((x.q, 1), (do, 1), (x.k, group), (x.v, group)))
            entering, leaving = scan(added(k, w.left, v, parts), state, w.whole)
            ages = added(k, w.left * (panel.C - 1 - r)[:, None], v, parts)
            for i, step in enumerate(ages.unbind(2)):
                before = late
                late = torch.addcmul(step, before + panel.C * entering[:, :, i], w.whole)
                step.copy_(before)
            add(ages, added(q, w.into, do_, parts))
            add(entering, added(q, w.into * (r + 1)[:, None], do_, parts))
            apart = (r[:, None] - r[None, :]).clamp(min=0)
            for part in parts:
                inside = masked(q, k, w.mask, part).mul_(do_[part] @ v[part].mT).mul_(apart)
                total[part[1]] += inside.transpose(0, 1).flatten(1).sum(1, dtype=exact)
            state = leaving
        if dstate is not None:
            add(late, dstate[which])
    return -total.float()
