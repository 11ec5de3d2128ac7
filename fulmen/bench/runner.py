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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fulmen import hardware
from fulmen.bench import Refused, adapters, cases, competitors, environment, floors, kernels, schema
from fulmen.bench.cases import Line
from fulmen.bench.competitors import Competitor
from fulmen.bench.group import Group
from fulmen.bench.timing import Timer

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

    def command(self) -> str:
        """What would repeat it."""
        options: dict[str, Sequence[Any]] = {
            "device": [self.device], "dtype": [self.dtype], "seconds": [self.seconds], "backend": self.backends,
            "baseline": self.baselines, "pass": self.passes, "shape": self.shapes, "seed": [self.seed],
        }  # fmt: skip
        given = [(name, value) for name, values in options.items() for value in values if value is not None]
        words = [word for name, value in given for word in (f"--{name}", schema.text(value))]
        return shlex.join(["fulmen", "bench", "run", *self.suites, *words])


class Monitor:
    """Whom a run tells of its progress; this one says nothing."""

    def begin(self, run: schema.Run, cells: int, skipped: int) -> None: ...
    def group(self, case: dict[str, Any], suite: str) -> None: ...
    def say(self, text: str) -> None: ...
    def sampled(self, group: Group) -> None: ...
    def cell(self, cell: schema.Cell) -> None: ...


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
        raise Refused(f"{'--shape: ' if selection.shapes else ''}{error}") from None
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


def default_out(suites: Sequence[str]) -> Path:
    return Path(f"bench-{'-'.join(suites)}-{datetime.now():%Y%m%d-%H%M%S}.jsonl")


# ------------------------------------------------------------------------------------------------- measuring
def record_of(selection: Selection, timer: Timer, commit: dict[str, Any]) -> schema.Run:
    now, seed = datetime.now(timezone.utc), secrets.randbits(31) if selection.seed is None else selection.seed
    known = environment.facts(timer) | {"seed": seed}
    return schema.Run(
        f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}", now.isoformat(timespec="seconds"), selection.command(), known,
        commit, environment.ceilings(timer, known),
    )  # fmt: skip


def write(out: Path, record: schema.Run | schema.Cell) -> None:
    """The record is on disk when this returns."""
    with out.open("a", encoding="utf-8") as file:
        file.write(schema.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def begin(out: Path, run: schema.Run) -> tuple[schema.Run, set[str]]:
    """Writes `run`, or finds the one in an old file; with the hashes of the cells that are finished."""
    results = schema.Results({}, [])
    if out.exists():
        text = out.read_bytes()
        out.write_bytes(text[: text.rfind(b"\n") + 1])  # a last line that was being written is dropped
        results = schema.read([out])
    if not results.runs:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write(out, run)
        except OSError as error:
            raise Refused(f"{out}: cannot be written: {error.strerror}") from None
        return run, set()
    old = list(results.runs.values())[-1]
    for what, was, now in (
        ("on another device", old.environment.get("device"), run.environment.get("device")),
        ("with another torch", old.environment.get("torch"), run.environment.get("torch")),
        ("from another source", old.commit.get("source"), run.commit.get("source")),
    ):
        if was != now:
            raise Refused(f"{out} was measured {what} ({was}, now {now}): start a new file with another --out")
    finished = (c for c in results.cells if c.run_id == old.run_id and c.status != "interrupted")
    return old, {cell.config_hash for cell in finished}


def cells_of(selection: Selection, line: Line, who: Competitor, run: schema.Run, timer: Timer) -> list[schema.Cell]:
    """Of each pass; with a hot cache, too, where everything a call touches fits the GPU's L2."""
    least = floors.memory(line.op, line.case) or {}
    touched = sum(least.get(name, 0.0) for name in ("inputs", "output", "gradients"))
    caches = ("cold", "hot") if timer.cuda and 2 * touched < timer.l2_bytes else ("cold",)
    ours, theirs = (who.name.removeprefix(competitors.OURS), "none") if who.ours else ("none", who.name)
    shape = ",".join(f"{key}={schema.text(value)}" for key, value in {"op": line.op, **line.case}.items())
    one = {"suites": (line.suite,), "backends": (ours,), "baselines": (theirs,), "shapes": (shape,)}
    alone = replace(selection, **one, seed=int(run.environment.get("seed", 0)))  # type: ignore[arg-type]
    commands = {pass_: replace(alone, passes=(pass_,)).command() for pass_ in line.settings.passes}
    states = [(pass_, cache) for pass_ in commands for cache in caches]
    return [who.cell(line, run.run_id, *state, alone.seed or 0, commands[state[0]]) for state in states]


def run(
    selection: Selection, out: Path, *, resume: bool = False, monitor: Monitor | None = None,
    other: Any = None, commit: dict[str, Any] | None = None,
) -> schema.Run:  # fmt: skip
    """Measures what `selection` says into `out`; KeyboardInterrupt passes through when the file is in order.

    other   another process that measures the same lines, interleaved with ours: see `fulmen.bench.base`
    commit  what is measured, where git does not know
    """
    monitor = monitor or Monitor()
    if out.exists() and not resume:
        raise Refused(f"{out} exists: --resume goes on with it, another --out leaves it alone")
    device = environment.device_of(selection.device)
    lines = lines_of(selection, device)  # what is wrong is said before a minute has gone by
    monitor.say("asking the device what it can do")
    timer = Timer(device)
    timer.burn_in()
    record, finished = begin(out, record_of(selection, timer, commit or environment.commit()))
    who = (selection.backends, selection.baselines)
    if device.type == "cuda":
        monitor.say("compiling our kernels on all cores")
        kernels.compile_ahead([(line, competitors.rivals(line, *who)[0]) for line in lines], hardware.of(device))
    plans, planned = [], set[str]()
    for line in lines:
        entries = []
        for competitor in competitors.of(line, device, *who):
            cells = cells_of(selection, line, competitor, record, timer)
            new = [c for c in cells if c.config_hash not in planned | finished]  # a --shape may have made lines equal
            planned |= {c.config_hash for c in cells}
            entries += [(competitor, new)] if new else []
        plans += [(line, entries)] if entries else []
    monitor.begin(record, len(planned - finished), len(planned & finished))
    exhausted: dict[Any, tuple[float, str]] = {}  # by kernel and case but for N: at which N, and why
    passed: dict[Any, dict[str, Any]] = {}
    for line, entries in plans:
        monitor.group(line.case, line.suite)
        rest = tuple(sorted((k, str(v)) for k, v in line.case.items() if k != "N"))
        for competitor, _ in entries:
            N, why = exhausted.get((competitor.name, rest), (math.inf, ""))
            if line.case.get("N", 0) > N:
                competitor.skip = f"not tried: it {why} at N={N}"
        group = Group(line, entries, timer, int(record.environment.get("seed", 0)), monitor.say, passed)
        measure(group, record, out, monitor, other)
        for cell in group.cells:
            if cell.status in EXHAUSTED and "N" in line.case:
                exhausted.setdefault((cell.competitor, rest), (line.case["N"], EXHAUSTED[cell.status]))
    return record


def measure(group: Group, record: schema.Run, out: Path, monitor: Monitor, other: Any) -> None:
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
            write(out, cell)
            monitor.cell(cell)
