"""Attention layers: what models are built of."""

from __future__ import annotations

from fulmen.layers.attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadSelfAttention,
    MultiQueryAttention,
)
from fulmen.layers.cache import KVCache, LatentCache, StateCache
from fulmen.layers.latent import MultiHeadLatentAttention
from fulmen.layers.lightning import LightningAttention
from fulmen.layers.rotary import Rotary, apply_rotary

__all__ = [
    "GroupedQueryAttention",
    "KVCache",
    "LatentCache",
    "LightningAttention",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiHeadSelfAttention",
    "MultiQueryAttention",
    "Rotary",
    "StateCache",
    "apply_rotary",
]
