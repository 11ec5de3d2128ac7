"""RoPE on a GPU in one pass over memory, where PyTorch's operations take half a dozen, some in fp32.

A program takes the heads of a token, HEADS at a time. Elements are turned in pairs,

    (a, b) -> (a cos - b sin, b cos + a sin)

neighbours if INTERLEAVED, else the two halves of what is turned; a gradient is turned back, with -sin. q and k with the
same positions are turned in one launch. Their tables may have an angle for each element, as Hugging Face's do:

    (a, b) -> (a cos_a - b sin_a, b cos_b + a sin_b)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.boundary import once_differentiable
from fulmen.launch import Launch, repeat
from fulmen.layers.fused import saved

HEADS = 16  # at a time
WARPS = {"num_warps": 4}


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def angles(cos_ptr, sin_ptr, row, sign, HALF: tl.constexpr, HALF_P2: tl.constexpr):
    i = tl.arange(0, HALF_P2)
    at = row * HALF + i
    return tl.load(cos_ptr + at, i < HALF, 0.0), sign * tl.load(sin_ptr + at, i < HALF, 0.0)


@triton.jit
def turned(x, cos, sin, rows: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr):
    """x (rows, 2 HALF_P2), as `pairs` says where the elements of a pair lie."""
    a, b = apart(x, rows, HALF_P2, INTERLEAVED)
    return together(a * cos - b * sin, b * cos + a * sin, rows, HALF_P2, INTERLEAVED)


@triton.jit
def apart(x, rows: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second element of each pair of x (rows, 2 HALF_P2)."""
    if INTERLEAVED:
        return tl.split(x.reshape(rows, HALF_P2, 2))
    return tl.split(x.reshape(rows, 2, HALF_P2).permute(0, 2, 1))


@triton.jit
def together(a, b, rows: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Undoes `apart`."""
    if INTERLEAVED:
        return tl.join(a, b).reshape(rows, 2 * HALF_P2)
    return tl.join(a, b).permute(0, 2, 1).reshape(rows, 2 * HALF_P2)


@triton.jit
def pairs(HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where in memory the elements of `turned` lie, and which of them there are."""
    i = tl.arange(0, 2 * HALF_P2)
    if INTERLEAVED:
        return i, i < 2 * HALF
    in_half = i % HALF_P2
    return (i // HALF_P2) * HALF + in_half, in_half < HALF


@triton.jit
def turn_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, sx_b, sx_n, sx_h, so_b, so_n, so_h, cos_b, N, H, sign,
    HALF: tl.constexpr, HALF_P2: tl.constexpr, REST: tl.constexpr, REST_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turns the first 2 HALF elements of each head and copies REST more."""
    blocks = tl.cdiv(H, HEADS)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    cos, sin = angles(cos_ptr, sin_ptr, b * cos_b + n, sign, HALF, HALF_P2)
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    mask = (h < H)[:, None] & there[None, :]
    x_rows = x_ptr + b * sx_b + n * sx_n + h.to(tl.int64)[:, None] * sx_h
    out_rows = out_ptr + b * so_b + n * so_n + h.to(tl.int64)[:, None] * so_h
    x = tl.load(x_rows + at[None, :], mask, 0.0).to(tl.float32)
    y = turned(x, cos[None, :], sin[None, :], HEADS, HALF_P2, INTERLEAVED)
    tl.store(out_rows + at[None, :], y.to(out_ptr.dtype.element_ty), mask)
    if REST > 0:
        i = tl.arange(0, REST_P2)
        mask = (h < H)[:, None] & (i < REST)[None, :]
        tl.store(out_rows + (2 * HALF + i)[None, :], tl.load(x_rows + (2 * HALF + i)[None, :], mask), mask)


@triton.jit
def angle_pairs(
    row_ptr, HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr, EACH_ELEMENT: tl.constexpr
):
    """cos or sin of the first and of the second element of each pair, (1, HALF_P2)."""
    if EACH_ELEMENT:
        at, there = pairs(HALF, HALF_P2, INTERLEAVED)
        x = tl.load(row_ptr + at, there, 0.0).to(tl.float32)
        return apart(x[None, :], 1, HALF_P2, INTERLEAVED)
    i = tl.arange(0, HALF_P2)
    x = tl.load(row_ptr + i, i < HALF, 0.0).to(tl.float32)[None, :]
    return x, x


@triton.jit
def turn_both_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, sq_b, sq_n, sq_h, sk_b, sk_n, sk_h, table_b, table_n, N, H,
    H_KV, HALF: tl.constexpr, HALF_P2: tl.constexpr, REST: tl.constexpr, REST_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, EACH_ELEMENT: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """As `turn_kernel`, of q and k; outputs are contiguous. BACK: their gradients."""
    D: tl.constexpr = 2 * HALF + REST
    of_q = tl.cdiv(H, HEADS)
    parts = of_q + tl.cdiv(H_KV, HEADS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    b = token // N
    n = token % N
    x_row, out_row, sx_h, heads = q_ptr + b * sq_b + n * sq_n, q_out_ptr + token * H * D, sq_h, H
    if part >= of_q:
        x_row, out_row, sx_h, heads = k_ptr + b * sk_b + n * sk_n, k_out_ptr + token * H_KV * D, sk_h, H_KV
        part -= of_q
    h = (part * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    x_rows, out_rows = x_row + h[:, None] * sx_h, out_row + h[:, None] * D

    cos_a, cos_b = angle_pairs(cos_ptr + b * table_b + n * table_n, HALF, HALF_P2, INTERLEAVED, EACH_ELEMENT)
    sin_a, sin_b = angle_pairs(sin_ptr + b * table_b + n * table_n, HALF, HALF_P2, INTERLEAVED, EACH_ELEMENT)
    if BACK:
        sin_a, sin_b = -sin_b, -sin_a
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    mask = (h < heads)[:, None] & there[None, :]
    x_a, x_b = apart(tl.load(x_rows + at[None, :], mask, 0.0).to(tl.float32), HEADS, HALF_P2, INTERLEAVED)
    y = together(x_a * cos_a - x_b * sin_a, x_b * cos_b + x_a * sin_b, HEADS, HALF_P2, INTERLEAVED)
    tl.store(out_rows + at[None, :], y.to(q_out_ptr.dtype.element_ty), mask)
    if REST > 0:
        i = tl.arange(0, REST_P2)
        mask = (h < heads)[:, None] & (i < REST)[None, :]
        tl.store(out_rows + (2 * HALF + i)[None, :], tl.load(x_rows + (2 * HALF + i)[None, :], mask), mask)


# ------------------------------------------------------------------------------------------------ launches


def next_power_of_2(n: int) -> int:
    return int(triton.next_power_of_2(n))


def per_row(cos: Tensor) -> int:
    """How many rows of cos and sin lie between two batches: none where they share them."""
    return cos.shape[-2] if cos.ndim == 3 else 0


def turn_launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> Launch:
    B, N, H, D = x.shape
    half = cos.shape[-1]
    rest = D - 2 * half
    sizes = (*x.stride()[:3], *out.stride()[:3], per_row(cos), N, H, sign)
    constants = (half, next_power_of_2(half), rest, next_power_of_2(max(rest, 1)), interleaved, HEADS)
    return Launch(turn_kernel, B * N * triton.cdiv(H, HEADS), (x, out, cos, sin), (*sizes, *constants), WARPS)


def run(make: Callable[..., Launch], tensors: tuple[Tensor | None, ...], *options: Any) -> None:
    """`repeat`, under all that the launch is made from but the tensors' addresses; the first tensor is not None."""
    device: torch.device = tensors[0].device  # type: ignore[union-attr]
    facts = (None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors)
    repeat((make, options, *facts, device), device, [tensors], lambda: [make(*tensors, *options)])


def turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> None:
    """x, out (B, N, H, D): out is x with its first 2 cos.shape[-1] elements turned."""
    run(turn_launch, (x, out, cos, sin), sign, interleaved)


class Pairs(NamedTuple):
    """How the elements of a head are turned.

    half          pairs
    interleaved   a pair is two neighbours, not one of each half
    each_element  tables have an angle for each element, not for each pair
    back          turns gradients
    """

    half: int
    interleaved: bool
    each_element: bool
    back: bool = False


def both_launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, k_out: Tensor, facts: Pairs) -> Launch:
    (B, N, H, D), H_KV, half = q.shape, k.shape[2], facts.half
    rest = D - 2 * half
    table = (0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1))
    sizes = (*q.stride()[:3], *k.stride()[:3], *table, N, H, H_KV)
    grid = B * N * (triton.cdiv(H, HEADS) + triton.cdiv(H_KV, HEADS))
    constants = (half, next_power_of_2(half), rest, next_power_of_2(max(rest, 1)), *facts[1:], HEADS)
    return Launch(turn_both_kernel, grid, (q, k, cos, sin, q_out, k_out), (*sizes, *constants), WARPS)


def turned_both(
    facts: tuple[Any, ...], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[tuple[Tensor, Tensor], Launch]:
    """q (B, N, H, D) and k (B, N, H_KV, D), turned; cos and sin (B or 1, N, ...), of the same strides."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    return (q_out, k_out), both_launch(q, k, cos, sin, q_out, k_out, Pairs(*facts))


# ----------------------------------------------------------------------------------------------- functions


class Rotated(torch.autograd.Function):
    """x (B, N, H, D), turned, in memory of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.interleaved = interleaved
        ctx.save_for_backward(cos, sin)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        turn(x, out, cos, sin, 1.0, interleaved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        cos, sin = saved(ctx)
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        dx = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
        turn(dout, dx, cos, sin, -1.0, ctx.interleaved)
        return dx, None, None, None


class RotatedBoth(torch.autograd.Function):
    """q and k as in `turned_both`."""

    @staticmethod
    def forward(ctx: Any, facts: Pairs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.facts = facts
        ctx.save_for_backward(cos, sin)
        return turn_both(facts, q, k, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
        dq, dk = (x if x.stride(3) == 1 else x.contiguous() for x in (dq, dk))
        return None, *turn_both(ctx.facts._replace(back=True), dq, dk, *saved(ctx)), None, None


def turn_both(facts: Pairs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    run(both_launch, (q, k, cos, sin, q_out, k_out), facts)
    return q_out, k_out
