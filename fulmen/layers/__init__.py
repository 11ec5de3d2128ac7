"""Attention layers: what models are built of."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# public name -> module that holds it; loaded at first use
_HOMES = {
    "GroupedQueryAttention": "attention",
    "KVCache": "cache",
    "LatentCache": "cache",
    "LightningAttention": "lightning",
    "MultiHeadAttention": "attention",
    "MultiHeadLatentAttention": "latent",
    "MultiHeadSelfAttention": "attention",
    "MultiQueryAttention": "attention",
    "Rotary": "rotary",
    "StateCache": "cache",
    "apply_rotary": "rotary",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fulmen.layers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fulmen.layers.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
