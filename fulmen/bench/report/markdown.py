"""`report.md`: the report for a terminal, a pull request or a mail.

The result comes first, the environment last. Tables are per family: lengths down, implementations across, median
milliseconds and times as fast as the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fulmen.bench import schema
from fulmen.bench.audit import grouped
from fulmen.bench.report import model, words

MARKS = re.compile(r"([\\`*_{}\[\]()#+!|~])")
PARTS = (*model.MEMORY_PARTS, "peak")


def safe(value: object) -> str:
    """Text as it is: neither markup nor HTML, neither a table's end nor a terminal's command."""
    text = schema.printable(" ".join(str(value).split()))
    return MARKS.sub(r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code(value: str) -> str:
    """A line of code, fenced by more backticks than it has in a row."""
    text = schema.printable(" ".join(value.split()))
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def section(title: str, *lines: str) -> Iterator[str]:
    for line in (title, *lines):
        yield from (line, "")


def table(head: Iterable[str], lines: Iterable[Iterable[str]], numbers: Iterable[int] = ()) -> Iterator[str]:
    head, right = list(head), set(numbers)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join("--:" if i in right else "---" for i in range(len(head))) + "|"
    for line in lines:
        yield "| " + " | ".join(line) + " |"
    yield ""


def render(report: model.Report) -> str:
    parts = [verdict(report), *(suite(report, name) for name in report.suites), scaling(report), memory(report)]
    parts += [correctness(report), remarks(report), again(report), environment(report)]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def verdict(report: model.Report) -> Iterator[str]:
    yield from section(f"# {safe(report.title)}")
    found = model.headlines(report)
    if found:
        head = ("suite", "pass", "implementation", "times as fast as", "mean", "range", "cases")
        lines = []
        for one in found:
            names = map(safe, (one.suite, one.pass_, one.competitor, one.baseline + (" ≠" if one.other else "")))
            mean, low, high = (model.digits(x, 3) for x in (one.mean, one.low, one.high))
            lines.append([*names, f"**{mean}×**", f"{low} to {high}×", str(one.cases)])
        yield from table(head, lines, range(4, 7))
    timed = sum(row.timed for row in report.rows)
    yield from section(f"**{timed:,} of {len(report.rows):,} cells proven right, then timed.**")
    yield from section(*map(safe, report.results.notes)) if report.results.notes else ()
    named = {"flagged": words.Word("care", "to be read with care", ""), **words.STATUSES}
    kinds = model.counts(report.rows).items()
    yield from table(("cells", "", ""), ((f"{n:,}", named[k].short, named[k].sentence) for k, n in kinds), [0])


def suite(report: model.Report, name: str) -> Iterator[str]:
    base = model.baseline(report.of(name))
    said = "Median milliseconds, and how many times as fast as"
    yield from section(f"## {safe(name)}", f"{said} {safe(base)} (≠: another function, ▲: read with care).")
    alone: list[model.Row] = []
    for family, rows in grouped(report.of(name), lambda row: row.family).items():
        if len({row.n for row in rows}) < 2:
            alone += rows
            continue
        yield from section(f"### {safe(family.label)}")
        yield from passes(sorted(rows, key=lambda row: row.n or 0), base, "N")
    if alone:
        yield from section("### Single cases")
        yield from passes(alone, base, "case")


def passes(rows: list[model.Row], base: str, first: str) -> Iterator[str]:
    for (pass_, cache), some in grouped(rows, lambda row: (row.cell.pass_, row.cell.cache)).items():
        names = list(dict.fromkeys(row.cell.competitor for row in some))
        lines = []
        for same in grouped(some, lambda row: (row.family, row.n)).values():
            here = {row.cell.competitor: row for row in same}
            label = safe(same[0].label) if first == "case" else "" if same[0].n is None else f"{same[0].n:,}"
            lines.append([label, *(entry(here.get(name), here.get(base)) for name in names)])
        without = "" if any(row.cell.competitor == base for row in some) else ", no baseline"
        yield from section(f"{pass_}{', hot cache' if cache == 'hot' else ''}{without}")
        yield from table((first, *map(safe, names)), lines, range(first == "case", len(names) + 1))


def entry(row: model.Row | None, base: model.Row | None) -> str:
    if row is None:
        return ""
    if row.median is None:
        return words.STATUSES[row.cell.status].short
    shown, gain = ("▲ " if row.flagged else "") + model.digits(row.median), model.speedup(row, base)
    if gain is None or base is row or base is None:
        return shown
    return f"{shown} ({model.digits(gain, 3)}×{' ≠' if base.cell.function != row.cell.function else ''})"


def scaling(report: model.Report) -> Iterator[str]:
    if not report.relations.scaling:
        return
    yield from section("## Scaling with length")
    lines = (
        (one.cell.competitor, report.family_of(one).label, one.cell.pass_, one.cell.cache, one.verdict)
        for one in report.relations.scaling
    )
    yield from table(
        ("implementation", "case", "pass", "L2", "growth, with 95 % intervals"), (map(safe, x) for x in lines)
    )
    for one in report.relations.crossovers:
        yield f"- {safe(one.cell.pass_)}, {safe(one.cell.cache)}: {safe(one.words)}"
    yield ""


def memory(report: model.Report) -> Iterator[str]:
    """Of the longest length of each family: that is where memory matters."""
    lines = []
    for family in report.families:
        rows = [r for r in report.of(family.suite, family) if r.size() is not None and r.cell.cache == "cold"]
        longest = max((row.n or 0 for row in rows), default=0)
        pass_ = "total" if any(row.cell.pass_ == "total" for row in rows) else "forward"
        for row in rows:
            if (row.n or 0) == longest and row.cell.pass_ == pass_:
                over = model.ratio(row.size(), row.size("peak", "floor"))
                sizes = [model.size(row.size(part)) for part in PARTS]
                over_floor = "" if over is None else f"{over:.2f}×"
                lines.append([safe(row.cell.competitor), safe(row.label), *sizes, over_floor])
    if lines:
        yield from section("## Memory at the longest length")
        head = ("implementation", "case", *(part.replace("_", " ") for part in PARTS), "peak over floor")
        yield from table(head, lines, range(2, len(head)))


def correctness(report: model.Report) -> Iterator[str]:
    checks = [
        (model.ratio(one.get("error"), one.get("bound")) or 0.0, tensor, row)
        for row in report.rows
        for tensor, one in row.cell.correctness.items()
    ]
    if not checks:
        return
    yield from section("## Correctness", "Worst error of any tensor against fp64, as a share of what is allowed.")
    whose = grouped(
        checks, lambda x: (x[2].cell.competitor, x[2].cell.suite, model.text(x[2].cell.case.get("dtype", "")))
    )
    lines = []
    for key, same in sorted(whose.items(), key=lambda item: -max(x for x, _, _ in item[1])):
        share, tensor, row = max(same, key=lambda check: check[0])
        where = safe(tensor) + ("" if row.n is None else f", N {row.n:,}")
        lines.append([*map(safe, key), f"{len(same):,}", f"{'✕ ' if share > 1 else ''}{share:.0%}", where])
    yield from table(("implementation", "suite", "precision", "tensors", "worst", "where"), lines, [3, 4])


def remarks(report: model.Report) -> Iterator[str]:
    lines = []
    for row in report.rows:
        said = [] if row.timed else [(words.STATUSES[row.cell.status], row.cell.reason)]
        said += [(words.flag(flag), why) for flag, why in row.flags if why != row.cell.reason]
        for word, why in said:
            if word.severity != "note" or not row.timed:
                where = (row.cell.competitor, row.label, row.cell.pass_)
                lines.append(map(safe, (word.short, *where, why or word.sentence)))
    if lines:
        yield from section("## Without a number, or to be read with care")
        yield from table(("", "implementation", "case", "pass", "why"), lines)


def again(report: model.Report) -> Iterator[str]:
    commands = [f"- {code(run.command)}" for run in report.results.runs.values() if run.command]
    if commands:
        yield from section("## To measure it again", "\n".join(commands))


def environment(report: model.Report) -> Iterator[str]:
    yield from section("## Environment")
    for run in report.results.runs.values():
        yield from table(("", ""), ((safe(name), safe(value)) for name, value in model.environment(run)))
    yield f"Made from results of the schema {schema.SCHEMA}; `results.csv` and `report.html` hold every cell."
