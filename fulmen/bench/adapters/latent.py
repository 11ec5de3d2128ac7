"""Latent attention over a cache for the benchmark; the package describes the names.

N is the cache's capacity. All rows of the timed shape are that long, those of the small one have lengths of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen.bench.adapters import ODD_TOKENS, Call, Heads, dtype_of, makers, normal
from fulmen.bench.gate import Problem
from fulmen.latent.op import latent_attention
from fulmen.latent.spec import LatentSpec, Residuals
from fulmen.testing import Expected
from fulmen.testing import latent as testing

KEYS: dict[str, Any] = {
    "B": 8, "H": 128, "H_KV": 1, "N": 8192, "N_Q": 1, "D": 576, "E": 512, "dtype": "auto", "causal": True,
    "grad": False,
}  # fmt: skip


def complete(case: dict[str, Any]) -> dict[str, Any]:
    done = KEYS | case
    if done["H_KV"] != 1:
        raise ValueError(f"H_KV={done['H_KV']}: all heads read one latent, so it must be 1")
    if done["E"] > done["D"]:
        raise ValueError(f"E={done['E']}: values are the first columns of keys, so it must be at most D={done['D']}")
    if done["grad"]:
        raise ValueError("grad=yes: latent attention has no gradient")
    return done


def function(case: dict[str, Any]) -> str:
    return "softmax attention over a latent cache"


def small_case(case: dict[str, Any]) -> dict[str, Any]:
    return case | {"B": 3, "N": min(ODD_TOKENS, case["N"] | 1)}


def drawn(
    case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    B, H, N, N_Q, D, E = (case[key] for key in ("B", "H", "N", "N_Q", "D", "E"))
    q, kv, o = (normal(shape, dtype_of(case), generator) for shape in ((B, H, N_Q, D), (B, N, D), (B, H, N_Q, E)))
    lengths = lengths_of(case, one_head is None, generator)
    x = testing.Inputs(q, kv, E, lengths, None, None, case["causal"], None)
    heads = Heads.of(q, kv[:, None], one_head)  # of the timed shape one row, whose heads share its keys

    def expected() -> dict[str, Expected]:
        at = slice(None) if heads.whole else slice(heads.batch, heads.batch + 1)
        part = x._replace(q=q[at], kv=kv[at], kv_lengths=lengths[at])
        return {"o": Expected(testing.low_precision(part), testing.reference(part))}

    return Problem(x, {}, {"o": o}, expected, {"q": q, "kv": kv, "kv_lengths": lengths}, heads.pick)


def lengths_of(case: dict[str, Any], differ: bool, generator: torch.Generator) -> Tensor:
    """int32 (B,): the keys of each row of a cache of N, all of them or as many as the generator says."""
    least = 1 if differ else case["N"]
    lengths = torch.randint(least, case["N"] + 1, (case["B"],), generator=generator, device=generator.device)
    return lengths.int()


problem, small = makers(drawn, small_case)


def attend(backend: str) -> Callable[[testing.Inputs], Tensor]:
    return lambda x: latent_attention(x.q, x.kv, **x.options(), backend=backend)


def attend_fully(backend: str) -> None:
    return None


def spec(case: dict[str, Any], device: torch.device) -> LatentSpec:
    B, H, N, N_Q, D, E = (case[key] for key in ("B", "H", "N", "N_Q", "D", "E"))
    causal = case["causal"] and N_Q > 1
    return LatentSpec(B, H, N_Q, N, D, E, dtype_of(case), device, D**-0.5, causal, has_lengths=True, max_kv_length=N)


def without_data(case: dict[str, Any], fully: bool) -> Call:
    B, H, N, N_Q, D = (case[key] for key in ("B", "H", "N", "N_Q", "D"))
    q, kv = (torch.empty(shape, dtype=dtype_of(case), device="meta") for shape in ((B, H, N_Q, D), (B, N, D)))
    lengths = torch.empty(B, dtype=torch.int32, device="meta")
    return spec(case, q.device), Residuals(q, kv, lengths), lambda o: ()
