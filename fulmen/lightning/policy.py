"""What lightning attention runs: the backend, its tile and into how many segments sequences are split.

Everything here is data or a pure function of (spec, hw). Nothing is compiled or launched, and no other module compares
backends. Where to look:

    what "auto" takes            `order`
    a tile                       `triton_tile`; for cuda SWEEP_TILES, TOKEN_TILES, GRADIENT_TILES, SILU_TILES
    when sequences are split     `triton_split` and `cuda_split`
    the answer                   `order` (backends, fastest first) and `choose` (one `Choice`)

Measurements are medians on an H200. u is the size of q: a forward moves at least 4u, a backward 7u.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fulmen.dispatch import Choice
from fulmen.hardware import Hardware
from fulmen.lightning.spec import LightningSpec

# --------------------------------------------------------------------------------------------------- tile types


class TritonTile(NamedTuple):
    """Of every sweep of a call in the backends `triton` and `triton_split`."""

    chunk: int  # rows at a time
    block_v: int  # value columns of a program
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.chunk} x {self.block_v}, {self.num_warps} warps, {self.num_stages} stages"


class Split(NamedTuple):
    """How sequences are split into segments."""

    rows: int  # of a segment
    number: int = 1  # segments of a sequence; of packed ones, the most there can be in all
    whole: int = 0  # the first (sequence, head) pairs, which are not split


class SplitTile(NamedTuple):
    """Backend `triton_split`."""

    sweep: TritonTile
    split: Split

    def __str__(self) -> str:
        return str(self.sweep)


class SweepTile(NamedTuple):
    """One launch of backend `cuda`."""

    stages: int  # chunks in flight
    outs: int  # warpgroups that compute outputs; 0: a state alone
    save: int = 0  # 1: saves states, 2: reads saved ones
    share: bool = False  # blocks of one head load rows for each other (multicast)
    pair: bool = False  # one block makes dv and dk, from one state
    silu: bool = False  # q, k and v are silu(x), and the gradients become those of x

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.outs} warpgroups for outputs"


class SweepTiles(NamedTuple):
    """Backend `cuda`: a tile for each kind of launch, and how the two passes are split."""

    forward: SweepTile
    training: SweepTile  # a forward that saves for its backward
    backward: SweepTile
    state: SweepTile  # states of segments
    forward_split: Split
    backward_split: Split
    backward_of_e: SweepTile | None = None  # of dk and dq, where E is not D
    gradient: tuple[SweepTile, ...] = ()  # with the gradient of a decay for each token: of the launch of dv, of another
    silu: SweepTile | None = None  # the backward where q, k and v are silu(x)

    def __str__(self) -> str:
        return str(self.forward)


# --------------------------------------------------------------------------------------------------- what "auto" takes


def order(spec: LightningSpec, hw: Hardware) -> tuple[str, ...]:
    """Backends in the order "auto" tries them.

    cuda is ahead of triton, forward and backward together; a forward alone at D = 64 is on a par. triton_split is ahead
    of triton where that leaves at least half of the SMs without a program.
    """
    if spec.device.type != "cuda":  # triton would be interpreted
        return "eager", "triton", "triton_split", "cuda", "reference"
    programs = spec.states * spec.H * value_tiles(spec, triton_tile(spec, hw))
    if 2 * programs <= hw.sm_count and spec.N >= 8 * MIN_SEGMENT:
        return "cuda", "triton_split", "triton", "eager", "reference"
    return "cuda", "triton", "triton_split", "eager", "reference"


# ----------------------------------------------------------------------------------------------------- tiles


def triton_tile(spec: LightningSpec, hw: Hardware) -> TritonTile:
    """By what the chip multiplies with and can hold.

    Beside a row its share of the H200's copy bandwidth, forward and backward. Others were compiled, not measured.
    """
    wide = max(spec.D, spec.E) > 128
    large = hw.smem_bytes > 200_000
    hopper = hw.arch // 10 == 9 and large
    if spec.dtype == torch.float32:  # on the CUDA cores
        block_v, warps = (64, 8 if spec.per_token else 4) if hopper and not wide else (32, 4)
        return TritonTile(16, block_v, warps, 2)  # D64: 6 % and 3 %
    if wide:
        return TritonTile(32, 64, 4, 3) if hopper and spec.D == spec.E else TritonTile(32, 64, 8, 2)  # D256: 17, 10 %
    if hopper and spec.per_token and max(spec.D, spec.E) > 64:  # the factors of a chunk spill with 4 warps
        return TritonTile(64, 64, 8, 3)
    if hopper:  # wgmma: one warpgroup multiplies 64 rows at a time
        return TritonTile(64, 64, 4, 4)  # D64: 90 % and 63 %; D128: 83 % and 52 %, with decay 74 % and 45 %
    if hw.arch // 10 == 10 and large:  # tcgen05, accumulators in tensor memory
        return TritonTile(64, 64, 8, 3)
    warps = 8 if spec.per_token and max(spec.D, spec.E) > 64 else 4  # as above
    return TritonTile(32, 64, warps, 3)  # mma.sync: at most 57,344 B, so one or two programs fit 101,376 B


# Of backend cuda: (D, E), then forward, training, backward, state. The share of the copy bandwidth, with decay and
# without: D64 forward 93, 94 %, backward 80, 81 %; D128 forward 93, 92 %, backward 61, 62 %. us at D128 (B2 H32 N8192)
# with 4 stages and with 5: forward 140, 142, backward with decay 373, 369, without 379, 365.
SWEEP_TILES: dict[tuple[int, int], tuple[SweepTile, ...]] = {
    (64, 64): (SweepTile(6, 2), SweepTile(6, 2, save=1), SweepTile(5, 2, save=2), SweepTile(8, 0)),
    (128, 128): (SweepTile(4, 1), SweepTile(4, 1), SweepTile(5, 1, share=True), SweepTile(6, 0)),
}

# The same with a decay for each token; last the backward of dk and dq, if E is not D. us, forward and backward without
# the decay's gradient, and those of a constant decay: D64 (B4 H32 N8192) 142, 303; 139, 281. D128 (B2) 149, 407; 140,
# 371. D128 E64 (B8 H64 N4096, 1 group) forward 262. One warpgroup for outputs: D128 152, 415, D128 E64 284.
TOKEN_TILES: dict[tuple[int, int], tuple[SweepTile, ...]] = {
    (64, 64): (SweepTile(6, 2), SweepTile(6, 2, save=1), SweepTile(5, 2, save=2), SweepTile(8, 0)),
    (128, 128): (SweepTile(4, 2), SweepTile(4, 2, save=1), SweepTile(4, 2, share=True), SweepTile(6, 0)),
    (128, 64): (SweepTile(4, 2), SweepTile(4, 2, save=1), SweepTile(4, 2), SweepTile(6, 0), SweepTile(5, 2)),
}

# The backward with the gradient of a decay for each token: (D, E), then the launch of dv and another, if there is one.
# At D128 E64 dv and dk come from one block: 1 group 1,323 us instead of 1,482, 8 groups 1,361 instead of 1,526.
# D64 362 us, with 4 stages 367; D128 522.
GRADIENT_TILES: dict[tuple[int, int], tuple[SweepTile, ...]] = {
    (64, 64): (SweepTile(5, 2, save=2),),
    (128, 128): (SweepTile(4, 2, share=True), SweepTile(4, 2, share=True)),
    (128, 64): (SweepTile(3, 2, pair=True), SweepTile(5, 2)),
}

# The backward where q, k and v are silu(x), whose rows are a part of each stage: (D, E). It moves 15 tiles a chunk at
# D64 and 30 at D128, instead of 12 and 24. us in a training step of a layer, B4 N8192, dim 2048: D64 474 instead of 278
# and, for silu's own backward, 284; D128 669 instead of 465 and 277.
SILU_TILES = {(64, 64): SweepTile(5, 2, save=2, silu=True), (128, 128): SweepTile(4, 1, share=True, silu=True)}


# ---------------------------------------------------------------------------------- segments, to fill the GPU

PROGRAMS_PER_SM = 2
MIN_SEGMENT = 256  # rows, in triton_split; shorter ones spend their time on states
SAVED_ROWS = 512  # cuda saves a state so often, and segments are multiples of it
TOKEN_ROWS = 256  # the same with a decay for each token: roundings add up in its gradient from one state to the next
PACKED_WAVES = 8  # times as many segments of packed sequences, so that what is left over at their ends is small
# (pass, D): cuda splits what is left over after whole waves of blocks only into at least so many segments. us, whole
# and split: D64, B3 H50 N5000 in 5 118, 112, backward 225, 218; B4 H40 N8192 in 4 203, 186, backward 357, 367;
# D128, B1 H88 N4096 in 3 128, 120, backward 312, 294.
LEFTOVER_SEGMENTS = {("forward", 64): 4, ("backward", 64): 5, ("forward", 128): 3, ("backward", 128): 3}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def sweep_tiles(spec: LightningSpec) -> tuple[SweepTile, ...] | None:
    """The tiles of backend `cuda`; None: it has none for these sizes."""
    return (TOKEN_TILES if spec.per_token else SWEEP_TILES).get((spec.D, spec.E))


def value_tiles(spec: LightningSpec, tile: TritonTile) -> int:
    """Programs that share the value columns of a head."""
    return cdiv(spec.E, tile.block_v)


def most_segments(spec: LightningSpec, rows: int) -> int:
    """Segments of so many rows; of packed sequences, as many as any mix of lengths may need."""
    return cdiv(max(spec.N, 1), rows) if spec.sequences is None else spec.N // rows + spec.sequences


def saved_rows(spec: LightningSpec) -> int:
    """Rows from one state that is saved to the next."""
    return TOKEN_ROWS if spec.per_token else SAVED_ROWS


def slots_of(spec: LightningSpec) -> int:
    """Saved states of a head, one for every `saved_rows` rows begun; of packed sequences room for any lengths."""
    rows = saved_rows(spec)
    return cdiv(spec.N, rows) if spec.sequences is None else spec.N // rows + spec.sequences


def triton_split(spec: LightningSpec, tile: TritonTile, hw: Hardware) -> Split:
    """Enough segments for PROGRAMS_PER_SM programs on each SM, none shorter than MIN_SEGMENT."""
    programs = max(spec.B * spec.H * value_tiles(spec, tile), 1)
    wanted = PROGRAMS_PER_SM * max(hw.sm_count, 1) * (1 if spec.sequences is None else PACKED_WAVES)
    count = max(1, min(wanted // programs, spec.N // MIN_SEGMENT))
    rows = cdiv(max(spec.N, 1), count * tile.chunk) * tile.chunk
    return Split(rows, most_segments(spec, rows))


def whole_waves(spec: LightningSpec, hw: Hardware) -> int:
    """How many (sequence, head) pairs give every SM of cuda's grid a block, some number of times."""
    blocks, sms = spec.E // 64, hw.sm_count
    return 0 if spec.sequences is not None else spec.B * spec.H * blocks // sms * sms // blocks


def cuda_segments(spec: LightningSpec, hw: Hardware, pass_: str) -> int:
    """Segments, at most: one for every idle SM. After whole waves the pairs left over are split if they are few."""
    whole = whole_waves(spec, hw)
    left = (spec.B * spec.H - whole) * (spec.E // 64)
    wanted = hw.sm_count // max(left, 1)
    if whole and (not left or wanted < LEFTOVER_SEGMENTS[pass_, spec.D]):
        return 1
    if spec.sequences is not None:  # whose lengths are on the GPU
        wanted = 0 if wanted < 2 * spec.sequences else wanted * PACKED_WAVES
    return max(1, min(wanted, spec.N // SAVED_ROWS))


def cuda_split(spec: LightningSpec, hw: Hardware, pass_: str) -> Split:
    """At D = 128 the same for both passes: the states that enter segments are what is saved."""
    count = cuda_segments(spec, hw, pass_)
    if count == 1:
        return Split(max(spec.N, 1))
    rows = cdiv(spec.N, count * SAVED_ROWS) * SAVED_ROWS
    return Split(rows, most_segments(spec, rows), whole_waves(spec, hw))


# --------------------------------------------------------------------------------------------------- the answer


def choose(spec: LightningSpec, hw: Hardware, backend: str = "auto") -> Choice:
    """What `backend` runs for a call it serves; "auto": the backend to try first."""
    if backend == "auto":
        return choose(spec, hw, order(spec, hw)[0])
    if backend == "triton":
        return Choice(backend, backend, triton_tile(spec, hw), 1, backend)
    if backend == "triton_split":
        tile = triton_tile(spec, hw)
        split = triton_split(spec, tile, hw)
        return Choice(backend, backend, SplitTile(tile, split), split.number, backend)
    if backend == "cuda" and (tiles := sweep_tiles(spec)) is not None:
        forward, back = (cuda_split(spec, hw, pass_) for pass_ in ("forward", "backward"))
        gradient = GRADIENT_TILES[spec.D, spec.E] if spec.per_token else ()
        ahead, training, backward, state, *of_e = tiles
        silu = None if spec.per_token else SILU_TILES[spec.D, spec.E]
        found = SweepTiles(ahead, training, backward, state, forward, back, of_e[0] if of_e else None, gradient, silu)
        return Choice(backend, backend, found, forward.number, backend)
    return Choice(backend, backend, None, 1, backend)
