"""The launch of cuda_sm90.cu, the forward for Hopper, and of cuda_merge.cu, which puts keys together that were split:
limits, tiles, tensor maps and arguments.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.flash.op import FlashSpec, Residuals

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
MAX_TOKENS = 1 << 28  # positions and distances fit 32 bits
MAX_TILES = 1 << 30
MANY_TILES = 512  # of a head: their order is not worked out
MAX_GRID = 65_535  # in the second and third dimension
MAX_SPLITS = 264  # cuda_merge.cu has room for
MERGE_THREADS = 128
MERGE_BYTES = 4 * MAX_SPLITS + 16 * MERGE_THREADS  # of shared memory
GROUPS = (2, 4, 8, 16, 32, 64)  # query heads for each head of k and v that can share tiles: they divide 64 rows

ARGUMENTS = cuda.Struct(
    "Args",
    ("q", "TensorMap"), ("k", "TensorMap"), ("v", "TensorMap"),  # boxes of 64 columns and 64 (q) or block_n rows
    ("o", "char *"),  # SPLIT: sums (splits, B * H, N, E), fp32
    ("lse", "float *"),  # or null; SPLIT: m, in base 2, and l (splits, B * H, N, 2)
    ("sinks", "const char *"), ("cu_q", "const int *"), ("cu_k", "const int *"),
    ("o_strides", cuda.STRIDES),
    ("heads", "int"), ("h", "int"), ("group", "int"),  # B * H, H, H / H_KV; PACK_GQA: B * H_KV, H_KV, H / H_KV
    ("n_q", "int"), ("n_kv", "int"), ("left", "int"), ("right", "int"), ("top_left", "int"), ("sequences", "int"),
    ("tiles", "int"), ("swizzle", "int"),  # tiles of a head; heads of one L2 swizzle group
    ("factor", "float"), ("inner", "float"),  # scale * log2(e); softcap * log2(e) and scale / softcap
    ("log_group", "int"), ("splits", "int"),  # log_group: base 2
)  # fmt: skip
COMBINE_ARGUMENTS = cuda.Struct(
    "Args",
    ("sums", "const float4 *"),  # (splits, heads, N, E)
    ("found", "const float2 *"),  # m, in base 2, and l (splits, heads, N)
    ("o", "char *"), ("lse", "float *"), ("sinks", "const char *"),  # lse: or null
    ("o_strides", cuda.STRIDES),
    ("heads", "int"), ("h", "int"), ("n", "int"), ("splits", "int"),  # B * H, H
)  # fmt: skip


def lacks(spec: FlashSpec, hw: hardware.Hardware) -> str | None:
    if (spec.D, spec.E) not in HEAD_DIMS:
        sizes = ", ".join(f"{D}/{E}" for D, E in HEAD_DIMS)
        return f"needs D/E of {sizes}, here {spec.D}/{spec.E}"
    if max(spec.N_Q, spec.N_KV) > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    cfg = config(spec, hw)
    if tiles(spec, cfg) * heads(spec, cfg) > MAX_TILES:
        return f"takes up to {MAX_TILES} tiles of {cfg.rows} queries, here B={spec.B}, H={spec.H}, N_Q={spec.N_Q}"
    return None


class Config(NamedTuple):
    consumers: int  # warpgroups of 64 queries
    block_n: int  # keys at a time
    stages: int
    take_turns: bool = False  # the warpgroups start their products one after the other
    blocks_per_sm: int = 1
    together: bool = True  # all heads at once, longest tiles first; else as many as the L2 cache holds
    grouped: bool = False  # a tile holds all query heads of a group
    splits: int = 1  # blocks that share the keys of a tile

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def shared(self, D: int, E: int) -> int:
        tensors = self.rows * D + self.stages * self.block_n * (D + E)
        return 2 * tensors + 16 * self.consumers + 32 * self.stages  # with the barriers

    def length(self, spec: FlashSpec) -> int:
        """Positions of a tile."""
        return self.rows // spec.group if self.grouped else self.rows

    def __str__(self) -> str:
        tile = f"cuda_sm90.cu, {self.rows} queries x {self.block_n} keys" + ", heads grouped" * self.grouped
        return tile if self.splits == 1 else f"{tile}, split in {self.splits}"


@functools.lru_cache(maxsize=4096)
def config(spec: FlashSpec, hw: hardware.Hardware) -> Config:
    cfg = tile(spec, hw)
    cfg = cfg._replace(grouped=spec.group in GROUPS and gains(spec, cfg, hw))
    cfg = cfg._replace(together=together(spec, cfg, hw))
    return cfg._replace(splits=splits(spec, cfg, hw))


def splits(spec: FlashSpec, cfg: Config, hw: hardware.Hardware) -> int:
    """How many blocks share the keys of a tile, where tiles leave half the SMs idle: one for each SM, at D = 64 two
    where they fit, and two blocks of keys for each at least. By count, in us on an H200: what is saved in a tile
    against what merging costs.
    """
    count, keys = tiles(spec, cfg) * heads(spec, cfg), spec.N_KV
    if spec.left is not None and spec.right is not None:
        keys = min(keys, cfg.length(spec) + spec.left + spec.right)
    if spec.left is not None and not spec.top_left:
        keys = min(keys, spec.N_Q + spec.left)
    if spec.right is not None and spec.top_left:
        keys = min(keys, spec.N_Q + spec.right)
    if spec.sequences is not None or not 0 < 2 * count <= hw.sm_count or max(spec.H, spec.B) > MAX_GRID:
        return 1
    room = hw.sm_count * (cfg.blocks_per_sm if spec.D == 64 else 1)  # B1 H16, 1 x 8192: 20.0, 22.3 with one
    every = math.ceil(keys / cfg.block_n)
    each = max(2, math.ceil(every / min(room // count, MAX_SPLITS)))
    parts = math.ceil(every / each)
    saved = 0.8 * cfg.consumers * (every - each)  # B1 H32/8, 1 x 8192, D 128: 80.7 to 20.6
    merged = 3 + parts * spec.B * spec.H * spec.N_Q * spec.E * 8 / 2e6  # B1 H4 N2048, D 128, in 2: 32.8 to 35.8
    return parts if saved > 1.3 * merged else 1


def tile(spec: FlashSpec, hw: hardware.Hardware) -> Config:
    """By the measurements in dev/ladder_cuda.md: beside a row its TFLOP/s on an H200 and those of cuDNN.

    Options take registers: with any of them tiles are those that still fit.
    """
    causal, long = spec.right is not None, spec.N_KV >= 4096
    few = queries(spec) * (spec.group if spec.group in GROUPS else 1) <= 64
    rounds = {r: spec.B * spec.H * math.ceil(spec.N_Q / r) / max(hw.sm_count, 1) for r in (64, 128, 192)}
    if spec.D == 64:
        if few or (spec.plain and spec.N_KV <= 512 and rounds[64] <= 2):
            return Config(1, 128, 2, blocks_per_sm=2)  # B8 H4 N512, causal: 110, 110
        short = spec.N_KV <= 1024 if causal else 1.2 * math.ceil(rounds[192]) >= math.ceil(rounds[128])
        if spec.softcap is not None or (spec.plain and short):
            return Config(2, 128, 2)  # B32 H8 N1024, causal: 288, 317
        # N2048: 440, 400; causal 323, 253; N4096: 466, 419; causal 467, 433
        return Config(3, 128, 2, take_turns=not (long and (spec.plain or causal)))
    if spec.D == 128:
        if few or (spec.plain and spec.N_KV <= 1024 and rounds[64] <= (2 if causal else 1)):
            return Config(1, 80, 2, blocks_per_sm=2)  # B1 H16 N512: 204, 190; causal 99, 89
        if spec.plain and (long if causal else spec.N_KV > 1024):
            return Config(2, 176, 2)  # N4096: 675, 668; causal 607, 531
        return Config(2, 128, 2)  # N2048, causal: 527, 420
    return Config(2, 80, 2) if spec.D == 256 else Config(2, 128, 2)


def together(spec: FlashSpec, cfg: Config, hw: hardware.Hardware) -> bool:
    """Whether all heads are worked on at once, where that was measured (D = 64 and 128).

    Without a mask a part at a time is never slower. Causal, longest tiles first, all at once is dealt out evenly. But
    of many heads few tiles each run side by side and share k and v, which beyond what the L2 cache holds are then read
    from memory again and again. B32 H8 N2048 D128 has 453 TFLOP/s so, and 563 a part at a time. So parts, if they are
    dealt out evenly, too: of B1 H40 N8192 in parts of 7 heads the longest block has 1.09 times as much to do as
    all at once, and takes 1.02 times as long. At D = 64, where k and v are half as large, there is less to gain.
    """
    if spec.D not in (64, 128) or not spec.plain:
        return True
    if spec.right is None:
        return False
    fits = 2 * hw.l2_bytes >= 3 * spec.B * spec.H * spec.N_KV * (spec.D + spec.E) * 2
    if spec.group > 1 or hw.sm_count >= 3 * spec.B * spec.H or fits:
        return True
    if tiles(spec, cfg) > MANY_TILES:  # dealt out evenly either way
        return spec.D == 64
    parts = longest(spec, cfg, hw, section(spec, cfg._replace(together=False), hw))
    return parts > (1.05 if spec.D == 128 else 1.02) * longest(spec, cfg, hw, heads(spec, cfg))


def longest(spec: FlashSpec, cfg: Config, hw: hardware.Hardware, section: int) -> float:
    """What the block with the most to do has to do in a causal call, in blocks of keys, with that many heads at a time.
    Tiles are dealt out as by `Tile::find`, and take as long as 1.2 blocks of keys beside them (dev/ladder_cuda.md).
    """
    length, shift = cfg.length(spec), 0 if spec.top_left else spec.N_KV - spec.N_Q
    ends = [min(spec.N_KV, max(0, min((i + 1) * length, spec.N_Q) + shift)) for i in range(tiles(spec, cfg))]
    work = [math.ceil(end / cfg.block_n) + 1.2 for end in reversed(ends)]
    every = heads(spec, cfg)
    grid = max(1, min(cfg.blocks_per_sm * hw.sm_count, every * len(work)))
    more, at = [0.0] * (grid + 1), 0  # how much more a block has to do than the one before it
    for first in range(0, every, section):
        for each in work:
            left = min(section, every - first)
            while left:
                turn, block = divmod(at, grid)
                count = min(left, grid - block)
                low = grid - block - count if turn % 2 else block  # back and forth
                more[low] += each
                more[low + count] -= each
                at, left = at + count, left - count
    return max(itertools.accumulate(more))


def queries(spec: FlashSpec) -> float:
    """Of one sequence; packed, on average, as their lengths are not known here."""
    return spec.N_Q / (spec.sequences or 1)


def gains(spec: FlashSpec, cfg: Config, hw: hardware.Hardware) -> bool:
    """Whether tiles should hold all query heads of a group, at fewer positions.

    They should if that takes less time by count, rounds of the GPU times blocks of keys in a tile: short queries
    leave fewer rows empty, and a tile of fewer positions sees fewer keys through a window. Or if it takes the same
    and half the tiles or fewer, each of which reads its keys. Where tiles are full either way nothing is gained: by
    measurement 0.96 to 1.00 of the speed, and 0.98 where the count promised 1.07.
    """
    cost, count = [], []
    for one in (cfg, cfg._replace(grouped=True)):
        length = one.length(spec)
        keys = spec.N_KV
        if spec.left is not None and spec.right is not None:
            keys = min(keys, length + spec.left + spec.right)
        count.append(math.ceil(queries(spec) / length) * (spec.sequences or 1) * heads(spec, one))
        cost.append(math.ceil(count[-1] / (cfg.blocks_per_sm * hw.sm_count)) * (keys / cfg.block_n + 2))
    return 1.1 * cost[1] < cost[0] or 2 * count[1] <= count[0]


def variant(spec: FlashSpec, cfg: Config, sinks: torch.dtype | None = None) -> cuda.Variant:
    macros = {
        "HEAD_DIM": spec.D, "VALUE_DIM": spec.E, "CONSUMERS": cfg.consumers, "BLOCK_N": cfg.block_n,
        "STAGES": cfg.stages, "BLOCKS_PER_SM": cfg.blocks_per_sm, "TAKE_TURNS": int(cfg.take_turns),
        "BF16": int(spec.dtype == torch.bfloat16), "LEFT": int(spec.left is not None),
        "RIGHT": int(spec.right is not None), "SOFTCAP": int(spec.softcap is not None),
        "PACKED": int(spec.sequences is not None), "PACK_GQA": int(cfg.grouped),
        "SPLIT": int(cfg.splits > 1), "SINKS": kind(spec, sinks) if cfg.splits == 1 else 0,
    }  # fmt: skip
    return cuda.Variant("flash/kernels/sm90.cu", "flash_sm90_forward_kernel", "90a", tuple(macros.items()), ARGUMENTS)


def kind(spec: FlashSpec, sinks: torch.dtype | None) -> int:
    return 0 if not spec.has_sinks else 1 if sinks in (None, torch.float32) else 2


def merge_variant(spec: FlashSpec, sinks: torch.dtype | None = None) -> cuda.Variant:
    macros = {"VALUE_DIM": spec.E, "BF16": int(spec.dtype == torch.bfloat16), "SINKS": kind(spec, sinks)}
    return cuda.Variant(
        "flash/kernels/combine.cu", "flash_combine_kernel", "90a", tuple(macros.items()), COMBINE_ARGUMENTS
    )


def heads(spec: FlashSpec, cfg: Config) -> int:
    """That have tiles of their own: of q or, grouped, of k and v."""
    return spec.B * (spec.H_KV if cfg.grouped else spec.H)


def tiles(spec: FlashSpec, cfg: Config) -> int:
    """Of one head; packed, as many as any mix of lengths may need."""
    length = cfg.length(spec)
    return math.ceil(spec.N_Q / length) if spec.sequences is None else spec.N_Q // length + spec.sequences


def section(spec: FlashSpec, cfg: Config, hw: hardware.Hardware) -> int:
    """Heads worked on at a time: all, or as many as half the L2 cache holds the k and v of, whole groups; causal down
    to half as many, if their tiles are then dealt out more evenly.
    """
    every, unit = max(1, heads(spec, cfg)), 1 if cfg.grouped else max(spec.group, 1)
    stored = max(1, hw.l2_bytes // 2 // max(1, spec.N_KV * (spec.D + spec.E) * 2))
    if cfg.together or stored * unit >= every:
        return every
    many = every > 32 * stored * unit or tiles(spec, cfg) > MANY_TILES  # of which the last weighs little
    if spec.right is None or not spec.plain or many:
        return stored * unit
    return unit * min(range(stored, stored // 2, -1), key=lambda n: longest(spec, cfg, hw, n * unit))


@functools.lru_cache(maxsize=4096)
def launch_of(
    spec: FlashSpec, cfg: Config, o_strides: tuple[int, ...], sinks: torch.dtype | None = None
) -> cuda.Launch:
    if cfg.grouped and spec.group not in GROUPS:
        raise ValueError(f"groups of {spec.group} query heads cannot share tiles, only of {GROUPS}")
    hw = hardware.of(spec.device)
    every, group = heads(spec, cfg), max(spec.group, 1)
    log2e = math.log2(math.e)
    factor, inner = spec.scale * log2e, 0.0
    if spec.softcap is not None:
        factor, inner = spec.softcap * log2e, spec.scale / spec.softcap
    constants = {
        "o_strides": o_strides, "heads": every, "h": spec.H_KV if cfg.grouped else spec.H, "group": group,
        "n_q": spec.N_Q, "n_kv": spec.N_KV,
        "left": spec.left or 0, "right": spec.right or 0, "top_left": int(spec.top_left),
        "sequences": spec.sequences or 0, "tiles": tiles(spec, cfg), "swizzle": section(spec, cfg, hw),
        "factor": factor, "inner": inner, "log_group": group.bit_length() - 1, "splits": cfg.splits,
    }  # fmt: skip
    grid = (min(cfg.blocks_per_sm * hw.sm_count, tiles(spec, cfg) * every * cfg.splits), 1, 1)
    return cuda.Launch(
        variant(spec, cfg, sinks), spec.device, grid, cfg.threads, cfg.shared(spec.D, spec.E), constants,
        early=True,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def merge_of(spec: FlashSpec, cfg: Config, o_strides: tuple[int, ...], sinks: torch.dtype | None = None) -> cuda.Launch:
    constants = {"o_strides": o_strides, "heads": spec.B * spec.H, "h": spec.H, "n": spec.N_Q, "splits": cfg.splits}
    grid = (spec.N_Q, spec.H, spec.B)
    variant = merge_variant(spec, sinks)
    return cuda.Launch(variant, spec.device, grid, MERGE_THREADS, MERGE_BYTES, constants, early=True)


def workspace(spec: FlashSpec, cfg: Config) -> tuple[Tensor, int]:
    """For what blocks have of split keys: fp32 sums and, from the second number on, m and l."""
    rows = cfg.splits * spec.B * spec.H * spec.N_Q
    return torch.empty(rows * (spec.E + 2), dtype=torch.float32, device=spec.device), 4 * rows * spec.E


def strides(o: Tensor) -> tuple[int, ...]:
    """Of B, heads and N, in bytes."""
    return tuple(step * o.element_size() for step in o.stride()[:3])


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def run(spec: FlashSpec, cfg: Config, x: Residuals, o: Tensor, lse: Tensor | None) -> None:
    launch = launch_of(spec, cfg, strides(o), None if x.sinks is None else x.sinks.dtype)
    if launch.empty:
        return
    q = cuda.tensor_maps(x.q, 64, spec.group if cfg.grouped else 1)(x.q.data_ptr())
    k = v = q  # without keys nothing is read through them
    if spec.N_KV:
        k, v = cuda.tensor_maps(x.k, cfg.block_n)(x.k.data_ptr()), cuda.tensor_maps(x.v, cfg.block_n)(x.v.data_ptr())
    if cfg.splits == 1:
        launch(q, k, v, *map(address, (o, lse, x.sinks, x.cu_seqlens_q, x.cu_seqlens_k)))
        return
    work, after = workspace(spec, cfg)
    sums = work.data_ptr()
    launch(q, k, v, sums, sums + after, 0, 0, 0)
    merge = merge_of(spec, cfg, strides(o), None if x.sinks is None else x.sinks.dtype)
    merge(sums, sums + after, *map(address, (o, lse, x.sinks)))


def repeat(spec: FlashSpec, cfg: Config, x: Residuals, o: Tensor) -> Callable[[int, int, int, int], None] | None:
    """The same launch from the addresses of q, k, v and o alone; there must be keys and queries."""
    launch = launch_of(spec, cfg, strides(o))
    if launch.empty or not spec.N_KV:
        return None
    q_map = cuda.tensor_maps(x.q, 64, spec.group if cfg.grouped else 1)
    k_map, v_map = cuda.tensor_maps(x.k, cfg.block_n), cuda.tensor_maps(x.v, cfg.block_n)

    def again(q: int, k: int, v: int, o: int) -> None:
        launch(q_map(q), k_map(k), v_map(v), o, 0, 0, 0, 0)

    if cfg.splits == 1:
        return again
    merge = merge_of(spec, cfg, strides(o))

    def again_split(q: int, k: int, v: int, o: int) -> None:
        work, after = workspace(spec, cfg)
        sums = work.data_ptr()
        launch(q_map(q), k_map(k), v_map(v), sums, sums + after, 0, 0, 0)
        merge(sums, sums + after, o, 0, 0)

    return again_split
