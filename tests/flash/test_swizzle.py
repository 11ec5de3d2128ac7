"""L2 swizzle: the order in which the Hopper forward takes its tiles leaves no block much more to do than others."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fulmen import hardware
from fulmen.flash import policy
from fulmen.flash.kernels import sm90
from fulmen.flash.policy import Sm90Tile
from fulmen.flash.spec import FlashSpec
from fulmen.hardware import TARGETS
from tests import emulator
from tests.flash.test_cuda import spec


def scheduled(call: FlashSpec, tile: Sm90Tile, hw: hardware.Hardware, swizzle: int) -> list[float]:
    """What every block has to do, tile by tile as `Tile::find` has it."""
    tiles, every = policy.tiles_per_head(call, tile), policy.heads(call, tile)
    grid, swizzles = min(tile.blocks_per_sm * hw.sm_count, tiles * every), -(-every // swizzle)
    work = [0.0] * grid
    for t in range(tiles * every):
        i, block = divmod(t, grid)
        start = t // (swizzle * tiles) * swizzle
        slot = (t - start * tiles) // min(swizzle, every - start)
        if (swizzles - start // swizzle) % 2:
            slot = tiles - 1 - slot
        keys = min(call.N_KV, max(0, min((slot + 1) * tile.rows, call.N_Q) + call.N_KV - call.N_Q))
        work[grid - 1 - block if i % 2 else block] += -(-keys // tile.block_n) + 1.2
    return work


@pytest.mark.parametrize("case", [(8, 4, 2048), (2, 40, 2048), (4, 40, 1000), (32, 8, 300), (3, 50, 700)])
def test_the_busiest_block_is_found(case):
    B, H, N = case
    for options in ({}, {"N_Q": N // 2}, {"N_KV": N // 3}):
        call = spec(B, H, N, 128, True, **options)
        for swizzle in {1, 7, 30, B * H}:
            tile = Sm90Tile(2, 128, 2)
            work = scheduled(call, tile, TARGETS[90], swizzle)
            found = policy.unevenness(call, tile, TARGETS[90].sm_count, swizzle)
            assert found == pytest.approx(max(work) / sum(work) * TARGETS[90].sm_count)


def test_groups_of_heads_keep_every_block_busy():
    """And k and v of few heads are in L2. Of 128 heads, 21 at a time, a block had 1.08 times its share; of groups of
    three waves of tiles (N 25344) always the same blocks have more to do."""
    for heads, N, D in (
        (16, 16384, 128), (32, 8192, 128), (40, 4096, 128), (64, 2048, 128), (72, 2048, 128), (80, 2048, 128),
        (96, 2048, 128), (128, 2048, 128), (80, 8192, 64), (64, 8192, 64), (256, 1024, 128), (48, 5000, 128),
        (32, 25344, 128), (32, 25000, 128), (16, 37888, 64), (30, 14080, 128), (9, 42240, 128), (40, 4096, 256),
    ):  # fmt: skip
        call = spec(1, heads, N, D, True)
        tile = policy.sm90_tile(call, TARGETS[90])
        assert tile.swizzle > 1
        assert tile.swizzle <= 3 or tile.swizzle * N * 2 * D * 2 <= TARGETS[90].l2_bytes
        work = scheduled(call, tile, TARGETS[90], tile.swizzle)
        assert max(work) <= 1.045 * sum(work) / len(work), (heads, N, D)
    for call in (
        spec(1, 16, 2048, 128, True),  # in the cache
        spec(1, 80, 256, 64, True),
        spec(1, 256, 2048, 128, True, H_KV=128),  # shared by a group
        spec(1, 64, 8192, 128, True, left=1024),
        spec(1, 64, 8192, 128, True, sequences=4),
    ):
        assert policy.sm90_tile(call, TARGETS[90]).swizzle == 0


@pytest.mark.parametrize(
    ("heads", "N_Q", "N_KV", "D"), [(76, 16871, 518, 256), (351, 8363, 1553, 64), (44, 16384, 2231, 128)]
)
def test_queries_that_see_nothing(heads, N_Q, N_KV, D):
    """Where lengths do not rise evenly, a group of two waves leaves a block up to 3.5 times its share."""
    call = spec(1, heads, D=D, causal=True, N_Q=N_Q, N_KV=N_KV)
    tile = policy.sm90_tile(call, TARGETS[90])
    work = scheduled(call, tile, TARGETS[90], tile.swizzle or heads)
    assert max(work) <= 1.045 * sum(work) / len(work)


def test_chunks_of_prompts_take_few_heads():
    """Few tiles of many keys: all heads at once would read k and v for every tile."""
    for N_Q, N_KV in ((512, 32768), (1024, 16384), (2048, 32768)):
        tile = policy.sm90_tile(spec(4, 32, D=128, causal=True, N_Q=N_Q, N_KV=N_KV), TARGETS[90])
        assert 0 < tile.swizzle * policy.tiles_of(spec(N=N_Q), N_Q, 128) <= 2 * 132


def test_tiles_of_nothing_and_of_much_are_found_at_once(monkeypatch):
    """Without queries, and where working out who has the most to do would take seconds: of all tiles, or many times."""
    for D in (64, 128):
        for options in ({"N_Q": 0}, {"N_KV": 0}, {"N_Q": 0, "N_KV": 0}):
            assert policy.sm90_tile(spec(1, 64, 8192, D, True, **options), TARGETS[90]).swizzle == 0
    real, tried, added = policy.unevenness, [], []
    monkeypatch.setattr(policy, "unevenness", lambda *args: tried.append(args) or real(*args))
    monkeypatch.setattr(policy, "sum", lambda x: added.append(len(x)) or sum(x), raising=False)
    policy.swizzle.cache_clear()
    for D in (64, 128):
        for options in (
            {"N_KV": 1024, "N_Q": 1 << 22},
            {"N": 1 << 20},
            {"N": 1 << 28, "H": 100},
            {"N": 3000, "H": 9999},
        ):
            call = spec(**{"H": 64, "N": 8192, "D": D, "causal": True} | options)
            tried.clear(), added.clear()
            policy.sm90_tile(call, TARGETS[90])
            assert len(tried) <= 14
            assert max(added, default=0) <= 2 * policy.MANY_TILES


FIND = re.compile(r"const int turn = .*?const int slot = [^;]*;", re.S)
ORDER = r"""
#include <algorithm>
#include <cstdio>
#include <cstdlib>
using std::min;
struct { int swizzle, tiles, heads, swizzles; } a;
int main(int, char **argv) {
    a.swizzle = atoi(argv[1]), a.tiles = atoi(argv[2]), a.heads = atoi(argv[3]), a.swizzles = atoi(argv[4]);
    for (int i = 0; i < a.tiles * a.heads; i++) {
        int t = i, head;
        CODE
        printf("%d %d\n", head, slot);
    }
}
"""


@pytest.mark.skipif(emulator.COMPILER is None, reason="the order is compiled with g++")
@pytest.mark.parametrize("right", [0, 1])
def test_the_kernel_takes_groups_in_that_order(tmp_path, right):
    source = Path(sm90.__file__).with_suffix(".cu").read_text()
    (tmp_path / "order.cpp").write_text(ORDER.replace("CODE", FIND.search(source)[0]))
    subprocess.run(
        [emulator.COMPILER, f"-DRIGHT={right}", "-o", tmp_path / "order", tmp_path / "order.cpp"], check=True
    )
    for heads, tiles, swizzle in ((6, 4, 2), (7, 3, 2), (5, 4, 5), (5, 4, 1), (8, 5, 3)):
        swizzles = -(-heads // swizzle)
        run = [tmp_path / "order", *map(str, (swizzle, tiles, heads, swizzles))]
        text = subprocess.run(run, check=True, capture_output=True, text=True).stdout
        want = []
        for i in range(swizzles):
            falls = right and (swizzles - i) % 2  # the last with its longest tiles first
            for slot in reversed(range(tiles)) if falls else range(tiles):
                want += [(head, slot) for head in range(i * swizzle, min(heads, (i + 1) * swizzle))]
        assert [tuple(map(int, line.split())) for line in text.splitlines()] == want
