"""Who competes in a case: our backends, from the registry, and other people's kernels, from `baselines/`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from fulmen import dispatch, hardware
from fulmen.bench import adapters, baselines
from fulmen.bench.cases import BadSuite, Line
from fulmen.bench.gate import Attend

OURS = "fulmen "  # begins the names of our competitors


@dataclass
class Competitor:
    """One implementation in one case.

    attend     what is timed: a problem's arguments -> o
    fully      the same with every output it has, for the gate; None: attend has all
    refusal    why it cannot take the case; None: it can
    skip       why it need not be tried; None: it need
    pinned     a context around its calls, outside what is timed
    resources  the pass -> what its kernels take
    """

    name: str
    op: str
    function: str
    attend: Attend
    fully: Attend | None = None
    refusal: str | None = None
    backend: str = ""
    skip: str | None = None
    version: str = ""
    pinned: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    resources: Callable[[str], list[dict[str, Any]]] = lambda pass_: []


def names_in(line: Line, backends: Sequence[str] = (), rivals: Sequence[str] = ()) -> list[str]:
    """The names after "vs", ours first, with "*" and "-name" worked out; `backends` and `rivals` replace its own."""
    mine, others = sides(line, backends, rivals)
    return list(dict.fromkeys([*mine, *others]))


def sides(line: Line, backends: Sequence[str] = (), rivals: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Our backends and other people's kernels; of one name ("sdpa") "*" means the backend."""
    op = adapters.backends_of(line.op)
    known = [name for name in dispatch.kernels(op) if name != "reference"] if op in dispatch.OPS else []
    gone = {word[1:] for word in line.competitors if word.startswith("-")}
    ours: list[str] = []
    theirs: list[str] = []
    for word in line.competitors:
        if word == "*":
            ours += known
        elif not word.startswith("-"):
            (theirs if word in baselines.names() else ours).append(word)
    ours, theirs = ([n for n in side if n not in gone] for side in (ours, theirs))
    if backends:
        ours = [n for n in backends if n != "none"]
    if rivals:
        theirs = [n for n in rivals if n != "none"]
        for name in theirs:
            if name not in baselines.names():
                raise BadSuite(f"no baseline {name!r}; there are {', '.join(baselines.names())}")
    every = [*dispatch.kernels(op), *dispatch._missing[op], "auto"] if op in dispatch.OPS else ours
    for name in ours:
        if name not in every:
            raise BadSuite(f"{line.op} has no backend {name!r}; there are {', '.join(every)}")
    return list(dict.fromkeys(ours)), list(dict.fromkeys(theirs))


def ours(line: Line, case: dict[str, Any], device: torch.device, backend: str) -> Competitor:
    adapter = adapters.of(line.op)
    refusal, chosen = adapter.refuses(case, device, backend), backend
    if refusal is None:
        try:
            chosen = adapter.chosen(case, device, backend)
        except NotImplementedError as error:
            refusal = str(error)

    def resources(pass_: str) -> list[dict[str, Any]]:
        from fulmen.bench import resources as binaries

        if device.type != "cuda":
            return []
        hw = hardware.of(device)
        return binaries.of_launches(adapter.launches(case, hw, chosen, pass_), hw)

    import fulmen

    return Competitor(
        f"{OURS}{backend}", line.op, adapter.function(case), adapter.attend(backend), adapter.attend_fully(backend),
        refusal, chosen, version=fulmen.__version__, resources=resources,
    )  # fmt: skip


def theirs(line: Line, case: dict[str, Any], device: torch.device, name: str) -> Competitor:
    module = baselines.of(name)
    adapter = adapters.of(module.COMPUTES)
    own = {key: case[key] for key in adapter.KEYS if key in case}
    try:
        function, refusal = adapter.function(adapter.complete(own)), module.refuses(case, device)
    except ValueError as error:
        function, refusal = module.COMPUTES, str(error)
    return Competitor(
        name, module.COMPUTES, function, module.attend, None, refusal, module.version(), version=module.version(),
        pinned=getattr(module, "pinned", contextlib.nullcontext),
    )  # fmt: skip


def of(line: Line, device: torch.device, backends: Sequence[str] = (), rivals: Sequence[str] = ()) -> list[Competitor]:
    case = complete(line, device)
    mine, others = sides(line, backends, rivals)
    made = [ours(line, case, device, name) for name in mine]
    return made + [theirs(line, case, device, name) for name in others]


def complete(line: Line, device: torch.device) -> dict[str, Any]:
    """The case with every key filled in; "auto" is fp32 on a CPU and bf16 on a GPU."""
    adapter = adapters.of(line.op)
    unknown = set(line.case) - set(adapter.KEYS) - {"grad"}
    if unknown:
        raise BadSuite(f"{line.op} has no {', '.join(sorted(unknown))}; a case says {', '.join(adapter.KEYS)}")
    try:
        case = adapter.complete(line.case)
        if case["dtype"] == "auto":
            case["dtype"] = "float32" if device.type == "cpu" else "bfloat16"
        adapters.dtype_of(case)
    except ValueError as error:
        raise BadSuite(f"{line.suite}: {error}") from None
    sizes = {key: case[key] for key in ("B", "H", "H_KV", "N", "N_Q", "D", "E") if key in case}
    for key, value in sizes.items():
        if type(value) is not int or value < 1:
            raise BadSuite(f"{key}={value}: must be a whole number, 1 at least")
    if "H_KV" in case and case["H"] % case["H_KV"]:
        raise BadSuite(f"H={case['H']} must be a multiple of H_KV={case['H_KV']}")
    return case
