"""What a run shows: a table that grows and a bar with the time that is left; plain lines where nobody watches."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fulmen.bench import schema
from fulmen.bench.group import Group as Measured
from fulmen.bench.runner import Watcher, device_words

ROWS = 18  # of the live table; all of them are in the file
COLOURS = {"ok": "green", "failed": "bold red", "withheld": "bold red", "oom": "yellow", "timeout": "yellow"}
QUIET = ("ANOTHER-FUNCTION", "UNAUDITED")  # said elsewhere


def case_words(case: dict[str, Any]) -> str:
    """B4 H32 N1024 D64 bf16 causal decay."""
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    words = []
    for key, value in case.items():
        if (key == "H_KV" and value == case.get("H")) or (key == "E" and value == case.get("D")):
            continue
        if key == "dtype":
            words.append(short.get(str(value), str(value)))
        elif isinstance(value, bool):
            words.append(key if value else f"no {key}")
        else:
            words.append(f"{key}{value}" if isinstance(value, int) else f"{key}={value}")
    return " ".join(words)


def ms_words(ms: float) -> str:
    return f"{ms:.{max(0, 3 - max(0, math.ceil(math.log10(ms))))}f}" if ms >= 1 else f"{ms:.3g}" if ms > 0 else "0"


def time_words(cell: schema.Cell) -> str:
    if cell.status != "ok" or cell.median_ms is None:
        return "-"
    half = (cell.stats["high"] - cell.stats["low"]) / 2 / cell.median_ms
    return f"{ms_words(cell.median_ms)} ±{half:.1%}"


def verdict(cell: schema.Cell) -> str:
    """The status, or what there is to say about the number."""
    if cell.status != "ok":
        return f"[{COLOURS.get(cell.status, 'dim')}]{cell.status}[/] {escape(cell.reason)}"
    flags = [flag for flag in cell.flags() if flag not in QUIET]
    efficiency = cell.audit.get("efficiency")
    share = f" {efficiency:.0%} of the ceiling" if isinstance(efficiency, float) else ""
    other = " [dim]another function[/]" if "ANOTHER-FUNCTION" in cell.flags() else ""
    return f"[green]ok[/]{share}" + (f" [yellow]{escape(' '.join(flags))}[/]" if flags else "") + other


class Screen(Watcher):
    """The live table on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.recent: list[schema.Cell] = []
        self.counts: dict[str, int] = {}
        self.now = ""
        self.words = ""
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"), console=console,
        )  # fmt: skip
        self.task = self.progress.add_task("cells", total=None, left="")
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self.live.stop()
        if self.counts:
            self.console.print(", ".join(f"{n} {status}" for status, n in sorted(self.counts.items())))

    def render(self) -> RenderableType:
        table = Table(expand=True)
        columns = (
            ("case", "", 20),
            ("competitor", "cyan", 12),
            ("pass", "", 8),
            ("ms", "bold", 11),
            ("verdict", "", 10),
        )
        for column, style, width in columns:
            justify: Any = "right" if column == "ms" else "left"
            table.add_column(column, style=style, justify=justify, overflow="ellipsis", no_wrap=True, min_width=width)
        for cell in self.recent[-ROWS:]:
            pass_ = cell.pass_ if cell.cache == "cold" else f"{cell.pass_}, hot"
            row = (case_words(cell.case), escape(cell.competitor), pass_, time_words(cell), verdict(cell))
            table.add_row(*row)
        return Group(table, f"[dim]{escape(self.now)}  {escape(self.words)}[/]", self.progress)

    def begin(self, run: schema.Run, cells: int, skipped: int) -> None:
        again = f", {skipped} were measured before" if skipped else ""
        self.console.print(f"{escape(device_words(run))}: {cells} cells to measure{again}")
        others = run.environment.get("other_processes")
        if others:
            self.console.print(f"[yellow]{others} other processes compute on this GPU: times will be too long[/]")
        if run.environment.get("kind") == "cpu" and run.environment.get("load", 0) > 1.5 * run.environment["threads"]:
            self.console.print("[yellow]other processes keep this CPU busy: times will be too long[/]")
        self.progress.update(self.task, total=cells)

    def group(self, case: dict[str, Any], suite: str) -> None:
        self.now, self.words = f"{suite}: {case_words(case)}", ""

    def say(self, text: str) -> None:
        self.words = text

    def sampled(self, group: Measured) -> None:
        left = sum(not task.stop for task in group.tasks)
        self.words = f"round {group.round}, {left} of {len(group.tasks)} still sampling"

    def cell(self, cell: schema.Cell) -> None:
        self.recent.append(cell)
        self.counts[cell.status] = self.counts.get(cell.status, 0) + 1
        self.progress.advance(self.task)
        task = self.progress.tasks[0]
        if task.total and task.elapsed:  # cells come in bursts, a group at a time: only the whole says how fast
            seconds = round(task.elapsed * (task.total - task.completed) / task.completed)
            self.progress.update(self.task, left=f"about {seconds // 60}:{seconds % 60:02d} left")
        if not self.console.is_terminal:
            cache = "" if cell.cache == "cold" else " hot"
            what = f"{cell.suite}  {case_words(cell.case)}  {cell.competitor}  {cell.pass_}{cache}"
            self.console.print(f"{escape(what)}  {time_words(cell)}  {verdict(cell)}", soft_wrap=True)
