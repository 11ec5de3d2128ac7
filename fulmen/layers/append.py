"""Appends keys and values to a cache in place, with RoPE on them and on their queries: one operator, which mutates.

    q, lengths = append(q, k, v, k_cache, v_cache, lengths, table, cos, sin)

On a GPU with Triton one kernel does all of it and nothing is read back (`fused/append.py`); elsewhere PyTorch's
operations do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulmen.boundary import is_plain_eager, register_mutation
from fulmen.layers.fused import fused_call
from fulmen.layers.rotary import apply_rotary

_note_change = torch._C._increment_version  # so that autograd refuses a backward that saved an earlier cache


def append(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor | None = None,
    cos: Tensor | None = None, sin: Tensor | None = None, *, each_query: bool = True, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes k and v behind the first lengths[b] tokens of row b; returns q, turned, and the new lengths.

    q, k, v          (B, N_Q, H, D), (B, N_NEW, H_KV, D), (B, N_NEW, H_KV, E); a head is contiguous, in caches, too
    k_cache, v_cache (B, capacity, H_KV, .) or, with a table, (pages, page, H_KV, .); changed in place. What is beyond
                     the capacity or in a page out of range is not written.
    lengths, table   int32 (B,) and (B, pages of a row), on the device
    cos, sin         (positions, dim / 2): the first dim elements of heads of q and k are turned; None: q is returned
    each_query       query n stands at position lengths[b] + n, else all of them at lengths[b]
    """
    rest = [x if x is None or x.is_contiguous() else x.contiguous() for x in (lengths, table, cos, sin)]
    tensors: tuple[Any, ...] = (q, k, v, k_cache, v_cache, *rest)
    if is_plain_eager(*tensors) and not torch.is_grad_enabled():
        turned, after = _append(*tensors, each_query, interleaved)  # type: ignore[call-arg]
        _note_change((k_cache, v_cache))
    else:
        turned, after = torch.ops.fulmen.cache_append(*tensors, each_query, interleaved)
    return q if cos is None else turned, after


def _append(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, each_query: bool, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not lengths.numel():
        return _append_fake(q, k, v, k_cache, v_cache, lengths, table, cos)
    tensors = (q, k, v, k_cache, v_cache, lengths, table, cos, sin)
    found = fused_call("append", "appended", (each_query, interleaved), *tensors, like=(q,))
    if found is None:
        return _append_plainly(*tensors, each_query, interleaved)
    after, *turned = found
    return turned[0] if turned else q.new_empty(0, 0, 0, 0), after


def _append_fake(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor | None,
    cos: Tensor | None, *others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    turned = q.new_empty(q.shape if cos is not None else (0, 0, 0, 0))  # none is asked for
    return turned, torch.empty_like(lengths)


def _append_plainly(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, each_query: bool, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, N_NEW = k.shape[:2]
    lengths = lengths.clamp(min=0)
    position = lengths[:, None] + torch.arange(N_NEW, device=k.device)
    turned = q.new_empty(0, 0, 0, 0)
    if cos is not None and sin is not None:
        k = _turned(k, cos, sin, position, interleaved)
        queries = (
            torch.arange(q.shape[1], device=q.device) if each_query else q.new_zeros(q.shape[1], dtype=torch.int32)
        )
        turned = _turned(q, cos, sin, lengths[:, None] + queries, interleaved)
    pages, page = k_cache.shape[:2]
    if table is None:
        entry = torch.arange(B, device=k.device)[:, None].expand_as(position)
        there = position < page
    else:
        there = position < page * table.shape[1]
        entry = table.long().gather(1, (position // page).clamp(max=max(table.shape[1] - 1, 0)).long())
        there = there & (entry >= 0) & (entry < pages)
    at = (entry[there], (position % page)[there])
    k_cache[at], v_cache[at] = k[there], v[there]
    return turned, lengths + N_NEW


def _turned(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """x (B, N, H, D) at these positions (B, N), clamped to the tables."""
    at = position.clamp(max=cos.shape[0] - 1).long()
    exact = torch.promote_types(x.dtype, torch.float32)
    y = apply_rotary(x.transpose(1, 2), cos.to(exact)[at], sin.to(exact)[at], interleaved)
    return y.transpose(1, 2).contiguous()


_lib = torch.library.Library("fulmen", "FRAGMENT")
register_mutation(
    _lib,
    "cache_append(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor? table,"
    " Tensor? cos, Tensor? sin, bool each_query, bool interleaved) -> (Tensor q, Tensor lengths)",
    _append,
    _append_fake,
)
