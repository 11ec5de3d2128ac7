"""The causal convolution of each channel with SiLU, on a GPU in one pass over memory, and its backward in one.

    y_t = silu(bias + sum_k w_k x_{t-k})        k from 0 to WIDTH - 1; w_k is weight[:, WIDTH - 1 - k]

x (B, N, channels) may be a slice of a projection's output. Rows before the first are those of `before`, or zero; a row
of another packed sequence counts as zero.

A program walks TOKENS rows of CHANNELS channels and keeps the last rows in registers, so each is read once. In the
backward it walks from the last row to the first, with rows of x and of the gradient d before the activation, and begins
three rows after its own, whose d it needs:

    dx_t = sum_k w_k d_{t+k}        dw_k = sum_t d_t x_{t-k}        dbias = sum_t d_t

Sums over a program's rows are added over programs in a fixed order. One token of a sequence: `stepped` shifts a state
of the last inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.boundary import once_differentiable
from fulmen.launch import Launch
from fulmen.layers.fused import saved_rows
from fulmen.layers.fused.rotary import next_power_of_2, run

TOKENS, CHANNELS, ONE_WARP = 64, 256, {"num_warps": 1}  # of a program of the forward
BACK_TOKENS, BACK_CHANNELS, TWO_WARPS = 128, 256, {"num_warps": 2}
# Rows on their way. H200: 1.01 and 0.65 of a copy's speed; without stages 0.62 and 0.50.
STAGES, BACK_STAGES = tl.constexpr(8), tl.constexpr(5)


@triton.jit
def tile_of(N, channels, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    """The number of a program's tile of tokens, its b and its first token; its channels and which of them there are."""
    tiles_c, tiles_t = tl.cdiv(channels, CHANNELS), tl.cdiv(N, TOKENS)
    pid_c, pid = tl.program_id(0) % tiles_c, tl.program_id(0) // tiles_c
    c = pid_c * CHANNELS + tl.arange(0, CHANNELS)
    return pid, (pid // tiles_t).to(tl.int64), pid % tiles_t * TOKENS, c, c < channels


@triton.jit
def load_weights(weight_ptr, bias_ptr, c, mask_c, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """w_0 to w_3 and the bias [CHANNELS], in fp32; zeros for a bias that is None."""
    w0, w1 = load_tap(weight_ptr, c, mask_c, 0, WIDTH), load_tap(weight_ptr, c, mask_c, 1, WIDTH)
    w2, w3 = load_tap(weight_ptr, c, mask_c, 2, WIDTH), load_tap(weight_ptr, c, mask_c, 3, WIDTH)
    bias = tl.zeros([CHANNELS], tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + c, mask_c, 0.0).to(tl.float32)
    return w0, w1, w2, w3, bias


@triton.jit
def load_tap(weight_ptr, c, mask_c, k: tl.constexpr, WIDTH: tl.constexpr):
    """w_k [CHANNELS], in fp32; zero where the convolution is narrower."""
    if k < WIDTH:
        return tl.load(weight_ptr + c * WIDTH + WIDTH - 1 - k, mask_c, 0.0).to(tl.float32)
    else:
        return tl.zeros_like(c).to(tl.float32)


@triton.jit
def taps(w0, w1, w2, w3, x0, x1, x2, x3, WIDTH: tl.constexpr):
    """sum_k w_k x_k over the WIDTH there are: 0 times NaN would be NaN."""
    u = w0 * x0
    if WIDTH > 1:
        u += w1 * x1
    if WIDTH > 2:
        u += w2 * x2
    if WIDTH > 3:
        u += w3 * x3
    return u


@triton.jit
def load_tokens(x_ptr, before_ptr, b, t, c, there, stride_b, stride_n, channels, WIDTH: tl.constexpr):
    """Rows t of x, which may lie before the first."""
    at = b * stride_b + t.to(tl.int64) * stride_n + c
    x = tl.load(x_ptr + at, there & (t >= 0), 0.0).to(tl.float32)
    if before_ptr is not None:
        early = there & (t < 0) & (t > -WIDTH)
        x += tl.load(before_ptr + (b * (WIDTH - 1) + WIDTH - 1 + t) * channels + c, early, 0.0).to(tl.float32)
    return x


@triton.jit
def within(x, seq_ptr, b, t, u, N):
    """x, or zeros if tokens t and u are of different sequences."""
    if seq_ptr is None:
        return x
    else:
        inside = (t >= 0) & (u >= 0) & (t < N) & (u < N)
        one, other = tl.load(seq_ptr + b * N + t, inside, 0), tl.load(seq_ptr + b * N + u, inside, 1)
        return tl.where(one == other, x, 0.0)


@triton.jit
def conv_kernel(
    x_ptr, weight_ptr, bias_ptr, seq_ptr, before_ptr, y_ptr, stride_b, stride_n, N, channels,
    SILU: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Programs are (b, tile of tokens, tile of channels); seq (B, N) is the number of each token's sequence."""
    _, b, begin, c, mask = tile_of(N, channels, TOKENS, CHANNELS)
    w0, w1, w2, w3, bias = load_weights(weight_ptr, bias_ptr, c, mask, WIDTH, CHANNELS)
    x1 = load_tokens(x_ptr, before_ptr, b, begin - 1, c, mask, stride_b, stride_n, channels, WIDTH)
    x2 = load_tokens(x_ptr, before_ptr, b, begin - 2, c, mask, stride_b, stride_n, channels, WIDTH)
    x3 = load_tokens(x_ptr, before_ptr, b, begin - 3, c, mask, stride_b, stride_n, channels, WIDTH)
    for t in tl.range(begin, tl.minimum(begin + TOKENS, N), num_stages=STAGES):
        x0 = tl.load(x_ptr + b * stride_b + tl.cast(t, tl.int64) * stride_n + c, mask, 0.0).to(tl.float32)
        y1, y2 = within(x1, seq_ptr, b, t, t - 1, N), within(x2, seq_ptr, b, t, t - 2, N)
        u = bias + taps(w0, w1, w2, w3, x0, y1, y2, within(x3, seq_ptr, b, t, t - 3, N), WIDTH)
        if SILU:
            u *= tl.sigmoid(u)
        tl.store(y_ptr + (b * N + t) * channels + c, u.to(y_ptr.dtype.element_ty), mask)
        x3, x2, x1 = x2 + 0.0, x1 + 0.0, x0  # Triton has no stages for a loop that hands a value on as it is


@triton.jit
def conv_backward_kernel(
    x_ptr, weight_ptr, bias_ptr, seq_ptr, before_ptr, dy_ptr, dx_ptr, sums_ptr, stride_b, stride_n, dy_b, dy_n,
    N, channels,
    SILU: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Programs as in the forward; sums (B * tiles of tokens, 5, channels): parts of dw_0 to dw_3 and dbias."""
    pid, b, begin, c, mask = tile_of(N, channels, TOKENS, CHANNELS)
    end = tl.minimum(begin + TOKENS, N)
    w0, w1, w2, w3, bias = load_weights(weight_ptr, bias_ptr, c, mask, WIDTH, CHANNELS)
    none = tl.zeros([CHANNELS], tl.float32)
    s0, s1, s2, s3, s4 = none, none, none, none, none
    # d of the rows after t: three zeros, as Triton does not carry a name that a loop gives the value it had before
    d1, d2, d3 = tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32), tl.zeros([CHANNELS], tl.float32)
    x0 = load_tokens(x_ptr, before_ptr, b, end + 2, c, mask & (end + 2 < N), stride_b, stride_n, channels, WIDTH)
    x1 = load_tokens(x_ptr, before_ptr, b, end + 1, c, mask & (end + 1 < N), stride_b, stride_n, channels, WIDTH)
    x2 = load_tokens(x_ptr, before_ptr, b, end, c, mask & (end < N), stride_b, stride_n, channels, WIDTH)
    for i in tl.range(0, end - begin + 3, num_stages=BACK_STAGES):
        t = end + 2 - i
        x3 = load_tokens(x_ptr, before_ptr, b, t - 3, c, mask & (t - 3 < N), stride_b, stride_n, channels, WIDTH)
        dy_row = dy_ptr + b * dy_b + tl.cast(t, tl.int64) * dy_n
        d0 = tl.load(dy_row + c, mask & (t < N), 0.0).to(tl.float32)
        y1, y2 = within(x1, seq_ptr, b, t, t - 1, N), within(x2, seq_ptr, b, t, t - 2, N)
        y3 = within(x3, seq_ptr, b, t, t - 3, N)
        if SILU:
            u = bias + taps(w0, w1, w2, w3, x0, y1, y2, y3, WIDTH)
            gate = tl.sigmoid(u)
            d0 *= gate * (1.0 + u * (1.0 - gate))
        e1, e2 = within(d1, seq_ptr, b, t, t + 1, N), within(d2, seq_ptr, b, t, t + 2, N)
        dx = taps(w0, w1, w2, w3, d0, e1, e2, within(d3, seq_ptr, b, t, t + 3, N), WIDTH)
        dx_row = dx_ptr + (b * N + t) * channels
        tl.store(dx_row + c, dx.to(dx_ptr.dtype.element_ty), mask & (t < end))
        own = tl.where(t < end, d0, 0.0)
        s0 += own * x0
        s1 += own * y1
        s2 += own * y2
        s3 += own * y3
        s4 += own
        d3, d2, d1 = d2 + 0.0, d1 + 0.0, d0  # as in the forward
        x0, x1, x2 = x1 + 0.0, x2 + 0.0, x3
    to = sums_ptr + pid.to(tl.int64) * 5 * channels + c
    tl.store(to, s0, mask)
    tl.store(to + channels, s1, mask)
    tl.store(to + 2 * channels, s2, mask)
    tl.store(to + 3 * channels, s3, mask)
    tl.store(to + 4 * channels, s4, mask)


@triton.jit
def conv_step_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, y_ptr, x_b, x_c, state_b, state_c, state_n, channels,
    SILU: tl.constexpr, WIDTH: tl.constexpr, LENGTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One token x (B, channels) after the LENGTH tokens of a state, which loses its first and takes in x."""
    tiles = tl.cdiv(channels, CHANNELS)
    b = (tl.program_id(0) // tiles).to(tl.int64)
    c = tl.program_id(0) % tiles * CHANNELS + tl.arange(0, CHANNELS)
    mask = c < channels
    x = tl.load(x_ptr + b * x_b + c * x_c, mask, 0.0)
    acc = load_tap(weight_ptr, c, mask, 0, WIDTH) * x.to(tl.float32)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + c, mask, 0.0).to(tl.float32)
    state = state_ptr + b * state_b + c * state_c
    for j in tl.static_range(LENGTH):
        row = tl.load(state + j * state_n, mask, 0.0)
        if LENGTH - j < WIDTH:
            acc += load_tap(weight_ptr, c, mask, LENGTH - j, WIDTH) * row.to(tl.float32)
        if j > 0:
            tl.store(state + (j - 1) * state_n, row, mask)
    tl.store(state + (LENGTH - 1) * state_n, x.to(state_ptr.dtype.element_ty), mask)
    if SILU:
        acc *= tl.sigmoid(acc)
    tl.store(y_ptr + b * channels + c, acc.to(y_ptr.dtype.element_ty), mask)


# ------------------------------------------------------------------------------------------------ launches


def conv_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq: Tensor | None, before: Tensor | None, y: Tensor, silu: bool
) -> Launch:
    B, N, channels = x.shape
    grid = B * triton.cdiv(N, TOKENS) * triton.cdiv(channels, CHANNELS)
    sizes = (x.stride(0), x.stride(1), N, channels, silu, weight.shape[1], TOKENS, CHANNELS)
    return Launch(conv_kernel, grid, (x, weight, bias, seq, before, y), sizes, ONE_WARP)


def conv_backward_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq: Tensor | None, before: Tensor | None, dy: Tensor, dx: Tensor,
    sums: Tensor, silu: bool,
) -> Launch:  # fmt: skip
    B, N, channels = x.shape
    grid = B * triton.cdiv(N, BACK_TOKENS) * triton.cdiv(channels, BACK_CHANNELS)
    sizes = (*x.stride()[:2], *dy.stride()[:2], N, channels, silu, weight.shape[1], BACK_TOKENS, BACK_CHANNELS)
    return Launch(conv_backward_kernel, grid, (x, weight, bias, seq, before, dy, dx, sums), sizes, TWO_WARPS)


def conv_step_launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, y: Tensor, silu: bool
) -> Launch:  # fmt: skip
    B, channels = x.shape
    block = min(256, next_power_of_2(channels))
    sizes = (*x.stride(), *state.stride(), channels, silu, weight.shape[1], state.shape[2], block)
    return Launch(conv_step_kernel, B * triton.cdiv(channels, block), (x, weight, bias, state, y), sizes, TWO_WARPS)


def stepped(silu: bool, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> tuple[tuple[Tensor], Launch]:
    """y (B, channels) of one token x (B, channels), and its launch; it shifts state (B, channels, last tokens)."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return (y,), conv_step_launch(x, weight, bias, state, y, silu)


class Convolved(torch.autograd.Function):
    """x (B, N, channels), weight (channels, WIDTH), bias or None, seq (B, N) or None, before or None -> y, as x.

    before  (B, WIDTH - 1, channels), contiguous, no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, seq: Tensor | None, before: Tensor | None, silu: bool
    ) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        run(conv_launch, (x, weight, bias, seq, before, y), silu)
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias, seq, before)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias, seq, before = saved_rows(ctx)
        before = None if before is None else before.contiguous()
        (B, N, channels), dy = x.shape, dy if dy.stride(2) == 1 else dy.contiguous()
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sums = torch.empty(B * triton.cdiv(N, BACK_TOKENS), 5, channels, dtype=torch.float32, device=x.device)
        run(conv_backward_launch, (x, weight, bias, seq, before, dy, dx, sums), ctx.silu)
        total = sums.sum(0)
        dweight = total[: weight.shape[1]].flip(0).T.to(weight.dtype)
        return dx, dweight, None if bias is None else total[4].to(bias.dtype), None, None, None
