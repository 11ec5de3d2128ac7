"""Writes docs/performance.md and its figures from results/h200; with --check, fails if they are out of date.

A figure depends on the results and on matplotlib's version, so --check compares the digest of the results that is
written into it. Its background is transparent, and its text follows the reader's colour scheme.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "h200"
PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "figures"
AUTO = "fulmen auto"
PASSES = {"forward": "forward", "backward": "backward", "total": "forward + backward"}
INK, DARK_INK, LINE = "#24292f", "#e6edf3", "#8b949e"  # text on a light and on a dark page; lines on both
STYLE = f'<style>@media (prefers-color-scheme: dark) {{ [style*="{INK}"] {{ fill: {DARK_INK} !important }} }}</style>'
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "fulmen", "font.size": 9, "axes.titlesize": 10, "text.color": INK,
    "axes.labelcolor": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.edgecolor": LINE,
    "xtick.color": LINE, "ytick.color": LINE, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
SOFTMAX = {"fulmen auto": ("fulmen", "#0072B2"), "flash-attn-4": ("FA4", "#009E73"), "sdpa-cudnn": ("cuDNN", "#E69F00")}
LIGHTNING = {
    "fulmen, D 64": ("fulmen auto", 64, "#0072B2"),
    "fulmen, D 128": ("fulmen auto", 128, "#009E73"),
    "cuDNN causal softmax, D 64": ("sdpa-cudnn", 64, "#E69F00"),
}

Cell = dict[str, Any]


@functools.cache
def read(suite: str) -> tuple[Cell, list[Cell]]:
    """The run and the cells with a time of a results file."""
    with gzip.open(RESULTS / f"{suite}.jsonl.gz", "rt", encoding="utf-8") as lines:
        run, *others = map(json.loads, lines)
    cells = [cell for cell in others if cell["kind"] == "cell"]  # a file may hold several runs
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
    names = ["\n".join([f"{N // 1024}k", str(D), *["GQA"] * (H_KV < H)]) for D, N, H_KV, H, _ in cases]
    axes.set_xticks(range(len(cases)), names)
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


def decoding(axes: Axes, cells: list[Cell]) -> None:
    """Microseconds of one query over a growing cache, H 32, H_KV 8, D 128."""
    for name, (label, colour) in {
        AUTO: ("fulmen", "#0072B2"),
        "sdpa-cudnn": ("cuDNN", "#E69F00"),
        "sdpa-fa2": ("FA2", LINE),
    }.items():
        wanted = (name, 1, 1, 32, 8, 128)
        points = sorted(
            (c["case"]["N"], microseconds({}, c))
            for c in cells
            if c["op"] == "flash"
            and (c["competitor"], *(c["case"][n] for n in ("B", "N_Q", "H", "H_KV", "D"))) == wanted
        )
        axes.plot(*zip(*points, strict=True), color=colour, label=label, marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("keys")
    axes.set_title("decoding, one query, H 32, H_KV 8, D 128: us")
    axes.legend(frameon=False, fontsize=8)


def layers(axes: Axes, cells: list[Cell]) -> None:
    """How many times as fast as `nn.Linear` and torch SDPA, forward and backward together."""
    of = {(c["competitor"], label(c)): c["stats"]["median"] for c in cells if c["pass_"] == "total"}
    cases = [case for competitor, case in of if competitor == AUTO and ("sdpa-layer", case) in of]
    axes.barh(cases, [of["sdpa-layer", case] / of[AUTO, case] for case in cases], color="#0072B2")
    axes.axvline(1, color=LINE, linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.set_title("layers, forward + backward: times as fast as nn.Linear + SDPA")


# ----------------------------------------------------------------------------------------------------------- tables


class Suite(NamedTuple):
    """A results file as a section of the page."""

    name: str
    title: str
    text: str
    rivals: dict[str, str]  # competitor, and how it is called on the page; the first is the baseline
    unit: str
    value: Callable[[Cell, Cell], float]  # of a run and one of its cells
    passes: tuple[str, ...] = ("forward", "backward")
    ops: tuple[str, ...] = ()  # those of the file that the section shows; all unless given


def tflops(run: Cell, cell: Cell) -> float:
    return float(cell["audit"]["flops"] / cell["stats"]["median"] / 1e9)


def share_of_copy(run: Cell, cell: Cell) -> float:
    return float(cell["audit"]["bytes"] / cell["stats"]["median"] * 1e5 / run["ceilings"]["bytes_measured"])


def share_on_device(run: Cell, cell: Cell) -> float:
    return float(cell["audit"]["bytes"] / cell["device_ms"] * 1e5 / run["ceilings"]["bytes_measured"])


def tokens_a_second(run: Cell, cell: Cell) -> float:
    return float(cell["case"]["B"] * cell["case"]["N"] / cell["stats"]["median"] * 1e3)


def milliseconds(run: Cell, cell: Cell) -> float:
    return float(cell["stats"]["median"])


def microseconds(run: Cell, cell: Cell) -> float:
    return 1e3 * float(cell["device_ms"] or cell["stats"]["median"])


LAYER_STEPS = {f"layer_step_{layer}": layer for layer in ("lightning", "gqa", "mla")}
SUITES = (
    Suite(
        "flash", "Softmax attention", "bf16, training shapes. FLOP of the causal half only are counted in causal rows.",
        {"sdpa-cudnn": "cuDNN", "flash-attn-4": "FlashAttention-4"}, "TFLOP/s", tflops,
    ),
    Suite(
        "lightning", "Lightning attention",
        "bf16. The unit is the share of a device copy's bandwidth, over the bytes that must move. Softmax attention is "
        "another function; it stands here for scale, in the same bytes.",
        {"sdpa-cudnn": "cuDNN causal softmax", "fulmen triton": "`triton`"}, "% of copy", share_of_copy,
    ),
    Suite(
        "lightning-tokens", "A decay for each token",
        "bf16. Backward passes make the gradient of a token's decay, too; heads of v share the q and k of a group. "
        "The unit is the share of a device copy's bandwidth, over the bytes that must move.",
        {"fulmen triton": "`triton`"}, "% of copy", share_of_copy,
    ),
    Suite(
        "decode", "Decoding", "bf16, without gradients. Replays of a CUDA graph, so the host does not count.",
        {"sdpa-cudnn": "cuDNN", "sdpa-fa2": "FlashAttention-2", "fulmen triton": "`triton`"}, "us", microseconds,
        ("forward",), ("flash",),
    ),
    Suite(
        "decode", "Decoding with lengths, pages and states",
        "bf16. `flash_attention` over a cache with lengths on the device, contiguous and in pages; `latent_attention`; "
        "`lightning_step`. The unit is the share of a device copy's bandwidth, over the bytes that must move.",
        {"fulmen triton": "`triton`"}, "% of copy", share_on_device, ("forward",), ("flash_cache", "latent", "step"),
    ),
    Suite(
        "decode", "A layer's step",
        "bf16, dim 4096, one token of each sequence, pools with pages of 64. Replays of a CUDA graph. The unit is the "
        "share of a device copy's bandwidth, over weights, caches and states.",
        {"fulmen triton": "`triton`"}, "% of copy", share_on_device, ("forward",), tuple(LAYER_STEPS),
    ),
    Suite(
        "flash-small", "Short sequences",
        "Without gradients. Replays of a CUDA graph between two events, which take 2.4 us by themselves.",
        {"sdpa-fa2": "FlashAttention-2", "sdpa-cudnn": "cuDNN", "fulmen triton": "`triton`"}, "us", microseconds,
        ("forward",),
    ),
    Suite(
        "layers", "Layers",
        "bf16, causal. The baseline is `nn.Linear` projections with torch SDPA; beside it the layer's own matrix "
        "products and attention kernel alone.",
        {"sdpa-layer": "nn.Linear + SDPA", "layer-parts": "products and kernel"}, "ms", milliseconds,
        ("forward", "total"),
    ),
    Suite(
        "train", "A training step",
        "bf16: forward, backward and AdamW of 8 blocks with 559 million parameters, 7 with lightning and one with "
        "grouped-query attention. The baseline has softmax attention in every block, and torch's operations.",
        {"sdpa-stack": "torch, softmax only"}, "tokens/s", tokens_a_second, ("total",),
    ),
)  # fmt: skip


def label(cell: Cell) -> str:
    """A case in the order of the sizes: B H/H_KV N D, and options."""
    case = cell["case"]
    heads = f"{case['H']}/{case['H_KV']}" if case["H_KV"] != case["H"] else str(case["H"])
    length = f"{case['N_Q']} x {case['N']}" if "N_Q" in case else str(case["N"])
    E = case.get("E", case["D"])
    dims = str(case["D"]) if case["D"] == E else f"{case['D']}/{E}"
    words = [name for name in (case.get("layer"), LAYER_STEPS.get(cell["op"])) if name]
    if cell["op"] in ("step", "latent"):
        words.append(f"{cell['op']}, {case['state_dtype']} states" if cell["op"] == "step" else "latent")
    elif cell["op"] == "flash_cache":
        words.append(f"pages of {case['page']}" if case["page"] else "lengths")
    elif cell["op"] == "train":
        words.append("compiled" if case["compiled"] else "eager")
    elif "decay" in case:
        words.append("decay of tokens" if case.get("per_token") else "decay" if case["decay"] else "no decay")
        words += [f"groups {case['groups']}"] if case.get("groups") else []
    elif cell["op"] == "flash" and "N_Q" not in case:
        words.append("causal" if case["causal"] else "full")
    if case["dtype"] != "bfloat16":
        words.append(case["dtype"])
    return " ".join([f"B{case['B']} H{heads} N{length} D{dims}", *words])


def digits(x: float) -> str:
    return f"{x:.0f}" if x >= 99.5 else f"{x:.3g}"


def table(head: list[str], lines: list[list[str]]) -> str:
    rule = "|".join(["---", *["--:"] * (len(head) - 1)])
    return "\n".join(["| " + " | ".join(head) + " |", f"|{rule}|", *("| " + " | ".join(line) + " |" for line in lines)])


def found(suite: Suite, pass_: str) -> tuple[Cell, list[tuple[str, dict[str, Cell]]]]:
    """The run, and for each case of `auto` the cells by competitor."""
    run, cells = read(suite.name)
    cases: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if cell["pass_"] == pass_ and (not suite.ops or cell["op"] in suite.ops):
            cases.setdefault(label(cell), {})[cell["competitor"]] = cell
    return run, [(case, of) for case, of in cases.items() if AUTO in of]


def gain(suite: Suite, run: Cell, of: dict[str, Cell], rival: str) -> float | None:
    """How many times as fast as a rival `auto` is."""
    if rival not in of:
        return None
    mine, theirs = (suite.value(run, of[name]) for name in (AUTO, rival))
    return theirs / mine if suite.unit in ("us", "ms") else mine / theirs


def rows(suite: Suite, pass_: str) -> Iterator[list[str]]:
    """The lines of a table."""
    run, cases = found(suite, pass_)
    for case, of in cases:
        speeds = [digits(suite.value(run, of[name])) if name in of else "" for name in (AUTO, *suite.rivals)]
        times = gain(suite, run, of, next(iter(suite.rivals)))
        yield [case, *speeds, "" if times is None else f"{times:.2f}"]


def summary() -> Iterator[list[str]]:
    """For each suite and pass the first rival; of others those that are not ours."""
    for suite, pass_ in [(one, pass_) for one in SUITES for pass_ in one.passes]:
        run, cases = found(suite, pass_)
        for i, (rival, name) in enumerate(suite.rivals.items()):
            gains = [x for _, of in cases if (x := gain(suite, run, of, rival)) is not None]
            if (i and rival.startswith("fulmen")) or not gains:
                continue
            mean = math.exp(sum(map(math.log, gains)) / len(gains))
            spread = f"{min(gains):.2f} to {max(gains):.2f}"
            yield [suite.title, PASSES[pass_], name, f"{mean:.2f}", spread, str(len(gains))]


def environment() -> str:
    lines = []
    for suite in {suite.name: suite for suite in SUITES}.values():
        run = read(suite.name)[0]
        facts = run["environment"]
        versions = f"torch {facts['torch']}, cuDNN {facts['cudnn']}, Triton {facts['triton']}, driver {facts['driver']}"
        copy, product = run["ceilings"]["bytes_measured"] / 1e9, run["ceilings"]["flops_measured_bf16"] / 1e12
        file = f"`{suite.name}.jsonl.gz`"
        lines.append([file, facts["device"], versions, f"{copy:.0f} GB/s", f"{product:.0f} TFLOP/s", run["time"][:10]])
    return table(["file", "GPU", "versions", "copy", "bf16 product", "measured"], lines)


def render() -> str:
    blocks = [
        "# Performance",
        "Made by `tools/performance.py` from `results/h200`; `make check` compares. Every kernel was compared with "
        "fp64 before it was timed. `results/h200/report/report.html` has every sample, memory and the cases without a "
        "number.",
        "![Softmax attention in TFLOP/s, and lightning attention in % of copy bandwidth](figures/speed.svg)",
        "## Summary",
        'How many times as fast as the baseline `backend="auto"` is: geometric mean and range over a suite. '
        "For lightning attention the baseline is another function, causal softmax attention.",
        table(["", "pass", "baseline", "times as fast", "range", "cases"], list(summary())),
    ]
    for suite in SUITES:
        blocks += [f"## {suite.title}", suite.text]
        if suite.title in ("Decoding", "Layers"):
            blocks.append(f"![{suite.title}](figures/{suite.name}.svg)")
        for pass_ in suite.passes:
            names = [f"`auto`, {suite.unit}", *suite.rivals.values(), "times as fast"]
            blocks += [f"**{PASSES[pass_]}**", table(["case", *names], list(rows(suite, pass_)))]
    commands = [f"fulmen bench run {name} --out {name}.jsonl" for name in {s.name: s for s in SUITES}]
    commands.append("fulmen bench report *.jsonl")
    blocks += [
        "## Method",
        "Competitors of a case are interleaved, in a new order each round. L2 is overwritten before each sample. "
        "A time is the median. Results of timed calls are checked again with other values. "
        "[Benchmarking](bench.md#the-protocol) has the protocol.",
        "Only this GPU was measured. `auto` goes by these measurements on Hopper; elsewhere torch's softmax kernels "
        "come first.",
        "## To measure it again",
        "\n".join(["```", *commands, "```"]),
        "## Environment",
        environment(),
    ]
    return "\n\n".join(blocks) + "\n"


# ---------------------------------------------------------------------------------------------------------- figures


def digest(*suites: str) -> str:
    """Of the results that a figure shows, as a comment in it."""
    results = b"".join((RESULTS / f"{suite}.jsonl.gz").read_bytes() for suite in suites)
    return f"<!-- results {hashlib.sha256(results).hexdigest()[:16]} -->"


def speed(figure: Figure) -> None:
    left, middle, right = figure.subplots(1, 3)
    _, cells = read("flash")
    softmax(left, cells, causal=True)
    softmax(middle, cells, causal=False)
    lightning(right, *read("lightning"))


FIGURE_OF = {  # file: the suites it shows, its size, and who draws it
    "speed": (("flash", "lightning"), (12, 3.3), speed),
    "decode": (("decode",), (6, 3), lambda figure: decoding(figure.subplots(), read("decode")[1])),
    "layers": (("layers",), (8, 3.6), lambda figure: layers(figure.subplots(), read("layers")[1])),
}


def draw() -> None:
    for name, (suites, size, paint) in FIGURE_OF.items():
        with matplotlib.rc_context(SETTINGS):
            figure = Figure(figsize=size, layout="constrained")
            paint(figure)
            path = FIGURES / f"{name}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        text = path.read_text("utf-8").replace("<defs>", f"{STYLE}\n <defs>", 1)
        path.write_text(f"{text}{digest(*suites)}\n", "utf-8")


def out_of_date() -> list[Path]:
    figures = {FIGURES / f"{name}.svg": digest(*suites) for name, (suites, _, _) in FIGURE_OF.items()}
    old = [path for path, mark in figures.items() if not path.exists() or mark not in path.read_text("utf-8")]
    return old if PAGE.exists() and PAGE.read_text("utf-8") == render() else [*old, PAGE]


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(render(), "utf-8")
        draw()
        return 0
    old = out_of_date()
    for path in old:
        print(f"{path.relative_to(ROOT)} is out of date: run tools/performance.py and commit the difference")
    return bool(old)


if __name__ == "__main__":
    sys.exit(main())
