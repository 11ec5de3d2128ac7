"""Stochastic rounding of states to bf16, by random numbers that are made of the states' own bits.

A state that decays slowly changes by less than half a bf16 spacing a step. Rounded to nearest it would stay as it is;
rounded up or down at random, in proportion to the distance, it is right on average. Of two neighbouring columns of a
row, with x_0 and x_1 the bits of their fp32 values, the upper halves of

    a = (x_0 ^ row ^ (column + seed)) * FIRST        row and column: odd multiples of d and e
    b = a * SECOND                                   seed: the bits of q x, added up

are the random numbers. q x is the output of the last token that entered, which has to be computed in any case. Where q
is zero, and for drafts, whose output comes later, the columns' sums take its place.

So nothing has to be counted or passed from step to step: a captured CUDA graph draws new numbers at each replay, the
same call gives the same bits, and a row's bits do not depend on its slot or on the other rows. The seed keeps elements
from being rounded the same way for ever where tokens repeat: any change in what is rounded together draws anew. Where
q x is NaN its column is truncated, as the bits of a NaN might overflow to a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW, COLUMN = 0x9E3779B1, 0x85EBCA77
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
MASK = 0xFFFFFFFF


def to_bf16(x: Tensor, q: Tensor | None = None) -> Tensor:
    """fp32 (..., D, E) to bf16, up or down at random; q (..., D)."""
    D, E = x.shape[-2:]
    if E % 2:
        return to_bf16(torch.nn.functional.pad(x, (0, 1)), q)[..., :E]
    weights = torch.ones_like(x[..., 0]) if q is None else torch.where((q != 0).any(-1, keepdim=True), q, 1)
    columns = (weights[..., None, :] @ x)[..., 0, :]
    place = torch.arange(0, E, 2, device=x.device) * COLUMN + _bits(columns).sum(-1, keepdim=True)
    row = torch.arange(D, device=x.device)[:, None] * ROW
    number = ~columns.unflatten(-1, (-1, 2)).isnan().any(-1)[..., None, :]
    even, odd = _bits(x).unflatten(-1, (-1, 2)).unbind(-1)
    a = ((even ^ row ^ place[..., None, :]) & MASK) * (FIRST * number) & MASK
    b = a * SECOND & MASK
    rounded = torch.stack([even + (a >> 16), odd + (b >> 16)], -1).flatten(-2) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).to(torch.int64) & MASK
