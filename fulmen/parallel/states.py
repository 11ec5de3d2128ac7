"""What leaves a rank's tokens and what reaches them: the four products that carry lightning attention over ranks.

With lambda = exp(-s), N tokens on the rank, S the state that enters it and G the gradient of the state that leaves it,

    leaving              M = sum_t lambda^(N-1-t) k_t v_t^T                   what the rank adds to the state
    add_entering         o_t += scale lambda^(t+1) q_t S
    entering_gradient    dS = sum_t scale lambda^(t+1) q_t^T do_t
    add_leaving_gradient dk_t += lambda^(N-1-t) v_t G^T,  dv_t += lambda^(N-1-t) k_t G

each in pieces of the sequence, in fp32 (fp64 for fp64). Where lambda^t has fallen below `NOTHING` for every head a sum
stops; below it a single head's weights are zero, which also keeps CPUs from denormal numbers, ten times as slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

NOTHING = 2.0**-100
EPS = torch.finfo(torch.float32).eps
PIECE = {"cpu": 2048}  # tokens; 1 thread, H8 N8192 D64: 9 ms each, against 37 all at once
GPU_PIECE = 32_768


class Decay(NamedTuple):
    """The slopes of H heads, on the device in high precision and, to decide what need not be computed, on the host."""

    slopes: Tensor  # (H,), zeros without decay
    least: float

    @classmethod
    def of(cls, decay: Tensor | None, q: Tensor) -> Decay:
        exact = torch.float32 if q.device.type == "mps" else torch.float64
        if decay is None:
            return cls(torch.zeros(q.shape[1], dtype=exact, device=q.device), 0.0)
        return cls(decay.to(exact), min(host_values(decay), default=0.0))

    @property
    def reach(self) -> float:
        """After so many tokens nothing is left of a state."""
        return -math.log(NOTHING) / self.least if self.least > 0 else math.inf

    def powers(self, exponents: Tensor, like: Tensor, below: float = NOTHING) -> Tensor:
        """lambda^t, (H, len(exponents)), zero where it is below `below`."""
        found = torch.exp(-self.slopes[:, None] * exponents)
        return torch.where(found < below, 0.0, found).to(like.dtype)

    def power(self, t: int, like: Tensor) -> Tensor:
        """lambda^t, (H, 1, 1)."""
        return self.powers(torch.tensor([t], device=like.device), like)[:, :, None]


_on_host: Any = WeakTensorKeyDictionary()


def host_values(decay: Tensor) -> tuple[float, ...]:
    """The slopes as numbers; of a tensor on a GPU they are copied, which waits for it, once."""
    if decay.device.type == "cpu":
        return tuple(decay.tolist())
    known = _on_host.get(decay)
    if known is None or known[0] != decay._version:
        known = _on_host[decay] = (decay._version, tuple(decay.tolist()))
    return known[1]


def exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def spans(N: int, reach: float, device: torch.device, backwards: bool = False) -> Iterator[tuple[int, int]]:
    """(begin, end) of pieces of N tokens, from the first on or from the last back, as far as a state reaches."""
    size = PIECE.get(device.type, GPU_PIECE)
    for done in range(0, N, size):
        if done > reach:
            return
        yield (max(N - done - size, 0), N - done) if backwards else (done, min(done + size, N))


def folded(x: Tensor, w: Tensor) -> Tensor:
    """x (B, H_KV, C, size) times w (H, C): (B, H_KV, C, group * size), the heads that share x side by side."""
    w = w.unflatten(0, (x.shape[1], -1)).transpose(1, 2)[..., None]  # (H_KV, C, group, 1)
    return (exact(x)[:, :, :, None] * w).flatten(3)


def after(begin: int, end: int, decay: Decay, like: Tensor) -> Tensor:
    """lambda^(t+1) of tokens begin to end: (H, C)."""
    return decay.powers(torch.arange(begin + 1, end + 1, device=like.device), like)


def until(begin: int, end: int, N: int, decay: Decay, like: Tensor) -> Tensor:
    """lambda^(N-1-t) of tokens begin to end: (H, C)."""
    return decay.powers(torch.arange(N - 1 - begin, N - 1 - end, -1, device=like.device), like)


def zero_states(B: int, q: Tensor, E: int) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return torch.zeros(B, q.shape[1], q.shape[3], E, dtype=dtype, device=q.device)


def leaving(q: Tensor, k: Tensor, v: Tensor, decay: Decay) -> Tensor:
    """M (B, H, D, E); q tells the heads only."""
    M = zero_states(q.shape[0], q, v.shape[3])
    N = k.shape[2]
    total = M.view(M.shape[0], k.shape[1], -1, M.shape[3])  # (B, H_KV, group * D, E)
    for begin, end in spans(N, decay.reach, k.device, backwards=True):
        a = folded(k[:, :, begin:end], until(begin, end, N, decay, M))
        total += a.mT @ exact(v[:, :, begin:end])
    return M


def add_entering(o: Tensor, q: Tensor, S: Tensor, decay: Decay, scale: float) -> None:
    for begin, end in spans(q.shape[2], decay.reach, q.device):
        rows = o[:, :, begin:end]
        w = after(begin, end, decay, S)[..., None] * scale
        rows.copy_(torch.addcmul(exact(rows), exact(q[:, :, begin:end]) @ S, w))


def entering_gradient(q: Tensor, do: Tensor, decay: Decay, scale: float) -> Tensor:
    """dS (B, H, D, E)."""
    dS = zero_states(q.shape[0], q, do.shape[3])
    for begin, end in spans(q.shape[2], decay.reach, q.device):
        w = after(begin, end, decay, dS)[..., None] * scale
        dS += (exact(q[:, :, begin:end]) * w).mT @ exact(do[:, :, begin:end])
    return dS


def add_leaving_gradient(dk: Tensor, dv: Tensor, k: Tensor, v: Tensor, G: Tensor, decay: Decay) -> None:
    N, heads = k.shape[2], k.shape[1]
    for_v = G.unflatten(1, (heads, -1)).flatten(2, 3)  # (B, H_KV, group * D, E)
    for_k = G.mT.unflatten(1, (heads, -1)).flatten(2, 3)  # (B, H_KV, group * E, D)
    for begin, end in spans(N, decay.reach, k.device, backwards=True):
        w = until(begin, end, N, decay, G)
        for grad, x, right in ((dk, v, for_k), (dv, k, for_v)):
            rows = grad[:, :, begin:end]
            rows.copy_(exact(rows) + folded(x[:, :, begin:end], w) @ right)


def combined(states: Tensor, sources: Sequence[tuple[int, int]], decay: Decay) -> Tensor | None:
    """sum of lambda^distance states[rank] over the (rank, distance) of `sources`; None where nothing is left of any.

    states  (ranks, B, H, D, E)
    A rank all of whose heads have decayed below fp32's epsilon is not read, and of others such heads count nothing.
    """
    near = [(rank, distance) for rank, distance in sources if math.exp(-decay.least * distance) >= EPS]
    if not near:
        return None
    w = decay.powers(torch.tensor([distance for _, distance in near], device=states.device), states, EPS)
    total = torch.zeros_like(states[0])
    for (rank, _), weight in zip(near, w.unbind(1), strict=True):  # in a fixed order: the same bits every time
        total.addcmul_(states[rank], weight[:, None, None])
    return total
