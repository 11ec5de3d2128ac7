"""Suites: what is measured, read from `suites/*.toml` (docs/bench.md). Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from fulmen.bench import Refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
WORDS = {"yes": True, "no": False, "true": True, "false": False}


@dataclass(frozen=True)
class Settings:
    """How each cell is measured."""

    passes: tuple[str, ...] = ("forward", "backward", "total")
    samples: tuple[int, int] = (30, 60)  # at least, at most
    few: int = 5  # at least, of a call so slow that `seconds` ends first
    seconds: float = 0.4  # of sampling, for one cell
    interval: float = 0.005  # half the 95 % interval of the median, as a share of it, at which sampling ends
    warmup: int = 10  # calls, or `warmup_seconds` of them
    warmup_seconds: float = 0.1
    limit: float = 10.0  # seconds that one call may take before it counts as a timeout
    loop: int = 0  # calls of a loop without a pause, whose time is recorded, too
    first_call: bool = False  # time the first call in a fresh process with empty kernel caches, too
    kernels: bool = False  # ask the profiler which kernels ran


@dataclass(frozen=True)
class Line:
    """One case of a suite and who competes in it."""

    suite: str
    op: str
    case: dict[str, Any]
    backends: tuple[str, ...] = ("auto",)
    baselines: tuple[str, ...] = ()
    settings: Settings = Settings()


def toml(text: str, where: str, error: type[Refused]) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as wrong:
        raise error(f"{where}: {wrong}") from None


FOLDER = resources.files("fulmen.bench") / "suites"


def names() -> list[str]:
    return sorted(f.name.removesuffix(".toml") for f in FOLDER.iterdir() if f.name.endswith(".toml"))


def text_of(suite: str) -> str:
    if suite not in names():
        raise Refused(f"no suite {suite!r}; there are {', '.join(names())}")
    return (FOLDER / f"{suite}.toml").read_text(encoding="utf-8")


def description(suite: str) -> str:
    return " ".join(str(tomllib.loads(text_of(suite)).get("description", "")).split())


def read(suite: str) -> list[Line]:
    return parse(text_of(suite), suite)


def parse(text: str, suite: str) -> list[Line]:
    shared = toml(text, f"suite {suite}", Refused)
    shared.pop("description", None)
    given = shared.pop("cases", None)
    if not isinstance(given, list) or not given:
        raise Refused(f"suite {suite}: cases must be a list of tables, such as {{ op = 'flash', N = 1024 }}")
    lines: list[Line] = []
    for number, own in enumerate(given, 1):
        try:
            lines += _lines(shared | own, suite)
        except (TypeError, ValueError) as error:
            raise Refused(f"suite {suite}, case {number}: {error}") from None
    return lines


def _lines(given: dict[str, Any], suite: str) -> Iterator[Line]:
    if "op" not in given:
        raise ValueError("op is missing: the operation, such as 'flash', 'lightning' or 'layer'")
    known = {f.name: f for f in dataclasses.fields(Settings)}
    settings = {key: given.pop(key) for key in list(given) if key in known}
    for key, value in settings.items():
        usual = known[key].default
        wanted: tuple[type, ...] = (list,) if isinstance(usual, tuple) else (type(usual), int)
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(usual, bool):
            raise TypeError(f"{key} = {value!r}: must be like {usual!r}")
        settings[key] = tuple(value) if isinstance(value, list) else value
    op, backends, baselines = given.pop("op"), given.pop("backends", ["auto"]), given.pop("baselines", [])
    choices = [value if isinstance(value, list) else [value] for value in given.values()]
    for values in itertools.product(*choices):
        case = {key: DTYPES.get(str(value), value) for key, value in zip(given, values, strict=True)}
        yield Line(suite, op, case, tuple(backends), tuple(baselines), Settings(**settings))


# ------------------------------------------------------------------------------------- shapes from the command line
def shape(text: str) -> dict[str, Any]:
    """`B=4,H=32,N=1024,causal=no`, as `--shape` takes it."""
    found: dict[str, Any] = {}
    for word in text.split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        if not key or not value:
            raise Refused(f"--shape {text!r}: {word!r} must be key=value")
        if key in found:
            raise Refused(f"--shape {text!r}: {key} is given twice; several values are several --shape")
        number = int(value) if value.lstrip("-").isdecimal() else DTYPES.get(value, value)
        found[key] = WORDS.get(value.lower(), number)
    return found


def select(lines: Sequence[Line], shapes: Sequence[dict[str, Any]], keys: dict[str, set[str]]) -> list[Line]:
    """The lines that agree with one of `shapes`; a shape that no line has replaces those values in all that know them.

    So `--shape N=2048` takes the cases with N = 2048 where a suite has them, and makes them where it has none. The key
    `op` singles out an operation; `keys` are those that its cases know. A dtype of "auto" agrees with any.
    """
    chosen: list[Line] = []
    for given in shapes:
        wanted = {k: v for k, v in given.items() if k != "op"}
        able = [line for line in lines if given.get("op", line.op) == line.op and set(wanted) <= keys[line.op]]
        if not able:
            known = sorted({key for line in lines for key in keys[line.op]})
            strange = [key for key in given if key not in known] or list(given)
            raise Refused(f"--shape: no case says {', '.join(strange)}; a case says {', '.join(known)}")
        kinds = {k: v for k, v in wanted.items() if type(v) is str and k != "dtype"}  # such as layer=gqa
        able = [line for line in able if _agrees(line.case, kinds)] or able
        agree = [line for line in able if _agrees(line.case, wanted)]
        made = [replace(line, case=line.case | wanted) for line in agree or able]
        sound = [line for line in made if odd_heads(line.case) is None]
        if not sound:  # else cases whose key heads do not divide the heads asked for are left out
            raise Refused(f"--shape: {odd_heads(made[0].case)}, which the suite says; give H_KV, too")
        chosen += [line for i, line in enumerate(sound) if line not in sound[:i] and line not in chosen]
    return chosen


def odd_heads(case: dict[str, Any]) -> str | None:
    H, H_KV = case.get("H"), case.get("H_KV")
    bad = isinstance(H, int) and isinstance(H_KV, int) and H_KV > 0 and H % H_KV
    return f"H={H} is no multiple of H_KV={H_KV}" if bad else None


def _agrees(case: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a case has these values; one that does not say is causal, with H_KV = H and E = D."""
    full = {"causal": True, "dtype": "auto", "H_KV": case.get("H"), "E": case.get("D")} | case
    return all(full.get(k) == v or (k == "dtype" and full[k] == "auto") for k, v in wanted.items())
