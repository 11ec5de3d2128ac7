"""Suites: what is measured, read from `suites/*.txt`, one line a case. Nothing here imports torch.

    # the first comment is the suite's description
    set   seconds=1 samples=30..100
    lightning  B=4 H=32 N=1024,2048 D=64 decay=yes   vs  auto * -eager  sdpa-fa2 sdpa-cudnn

`set` changes `Settings` for the lines below it. A case is an operation, its sizes and options (several values separated
by commas make several cases), and after `vs` who competes: our backends by name, "auto", "*" for every backend there
is but the reference, "-name" for all but that one; and baselines by the name of their file.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
WORDS = {"yes": True, "no": False, "true": True, "false": False}


class BadSuite(Exception):
    """A suite, a shape or a name nobody knows, and what there is."""


@dataclass(frozen=True)
class Settings:
    """How much is measured of each cell."""

    passes: tuple[str, ...] = ("forward", "backward", "total")
    samples: tuple[int, int] = (30, 100)  # at least, at most
    few: int = 5  # at least, of a call so slow that `seconds` ends first
    seconds: float = 1.0  # of sampling, for one cell
    interval: float = 0.005  # half the 95 % interval of the median, as a share of it: enough
    warmup: int = 10  # calls, or `warmup_seconds` of them
    warmup_seconds: float = 0.1
    limit: float = 10.0  # seconds that one call may take before it counts as a timeout


@dataclass(frozen=True)
class Line:
    """One case of a suite and who competes in it."""

    suite: str
    op: str
    case: dict[str, Any]
    competitors: tuple[str, ...]
    settings: Settings = field(default_factory=Settings)


def names() -> list[str]:
    found = resources.files("fulmen.bench").joinpath("suites").iterdir()
    return sorted(f.name.removesuffix(".txt") for f in found if f.name.endswith(".txt"))


def text_of(suite: str) -> str:
    if suite not in names():
        raise BadSuite(f"no suite {suite!r}; there are {', '.join(names())}")
    return resources.files("fulmen.bench").joinpath("suites").joinpath(f"{suite}.txt").read_text(encoding="utf-8")


def description(suite: str) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("#"), text_of(suite).splitlines())
    return " ".join(line.lstrip("# ") for line in lines)


def read(suite: str) -> list[Line]:
    return list(parse(text_of(suite), suite))


def parse(text: str, suite: str) -> Iterator[Line]:
    settings = Settings()
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.partition("#")[0].split()
        if not words:
            continue
        try:
            if words[0] == "set":
                settings = replace(settings, **dict(_setting(word) for word in words[1:]))
                continue
            at = words.index("vs") if "vs" in words else len(words)
            for case in expand(words[1:at]):
                yield Line(suite, words[0], case, tuple(words[at + 1 :]) or ("auto",), settings)
        except ValueError as error:
            raise BadSuite(f"suite {suite}, line {number}: {error}") from None


def _setting(word: str) -> tuple[str, Any]:
    key, _, value = word.partition("=")
    known = {f.name: f.type for f in dataclasses.fields(Settings)}
    if key not in known:
        raise ValueError(f"{key}: settings are {', '.join(known)}")
    if key == "passes":
        return key, tuple(value.split(","))
    if key == "samples":
        low, _, high = value.partition("..")
        return key, (int(low), int(high or low))
    return key, int(value) if known[key] == "int" else float(value)


def value_of(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if text in DTYPES:
        return DTYPES[text]
    try:
        return int(text)
    except ValueError:
        return text


def expand(words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every combination of the values of `key=value,value ...`, the last key fastest."""
    keys, choices = [], []
    for word in words:
        key, equals, values = word.partition("=")
        if not equals or not values:
            raise ValueError(f"{word!r}: must be key=value")
        if key in keys:
            raise ValueError(f"{key} is given twice")
        keys.append(key)
        choices.append([value_of(value) for value in values.split(",")])
    for combination in itertools.product(*choices):
        yield dict(zip(keys, combination, strict=True))


def shape(text: str) -> dict[str, Any]:
    """`B=4,H=32,N=1024,causal=no`, as `--shape` takes it."""
    try:
        found = list(expand(text.replace(",", " ").split()))
    except ValueError as error:
        raise BadSuite(f"--shape {text!r}: {error}; several values are several --shape") from None
    if not found[0]:
        raise BadSuite("--shape '': must be key=value, or several with commas between")
    return found[0]


def select(lines: Sequence[Line], shapes: Sequence[dict[str, Any]], keys: dict[str, set[str]]) -> list[Line]:
    """The lines that agree with one of `shapes`; a shape that no line has replaces those values in all that know them.

    So `--shape N=2048` takes the cases with N = 2048 where a suite has them, and makes them where it has none. The key
    `op` singles out an operation; `keys` are those that its cases know. A dtype of "auto" agrees with any.
    """
    chosen: list[Line] = []
    for shape_ in shapes:
        wanted = {k: v for k, v in shape_.items() if k != "op"}
        able = [line for line in lines if shape_.get("op", line.op) == line.op and set(wanted) <= keys[line.op]]
        if not able:
            known = sorted({key for line in lines for key in keys[line.op]})
            raise BadSuite(f"--shape: no case says {', '.join(shape_)}; a case says {', '.join(known)}")
        kinds = {k: v for k, v in wanted.items() if type(v) is str and k != "dtype"}  # as of layers: only like to like
        able = [line for line in able if all(_agrees(line.case, k, v) for k, v in kinds.items())] or able
        agree = [line for line in able if all(_agrees(line.case, k, v) for k, v in wanted.items())]
        made = [replace(line, case=line.case | wanted) for line in agree or able]
        sound = [line for line in made if not _odd_heads(line.case)]
        if not sound:  # else cases with fewer heads of k and v that do not divide those asked for are left out
            raise BadSuite(f"--shape: {_odd_heads(made[0].case)}, which the suite says; give H_KV, too")
        made = sound
        chosen += [line for i, line in enumerate(made) if line not in made[:i] and line not in chosen]
    return chosen


def _odd_heads(case: dict[str, Any]) -> str | None:
    H, H_KV = case.get("H"), case.get("H_KV")
    bad = isinstance(H, int) and isinstance(H_KV, int) and H_KV > 0 and H % H_KV
    return f"H={H} is no multiple of H_KV={H_KV}" if bad else None


def _agrees(case: dict[str, Any], key: str, value: Any) -> bool:
    if key == "dtype" and case.get(key, "auto") == "auto":
        return True
    own = case.get({"H_KV": "H", "E": "D"}.get(key, key)) if key not in case else case[key]
    return key == "causal" if own is None else own == value  # who says nothing of it is causal
