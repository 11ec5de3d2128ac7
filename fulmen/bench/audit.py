"""Checks measured numbers against what the hardware can do, and against each other.

`judge` checks one cell, `judge_group` the cells of a run together. Both write their findings in words into `cell.audit`
and can be called again. Two floors decide. The least work at the hard ceilings is a limit of physics: a shorter time is
IMPOSSIBLE, and the cell loses it. The usual work at the ceilings measured on this machine gives the efficiency: a
shorter time is SUSPECT, or WARM-L2 where a cache explains it. Without a known ceiling a cell is UNAUDITED.

Growth is the exponent b of t ~ N^b with its 95 % interval; "O(n)" needs the interval inside [0.9, 1.1].
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from fulmen.bench import floors, schema
from fulmen.bench.floors import Limits
from fulmen.bench.schema import number

SUSPECT_SHARE = 1.05  # faster than the measured ceiling by this is more than noise
CPU_SHARE = 2.0  # the same for a CPU, whose ceiling is measured beside other processes
ROOF_SHARE = 1.001  # above the highest known ceiling
HOST_SHARE = 1.3
THROTTLE_SHARE = 0.75
MILD = ("SW power cap", "sync boost")
NOISY_SHARE = 0.02  # an interval wider than this on either side cannot show a change of 2 %
MIN_SAMPLES = 5
DISAGREE_SHARE, DISAGREE_SIGMAS = 0.10, 3.0
LAUNCH_MS = 0.005  # about what an empty kernel takes: points below five of them say nothing of scaling
LINEAR_RANGE = (0.9, 1.1)
MIN_POINTS = 4
SHORTEST_MS, LONGEST_MS = 1e-12, 1e12  # outside of it a number is no time

OURS = ("IMPOSSIBLE", "SUSPECT", "WARM-L2", "HOST-BOUND", "THROTTLED", "NOISY", "UNAUDITED")
GROUPS = ("INCONSISTENT", "ANOTHER-FUNCTION")

T = TypeVar("T")
Point = tuple[float, float]


# ----------------------------------------------------------------------------------------- numbers and words
def time_ms(value: object) -> float | None:
    """A number of milliseconds that can be a time: positive, and neither denormal nor longer than ages."""
    t = number(value)
    return t if t is not None and SHORTEST_MS <= t <= LONGEST_MS else None


def si(value: float, unit: str) -> str:
    """Four digits and a prefix: 137.4 GFLOP, 4.8 TB/s."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def ms(value: float) -> str:
    return f"{value:.4g} ms" if value >= 1e-4 else f"{1e6 * value:.3g} ns"


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    """Items by key, in the order in which they come."""
    found: dict[Any, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """95 %, by order statistics: no assumption about the distribution."""
    n, reach = len(ordered), 0.98 * math.sqrt(len(ordered))
    low, high = math.floor((n - 1) / 2 - reach), math.ceil((n - 1) / 2 + reach)
    return float(ordered[max(low, 0)]), float(ordered[min(high, n - 1)])


def flag(cell: schema.Cell, name: str, why: str) -> None:
    flags = cell.audit.setdefault("flags", [])
    if {"flag": name, "why": why} not in flags:
        flags.append({"flag": name, "why": why})


def _forget(cell: schema.Cell, names: Sequence[str]) -> None:
    """Removes earlier findings, except for memory: those numbers are gone and cannot be judged again."""
    flags = cell.audit.get("flags")
    kept = [f for f in flags if isinstance(f, dict)] if isinstance(flags, list) else []
    cell.audit["flags"] = [f for f in kept if f.get("flag") not in names or str(f.get("why")).startswith("memory, ")]


# ----------------------------------------------------------------------------------------------- one cell
def limits(run: schema.Run, dtype: object) -> Limits:
    """Ceilings of a run for a dtype: its own where it has them, else from what the device says of itself.

    `flops_measured` and its like hold for 16-bit numbers on a GPU and for fp32 on a CPU; a run that measured others
    calls them `flops_measured_fp32`.
    """
    environment, name = run.environment, floors.dtype_name(dtype) or ""
    arch, sms = number(environment.get("arch")) or 0.0, number(environment.get("sm_count"))
    plain = name in (("bf16", "fp16") if arch > 0 else ("fp32",))

    def ceiling(key: str) -> float | None:
        values = [number(run.ceilings.get(f"{key}_{name}")), number(run.ceilings.get(key))]
        own = values if plain or key.startswith("bytes") else values[:1]
        return next((value for value in own if value is not None and value > 0), None)

    hard, clock = ceiling("flops_hard"), number(run.ceilings.get("clock_max_mhz"))
    if arch > 0 and clock and sms:  # also beside its own: fp16 sums may be faster than those of bf16
        known = floors.of_device(int(arch), int(sms), clock, str(environment.get("device", "")), name)
        hard = max(hard or 0.0, known or 0.0) or None
    F, W, W_hard = ceiling("flops_measured"), ceiling("bytes_measured"), ceiling("bytes_hard")
    reached = F or ceiling("flops_nominal") or (hard if arch > 0 else None)
    l2 = number(environment.get("l2_bytes")) or 0.0
    return Limits(hard, W_hard, reached, W or W_hard, l2, measured=bool(F or W), gpu=arch > 0)


def judge(cell: schema.Cell, run: schema.Run) -> None:
    """Fills `cell.audit`; a time that cannot be is taken out of the cell, which becomes "withheld"."""
    if cell.status == "withheld":
        return
    _forget(cell, OURS)
    work = floors.of_case(cell.op, cell.function, cell.case, cell.pass_)
    bounds = limits(run, cell.case.get("dtype"))
    if work is not None:
        cell.audit.update(flops=work.usual_flops, bytes=work.usual_bytes, flops_min=work.flops, bytes_min=work.bytes)
    _memory_floors(cell)
    said = number(cell.stats.get("median"))
    if cell.status != "ok" or said is None:
        return
    median = time_ms(said)
    if median is None:
        withhold(cell, f"a time of {said:g} ms is no time")
        return
    _clock_flags(cell, run)
    _noise_flag(cell, median)
    if work is None:
        cell.audit["arithmetic"] = f"no floor is known for {cell.op} ({cell.function}) with this case"
        flag(cell, "UNAUDITED", "no floor is known for this operation and case, so the time was not checked")
        return
    if bounds.gpu:
        _host_flag(cell, work, median, bounds)
    _floor_flags(cell, work, median, bounds)
    check_roof(cell, run)


def _floor_flags(cell: schema.Cell, work: floors.Work, median: float, bounds: Limits) -> None:
    floor = bounds.floor_ms(work.flops, work.bytes)
    usual = bounds.floor_ms(work.usual_flops, work.usual_bytes, reached=True)
    cell.audit["arithmetic"] = arithmetic(work, median, bounds)
    if usual is not None:
        cell.audit |= {"efficiency": usual / median, "ceiling": "measured" if bounds.measured else "data sheet"}
    if floor is not None:
        cell.audit["floor_ms"] = floor
        name, why = check_time(work, median, bounds, cold=cell.cache != "hot")
        if name == "IMPOSSIBLE":
            withhold(cell, why)
        elif name:
            flag(cell, name, why)
        return
    flag(cell, "UNAUDITED", "no hard ceiling of this machine is known, so the time was not checked against one")
    share = 1e3 * work.usual_flops / bounds.flops_reached / median if bounds.flops_reached else 0.0
    if share > CPU_SHARE:
        flag(cell, "SUSPECT", f"{share:.2f} times the FLOP/s of a matrix product on this machine")


def check_time(work: floors.Work, t: float, bounds: Limits, cold: bool, said: float | None = None) -> tuple[str, str]:
    """IMPOSSIBLE, SUSPECT or WARM-L2 and why, or two empty words. `said`: as printed; `t`: the most it can be."""
    said, rate = said or t, 1e3 / (said or t)
    dram = work.on_dram(bounds.l2_bytes, cold)
    strict = bounds.floor_ms(work.flops, dram) or 0.0
    if t < strict:
        return "IMPOSSIBLE", f"{strict / said:.2f} times as fast as possible: {arithmetic(work, said, bounds)}"
    dram += max(0.0, work.usual_bytes - work.bytes - bounds.l2_bytes)
    reachable = bounds.floor_ms(work.usual_flops, dram, reached=True) or 0.0
    if reachable / t > SUSPECT_SHARE:
        whose = "measured on this machine" if bounds.measured else "of the data sheet, at the rated clock,"
        tops = [(bounds.flops_reached, "FLOP/s"), (bounds.bytes_reached, "B/s")]
        speed = f"{si(rate * work.usual_flops, 'FLOP/s')} and {si(rate * dram, 'B/s')}"
        allowed = " and ".join(si(top, unit) for top, unit in tops if top)
        why = f"{speed}; the ceilings {whose} are {allowed}: {reachable / said:.2f} times as fast as they allow"
        return "SUSPECT", f"{why}; possible only at a higher clock"
    usual = bounds.floor_ms(work.usual_flops, work.usual_bytes, reached=True) or 0.0
    if usual / t > SUSPECT_SHARE:
        memory = bounds.bytes_reached or bounds.bytes_hard or 0.0
        return "WARM-L2", _warm(work.usual_bytes, said, memory, bounds.l2_bytes)
    return "", ""


def _warm(size: float, t: float, memory: float, l2: float) -> str:
    speed = f"{si(size, 'B')} in {ms(t)} is {si(1e3 * size / t, 'B/s')}"
    cache = f"the cache of {si(l2, 'B')}" if 0 < l2 < math.inf else "a cache"
    return f"{speed}, more than the memory's {si(memory, 'B/s')}: part stayed in {cache}"


def check_roof(cell: schema.Cell, run: schema.Run) -> None:
    """Flags a time above the roof: the highest known ceilings, whether hard or only measured."""
    median = time_ms(cell.stats.get("median"))
    if cell.status != "ok" or median is None or {"SUSPECT", "WARM-L2"} & set(cell.flags()):
        return
    bounds = limits(run, cell.case.get("dtype"))
    flops, size = (number(cell.audit.get(name)) or 0.0 for name in ("flops", "bytes"))
    top, memory = bounds.flops_hard or bounds.flops_reached, bounds.bytes_hard or bounds.bytes_reached
    if top and 1e3 * flops / median > ROOF_SHARE * top:
        speed = f"{si(1e3 * flops / median, 'FLOP/s')} in {ms(median)}"
        flag(cell, "SUSPECT", f"{speed}, above the roof of {si(top, 'FLOP/s')}: the roof or the time is wrong")
    elif memory and 1e3 * size / median > ROOF_SHARE * memory:
        flag(cell, "WARM-L2", _warm(size, median, memory, bounds.l2_bytes))


def arithmetic(work: floors.Work, t: float, bounds: Limits) -> str:
    """One sentence that can be checked with a calculator."""
    parts = []
    for amount, unit, ceiling in ((work.flops, "FLOP", bounds.flops_hard), (work.bytes, "B", bounds.bytes_hard)):
        if ceiling:
            parts.append(f"{si(amount, unit)} / {si(ceiling, unit + '/s')} = {ms(1e3 * amount / ceiling)}")
        else:
            parts.append(f"{si(amount, unit)} at a ceiling that is not known")
    reached = f"{si(1e3 * work.usual_flops / t, 'FLOP/s')} and {si(1e3 * work.usual_bytes / t, 'B/s')}"
    return f"at least {' and '.join(parts)}; measured {ms(t)}, which is {reached}"


def withhold(cell: schema.Cell, why: str) -> None:
    """Removes the time and keeps the reason."""
    flag(cell, "IMPOSSIBLE", why)
    cell.status, cell.reason = "withheld", f"impossible: {why}"
    cell.audit.setdefault("arithmetic", why)
    cell.audit.pop("efficiency", None)
    cell.drop_times()


def _host_flag(cell: schema.Cell, work: floors.Work, median: float, bounds: Limits) -> None:
    device, wall, enqueue = number(cell.device_ms), number(cell.host_ms), number(cell.stats.get("enqueue"))
    # The replay of a graph finds a warm cache: only without one are its time and that of a cold call alike.
    alike = cell.cache == "hot" or work.bytes > bounds.l2_bytes
    if device and alike and median / device > HOST_SHARE:
        why = f"a call takes {ms(median)}, of which the device works {ms(device)}: the rest is waiting for the host"
    elif enqueue is not None and enqueue > max(median, device or 0.0):
        why = f"the host needs {ms(enqueue)} to issue what the device does in {ms(median)}: calls in a row wait for it"
    elif enqueue is None and wall is not None and wall / median > HOST_SHARE:
        why = f"a call with a synchronisation takes {ms(wall)}, the device {ms(median)}: the host sets the pace"
    else:
        return
    flag(cell, "HOST-BOUND", why)


def _clock_flags(cell: schema.Cell, run: schema.Run) -> None:
    """A power cap alone is how a busy GPU runs: it counts where the clock is low, or not known."""
    said = cell.stats.get("throttle")
    reasons = [str(r) for r in said] if isinstance(said, list) else []
    clocks = sorted(c for c in map(number, cell.clocks_mhz) if c)
    top = number(run.ceilings.get("clock_max_mhz"))
    if clocks and top:
        low = clocks[len(clocks) // 10]  # a tenth of the samples may be off
        if low < THROTTLE_SHARE * top:
            share = f"{low:.0f} MHz, {100 * low / top:.0f} % of the {top:.0f} that this GPU can run at"
            flag(cell, "THROTTLED", f"the clock went down to {share}" + (f": {', '.join(reasons)}" if reasons else ""))
            return
        reasons = [r for r in reasons if r not in MILD]
    if reasons:
        flag(cell, "THROTTLED", f"the driver slowed the clock down: {', '.join(reasons)}")


def _noise_flag(cell: schema.Cell, median: float) -> None:
    n = len(cell.samples_ms)
    if n < MIN_SAMPLES:
        flag(cell, "NOISY", f"only {n} samples" if n != 1 else "only one sample")
        return
    low, high = number(cell.stats.get("low")), number(cell.stats.get("high"))
    if low is not None and high is not None and (high - low) / 2 > NOISY_SHARE * median:
        share = 50 * (high - low) / median
        flag(cell, "NOISY", f"the median of {n} samples is known to {share:.1f} % only, so smaller changes do not show")


def _memory_floors(cell: schema.Cell) -> None:
    """Drops a number of bytes below what the tensors themselves take, and says so; the time stands."""
    kind = floors.family(cell.op, cell.function)
    least = None if kind is None or cell.op.startswith("layer") else floors.memory(kind, cell.case, cell.pass_)
    for name, entry in list(cell.memory.items()):
        size, floor = number(entry.get("bytes")), number(entry.get("floor"))
        if floor is None and least is not None and (name != "gradients" or cell.pass_ != "forward"):
            floor = least.get(name)
        if size is not None and floor is not None and size < floor * (1 - 1e-6):
            why = f"memory, {name}: {si(size, 'B')} measured, but the tensors alone take {si(floor, 'B')}"
            flag(cell, "IMPOSSIBLE", why)
            cell.memory.pop(name)


# ------------------------------------------------------------------------------------------ cells together
class Fit(NamedTuple):
    """b of y ~ x^b, its 95 % interval, and the exponents between neighbours."""

    exponent: float
    low: float
    high: float
    r2: float
    local: list[float]

    def words(self) -> str:
        return f"N^{self.exponent:.3f} (95 %: {self.low:.3f} to {self.high:.3f}, R2 {self.r2:.4f})"

    @property
    def growth(self) -> str:
        """O(n), more or less than that, or open: the interval allows several."""
        if self.low > LINEAR_RANGE[1]:
            return "above O(n)"
        if self.high < LINEAR_RANGE[0]:
            return "sublinear"
        return "O(n)" if LINEAR_RANGE[0] <= self.low and self.high <= LINEAR_RANGE[1] else "open"


class Scaling(NamedTuple):
    """How one competitor's time and memory grow with N."""

    cell: schema.Cell  # any of the curve
    time: Fit | None
    memory: Fit | None
    points: list[Point]  # N, ms: those of the fit
    growth: str  # as `Fit.growth`, of time and memory together
    verdict: str


class Crossover(NamedTuple):
    """The N from which one competitor is faster than another; None: not among the lengths measured."""

    cell: schema.Cell  # any of the faster one's
    N: float | None
    words: str


class Relations(NamedTuple):
    scaling: list[Scaling]
    crossovers: list[Crossover]


def judge_group(cells: Sequence[schema.Cell], runs: Mapping[str, schema.Run] | None = None) -> Relations:
    """Flags cells that contradict each other; returns growth and crossovers.

    `runs` tells the size of the cache and the ceilings; without it nothing is allowed for them.
    """
    runs, found = runs or {}, Relations([], [])
    for cell in cells:
        _forget(cell, GROUPS)
    _mark_other_functions(cells)
    timed = [cell for cell in cells if cell.status == "ok" and time_ms(cell.stats.get("median"))]
    for same in grouped(timed, lambda c: (*_key(c), c.function, c.competitor, c.cache)).values():
        _check_sums({cell.pass_: cell for cell in same}, runs.get(same[0].run_id))
    sized = [cell for cell in timed if number(cell.case.get("N"))]
    for curve in grouped(sized, lambda c: (*_key(c, "N", "N_Q", "N_KV"), c.pass_, c.cache)).values():
        series = grouped(sorted(curve, key=lambda c: c.case["N"]), lambda c: c.competitor)
        fits = (scaling(line, runs.get(curve[0].run_id)) for line in series.values())
        found.scaling.extend(fit for fit in fits if fit is not None)
        ours = [name for name in series if name.startswith("fulmen")] or list(series)[:1]
        pairs = [(series[a], series[b]) for a in ours for b in series if b not in ours]
        found.crossovers.extend(c for a, b in pairs if (c := crossover(a, b)) is not None)
    return found


def _key(cell: schema.Cell, *without: str) -> tuple[Hashable, ...]:
    case = sorted((str(k), repr(v)) for k, v in cell.case.items() if k not in without)
    return cell.run_id, cell.suite, tuple(case)


def _mark_other_functions(cells: Sequence[schema.Cell]) -> None:
    """Beside our own cell (or the first one), those that compute something else."""
    for group in grouped(cells, _key).values():
        first = next((c for c in group if c.competitor.startswith("fulmen")), group[0])
        for cell in group:
            if cell.function != first.function:
                why = f"computes {cell.function}, {first.competitor} {first.function}: not two ways to the same result"
                flag(cell, "ANOTHER-FUNCTION", why)


def _check_sums(passes: Mapping[str, schema.Cell], run: schema.Run | None) -> None:
    """Forward and backward against both in one go; the backward may find in the cache what the forward left there."""
    if len(passes) < 3:
        return
    forward, backward, total = (float(passes[p].stats["median"]) for p in schema.PASSES)
    parts, first, cached = forward + backward, passes["total"], 0.0
    work = floors.of_case(first.op, first.function, first.case, "forward")
    if run is not None and work is not None and total < parts:
        bounds = limits(run, first.case.get("dtype"))
        if bounds.bytes_reached:
            cached = 1e3 * min(bounds.l2_bytes, work.bytes) / bounds.bytes_reached
    ends = [[number(cell.stats.get(end)) for end in ("low", "high")] for cell in passes.values()]
    sigma = math.hypot(*((high - low) / 3.92 for low, high in ends if low is not None and high is not None))
    gap = abs(total - parts) - cached
    if gap > DISAGREE_SHARE * max(total, parts) and gap > DISAGREE_SIGMAS * sigma:
        sums = f"forward {ms(forward)} + backward {ms(backward)} = {ms(parts)}"
        for cell in passes.values():
            why = f"{sums}, but both in one go take {ms(total)}: {100 * (total / parts - 1):+.0f} %"
            flag(cell, "INCONSISTENT", why)


# -------------------------------------------------------------------------------------- growth with the length
def fit(points: Iterable[Point]) -> Fit | None:
    """A power through points, by least squares of logarithms. None for fewer than three."""
    xy = sorted((x, y) for x, y in points if x > 0 and y > 0)
    if len({x for x, _ in xy}) < 3:
        return None
    from scipy import stats  # here: reading a cell's audit does not need scipy

    xs, ys = ([math.log(p[i]) for p in xy] for i in (0, 1))
    local = [_exponent(a, b) for a, b in itertools.pairwise(xy) if b[0] > a[0]]
    if max(ys) - min(ys) < 1e-12:
        return Fit(0.0, 0.0, 0.0, 1.0, local)
    line = stats.linregress(xs, ys)
    slope, half = float(line.slope), float(line.stderr) * float(stats.t.ppf(0.975, len(xy) - 2))
    return Fit(slope, slope - half, slope + half, float(line.rvalue) ** 2, local)


def _exponent(a: Point, b: Point) -> float:
    return math.log(b[1] / a[1]) / math.log(b[0] / a[0])


def scaling(series: Sequence[schema.Cell], run: schema.Run | None = None) -> Scaling | None:
    """The growth of one competitor over N; None when there is only one length."""
    if len({c.case["N"] for c in series}) < 2:
        return None
    l2 = number(run.environment.get("l2_bytes")) or 0.0 if run is not None else 0.0
    gpu = run is not None and bool(number(run.environment.get("arch")))
    points, sizes = [], []
    for cell in series:
        n, t = float(cell.case["N"]), float(cell.stats["median"])
        work = floors.of_case(cell.op, cell.function, cell.case, cell.pass_)
        if size := number(cell.memory.get("peak", {}).get("bytes")):
            sizes.append((n, size))
        few_launches, in_cache = gpu and t < 5 * LAUNCH_MS, work is not None and work.bytes <= l2
        if not few_launches and not in_cache:
            points.append((n, t))
    time = fit(points) if len(points) >= MIN_POINTS else None
    memory = fit(sizes) if len(sizes) >= MIN_POINTS else None
    return Scaling(series[0], time, memory, points, *_verdict(time, memory, points))


def _verdict(time: Fit | None, memory: Fit | None, points: Sequence[Point]) -> tuple[str, str]:
    """(growth of time and memory together, the sentence)"""
    if time is None:
        return "open", f"cannot be told: {len(points)} lengths are long enough, {MIN_POINTS} are needed"
    words = f"time grows as {time.words()}"
    if time.high < 0.8:
        return "sublinear", f"{words}: too slowly; the host or empty SMs set the pace, or work is skipped"
    if memory is not None:
        words += f", memory as {memory.words()}"
    last = _exponent(*sorted(points)[-2:])
    settled = time.high <= LINEAR_RANGE[1] and LINEAR_RANGE[0] <= last <= LINEAR_RANGE[1]
    in_time = "O(n)" if settled else time.growth
    in_memory = "O(n)" if memory is None else memory.growth
    if in_time == in_memory == "O(n)":
        if time.growth != "O(n)":
            words += f", and at the end as n^{last:.2f}: beside a linear part there is a constant one"
        return "O(n)", f"O(n){'' if memory is not None or time.growth != 'O(n)' else ' in time'}: {words}"
    for growth in ("above O(n)", "sublinear"):
        if growth in (in_time, in_memory):
            return growth, f"{growth}{'' if in_time == growth else ' in memory'}: {words}"
    return "open", f"O(n) neither shown nor excluded: {words}"


def crossover(ours: Sequence[schema.Cell], other: Sequence[schema.Cell]) -> Crossover | None:
    """From which N on `ours` is the faster one, by interpolation of logarithms; None for fewer than two lengths."""
    a, b = ({float(c.case["N"]): float(c.stats["median"]) for c in series} for series in (ours, other))
    gaps = [(math.log(n), math.log(a[n] / b[n])) for n in sorted(a.keys() & b.keys())]
    if len(gaps) < 2:
        return None
    at, names = None, f"faster than {other[0].competitor}"
    ahead = list(itertools.takewhile(lambda gap: gap[1] < 0, reversed(gaps)))
    if not ahead:
        words = f"is not {names} at N = {math.exp(gaps[-1][0]):.0f}"
    elif len(ahead) == len(gaps):
        ratio = math.exp(-statistics.fmean(y for _, y in gaps))
        words = f"is {names} at every N measured, {ratio:.2f} times on average"
    else:
        (x0, y0), (x1, y1) = gaps[-len(ahead) - 1], ahead[-1]
        at = math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
        words = f"is {names} from N = {at:.0f}"
    return Crossover(ours[0], at, f"{ours[0].competitor} {words}")
