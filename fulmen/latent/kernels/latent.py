"""The launch of latent.cu, for Hopper, followed by flash's combine.cu where keys are split."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda
from fulmen.dispatch import Choice
from fulmen.flash.kernels import combine, sm90
from fulmen.flash.spec import FlashSpec
from fulmen.latent.policy import CUDA_DIMS, CUDA_KEYS, CUDA_ROWS, LatentTile, query_tiles
from fulmen.latent.spec import LatentSpec, Residuals

THREADS = 384
# q, two blocks of CUDA_KEYS keys in some number of stages, p, barriers, m and l
SHARED_BYTES = 3 * CUDA_ROWS * 2 * CUDA_DIMS[0] + 2 * CUDA_ROWS * CUDA_KEYS + 128 + 12 * CUDA_ROWS
MAX_GRID = 65_535  # of combine.cu: heads and rows of the batch

ARGUMENTS = cuda.Struct(
    "Args",
    ("kv", "TensorMap"),  # boxes of 64 columns; (B, 1, N_KV, D), or (pages, 1, page, D)
    ("q", "const char *"),
    ("o", "char *"),  # SPLIT: sums (splits, B * H, N_Q, E), fp32
    ("found", "float2 *"),  # SPLIT: m, in base 2, and l (splits, B * H, N_Q)
    ("lengths", "const int *"), ("table", "const int *"),  # lengths: or null
    ("q_strides", cuda.STRIDES), ("o_strides", cuda.STRIDES),
    ("batch", "int"), ("h", "int"), ("n_q", "int"), ("n_kv", "int"),
    ("tiles", "int"), ("splits", "int"),  # tiles of 64 queries of a row of the batch; blocks that share its keys
    ("pages", "int"), ("table_width", "int"), ("page", "int"),
    ("factor", "float"),  # scale * log2(e)
)  # fmt: skip


def unsupported_reason(spec: LatentSpec) -> str | None:
    if (spec.D, spec.E) != CUDA_DIMS:
        return f"needs D={CUDA_DIMS[0]} and value_dim={CUDA_DIMS[1]}, here D={spec.D}, value_dim={spec.E}"
    if spec.page is not None and spec.page % CUDA_KEYS and CUDA_KEYS % spec.page:
        return f"takes pages that divide {CUDA_KEYS} or are a multiple of it, and a page has {spec.page} keys"
    if max(spec.B, spec.H) > MAX_GRID or spec.N_KV > sm90.MAX_TOKENS or spec.rows > sm90.MAX_TOKENS:
        here = f"B={spec.B}, H={spec.H}, N_Q={spec.N_Q}, N_KV={spec.N_KV}"
        return f"takes up to {MAX_GRID} rows and heads and {sm90.MAX_TOKENS} keys and queries of a row, here {here}"
    return None


def box(spec: LatentSpec, tile: LatentTile) -> int:
    """Keys that one TMA load brings: they lie in one page."""
    return tile.block_n if spec.page is None else min(tile.block_n, spec.page)


def variant(spec: LatentSpec, choice: Choice) -> cuda.Variant:
    tile: LatentTile = choice.tile
    macros = {
        "BLOCK_N": tile.block_n, "STAGES": tile.stages,
        "BF16": int(spec.dtype == torch.bfloat16), "CAUSAL": int(spec.causal), "SPLIT": int(choice.splits > 1),
        "PAGED": int(spec.page is not None), "BOX": box(spec, tile),
        "ONCE": int(query_tiles(spec, CUDA_ROWS) == 1 and spec.B * spec.N_KV * spec.D * 2 <= sm90.MAX_ONCE),
        "APPENDED": int(spec.appended),
    }  # fmt: skip
    return cuda.Variant("latent/kernels/latent.cu", "latent_forward_kernel", "90a", tuple(macros.items()), ARGUMENTS)


def combined_spec(spec: LatentSpec) -> FlashSpec:
    """What combine.cu is told of the call."""
    return FlashSpec(spec.B, spec.H, 1, spec.N_Q, spec.N_KV, spec.E, spec.E, spec.dtype, spec.device, spec.scale)


def launcher(spec: LatentSpec, choice: Choice, x: Residuals, o: Tensor) -> Callable[..., None]:
    """Launches calls with these shapes and strides: a function of the addresses of q, kv, lengths, table and o."""
    tiles = query_tiles(spec, CUDA_ROWS)
    constants = {
        "q_strides": sm90.strides(x.q), "o_strides": sm90.strides(o), "batch": spec.B, "h": spec.H, "n_q": spec.N_Q,
        "n_kv": spec.N_KV, "tiles": tiles, "splits": choice.splits, "pages": x.kv.shape[0],
        "table_width": 0 if x.page_table is None else x.page_table.shape[1], "page": spec.page or 0,
        "factor": spec.scale * math.log2(math.e),
    }  # fmt: skip
    grid = (tiles * choice.splits * spec.B, 1, 1)
    launch = cuda.Launch(variant(spec, choice), spec.device, grid, THREADS, SHARED_BYTES, constants, early=True)
    if launch.empty:
        return lambda *addresses: None
    kv_map = cuda.tensor_maps(x.kv[:, None], box(spec, choice.tile))

    def run(q: int, kv: int, lengths: int, table: int, o: int) -> None:
        launch(kv_map(kv), q, o, 0, lengths, table)

    def run_split(q: int, kv: int, lengths: int, table: int, o: int) -> None:
        work, after = sm90.workspace(flash, choice.splits)
        sums = work.data_ptr()
        launch(kv_map(kv), q, sums, sums + after, lengths, table)
        combine_(sums, sums + after, o, 0, 0)

    if choice.splits == 1:
        return run
    flash = combined_spec(spec)
    combine_ = combine.launch_of(flash, choice.splits, sm90.strides(o))
    return run_split
