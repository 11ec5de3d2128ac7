"""How a sequence is cut over ranks, and joined again.

    contiguous   rank r has one piece, the r-th; pieces may have different lengths
    zigzag       the sequence is cut in 2 P equal pieces and rank r has the r-th and the r-th from the end, so that
                 under a causal mask every rank has as much to compute

A rank keeps its pieces in the order of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen.parallel.groups import Group, Ranks, agree, all_gather, ranks_of

KINDS = ("contiguous", "zigzag")


class Piece(NamedTuple):
    """Tokens `begin` to `end` of the whole sequence."""

    begin: int
    end: int


class Cut(NamedTuple):
    """Which tokens each rank has; the same on every rank, and hashable."""

    kind: str
    lengths: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def begin(self, rank: int) -> int:
        """The first token of a contiguous shard."""
        return sum(self.lengths[:rank])

    def pieces(self, rank: int) -> list[Piece]:
        if self.kind == "contiguous":
            return [Piece(self.begin(rank), self.begin(rank) + self.lengths[rank])]
        size, last = self.lengths[0] // 2, 2 * len(self.lengths) - 1
        return [Piece(i * size, (i + 1) * size) for i in (rank, last - rank)]

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """int64: the place in the whole sequence of each of a rank's tokens."""
        return torch.cat([torch.arange(*piece, device=device) for piece in self.pieces(rank)])


def cut_of_shards(N: int, ranks: Ranks, kind: str, lengths: Sequence[int] | None) -> Cut:
    """The cut of which this rank has a shard of N tokens; raises if there is none."""
    _check_kind(kind)
    if lengths is None:
        if kind == "zigzag" and N % 2:
            raise ValueError(f"shards='zigzag': a rank has two pieces of equal length, and here are N={N} tokens")
        return Cut(kind, (N,) * ranks.size)
    cut = Cut(kind, _checked(lengths, ranks.size, kind))
    if cut.lengths[ranks.rank] != N:
        raise ValueError(f"lengths={cut.lengths}: rank {ranks.rank} has N={N} tokens, not {cut.lengths[ranks.rank]}")
    return cut


def cut_of_whole(N: int, ranks: Ranks, kind: str, lengths: Sequence[int] | None) -> Cut:
    """The cut of a sequence of N tokens."""
    _check_kind(kind)
    parts = 2 * ranks.size if kind == "zigzag" else ranks.size
    if lengths is None:
        if N % parts:
            some = tuple(N // ranks.size + (rank < N % ranks.size) for rank in range(ranks.size))
            other = f", or pass lengths={some}" if kind == "contiguous" else ", or use shards='contiguous'"
            raise ValueError(f"N={N} tokens cannot be cut in {parts} equal pieces: pad the sequence{other}")
        return Cut(kind, (N // ranks.size,) * ranks.size)
    cut = Cut(kind, _checked(lengths, ranks.size, kind))
    if cut.total != N:
        raise ValueError(f"lengths={cut.lengths} sum to {cut.total}, must sum to N={N}")
    return cut


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"shards={kind!r}: must be one of {', '.join(map(repr, KINDS))}")


def _checked(lengths: Sequence[int], size: int, kind: str) -> tuple[int, ...]:
    found = tuple(lengths) if isinstance(lengths, Sequence) else ()
    if len(found) != size or any(type(n) is not int or n < 0 for n in found):
        raise ValueError(f"lengths={found or lengths}: must be one int >= 0 for each of the {size} ranks")
    if kind == "zigzag" and (len(set(found)) > 1 or found[0] % 2):
        raise ValueError(f"lengths={found}: zigzag shards have the same, even length on every rank")
    return found


def _dim(x: Tensor, dim: int) -> int:
    """From 0 on."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}, must be a torch.Tensor")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim!r}: x {tuple(x.shape)} has dimensions {-x.ndim} to {x.ndim - 1}")
    return dim % x.ndim


def shard(
    x: Tensor, group: Group, *, dim: int, shards: str = "contiguous", lengths: Sequence[int] | None = None
) -> Tensor:
    """This rank's part of x, which every rank has whole; a view, or of zigzag shards a copy.

    dim      the dimension of the tokens.
    lengths  tokens on each rank, where they are not the same on all.
    """
    ranks, dim = ranks_of(group), _dim(x, dim)
    cut = cut_of_whole(x.shape[dim], ranks, shards, lengths)
    parts = [x.narrow(dim, piece.begin, piece.end - piece.begin) for piece in cut.pieces(ranks.rank)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(
    x: Tensor, group: Group, *, dim: int, shards: str = "contiguous", lengths: Sequence[int] | None = None
) -> Tensor:
    """The whole of which every rank has a part, by one all-gather; differentiable.

    The result is the same on every rank, and so must be its gradient: each rank takes its own part of that.
    """
    ranks, dim = ranks_of(group), _dim(x, dim)
    cut = cut_of_shards(x.shape[dim], ranks, shards, lengths)
    others = {"x": (*x.shape[:dim], *x.shape[dim + 1 :]), "dim": dim, "cut": cut, "dtype": x.dtype}
    agree("unshard", ranks, others)
    return _Unshard.apply(x, ranks, dim, cut)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int, cut: Cut) -> Tensor:
        ctx.ranks, ctx.dim, ctx.cut = ranks, dim, cut
        first = x.movedim(dim, 0)
        longest = max(cut.lengths)
        own = first.new_zeros(longest, *first.shape[1:])
        own[: first.shape[0]] = first
        every = all_gather("unshard", own, ranks).wait()[0]
        out = every.new_empty(cut.total, *own.shape[1:])
        for rank, part in enumerate(every):
            at = 0
            for piece in cut.pieces(rank):
                size = piece.end - piece.begin
                out[piece.begin : piece.end] = part[at : at + size]
                at += size
        return out.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = [grad.narrow(ctx.dim, p.begin, p.end - p.begin) for p in ctx.cut.pieces(ctx.ranks.rank)]
        return torch.cat(parts, ctx.dim), None, None, None
