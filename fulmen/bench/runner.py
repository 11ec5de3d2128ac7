"""A whole run: plans the groups of the suites asked for, measures them one by one, and appends every cell to a file.

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
from fulmen.bench import adapters, cases, competitors, environment, schema
from fulmen.bench.group import Group, Machine, Plan


class BadRun(Exception):
    """A run that cannot be started, in words for the user."""


@dataclass(frozen=True)
class Choice:
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
    kernels: bool = False  # ask the profiler which kernels ran

    def command(self, every: bool = True) -> str:
        """What would repeat it; `every`: with the options that choose competitors, passes, shapes and the seed."""
        words = ["fulmen", "bench", "run", *self.suites]
        for name, value in (("device", self.device), ("dtype", self.dtype), ("seconds", self.seconds)):
            words += [] if value is None else [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
        if every:
            many = (("backend", self.backends), ("baseline", self.baselines), ("pass", self.passes))
            for name, values in (*many, ("shape", self.shapes)):
                words += [word for value in values for word in (f"--{name}", value)]
            words += [] if self.seed is None else ["--seed", str(self.seed)]
        return shlex.join(words)


@dataclass
class Watcher:
    """Whom a run tells of its progress; this one says nothing."""

    def begin(self, run: schema.Run, cells: int, skipped: int) -> None: ...
    def group(self, case: dict[str, Any], suite: str) -> None: ...
    def say(self, text: str) -> None: ...
    def sampled(self, group: Group) -> None: ...
    def cell(self, cell: schema.Cell) -> None: ...


# ------------------------------------------------------------------------------------------------ planning


NOBODY = "nothing to measure: nobody competes (--backend none and --baseline none?)"
Planned = tuple[Plan, list[competitors.Competitor]]


def lines_of(choice: Choice) -> list[cases.Line]:
    lines = [line for suite in choice.suites for line in cases.read(suite)]
    if choice.dtype is not None:
        dtype = cases.DTYPES.get(choice.dtype, choice.dtype)
        lines = [replace(line, case=line.case | {"dtype": dtype}) for line in lines]
        lines = [line for i, line in enumerate(lines) if line not in lines[:i]]
    if choice.shapes:
        keys = {line.op: {*adapters.of(line.op).KEYS, "grad"} for line in lines}
        shapes = [cases.shape(text) for text in choice.shapes]
        lines = cases.select(lines, shapes, keys)
    for line in lines:
        if (why := adapters.wrong_value(line.op, line.case)) is not None:
            raise cases.BadSuite(f"{'--shape: ' if choice.shapes else ''}{why}")
    chosen = []
    for line in lines:
        passes = tuple(p for p in line.settings.passes if not choice.passes or p in choice.passes)
        if passes:
            seconds = line.settings.seconds if choice.seconds is None else choice.seconds
            chosen.append(replace(line, settings=replace(line.settings, passes=passes, seconds=seconds)))
    if not chosen:
        raise BadRun("nothing to measure: no case of the suites has the passes asked for")
    return chosen


def plans_of(choice: Choice, machine: Machine, run_id: str, seed: int) -> list[Planned]:
    found = []
    for line in lines_of(choice):
        case = competitors.complete(line, machine.device)
        command = replace(choice, suites=(line.suite,)).command(every=False)
        plan = Plan(line, case, run_id, seed, command, hot=is_small(line.op, case, machine))
        who = competitors.of(line, machine.device, choice.backends, choice.baselines)
        if who:
            found.append((plan, who))
    if not found:
        raise BadRun(NOBODY)
    return found


def compiled_plans(choice: Choice, machine: Machine, run_id: str, seed: int, watcher: Watcher) -> list[Planned]:
    """`plans_of`, and on a GPU all kernels of ours that they need on disk."""
    if machine.device.type != "cuda":
        return plans_of(choice, machine, run_id, seed)
    from fulmen.bench.precompile import precompile, precompile_native

    hw = hardware.of(machine.device)
    watcher.say("compiling our kernels on all cores")
    if not choice.backends or {"auto", "cuda"} & set(choice.backends):
        precompile_native(lines_of(choice), machine.device, hw)
    plans = plans_of(choice, machine, run_id, seed)
    precompile(plans, hw)
    return plans


PREPARING = 0.5  # seconds of a cell's gate, warm-up and replay; and of a case, the results in fp64
COMPILING = 45.0


def preview(choice: Choice, device: torch.device) -> list[tuple[str, int, int, int, float]]:
    """By suite: cases, cells to measure, cells nobody can measure here, and the seconds that takes at the most."""
    found = []
    for suite in choice.suites:
        lines, cells, refused, seconds = lines_of(replace(choice, suites=(suite,))), 0, 0, 0.0
        for line in lines:
            passes = len(line.settings.passes)
            who = competitors.of(line, device, choice.backends, choice.baselines)
            able = passes * sum(c.refusal is None for c in who)
            cells, refused = cells + able, refused + passes * len(who) - able
            seconds += able * (line.settings.seconds + PREPARING) + 2 * PREPARING
        found.append((suite, len(lines), cells, refused, seconds))
    return found


def is_small(op: str, case: dict[str, Any], machine: Machine) -> bool:
    """Whether everything a call touches fits the GPU's L2, so that a hot cache is a question worth asking."""
    if machine.device.type != "cuda":
        return False
    return 2 * sum(adapters.of(op).floors(case).values()) < machine.timer.l2_bytes


# ------------------------------------------------------------------------------------------------- results


@dataclass
class Journal:
    """The results file: append, flush, and be done."""

    path: Path
    finished: set[str] = field(default_factory=set)

    def write(self, record: schema.Run | schema.Cell) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(schema.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def open_journal(path: Path, run: schema.Run, resume: bool) -> tuple[Journal, schema.Run]:
    """A new file with `run` in it, or an old one with the run it holds and what is finished of it."""
    if not path.exists():
        journal = Journal(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            journal.write(run)
        except OSError as error:
            raise BadRun(f"{path}: cannot be written: {error.strerror}") from None
        return journal, run
    if not resume:
        raise BadRun(f"{path} exists: --resume goes on with it, another --out leaves it alone")
    mend(path)
    results = schema.read([path])
    if not results.runs:
        journal = Journal(path)
        journal.write(run)
        return journal, run
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


def new_run(choice: Choice, machine: Machine, seed: int) -> schema.Run:
    now = datetime.now(timezone.utc)
    known = environment.facts(machine.device, machine.nvml, machine.timer) | {"seed": seed}
    return schema.Run(
        f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
        now.isoformat(timespec="seconds"),
        choice.command(),
        known,
        environment.commit(),
        environment.ceilings(machine.device, machine.timer, known),
    )


def run(
    choice: Choice, out: Path, *, resume: bool = False, watcher: Watcher | None = None,
    other: Callable[[Plan], Any] | None = None,
) -> schema.Run:  # fmt: skip
    """Measures what `choice` says into `out`; KeyboardInterrupt passes through when the file is in order.

    other  a group elsewhere that measures the same plan in turns with ours: see `fulmen.bench.base`.
    """
    watcher = watcher or Watcher()
    try:
        device = environment.device_of(choice.device)
    except ValueError as error:
        raise BadRun(str(error)) from None
    if out.exists() and not resume:
        raise BadRun(f"{out} exists: --resume goes on with it, another --out leaves it alone")
    lines = lines_of(choice)
    found = 0
    for line in lines:  # what is wrong is worth saying before a minute has gone by, and a file is there
        competitors.complete(line, device)
        found += len(competitors.names_in(line, choice.backends, choice.baselines))
    if not found:
        raise BadRun(NOBODY)
    watcher.say("asking the device what it can do")
    machine = Machine.of(device)
    machine.burn_in()
    seed = secrets.randbits(31) if choice.seed is None else choice.seed
    record = new_run(choice, machine, seed)
    journal, record = open_journal(out, record, resume)
    seed = int(record.environment.get("seed", seed))
    plans = compiled_plans(choice, machine, record.run_id, seed, watcher)
    seen, wanted = set(journal.finished), []
    for plan, who in plans:  # lines that a --shape made equal share their cells
        wanted.append(_hashes(plan, who) - seen)
        seen |= wanted[-1]
    every = set().union(*(_hashes(plan, who) for plan, who in plans))
    watcher.begin(record, sum(map(len, wanted)), len(every & journal.finished))
    exhausted: dict[str, tuple[int, str]] = {}
    passed: dict[Any, dict[str, Any]] = {}
    for (plan, who), hashes in zip(plans, wanted, strict=True):
        if not hashes:
            continue
        watcher.group(plan.case, plan.line.suite)
        _skip(who, plan, exhausted)
        group = Group(plan, who, machine, hashes, watcher.say, passed=passed, kernels=choice.kernels)
        _measure(group, record, journal, watcher, other(plan) if other is not None else None)
        _remember(group.cells, plan, exhausted)
    return record


def _hashes(plan: Plan, who: Sequence[competitors.Competitor]) -> set[str]:
    caches = ("cold", "hot") if plan.hot else ("cold",)
    return {plan.cell(c, p, cache).config_hash for c in who for p in plan.line.settings.passes for cache in caches}


def _measure(group: Group, record: schema.Run, journal: Journal, watcher: Watcher, other: Any) -> None:
    try:
        if other is not None:
            other.prepare()
        group.prepare()
        while not (group.done and (other is None or other.done)):
            if not group.done:
                group.sample()
            if other is not None and not other.done:
                other.sample()
            watcher.sampled(group)
    finally:
        for cell in group.finish(record):
            journal.write(cell)
            watcher.cell(cell)
        if other is not None:
            other.finish()


def _family(cell_or: str, case: dict[str, Any]) -> str:
    return json.dumps([cell_or, sorted((k, str(v)) for k, v in case.items() if k != "N")])


def _remember(cells: Sequence[schema.Cell], plan: Plan, exhausted: dict[str, tuple[int, str]]) -> None:
    for cell in cells:
        if cell.status in ("oom", "timeout") and "N" in plan.case:
            words = "ran out of memory" if cell.status == "oom" else "took too long"
            exhausted.setdefault(_family(cell.competitor, plan.case), (plan.case["N"], words))


def _skip(who: Sequence[competitors.Competitor], plan: Plan, exhausted: dict[str, tuple[int, str]]) -> None:
    for competitor in who:
        known = exhausted.get(_family(competitor.name, plan.case))
        if known is not None and plan.case["N"] > known[0]:
            competitor.skip = f"not tried: it {known[1]} at N={known[0]}"


def default_out(suites: Sequence[str]) -> Path:
    return Path(f"bench-{'-'.join(suites)}-{datetime.now():%Y%m%d-%H%M%S}.jsonl")


def device_words(record: schema.Run) -> str:
    known = record.environment
    where = f"{known['device']}, torch {known['torch']}"
    return where + (f", {known['threads']} threads" if known.get("kind") == "cpu" else "")
