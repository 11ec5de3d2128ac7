"""Audits numbers that somebody published: which of them cannot be, and which contradict each other.

    IMPOSSIBLE     faster than the GPU, or fewer bytes than the tensors; the arithmetic stands beside it
    SUSPECT        above the data sheet's dense peak, but not above what the highest clock allows
    WARM-L2        more bytes per second than the memory moves: the data were in the cache
    HOST-BOUND     times that do not grow with the work: launches were measured
    INCONSISTENT   total against forward + backward, a speedup against its times, one number printed in two ways
    MISLABELLED    the same times under different shapes
    SAME-KERNEL    two names whose times differ by noise only
    WRONG-CEILING  a peak "with sparsity", which no attention reaches
    UNAUDITED      too little is said to check a number
    NOTE           what was taken for granted, and how times grow with N

Printed numbers are rounded: a number counts as wrong only if it is so at either end of what it may have been. Missing
facts are filled in on the safe side (causal, 16 bit), and told.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.bench import audit, floors, schema
from fulmen.bench.audit import ms, si
from fulmen.bench.published_tables import Number, Published, Row, competitors, read

BAD = ("IMPOSSIBLE", "INCONSISTENT", "MISLABELLED", "WRONG-CEILING")
DOUBTFUL = ("SUSPECT", "WARM-L2", "HOST-BOUND", "SAME-KERNEL")
FLAGS = (*BAD, *DOUBTFUL, "UNAUDITED", "NOTE")

SUM_SHARE = 0.10  # total against forward + backward
SPEEDUP_SHARE = 0.01
TWICE_SHARE = 0.02  # one number printed twice
OTHER_REPORT = 1.5  # the same name, shape and GPU in two reports
PLATEAU_WORK, PLATEAU_SHARE = 16.0, 0.15
SAME_SHARE, SAME_NUMBERS = 0.04, 6
MISLABEL_NUMBERS = 4
MAX_SHAPES = 60  # compared pairwise
SHAPE = ("B", "H", "H_KV", "D", "E")


@dataclass(frozen=True)
class Finding:
    flag: str
    where: str  # file:line, or the file
    what: str  # whose number
    why: str


# ------------------------------------------------------------------------------------------------- one number


def guess_op(name: str) -> str | None:
    """ "linear" or "softmax", from a kernel's name."""
    if re.search(r"lightning|linear|\bla\d|\bg?la\b|retention|retnet|recurrent", name.lower()):
        return "linear"
    if re.search(r"flash|sdpa|softmax|torch|triton|xformers|cudnn|attention|\bfa\d", name.lower()):
        return "softmax"
    return None


def complete(row: Row, page: Published) -> dict[str, Any]:
    """The row's facts with what had to be assumed."""
    facts = dict(row.facts)
    if "op" not in facts and (op := guess_op(row.competitor)) is not None:
        facts["op"] = op
        page.tell(f"{row.competitor} is taken for {op} attention")
    if "causal" not in facts:
        facts["causal"] = True
        page.tell("nothing is said of a mask: taken for causal, which is the least work")
    if "dtype" not in facts:
        facts["dtype"] = "bf16"
        page.tell("nothing is said of the dtype: taken for bf16")
    return facts


def work_of(facts: dict[str, Any], pass_: str | None) -> floors.Work | None:
    op = str(facts.get("op", ""))
    if pass_ is None or not op:
        return None
    return floors.of_case("layer" if facts.get("layer") else op, op, facts, pass_)


def ceilings_of(facts: dict[str, Any]) -> floors.Ceilings | None:
    sheet = floors.gpu(facts.get("gpu", ""))
    if sheet is not None:
        return floors.of_gpu(sheet, str(facts["dtype"]))
    bandwidth = audit.number(facts.get("bandwidth"))
    return floors.Ceilings(bytes_hard=bandwidth, l2_bytes=math.inf) if bandwidth else None


def describe(row: Row) -> str:
    shape = " ".join(f"{k}={row.facts[k]}" for k in ("B", "H", "H_KV", "N", "D") if k in row.facts)
    kind = row.pass_ or "" if row.kind in ("time", "speedup") else row.kind.replace("_", " ")
    return ", ".join(x for x in (row.competitor, kind, shape) if x)


def _speed(row: Row, facts: dict[str, Any]) -> Iterator[Finding]:
    """A time against the floors of its work."""
    if row.number.value <= 0:
        yield Finding("IMPOSSIBLE", row.where, describe(row), f"{row.number.value:g} ms: a time is above 0")
        return
    work, tops = work_of(facts, row.pass_), ceilings_of(facts)
    if work is None or tops is None:
        lacking = [n for n in ("gpu", "op", "pass", "B", "H", "D") if facts.get(n) is None]
        if not any(n in facts for n in ("N", "N_Q")):
            lacking.append("N")
        why = f"not said: {', '.join(lacking)}" if lacking else f"no data sheet of {facts.get('gpu')!r} here"
        yield Finding("UNAUDITED", row.where, describe(row), why)
        return
    t, l2 = row.number, tops.l2_bytes or 0.0
    for amount, ceiling, unit, least in (
        (work.flops, tops.flops_hard, "FLOP", work.flops),
        (work.bytes, tops.bytes_hard, "B", work.on_dram(l2, cold=False)),
    ):
        if ceiling and least / ceiling * 1e3 > t.high:
            arithmetic = (
                f"{si(amount, unit)} at least; at {si(ceiling, unit + '/s')} that takes {ms(1e3 * least / ceiling)}, "
                f"published {ms(t.value)}: {1e3 * least / ceiling / t.value:.1f} times as fast as possible"
            )
            yield Finding("IMPOSSIBLE", row.where, describe(row), arithmetic)
            return
    speed = 1e3 * work.usual_flops / t.high
    if tops.flops_rated and speed > audit.SUSPECT_SHARE * tops.flops_rated:
        reached = si(1e3 * work.usual_flops / t.value, "FLOP/s")
        why = (
            f"{si(work.usual_flops, 'FLOP')} in {ms(t.value)} is {reached}, above the dense peak of "
            f"{si(tops.flops_rated, 'FLOP/s')} at the rated clock; the highest clock allows "
            f"{si(tops.flops_hard or math.nan, 'FLOP/s')}"
        )
        yield Finding("SUSPECT", row.where, describe(row), why)
    if tops.bytes_hard and 1e3 * work.bytes / t.high > tops.bytes_hard:
        cache = f"the cache of {si(l2, 'B')}" if math.isfinite(l2) else "a cache"
        why = (
            f"{si(work.bytes, 'B')} in {ms(t.value)} is {si(1e3 * work.bytes / t.value, 'B/s')}, the memory moves "
            f"{si(tops.bytes_hard, 'B/s')}: {cache} held it"
        )
        yield Finding("WARM-L2", row.where, describe(row), why)


def _as_time(row: Row, facts: dict[str, Any]) -> Row:
    """A row of TFLOP/s as the time it stands for, counting the work as usual."""
    work = work_of(facts, row.pass_)
    if work is None or row.number.low <= 0:
        return row
    t = work.usual_flops / row.number.value / 1e9
    return Row(row.where, row.table, row.line, "time", Number(t, t * row.number.half / row.number.low), row.facts)


def _bytes(row: Row, facts: dict[str, Any], trained: bool) -> Iterator[Finding]:
    """Memory against the tensors themselves. `trained`: the numbers around it say that there was a backward pass."""
    op = str(facts.get("op", ""))
    if facts.get("layer") or row.kind == "memory_saved":
        return
    least = floors.memory(op, facts)
    if least is None:
        return
    if row.kind == "memory_backward":
        needed, parts = least["gradients"], "the gradients of q, k and v alone take"
    elif row.kind == "memory_forward":
        needed, parts = least["output"], "the output alone takes"
    elif trained and row.pass_ != "forward":
        needed = least["inputs"] + least["gradients"]
        parts = (
            f"with the output {si(needed + least['output'], 'B')} are needed; q, k, v and their gradients alone take"
        )
    else:
        needed, parts = least["inputs"] + least["output"], "q, k, v and the output alone take"
    if row.number.high < needed:
        why = f"{si(row.number.value, 'B')} published, but {parts} {si(needed, 'B')}"
        yield Finding("IMPOSSIBLE", row.where, describe(row), why)


# ------------------------------------------------------------------------------------------ numbers together


def apart(a: Number, b: Number) -> float:
    """By which share two printed numbers differ at the least, whatever was rounded away: 0 if they may be equal."""
    low, high = (a, b) if a.value <= b.value else (b, a)
    return max(0.0, high.low / low.high - 1) if low.high > 0 else math.inf


def shape_key(facts: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(facts.get(k) for k in (*SHAPE, "dtype", "gpu", "causal", "layer", "label"))


def _index(rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by whose number it is: kind, competitor, pass, N and shape."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row.kind, row.competitor, row.pass_, row.facts.get("N"), shape_key(row.facts)), []).append(
            row
        )
    return found


def _sums(page: Published) -> Iterator[Finding]:
    """Total against forward + backward, within a table and a competitor."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in page.rows:
        if row.kind == "time" and row.pass_ is not None:
            key = (row.table, row.competitor, row.facts.get("N"), shape_key(row.facts))
            groups.setdefault(key, {})[row.pass_] = row
    for group in groups.values():
        if len(group) < 3:
            continue
        forward, backward, total = (group[p].number for p in schema.PASSES)
        parts = Number(forward.value + backward.value, forward.half + backward.half)
        gap = apart(parts, total)
        if gap / (1 + gap) > SUM_SHARE:  # of the larger one
            why = (
                f"forward {ms(forward.value)} + backward {ms(backward.value)} = {ms(parts.value)}, total "
                f"{ms(total.value)}: {100 * (total.value / parts.value - 1):+.0f} %"
            )
            yield Finding("INCONSISTENT", group["total"].where, describe(group["total"]), why)


def _rates(page: Published) -> Iterator[Finding]:
    """Iterations per second against the time in the same line."""
    totals = {(r.table, r.line): r for r in page.rows if r.kind == "time" and r.pass_ in ("total", None)}
    for row in page.rows:
        time = totals.get((row.table, row.line))
        if row.kind == "per_second" and time is not None and row.number.low > 0:
            period = Number(1e3 / row.number.value, 1e3 / row.number.low - 1e3 / row.number.value)
            if apart(period, time.number) > SPEEDUP_SHARE:
                why = (
                    f"{row.number.value:g} per second is one in {ms(period.value)}, the time is {ms(time.number.value)}"
                )
                yield Finding("INCONSISTENT", row.where, describe(time), why)


def _baseline(page: Published) -> str | None:
    names = competitors(r for r in page.rows if r.kind == "time")
    said = page.options.get("baseline")
    if said is not None:
        return str(said)
    found = next((n for n in names if re.search("sdpa|pytorch|torch|baseline", n.lower())), None)
    if found is not None and any(r.kind == "speedup" for r in page.rows):
        page.tell(f"speedups are taken to be over {found}")
    return found


def _speedups(page: Published) -> Iterator[Finding]:
    """A speedup against the quotient of its times, in any one table that has both."""
    base = _baseline(page)
    by_case: dict[tuple[Any, ...], dict[str, dict[str, Number]]] = {}
    for row in page.rows:
        if row.kind == "time":
            key = (row.pass_, row.facts.get("N"), shape_key(row.facts))
            by_case.setdefault(key, {}).setdefault(row.table, {})[row.competitor] = row.number
    for row in page.rows:
        if row.kind != "speedup" or base is None or row.number.value <= 0:
            continue
        passes = [row.pass_] if row.pass_ is not None else ["total", None]
        tables = [
            (name, times)
            for p in passes
            for name, times in by_case.get((p, row.facts.get("N"), shape_key(row.facts)), {}).items()
            if base in times
        ]
        tables.sort(key=lambda item: item[0] != row.table)
        quotients = [q for _, times in tables if (q := _quotient(row, times, base)) is not None]
        if quotients and min(apart(row.number, q) for q in quotients) > SPEEDUP_SHARE:
            why = f"{row.number.value:g}x published, but the times say {quotients[0].value:.3g}x"
            yield Finding("INCONSISTENT", row.where, describe(row), why)


def _quotient(row: Row, times: dict[str, Number], base: str) -> Number | None:
    """The time of the baseline over that of the row's own competitor, or of the fastest one if it names none."""
    names = {row.competitor.lower(), str(row.facts.get("fastest", "")).lower()}
    mine = next((t for name, t in times.items() if name.lower() in names), None)
    if mine is None and not row.competitor:
        mine = min((t for name, t in times.items() if name != base), key=lambda t: t.value, default=None)
    if mine is None or mine.low <= 0:
        return None
    quotient = times[base].value / mine.value
    return Number(quotient, max(times[base].high / mine.low - quotient, quotient - times[base].low / mine.high))


def _printed_twice(page: Published) -> Iterator[Finding]:
    for (kind, *_), rows in _index(r for r in page.rows if r.competitor and r.facts.get("N") is not None).items():
        if kind not in ("time", "speedup", "memory_peak"):
            continue
        a = rows[0]
        for b in rows[1:]:
            if a.table != b.table and apart(a.number, b.number) > TWICE_SHARE:
                unit = {"time": " ms", "speedup": "x", "memory_peak": " B"}[kind]
                why = f"{a.number.value:g}{unit} at {a.where}, {b.number.value:g}{unit} here"
                yield Finding("INCONSISTENT", b.where, describe(b), why)


def _mislabelled(page: Published, others: Sequence[Published]) -> Iterator[Finding]:
    """Equal times, number for number, though the shapes differ."""
    times: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Number]]] = {}
    for source in (page, *others):
        for row in source.rows:
            shape = tuple(row.facts.get(k) for k in SHAPE)
            if row.kind == "time" and None not in shape[:2]:
                group = times.setdefault((row.competitor, row.pass_, row.facts.get("N")), {})
                group.setdefault((source.path, shape), []).append(row.number)
    equal: dict[tuple[Any, ...], list[bool]] = {}
    for (_, pass_, _), group in times.items():
        for (one, a), (two, b) in itertools.combinations(list(group.items())[:MAX_SHAPES], 2):
            if one[0] == page.path and one[1] != two[1]:
                equal.setdefault((pass_, one[1], *two), []).append(any(x in b for x in a))
    for (pass_, mine, path, other), same in equal.items():
        if len(same) >= MISLABEL_NUMBERS and all(same):
            names = [
                " ".join(f"{k}={v}" for k, v in zip(SHAPE, s, strict=True) if v is not None) for s in (mine, other)
            ]
            why = f"all {len(same)} times equal those for {names[1]} in {path.name}: one of the two labels is wrong"
            yield Finding("MISLABELLED", page.path.name, f"{pass_ or 'times'}, {names[0]}", why)


def _other_reports(page: Published, others: Sequence[Published]) -> Iterator[Finding]:
    """The same name, shape, pass and GPU, and another time by far."""
    known: dict[tuple[Any, ...], Row] = {}
    for other in others:
        known.update({_report_key(r): r for r in other.rows if r.kind == "time" and r.competitor})
    for row in page.rows:
        twin = known.get(_report_key(row)) if row.kind == "time" and row.competitor else None
        if twin is not None and apart(row.number, twin.number) > OTHER_REPORT - 1:
            why = f"{ms(row.number.value)} here, {ms(twin.number.value)} at {twin.where} for the same name and shape"
            yield Finding("INCONSISTENT", row.where, describe(row), why)


def _report_key(row: Row) -> tuple[Any, ...]:
    """fp16 and bf16 take the same time."""
    size = floors.ITEMSIZE.get(str(row.facts.get("dtype", "bf16")))
    sheet = floors.gpu(row.facts.get("gpu", ""))
    shape = tuple(row.facts.get(k) for k in SHAPE)
    return (row.competitor, row.pass_, row.facts.get("N"), shape, size, sheet and sheet.name, row.facts.get("layer"))


def _same_kernel(page: Published) -> Iterator[Finding]:
    """Two names, all numbers within a few percent, and neither of them the faster one throughout."""
    series: dict[str, dict[tuple[Any, ...], Number]] = {}
    for row in page.rows:
        if row.competitor and row.kind in ("time", "memory_peak"):
            key = (row.kind, row.pass_, row.facts.get("N"), shape_key(row.facts))
            series.setdefault(row.competitor, {}).setdefault(key, row.number)
    for (one, a), (two, b) in itertools.combinations(list(series.items())[:MAX_SHAPES], 2):
        common = [k for k in a if k in b]
        times = [(a[k], b[k]) for k in common if k[0] == "time"]
        if len(times) < SAME_NUMBERS or any(apart(a[k], b[k]) > 0.01 for k in common if k[0] != "time"):
            continue
        if max(apart(x, y) for x, y in times) > SAME_SHARE:
            continue
        signs = {x.value > y.value for x, y in times if apart(x, y) > 0}
        if len(signs) != 1:
            why = (
                f"{len(times)} times agree within {100 * SAME_SHARE:.0f} % and neither name is always the faster one: "
                f"probably one kernel"
            )
            yield Finding("SAME-KERNEL", page.path.name, f"{one} and {two}", why)


def _plateaus(page: Published, known: Sequence[tuple[Row, dict[str, Any]]]) -> Iterator[Finding]:
    """Times that stay while the work grows sixteenfold or more are those of launches."""
    series: dict[tuple[Any, ...], list[tuple[float, Row]]] = {}
    for row, facts in known:
        if row.kind == "time" and (work := work_of(facts, row.pass_)) is not None and work.usual_flops > 0:
            key = (row.competitor, row.pass_, facts.get("op"), facts["dtype"], facts.get("gpu"), facts.get("layer"))
            series.setdefault(key, []).append((work.usual_flops, row))
    for points in series.values():
        points.sort(key=lambda p: p[0])
        flat = list(
            itertools.takewhile(lambda p: apart(p[1].number, points[0][1].number) <= PLATEAU_SHARE, points)  # noqa: B023
        )
        if len(flat) >= 2 and flat[-1][0] / flat[0][0] >= PLATEAU_WORK:
            times = [row.number.value for _, row in flat]
            why = (
                f"{ms(min(times))} to {ms(max(times))} over {flat[-1][0] / flat[0][0]:.0f} times the work: launches "
                f"were measured, so rates made from these times mean nothing"
            )
            yield Finding("HOST-BOUND", flat[0][1].where, describe(flat[0][1]), why)


def _ceilings(page: Published) -> Iterator[Finding]:
    claimed, sheet = audit.number(page.facts.get("peak_tflops")), floors.gpu(page.facts.get("gpu", ""))
    if claimed is None or sheet is None:
        return
    dense = (floors.of_gpu(sheet, "fp16").flops_rated or math.inf) / 1e12
    if claimed > 1.5 * dense:
        why = f"{claimed:g} TFLOP/s is the peak with sparsity; dense it is {dense:.0f}"
        yield Finding("WRONG-CEILING", page.path.name, sheet.name, why)


def _growth(page: Published) -> Iterator[Finding]:
    """How times grow with N, for whoever claims O(n)."""
    series: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in page.rows:
        if row.kind == "time" and row.competitor and row.facts.get("N"):
            key = (row.table, row.competitor, row.pass_, shape_key(row.facts))
            series.setdefault(key, {})[row.facts["N"]] = row
    for (_, competitor, pass_, _), rows in series.items():
        fit = audit.fit((n, r.number.value) for n, r in rows.items())
        if fit is not None and max(rows) >= 4 * min(rows):
            local = ", ".join(f"{e:.2f}" for *_, e in fit.local)
            first = next(iter(rows.values()))
            yield Finding(
                "NOTE", first.where, f"{competitor}, {pass_ or 'time'}", f"grows as {fit.words()}; local: {local}"
            )


# ------------------------------------------------------------------------------------------------- the audit


def audit_file(
    path: Path | str, map_path: Path | str | None = None, against: Sequence[Path | str] = ()
) -> list[Finding]:
    """Everything found in a file, the worst first. `against`: other reports on the same machine; a map can name some.

    Raises BadResults, with the place and the reason, for a file or map that cannot be read.
    """
    path = Path(path)
    if _is_ours(path):
        return _own_results(path)
    page = read(path, None if map_path is None else Path(map_path))
    said = page.options.get("against", [])
    if not isinstance(said, list):
        raise schema.BadResults(f"{path}: against must be a list of files")
    others = [read(Path(p)) for p in (*against, *(path.parent / str(p) for p in said))]
    return audit_page(page, others)


def audit_page(page: Published, others: Sequence[Published] = ()) -> list[Finding]:
    known = [(row, complete(row, page)) for row in page.rows]
    trained = {row.competitor for row, _ in known if row.pass_ in ("backward", "total")}
    any_trained = bool(trained) and not competitors(page.rows)
    found: list[Finding] = []
    for row, facts in known:
        if row.kind in ("time", "tflops"):
            found += _speed(row if row.kind == "time" else _as_time(row, facts), facts)
        elif row.kind.startswith("memory"):
            found += _bytes(row, facts, row.competitor in trained or any_trained or row.pass_ in ("backward", "total"))
    for rule in (_sums, _rates, _speedups, _printed_twice, _same_kernel, _ceilings, _growth):
        found += rule(page)
    found += _mislabelled(page, others)
    found += _other_reports(page, others)
    found += _plateaus(page, known)
    if page.blank:
        shown = ", ".join(page.blank[:5]) + (", ..." if len(page.blank) > 5 else "")
        why = f"{len(page.blank)} cells of columns of times hold no number: {shown}"
        found.append(Finding("UNAUDITED", page.path.name, "", why))
    found += [Finding("NOTE", page.path.name, "", text) for text in page.notes()]
    return sorted(found, key=lambda f: FLAGS.index(f.flag))


def _is_ours(path: Path) -> bool:
    """Whether it looks like results of this tool, of whatever version: `schema` says then what is wrong with it."""
    try:
        with path.open(encoding="utf-8") as file:
            return "fulmen-bench/" in file.readline(1 << 20) and path.suffix.lower() not in (".md", ".csv")
    except (OSError, UnicodeDecodeError):
        return False


def _own_results(path: Path) -> list[Finding]:
    """Results of this tool are judged again, from their samples and ceilings."""
    results = schema.read([path])
    cells = copy.deepcopy(results.cells)
    for cell in cells:
        audit.judge(cell, results.runs[cell.run_id])
    relations = audit.judge_group(cells, results.runs)
    found = []
    for cell in cells:
        shape = " ".join(f"{k}={v}" for k, v in cell.case.items())
        for mark in cell.audit.get("flags", []):
            name = str(mark.get("flag"))
            what = f"{cell.competitor}, {cell.pass_}, {shape}"
            found.append(Finding(name if name in FLAGS else "NOTE", path.name, what, f"{mark.get('why')}"))
    found += [Finding("NOTE", path.name, f"{s.competitor}, {s.pass_}", s.verdict) for s in relations.scaling]
    return sorted(found, key=lambda f: FLAGS.index(f.flag))


def render(findings: Sequence[Finding], console: Console, notes: bool = True) -> None:
    """A table of what is wrong or doubtful, then the notes. Names are text, never markup."""
    shown = [f for f in findings if f.flag in (*BAD, *DOUBTFUL)]
    if shown:
        table = Table(box=None, pad_edge=False)
        for title in ("verdict", "where", "what", "why"):
            table.add_column(title, overflow="fold")
        for f in shown:
            colour = "red" if f.flag in BAD else "yellow"
            table.add_row(Text(f.flag, style=colour), Text(f.where), Text(f.what), Text(f.why))
        console.print(table)
    if notes:
        for f in findings:
            if f.flag in ("UNAUDITED", "NOTE"):
                console.print(
                    Text(f"{f.flag.lower()}: " + ", ".join(x for x in (f.where, f.what, f.why) if x), style="dim")
                )
    bad, doubtful = (sum(f.flag in names for f in findings) for names in (BAD, DOUBTFUL))
    said = f"{bad} wrong, {doubtful} doubtful" if bad or doubtful else "nothing wrong found"
    open_ = sum(f.flag == "UNAUDITED" for f in findings)
    console.print(Text(said + (f"; {open_} could not be audited: see above, and --map" if open_ else "")))
