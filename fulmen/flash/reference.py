"""The definition of softmax attention, written out in fp64: what every backend is compared with.

Plain differentiable PyTorch, quadratic in memory; any number of derivatives.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fulmen.dispatch import register
from fulmen.flash.op import FlashSpec, Residuals


def supports(spec: FlashSpec) -> str | None:
    if spec.device.type == "mps":
        return "reference computes in fp64, which MPS lacks"
    if spec.sequences is not None and spec.device.type != "cpu":
        return "reference reads cu_seqlens on the host, which would synchronise the GPU"
    return None


def visible(spec: FlashSpec, N_Q: int, N_KV: int, device: torch.device) -> Tensor:
    """Which keys each query of one sequence sees: bool (N_Q, N_KV)."""
    position = torch.arange(N_Q, device=device)[:, None] + (0 if spec.top_left else N_KV - N_Q)
    key = torch.arange(N_KV, device=device)[None, :]
    seen = torch.ones(N_Q, N_KV, dtype=torch.bool, device=device)
    if spec.left is not None:
        seen &= key >= position - spec.left
    if spec.right is not None:
        seen &= key <= position + spec.right
    return seen


def attend(spec: FlashSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """One sequence: (o, lse) in the dtype of the arguments."""
    k, v = (x.repeat_interleave(spec.group, dim=1) for x in (k, v))
    s = q @ k.mT * spec.scale
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    s = s.masked_fill(~visible(spec, q.shape[2], k.shape[2], q.device), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=3)
    if s.shape[3] == 0:
        return s @ v, s.sum(3) - torch.inf  # zeros and -inf, with gradients of zero
    blind = (s == -torch.inf).all(dim=3, keepdim=True)  # rows that see nothing; NaN must not enter their gradient
    s = s.masked_fill(blind, 0.0)
    lse = torch.logsumexp(s, dim=3)
    p = torch.exp(s - lse[..., None]).masked_fill(blind, 0.0)
    return p[..., : k.shape[2]] @ v, lse.masked_fill(blind[..., 0], -torch.inf)


def forward(spec: FlashSpec, x: Residuals) -> tuple[Tensor, Tensor]:
    q, k, v = (t.double() for t in x[:3])
    sinks = None if x.sinks is None else x.sinks.double()
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        o, lse = attend(spec, q, k, v, sinks)
    else:
        bounds = zip(*(itertools.pairwise(t.tolist()) for t in (x.cu_seqlens_q, x.cu_seqlens_k)), strict=True)
        each = [attend(spec, q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], sinks) for (a, b), (c, d) in bounds]
        o = torch.cat([q.new_zeros(1, spec.H, 0, spec.E), *(o for o, _ in each)], dim=2)
        lse = torch.cat([q.new_zeros(1, spec.H, 0), *(lse for _, lse in each)], dim=2)
    return o.to(spec.dtype), lse if spec.dtype == torch.float64 else lse.float()


register("flash", "reference", supports=supports, forward=forward, backward=None)
