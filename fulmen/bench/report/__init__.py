"""The report of a benchmark run: `report.html`, `report.md`, `results.csv` and `plots/*.png`.

Made from the lines of a results file and from nothing else: the same lines give the same bytes. A number whose cell
is not "ok" (wrong, withheld, out of memory) appears in none of them.
"""

from __future__ import annotations

from pathlib import Path

from fulmen.bench import schema


def write(results: schema.Results, out: Path) -> list[Path]:
    """Writes the report into the folder `out` and returns the files; raises schema.BadResults."""
    from fulmen.bench.report import html, markdown, model, plots, table

    if not results.cells:
        raise schema.BadResults("there is no cell in these results: nothing was measured, so nothing can be shown")
    report = model.read(results)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, render in (("report.html", html.render), ("report.md", markdown.render), ("results.csv", table.render)):
        written.append(out / name)
        written[-1].write_text(render(report), encoding="utf-8", errors="replace", newline="\n")
    return [*written, *plots.draw(report, out / "plots")]
