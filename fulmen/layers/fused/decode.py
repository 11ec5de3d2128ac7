"""A decoding step of latent attention on a GPU: RoPE and the writes to the cache in one launch.

Token n of row b stands at position ends[b] + n. Programs of a token take HEADS heads each; the first writes the latent
and the turned key to the cache as well, and the row's length for the attention that follows.
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
def latent_step_kernel(
    q_ptr, latent_ptr, k_ptr, cos_ptr, sin_ptr, ends_ptr, kv_ptr, out_ptr, lengths_ptr,
    sq_b, sq_n, sq_h, sl_b, sl_n, sk_b, sk_n, skv_b, skv_n, so_b, so_n, so_h, N, H, capacity, positions,
    R: tl.constexpr, R_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turns q, whose pointer is at the elements to turn, into out, and latent and k into row ends[b] + n of kv."""
    blocks = tl.cdiv(H, HEADS)
    token = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    h = block * HEADS + tl.arange(0, HEADS)
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    end = tl.load(ends_ptr + b)
    position = tl.minimum(tl.maximum(end + n, 0), positions - 1)
    cos, sin = angles(cos_ptr, sin_ptr, position, 1.0, HALF, HALF_P2)
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    mask = (h < H)[:, None] & there[None, :]
    x = tl.load(q_ptr + b * sq_b + n * sq_n + h.to(tl.int64)[:, None] * sq_h + at[None, :], mask, 0.0).to(tl.float32)
    y = turned(x, cos[None, :], sin[None, :], HEADS, HALF_P2, INTERLEAVED)
    out = out_ptr + b * so_b + n * so_n + h.to(tl.int64)[:, None] * so_h + at[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask)
    if block == 0:
        row = kv_ptr + b * skv_b + tl.minimum(position, capacity - 1) * skv_n
        i = tl.arange(0, R_P2)
        tl.store(row + i, tl.load(latent_ptr + b * sl_b + n * sl_n + i, i < R), i < R)
        k = tl.load(k_ptr + b * sk_b + n * sk_n + at, there, 0.0).to(tl.float32)[None, :]
        z = turned(k, cos[None, :], sin[None, :], 1, HALF_P2, INTERLEAVED)
        tl.store(row + R + at[None, :], z.to(kv_ptr.dtype.element_ty), there[None, :])
        if n == 0:
            tl.store(lengths_ptr + b, end + N)


def step_launch(
    q: Tensor, latent: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, ends: Tensor, kv: Tensor, out: Tensor,
    lengths: Tensor, interleaved: bool,
) -> Launch:  # fmt: skip
    (B, N, H, _), R, half = q.shape, latent.shape[2], cos.shape[1]
    strides = (*q.stride()[:3], *latent.stride()[:2], *k_rope.stride()[:2], *kv.stride()[:2], *out.stride()[:3])
    sizes = (N, H, kv.shape[1], cos.shape[0])
    constants = (R, p2(R), half, p2(half), interleaved, HEADS)
    tensors = (q, latent, k_rope, cos, sin, ends, kv, out, lengths)
    return Launch(latent_step_kernel, B * N * triton.cdiv(H, HEADS), tensors, (*strides, *sizes, *constants), WARPS)


def step(
    q: Tensor, latent: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, ends: Tensor, kv: Tensor, out: Tensor,
    lengths: Tensor, interleaved: bool,
) -> None:  # fmt: skip
    """Writes RoPE of q to out, latent and RoPE of k_rope to kv from `ends` on, and ends + N to lengths.

    q, out (B, N, H, P), latent (B, N, R), k_rope (B, N, P), kv (B, capacity, R + P); ends, lengths int32 (B,); cos, sin
    (positions, P / 2).
    """
    run(step_launch, (q, latent, k_rope, cos, sin, ends, kv, out, lengths), interleaved)
