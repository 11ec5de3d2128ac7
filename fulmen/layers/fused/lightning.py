"""The lightning layer on a GPU between its products: one kernel before the attention, one after it.

Before. q, k and v lie in one projection's output: for each key-value head its queries, its key and its value.

    a = activation(x);  q, k = rope(norm(a)) or norm(rope(a));  v = a

A program takes HEADS heads of a token, of q, of k or of v. Without an activation v stays where it is. RoPE needs the
other element of each pair, which is loaded a second time, from the cache: so every tile has one layout, and nothing is
exchanged between threads but the sums of norms. In the backward a program writes its gradients into the gradient of the
projection, so that nothing is joined or copied after it. If v stays where it is, the attention's backward writes dv
there itself (`projection_gradient.py`). On Hopper, with silu alone, it writes all of that gradient: the activation has
no backward kernel.

After. The norm of each group of a token's features, times a gate:

    y = o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate)

A program takes all groups of a token. Both backwards compute the means anew: the rows are read anyway.

Traffic in u, the bytes of one (B, H, N, D) tensor, forward and backward, with as many heads of k and v as of q:

    activation          6 + 9, with silu alone on Hopper 6 + 3: x, which the attention's backward reads
    norm and gate       3 + 5        norm and RoPE of q and k     4 + 6

The gradient of a weight is summed in each program over its tokens, then over programs in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fulmen.boundary import once_differentiable
from fulmen.launch import Launch, sm_count, starting, starts_early
from fulmen.layers.fused import saved
from fulmen.layers.fused.projection_gradient import ProjectionGradient
from fulmen.layers.fused.rotary import next_power_of_2, per_row, run
from fulmen.layers.fused.sums import pipeline, programs_for, sum_launch

TILE = 2048  # elements of q, k or v that a program takes at a time
TOKENS, TOKENS_NORMED = 4, 8  # whose heads a program of the forward takes, one after the other
HEAD_PROGRAMS_PER_SM = 6  # each for q, k and v, of a backward that sums gradients of norms

ACTIVATIONS = {None: 0, "silu": 1, "relu": 2, "gelu": 3}
NORMS = {None: 0, "before": 1, "after": 2}  # RoPE


class Heads(NamedTuple):
    """How a projection's output (B, N, H_KV * (H / H_KV * D + D + E)) becomes q, k and v."""

    H: int
    H_KV: int
    D: int
    E: int
    activation: str | None
    norm: str | None
    eps: float
    interleaved: bool


def warps(elements: int, each: int) -> dict[str, int]:
    """For `each` elements a thread, of which a load of 16 bytes has 8 in bf16."""
    return {"num_warps": max(1, min(16, elements // (32 * each)))}


@triton.constexpr_function
def width_of(n):
    """The power of two that holds n elements, at least one."""
    return 1 << max(n - 1, 0).bit_length()


# ---------------------------------------------------------------------------------- before the attention


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        x = x * tl.sigmoid(x)
    elif ACTIVATION == 2:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)  # as torch's
    elif ACTIVATION == 3:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """The activation's derivative."""
    if ACTIVATION == 1:
        s = tl.sigmoid(x)
        d = s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == 2:
        d = tl.where(x <= 0.0, 0.0, 1.0)  # of NaN 1, as torch's
    else:
        d = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return d


@triton.jit
def turning(cos_ptr, sin_ptr, row, HALF: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """cos and sin [1, WIDTH], so that RoPE makes x cos + partner sin of an element; 1 and 0 where nothing turns."""
    i = tl.arange(0, WIDTH)[None, :]
    if INTERLEAVED:
        at, first = i // 2, i % 2 == 0
    else:
        at, first = tl.where(i < HALF, i, i - HALF), i < HALF
    at += row * HALF
    cos, sin = tl.load(cos_ptr + at, i < 2 * HALF, 1.0), tl.load(sin_ptr + at, i < 2 * HALF, 0.0)
    return cos, tl.where(first, -sin, sin)


@triton.jit
def load_row(rows, there, SIZE: tl.constexpr):
    """[HEADS, SIZE], in fp32."""
    i = tl.arange(0, width_of(SIZE))[None, :]
    return tl.load(rows + i, there & (i < SIZE), 0.0).to(tl.float32)


@triton.jit
def load_partners(rows, there, SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each element of `load_row` the other of its pair, 0 where nothing turns: the line is in the cache."""
    i = tl.arange(0, width_of(SIZE))[None, :]
    partner = i + 1 - 2 * (i % 2) if INTERLEAVED else tl.where(i < HALF, i + HALF, i - HALF)
    return tl.load(rows + partner, there & (i < 2 * HALF), 0.0).to(tl.float32)


@triton.jit
def load_weights(weight_ptr, SIZE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """A norm's weight and that of each element's partner, [1, SIZE]; numbers where there is none."""
    weight, partner, rows = 1.0, 1.0, weight_ptr + tl.zeros([1, 1], tl.int32)
    if NORM > 0:
        weight = load_row(rows, True, SIZE)
    if NORM > 0 and HALF > 0:
        partner = load_partners(rows, True, SIZE, HALF, INTERLEAVED)
    return weight, partner


@triton.jit
def walk(
    x_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, start, tokens, h, cos_b, N, eps,
    H: tl.constexpr, group: tl.constexpr, width: tl.constexpr, offset: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Heads h of TOKENS tokens; `group` of H heads lie together, `offset` behind the start of their `width`."""
    i = tl.arange(0, width_of(D))[None, :]
    weight, weight_other = load_weights(weight_ptr, D, HALF, NORM, INTERLEAVED)
    for number in range(start, tl.minimum(start + TOKENS, tokens)):
        token = tl.full([], number, tl.int64)
        rows = x_ptr + (token * (H // group) + h // group) * width + offset + (h % group) * D
        x = load_row(rows, h < H, D)
        if HALF > 0:
            other = load_partners(rows, h < H, D, HALF, INTERLEAVED)
            cos, sin = turning(cos_ptr, sin_ptr, (number // N) * cos_b + number % N, HALF, width_of(D), INTERLEAVED)
        x = activated(x, ACTIVATION)
        y = x
        if NORM == 1:
            y = x * weight
        if HALF > 0:
            other = activated(other, ACTIVATION)
            y = y * cos + (other * weight_other if NORM == 1 else other) * sin
        if NORM == 1:
            y *= tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        elif NORM == 2:
            y *= tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None] * weight
        tl.store(out_ptr + (token * H + h) * D + i, y.to(out_ptr.dtype.element_ty), (h < H) & (i < D))


@triton.jit
def heads_kernel(
    x_ptr, q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, cos_b, N, eps, tokens,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
    ACTIVATION: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """q (B, N, H, D), k (B, N, H_KV, D) and, with an activation, v (B, N, H_KV, E)."""
    q_blocks: tl.constexpr = (H + HEADS - 1) // HEADS
    k_blocks: tl.constexpr = (H_KV + HEADS - 1) // HEADS
    blocks: tl.constexpr = q_blocks + (2 * k_blocks if ACTIVATION > 0 else k_blocks)
    group: tl.constexpr = H // H_KV
    width: tl.constexpr = group * D + D + E
    start = tl.program_id(0) // blocks * TOKENS
    block = tl.program_id(0) % blocks
    i = tl.arange(0, HEADS)[:, None]
    if block < q_blocks:
        walk(
            x_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, start, tokens, block * HEADS + i, cos_b, N, eps,
            H, group, width, 0, D, HALF, ACTIVATION, NORM, INTERLEAVED, TOKENS,
        )  # fmt: skip
    elif block < q_blocks + k_blocks:
        walk(
            x_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, start, tokens, (block - q_blocks) * HEADS + i, cos_b, N, eps,
            H_KV, 1, width, group * D, D, HALF, ACTIVATION, NORM, INTERLEAVED, TOKENS,
        )  # fmt: skip
    else:
        walk(
            x_ptr, v_ptr, k_weight_ptr, cos_ptr, sin_ptr, start, tokens, (block - q_blocks - k_blocks) * HEADS + i,
            cos_b, N, eps, H_KV, 1, width, group * D + D, E, 0, ACTIVATION, 0, False, TOKENS,
        )  # fmt: skip


@triton.jit
def heads_tile_backward(
    total, x_rows, dy_rows, dx_rows, weight, weight_other, cos, sin, there, eps,
    SIZE: tl.constexpr, HALF: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Writes dx of these heads; the total, with their part of the weight's gradient."""
    i = tl.arange(0, width_of(SIZE))[None, :]
    d, d_other, other = load_row(dy_rows, there, SIZE), 0.0, 0.0
    if NORM > 0 or ACTIVATION > 0:
        x = load_row(x_rows, there, SIZE)
    if HALF > 0:
        d_other = load_partners(dy_rows, there, SIZE, HALF, INTERLEAVED)
    if NORM == 2 and HALF > 0:
        other = activated(load_partners(x_rows, there, SIZE, HALF, INTERLEAVED), ACTIVATION)
        d_other *= weight_other
    if NORM < 2 and HALF > 0:  # back through RoPE
        d = d * cos - d_other * sin
    if NORM > 0:
        y = activated(x, ACTIVATION)
        if NORM == 2 and HALF > 0:
            y, other = y * cos + other * sin, other * cos - y * sin
        rstd = tl.rsqrt(tl.sum(y * y, axis=1) / SIZE + eps)[:, None]
        unit = y * rstd
        total += d * unit
        d *= weight
        along = (tl.sum(d * unit, axis=1) / SIZE)[:, None]
        d = rstd * (d - unit * along)
        if NORM == 2 and HALF > 0:
            d = d * cos - rstd * (d_other - other * rstd * along) * sin
    if ACTIVATION > 0:
        d *= slope(x, ACTIVATION)
    tl.store(dx_rows + i, d.to(dx_rows.dtype.element_ty), there & (i < SIZE))
    return total


@triton.jit
def walk_backward(
    x_ptr, dy_ptr, dx_ptr, weight_ptr, cos_ptr, sin_ptr, sums_ptr, start, tokens, cos_b, N, eps,
    H: tl.constexpr, group: tl.constexpr, width: tl.constexpr, offset: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Of every PROGRAMS-th token H heads, `group` of which lie together, `offset` behind the start of their `width`."""
    total = tl.zeros([HEADS, width_of(D)], tl.float32)
    weight, weight_other = load_weights(weight_ptr, D, HALF, NORM, INTERLEAVED)
    for number in range(start, tokens, PROGRAMS):
        cos, sin = turning(cos_ptr, sin_ptr, (number // N) * cos_b + number % N, HALF, width_of(D), INTERLEAVED)
        token = tl.full([], number, tl.int64)
        for first in range(0, H, HEADS):
            h = first + tl.arange(0, HEADS)[:, None]
            at = (token * (H // group) + h // group) * width + offset + (h % group) * D
            total = heads_tile_backward(
                total, x_ptr + at, dy_ptr + (token * H + h) * D, dx_ptr + at, weight, weight_other, cos, sin,
                h < H, eps, D, HALF, ACTIVATION, NORM, INTERLEAVED,
            )  # fmt: skip
    if NORM > 0:
        i = tl.arange(0, width_of(D))
        tl.store(sums_ptr + i, tl.sum(total, axis=0), i < D)


@triton.jit
def heads_backward_kernel(
    x_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, sums_ptr,
    cos_b, N, eps, tokens,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
    ACTIVATION: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    PROGRAMS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A program takes q, k or v of every PROGRAMS-th token; sums (PROGRAMS, 2 D): its part of the norms' gradients.

    PARTS  2: dv is in its place
    """
    part = tl.program_id(0) % PARTS  # of q, k or v
    start = tl.program_id(0) // PARTS
    group: tl.constexpr = H // H_KV
    width: tl.constexpr = group * D + D + E
    if part == 0:
        walk_backward(
            x_ptr, dq_ptr, dx_ptr, q_weight_ptr, cos_ptr, sin_ptr, sums_ptr + start * 2 * D, start, tokens, cos_b, N,
            eps, H, group, width, 0, D, HALF, ACTIVATION, NORM, INTERLEAVED, HEADS, PROGRAMS,
        )  # fmt: skip
    elif part == 1:
        walk_backward(
            x_ptr, dk_ptr, dx_ptr, k_weight_ptr, cos_ptr, sin_ptr, sums_ptr + start * 2 * D + D, start, tokens, cos_b,
            N, eps, H_KV, 1, width, group * D, D, HALF, ACTIVATION, NORM, INTERLEAVED, HEADS, PROGRAMS,
        )  # fmt: skip
    elif PARTS == 3:
        e = tl.arange(0, width_of(E))[None, :]
        for number in range(start, tokens, PROGRAMS):
            token = tl.full([], number, tl.int64)
            for first in range(0, H_KV, HEADS):
                h = first + tl.arange(0, HEADS)[:, None]
                at = (token * H_KV + h) * width + group * D + D + e
                there = (h < H_KV) & (e < E)
                dv = tl.load(dv_ptr + (token * H_KV + h) * E + e, there, 0.0)
                if ACTIVATION > 0:
                    dv = dv.to(tl.float32) * slope(tl.load(x_ptr + at, there, 0.0).to(tl.float32), ACTIVATION)
                tl.store(dx_ptr + at, dv.to(dx_ptr.dtype.element_ty), there)


def at_a_time(facts: Heads) -> int:
    """Heads of a tile."""
    return min(next_power_of_2(facts.H), max(1, TILE // next_power_of_2(max(facts.D, facts.E))))


def heads_warps(facts: Heads) -> dict[str, int]:
    """More elements a thread where a weight, cos and sin serve all of a program's heads."""
    elements = at_a_time(facts) * next_power_of_2(max(facts.D, facts.E))
    if facts.norm is None:
        return warps(elements, 8)
    # given no number of registers, the assembler spills to fit more programs
    each, registers = (16, 240) if facts.interleaved else (32, 168)
    return warps(elements, each) | {"maxnreg": registers}


def constants(facts: Heads, cos: Tensor) -> tuple[Any, ...]:
    half = cos.shape[-1]
    modes = (ACTIVATIONS[facts.activation], NORMS[facts.norm], facts.interleaved and half > 0)
    return (*facts[:4], half, *modes, at_a_time(facts))


def heads_launch(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    facts: Heads,
) -> Launch:  # fmt: skip
    """Weights are not looked at without a norm, nor v without an activation; cos (..., 0) says that nothing turns."""
    B, N, _ = x.shape
    heads = at_a_time(facts)
    blocks = triton.cdiv(facts.H, heads) + triton.cdiv(facts.H_KV, heads) * (2 if facts.activation else 1)
    sizes = (per_row(cos), N, facts.eps, B * N)
    tensors, options = (x, q, k, v, q_weight, k_weight, cos, sin), heads_warps(facts)
    count = TOKENS if facts.norm is None else TOKENS_NORMED
    grid = triton.cdiv(B * N, count) * blocks
    return Launch(heads_kernel, grid, tensors, (*sizes, *constants(facts, cos), count), options)


def heads_backward_launch(
    x: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dx: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, sums: Tensor, facts: Heads,
) -> Launch:  # fmt: skip
    """sums (programs, 2 D) if there is a norm, else not looked at. dv may be a part of dx."""
    B, N, _ = x.shape
    programs = sums.shape[0] if facts.norm else B * N
    parts = 3 if dv.is_contiguous() else 2
    sizes = (per_row(cos), N, facts.eps, B * N)
    tensors = (x, dq, dk, dv, dx, q_weight, k_weight, cos, sin, sums)
    rest = (*sizes, *constants(facts, cos), programs, parts)
    return Launch(heads_backward_kernel, parts * programs, tensors, rest, heads_warps(facts))


class Prepared(torch.autograd.Function):
    """facts, x (B, N, width), q_weight, k_weight (D,) or None, cos, sin or None -> q, k, v (B, N, heads, size).

    Saves x and what it shares with others. Without an activation v is a view of x, and its gradient may already lie in
    the projection's; with silu alone all three may.
    """

    @staticmethod
    def forward(
        ctx: Any, facts: Heads, x: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None,
        sin: Tensor | None, projection: ProjectionGradient | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        (B, N, _), (H, H_KV, D, E) = x.shape, facts[:4]
        q = torch.empty(B, N, H, D, dtype=x.dtype, device=x.device)
        k = torch.empty(B, N, H_KV, D, dtype=x.dtype, device=x.device)
        if facts.activation is None:
            v = x.view(B, N, H_KV, -1)[..., -E:]
        else:
            v = torch.empty(B, N, H_KV, E, dtype=x.dtype, device=x.device)
        run(heads_launch, (x, q, k, v, *_stand_ins(x, q_weight, k_weight, cos, sin)), facts)
        ctx.facts, ctx.projection = facts, projection
        ctx.save_for_backward(x, q_weight, k_weight, cos, sin)
        ctx.set_materialize_grads(False)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        facts, dx = ctx.facts, None if ctx.projection is None else ctx.projection.take(*grads)
        if dx is not None and facts.activation is not None:
            return None, dx, None, None, None, None, None
        x, q_weight, k_weight, cos, sin = saved(ctx)
        (B, N, _), (H, H_KV, D, E) = x.shape, facts[:4]
        shapes = (B, N, H, D), (B, N, H_KV, D), (B, N, H_KV, E)
        dq, dk, dv = (x.new_zeros(shape) if d is None else d for d, shape in zip(grads, shapes, strict=True))
        dq, dk = dq.contiguous(), dk.contiguous()
        if dx is None:
            dv, dx = dv.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        weight, k_weight, cos, sin = _stand_ins(x, q_weight, k_weight, cos, sin)
        if facts.norm is None:
            run(heads_backward_launch, (x, dq, dk, dv, dx, weight, k_weight, cos, sin, x), facts)
            return None, dx, None, None, None, None, None
        sums = torch.empty(
            min(HEAD_PROGRAMS_PER_SM * sm_count(x.device), B * N), 2 * D, dtype=torch.float32, device=x.device
        )
        run(heads_backward_launch, (x, dq, dk, dv, dx, weight, k_weight, cos, sin, sums), facts)
        dweights = torch.empty_like(weight), torch.empty_like(k_weight)
        if any(ctx.needs_input_grad[2:4]):
            run(sum_launch, (sums, *dweights))
        return None, dx, *dweights, None, None, None


def _stand_ins(
    x: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a kernel takes for tensors that it does not look at."""
    weights = (x, x) if q_weight is None or k_weight is None else (q_weight, k_weight)
    nothing = x.reshape(-1)[:0]
    return *weights, *((nothing, nothing) if cos is None or sin is None else (cos, sin))


# ----------------------------------------------------------------------------------- after the attention


@triton.jit
def gate_kernel(
    o_ptr, gate_ptr, weight_ptr, y_ptr, eps,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token: GROUPS groups of SIZE features. EARLY: it and the kernel that follows may start, as in `linear.py`."""
    g = tl.arange(0, width_of(GROUPS))[:, None]
    i = tl.arange(0, width_of(SIZE))[None, :]
    there, at = (g < GROUPS) & (i < SIZE), g * SIZE + i
    row = tl.program_id(0).to(tl.int64) * GROUPS * SIZE
    if EARLY:
        gdc_launch_dependents()
    if NORM:
        weight = tl.load(weight_ptr + at, there, 0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    y = tl.load(o_ptr + row + at, there, 0.0).to(tl.float32)
    if GATE:  # before the sum, whose barrier would hold it back
        opened = tl.load(gate_ptr + row + at, there, 0.0).to(tl.float32)
    if NORM:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) / SIZE + eps)[:, None] * weight
    if GATE:
        y *= tl.sigmoid(opened)
    tl.store(y_ptr + row + at, y.to(y_ptr.dtype.element_ty), there)


@triton.jit
def gate_backward_kernel(
    o_ptr, gate_ptr, weight_ptr, dy_ptr, do_ptr, dgate_ptr, sums_ptr, eps, tokens,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes every PROGRAMS-th token; sums (PROGRAMS, GROUPS * SIZE) are its parts of the weight's gradient.

    With unit = o / sqrt(mean(o^2) + eps) and d = dy sigmoid(gate) weight:  do = (d - unit mean(d unit)) / sqrt(...)
    """
    g = tl.arange(0, width_of(GROUPS))[:, None]
    i = tl.arange(0, width_of(SIZE))[None, :]
    there, at = (g < GROUPS) & (i < SIZE), g * SIZE + i
    total = tl.zeros([width_of(GROUPS), width_of(SIZE)], tl.float32)
    for token in tl.range(tl.program_id(0), tokens, PROGRAMS, num_stages=STAGES):
        row = tl.full([], token, tl.int64) * GROUPS * SIZE
        d = tl.load(dy_ptr + row + at, there, 0.0).to(tl.float32)
        unit = tl.load(o_ptr + row + at, there, 0.0).to(tl.float32)
        weight = 1.0
        if GATE:  # every load comes before the first sum, whose barrier would hold it back
            opened = tl.sigmoid(tl.load(gate_ptr + row + at, there, 0.0).to(tl.float32))
        if NORM:
            weight = tl.load(weight_ptr + at, there, 0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(unit * unit, axis=1) / SIZE + eps)[:, None]
            unit *= rstd
        if GATE:
            dgate = d * unit * weight * opened * (1.0 - opened)
            tl.store(dgate_ptr + row + at, dgate.to(dgate_ptr.dtype.element_ty), there)
            d *= opened
        if NORM:
            total += d * unit
            d *= weight
            d = rstd * (d - unit * (tl.sum(d * unit, axis=1) / SIZE)[:, None])
        tl.store(do_ptr + row + at, d.to(do_ptr.dtype.element_ty), there)
    if NORM:
        tl.store(sums_ptr + tl.program_id(0) * GROUPS * SIZE + at, total, there)


def gate_launch(
    o: Tensor, gate: Tensor, weight: Tensor, y: Tensor, groups: int, eps: float | None, gated: bool, early: bool = False
) -> Launch:
    """eps None: no norm, and weight is not looked at; nor is gate unless `gated`."""
    B, N, width = o.shape
    rest = (eps or 0.0, groups, width // groups, eps is not None, gated, early)
    options = warps(next_power_of_2(groups) * next_power_of_2(width // groups), 8) | starting(early)
    return Launch(gate_kernel, B * N, (o, gate, weight, y), rest, options)


def gate_backward_launch(
    o: Tensor, gate: Tensor, weight: Tensor, dy: Tensor, do: Tensor, dgate: Tensor, sums: Tensor,
    groups: int, eps: float | None, gated: bool,
) -> Launch:  # fmt: skip
    B, N, width = o.shape
    programs = B * N if eps is None else sums.shape[0]
    row = next_power_of_2(groups) * next_power_of_2(width // groups)
    stages, options = pipeline(row, *((row, t) for t in (dy, o, gate, weight)))
    if eps is None:  # a program takes one token
        stages = 1
    rest = (eps or 0.0, B * N, groups, width // groups, eps is not None, gated, programs, stages)
    return Launch(gate_backward_kernel, programs, (o, gate, weight, dy, do, dgate, sums), rest, options)


def gated(
    options: tuple[int, float], o: Tensor, gate: Tensor | None, weight: Tensor | None
) -> tuple[tuple[Tensor], Launch]:
    """As `Gated`, for `fused_call`; options are groups and eps."""
    groups, eps = options
    y = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    given = (o, o if gate is None else gate, o if weight is None else weight, y)
    early = starts_early(o.device)
    return (y,), gate_launch(*given, groups, None if weight is None else eps, gate is not None, early)


class Gated(torch.autograd.Function):
    """groups, eps, o (B, N, width), gate or None, weight (width,) or None -> y (B, N, width). Saves o and the gate."""

    @staticmethod
    def forward(
        ctx: Any, groups: int, eps: float | None, o: Tensor, gate: Tensor | None, weight: Tensor | None
    ) -> Tensor:
        options = groups, None if weight is None else eps, gate is not None
        y = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        run(gate_launch, (o, o if gate is None else gate, o if weight is None else weight, y), *options)
        ctx.options = options
        ctx.save_for_backward(o, gate, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        o, gate, weight = saved(ctx)
        dy, do = dy.contiguous(), torch.empty(o.shape, dtype=o.dtype, device=o.device)
        dgate = None if gate is None else torch.empty(o.shape, dtype=o.dtype, device=o.device)
        sums, dweight = o, None
        if weight is not None:
            programs = programs_for(o.shape[2], 1, o.shape[0] * o.shape[1], o.device)
            sums = torch.empty(programs, o.shape[2], dtype=torch.float32, device=o.device)
        given = (o, o if gate is None else gate, o if weight is None else weight)
        run(gate_backward_launch, (*given, dy, do, do if dgate is None else dgate, sums), *ctx.options)
        if weight is not None and ctx.needs_input_grad[4]:
            dweight = torch.empty_like(weight)
            run(sum_launch, (sums, dweight, dweight))
        return None, None, do, dgate, dweight
