"""What a run shows: a line for each cell and, on a terminal, a bar with what is being done and the time left."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.table import Column

from fulmen.bench import schema
from fulmen.bench.audit import ms
from fulmen.bench.group import Group
from fulmen.bench.runner import Monitor

COLOURS = {"ok": "green", "failed": "bold red", "withheld": "bold red", "oom": "yellow", "timeout": "yellow"}


def line_of(cell: schema.Cell) -> str:
    """What was measured, the time, and the status or what there is to say about the number."""
    pass_ = cell.pass_ if cell.cache == "cold" else f"{cell.pass_}, hot"
    case = escape(" ".join(schema.case_words(cell.case)))
    what = f"{cell.suite}  {case}  [cyan]{escape(cell.competitor)}[/]  {pass_}"
    if cell.status != "ok" or cell.median_ms is None:
        return f"{what}  [{COLOURS.get(cell.status, 'dim')}]{cell.status}[/] {escape(cell.reason)}"
    half = (cell.stats["high"] - cell.stats["low"]) / 2 / cell.median_ms
    share = cell.audit.get("efficiency")
    words = "[green]ok[/]" + (f" {share:.0%} of the ceiling" if isinstance(share, float) else "")
    flags = " ".join(flag for flag in cell.flags() if flag != "UNAUDITED")
    return f"{what}  [bold]{ms(cell.median_ms)}[/] ±{half:.1%}  {words} [yellow]{escape(flags)}[/]".rstrip()


class Screen(Monitor):
    """Prints to a console; the bar is gone when the run is over."""

    def __init__(self, console: Console) -> None:
        self.console, self.case = console, ""
        self.counts: Counter[str] = Counter()
        words = progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
        times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        self.progress = progress.Progress(
            progress.BarColumn(20), progress.MofNCompleteColumn(), *times, words,
            console=console, transient=True, expand=True, disable=not console.is_terminal,
            speed_estimate_period=math.inf,  # cells come in bursts, a group at a time: only the whole says how fast
        )  # fmt: skip
        self.task = self.progress.add_task("", total=None)

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()
        if self.counts:
            self.console.print(", ".join(f"{n} {status}" for status, n in sorted(self.counts.items())))

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
        self.case = f"{suite}: {' '.join(schema.case_words(case))}  "

    def say(self, text: str) -> None:
        self.progress.update(self.task, description=self.case + text)

    def sampled(self, group: Group) -> None:
        left = sum(not task.stop for task in group.tasks)
        self.say(f"round {group.round}, {left} of {len(group.tasks)} still sampling")

    def cell(self, cell: schema.Cell) -> None:
        self.counts[cell.status] += 1
        self.progress.advance(self.task)
        self.console.print(line_of(cell), soft_wrap=True)
