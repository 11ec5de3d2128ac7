"""Tensor maps: what the copy engine of Hopper (TMA) needs to know about a tensor."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from fulmen.cuda.launch import INVALID_CONTEXT, library, take_context

DATA_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # CUtensorMapDataType
SWIZZLE_128, PROMOTE_256 = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion
MAX_ADDRESSES = 256  # that tensors of one shape are remembered by


@functools.lru_cache(maxsize=8192)
def encode(
    dtype: torch.dtype, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """The 128 bytes that describe a tensor, innermost dimension first; strides in bytes, without the innermost.

    Boxes lie in shared memory with rows of 128 bytes, swizzled, and zeros beyond the end of the tensor.
    """
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(192)
    start = -ctypes.addressof(buffer) % 64
    whole, part = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    call = functools.partial(
        library().cuTensorMapEncodeTiled, ctypes.c_void_p(ctypes.addressof(buffer) + start), DATA_TYPES[dtype], rank,
        ctypes.c_void_p(address), whole(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides), part(*box),
        part(*[1] * rank), 0, SWIZZLE_128, PROMOTE_256, 0,
    )  # fmt: skip
    status = call()
    if status == INVALID_CONTEXT:  # as in a thread of autograd's that has not used the GPU yet
        take_context(torch.cuda.current_device())
        status = call()
    if status:
        raise ValueError(f"TMA cannot read sizes {sizes} with strides {strides} in boxes of {box}: CUDA error {status}")
    return buffer.raw[start : start + 128]


class TensorMaps:
    """The maps of tensors (B, heads, N, size) of one shape, by their address.

    A box is 64 columns of `rows` positions of a head or, with a group, of rows / group positions of all its heads.
    """

    def __init__(
        self, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, group: int = 1
    ) -> None:
        B, heads, N, size = shape
        step_b, step_h, step_n = strides[:3]
        dims = [(N, step_n, rows // group), (heads // group, step_h * group, 1), (B, step_b, 1)]
        if group > 1:
            dims.insert(0, (group, step_h, group))
        sizes, steps, box = zip(*dims, strict=True)
        apart = tuple(dtype.itemsize * (step if n > 1 else size) for n, step in zip(sizes, steps, strict=True))
        self.facts = dtype, (size, *sizes), apart, (64, *box)
        self.known: dict[int, bytes] = {}

    def __call__(self, address: int) -> bytes:
        known = self.known.get(address)
        if known is None:
            dtype, sizes, strides, box = self.facts
            known = encode(dtype, address, sizes, strides, box)
            if len(self.known) >= MAX_ADDRESSES:
                self.known = {}
            self.known[address] = known
        return known


def tensor_maps(x: Tensor, rows: int, group: int = 1) -> TensorMaps:
    """The maps of tensors like `x`."""
    return TensorMaps(x.dtype, x.shape, x.stride(), rows, group)
