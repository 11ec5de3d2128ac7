"""The tile, the workspace and the order of heads of the backward of backend `cuda` (kernels/backward.py).

Pure functions of (spec, hw), as in policy.py.
"""

from __future__ import annotations

from typing import NamedTuple

from fulmen.flash.spec import FlashSpec, tiles_of
from fulmen.hardware import Hardware

MAX_PADDING = 1 << 28
LONG_CAUSAL, LONG_FULL = 64, 128  # tiles of keys of a head, from which on L2 does not say how many heads
MOST_FIXED, MANY_FIXED = 8192, 1024  # keys; tiles of keys of all query heads
WIDE_TILES = 512  # of keys, of D = 256 in deterministic mode, at a time


class BackwardTile(NamedTuple):
    """The backward of backend `cuda`: for Hopper, every option."""

    block_m: int  # queries at a time
    overlap: bool  # s of the next tile starts before this one ends; with 128 keys dp does, too
    q_stages: int = 3  # tiles of q in flight
    o_stages: int = 2  # the same of do
    block_n: int = 128  # keys that a block owns; 64: backward_wide.cu
    keep: bool = False  # which keeps k and v in registers, too
    fixed: bool = False  # sums of dq have a fixed order

    @property
    def wide(self) -> bool:
        return self.block_n == 64

    @property
    def adders(self) -> int:
        """Warps that add dq up, each of which takes turns with those of other blocks."""
        return 3 if self.wide else 2

    def __str__(self) -> str:
        return f"{self.block_m} queries x {self.block_n} keys" + ", fixed order" * self.fixed


# By D. Beside a row its speed over cuDNN's backward, causal and full; in a fixed order 0.78 to 1.05 of it. Over
# triton's, with options: D 64 and 128 1.3 to 2.1, wide 1.8 (packed sequences) to 2.8 (softcap).
BACKWARD_TILES = {
    64: BackwardTile(128, overlap=False, q_stages=2),  # B4 H32 N4096: 1.31, 1.20
    128: BackwardTile(64, overlap=True),  # B2 H16 N8192: 1.14, 1.10
    192: BackwardTile(64, overlap=True, block_n=64, keep=True),  # E 128, B1 H16 N4096: 1.00, 1.33
    256: BackwardTile(64, overlap=True, q_stages=2, o_stages=1, block_n=64),  # the same: 1.18 to 1.28, 1.12 to 1.23
}


def backward_tile(spec: FlashSpec) -> BackwardTile:
    return BACKWARD_TILES[spec.D]._replace(fixed=fixed_order(spec))


def fixed_order(spec: FlashSpec) -> bool:
    """Whether sums of dq have a fixed order: if asked for, and where that costs at most 3 %.

    Plain calls of many tiles. Time over that of any order, full: D128 B4 H32 N2048 1.00, B1 H32 N4096 1.03, B2 H16
    N8192 1.00, B1 H40/8 N4096 1.02, B32 H16 N1024 0.97; D64 B4 H32 N4096 1.01, B1 H16 N8192 1.02; but 1.27 at B1 H16
    N2048.
    Causal, D128: B1 H40/8 N4096 0.99, B4 H40/8 N2048 0.95, B4 H32/8 N4096 0.99; of heads that share nothing 1.03 to
    1.09. Full N16384 takes 1.01 (D64 1.05), but FlashAttention-4 is ahead there, so any order is kept.
    """
    if spec.deterministic or not spec.plain or spec.D not in (64, 128) or spec.N_KV > MOST_FIXED:
        return spec.deterministic
    many = spec.B * spec.H * key_tiles(spec) >= MANY_FIXED  # else tiles wait for each other
    return many and (spec.right is None or (spec.D == 128 and spec.group >= 4))


def key_tiles(spec: FlashSpec) -> int:
    return tiles_of(spec, spec.N_KV, BACKWARD_TILES[spec.D].block_n)


class Workspace(NamedTuple):
    """Of the backward, fp32: dq, and where the other parts begin. `end`: how many numbers it has."""

    rows: int  # lse and delta of every query
    drawn: int  # what every query tile adds to a sink's gradient
    turns: int  # for each adder how many tiles of keys were added to its part of a query tile
    counter: int  # of the tiles of keys that blocks have taken
    end: int


def workspace(spec: FlashSpec, tile: BackwardTile) -> Workspace:
    blocks = spec.B * spec.H * tiles_of(spec, spec.N_Q, tile.block_m)
    rows = blocks * tile.block_m * spec.D
    drawn = rows + blocks * 2 * tile.block_m
    turns = drawn + blocks * spec.has_sinks
    counter = turns + tile.adders * blocks
    return Workspace(rows, drawn, turns, counter, counter + 1)


def affordable(spec: FlashSpec) -> bool:
    """Whether the workspace is at most twice the fp32 dq and MAX_PADDING bytes; a packed sequence has a tile more."""
    end, least = workspace(spec, backward_tile(spec)).end, spec.B * spec.H * spec.N_Q * spec.D
    return 4 * end <= 2 * 4 * least + MAX_PADDING


def behind_cudnn(spec: FlashSpec, hw: Hardware) -> bool:
    """Whether cuDNN's backward takes the call where it serves it. Ours over cuDNN's:

    Causal heads that share k and v, of at most one tile of keys for each SM (D 256: two): a tile is one block for its
    group, and the longest decides, where cuDNN gives every query head its blocks. B1 H40/8 N2048 0.91, B1 H32/8 0.94,
    N4096 (two waves) 1.16, B2 H40/8 N2048 1.13; D 256 B1 H32/4 N4096 0.90.
    D 192 causal: ours is ahead only up to N1024 (B4 H16 1.09), level at B1 H16 N4096; B2 H32 N2048 0.94, B1 H16 N8192
    0.85, B1 H128 N4096 0.82. Full 1.33.
    """
    if spec.right is None:
        return False
    waves = 2 if spec.D == 256 else 1
    return spec.D == 192 or (spec.group > 1 and spec.B * spec.H_KV * key_tiles(spec) <= waves * hw.sm_count)


def swizzle(spec: FlashSpec, hw: Hardware) -> int:
    """Heads of k and v worked on at a time.

    Half of the L2 cache holds q, do and fp32 dq of as many, unless more run at once anyway. They divide the number of
    heads: a smaller last group would leave SMs idle under a causal mask.

    Of long sequences few heads fit, and the longest tile of the last ones decides; more heads share rows in L2 as well,
    as all tiles walk the same queries. In a fixed order the tiles of a head add to a query tile one after the other;
    those of more heads wait less, and with a window they wait little. Measured: docs/notes/flash-cuda.md.
    """
    heads = max(1, spec.B * spec.H_KV)
    queries = spec.N_Q
    if spec.left is not None and spec.right is not None:
        queries = min(queries, spec.left + spec.right + backward_tile(spec).block_n)  # that see a tile of keys
    size = max(1, queries * max(spec.group, 1) * (6 * spec.D + 2 * spec.E))
    at_once = hw.sm_count // max(1, key_tiles(spec))
    enough = hw.l2_bytes // 2 // size
    plain = spec.D == 128 and spec.sequences is None
    long = plain and key_tiles(spec) >= (LONG_FULL if spec.right is None else LONG_CAUSAL)
    if (fixed_order(spec) or long) and spec.left is None:
        few = 32 if spec.D == 64 else 16
        if spec.D == 256 and spec.sequences is None:
            few = WIDE_TILES // max(1, key_tiles(spec))
        enough = max(enough, few // (2 if spec.right is None else 1))
    most = min(heads, max(1, at_once, enough))
    return next(n for n in range(most, 0, -1) if heads % n == 0)


def lag(spec: FlashSpec, heads: int, hw: Hardware) -> int:
    """How many tiles after a tile of keys its share of dq is converted: two waves, when it is surely there.

    Without a limit on the right a share needs all tiles of its head, of `heads` at a time, and a wave after them.
    """
    if spec.right is not None:
        return 2 * hw.sm_count
    return hw.sm_count + max(hw.sm_count, heads * key_tiles(spec))
