"""How programs of a norm's backward walk rows, and the weight's gradient from the sums that each of them leaves.

The sums are always added in the same order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fulmen.launch import Launch, shared_memory
from fulmen.layers.fused.rotary import p2

COLUMNS, ROWS = 8, 512  # that one program adds at a time: 1,056 x 256 7 us, with 32 and 64 18

SMS = 132  # of an H200
STAGES = 3  # rows that are on their way while one is worked on, and that one


def programs_for(size: int, groups: int, rows: int) -> int:
    """Programs for each of a row's groups of `size`: as many as run at once.

    H200, 4 32 2048 rows in all: 1, 2 and 3 on each SM at 8,192, 4,096 and 2,048 columns, 94 to 98 % of a copy.
    """
    each = max(1, min(8, triton.cdiv(6144, p2(size))))
    return min(triton.cdiv(SMS * each, groups), rows)


def walking(size: int, *tensors: Tensor) -> tuple[int, dict[str, Any]]:
    """The stages of a loop that loads `size` elements of each tensor, as many as fit, and the launch's options."""
    width = p2(size)
    row = width * sum(x.element_size() for x in tensors)
    free = shared_memory(tensors[0].device) - 4 * width - 1024  # the sums change their layout there
    return max(1, min(STAGES, 1 + free // row)), {"num_warps": max(1, min(16, width // (32 * 16)))}


@triton.jit
def sum_kernel(
    sums_ptr, dweight_ptr, dweight2_ptr, programs,
    R: tl.constexpr, R2: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of the weights: the sum of the programs' sums, always in the same order."""
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        n = first + tl.arange(0, ROWS)
        mask = (n < programs)[:, None] & (i < R + R2)[None, :]
        total += tl.load(sums_ptr + n[:, None] * (R + R2) + i[None, :], mask, 0.0)
    found = tl.sum(total, axis=0).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + i, found, i < R)
    if R2 > 0:
        tl.store(dweight2_ptr + i - R, found, (i >= R) & (i < R + R2))


def sum_launch(sums: Tensor, dweight: Tensor, dweight2: Tensor) -> Launch:
    (programs, columns), R = sums.shape, dweight.shape[0]
    sizes = (programs, R, columns - R, COLUMNS, ROWS)
    return Launch(sum_kernel, triton.cdiv(columns, COLUMNS), (sums, dweight, dweight2), sizes, {"num_warps": 8})
