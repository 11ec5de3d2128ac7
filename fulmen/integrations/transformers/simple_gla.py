"""The linear layers of Ring and Ling (Bailing MoE linear 2.0 and 2.5), whose code comes with their checkpoints.

Their attention module keeps the functions of fla it calls in a dict, `lightning_attn_ops`, and passes its slopes as
`g`, one number for each head that is expanded over batch and tokens:

    o, state = self.lightning_attn_ops[mode](q=q, k=k, v=v, g=self.slope[None, None].expand(B, N, H), ...)

`replace` puts `simple_gla` there; projections, norms, RoPE and the cache stay the module's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fulmen.integrations.transformers import packing
from fulmen.lightning.op import lightning_attention_with_state


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
    module.lightning_attn_ops = dict.fromkeys(before, functools.partial(simple_gla, backend=backend))

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


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """fla's `chunk_simple_gla` for decay that is constant: q, k, v (B, N, H, D) to o (B, N, H, E), and the state.

    g        log decay (B, N, H), expanded from one number for each head; g_gamma is these numbers (H,).
    """
    if g is not None:
        if g.ndim != 3 or any(s != 0 for s, n in zip(g.stride()[:2], g.shape[:2], strict=True) if n > 1):
            raise NotImplementedError("g is a decay of its own for each token: only one for each head is served")
        g_gamma = g[0, 0]
    decay = None if g_gamma is None else -g_gamma.to(torch.float32)
    if initial_state is not None:
        initial_state = initial_state.to(torch.promote_types(q.dtype, torch.float32))
    o, state = lightning_attention_with_state(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), decay, initial_state=initial_state,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int32), backend=backend,
    )  # fmt: skip
    return o.transpose(1, 2), state if output_final_state else None
