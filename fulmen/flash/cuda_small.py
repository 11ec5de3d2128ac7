"""The launches of cuda_small.cu and cuda_once.cu, the forwards of short sequences: limits, shared memory, arguments."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.dispatch import Choice
from fulmen.flash.policy import PACKABLE_GROUPS, SMALL_MAX_TOKENS, SingleTile, SmallTile
from fulmen.flash.sdpa import MAX_GRID
from fulmen.flash.spec import FlashSpec, Residuals


def unsupported_reason(spec: FlashSpec, hw: hardware.Hardware) -> str | None:
    if spec.D != spec.E or spec.D not in (64, 128):
        return f"needs D = E of 64 or 128, here D={spec.D}, E={spec.E}"
    if spec.sequences is not None:
        return "takes no packed sequences (cu_seqlens)"
    if spec.has_sinks:
        return "has no sinks"
    if spec.softcap is not None:
        return "has no softcap"
    if spec.left is not None or spec.right not in (None, 0):
        return "has no window"
    if max(spec.B, spec.H) > MAX_GRID:
        return f"takes at most {MAX_GRID} batches and heads, here B={spec.B}, H={spec.H}"
    if max(spec.N_Q, spec.N_KV) > SMALL_MAX_TOKENS:
        return f"takes up to {SMALL_MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    return None


def threads(choice: Choice) -> int:
    return 128 if choice.kernel == "single_tile" else 32 * choice.tile.warps_m * choice.tile.warps_n


def shared_bytes(spec: FlashSpec, choice: Choice) -> int:
    tile: SmallTile | SingleTile = choice.tile
    return (tile.rows + 2 * tile.stages * tile.block_n) * 2 * spec.D


def grid(spec: FlashSpec, choice: Choice) -> tuple[int, int, int]:
    rows = choice.tile.rows
    if choice.kernel == "single_tile" and choice.tile.pack_gqa:
        if spec.group not in PACKABLE_GROUPS:
            raise ValueError(f"groups of {spec.group} query heads cannot share tiles, only of {PACKABLE_GROUPS}")
        return math.ceil(spec.N_Q * spec.group / rows), spec.H_KV, spec.B
    return math.ceil(spec.N_Q / rows), spec.H, spec.B


def variant(spec: FlashSpec, hw: hardware.Hardware, choice: Choice) -> cuda.Variant:
    tile = choice.tile
    macros = {"HEAD_DIM": spec.D, "BLOCK_N": tile.block_n, "BLOCKS_PER_SM": tile.blocks_per_sm}
    macros |= {"BF16": int(spec.dtype == torch.bfloat16), "CAUSAL": int(spec.right is not None)}
    if choice.kernel == "single_tile":
        macros |= {"PARTS": tile.stages, "GROUPED": int(tile.pack_gqa)}
        return cuda.Variant("flash/cuda_once.cu", "flash_once_forward_kernel", "90a", tuple(macros.items()))
    macros |= {"WARPS_M": tile.warps_m, "WARPS_N": tile.warps_n, "STAGES": tile.stages}
    return cuda.Variant("flash/cuda_small.cu", "flash_small_forward_kernel", str(hw.arch), tuple(macros.items()))


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of B, heads and N, in bytes; where there is but one, none is needed, and what a tensor says may be anything."""
    return tuple(
        step * x.element_size() if n > 1 else 0
        for x in tensors
        for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)
    )


def launch_of(spec: FlashSpec, choice: Choice, steps: tuple[int, ...], early: bool = True) -> cuda.Launch:
    """The launch of calls with these strides: q, k, v and o, in that order."""
    tile: SmallTile | SingleTile = choice.tile
    if (choice.kernel == "single_tile" or tile.stages == 1) and tile.stages * tile.block_n < spec.N_KV:
        raise ValueError(f"{tile} at once, and there are {spec.N_KV}")
    hw = hardware.of(spec.device)
    shift = 0 if spec.top_left else spec.N_KV - spec.N_Q
    group = max(spec.group, 1)
    scale = spec.scale * math.log2(math.e)
    rest = struct.pack("12q4ifi", *steps, group, spec.N_Q, spec.N_KV, shift, scale, group.bit_length() - 1)
    return cuda.Launch(
        variant(spec, hw, choice), spec.device, grid(spec, choice), threads(choice), shared_bytes(spec, choice), "5Q",
        rest, early and hw.arch >= 90,
    )  # fmt: skip


def launcher(spec: FlashSpec, choice: Choice, x: Residuals, o: Tensor) -> Callable[..., None]:
    """Launches calls with these shapes and strides: a function of the addresses of q, k, v, o, lse and x's others."""
    launch = launch_of(spec, choice, strides(x.q, x.k, x.v, o))
    return lambda q, k, v, o, lse, sinks, cu_q, cu_k: launch(q, k, v, o, lse)
