"""What is behind the number of one cell: its drawer in the page, and the tip of every link to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fulmen.bench import words
from fulmen.bench.report import content, model
from fulmen.bench.report.content import Block
from fulmen.bench.report.model import digits, percent

# The fields of a cell in the order of the drawer; docs/bench.md says what they mean.
TITLES = {
    "audit": "Audit against the hardware", "correctness": "Correctness against fp64", "memory": "Memory",
    "resources": "Kernels, from the compiled binary", "kernels": "What the device ran", "kinds": "Kernels by kind, ms",
    "case": "What was measured", "stats": "Samples in numbers, ms",
}  # fmt: skip
ELSEWHERE = (*TITLES, "samples_ms", "clocks_mhz", "command", "reason", "schema", "kind")


def data(row: model.Row) -> dict[str, Any]:
    cell, word = row.cell, words.KINDS[row.kind]
    keys = (cell.suite, cell.cache, cell.status, word.short, row.n, f"N{row.n}", cell.function, cell.backend, row.id)
    find = " ".join(map(str, (*tip(row), *keys, *(flag for flag, _ in row.flags))))
    return {
        "id": row.id, "kind": row.kind, "replaced": row.replaced, "tip": tip(row), "blocks": list(blocks(row)),
        "eyebrow": f"{cell.suite} · {cell.pass_} · {cell.cache} cache", "find": find, "clocks": cell.clocks_mhz,
        "samples": cell.samples_ms if row.timed else [], "median": row.median, "low": row.low, "high": row.high,
    }  # fmt: skip


def tip(row: model.Row) -> list[str]:
    """Name, case, time or the lack of one, and what else is to be known."""
    word, share = words.KINDS[row.cell.status], row.of_audit("efficiency")
    time = f"{word.short}: {row.cell.reason or word.sentence}"
    if row.timed:
        between = f", 95 % interval {digits(row.low)} to {digits(row.high)}" if row.low and row.high else ""
        time = f"{digits(row.median)} ms{between}"
    possible = f"{percent(share)} of what is possible" if row.timed and share is not None else ""
    flags = (f"{words.flag(flag).short}: {why}" for flag, why in row.flags if flag != "ANOTHER-FUNCTION")
    more = filter(None, (content.against(row), possible, *flags))
    return [row.cell.competitor, f"{row.label} · {row.cell.pass_}", time, *more]


def blocks(row: model.Row) -> Iterator[Block]:
    cell, word = row.cell, words.KINDS[row.kind]
    flags = [[content.badge(words.flag(flag)), f"{words.flag(flag).sentence} {why}"] for flag, why in row.flags]
    yield content.table([("", "")] * 2, [[content.badge(word), word.sentence], *flags])
    plain = {name: value for name, value in vars(cell).items() if name not in ELSEWHERE}
    rates = {f"{name}_per_s": row.rate(name) for name in ("flops", "bytes")}
    yield content.facts(plain | rates | {"configuration": cell.config_hash})
    for name, title in TITLES.items():
        value = getattr(cell, name)
        if value := {k: x for k, x in value.items() if k != "flags"} if name == "audit" else value:
            yield content.card(title, field(value))
    yield from content.command(cell.command)


def field(value: Any) -> Block:
    """A table of what holds objects or is a list, and facts of other objects."""
    if isinstance(value, dict) and all(isinstance(x, dict) for x in value.values()):
        value = [{"": key, **inner} for key, inner in value.items()]
    if isinstance(value, dict):
        return content.facts(value)
    lines = [x if isinstance(x, dict) else {"": x} for x in value]
    names = list(dict.fromkeys(k for line in lines for k in line))
    head = [(k.replace("_", " "), "number" if i else "") for i, k in enumerate(names)]
    return content.table(head, ([content.said(k, line.get(k)) for k in names] for line in lines))
