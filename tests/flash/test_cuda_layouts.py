"""Where the Hopper kernel finds its numbers, followed on a CPU: TMA's swizzle, wgmma's descriptors, its fragments.

The rules of the hardware are written down here as NVIDIA's PTX manual states them; the addresses are those that
cuda_sm90.cu computes. One tile of 64 queries goes from memory to memory, and must come out as attention.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fulmen.flash import cuda_sm90
from fulmen.flash.op import FlashSpec
from fulmen.hardware import TARGETS

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


def transposed(words):
    """[4 lanes, 4] in the steps of `transpose`: lane t has a word of each unit, then the words of unit t."""
    x = words.copy()
    for bit in (1, 2):
        for i in (i for i in range(4) if not i & bit):
            sent = [x[t][i if t & bit else i | bit].copy() for t in range(4)]
            for t in range(4):
                x[t][i if t & bit else i | bit] = sent[t ^ bit]
    return x


@pytest.mark.parametrize(("D", "E", "BLOCK_N"), [(64, 64, 128), (128, 128, 128), (128, 128, 160), (128, 128, 176),
                                                 (192, 128, 128), (256, 256, 80)])  # fmt: skip
def test_one_tile_comes_out_as_attention(D, E, BLOCK_N):
    random = np.random.default_rng(0)
    q, k, v = random.normal(size=(64, D)), random.normal(size=(BLOCK_N, D)), random.normal(size=(BLOCK_N, E))
    q_at, k_at = 1024, 1024 + 64 * D * 2
    v_at = k_at + BLOCK_N * D * 2
    shared = np.full((v_at + BLOCK_N * E * 2) // 2, np.nan)
    for i in range(D // 64):
        copy_box(shared, q_at + i * 64 * 128, q[:, 64 * i : 64 * i + 64])
        copy_box(shared, k_at + i * BLOCK_N * 128, k[:, 64 * i : 64 * i + 64])
    for i in range(E // 64):
        copy_box(shared, v_at + i * BLOCK_N * 128, v[:, 64 * i : 64 * i + 64])
    assert not np.isnan(shared[q_at // 2 :]).any()

    s = np.zeros((64, BLOCK_N))
    for d in range(D // 16):
        a = along_k(shared, operand(q_at, 16) + (d // 4 * 64 * 128 + d % 4 * 32) // 16, 64)
        b = along_k(shared, operand(k_at, 16) + (d // 4 * BLOCK_N * 128 + d % 4 * 32) // 16, BLOCK_N)
        s += a @ b.T
    np.testing.assert_allclose(s, q @ k.T, atol=1e-10)

    p = np.exp(s - s.max(1, keepdims=True))
    o = np.zeros((64, E))
    for j in range(BLOCK_N // 16):
        part = np.full((64, 16), np.nan)
        for thread in range(128):
            for i in range(4):  # p[4 j + i] = pack(s[2 (4 j + i)], s[2 (4 j + i) + 1])
                for at, register in zip(a_register(thread, i), (2 * (4 * j + i), 2 * (4 * j + i) + 1), strict=True):
                    part[at] = p[accumulator(thread, register)]
        o += part @ across_k(shared, operand(v_at, BLOCK_N * 128) + j * 16 * 128 // 16, E)
    np.testing.assert_allclose(o, p @ v, atol=1e-10)

    out = np.full((64, E), np.nan)
    for quad in range(32):
        lanes = range(4 * quad, 4 * quad + 4)
        for r in range(2):
            for c in range(0, E // 8, 4):
                words = np.array(
                    [
                        [[o[accumulator(t, 4 * (c + i) + 2 * r + half)] for half in (0, 1)] for i in range(4)]
                        for t in lanes
                    ]
                )
                for t, words_of in enumerate(transposed(words)):
                    row = 16 * (quad // 8) + quad % 8 + 8 * r
                    out[row, 8 * (c + t) : 8 * (c + t) + 8] = words_of.ravel()
    np.testing.assert_allclose(out, p @ v, atol=1e-10)


# ----------------------------------------------------------------------------------------------- its tiles


def tiles_of(block, blocks, spec, cfg, cu_q=(), cu_k=()):
    """`Tile.find` for one block: (head, first row, rows, begin_q, begin_k, first key, end of keys)."""
    rows, heads, tiles = cfg.rows, spec.B * spec.H, cuda_sm90.tiles(spec, cfg)
    section = cuda_sm90.section(spec, cfg, TARGETS[90])
    for i in itertools.count():
        t = i * blocks + (blocks - 1 - block if i % 2 else block)
        if t >= heads * tiles:
            return
        start = t // (section * tiles) * section
        size = min(section, heads - start)
        t -= start * tiles
        head = start + t % size
        slot = t // size if spec.right is None else tiles - 1 - t // size
        begin_q = begin_k = 0
        n_q, n_kv = spec.N_Q, spec.N_KV
        if spec.sequences is not None:
            low, high = 0, spec.sequences - 1
            while low < high:
                middle = (low + high + 1) // 2
                if cu_q[middle] // rows + middle <= slot:
                    low = middle
                else:
                    high = middle - 1
            begin_q, begin_k = cu_q[low], cu_k[low]
            n_q, n_kv = cu_q[low + 1] - begin_q, cu_k[low + 1] - begin_k
            slot -= begin_q // rows + low
        m0 = slot * rows
        if m0 >= n_q:
            assert spec.sequences is not None
            continue
        shift = 0 if spec.top_left else n_kv - n_q
        end = n_kv if spec.right is None else max(0, min(n_kv, min(m0 + rows, n_q) + shift + spec.right))
        first = 0 if spec.left is None else max(0, m0 + shift - spec.left) // cfg.block_n * cfg.block_n
        blocks_of_keys = max(0, end - first + cfg.block_n - 1) // cfg.block_n
        yield head, m0, min(rows, n_q - m0), begin_q, begin_k, first, first + blocks_of_keys * cfg.block_n, n_kv, shift


MASKS = [(None, None), (None, 0), (100, 0), (7, 30), (300, None), (0, 0), (None, 50)]


@pytest.mark.parametrize(("left", "right"), MASKS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_every_query_once_with_all_its_keys(left, right, packed, top_left, together):
    cfg = cuda_sm90.Config(2, 128, 2, together=together)
    cu_q, cu_k = [0, 300, 300, 301, 800, 1000], [0, 20, 27, 27, 727, 1327]
    N_Q, N_KV = (cu_q[-1], cu_k[-1]) if packed else (1000, 700)
    spec = FlashSpec(
        1 if packed else 2, 3, 3, N_Q, N_KV, 128, 128, torch.bfloat16, torch.device("cuda", 0), 1.0, left, right,
        top_left, sequences=len(cu_q) - 1 if packed else None,
    )  # fmt: skip
    done = np.zeros((spec.B * spec.H, N_Q), int)
    for block in range(7):
        for head, m0, rows, begin_q, begin_k, first, end, n_kv, shift in tiles_of(block, 7, spec, cfg, cu_q, cu_k):
            done[head, begin_q + m0 : begin_q + m0 + rows] += 1
            for row in (m0, m0 + rows - 1):
                low = 0 if left is None else max(0, row + shift - left)
                high = n_kv if right is None else min(n_kv, row + shift + right + 1)
                assert high <= low or (first <= low and high <= end), "keys are missed"
            assert end - first <= max(n_kv, rows + (left or 0) + (right or 0) + 1) + 2 * cfg.block_n
            assert end == first or begin_k + first < N_KV
    assert (done == 1).all()
