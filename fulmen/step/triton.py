"""A decoding step in Triton: every state is read once and written once, with o made on the way.

One program owns (row, head, BLOCK_V columns of E), whole columns of D rows, in fp32 registers:

    state                                    [D, BLOCK_V]    read by 16-byte loads, all in flight before the first use
    state = keep * state + k_t v_t^T         keep = exp(-s), or exp(-s_t), rounded once from fp64
    o_t   = scale * sum over d of q_t state  the only values that cross threads

With a draft the accepted tokens come first, in a loop whose length is the row's own; the state is written after them,
and the new tokens only reach o. Programs of other columns and heads read the same stored tokens, so a second kernel
stores the new ones. A row without a slot writes zeros to o and leaves. Offsets of slots are 64-bit.

With a weight (`layers/fused/steps.py`) o is about to pass an RMSNorm over all heads, and perhaps a gate. What is stored
is o * weight * sigmoid(gate), and beside it each program's sum of o^2, with which `linear.py` there completes the norm.

EARLY, from Hopper on: both kernels start while the one before still runs (`spec.early`; programmatic dependent launch).
States, drafts and a constant decay are read before the first one waits for it. The first lets the second start only
after its own wait, so that q, k and v are there when the second starts; it has them in registers when it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fulmen import dispatch
from fulmen.boundary import no_gradient
from fulmen.dispatch import register
from fulmen.launch import Launch, Ready, run_all, starting, starts_early, unsupported_device
from fulmen.plans import allocator
from fulmen.step import rounding
from fulmen.step.policy import StepTile
from fulmen.step.spec import MAX_STEP_TOKENS, StepSpec, Tensors, empty_output
from fulmen.tiles import at_head, padded

ROW, COLUMN = tl.constexpr(rounding.ROW), tl.constexpr(rounding.COLUMN)
FIRST, SECOND = tl.constexpr(rounding.FIRST), tl.constexpr(rounding.SECOND)
DRAFT = tl.constexpr(MAX_STEP_TOKENS)


def supports(spec: StepSpec) -> str | None:
    if spec.dtype == torch.float64:
        return "computes in fp32 at most, and q is float64"
    return unsupported_device(spec.device, spec.dtype)


# ---------------------------------------------------------------------------------------------- kernels


@triton.jit
def to_bf16(x, columns, offs_d, offs_e):
    """x [D, V] in fp32 rounded stochastically, in pairs of columns: see `fulmen.step.rounding`."""
    D: tl.constexpr = x.shape[0]
    V: tl.constexpr = x.shape[1]
    seed = tl.sum(columns.to(tl.uint32, bitcast=True), axis=0)
    place, _ = tl.split(tl.reshape(offs_e.to(tl.uint32) * COLUMN + seed, (V // 2, 2)))
    left, right = tl.split(tl.reshape(columns, (V // 2, 2)))
    number = left + right == left + right
    first = tl.where(number, FIRST, 0).to(tl.uint32)
    even, odd = tl.split(tl.reshape(x.to(tl.uint32, bitcast=True), (D, V // 2, 2)))
    a = (even ^ (offs_d.to(tl.uint32) * ROW)[:, None] ^ place[None, :]) * first[None, :]
    b = a * SECOND
    rounded = tl.reshape(tl.join(even + (a >> 16), odd + (b >> 16)), (D, V))
    return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_tokens(ptr, stride, count, offs, mask, T: tl.constexpr, PAST_L1: tl.constexpr = False):
    """Tokens 0 to T - 1, `stride` apart, as a tuple of rows; those from `count` on are zero."""
    rows = ()
    for t in tl.static_range(T):
        at = ptr + t * tl.cast(stride, tl.int64) + offs
        row = tl.load(at, mask=mask & (t < count), other=0.0, cache_modifier=".cg" if PAST_L1 else "")
        rows = rows + (row,)  # type: ignore[assignment]
    return rows


@triton.jit
def load_factors(ptr, stride, count, T: tl.constexpr):
    """exp(-s) of tokens 0 to T - 1, `stride` apart, as a tuple; from `count` on they are 1."""
    factors = ()
    for t in tl.static_range(T):
        s = tl.load(ptr + t * tl.cast(stride, tl.int64), mask=t < count, other=0.0)
        factors = factors + (tl.exp(-s.to(tl.float64)).to(tl.float32),)  # type: ignore[assignment]
    return factors


@triton.jit
def enter(state, keep, k, v):
    """The state [D, V] after one more token."""
    return state * keep + k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]


@triton.jit
def store_state(ptrs, state, columns, offs_d, offs_e, mask):
    """`columns`: sums of the state's columns [V] that seed the rounding to bf16."""
    if ptrs.dtype.element_ty == tl.bfloat16:
        tl.store(ptrs, to_bf16(state, columns, offs_d, offs_e), mask=mask)
    else:
        tl.store(ptrs, state, mask=mask)


@triton.jit
def lightning_step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,  # (H,) or, if it has strides, (B, H, T), fp32; or None
    state_ptr,
    slots_ptr,  # (B,) int32, or None: row b has slot b
    draft_k_ptr,  # or None
    draft_v_ptr,
    accepted_ptr,  # (B,) int32, with a draft
    draft_decay_ptr,  # with a draft, if the decay has strides
    gate_ptr,  # with a weight, or None
    weight_ptr,  # (H * E,), or None
    o_ptr,
    squares_ptr,  # (H * column tiles, B * T), fp32, with a weight
    strides,  # of q, k, v, o, a decay for each token and the gate: (B, heads, T) each; zeros: there is none
    slot_strides,  # of state, draft_k, draft_v and draft_decay
    sizes,  # slots, H
    scale,
    GROUPS: tl.constexpr,  # how many of the H share one head of q, of k and of v
    PER_TOKEN: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    # who am I: column tiles innermost, then heads, so that programs that read the same rows run side by side
    BLOCK_D: tl.constexpr = padded(D)
    ROUNDS: tl.constexpr = state_ptr.dtype.element_ty == tl.bfloat16
    TILES: tl.constexpr = (E + BLOCK_V - 1) // BLOCK_V
    slots, H = sizes
    pid = tl.program_id(0)
    pid_h = pid // TILES % H
    pid_b = pid // TILES // H
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = pid % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_d = offs_d < D
    mask_e = offs_e < E
    slot = pid_b
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + pid_b)
    taken = (slot >= 0) & (slot < slots)
    if draft_k_ptr is not None:
        accepted = tl.where(taken, tl.load(accepted_ptr + pid_b), 0)

    # the state; a row without a slot reads nothing
    slot = slot.to(tl.int64)
    state_ptrs = state_ptr + slot * slot_strides[0] + pid_h.to(tl.int64) * (D * E)
    state_ptrs = state_ptrs + (offs_d[:, None] * E + offs_e[None, :])
    mask = (mask_d[:, None] & mask_e[None, :]) & taken
    state = tl.load(state_ptrs, mask=mask, other=0.0).to(tl.float32)  # [D, V]

    # all tokens before the first use: a thread holds one element of a row
    head_q = pid_h // GROUPS[0]
    head_k = pid_h // GROUPS[1]
    head_v = pid_h // GROUPS[2]
    keep = 1.0
    if not PER_TOKEN and decay_ptr is not None:
        keep = tl.exp(-tl.load(decay_ptr + pid_h).to(tl.float64)).to(tl.float32)
    if draft_k_ptr is not None:
        draft_k_ptr += slot * slot_strides[1] + head_k.to(tl.int64) * (DRAFT * D)
        draft_v_ptr += slot * slot_strides[2] + head_v.to(tl.int64) * (DRAFT * E)
        draft_ks = load_tokens(draft_k_ptr, D, accepted, offs_d, mask_d, DRAFT)
        draft_vs = load_tokens(draft_v_ptr, E, accepted, offs_e, mask_e, DRAFT)
        if PER_TOKEN:
            old = load_factors(draft_decay_ptr + slot * slot_strides[3] + pid_h * DRAFT, 1, accepted, DRAFT)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + pid_h * E + offs_e, mask=mask_e, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    qs = load_tokens(at_head(q_ptr, strides[0], pid_b, head_q, 0), strides[0][2], T, offs_d, mask_d, T)
    ks = load_tokens(at_head(k_ptr, strides[1], pid_b, head_k, 0), strides[1][2], T, offs_d, mask_d, T)
    vs = load_tokens(at_head(v_ptr, strides[2], pid_b, head_v, 0), strides[2][2], T, offs_e, mask_e, T)
    if PER_TOKEN:
        keeps = load_factors(at_head(decay_ptr, strides[4], pid_b, pid_h, 0), strides[4][2], T, T)
    if gate_ptr is not None:
        gates = load_tokens(at_head(gate_ptr, strides[5], pid_b, pid_h, 0), strides[5][2], T, offs_e, mask_e, T)
    if draft_k_ptr is not None:
        for t in tl.static_range(DRAFT):
            if t < accepted:
                state = enter(state, old[t] if PER_TOKEN else keep, draft_ks[t], draft_vs[t])
        columns = tl.sum(state, axis=0) if ROUNDS else None
        store_state(state_ptrs, state, columns, offs_d, offs_e, mask)

    for t in tl.static_range(T):
        state = enter(state, keeps[t] if PER_TOKEN else keep, ks[t], vs[t])
        q = qs[t].to(tl.float32)
        some = taken
        if ROUNDS and draft_k_ptr is None and t == T - 1:  # the sums seed the rounding, so they must tell states apart
            some = tl.sum((q != 0.0).to(tl.int32), axis=0) > 0
            q = tl.where(some, q, 1.0)
            some = some & taken
        columns = tl.sum(state * q[:, None], axis=0)  # [V]
        o = tl.where(some, columns * scale, 0.0)
        if weight_ptr is not None:
            rows = tl.num_programs(0) // (TILES * H) * T
            square = tl.sum(tl.where(mask_e, o * o, 0.0), axis=0)
            tl.store(squares_ptr + (pid_h * TILES + pid % TILES) * rows + pid_b * T + t, square)
            o *= weight
        if gate_ptr is not None:
            o *= tl.sigmoid(gates[t].to(tl.float32))
        o_t = at_head(o_ptr, strides[3], pid_b, pid_h, t)
        tl.store(o_t + offs_e, o.to(o_ptr.dtype.element_ty), mask=mask_e)
    if draft_k_ptr is None:
        store_state(state_ptrs, state, columns, offs_d, offs_e, mask)


@triton.jit
def lightning_step_draft_kernel(
    k_ptr, v_ptr, decay_ptr, slots_ptr, draft_k_ptr, draft_v_ptr, draft_decay_ptr, strides, slot_strides, slots, H,
    H_K, H_V, T: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PER_TOKEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Stores the new tokens of one head of k, of v and of a decay for each token. Programs are (row, head)."""
    pid_h = tl.program_id(0) % H
    pid_b = tl.program_id(0) // H
    slot = pid_b
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + pid_b)
    taken = (slot >= 0) & (slot < slots)
    slot = slot.to(tl.int64)
    offs_d = tl.arange(0, padded(D))
    offs_e = tl.arange(0, padded(E))
    offs_t = tl.arange(0, padded(T))
    mask_k = (offs_d < D) & taken & (pid_h < H_K)
    mask_v = (offs_e < E) & taken & (pid_h < H_V)
    mask_t = (offs_t < T) & taken
    # L1 may hold older values until this kernel has waited: loads go past it
    ks = load_tokens(at_head(k_ptr, strides[1], pid_b, pid_h, 0), strides[1][2], T, offs_d, mask_k, T, True)
    vs = load_tokens(at_head(v_ptr, strides[2], pid_b, pid_h, 0), strides[2][2], T, offs_e, mask_v, T, True)
    if PER_TOKEN:
        at_s = at_head(decay_ptr, strides[4], pid_b, pid_h, 0) + offs_t.to(tl.int64) * strides[4][2]
        s = tl.load(at_s, mask=mask_t, other=0.0, cache_modifier=".cg")
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at_k = draft_k_ptr + slot * slot_strides[1] + pid_h.to(tl.int64) * (DRAFT * D)
    at_v = draft_v_ptr + slot * slot_strides[2] + pid_h.to(tl.int64) * (DRAFT * E)
    for t in tl.static_range(T):
        tl.store(at_k + t * D + offs_d, ks[t], mask=mask_k)
        tl.store(at_v + t * E + offs_e, vs[t], mask=mask_v)
    if PER_TOKEN:
        tl.store(draft_decay_ptr + slot * slot_strides[3] + pid_h * DRAFT + offs_t, s, mask=mask_t)


# --------------------------------------------------------------------------------------------- launches


def column_tile(spec: StepSpec, tile: StepTile) -> int:
    """Columns of E that a program has."""
    return min(tile.block_v, max(16, triton.next_power_of_2(spec.E)))


def empty_squares(spec: StepSpec, tile: StepTile) -> Tensor | None:
    """Sums of o^2 of the programs of each token, (programs, B * T); None: nobody asks for them."""
    if not spec.gated:
        return None
    programs = spec.H * triton.cdiv(spec.E, column_tile(spec, tile))
    return torch.empty(programs, spec.B * spec.T, dtype=torch.float32, device=spec.device)


def launches(spec: StepSpec, tile: StepTile, x: Tensors, o: Tensor, squares: Tensor | None = None) -> list[Launch]:
    by_token = x.decay if spec.per_token else None
    strides = tuple((0, 0, 0) if t is None else t.stride()[:3] for t in (x.q, x.k, x.v, o, by_token, x.gate))
    slot_strides = tuple(0 if t is None else t.stride(0) for t in (x.state, x.draft_k, x.draft_v, x.draft_decay))
    block_v = column_tile(spec, tile)
    early = spec.early and starts_early(spec.device)
    step = Launch(
        lightning_step_kernel,
        spec.B * spec.H * triton.cdiv(spec.E, block_v),
        (*x, o, squares),
        (
            *(strides, slot_strides, (spec.slots, spec.H), spec.scale, spec.group, spec.per_token),
            *(spec.T, spec.D, spec.E, block_v, early),
        ),
        {"num_warps": tile.num_warps} | starting(early),
    )
    if not spec.has_draft:
        return [step]
    heads = spec.H if spec.per_token else max(x.k.shape[1], spec.H_KV)
    store = Launch(
        lightning_step_draft_kernel,
        spec.B * heads,
        (x.k, x.v, x.decay, x.slots, x.draft_k, x.draft_v, x.draft_decay),
        (
            *(strides, slot_strides, spec.slots, heads, x.k.shape[1], spec.H_KV),
            *(spec.T, spec.D, spec.E, spec.per_token, early),
        ),
        {"num_warps": 1} | starting(early),
    )
    return [step, store]


def forward(spec: StepSpec, x: Tensors) -> Tensor:
    o = empty_output(spec, x)
    run_all(launches(spec, dispatch.choose("step", spec, "triton").tile, x, o), spec.device)
    return o


def prepare(spec: StepSpec, x: Tensors) -> Callable[..., Tensor] | None:
    """A step of calls with these shapes and strides at the least cost for the host."""
    if spec.device.type != "cuda" or triton.knobs.runtime.interpret:
        return None
    like = empty_output(spec, x)
    described = launches(spec, dispatch.choose("step", spec, "triton").tile, x, like)
    step, *stores = (Ready(launch, spec.device) for launch in described)
    new = allocator(like)

    def again(*tensors: Any) -> Tensor:
        o = new()
        step(*tensors, None, None, o, None)  # neither gate nor weight
        for store in stores:
            _, k, v, decay, _, slots, draft_k, draft_v, _, draft_decay = tensors
            store(k, v, decay, slots, draft_k, draft_v, draft_decay)
        return o

    return again


register("step", "triton", supports=supports, forward=forward, backward=no_gradient("lightning_step"), prepare=prepare)
