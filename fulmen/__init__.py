"""fulmen: lightning (linear) and softmax attention for PyTorch, forward and backward."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulmen import decay, parallel
    from fulmen.dispatch import explain
    from fulmen.flash import flash_attention, flash_attention_with_lse
    from fulmen.latent import latent_attention
    from fulmen.lightning import lightning_attention, lightning_attention_with_state, lightning_attn_func
    from fulmen.step import lightning_step

__version__ = "0.2.0"

# public name -> module that holds it; loaded at first use, so that `fulmen --help` does not wait for torch
_HOMES = {
    "explain": "fulmen.dispatch",
    "flash_attention": "fulmen.flash.op",
    "flash_attention_with_lse": "fulmen.flash.op",
    "latent_attention": "fulmen.latent.op",
    "lightning_attention": "fulmen.lightning.op",
    "lightning_attention_with_state": "fulmen.lightning.op",
    "lightning_attn_func": "fulmen.lightning.op",
    "lightning_step": "fulmen.step.op",
}

__all__ = [
    "decay",
    "explain",
    "flash_attention",
    "flash_attention_with_lse",
    "latent_attention",
    "lightning_attention",
    "lightning_attention_with_state",
    "lightning_attn_func",
    "lightning_step",
    "parallel",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fulmen' has no attribute {name!r}")
    home = importlib.import_module(_HOMES.get(name, f"fulmen.{name}"))
    value = getattr(home, name) if name in _HOMES else home
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
