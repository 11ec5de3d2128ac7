"""What softmax attention runs: the backend, its kernel, its tile and how often keys are split.

Everything here is data or a pure function of (spec, hw). Nothing is compiled or launched, and no other module compares
backends. Where to look:

    what "auto" takes      ROWS, `fastest` and, for few queries, `decode`
    a tile                 `sm90_base_tile`, SINGLE_TILES, `small_tile`, HOPPER_TILES and OTHER_TILES for triton
    cuda's own backward    `cuda_backward`, and policy_backward.py
    when keys are split    `splits`
    heads at a time        `swizzle`, and that of policy_backward.py
    the answer             `order` (backends, fastest first) and `choose` (one `Choice`)

Measurements are medians on an H200 (torch 2.11, cuDNN 9.19, Triton 3.6, bf16; fp16 is taken to be the same). Shapes are
written B2 H32/8 N4096; 1 x 8192 is one query of 8192 keys. `fulmen tune` proposes rows for triton.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import torch

from fulmen.dispatch import Choice
from fulmen.flash import policy_cache, sdpa
from fulmen.flash.policy_backward import affordable, backward_tile, behind_cudnn, workspace
from fulmen.flash.spec import PACKABLE_GROUPS, FlashSpec, heads_as_queries, tiles_of
from fulmen.hardware import Hardware

# --------------------------------------------------------------------------------------------------- tile types


class Sm90Tile(NamedTuple):
    """The kernel `sm90`: for Hopper, every option."""

    consumers: int  # warpgroups of 64 rows
    block_n: int  # keys at a time
    stages: int  # blocks of keys in flight
    take_turns: bool = False  # the warpgroups issue their products one after the other
    blocks_per_sm: int = 1
    swizzle: int = 0  # L2 swizzle: heads worked on at a time; 0: all, LPT
    pack_gqa: bool = False  # a tile holds all query heads of a group

    @property
    def kernel(self) -> str:
        return "sm90"

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    def positions(self, spec: FlashSpec) -> int:
        """Query positions of a tile."""
        return self.rows // spec.group if self.pack_gqa else self.rows

    def __str__(self) -> str:
        return f"{self.rows} queries x {self.block_n} keys" + ", pack GQA" * self.pack_gqa


class SmallTile(NamedTuple):
    """The kernel `small`: up to 512 queries and keys, from compute capability 8.0 on."""

    warps_m: int  # of 16 queries each
    warps_n: int  # that share the keys of a block
    block_n: int  # keys at a time
    stages: int  # blocks of keys in flight; 1: all keys are one block
    blocks_per_sm: int = 1  # that the registers must leave room for

    @property
    def kernel(self) -> str:
        return "small"

    @property
    def rows(self) -> int:
        return 16 * self.warps_m

    def __str__(self) -> str:
        return f"{self.rows} queries x {self.block_n} keys"


class SingleTile(NamedTuple):
    """The kernel `single_tile`: for Hopper, 64 queries and up to 256 keys, all in shared memory."""

    block_n: int  # keys at a time
    stages: int = 1  # how many times
    blocks_per_sm: int = 4  # that the registers must leave room for
    pack_gqa: bool = False  # a tile holds all query heads of a group

    @property
    def kernel(self) -> str:
        return "single_tile"

    @property
    def rows(self) -> int:
        return 64

    def __str__(self) -> str:
        return f"{self.rows} queries x {self.stages * self.block_n} keys" + ", pack GQA" * self.pack_gqa


class TritonTile(NamedTuple):
    own: int  # rows a program owns: of q in forward and dq, of k in dkdv
    walk: int  # rows it takes at a time of the other side
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.own} x {self.walk}, {self.num_warps} warps, {self.num_stages} stages"


class TritonTiles(NamedTuple):
    """The passes of backend `triton`."""

    forward: TritonTile
    dq: TritonTile
    dkdv: TritonTile
    heads_summed: int  # query heads one program of dkdv sums over
    use_tma: bool  # where strides allow it; else pointers load the tiles
    joined: TritonTile | None = None  # dq (own) and dkdv (walk: the keys it owns) in one launch

    def __str__(self) -> str:
        return "; ".join(f"{name} {getattr(self, name)}" for name in (JOINED if self.joined else PASSES))


PASSES, JOINED = ("forward", "dq", "dkdv"), ("forward", "joined")
SM90_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
SMALL_MAX_TOKENS = 512

# -------------------------------------------------------------------------------------------- what "auto" takes

ORDER = ("sdpa", "triton", "flash_attn", "eager", "cuda", "reference")  # on a GPU, after the fastest
CPU_ORDER = ("sdpa", "eager", "triton", "flash_attn", "cuda", "reference")  # triton is interpreted there

SMALL_FLOPS = 8e9  # forward; below, CPU overhead decides: 15 us a call with triton, 39 with sdpa
FULL_QUERIES, FULL = 1024, 32_768  # of a head, of all heads; with fewer, tiles of `sm90` do not fill the GPU
LONG_KEYS, MANY_QUERIES = 4096, 8 * FULL  # keys below which full D = 128 takes that many queries to fill it
DECODE_QUERIES, FEW_ROWS = 64, 64  # of a head; of a GQA group
SMALL_KEYS, SQUARE_KEYS = 256, 512  # up to which `is_short`; where N_Q = N_KV
SHORT_KEYS = {64: 128, 128: 80}  # D = E, and up to how many keys cuda is ahead of cuDNN in a long call


class Row(NamedTuple):
    """On Hopper, plain calls that fill the GPU, up to head dim D, from that many keys on to the next row's."""

    D: int
    causal: bool
    keys: int
    first: str


# sdpa: ms of triton and cuDNN, forward / backward. cuda: TFLOP/s of cuda and cuDNN; its own backward follows.
ROWS = [
    Row(64, True, 0, "sdpa"),  # N 512: 0.030, 0.026; 2048: 0.053 / 0.147, 0.050 / 0.139
    Row(64, True, 1024, "cuda"),  # 1024: 233, 190 (32 heads), 313, 320 (256); 2048: 323, 253; 4096: 467, 433
    Row(64, False, 0, "sdpa"),  # 512: 0.035, 0.029; 2048: 0.066 / 0.183, 0.063 / 0.172
    Row(64, False, 2048, "cuda"),  # 2048: 440, 400; 4096: 466, 419
    Row(128, True, 0, "sdpa"),  # D 80, 2048: 0.177, 0.149; D 128, 4096: 0.309 / 0.887, 0.265 / 0.757
    Row(128, True, 1024, "cuda"),  # 1024: 399, 353 (64 heads), 431, 425 (256); 4096: 607, 531; 16384: 655, 541
    Row(128, False, 0, "sdpa"),  # 4096: 0.534 / 1.58, 0.410 / 1.21; 16384: 4.05 / 11.7, 3.15 / 9.04
    Row(128, False, 2048, "cuda"),  # 2048: 624, 609; 4096: 675, 668; 8192: 625, 590; 16384: 641, 603
    Row(256, True, 0, "sdpa"),  # 4096: 0.607 / 3.14, 0.454 / 1.81; D 192, E 128: 0.526 / 2.19, 0.324 / 1.07
    Row(256, True, 4096, "cuda"),  # ms: 0.364, 0.448; D 192, E 128: 0.263, 0.320
    Row(256, False, 0, "sdpa"),  # 4096: 1.03 / 5.38, 0.747 / 3.33; D 192, E 128: 0.916 / 4.16, 0.524 / 2.98
    Row(256, False, 4096, "cuda"),  # ms: 0.358, 0.380; D 192, E 128: 0.495, 0.522
]


def flops(spec: FlashSpec) -> float:
    """Of a forward without a mask."""
    return 2 * spec.B * spec.H * spec.N_Q * spec.N_KV * (spec.D + spec.E)


def fastest(spec: FlashSpec, hw: Hardware) -> str:
    """The backend measured to be the fastest; torch's where nothing was measured."""
    if spec.has_kv_lengths:  # heads that share no tile read their keys one by one in `cuda`, in `triton` they share
        return "cuda" if hw.arch == 90 and heads_as_queries(spec).group in (1, *PACKABLE_GROUPS) else "triton"
    if hw.arch != 90:
        return "sdpa"
    plain = spec.plain
    if not spec.needs_grad and (name := decode(spec, hw)) is not None:
        return name
    if flops(spec) < SMALL_FLOPS:  # B1 H8 N128 D64: triton 0.007 / 0.014, cuDNN 0.008 / 0.017
        return "cuda" if plain and not spec.needs_grad and is_short(spec) else "triton"
    if plain and not spec.needs_grad and spec.D == spec.E and SHORT_KEYS.get(spec.D, -1) >= spec.N_KV:
        # us, cuda and cuDNN: D 64, B8 H8, 16384 x 77 106, 139; 16384 x 128 120, 129; B64 H16 N128 23.2, 22.7
        # D 128, B8 H8, 4096 x 64 40, 50; 4096 x 77 48, 50; but 1024 x 128 18.2, 16.4
        return "cuda"
    queries = spec.B * spec.H * spec.N_Q
    full = spec.N_Q >= FULL_QUERIES and queries >= FULL
    if not plain:  # sdpa has no options. ms, cuda and triton: window 0.243, 0.323; softcap 0.360, 0.491
        return "cuda" if full else "triton"
    causal, size = spec.right is not None, max(spec.D, spec.E)
    width = min((row.D for row in ROWS if size <= row.D), default=0)
    rows = [row for row in ROWS if (row.D, row.causal) == (width, causal) and row.keys <= spec.N_KV]
    name = max(rows, key=lambda row: row.keys).first if rows else "sdpa"
    if not causal and size == 128 and spec.N_KV < LONG_KEYS and spec.group == 1:
        full = full and queries >= MANY_QUERIES  # us, N 2048, cuda and cuDNN: 64 heads 222, 215; 256 heads 897, 914
    return "sdpa" if name == "cuda" and not full else name


def is_short(spec: FlashSpec) -> bool:
    """Whether cuda is ahead of triton in a short call, or within 2 % (measured: docs/notes/flash-cuda-short.md)."""
    keys = SQUARE_KEYS if spec.N_Q == spec.N_KV else SMALL_KEYS
    return spec.D == spec.E and spec.D in (64, 128) and keys >= spec.N_KV


def is_decoding(spec: FlashSpec) -> bool:
    """Few queries over a cache, which is longer at every step."""
    return not spec.needs_grad and spec.N_Q <= DECODE_QUERIES and spec.N_Q < spec.N_KV


def decode(spec: FlashSpec, hw: Hardware) -> str | None:
    """The fastest where few queries read many keys, as in decoding; None if this is no such call.

    Measured: docs/notes/flash-cuda-short.md.
    """
    rows, decoding = spec.N_Q * spec.group, is_decoding(spec)
    few = rows <= FEW_ROWS
    least = spec.B * spec.H_KV * rows / 192  # tiles: keys are split where these leave half of the SMs idle
    if not spec.N_Q or spec.sequences is not None or not (few or decoding or 2 * least <= hw.sm_count):
        return None
    if spec.dtype not in (torch.bfloat16, torch.float16) or spec.scale < 0 or (spec.D, spec.E) not in SM90_HEAD_DIMS:
        return "sdpa" if decoding and spec.plain and spec.N_KV > SMALL_KEYS else None
    tile = sm90_tile(call := heads_as_queries(spec), hw)
    number = splits(call, tile, hw)
    if not spec.plain:
        return "cuda" if few or number > 1 else None
    if spec.N_KV <= SMALL_KEYS and spec.D <= 128:  # for which `is_short` has kernels
        return None
    if not (few or decoding):
        return "cuda" if number > 1 else None
    shares_keys = tile.pack_gqa or call.group == 1  # else each head reads its keys for itself
    too_large = spec.B * spec.H_KV * spec.N_KV * max(spec.D, spec.E) >= 2**31  # for torch
    bottom_right = spec.right is not None and spec.N_Q > 1  # which torch cannot say
    waves = spec.N_KV <= SMALL_KEYS and hw.sm_count < spec.B * spec.H_KV  # of few keys
    return "cuda" if (shares_keys and not waves) or too_large or bottom_right else "sdpa"


def without_cuda(spec: FlashSpec) -> str:
    """The second choice where cuda is the fastest: its compiler is an optional dependency."""
    decodes = spec.N_Q * spec.group <= FEW_ROWS and spec.N_KV > SMALL_KEYS
    return "sdpa" if not spec.has_options and (decodes or flops(spec) >= SMALL_FLOPS) else "triton"


# ------------------------------------------------------------------------------------------ tiles of backend cuda


def sm90_base_tile(spec: FlashSpec, hw: Hardware) -> Sm90Tile:
    """By size; beside a row TFLOP/s of it and of cuDNN. Options take registers: with any, tiles are smaller."""
    causal, long = spec.right is not None, spec.N_KV >= 4096
    few = mean_queries(spec) * (spec.group if spec.group in PACKABLE_GROUPS else 1) <= 64
    waves = {r: spec.B * spec.H * math.ceil(spec.N_Q / r) / max(hw.sm_count, 1) for r in (64, 128, 192)}
    if spec.D == 64:
        if few or (not spec.has_options and spec.N_KV <= 512 and waves[64] <= 2):
            deep = few and hw.sm_count <= spec.B * spec.H_KV  # B32 H32/8, 1 x 32768: 524 us, with 2 stages 533
            return Sm90Tile(1, 128, 3 if deep else 2, blocks_per_sm=2)  # B8 H4 N512, causal: 110, 110
        short = spec.N_KV <= 1024 if causal else 1.2 * math.ceil(waves[192]) >= math.ceil(waves[128])
        if spec.softcap is not None or (not spec.has_options and short):
            return Sm90Tile(2, 128, 2)  # B32 H8 N1024, causal: 288, 317
        # N2048: 440, 400; causal 323, 253; N4096: 466, 419; causal 467, 433
        return Sm90Tile(3, 128, 2, take_turns=not (long and (not spec.has_options or causal)))
    if spec.D == 128:
        if few or (not spec.has_options and spec.N_KV <= 1024 and waves[64] <= (2 if causal else 1)):
            return Sm90Tile(1, 80, 2, blocks_per_sm=2)  # B1 H16 N512: 204, 190; causal 99, 89
        if not spec.has_options and (long if causal else spec.N_KV > 1024):
            return Sm90Tile(2, 176, 2)  # N4096: 675, 668; causal 607, 531
        return Sm90Tile(2, 128, 2)  # N2048, causal: 527, 420
    return Sm90Tile(2, 80, 2) if spec.D == 256 else Sm90Tile(2, 128, 2)


def sm90_tile(spec: FlashSpec, hw: Hardware) -> Sm90Tile:
    tile = sm90_base_tile(spec, hw)
    if spec.page is not None and tile.block_n == 80:  # a page, or its halves or quarters, must make up a block of keys
        tile = tile._replace(block_n=64, stages=tile.stages + (tile.consumers == 1))
    tile = tile._replace(pack_gqa=spec.group in PACKABLE_GROUPS and should_pack_gqa(spec, tile, hw))
    return tile._replace(swizzle=swizzle(spec, tile, hw))


# By D: up to how many keys, and the tile. Beside a row us, L2 cold, of it and of the next best kernel of ours.
SINGLE_TILES = {
    64: {
        64: SingleTile(64),  # B64 H16 N64: 12.3, 13.5
        80: SingleTile(80),  # B2 H10, 4096 x 77: 12.2, 16.2
        128: SingleTile(128),  # B8 H4 N128: 3.9, 4.0; B32 H8: 8.4, 9.3
        160: SingleTile(80, 2),  # B32 H8 N150: 11.1, 14.0
        192: SingleTile(64, 3),  # B32 H8 N192: 12.6, 14.8
        256: SingleTile(128, 2, 3),  # B32 H8 N256: 18.3, 21.2
    },
    128: {
        64: SingleTile(64),  # B32 H8 N64: 7.7, 8.9
        80: SingleTile(80, 1, 3),  # B2 H10, 4096 x 77: 18.4, 18.4
        128: SingleTile(128, 1, 2),  # B8 H16 N128: 8.5, 9.3; but B32 H8: 15.6, 14.1
    },
}


def short_tile(spec: FlashSpec, hw: Hardware) -> SmallTile | SingleTile | None:
    """On Hopper, for up to 256 keys; None where `sm90` is faster.

    `small` spreads few queries over SMs in tiles of 16; `single_tile` takes 64 and packs GQA if that saves tiles.
    """
    keys, sms, wide = spec.N_KV, hw.sm_count, spec.D == 128
    if keys > 256 or not spec.plain or spec.D != spec.E or spec.D not in (64, 128):
        return None
    if max(spec.B, spec.H) > sdpa.MAX_GRID:
        return None
    tiles = packed = query_tiles(spec, 64)
    if spec.group in PACKABLE_GROUPS:
        packed = math.ceil(spec.N_Q * spec.group / 64) * spec.H_KV * spec.B
    pack_gqa = packed < tiles and tiles > sms  # if all tiles run in one wave, packing only makes each slower
    if 80 < keys <= 128:
        if query_tiles(spec, 16) <= sms or (spec.N_Q <= 16 and not pack_gqa):
            return SmallTile(1, 4, 128, 1)  # B1 H1 N128: 2.7, 3.1; B64 H32, 1 x 100: 19.4, 20.3
        if wide and packed > 2 * sms and not (16 if pack_gqa else 0) < spec.N_Q <= 32:
            return None
    if keys > 128 and wide:  # B8 H4 N256: 8.7, 8.3
        return small_tile(spec, hw) if tiles <= sms // 2 and spec.N_Q <= SMALL_MAX_TOKENS else None
    if keys > 128 and query_tiles(spec, 16) <= 2 * sms:
        return SmallTile(1, 4, 128, 2)  # B1 H8 N256: 3.8, 4.8; H16: 4.9, 5.0; H24: 5.9, 5.3
    if keys > 192 and spec.right is not None and tiles > 3 * sms:
        return SingleTile(64, 4, 3, pack_gqa)  # causal, B32 H8 N256: 16.9, 17.3
    rows = SINGLE_TILES[spec.D]
    return rows[min(most for most in rows if keys <= most)]._replace(pack_gqa=pack_gqa)


def small_tile(spec: FlashSpec, hw: Hardware) -> SmallTile:
    """Few queries are spread over as many SMs as there are; many share the keys they load."""
    wide, one_block = spec.D == 128, spec.N_KV <= 128
    ring = min(2 if wide else 4, max(2, math.ceil(spec.N_KV / 64)))
    if query_tiles(spec, 16) <= hw.sm_count:
        return SmallTile(1, 4, 128, 1) if one_block else SmallTile(1, 4, 64 if wide else 128, 2)
    if query_tiles(spec, 32) <= hw.sm_count:
        return SmallTile(2, 2, 128, 1) if one_block else SmallTile(2, 2, 64, ring)
    if query_tiles(spec, 64) <= hw.sm_count:
        return SmallTile(4, 1, 64 if spec.N_KV <= 64 else 128, 1) if one_block else SmallTile(4, 1, 64, ring)
    return SmallTile(8, 1, 64, 2) if wide else SmallTile(8, 1, 64, ring, 2 if hw.arch < 100 else 1)


# ---------------------------------------------------------------------------------------- tiles of backend triton

# (pass, D and E up to). On an H200, TFLOP/s causal and full, counting all products done. Others were only compiled.
HOPPER_TILES = {
    ("forward", 64): TritonTile(64, 128, 4, 2),  # 413, 487
    ("forward", 128): TritonTile(64, 64, 4, 3),  # 518, 538
    ("forward", 256): TritonTile(128, 64, 8, 2),  # 450, 536
    ("dq", 64): TritonTile(64, 64, 4, 3),  # 584, 661
    ("dq", 128): TritonTile(128, 64, 8, 3),  # 652, 700
    ("dq", 256): TritonTile(128, 32, 8, 2),  # 376, 413
    ("dkdv", 64): TritonTile(64, 64, 4, 2),  # 423, 538
    ("dkdv", 128): TritonTile(64, 64, 4, 2),  # 588, 640
    ("dkdv", 256): TritonTile(64, 64, 8, 2),  # 257, 306; D 192, E 128: 226, 238
}
UNEVEN_TILES = {  # Hopper and Blackwell, one of D and E above 128
    ("forward", 256): TritonTile(64, 32, 4, 3),  # D 192, E 128: 324, 379
    ("dq", 256): TritonTile(64, 32, 4, 2),  # D 192, E 128: 376, 430
}
OTHER_TILES = {
    ("forward", 64): TritonTile(64, 64, 4, 3),
    ("forward", 128): TritonTile(128, 32, 8, 2),
    ("forward", 256): TritonTile(64, 32, 8, 2),
    ("dq", 64): TritonTile(128, 64, 8, 2),
    ("dq", 128): TritonTile(64, 32, 4, 2),
    ("dq", 256): TritonTile(32, 32, 8, 1),
    ("dkdv", 64): TritonTile(64, 32, 4, 2),
    ("dkdv", 128): TritonTile(64, 32, 8, 1),
    ("dkdv", 256): TritonTile(32, 32, 8, 1),
}
TMA_FLOPS = 8e9  # below, a call is over before its descriptors would be written
# The backward in one launch, and below which products. us, one launch and two, B2 H8 causal: D 64 N128 6.2, 9.8; N512
# 15.9, 19.4; N1024 39.5, 39.3 (full 43.8, 39.7); D 128 N128 10.6, 16.2; N512 41.9, 33.8.
JOINED_TILES = {64: (TritonTile(64, 64, 4, 2), 2e9), 128: (TritonTile(64, 64, 8, 2), 5e8)}


def triton_tiles(spec: FlashSpec, hw: Hardware) -> TritonTiles:
    """By what the chip multiplies with and can hold."""
    size = next(width for width in (64, 128, 256) if max(spec.D, spec.E) <= width)
    large, uneven = hw.arch // 10 in (9, 10), UNEVEN_TILES if min(spec.D, spec.E) <= 128 else {}
    rows = HOPPER_TILES | uneven if large and hw.smem_bytes > 200_000 else OTHER_TILES
    forward, dq, dkdv = (rows[name, size] for name in PASSES)
    if rows is not OTHER_TILES and size == 256 and (hw.arch != 90 or spec.sequences is not None):
        dkdv = dkdv._replace(walk=32)  # 64 was measured on Hopper, not packed
    products = 4 * spec.B * spec.H * spec.N_Q * spec.N_KV * max(spec.D, spec.E)
    use_tma = large and spec.sequences is None and products >= TMA_FLOPS
    joined, most = JOINED_TILES.get(size, (None, 0)) if hw.arch == 90 else (None, 0)
    return TritonTiles(forward, dq, dkdv, heads_summed(spec, dkdv, hw), use_tma, joined if products < most else None)


def heads_summed(spec: FlashSpec, tile: TritonTile, hw: Hardware) -> int:
    """Query heads one program of dkdv sums over: all of a group if that leaves work for the whole GPU, else one."""
    programs = tiles_of(spec, spec.N_KV, tile.own) * spec.B * spec.H_KV
    return spec.group if programs >= (4 if (spec.left, spec.right) != (None, None) else 1) * hw.sm_count else 1


# ------------------------------------------------------------------------------------ arithmetic of tile schedulers

MANY_TILES, MANY_SWIZZLES = 3000, 8  # with more, the last groups' schedule is worked out; about so many sizes are tried
ENOUGH_TILES = 8  # of a head for each block: then any order is even
EVEN, FAR_FROM_EVEN = 1.02, 1.05  # `unevenness` that is taken at once; and the most, over that of all heads
MAX_SPLITS = 264  # that the combine kernel has room for


def query_tiles(spec: FlashSpec, rows: int) -> int:
    """Tiles of all heads together, where nothing is packed."""
    return math.ceil(spec.N_Q / rows) * spec.B * spec.H


def mean_queries(spec: FlashSpec) -> float:
    """Queries of a sequence; packed, on average, as lengths are on the GPU."""
    return spec.N_Q / (spec.sequences or 1)


def heads(spec: FlashSpec, tile: Sm90Tile) -> int:
    """Heads that have tiles of their own: of q or, packing GQA, of k and v."""
    return spec.B * (spec.H_KV if tile.pack_gqa else spec.H)


def tiles_per_head(spec: FlashSpec, tile: Sm90Tile) -> int:
    return tiles_of(spec, spec.N_Q, tile.positions(spec))


def should_pack_gqa(spec: FlashSpec, tile: Sm90Tile, hw: Hardware) -> bool:
    """Whether a tile should hold all query heads of a group, at fewer positions.

    Counts waves of tiles times blocks of keys in a tile. Short queries leave fewer rows empty, and a tile of fewer
    positions sees fewer keys through a window. Packing must save a tenth, or half of the tiles, each of which reads its
    keys. Where tiles are full either way it gains nothing: 0.96 to 1.00 of the speed, 0.98 where 1.07 was counted.
    """
    cost, count = [], []
    for one in (tile, tile._replace(pack_gqa=True)):
        positions, keys = one.positions(spec), spec.N_KV
        if spec.left is not None and spec.right is not None:
            keys = min(keys, positions + spec.left + spec.right)
        count.append(math.ceil(mean_queries(spec) / positions) * (spec.sequences or 1) * heads(spec, one))
        cost.append(math.ceil(count[-1] / (tile.blocks_per_sm * hw.sm_count)) * (keys / tile.block_n + 2))
    return 1.1 * cost[1] < cost[0] or 2 * count[1] <= count[0]


@functools.lru_cache(maxsize=1024)
def swizzle(spec: FlashSpec, tile: Sm90Tile, hw: Hardware) -> int:
    """L2 swizzle: how many heads are worked on at a time, so that their k and v stay in the L2 cache; 0: all.

    Without a mask one: B4 H32 N2048 D128 has 628 TFLOP/s so, with 30 616. Causal, all heads at once read k and v beyond
    the L2 cache again and again: B2 H16 N8192 D128 takes 833 us so, 808 by 16 heads, 789 by 8, 785 by 4. D256, B8 H16
    N4096 takes 2,175 and, by 8 heads, 1,549. So few heads, of which blocks have about equally much to do.
    """
    if spec.left is not None or spec.sequences is not None or spec.has_kv_lengths:
        return 0
    if spec.right is None:
        return 1
    every, of_head, blocks = heads(spec, tile), tiles_per_head(spec, tile), tile.blocks_per_sm * hw.sm_count
    stored = spec.N_KV * (spec.D + spec.E) * 2
    if spec.group > 1 or 2 * hw.l2_bytes >= 3 * every * stored or every * of_head <= blocks:
        return 0
    usual = max(2, round((4 if spec.D == 64 else 2) * blocks / of_head))  # two or four tiles for each block
    found = {usual: unevenness(spec, tile, blocks, usual)}
    if found[usual] <= EVEN:
        return usual
    even = max(EVEN, unevenness(spec, tile, blocks, every))
    most = max(usual, hw.l2_bytes // 2 // stored)
    others = [usual * 3 // 4, usual // 2, *range(usual + 1, most + 2, 1 + (most - usual) // MANY_SWIZZLES)]
    for number in filter(None, others):
        if min(found.values()) <= even:
            break
        found[number] = unevenness(spec, tile, blocks, number)
    best = min(found, key=lambda number: found[number])
    return best if found[best] <= FAR_FROM_EVEN * even else 0


def unevenness(spec: FlashSpec, tile: Sm90Tile, blocks: int, swizzle: int) -> float:
    """What the busiest of the blocks has to do in a causal call, over the mean.

    Tiles go to blocks as in the kernel's tile scheduler: groups of `swizzle` heads back and forth, the last with its
    longest tiles first, and blocks back and forth. Beside its blocks of keys a tile costs as much as 1.2 of them. Of
    many heads the last ones stand for all, as every two groups are alike.
    """
    positions, every, of_head = tile.positions(spec), heads(spec, tile), tiles_per_head(spec, tile)
    beyond = (spec.right or 0) + (0 if spec.top_left else spec.N_KV - spec.N_Q)  # query i sees keys up to i + beyond
    if of_head > ENOUGH_TILES * blocks:
        return 1.0
    if every * of_head > MANY_TILES:
        if swizzle >= every:
            return 1.0
        every = min(every, max(2, MANY_TILES // of_head // swizzle // 2 * 2) * swizzle)
    ends = (min(spec.N_KV, max(0, min(i + positions, spec.N_Q) + beyond)) for i in range(0, spec.N_Q, positions))
    work = [math.ceil(end / tile.block_n) + 1.2 for end in ends]  # of the tiles of a head
    falls = (every - 1) // swizzle % 2 == 0  # whether the first group begins with its longest tiles
    tiles: list[float] = []
    for first in range(0, every, swizzle):
        number = min(swizzle, every - first)
        tiles += [each for each in (reversed(work) if falls else work) for _ in range(number)]
        falls = not falls
    mean = sum(tiles) / blocks
    tiles += [0.0] * (-len(tiles) % (2 * blocks))
    rounds = (tiles[i : i + 2 * blocks] for i in range(0, len(tiles), 2 * blocks))
    of_places = [sum(turns) for turns in zip(*rounds, strict=True)]
    return max(map(operator.add, of_places[:blocks], reversed(of_places[blocks:]))) / mean


def splits(spec: FlashSpec, tile: Sm90Tile, hw: Hardware) -> int:
    """How many blocks share the keys of a tile: as many as idle SMs allow, if that saves more than combining costs.

    Only where tiles leave half of the SMs idle. Each block gets at least two blocks of keys. Costs are in us.
    """
    count, keys = tiles_per_head(spec, tile) * heads(spec, tile), spec.N_KV
    if spec.left is not None and spec.right is not None:
        keys = min(keys, tile.positions(spec) + spec.left + spec.right)
    if spec.left is not None and not spec.top_left:
        keys = min(keys, spec.N_Q + spec.left)
    if spec.right is not None and spec.top_left:
        keys = min(keys, spec.N_Q + spec.right)
    packed = spec.sequences is not None and not spec.has_kv_lengths  # whose keys are not split
    if packed or not 0 < 2 * count <= hw.sm_count or max(spec.H, spec.B) > sdpa.MAX_GRID:
        return 1
    room = hw.sm_count * (tile.blocks_per_sm if spec.D == 64 else 1)  # B1 H16, 1 x 8192: 20.0, 22.3 with one
    every = math.ceil(keys / tile.block_n)
    each = max(2, math.ceil(every / min(room // count, MAX_SPLITS)))
    number = math.ceil(every / each)
    saved = 0.8 * tile.consumers * (every - each)  # B1 H32/8, 1 x 8192, D 128: 80.7 to 20.6
    combine = 3 + number * spec.B * spec.H * spec.N_Q * spec.E * 8 / 2e6  # B1 H4 N2048, D 128, in 2: 32.8 to 35.8
    return number if saved > 1.3 * combine else 1


# --------------------------------------------------------------------------------------------------- the answer


def order(spec: FlashSpec, hw: Hardware) -> tuple[str, ...]:
    """Backends in the order "auto" tries them."""
    if spec.device.type != "cuda":
        return CPU_ORDER
    best = fastest(spec, hw)
    names = list(dict.fromkeys((best, *([without_cuda(spec)] if best == "cuda" else []), *ORDER)))
    # On Hopper sdpa follows triton if it has no fast kernel: cuDNN's, or in decoding FlashAttention-2's.
    kernel = sdpa_kernel(spec, hw)
    fast = kernel != "cudnn" if is_decoding(spec) else kernel == "cudnn"
    if hw.arch == 90 and not fast:
        names.remove("sdpa")
        names.insert(names.index("triton") + 1, "sdpa")
    return tuple(names)


def choose(spec: FlashSpec, hw: Hardware, backend: str = "auto") -> Choice:
    """What `backend` runs for a call it serves; "auto": the backend to try first."""
    if backend == "auto":
        return choose(spec, hw, order(spec, hw)[0])
    if backend == "sdpa":
        kernel = sdpa_kernel(spec, hw)
        return Choice(backend, kernel, None, 1, kernel)
    if backend == "triton" and spec.has_kv_lengths:
        rows = policy_cache.triton_tile(spec, hw)
        return Choice(backend, "triton_cache", rows, policy_cache.triton_splits(spec, rows, hw), backend)
    if backend == "triton":
        return Choice(backend, backend, triton_tiles(spec, hw), 1, backend)
    if backend == "cuda":
        call = heads_as_queries(spec)
        short = short_tile(call, hw) if hw.arch == 90 else small_tile(call, hw)
        if short is not None:
            return with_backward(spec, hw, Choice(backend, short.kernel, short, 1, ""))
        tile = sm90_tile(call, hw)
        return with_backward(spec, hw, Choice(backend, tile.kernel, tile, splits(call, tile, hw), ""))
    return Choice(backend, backend, None, 1, backend)


def sdpa_kernel(spec: FlashSpec, hw: Hardware) -> str:
    """The first kernel of torch's SDPA that serves the call, or "none". Decoding: cuDNN (50 ms a shape) is last."""
    if spec.device.type == "cpu":
        return "cpu"
    names = (*sdpa.ON_CUDA[1:], "cudnn") if is_decoding(spec) else sdpa.ON_CUDA
    return next((name for name in names if sdpa.unsupported_reason(spec, hw, name) is None), "none")


def cuda_backward(spec: FlashSpec, hw: Hardware) -> str:
    """Whose backward follows cuda's forward.

    Our own on Hopper if `affordable` and not `behind_cudnn`: over triton 1.3 to 2.8. cuDNN's is faster than triton's.
    It has no option except causal, no gradient of lse, no fixed order of sums, and builds a plan for every new shape.
    """
    cudnn = sdpa.unsupported_options(spec) is None and sdpa.unsupported_reason(spec, hw, "cudnn") is None
    own = hw.arch == 90 and (spec.D, spec.E) in SM90_HEAD_DIMS and affordable(spec)
    behind = own and cudnn and flops(spec) >= SMALL_FLOPS and behind_cudnn(spec, hw)
    return "cuda" if own and not behind else "cudnn" if cudnn else "triton"


def with_backward(spec: FlashSpec, hw: Hardware, choice: Choice) -> Choice:
    name = cuda_backward(spec, hw)
    if name != "cuda" or not spec.needs_grad:
        return choice._replace(backward=name)
    tile = backward_tile(spec)
    return choice._replace(backward=name, backward_tile=tile, workspace=4 * workspace(spec, tile).end)
