"""The linear layers of Ring and Ling (Bailing MoE linear 2.0 and 2.5), whose code comes with their checkpoints.

Their attention module keeps the functions of fla it calls in a dict, `lightning_attn_ops`, and passes its slopes as
`g`, one number for each head that is expanded over batch and tokens:

    o, state = self.lightning_attn_ops[mode](q=q, k=k, v=v, g=self.slope[None, None].expand(B, N, H), ...)

`replace` puts `fulmen.integrations.fla.chunk_simple_gla` there; all else stays the module's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fulmen.integrations.fla import chunk_simple_gla
from fulmen.integrations.transformers import packing


def matches(module: nn.Module) -> bool:
    """Whether the module calls fla's functions for simple gated linear attention from a dict of its own."""
    functions = getattr(module, "lightning_attn_ops", None)
    return isinstance(functions, dict) and bool(functions) and all(map(callable, functions.values()))


def unsupported_reason(module: nn.Module) -> str | None:
    """Why the layer cannot be served, or None."""
    slope = getattr(module, "slope", None)
    if not isinstance(slope, Tensor) or slope.ndim != 1:
        return "it has no buffer `slope` with one slope for each head"
    return None


def replace(module: Any, backend: str) -> Callable[[], None]:
    """Serves the layer; returns what undoes it."""
    before = module.lightning_attn_ops
    module.lightning_attn_ops = dict.fromkeys(before, functools.partial(chunk_simple_gla, backend=backend))

    def undo() -> None:
        module.lightning_attn_ops = before

    return undo


def refuse_packed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of the model, whose linear layers are not told of packed sequences."""
    packing.announce(module, args, kwargs)
    if getattr(kwargs.get("position_ids"), packing.NAME, None) is not None:
        raise NotImplementedError(
            "position_ids pack several sequences in a row, which this model's linear layers would mix: pad them instead"
        )
