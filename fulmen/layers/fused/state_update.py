"""One token of Mamba-2, or of Mamba, in one kernel: a state is read and written once, with y made on the way.

One program owns (row, head, BLOCK_P of the head's dimensions), all of the state size N in fp32 registers:

    state [P, N] = exp(dt A) state + (dt x) B^T          y = sum over N of state C + D x, times silu(z)

SHARED: A, dt, dt_bias are the same in all dimensions of a head, as Mamba-2 has them (strides of 0): one exponential for
all. LOG: A is given as log(-A). Step sizes are those of `fulmen.layers.scan.Steps`. A row whose slot does not exist
writes zeros and leaves. Offsets of slots are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.launch import Launch
from fulmen.layers.fused.mamba import clamped, softplus
from fulmen.layers.scan import Steps

ELEMENTS, WARPS = 2048, {"num_warps": 4}  # a program's part of the state


@triton.jit
def state_update_kernel(
    state_ptr, x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr, slots_ptr, y_ptr,
    stride_state_b, stride_state_h, stride_state_p, stride_state_n, stride_x_b, stride_x_h, stride_x_p,
    stride_dt_b, stride_dt_h, stride_dt_p, stride_A_h, stride_A_p, stride_A_n, stride_B_b, stride_B_g, stride_B_n,
    stride_C_b, stride_C_g, stride_C_n, stride_D_h, stride_D_p, stride_z_b, stride_z_h, stride_z_p,
    stride_bias_h, stride_bias_p, slots, H, P, N, GROUP, TILES_P, low, high,
    SOFTPLUS: tl.constexpr, LOG: tl.constexpr, SHARED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid_p, row = tl.program_id(0) % TILES_P, tl.program_id(0) // TILES_P
    pid_h, pid_b = row % H, (row // H).to(tl.int64)
    offs_p, offs_n = pid_p * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    mask_p, mask_n = offs_p < P, offs_n < N
    y_ptrs = y_ptr + (pid_b * H + pid_h) * P + offs_p
    slot = pid_b
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + pid_b).to(tl.int64)
        if (slot < 0) | (slot >= slots):
            tl.store(y_ptrs, tl.zeros((BLOCK_P,), tl.float32).to(y_ptr.dtype.element_ty), mask=mask_p)
            return

    mask = mask_p[:, None] & mask_n[None, :]
    state_ptrs = state_ptr + slot * stride_state_b + pid_h * stride_state_h
    state_ptrs += offs_p[:, None] * stride_state_p + offs_n[None, :] * stride_state_n
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + pid_b * stride_x_b + pid_h * stride_x_h + offs_p * stride_x_p, mask=mask_p, other=0.0)
    x = x.to(tl.float32)
    g = pid_h // GROUP
    b = tl.load(B_ptr + pid_b * stride_B_b + g * stride_B_g + offs_n * stride_B_n, mask=mask_n, other=0.0)
    c = tl.load(C_ptr + pid_b * stride_C_b + g * stride_C_g + offs_n * stride_C_n, mask=mask_n, other=0.0)

    if SHARED:
        dt = tl.load(dt_ptr + pid_b * stride_dt_b + pid_h * stride_dt_h).to(tl.float32)
        if bias_ptr is not None:
            dt += tl.load(bias_ptr + pid_h * stride_bias_h).to(tl.float32)
        dt = clamped(softplus(dt) if SOFTPLUS else dt, low, high)
        a = tl.load(A_ptr + pid_h * stride_A_h).to(tl.float32)
        state = state * tl.exp(dt * (-tl.exp(a) if LOG else a)) + (dt * x)[:, None] * b.to(tl.float32)[None, :]
    else:
        dt = tl.load(dt_ptr + pid_b * stride_dt_b + pid_h * stride_dt_h + offs_p * stride_dt_p, mask=mask_p, other=0.0)
        dt = dt.to(tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + pid_h * stride_bias_h + offs_p * stride_bias_p, mask=mask_p, other=0.0)
            dt += bias.to(tl.float32)
        dt = clamped(softplus(dt) if SOFTPLUS else dt, low, high)
        a_ptrs = A_ptr + pid_h * stride_A_h + offs_p[:, None] * stride_A_p + offs_n[None, :] * stride_A_n
        a = tl.load(a_ptrs, mask=mask, other=0.0).to(tl.float32)
        state = state * tl.exp(dt[:, None] * (-tl.exp(a) if LOG else a)) + (dt * x)[:, None] * b.to(tl.float32)[None, :]
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=mask)

    y = tl.sum(state * c.to(tl.float32)[None, :], axis=1)
    if D_ptr is not None:
        y += x * tl.load(D_ptr + pid_h * stride_D_h + offs_p * stride_D_p, mask=mask_p, other=0.0).to(tl.float32)
    if z_ptr is not None:
        z = tl.load(z_ptr + pid_b * stride_z_b + pid_h * stride_z_h + offs_p * stride_z_p, mask=mask_p, other=0.0)
        z = z.to(tl.float32)
        y *= z / (1.0 + tl.exp(-z))
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask_p)


def strides_of(t: Tensor | None, rank: int) -> tuple[int, ...]:
    """Zeros for a tensor that is None, and for the last dimensions where it has fewer than `rank`."""
    given = () if t is None else t.stride()
    return *given, *(0,) * (rank - len(given))


def updated(
    facts: tuple[Steps, bool], state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, dt_bias: Tensor | None, slots: Tensor | None,
) -> tuple[tuple[Tensor], Launch]:  # fmt: skip
    """y of `fulmen.layers.scan.scan_step`, and its launch; facts are steps and log, slots are contiguous."""
    (steps, log), (rows, H, P), N = facts, x.shape, state.shape[3]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    same = not any((*strides_of(A, 3)[1:], strides_of(dt, 3)[2], strides_of(dt_bias, 2)[1]))
    block_n = triton.next_power_of_2(N)
    block_p = min(triton.next_power_of_2(P), max(1, ELEMENTS // block_n))
    tiles = triton.cdiv(P, block_p)
    ranks = (state, 4), (x, 3), (dt, 3), (A, 3), (B, 3), (C, 3), (D, 2), (z, 3), (dt_bias, 2)
    strides = [s for t, rank in ranks for s in strides_of(t, rank)]
    sizes = state.shape[0], H, P, N, H // B.shape[1], tiles, steps.low, steps.high
    tensors = (state, x, dt, A, B, C, D, z, dt_bias, slots, y)
    constants = steps.softplus, log, same, block_p, block_n
    return (y,), Launch(state_update_kernel, rows * H * tiles, tensors, (*strides, *sizes, *constants), WARPS)
