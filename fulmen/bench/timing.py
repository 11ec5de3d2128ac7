"""Clocks: how long one call takes on a GPU or a CPU, with cold or hot caches, and statistics of many samples.

Nothing is changed: clocks, power limits and persistence stay as they are, and are asked for.

A sample on a GPU: the L2 cache is overwritten, a spacer kernel keeps the device busy while the host queues everything,
two events bracket the call. On a CPU: the last-level cache is overwritten, then the wall clock. The clocks are bound
when this module is imported, before any competitor is: see `restore_clocks`.
"""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy
import torch

from fulmen import hardware
from fulmen.bench.audit import median_interval

OWNERS: dict[Any, str] = {
    time: "perf_counter_ns perf_counter time", torch.cuda: "Event synchronize",
    torch.cuda.Event: "record elapsed_time synchronize",
}  # fmt: skip
CLOCKS = [(owner, name, getattr(owner, name)) for owner, names in OWNERS.items() for name in names.split()]
OWN = (time.perf_counter_ns, torch.cuda.Event, torch.cuda.synchronize)
_now, _Event, _synchronize = OWN

OUTLIER = 3.5  # modified z-score
CPU_CACHE = 32 << 20  # bytes, of which twice as many are overwritten: a server's L3 is shared by cores we do not have
SLOW_CLOCK_NS = 2_000_000
TRIES = 4
LONGEST_SPACER_MS = 16.0
SPACER = "spin_kernel"  # of torch.cuda._sleep
Work = Callable[[], Any]


def restore_clocks() -> str | None:
    """None, or which clock somebody replaced since this module was imported; the true ones are put back.

    We keep using the true ones in any case.
    """
    global _now, _Event, _synchronize
    why = None
    if (_now, _Event, _synchronize) != OWN:
        why = "the benchmark's own clock was replaced while it ran"
        _now, _Event, _synchronize = OWN
    for owner, name, true in CLOCKS:
        if getattr(owner, name) is not true:
            why = f"{owner.__name__}.{name} was replaced while it ran"
            setattr(owner, name, true)
    return why


THROTTLE = {
    0x4: "SW power cap", 0x8: "HW slowdown", 0x10: "sync boost", 0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown", 0x80: "HW power brake", 0x100: "display clocks",
}  # fmt: skip
SM, MEMORY = 1, 2  # NVML's numbers of clocks


class Nvml:
    """NVML through pynvml, for one GPU; every answer is None where it or the driver does not give one."""

    def __init__(self, device: torch.device) -> None:
        self.nvml: Any = None
        if device.type == "cuda":
            with contextlib.suppress(Exception):  # pynvml has an error of its own for each way a driver can be missing
                import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

                pynvml.nvmlInit()
                self.handle = self._find(pynvml, torch.cuda.current_device() if device.index is None else device.index)
                self.nvml = pynvml

    @staticmethod
    def _find(pynvml: Any, index: int) -> Any:
        """By UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's."""
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        with contextlib.suppress(pynvml.NVMLError):
            if uuid is not None:
                return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        return pynvml.nvmlDeviceGetHandleByIndex(index)

    def ask(self, name: str, *arguments: int, unit: float = 1) -> Any:
        """What nvmlDeviceGet`name` says, in our unit."""
        with contextlib.suppress(Exception):  # not supported on this GPU, or in this container
            answer = getattr(self.nvml, f"nvmlDeviceGet{name}")(self.handle, *arguments)
            return answer * unit if isinstance(answer, int | float) else answer
        return None

    def clock_mhz(self) -> float | None:
        return self.ask("ClockInfo", SM, unit=1.0)

    def throttle(self) -> list[str]:
        """Why the clock is below what it could be; [] where nothing holds it back or nobody says."""
        names = ("CurrentClocksEventReasons", "CurrentClocksThrottleReasons")
        bits = next((bits for bits in map(self.ask, names) if bits is not None), 0)
        return [word for bit, word in THROTTLE.items() if bits & bit]

    def state(self, throttled: list[str]) -> dict[str, Any]:
        """What a cell records: throttle reasons, those of before among them, power, temperature."""
        found = {"power_w": self.ask("PowerUsage", unit=1e-3), "temperature_c": self.ask("Temperature", 0)}
        return self.known(found | {"throttle": sorted({*throttled, *self.throttle()})})

    def facts(self) -> dict[str, Any]:
        processes, driver = self.ask("ComputeRunningProcesses"), None
        with contextlib.suppress(Exception):
            driver = self.nvml.nvmlSystemGetDriverVersion()
        return self.known({
            "driver": driver.decode() if isinstance(driver, bytes) else str(driver or "unknown"),
            "throttle": self.throttle(),
            "clock_sm_max_mhz": self.ask("MaxClockInfo", SM, unit=1.0),
            "clock_memory_max_mhz": self.ask("MaxClockInfo", MEMORY, unit=1.0),
            "memory_bus_bits": self.ask("MemoryBusWidth"),
            "power_limit_w": self.ask("EnforcedPowerLimit", unit=1e-3),
            "temperature_c": self.ask("Temperature", 0),
            "other_processes": None if processes is None else max(0, len(processes) - 1),  # one of them is us
        })  # fmt: skip

    def known(self, found: dict[str, Any]) -> dict[str, Any]:
        return {} if self.nvml is None else {name: value for name, value in found.items() if value is not None}


class Sample(NamedTuple):
    """spacer_ms: the one it took; late: the host was not done when the spacer was, so the device may have waited."""

    ms: float
    clock_mhz: float | None
    result: Any
    spacer_ms: float = 0.0
    late: bool = False


class Wall(NamedTuple):
    """Milliseconds of a call: until it returns, until its stream is done, until the whole device is."""

    returned: float
    stream: float
    device: float


class Timer:
    """Takes samples on one device. The SM clock is asked for while the device works."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda, self.nvml = device, device.type == "cuda", Nvml(device)
        self.stream: torch.cuda.Stream | None = None
        self.asked, self.slow_clock = 0, False
        self.l2_bytes = hardware.of(device).l2_bytes if self.cuda else CPU_CACHE
        self.cache = torch.empty(2 * self.l2_bytes, dtype=torch.int8, device=device)
        self.cycles_per_ms = 0.0  # so that there is no spacer while it is measured
        self.cycles_per_ms = self._calibrate() if self.cuda else 0.0

    def _calibrate(self) -> float:
        """Cycles that `torch.cuda._sleep` counts in a millisecond at the highest clock seen: a GPU that was idle is
        slow at first, and a spacer so measured would be too short later."""
        cycles = 2_000_000
        times = (self._sample(lambda: torch.cuda._sleep(cycles), False, 0.0).ms for _ in range(30))
        return cycles / max(min(times), 1e-3)

    def synchronize(self) -> None:
        if self.cuda:
            _synchronize(self.device)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """A stream of our own on a GPU, since the default one cannot be captured."""
        if not self.cuda:
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
        if self.cuda:
            a = torch.randn(4096, 4096, device=self.device, dtype=torch.bfloat16)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                torch.mm(a, a)
                self.synchronize()

    def collect_garbage(self) -> None:
        if self.cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def sample(self, work: Work, *, cold: bool = True, spacer_ms: float = 0.1, tries: int = TRIES) -> Sample:
        """One call. `spacer_ms`: how long the host may take to queue it without being seen in the time.

        If the host took longer (a busy machine, a page fault), the device may have waited for it between two kernels,
        and the time says nothing of the device: the call is repeated behind a longer spacer, `tries` times in all.
        """
        if not self.cuda:
            if cold:
                self.cache.zero_()
            begin = _now()
            result = work()
            return Sample((_now() - begin) * 1e-6, None, result)
        while (sample := self._sample(work, cold, spacer_ms)).late and tries > 1:
            tries, spacer_ms = tries - 1, min(2 * spacer_ms, LONGEST_SPACER_MS)
        return sample

    def _sample(self, work: Work, cold: bool, spacer_ms: float) -> Sample:
        start, end = _Event(enable_timing=True), _Event(enable_timing=True)
        if cold:
            self.cache.zero_()
        begin = _now()
        torch.cuda._sleep(int(spacer_ms * self.cycles_per_ms))
        start.record()
        result = work()
        end.record()
        late = (_now() - begin) * 1e-6 > spacer_ms
        clock = self._clock()  # while the device works
        end.synchronize()
        return Sample(start.elapsed_time(end), clock, result, spacer_ms, late)

    def _clock(self) -> float | None:
        """The SM clock; where a driver takes long to tell, every eighth time only."""
        self.asked += 1
        if self.slow_clock and self.asked % 8 != 1:
            return None
        begin = _now()
        value = self.nvml.clock_mhz()
        if self.asked > 8:  # the first calls load libraries
            self.slow_clock = _now() - begin > SLOW_CLOCK_NS
        return value

    def wall(self, work: Work) -> Wall:
        """One call on the host's clock."""
        self.synchronize()
        begin = _now()
        result = work()
        returned = _now()
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()
        stream = _now()
        self.synchronize()
        done = _now()
        del result
        return Wall(*((at - begin) * 1e-6 for at in (returned, stream, done)))

    def overhead_ms(self) -> float:
        """What two events around nothing say."""
        return median(self.sample(lambda: None, cold=False, spacer_ms=0.02).ms for _ in range(200))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def loop_ms(timer: Timer, work: Work, calls: int, rounds: int = 10) -> float:
    """The host's time of one call in a loop without a pause: where the device needs less, what the host costs."""
    times = []
    for _ in range(rounds + 3):
        timer.synchronize()
        begin = _now()
        for _ in range(calls):
            work()
        times.append((_now() - begin) * 1e-6 / calls)
    timer.synchronize()
    return median(times[3:])


# --------------------------------------------------------------------------------------- graph replay
def graph_ms(timer: Timer, prepare: Callable[[], Work], seconds: float = 0.05, cold: bool = True) -> float | None:
    """Device time of a call without the host: captured as a CUDA graph and replayed. None: cannot be captured.

    `prepare` returns what is captured. It is called on the capturing stream, which is the current one unless that is
    the default stream: autograd runs a backward on the streams of its forward and of its leaves' first use.
    """
    if not timer.cuda:
        return None
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    outside = stream = torch.cuda.current_stream(timer.device)
    if stream == torch.cuda.default_stream(timer.device):
        stream = torch.cuda.Stream(timer.device)
        stream.wait_stream(outside)
    capturing = False
    try:
        with torch.cuda.stream(stream):
            work = prepare()
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")  # who makes the host wait raises, where torch sees it
            try:
                work()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            stream.synchronize()
        capturing = True
        with torch.cuda.graph(graph, pool, stream):
            result = work()
        capturing = False
        first = timer.sample(graph.replay, cold=cold).ms
        count = max(3, min(20, int(1e3 * seconds / max(first, 1e-3))))
        ms = median(timer.sample(graph.replay, cold=cold).ms for _ in range(count))
        del result
        return ms
    except RuntimeError:  # it synchronises, or allocates outside; or there is no memory for it
        if capturing:
            _abandon(timer.device, pool)
        return None
    finally:
        _synchronize(timer.device)
        del graph


def _abandon(device: torch.device, pool: Any) -> None:
    """Ends a capture that failed.

    torch's own end raises before it tells the allocator and the generator of random numbers. Both would stay in capture
    mode: the one returns no memory to the device, the other refuses to draw.
    """
    torch.cuda.synchronize(device)
    index = device.index or 0
    with contextlib.suppress(RuntimeError, AttributeError):  # no capture was under way
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator, fresh = torch.cuda.default_generators[index], torch.Generator(device)
    fresh.manual_seed(generator.initial_seed() + 1)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


KINDS = {  # of kernels, by their names; the first that fits
    "glue": "^triton_(poi|red|per)",  # inductor's, which are named after all that they fuse
    "optimiser": "adam|multi_tensor_apply",
    "attention": "sdpa|flash|fmha|attention|lightning|chunk_",
    "products": "gemm|nvjet|cutlass|xmma|triton_tem|splitk",
}


def profiled(timer: Timer, work: Work, cold: bool = True, rounds: int = 15) -> list[tuple[str, float]]:
    """All that ran on the device in a few calls, by torch's profiler, with its us; nothing on a CPU.

    Two spacers stand around each call, so that it can be told from what empties the cache.
    """
    if not timer.cuda:
        return []
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(rounds):
                if cold:
                    timer.cache.zero_()
                torch.cuda._sleep(int(0.1 * timer.cycles_per_ms))
                result = work()
                torch.cuda._sleep(1)
                _synchronize(timer.device)
                del result
        events = [e for e in seen.events() or [] if e.device_type.name == "CUDA"]
    except RuntimeError:  # another profiler holds the counters
        return []
    events.sort(key=lambda e: e.time_range.start)
    return [(e.name, e.time_range.elapsed_us()) for e in events]


class Ran(NamedTuple):
    """What the device ran in a call: kernels in order, their ms without the gaps between them, and those by kind."""

    kernels: list[str]
    ms: float | None
    kinds: dict[str, float]

    @classmethod
    def of(cls, events: Sequence[tuple[str, float]]) -> Ran:
        """Of all that ran, with its us: what stands after every first of two spacers. The first call is warm-up."""
        calls: list[list[tuple[str, float]]] = []
        spacers = 0
        for name, us in events:
            if SPACER in name:
                spacers += 1
                calls += [[]] if spacers % 2 else []
            elif spacers % 2:
                calls[-1].append((name, us))
        if spacers % 2 or not calls or not all(calls):  # it lost some: of such a profile nothing is certain
            return cls([], None, {})
        kinds: dict[str, float] = {}
        for name, us in calls[-1]:
            kind = next((kind for kind, words in KINDS.items() if re.search(words, name.lower())), "glue")
            kinds[kind] = kinds.get(kind, 0.0) + us / 1e3
        times = [sum(us for _, us in call) / 1e3 for call in calls]
        return cls([name for name, _ in calls[-1]], median(times[1:] or times), kinds)


# ---------------------------------------------------------------------------------------- statistics
def summary(samples: Sequence[float], stop: str) -> dict[str, Any]:
    """What a cell says of its samples; all of them stay beside it, and none is left out here."""
    x, (low, high) = numpy.asarray(samples), median_interval(sorted(samples))
    middle, (p20, p80) = float(numpy.median(x)), (float(p) for p in numpy.percentile(x, [20, 80]))
    far = numpy.abs(x - middle)
    mad = float(numpy.median(far))
    outliers = int((far * 0.6745 > OUTLIER * mad).sum()) if mad > 0 else 0
    return {
        "median": middle, "low": low, "high": high, "p20": p20, "p80": p80, "min": float(x.min()), "mad": mad,
        "n": len(x), "outliers": outliers, "stop": stop,
    }  # fmt: skip
