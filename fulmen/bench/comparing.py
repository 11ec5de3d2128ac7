"""Two sets of results against each other, cell by cell: FASTER, SLOWER, SAME, INCONCLUSIVE or INCOMPARABLE.

Cells are matched by what was measured (`config_hash`), and only on the same GPU by the same protocol. The ratio is the
Hodges-Lehmann estimate, the median of all quotients b/a of a sample of b and one of a, with its 95 % interval; p is
that of Mann and Whitney's test. docs/bench.md says what a verdict means.

GPU clocks move with heat and power. Where both files hold clocks, cycles (time x clock) are compared as well. A change
in time without one in cycles is the clock's, and the cell is SAME. A kernel that waits for memory takes equally long at
another clock, and is SAME by its time whatever its cycles say.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fulmen.bench import Refused, schema
from fulmen.bench.audit import median_interval, ms, time_ms
from fulmen.bench.schema import number

COLOURS = {"SLOWER": "red", "FASTER": "green", "INCONCLUSIVE": "yellow", "INCOMPARABLE": "magenta", "SAME": "dim"}
VERDICTS = list(COLOURS)  # in the order in which they are shown
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
        same = abs(self.ratio - 1) < EQUAL and self.low > 1 - ROOM and self.high < 1 + ROOM
        return "SAME" if same else "INCONCLUSIVE"

    @property
    def words(self) -> str:
        ratio, low, high = (f"{100 * (x - 1):+.1f}" for x in self[:3])
        return f"{ratio} % ({low} to {high} %)" + (f", p = {self.p:.1g}" if self.p < 0.1 else "")


@dataclass
class Verdict:
    """What became of one cell."""

    cell: schema.Cell  # the newer one where there are two
    verdict: str = "INCOMPARABLE"
    why: str = ""
    a_ms: float | None = None
    b_ms: float | None = None
    time: Effect | None = None
    missing: str = ""  # "a" or "b": the file that has no such cell
    broken: bool = False  # a has a time, b tried and has none

    @property
    def name(self) -> str:
        cell, hot = self.cell, " (hot)" if self.cell.cache == "hot" else ""
        return f"{cell.suite}: {cell.competitor}, {cell.pass_}{hot}, {' '.join(schema.case_words(cell.case))}"


# --------------------------------------------------------------------------------------------- statistics
def effect(a: Array, b: Array) -> Effect:
    """How b differs from a; both positive, at least MIN_SAMPLES each."""
    from scipy import stats

    generator = np.random.default_rng(0)
    a, b = (x if len(x) <= MAX_SAMPLES else generator.choice(x, MAX_SAMPLES, replace=False) for x in (a, b))
    quotients = np.sort(np.subtract.outer(np.log(b), np.log(a)).ravel())
    rank = max(0, math.floor(len(quotients) / 2 - 1.96 * math.sqrt(len(quotients) * (len(a) + len(b) + 1) / 12)))
    ratio, low, high = (float(np.exp(x)) for x in (np.median(quotients), quotients[rank], quotients[-1 - rank]))
    (a_low, a_high), (b_low, b_high) = (median_interval(sorted(x.tolist())) for x in (a, b))
    alike = a.min() == a.max() == b.min() == b.max()  # the test divides by the variance of the ranks
    p = 1.0 if alike else float(stats.mannwhitneyu(a, b, method="asymptotic").pvalue)
    return Effect(ratio, low, high, p, a_high < b_low or b_high < a_low)


def _cycles(cell: schema.Cell, times: Array) -> Array | None:
    """Thousands of cycles of each sample; clocks are one per sample, or one per round of them."""
    clocks = [c for c in map(number, cell.clocks_mhz) if c and c > 0]
    if not clocks or len(clocks) != len(cell.clocks_mhz) or len(clocks) > len(times):
        return None
    return times * np.array(clocks)[np.arange(len(times)) * len(clocks) // len(times)]


# ------------------------------------------------------------------------------------------------ verdicts
def compare(a: schema.Results, b: schema.Results) -> list[Verdict]:
    """A verdict for every cell of either; b is the newer one. Those that lost or won most time come first.

    A cell that neither could measure, as of a package that is not installed, has none.
    """
    before, after = ({cell.config_hash: cell for cell in results.cells} for results in (a, b))
    verdicts = [Verdict(c, why="only in the first file", missing="b") for key, c in before.items() if key not in after]
    for key, cell in after.items():
        old = before.get(key)
        if old is None:
            verdicts.append(Verdict(cell, why="only in the second file", missing="a"))
        elif not old.status == cell.status in ("unsupported", "skipped"):
            verdicts.append(_judge(old, cell, _differences(a.runs.get(old.run_id), b.runs.get(cell.run_id))))
    return sorted(verdicts, key=lambda v: (VERDICTS.index(v.verdict), -abs((v.b_ms or 0.0) - (v.a_ms or 0.0))))


def _differences(a: schema.Run | None, b: schema.Run | None) -> str:
    """Why two runs cannot be compared, or nothing."""
    if a is None or b is None:
        return "the record of the run is missing"
    if a.protocol != b.protocol:
        return f"measured by protocols {a.protocol} and {b.protocol}"
    # A CPU's name is in "cpu": "device" says no more than that it is one.
    for fact in ("device",) if number(a.environment.get("arch")) else ("device", "cpu"):
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
        usable = [t for t in map(time_ms, cell.samples_ms) if t is not None]
        if cell.status != "ok":
            found.why = f"no time in the {which} file ({cell.status}{f': {cell.reason}' if cell.reason else ''})"
            return found
        if len(usable) < max(MIN_SAMPLES, len(cell.samples_ms)):
            found.why = f"fewer than {MIN_SAMPLES} usable samples in the {which} file"
            return found
        samples.append(np.array(usable))
    time = found.time = effect(*samples)
    found.verdict, found.why = time.verdict, time.words
    old, new = _cycles(first, samples[0]), _cycles(second, samples[1])
    if old is None or new is None:
        return found
    cycles = effect(old, new)
    if time.verdict in ("SAME", cycles.verdict):
        return found  # a time that stands still needs no confirmation
    before, after = (float(np.median(cell.clocks_mhz)) for cell in (first, second))
    clocks = f"the clock moved from {before:.0f} to {after:.0f} MHz"
    if cycles.verdict == "SAME" and abs(after / before - 1) >= CLOCK_MOVED:
        found.verdict, found.why = "SAME", f"in cycles {cycles.words}; in time {time.words}: {clocks}"
    elif time.verdict in ("FASTER", "SLOWER"):
        found.verdict, found.why = "INCONCLUSIVE", f"{time.words}, but in cycles {cycles.words}: {clocks}"
    return found


# ------------------------------------------------------------------------------------- rule, exit, screen
def parse_fail_on(text: str) -> dict[str, float]:
    """ "slower", "slower:5%", "slower:0.05", "missing", "broken", or several with commas: each with its least share."""
    rule: dict[str, float] = {}
    for part in text.lower().split(","):
        name, colon, said = (word.strip() for word in part.partition(":"))
        share = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(%?)", said)
        if name not in ("slower", "missing", "broken") or (colon and (name != "slower" or share is None)):
            raise Refused(f"--fail-on {part!r}: must be slower, slower:5%, missing or broken, joined by commas")
        rule[name] = float(share[1]) / (100 if share[2] else 1) if share else 0.0
        if rule[name] >= 1 and not said.endswith("%"):
            raise Refused(f"--fail-on {part}: {said} is {100 * rule[name]:.0f} %; did you mean {said}%?")
    return rule


def failures(verdicts: Iterable[Verdict], rule: Mapping[str, float]) -> list[Verdict]:
    """Those that the rule counts as failures: slower by its share, missing in the second file, or broken there."""

    def fails(v: Verdict) -> bool:
        slower = v.verdict == "SLOWER" and v.time is not None and v.time.ratio >= 1 + rule.get("slower", math.inf)
        return slower or ("missing" in rule and v.missing == "b") or ("broken" in rule and v.broken)

    return [v for v in verdicts if fails(v)]


def summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(v.verdict for v in verdicts)
    return ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name]) or "nothing to compare"


def render(verdicts: Sequence[Verdict], console: Console) -> None:
    """Prints a table of all that is not SAME, then the counts. Names are text, never markup."""
    table = Table(box=None, pad_edge=False)
    for title in ("verdict", "cell", "before", "after", "change: median of all quotients"):
        table.add_column(title, justify="right" if title in ("before", "after") else "left", overflow="fold")
    for v in verdicts:
        if v.verdict != "SAME":
            texts = (v.name, *("-" if t is None else ms(t) for t in (v.a_ms, v.b_ms)), v.why)
            table.add_row(Text(v.verdict, style=COLOURS[v.verdict]), *(Text(schema.printable(text)) for text in texts))
    if table.rows:
        console.print(table)
    console.print(Text(summary(verdicts)))
