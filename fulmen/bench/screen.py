"""What a run shows: a table that grows and a bar with the time that is left; plain lines where nobody watches."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fulmen.bench import schema
from fulmen.bench.cases import DTYPES
from fulmen.bench.group import Group as Measured
from fulmen.bench.runner import Monitor

ROWS = 18  # of the live table; all of them are in the file
COLUMNS = (("case", "", 20), ("competitor", "cyan", 12), ("pass", "", 8), ("ms", "bold", 11), ("verdict", "", 10))
COLOURS = {"ok": "green", "failed": "bold red", "withheld": "bold red", "oom": "yellow", "timeout": "yellow"}
QUIET = ("ANOTHER-FUNCTION", "UNAUDITED")  # said elsewhere
SHORT = {long: short for short, long in DTYPES.items()}


def case_words(case: dict[str, Any]) -> str:
    """B4 H32 N1024 D64 bf16 causal decay."""
    words = []
    for key, value in case.items():
        if value == case.get({"H_KV": "H", "E": "D"}.get(key, "")):
            continue
        if key == "dtype":
            words.append(SHORT.get(value, str(value)))
        elif isinstance(value, bool):
            words.append(key if value else f"no {key}")
        else:
            words.append(f"{key}{value}" if isinstance(value, int) else f"{key}={value}")
    return " ".join(words)


def ms_words(ms: float) -> str:
    return f"{ms:.{max(0, 3 - max(0, math.ceil(math.log10(ms))))}f}" if ms >= 1 else f"{ms:.3g}" if ms > 0 else "0"


def row_of(cell: schema.Cell) -> tuple[str, str, str, str, str]:
    """The words of `COLUMNS`; the verdict is the status, or what there is to say about the number."""
    pass_ = cell.pass_ if cell.cache == "cold" else f"{cell.pass_}, hot"
    what = (case_words(cell.case), escape(cell.competitor), pass_)
    if cell.status != "ok" or cell.median_ms is None:
        return (*what, "-", f"[{COLOURS.get(cell.status, 'dim')}]{cell.status}[/] {escape(cell.reason)}")
    half = (cell.stats["high"] - cell.stats["low"]) / 2 / cell.median_ms
    flags = " ".join(flag for flag in cell.flags() if flag not in QUIET)
    share = cell.audit.get("efficiency")
    verdict = "[green]ok[/]" + (f" {share:.0%} of the ceiling" if isinstance(share, float) else "")
    verdict += f" [yellow]{escape(flags)}[/]" if flags else ""
    verdict += " [dim]another function[/]" if "ANOTHER-FUNCTION" in cell.flags() else ""
    return (*what, f"{ms_words(cell.median_ms)} ±{half:.1%}", verdict)


class Screen(Monitor):
    """The live table on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.recent: list[schema.Cell] = []
        self.counts: Counter[str] = Counter()
        self.now = self.words = ""
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
        for column, style, width in COLUMNS:
            justify: Any = "right" if column == "ms" else "left"
            table.add_column(column, style=style, justify=justify, overflow="ellipsis", no_wrap=True, min_width=width)
        for cell in self.recent[-ROWS:]:
            table.add_row(*row_of(cell))
        return Group(table, f"[dim]{escape(self.now)}  {escape(self.words)}[/]", self.progress)

    def begin(self, run: schema.Run, cells: int, skipped: int) -> None:
        known = run.environment
        threads = f", {known['threads']} threads" if known.get("kind") == "cpu" else ""
        again = f", {skipped} were measured before" if skipped else ""
        where = f"{known['device']}, torch {known['torch']}{threads}"
        self.console.print(f"{escape(where)}: {cells} cells to measure{again}")
        if others := known.get("other_processes"):
            self.console.print(f"[yellow]{others} other processes compute on this GPU: times will be too long[/]")
        if known.get("kind") == "cpu" and known.get("load", 0) > 1.5 * known["threads"]:
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
        self.counts[cell.status] += 1
        self.progress.advance(self.task)
        task = self.progress.tasks[0]
        if task.total and task.elapsed:  # cells come in bursts, a group at a time: only the whole says how fast
            seconds = round(task.elapsed * (task.total - task.completed) / task.completed)
            self.progress.update(self.task, left=f"about {seconds // 60}:{seconds % 60:02d} left")
        if not self.console.is_terminal:
            self.console.print("  ".join((cell.suite, *row_of(cell))), soft_wrap=True)
