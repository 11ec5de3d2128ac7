"""Draws docs/figures/speed.svg, the figure of the README, from the results of the suites `flash` and `lightning`.

The file depends on nothing but the results and the version of matplotlib. Its background is transparent, and its text
follows the reader's colour scheme.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
INK, DARK_INK, LINE = "#24292f", "#e6edf3", "#8b949e"  # text on a light and on a dark page; lines on both
STYLE = f'<style>@media (prefers-color-scheme: dark) {{ [style*="{INK}"] {{ fill: {DARK_INK} !important }} }}</style>'
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "fulmen", "font.size": 9, "axes.titlesize": 10, "text.color": INK,
    "axes.labelcolor": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.edgecolor": LINE,
    "xtick.color": LINE, "ytick.color": LINE, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
SOFTMAX = {"fulmen auto": ("fulmen", "#0072B2"), "sdpa-cudnn": ("cuDNN", "#E69F00"), "sdpa-fa2": ("FA2", LINE)}
LIGHTNING = {
    "fulmen, D 64": ("fulmen auto", 64, "#0072B2"),
    "fulmen, D 128": ("fulmen auto", 128, "#009E73"),
    "cuDNN causal softmax, D 64": ("sdpa-cudnn", 64, "#E69F00"),
}

Cell = dict[str, Any]


def read(suite: str) -> tuple[Cell, list[Cell]]:
    """The run and the cells with a time of a results file."""
    with gzip.open(ROOT / "results" / "h200" / f"{suite}.jsonl.gz", "rt", encoding="utf-8") as lines:
        run, *cells = map(json.loads, lines)
    return run, [cell for cell in cells if cell["status"] == "ok" and cell["cache"] == "cold"]


def case_of(cell: Cell) -> tuple[int, ...]:
    return tuple(cell["case"][name] for name in ("D", "N", "H_KV", "H", "B"))


def softmax(axes: Axes, cells: list[Cell], causal: bool) -> None:
    """TFLOP/s of the forward, a group of bars for each case."""
    cells = [cell for cell in cells if cell["pass_"] == "forward" and cell["case"]["causal"] == causal]
    cases = sorted(set(map(case_of, cells)))
    for i, (competitor, (label, colour)) in enumerate(SOFTMAX.items()):
        of = {case_of(cell): cell for cell in cells if cell["competitor"] == competitor}
        speeds = [of[case]["audit"]["flops"] / of[case]["stats"]["median"] / 1e9 for case in cases]
        axes.bar([at + 0.27 * (i - 1) for at in range(len(cases))], speeds, 0.25, color=colour, label=label)
    axes.set_xticks(range(len(cases)), [f"{N}\n{D}{' GQA' * (H_KV < H)}" for D, N, H_KV, H, _ in cases])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 800)
    axes.set_xlabel("N and head dim")
    axes.set_title(f"softmax forward, {'causal' if causal else 'full'}: TFLOP/s")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def lightning(axes: Axes, run: Cell, cells: list[Cell]) -> None:
    """The share of a copy's bandwidth over the least traffic; beside it softmax attention, another function."""
    for name, (competitor, D, colour) in LIGHTNING.items():
        for pass_, line in (("forward", "-"), ("backward", "--")):
            wanted = (competitor, D, pass_, True)
            points = sorted(
                (c["case"]["N"], c["audit"]["bytes"] / c["stats"]["median"] * 1e5 / run["ceilings"]["bytes_measured"])
                for c in cells
                if (c["competitor"], c["case"]["D"], c["pass_"], c["case"]["decay"]) == wanted
            )
            label = name if pass_ == "forward" else None
            axes.plot(*zip(*points, strict=True), line, color=colour, label=label, marker="o", markersize=3)
    axes.plot([], [], "--", color=LINE, label="dashed: backward")
    axes.set_xscale("log", base=2)
    axes.set_xticks([2**i for i in range(10, 16)], [str(2**i) for i in range(10, 16)])
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_xlabel("N")
    axes.set_title("lightning, with decay: % of copy bandwidth")
    axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.33))


def main() -> None:
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(12, 3.3), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        _, cells = read("flash")
        softmax(left, cells, causal=True)
        softmax(middle, cells, causal=False)
        lightning(right, *read("lightning"))
        path = ROOT / "docs" / "figures" / "speed.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        path.write_text(path.read_text("utf-8").replace("<defs>", f"{STYLE}\n <defs>", 1), "utf-8")


if __name__ == "__main__":
    main()
