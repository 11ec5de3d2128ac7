"""`report.md`: the report for a terminal, a pull request or a mail.

The result comes first, the environment last. Tables are per family: lengths down, implementations across, median
milliseconds and times as fast as the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fulmen.bench import schema, words
from fulmen.bench.audit import grouped, number
from fulmen.bench.report import model

MARKS = re.compile(r"([\\`*_{}\[\]()#+!|~])")


def safe(value: object) -> str:
    """Text as it is: neither markup nor HTML, neither a table's end nor a terminal's command."""
    text = schema.printable(" ".join(str(value).split()))
    return MARKS.sub(r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code(value: str) -> str:
    """A line of code, fenced by more backticks than it has in a row."""
    text = schema.printable(" ".join(value.split()))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in (text[:1], text[-1:]) else fence + text + fence


def table(head: Iterable[str], lines: Iterable[Iterable[str]], numbers: Iterable[int] = ()) -> str:
    head, right = list(head), set(numbers)
    rule = ("--:" if i in right else "---" for i in range(len(head)))
    rows = ["| " + " | ".join(line) + " |" for line in (head, *lines)]
    return "\n".join([rows[0], "|" + "|".join(rule) + "|", *rows[1:]])


def render(report: model.Report) -> str:
    """Blocks with an empty line between them."""
    blocks = [*verdict(report)]
    for name in report.suites:
        blocks += suite(report, name)
    for part in (scaling, kinds, memory, correctness, remarks, environment):
        blocks += part(report)
    return "\n\n".join(blocks) + "\n"


def verdict(report: model.Report) -> Iterator[str]:
    yield f"# {safe(report.title)}"
    lines = []
    for one in model.headlines(report):
        names = map(safe, (one.suite, one.pass_, one.competitor, one.baseline + (" ≠" if one.other else "")))
        mean, low, high = (model.digits(x, 3) for x in (one.mean, one.low, one.high))
        lines.append([*names, f"**{mean}×**", f"{low} to {high}×", str(one.cases)])
    if lines:
        head = ("suite", "pass", "implementation", "times as fast as", "mean", "range", "cases")
        yield table(head, lines, range(4, 7))
    yield f"**{sum(row.timed for row in report.rows):,} of {len(report.rows):,} cells proven right, then timed.**"
    yield from map(safe, report.results.notes)
    kinds = ((f"{n:,}", words.KINDS[k].short, words.KINDS[k].sentence) for k, n in model.counts(report.rows).items())
    yield table(("cells", "", ""), kinds, [0])


def suite(report: model.Report, name: str) -> Iterator[str]:
    base = model.baseline(report.of(name))
    yield f"## {safe(name)}"
    yield f"Median milliseconds, and how many times as fast as {safe(base)} (≠: another function, ▲: read with care)."
    alone: list[model.Row] = []
    for family, rows in grouped(report.of(name), lambda row: row.family).items():
        if len({row.n for row in rows}) < 2:
            alone += rows
            continue
        yield f"### {safe(family.label)}"
        yield from passes(sorted(rows, key=lambda row: row.n or 0), base, "N")
    if alone:
        yield "### Single cases"
        yield from passes(alone, base, "case")


def passes(rows: list[model.Row], base: str, first: str) -> Iterator[str]:
    for (pass_, cache), some in grouped(rows, lambda row: (row.cell.pass_, row.cell.cache)).items():
        names = list(dict.fromkeys(row.cell.competitor for row in some))
        lines = []
        for same in grouped(some, lambda row: (row.family, row.n)).values():
            here = {row.cell.competitor: row for row in same}
            label = safe(same[0].label) if first == "case" else "" if same[0].n is None else f"{same[0].n:,}"
            lines.append([label, *(entry(here.get(name), here.get(base)) for name in names)])
        yield f"{pass_}{', hot cache' if cache == 'hot' else ''}{'' if base in names else ', no baseline'}"
        yield table((first, *map(safe, names)), lines, range(first == "case", len(names) + 1))


def entry(row: model.Row | None, base: model.Row | None) -> str:
    if row is None or row.median is None:
        return "" if row is None else words.STATUSES[row.cell.status].short
    shown, gain = ("▲ " if row.flagged else "") + model.digits(row.median), model.speedup(row, base)
    if gain is None or base is row or base is None:
        return shown
    return f"{shown} ({model.digits(gain, 3)}×{' ≠' if base.cell.function != row.cell.function else ''})"


def scaling(report: model.Report) -> Iterator[str]:
    family = {id(row.cell): row.family.label for row in report.rows}
    curves = [
        (x.cell.competitor, family[id(x.cell)], x.cell.pass_, x.cell.cache, x.verdict) for x in report.relations.scaling
    ]
    if curves:
        head = ("implementation", "case", "pass", "L2", "growth, with 95 % intervals")
        yield "## Scaling with length"
        yield table(head, (map(safe, curve) for curve in curves))
    if report.relations.crossovers:
        yield "\n".join(f"- {safe(f'{x.cell.pass_}, {x.cell.cache}: {x.words}')}" for x in report.relations.crossovers)


def kinds(report: model.Report) -> Iterator[str]:
    """Of cells whose kernels the profiler saw."""
    lines = []
    for row in report.rows:
        if row.timed and not row.replaced and row.cell.kinds:
            B, N = (number(row.cell.case.get(name)) for name in "BN")
            speed = f"{1e3 * B * N / row.median:,.0f}" if row.cell.op == "train" and B and N and row.median else ""
            share = row.of_audit("efficiency")
            each = (model.digits(number(row.cell.kinds.get(kind)), 3) for kind in model.KINDS)
            names = map(safe, (row.cell.competitor, row.label, row.cell.pass_))
            lines.append([*names, speed, "" if share is None else f"{share:.0%}", *each])
    if lines:
        head = ("implementation", "case", "pass", "tokens/s", "share of a product's FLOP/s", *model.KINDS)
        yield "## Where the time goes"
        yield "Milliseconds of kernels, without the gaps between them."
        yield table(head, lines, range(3, len(head)))


def memory(report: model.Report) -> Iterator[str]:
    """Of the longest length of each family: that is where memory matters."""
    lines = []
    sized = [row for row in report.rows if not row.replaced and row.size() is not None and row.cell.cache == "cold"]
    for rows in grouped(sized, lambda row: row.family).values():
        longest = max(row.n or 0 for row in rows)
        pass_ = "total" if any(row.cell.pass_ == "total" for row in rows) else "forward"
        for row in rows:
            if (row.n or 0) == longest and row.cell.pass_ == pass_:
                over = model.ratio(row.size(), row.size("peak", "floor"))
                sizes = (model.size(row.size(part)) for part in model.MEMORY_PARTS)
                lines.append([safe(row.cell.competitor), safe(row.label), *sizes, f"{over:.2f}×" if over else ""])
    if lines:
        head = ("implementation", "case", *(part.replace("_", " ") for part in model.MEMORY_PARTS), "peak over floor")
        yield "## Memory at the longest length"
        yield table(head, lines, range(2, len(head)))


def correctness(report: model.Report) -> Iterator[str]:
    lines = []
    for one in model.correctness(report):
        n, share, whose = report.rows[one["row"]].n, one["share"], (one["competitor"], one["suite"], one["dtype"])
        where = safe(one["tensor"]) + ("" if n is None else f", N {n:,}")
        lines.append([*map(safe, whose), f"{one['tensors']:,}", f"{'✕ ' if share > 1 else ''}{share:.0%}", where])
    if lines:
        yield "## Correctness"
        yield "Worst error of any tensor against fp64, as a share of what is allowed."
        yield table(("implementation", "suite", "precision", "tensors", "worst", "where"), lines, [3, 4])


def remarks(report: model.Report) -> Iterator[str]:
    lines = []
    for row in report.rows:
        said = [] if row.timed else [(words.STATUSES[row.cell.status], row.cell.reason)]
        said += [(words.flag(flag), why) for flag, why in row.flags if why != row.cell.reason]
        for word, why in said:
            if word.severity != "note" or not row.timed:
                whose = (row.cell.competitor, row.label, row.cell.pass_)
                lines.append(map(safe, (word.short, *whose, why or word.sentence)))
    if lines:
        yield "## Without a number, or to be read with care"
        yield table(("", "implementation", "case", "pass", "why"), lines)


def environment(report: model.Report) -> Iterator[str]:
    runs = report.results.runs.values()
    if any(run.command for run in runs):
        yield "## To measure it again"
        yield "\n".join(f"- {code(run.command)}" for run in runs if run.command)
    yield "## Environment"
    for run in runs:
        yield table(("", ""), (map(safe, pair) for pair in model.environment(run)))
    yield f"Made from results of the schema {schema.SCHEMA}; `results.csv` and `report.html` hold every cell."
