"""Lightning attention in Triton: one fused sweep over the sequence, forward and backward.

Everything is one primitive. With lambda = exp(-s) and rows r = 0, 1, ... counted in walking order,

    f(a, b, c)_r = scale * sum_{j <= r} lambda^(r-j) (a_r . b_j) c_j    (+ the same from an initial state)

and  o = f(q, k, v),  dq = f(do, v, k)  walk left to right,  dk = f(v, do, q),  dv = f(k, q, do)  right to left.
One kernel serves all four; dk and dv, which walk the same rows at the same time, share a grid and so read q and do
from L2. Nothing but q, k, v is saved for the backward.

Tiled, in chunks of C rows, everything transposed so that the state, [V, K] in fp32 registers, is the register
operand of both products it enters and never goes through shared memory:

    p^T     = (b a^T) * mask                   mask_ji = scale * lambda^(i-j) for j <= i, else 0    [C, C]
    out^T   = c^T p^T + (state^T a^T) * a_decay                                                     [BLOCK_V, C]
    state^T = state^T * chunk_decay + (c * c_decay)^T b                                             [BLOCK_V, BLOCK_K]

One program owns (sequence, head, sweep, a tile of c's columns) and walks the chunks in order. Decay multiplies c
and products, never a or b, which go from shared memory to the tensor cores untouched; every exponent is a
difference >= 0, so nothing overflows.

The two directions differ by one power of lambda, `LAG`: left to right, row r reads the incoming state decayed
r + 1 times (o_t = q_t (lambda S_{t-1} + k_t v_t^T)); right to left the gradient of the final state reaches the
last row undecayed, so r times. `docs/internals/kernels.md` derives this and the shared-memory budget.

A decay for each token (`Tokens`) makes these factors anew in every chunk, as exponentials of differences of a running
sum (`token_decays`). Both directions then cut a sequence at the same rows, so that p of dq and of dk has the same bits:
the decay's gradient is a running sum of q . dq - k . dk, in which they cancel. The sweeps of dq and dk leave these
products, `lightning_token_gradient_kernel` adds them up. docs/lightning.md derives it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulmen import dispatch
from fulmen.boundary import empty_rows
from fulmen.dispatch import register
from fulmen.launch import Chain, Described, Launch, prepared, results_of, unsupported_device
from fulmen.lightning.plan import count_inputs, count_residuals
from fulmen.lightning.policy import TOKEN_ROWS, TritonTile, slots_of
from fulmen.lightning.spec import NO_STEPS, LightningSpec, Residuals, empty_output, empty_states
from fulmen.lightning.sweeps import Rows, States, Tensors, Tokens, lightning_sum_heads_kernel, lightning_sweep_kernel
from fulmen.lightning.tokens import lightning_token_gradient_kernel
from fulmen.plans import allocator
from fulmen.tiles import padded

MAX_ROW_STRIDE = 1 << 24  # so that a chunk's offsets fit 32 bits; beyond, strides are 64-bit run-time values


def supports(spec: LightningSpec) -> str | None:
    if spec.dtype == torch.float64:
        return "computes in fp32 at most, and q is float64"
    if spec.steps:
        return NO_STEPS
    return unsupported_device(spec.device, spec.dtype)


# ---------------------------------------------------------------------------------------------- launches


class Segments(NamedTuple):
    """How the rows of a sequence are split over programs; of packed ones `number` is the most there can be in all, and
    `segment_offsets` says which is the first of each sequence. The first `whole` of (sequence, head) are not split."""

    rows: int
    number: int
    segment_offsets: Tensor | None = None
    whole: int = 0


def sweep(
    spec: LightningSpec,
    tile: TritonTile,
    sweeps: tuple[str, ...],
    x: Residuals,
    tensors: Tensors,
    states: States,
    segments: Segments | None = None,
    products: Sequence[Tensor | None] = (None,) * 4,
    keeps: Tensor | None = None,
) -> Launch:
    """One launch of `sweeps`, which must agree in direction and in the sizes they contract over."""
    segments = segments or Segments(max(spec.N, 1), 1)
    K, V = (spec.E, spec.D) if sweeps[0] in ("dk", "dq") else (spec.D, spec.E)
    block_v = min(tile.block_v, padded(V))
    strides = {rows.stride_n for rows in tensors if rows is not None}
    row_stride = strides.pop() if len(strides) == 1 and max(strides) < MAX_ROW_STRIDE else 0
    packed = segments.segment_offsets is not None
    slopes, tokens = x.decay, Tokens()
    if spec.per_token:
        assert x.decay is not None
        dots, gradients, anchors, entered = products
        slots = None if anchors is None else anchors.shape[1]
        rows = Rows(x.decay, *x.decay.stride())
        slopes, tokens = None, Tokens(*rows, dots, keeps, gradients, anchors, entered, slots)
    return Launch(
        kernel=lightning_sweep_kernel,
        grid=(1 if packed else spec.states) * spec.H * segments.number * len(sweeps) * triton.cdiv(V, block_v),
        tensors=(),
        rest=(
            *(tensors, states, slopes, tokens, x.cu_seqlens, segments.segment_offsets),
            *(spec.H, spec.N, segments.rows, spec.states if packed else segments.number, spec.scale),
            *(sweeps, row_stride, K, V, tile.chunk, padded(K), block_v),
        ),
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )


def rows_of(x: Tensor, spec: LightningSpec) -> Rows:
    stride_b, stride_h, stride_n, _ = x.stride()
    return Rows(x, stride_b, stride_h, stride_n, spec.H // max(x.shape[1], 1))


def forward_tensors(spec: LightningSpec, x: Residuals, o: Tensor) -> Tensors:
    return Tensors(*(rows_of(t, spec) for t in (x.q, x.k, x.v, o)))


def forward_launches(spec: LightningSpec, tile: TritonTile, x: Residuals, o: Tensor, final: Tensor | None) -> Chain:
    states = States(initial=x.initial_state, final=final)
    return Chain((), (sweep(spec, tile, ("o",), x, forward_tensors(spec, x, o), states),))


SUM_ROWS = 8  # of a program that sums heads: 96 % of the copy bandwidth, 16 91 %


def sum_heads(each: Tensor, stored: Tensor) -> Launch:
    B, heads, N, size = stored.shape
    group = each.shape[1] // max(heads, 1)
    args = each, stored, each.stride()[:3], stored.stride()[:3], heads, group, N, size, SUM_ROWS, padded(size)
    return Launch(lightning_sum_heads_kernel, B * heads * triton.cdiv(N, SUM_ROWS), (), args, {"num_warps": 4})


Buffers = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_BUFFERS: Buffers = (None, None, None)


class Gradients(NamedTuple):
    """dq, dk and dv with H heads each: in fp32 where several share one stored head.

    With the gradient of a decay for each token also what it is a sum of, in fp32: see `Tokens`.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    qdq: Tensor | None = None
    kdk: Tensor | None = None
    gradients: Tensor | None = None
    anchors: Tensor | None = None
    entered: Tensor | None = None

    @classmethod
    def empty(
        cls,
        spec: LightningSpec,
        x: Residuals,
        tile: tuple[int, int] | None,
        shared: torch.dtype = torch.float32,
        spans: bool = True,
        buffers: Buffers = NO_BUFFERS,
    ) -> Gradients:
        """tile: rows of a chunk, columns of D, if products are wanted; shared: dtype of heads that are summed;
        buffers: for dq, dk and dv, where there is one."""

        def rows(t: Tensor, buffer: Tensor | None) -> Tensor:
            if buffer is not None and buffer.shape[1] == spec.H:
                return buffer
            return empty_rows(t, spec.H, t.shape[3], spec.dtype if t.shape[1] == spec.H else shared)

        more = []
        if tile is not None:
            width, slots = min(tile[1], padded(spec.D)), slots_of(spec)
            tiles, heads = triton.cdiv(spec.D, width), spec.B * spec.H
            shapes: list[tuple[int, ...]] = [(heads, tiles, spec.N)] * 2
            if spans:
                shapes += [(heads, slots, tiles * width, padded(spec.E)), (heads, slots, tiles)]
                shapes += [(heads, slots * TOKEN_ROWS // tile[0], tiles)]
            more = [x.q.new_empty(shape, dtype=torch.float32) for shape in shapes]
        return cls(*map(rows, (x.q, x.k, x.v), buffers), *more)

    def of_stored_heads(
        self, spec: LightningSpec, x: Residuals, buffers: Buffers = NO_BUFFERS
    ) -> tuple[list[Tensor], list[Launch]]:
        """dq, dk and dv with as many heads as q, k and v, and the launches that make those from these."""
        found, sums = [], []
        for t, each, given in zip((x.q, x.k, x.v), self[:3], buffers, strict=True):
            stored = each if t.shape[1] == spec.H else empty_rows(t, t.shape[1], t.shape[3]) if given is None else given
            sums += [] if stored is each else [sum_heads(each, stored)]
            found.append(stored)
        return found, sums

    def work(self, results: Sequence[Tensor]) -> list[Tensor]:
        """What is none of the results."""
        return [x for x in self if x is not None and all(x is not y for y in results)]

    def products(self, sweeps: tuple[str, ...]) -> tuple[Tensor | None, ...]:
        """What a launch of `sweeps` leaves of them."""
        dots = self.qdq if sweeps == ("dq",) else self.kdk if "dk" in sweeps else None
        return (dots, self.gradients, self.anchors, self.entered) if dots is not None else (None,) * 4


def backward_tensors(spec: LightningSpec, x: Residuals, do: Tensor, grads: Gradients) -> Tensors:
    q, k, v, do_, dq, dk, dv = (rows_of(t, spec) for t in (x.q, x.k, x.v, do, *grads[:3]))
    return Tensors(q, k, v, None, do_, dq, dk, dv)


def backward_sweeps(spec: LightningSpec) -> list[tuple[str, ...]]:
    """Which gradients share a launch: dv and dk, where they contract over one size and have one dtype."""
    alike = spec.D == spec.E and spec.groups is None
    return [("dv", "dk"), ("dq",)] if alike else [("dv",), ("dk",), ("dq",)]


def backward_launches(
    spec: LightningSpec,
    tile: TritonTile,
    x: Residuals,
    do: Tensor,
    dstate: Tensor | None,
    grads: Gradients,
    dinitial: Tensor | None,
) -> Chain:
    tensors = backward_tensors(spec, x, do, grads)
    states = States(initial=x.initial_state, dfinal=dstate, dinitial=dinitial)
    sweeps = [
        sweep(spec, tile, names, x, tensors, states, products=grads.products(names)) for names in backward_sweeps(spec)
    ]
    return Chain((), tuple(sweeps))


def token_gradient(spec: LightningSpec, x: Residuals, grads: Gradients, ddecay: Tensor, is_open: bool) -> Launch:
    """is_open: the final states have gradients."""
    assert x.decay is not None
    assert grads.qdq is not None
    assert grads.anchors is not None
    assert grads.entered is not None
    heads, slots, parts = grads.anchors.shape
    chunks, parts_entered = grads.entered.shape[1:]
    dtype = tl.float64 if spec.dtype == torch.float32 else tl.float32
    args = (
        *(ddecay, x.decay, grads.qdq, grads.kdk, grads.anchors, grads.entered, x.cu_seqlens),
        *(ddecay.stride(), x.decay.stride(), spec.H, spec.N, spec.states, slots),
        *(grads.qdq.shape[1], parts, parts_entered, TOKEN_ROWS, slots * TOKEN_ROWS // max(chunks, 1), is_open, dtype),
    )
    return Launch(lightning_token_gradient_kernel, heads * slots if spec.N else 0, (), args, {"num_warps": 1})


# ------------------------------------------------------------------------------------------- both directions


class Operations(NamedTuple):
    """What `register` takes of a kernel."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    prepare: Callable[..., Any]
    prepare_backward: Callable[..., Any]


def operations(describe_forward: Callable[..., Described], describe_backward: Callable[..., Described]) -> Operations:
    """Of a kernel that says of each direction what its results are and what fills them."""

    def forward(spec: LightningSpec, x: Residuals) -> tuple[Any, ...]:
        return results_of(describe_forward(spec, x), spec.device)

    def backward(spec: LightningSpec, x: Residuals, *into: Tensor | None) -> tuple[Any, ...]:
        return results_of(describe_backward(spec, x, *into), spec.device)

    def prepare(spec: LightningSpec, x: Residuals) -> Callable[..., tuple[Any, ...]] | None:
        new_saved = None if x.saved is None else allocator(x.saved)

        def describe(*tensors: Any) -> Described:
            y = Residuals(*tensors)
            y = y if new_saved is None else y._replace(saved=new_saved())
            results, chain = describe_forward(spec, y)
            return (*results, y.saved), chain

        return prepared(describe, x._replace(saved=None)[: count_inputs(spec)])

    def prepare_backward(spec: LightningSpec, x: Residuals, *into: Tensor | None) -> Callable[..., Any] | None:
        count = count_residuals(spec)

        def describe(*tensors: Any) -> Described:
            return describe_backward(spec, Residuals(*tensors[:count]), *tensors[count:])

        return prepared(describe, (*x[:count], *into))

    return Operations(forward, backward, prepare, prepare_backward)


def describe_forward(backend: str, launches: Callable[..., Chain], spec: LightningSpec, x: Residuals) -> Described:
    o = empty_output(spec, x)
    final = empty_states(spec) if spec.with_final_state else None
    tile = dispatch.choose("lightning", spec, backend).tile
    return (o, final), launches(spec, tile, x, o, final)


def describe_backward(
    backend: str,
    launches: Callable[..., Chain],
    spec: LightningSpec,
    x: Residuals,
    do: Tensor,
    dstate: Tensor | None,
    ddecay: Tensor | None = None,
    of_steps: None = None,
    *buffers: Any,
) -> Described:
    tile = dispatch.choose("lightning", spec, backend).tile
    one = getattr(tile, "sweep", tile)
    buffers = buffers or NO_BUFFERS
    grads = Gradients.empty(spec, x, None if ddecay is None else (one.chunk, one.block_v), buffers=buffers)
    dinitial = None if x.initial_state is None else torch.empty_like(x.initial_state)
    found, sums = grads.of_stored_heads(spec, x, buffers)
    work, todo = launches(spec, tile, x, do, dstate, grads, dinitial)
    gradient = [] if ddecay is None else [token_gradient(spec, x, grads, ddecay, dstate is not None)]
    return (*found, dinitial), Chain((*work, *grads.work(found)), (*todo, *gradient, *sums))


register(
    "lightning",
    "triton",
    supports=supports,
    **operations(
        functools.partial(describe_forward, "triton", forward_launches),
        functools.partial(describe_backward, "triton", backward_launches),
    )._asdict(),
)
