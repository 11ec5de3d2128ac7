"""The launch of cuda_sm90.cu, the forward for Hopper: its limits, tiles, tensor maps and arguments."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.flash.op import FlashSpec, Residuals

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
MAX_TOKENS = 1 << 28  # positions and distances fit 32 bits
MAX_TILES = 1 << 30
MAX_MAPS = 64  # addresses a launch remembers


def lacks(spec: FlashSpec) -> str | None:
    if (spec.D, spec.E) not in HEAD_DIMS:
        sizes = ", ".join(f"{D}/{E}" for D, E in HEAD_DIMS)
        return f"needs D/E of {sizes}, here {spec.D}/{spec.E}"
    if max(spec.N_Q, spec.N_KV) > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    cfg = config(spec)
    if tiles(spec, cfg) * spec.B * spec.H > MAX_TILES:
        return f"takes up to {MAX_TILES} tiles of {cfg.rows} queries, here B={spec.B}, H={spec.H}, N_Q={spec.N_Q}"
    return None


class Config(NamedTuple):
    consumers: int  # warpgroups of 64 queries
    block_n: int  # keys at a time
    stages: int
    take_turns: bool = False  # the warpgroups start their products one after the other
    blocks_per_sm: int = 1
    together: bool = True  # all heads at once, longest tiles first; else as many as the L2 cache holds

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def shared(self, D: int, E: int) -> int:
        tensors = self.rows * D + self.stages * self.block_n * (D + E)
        return 2 * tensors + 16 * self.consumers + 32 * self.stages  # with the barriers

    def __str__(self) -> str:
        return f"cuda_sm90.cu, {self.rows} queries x {self.block_n} keys"


def config(spec: FlashSpec) -> Config:
    """By the measurements in dev/ladder_cuda.md: beside a row its TFLOP/s on an H200 and those of cuDNN.

    Options take registers: with any of them tiles are those that still fit.
    """
    causal, long = spec.right is not None, spec.N_KV >= 4096
    plain = spec.left is None and spec.softcap is None and spec.sequences is None and not spec.has_sinks
    if spec.D == 64:
        if spec.softcap is not None:
            return Config(2, 128, 2)
        if plain and max(spec.N_Q, spec.N_KV) <= 512:
            return Config(1, 128, 2, blocks_per_sm=2)
        return Config(3, 128, 2, take_turns=not (causal and long))  # N4096: 506, 443; causal 425, 372
    if spec.D == 128:
        if plain and (long or not causal):
            return Config(2, 176, 2)  # N8192: 701, 675; causal 590, 548
        return Config(2, 128, 2, take_turns=plain)  # N2048, causal: 492, 419
    return Config(2, 80, 2) if spec.D == 256 else Config(2, 128, 2)


def variant(spec: FlashSpec, cfg: Config, sinks: torch.dtype | None = None) -> cuda.Variant:
    macros = {
        "HEAD_DIM": spec.D, "VALUE_DIM": spec.E, "CONSUMERS": cfg.consumers, "BLOCK_N": cfg.block_n,
        "STAGES": cfg.stages, "BLOCKS_PER_SM": cfg.blocks_per_sm, "TAKE_TURNS": int(cfg.take_turns),
        "BF16": int(spec.dtype == torch.bfloat16), "LEFT": int(spec.left is not None),
        "RIGHT": int(spec.right is not None), "SOFTCAP": int(spec.softcap is not None),
        "PACKED": int(spec.sequences is not None),
        "SINKS": 0 if not spec.has_sinks else 1 if sinks in (None, torch.float32) else 2,
    }  # fmt: skip
    return cuda.Variant("flash/cuda_sm90.cu", "flash_sm90_forward_kernel", "90a", tuple(macros.items()))


def tiles(spec: FlashSpec, cfg: Config) -> int:
    """Of one head; packed, as many as any mix of lengths may need."""
    return math.ceil(spec.N_Q / cfg.rows) if spec.sequences is None else spec.N_Q // cfg.rows + spec.sequences


def section(spec: FlashSpec, cfg: Config, hw: hardware.Hardware) -> int:
    """Query heads worked on at a time: all, or as many as half the L2 cache holds the k and v of, whole groups."""
    stored = hw.l2_bytes // 2 // max(1, spec.N_KV * (spec.D + spec.E) * 2)
    heads = max(1, spec.B * spec.H)
    return heads if cfg.together else min(heads, max(1, stored) * max(spec.group, 1))


@functools.lru_cache(maxsize=4096)
def launch_of(
    spec: FlashSpec, cfg: Config, o_strides: tuple[int, ...], sinks: torch.dtype | None = None
) -> cuda.Launch:
    hw = hardware.of(spec.device)
    heads = spec.B * spec.H
    log2e = math.log2(math.e)
    factor, inner = spec.scale * log2e, 0.0
    if spec.softcap is not None:
        factor, inner = spec.softcap * log2e, spec.scale / spec.softcap
    rest = struct.pack(
        "3q11i2f", *o_strides, heads, spec.H, max(spec.group, 1), spec.N_Q, spec.N_KV, spec.left or 0, spec.right or 0,
        int(spec.top_left), spec.sequences or 0, tiles(spec, cfg), section(spec, cfg, hw), factor, inner,
    )  # fmt: skip
    rest += bytes(-(len(rest) + 40) % 64)  # the struct begins with maps, and so has their alignment
    grid = (min(cfg.blocks_per_sm * hw.sm_count, tiles(spec, cfg) * heads), 1, 1)
    return cuda.Launch(
        variant(spec, cfg, sinks), spec.device, grid, cfg.threads, cfg.shared(spec.D, spec.E), "128s128s128s5Q", rest,
        early=True,
    )  # fmt: skip


class Maps:
    """What the copy engine needs to know of tensors (B, heads, N, size) of one shape, by their address."""

    def __init__(self, x: Tensor, rows: int) -> None:
        B, heads, N, size = x.shape
        width = x.element_size()
        apart = [step * width if n > 1 else size * width for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
        self.facts = x.dtype, (size, N, heads, B), tuple(reversed(apart)), (64, rows, 1, 1)
        self.known: dict[int, bytes] = {}

    def __call__(self, address: int) -> bytes:
        known = self.known.get(address)
        if known is None:
            dtype, sizes, strides, box = self.facts
            known = cuda.tensor_map(dtype, address, sizes, strides, box)
            if len(self.known) >= MAX_MAPS:
                self.known = {}
            self.known[address] = known
        return known


@functools.lru_cache(maxsize=4096)
def maps_of(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> Maps:
    return Maps(torch.empty_strided(shape, strides, dtype=dtype, device="meta"), rows)


def mapped(x: Tensor, rows: int) -> Maps:
    return maps_of(x.dtype, x.shape, x.stride(), rows)


def strides(o: Tensor) -> tuple[int, ...]:
    """Of B, heads and N, in bytes."""
    return tuple(step * o.element_size() for step in o.stride()[:3])


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def run(spec: FlashSpec, cfg: Config, x: Residuals, o: Tensor, lse: Tensor | None) -> None:
    launch = launch_of(spec, cfg, strides(o), None if x.sinks is None else x.sinks.dtype)
    if launch.empty:
        return
    q = mapped(x.q, 64)(x.q.data_ptr())
    k = v = q  # without keys nothing is read through them
    if spec.N_KV:
        k, v = mapped(x.k, cfg.block_n)(x.k.data_ptr()), mapped(x.v, cfg.block_n)(x.v.data_ptr())
    launch(q, k, v, *map(address, (o, lse, x.sinks, x.cu_seqlens_q, x.cu_seqlens_k)))


def repeat(spec: FlashSpec, cfg: Config, x: Residuals, o: Tensor) -> Callable[[int, int, int, int], None] | None:
    """The same launch from the addresses of q, k, v and o alone; there must be keys and queries."""
    launch = launch_of(spec, cfg, strides(o))
    if launch.empty or not spec.N_KV:
        return None
    q_map, k_map, v_map = mapped(x.q, 64), mapped(x.k, cfg.block_n), mapped(x.v, cfg.block_n)

    def again(q: int, k: int, v: int, o: int) -> None:
        launch(q_map(q), k_map(k), v_map(v), o, 0, 0, 0, 0)

    return again
