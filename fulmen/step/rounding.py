"""Stochastic rounding of states to bf16, by random numbers that are made of the states' own bits.

A state that decays slowly changes by less than half a bf16 spacing a step. Rounded to nearest it would stay as it is;
rounded up or down at random, in proportion to the distance, it is right on average. The random number of element
(d, e) is a hash of

    its fp32 value, d and e, and the sum of all such values that are rounded together

so nothing has to be counted or passed from step to step: a captured CUDA graph draws new numbers at each replay, the
same call gives the same bits, and a row's bits do not depend on its slot or on the other rows. The sum is what keeps an
element from being rounded the same way for ever where tokens repeat: any change in its tile draws anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW, COLUMN = 0x9E3779B1, 0x85EBCA77  # odd: places differ in all bits
FIRST, SECOND = 0x7FEB352D, 0x846CA68B  # multipliers of a 32-bit finalizer
MASK = 0xFFFFFFFF
NAN = 0x7FC0


def to_bf16(x: Tensor) -> Tensor:
    """fp32 (..., D, E) to bf16, up or down at random. The triton backend makes one hash for two columns."""
    bits = x.view(torch.int32).to(torch.int64) & MASK
    d = torch.arange(x.shape[-2], device=x.device)[:, None] * ROW
    e = torch.arange(x.shape[-1], device=x.device) * COLUMN
    place = (d ^ e) & MASK
    seed = bits.sum((-2, -1), keepdim=True)
    hashed = ((bits + seed) & MASK ^ place) * FIRST & MASK
    hashed = (hashed ^ hashed >> 15) * SECOND & MASK
    rounded = (bits + (hashed >> 16)) >> 16
    rounded = torch.where(x.isnan(), NAN, rounded)  # whose bits might overflow to a number
    return rounded.to(torch.int16).view(torch.bfloat16)
