from __future__ import annotations

import functools
import gc
import time
from statistics import median

import numpy
import pytest
import torch

from fulmen.bench import audit, timing

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def timer() -> timing.Timer:
    return timing.Timer(CPU)


def test_a_sample_is_as_long_as_the_work(timer: timing.Timer) -> None:
    short = min(timer.sample(lambda: time.sleep(0.004)).ms for _ in range(3))
    assert 4 <= short < 60
    assert timer.sample(lambda: "answer").result == "answer"


def test_wall_times_come_in_order(timer: timing.Timer) -> None:
    returned, stream, done = timer.wall(lambda: time.sleep(0.002))
    assert 2 <= returned <= stream <= done


def test_cold_overwrites_the_cache(timer: timing.Timer) -> None:
    assert timer.l2_bytes == timing.CPU_CACHE
    timer.cache.fill_(1)
    timer.sample(lambda: None, cold=False)
    assert timer.cache[0] == 1
    timer.sample(lambda: None, cold=True)
    assert not timer.cache.any()


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = numpy.random.default_rng(0)
    hits = 0
    for _ in range(300):
        low, high = audit.median_interval(sorted(rng.lognormal(0.0, 0.1, 40)))
        hits += low <= 1.0 <= high
    assert 0.90 <= hits / 300 <= 0.99


def test_summary_keeps_every_sample_and_counts_the_far_ones() -> None:
    samples = [1.0 + i / 1e4 for i in range(40)] + [5.0]
    s = timing.summary(samples, "samples")
    assert s["n"] == 41
    assert s["outliers"] == 1
    assert s["median"] == median(samples)
    assert s["min"] == 1.0
    assert s["low"] <= s["median"] <= s["high"] < 1.01
    assert s["p20"] < s["p80"]
    assert s["stop"] == "samples"


def test_one_sample_is_its_own_interval() -> None:
    assert timing.summary([2.0], "time") | {"n": 1, "low": 2.0, "high": 2.0} == timing.summary([2.0], "time")


def test_clocks_are_bound_when_the_module_is_imported(monkeypatch: pytest.MonkeyPatch, timer: timing.Timer) -> None:
    assert timing.restore_clocks() is None
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
    assert timer.sample(lambda: time.sleep(0.002)).ms >= 2  # measured all the same
    assert "time.perf_counter_ns was replaced" in str(timing.restore_clocks())
    assert timing.restore_clocks() is None
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *_: 1e-9)
    assert "elapsed_time was replaced" in str(timing.restore_clocks())
    monkeypatch.setattr(timing, "_now", lambda: 0)
    assert "own clock" in str(timing.restore_clocks())
    assert timing.restore_clocks() is None


def test_no_garbage_is_collected_while_timing() -> None:
    with timing.no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_cpu_has_no_graphs_and_no_kernels(timer: timing.Timer) -> None:
    assert timing.graph_ms(timer, lambda: lambda: None) is None
    assert timing.Ran.of(timing.profiled(timer, lambda: None)) == ([], None, {})


def test_a_loop_is_as_long_as_its_calls(timer: timing.Timer) -> None:
    calls: list[int] = []
    ms = timing.loop_ms(timer, lambda: calls.append(0) or time.sleep(0.001), calls=3, rounds=2)
    assert len(calls) == 15
    assert 1 <= ms < 20


def test_kernels_are_told_from_what_empties_the_cache() -> None:
    spin, fill, one, two = "at::cuda::(anonymous namespace)::spin_kernel(long)", "fill", "one", "two"
    first = [(fill, 70.0), (spin, 100.0), (one, 9.0), (two, 5.0), (spin, 1.0)]  # as slow as a first call is
    again = [(fill, 70.0), (spin, 100.0), (one, 3.0), (two, 1.0), (spin, 1.0)]
    fast = [(fill, 70.0), (spin, 100.0), (one, 2.0), (two, 1.5), (spin, 1.0)]
    assert timing.Ran.of([*first, *again, *fast, *again])[:2] == ([one, two], 4.0 / 1e3)
    assert timing.Ran.of(first)[:2] == ([one, two], 14.0 / 1e3)
    lost = [x for x in again if x[0] != spin]
    for broken in ([], again[:-1], [*again, *again[:-1]], [fill, *lost][1:], [(spin, 100.0), (spin, 1.0)]):
        assert timing.Ran.of(broken) == ([], None, {})


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    timer = timing.Timer(torch.device("cuda", 0))
    a = torch.randn(2048, 2048, device="cuda")
    ms = median(timer.sample(lambda: a @ a).ms for _ in range(10))
    device = timing.graph_ms(timer, lambda: lambda: a @ a)
    assert device is not None
    assert 0.5 < device / ms < 1.5
    b = torch.randn(256, 256, device="cuda")
    for cold in (False, True):
        names, alone, _ = timing.Ran.of(timing.profiled(timer, lambda: (a @ a).add_(1.0), cold))
        assert len(names) == 2
        assert alone is not None
        assert 0.5 < alone / ms < 1.5
        names, alone, _ = timing.Ran.of(timing.profiled(timer, lambda: b.add(1.0), cold))
        assert len(names) == 1
        assert alone is not None
        assert 0 < alone < 0.05
    assert timer.overhead_ms() < 0.05
    returned, stream, done = timer.wall(lambda: torch.cuda._sleep(2_000_000))
    assert returned < 0.5 < stream <= done


@pytest.mark.gpu
def test_a_host_that_is_late_gets_a_longer_spacer() -> None:
    timer = timing.Timer(torch.device("cuda", 0))
    slow = timer.sample(lambda: time.sleep(0.002), spacer_ms=1.0)
    assert not slow.late
    assert slow.spacer_ms > 2
    assert slow.ms < 1, "the device waited for the host"
    waits = timer.sample(lambda: torch.cuda.synchronize(), spacer_ms=0.1, tries=2)
    assert waits.late
    assert waits.spacer_ms == 0.2


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_allocator_in_order() -> None:
    timer = timing.Timer(torch.device("cuda", 0))
    x = torch.ones(1 << 20, device="cuda")
    assert timing.graph_ms(timer, lambda: lambda: x.sum().item()) is None  # seen before it is tried
    calls = []
    work = lambda: calls.append(0) or (torch.cuda.synchronize() if len(calls) > 1 else x + 1)  # noqa: E731
    assert timing.graph_ms(timer, lambda: work) is None  # fails under capture
    assert torch.randn(3, device="cuda").isfinite().all()
    block = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    before = torch.cuda.memory_reserved()
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - (1 << 30)
    assert timing.graph_ms(timer, lambda: lambda: x + 1) is not None


@pytest.mark.gpu
def test_a_backward_whose_leaves_were_used_before_is_captured() -> None:
    timer = timing.Timer(torch.device("cuda", 0))
    with torch.cuda.stream(torch.cuda.Stream()):
        w = torch.randn(512, 512, device="cuda", requires_grad=True)
        kept = w @ w  # keeps what autograd has for w on this stream
        ms = timing.graph_ms(timer, lambda: functools.partial(torch.autograd.grad, (w @ w).sum(), w, retain_graph=True))
    assert ms is not None
    del kept
