"""`report.md`: the report for a terminal, a pull request or a mail. The result comes first, the environment last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from fulmen.bench import schema, words
from fulmen.bench.report import content, model

MARKS = re.compile(r"([\\`*_{}\[\]()#+!|~])")


def safe(value: object) -> str:
    """Text as it is: neither markup nor HTML, neither a table's end nor a terminal's command."""
    text = schema.printable(" ".join(str(value).split()))
    return MARKS.sub(r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code(value: str) -> str:
    """A line of code, fenced by more backticks than it has in a row."""
    text = schema.printable(" ".join(value.split()))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in (text[:1], text[-1:]) else fence + text + fence


def table(columns: Iterable[tuple[content.Entry, str]], lines: Iterable[list[content.Entry]]) -> str:
    columns = list(columns)
    kept = [i for i, (_, look) in enumerate(columns) if look != "bar"]
    rule = ("--:" if columns[i][1] in ("number", "heat-cell") else "---" for i in kept)
    rows = ["| " + " | ".join(said(line[i]) for i in kept) + " |" for line in ([x for x, _ in columns], *lines)]
    return "\n".join([rows[0], "|" + "|".join(rule) + "|", *rows[1:]])


def said(entry: content.Entry) -> str:
    if isinstance(entry, dict):
        entry = f"{entry['more']} ({entry['text']})" if "more" in entry else entry["text"]
    return " ".join(map(said, entry)) if isinstance(entry, list) else safe(entry)


def render(report: model.Report) -> str:
    """Paragraphs with an empty line between them; the lead of a section stands where it comes first."""
    out = [f"# {safe(report.title)}", *(x for block in content.headlines(report) for x in paragraphs(block))]
    counts = ([f"{n:,}", words.KINDS[k].short, words.KINDS[k].sentence] for k, n in model.counts(report.rows).items())
    out += [f"**{model.proven(report.rows)}**", *map(safe, report.results.notes)]
    out.append(table([("cells", "number"), ("", ""), ("", "")], counts))
    leads = set()
    for section in content.sections(report):
        if inside := [text for block in section.blocks for text in paragraphs(block)]:
            title, lead = content.SECTIONS[section.name]
            where = ", ".join(filter(None, (*section[2:4], "hot cache" if section.cache == "hot" else "")))
            out.append(f"## {safe(f'{title}: {where}' if where else title)}")
            out += [safe(lead)] if lead and section.name not in leads else []
            leads.add(section.name)
            out += inside
    out.append(f"Made from results of the schema {schema.SCHEMA}; `results.csv` and `report.html` hold every cell.")
    return "\n\n".join(out) + "\n"


def paragraphs(block: content.Block) -> Iterator[str]:
    kind = block["kind"]
    if kind == "card":
        if inside := [text for inner in block["blocks"] for text in paragraphs(inner)]:
            yield f"### {safe(block['title'])}"
            yield from inside
    elif kind == "table":
        yield table(block["columns"], block["lines"])
    elif kind == "facts":
        yield table([("", "")] * 2, block["facts"])
    elif kind == "command":
        yield code(block["text"])
