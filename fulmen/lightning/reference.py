"""Lightning attention written three times as plainly as possible: the oracles every backend is tested against.

`recurrent` is the definition, `quadratic` the attention matrix written out, `chunked` the block form the kernels
use. They are ordinary differentiable PyTorch (twice, too), run on any device, compute in fp64 for fp64 inputs
and in fp32 otherwise, and agree with each other to rounding. The registered backend is `quadratic`: use it to
check, not to train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.dispatch import register
from fulmen.lightning.spec import NO_STEPS, LightningSpec, Residuals, is_per_token

# MKL's first exp, if several threads make it at once, may be a low-accuracy one (pytorch/pytorch#188792): an oracle
# must not be the first, so a single number is.
for _dtype in (torch.float32, torch.float64):
    torch.exp(torch.zeros(1, dtype=_dtype))

Oracle = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def recurrent(q: Tensor, k: Tensor, v: Tensor, s: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = exp(-s_t) S_{t-1} + k_t v_t^T;  o_t = q_t S_t.  s is (H,) or (B, H, N), here and below."""
    keep = torch.exp(-s)
    rows = []
    for t in range(q.shape[2]):
        kept = (keep if s.ndim == 1 else keep[:, :, t])[..., None, None]
        state = kept * state + k[:, :, t, :, None] * v[:, :, t, None, :]  # (B, H, D, E)
        rows.append(q[:, :, t, None, :] @ state)
    o = torch.cat(rows, dim=2) if rows else q.new_zeros(*q.shape[:3], v.shape[3])
    return o, state


class Exponents(NamedTuple):
    """What has decayed between the N tokens of a sequence; leading dimensions (H,) or (B, H)."""

    seen: Tensor  # (N, N): j <= t
    apart: Tensor  # (.., N, N): from token j to t
    since: Tensor  # (.., N, 1): from the initial state to t
    until: Tensor  # (.., N, 1): from t to the last token
    whole: Tensor  # (.., 1, 1)


def exponents(s: Tensor, N: int, dtype: torch.dtype) -> Exponents:
    t = torch.arange(N, dtype=dtype, device=s.device)
    distance = t[:, None] - t
    if s.ndim == 1:
        s = s.view(-1, 1, 1)
        s_apart = s * distance.clamp(min=0)
        return Exponents(distance >= 0, s_apart, s * (t[:, None] + 1), s * (N - 1 - t)[:, None], s * N)
    # differences of a sum over all rows: in fp32 little would be left of them
    a = s.to(torch.float32 if s.device.type == "mps" else torch.float64).cumsum(2)[..., None]
    total = a[:, :, -1:] if N else a.sum(2, keepdim=True)
    # not clamped at 0: where a GPU's parallel sum rounds below it, a clamp would cut off the gradient
    found = torch.where(distance >= 0, a - a.mT, 0.0), a, total - a, total
    return Exponents(distance >= 0, *(x.to(dtype) for x in found))


def quadratic(q: Tensor, k: Tensor, v: Tensor, s: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """o = ((q k^T) * M) v + exp(-a_t) q S_0 with M_tj = exp(a_j - a_t) for t >= j, a_t = s_0 + .. + s_t.

    NaN and inf reach no row before their own: p is cut off, not multiplied by zero, and in v they are taken out of the
    product and put back, as NaN, from their row on.
    """
    x = exponents(s, q.shape[2], q.dtype)
    p = torch.where(x.seen, q @ k.mT * torch.exp(-x.apart), 0.0)
    finite = v.isfinite()
    o = p @ torch.where(finite, v, 0.0) + torch.where(finite, 0.0, torch.nan).cumsum(2)
    o = o + torch.exp(-x.since) * (q @ state)
    return o, torch.exp(-x.whole) * state + (k * torch.exp(-x.until)).mT @ v


def chunked(q: Tensor, k: Tensor, v: Tensor, s: Tensor, state: Tensor, C: int = 16) -> tuple[Tensor, Tensor]:
    """`quadratic` inside chunks of C rows, the state between them."""
    rows = []
    for i in range(0, q.shape[2], C):
        part = slice(i, i + C)
        decay = s if s.ndim == 1 else s[:, :, part]
        o, state = quadratic(q[:, :, part], k[:, :, part], v[:, :, part], decay, state)
        rows.append(o)
    return torch.cat(rows, dim=2) if rows else q.new_zeros(*q.shape[:3], v.shape[3]), state


def attend(
    oracle: Oracle,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Any oracle with the operation's full semantics: shared heads, scale, states, packed sequences.

    Returns o in the inputs' dtype and the final state(s) in the computing dtype.
    """
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    H, D, E, dtype = max(q.shape[1], v.shape[1]), q.shape[3], v.shape[3], q.dtype
    s = q.new_zeros(H, dtype=compute) if decay is None else decay.to(compute)
    s = s if is_per_token(s, H) else s.reshape(H)
    q, k, v = (x.to(compute).repeat_interleave(H // max(x.shape[1], 1), dim=1) for x in (q, k, v))
    ends = [0, q.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    sequences = q.shape[0] if cu_seqlens is None else len(ends) - 1
    if initial_state is None:
        initial_state = q.new_zeros(sequences, H, D, E, dtype=compute)
    states = [initial_state] if cu_seqlens is None else [initial_state[i : i + 1] for i in range(sequences)]
    rows, finals = [q[:, :, :0] @ k.new_zeros(D, E)], [initial_state[:0]]  # so that none is a case too
    for begin, end, state in zip(ends[:-1], ends[1:], states, strict=True):
        part = slice(begin, end)
        decay = s if s.ndim == 1 else s[:, :, part]
        o, final = oracle(q[:, :, part], k[:, :, part], v[:, :, part], decay, state)
        rows.append(o)
        finals.append(final)
    return (torch.cat(rows, dim=2) * scale).to(dtype), torch.cat(finals)


def supports(spec: LightningSpec) -> str | None:
    return NO_STEPS if spec.steps else None


def forward(spec: LightningSpec, x: Residuals) -> tuple[Tensor, Tensor]:
    return attend(quadratic, *x[:4], scale=spec.scale, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens)


register("lightning", "reference", supports=supports, forward=forward, backward=None)
