"""Lightning attention in Triton with the sequence split over programs: for few heads and long sequences.

With B * H programs a fused sweep leaves most SMs idle when B * H is small. Here each sequence is cut into segments:

    1. every segment gathers its own state, from zero       (`lightning_sweep_kernel`, state only: reads k, v, of a
       head that decays fast only the last rows: see FORGOTTEN)
    2. a scan carries the states across segments            (`lightning_scan_kernel`, scalar decay per segment)
    3. every segment runs the fused sweep from its state    (`lightning_sweep_kernel`)

It is exact and deterministic; forward traffic is 6u instead of 4u. The backward does the same with two states,
of (k, v) left to right for dq and of (q, do) right to left for dk and dv. The scratch is one fp32 state per segment.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen.dispatch import register
from fulmen.launch import Chain, Launch
from fulmen.lightning import triton as fused
from fulmen.lightning.policy import Split, SplitTile
from fulmen.lightning.spec import LightningSpec, Residuals
from fulmen.lightning.sweeps import States
from fulmen.lightning.triton import Gradients, Segments, sweep
from fulmen.tiles import LOG2E, padded

AT_ONCE = 16  # segments that a scan reads before it adds them up, at most
SCAN_BLOCK = 256  # elements of a state that a program carries; of up to AT_ONCE / 2 segments twice as many


def segments(spec: LightningSpec, split: Split, x: Residuals) -> Segments:
    """`split`, with room for the first segment of each packed sequence."""
    segment_offsets = None if spec.sequences is None else x.q.new_empty(spec.sequences + 1, dtype=torch.int32)
    return Segments(split.rows, split.number, segment_offsets, split.whole)


@triton.jit
def lightning_segment_offsets_kernel(
    cu_seqlens_ptr, segment_offsets_ptr, sequences, N, segment, most, BLOCK: tl.constexpr
):
    """The first segment of each packed sequence, and how many there are; one program."""
    total = 0
    for first in range(0, sequences, BLOCK):
        i = first + tl.arange(0, BLOCK)
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + i, i < sequences, 0), 0), N)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + i + 1, i < sequences, 0), begin), N)
        count = tl.where(i < sequences, tl.cdiv(end - begin, segment), 0)
        before = total + tl.cumsum(count, axis=0) - count
        before = tl.minimum(before, most)  # a wrong cu_seqlens must not pass it
        tl.store(segment_offsets_ptr + i, before, i < sequences)
        total += tl.sum(count, axis=0)
    tl.store(segment_offsets_ptr + sequences, tl.minimum(total, most))


def find_segment_offsets(spec: LightningSpec, x: Residuals, cut: Segments) -> list[Launch]:
    if cut.segment_offsets is None:
        return []
    block = min(1024, padded(max(spec.states, 1)))
    args = (x.cu_seqlens, cut.segment_offsets, spec.states, spec.N, cut.rows, cut.number, block)
    return [Launch(kernel=lightning_segment_offsets_kernel, grid=1, tensors=(), rest=args, options={"num_warps": 4})]


@triton.jit
def lightning_scan_kernel(
    states_ptr,  # (heads, segments, D * E), packed (segments, H, D * E): in, what each adds; out, what enters it
    initial_ptr,  # (sequences * H, D * E), or None
    final_ptr,  # (sequences * H, D * E), or None
    decay_ptr,  # (H,), or None
    keeps_ptr,  # one for each of states_ptr: what is left of what enters it, of a decay for each token; or None
    cu_seqlens_ptr,  # with segment_offsets_ptr
    segment_offsets_ptr,  # of packed sequences the first segment of each, or None
    whole,  # (sequence, head) before this one are not split, and have no place in states_ptr
    H,
    N,
    segment,
    num_segments,
    SIZE: tl.constexpr,  # D * E
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,  # segments
):
    TILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    pid_split = tl.program_id(0) // TILES
    pid_head = whole + pid_split
    offs = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    carry = tl.zeros([BLOCK], tl.float32)
    if initial_ptr is not None:
        carry = tl.load(initial_ptr + pid_head.to(tl.int64) * SIZE + offs, mask=mask, other=0.0)
    if segment_offsets_ptr is None:
        number = pid_split.to(tl.int64) * num_segments
        stride = tl.cast(SIZE, tl.int64)
    else:
        sequence = pid_head // H
        first_segment = tl.load(segment_offsets_ptr + sequence)
        num_segments = tl.load(segment_offsets_ptr + sequence + 1) - first_segment
        number = first_segment.to(tl.int64) * H + pid_head % H
        stride = tl.cast(SIZE, tl.int64) * H
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence), 0), N)
        N = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence + 1), begin), N) - begin
    at = states_ptr + number * SIZE + offs
    if decay_ptr is not None:  # products of a rounded factor would drift: keep what rounding it lost, too
        slope = tl.load(decay_ptr + pid_head % H)
        exact = tl.exp(slope.to(tl.float64) * -segment)
        keep = exact.to(tl.float32)
        rest = (exact - keep).to(tl.float32)
    for first in range(0, num_segments, AT_ONCE):
        added = ()
        for u in tl.static_range(AT_ONCE):
            there = mask & (first + u < num_segments)
            added = added + (tl.load(at + u * stride, mask=there, other=0.0),)  # type: ignore[assignment]
        tl.debug_barrier()  # all loads are on their way before the first store: ptxas would mix them
        for u in tl.static_range(AT_ONCE):
            tl.store(at + u * stride, carry, mask=mask & (first + u < num_segments))
            if keeps_ptr is not None:
                there = first + u < num_segments
                kept = tl.load(keeps_ptr + number + (first + u) * (stride // SIZE), mask=there, other=0.0)
                carry = carry * tl.where(there, kept, 1.0) + added[u]
            elif decay_ptr is not None:
                walked = tl.minimum(tl.maximum(N - (first + u) * segment, 0), segment)
                part = tl.exp2(slope * -LOG2E * walked)
                added_u = carry * tl.where(walked == segment, rest, 0.0) + added[u]
                carry = carry * tl.where(walked == segment, keep, part) + added_u
            else:
                carry += added[u]
        at += AT_ONCE * stride
    if final_ptr is not None:
        tl.store(final_ptr + pid_head.to(tl.int64) * SIZE + offs, carry, mask=mask)


def scan(
    spec: LightningSpec,
    x: Residuals,
    cut: Segments,
    states: Tensor,
    initial: Tensor | None,
    final: Tensor | None,
    keeps: Tensor | None = None,
) -> Launch:
    size = spec.D * spec.E
    at_once = min(AT_ONCE, triton.next_power_of_2(cut.number))
    block = min(SCAN_BLOCK * (1 if at_once == AT_ONCE else 2), padded(size))
    return Launch(
        kernel=lightning_scan_kernel,
        grid=(spec.states * spec.H - cut.whole) * triton.cdiv(size, block),
        tensors=(),
        rest=(
            *(
                states,
                initial,
                final,
                None if spec.per_token else x.decay,
                keeps,
                None if cut.segment_offsets is None else x.cu_seqlens,
                cut.segment_offsets,
            ),
            *(cut.whole, spec.H, spec.N, cut.rows, cut.number, size, block, at_once),
        ),
        options={"num_warps": 4},
    )


def segment_states(spec: LightningSpec, x: Residuals, cut: Segments) -> Tensor:
    return x.q.new_empty((spec.B * spec.H - cut.whole) * cut.number, spec.D, spec.E, dtype=torch.float32)


def segment_keeps(spec: LightningSpec, states: Tensor) -> Tensor | None:
    """What the segments leave of the states that enter them, where every token has its decay."""
    return states.new_empty(states.shape[0]) if spec.per_token else None


def work_of(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x is not None)


def forward_launches(spec: LightningSpec, tile: SplitTile, x: Residuals, o: Tensor, final: Tensor | None) -> Chain:
    cut = segments(spec, tile.split, x)
    entering = segment_states(spec, x, cut)
    keeps = segment_keeps(spec, entering)
    tensors = fused.forward_tensors(spec, x, o)
    launches = (
        *find_segment_offsets(spec, x, cut),
        sweep(spec, tile.sweep, ("state",), x, tensors, States(final=entering), cut, keeps=keeps),
        scan(spec, x, cut, entering, x.initial_state, final, keeps),
        sweep(spec, tile.sweep, ("o",), x, tensors, States(initial=entering), cut),
    )
    return Chain(work_of(entering, keeps, cut.segment_offsets), launches)


def backward_launches(
    spec: LightningSpec,
    tile: SplitTile,
    x: Residuals,
    do: Tensor,
    dstate: Tensor | None,
    grads: Gradients,
    dinitial: Tensor | None,
) -> Chain:
    cut = segments(spec, tile.split, x)
    entering, leaving = segment_states(spec, x, cut), segment_states(spec, x, cut)
    keeps, dkeeps = segment_keeps(spec, entering), segment_keeps(spec, leaving)
    tensors = fused.backward_tensors(spec, x, do, grads)
    states = States(initial=entering, dfinal=leaving)
    launches = (
        *find_segment_offsets(spec, x, cut),
        sweep(spec, tile.sweep, ("state",), x, tensors, States(final=entering), cut, keeps=keeps),
        sweep(spec, tile.sweep, ("dstate",), x, tensors, States(dinitial=leaving), cut, keeps=dkeeps),
        scan(spec, x, cut, entering, x.initial_state, None, keeps),
        scan(spec, x, cut, leaving, dstate, dinitial, dkeeps),
        *(
            sweep(spec, tile.sweep, sweeps, x, tensors, states, cut, grads.products(sweeps))
            for sweeps in fused.backward_sweeps(spec)
        ),
    )
    return Chain(work_of(entering, leaving, keeps, dkeeps, cut.segment_offsets), launches)


register(
    "lightning",
    "triton_split",
    supports=fused.supports,
    **fused.operations(
        functools.partial(fused.describe_forward, "triton_split", forward_launches),
        functools.partial(fused.describe_backward, "triton_split", backward_launches),
    )._asdict(),
)
