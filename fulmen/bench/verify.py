"""A kernel of your own, under the same gate and clock as ours.

    import torch
    from fulmen.bench import verify_and_time

    def inputs(seed, odd=False):              # fresh values for each seed; what requires grad is a leaf
        g = torch.Generator().manual_seed(seed)
        make = lambda: torch.randn(2, 4, 333 if odd else 1024, 64, generator=g).cuda().requires_grad_()
        return make(), make(), make()

    def plain(q, k, v):                       # as one would write it, for any dtype
        return torch.softmax(q @ k.mT / 8, -1) @ v

    outcome = verify_and_time(my_kernel, plain, inputs)
    print(outcome)                            # forward 0.12 ms ... or: failed, dk: largest error ...

The reference runs in fp64 for what is exact and in the inputs' own dtype for what may be expected: the kernel may err
twice as much as that does on these or a few other inputs (gradients: three times), plus one rounding. Nothing is timed
that fails.
"""

from __future__ import annotations

import inspect
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fulmen.bench import adapters, environment, schema
from fulmen.bench.cases import DTYPES, Line, Settings
from fulmen.bench.competitors import Competitor
from fulmen.bench.gate import Problem
from fulmen.bench.group import Group, Machine, Plan
from fulmen.testing import FORWARD_FACTOR, GRADIENT_FACTOR, NORMS, Expected

Inputs = Callable[..., Sequence[Any]]
OP = "custom"
YARDSTICKS = 4  # further inputs on which the plain computation shows how much it errs


@dataclass
class Outcome:
    """One cell a pass. `ok`: all of them have a time; `reason`: why not."""

    cells: list[schema.Cell]

    @property
    def ok(self) -> bool:
        return all(cell.status == "ok" and "IMPOSSIBLE" not in cell.flags() for cell in self.cells)

    @property
    def reason(self) -> str:
        return next((why for cell in self.cells if (why := cell.reason or self._impossible(cell))), "")

    def _impossible(self, cell: schema.Cell) -> str:
        marks = (m for m in cell.audit.get("flags", []) if m.get("flag") == "IMPOSSIBLE")
        return next((f"impossible: {mark.get('why')}" for mark in marks), "")

    def __str__(self) -> str:
        lines = []
        for cell in self.cells:
            if cell.status == "ok":
                s = cell.stats
                said = f"{s['median']:.4g} ms (95 %: {s['low']:.4g} to {s['high']:.4g}, {s['n']} samples)"
                flags = " ".join(flag for flag in cell.flags() if flag != "UNAUDITED" or cell.op != OP)
                flags = self._impossible(cell) or flags
                lines.append(f"{cell.pass_:<9}{said} {flags}".rstrip())
            else:
                lines.append(f"{cell.pass_:<9}{cell.status}: {cell.reason}")
        return "\n".join(lines)


Results = dict[str, Tensor]
Errors = dict[str, dict[float, float]]  # by tensor and norm


class Reference:
    """The user's formula: exact in fp64, and how much it errs in the inputs' own dtype."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        self.formula = formula
        self.worst: Errors = {}  # relative errors of the plain computation, the largest seen

    def outputs(self, x: Sequence[Any]) -> dict[str, Tensor]:
        given = self.formula(*x)
        return {f"o{i or ''}": o for i, o in enumerate(given if isinstance(given, list | tuple) else (given,))}

    def evaluate(self, x: Sequence[Any], douts: Results, names: Sequence[str], dtype: torch.dtype | None) -> Results:
        """Outputs and gradients, in another dtype or as it is."""

        def cast(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            new = t.detach().to(dtype) if dtype is not None and t.is_floating_point() else t.detach().clone()
            return new.requires_grad_(t.requires_grad)

        own = [cast(t) for t in x]
        outs = self.outputs(own)
        results = {name: o.detach() for name, o in outs.items()}
        leaves = [t for t in own if isinstance(t, Tensor) and t.requires_grad]
        if leaves:
            back = [douts[name].to(o.dtype) for name, o in outs.items()]
            grads = torch.autograd.grad(list(outs.values()), leaves, back, materialize_grads=True)
            results |= {f"d{name}": g for name, g in zip(names, grads, strict=True)}
        return results

    def expected(self, x: Sequence[Any], douts: Results, names: Sequence[str]) -> dict[str, Expected]:
        exact, low = self.evaluate(x, douts, names, torch.float64), self.evaluate(x, douts, names, None)
        wanted = {}
        for name, value in exact.items():
            factor = GRADIENT_FACTOR if name.startswith("d") else FORWARD_FACTOR
            own = Expected(low[name], value, factor)
            wanted[name] = own._replace(factor=factor * self._luck(name, own))
        return wanted

    def _luck(self, name: str, wanted: Expected) -> float:
        """How much more the plain computation has erred elsewhere: a small error here may have been luck."""
        ratio = 1.0
        for _, order in NORMS:
            both = (wanted.exact, wanted.low.double() - wanted.exact)
            size, plain = (float(torch.linalg.vector_norm(y, order)) for y in both)
            if size and plain:
                worst = self.worst.setdefault(name, {})
                worst[order] = max(worst.get(order, 0.0), plain / size)
                ratio = max(ratio, worst[order] * size / plain)
        return ratio


def problem_of(reference: Reference, arguments: Sequence[Any], seed: int, names: Sequence[str]) -> Problem:
    """The arguments of one call with everything that must come out."""
    x = tuple(arguments)
    tensors = {name: t for name, t in zip(names, x, strict=True) if isinstance(t, Tensor)}
    leaves = {name: t for name, t in tensors.items() if t.requires_grad}
    for name, t in leaves.items():
        if not t.is_leaf:
            raise ValueError(f"{name} must be a leaf: call requires_grad_() last")
    with torch.no_grad():
        shapes = reference.outputs(x)
    generator = torch.Generator(next(iter(shapes.values())).device).manual_seed(seed)
    douts = {name: torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype) for name, o in shapes.items()}
    constants = {name: t for name, t in tensors.items() if name not in leaves}
    return Problem(x, leaves, douts, lambda: reference.expected(x, douts, list(leaves)), constants)


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
    adapter = adapters.of(op)
    if unknown := set(case) - {*adapter.KEYS, "grad"}:
        raise ValueError(f"case has {', '.join(map(repr, sorted(unknown)))}; a case says {', '.join(adapter.KEYS)}")
    tensors = [t for t in x if isinstance(t, Tensor) and t.is_floating_point()]
    own = {"dtype": str(tensors[0].dtype).removeprefix("torch.")} if tensors else {}
    filled: dict[str, Any] = adapter.complete(own | case)
    if (why := adapters.wrong_value(op, filled)) is not None:
        raise ValueError(f"case: {why}")
    filled["dtype"] = DTYPES.get(filled["dtype"], filled["dtype"])
    size = math.prod(adapters.shapes(filled)[0])
    if all(t.numel() != size for t in tensors):
        given = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"case says that q is {adapters.shapes(filled)[0]}, and no argument has as many numbers: {given}"
        )
    return filled


def verify_and_time(
    fn: Callable[..., Any], reference: Callable[..., Any], inputs: Inputs, *, name: str = "",
    passes: Sequence[str] = ("forward", "backward", "total"), seconds: float = 1.0,
    samples: tuple[int, int] = (30, 100), case: dict[str, Any] | None = None, op: str = OP, function: str = "",
    seed: int | None = None,
) -> Outcome:  # fmt: skip
    """Proves `fn` right against `reference`, then times it; the file's top shows how it is used.

    inputs    seed -> the arguments of a call; with a parameter `odd`, also those of an odd shape for the gate. Tensors
              that require grad have their gradients compared; without any, only the forward is measured.
    passes    of forward, backward and total; backward is timed directly, on a graph built outside.
    case, op  what sets the work ({"B": 4, "H": 32, "N": 1024, "D": 64, ...}) and "lightning" or "flash": with them the
              times are checked against the hardware's limits, too. Without a dtype it is that of the first tensor.
    """
    seed = secrets.randbits(31) if seed is None else seed
    takes_odd = "odd" in inspect.signature(inputs).parameters
    try:
        names = [p for p in inspect.signature(fn).parameters if p not in ("args", "kwargs")]
    except (ValueError, TypeError):  # built in: nobody says what its parameters are called
        names = []
    first = tuple(inputs(seed))
    if len(names) != len(first):
        names = [f"x{i}" for i in range(len(first))]
    device = next((t.device for t in first if isinstance(t, Tensor)), torch.device("cpu"))
    label = name or getattr(fn, "__name__", "kernel")
    known = known_case(op, case, first)

    plain = Reference(reference)

    def make(at: int, odd: bool = False) -> Problem:
        return problem_of(plain, inputs(at, odd=True) if odd else inputs(at), at, names)

    for other in range(YARDSTICKS):
        make(seed + 4 + other, takes_odd).expected()

    def smalls(_: Competitor) -> list[tuple[Any, list[Problem]]]:
        return [(attend, [make(seed + 2, takes_odd), make(seed + 3, takes_odd)])]

    def attend(x: Any) -> Any:
        return fn(*x)

    pair = [make(seed), make(seed + 1)]
    grad = bool(pair[0].leaves)
    settings = replace(Settings(), passes=tuple(passes) if grad else ("forward",), seconds=seconds, samples=samples)
    machine = Machine.of(device)
    facts = environment.facts(device, machine.nvml, machine.timer)
    run = schema.Run("local", "", "verify_and_time", facts, {})
    known |= {} if grad else {"grad": False}
    competitor = Competitor(label, op, function or f"as {getattr(reference, '__name__', 'the reference')}", attend)
    plan = Plan(Line("custom", op, known, (), settings), known, run.run_id, seed, "verify_and_time")
    group = Group(plan, [competitor], machine, problems={op: pair}, smalls=smalls)
    group.prepare()
    while not group.done:
        group.sample()
    return Outcome(group.finish(run))


__all__ = ["Outcome", "Reference", "problem_of", "verify_and_time"]
