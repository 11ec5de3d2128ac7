"""One HTML file with everything in it: it opens from disk, and asks nothing of the network.

The page is a template, a style sheet and scripts (`page/`), all inlined. The data are JSON, deflated, in base64; the
scripts insert every value as text, and compute nothing. The content security policy allows the one style sheet and the
one script, by their hashes, and nothing else.
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
from typing import Any

from fulmen.bench import words
from fulmen.bench.report import content, model, table

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("blocks.js", "drawer.js", "main.js")


def render(report: model.Report) -> str:
    template, style, *scripts = ((PAGE / name).read_text("utf-8") for name in ("page.html", "page.css", *SCRIPTS))
    # One scope, closed to the page, and one catch, at the end of main.js.
    script = '(async () => {\n"use strict";\ntry {\n' + "\n".join(scripts) + "})();\n"
    data = json.dumps(clean(payload(report)), sort_keys=True, separators=(",", ":"), allow_nan=False)
    values = {
        "title": escape(report.title), "style": style, "script": script, "style_hash": sha256(style),
        "script_hash": sha256(script), "data": base64.b64encode(zlib.compress(data.encode(), 9)).decode(),
    }  # fmt: skip
    return re.sub(r"{{ (\w+) }}", lambda name: values[name[1]], template)


def sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def clean(value: Any) -> Any:
    """Without what JSON has no word for, with floats as long as they need to be, and with figures drawn."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items() if v not in (None, "")}
    return value() if callable(value) else [clean(v) for v in value] if isinstance(value, list | tuple) else value


def payload(report: model.Report) -> dict[str, Any]:
    counts = model.counts(report.rows)
    dates = dict.fromkeys(run.time[:10] for run in report.results.runs.values())
    return {
        "title": report.title,
        "subject": f"{', '.join(dates)} · {model.proven(report.rows)}",
        "notes": report.results.notes,
        "headlines": list(content.headlines(report)),
        "headings": [(name, *said) for name, said in content.SECTIONS.items()],
        "sections": [one._asdict() for one in content.sections(report)],
        "tiles": [(kind, content.GLYPHS[kind], n, *words.KINDS[kind]) for kind, n in counts.items()],
        "cells": table.shown(report),
        "rows": [content.details(row) for row in report.rows],
    }
