"""One decoding step of lightning attention, on a pool of states that is updated in place.

    S = exp(-s) S + k_t v_t^T,   o_t = scale * q_t S            for the T tokens of a row, one after the other

A row of the batch names its state by a slot. Without a draft all T tokens enter the state. For speculative decoding the
pool also holds, for each slot, the tokens of the last call, which are not in the state yet:

    1. the state takes in the first `accepted` of the tokens stored for the slot, and is written
    2. o continues from it with the T new tokens, which are stored in place of the old ones

So verifying reads and writes a state once, and a rejected token costs nothing. The path of a call is that of
`lightning_attention`: a plan (`fulmen.plans`), or checks, spec and `dispatch.pick`; compilers and modes see one
`torch.library` operator, whose schema says what it mutates. There are no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen import dispatch, plans
from fulmen.boundary import (
    is_plain_eager,
    no_gradient,
    refuse_unsupported_derivatives,
    register_mutation,
)
from fulmen.plans import Plan, Repeated
from fulmen.step.spec import Tensors, check_inputs, check_values, empty_output, spec_of

_note_change = torch._C._increment_version  # so that autograd refuses a backward that saved an earlier state


def lightning_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    *,
    slots: Tensor | None = None,
    draft: tuple[Tensor, ...] | None = None,
    accepted: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> Tensor:
    """The next 1 to 8 tokens of each row, on a pool of states: o (B, H, T, E). Updates `state` in place.

    q         (B, H, T, D); any strides whose last dimension is contiguous. bf16, fp16 or fp32.
    k, v      (B, H_KV, T, D) and (B, H_KV, T, E); H_KV divides H, query head h reads head h // (H / H_KV).
              Or q and k have fewer heads than v, as in `lightning_attention`.
    decay     None, or s >= 0 in fp32 (fp64 if q is): (H,) or (H, 1, 1), or (B, H, T), one for each token, any strides.
    state     the pool (slots, H, D, E), fp32 or bf16, updated in place; state[i] is contiguous. bf16 is rounded
              stochastically, so that slow slopes do not stall; the same call gives the same bits.
    slots     int32 (B,): the slot of each row. -1, or any number that is no slot, is padding: its o is zero and nothing
              is read or written. Two rows with one slot are an error on the CPU and undefined on a GPU. None: row b
              has slot b.
    draft     None, or the pools (k (slots, H_KV, 8, D), v (slots, H_KV, 8, E)) of tokens that are not in the state
              yet. The state first takes in the first `accepted[b]` tokens stored there. Then the T new ones are stored,
              and o sees all of them; they enter the state in the next call, as far as they are accepted by then.
              If every token has its decay: (k, v, decay), the last (slots, H, 8) in decay's dtype.
    accepted  int32 (B,), with `draft`: how many of the tokens stored by the last call are accepted, clamped to 0 to 8.
    scale     multiplies the output.
    backend   "auto" takes the fastest that supports the call; a name works or raises, it never falls back.
    """
    return stepped(q, k, v, decay, state, slots=slots, draft=draft, accepted=accepted, scale=scale, backend=backend)


def stepped(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor, *, slots: Tensor | None,
    draft: tuple[Tensor, ...] | None, accepted: Tensor | None, scale: float, backend: str, early: bool = False,
) -> Tensor:  # fmt: skip
    """`lightning_step`, by default.

    early  whether the launch before this one writes at most q, k, v and a decay of each token, and itself started after
           all work before it. All else is then read before the wait (PDL). Compilers and modes do not know of it.
    """
    tensors: tuple[Any, ...] = (q, k, v, decay, state, slots, None, None, accepted, None)
    if type(draft) is tuple and len(draft) in (2, 3):
        third = draft[2] if len(draft) == 3 else None
        tensors = (q, k, v, decay, state, slots, *draft[:2], accepted, third)
    plan = None
    if type(scale) is float and type(backend) is str and (draft is None) == (tensors[6] is None):
        which, given = plans.given(tensors)
        plan = plans.find((which, "step", scale, backend, early), given)
    if plan is None:
        x = check_inputs(q, k, v, decay, state, slots, draft, accepted, scale)
        refuse_unsupported_derivatives("lightning_step", x)
        tensors, scale = x[:TENSORS], float(scale)
        if not isinstance(backend, str):
            raise dispatch.unknown("step", backend)
        if not is_plain_eager(*tensors):
            return torch.ops.fulmen.lightning_step(*x[:OPERANDS], scale, backend, x.draft_decay)
        plan = _planned(tensors, scale, backend, early)
    elif plan.spec.device.type == "cpu":
        check_values(decay, slots, state.shape[0])
    o: Tensor = plan.forward.run(*tensors)
    _note_change((state,) if draft is None else (state, *draft))
    return o


def _planned(tensors: tuple[Any, ...], scale: float, backend: str, early: bool = False) -> Plan:
    """The plan of a call whose arguments are right."""
    x = Tensors(*tensors)
    check_values(x.decay, x.slots, x.state.shape[0])
    which, given = plans.given(x)
    key = (which, "step", scale, backend, early)
    plan = plans.find(key, given)
    if plan is not None:
        return plan
    spec = spec_of(x, scale)._replace(early=early)
    kernel = dispatch.pick("step", spec, backend)
    refused = Repeated(no_gradient("lightning_step"), None)
    plan = Plan(spec, plans.forward_of(kernel, spec, Tensors), lambda: refused, (), False)
    return plans.keep(key, given, plan)


# ------------------------------------------------------------------------- the torch.library boundary


TENSORS, OPERANDS = 10, 9  # of a call; that the operator takes before the scale


def _step(*args: Any) -> Tensor:
    tensors, scale, backend = _arguments(*args)
    o: Tensor = _planned(tensors, scale, backend).forward.run(*tensors[:TENSORS])
    return o


def _step_fake(*args: Any) -> Tensor:
    x, scale, _ = _arguments(*args)
    return empty_output(spec_of(x, scale), x)


def _arguments(*args: Any) -> tuple[Tensors, float, str]:
    """What the operator takes, the last of which may be missing."""
    *tensors, scale, backend, draft_decay = args if len(args) > OPERANDS + 2 else (*args, None)
    return Tensors(*tensors)._replace(draft_decay=draft_decay), scale, backend


_lib = torch.library.Library("fulmen", "FRAGMENT")
register_mutation(
    _lib,
    "lightning_step(Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor(a!) state, Tensor? slots, "
    "Tensor(b!)? draft_k, Tensor(c!)? draft_v, Tensor? accepted, float scale, str backend, "
    "Tensor(d!)? draft_decay=None) -> Tensor",
    _step,
    _step_fake,
)
