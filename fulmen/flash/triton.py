"""Softmax attention in Triton, forward and backward, for NVIDIA GPUs from compute capability 8.0 on.

Forward: one program owns (b, h, BLOCK_M queries), keeps q, the output acc, the row maxima m and the sums l in
registers and walks the keys its rows may see, BLOCK_N at a time, in base 2:

    s = scale log2(e) q k^T,  m' = max(m, rowmax s),  p = 2^(s - m'),  a = 2^(m - m')
    l = a l + rowsum p,  acc = a acc + p v;     at the end  o = acc / l,  lse = ln 2 (m + log2 l)

Backward: triton_backward.py. Where every query of a tile sees every key of a block no mask is computed: causal and
windowed calls walk the edges in loops of their own.
On Hopper and Blackwell the copy engine (TMA) loads the tiles of large calls. Other GPUs and packed sequences load
through pointers: TMA cannot stop at a sequence's end. Calls over a cache have a kernel of their own: triton_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen import dispatch
from fulmen.boundary import empty_rows
from fulmen.dispatch import register
from fulmen.flash import triton_cache
from fulmen.flash.policy import TritonTile, TritonTiles
from fulmen.flash.spec import FlashSpec, Residuals, empty_outputs, tiles_of
from fulmen.flash.triton_backward import (
    flash_backward_dkdv_kernel,
    flash_backward_dq_kernel,
    flash_backward_joined_kernel,
    open_tile,
)
from fulmen.launch import Launch, Ready, describable, run_all, unsupported_device
from fulmen.plans import allocator
from fulmen.tiles import LN2, LOG2E, key_ranges, load_rows, padded, store_rows, tanh, visible

MAX_ROW_STRIDE = 1 << 23  # up to here a tile's offsets fit 32 bits


def supports(spec: FlashSpec) -> str | None:
    if (why := unsupported_device(spec.device, spec.dtype)) is not None:
        return why
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 and fp16, and q is {spec.dtype}"
    if spec.D % 8 or spec.E % 8 or min(spec.D, spec.E) < 16:
        return f"head dims must be multiples of 8, 16 at least; D={spec.D}, E={spec.E}"
    if spec.scale < 0:
        return f"needs a positive scale, and it is {spec.scale}"
    return None


# ---------------------------------------------------------------------------------------------- forward


@triton.jit
def forward_keys(
    acc, m, l, q, k, v, strides, b, h_kv, position, begin_k, N, start, end, scale, softcap, left, right,
    D: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, LOAD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Takes the keys from `start` to `end` into acc, m and l."""
    for n in tl.range(start, end, BLOCK_N):
        k_n = load_rows(k, strides[1], b, h_kv, begin_k + n, begin_k + N, D, BLOCK_N, LOAD, MASK)
        s = tl.dot(q, tl.trans(k_n))  # [M, N]
        if softcap is not None:
            s = tanh(s * (scale / softcap)) * (softcap * LOG2E)
            factor = 1.0
        else:
            factor = scale * LOG2E
        if MASK:
            key = n + tl.arange(0, BLOCK_N)
            seen = visible(position[:, None], key[None, :], left, right) & (key < N)[None, :]
            s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new) if MASK else m_new
        p = tl.exp2(s * factor - pivot[:, None])
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_n = load_rows(v, strides[2], b, h_kv, begin_k + n, begin_k + N, E, BLOCK_N, LOAD, MASK)
        acc = tl.dot(p.to(v_n.dtype), v_n, acc)  # [M, E]
        m = m_new
    return acc, m, l


@triton.jit
def flash_forward_kernel(
    q, k, v,  # pointers, or descriptors with LOAD "tma"
    o,
    lse_ptr,  # or None
    sinks_ptr,  # (H,), or None
    cu_q_ptr, cu_k_ptr,  # (sequences + 1,), or None
    strides,  # of q, k, v, o
    B, H, GROUP, N_Q, N_KV,
    scale,
    softcap, left, right,  # or None
    TOP_LEFT: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOAD: tl.constexpr,
):  # fmt: skip
    head, m0, begin_q, N_Q_, begin_k, N_KV_ = open_tile(
        tl.program_id(0), tl.num_programs(0), cu_q_ptr, cu_k_ptr, B * H, N_Q, N_KV, False, right is not None, BLOCK_M
    )
    b = head // H
    h = head % H
    h_kv = h // GROUP
    row = m0 + tl.arange(0, BLOCK_M)
    shift = 0 if TOP_LEFT else N_KV_ - N_Q_
    position = row + shift

    # what stays resident
    q_m = load_rows(q, strides[0], b, h, begin_q + m0, begin_q + N_Q_, D, BLOCK_M, LOAD, True)
    acc = tl.zeros([BLOCK_M, padded(E)], tl.float32)
    if sinks_ptr is not None:  # as if its logit had come first
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
        l = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)

    start, full_start, full_end, end = key_ranges(m0 + shift, m0 + BLOCK_M - 1 + shift, N_KV_, left, right, BLOCK_N)
    if m0 >= N_Q_:  # a slot no packed sequence needs
        full_end = full_start
        end = start
    if left is not None:
        acc, m, l = forward_keys(
            acc, m, l, q_m, k, v, strides, b, h_kv, position, begin_k, N_KV_, start, tl.minimum(full_start, end),
            scale, softcap, left, right, D, E, BLOCK_N, LOAD, True,
        )  # fmt: skip
    acc, m, l = forward_keys(
        acc, m, l, q_m, k, v, strides, b, h_kv, position, begin_k, N_KV_, full_start, full_end,
        scale, softcap, left, right, D, E, BLOCK_N, LOAD, False,
    )  # fmt: skip
    acc, m, l = forward_keys(
        acc, m, l, q_m, k, v, strides, b, h_kv, position, begin_k, N_KV_, full_end, end,
        scale, softcap, left, right, D, E, BLOCK_N, LOAD, True,
    )  # fmt: skip

    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]  # a row that saw nothing is zero
    store_rows(o, strides[3], b, h, begin_q + m0, begin_q + N_Q_, acc, E, BLOCK_M)
    if lse_ptr is not None:
        lse = (m + tl.log2(l)) * LN2
        tl.store(lse_ptr + head.to(tl.int64) * N_Q + begin_q + row, lse, mask=row < N_Q_)


# ---------------------------------------------------------------------------------------------- launches


def how_to_load(spec: FlashSpec, use_tma: bool, *tensors: Tensor) -> str:
    """ "tma", "narrow" or "wide"; see `load_rows`."""
    if use_tma and (spec.device.type == "meta" or describable(*tensors)):
        return "tma"
    return "narrow" if all(x.stride(2) < MAX_ROW_STRIDE for x in tensors) else "wide"


def strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.stride()[:3]) for x in tensors)


def facts(spec: FlashSpec) -> tuple[object, ...]:
    """What all kernels take between strides and tiles."""
    return (
        spec.B, spec.H, spec.group, spec.N_Q, spec.N_KV, spec.scale, spec.softcap, spec.left, spec.right,
        spec.top_left, spec.D, spec.E,
    )  # fmt: skip


def options(tile: TritonTile) -> dict[str, int]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def forward_launch(spec: FlashSpec, tiles: TritonTiles, x: Residuals, o: Tensor, lse: Tensor | None) -> Launch:
    tile = tiles.forward
    load = how_to_load(spec, tiles.use_tma, x.q, x.k, x.v)
    return Launch(
        flash_forward_kernel,
        tiles_of(spec, spec.N_Q, tile.own) * spec.B * spec.H,
        (x.q, x.k, x.v, o, lse, x.sinks, x.cu_seqlens_q, x.cu_seqlens_k),
        (strides(x.q, x.k, x.v, o), *facts(spec), tile.own, tile.walk, load),
        options(tile),
        {0: tile.own, 1: tile.walk, 2: tile.walk} if load == "tma" else {},
    )


class Backward(NamedTuple):
    """The tensors of a backward; dk and dv have a head for each query head, in fp32, where heads_summed is 1.

    delta  what the first of two launches leaves for the second; None in a single launch, unless sinks need it
    """

    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None
    delta: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward_launches(spec: FlashSpec, tiles: TritonTiles, x: Residuals, y: Backward) -> list[Launch]:
    load = how_to_load(spec, tiles.use_tma, x.q, x.k, x.v, y.do)
    dq, dkdv = tiles.dq, tiles.dkdv
    packed = (x.cu_seqlens_q, x.cu_seqlens_k)
    heads = spec.H // max(y.dk.shape[1], 1)
    if tiles.joined is not None:
        tile, load = tiles.joined, how_to_load(spec, False, x.q, x.k, x.v, y.do, y.o)
        programs_q = tiles_of(spec, spec.N_Q, tile.own) * spec.B * spec.H
        steps = strides(x.q, x.k, x.v, y.do, y.o, y.dq, y.dk, y.dv)
        joined = Launch(
            flash_backward_joined_kernel,
            programs_q + tiles_of(spec, spec.N_KV, tile.walk) * spec.B * y.dk.shape[1],
            (x.q, x.k, x.v, y.do, y.o, y.dq, y.dk, y.dv, y.lse, y.dlse, y.delta, *packed),
            (steps, programs_q, *facts(spec), tile.own, tile.walk, heads, load),
            options(tile),
        )
        return [joined]
    return [
        Launch(
            flash_backward_dq_kernel,
            tiles_of(spec, spec.N_Q, dq.own) * spec.B * spec.H,
            (x.q, x.k, x.v, y.do, y.o, y.dq, y.lse, y.dlse, y.delta, *packed),
            (strides(x.q, x.k, x.v, y.do, y.o, y.dq), *facts(spec), dq.own, dq.walk, load),
            options(dq),
            {0: dq.own, 1: dq.walk, 2: dq.walk, 3: dq.own} if load == "tma" else {},
        ),
        Launch(
            flash_backward_dkdv_kernel,
            tiles_of(spec, spec.N_KV, dkdv.own) * spec.B * y.dk.shape[1],
            (x.q, x.k, x.v, y.do, y.dk, y.dv, y.lse, y.delta, *packed),
            (strides(x.q, x.k, x.v, y.do, y.dk, y.dv), *facts(spec), dkdv.walk, dkdv.own, heads, load),
            options(dkdv),
            {0: dkdv.walk, 1: dkdv.own, 2: dkdv.own, 3: dkdv.walk} if load == "tma" else {},
        ),
    ]


def chosen(spec: FlashSpec) -> TritonTiles:
    tiles: TritonTiles = dispatch.choose("flash", spec, "triton").tile
    return tiles


def forward(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor | None]:
    o, lse = empty_outputs(spec, x)
    if spec.has_kv_lengths:
        choice = dispatch.choose("flash", spec, "triton")
        parts = triton_cache.empty_parts(spec, choice.splits, x.q.device)
        run_all(triton_cache.launches(spec, choice.tile, choice.splits, x, o, lse, parts), spec.device)
    else:
        run_all([forward_launch(spec, chosen(spec), x, o, lse)], spec.device)
    return o, lse


def prepare(spec: FlashSpec, x: Residuals) -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """The forward of calls with these shapes and strides at the least cost for the host."""
    if not preparable(spec) or (spec.has_sinks and spec.sequences is not None):  # whose lse is filled first
        return None
    o, lse = empty_outputs(spec, x)
    new_o, new_lse = allocator(o), (lambda: None) if lse is None else allocator(lse)
    if spec.has_kv_lengths:
        choice = dispatch.choose("flash", spec, "triton")
        repeat = triton_cache.ready(spec, choice.tile, choice.splits, x, o, lse)

        def over_cache(
            q: Tensor, k: Tensor, v: Tensor, sinks: Any, cu_q: Any, _k: None, lengths: Tensor, table: Any
        ) -> tuple[Tensor, Tensor | None]:
            o, lse = new_o(), new_lse()
            repeat(q, k, v, sinks, cu_q, lengths, table, o, lse)
            return o, lse

        return over_cache
    launch = Ready(forward_launch(spec, chosen(spec), x, o, lse), spec.device)

    def again(q: Tensor, k: Tensor, v: Tensor, sinks: Any, cu_q: Any, cu_k: Any) -> tuple[Tensor, Tensor | None]:
        o, lse = new_o(), new_lse()
        launch(q, k, v, o, lse, sinks, cu_q, cu_k)
        return o, lse

    return again


def preparable(spec: FlashSpec) -> bool:
    """Whether launches can be repeated past Triton's own: on a GPU."""
    return spec.device.type == "cuda" and not triton.knobs.runtime.interpret


def empty_gradients(spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Backward:
    each = chosen(spec).heads_summed < spec.group  # dk and dv of query heads, to be summed
    heads, dtype = (spec.H, torch.float32) if each else (spec.H_KV, spec.dtype)
    dq = empty_rows(x.q, spec.H, spec.D)
    dk, dv = empty_rows(x.k, heads, spec.D, dtype), empty_rows(x.v, heads, spec.E, dtype)
    delta = torch.empty_like(lse) if chosen(spec).joined is None or spec.has_sinks else None
    return Backward(o, lse, do, dlse, delta, dq, dk, dv)


def gradients(spec: FlashSpec, x: Residuals, y: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What is left after the launches: sums over query heads, and the sinks' gradient."""
    dk, dv, dsinks = y.dk, y.dv, None
    if dk.shape[1] != spec.H_KV:
        dk, dv = empty_rows(x.k, spec.H_KV, spec.D), empty_rows(x.v, spec.H_KV, spec.E)
        for shared, each in ((dk, y.dk), (dv, y.dv)):
            shared.copy_(each.unflatten(1, (spec.H_KV, spec.group)).sum(2))
    if x.sinks is not None:  # a sink of -inf is none: then a row may have seen nothing
        assert y.delta is not None
        drawn = torch.exp(x.sinks.float()[:, None] - y.lse) * y.delta
        dsinks = -drawn.masked_fill(y.lse == -torch.inf, 0.0).sum((0, 2)).to(x.sinks.dtype)
    return y.dq, dk, dv, dsinks


def backward(
    spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    y = empty_gradients(spec, x, o, lse, do, dlse)
    run_all(backward_launches(spec, chosen(spec), x, y), spec.device)
    return gradients(spec, x, y)


def prepare_backward(
    spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] | None:
    """The backward of such calls at the least cost for the host."""
    if not preparable(spec):
        return None
    y = empty_gradients(spec, x, o, lse, do, dlse)
    launches = [Ready(launch, spec.device) for launch in backward_launches(spec, chosen(spec), x, y)]
    new_dq, new_dk, new_dv = allocator(y.dq), allocator(y.dk), allocator(y.dv)
    new_delta = (lambda: None) if y.delta is None else allocator(y.delta)
    plain = y.dk.shape[1] == spec.H_KV and x.sinks is None

    def joined(
        q: Tensor, k: Tensor, v: Tensor, _s: Any, cu_q: Any, cu_k: Any, o: Tensor, lse: Tensor, do: Tensor, dlse: Any
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        launch(q, k, v, do, o, dq, dk, dv, lse, dlse, None, cu_q, cu_k)
        return dq, dk, dv, None

    def again(
        q: Tensor, k: Tensor, v: Tensor, sinks: Any, cu_q: Any, cu_k: Any, o: Tensor, lse: Tensor, do: Tensor, dlse: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        delta, dq, dk, dv = new_delta(), new_dq(), new_dk(), new_dv()
        if len(launches) == 1:
            launches[0](q, k, v, do, o, dq, dk, dv, lse, dlse, delta, cu_q, cu_k)
        else:
            launches[0](q, k, v, do, o, dq, lse, dlse, delta, cu_q, cu_k)
            launches[1](q, k, v, do, dk, dv, lse, delta, cu_q, cu_k)
        if plain:
            return dq, dk, dv, None
        return gradients(spec, Residuals(q, k, v, sinks, cu_q, cu_k), Backward(o, lse, do, dlse, delta, dq, dk, dv))

    if len(launches) == 1 and plain:  # the shortest calls
        (launch,) = launches
        return joined
    return again


register(
    "flash",
    "triton",
    supports=supports,
    forward=forward,
    backward=backward,
    prepare=prepare,
    prepare_backward=prepare_backward,
)
