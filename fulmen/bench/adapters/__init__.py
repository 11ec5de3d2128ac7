"""How the benchmark speaks to an operation: one module an operation, named after it, with these verbs.

    KEYS                                 what a case says, with defaults; None: derived by `complete`
    complete(case)                       the case with everything filled in
    function(case)                       what is computed, in words
    problem(case, device, seed)          the timed arguments (`gate.Problem`), compared in part
    small(case, device, seed, fully)     an odd shape with the case's options, compared wholly; `fully` with the states
    attend(backend), attend_fully(...)   our implementation as it is timed, and with every output it has
    refuses(case, device, backend)       None, or why the backend cannot
    chosen(case, device, backend)        what "auto" takes
    launches(case, hw, backend, pass_, fully)
                                         our kernels' launches of a call, to compile them and ask what they take
    floors(case)                         bytes of inputs, output and gradients
    BACKENDS_OF                          the operation whose backends it takes, where that is another

A new operation is a file here and one in `suites/`.
"""

from __future__ import annotations

import importlib
import math
import random
from typing import Any

import torch

from fulmen import dispatch
from fulmen.bench.cases import DTYPES

ODD_TOKENS = 333  # no multiple of any tile


def of(op: str) -> Any:
    return importlib.import_module(f"fulmen.bench.adapters.{op}")


def ops() -> list[str]:
    from importlib import resources

    names = (f.name for f in resources.files("fulmen.bench.adapters").iterdir())
    return sorted(n.removesuffix(".py") for n in names if n.endswith(".py") and not n.startswith("_"))


def backends_of(op: str) -> str:
    """The operation of the registry whose backends serve it."""
    return getattr(of(op), "BACKENDS_OF", op) if op in ops() else op


def dtype_of(case: dict[str, Any]) -> torch.dtype:
    name = DTYPES.get(case["dtype"], case["dtype"])
    if name not in DTYPES.values():
        raise ValueError(f"dtype={case['dtype']}: must be one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def wrong_value(op: str, case: dict[str, Any]) -> str | None:
    """What of a case is no value of its kind: sizes are whole numbers above 0, options yes or no."""
    usual = of(op).KEYS
    for key, value in case.items():
        if key == "dtype":
            if value != "auto" and DTYPES.get(value, value) not in DTYPES.values():
                return f"dtype={value}: must be one of {', '.join(DTYPES)}"
        elif key == "grad" or isinstance(usual[key], bool):
            if not isinstance(value, bool):
                return f"{key}={value}: must be yes or no"
        elif isinstance(usual[key], str):
            if not isinstance(value, str):
                return f"{key}={value}: must be a name"
        elif value is not None and (type(value) is not int or (value < 1 and value != usual[key])):
            return f"{key}={value}: must be a whole number above 0"
    return None


def refusal(op: str, spec: Any, backend: str) -> str | None:
    """Why that backend cannot; the others are not asked, since to answer one may have to compile."""
    kernel = dispatch.kernels(op).get(backend)
    if kernel is None:
        return dispatch._missing[op].get(backend, f"there is no backend {backend!r}")
    return kernel.supports(spec)


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Drawn on the generator's device: at the sizes that are timed the CPU would take longer than all the rest."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(dtype)


def small_case(case: dict[str, Any]) -> dict[str, Any]:
    """The shape of the gate: an odd length, few heads, as many of them to a head of k and v as in the case."""
    few = {"B": 2, "H": 2 * (case["H"] // case["H_KV"]), "H_KV": 2, "N": min(ODD_TOKENS, case["N"] | 1)}
    return case | few | ({"N_Q": min(few["N"], case["N_Q"])} if "N_Q" in case else {})


def head_of(seed: int, batches: int, heads: int) -> tuple[int, int]:
    """The batch and the head of k and v whose results of a timed shape are compared: nobody knows which."""
    at = random.Random(seed).randrange(batches * heads)
    return at // heads, at % heads


def shapes(case: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Of q, k, v and o."""
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    N_Q = case.get("N_Q", N)
    return (B, H, N_Q, D), (B, H_KV, N, D), (B, H_KV, N, E), (B, H, N_Q, E)


def size_of(dtype: torch.dtype, *shapes: tuple[int, ...]) -> int:
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize
