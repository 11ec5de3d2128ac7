"""A decoding step of a lightning layer (preset minimax), for the benchmark; the package describes the names."""

from __future__ import annotations

from typing import Any

import torch

from fulmen.bench import adapters
from fulmen.bench.adapters import Call, _layer_step, step
from fulmen.layers import LightningAttention
from fulmen.step.spec import StepSpec

BACKENDS_OF = "step"
KEYS = _layer_step.KEYS | {"N": 1, "H": 32, "H_KV": None, "D": 128, "E": None, "hidden": None, "gate": True}
KEYS |= {"state_dtype": "float32"}
attend = _layer_step.attend


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    if done["state_dtype"] not in ("float32", "fp32"):
        raise ValueError(f"state_dtype={done['state_dtype']}: must be fp32, that of a layer's pool")
    return _layer_step.check(done | {"H_KV": done["H_KV"] or done["H"], "state_dtype": "float32"})


def function(case: dict[str, Any]) -> str:
    return "a decoding step of a lightning layer, linear attention with decay"


def small_case(case: dict[str, Any]) -> dict[str, Any]:
    return complete(adapters.small_case(case))


def made(case: dict[str, Any], device: torch.device, dtype: torch.dtype) -> LightningAttention:
    sizes = {"num_kv_heads": case["H_KV"], "head_dim": case["D"], "value_dim": case["E"]}
    return LightningAttention(case["hidden"], case["H"], **sizes, gate=case["gate"], device=device, dtype=dtype)


problem, small = _layer_step.problems(made, small_case)


def attend_fully(backend: str) -> None:
    return None


def within(case: dict[str, Any]) -> dict[str, Any]:
    """The call of `lightning_step`."""
    return step.complete({key: case[key] for key in step.KEYS if key in case} | {"N": 1})


def spec(case: dict[str, Any], device: torch.device) -> StepSpec:
    return step.spec(within(case), device)


def without_data(case: dict[str, Any], fully: bool) -> Call:
    return step.without_data(within(case), fully)
