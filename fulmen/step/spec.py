"""A decoding step of lightning attention without its tensors: the spec, and the checks that lead to it.

One clear error for each wrong argument. Values of `decay` and `slots` are read on the CPU only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import (
    autocast,
    autocasts,
    check_distinct,
    check_int32,
    check_qkv,
    check_scale,
    empty_rows,
    is_plain_eager,
    plain_memory,
    require_tensors,
)
from fulmen.lightning.spec import MAX_HEAD_DIM, check_decay, check_decay_values, is_per_token

MAX_STEP_TOKENS = 8  # of a step, and of a draft


class StepSpec(NamedTuple):
    """Every fact about a call that is no tensor: the key of dispatch, of the tile tables, of a benchmark case."""

    B: int
    H: int  # of o, the decay and the states
    H_KV: int  # of v; of k, too, unless there are groups
    T: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    state_dtype: torch.dtype = torch.float32
    slots: int = 0  # states of the pool
    scale: float = 1.0
    has_decay: bool = False
    has_slots: bool = False
    has_draft: bool = False
    per_token: bool = False  # the decay is (B, H, T)
    groups: int | None = None  # heads of q and k, where they are fewer than v's H
    early: bool = False  # the launch before this one writes q, k, v, a gate and a decay of each token alone
    gated: bool = False  # o is multiplied by a norm's weight and perhaps a gate, and its squares are a second result

    @property
    def group(self) -> tuple[int, int, int]:
        """How many of the H share one head of q, of k and of v."""
        heads = (self.groups or self.H, self.groups or self.H_KV, self.H_KV)
        q, k, v = (self.H // max(h, 1) for h in heads)
        return q, k, v


class Tensors(NamedTuple):
    """The tensors of a call. A backend changes `state` and the draft, and nothing else."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None  # (H,), or (B, H, T) with any strides
    state: Tensor
    slots: Tensor | None
    draft_k: Tensor | None
    draft_v: Tensor | None
    accepted: Tensor | None
    draft_decay: Tensor | None = None
    gate: Tensor | None = None  # (B, H, T, E), with a weight: see triton.py
    weight: Tensor | None = None  # (H * E,)


# ------------------------------------------------------------------------------------------------ checks


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor,
    slots: Tensor | None,
    draft: tuple[Tensor, ...] | None,
    accepted: Tensor | None,
    scale: float,
) -> Tensors:
    """The tensors of a call as backends take them; one clear error for each wrong argument.

    What would take a look at values is left to `check_values`.
    """
    draft_k, draft_v, draft_decay = _parts(draft)
    require_tensors(
        {"q": q, "k": k, "v": v, "state": state},
        {
            "decay": decay,
            "slots": slots,
            "draft[0]": draft_k,
            "draft[1]": draft_v,
            "draft[2]": draft_decay,
            "accepted": accepted,
        },
    )
    q, k, v = autocast(*plain_memory(q, k, v))
    check_qkv(q, k, v, MAX_HEAD_DIM, same_length=True, groups=True)
    H = max(q.shape[1], v.shape[1])
    if not 1 <= q.shape[2] <= MAX_STEP_TOKENS:
        raise ValueError(
            f"q has T={q.shape[2]} tokens, a step takes 1 to {MAX_STEP_TOKENS}: lightning_attention_with_state takes "
            "more"
        )
    check_scale(scale)
    check_decay(q, decay, H)
    either = decay is not None and tuple(decay.shape) == (1, 1, 1)  # (B, H, T) as well as (H, 1, 1): the draft says
    per_token = decay is not None and (is_per_token(decay, H) or (either and draft_decay is not None))
    _check_state(q, v, state, H)
    _check_rows("slots", slots, q)
    if slots is None and q.shape[0] > state.shape[0]:
        raise ValueError(f"state has {state.shape[0]} slots for B={q.shape[0]} rows: without slots, row b has slot b")
    if (draft_k is None) != (accepted is None):
        raise ValueError("draft and accepted go together: give both, or neither")
    if draft_k is not None and draft_v is not None:
        _check_draft("draft[0]", draft_k, state.shape[0], k)
        _check_draft("draft[1]", draft_v, state.shape[0], v)
        _check_rows("accepted", accepted, q)
        of_tokens = decay if per_token else None
        _check_draft_decay(draft_decay, of_tokens, (state.shape[0], H, MAX_STEP_TOKENS), q)
    x = Tensors(
        q, k, v, decay if decay is None or per_token else decay.reshape(H).contiguous(), state,
        None if slots is None else slots.contiguous(), draft_k, draft_v,
        None if accepted is None else accepted.contiguous(), draft_decay,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x):
        raise NotImplementedError(
            "lightning_step has no gradient: call it under torch.no_grad(), or use lightning_attention_with_state"
        )
    return x


def _parts(draft: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if draft is None:
        return None, None, None
    if not isinstance(draft, tuple | list) or len(draft) not in (2, 3):
        raise ValueError(
            f"draft is a {type(draft).__name__}, must be a tuple (k, v) of two tensors, or (k, v, decay) of three"
        )
    return draft[0], draft[1], draft[2] if len(draft) == 3 else None


def _check_draft_decay(pool: Tensor | None, decay: Tensor | None, want: tuple[int, ...], q: Tensor) -> None:
    """A decay of each token is stored with it, a constant one is not."""
    if decay is None or pool is None:
        if decay is not None:
            raise ValueError(f"decay is (B, H, T), so draft must be (k, v, decay), the last of shape ({_list(want)})")
        if pool is not None:
            raise ValueError("draft is a tuple of three, must be (k, v), two tensors, where decay is not (B, H, T)")
        return
    if tuple(pool.shape) != want or pool.dtype != decay.dtype:
        raise ValueError(
            f"draft[2] has shape {tuple(pool.shape)} and is {pool.dtype}, must be (slots, H, {MAX_STEP_TOKENS}) = "
            f"({_list(want)}) of {decay.dtype}"
        )
    _check_pool("draft[2]", pool, q)


def _check_state(q: Tensor, v: Tensor, state: Tensor, H: int) -> None:
    want = (H, q.shape[3], v.shape[3])
    if state.ndim != 4 or tuple(state.shape[1:]) != want:
        raise ValueError(f"state has shape {tuple(state.shape)}, must be (slots, H, D, E) = (slots, {_list(want)})")
    allowed = (torch.float64,) if q.dtype == torch.float64 else (torch.float32, torch.bfloat16)
    if state.dtype not in allowed:
        raise ValueError(f"state is {state.dtype}, must be {' or '.join(map(str, allowed))} for q of {q.dtype}")
    _check_pool("state", state, q)


def _check_draft(name: str, pool: Tensor, slots: int, x: Tensor) -> None:
    want = (slots, x.shape[1], MAX_STEP_TOKENS, x.shape[3])
    if tuple(pool.shape) != want:
        of = f"(slots, H_KV, {MAX_STEP_TOKENS}, {'D' if name == 'draft[0]' else 'E'})"
        raise ValueError(f"{name} has shape {tuple(pool.shape)}, must be {of} = ({_list(want)})")
    if pool.dtype != x.dtype:
        cast = ", which torch.autocast cast to it" if autocasts(x) else ""
        raise ValueError(f"{name} is {pool.dtype}, must be {x.dtype}, as k and v{cast}")
    _check_pool(name, pool, x)


def _check_pool(name: str, pool: Tensor, x: Tensor) -> None:
    """A slot is one piece of memory; slots may lie apart, as those of one layer in a pool of several."""
    if pool.device != x.device:
        raise ValueError(f"{name} is on {pool.device}, must be on q's {x.device}")
    size = pool[0].numel() if pool.shape[0] else 0
    if pool.shape[0] and (not pool[0].is_contiguous() or (pool.shape[0] > 1 and pool.stride(0) < size)):
        raise ValueError(
            f"{name}[i] must be contiguous and no two may overlap: they are written in place; its strides are "
            f"{tuple(pool.stride())} for shape {tuple(pool.shape)}"
        )
    if not torch.compiler.is_compiling() and pool.is_neg():
        raise ValueError(f"{name} is a negated view, which cannot be written in place: pass {name}.resolve_neg()")


def _check_rows(name: str, rows: Tensor | None, q: Tensor) -> None:
    if rows is None:
        return
    if tuple(rows.shape) != (q.shape[0],):
        raise ValueError(f"{name} has shape {tuple(rows.shape)}, must be (B,) = ({q.shape[0]},)")
    check_int32(name, rows, q)


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def check_values(decay: Tensor | None, slots: Tensor | None, states: int) -> None:
    """Checks values of CPU tensors; reading a GPU's would synchronise."""
    check_decay_values(decay)
    if slots is not None and slots.device.type == "cpu":
        check_distinct("slots", slots, states, ", but for padding, as -1")


# ------------------------------------------------------------------------------------------------- specs


def spec_of(x: Tensors, scale: float) -> StepSpec:
    """The spec of a call whose arguments are right."""
    B, H_Q, T, D = x.q.shape
    H_V = x.v.shape[1]
    H = max(H_Q, H_V)
    return StepSpec(
        B=B,
        H=H,
        H_KV=H_V,
        T=T,
        D=D,
        E=x.v.shape[3],
        dtype=x.q.dtype,
        device=x.q.device,
        state_dtype=x.state.dtype,
        slots=x.state.shape[0],
        scale=scale,
        has_decay=x.decay is not None,
        has_slots=x.slots is not None,
        has_draft=x.draft_k is not None,
        per_token=x.decay is not None and x.decay.ndim == 3,
        groups=H_Q if H_Q < H_V else None,
    )


def factors(decay: Tensor, t: int, dtype: torch.dtype) -> Tensor:
    """What token t leaves of a state, (.., H, 1, 1): of a constant decay, or of one for each token (.., H, T)."""
    s = decay if decay.ndim == 1 else decay[..., t]
    return torch.exp(-s.double()).to(dtype)[..., None, None]


def empty_output(spec: StepSpec, x: Tensors) -> Tensor:
    """o (B, H, T, E), in the memory order of q, or of v where q has fewer heads."""
    return empty_rows(x.q if spec.groups is None else x.v, spec.H, spec.E)


def checked_spec(
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
) -> StepSpec:
    """The spec `lightning_step` would make of these arguments, with its checks: for `fulmen.explain`."""
    x = check_inputs(q, k, v, decay, state, slots, draft, accepted, scale)
    if is_plain_eager(*x):
        check_values(x.decay, x.slots, x.state.shape[0])
    return spec_of(x, float(scale))


def plain_spec(device: torch.device) -> StepSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return StepSpec(64, 64, 64, 1, 128, 128, dtype, device, slots=64, has_decay=True)
