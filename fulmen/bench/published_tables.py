"""Reads anyone's published numbers: CSV, JSON lines or the tables of a Markdown page, into rows that can be audited.

What a column means is guessed from its name, or said in a small TOML file beside the table:

    [options]  time_unit = "ms", memory_unit = "MB", baseline = "SDPA", against = ["other.md"], skip = ["Plots*"]
    [facts]    gpu = "A100-SXM4-40GB", B = 4, H = 32, D = 64, dtype = "bf16", causal = true   what holds for all rows
    [columns]  "SeqLen" = "N", "Fwd (ms)" = "forward", "Ours" = "total competitor=Ours"       what a column holds
    [[where]]  heading = "*MQA*", competitor = "LA-*", facts = {...}, columns = {...}         what holds for some rows

A column's meaning is one of the words in ROLES, and after it facts that hold for its numbers. On a Markdown page facts
also come from tables of two columns ("GPU | L4"), from "- **GPU**: L4" and from headings ("Batch=2, SeqLen=2048").
Nothing is asked of the numbers themselves here: `fulmen.bench.published` judges them.
"""

from __future__ import annotations

import csv
import fnmatch
import importlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fulmen.bench import floors
from fulmen.bench.schema import BadResults

MAX_BYTES = 50 << 20
SIZES = ("B", "H", "H_KV", "N", "N_Q", "N_KV", "D", "E", "hidden")
TIMES = ("forward", "backward", "total", "time")
MEMORY = ("memory", "memory_forward", "memory_backward", "memory_saved", "memory_peak")
NUMBERS = (*TIMES, *MEMORY, "speedup", "per_second", "tflops", "any")
ROLES = (*NUMBERS, *SIZES, "competitor", "gpu", "dtype", "causal", "pass", "op", "layer", "label", "facts", "ignore")

OPTIONS = ("time_unit", "memory_unit", "baseline", "against", "skip")

TIME_UNITS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}
# "MB" is taken for MiB: the larger of what people mean by it, so that nothing is called too small by mistake.
MEMORY_UNITS = {"b": 1.0, "kb": 2.0**10, "kib": 2.0**10, "mb": 2.0**20, "mib": 2.0**20, "gb": 2.0**30, "gib": 2.0**30}

GUESSES = (
    (r"kernel|competitor|method|implementation|impl|backend|provider|name", "competitor"),
    (r"seq ?len(gth)?|sequence length|seqlen q|tokens|length|n|s", "N"),
    (r"b|batch|batch size", "B"),
    (r"h|heads|attention heads|(num|n) heads|query heads|h q", "H"),
    (r"h kv|kv ?heads|(num|n) kv heads", "H_KV"),
    (r"d|head ?dim|head dimension|d head|hdim|dqk", "D"),
    (r"e|dv|value head dim", "E"),
    (r"hidden|hidden size|model dim|d model", "hidden"),
    (r"dtype|precision|data ?type", "dtype"),
    (r"gpu|device|gpu name", "gpu"),
    (r"causal|is causal|causal masking", "causal"),
    (r"pass|mode|direction", "pass"),
    (r"op|operation", "op"),
    (r"fwd mem(ory)?", "memory_forward"),
    (r"bwd mem(ory)?", "memory_backward"),
    (r"activations?|saved", "memory_saved"),
    (r"peak|peak mem(ory)?|mem(ory)?", "memory_peak"),
    (r"fwd|forward|fwd time", "forward"),
    (r"bwd|backward|bwd time", "backward"),
    (r"total|fwd ?\+ ?bwd|fwd bwd|forward ?\+ ?backward|fwdbwd", "total"),
    (r"latency|time|runtime|mean|median|mean time|avg", "time"),
    (r"(best )?speedup.*", "speedup"),
    (r"throughput|iterations/s|iter/s|it/s", "per_second"),
    (r"tflops?|tflop/s", "tflops"),
    (r"config(uration)?|case|shape", "facts"),
)
PASS_WORDS = (
    (r"(fwd|forward) ?(\+|and|&|_|/) ?(bwd|backward)|total|fwdbwd|fwd_bwd|full|train(ing)?", "total"),
    (r"bwd|backward", "backward"),
    (r"fwd|forward|inference", "forward"),
)


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
    """All numbers of one file, what was taken for granted, and what the page says of the machine."""

    path: Path
    rows: list[Row] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    guessed: dict[str, str] = field(default_factory=dict)  # columns nobody explained
    blank: list[str] = field(default_factory=list)  # where a time should be and no number is

    def notes(self) -> list[str]:
        columns = [
            f"these columns are taken for: {', '.join(f'{k} = {v}' for k, v in self.guessed.items() if v != 'ignore')}",
            f"these columns are not used: {', '.join(k for k, v in self.guessed.items() if v == 'ignore')}",
        ]
        return [c for c in columns if not c.endswith(": ")] + self.told

    def tell(self, text: str) -> None:
        if text not in self.told:
            self.told.append(text)


# -------------------------------------------------------------------------------------------------- the map


@dataclass
class Map:
    options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    where: list[dict[str, Any]] = field(default_factory=list)

    def columns_under(self, heading: str) -> dict[str, str]:
        columns = dict(self.columns)
        for rule in self.where:
            if "columns" in rule and fnmatch.fnmatchcase(heading, rule.get("heading", "*")):
                columns.update(rule["columns"])
        return columns

    def facts_for(self, heading: str, competitor: str | None) -> dict[str, Any]:
        """What the rules say of a row; those that name a competitor hold once there is one."""
        facts: dict[str, Any] = {}
        for rule in self.where:
            if "competitor" in rule and (
                competitor is None or not fnmatch.fnmatchcase(competitor.lower(), rule["competitor"].lower())
            ):
                continue
            if fnmatch.fnmatchcase(heading, rule.get("heading", "*")):
                facts.update(rule.get("facts", {}))
        return facts


def read_map(path: Path) -> Map:
    for name in ("tomllib", "tomli"):  # tomllib since Python 3.11
        try:
            toml = importlib.import_module(name)
            break
        except ImportError:
            continue
    else:
        raise BadResults(f"{path}: reading a map needs Python 3.11, or: pip install tomli")
    try:
        values = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, toml.TOMLDecodeError) as error:
        raise BadResults(f"{path}: cannot be read: {error}") from None
    unknown = set(values) - {"options", "facts", "columns", "where"}
    if unknown:
        raise BadResults(
            f"{path}: unknown section {', '.join(sorted(unknown))}; there are options, facts, columns, where"
        )
    found = Map(**values)
    if isinstance(found.options, dict) and (odd := set(found.options) - set(OPTIONS)):
        raise BadResults(f"{path}: unknown option {', '.join(sorted(odd))}; there are {', '.join(OPTIONS)}")
    for name, kind in (("options", dict), ("facts", dict), ("columns", dict), ("where", list)):
        if not isinstance(getattr(found, name), kind):
            raise BadResults(f"{path}: [{name}] must be a {'table' if kind is dict else 'list of tables'}")
    if not all(isinstance(rule, dict) for rule in found.where):
        raise BadResults(f"{path}: [[where]] must be a list of tables")
    for columns in (found.columns, *(rule.get("columns", {}) for rule in found.where)):
        for column, role in columns.items():
            if not isinstance(role, str) or role.split(" ")[0] not in ROLES:
                raise BadResults(f"{path}: column {column!r} is {role!r}, must be one of {', '.join(ROLES)}")
    return found


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


def as_pass(text: object) -> str | None:
    word = plain(text).lower()
    return next((name for pattern, name in PASS_WORDS if re.fullmatch(pattern, word)), None)


def base_name(header: str) -> str:
    """A column's name without its unit, lower case, with spaces for dots and underscores."""
    text = re.sub(r"[(\[].*?[)\]]", "", plain(header)).lower()
    name = re.sub(r"[\s_.]+", " ", text.rpartition("case.")[2] or text).strip()
    return re.sub(r" (ns|us|µs|μs|ms|mb|mib|gb|gib)$", "", name)


def unit_of(header: str, units: Mapping[str, float]) -> float | None:
    for word in re.findall(r"[(\[]\s*([^)\]]+?)\s*[)\]]", plain(header)):
        if word.lower() in units:
            return units[word.lower()]
    last = re.split(r"[\s_]", plain(header).lower())[-1]
    return units.get(last) if last != "s" and last != "b" else None


def guess(header: str) -> str | None:
    """What a column probably holds; None where nothing is known."""
    name = base_name(header)
    sized = re.fullmatch(r"(?:n|s|seq ?len)\s*=\s*(\d+)", name)
    if sized:
        return f"any N={sized[1]}"
    found = next((role for pattern, role in GUESSES if re.fullmatch(pattern, name)), None)
    if found is None and unit_of(header, TIME_UNITS) is not None:
        return f"time competitor={re.sub(r'[(].*', '', plain(header)).strip()}"
    return found


def fact(role: str, text: object) -> Any:
    """The value of a fact as the floors want it, or None."""
    if role in SIZES:
        parsed = parse_number(text)
        if parsed is None:
            return None
        number, rest = parsed
        value = number.value * (1024 if rest.lower().startswith("k") else 1)
        return int(value) if value == int(value) else None
    if role == "dtype":
        return floors.dtype_name(plain(text))
    if role == "pass":
        return as_pass(text)
    if role in ("causal", "layer"):
        if isinstance(text, bool):
            return text
        word = plain(text).lower().split(" ")[0].strip("(),")
        return {"true": True, "yes": True, "1": True, "causal": True, "false": False, "no": False, "0": False}.get(word)
    return plain(text) or None


def facts_in(text: str) -> dict[str, Any]:
    """From "Batch=2, SeqLen=2048" and the like."""
    found = {}
    for name, value in re.findall(r"([A-Za-z_][\w ]*?)\s*=\s*([\w.]+)", plain(text)):
        role = guess(name.strip())
        if role in (*SIZES, "dtype", "causal", "pass") and (got := fact(str(role), value)) is not None:
            found[str(role)] = got
    return found


def page_fact(name: str, value: str) -> dict[str, Any]:
    """From a line "GPU | NVIDIA L4" of a page's own description."""
    key = plain(name).lower()
    if "peak" in key and (parsed := parse_number(value)) and "tflop" in parsed[1].lower():
        return {"peak_tflops": parsed[0].value}
    if "bandwidth" in key and (parsed := parse_number(value)):
        scale = {"gb/s": 1e9, "tb/s": 1e12}.get(parsed[1].lower().split(" ")[0])
        return {"bandwidth": parsed[0].value * scale} if scale else {}
    role = guess(name)
    if role in ("B", "H", "H_KV", "D", "E", "dtype", "gpu", "causal", "hidden"):
        got = fact(str(role), value)
        return {} if got is None else {str(role): got}
    return {}


# ------------------------------------------------------------------------------------------------- three formats


class Table(NamedTuple):
    name: str
    heading: str
    headers: list[str]
    lines: list[tuple[int, list[object]]]
    facts: dict[str, Any]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadResults(f"{path}: larger than {MAX_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadResults(f"{path}: cannot be read: {error}") from None
    if "\0" in text:
        raise BadResults(f"{path}: holds binary data, not text")
    return text


def _csv_tables(path: Path, text: str) -> list[Table]:
    head = text.split("\n", 1)[0]
    delimiter = max(",;\t|", key=head.count)
    try:
        lines = list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error as error:
        raise BadResults(f"{path}: not CSV: {error}") from None
    rows: list[tuple[int, list[object]]] = [(i, list(line)) for i, line in enumerate(lines[1:], 2) if any(line)]
    return [Table("table", "", lines[0], rows, {})] if lines else []


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{prefix}{key}."))
        elif not isinstance(value, list):
            found[f"{prefix}{key}"] = value
    return found


def _json_tables(path: Path, text: str) -> list[Table]:
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadResults(f"{path}:{number}: not JSON ({error}); was the file cut off?") from None
        if not isinstance(values, dict):
            raise BadResults(f"{path}:{number}: a line must be an object, this is a {type(values).__name__}")
        records.append((number, _flat(values)))
    headers = list(dict.fromkeys(key for _, record in records for key in record))
    lines = [(number, [record.get(key, "") for key in headers]) for number, record in records]
    return [Table("lines", "", headers, lines, {})] if lines else []


def _cells(line: str) -> list[str]:
    return [c.strip() for c in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _markdown_tables(text: str) -> tuple[list[Table], dict[str, Any]]:
    """(tables under their headings, facts of the page)"""
    tables: list[Table] = []
    page: dict[str, Any] = {}
    headings: dict[int, str] = {}
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        line = lines[i]
        if match := re.match(r"(#{1,6})\s+(.*)", line):
            level = len(match[1])
            headings = {k: v for k, v in headings.items() if k < level} | {level: plain(match[2])}
        elif match := re.match(r"\s*[-+*]\s+\**([^*:]+?)\**\s*:\**\s+(.+)", line):
            page |= page_fact(match[1], match[2])
        elif "|" in line and i + 1 < len(lines) and re.fullmatch(r"[\s|:-]*-[\s|:-]*", lines[i + 1]):
            end = i + 2
            while end < len(lines) and "|" in lines[end]:
                end += 1
            headers, body = _cells(line), [(n + 1, _cells(lines[n])) for n in range(i + 2, end)]
            heading = " / ".join(headings[k] for k in sorted(headings))
            if len(headers) == 2 and guess(headers[1]) is None:
                for _, cells in body:
                    page |= page_fact(cells[0], cells[1]) if len(cells) == 2 else {}
            else:
                near = facts_in(heading)
                tables.append(
                    Table(f"table {len(tables) + 1}", heading, headers, [(n, list(c)) for n, c in body], near)
                )
            i = end - 1
        i += 1
    return tables, page


def read(path: Path, map_path: Path | None = None) -> Published:
    """All numbers of a file; `map_path` defaults to the TOML file of the same name beside it, where there is one."""
    beside = path.with_suffix(".toml")
    chosen = map_path or (beside if beside.exists() and beside != path else None)
    mapping = read_map(chosen) if chosen is not None else Map()
    text = _text(path)
    page: dict[str, Any] = {}
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        tables = _json_tables(path, text)
    elif path.suffix.lower() in (".md", ".markdown") or re.search(r"^\s*\|?[\s:|-]*-{3,}[\s:|-]*\|", text, re.M):
        tables, page = _markdown_tables(text)
    else:
        tables = _csv_tables(path, text)
    found = Published(path, facts=page | mapping.facts, options=mapping.options)
    for table in tables:
        if not any(fnmatch.fnmatchcase(table.heading, pattern) for pattern in mapping.options.get("skip", [])):
            _read_table(found, table, mapping)
    if not found.rows:
        raise BadResults(f"{path}: no times or bytes found; say in a TOML map which column is what")
    return found


def _roles(found: Published, table: Table, mapping: Map) -> list[tuple[str, dict[str, Any]]]:
    """For each column its role and the facts that hold for it."""
    said, roles = mapping.columns_under(table.heading), []
    for header in table.headers:
        role = said.get(plain(header)) or said.get(header)
        if role is None:
            role = guess(header) or "ignore"
            found.guessed[plain(header)] = role
        word, _, rest = role.partition(" ")
        facts = {}
        for name, value in re.findall(r"(\w+)=(.+?)(?=\s\w+=|$)", rest):
            facts[name] = fact(name, value) if name in ROLES else value
        roles.append((word, facts))
    return roles


def _read_table(found: Published, table: Table, mapping: Map) -> None:
    roles = _roles(found, table, mapping)
    for number, cells in table.lines:
        line_facts = found.facts | table.facts | mapping.facts_for(table.heading, None)
        for (role, _), cell in zip(roles, cells, strict=False):
            if role == "facts":
                line_facts |= facts_in(str(cell))
            elif role in ROLES and role not in NUMBERS and role != "ignore" and (got := fact(role, cell)) is not None:
                line_facts[role] = got
        for (role, facts), header, cell in zip(roles, table.headers, cells, strict=False):
            if role not in NUMBERS:
                continue
            if (parsed := parse_number(cell)) is None:
                found.blank += [f"{found.path.name}:{number}"] if role in TIMES else []
                continue
            row_facts = line_facts | facts
            competitor = row_facts.get("competitor")
            ruled = mapping.facts_for(table.heading, competitor)
            where = f"{found.path.name}:{number}"
            _add(found, Row(where, table.name, number, role, parsed[0], row_facts | ruled | facts), header, parsed[1])


def _add(found: Published, row: Row, header: str, rest: str) -> None:
    """Sorts a number in by its role and its unit."""
    word = rest.lower().split(" ")[0].strip("(),")
    if row.kind == "any":
        row.kind = "speedup" if word in ("x", "×") else "time"
    if row.kind in TIMES:
        if row.kind != "time":
            row.facts["pass"] = row.kind
        row.kind = "time"
        unit = TIME_UNITS.get(word) or unit_of(header, TIME_UNITS)
        if unit is None:
            name = str(found.options.get("time_unit", "ms"))
            unit = TIME_UNITS.get(name.lower())
            if "time_unit" not in found.options:
                found.tell(f"column {plain(header)!r} has no unit: taken for ms")
        if unit is None:
            return
        row.number = row.number.times(unit)
    elif row.kind in MEMORY:
        unit = MEMORY_UNITS.get(word) or unit_of(header, MEMORY_UNITS)
        row.number = row.number.times(
            unit or MEMORY_UNITS.get(str(found.options.get("memory_unit", "MB")).lower(), 2**20)
        )
        row.kind = "memory_peak" if row.kind == "memory" else row.kind
    elif row.kind == "speedup":
        note = re.search(r"\((.+?)\)", rest)
        row.facts |= {"fastest": note[1]} if note else {}
    elif row.kind == "per_second":
        row.number = row.number.times({"k": 1e3, "m": 1e6, "g": 1e9}.get(word, 1.0))
    found.rows.append(row)


def competitors(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.competitor for row in rows if row.competitor))
