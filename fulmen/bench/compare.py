"""Lightning attention against causal softmax attention, over the length of the sequence.

The two are different functions: a speedup here is what a model gains by choosing the linear one, not a
comparison of two implementations of one thing. What keeps the numbers honest:

    gate      output and gradients are compared with fp64 first; a wrong kernel gets no time
    inputs    q, k, v and dO are random and contiguous: zeros run faster, and ones hide indexing bugs
    rounds    competitors take turns, lengths too, in several sweeps: a disturbance of the machine hits all of
              them and no one alone; medians, all samples kept
    clock     on a GPU: events, with the L2 cache overwritten before every sample and the host ahead of the device
    scaling   the exponent of t ~ N^b comes with its 95 % confidence interval
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fulmen
from fulmen import decay, hardware
from fulmen.testing import lightning as testing

D = 64
TOKENS = (512, 1024, 2048, 4096, 8192)
PASSES = ("forward", "forward+backward")
SECONDS = 4.0  # sampling time of one length and pass
SWEEPS = 5  # each visits every length and pass
MAX_ROUNDS = 100
GATE_TOKENS = 333  # no multiple of any tile

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def batch_and_heads(device: torch.device) -> tuple[int, int]:
    """What fills the machine: with less, a GPU would be timed waiting for its host."""
    return (4, 32) if device.type == "cuda" else (1, 8)


class WrongResult(Exception):
    """The function under test does not compute lightning attention, so its speed means nothing."""


class Row(NamedTuple):
    """Every sample of one competitor at one length and pass."""

    tokens: int
    pass_: str
    competitor: str
    samples_ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.samples_ms) < 2:
            return math.nan
        low, _, high = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return (high - low) / 2 / self.median


class Exponent(NamedTuple):
    """b of t ~ N^b, with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Cell(NamedTuple):
    """One length and pass: each competitor's call, its samples so far, and the rounds that fit the time."""

    tokens: int
    pass_: str
    calls: dict[str, Callable[[], object]]
    samples_ms: dict[str, list[float]]
    round_seconds: float
    rounds: int

    def rows(self) -> list[Row]:
        return [Row(self.tokens, self.pass_, name, tuple(ms)) for name, ms in self.samples_ms.items() if ms]


# ------------------------------------------------------------------------------------------ competitors


def competitors(device: torch.device) -> dict[str, Attention]:
    slopes = decay.alibi(batch_and_heads(device)[1]).to(device)
    return {
        "lightning": lambda q, k, v: fulmen.lightning_attention(q, k, v, slopes),
        "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    }


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def make_inputs(tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, do: random, contiguous, the same for the same length; the first three ask for gradients."""
    x = testing.inputs(*batch_and_heads(device), tokens, D, dtype=dtype, device=device, seed=tokens)
    return x.q.requires_grad_(), x.k.requires_grad_(), x.v.requires_grad_(), x.do


def call(attend: Attention, pass_: str, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    q, k, v, do = inputs

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def forward_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v), (q, k, v), do)

    return forward if pass_ == "forward" else forward_backward


# ------------------------------------------------------------------------------------------ correctness


def gate(attend: Attention, device: torch.device, dtype: torch.dtype, tokens: int = GATE_TOKENS) -> float:
    """The largest relative error of o, dq, dk, dv against fp64, in the 2-norm.

    Raises WrongResult beyond the tolerance `fulmen.testing` derives: twice (gradients: three times) the error
    of the plain computation in the same dtype, plus one rounding.
    """

    def adapted(x: testing.Inputs) -> tuple[Tensor, Tensor]:
        o = attend(x.q, x.k, x.v)
        if not o.requires_grad:
            raise WrongResult("the output is cut off from q, k and v: there is no backward to time")
        return o, x.dstate

    B, H = batch_and_heads(device)
    x = testing.inputs(B, H, tokens, D, dtype=dtype, device=device, decay=decay.alibi(H).to(device))
    found = testing.evaluate(adapted, x, use=("o",))
    low, exact = testing.low_precision(x, use=("o",)), testing.reference(x, use=("o",))
    worst = 0.0
    for name in ("o", "dq", "dk", "dv"):
        actual, wanted = getattr(found, name), getattr(exact, name)
        factor = testing.FORWARD_FACTOR if name == "o" else testing.GRADIENT_FACTOR
        try:
            testing.assert_close(name, actual, getattr(low, name), wanted, factor)
        except AssertionError as error:
            raise WrongResult(str(error)) from None
        worst = max(worst, ((actual.double() - wanted).norm() / wanted.norm()).item())
    return worst


# ---------------------------------------------------------------------------------------------- timing


class Timer:
    """Milliseconds of one call, with cold caches on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.cache = torch.empty(2 * hardware.of(device).l2_bytes, dtype=torch.int8, device=device)
            self.start = torch.cuda.Event(enable_timing=True)
            self.end = torch.cuda.Event(enable_timing=True)

    def __call__(self, work: Callable[[], object]) -> float:
        if not self.cuda:
            begin = time.perf_counter()
            work()
            return (time.perf_counter() - begin) * 1e3
        self.cache.zero_()
        torch.cuda._sleep(4_000_000)  # about 2 ms, in which the host gets ahead: what is timed is the device
        self.start.record()
        work()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end)


def plan(tokens: int, pass_: str, attends: dict[str, Attention], inputs: tuple[Tensor, ...], seconds: float) -> Cell:
    """Warms both competitors up (compilation included) and counts the rounds that fit into `seconds`."""
    device = inputs[0].device
    calls = {name: call(attend, pass_, inputs) for name, attend in attends.items()}
    round_seconds = 0.0
    for work in calls.values():
        begin = time.perf_counter()
        for _ in range(20):
            last = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            if now - last > 1.0 or now - begin > seconds / 10:
                break
        round_seconds += now - last
    rounds = min(max(int(seconds / round_seconds), SWEEPS), MAX_ROUNDS)
    return Cell(tokens, pass_, calls, {name: [] for name in calls}, round_seconds, rounds)


def sample(cells: Sequence[Cell], device: torch.device, tick: Callable[[Cell], object] = lambda cell: None) -> None:
    """Fills `samples_ms` of the cells: SWEEPS times over all of them, a share of the rounds each time."""
    timer = Timer(device)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for sweep in range(SWEEPS):
            for cell in cells:
                for turn in range(cell.rounds * sweep // SWEEPS, cell.rounds * (sweep + 1) // SWEEPS):
                    names = list(cell.calls) if turn % 2 == 0 else list(cell.calls)[::-1]
                    for name in names:
                        cell.samples_ms[name].append(timer(cell.calls[name]))
                    tick(cell)
    finally:
        if collecting:
            gc.enable()


# --------------------------------------------------------------------------------------------- results


def fit_exponent(tokens: Sequence[int], times: Sequence[float]) -> Exponent:
    """Least squares of log t = a + b log N over at least three lengths."""
    from scipy import stats

    if len(set(tokens)) < 3:
        raise ValueError(f"an interval needs at least three lengths, got {sorted(set(tokens))}")
    fit = stats.linregress([math.log(n) for n in tokens], [math.log(t) for t in times])
    half = float(stats.t.ppf(0.975, len(tokens) - 2) * fit.stderr)
    return Exponent(float(fit.slope), float(fit.slope) - half, float(fit.slope) + half)


def environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    facts = hardware.of(device)
    return {
        "record": "environment",
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "device": platform.processor() or platform.machine() if device.type == "cpu" else facts.name,
        "arch": facts.arch,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "shape": dict(zip("BHD", (*batch_and_heads(device), D), strict=True)),
        "gate_tokens": GATE_TOKENS,
    }


def commit() -> str | None:
    """The commit this package lies in, "-dirty" appended where files differ from it; None outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def times_table(rows: Iterable[Row]) -> Table:
    by = {(row.tokens, row.pass_, row.competitor): row for row in rows}
    table = Table(
        title="milliseconds: lightning (linear) and causal SDPA (softmax) attention",
        caption="median ± half the interquartile range\nanother function: linear against softmax",
    )
    table.add_column("N", justify="right")
    for short in ("fwd", "fwd+bwd"):
        for column in ("lightning", "SDPA", "speedup"):
            table.add_column(f"{short}\n{column}", justify="right", no_wrap=True)
    for tokens in sorted({row[0] for row in by}):
        line = [str(tokens)]
        for pass_ in PASSES:
            ours, theirs = by.get((tokens, pass_, "lightning")), by.get((tokens, pass_, "sdpa"))
            if ours is None or theirs is None:
                line += ["-", "-", "-"]
            else:
                line += [_time(ours), _time(theirs), f"[bold]{theirs.median / ours.median:.2f}x[/]"]
        table.add_row(*line)
    return table


def _time(row: Row) -> str:
    digits = max(0, 2 - math.floor(math.log10(row.median)))
    spread = "" if math.isnan(row.spread) else f" [dim]±{row.spread:.0%}[/]"
    return f"{row.median:.{digits}f}{spread}"


def exponent_table(rows: Sequence[Row]) -> Table:
    table = Table(title="scaling, time ~ N^b: b (95 % interval)")
    for column in ("", *PASSES):
        table.add_column(column)
    for competitor in dict.fromkeys(row.competitor for row in rows):
        line = [competitor]
        for pass_ in PASSES:
            curve = [row for row in rows if (row.competitor, row.pass_) == (competitor, pass_)]
            if len({row.tokens for row in curve}) < 3:
                line.append("needs 3 lengths")
                continue
            fit = fit_exponent([row.tokens for row in curve], [row.median for row in curve])
            line.append(f"{fit.value:.2f}  ({fit.low:.2f} to {fit.high:.2f})")
        table.add_row(*line)
    return table


# ------------------------------------------------------------------------------------------ the whole run


def run(
    tokens: Sequence[int] = TOKENS,
    *,
    seconds: float = SECONDS,
    device: torch.device | None = None,
    attends: dict[str, Attention] | None = None,
    out: Path | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Gate, measure and print; raises WrongResult before any timing. Interrupted, it prints what is done.

    attends  functions by name; `lightning` is the one that is gated. None: `competitors(device)`.
    out      a JSON-lines file: one environment record, then one record per length, pass and competitor.
    """
    from scipy import stats  # noqa: F401  (missing it should show now, not after the measurement)

    device = device or default_device()
    dtype = default_dtype(device)
    attends = attends or competitors(device)
    console = console or Console()
    facts = environment(device, dtype)
    console.print(f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}")
    shape = " ".join(f"{name}={size}" for name, size in facts["shape"].items())
    console.print(f"{shape}, {facts['dtype']}")
    error = gate(attends["lightning"], device, dtype)
    console.print(f"lightning agrees with fp64 at N={GATE_TOKENS}: largest relative error {error:.1e}")
    cells: list[Cell] = []
    try:
        measure(cells, sorted(set(tokens)), seconds, attends, device, console)
    except KeyboardInterrupt:
        console.print("interrupted; this is what was measured until then:")
        raise
    finally:
        rows = [row for cell in cells for row in cell.rows()]
        if rows:
            console.print(times_table(rows), exponent_table(rows))
        if device.type == "cpu" and crowded():
            console.print("[yellow]other processes ran meanwhile: the times above are too long[/]")
        if out:
            write(out, facts, rows)
    return rows


def measure(
    cells: list[Cell],
    tokens: Sequence[int],
    seconds: float,
    attends: dict[str, Attention],
    device: torch.device,
    console: Console,
) -> None:
    """Appends the cells of all lengths to `cells` and samples them, with a progress display."""
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None)
        for n in tokens:
            inputs = make_inputs(n, device, default_dtype(device))
            for pass_ in PASSES:
                progress.update(task, description=f"warm-up, N={n}")
                cells.append(plan(n, pass_, attends, inputs, seconds))

        def tick(cell: Cell) -> None:
            progress.update(task, advance=cell.round_seconds, description=f"N={cell.tokens}, {cell.pass_}")

        progress.reset(task, total=sum(cell.rounds * cell.round_seconds for cell in cells))
        sample(cells, device, tick)


def crowded() -> bool:
    """Whether more threads wanted to run in the last minute than we have, on a machine that counts them."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > torch.get_num_threads() + 0.5


def write(path: Path, facts: dict[str, Any], rows: Iterable[Row]) -> None:
    records = [
        {
            "record": "row",
            "tokens": row.tokens,
            "pass": row.pass_,
            "competitor": row.competitor,
            "median_ms": row.median,
            "samples_ms": row.samples_ms,
        }
        for row in rows
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in [facts, *records]), encoding="utf-8")
