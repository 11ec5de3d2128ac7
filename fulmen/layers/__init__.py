"""Attention layers: what models are built of."""

from __future__ import annotations

from fulmen.layers.attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadSelfAttention,
    MultiQueryAttention,
)
from fulmen.layers.cache import KVCache, LatentCache, MambaCache, StateCache
from fulmen.layers.latent import MultiHeadLatentAttention
from fulmen.layers.lightning import LightningAttention
from fulmen.layers.mamba import Mamba2
from fulmen.layers.pool import KVPool, LatentPool, StatePool
from fulmen.layers.rotary import Rotary, apply_rotary
from fulmen.layers.sequences import PoolFull, Sequence, Sequences

__all__ = [
    "GroupedQueryAttention",
    "KVCache",
    "KVPool",
    "LatentCache",
    "LatentPool",
    "LightningAttention",
    "Mamba2",
    "MambaCache",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "MultiHeadSelfAttention",
    "MultiQueryAttention",
    "PoolFull",
    "Rotary",
    "Sequence",
    "Sequences",
    "StateCache",
    "StatePool",
    "apply_rotary",
]
