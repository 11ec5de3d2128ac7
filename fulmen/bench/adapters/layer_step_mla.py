"""A decoding step of a latent attention layer, for the benchmark; the package describes the names.

D = E + what RoPE turns; `rank` and `q_rank` are the sizes of the latents of keys and of queries.
"""

from __future__ import annotations

from typing import Any

import torch

from fulmen.bench import adapters
from fulmen.bench.adapters import Call, _layer_step, latent
from fulmen.latent.spec import LatentSpec
from fulmen.layers import MultiHeadLatentAttention

BACKENDS_OF = "latent"
KEYS = _layer_step.KEYS | {"H": 32, "H_KV": None, "D": 192, "E": 128, "hidden": None, "rank": 512, "q_rank": 1536}
SMALL_RANKS = {"rank": 64, "q_rank": 48}
attend = _layer_step.attend


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    if done["H_KV"] not in (None, done["H"]) or not done["E"] < done["D"]:
        raise ValueError(
            f"H_KV={done['H_KV']} must be H, and E={done['E']} less than D={done['D']}, by what RoPE turns"
        )
    return _layer_step.check(done | {"H_KV": done["H"]})


def function(case: dict[str, Any]) -> str:
    return "a decoding step of a latent attention layer, softmax attention"


def small_case(case: dict[str, Any]) -> dict[str, Any]:
    return complete(adapters.small_case(case) | SMALL_RANKS)


def made(case: dict[str, Any], device: torch.device, dtype: torch.dtype) -> MultiHeadLatentAttention:
    E, turned = case["E"], case["D"] - case["E"]
    sizes = {"kv_rank": case["rank"], "q_rank": case["q_rank"], "nope_dim": E, "rope_dim": turned, "value_dim": E}
    return MultiHeadLatentAttention(case["hidden"], case["H"], **sizes, absorb=True, device=device, dtype=dtype)


problem, small = _layer_step.problems(made, small_case)


def attend_fully(backend: str) -> None:
    return None


def within(case: dict[str, Any]) -> dict[str, Any]:
    """The call of `latent_attention` over the pool."""
    sizes = {"H_KV": 1, "D": case["rank"] + case["D"] - case["E"], "E": case["rank"]}
    return latent.complete({key: case[key] for key in latent.KEYS if key in case} | sizes)


def spec(case: dict[str, Any], device: torch.device) -> LatentSpec:
    return latent.spec(within(case), device)


def without_data(case: dict[str, Any], fully: bool) -> Call:
    return latent.without_data(within(case), fully)
