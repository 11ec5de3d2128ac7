"""Linear layers of few rows on a GPU: all weights that share x in one launch, without split K.

    y_i = x W_i^T + b_i              x (rows, K), W_i (n_i, K), up to three of them
    y_0 = activation(y_0)            if asked for

A decoding step reads each weight once and does little else, so a product takes as long as memory needs for its weight.
BLAS splits K over programs to fill the GPU and adds the parts in a second launch, a pair for each weight. Here a
program owns BLOCK_N columns of one y and walks all of K; the programs of all weights are one grid.

    one row    w * x in fp32 registers [BLOCK_N, BLOCK_K], summed over K at the end
    few rows   tensor cores: w [BLOCK_N, BLOCK_K] is the operand with many rows, x^T [BLOCK_K, ROWS] the other

An RMSNorm between two products is no pass of its own. The first launch multiplies y_0 by the norm's weight, and each
program writes its sum of y_0^2. The second launch takes this y_0 as x, and divides its y by sqrt(mean(y_0^2) + eps).

From Hopper on (OVERLAPS) the kernel that follows may start at once. An EARLY launch starts while the kernel before it
still runs (programmatic dependent launch) and reads weights, of one row into registers, of others into L2, before it
waits for that kernel to end. It must not be the first launch of a step: what comes before that may write weights.
Inference only: there is no backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fulmen.launch import Launch, shared_memory, starting, starts_early
from fulmen.layers.fused.lightning import ACTIVATIONS, activated
from fulmen.layers.fused.projections import MAX_WEIGHTS, Facts
from fulmen.tiles import padded


class Tile(NamedTuple):
    block_n: int
    block_k: int
    warps: int
    stages: int = 1


# On an H200, of y in bf16, K = 4096: us, in a graph behind a kernel of 2 us; beside it cuBLAS. In MLA's step n = 4096
# takes 1 us less with these tiles than with 2 x 2048 and 16 x 512; K = 1536, n = 6144 takes 1.4 less than with 8 x 512.
SHORT_ROW_TILE = Tile(4, 512, 4)  # one row, K = 1536
TILES = (  # rows up to, columns of all y up to, tile
    (1, 4096, Tile(2, 1024, 4)),  # n = 2112: 6.5, 15.2; 4096: 8.5, 13.1
    (1, None, Tile(2, 2048, 4)),  # 6144: 14.1, 28.6; 16384: 31.8, 40.8
    (16, 2112, Tile(16, 512, 2, 4)),  # 16 rows, n = 2112: 9.0, 15.7
    (16, 4096, Tile(16, 256, 2, 6)),  # 4096: 11.4, 13.5
    (16, 8192, Tile(64, 256, 4, 4)),  # 6144: 16.1, 29.5
    (16, None, Tile(64, 128, 4, 5)),  # 16384: 34.8, 41.5
    (64, 8192, Tile(64, 128, 4, 4)),  # 64 rows, n = 6144: 18.2, 28.7
    (64, None, Tile(128, 64, 8, 5)),  # 16384: 36.5, 41.3
)


def tile_of(rows: int, n: int, K: int, size: int, smem: int) -> Tile:
    """The tile for this many rows and columns, of elements of `size` bytes, within the shared memory."""
    tile = next(tile for most, widest, tile in TILES if rows <= most and (widest is None or n <= widest))
    if rows == 1 and K < 2048:
        tile = SHORT_ROW_TILE
    block_k, depth = min(tile.block_k, max(16, triton.next_power_of_2(K))), size * (tile.block_n + padded(rows))
    while rows > 1 and block_k > 64 and smem < 3 * block_k * depth:
        block_k //= 2
    return tile._replace(block_k=block_k, stages=max(1, min(tile.stages, smem // (block_k * depth))))


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def owned(pid, w0_ptr, w1_ptr, w2_ptr, y0_ptr, y1_ptr, y2_ptr, n0, n1, n2, BLOCK_N: tl.constexpr):
    """The weight and the y of a program, that y's columns, the first column of its own, and which of the three it is.

    A weight that is None is not there.
    """
    w_ptr, y_ptr, n, block, which = w0_ptr, y0_ptr, n0, pid, 0
    before = tl.cdiv(n0, BLOCK_N)
    if w1_ptr is not None:
        if pid >= before:
            w_ptr, y_ptr, n, block, which = w1_ptr, y1_ptr, n1, pid - before, 1
        before += tl.cdiv(n1, BLOCK_N)
    if w2_ptr is not None:
        if pid >= before:
            w_ptr, y_ptr, n, block, which = w2_ptr, y2_ptr, n2, pid - before, 2
    return w_ptr, y_ptr, n, block * BLOCK_N, which


@triton.jit
def biases(b0_ptr, b1_ptr, b2_ptr, which, offs_n, n):
    """The bias of these columns, [BLOCK_N]; zero where there is none."""
    found = tl.zeros(offs_n.shape, tl.float32)
    if b0_ptr is not None:
        found += tl.load(b0_ptr + offs_n, (offs_n < n) & (which == 0), 0.0).to(tl.float32)
    if b1_ptr is not None:
        found += tl.load(b1_ptr + offs_n, (offs_n < n) & (which == 1), 0.0).to(tl.float32)
    if b2_ptr is not None:
        found += tl.load(b2_ptr + offs_n, (offs_n < n) & (which == 2), 0.0).to(tl.float32)
    return found


@triton.jit
def load_squares(squares_ptr, r, rows, SQUARES: tl.constexpr):
    """Sums of squares (SQUARES, rows) of rows r of x. They are on their way while products run."""
    i = tl.arange(0, padded(SQUARES))[:, None]
    return tl.load(squares_ptr + i * rows + r[None, :], (i < SQUARES) & (r < rows)[None, :], 0.0)


@triton.jit
def load_norm(norm_ptr, offs_n, n, which):
    """The norm's weight for these columns, if they are y_0's."""
    return tl.load(norm_ptr + offs_n, (offs_n < n) & (which == 0), 0.0).to(tl.float32)


@triton.jit
def divisors(squares, K: tl.constexpr, eps):
    """sqrt(mean(x^2) + eps) of rows of x."""
    return tl.sqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def linear_row_kernel(
    x_ptr, norm_ptr, squares_ptr, w0_ptr, w1_ptr, w2_ptr, b0_ptr, b1_ptr, b2_ptr, y0_ptr, y1_ptr, y2_ptr, n0, n1, n2,
    eps, K: tl.constexpr, SQUARES: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x (K,); the weight of y_0's norm and the squares of x may be None. With the former y_2 are squares of y_0."""
    w_ptr, y_ptr, n, first, which = owned(
        tl.program_id(0), w0_ptr, w1_ptr, w2_ptr, y0_ptr, y1_ptr, y2_ptr, n0, n1, n2, BLOCK_N
    )
    offs_n = first + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    w_rows = w_ptr + tl.minimum(offs_n, n - 1).to(tl.int64)[:, None] * K  # columns beyond n are not stored
    if OVERLAPS:
        gdc_launch_dependents()
    ahead = load_tile(w_rows, 0, offs_k, K, BLOCK_K)
    if norm_ptr is not None:
        weight = load_norm(norm_ptr, offs_n, n, which)
    if EARLY:
        gdc_wait()
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, tl.arange(0, 1), 1, SQUARES)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k in range(0, K, BLOCK_K):
        w = ahead.to(tl.float32)
        if K > BLOCK_K:
            ahead = load_tile(w_rows, k + BLOCK_K, offs_k, K, BLOCK_K)
        at = k + offs_k
        x = tl.load(x_ptr + at, at < K, 0.0).to(tl.float32)
        acc += w * x[None, :]
    y = tl.sum(acc, axis=1)
    if squares_ptr is not None:
        y /= tl.sum(divisors(squares, K, eps))
    y += biases(b0_ptr, b1_ptr, b2_ptr, which, offs_n, n)
    if norm_ptr is not None:
        if which == 0:
            tl.store(y2_ptr + tl.program_id(0), tl.sum(tl.where(offs_n < n, y * y, 0.0)))
            y *= weight
    if ACTIVATION > 0:
        y = tl.where(which == 0, activated(y, ACTIVATION), y)
    tl.store(y_ptr + offs_n, y.to(y_ptr.dtype.element_ty), offs_n < n)


@triton.jit
def load_tile(w_rows, k, offs_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k to k + BLOCK_K of these rows of a weight, zero beyond K."""
    at = k + offs_k
    if K == BLOCK_K:
        return tl.load(w_rows + at[None, :], eviction_policy="evict_first")
    else:
        return tl.load(w_rows + at[None, :], (at < K)[None, :], 0.0, eviction_policy="evict_first")


@triton.jit
def linear_rows_kernel(
    x_ptr, norm_ptr, squares_ptr, w0_ptr, w1_ptr, w2_ptr, b0_ptr, b1_ptr, b2_ptr, y0_ptr, y1_ptr, y2_ptr, n0, n1, n2,
    eps, rows, sx, K: tl.constexpr, SQUARES: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAPS: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x (rows, K), sx elements from row to row; ROWS is at least `rows`. Else as `linear_row_kernel`."""
    w_ptr, y_ptr, n, first, which = owned(
        tl.program_id(0), w0_ptr, w1_ptr, w2_ptr, y0_ptr, y1_ptr, y2_ptr, n0, n1, n2, BLOCK_N
    )
    offs_n = first + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    r = tl.arange(0, ROWS)
    w_rows = w_ptr + tl.minimum(offs_n, n - 1).to(tl.int64)[:, None] * K
    x_rows = x_ptr + r.to(tl.int64)[None, :] * sx
    if OVERLAPS:
        gdc_launch_dependents()
    if norm_ptr is not None:
        weight = load_norm(norm_ptr, offs_n, n, which)
    if EARLY:
        prefetch_rows(w_rows, K)
        gdc_wait()
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, r, rows, SQUARES)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        at = k + offs_k
        there = (at < K) | (K % BLOCK_K == 0)
        w = tl.load(w_rows + at[None, :], there[None, :], 0.0, eviction_policy="evict_first")
        x = tl.load(x_rows + at[:, None], there[:, None] & (r < rows)[None, :], 0.0)  # [BLOCK_K, ROWS]
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if squares_ptr is not None:
        acc /= divisors(squares, K, eps)[None, :]
    acc += biases(b0_ptr, b1_ptr, b2_ptr, which, offs_n, n)[:, None]
    if norm_ptr is not None:
        if which == 0:
            own = tl.sum(tl.where((offs_n < n)[:, None], acc * acc, 0.0), axis=0)
            tl.store(y2_ptr + tl.program_id(0) * rows + r, own, r < rows)
            acc *= weight[:, None]
    if ACTIVATION > 0:
        acc = tl.where(which == 0, activated(acc, ACTIVATION), acc)
    at = r.to(tl.int64)[None, :] * n + offs_n[:, None]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), (r < rows)[None, :] & (offs_n < n)[:, None])


@triton.jit
def prefetch_rows(w_rows, K: tl.constexpr):
    """Asks for the first lines of these rows, 128 bytes each, to be brought into L2."""
    LINES: tl.constexpr = 8  # of a row: with 16 MLA's step of 16 rows takes 86.6 us, with 8 85.7, with 32 86.9
    LINE: tl.constexpr = 128 // (w_rows.dtype.element_ty.primitive_bitwidth // 8)
    at = tl.minimum(tl.arange(0, LINES) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [w_rows + at[None, :]], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ launches


def linears(
    facts: Facts, x: Tensor, norm: Tensor | None, squares: Tensor | None, *parameters: Tensor | None
) -> tuple[tuple[Tensor, ...], Launch]:
    """x (B, N, K), whose rows are evenly spaced; weights, then their biases, MAX_WEIGHTS of both, or None.

    norm     with two weights: the weight of an RMSNorm of y_0, which is multiplied by it; a third output: its squares
    squares  those of x, from the launch that made it
    """
    (B, N, K), rows = x.shape, x.shape[0] * x.shape[1]
    sizes = [0 if w is None else w.shape[0] for w in parameters[:MAX_WEIGHTS]]
    ys = [torch.empty(B, N, n, dtype=x.dtype, device=x.device) for n in sizes if n]
    tile = tile_of(rows, sum(sizes), K, x.element_size(), shared_memory(x.device))
    if norm is not None:
        ys.append(torch.empty(triton.cdiv(sizes[0], tile.block_n), rows, dtype=torch.float32, device=x.device))
    tensors = (x, norm, squares, *parameters, *ys, *[None] * (MAX_WEIGHTS - len(ys)))
    grid = sum(triton.cdiv(n, tile.block_n) for n in sizes)
    overlaps = starts_early(x.device)
    early = facts.early and overlaps
    count = 0 if squares is None else squares.shape[0]
    constants = (K, count, ACTIVATIONS[facts.activation], overlaps, early, tile.block_n, tile.block_k)
    options = {"num_warps": tile.warps} | starting(early)
    if rows == 1:
        return tuple(ys), Launch(linear_row_kernel, grid, tensors, (*sizes, facts.eps, *constants), options)
    rest = (*sizes, facts.eps, rows, x.stride(0 if N == 1 else 1), *constants, padded(rows), tile.stages)
    return tuple(ys), Launch(linear_rows_kernel, grid, tensors, rest, options)
