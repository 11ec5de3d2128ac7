"""The report of a benchmark run: `report.html`, `report.md`, `results.csv` and `plots/*.png`.

Made from the lines of a results file and from nothing else: the same lines give the same bytes. A number whose cell
is not "ok" (wrong, withheld, out of memory) appears in none of them.

The page asks nothing of the network. It is a template, a style sheet and a script (`page/`), all inlined, and its
content as JSON, deflated, in base64; the script inserts every value as text, and computes nothing. The content security
policy allows the one style sheet and the one script, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from fulmen.bench import schema, words
from fulmen.bench.report import content, model, plots

PAGE = Path(__file__).parent / "page"


def write(results: schema.Results, out: Path) -> list[Path]:
    """Writes the report into the folder `out` and returns the files; raises schema.BadResults."""
    if not results.cells:
        raise schema.BadResults("there is no cell in these results: nothing was measured, so nothing can be shown")
    report = model.read(results)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, render in (("report.html", html), ("report.md", markdown), ("results.csv", table)):
        written.append(out / name)
        written[-1].write_text(render(report), encoding="utf-8", errors="replace", newline="\n")
    return [*written, *plots.draw(report, out / "plots")]


# ------------------------------------------------------------------------------------------------ the page
def html(report: model.Report) -> str:
    template, style, script = ((PAGE / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    data = json.dumps(clean(content.page(report)), sort_keys=True, separators=(",", ":"), allow_nan=False)
    values = {"title": escape(report.title), "style": style, "script": script}
    for name in ("style", "script"):
        values[f"{name}_hash"] = base64.b64encode(hashlib.sha256(values[name].encode()).digest()).decode()
    values["data"] = base64.b64encode(zlib.compress(data.encode(), 9)).decode()
    return re.sub(r"{{ (\w+) }}", lambda name: values[name[1]], template)


def clean(value: Any) -> Any:
    """Without what JSON has no word for, with floats as long as they need to be, and with figures drawn."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): clean(v) for k, v in value.items() if v not in (None, "")}
    return value() if callable(value) else [clean(v) for v in value] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------------- a terminal, a pull request, a mail
def markdown(report: model.Report) -> str:
    """Paragraphs with an empty line between them; the lead of a section stands where it comes first."""
    out = [f"# {safe(report.title)}", *(x for block in content.headlines(report) for x in paragraphs(block))]
    counts = ([f"{n:,}", words.KINDS[k].short, words.KINDS[k].sentence] for k, n in model.counts(report.rows).items())
    out += [f"**{model.proven(report.rows)}**", *map(safe, report.results.notes)]
    out.append(rows([("cells", "number"), ("", ""), ("", "")], counts))
    leads = set()
    for section in content.sections(report):
        if inside := [text for block in section["blocks"] for text in paragraphs(block)]:
            title, lead = content.SECTIONS[name := section["name"]]
            hot = "hot cache" if section["cache"] == "hot" else ""
            where = ", ".join(filter(None, (section["suite"], section["pass_"], hot)))
            out.append(f"## {safe(f'{title}: {where}' if where else title)}")
            out += [safe(lead)] if lead and name not in leads else []
            leads.add(name)
            out += inside
    out.append(f"Made from results of the schema {schema.SCHEMA}; `results.csv` and `report.html` hold every cell.")
    return "\n\n".join(out) + "\n"


def paragraphs(block: content.Block) -> Iterator[str]:
    kind = block["kind"]
    if kind == "card":
        if inside := [text for inner in block["blocks"] for text in paragraphs(inner)]:
            yield f"### {safe(block['title'])}"
            yield from inside
    elif kind == "table":
        yield rows(block["columns"], block["lines"])
    elif kind == "facts":
        yield rows([("", "")] * 2, block["facts"])
    elif kind == "command":  # fenced by more backticks than it has in a row
        text = schema.printable(" ".join(block["text"].split()))
        fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
        yield f"{fence} {text} {fence}" if "`" in (text[:1], text[-1:]) else fence + text + fence


def rows(columns: list[tuple[content.Entry, str]], lines: Iterable[list[content.Entry]]) -> str:
    kept = [i for i, (_, look) in enumerate(columns) if look != "bar"]
    rule = ("--:" if columns[i][1] in ("number", "heat-cell") else "---" for i in kept)
    said = ["| " + " | ".join(safe(line[i]) for i in kept) + " |" for line in ([x for x, _ in columns], *lines)]
    return "\n".join([said[0], "|" + "|".join(rule) + "|", *said[1:]])


def safe(entry: content.Entry) -> str:
    """An entry as it is: neither markup nor HTML, neither a table's end nor a terminal's command."""
    if isinstance(entry, list):
        return " ".join(map(safe, entry))
    if isinstance(entry, dict):
        entry = f"{entry['more']} ({entry['text']})" if "more" in entry else entry["text"]
    text = escape(schema.printable(" ".join(str(entry).split())), quote=False)
    return re.sub(r"([\\`*_{}\[\]()#+!|~])", r"\\\1", text)


# --------------------------------------------------------------------------------- spreadsheets and data frames
def table(report: model.Report) -> str:
    """One line a cell."""
    cases = list(dict.fromkeys(f"case_{name}" for row in report.rows for name in row.cell.case))
    lines = [content.values(row, report.results.runs[row.cell.run_id], cases) for row in report.rows]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(guarded, lines[0]))
    writer.writerows([guarded(x) for x in line.values()] for line in lines)
    return out.getvalue()


def guarded(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets an apostrophe before it; numbers stay numbers."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value if not isinstance(value, float) or schema.number(value) is not None else None
    text = value if isinstance(value, str) else json.dumps(value)
    return "'" + text if text.lstrip()[:1] in ("=", "+", "-", "@", "|", "%") or text[:1] in ("\t", "\r", "\n") else text
