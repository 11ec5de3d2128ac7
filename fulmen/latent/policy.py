"""What latent attention runs: the backend, its tile and how often keys are split.

Data and pure functions of (spec, hw). Few rows of the batch leave SMs idle, so the keys of a row are split, as often as
fills the GPU once. The number of splits depends on the shape and `max_kv_length`, never on a row's length, so that a
call is the same from step to step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fulmen.dispatch import Choice
from fulmen.hardware import Hardware
from fulmen.latent.spec import LatentSpec

ORDER = ("triton", "eager", "cuda", "reference")
HOPPER_ORDER = ("cuda", "triton", "eager", "reference")
CPU_ORDER = ("eager", "triton", "cuda", "reference")  # triton is interpreted there

MAX_SPLITS = 128
CUDA_ROWS, CUDA_KEYS = 64, 64  # queries of a block of the kernel of `cuda`; pages divide the keys or are a multiple
TRITON_ROOMY = 113_000  # bytes of shared memory: 32 queries, 32 keys of 576 columns, 3 stages
CUDA_DIMS = (576, 512)
LONG_SPLIT = 512  # keys


class LatentTile(NamedTuple):
    """The kernel of backend `cuda`: for Hopper."""

    block_n: int = CUDA_KEYS  # keys at a time

    @property
    def stages(self) -> int:
        return 2 * CUDA_KEYS // self.block_n

    def __str__(self) -> str:
        return f"{CUDA_ROWS} queries x {self.block_n} keys"


class TritonTile(NamedTuple):
    block_m: int  # queries of a program, of all heads
    block_n: int  # keys at a time
    num_warps: int
    num_stages: int
    per_sm: int = 1  # programs an SM holds at once

    def __str__(self) -> str:
        return f"{self.block_m} queries x {self.block_n} keys, {self.num_warps} warps, {self.num_stages} stages"


def query_tiles(spec: LatentSpec, block_m: int) -> int:
    return math.ceil(spec.rows / block_m)


def triton_tile(spec: LatentSpec, hw: Hardware) -> TritonTile:
    """32 queries where there are so many, of any heads; three stages where shared memory has room for them."""
    if spec.dtype.itemsize == 4:
        return TritonTile(16, 16, 8, 2)
    roomy = hw.smem_bytes >= TRITON_ROOMY
    per_sm = 2 if hw.smem_bytes >= 2 * TRITON_ROOMY else 1
    if spec.rows <= 16:
        return TritonTile(16, 32, 4, 3, per_sm)
    return TritonTile(32, 32, 8, 3 if roomy else 2, per_sm)


def cuda_tile(spec: LatentSpec, parts: int) -> LatentTile:
    """32 keys and 4 stages where loads are the limit: one tile of queries that walks many keys; else 64 and 2.

    N8192, 32 and 64 keys: B64 H16 167, 183 us; B64 H32 174, 188; B16 H32 57.0, 62.4; B1 H32 15.8, 15.6; B64 H128 494,
    508 TFLOP/s.
    """
    few = spec.rows <= CUDA_ROWS and spec.max_kv_length >= LONG_SPLIT * parts
    return LatentTile(CUDA_KEYS // 2 if few else CUDA_KEYS)


def splits(spec: LatentSpec, block_m: int, block_n: int, room: int) -> int:
    """Parts of a row's keys, so that `room` blocks have work; each has two blocks of keys or more."""
    tiles, blocks = spec.B * query_tiles(spec, block_m), math.ceil(spec.max_kv_length / block_n)
    if not tiles or not blocks:
        return 1
    each = max(2, math.ceil(blocks / max(1, min(room // tiles, MAX_SPLITS))))
    return math.ceil(blocks / each)


def order(spec: LatentSpec, hw: Hardware) -> tuple[str, ...]:
    """Backends in the order "auto" tries them."""
    if spec.device.type != "cuda":
        return CPU_ORDER
    return HOPPER_ORDER if hw.arch == 90 else ORDER


def choose(spec: LatentSpec, hw: Hardware, backend: str = "auto") -> Choice:
    """What `backend` runs for a call it serves; "auto": the backend to try first."""
    if backend == "auto":
        return choose(spec, hw, order(spec, hw)[0])
    if backend == "triton":
        tile = triton_tile(spec, hw)
        parts = splits(spec, tile.block_m, tile.block_n, tile.per_sm * hw.sm_count)
        return Choice(backend, backend, tile, parts, backend)
    if backend == "cuda":
        parts = splits(spec, CUDA_ROWS, CUDA_KEYS, hw.sm_count)
        return Choice(backend, backend, cuda_tile(spec, parts), parts, backend)
    return Choice(backend, backend, None, 1, backend)
