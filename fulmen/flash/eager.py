"""Softmax attention in plain PyTorch, forward and backward: right on any device, for every option and dtype.

Queries are taken in panels, and of the keys only those a panel can see, so that memory is bounded and a causal or
windowed call does not compute what its mask hides:

    s = cap(scale q k^T) where visible, else -inf;  lse = log sum exp s (and sink);  p = exp(s - lse);  o = p v

    dp = do v^T,  ds = p * (dp - delta) * cap',  delta = rowsum(do * o) - dlse
    dq = scale ds k,  dk = scale ds^T q,  dv = p^T do,  dsink = -sum exp(sink - lse) * delta

Products are taken in the inputs' dtype, as torch takes them; softmax, lse and the sums over panels in fp32 (fp64 for
fp64). Query heads that share k and v are rows of one product, so nothing is expanded.

Over a cache, panels are rows of it. Lengths are not read on the host: every key is multiplied, and those beyond a
row's length are hidden. Pages are gathered first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fulmen.boundary import empty_rows
from fulmen.dispatch import register
from fulmen.flash.reference import cache_rows, visible
from fulmen.flash.spec import FlashSpec, Residuals, empty_lse

PANEL_BYTES = 64 << 20  # of the logits, over all heads
GPU_PANELS = 8  # times as much on a GPU, where a small panel would be over before the next one is launched


def supports(spec: FlashSpec) -> str | None:
    if spec.sequences is not None and spec.device.type != "cpu":
        return "eager reads cu_seqlens on the host, which would synchronise the GPU"
    return None


class Panel(NamedTuple):
    """Queries q0 to q1 and the keys k0 to k1 they may see; `offset`: a query's position less its row."""

    q0: int
    q1: int
    k0: int
    k1: int
    offset: int

    def hidden(self, spec: FlashSpec, device: torch.device) -> Tensor | None:
        """Which keys each query does not see, bool (queries, keys); None where it sees all."""
        first, last = self.q0 + self.offset, self.q1 - 1 + self.offset
        cut_left = spec.left is not None and self.k0 < last - spec.left
        cut_right = spec.right is not None and self.k1 - 1 > first + spec.right
        if not (cut_left or cut_right):
            return None
        position = torch.arange(first, last + 1, device=device)[:, None]
        key = torch.arange(self.k0, self.k1, device=device)[None, :]
        hidden = torch.zeros(self.q1 - self.q0, self.k1 - self.k0, dtype=torch.bool, device=device)
        if spec.left is not None:
            hidden |= key < position - spec.left
        if spec.right is not None:
            hidden |= key > position + spec.right
        return hidden


def panels(spec: FlashSpec, x: Residuals) -> Iterator[Panel]:
    """Every query once, with some key or none."""
    bounds = [((0, spec.N_Q), (0, spec.N_KV))]
    if x.cu_seqlens_q is not None and x.cu_seqlens_k is not None:
        pairs = (itertools.pairwise(t.tolist()) for t in (x.cu_seqlens_q, x.cu_seqlens_k))
        bounds = list(zip(*pairs, strict=True))
    for (a, b), (c, d) in bounds:
        offset = c - a if spec.top_left else d - b  # of a query's position, in rows of k, to its row of q
        room = PANEL_BYTES * (1 if spec.device.type == "cpu" else GPU_PANELS)
        rows = max(1, room // (4 * max(spec.B * spec.H, 1) * max(d - c, 1)))
        if spec.left is not None or spec.right is not None:
            rows = min(rows, 512)  # a narrow panel hides less
        for q0 in range(a, b, rows):
            q1 = min(q0 + rows, b)
            k0 = c if spec.left is None else min(max(c, q0 + offset - spec.left), d)
            k1 = d if spec.right is None else max(min(d, q1 + offset + spec.right), k0)
            yield Panel(q0, q1, k0, k1, offset)


def grouped(x: Tensor, spec: FlashSpec, panel: Panel) -> Tensor:
    """A panel's rows of a query-sided tensor, (B, H_KV, group * queries, size)."""
    return x[:, :, panel.q0 : panel.q1].unflatten(1, (spec.H_KV, spec.group)).flatten(2, 3)


def logits(spec: FlashSpec, q: Tensor, k: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """s (B, H_KV, group, queries, keys) in fp32 or fp64, and the slope of the cap where there is one."""
    early = min(spec.scale, 1.0) if spec.scale > 0 else 1.0  # before the product, which in fp16 ends at 65,504
    s = ((q * early) @ k.mT).to(torch.promote_types(spec.dtype, torch.float32))
    if early != spec.scale:
        s = s * (spec.scale / early)
    s = s.unflatten(2, (spec.group, -1))
    slope = None
    if spec.softcap is not None:
        t = torch.tanh(s / spec.softcap)
        s, slope = spec.softcap * t, 1 - t * t
    return s if hidden is None else s.masked_fill(hidden, -torch.inf), slope


def weights(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse), 0 in rows that see nothing."""
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


def attend(
    spec: FlashSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o (B, H, queries, E) and lse of some queries, grouped by k's heads, and the keys they may see."""
    s, _ = logits(spec, q, k, hidden)
    if sinks is None:
        lse = torch.logsumexp(s, dim=4)  # -inf for a row without keys
    else:
        sinks = sinks.to(s.dtype).view(spec.H_KV, spec.group, 1, 1).expand(*s.shape[:4], 1)
        lse = torch.logsumexp(torch.cat([s, sinks], dim=4), dim=4)
    p = weights(s, lse).to(spec.dtype)
    return (p.flatten(2, 3) @ v).unflatten(2, (spec.group, -1)).flatten(1, 2), lse.flatten(1, 2)


def forward(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor]:
    o, lse = empty_rows(x.q, spec.H, spec.E), empty_lse(x.q)
    if not lse.numel():
        return o, lse
    if spec.has_kv_lengths:
        forward_cache(spec, x, o, lse)
        return o, lse
    for panel in panels(spec, x):
        k, v = (t[:, :, panel.k0 : panel.k1] for t in (x.k, x.v))
        rows = attend(spec, grouped(x.q, spec, panel), k, v, x.sinks, panel.hidden(spec, x.q.device))
        o[:, :, panel.q0 : panel.q1], lse[:, :, panel.q0 : panel.q1] = rows
    return o, lse


def forward_cache(spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor) -> None:
    """Writes o and lse. A panel is some rows of the cache, or some queries of one row."""
    room = PANEL_BYTES * (1 if spec.device.type == "cpu" else GPU_PANELS)
    queries = max(1, room // (4 * spec.H * max(spec.N_KV, 1)))
    if x.cu_seqlens_q is None:
        step = max(1, queries // spec.N_Q)
        rows = [(slice(b, b + step), slice(b, b + step), 0, spec.N_Q) for b in range(0, spec.B, step)]
    else:
        ends = itertools.pairwise(x.cu_seqlens_q.tolist())
        rows = [(slice(None), slice(i, i + 1), a, b) for i, (a, b) in enumerate(ends)]
    for batch, row, begin, end in rows:
        k, v, lengths = cache_rows(spec, x, row)
        for q0 in range(begin, end, queries):
            panel = Panel(q0, min(q0 + queries, end), 0, spec.N_KV, 0)
            seen = visible(spec, range(panel.q0 - end, panel.q1 - end), spec.N_KV, lengths)
            q = grouped(x.q[batch], spec, panel)
            here = batch, slice(None), slice(panel.q0, panel.q1)
            o[here], lse[here] = attend(spec, q, k, v, x.sinks, ~seen[:, None])


def backward(
    spec: FlashSpec, x: Residuals, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    exact = lse.dtype
    dq = empty_rows(x.q, spec.H, spec.D)
    dk, dv = (torch.zeros(t.shape, dtype=exact, device=t.device) for t in (x.k, x.v))
    delta = (o.to(exact) * do.to(exact)).sum(3)
    if dlse is not None:
        delta = delta - dlse
    dsinks = None
    if x.sinks is not None:  # a sink of -inf is none: then a row may have seen nothing
        each = torch.exp(x.sinks.to(exact)[:, None] - lse) * delta
        dsinks = -each.masked_fill(lse == -torch.inf, 0.0).sum((0, 2)).to(x.sinks.dtype)
    for panel in panels(spec, x) if dq.numel() else ():
        keys = slice(panel.k0, panel.k1)
        q, k, v, g = grouped(x.q, spec, panel), x.k[:, :, keys], x.v[:, :, keys], grouped(do, spec, panel)
        s, slope = logits(spec, q, k, panel.hidden(spec, q.device))
        rows, shift = (grouped(t, spec, panel).unflatten(2, (spec.group, -1)) for t in (lse, delta))
        p = weights(s, rows)
        ds = p * ((g @ v.mT).to(exact).unflatten(2, (spec.group, -1)) - shift[..., None])
        if slope is not None:
            ds *= slope
        ds, p = (t.to(spec.dtype).flatten(2, 3) for t in (ds, p))
        dq[:, :, panel.q0 : panel.q1] = ((ds @ k).to(exact) * spec.scale).unflatten(2, (spec.group, -1)).flatten(1, 2)
        dk[:, :, keys] += (ds.mT @ q).to(exact) * spec.scale
        dv[:, :, keys] += p.mT @ g
    like_k, like_v = empty_rows(x.k, spec.H_KV, spec.D), empty_rows(x.v, spec.H_KV, spec.E)
    return dq, like_k.copy_(dk), like_v.copy_(dv), dsinks


register("flash", "eager", supports=supports, forward=forward, backward=backward)
