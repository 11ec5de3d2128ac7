"""What a reader is told, once for the page and for Markdown: sections of blocks.

A block is a dict, ready for JSON; `kind` is one of
    card     title and blocks, `folded` or not       table    columns (name, look) and lines of entries; those of a
                                                              first column "group" stand below it in the page
    facts    names and entries                       legend   entries
    figure   svg, drawn when it is asked for         command  to be copied
An entry is text, a list of entries, or a dict with any of: `text`; `look`, a class of the style sheet; `row`, whose
details open on a click; `more`, said by Markdown alone; `title`; `mark`; `sort`; `bar`, in per cent, with `ticks`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fulmen.bench import schema, words
from fulmen.bench.audit import grouped, si
from fulmen.bench.report import model, plots
from fulmen.bench.report.model import Report, Row, digits, percent, size, times_as_fast
from fulmen.bench.schema import number, text

Block = dict[str, Any]
Entry = Any

SECTIONS = {
    "speed": ("Speed", "Times as fast as the baseline. Bar: geometric mean over the cases that both have; line: "
              "slowest to fastest. ≠: another function, a choice of model, not of kernel. ▲: read with care."),
    "scaling": ("Scaling with length", "Median time over N, both logarithmic. Dashed grey: the floor, the least time "
                "that is possible. Thin dashes: the fit t ~ N^b, where neither host nor cache sets the time."),
    "roofline": ("Roofline", "A kernel to the left is limited by memory, to the right by arithmetic; nothing sound "
                 "lies above the upper roof. Work counts the floor: what cannot be avoided."),
    "kinds": ("Where the time goes", "Milliseconds of kernels by kind, without the gaps between them; tokens a second; "
              "the share of the FLOP/s that a matrix product reaches on this machine."),
    "memory": ("Memory at the longest length", "Grey is unavoidable. Colour is what the implementation adds. The line "
               "marks the floor."),
    "correctness": ("Correctness", "Every cell is compared with fp64 before it is timed. The bound follows from the "
                    "error of the plain computation in the same precision; an error above it means no time."),
    "missing": ("Without a number", ""), "glossary": ("What the words mean", ""), "environment": ("Environment", ""),
}  # fmt: skip
GLYPHS = {"ok": "✓", "flagged": "▲", "failed": "✕", "withheld": "⊘", "oom": "□", "unsupported": "–", "timeout": "◷",
          "interrupted": "‖", "skipped": "·"}  # fmt: skip
MARKS = "●■▲◆▼✕⬟✚"  # as the markers of the plots
PLAIN = ("case", "suite", "pass", "result", "precision", "worst")  # columns without numbers
STEPS = (1.05, 1.25, 2, 4, 10)  # a heatmap takes its next colour here

# The fields of a cell in the order of the drawer; docs/bench.md says what they mean.
TITLES = {
    "audit": "Audit against the hardware", "correctness": "Correctness against fp64", "memory": "Memory",
    "resources": "Kernels, from the compiled binary", "kernels": "What the device ran", "kinds": "Kernels by kind, ms",
    "case": "What was measured", "stats": "Samples in numbers, ms",
}  # fmt: skip
ELSEWHERE = (*TITLES, "samples_ms", "clocks_mhz", "command", "reason", "schema", "kind")

# The columns of the page: title, how a value is said, and their look.
SHOWN: dict[str, tuple[str, Callable[[Any], str], str]] = {
    "status": ("Status", text, ""), "suite": ("Suite", text, ""), "competitor": ("Implementation", text, "key"),
    "family": ("Case", text, ""), "n": ("N", "{:,}".format, "number"), "pass": ("Pass", text, ""),
    "cache": ("L2", text, ""), "run_id": ("Run", text, ""), "median_ms": ("Median ms", digits, "number"),
    "half_interval": ("± 95 %", lambda x: percent(x, 1), "number"),
    "times_as_fast": ("Speedup", times_as_fast, "number"), "efficiency": ("Of floor", percent, "number"),
    "tflop_per_s": ("Arithmetic", lambda x: si(1e12 * x, "FLOP/s"), "number"),
    "gb_per_s": ("Traffic", lambda x: si(1e9 * x, "B/s"), "number"), "peak_bytes": ("Peak memory", size, "number"),
    "worst_error_over_bound": ("Error / bound", percent, "number"), "flags": ("Notes", text, "notes"),
}  # fmt: skip


def sections(report: Report) -> Iterator[dict[str, Any]]:
    """Blocks under one heading; "" stands for every suite, pass and cache."""

    def section(name: str, blocks: Iterable[Block], suite: str = "", pass_: str = "", cache: str = "") -> Any:
        said = {"name": name, "blocks": list(blocks), "suite": suite, "pass_": pass_, "cache": cache}
        return [said] if said["blocks"] else []

    for suite in report.suites:
        for (pass_, cache), rows in grouped(report.of(suite), lambda row: (row.cell.pass_, row.cell.cache)).items():
            for make in (speed, scaling, roofline, kinds):
                yield from section(make.__name__, make(report, rows), suite, pass_, cache)
        yield from section("memory", memory(report.of(suite)), suite)
    for whole in (correctness, missing, glossary, environment):
        yield from section(whole.__name__, whole(report))


def page(report: Report) -> dict[str, Any]:
    counts = model.counts(report.rows)
    dates = dict.fromkeys(run.time[:10] for run in report.results.runs.values())
    return {
        "title": report.title,
        "subject": f"{', '.join(dates)} · {model.proven(report.rows)}",
        "notes": report.results.notes,
        "headlines": list(headlines(report)),
        "headings": [(name, *said) for name, said in SECTIONS.items()],
        "sections": list(sections(report)),
        "tiles": [(kind, GLYPHS[kind], n, *words.KINDS[kind]) for kind, n in counts.items()],
        "cells": shown(report),
        "rows": [details(row) for row in report.rows],
    }


# ---------------------------------------------------------------------------------------------- blocks
def card(title: str, *blocks: Block, folded: bool = False) -> Block:
    return {"kind": "card", "title": title, "blocks": blocks, "folded": folded}


def table(columns: Iterable[tuple[Entry, str]], lines: Iterable[Iterable[Entry]], look: str = "plain") -> Block:
    return {"kind": "table", "columns": list(columns), "lines": [list(line) for line in lines], "look": look}


def heads(*names: str) -> list[tuple[Entry, str]]:
    """Columns by name; parts of a bar with their colour."""
    looks = {"": "bar", "implementation": "key", "why": "why"} | dict.fromkeys(PLAIN, "")
    colours = model.KINDS | model.MEMORY
    marks = {name: entry(name.replace("_", " "), mark=(colour, "■")) for name, colour in colours.items()}
    return [(marks.get(name, name), looks.get(name, "number")) for name in names]


def facts(known: dict[str, Any]) -> Block:
    pairs = [(name.replace("_", " "), said(name, value)) for name, value in known.items()]
    return {"kind": "facts", "facts": [pair for pair in pairs if pair[1]]}


def command(line: str) -> list[Block]:
    return [{"kind": "command", "text": line}] if line else []


def figure(paint: Any, report: Report, rows: list[Row]) -> Block:
    return {"kind": "figure", "svg": functools.partial(plots.svg, paint, report, rows)}


def entry(text: str, look: str = "", row: Row | None = None, **more: Any) -> Entry:
    return {"text": text, "look": look, "row": row and row.id, **more}


def badge(word: words.Word, why: str = "") -> Entry:
    return entry(word.short, f"badge {word.severity}", title=why or word.sentence)


def agreement(wrong: int, said: str) -> Entry:
    return entry(f"{'✕' if wrong else '✓'} {said}", f"status {'bad' if wrong else 'good'}")


def name_of(row: Row, said: str = "") -> Entry:
    """The competitor with its mark, as a link to the row; said in other words, without a link."""
    mark = (f"s{row.index % 8}", MARKS[(row.index + row.index // 8) % 8])
    return entry(said, mark=mark) if said else entry(row.cell.competitor, "link", row, mark=mark)


def said(name: str, value: Any) -> Entry:
    """A value of the results in the unit that its name asks for."""
    x = number(value)
    if name == "ok":
        return agreement(value is False, "too far off" if value is False else "agrees")
    if x is None or name == "seed":
        return ", ".join(map(text, value)) if isinstance(value, list) else text("" if value is None else value)
    if name in ("bytes", "bytes_min", "floor") or name.endswith("_bytes"):
        return size(x)
    if name in ("flops", "flops_min"):
        return si(x, "FLOP")
    if name.startswith(("flops_", "bytes_")):
        return si(x, "FLOP/s" if name.startswith("flops_") else "B/s")
    if name in ("error", "bound", "max_abs"):
        return f"{x:.1e}"
    return percent(x) if name in ("efficiency", "occupancy") else f"{value:,}" if isinstance(value, int) else digits(x)


# --------------------------------------------------------------------------------------- suite and pass
def headlines(report: Report) -> Iterator[Block]:
    for means in grouped(model.headlines(report), lambda one: one.rows[0].cell.suite).values():
        cell, other = means[0].rows[0].cell, " ≠" if means[0].rows[0].other else ""
        speeds = [(one.rows[0].cell.pass_, [entry(times_as_fast(one.mean), "big"), one.range]) for one in means]
        title = f"{cell.suite}: {cell.competitor} against {report.baselines[cell.suite]}{other}"
        yield card(title, {"kind": "facts", "facts": speeds})


def speed(report: Report, rows: list[Row]) -> Iterator[Block]:
    families = list(grouped(rows, lambda row: row.family).values())
    yield from overview(report, model.means(rows))
    levels = [*(1 / step for step in reversed(STEPS)), 1, *STEPS]
    care = [entry("▲", "heat care"), "read with care", entry("–", "heat none"), "no number"]
    shades = [entry(f"{max(x, 1 / x):g}×", heat(x)) for x in levels]
    yield {"kind": "legend", "entries": ["slower", *shades, "faster", *care]}
    for some in filter(model.several, families):
        title = some[0].family.label + ("" if any(row.base for row in some) else " · no baseline")
        yield card(title, heatmap(sorted(some, key=lambda row: row.n or 0), "N"))
    if single := [row for some in families if not model.several(some) for row in some]:
        yield card("Single cases", heatmap(single, "case"))


def overview(report: Report, means: list[model.Mean]) -> Iterator[Block]:
    if len(means) < 2:
        return
    least, most = min(1.0, *(x.low for x in means)) / 1.05, max(1.0, *(x.high for x in means)) * 1.05
    cell, lines = means[0].rows[0].cell, []

    def at(x: float) -> float:
        return 100 * math.log(x / least) / math.log(most / least)

    for one in means:
        fill = ("s0" if one.mean >= 1 else "s1", at(min(1, one.mean)), at(max(1, one.mean)))
        bar = {"bar": [("range", at(one.low), at(one.high)), fill], "ticks": [at(1)]}
        mean = "baseline" if one.rows[0].base is one.rows[0] else times_as_fast(one.mean)
        lines.append([name_of(one.rows[0], one.name), bar, mean, one.range, f"{len(one.rows):,}"])
    title = f"{cell.suite}, {cell.pass_}: times as fast as {report.baselines[cell.suite]}"
    yield card(title, table(heads("implementation", "", "mean", "range", "cases"), lines))


def heatmap(rows: list[Row], first: str) -> Block:
    columns = {row.cell.competitor: row for row in rows}
    others = {row.cell.competitor for row in rows if row.other}
    head = [(name_of(row, name + (" ≠" if name in others else "")), "heat-cell") for name, row in columns.items()]
    lines = []
    for same in grouped(rows, lambda row: (row.family, row.n)).values():
        here = {row.cell.competitor: shade(row) for row in same}
        label = same[0].label if first == "case" else said("N", same[0].n) or "–"
        lines.append([label, *(here.get(name, "") for name in columns)])
    return table([(first, "key"), *head], lines, "heatmap")


def heat(gain: float) -> str:
    return f"heat {'up' if gain >= 1 else 'down'} l{sum(max(gain, 1 / gain) >= step for step in STEPS)}"


def shade(row: Row) -> Entry:
    if not row.timed:
        return entry(words.KINDS[row.kind].short, "heat none", row)
    before, care = ("▲ ", " care") if row.flagged else ("", "")
    if row.gain is None:
        return entry(f"{before}{digits(row.median, 3)} ms", "heat" + care, row)
    return entry(before + times_as_fast(row.gain), heat(row.gain) + care, row, more=digits(row.median))


def scaling(report: Report, rows: list[Row]) -> Iterator[Block]:
    timed = grouped((row for row in rows if row.timed and row.n), lambda row: row.family).values()
    for some in filter(model.several, timed):
        lines = []
        for same in grouped(some, lambda row: row.cell.competitor).values():
            fit, last = report.fits.get(same[0].curve), max(same, key=lambda row: row.n or 0)
            time, memory = (fit.time, fit.memory) if fit else (None, None)
            powers = [f"{time.exponent:.2f} ({time.low:.2f} to {time.high:.2f})" if time else "–",
                      f"{memory.exponent:.2f}" if memory else "–"]  # fmt: skip
            growth = entry(fit.growth, title=fit.verdict) if fit else "one length"
            lines.append([name_of(last), *powers, growth, times_as_fast(last.gain) or "no baseline"])
        cells = {id(row.cell) for row in some}
        crossings = [[x.words] for x in report.relations.crossovers if id(x.cell) in cells]
        more = [card("Crossovers", table([("", "")], crossings), folded=True)] if crossings else []
        head = [("t ~ N^b", "key"), *heads("b, time", "b, memory"), ("growth", ""), *heads("at the longest N")]
        yield card(some[0].family.label, figure(plots.scaling, report, some), table(head, lines), *more)


def against(row: Row) -> str:
    """The speed against the baseline in words; nothing for the baseline."""
    if not row.timed or row.base is row:
        return ""
    other = ", another function" if row.other else ""
    return f"{times_as_fast(row.gain)} as fast as {row.base.cell.competitor}{other}" if row.base else "no baseline"


def roofline(report: Report, rows: list[Row]) -> Iterator[Block]:
    for run_id, some in grouped((row for row in rows if row.rate("flops")), lambda row: row.cell.run_id).items():
        if plots.roofs(report.results.runs[run_id]):
            device = text(report.results.runs[run_id].environment.get("device", ""))
            names = {row.cell.competitor: name_of(row, row.cell.competitor) for row in some}
            legend = {"kind": "legend", "entries": [*names.values(), "hollow: read with care"]}
            title = f"{device}, {some[0].cell.suite}, {some[0].cell.pass_}"
            yield card(title, figure(plots.roofline, report, some), legend)


def kinds(report: Report, rows: list[Row]) -> Iterator[Block]:
    """Of cells whose kernels the profiler saw."""
    lines = []
    for case in grouped((row for row in rows if row.timed and row.cell.kinds), lambda row: row.label).values():
        most = max(sum(row.cell.kinds.values()) for row in case)
        for row in case:
            B, N = (number(row.cell.case.get(name)) for name in "BN")
            tokens = f"{1e3 * B * N / row.median:,.0f}" if row.cell.op == "train" and B and N and row.median else ""
            parts = {kind: number(row.cell.kinds.get(kind)) for kind in model.KINDS}
            figures = (tokens, percent(row.of_audit("efficiency")), *(digits(x, 3) for x in parts.values()))
            lines.append([row.label, name_of(row), stack(parts, model.KINDS, most), *figures])
    if lines:
        head = heads("implementation", "", "tokens/s", "share", *model.KINDS)
        yield table([("case", "group"), *head], lines, "cells")


def memory(rows: list[Row]) -> Iterator[Block]:
    lines = []
    for case in model.longest(row for row in rows if row.cell.cache == "cold"):
        sizes = [{part: row.size(part) for part in model.MEMORY} for row in case]
        most = max(max(row.size("peak", what) or 0.0 for row in case) for what in ("bytes", "floor"))
        most = max(most, *(sum(x or 0.0 for x in parts.values()) for parts in sizes))
        for row, parts in zip(case, sizes, strict=True):
            floor = row.size("peak", "floor")
            figures = (size(row.size()), times_as_fast(model.ratio(row.size(), floor)), *map(size, parts.values()))
            lines.append([row.label, name_of(row), stack(parts, model.MEMORY, most, floor), *figures])
    if lines:
        head = heads("implementation", "", "peak", "of the floor", *model.MEMORY)
        yield table([("case", "group"), *head], lines, "cells")


def stack(parts: dict[str, float | None], colours: dict[str, str], most: float, floor: float | None = None) -> Entry:
    """A bar of parts, one after the other."""
    ends = [100 * x / (most or 1.0) for x in itertools.accumulate((x or 0.0 for x in parts.values()), initial=0.0)]
    bar = [(colours[part], *pair) for part, pair in zip(parts, itertools.pairwise(ends), strict=True)]
    return {"bar": bar, "ticks": [] if floor is None else [100 * floor / (most or 1.0)]}


# ------------------------------------------------------------------------------------------ whole report
def correctness(report: Report) -> Iterator[Block]:
    """For each competitor, suite and precision the tensor that is nearest to its bound; wrong ones first."""
    checks = [(row, *pair) for row in report.rows for pair in row.cell.correctness.items()]
    found = []
    for (name, suite, dtype), same in grouped(
        checks, lambda x: (x[0].cell.competitor, x[0].cell.suite, text(x[0].cell.case.get("dtype", "")))
    ).items():
        wrong = sum(one.get("ok") is False for *_, one in same)
        shares = [model.ratio(one.get("error"), one.get("bound")) or 0.0 for *_, one in same]
        row, tensor, one = same[shares.index(max(shares))]
        verdict = agreement(wrong, f"{wrong:,} too far off" if wrong else "all agree")
        errors = (said(key, one.get(key)) for key in ("error", "bound"))
        where, share = entry(f"{tensor}, {row.label}", "link", row), percent(max(shares))
        line = [name, suite, dtype, f"{len(same):,}", verdict, where, *errors, share]
        found.append((not wrong, -max(shares), line))
    head = heads("implementation", "suite", "precision", "tensors", "result", "worst", "error", "bound", "of it")
    if found:
        yield table(head, (line for *_, line in sorted(found, key=lambda x: x[:2])), "cells")


def missing(report: Report) -> Iterator[Block]:
    lines = []
    for row in report.rows:
        if not row.timed:
            word = words.STATUSES[row.cell.status]
            lines.append([name_of(row), row.label, row.cell.pass_, badge(word), row.cell.reason or word.sentence])
    if lines:
        yield table(heads("implementation", "case", "pass", "result", "why"), lines, "cells")


def glossary(report: Report) -> Iterator[Block]:
    for title, known in (("What became of a cell", words.KINDS), ("How to read a number", words.FLAGS)):
        yield card(title, table([("", ""), ("", "")], ([badge(word), word.sentence] for word in known.values())))


def environment(report: Report) -> Iterator[Block]:
    for run in report.results.runs.values():
        commit = text(run.commit.get("sha") or "unknown")[:12] + (" with changes" if run.commit.get("dirty") else "")
        known = run.environment | run.ceilings | {"commit": commit, "run": run.run_id, "protocol": run.protocol}
        device = text(run.environment.get("device", "unknown device"))
        title = f"{device} · {run.time[:16].replace('T', ' ')} · {run.run_id}"
        yield card(title, facts(known), *command(run.command), folded=True)


# ----------------------------------------------------------------------------------------------- one cell
def details(row: Row) -> dict[str, Any]:
    cell, word = row.cell, words.KINDS[row.kind]
    keys = (cell.suite, cell.cache, cell.status, word.short, row.n, f"N{row.n}", cell.function, cell.backend, row.id)
    find = " ".join(map(str, (*tip(row), *keys, *(flag for flag, _ in row.flags))))
    return {
        "id": row.id, "kind": row.kind, "replaced": row.replaced, "tip": tip(row), "blocks": list(drawer(row)),
        "eyebrow": f"{cell.suite} · {cell.pass_} · {cell.cache} cache", "find": find, "clocks": cell.clocks_mhz,
        "samples": cell.samples_ms if row.timed else [], "median": row.median, "low": row.low, "high": row.high,
    }  # fmt: skip


def tip(row: Row) -> list[str]:
    """Name, case, time or the lack of one, and what else is to be known."""
    word, share = words.KINDS[row.cell.status], row.of_audit("efficiency")
    time = f"{word.short}: {row.cell.reason or word.sentence}"
    if row.timed:
        between = f", 95 % interval {digits(row.low)} to {digits(row.high)}" if row.low and row.high else ""
        time = f"{digits(row.median)} ms{between}"
    possible = f"{percent(share)} of what is possible" if row.timed and share is not None else ""
    flags = (f"{words.flag(flag).short}: {why}" for flag, why in row.flags if flag != "ANOTHER-FUNCTION")
    more = filter(None, (against(row), possible, *flags))
    return [row.cell.competitor, f"{row.label} · {row.cell.pass_}", time, *more]


def drawer(row: Row) -> Iterator[Block]:
    cell, word = row.cell, words.KINDS[row.kind]
    flags = [[badge(words.flag(flag)), f"{words.flag(flag).sentence} {why}"] for flag, why in row.flags]
    yield table([("", "")] * 2, [[badge(word), word.sentence], *flags])
    plain = {name: value for name, value in vars(cell).items() if name not in ELSEWHERE}
    rates = {f"{name}_per_s": row.rate(name) for name in ("flops", "bytes")}
    yield facts(plain | rates | {"configuration": cell.config_hash})
    for name, title in TITLES.items():
        value = getattr(cell, name)
        if value := {k: x for k, x in value.items() if k != "flags"} if name == "audit" else value:
            yield card(title, field(value))
    yield from command(cell.command)


def field(value: Any) -> Block:
    """A table of what holds objects or is a list, and facts of other objects."""
    if isinstance(value, dict) and all(isinstance(x, dict) for x in value.values()):
        value = [{"": key, **inner} for key, inner in value.items()]
    if isinstance(value, dict):
        return facts(value)
    lines = [x if isinstance(x, dict) else {"": x} for x in value]
    names = list(dict.fromkeys(k for line in lines for k in line))
    head = [(k.replace("_", " "), "number" if i else "") for i, k in enumerate(names)]
    return table(head, ([said(k, line.get(k)) for k in names] for line in lines))


# ---------------------------------------------------------------------------------------------- all cells
def values(row: Row, run: schema.Run, cases: list[str]) -> dict[str, Any]:
    """The columns in their order. A cell that does not count has no time, and nothing made from one."""
    cell, flops, traffic = row.cell, row.rate("flops"), row.rate("bytes")
    half = model.ratio(row.high - row.low, 2 * (row.median or 0.0)) if row.low and row.high else None
    return {
        "run_id": cell.run_id, "config_hash": cell.config_hash, "suite": cell.suite, "op": cell.op,
        "function": cell.function, "competitor": cell.competitor, "pass": cell.pass_, "cache": cell.cache,
        "status": cell.status, "reason": cell.reason, "flags": " ".join(flag for flag, _ in row.flags),
        "family": row.family.label, "n": row.n, **{name: cell.case.get(name.removeprefix("case_")) for name in cases},
        "median_ms": row.median, "low_ms": row.low, "high_ms": row.high, "half_interval": half,
        "times_as_fast": row.gain, "samples": len(cell.samples_ms) if row.timed else None, "device_ms": cell.device_ms,
        "kernels_ms": cell.kernels_ms, "host_ms": cell.host_ms, "efficiency": row.of_audit("efficiency"),
        "tflop_per_s": flops and flops / 1e12, "gb_per_s": traffic and traffic / 1e9,
        "floor_ms": row.of_audit("floor_ms"), "worst_error_over_bound": row.worst,
        **{f"{part}_bytes": row.size(part) for part in (*model.MEMORY, "peak")}, "backend": cell.backend,
        "version": cell.version, "seed": cell.seed, "device": text(run.environment.get("device", "")),
        "commit": text(run.commit.get("sha", "")), "command": cell.command,
    }  # fmt: skip


def shown(report: Report) -> Block:
    """The table of the page, without the columns in which all cells agree."""
    raw = [values(row, report.results.runs[row.cell.run_id], []) for row in report.rows]
    alike = {name for name in ("suite", "cache", "run_id") if len({line[name] for line in raw}) == 1}
    names = [name for name in SHOWN if name not in alike]
    lines = []
    for row, line in zip(report.rows, raw, strict=True):
        word, flags = words.KINDS[row.kind], [badge(words.flag(flag), why) for flag, why in row.flags]
        special = {
            "status": entry(f"{GLYPHS[row.kind]} {word.short}", f"status {word.severity}"),
            "competitor": name_of(row), "flags": flags if row.timed else row.cell.reason,
            "times_as_fast": row.other and entry(f"{times_as_fast(row.gain)} ≠", sort=row.gain),
        }  # fmt: skip
        known = {name: line[name] for name in names if line[name] is not None}
        plain = {name: entry(SHOWN[name][1](x), sort=x) for name, x in known.items()}
        lines.append([special.get(name) or plain.get(name, "") for name in names])
    return table(((SHOWN[name][0], SHOWN[name][2]) for name in names), lines, "cells")
