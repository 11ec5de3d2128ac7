"""The sweep of lightning attention in Triton: `triton.py` says what it computes, and launches it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fulmen.lightning.tokens import FORGOTTEN, SPAN, begin, meet, token_decays
from fulmen.tiles import LOG2E, at_head


class Rows(NamedTuple):
    """A (B, heads, N, size) tensor as the kernel sees it; `group` query heads share one stored head."""

    ptr: Any
    stride_b: int
    stride_h: int
    stride_n: int
    group: int = 1


class Tensors(NamedTuple):
    """What the sweeps of one launch read and write: Rows, or None."""

    q: Rows | None = None
    k: Rows | None = None
    v: Rows | None = None
    o: Rows | None = None
    do: Rows | None = None
    dq: Rows | None = None
    dk: Rows | None = None
    dv: Rows | None = None


class States(NamedTuple):
    """fp32 (sequences, H, segments, D, E), of packed sequences that are split (segments, H, D, E), contiguous, or None:
    the states that enter and leave the rows a program walks, and their gradients."""

    initial: Any = None
    final: Any = None
    dfinal: Any = None
    dinitial: Any = None


class Tokens(NamedTuple):
    """A decay (B, H, N) for each token, as `Rows`, and what a sweep leaves beside rows and states; fp32, or None."""

    ptr: Any = None
    stride_b: int | None = None
    stride_h: int | None = None
    stride_n: int | None = None
    group: int = 1
    dots: Any = None  # (B, H, tiles of columns, N): q . dq of the sweep dq, k . dk of dk
    keeps: Any = None  # what a segment leaves of the state that enters it, one number for each of `states`
    gradients: Any = None  # with dots, (B * H, slots, D, E): before every SPAN-th row the state's, which dk leaves
    anchors: Any = None  # (B * H, slots, tiles): and its product with the state, which dq leaves
    entered: Any = None  # (B * H, chunks, tiles): and the part of q . dq that comes from the state, or infinity
    slots: int | None = None


@triton.jit
def at_row(rows, pid_b, pid_h, row):
    """Pointer to `row` of this program's head, and the row stride."""
    stride = tl.cast(rows.stride_n, tl.int64)
    head = (pid_h // rows.group).to(tl.int64)
    return rows.ptr + pid_b.to(tl.int64) * rows.stride_b + head * rows.stride_h + row * stride, stride


@triton.jit
def open_sweep(tensors, pid_b, pid_h, row, SWEEP: tl.constexpr):
    """Pointers to `row` of a sweep's operands a, b, c, out, each with its row stride."""
    if SWEEP == "o":
        a, b, c, out = tensors.q, tensors.k, tensors.v, tensors.o
    elif SWEEP == "dq":
        a, b, c, out = tensors.do, tensors.v, tensors.k, tensors.dq
    elif SWEEP == "dk":
        a, b, c, out = tensors.v, tensors.do, tensors.q, tensors.dk
    elif SWEEP == "dv":
        a, b, c, out = tensors.k, tensors.q, tensors.do, tensors.dv
    elif SWEEP == "state":  # gathers a state from b and c, writes no rows
        a, b, c, out = tensors.k, tensors.k, tensors.v, tensors.v
    else:
        tl.static_assert(SWEEP == "dstate")
        a, b, c, out = tensors.q, tensors.q, tensors.do, tensors.do
    a_ptr, a_stride = at_row(a, pid_b, pid_h, row)
    b_ptr, b_stride = at_row(b, pid_b, pid_h, row)
    c_ptr, c_stride = at_row(c, pid_b, pid_h, row)
    out_ptr, out_stride = at_row(out, pid_b, pid_h, row)
    return a_ptr, a_stride, b_ptr, b_stride, c_ptr, c_stride, out_ptr, out_stride


@triton.jit
def open_sweeps(tensors, pid_b, pid_h, row, pid_sweep, SWEEPS: tl.constexpr):
    """`open_sweep` of the one of SWEEPS that is this program's."""
    a_ptr, a_stride, b_ptr, b_stride, c_ptr, c_stride, out_ptr, out_stride = open_sweep(
        tensors, pid_b, pid_h, row, tl.constexpr(SWEEPS[0])
    )
    for i in tl.static_range(1, len(SWEEPS)):
        mine = pid_sweep == i
        a_i, a_stride_i, b_i, b_stride_i, c_i, c_stride_i, out_i, out_stride_i = open_sweep(
            tensors, pid_b, pid_h, row, tl.constexpr(SWEEPS[i])
        )
        a_ptr, a_stride = tl.where(mine, a_i, a_ptr), tl.where(mine, a_stride_i, a_stride)
        b_ptr, b_stride = tl.where(mine, b_i, b_ptr), tl.where(mine, b_stride_i, b_stride)
        c_ptr, c_stride = tl.where(mine, c_i, c_ptr), tl.where(mine, c_stride_i, c_stride)
        out_ptr, out_stride = tl.where(mine, out_i, out_ptr), tl.where(mine, out_stride_i, out_stride)
    return a_ptr, a_stride, b_ptr, b_stride, c_ptr, c_stride, out_ptr, out_stride


@triton.jit
def as_operand(state, DTYPE: tl.constexpr):
    """`state` as a tensor-core operand, and the factor that undoes its scaling.

    A sum of k v^T passes fp16's 65,504 long before the output does, so fp16 gets it times a power of two.
    """
    if DTYPE == tl.float16:
        exponent = tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(state)), 1e-30)))
        return (state * tl.exp2(13.0 - exponent)).to(DTYPE), tl.exp2(exponent - 13.0)
    else:
        return state.to(DTYPE), 1.0


@triton.jit
def with_chunk(state, c, b):
    """state + c b.

    A tensor core cuts off what it adds to, and over 2^20 rows that is more than fp16 rounds. So fp16, where there are
    registers for it, makes the product apart and adds it: by an fma, as the compiler makes a plain sum the product's.
    """
    if b.dtype == tl.float16 and b.shape[1] <= 128:
        return tl.fma(tl.dot(c, b), 1.0, state)
    else:
        return tl.dot(c, b, state, input_precision="ieee")


@triton.jit
def owned(number, segment_offsets_ptr, num_segments, H):
    """(sequence, head, segment) of a program, by its number; see the kernel's arguments."""
    if segment_offsets_ptr is None:
        sequence, h = number // num_segments // H, number // num_segments % H
        segment = number % num_segments
    else:  # the last sequence that begins with this segment or before
        h = number % H
        sequence = 0
        beyond = num_segments
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            before = tl.load(segment_offsets_ptr + middle) <= number // H
            sequence = tl.where(before, middle, sequence)
            beyond = tl.where(before, beyond, middle)
        segment = number // H - tl.load(segment_offsets_ptr + sequence)
    return sequence, h, segment


@triton.jit
def walked_rows(
    sequence, pid_segment, segment, cu_seqlens_ptr, N, C: tl.constexpr, REVERSE: tl.constexpr, TOKENS: tl.constexpr
):
    """What a program walks: batch entry, the first row of its first chunk, how many rows, the last chunk's place, that
    row's place in the sequence, and the sequence's first span.

    Right to left chunks and segments end where the sequence does. With a decay for each token they are those of the
    way from left to right.
    """
    if cu_seqlens_ptr is None:
        pid_b = sequence
        begin = 0
        end = N
    else:  # clamped: a wrong cu_seqlens must not reach foreign memory
        pid_b = sequence * 0
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence), 0), N)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence + 1), begin), N)
    skip = pid_segment * segment
    if TOKENS and REVERSE:
        skip = (tl.cdiv(end - begin, segment) - 1 - pid_segment) * segment
    length = tl.minimum(end - begin - skip, segment)
    last = tl.maximum(tl.cdiv(length, C) - 1, 0) * C
    row = end - skip - C if REVERSE else begin + skip
    if TOKENS and REVERSE:
        length = tl.where(skip < 0, 0, length)  # there is no such segment
        row = begin + skip + last
    slot = 0 if cu_seqlens_ptr is None else begin // SPAN + sequence
    return pid_b, row, length, last, row - begin, slot


@triton.jit
def rows_at(ptr, stride, offs_n, offs_v, mask_n, mask_v):
    """Rows of a tensor, as columns: [V, C]."""
    ptrs = ptr + offs_n[None, :] * stride + offs_v[:, None]
    return tl.load(ptrs, mask=mask_v[:, None] & mask_n[None, :], other=0.0)


@triton.jit
def entered(state, states, offs, plain, swapped, mask, scale, SWEEP: tl.constexpr):
    """`state` and what enters a sweep."""
    if SWEEP == "o" and states.initial is not None:
        state += tl.load(states.initial + offs + plain, mask=mask, other=0.0)
    if SWEEP == "dq" and states.initial is not None:
        state += tl.load(states.initial + offs + swapped, mask=mask, other=0.0)
    if SWEEP == "dv" and states.dfinal is not None:
        state += tl.load(states.dfinal + offs + plain, mask=mask, other=0.0) / scale
    if SWEEP == "dk" and states.dfinal is not None:
        state += tl.load(states.dfinal + offs + swapped, mask=mask, other=0.0) / scale
    return state


@triton.jit
def leave(state, states, offs, mask, scale, SWEEP: tl.constexpr):
    """Stores what leaves a sweep."""
    if (SWEEP == "o" or SWEEP == "state") and states.final is not None:
        tl.store(states.final + offs, state, mask=mask)
    if (SWEEP == "dv" or SWEEP == "dstate") and states.dinitial is not None:
        tl.store(states.dinitial + offs, state * scale, mask=mask)


@triton.jit
def lightning_sweep_kernel(
    tensors,  # Tensors
    states,  # States
    decay_ptr,  # (H,) fp32, or None
    tokens,  # Tokens
    cu_seqlens_ptr,  # (sequences + 1,) int32, or None
    segment_offsets_ptr,  # (sequences + 1,) int32, the first segment of each packed sequence that is split; or None
    H,
    N,
    segment,  # rows one program walks: N, unless the sequence is split over programs
    num_segments,  # of each sequence; where segment_offsets_ptr is given, how many sequences there are
    scale,
    SWEEPS: tl.constexpr,  # tuple of names, all with the same K, V and direction
    ROW_STRIDE: tl.constexpr,  # of all operands, or 0 if they differ; known, it saves 20 registers
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    # who am I: column tiles innermost, then sweeps, so that programs that read the same rows run side by side
    NUM_SWEEPS: tl.constexpr = len(SWEEPS)
    TILES_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    TOKENS: tl.constexpr = tokens.ptr is not None
    DOTS: tl.constexpr = tokens.dots is not None
    HAS_OUT: tl.constexpr = SWEEPS[0] != "state" and SWEEPS[0] != "dstate"
    REVERSE: tl.constexpr = SWEEPS[0] == "dk" or SWEEPS[0] == "dv" or SWEEPS[0] == "dstate"
    STEP: tl.constexpr = -C if REVERSE else C
    pid = tl.program_id(0)
    pid_v, pid_sweep = pid % TILES_V, pid // TILES_V % NUM_SWEEPS
    rest = pid // (TILES_V * NUM_SWEEPS)
    pid_sequence, pid_h, pid_segment = owned(rest, segment_offsets_ptr, num_segments, H)
    pid_b, row, length, last, place_0, slot = walked_rows(
        pid_sequence, pid_segment, segment, cu_seqlens_ptr, N, C, REVERSE, TOKENS
    )

    # which sweep: merged into one set of pointers, so that the loop below exists once
    a_ptr, a_stride, b_ptr, b_stride, c_ptr, c_stride, out_ptr, out_stride = open_sweeps(
        tensors, pid_b, pid_h, row, pid_sweep, SWEEPS
    )
    offs_c = tl.arange(0, C)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = pid_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_a = offs_c[:, None] * (ROW_STRIDE if ROW_STRIDE else a_stride) + offs_k[None, :]
    offs_b = offs_c[:, None] * (ROW_STRIDE if ROW_STRIDE else b_stride) + offs_k[None, :]
    offs_cv = offs_c[:, None] * (ROW_STRIDE if ROW_STRIDE else c_stride) + offs_v[None, :]
    offs_out = offs_c[None, :] * (ROW_STRIDE if ROW_STRIDE else out_stride) + offs_v[:, None]
    mask_k, mask_v = offs_k < K, offs_v < V
    FP32: tl.constexpr = b_ptr.dtype.element_ty == tl.float32

    # what stays resident: the state, and the decay within a chunk; `place` is a row's turn in walking order
    place = C - 1 - offs_c if REVERSE else offs_c
    LAG: tl.constexpr = 0 if REVERSE else 1
    mask = tl.where(place[:, None] <= place[None, :], scale, 0.0)  # [C (j), C (i)]
    if decay_ptr is not None:
        slope = tl.load(decay_ptr + pid_h)
        rate = -LOG2E * slope
        chunk_decay = tl.exp2(rate * C)
        if FP32:  # N / C products of a rounded factor would drift: keep what rounding it lost, too
            exact = tl.exp(slope.to(tl.float64) * -C)
            chunk_decay = exact.to(tl.float32)
            decay_rest = (exact - chunk_decay).to(tl.float32)
        mask *= tl.exp2(rate * tl.maximum(place[None, :] - place[:, None], 0))
        a_decay = tl.exp2(rate * (place + LAG)) * scale
    offs_state = rest.to(tl.int64) * (K * V)
    plain = offs_k[None, :] * V + offs_v[:, None]  # states are stored [D, E]: where K is D,
    swapped = offs_k[None, :] + offs_v[:, None] * K  # and where K is E
    mask_state = mask_k[None, :] & mask_v[:, None]
    state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    for i in tl.static_range(NUM_SWEEPS):
        mine = mask_state & (pid_sweep == i)
        state = entered(state, states, offs_state, plain, swapped, mine, scale, tl.constexpr(SWEEPS[i]))

    # a state alone: rows from whose time less than 2^-FORGOTTEN is left need not be read
    first = 0
    if not HAS_OUT and decay_ptr is not None:
        seen = 1 + tl.minimum(FORGOTTEN / (LOG2E * tl.maximum(slope, 1e-30)), 2.0e9).to(tl.int32)
        first = tl.maximum(length - seen, 0) // C * C
        b_ptr += first // C * STEP * b_stride
        c_ptr += first // C * STEP * c_stride

    passed = 1.0  # what is left of the state that entered
    if TOKENS:
        s_ptr, s_stride = at_row(tokens, pid_b, pid_h, row)
        if DOTS:
            d_ptr, d_stride = at_row(tensors.q if SWEEPS[0] == "dq" else tensors.k, pid_b, pid_h, row)
            dots_ptr = tokens.dots + ((pid_b.to(tl.int64) * H + pid_h) * TILES_V + pid_v) * N + row
            has_dots = pid_sweep == NUM_SWEEPS - 1  # of dv and dk the second
            slot += (pid_b * H + pid_h) * tokens.slots

    for start in range(first, length, C):
        left = length - start
        mask_c = offs_c >= C - left if REVERSE else offs_c < left  # place < left, in fewer registers
        if TOKENS:
            left += start + start - last if REVERSE else 0
            mask_c = offs_c < left
            shift = -start if REVERSE else start
            s = tl.load(s_ptr + (offs_c + shift) * s_stride, mask=mask_c, other=0.0)
            chunk_mask, a_decay_c, c_decay_c, keep_c, rest_c = token_decays(s, scale, C, REVERSE, FP32)
            passed *= keep_c
        b = tl.load(b_ptr + offs_b, mask=mask_c[:, None] & mask_k[None, :], other=0.0)  # [C, K]
        c = tl.load(c_ptr + offs_cv, mask=mask_c[:, None] & mask_v[None, :], other=0.0)  # [C, V]
        c_late = tl.trans(c)
        if DOTS and not REVERSE:
            meet(state, tokens, slot, place_0 + start, pid_v, scale, swapped, mask_state, True, TILES_V)
        if HAS_OUT:
            a = tl.load(a_ptr + offs_a, mask=mask_c[:, None] & mask_k[None, :], other=0.0)  # [C, K]
            p = tl.dot(b, tl.trans(a), input_precision="ieee")  # [C (j), C (i)]
            p *= chunk_mask if TOKENS else mask
            p = p.to(c.dtype)  # before the next product, which needs the registers
            operand, undo = as_operand(state, a.dtype)
            inter = tl.dot(operand, tl.trans(a), input_precision="ieee")  # [V, C]
            if TOKENS or decay_ptr is not None:
                inter *= ((a_decay_c if TOKENS else a_decay) * undo)[None, :]
            else:
                inter *= scale * undo
            if DOTS and not REVERSE:
                d = rows_at(d_ptr, d_stride, offs_c + shift, offs_v, mask_c, mask_v)
                begin(tl.sum(inter * d), keep_c, tokens, slot, place_0 + start, pid_v, a.dtype, C, TILES_V)
            out = tl.dot(tl.trans(c), p, inter, input_precision="ieee")
            mask_out = mask_v[:, None] & mask_c[None, :]
            tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask_out)
            if DOTS:
                if REVERSE:
                    d = rows_at(d_ptr, d_stride, offs_c + shift, offs_v, mask_c & has_dots, mask_v)
                tl.store(dots_ptr + offs_c + shift, tl.sum(out * d, axis=0), mask=mask_c & has_dots)
        if TOKENS:
            c_late = (c_late * c_decay_c[None, :]).to(c.dtype)
            state = state * keep_c + state * rest_c if FP32 else state * keep_c
        elif decay_ptr is not None:
            walked = tl.minimum(left, C)
            c_decay = tl.exp2(rate * tl.maximum(walked - LAG - place, 0))
            c_late = (c_late * c_decay[None, :]).to(c.dtype)
            keep = tl.where(left >= C, chunk_decay, tl.exp2(rate * walked))
            state = state * keep + state * tl.where(left >= C, decay_rest, 0.0) if FP32 else state * keep
        state = with_chunk(state, c_late, b)  # [V, K]
        if DOTS and REVERSE:
            meet(state, tokens, slot, place_0 - start, pid_v, scale, swapped, mask_state & has_dots, False, TILES_V)
        a_ptr += STEP * a_stride
        b_ptr += STEP * b_stride
        c_ptr += STEP * c_stride
        out_ptr += STEP * out_stride

    # the state that leaves the rows
    for i in tl.static_range(NUM_SWEEPS):
        mine = mask_state & (pid_sweep == i)
        leave(state, states, offs_state + plain, mine, scale, tl.constexpr(SWEEPS[i]))
    if tokens.keeps is not None:
        tl.store(tokens.keeps + rest, passed)


@triton.jit
def lightning_sum_heads_kernel(
    x_ptr,  # (B, heads * group, N, SIZE)
    y_ptr,  # (B, heads, N, SIZE), written
    x_strides,  # of B, heads and N
    y_strides,
    heads,
    group,
    N,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # rows
    WIDTH: tl.constexpr,
):
    """y = the sum over the `group` heads that share a stored one. Programs are (batch entry, head, BLOCK rows)."""
    blocks = tl.cdiv(N, BLOCK)
    unit, row = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    b, h = unit // heads, unit % heads
    offs_n, offs_d = row + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    mask = (offs_n < N)[:, None] & (offs_d < SIZE)[None, :]
    rows = tl.cast(offs_n, tl.int64)[:, None]
    at = at_head(x_ptr, x_strides, b, h * group, 0) + rows * x_strides[2] + offs_d[None, :]
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for _ in range(group):
        total += tl.load(at, mask=mask, other=0.0)
        at += x_strides[1]
    to = at_head(y_ptr, y_strides, b, h, 0) + rows * y_strides[2] + offs_d[None, :]
    tl.store(to, total.to(y_ptr.dtype.element_ty), mask=mask)
