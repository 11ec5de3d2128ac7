"""Linear layers with a constant decay that call fla's functions for simple GLA, whose code comes with checkpoints.

| models | where they find the functions |
|---|---|
| Ring, Ling (Bailing MoE linear 2.0 and 2.5) | in a dict, `lightning_attn_ops`; slopes are passed as `g`, expanded |
| MiniCPM-SALA | under their names in a method of the module, with slopes as `g_gamma` |

`replace` puts `fulmen.integrations.fla`'s functions there; all else stays the module's own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fulmen.integrations.fla import chunk_simple_gla
from fulmen.integrations.transformers import packing
from fulmen.integrations.transformers.forward import set_method, with_names

NAMES = {"chunk_simple_gla", "fused_recurrent_simple_gla"}
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")


def matches(module: nn.Module) -> bool:
    """Whether the module calls fla's functions for simple GLA, from a dict of its own or by their names."""
    functions = getattr(module, "lightning_attn_ops", None)
    if isinstance(functions, dict) and bool(functions) and all(map(callable, functions.values())):
        return True
    return all(hasattr(module, name) for name in PARTS) and bool(_calling(module))


def unsupported_reason(module: nn.Module) -> str | None:
    """Why the layer cannot be served, or None."""
    slope = getattr(module, "slope", None)
    if hasattr(module, "lightning_attn_ops") and (not isinstance(slope, Tensor) or slope.ndim != 1):
        return "it has no buffer `slope` with one slope for each head"
    return None


def _calling(module: nn.Module) -> dict[str, Any]:
    """The methods of the module that call fla's functions by name."""
    methods = inspect.getmembers(type(module), inspect.isfunction)
    return {name: f for name, f in methods if NAMES & set(f.__code__.co_names) & f.__globals__.keys()}


def replace(module: Any, backend: str) -> list[Callable[[], None]]:
    """Serves the layer; returns what undoes it."""
    chunk = functools.partial(chunk_simple_gla, backend=backend)
    before = getattr(module, "lightning_attn_ops", None)
    if before is not None:
        module.lightning_attn_ops = dict.fromkeys(before, chunk)
        return [functools.partial(setattr, module, "lightning_attn_ops", before)]
    undo = []
    for name, method in _calling(module).items():
        served = types.MethodType(with_names(method, dict.fromkeys(NAMES, chunk)), module)
        undo.append(set_method(module, name, served))
    return undo


def refuse_packed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of the model, whose linear layers are not told of packed sequences.

    Synchronises where `position_ids` are on a GPU, as `packing.announce` does, and in prompts with a cache.
    """
    given = packing.by_name(module, args, kwargs)
    positions, offsets = given.get("position_ids"), given.get("cu_seq_lens_q")
    name = None
    if offsets is not None and len(offsets) > 2:
        name = "cu_seq_lens_q"
    elif given.get("attention_mask") is None and positions is not None and packing.starts_of(positions) is not None:
        name = "position_ids"
    if name is not None:
        raise NotImplementedError(
            f"{name} packs several sequences in a row, which this model's linear layers would mix: pad them instead"
        )
