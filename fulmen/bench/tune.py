"""`fulmen tune`: times tiles of our Triton kernels on this GPU and proposes rows for the tables of `policy.py`.

Nothing is changed: a person puts the rows into `policy.py` of the operation, with the measurement beside them.
Candidates are compiled on all cores, those nearest to the tiles in use first. The result of each is compared with that
of the tiles in use before it is timed. `seconds` bounds the whole: what was not compiled in its share is left out.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import random
import time as clock
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fulmen import dispatch, hardware, launch
from fulmen.bench import Refused, adapters, cases, kernels
from fulmen.bench.timing import Timer
from fulmen.flash.spec import Residuals as FlashResiduals
from fulmen.lightning.spec import Residuals as LightningResiduals

ROUNDS = 15
HOPELESS = 2.0  # times slower than the fastest in the first rounds: timed no further
SAME = 0.02  # relative difference of results between tiles, of 16-bit inputs
COMPILING = 0.75  # of a pass's share of the seconds
PASSES = {"lightning": ("forward", "backward"), "flash": ("forward", "dq", "dkdv")}
SHAPES = {
    "lightning": ("B=4,H=32,N=8192,D=64", "B=2,H=32,N=8192,D=128", "B=1,H=32,N=8192,D=256"),
    "flash": ("B=4,H=32,N=4096,D=64", "B=2,H=16,N=8192,D=128", "B=2,H=16,N=4096,D=256"),
}
TILES = {  # (chunk or own rows, columns or walked rows, warps, stages)
    "lightning": ((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4)),
    "flash": ((64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)),
}
Tiles = tuple[int, ...]


@dataclass(eq=False)
class Candidate:
    config: Tiles
    work: Callable[[], Any]
    used: bool  # the table's row
    samples: list[float] = field(default_factory=list)
    spacer_ms: float = 0.1

    @property
    def ms(self) -> float:
        return median(self.samples)


def nearest_first(op: str, current: Tiles) -> list[Tiles]:
    """The tiles in use, then all others by how many steps away they are: doublings, or stages."""

    def steps(c: Tiles) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(c[:3], current[:3], strict=True)) + abs(c[3] - current[3])

    return [current, *sorted((c for c in itertools.product(*TILES[op]) if c != current), key=steps)]


# --------------------------------------------------------------------------------------------- launches of a pass
class Job(NamedTuple):
    """A pass of an operation at a shape on some hardware."""

    op: str
    case: dict[str, Any]
    pass_: str
    hw: hardware.Hardware

    def tile(self, config: Tiles | None = None) -> Any:
        """What the kernel is launched with; with `config`, in this pass."""
        spec, policy = adapters.of(self.op).spec(self.case, torch.device("meta")), dispatch.policy(self.op)
        tile = policy.choose(spec, self.hw, "triton").tile
        if self.op == "flash":
            tile = tile._replace(joined=None)  # each pass has a launch of its own here
        if config is None:
            return tile
        one = policy.TritonTile(*config)
        return one if self.op == "lightning" else tile._replace(**{self.pass_: one})

    def current(self) -> Tiles:
        tile = self.tile()
        return tuple(tile if self.op == "lightning" else getattr(tile, self.pass_))


class Bound(NamedTuple):
    """A pass on tensors, made once for all tiles."""

    launches: Callable[[Tiles], Sequence[Any]]  # with some tiles
    results: list[Tensor]  # what they write
    before: Sequence[Any] = ()  # the launches of what they read


def bind(job: Job, device: torch.device) -> Bound:
    """Random tensors; on the device "meta" shapes only, which is enough to compile."""
    adapter, module = adapters.of(job.op), importlib.import_module(f"fulmen.{job.op}.triton")
    given = adapter.problem(job.case, device, 1).x
    q, k, v, do = (t.detach() for t in (given.q, given.k, given.v, given.do))
    slopes = getattr(given, "decay", None)
    spec, o = adapter.spec(job.case, device), torch.empty_like(do)
    if job.op == "lightning":
        x = LightningResiduals(q, k, v, slopes, None, None)
        if job.pass_ == "forward":
            return Bound(lambda config: module.forward_launches(spec, job.tile(config), x, o, None).launches, [o])
        grads = module.Gradients.empty(spec, x, None)
        return Bound(
            lambda config: module.backward_launches(spec, job.tile(config), x, do, None, grads, None).launches,
            [t for t in grads if t is not None],
        )
    y, lse = FlashResiduals(q, k, v), torch.empty(q.shape[:3], dtype=torch.float32, device=device)
    dq, dk, dv, delta = (torch.empty_like(t) for t in (q, k, v, lse))
    back = module.Backward(o, lse, do, None, delta, dq, dk, dv)
    if job.pass_ == "forward":
        return Bound(lambda config: [module.forward_launch(spec, job.tile(config), y, o, lse)], [o])
    at, results = (0, [dq]) if job.pass_ == "dq" else (1, [dk, dv])
    first = module.forward_launch(spec, job.tile(), y, o, lse)
    makes_delta = module.backward_launches(spec, job.tile(), y, back)[0]
    return Bound(
        lambda config: [module.backward_launches(spec, job.tile(config), y, back)[at]], results, [first, makes_delta]
    )


def jobs_of(op: str, shapes: Sequence[str], dtype: str, hw: hardware.Hardware) -> list[tuple[str, Job]]:
    found = []
    for text in shapes or SHAPES[op]:
        try:
            case = adapters.complete(op, {"dtype": dtype} | cases.shape(text), torch.device("cuda"))
        except (ValueError, Refused) as error:
            raise Refused(f"--shape {text}: {error}") from None
        if adapters.dtype_of(case).itemsize != 2:
            raise Refused(f"--dtype {dtype}: tiles are tuned for bf16 and fp16")
        found += [(text, Job(op, case, pass_, hw)) for pass_ in PASSES[op]]
    return found


# --------------------------------------------------------------------------------------- compiling and timing
def compile_one(job: Job, config: Tiles) -> None:
    """In a process of its own: the binary goes to Triton's cache on disk, where the run finds it."""
    for one in bind(job, torch.device("meta")).launches(config):
        kernels.compiled(one, job.hw.arch)


def compiled(job: Job, order: Sequence[Tiles], pool: Executor, until: float) -> list[Tiles]:
    """Those of `order` that compile before the time `until`, the first in any case.

    The others do not fit, or the compiler gives up, or the time is over: then what runs goes on for a later pass.
    """
    wanted = order if clock.monotonic() < until else order[:1]
    futures = {pool.submit(compile_one, job, config): config for config in wanted}
    if (error := next(iter(futures)).exception()) is not None:
        raise Refused(f"the tiles in use, {order[0]}, do not compile: {error}")
    wait(futures, None if until == math.inf else max(0.0, until - clock.monotonic()))
    done = [future for future in futures if not future.cancel() and future.done() and future.exception() is None]
    return [futures[future] for future in done]


def candidates(job: Job, configs: Sequence[Tiles], timer: Timer, until: float) -> list[Candidate]:
    """Those that give the results of the first, the tiles in use; as many as can be tried by `until`."""
    bound = bind(job, timer.device)
    launch.run_all(bound.before, timer.device)
    found: list[Candidate] = []
    wanted: list[Tensor] = []
    for config in configs:
        if wanted and clock.monotonic() > until:
            break
        try:
            launches = bound.launches(config)
            for x in bound.results:
                x.fill_(float("nan"))
            launch.run_all(launches, timer.device)
            timer.synchronize()
        except Exception as error:  # more shared memory than there is, say
            if not wanted:
                raise Refused(f"the tiles in use, {config}, do not run at this shape: {error}") from error
            continue
        wanted = wanted or [x.clone() for x in bound.results]
        both = zip(bound.results, wanted, strict=True)
        if max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in both) < SAME:
            found.append(
                Candidate(config, functools.partial(launch.run_all, launches, timer.device), config == configs[0])
            )
    if not found:
        raise Refused(f"the tiles in use of {job.op} {job.pass_} do not give finite results at this shape")
    return found


def time(found: list[Candidate], timer: Timer, until: float) -> list[Candidate]:
    """Interleaved, in an order drawn anew each round, with cold L2; those far behind after two rounds are dropped."""
    for turn in range(ROUNDS + 2):
        if turn == 2:
            best = min(c.ms for c in found)
            found = [c for c in found if c.used or c.ms < HOPELESS * best]
            for candidate in found:
                candidate.samples.clear()  # they warmed up
        for candidate in random.sample(found, len(found)):
            sample = timer.sample(candidate.work, spacer_ms=candidate.spacer_ms)
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
    begin, console = clock.monotonic(), console or Console()
    if not torch.cuda.is_available():
        raise Refused("tuning times kernels on a GPU, and torch sees none here (see `fulmen doctor`)")
    device = torch.device("cuda", torch.cuda.current_device())
    jobs = jobs_of(op, shapes, dtype, hardware.of(device))
    timer = Timer(device)
    timer.burn_in()
    pool = kernels.new_pool(kernels.workers())
    try:
        for number, (text, job) in enumerate(jobs):
            now = clock.monotonic()
            share = math.inf if seconds is None else max(0.0, begin + seconds - now) / (len(jobs) - number)
            order = nearest_first(op, job.current())
            ready = compiled(job, order, pool, now + COMPILING * share)
            tried = candidates(job, ready, timer, now + share)
            show(f"{op} {text} {dtype} {job.pass_}", time(tried, timer, now + share), everything, console)
            why = "do not fit" if seconds is None else f"do not fit, or not into {share:.0f} s (--seconds)"
            rest = f"; the others {why}" if len(tried) < len(order) else ""
            console.print(f"{len(tried)} of {len(order)} tiles tried{rest}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()  # what it compiles nobody waits for


def show(title: str, found: Sequence[Candidate], everything: bool, console: Console) -> None:
    ranked = sorted(found, key=lambda c: c.ms)
    best, used = ranked[0], next(c for c in ranked if c.used)
    table = Table("Config", "ms", "speedup", title=title)
    for candidate in ranked if everything else dict.fromkeys([*ranked[:3], used]):
        ratio = f"{used.ms / candidate.ms:.3f}x" + (" (in use)" if candidate.used else "")
        table.add_row(f"Config{candidate.config}", f"{candidate.ms:.4f}", ratio)
    console.print(table)
    if best.ms < 0.98 * used.ms:
        console.print(f"propose: Config{best.config},  # {best.ms:.4f} ms, before {used.ms:.4f}")
    else:
        console.print("the table's row is the fastest, or within 2 % of it")
