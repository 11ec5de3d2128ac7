"""The launch of sweep.cu: up to three sweeps of lightning attention over chunks of rows, on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen import cuda
from fulmen.lightning.policy import SweepTile, saved_rows
from fulmen.lightning.spec import LightningSpec, Residuals
from fulmen.lightning.triton import Segments

CHUNK = 64
DECAYS = 3 * 4 * CHUNK + 16  # bytes of a chunk's factors, where every token has its decay
SUMS = 6 * CHUNK  # bytes of the products of its rows
STEP_SIZES = 4 * CHUNK  # bytes of its step sizes
STEP_SUMS = 8 * CHUNK  # bytes of the products of dv's and do's rows with x
MAPS = 11
Q, K, V, DO, OUT, DK, DV, SAVED, OF_Q, OF_K, OF_V = range(MAPS)  # the last three: what q, k and v are silu of
Z = DO  # of a forward, which reads no do


class Sweep(NamedTuple):
    """One of f's uses: which tensors are a, b, c and out, and what is particular about its states."""

    a: int
    b: int
    c: int
    out: int
    reverse: bool = False
    swapped: bool = False


SWEEPS = {
    "o": Sweep(Q, K, V, OUT),
    "dq": Sweep(DO, V, K, OUT, swapped=True),
    "dk": Sweep(V, DO, Q, DK, reverse=True, swapped=True),
    "dv": Sweep(K, Q, DO, DV, reverse=True),
    "state": Sweep(K, K, V, OUT),
    "dstate": Sweep(Q, Q, DO, OUT, reverse=True),
}
SWEEP = cuda.Struct(
    "Sweep",
    ("out", "char *"),  # for chunks that are not written whole
    ("out_b", "long long"), ("out_h", "long long"), ("out_n", "long long"),  # strides in bytes
    ("enters", "float *"), ("leaves", "float *"),  # states, or null: of segments, where sequences are cut
    ("first_enters", "float *"), ("first_leaves", "float *"),  # of the sequences before those that are cut
    ("enters_times", "float"), ("leaves_times", "float"),
    ("a", "int"), ("b", "int"), ("c", "int"), ("to", "int"),  # which maps
    ("reverse", "int"),  # walks right to left
    ("swapped", "int"),  # stores its states [V, K]
    ("saved", "int"),  # begins groups of chunks from saved states
    align=16,
)  # fmt: skip
PRODUCT = cuda.Struct(
    "Product",  # of a sweep: q . dq or k . dk of every row
    ("out", "float *"),  # (heads, tiles, rows), or null
    ("anchors", "float *"),  # (heads, slots, tiles, 4): state times its gradient, or null
    ("entered", "float *"),  # (heads, chunks, tiles): of dq the part of q . dq that comes from the state, or null
    ("rows", "int"),  # the map of q, k or x
    align=16,
)  # fmt: skip
ARGUMENTS = cuda.Struct(
    "Args",
    ("map", "TensorMap", MAPS),  # (D, N, heads, B), boxes of 64 columns and 64 rows; of SAVED (D, E, slots, heads)
    ("sweep", SWEEP, 3),
    ("decay", "const float *"), ("cu", "const int *"), ("segment_offsets", "const int *"),
    ("h", "int"), ("n", "int"), ("segment", "int"), ("segments", "int"), ("sweeps", "int"), ("scale", "float"),
    ("not_last", "int"),  # of the last segment of a sequence, nothing is read
    ("zero", "int"),  # 0, which the compiler does not know
    ("whole", "int"), ("start", "int"),  # (sequence, head) before `whole` are not cut; where this launch begins
    ("group", "int", MAPS),  # heads that share one of a map's tensor
    ("decay_b", "long long"), ("decay_h", "long long"), ("decay_n", "long long"),  # strides of a decay for each token
    ("keeps", "float *"),  # what segments leave of the states that enter them
    ("saved", "const char *"), ("slots", "int"),  # the states the forward saved, for `anchors`
    ("product", PRODUCT, 3),
    ("steps", "const float *"), ("skip", "const float *"),  # step sizes, as the decay lies; D of each head, or null
    ("x_dv", "float *"), ("x_do", "float *"),  # of the sweep of dv with step sizes: (heads, rows)
)  # fmt: skip
NO_MAP = bytes(128)


def threads(tile: SweepTile) -> int:
    return 128 * (2 + tile.outs)


def sizes(spec: LightningSpec, names: tuple[str, ...]) -> tuple[int, int]:
    """Columns of a and b, and of c: D and E, in the sweeps of dq and dk E and D."""
    return (spec.E, spec.D) if names[0] in ("dq", "dk") else (spec.D, spec.E)


def shared_bytes(spec: LightningSpec, tile: SweepTile, names: tuple[str, ...] = ("o",), products: bool = False) -> int:
    """The ring, states on their way, outputs on theirs, barriers, decays of tokens."""
    panel, panels = 64 * 128, sizes(spec, names)[0] // 64
    decays = tile.stages * (DECAYS + (SUMS if products else 0)) + 16 * (1 + tile.outs) if spec.per_token else 0
    decays += tile.stages * (STEP_SIZES + (STEP_SUMS if tile.pair else 0)) if spec.steps else 0
    if not tile.outs:
        return tile.stages * ((panels + 1) * panel + 16) + 64 + decays
    deep = tile.outs == 1 and (tile.stages > 4 or tile.silu)  # which leaves room for one state and one output
    states = (1 if deep else 3 if tile.save == 2 else 2) * panels
    rows = int(tile.pair or tile.silu or (products and panels == 1))
    outputs = 1 if deep else 2 if panels == 2 and not tile.pair else 2 * tile.outs
    barriers = 16 + 8 * tile.silu
    return tile.stages * ((2 * panels + 1 + rows) * panel + barriers) + (states + outputs) * panel + 64 + decays


def variant(
    spec: LightningSpec, tile: SweepTile, names: tuple[str, ...] = ("o",), products: bool = False
) -> cuda.Variant:
    K, V = sizes(spec, names)
    macros = {
        "HEAD_DIM": K, "TILES": V // 64, "STAGES": tile.stages, "OUTS": tile.outs, "DECAY": int(spec.has_decay),
        "TOKENS": int(spec.per_token), "DOTS": int(products), "GROUPED": int(spec.groups is not None),
        "PACKED": int(spec.sequences is not None), "EVERY": saved_rows(spec) // CHUNK, "SAVE": tile.save,
        "SHARE": int(tile.share), "JOINED": int(tile.pair), "STEPS": int(spec.steps),
        "GATE": int(spec.gated and names == ("o",)), "SILU": int(tile.silu),
    }  # fmt: skip
    return cuda.Variant("lightning/kernels/sweep.cu", "lightning_sweep_kernel", "90a", tuple(macros.items()), ARGUMENTS)


def launch_of(var: cuda.Variant, device: torch.device, blocks: int, threads: int, shared: int) -> cuda.Launch:
    return cuda.Launch(var, device, (blocks, 1, 1), threads, shared, {}, early=True)


class States(NamedTuple):
    """As in triton.py: fp32 states that enter and leave the rows a block walks, and their gradients."""

    initial: Tensor | None = None
    final: Tensor | None = None
    dfinal: Tensor | None = None
    dinitial: Tensor | None = None


NO_STATES = States()

# What a launch points to is a tuple of tensors, or of addresses, where 0 is none: rows in the order of the maps, states
# of what is cut (or of all if nothing is), states of what is not cut, then decay, cu_seqlens and segment_offsets; of a
# decay for each token what segments keep, q . dq, k . dk, anchors and entered; of step sizes x . dv, x . do, themselves
# and the skip.
INITIAL, FINAL, DFINAL, DINITIAL = range(MAPS, MAPS + 4)
NOT_CUT = 4  # from a state to that of what is not cut
DECAY = INITIAL + 2 * NOT_CUT
KEEPS, QDQ, KDK, ANCHORS, ENTERED, X_DV, X_DO, STEPS, SKIP = range(DECAY + 3, DECAY + 12)
OPERANDS = SKIP + 1
OF_TOKENS = 7  # of these, those that a launch is given beside the call's residuals
PRODUCTS = {"dq": (QDQ, Q), "dk": (KDK, K), "o": (None, Z)}  # where they go, and with which rows; the rows of o's gate
OF_SILU = {"dq": OF_Q, "dk": OF_K, "dv": OF_V}  # x of a gradient
AROUND = {  # the states that enter and leave a sweep; those that leave dv and dk are one
    "o": (INITIAL, FINAL),
    "dq": (INITIAL, None),
    "dk": (DFINAL, None),
    "dv": (DFINAL, DINITIAL),
    "state": (None, FINAL),
    "dstate": (None, DINITIAL),
}


def operands(
    x: Residuals,
    tensors: dict[int, Tensor],
    states: States,
    not_cut: States = NO_STATES,
    segment_offsets: Tensor | None = None,
    tokens: tuple[Tensor | None, ...] = (),
) -> tuple[Tensor | None, ...]:
    rows = [tensors.get(i) for i in range(MAPS)]
    return *rows, *states, *not_cut, x.decay, x.cu_seqlens, segment_offsets, *tokens, x.steps, x.skip


def segment_count(spec: LightningSpec, cut: Segments) -> int:
    """Of packed sequences as many as there can be."""
    heads = (1 if cut.segment_offsets is not None else spec.states) * spec.H
    return cut.whole + (heads - cut.whole) * cut.number


class SweepLaunch:
    """One launch of the sweeps called `names`, for tensors of the same shapes and strides.

    tensors   what the sweeps read and write, by their places among the maps
    only_cut  leaves out what is not cut
    not_last  leaves out the last segment of a sequence
    decay     one for each token
    products  whether q . dq and k . dk are written
    """

    def __init__(
        self,
        spec: LightningSpec,
        tile: SweepTile,
        names: tuple[str, ...],
        tensors: dict[int, Tensor],
        cut: Segments,
        only_cut: bool = False,
        not_last: bool = False,
        decay: Tensor | None = None,
        products: bool = False,
    ) -> None:
        self.maps = [(i, cuda.tensor_maps(t, 64)) for i, t in tensors.items()]
        self.pointers: list[tuple[int, int]] = []  # places among the values and among the addresses
        values: list[float | bytes] = [NO_MAP] * MAPS
        for name in names:
            sweep, out, at = SWEEPS[name], tensors.get(SWEEPS[name].out), len(values)
            times = spec.scale if sweep.reverse else 1.0
            strides = (0, 0, 0) if out is None else tuple(out.element_size() * step for step in out.stride()[:3])
            values += [0, *strides, 0, 0, 0, 0, 1 / times, times]
            values += [sweep.a, sweep.b, sweep.c, sweep.out, sweep.reverse, sweep.swapped]
            values += [name == "dq" and SAVED in tensors]
            self.pointers += [(at, sweep.out)] if out is not None else []
            for i, state in enumerate(AROUND[name], at + 4):
                self.pointers += [(i, state), (i + 2, state + NOT_CUT)] if state is not None else []
        values += (3 - len(names)) * [0] * len(SWEEP.fields)
        self.pointers += [(len(values) + i, DECAY + i) for i in range(3)]
        skipped, kinds = cut.whole if only_cut else 0, len(names) - tile.pair  # of blocks
        segments = spec.states if cut.segment_offsets is not None else cut.number
        values += [0, 0, 0, spec.H, spec.N, cut.rows, segments, kinds, spec.scale, not_last, 0, cut.whole, skipped]
        self.values = values + self.of_rows(spec, tile, names, tensors, decay, products, len(values))
        blocks = (segment_count(spec, cut) - skipped) * kinds * (sizes(spec, names)[1] // 64)
        var = variant(spec, tile, names, products)
        self.launch = launch_of(var, spec.device, blocks, threads(tile), shared_bytes(spec, tile, names, products))

    def of_rows(
        self, spec: LightningSpec, tile: SweepTile, names: tuple[str, ...], tensors: dict[int, Tensor],
        decay: Tensor | None, products: bool, at: int,
    ) -> list[float | bytes]:  # fmt: skip
        """What is about heads that share rows, a decay for each token and rows that outputs are multiplied with; the
        first has index `at` among the values."""
        heads = [spec.H // tensors[i].shape[1] if i in tensors and i != SAVED else 1 for i in range(MAPS)]
        slots = tensors[SAVED].shape[1] if SAVED in tensors else 0
        values: list[float | bytes] = [*heads, *((0, 0, 0) if decay is None else decay.stride()), 0, 0, slots]
        self.pointers += [(at + MAPS + 3, KEEPS), (at + MAPS + 4, SAVED)] if decay is not None else []
        for name in names:
            own = at + len(values)
            out, rows = PRODUCTS.get(name, (None, 0))
            values += [0, 0, 0, OF_SILU[name] if tile.silu else rows]
            if products and name == "dv":
                self.pointers += [(own + 1, ANCHORS)]
            elif products and out is not None:
                self.pointers += [(own, out)]
            if products and name == "dq":
                self.pointers += [(own + 2, ENTERED)]
        values += (3 - len(names)) * [0] * len(PRODUCT.fields)
        if spec.steps:
            own = at + len(values)
            self.pointers += [(own, STEPS)]
            self.pointers += [(own + 1, SKIP)] if names[0] in ("o", "dv") else []
            self.pointers += [(own + 2, X_DV), (own + 3, X_DO)] if names[0] == "dv" else []
        return [*values, 0, 0, 0, 0]

    def arguments(self, at: Sequence[int]) -> list[float | bytes]:
        values = self.values.copy()
        for i, maps in self.maps:
            values[i] = maps(at[i])
        for i, place in self.pointers:
            values[i] = at[place]
        return values
