"""The launch of single_tile.cu, the forward of up to 256 keys on Hopper. Limits and arguments are those of small.cu."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.dispatch import Choice
from fulmen.flash.kernels.small import ARGUMENTS, constants, strides, unsupported_reason
from fulmen.flash.policy import SingleTile
from fulmen.flash.spec import PACKABLE_GROUPS, FlashSpec, Residuals

__all__ = ["ARGUMENTS", "TAKES_REPEATS", "launch_of", "launcher", "unsupported_reason", "variant"]

TAKES_REPEATS = True


def threads(choice: Choice) -> int:
    return 128


def shared_bytes(spec: FlashSpec, choice: Choice) -> int:
    tile: SingleTile = choice.tile
    return (tile.rows + 2 * tile.stages * tile.block_n) * 2 * spec.D


def grid(spec: FlashSpec, hw: hardware.Hardware, choice: Choice) -> tuple[int, int, int]:
    tile: SingleTile = choice.tile
    if not tile.pack_gqa:
        return math.ceil(spec.N_Q / tile.rows), spec.H, spec.B
    if spec.group not in PACKABLE_GROUPS:
        raise ValueError(f"groups of {spec.group} query heads cannot share tiles, only of {PACKABLE_GROUPS}")
    return math.ceil(spec.N_Q * spec.group / tile.rows), spec.H_KV, spec.B


def variant(spec: FlashSpec, hw: hardware.Hardware, choice: Choice) -> cuda.Variant:
    tile: SingleTile = choice.tile
    macros = {
        "HEAD_DIM": spec.D, "BLOCK_N": tile.block_n, "PARTS": tile.stages, "BLOCKS_PER_SM": tile.blocks_per_sm,
        "BF16": int(spec.dtype == torch.bfloat16), "CAUSAL": int(spec.right is not None),
        "PACK_GQA": int(tile.pack_gqa),
    }  # fmt: skip
    kernel = "flash_single_tile_forward_kernel"
    return cuda.Variant("flash/kernels/single_tile.cu", kernel, "90a", tuple(macros.items()), ARGUMENTS)


def launch_of(spec: FlashSpec, choice: Choice, steps: tuple[tuple[int, ...], ...]) -> cuda.Launch:
    tile: SingleTile = choice.tile
    if tile.stages * tile.block_n < spec.N_KV:
        raise ValueError(f"{tile} at once, and there are {spec.N_KV}")
    hw = hardware.of(spec.device)
    return cuda.Launch(
        variant(spec, hw, choice), spec.device, grid(spec, hw, choice), threads(choice), shared_bytes(spec, choice),
        constants(spec, steps), early=True,
    )  # fmt: skip


def launcher(spec: FlashSpec, choice: Choice, x: Residuals, o: Tensor) -> Callable[..., None]:
    """Launches calls with these shapes and strides: a function of the addresses of q, k, v, o, lse and x's others."""
    launch = launch_of(spec, choice, strides(x.q, x.k, x.v, o))
    return lambda q, k, v, o, lse, sinks, cu_q, cu_k: launch(q, k, v, o, lse)
