"""A decoder block on a GPU beside its attention: residual sum and norm, gated MLP, loss of the head; one kernel each.

    sum = x + y;  normed = sum / sqrt(mean(sum^2) + eps) * weight      a program takes a token, or every so many-th
    h = activation(gate) * up                                          a program takes BLOCK elements
    loss = log(sum_j exp(logits_j)) - logits_target                    a program takes a token

Traffic in u, the bytes of x, and h and l, those of `gate` and of the logits, forward and backward:

    sum and norm    4u + 4u        gated MLP    3h + 5h        loss    l + 2l

Sums are taken in fp32. The norm is of the sum as it is stored. The gradient of the norm's weight is summed in each
program over its tokens, then over programs in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fulmen.boundary import once_differentiable
from fulmen.launch import Launch
from fulmen.layers.fused import saved
from fulmen.layers.fused.lightning import ACTIVATIONS, activated, slope, warps, width_of
from fulmen.layers.fused.rotary import next_power_of_2, run
from fulmen.layers.fused.sums import pipeline, programs_for, sum_launch

BLOCK = 4096  # elements of `gate` that a program takes
COLUMNS = 4096  # logits that a program takes at a time


# --------------------------------------------------------------------------------------------- sum and norm


@triton.jit
def add_norm_kernel(x_ptr, y_ptr, weight_ptr, sum_ptr, normed_ptr, eps, SIZE: tl.constexpr):
    i = tl.arange(0, width_of(SIZE))
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    x = tl.load(x_ptr + at, i < SIZE, 0.0).to(tl.float32) + tl.load(y_ptr + at, i < SIZE, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + i, i < SIZE, 0.0).to(tl.float32)
    stored = x.to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + at, stored, i < SIZE)
    x = stored.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight
    tl.store(normed_ptr + at, x.to(normed_ptr.dtype.element_ty), i < SIZE)


@triton.jit
def add_norm_backward_kernel(
    sum_ptr, weight_ptr, dsum_ptr, dnormed_ptr, dx_ptr, sums_ptr, eps, tokens,
    SIZE: tl.constexpr, RESIDUAL: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th token; sums (PROGRAMS, SIZE). Without RESIDUAL nobody used the sum but the norm."""
    i = tl.arange(0, width_of(SIZE))
    weight = tl.load(weight_ptr + i, i < SIZE, 0.0).to(tl.float32)
    total = tl.zeros([width_of(SIZE)], tl.float32)
    for token in tl.range(tl.program_id(0), tokens, PROGRAMS, num_stages=STAGES):
        at = tl.full([], token, tl.int64) * SIZE + i
        unit = tl.load(sum_ptr + at, i < SIZE, 0.0).to(tl.float32)
        d = tl.load(dnormed_ptr + at, i < SIZE, 0.0).to(tl.float32)
        if RESIDUAL:  # every load comes before the first sum, whose barrier would hold it back
            dsum = tl.load(dsum_ptr + at, i < SIZE, 0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(unit * unit, axis=0) / SIZE + eps)
        unit *= rstd
        total += d * unit
        d *= weight
        d = rstd * (d - unit * (tl.sum(d * unit, axis=0) / SIZE))
        if RESIDUAL:
            d += dsum
        tl.store(dx_ptr + at, d.to(dx_ptr.dtype.element_ty), i < SIZE)
    tl.store(sums_ptr + tl.program_id(0) * SIZE + i, total, i < SIZE)


def add_norm_launch(x: Tensor, y: Tensor, weight: Tensor, added: Tensor, normed: Tensor, eps: float) -> Launch:
    size = x.shape[-1]
    tensors, options = (x, y, weight, added, normed), warps(next_power_of_2(size), 8)
    return Launch(add_norm_kernel, x.numel() // size, tensors, (eps, size), options)


def add_norm_backward_launch(
    added: Tensor, weight: Tensor, dsum: Tensor, dnormed: Tensor, dx: Tensor, sums: Tensor, eps: float, residual: bool
) -> Launch:
    """dsum is not looked at unless `residual`."""
    programs, size = sums.shape
    stages, options = pipeline(size, *((size, t) for t in (added, dnormed, dsum)))
    rest = (eps, added.numel() // size, size, residual, programs, stages)
    return Launch(add_norm_backward_kernel, programs, (added, weight, dsum, dnormed, dx, sums), rest, options)


class Added(torch.autograd.Function):
    """eps, x, y (..., size), weight (size,) -> x + y, and its norm. Saves the sum."""

    @staticmethod
    def forward(ctx: Any, eps: float, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        added, normed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        run(add_norm_launch, (x, y, weight, added, normed), eps)
        ctx.eps = eps
        ctx.save_for_backward(added, weight)
        ctx.set_materialize_grads(False)
        return added, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsum: Tensor | None, dnormed: Tensor | None) -> tuple[Any, ...]:
        if dnormed is None:
            return None, dsum, dsum, None
        added, weight = saved(ctx)
        dnormed, residual = dnormed.contiguous(), dsum is not None
        dsum = dnormed if dsum is None else dsum.contiguous()
        rows, size = added.numel() // added.shape[-1], added.shape[-1]
        dx, dweight = torch.empty_like(added), torch.empty_like(weight)
        sums = torch.empty(programs_for(size, 1, rows, added.device), size, dtype=torch.float32, device=added.device)
        run(add_norm_backward_launch, (added, weight, dsum, dnormed, dx, sums), ctx.eps, residual)
        if ctx.needs_input_grad[3]:
            run(sum_launch, (sums, dweight, dweight))
        return None, dx, dx, dweight


# ------------------------------------------------------------------------------------------------ gated MLP


@triton.jit
def gated_kernel(gate_ptr, up_ptr, h_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(gate_ptr + at, at < count), tl.load(up_ptr + at, at < count)
    h = activated(gate.to(tl.float32), ACTIVATION) * up.to(tl.float32)
    tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), at < count)


@triton.jit
def gated_backward_kernel(
    gate_ptr, up_ptr, dh_ptr, dgate_ptr, dup_ptr, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(gate_ptr + at, at < count).to(tl.float32), tl.load(up_ptr + at, at < count).to(tl.float32)
    dh = tl.load(dh_ptr + at, at < count).to(tl.float32)
    dgate, dup = dh * up * slope(gate, ACTIVATION), dh * activated(gate, ACTIVATION)
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), at < count)
    tl.store(dup_ptr + at, dup.to(dup_ptr.dtype.element_ty), at < count)


def gated_launch(gate: Tensor, up: Tensor, h: Tensor, activation: str) -> Launch:
    rest = (gate.numel(), ACTIVATIONS[activation], BLOCK)
    return Launch(gated_kernel, triton.cdiv(gate.numel(), BLOCK), (gate, up, h), rest, warps(BLOCK, 16))


def gated_backward_launch(gate: Tensor, up: Tensor, dh: Tensor, dgate: Tensor, dup: Tensor, activation: str) -> Launch:
    tensors, rest = (gate, up, dh, dgate, dup), (gate.numel(), ACTIVATIONS[activation], BLOCK)
    return Launch(gated_backward_kernel, triton.cdiv(gate.numel(), BLOCK), tensors, rest, warps(BLOCK, 16))


class Gated(torch.autograd.Function):
    """activation, gate, up of one shape -> activation(gate) * up. Saves gate and up."""

    @staticmethod
    def forward(ctx: Any, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        h = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        run(gated_launch, (gate, up, h), activation)
        ctx.activation = activation
        ctx.save_for_backward(gate, up)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Any, ...]:
        gate, up = saved(ctx)
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        run(gated_backward_launch, (gate, up, dh.contiguous(), dgate, dup), ctx.activation)
        return None, dgate, dup


# ------------------------------------------------------------------------------------------ loss of the head


@triton.jit
def loss_kernel(logits_ptr, target_ptr, loss_ptr, sums_ptr, V: tl.constexpr, COLUMNS: tl.constexpr):
    """sums (tokens, 2): the largest logit, and the log of the sum over exp(logits - largest), which together would lose
    digits. A target below 0 has no loss."""
    token = tl.program_id(0).to(tl.int64)
    row = logits_ptr + token * V
    most = tl.full([], -3.4028234663852886e38, tl.float32)  # finite: -inf - -inf is NaN
    total = tl.zeros([COLUMNS], tl.float32)  # over exp(logits - most), of every COLUMNS-th
    for first in range(0, V, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        x = tl.load(row + j, j < V, float("-inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, axis=0))
        total = total * tl.exp(most - higher) + tl.exp(x - higher)
        most = higher
    log = tl.log(tl.sum(total, axis=0))
    target = tl.load(target_ptr + token)
    logit = tl.load(row + target, (target >= 0) & (target < V), float("nan")).to(tl.float32)
    loss = log - (logit - most)
    tl.store(loss_ptr + token, tl.where(target < 0, 0.0, loss))
    tl.store(sums_ptr + 2 * token, most)
    tl.store(sums_ptr + 2 * token + 1, log)


@triton.jit
def loss_backward_kernel(
    logits_ptr, target_ptr, sums_ptr, dloss_ptr, dlogits_ptr, V: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token)
    most, log = tl.load(sums_ptr + 2 * token), tl.load(sums_ptr + 2 * token + 1)
    dloss = tl.where(target < 0, 0.0, tl.load(dloss_ptr + token))
    for first in range(0, V, COLUMNS):
        j = first + tl.arange(0, COLUMNS)
        p = tl.exp(tl.load(logits_ptr + token * V + j, j < V, 0.0).to(tl.float32) - most - log)
        d = dloss * (p - tl.where(j == target, 1.0, 0.0))
        tl.store(dlogits_ptr + token * V + j, d.to(dlogits_ptr.dtype.element_ty), j < V)


def loss_launch(logits: Tensor, targets: Tensor, losses: Tensor, sums: Tensor) -> Launch:
    columns = min(COLUMNS, next_power_of_2(logits.shape[1]))
    rest = (logits.shape[1], columns)
    return Launch(loss_kernel, logits.shape[0], (logits, targets, losses, sums), rest, warps(columns, 16))


def loss_backward_launch(logits: Tensor, targets: Tensor, sums: Tensor, dloss: Tensor, dlogits: Tensor) -> Launch:
    columns = min(COLUMNS, next_power_of_2(logits.shape[1]))
    tensors, rest = (logits, targets, sums, dloss, dlogits), (logits.shape[1], columns)
    return Launch(loss_backward_kernel, logits.shape[0], tensors, rest, warps(columns, 16))


class Loss(torch.autograd.Function):
    """x (tokens, size), weight (V, size), targets (tokens,) -> losses (tokens,), fp32. Saves the logits as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        losses = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        sums = torch.empty(x.shape[0], 2, dtype=torch.float32, device=x.device)
        run(loss_launch, (logits, targets, losses, sums))
        ctx.save_for_backward(x, weight, targets, logits, sums)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        x, weight, targets, logits, sums = saved(ctx)
        dlogits = torch.empty_like(logits)
        run(loss_backward_launch, (logits, targets, sums, dloss.contiguous(), dlogits))
        wants_x, wants_weight, _ = ctx.needs_input_grad
        return dlogits @ weight if wants_x else None, dlogits.T @ x if wants_weight else None, None
