"""The backward of backend `triton`, in one launch or two, without atomics, so the same result every time.

p comes back as 2^(s - lse), and

    dq      owns queries, walks keys:  delta = rowsum(do * o) - dlse,  ds = p * (do v^T - delta),  dq = scale ds k
    dkdv    owns keys, walks queries, of all heads that share them or of one:  dv = p^T do,  dk = scale ds^T q

dkdv computes s^T and ds^T, so that both are operands as they come out of the tensor cores: nothing is transposed. Seven
products where five would do; the two more cost less than adding dq up in memory would. Where every query of a tile sees
every key of a block no mask is computed: causal and windowed calls walk the edges in loops of their own.

    two launches    flash_backward_dq_kernel stores delta for flash_backward_dkdv_kernel
    one launch      flash_backward_joined_kernel: small calls, over before a second launch reaches the GPU. The
                    first programs are dq's, the others dkdv's, which compute delta themselves
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.tiles import (
    LOG2E,
    find_tile,
    key_ranges,
    load_rows,
    offset_at,
    padded,
    query_ranges,
    store_rows,
    tanh,
    visible,
)


@triton.jit
def open_tile(
    pid, programs, cu_q_ptr, cu_k_ptr, heads, N_Q, N_KV,
    OF_KEYS: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Who am I: (head, first row, begin_q, length_q, begin_k, length_k), of `heads` times the tiles of q or k."""
    tiles = programs // heads
    tile = pid % tiles  # tiles of a head run side by side, so that its keys stay in the L2 cache
    head = pid // tiles
    if REVERSE:  # the longest first
        tile = tiles - 1 - tile
    begin_q, begin_k = 0, 0
    length_q, length_k = N_Q, N_KV
    if cu_q_ptr is not None:
        if OF_KEYS:
            sequence, tile = find_tile(cu_k_ptr, tile, tiles - N_KV // BLOCK, N_KV, BLOCK)
        else:
            sequence, tile = find_tile(cu_q_ptr, tile, tiles - N_Q // BLOCK, N_Q, BLOCK)
        begin_q = offset_at(cu_q_ptr, sequence, N_Q)
        begin_k = offset_at(cu_k_ptr, sequence, N_KV)
        length_q = tl.maximum(offset_at(cu_q_ptr, sequence + 1, N_Q) - begin_q, 0)
        length_k = tl.maximum(offset_at(cu_k_ptr, sequence + 1, N_KV) - begin_k, 0)
    return head, tile * BLOCK, begin_q, length_q, begin_k, length_k


@triton.jit
def logits(s, scale, softcap):
    """Base-2 logits of the products s = q k^T, and the slope of the cap (1 without)."""
    if softcap is not None:
        t = tanh(s * (scale / softcap))
        return t * (softcap * LOG2E), 1.0 - t * t
    else:
        return s * (scale * LOG2E), 1.0


@triton.jit
def dq_keys(
    dq, q, do, lse, delta, k, v, strides, b, h_kv, position, begin_k, N, start, end, scale, softcap, left, right,
    D: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, LOAD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from `start` to `end` give to dq, but for the factor `scale`."""
    for n in tl.range(start, end, BLOCK_N):
        k_n = load_rows(k, strides[1], b, h_kv, begin_k + n, begin_k + N, D, BLOCK_N, LOAD, MASK)
        v_n = load_rows(v, strides[2], b, h_kv, begin_k + n, begin_k + N, E, BLOCK_N, LOAD, MASK)
        s = tl.dot(q, tl.trans(k_n))  # [M, N]
        dp = tl.dot(do, tl.trans(v_n))
        s, slope = logits(s, scale, softcap)
        p = tl.exp2(s - lse[:, None])
        if MASK:
            key = n + tl.arange(0, BLOCK_N)
            seen = visible(position[:, None], key[None, :], left, right) & (key < N)[None, :]
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[:, None]) * slope
        dq = tl.dot(ds.to(k_n.dtype), k_n, dq)  # [M, D]
    return dq


@triton.jit
def delta_of(
    o, do_m, dlse_ptr, o_strides, b, h, offs, begin_q, m, N,
    E: tl.constexpr, BLOCK_M: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """rowsum(do * o) - dlse of the BLOCK_M queries from m on, of N; `offs`: where the numbers of the head begin."""
    o_m = load_rows(o, o_strides, b, h, begin_q + m, begin_q + N, E, BLOCK_M, LOAD, True)
    delta = tl.sum(o_m.to(tl.float32) * do_m.to(tl.float32), 1)
    if dlse_ptr is not None:
        row = m + tl.arange(0, BLOCK_M)
        delta -= tl.load(dlse_ptr + offs + row, mask=row < N, other=0.0)
    return delta


@triton.jit
def dq_tile(
    pid, programs, q, k, v, do, o, dq, lse_ptr, dlse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, strides, dq_strides,
    B, H, GROUP, N_Q, N_KV, scale, softcap, left, right,
    TOP_LEFT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOAD: tl.constexpr, LOAD_O: tl.constexpr,
):  # fmt: skip
    """Program `pid` of `programs`: dq and, unless delta_ptr is None, delta of BLOCK_M queries."""
    head, m0, begin_q, N_Q_, begin_k, N_KV_ = open_tile(
        pid, programs, cu_q_ptr, cu_k_ptr, B * H, N_Q, N_KV, False, right is not None, BLOCK_M
    )
    b = head // H
    h = head % H
    h_kv = h // GROUP
    row = m0 + tl.arange(0, BLOCK_M)
    shift = 0 if TOP_LEFT else N_KV_ - N_Q_
    position = row + shift

    # what stays resident
    q_m = load_rows(q, strides[0], b, h, begin_q + m0, begin_q + N_Q_, D, BLOCK_M, LOAD, True)
    do_m = load_rows(do, strides[3], b, h, begin_q + m0, begin_q + N_Q_, E, BLOCK_M, LOAD, True)
    offs = head.to(tl.int64) * N_Q + begin_q
    delta = delta_of(o, do_m, dlse_ptr, strides[4], b, h, offs, begin_q, m0, N_Q_, E, BLOCK_M, LOAD_O)
    mask_m = row < N_Q_
    if delta_ptr is not None:
        tl.store(delta_ptr + offs + row, delta, mask=mask_m)
    lse = tl.load(lse_ptr + offs + row, mask=mask_m, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # a row that saw nothing: p = 0
    dq_m = tl.zeros([BLOCK_M, padded(D)], tl.float32)

    start, full_start, full_end, end = key_ranges(m0 + shift, m0 + BLOCK_M - 1 + shift, N_KV_, left, right, BLOCK_N)
    if m0 >= N_Q_:
        full_end = full_start
        end = start
    if left is not None:
        dq_m = dq_keys(
            dq_m, q_m, do_m, lse, delta, k, v, strides, b, h_kv, position, begin_k, N_KV_, start,
            tl.minimum(full_start, end), scale, softcap, left, right, D, E, BLOCK_N, LOAD, True,
        )  # fmt: skip
    dq_m = dq_keys(
        dq_m, q_m, do_m, lse, delta, k, v, strides, b, h_kv, position, begin_k, N_KV_, full_start, full_end,
        scale, softcap, left, right, D, E, BLOCK_N, LOAD, False,
    )  # fmt: skip
    dq_m = dq_keys(
        dq_m, q_m, do_m, lse, delta, k, v, strides, b, h_kv, position, begin_k, N_KV_, full_end, end,
        scale, softcap, left, right, D, E, BLOCK_N, LOAD, True,
    )  # fmt: skip
    store_rows(dq, dq_strides, b, h, begin_q + m0, begin_q + N_Q_, dq_m * scale, D, BLOCK_M)


@triton.jit
def dkdv_queries(
    dk, dv, k, v, q, do, o, lse_ptr, dlse_ptr, delta_ptr, strides, b, h, offs, key, shift, begin_q, N, start, end,
    scale, softcap, left, right,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, LOAD: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Adds what the queries from `start` to `end` give to dk (but for the factor `scale`) and dv."""
    for m in tl.range(start, end, BLOCK_M):
        q_m = load_rows(q, strides[0], b, h, begin_q + m, begin_q + N, D, BLOCK_M, LOAD, True)
        do_m = load_rows(do, strides[3], b, h, begin_q + m, begin_q + N, E, BLOCK_M, LOAD, True)
        row = m + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_ptr + offs + row, mask=row < N, other=float("-inf"))
        if delta_ptr is not None:
            delta = tl.load(delta_ptr + offs + row, mask=row < N, other=0.0)
        else:
            delta = delta_of(o, do_m, dlse_ptr, strides[4], b, h, offs, begin_q, m, N, E, BLOCK_M, LOAD)
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)  # no such row, or it saw nothing: p = 0
        s = tl.dot(k, tl.trans(q_m))  # [N, M]
        s, slope = logits(s, scale, softcap)
        p = tl.exp2(s - lse[None, :])
        if MASK:
            p = tl.where(visible((row + shift)[None, :], key[:, None], left, right), p, 0.0)
        dv = tl.dot(p.to(do_m.dtype), do_m, dv)  # [N, E]
        dp = tl.dot(v, tl.trans(do_m), tl.broadcast_to(-delta[None, :], p.shape))  # dp - delta, in fewer registers
        ds = p * dp * slope
        dk = tl.dot(ds.to(q_m.dtype), q_m, dk)  # [N, D]
    return dk, dv


@triton.jit
def dkdv_tile(
    pid, programs, q, k, v, do, o, dk, dv, lse_ptr, dlse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, strides, dk_strides,
    dv_strides, B, H, GROUP, N_Q, N_KV, scale, softcap, left, right,
    TOP_LEFT: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr, LOAD: tl.constexpr,
):  # fmt: skip
    """Program `pid` of `programs`: dk and dv of BLOCK_N keys; delta from delta_ptr, or else from o and dlse."""
    owners = H // HEADS
    head, n0, begin_q, N_Q_, begin_k, N_KV_ = open_tile(
        pid, programs, cu_q_ptr, cu_k_ptr, B * owners, N_Q, N_KV, True, False, BLOCK_N
    )
    b = head // owners
    owner = head % owners
    h_kv = owner * HEADS // GROUP
    key = n0 + tl.arange(0, BLOCK_N)
    shift = 0 if TOP_LEFT else N_KV_ - N_Q_

    # what stays resident
    k_n = load_rows(k, strides[1], b, h_kv, begin_k + n0, begin_k + N_KV_, D, BLOCK_N, LOAD, True)
    v_n = load_rows(v, strides[2], b, h_kv, begin_k + n0, begin_k + N_KV_, E, BLOCK_N, LOAD, True)
    dk_n = tl.zeros([BLOCK_N, padded(D)], tl.float32)
    dv_n = tl.zeros([BLOCK_N, padded(E)], tl.float32)

    start, full_start, full_end, end = query_ranges(n0, n0 + BLOCK_N - 1, N_Q_, shift, left, right, BLOCK_M)
    if n0 >= N_KV_:
        full_end = full_start
        end = start
    for i in range(HEADS):
        h = owner * HEADS + i
        offs = tl.cast(b * H + h, tl.int64) * N_Q + begin_q
        if right is not None:
            dk_n, dv_n = dkdv_queries(
                dk_n, dv_n, k_n, v_n, q, do, o, lse_ptr, dlse_ptr, delta_ptr, strides, b, h, offs, key, shift,
                begin_q, N_Q_, start, tl.minimum(full_start, end), scale, softcap, left, right, D, E, BLOCK_M, LOAD,
                True,
            )  # fmt: skip
        dk_n, dv_n = dkdv_queries(
            dk_n, dv_n, k_n, v_n, q, do, o, lse_ptr, dlse_ptr, delta_ptr, strides, b, h, offs, key, shift,
            begin_q, N_Q_, full_start, full_end, scale, softcap, left, right, D, E, BLOCK_M, LOAD, False,
        )  # fmt: skip
        if left is not None:
            dk_n, dv_n = dkdv_queries(
                dk_n, dv_n, k_n, v_n, q, do, o, lse_ptr, dlse_ptr, delta_ptr, strides, b, h, offs, key, shift,
                begin_q, N_Q_, full_end, end, scale, softcap, left, right, D, E, BLOCK_M, LOAD, True,
            )  # fmt: skip
    store_rows(dk, dk_strides, b, owner, begin_k + n0, begin_k + N_KV_, dk_n * scale, D, BLOCK_N)
    store_rows(dv, dv_strides, b, owner, begin_k + n0, begin_k + N_KV_, dv_n, E, BLOCK_N)


# ----------------------------------------------------------------------------------------------- kernels


@triton.jit
def flash_backward_dq_kernel(
    q, k, v, do,  # pointers, or descriptors with LOAD "tma"
    o, dq, lse_ptr,
    dlse_ptr,  # or None
    delta_ptr,  # written here, for the other kernel
    cu_q_ptr, cu_k_ptr,
    strides,  # of q, k, v, do, o, dq
    B, H, GROUP, N_Q, N_KV,
    scale,
    softcap, left, right,
    TOP_LEFT: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LOAD: tl.constexpr,
):  # fmt: skip
    dq_tile(
        tl.program_id(0), tl.num_programs(0), q, k, v, do, o, dq, lse_ptr, dlse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr,
        strides, strides[5], B, H, GROUP, N_Q, N_KV, scale, softcap, left, right, TOP_LEFT, D, E, BLOCK_M, BLOCK_N,
        LOAD, "wide",
    )  # fmt: skip


@triton.jit
def flash_backward_dkdv_kernel(
    q, k, v, do,  # pointers, or descriptors with LOAD "tma"
    dk, dv,  # with H / HEADS heads
    lse_ptr, delta_ptr,
    cu_q_ptr, cu_k_ptr,
    strides,  # of q, k, v, do, dk, dv
    B, H, GROUP, N_Q, N_KV,
    scale,
    softcap, left, right,
    TOP_LEFT: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,  # query heads a program sums over: those that share k and v, or one
    LOAD: tl.constexpr,
):  # fmt: skip
    dkdv_tile(
        tl.program_id(0), tl.num_programs(0), q, k, v, do, None, dk, dv, lse_ptr, None, delta_ptr, cu_q_ptr, cu_k_ptr,
        strides, strides[4], strides[5], B, H, GROUP, N_Q, N_KV, scale, softcap, left, right, TOP_LEFT, D, E, BLOCK_M,
        BLOCK_N, HEADS, LOAD,
    )  # fmt: skip


@triton.jit
def flash_backward_joined_kernel(
    q, k, v, do, o,
    dq,
    dk, dv,  # with H / HEADS heads
    lse_ptr,
    dlse_ptr,  # or None
    delta_ptr,  # written where sinks need it, or None
    cu_q_ptr, cu_k_ptr,
    strides,  # of q, k, v, do, o, dq, dk, dv
    programs_q,  # that own queries
    B, H, GROUP, N_Q, N_KV,
    scale,
    softcap, left, right,
    TOP_LEFT: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
    LOAD: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < programs_q:
        dq_tile(
            pid, programs_q, q, k, v, do, o, dq, lse_ptr, dlse_ptr, delta_ptr, cu_q_ptr, cu_k_ptr, strides, strides[5],
            B, H, GROUP, N_Q, N_KV, scale, softcap, left, right, TOP_LEFT, D, E, BLOCK_M, BLOCK_N, LOAD, LOAD,
        )  # fmt: skip
    else:
        dkdv_tile(
            pid - programs_q, tl.num_programs(0) - programs_q, q, k, v, do, o, dk, dv, lse_ptr, dlse_ptr, None,
            cu_q_ptr, cu_k_ptr, strides, strides[6], strides[7], B, H, GROUP, N_Q, N_KV, scale, softcap, left, right,
            TOP_LEFT, D, E, BLOCK_M, BLOCK_N, HEADS, LOAD,
        )  # fmt: skip
