"""What a decay for each token adds to the sweeps in Triton: the factors of a chunk, and the gradient of the decay.

With s_t the decay of token t and a_t its running sum, the weight of token j for t is exp(a_j - a_t): a difference of
sums within a chunk, never an exponential of a positive number. What passes token t, from tokens before it to t and
later ones, is what its decay scales; see docs/lightning.md:

    ds_t = -<exp(-s_t) S_{t-1}, dS_t> = sum_{r <= i < t} (q_i . dq_i - k_i . dk_i) - <S_{r-1}, dS_{r-1}>

for any r <= t. dq and dk come from rounded states, S in one sweep and dS in the other, so that their products with q
and k do not cancel exactly: errors add up like a random walk. So the sum begins anew at every SPAN-th row, from the
product of the two states there. Where the next such product is known, too, the sum has to arrive at it, and what it
misses by is taken from its rows in proportion to their terms: that halves the walk's largest error, and rows of
padding get none of it. At the end of a sequence the product is zero if the final state has no gradient.

All rows from there on share the error of that product, and a parameter's gradient is a sum over rows: Mamba-2's A_log.
So the sum also begins anew at every chunk that keeps next to nothing of the state that enters it. What passes such a
chunk's first row comes from that state and ends in the chunk: it is the state's part of q . dq, summed over the chunk,
with the roundings that q . dq of the rows has, so that these cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.lightning.policy import TOKEN_ROWS
from fulmen.tiles import LOG2E, at_head, find_tile, offset_at

FORGOTTEN = tl.constexpr(64)  # bits
# A chunk keeps next to nothing if less is left than a rounding of the state; tokens.cuh has that of bf16.
BEGINS_BF16, BEGINS_FP16, BEGINS_FP32 = tl.constexpr(2.0**-8), tl.constexpr(2.0**-11), tl.constexpr(2.0**-24)
SPAN = tl.constexpr(TOKEN_ROWS)


@triton.jit
def token_decays(s, scale, C: tl.constexpr, REVERSE: tl.constexpr, FP32: tl.constexpr):
    """The factors of a chunk whose rows decay by s: mask, a_decay, c_decay, then keep and what rounding it lost.

    A difference of running sums is exact to what their size leaves of it. So fp32 sums in fp64; 16 bits take no row for
    more than FORGOTTEN bits, of which 2^-FORGOTTEN is left.
    """
    if FP32:
        bits = s.to(tl.float64) * LOG2E
    else:
        bits = tl.minimum(s * LOG2E, 1.0 * FORGOTTEN, propagate_nan=tl.PropagateNan.ALL)
    a = tl.cumsum(bits, axis=0)  # [C], of this row and those before
    total = tl.sum(bits, axis=0)
    offs = tl.arange(0, C)
    if REVERSE:
        seen = offs[:, None] >= offs[None, :]
        apart = a[:, None] - a[None, :]
    else:
        seen = offs[:, None] <= offs[None, :]
        apart = a[None, :] - a[:, None]
    mask = tl.where(seen, tl.exp2(tl.minimum(-apart, 0.0).to(tl.float32)) * scale, 0.0)  # [C (j), C (i)]
    since = tl.exp2((-a).to(tl.float32))
    until = tl.exp2(tl.minimum(a - total, 0.0).to(tl.float32))
    exact = tl.exp2(-total)
    keep = exact.to(tl.float32)
    rest = (exact - keep).to(tl.float32)
    if REVERSE:
        return mask, until * scale, since, keep, rest
    else:
        return mask, since * scale, until, keep, rest


@triton.jit
def after_row(x, forgets, y, forgets_y):
    """Joins two stretches of a running sum that begins anew at a row that forgets."""
    return tl.where(forgets_y, y, x + y), forgets | forgets_y


@triton.jit
def meet(state, tokens, slot, place, pid_v, scale, offs, mask, LAST: tl.constexpr, TILES: tl.constexpr):
    """Before every SPAN-th row: stores the state's gradient [V, K]; where LAST, its product with the state, summed."""
    SIZE: tl.constexpr = state.shape[0] * state.shape[1] * TILES
    if place % SPAN == 0:
        number = slot + place // SPAN
        ptrs = tokens.gradients + number.to(tl.int64) * SIZE + offs
        if LAST:
            gradient = tl.load(ptrs, mask=mask, other=0.0)
            tl.store(tokens.anchors + number * TILES + pid_v, tl.sum(tl.sum(state * gradient, axis=1), axis=0) * scale)
        else:
            tl.store(ptrs, state, mask=mask)


@triton.jit
def begin(total, keep, tokens, slot, place, pid_v, DTYPE: tl.constexpr, C: tl.constexpr, TILES: tl.constexpr):
    """Stores the sum of a chunk's q . dq that comes from the state, or infinity if the chunk keeps more of that."""
    if DTYPE == tl.float32:
        limit = BEGINS_FP32
    elif DTYPE == tl.float16:
        limit = BEGINS_FP16
    else:
        limit = BEGINS_BF16
    number = (slot + place // SPAN) * (SPAN // C) + place % SPAN // C
    tl.store(tokens.entered + number * TILES + pid_v, tl.where(keep < limit, total, float("inf")))


@triton.jit
def lightning_token_gradient_kernel(
    ddecay_ptr,  # (B, H, N), written
    decay_ptr,  # (B, H, N)
    qdq_ptr,  # (B, H, tiles of D, N)
    kdk_ptr,
    anchors_ptr,  # (B * H, slots, parts): parts of <S, dS> before every SPAN-th row of a sequence
    entered_ptr,  # (B * H, slots * SPAN / CHUNK, parts): of q . dq of a chunk what comes from the state, or infinity
    cu_seqlens_ptr,  # or None
    to_strides,  # of ddecay
    from_strides,  # of decay
    H,
    N,
    sequences,
    slots,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,  # of anchors
    PARTS_ENTERED: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    OPEN: tl.constexpr,  # the final states have gradients
    SUM: tl.constexpr,  # the dtype to add up in
):
    """ds of SPAN rows from row r on: ds_t = sum_{r <= i < t} (q_i . dq_i - k_i . dk_i) - <S_{r-1}, dS_{r-1}>.

    Nothing passes a row that forgets: there the sum is zero, and begins anew. It also begins anew at a chunk that keeps
    next to nothing of the state. Otherwise it arrives at the next anchor. Programs are (batch entry, head, slot).
    """
    slot = tl.program_id(0) % slots
    unit = tl.program_id(0) // slots
    b, h = unit // H, unit % H
    begin = slot * SPAN
    end = N
    if cu_seqlens_ptr is not None:
        sequence, span = find_tile(cu_seqlens_ptr, slot, sequences, N, SPAN)
        begin = offset_at(cu_seqlens_ptr, sequence, N) + span * SPAN
        end = offset_at(cu_seqlens_ptr, sequence + 1, N)
    offs = tl.arange(0, SPAN)
    mask = begin + offs < end
    length = tl.minimum(end - begin, SPAN)
    follows = begin + SPAN < end  # another span of this sequence
    x = tl.zeros([SPAN], SUM)
    after = tl.zeros([1], SUM)  # the sum after the last row, then what it misses by
    sizes = tl.zeros([SPAN], SUM)  # of the terms, in which it was rounded
    last = tl.zeros([1], SUM)
    dots = unit.to(tl.int64) * TILES * N + begin - 1
    before = mask & (offs > 0)
    one = tl.arange(0, 1)
    for tile in tl.static_range(TILES):
        qdq = tl.load(qdq_ptr + dots + offs + tile * N, mask=before, other=0.0)
        kdk = tl.load(kdk_ptr + dots + offs + tile * N, mask=before, other=0.0)
        x += qdq.to(SUM) - kdk
        sizes += tl.abs(qdq) + tl.abs(kdk)
        qdq = tl.load(qdq_ptr + dots + length + tile * N + one, mask=length > one, other=0.0)
        kdk = tl.load(kdk_ptr + dots + length + tile * N + one, mask=length > one, other=0.0)
        after += qdq.to(SUM) - kdk
        last += tl.abs(qdq) + tl.abs(kdk)
    for part in tl.static_range(PARTS):
        anchor = anchors_ptr + (unit * slots + slot) * PARTS + part
        x -= tl.load(anchor + offs * 0, mask=mask & (offs == 0), other=0.0)
        after += tl.load(anchor + PARTS + one, mask=follows & (one == 0), other=0.0)
    after += tl.sum(x, axis=0)
    part = offs % CHUNK
    chunk = (unit * slots + slot) * (SPAN // CHUNK) + offs // CHUNK
    entered = tl.zeros([SPAN], SUM)
    for i in tl.static_range(0, PARTS_ENTERED, CHUNK):  # a row loads a part of its chunk's sum
        parts = (i + part < PARTS_ENTERED) & (begin + offs - part < end)
        entered += tl.load(entered_ptr + chunk * PARTS_ENTERED + i + part, mask=parts, other=0.0)
    entered = tl.sum(tl.reshape(entered, [SPAN // CHUNK, CHUNK]), axis=1, keep_dims=True)
    entered = tl.reshape(tl.broadcast_to(entered, [SPAN // CHUNK, CHUNK]), [SPAN])
    anew = mask & (part == 0) & (tl.abs(entered) < float("inf"))
    x = tl.where(anew, -entered, x)
    s = tl.load(at_head(decay_ptr, from_strides, b, h, begin) + offs * from_strides[2], mask=mask, other=0.0)
    forgets = s * LOG2E > 0.5 * FORGOTTEN
    arrives = tl.abs(after) < float("inf")  # NaN changes no row before it
    anew = anew | forgets
    arrives = arrives & (tl.max(anew.to(tl.int32), axis=0) == 0)
    if OPEN:
        arrives = arrives & follows
    x, _ = tl.associative_scan((tl.where(forgets, 0.0, x), anew), 0, after_row)
    share = tl.cumsum(sizes, axis=0) / tl.maximum(tl.sum(sizes, axis=0) + last, 1e-30)
    x -= tl.where(arrives, after * share, 0.0)
    tl.store(at_head(ddecay_ptr, to_strides, b, h, begin) + offs * to_strides[2], x.to(tl.float32), mask=mask)
