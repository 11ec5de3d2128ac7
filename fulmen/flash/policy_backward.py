"""The tile, the workspace and the order of heads of the backward of backend `cuda` (kernels/backward.cu).

Pure functions of (spec, hw), as in policy.py.
"""

from __future__ import annotations

from typing import NamedTuple

from fulmen.flash.spec import FlashSpec, tiles_of
from fulmen.hardware import Hardware

BACKWARD_KEYS = 128  # that a block owns
MAX_PADDING = 1 << 28


class BackwardTile(NamedTuple):
    """The backward of backend `cuda`: for Hopper, every option; 128 keys a block."""

    block_m: int  # queries at a time
    overlap: bool  # s and dp of the next tile start before this one ends
    persistent: bool = False  # blocks stay, and take tile after tile
    q_stages: int = 3  # tiles of q in flight
    o_stages: int = 2  # the same of do

    def __str__(self) -> str:
        return f"{self.block_m} queries x {BACKWARD_KEYS} keys"


# By D = E. Beside a row its speed over cuDNN's backward, causal and full; in deterministic mode 0.90 to 1.00 of it.
BACKWARD_TILES = {
    64: BackwardTile(128, overlap=False, persistent=True, q_stages=2),  # B4 H32 N4096: 1.31, 1.20
    128: BackwardTile(64, overlap=True),  # B2 H16 N8192: 1.17, 1.10
}


def backward_tile(spec: FlashSpec) -> BackwardTile:
    """Persistent blocks pay where walks are short, and with a softcap's registers; else at D 128 their loop costs more
    than they save (B2 H16 N8192 causal: 1.13)."""
    tile, options = BACKWARD_TILES[spec.D], (spec.left, spec.sequences, spec.softcap)
    return tile._replace(persistent=tile.persistent or any(x is not None for x in options))


class Workspace(NamedTuple):
    """Of the backward, fp32: dq, and where the other parts begin. `end`: how many numbers it has."""

    rows: int  # lse and delta of every query
    drawn: int  # what every query tile adds to a sink's gradient
    turns: int  # for each half of a query tile how many tiles of keys were added to it
    counter: int  # of the tiles of keys that blocks have taken
    end: int


def workspace(spec: FlashSpec, tile: BackwardTile) -> Workspace:
    blocks = spec.B * spec.H * tiles_of(spec, spec.N_Q, tile.block_m)
    rows = blocks * tile.block_m * spec.D
    drawn = rows + blocks * 2 * tile.block_m
    turns = drawn + blocks * spec.has_sinks
    counter = turns + 2 * blocks
    return Workspace(rows, drawn, turns, counter, counter + 1)


def affordable(spec: FlashSpec) -> bool:
    """Whether the workspace is at most twice the fp32 dq and MAX_PADDING bytes; a packed sequence has a tile more."""
    end, least = workspace(spec, backward_tile(spec)).end, spec.B * spec.H * spec.N_Q * spec.D
    return 4 * end <= 2 * 4 * least + MAX_PADDING


def uneven(spec: FlashSpec, hw: Hardware) -> bool:
    """Whether the longest tile of keys under a causal mask decides: each has a block of its own, for a group of heads.

    Over cuDNN's, which gives every query head its blocks: B1 H40/8 N2048 causal 0.90, N4096 (two waves) 1.18.
    """
    blocks = spec.B * spec.H_KV * tiles_of(spec, spec.N_KV, BACKWARD_KEYS)
    return spec.group > 1 and spec.right is not None and blocks <= hw.sm_count


def swizzle(spec: FlashSpec, hw: Hardware) -> int:
    """Heads of k and v worked on at a time.

    Half of the L2 cache holds q, do and fp32 dq of as many, unless more run at once anyway. They divide the number of
    heads: a smaller last group would leave SMs idle under a causal mask. Speed over cuDNN's, causal, D 128, as many as
    fit (few tiles: all heads) and a divisor: B2 H16 N8192 1.077, 1.119; B4 H32 N2048 1.066, 1.093; B1 H32 N4096 1.147,
    1.169; B1 H40/8 N4096 1.128, 1.181.

    In deterministic mode the tiles of a head add to a query tile one after the other; those of more heads wait less.
    Time over that in any order with 1, 2, 4, 8 times as many, causal: B4 H32 N4096 D 64 1.21, 1.10, 1.08, 1.10; B1 H16
    N16384 D 128 1.08, 1.06, 1.03, 1.02. Full, B4 H32 N4096 D 64: 1.01, 1.01, 1.03. With a window they wait little.
    """
    heads = max(1, spec.B * spec.H_KV)
    queries = spec.N_Q
    if spec.left is not None and spec.right is not None:
        queries = min(queries, spec.left + spec.right + BACKWARD_KEYS)  # that see a tile of keys
    size = max(1, queries * max(spec.group, 1) * (6 * spec.D + 2 * spec.E))
    at_once = hw.sm_count // max(1, tiles_of(spec, spec.N_KV, BACKWARD_KEYS))
    times = 1 if not spec.deterministic or spec.left is not None else 2 if spec.right is None else 4
    most = min(heads, max(1, at_once, hw.l2_bytes // 2 // size) * times)
    return next(n for n in range(most, 0, -1) if heads % n == 0)


def lag(spec: FlashSpec, heads: int, hw: Hardware) -> int:
    """How many tiles after a tile of keys its share of dq is converted: two waves, when it is surely there.

    Without a limit on the right a share needs all tiles of its head, of `heads` at a time, and a wave after them.
    """
    if spec.right is not None:
        return 2 * hw.sm_count
    return hw.sm_count + max(hw.sm_count, heads * tiles_of(spec, spec.N_KV, BACKWARD_KEYS))
