"""A whole run: plans the cells of the suites asked for, measures them group by group, and appends each to a file.

What is done stays done: a cell is written and flushed when its group is finished, an interrupt keeps the rest of the
group as "interrupted", and `resume` takes up a file where it ends. After a cell ran out of memory or time, larger N of
the same kernel are recorded as skipped.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fulmen import hardware
from fulmen.bench import adapters, cases, competitors, environment, floors, kernels, schema
from fulmen.bench.cases import Line
from fulmen.bench.competitors import Competitor
from fulmen.bench.group import Group, Machine

PREPARING = 0.5  # seconds of a cell's gate, warm-up and replay; and of a case, the results in fp64
COMPILING = 45.0
NOBODY = "nothing to measure: nobody competes (--backend none and --baseline none?)"


class BadRun(Exception):
    """A run that cannot be started, in words for the user."""


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
        words = ["fulmen", "bench", "run", *(self.suites if suite is None else [suite])]
        for name, value in (("device", self.device), ("dtype", self.dtype), ("seconds", self.seconds)):
            words += [] if value is None else [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
        if suite is None:
            many = (("backend", self.backends), ("baseline", self.baselines), ("pass", self.passes))
            for name, values in (*many, ("shape", self.shapes)):
                words += [word for value in values for word in (f"--{name}", value)]
            words += [] if self.seed is None else ["--seed", str(self.seed)]
        return shlex.join(words)


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
        passes = tuple(p for p in line.settings.passes if not selection.passes or p in selection.passes)
        seconds = line.settings.seconds if selection.seconds is None else selection.seconds
        kernels_ = line.settings.kernels or selection.kernels
        settings = replace(line.settings, passes=passes, seconds=seconds, kernels=kernels_)
        line = replace(line, settings=settings)
        if passes and line not in chosen:
            chosen.append(line)
    if not chosen:
        raise BadRun("nothing to measure: no case of the suites has the passes asked for")
    if not any(names for line in chosen for names in competitors.rivals(line, selection.backends, selection.baselines)):
        raise BadRun(NOBODY)
    return chosen


def plans_of(
    selection: Selection, lines: Sequence[Line], device: torch.device, say: Callable[[str], None]
) -> list[tuple[Line, list[Competitor]]]:
    """The lines with those who compete in them; on a GPU all kernels of ours that they need are compiled."""
    if device.type == "cuda":
        say("compiling our kernels on all cores")
        if not selection.backends or {"auto", "cuda"} & set(selection.backends):
            kernels.compile_natives(lines, hardware.of(device))
    plans = [(line, competitors.of(line, device, selection.backends, selection.baselines)) for line in lines]
    if device.type == "cuda":
        kernels.compile_ahead(plans, hardware.of(device))
    return plans


def preview(selection: Selection, device: torch.device) -> list[tuple[str, int, int, int, float]]:
    """By suite: cases, cells to measure, cells nobody can measure here, and the seconds that takes at the most."""
    found = []
    for suite in selection.suites:
        lines, cells, refused, seconds = lines_of(replace(selection, suites=(suite,)), device), 0, 0, 0.0
        for line in lines:
            passes = len(line.settings.passes)
            who = competitors.of(line, device, selection.backends, selection.baselines)
            able = passes * sum(c.refusal is None for c in who)
            cells, refused = cells + able, refused + passes * len(who) - able
            seconds += able * (line.settings.seconds + PREPARING) + 2 * PREPARING
        found.append((suite, len(lines), cells, refused, seconds))
    return found


def caches_of(line: Line, machine: Machine) -> tuple[str, ...]:
    """A hot cache is measured, too, where everything a call touches fits the GPU's L2."""
    if machine.device.type != "cuda":
        return ("cold",)
    least = floors.memory(line.op, line.case) or {}
    touched = sum(least.get(name, 0.0) for name in ("inputs", "output", "gradients"))
    return ("cold", "hot") if 2 * touched < machine.timer.l2_bytes else ("cold",)


# ------------------------------------------------------------------------------------------------- results


@dataclass
class Journal:
    """The results file; a record is on disk when `write` returns."""

    path: Path
    finished: set[str] = field(default_factory=set)

    def write(self, record: schema.Run | schema.Cell) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(schema.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def open_journal(path: Path, run: schema.Run) -> tuple[Journal, schema.Run]:
    """A new file with `run` in it, or an old one with the run it holds and what is finished of it."""
    if path.exists():
        mend(path)
        results = schema.read([path])
    else:
        results = schema.Results({}, [])
    if not results.runs:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            Journal(path).write(run)
        except OSError as error:
            raise BadRun(f"{path}: cannot be written: {error.strerror}") from None
        return Journal(path), run
    old = list(results.runs.values())[-1]
    for what, was, now in (
        ("on another device", old.environment.get("device"), run.environment.get("device")),
        ("with another torch", old.environment.get("torch"), run.environment.get("torch")),
        ("from another source", old.commit.get("source"), run.commit.get("source")),
    ):
        if was != now:
            raise BadRun(f"{path} was measured {what} ({was}, now {now}): start a new file with another --out")
    over = {c.config_hash for c in results.cells if c.run_id == old.run_id and c.status != "interrupted"}
    return Journal(path, over), old


def mend(path: Path) -> None:
    """Drops a last line that was being written when the process died."""
    text = path.read_bytes()
    head, _, last = text.rpartition(b"\n")
    if last.strip():
        try:
            json.loads(last)
            path.write_bytes(text + b"\n")
        except ValueError:
            path.write_bytes(head + b"\n" if head else b"")


# ---------------------------------------------------------------------------------------------- the whole run


def new_run(selection: Selection, machine: Machine) -> schema.Run:
    now = datetime.now(timezone.utc)
    seed = secrets.randbits(31) if selection.seed is None else selection.seed
    known = environment.facts(machine.device, machine.nvml, machine.timer) | {"seed": seed}
    return schema.Run(
        f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}", now.isoformat(timespec="seconds"), selection.command(), known,
        environment.commit(), environment.ceilings(machine.device, machine.timer, known),
    )  # fmt: skip


def run(
    selection: Selection, out: Path, *, resume: bool = False, monitor: Monitor | None = None,
    other: Any = None,
) -> schema.Run:  # fmt: skip
    """Measures what `selection` says into `out`; KeyboardInterrupt passes through when the file is in order.

    other  another process that measures the same lines in turns with ours: see `fulmen.bench.base`.
    """
    monitor = monitor or Monitor()
    try:
        device = environment.device_of(selection.device)
    except ValueError as error:
        raise BadRun(str(error)) from None
    if out.exists() and not resume:
        raise BadRun(f"{out} exists: --resume goes on with it, another --out leaves it alone")
    lines = lines_of(selection, device)  # what is wrong is said before a minute has gone by, and a file is there
    monitor.say("asking the device what it can do")
    machine = Machine.of(device)
    machine.burn_in()
    journal, record = open_journal(out, new_run(selection, machine))
    seed = int(record.environment.get("seed", 0))
    plans = []
    seen: set[str] = set()
    again = 0  # cells that were measured before
    for line, who in plans_of(selection, lines, device, monitor.say):
        entries = cells_of(line, who, record, seed, machine, selection)
        for _, cells in entries:  # lines that a --shape made equal share their cells
            again += sum(c.config_hash in journal.finished and c.config_hash not in seen for c in cells)
            new = [c for c in cells if c.config_hash not in seen | journal.finished]
            seen |= {c.config_hash for c in cells}
            cells[:] = new
        plans.append((line, [(competitor, cells) for competitor, cells in entries if cells]))
    monitor.begin(record, sum(len(cells) for _, entries in plans for _, cells in entries), again)
    passed: dict[Any, dict[str, Any]] = {}
    exhausted: dict[str, tuple[int, str]] = {}
    for line, entries in plans:
        if entries:
            monitor.group(line.case, line.suite)
            _skip(line, entries, exhausted)
            group = Group(line, entries, machine, seed, monitor.say, passed)
            _measure(group, record, journal, monitor, other)
            _remember(line, group.cells, exhausted)
    return record


def cells_of(
    line: Line, who: Sequence[Competitor], run: schema.Run, seed: int, machine: Machine, selection: Selection
) -> list[tuple[Competitor, list[schema.Cell]]]:
    """The cells of a line, by competitor."""
    what = [(pass_, cache) for pass_ in line.settings.passes for cache in caches_of(line, machine)]
    command = selection.command(line.suite)
    return [(c, [c.cell(line, run, pass_, cache, seed, command) for pass_, cache in what]) for c in who]


def _measure(group: Group, record: schema.Run, journal: Journal, monitor: Monitor, other: Any) -> None:
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


def _series(competitor: str, case: dict[str, Any]) -> str:
    """Names a kernel at a case of any length."""
    return json.dumps([competitor, sorted((k, str(v)) for k, v in case.items() if k != "N")])


def _remember(line: Line, cells: Sequence[schema.Cell], exhausted: dict[str, tuple[int, str]]) -> None:
    for cell in cells:
        if cell.status in ("oom", "timeout") and "N" in line.case:
            words = "ran out of memory" if cell.status == "oom" else "took too long"
            exhausted.setdefault(_series(cell.competitor, line.case), (line.case["N"], words))


def _skip(line: Line, entries: Sequence[tuple[Competitor, Any]], exhausted: dict[str, tuple[int, str]]) -> None:
    for competitor, _ in entries:
        known = exhausted.get(_series(competitor.name, line.case))
        if known is not None and line.case["N"] > known[0]:
            competitor.skip = f"not tried: it {known[1]} at N={known[0]}"


def default_out(suites: Sequence[str]) -> Path:
    return Path(f"bench-{'-'.join(suites)}-{datetime.now():%Y%m%d-%H%M%S}.jsonl")
