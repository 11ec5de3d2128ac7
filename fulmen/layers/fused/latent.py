"""Latent attention on a GPU: norms and RoPE between its products, and products that read and write k and v in place.

Norms. Both latents in one launch each way, of the first columns of a projection's output:

    y = x[:, :R] / sqrt(mean(x[:, :R]^2) + eps) * weight

The other columns, which RoPE turns, stay where they are. (torch's norm copies its columns first, and its backward needs
another copy that joins the gradients of both parts.) A program of the backward takes every PROGRAMS-th tile of rows and
keeps its own sum of the weight's gradient; the sums are added in a fixed order.

Keys and values. [k_nope | v] = latent W^T has its heads' rows mixed, and k is [k_nope | rope]. A product for each head
(one batched call) writes k_nope where it belongs in k and v by itself, and another forms the gradient of W from dk and
dv in place. RoPE then turns q in place and fills the rest of k. The gradient of the latent is

    dlatent = sum over heads of dk_nope_h W_k,h + dv_h W_v,h

one product over all heads, whose operands no BLAS can read: their columns are not evenly spaced. `gather_kernel` loads
them by TMA, 64 columns at a time. Where it does not apply, dk_nope and dv are copied side by side first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fulmen import hardware
from fulmen.boundary import once_differentiable
from fulmen.launch import Launch, describable, sm_count, starting, starts_early
from fulmen.layers.fused import saved
from fulmen.layers.fused.rotary import angles, next_power_of_2, pairs, per_row, run, turned
from fulmen.layers.fused.sums import pipeline, sum_launch

PROGRAMS_PER_SM = 4  # of a norm's backward. H200, B2 N2048, 512 + 1,536 columns: 23 us, with 2 30 us
TILE = 2048  # elements of a row, or of several, that it takes at a time
HEADS = {"forward": 32, "backward": 32}  # that RoPE takes at a time
WARPS = {"num_warps": 2}  # 32.5 us forward and 32.8 backward at B1 N4096 H64; with 4 warps 33.1 and 39.4

# ---------------------------------------------------------------------------------------------------- norms


@triton.jit
def norm_row(x_ptr, weight_ptr, y_ptr, rstd_ptr, row, stride, eps, R: tl.constexpr, R_P2: tl.constexpr):
    i = tl.arange(0, R_P2)
    x = tl.load(x_ptr + row * stride + i, i < R, 0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x) / R + eps)
    weight = tl.load(weight_ptr + i, i < R, 0.0).to(tl.float32)
    tl.store(y_ptr + row * R + i, (x * rstd * weight).to(y_ptr.dtype.element_ty), i < R)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, x2_ptr, weight2_ptr, rstd_ptr, y_ptr, y2_ptr, stride, stride2, eps, eps2, rows,
    R: tl.constexpr, R_P2: tl.constexpr, R2: tl.constexpr, R2_P2: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row of each of the two; of one alone if R2 is 0. EARLY: as in `linear.py`."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    norm_row(x_ptr, weight_ptr, y_ptr, rstd_ptr, row, stride, eps, R, R_P2)
    if R2 > 0:
        norm_row(x2_ptr, weight2_ptr, y2_ptr, rstd_ptr + rows, row, stride2, eps2, R2, R2_P2)


@triton.jit
def norm_rows_backward(
    total, x_ptr, weight_ptr, rstd_ptr, dy_ptr, drest_ptr, dx_ptr, row, rows, stride,
    R: tl.constexpr, R_P2: tl.constexpr, REST: tl.constexpr, REST_P2: tl.constexpr,
):  # fmt: skip
    """Writes dx of these rows; `total`, which each of them adds its part of the weight's gradient to."""
    i = tl.arange(0, R_P2)[None, :]
    weight = tl.load(weight_ptr + i, i < R, 0.0).to(tl.float32)
    there = (row < rows)[:, None]
    mask = there & (i < R)
    rstd = tl.load(rstd_ptr + row, row < rows, 0.0)[:, None]
    row = row.to(tl.int64)[:, None]
    unit = tl.load(x_ptr + row * stride + i, mask, 0.0).to(tl.float32) * rstd
    dy = tl.load(dy_ptr + row * R + i, mask, 0.0).to(tl.float32)
    total += dy * unit
    dy *= weight
    dx = rstd * (dy - unit * (tl.sum(dy * unit, axis=1)[:, None] / R))
    out = dx_ptr + row * (R + REST)
    tl.store(out + i, dx.to(dx_ptr.dtype.element_ty), mask)
    if REST > 0:
        j = tl.arange(0, REST_P2)[None, :]
        tl.store(out + R + j, tl.load(drest_ptr + row * REST + j, there & (j < REST)), there & (j < REST))
    return total


@triton.jit
def norm_backward_kernel(
    x_ptr, weight_ptr, dy_ptr, drest_ptr, dx_ptr, x2_ptr, weight2_ptr, dy2_ptr, drest2_ptr, dx2_ptr, rstd_ptr,
    sums_ptr, stride, stride2, rows,
    R: tl.constexpr, R_P2: tl.constexpr, REST: tl.constexpr, REST_P2: tl.constexpr,
    R2: tl.constexpr, R2_P2: tl.constexpr, REST2: tl.constexpr, REST2_P2: tl.constexpr,
    ROWS: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([ROWS, R_P2], tl.float32)
    total2 = tl.zeros([ROWS, R2_P2], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, PROGRAMS * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        total = norm_rows_backward(
            total, x_ptr, weight_ptr, rstd_ptr, dy_ptr, drest_ptr, dx_ptr, row, rows, stride, R, R_P2, REST, REST_P2
        )
        if R2 > 0:
            total2 = norm_rows_backward(
                total2, x2_ptr, weight2_ptr, rstd_ptr + rows, dy2_ptr, drest2_ptr, dx2_ptr, row, rows, stride2,
                R2, R2_P2, REST2, REST2_P2,
            )  # fmt: skip
    i = tl.arange(0, R_P2)
    sums = sums_ptr + tl.program_id(0) * (R + R2)
    tl.store(sums + i, tl.sum(total, axis=0), i < R)
    if R2 > 0:
        j = tl.arange(0, R2_P2)
        tl.store(sums + R + j, tl.sum(total2, axis=0), j < R2)


def warps(elements: int) -> dict[str, int]:
    return {"num_warps": max(4, min(16, elements // 512))}


def norms(
    eps: tuple[float, ...], x: Tensor, weight: Tensor, x2: Tensor | None = None, weight2: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Launch]:
    """1 / sqrt(...) of all rows, fp32 (norms, rows), y of each norm (B, N, R), and their launch."""
    B, N, _ = x.shape
    rstd = torch.empty(len(eps), B * N, dtype=torch.float32, device=x.device)
    weights = [weight] if weight2 is None else [weight, weight2]
    ys = [torch.empty(B, N, w.shape[0], dtype=x.dtype, device=x.device) for w in weights]
    second, second_weight = (x, weight) if x2 is None or weight2 is None else (x2, weight2)
    made = norm_launch(x, weight, second, second_weight, rstd, ys[0], ys[-1], eps, starts_early(x.device))
    return (rstd, *ys), made


def norm_launch(
    x: Tensor, weight: Tensor, x2: Tensor, weight2: Tensor, rstd: Tensor, y: Tensor, y2: Tensor, eps: tuple[float, ...],
    early: bool = False,
) -> Launch:  # fmt: skip
    """rstd (norms, rows): if that is one norm the second x, weight and y are not looked at."""
    (norms, rows), R = rstd.shape, weight.shape[0]
    R2 = weight2.shape[0] if norms == 2 else 0
    sizes = (
        x.stride(1),
        x2.stride(1),
        eps[0],
        eps[-1],
        rows,
        R,
        next_power_of_2(R),
        R2,
        next_power_of_2(max(R2, 1)),
        early,
    )
    options = warps(next_power_of_2(max(R, R2))) | starting(early)
    return Launch(norm_kernel, rows, (x, weight, x2, weight2, rstd, y, y2), sizes, options)


def norm_backward_launch(*tensors: Tensor) -> Launch:
    """x, weight, dy, drest, dx of each of two norms, as above; rstd, and sums (programs, all weights' columns)."""
    x, weight, dy, drest, dx, x2, weight2, dy2, drest2, dx2, rstd, sums = tensors
    (norms, rows), R = rstd.shape, weight.shape[0]
    R2 = weight2.shape[0] if norms == 2 else 0
    rest, rest2 = dx.shape[2] - R, dx2.shape[2] - R2
    at_a_time = max(1, TILE // next_power_of_2(max(R, R2)))
    columns = (
        R,
        next_power_of_2(R),
        rest,
        next_power_of_2(max(rest, 1)),
        R2,
        next_power_of_2(max(R2, 1)),
        rest2,
        next_power_of_2(max(rest2, 1)),
        at_a_time,
        sums.shape[0],
    )
    tile = at_a_time * next_power_of_2(max(R, R2))
    rows_of = [(x, weight, dy, drest, R, rest), (x2, weight2, dy2, drest2, R2, rest2)][:norms]
    loads: list[tuple[int, Tensor]] = []
    for a, w, da, da_rest, n, n_rest in rows_of:
        row, others = at_a_time * next_power_of_2(n), at_a_time * next_power_of_2(n_rest) if n_rest else 0
        loads += [(row, a), (row, da), (n, w), (others, da_rest), (at_a_time, rstd)]
    stages, _ = pipeline(tile, *loads)
    sizes = (x.stride(1), x2.stride(1), rows, *columns, stages)
    return Launch(norm_backward_kernel, sums.shape[0], tensors, sizes, warps(tile))


def twice(tensors: list[Tensor], eps: tuple[float, ...]) -> list[Tensor]:
    """The tensors of two norms: where there is one it stands in for the second."""
    return tensors if len(eps) == 2 else tensors * 2


class Normed(torch.autograd.Function):
    """eps, x and weight of one norm or two -> of each its y (B, N, R), and a view of x's other columns.

    eps is one of each; x (B, N, width) have rows of one number, weight is (R,).
    """

    @staticmethod
    def forward(ctx: Any, eps: tuple[float, ...], *given: Tensor) -> tuple[Tensor, ...]:
        (rstd, *ys), launch = norms(eps, *given)
        tensors: Any = launch.tensors
        run(norm_launch, tensors, eps)
        ctx.eps = eps
        ctx.save_for_backward(*given, rstd)
        ctx.set_materialize_grads(False)
        rest = [x[..., weight.shape[0] :] for x, weight in zip(given[::2], given[1::2], strict=True)]
        return tuple(t for pair in zip(ys, rest, strict=True) for t in pair)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *given, rstd = saved(ctx)
        tensors: list[Tensor] = []
        for x, weight, dy, drest in zip(given[::2], given[1::2], grads[::2], grads[1::2], strict=True):
            (B, N, width), R = x.shape, weight.shape[0]
            dy = x.new_zeros(B, N, R) if dy is None else dy.contiguous()
            drest = x.new_zeros(B, N, width - R) if drest is None else drest.contiguous()
            tensors += [x, weight, dy, drest, torch.empty(x.shape, dtype=x.dtype, device=x.device)]
        weights = given[1::2]
        columns = sum(weight.shape[0] for weight in weights)
        sums = torch.empty(
            min(PROGRAMS_PER_SM * sm_count(rstd.device), rstd.shape[1]),
            columns,
            dtype=torch.float32,
            device=rstd.device,
        )
        run(norm_backward_launch, (*twice(tensors, ctx.eps), rstd, sums))
        dweights = [torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) for weight in weights]
        if any(ctx.needs_input_grad[2::2]):
            run(sum_launch, (sums, *twice(dweights, ctx.eps)))
        return None, *(t for pair in zip(tensors[4::5], dweights, strict=True) for t in pair)


# --------------------------------------------------------------------------------------- RoPE of q and of k


@triton.jit
def rope_kernel(
    q_ptr, rope_ptr, k_ptr, cos_ptr, sin_ptr, sr_b, sr_n, cos_b, N, H,
    NOPE: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """q, k (B, N, H, NOPE + 2 HALF): turns the end of each head of q, and writes what all heads share, turned, to k."""
    blocks = tl.cdiv(H, HEADS)
    token = tl.program_id(0) // blocks
    h = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    cos, sin = angles(cos_ptr, sin_ptr, b * cos_b + n, 1.0, HALF, HALF_P2)
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    mask = (h < H)[:, None] & there[None, :]
    places = (token.to(tl.int64) * H + h[:, None]) * (NOPE + 2 * HALF) + NOPE + at[None, :]
    q = tl.load(q_ptr + places, mask, 0.0).to(tl.float32)
    shared = tl.load(rope_ptr + b * sr_b + n * sr_n + at, there, 0.0).to(tl.float32)[None, :]
    shared = turned(shared, cos[None, :], sin[None, :], 1, HALF_P2, INTERLEAVED).to(k_ptr.dtype.element_ty)
    tl.store(k_ptr + places, shared.broadcast_to(HEADS, 2 * HALF_P2), mask)
    q = turned(q, cos[None, :], sin[None, :], HEADS, HALF_P2, INTERLEAVED)
    tl.store(q_ptr + places, q.to(q_ptr.dtype.element_ty), mask)


@triton.jit
def rope_backward_kernel(
    dq_ptr, dk_ptr, drope_ptr, cos_ptr, sin_ptr, cos_b, N, H,
    NOPE: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Turns dq back where it lies; the gradient of what the heads share is summed over them in their order."""
    token = tl.program_id(0)
    b = (token // N).to(tl.int64)
    n = (token % N).to(tl.int64)
    cos, sin = angles(cos_ptr, sin_ptr, b * cos_b + n, -1.0, HALF, HALF_P2)
    at, there = pairs(HALF, HALF_P2, INTERLEAVED)
    total = tl.zeros([HEADS, 2 * HALF_P2], tl.float32)
    for first in range(0, H, HEADS):
        h = first + tl.arange(0, HEADS)
        mask = (h < H)[:, None] & there[None, :]
        places = (token.to(tl.int64) * H + h[:, None]) * (NOPE + 2 * HALF) + NOPE + at[None, :]
        dq = tl.load(dq_ptr + places, mask, 0.0).to(tl.float32)
        total += tl.load(dk_ptr + places, mask, 0.0).to(tl.float32)
        dq = turned(dq, cos[None, :], sin[None, :], HEADS, HALF_P2, INTERLEAVED)
        tl.store(dq_ptr + places, dq.to(dq_ptr.dtype.element_ty), mask)
    y = turned(tl.sum(total, axis=0)[None, :], cos[None, :], sin[None, :], 1, HALF_P2, INTERLEAVED)
    out = drope_ptr + token.to(tl.int64) * 2 * HALF + at[None, :]
    tl.store(out, y.to(drope_ptr.dtype.element_ty), there[None, :])


def rope_launch(q: Tensor, rope: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Launch:
    B, N, H, D = k.shape
    half, heads = cos.shape[-1], min(HEADS["forward"], next_power_of_2(H))
    rest = (*rope.stride()[:2], per_row(cos), N, H, D - 2 * half, half, next_power_of_2(half), interleaved, heads)
    return Launch(rope_kernel, B * N * triton.cdiv(H, heads), (q, rope, k, cos, sin), rest, WARPS)


def rope_backward_launch(dq: Tensor, dk: Tensor, drope: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Launch:
    B, N, H, D = dk.shape
    half, heads = cos.shape[-1], min(HEADS["backward"], next_power_of_2(H))
    rest = (per_row(cos), N, H, D - 2 * half, half, next_power_of_2(half), interleaved, heads)
    return Launch(rope_backward_kernel, B * N, (dq, dk, drope, cos, sin), rest, WARPS)


# ------------------------------------------------------------------------------- the gradient of the latent

ROWS, WIDTHS, DEPTH = 128, (256, 128), 64  # of a tile of it, and what is multiplied at a time
LEAST_FULL = 0.75  # of the SMs, over all waves of tiles; below that cuBLAS serves, which can split a sum


@triton.jit
def gather_kernel(
    dk, dv, w, out, tiles, H,
    NOPE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Descriptors of dk, dv (1, blocks of DEPTH columns, tokens, DEPTH), w and out (1, blocks of WIDTH, rows, WIDTH).

    Programs that share rows of dk and dv are neighbours; all walk the heads together, so that each block is read from
    memory once and then from the L2 cache.
    """
    m = (tl.program_id(0) // tiles) * ROWS
    column = tl.program_id(0) % tiles
    K_PARTS: tl.constexpr = NOPE // DEPTH  # of a head
    V_PARTS: tl.constexpr = E // DEPTH
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in range(H * K_PARTS):
        h = i // K_PARTS
        part = i % K_PARTS
        a = dk.load([0, h * (D // DEPTH) + part, m, 0]).reshape(ROWS, DEPTH)
        b = w.load([0, column, h * (NOPE + E) + part * DEPTH, 0]).reshape(DEPTH, WIDTH)
        acc = tl.dot(a, b, acc)
    for i in range(H * V_PARTS):
        h = i // V_PARTS
        part = i % V_PARTS
        a = dv.load([0, i, m, 0]).reshape(ROWS, DEPTH)
        b = w.load([0, column, h * (NOPE + E) + NOPE + part * DEPTH, 0]).reshape(DEPTH, WIDTH)
        acc = tl.dot(a, b, acc)
    out.store([0, column, m, 0], acc.to(out.dtype).reshape(1, 1, ROWS, WIDTH))


def blocks_of(x: Tensor, width: int) -> Tensor:
    """x (rows, columns) as (1, blocks of columns, rows, width), which `fulmen.launch` describes to the hardware."""
    return x.unflatten(1, (-1, width)).transpose(0, 1)[None]


def gather_launch(dk: Tensor, dv: Tensor, weight: Tensor, out: Tensor, H: int, nope: int, width: int) -> Launch:
    """dk (T, H * D), dv (T, H * E), weight (H * (nope + E), R), out (T, R)."""
    tiles = weight.shape[1] // width
    tensors = (blocks_of(dk, DEPTH), blocks_of(dv, DEPTH), blocks_of(weight, width), blocks_of(out, width))
    rest = (tiles, H, nope, dk.shape[1] // H, dv.shape[1] // H, ROWS, width, DEPTH)
    options = {"num_warps": 8, "num_stages": 4 if width == max(WIDTHS) else 5}
    grid = triton.cdiv(dk.shape[0], ROWS) * tiles
    return Launch(gather_kernel, grid, tensors, rest, options, {0: ROWS, 1: ROWS, 2: DEPTH, 3: ROWS})


def gather_width(T: int, R: int, hw: hardware.Hardware) -> int | None:
    """The tile width that keeps this GPU busy; None if none does, or if it is no Hopper."""
    if hw.arch != 90:
        return None
    for width in WIDTHS:
        tiles = triton.cdiv(T, ROWS) * (R // width)
        if R % width == 0 and tiles >= LEAST_FULL * hw.sm_count * triton.cdiv(tiles, hw.sm_count):
            return width
    return None


def latent_gradient(dk: Tensor, dv: Tensor, weight: Tensor, nope: int) -> Tensor:
    """dk (T, H, D), dv (T, H, E), weight (H * (nope + E), R) -> (T, R)."""
    (T, H, D), E, R = dk.shape, dv.shape[2], weight.shape[1]
    width = None
    if dk.is_cuda and dk.dtype != torch.float32 and not (nope % DEPTH or D % DEPTH or E % DEPTH):
        width = gather_width(T, R, hardware.of(dk.device))
    if width is not None and weight.is_contiguous():
        out = torch.empty(T, R, dtype=dk.dtype, device=dk.device)
        tensors = (dk.view(T, H * D), dv.view(T, H * E), weight, out)
        if describable(*(x[None, None] for x in tensors)):
            run(gather_launch, tensors, H, nope, width)
            return out
    return torch.cat([dk[..., :nope], dv], 2).view(T, -1) @ weight


# ----------------------------------------------------------------------------------------------- q, k and v


class Expanded(torch.autograd.Function):
    """q, latent, rope, weight -> q, k and v of latent attention.

    q       (B, N, H * (nope + dim)): turned where it lies. A projection's output, which its own backward does not read
            and nobody else sees. Nor does anybody else see the gradient that comes back: it is the attention kernel's
            own, and is turned back where it lies, too.
    latent  (B, N, R), normed.
    rope    (B, N, dim): what all heads of k share, not turned yet.
    weight  (H * (nope + E), R): of each head the rows of k_nope and of v. k is (B, N, H, nope + dim), v (B, N, H, E).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, nope: int,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        B, N, dim = rope.shape
        H = q.shape[2] // (nope + dim)
        flat, up = latent.reshape(B * N, -1), weight.unflatten(0, (H, -1))
        k = torch.empty(B, N, H, nope + dim, dtype=q.dtype, device=q.device)
        v = torch.empty(B, N, H, up.shape[1] - nope, dtype=q.dtype, device=q.device)
        every = flat.expand(H, -1, -1)
        torch.bmm(every, up[:, :nope].mT, out=k.flatten(0, 1)[..., :nope].transpose(0, 1))
        torch.bmm(every, up[:, nope:].mT, out=v.flatten(0, 1).transpose(0, 1))
        run(rope_launch, (q.detach(), rope, k, cos, sin), interleaved)
        ctx.options = nope, interleaved
        ctx.save_for_backward(latent, weight, cos, sin)
        ctx.mark_dirty(q)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
        latent, weight, cos, sin = saved(ctx)
        nope, interleaved = ctx.options
        dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
        drope = torch.empty(*latent.shape[:2], 2 * cos.shape[-1], dtype=dk.dtype, device=dk.device)
        run(rope_backward_launch, (dq, dk, drope, cos, sin), interleaved)
        dk, dv = dk.flatten(0, 1), dv.flatten(0, 1)
        dlatent = dweight = None
        if ctx.needs_input_grad[1]:
            dlatent = latent_gradient(dk, dv, weight, nope).view(latent.shape)
        if ctx.needs_input_grad[3]:
            dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            T, H = dk.shape[:2]
            every, up = latent.reshape(T, -1).expand(H, -1, -1), dweight.unflatten(0, (H, -1))
            torch.bmm(dk[..., :nope].permute(1, 2, 0), every, out=up[:, :nope])
            torch.bmm(dv.permute(1, 2, 0), every, out=up[:, nope:])
        return dq, dlatent, drope, dweight, None, None, None, None
