"""The launch of cuda_small.cu, the forward of short sequences: its limits, tiles and arguments."""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.flash.op import FlashSpec, Residuals

MAX_TOKENS = 512
HEAD_DIMS = (64, 128)
MAX_GRID = 65_535


def lacks(spec: FlashSpec) -> str | None:
    if spec.D != spec.E or spec.D not in HEAD_DIMS:
        return f"needs D = E of 64 or 128, here D={spec.D}, E={spec.E}"
    if spec.sequences is not None:
        return "takes no packed sequences (cu_seqlens)"
    if spec.has_sinks:
        return "has no sinks"
    if spec.softcap is not None:
        return "has no softcap"
    if spec.left is not None or spec.right not in (None, 0):
        return "has no window"
    if max(spec.N_Q, spec.N_KV) > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    if max(spec.B, spec.H) > MAX_GRID:
        return f"takes at most {MAX_GRID} batches and heads, here B={spec.B}, H={spec.H}"
    return None


class Config(NamedTuple):
    warps_m: int  # of 16 queries each
    warps_n: int  # that share the keys of a block
    block_n: int  # keys at a time
    stages: int  # blocks of keys on their way; 1: there is but one
    blocks_per_sm: int = 1  # how many the registers must leave room for

    @property
    def rows(self) -> int:
        return 16 * self.warps_m

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def shared(self, D: int) -> int:
        return (self.rows + 2 * self.stages * self.block_n) * 2 * D

    def __str__(self) -> str:
        return f"cuda_small.cu, {self.rows} queries x {self.block_n} keys"


def blocks(spec: FlashSpec, rows: int) -> int:
    return math.ceil(spec.N_Q / rows) * spec.B * spec.H


def config(spec: FlashSpec, hw: hardware.Hardware) -> Config:
    """Few queries are spread over as many SMs as there are; many share the keys they load.

    Beside a row its us on an H200, L2 cold, and those of FlashAttention-2, D = 64, full (dev/ladder_cuda.md).
    """

    wide, once = spec.D == 128, spec.N_KV <= 128
    all_keys = 64 if spec.N_KV <= 64 else 128
    ring = min(2 if wide else 4, max(2, math.ceil(spec.N_KV / 64)))
    if blocks(spec, 16) <= hw.sm_count:
        if once:
            return Config(1, 4, 128, 1)  # B1 H1 N128: 2.7, 5.2
        return Config(1, 4, 64, 2) if wide else Config(1, 4, 128, 2)
    if blocks(spec, 32) <= hw.sm_count:
        return Config(2, 2, 128, 1) if once else Config(2, 2, 64, ring)  # B8 H4 N128: 3.8, 6.2
    if blocks(spec, 64) <= hw.sm_count:
        return Config(4, 1, all_keys, 1) if once else Config(4, 1, 64, ring)
    if hw.arch == 90 and once and not wide:
        return Config(4, 1, all_keys, 1, 4)  # B32 H8 N128: 9.2, 10.4; with 128 queries a block 9.9
    return Config(8, 1, 64, 2) if wide else Config(8, 1, 64, ring, 2 if hw.arch < 100 else 1)


def variant(spec: FlashSpec, hw: hardware.Hardware, cfg: Config) -> cuda.Variant:
    macros = {
        "HEAD_DIM": spec.D, "WARPS_M": cfg.warps_m, "WARPS_N": cfg.warps_n, "BLOCK_N": cfg.block_n,
        "STAGES": cfg.stages, "BLOCKS_PER_SM": cfg.blocks_per_sm, "BF16": int(spec.dtype == torch.bfloat16),
        "CAUSAL": int(spec.right is not None),
    }  # fmt: skip
    return cuda.Variant("flash/cuda_small.cu", "flash_small_forward_kernel", str(hw.arch), tuple(macros.items()))


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of B, heads and N, in bytes."""
    return tuple(step * x.element_size() for x in tensors for step in x.stride()[:3])


@functools.lru_cache(maxsize=4096)
def launch_of(spec: FlashSpec, cfg: Config, steps: tuple[int, ...], early: bool = True) -> cuda.Launch:
    """The launch of calls with these strides: q, k, v and o, in that order."""
    if cfg.stages == 1 and cfg.block_n < spec.N_KV:
        raise ValueError(f"{cfg} in one block of keys, and there are {spec.N_KV}")
    hw = hardware.of(spec.device)
    shift = 0 if spec.top_left else spec.N_KV - spec.N_Q
    rest = struct.pack(
        "12q4if4x", *steps, max(spec.group, 1), spec.N_Q, spec.N_KV, shift, spec.scale * math.log2(math.e)
    )
    grid = (math.ceil(spec.N_Q / cfg.rows), spec.H, spec.B)
    return cuda.Launch(
        variant(spec, hw, cfg), spec.device, grid, cfg.threads, cfg.shared(spec.D), "5Q", rest, early and hw.arch >= 90
    )


def run(spec: FlashSpec, cfg: Config, x: Residuals, o: Tensor, lse: Tensor | None) -> None:
    launch = launch_of(spec, cfg, strides(x.q, x.k, x.v, o))
    launch(x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr(), o.data_ptr(), 0 if lse is None else lse.data_ptr())
