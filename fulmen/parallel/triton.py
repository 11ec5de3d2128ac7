"""Kernels that carry attention over ranks on a GPU; each reads its operands once.

leaving, entering_gradient           the state of a rank's tokens: lightning attention's own sweep and scan
add_entering, add_leaving_gradient   what a state from other ranks adds to o, to dk and dv
combine                              (o, lse) of one more block of keys: 10 bytes an element of a 16-bit o_i, where
                                     torch's operations move 26
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen import dispatch
from fulmen.boundary import row_contiguous
from fulmen.launch import Launch, run_all
from fulmen.lightning import triton as fused
from fulmen.lightning import triton_split as split
from fulmen.lightning.policy import SplitTile
from fulmen.lightning.spec import LightningSpec, Residuals
from fulmen.lightning.sweeps import States, Tensors
from fulmen.tiles import LOG2E, padded

TILE = 4096  # elements of o a program combines
COLUMNS = 64  # of o, dk or dv that a program adds to
OPERANDS = 8192  # of its product, in registers: q, k or v
FORGOTTEN = tl.constexpr(60.0)  # 2^-60 of a state is nothing


# ------------------------------------------------------------------------------------------------ states


def leaving(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Tensor:
    """As `states.leaving`, of 16-bit k and v; slopes fp32 (H,), or None."""
    spec = _spec(q, k, v, slopes)
    x = Residuals(q, k, v, slopes, None, None)
    return _state("state", spec, x, Tensors(k=fused.rows_of(k, spec), v=fused.rows_of(v, spec)))


def entering_gradient(q: Tensor, do: Tensor, slopes: Tensor | None, scale: float) -> Tensor:
    """As `states.entering_gradient`, of 16-bit q and do."""
    spec = _spec(q, q, do, slopes)._replace(scale=scale)
    x = Residuals(q, q, do, slopes, None, None)
    return _state("dstate", spec, x, Tensors(q=fused.rows_of(q, spec), do=fused.rows_of(do, spec)))


def state_of_tokens(x: Residuals, spec: LightningSpec, do: Tensor | None) -> Tensor:
    """As `tokens.state_alone`, of 16-bit tensors: a decay for each token."""
    if do is None:
        return _state("state", spec, x, Tensors(k=fused.rows_of(x.k, spec), v=fused.rows_of(x.v, spec)))
    return _state("dstate", spec, x, Tensors(q=fused.rows_of(x.q, spec), do=fused.rows_of(do, spec)))


def _spec(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> LightningSpec:
    B, H_KV, N, D = k.shape
    return LightningSpec(
        B, q.shape[1], H_KV, N, D, v.shape[3], k.dtype, k.device, scale=1.0, has_decay=slopes is not None
    )


def _state(sweep: str, spec: LightningSpec, x: Residuals, tensors: Tensors) -> Tensor:
    """Of segments, in as many programs as the GPU holds; then over segments."""
    if not spec.N:
        return x.q.new_zeros(spec.B, spec.H, spec.D, spec.E, dtype=torch.float32)
    tile: SplitTile = dispatch.choose("lightning", spec, "triton_split").tile
    cut = split.segments(spec, tile.split, x)
    each = split.segment_states(spec, x, cut)
    keeps = split.segment_keeps(spec, each)
    total = x.q.new_empty(spec.B, spec.H, spec.D, spec.E, dtype=torch.float32)
    states = States(final=each) if sweep == "state" else States(dinitial=each)
    launches = [
        fused.sweep(spec, tile.sweep, (sweep,), x, tensors, states, cut, keeps=keeps),
        split.scan(spec, x, cut, each, None, total, keeps),
    ]
    run_all(launches, spec.device)
    return total


# ------------------------------------------------------------------------------ what a state adds to rows


@triton.jit
def add_product_kernel(
    out_ptr,  # (B, heads, N, SIZE_OUT), changed in place
    x_ptr,  # (B, heads, N, SIZE)
    matrix_ptr,  # fp32 (B, heads * GROUP, SIZE, SIZE_OUT)
    slopes_ptr,  # (heads * GROUP,), or None
    out_strides, x_strides,  # of B, head and N; the rest lies side by side
    matrix_strides,  # of all four
    scale, heads, N,
    GROUP: tl.constexpr, BACKWARDS: tl.constexpr, SIZE: tl.constexpr, SIZE_OUT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out_t += scale sum_g lambda_g^(t+1) x_t matrix_g, or with BACKWARDS lambda_g^(N-1-t)."""
    columns = tl.cdiv(SIZE_OUT, COLUMNS)
    column = (tl.program_id(0) % columns * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    pid = tl.program_id(0) // columns
    tiles = tl.cdiv(N, ROWS)
    first = pid % tiles * ROWS
    h = pid // tiles % heads
    b = (pid // tiles // heads).to(tl.int64)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    inner = tl.arange(0, BLOCK).to(tl.int64)
    there = row < N
    away = (tl.maximum(N - 1 - row, 0) if BACKWARDS else row + 1).to(tl.float32)  # tokens from the state
    nearest = (tl.maximum(N - first - ROWS, 0) if BACKWARDS else first + 1).to(tl.float32)
    alive = slopes_ptr is None
    if slopes_ptr is not None:
        for g in range(GROUP):
            alive = alive | (LOG2E * tl.load(slopes_ptr + h * GROUP + g) * nearest <= FORGOTTEN)
    if alive:
        x_at = x_ptr + b * x_strides[0] + h.to(tl.int64) * x_strides[1] + row[:, None] * x_strides[2] + inner[None, :]
        x = tl.load(x_at, mask=there[:, None] & (inner < SIZE)[None, :], other=0.0)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for g in range(GROUP):
            head = (h * GROUP + g).to(tl.int64)
            at = matrix_ptr + b * matrix_strides[0] + head * matrix_strides[1]
            at += inner[:, None] * matrix_strides[2] + column[None, :] * matrix_strides[3]
            matrix = tl.load(at, mask=(inner < SIZE)[:, None] & (column < SIZE_OUT)[None, :], other=0.0)
            # in two parts of x's dtype, of numbers up to 1: a state may be beyond fp16
            most = tl.max(tl.max(tl.abs(matrix), axis=1), axis=0)
            matrix *= 1.0 / tl.where(most == 0.0, 1.0, most)
            high = matrix.to(x.dtype)
            low = ((matrix - high.to(tl.float32)) * 256.0).to(x.dtype)
            product = tl.dot(x, high, tl.dot(x, low) * (1.0 / 256.0)) * most
            weight = tl.full([ROWS], 1.0, tl.float32)
            if slopes_ptr is not None:
                bits = LOG2E * tl.load(slopes_ptr + head) * away
                weight = tl.where(bits <= FORGOTTEN, tl.exp2(-bits), 0.0)
            total += weight[:, None] * product
        out_at = out_ptr + b * out_strides[0] + h.to(tl.int64) * out_strides[1] + row[:, None] * out_strides[2]
        inside = there[:, None] & (column < SIZE_OUT)[None, :]
        out = tl.load(out_at + column[None, :], mask=inside, other=0.0).to(tl.float32) + scale * total
        tl.store(out_at + column[None, :], out, mask=inside)


def add_product(out: Tensor, x: Tensor, matrix: Tensor, slopes: Tensor | None, scale: float, backwards: bool) -> Launch:
    B, heads, N, size = x.shape
    width = out.shape[3]
    columns = min(COLUMNS, padded(width)) if size <= 128 else 32
    rows = min(128, OPERANDS // padded(size))
    args = (
        *(out, x, matrix, slopes, tuple(out.stride()[:3]), tuple(x.stride()[:3]), tuple(matrix.stride())),
        *(scale, heads, N, matrix.shape[1] // heads, backwards, size, width, rows, padded(size), columns),
    )
    grid = B * heads * triton.cdiv(N, rows) * triton.cdiv(width, columns)
    return Launch(add_product_kernel, grid, (), args, {"num_warps": 4, "num_stages": 1})


def add_entering(o: Tensor, q: Tensor, S: Tensor, slopes: Tensor | None, scale: float) -> None:
    """As `states.add_entering`, of 16-bit o and q."""
    run_all([add_product(o, q, S, slopes, scale, backwards=False)], o.device)


def add_leaving_gradient(dk: Tensor, dv: Tensor, k: Tensor, v: Tensor, G: Tensor, slopes: Tensor | None) -> None:
    """As `states.add_leaving_gradient`, of 16-bit tensors."""
    launches = [
        add_product(dk, v, G.mT, slopes, 1.0, backwards=True),
        add_product(dv, k, G, slopes, 1.0, backwards=True),
    ]
    run_all(launches, k.device)


# ------------------------------------------------------------------------------------------------- combine


@triton.jit
def ring_combine_kernel(
    o_ptr, lse_ptr,  # fp32 (B, H, N, E) and (B, H, N), changed in place
    o_i_ptr, lse_i_ptr,
    o_strides, lse_strides, o_i_strides, lse_i_strides,  # of B, H and N; E lies side by side
    H, N,
    E: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(N, ROWS)
    head = tl.program_id(0) // tiles
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    row = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK_E)
    there = row < N
    lse_at = lse_ptr + b * lse_strides[0] + h * lse_strides[1] + row * lse_strides[2]
    lse_i_at = lse_i_ptr + b * lse_i_strides[0] + h * lse_i_strides[1] + row * lse_i_strides[2]
    old = tl.load(lse_at, mask=there, other=float("-inf"))
    new = tl.load(lse_i_at, mask=there, other=float("-inf"))
    most = tl.maximum(old, new)
    pivot = tl.where(most == float("-inf"), 0.0, most)  # a row that saw nothing yet
    w_old = tl.exp(old - pivot)
    w_new = tl.exp(new - pivot)
    total = w_old + w_new
    tl.debug_barrier()  # several warps read the same lse, and one of them writes it
    tl.store(lse_at, pivot + tl.log(total), mask=there)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    inside = there[:, None] & (column < E)[None, :]
    o_at = o_ptr + b * o_strides[0] + h * o_strides[1] + row[:, None] * o_strides[2] + column[None, :]
    o_i_at = o_i_ptr + b * o_i_strides[0] + h * o_i_strides[1] + row[:, None] * o_i_strides[2] + column[None, :]
    o = tl.load(o_at, mask=inside, other=0.0) * (w_old * share)[:, None]
    o += tl.load(o_i_at, mask=inside, other=0.0).to(tl.float32) * (w_new * share)[:, None]
    tl.store(o_at, o, mask=inside)


def combine_launch(o: Tensor, lse: Tensor, o_i: Tensor, lse_i: Tensor) -> Launch:
    B, H, N, E = o.shape
    width = triton.next_power_of_2(E)
    rows = max(1, TILE // width)
    args = (
        *(o, lse, o_i, lse_i),
        *(tuple(x.stride()[:3]) for x in (o, lse, o_i, lse_i)),
        *(H, N, E, width, rows),
    )
    return Launch(ring_combine_kernel, B * H * triton.cdiv(N, rows), (), args, {"num_warps": 4})


def combine(o: Tensor, lse: Tensor, o_i: Tensor, lse_i: Tensor) -> None:
    """As `ring.combine`, of fp32 o and lse."""
    run_all([combine_launch(o, lse, row_contiguous(o_i), lse_i)], o.device)
