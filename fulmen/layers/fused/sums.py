"""The gradient of a norm's weight: partial sums by the programs of the backward, then their sum in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.launch import Launch, shared_memory, sm_count
from fulmen.layers.fused.rotary import next_power_of_2

COLUMNS, ROWS = 8, 512  # a program of the sum adds at a time: 1,056 x 256 takes 7 us, with 32 and 64 18 us
STAGES = 3  # rows in flight


def programs_for(size: int, groups: int, rows: int, device: torch.device) -> int:
    """How many programs share the rows of one group of `size` columns: as many as the GPU runs at once.

    On an H200, with 32 M elements in all, one program an SM at 8,192 columns, two at 4,096 and three at 2,048 reach 94
    to 98 % of a copy.
    """
    per_sm = max(1, min(8, triton.cdiv(6144, next_power_of_2(size))))
    return min(triton.cdiv(sm_count(device) * per_sm, groups), rows)


def pipeline(width: int, *loads: tuple[int, Tensor | None]) -> tuple[int, dict[str, int]]:
    """Stages and launch options of a loop over rows of `width` elements that makes these `loads` an iteration.

    Each is a number of elements and the tensor they come from. All count: Triton keeps each load of such a loop in
    shared memory, weights too, which are the same in every iteration.
    """
    given = [(next_power_of_2(size), x) for size, x in loads if size and x is not None]
    row_bytes = sum(size * x.element_size() for size, x in given)
    width = next_power_of_2(width)
    free = shared_memory(given[0][1].device) - 4 * width - 1024  # the final sum needs one fp32 row of shared memory
    return max(1, min(STAGES, 1 + free // row_bytes)), {"num_warps": max(1, min(16, width // (32 * 16)))}


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
