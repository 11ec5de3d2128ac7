"""The launch of cuda_sm90.cu, the forward for Hopper, and of cuda_merge.cu, which combines the results of split keys:
limits, shared memory, tensor maps and arguments. Tiles and splits are those of a `Choice` (policy.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.dispatch import Choice
from fulmen.flash.policy import (
    MAX_SPLITS,
    PACKABLE_GROUPS,
    SM90_HEAD_DIMS,
    Sm90Tile,
    heads,
    sm90_tile,
    swizzle_heads,
    tiles_per_head,
)
from fulmen.flash.spec import FlashSpec, Residuals

MAX_TOKENS = 1 << 28  # positions and distances fit 32 bits
MAX_TILES = 1 << 30
MERGE_THREADS = 128
MERGE_BYTES = 4 * MAX_SPLITS + 16 * MERGE_THREADS  # of shared memory


def unsupported_reason(spec: FlashSpec, hw: hardware.Hardware) -> str | None:
    if (spec.D, spec.E) not in SM90_HEAD_DIMS:
        sizes = ", ".join(f"{D}/{E}" for D, E in SM90_HEAD_DIMS)
        return f"needs D/E of {sizes}, here {spec.D}/{spec.E}"
    if max(spec.N_Q, spec.N_KV) > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    tile = sm90_tile(spec, hw)
    if tiles_per_head(spec, tile) * heads(spec, tile) > MAX_TILES:
        return f"takes up to {MAX_TILES} tiles of {tile.rows} queries, here B={spec.B}, H={spec.H}, N_Q={spec.N_Q}"
    return None


def threads(tile: Sm90Tile) -> int:
    return 128 * (tile.consumers + 1)


def shared_bytes(spec: FlashSpec, tile: Sm90Tile) -> int:
    tensors = tile.rows * spec.D + tile.stages * tile.block_n * (spec.D + spec.E)
    return 2 * tensors + 16 * tile.consumers + 32 * tile.stages  # with the barriers


def variant(spec: FlashSpec, choice: Choice, sinks: torch.dtype | None = None) -> cuda.Variant:
    tile: Sm90Tile = choice.tile
    macros = {
        "HEAD_DIM": spec.D, "VALUE_DIM": spec.E, "CONSUMERS": tile.consumers, "BLOCK_N": tile.block_n,
        "STAGES": tile.stages, "BLOCKS_PER_SM": tile.blocks_per_sm, "TAKE_TURNS": int(tile.take_turns),
        "BF16": int(spec.dtype == torch.bfloat16), "LEFT": int(spec.left is not None),
        "RIGHT": int(spec.right is not None), "SOFTCAP": int(spec.softcap is not None),
        "PACKED": int(spec.sequences is not None), "GROUPED": int(tile.pack_gqa),
        "SPLIT": int(choice.splits > 1), "SINKS": kind(spec, sinks) if choice.splits == 1 else 0,
    }  # fmt: skip
    return cuda.Variant("flash/cuda_sm90.cu", "flash_sm90_forward_kernel", "90a", tuple(macros.items()))


def kind(spec: FlashSpec, sinks: torch.dtype | None) -> int:
    return 0 if not spec.has_sinks else 1 if sinks in (None, torch.float32) else 2


def merge_variant(spec: FlashSpec, sinks: torch.dtype | None = None) -> cuda.Variant:
    macros = {"VALUE_DIM": spec.E, "BF16": int(spec.dtype == torch.bfloat16), "SINKS": kind(spec, sinks)}
    return cuda.Variant("flash/cuda_merge.cu", "flash_merge_kernel", "90a", tuple(macros.items()))


def launch_of(
    spec: FlashSpec, choice: Choice, o_strides: tuple[int, ...], sinks: torch.dtype | None = None
) -> cuda.Launch:
    tile: Sm90Tile = choice.tile
    if tile.pack_gqa and spec.group not in PACKABLE_GROUPS:
        raise ValueError(f"groups of {spec.group} query heads cannot share tiles, only of {PACKABLE_GROUPS}")
    hw = hardware.of(spec.device)
    every, tiles, group = heads(spec, tile), tiles_per_head(spec, tile), max(spec.group, 1)
    log2e = math.log2(math.e)
    factor, inner = spec.scale * log2e, 0.0
    if spec.softcap is not None:
        factor, inner = spec.softcap * log2e, spec.scale / spec.softcap
    rest = struct.pack(
        "3q11i2f2i", *o_strides, every, spec.H_KV if tile.pack_gqa else spec.H, group, spec.N_Q, spec.N_KV,
        spec.left or 0, spec.right or 0, int(spec.top_left), spec.sequences or 0, tiles,
        swizzle_heads(spec, tile, hw), factor, inner, group.bit_length() - 1, choice.splits,
    )  # fmt: skip
    rest += bytes(-(len(rest) + 40) % 64)  # the struct begins with maps, and so has their alignment
    grid = (min(tile.blocks_per_sm * hw.sm_count, tiles * every * choice.splits), 1, 1)
    return cuda.Launch(
        variant(spec, choice, sinks), spec.device, grid, threads(tile), shared_bytes(spec, tile), "128s128s128s5Q",
        rest, early=True,
    )  # fmt: skip


def merge_of(spec: FlashSpec, splits: int, o_strides: tuple[int, ...], sinks: torch.dtype | None = None) -> cuda.Launch:
    rest = struct.pack("3q4i", *o_strides, spec.B * spec.H, spec.H, spec.N_Q, splits)
    grid = (spec.N_Q, spec.H, spec.B)
    variant = merge_variant(spec, sinks)
    return cuda.Launch(variant, spec.device, grid, MERGE_THREADS, MERGE_BYTES, "5Q", rest, early=True)


def workspace(spec: FlashSpec, splits: int) -> tuple[Tensor, int]:
    """For what blocks have of split keys: fp32 sums and, from the second number on, m and l."""
    rows = splits * spec.B * spec.H * spec.N_Q
    return torch.empty(rows * (spec.E + 2), dtype=torch.float32, device=spec.device), 4 * rows * spec.E


def strides(o: Tensor) -> tuple[int, ...]:
    """Of B, heads and N, in bytes."""
    return tuple(step * o.element_size() for step in o.stride()[:3])


def launcher(spec: FlashSpec, choice: Choice, x: Residuals, o: Tensor) -> Callable[..., None]:
    """Launches calls with these shapes and strides: a function of the addresses of q, k, v, o, lse and x's others."""
    tile: Sm90Tile = choice.tile
    sinks = None if x.sinks is None else x.sinks.dtype
    launch = launch_of(spec, choice, strides(o), sinks)
    if launch.empty:
        return lambda *addresses: None
    q_map = k_map = v_map = cuda.tensor_maps(x.q, 64, spec.group if tile.pack_gqa else 1)
    if spec.N_KV:  # else nothing is read through them
        k_map, v_map = cuda.tensor_maps(x.k, tile.block_n), cuda.tensor_maps(x.v, tile.block_n)

    def run(q: int, k: int, v: int, o: int, lse: int, sinks: int, cu_q: int, cu_k: int) -> None:
        launch(q_map(q), k_map(k), v_map(v), o, lse, sinks, cu_q, cu_k)

    def run_split(q: int, k: int, v: int, o: int, lse: int, sinks: int, cu_q: int, cu_k: int) -> None:
        work, after = workspace(spec, choice.splits)
        sums = work.data_ptr()
        launch(q_map(q), k_map(k), v_map(v), sums, sums + after, 0, 0, 0)
        merge(sums, sums + after, o, lse, sinks)

    if choice.splits == 1:
        return run
    merge = merge_of(spec, choice.splits, strides(o), sinks)
    return run_split
