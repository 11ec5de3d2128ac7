"""Latent attention in plain PyTorch: right on any device, for every head dim, option and dtype.

Products are taken in the inputs' dtype, as torch takes them, the softmax in fp32 (fp64 for fp64). All queries of a row
are the rows of one product. Pages are gathered, and keys beyond a row's length zeroed, in a copy of kv.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.boundary import empty_rows, no_gradient
from fulmen.dispatch import register
from fulmen.latent.reference import hidden, keys_of, lengths_of
from fulmen.latent.spec import LatentSpec, Residuals


def supports(spec: LatentSpec) -> str | None:
    return None


def forward(spec: LatentSpec, x: Residuals) -> Tensor:
    o = empty_rows(x.q, spec.H, spec.E)
    if not o.numel() or not spec.N_KV:
        return o.zero_()
    lengths = lengths_of(spec, x)
    kv = keys_of(spec, x, lengths)
    s = (x.q.flatten(1, 2) @ kv.mT).unflatten(1, (spec.H, spec.N_Q))
    s = s.to(torch.promote_types(spec.dtype, torch.float32)) * spec.scale
    s = s.masked_fill(hidden(spec, lengths), -torch.inf)
    p = torch.softmax(s, 3).masked_fill(hidden(spec, lengths), 0.0)  # of a row that sees nothing: NaN, and zero
    return o.copy_((p.to(spec.dtype).flatten(1, 2) @ kv[..., : spec.E]).unflatten(1, (spec.H, spec.N_Q)))


register("latent", "eager", supports=supports, forward=forward, backward=no_gradient("latent_attention"))
