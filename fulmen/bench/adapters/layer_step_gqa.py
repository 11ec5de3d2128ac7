"""A decoding step of a grouped-query attention layer with RoPE, for the benchmark; the package describes the names."""

from __future__ import annotations

from typing import Any

import torch

from fulmen.bench import adapters
from fulmen.bench.adapters import Call, _layer_step, flash_cache
from fulmen.flash.spec import FlashSpec
from fulmen.layers import GroupedQueryAttention

BACKENDS_OF = "flash"
KEYS = _layer_step.KEYS | {"H": 32, "H_KV": 8, "D": 128, "E": None, "hidden": None}
attend = _layer_step.attend


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    if done["E"] not in (None, done["D"]):
        raise ValueError(f"E={done['E']}: must be D={done['D']}")
    return _layer_step.check(done)


def function(case: dict[str, Any]) -> str:
    return "a decoding step of a grouped-query attention layer, softmax attention"


def small_case(case: dict[str, Any]) -> dict[str, Any]:
    return complete(adapters.small_case(case))


def made(case: dict[str, Any], device: torch.device, dtype: torch.dtype) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        case["hidden"], case["H"], case["H_KV"], head_dim=case["D"], rope={}, causal=True, device=device, dtype=dtype
    )


problem, small = _layer_step.problems(made, small_case)


def attend_fully(backend: str) -> None:
    return None


def within(case: dict[str, Any]) -> dict[str, Any]:
    """The call of `flash_attention` over the pool."""
    return flash_cache.complete({key: case[key] for key in flash_cache.KEYS if key in case})


def spec(case: dict[str, Any], device: torch.device) -> FlashSpec:
    return flash_cache.spec(within(case), device)


def without_data(case: dict[str, Any], fully: bool) -> Call:
    return flash_cache.without_data(within(case), fully)
