"""`results.csv`: one line a cell, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from fulmen.bench import schema
from fulmen.bench.audit import number
from fulmen.bench.report import model
from fulmen.bench.schema import text


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
    cell, flops, size = row.cell, row.rate("flops"), row.rate("bytes")
    return {
        "run_id": cell.run_id, "config_hash": cell.config_hash, "suite": cell.suite, "op": cell.op,
        "function": cell.function, "competitor": cell.competitor, "pass": cell.pass_, "cache": cell.cache,
        "status": cell.status, "reason": cell.reason, "flags": " ".join(flag for flag, _ in row.flags),
        **{name: cell.case.get(name.removeprefix("case_")) for name in cases},
        "median_ms": row.median, "low_ms": row.low, "high_ms": row.high,
        "samples": len(cell.samples_ms) if row.timed else None, "device_ms": cell.device_ms,
        "kernels_ms": cell.kernels_ms, "host_ms": cell.host_ms, "efficiency": row.of_audit("efficiency"),
        "tflop_per_s": flops and flops / 1e12, "gb_per_s": size and size / 1e9, "floor_ms": row.of_audit("floor_ms"),
        "worst_error_over_bound": row.worst, **{f"{part}_bytes": row.size(part) for part in model.MEMORY_PARTS},
        "backend": cell.backend, "version": cell.version, "seed": cell.seed,
        "device": text(run.environment.get("device", "")), "commit": text(run.commit.get("sha", "")),
        "command": cell.command,
    }  # fmt: skip


def guarded(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets an apostrophe before it; numbers stay numbers."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value if not isinstance(value, float) or number(value) is not None else None
    text = value if isinstance(value, str) else json.dumps(value)
    return "'" + text if text.lstrip()[:1] in ("=", "+", "-", "@", "|", "%") or text[:1] in ("\t", "\r", "\n") else text
