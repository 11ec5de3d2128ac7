"""A kernel of your own, under the same gate and clock as ours: `verify_and_time(my_kernel, plain, inputs)`.

docs/bench.md has an example. The reference is evaluated in fp64 for the exact result and in the inputs' own
dtype for the tolerance: the kernel may err twice as much as that does on these or a few other inputs (gradients: three
times), plus one rounding. A kernel that fails gets no time.
"""

from __future__ import annotations

import functools
import inspect
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fulmen.bench import adapters, environment, schema
from fulmen.bench.cases import Line, Settings
from fulmen.bench.competitors import Competitor
from fulmen.bench.gate import YARDSTICKS, Formula, Problem
from fulmen.bench.group import Group
from fulmen.bench.timing import Timer

OP = "custom"


@dataclass
class Outcome:
    """One cell a pass. `ok`: all of them have a time; `reason`: why not."""

    cells: list[schema.Cell]

    @property
    def reason(self) -> str:
        return next((why for cell in self.cells if (why := why_not(cell))), "")

    @property
    def ok(self) -> bool:
        return all(cell.status == "ok" and not why_not(cell) for cell in self.cells)

    def __str__(self) -> str:
        lines = []
        for cell in self.cells:
            words = f"{cell.status}: {cell.reason}"
            if cell.status == "ok":
                s, flags = cell.stats, " ".join(f for f in cell.flags() if f != "UNAUDITED" or cell.op != OP)
                words = f"{s['median']:.4g} ms (95 %: {s['low']:.4g} to {s['high']:.4g}, {s['n']} samples)"
                words += f" {why_not(cell) or flags}"
            lines.append(f"{cell.pass_:<9}{words}".rstrip())
        return "\n".join(lines)


def why_not(cell: schema.Cell) -> str:
    impossible = (mark.get("why") for mark in cell.audit.get("flags", []) if mark.get("flag") == "IMPOSSIBLE")
    return cell.reason or next((f"impossible: {why}" for why in impossible), "")


def known_case(op: str, case: dict[str, Any] | None, x: Sequence[Any]) -> dict[str, Any]:
    """`case` with everything filled in, if it is one of `op` and of the arguments."""
    if op == OP:
        if case:
            raise ValueError(f"case={case} says how much work there is once op says of what: op='flash' or 'lightning'")
        return {}
    if op not in ("flash", "lightning"):
        raise ValueError(f"op={op!r}: must be 'flash' or 'lightning', or left out where it is neither")
    if not case:
        raise ValueError(f"op={op!r} needs case, the sizes: {{'B': 2, 'H': 4, 'N': 1024, 'D': 64}}")
    tensors = [t for t in x if isinstance(t, Tensor) and t.is_floating_point()]
    own = {"dtype": str(tensors[0].dtype).removeprefix("torch.")} if tensors else {}
    try:
        filled = adapters.complete(op, own | case, torch.device("cpu"))
    except ValueError as error:
        raise ValueError(f"case: {error}") from None
    shape = adapters.shapes(filled)[0]
    if all(t.numel() != math.prod(shape) for t in tensors):
        given = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(f"case says that q is {shape}, and no argument has as many numbers: {given}")
    return filled


def verify_and_time(
    fn: Callable[..., Any], reference: Callable[..., Any], inputs: Callable[..., Sequence[Any]], *, name: str = "",
    passes: Sequence[str] = ("forward", "backward", "total"), seconds: float = 1.0,
    samples: tuple[int, int] = (30, 100), case: dict[str, Any] | None = None, op: str = OP, function: str = "",
    seed: int | None = None,
) -> Outcome:  # fmt: skip
    """Proves `fn` right against `reference`, then times it.

    inputs    seed -> the arguments of a call; with a parameter `odd`, also those of an odd shape for the gate. Tensors
              that require grad have their gradients compared; without any, only the forward is measured.
    passes    of forward, backward and total; backward is timed directly, on a graph built outside.
    case, op  what sets the work ({"B": 4, "H": 32, "N": 1024, "D": 64, ...}) and "lightning" or "flash": with them the
              times are checked against the hardware's limits, too. Without a dtype it is that of the first tensor.
    """
    seed = secrets.randbits(31) if seed is None else seed
    takes_odd = "odd" in inspect.signature(inputs).parameters
    first = tuple(inputs(seed))
    try:
        names = [p for p in inspect.signature(fn).parameters if p not in ("args", "kwargs")]
    except (ValueError, TypeError):  # built in: nobody says what its parameters are called
        names = []
    if len(names) != len(first):
        names = [f"x{i}" for i in range(len(first))]
    known, formula = known_case(op, case, first), Formula(reference)

    def problem(at: int, **options: bool) -> Problem:
        x = tuple(inputs(at, **options))
        return formula.problem(x, x, names, at)

    small = functools.partial(problem, odd=True) if takes_odd else problem

    for other in range(YARDSTICKS):
        small(seed + 4 + other).expected()
    grad = bool(problem(seed).leaves)
    label = name or getattr(fn, "__name__", "kernel")
    words = function or f"as {getattr(reference, '__name__', 'the reference')}"
    competitor = Competitor(label, op, words, lambda x: fn(*x), problem, small)
    settings = replace(Settings(), passes=tuple(passes) if grad else ("forward",), seconds=seconds, samples=samples)
    line = Line("custom", op, known | ({} if grad else {"grad": False}), settings=settings)
    device = next((t.device for t in first if isinstance(t, Tensor)), torch.device("cpu"))
    timer = Timer(device)
    run = schema.Run("local", "", "verify_and_time", environment.facts(timer), {})
    cells = [competitor.cell(line, run.run_id, pass_, "cold", seed, "verify_and_time") for pass_ in settings.passes]
    group = Group(line, [(competitor, cells)], timer, seed)
    group.prepare()
    while not group.done:
        group.sample()
    return Outcome(group.finish(run))
