"""A whole run: plans the cells of the suites asked for, measures them group by group, and appends each to a file.

What is done stays done: a cell is written and flushed when its group is finished, an interrupt keeps the rest of the
group as "interrupted", and `resume` takes up a file where it ends. After a cell ran out of memory or time, larger N of
the same kernel are recorded as skipped.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fulmen import hardware
from fulmen.bench import Refused, adapters, cases, competitors, environment, floors, kernels, schema
from fulmen.bench.cases import Line
from fulmen.bench.competitors import Competitor
from fulmen.bench.group import Group, Machine

PREPARING = 0.5  # seconds of a cell's gate, warm-up and replay; and of a case, the results in fp64
COMPILING = 45.0
EXHAUSTED = {"oom": "ran out of memory", "timeout": "took too long"}


@dataclass(frozen=True)
class Selection:
    """What the user asked for."""

    suites: tuple[str, ...]
    device: str | None = None
    dtype: str | None = None
    backends: tuple[str, ...] = ()
    baselines: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    seconds: float | None = None
    seed: int | None = None
    kernels: bool = False

    def command(self, suite: str | None = None) -> str:
        """What would repeat it; of one suite: without the options that single out a cell."""
        options: dict[str, Sequence[Any]] = {"device": [self.device], "dtype": [self.dtype]}
        options["seconds"] = [None if self.seconds is None else f"{self.seconds:g}"]
        if suite is None:
            options |= {"backend": self.backends, "baseline": self.baselines, "pass": self.passes}
            options |= {"shape": self.shapes, "seed": [self.seed]}
        given = [(name, value) for name, values in options.items() for value in values if value is not None]
        words = [word for name, value in given for word in (f"--{name}", str(value))]
        return shlex.join(["fulmen", "bench", "run", *(self.suites if suite is None else [suite]), *words])


class Monitor:
    """Whom a run tells of its progress; this one says nothing."""

    def begin(self, run: schema.Run, cells: int, skipped: int) -> None: ...
    def group(self, case: dict[str, Any], suite: str) -> None: ...
    def say(self, text: str) -> None: ...
    def sampled(self, group: Group) -> None: ...
    def cell(self, cell: schema.Cell) -> None: ...


# ------------------------------------------------------------------------------------------------ planning


def lines_of(selection: Selection, device: torch.device) -> list[Line]:
    """The lines of the suites that are asked for, their cases complete."""
    lines = [line for suite in selection.suites for line in cases.read(suite)]
    try:
        if selection.dtype is not None:
            dtype = cases.DTYPES.get(selection.dtype, selection.dtype)
            lines = [replace(line, case=line.case | {"dtype": dtype}) for line in lines]
        if selection.shapes:
            keys = {line.op: set(adapters.keys_of(line.op)) for line in lines}
            lines = cases.select(lines, [cases.shape(text) for text in selection.shapes], keys)
        lines = [replace(line, case=adapters.complete(line.op, line.case, device)) for line in lines]
    except ValueError as error:
        raise cases.BadSuite(f"{'--shape: ' if selection.shapes else ''}{error}") from None
    chosen = []
    for line in lines:
        usual = line.settings
        passes = tuple(p for p in usual.passes if not selection.passes or p in selection.passes)
        seconds = usual.seconds if selection.seconds is None else selection.seconds
        settings = replace(usual, passes=passes, seconds=seconds, kernels=usual.kernels or selection.kernels)
        line = replace(line, settings=settings)
        if passes and line not in chosen:
            chosen.append(line)
    if not chosen:
        raise Refused("nothing to measure: no case of the suites has the passes asked for")
    if not any(names for line in chosen for names in competitors.rivals(line, selection.backends, selection.baselines)):
        raise Refused("nothing to measure: nobody competes (--backend none and --baseline none?)")
    return chosen


def preview(selection: Selection, device: torch.device) -> list[tuple[str, int, int, int, float]]:
    """By suite: cases, cells to measure, cells nobody can measure here, and the seconds that takes at the most."""
    found = []
    for suite in selection.suites:
        lines, able, refused, seconds = lines_of(replace(selection, suites=(suite,)), device), 0, 0, 0.0
        for line in lines:
            for competitor in competitors.of(line, device, selection.backends, selection.baselines):
                cells = len(line.settings.passes)
                if competitor.refusal is None:
                    able, seconds = able + cells, seconds + cells * (line.settings.seconds + PREPARING)
                else:
                    refused += cells
        found.append((suite, len(lines), able, refused, seconds + 2 * PREPARING * len(lines)))
    return found


def default_out(suites: Sequence[str]) -> Path:
    return Path(f"bench-{'-'.join(suites)}-{datetime.now():%Y%m%d-%H%M%S}.jsonl")


class Session:
    """A selection on a machine: its lines, the record of the run, the gates that were passed."""

    def __init__(self, selection: Selection, say: Callable[[str], None] = lambda text: None) -> None:
        self.selection, self.say = selection, say
        device = environment.device_of(selection.device)
        self.lines = lines_of(selection, device)  # what is wrong is said before a minute has gone by
        say("asking the device what it can do")
        self.machine = machine = Machine.of(device)
        machine.burn_in()
        now = datetime.now(timezone.utc)
        seed = secrets.randbits(31) if selection.seed is None else selection.seed
        known = environment.facts(device, machine.nvml, machine.timer) | {"seed": seed}
        self.run = schema.Run(
            f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}", now.isoformat(timespec="seconds"), selection.command(),
            known, environment.commit(), environment.ceilings(device, machine.timer, known),
        )  # fmt: skip
        self.passed: dict[Any, dict[str, Any]] = {}

    @property
    def seed(self) -> int:
        return int(self.run.environment.get("seed", 0))

    def plans(self) -> list[tuple[Line, list[Competitor]]]:
        """The lines with those who compete in them; on a GPU all kernels of ours that they need are compiled."""
        device, who = self.machine.device, (self.selection.backends, self.selection.baselines)
        if device.type == "cuda":
            self.say("compiling our kernels on all cores")
            kernels.compile_ahead(
                [(line, competitors.rivals(line, *who)[0]) for line in self.lines], hardware.of(device)
            )
        return [(line, competitors.of(line, device, *who)) for line in self.lines]

    def cells(self, line: Line, competitor: Competitor) -> list[schema.Cell]:
        """Of each pass; with a hot cache, too, where everything a call touches fits the GPU's L2."""
        least = floors.memory(line.op, line.case) or {}
        touched = sum(least.get(name, 0.0) for name in ("inputs", "output", "gradients"))
        fits = self.machine.timer.cuda and 2 * touched < self.machine.timer.l2_bytes
        command = self.selection.command(line.suite)
        return [
            competitor.cell(line, self.run.run_id, pass_, cache, self.seed, command)
            for pass_ in line.settings.passes
            for cache in (("cold", "hot") if fits else ("cold",))
        ]

    def group(self, line: Line, entries: Sequence[tuple[Competitor, list[schema.Cell]]]) -> Group:
        return Group(line, entries, self.machine, self.seed, self.say, self.passed)


# ------------------------------------------------------------------------------------------------- measuring


class Journal:
    """The results file; a record is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: schema.Run | schema.Cell) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(schema.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def begin(self, run: schema.Run) -> tuple[schema.Run, set[str]]:
        """Writes `run`, or finds the one in an old file; with the hashes of the cells that are finished."""
        results = schema.Results({}, [])
        if self.path.exists():
            text = self.path.read_bytes()
            self.path.write_bytes(text[: text.rfind(b"\n") + 1])  # a last line that was being written is dropped
            results = schema.read([self.path])
        if not results.runs:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.write(run)
            except OSError as error:
                raise Refused(f"{self.path}: cannot be written: {error.strerror}") from None
            return run, set()
        old = list(results.runs.values())[-1]
        for what, was, now in (
            ("on another device", old.environment.get("device"), run.environment.get("device")),
            ("with another torch", old.environment.get("torch"), run.environment.get("torch")),
            ("from another source", old.commit.get("source"), run.commit.get("source")),
        ):
            if was != now:
                raise Refused(
                    f"{self.path} was measured {what} ({was}, now {now}): start a new file with another --out"
                )
        finished = (c for c in results.cells if c.run_id == old.run_id and c.status != "interrupted")
        return old, {cell.config_hash for cell in finished}


def run(
    selection: Selection, out: Path, *, resume: bool = False, monitor: Monitor | None = None,
    other: Any = None,
) -> schema.Run:  # fmt: skip
    """Measures what `selection` says into `out`; KeyboardInterrupt passes through when the file is in order.

    other  another process that measures the same lines in turns with ours: see `fulmen.bench.base`.
    """
    monitor, journal = monitor or Monitor(), Journal(out)
    if out.exists() and not resume:
        raise Refused(f"{out} exists: --resume goes on with it, another --out leaves it alone")
    session = Session(selection, monitor.say)
    session.run, finished = journal.begin(session.run)
    plans, planned = [], set[str]()
    for line, who in session.plans():
        entries = []
        for competitor in who:
            cells = session.cells(line, competitor)
            new = [c for c in cells if c.config_hash not in planned | finished]  # a --shape may have made lines equal
            planned |= {c.config_hash for c in cells}
            entries += [(competitor, new)] if new else []
        plans += [(line, entries)] if entries else []
    monitor.begin(session.run, len(planned - finished), len(planned & finished))
    exhausted: dict[Any, tuple[float, str]] = {}  # by kernel and case but for N: at which N, and why
    for line, entries in plans:
        monitor.group(line.case, line.suite)
        rest = tuple(sorted((k, str(v)) for k, v in line.case.items() if k != "N"))
        for competitor, _ in entries:
            N, why = exhausted.get((competitor.name, rest), (math.inf, ""))
            if line.case.get("N", 0) > N:
                competitor.skip = f"not tried: it {why} at N={N}"
        group = session.group(line, entries)
        measure(group, session.run, journal, monitor, other)
        for cell in group.cells:
            if cell.status in EXHAUSTED and "N" in line.case:
                exhausted.setdefault((cell.competitor, rest), (line.case["N"], EXHAUSTED[cell.status]))
    return session.run


def measure(group: Group, record: schema.Run, journal: Journal, monitor: Monitor, other: Any) -> None:
    try:
        if other is not None:
            other.prepare(group.line)
        group.prepare()
        while not (group.done and (other is None or other.done)):
            if not group.done:
                group.sample()
            if other is not None and not other.done:
                other.sample()
            monitor.sampled(group)
    finally:
        for cell in group.finish(record):
            journal.write(cell)
            monitor.cell(cell)
        if other is not None:
            other.finish()
