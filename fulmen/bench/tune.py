"""`fulmen tune`: times tile choices of our Triton kernels on this GPU and proposes rows for their config tables.

Nothing is changed: a person looks at the rows, and puts them into `config` of the kernel's file with the measurement
beside them. Each candidate's result is compared with that of the tiles in use before it is timed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fulmen.bench import cases

ROUNDS = 15
SAME = 0.02  # relative difference of results between tiles, of 16-bit inputs
SHAPES = {
    "lightning": ("B=4,H=32,N=8192,D=64", "B=2,H=32,N=8192,D=128", "B=1,H=32,N=8192,D=256"),
    "flash": ("B=4,H=32,N=4096,D=64", "B=2,H=16,N=8192,D=128", "B=2,H=16,N=4096,D=256"),
}


class CannotTune(Exception):
    """Why not, in words."""


@dataclass(eq=False)
class Candidate:
    config: tuple[int, ...]
    work: Callable[[], Any]
    samples: list[float] = field(default_factory=list)
    used: bool = False  # what the table says today

    @property
    def ms(self) -> float:
        return median(self.samples)


def tiles(op: str) -> Iterator[tuple[int, ...]]:
    """(chunk or own rows, columns or walked rows, warps, stages)"""
    if op == "lightning":
        yield from itertools.product((16, 32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    else:
        yield from itertools.product((64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))


@contextmanager
def using(module: Any, config: tuple[int, ...]) -> Iterator[None]:
    """The kernel's `config` answers with this one."""
    true = module.config
    module.config = lambda *_, **__: module.Config(*config)
    try:
        yield
    finally:
        module.config = true


def tune(op: str, shapes: Sequence[str], dtype: str, everything: bool, console: Console | None = None) -> None:
    console = console or Console()
    import torch

    if not torch.cuda.is_available():
        raise CannotTune("tuning times kernels on a GPU, and torch sees none here (see `fulmen doctor`)")
    import importlib

    from fulmen import hardware
    from fulmen.bench import adapters
    from fulmen.bench.group import Machine

    device = torch.device("cuda", torch.cuda.current_device())
    machine, adapter = Machine.of(device), adapters.of(op)
    module = importlib.import_module(f"fulmen.{op}.triton")
    machine.burn_in()
    for text in shapes or SHAPES[op]:
        try:
            case = adapter.complete({"dtype": cases.DTYPES.get(dtype, dtype)} | cases.shape(text))
        except (ValueError, cases.BadSuite) as error:
            raise CannotTune(str(error)) from None
        for pass_ in ("forward", "dq", "dkdv") if op == "flash" else ("forward", "backward"):
            found = candidates(op, module, adapter, case, pass_, hardware.of(device), console)
            time(found, machine, console)
            show(f"{op} {text} {dtype} {pass_}", found, everything, console)


def candidates(
    op: str, module: Any, adapter: Any, case: dict[str, Any], pass_: str, hw: Any, console: Console
) -> list[Candidate]:
    """Those that compile, fit and give the results of the tiles in use."""
    import torch

    current = module.config(adapter.spec(case, torch.device("cuda")), hw, *([pass_] if op == "flash" else []))
    every = [tuple(current), *(c for c in tiles(op) if c != tuple(current))]
    found: list[Candidate] = []
    wanted: list[Any] = []
    for config in track(every, f"{op} {pass_}: compiling", console=console, transient=True):
        try:
            launches, results = launches_of(op, module, adapter, case, pass_, hw, config)
            for x in results:
                x.fill_(float("nan"))
            run(launches)
            torch.cuda.synchronize()
        except Exception:  # does not fit, or the compiler gives up: no candidate
            continue
        if not wanted:
            wanted = [x.clone() for x in results]
        worst = max(
            float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(results, wanted, strict=True)
        )
        if worst < SAME:
            found.append(Candidate(config, lambda launches=launches: run(launches), used=config == tuple(current)))  # type: ignore[misc]
    if not found:
        raise CannotTune(f"no tiles of {op} {pass_} work for this shape")
    return found


def launches_of(
    op: str, module: Any, adapter: Any, case: dict[str, Any], pass_: str, hw: Any, config: tuple[int, ...]
) -> tuple[list[Any], list[Any]]:
    """The launches of a pass on random arguments, and what they write."""
    import torch

    from fulmen.lightning.op import Residuals as LightningResiduals

    device = torch.device("cuda")
    x = adapter.problem(case, device, 1).x
    q, k, v, do = (t.detach() for t in (x.q, x.k, x.v, x.do))
    spec = adapter.spec(case, device)
    if op == "lightning":
        residuals: Any = LightningResiduals(q, k, v, x.decay, None, None)
        o, grads = torch.empty_like(do), module.Gradients.empty(spec, residuals)
        with using(module, config):
            if pass_ == "forward":
                return module.forward_launches(spec, hw, residuals, o, None), [o]
            launches = module.backward_launches(spec, hw, residuals, do, None, grads, None)
        return launches, [grads.dq, grads.dk, grads.dv]
    from fulmen.flash.op import Residuals

    residuals, o, lse = Residuals(q, k, v), torch.empty_like(do), torch.empty(q.shape[:3], device=device)
    if pass_ == "forward":
        with using(module, config):
            return [module.forward_launch(spec, hw, residuals, o, lse)], [o]
    dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    backward = module.Backward(o, lse, do, None, delta, dq, dk, dv)
    run([module.forward_launch(spec, hw, residuals, o, lse)])
    run(module.backward_launches(spec, hw, residuals, backward)[:1])  # o, lse and delta as dkdv reads them
    with using(module, config):
        both = module.backward_launches(spec, hw, residuals, backward)
    return ([both[0]], [dq]) if pass_ == "dq" else ([both[1]], [dk, dv])


def run(launches: Sequence[Any]) -> None:
    from fulmen.launch import run as one

    for launch in launches:
        one(launch)


def time(found: Sequence[Candidate], machine: Any, console: Console) -> None:
    """In turns, in an order drawn anew each round, with cold L2."""
    for turn in track(range(ROUNDS + 2), "timing", console=console, transient=True):
        for candidate in random.sample(list(found), len(found)):
            sample = machine.timer.sample(candidate.work)
            if turn >= 2:
                candidate.samples.append(sample.ms)


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
