"""Softmax attention as layers call it: `flash_attention` of rows, or plain PyTorch where weights are dropped.

No kernel of `flash_attention` drops attention weights. With dropout torch's SDPA serves the call or, where there is a
softcap or sinks, eager PyTorch, which writes the whole matrix of weights. Weights are normalised first and dropped
after, so the expectation of the output is that without dropout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fulmen.flash.op import flash_attention
from fulmen.flash.spec import FlashSpec, Window, checked_spec
from fulmen.layers.inputs import Rows, check_backend, flag, many_rows, one_row
from fulmen.layers.tensor_parallel import local

if TYPE_CHECKING:
    from fulmen.parallel.context import ContextParallel

DROPOUT_BACKENDS = ("auto", "eager", "sdpa")


class Options(NamedTuple):
    """A layer's arguments of `flash_attention`."""

    causal: bool
    window: Window
    softcap: float | None
    scale: float
    backend: str

    @classmethod
    def checked(
        cls, causal: bool, window: Window, softcap: float | None, scale: float, backend: str, dropout: float
    ) -> Options:
        """Raises when the layer is built what its calls would raise."""
        check_backend("flash", backend)
        if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout!r}: must be at least 0 and below 1")
        if dropout and backend not in DROPOUT_BACKENDS:
            raise ValueError(
                f"dropout={dropout} with backend={backend!r}: attention weights are dropped by 'eager' and 'sdpa' only"
            )
        like = torch.empty(1, 1, 1, 1, device="meta")
        flag("causal", causal)
        checked_spec(like, like, like, causal=causal, window=window, softcap=softcap, scale=scale)
        return cls(causal, window, softcap, scale, backend)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """How far before and after its own position a query sees."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    def spec(
        self, B: int, heads: tuple[int, int], N: int, dims: tuple[int, int], weight: Tensor, has_sinks: bool,
        needs_grad: bool,
    ) -> FlashSpec:  # fmt: skip
        """The spec of a call of N tokens with (H, H_KV) heads and head dims (D, E), on `weight`'s device."""
        return FlashSpec(
            B, *heads, N, N, *dims, weight.dtype, weight.device, self.scale, *self.limits, softcap=self.softcap,
            has_sinks=has_sinks, needs_grad=needs_grad,
        )  # fmt: skip

    def described(self) -> list[str]:
        """For a layer's repr."""
        given = (("window", self.window), ("softcap", self.softcap))
        return ["causal" if self.causal else "full", *(f"{name}={value}" for name, value in given if value)]


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, sinks: Tensor | None, rows: Rows | None, dropout: float,
    cp: ContextParallel | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention (B, H, N, E), stored as (B, N, H, E); `sinks` is a layer's parameter."""
    sinks = local_sinks(sinks, q.dtype)
    if cp is not None:
        return cp.attend(q, k, v, options, sinks, rows)
    if dropout:
        return _with_dropout(q, k, v, options, sinks, rows, dropout)
    given = options._asdict()
    if rows is None:
        return flash_attention(q, k, v, sinks=sinks, **given)
    (B, _, N_Q, _), N_KV = q.shape, k.shape[2]
    q, k, v = one_row(q), one_row(k), one_row(v)
    cu_seqlens_q, cu_seqlens_k = rows.offsets(N_Q, N_KV)
    o = flash_attention(q, k, v, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **given)
    return many_rows(o, B, N_Q)


def local_sinks(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The sinks of this rank's heads, in a dtype `flash_attention` takes."""
    if parameter is None:
        return None
    sinks = local(parameter)
    return sinks if sinks.dtype in (dtype, torch.float32) else sinks.float()


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, options: Options, sinks: Tensor | None, rows: Rows | None, dropout: float
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
        o = _eager(q, k, v, options, sinks, seen, dropout)
    o = o if dead is None else o.masked_fill(dead, 0.0)
    return o.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection reads it


def _eager(
    q: Tensor, k: Tensor, v: Tensor, options: Options, sinks: Tensor | None, seen: Tensor | None, dropout: float
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    p = weights((q * options.scale) @ k.mT, options, sinks, seen)
    return F.dropout(p, dropout).to(v.dtype) @ v


def weights(s: Tensor, options: Options, sinks: Tensor | None, seen: Tensor | None) -> Tensor:
    """The softmax in fp32 (fp64) of scaled logits s (B, H, N_Q, N_KV): capped, where `seen`, beside the sinks."""
    s = s.to(torch.promote_types(s.dtype, torch.float32))
    if options.softcap is not None:
        s = options.softcap * torch.tanh(s / options.softcap)
    if seen is not None:
        s = s.masked_fill(~seen, -torch.inf)
    if sinks is None:
        return torch.softmax(s, -1)
    s = torch.cat([s, sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return torch.softmax(s, -1)[..., :-1]


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
