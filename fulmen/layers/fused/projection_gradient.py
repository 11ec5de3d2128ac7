"""The gradient of a projection's output, of which lightning attention's backward writes parts.

q, k and v lie side by side in the output, for each key-value head. Where v is used as it lies there, the attention
writes dv into a new buffer for the whole gradient, and the kernel before the attention writes the rest (`Prepared`).
Where q, k and v are silu of their parts, the attention may write all three, already multiplied by silu's slope.

A backward finds its own buffer by autograd's number for it: one graph may have several backwards under way.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

backward_under_way = torch._C._current_graph_task_id
Sizes = tuple[int, ...]


class Part(NamedTuple):
    """Of q, k or v in the output (B, N, width): as (B, heads, N, size), and as (B, N, heads, size)."""

    offset: int
    shape: Sizes
    stride: Sizes
    by_token: tuple[Sizes, Sizes]

    def of(self, x: Tensor) -> Tensor:
        return x.as_strided(self.shape, self.stride, x.storage_offset() + self.offset)

    def is_at(self, address: int, dtype: torch.dtype, grad: Tensor | None) -> bool:
        """Whether a gradient (B, N, heads, size) is this part of the buffer that begins there."""
        if grad is None or grad.dtype != dtype or grad.is_neg() or (grad.shape, grad.stride()) != self.by_token:
            return False
        return grad.data_ptr() == address + self.offset * dtype.itemsize or not grad.numel()


@functools.lru_cache(maxsize=1024)
def parts_of(shape: Sizes, heads: Sizes) -> tuple[Part, Part, Part]:
    """Of an output (B, N, width). heads: H, H_KV, D, E; a head of k comes behind all of its queries."""
    (B, N, width), (H, H_KV, D, E) = shape, heads
    each, queries = width // H_KV, H // H_KV * D

    def part(offset: int, size: int) -> Part:
        by_token = torch.Size((B, N, H_KV, size)), (N * width, width, each, 1)
        return Part(offset, (B, H_KV, N, size), (N * width, each, width, 1), by_token)

    return part(0, queries), part(queries, D), part(queries + D, E)


class ProjectionGradient:
    """Buffers for the gradient of the output x (B, N, width), one for each backward."""

    def __init__(self, heads: Sizes, x: Tensor, silu: bool = False) -> None:
        self.parts, self.silu = parts_of(x.shape, heads), silu
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        # of each backward under way: its buffer's address and version, and whether all three are in it
        self.pending: dict[int, tuple[int, int, bool]] = {}

    def buffers(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """See `fulmen.lightning.op.Projection`. () if autocast made v another dtype, or silu has its own backward."""
        if v.dtype != self.dtype or (x is None and self.silu):
            return ()
        dx = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.pending[backward_under_way()] = dx.data_ptr(), dx._version, x is not None
        if x is None:
            return None, None, self.parts[2].of(dx)
        x = x.resolve_neg().contiguous()
        return *(part.of(dx) for part in self.parts), *(part.of(x) for part in self.parts)

    def forget(self) -> None:
        self.pending.pop(backward_under_way(), None)

    def take(self, *grads: Tensor | None) -> Tensor | None:
        """The buffer in which these gradients of q, k and v, (B, N, heads, size), lie, or that of v alone.

        None if they lie elsewhere, as where one is a sum; an error if they were multiplied by silu's slope already.
        """
        found, last = self.pending.pop(backward_under_way(), None), grads[-1]
        if found is None:
            return None
        address, version, complete = found
        known = self.parts if complete else self.parts[2:]
        there = all(
            part.is_at(address, self.dtype, grad) for part, grad in zip(known, grads[-len(known) :], strict=True)
        )
        if last is not None and there and not (complete and last._version != version):
            N, width = self.shape[1:]
            return last.as_strided(self.shape, (N * width, width, 1), last.storage_offset() - self.parts[2].offset)
        if complete:
            raise RuntimeError("a hook changed the gradient of q, k or v after it was multiplied by silu's slope")
        return None
