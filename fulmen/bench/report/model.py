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
from fulmen.bench.audit import grouped, number, time_ms
from fulmen.bench.schema import text

LENGTHS = ("N", "N_Q", "N_KV")
KINDS = ("products", "attention", "glue", "optimiser")  # of kernels
MEMORY_PARTS = ("inputs", "output", "saved", "workspace_forward", "gradients", "workspace_backward", "peak")


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

    def __post_init__(self) -> None:
        cell, self.timed = self.cell, self.median is not None
        self.flagged = any(words.flag(name).severity in ("care", "bad") for name, _ in self.flags)
        self.kind = ("flagged" if self.flagged else "ok") if self.timed else cell.status
        self.label = self.family.label + ("" if self.n is None else f" · N {self.n:,}")
        self.place = (self.family, self.n, cell.pass_, cell.cache, cell.run_id)  # equal for the rivals of one case
        shares = (ratio(t.get("error"), t.get("bound")) for t in cell.correctness.values())
        self.worst = max((x for x in shares if x is not None), default=None)  # error, in units of what it may be

    def size(self, part: str = "peak", what: str = "bytes") -> float | None:
        """Bytes of a part of the memory, or its floor."""
        return number(self.cell.memory.get(part, {}).get(what))

    def of_audit(self, what: str) -> float | None:
        return number(self.cell.audit.get(what))

    def rate(self, what: str) -> float | None:
        """FLOP/s or B/s, counting the floor: the work that cannot be avoided."""
        work = self.of_audit(what)
        return None if work is None or self.median is None else number(work / self.median * 1e3)


class Headline(NamedTuple):
    """Our speed against the baseline in one suite and pass: geometric mean and range over cases."""

    suite: str
    pass_: str
    competitor: str
    baseline: str
    mean: float
    low: float
    high: float
    cases: int
    other: bool  # the baseline computes another function


@dataclass
class Report:
    results: schema.Results
    rows: list[Row]
    relations: audit.Relations

    def __post_init__(self) -> None:
        self.families = list(dict.fromkeys(row.family for row in self.rows))
        self.suites = list(dict.fromkeys(row.cell.suite for row in self.rows))
        devices = (text(run.environment.get("device", "unknown device")) for run in self.results.runs.values())
        self.title = f"{', '.join(dict.fromkeys(devices))}: {', '.join(self.suites)}"

    def of(self, suite: str) -> list[Row]:
        """The rows of a suite that no later run replaced."""
        return [row for row in self.rows if row.cell.suite == suite and not row.replaced]

    def flops_unit(self) -> tuple[float, str]:
        """TFLOP/s, or GFLOP/s where nothing is as fast as that."""
        rates = [row.rate("flops") or 0.0 for row in self.rows]
        return (1e12, "TFLOP/s") if max(rates, default=0.0) >= 1e12 else (1e9, "GFLOP/s")


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
    """A copy of the cell with its audit, and with times only if it counts; raises BadResults for odd nested fields."""
    flags = cell.audit.get("flags", [])

    def objects(values: Iterable[Any]) -> bool:
        return all(isinstance(x, dict) for x in values)

    for right, what in (
        (isinstance(flags, list) and objects(flags), "audit.flags must be a list of objects"),
        (objects(cell.memory.values()), "memory must map a part to its bytes and floor"),
        (objects(cell.correctness.values()), "correctness must map a tensor to its errors"),
        (objects(cell.resources), "resources must be a list of objects"),
        (all(number(x) is not None for x in cell.kinds.values()), "kinds must be finite numbers"),
        (all(number(x) is not None for x in cell.samples_ms), "samples_ms must be finite"),
        (all(number(x) is not None for x in cell.clocks_mhz), "clocks_mhz must be finite numbers"),
    ):
        if not right:
            raise schema.BadResults(f"run {cell.run_id!r}, {cell.competitor!r}, {cell.pass_}: {what}")
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


def baseline(rows: Iterable[Row]) -> str:
    """The competitor that others are divided by: torch's own attention if there, else a peer timed most often."""
    timed = Counter(row.cell.competitor for row in rows if row.timed)
    return min(timed, key=lambda x: ("sdpa" not in x.lower(), "fulmen" in x.lower(), -timed[x], x), default="")


def speedup(row: Row, base: Row | None) -> float | None:
    """How many times as fast as the baseline; None without a time of either."""
    return None if base is None or row.median is None or base.median is None else base.median / row.median


def headlines(report: Report) -> list[Headline]:
    """`fulmen auto`, or else the one of ours that was timed most often, against the baseline of each suite.

    Cases where both compute the same function, if there are any.
    """
    found = []
    for suite in report.suites:
        rows = [row for row in report.of(suite) if row.timed]
        rows = [row for row in rows if row.cell.cache == "cold"] or rows
        base, names = baseline(rows), Counter(row.cell.competitor for row in rows)
        ours = [x for x in names if x.startswith("fulmen") and x != base] or [x for x in names if x != base]
        best = max(ours, key=lambda x: (x == "fulmen auto", names[x]), default="")
        bases = {row.place: row for row in rows if row.cell.competitor == base}
        pairs = [(row, bases[row.place]) for row in rows if row.cell.competitor == best and row.place in bases]
        alike = [(a, b) for a, b in pairs if a.cell.function == b.cell.function]
        for pass_, some in grouped(alike or pairs, lambda pair: pair[0].cell.pass_).items():
            gains = [gain for pair in some if (gain := speedup(*pair)) is not None]
            mean = statistics.geometric_mean(gains)
            found.append(Headline(suite, pass_, best, base, mean, min(gains), max(gains), len(gains), not alike))
    return found


def correctness(report: Report) -> list[dict[str, Any]]:
    """For each competitor, suite and precision: tensors checked, how many are wrong, and the worst; worst first."""
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for i, row in enumerate(report.rows):
        whose = (row.cell.competitor, row.cell.suite, text(row.cell.case.get("dtype", "")))
        for tensor, one in row.cell.correctness.items():
            line = lines.setdefault(whose, dict(zip(("competitor", "suite", "dtype"), whose, strict=True)))
            line["tensors"] = line.get("tensors", 0) + 1
            line["wrong"] = line.get("wrong", 0) + (one.get("ok") is False)
            share = ratio(one.get("error"), one.get("bound")) or 0.0
            if share >= line.get("share", 0.0):
                line |= {"share": share, "row": i, "tensor": tensor} | {k: one.get(k) for k in ("error", "bound")}
    return sorted(lines.values(), key=lambda line: (not line["wrong"], -line["share"]))


# --------------------------------------------------------------------------------------------- numbers


def digits(x: float | None, significant: int = 4) -> str:
    """0.1401, 12.34, 1,234: as many digits as say something."""
    if not x:
        return "" if x is None else "0"
    places = significant - 1 - math.floor(math.log10(abs(x)))
    return f"{x:.{significant - 1}g}" if places > 6 else f"{x:,.{max(places, 0)}f}"


def size(x: float | None) -> str:
    """Bytes in binary units."""
    if x is None:
        return ""
    power = min(3, max(0, math.floor(math.log2(abs(x)) / 10))) if x else 0
    return f"{digits(x / 1024**power, 4 if power else 1)} {('B', 'KiB', 'MiB', 'GiB')[power]}"


FIRST = ("device", "arch", "sm_count", "l2_bytes", "memory_bytes", "power_limit_w", "driver", "cuda", "torch", "triton",
         "python", "cpu", "commit", "flops_measured", "flops_hard", "bytes_measured", "bytes_hard")  # fmt: skip

UNITS = {"bytes": "B", "mhz": "MHz", "w": "W", "c": "°C", "ms": "ms"}


def environment(run: schema.Run) -> list[tuple[str, str]]:
    """The facts and ceilings of a run as name and value, in the order in which a reader looks for them."""
    facts = {k: v for k, v in (run.environment | run.ceilings).items() if v not in (None, "", [], {})}
    changed = " with changes" if run.commit.get("dirty") else ""
    facts["commit"] = str(run.commit.get("sha") or "unknown")[:12] + changed
    names = sorted(facts, key=lambda k: (FIRST.index(k) if k in FIRST else len(FIRST), k))
    when = run.time[:16].replace("T", " ") + (" UTC" if run.time.endswith(("Z", "+00:00")) else "")
    return [*(fact(k, facts[k]) for k in names), ("measured", when), ("run", run.run_id), ("protocol", run.protocol)]


def fact(name: str, value: Any) -> tuple[str, str]:
    """A name in words, and the value in the unit that the name ends or begins with."""
    x, (what, _, unit) = number(value), name.rpartition("_")
    words = name.replace("_", " ")
    if x is not None and name.startswith("flops"):
        return words, f"{digits(x / 1e12, 3)} TFLOP/s" if x >= 1e12 else f"{digits(x / 1e9, 3)} GFLOP/s"
    if x is not None and name.startswith("bytes"):
        return words, f"{digits(x / 1e9)} GB/s"
    if x is not None and unit in UNITS:
        return what.replace("_", " "), size(x) if unit == "bytes" else f"{digits(x)} {UNITS[unit]}"
    return words, ", ".join(map(text, value)) if isinstance(value, list) else text(value)
