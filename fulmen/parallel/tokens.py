"""Lightning attention over ranks where every token has a decay of its own, or heads of v share q and k.

As in `lightning.py` a rank computes M, what its tokens add to the state, and ranks all-gather it. How much of a state a
rank leaves depends on its tokens, so that factor T travels with M, one number for each head:

    S_r = T_{r-1} S_{r-1} + M_{r-1}          the state that enters rank r
    G_r = T_{r+1} G_{r+1} + dS_{r+1}         the gradient of the state that leaves it

A rank waits for the states and starts its local attention from the one that enters. The gradient of the decay is
local then: it needs the state and its gradient, and no token of another rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fulmen.boundary import once_differentiable
from fulmen.lightning.plan import count_residuals, plan_of
from fulmen.lightning.spec import LightningSpec, Residuals, empty_output, spec_of, state_dtype
from fulmen.parallel import lightning, states
from fulmen.parallel.groups import all_gather


def state_alone(x: Residuals, spec: LightningSpec, do: Tensor | None) -> Tensor:
    """What tokens add to the state, (B, H, D, E); with `do`, to the gradient of the state that enters them."""
    b, c = (x.k, x.v) if do is None else (x.q, do)
    kernels = states.kernels_for(b, c)
    if kernels is not None:
        return kernels.state_of_tokens(x, spec, do)
    assert x.decay is not None
    dtype = state_dtype(spec)
    since = x.decay.to(torch.float32 if spec.device.type == "mps" else torch.float64).cumsum(2)[..., None]
    b, c = (t.to(dtype).repeat_interleave(spec.H // t.shape[1], dim=1) for t in (b, c))
    weights = torch.exp(since - since[:, :, -1:]) if do is None else torch.exp(-since) * spec.scale
    return (b * weights.to(dtype)).mT @ c


def message(x: Residuals, rows: slice, own: Tensor | None, call: lightning.Call, do: Tensor | None) -> Tensor:
    """(B, H, D * E + 1): the state of these rows, with what they leave of `own`, and the factor T."""
    q, k, v, decay = (t[:, :, rows] for t in (x.q, x.k, x.v, x.decay) if t is not None)
    x = Residuals(q, k, v, decay, None, None)
    spec = spec_of(q, k, v, decay, scale=call.scale)
    left = torch.exp(-decay.double().sum(2)).to(state_dtype(spec))[..., None]  # (B, H, 1)
    state = state_alone(x, spec, None if do is None else do[:, :, rows]).flatten(2)
    if own is not None:
        state = state + left * own.flatten(2)
    return torch.cat([state, left], 2)


def nothing(x: Residuals, H: int) -> Tensor:
    """The message of a rank from which nobody needs any."""
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    return torch.zeros(x.q.shape[0], H, x.q.shape[3] * x.v.shape[3] + 1, dtype=dtype, device=x.q.device)


def combined(every: Tensor, ranks: Iterable[int], D: int) -> Tensor | None:
    """The state after these ranks, the first the farthest: (B, H, D, E); None if there are none."""
    total = None
    for rank in ranks:
        state, left = every[rank, ..., :-1], every[rank, ..., -1:]
        total = state if total is None else torch.addcmul(state, total, left)
    return None if total is None else total.unflatten(2, (D, -1))


class TokenLightning(torch.autograd.Function):
    """See the top of the file. In the backward the state that entered is an initial state like any other."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, decay, initial_state, call = inputs
        x, part, H = Residuals(q, k, v, decay, None, None), call.part, decay.shape[1]
        initial = lightning.of_local(initial_state, part.begins, call)
        sent = nothing(x, H)
        if part.behind:
            own = None if initial is None else initial[call.last]
            sent = message(x, slice(part.bounds[-2], None), own, call, None)
        every = all_gather(lightning.WHAT, sent, call.ranks).wait()[0]
        entered = combined(every, (rank for rank, _ in part.before), q.shape[3])
        here = (q.shape[0] if call.sequences is None else len(part.own), H, q.shape[3], v.shape[3])
        initial = lightning.plus(initial, entered, call.first, here)
        local = lightning.local_work(x, None if initial is None else initial.contiguous(), call)
        spec = lightning.local_spec(local, call, True)
        o, left = empty_output(spec, local), every.new_zeros(0, *here[1:])
        if part.own:
            o, left, _ = plan_of(spec, local, call.backend).forward.run(*local[:6])
        ctx.call, ctx.shape = call, (call.sequences or q.shape[0], *here[1:])
        ctx.has_initial = initial_state is not None
        ctx.set_materialize_grads(False)
        given = initial_state if ctx.needs_input_grad[4] else None  # for `once_differentiable`
        ctx.save_for_backward(q, k, v, decay, local.initial_state, given)
        return o, lightning.of_whole(left, part.ends, initial_state, ctx.shape, every, call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
        call, part = ctx.call, ctx.call.part
        q, k, v, decay, initial, _ = ctx.saved_tensors
        x, H, E = Residuals(q, k, v, decay, None, None), decay.shape[1], v.shape[3]
        if do is None:  # only the state was used
            do = q.new_zeros(q.shape[0], H, q.shape[2], E)
        elif do.stride(3) != 1:  # autograd hands over expanded gradients, as of o.sum()
            do = do.contiguous()
        dleft = lightning.of_local(dfinal, part.ends, call)
        sent = nothing(x, H)
        if part.before:
            own = None if dleft is None else dleft[call.first]
            sent = message(x, slice(0, part.bounds[1]), own, call, do)
        every = all_gather(lightning.WHAT, sent, call.ranks).wait()[0]
        G = combined(every, (rank for rank, _ in reversed(part.behind)), q.shape[3])
        here = (q.shape[0] if call.sequences is None else len(part.own), H, q.shape[3], E)
        dleft = lightning.plus(dleft, G, call.last, here)
        dq, dk, dv, dinitial = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None
        ddecay = torch.zeros_like(decay) if ctx.needs_input_grad[3] else None
        if part.own:
            local = lightning.local_work(x, initial, call)
            spec = lightning.local_spec(local, call, dleft is not None)
            dleft = None if dleft is None else dleft.contiguous()
            into = [] if ddecay is None else [ddecay]
            saved = local[: count_residuals(spec)]
            dq, dk, dv, dinitial = plan_of(spec, local, call.backend).gradients(*saved, do, dleft, *into)
        dwhole = None
        if ctx.has_initial:
            dwhole = lightning.of_whole(dinitial, part.begins, dfinal, ctx.shape, every, call)
        return dq, dk, dv, ddecay, dwhole, None
