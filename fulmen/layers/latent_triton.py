"""The RMSNorm of latents on a GPU, in one pass each way, of the first columns of a projection's output.

    y = x[:, :R] / sqrt(mean(x[:, :R]^2) + eps) * weight

The other columns, which RoPE turns, stay where they are. torch's norm would copy the first ones together, and its
backward be followed by another copy that puts the gradients of both parts side by side. A program of the backward takes
every PROGRAMS-th row and keeps its own sum of the weight's gradient; the sums are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from fulmen.launch import Launch
from fulmen.layers.ranks import RMSNorm
from fulmen.layers.rotary_triton import p2, run

PROGRAMS = 528  # of a backward: 4 on each SM of an H200
MAX_WIDTH = 8192  # of a row that a program holds


@triton.jit
def norm_kernel(x_ptr, weight_ptr, y_ptr, rstd_ptr, stride, eps, R: tl.constexpr, R_P2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, R_P2)
    x = tl.load(x_ptr + row * stride + i, i < R, 0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x) / R + eps)
    weight = tl.load(weight_ptr + i, i < R, 0.0).to(tl.float32)
    tl.store(y_ptr + row * R + i, (x * rstd * weight).to(y_ptr.dtype.element_ty), i < R)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def norm_backward_kernel(
    x_ptr, weight_ptr, rstd_ptr, dy_ptr, drest_ptr, dx_ptr, sums_ptr, stride, rows,
    R: tl.constexpr, R_P2: tl.constexpr, REST: tl.constexpr, REST_P2: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, R_P2)
    j = tl.arange(0, REST_P2)
    weight = tl.load(weight_ptr + i, i < R, 0.0).to(tl.float32)
    total = tl.zeros([R_P2], tl.float32)
    for n in range(tl.program_id(0), rows, PROGRAMS):
        row = tl.cast(n, tl.int64)
        rstd = tl.load(rstd_ptr + row)
        unit = tl.load(x_ptr + row * stride + i, i < R, 0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + row * R + i, i < R, 0.0).to(tl.float32)
        total += dy * unit
        dy *= weight
        dx = rstd * (dy - unit * (tl.sum(dy * unit) / R))
        out = dx_ptr + row * (R + REST)
        tl.store(out + i, dx.to(dx_ptr.dtype.element_ty), i < R)
        if REST > 0:
            tl.store(out + R + j, tl.load(drest_ptr + row * REST + j, j < REST), j < REST)
    tl.store(sums_ptr + tl.program_id(0) * R + i, total, i < R)


def warps(R: int) -> dict[str, int]:
    return {"num_warps": max(4, min(16, p2(R) // 512))}


def norm_launch(x: Tensor, weight: Tensor, y: Tensor, rstd: Tensor, eps: float) -> Launch:
    R = weight.shape[0]
    return Launch(norm_kernel, rstd.numel(), (x, weight, y, rstd), (x.stride(1), eps, R, p2(R)), warps(R))


def norm_backward_launch(
    x: Tensor, weight: Tensor, rstd: Tensor, dy: Tensor, drest: Tensor, dx: Tensor, sums: Tensor
) -> Launch:
    R, rest = weight.shape[0], dx.shape[2] - weight.shape[0]
    sizes = (x.stride(1), rstd.numel(), R, p2(R), rest, p2(max(rest, 1)), sums.shape[0])
    return Launch(norm_backward_kernel, sums.shape[0], (x, weight, rstd, dy, drest, dx, sums), sizes, warps(R))


def serves(x: Tensor, norm: RMSNorm) -> bool:
    """Beside what `rotary_triton.serves` asks: whole rows, short enough to hold; a norm nobody looks at or shares."""
    return (
        norm.mesh is None
        and norm.eps is not None
        and norm.weight.shape[0] <= MAX_WIDTH
        and x.is_contiguous()
        and not norm._forward_hooks
        and not norm._forward_pre_hooks
        and not norm._backward_hooks
    )


class Normed(torch.autograd.Function):
    """x (B, N, width), weight (R,) -> the norm of the first R columns (B, N, R), and a view of the other ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        (B, N, _), R = x.shape, weight.shape[0]
        y = torch.empty(B, N, R, dtype=x.dtype, device=x.device)
        rstd = torch.empty(B, N, dtype=torch.float32, device=x.device)
        run(norm_launch, (x, weight, y, rstd), eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        return y, x[..., R:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, drest: Tensor | None) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        (B, N, width), R = x.shape, weight.shape[0]
        dy = torch.zeros(B, N, R, dtype=x.dtype, device=x.device) if dy is None else dy.contiguous()
        rest = (B, N, width - R)
        drest = torch.zeros(rest, dtype=x.dtype, device=x.device) if drest is None else drest.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sums = torch.empty(min(PROGRAMS, B * N), R, dtype=torch.float32, device=x.device)
        run(norm_backward_launch, (x, weight, rstd, dy, drest, dx, sums))
        return dx, sums.sum(0).to(weight.dtype), None
