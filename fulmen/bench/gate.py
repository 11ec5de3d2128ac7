"""The gate: an implementation is proved right before it is timed.

A `Problem` is one set of arguments with everything that must come out. An implementation is called on it with every
allocation filled with NaN, then with other values in the same memory. Its results and all gradients are compared with
fp64 under the derived tolerance of `fulmen.testing`, and its arguments must be unchanged. A failure names the tensor.
`breakdown` says what memory a call takes.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fulmen import testing
from fulmen.testing import NORMS, Expected

DOUT_SEED = 1 << 40  # so that dO is not drawn from the numbers of an argument
YARDSTICKS = 4  # further inputs on which a formula shows how much it errs
Attend = Callable[[Any], Any]  # a problem's arguments -> its first output, or several


class Wrong(Exception):
    """An implementation does not compute what it says; the message begins with the name of the tensor."""

    def __init__(self, why: str, correctness: dict[str, dict[str, Any]] | None = None) -> None:
        super().__init__(why)
        self.correctness = correctness or {}


@dataclass
class Problem:
    """One set of arguments: what goes in, what comes back to it, and what is right."""

    x: Any  # what an implementation is called with
    leaves: dict[str, Tensor]  # the tensors in it that require a gradient, by name
    douts: dict[str, Tensor]  # the gradient of each output, by the output's name, in order; random and contiguous
    expected: Callable[[], dict[str, Expected]]  # by name: outputs, and "d" + a leaf's name for its gradient
    constants: dict[str, Tensor] = field(default_factory=dict)  # the other tensors in x
    pick: Callable[[str, Tensor], Tensor] = lambda name, x: x  # the part that `expected` describes, as a few heads
    after: Callable[[Sequence[Tensor | None]], Any] | None = None
    # what the pass `total` does with the gradients: an optimiser's step, that leaves the arguments as they are

    def __post_init__(self) -> None:
        self.expected = functools.lru_cache(maxsize=1)(self.expected)

    def tensors(self) -> dict[str, Tensor]:
        return self.leaves | self.constants | {f"d{name}": dout for name, dout in self.douts.items()}


def exchange(a: Problem, b: Problem) -> None:
    """Swaps the values of two problems of the same shape, in place and past autograd's counters.

    Whoever remembers results by address, identity or version gives the other problem's from now on.
    """
    a.expected(), b.expected()  # of the values as they are
    with torch.no_grad():
        for name, x in a.tensors().items():
            y = b.tensors()[name]
            kept = x.data.clone()
            x.data.copy_(y.data)
            y.data.copy_(kept)
    a.expected, b.expected = b.expected, a.expected
    a.pick, b.pick = b.pick, a.pick


class Formula:
    """Makes problems whose truth is a plain formula, by the tolerance of `fulmen.testing.expected`."""

    def __init__(self, formula: Callable[..., Any], output: str = "o") -> None:
        self.formula, self.output = formula, output
        self.worst: dict[tuple[str, float], float] = {}  # by tensor and norm: the largest relative error seen

    def problem(self, x: Any, arguments: Sequence[Any], names: Sequence[str], seed: int) -> Problem:
        """The call on `x`, which holds `arguments`, those of the formula, called `names`."""
        tensors = {name: t for name, t in zip(names, arguments, strict=True) if isinstance(t, Tensor)}
        leaves = {name: t for name, t in tensors.items() if t.requires_grad}
        for name, t in leaves.items():
            if not t.is_leaf:
                raise ValueError(f"{name} must be a leaf: call requires_grad_() last")
        with torch.no_grad():
            given = self.formula(*arguments)
        outs = given if isinstance(given, list | tuple) else (given,)
        generator = torch.Generator(outs[0].device).manual_seed(seed + DOUT_SEED)
        drawn = (torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype) for o in outs)
        douts = {f"{self.output}{i or ''}": dout for i, dout in enumerate(drawn)}
        constants = {name: t for name, t in tensors.items() if name not in leaves}

        def expected() -> dict[str, Expected]:
            found = testing.expected(self.formula, arguments, list(douts.values()))
            results = [*douts, *(f"d{name}" for name in leaves)]
            return {name: self._widened(name, wanted) for name, wanted in zip(results, found, strict=True)}

        return Problem(x, leaves, douts, expected, constants)

    def _widened(self, name: str, wanted: Expected) -> Expected:
        """With a larger factor if the formula has erred more on other arguments: a small error here may be luck."""
        ratio = 1.0
        for _, order in NORMS:
            errors = wanted.low.double() - wanted.exact
            size, error = (float(torch.linalg.vector_norm(y, order)) for y in (wanted.exact, errors))
            if size and error:
                worst = max(self.worst.get((name, order), 0.0), error / size)
                self.worst[name, order] = worst
                ratio = max(ratio, worst * size / error)
        return wanted._replace(factor=ratio * wanted.factor)


# ------------------------------------------------------------------------------------------- one evaluation
def outputs_by_name(problem: Problem, given: Any) -> dict[str, Tensor]:
    """What a call returned, as named outputs; raises Wrong where one is missing or of another kind."""
    outs = tuple(given) if isinstance(given, list | tuple) else (given,)
    if len(outs) < len(problem.douts):
        raise Wrong(f"{list(problem.douts)[len(outs)]}: not returned, the call gave {len(outs)} results")
    named = dict(zip(problem.douts, outs, strict=False))
    for name, y in named.items():
        dout = problem.douts[name]
        if type(y) is not Tensor:
            raise Wrong(f"{name}: is a {type(y).__name__}, must be a torch.Tensor")
        if y.shape != dout.shape:
            raise Wrong(f"{name}: has shape {tuple(y.shape)}, must be {tuple(dout.shape)}")
        if y.dtype != dout.dtype:
            raise Wrong(f"{name}: is {y.dtype}, must be {dout.dtype}")
    return named


def gradients_by_name(problem: Problem, given: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The gradient of every leaf; raises Wrong where one is missing or of another kind."""
    named: dict[str, Tensor] = {}
    for (name, leaf), grad in zip(problem.leaves.items(), given, strict=True):
        if grad is None:
            raise Wrong(f"d{name}: no gradient comes back to {name}")
        if grad.shape != leaf.shape or grad.dtype != leaf.dtype:
            raise Wrong(f"d{name}: is {tuple(grad.shape)} {grad.dtype}, must be {tuple(leaf.shape)} {leaf.dtype}")
        named[f"d{name}"] = grad
    return named


def outputs_of(problem: Problem, attend: Attend) -> dict[str, Tensor]:
    return outputs_by_name(problem, attend(problem.x))


def gradients_of(problem: Problem, outs: dict[str, Tensor]) -> dict[str, Tensor]:
    for name, y in outs.items():
        if not y.requires_grad:
            raise Wrong(f"{name}: is cut off from {', '.join(problem.leaves)}: there is no backward")
    leaves, douts = list(problem.leaves.values()), [problem.douts[name] for name in outs]
    return gradients_by_name(problem, torch.autograd.grad(list(outs.values()), leaves, douts, allow_unused=True))


def compare(problem: Problem, results: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Each result against what is expected: relative error and bound in the 2-norm, the largest difference, ok.

    Raises Wrong, with all of this, at the first tensor that is not.
    """
    wanted = problem.expected()
    report: dict[str, dict[str, Any]] = {}
    first = ""
    for name, value in results.items():
        if name in wanted:
            part, report[name] = problem.pick(name, value.detach()), {}
            why = _wrong(part, wanted[name], report[name])
            if not why and part.numel() < value.numel():
                why = _rest(value.detach())
            report[name]["ok"] = not why
            first = first or (f"{name}: {why}" if why else "")
    if first:
        raise Wrong(first, report)
    return report


def _wrong(actual: Tensor, wanted: Expected, row: dict[str, Any]) -> str:
    """What is wrong, or nothing; `row` gets the errors and their bounds."""
    blind = wanted.exact == -torch.inf  # only lse has these
    if bool(blind.any()):
        if not torch.equal(actual == -torch.inf, blind):
            return "-inf where a row sees keys, or not where it sees none"
        clean = {n: getattr(wanted, n).masked_fill(blind, 0.0) for n in ("low", "exact")}
        actual, wanted = actual.masked_fill(blind, 0.0), wanted._replace(**clean)
    if not wanted.exact.numel():
        row |= {"error": 0.0, "bound": 0.0, "max_abs": 0.0}
        return ""
    if bad := int((~actual.isfinite()).sum()):
        row["not_finite"] = bad
        return f"not finite in {bad} of {actual.numel()} elements"
    difference = actual.double() - wanted.exact
    size = float(torch.linalg.vector_norm(wanted.exact)) or 1.0
    why = ""
    for norm, order in NORMS:
        got, bound = float(torch.linalg.vector_norm(difference, order)), wanted.bound(order, actual.dtype)
        if not math.isfinite(bound):
            return "the plain computation in this dtype overflows, so there is nothing to compare with"
        relative = {"error": got / size, "bound": bound / size}
        row |= relative if order == 2 else {"max_abs": got, "max_abs_bound": bound}
        if not got <= bound and not why:
            at = tuple(int(i) for i in torch.unravel_index(difference.abs().argmax().cpu(), difference.shape))
            values = f"{float(actual[at]):.6g}, exact {float(wanted.exact[at]):.6g}"
            why = f"{norm} error {got:.3e} > {bound:.3e}; at {at}: {values}"
    scale, margin = _scale(difference, wanted.exact, row["bound"], actual.dtype)
    if not why and abs(scale) > margin:
        why = f"all of it is {1 + scale:.5f} times what it must be, and only {margin:.1e} off could be rounding"
    return why


def _rest(value: Tensor) -> str:
    """What can be said of the heads that are not compared with fp64: all are there, and of a size with one another.

    Inputs are equally distributed in every batch, so a head's results are of about one size in all of them.
    """
    if value.ndim != 4:
        return ""
    sizes = torch.linalg.vector_norm(value, dim=(2, 3), dtype=torch.promote_types(value.dtype, torch.float32))
    if not bool(sizes.isfinite().all()):
        return "not finite in a head that is not compared in full"
    if not bool((sizes > 0).all()):
        b, h = (int(i) for i in (sizes == 0).nonzero()[0])
        return f"nothing but zeros in batch {b}, head {h}"
    if value[0, 0].numel() >= 4096 and bool((sizes.amax(0) > 2 * sizes.amin(0)).any()):
        return "one batch has results twice as large as another, of inputs that are alike"
    return ""


def _scale(difference: Tensor, exact: Tensor, bound: float, dtype: torch.dtype) -> tuple[float, float]:
    """By which factor, less 1, a result is too large as a whole, and how much of that rounding explains.

    The bounds above let a bf16 result pass that is 1 % too large everywhere. Rounding errors have no such direction:
    those of different rows are independent, so their mean goes down with the square root of the rows.
    """
    square = float(exact.square().sum())
    if not square:
        return 0.0, 0.0
    margin = 4 * bound / math.sqrt(_independent(exact)) + torch.finfo(dtype).eps / 4
    return float((difference * exact).sum()) / square, margin


def _independent(exact: Tensor) -> float:
    """How many parts of a tensor are rounded on their own: rows, each counted by its share of the squares.

    All rows of a weight's gradient are sums over the same tokens, so there it is the effective rank. Both are 1 where
    one token, divided by a norm near 0, outweighs the others.
    """
    rows = exact.reshape(-1, exact.shape[-1] if exact.ndim else 1)
    if exact.ndim == 2:
        gram = rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows
        return max(1.0, float(gram.diagonal().sum() ** 2 / gram.square().sum()))
    shares = rows.square().sum(1)
    return max(1.0, float(shares.sum() ** 2 / shares.square().sum()))


# ------------------------------------------------------------------------------------------------ the gate
@contextmanager
def poisoned() -> Iterator[None]:
    """Memory comes filled with NaN (integers: their maximum), so that an element nobody wrote is seen.

    PyTorch's own switch, which reaches allocations made in C++, too. It is armed by deterministic mode, whose remarks
    about other operations are not for the reader of a benchmark.
    """
    switch: Any = torch.utils.deterministic
    fill, mode = switch.fill_uninitialized_memory, torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            switch.fill_uninitialized_memory = fill


@contextmanager
def unchanged(problem: Problem) -> Iterator[None]:
    before = {name: x.detach().clone() for name, x in problem.tensors().items()}
    try:
        yield
    finally:  # it is the first thing to say, whatever else is wrong
        for name, x in problem.tensors().items():
            if not torch.equal(x.detach(), before[name]):
                x.data.copy_(before[name])
                raise Wrong(f"{name}: the call changed its argument")


def evaluate(problem: Problem, attend: Attend, backward: bool = True) -> dict[str, dict[str, Any]]:
    """One call under poison, all of it compared."""

    def compared() -> dict[str, dict[str, Any]]:
        with torch.set_grad_enabled(backward):
            outs = outputs_of(problem, attend)
            return compare(problem, outs | (gradients_of(problem, outs) if backward else {}))

    with unchanged(problem):
        try:
            with poisoned():
                return compared()
        except RuntimeError as error:
            if "No available kernel" not in str(error):  # torch's SDPA, pinned to a kernel that is not deterministic
                raise
        tensors = list(problem.tensors().values())
        if tensors[0].is_cuda:  # instead, NaN is left in the blocks that the next allocations get
            size = min(4 * bytes_of(*tensors), torch.cuda.mem_get_info(tensors[0].device)[0] // 4)
            torch.full((1 + size // 4,), math.nan, device=tensors[0].device)
        return compared()


def gate(problems: Sequence[Problem], attend: Attend, backward: bool = True) -> dict[str, dict[str, Any]]:
    """Every problem once, then, where two have one shape, once more with their values exchanged.

    Returns the largest share of its bound that each tensor reached, with what it was; raises Wrong.
    """
    worst: dict[str, dict[str, Any]] = {}

    def note(report: dict[str, dict[str, Any]]) -> None:
        for name, row in report.items():
            old = worst.get(name)
            if old is None or row["error"] * max(old["bound"], 1e-300) > old["error"] * max(row["bound"], 1e-300):
                worst[name] = row

    for problem in problems:
        note(evaluate(problem, attend, backward))
    for a, b in itertools.pairwise(problems):
        if all(x.shape == b.tensors()[n].shape for n, x in a.tensors().items()):
            exchange(a, b)
            try:
                note(evaluate(a, attend, backward))
                note(evaluate(b, attend, backward))
            finally:
                exchange(a, b)
    return worst


# ------------------------------------------------------------------------------------------------- memory
def storages(*tensors: Tensor) -> dict[int, int]:
    """Bytes of the memory beneath tensors, by its address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type != "meta"}


def bytes_of(*tensors: Tensor) -> int:
    return sum(storages(*tensors).values())


def saved_bytes(problem: Problem, attend: Attend) -> int:
    """What autograd keeps between forward and backward, but for inputs and outputs, which are counted already."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept.update(storages(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outs = outputs_of(problem, attend)
    known = storages(*problem.tensors().values(), *outs.values())
    return sum(size for at, size in kept.items() if at not in known)


def use_of(work: Callable[[], Any], device: torch.device) -> tuple[int, int, Any]:
    """What a call took above what was there before, at the most and when it was over; and its result.

    By the allocator's counters on a GPU, by the profiler's record of allocations on a CPU.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return peak - before, left - before, result
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it tells the terminal of every start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    record: Any = seen.profiler
    events = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    running = list(itertools.accumulate(e.nbytes() for e in events)) or [0]
    return max(0, *running), max(0, running[-1]), result


def breakdown(
    problem: Problem, attend: Attend, device: torch.device, floors: dict[str, float], backward: bool = True
) -> dict[str, dict[str, dict[str, float]]]:
    """Memory by pass and kind, {"bytes": ..., "floor": ...}: inputs, output, what is saved for the backward, gradients,
    workspaces and the peak. Only the inputs and dO are there when the call begins."""
    least = {name: floors.get(name, 0) for name in ("inputs", "output", "gradients")}
    given = bytes_of(*problem.leaves.values(), *problem.constants.values())

    def entries(peak: int, **sizes: int) -> dict[str, dict[str, float]]:
        lowest = sum(least[name] for name in sizes if name in least)
        rows = {name: (size, least.get(name, 0)) for name, size in sizes.items()} | {"peak": (peak, lowest)}
        return {name: {"bytes": float(max(size, 0)), "floor": float(floor)} for name, (size, floor) in rows.items()}

    saved = {"saved": saved_bytes(problem, attend)} if backward else {}
    with torch.set_grad_enabled(backward):
        peak, left, outs = use_of(lambda: outputs_of(problem, attend), device)
    shared = {"inputs": given, "output": bytes_of(*outs.values())} | saved
    going = {"workspace_forward": peak - left}
    parts = {"forward": entries(given + peak, **shared, **going)}
    if backward:
        peak_back, _, grads = use_of(lambda: gradients_of(problem, outs), device)
        gradients = bytes_of(*grads.values())
        coming = {"workspace_backward": peak_back - gradients, "gradients": gradients}
        peak_back += given + bytes_of(*problem.douts.values()) + left
        parts["backward"] = entries(peak_back, **shared, **coming)
        parts["total"] = entries(max(given + peak, peak_back), **shared, **going, **coming)
    return parts
