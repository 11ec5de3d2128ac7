"""Attention beyond one device: sequences and heads shared out to ranks, on torch.distributed."""

from __future__ import annotations

from fulmen.parallel.checkpoint import load, save
from fulmen.parallel.lightning import lightning_attention, lightning_attention_with_state
from fulmen.parallel.model import apply_parallel
from fulmen.parallel.ring import ring_attention
from fulmen.parallel.shards import shard, unshard
from fulmen.parallel.ulysses import ulysses_attention

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
