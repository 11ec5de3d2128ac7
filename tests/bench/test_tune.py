"""`fulmen tune` without a GPU: kernels in Triton's interpreter, the CPU's clock, and a pool that compiles nothing."""

from __future__ import annotations

import io
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rich.console import Console

from fulmen import hardware
from fulmen.bench import Refused, tune
from fulmen.bench.timing import Timer

HOPPER = hardware.TARGETS[90]
SHAPE = "B=1,H=2,N=48,D=16"
JOBS = [(op, pass_) for op, passes in tune.PASSES.items() for pass_ in passes]


def job_of(op: str, pass_: str) -> tune.Job:
    return next(job for _, job in tune.jobs_of(op, (SHAPE,), "fp16", HOPPER) if job.pass_ == pass_)


@pytest.fixture
def timer() -> Timer:
    return Timer(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels are compiled, not interpreted")
@pytest.mark.parametrize(("op", "pass_"), JOBS)
def test_tiles_are_compared_and_timed(op: str, pass_: str, timer: Timer) -> None:
    job = job_of(op, pass_)
    order = tune.nearest_first(op, job.current())
    smaller = (32, 32, 4, 2)
    found = tune.candidates(job, [order[0], smaller], timer, math.inf)
    assert [(c.config, c.used) for c in found] == [(order[0], True), (smaller, False)]
    timed = tune.time(found, timer, until=0.0)
    assert all(3 <= len(c.samples) <= tune.ROUNDS for c in timed)
    console = Console(file=io.StringIO(), width=120)
    tune.show("title", timed, True, console)
    assert f"Config{order[0]}" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernels are compiled, not interpreted")
def test_tiles_that_are_wrong_or_do_not_run_are_no_candidates(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    job, true = job_of("lightning", "forward"), tune.bind
    used, wrong, broken, late = (64, 64, 4, 4), (32, 64, 4, 4), (16, 64, 4, 4), (64, 32, 4, 4)

    def bind(job: tune.Job, device: torch.device) -> tune.Bound:
        bound = true(job, device)

        def launches(config: tune.Tiles) -> list:
            if config == broken:
                raise RuntimeError("out of resources: shared memory")
            if config == late:
                raise AssertionError("not tried: the time is over")
            return [] if config == wrong else bound.launches(config)

        return bound._replace(launches=launches)

    monkeypatch.setattr(tune, "bind", bind)
    found = tune.candidates(job, [used, wrong, broken], timer, math.inf)
    assert [c.config for c in found] == [used]
    assert [c.config for c in tune.candidates(job, [used, late], timer, 0.0)] == [used]
    with pytest.raises(Refused, match="do not run at this shape: out of resources"):
        tune.candidates(job, [broken, used], timer, math.inf)


def test_the_tiles_in_use_come_first_and_the_nearest_next() -> None:
    order = tune.nearest_first("lightning", (64, 64, 4, 4))
    assert order[0] == (64, 64, 4, 4)
    assert set(order) == set(itertools.product(*tune.TILES["lightning"]))
    assert len(order) == len(set(order))
    assert (64, 64, 4, 3) in order[1:6]
    assert order[-1] in {(16, 128, 8, 2), (16, 32, 8, 2)}
    assert tune.nearest_first("lightning", (7, 64, 4, 4))[0] == (7, 64, 4, 4)


@pytest.mark.parametrize("seconds", [0.0, 0.3, math.inf])
def test_compiling_ends_with_its_time_and_has_the_first(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    order = tune.nearest_first("flash", (64, 64, 4, 2))

    def compile_one(job: tune.Job, config: tune.Tiles) -> None:
        time.sleep(0.15 if config == order[0] else 0.02)
        if config == order[2]:
            raise RuntimeError("does not fit")

    monkeypatch.setattr(tune, "compile_one", compile_one)
    with ThreadPoolExecutor(2) as pool:
        begin = time.monotonic()
        done = tune.compiled(job_of("flash", "dq"), order, pool, begin + seconds)
    assert done[0] == order[0]
    assert order[2] not in done
    assert len(done) == (1 if seconds == 0 else len(done)) <= len(order) - (seconds == math.inf)
    if seconds == math.inf:
        assert len(done) == len(order) - 1
    elif seconds:
        assert 1 < len(done) < len(order) - 1


def test_tiles_in_use_that_do_not_compile_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_one(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(tune, "compile_one", compile_one)
    with ThreadPoolExecutor(2) as pool, pytest.raises(Refused, match="no such instruction"):
        tune.compiled(job_of("flash", "dq"), [(64, 64, 4, 2)], pool, math.inf)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [("Q=3", "bf16", "has no Q"), ("N", "bf16", "key=value"), (SHAPE, "fp32", "bf16 and fp16"), (SHAPE, "i8", "bf16")],
)
def test_what_cannot_be_tuned_is_said(shape: str, dtype: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        tune.jobs_of("lightning", (shape,), dtype, HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["lightning", "flash"])
def test_a_bounded_run_on_a_gpu(op: str) -> None:
    console, begin = Console(file=io.StringIO(), width=120), time.monotonic()
    tune.tune(op, ("B=2,H=8,N=1024,D=64",), "bf16", False, 20.0, console)
    assert time.monotonic() - begin < 60
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("tiles tried") == len(tune.PASSES[op])
