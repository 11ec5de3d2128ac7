"""The launch of sm90.cu, the forward for Hopper, followed by combine.cu where keys are split."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.dispatch import Choice
from fulmen.flash.kernels import combine
from fulmen.flash.policy import SM90_HEAD_DIMS, Sm90Tile, heads, sm90_tile, tiles_per_head
from fulmen.flash.spec import PACKABLE_GROUPS, FlashSpec, Residuals

MAX_TOKENS = 1 << 28  # positions and distances fit 32 bits
MAX_TILES = 1 << 30
MAX_ONCE = 256 << 20  # bytes of k and v
TAKES_REPEATS = False  # TMA reads no tensor with a stride of 0

FRONT = (
    ("q", "TensorMap"), ("k", "TensorMap"), ("v", "TensorMap"),  # boxes of 64 columns and 64 (q) or block_n rows
    ("o", "char *"),  # SPLIT: sums (splits, B * H, N, E), fp32
    ("lse", "float *"),  # or null; SPLIT: m, in base 2, and l (splits, B * H, N, 2)
    ("sinks", "const char *"), ("cu_q", "const int *"), ("cu_k", "const int *"),
)  # fmt: skip
REST = (
    ("o_strides", cuda.STRIDES),
    ("heads", "int"), ("h", "int"), ("group", "int"),  # B * H, H, H / H_KV; PACK_GQA: B * H_KV, H_KV, H / H_KV
    ("n_q", "int"), ("n_kv", "int"), ("left", "int"), ("right", "int"), ("top_left", "int"), ("sequences", "int"),
    ("tiles", "int"), ("swizzle", "int"), ("swizzles", "int"),  # tiles of a head; heads of an L2 swizzle group; groups
    ("factor", "float"), ("inner", "float"),  # scale * log2(e); softcap * log2(e) and scale / softcap
    ("log_group", "int"), ("splits", "int"),  # log_group: base 2
)  # fmt: skip
ARGUMENTS = cuda.Struct("Args", *FRONT, *REST)
CACHE_ARGUMENTS = cuda.Struct(
    "Args", *FRONT, ("lengths", "const int *"), ("table", "const int *"), *REST,
    ("pages", "int"), ("row_pages", "int"),  # of k and v; of a row of the table
)  # fmt: skip


def unsupported_reason(spec: FlashSpec, hw: hardware.Hardware) -> str | None:
    if (spec.D, spec.E) not in SM90_HEAD_DIMS:
        sizes = ", ".join(f"{D}/{E}" for D, E in SM90_HEAD_DIMS)
        return f"needs D/E of {sizes}, here {spec.D}/{spec.E}"
    if max(spec.N_Q, spec.N_KV) > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    tile = sm90_tile(spec, hw)
    if tiles_per_head(spec, tile) * heads(spec, tile) > MAX_TILES:
        return f"takes up to {MAX_TILES} tiles of {tile.rows} queries, here B={spec.B}, H={spec.H}, N_Q={spec.N_Q}"
    return None


def box_rows(spec: FlashSpec, tile: Sm90Tile) -> int:
    """Rows of a TMA load of k or v: a block of keys, or as much of a page as divides one."""
    return tile.block_n if spec.page is None else math.gcd(tile.block_n, spec.page)


def reads_once(spec: FlashSpec, choice: Choice) -> bool:
    """Whether each key of a decoding step is read by one block, and all of them are not far beyond what L2 holds.

    B1 H32/8 D128, 1 x 8192: 18.2 us, else 19.5; 1 x 131072: 145 and 142 us.
    """
    decodes = spec.has_kv_lengths or choice.splits > 1
    alone = tiles_per_head(spec, choice.tile) == 1 and (choice.tile.pack_gqa or spec.H == spec.H_KV)
    size = spec.B * spec.H_KV * spec.N_KV * (spec.D + spec.E) * spec.dtype.itemsize
    return decodes and alone and size <= MAX_ONCE


def threads(choice: Choice) -> int:
    return 128 * (choice.tile.consumers + 1)


def shared_bytes(spec: FlashSpec, choice: Choice) -> int:
    tile: Sm90Tile = choice.tile
    tensors = tile.rows * spec.D + tile.stages * tile.block_n * (spec.D + spec.E)
    return 2 * tensors + 16 * tile.consumers + 32 * tile.stages  # with the barriers


def grid(spec: FlashSpec, hw: hardware.Hardware, choice: Choice) -> tuple[int, int, int]:
    tile: Sm90Tile = choice.tile
    tiles = tiles_per_head(spec, tile) * heads(spec, tile) * choice.splits
    return min(tile.blocks_per_sm * hw.sm_count, tiles), 1, 1


def variant(spec: FlashSpec, hw: hardware.Hardware, choice: Choice, sinks: torch.dtype | None = None) -> cuda.Variant:
    tile: Sm90Tile = choice.tile
    macros = {
        "HEAD_DIM": spec.D, "VALUE_DIM": spec.E, "CONSUMERS": tile.consumers, "BLOCK_N": tile.block_n,
        "STAGES": tile.stages, "BLOCKS_PER_SM": tile.blocks_per_sm, "TAKE_TURNS": int(tile.take_turns),
        "BF16": int(spec.dtype == torch.bfloat16), "LEFT": int(spec.left is not None),
        "RIGHT": int(spec.right is not None), "SOFTCAP": int(spec.softcap is not None),
        "PACKED": int(spec.sequences is not None), "PACK_GQA": int(tile.pack_gqa),
        "SPLIT": int(choice.splits > 1), "SINKS": combine.sinks_kind(spec, sinks) if choice.splits == 1 else 0,
        "LENGTHS": int(spec.has_kv_lengths), "PAGE": spec.page or 0, "BOX": box_rows(spec, tile),
        "ONCE": int(reads_once(spec, choice)),
    }  # fmt: skip
    arguments = CACHE_ARGUMENTS if spec.has_kv_lengths else ARGUMENTS
    return cuda.Variant("flash/kernels/sm90.cu", "flash_sm90_forward_kernel", "90a", tuple(macros.items()), arguments)


def launch_of(
    spec: FlashSpec, choice: Choice, o_strides: tuple[int, ...], sinks: torch.dtype | None = None,
    table: tuple[int, int] = (0, 0),
) -> cuda.Launch:  # fmt: skip
    """`table`: the pages of k and v, and those of a row."""
    tile: Sm90Tile = choice.tile
    if tile.pack_gqa and spec.group not in PACKABLE_GROUPS:
        raise ValueError(f"groups of {spec.group} query heads cannot share tiles, only of {PACKABLE_GROUPS}")
    hw = hardware.of(spec.device)
    group, log2e = max(spec.group, 1), math.log2(math.e)
    factor, inner = spec.scale * log2e, 0.0
    if spec.softcap is not None:
        factor, inner = spec.softcap * log2e, spec.scale / spec.softcap
    every = heads(spec, tile)
    swizzle = tile.swizzle or max(every, 1)
    constants = {
        "o_strides": o_strides, "heads": every, "h": spec.H_KV if tile.pack_gqa else spec.H, "group": group,
        "n_q": spec.N_Q, "n_kv": spec.N_KV, "left": spec.left or 0, "right": spec.right or 0,
        "top_left": int(spec.top_left), "sequences": spec.sequences or 0, "tiles": tiles_per_head(spec, tile),
        "swizzle": swizzle, "swizzles": math.ceil(every / swizzle), "factor": factor, "inner": inner,
        "log_group": group.bit_length() - 1, "splits": choice.splits,
    }  # fmt: skip
    if spec.has_kv_lengths:
        constants |= {"pages": table[0], "row_pages": table[1]}
    return cuda.Launch(
        variant(spec, hw, choice, sinks), spec.device, grid(spec, hw, choice), threads(choice),
        shared_bytes(spec, choice), constants, early=True,
    )  # fmt: skip


def workspace(spec: FlashSpec, splits: int) -> tuple[Tensor, int]:
    """For what blocks have of split keys: fp32 sums and, from the second number on, m and l."""
    rows = splits * spec.B * spec.H * spec.N_Q
    return torch.empty(rows * (spec.E + 2), dtype=torch.float32, device=spec.device), 4 * rows * spec.E


def strides(o: Tensor) -> tuple[int, ...]:
    """Of B, heads and N, in bytes."""
    return tuple(step * o.element_size() for step in o.stride()[:3])


def launcher(spec: FlashSpec, choice: Choice, x: Residuals, o: Tensor) -> Callable[..., None]:
    """Launches calls with these shapes and strides: a function of the addresses of q, k, v, o, lse and x's others.

    Lengths and page table are passed only where there is a cache.
    """
    tile: Sm90Tile = choice.tile
    sinks = None if x.sinks is None else x.sinks.dtype
    table = (0, 0) if x.page_table is None else (x.k.shape[0], x.page_table.shape[1])
    launch = launch_of(spec, choice, strides(o), sinks, table)
    if launch.empty:
        return lambda *addresses: None
    q_map = k_map = v_map = cuda.tensor_maps(x.q, 64, spec.group if tile.pack_gqa else 1)
    if spec.N_KV:  # else nothing is read through them
        box = box_rows(spec, tile)
        k_map, v_map = cuda.tensor_maps(x.k, box), cuda.tensor_maps(x.v, box)

    def run(q: int, k: int, v: int, o: int, lse: int, sinks: int, cu_q: int, cu_k: int, *cache: int) -> None:
        launch(q_map(q), k_map(k), v_map(v), o, lse, sinks, cu_q, cu_k, *cache)

    def run_split(q: int, k: int, v: int, o: int, lse: int, sinks: int, cu_q: int, cu_k: int, *cache: int) -> None:
        work, after = workspace(spec, choice.splits)
        sums = work.data_ptr()
        launch(q_map(q), k_map(k), v_map(v), sums, sums + after, 0, cu_q, 0, *cache)
        combined(sums, sums + after, o, lse, sinks)

    if choice.splits == 1:
        return run
    combined = combine.launch_of(spec, choice.splits, strides(o), sinks)
    return run_split
