"""Lightning attention in CUDA C++ for Hopper: `cuda_sm90.cu`, the sweep of triton.py by warps with roles.

bf16, D = E of 64 or 128, as many heads of k and v as of q. Backward, in u (the bytes of q):

    D = 64    the forward saves the state every SAVED_ROWS rows in bf16, 0.125u; from these one launch makes dq, dk and
              dv, which so read the same rows at about the same time: 4u from memory instead of 7u
    D = 128   two launches, dv and dk, then dq: in one the blocks of a head do not fit the GPU side by side

Few heads and long sequences are split over blocks as in triton_split.py: a launch gathers the states of segments, a
scan carries them on, the sweeps start from them. Of the last segment no state is gathered unless it is asked for. At
D = 128 these states are then what is saved, which spares the backward a launch. Where heads fill the SMs some number of
times and few are left over, these are split, and the others are not.

The copy engine takes rows that begin at multiples of 16 bytes and do not repeat. Gradients of the output that do not
are copied; for other inputs `auto` takes triton.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fulmen import cuda, hardware
from fulmen.boundary import aligned, empty_rows
from fulmen.dispatch import register
from fulmen.lightning import triton as fused
from fulmen.lightning import triton_split as split
from fulmen.lightning.op import LightningSpec, Residuals, empty_states
from fulmen.lightning.triton import Gradients, Segments

CHUNK = 64
SAVED_ROWS = 512
MAX_ROWS = 1 << 30
# segments, of what is left over after whole rounds of blocks: results/h200/lightning_leftover.txt
WORTH_CUTTING = {("forward", 64): 4, ("backward", 64): 5, ("forward", 128): 3, ("backward", 128): 3}


def supports(spec: LightningSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"needs a CUDA GPU, and q is on {spec.device}"
    if spec.dtype != torch.bfloat16:
        return f"multiplies bf16, and q is {spec.dtype}"
    hw = hardware.of(spec.device)
    if hw.arch != 90:
        return f"needs compute capability 9.0, this GPU has {hw.arch / 10}"
    if spec.D != spec.E or spec.D not in (64, 128):
        return f"needs D = E of 64 or 128, here D={spec.D}, E={spec.E}"
    if spec.H != spec.H_KV:
        return f"needs as many heads of k and v as of q, here H={spec.H}, H_KV={spec.H_KV}"
    if not 0 < spec.N <= MAX_ROWS or not spec.B * spec.H:
        return f"takes 1 to {MAX_ROWS} rows of at least one head, here B={spec.B}, H={spec.H}, N={spec.N}"
    if not spec.aligned:
        return "needs rows of q, k and v that begin at multiples of 16 bytes and do not repeat"
    todo = ["forward", "training", "backward", *(["state"] if parts(spec) > 1 else [])]
    for cfg in dict.fromkeys(config(spec, what) for what in todo):
        if (why := cuda.problem(variant(spec, cfg), spec.device, cfg.shared(spec.D))) is not None:
            return why
    return None


def rank(spec: LightningSpec) -> float:
    """Ahead of Triton, forward and backward together; a forward alone at D = 64 is on a par: lightning_bars.txt."""
    return 4.0 if spec.device.type == "cuda" else 1002.0


# ------------------------------------------------------------------------------------------------- variants


class Config(NamedTuple):
    stages: int
    outs: int  # warpgroups that make outputs; 0: a state alone
    save: int = 0  # 1: saves states, 2: reads saved ones
    share: bool = False  # blocks of one head copy rows for each other

    @property
    def threads(self) -> int:
        return 128 * (2 + self.outs)

    def shared(self, D: int) -> int:
        """Bytes: the ring, states on their way, outputs on theirs, barriers."""
        panel, panels = 64 * 128, D // 64
        if not self.outs:
            return self.stages * ((panels + 1) * panel + 16) + 64
        states = (3 if self.save == 2 else 2) * panels
        return self.stages * ((2 * panels + 1) * panel + 16) + (states + 2 * self.outs) * panel + 64

    def __str__(self) -> str:
        return f"cuda_sm90.cu, {self.stages} chunks ahead, {self.outs} warpgroups for outputs"


def config(spec: LightningSpec, what: str) -> Config:
    """By dev/ladder_lightning.md."""
    small = spec.D == 64
    if what == "state":
        return Config(8 if small else 6, 0)
    if what == "backward":
        return Config(5, 2, save=2) if small else Config(4, 1, share=True)
    return Config(6, 2, save=1 if what == "training" else 0) if small else Config(4, 1)


def variant(spec: LightningSpec, cfg: Config) -> cuda.Variant:
    macros = {
        "HEAD_DIM": spec.D, "STAGES": cfg.stages, "OUTS": cfg.outs, "DECAY": int(spec.has_decay),
        "PACKED": int(spec.sequences is not None), "EVERY": SAVED_ROWS // CHUNK, "SAVE": cfg.save,
        "SHARE": int(cfg.share),
    }  # fmt: skip
    return cuda.Variant("lightning/kernels/sweep.cu", "lightning_sweep_kernel", "90a", tuple(macros.items()), ARGUMENTS)


def whole(spec: LightningSpec) -> int:
    """How many of (sequence, head) give every SM a block, some number of times."""
    each, sms = spec.D // 64, hardware.of(spec.device).sm_count
    return 0 if spec.sequences is not None else spec.B * spec.H * each // sms * sms // each


def parts(spec: LightningSpec, what: str = "forward") -> int:
    """Into how many segments sequences are cut, together: as many as give every SM a block. Where there are blocks
    for every SM, those that are left over are cut if they are few."""
    before = whole(spec)
    left = (spec.B * spec.H - before) * (spec.D // 64)
    wanted = hardware.of(spec.device).sm_count // max(left, 1)
    if before and (not left or wanted < WORTH_CUTTING[what, spec.D]):
        return 1
    if spec.sequences is not None:  # of unknown lengths: many, so that what is left over at the end is small
        wanted = 0 if wanted < 2 * spec.sequences else wanted * split.PACKED_ROUNDS
    return max(1, min(wanted, spec.N // SAVED_ROWS))


def cut_of(spec: LightningSpec, what: str = "forward") -> Segments:
    """At D = 128 the same for both: what enters segments is saved."""
    count = parts(spec, what)
    if count == 1:
        return Segments(max(spec.N, 1), 1)
    rows = triton.cdiv(spec.N, count * SAVED_ROWS) * SAVED_ROWS
    number = triton.cdiv(spec.N, rows) if spec.sequences is None else spec.N // rows + spec.sequences
    return Segments(rows, number, whole=whole(spec))


def segments(spec: LightningSpec, x: Residuals, what: str) -> Segments:
    cut = cut_of(spec, what)
    if cut.number == 1 or spec.sequences is None:
        return cut
    return cut._replace(pieces=x.q.new_empty(spec.sequences + 1, dtype=torch.int32))


def saves(spec: LightningSpec) -> tuple[int, ...] | None:
    """In bf16. D = 64: (heads, slots, E, D), a slot for every SAVED_ROWS rows begun; packed, room for any lengths.
    D = 128: the states that enter segments, each fp32 number in the place of two."""
    if spec.D == 128:
        cut = cut_of(spec)
        return None if cut.number == 1 else ((spec.B * spec.H - cut.whole) * cut.number, spec.D, 2 * spec.E)
    if spec.sequences is None:
        return spec.B * spec.H, triton.cdiv(spec.N, SAVED_ROWS), spec.E, spec.D
    return spec.H, spec.N // SAVED_ROWS + spec.sequences, spec.E, spec.D


# -------------------------------------------------------------------------------------------------- launches

Q, K, V, DO, OUT, DK, DV, SAVED = range(8)  # places of the maps


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
ARGUMENTS = cuda.Struct(
    "Args",
    ("map", "TensorMap", 8),  # (D, N, heads, B), boxes of 64 columns and 64 rows; the last: (D, E, slots, heads)
    ("sweep", SWEEP, 3),
    ("decay", "const float *"), ("cu", "const int *"), ("pieces", "const int *"),
    ("h", "int"), ("n", "int"), ("segment", "int"), ("segments", "int"), ("sweeps", "int"), ("scale", "float"),
    ("not_last", "int"),  # of the last segment of a sequence, nothing is read
    ("zero", "int"),  # 0, which the compiler does not know
    ("whole", "int"), ("start", "int"),  # (sequence, head) before `whole` are not cut; where this launch begins
)  # fmt: skip
NO_MAP = bytes(128)


@functools.lru_cache(maxsize=4096)
def launch_of(var: cuda.Variant, device: torch.device, blocks: int, threads: int, shared: int) -> cuda.Launch:
    return cuda.Launch(var, device, (blocks, 1, 1), threads, shared, {}, early=True)


def map_of(x: Tensor) -> bytes:
    """Of (B, heads, N, size), for boxes of 64 rows and 64 columns."""
    return cuda.tensor_maps(x, 64)(x.data_ptr())


class States(NamedTuple):
    """As in triton.py: fp32 states that enter and leave the rows a block walks, and their gradients."""

    initial: Tensor | None = None
    final: Tensor | None = None
    dfinal: Tensor | None = None
    dinitial: Tensor | None = None

    def around(self, name: str) -> tuple[int, int]:
        """Where those lie that enter and leave the sweep `name`."""
        if name in ("o", "state"):
            return address(self.initial if name == "o" else None), address(self.final)
        if not SWEEPS[name].reverse:
            return address(self.initial), 0
        return address(None if name == "dstate" else self.dfinal), address(None if name == "dk" else self.dinitial)


NO_STATES = States()


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def pieces(spec: LightningSpec, cut: Segments) -> int:
    """Of packed sequences as many as there can be."""
    heads = (1 if cut.pieces is not None else spec.states) * spec.H
    return cut.whole + (heads - cut.whole) * cut.number


def run(
    spec: LightningSpec,
    cfg: Config,
    names: tuple[str, ...],
    x: Residuals,
    tensors: dict[int, Tensor],
    states: States,
    cut: Segments,
    saved: Tensor | None = None,
    first: States = NO_STATES,
    only_cut: bool = False,
    not_last: bool = False,
) -> None:
    """One launch of the sweeps called `names`: `states` of what is cut, or of all if nothing is, `first` of the rest;
    `only_cut` leaves the rest out."""
    maps = [map_of(tensors[i]) if i in tensors else NO_MAP for i in range(7)]
    maps.append(NO_MAP if saved is None else map_of(saved))
    about: list[float] = []
    for name in names:
        sweep = SWEEPS[name]
        out = tensors.get(sweep.out)
        times = spec.scale if sweep.reverse else 1.0
        strides = (0, 0, 0) if out is None else tuple(out.element_size() * step for step in out.stride()[:3])
        about += [address(out), *strides, *states.around(name), *first.around(name), 1 / times, times]
        about += [sweep.a, sweep.b, sweep.c, sweep.out, sweep.reverse, sweep.swapped]
        about += [name == "dq" and saved is not None]
    about += (3 - len(names)) * [0] * 17
    packed = cut.pieces is not None
    skipped = cut.whole if only_cut else 0
    blocks = (pieces(spec, cut) - skipped) * len(names) * (spec.D // 64)
    launch = launch_of(variant(spec, cfg), spec.device, blocks, cfg.threads, cfg.shared(spec.D))
    launch(
        *maps, *about, address(x.decay), address(x.cu_seqlens), address(cut.pieces),
        spec.H, spec.N, cut.rows, spec.states if packed else cut.number, len(names), spec.scale,
        not_last, 0, cut.whole, skipped,
    )  # fmt: skip


def gather(
    spec: LightningSpec,
    name: str,
    x: Residuals,
    tensors: dict[int, Tensor],
    cut: Segments,
    enters: Tensor | None,
    leaves: Tensor | None,
    states: Tensor | None = None,
) -> Tensor:
    """The states that enter each segment in the direction of `name`, "state" or "dstate"; written to `states`."""
    states = split.segment_states(spec, x, cut) if states is None else states
    into = States(final=states) if name == "state" else States(dinitial=states)
    run(spec, config(spec, "state"), (name,), x, tensors, into, cut, only_cut=True, not_last=leaves is None)
    fused.run([split.scan(spec, x, cut, states, enters, leaves)], spec.device)
    return states


def forward(spec: LightningSpec, x: Residuals) -> tuple[Tensor, Tensor | None]:
    o = empty_rows(x.q, spec.H, spec.E)
    final = empty_states(x.q, spec.states, spec.E) if spec.with_final_state else None
    tensors = {Q: x.q, K: x.k, V: x.v, OUT: o}
    cut = segments(spec, x, "forward")
    states = first = States(initial=x.initial_state, final=final)
    slots, entering = kinds(spec, x.saved)
    if cut.number > 1:
        fused.run(split.find_pieces(spec, x, cut), spec.device)
        states = States(initial=gather(spec, "state", x, tensors, cut, x.initial_state, final, entering))
    cfg = config(spec, "forward" if slots is None else "training")
    run(spec, cfg, ("o",), x, tensors, states, cut, slots, first)
    return o, final


def kinds(spec: LightningSpec, saved: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What was saved: slots, or states that enter segments."""
    if saved is None or spec.D == 64:
        return saved, None
    return None, saved.view(torch.float32)


def backward(
    spec: LightningSpec, x: Residuals, do: Tensor, dstate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    grads = Gradients.empty(spec, x)
    do = do if aligned(do) else do.clone(memory_format=torch.contiguous_format)
    dinitial = None if x.initial_state is None else torch.empty_like(x.initial_state)
    tensors = {Q: x.q, K: x.k, V: x.v, DO: do, OUT: grads.dq, DK: grads.dk, DV: grads.dv}
    cut = segments(spec, x, "backward")
    states = first = States(initial=x.initial_state, dfinal=dstate, dinitial=dinitial)
    slots, entering = kinds(spec, x.saved)
    if cut.number > 1:
        fused.run(split.find_pieces(spec, x, cut), spec.device)
        if slots is None and entering is None:
            entering = gather(spec, "state", x, tensors, cut, x.initial_state, None)
        states = States(initial=entering, dfinal=gather(spec, "dstate", x, tensors, cut, dstate, dinitial))
    for names in [("dv", "dk"), ("dq",)] if slots is None else [("dv", "dk", "dq")]:
        run(spec, config(spec, "backward"), names, x, tensors, states, cut, slots, first)
    return *grads, dinitial


register(
    "lightning",
    "cuda",
    supports=supports,
    rank=rank,
    forward=forward,
    backward=backward,
    detail=lambda spec: str(config(spec, "forward")),
    saves=saves,
)
