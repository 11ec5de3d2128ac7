"""The definition of latent attention, written out in fp64: what every backend is compared with.

Plain differentiable PyTorch. Keys beyond a row's length take no part, whatever they hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulmen.dispatch import register
from fulmen.latent.spec import LatentSpec, Residuals


def supports(spec: LatentSpec) -> str | None:
    return "reference computes in fp64, which MPS lacks" if spec.device.type == "mps" else None


def lengths_of(spec: LatentSpec, x: Residuals) -> Tensor:
    """int64 (B,): the keys of each row, clamped to its room."""
    if x.kv_lengths is None:
        return torch.full((spec.B,), spec.N_KV, device=spec.device)
    return x.kv_lengths.long().clamp(0, spec.N_KV)


def keys_of(spec: LatentSpec, x: Residuals, lengths: Tensor) -> Tensor:
    """kv (B, N_KV, D), gathered from its pages, zero beyond each row's length."""
    kv = x.kv
    if x.page_table is not None:
        table = x.page_table.long().clamp(0, max(kv.shape[0] - 1, 0))
        kv = kv[table].reshape(spec.B, spec.N_KV, spec.D) if spec.N_KV else kv.new_zeros(spec.B, 0, spec.D)
    there = torch.arange(spec.N_KV, device=spec.device) < lengths[:, None]
    return torch.where(there[..., None], kv, torch.zeros((), dtype=kv.dtype, device=kv.device))


def hidden(spec: LatentSpec, lengths: Tensor) -> Tensor:
    """Which keys each query does not see: bool (B, 1, N_Q or 1, N_KV)."""
    key = torch.arange(spec.N_KV, device=spec.device)
    last = lengths[:, None] - 1
    if spec.causal:
        last = lengths[:, None] - spec.N_Q + torch.arange(spec.N_Q, device=spec.device)
    return (key > last[..., None])[:, None]


def forward(spec: LatentSpec, x: Residuals) -> Tensor:
    lengths = lengths_of(spec, x)
    kv = keys_of(spec, x, lengths).double()[:, None]
    s = (x.q.double() @ kv.mT * spec.scale).masked_fill(hidden(spec, lengths), -torch.inf)
    blind = (s == -torch.inf).all(dim=3, keepdim=True)  # rows that see nothing are zero
    p = torch.softmax(s.masked_fill(blind, 0.0), dim=3).masked_fill(blind, 0.0)
    return (p @ kv[..., : spec.E]).to(spec.dtype)


register("latent", "reference", supports=supports, forward=forward, backward=None)
