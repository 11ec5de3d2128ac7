"""The lightning layer on a GPU between its products: one kernel before the attention, one after it.

Before. q, k and v lie in one projection's output: for each key-value head its queries, its key and its value.

    a = activation(x);  q, k = rope(norm(a)) or norm(rope(a));  v = a

A program takes HEADS heads of a token, of q, of k or of v. Without an activation v stays where it is. In the backward
it writes their gradients into the gradient of the projection, so that nothing is joined or copied after it.

After. The norm of each group of a token's features, times a gate:

    y = o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate)

A program takes all groups of a token. Both backwards compute the means anew: the rows are read anyway.

Traffic in u, the bytes of one (B, H, N, D) tensor, forward and backward, with as many heads of k and v as of q:

    activation          6 + 9        norm and RoPE of q and k     4 + 8 (2 to bring dv to its place)
    norm and gate       3 + 5

The gradient of a weight is summed in each program over its tokens, then over programs in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fulmen.launch import Launch, starting, starts_early
from fulmen.layers.fused.rotary import angles, p2, per_row, run
from fulmen.layers.fused.sums import sum_launch

TILE = 2048  # elements of q, k or v that a program takes at a time
HEAD_PROGRAMS = 1056  # each for q, k and v, of a backward that sums up gradients of norms: 8 on each SM of an H200
GATE_PROGRAMS = 528

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


def warps(elements: int) -> dict[str, int]:
    """For 16 elements a thread: two loads of 16 bytes in bf16."""
    return {"num_warps": max(1, min(16, elements // 512))}


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
        x = tl.maximum(x, 0.0)
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
        d = tl.where(x > 0.0, 1.0, 0.0)
    else:
        d = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return d


@triton.jit
def load_parts(
    rows, there, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Of rows [HEADS, 1]: both elements of each pair that RoPE turns, [HEADS, HALF], and the others, [HEADS, REST]."""
    HALF_P2: tl.constexpr = width_of(HALF)
    REST_P2: tl.constexpr = width_of(REST)
    i = tl.arange(0, HALF_P2)[None, :]
    j = tl.arange(0, REST_P2)[None, :]
    if INTERLEAVED:
        n = tl.arange(0, 2 * HALF_P2)[None, :]
        both = tl.load(rows + n, there & (n < 2 * HALF), 0.0).to(tl.float32)
        a, b = tl.split(both.reshape(HEADS, HALF_P2, 2))
    else:
        a = tl.load(rows + i, there & (i < HALF), 0.0).to(tl.float32)
        b = tl.load(rows + HALF + i, there & (i < HALF), 0.0).to(tl.float32)
    rest = tl.load(rows + 2 * HALF + j, there & (j < REST), 0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def store_parts(
    rows, there, a, b, rest, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr
):
    """As `load_parts`."""
    HALF_P2: tl.constexpr = width_of(HALF)
    REST_P2: tl.constexpr = width_of(REST)
    kind = rows.dtype.element_ty
    i = tl.arange(0, HALF_P2)[None, :]
    j = tl.arange(0, REST_P2)[None, :]
    if INTERLEAVED:
        n = tl.arange(0, 2 * HALF_P2)[None, :]
        both = tl.join(a, b).reshape(HEADS, 2 * HALF_P2)
        tl.store(rows + n, both.to(kind), there & (n < 2 * HALF))
    else:
        tl.store(rows + i, a.to(kind), there & (i < HALF))
        tl.store(rows + HALF + i, b.to(kind), there & (i < HALF))
    tl.store(rows + 2 * HALF + j, rest.to(kind), there & (j < REST))


@triton.jit
def turned_pair(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rstd_of(a, b, rest, eps, SIZE: tl.constexpr):
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(rest * rest, axis=1)
    return tl.rsqrt(squares / SIZE + eps)[:, None]


@triton.jit
def heads_tile(
    x_rows, out_rows, weight_ptr, cos, sin, there, eps,
    HALF: tl.constexpr, REST: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    a, b, rest = load_parts(x_rows, there, HALF, REST, INTERLEAVED, HEADS)
    a, b, rest = activated(a, ACTIVATION), activated(b, ACTIVATION), activated(rest, ACTIVATION)
    if NORM == 2:
        a, b = turned_pair(a, b, cos, sin)
    if NORM > 0:
        rstd = rstd_of(a, b, rest, eps, 2 * HALF + REST)
        w_a, w_b, w_rest = load_parts(weight_ptr + tl.zeros([1, 1], tl.int32), True, HALF, REST, INTERLEAVED, 1)
        a, b, rest = a * rstd * w_a, b * rstd * w_b, rest * rstd * w_rest
    if NORM != 2:
        a, b = turned_pair(a, b, cos, sin)
    store_parts(out_rows, there, a, b, rest, HALF, REST, INTERLEAVED, HEADS)


@triton.jit
def heads_kernel(
    x_ptr, q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, cos_b, N, H, H_KV, eps,
    D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """q (B, N, H, D), k (B, N, H_KV, D) and, with an activation, v (B, N, H_KV, E)."""
    q_blocks, k_blocks = tl.cdiv(H, HEADS), tl.cdiv(H_KV, HEADS)
    v_blocks = k_blocks if ACTIVATION > 0 else 0
    blocks = q_blocks + k_blocks + v_blocks
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    group = H // H_KV
    width = group * D + D + E
    i = tl.arange(0, HEADS)
    cos, sin = angles(cos_ptr, sin_ptr, (token // N) * cos_b + token % N, 1.0, HALF, width_of(HALF))
    x_ptr += token * H_KV * width
    if block < q_blocks:
        h = (block * HEADS + i)[:, None]
        rows = x_ptr + (h // group) * width + (h % group) * D
        heads_tile(
            rows, q_ptr + (token * H + h) * D, q_weight_ptr, cos[None, :], sin[None, :], h < H, eps,
            HALF, D - 2 * HALF, ACTIVATION, NORM, INTERLEAVED, HEADS,
        )  # fmt: skip
    elif block < q_blocks + k_blocks:
        h = ((block - q_blocks) * HEADS + i)[:, None]
        heads_tile(
            x_ptr + h * width + group * D, k_ptr + (token * H_KV + h) * D, k_weight_ptr, cos[None, :], sin[None, :],
            h < H_KV, eps, HALF, D - 2 * HALF, ACTIVATION, NORM, INTERLEAVED, HEADS,
        )  # fmt: skip
    else:
        h = ((block - q_blocks - k_blocks) * HEADS + i)[:, None]
        e = tl.arange(0, width_of(E))[None, :]
        there = (h < H_KV) & (e < E)
        x = tl.load(x_ptr + h * width + group * D + D + e, there, 0.0).to(tl.float32)
        tl.store(v_ptr + (token * H_KV + h) * E + e, activated(x, ACTIVATION).to(v_ptr.dtype.element_ty), there)


@triton.jit
def heads_tile_backward(
    sum_a, sum_b, sum_rest, x_rows, dy_rows, dx_rows, weight_ptr, cos, sin, there, eps,
    HALF: tl.constexpr, REST: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Writes dx of these heads; the sums, to which each adds its part of the weight's gradient."""
    da, db, drest = load_parts(dy_rows, there, HALF, REST, INTERLEAVED, HEADS)
    if NORM != 2:
        da, db = turned_pair(da, db, cos, -sin)
    if NORM > 0 or ACTIVATION > 0:
        x_a, x_b, x_rest = load_parts(x_rows, there, HALF, REST, INTERLEAVED, HEADS)
    if NORM > 0:
        a, b, rest = activated(x_a, ACTIVATION), activated(x_b, ACTIVATION), activated(x_rest, ACTIVATION)
        if NORM == 2:
            a, b = turned_pair(a, b, cos, sin)
        rstd = rstd_of(a, b, rest, eps, 2 * HALF + REST)
        a, b, rest = a * rstd, b * rstd, rest * rstd
        sum_a, sum_b, sum_rest = sum_a + da * a, sum_b + db * b, sum_rest + drest * rest
        w_a, w_b, w_rest = load_parts(weight_ptr + tl.zeros([1, 1], tl.int32), True, HALF, REST, INTERLEAVED, 1)
        da, db, drest = da * w_a, db * w_b, drest * w_rest
        along = tl.sum(da * a, axis=1) + tl.sum(db * b, axis=1) + tl.sum(drest * rest, axis=1)
        along = (along / (2 * HALF + REST))[:, None]
        da, db, drest = rstd * (da - a * along), rstd * (db - b * along), rstd * (drest - rest * along)
    if NORM == 2:
        da, db = turned_pair(da, db, cos, -sin)
    if ACTIVATION > 0:
        da, db, drest = da * slope(x_a, ACTIVATION), db * slope(x_b, ACTIVATION), drest * slope(x_rest, ACTIVATION)
    store_parts(dx_rows, there, da, db, drest, HALF, REST, INTERLEAVED, HEADS)
    return sum_a, sum_b, sum_rest


@triton.jit
def walk_backward(
    x_ptr, dy_ptr, dx_ptr, weight_ptr, cos_ptr, sin_ptr, sums_ptr, start, tokens, cos_b, N, H, group, width, offset,
    eps, D: tl.constexpr, HALF: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Of every PROGRAMS-th token H heads, `group` of which lie together, `offset` behind the start of their `width`."""
    HALF_P2: tl.constexpr = width_of(HALF)
    REST: tl.constexpr = D - 2 * HALF
    sum_a, sum_b = tl.zeros([HEADS, HALF_P2], tl.float32), tl.zeros([HEADS, HALF_P2], tl.float32)
    sum_rest = tl.zeros([HEADS, width_of(REST)], tl.float32)
    for number in range(start, tokens, PROGRAMS):
        token = tl.full([], number, tl.int64)
        cos, sin = angles(cos_ptr, sin_ptr, (token // N) * cos_b + token % N, 1.0, HALF, HALF_P2)
        for first in range(0, H, HEADS):
            h = first + tl.arange(0, HEADS)[:, None]
            at = (token * (H // group) + h // group) * width + offset + (h % group) * D
            sum_a, sum_b, sum_rest = heads_tile_backward(
                sum_a, sum_b, sum_rest, x_ptr + at, dy_ptr + (token * H + h) * D, dx_ptr + at, weight_ptr,
                cos[None, :], sin[None, :], h < H, eps, HALF, REST, ACTIVATION, NORM, INTERLEAVED, HEADS,
            )  # fmt: skip
    if NORM > 0:
        rows = sums_ptr + tl.zeros([1, 1], tl.int32)
        sum_a, sum_b = tl.sum(sum_a, axis=0)[None, :], tl.sum(sum_b, axis=0)[None, :]
        store_parts(rows, True, sum_a, sum_b, tl.sum(sum_rest, axis=0)[None, :], HALF, REST, INTERLEAVED, 1)


@triton.jit
def heads_backward_kernel(
    x_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, sums_ptr,
    cos_b, N, H, H_KV, eps, tokens,
    D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A program takes q, k or v of every PROGRAMS-th token; sums (PROGRAMS, 2 D): its part of the norms' gradients."""
    part = tl.program_id(0) % 3  # of q, k or v
    start = tl.program_id(0) // 3
    group = H // H_KV
    width = group * D + D + E
    if part == 0:
        walk_backward(
            x_ptr, dq_ptr, dx_ptr, q_weight_ptr, cos_ptr, sin_ptr, sums_ptr + start * 2 * D, start, tokens, cos_b, N,
            H, group, width, 0, eps, D, HALF, ACTIVATION, NORM, INTERLEAVED, HEADS, PROGRAMS,
        )  # fmt: skip
    elif part == 1:
        walk_backward(
            x_ptr, dk_ptr, dx_ptr, k_weight_ptr, cos_ptr, sin_ptr, sums_ptr + start * 2 * D + D, start, tokens, cos_b,
            N, H_KV, 1, width, group * D, eps, D, HALF, ACTIVATION, NORM, INTERLEAVED, HEADS, PROGRAMS,
        )  # fmt: skip
    else:
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
    return min(p2(facts.H), max(1, TILE // p2(max(facts.D, facts.E))))


def constants(facts: Heads, cos: Tensor) -> tuple[Any, ...]:
    half = cos.shape[-1]
    modes = (ACTIVATIONS[facts.activation], NORMS[facts.norm], facts.interleaved and half > 0)
    return (facts.D, facts.E, half, *modes, at_a_time(facts))


def heads_launch(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    facts: Heads,
) -> Launch:  # fmt: skip
    """Weights are not looked at without a norm, nor v without an activation; cos (..., 0) says that nothing turns."""
    B, N, _ = x.shape
    heads = at_a_time(facts)
    blocks = triton.cdiv(facts.H, heads) + triton.cdiv(facts.H_KV, heads) * (2 if facts.activation else 1)
    sizes = (per_row(cos), N, facts.H, facts.H_KV, facts.eps)
    tensors, options = (x, q, k, v, q_weight, k_weight, cos, sin), warps(heads * p2(max(facts.D, facts.E)))
    return Launch(heads_kernel, B * N * blocks, tensors, (*sizes, *constants(facts, cos)), options)


def heads_backward_launch(
    x: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dx: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor,
    sin: Tensor, sums: Tensor, facts: Heads,
) -> Launch:  # fmt: skip
    """sums (programs, 2 D) if there is a norm, else not looked at."""
    B, N, _ = x.shape
    programs = sums.shape[0] if facts.norm else B * N
    sizes = (per_row(cos), N, facts.H, facts.H_KV, facts.eps, B * N)
    tensors = (x, dq, dk, dv, dx, q_weight, k_weight, cos, sin, sums)
    options = warps(at_a_time(facts) * p2(max(facts.D, facts.E)))
    return Launch(heads_backward_kernel, 3 * programs, tensors, (*sizes, *constants(facts, cos), programs), options)


class Prepared(torch.autograd.Function):
    """facts, x (B, N, width), q_weight, k_weight (D,) or None, cos, sin or None -> q, k, v (B, N, heads, size).

    Saves x and what it shares with others. Without an activation v is a view of x.
    """

    @staticmethod
    def forward(
        ctx: Any, facts: Heads, x: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor | None,
        sin: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        (B, N, _), (H, H_KV, D, E) = x.shape, facts[:4]
        q = torch.empty(B, N, H, D, dtype=x.dtype, device=x.device)
        k = torch.empty(B, N, H_KV, D, dtype=x.dtype, device=x.device)
        if facts.activation is None:
            v = x.view(B, N, H_KV, -1)[..., -E:]
        else:
            v = torch.empty(B, N, H_KV, E, dtype=x.dtype, device=x.device)
        run(heads_launch, (x, q, k, v, *_stand_ins(x, q_weight, k_weight, cos, sin)), facts)
        ctx.facts = facts
        ctx.save_for_backward(x, q_weight, k_weight, cos, sin)
        ctx.set_materialize_grads(False)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, q_weight, k_weight, cos, sin = ctx.saved_tensors
        (B, N, _), (H, H_KV, D, E), facts = x.shape, ctx.facts[:4], ctx.facts
        shapes = (B, N, H, D), (B, N, H_KV, D), (B, N, H_KV, E)
        dq, dk, dv = (
            x.new_zeros(shape) if d is None else d.contiguous() for d, shape in zip(grads, shapes, strict=True)
        )
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        weight, k_weight, cos, sin = _stand_ins(x, q_weight, k_weight, cos, sin)
        if facts.norm is None:
            run(heads_backward_launch, (x, dq, dk, dv, dx, weight, k_weight, cos, sin, x), facts)
            return None, dx, None, None, None, None
        sums = torch.empty(min(HEAD_PROGRAMS, B * N), 2 * D, dtype=torch.float32, device=x.device)
        run(heads_backward_launch, (x, dq, dk, dv, dx, weight, k_weight, cos, sin, sums), facts)
        dweights = torch.empty_like(weight), torch.empty_like(k_weight)
        if any(ctx.needs_input_grad[2:4]):
            run(sum_launch, (sums, *dweights))
        return None, dx, *dweights, None, None


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
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    g = tl.arange(0, width_of(GROUPS))[:, None]
    i = tl.arange(0, width_of(SIZE))[None, :]
    there, at = (g < GROUPS) & (i < SIZE), g * SIZE + i
    row = tl.program_id(0).to(tl.int64) * GROUPS * SIZE
    y = tl.load(o_ptr + row + at, there, 0.0).to(tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + at, there, 0.0).to(tl.float32)
        y *= tl.rsqrt(tl.sum(y * y, axis=1) / SIZE + eps)[:, None] * weight
    if GATE:
        y *= tl.sigmoid(tl.load(gate_ptr + row + at, there, 0.0).to(tl.float32))
    tl.store(y_ptr + row + at, y.to(y_ptr.dtype.element_ty), there)


@triton.jit
def gate_backward_kernel(
    o_ptr, gate_ptr, weight_ptr, dy_ptr, do_ptr, dgate_ptr, sums_ptr, eps, tokens,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A program takes every PROGRAMS-th token; sums (PROGRAMS, GROUPS * SIZE) are its parts of the weight's gradient.

    With unit = o / sqrt(mean(o^2) + eps) and d = dy sigmoid(gate) weight:  do = (d - unit mean(d unit)) / sqrt(...)
    """
    g = tl.arange(0, width_of(GROUPS))[:, None]
    i = tl.arange(0, width_of(SIZE))[None, :]
    there, at = (g < GROUPS) & (i < SIZE), g * SIZE + i
    total = tl.zeros([width_of(GROUPS), width_of(SIZE)], tl.float32)
    for token in range(tl.program_id(0), tokens, PROGRAMS):
        row = tl.full([], token, tl.int64) * GROUPS * SIZE
        d = tl.load(dy_ptr + row + at, there, 0.0).to(tl.float32)
        unit = tl.load(o_ptr + row + at, there, 0.0).to(tl.float32)
        weight = 1.0
        if NORM:
            rstd = tl.rsqrt(tl.sum(unit * unit, axis=1) / SIZE + eps)[:, None]
            unit *= rstd
            weight = tl.load(weight_ptr + at, there, 0.0).to(tl.float32)
        if GATE:
            opened = tl.sigmoid(tl.load(gate_ptr + row + at, there, 0.0).to(tl.float32))
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
    options = warps(p2(groups) * p2(width // groups)) | starting(early)
    return Launch(gate_kernel, B * N, (o, gate, weight, y), rest, options)


def gate_backward_launch(
    o: Tensor, gate: Tensor, weight: Tensor, dy: Tensor, do: Tensor, dgate: Tensor, sums: Tensor,
    groups: int, eps: float | None, gated: bool,
) -> Launch:  # fmt: skip
    B, N, width = o.shape
    programs = B * N if eps is None else sums.shape[0]
    rest = (eps or 0.0, B * N, groups, width // groups, eps is not None, gated, programs)
    tensors, options = (o, gate, weight, dy, do, dgate, sums), warps(p2(groups) * p2(width // groups))
    return Launch(gate_backward_kernel, programs, tensors, rest, options)


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
        o, gate, weight = ctx.saved_tensors
        dy, do = dy.contiguous(), torch.empty(o.shape, dtype=o.dtype, device=o.device)
        dgate = None if gate is None else torch.empty(o.shape, dtype=o.dtype, device=o.device)
        sums, dweight = o, None
        if weight is not None:
            programs = min(GATE_PROGRAMS, o.shape[0] * o.shape[1])
            sums = torch.empty(programs, o.shape[2], dtype=torch.float32, device=o.device)
        given = (o, o if gate is None else gate, o if weight is None else weight)
        run(gate_backward_launch, (*given, dy, do, do if dgate is None else dgate, sums), *ctx.options)
        if weight is not None and ctx.needs_input_grad[4]:
            dweight = torch.empty_like(weight)
            run(sum_launch, (sums, dweight, dweight))
        return None, None, do, dgate, dweight
