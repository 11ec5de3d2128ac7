"""One HTML file with everything in it: it opens from disk, and asks nothing of the network.

The page is a template, a style sheet and scripts of our own (`page/`), all inlined. The cells travel as JSON in a
script element that is data, with `<` escaped so that no text can end it; the scripts put every value in place as text.
The content security policy allows exactly the one style sheet and the one script, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from fulmen.bench import audit, schema
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
        title=title(report),
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


def title(report: model.Report) -> str:
    devices = dict.fromkeys(
        str(run.environment.get("device", "unknown device")) for run in report.results.runs.values()
    )
    return f"{', '.join(devices)}: {', '.join(report.suites)}"


def payload(report: model.Report) -> dict[str, Any]:
    samples = sum(len(row.cell.samples_ms) for row in report.rows if row.timed)
    step = max(1, math.ceil(samples / MAX_SAMPLES))
    places = {family: i for i, family in enumerate(report.families)}
    return {
        "schema": schema.SCHEMA,
        "title": title(report),
        "runs": [run_data(run) for run in report.results.runs.values()],
        "families": [{"suite": f.suite, "label": f.label} for f in report.families],
        "baselines": {
            suite: model.baseline(row for row in report.rows if row.cell.suite == suite) for suite in report.suites
        },
        "rows": [row_data(row, places[row.family], step) for row in report.rows],
        "fits": [fit_data(one, report) for one in report.relations.scaling],
        "words": {  # as lists, which keep their order
            "status": list(words.STATUSES.items()),
            "flag": list(words.FLAGS.items()),
            "verdict": list(words.VERDICTS.items()),
        },
        "counts": list(model.counts(report.rows).items()),
    }


def fit_data(one: audit.Scaling, report: model.Report) -> dict[str, Any]:
    """How time and memory of one curve grow; the family by any of its cells."""
    where = next(i for i, family in enumerate(report.families) if model.is_of(one, family))
    fits = {
        name: None if fit is None else [fit.exponent, fit.low, fit.high, fit.r2]
        for name, fit in (("time", one.time), ("memory", one.memory))
    }
    return {
        "family": where, "competitor": one.competitor, "pass": one.pass_, "cache": one.cache, **fits,
        "verdict": one.verdict, "linear": one.linear, "used": [n for n, _ in one.points],
    }  # fmt: skip


def run_data(run: schema.Run) -> dict[str, Any]:
    facts = [[name, value] for name, value in model.environment(run)]
    ceilings = {name: x for name, value in run.ceilings.items() if (x := model.number(value)) is not None}
    return {
        "id": run.run_id, "time": run.time, "command": run.command, "protocol": run.protocol, "facts": facts,
        "device": model.text(run.environment.get("device", "")), "ceilings": ceilings,
        "cpu": model.text(run.environment.get("cpu", "")), "arch": run.environment.get("arch"),
    }  # fmt: skip


def row_data(row: model.Row, family: int, step: int) -> dict[str, Any]:
    """A row without what is empty. What was measured in vain stays out: no page of ours can show it."""
    cell = row.cell
    data: dict[str, Any] = {
        "run": cell.run_id, "hash": cell.config_hash, "suite": cell.suite, "op": cell.op, "function": cell.function,
        "case": cell.case, "family": family, "n": row.n, "competitor": cell.competitor, "pass": cell.pass_,
        "cache": cell.cache, "status": cell.status, "reason": cell.reason, "backend": cell.backend,
        "version": cell.version, "correctness": cell.correctness, "resources": cell.resources,
        "kernels": cell.kernels, "seed": cell.seed,
        "command": cell.command, "flags": row.flags, "replaced": row.replaced, "worst": row.worst,
        "arithmetic": str(cell.audit.get("arithmetic", "")),
    }  # fmt: skip
    data["memory"] = {
        part: [model.number(sizes.get("bytes")), model.number(sizes.get("floor"))]
        for part, sizes in cell.memory.items()
    }
    for name in ("flops", "bytes", "floor_ms", "efficiency"):
        data[name] = model.number(cell.audit.get(name))
    if row.timed:
        data |= {"median": row.median, "low": row.low, "high": row.high}
        data |= {"device_ms": cell.device_ms, "kernels_ms": cell.kernels_ms, "host_ms": cell.host_ms}
        data["stats"] = {k: v for k, v in cell.stats.items() if k not in ("median", "low", "high")}
        data["samples"] = packed(cell.samples_ms[::step])
        clocks = cell.clocks_mhz[::step] if len(cell.clocks_mhz) == len(cell.samples_ms) else cell.clocks_mhz
        data["clocks"] = packed(clocks)
        if step > 1:
            data["every"] = step
    return {k: v for k, v in data.items() if not (v is None or v is False or v == "" or v == [] or v == {})}


def packed(values: list[float]) -> str:
    """The unit, the first value in units, then the difference of each to the first: small numbers, few characters."""
    if not values:
        return ""
    largest = max(abs(x) for x in values)
    unit = 10.0 ** (math.floor(math.log10(largest)) - 4) if largest > 0 else 1.0
    whole = [round(x / unit) for x in values]
    return f"{unit:g} " + " ".join(str(x) for x in [whole[0], *(x - whole[0] for x in whole[1:])])
