"""Where the Hopper kernel finds its numbers, followed on a CPU: TMA's swizzle, wgmma's descriptors, its fragments.

The rules of the hardware are written down here as NVIDIA's PTX manual states them; the addresses are those that
cuda_sm90.cu computes. One tile of 64 queries goes from memory to memory, and must come out as attention.
"""

from __future__ import annotations

import numpy as np
import pytest

# ------------------------------------------------------------------------------------------ the hardware


def swizzled(address):
    """128-byte mode: bits 4 to 6 of an address are changed by bits 7 to 9."""
    return address ^ ((address >> 7 & 7) << 4)


def copy_box(shared, to, box):
    """TMA: a box of rows of 128 bytes, 64 numbers; `shared` holds a number for every two bytes."""
    rows, columns = np.indices(box.shape)
    shared[swizzled(to + rows * 128 + columns * 2) // 2] = box


def fields(descriptor: int) -> tuple[int, int, int]:
    """Start, leading and stride offsets in bytes; the layout must be the 128-byte swizzle."""
    assert descriptor >> 62 == 1
    assert descriptor >> 49 & 7 == 0
    return (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4


def along_k(shared, descriptor, rows):
    """[rows, 16] of an operand whose rows are contiguous in the index of the sum."""
    start, _, stride = fields(descriptor)
    r, k = np.indices((rows, 16))
    return shared[swizzled(start + r // 8 * stride + r % 8 * 128 + k * 2) // 2]


def across_k(shared, descriptor, columns):
    """[16, columns] of a transposed operand: contiguous along the columns, in panels of 64."""
    start, leading, stride = fields(descriptor)
    k, n = np.indices((16, columns))
    return shared[swizzled(start + k // 8 * stride + k % 8 * 128 + n // 64 * leading + n % 64 * 2) // 2]


def accumulator(thread, i):
    """(row, column) of register d[i] of a thread in a warpgroup."""
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    return 16 * warp + g + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * t + i % 2


def a_register(thread, i):
    """Rows and columns of the two numbers in register a[i] of an A operand of 16 columns."""
    warp, g, t = thread // 32, thread % 32 // 4, thread % 4
    row, column = 16 * warp + g + 8 * (i % 2), 2 * t + 8 * (i // 2)
    return (row, column), (row, column + 1)


# -------------------------------------------------------------------------------------------- the kernel


def operand(address: int, panel: int) -> int:
    return address >> 4 | (panel >> 4) << 16 | (1024 >> 4) << 32 | 1 << 62


def unit(r, c):
    """Byte of unit c of row r in the staged output of a warpgroup."""
    return c // 8 * 64 * 128 + r * 128 + ((c % 8 ^ r % 8) << 4)


@pytest.mark.parametrize("BLOCK_N", [128, 176])
@pytest.mark.parametrize("D", [64, 128])
def test_one_tile_comes_out_as_attention(D, BLOCK_N):
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(64, D)), random.normal(size=(BLOCK_N, D)), random.normal(size=(BLOCK_N, D))
    q_at, k_at = 1024, 1024 + 64 * D * 2
    v_at = k_at + BLOCK_N * D * 2
    shared = np.full((v_at + BLOCK_N * D * 2) // 2, np.nan)
    for i in range(D // 64):
        panel = slice(64 * i, 64 * i + 64)
        copy_box(shared, q_at + i * 64 * 128, q[:, panel])
        copy_box(shared, k_at + i * BLOCK_N * 128, k[:, panel])
        copy_box(shared, v_at + i * BLOCK_N * 128, v[:, panel])
    assert not np.isnan(shared[q_at // 2 :]).any()

    s = np.zeros((64, BLOCK_N))
    for d in range(D // 16):
        a = along_k(shared, operand(q_at, 16) + (d // 4 * 64 * 128 + d % 4 * 32) // 16, 64)
        b = along_k(shared, operand(k_at, 16) + (d // 4 * BLOCK_N * 128 + d % 4 * 32) // 16, BLOCK_N)
        s += a @ b.T
    np.testing.assert_allclose(s, q @ k.T, atol=1e-10)

    p = np.exp(s - s.max(1, keepdims=True))
    o = np.zeros((64, D))
    for j in range(BLOCK_N // 16):
        part = np.full((64, 16), np.nan)
        for thread in range(128):
            for i in range(4):  # p[4 j + i] = pack(s[2 (4 j + i)], s[2 (4 j + i) + 1])
                for at, register in zip(a_register(thread, i), (2 * (4 * j + i), 2 * (4 * j + i) + 1), strict=True):
                    part[at] = p[accumulator(thread, register)]
        o += part @ across_k(shared, operand(v_at, BLOCK_N * 128) + j * 16 * 128 // 16, D)
    np.testing.assert_allclose(o, p @ v, atol=1e-10)

    staged = np.full(64 * D, np.nan)
    for thread in range(128):
        warp, g, t = thread // 32, thread % 32 // 4, thread % 4
        for i in range(0, D // 2, 2):
            at = 16 * warp * 128 + unit(g + 8 * (i // 2 % 2), i // 4) + 4 * t
            staged[at // 2], staged[at // 2 + 1] = o[accumulator(thread, i)], o[accumulator(thread, i + 1)]
    out = np.full((64, D), np.nan)
    for thread in range(128):
        for i in range(16 * D // 8 // 32):
            r, c = divmod(i * 32 + thread % 32, D // 8)
            at = (16 * (thread // 32) * 128 + unit(r, c)) // 2
            out[16 * (thread // 32) + r, 8 * c : 8 * c + 8] = staged[at : at + 8]
    np.testing.assert_allclose(out, p @ v, atol=1e-10)


@pytest.mark.parametrize("columns", [8, 16])
def test_staging_meets_no_bank_twice(columns):
    """A warp's 4-byte stores lie in 32 banks, and 16-byte loads in quarters of a warp in all of them."""
    for c in range(columns):
        banks = {(unit(lane // 4, c) + 4 * (lane % 4)) // 4 % 32 for lane in range(32)}
        assert len(banks) == 32
    for first in range(0, 32, 8):
        units = [divmod(lane, columns) for lane in range(first, first + 8)]
        assert len({unit(r, c) // 16 % 8 for r, c in units}) == 8
