"""Attention with dropout of its weights, which no kernel of ours has: in plain PyTorch, or by torch's SDPA.

The weights are normalised first and dropped after, so the expectation of the output is that without dropout. Eager
writes the whole matrix of weights, and a mask where one is needed; SDPA takes the same mask, and no softcap or sinks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fulmen.flash.op import Window
from fulmen.layers.rows import Rows

BACKENDS = ("auto", "eager", "sdpa")


class Options(NamedTuple):
    """What a layer's attention is, beside its tensors."""

    causal: bool
    window: Window
    softcap: float | None
    scale: float
    backend: str

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """How far before and after its own position a query sees."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right


def refuse(backend: str, dropout: float) -> None:
    """One clear error for a layer that could not be trained."""
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout!r}: must be at least 0 and below 1")
    if dropout and backend not in BACKENDS:
        raise ValueError(
            f"dropout={dropout} with backend={backend!r}: attention weights are dropped by 'eager' and 'sdpa' only"
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dropout: float, sinks: Tensor | None, rows: Rows | None
) -> Tensor:
    """As `flash_attention` of rows (B, H, N, D), and each weight is zero with probability `dropout`."""
    plain = options.softcap is None and sinks is None
    if options.backend == "sdpa" and not plain:
        raise NotImplementedError("backend='sdpa' with dropout: SDPA has no softcap and no sinks; use backend='eager'")
    seen = visible(q, k, options, rows)
    dead = None
    if seen is not None:
        dead = ~seen.any(-1, keepdim=True)
        seen = seen | dead  # a softmax over nothing is NaN, and so are its gradients
    if plain and options.backend != "eager":
        grouped = q.shape[1] != k.shape[1]
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, dropout_p=dropout, scale=options.scale, enable_gqa=grouped
        )
    else:
        o = _eager(q, k, v, options, dropout, sinks, seen)
    o = o if dead is None else o.masked_fill(dead, 0.0)
    return o.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection reads it


def _eager(
    q: Tensor, k: Tensor, v: Tensor, options: Options, dropout: float, sinks: Tensor | None, seen: Tensor | None
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = ((q * options.scale) @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], -1)
    p = torch.softmax(s, -1)
    p = p if sinks is None else p[..., :-1]
    return F.dropout(p, dropout).to(v.dtype) @ v


def visible(q: Tensor, k: Tensor, options: Options, rows: Rows | None) -> Tensor | None:
    """bool (B or 1, 1, N_Q, N_KV): which keys each query sees; None: all."""
    left, right = options.limits
    if rows is None and left is None and right is None:
        return None
    N_Q, N_KV = q.shape[2], k.shape[2]
    query, key = torch.arange(N_Q, device=q.device), torch.arange(N_KV, device=q.device)
    if rows is None:
        position, first, end = query[None] + N_KV - N_Q, torch.zeros_like(query)[None], None
    else:
        position, first, end = rows.keys_of_queries(query)
    seen = key >= first[..., None]
    if end is not None:
        seen = seen & (key < end[..., None])
    if left is not None:
        seen = seen & (key >= position[..., None] - left)
    if right is not None:
        seen = seen & (key <= position[..., None] + right)
    return seen[:, None]
