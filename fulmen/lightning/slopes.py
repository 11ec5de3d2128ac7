"""The gradient of a constant decay's slopes, for every backend: plain PyTorch, and only run when it is asked for.

With w_tj = scale lambda^(t-j) (q_t . k_j) (v_j . do_t) and lambda = exp(-s), the gradient of s is -sum (t - j) w_tj.
Sequences are cut into chunks of L <= C rows. Within a chunk the sum is taken as it stands. Of earlier rows the chunk
sees the state S that enters it, and beside it Z, in which every row is weighted with how long ago it was:

    Z' = lambda^L (Z + L S) + sum_r (L-1-r) left_r k_r v_r^T           as S' = lambda^L S + sum_r left_r k_r v_r^T
    sum over the chunk = <S, sum_r (r+1) into_r q_r do_r^T> + <Z, sum_r into_r q_r do_r^T>

with left_r = lambda^(L-1-r) and into_r = scale lambda^(r+1). An initial state counts as a row before the first, and a
final state's gradient meets Z at the end. (sum t q_t . dq_t - sum j k_j . dk_j is the same number, and loses it where t
is large and little of the past is left.)

Where packed sequences begin is worked out on the device: their lengths are not read on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.lightning import eager
from fulmen.lightning.spec import LightningSpec, Residuals, state_dtype


class Chunks(NamedTuple):
    """Every chunk of the call, or some of them; of packed sequences as many as there can be, some of them empty."""

    rows: Tensor  # (chunks, C): which row of the inputs
    length: Tensor  # (chunks,): how many of these are its own
    sequence: Tensor | None  # (chunks,), or None: all of the one that each batch entry is
    opens: Tensor | None  # (chunks,): whether its sequence begins here, and whether it ends
    closes: Tensor | None

    @classmethod
    def of(cls, spec: LightningSpec, x: Residuals, C: int) -> Chunks:
        r = torch.arange(C, device=x.q.device)
        if x.cu_seqlens is None:
            first = C * torch.arange(-(-spec.N // C), device=x.q.device)
            return cls((first[:, None] + r).clamp(max=spec.N - 1), (spec.N - first).clamp(max=C), None, None, None)
        ends = x.cu_seqlens.long().clamp(0, spec.N)
        lengths = ends.diff().clamp(min=0)
        chunks = (lengths + C - 1) // C  # of each sequence; then its first one
        chunk_offsets = torch.cat([ends.new_zeros(1), chunks.cumsum(0)])
        number = torch.arange(spec.N // C + spec.states, device=x.q.device)
        sequence = (torch.searchsorted(chunk_offsets, number, right=True) - 1).clamp(max=spec.states - 1)
        skip = C * (number - chunk_offsets[sequence])
        length = (lengths[sequence] - skip).clamp(0, C)
        rows = (ends[sequence] + skip)[:, None] + r
        own = length > 0
        closes = own & (skip + length == lengths[sequence])
        return cls(rows.clamp(0, spec.N - 1), length, sequence, own & (skip == 0), closes)

    def panel(self, part: slice) -> Chunks:
        rest = (None if t is None else t[part] for t in self[2:])
        return Chunks(self.rows[part], self.length[part], *rest)

    def take(self, x: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """Their rows of x, (B, H, chunks, C, size), with zeros for rows that are not theirs."""
        x = x.index_select(2, self.rows.flatten()).unflatten(2, self.rows.shape).to(dtype)  # a copy
        foreign = torch.arange(self.rows.shape[1], device=x.device) >= self.length[:, None]
        x.masked_fill_(foreign[:, :, None], 0.0)
        return x.repeat_interleave(group, dim=1) if group > 1 else x


def gradient(spec: LightningSpec, x: Residuals, do: Tensor, dstate: Tensor | None) -> Tensor:
    """(H,), of the decay's dtype."""
    assert x.decay is not None
    exact = torch.float32 if x.q.device.type == "mps" else torch.float64
    total = torch.zeros(spec.H, dtype=exact, device=x.q.device)
    if not x.q.numel():
        return total.to(x.decay.dtype)
    C, dtype = min(eager.CHUNK, spec.N), state_dtype(spec)
    powers = torch.exp(-x.decay.to(exact))[:, None].repeat(1, C + 1)
    powers[:, 0] = 1.0
    powers = powers.cumprod(1).to(dtype)  # (H, C + 1)
    r = torch.arange(C, device=x.q.device)
    apart = (r[:, None] - r).clamp(min=0)
    inside = powers[:, apart].tril() * (apart.to(dtype) * spec.scale)  # (H, C, C)
    into = powers[:, 1:, None] * spec.scale
    initial = eager.initial_states(spec, x)
    state, late = initial[: spec.B], torch.zeros_like(initial[: spec.B])  # packed: whatever, until a sequence opens
    every = Chunks.of(spec, x, C)
    most = max(1, eager.PANEL_BYTES // (4 * spec.B * spec.H * max(C, spec.D) * max(C, spec.E)))

    def add(a: Tensor, b: Tensor) -> None:
        total.add_((a * b).transpose(0, 1).flatten(1).sum(1, dtype=exact))

    for at in range(0, len(every.length), most):
        cut = every.panel(slice(at, at + most))
        q, do_, k, v = (cut.take(t, spec.H // t.shape[1], dtype) for t in (x.q, do, x.k, x.v))
        add(q @ k.mT * inside[:, None], do_ @ v.mT)
        age = (cut.length[:, None] - 1 - r).clamp(min=0)  # of a row when its chunk ends
        k = k * powers[:, age, None]
        states, lates = k.mT @ v, (k * age[:, :, None]).mT @ v  # what each chunk adds; then what enters it
        leaving = torch.empty_like(lates) if dstate is not None and cut.sequence is not None else None
        keep = powers[:, cut.length]  # (H, chunks)
        begin = None if cut.sequence is None else initial[cut.sequence]
        for i, length in enumerate(cut.length):
            if begin is not None:
                assert cut.opens is not None
                state = torch.where(cut.opens[i], begin[i : i + 1], state)
                late = late.masked_fill(cut.opens[i], 0.0)
            kept = keep[:, i, None, None]
            after = torch.addcmul(lates[:, :, i], late + length * state, kept)
            lates[:, :, i] = late
            states[:, :, i], state, late = state, torch.addcmul(states[:, :, i], state, kept), after
            if leaving is not None:
                leaving[:, :, i] = late
        q = q * into[:, None]
        add(lates, q.mT @ do_)
        add(states, (q * (r + 1)[:, None]).mT @ do_)
        if leaving is not None:
            assert cut.closes is not None
            assert dstate is not None
            ended = torch.where(cut.closes[:, None, None, None], dstate[cut.sequence], 0.0)
            add(leaving, ended.transpose(0, 1)[None])
    if dstate is not None and every.sequence is None:
        add(late, dstate)
    return -total.to(x.decay.dtype)
