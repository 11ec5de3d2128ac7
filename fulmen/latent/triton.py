"""Latent attention in Triton, for NVIDIA GPUs from compute capability 8.0 on.

One program owns BLOCK_M queries of a row of the batch, of any heads: query r is token r // H, head r % H. It walks its
part of the row's keys, BLOCK_N at a time. A tile of kv is loaded once, as keys and as values, in two parts: the first E
columns, which are the values, and the rest:

    s = scale log2(e) (q[:E] kv[:E]^T + q[E:] kv[E:]^T),  m' = max(m, rowmax s),  p = 2^(s - m'),  a = 2^(m - m')
    l = a l + rowsum p,  acc = a acc + p kv[:E];     at the end  o = acc / l

`splits` programs share the keys of a row, as many blocks of keys each as its length gives. Each leaves acc, m and l in
fp32, and `latent_combine_kernel` adds them up in their order. Programs without keys leave at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen import dispatch
from fulmen.boundary import empty_rows, no_gradient
from fulmen.dispatch import Choice, register
from fulmen.latent.policy import TritonTile, query_tiles
from fulmen.latent.spec import LatentSpec, Residuals
from fulmen.launch import Launch, repeat, unsupported_device
from fulmen.tiles import LOG2E

COMBINED, COLUMNS = 32, 128  # splits that are added up at a time, and columns of a program that does
MAX_VALUE_DIM, MAX_REST = 512, 128


def supports(spec: LatentSpec) -> str | None:
    if spec.dtype == torch.float64:
        return "multiplies bf16, fp16 and fp32, and q is torch.float64"
    rest = spec.D - spec.E
    if not (is_size(spec.E, MAX_VALUE_DIM) and (rest == 0 or is_size(rest, MAX_REST))):
        return (
            f"value_dim must be a power of two from 16 to {MAX_VALUE_DIM}, and D - value_dim 0 or a power of two from "
            f"16 to {MAX_REST}; D={spec.D}, value_dim={spec.E}"
        )
    if spec.scale < 0:
        return f"needs a positive scale, and it is {spec.scale}"
    return unsupported_device(spec.device, spec.dtype)


def is_size(n: int, most: int) -> bool:
    return 16 <= n <= most and n & (n - 1) == 0


# ----------------------------------------------------------------------------------------------- kernels


@triton.jit
def length_of(lengths_ptr, b, N_KV):
    """Keys of row b, clamped to its room."""
    if lengths_ptr is None:
        return N_KV
    else:
        return tl.minimum(tl.maximum(tl.load(lengths_ptr + b), 0), N_KV)


@triton.jit
def keys_of_split(length, split, splits, BLOCK_N: tl.constexpr):
    """The first key of a split, and the one after its last."""
    each = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    return split * each, tl.minimum(length, (split + 1) * each)


@triton.jit
def latent_forward_kernel(
    q, kv,
    lengths_ptr,  # (B,), or None
    table_ptr,  # (B, table_width), or None
    o,  # SPLIT: sums (splits, B, rows, E), fp32
    found_ptr,  # SPLIT: m, in base 2, and l (splits, B, rows, 2), else None
    q_strides, kv_strides, o_strides,  # of B, H, N; of B or pages, and N
    B, H, N_Q, N_KV, pages, table_width, splits,
    scale,
    CAUSAL: tl.constexpr,
    E: tl.constexpr, REST: tl.constexpr,
    PAGE: tl.constexpr,  # keys of a page, or None
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = H * N_Q
    tiles = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    r = (pid % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = pid // tiles % splits
    b = (pid // tiles // splits).to(tl.int64)
    mask_m = r < rows
    length = length_of(lengths_ptr, b, N_KV)
    start, end = keys_of_split(length, split, splits, BLOCK_N)
    if found_ptr is not None:
        if start >= end:
            return

    # what stays resident
    h = (r % H).to(tl.int64)
    n = (r // H).to(tl.int64)
    offs_e = tl.arange(0, E)
    q_rows = q + b * q_strides[0] + h * q_strides[1] + n * q_strides[2]
    q_m = tl.load(q_rows[:, None] + offs_e[None, :], mask=mask_m[:, None], other=0.0)
    if REST > 0:
        offs_rest = E + tl.arange(0, REST)
        q_rest = tl.load(q_rows[:, None] + offs_rest[None, :], mask=mask_m[:, None], other=0.0)
    last = (length - 1 + tl.zeros([BLOCK_M], tl.int32)) if not CAUSAL else length - N_Q + r // H
    acc = tl.zeros([BLOCK_M, E], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    factor = scale * LOG2E

    for i in tl.range(start, end, BLOCK_N):
        key = i + tl.arange(0, BLOCK_N)
        there = key < length
        if PAGE is not None:
            page = tl.load(table_ptr + b * table_width + key // PAGE, mask=there, other=0)
            page = tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)
            kv_rows = kv + page * kv_strides[0] + (key % PAGE).to(tl.int64) * kv_strides[1]
        else:
            kv_rows = kv + b * kv_strides[0] + key.to(tl.int64) * kv_strides[1]
        kv_n = tl.load(kv_rows[:, None] + offs_e[None, :], mask=there[:, None], other=0.0)  # [N, E]
        s = tl.dot(q_m, tl.trans(kv_n), input_precision="ieee")  # [M, N]
        if REST > 0:
            rest_n = tl.load(kv_rows[:, None] + offs_rest[None, :], mask=there[:, None], other=0.0)
            s = tl.dot(q_rest, tl.trans(rest_n), s, input_precision="ieee")
        s = tl.where(key[None, :] <= last[:, None], s * factor, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - pivot[:, None])
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(kv_n.dtype), kv_n, acc * alpha[:, None], input_precision="ieee")  # [M, E]
        m = m_new

    if found_ptr is not None:
        at = (split * B + b) * rows + r
        tl.store(o + at[:, None] * E + offs_e[None, :], acc, mask=mask_m[:, None])
        tl.store(found_ptr + 2 * at, m, mask=mask_m)
        tl.store(found_ptr + 2 * at + 1, l, mask=mask_m)
    else:
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # a row that saw nothing is zero
        o_rows = o + b * o_strides[0] + h * o_strides[1] + n * o_strides[2]
        tl.store(o_rows[:, None] + offs_e[None, :], acc.to(o.dtype.element_ty), mask=mask_m[:, None])


@triton.jit
def latent_combine_kernel(
    sums_ptr, found_ptr, lengths_ptr, o,
    o_strides, B, H, N_Q, N_KV, splits,
    E: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two, at least `splits`
    COMBINED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of one query of one head: the splits of its row that have keys, COMBINED at a time."""
    SLICES: tl.constexpr = E // COLUMNS
    pid = tl.program_id(0) // SLICES
    rows = H * N_Q
    b = (pid // rows).to(tl.int64)
    r = pid % rows
    blocks = tl.cdiv(length_of(lengths_ptr, b, N_KV), BLOCK_N)
    used = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, splits), 1))

    split = tl.arange(0, SPLITS)
    at = (split.to(tl.int64) * B + b) * rows + r
    m_all = tl.load(found_ptr + 2 * at, mask=split < used, other=float("-inf"))
    m = tl.max(m_all, 0)
    pivot = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.load(found_ptr + 2 * at + 1, mask=split < used, other=0.0) * tl.exp2(m_all - pivot), 0)

    offs_e = tl.program_id(0) % SLICES * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for i in tl.range(0, used, COMBINED):
        some = i + tl.arange(0, COMBINED)
        rows_at = (some.to(tl.int64) * B + b) * rows + r
        weight = tl.exp2(tl.load(found_ptr + 2 * rows_at, mask=some < used, other=float("-inf")) - pivot)
        sums = tl.load(sums_ptr + rows_at[:, None] * E + offs_e[None, :], mask=(some < used)[:, None], other=0.0)
        acc += tl.sum(sums * weight[:, None], 0)
    acc = acc / tl.where(l == 0.0, 1.0, l)
    h = (r % H).to(tl.int64)
    n = (r // H).to(tl.int64)
    to = o + b * o_strides[0] + h * o_strides[1] + n * o_strides[2]
    tl.store(to + offs_e, acc.to(o.dtype.element_ty))


# ---------------------------------------------------------------------------------------------- launches


def tensors_of(x: Residuals, o: Tensor, work: tuple[Tensor, ...]) -> list[tuple[Tensor | None, ...]]:
    """What the kernel takes and, where keys are split, the one that combines."""
    if not work:
        return [(*x, o, None)]
    return [(*x, *work), (*work, x.kv_lengths, o)]


def forward_launches(
    spec: LatentSpec, choice: Choice, x: Residuals, o: Tensor, work: tuple[Tensor, ...]
) -> list[Launch]:
    tile: TritonTile = choice.tile
    pages, width = (0, 0) if x.page_table is None else (x.kv.shape[0], x.page_table.shape[1])
    strides = (x.q.stride()[:3], x.kv.stride()[:2], o.stride()[:3])
    sizes = (spec.B, spec.H, spec.N_Q, spec.N_KV, pages, width, choice.splits, spec.scale)
    flags = (spec.causal, spec.E, spec.D - spec.E, spec.page, tile.block_m, tile.block_n)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    tensors = tensors_of(x, o, work)
    grid = query_tiles(spec, tile.block_m) * choice.splits * spec.B
    launches = [Launch(latent_forward_kernel, grid, tensors[0], (*strides, *sizes, *flags), options)]
    if work:
        columns, splits = min(spec.E, COLUMNS), triton.next_power_of_2(choice.splits)
        parts: Any = (strides[2], *sizes[:4], choice.splits, spec.E, columns, tile.block_n, splits)
        parts += (min(splits, COMBINED),)
        programs = spec.B * spec.rows * (spec.E // columns)
        launches.append(Launch(latent_combine_kernel, programs, tensors[1], parts, {"num_warps": 4}))
    return launches


def workspace(spec: LatentSpec, splits: int) -> tuple[Tensor, ...]:
    """For what programs have of split keys: sums, and m and l; nothing, if there is one split."""
    if splits == 1:
        return ()
    shape = (splits, spec.B, spec.rows)
    return tuple(torch.empty(*shape, n, dtype=torch.float32, device=spec.device) for n in (spec.E, 2))


def forward(spec: LatentSpec, x: Residuals, choice: Choice | None = None) -> Tensor:
    used = choice or dispatch.choose("latent", spec, "triton")
    o, work = empty_rows(x.q, spec.H, spec.E), workspace(spec, used.splits)
    key = ("latent", spec, used, x.q.stride(), x.kv.stride(), x.kv.shape[0], o.stride())
    repeat(key, spec.device, tensors_of(x, o, work), lambda: forward_launches(spec, used, x, o, work))
    return o


register("latent", "triton", supports=supports, forward=forward, backward=no_gradient("latent_attention"))
