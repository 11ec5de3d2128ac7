"""The cache of a model with lightning layers: MiniMax's own class, with lengths, beams and static memory right.

transformers keeps keys and values in `layers` and states in `linear_cache`. Its class asks layer 0 how many tokens it
holds, which is none if that is a lightning layer, and leaves the states behind when beams are reordered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen.integrations.transformers.packing import by_name, will_cache


class States:
    """What is put before MiniMaxCache.

    max_length  None: the cache grows. Else all memory keeps its place, for torch.compile and CUDA graphs, and
                `num_layers` is how many layers the model has.
    """

    layers: list[Any]
    linear_cache: list[Any]
    static = False

    def __init__(self, max_length: int | None = None, num_layers: int = 0) -> None:
        super().__init__()
        if max_length is not None:
            make = importlib.import_module("transformers.cache_utils").StaticLayer
            self.static, self.layer_class_to_replicate = True, None
            self.layers = [make(max_length) for _ in range(num_layers)]

    def _with_keys(self) -> Any:
        """The first layer that holds keys, or None."""
        return next((layer for layer in self.layers if layer.is_initialized), None)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        layer = self._with_keys()
        return 0 if layer is None else layer.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        layer = self._with_keys() or (self.layers[0] if self.static else None)
        return (query_length, 0) if layer is None else layer.get_mask_sizes(query_length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with these at their end."""
        layer = self.layers[layer_idx] if self.static else None
        if layer is None or not layer.is_initialized or key_states.shape[2] != 1:
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[misc]
            return found
        at = layer.cumulative_length.view(1)  # of one token: no positions to compute
        layer.keys.index_copy_(2, at, key_states)
        layer.values.index_copy_(2, at, value_states)
        layer.cumulative_length.add_(1)
        return layer.keys, layer.values

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        state = self.linear_cache[layer_idx] if layer_idx < len(self.linear_cache) else None
        return state if isinstance(state, Tensor) else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        held = self.get_linear_cache(layer_idx) if self.static else None
        if held is None:
            if self.static and not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(linear_cache)
            super().set_linear_cache(layer_idx, linear_cache)  # type: ignore[misc]
        elif held is not linear_cache:
            held.copy_(linear_cache)

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        for index, state in enumerate(self.linear_cache):
            if isinstance(state, Tensor):
                if self.static:
                    state.copy_(change(state))
                else:
                    self.linear_cache[index] = change(state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._change_states(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse_other_rows()
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)
        self._change_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse_other_rows()
        for layer in self.layers:
            layer.batch_select_indices(indices)
        self._change_states(lambda state: state[indices])

    def _refuse_other_rows(self) -> None:
        if self.static:
            raise NotImplementedError("a static cache keeps its number of rows: make another one with new_cache()")

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        if self.static:
            self._change_states(torch.zeros_like)
        else:
            self.linear_cache = []


def check_states(states: Tensor, rows: int, heads: int) -> None:
    """Raises unless a cache's states (B, heads, ...) are of so many."""
    if states.shape[:2] != (rows, heads):
        raise ValueError(
            f"the cache holds the states of {states.shape[0]} rows and {states.shape[1]} heads, and this call has "
            f"{rows} rows and {heads} heads: start with a new cache"
        )


_types: dict[str, Any] = {}


def cache_type(modeling: str) -> Any:
    """The class, derived from MiniMaxCache of that module of transformers."""
    if modeling not in _types:
        bases = (States, importlib.import_module(modeling).MiniMaxCache)
        _types[modeling] = type("HybridCache", bases, {"__doc__": States.__doc__})
    return _types[modeling]


def bring(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook of the model: a cache of this kind where it would make its own, or was given its own."""
    named = by_name(module, args, kwargs)
    given, derived = named.get("past_key_values"), cache_type(type(module).__module__)
    if type(given) is derived.__bases__[1]:
        given.__class__ = derived  # the same object, which the caller goes on with
    elif given is None and will_cache(module, named):
        args, kwargs = (args, kwargs) if len(args) < 2 else ((), named)
        return args, {**kwargs, "past_key_values": derived()}
    return args, kwargs
