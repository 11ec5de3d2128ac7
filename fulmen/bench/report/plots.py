"""`plots/*.png`: the charts of the page, for slides and for readers without a browser."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen.bench.audit import grouped, number
from fulmen.bench.report import model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6F76", "#000000")  # Okabe and Ito
MARKERS = "os^Dvxp+"
PARTS = {"inputs": "#9da2a8", "output": "#bcc0c5", "gradients": "#d6d8db", "saved": "#D55E00",
         "workspace_forward": "#56B4E9", "workspace_backward": "#0072B2"}  # fmt: skip
HEAT = ("#8a3c00", "#d55e00", "#f4c9a8", "#f1f1ee", "#a9cfe8", "#0072b2", "#00507d")  # slower to faster
INK, SOFT = "#1a1c1f", "#5a6068"
STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#c4c5c1", "axes.grid": True,
    "grid.color": "#e8e8e5", "legend.frameon": False, "savefig.dpi": 110, "text.parse_math": False,
    "font.family": "DejaVu Sans",
}  # fmt: skip
MAX_PANELS = 3  # families that one figure shows
MAX_LINES = 24  # cases that one heatmap shows


def draw(report: model.Report, folder: Path) -> list[Path]:
    """Draws what the results allow; file names hold the suite's name, made fit for a file."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for suite in report.suites:
            name = re.sub(r"[^a-z0-9]+", "-", suite.lower())[:40].strip("-") or "suite"
            rows = [row for row in report.of(suite) if row.cell.cache == "cold"] or report.of(suite)
            for paint in (speedup, scaling, roofline, memory):
                if (figure := paint(report, rows)) is not None:
                    names = (folder / f"{paint.__name__}-{name}{f'-{n}' if n > 1 else ''}.png" for n in range(1, 1000))
                    written.append(next(path for path in names if path not in written))
                    figure.savefig(written[-1], metadata={"Software": None})
    return written


def panels(rows: int, columns: int, wide: float, tall: float) -> tuple[Figure, list[Axes]]:
    """A figure with axes of about so many inches, row by row."""
    from matplotlib.figure import Figure

    figure = Figure((columns * wide, rows * tall), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def legend(figure: Figure, axes: Axes) -> None:
    labelled = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4)


def plain(text: str, most: int = 40) -> str:
    """What a font can draw, and no longer than a plot has room for."""
    text = "".join(c if c.isprintable() and ord(c) < 0x2500 else "?" for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def look(rows: Iterable[model.Row]) -> dict[str, dict[str, Any]]:
    """The competitors in their order, with colour, marker and label."""
    return {
        name: {"color": COLOURS[i % 8], "marker": MARKERS[(i + i // 8) % 8], "label": plain(name), "markersize": 4}
        for i, name in enumerate(dict.fromkeys(row.cell.competitor for row in rows))
    }


def logarithmic(axes: Axes, which: str) -> None:
    """Logarithmic axes, "x", "y" or "xy", with plain numbers."""
    for name in which:
        axes.set(**{f"{name}scale": "log"})
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(lambda x, _: f"{x:,g}")
        axis.set_minor_formatter(lambda x, _: f"{x:,g}" if f"{x:e}"[0] in "25" else "")


def pass_of(rows: list[model.Row], *order: str) -> str:
    return next((p for p in order if any(row.cell.pass_ == p for row in rows)), "")


# ---------------------------------------------------------------------------------------------- kinds


def speedup(report: model.Report, rows: list[model.Row]) -> Figure | None:
    from matplotlib.colors import LinearSegmentedColormap

    base, names, pass_ = model.baseline(rows), list(look(rows)), pass_of(rows, "total", "forward", "backward")
    if not base or len(names) < 2:
        return None
    lines = list(grouped((r for r in rows if r.cell.pass_ == pass_), lambda r: (r.family, r.n)).values())[:MAX_LINES]
    figure, (axes,) = panels(1, 1, 3.5 + 0.95 * len(names), 1.0 + 0.3 * len(lines))
    grid = [[math.nan] * len(names) for _ in lines]
    for i, line in enumerate(lines):
        here = {row.cell.competitor: row for row in line}
        for j, row in enumerate(map(here.get, names)):
            if row is None:
                continue
            gain = model.speedup(row, here.get(base))
            label = model.digits(row.median, 3) + " ms" if row.timed else row.cell.status
            if gain is not None:
                grid[i][j] = math.log2(gain)
                label = f"{'▲' if row.flagged else ''}{model.digits(gain, 3)}×"
            colour = "white" if abs(grid[i][j]) > 2.2 else "black"
            axes.text(j, i, label, ha="center", va="center", fontsize=7.5, color=colour)
    colours = LinearSegmentedColormap.from_list("slower-faster", HEAT)
    axes.imshow(grid, cmap=colours, vmin=-math.log2(10), vmax=math.log2(10), aspect="auto")
    axes.set_xticks(range(len(names)), ["\n".join(textwrap.wrap(plain(name, 36), 13)) or "?" for name in names])
    axes.set_yticks(range(len(lines)), [plain(line[0].label, 48) for line in lines])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_title(plain(f"{rows[0].cell.suite}, {pass_}: times as fast as {base}", 70))
    return figure


def scaling(report: model.Report, rows: list[model.Row]) -> Figure | None:
    rows = [row for row in rows if row.timed and row.n]
    families = [f for f, some in grouped(rows, lambda r: r.family).items() if len({r.n for r in some}) > 1][:MAX_PANELS]
    passes = [p for p in ("forward", "backward", "total") if any(row.cell.pass_ == p for row in rows)]
    if not families:
        return None
    looks, wanted = look(rows), [(family, pass_) for family in families for pass_ in passes]
    figure, grid = panels(len(families), len(passes), 3.9, 3.1)
    for (family, pass_), axes in zip(wanted, grid, strict=True):
        curves(axes, [row for row in rows if row.family == family and row.cell.pass_ == pass_], looks)
        axes.set_title(plain(f"{family.label}, {pass_}, ms", 50))
    legend(figure, grid[0])
    return figure


def curves(axes: Axes, rows: list[model.Row], looks: dict[str, dict[str, Any]]) -> None:
    for name, some in grouped(rows, lambda row: row.cell.competitor).items():
        line = sorted((row.n or 0, row.median or 0.0) for row in some)
        axes.plot(*zip(*line, strict=True), linewidth=1.4, **looks[name])
    for some in grouped(rows, lambda row: row.cell.function).values():
        floor = sorted({row.n or 0: x for row in some if (x := row.of_audit("floor_ms"))}.items())
        if floor:
            axes.plot(*zip(*floor, strict=True), "--", color=SOFT, linewidth=1, label="floor")
    axes.set_xscale("log", base=2)
    lengths = sorted({row.n or 0 for row in rows})
    axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in lengths])
    logarithmic(axes, "y")
    axes.minorticks_off()


def roofline(report: model.Report, rows: list[model.Row]) -> Figure | None:
    rows = [row for row in rows if row.rate("flops") and row.rate("bytes")]
    run = report.results.runs[rows[0].cell.run_id] if rows else None
    ceilings = {k: x for k, v in run.ceilings.items() if (x := number(v))} if run else {}
    flops, size = ceilings.get("flops_measured"), ceilings.get("bytes_measured")
    if run is None or not flops or not size:
        return None
    scale, unit = report.flops_unit()
    figure, (axes,) = panels(1, 1, 8.6, 5.2)
    works = {row: float(row.cell.audit["flops"]) / float(row.cell.audit["bytes"]) for row in rows}
    for name, style in look(rows).items():
        some = [row for row in rows if row.cell.competitor == name]
        rates = [(row.rate("flops") or 0.0) / scale for row in some]
        axes.plot([works[row] for row in some], rates, linestyle="", **style)
    ends = [*works.values(), flops / size]
    hard = (ceilings.get("flops_hard"), ceilings.get("bytes_hard", size))
    for name, top, rate, dashes in (("limit", *hard, "-"), ("measured", flops, size, "--")):
        if top and rate:
            xs = [min(ends) / 3, top / rate, max(ends) * 3]
            label = f"{name}: {model.digits(top / scale, 3)} {unit}, {model.digits(rate / 1e9, 3)} GB/s"
            axes.plot(xs, [min(top, x * rate) / scale for x in xs], dashes, color=INK, linewidth=1.2, label=label)
    logarithmic(axes, "xy")
    axes.set_xlabel("FLOP per byte, at the floor")
    axes.set_title(plain(f"{run.environment.get('device', '')}, {rows[0].cell.suite}: {unit}", 70))
    legend(figure, axes)
    return figure


def memory(report: model.Report, rows: list[model.Row]) -> Figure | None:
    rows = [row for row in rows if row.size() is not None]
    pass_ = pass_of(rows, "total", "backward", "forward")
    families = list(grouped(rows, lambda row: row.family).values())[:MAX_PANELS]
    if not families:
        return None
    figure, grid = panels(len(families), 1, 7.1, 1.3 + 0.24 * len(look(rows)))
    for some, axes in zip(families, grid, strict=True):
        longest = max(row.n or 0 for row in some)
        stacks(axes, [row for row in some if (row.n or 0) == longest and row.cell.pass_ == pass_])
        axes.set_title(plain(f"{some[0].family.label} · N {longest:,}, {pass_}", 60))
    legend(figure, grid[0])
    return figure


def stacks(axes: Axes, rows: list[model.Row]) -> None:
    left, places = [0.0] * len(rows), range(len(rows))
    for part, colour in PARTS.items():
        sizes = [(row.size(part) or 0.0) / 2**30 for row in rows]
        axes.barh(places, sizes, left=left, color=colour, label=part.replace("_", " "), height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    floors = [(row.size("peak", "floor") or 0.0) / 2**30 for row in rows]
    axes.vlines(floors, [i - 0.42 for i in places], [i + 0.42 for i in places], color=INK)
    axes.set_yticks(places, [plain(row.cell.competitor, 24) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GiB; the line is the floor")
