"""The launch of small.cu, the forward of short sequences on any GPU from compute capability 8.0 on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.dispatch import Choice
from fulmen.flash.policy import SMALL_MAX_TOKENS, SmallTile
from fulmen.flash.sdpa import MAX_GRID
from fulmen.flash.spec import FlashSpec, Residuals

TAKES_REPEATS = True

ARGUMENTS = cuda.Struct(
    "Args",
    ("q", "const char *"), ("k", "const char *"), ("v", "const char *"), ("o", "char *"),
    ("lse", "float *"),  # or null
    ("q_strides", cuda.STRIDES), ("k_strides", cuda.STRIDES), ("v_strides", cuda.STRIDES), ("o_strides", cuda.STRIDES),
    ("group", "int"), ("n_q", "int"), ("n_kv", "int"), ("shift", "int"),  # query i stands at position i + shift
    ("factor", "float"),  # scale * log2(e)
    ("log_group", "int"),  # base 2; PACK_GQA only
)  # fmt: skip


def unsupported_reason(spec: FlashSpec, hw: hardware.Hardware) -> str | None:
    if spec.D != spec.E or spec.D not in (64, 128):
        return f"needs D = E of 64 or 128, here D={spec.D}, E={spec.E}"
    if spec.has_kv_lengths:
        return "takes no lengths of a cache (kv_lengths)"
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
    return 32 * choice.tile.warps_m * choice.tile.warps_n


def shared_bytes(spec: FlashSpec, choice: Choice) -> int:
    tile: SmallTile = choice.tile
    return (tile.rows + 2 * tile.stages * tile.block_n) * 2 * spec.D


def grid(spec: FlashSpec, hw: hardware.Hardware, choice: Choice) -> tuple[int, int, int]:
    return math.ceil(spec.N_Q / choice.tile.rows), spec.H, spec.B


def variant(spec: FlashSpec, hw: hardware.Hardware, choice: Choice) -> cuda.Variant:
    tile: SmallTile = choice.tile
    macros = {
        "HEAD_DIM": spec.D, "WARPS_M": tile.warps_m, "WARPS_N": tile.warps_n, "BLOCK_N": tile.block_n,
        "STAGES": tile.stages, "BLOCKS_PER_SM": tile.blocks_per_sm, "BF16": int(spec.dtype == torch.bfloat16),
        "CAUSAL": int(spec.right is not None),
    }  # fmt: skip
    return cuda.Variant(
        "flash/kernels/small.cu", "flash_small_forward_kernel", str(hw.arch), tuple(macros.items()), ARGUMENTS
    )


def strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Of B, heads and N, in bytes; 0 where there is only one, of which a tensor may say anything."""
    return tuple(
        tuple(step * x.element_size() if n > 1 else 0 for n, step in zip(x.shape[:3], x.stride()[:3], strict=True))
        for x in tensors
    )


def constants(spec: FlashSpec, steps: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """The arguments of calls with these strides of q, k, v and o."""
    group = max(spec.group, 1)
    return dict(zip(("q_strides", "k_strides", "v_strides", "o_strides"), steps, strict=True)) | {
        "group": group, "n_q": spec.N_Q, "n_kv": spec.N_KV, "shift": 0 if spec.top_left else spec.N_KV - spec.N_Q,
        "factor": spec.scale * math.log2(math.e), "log_group": group.bit_length() - 1,
    }  # fmt: skip


def launch_of(spec: FlashSpec, choice: Choice, steps: tuple[tuple[int, ...], ...]) -> cuda.Launch:
    tile: SmallTile = choice.tile
    if tile.stages == 1 and tile.block_n < spec.N_KV:
        raise ValueError(f"{tile} at once, and there are {spec.N_KV}")
    hw = hardware.of(spec.device)
    return cuda.Launch(
        variant(spec, hw, choice), spec.device, grid(spec, hw, choice), threads(choice), shared_bytes(spec, choice),
        constants(spec, steps), early=hw.arch >= 90,
    )  # fmt: skip


def launcher(spec: FlashSpec, choice: Choice, x: Residuals, o: Tensor) -> Callable[..., None]:
    """Launches calls with these shapes and strides: a function of the addresses of q, k, v, o, lse and x's others."""
    launch = launch_of(spec, choice, strides(x.q, x.k, x.v, o))
    return lambda q, k, v, o, lse, sinks, cu_q, cu_k: launch(q, k, v, o, lse)
