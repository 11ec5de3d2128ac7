"""`results.csv`: one line a cell, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from fulmen.bench import schema
from fulmen.bench.report import model

FIRST = ("run_id", "config_hash", "suite", "op", "function", "competitor", "pass", "cache", "status", "reason", "flags")
NUMBERS = (
    "median_ms", "low_ms", "high_ms", "samples", "device_ms", "kernels_ms", "host_ms", "floor_ms", "efficiency",
    "tflop_per_s", "gb_per_s", "worst_error_over_bound",
)  # fmt: skip
LAST = ("backend", "version", "seed", "device", "commit", "command")
ALL_MEMORY = (*model.MEMORY_PARTS, "peak")


def render(report: model.Report) -> str:
    names = list(dict.fromkeys(name for row in report.rows for name in row.cell.case))
    memory = [f"{part}_bytes" for part in ALL_MEMORY]
    columns = [*FIRST, *(f"case_{name}" for name in names), *NUMBERS, *memory, *LAST]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([guarded(name) for name in columns])
    for row in report.rows:
        line = values(row, report.results.runs[row.cell.run_id])
        writer.writerow([guarded(line.get(name)) for name in columns])
    return out.getvalue()


def values(row: model.Row, run: schema.Run) -> dict[str, Any]:
    cell = row.cell
    line: dict[str, Any] = {
        "run_id": cell.run_id, "config_hash": cell.config_hash, "suite": cell.suite, "op": cell.op,
        "function": cell.function, "competitor": cell.competitor, "pass": cell.pass_, "cache": cell.cache,
        "status": cell.status, "reason": cell.reason, "flags": " ".join(flag for flag, _ in row.flags),
        "backend": cell.backend, "version": cell.version, "seed": cell.seed, "command": cell.command,
        "device": model.text(run.environment.get("device", "")), "commit": model.text(run.commit.get("sha", "")),
        "floor_ms": model.number(cell.audit.get("floor_ms")), "worst_error_over_bound": row.worst,
    }  # fmt: skip
    line |= {f"case_{name}": value for name, value in cell.case.items()}
    line |= {f"{part}_bytes": model.number(cell.memory.get(part, {}).get("bytes")) for part in ALL_MEMORY}
    if row.timed:
        flops, size = row.rate("flops"), row.rate("bytes")
        line |= {
            "median_ms": row.median, "low_ms": row.low, "high_ms": row.high, "samples": len(cell.samples_ms),
            "device_ms": cell.device_ms, "kernels_ms": cell.kernels_ms, "host_ms": cell.host_ms,
            "efficiency": model.number(cell.audit.get("efficiency")),
            "tflop_per_s": None if flops is None else flops / 1e12, "gb_per_s": None if size is None else size / 1e9,
        }  # fmt: skip
    return line


def guarded(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets an apostrophe before it; numbers stay numbers."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value if not isinstance(value, float) or model.number(value) is not None else None
    text = value if isinstance(value, str) else json.dumps(value)
    return "'" + text if text.lstrip()[:1] in ("=", "+", "-", "@", "|", "%") or text[:1] in ("\t", "\r", "\n") else text
