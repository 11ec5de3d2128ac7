"""A decoding step on a GPU: RoPE and the writes to the cache in one launch, for keys and values or for latents.

Token n of row b stands at position begin[b] + n. Programs of a token take HEADS heads each. Memory is a cache, row b of
it for row b, or pages named by a table. A row without tokens (end[b] = begin[b]) writes nothing.
"""

from __future__ import annotations

import torch
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
def kv_step_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, begin_ptr, end_ptr, table_ptr, k_out, v_out, q_out,
    sq_b, sq_n, sq_h, sk_b, sk_n, sk_h, so_p, so_h, so_n, st_b, N, H, H_KV, page, capacity, positions,
    D: tl.constexpr, REST_P2: tl.constexpr, D_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAGED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turns q (B, N, H, D) into q_out, which is contiguous, and k into its place; copies v. 2 HALF elements turn."""
    of_q = tl.cdiv(H, HEADS)
    blocks = of_q + tl.cdiv(H_KV, HEADS)
    token = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    begin = tl.load(begin_ptr + b)
    keys = block >= of_q
    h = tl.where(keys, block - of_q, block) * HEADS + tl.arange(0, HEADS)
    heads = tl.where(keys, H_KV, H)
    page_at, place = place_of(table_ptr, begin, n, b, st_b, page, capacity, PAGED)
    here = h.to(tl.int64)
    if keys:
        rows = k_ptr + b * sk_b + n * sk_n + here[:, None] * sk_h
        out = k_out + page_at * so_p + place * so_n + here[:, None] * so_h
    else:
        rows = q_ptr + b * sq_b + n * sq_n + here[:, None] * sq_h
        out = q_out + ((b * N + n) * H + here)[:, None] * D
    served = (tl.load(end_ptr + b) > begin) | (block < of_q)
    there = (h < heads) & served
    if HALF > 0:
        at, inside = pairs(HALF, HALF_P2, INTERLEAVED)
        cos, sin = angles(cos_ptr, sin_ptr, tl.minimum(begin + n, positions - 1), 1.0, HALF, HALF_P2)
        mask = there[:, None] & inside[None, :]
        x = tl.load(rows + at[None, :], mask, 0.0).to(tl.float32)
        y = turned(x, cos[None, :], sin[None, :], HEADS, HALF_P2, INTERLEAVED)
        tl.store(out + at[None, :], y.to(q_out.dtype.element_ty), mask)
    if 2 * HALF < D:
        i = 2 * HALF + tl.arange(0, REST_P2)
        rest = there[:, None] & (i < D)[None, :]
        tl.store(out + i[None, :], tl.load(rows + i[None, :], rest, 0.0), rest)
    if keys:
        e = tl.arange(0, D_P2)
        in_v = there[:, None] & (e < D)[None, :]
        v = tl.load(v_ptr + b * sk_b + n * sk_n + here[:, None] * sk_h + e[None, :], in_v, 0.0)
        tl.store(v_out + page_at * so_p + place * so_n + here[:, None] * so_h + e[None, :], v, in_v)


def kv_step_launch(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, begin: Tensor, end: Tensor, table: Tensor,
    k_out: Tensor, v_out: Tensor, q_out: Tensor, turns: bool, interleaved: bool, paged: bool,
) -> Launch:  # fmt: skip
    (B, N, H, D), H_KV, half = q.shape, k.shape[2], cos.shape[-1] if turns else 0
    page = k_out.shape[2]
    capacity = page * table.shape[1] if paged else page
    strides = (*q.stride()[:3], *k.stride()[:3], *k_out.stride()[:3], table.stride(0))
    sizes = (N, H, H_KV, page, capacity, cos.shape[0])
    constants = (D, p2(max(D - 2 * half, 1)), p2(D), half, p2(max(half, 1)), interleaved, paged, HEADS)
    tensors = (q, k, v, cos, sin, begin, end, table, k_out, v_out, q_out)
    grid = B * N * (triton.cdiv(H, HEADS) + triton.cdiv(H_KV, HEADS))
    return Launch(kv_step_kernel, grid, tensors, (*strides, *sizes, *constants), WARPS)


def kv_step(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor] | None, begin: Tensor, end: Tensor,
    table: Tensor | None, k_out: Tensor, v_out: Tensor, interleaved: bool,
) -> Tensor:  # fmt: skip
    """RoPE of q (B, N, H, D), contiguous. Writes RoPE of k, and v, (B, N, H_KV, D), to their places of k_out and v_out.

    k_out, v_out  (B, H_KV, capacity, D), or (pages, H_KV, page, D) with a table, int32 (B, pages of a row)
    tables        cos and sin (positions, D / 2 at most); None: nothing turns
    begin, end    int32 (B,): tokens of each row before this step and after it
    """
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = (q, q) if tables is None else tables  # else of no use
    names = begin[None] if table is None else table
    tensors = (q, k, v, cos, sin, begin, end, names, k_out, v_out, q_out)
    run(kv_step_launch, tensors, tables is not None, interleaved, table is not None)
    return q_out


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
    table; the others as in `kv_step`.
    """
    names = begin[None] if table is None else table
    tensors = (q, latent, k_rope, *tables, begin, end, names, kv, out)
    run(latent_step_launch, tensors, interleaved, table is not None)
