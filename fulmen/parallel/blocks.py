"""Which keys of one rank's shard the queries of another see: the work of ring attention, as rectangular blocks.

A shard is one piece of the sequence or two, and packed sequences cut it further. Two different pieces share at most one
sequence, so what is visible is one rectangle. It is trimmed to the rows and columns that see anything, and the mask's
limits are counted from its corner. Within a piece the block is the square of the mask itself, packed where the piece
holds several sequences. Every rank can compute every other's blocks, so it knows what need not be sent.
"""

from __future__ import annotations

import bisect
import functools
from typing import NamedTuple

from fulmen.parallel.shards import Cut, Piece


class Mask(NamedTuple):
    """Query at position p sees keys p - left to p + right of its own sequence; None: without limit."""

    left: int | None
    right: int | None
    offsets: tuple[int, ...] | None  # of packed sequences, in the whole


class Block(NamedTuple):
    """Local queries q0 to q1 and keys k0 to k1 of a shard, and which of them see each other.

    Query q0 + i sees keys k0 + i - left to k0 + i + right. `diagonal`: every query is at the key of its own token.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int | None
    right: int | None
    offsets: tuple[int, ...] | None = None  # packed: of the block's queries and keys alike
    diagonal: bool = False


@functools.lru_cache(maxsize=65_536)
def blocks(cut: Cut, mask: Mask, rank: int, source: int) -> tuple[Block, ...]:
    """What the queries of `rank` compute with the keys of `source`."""
    N = cut.lengths[rank]
    in_order = cut.kind == "contiguous" or (mask.left is None and mask.right in (0, None))
    if rank == source and mask.offsets is None and in_order:  # pieces are in order: one mask serves both
        return (Block(0, N, 0, N, mask.left, mask.right, None, True),) if N else ()
    found = []
    q0 = 0
    for q_piece in cut.pieces(rank):
        k0 = 0
        for k_piece in cut.pieces(source):
            block = _within(q_piece, mask) if q_piece == k_piece else _between(q_piece, k_piece, mask)
            if block is not None:
                found.append(block._replace(q0=q0 + block.q0, q1=q0 + block.q1, k0=k0 + block.k0, k1=k0 + block.k1))
            k0 += k_piece.end - k_piece.begin
        q0 += q_piece.end - q_piece.begin
    return tuple(_joined(found))


def _within(piece: Piece, mask: Mask) -> Block | None:
    size = piece.end - piece.begin
    if not size:
        return None
    offsets = None
    if mask.offsets is not None:
        first, last = bisect.bisect_right(mask.offsets, piece.begin), bisect.bisect_left(mask.offsets, piece.end)
        inner = mask.offsets[first:last]
        if inner:
            offsets = (0, *(end - piece.begin for end in inner), size)
    return Block(0, size, 0, size, mask.left, mask.right, offsets, True)


def _between(q: Piece, k: Piece, mask: Mask) -> Block | None:
    """The rectangle of two different pieces, in tokens from their beginnings."""
    a, b, c, d = q.begin, q.end, k.begin, k.end
    if a >= b or c >= d:
        return None
    if mask.offsets is not None:
        late = max(a, c)
        sequence = bisect.bisect_right(mask.offsets, late) - 1
        begin, end = mask.offsets[sequence], mask.offsets[sequence + 1]
        a, b, c, d = max(a, begin), min(b, end), max(c, begin), min(d, end)
        if a >= b or c >= d:
            return None
    for _ in range(2):  # each limit may bring the other closer
        if mask.right is not None:
            a, d = max(a, c - mask.right), min(d, b + mask.right)
        if mask.left is not None:
            b, c = min(b, d + mask.left), max(c, a - mask.left)
    if a >= b or c >= d:
        return None
    left = None if mask.left is None else mask.left - (a - c)
    right = None if mask.right is None else mask.right + (a - c)
    left = None if left is None or left >= b - a - 1 else left  # a limit that hides nothing is none
    right = None if right is None or right >= d - c - 1 else right
    return Block(a - q.begin, b - q.begin, c - k.begin, d - k.begin, left, right)


def _joined(found: list[Block]) -> list[Block]:
    """Full rectangles side by side are one."""
    joined: list[Block] = []
    for block in found:
        last = joined[-1] if joined else None
        if last is not None and all(
            limit is None for limit in (*last[4:7], *block[4:7])
        ) and not (last.diagonal or block.diagonal):  # fmt: skip
            if (last.q0, last.q1, last.k1) == (block.q0, block.q1, block.k0):
                joined[-1] = last._replace(k1=block.k1)
                continue
            if (last.k0, last.k1, last.q1) == (block.k0, block.k1, block.q0):
                joined[-1] = last._replace(q1=block.q1)
                continue
        joined.append(block)
    return joined


@functools.lru_cache(maxsize=65_536)
def reach(cut: Cut, mask: Mask, source: int) -> int:
    """How many ranks a shard's keys are passed on: to the last rank that sees any of them."""
    P = len(cut.lengths)
    return max((hop for hop in range(1, P) if blocks(cut, mask, (source + hop) % P, source)), default=0)


@functools.lru_cache(maxsize=1024)
def shapes(cut: Cut, mask: Mask) -> frozenset[Block]:
    """One block of each size and mask that some rank computes, at the origin."""
    P = len(cut.lengths)
    found = (block for rank in range(P) for source in range(P) for block in blocks(cut, mask, rank, source))
    return frozenset(
        b._replace(q0=0, q1=b.q1 - b.q0, k0=0, k1=b.k1 - b.k0, offsets=b.offsets and (0, b.q1 - b.q0)) for b in found
    )
