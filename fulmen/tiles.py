"""Triton device functions shared by kernels: loading rows, packed sequences, masks."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def padded(size):
    """The width of a tile that holds `size` columns: products want powers of two, 16 at least."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def at_head(x, strides, b, h, row):
    """Pointer to `row` of head h of batch entry b; strides are those of B, heads and N."""
    row = tl.cast(row, tl.int64)  # a loop's counter is a number to the interpreter
    return x + b.to(tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1] + row * strides[2]


@triton.jit
def load_rows(
    x,  # a pointer, or with LOAD "tma" a descriptor of blocks [1, 1, BLOCK, padded(SIZE)]
    strides,
    b,
    h,
    row,
    end,  # rows from here on are zero
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOAD: tl.constexpr,  # "tma", "narrow" (pointers; BLOCK rows span less than 2^31 elements) or "wide"
    MASK_ROWS: tl.constexpr,
):
    """Rows `row` to `row + BLOCK` of a head: [BLOCK, padded(SIZE)], zero beyond `end` and SIZE."""
    WIDTH: tl.constexpr = padded(SIZE)
    if LOAD == "tma":
        return x.load([b, h, row, 0]).reshape(BLOCK, WIDTH)
    else:
        offs_n = tl.arange(0, BLOCK)
        offs_d = tl.arange(0, WIDTH)
        if LOAD == "wide":
            offs = offs_n.to(tl.int64)[:, None] * strides[2] + offs_d[None, :]
        else:
            offs = offs_n[:, None] * strides[2] + offs_d[None, :]
        ptrs = at_head(x, strides, b, h, row) + offs
        if MASK_ROWS and SIZE != WIDTH:
            return tl.load(ptrs, mask=(row + offs_n < end)[:, None] & (offs_d < SIZE)[None, :], other=0.0)
        elif MASK_ROWS:
            return tl.load(ptrs, mask=(row + offs_n < end)[:, None], other=0.0)
        elif SIZE != WIDTH:
            return tl.load(ptrs, mask=(offs_d < SIZE)[None, :], other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def store_rows(x, strides, b, h, row, end, value, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes value [BLOCK, padded(SIZE)] to rows `row` on, as far as they are before `end`."""
    offs_n = tl.arange(0, BLOCK)
    offs_d = tl.arange(0, padded(SIZE))
    ptrs = at_head(x, strides, b, h, row) + offs_n.to(tl.int64)[:, None] * strides[2] + offs_d[None, :]
    mask = (row + offs_n < end)[:, None] & (offs_d < SIZE)[None, :]
    tl.store(ptrs, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def offset_at(cu_ptr, i, N):
    """Where packed sequence i begins; clamped, so that a wrong cu_seqlens cannot reach foreign memory."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + i), 0), N)


@triton.jit
def find_tile(cu_ptr, slot, sequences, N, BLOCK: tl.constexpr, group=1):
    """(sequence, tile within it) of the `slot`-th tile of packed sequences, whose tokens have `group` rows each.

    Sequence i gets the slots from begin_i * group // BLOCK + i on: that is room enough for its tiles whatever the
    lengths, and known without the sequences before it, so a search takes the place of a sum on the host. Slots before
    the first sequence, if it does not begin at 0, are like those behind the last.
    """
    low = 0
    high = sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = offset_at(cu_ptr, middle, N) * group // BLOCK + middle <= slot
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    first = offset_at(cu_ptr, low, N) * group // BLOCK + low
    return low, tl.where(slot < first, N * group // BLOCK + 1, slot - first)


@triton.jit
def visible(position, key, left, right):
    """Whether a query at `position` sees `key`, by the window alone."""
    seen = key >= 0
    if left is not None:
        seen = seen & (key >= position - left)
    if right is not None:
        seen = seen & (key <= position + right)
    return seen


@triton.jit
def key_ranges(first, last, N, left, right, BLOCK: tl.constexpr):
    """Keys that queries at positions `first` to `last` see, as (start, full_start, full_end, end).

    All queries see all keys from full_start to full_end; the ranges before and after it need a mask. All but `end`
    are multiples of BLOCK.
    """
    start = 0
    full_start = 0
    if left is not None:
        start = tl.maximum(first - left, 0) // BLOCK * BLOCK
        full_start = tl.cdiv(tl.maximum(last - left, 0), BLOCK) * BLOCK
    end = N
    full_end = N
    if right is not None:
        end = tl.minimum(tl.maximum(last + right + 1, 0), N)
        full_end = tl.minimum(tl.maximum(first + right + 1, 0), N)
    full_end = tl.maximum(full_end // BLOCK * BLOCK, full_start)
    return start, full_start, full_end, end


@triton.jit
def query_ranges(first, last, N, shift, left, right, BLOCK: tl.constexpr):
    """Rows of queries (at position row + shift) that see keys `first` to `last`; as `key_ranges`."""
    start = 0
    full_start = 0
    if right is not None:
        start = tl.maximum(first - right - shift, 0) // BLOCK * BLOCK
        full_start = tl.cdiv(tl.maximum(last - right - shift, 0), BLOCK) * BLOCK
    end = N
    full_end = N
    if left is not None:
        end = tl.minimum(tl.maximum(last + left - shift + 1, 0), N)
        full_end = tl.minimum(tl.maximum(first + left - shift + 1, 0), N) // BLOCK * BLOCK
    full_end = tl.maximum(full_end, full_start)
    return start, full_start, full_end, end


@triton.jit
def tanh(x):
    large = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)  # which cancels where x is small
    return tl.where(tl.abs(x) < 0.03, x - x * x * x * (1.0 / 3.0), large)
