"""The gradients of norms' weights from the sums that programs of a backward left: always added in the same order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fulmen.launch import Launch

COLUMNS, ROWS = 8, 512  # that one program adds at a time: 1,056 x 256 7 us, with 32 and 64 18


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
