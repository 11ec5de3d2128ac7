"""What `flash_attn_with_kvcache` does before it attends: checks, append, the cache as `flash_attention` reads it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import brief, check_distinct, is_plain_eager, require_tensors, row_contiguous
from fulmen.flash.spec import is_page
from fulmen.layers.append import append
from fulmen.layers.inputs import whole

PAGES = (256, 128, 64, 32, 16)  # that a row of the cache is read in


class Caches(NamedTuple):
    """k and v (rows, capacity, H_KV, D) or (pages, page, H_KV, D), and which tokens of them count."""

    k: Tensor
    v: Tensor
    lengths: int | Tensor | None
    rows: Tensor | None  # cache_batch_idx
    leftpad: Tensor | None
    table: Tensor | None

    @property
    def capacity(self) -> int:
        """Tokens of a row."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])


class Turn(NamedTuple):
    """RoPE: tables (positions, dim / 2), which elements make a pair, whether queries have positions of their own."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    each_query: bool


def update(q: Tensor, k: Tensor | None, v: Tensor | None, caches: Caches, turn: Turn) -> tuple[Tensor, Caches]:
    """Appends k and v; returns q, turned, and the caches with their new lengths, a tensor."""
    _check(q, k, v, caches, turn)
    _check_values(q, k, caches, turn)
    q, k, v = row_contiguous(q), *(None if x is None else row_contiguous(x) for x in (k, v))
    lengths = caches.lengths
    if not isinstance(lengths, Tensor):
        given = caches.capacity if lengths is None else lengths
        lengths = torch.full((q.shape[0],), given, dtype=torch.int32, device=q.device)
    if k is not None and v is not None:
        table = caches.table if caches.rows is None else caches.rows[:, None]
        q, lengths = append(
            q, k, v, caches.k, caches.v, lengths, table, turn.cos, turn.sin, each_query=turn.each_query,
            interleaved=turn.interleaved,
        )  # fmt: skip
    return q, caches._replace(lengths=lengths)


def readable(q: Tensor, caches: Caches) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """k and v, lengths and page table as `flash_attention` takes them, but for the order of heads and tokens."""
    k, v, lengths, rows, leftpad, table = caches
    assert isinstance(lengths, Tensor)
    if table is not None:
        return k, v, lengths, table
    if rows is None and leftpad is None:
        B = q.shape[0]
        return k[:B], v[:B], lengths, None
    which = torch.arange(q.shape[0], device=q.device) if rows is None else rows.clamp(0, k.shape[0] - 1).long()
    if leftpad is not None:
        at = leftpad.clamp(min=0)[:, None] + torch.arange(k.shape[1], device=q.device)
        at = at.clamp(max=k.shape[1] - 1).long()
        lengths = lengths.clamp(max=k.shape[1]) - leftpad.clamp(min=0)
        return k[which[:, None], at], v[which[:, None], at], lengths.int(), None
    page = next((n for n in PAGES if k.shape[1] % n == 0), None)
    if page is None or any(x.stride(0) != x.shape[1] * x.stride(1) for x in (k, v)):
        return k[which], v[which], lengths, None
    count = k.shape[1] // page
    pages = which.int()[:, None] * count + torch.arange(count, dtype=torch.int32, device=q.device)
    return k.view(-1, page, *k.shape[2:]), v.view(-1, page, *v.shape[2:]), lengths, pages


# ------------------------------------------------------------------------------------------------ checks


def _check(q: Tensor, k: Tensor | None, v: Tensor | None, caches: Caches, turn: Turn) -> None:
    """One clear error for each wrong argument, before anything is written."""
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together: pass both or none")
    tables = {"rotary_cos": turn.cos, "rotary_sin": turn.sin}
    require_tensors({"q": q, "k_cache": caches.k, "v_cache": caches.v}, {"k": k, "v": v, **tables})
    given = [("q", q), ("k_cache", caches.k), ("v_cache", caches.v), ("k", k), ("v", v)]
    for name, x in given:
        if x is not None and x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must have 4 dimensions: (B, N, heads, head dim)")
    B, N = q.shape[0], 0 if k is None else k.shape[1]
    for name, x, of, want in (
        ("v_cache", caches.v, "k_cache", (*caches.k.shape[:3], caches.v.shape[3])),
        ("q", q, "k_cache", (*q.shape[:3], caches.k.shape[3])),
        ("k", k, "k_cache", (B, N, *caches.k.shape[2:])),
        ("v", v, "v_cache", (B, N, *caches.v.shape[2:])),
    ):
        if x is not None and tuple(x.shape) != want:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be (B, N, heads, head dim) = {want} for {of}")
    for name, x in given:
        if x is not None:
            _check_kind(name, x, caches.k)
    if k is not None:
        _check_written("k_cache", caches.k)
        _check_written("v_cache", caches.v)
        if caches.k is caches.v:
            raise ValueError("k_cache and v_cache are one tensor, and k and v are written to them: pass two")
    if q.shape[2] % max(caches.k.shape[2], 1):
        raise ValueError(f"q has {q.shape[2]} heads, must be a multiple of k_cache's {caches.k.shape[2]}")
    if k is not None and caches.lengths is None:
        raise ValueError("cache_seqlens is missing: k and v are appended behind that many tokens")
    for name, y in (
        ("cache_batch_idx", caches.rows), ("cache_leftpad", caches.leftpad), ("cache_seqlens", caches.lengths),
        ("block_table", caches.table),
    ):  # fmt: skip
        if isinstance(y, Tensor) or (y is not None and name != "cache_seqlens"):
            _check_ints(name, y, q, caches)
    if caches.table is None and caches.rows is None and caches.k.shape[0] < B:
        raise ValueError(f"k_cache has {caches.k.shape[0]} rows, must have q's B={B} at least, or pass cache_batch_idx")
    if caches.capacity < N:
        raise ValueError(
            f"k has {N} tokens, and a row of the cache has room for {caches.capacity}: pass at most so many"
        )
    _check_rotary(q, k, turn, caches.capacity)
    if caches.lengths is not None and not isinstance(caches.lengths, Tensor):
        _check_lengths([whole("cache_seqlens", caches.lengths, 0)], q, N, caches, turn)


def _check_values(q: Tensor, k: Tensor | None, caches: Caches, turn: Turn) -> None:
    """Checks values of CPU tensors, before anything is written; reading a GPU's would synchronise."""
    lengths, rows, new = caches.lengths, caches.rows, 0 if k is None else k.shape[1]
    each: list[int] | None = None
    if isinstance(lengths, Tensor) and lengths.device.type == "cpu" and is_plain_eager(lengths):
        each = lengths.tolist()
        _check_lengths(each, q, new, caches, turn)
    elif not isinstance(lengths, Tensor):
        each = q.shape[0] * [caches.capacity if lengths is None else whole("cache_seqlens", lengths, 0)]
    table, leftpad = caches.table, caches.leftpad
    if each is not None and leftpad is not None and leftpad.device.type == "cpu" and is_plain_eager(leftpad):
        first = leftpad.tolist()
        if any(not 0 <= start <= n for start, n in zip(first, each, strict=True)):
            raise ValueError(f"cache_leftpad must be from 0 to cache_seqlens, {brief(each)}; got {brief(first)}")
    if each is not None and table is not None and table.device.type == "cpu" and is_plain_eager(table):
        _check_pages(each, table.tolist(), new, caches)
    if rows is None or rows.device.type != "cpu" or not is_plain_eager(rows):
        return
    given, there = rows.tolist(), caches.k.shape[0]
    if any(not 0 <= row < there for row in given):
        raise ValueError(f"cache_batch_idx must be from 0 to {there - 1}: k_cache has {there} rows; got {brief(given)}")
    if k is not None:
        check_distinct("cache_batch_idx", rows, there, " where k and v are appended")


def check_read(name: str, lengths: Tensor, k: Tensor, table: Tensor | None) -> None:
    """Checks values of CPU tensors by which a cache is read: lengths, and the entries of a page table.

    Tensors of a wrong shape are left to the operation, whose checks of them are one with those of its other callers.
    """
    if not isinstance(lengths, Tensor) or lengths.ndim != 1 or lengths.device.type != "cpu":
        return
    if table is not None:
        fits = isinstance(table, Tensor) and table.ndim == 2 and table.shape[0] == lengths.shape[0]
        if not fits or not is_page(k.shape[1]):
            return
    if not is_plain_eager(lengths, table):
        return
    capacity = k.shape[1] * (1 if table is None else table.shape[1])
    given = lengths.tolist()
    if any(not 0 <= n <= capacity for n in given):
        raise ValueError(f"{name} must give lengths from 0 to {capacity}, the capacity of a row; got {brief(given)}")
    if table is not None and table.device.type == "cpu":
        _check_pages(given, table.tolist(), 0, Caches(k, k, lengths, None, None, table), "k")


def _check_lengths(given: list[int], q: Tensor, new: int, caches: Caches, turn: Turn) -> None:
    """given: the tokens of each row, or of all rows, before the new ones."""
    capacity = caches.capacity
    if any(not 0 <= n <= capacity - new for n in given):
        more = f", and k has {new} more" if new else ""
        raise ValueError(
            f"cache_seqlens must be from 0 to {capacity - new}: a row of the cache has room for {capacity} tokens"
            f"{more}; got {brief(given)}"
        )
    first = max(given, default=0)
    positions = first + max(new, q.shape[1] if turn.each_query else 1)
    if turn.cos is not None and turn.cos.shape[0] < positions:
        raise ValueError(
            f"rotary_cos has {turn.cos.shape[0]} positions, must have {positions}: q has {q.shape[1]} tokens, the "
            f"first at position {first}"
        )


def _check_pages(lengths: list[int], table: list[list[int]], new: int, caches: Caches, name: str = "k_cache") -> None:
    """Pages of tokens that are read or appended exist, and no two rows append to one."""
    there, page = caches.k.shape[:2]
    written: list[int] = []
    for n, row in zip(lengths, table, strict=True):
        used = row[: -(-(n + new) // page)]
        if any(not 0 <= entry < there for entry in used):
            raise ValueError(
                f"block_table must be from 0 to {there - 1} for the {n + new} tokens of a row: {name} has {there} "
                f"pages; got {brief(used)}"
            )
        written += used[n // page :] if new else []
    if len(set(written)) < len(written):
        raise ValueError(f"block_table must give each row pages of its own for new tokens; got {brief(written)}")


def _check_written(name: str, cache: Tensor) -> None:
    if any(n > 1 and step == 0 for n, step in zip(cache.shape, cache.stride(), strict=True)):
        raise ValueError(
            f"{name} repeats memory, and k and v are written to it: its strides are {tuple(cache.stride())} for shape "
            f"{tuple(cache.shape)}"
        )


def _check_kind(name: str, x: Tensor, cache: Tensor) -> None:
    other = x.dtype != cache.dtype and not (name == "q" and torch.is_autocast_enabled(cache.device.type))
    if other or x.device != cache.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}, must be k_cache's {cache.dtype} on {cache.device}")
    if x.stride(3) != 1 and name in ("k_cache", "v_cache"):
        raise ValueError(f"{name}'s last dimension must be contiguous, its strides are {tuple(x.stride())}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError(f"{name} requires a gradient, and a cache has none: call it under torch.no_grad()")


def _check_ints(name: str, x: Any, q: Tensor, caches: Caches) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}, must be an int32 tensor")
    B, paged = q.shape[0], x is caches.table
    if x.ndim != 1 + paged or x.shape[0] != B or x.dtype != torch.int32 or x.device != q.device:
        shape = f"({B}, pages of a row)" if paged else f"({B},)"
        got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{name} is {got}, must be int32 {shape} on q's {q.device}")
    if caches.table is not None and name in ("cache_batch_idx", "cache_leftpad"):
        raise NotImplementedError(f"{name} with block_table: the table says where a row's pages are; pass None")
    if paged and not is_page(caches.k.shape[1]):
        raise ValueError(f"k_cache has pages of {caches.k.shape[1]} tokens, must be a multiple of 16 from 16 to 256")


def _check_rotary(q: Tensor, k: Tensor | None, turn: Turn, capacity: int) -> None:
    if (turn.cos is None) != (turn.sin is None):
        raise ValueError("rotary_cos and rotary_sin turn pairs together: pass both or none")
    if turn.cos is None or turn.sin is None:
        return
    if k is None:
        raise ValueError("rotary_cos and rotary_sin turn q and the new k: pass k and v, too")
    shape = tuple(turn.cos.shape)
    if len(shape) != 2 or shape != tuple(turn.sin.shape) or 2 * shape[1] > q.shape[3] or not shape[0]:
        raise ValueError(
            f"rotary_cos {shape} and rotary_sin {tuple(turn.sin.shape)} must be (positions, dim / 2), with dim at most "
            f"q's head dim {q.shape[3]}"
        )
    if shape[0] < capacity:
        raise ValueError(
            f"rotary_cos and rotary_sin have {shape[0]} positions, must have the cache's capacity of {capacity} or more"
        )
    if not turn.cos.is_floating_point() or turn.cos.device != q.device or turn.sin.device != q.device:
        raise ValueError(f"rotary_cos is {turn.cos.dtype} on {turn.cos.device}, must be floating point on {q.device}")
