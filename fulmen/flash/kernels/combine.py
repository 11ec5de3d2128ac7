"""The launch of combine.cu, which combines the results of blocks that shared a row's keys."""

from __future__ import annotations

import torch

from fulmen import cuda
from fulmen.flash.policy import MAX_SPLITS
from fulmen.flash.spec import FlashSpec

THREADS = 128
SHARED_BYTES = 4 * MAX_SPLITS + 16 * THREADS

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


def variant(spec: FlashSpec, sinks: torch.dtype | None = None) -> cuda.Variant:
    macros = {"VALUE_DIM": spec.E, "BF16": int(spec.dtype == torch.bfloat16), "SINKS": sinks_kind(spec, sinks)}
    return cuda.Variant("flash/kernels/combine.cu", "flash_combine_kernel", "90a", tuple(macros.items()), ARGUMENTS)


def launch_of(
    spec: FlashSpec, splits: int, o_strides: tuple[int, ...], sinks: torch.dtype | None = None
) -> cuda.Launch:
    """One block for each row."""
    constants = {"o_strides": o_strides, "heads": spec.B * spec.H, "h": spec.H, "n": spec.N_Q, "splits": splits}
    grid = (spec.N_Q, spec.H, spec.B)
    return cuda.Launch(variant(spec, sinks), spec.device, grid, THREADS, SHARED_BYTES, constants, early=True)
