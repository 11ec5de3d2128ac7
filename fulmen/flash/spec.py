"""A call of softmax attention without its tensors: the spec, and the checks that lead to it.

One clear error for each wrong argument. Values of `cu_seqlens` are read on the CPU only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import plans
from fulmen.boundary import (
    as_int,
    autocast,
    check_offset_values,
    check_offsets,
    check_qkv,
    check_scale,
    empty_rows,
    is_number,
    plain_memory,
    require_tensors,
)

MAX_HEAD_DIM = 256

Causal = bool | str
Window = tuple[int | None, int | None] | None


class FlashSpec(NamedTuple):
    """Every fact about a call that is no tensor: the key of dispatch, of the tile tables, of a benchmark case.

    Query i stands at position i (top_left) or i + N_KV - N_Q, of its own sequence when packed, and sees the keys from
    `left` before that position to `right` after it; None: without limit. A causal call is one with right = 0.
    """

    B: int
    H: int
    H_KV: int
    N_Q: int
    N_KV: int
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    sequences: int | None = None  # None: not packed
    with_lse: bool = False
    needs_grad: bool = False
    deterministic: bool = False  # torch.use_deterministic_algorithms asks for gradients that repeat bit for bit

    @property
    def wants_lse(self) -> bool:
        """Whether lse is returned or needed by the backward."""
        return self.with_lse or self.needs_grad

    @property
    def plain(self) -> bool:
        """No left window, softcap, sinks or packed sequences; `right` may be set."""
        return self.left is None and self.softcap is None and self.sequences is None and not self.has_sinks

    @property
    def group(self) -> int:
        """Query heads that share one head of k and v."""
        return self.H // max(self.H_KV, 1)

    @property
    def causal(self) -> bool:
        """Nothing but causal: the one mask torch's SDPA can say."""
        return self.right == 0 and self.left is None and self.sequences is None and self.N_Q == self.N_KV


class Residuals(NamedTuple):
    """The tensors a backend's forward works on; its backward gets o and lse, too."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None


# ------------------------------------------------------------------------------------------------ checks


def check_mask(causal: Causal, window: Window, softcap: float | None) -> tuple[int | None, int | None, bool]:
    """(left, right, top_left) of the arguments `causal` and `window`."""
    if not isinstance(causal, bool | str) or causal not in (False, True, "bottom_right", "top_left"):
        raise ValueError(f"causal={causal!r}: must be False, True (the same as 'bottom_right') or 'top_left'")
    if softcap is not None and not (is_number(softcap) and 1e-30 <= softcap <= 1e30):
        raise ValueError(f"softcap={softcap!r}: must be None or a number between 1e-30 and 1e30")
    left, right = None, None
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"window={window!r}: must be None or (left, right), each an int >= 0 or None")
        left, right = (None if side is None else as_int(side) for side in window)
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise ValueError(f"window={window!r}: left and right must be ints >= 0, or None for no limit")
    if causal:
        right = 0
    return left, right, causal == "top_left"


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Residuals:
    """The tensors of a call as backends take them; one clear error for each wrong argument."""
    optional = {"sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    require_tensors({"q": q, "k": k, "v": v}, optional)
    q, k, v = autocast(*plain_memory(q, k, v))
    check_qkv(q, k, v, MAX_HEAD_DIM, same_length=False)
    if sinks is not None:
        if tuple(sinks.shape) != (q.shape[1],):
            raise ValueError(f"sinks has shape {tuple(sinks.shape)}, must be (H,) with q's H={q.shape[1]}")
        if sinks.dtype not in (torch.float32, q.dtype):
            raise ValueError(f"sinks is {sinks.dtype}, must be float32 or q's {q.dtype}")
        if sinks.device != q.device:
            raise ValueError(f"sinks is on {sinks.device}, must be on q's {q.device}")
        sinks = sinks.contiguous()
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k is given without cu_seqlens_q: packed keys need packed queries")
        return Residuals(q, k, v, sinks)
    check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    if cu_seqlens_k is None:
        if k.shape[2] != q.shape[2]:
            raise ValueError(
                f"cu_seqlens_k is missing: q has N={q.shape[2]} and k has N={k.shape[2]}, so theirs cannot be the same"
            )
        cu_seqlens_k = cu_seqlens_q
    check_offsets("cu_seqlens_k", cu_seqlens_k, k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must count the same sequences; got shapes {tuple(cu_seqlens_q.shape)} "
            f"and {tuple(cu_seqlens_k.shape)}"
        )
    return Residuals(q, k, v, sinks, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())


def check_values(x: Residuals) -> None:
    check_offset_values("cu_seqlens_q", x.cu_seqlens_q, x.q.shape[2])
    check_offset_values("cu_seqlens_k", x.cu_seqlens_k, x.k.shape[2])


def spec_of(
    x: Residuals, scale: float, left: int | None, right: int | None, top_left: bool, softcap: float | None,
    with_lse: bool, needs_grad: bool,
) -> FlashSpec:  # fmt: skip
    B, H, N_Q, D = x.q.shape
    _, H_KV, N_KV, E = x.v.shape
    sequences = None if x.cu_seqlens_q is None else x.cu_seqlens_q.shape[0] - 1
    far = N_Q + N_KV  # a window this wide hides nothing
    left, right = (None if side is None or side >= far else side for side in (left, right))
    limited = left is not None or right is not None
    top_left = top_left and limited and (sequences is not None or N_Q != N_KV)  # else both alignments are one
    return FlashSpec(
        B, H, H_KV, N_Q, N_KV, D, E, x.q.dtype, x.q.device, scale, left, right, top_left, softcap,
        x.sinks is not None, sequences, with_lse, needs_grad,
        needs_grad and plans.deterministic(),
    )  # fmt: skip


def checked_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    with_lse: bool = False,
) -> FlashSpec:
    """The spec `flash_attention` would make of these arguments, with its checks: for `fulmen.explain`."""
    mask = check_mask(causal, window, softcap)
    x = check_inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
    scale = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
    return spec_of(x, scale, *mask, softcap, with_lse, needs_gradient(x))


def plain_spec(device: torch.device) -> FlashSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return FlashSpec(2, 16, 16, 8192, 8192, 128, 128, dtype, device, 128**-0.5, right=0, needs_grad=True)


def needs_gradient(x: Residuals) -> bool:
    if not torch.is_grad_enabled():
        return False
    hidden = not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
    return hidden or any(t is not None and t.requires_grad for t in x[:4])  # under vmap requires_grad cannot be seen


# ---------------------------------------------------------------------- tiles and allocation, shared by backends


def tiles_of(spec: FlashSpec, rows: int, block: int) -> int:
    """Tiles of one head; packed, as many as any mix of lengths may need."""
    return math.ceil(rows / block) if spec.sequences is None else rows // block + spec.sequences


def empty_lse(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


def empty_outputs(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor | None]:
    """o, and lse if it is returned or the backward needs it."""
    lse = empty_lse(x.q) if spec.wants_lse else None
    if lse is not None and spec.has_sinks and spec.sequences is not None:
        lse.fill_(-torch.inf)  # rows of no sequence: they have no part in the sinks' gradients
    return empty_rows(x.q, spec.H, spec.E), lse
