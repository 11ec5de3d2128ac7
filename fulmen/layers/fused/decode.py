"""A decoding step of latent attention on a GPU: RoPE and the writes to the cache in one launch.

Token n of row b stands at position begin[b] + n. Programs of a token take HEADS heads each. Memory is a cache, row b of
it for row b, or pages named by a table. A row without tokens (end[b] = begin[b]) writes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fulmen.launch import Launch
from fulmen.layers.fused.rotary import angles, p2, pairs, run, turned

HEADS = 16  # at a time
WARPS = {"num_warps": 2}


@triton.jit
def place_of(table_ptr, begin, n, b, st_b, page, capacity, PAGED: tl.constexpr):
    """Which page (or row of a cache), and where in it, token n of row b is written."""
    position = tl.minimum(begin + n, capacity - 1)
    if PAGED:
        return tl.load(table_ptr + b * st_b + position // page).to(tl.int64), position % page
    return b, position


@triton.jit
def latent_step_kernel(
    q_ptr, latent_ptr, k_ptr, cos_ptr, sin_ptr, begin_ptr, end_ptr, table_ptr, kv_ptr, out_ptr,
    sq_b, sq_n, sq_h, sl_b, sl_n, sk_b, sk_n, skv_p, skv_n, so_b, so_n, so_h, st_b, N, H, page, capacity, positions,
    R: tl.constexpr, R_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAGED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turns q, whose pointer is at the elements to turn, into out, and writes latent and k, turned, to their place."""
    blocks = tl.cdiv(H, HEADS)
    token = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    h = block * HEADS + tl.arange(0, HEADS)
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    begin = tl.load(begin_ptr + b)
    cos, sin = angles(cos_ptr, sin_ptr, tl.minimum(begin + n, positions - 1), 1.0, HALF, HALF_P2)
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    mask = (h < H)[:, None] & there[None, :]
    x = tl.load(q_ptr + b * sq_b + n * sq_n + h.to(tl.int64)[:, None] * sq_h + at[None, :], mask, 0.0).to(tl.float32)
    y = turned(x, cos[None, :], sin[None, :], HEADS, HALF_P2, INTERLEAVED)
    out = out_ptr + b * so_b + n * so_n + h.to(tl.int64)[:, None] * so_h + at[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask)
    if block == 0 and tl.load(end_ptr + b) > begin:
        page_at, place = place_of(table_ptr, begin, n, b, st_b, page, capacity, PAGED)
        row = kv_ptr + page_at * skv_p + place * skv_n
        i = tl.arange(0, R_P2)
        tl.store(row + i, tl.load(latent_ptr + b * sl_b + n * sl_n + i, i < R), i < R)
        k = tl.load(k_ptr + b * sk_b + n * sk_n + at, there, 0.0).to(tl.float32)[None, :]
        z = turned(k, cos[None, :], sin[None, :], 1, HALF_P2, INTERLEAVED)
        tl.store(row + R + at[None, :], z.to(kv_ptr.dtype.element_ty), there[None, :])


def latent_step_launch(
    q: Tensor, latent: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, begin: Tensor, end: Tensor, table: Tensor,
    kv: Tensor, out: Tensor, interleaved: bool, paged: bool,
) -> Launch:  # fmt: skip
    (B, N, H, _), R, half, page = q.shape, latent.shape[2], cos.shape[1], kv.shape[1]
    capacity = page * table.shape[1] if paged else page
    strides = (*q.stride()[:3], *latent.stride()[:2], *k_rope.stride()[:2], *kv.stride()[:2], *out.stride()[:3])
    sizes = (table.stride(0), N, H, page, capacity, cos.shape[0])
    constants = (R, p2(R), half, p2(half), interleaved, paged, HEADS)
    tensors = (q, latent, k_rope, cos, sin, begin, end, table, kv, out)
    return Launch(latent_step_kernel, B * N * triton.cdiv(H, HEADS), tensors, (*strides, *sizes, *constants), WARPS)


def latent_step(
    q: Tensor, latent: Tensor, k_rope: Tensor, tables: tuple[Tensor, Tensor], begin: Tensor, end: Tensor,
    table: Tensor | None, kv: Tensor, out: Tensor, interleaved: bool,
) -> None:  # fmt: skip
    """Writes RoPE of q to out, and latent and RoPE of k_rope side by side to their places of kv.

    q, out (B, N, H, P), latent (B, N, R), k_rope (B, N, P); kv (B, capacity, R + P), or (pages, page, R + P) with a
    table, int32 (B, pages of a row). begin, end: int32 (B,), tokens of each row before this step and after it.
    """
    names = begin[None] if table is None else table
    tensors = (q, latent, k_rope, *tables, begin, end, names, kv, out)
    run(latent_step_launch, tensors, interleaved, table is not None)
