"""A layer as one writes it without us: nn.Linear's products and scaled_dot_product_attention, on a GPU by cuDNN."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fulmen import hardware
from fulmen.bench.baselines.sdpa import version

__all__ = ["COMPUTES", "attend", "pinned", "refuses", "version"]

COMPUTES = "layer"


def refuses(case: dict[str, Any], device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    from fulmen.bench.adapters import flash, layer
    from fulmen.flash.sdpa import unsupported_reason

    return unsupported_reason(flash.spec(layer.of_flash(layer.complete(case)), device), hardware.of(device), "cudnn")


def pinned() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if torch.cuda.is_available() else nullcontext()


def attend(p: Any) -> Tensor:
    x, layer = p.x, p.layer
    if hasattr(layer, "kv_rank"):
        return latent(x, layer)
    D = layer.head_dim
    if layer.fused_qkv:
        q, k, v = layer.qkv_proj(x).chunk(3, -1)
    else:
        q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=layer.options.causal, enable_gqa=grouped)
    return layer.o_proj(o.transpose(1, 2).flatten(2))


def latent(x: Tensor, layer: Any) -> Tensor:
    B, N, H = *x.shape[:2], layer.num_heads
    sizes = [layer.nope_dim, layer.rope_dim]
    q = layer.q_b_proj(F.rms_norm(layer.q_a_proj(x), (layer.q_rank,), layer.q_a_layernorm.weight, 1e-6))
    q_nope, q_rope = q.view(B, N, H, sum(sizes)).transpose(1, 2).split(sizes, -1)
    c, k_rope = layer.kv_a_proj_with_mqa(x).split([layer.kv_rank, layer.rope_dim], -1)
    kv = layer.kv_b_proj(F.rms_norm(c, (layer.kv_rank,), layer.kv_a_layernorm.weight, 1e-6))
    k_nope, v = kv.view(B, N, H, -1).transpose(1, 2).split([layer.nope_dim, layer.value_dim], -1)
    cos, sin = layer.rope.span(0, N, x.device)  # a table that is kept
    q = torch.cat([q_nope, turned(q_rope, cos, sin)], -1)
    k = torch.cat([k_nope, turned(k_rope[:, None], cos, sin).expand(-1, H, -1, -1)], -1)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=layer.options.causal)
    return layer.o_proj(o.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over pairs of neighbours, in fp32."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
