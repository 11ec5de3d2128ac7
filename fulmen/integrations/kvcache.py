"""What `flash_attn_with_kvcache` does before it attends: checks, append, the cache as `flash_attention` reads it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.layers.append import append

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
    lengths = caches.lengths
    if not isinstance(lengths, Tensor):
        given = caches.capacity if lengths is None else lengths
        lengths = torch.full((q.shape[0],), given, dtype=torch.int32, device=q.device)
    if k is not None and v is not None:
        table = caches.rows[:, None].contiguous() if caches.rows is not None else caches.table
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
    """One clear error for each wrong argument that `flash_attention` would not see, or see too late."""
    given = {"q": q, "k_cache": caches.k, "v_cache": caches.v, "k": k, "v": v}
    for name, x in given.items():
        if x is not None and x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must have 4 dimensions: (B, N, heads, head dim)")
        if x is not None and torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(
                f"{name} requires a gradient, and a cache has none: call it under torch.no_grad()"
            )
    if (k is None) != (v is None):
        raise ValueError("k and v are appended together: pass both or none")
    if caches.k.shape[:3] != caches.v.shape[:3]:
        raise ValueError(
            f"k_cache {tuple(caches.k.shape)} and v_cache {tuple(caches.v.shape)} must differ in D at most"
        )
    if k is not None and v is not None:
        _check_new(q, k, v, caches)
    _check_rotary(q, k, turn)
    B = q.shape[0]
    if isinstance(caches.lengths, bool) or not isinstance(caches.lengths, int | Tensor | None):
        raise ValueError(f"cache_seqlens={caches.lengths!r}: must be an int, an int32 tensor (B,) or None")
    ints = {"cache_seqlens": caches.lengths, "cache_batch_idx": caches.rows, "cache_leftpad": caches.leftpad}
    for name, y in ints.items():
        if isinstance(y, Tensor) and (tuple(y.shape) != (B,) or y.dtype != torch.int32 or y.device != q.device):
            got = f"{y.dtype} {tuple(y.shape)} on {y.device}"
            raise ValueError(f"{name} is {got}, must be int32 ({B},) on q's {q.device}")
    if caches.table is not None:
        for name, x in (("cache_batch_idx", caches.rows), ("cache_leftpad", caches.leftpad)):
            if x is not None:
                raise NotImplementedError(f"{name} with block_table: the table says where a row's pages are; pass None")
    elif caches.rows is None and caches.k.shape[0] < B:
        raise ValueError(f"k_cache has {caches.k.shape[0]} rows, must have q's B={B} at least, or pass cache_batch_idx")


def _check_new(q: Tensor, k: Tensor, v: Tensor, caches: Caches) -> None:
    for name, x, cache in (("k", k, caches.k), ("v", v, caches.v)):
        want = (q.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(x.shape) != want:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be (B, N, heads, head dim) = {want}")
        if x.dtype != cache.dtype or x.device != cache.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, must be {name}_cache's {cache.dtype} on {cache.device}"
            )
        if x.stride(3) != 1 or cache.stride(3) != 1:
            raise ValueError(f"the last dimension of {name} and {name}_cache must be contiguous")
    if caches.lengths is None:
        raise ValueError("cache_seqlens is missing: k and v are appended behind that many tokens")


def _check_rotary(q: Tensor, k: Tensor | None, turn: Turn) -> None:
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
    if not turn.cos.is_floating_point() or turn.cos.device != q.device or turn.sin.device != q.device:
        raise ValueError(f"rotary_cos is {turn.cos.dtype} on {turn.cos.device}, must be floating point on {q.device}")
