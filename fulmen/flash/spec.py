"""A call of softmax attention without its tensors: the spec, and the checks that lead to it.

One clear error for each wrong argument. Values of `cu_seqlens` are read on the CPU only, those of `kv_lengths` and
`page_table` never: kernels clamp them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import plans
from fulmen.boundary import (
    aligned,
    as_int,
    autocast,
    autocasts,
    check_int32,
    check_offset_values,
    check_offsets,
    check_qkv,
    check_scale,
    empty_rows,
    is_number,
    is_plain_eager,
    needs_gradient,
    plain_memory,
    require_tensors,
)

MAX_HEAD_DIM = 256
PACKABLE_GROUPS = (2, 4, 8, 16, 32, 64)  # query heads of a GQA group that can share a tile: they divide 64 rows
MAX_FOLDED = 128  # heads that become queries

Causal = bool | str
Window = tuple[int | None, int | None] | None


class FlashSpec(NamedTuple):
    """Every fact about a call that is no tensor: the key of dispatch, of the tile tables, of a benchmark case.

    Query i stands at position i (top_left) or i + N_KV - N_Q, of its own sequence when packed, and sees the keys from
    `left` before that position to `right` after it; None: without limit. A causal call is one with right = 0.

    Over a cache (`has_kv_lengths`) N_KV is the most keys a row can have, and the row's own length, which is on the
    device, takes its place above. Packed queries (`sequences`) have B = 1 and a row of the cache for each sequence.
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
    has_kv_lengths: bool = False
    page: int | None = None  # rows of a page of k and v; None: a row of the cache is one tensor
    aligned: bool = True  # rows of a cache begin at multiples of 16 bytes and do not repeat

    @property
    def wants_lse(self) -> bool:
        """Whether lse is returned or needed by the backward."""
        return self.with_lse or self.needs_grad

    @property
    def has_options(self) -> bool:
        """A left window, softcap, sinks, packed sequences or lengths of a cache."""
        some = self.left is not None or self.softcap is not None or self.sequences is not None
        return some or self.has_sinks or self.has_kv_lengths

    @property
    def plain(self) -> bool:
        """Full or causal, and nothing else."""
        return not self.has_options and self.right in (None, 0)

    @property
    def group(self) -> int:
        """Query heads that share one head of k and v."""
        return self.H // max(self.H_KV, 1)

    @property
    def causal(self) -> bool:
        """Nothing but causal: the one mask torch's SDPA can say."""
        return self.right == 0 and self.left is None and self.sequences is None and self.N_Q == self.N_KV


def is_page(keys: int) -> bool:
    """Whether a page may have so many keys. Arithmetic, which compilers trace with a symbolic size."""
    return keys % 16 == 0 and 16 <= keys <= 256


def heads_as_queries(spec: FlashSpec) -> FlashSpec:
    """The spec with the query heads of a group as rows of one head, where that is the same and saves tiles.

    So a single query of a group that cannot be packed (`PACKABLE_GROUPS`) reads k and v once. All rows must see all
    keys: a single query does, with a bottom-right causal mask.
    """
    packable, masked = spec.group in (0, 1, *PACKABLE_GROUPS), spec.left is not None or spec.top_left
    differ = masked or spec.has_sinks or spec.sequences is not None or spec.needs_grad
    if packable or differ or spec.N_Q != 1 or spec.group > MAX_FOLDED:
        return spec
    return spec._replace(H=spec.H_KV, N_Q=spec.group, right=None, top_left=False)


class Residuals(NamedTuple):
    """The tensors a backend's forward works on; its backward gets o and lse, too."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    kv_lengths: Tensor | None = None
    page_table: Tensor | None = None


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
    sinks = check_sinks(sinks, q)
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


def check_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    if tuple(sinks.shape) != (q.shape[1],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}, must be (H,) with q's H={q.shape[1]}")
    if sinks.dtype not in (torch.float32, q.dtype):
        if not (autocasts(q) and sinks.dtype in (torch.float16, torch.bfloat16)):
            wanted = "float32" if q.dtype == torch.float32 else f"float32 or q's {q.dtype}"
            raise ValueError(f"sinks is {sinks.dtype}, must be {wanted}")
        sinks = sinks.float()  # q's dtype is autocast's
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}, must be on q's {q.device}")
    return sinks.contiguous()


def check_cache(
    top_left: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, kv_lengths: Tensor | None, page_table: Tensor | None,
) -> Residuals:  # fmt: skip
    """The tensors of a call over a cache: as `check_inputs`."""
    if kv_lengths is None:
        raise ValueError("max_kv_length and page_table need kv_lengths: how many keys of its cache each row uses")
    optional = {"sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "kv_lengths": kv_lengths, "page_table": page_table}
    require_tensors({"q": q, "k": k, "v": v}, optional)
    if cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k packs keys, and kv_lengths counts those of a cache: pass one of them")
    if top_left:
        raise ValueError("causal='top_left': queries are aligned to the end kv_lengths gives, use 'bottom_right'")
    q, k, v = autocast(*plain_memory(q, k, v))
    if cu_seqlens_q is not None:
        check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    rows = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    check_qkv(q, k, v, MAX_HEAD_DIM, False, kv_rows=rows if page_table is None else k.shape[0])
    if tuple(kv_lengths.shape) != (rows,):
        raise ValueError(f"kv_lengths has shape {tuple(kv_lengths.shape)}, must be ({rows},): a length for each row")
    check_int32("kv_lengths", kv_lengths, q)
    if page_table is not None:
        if page_table.ndim != 2 or page_table.shape[0] != rows:
            raise ValueError(f"page_table has shape {tuple(page_table.shape)}, must be ({rows}, pages of a row)")
        check_int32("page_table", page_table, q)
        if not is_page(k.shape[2]):
            raise ValueError(f"k has pages of {k.shape[2]} rows, must be a multiple of 16 from 16 to 256")
        if page_table.numel() and not k.shape[0]:
            raise ValueError(f"page_table names pages, and k has none: its shape is {tuple(k.shape)}")
    packed = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    table = None if page_table is None else page_table.contiguous()
    x = Residuals(q, k, v, check_sinks(sinks, q), packed, None, kv_lengths.contiguous(), table)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x[:4]):
        raise NotImplementedError(
            "kv_lengths: attention over a cache has no gradients; call it under torch.no_grad(), or detach its tensors"
        )
    return x


def check_max_kv_length(max_kv_length: int | None) -> int | None:
    if max_kv_length is None:
        return None
    most = as_int(max_kv_length)
    if most < 0:
        raise ValueError(f"max_kv_length={max_kv_length!r}: must be None or an int >= 0")
    return most


def check_values(x: Residuals) -> None:
    check_offset_values("cu_seqlens_q", x.cu_seqlens_q, x.q.shape[2])
    check_offset_values("cu_seqlens_k", x.cu_seqlens_k, x.k.shape[2])


def spec_of(
    x: Residuals, scale: float, left: int | None, right: int | None, top_left: bool, softcap: float | None,
    with_lse: bool, needs_grad: bool, max_kv_length: int | None = None,
) -> FlashSpec:  # fmt: skip
    B, H, N_Q, D = x.q.shape
    _, H_KV, N_KV, E = x.v.shape
    page = None if x.page_table is None else N_KV
    if x.page_table is not None:
        N_KV *= x.page_table.shape[1]
    N_KV = N_KV if max_kv_length is None else min(N_KV, max_kv_length)
    sequences = None if x.cu_seqlens_q is None else x.cu_seqlens_q.shape[0] - 1
    far = N_Q + N_KV  # a window this wide hides nothing
    left, right = (None if side is None or side >= far else side for side in (left, right))
    limited = left is not None or right is not None
    top_left = top_left and limited and (sequences is not None or N_Q != N_KV)  # else both alignments are one
    return FlashSpec(
        B, H, H_KV, N_Q, N_KV, D, E, x.q.dtype, x.q.device, scale, left=left, right=right, top_left=top_left,
        softcap=softcap, has_sinks=x.sinks is not None, sequences=sequences, with_lse=with_lse, needs_grad=needs_grad,
        deterministic=needs_grad and plans.deterministic(), has_kv_lengths=x.kv_lengths is not None, page=page,
        aligned=x.kv_lengths is None or aligned(x.k, x.v),
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
    kv_lengths: Tensor | None = None,
    max_kv_length: int | None = None,
    page_table: Tensor | None = None,
    with_lse: bool = False,
) -> FlashSpec:
    """The spec `flash_attention` would make of these arguments, with its checks: for `fulmen.explain`."""
    mask = check_mask(causal, window, softcap)
    cached = not (kv_lengths is None and max_kv_length is None and page_table is None)
    if cached:
        x = check_cache(mask[2], q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, kv_lengths, page_table)
    else:
        x = check_inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k)
    if is_plain_eager(*x):
        check_values(x)
    most = check_max_kv_length(max_kv_length)
    scale = x.q.shape[3] ** -0.5 if scale is None else check_scale(scale)
    return spec_of(x, scale, *mask, softcap, with_lse, not cached and needs_gradient(x[:4]), most)


def plain_spec(device: torch.device) -> FlashSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return FlashSpec(2, 16, 16, 8192, 8192, 128, 128, dtype, device, 128**-0.5, right=0, needs_grad=True)


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
