"""One case and all who compete in it: proved right, warmed up, and sampled in turns.

    group = Group(...)
    group.prepare()                        # gate, memory, warm-up: who fails has a cell that says so
    while not group.done: group.sample()   # one round: every task once, in an order drawn anew
    cells = group.finish(run)

Two sets of arguments alternate. Every few rounds, and at the end, their values are exchanged in place, so that a kernel
that remembers results is wrong from then on. Results of timed calls are compared with fp64 after each exchange.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fulmen.bench import audit, environment, floors, memory, schema, startup, timing
from fulmen.bench.cases import Line
from fulmen.bench.competitors import Competitor
from fulmen.bench.gate import Problem, Wrong, compare, exchange, gate, gradients_by_name, outputs_by_name, outputs_of
from fulmen.bench.timing import Timer

SIDE_STREAM_MS = 0.05  # what a device may need to fall silent after the call's own stream did
SIDE_STREAM_SHARE = 0.2
REPLAYED_MS = 2.0  # calls shorter than this are replayed as a graph: of longer ones the spacer hides the host


@dataclass
class Machine:
    """Where a run measures; made once."""

    device: torch.device
    timer: Timer
    nvml: environment.Nvml
    stream: torch.cuda.Stream | None = None

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        nvml = environment.Nvml(device)
        return cls(device, Timer(device, nvml.clock_mhz if nvml.nvml is not None else None), nvml)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A stream of our own on a GPU, since the default one cannot be captured."""
        if self.device.type != "cuda":
            yield
            return
        self.stream = self.stream or torch.cuda.Stream(self.device)
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def burn_in(self, seconds: float = 0.2) -> None:
        """Warms up a cool and idle GPU before the first cell."""
        if self.device.type == "cuda":
            a = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                torch.mm(a, a)
                torch.cuda.synchronize(self.device)

    def collect_garbage(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def first_line(error: BaseException, limit: int = 300) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:limit]


def fail(cells: Sequence[schema.Cell], error: BaseException) -> None:
    """Gives cells the status that belongs to an error, and takes their times away."""
    text = str(error)
    no_memory = "can't allocate memory" in text or "out of memory" in text
    if isinstance(error, TimeoutError):
        status, reason = "timeout", text
    elif isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and no_memory):
        status, reason = "oom", first_line(error)
    elif isinstance(error, NotImplementedError) or "No available kernel" in text:  # torch's SDPA
        status, reason = "unsupported", first_line(error)
    else:
        status, reason = "failed", text if isinstance(error, Wrong) else first_line(error)
    for cell in cells:
        cell.status, cell.reason = status, reason
        if isinstance(error, Wrong) and error.correctness:
            cell.correctness = error.correctness
        cell.samples_ms, cell.clocks_mhz, cell.stats = [], [], {}
        cell.device_ms = cell.kernels_ms = cell.host_ms = None


# -------------------------------------------------------------------------------------------------- a task


@dataclass(eq=False)
class Task:
    """A competitor's pass at one state of the cache: what becomes a cell."""

    competitor: Competitor
    cell: schema.Cell
    problems: Sequence[Problem]
    grad: bool
    samples: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # of the cell's stats
    graphs: list[dict[str, Tensor]] = field(default_factory=list)
    spacer_ms: float = 0.1
    tries: int = timing.TRIES
    spent: float = 0.0
    stop: str = ""

    @property
    def cold(self) -> bool:
        return self.cell.cache == "cold"

    def build(self) -> None:
        """What happens outside the timed region: for a backward, the forward."""
        if self.cell.pass_ == "backward":
            self.graphs = [outputs_of(p, self.competitor.attend) for p in self.problems]

    def work(self, i: int) -> Callable[[], Any]:
        """The timed call on the i-th set of arguments, doing nothing else."""
        problem, attend = self.problems[i], self.competitor.attend
        leaves, douts = list(problem.leaves.values()), list(problem.douts.values())
        if self.cell.pass_ == "forward":
            if self.grad:
                return lambda: attend(problem.x)

            def inference() -> Any:
                with torch.no_grad():
                    return attend(problem.x)

            return inference
        if self.cell.pass_ == "backward":
            outs = list(self.graphs[i].values())
            return lambda: torch.autograd.grad(outs, leaves, douts, retain_graph=True, allow_unused=True)

        def total() -> Any:
            given = attend(problem.x)
            outs = given[: len(douts)] if isinstance(given, list | tuple) else (given,)
            return outs, torch.autograd.grad(outs, leaves, douts, allow_unused=True)

        return total

    def check(self, i: int, result: Any) -> None:
        """Compares what a timed call returned with fp64."""
        problem, pass_ = self.problems[i], self.cell.pass_
        outs, grads = {"forward": (result, None), "backward": (None, result)}.get(pass_, result)
        found = {} if outs is None else outputs_by_name(problem, outs)
        found |= {} if grads is None else gradients_by_name(problem, grads)
        try:
            compare(problem, found)
        except Wrong as wrong:
            raise Wrong(f"{wrong} (in a timed call)", wrong.correctness) from None


# ------------------------------------------------------------------------------------------------- a group


class Group:
    """See the top of the file.

    entries  competitors with the cells to measure of them
    passed   gates that have been passed, by what they depend on; shared between the groups of a run
    """

    def __init__(
        self, line: Line, entries: Sequence[tuple[Competitor, list[schema.Cell]]], machine: Machine, seed: int,
        say: Callable[[str], None] = lambda text: None, passed: dict[Any, dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.line, self.entries, self.machine, self.say = line, entries, machine, say
        self.settings, self.rng = line.settings, random.Random(seed)
        self.passed = {} if passed is None else passed
        self.grad = line.case.get("grad", True) is not False
        self.problems: dict[str, list[Problem]] = {}  # by operation: two sets of arguments of the timed shape
        self.tasks: list[Task] = []
        self.round, self.check_until, self.exchange_at = 0, 0, self.rng.choice((1, 2))
        self.closed = False
        self.throttled: list[str] = []

    @property
    def cells(self) -> list[schema.Cell]:
        return [cell for _, cells in self.entries for cell in cells]

    @property
    def done(self) -> bool:
        return self.closed or not self.tasks

    # ------------------------------------------------------------------------------------------- prepare

    def prepare(self) -> None:
        self.throttled = self.machine.nvml.throttle()
        with self.machine.on_stream():
            for competitor, cells in self.entries:
                if competitor.refusal is None and competitor.skip is None:
                    self._try(competitor, cells)
                    continue
                status = "skipped" if competitor.refusal is None else "unsupported"
                for cell in cells:
                    cell.status, cell.reason = status, str(competitor.refusal or competitor.skip).splitlines()[0]

    def _try(self, competitor: Competitor, cells: list[schema.Cell]) -> None:
        try:
            with competitor.pinned():
                self._prepare(competitor, cells)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            fail(cells, error)
        if patched := timing.restore_clocks():
            fail(cells, Wrong(patched))
        if any(cell.status != "ok" for cell in cells):
            self.tasks = [t for t in self.tasks if t.competitor is not competitor]
            self.machine.collect_garbage()

    def _prepare(self, competitor: Competitor, cells: list[schema.Cell]) -> None:
        self.say(f"{competitor.name}: gate")
        found = self._small_gate(competitor)
        problems = self._pair(competitor)
        for name, row in gate(problems[:1], competitor.attend, self.grad).items():
            if row["error"] >= found.get(name, row)["error"]:
                found[name] = row | {"timed_shape": True}
        self.say(f"{competitor.name}: memory")
        least = floors.memory(competitor.op, self.line.case) or {}
        parts = memory.breakdown(problems[0], competitor.attend, self.machine.device, least, self.grad)
        self.say(f"{competitor.name}: warm-up")
        for cell in cells:
            cell.correctness, cell.memory = found, parts.get(cell.pass_, {})
            task = Task(competitor, cell, problems, self.grad)
            task.build()
            self._warm_up(task)
            self.tasks.append(task)

    def _pair(self, competitor: Competitor) -> list[Problem]:
        """Two sets of arguments of the timed shape, shared by all who compute the same operation."""
        if competitor.op not in self.problems:
            self.problems[competitor.op] = pair = [competitor.problem(self._seed()) for _ in range(2)]
            for problem in pair:
                problem.expected()
        return self.problems[competitor.op]

    def _seed(self) -> int:
        return self.rng.randrange(2**31)

    def _small_gate(self, competitor: Competitor) -> dict[str, dict[str, Any]]:
        """The gate at an odd shape: once for cases that differ only in size, with all outputs once for all masks."""
        case, name = self.line.case, competitor.name
        rest = {k: v for k, v in case.items() if k not in ("B", "H", "H_KV", "N")}
        group = case["H"] // case["H_KV"] if "H_KV" in case else 1
        key = (name, competitor.op, self.grad, group, *sorted((k, str(v)) for k, v in rest.items()))
        whole = (name, competitor.op, *(case.get(k) for k in ("D", "E", "dtype")))
        if key not in self.passed:
            pair = [competitor.small(self._seed()) for _ in range(2)]
            found = gate(pair, competitor.attend, self.grad)
            if competitor.fully is not None and self.grad and whole not in self.passed:
                found |= gate([competitor.small(self._seed(), fully=True)], competitor.fully, self.grad)
                self.passed[whole] = {}
            self.passed[key] = found
        return dict(self.passed[key])

    def _warm_up(self, task: Task) -> None:
        """Compiles, fills caches, learns what a call costs the host and whether it hides on another stream."""
        timer, settings = self.machine.timer, self.settings
        begin = time.monotonic()
        walls = [timer.wall(task.work(0))]
        if walls[0].device > 1e3 * settings.limit:
            raise TimeoutError(f"one call took {walls[0].device / 1e3:.1f} s, more than {settings.limit:g}")
        for i in range(settings.warmup):
            if i >= 2 and time.monotonic() - begin > settings.warmup_seconds:
                break
            walls.append(timer.wall(task.work(i % 2)))
        walls = walls[1:] or walls  # the first compiled
        task.extra["enqueue"] = median(w.returned for w in walls)
        task.cell.host_ms = median(w.device for w in walls)
        hidden, quickest = min(w.device - w.stream for w in walls), min(w.device for w in walls)
        if timer.cuda and hidden > max(SIDE_STREAM_MS, SIDE_STREAM_SHARE * quickest):
            raise Wrong(
                f"SIDE-STREAM: the device works on for {hidden:.3f} of {quickest:.3f} ms after the call's own "
                "stream is done, where no event sees it"
            )
        task.spacer_ms = min(timing.LONGEST_SPACER_MS, 0.03 + 1.5 * task.extra["enqueue"])

    # -------------------------------------------------------------------------------------------- sample

    def sample(self) -> None:
        """One round: every task that is not done once, in an order drawn anew."""
        with self.machine.on_stream():
            if self.round == self.exchange_at:
                self._exchange()
                self.check_until = self.round + 2
                self.exchange_at += self.rng.randint(8, 20)
            with timing.no_garbage_collection():
                shuffled = self.rng.sample(self.tasks, len(self.tasks))
                self._each(lambda task: self._sample(task, self.round % 2), [t for t in shuffled if not t.stop])
            self.round += 1
            if all(task.stop for task in self.tasks):
                self._close()

    def _each(self, what: Callable[[Task], None], tasks: Sequence[Task] | None = None) -> None:
        """Does something for every task; who fails is given up."""
        for task in list(self.tasks if tasks is None else tasks):
            if task in self.tasks:
                try:
                    with task.competitor.pinned():
                        what(task)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    self._give_up(task, error)

    def _give_up(self, task: Task, error: BaseException) -> None:
        for other in [t for t in self.tasks if t.competitor is task.competitor and t.cell.pass_ == task.cell.pass_]:
            if other is task or isinstance(error, Wrong):  # what is wrong cold is wrong hot
                fail([other.cell], error)
                other.graphs.clear()
                self.tasks.remove(other)

    def _exchange(self) -> None:
        for pair in self.problems.values():
            exchange(*pair)
        self._each(Task.build)

    def _sample(self, task: Task, i: int) -> None:
        begin = time.monotonic()
        sample = self._call(task, i)
        task.samples.append(sample.ms)
        if sample.clock_mhz is not None:
            task.clocks.append(sample.clock_mhz)
        task.spent += time.monotonic() - begin
        task.stop = self._why_stop(task)
        if self.round < max(self.check_until, 1) or task.stop:
            task.check(i, sample.result)

    def _call(self, task: Task, i: int) -> timing.Sample:
        work = task.work(i)
        if not task.cold:  # others were in the cache since: the call before is one of its own
            work()
        sample = self.machine.timer.sample(work, cold=task.cold, spacer_ms=task.spacer_ms, tries=task.tries)
        task.spacer_ms = max(task.spacer_ms, sample.spacer_ms)
        if sample.late:  # it synchronises, so a longer spacer is no use
            task.tries = 1
        if patched := timing.restore_clocks():
            raise Wrong(patched)
        return sample

    def _why_stop(self, task: Task) -> str:
        low, high = self.settings.samples
        n = len(task.samples)
        if n >= high:
            return "samples"
        if n >= self.settings.few and task.spent >= self.settings.seconds:
            return "time"
        if n >= low and n % 5 == 0 and timing.half_width(task.samples) <= self.settings.interval:
            return "interval"
        return ""

    def _close(self) -> None:
        """One more exchange and one more call of everyone, checked; then what is measured in passes of its own."""
        self._exchange()
        self._each(lambda task: task.check(0, self._call(task, 0).result))
        for task in self.tasks:  # what autograd keeps for a leaf belongs to the stream of its first forward still alive
            task.graphs.clear()
        self._each(self._afterwards)
        self.closed = True

    def _afterwards(self, task: Task) -> None:
        """The device's time without the host, what it ran, a loop of calls, and the first call of a fresh process."""
        timer, cell, settings = self.machine.timer, task.cell, self.settings

        def fresh() -> Callable[[], Any]:
            again = Task(task.competitor, cell, task.problems[:1], task.grad)
            again.build()
            return again.work(0)

        if timer.cuda and min(task.samples) < REPLAYED_MS:
            cell.device_ms = timing.graph_ms(timer, fresh, cold=task.cold)
        if timer.cuda and settings.kernels:
            cell.kernels, cell.kernels_ms = timing.kernels_of(timer, fresh(), cold=task.cold)
        if settings.loop:
            task.extra["loop"] = timing.loop_ms(timer, fresh(), settings.loop)
        if settings.first_call and (seconds := startup.first_call(cell, self.machine.device)) is not None:
            task.extra["first_call_s"] = seconds

    # -------------------------------------------------------------------------------------------- finish

    def finish(self, run: schema.Run) -> list[schema.Cell]:
        """The cells, judged; those that did not get to the end are marked as interrupted."""
        state = self.machine.nvml.state(self.throttled)
        for task in self.tasks:
            cell = task.cell
            if not self.closed:
                cell.status, cell.reason = "interrupted", f"after {len(task.samples)} samples"
            cell.samples_ms, cell.clocks_mhz = task.samples, task.clocks
            if task.samples:
                stop = task.stop if self.closed else "interrupted"
                cell.stats = timing.summary(task.samples, stop) | task.extra | state
            try:
                cell.resources = task.competitor.resources(cell.pass_)
            except Exception as error:  # a compiler's error must not cost a measurement
                self.say(f"{cell.competitor}: no resources, {first_line(error)}")
        started = [task.cell for task in self.tasks]
        for cell in self.cells:
            if cell.status == "ok" and not any(cell is other for other in started):
                cell.status, cell.reason = "interrupted", "before it began"
            if cell.status == "ok":
                audit.judge(cell, run)
        audit.judge_group(self.cells, {run.run_id: run})
        self.tasks, self.problems = [], {}
        self.machine.collect_garbage()
        return self.cells
