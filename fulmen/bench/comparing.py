"""Two sets of results against each other, cell by cell: FASTER, SLOWER, SAME, INCONCLUSIVE or INCOMPARABLE.

Cells are matched by what was measured (`config_hash`), and only on the same GPU by the same protocol. The ratio is the
Hodges-Lehmann estimate, the median of all quotients b/a of a sample of b and one of a, with its 95 % interval; p is
that of Mann and Whitney's test.

    FASTER, SLOWER   p < 0.002, a ratio at least 2 % from 1, the medians' intervals apart, and the same in clock cycles
    SAME             a ratio less than 1 % from 1, and no room in the interval for more than 5 %
    INCONCLUSIVE     neither
    INCOMPARABLE     another GPU or protocol, or no time in one of the files; missing cells, too

GPU clocks move with heat and power. Where both files hold clocks, cycles (time x clock) are compared as well. A change
in time without one in cycles is the clock's, and the cell is SAME. A kernel that waits for memory takes equally long at
another clock, and is SAME by its time whatever its cycles say.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.bench import schema
from fulmen.bench.audit import ms, number, time_ms

VERDICTS = ("FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "INCOMPARABLE")
P_VALUE = 0.002
CHANGE = 0.02
EQUAL = 0.01
ROOM = 0.05  # an interval wider than this shows nothing to be the same
CLOCK_MOVED = 0.01
MIN_SAMPLES = 5
MAX_SAMPLES = 250  # of each cell, drawn at random from more: there are as many quotients as the product

Array = NDArray[np.float64]


class Effect(NamedTuple):
    """b against a: quotient with its 95 % interval, p, and whether the intervals of the medians are apart."""

    ratio: float
    low: float
    high: float
    p: float
    apart: bool

    @property
    def verdict(self) -> str:
        if self.p < P_VALUE and abs(self.ratio - 1) >= CHANGE and self.apart:
            return "FASTER" if self.ratio < 1 else "SLOWER"
        if abs(self.ratio - 1) < EQUAL and self.low > 1 - ROOM and self.high < 1 + ROOM:
            return "SAME"
        return "INCONCLUSIVE"


@dataclass
class Verdict:
    """What became of one cell."""

    cell: schema.Cell  # the newer one where there are two
    verdict: str = "INCOMPARABLE"
    why: str = ""
    a_ms: float | None = None
    b_ms: float | None = None
    time: Effect | None = None
    cycles: Effect | None = None
    in_cycles: bool = False  # the verdict rests on cycles
    missing: str = ""  # "a" or "b": the file that has no such cell
    broken: bool = False  # a has a time, b tried and has none

    @property
    def effect(self) -> Effect | None:
        return self.cycles if self.in_cycles else self.time

    @property
    def name(self) -> str:
        cell, hot = self.cell, " (hot)" if self.cell.cache == "hot" else ""
        case = " ".join(sorted(f"{k}={v}" for k, v in cell.case.items()))
        return f"{cell.suite}: {cell.competitor}, {cell.pass_}{hot}, {case}"


# --------------------------------------------------------------------------------------------- statistics


def median_interval(sorted_samples: Array) -> tuple[float, float]:
    """95 %, by order statistics: no assumption about the distribution."""
    n = len(sorted_samples)
    reach = 0.98 * np.sqrt(n)
    low, high = int(np.floor((n - 1) / 2 - reach)), int(np.ceil((n - 1) / 2 + reach))
    return float(sorted_samples[max(low, 0)]), float(sorted_samples[min(high, n - 1)])


def effect(a: Array, b: Array) -> Effect:
    """How b differs from a; both positive, at least MIN_SAMPLES each."""
    generator = np.random.default_rng(0)
    a, b = (x if len(x) <= MAX_SAMPLES else generator.choice(x, MAX_SAMPLES, replace=False) for x in (a, b))
    m, n = len(a), len(b)
    quotients = np.subtract.outer(np.log(b), np.log(a)).ravel()
    size = m * n
    reach = 1.96 * np.sqrt(size * (m + n + 1) / 12)
    low = max(0, int(np.floor(size / 2 - reach)))
    ranks = sorted({low, (size - 1) // 2, size // 2, size - 1 - low})
    parts = np.partition(quotients, ranks)
    middle = (parts[(size - 1) // 2] + parts[size // 2]) / 2
    ratio, least, most = (float(np.exp(x)) for x in (middle, parts[low], parts[size - 1 - low]))
    a_low, a_high = median_interval(np.sort(a))
    b_low, b_high = median_interval(np.sort(b))
    return Effect(ratio, least, most, _mann_whitney(a, b, quotients), a_high < b_low or b_high < a_low)


def _mann_whitney(a: Array, b: Array, quotients: Array) -> float:
    """p of the two-sided test, by the normal approximation with corrections for continuity and ties."""
    m, n = len(a), len(b)
    _, ties = np.unique(np.concatenate((a, b)), return_counts=True)
    variance = m * n / 12 * ((m + n + 1) - float((ties**3 - ties).sum()) / ((m + n) * (m + n - 1)))
    if variance <= 0:
        return 1.0
    greater = float((quotients > 0).sum()) + 0.5 * float((quotients == 0).sum())
    return math.erfc(max(0.0, abs(greater - m * n / 2) - 0.5) / math.sqrt(2 * variance))


def _samples(cell: schema.Cell) -> Array | None:
    values = [time_ms(x) for x in cell.samples_ms]
    return None if len(values) < MIN_SAMPLES or None in values else np.array(values, dtype=np.float64)


def _cycles(cell: schema.Cell, times: Array) -> tuple[Array, float] | None:
    """(thousands of cycles of each sample, median clock); clocks are one per sample, or one per round of them."""
    clocks = [c for c in map(number, cell.clocks_mhz) if c and c > 0]
    if not clocks or len(clocks) != len(cell.clocks_mhz) or len(clocks) > len(times):
        return None
    per_sample = np.array(clocks)[np.arange(len(times)) * len(clocks) // len(times)]
    return times * per_sample, float(np.median(clocks))


# ------------------------------------------------------------------------------------------------ verdicts


def compare(a: schema.Results, b: schema.Results) -> list[Verdict]:
    """A verdict for every cell of either; b is the newer one. Those that lost or won most time come first.

    A cell that neither could measure, as of a package that is not installed, has none.
    """
    before, after = ({cell.config_hash: cell for cell in results.cells} for results in (a, b))
    verdicts = [_missing(cell, "b") for key, cell in before.items() if key not in after]
    for key, cell in after.items():
        old = before.get(key)
        if old is None:
            verdicts.append(_missing(cell, "a"))
        elif not old.status == cell.status in ("unsupported", "skipped"):
            verdicts.append(_judge(old, cell, _differences(a.runs.get(old.run_id), b.runs.get(cell.run_id))))
    return sorted(verdicts, key=_weight)


def _missing(cell: schema.Cell, which: str) -> Verdict:
    return Verdict(cell, why=f"only in the {'second' if which == 'a' else 'first'} file", missing=which)


def _weight(v: Verdict) -> tuple[int, float]:
    lost = abs((v.b_ms or 0.0) - (v.a_ms or 0.0))
    return ["SLOWER", "FASTER", "INCONCLUSIVE", "INCOMPARABLE", "SAME"].index(v.verdict), -lost


def _differences(a: schema.Run | None, b: schema.Run | None) -> str:
    """Why two runs cannot be compared, or nothing."""
    if a is None or b is None:
        return "the record of the run is missing"
    if a.protocol != b.protocol:
        return f"measured by protocols {a.protocol} and {b.protocol}"
    # A CPU's name is in "cpu": "device" says no more than that it is one.
    facts = ("device",) if number(a.environment.get("arch")) else ("device", "cpu")
    for fact in facts:
        if a.environment.get(fact) != b.environment.get(fact):
            return f"measured on {a.environment.get(fact)} and on {b.environment.get(fact)}"
    return ""


def _judge(first: schema.Cell, second: schema.Cell, differences: str) -> Verdict:
    found = Verdict(second, why=differences, a_ms=time_ms(first.median_ms), b_ms=time_ms(second.median_ms))
    if differences:
        return found
    found.broken = first.status == "ok" and second.status not in ("ok", "skipped", "interrupted")
    samples = []
    for cell, which in ((first, "first"), (second, "second")):
        if cell.status != "ok":
            reason = f": {cell.reason}" if cell.reason else ""
            found.why = f"no time in the {which} file ({cell.status}{reason})"
            return found
        usable = _samples(cell)
        if usable is None:
            found.why = f"fewer than {MIN_SAMPLES} usable samples in the {which} file"
            return found
        samples.append(usable)
    found.time = effect(*samples)
    found.verdict, found.why = found.time.verdict, _words(found.time)
    old, new = _cycles(first, samples[0]), _cycles(second, samples[1])
    if old is not None and new is not None:
        found.cycles = effect(old[0], new[0])
        _confirm(found, old[1], new[1])
    return found


def _confirm(found: Verdict, old_clock: float, new_clock: float) -> None:
    """A change in time counts if it is one in cycles; a time that stands still needs no confirmation."""
    assert found.time is not None
    assert found.cycles is not None
    moved = abs(new_clock / old_clock - 1) >= CLOCK_MOVED
    clocks = f"the clock moved from {old_clock:.0f} to {new_clock:.0f} MHz"
    if found.time.verdict == "SAME" or found.time.verdict == found.cycles.verdict:
        return
    if found.cycles.verdict == "SAME" and moved:
        found.verdict, found.in_cycles = "SAME", True
        found.why = f"in cycles {_words(found.cycles)}; in time {_words(found.time)}: {clocks}"
    elif found.time.verdict in ("FASTER", "SLOWER"):
        found.verdict = "INCONCLUSIVE"
        found.why = f"{_words(found.time)}, but in cycles {_words(found.cycles)}: {clocks}"


def _words(e: Effect) -> str:
    change = f"{100 * (e.ratio - 1):+.1f} % ({100 * (e.low - 1):+.1f} to {100 * (e.high - 1):+.1f} %)"
    return f"{change}, p = {e.p:.1g}" if e.p < 0.1 else change


# ------------------------------------------------------------------------------------------- rule and exit


class Rule(NamedTuple):
    """When a comparison fails: from which slowdown on, and whether missing or broken cells count."""

    slower: float | None = None
    missing: bool = False
    broken: bool = False


def parse_fail_on(text: str) -> Rule:
    """ "slower", "slower:5%", "slower:0.05", "missing", "broken", or several of them with commas between."""
    rule = Rule()
    for part in (p.strip().lower() for p in text.split(",")):
        match = re.fullmatch(r"slower(?::\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?))?", part)
        if match:
            amount = float(match[1] or 0) / (100 if match[2] else 1)
            if amount >= 1 and not match[2]:
                raise ValueError(f"--fail-on {part}: {match[1]} is {100 * amount:.0f} %; did you mean {match[1]}%?")
            rule = rule._replace(slower=amount)
        elif part in ("missing", "broken"):
            rule = rule._replace(missing=rule.missing or part == "missing", broken=rule.broken or part == "broken")
        else:
            raise ValueError(f"--fail-on {part!r}: must be slower, slower:5%, missing or broken, joined by commas")
    return rule


def failures(verdicts: Iterable[Verdict], rule: Rule | None) -> list[Verdict]:
    """Those that the rule counts as failures; without a rule none."""
    if rule is None:
        return []
    limit = math.inf if rule.slower is None else 1 + rule.slower
    return [
        v
        for v in verdicts
        if (v.verdict == "SLOWER" and v.effect is not None and v.effect.ratio >= limit)
        or (rule.missing and v.missing == "b")
        or (rule.broken and v.broken)
    ]


def exit_code(verdicts: Iterable[Verdict], rule: Rule | None = None) -> int:
    return 1 if failures(verdicts, rule) else 0


# ------------------------------------------------------------------------------------------------ on screen

COLOURS = {
    "FASTER": "green", "SLOWER": "red", "SAME": "dim", "INCONCLUSIVE": "yellow", "INCOMPARABLE": "magenta"
}  # fmt: skip


def summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(v.verdict for v in verdicts)
    return ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name]) or "nothing to compare"


def render(verdicts: Sequence[Verdict], console: Console, everything: bool = False) -> None:
    """Prints a table of all that is not SAME (or of everything), then the counts. Names are text, never markup."""
    shown = [v for v in verdicts if everything or v.verdict != "SAME"]
    if shown:
        table = Table(box=None, pad_edge=False)
        for title in ("verdict", "cell", "before", "after", ""):
            table.add_column(title, justify="right" if title in ("before", "after") else "left", overflow="fold")
        for v in shown:
            times = [Text("-" if t is None else ms(t)) for t in (v.a_ms, v.b_ms)]
            name, why = (Text(schema.printable(text)) for text in (v.name, v.why))
            table.add_row(Text(v.verdict, style=COLOURS[v.verdict]), name, *times, why)
        console.print(table)
    console.print(Text(summary(verdicts)))
