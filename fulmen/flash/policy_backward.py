"""The tile, the workspace and the order of heads of the backward of backend `cuda` (kernels/backward.cu).

Pure functions of (spec, hw), as in policy.py.
"""

from __future__ import annotations

from typing import NamedTuple

from fulmen.flash.spec import FlashSpec, tiles_of
from fulmen.hardware import Hardware

BACKWARD_KEYS = 128  # that a block owns


class BackwardTile(NamedTuple):
    """The backward of backend `cuda`: for Hopper, every option; 128 keys a block."""

    block_m: int  # queries at a time
    overlap: int  # how much of the next tile starts before this one ends: nothing, s, or s and dp
    q_stages: int = 3  # tiles of q in flight
    o_stages: int = 2  # the same of do
    staged: bool = False  # dq is added to memory through shared memory, not by the threads that made it

    def __str__(self) -> str:
        return f"{self.block_m} queries x {BACKWARD_KEYS} keys"


def backward_tile(spec: FlashSpec) -> BackwardTile:
    """As many queries, and as much overlap, as registers allow. A fixed order of sums needs a warp that waits."""
    if spec.D == 64:
        return BackwardTile(128, overlap=1, staged=spec.deterministic)
    return BackwardTile(64, overlap=2, staged=spec.deterministic)


class Workspace(NamedTuple):
    """Of the backward, fp32: dq, and where the other parts begin. `end`: how many numbers it has."""

    rows: int  # lse and delta of every query
    drawn: int  # what every query tile adds to a sink's gradient
    turns: int  # for each half of a query tile how often it was added to
    end: int


def workspace(spec: FlashSpec, tile: BackwardTile) -> Workspace:
    blocks = spec.B * spec.H * tiles_of(spec, spec.N_Q, tile.block_m)
    rows = blocks * tile.block_m * spec.D
    drawn = rows + blocks * 2 * tile.block_m
    turns = drawn + blocks * spec.has_sinks
    return Workspace(rows, drawn, turns, turns + 2 * blocks * spec.deterministic)


def swizzle(spec: FlashSpec, hw: Hardware) -> int:
    """Heads of k and v worked on at a time: as many as half of the L2 cache holds q, do and fp32 dq of."""
    size = max(1, spec.N_Q * max(spec.group, 1) * (6 * spec.D + 2 * spec.E))
    return min(max(1, spec.B * spec.H_KV), max(1, hw.l2_bytes // 2 // size))
