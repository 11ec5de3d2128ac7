"""What softmax attention over a cache runs: the backend, triton's tiles, and how often keys are split.

Chosen by the capacity or its bound, never by lengths, which are on the device. Tiles of backend cuda are those of
policy.py. Triton's are not tuned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fulmen.flash.spec import FlashSpec, tiles_of
from fulmen.hardware import Hardware

MIN_KEYS = 256  # of a part, where keys are split
MAX_PARTS = 128


class CacheTile(NamedTuple):
    """The kernel of triton_cache.py."""

    block_m: int  # rows: positions times query heads of a group
    block_n: int  # keys at a time
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n}, {self.num_warps} warps, {self.num_stages} stages"


def triton_tile(spec: FlashSpec, hw: Hardware) -> CacheTile:
    """Few rows read keys as fast as memory brings them; many share the keys they load."""
    rows = math.ceil(spec.N_Q / (spec.sequences or 1)) * spec.group
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    wide = max(spec.D, spec.E) > 128
    small = hw.smem_bytes < 120_000
    block_n = 32 if wide or (small and max(spec.D, spec.E) > 64) else 64
    return CacheTile(block_m, block_n, 8 if wide and block_m == 64 else 4, 2 if wide and small else 3)


def triton_splits(spec: FlashSpec, tile: CacheTile, hw: Hardware) -> int:
    """As many as give every SM two programs, of MIN_KEYS keys at least."""
    programs, keys = tiles_of(spec, spec.N_Q * spec.group, tile.block_m) * spec.B * spec.H_KV, spec.N_KV
    if spec.left is not None:
        keys = min(keys, spec.N_Q + spec.left)
    return max(1, min(2 * hw.sm_count // max(programs, 1), keys // MIN_KEYS, MAX_PARTS))
