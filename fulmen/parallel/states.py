"""States that leave a rank's tokens and reach them: the four products of lightning attention over ranks.

With lambda = exp(-s), N tokens on the rank, S the state that enters it and G the gradient of the state that leaves it,

    leaving              M = sum_t lambda^(N-1-t) k_t v_t^T                   what the rank adds to the state
    add_entering         o_t += scale lambda^(t+1) q_t S
    entering_gradient    dS = sum_t scale lambda^(t+1) q_t^T do_t
    add_leaving_gradient dk_t += lambda^(N-1-t) v_t G^T,  dv_t += lambda^(N-1-t) k_t G

PyTorch computes them in segments of the sequence, in fp32 (fp64 for fp64). For 16-bit tensors on a GPU kernels do
(`triton.py`); M and dS are lightning attention's own, with their roundings. Weights lambda^t below `NOTHING` are zero,
and heads whose weights are all zero in a segment are skipped, which leaves a third of the work with the usual slopes.
It also avoids denormal numbers, which are ten times as slow on CPUs.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fulmen import hardware
from fulmen.boundary import at_least_fp32

NOTHING = {torch.float32: 2.0**-60, torch.float64: 2.0**-120}
PIECE = {"cpu": 1024}  # tokens: what is computed of a piece stays in the cache
GPU_PIECE = 32_768


class Decay(NamedTuple):
    """The slopes of H heads: on the device in high precision, and on the host to decide what to skip."""

    slopes: Tensor  # (H,), zeros without decay
    known: tuple[float, ...]

    @classmethod
    def of(cls, decay: Tensor | None, known: tuple[float, ...], q: Tensor) -> Decay:
        exact = torch.float32 if q.device.type == "mps" else torch.float64
        if decay is None:
            return cls(torch.zeros(q.shape[1], dtype=exact, device=q.device), known)
        return cls(decay.to(exact), known)

    @property
    def least(self) -> float:
        return min(self.known, default=0.0)

    def powers(self, exponents: Tensor, like: Tensor) -> Tensor:
        """lambda^t, (H, len(exponents)), zero where it is below NOTHING."""
        found = torch.exp(-self.slopes[:, None] * exponents)
        return torch.where(found < NOTHING[like.dtype], 0.0, found).to(like.dtype)

    def power(self, t: int, like: Tensor) -> Tensor:
        """lambda^t, (H, 1, 1)."""
        return self.powers(torch.tensor([t], device=like.device), like)[:, :, None]

    def alive(self, t: int, heads: int, dtype: torch.dtype) -> tuple[slice, slice] | None:
        """The heads of k and v, of `heads`, and their query heads for which lambda^t is at least NOTHING.

        One range each, from the first such head to the last: slopes are usually in order. None if there are none.
        """
        limit, group = -math.log(NOTHING[dtype]), len(self.known) // max(heads, 1)
        left = [h // group for h, s in enumerate(self.known) if s * t <= limit]
        if not left:
            return None
        return slice(left[0], left[-1] + 1), slice(left[0] * group, (left[-1] + 1) * group)

    def in_fp32(self) -> Tensor | None:
        """As the kernels take them, None where no head decays."""
        return self.slopes.float() if any(self.known) else None

    def of_heads(self, heads: slice) -> Decay:
        return Decay(self.slopes[heads], self.known[heads])


_on_host: Any = WeakTensorKeyDictionary()


def host_values(decay: Tensor | None, H: int) -> tuple[float, ...]:
    """The slopes as numbers; those of a GPU's tensor are copied, which waits for it, once for each tensor."""
    if decay is None:
        return (0.0,) * H
    if decay.device.type == "cpu":
        return tuple(decay.flatten().tolist())
    known = _on_host.get(decay)
    if known is None or known[0] != decay._version:
        known = _on_host[decay] = (decay._version, tuple(decay.flatten().tolist()))
    return known[1]


class Span(NamedTuple):
    """Tokens begin to end, the heads of k and v that count there, their query heads, and those heads' decay."""

    tokens: slice
    stored: slice
    heads: slice
    decay: Decay


def spans(N: int, heads: int, decay: Decay, like: Tensor, backwards: bool = False) -> Iterator[Span]:
    """Pieces of N tokens, from the first on or from the last back, as far as a state reaches."""
    size = PIECE.get(like.device.type, GPU_PIECE)
    for done in range(0, N, size):
        alive = decay.alive(done, heads, like.dtype)
        if alive is None:
            return
        tokens = slice(max(N - done - size, 0), N - done) if backwards else slice(done, min(done + size, N))
        yield Span(tokens, *alive, decay.of_heads(alive[1]))


def folded(x: Tensor, w: Tensor) -> Tensor:
    """x (B, H_KV, C, size) times w (H, C): (B, H_KV, C, group * size), the heads that share x side by side."""
    w = w.unflatten(0, (x.shape[1], -1)).transpose(1, 2)[..., None]  # (H_KV, C, group, 1)
    return (at_least_fp32(x)[:, :, :, None] * w).flatten(3)


def added(rows: Tensor, product: Tensor, w: Tensor | None = None) -> None:
    """rows += product * w, in place, rounded once."""
    if rows.dtype == product.dtype:
        rows.add_(product) if w is None else rows.addcmul_(product, w)
    else:
        rows.copy_(at_least_fp32(rows) + product if w is None else torch.addcmul(at_least_fp32(rows), product, w))


def after(span: Span, like: Tensor) -> Tensor:
    """lambda^(t+1) of a span's tokens and heads: (H, C)."""
    return span.decay.powers(torch.arange(span.tokens.start + 1, span.tokens.stop + 1, device=like.device), like)


def until(span: Span, N: int, like: Tensor) -> Tensor:
    """lambda^(N-1-t) of a span's tokens and heads: (H, C)."""
    exponents = torch.arange(N - 1 - span.tokens.start, N - 1 - span.tokens.stop, -1, device=like.device)
    return span.decay.powers(exponents, like)


def zero_states(B: int, q: Tensor, E: int) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros(B, q.shape[1], q.shape[3], E, dtype=dtype, device=q.device)


@functools.cache
def _kernels() -> Any:
    try:
        return importlib.import_module("fulmen.parallel.triton")
    except ImportError:  # no Triton here
        return None


def kernels_for(*tensors: Tensor) -> Any:
    """Our own kernels, for 16-bit tensors on a GPU they run on; None: torch's operations do it."""
    if any(x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16) for x in tensors):
        return None
    return _kernels() if hardware.of(tensors[0].device).arch >= 80 else None


def leaving(q: Tensor, k: Tensor, v: Tensor, decay: Decay) -> Tensor:
    """M (B, H, D, E); q tells the heads only."""
    kernels = kernels_for(k, v)
    if kernels is not None:
        return kernels.leaving(q, k, v, decay.in_fp32())
    M = zero_states(q.shape[0], q, v.shape[3])
    N = k.shape[2]
    for span in spans(N, k.shape[1], decay, M, backwards=True):
        a = folded(k[:, span.stored, span.tokens], until(span, N, M))  # (B, H_KV, C, group * D)
        M[:, span.heads] += (a.mT @ at_least_fp32(v[:, span.stored, span.tokens])).view_as(M[:, span.heads])
    return M


def add_entering(o: Tensor, q: Tensor, S: Tensor, decay: Decay, scale: float) -> None:
    kernels = kernels_for(o, q)
    if kernels is not None:
        kernels.add_entering(o, q, S, decay.in_fp32(), scale)
        return
    for span in spans(q.shape[2], q.shape[1], decay, S):
        w = after(span, S)[..., None] * scale
        at = (slice(None), span.heads, span.tokens)
        added(o[at], at_least_fp32(q[at]) @ S[:, span.heads], w)


def entering_gradient(q: Tensor, do: Tensor, decay: Decay, scale: float) -> Tensor:
    """dS (B, H, D, E)."""
    kernels = kernels_for(q, do)
    if kernels is not None:
        return kernels.entering_gradient(q, do, decay.in_fp32(), scale)
    dS = zero_states(q.shape[0], q, do.shape[3])
    for span in spans(q.shape[2], q.shape[1], decay, dS):
        w = after(span, dS)[..., None] * scale
        at = (slice(None), span.heads, span.tokens)
        dS[:, span.heads] += (at_least_fp32(q[at]) * w).mT @ at_least_fp32(do[at])
    return dS


def add_leaving_gradient(dk: Tensor, dv: Tensor, k: Tensor, v: Tensor, G: Tensor, decay: Decay) -> None:
    kernels = kernels_for(dk, dv, k, v)
    if kernels is not None:
        kernels.add_leaving_gradient(dk, dv, k, v, G, decay.in_fp32())
        return
    N, heads = k.shape[2], k.shape[1]
    shared = G.shape[1] > heads
    for span in spans(N, heads, decay, G, backwards=True):
        w, own = until(span, N, G), G[:, span.heads]
        at = (slice(None), span.stored, span.tokens)
        for grad, x, right in ((dk, v, own.mT), (dv, k, own)):
            if shared:  # summed over the heads that share k and v
                stacked = right.unflatten(1, (x[at].shape[1], -1)).flatten(2, 3)  # (B, H_KV, group * size, size)
                added(grad[at], folded(x[at], w) @ stacked)
            else:
                added(grad[at], at_least_fp32(x[at]) @ right, w[..., None])


def combined(states: Tensor, sources: Sequence[tuple[int, int]], decay: Decay) -> Tensor | None:
    """sum of lambda^distance states[rank] over the (rank, distance) of `sources`; None where nothing is left of any.

    states  (ranks, B, H, D, E)
    A rank all of whose heads have decayed to NOTHING is not read, and of others such heads count nothing. (Not at the
    dtype's epsilon: what is multiplied may be as much larger as there are numbers.)
    """
    near = [(rank, d) for rank, d in sources if math.exp(-decay.least * d) >= NOTHING[states.dtype]]
    if not near:
        return None
    w = decay.powers(torch.tensor([distance for _, distance in near], device=states.device), states)
    total = torch.zeros_like(states[0])
    for (rank, _), weight in zip(near, w.unbind(1), strict=True):  # in a fixed order: the same bits every time
        total.addcmul_(states[rank], weight[:, None, None])
    return total
