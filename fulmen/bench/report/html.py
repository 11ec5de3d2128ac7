"""One HTML file with everything in it: it opens from disk, and asks nothing of the network.

The page is a template, a style sheet and scripts (`page/`), all inlined. The data are JSON, deflated, in base64; the
scripts insert every value as text. The content security policy allows the one style sheet and the one script, by their
hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from html import escape
from pathlib import Path
from statistics import NormalDist
from typing import Any

from fulmen.bench import comparing, schema, words
from fulmen.bench.audit import SHORTEST_MS, number
from fulmen.bench.report import model

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("base.js", "charts.js", "sections.js", "details.js", "table.js", "compare.js", "main.js")


def render(report: model.Report) -> str:
    template, style, *scripts = ((PAGE / name).read_text("utf-8") for name in ("page.html", "page.css", *SCRIPTS))
    # One scope, closed to the page, and one catch, at the end of main.js.
    script = '(async () => {\n"use strict";\ntry {\n' + "\n".join(scripts) + "})();\n"
    data = json.dumps(clean(payload(report)), sort_keys=True, separators=(",", ":"), allow_nan=False)
    values = {
        "title": escape(report.title), "style": style, "script": script, "style_hash": sha256(style),
        "script_hash": sha256(script), "data": base64.b64encode(zlib.compress(data.encode())).decode(),
    }  # fmt: skip
    return re.sub(r"{{ (\w+) }}", lambda name: values[name[1]], template)


def sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def clean(value: Any) -> Any:
    """Without what JSON has no word for, and with floats as long as they need to be."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items() if v is not None}
    return [clean(v) for v in value] if isinstance(value, list | tuple) else value


def payload(report: model.Report) -> dict[str, Any]:
    family = {id(row.cell): report.families.index(row.family) for row in report.rows}
    kinds = {"status": words.KINDS, "flag": words.FLAGS, "verdict": words.VERDICTS}
    fits = [
        {
            "family": family[id(one.cell)], "competitor": one.cell.competitor, "pass": one.cell.pass_,
            "cache": one.cell.cache, "verdict": one.verdict, "growth": one.growth, "linear": one.linear,
            "used": [n for n, _ in one.points], "time": one.time, "memory": one.memory,
        }
        for one in report.relations.scaling
    ]  # fmt: skip
    return {
        "schema": schema.SCHEMA,
        "title": report.title,
        "notes": report.results.notes,
        "headlines": [one._asdict() for one in model.headlines(report)],
        "flops_unit": report.flops_unit(),
        "runs": [run_data(run) for run in report.results.runs.values()],
        "baselines": {suite: model.baseline(report.of(suite)) for suite in report.suites},
        "rows": [row_data(row, family[id(row.cell)]) for row in report.rows],
        "fits": fits,
        "correctness": model.correctness(report),
        "words": [(kind, list(known.items())) for kind, known in kinds.items()],  # lists keep their order
        "counts": list(model.counts(report.rows).items()),
        "rule": {
            "sigmas": NormalDist().inv_cdf(1 - comparing.P_VALUE / 2), "change": comparing.CHANGE,
            "equal": comparing.EQUAL, "room": comparing.ROOM, "clock": comparing.CLOCK_MOVED,
            "few": comparing.MIN_SAMPLES, "most": comparing.MAX_SAMPLES, "shortest": SHORTEST_MS,
        },
    }  # fmt: skip


def run_data(run: schema.Run) -> dict[str, Any]:
    return {
        "id": run.run_id, "time": run.time, "command": run.command, "protocol": run.protocol,
        "facts": model.environment(run), "ceilings": {name: number(value) for name, value in run.ceilings.items()},
        **{name: run.environment.get(name) for name in ("device", "cpu", "arch")},
    }  # fmt: skip


def row_data(row: model.Row, family: int) -> dict[str, Any]:
    """The cell, as in the results file, and what the report reads off it."""
    cell = row.cell
    spread = model.ratio(row.high - row.low, 2 * (row.median or 0)) if row.low and row.high else None
    return vars(cell) | {
        "config_hash": cell.config_hash, "family": family, "label": row.family.label, "where": row.label, "n": row.n,
        "kind": row.kind, "median": row.median, "low": row.low, "high": row.high, "spread": spread, "flags": row.flags,
        "flops_rate": row.rate("flops"), "bytes_rate": row.rate("bytes"), "replaced": row.replaced, "worst": row.worst,
        **{name: row.of_audit(name) for name in ("flops", "bytes", "floor_ms", "efficiency")},
    }  # fmt: skip
