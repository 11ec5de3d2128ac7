"""The launches of the backward for Hopper: the prologue, then backward.cu or backward_wide.cu.

Shared memory of a block (bytes) and registers of a consumer thread, by head dim; tiles are queries x keys:

                                       D = E = 64, 128 x 128    D = E = 128, 64 x 128
    k, v                                              32,768                   65,536
    q, 2 and 3 stages                                 32,768                   49,152
    do, lse and delta, 2 stages                       34,816                   33,792
    ds, 3 buffers                                     98,304                   49,152
    dq                                                32,768                   32,768
    sum, of 232,448                                  231,424                  230,400
    dk, dv                                           32 + 32                  64 + 64
    s (D128: of the next tile), dq, p, ds      64 + 32 + 32 + 32        32 + 32 + 16 + 16
    sum, of 240                                          224                      224

                                  D 192, E 128, 64 x 64    D = E = 256, 64 x 64
    k, v                                         40,960                  65,536
    q, lse and delta, 3 and 2 stages             75,264                  66,560
    do, 2 stages and 1                           32,768                  32,768
    p, ds                                        16,384                  16,384
    dq, 2 and 3 pieces of 64 columns             32,768                  49,152
    sum, of 232,448                             198,144                 230,400
    first: dv, s, p, dq, k          64 + 32 + 16 + 32 + 48      128 + 32 + 16 + 32
    second: dk, dp, ds, dq, v       96 + 32 + 16 + 32 + 32      128 + 32 + 16 + 32

The workspace is fp32 dq, lse and delta of every query, and what blocks count. torch's caching allocator owns it, so
that calls on several streams, or in CUDA graphs, do not share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.flash.kernels import combine
from fulmen.flash.kernels.sm90 import MAX_TILES, MAX_TOKENS, strides
from fulmen.flash.policy_backward import BackwardTile, backward_tile, key_tiles, lag, swizzle, workspace
from fulmen.flash.spec import FlashSpec, Residuals, tiles_of

THREADS = 384
PROLOGUE_THREADS, PROLOGUE_SHARED = 256, 32
PIECE_BYTES = 64 * 64 * 4  # of dq on its way to the workspace

MASK = (
    ("n_q", "int"), ("n_kv", "int"), ("left", "int"), ("right", "int"), ("top_left", "int"), ("sequences", "int"),
    ("slots", "int"),  # query tiles of a head
)  # fmt: skip
PROLOGUE = cuda.Struct(
    "Args",
    ("o", "const char *"), ("dout", "const char *"), ("lse", "const float *"), ("dlse", "const float *"),  # or null
    ("sinks", "const char *"), ("cu_q", "const int *"), ("cu_k", "const int *"),
    ("dq", "char *"), ("rows", "float *"), ("drawn", "float *"), ("turns", "int *"), ("counter", "int *"),
    ("o_strides", cuda.STRIDES), ("dout_strides", cuda.STRIDES), ("dq_strides", cuda.STRIDES),
    ("h", "int"), *MASK,  # H
)  # fmt: skip
MAIN = cuda.Struct(
    "Args",
    ("q", "TensorMap"), ("k", "TensorMap"), ("v", "TensorMap"), ("dout", "TensorMap"),  # boxes of 64 columns
    ("dq", "char *"), ("dk", "char *"), ("dv", "char *"), ("cu_q", "const int *"), ("cu_k", "const int *"),
    ("sums", "float *"), ("rows", "const float *"), ("turns", "int *"), ("counter", "int *"),
    ("dq_strides", cuda.STRIDES), ("dk_strides", cuda.STRIDES), ("dv_strides", cuda.STRIDES),
    ("heads", "int"), ("h", "int"), ("group", "int"), *MASK,  # B * H_KV, H_KV, H / H_KV
    ("tiles", "int"), ("swizzle", "int"),  # of keys, of a head; heads of one L2 swizzle group
    ("works", "int"), ("lag", "int"), ("end", "int"),  # tiles of keys; how many later dq is converted; their sum
    ("factor", "float"), ("inner", "float"), ("scale", "float"),  # scale * log2(e); softcap: as in sm90.py
)  # fmt: skip


def empty_workspace(spec: FlashSpec, tile: BackwardTile) -> Tensor:
    return torch.empty(workspace(spec, tile).end, dtype=torch.float32, device=spec.device)


def unsupported_reason(spec: FlashSpec) -> str | None:
    if max(spec.N_Q, spec.N_KV) > MAX_TOKENS:
        return f"takes up to {MAX_TOKENS} queries and keys, here N_Q={spec.N_Q}, N_KV={spec.N_KV}"
    if key_tiles(spec) * spec.B * spec.H_KV > MAX_TILES:
        return f"takes up to {MAX_TILES} tiles of {backward_tile(spec).block_n} keys, here B={spec.B}, H_KV={spec.H_KV}"
    return None


def slots(spec: FlashSpec, tile: BackwardTile) -> int:
    return tiles_of(spec, spec.N_Q, tile.block_m)


def shared_bytes(spec: FlashSpec, tile: BackwardTile) -> int:
    M, N = tile.block_m, tile.block_n
    tensors = N * (spec.D + spec.E) + tile.q_stages * M * spec.D + tile.o_stages * M * spec.E
    tensors += (2 if tile.wide else 3) * N * M  # p and ds, or three times ds
    rows = 8 * M * (tile.q_stages if tile.wide else tile.o_stages)
    staged = (3 if tile.wide and spec.D == 256 else 2) * PIECE_BYTES
    return 2 * tensors + staged + rows + 56 + 16 * (tile.q_stages + tile.o_stages)


# --------------------------------------------------------------------------------------------------- launches


def variants(spec: FlashSpec, tile: BackwardTile, sinks: torch.dtype | None = None) -> list[cuda.Variant]:
    """Of the prologue and the kernel itself."""
    macros = {
        "HEAD_DIM": spec.D, "VALUE_DIM": spec.E, "BLOCK_M": tile.block_m, "BF16": int(spec.dtype == torch.bfloat16),
        "LEFT": int(spec.left is not None), "RIGHT": int(spec.right is not None),
        "PACKED": int(spec.sequences is not None), "ADDERS": tile.adders,
    }  # fmt: skip
    own = {"KEEP": int(tile.keep)} if tile.wide else {"OVERLAP": int(tile.overlap)}
    main = macros | own | {
        "Q_STAGES": tile.q_stages, "O_STAGES": tile.o_stages,
        "DETERMINISTIC": int(tile.fixed), "SOFTCAP": int(spec.softcap is not None),
    }  # fmt: skip
    found = [
        ("_prologue", macros | {"SINKS": combine.sinks_kind(spec, sinks)}, PROLOGUE),
        ("_wide" if tile.wide else "", main, MAIN),
    ]
    return [
        cuda.Variant(
            f"flash/kernels/backward{name}.cu", f"flash_backward{name}_kernel", "90a", tuple(m.items()), fields
        )
        for name, m, fields in found
    ]


def launches(
    spec: FlashSpec, tile: BackwardTile, o: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    sinks: torch.dtype | None,
) -> list[cuda.Launch]:  # fmt: skip
    prologue, main = variants(spec, tile, sinks)
    factor, inner = spec.scale * math.log2(math.e), 0.0
    if spec.softcap is not None:
        factor, inner = spec.softcap * math.log2(math.e), spec.scale / spec.softcap
    hw = hardware.of(spec.device)
    tiles, heads = key_tiles(spec) * spec.B * spec.H_KV if spec.N_KV else 0, swizzle(spec, hw)
    behind = min(tiles, lag(spec, heads, hw))
    resident = min(tiles + behind, hw.sm_count) if spec.N_Q else tiles + behind
    mask = {
        "n_q": spec.N_Q, "n_kv": spec.N_KV, "left": spec.left or 0, "right": spec.right or 0,
        "top_left": int(spec.top_left), "sequences": spec.sequences or 0, "slots": slots(spec, tile),
    }  # fmt: skip
    of_prologue = {
        "o_strides": strides(o), "dout_strides": strides(do), "dq_strides": strides(dq), "h": spec.H, **mask,
    }  # fmt: skip
    of_main = {
        "dq_strides": strides(dq), "dk_strides": strides(dk), "dv_strides": strides(dv), "heads": spec.B * spec.H_KV,
        "h": spec.H_KV, "group": max(spec.group, 1), **mask, "tiles": key_tiles(spec),
        "swizzle": heads, "works": tiles, "lag": behind, "end": tiles + behind, "factor": factor, "inner": inner,
        "scale": spec.scale,
    }  # fmt: skip
    blocks = slots(spec, tile) * spec.B * spec.H, 1, 1
    return [
        cuda.Launch(prologue, spec.device, blocks, PROLOGUE_THREADS, PROLOGUE_SHARED, of_prologue, early=True),
        cuda.Launch(main, spec.device, (resident, 1, 1), THREADS, shared_bytes(spec, tile), of_main, early=True),
    ]


def launcher(
    spec: FlashSpec, tile: BackwardTile, x: Residuals, o: Tensor, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> Callable[[tuple[int, ...]], None]:
    """Launches calls with these shapes and strides: a function of the addresses of x, o, lse, do, dlse, the workspace,
    dq, dk and dv."""
    before, main = launches(spec, tile, o, do, dq, dk, dv, None if x.sinks is None else x.sinks.dtype)
    rows, drawn, turns, counter = (4 * part for part in workspace(spec, tile)[:4])
    counted = spec.N_Q > 0  # else no prologue clears the counter
    k_map, v_map = (cuda.tensor_maps(t, tile.block_n) for t in (x.k, x.v))
    q_map, do_map = (cuda.tensor_maps(t, tile.block_m) for t in (x.q, do)) if spec.N_Q else (k_map, v_map)

    def of_prologue(at: tuple[int, ...]) -> tuple[int, ...]:
        _, _, _, sinks, cu_q, cu_k, o, lse, do, dlse, work, dq, _, _ = at
        return o, do, lse, dlse, sinks, cu_q, cu_k, dq, work + rows, work + drawn, work + turns, work + counter

    def of_main(at: tuple[int, ...]) -> tuple[int | bytes, ...]:
        q, k, v, _, cu_q, cu_k, _, _, do, _, work, dq, dk, dv = at
        q, do = (q, do) if spec.N_Q else (k, v)  # without queries nothing is read through their maps
        maps = q_map(q), k_map(k), v_map(v), do_map(do)
        taken = work + counter if counted else 0
        return *maps, dq, dk, dv, cu_q, cu_k, work, work + rows, work + turns, taken

    def run(at: tuple[int, ...]) -> None:
        before.at(at, of_prologue)
        main.at(at, of_main)

    return run


def sinks_gradient(spec: FlashSpec, tile: BackwardTile, sinks: Tensor, work: Tensor) -> Tensor:
    """The sum of what the blocks of the prologue found, in a fixed order."""
    parts = workspace(spec, tile)
    drawn = work[parts.drawn : parts.turns].view(spec.B, spec.H, slots(spec, tile))
    return drawn.sum((0, 2)).to(sinks.dtype)
