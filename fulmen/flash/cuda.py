"""Softmax attention in CUDA C++, forward; the backward is that of `triton`, from the same o and lse.

    cuda_small.cu   up to 512 queries and keys, D = E of 64 or 128, from compute capability 8.0 on

Full attention and causal attention in both alignments, with shared heads; everything else is refused. The kernel copies
16 bytes at a time: inputs whose rows do not start at such addresses are copied first. Sources are compiled by NVRTC at
the first call that needs them (`fulmen.cuda`), in half a second, and kept on disk.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.boundary import empty_rows
from fulmen.dispatch import register
from fulmen.flash import triton
from fulmen.flash.op import FlashSpec, Residuals, empty_lse
from fulmen.flash.ranking import rank

MAX_TOKENS = 512
HEAD_DIMS = (64, 128)
MAX_GRID = 65_535


def supports(spec: FlashSpec) -> str | None:
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bf16 and fp16, and q is {spec.dtype}"
    if spec.device.type != "cuda":
        return f"needs a CUDA GPU, and q is on {spec.device}"
    hw = hardware.of(spec.device)
    if hw.arch < 80:
        return f"needs compute capability 8.0 or later, this GPU has {hw.arch / 10}"
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
    if spec.scale < 0:
        return f"needs a positive scale, and it is {spec.scale}"
    if max(spec.N_Q, spec.N_KV) > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    if max(spec.B, spec.H) > MAX_GRID:
        return f"takes at most {MAX_GRID} batches and heads, here B={spec.B}, H={spec.H}"
    if spec.needs_grad and (why := triton.supports(spec)) is not None:
        return f"has triton's backward, which {why}"
    cfg = config(spec, hw)
    return cuda.problem(variant(spec, hw, cfg), spec.device, cfg.shared(spec.D))


# ------------------------------------------------------------------------------------------------ tiles


class Config(NamedTuple):
    warps_m: int  # of 16 queries each
    warps_n: int  # that share the keys of a block
    block_n: int  # keys at a time
    stages: int  # blocks of keys on their way
    blocks_per_sm: int = 1  # how many the registers must leave room for

    @property
    def rows(self) -> int:
        return 16 * self.warps_m

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    def shared(self, D: int) -> int:
        return (self.rows + 2 * self.stages * self.block_n) * 2 * D


def config(spec: FlashSpec, hw: hardware.Hardware) -> Config:
    """Few queries are spread over as many SMs as there are; many share the keys they load."""
    heads = spec.B * spec.H

    def blocks(rows: int) -> int:
        return math.ceil(spec.N_Q / rows) * heads

    def ring(block_n: int, most: int) -> int:
        return min(most, max(2, math.ceil(spec.N_KV / block_n)))

    wide = spec.D == 128
    if blocks(16) <= hw.sm_count:
        return Config(1, 4, 64, ring(64, 2)) if wide else Config(1, 4, 128, 2)
    if blocks(32) <= hw.sm_count:
        return Config(2, 2, 64, ring(64, 2 if wide else 4))
    if blocks(64) <= hw.sm_count:
        return Config(4, 1, 64, ring(64, 2 if wide else 4))
    return Config(8, 1, 64, 2) if wide else Config(8, 1, 64, ring(64, 4), 2 if hw.arch < 100 else 1)


def variant(spec: FlashSpec, hw: hardware.Hardware, cfg: Config) -> cuda.Variant:
    macros = {
        "HEAD_DIM": spec.D, "WARPS_M": cfg.warps_m, "WARPS_N": cfg.warps_n, "BLOCK_N": cfg.block_n,
        "STAGES": cfg.stages, "BLOCKS_PER_SM": cfg.blocks_per_sm, "BF16": int(spec.dtype == torch.bfloat16),
        "CAUSAL": int(spec.right is not None),
    }  # fmt: skip
    return cuda.Variant("flash/cuda_small.cu", "flash_small_forward_kernel", str(hw.arch), tuple(macros.items()))


def detail(spec: FlashSpec) -> str:
    cfg = config(spec, hardware.of(spec.device))
    return f"cuda_small.cu, {cfg.rows} queries x {cfg.block_n} keys"


# --------------------------------------------------------------------------------------------- launches


def strides(*tensors: Tensor) -> list[int]:
    """Of B, heads and N, in bytes."""
    return [step * x.element_size() for x in tensors for step in x.stride()[:3]]


def small_launch(
    spec: FlashSpec, hw: hardware.Hardware, cfg: Config, steps: tuple[int, ...], early: bool
) -> cuda.Launch:
    """The launch of calls with these strides: q, k, v and o, in that order."""
    shift = 0 if spec.top_left else spec.N_KV - spec.N_Q
    rest = struct.pack(
        "12q4if4x", *steps, max(spec.group, 1), spec.N_Q, spec.N_KV, shift, spec.scale * math.log2(math.e)
    )
    grid = (math.ceil(spec.N_Q / cfg.rows), spec.H, spec.B)
    return cuda.Launch(
        variant(spec, hw, cfg), spec.device, grid, cfg.threads, cfg.shared(spec.D), "5Q", rest, early and hw.arch >= 90
    )


@functools.lru_cache(maxsize=4096)
def launch_of(spec: FlashSpec, steps: tuple[int, ...]) -> cuda.Launch:
    hw = hardware.of(spec.device)
    return small_launch(spec, hw, config(spec, hw), steps, early=True)


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if its rows do not start at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and all(
        n == 1 or s % unit == 0 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)
    ):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def forward(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor | None]:
    o = empty_rows(x.q, spec.H, spec.E)
    lse = empty_lse(x.q) if spec.wants_lse else None
    q, k, v = aligned(x.q), aligned(x.k), aligned(x.v)
    launch = launch_of(spec, tuple(strides(q, k, v, o)))
    launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), 0 if lse is None else lse.data_ptr())
    return o, lse


def prepare(spec: FlashSpec, x: Residuals) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, None] | None] | None:
    """As in triton.py: the forward of calls like this one at the least cost for the host."""
    o = empty_rows(x.q, spec.H, spec.E)
    if spec.wants_lse or torch.empty_like(x.q).stride() != o.stride():
        return None
    if any(aligned(t).stride() != t.stride() for t in (x.q, x.k, x.v)):
        return None
    launch, empty_like = launch_of(spec, tuple(strides(x.q, x.k, x.v, o))), torch.empty_like

    def quick(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None] | None:
        a, b, c = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (a | b | c) & 15:
            return None
        o = empty_like(q)
        launch(a, b, c, o.data_ptr(), 0)
        return o, None

    return quick


register(
    "flash",
    "cuda",
    supports=supports,
    rank=functools.partial(rank, "cuda"),
    forward=forward,
    backward=triton.backward,
    prepare=prepare,
    detail=detail,
)
