"""Operations as the benchmark sees them: one module each, named after the operation, with these names.

    KEYS                               the keys of a case with their defaults; None: derived by `complete`
    complete(case)                     the case with every key filled in
    function(case)                     what is computed, in words
    problem(case, device, seed)        arguments of the timed shape (`gate.Problem`), compared in part
    small(case, device, seed, fully)   an odd shape with the case's options, compared whole; `fully`: with states or lse
    attend(backend)                    our implementation as it is timed
    attend_fully(backend)              the same with every output it has; None: it has no more
    small_case(case)                   the case of `small`
    spec(case, device)                 what the backends are asked about
    without_data(case, fully)          a `Call` that records the launches of our kernels
    BACKENDS_OF                        the operation whose backends serve it, where that is another; or a case -> it

A new operation is a module here and a suite.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import torch

from fulmen import dispatch
from fulmen.bench.cases import DTYPES, odd_heads

ODD_TOKENS = 333  # no multiple of any tile
Call = tuple[Any, Any, Callable[..., tuple[Any, ...]]]  # spec, residuals; forward's results -> backward's arguments


def of(op: str) -> Any:
    if op not in ops():
        raise ValueError(f"op = {op!r}: must be one of {', '.join(ops())}")
    return importlib.import_module(f"fulmen.bench.adapters.{op}")


def ops() -> list[str]:
    names = (f.name for f in resources.files("fulmen.bench.adapters").iterdir())
    return sorted(n.removesuffix(".py") for n in names if n.endswith(".py") and not n.startswith("_"))


def backends_of(op: str, case: dict[str, Any]) -> str:
    """The operation of the registry whose backends serve a case of `op`."""
    named = getattr(of(op), "BACKENDS_OF", op)
    return str(named(case) if callable(named) else named)


# ------------------------------------------------------------------------------------------------------- cases


def keys_of(op: str) -> list[str]:
    return [*of(op).KEYS, "grad"]


def check(op: str, case: dict[str, Any]) -> None:
    """Raises ValueError for a key that `op` does not have, and for a value that its key cannot have."""
    if unknown := sorted(set(case) - set(keys_of(op))):
        raise ValueError(f"{op} has no {', '.join(unknown)}; a case says {', '.join(of(op).KEYS)}")
    for key, value in case.items():
        usual = (of(op).KEYS | {"grad": True})[key]
        if key == "dtype":
            right, words = DTYPES.get(value, value) in ("auto", *DTYPES.values()), f"one of {', '.join(DTYPES)}"
        elif isinstance(usual, bool):
            right, words = isinstance(value, bool), "yes or no"
        elif isinstance(usual, str):
            right, words = isinstance(value, str), "a name"
        else:
            right = value is None or (type(value) is int and (value > 0 or value == usual))
            words = "a whole number above 0"
        if not right:
            raise ValueError(f"{key}={value}: must be {words}")
    if why := odd_heads(case):
        raise ValueError(why)


def complete(op: str, case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The case, checked, with every key filled in; dtype "auto" is fp32 on a CPU and bf16 on a GPU."""
    check(op, case)
    full: dict[str, Any] = of(op).complete(case)
    usual = "float32" if device.type == "cpu" else "bfloat16"
    return full | {"dtype": usual if full["dtype"] == "auto" else DTYPES.get(full["dtype"], full["dtype"])}


def small_case(case: dict[str, Any]) -> dict[str, Any]:
    """The shape of the gate: an odd length and few heads, as many to a head of k and v as in the case."""
    few = {"B": 2, "H": 2 * (case["H"] // case["H_KV"]), "H_KV": 2, "N": min(ODD_TOKENS, case["N"] | 1)}
    return case | few | ({"N_Q": min(few["N"], case["N_Q"])} if "N_Q" in case else {})


def makers(drawn: Callable[..., Any], small_case: Callable[..., Any]) -> tuple[Any, Any]:
    """`problem` and `small` of an operation whose problems are `drawn(case, device, seed, fully, one_head)`.

    one_head  the seed that draws the head which is compared; None: all are
    """

    def problem(case: dict[str, Any], device: torch.device, seed: int) -> Any:
        return drawn(case, device, seed, one_head=seed)

    def small(case: dict[str, Any], device: torch.device, seed: int, fully: bool = False) -> Any:
        return drawn(small_case(case), device, seed, fully)

    return problem, small


def dtype_of(case: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPES.get(case["dtype"], case["dtype"]))
    return dtype


def shapes(case: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Of q, k, v and o."""
    B, H, H_KV, N, D, E = (case[key] for key in ("B", "H", "H_KV", "N", "D", "E"))
    N_Q = case.get("N_Q", N)
    return (B, H, N_Q, D), (B, H_KV, N, D), (B, H_KV, N, E), (B, H, N_Q, E)


def empty(case: dict[str, Any]) -> list[torch.Tensor]:
    """q, k, v and o without data."""
    return [torch.empty(shape, dtype=dtype_of(case), device="meta") for shape in shapes(case)]


# ---------------------------------------------------------------------------------------------------- backends


def refuses(op: str, case: dict[str, Any], device: torch.device, backend: str) -> str | None:
    """None, or why that backend cannot; the others are not asked, since to answer one may have to compile."""
    if backend == "auto":
        return None
    registered = backends_of(op, case)
    kernel = dispatch.kernels(registered).get(backend)
    if kernel is None:
        return dispatch._missing[registered].get(backend, f"there is no backend {backend!r}")
    return kernel.supports(of(op).spec(case, device))


def chosen(op: str, case: dict[str, Any], device: torch.device, backend: str) -> str:
    """What "auto" takes, with its kernel where the backend has several."""
    registered, spec = backends_of(op, case), of(op).spec(case, device)
    choice = dispatch.choose(registered, spec, dispatch.pick(registered, spec, backend).name)
    return choice.backend if choice.kernel == choice.backend else f"{choice.backend} ({choice})"


# ------------------------------------------------------------------------------------------------------ inputs


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Drawn on the generator's device: at the timed sizes the CPU would take longer than all the rest."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(dtype)


class Heads(NamedTuple):
    """The part of a call that is compared: all of it, or one head of k and v with its queries, or the last of those."""

    batch: int
    head: int
    group: int
    whole: bool
    last: int | None = None  # queries
    shared: tuple[str, ...] = ("k", "v", "dk", "dv")

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, seed: int | None) -> Heads:
        """`seed` draws the head, so that nobody knows which; None: the whole call."""
        batch, head = divmod(random.Random(seed).randrange(max(1, k.shape[0] * k.shape[1])), k.shape[1])
        return cls(batch, head, q.shape[1] // k.shape[1], seed is None)

    def pick(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.whole:
            return x
        each = 1 if name in self.shared else self.group
        part = x[self.batch : self.batch + 1, self.head * each : (self.head + 1) * each]
        return part[:, :, -self.last :] if self.last and name in ("q", "o", "do") else part
