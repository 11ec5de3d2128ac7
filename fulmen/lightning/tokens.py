"""What a decay for each token adds to the sweeps in Triton: the factors of a chunk, and the gradient of the decay.

With s_t the decay of token t and a_t its running sum, the weight of token j for t is exp(a_j - a_t): a difference of
sums within a chunk, never an exponential of a positive number. What passes token t, from tokens before it to t and
later ones, is what its decay scales; see docs/lightning.md:

    ds_t = -<exp(-s_t) S_{t-1}, dS_t> = sum_{i < t} (q_i . dq_i - k_i . dk_i) - <S_0, dS_0>
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulmen.tiles import LOG2E, at_head

FORGOTTEN = tl.constexpr(64)  # bits


@triton.jit
def token_decays(s, scale, C: tl.constexpr, REVERSE: tl.constexpr, FP32: tl.constexpr):
    """The factors of a chunk whose rows decay by s: mask, a_decay, c_decay, then keep and what rounding it lost.

    A difference of running sums is exact to what their size leaves of it. So fp32 sums in fp64; 16 bits take no row for
    more than FORGOTTEN bits, of which 2^-FORGOTTEN is left.
    """
    if FP32:
        bits = s.to(tl.float64) * LOG2E
    else:
        bits = tl.minimum(s * LOG2E, 1.0 * FORGOTTEN)
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
def lightning_token_gradient_kernel(
    ddecay_ptr,  # (B, H, N), written
    decay_ptr,  # (B, H, N)
    qdq_ptr,  # (B, H, tiles of D, N)
    kdk_ptr,
    initial_ptr,  # (sequences, H, D, E), or None
    dinitial_ptr,
    cu_seqlens_ptr,  # or None
    to_strides,  # of ddecay
    from_strides,  # of decay
    H,
    N,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,  # D * E
    BLOCK: tl.constexpr,
):
    """ds_t = sum_{i < t} (q_i . dq_i - k_i . dk_i) - <S_0, dS_0>; one program for each sequence and head.

    Nothing passes a row that forgets: there the sum is zero, and begins anew.
    """
    pid = tl.program_id(0)
    sequence, h = pid // H, pid % H
    b, begin, end = sequence, 0, N
    if cu_seqlens_ptr is not None:
        b = sequence * 0
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence), 0), N)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + sequence + 1), begin), N)
    carry = tl.sum(tl.zeros([BLOCK], tl.float64), axis=0)
    if initial_ptr is not None:
        for first in range(0, SIZE, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            at = pid.to(tl.int64) * SIZE + offs
            initial = tl.load(initial_ptr + at, mask=offs < SIZE, other=0.0).to(tl.float64)
            carry -= tl.sum(initial * tl.load(dinitial_ptr + at, mask=offs < SIZE, other=0.0), axis=0)
    from_ptr = at_head(decay_ptr, from_strides, b, h, begin)
    to_ptr = at_head(ddecay_ptr, to_strides, b, h, begin)
    dots = (b.to(tl.int64) * H + h) * TILES * N + begin
    for first in range(0, end - begin, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < end - begin
        before = mask & (offs > 0)
        x = tl.where(offs == first, carry, 0.0)
        for tile in tl.static_range(TILES):
            at = dots + tile * N + offs - 1
            x += tl.load(qdq_ptr + at, mask=before, other=0.0) - tl.load(kdk_ptr + at, mask=before, other=0.0)
        forgets = (
            tl.load(from_ptr + offs.to(tl.int64) * from_strides[2], mask=mask, other=0.0) * LOG2E > 0.5 * FORGOTTEN
        )
        x, _ = tl.associative_scan((tl.where(forgets, 0.0, x), forgets), 0, after_row)
        tl.store(to_ptr + offs.to(tl.int64) * to_strides[2], x.to(tl.float32), mask=mask)
        carry = tl.sum(tl.where(offs == first + BLOCK - 1, x, 0.0), axis=0)
