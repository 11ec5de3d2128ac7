"""A call of latent attention without its tensors: the spec, and the checks that lead to it.

One clear error for each wrong argument. Values of `kv_lengths` and `page_table` are never read on the host: backends
clamp them, so that no value reaches foreign memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import aligned, as_int, autocast, check_int32, check_scale, plain_memory, require_tensors

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PAGES = (16, 256)  # the least and the most keys of a page


class LatentSpec(NamedTuple):
    """Every fact about a call that is no tensor: the key of dispatch, of the tile tables, of a benchmark case.

    Row b has `length` keys, kv_lengths[b] or N_KV. Query i stands at position i + length - N_Q and, if causal, sees the
    keys up to it.
    """

    B: int
    H: int
    N_Q: int
    N_KV: int  # keys a row has room for
    D: int
    E: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    causal: bool = False
    has_lengths: bool = False
    max_kv_length: int = 0  # the longest row that keys are split for; at most N_KV
    page: int | None = None  # keys of a page; None: kv is (B, N_KV, D)
    aligned: bool = True  # rows of kv begin at multiples of 16 bytes and do not repeat
    appended: bool = False  # the launches right before this one write q and the last N_Q keys of each row alone

    @property
    def rows(self) -> int:
        """Queries of a row of the batch, of all heads."""
        return self.H * self.N_Q


class Residuals(NamedTuple):
    """The tensors a backend works on."""

    q: Tensor
    kv: Tensor
    kv_lengths: Tensor | None = None
    page_table: Tensor | None = None


# ------------------------------------------------------------------------------------------------ checks


def check_inputs(
    q: Tensor, kv: Tensor, kv_lengths: Tensor | None, page_table: Tensor | None, value_dim: Any
) -> tuple[Residuals, int]:
    """The tensors of a call as backends take them, and value_dim; one clear error for each wrong argument."""
    require_tensors({"q": q, "kv": kv}, {"kv_lengths": kv_lengths, "page_table": page_table})
    q, kv, _ = autocast(*plain_memory(q, kv, kv))
    _check_sizes(q, kv, page_table)
    E = as_int(value_dim)
    if not 1 <= E <= q.shape[3]:
        raise ValueError(f"value_dim={value_dim!r}: must be an int from 1 to q's D={q.shape[3]}")
    if kv_lengths is not None:
        check_int32("kv_lengths", kv_lengths, q)
        if tuple(kv_lengths.shape) != (q.shape[0],):
            raise ValueError(f"kv_lengths has shape {tuple(kv_lengths.shape)}, must be (B,) with q's B={q.shape[0]}")
        kv_lengths = kv_lengths.contiguous()
    if page_table is not None:
        page_table = page_table.contiguous()
    return Residuals(q, kv, kv_lengths, page_table), E


def _check_sizes(q: Tensor, kv: Tensor, page_table: Tensor | None) -> None:
    got = f"got q {tuple(q.shape)}, kv {tuple(kv.shape)}"
    if q.ndim != 4:
        raise ValueError(f"q has {q.ndim} dimensions, must have 4: (B, H, N_Q, D); {got}")
    if kv.ndim != 3:
        raise ValueError(f"kv has {kv.ndim} dimensions, must have 3: (B, N_KV, D), or (pages, page, D); {got}")
    if q.shape[3] < 1 or kv.shape[2] != q.shape[3]:
        raise ValueError(f"kv has {kv.shape[2]} columns, must have q's D={q.shape[3]}, at least 1; {got}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}, must be bfloat16, float16, float32 or float64")
    if kv.dtype != q.dtype:
        raise ValueError(f"kv is {kv.dtype}, must be q's {q.dtype}: cast one of them")
    if kv.device != q.device:
        raise ValueError(f"kv is on {kv.device}, must be on q's {q.device}")
    for name, x in (("q", q), ("kv", kv)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{name}'s last dimension must be contiguous, its strides are {tuple(x.stride())} for shape "
                f"{tuple(x.shape)}: call .contiguous() on it"
            )
    if page_table is None:
        if kv.shape[0] != q.shape[0]:
            raise ValueError(f"kv has {kv.shape[0]} rows, must have q's B={q.shape[0]}, or a page_table; {got}")
        return
    check_int32("page_table", page_table, q)
    if page_table.ndim != 2 or page_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"page_table has shape {tuple(page_table.shape)}, must be (B, pages of a row) with q's B={q.shape[0]}"
        )
    pages, page, _ = kv.shape
    if not PAGES[0] <= page <= PAGES[1]:
        raise ValueError(f"a page has {page} keys, must have {PAGES[0]} to {PAGES[1]}; {got}")
    if not pages and page_table.shape[1]:
        raise ValueError(f"kv has no pages, and page_table has shape {tuple(page_table.shape)}; {got}")


def check_options(causal: Any, max_kv_length: Any) -> tuple[bool, int | None]:
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r}: must be False or True (queries are aligned to the end of the keys)")
    if max_kv_length is None:
        return causal, None
    length = as_int(max_kv_length)
    if length < 0:
        raise ValueError(f"max_kv_length={max_kv_length!r}: must be None or an int of at least 0")
    return causal, length


def spec_of(x: Residuals, E: int, scale: float, causal: bool, max_kv_length: int | None) -> LatentSpec:
    B, H, N_Q, D = x.q.shape
    page, N_KV = None, x.kv.shape[1]
    if x.page_table is not None:
        page, N_KV = N_KV, N_KV * x.page_table.shape[1]
    longest = N_KV if max_kv_length is None else min(N_KV, max_kv_length)
    causal = causal and N_Q > 1  # the last query sees everything
    return LatentSpec(
        B,
        H,
        N_Q,
        N_KV,
        D,
        E,
        x.q.dtype,
        x.q.device,
        scale,
        causal,
        x.kv_lengths is not None,
        longest,
        page,
        aligned(x.kv),
    )


def checked_spec(
    q: Tensor,
    kv: Tensor,
    *,
    value_dim: int = 512,
    kv_lengths: Tensor | None = None,
    max_kv_length: int | None = None,
    page_table: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> LatentSpec:
    """The spec `latent_attention` would make of these arguments, with its checks: for `fulmen.explain`."""
    options = check_options(causal, max_kv_length)
    x, E = check_inputs(q, kv, kv_lengths, page_table, value_dim)
    return spec_of(x, E, scale_of(x.q, scale), *options)


def scale_of(q: Tensor, scale: float | None) -> float:
    return float(q.shape[3] ** -0.5) if scale is None else check_scale(scale)


def plain_spec(device: torch.device) -> LatentSpec:
    """An ordinary call on `device`, for `fulmen doctor`."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return LatentSpec(16, 128, 1, 8192, 576, 512, dtype, device, 576**-0.5, has_lengths=True, max_kv_length=8192)
