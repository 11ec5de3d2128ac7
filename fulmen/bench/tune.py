"""`fulmen tune`: times tile choices of our Triton kernels on this GPU and proposes rows for their tables.

Nothing is changed: a person looks at the rows, and puts them into `policy.py` of the operation with the measurement
beside them. Candidates are compiled on all cores, those nearest to the tiles in use first; the result of each is
compared with that of the tiles in use before it is timed. `seconds` bounds the whole: what was not compiled in its
share of the time is left out, and counted.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import random
import signal
import time as clock
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from fulmen.bench import cases

ROUNDS = 15
HOPELESS = 2.0  # times slower than the fastest in the first rounds: timed no further
SAME = 0.02  # relative difference of results between tiles, of 16-bit inputs
COMPILING = 0.75  # of a pass's share of the seconds
PASSES = {"lightning": ("forward", "backward"), "flash": ("forward", "dq", "dkdv")}
SHAPES = {
    "lightning": ("B=4,H=32,N=8192,D=64", "B=2,H=32,N=8192,D=128", "B=1,H=32,N=8192,D=256"),
    "flash": ("B=4,H=32,N=4096,D=64", "B=2,H=16,N=8192,D=128", "B=2,H=16,N=4096,D=256"),
}
Tiles = tuple[int, ...]


class CannotTune(Exception):
    """Why not, in words."""


@dataclass(eq=False)
class Candidate:
    config: Tiles
    work: Callable[[], Any]
    samples: list[float] = field(default_factory=list)
    used: bool = False  # what the table says today
    spacer_ms: float = 0.1

    @property
    def ms(self) -> float:
        return median(self.samples)


def tiles(op: str) -> Iterator[Tiles]:
    """(chunk or own rows, columns or walked rows, warps, stages)"""
    if op == "lightning":
        yield from itertools.product((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    else:
        yield from itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))


def nearest_first(op: str, current: Tiles) -> list[Tiles]:
    """The tiles in use, then all others by how many steps away they are: doublings, or stages."""

    def steps(c: Tiles) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(c[:3], current[:3], strict=True)) + abs(c[3] - current[3])

    return [current, *sorted((c for c in tiles(op) if c != current), key=steps)]


# --------------------------------------------------------------------------------------------- launches of a pass


class Job(NamedTuple):
    """A pass of an operation at a shape."""

    op: str
    case: dict[str, Any]
    pass_: str

    @property
    def module(self) -> Any:
        import importlib

        return importlib.import_module(f"fulmen.{self.op}.triton")

    @property
    def adapter(self) -> Any:
        from fulmen.bench import adapters

        return adapters.of(self.op)

    def tile(self, hw: Any, config: Tiles | None = None) -> Any:
        """What the kernel is launched with; with `config`, in this pass."""
        import torch

        from fulmen import dispatch

        spec, policy = self.adapter.spec(self.case, torch.device("meta")), dispatch.policy(self.op)
        tile = policy.choose(spec, hw, "triton").tile
        if config is None:
            return tile
        one = policy.TritonTile(*config)
        return one if self.op == "lightning" else tile._replace(**{self.pass_: one})

    def current(self, hw: Any) -> Tiles:
        tile = self.tile(hw)
        return tuple(tile if self.op == "lightning" else getattr(tile, self.pass_))


@dataclass
class Arguments:
    """Random tensors of a job, made once for all tiles: `x` what a pass reads, `results` what it writes.

    On the device "meta" they are shapes only, which is enough to compile.
    """

    spec: Any
    x: Any  # the op's Residuals
    do: Any
    outputs: Any  # forward: o and lse; backward: Gradients, or flash's Backward
    results: list[Any]

    @classmethod
    def of(cls, job: Job, device: Any) -> Arguments:
        import torch

        from fulmen.bench.adapters import dtype_of, shapes

        if device.type == "meta":
            dtype = dtype_of(job.case)
            q, k, v, do = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes(job.case))
            slopes = torch.empty(job.case["H"], device=device) if job.case.get("decay") else None
        else:
            given = job.adapter.problem(job.case, device, 1).x
            q, k, v, do = (t.detach() for t in (given.q, given.k, given.v, given.do))
            slopes = getattr(given, "decay", None)
        spec = job.adapter.spec(job.case, device)
        if job.op == "lightning":
            from fulmen.lightning.op import Residuals as Lightning

            x: Any = Lightning(q, k, v, slopes, None, None)
            if job.pass_ == "forward":
                o = torch.empty_like(do)
                return cls(spec, x, do, o, [o])
            grads = job.module.Gradients.empty(spec, x)
            return cls(spec, x, do, grads, list(grads))
        from fulmen.flash.op import Residuals

        x, o = Residuals(q, k, v), torch.empty_like(do)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
        if job.pass_ == "forward":
            return cls(spec, x, do, (o, lse), [o])
        dq, dk, dv, delta = (torch.empty_like(t) for t in (q, k, v, lse))
        y = job.module.Backward(o, lse, do, None, delta, dq, dk, dv)
        return cls(spec, x, do, y, [dq] if job.pass_ == "dq" else [dk, dv])

    def before(self, job: Job, hw: Any) -> None:
        """What the backward of softmax attention reads: o, lse and delta."""
        if job.op == "flash" and job.pass_ != "forward":
            run([job.module.forward_launch(self.spec, job.tile(hw), self.x, self.outputs.o, self.outputs.lse)])
            run(job.module.backward_launches(self.spec, job.tile(hw), self.x, self.outputs)[:1])

    def launches(self, job: Job, hw: Any, config: Tiles) -> list[Any]:
        module, tile = job.module, job.tile(hw, config)
        if job.op == "lightning":
            if job.pass_ == "forward":
                return list(module.forward_launches(self.spec, tile, self.x, self.outputs, None))
            return list(module.backward_launches(self.spec, tile, self.x, self.do, None, self.outputs, None))
        if job.pass_ == "forward":
            return [module.forward_launch(self.spec, tile, self.x, *self.outputs)]
        both = module.backward_launches(self.spec, tile, self.x, self.outputs)
        return [both[0] if job.pass_ == "dq" else both[1]]


def run(launches: Sequence[Any]) -> None:
    from fulmen.launch import run as one

    for launch in launches:
        one(launch)


# ------------------------------------------------------------------------------------------------------ compiling


def compile_one(job: Job, hw: Any, config: Tiles) -> None:
    """In a process of its own: the binary goes to Triton's cache on disk, where the run finds it."""
    import torch

    from fulmen.bench import resources

    for launch in Arguments.of(job, torch.device("meta")).launches(job, hw, config):
        resources.compiled(launch, hw.arch)


def compiled(job: Job, hw: Any, order: Sequence[Tiles], pool: Executor, workers: int, until: float) -> list[Tiles]:
    """Those of `order` that compile before the time `until`, the first in any case."""
    done: list[Tiles] = []
    waiting = list(order)
    running: dict[Any, Tiles] = {}
    while waiting or running:
        while waiting and len(running) < workers and (clock.monotonic() < until or waiting[0] == order[0]):
            config = waiting.pop(0)
            running[pool.submit(compile_one, job, hw, config)] = config
        if not running:
            break
        left = max(0.0, until - clock.monotonic()) if order[0] in done and until < math.inf else None
        finished, _ = wait(running, left, FIRST_COMPLETED)
        for future in finished:
            config = running.pop(future)
            if future.exception() is None:  # otherwise it does not fit, or the compiler gives up: no candidate
                done.append(config)
            elif config == order[0]:
                raise CannotTune(f"the tiles in use, {config}, do not compile: {future.exception()}")
        if not finished:  # out of time: what still runs goes on for a later pass, and is not waited for
            break
    return [config for config in order if config in done]


def new_pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, signal.signal, (signal.SIGINT, signal.SIG_DFL))  # Ctrl-C: no traces


# --------------------------------------------------------------------------------------------------------- timing


def candidates(job: Job, hw: Any, configs: Sequence[Tiles], machine: Any, until: float) -> list[Candidate]:
    """Those that give the results of the first, which are the tiles in use; as many as can be tried by `until`."""
    arguments = Arguments.of(job, machine.device)
    arguments.before(job, hw)
    found: list[Candidate] = []
    wanted: list[Any] = []
    for config in configs:
        if wanted and clock.monotonic() > until:
            break
        try:
            launches = arguments.launches(job, hw, config)
            for x in arguments.results:
                x.fill_(float("nan"))
            run(launches)
            machine.timer.synchronize()
        except Exception as error:  # more shared memory than there is, say
            if not wanted:
                raise CannotTune(f"the tiles in use, {config}, do not run at this shape: {error}") from error
            continue
        if not wanted:
            wanted = [x.clone() for x in arguments.results]
        worst = max(
            float((x.float() - y.float()).norm() / y.float().norm())
            for x, y in zip(arguments.results, wanted, strict=True)
        )
        if worst < SAME:
            work = lambda launches=launches: run(launches)  # noqa: E731
            found.append(Candidate(config, work, used=config == configs[0]))
    if not found:
        raise CannotTune(f"the tiles in use of {job.op} {job.pass_} do not give finite results at this shape")
    return found


def time(found: list[Candidate], machine: Any, until: float) -> list[Candidate]:
    """In turns, in an order drawn anew each round, with cold L2; those far behind after two rounds have no more."""
    for turn in range(ROUNDS + 2):
        if turn == 2:
            best = min(c.ms for c in found)
            found = [c for c in found if c.used or c.ms < HOPELESS * best]
            for candidate in found:
                candidate.samples.clear()  # they warmed up
        for candidate in random.sample(found, len(found)):
            sample = machine.timer.sample(candidate.work, spacer_ms=candidate.spacer_ms)
            candidate.spacer_ms = max(candidate.spacer_ms, sample.spacer_ms)
            candidate.samples.append(sample.ms)
        if turn >= 4 and clock.monotonic() > until:
            break
    return found


def tune(
    op: str, shapes: Sequence[str], dtype: str, everything: bool, seconds: float | None = None,
    console: Console | None = None,
) -> None:  # fmt: skip
    """`seconds`: for all of it; every pass of every shape has an equal share of what is left when it begins."""
    begin = clock.monotonic()
    console = console or Console()
    import torch

    if not torch.cuda.is_available():
        raise CannotTune("tuning times kernels on a GPU, and torch sees none here (see `fulmen doctor`)")
    from fulmen import hardware
    from fulmen.bench.group import Machine

    device = torch.device("cuda", torch.cuda.current_device())
    jobs = jobs_of(op, shapes, dtype)
    hw, machine = hardware.of(device), Machine.of(device)
    machine.burn_in()
    workers = max(1, min(os.cpu_count() or 1, 14))
    pool = new_pool(workers)
    try:
        for number, (text, job) in enumerate(jobs):
            now = clock.monotonic()
            share = math.inf if seconds is None else max(0.0, begin + seconds - now) / (len(jobs) - number)
            order = nearest_first(op, job.current(hw))
            ready = compiled(job, hw, order, pool, workers, now + COMPILING * share)
            tried = candidates(job, hw, ready, machine, now + share)
            show(f"{op} {text} {dtype} {job.pass_}", time(tried, machine, now + share), everything, console)
            why = "do not fit" if seconds is None else f"do not fit, or not into {share:.0f} s (--seconds)"
            rest = f"; the others {why}" if len(tried) < len(order) else ""
            console.print(f"{len(tried)} of {len(order)} tiles tried{rest}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()  # what it compiles nobody waits for


def jobs_of(op: str, shapes: Sequence[str], dtype: str) -> list[tuple[str, Job]]:
    from fulmen.bench import adapters

    adapter, found = adapters.of(op), []
    for text in shapes or SHAPES[op]:
        try:
            given = cases.shape(text)
            unknown = sorted(set(given) - set(adapter.KEYS))
            if unknown:
                raise ValueError(f"--shape: {op} has no {', '.join(unknown)}; it has {', '.join(adapter.KEYS)}")
            case = adapter.complete({"dtype": cases.DTYPES.get(dtype, dtype)} | given)
            if adapters.dtype_of(case).itemsize != 2:
                raise ValueError(f"--dtype {dtype}: tiles are tuned for bf16 and fp16")
        except (ValueError, cases.BadSuite) as error:
            raise CannotTune(str(error)) from None
        found += [(text, Job(op, case, pass_)) for pass_ in PASSES[op]]
    return found


def show(title: str, found: Sequence[Candidate], everything: bool, console: Console) -> None:
    ranked = sorted(found, key=lambda c: c.ms)
    used = next((c for c in ranked if c.used), None)
    table = Table("Config", "ms", "against today's", title=title)
    for candidate in ranked if everything else dict.fromkeys([*ranked[:3], *([used] if used else [])]):
        ratio = f"{used.ms / candidate.ms:.3f}x" if used else "-"
        table.add_row(
            f"Config{candidate.config}", f"{candidate.ms:.4f}", f"{ratio} (today's)" if candidate.used else ratio
        )
    console.print(table)
    best = ranked[0]
    if used is None or best.ms < 0.98 * used.ms:
        before = "" if used is None else f", before {used.ms:.4f}"
        console.print(f"propose: Config{best.config},  # {best.ms:.4f} ms{before}")
    else:
        console.print("the table's row is the fastest, or within 2 % of it")
