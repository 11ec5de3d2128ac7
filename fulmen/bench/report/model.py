"""What every form of the report shows, computed once from the cells.

    family   the cells of one suite whose cases differ in N alone: one heatmap, one scaling plot
    timed    status "ok" and a time: only these have a number anywhere in a report

Cells without an audit are judged here. Relations between cells (contradictions, other functions, scaling) are always
computed anew, because a results file is written one cell at a time and cannot hold them.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fulmen.bench import audit, schema, words
from fulmen.bench.audit import grouped, time_ms
from fulmen.bench.schema import number, text

LENGTHS = ("N", "N_Q", "N_KV")
# Kernels by kind and memory by part, with their colours in the style sheet.
KINDS = {"products": "s0", "attention": "s1", "glue": "s4", "optimiser": "s2"}
MEMORY = {"inputs": "g0", "output": "g1", "gradients": "g2", "saved": "s1", "workspace_forward": "s5",
          "workspace_backward": "s0"}  # fmt: skip


class Family(NamedTuple):
    suite: str
    label: str
    case: tuple[tuple[str, str], ...]


@dataclass(eq=False)
class Row:
    """A cell with what the report reads off it; `median`, `low`, `high` are None unless it counts."""

    cell: schema.Cell
    family: Family
    n: int | None
    median: float | None = None
    low: float | None = None
    high: float | None = None
    flags: list[tuple[str, str]] = field(default_factory=list)  # flag, why
    replaced: bool = False  # a later run measured the same
    base: Row | None = None  # the baseline's row of the same case and run, if both have a time
    index: int = 0  # of the competitor in its suite: its colour and marker
    id: str = ""  # in a link

    def __post_init__(self) -> None:
        cell, self.timed = self.cell, self.median is not None
        self.flagged = any(words.flag(name).severity in ("care", "bad") for name, _ in self.flags)
        self.kind = ("flagged" if self.flagged else "ok") if self.timed else cell.status
        self.label = self.family.label + ("" if self.n is None else f" · N {self.n:,}")
        self.place = (self.family, self.n, cell.pass_, cell.cache, cell.run_id)  # equal for the rivals of one case
        self.curve = (self.family, cell.competitor, cell.pass_, cell.cache)  # equal for what differs in N alone
        shares = (ratio(t.get("error"), t.get("bound")) for t in cell.correctness.values())
        self.worst = max((x for x in shares if x is not None), default=None)  # error, in units of what it may be

    @property
    def gain(self) -> float | None:
        """How many times as fast as the baseline; None without a time of either."""
        return None if self.base is None else ratio(self.base.median, self.median)

    @property
    def other(self) -> bool:
        """The baseline computes another function: a choice of model, not of kernel."""
        return self.base is not None and self.base.cell.function != self.cell.function

    def size(self, part: str = "peak", what: str = "bytes") -> float | None:
        """Bytes of a part of the memory, or its floor."""
        return number(self.cell.memory.get(part, {}).get(what))

    def of_audit(self, what: str) -> float | None:
        return number(self.cell.audit.get(what))

    def rate(self, what: str) -> float | None:
        """FLOP/s or B/s, counting the floor: the work that cannot be avoided."""
        work = self.of_audit(what)
        return None if work is None or self.median is None else number(work / self.median * 1e3)


class Mean(NamedTuple):
    """The speed of one competitor against the baseline: geometric mean and range over rows, all of one pass."""

    mean: float
    low: float
    high: float
    rows: list[Row]

    @property
    def name(self) -> str:
        return self.rows[0].cell.competitor + (" ≠" if any(row.other for row in self.rows) else "")

    @property
    def range(self) -> str:
        return f"{digits(self.low, 3)} to {times_as_fast(self.high)}"


@dataclass
class Report:
    results: schema.Results
    rows: list[Row]
    relations: audit.Relations

    def __post_init__(self) -> None:
        suites = grouped(self.rows, lambda row: row.cell.suite)
        self.suites, self.baselines = list(suites), {suite: baseline(self.of(suite)) for suite in suites}
        devices = (text(run.environment.get("device", "unknown device")) for run in self.results.runs.values())
        self.title = f"{', '.join(dict.fromkeys(devices))}: {', '.join(self.suites)}"
        for i, row in enumerate(self.rows):
            row.id = row.cell.config_hash + (f"-{i}" if row.replaced else "")
        for suite, rows in suites.items():
            names = list(dict.fromkeys(row.cell.competitor for row in rows))
            live = [row for row in rows if row.timed and not row.replaced]
            bases = {row.place: row for row in live if row.cell.competitor == self.baselines[suite]}
            for row in rows:
                row.index = names.index(row.cell.competitor)
            for row in live:
                row.base = bases.get(row.place)
        curves = {id(row.cell): row.curve for row in self.rows}
        self.fits = {curves[id(fit.cell)]: fit for fit in self.relations.scaling}

    def of(self, suite: str) -> list[Row]:
        """The rows of a suite that no later run replaced."""
        return [row for row in self.rows if row.cell.suite == suite and not row.replaced]


# ---------------------------------------------------------------------------------------------- reading
def read(results: schema.Results) -> Report:
    rows: list[Row] = []
    latest: dict[str, Row] = {}
    cells = [judged(cell, results.runs[cell.run_id]) for cell in results.cells]
    relations = audit.judge_group(cells, results.runs)
    for cell in cells:
        flags = [(str(f.get("flag", "")), str(f.get("why", ""))) for f in cell.audit.get("flags", [])]
        row = Row(cell, family_of(cell), length(cell.case), *times(cell), flags)
        earlier = latest.get(cell.config_hash)
        if earlier is not None:
            old, new = (results.runs[r.cell.run_id].time for r in (earlier, row))
            row.replaced, earlier.replaced = new < old, new >= old
        if not row.replaced:
            latest[cell.config_hash] = row
        rows.append(row)
    return Report(results, rows, relations)


def judged(cell: schema.Cell, run: schema.Run) -> schema.Cell:
    """A copy of the cell with its audit, and with times only if it counts."""
    cell = replace(cell, audit=copy.deepcopy(cell.audit), memory=copy.deepcopy(cell.memory))
    cell.device_ms, cell.kernels_ms, cell.host_ms = map(time_ms, (cell.device_ms, cell.kernels_ms, cell.host_ms))
    if "flags" not in cell.audit:
        audit.judge(cell, run)
    if cell.status == "ok" and times(cell)[0] is None:
        audit.withhold(cell, "the file holds no number that can be a time")
    elif cell.status != "ok":
        cell.drop_times()
        cell.audit.pop("efficiency", None)
    audit.check_roof(cell, run)
    return cell


def times(cell: schema.Cell) -> tuple[float | None, float | None, float | None]:
    """Median and its 95 % interval, from the samples where the file does not say."""
    ordered, said = sorted(cell.samples_ms), number(cell.stats.get("median"))
    middle = time_ms(statistics.median(ordered) if said is None and ordered else said)
    if cell.status != "ok" or middle is None:
        return None, None, None
    low, high = cell.stats.get("low"), cell.stats.get("high")
    if (time_ms(low) is None or time_ms(high) is None) and len(ordered) >= 6:
        low, high = audit.median_interval(ordered)
    return middle, time_ms(low), time_ms(high)


def ratio(a: Any, b: Any) -> float | None:
    a, b = number(a), number(b)
    return None if a is None or not b else a / b


def length(case: dict[str, Any]) -> int | None:
    return next((case[name] for name in LENGTHS if type(case.get(name)) is int), None)


def family_of(cell: schema.Cell) -> Family:
    """What the cells share whose cases differ in N alone."""
    n = length(cell.case)
    rest = {k: v for k, v in cell.case.items() if k not in LENGTHS or v != n}
    label = " · ".join(schema.case_words(rest)) or "one case"
    return Family(cell.suite, label, tuple(sorted((k, text(v)) for k, v in rest.items())))


# ---------------------------------------------------------------------------------------------- judging
def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Cells by what a reader may do with them, every cell once."""
    found = Counter(row.kind for row in rows)
    return {name: found[name] for name in words.KINDS if found[name]}


def proven(rows: list[Row]) -> str:
    timed = sum(row.timed for row in rows)
    said = f"{'All' if timed == len(rows) else f'{timed:,} of'} {len(rows):,} cells proven right, then timed."
    again = sum(row.replaced for row in rows)
    return f"{said} {again:,} were measured again: tables show the last run." if again else said


def baseline(rows: Iterable[Row]) -> str:
    """The competitor that others are divided by: torch's own attention if there, else a peer timed most often."""
    timed = Counter(row.cell.competitor for row in rows if row.timed)
    return min(timed, key=lambda x: ("sdpa" not in x.lower(), "fulmen" in x.lower(), -timed[x], x), default="")


def several(rows: Iterable[Row]) -> bool:
    """Of more than one length."""
    return len({row.n for row in rows}) > 1


def means(rows: Iterable[Row]) -> list[Mean]:
    """Of every competitor that has cases in common with the baseline; the fastest first."""
    found = []
    for some in grouped((row for row in rows if row.base), lambda row: row.cell.competitor).values():
        gains = [row.gain or 1.0 for row in some]
        found.append(Mean(statistics.geometric_mean(gains), min(gains), max(gains), some))
    return sorted(found, key=lambda one: -one.mean)


def headlines(report: Report) -> list[Mean]:
    """`fulmen auto`, or else the one of ours that was timed most often, in each suite and pass.

    Cases where baseline and ours compute the same function, if there are any.
    """
    found = []
    for suite in report.suites:
        rows = [row for row in report.of(suite) if row.timed]
        rows = [row for row in rows if row.cell.cache == "cold"] or rows
        names = Counter(row.cell.competitor for row in rows if row.cell.competitor != report.baselines[suite])
        ours = [x for x in names if x.startswith("fulmen")] or list(names)
        best = max(ours, key=lambda x: (x == "fulmen auto", names[x]), default="")
        rows = [row for row in rows if row.cell.competitor == best and row.base]
        alike = [row for row in rows if not row.other] or rows
        found += [one for some in grouped(alike, lambda row: row.cell.pass_).values() for one in means(some)]
    return found


def longest(rows: Iterable[Row]) -> list[list[Row]]:
    """The rivals at the longest length of each family, where memory matters; of the total pass, if there is one."""

    def rank(row: Row) -> tuple[int, int]:
        return {"total": 2, "forward": 1}.get(row.cell.pass_, 0), row.n or 0

    families = grouped((row for row in rows if row.size() is not None), lambda row: row.family).values()
    return [[row for row in family if rank(row) == max(map(rank, family))] for family in families]


# --------------------------------------------------------------------------------------------- numbers
def digits(x: float | None, significant: int = 4) -> str:
    """0.1401, 12.34, 1,234: as many digits as say something."""
    if not x:
        return "" if x is None else "0"
    places = significant - 1 - math.floor(math.log10(abs(x)))
    return f"{x:.{significant - 1}g}" if places > 6 else f"{x:,.{max(places, 0)}f}"


def times_as_fast(x: float | None) -> str:
    return "" if x is None else f"{digits(x, 3)}×"


def percent(x: float | None, places: int = 0) -> str:
    return "" if x is None else f"{100 * x:.{places}f} %"


def size(x: float | None) -> str:
    """Bytes in binary units."""
    if x is None:
        return ""
    power = min(3, max(0, math.floor(math.log2(abs(x)) / 10))) if x else 0
    return f"{digits(x / 1024**power, 4 if power else 1)} {('B', 'KiB', 'MiB', 'GiB')[power]}"
