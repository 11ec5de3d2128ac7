"""`plots/*.png`: the charts of the page, for slides and for readers without a browser."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen.bench.report import model

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6F76", "#000000")  # Okabe and Ito
MARKERS = "os^Dvxp+"
PARTS = {"inputs": "#9da2a8", "output": "#bcc0c5", "gradients": "#d6d8db", "saved": "#D55E00",
         "workspace_forward": "#56B4E9", "workspace_backward": "#0072B2"}  # fmt: skip
SOFT = "#5a6068"
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titley": 1.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#c4c5c1", "axes.grid": True,
    "grid.color": "#e8e8e5", "legend.frameon": False, "legend.fontsize": 8, "savefig.dpi": 110,
    "text.parse_math": False, "font.family": "DejaVu Sans", "svg.hashsalt": "fulmen",
}  # fmt: skip
MAX_PANELS = 3  # families that one figure shows
MAX_LINES = 24  # cases that one heatmap shows


def draw(report: model.Report, folder: Path) -> list[Path]:
    """Draws what the results allow; names hold the suite's, made fit for a file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    kinds: tuple[tuple[str, Callable[[model.Report, str, Figure], bool]], ...] = (
        ("speedup", speedup), ("scaling", scaling), ("roofline", roofline), ("memory", memory),
    )  # fmt: skip
    written: list[Path] = []
    with matplotlib.rc_context(STYLE):
        for suite in report.suites:
            for kind, paint in kinds:
                figure = Figure()
                FigureCanvasAgg(figure)
                if not paint(report, suite, figure):
                    continue
                path = folder / f"{kind}-{slug(suite)}.png"
                for n in range(2, 1000):
                    if path not in written:
                        break
                    path = folder / f"{kind}-{slug(suite)}-{n}.png"
                figure.savefig(path, metadata={"Software": None})
                written.append(path)
    return written


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "suite"


def plain(text: str, most: int = 40) -> str:
    """What a font can draw, and no longer than a plot has room for."""
    text = "".join(c if c.isprintable() and ord(c) < 0x2500 else "?" for c in text)
    return text if len(text) <= most else text[: most - 1] + "…"


def wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(plain(name, 36), 13)) or "?"


def look(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {
        name: {"color": COLOURS[i % 8], "marker": MARKERS[(i + i // 8) % 8], "label": plain(name)}
        for i, name in enumerate(names)
    }


def cold(report: model.Report, suite: str) -> list[model.Row]:
    rows = [row for row in report.rows if row.cell.suite == suite and not row.replaced]
    return [row for row in rows if row.cell.cache == "cold"] or rows


def names_of(rows: Iterable[model.Row]) -> list[str]:
    return list(dict.fromkeys(row.cell.competitor for row in rows))


def panels(figure: Figure, rows: int, columns: int, size: tuple[float, float], **margins: float) -> list[list[Axes]]:
    """Axes of `size` inches each, with margins and gaps in inches: laid out without drawing everything twice."""
    m = {"left": 0.6, "right": 0.2, "top": 0.45, "bottom": 0.45, "across": 0.5, "down": 0.65} | margins
    width = m["left"] + columns * size[0] + (columns - 1) * m["across"] + m["right"]
    height = m["top"] + rows * size[1] + (rows - 1) * m["down"] + m["bottom"]
    figure.set_size_inches(width, height)
    figure.subplots_adjust(
        left=m["left"] / width, right=1 - m["right"] / width, top=1 - m["top"] / height, bottom=m["bottom"] / height,
        wspace=m["across"] / size[0], hspace=m["down"] / size[1],
    )  # fmt: skip
    return [list(line) for line in figure.subplots(rows, columns, squeeze=False)]


def legend(figure: Figure, axes: Axes) -> None:
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=4)


def tidy(axis: Axis) -> None:
    """Plain numbers at a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,g}"))


# ---------------------------------------------------------------------------------------------- kinds


def speedup(report: model.Report, suite: str, figure: Figure) -> bool:
    rows = cold(report, suite)
    base, names = model.baseline(rows), names_of(rows)
    pass_ = next((p for p in ("total", "forward", "backward") if any(row.cell.pass_ == p for row in rows)), "")
    some = [row for row in rows if row.cell.pass_ == pass_]
    keys = list(dict.fromkeys((row.family, row.n) for row in some))[:MAX_LINES]
    at = {(row.family, row.n, row.cell.competitor): row for row in some}
    if not base or len(names) < 2:
        return False
    labels = [plain(f"{f.label} · N {n:,}" if n else f.label, 48) for f, n in keys]
    left = 0.3 + 0.068 * max(map(len, labels))
    axes = panels(figure, 1, 1, (0.95 * len(names), 0.3 * len(keys)), left=left, bottom=0.6)[0][0]
    grid = [[math.nan] * len(names) for _ in keys]
    for i, (family, n) in enumerate(keys):
        for j, name in enumerate(names):
            row = at.get((family, n, name))
            gain = None if row is None else model.speedup(row, at.get((family, n, base)))
            label = "" if row is None else row.cell.status if not row.timed else model.digits(row.median, 3) + " ms"
            if gain is not None:
                grid[i][j] = math.log2(gain[0])
                label = f"{'▲' if row and row.flagged else ''}{model.digits(gain[0], 3)}×"
            dark = abs(grid[i][j]) > 2.2
            axes.text(j, i, label, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
    axes.imshow(grid, cmap=diverging(), vmin=-math.log2(10), vmax=math.log2(10), aspect="auto")
    axes.set_xticks(range(len(names)), [wrapped(name) for name in names], fontsize=8)
    axes.set_yticks(range(len(keys)), labels, fontsize=7.5)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_title(plain(f"{suite}, {pass_}: times as fast as {base}", 70))
    return True


def diverging() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    colours = ["#8a3c00", "#d55e00", "#f4c9a8", "#f1f1ee", "#a9cfe8", "#0072b2", "#00507d"]
    return LinearSegmentedColormap.from_list("slower-faster", colours)


def scaling(report: model.Report, suite: str, figure: Figure) -> bool:
    rows = [row for row in cold(report, suite) if row.timed and row.n]
    families = [f for f in report.families if len({row.n for row in rows if row.family == f}) > 1][:MAX_PANELS]
    passes = [p for p in ("forward", "backward", "total") if any(row.cell.pass_ == p for row in rows)]
    if not families or not passes:
        return False
    looks = look(names_of(rows))
    below = 0.75 + 0.2 * math.ceil(len(looks) / 4)
    grid = panels(figure, len(families), len(passes), (3.3, 2.4), bottom=below)
    for family, line in zip(families, grid, strict=True):
        for pass_, axes in zip(passes, line, strict=True):
            some = [row for row in rows if row.family == family and row.cell.pass_ == pass_]
            curves(axes, some, looks)
            axes.set_title(plain(f"{family.label}, {pass_}", 50), fontsize=8.5)
    for line in grid:
        line[0].set_ylabel("ms")
    legend(figure, grid[0][0])
    return True


def curves(axes: Axes, rows: list[model.Row], looks: dict[str, dict[str, Any]]) -> None:
    for name in names_of(rows):
        line = sorted((row.n or 0, row.median or 0.0) for row in rows if row.cell.competitor == name)
        axes.plot(*zip(*line, strict=True), markersize=4, linewidth=1.4, **looks[name])
    for function in dict.fromkeys(row.cell.function for row in rows):
        floor = {row.n or 0: x for row in rows if row.cell.function == function
                 if (x := model.number(row.cell.audit.get("floor_ms")))}  # fmt: skip
        if floor:
            axes.plot(sorted(floor), [floor[n] for n in sorted(floor)], "--", color=SOFT, linewidth=1, label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row.n or 0 for row in rows})
    axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in lengths], fontsize=7.5)
    axes.minorticks_off()
    tidy(axes.yaxis)


def roofline(report: model.Report, suite: str, figure: Figure) -> bool:
    rows = [row for row in cold(report, suite) if row.timed and row.rate("flops") and row.cell.audit.get("bytes")]
    run = report.results.runs[rows[0].cell.run_id] if rows else None
    ceilings = {} if run is None else {k: x for k, v in run.ceilings.items() if (x := model.number(v))}
    flops, size = ceilings.get("flops_measured"), ceilings.get("bytes_measured")
    hard, hard_size = ceilings.get("flops_hard", flops), ceilings.get("bytes_hard", size)
    if not rows or not flops or not size or not hard or not hard_size:
        return False
    below = 0.95 + 0.2 * math.ceil((len(names_of(rows)) + 2) / 4)
    axes = panels(figure, 1, 1, (7.6, 3.6), bottom=below)[0][0]
    low = high = flops / size
    for name, style in look(names_of(rows)).items():
        some = [row for row in rows if row.cell.competitor == name]
        xs = [float(row.cell.audit["flops"]) / float(row.cell.audit["bytes"]) for row in some]
        axes.plot(xs, [(row.rate("flops") or 0.0) / 1e12 for row in some], linestyle="", markersize=4.5, **style)
        low, high = min(low, *xs), max(high, *xs)
    low, high = low / 3, high * 3
    names = {"-": "limit", "--": "measured"}
    for top, rate, dashes in ((hard, hard_size, "-"), (flops, size, "--")):
        xs = [low, top / rate, high]
        axes.plot(xs, [min(top, x * rate) / 1e12 for x in xs], dashes, color="#1a1c1f", linewidth=1.2,
                  label=f"{names[dashes]}: {top / 1e12:,.0f} TFLOP/s, {rate / 1e12:.2f} TB/s")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    tidy(axes.xaxis)
    tidy(axes.yaxis)
    axes.set_xlabel("FLOP per byte, at the floor")
    axes.set_title(plain(f"{run.environment.get('device', '') if run else ''}, {suite}: TFLOP/s", 70))
    legend(figure, axes)
    return True


def memory(report: model.Report, suite: str, figure: Figure) -> bool:
    rows = [row for row in cold(report, suite) if row.peak is not None]
    pass_ = next((p for p in ("total", "backward", "forward") if any(row.cell.pass_ == p for row in rows)), "")
    longest: dict[model.Family, int] = {}
    for row in rows:
        longest[row.family] = max(longest.get(row.family, 0), row.n or 0)
    families = list(longest)[:MAX_PANELS]
    if not families:
        return False
    columns = min(2, len(families))
    tall = 0.4 + 0.24 * len(names_of(rows))
    grid = panels(
        figure, math.ceil(len(families) / columns), columns, (3.6, tall), left=1.8, across=1.9, bottom=1.05, down=0.9
    )
    flat = [axes for line in grid for axes in line]
    for axes in flat[len(families) :]:
        axes.set_visible(False)
    for family, axes in zip(families, flat, strict=False):
        some = [
            row for row in rows if row.family == family and (row.n or 0) == longest[family] and row.cell.pass_ == pass_
        ]
        stacks(axes, some)
        axes.set_title(plain(f"{family.label} · N {longest[family]:,}, {pass_}", 60), fontsize=8.5)
    legend(figure, flat[0])
    return True


def stacks(axes: Axes, rows: list[model.Row]) -> None:
    left = [0.0] * len(rows)
    for part, colour in PARTS.items():
        sizes = [(model.number(row.cell.memory.get(part, {}).get("bytes")) or 0.0) / 2**30 for row in rows]
        axes.barh(range(len(rows)), sizes, left=left, color=colour, label=part.replace("_", " "), height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    floors = [(model.number(row.cell.memory.get("peak", {}).get("floor")) or 0.0) / 2**30 for row in rows]
    axes.vlines(floors, [i - 0.42 for i in range(len(rows))], [i + 0.42 for i in range(len(rows))], color="#1a1c1f")
    axes.set_yticks(range(len(rows)), [plain(row.cell.competitor, 24) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB; the line is the floor", fontsize=8)
