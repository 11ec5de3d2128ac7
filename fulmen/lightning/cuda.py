"""Lightning attention in CUDA C++ for Hopper: kernels/sweep.cu, the sweep of triton.py with warp specialisation.

bf16, D = E of 64 or 128, as many heads of k and v as of q. Backward, in u (the bytes of q):

    D = 64    the forward saves the state every SAVED_ROWS rows in bf16, 0.125u; from these one launch makes dq, dk and
              dv, which so read the same rows at about the same time: 4u from memory instead of 7u
    D = 128   two launches, dv and dk, then dq: in one the blocks of a head do not fit the GPU side by side

Few heads and long sequences are split over blocks as in triton_split.py: a launch gathers the states of segments, a
scan carries them on, the sweeps start from them. Of the last segment no state is gathered unless it is asked for. At
D = 128 these states are then what is saved, which spares the backward a launch. Where heads fill the SMs some number of
times and few are left over, these are split, and the others are not.

TMA takes rows that begin at multiples of 16 bytes and do not repeat. Gradients of the output that do not
are copied; for other inputs `auto` takes triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fulmen import cuda, dispatch, hardware
from fulmen.boundary import aligned, allocator, empty_rows
from fulmen.dispatch import register
from fulmen.lightning import triton as fused
from fulmen.lightning import triton_split as split
from fulmen.lightning.kernels.sweep import (
    DK,
    DO,
    DV,
    NO_STATES,
    OUT,
    SAVED,
    SWEEPS,
    K,
    Q,
    States,
    SweepLaunch,
    V,
    shared_bytes,
    variant,
)
from fulmen.lightning.op import LightningSpec, Residuals, empty_states
from fulmen.lightning.policy import SAVED_ROWS, Split, SweepTile, SweepTiles, cdiv
from fulmen.lightning.triton import Segments

MAX_ROWS = 1 << 30


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
    tiles = tiles_of(spec)
    todo = [tiles.forward, tiles.training, tiles.backward, *([tiles.state] if tiles.forward_split.number > 1 else [])]
    for tile in dict.fromkeys(todo):
        if (why := cuda.problem(variant(spec, tile), spec.device, shared_bytes(spec, tile))) is not None:
            return why
    return None


def tiles_of(spec: LightningSpec) -> SweepTiles:
    tiles: SweepTiles = dispatch.choose("lightning", spec, "cuda").tile
    return tiles


def segments(spec: LightningSpec, cut: Split, x: Residuals) -> Segments:
    return Segments(cut.rows, 1) if cut.number == 1 else split.segments(spec, cut, x)


def saves(spec: LightningSpec) -> tuple[int, ...] | None:
    """In bf16. D = 64: (heads, slots, E, D), a slot for every SAVED_ROWS rows begun; packed, room for any lengths.
    D = 128: the states that enter segments, each fp32 number in the place of two."""
    if spec.D == 128:
        cut = tiles_of(spec).forward_split
        return None if cut.number == 1 else ((spec.B * spec.H - cut.whole) * cut.number, spec.D, 2 * spec.E)
    if spec.sequences is None:
        return spec.B * spec.H, cdiv(spec.N, SAVED_ROWS), spec.E, spec.D
    return spec.H, spec.N // SAVED_ROWS + spec.sequences, spec.E, spec.D


class Kept:
    """What calls with the same spec and strides share: launches and allocators, made when first needed."""

    def __init__(self) -> None:
        self.launches: dict[object, SweepLaunch] = {}
        self.allocators: dict[str, Callable[[], Tensor]] = {}

    def empty(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        new = self.allocators.get(name)
        if new is not None:
            return new()
        made = make()
        self.allocators[name] = allocator(made)
        return made


def empty(kept: Kept | None, name: str, make: Callable[[], Tensor]) -> Tensor:
    return make() if kept is None else kept.empty(name, make)


def run(
    spec: LightningSpec,
    tile: SweepTile,
    names: tuple[str, ...],
    x: Residuals,
    tensors: dict[int, Tensor],
    states: States,
    cut: Segments,
    first: States = NO_STATES,
    only_cut: bool = False,
    not_last: bool = False,
    kept: Kept | None = None,
) -> None:
    """Launches sweeps once; see `SweepLaunch`."""
    launch = None if kept is None else kept.launches.get(names)
    if launch is None:
        launch = SweepLaunch(spec, tile, names, tensors, cut, only_cut, not_last)
        if kept is not None:
            kept.launches[names] = launch
    launch(x, tensors, states, first, cut)


def gather(
    spec: LightningSpec,
    name: str,
    x: Residuals,
    tensors: dict[int, Tensor],
    cut: Segments,
    enters: Tensor | None,
    leaves: Tensor | None,
    states: Tensor | None = None,
    kept: Kept | None = None,
) -> Tensor:
    """The states that enter each segment in the direction of `name`, "state" or "dstate"; written to `states`."""
    states = split.segment_states(spec, x, cut) if states is None else states
    into = States(final=states) if name == "state" else States(dinitial=states)
    read = {i: tensors[i] for i in SWEEPS[name][:3]}
    run(spec, tiles_of(spec).state, (name,), x, read, into, cut, only_cut=True, not_last=leaves is None, kept=kept)
    fused.run([split.scan(spec, x, cut, states, enters, leaves)], spec.device)
    return states


def forward(spec: LightningSpec, x: Residuals, kept: Kept | None = None) -> tuple[Tensor, Tensor | None]:
    o = empty(kept, "o", lambda: empty_rows(x.q, spec.H, spec.E))
    final = None
    if spec.with_final_state:
        final = empty(kept, "final", lambda: empty_states(x.q, spec.states, spec.E))
    tensors = {Q: x.q, K: x.k, V: x.v, OUT: o}
    tiles = tiles_of(spec)
    cut = segments(spec, tiles.forward_split, x)
    states = first = States(initial=x.initial_state, final=final)
    slots, entering = kinds(spec, x.saved)
    if cut.number > 1:
        fused.run(split.find_pieces(spec, x, cut), spec.device)
        states = States(initial=gather(spec, "state", x, tensors, cut, x.initial_state, final, entering, kept))
    tile = tiles.forward
    if slots is not None:
        tensors[SAVED], tile = slots, tiles.training
    run(spec, tile, ("o",), x, tensors, states, cut, first, kept=kept)
    return o, final


def prepare(spec: LightningSpec, x: Residuals) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """The forward of calls with these shapes and strides at the least cost for the host."""
    kept = Kept()
    new_saved = None if x.saved is None else allocator(x.saved)

    def again(*tensors: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        saved = None if new_saved is None else new_saved()
        return *forward(spec, Residuals(*tensors, saved), kept), saved  # type: ignore[arg-type]

    return again


def kinds(spec: LightningSpec, saved: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What was saved: slots, or states that enter segments."""
    if saved is None or spec.D == 64:
        return saved, None
    return None, saved.view(torch.float32)


def backward(
    spec: LightningSpec, x: Residuals, do: Tensor, dstate: Tensor | None, kept: Kept | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dq, dk, dv = (
        empty(kept, name, lambda t=t: empty_rows(t, spec.H, spec.D))
        for name, t in (("dq", x.q), ("dk", x.k), ("dv", x.v))
    )
    dinitial = None if x.initial_state is None else torch.empty_like(x.initial_state)
    tensors = {Q: x.q, K: x.k, V: x.v, DO: readable(do), OUT: dq, DK: dk, DV: dv}
    tiles = tiles_of(spec)
    cut = segments(spec, tiles.backward_split, x)
    states = first = States(initial=x.initial_state, dfinal=dstate, dinitial=dinitial)
    slots, entering = kinds(spec, x.saved)
    if cut.number > 1:
        fused.run(split.find_pieces(spec, x, cut), spec.device)
        if slots is None and entering is None:
            entering = gather(spec, "state", x, tensors, cut, x.initial_state, None, kept=kept)
        states = States(initial=entering, dfinal=gather(spec, "dstate", x, tensors, cut, dstate, dinitial, kept=kept))
    if slots is not None:
        tensors[SAVED] = slots
    for names in [("dv", "dk"), ("dq",)] if slots is None else [("dv", "dk", "dq")]:
        run(spec, tiles.backward, names, x, tensors, states, cut, first, kept=kept)
    return dq, dk, dv, dinitial


def readable(do: Tensor) -> Tensor:
    """do, or a copy that TMA can read."""
    return do if aligned(do) else do.clone(memory_format=torch.contiguous_format)


def prepare_backward(
    spec: LightningSpec, x: Residuals, do: Tensor, dstate: Tensor | None
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]] | None:
    """The backward of calls with these shapes and strides at the least cost for the host."""
    if readable(do) is not do or not (dstate is None or dstate.is_contiguous()):
        return None
    kept = Kept()

    def again(*tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        *given, do, dstate = tensors
        return backward(spec, Residuals(*given), do, dstate, kept)  # type: ignore[arg-type]

    return again


register(
    "lightning",
    "cuda",
    supports=supports,
    forward=forward,
    backward=backward,
    prepare=prepare,
    prepare_backward=prepare_backward,
    saves=saves,
)
