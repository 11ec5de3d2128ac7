"""`report.md`: the report for a terminal, a pull request or a mail.

Tables are per family: lengths down, implementations across, median milliseconds and times as fast as the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fulmen.bench import schema
from fulmen.bench.report import model, words

MARKS = re.compile(r"([\\`*_{}\[\]()#+!|~])")


def safe(value: object) -> str:
    """Text as it is: neither markup nor HTML nor the end of a table's cell."""
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return MARKS.sub(r"\\\1", text)


def code(value: str) -> str:
    """A line of code, fenced by more backticks than it has in a row."""
    text = " ".join(value.split())
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(head: Iterable[str], lines: Iterable[Iterable[str]], numbers: Iterable[int] = ()) -> Iterator[str]:
    head, right = list(head), set(numbers)
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join("--:" if i in right else "---" for i in range(len(head))) + "|"
    for line in lines:
        yield "| " + " | ".join(line) + " |"
    yield ""


def render(report: model.Report) -> str:
    parts = [verdict(report), environment(report), *(suite(report, name) for name in report.suites)]
    parts += [scaling(report), memory(report), correctness(report), remarks(report), again(report)]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


def verdict(report: model.Report) -> Iterator[str]:
    runs = list(report.results.runs.values())
    devices = dict.fromkeys(model.text(run.environment.get("device", "unknown device")) for run in runs)
    timed = sum(row.timed for row in report.rows)
    yield f"# {safe(', '.join(devices))}: {safe(', '.join(report.suites))}"
    yield ""
    yield f"**{timed:,} of {len(report.rows):,} cells proven right, then timed.**"
    yield ""
    named = {"flagged": words.Word("care", "to be read with care", ""), **words.STATUSES}
    yield from table(
        ("cells", "", ""),
        ((f"{n:,}", named[kind].short, named[kind].sentence) for kind, n in model.counts(report.rows).items()),
        [0],
    )


def environment(report: model.Report) -> Iterator[str]:
    yield "## Environment"
    yield ""
    for run in report.results.runs.values():
        yield from table(("", ""), ((safe(name), safe(value)) for name, value in model.environment(run)))


def suite(report: model.Report, name: str) -> Iterator[str]:
    rows = [row for row in report.rows if row.cell.suite == name and not row.replaced]
    base = model.baseline(rows)
    yield f"## {safe(name)}"
    yield ""
    yield f"Median milliseconds, and how many times as fast as {safe(base)} (≠: another function, ▲: read with care)."
    yield ""
    alone: list[model.Family] = []
    for family in (f for f in report.families if f.suite == name):
        if len({row.n for row in report.of(family)}) < 2:
            alone.append(family)
            continue
        yield f"### {safe(family.label)}"
        yield ""
        yield from passes(report.of(family), base, "N")
    if alone:
        yield "### Single cases"
        yield ""
        yield from passes([row for family in alone for row in report.of(family)], base, "case")


def passes(rows: list[model.Row], base: str, first: str) -> Iterator[str]:
    for pass_, cache in dict.fromkeys((row.cell.pass_, row.cell.cache) for row in rows):
        some = [row for row in rows if (row.cell.pass_, row.cell.cache) == (pass_, cache)]
        names = list(dict.fromkeys(row.cell.competitor for row in some))
        keys = dict.fromkeys((row.family, row.n) for row in some)
        if first == "N":
            keys = dict.fromkeys(sorted(keys, key=lambda key: key[1] or 0))
        lines = []
        for family, n in keys:
            here = {row.cell.competitor: row for row in some if (row.family, row.n) == (family, n)}
            length = "" if n is None else f"{n:,}"
            label = length if first == "N" else f"{safe(family.label)}{' · N ' + length if length else ''}"
            lines.append([label, *(entry(here.get(name), here.get(base)) for name in names)])
        yield f"{pass_}{', hot cache' if cache == 'hot' else ''}"
        yield ""
        yield from table((first, *map(safe, names)), lines, range(first == "case", len(names) + 1))


def entry(row: model.Row | None, base: model.Row | None) -> str:
    if row is None:
        return ""
    if row.median is None:
        return words.STATUSES[row.cell.status].short
    text = ("▲ " if row.flagged else "") + model.digits(row.median)
    gain = model.speedup(row, base)
    if gain is None or base is row or base is None:
        return text
    return f"{text} ({model.digits(gain[0], 3)}×{' ≠' if base.cell.function != row.cell.function else ''})"


def scaling(report: model.Report) -> Iterator[str]:
    if not report.relations.scaling:
        return
    yield "## Scaling with length"
    yield ""
    lines = []
    for one in report.relations.scaling:
        label = next((f.label for f in report.families if model.is_of(one, f)), "")
        lines.append([safe(x) for x in (one.competitor, label, one.pass_, one.cache, one.verdict)])
    yield from table(("implementation", "case", "pass", "L2", "growth, with 95 % intervals"), lines)
    for crossing in report.relations.crossovers:
        yield f"- {safe(crossing.pass_)}, {safe(crossing.cache)}: {safe(crossing.words)}"
    yield ""


def memory(report: model.Report) -> Iterator[str]:
    """Of the longest length of each family: that is where memory matters."""
    lines = []
    for family in report.families:
        rows = [row for row in report.of(family) if row.peak is not None and row.cell.cache == "cold"]
        longest = max((row.n or 0 for row in rows), default=0)
        for row in rows:
            if (row.n or 0) != longest or row.cell.pass_ != (
                "total" if any(r.cell.pass_ == "total" for r in rows) else "forward"
            ):
                continue
            sizes = [model.size(model.number(row.cell.memory.get(part, {}).get("bytes"))) for part in PARTS]
            over = model.ratio(row.peak, row.cell.memory.get("peak", {}).get("floor"))
            name = f"{safe(family.label)} · N {longest:,}"
            lines.append([safe(row.cell.competitor), name, *sizes, "" if over is None else f"{over:.2f}×"])
    if lines:
        yield "## Memory at the longest length"
        yield ""
        head = ("implementation", "case", *(part.replace("_", " ") for part in PARTS), "peak over floor")
        yield from table(head, lines, range(2, len(head)))


PARTS = (*model.MEMORY_PARTS, "peak")


def correctness(report: model.Report) -> Iterator[str]:
    found: dict[tuple[str, str, str], list[tuple[float, str, model.Row]]] = {}
    for row in report.rows:
        for tensor, one in row.cell.correctness.items():
            share = model.ratio(one.get("error"), one.get("bound"))
            key = (row.cell.competitor, row.cell.suite, model.text(row.cell.case.get("dtype", "")))
            found.setdefault(key, []).append((0.0 if share is None else share, tensor, row))
    if not found:
        return
    yield "## Correctness"
    yield ""
    yield "Worst error of any tensor against fp64, as a share of what is allowed; red first."
    yield ""
    lines = []
    for key, checks in sorted(found.items(), key=lambda item: -max(x for x, _, _ in item[1])):
        share, tensor, row = max(checks, key=lambda check: check[0])
        where = safe(tensor) + ("" if row.n is None else f", N {row.n:,}")
        lines.append([*map(safe, key), f"{len(checks):,}", f"{'✕ ' if share > 1 else ''}{share:.0%}", where])
    yield from table(("implementation", "suite", "precision", "tensors", "worst", "where"), lines, [3, 4])


def remarks(report: model.Report) -> Iterator[str]:
    lines = []
    for row in report.rows:
        cell, n = row.cell, "" if row.n is None else f" · N {row.n:,}"
        where = [safe(cell.competitor), f"{safe(row.family.label)}{n}", cell.pass_]
        if not row.timed:
            why = cell.reason or words.STATUSES[cell.status].sentence
            lines.append([words.STATUSES[cell.status].short, *where, safe(why)])
        for flag, why in row.flags:
            if words.flag(flag).severity != "note" and why != cell.reason:
                lines.append([safe(words.flag(flag).short), *where, safe(why or words.flag(flag).sentence)])
    if lines:
        yield "## Without a number, or to be read with care"
        yield ""
        yield from table(("", "implementation", "case", "pass", "why"), lines)


def again(report: model.Report) -> Iterator[str]:
    commands: list[str] = [run.command for run in report.results.runs.values() if run.command]
    if commands:
        yield "## To measure it again"
        yield ""
        yield from (f"- {code(command)}" for command in commands)
        yield ""
    yield f"Made from results of the schema {schema.SCHEMA}; `results.csv` and `report.html` hold every cell."
