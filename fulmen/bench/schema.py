"""The records of a benchmark run: what one line of a results file holds.

A results file is JSON lines, written and flushed one cell at a time. The first line of each run is a `Run`: where, when
and with what was measured. Every other line is a `Cell`: one competitor at one case and one pass. Raw samples are
kept; tables, plots and reports are made from these lines and from nothing else.

    times     milliseconds            memory   bytes            clocks  MHz            floors  FLOP and bytes

Cells that stand side by side, the competitors of one line of a suite, have equal `suite` and `case`. `op` and
`function` say what a competitor computes, so that softmax attention beside linear attention has op "flash", another
function, and the flag ANOTHER-FUNCTION. Our own competitors are called "fulmen " and the backend's name.

Nothing here needs more than the standard library, so that results can be read, compared and shown anywhere.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import types
import typing
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fulmen.bench import Refused, words

SCHEMA = "fulmen-bench/1"
PASSES = ("forward", "backward", "total")  # total: forward and backward in one region
STATUSES = tuple(words.STATUSES)


def printable(text: str) -> str:
    """The text without control characters, which could drive a terminal: they are spelled out (\\x1b)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def number(value: object) -> float | None:
    """A finite number, or None for anything else: results may come from anybody."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number too large for a float
        return None


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


ORDER = ("B", "H", "H_KV", "N", "N_Q", "N_KV", "D", "E", "dtype", "causal", "decay")
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def case_words(case: dict[str, Any]) -> list[str]:
    """["B4 H32 D64", "bf16", "causal", "decay"]. Sizes that follow from others are not said again."""
    sizes, others = [], []
    for k in sorted(case, key=lambda k: (ORDER.index(k) if k in ORDER else len(ORDER), k)):
        v = case[k]
        if v is None or v == case.get({"H_KV": "H", "E": "D"}.get(k, "")):
            continue
        if k.isupper():
            sizes.append(f"{k}{text(v)}" if len(k) == 1 else f"{k} {text(v)}")
        elif isinstance(v, bool):
            others.append(k if v else f"no {k}" if k != "causal" else "full")
        else:
            others.append(DTYPES.get(text(v), text(v)) if k == "dtype" else f"{k} {text(v)}")
    return [" ".join(sizes), *others] if sizes else others


class BadResults(Refused):
    """A results file that cannot be read, with its name, line and what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class NotJson(BadResults):
    """A line that is no JSON, as one that was being written when a process died."""


@dataclass
class Run:
    run_id: str
    time: str  # ISO 8601, UTC
    command: str  # what would repeat it
    environment: dict[str, Any]  # device, arch, sm_count, l2_bytes, driver, torch, triton, python, cpu ...
    commit: dict[str, Any]  # sha, dirty, diff: a hash of what is not committed, source: one of all source files
    ceilings: dict[str, Any] = field(default_factory=dict)
    # flops_hard, flops_nominal, flops_measured (FLOP/s); bytes_hard, bytes_measured (B/s); clock_max_mhz
    protocol: str = "1"
    kind: str = "run"
    schema: str = SCHEMA


@dataclass
class Cell:
    run_id: str
    suite: str
    op: str  # "lightning", "flash", "layer"
    function: str  # what is computed, in words: cells with another function are not compared as equals
    case: dict[str, Any]  # B, H, H_KV, N, D, E, dtype, causal, decay (bool) ...: everything that sets the work
    competitor: str
    pass_: str
    status: str = "ok"
    reason: str = ""  # why not ok
    backend: str = ""  # what "auto" chose; the package's version for a peer
    version: str = ""
    cache: str = "cold"  # or "hot": L2 as the call before left it
    samples_ms: list[float] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)  # of the SMs, one per sample or round; empty where unknown
    stats: dict[str, Any] = field(default_factory=dict)
    # median, low, high (95 %), p20, p80, min, mad, n, outliers, stop (why sampling ended), enqueue (host's ms until the
    # call returns), loop (host's ms of a call in a loop), first_call_s, throttle (reasons), power_w, temperature_c
    device_ms: float | None = None  # by graph replay, without the host
    kernels_ms: float | None = None  # kernels alone, by the profiler, without the gaps between them
    host_ms: float | None = None  # wall time of a synchronised call
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)
    # inputs, output, saved, workspace_forward, workspace_backward, gradients, peak: {"bytes": ..., "floor": ...}
    correctness: dict[str, dict[str, Any]] = field(default_factory=dict)  # tensor: error, bound, max_abs, ok
    audit: dict[str, Any] = field(default_factory=dict)
    # flops, bytes (floors), floor_ms, efficiency, arithmetic (words), flags: [{"flag": ..., "why": ...}]
    resources: list[dict[str, Any]] = field(default_factory=list)  # kernel, registers, shared, stack ...
    kernels: list[str] = field(default_factory=list)  # what the device ran, by name, in order; empty where unknown
    kinds: dict[str, float] = field(default_factory=dict)  # ms of these: products, attention, glue, optimiser
    seed: int = 0
    command: str = ""  # repeats this cell alone
    kind: str = "cell"
    schema: str = SCHEMA

    @property
    def config_hash(self) -> str:
        """Names what was measured, whoever measured it: equal for cells that may be compared."""
        what = [self.op, self.function, sorted(self.case.items()), self.competitor, self.pass_, self.cache]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def median_ms(self) -> float | None:
        return self.stats.get("median")

    def drop_times(self) -> None:
        self.samples_ms, self.clocks_mhz, self.stats = [], [], {}
        self.device_ms = self.kernels_ms = self.host_ms = None
        self.kinds = {}

    def flags(self) -> list[str]:
        return [str(f.get("flag")) for f in self.audit.get("flags", [])]


TYPES = {kind: typing.get_type_hints(kind) for kind in (Run, Cell)}


def dumps(record: Run | Cell) -> str:
    """One line; keys sorted, so that equal records are equal text."""
    values = dataclasses.asdict(record)
    if isinstance(record, Cell):
        values["config_hash"] = record.config_hash
    values = {k: _finite(v) if isinstance(v, dict) else v for k, v in values.items()}  # samples must be numbers
    return json.dumps(values, sort_keys=True, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null, so that one odd number does not cost the whole run."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse(line: str, where: str) -> Run | Cell:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets without end
        raise NotJson(f"{where}: not JSON ({error}); was the file cut off?") from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        found = values.get("schema") if isinstance(values, dict) else type(values).__name__
        raise BadResults(f"{where}: schema {found!r}, this version of fulmen reads {SCHEMA!r}")
    kinds: dict[Any, type[Run] | type[Cell]] = {"run": Run, "cell": Cell}
    kind = kinds.get(values.get("kind"))
    if kind is None:
        raise BadResults(f"{where}: kind {values.get('kind')!r}, must be 'run' or 'cell'")
    known = {f.name for f in dataclasses.fields(kind)}
    try:
        record = kind(**{name: value for name, value in values.items() if name in known})  # a newer one may add some
    except TypeError as error:
        raise BadResults(f"{where}: {error}") from None
    check(record, where)
    return record


def check(record: Run | Cell, where: str) -> None:
    """Types and words of the fields other code relies on; a file may come from anybody."""
    for f in dataclasses.fields(record):
        if not fits(value := getattr(record, f.name), TYPES[type(record)][f.name]):
            raise BadResults(f"{where}: {f.name} is {type(value).__name__}, must be {f.type}")
    if isinstance(record, Cell):
        if not fits(record.audit.get("flags", []), list[dict[str, Any]]):
            raise BadResults(f"{where}: audit.flags must be a list of objects")
        for name, word, known in (("pass_", record.pass_, PASSES), ("status", record.status, STATUSES)):
            if word not in known:
                raise BadResults(f"{where}: {name} {word!r}, must be one of {', '.join(known)}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type such as list[float], with everything in it; numbers must be finite."""
    inner = typing.get_args(kind)
    if kind is Any or isinstance(kind, types.UnionType):
        return kind is Any or any(fits(value, one) for one in inner)
    if kind is float:
        return number(value) is not None
    right = isinstance(value, typing.get_origin(kind) or kind) and not isinstance(value, bool)
    return right and (not inner or all(fits(x, inner[-1]) for x in getattr(value, "values", lambda: value)()))


@dataclass
class Results:
    runs: dict[str, Run]
    cells: list[Cell]
    notes: list[str] = field(default_factory=list)  # what was skipped while reading


def text_of(path: str | Path) -> str:
    """The text of a file, also of one compressed by gzip (`*.gz`); raises BadResults."""
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if str(path).endswith(".gz") else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadResults(f"{path}: cannot be read: {error}") from None


def records(path: str | Path, notes: list[str]) -> Iterator[Run | Cell]:
    """The records of a file; a last line that was cut off is skipped, and a note says so."""
    text = text_of(path)
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield parse(line, f"{path}:{number}")
        except NotJson as error:
            if number == 1 or number < len(lines) or text.endswith("\n"):
                raise
            notes.append(f"{error} It is skipped.")


def read(paths: Iterable[str | Path]) -> Results:
    """All runs and cells of some files; a cell measured again replaces the earlier one of its run."""
    runs: dict[str, Run] = {}
    cells: dict[tuple[str, str], Cell] = {}
    notes: list[str] = []
    for path in paths:
        for record in records(path, notes):
            if isinstance(record, Run):
                runs[record.run_id] = record
            else:
                if record.run_id not in runs:
                    raise BadResults(f"{path}: a cell of run {record.run_id!r} comes before that run's record")
                cells[record.run_id, record.config_hash] = record
    return Results(runs, list(cells.values()), notes)
