"""A decoding step of latent attention on a GPU, around the attention itself: a launch before it and one after it.

Before, for token n of row b, which stands at position begin[b] + n:

    q_out[h] = [q_nope[h] W_k[h] | rope(q_rope[h])]      the queries as `latent_attention` reads them
    kv[place] = [norm(latent) | rope(k_rope)]            its place in the cache, row b of it, or in a page by a table

After:  y[h] = o[h] W_v[h]^T, all heads side by side as o_proj reads them.

Of few rows (MAX_ROWS) the launches have programs for the products: a head and some columns each, all tokens at once.
Others leave the products to BLAS. The other programs take a token and HEADS heads each, and the first of them writes to
the cache, normed if there is a weight; `place_of` in append.py says where.

From Hopper on both start early, as in `linear.py`. They read weights, `begin`, RoPE's tables and the table of pages
before they wait: no launch of a step writes those before them. The layer makes RoPE's before the step's first launch,
and the weight of a parametrised module. The first lets the attention start only after its own wait: all launches before
it have ended then, and the attention reads older keys while this one still runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fulmen.launch import Launch, starting, starts_early
from fulmen.layers.fused.append import place_of
from fulmen.layers.fused.projections import MAX_ROWS
from fulmen.layers.fused.rotary import angles, next_power_of_2, pairs, turned
from fulmen.tiles import padded

HEADS = 16  # at a time
# Columns of W_k and rows of W_v that a program takes. MLA's step B1 45.5 us, with 128 46.2 and with 32 45.7; B16 89.9
# with those of one row, 89.3 with 128 and 88.4 with 32.
ONE_ROW, FEW_ROWS = (64, 16), (128, 32)


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def absorb(
    q_ptr, w_ptr, out_ptr, pid, so_h, so_t, sw_h, T, H,
    D: tl.constexpr, NOPE: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """q_nope [T, NOPE] of a head times W_k [NOPE, COLUMNS] of it."""
    BLOCKS: tl.constexpr = (R + COLUMNS - 1) // COLUMNS
    h = (pid // BLOCKS).to(tl.int64)
    r = pid % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    d = tl.arange(0, padded(NOPE))
    t = tl.arange(0, ROWS)
    w = tl.load(w_ptr + h * sw_h + d[:, None] * R + r[None, :], (d < NOPE)[:, None] & (r < R)[None, :], 0.0)
    if EARLY:
        gdc_wait()
    if ROWS == 1:  # products in registers: a tensor core would multiply zeros
        q = tl.load(q_ptr + h * D + d, d < NOPE, 0.0).to(tl.float32)
        if EARLY:
            gdc_launch_dependents()
        acc = tl.sum(w.to(tl.float32) * q[:, None], axis=0)[None, :]
    else:
        rows = q_ptr + (t.to(tl.int64)[:, None] * H + h) * D
        q = tl.load(rows + d[None, :], (t < T)[:, None] & (d < NOPE)[None, :], 0.0)
        if EARLY:
            gdc_launch_dependents()
        acc = tl.dot(q, w, input_precision="ieee")
    at = out_ptr + h * so_h + t.to(tl.int64)[:, None] * so_t + r[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), (t < T)[:, None] & (r < R)[None, :])


@triton.jit
def latent_step_kernel(
    q_ptr, latent_ptr, down_ptr, norm_ptr, cos_ptr, sin_ptr, begin_ptr, table_ptr, kv_ptr, w_ptr, out_ptr,
    strides,  # tokens of latent and down, pages and rows of kv, heads and tokens of out, heads of w
    sizes,  # T, N, H, rows of a page, pages, pages of a row, rows of cos
    eps, NOPE: tl.constexpr, R: tl.constexpr, R_P2: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, EARLY: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """q (T, H, NOPE + 2 HALF); the latent, the norm's weight, the table and w may be None."""
    sl, sd, skv_p, skv_n, so_h, so_t, sw_h = strides
    T, N, H, page, pages, width, positions = sizes
    D: tl.constexpr = NOPE + 2 * HALF
    pid = tl.program_id(0)
    products = 0
    if w_ptr is not None:
        products = H * ((R + COLUMNS - 1) // COLUMNS)
        if pid < products:
            absorb(q_ptr, w_ptr, out_ptr, pid, so_h, so_t, sw_h, T, H, D, NOPE, R, COLUMNS, ROWS, EARLY)
    if pid >= products:
        pid -= products
        blocks = tl.cdiv(H, HEADS)
        token = (pid // blocks).to(tl.int64)
        block = pid % blocks
        h = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        b = token // N
        position = tl.load(begin_ptr + b) + token % N
        cos, sin = angles(cos_ptr, sin_ptr, tl.minimum(position, positions - 1), 1.0, HALF, HALF_P2)
        entry, place, written = place_of(table_ptr, b, position, page, pages, width)
        if EARLY:
            gdc_wait()
        at, there = pairs(HALF, HALF_P2, INTERLEAVED)
        mask = (h < H)[:, None] & there[None, :]
        x = tl.load(q_ptr + (token * H + h[:, None]) * D + NOPE + at[None, :], mask, 0.0).to(tl.float32)
        if EARLY:
            gdc_launch_dependents()
        y = turned(x, cos[None, :], sin[None, :], HEADS, HALF_P2, INTERLEAVED)
        out = out_ptr + h[:, None] * so_h + token * so_t + R + at[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask)
        if block == 0:
            row = kv_ptr + entry * skv_p + place * skv_n
            i = tl.arange(0, R_P2)
            source = down_ptr + token * sd
            if latent_ptr is not None:
                source = latent_ptr + token * sl
            latent = tl.load(source + i, i < R, 0.0)
            if norm_ptr is not None:
                latent = latent.to(tl.float32)
                latent *= tl.rsqrt(tl.sum(latent * latent) / R + eps)
                latent *= tl.load(norm_ptr + i, i < R, 0.0).to(tl.float32)
            tl.store(row + i, latent.to(kv_ptr.dtype.element_ty), (i < R) & written)
            k = tl.load(down_ptr + token * sd + R + at, there, 0.0).to(tl.float32)[None, :]
            z = turned(k, cos[None, :], sin[None, :], 1, HALF_P2, INTERLEAVED)
            tl.store(row + R + at[None, :], z.to(kv_ptr.dtype.element_ty), (there & written)[None, :])


@triton.jit
def latent_value_kernel(
    o_ptr, w_ptr, y_ptr, so_b, so_h, so_n, sw_h, T, N, H, NOPE: tl.constexpr, E: tl.constexpr, R: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y (T, H, E): W_v [BLOCK_E, R] of a head times o^T [R, T] of it."""
    BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    h = (tl.program_id(0) // BLOCKS).to(tl.int64)
    e = tl.program_id(0) % BLOCKS * BLOCK_E + tl.arange(0, BLOCK_E)
    r = tl.arange(0, padded(R))
    t = tl.arange(0, ROWS)
    w = tl.load(w_ptr + h * sw_h + (NOPE + e)[:, None] * R + r[None, :], (e < E)[:, None] & (r < R)[None, :], 0.0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if ROWS == 1:
        o = tl.load(o_ptr + h * so_h + r, r < R, 0.0).to(tl.float32)
        acc = tl.sum(w.to(tl.float32) * o[None, :], axis=1)[:, None]
    else:
        tokens = ((t // N).to(tl.int64) * so_b + (t % N) * so_n)[None, :]
        o = tl.load(o_ptr + h * so_h + tokens + r[:, None], (r < R)[:, None] & (t < T)[None, :], 0.0)
        acc = tl.dot(w, o, input_precision="ieee")
    at = y_ptr + (t.to(tl.int64)[None, :] * H + h) * E + e[:, None]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), (e < E)[:, None] & (t < T)[None, :])


# ------------------------------------------------------------------------------------------------ launches


def latent_step(
    facts: tuple[int, bool, float], queries: Tensor, latent: Tensor | None, down: Tensor, norm: Tensor | None,
    cos: Tensor, sin: Tensor, begin: Tensor, table: Tensor | None, kv: Tensor, up: Tensor | None,
) -> tuple[tuple[Tensor], Launch]:  # fmt: skip
    """q_out (H, B, N, R + P) and its launch, which also writes to kv.

    facts       nope, whether RoPE is interleaved, the norm's eps
    queries     (B, N, H * (nope + P)); down (B, N, R + P): the latent, and k_rope in its last columns
    latent      (B, N, R) in place of down's; None: those, which are normed if there is a weight `norm`
    begin       int32 (B,): tokens of each row before this step
    kv          (B, capacity, R + P), or (pages, page, R + P) with a table, int32 (B, pages of a row)
    up          kv_b_proj's weight (H, nope + E, R); None: the first R columns of q_out are left as they are
    """
    (B, N, _), (nope, interleaved, eps), half = queries.shape, facts, cos.shape[1]
    R, H = down.shape[2] - 2 * half, queries.shape[2] // (nope + 2 * half)
    out = torch.empty(H, B, N, R + 2 * half, dtype=queries.dtype, device=queries.device)
    tokens = (0 if latent is None else latent.stride(1), down.stride(1))
    strides = (*tokens, *kv.stride()[:2], out.stride(0), out.stride(2))
    sizes = (B * N, N, H, kv.shape[1], kv.shape[0], 1 if table is None else table.shape[1], cos.shape[0])
    early = starts_early(queries.device)
    rows = 1 if B * N == 1 else MAX_ROWS
    columns, _ = ONE_ROW if rows == 1 else FEW_ROWS
    constants = (nope, R, next_power_of_2(R), half, next_power_of_2(half), interleaved, early, HEADS, columns, rows)
    tensors = (queries, latent, down, norm, cos, sin, begin, table, kv, up, out)
    grid = B * N * triton.cdiv(H, HEADS) + (0 if up is None else H * triton.cdiv(R, columns))
    rest = ((*strides, 0 if up is None else up.stride(0)), sizes, eps, *constants)
    options = {"num_warps": 2 if up is None else 4} | starting(early)
    return (out,), Launch(latent_step_kernel, grid, tensors, rest, options)


def latent_value(nope: int, o: Tensor, up: Tensor) -> tuple[tuple[Tensor], Launch]:
    """y (B, N, H * E) of o (B, H, N, R) and up (H, nope + E, R), and its launch."""
    (B, H, N, R), E = o.shape, up.shape[1] - nope
    y = torch.empty(B, N, H * E, dtype=o.dtype, device=o.device)
    early = starts_early(o.device)
    rows = 1 if B * N == 1 else MAX_ROWS
    _, block = ONE_ROW if rows == 1 else FEW_ROWS
    rest = (*o.stride()[:3], up.stride(0), B * N, N, H, nope, E, R, early, block, rows)
    options = {"num_warps": 4} | starting(early)
    return (y,), Launch(latent_value_kernel, H * triton.cdiv(E, block), (o, up, y), rest, options)
