"""Attention layers, and what stands beside them in a block."""

from __future__ import annotations

from fulmen.layers.attention import (
    GroupedQueryAttention,
    MultiHeadAttention,
    MultiHeadSelfAttention,
    MultiQueryAttention,
)
from fulmen.layers.block import AddNorm, GatedMLP, linear_cross_entropy
from fulmen.layers.cache import KVCache, LatentCache, MambaCache, StateCache
from fulmen.layers.latent import MultiHeadLatentAttention
from fulmen.layers.lightning import LightningAttention
from fulmen.layers.mamba import Mamba2
from fulmen.layers.pool import KVPool, LatentPool, StatePool
from fulmen.layers.rotary import Rotary, apply_rotary
from fulmen.layers.sequences import PoolFull, Sequence, Sequences

__all__ = [
    "AddNorm",
    "GatedMLP",
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
    "linear_cross_entropy",
]
