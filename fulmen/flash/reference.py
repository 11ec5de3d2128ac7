"""The definition of softmax attention, written out in fp64: what every backend is compared with.

Plain differentiable PyTorch, quadratic in memory; any number of derivatives.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fulmen.dispatch import register
from fulmen.flash.spec import FlashSpec, Residuals


def supports(spec: FlashSpec) -> str | None:
    if spec.device.type == "mps":
        return "reference computes in fp64, which MPS lacks"
    if spec.sequences is not None and spec.device.type != "cpu":
        return "reference reads cu_seqlens on the host, which would synchronise the GPU"
    return None


def visible(spec: FlashSpec, queries: range, N_KV: int, end: int | Tensor) -> Tensor:
    """Which of N_KV keys queries at positions `end` + `queries` see; those from `end` on, no query.

    Bool (queries, N_KV), or (B, 1, queries, N_KV) where each of B rows has its own end.
    """
    end = end.view(-1, 1, 1, 1) if isinstance(end, Tensor) else end
    position = torch.arange(queries.start, queries.stop, device=spec.device)[:, None] + end
    key = torch.arange(N_KV, device=spec.device)[None, :]
    seen = key < end
    if spec.left is not None:
        seen = seen & (key >= position - spec.left)
    if spec.right is not None:
        seen = seen & (key <= position + spec.right)
    return seen.expand(*position.shape[:-1], N_KV)


def attend(
    spec: FlashSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One sequence, or rows of a cache: (o, lse) in the dtype of the arguments."""
    k, v = (x.repeat_interleave(spec.group, dim=1) for x in (k, v))
    s = q @ k.mT * spec.scale
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    N_Q, N_KV = q.shape[2], k.shape[2]
    queries = range(-N_KV, N_Q - N_KV) if spec.top_left else range(-N_Q, 0)
    s = s.masked_fill(~visible(spec, queries, N_KV, N_KV if lengths is None else lengths), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=3)
    if s.shape[3] == 0:
        return s @ v, s.sum(3) - torch.inf  # zeros and -inf, with gradients of zero
    blind = (s == -torch.inf).all(dim=3, keepdim=True)  # rows that see nothing; NaN must not enter their gradient
    s = s.masked_fill(blind, 0.0)
    lse = torch.logsumexp(s, dim=3)
    p = torch.exp(s - lse[..., None]).masked_fill(blind, 0.0)
    return p[..., : k.shape[2]] @ v, lse.masked_fill(blind[..., 0], -torch.inf)


def cache_rows(spec: FlashSpec, x: Residuals, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """k, v (rows, H_KV, N_KV, .) and lengths of some rows of the cache; nothing is read on the host.

    Pages are gathered, values beyond a row's length, which may be NaN, are zero, and lengths lie in 0 to N_KV.
    """
    assert x.kv_lengths is not None
    lengths = x.kv_lengths[rows].clamp(0, spec.N_KV)
    if x.page_table is None:
        k, v = (t[rows, :, : spec.N_KV] for t in (x.k, x.v))
    else:
        table = x.page_table[rows].clamp(0, max(x.k.shape[0] - 1, 0))
        k, v = (t[table].transpose(1, 2).flatten(2, 3)[:, :, : spec.N_KV] for t in (x.k, x.v))
    beyond = torch.arange(spec.N_KV, device=lengths.device) >= lengths[:, None]
    return k, v.masked_fill(beyond[:, None, :, None], 0.0), lengths


def forward(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor]:
    q, sinks = x.q.double(), None if x.sinks is None else x.sinks.double()
    if x.cu_seqlens_q is None:
        k, v, lengths = (x.k, x.v, None) if x.kv_lengths is None else cache_rows(spec, x, slice(None))
        o, lse = attend(spec, q, k.double(), v.double(), sinks, lengths)
    else:
        ends = x.cu_seqlens_q.tolist()
        each = []
        for i, (a, b) in enumerate(itertools.pairwise(ends)):
            if x.cu_seqlens_k is None:
                k, v, lengths = cache_rows(spec, x, slice(i, i + 1))
            else:
                c, d = x.cu_seqlens_k[i : i + 2].tolist()
                k, v, lengths = x.k[:, :, c:d], x.v[:, :, c:d], None
            each.append(attend(spec, q[:, :, a:b], k.double(), v.double(), sinks, lengths))
        o = torch.cat([q.new_zeros(1, spec.H, 0, spec.E), *(o for o, _ in each)], dim=2)
        lse = torch.cat([q.new_zeros(1, spec.H, 0), *(lse for _, lse in each)], dim=2)
    return o.to(spec.dtype), lse if spec.dtype == torch.float64 else lse.float()


register("flash", "reference", supports=supports, forward=forward, backward=None)
