"""One case of a suite and all who compete in it: proved right, warmed up, and sampled in turns.

    group = Group(...)
    group.prepare()                        # gate, memory, warm-up: who fails has a cell that says so
    while not group.done: group.sample()   # one round: every task once, in an order drawn anew
    cells = group.finish(run)

Two sets of arguments are alternated. Every few rounds, and at the end, their values are exchanged in place, so that
whoever remembers results instead of computing them is wrong from then on, and what a timed call returned is compared
with fp64: in the rounds after an exchange, and once more when all is done.
"""

from __future__ import annotations

import gc
import random
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fulmen.bench import adapters, environment, memory, schema, timing
from fulmen.bench.cases import Line
from fulmen.bench.competitors import OURS, Competitor
from fulmen.bench.gate import Problem, Wrong, exchange, gate, outputs_of
from fulmen.bench.gate import compare as compare_results
from fulmen.bench.timing import Timer

Say = Callable[[str], None]
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
        """Where everything runs: a stream of our own on a GPU, since the default one cannot be captured."""
        if self.device.type != "cuda":
            yield
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(self.device)
        outside = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            outside.wait_stream(self.stream)

    def burn_in(self, seconds: float = 0.2) -> None:
        """So that the first cell does not meet a cool and idle chip."""
        if self.device.type == "cuda":
            a = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                torch.mm(a, a)
                torch.cuda.synchronize(self.device)


def out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )


def first_line(error: BaseException, limit: int = 300) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:limit]


def several(given: Any, count: int) -> tuple[Any, ...]:
    """What an implementation returned, as the outputs that count."""
    return tuple(given[:count]) if isinstance(given, list | tuple) else (given,)


# -------------------------------------------------------------------------------------------------- a task


@dataclass(eq=False)
class Task:
    """A competitor's pass, at one state of the cache: what becomes a cell."""

    competitor: Competitor
    cell: schema.Cell
    problems: Sequence[Problem]
    grad: bool
    samples: list[float] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    graphs: list[dict[str, Tensor]] = field(default_factory=list)
    spacer_ms: float = 0.1
    tries: int = timing.TRIES
    spent: float = 0.0
    stop: str = ""
    enqueue_ms: float = 0.0

    def build(self) -> None:
        """What happens outside the timed region: for a backward, the forward."""
        if self.cell.pass_ == "backward":
            with self.competitor.pinned():
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
            outs = several(attend(problem.x), len(douts))
            return outs, torch.autograd.grad(outs, leaves, douts, allow_unused=True)

        return total

    def check(self, i: int, result: Any) -> None:
        """What a timed call returned, against fp64."""
        problem = self.problems[i]
        found: dict[str, Tensor] = {}
        if self.cell.pass_ != "backward":
            found |= outputs_of(problem, lambda _: result if self.cell.pass_ == "forward" else result[0])
        if self.cell.pass_ != "forward":
            grads = result if self.cell.pass_ == "backward" else result[1]
            for name, grad in zip(problem.leaves, grads, strict=True):
                if grad is None:
                    raise Wrong(f"d{name}: no gradient comes back to {name}")
                found[f"d{name}"] = grad
        try:
            compare_results(problem, found)
        except Wrong as wrong:
            raise Wrong(f"{wrong} (in a timed call)", wrong.correctness) from None

    def drop(self) -> None:
        self.graphs.clear()


# ------------------------------------------------------------------------------------------------- a group


@dataclass
class Plan:
    """What a group is made from; also what another process is told to measure the same."""

    line: Line
    case: dict[str, Any]
    run_id: str
    seed: int
    command: str  # up to and without the options that single out a cell
    hot: bool = False

    def cell(self, competitor: Competitor, pass_: str, cache: str) -> schema.Cell:
        own = f"--backend {competitor.name.removeprefix(OURS)} --baseline none"
        other = f"--backend none --baseline {competitor.name}"
        shape = ",".join(f"{k}={_word(v)}" for k, v in {"op": self.line.op, **self.case}.items())
        who = own if competitor.name.startswith(OURS) else other
        return schema.Cell(
            self.run_id, self.line.suite, competitor.op, competitor.function, dict(self.case), competitor.name, pass_,
            backend=competitor.backend, version=competitor.version, cache=cache, seed=self.seed,
            command=f"{self.command} {who} --pass {pass_} --shape {shlex.quote(shape)} --seed {self.seed}",
        )  # fmt: skip


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


class Group:
    """See the top of the file. `wanted`: hashes of the cells to measure; None: all."""

    def __init__(
        self, plan: Plan, competitors: Sequence[Competitor], machine: Machine, wanted: set[str] | None = None,
        say: Say = lambda text: None, problems: dict[str, list[Problem]] | None = None,
        smalls: Callable[[Competitor], list[tuple[Any, list[Problem]]]] | None = None,
        passed: dict[Any, dict[str, Any]] | None = None, kernels: bool = False,
    ) -> None:  # fmt: skip
        self.plan, self.machine, self.say, self.kernels = plan, machine, say, kernels
        self.settings = plan.line.settings
        self.rng = random.Random(plan.seed)
        self.problems = {} if problems is None else problems
        self.smalls = smalls or self._smalls
        self.passed = {} if passed is None else passed  # gates that have been passed, by what they depend on
        self.grad = plan.case.get("grad", True) is not False
        self.cells: list[schema.Cell] = []
        self.tasks: list[Task] = []
        self.round = 0
        self.exchange_at = self.rng.choice((1, 2))
        self.check_until = 0
        self.closed = False
        self.throttled: list[str] = []
        self.entries: list[tuple[Competitor, list[schema.Cell]]] = []
        for competitor in competitors:
            caches = ("cold", "hot") if self.hot else ("cold",)
            cells = [plan.cell(competitor, p, c) for p in self.settings.passes for c in caches]
            cells = [c for c in cells if wanted is None or c.config_hash in wanted]
            self.cells += cells
            if cells:
                self.entries.append((competitor, cells))

    @property
    def hot(self) -> bool:
        return self.plan.hot

    # ------------------------------------------------------------------------------------------- prepare

    def prepare(self) -> None:
        with self.machine.on_stream():
            self._prepare_all()

    def _prepare_all(self) -> None:
        self.throttled = self.machine.nvml.throttle()
        for competitor, cells in self.entries:
            if competitor.refusal is not None:
                for cell in cells:
                    cell.status, cell.reason = "unsupported", competitor.refusal.splitlines()[0]
                continue
            if competitor.skip is not None:
                for cell in cells:
                    cell.status, cell.reason = "skipped", competitor.skip
                continue
            try:
                with competitor.pinned():
                    self._prepare(competitor, cells)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._fail(cells, error)
                self.tasks = [t for t in self.tasks if t.competitor is not competitor]
            patched = timing.intact()
            if patched:
                timing.repair()
                self._fail(cells, Wrong(patched))
                self.tasks = [t for t in self.tasks if t.competitor is not competitor]
            if any(cell.status == "oom" for cell in cells):
                self._collect_garbage()

    def _collect_garbage(self) -> None:
        if self.machine.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def _fail(self, cells: Sequence[schema.Cell], error: BaseException) -> None:
        for cell in cells:
            if isinstance(error, TimeoutError):
                cell.status, cell.reason = "timeout", str(error)
            elif out_of_memory(error):
                cell.status, cell.reason = "oom", first_line(error)
            elif isinstance(error, NotImplementedError) or "No available kernel" in str(error):  # torch's SDPA
                cell.status, cell.reason = "unsupported", first_line(error)
            else:
                cell.status = "failed"
                cell.reason = str(error) if isinstance(error, Wrong) else first_line(error)
            if isinstance(error, Wrong) and error.correctness:
                cell.correctness = error.correctness
            cell.samples_ms, cell.clocks_mhz, cell.stats = [], [], {}
            cell.device_ms = cell.kernels_ms = cell.host_ms = None

    def _case(self, op: str) -> dict[str, Any]:
        """The case in the words of another operation that stands beside it."""
        adapter = adapters.of(op)
        return adapter.complete({k: v for k, v in self.plan.case.items() if k in adapter.KEYS})

    def _pair(self, op: str) -> list[Problem]:
        """Two sets of arguments of the timed shape."""
        if op not in self.problems:
            adapter, case = adapters.of(op), self._case(op)
            seeds = (self.rng.randrange(2**31) for _ in range(2))
            self.problems[op] = [adapter.problem(case, self.machine.device, seed) for seed in seeds]
            for problem in self.problems[op]:
                problem.expected()
        return self.problems[op]

    def _smalls(self, competitor: Competitor) -> list[tuple[Any, list[Problem]]]:
        """The gate's problems of odd shape, with what is called on them."""
        adapter, case = adapters.of(competitor.op), self._case(competitor.op)
        device = self.machine.device
        made = [(competitor.attend, [adapter.small(case, device, self.rng.randrange(2**31)) for _ in range(2)])]
        key = ("fully", competitor.name, competitor.op, case["D"], case["E"], case["dtype"])  # once for all masks
        if competitor.fully is not None and self.grad and key not in self.passed:
            made.append((competitor.fully, [adapter.small(case, device, self.rng.randrange(2**31), fully=True)]))
            self.passed[key] = {}
        return made

    def _prepare(self, competitor: Competitor, cells: list[schema.Cell]) -> None:
        self.say(f"{competitor.name}: gate")
        found = self._gate(competitor)
        problems = self._pair(competitor.op)
        for name, row in gate(problems[:1], competitor.attend, self.grad).items():
            found[name] = row | {"timed_shape": True} if row["error"] >= found.get(name, row)["error"] else found[name]
        self.say(f"{competitor.name}: memory")
        floors = {"inputs": 0, "output": 0, "gradients": 0}
        if competitor.op in adapters.ops() and "N" in self.plan.case:
            floors = adapters.of(competitor.op).floors(self._case(competitor.op))
        parts = memory.breakdown(problems[0], competitor.attend, self.machine.device, floors, self.grad)
        self.say(f"{competitor.name}: warm-up")
        for cell in cells:
            cell.correctness = found
            cell.memory = parts.get(cell.pass_, {})
            task = Task(competitor, cell, problems, self.grad)
            task.build()
            self._warm_up(task)
            self.tasks.append(task)

    def _gate(self, competitor: Competitor) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        key = (competitor.name, competitor.op, self.grad, *_facts(self.plan.case))
        if key not in self.passed:
            before = set(self.passed)
            try:
                for attend, problems in self.smalls(competitor):
                    found |= gate(problems, attend, self.grad)
            except BaseException:  # what it was noted for on the way does not count
                for noted in set(self.passed) - before:
                    del self.passed[noted]
                raise
            self.passed[key] = found
        return dict(self.passed[key])

    def _warm_up(self, task: Task) -> None:
        """Compiles, fills caches, learns what a call costs the host and whether it hides on another stream."""
        timer, settings = self.machine.timer, self.settings
        work = task.work(0)
        begin = time.monotonic()
        returned, _, first = timer.wall(work)
        if first > 1e3 * settings.limit:
            raise TimeoutError(f"one call took {first / 1e3:.1f} s, more than {settings.limit:g}")
        walls = []
        for i in range(settings.warmup):
            if i >= 2 and time.monotonic() - begin > settings.warmup_seconds:
                break
            walls.append(timer.wall(task.work(i % 2)))
        if not walls:
            walls = [(returned, first, first)]
        task.enqueue_ms = sorted(w[0] for w in walls)[len(walls) // 2]
        quickest = min(walls, key=lambda w: w[2])
        task.cell.host_ms = sorted(w[2] for w in walls)[len(walls) // 2]
        hidden = min(w[2] - w[1] for w in walls)
        if timer.cuda and hidden > max(SIDE_STREAM_MS, SIDE_STREAM_SHARE * quickest[2]):
            raise Wrong(
                f"SIDE-STREAM: the device works on for {hidden:.3f} of {quickest[2]:.3f} ms after the call's own "
                "stream is done, where no event sees it"
            )
        task.spacer_ms = min(timing.LONGEST_SPACER_MS, 0.03 + 1.5 * task.enqueue_ms)

    # -------------------------------------------------------------------------------------------- sample

    @property
    def done(self) -> bool:
        return self.closed or not self.tasks

    def sample(self) -> None:
        """One round: every task that is not done once, in an order drawn anew."""
        with self.machine.on_stream():
            self._round()

    def _round(self) -> None:
        if self.round == self.exchange_at:
            self._exchange()
            self.check_until = self.round + 2
            self.exchange_at += self.rng.randint(8, 20)
        i = self.round % 2
        with timing.no_garbage_collection():
            for task in self.rng.sample(self.tasks, len(self.tasks)):
                if not task.stop and task in self.tasks:
                    self._sample(task, i)
        self.round += 1
        if all(task.stop for task in self.tasks):
            self._close()

    def _exchange(self) -> None:
        for pair in self.problems.values():
            exchange(*pair)
        for task in list(self.tasks):
            try:
                with task.competitor.pinned():
                    task.build()
            except BaseException as error:
                self._give_up(task, error)

    def _close(self) -> None:
        """One more exchange and one more call of everyone, checked; then what is learnt in passes of its own."""
        self._exchange()
        self._each(lambda task: task.check(0, self._call(task, 0).result))
        for task in self.tasks:  # what autograd keeps for a leaf belongs to the stream of its first forward still alive
            task.drop()
        self._each(self._afterwards)
        self.closed = True

    def _each(self, what: Callable[[Task], None]) -> None:
        for task in list(self.tasks):
            if task in self.tasks:
                try:
                    what(task)
                except BaseException as error:
                    self._give_up(task, error)

    def _give_up(self, task: Task, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        for other in [t for t in self.tasks if t.competitor is task.competitor and t.cell.pass_ == task.cell.pass_]:
            if other is task or isinstance(error, Wrong):  # what is wrong cold is wrong hot
                self._fail([other.cell], error)
                other.drop()
                self.tasks.remove(other)

    def _call(self, task: Task, i: int) -> timing.Sample:
        cold, work = task.cell.cache == "cold", task.work(i)
        with task.competitor.pinned():
            if not cold:  # others were in the cache since: the call before is one of its own
                work()
            sample = self.machine.timer.sample(work, cold=cold, spacer_ms=task.spacer_ms, tries=task.tries)
        task.spacer_ms = max(task.spacer_ms, sample.spacer_ms)
        if sample.late:  # however long it waited: it synchronises, so waiting is no use
            task.tries = 1
        patched = timing.intact()
        if patched:
            timing.repair()
            raise Wrong(patched)
        return sample

    def _sample(self, task: Task, i: int) -> None:
        begin = time.monotonic()
        try:
            sample = self._call(task, i)
            task.samples.append(sample.ms)
            if sample.clock_mhz is not None:
                task.clocks.append(sample.clock_mhz)
            task.spent += time.monotonic() - begin
            task.stop = self._why_stop(task)
            if self.round < max(self.check_until, 1) or task.stop:
                task.check(i, sample.result)
        except BaseException as error:
            self._give_up(task, error)

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

    def _afterwards(self, task: Task) -> None:
        """What is learnt in passes of its own: the device's time without the host, and what it ran."""
        timer = self.machine.timer

        def prepare() -> Callable[[], Any]:
            fresh = Task(task.competitor, task.cell, task.problems[:1], task.grad)
            fresh.build()
            return fresh.work(0)

        if timer.cuda:
            with task.competitor.pinned():
                if min(task.samples) < REPLAYED_MS:
                    task.cell.device_ms = timing.graph_ms(timer, prepare, cold=task.cell.cache == "cold")
                if self.kernels:
                    ran = timing.kernels_of(timer, prepare(), cold=task.cell.cache == "cold")
                    task.cell.kernels, task.cell.kernels_ms = ran

    # -------------------------------------------------------------------------------------------- finish

    def finish(self, run: schema.Run) -> list[schema.Cell]:
        """The cells, judged; those that did not get to the end are marked as interrupted."""
        nvml = self.machine.nvml
        state = {"throttle": sorted(set(self.throttled) | set(nvml.throttle()))} if nvml.nvml is not None else {}
        for name, value in (("power_w", nvml.power_w()), ("temperature_c", nvml.temperature_c())):
            if value is not None:
                state[name] = value  # type: ignore[assignment]
        started = {id(task.cell) for task in self.tasks}
        for task in self.tasks:
            cell = task.cell
            if not self.closed:
                cell.status, cell.reason = "interrupted", f"after {len(task.samples)} samples"
            cell.samples_ms, cell.clocks_mhz = task.samples, task.clocks
            if task.samples:
                cell.stats = timing.summary(task.samples, task.stop if self.closed else "interrupted")
                cell.stats |= {"enqueue": task.enqueue_ms} | state
            try:
                cell.resources = task.competitor.resources(cell.pass_)
            except Exception as error:  # a compiler's mood must not cost a measurement
                self.say(f"{cell.competitor}: no resources, {first_line(error)}")
        for cell in self.cells:
            if cell.status == "ok" and id(cell) not in started:
                cell.status, cell.reason = "interrupted", "before it began"
        judge(self.cells, run)
        for task in self.tasks:
            task.drop()
        self.problems.clear()
        self._collect_garbage()
        return self.cells


def _facts(case: dict[str, Any]) -> tuple[Any, ...]:
    """What the result of the small gate depends on: not how much there is, but how it is made up."""
    rest = {k: v for k, v in case.items() if k not in ("B", "H", "H_KV", "N")}
    group = case["H"] // case["H_KV"] if "H" in case and "H_KV" in case else 1
    return (group, *sorted((k, str(v)) for k, v in rest.items()))


def judge(cells: Sequence[schema.Cell], run: schema.Run) -> None:
    """Against physics and against each other, where the judging part is there."""
    try:
        from fulmen.bench import audit
    except ImportError:
        return
    for cell in cells:
        if cell.status == "ok":
            audit.judge(cell, run)
    audit.judge_group(cells, {run.run_id: run})
