"""Audits published numbers: which of them are impossible, and which contradict each other.

    IMPOSSIBLE     faster than the GPU, or fewer bytes than the tensors; the arithmetic stands beside it
    SUSPECT        above the data sheet's dense peak, but not above what the highest clock allows
    WARM-L2        more bytes per second than the memory moves: the data were in the cache
    HOST-BOUND     times that do not grow with the work: launches were measured
    INCONSISTENT   total against forward + backward, a speedup against its times, one number printed in two ways
    MISLABELLED    the same times under different shapes, in one file or in two given together
    SAME-KERNEL    two names whose times differ by noise only
    WRONG-CEILING  a peak "with sparsity", which no attention reaches
    UNAUDITED      too little is said to check a number, or a table that could not be read
    AUDITED        how many numbers were compared with the hardware or the tensors
    NOTE           what was assumed, and how times grow with N

Printed numbers are rounded: a number counts as wrong only if it is so at either end of what it may have been. Missing
facts are filled in on the safe side (causal, 16 bit), and told.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.bench import audit, floors, schema
from fulmen.bench.audit import grouped, ms, si
from fulmen.bench.published_tables import Number, Published, Row, read

BAD = ("IMPOSSIBLE", "INCONSISTENT", "MISLABELLED", "WRONG-CEILING")
DOUBTFUL = ("SUSPECT", "WARM-L2", "HOST-BOUND", "SAME-KERNEL")
FLAGS = (*BAD, *DOUBTFUL, "UNAUDITED", "AUDITED", "NOTE")

SUM_SHARE = 0.10  # total against forward + backward
SPEEDUP_SHARE = 0.01
TWICE_SHARE = 0.02  # one number printed twice
OTHER_REPORT = 1.5  # the same name, shape and GPU in two reports
PLATEAU_WORK, PLATEAU_SHARE = 16.0, 0.15
SAME_SHARE, SAME_NUMBERS = 0.04, 6
MISLABEL_NUMBERS = 4
MAX_SHAPES = 60  # compared pairwise
TRAINING = ("backward", "total")
SHAPE = ("B", "H", "H_KV", "D", "E")
OPS = {  # by a kernel's name
    "linear": r"lightning|linear|\bla\d|\bg?la\b|retention|retnet|recurrent",
    "softmax": r"flash|sdpa|softmax|torch|triton|xformers|cudnn|attention|\bfa\d",
}


class Finding(NamedTuple):
    flag: str
    where: str  # file:line, or the file
    what: str  # whose number
    why: str


def _at(flag: str, row: Row, why: str) -> Finding:
    shape = " ".join(f"{k}={row.facts[k]}" for k in ("B", "H", "H_KV", "N", "D") if k in row.facts)
    kind = row.pass_ or "" if row.kind in ("time", "tflops", "speedup") else row.kind.replace("_", " ")
    return Finding(flag, row.where, ", ".join(x for x in (row.competitor, kind, shape) if x), why)


# ------------------------------------------------------------------------------------------------- one number
def complete(row: Row, page: Published) -> dict[str, Any]:
    """The row's facts with what had to be assumed."""
    op, facts = next((op for op, words in OPS.items() if re.search(words, row.competitor.lower())), None), row.facts
    for name, value, why in (
        ("op", op, f"{row.competitor} is taken for {op} attention"),
        ("causal", True, "nothing is said of a mask: taken for causal, which is the least work"),
        ("dtype", "bf16", "nothing is said of the dtype: taken for bf16"),
    ):
        if name not in facts and value is not None:
            facts = {**facts, name: value}
            page.tell(why)
    return facts


def work_of(facts: dict[str, Any], pass_: str | None) -> floors.Work | None:
    op = str(facts.get("op", ""))
    return floors.of_case("layer" if facts.get("layer") else op, op, facts, pass_) if pass_ and op else None


def _speed(row: Row, facts: dict[str, Any]) -> tuple[str, str]:
    """The flag, if any, of a time, or of the time that TFLOP/s stand for, against the floors of its work, and why."""
    work, sheet, number = work_of(facts, row.pass_), floors.gpu(facts.get("gpu", "")), row.number
    if row.kind == "tflops" and work is not None and number.low > 0:
        t = work.usual_flops / number.value / 1e9
        number = Number(t, t * number.half / number.low)
    if number.value <= 0:
        return "IMPOSSIBLE", f"{number.value:g} ms: a time is above 0"
    if work is None or sheet is None:
        lacking = [n for n in ("gpu", "op", "pass", "B", "H", "D") if facts.get(n) is None]
        lacking += [] if "N" in facts or "N_Q" in facts else ["N"]
        why = f"not said: {', '.join(lacking)}" if lacking else f"no data sheet of {facts.get('gpu')!r} here"
        return "UNAUDITED", why
    limits = floors.of_gpu(sheet, str(facts["dtype"]))
    return audit.check_time(work, number.high, limits, cold=False, said=number.value)


def _bytes(row: Row, facts: dict[str, Any], trained: bool) -> tuple[str, str] | None:
    """The same of memory against the tensors themselves; None: their sizes are not said.

    trained  the numbers around it say that there was a backward pass
    """
    least = floors.memory(str(facts.get("op", "")), facts)
    if facts.get("layer") or row.kind == "memory_saved" or least is None:
        return None if least is None else ("", "")
    inputs, output, gradients = (least[part] for part in ("inputs", "output", "gradients"))
    if row.kind == "memory_backward":
        needed, parts = gradients, "the gradients of q, k and v alone take"
    elif row.kind == "memory_forward":
        needed, parts = output, "the output alone takes"
    elif trained and row.pass_ != "forward":
        needed, whole = inputs + gradients, si(inputs + gradients + output, "B")
        parts = f"with the output {whole} are needed; q, k, v and their gradients alone take"
    else:
        needed, parts = inputs + output, "q, k, v and the output alone take"
    why = f"{si(row.number.value, 'B')} published, but {parts} {si(needed, 'B')}"
    return ("IMPOSSIBLE", why) if row.number.high < needed else ("", "")


# ------------------------------------------------------------------------------------------ numbers together
def apart(a: Number, b: Number) -> float:
    """By which share two printed numbers differ at the least, whatever was rounded away: 0 if they may be equal."""
    low, high = sorted((a, b))
    return max(0.0, high.low / low.high - 1) if low.high > 0 else math.inf


def shape_of(facts: dict[str, Any], *more: str) -> tuple[Any, ...]:
    return tuple(facts.get(k) for k in (*SHAPE, *more))


def case_key(row: Row) -> tuple[Any, ...]:
    """Pass, N and shape: equal for numbers that may be compared."""
    return row.pass_, row.facts.get("N"), *shape_of(row.facts, "dtype", "gpu", "causal", "layer", "label")


def competitors(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.competitor for row in rows if row.competitor))


def _times(page: Published) -> list[Row]:
    return [row for row in page.rows if row.kind == "time"]


def _sums(page: Published) -> Iterator[Finding]:
    """Total against forward + backward, within a table and a competitor."""
    for rows in grouped(_times(page), lambda r: (r.table, r.competitor, case_key(r)[1:])).values():
        passes = {row.pass_: row for row in rows if row.pass_ is not None}
        if len(passes) < 3:
            continue
        forward, backward, total = (passes[p].number for p in schema.PASSES)
        parts = Number(forward.value + backward.value, forward.half + backward.half)
        gap = apart(parts, total)
        if gap / (1 + gap) > SUM_SHARE:  # of the larger one
            sums = f"forward {ms(forward.value)} + backward {ms(backward.value)} = {ms(parts.value)}"
            why = f"{sums}, total {ms(total.value)}: {100 * (total.value / parts.value - 1):+.0f} %"
            yield _at("INCONSISTENT", passes["total"], why)


def _rates(page: Published) -> Iterator[Finding]:
    """Iterations per second against the time in the same line."""
    totals = {(r.table, r.line): r for r in _times(page) if r.pass_ in ("total", None)}
    for row in page.rows:
        time, rate = totals.get((row.table, row.line)), row.number
        if row.kind == "per_second" and time is not None and rate.low > 0:
            period = Number(1e3 / rate.value, 1e3 / rate.low - 1e3 / rate.value)
            if apart(period, time.number) > SPEEDUP_SHARE:
                why = f"{rate.value:g} per second is one in {ms(period.value)}, the time is {ms(time.number.value)}"
                yield _at("INCONSISTENT", time, why)


def _speedups(page: Published) -> Iterator[Finding]:
    """A speedup against the quotient of its times, in any one table that has both."""
    rows = [row for row in page.rows if row.kind == "speedup" and row.number.value > 0]
    usual = (n for n in competitors(_times(page)) if re.search("sdpa|pytorch|torch|baseline", n.lower()))
    base = str(page.options.get("baseline") or next(usual, ""))
    if not rows or not base:
        return
    if "baseline" not in page.options:
        page.tell(f"speedups are taken to be over {base}")
    by_case = grouped(_times(page), case_key)
    for row in rows:
        passes = [row.pass_] if row.pass_ is not None else ["total", None]
        known = [r for p in passes for r in by_case.get((p, *case_key(row)[1:]), [])]
        tables = grouped(sorted(known, key=lambda r: r.table != row.table), lambda r: (r.pass_, r.table))
        times = [{r.competitor: r.number for r in some} for some in tables.values()]
        quotients = [q for one in times if base in one and (q := _quotient(row, one, base)) is not None]
        if quotients and min(apart(row.number, q) for q in quotients) > SPEEDUP_SHARE:
            why = f"{row.number.value:g}x published, but the times say {quotients[0].value:.3g}x"
            yield _at("INCONSISTENT", row, why)


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
    units = {"time": " ms", "speedup": "x", "memory_peak": " B"}
    rows = [r for r in page.rows if r.kind in units and r.competitor and r.facts.get("N") is not None]
    for a, *others in grouped(rows, lambda r: (r.kind, r.competitor, case_key(r))).values():
        for b in others:
            if a.table != b.table and apart(a.number, b.number) > TWICE_SHARE:
                here, there = (f"{r.number.value:g}{units[r.kind]}" for r in (b, a))
                yield _at("INCONSISTENT", b, f"{there} at {a.where}, {here} here")


def _mislabelled(page: Published, others: Sequence[Published]) -> Iterator[Finding]:
    """Equal times, number for number, though the shapes differ."""
    equal: dict[Any, list[bool]] = {}  # (pass, one shape, (file, other shape)): whether they agree, for each N and name
    rows = [(source.path, row) for source in (page, *others) for row in _times(source)]
    for (_, pass_, _), same in grouped(rows, lambda x: (x[1].competitor, x[1].pass_, x[1].facts.get("N"))).items():
        shapes = grouped(same, lambda x: (x[0], shape_of(x[1].facts)))
        for (one, a), (two, b) in itertools.combinations(list(shapes.items())[:MAX_SHAPES], 2):
            known = [(x, y) for x, y in zip(one[1], two[1], strict=True) if None not in (x, y)]
            if one[0] == page.path and any(x != y for x, y in known):
                numbers = [row.number for _, row in b]
                equal.setdefault((pass_, one[1], two), []).append(any(row.number in numbers for _, row in a))
    for (pass_, mine, (path, other)), agree in equal.items():
        if len(agree) >= MISLABEL_NUMBERS and all(agree):
            pairs = ([f"{k}={v}" for k, v in zip(SHAPE, s, strict=True) if v is not None] for s in (mine, other))
            here, there = map(" ".join, pairs)
            why = f"all {len(agree)} times equal those for {there} in {path.name}: one of the two labels is wrong"
            yield Finding("MISLABELLED", page.path.name, f"{pass_ or 'times'}, {here}", why)


def _other_reports(page: Published, others: Sequence[Published]) -> Iterator[Finding]:
    """The same name, shape, pass and GPU, and another time by far; fp16 and bf16 take the same time."""

    def key(row: Row) -> tuple[Any, ...]:
        size, sheet = floors.ITEMSIZE.get(str(row.facts.get("dtype", "bf16"))), floors.gpu(row.facts.get("gpu", ""))
        return row.competitor, row.pass_, size, sheet and sheet.name, *shape_of(row.facts, "N", "layer")

    known = {key(row): row for other in others for row in _times(other) if row.competitor}
    for row in _times(page):
        twin = known.get(key(row))
        if twin is not None and apart(row.number, twin.number) > OTHER_REPORT - 1:
            why = f"{ms(row.number.value)} here, {ms(twin.number.value)} at {twin.where} for the same name and shape"
            yield _at("INCONSISTENT", row, why)


def _same_kernel(page: Published) -> Iterator[Finding]:
    """Two names, all numbers within a few percent, and neither of them the faster one throughout."""
    rows = [row for row in page.rows if row.competitor and row.kind in ("time", "memory_peak")]
    series = {
        name: {(row.kind, *case_key(row)): row.number for row in reversed(some)}  # of several the first
        for name, some in grouped(rows, lambda row: row.competitor).items()
    }
    for (one, a), (two, b) in itertools.combinations(list(series.items())[:MAX_SHAPES], 2):
        times = [(a[k], b[k]) for k in a if k in b and k[0] == "time"]
        sizes = [apart(a[k], b[k]) for k in a if k in b and k[0] != "time"]
        signs = {x.value > y.value for x, y in times if apart(x, y) > 0}
        alike = max(sizes, default=0.0) <= 0.01 and max((apart(*pair) for pair in times), default=1.0) <= SAME_SHARE
        if alike and len(times) >= SAME_NUMBERS and len(signs) != 1:
            why = f"{len(times)} times agree within {100 * SAME_SHARE:.0f} % and neither name is always the faster one"
            yield Finding("SAME-KERNEL", page.path.name, f"{one} and {two}", f"{why}: probably one kernel")


def _plateaus(known: Sequence[tuple[Row, dict[str, Any]]]) -> Iterator[Finding]:
    """Times that stay while the work grows sixteenfold or more are those of launches."""
    worked = [
        (work.usual_flops, row, tuple(facts.get(k) for k in ("op", "dtype", "gpu", "layer")))
        for row, facts in known
        if row.kind == "time" and (work := work_of(facts, row.pass_)) is not None and work.usual_flops > 0
    ]
    for points in grouped(worked, lambda x: (x[1].competitor, x[1].pass_, x[2])).values():
        points.sort(key=lambda point: point[0])
        least, first, _ = points[0]
        flat = list(itertools.takewhile(lambda x: apart(x[1].number, first.number) <= PLATEAU_SHARE, points))  # noqa: B023
        if len(flat) > 1 and flat[-1][0] / least >= PLATEAU_WORK:
            times = [row.number.value for _, row, _ in flat]
            span = f"{ms(min(times))} to {ms(max(times))} over {flat[-1][0] / least:.0f} times the work"
            why = f"{span}: launches were measured, so rates made from these times mean nothing"
            yield _at("HOST-BOUND", first, why)


def _ceilings(page: Published) -> Iterator[Finding]:
    claimed, sheet = schema.number(page.facts.get("peak_tflops")), floors.gpu(page.facts.get("gpu", ""))
    if claimed is None or sheet is None:
        return
    dense = (floors.of_gpu(sheet, "fp16").flops_reached or math.inf) / 1e12
    if claimed > 1.5 * dense:
        why = f"{claimed:g} TFLOP/s is the peak with sparsity; dense it is {dense:.0f}"
        yield Finding("WRONG-CEILING", page.path.name, sheet.name, why)


def _growth(page: Published) -> Iterator[Finding]:
    """How times grow with N, for whoever claims O(n)."""
    rows = [row for row in _times(page) if row.competitor and row.facts.get("N")]
    for same in grouped(rows, lambda r: (r.table, r.competitor, r.pass_, case_key(r)[2:])).values():
        times = {row.facts["N"]: row.number.value for row in same}
        fit = audit.fit(times.items())
        if fit is not None and max(times) >= 4 * min(times):
            whose, local = f"{same[0].competitor}, {same[0].pass_ or 'time'}", ", ".join(f"{e:.2f}" for e in fit.local)
            yield Finding("NOTE", same[0].where, whose, f"grows as {fit.words()}; local: {local}")


# ------------------------------------------------------------------------------------------------- the audit
def audit_file(path: Path, map_path: Path | None = None, against: Sequence[Path] = ()) -> list[Finding]:
    """Everything found in a file, the worst first; raises BadResults. `against`: other reports on the same machine."""
    if _is_ours(path):
        return _own_results(path)
    page = read(path, map_path)
    said = page.options.get("against", [])
    if not isinstance(said, list):
        raise schema.BadResults(f"{path}: against must be a list of files")
    others = [*against, *(path.parent / str(p) for p in said)]
    return audit_page(page, [read(other) for other in others if not _is_ours(other)])


def audit_page(page: Published, others: Sequence[Published] = ()) -> list[Finding]:
    known = [(row, complete(row, page)) for row in page.rows]
    trained = {row.competitor for row, _ in known if row.pass_ in TRAINING}
    any_trained = bool(trained) and not competitors(page.rows)
    found: list[Finding] = []
    checked: list[tuple[Row, tuple[str, str] | None]] = []
    for row, facts in known:
        if row.kind in ("time", "tflops"):
            checked.append((row, _speed(row, facts)))
        elif row.kind.startswith("memory"):
            backward = row.competitor in trained or any_trained or row.pass_ in TRAINING
            checked.append((row, _bytes(row, facts, backward)))
    found += [_at(said[0], row, said[1]) for row, said in checked if said and said[0]]
    audited = sum(said is not None and said[0] != "UNAUDITED" for _, said in checked)
    for rule in (_sums, _rates, _speedups, _printed_twice, _same_kernel, _ceilings, _growth):
        found += rule(page)
    found += [*_mislabelled(page, others), *_other_reports(page, others), *_plateaus(known)]
    told = []
    if page.blank:
        shown = ", ".join([*page.blank[:5], *(["..."] if len(page.blank) > 5 else [])])
        told.append(("UNAUDITED", "", f"{len(page.blank)} cells of columns of times hold no number: {shown}"))
    told += [("UNAUDITED", table, "not read: no column is known to hold times or bytes") for table in page.unread]
    if audited:
        told.append(("AUDITED", "", f"{audited} of {len(checked)} times and sizes were compared with the hardware"))
    told += [("NOTE", "", text) for text in page.notes()]
    found += [Finding(flag, page.path.name, what, why) for flag, what, why in told]
    return sorted(found, key=lambda f: FLAGS.index(f.flag))


def _is_ours(path: Path) -> bool:
    """Whether it looks like results of this tool, of whatever version: `schema` says then what is wrong with it."""
    first, _, _ = schema.text_of(path).partition("\n")
    return "fulmen-bench/" in first and path.suffix.lower() not in (".md", ".csv")


def _own_results(path: Path) -> list[Finding]:
    """Results of this tool are judged again, from their samples and ceilings."""
    results = schema.read([path])
    for cell in results.cells:
        audit.judge(cell, results.runs[cell.run_id])
    relations = audit.judge_group(results.cells, results.runs)
    told = [("UNAUDITED", "", note) for note in results.notes]
    audited = sum(cell.status in ("ok", "withheld") and "UNAUDITED" not in cell.flags() for cell in results.cells)
    if audited:
        told.append(("AUDITED", "", f"{audited} of {len(results.cells)} cells were compared with the hardware"))
    for cell in results.cells:
        what = f"{cell.competitor}, {cell.pass_}, {' '.join(schema.case_words(cell.case))}"
        told += [(str(mark.get("flag")), what, str(mark.get("why"))) for mark in cell.audit.get("flags", [])]
    told += [("NOTE", f"{s.cell.competitor}, {s.cell.pass_}", s.verdict) for s in relations.scaling]
    found = [Finding(flag if flag in FLAGS else "NOTE", path.name, what, why) for flag, what, why in told]
    return sorted(found, key=lambda f: FLAGS.index(f.flag))


def render(findings: Sequence[Finding], console: Console) -> None:
    """Prints a table of what is wrong or doubtful, then the notes and a summary. Names are text, never markup."""
    count = Counter("bad" if f.flag in BAD else "doubtful" if f.flag in DOUBTFUL else f.flag for f in findings)
    table = Table(box=None, pad_edge=False)
    for title in ("verdict", "where", "what", "why"):
        table.add_column(title, overflow="fold")
    for f in findings:  # sorted: the bad ones come first
        if f.flag in (*BAD, *DOUBTFUL):
            colour = "red" if f.flag in BAD else "yellow"
            table.add_row(Text(f.flag, style=colour), *(Text(schema.printable(x)) for x in f[1:]))
    if table.rows:
        console.print(table)
    for f in findings:
        if f.flag not in (*BAD, *DOUBTFUL):
            text = f"{f.flag.lower()}: {', '.join(filter(None, f[1:]))}"
            console.print(Text(schema.printable(text), style="dim"))
    said = f"{count['bad']} wrong, {count['doubtful']} doubtful" if table.rows else "nothing wrong found"
    if findings and not table.rows and not count["AUDITED"]:
        said = "nothing audited"
    open_ = f"; {count['UNAUDITED']} could not be audited: see above, and --map" if count["UNAUDITED"] else ""
    console.print(Text(said + open_))
