"""Softmax attention for the benchmark; the package describes the names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulmen.bench.adapters import Call, Heads, dtype_of, empty, makers, normal, shapes, small_case
from fulmen.bench.gate import Problem
from fulmen.flash.op import flash_attention, flash_attention_with_lse
from fulmen.flash.spec import FlashSpec, Residuals
from fulmen.testing import Expected
from fulmen.testing import flash as testing

KEYS: dict[str, Any] = {
    "B": 1, "H": 8, "H_KV": None, "N": 1024, "N_Q": None, "D": 64, "E": None, "dtype": "auto", "causal": True,
}  # fmt: skip
LAST_QUERIES = 512  # what is checked of a timed shape whose attention matrix does not fit
MATRICES = 16  # fp64 (N, N) alive at once while a gradient is checked


def complete(case: dict[str, Any]) -> dict[str, Any]:
    """A case has N_Q only where it differs from N, the number of keys."""
    done = KEYS | case
    if done["N_Q"] in (None, done["N"]):
        del done["N_Q"]
    return done | {"H_KV": done["H_KV"] or done["H"], "E": done["E"] or done["D"]}


def function(case: dict[str, Any]) -> str:
    return "causal softmax attention" if case["causal"] else "softmax attention"


def drawn(
    case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, do = (normal(shape, dtype_of(case), generator) for shape in shapes(case))
    dlse = normal(q.shape[:3] if fully else (0,), torch.promote_types(q.dtype, torch.float32), generator)
    x = testing.Inputs(q, k, v, None, None, None, case["causal"], None, None, None, do, dlse)
    return as_problem(x, ("o", "lse") if fully else ("o",), one_head)


def as_problem(x: testing.Inputs, use: tuple[str, ...], one_head: int | None = None) -> Problem:
    leaves = {name: getattr(x, name).requires_grad_() for name in ("q", "k", "v")}
    x = x._replace(**leaves)
    heads = Heads.of(x.q, x.k, one_head)
    matrices = MATRICES * heads.group * x.q.shape[2] * x.k.shape[2] * 8
    if one_head is not None and matrices > free_bytes(x.q.device) // 2:
        heads = heads._replace(last=LAST_QUERIES)

    def expected() -> dict[str, Expected]:
        part: dict[str, Any] = {name: heads.pick(name, getattr(x, name)).detach() for name in ("q", "k", "v", "do")}
        part["dlse"] = x.dlse if x.dlse.numel() else part["q"].new_zeros(part["q"].shape[:3], dtype=x.dlse.dtype)
        found = testing.expected(x._replace(**part), use)
        kept = {"o"} if heads.last else set(found) - (set() if "lse" in use else {"lse"})
        return {name: wanted for name, wanted in found.items() if name in kept}

    douts = {"o": x.do, "lse": x.dlse}
    return Problem(x, leaves, {name: douts[name] for name in use}, expected, pick=heads.pick)


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 8 << 30
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, and free
    return torch.cuda.mem_get_info(device)[0] + kept


problem, small = makers(drawn, small_case)


def attend(backend: str) -> Callable[[testing.Inputs], Tensor]:
    return lambda x: flash_attention(x.q, x.k, x.v, causal=x.causal, backend=backend)


def attend_fully(backend: str) -> Callable[[testing.Inputs], tuple[Tensor, Tensor]] | None:
    if backend in ("sdpa", "flash_attn", "auto"):  # no gradient of lse; what auto takes is gated under its own name
        return None
    return lambda x: flash_attention_with_lse(x.q, x.k, x.v, causal=x.causal, backend=backend)


def spec(case: dict[str, Any], device: torch.device) -> FlashSpec:
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    call = FlashSpec(B, H, H_KV, case.get("N_Q", N), N, D, E, dtype_of(case), device, D**-0.5)
    return call._replace(right=0 if case["causal"] else None, needs_grad=bool(case.get("grad", True)))


def without_data(case: dict[str, Any], fully: bool) -> Call:
    q, k, v, do = empty(case)
    call = spec(case, q.device)._replace(with_lse=fully)
    return call, Residuals(q, k, v), lambda o, lse: (o, lse, do, lse if fully else None)
