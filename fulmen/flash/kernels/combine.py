"""The launch of combine.cu, which combines the results of blocks that shared a row's keys."""

from __future__ import annotations

import torch

from fulmen import cuda
from fulmen.flash.policy import MAX_SPLITS
from fulmen.flash.spec import FlashSpec

COLUMNS = 128  # of a block, at most
SIDES = {16: 2, 64: 8, MAX_SPLITS: 8}  # up to so many splits: groups of threads that share those of a row
SHARED_BYTES = 4 * COLUMNS * 8

ARGUMENTS = cuda.Struct(
    "Args",
    ("sums", "const float4 *"),  # (splits, heads, N, E)
    ("found", "const float2 *"),  # m, in base 2, and l (splits, heads, N)
    ("o", "char *"), ("lse", "float *"), ("sinks", "const char *"),  # lse: or null
    ("o_strides", cuda.STRIDES),
    ("heads", "int"), ("h", "int"), ("n", "int"), ("splits", "int"),  # B * H, H
)  # fmt: skip


def sinks_kind(spec: FlashSpec, sinks: torch.dtype | None) -> int:
    """0: none, 1: fp32, 2: as q."""
    return 0 if not spec.has_sinks else 1 if sinks in (None, torch.float32) else 2


def up_to(splits: int) -> int:
    """Which kernel: the most splits it takes."""
    return next(most for most in SIDES if splits <= most)


def variant(spec: FlashSpec, splits: int, sinks: torch.dtype | None = None) -> cuda.Variant:
    most = up_to(splits)
    macros = {
        "VALUE_DIM": spec.E, "SIDES": SIDES[most], "MAX_SPLITS": most, "BF16": int(spec.dtype == torch.bfloat16),
        "SINKS": sinks_kind(spec, sinks),
    }  # fmt: skip
    return cuda.Variant("flash/kernels/combine.cu", "flash_combine_kernel", "90a", tuple(macros.items()), ARGUMENTS)


def launch_of(
    spec: FlashSpec, splits: int, o_strides: tuple[int, ...], sinks: torch.dtype | None = None
) -> cuda.Launch:
    """A block for each row and each COLUMNS of it."""
    constants = {"o_strides": o_strides, "heads": spec.B * spec.H, "h": spec.H, "n": spec.N_Q, "splits": splits}
    columns = min(spec.E, COLUMNS)
    grid, threads = (spec.N_Q * (spec.E // columns), spec.H, spec.B), columns // 4 * SIDES[up_to(splits)]
    return cuda.Launch(variant(spec, splits, sinks), spec.device, grid, threads, 16 * threads, constants, early=True)
