"""A decoding step of latent attention on a GPU: RoPE and the writes to the cache in one launch.

Token n of row b stands at position begin[b] + n. Programs of a token take HEADS heads each. Memory is a cache, row b of
it for row b, or pages named by a table; `place_of` in append.py says where a token goes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fulmen.launch import Launch
from fulmen.layers.fused.append import place_of
from fulmen.layers.fused.rotary import angles, p2, pairs, run, turned

HEADS = 16  # at a time
WARPS = {"num_warps": 2}


@triton.jit
def latent_step_kernel(
    q_ptr, latent_ptr, k_ptr, cos_ptr, sin_ptr, begin_ptr,
    table_ptr,  # or None
    kv_ptr, out_ptr,
    sq_b, sq_n, sq_h, sl_b, sl_n, sk_b, sk_n, skv_p, skv_n, so_b, so_n, so_h, N, H, page, pages, width, positions,
    R: tl.constexpr, R_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turns q, whose pointer is at the elements to turn, into out, and writes latent and k, turned, to their place."""
    blocks = tl.cdiv(H, HEADS)
    token = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    h = block * HEADS + tl.arange(0, HEADS)
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    position = tl.load(begin_ptr + b) + n
    cos, sin = angles(cos_ptr, sin_ptr, tl.minimum(position, positions - 1), 1.0, HALF, HALF_P2)
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    mask = (h < H)[:, None] & there[None, :]
    x = tl.load(q_ptr + b * sq_b + n * sq_n + h.to(tl.int64)[:, None] * sq_h + at[None, :], mask, 0.0).to(tl.float32)
    y = turned(x, cos[None, :], sin[None, :], HEADS, HALF_P2, INTERLEAVED)
    out = out_ptr + b * so_b + n * so_n + h.to(tl.int64)[:, None] * so_h + at[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask)
    if block == 0:
        entry, place, written = place_of(table_ptr, b, position, page, pages, width)
        row = kv_ptr + entry * skv_p + place * skv_n
        i = tl.arange(0, R_P2)
        tl.store(row + i, tl.load(latent_ptr + b * sl_b + n * sl_n + i, i < R), (i < R) & written)
        k = tl.load(k_ptr + b * sk_b + n * sk_n + at, there, 0.0).to(tl.float32)[None, :]
        z = turned(k, cos[None, :], sin[None, :], 1, HALF_P2, INTERLEAVED)
        tl.store(row + R + at[None, :], z.to(kv_ptr.dtype.element_ty), (there & written)[None, :])


def latent_step_launch(
    q: Tensor, latent: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, begin: Tensor, table: Tensor | None,
    kv: Tensor, out: Tensor, interleaved: bool,
) -> Launch:  # fmt: skip
    (B, N, H, _), R, half = q.shape, latent.shape[2], cos.shape[1]
    strides = (*q.stride()[:3], *latent.stride()[:2], *k_rope.stride()[:2], *kv.stride()[:2], *out.stride()[:3])
    sizes = (N, H, kv.shape[1], kv.shape[0], 1 if table is None else table.shape[1], cos.shape[0])
    constants = (R, p2(R), half, p2(half), interleaved, HEADS)
    tensors = (q, latent, k_rope, cos, sin, begin, table, kv, out)
    return Launch(latent_step_kernel, B * N * triton.cdiv(H, HEADS), tensors, (*strides, *sizes, *constants), WARPS)


def latent_step(
    q: Tensor, latent: Tensor, k_rope: Tensor, tables: tuple[Tensor, Tensor], begin: Tensor, table: Tensor | None,
    kv: Tensor, out: Tensor, interleaved: bool,
) -> None:  # fmt: skip
    """Writes RoPE of q to out, and latent and RoPE of k_rope side by side to their places of kv.

    q, out (B, N, H, P), latent (B, N, R), k_rope (B, N, P); kv (B, capacity, R + P), or (pages, page, R + P) with a
    table, int32 (B, pages of a row). begin: int32 (B,), tokens of each row before this step.
    """
    run(latent_step_launch, (q, latent, k_rope, *tables, begin, table, kv, out), interleaved)
