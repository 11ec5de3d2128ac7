"""RoPE on a GPU in one pass over memory: of a layer's q and k, and of latent attention's.

Written with torch's own operations RoPE takes half a dozen passes, some in fp32, and latent attention copies q and k
once more to put their two parts side by side; its q is turned in place here, and its k joined as it is written.

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

from fulmen import hardware
from fulmen.boundary import unwatched
from fulmen.launch import Launch, repeat

HEADS = 16  # at a time
WARPS = {"num_warps": 4}


def serves(*tensors: Tensor) -> bool:
    """Whether these kernels may be taken: a GPU, and nobody but eager PyTorch looking on."""
    first = tensors[0]
    return (
        first.is_cuda
        and first.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(x.dtype == first.dtype and x.stride(-1) == 1 and x.numel() > 0 for x in tensors)
        and unwatched(*tensors)
        and torch.autograd.forward_ad._current_level < 0
        and not any(x.is_neg() for x in tensors)
        and hardware.of(first.device).arch >= 80
    )


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


@triton.jit
def join_kernel(
    up_ptr, rope_ptr, k_ptr, cos_ptr, sin_ptr, su_b, su_n, sr_b, sr_n, cos_b, N, H,
    NOPE: tl.constexpr, NOPE_P2: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """k (B, N, H, NOPE + 2 HALF) of up (B, N, H, NOPE + E) and of what all heads share, turned."""
    blocks = tl.cdiv(H, HEADS)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    heads = (h < H)[:, None]
    out_rows = k_ptr + (token.to(tl.int64) * H + h[:, None]) * (NOPE + 2 * HALF)
    i = tl.arange(0, NOPE_P2)
    mask = heads & (i < NOPE)[None, :]
    up = tl.load(up_ptr + b * su_b + n * su_n + h[:, None] * (NOPE + E) + i[None, :], mask)
    tl.store(out_rows + i[None, :], up, mask)
    cos, sin = angles(cos_ptr, sin_ptr, b * cos_b + n, 1.0, HALF, HALF_P2)
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    x = tl.load(rope_ptr + b * sr_b + n * sr_n + at, there, 0.0).to(tl.float32)[None, :]
    y = turned(x, cos[None, :], sin[None, :], 1, HALF_P2, INTERLEAVED).to(k_ptr.dtype.element_ty)
    tl.store(out_rows + NOPE + at[None, :], y.broadcast_to(HEADS, 2 * HALF_P2), heads & there[None, :])


@triton.jit
def unjoin_kernel(
    dk_ptr, dv_ptr, dup_ptr, drope_ptr, cos_ptr, sin_ptr, sk_b, sk_n, sk_h, sv_b, sv_n, sv_h, cos_b, N, H,
    NOPE: tl.constexpr, NOPE_P2: tl.constexpr, E: tl.constexpr, E_P2: tl.constexpr,
    HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The gradients of up and of what the heads share, summed over them in their order."""
    token = tl.program_id(0)
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    total = tl.zeros([2 * HALF_P2], tl.float32)
    i = tl.arange(0, NOPE_P2)
    j = tl.arange(0, E_P2)
    for first in range(0, H, HEADS):
        h = first + tl.arange(0, HEADS)
        heads = (h < H)[:, None]
        dk_rows = dk_ptr + b * sk_b + n * sk_n + h.to(tl.int64)[:, None] * sk_h
        dv_rows = dv_ptr + b * sv_b + n * sv_n + h.to(tl.int64)[:, None] * sv_h
        out_rows = dup_ptr + (token.to(tl.int64) * H + h[:, None]) * (NOPE + E)
        nope, values = heads & (i < NOPE)[None, :], heads & (j < E)[None, :]
        tl.store(out_rows + i[None, :], tl.load(dk_rows + i[None, :], nope), nope)
        tl.store(out_rows + NOPE + j[None, :], tl.load(dv_rows + j[None, :], values), values)
        rope = tl.load(dk_rows + NOPE + at[None, :], heads & there[None, :], 0.0)
        total += tl.sum(rope.to(tl.float32), axis=0)
    cos, sin = angles(cos_ptr, sin_ptr, b * cos_b + n, -1.0, HALF, HALF_P2)
    y = turned(total[None, :], cos[None, :], sin[None, :], 1, HALF_P2, INTERLEAVED)
    out = drope_ptr + token.to(tl.int64) * 2 * HALF + at[None, :]
    tl.store(out, y.to(drope_ptr.dtype.element_ty), there[None, :])


# ------------------------------------------------------------------------------------------------ launches


def p2(n: int) -> int:
    return int(triton.next_power_of_2(n))


def per_row(cos: Tensor) -> int:
    """How many rows of cos and sin lie between two batches: none where they share them."""
    return cos.shape[-2] if cos.ndim == 3 else 0


def turn_launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool, rest: int) -> Launch:
    B, N, H, _ = x.shape
    half = cos.shape[-1]
    sizes = (*x.stride()[:3], *out.stride()[:3], per_row(cos), N, H, sign)
    constants = (half, p2(half), rest, p2(max(rest, 1)), interleaved, HEADS)
    return Launch(turn_kernel, B * N * triton.cdiv(H, HEADS), (x, out, cos, sin), (*sizes, *constants), WARPS)


def join_launch(
    up: Tensor, rope: Tensor, k: Tensor, cos: Tensor, sin: Tensor, nope: int, E: int, interleaved: bool
) -> Launch:
    B, N, H, _ = k.shape
    half = rope.shape[2] // 2
    sizes = (*up.stride()[:2], *rope.stride()[:2], per_row(cos), N, H)
    constants = (nope, p2(nope), E, half, p2(half), interleaved, HEADS)
    return Launch(join_kernel, B * N * triton.cdiv(H, HEADS), (up, rope, k, cos, sin), (*sizes, *constants), WARPS)


def unjoin_launch(
    dk: Tensor, dv: Tensor, dup: Tensor, drope: Tensor, cos: Tensor, sin: Tensor, nope: int, interleaved: bool
) -> Launch:
    B, N, H, E = dv.shape
    half = drope.shape[2] // 2
    sizes = (*dk.stride()[:3], *dv.stride()[:3], per_row(cos), N, H)
    constants = (nope, p2(nope), E, p2(E), half, p2(half), interleaved, HEADS)
    return Launch(unjoin_kernel, B * N, (dk, dv, dup, drope, cos, sin), (*sizes, *constants), WARPS)


def run(make: Callable[..., Launch], tensors: tuple[Tensor, ...], *options: Any) -> None:
    """`repeat`, under all that the launch is made from but the tensors' addresses."""
    key = (make, options, *((x.shape, x.stride(), x.dtype) for x in tensors), tensors[0].device)
    repeat(key, tensors[0].device, [tensors], lambda: [make(*tensors, *options)])


def turn(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> None:
    """x, out (B, N, H, D): out is x with its first 2 cos.shape[-1] elements turned; they may be one tensor."""
    rest = 0 if out is x else x.shape[3] - 2 * cos.shape[-1]
    run(turn_launch, (x, out, cos, sin), sign, interleaved, rest)


def join(up: Tensor, rope: Tensor, cos: Tensor, sin: Tensor, H: int, nope: int, E: int, interleaved: bool) -> Tensor:
    """up (B, N, H * (nope + E)), rope (B, N, dim) -> k (B, N, H, nope + dim)."""
    B, N, dim = rope.shape
    k = torch.empty(B, N, H, nope + dim, dtype=up.dtype, device=up.device)
    run(join_launch, (up, rope, k, cos, sin), nope, E, interleaved)
    return k


def unjoin(
    dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, nope: int, dim: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """dk (B, N, H, nope + dim), dv (B, N, H, E) -> the gradients of `join`'s up and rope."""
    B, N, H, E = dv.shape
    dup = torch.empty(B, N, H * (nope + E), dtype=dk.dtype, device=dk.device)
    drope = torch.empty(B, N, dim, dtype=dk.dtype, device=dk.device)
    run(unjoin_launch, (dk, dv, dup, drope, cos, sin), nope, interleaved)
    return dup, drope


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
        cos, sin = ctx.saved_tensors
        dout = dout if dout.stride(3) == 1 else dout.contiguous()
        dx = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
        turn(dout, dx, cos, sin, -1.0, ctx.interleaved)
        return dx, None, None, None


class TurnedInPlace(torch.autograd.Function):
    """q (B, N, H * D): the elements from `first` on of each head are turned where they lie.

    A projection's output, which its own backward does not read and nobody else sees. Nor does anybody else see the
    gradient that comes back: it is the attention kernel's own, and is turned back where it lies, too.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, cos: Tensor, sin: Tensor, H: int, first: int, interleaved: bool) -> Tensor:
        ctx.options = H, first, interleaved
        ctx.save_for_backward(cos, sin)
        ctx.mark_dirty(q)
        part = q.detach().unflatten(2, (H, -1))[..., first:]
        turn(part, part, cos, sin, 1.0, interleaved)
        return q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        H, first, interleaved = ctx.options
        dq = dq.contiguous()
        part = dq.unflatten(2, (H, -1))[..., first:]
        turn(part, part, cos, sin, -1.0, interleaved)
        return dq, None, None, None, None, None


class Joined(torch.autograd.Function):
    """(k, v) of latent attention, (B, N, H, nope + dim) and (B, N, H, E): see `join`; v is a view of up."""

    @staticmethod
    def forward(
        ctx: Any, up: Tensor, rope: Tensor, cos: Tensor, sin: Tensor, H: int, nope: int, E: int, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.options = nope, rope.shape[2], interleaved
        ctx.save_for_backward(cos, sin)
        k = join(up, rope, cos, sin, H, nope, E, interleaved)
        return k, up.unflatten(2, (H, nope + E))[..., nope:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
        dk, dv = (x if x.stride(3) == 1 else x.contiguous() for x in (dk, dv))
        dup, drope = unjoin(dk, dv, *ctx.saved_tensors, *ctx.options)
        return dup, drope, *[None] * 6
