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
from typing import Any

from fulmen.bench import audit, schema
from fulmen.bench.audit import grouped, number, time_ms
from fulmen.bench.report import words

LENGTHS = ("N", "N_Q", "N_KV")
ORDER = ("B", "H", "H_KV", "N", "N_Q", "N_KV", "D", "E", "dtype", "causal", "decay")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
MEMORY_PARTS = ("inputs", "output", "saved", "workspace_forward", "gradients", "workspace_backward")


@dataclass(frozen=True)
class Family:
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

    @property
    def timed(self) -> bool:
        return self.median is not None

    @property
    def flagged(self) -> bool:
        return any(words.flag(name).severity in ("care", "bad") for name, _ in self.flags)

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for the rivals of one case and pass."""
        return self.family, self.n, self.cell.pass_, self.cell.cache, self.cell.run_id

    @property
    def label(self) -> str:
        return self.family.label + ("" if self.n is None else f" · N {self.n:,}")

    @property
    def worst(self) -> float | None:
        """The largest error of any tensor, in units of what it may be."""
        ratios = [x for t in self.cell.correctness.values() if (x := ratio(t.get("error"), t.get("bound"))) is not None]
        return max(ratios, default=None)

    def size(self, part: str = "peak", what: str = "bytes") -> float | None:
        """Bytes of a part of the memory, or its floor."""
        return number(self.cell.memory.get(part, {}).get(what))

    def rate(self, what: str) -> float | None:
        """FLOP/s or B/s, counting the floor: the work that cannot be avoided."""
        work = number(self.cell.audit.get(what))
        return None if work is None or self.median is None else number(work / self.median * 1e3)


@dataclass(frozen=True)
class Headline:
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

    @property
    def families(self) -> list[Family]:
        return list(dict.fromkeys(row.family for row in self.rows))

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(row.cell.suite for row in self.rows))

    @property
    def title(self) -> str:
        devices = (text(run.environment.get("device", "unknown device")) for run in self.results.runs.values())
        return f"{', '.join(dict.fromkeys(devices))}: {', '.join(self.suites)}"

    def of(self, suite: str, family: Family | None = None) -> list[Row]:
        """The rows of a suite or a family that no later run replaced."""
        rows = [row for row in self.rows if row.cell.suite == suite and not row.replaced]
        return rows if family is None else [row for row in rows if row.family == family]

    def family_of(self, curve: audit.Scaling) -> Family:
        """The family through whose cells a curve runs."""
        return next(row.family for row in self.rows if row.cell is curve.cell)

    def flops_unit(self) -> tuple[float, str]:
        """TFLOP/s, or GFLOP/s where nothing is as fast as that."""
        rates = [row.rate("flops") or 0.0 for row in self.rows]
        return (1e12, "TFLOP/s") if max(rates, default=0.0) >= 1e12 else (1e9, "GFLOP/s")


# ---------------------------------------------------------------------------------------------- reading


def ratio(a: Any, b: Any) -> float | None:
    a, b = number(a), number(b)
    return None if a is None or not b else a / b


def check(cell: schema.Cell) -> None:
    """The nested fields, which the schema leaves open; raises BadResults."""
    where = f"run {cell.run_id!r}, {cell.competitor!r}, {cell.pass_}"
    flags = cell.audit.get("flags", [])

    def objects(values: Iterable[Any]) -> bool:
        return all(isinstance(x, dict) for x in values)

    for right, what in (
        (isinstance(flags, list) and objects(flags), "audit.flags must be a list of objects"),
        (objects(cell.memory.values()), "memory must map a part to its bytes and floor"),
        (objects(cell.correctness.values()), "correctness must map a tensor to its errors"),
        (objects(cell.resources), "resources must be a list of objects"),
        (all(number(x) is not None for x in cell.samples_ms), "samples_ms must be finite"),
        (all(number(x) is not None for x in cell.clocks_mhz), "clocks_mhz must be finite numbers"),
    ):
        if not right:
            raise schema.BadResults(f"{where}: {what}")


def times(cell: schema.Cell) -> tuple[float | None, float | None, float | None]:
    """Median and its 95 % interval, from the samples where the file does not say."""
    if cell.status != "ok":
        return None, None, None
    ordered, n = sorted(cell.samples_ms), len(cell.samples_ms)
    said = number(cell.stats.get("median"))
    middle = time_ms(statistics.median(ordered) if said is None and n else said)
    if middle is None:
        return None, None, None
    low, high = time_ms(cell.stats.get("low")), time_ms(cell.stats.get("high"))
    if (low is None or high is None) and n >= 6:
        half = 0.98 * math.sqrt(n)  # order statistics around the median, by the normal approximation
        low, high = (
            time_ms(ordered[min(max(i, 0), n - 1)]) for i in (math.floor(n / 2 - half), math.ceil(n / 2 + half))
        )
    return middle, low, high


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def length(case: dict[str, Any]) -> int | None:
    found = (case[name] for name in LENGTHS if isinstance(case.get(name), int) and not isinstance(case[name], bool))
    return next(found, None)


def family_of(cell: schema.Cell) -> Family:
    """What the cells share whose cases differ in N alone. Sizes that follow from others are not said again."""
    n, case = length(cell.case), cell.case
    rest = {k: v for k, v in case.items() if k not in LENGTHS or v != n}
    sizes, others = [], []
    for k in sorted(rest, key=lambda k: (ORDER.index(k) if k in ORDER else len(ORDER), k)):
        v = rest[k]
        if v is None or (k in ("H_KV", "E") and v == case.get({"H_KV": "H", "E": "D"}[k])):
            continue
        if k.isupper():
            sizes.append(f"{k}{text(v)}" if len(k) == 1 else f"{k} {text(v)}")
        elif isinstance(v, bool):
            others.append(k if v else f"no {k}" if k != "causal" else "full")
        else:
            others.append(DTYPES.get(text(v), text(v)) if k == "dtype" else f"{k} {text(v)}")
    label = " · ".join(x for x in (" ".join(sizes), *others) if x)
    return Family(cell.suite, label or "one case", tuple(sorted((k, text(v)) for k, v in rest.items())))


def judged(results: schema.Results) -> list[schema.Cell]:
    """The cells with their audit, as copies where it writes."""
    cells = []
    for cell in results.cells:
        check(cell)
        fresh, run = replace(cell, audit=copy.deepcopy(cell.audit), memory=copy.deepcopy(cell.memory)), results.runs
        if "flags" not in fresh.audit:
            audit.judge(fresh, run[cell.run_id])
        if fresh.status == "ok" and times(fresh)[0] is None:
            audit.withhold(fresh, "the file holds no number that can be a time")
        audit.check_roof(fresh, run[cell.run_id])
        cells.append(fresh)
    return cells


def read(results: schema.Results) -> Report:
    rows: list[Row] = []
    latest: dict[str, Row] = {}
    cells = judged(results)
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


# ---------------------------------------------------------------------------------------------- judging


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Cells by what a reader may do with them, every cell once."""
    found = Counter(("flagged" if row.flagged else "ok") if row.timed else row.cell.status for row in rows)
    order = ("ok", "flagged", *(s for s in schema.STATUSES if s != "ok"))
    return {name: found[name] for name in order if found[name]}


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
        if not ours:
            continue
        best = "fulmen auto" if "fulmen auto" in ours else max(ours, key=lambda x: names[x])
        bases = {row.place: row for row in rows if row.cell.competitor == base}
        pairs = [(row, bases[row.place]) for row in rows if row.cell.competitor == best and row.place in bases]
        alike = [(a, b) for a, b in pairs if a.cell.function == b.cell.function]
        for pass_, some in grouped(alike or pairs, lambda pair: pair[0].cell.pass_).items():
            gains = [gain for pair in some if (gain := speedup(*pair)) is not None]
            mean = statistics.geometric_mean(gains)
            found.append(Headline(suite, pass_, best, base, mean, min(gains), max(gains), len(gains), not alike))
    return found


# --------------------------------------------------------------------------------------------- numbers


def digits(x: float | None, significant: int = 4) -> str:
    """0.1401, 12.34, 1,234: as many digits as say something."""
    if not x:
        return "" if x is None else "0"
    places = significant - 1 - math.floor(math.log10(abs(x)))
    return f"{x:,.{places}f}" if 0 <= places <= 6 else f"{x:,.0f}" if places < 0 else f"{x:.{significant - 1}g}"


def size(x: float | None) -> str:
    """Bytes in binary units."""
    if x is None:
        return ""
    power = min(3, max(0, math.floor(math.log2(abs(x)) / 10))) if x else 0
    return f"{digits(x / 1024**power, 4 if power else 1)} {('B', 'KiB', 'MiB', 'GiB')[power]}"


FACTS = {
    "device": "device", "arch": "compute capability", "sm_count": "SMs", "l2_bytes": "L2 cache",
    "memory_bytes": "memory", "power_limit_w": "power limit, W", "driver": "driver", "cuda": "CUDA",
    "torch": "torch", "triton": "triton", "python": "python", "cpu": "CPU",
}  # fmt: skip
CEILINGS = {
    "flops_measured": "arithmetic, measured", "flops_nominal": "arithmetic, rated",
    "flops_hard": "arithmetic, at the highest clock", "bytes_measured": "memory, measured copy",
    "bytes_hard": "memory, at the highest clock", "clock_max_mhz": "highest SM clock",
}  # fmt: skip


def environment(run: schema.Run) -> list[tuple[str, str]]:
    """The facts of a run as name and value, in the order in which a reader looks for them."""
    facts = {k: v for k, v in run.environment.items() if v not in (None, "", [], {})}
    if not number(facts.get("arch")):  # a CPU
        facts.pop("arch", None)
        if facts.get("cpu") == facts.get("device"):
            facts.pop("cpu", None)
    order = [*(k for k in FACTS if k in facts), *sorted(k for k in facts if k not in FACTS)]
    rows = [(FACTS.get(k, k.replace("_", " ")), fact(k, facts[k])) for k in order]
    sha = str(run.commit.get("sha") or "unknown")
    rows.append(("commit", sha[:12] + (" with changes" if run.commit.get("dirty") else "")))
    order = [*(k for k in CEILINGS if k in run.ceilings), *sorted(k for k in run.ceilings if k not in CEILINGS)]
    rows += [ceiling(k, x) for k in order if (x := number(run.ceilings[k])) is not None]
    when = run.time[:16].replace("T", " ") + (" UTC" if run.time.endswith(("Z", "+00:00")) else "")
    return [*rows, ("measured", when), ("run", run.run_id), ("protocol", run.protocol)]


def ceiling(name: str, x: float) -> tuple[str, str]:
    """Name and value, also of a ceiling that was measured for one dtype: flops_measured_bf16."""
    known = next((k for k in CEILINGS if name == k or name.startswith(k + "_")), None)
    title = name if known is None else CEILINGS[known] + name[len(known) :].replace("_", ", ")
    for start, factor, unit in (("flops", 1e12, "TFLOP/s"), ("flops", 1e9, "GFLOP/s"), ("bytes", 1e9, "GB/s")):
        if name.startswith(start) and (x >= factor or unit != "TFLOP/s"):
            return title, f"{digits(x / factor, 3 if start == 'flops' else 4)} {unit}"
    return title, f"{digits(x)} MHz" if "mhz" in name else text(x)


def fact(name: str, value: Any) -> str:
    if name == "arch" and isinstance(value, int) and value >= 10:
        return f"{value // 10}.{value % 10}"
    if name.endswith("_bytes") and (x := number(value)) is not None:
        return size(x)
    if isinstance(value, dict):
        return ", ".join(f"{k} {fact(k, v)}" for k, v in sorted(value.items()))
    return ", ".join(text(x) for x in value) if isinstance(value, list) else text(value)
