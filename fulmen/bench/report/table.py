"""`results.csv`, one line a cell, for spreadsheets and data frames; and the page's table of all cells."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

from fulmen.bench import schema, words
from fulmen.bench.audit import number, si
from fulmen.bench.report import content, model
from fulmen.bench.report.model import digits, percent, size, times_as_fast
from fulmen.bench.schema import text

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


def render(report: model.Report) -> str:
    cases = list(dict.fromkeys(f"case_{name}" for row in report.rows for name in row.cell.case))
    lines = [values(row, report.results.runs[row.cell.run_id], cases) for row in report.rows]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(guarded, lines[0]))
    writer.writerows([guarded(x) for x in line.values()] for line in lines)
    return out.getvalue()


def values(row: model.Row, run: schema.Run, cases: list[str]) -> dict[str, Any]:
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


def guarded(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets an apostrophe before it; numbers stay numbers."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value if not isinstance(value, float) or number(value) is not None else None
    text = value if isinstance(value, str) else json.dumps(value)
    return "'" + text if text.lstrip()[:1] in ("=", "+", "-", "@", "|", "%") or text[:1] in ("\t", "\r", "\n") else text


def shown(report: model.Report) -> content.Block:
    """The table of the page, without the columns in which all cells agree."""
    raw = [values(row, report.results.runs[row.cell.run_id], []) for row in report.rows]
    alike = {name for name in ("suite", "cache", "run_id") if len({line[name] for line in raw}) == 1}
    names = [name for name in SHOWN if name not in alike]
    lines = []
    for row, line in zip(report.rows, raw, strict=True):
        word, flags = words.KINDS[row.kind], [content.badge(words.flag(flag), why) for flag, why in row.flags]
        special = {
            "status": content.entry(f"{content.GLYPHS[row.kind]} {word.short}", f"status {word.severity}"),
            "competitor": content.name_of(row), "flags": flags if row.timed else row.cell.reason,
            "times_as_fast": row.other and content.entry(f"{times_as_fast(row.gain)} ≠", sort=row.gain),
        }  # fmt: skip
        known = {name: line[name] for name in names if line[name] is not None}
        plain = {name: content.entry(SHOWN[name][1](x), sort=x) for name, x in known.items()}
        lines.append([special.get(name) or plain.get(name, "") for name in names])
    return content.table(((SHOWN[name][0], SHOWN[name][2]) for name in names), lines, "cells")
