"""Attention beyond one device: sequences and heads shared out to ranks, on torch.distributed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulmen.parallel.checkpoint import load, save
    from fulmen.parallel.lightning import lightning_attention, lightning_attention_with_state
    from fulmen.parallel.model import apply_parallel
    from fulmen.parallel.ring import ring_attention
    from fulmen.parallel.shards import shard, unshard
    from fulmen.parallel.ulysses import ulysses_attention

# public name -> module that holds it; loaded at first use
_HOMES = {
    "apply_parallel": "model",
    "lightning_attention": "lightning",
    "lightning_attention_with_state": "lightning",
    "load": "checkpoint",
    "ring_attention": "ring",
    "save": "checkpoint",
    "shard": "shards",
    "ulysses_attention": "ulysses",
    "unshard": "shards",
}

__all__ = [
    "apply_parallel",
    "lightning_attention",
    "lightning_attention_with_state",
    "load",
    "ring_attention",
    "save",
    "shard",
    "ulysses_attention",
    "unshard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fulmen.parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fulmen.parallel.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
