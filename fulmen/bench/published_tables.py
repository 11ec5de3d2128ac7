"""Reads published numbers from CSV, JSON lines or the tables of a Markdown page, into rows that can be audited.

The meaning of a column is guessed from its name, or given in a small TOML file beside the table:

    [options]  time_unit = "ms", memory_unit = "MB", baseline = "SDPA", against = ["other.md"]
    [facts]    gpu = "A100-SXM4-40GB", B = 4, H = 32, D = 64, dtype = "bf16", causal = true   what holds for all rows
    [columns]  "SeqLen" = "N", "Fwd (ms)" = "forward", "Ours" = "total competitor=Ours"       what a column holds
    [[where]]  heading = "*MQA*", facts = {...}, columns = {...}                              what holds under a heading

A meaning is one of ROLES, followed by facts that hold for the column's numbers. On a Markdown page facts also come from
tables of two columns ("GPU | L4"), from "- **GPU**: L4", from lines and headings ("Batch=2, SeqLen=2048"). A heading
that names a unit ("Backward time (ms)") makes unknown columns of numbers those of kernels, measured in it.
`fulmen.bench.published` judges the numbers.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from fulmen.bench import floors
from fulmen.bench.cases import toml
from fulmen.bench.schema import BadResults, fits, text_of

SIZES = ("B", "H", "H_KV", "N", "N_Q", "N_KV", "D", "E", "hidden")
TIMES = ("forward", "backward", "total", "time")
MEMORY = ("memory", "memory_forward", "memory_backward", "memory_saved", "memory_peak")
NUMBERS = (*TIMES, *MEMORY, "speedup", "per_second", "tflops", "any")
FACTS = (*SIZES, "competitor", "gpu", "dtype", "causal", "pass", "op", "layer", "label")
ROLES = (*NUMBERS, *FACTS, "facts", "ignore")
OPTIONS = ("time_unit", "memory_unit", "baseline", "against")
SECTIONS: dict[str, Any] = {"options": dict, "facts": dict, "columns": dict, "where": list[dict[str, Any]]}

STATISTICS = ("mean", "median", "avg")  # of anything, unless a unit says that it is time
# "MB" is taken for MiB: the larger of what people mean by it, so that nothing is called too small by mistake.
UNITS = {
    "time": {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3},
    "memory": {"b": 1.0, "kb": 2.0**10, "kib": 2.0**10, "mb": 2.0**20, "mib": 2.0**20, "gb": 2.0**30, "gib": 2.0**30},
}
PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9}
GUESSES = {
    "competitor": r"kernel|competitor|method|implementation|impl|backend|provider|name",
    "N": r"seq ?len(gth)?|sequence length|seqlen q|tokens|length|n|s",
    "B": r"b|batch|batch size",
    "H": r"h|heads|attention heads|(num|n) heads|query heads|h q",
    "H_KV": r"h kv|kv ?heads|(num|n) kv heads",
    "D": r"d|head ?dim|head dimension|d head|hdim|dqk",
    "E": r"e|dv|value head dim",
    "hidden": r"hidden|hidden size|model dim|d model",
    "dtype": r"dtype|precision|data ?type",
    "gpu": r"gpu|device|gpu name",
    "causal": r"causal|is causal|causal masking",
    "pass": r"pass|mode|direction",
    "op": r"op|operation",
    "memory_forward": r"fwd mem(ory)?",
    "memory_backward": r"bwd mem(ory)?",
    "memory_saved": r"activations?|saved",
    "memory_peak": r"peak|peak mem(ory)?|mem(ory)?",
    "forward": r"fwd|forward|fwd time",
    "backward": r"bwd|backward|bwd time",
    "total": r"total|fwd ?\+ ?bwd|fwd bwd|forward ?\+ ?backward|fwdbwd",
    "time": r"latency|time|runtime|mean|median|mean time|avg",
    "speedup": r"(best )?speedup.*",
    "per_second": r"throughput|iterations/s|iter/s|it/s",
    "tflops": r"tflops?|tflop/s",
    "facts": r"config(uration)?|case|shape",
}
PASSES = {
    "total": r"(fwd|forward) ?(\+|and|&|_|/) ?(bwd|backward)|total|fwdbwd|fwd_bwd|full|train(ing)?",
    "backward": r"bwd|backward",
    "forward": r"fwd|forward|inference",
}
BOOLEANS = {"true": True, "yes": True, "1": True, "causal": True, "false": False, "no": False, "0": False}


class Number(NamedTuple):
    """A printed number: its value and half a unit of its last digit."""

    value: float
    half: float

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    def times(self, factor: float) -> Number:
        return Number(self.value * factor, self.half * factor)


@dataclass
class Row:
    """One published number, and the facts it depends on."""

    where: str
    table: str  # numbers of one table belong together
    line: int  # so do those of one line
    kind: str  # a word of NUMBERS; times have "time" and their pass among the facts
    number: Number  # times in ms, memory in bytes
    facts: dict[str, Any]

    @property
    def competitor(self) -> str:
        return str(self.facts.get("competitor", ""))

    @property
    def pass_(self) -> str | None:
        return self.facts.get("pass")


@dataclass
class Published:
    """All numbers of one file, what its map and the page say, and what was assumed."""

    path: Path
    options: dict[str, Any]  # and the other sections of the map
    facts: dict[str, Any]
    columns: dict[str, str]
    where: list[dict[str, Any]]
    rows: list[Row] = field(default_factory=list)
    told: dict[str, None] = field(default_factory=dict)  # what was assumed, each once
    guessed: dict[str, str] = field(default_factory=dict)  # columns nobody explained
    blank: list[str] = field(default_factory=list)  # where a time should be and no number is
    unread: list[str] = field(default_factory=list)  # tables without a column of numbers that we know

    def notes(self) -> list[str]:
        taken = ", ".join(f"{k} = {v}" for k, v in self.guessed.items() if v != "ignore")
        unused = ", ".join(k for k, v in self.guessed.items() if v == "ignore")
        columns = {"these columns are taken for": taken, "these columns are not used": unused}
        return [*(f"{k}: {v}" for k, v in columns.items() if v), *self.told]

    def tell(self, text: str) -> None:
        self.told[text] = None

    def under(self, heading: str, what: str) -> dict[str, Any]:
        """`what`, "facts" or "columns", of all rules for a heading."""
        rules = [rule for rule in self.where if fnmatchcase(heading, rule.get("heading", "*"))]
        return {name: value for rule in rules for name, value in rule.get(what, {}).items()}


def faults(sections: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a map, in an order in which what comes first is all that can be told."""
    yield from (f"unknown section {name}; there are {', '.join(SECTIONS)}" for name in set(sections) - set(SECTIONS))
    for name, kind in SECTIONS.items():
        if not fits(sections[name], kind):
            yield f"[{name}] must be a {'list of tables' if name == 'where' else 'table'}"
    for option in set(sections["options"]) - set(OPTIONS):
        yield f"unknown option {option}; there are {', '.join(OPTIONS)}"
    for name, role in (pair for one in (sections, *sections["where"]) for pair in one.get("columns", {}).items()):
        if str(role).split(" ")[0] not in ROLES:
            yield f"column {name!r} is {role!r}, must be one of {', '.join(ROLES)}"


# --------------------------------------------------------------------------------------------- words and cells
def plain(text: object) -> str:
    return re.sub(r"[*`]|</?\w+>", "", str(text)).strip()


def parse_number(text: object) -> tuple[Number, str] | None:
    """(number, what follows it) of a cell such as "**0.27 ms**", "1,024", "3.04M" or "7.47x (Triton)"."""
    match = re.match(r"[~≈<>]?\s*([-+]?)(\d[\d,]*|\d*)(\.\d+)?([eE][-+]?\d+)?\s*(.*)", plain(text))
    if match is None or not (match[2] or match[3]):
        return None
    whole, decimals, exponent = match[2].replace(",", ""), match[3] or "", int((match[4] or "e0")[1:])
    if len(whole) + len(decimals) > 400 or abs(exponent) > 300:
        return None
    value = float(f"{match[1]}{whole or 0}{decimals}e{exponent}")
    return Number(value, 0.5 * 10.0 ** (exponent - max(len(decimals) - 1, 0))), match[5].strip()


def unit_of(text: str, kind: str) -> float | None:
    """The factor of a unit in brackets, or of the last word: "Fwd (ms)", "latency_ms", "Backward, ms"."""
    words = plain(text).lower()
    last = re.split(r"[\s_]", words.rstrip(".:"))[-1]
    candidates = [*re.findall(r"[(\[]\s*([^)\]]+?)\s*[)\]]", words), *([last] if last not in ("s", "b") else [])]
    return next((UNITS[kind][word] for word in candidates if word in UNITS[kind]), None)


def named(patterns: dict[str, str], text: str) -> str | None:
    """The first name whose pattern is all of a text."""
    return next((name for name, pattern in patterns.items() if re.fullmatch(pattern, text)), None)


def guess(header: str) -> str | None:
    """What a column probably holds; None where nothing is known."""
    text = re.sub(r"[(\[].*?[)\]]", "", plain(header)).lower()
    name = re.sub(r"[\s_.]+", " ", text.rpartition("case.")[2] or text).strip()
    name = re.sub(r" (ns|us|µs|μs|ms|mb|mib|gb|gib)$", "", name)
    if sized := re.fullmatch(r"(?:n|s|seq ?len)\s*=\s*(\d+)", name):
        return f"any N={sized[1]}"
    return named(GUESSES, name) or (of_kernel("time", header) if unit_of(header, "time") is not None else None)


def of_kernel(kind: str, header: str) -> str:
    return f"{kind} competitor={re.sub(r'[(].*', '', plain(header)).strip()}"


def fact(role: str, text: object) -> Any:
    """The value of a fact as the floors want it, or None."""
    word = plain(text)
    if role in SIZES:
        parsed = parse_number(text)
        value = 0.5 if parsed is None else parsed[0].value * (1024 if parsed[1].lower().startswith("k") else 1)
        return int(value) if value == int(value) else None
    if role == "dtype":
        return floors.dtype_name(word)
    if role == "pass":
        return named(PASSES, word.lower())
    if role in ("causal", "layer"):
        return text if isinstance(text, bool) else BOOLEANS.get(word.lower().split(" ")[0].strip("(),"))
    return word or None


def facts_of(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """From ("Batch", "2"), ("GPU", "NVIDIA L4") and the like."""
    found = {role: fact(role, value) for name, value in pairs if (role := guess(name.strip()) or "") in FACTS}
    return {role: value for role, value in found.items() if value is not None}


def facts_in(text: str) -> dict[str, Any]:
    """From "Batch=2, SeqLen=2048"."""
    return facts_of(re.findall(r"([A-Za-z_][\w ]*?)\s*=\s*([\w.]+)", plain(text)))


# ------------------------------------------------------------------------------------------------- three formats
@dataclass
class Table:
    name: str
    headers: list[str]
    lines: list[tuple[int, list[Any]]]
    headings: tuple[str, ...] = ()  # from the page's title to the line just above the table
    heading: str = ""  # the headings proper, which rules of a map match

    def context(self) -> tuple[str, float, str | None]:
        """(kind, unit, pass) of the numbers, from the nearest heading that names a unit: "Backward time (ms)"."""
        for text in reversed(self.headings):
            for kind in UNITS:
                if (unit := unit_of(text, kind)) is not None:
                    words = plain(text).lower()
                    return kind, unit, next((p for p, w in PASSES.items() if re.search(rf"\b({w})\b", words)), None)
        return "", 0.0, None


def csv_table(path: Path, text: str) -> list[Table]:
    delimiter = max(",;\t|", key=text.split("\n", 1)[0].count)
    try:
        lines = list(csv.reader(text.splitlines(keepends=True), delimiter=delimiter))
    except csv.Error as error:
        raise BadResults(f"{path}: not CSV: {error}") from None
    numbered = [(i, list(line)) for i, line in enumerate(lines, 1) if any(line)]
    return [Table("table", lines[0], [line for line in numbered if line[0] > 1])] if lines else []


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value


def json_table(path: Path, text: str) -> list[Table]:
    records = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            values = json.loads(line or "{}")
        except (ValueError, RecursionError) as error:
            raise BadResults(f"{path}:{number}: not JSON ({error}); was the file cut off?") from None
        if not isinstance(values, dict):
            raise BadResults(f"{path}:{number}: a line must be an object, this is a {type(values).__name__}")
        records[number] = dict(flat(values))
    headers = list(dict.fromkeys(key for record in records.values() for key in record))
    return [Table("lines", headers, [(n, [record.get(key, "") for key in headers]) for n, record in records.items()])]


def split(line: str) -> list[str]:
    return [c.strip() for c in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def markdown_tables(text: str, page: dict[str, Any]) -> Iterator[Table]:
    """Tables under their headings; facts of the page go into `page`."""
    headings: dict[int, str] = {}
    lines, above, count, i = text.splitlines(), "", 0, 0
    while i < len(lines):
        line = lines[i]
        if match := re.match(r"(#{1,6})\s+(.*)", line):
            level, above = len(match[1]), ""
            headings = {k: v for k, v in headings.items() if k < level} | {level: plain(match[2])}
        elif match := re.match(r"\s*[-+*]\s+\**([^*:]+?)\**\s*:\**\s+(.+)", line):
            page |= facts_of([(match[1], match[2])])
        elif "|" in line and i + 1 < len(lines) and re.fullmatch(r"[\s|:-]*-[\s|:-]*", lines[i + 1]):
            end = next((n for n in range(i + 2, len(lines)) if "|" not in lines[n]), len(lines))
            headers, body = split(line), [(n + 1, split(lines[n])) for n in range(i + 2, end)]
            if len(headers) == 2 and guess(headers[1]) is None:
                page |= facts_of([(cells[0], cells[1]) for _, cells in body if len(cells) == 2])
            else:
                count += 1
                titles = tuple(headings.values())
                yield Table(f"table {count}", headers, body, (*titles, plain(above)), " / ".join(titles))
            i, above = end - 1, ""
        elif line.strip():
            above = line
            if len(near := facts_in(line)) >= 2:  # "B=2, H=32, D=128 on an RTX 5090."
                sheet = floors.gpu(line)
                page |= near | ({"gpu": sheet.name} if sheet else {})
        i += 1


def read(path: Path, map_path: Path | None = None) -> Published:
    """All numbers of a file; `map_path` defaults to the TOML file of the same name beside it, where there is one."""
    beside = path.with_suffix(".toml")
    map_path = map_path or (beside if beside.exists() and beside != path else None)
    sections: dict[str, Any] = {"options": {}, "facts": {}, "columns": {}, "where": []}
    sections |= {} if map_path is None else toml(text_of(map_path), f"{map_path}: cannot be read", BadResults)
    if fault := next(faults(sections), None):
        raise BadResults(f"{map_path}: {fault}")
    text, suffix, page = text_of(path), path.suffix.lower(), dict[str, Any]()
    if "\0" in text:
        raise BadResults(f"{path}: holds binary data, not text")
    if suffix in (".jsonl", ".ndjson", ".json"):
        tables = json_table(path, text)
    elif suffix in (".md", ".markdown") or re.search(r"^\s*\|?[\s:|-]*-{3,}[\s:|-]*\|", text, re.M):
        tables = list(markdown_tables(text, page))
    else:
        tables = csv_table(path, text)
    found = Published(path, **sections | {"facts": page | sections["facts"]})
    for table in tables:
        read_table(found, table)
    if not found.rows:
        raise BadResults(f"{path}: no times or bytes found; say in a TOML map which column is what")
    return found


def columns_of(found: Published, table: Table) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """For each column its role, its header and the facts that hold for it."""
    said, (kind, _, _) = found.columns | found.under(table.heading, "columns"), table.context()
    for i, header in enumerate(table.headers):
        role = said.get(plain(header)) or said.get(header)
        if role is None:
            role = guess(header)
            if role is None and kind and any(parse_number(c[i]) for _, c in table.lines if i < len(c)):
                role = of_kernel("memory_peak" if kind == "memory" else "time", header)
            found.guessed[plain(header)] = role = role or "ignore"
        word, _, rest = role.partition(" ")
        pairs = re.findall(r"(\w+)=(.+?)(?=\s\w+=|$)", rest)
        yield word, header, {name: fact(name, value) if name in ROLES else value for name, value in pairs}


def read_table(found: Published, table: Table) -> None:
    columns, context, before = list(columns_of(found, table)), table.context(), len(found.rows)
    of_table: dict[str, Any] = {"pass": context[2]} if context[2] else {}
    of_table |= found.facts | facts_in(table.heading) | found.under(table.heading, "facts")
    for number, cells in table.lines:
        where, of_line = f"{found.path.name}:{number}", dict(of_table)
        for (role, _, _), cell in zip(columns, cells, strict=False):
            given = facts_in(str(cell)) if role == "facts" else {role: fact(role, cell)} if role in FACTS else {}
            of_line |= {name: value for name, value in given.items() if value is not None}
        for (role, header, facts), cell in zip(columns, cells, strict=False):
            if role not in NUMBERS:
                continue
            if (parsed := parse_number(cell)) is None:
                found.blank += [where] if role in TIMES else []
                continue
            row = Row(where, table.name, number, role, parsed[0], of_line | facts)
            if (
                plain(header) in found.guessed
                and role == "time"
                and plain(header).lower() in STATISTICS
                and not has_unit(found, header, parsed[1], context)
            ):
                found.tell(f"column {plain(header)!r} has no unit and may be of anything: left out")
                continue
            in_units(found, row, header, parsed[1], context)
            found.rows.append(row)
    if len(found.rows) == before and table.lines:
        found.unread.append(f"{table.name}{f' ({table.heading})' if table.heading else ''}")


def has_unit(found: Published, header: str, rest: str, context: tuple[str, float, str | None]) -> bool:
    """Whether the cell, the column, the heading or the map says that it is a time."""
    known = UNITS["time"].get(rest.lower().split(" ")[0].strip("(),")) or unit_of(header, "time")
    return bool(known) or context[0] == "time" or "time_unit" in found.options


def in_units(found: Published, row: Row, header: str, rest: str, context: tuple[str, float, str | None]) -> None:
    """Times in ms, memory in bytes: by the unit of the cell, the column, the heading or the map."""
    word = rest.lower().split(" ")[0].strip("(),")

    def unit(kind: str, usual: str) -> float:
        known = UNITS[kind].get(word) or unit_of(header, kind) or (context[1] if context[0] == kind else None)
        if known is None and kind == "time" and "time_unit" not in found.options:
            found.tell(f"column {plain(header)!r} has no unit: taken for ms")
        return known or UNITS[kind].get(str(found.options.get(f"{kind}_unit", usual)).lower(), UNITS[kind][usual])

    if row.kind == "any":
        row.kind = "speedup" if word in ("x", "×") else "time"
    if row.kind in TIMES:
        row.facts |= {"pass": row.kind} if row.kind != "time" else {}
        row.kind, row.number = "time", row.number.times(unit("time", "ms"))
    elif row.kind in MEMORY:
        row.kind = "memory_peak" if row.kind == "memory" else row.kind
        row.number = row.number.times(unit("memory", "mb"))
    elif row.kind == "per_second":
        row.number = row.number.times(PREFIXES.get(word, 1.0))
    elif row.kind == "speedup" and (note := re.search(r"\((.+?)\)", rest)):
        row.facts["fastest"] = note[1]
