"""One HTML file with everything in it: it opens from disk, and asks nothing of the network.

The page is a template, a style sheet and scripts (`page/`), all inlined. The cells are JSON in a script element of type
data, with `<` escaped so that no text can end it; the scripts insert every value as text. The content security policy
allows the one style sheet and the one script, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from fulmen.bench import schema
from fulmen.bench.audit import number, time_ms
from fulmen.bench.report import model, words

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("base.js", "charts.js", "sections.js", "details.js", "table.js", "compare.js", "main.js")
MAX_SAMPLES = 500_000  # in one page, about 2 MB of text; beyond it every k-th one is embedded


def render(report: model.Report) -> str:
    import jinja2
    from markupsafe import Markup

    style, script = assets()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.from_string((PAGE / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=report.title,
        style=Markup(style),
        script=Markup(script),
        style_hash=sha256(style),
        script_hash=sha256(script),
        data=Markup(island(payload(report))),
    )


@cache
def assets() -> tuple[str, str]:
    """The style sheet and the scripts; the scripts share one scope, closed to the page, and one catch (`main.js`)."""
    parts = [(PAGE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '(() => {\n"use strict";\ntry {\n' + "\n".join(parts) + "})();\n"
    return (PAGE / "page.css").read_text(encoding="utf-8"), script


def sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def island(values: dict[str, Any]) -> str:
    """JSON that cannot leave its script element, and that any encoding survives."""
    text = json.dumps(clean(values), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def clean(value: Any) -> Any:
    """Without what JSON has no word for, and with floats as long as they need to be."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items()}
    return [clean(v) for v in value] if isinstance(value, list | tuple) else value


def payload(report: model.Report) -> dict[str, Any]:
    samples = sum(len(row.cell.samples_ms) for row in report.rows if row.timed)
    step = max(1, math.ceil(samples / MAX_SAMPLES))
    places = {family: i for i, family in enumerate(report.families)}
    return {
        "schema": schema.SCHEMA,
        "title": report.title,
        "notes": report.results.notes,
        "headlines": [dataclasses.asdict(one) for one in model.headlines(report)],
        "flops_unit": report.flops_unit(),
        "runs": [run_data(run) for run in report.results.runs.values()],
        "families": [{"suite": f.suite, "label": f.label} for f in report.families],
        "baselines": {suite: model.baseline(report.of(suite)) for suite in report.suites},
        "rows": [row_data(row, places[row.family], step) for row in report.rows],
        "fits": [
            {
                "family": places[report.family_of(one)], "competitor": one.cell.competitor, "pass": one.cell.pass_,
                "cache": one.cell.cache, "verdict": one.verdict, "growth": one.growth, "linear": one.linear,
                "used": [n for n, _ in one.points],
                **{
                    name: None if fit is None else [fit.exponent, fit.low, fit.high, fit.r2]
                    for name, fit in (("time", one.time), ("memory", one.memory))
                },
            }
            for one in report.relations.scaling
        ],
        "words": {  # as lists, which keep their order
            "status": list(words.STATUSES.items()),
            "flag": list(words.FLAGS.items()),
            "verdict": list(words.VERDICTS.items()),
        },
        "counts": list(model.counts(report.rows).items()),
    }  # fmt: skip


def run_data(run: schema.Run) -> dict[str, Any]:
    return {
        "id": run.run_id, "time": run.time, "command": run.command, "protocol": run.protocol,
        "facts": model.environment(run), "device": model.text(run.environment.get("device", "")),
        "cpu": model.text(run.environment.get("cpu", "")), "arch": run.environment.get("arch"),
        "ceilings": {name: x for name, value in run.ceilings.items() if (x := number(value)) is not None},
    }  # fmt: skip


def row_data(row: model.Row, family: int, step: int) -> dict[str, Any]:
    """A row without what is empty, and without the numbers of a cell that does not count."""
    cell = row.cell
    data: dict[str, Any] = {
        "run": cell.run_id, "hash": cell.config_hash, "suite": cell.suite, "op": cell.op, "function": cell.function,
        "case": cell.case, "family": family, "n": row.n, "competitor": cell.competitor, "pass": cell.pass_,
        "cache": cell.cache, "status": cell.status, "reason": cell.reason, "backend": cell.backend,
        "version": cell.version, "correctness": cell.correctness, "resources": cell.resources,
        "kernels": cell.kernels, "seed": cell.seed, "command": cell.command, "flags": row.flags,
        "replaced": row.replaced, "worst": row.worst, "arithmetic": str(cell.audit.get("arithmetic", "")),
        "memory": {part: [row.size(part), row.size(part, "floor")] for part in cell.memory},
        **{name: number(cell.audit.get(name)) for name in ("flops", "bytes", "floor_ms", "efficiency")},
    }  # fmt: skip
    if row.timed:
        clocks = cell.clocks_mhz[::step] if len(cell.clocks_mhz) == len(cell.samples_ms) else cell.clocks_mhz
        data |= {
            "median": row.median, "low": row.low, "high": row.high, "device_ms": time_ms(cell.device_ms),
            "kernels_ms": time_ms(cell.kernels_ms), "host_ms": time_ms(cell.host_ms),
            "samples": packed(cell.samples_ms[::step]), "clocks": packed(clocks), "every": step if step > 1 else None,
            "stats": {k: v for k, v in cell.stats.items() if k not in ("median", "low", "high")},
        }  # fmt: skip
    return {k: v for k, v in data.items() if not (v is None or v is False or v == "" or v == [] or v == {})}


def packed(values: list[float]) -> str:
    """The unit, the first value in units, then the difference of each to the first: small numbers, few characters."""
    if not values:
        return ""
    largest = max(abs(x) for x in values)
    unit = 10.0 ** (math.floor(math.log10(largest)) - 4) if largest > 1e-300 else 1.0
    whole = [round(x / unit) for x in values]
    return f"{unit:g} " + " ".join(str(x) for x in [whole[0], *(x - whole[0] for x in whole[1:])])
