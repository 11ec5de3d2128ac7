"""A call of lightning attention without its tensors: the spec, and the checks that lead to it.

Heads: H states, as many as q or v has heads, whichever are more. k has v's heads (GQA) or q's (Mamba-2's groups).

One clear error for each wrong argument. Values of `decay` and `cu_seqlens` are read on the CPU only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import (
    aligned,
    autocast,
    check_offset_values,
    check_offsets,
    check_qkv,
    check_scale,
    empty_rows,
    is_plain_eager,
    plain_memory,
    require_tensors,
)

MAX_HEAD_DIM = 256


class LightningSpec(NamedTuple):
    """Every fact about a call that is no tensor: the key of dispatch, of the tile tables, of a benchmark case."""

    B: int
    H: int  # of o, the decay and the states
    H_KV: int  # of v; of k, too, unless there are groups
    N: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    scale: float = 1.0
    has_decay: bool = False
    has_initial_state: bool = False
    with_final_state: bool = False
    sequences: int | None = None  # None: not packed
    aligned: bool = True  # rows of q, k and v begin at multiples of 16 bytes and do not repeat
    per_token: bool = False  # the decay is (B, H, N)
    groups: int | None = None  # heads of q and k, where they are fewer than v's H
    steps: bool = False  # Mamba-2's scan inside: x enters times a step size and is added to the output times D
    gated: bool = False  # and the output is multiplied by silu(z)

    @property
    def shared_heads(self) -> bool:
        """Whether some heads of q, k or v serve several of the H."""
        return self.H != self.H_KV or self.groups is not None

    @property
    def states(self) -> int:
        """How many states enter and leave: one per batch entry, or one per packed sequence."""
        return self.B if self.sequences is None else self.sequences


NO_STEPS = "takes no step sizes: dt x and D x are computed around it"


class Residuals(NamedTuple):
    """The tensors of a call: what a backend's forward and backward work on, and all that is saved between them."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None  # (H,), or (B, H, N) with any strides
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    saved: Tensor | None = None  # of a kernel that saves: its forward writes it, its backward reads it; (rows, columns)
    steps: Tensor | None = None  # spec.steps: fp32 (B, H, N), with the strides of decay; v is then x
    skip: Tensor | None = None  # D, fp32 (H,), or None
    gate: Tensor | None = None  # spec.gated: z (B, H, N, E)


# ------------------------------------------------------------------------------------------------ checks


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    decay_gradient: bool = False,
) -> Residuals:
    """The tensors of a call as backends take them; one clear error for each wrong argument.

    What would take a look at values is left to `check_values`.

    decay_gradient  whether the caller has one; without it, a decay that asks for it is refused
    """
    require_tensors(
        {"q": q, "k": k, "v": v}, {"decay": decay, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    )
    q, k, v = autocast(*plain_memory(q, k, v))
    check_qkv(q, k, v, MAX_HEAD_DIM, same_length=True, groups=True)
    H = max(q.shape[1], v.shape[1])
    check_scale(scale)
    check_decay(q, decay, H)
    constant = decay is not None and not is_per_token(decay, H)
    if decay is not None and constant and not decay_gradient and decay.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "decay.requires_grad: over ranks (fulmen.parallel) its gradient is not implemented if it is constant, pass "
            "decay.detach()"
        )
    _check_states(q, initial_state, cu_seqlens, H, v.shape[3])
    slopes = decay if decay is None or is_per_token(decay, H) else decay.reshape(H).contiguous()
    ends = None if cu_seqlens is None else cu_seqlens.contiguous()
    return Residuals(q, k, v, slopes, initial_state, ends)


def is_per_token(decay: Tensor, H: int) -> bool:
    """Whether a decay is (B, H, N); (1, 1, 1) means the same either way, and is taken for (H, 1, 1)."""
    return decay.ndim == 3 and tuple(decay.shape) != (H, 1, 1)


def check_decay(q: Tensor, decay: Tensor | None, H: int) -> None:
    if decay is None:
        return
    B, _, N, _ = q.shape
    shape = tuple(decay.shape)
    if not (shape == (H,) or shape == (H, 1, 1) or shape == (B, H, N)):  # no `in`: dynamo has it wrong for a symbolic N
        raise ValueError(f"decay has shape {shape}, must be (H,) or (H, 1, 1) with H={H}, or (B, H, N) = {(B, H, N)}")
    if decay.dtype != torch.float32 and not decay.dtype == q.dtype == torch.float64:
        raise ValueError(f"decay is {decay.dtype}, must be float32{_or_fp64(q)}")
    if decay.device != q.device:
        raise ValueError(f"decay is on {decay.device}, must be on q's {q.device}")


def _or_fp64(q: Tensor) -> str:
    return f" or q's {q.dtype}" if q.dtype == torch.float64 else ""


def _check_states(q: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, H: int, E: int) -> None:
    B, _, _, D = q.shape
    states = B
    if cu_seqlens is not None:
        check_offsets("cu_seqlens", cu_seqlens, q)
        states = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        want = (states, H, D, E)
        state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        if tuple(initial_state.shape) != want:
            of = "(B, H, D, E)" if cu_seqlens is None else "(sequences, H, D, E)"
            raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}, must be {of} = {want}")
        if initial_state.dtype != state_dtype:
            raise ValueError(f"initial_state is {initial_state.dtype}, must be {state_dtype} for q of {q.dtype}")
        if initial_state.device != q.device:
            raise ValueError(f"initial_state is on {initial_state.device}, must be on q's {q.device}")
        if not initial_state.is_contiguous():
            raise ValueError(
                f"initial_state must be contiguous, its strides are {tuple(initial_state.stride())} for shape "
                f"{tuple(initial_state.shape)}: call .contiguous() on it"
            )


def check_decay_values(decay: Tensor | None) -> None:
    check_sign("decay", decay, 1, "the state decays as exp(-decay)")


def check_sign(name: str, x: Tensor | None, sign: int, why: str) -> None:
    """On the CPU, where a look at values costs nothing: they are finite and, times `sign`, at least 0."""
    if x is None or x.device.type != "cpu":
        return
    good = ((x >= 0) if sign > 0 else (x <= 0)) & x.isfinite()
    if not bool(good.all()):
        wrong = x[~good]
        raise ValueError(
            f"{name} must be finite and {'>' if sign > 0 else '<'}= 0 ({why}); {len(wrong)} of {x.numel()} are not: "
            f"{wrong[:8].tolist()}"
        )


def check_values(decay: Tensor | None, cu_seqlens: Tensor | None, N: int) -> None:
    """Checks values of CPU tensors; reading a GPU's would synchronise."""
    check_decay_values(decay)
    check_offset_values("cu_seqlens", cu_seqlens, N)


def spec_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    with_final_state: bool = False,
) -> LightningSpec:
    """The spec of a call whose arguments are right."""
    B, H_Q, N, D = q.shape
    H_V = v.shape[1]
    H = max(H_Q, H_V)
    return LightningSpec(
        B=B,
        H=H,
        H_KV=H_V,
        N=N,
        D=D,
        E=v.shape[3],
        dtype=q.dtype,
        device=q.device,
        scale=scale,
        has_decay=decay is not None,
        has_initial_state=initial_state is not None,
        with_final_state=with_final_state,
        sequences=None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        aligned=q.device.type != "cuda" or aligned(q, k, v),
        per_token=decay is not None and is_per_token(decay, H),
        groups=H_Q if H_Q < H_V else None,
    )


def checked_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> LightningSpec:
    """The spec `lightning_attention` would make of these arguments, with its checks: for `fulmen.explain`."""
    x = check_inputs(q, k, v, decay, scale, initial_state, cu_seqlens, True)
    if is_plain_eager(*x):
        check_values(x.decay, x.cu_seqlens, x.q.shape[2])
    return spec_of_residuals(x, float(scale), False)


def plain_spec(device: torch.device) -> LightningSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return LightningSpec(4, 32, 32, 8192, 64, 64, dtype, device, has_decay=True)


# -------------------------------------------------------------------------- allocation, shared by backends


def empty_states(spec: LightningSpec) -> Tensor:
    return torch.empty(spec.states, spec.H, spec.D, spec.E, dtype=state_dtype(spec), device=spec.device)


def state_dtype(spec: LightningSpec) -> torch.dtype:
    return torch.float64 if spec.dtype == torch.float64 else torch.float32


def empty_output(spec: LightningSpec, x: Residuals) -> Tensor:
    """o (B, H, N, E), in the memory order of q, or of v where q has fewer heads."""
    return empty_rows(x.q if spec.groups is None else x.v, spec.H, spec.E)


def spec_of_residuals(x: Residuals, scale: float, with_state: bool) -> LightningSpec:
    return spec_of(
        *x[:4],
        scale=scale,
        initial_state=x.initial_state,
        cu_seqlens=x.cu_seqlens,
        with_final_state=with_state,
    )
