"""Mamba-2 on a GPU around its scan: one kernel before it, one after it, and one each for the backward.

Before. The step sizes, their decays and the values, x (B, N, H, P) and dt (B, N, H) as they come:

    dt = clamp(softplus(dt + bias));   decay = -A dt;   v = dt x

A program has TOKENS tokens of a few heads. The backward computes dt anew and takes in what came through the skip, D x:

    ddt = x . dv - A ddecay;   dx = dt dv + D dskip;   dA = -sum dt ddecay;   dD = sum x . dskip

After. A program has a group of a token's features, which are normed together:

    u = o + D x;   g = u silu(z);   y = g / sqrt(mean(g^2) + eps) * weight        each part may be missing

Its backward computes u and the mean anew. The gradient of the skip is that of o, so it is not written a second time:
`Values` hands x on as `skip`, and takes the gradient of D x for it.

Traffic in u, the bytes of x, forward and backward: before 2 + 4, after with D 3 + 0, with D and z 4 + 6.

Inside. Where a backend of the attention takes step sizes (`LightningSpec.steps`), it applies dt and D where it reads
and writes rows, and without gradients z, too. Before it only dt and decays are made, and behind it their gradients:

    ddt = x . dv - A ddecay;   dA = -sum dt ddecay;   dD = sum x . do        dx, x . dv and x . do are the backend's

Then only z with gradients and the norm pass over u again, 3 + 5.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.boundary import once_differentiable
from fulmen.launch import Launch
from fulmen.layers.fused import saved_rows
from fulmen.layers.fused.lightning import warps, width_of
from fulmen.layers.fused.rotary import next_power_of_2, run
from fulmen.layers.fused.sums import pipeline, programs_for, sum_launch
from fulmen.layers.scan import RESET as RESET_DECAY
from fulmen.layers.scan import Steps
from fulmen.plans import Plan

TOKENS = 32  # of a program before the scan
TILE = 4096  # elements of x that it has
STEP_TILE = (32, 32)  # tokens and heads of a program that makes step sizes alone
PART = 2048  # at most so many features of a token has a program after the scan that norms nothing
RESET = tl.constexpr(RESET_DECAY)


# ---------------------------------------------------------------------------------------- before the scan


@triton.jit
def softplus(x):
    """log(1 + exp(x)), to the last digits where exp(x) is small."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + (tl.log(u) + (e - (u - 1.0)) / u)


@triton.jit
def clamped(dt, low, high):
    """NaN stays NaN, as in torch.clamp."""
    dt = tl.maximum(dt, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(dt, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_steps(dt_ptr, bias_ptr, at, h, mask, low, high, SOFTPLUS: tl.constexpr):
    """The step sizes and their derivatives by dt."""
    raw = tl.load(dt_ptr + at, mask, 0.0).to(tl.float32)
    if bias_ptr is not None:
        raw += tl.load(bias_ptr + h, mask, 0.0).to(tl.float32)
    if SOFTPLUS:
        dt, slope = softplus(raw), tl.sigmoid(raw)
    else:
        dt, slope = raw, 1.0
    return clamped(dt, low, high), tl.where((dt >= low) & (dt <= high), slope, 0.0)


@triton.jit
def tile_of(N, H, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """b, and of each row of a program's tile its token, its head and whether they are there; a token's heads follow."""
    tiles_h, tiles_t = tl.cdiv(H, HEADS), tl.cdiv(N, TOKENS)
    pid_h, pid = tl.program_id(0) % tiles_h, tl.program_id(0) // tiles_h
    row = tl.arange(0, TOKENS * HEADS)
    t, h = pid % tiles_t * TOKENS + row // HEADS, pid_h * HEADS + row % HEADS
    return (pid // tiles_t).to(tl.int64), t.to(tl.int64), h, (t < N) & (h < H)


@triton.jit
def values_kernel(
    x_ptr, dt_ptr, A_ptr, bias_ptr, seq_ptr, v_ptr, decay_ptr, x_b, x_n, x_h, dt_b, dt_n, dt_h, N, H, low, high,
    SOFTPLUS: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """v (B, N, H, P) and decay (B, H, N); where seq (B, N) changes, the state starts again."""
    b, t, h, mask = tile_of(N, H, TOKENS, HEADS)
    dt, _ = load_steps(dt_ptr, bias_ptr, b * dt_b + t * dt_n + h * dt_h, h, mask, low, high, SOFTPLUS)
    decay = -tl.load(A_ptr + h, mask, 0.0) * dt
    if seq_ptr is not None:
        own = tl.load(seq_ptr + b * N + t, mask, 0)
        changed = own != tl.load(seq_ptr + b * N + t - 1, mask & (t > 0), 0)
        decay += tl.where(changed, RESET, 0.0)
    tl.store(decay_ptr + (b * H + h) * N + t, decay, mask)
    i = tl.arange(0, width_of(P))[None, :]
    there = mask[:, None] & (i < P)
    x = tl.load(x_ptr + (b * x_b + t * x_n + h * x_h)[:, None] + i, there, 0.0).to(tl.float32)
    tl.store(v_ptr + (((b * N + t) * H + h) * P)[:, None] + i, (x * dt[:, None]).to(v_ptr.dtype.element_ty), there)


@triton.jit
def over_tokens(x, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """The sums of a tile's heads, in fp64: the terms cancel."""
    return tl.sum(tl.reshape(x.to(tl.float64), (TOKENS, HEADS)), axis=0)


@triton.jit
def values_backward_kernel(
    x_ptr, dt_ptr, A_ptr, bias_ptr, D_ptr, dv_ptr, ddecay_ptr, dskip_ptr, dx_ptr, ddt_ptr, sums_ptr,
    x_b, x_n, x_h, dt_b, dt_n, dt_h, dv_b, dv_n, dv_h, ds_b, ds_n, ds_h, N, H, low, high,
    SOFTPLUS: tl.constexpr, P: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """sums (B * tiles of tokens, 3, H): parts of dA, dbias and dD; ds: strides of ddecay; dskip lies as dx."""
    b, t, h, mask = tile_of(N, H, TOKENS, HEADS)
    i = tl.arange(0, width_of(P))[None, :]
    there, own = mask[:, None] & (i < P), (((b * N + t) * H + h) * P)[:, None] + i
    x = tl.load(x_ptr + (b * x_b + t * x_n + h * x_h)[:, None] + i, there, 0.0).to(tl.float32)
    dv = tl.load(dv_ptr + (b * dv_b + t * dv_n + h * dv_h)[:, None] + i, there, 0.0).to(tl.float32)
    if D_ptr is not None:
        dskip = tl.load(dskip_ptr + own, there, 0.0).to(tl.float32)
    dt, slope = load_steps(dt_ptr, bias_ptr, b * dt_b + t * dt_n + h * dt_h, h, mask, low, high, SOFTPLUS)
    A = tl.load(A_ptr + h, mask, 0.0)
    ddecay = tl.load(ddecay_ptr + b * ds_b + t * ds_n + h * ds_h, mask, 0.0)

    dx = dv * dt[:, None]
    if D_ptr is not None:
        dx += dskip * tl.load(D_ptr + h, mask, 0.0).to(tl.float32)[:, None]
    tl.store(dx_ptr + own, dx.to(dx_ptr.dtype.element_ty), there)
    draw = (tl.sum(x * dv, axis=1) - A * ddecay) * slope
    tl.store(ddt_ptr + (b * N + t) * H + h, draw.to(ddt_ptr.dtype.element_ty), mask)

    head = tl.program_id(0) % tl.cdiv(H, HEADS) * HEADS + tl.arange(0, HEADS)
    to = sums_ptr + (tl.program_id(0) // tl.cdiv(H, HEADS)).to(tl.int64) * 3 * H + head
    tl.store(to, over_tokens(tl.where(mask, -dt, 0.0) * ddecay, TOKENS, HEADS), head < H)
    tl.store(to + H, over_tokens(tl.where(mask, draw, 0.0), TOKENS, HEADS), head < H)
    if D_ptr is not None:
        tl.store(to + 2 * H, over_tokens(tl.sum(x * dskip, axis=1), TOKENS, HEADS), head < H)


def values_tile(x: Tensor) -> tuple[int, dict[str, int], int, tuple[int, int, int]]:
    """Programs, their warps, tiles of tokens, and P, TOKENS, HEADS."""
    B, N, H, P = x.shape
    heads = max(1, min(next_power_of_2(H), TILE // (TOKENS * next_power_of_2(P))))
    tiles = B * triton.cdiv(N, TOKENS)
    return tiles * triton.cdiv(H, heads), {"num_warps": 4}, tiles, (P, TOKENS, heads)


def values_launch(
    x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, seq: Tensor | None, v: Tensor, decay: Tensor, steps: Steps
) -> Launch:
    grid, options, _, tile = values_tile(x)
    sizes = (*x.stride()[:3], *dt.stride(), *x.shape[1:3], steps.low, steps.high, steps.softplus, *tile)
    return Launch(values_kernel, grid, (x, dt, A, bias, seq, v, decay), sizes, options)


def values_backward_launch(
    x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor | None, dv: Tensor, ddecay: Tensor,
    dskip: Tensor | None, dx: Tensor, ddt: Tensor, sums: Tensor, steps: Steps,
) -> Launch:  # fmt: skip
    grid, options, _, tile = values_tile(x)
    of_decay = ddecay.stride()
    strides = (*x.stride()[:3], *dt.stride(), *dv.stride()[:3], of_decay[0], of_decay[2], of_decay[1])
    sizes = (*strides, *x.shape[1:3], steps.low, steps.high, steps.softplus, *tile)
    tensors = (x, dt, A, bias, D, dv, ddecay, dskip, dx, ddt, sums)
    return Launch(values_backward_kernel, grid, tensors, sizes, options)


class Values(torch.autograd.Function):
    """steps, x (B, N, H, P), dt (B, N, H), A (H,), bias, D (H,), seq (B, N) -> v, as x, decay (B, H, N), skip.

    bias, D and seq may be None. skip is x, for `Outputs` to add D x: the gradient it is given is that of D x, from
    which D's is made here. Saved are x and dt.
    """

    @staticmethod
    def forward(
        ctx: Any, steps: Steps, x: Tensor, dt: Tensor, A: Tensor, bias: Tensor | None, D: Tensor | None,
        seq: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        B, N, H, _ = x.shape
        v = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        decay = torch.empty(B, H, N, dtype=torch.float32, device=x.device)
        run(values_launch, (x, dt, A, bias, seq, v, decay), steps)
        ctx.steps = steps
        ctx.save_for_backward(x, dt, A, bias, D)
        return v, decay, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dv: Tensor, ddecay: Tensor, dskip: Tensor) -> tuple[Any, ...]:
        x, dt, A, bias, D = saved_rows(ctx)
        dv = dv if dv.stride(3) == 1 else dv.contiguous()
        through = None if D is None else dskip.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ddt = torch.empty(dt.shape, dtype=dt.dtype, device=x.device)
        sums = torch.empty(values_tile(x)[2], 3, x.shape[2], dtype=torch.float64, device=x.device)
        run(values_backward_launch, (x, dt, A, bias, D, dv, ddecay, through, dx, ddt, sums), ctx.steps)
        given = zip(sums.sum(0), (A, bias, D), strict=True)
        return None, dx, ddt, *(None if of is None else d.to(of.dtype) for d, of in given), None


# ---------------------------------------------------------------------------------------- inside the scan


@triton.jit
def step_tile(N, H, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """b, a program's tokens [TOKENS, 1] and heads [1, HEADS], and whether they are there."""
    tiles_h, tiles_t = tl.cdiv(H, HEADS), tl.cdiv(N, TOKENS)
    pid_h, pid = tl.program_id(0) % tiles_h, tl.program_id(0) // tiles_h
    t = (pid % tiles_t * TOKENS + tl.arange(0, TOKENS))[:, None].to(tl.int64)
    h = (pid_h * HEADS + tl.arange(0, HEADS))[None, :]
    return (pid // tiles_t).to(tl.int64), t, h, (t < N) & (h < H)


@triton.jit
def steps_kernel(
    dt_ptr, A_ptr, bias_ptr, seq_ptr, sizes_ptr, decay_ptr, dt_b, dt_n, dt_h, N, H, low, high,
    SOFTPLUS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Step sizes and decays (B, H, N); where seq (B, N) changes, the state starts again."""
    b, t, h, mask = step_tile(N, H, TOKENS, HEADS)
    dt, _ = load_steps(dt_ptr, bias_ptr, b * dt_b + t * dt_n + h * dt_h, h, mask, low, high, SOFTPLUS)
    decay = -tl.load(A_ptr + h, h < H, 0.0) * dt
    if seq_ptr is not None:
        own = tl.load(seq_ptr + b * N + t, t < N, 0)
        changed = own != tl.load(seq_ptr + b * N + t - 1, (t > 0) & (t < N), 0)
        decay += tl.where(changed, RESET, 0.0)
    to = (b * H + h) * N + t
    tl.store(sizes_ptr + to, dt, mask)
    tl.store(decay_ptr + to, decay, mask)


@triton.jit
def steps_backward_kernel(
    dt_ptr, A_ptr, bias_ptr, ddecay_ptr, x_dv_ptr, ddt_ptr, sums_ptr, dt_b, dt_n, dt_h, N, H, all_rows, low, high,
    SOFTPLUS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """ddt from ddecay, x . dv and x . do, (B, H, N) each; sums (B * tiles of tokens, 3, H): parts of dA, dbias, dD."""
    b, t, h, mask = step_tile(N, H, TOKENS, HEADS)
    dt, slope = load_steps(dt_ptr, bias_ptr, b * dt_b + t * dt_n + h * dt_h, h, mask, low, high, SOFTPLUS)
    own = (b * H + h) * N + t
    ddecay = tl.load(ddecay_ptr + own, mask, 0.0)
    x_dv = tl.load(x_dv_ptr + own, mask, 0.0)
    x_do = tl.load(x_dv_ptr + all_rows + own, mask, 0.0)
    draw = (x_dv - tl.load(A_ptr + h, h < H, 0.0) * ddecay) * slope
    tl.store(ddt_ptr + (b * N + t) * H + h, draw.to(ddt_ptr.dtype.element_ty), mask)

    head = tl.program_id(0) % tl.cdiv(H, HEADS) * HEADS + tl.arange(0, HEADS)
    to = sums_ptr + (tl.program_id(0) // tl.cdiv(H, HEADS)).to(tl.int64) * 3 * H + head
    tl.store(to, tl.sum((tl.where(mask, -dt, 0.0) * ddecay).to(tl.float64), axis=0), head < H)
    tl.store(to + H, tl.sum(tl.where(mask, draw, 0.0).to(tl.float64), axis=0), head < H)
    tl.store(to + 2 * H, tl.sum(x_do.to(tl.float64), axis=0), head < H)


def steps_grid(dt: Tensor) -> tuple[int, int]:
    """Programs, and tiles of tokens."""
    B, N, H = dt.shape
    tiles = B * triton.cdiv(N, STEP_TILE[0])
    return tiles * triton.cdiv(H, STEP_TILE[1]), tiles


def steps_launch(
    dt: Tensor, A: Tensor, bias: Tensor | None, seq: Tensor | None, sizes: Tensor, decay: Tensor, steps: Steps
) -> Launch:
    rest = (*dt.stride(), *dt.shape[1:], steps.low, steps.high, steps.softplus, *STEP_TILE)
    return Launch(steps_kernel, steps_grid(dt)[0], (dt, A, bias, seq, sizes, decay), rest, {"num_warps": 4})


def steps_backward_launch(
    dt: Tensor, A: Tensor, bias: Tensor | None, ddecay: Tensor, of_steps: Tensor, ddt: Tensor, sums: Tensor,
    steps: Steps,
) -> Launch:  # fmt: skip
    rest = (*dt.stride(), *dt.shape[1:], dt.numel(), steps.low, steps.high, steps.softplus, *STEP_TILE)
    tensors = (dt, A, bias, ddecay, of_steps, ddt, sums)
    return Launch(steps_backward_kernel, steps_grid(dt)[0], tensors, rest, {"num_warps": 4})


def scanned(
    plan: Plan, steps: Steps, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor | None,
    D: Tensor | None, z: Tensor | None, seq: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None,
) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor | None]:  # fmt: skip
    """Decays, what the attention saved, step sizes, D in fp32; then y (B, N, H, P) and the last states or None."""
    rows, N, H = dt.shape
    sizes = torch.empty(rows, H, N, dtype=torch.float32, device=x.device)
    decay = torch.empty_like(sizes)
    run(steps_launch, (dt, A, bias, seq, sizes, decay), steps)
    q, k, v, gate = (t if t is None else t.transpose(1, 2) for t in (C, B, x, z))
    skip = None if D is None else D.float()
    y, state, saved = plan.forward.run(q, k, v, decay, initial, cu_seqlens, None, sizes, skip, gate)
    return (decay, saved, sizes, skip), y.transpose(1, 2), state


class Scanned(torch.autograd.Function):
    """As `scanned`, without z: y = o + D x, and the last states if the plan has them. Saved are x, dt, B and C."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, steps: Steps, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, bias: Tensor | None,
        D: Tensor | None, seq: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None,
    ) -> Any:  # fmt: skip
        made, y, state = scanned(plan, steps, x, dt, A, B, C, bias, D, None, seq, initial, cu_seqlens)
        ctx.plan, ctx.steps, ctx.of_skip = plan, steps, None if D is None else D.dtype
        ctx.set_materialize_grads(False)
        # D itself too, of which `made` has another dtype: inputs that are not saved get a second derivative of zero
        ctx.save_for_backward(x, dt, A, B, C, bias, initial, cu_seqlens, *made, D)
        return y if state is None else (y, state)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None = None) -> tuple[Any, ...]:
        x, dt, A, B, C, bias, initial, cu_seqlens, decay, saved, sizes, skip, _ = saved_rows(ctx)
        q, k, v, do = (t.transpose(1, 2) for t in (C, B, x, torch.zeros_like(x) if dy is None else dy))
        ddecay = torch.empty(decay.shape, dtype=torch.float32, device=v.device)
        of_steps = torch.empty(2, *decay.shape, dtype=torch.float32, device=v.device)
        tensors = (q, k, v, decay, initial, cu_seqlens, saved, sizes, skip, None, do, dstate, ddecay, of_steps)
        dq, dk, dx, dinitial = ctx.plan.gradients(*tensors)
        ddt = torch.empty(dt.shape, dtype=dt.dtype, device=v.device)
        sums = torch.empty(steps_grid(dt)[1], 3, dt.shape[2], dtype=torch.float64, device=v.device)
        run(steps_backward_launch, (dt, A, bias, ddecay, of_steps, ddt, sums), ctx.steps)
        dA, dbias, dD = sums.sum(0)
        dx, dk, dq = (t.transpose(1, 2) for t in (dx, dk, dq))
        of_bias = None if bias is None else dbias.to(bias.dtype)
        of_skip = None if ctx.of_skip is None else dD.to(ctx.of_skip)
        return None, None, dx, ddt, dA.to(A.dtype), dk, dq, of_bias, of_skip, None, dinitial, None


# ----------------------------------------------------------------------------------------- after the scan


@triton.jit
def load_output(o_ptr, x_ptr, D_ptr, o_row, x_row, at, there):
    """u = o + D x of a token."""
    u = tl.load(o_ptr + o_row + at, there, 0.0).to(tl.float32)
    if D_ptr is not None:
        x = tl.load(x_ptr + x_row + at, there, 0.0).to(tl.float32)
        u += x * tl.load(D_ptr + at, there, 0.0).to(tl.float32)
    return u


@triton.jit
def outputs_kernel(
    o_ptr, x_ptr, D_ptr, z_ptr, weight_ptr, y_ptr, o_n, x_n, z_n, eps, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    """Programs are (token, group); o_n, x_n and z_n are the elements from one token to the next."""
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    i = tl.arange(0, width_of(SIZE))
    there, at = i < SIZE, tl.program_id(0) % GROUPS * SIZE + i
    y = load_output(o_ptr, x_ptr, D_ptr, token * o_n, token * x_n, at, there)
    if z_ptr is not None:
        z = tl.load(z_ptr + token * z_n + at, there, 0.0).to(tl.float32)
        y *= z * tl.sigmoid(z)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + at, there, 0.0).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / SIZE + eps) * weight
    tl.store(y_ptr + token * GROUPS * SIZE + at, y.to(y_ptr.dtype.element_ty), there)


@triton.jit
def outputs_backward_kernel(
    o_ptr, x_ptr, D_ptr, z_ptr, weight_ptr, dy_ptr, do_ptr, dz_ptr, sums_ptr, o_n, x_n, z_n, eps, tokens,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes a group of every PROGRAMS-th token; sums (PROGRAMS, features): parts of the weight's gradient."""
    i = tl.arange(0, width_of(SIZE))
    there, at = i < SIZE, tl.program_id(0) % GROUPS * SIZE + i
    total = tl.zeros([width_of(SIZE)], tl.float32)
    for number in tl.range(tl.program_id(0) // GROUPS, tokens, PROGRAMS, num_stages=STAGES):
        token = tl.full([], number, tl.int64)
        row = token * GROUPS * SIZE
        d = tl.load(dy_ptr + row + at, there, 0.0).to(tl.float32)
        u = load_output(o_ptr, x_ptr, D_ptr, token * o_n, token * x_n, at, there)
        if z_ptr is not None:
            z = tl.load(z_ptr + token * z_n + at, there, 0.0).to(tl.float32)
            opened = tl.sigmoid(z)
        if weight_ptr is not None:
            unit = u
            if z_ptr is not None:
                unit = u * z * opened
            rstd = tl.rsqrt(tl.sum(unit * unit, axis=0) / SIZE + eps)
            unit *= rstd
            total += d * unit
            d *= tl.load(weight_ptr + at, there, 0.0).to(tl.float32)
            d = rstd * (d - unit * (tl.sum(d * unit, axis=0) / SIZE))
        if z_ptr is not None:
            dz = d * u * opened * (1.0 + z * (1.0 - opened))
            tl.store(dz_ptr + row + at, dz.to(dz_ptr.dtype.element_ty), there)
            d *= z * opened
        tl.store(do_ptr + row + at, d.to(do_ptr.dtype.element_ty), there)
    if weight_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0) // GROUPS * GROUPS * SIZE + at, total, there)


def between_tokens(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(0 if x is None else x.stride(1) for x in tensors)


def outputs_launch(
    o: Tensor, x: Tensor | None, D: Tensor | None, z: Tensor | None, weight: Tensor | None, y: Tensor,
    groups: int, eps: float,
) -> Launch:  # fmt: skip
    B, N, width = o.shape
    rest = (*between_tokens(o, x, z), eps, groups, width // groups)
    return Launch(
        outputs_kernel, B * N * groups, (o, x, D, z, weight, y), rest, warps(next_power_of_2(width // groups), 8)
    )


def outputs_backward_launch(
    o: Tensor, x: Tensor | None, D: Tensor | None, z: Tensor | None, weight: Tensor | None, dy: Tensor, do: Tensor,
    dz: Tensor | None, sums: Tensor | None, groups: int, eps: float,
) -> Launch:  # fmt: skip
    B, N, width = o.shape
    programs = B * N if sums is None else sums.shape[0]
    stages, options = pipeline(width // groups, *((width // groups, t) for t in (dy, o, x, D, z, weight)))
    if sums is None:  # a program takes a group of one token
        stages = 1
    rest = (*between_tokens(o, x, z), eps, B * N, groups, width // groups, programs, stages)
    tensors = (o, x, D, z, weight, dy, do, dz, sums)
    return Launch(outputs_backward_kernel, programs * groups, tensors, rest, options)


def finished(
    facts: tuple[int, float], o: Tensor, x: Tensor | None, D: Tensor | None, z: Tensor | None, weight: Tensor
) -> tuple[tuple[Tensor], Launch]:
    """As `Outputs`, for `fused_call`; facts are groups and eps, D is of each feature."""
    y = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    return (y,), outputs_launch(o, x, D, z, weight, y, *facts)


class Outputs(torch.autograd.Function):
    """groups, eps, o (B, N, width), skip x, D (heads,), z, weight (width,) -> y (B, N, width); see the top of the file.

    All but o may be None, x and D together. Without a weight nothing is normed, and the kernels choose the groups. Rows
    of o, x and z lie at equal distances. D's gradient is left to `Values`.
    """

    @staticmethod
    def forward(
        ctx: Any, groups: int, eps: float, o: Tensor, x: Tensor | None, D: Tensor | None, z: Tensor | None,
        weight: Tensor | None,
    ) -> Tensor:  # fmt: skip
        width = o.shape[2]
        groups = groups if weight is not None else width // math.gcd(width, PART)
        D = None if D is None else D.repeat_interleave(width // D.shape[0])
        y = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        run(outputs_launch, (o, x, D, z, weight, y), groups, eps)
        ctx.options = groups, eps
        ctx.skips, ctx.saves = x is not None, z is not None or weight is not None
        if ctx.saves:
            ctx.save_for_backward(o, x, D, z, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        dy = dy.contiguous()
        if not ctx.saves:
            return None, None, dy, dy if ctx.skips else None, None, None, None
        o, x, D, z, weight = saved_rows(ctx)
        do = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        dz = None if z is None else torch.empty_like(do)
        sums, dweight = None, None
        if weight is not None:
            groups = ctx.options[0]
            programs = programs_for(o.shape[2] // groups, groups, o.shape[0] * o.shape[1], o.device)
            sums = torch.empty(programs, o.shape[2], dtype=torch.float32, device=o.device)
        run(outputs_backward_launch, (o, x, D, z, weight, dy, do, dz, sums), *ctx.options)
        if sums is not None:
            dweight = torch.empty_like(weight)
            run(sum_launch, (sums, dweight, dweight))
        return None, None, do, do if ctx.skips else None, None, dz, dweight
