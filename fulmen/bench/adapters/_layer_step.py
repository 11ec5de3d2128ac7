"""A decoding step of a whole layer on a pool: what the operations `layer_step_*` share.

The call is layer(x, cache=pool) for the last of N tokens of every row. The benchmark repeats it, so it must change no
bit: that token's keys, values or latents are in the pool already, and states belong to `Sequences(drafts=True)` with
nothing accepted, so that a call reads and writes them and they stay as they are.

Results are compared with the same step of the same layer on a CPU, in fp64 and, for the tolerance, in its own dtype: of
all rows, or of one row of the timed shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulmen.bench.adapters import dtype_of, makers, normal
from fulmen.bench.adapters.layer import filled
from fulmen.bench.gate import Problem
from fulmen.layers import Sequence, Sequences
from fulmen.testing import Expected

KEYS: dict[str, Any] = {"B": 1, "N": 8192, "N_Q": 1, "page": 64, "dtype": "auto", "causal": True, "grad": False}
Make = Callable[[dict[str, Any], torch.device, torch.dtype], Any]  # case, device, dtype -> the layer


class Inputs(NamedTuple):
    x: Tensor
    layer: nn.Module
    pool: Any


def check(done: dict[str, Any]) -> dict[str, Any]:
    if done["N_Q"] != 1 or not done["causal"] or done["grad"]:
        raise ValueError("N_Q, causal and grad: a step of a layer is of one token, causal, and has no gradient")
    return done | {"E": done["E"] or done["D"], "hidden": done["hidden"] or done["H"] * (done["E"] or done["D"])}


def served(case: dict[str, Any], B: int, device: torch.device) -> tuple[Sequences, list[Sequence]]:
    """B sequences of N tokens, of which the layers compute the last."""
    N, page = case["N"], case["page"]
    sequences = Sequences(B, N, pages=B * -(-N // page), page_size=page, slots=B, drafts=True, device=device)
    rows = [sequences.new() for _ in range(B)]
    if N > 1:
        sequences.step(rows, N - 1)
        for row in rows:
            row.drafted = 0  # a short prompt, too, is in the states
    sequences.step(rows, 1)
    sequences.stepped = []  # a pool of states refuses a second call of the same step
    return sequences, rows


def places(row: Sequence, pool: Any) -> Any:
    """Where a sequence's tokens or state are in the pool's memory."""
    return row.pages if hasattr(pool, "at") else row.slot


def alone(make: Make, case: dict[str, Any], given: Inputs, rows: list[Sequence], b: int, dtype: torch.dtype) -> Tensor:
    """y (1, 1, hidden) of row b on the CPU in this dtype."""
    cpu = torch.device("cpu")
    layer = make(case, cpu, dtype)
    layer.load_state_dict({name: t.to(cpu, dtype) for name, t in given.layer.state_dict().items()})
    sequences, (row,) = served(case, 1, cpu)
    pool = layer.new_pool(sequences)
    for mine, theirs in zip(pool.memory, given.pool.memory, strict=True):
        mine[places(row, pool)] = theirs[places(rows[b], pool)].to(cpu, mine.dtype)
    y: Tensor = layer(given.x[b : b + 1].to(cpu, dtype), cache=pool)
    return y.to(given.x.device)


def problems(make: Make, small_case: Callable[[dict[str, Any]], dict[str, Any]]) -> tuple[Any, Any]:
    """`problem` and `small` of the layer that `make` makes."""

    def drawn(
        case: dict[str, Any], device: torch.device, seed: int, fully: bool = False, one_head: int | None = None
    ) -> Problem:
        generator, dtype, B = torch.Generator(device).manual_seed(seed), dtype_of(case), case["B"]
        layer = filled(make(case, device, dtype), generator)
        sequences, rows = served(case, B, device)
        x, do = (normal((B, 1, case["hidden"]), dtype, generator) for _ in range(2))
        given = Inputs(x, layer, layer.new_pool(sequences))  # type: ignore[operator]
        for t in given.pool.memory:
            t.copy_(torch.randn(t.shape, generator=generator, device=device))
        compared = list(range(B)) if one_head is None else [random.Random(one_head).randrange(B)]
        with torch.no_grad():
            layer(x, cache=given.pool)

        @torch.no_grad()
        def expected() -> dict[str, Expected]:
            kinds = (dtype, torch.float64)
            low, exact = (torch.cat([alone(make, case, given, rows, b, kind) for b in compared]) for kind in kinds)
            return {"o": Expected(low, exact)}

        constants = {"x": x, **dict(layer.named_parameters())}
        constants |= {f"memory {i}": t for i, t in enumerate(given.pool.memory)}
        return Problem(given, {}, {"o": do}, expected, constants, lambda name, y: y[compared])

    return makers(drawn, small_case)


def attend(backend: str) -> Callable[[Inputs], Tensor]:
    def step(given: Inputs) -> Tensor:
        y: Tensor = given.layer(given.x, cache=given.pool)
        return y

    return step
