"""Numbers and choices among the arguments of layers, of a Rotary and of caches: what is none of them raises by name."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from typing import Any

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def whole(name: str, value: Any, low: int | None = 1, high: int | None = None) -> int:
    """An int, or what stands for one, as numpy's do; a bool does not."""
    found = value
    if not isinstance(value, int):
        with contextlib.suppress(TypeError):
            found = operator.index(value)
    if (
        not isinstance(found, int)
        or isinstance(found, bool)
        or (low is not None and found < low)
        or (high is not None and found > high)
    ):
        limits = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
        raise ValueError(f"{name}={value!r}: must be an int{limits}")
    return found


def number(name: str, value: Any, zero: bool = False) -> float:
    """A positive finite number, or 0 where `zero` allows it."""
    found = float(value) if not isinstance(value, bool) and isinstance(value, numbers.Real) else math.nan
    if not (0 < found < math.inf or (zero and found == 0)):
        raise ValueError(f"{name}={value!r}: must be {'0 or ' if zero else ''}a positive finite number")
    return found


def choice(name: str, value: Any, *allowed: Any) -> Any:
    """One of `allowed`, of its type, too: 1 is not True."""
    if not any(isinstance(value, type(a)) and value == a for a in allowed):
        *others, last = map(repr, allowed)
        raise ValueError(f"{name}={value!r}: must be {', '.join(others)} or {last}")
    return value


def flag(name: str, value: Any) -> bool:
    return choice(name, value, False, True)


def factory(device: Any, dtype: Any) -> dict[str, Any]:
    """Where and of what dtype a layer makes its parameters."""
    if dtype is not None:
        choice("dtype", dtype, *DTYPES)
    return {"device": device, "dtype": dtype}
