"""The launch of combine.cu, which combines the results of blocks that shared a row's keys."""

from __future__ import annotations

import torch

from fulmen import cuda
from fulmen.flash.policy import MAX_SPLITS
from fulmen.flash.spec import FlashSpec

COLUMNS = 128  # of a block, at most
UP_TO = (16, 64, MAX_SPLITS)  # splits: a variant each
MANY_BLOCKS = 1024  # of small ones more are resident: B1 H32/8, 15 splits 20.7 us with two sides, 20.1 with eight
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


def blocks_of_row(spec: FlashSpec) -> int:
    return max(1, spec.E // COLUMNS)


def sides(spec: FlashSpec, splits: int) -> int:
    """Groups of threads that share the splits of a row."""
    return 2 if splits <= UP_TO[0] and spec.B * spec.H * spec.N_Q * blocks_of_row(spec) > MANY_BLOCKS else 8


def variant(spec: FlashSpec, splits: int, sinks: torch.dtype | None = None) -> cuda.Variant:
    most = next(most for most in UP_TO if splits <= most)
    macros = {
        "VALUE_DIM": spec.E, "SIDES": sides(spec, splits), "MAX_SPLITS": most,
        "BF16": int(spec.dtype == torch.bfloat16), "SINKS": sinks_kind(spec, sinks),
    }  # fmt: skip
    return cuda.Variant("flash/kernels/combine.cu", "flash_combine_kernel", "90a", tuple(macros.items()), ARGUMENTS)


def launch_of(
    spec: FlashSpec, splits: int, o_strides: tuple[int, ...], sinks: torch.dtype | None = None
) -> cuda.Launch:
    """A block for each row and each COLUMNS of it."""
    constants = {"o_strides": o_strides, "heads": spec.B * spec.H, "h": spec.H, "n": spec.N_Q, "splits": splits}
    grid = (spec.N_Q * blocks_of_row(spec), spec.H, spec.B)
    threads = min(spec.E, COLUMNS) // 4 * sides(spec, splits)
    return cuda.Launch(variant(spec, splits, sinks), spec.device, grid, threads, 16 * threads, constants, early=True)
