"""Softmax attention over a cache in Triton, forward: lengths and page tables are read on the device.

A program owns BLOCK_M rows of one row of the cache and one head of k and v, and one of `splits` parts of the keys they
see. Query heads that share k and v share a tile, whatever their number: row r of a cache's row is position r // GROUP,
query head r % GROUP. The loop over keys is that of triton.py, with every block masked:

    s = scale log2(e) q k^T,  m' = max(m, rowmax s),  p = 2^(s - m'),  a = 2^(m - m')
    l = a l + rowsum p,  acc = a acc + p v

Parts of the keys are cut from the row's own length, so that all of them work whatever the capacity. Each leaves acc, m
and l in fp32, a part without keys only m = -inf, and a second kernel combines them in the order of the keys:

    m = max m_i,  l = sum 2^(m_i - m) l_i,  o = sum 2^(m_i - m) acc_i / l

Key n of a row lies at row n % PAGE of page table[n // PAGE]; lengths and entries are clamped, so that no value reaches
foreign memory. Keys and values beyond the length are not loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.flash.policy_cache import CacheTile
from fulmen.flash.spec import FlashSpec, Residuals, tiles_of
from fulmen.launch import Launch, Ready
from fulmen.tiles import LN2, LOG2E, find_tile, key_ranges, offset_at, padded, tanh, visible

CHUNK = 16  # parts that are combined at a time
WARPS = {"num_warps": 4}


# --------------------------------------------------------------------------------------------------- kernels


@triton.jit
def key_rows(strides, table_ptr, row, h, key, width, pages, PAGE: tl.constexpr):
    """Offsets of keys [N] of a row of the cache, in elements, int64."""
    if PAGE is None:
        return row.to(tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1] + key.to(tl.int64) * strides[2]
    else:
        entry = tl.load(table_ptr + row.to(tl.int64) * width + tl.minimum(key // PAGE, width - 1))
        page = tl.minimum(tl.maximum(entry, 0), pages - 1).to(tl.int64)
        return page * strides[0] + tl.cast(h, tl.int64) * strides[1] + (key % PAGE).to(tl.int64) * strides[2]


@triton.jit
def load_keys(x, offs, mask_n, SIZE: tl.constexpr):
    """Rows of k or v, [N, padded(SIZE)], zero where the mask is not set."""
    offs_d = tl.arange(0, padded(SIZE))
    return tl.load(x + offs[:, None] + offs_d[None, :], mask=mask_n[:, None] & (offs_d < SIZE)[None, :], other=0.0)


@triton.jit
def flash_cache_forward_kernel(
    q, k, v,
    o,  # with found_ptr: acc (splits, rows, E), fp32
    lse_ptr,  # or None
    found_ptr,  # m, in base 2, and l (splits, rows, 2), or None: keys are not split
    sinks_ptr,  # (H,), or None
    cu_q_ptr,  # (sequences + 1,), or None
    lengths_ptr, table_ptr,  # table_ptr: or None
    strides,  # of q, k, v, o
    sizes,  # H_KV, GROUP, N_Q, N_KV; tiles, splits, rows; of the table: width, pages
    scale,
    softcap, left, right,  # or None
    D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    H_KV, GROUP, N_Q, N_KV, tiles, splits, rows, width, pages = sizes
    pid = tl.program_id(0)
    split = pid % splits
    tile = pid // splits % tiles
    head = pid // splits // tiles
    b_q = head // H_KV
    h_kv = head % H_KV
    begin_q = 0
    n_q = N_Q
    row = b_q
    if cu_q_ptr is not None:
        row, tile = find_tile(cu_q_ptr, tile, tiles - N_Q * GROUP // BLOCK_M, N_Q, BLOCK_M, GROUP)
        begin_q = offset_at(cu_q_ptr, row, N_Q)
        n_q = tl.maximum(offset_at(cu_q_ptr, row + 1, N_Q) - begin_q, 0)
    n_kv = offset_at(lengths_ptr, row, N_KV)

    # rows of the tile: a query head at a position
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = packed < n_q * GROUP
    query = packed // GROUP
    h = h_kv * GROUP + packed % GROUP
    shift = n_kv - n_q
    position = query + shift

    # its part of the keys
    first = tile * BLOCK_M // GROUP + shift
    last = tl.minimum(((tile + 1) * BLOCK_M - 1) // GROUP, n_q - 1) + shift
    start, _, _, end = key_ranges(first, last, n_kv, left, right, BLOCK_N)
    each = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), BLOCK_N), splits) * BLOCK_N
    start += split * each
    end = tl.minimum(end, start + each)
    if tile * BLOCK_M >= n_q * GROUP:  # a slot no packed sequence needs
        end = start

    # what stays resident
    offs_d = tl.arange(0, padded(D))
    offs_q = b_q.to(tl.int64) * strides[0][0] + h.to(tl.int64) * strides[0][1]
    offs_q += (begin_q + query).to(tl.int64) * strides[0][2]
    q_m = tl.load(q + offs_q[:, None] + offs_d[None, :], mask=mask_m[:, None] & (offs_d < D)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, padded(E)], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None and found_ptr is None:  # as if its logit had come first
        m = tl.load(sinks_ptr + h, mask=mask_m, other=0.0).to(tl.float32) * LOG2E
        l = tl.full([BLOCK_M], 1.0, tl.float32)

    for n in tl.range(start, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        mask_n = key < n_kv
        offs = key_rows(strides[1], table_ptr, row, h_kv, key, width, pages, PAGE)
        k_n = load_keys(k, offs, mask_n, D)
        s = tl.dot(q_m, tl.trans(k_n))  # [M, N]
        if softcap is not None:
            s = tanh(s * (scale / softcap)) * (softcap * LOG2E)
        else:
            s = s * (scale * LOG2E)
        seen = visible(position[:, None], key[None, :], left, right) & mask_n[None, :]
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - pivot[:, None])
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(p, 1)
        offs = key_rows(strides[2], table_ptr, row, h_kv, key, width, pages, PAGE)
        v_n = load_keys(v, offs, mask_n, E)
        acc = tl.dot(p.to(v_n.dtype), v_n, acc * alpha[:, None])  # [M, E]
        m = m_new

    offs_e = tl.arange(0, padded(E))
    at = (b_q * H_KV * GROUP + h).to(tl.int64) * N_Q + begin_q + query  # of lse, and of parts
    mask_o = mask_m[:, None] & (offs_e < E)[None, :]
    if found_ptr is None:
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # a row that saw nothing is zero
        offs_o = b_q.to(tl.int64) * strides[3][0] + h.to(tl.int64) * strides[3][1]
        offs_o += (begin_q + query).to(tl.int64) * strides[3][2]
        tl.store(o + offs_o[:, None] + offs_e[None, :], acc.to(o.dtype.element_ty), mask=mask_o)
        if lse_ptr is not None:
            tl.store(lse_ptr + at, (m + tl.log2(l)) * LN2, mask=mask_m)
    else:
        at += split.to(tl.int64) * rows
        tl.store(o + at[:, None] * E + offs_e[None, :], acc, mask=mask_o & (start < end))
        tl.store(found_ptr + 2 * at, m, mask=mask_m)
        tl.store(found_ptr + 2 * at + 1, l, mask=mask_m)


@triton.jit
def flash_cache_combine_kernel(
    acc_ptr, found_ptr,
    o,
    lse_ptr,  # or None
    sinks_ptr,  # (H,), or None
    strides,  # of o
    H, N_Q, rows, splits,
    E: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # of (B, H, N_Q)
    h = row // N_Q % H
    offs_e = tl.arange(0, padded(E))
    mask_e = offs_e < E

    offs_s = tl.arange(0, SPLITS)
    at = (offs_s.to(tl.int64) * rows + row) * 2
    m_s = tl.load(found_ptr + at, mask=offs_s < splits, other=float("-inf"))
    l_s = tl.load(found_ptr + at + 1, mask=offs_s < splits, other=0.0)
    m = tl.max(m_s, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    pivot = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2(m_s - pivot) * l_s, 0)
    if sinks_ptr is not None:
        l += tl.exp2(sink - pivot)

    acc = tl.zeros([padded(E)], tl.float32)
    for i in tl.range(0, splits, CHUNK):
        part = i + tl.arange(0, CHUNK)
        offs = part.to(tl.int64) * rows + row
        weight = tl.exp2(tl.load(found_ptr + 2 * offs, mask=part < splits, other=float("-inf")) - pivot)
        there = (weight > 0.0)[:, None] & mask_e[None, :]  # a part without keys has written nothing
        acc_i = tl.load(acc_ptr + offs[:, None] * E + offs_e[None, :], mask=there, other=0.0)
        acc += tl.sum(acc_i * weight[:, None], 0)
    acc = acc / tl.where(l == 0.0, 1.0, l)
    to = row // N_Q // H * strides[0] + h * strides[1] + row % N_Q * strides[2]
    tl.store(o + to + offs_e, acc.to(o.dtype.element_ty), mask=mask_e)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, (m + tl.log2(l)) * LN2)


# -------------------------------------------------------------------------------------------------- launches


class Parts(NamedTuple):
    """What parts of the keys leave: acc (splits, B, H, N_Q, E), and m and l (splits, B, H, N_Q, 2), in fp32."""

    acc: Tensor
    found: Tensor


def empty_parts(spec: FlashSpec, splits: int, device: torch.device) -> Parts | None:
    if splits == 1:
        return None
    rows = (splits, spec.B, spec.H, spec.N_Q)
    return Parts(*(torch.empty(*rows, size, dtype=torch.float32, device=device) for size in (spec.E, 2)))


def steps(x: Tensor) -> tuple[int, ...]:
    return tuple(x.stride()[:3])


def launches(
    spec: FlashSpec, tile: CacheTile, splits: int, x: Residuals, o: Tensor, lse: Tensor | None, parts: Parts | None
) -> list[Launch]:
    tiles, rows = tiles_of(spec, spec.N_Q * spec.group, tile.block_m), spec.B * spec.H * spec.N_Q
    table = (1, 1) if x.page_table is None else (x.page_table.shape[1], x.k.shape[0])
    sizes = (spec.H_KV, spec.group, spec.N_Q, spec.N_KV, tiles, splits, rows, *table)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    acc, found = (o, None) if parts is None else parts
    attend = Launch(
        flash_cache_forward_kernel,
        tiles * spec.B * spec.H_KV * splits,
        (x.q, x.k, x.v, acc, None if parts else lse, found, x.sinks, x.cu_seqlens_q, x.kv_lengths, x.page_table),
        (
            (steps(x.q), steps(x.k), steps(x.v), steps(o)), sizes, spec.scale, spec.softcap, spec.left, spec.right,
            spec.D, spec.E, spec.page, tile.block_m, tile.block_n,
        ),
        options,
    )  # fmt: skip
    if parts is None:
        return [attend]
    rest = (steps(o), spec.H, spec.N_Q, rows, splits, spec.E, triton.next_power_of_2(splits), CHUNK)
    return [attend, Launch(flash_cache_combine_kernel, rows, (*parts, o, lse, x.sinks), rest, WARPS)]


def ready(
    spec: FlashSpec, tile: CacheTile, splits: int, x: Residuals, o: Tensor, lse: Tensor | None
) -> Callable[..., None]:
    """A function of the call's tensors, o and lse that repeats these launches."""
    parts = empty_parts(spec, splits, spec.device)
    attend, *combine = (Ready(launch, spec.device) for launch in launches(spec, tile, splits, x, o, lse, parts))

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_q: Tensor | None, lengths: Tensor,
            table: Tensor | None, o: Tensor, lse: Tensor | None) -> None:  # fmt: skip
        parts = empty_parts(spec, splits, spec.device)
        if parts is None:
            attend(q, k, v, o, lse, None, sinks, cu_q, lengths, table)
        else:
            attend(q, k, v, parts.acc, None, parts.found, sinks, cu_q, lengths, table)
            combine[0](*parts, o, lse, sinks)

    return run
