"""RoPE on a GPU in one pass over memory, where PyTorch's operations take half a dozen, some in fp32.

A program takes the heads of a token, HEADS at a time. Elements are turned in pairs,

    (a, b) -> (a cos - b sin, b cos + a sin)

neighbours if INTERLEAVED, else the two halves of what is turned; a gradient is turned back, with -sin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    if INTERLEAVED:
        a, b = tl.split(x.reshape(rows, HALF_P2, 2))
        return tl.join(a * cos - b * sin, b * cos + a * sin).reshape(rows, 2 * HALF_P2)
    a, b = tl.split(x.reshape(rows, 2, HALF_P2).permute(0, 2, 1))
    return tl.join(a * cos - b * sin, b * cos + a * sin).permute(0, 2, 1).reshape(rows, 2 * HALF_P2)


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


# ------------------------------------------------------------------------------------------------ launches


def p2(n: int) -> int:
    return int(triton.next_power_of_2(n))


def per_row(cos: Tensor) -> int:
    """How many rows of cos and sin lie between two batches: none where they share them."""
    return cos.shape[-2] if cos.ndim == 3 else 0


def turn_launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> Launch:
    B, N, H, D = x.shape
    half = cos.shape[-1]
    rest = D - 2 * half
    sizes = (*x.stride()[:3], *out.stride()[:3], per_row(cos), N, H, sign)
    constants = (half, p2(half), rest, p2(max(rest, 1)), interleaved, HEADS)
    return Launch(turn_kernel, B * N * triton.cdiv(H, HEADS), (x, out, cos, sin), (*sizes, *constants), WARPS)


def run(make: Callable[..., Launch], tensors: tuple[Tensor | None, ...], *options: Any) -> None:
    """`repeat`, under all that the launch is made from but the tensors' addresses; the first tensor is not None."""
    device: torch.device = tensors[0].device  # type: ignore[union-attr]
    facts = (None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors)
    repeat((make, options, *facts, device), device, [tensors], lambda: [make(*tensors, *options)])


def turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> None:
    """x, out (B, N, H, D): out is x with its first 2 cos.shape[-1] elements turned."""
    run(turn_launch, (x, out, cos, sin), sign, interleaved)


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
