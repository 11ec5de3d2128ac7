"""New keys and values into a cache, RoPE on them and on their queries: one pass over memory on a GPU.

A program takes HEADS heads of one token of q, k or v. Token n of row b stands at position lengths[b] + n; `place_of`
says where in memory that is. q and k are turned by cos and sin of their positions (`turned` in rotary.py), v is copied.
Program 0 of each row writes its new length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from fulmen.launch import Launch, starting, starts_early
from fulmen.layers.fused.rotary import HEADS, WARPS, angles, next_power_of_2, pairs, turned

CONTIGUOUS = torch.contiguous_format


@triton.jit
def place_of(table_ptr, b, position, page, pages, width):
    """Page, row in it, and whether a token of row b is written: not beyond the capacity, or in a page out of range.

    Without a table row b of a cache is its page, and width is 1.
    """
    there = position < page * width
    entry = b
    if table_ptr is not None:
        entry = tl.load(table_ptr + b * width + position // page, mask=there, other=-1).to(tl.int64)
        there = there & (entry >= 0) & (entry < pages)
    return entry, position % page, there


@triton.jit
def copy_heads(
    from_ptr, to_ptr, from_h, to_h, h, H, cos_ptr, sin_ptr, angle, there,
    D: tl.constexpr, D_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, TURN: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Heads h of a token, the first 2 HALF elements of each turned if TURN; nothing unless `there`."""
    x_rows = from_ptr + h.to(tl.int64)[:, None] * from_h
    out_rows = to_ptr + h.to(tl.int64)[:, None] * to_h
    i = tl.arange(0, D_P2)
    first: tl.constexpr = 2 * HALF if TURN else 0
    mask = ((h < H) & there)[:, None] & ((i < D) & (i >= first))[None, :]
    tl.store(out_rows + i[None, :], tl.load(x_rows + i[None, :], mask), mask)
    if TURN:
        cos, sin = angles(cos_ptr, sin_ptr, angle, 1.0, HALF, HALF_P2)
        at, inside = pairs(HALF, HALF_P2, INTERLEAVED)
        mask = ((h < H) & there)[:, None] & inside[None, :]
        x = tl.load(x_rows + at[None, :], mask, 0.0).to(tl.float32)
        cos = cos.to(tl.float32)[None, :]
        y = turned(x, cos, sin.to(tl.float32)[None, :], HEADS, HALF_P2, INTERLEAVED)
        tl.store(out_rows + at[None, :], y.to(to_ptr.dtype.element_ty), mask)


@triton.jit
def cache_append_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, lengths_ptr,
    table_ptr, cos_ptr, sin_ptr,  # or None
    new_lengths_ptr, q_out_ptr,
    strides,  # of q, k, v, q_out, k_cache, v_cache: B (or pages), N, heads
    sizes,  # N_Q, N_NEW, H, H_KV; rows of a page, pages, pages of a row, rows of cos
    D: tl.constexpr, D_P2: tl.constexpr, E: tl.constexpr, E_P2: tl.constexpr,
    HALF: tl.constexpr, HALF_P2: tl.constexpr,
    EACH_QUERY: tl.constexpr,  # query n is at its own position, else all are at the first new one's
    INTERLEAVED: tl.constexpr, EARLY: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    N_Q, N_NEW, H, H_KV, page, pages, width, last = sizes
    TURN: tl.constexpr = cos_ptr is not None
    blocks = tl.cdiv(H_KV, HEADS)
    of_q = tl.cdiv(H, HEADS) if TURN else 0
    parts = of_q + 2 * blocks
    pid = tl.program_id(0)
    part = pid % parts
    tokens = tl.maximum(N_Q, N_NEW)
    n = (pid // parts % tokens).to(tl.int64)
    b = (pid // parts // tokens).to(tl.int64)
    length = tl.maximum(tl.load(lengths_ptr + b), 0)
    position = length + n
    if pid % (parts * tokens) == 0:
        tl.store(new_lengths_ptr + b, length + N_NEW)

    if TURN:  # q_out_ptr is None otherwise
        if part < of_q:
            h = part * HEADS + tl.arange(0, HEADS)
            angle = tl.minimum(position if EACH_QUERY else length.to(tl.int64), last - 1)
            source = q_ptr + b * strides[0][0] + n * strides[0][1]
            to = q_out_ptr + b * strides[3][0] + n * strides[3][1]
            copy_heads(
                source, to, strides[0][2], strides[3][2], h, H, cos_ptr, sin_ptr, angle, n < N_Q,
                D, D_P2, HALF, HALF_P2, TURN, INTERLEAVED, HEADS,
            )  # fmt: skip
    if part >= of_q:
        entry, row, there = place_of(table_ptr, b, position, page, pages, width)
        there = there & (n < N_NEW)
        h = (part - of_q) % blocks * HEADS + tl.arange(0, HEADS)
        angle = tl.minimum(position, last - 1)
        if part - of_q < blocks:
            source = k_ptr + b * strides[1][0] + n * strides[1][1]
            to = k_cache_ptr + entry * strides[4][0] + row * strides[4][1]
            copy_heads(
                source, to, strides[1][2], strides[4][2], h, H_KV, cos_ptr, sin_ptr, angle, there,
                D, D_P2, HALF, HALF_P2, TURN, INTERLEAVED, HEADS,
            )  # fmt: skip
        else:
            source = v_ptr + b * strides[2][0] + n * strides[2][1]
            to = v_cache_ptr + entry * strides[5][0] + row * strides[5][1]
            copy_heads(
                source, to, strides[2][2], strides[5][2], h, H_KV, cos_ptr, sin_ptr, angle, there,
                E, E_P2, HALF, HALF_P2, False, INTERLEAVED, HEADS,
            )  # fmt: skip


def appended(
    options: tuple[bool, bool], q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor,
    table: Tensor | None, cos: Tensor | None, sin: Tensor | None,
) -> tuple[tuple[Tensor, ...], Launch]:  # fmt: skip
    """The new lengths and, if there is RoPE, q turned; their launch. options: each_query and interleaved."""
    B, N_Q, H, D = q.shape
    _, N_NEW, H_KV, E = v.shape
    outputs = (torch.empty_like(lengths), *(() if cos is None else (torch.empty_like(q, memory_format=CONTIGUOUS),)))
    half = 0 if cos is None else cos.shape[1]
    width = 1 if table is None else table.shape[1]
    parts = 2 * triton.cdiv(H_KV, HEADS) + (0 if cos is None else triton.cdiv(H, HEADS))
    strides = tuple(tuple(x.stride()[:3]) for x in (q, k, v, outputs[-1] if half else q, k_cache, v_cache))
    sizes = (N_Q, N_NEW, H, H_KV, k_cache.shape[1], k_cache.shape[0], width, 1 if cos is None else cos.shape[0])
    early = starts_early(q.device)
    constants = (
        D,
        next_power_of_2(D),
        E,
        next_power_of_2(E),
        half,
        next_power_of_2(max(half, 1)),
        *options,
        early,
        HEADS,
    )
    tensors = (q, k, v, k_cache, v_cache, lengths, table, cos, sin, *outputs, *([None] if cos is None else []))
    grid = B * max(N_Q, N_NEW) * parts
    return outputs, Launch(cache_append_kernel, grid, tensors, (strides, sizes, *constants), WARPS | starting(early))
