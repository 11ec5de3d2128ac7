"""Tiles of the Hopper kernel that hold all query heads of a group: when, where their rows lie, and, on a GPU, results.

What sm90.cu computes from thread and tile is written down here once more and followed on a CPU; TMA
reads through the very sizes and strides it would be given.
"""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest
import torch

import fulmen
from fulmen import hardware
from fulmen.cuda import TensorMaps
from fulmen.flash import cuda as flash
from fulmen.flash import policy
from fulmen.flash.kernels import sm90
from fulmen.flash.policy import Sm90Tile
from fulmen.flash.spec import FlashSpec, Residuals, heads_as_queries
from fulmen.hardware import TARGETS
from fulmen.testing import flash as testing
from tests.flash.test_cuda import detail, launched_with

HW = TARGETS[90]


def spec(B=1, H=32, H_KV=8, N_Q=1, N_KV=8192, D=128, causal=False, **options) -> FlashSpec:
    options = {"right": 0 if causal else None} | options
    device = torch.device("cuda", 0)
    return FlashSpec(B, H, H_KV, N_Q, N_KV, D, D, torch.bfloat16, device, D**-0.5, **options)


# --------------------------------------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (spec(), "64 queries x 80 keys, pack GQA"),
        (spec(B=8, N_Q=16), "64 queries x 80 keys, pack GQA"),
        (spec(B=8, N_Q=17), "128 queries x 176 keys, pack GQA"),
        (spec(B=8, N_Q=17, causal=True), "128 queries x 176 keys, pack GQA"),
        (spec(N_Q=4, D=64, softcap=20.0), "64 queries x 128 keys, pack GQA"),
        (spec(N_Q=4, D=256), "128 queries x 80 keys, pack GQA"),
        (spec(N_Q=64, N_KV=4000, D=64, H_KV=1, sequences=64), "64 queries x 128 keys, pack GQA"),
        (spec(H=24, N_Q=1), "64 queries x 80 keys"),  # three heads do not divide a tile
        (spec(H=40, N_Q=17), "64 queries x 80 keys"),
        (spec(H=8, N_Q=1), "64 queries x 80 keys"),  # nothing to group
        (spec(N_Q=1, H=256, H_KV=2), "128 queries x 176 keys"),  # 128 of a group are queries of one head
        (spec(N_Q=1, H=512, H_KV=2), "64 queries x 80 keys"),  # 256 of a group are too many
        *[(spec(N_Q=N, N_KV=N, causal=True), "128 queries x 176 keys") for N in (4096, 8192, 5000)],  # full either way
        *[(spec(N_Q=N, N_KV=N), "128 queries x 176 keys") for N in (2048, 4096)],
        (spec(N_Q=2049, N_KV=2049), "128 queries x 176 keys, pack GQA"),  # 520 tiles, four rounds; else 544, five
        (spec(N_Q=8192, causal=True, sequences=8), "128 queries x 128 keys"),
        # A window of 128: a tile of 192 rows sees 24 + 127 keys, or 192 + 127.
        (spec(H=64, N_Q=8192, D=64, causal=True, left=127, has_sinks=True), "192 queries x 128 keys, pack GQA"),
        (spec(H=64, H_KV=64, N_Q=8192, D=64, causal=True, left=127), "192 queries x 128 keys"),
    ],
)
def test_packed_where_it_saves_work(call, words):
    assert detail(policy.choose(call, HW, "cuda")) == f"sm90, {words}"


@pytest.mark.parametrize("options", [
    {}, {"right": 0}, {"right": 3}, {"right": 0, "top_left": True}, {"right": 3, "top_left": True}, {"left": 9},
])  # fmt: skip
def test_heads_become_queries_only_where_they_see_the_same_keys(options):
    call = spec(H=10, H_KV=2, N_KV=20, **options)
    first = 0 if call.top_left else call.N_KV - 1  # the query's position
    left, right = (call.N_KV if reach is None else reach for reach in (call.left, call.right))
    sees_all = first - left <= 0 and first + right >= call.N_KV - 1
    folded = heads_as_queries(call)
    assert (folded != call) == sees_all
    assert folded == call or (folded.N_Q, folded.H, folded.left, folded.right) == (5, 2, None, None)


def test_no_heads_become_no_queries():
    call = spec(H=0, H_KV=0, N_KV=20)
    assert heads_as_queries(call) is call


def test_odd_groups_cannot_be_forced(monkeypatch):
    monkeypatch.setattr(hardware, "of", lambda device: HW)
    for H in (8, 24, 56, 1024):
        with pytest.raises(ValueError, match="cannot share tiles"):
            sm90.launch_of(spec(H=H), launched_with(Sm90Tile(2, 128, 2, pack_gqa=True)), (0, 0, 0))


def test_what_the_kernel_is_told(monkeypatch):
    """The arguments after the addresses, in the order of `Args`: heads and tiles are those of k and v."""
    monkeypatch.setattr(hardware, "of", lambda device: HW)
    monkeypatch.setattr(sm90.cuda, "Launch", lambda variant, *rest, **early: (variant, *rest))
    launch = sm90.launch_of
    call = spec(B=3, H=32, H_KV=4, N_Q=37, N_KV=500, causal=True)
    tile = Sm90Tile(2, 128, 2, pack_gqa=True)  # 16 positions of 8 heads
    variant, _, grid, threads, _, constants = launch(call, launched_with(tile), (1, 2, 3))
    assert ("PACK_GQA", 1) in variant.macros
    front, arguments = variant.arguments.bind(constants)
    assert (front.size, len(arguments)) == (3 * 128 + 5 * 8, 512)
    fields = struct.unpack_from("3q12i2fi", arguments, front.size)
    assert fields[:15] == (1, 2, 3, 12, 4, 8, 37, 500, 0, 0, 0, 0, 3, 12, 1)
    assert fields[17] == 3
    assert (grid, threads) == ((36, 1, 1), 384)
    *_, grid, _, _, constants = launch(call, launched_with(tile._replace(pack_gqa=False)), (1, 2, 3))
    _, arguments = variant.arguments.bind(constants)
    assert struct.unpack_from("3q11i", arguments, front.size)[3:] == (96, 32, 8, 37, 500, 0, 0, 0, 0, 1, 96)
    assert grid == (96, 1, 1)


# -------------------------------------------------------------------------------------------------- where


def box_of(memory: np.ndarray, maps: TensorMaps, start: tuple[int, ...]) -> np.ndarray:
    """What the copy engine brings: the innermost dimension first, zeros beyond the end. One column is enough."""
    _, sizes, strides, box = maps.facts
    rows = []
    for at in itertools.product(*map(range, reversed(box[1:]))):
        place = [s + i for s, i in zip(start[1:], reversed(at), strict=True)]
        inside = all(0 <= i < n for i, n in zip(place, sizes[1:], strict=True))
        address = start[0] * 2 + sum(i * step for i, step in zip(place, strides, strict=True))
        rows.append(memory[address // 2] if inside else 0)
    return np.array(rows)


@pytest.mark.parametrize("group", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "fused"])
def test_a_box_holds_the_heads_of_a_group_position_by_position(group, layout):
    B, H_KV, N, D = 2, 2, 37, 64
    shape = (B, H_KV * group, N, D)
    strides = {
        "bhnd": (H_KV * group * N * D, N * D, D, 1),
        "bnhd": (H_KV * group * N * D, D, H_KV * group * D, 1),
        "fused": ((H_KV * group + 2) * N * D, D, (H_KV * group + 2) * D, 1),
    }[layout]
    x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
    memory = np.arange(1, strides[0] * B + 1)
    for b, h, first, column in [(0, 0, 0, 0), (1, 1, 16, 0), (1, 0, 36, 0), (0, 1, 40, 0)]:
        got = box_of(memory, TensorMaps(x.dtype, x.shape, x.stride(), 64, group), (column, 0, first, h, b))
        for r in range(64):
            position, head = first + r // group, h * group + r % group
            at = b * strides[0] + head * strides[1] + position * strides[2] + column
            assert got[r] == (memory[at] if position < N else 0)


def test_maps_have_strides_the_driver_takes():
    for group in (1, 4):
        x = torch.empty_strided((1, 4, 1, 128), (7, 128, 3, 1), dtype=torch.bfloat16, device="meta")
        _, sizes, strides, box = TensorMaps(x.dtype, x.shape, x.stride(), 64, group).facts
        assert len(sizes) == len(box) == len(strides) + 1 == (4 if group == 1 else 5)
        assert all(step % 16 == 0 and step > 0 for step in strides)  # of dimensions of size 1, too
        assert np.prod(box) == 64 * 64


def rows_of(call: FlashSpec, tile: Sm90Tile, cu_q, cu_k):
    """What every thread of every tile computes: a tile, the keys it walks, and for each of its rows head, position,
    the first and last key it sees, and the keys between which its consumer does not mask.
    """
    G = call.group if tile.pack_gqa else 1
    log = G.bit_length() - 1
    h_count = call.H_KV if tile.pack_gqa else call.H
    length = tile.rows >> log
    for head in range(call.B * h_count):
        for slot in range(policy.tiles_per_head(call, tile)):
            begin_q = 0
            n_q, n_kv, at = call.N_Q, call.N_KV, slot
            if call.sequences is not None:
                low, high = 0, call.sequences - 1
                while low < high:
                    middle = (low + high + 1) // 2
                    low, high = (middle, high) if cu_q[middle] // length + middle <= slot else (low, middle - 1)
                begin_q = cu_q[low]
                n_q, n_kv = cu_q[low + 1] - begin_q, cu_k[low + 1] - cu_k[low]
                at -= begin_q // length + low
            m0 = at * length
            if m0 >= n_q:
                continue
            shift = 0 if call.top_left else n_kv - n_q
            right, left = call.right, call.left
            end = n_kv if right is None else max(0, min(n_kv, min(m0 + length, n_q) + shift + right))
            first = 0 if left is None else max(0, m0 + shift - left) // tile.block_n * tile.block_n
            end = first + max(0, end - first + tile.block_n - 1) // tile.block_n * tile.block_n
            for consumer, warp, g, r in itertools.product(range(tile.consumers), range(4), range(8), range(2)):
                top = m0 + (64 * consumer >> log)
                start = top + (16 * warp >> log)
                row = (g + 8 * r) >> log
                q_head = head * G + ((16 * warp + g + 8 * r) & (G - 1)) if tile.pack_gqa else head
                position = start + row
                low_key = 0 if left is None else position + shift - left
                high_key = n_kv - 1 if right is None else min(n_kv - 1, position + shift + right)
                all_from = 0 if left is None else top + (63 >> log) + shift - left
                all_to = n_kv - 1 if right is None else min(n_kv - 1, top + shift + right)
                box_row = 64 * consumer + 16 * warp + g + 8 * r  # of the tile: what the copy engine put there
                assert (box_row >> log) == position - m0
                assert not tile.pack_gqa or box_row % G == q_head % G
                yield (
                    q_head, begin_q, position, n_q, n_kv, shift, first, end, low_key, high_key, all_from, all_to
                )  # fmt: skip


MASKS = [(None, None), (None, 0), (40, 0), (7, 30), (60, None), (0, 0), (None, 50)]


@pytest.mark.parametrize(("left", "right"), MASKS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("consumers", "group"), [(1, 4), (2, 8), (3, 2), (2, 64), (3, 32), (1, 16)])
def test_every_query_of_every_head_once_with_its_keys(left, right, packed, consumers, group):
    cu_q, cu_k = [0, 30, 30, 31, 80, 100], [0, 20, 27, 27, 197, 327]
    N_Q, N_KV = (cu_q[-1], cu_k[-1]) if packed else (53, 201)
    for top_left in (False, True):
        call = spec(
            1 if packed else 2, 2 * group, 2, N_Q, N_KV, left=left, right=right, top_left=top_left,
            sequences=len(cu_q) - 1 if packed else None,
        )  # fmt: skip
        tile = Sm90Tile(consumers, 80, 2, pack_gqa=True)
        done = np.zeros((call.B * call.H, N_Q), int)
        for row in rows_of(call, tile, cu_q, cu_k):
            head, begin, i, n_q, n_kv, shift, first, end, low, high, all_from, all_to = row
            if i < n_q:
                done[head, begin + i] += 1
                wanted_low = 0 if left is None else max(0, i + shift - left)
                wanted_high = n_kv - 1 if right is None else min(n_kv - 1, i + shift + right)
                assert (max(low, 0), high) == (wanted_low, wanted_high)
                assert high < low or high < 0 or (first <= max(low, 0) and high < end), "keys are missed"
                assert all_to <= high  # blocks between all_from and all_to are not masked
                assert left is None or all_from >= low
        assert (done == 1).all()


# ----------------------------------------------------------------------------------------- results, on a GPU

DECODE = {
    f"{N} queries, {G} heads": {"B": 2, "H": 2 * G, "H_KV": 2, "N_Q": N, "N_KV": 700, "causal": True}
    for G in (4, 8, 16)
    for N in (1, 2, 5, 16, 17)
}
SHAPES = {
    "causal": {"B": 2, "H": 8, "H_KV": 2, "N_Q": 333, "causal": True, "layout": "bnhd"},
    "full, fused": {"B": 2, "H": 8, "H_KV": 4, "N_Q": 200, "layout": "fused"},
    "more queries than keys": {"B": 1, "H": 8, "H_KV": 1, "N_Q": 301, "N_KV": 77, "causal": True},
    "top left": {"B": 1, "H": 8, "H_KV": 1, "N_Q": 77, "N_KV": 301, "causal": "top_left"},
    "all heads": {"B": 1, "H": 64, "H_KV": 1, "N_Q": 21, "N_KV": 500, "causal": True},
    "window": {"B": 1, "H": 8, "H_KV": 2, "N_Q": 500, "causal": True, "window": (100, None), "sinks": True},
    "softcap": {"B": 1, "H": 8, "H_KV": 2, "N_Q": 100, "N_KV": 400, "causal": True, "softcap": 5.0, "window": (150, 0)},
    "packed": {"H": 8, "H_KV": 2, "lengths_q": [100, 0, 1, 260], "causal": True},
    "packed, cross": {
        "H": 16, "H_KV": 2, "lengths_q": [5, 0, 1, 60, 1], "lengths_k": [400, 30, 0, 77, 300], "causal": True,
        "sinks": True, "window": (90, None),
    },
    "no keys": {"B": 1, "H": 8, "H_KV": 2, "N_Q": 7, "N_KV": 0},
}  # fmt: skip


TILES = {  # that any options leave registers for
    64: [Sm90Tile(2, 128, 2), Sm90Tile(1, 128, 2, blocks_per_sm=2)],
    128: [Sm90Tile(2, 128, 2), Sm90Tile(1, 80, 2, blocks_per_sm=2)],
    192: [Sm90Tile(2, 128, 2)],
    256: [Sm90Tile(2, 80, 2)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("D", "E"), [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("shape", DECODE | SHAPES)
def test_grouped_against_fp64_and_single_heads(shape, D, E, dtype):
    """Within the derived tolerance and, unless a window cuts keys off, the same bits as without grouping."""
    x = testing.inputs(D=D, E=E, **(DECODE | SHAPES)[shape], dtype=dtype, device="cuda")
    call = x.spec(with_lse=True)
    if (why := flash.supports(call)) is not None or hardware.of(call.device).arch != 90:
        pytest.skip(why or "the kernel for Hopper")
    offsets = x.cu_seqlens_q, x.cu_seqlens_q if x.cu_seqlens_k is None else x.cu_seqlens_k
    tensors = Residuals(x.q, x.k, x.v, x.sinks, *offsets)
    wanted = testing.expected(x)
    blind = testing.blind_rows(wanted)
    for tile in TILES[D]:
        o, lse = flash.forward(call, tensors, launched_with(tile._replace(pack_gqa=True)))
        assert torch.equal(lse == -torch.inf, blind)
        testing.assert_close("lse", testing.seen_lse(lse, blind), *testing.finite(wanted["lse"], blind))
        testing.assert_close("o", o, *wanted["o"])
        if call.left is None:  # a window decides where a tile's first block of keys begins, and so the order of sums
            single = flash.forward(call, tensors, launched_with(tile))
            assert torch.equal(o, single[0])
            assert torch.equal(lse, single[1])


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_decoding_through_the_public_call(D):
    """Once by the checked way, once by the prepared one."""
    x = testing.inputs(2, 32, 3, D, H_KV=4, N_KV=1000, causal=True, dtype=torch.bfloat16, device="cuda")
    if (why := flash.supports(x.spec())) is not None:
        pytest.skip(why)
    o = testing.expected(x)["o"]
    for _ in range(2):
        testing.assert_close("o", fulmen.flash_attention(x.q, x.k, x.v, causal=True, backend="cuda"), *o)
