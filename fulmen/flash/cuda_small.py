"""The launches of cuda_small.cu and cuda_once.cu, the forwards of short sequences: limits, tiles and arguments."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.flash.cuda_sm90 import GROUPS, MAX_GRID
from fulmen.flash.op import FlashSpec, Residuals

MAX_TOKENS = 512
HEAD_DIMS = (64, 128)
ARGUMENTS = cuda.Struct(
    "Args",
    ("q", "const char *"), ("k", "const char *"), ("v", "const char *"), ("o", "char *"),
    ("lse", "float *"),  # or null
    ("q_strides", cuda.STRIDES), ("k_strides", cuda.STRIDES), ("v_strides", cuda.STRIDES), ("o_strides", cuda.STRIDES),
    ("group", "int"), ("n_q", "int"), ("n_kv", "int"), ("shift", "int"),  # query i stands at position i + shift
    ("factor", "float"),  # scale * log2(e)
    ("log_group", "int"),  # base 2; PACK_GQA only
)  # fmt: skip


def lacks(spec: FlashSpec) -> str | None:
    if (why := unable(spec)) is not None:
        return why
    if max(spec.N_Q, spec.N_KV) > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    return None


def unable(spec: FlashSpec) -> str | None:
    """What neither kernel has, however few tokens there are."""
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


class Once(NamedTuple):
    """Tiles of cuda_once.cu: 64 queries, and all keys in shared memory."""

    block_n: int  # keys at a time
    stages: int = 1  # how many times
    blocks_per_sm: int = 4  # how many the registers must leave room for
    grouped: bool = False  # a tile holds all query heads of a group

    @property
    def rows(self) -> int:
        return 64

    @property
    def threads(self) -> int:
        return 128

    def shared(self, D: int) -> int:
        return (self.rows + 2 * self.stages * self.block_n) * 2 * D

    def __str__(self) -> str:
        tile = f"cuda_once.cu, {self.rows} queries x {self.stages * self.block_n} keys"
        return tile + ", heads grouped" * self.grouped


Tile = Config | Once


def blocks(spec: FlashSpec, rows: int) -> int:
    return math.ceil(spec.N_Q / rows) * spec.B * spec.H


def grid(spec: FlashSpec, cfg: Tile) -> tuple[int, int, int]:
    if isinstance(cfg, Once) and cfg.grouped:
        if spec.group not in GROUPS:
            raise ValueError(f"groups of {spec.group} query heads cannot share tiles, only of {GROUPS}")
        return math.ceil(spec.N_Q * spec.group / cfg.rows), spec.H_KV, spec.B
    return math.ceil(spec.N_Q / cfg.rows), spec.H, spec.B


def config(spec: FlashSpec, hw: hardware.Hardware) -> Config:
    """Of cuda_small.cu: few queries are spread over as many SMs as there are; many share the keys they load."""
    wide, once = spec.D == 128, spec.N_KV <= 128
    ring = min(2 if wide else 4, max(2, math.ceil(spec.N_KV / 64)))
    if blocks(spec, 16) <= hw.sm_count:
        if once:
            return Config(1, 4, 128, 1)
        return Config(1, 4, 64, 2) if wide else Config(1, 4, 128, 2)
    if blocks(spec, 32) <= hw.sm_count:
        return Config(2, 2, 128, 1) if once else Config(2, 2, 64, ring)
    if blocks(spec, 64) <= hw.sm_count:
        return Config(4, 1, 64 if spec.N_KV <= 64 else 128, 1) if once else Config(4, 1, 64, ring)
    return Config(8, 1, 64, 2) if wide else Config(8, 1, 64, ring, 2 if hw.arch < 100 else 1)


def on_hopper(spec: FlashSpec, hw: hardware.Hardware) -> Tile | None:
    """The faster of both kernels for a call of up to 256 keys; None where cuda_sm90.cu is faster still.

    Beside a row its us on an H200, L2 cold, then the next best of our other kernels, as they were compared in
    results/h200/cuda_once.txt.
    """
    keys, wide, sms = spec.N_KV, spec.D == 128, hw.sm_count
    if keys > 256 or unable(spec) is not None:
        return None
    tiles, together = blocks(spec, 64), math.prod(grid(spec, Once(64, grouped=spec.group in GROUPS)))
    grouped = together < tiles and tiles > sms  # else all are there at once, the sooner the fewer share one
    if keys <= 64:
        return Once(64, grouped=grouped)  # D 64, B64 H16 N64: 12.3, 13.5; D 128, B32 H8 N64: 7.7, 8.9
    if keys <= 80:
        return Once(80, 1, 3 if wide else 4, grouped)  # D 64, B2 H10, 4096 x 77: 12.2, 16.2; D 128: 18.4, 18.4
    if keys <= 128:
        if blocks(spec, 16) <= sms or (spec.N_Q <= 16 and not grouped):
            return Config(1, 4, 128, 1)  # B1 H1 N128: 2.7, 3.1; B64 H32, 1 x 100: 19.4, 20.3
        if not wide:
            return Once(128, grouped=grouped)  # B8 H4 N128: 3.9, 4.0; B32 H8: 8.4, 9.3
        few = min(tiles, together) <= 2 * sms or (16 if grouped else 0) < spec.N_Q <= 32
        return Once(128, 1, 2, grouped) if few else None  # B8 H16 N128: 8.5, 9.3; B32 H8: 15.6, 14.1
    if wide:
        few = tiles <= sms // 2 and lacks(spec) is None  # B8 H4 N256: 8.7, 8.3
        return config(spec, hw) if few else None
    if blocks(spec, 16) <= 2 * sms:
        return Config(1, 4, 128, 2)  # B1 H8 N256: 3.8, 4.8; H16: 4.9, 5.0; H24: 5.9, 5.3
    if keys <= 160:
        return Once(80, 2, 4, grouped)  # B32 H8 N150: 11.1, 14.0
    if keys <= 192:
        return Once(64, 3, 4, grouped)  # B32 H8 N192: 12.6, 14.8
    if spec.right is not None and tiles > 3 * sms:
        return Once(64, 4, 3, grouped)  # causal, B32 H8 N256: 16.9, 17.3
    return Once(128, 2, 3, grouped)  # B32 H8 N256: 18.3, 21.2


def variant(spec: FlashSpec, hw: hardware.Hardware, cfg: Tile) -> cuda.Variant:
    macros = {"HEAD_DIM": spec.D, "BLOCK_N": cfg.block_n, "BLOCKS_PER_SM": cfg.blocks_per_sm}
    macros |= {"BF16": int(spec.dtype == torch.bfloat16), "CAUSAL": int(spec.right is not None)}
    if isinstance(cfg, Once):
        macros |= {"PARTS": cfg.stages, "PACK_GQA": int(cfg.grouped)}
        return cuda.Variant(
            "flash/kernels/single_tile.cu", "flash_single_tile_forward_kernel", "90a", tuple(macros.items()), ARGUMENTS
        )
    macros |= {"WARPS_M": cfg.warps_m, "WARPS_N": cfg.warps_n, "STAGES": cfg.stages}
    return cuda.Variant(
        "flash/kernels/small.cu", "flash_small_forward_kernel", str(hw.arch), tuple(macros.items()), ARGUMENTS
    )


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of B, heads and N, in bytes; where there is but one, none is needed, and what a tensor says may be anything."""
    return tuple(
        step * x.element_size() if n > 1 else 0
        for x in tensors
        for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)
    )


@functools.lru_cache(maxsize=4096)
def launch_of(spec: FlashSpec, cfg: Tile, steps: tuple[int, ...], early: bool = True) -> cuda.Launch:
    """The launch of calls with these strides: q, k, v and o, in that order."""
    if (isinstance(cfg, Once) or cfg.stages == 1) and cfg.stages * cfg.block_n < spec.N_KV:
        raise ValueError(f"{cfg} at once, and there are {spec.N_KV}")
    hw = hardware.of(spec.device)
    shift = 0 if spec.top_left else spec.N_KV - spec.N_Q
    group = max(spec.group, 1)
    constants = {
        "q_strides": steps[:3], "k_strides": steps[3:6], "v_strides": steps[6:9], "o_strides": steps[9:],
        "group": group, "n_q": spec.N_Q, "n_kv": spec.N_KV, "shift": shift,
        "factor": spec.scale * math.log2(math.e), "log_group": group.bit_length() - 1,
    }  # fmt: skip
    return cuda.Launch(
        variant(spec, hw, cfg), spec.device, grid(spec, cfg), cfg.threads, cfg.shared(spec.D), constants,
        early and hw.arch >= 90,
    )  # fmt: skip


def run(spec: FlashSpec, cfg: Tile, x: Residuals, o: Tensor, lse: Tensor | None) -> None:
    launch = launch_of(spec, cfg, strides(x.q, x.k, x.v, o))
    launch(x.q.data_ptr(), x.k.data_ptr(), x.v.data_ptr(), o.data_ptr(), 0 if lse is None else lse.data_ptr())
