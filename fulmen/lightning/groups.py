"""dq and dk of heads that share q and k, in Triton: summed over the heads as they are computed.

Mamba-2 has many heads of v that share one head of q and k. Sweeps would write dq and dk of every head, to be summed
afterwards. Here nothing is walked: the forward saved the state S before every span of two chunks of C rows, and the
sweep of dv the state's gradient dS after it. With a the running sum of the decay over a span, of head h:

    dq_i = scale sum_h (sum_{j <= i} w_ij k_j + exp(-a_i)       S  do_i)      w_ij = exp(a_j - a_i) (do_i . v_j)
    dk_j = scale sum_h (sum_{i >= j} w_ij q_i + exp(a_j - a_2C) dS v_j)

k and q do not depend on h, so w is summed over the heads first and multiplied once. A program owns (batch entry, stored
head, chunk, dq or dk) and goes through the heads. Written for dq: u is q, y is do, z is v, c is k. `near` is w of the
program's own chunk, `far` w with the span's other chunk: the second chunk of dq has that, and the first of dk.

The decay's gradient takes q . dq and k . dk of every head (tokens.py): the products of w, before it is rounded, with
q k^T and of the states' part with u.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fulmen.lightning.policy import GROUP_ROWS
from fulmen.lightning.spec import LightningSpec, Residuals
from fulmen.lightning.tokens import FORGOTTEN
from fulmen.lightning.triton import Gradients, Launch
from fulmen.tiles import LOG2E, at_head, find_tile, offset_at

NUM_WARPS = 8
NUM_STAGES = 3


@triton.jit
def load_tile(head, stride, row, offs, mask, SIZE: tl.constexpr):
    """Rows `row + offs` of a head: [C, SIZE]."""
    ptrs = head + row.to(tl.int64) * stride + offs[:, None] * stride + tl.arange(0, SIZE)[None, :]
    return tl.load(ptrs, mask=mask[:, None], other=0.0)


@triton.jit
def load_bits(head, stride, row, offs, mask):
    """The decay of rows in bits; no more than FORGOTTEN, which leaves differences of their sums exact enough."""
    s = tl.load(head + (row + offs).to(tl.int64) * stride, mask=mask, other=0.0)
    return tl.minimum(s * LOG2E, 1.0 * FORGOTTEN)


@triton.jit
def span_of(slot, cu_seqlens_ptr, sequences, N, SPAN: tl.constexpr):
    """(first row of the span, end of its sequence)."""
    if cu_seqlens_ptr is None:
        return slot * SPAN, N
    else:
        sequence, span = find_tile(cu_seqlens_ptr, slot, sequences, N, SPAN)
        begin = offset_at(cu_seqlens_ptr, sequence, N) + span * SPAN
        return begin, offset_at(cu_seqlens_ptr, sequence + 1, N)


@triton.jit
def own(is_dq, of_dq, of_dk):
    """What belongs to this program's gradient: pointer or stride."""
    return tl.where(is_dq, of_dq, of_dk)


@triton.jit
def lightning_group_kernel(
    q_ptr,  # (B, groups, N, D); strides are those of B, heads and N
    k_ptr,
    v_ptr,  # (B, H, N, E)
    do_ptr,
    decay_ptr,  # (B, H, N)
    states_ptr,  # (B * H, slots, E, D), as are dstates
    dstates_ptr,
    dq_ptr,  # (B, groups, N, D), written
    dk_ptr,
    qdq_ptr,  # (B * H, N) fp32, written, as is kdk; or None
    kdk_ptr,
    cu_seqlens_ptr,  # or None
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    decay_strides,
    dq_strides,
    dk_strides,
    sizes,  # groups, heads of a group, N, sequences, slots
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
):
    # who am I: the four programs of a span side by side, as they read the same rows and states
    groups, heads, N, sequences, slots = sizes
    pid = tl.program_id(0)
    is_dq, second = pid % 2 == 0, pid // 2 % 2 == 1
    slot, unit = pid // 4 % slots, pid // 4 // slots
    b, g = unit // groups, unit % groups
    begin, end = span_of(slot, cu_seqlens_ptr, sequences, N, 2 * C)
    row = tl.where(second, begin + C, begin)
    other = tl.where(second, begin, begin + C)
    if row >= end:
        return
    has_far = is_dq == second
    offs = tl.arange(0, C)
    mask, mask_o = row + offs < end, has_far & (other + offs < end)

    # what the heads share
    at_q, at_k = at_head(q_ptr, q_strides, b, g, 0), at_head(k_ptr, k_strides, b, g, 0)
    u = load_tile(own(is_dq, at_q, at_k), own(is_dq, q_strides[2], k_strides[2]), row, offs, mask, D)  # [C, D]
    at, stride = own(is_dq, at_k, at_q), own(is_dq, k_strides[2], q_strides[2])
    c = load_tile(at, stride, row, offs, mask, D)
    c_o = load_tile(at, stride, other, offs, mask_o, D)
    sign = tl.where(is_dq, 1.0, -1.0)
    seen = (offs[None, :] - offs[:, None]) * sign >= 0
    if qdq_ptr is not None:
        near_g = tl.dot(c, tl.trans(u), input_precision="ieee")  # [C (of c), C (of u)]
        far_g = tl.dot(c_o, tl.trans(u), input_precision="ieee")
        dots_ptr = own(is_dq, qdq_ptr, kdk_ptr) + row
    x = tl.zeros([D, C], tl.float32)
    near = tl.zeros([C, C], tl.float32)
    far = tl.zeros([C, C], tl.float32)

    y_stride, z_stride = own(is_dq, do_strides[2], v_strides[2]), own(is_dq, v_strides[2], do_strides[2])
    state_ptr = own(is_dq, states_ptr, dstates_ptr)
    offs_state = tl.arange(0, D)[:, None] + tl.arange(0, E)[None, :] * D  # [D, E] of a slot, which lies [E, D]
    at_s = at_head(decay_ptr, decay_strides, b, g * heads, 0)
    bits = load_bits(at_s, decay_strides[2], row, offs, mask)
    bits_o = load_bits(at_s, decay_strides[2], other, offs, other + offs < end)
    for i in range(heads):
        h = g * heads + i
        head = (b * groups * heads + h).to(tl.int64)
        at_v, at_do = at_head(v_ptr, v_strides, b, h, 0), at_head(do_ptr, do_strides, b, h, 0)
        y = load_tile(own(is_dq, at_do, at_v), y_stride, row, offs, mask, E)  # [C, E]
        z = load_tile(own(is_dq, at_v, at_do), z_stride, row, offs, mask, E)
        z_o = load_tile(own(is_dq, at_v, at_do), z_stride, other, offs, mask_o, E)
        state = tl.load(state_ptr + (head * slots + slot) * (D * E) + offs_state)  # [D, E]
        # the decay from the state to u's rows, and from the rows of c_o
        a, a_o = tl.cumsum(bits, axis=0), tl.cumsum(bits_o, axis=0)
        total, total_o = tl.sum(bits, axis=0), tl.sum(bits_o, axis=0)
        since, since_o = tl.where(is_dq, a, total - a), tl.where(is_dq, total_o - a_o, a_o)
        f = tl.exp2(-tl.maximum(since, 0.0))
        f_o = tl.exp2(-tl.maximum(since_o, 0.0))
        f_state = f * tl.where(has_far, tl.exp2(-total_o), 1.0)
        at_s += tl.where(i + 1 < heads, decay_strides[1], 0)
        bits = load_bits(at_s, decay_strides[2], row, offs, mask)
        bits_o = load_bits(at_s, decay_strides[2], other, offs, other + offs < end)

        inter = tl.dot(state, tl.trans(y), input_precision="ieee") * f_state[None, :]  # [D, C]
        x += inter
        if qdq_ptr is not None:
            dots = tl.sum(inter * tl.trans(u).to(tl.float32), axis=0)
        w = tl.dot(z, tl.trans(y), input_precision="ieee")  # [C (of c), C (of u)]
        w = tl.where(seen, w * tl.exp2(tl.minimum(sign * (a[:, None] - a[None, :]), 0.0)), 0.0)
        near += w
        if qdq_ptr is not None:
            dots_w = tl.sum(w * near_g, axis=0)
        w = tl.dot(z_o, tl.trans(y), input_precision="ieee") * (f_o[:, None] * f[None, :])
        far += w
        if qdq_ptr is not None:
            dots_w += tl.sum(w * far_g, axis=0)
            tl.store(dots_ptr + head * N + offs, (dots + dots_w) * scale, mask=mask)

    x = tl.dot(tl.trans(c), near.to(c.dtype), x, input_precision="ieee")
    x = tl.dot(tl.trans(c_o), far.to(c.dtype), x, input_precision="ieee") * scale
    at_dq, at_dk = at_head(dq_ptr, dq_strides, b, g, row), at_head(dk_ptr, dk_strides, b, g, row)
    at, stride = own(is_dq, at_dq, at_dk), own(is_dq, dq_strides[2], dk_strides[2])
    ptrs = at + offs[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(ptrs, tl.trans(x).to(dq_ptr.dtype.element_ty), mask=mask[:, None])


def group_gradients(
    spec: LightningSpec, x: Residuals, do: Tensor, states: Tensor, dstates: Tensor, grads: Gradients
) -> Launch:
    """states, dstates: (B * H, slots, E, D), before and after every GROUP_ROWS rows; dstates without the scale."""
    assert x.decay is not None
    groups, slots = x.q.shape[1], states.shape[1]
    strides = (t.stride()[:3] for t in (x.q, x.k, x.v, do, x.decay, grads.dq, grads.dk))
    sizes = groups, spec.H // groups, spec.N, spec.states, slots
    args = (
        *(x.q, x.k, x.v, do, x.decay, states, dstates, grads.dq, grads.dk, grads.qdq, grads.kdk, x.cu_seqlens),
        *(*strides, sizes, spec.scale, spec.D, spec.E, GROUP_ROWS // 2),
    )
    options = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES}
    return Launch(lightning_group_kernel, 4 * spec.B * groups * slots, args, options)
