"""`plots/*.png`, for slides and for readers without a browser, and the charts of the page as SVG."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen.bench import schema
from fulmen.bench.audit import grouped, si
from fulmen.bench.report import model
from fulmen.bench.schema import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6f76", "#000000")  # Okabe and Ito
MARKERS = "os^Dvxp+"
INK, SOFT, LINE, PAPER = "#1a1c1f", "#5a6068", "#e2e2de", "#ffffff"
GREYS = {"g0": "#9da2a8", "g1": "#bcc0c5", "g2": "#d6d8db", "ink": INK, "soft": SOFT, "line": LINE}
HEX = {f"s{i}": colour for i, colour in enumerate(COLOURS)} | GREYS  # of the classes in the style sheet
CLASSES = {colour: name for name, colour in HEX.items()}
STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left", "text.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": LINE, "axes.grid": True, "grid.color": LINE,
    "axes.axisbelow": True, "xtick.color": SOFT, "ytick.color": SOFT, "axes.labelcolor": SOFT, "legend.frameon": False,
    "savefig.dpi": 100, "text.parse_math": False, "font.family": "DejaVu Sans", "svg.fonttype": "none",
    "svg.hashsalt": "fulmen",
}  # fmt: skip
MAX_PANELS = 3  # cases that one figure shows


def draw(report: model.Report, folder: Path) -> list[Path]:
    """Draws what the results allow; file names hold the suite's name, made fit for a file."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for suite in report.suites:
            name = re.sub(r"[^a-z0-9]+", "-", suite.lower())[:40].strip("-") or "suite"
            rows = [row for row in report.of(suite) if row.cell.cache == "cold"] or report.of(suite)
            for paint in (speedup, scaling, roofline, kinds, memory):
                if (figure := paint(report, rows)) is not None:
                    labelled = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
                    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4)
                    names = (folder / f"{paint.__name__}-{name}{f'-{n}' if n > 1 else ''}.png" for n in range(1, 1000))
                    written.append(next(path for path in names if path not in written))
                    figure.savefig(written[-1], metadata={"Software": None})
    return written


def svg(paint: Callable[[model.Report, list[model.Row]], Figure], report: model.Report, rows: list[model.Row]) -> str:
    """A figure for the page: its colours are classes of the style sheet, since the page allows no style attribute."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure = paint(report, rows)
        figure.axes[0].set_title("")  # its card has one
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"<(metadata|style).*?</\1>|<!--.*?-->|\n\s*(?=<)", "", out.getvalue(), flags=re.S)
    text = text.replace(' target="_blank"', ' tabindex="-1"')  # tables have the same links for the keyboard
    text = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda x: re.sub(r"(\.\d)\d+", r"\1", x[0]), text)
    return re.sub(r' style="([^"]*)"', attributes, text[text.index("<svg") :])


def attributes(style: re.Match[str]) -> str:
    pairs = dict(pair.split(": ", 1) for pair in style[1].split("; ") if ": " in pair)
    looks = {CLASSES[value] for value in pairs.values() if value in CLASSES}
    said = "".join(f' {k}="{"currentColor" if v in CLASSES else v}"' for k, v in pairs.items() if k != "font")
    return said + "".join(f' class="{look}"' for look in looks)


def panels(rows: int, columns: int, wide: float, tall: float) -> tuple[Figure, list[Any]]:
    """A figure with axes of about so many inches, row by row."""
    from matplotlib.figure import Figure

    figure = Figure((columns * wide, rows * tall), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def plain(text: str, most: int = 40) -> str:
    """What a font can draw, and no longer than a plot has room for."""
    text = "".join(c if c.isprintable() and ord(c) < 0x2500 else "?" for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def points(axes: Any, rows: list[model.Row], at: Callable[[model.Row], tuple[float, float]]) -> str:
    """The rows of one competitor, hollow where they are to be read with care, linked to their details; its colour."""
    i = rows[0].index
    colour, marker = COLOURS[i % 8], MARKERS[(i + i // 8) % 8]
    look: dict[str, Any] = {"c": colour, "s": 22, "marker": marker, "linewidths": 1.1, "zorder": 3}
    if marker not in "x+":
        look |= {"c": [PAPER if row.flagged else colour for row in rows], "edgecolors": colour}
    axes.scatter(*zip(*map(at, rows), strict=True), **look).set_urls([f"#row={row.id}" for row in rows])
    axes.plot([], [], color=colour, marker=marker, label=plain(rows[0].cell.competitor), markersize=4)
    return colour


def logarithmic(axes: Any, name: str, say: Callable[[float], str] = "{:,g}".format) -> None:
    """Makes the axis "x" or "y" logarithmic, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(10, (1, 2, 5) if high < 500 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda x, _: say(x))


# ---------------------------------------------------------------------------------------------- figures
def speedup(report: model.Report, rows: list[model.Row]) -> Figure | None:
    found = [model.means(row for row in rows if row.cell.pass_ == pass_) for pass_ in schema.PASSES]
    if not (passes := [means for means in found if len(means) > 1]):
        return None
    figure, grid = panels(len(passes), 1, 7.1, 0.7 + 0.26 * max(map(len, passes)))
    for means, axes in zip(passes, grid, strict=True):
        places, cell = range(len(means)), means[0].rows[0].cell
        colours = [COLOURS[one.mean < 1] for one in means]
        axes.barh(places, [one.mean - 1 for one in means], left=1, color=colours, height=0.62)
        axes.hlines(places, [one.low for one in means], [one.high for one in means], color=SOFT, linewidth=1.4)
        axes.set_yticks(places, [plain(one.name, 28) for one in means])
        axes.invert_yaxis()
        logarithmic(axes, "x")
        axes.set_title(plain(f"{cell.suite}, {cell.pass_}: times as fast as {report.baselines[cell.suite]}", 70))
    return figure


def scaling(report: model.Report, rows: list[model.Row]) -> Figure | None:
    rows = [row for row in rows if row.timed and row.n]
    families = [some for some in grouped(rows, lambda row: row.family).values() if model.several(some)][:MAX_PANELS]
    passes = [pass_ for pass_ in schema.PASSES if any(row.cell.pass_ == pass_ for row in rows)]
    if not families:
        return None
    figure, grid = panels(len(families), len(passes), 4.8, 3.1)
    for axes, (some, pass_) in zip(grid, itertools.product(families, passes), strict=True):
        curves(axes, report, [row for row in some if row.cell.pass_ == pass_])
        axes.set_title(plain(f"{some[0].family.label}, {pass_}", 50))
    return figure


def curves(axes: Any, report: model.Report, rows: list[model.Row]) -> None:
    """Times over N with their intervals, fits and floors."""
    for some in grouped(sorted(rows, key=lambda row: row.n or 0), lambda row: row.cell.competitor).values():
        colour = points(axes, some, lambda row: (row.n or 0, row.median or 0.0))
        lengths, medians = [row.n for row in some], [row.median for row in some]
        axes.plot(lengths, medians, color=colour, linewidth=1.4)
        ends = ([getattr(row, end) or row.median for row in some] for end in ("low", "high"))
        axes.vlines(lengths, *ends, color=colour, linewidth=1)
        fit = report.fits.get(some[0].curve)
        if fit and fit.time:
            x, y = (statistics.fmean(map(math.log, values)) for values in zip(*fit.points, strict=True))
            used = [fit.points[0][0], fit.points[-1][0]]
            line = [math.exp(y + fit.time.exponent * (math.log(n) - x)) for n in used]
            axes.plot(used, line, color=colour, linewidth=0.9, dashes=(4, 4), gid="fit")
    for some in grouped(rows, lambda row: row.cell.function).values():
        if floor := sorted({row.n: ms for row in some if (ms := row.of_audit("floor_ms"))}.items()):
            axes.plot(*zip(*floor, strict=True), color=SOFT, linewidth=1, dashes=(5, 3), label="floor", gid="floor")
    axes.set(xlabel="N", ylabel="ms")
    axes.set_xscale("log", base=2)
    ticks = sorted({row.n or 0 for row in rows})
    axes.set_xticks(ticks, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in ticks])
    axes.minorticks_off()
    logarithmic(axes, "y")


def roofs(run: schema.Run) -> list[tuple[str, float, float]]:
    """FLOP/s and B/s: what the data sheet allows, and what was measured."""
    known = {name: number(value) for name, value in run.ceilings.items()}
    flops, size = known.get("flops_measured"), known.get("bytes_measured")
    found = [("limit", known.get("flops_hard"), known.get("bytes_hard") or size), ("measured", flops, size)]
    return [(name, x, y) for name, x, y in found if x and y]


def roofline(report: model.Report, rows: list[model.Row]) -> Figure | None:
    rows = [row for row in rows if row.rate("flops") and row.rate("bytes")]
    tops = roofs(report.results.runs[rows[0].cell.run_id]) if rows else []
    if not tops:
        return None
    figure, (axes,) = panels(1, 1, 6.4, 3.6)
    work = {row: float(row.cell.audit["flops"]) / float(row.cell.audit["bytes"]) for row in rows}
    for some in grouped(rows, lambda row: row.cell.competitor).values():
        points(axes, some, lambda row: (work[row], row.rate("flops") or 0.0))
    left, right = min(work.values()) / 3, 3 * max(*work.values(), *(top / rate for _, top, rate in tops))
    for i, (name, top, rate) in enumerate(tops):
        xs, dashes = [left, top / rate, right], "--" if name == "measured" else "-"
        axes.plot(xs, [min(top, x * rate) for x in xs], dashes, color=INK, linewidth=1.2, gid="roof")
        label = f"{name} {si(top, 'FLOP/s')} · {si(rate, 'B/s')}"
        axes.annotate(label, (right, top), (0, -10 if i else 4), textcoords="offset points", ha="right")
    logarithmic(axes, "x")
    logarithmic(axes, "y", lambda x: si(x, "FLOP/s"))
    axes.set_xlabel("FLOP per byte, at the floor")
    return figure


def kinds(report: model.Report, rows: list[model.Row]) -> Figure | None:
    cases = grouped((row for row in rows if row.timed and row.cell.kinds), lambda row: (row.label, row.cell.pass_))
    return stacks(list(cases.values()), model.KINDS, lambda row, kind: number(row.cell.kinds.get(kind)) or 0.0, "ms")


def memory(report: model.Report, rows: list[model.Row]) -> Figure | None:
    def size(row: model.Row, part: str) -> float:
        return ((row.size("peak", "floor") if part == "floor" else row.size(part)) or 0.0) / 2**30

    return stacks(model.longest(rows), model.MEMORY, size, "GiB; the line is the floor")


def stacks(
    cases: list[list[model.Row]], parts: dict[str, str], size: Callable[[model.Row, str], float], unit: str
) -> Figure | None:
    """Bars of parts, one after the other, a panel for each case."""
    if not (cases := cases[:MAX_PANELS]):
        return None
    figure, grid = panels(len(cases), 1, 7.1, 0.9 + 0.26 * max(map(len, cases)))
    for rows, axes in zip(cases, grid, strict=True):
        left = [0.0] * len(rows)
        for part, colour in parts.items():
            sizes = [size(row, part) for row in rows]
            axes.barh(range(len(rows)), sizes, left=left, color=HEX[colour], label=part.replace("_", " "), height=0.62)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
        for i, row in enumerate(rows):
            axes.vlines(size(row, "floor") or math.nan, i - 0.42, i + 0.42, color=INK)
        axes.set_yticks(range(len(rows)), [plain(row.cell.competitor, 24) for row in rows])
        axes.invert_yaxis()
        axes.set(xlabel=unit, title=plain(f"{rows[0].label}, {rows[0].cell.pass_}", 78))
    return figure
