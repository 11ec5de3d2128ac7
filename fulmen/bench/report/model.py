"""What every form of the report shows, worked out once from the cells.

    family   the cells of one suite whose cases differ in N alone: one heatmap, one scaling plot
    timed    status "ok" and a median: only these have a time anywhere in a report

Cells that nobody has judged are judged here, and the relations between cells (contradictions, other functions, scaling)
are worked out anew: a results file is written one cell at a time and cannot hold them.
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
from fulmen.bench.audit import number as number  # the report's other files have it from here
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

    id: int
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
    def worst(self) -> float | None:
        """The largest error of any tensor, in units of what it may be."""
        ratios = [x for t in self.cell.correctness.values() if (x := ratio(t.get("error"), t.get("bound"))) is not None]
        return max(ratios, default=None)

    @property
    def peak(self) -> float | None:
        return number(self.cell.memory.get("peak", {}).get("bytes"))

    def rate(self, what: str) -> float | None:
        """FLOP/s or B/s, counting the floor: the work that cannot be avoided."""
        work = number(self.cell.audit.get(what))
        return None if work is None or self.median is None else work / self.median * 1e3


@dataclass
class Report:
    results: schema.Results
    rows: list[Row]
    families: list[Family]
    relations: audit.Relations

    @property
    def suites(self) -> list[str]:
        return list(dict.fromkeys(row.cell.suite for row in self.rows))

    def of(self, family: Family, pass_: str | None = None) -> list[Row]:
        found = [row for row in self.rows if row.family == family and not row.replaced]
        return [row for row in found if pass_ in (None, row.cell.pass_)]


# ---------------------------------------------------------------------------------------------- reading


def ratio(a: Any, b: Any) -> float | None:
    a, b = number(a), number(b)
    return None if a is None or not b else a / b


def check(cell: schema.Cell) -> None:
    """The nested fields, which the schema leaves open; raises BadResults."""
    where = f"run {cell.run_id!r}, {cell.competitor!r}, {cell.pass_}"

    def demand(right: bool, what: str) -> None:
        if not right:
            raise schema.BadResults(f"{where}: {what}")

    flags = cell.audit.get("flags", [])
    demand(isinstance(flags, list) and all(isinstance(f, dict) for f in flags), "audit.flags must be a list of objects")
    demand(all(isinstance(x, dict) for x in cell.memory.values()), "memory must map a part to its bytes and floor")
    demand(all(isinstance(x, dict) for x in cell.correctness.values()), "correctness must map a tensor to its errors")
    demand(all(isinstance(x, dict) for x in cell.resources), "resources must be a list of objects")
    demand(all(number(x) is not None for x in cell.samples_ms), "samples_ms must be finite")
    demand(all(number(x) is not None for x in cell.clocks_mhz), "clocks_mhz must be finite numbers")


def times(cell: schema.Cell) -> tuple[float | None, float | None, float | None]:
    """Median and its 95 % interval, from the samples where the file does not say."""
    if cell.status != "ok":
        return None, None, None
    middle, low, high = (number(cell.stats.get(x)) for x in ("median", "low", "high"))
    ordered, n = sorted(cell.samples_ms), len(cell.samples_ms)
    if middle is None and n:
        middle = statistics.median(ordered)
    if middle is None or middle <= 0:
        return None, None, None
    if (low is None or high is None) and n >= 6:
        half = 0.98 * math.sqrt(n)  # order statistics around the median, by the normal approximation
        low, high = ordered[max(0, math.floor(n / 2 - half))], ordered[min(n - 1, math.ceil(n / 2 + half))]
    return middle, low, high


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def length(case: dict[str, Any]) -> int | None:
    for name in LENGTHS:
        if isinstance(case.get(name), int) and not isinstance(case[name], bool):
            return int(case[name])
    return None


def family_of(cell: schema.Cell) -> Family:
    """What the cells share whose cases differ in N alone. Sizes that follow from others are not said again."""
    n, case = length(cell.case), cell.case
    rest = {k: v for k, v in case.items() if k not in LENGTHS or v != n}
    told = {k: v for k, v in rest.items() if not (k in ("H_KV", "E") and v == case.get({"H_KV": "H", "E": "D"}[k]))}
    sizes, others = [], []
    for k in sorted(told, key=lambda k: (ORDER.index(k) if k in ORDER else len(ORDER), k)):
        v = told[k]
        if k.isupper():
            sizes.append(f"{k}{text(v)}" if len(k) == 1 else f"{k} {text(v)}")
        elif isinstance(v, bool):
            others.append(k if v else f"no {k}" if k != "causal" else "full")
        elif v is not None:
            others.append(DTYPES.get(text(v), text(v)) if k == "dtype" else f"{k} {text(v)}")
    label = " · ".join(x for x in (" ".join(sizes), *others) if x)
    return Family(cell.suite, label or "one case", tuple(sorted((k, text(v)) for k, v in rest.items())))


def is_of(one: audit.Scaling, family: Family) -> bool:
    """Whether the curve runs through the cells of the family."""
    kept = {(k, text(v)) for k, v in one.case.items() if k not in LENGTHS}
    return one.suite == family.suite and {(k, v) for k, v in family.case if k not in LENGTHS} == kept


def judged(results: schema.Results) -> tuple[list[schema.Cell], audit.Relations]:
    """The cells with their audit, as copies where it writes."""
    cells = []
    for cell in results.cells:
        check(cell)
        fresh = replace(cell, audit=copy.deepcopy(cell.audit), memory=copy.deepcopy(cell.memory))
        if "flags" not in fresh.audit:
            audit.judge(fresh, results.runs[cell.run_id])
        cells.append(fresh)
    return cells, audit.judge_group(cells, results.runs)


def read(results: schema.Results) -> Report:
    rows: list[Row] = []
    latest: dict[str, Row] = {}
    cells, relations = judged(results)
    for i, cell in enumerate(cells):
        flags = [(str(f.get("flag", "")), str(f.get("why", ""))) for f in cell.audit.get("flags", [])]
        row = Row(i, cell, family_of(cell), length(cell.case), *times(cell), flags)
        earlier = latest.get(cell.config_hash)
        if earlier is not None:
            old, new = (results.runs[r.cell.run_id].time for r in (earlier, row))
            row.replaced, earlier.replaced = new < old, new >= old
        if not row.replaced:
            latest[cell.config_hash] = row
        rows.append(row)
    families = list(dict.fromkeys(row.family for row in rows))
    return Report(results, rows, families, relations)


# ---------------------------------------------------------------------------------------------- judging


def counts(rows: Iterable[Row]) -> dict[str, int]:
    """Cells by what a reader may do with them, every cell once."""
    found = Counter(("flagged" if row.flagged else "ok") if row.timed else row.cell.status for row in rows)
    order = ("ok", "flagged", *(s for s in schema.STATUSES if s != "ok"))
    return {name: found[name] for name in order if found[name]}


def baseline(rows: Iterable[Row]) -> str:
    """The competitor that others are divided by: torch's own attention if there, else a peer timed most often."""
    timed = Counter(row.cell.competitor for row in rows if row.timed)

    def rank(name: str) -> tuple[bool, bool, int, str]:
        low = name.lower()
        return "sdpa" not in low, "fulmen" in low, -timed[name], name

    return min(timed, key=rank, default="")


def speedup(row: Row, base: Row | None) -> tuple[float, float, float] | None:
    """How many times faster than the baseline, with an interval that covers both."""
    if base is None or row.median is None or base.median is None:
        return None
    low = (base.low or base.median) / (row.high or row.median)
    high = (base.high or base.median) / (row.low or row.median)
    return base.median / row.median, low, high


# --------------------------------------------------------------------------------------------- numbers


def digits(x: float | None, significant: int = 4) -> str:
    """0.1401, 12.34, 1,234: as many digits as say something."""
    if x is None:
        return ""
    if x == 0:
        return "0"
    places = significant - 1 - math.floor(math.log10(abs(x)))
    return f"{x:,.{min(max(places, 0), 6)}f}"


def size(x: float | None) -> str:
    """Bytes in binary units."""
    if x is None:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(x) < 1024 or unit == "GiB":
            return f"{digits(x, 4 if unit != 'B' else 1)} {unit}"
        x /= 1024
    raise AssertionError


FACTS = {
    "device": "device", "arch": "compute capability", "sm_count": "SMs", "l2_bytes": "L2 cache",
    "memory_bytes": "memory", "power_limit_w": "power limit, W", "driver": "driver", "cuda": "CUDA",
    "torch": "torch", "triton": "triton",
    "python": "python", "cpu": "CPU",
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
    rows += [(ceiling_name(k), ceiling(k, x)) for k in order if (x := number(run.ceilings[k])) is not None]
    when = run.time[:16].replace("T", " ") + (" UTC" if run.time.endswith(("Z", "+00:00")) else "")
    return [*rows, ("measured", when), ("run", run.run_id), ("protocol", run.protocol)]


def ceiling_name(name: str) -> str:
    """Also of those that were measured for one dtype: flops_measured_bf16."""
    known = next((k for k in CEILINGS if name == k or name.startswith(k + "_")), None)
    return name if known is None else CEILINGS[known] + name[len(known) :].replace("_", ", ")


def ceiling(name: str, x: float) -> str:
    if name.startswith("flops"):
        return f"{digits(x / 1e12, 3)} TFLOP/s" if x >= 1e12 else f"{digits(x / 1e9, 3)} GFLOP/s"
    return (
        f"{digits(x / 1e9, 4)} GB/s"
        if name.startswith("bytes")
        else f"{digits(x, 4)} MHz"
        if "mhz" in name
        else text(x)
    )


def fact(name: str, value: Any) -> str:
    if name == "arch" and isinstance(value, int) and value >= 10:
        return f"{value // 10}.{value % 10}"
    if name.endswith("_bytes") and (x := number(value)) is not None:
        return size(x)
    if isinstance(value, dict):
        return ", ".join(f"{k} {fact(k, v)}" for k, v in sorted(value.items()))
    if isinstance(value, list):
        return ", ".join(text(x) for x in value)
    return text(value)
