"""The launch of cuda_sm90.cu, the forward for Hopper: tiles, tensor maps, and the order in which heads are taken."""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.boundary import empty_rows
from fulmen.flash.op import FlashSpec, Residuals, empty_lse

BARRIERS = 16  # bytes for q, and 32 for each stage


class Config(NamedTuple):
    consumers: int  # warpgroups of 64 queries
    block_n: int  # keys at a time
    stages: int
    take_turns: bool  # the warpgroups start their products one after the other

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def shared(self, D: int) -> int:
        return (self.rows + 2 * self.stages * self.block_n) * 2 * D + BARRIERS + 32 * self.stages


def config(spec: FlashSpec) -> Config:
    """None of these is measured yet."""
    return Config(2, 128, 2, False) if spec.D == 128 else Config(3, 128, 2, True)


def variant(spec: FlashSpec, cfg: Config) -> cuda.Variant:
    macros = {
        "HEAD_DIM": spec.D, "CONSUMERS": cfg.consumers, "BLOCK_N": cfg.block_n, "STAGES": cfg.stages,
        "BF16": int(spec.dtype == torch.bfloat16), "CAUSAL": int(spec.right is not None),
        "TAKE_TURNS": int(cfg.take_turns),
    }  # fmt: skip
    return cuda.Variant("flash/cuda_sm90.cu", "flash_sm90_forward_kernel", "90a", tuple(macros.items()))


def section(spec: FlashSpec, hw: hardware.Hardware) -> int:
    """Query heads worked on at a time: as many as half the L2 cache holds the k and v of, whole groups."""
    stored = hw.l2_bytes // 2 // max(1, spec.N_KV * (spec.D + spec.E) * 2)
    return min(spec.B * spec.H, max(1, stored) * max(spec.group, 1))


@functools.lru_cache(maxsize=4096)
def launch_of(spec: FlashSpec, o_strides: tuple[int, ...], cfg: Config) -> cuda.Launch:
    hw = hardware.of(spec.device)
    tiles, heads = math.ceil(spec.N_Q / cfg.rows), spec.B * spec.H
    shift = 0 if spec.top_left else spec.N_KV - spec.N_Q
    rest = struct.pack(
        "3q8if4x", *o_strides, heads, spec.H, max(spec.group, 1), spec.N_Q, spec.N_KV, shift, tiles, section(spec, hw),
        spec.scale * math.log2(math.e),
    )  # fmt: skip
    rest += bytes(-(len(rest) + 16) % 64)  # the struct begins with maps, and so has their alignment
    grid = (min(hw.sm_count, tiles * heads), 1, 1)
    shared = cfg.shared(spec.D)
    return cuda.Launch(variant(spec, cfg), spec.device, grid, cfg.threads, shared, "128s128s128s2Q", rest, early=True)


def describe(x: Tensor, rows: int) -> bytes:
    """(B, heads, N, D) for the copy engine, in boxes of `rows` rows and 64 columns."""
    B, heads, N, D = x.shape
    size = x.element_size()
    apart = [step * size if n > 1 else D * size for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return cuda.tensor_map(x.dtype, x.data_ptr(), (D, N, heads, B), tuple(reversed(apart)), (64, rows, 1, 1))


def forward(spec: FlashSpec, x: Residuals, cfg: Config | None = None) -> tuple[Tensor, Tensor | None]:
    cfg = cfg or config(spec)
    o = empty_rows(x.q, spec.H, spec.E)
    lse = empty_lse(x.q) if spec.wants_lse else None
    launch = launch_of(spec, tuple(step * o.element_size() for step in o.stride()[:3]), cfg)
    maps = describe(x.q, 64), describe(x.k, cfg.block_n), describe(x.v, cfg.block_n)
    launch(*maps, o.data_ptr(), 0 if lse is None else lse.data_ptr())
    return o, lse
