"""Lightning attention in CUDA C++ for Hopper: kernels/sweep.cu, the sweep of triton.py with warp specialisation.

bf16, D = E of 64 or 128, with a decay for each token D 128 and E 64, too, as Mamba-2 has; k and v have as many heads as
q, or q and k fewer than v. With D 128 and E 64 it also takes Mamba-2's step sizes, skip and gate (`spec.steps`,
`spec.gated`): o = (f(q, k, dt x) + D x) silu(z), and without z the gradient of x. Backward, in u (the bytes of q):

    D = 64    the forward saves a state every `saved_rows` in bf16, 0.125u; from these one launch makes dq, dk and
              dv, which so read the same rows at about the same time: 4u from memory instead of 7u
    D = 128   two launches, dv and dk, then dq: in one the blocks of a head do not fit the GPU side by side; if E is 64
              dv, then dk and dq, whose products are over E; with the gradient of a decay for each token dv and dk from
              one block, then dq. Heads that share q and k have dq and dk of their own in
              bf16, which are summed in fp32

Few heads and long sequences are split over blocks as in triton_split.py: a launch gathers the states of segments, a
scan carries them on, the sweeps start from them. The last segment's state is computed only if the final state is
returned. At D = 128 these states are what is saved, which spares the backward a launch. Full waves of heads are not
split; a small last wave is.

TMA takes rows that begin at multiples of 16 bytes and do not repeat. Gradients of the output that do not are copied;
for other inputs `auto` takes triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulmen import cuda, dispatch, hardware
from fulmen.boundary import readable
from fulmen.cuda.launch import address
from fulmen.dispatch import register
from fulmen.launch import Chain, Described
from fulmen.lightning import triton as fused
from fulmen.lightning import triton_split as split
from fulmen.lightning.kernels.sweep import (
    CHUNK,
    DK,
    DO,
    DV,
    NO_STATES,
    OF_K,
    OF_Q,
    OF_TOKENS,
    OF_V,
    OPERANDS,
    OUT,
    SAVED,
    SWEEPS,
    K,
    Q,
    States,
    SweepLaunch,
    V,
    Z,
    operands,
    shared_bytes,
    variant,
)
from fulmen.lightning.policy import Split, SweepTile, SweepTiles, saved_rows, slots_of, sweep_tiles
from fulmen.lightning.spec import LightningSpec, Residuals, empty_output
from fulmen.lightning.triton import Segments

MAX_ROWS = 1 << 30
triton_backward = functools.partial(fused.describe_backward, "triton", fused.backward_launches)


def supports(spec: LightningSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"needs a CUDA GPU, and the device is {spec.device}"
    if spec.dtype != torch.bfloat16:
        return f"multiplies bf16, and q is {spec.dtype}"
    hw = hardware.of(spec.device)
    if hw.arch != 90:
        return f"needs compute capability 9.0, this GPU has {hw.arch / 10}"
    if sweep_tiles(spec) is None:
        more = ", or D 128 and E 64" if spec.per_token else ""
        return f"needs D = E of 64 or 128{more}, here D={spec.D}, E={spec.E}"
    if spec.steps and ((spec.D, spec.E) != (128, 64) or not spec.per_token or spec.scale != 1.0):
        return f"takes step sizes with D 128, E 64, a decay for each token and scale 1, here D={spec.D}, E={spec.E}"
    if spec.H != spec.H_KV:
        return f"needs as many heads of k and v as of q, here H={spec.H}, H_KV={spec.H_KV}"
    if not 0 < spec.N <= MAX_ROWS or not spec.B * spec.H:
        return f"takes 1 to {MAX_ROWS} rows of at least one head, here B={spec.B}, H={spec.H}, N={spec.N}"
    if not spec.aligned:
        return "needs rows of q, k and v that begin at multiples of 16 bytes and do not repeat"
    tiles = tiles_of(spec)
    todo: list[tuple[SweepTile, tuple[str, ...]]] = [(tiles.forward, ("o",))]
    if not spec.gated:  # which has no backward
        todo += [(tiles.training, ("o",))]
        sweeps = backward_sweeps(spec, spec.D == 64, spec.steps)
        todo += [(backward_tile(tiles, names, spec.steps), names) for names in sweeps]
    todo += [(tiles.state, ("state",))] if tiles.forward_split.number > 1 else []
    for tile, names in todo:
        products = spec.per_token and names[0] not in ("o", "state")
        made = variant(spec, tile, names, products and spec.steps)
        if (why := cuda.problem(made, spec.device, shared_bytes(spec, tile, names, products))) is not None:
            return why
    return None


@functools.lru_cache(maxsize=1024)
def takes_silu(spec: LightningSpec) -> bool:
    tile = tiles_of(spec).silu
    if tile is None:
        return False
    sweeps = backward_sweeps(spec, spec.D == 64)
    return all(cuda.problem(variant(spec, tile, s), spec.device, shared_bytes(spec, tile, s)) is None for s in sweeps)


def tiles_of(spec: LightningSpec) -> SweepTiles:
    tiles: SweepTiles = dispatch.choose("lightning", spec, "cuda").tile
    return tiles


def segments(spec: LightningSpec, cut: Split, x: Residuals) -> Segments:
    return Segments(cut.rows, 1) if cut.number == 1 else split.segments(spec, cut, x)


def saves(spec: LightningSpec) -> tuple[int, ...] | None:
    """In bf16. D = 64, or a decay for each token: (heads, slots, E, D), a slot for every `saved_rows` begun; packed,
    room for any lengths. D = 128: the states that enter segments, fp32 states in a bf16 buffer of twice the width."""
    if spec.D == 128 and not spec.per_token:
        cut = tiles_of(spec).forward_split
        return None if cut.number == 1 else ((spec.B * spec.H - cut.whole) * cut.number, spec.D, 2 * spec.E)
    return spec.B * spec.H, slots_of(spec), spec.E, spec.D


class Native(NamedTuple):
    """A launch of the sweep, and what it is given at which places among its operands."""

    sweep: SweepLaunch
    places: tuple[int, ...]
    given: tuple[Tensor, ...]

    def run(self) -> None:
        self.ready(self.given[0].device)(*map(address, self.given))

    def ready(self, device: torch.device) -> Callable[..., None]:
        call, places, arguments = self.sweep.launch.at, self.places, self.sweep.arguments

        def front(at: tuple[int, ...]) -> list[float | bytes]:
            every = [0] * OPERANDS
            for i, where in zip(places, at, strict=True):
                every[i] = where
            return arguments(every)

        return lambda *at: call(at, front)


def launch(
    spec: LightningSpec,
    tile: SweepTile,
    names: tuple[str, ...],
    x: Residuals,
    tensors: dict[int, Tensor],
    states: States,
    cut: Segments,
    not_cut: States = NO_STATES,
    only_cut: bool = False,
    not_last: bool = False,
    tokens: tuple[Tensor | None, ...] = (),
) -> Native:
    """See `SweepLaunch`. tokens: keeps, qdq, kdk, anchors, entered; x_dv and x_do."""
    decay, products = x.decay if spec.per_token else None, any(t is not None for t in tokens[1:5])
    sweep = SweepLaunch(spec, tile, names, tensors, cut, only_cut, not_last, decay, products)
    tokens += (None,) * (OF_TOKENS - len(tokens))
    every = operands(x, tensors, states, not_cut, cut.segment_offsets, tokens)
    given = {i: t for i, t in enumerate(every) if t is not None}
    return Native(sweep, tuple(given), tuple(given.values()))


def gather(
    spec: LightningSpec,
    name: str,
    x: Residuals,
    tensors: dict[int, Tensor],
    cut: Segments,
    enters: Tensor | None,
    leaves: Tensor | None,
    states: Tensor,
    keeps: Tensor | None,
) -> list[Any]:
    """Writes the states that enter each segment in the direction of `name`, "state" or "dstate", to `states`."""
    into = States(final=states) if name == "state" else States(dinitial=states)
    read = {i: tensors[i] for i in SWEEPS[name][:3]}
    tile, not_last = tiles_of(spec).state, leaves is None
    added = launch(spec, tile, (name,), x, read, into, cut, only_cut=True, not_last=not_last, tokens=(keeps,))
    return [added, split.scan(spec, x, cut, states, enters, leaves, keeps)]


def kinds(spec: LightningSpec, saved: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """What was saved: slots, or states that enter segments."""
    if saved is None:
        return None, None
    shape = saves(spec)
    assert shape is not None
    saved = saved.view(shape)
    return (saved, None) if spec.D == 64 or spec.per_token else (None, saved.view(torch.float32))


def forward_tensors(x: Residuals, o: Tensor, slots: Tensor | None) -> dict[int, Tensor]:
    found = {Q: x.q, K: x.k, V: x.v, OUT: o} | ({} if slots is None else {SAVED: slots})
    return found if x.gate is None else found | {Z: x.gate}


def describe_forward(spec: LightningSpec, x: Residuals) -> Described:
    o = empty_output(spec, x)
    shape = (spec.states, spec.H, spec.D, spec.E)
    final = x.q.new_empty(shape, dtype=torch.float32) if spec.with_final_state else None
    slots, entering = kinds(spec, x.saved)
    tensors, tiles = forward_tensors(x, o, slots), tiles_of(spec)
    cut = segments(spec, tiles.forward_split, x)
    states = not_cut = States(initial=x.initial_state, final=final)
    todo: list[Any] = []
    work: tuple[Tensor, ...] = ()
    if cut.number > 1:
        into = split.segment_states(spec, x, cut) if entering is None else entering
        keeps = split.segment_keeps(spec, into)
        work = split.work_of(into if entering is None else None, keeps, cut.segment_offsets)
        todo += split.find_segment_offsets(spec, x, cut)
        todo += gather(spec, "state", x, tensors, cut, x.initial_state, final, into, keeps)
        states = States(initial=into)
    tile = tiles.forward if slots is None else tiles.training
    todo.append(launch(spec, tile, ("o",), x, tensors, states, cut, not_cut))
    return (o, final), Chain(work, tuple(todo))


def backward_sweeps(spec: LightningSpec, saved: bool, joined: bool = False) -> list[tuple[str, ...]]:
    """Which gradients share a launch: those of one width, and dq only if it can begin from saved states.

    joined: a block makes both dv and dk.
    """
    if spec.D != spec.E:
        return [("dv", "dk"), ("dq",)] if joined else [("dv",), ("dk", "dq")]
    return [("dv", "dk", "dq")] if saved else [("dv", "dk"), ("dq",)]


def backward_tile(tiles: SweepTiles, names: tuple[str, ...], products: bool = False) -> SweepTile:
    """products: with the gradient of a decay for each token."""
    if products:
        return tiles.gradient[0 if "dv" in names else 1]
    return tiles.backward if "dv" in names or tiles.backward_of_e is None else tiles.backward_of_e


def describe_backward(
    spec: LightningSpec,
    x: Residuals,
    do: Tensor,
    dstate: Tensor | None,
    ddecay: Tensor | None = None,
    of_steps: Tensor | None = None,
    *others: Any,
) -> Described:
    """of_steps: with step sizes, x . d(dt x) and x . do are written there; the gradient of v is then that of x.

    others: buffers for dq, dk and dv, or None, and then, if q, k and v are silu(x), what they are silu of.
    """
    buffers: fused.Buffers = others[:3] or fused.NO_BUFFERS
    silu_of = dict(zip((OF_Q, OF_K, OF_V), map(readable, others[3:]), strict=False))
    assert not spec.steps or not (ddecay is None or of_steps is None or x.saved is None), "all of the scan's gradients"
    if ddecay is not None and x.saved is None:  # at which the sum that is the decay's gradient begins anew
        return triton_backward(spec, x, do, dstate, ddecay, None, *buffers)
    grads = fused.Gradients.empty(
        spec, x, None if ddecay is None else (CHUNK, 64), spec.dtype, spans=False, buffers=buffers
    )
    dinitial = None if x.initial_state is None else torch.empty_like(x.initial_state)
    tensors = {Q: x.q, K: x.k, V: x.v, DO: readable(do), OUT: grads.dq, DK: grads.dk, DV: grads.dv, **silu_of}
    tiles = tiles_of(spec)
    cut = segments(spec, tiles.backward_split, x)
    states = not_cut = States(initial=x.initial_state, dfinal=dstate, dinitial=dinitial)
    slots, entering = kinds(spec, x.saved)
    todo: list[Any] = []
    work: tuple[Tensor, ...] = ()
    if cut.number > 1:
        todo += split.find_segment_offsets(spec, x, cut)
        work = split.work_of(cut.segment_offsets)
        if entering is None and (slots is None or spec.D != 64):
            entering = split.segment_states(spec, x, cut)
            keeps = split.segment_keeps(spec, entering)
            todo += gather(spec, "state", x, tensors, cut, x.initial_state, None, entering, keeps)
            work += split.work_of(entering, keeps)
        leaving = split.segment_states(spec, x, cut)
        dkeeps = split.segment_keeps(spec, leaving)
        todo += gather(spec, "dstate", x, tensors, cut, dstate, dinitial, leaving, dkeeps)
        work += split.work_of(leaving, dkeeps)
        states = States(initial=entering, dfinal=leaving)
    if slots is not None:
        tensors[SAVED] = slots
    if ddecay is not None and slots is not None:
        heads, number = slots.shape[:2]
        anchors = x.q.new_empty(heads, number, spec.E // 64 * 4, dtype=torch.float32)
        entered = x.q.new_empty(heads, number * saved_rows(spec) // CHUNK, spec.D // 64, dtype=torch.float32)
        grads = grads._replace(anchors=anchors, entered=entered)
    joined = ddecay is not None and tiles.gradient[0].pair
    for names in backward_sweeps(spec, slots is not None and spec.D == 64, joined):
        tokens = (None, grads.qdq, grads.kdk, grads.anchors, grads.entered, *(() if of_steps is None else of_steps))
        tile = tiles.silu if silu_of else backward_tile(tiles, names, ddecay is not None)
        assert tile is not None, "see `takes_silu`"
        todo.append(launch(spec, tile, names, x, tensors, states, cut, not_cut, tokens=tokens))
    if ddecay is not None:
        todo.append(fused.token_gradient(spec, x, grads, ddecay, dstate is not None))
    results, sums = grads.of_stored_heads(spec, x, buffers)
    return (*results, dinitial), Chain((*work, *grads.work(results)), (*todo, *sums))


OPERATIONS = fused.operations(describe_forward, describe_backward)


def prepare_backward(spec: LightningSpec, x: Residuals, do: Tensor, *others: Any) -> Callable[..., Any] | None:
    """None where the gradient of the output, or what is activated, must be copied first; others: from dstate on."""
    read = (do, *others[6:])
    return OPERATIONS.prepare_backward(spec, x, do, *others) if all(readable(t) is t for t in read) else None


register(
    "lightning",
    "cuda",
    supports=supports,
    saves=saves,
    takes_silu=takes_silu,
    **OPERATIONS._replace(prepare_backward=prepare_backward)._asdict(),
)
