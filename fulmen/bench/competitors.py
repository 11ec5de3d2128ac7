"""Who competes in a case: our backends, from the registry, and other people's kernels, from `baselines`."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

import fulmen
from fulmen import dispatch
from fulmen.bench import adapters, schema
from fulmen.bench.baselines import BASELINES
from fulmen.bench.cases import BadSuite, Line
from fulmen.bench.gate import Attend, Problem

OURS = "fulmen "  # begins the names of our competitors


@dataclass
class Competitor:
    """One implementation in one case.

    attend   the timed call: a problem's arguments -> o
    problem  seed -> arguments of the timed shape
    small    seed, fully -> arguments of an odd shape, for the gate
    fully    the call with every output it has, for the gate; None: attend returns all
    refusal  why it cannot take the case; None: it can
    skip     why it is not tried; None: it is
    backend  what "auto" took, or the version of the package
    pinned   a context around its calls, outside what is timed
    """

    name: str
    op: str
    function: str
    attend: Attend
    problem: Callable[[int], Problem]
    small: Callable[..., Problem]
    fully: Attend | None = None
    refusal: str | None = None
    skip: str | None = None
    backend: str = ""
    version: str = ""
    pinned: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    @property
    def ours(self) -> bool:
        return self.name.startswith(OURS)

    def cell(self, line: Line, run_id: str, pass_: str, cache: str, seed: int, command: str) -> schema.Cell:
        """An empty cell; its command, which begins with `command`, measures it alone."""
        who = (self.name.removeprefix(OURS), "none") if self.ours else ("none", self.name)
        words = {True: "yes", False: "no"}
        values = {"op": line.op} | {k: words[v] if isinstance(v, bool) else v for k, v in line.case.items()}
        shape = shlex.quote(",".join(f"{key}={value}" for key, value in values.items()))
        alone = f"--backend {who[0]} --baseline {who[1]} --pass {pass_} --shape {shape} --seed {seed}"
        return schema.Cell(
            run_id, line.suite, self.op, self.function, dict(line.case), self.name, pass_, backend=self.backend,
            version=self.version, cache=cache, seed=seed, command=f"{command} {alone}",
        )  # fmt: skip


def rivals(line: Line, backends: Sequence[str] = (), others: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Our backends and the baselines of a line, by name; `backends` and `others` replace the line's own.

    "*" is every registered backend but the reference, "-name" leaves one out, "none" stands for nobody.
    """
    op, given = adapters.backends_of(line.op, line.case), backends or line.backends
    registered = dispatch.kernels(op)
    every = [kernel for kernel in registered if kernel != "reference"]
    ours = [name for word in given for name in (every if word == "*" else [word])]
    ours = [name for name in ours if name != "none" and name[0] != "-" and f"-{name}" not in given]
    others = [name for name in others or line.baselines if name != "none"]
    known = [*registered, *dispatch._missing[op], "auto"]
    for names, there, what in ((ours, known, f"{line.op} has no backend"), (others, sorted(BASELINES), "no baseline")):
        for name in names:
            if name not in there:
                raise BadSuite(f"{what} {name!r}; there are {', '.join(there)}")
    return list(dict.fromkeys(ours)), list(dict.fromkeys(others))


def of(line: Line, device: torch.device, backends: Sequence[str] = (), others: Sequence[str] = ()) -> list[Competitor]:
    """The competitors of a line whose case is complete."""
    ours, others = rivals(line, backends, others)
    return [backend(line, device, name) for name in ours] + [baseline(line, device, name) for name in others]


def backend(line: Line, device: torch.device, name: str) -> Competitor:
    """One of ours."""
    op, case, adapter = line.op, line.case, adapters.of(line.op)
    refusal, chosen = adapters.refuses(op, case, device, name), name
    if refusal is None:
        try:
            chosen = adapters.chosen(op, case, device, name)
        except NotImplementedError as error:
            refusal = str(error)
    return Competitor(
        f"{OURS}{name}", op, adapter.function(case), adapter.attend(name),
        functools.partial(adapter.problem, case, device), functools.partial(adapter.small, case, device),
        adapter.attend_fully(name), refusal, backend=chosen, version=fulmen.__version__,
    )  # fmt: skip


def baseline(line: Line, device: torch.device, name: str) -> Competitor:
    """One of other people's, on the case in the words of the operation it computes."""
    entry = BASELINES[name]
    adapter, version = adapters.of(entry.op), entry.version()
    own = {key: line.case[key] for key in adapter.KEYS if key in line.case} | entry.case
    try:
        own = adapter.complete(own)
        function, refusal = adapter.function(own), entry.requires(line.case | own, device)
    except ValueError as error:
        function, refusal = entry.op, str(error)
    return Competitor(
        name, entry.op, function, entry.call, functools.partial(adapter.problem, own, device),
        functools.partial(adapter.small, own, device), None, refusal, backend=version, version=version,
        pinned=entry.pinned,
    )  # fmt: skip
