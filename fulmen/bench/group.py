"""One case and all who compete in it: proved right, warmed up, and sampled, interleaved.

    group = Group(...)
    group.prepare()                        # gate, memory, warm-up: who fails has a cell that says so
    while not group.done: group.sample()   # one round: every task once, in an order drawn anew
    cells = group.finish(run)

Two sets of arguments alternate. Every few rounds, and at the end, their values are exchanged in place, so that a kernel
that remembers results is wrong from then on. Results of timed calls are compared with fp64 after each exchange.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fulmen import hardware
from fulmen.bench import audit, floors, gate, kernels, schema, timing
from fulmen.bench.cases import Line
from fulmen.bench.competitors import Competitor
from fulmen.bench.gate import Problem, Wrong, compare, exchange, gradients_by_name, outputs_by_name, outputs_of
from fulmen.bench.timing import Timer

SIDE_STREAM_MS = 0.05  # what a device may need to fall silent after the call's own stream did
SIDE_STREAM_SHARE = 0.2
REPLAYED_MS = 2.0  # calls shorter than this are replayed as a graph: of longer ones the spacer hides the host


def first_line(error: BaseException, limit: int = 300) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:limit]


def fail(cell: schema.Cell, error: BaseException) -> None:
    """Gives a cell the status that belongs to an error, and takes its times away."""
    text, reason = str(error), first_line(error)
    no_memory = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    if isinstance(error, TimeoutError):
        status, reason = "timeout", text
    elif no_memory or isinstance(error, torch.OutOfMemoryError | MemoryError):
        status = "oom"
    elif isinstance(error, NotImplementedError) or "No available kernel" in text:  # torch's SDPA
        status = "unsupported"
    else:
        status = "failed"
    if isinstance(error, Wrong):
        reason, cell.correctness = text, error.correctness or cell.correctness
    cell.status, cell.reason = status, reason
    cell.drop_times()


@dataclass(eq=False)
class Task:
    """A competitor's pass at one state of the cache: what becomes a cell."""

    competitor: Competitor
    cell: schema.Cell
    problems: Sequence[Problem]
    grad: bool
    graphs: list[dict[str, Tensor]] = field(default_factory=list)
    spacer_ms: float = 0.1
    tries: int = timing.TRIES
    spent: float = 0.0
    stop: str = ""

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> None:
        """What happens outside the timed region: for a backward, the forward."""
        if self.cell.pass_ == "backward":
            self.graphs = [outputs_of(p, self.competitor.attend) for p in self.problems]

    def work(self, i: int) -> Callable[[], Any]:
        """The timed call on the i-th set of arguments, doing nothing else."""
        problem, attend = self.problems[i], self.competitor.attend
        leaves, douts = list(problem.leaves.values()), list(problem.douts.values())
        if self.cell.pass_ == "backward":
            outs = list(self.graphs[i].values())
            return lambda: torch.autograd.grad(outs, leaves, douts, retain_graph=True, allow_unused=True)

        def inference() -> Any:
            with torch.no_grad():
                return attend(problem.x)

        def total() -> Any:
            given = attend(problem.x)
            outs = given[: len(douts)] if isinstance(given, list | tuple) else (given,)
            grads = torch.autograd.grad(outs, leaves, douts, allow_unused=True)
            if problem.after is not None:
                problem.after(grads)
            return outs, grads

        if self.cell.pass_ == "total":
            return total
        return (lambda: attend(problem.x)) if self.grad else inference

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

    def call(self, timer: Timer, i: int) -> timing.Sample:
        work, cold = self.work(i), self.cell.cache == "cold"
        if not cold:  # others were in the cache since: the call before is one of its own
            work()
        sample = timer.sample(work, cold=cold, spacer_ms=self.spacer_ms, tries=self.tries)
        self.spacer_ms = max(self.spacer_ms, sample.spacer_ms)
        if sample.late:  # it synchronises, so a longer spacer is no use
            self.tries = 1
        return sample


class Group:
    """See the top of the file.

    entries  competitors with the cells to measure of them
    passed   gates that have been passed, by what they depend on; shared between the groups of a run
    """

    def __init__(
        self, line: Line, entries: Sequence[tuple[Competitor, list[schema.Cell]]], timer: Timer, seed: int,
        say: Callable[[str], None] = lambda text: None, passed: dict[Any, dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.line, self.entries, self.timer, self.say = line, entries, timer, say
        self.settings, self.rng = line.settings, random.Random(seed)
        self.passed = {} if passed is None else passed
        self.grad = line.case.get("grad", True) is not False
        self.cells = [cell for _, cells in entries for cell in cells]
        self.problems: dict[Any, list[Problem]] = {}  # by what is computed: two sets of arguments of the timed shape
        self.tasks: list[Task] = []
        self.round, self.check_until, self.exchange_at = 0, 0, self.rng.choice((1, 2))
        self.closed = False
        self.throttled: list[str] = []

    @property
    def done(self) -> bool:
        return self.closed or not self.tasks

    @contextmanager
    def _guard(self, competitor: Competitor, cells: Sequence[schema.Cell]) -> Iterator[None]:
        """An error within, or a clock that was replaced, becomes the status of `cells`, and their tasks end."""
        error: BaseException | None = None
        try:
            with competitor.pinned():
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            error = raised.with_traceback(None)  # whose frames hold tensors
        if patched := timing.restore_clocks():
            error = Wrong(patched)
        if error is None:
            return
        if isinstance(error, Wrong):  # what is wrong cold is wrong hot
            passes = {cell.pass_ for cell in cells}
            cells = [c for c in self.cells if c.competitor == competitor.name and c.pass_ in passes]
        for cell in cells:
            if cell.status == "ok":
                fail(cell, error)
        self.tasks = [task for task in self.tasks if task.cell.status == "ok"]

    def _each(self, what: Callable[[Task], Any], tasks: Sequence[Task] | None = None) -> None:
        """Does something for every task; who fails is given up."""
        for task in list(self.tasks if tasks is None else tasks):
            if task in self.tasks:
                with self._guard(task.competitor, [task.cell]):
                    what(task)

    # ------------------------------------------------------------------------------------------- prepare
    def prepare(self) -> None:
        self.throttled = self.timer.nvml.throttle()
        with self.timer.on_stream():
            for competitor, cells in self.entries:
                if why := competitor.refusal or competitor.skip:
                    for cell in cells:
                        cell.status = "unsupported" if competitor.refusal else "skipped"
                        cell.reason = why.splitlines()[0]
                    continue
                with self._guard(competitor, cells):
                    self._prepare(competitor, cells)
                if any(cell.status != "ok" for cell in cells):
                    self.timer.collect_garbage()

    def _prepare(self, competitor: Competitor, cells: list[schema.Cell]) -> None:
        self.say(f"{competitor.name}: gate")
        found = self._small_gate(competitor)
        what = (competitor.op, competitor.function)
        if what not in self.problems:  # shared by all who compute the same
            self.problems[what] = [competitor.problem(self._seed()) for _ in range(2)]
        problems = self.problems[what]
        for problem in problems:
            problem.expected()
        for name, row in gate.gate(problems[:1], competitor.attend, self.grad).items():
            if row["error"] >= found.get(name, row)["error"]:
                found[name] = row | {"timed_shape": True}
        self.say(f"{competitor.name}: memory")
        least = floors.memory(competitor.op, floors.computed(competitor.function, self.line.case)) or {}
        parts = gate.breakdown(problems[0], competitor.attend, self.timer.device, least, self.grad)
        self.say(f"{competitor.name}: warm-up")
        for cell in cells:
            cell.correctness, cell.memory = found, parts.get(cell.pass_, {})
            task = Task(competitor, cell, problems, self.grad)
            self._warm_up(task)
            self.tasks.append(task)

    def _seed(self) -> int:
        return self.rng.randrange(2**31)

    def _small_gate(self, competitor: Competitor) -> dict[str, dict[str, Any]]:
        """The gate at an odd shape: once for cases that differ only in size, with all outputs once for all masks."""
        case, who = self.line.case, (competitor.name, competitor.op)
        rest = {k: v for k, v in case.items() if k not in ("B", "H", "H_KV", "N")}
        group = case["H"] // case["H_KV"] if "H_KV" in case else 1
        key = (*who, self.grad, group, *sorted((k, str(v)) for k, v in rest.items()))
        whole = (*who, *(case.get(k) for k in ("D", "E", "dtype")))
        if key not in self.passed:
            found = gate.gate([competitor.small(self._seed()) for _ in range(2)], competitor.attend, self.grad)
            if competitor.fully is not None and self.grad and whole not in self.passed:
                found |= gate.gate([competitor.small(self._seed(), fully=True)], competitor.fully, self.grad)
                self.passed[whole] = {}
            self.passed[key] = found
        return dict(self.passed[key])

    def _warm_up(self, task: Task) -> None:
        """Compiles, fills caches, learns what a call costs the host and whether it hides on another stream."""
        timer, settings = self.timer, self.settings
        begin = time.monotonic()
        walls = [timer.wall(task.work(0))]
        if walls[0].device > 1e3 * settings.limit:
            raise TimeoutError(f"one call took {walls[0].device / 1e3:.1f} s, more than {settings.limit:g}")
        for i in range(settings.warmup):
            if i >= 2 and time.monotonic() - begin > settings.warmup_seconds:
                break
            walls.append(timer.wall(task.work(i % 2)))
        walls = walls[1:] or walls  # the first compiled
        enqueue = task.cell.stats["enqueue"] = median(w.returned for w in walls)
        task.cell.host_ms = median(w.device for w in walls)
        task.spacer_ms = min(timing.LONGEST_SPACER_MS, 0.03 + 1.5 * enqueue)
        hidden, quickest = min(w.device - w.stream for w in walls), min(w.device for w in walls)
        if timer.cuda and hidden > max(SIDE_STREAM_MS, SIDE_STREAM_SHARE * quickest):
            raise Wrong(
                f"SIDE-STREAM: the device works on for {hidden:.3f} of {quickest:.3f} ms after the call's own "
                "stream is done, where no event sees it"
            )

    # -------------------------------------------------------------------------------------------- sample
    def sample(self) -> None:
        """One round: every task that is not done once, in an order drawn anew."""
        with self.timer.on_stream():
            if self.round == self.exchange_at:
                self._exchange()
                self.check_until = self.round + 2
                self.exchange_at += self.rng.randint(8, 20)
            with timing.no_garbage_collection():
                shuffled = self.rng.sample(self.tasks, len(self.tasks))
                self._each(self._sample, [t for t in shuffled if not t.stop])
            self.round += 1
            if all(task.stop for task in self.tasks):
                self._close()

    def _exchange(self) -> None:
        for pair in self.problems.values():
            exchange(*pair)
        self._each(Task.build)

    def _sample(self, task: Task) -> None:
        begin, i = time.monotonic(), self.round % 2
        sample = task.call(self.timer, i)
        task.cell.samples_ms.append(sample.ms)
        if sample.clock_mhz is not None:
            task.cell.clocks_mhz.append(sample.clock_mhz)
        task.spent += time.monotonic() - begin
        task.stop = self._why_stop(task)
        if self.round < max(self.check_until, 1) or task.stop:
            task.check(i, sample.result)

    def _why_stop(self, task: Task) -> str:
        samples = task.cell.samples_ms
        n, (low, high) = len(samples), self.settings.samples
        if n >= high:
            return "samples"
        if n >= self.settings.few and task.spent >= self.settings.seconds:
            return "time"
        if n < low or n % 5:
            return ""
        begin, end = audit.median_interval(sorted(samples))
        return "interval" if end - begin <= 2 * self.settings.interval * median(samples) else ""

    def _close(self) -> None:
        """One more exchange and one more call of everyone, checked; then what is measured in passes of its own."""
        self._exchange()
        self._each(lambda task: task.check(0, task.call(self.timer, 0).result))
        for task in self.tasks:  # what autograd keeps for a leaf belongs to the stream of its first forward still alive
            task.graphs.clear()
        self._each(self._afterwards)
        self.closed = True

    def _afterwards(self, task: Task) -> None:
        """The device's time without the host, what it ran, a loop of calls, and the first call of a fresh process."""
        timer, cell, settings, cold = self.timer, task.cell, self.settings, task.cell.cache == "cold"

        def fresh() -> Callable[[], Any]:
            return Task(task.competitor, cell, task.problems[:1], task.grad).work(0)

        if timer.cuda and min(cell.samples_ms) < REPLAYED_MS:
            cell.device_ms = timing.graph_ms(timer, fresh, cold=cold)
        if timer.cuda and settings.kernels:
            cell.kernels, cell.kernels_ms, cell.kinds = timing.Ran.of(timing.profiled(timer, fresh(), cold))
        if settings.loop:
            cell.stats["loop"] = timing.loop_ms(timer, fresh(), settings.loop)
        if settings.first_call and task.competitor.ours:
            cell.stats["first_call_s"] = kernels.first_call(cell, self.timer.device)

    # -------------------------------------------------------------------------------------------- finish
    def finish(self, run: schema.Run) -> list[schema.Cell]:
        """The cells, judged; those that did not get to the end are marked as interrupted."""
        state, hw = self.timer.nvml.state(self.throttled), hardware.of(self.timer.device)
        started = {id(task.cell) for task in self.tasks}
        for cell in self.cells:
            if cell.status == "ok" and id(cell) not in started:
                cell.status, cell.reason = "interrupted", "before it began"
        for task in self.tasks:
            cell = task.cell
            if not self.closed:
                cell.status, cell.reason = "interrupted", f"after {len(cell.samples_ms)} samples"
            stop = task.stop if self.closed else "interrupted"
            cell.stats = timing.summary(cell.samples_ms, stop) | cell.stats | state if cell.samples_ms else {}
            try:
                if task.competitor.ours and self.timer.cuda:
                    recorded = kernels.launches(cell.op, cell.case, hw, cell.backend, cell.pass_)
                    cell.resources = kernels.resources(recorded, hw)
            except Exception as error:  # a compiler's error must not cost a measurement
                self.say(f"{cell.competitor}: no resources, {first_line(error)}")
            if cell.status == "ok":
                audit.judge(cell, run)
        audit.judge_group(self.cells, {run.run_id: run})
        self.tasks, self.problems = [], {}
        self.timer.collect_garbage()
        return self.cells
