"""Rows of a batch with different numbers of tokens, and packed sequences: what attention needs to know of both.

A layer that is given a padding mask brings each row's tokens to the front (`Padding.front`), works, and puts them back
(`Padding.back`): one way for padding on the left, on the right and in between, without a look at values on the host.
Attention then is one packed call over the rows laid end to end; what lies behind a row's tokens is covered by a
sequence of queries without keys, whose output is zero, and one of keys without queries, which nobody sees.

    row 0 | a b c . . |  row 1 | d e . . . |      queries, and as many keys
    q:       (a b c)  (. .)  ()       (d e)  (. . .)  ()
    k:       (a b c)  ()     (. .)    (d e)  ()       (. . .)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Padding(NamedTuple):
    """Which tokens of a batch there are."""

    mask: Tensor  # bool (B, N): True for a token
    order: Tensor  # int64 (B, N): the column that comes to each place
    places: Tensor  # int64 (B, N): the place each column goes to
    counts: Tensor  # int64 (B,): tokens in each row

    @classmethod
    def of(cls, mask: Tensor) -> Padding:
        counts = mask.sum(1)
        places = torch.where(mask, mask.cumsum(1), counts[:, None] + (~mask).cumsum(1)) - 1
        columns = torch.arange(mask.shape[1], device=mask.device).expand_as(places)
        return cls(mask, torch.zeros_like(places).scatter(1, places, columns), places, counts)

    def front(self, x: Tensor) -> Tensor:
        """x (B, N, ...) with each row's tokens first, in their order, and zeros, whatever was there, for padding."""
        return _taken(self._zeroed(x), self.order)

    def back(self, y: Tensor) -> Tensor:
        """y (B, N, ...) where the tokens were, and zeros where padding was."""
        return self._zeroed(_taken(y, self.places))

    def _zeroed(self, x: Tensor) -> Tensor:
        keep = self.mask.view(*self.mask.shape, *[1] * (x.ndim - 2))
        return torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _taken(x: Tensor, index: Tensor) -> Tensor:
    return x.take_along_dim(index.view(*index.shape, *[1] * (x.ndim - 2)), dim=1)


class Rows(NamedTuple):
    """Which queries see which keys, before causality: of each row of a batch, or of packed sequences (B = 1).

    counts      int64 (B,) each: row b's first q_counts[b] queries see its first k_counts[b] keys.
    cu_seqlens  int32: offsets of packed sequences, as `flash_attention` takes them.
    """

    q_counts: Tensor | None = None
    k_counts: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    def offsets(self, N_Q: int, N_KV: int) -> tuple[Tensor, Tensor]:
        """cu_seqlens_q and cu_seqlens_k of the rows laid end to end, N_Q queries and N_KV keys each."""
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            return self.cu_seqlens_q, self.cu_seqlens_k
        assert self.q_counts is not None, "rows have counts or offsets"
        assert self.k_counts is not None, "of queries and of keys"
        return row_offsets(self.q_counts, N_Q, self.k_counts, N_KV)

    def keys_of_queries(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries 0 to N_Q - 1: the key each stands at, the first key it may see and the one after the last.

        int64 (B or 1, N_Q) each, counted within the row, or through all packed sequences.
        """
        if self.cu_seqlens_q is not None and self.cu_seqlens_k is not None:
            sequence = sequence_of(query, self.cu_seqlens_q)
            first, end = self.cu_seqlens_k[sequence].long(), self.cu_seqlens_k[sequence + 1].long()
            position = query - self.cu_seqlens_q[sequence + 1] + end
            return position[None], first[None], end[None]
        assert self.q_counts is not None, "rows have counts or offsets"
        assert self.k_counts is not None, "of queries and of keys"
        q_counts, k_counts = self.q_counts[:, None], self.k_counts[:, None]
        end = torch.where(query < q_counts, k_counts, 0)  # what is no query sees nothing
        return query + k_counts - q_counts, torch.zeros_like(end), end


def row_offsets(q_counts: Tensor, N_Q: int, k_counts: Tensor, N_KV: int) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k of rows laid end to end: see the top of the file.

    q_counts, k_counts  int64 (B,): row b's first q_counts[b] of N_Q queries see its first k_counts[b] of N_KV keys.
    """
    row = torch.arange(q_counts.shape[0], device=q_counts.device)
    q_row, k_row = row * N_Q, row * N_KV
    q_end, k_end = q_row + q_counts, k_row + k_counts
    cu_seqlens_q = torch.stack([q_end, q_row + N_Q, q_row + N_Q], 1).flatten()
    cu_seqlens_k = torch.stack([k_end, k_end, k_row + N_KV], 1).flatten()
    pad = torch.nn.functional.pad
    return pad(cu_seqlens_q, (1, 0)).to(torch.int32), pad(cu_seqlens_k, (1, 0)).to(torch.int32)


def sequence_of(token: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Which packed sequence each token is in."""
    return torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1


def packed_positions(cu_seqlens: Tensor, N: int) -> Tensor:
    """int64 (N,): each token's place in its own sequence."""
    token = torch.arange(N, device=cu_seqlens.device)
    return token - cu_seqlens[sequence_of(token, cu_seqlens)]


def one_row(x: Tensor) -> Tensor:
    """(B, H, N, D) to (1, H, B * N, D); a view where a token's heads lie together in memory, else a copy."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def many_rows(x: Tensor, B: int, N: int) -> Tensor:
    """(1, H, B * N, E) to (B, H, N, E), a view."""
    return x[0].unflatten(1, (B, N)).transpose(0, 1)


def check_mask(mask: Tensor, x: Tensor, name: str = "mask") -> None:
    """One clear error for a padding mask that does not fit x (B, N, ...)."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"{name} is {got}, must be a bool tensor, True for a token and False for padding")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, must be (B, N) = {tuple(x.shape[:2])}")
    if mask.device != x.device:
        raise ValueError(f"{name} is on {mask.device}, must be on {x.device}, where its tokens are")
