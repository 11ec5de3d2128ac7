"""A griffe extension for the site: docstrings, which are plain text for `help()`, become Markdown.

A paragraph in two columns, the names of arguments and what they are, becomes a table; `>>>` becomes a code block.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"(\S.*?) {2,}(\S.*)")


def two_columns(lines: list[str]) -> str | None:
    """A table of lines such as `name   text`, whose text may go on in indented lines; None if they are not."""
    rows: list[list[str]] = []
    for line in lines:
        entry = ENTRY.fullmatch(line)
        if entry:
            rows.append(list(entry.groups()))
        elif rows and line.startswith("    "):
            rows[-1][1] += " " + line.strip()
        else:
            return None
    return "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {escape(text)} |" for name, text in rows)])


def escape(text: str) -> str:
    """Outside of code, a pipe ends a cell and an asterisk starts emphasis."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("*", "\\*") for i, part in enumerate(parts))


def markdown(docstring: str) -> str:
    blocks = []
    for block in docstring.split("\n\n"):
        lines = [line for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        if lines[0].startswith(">>>"):
            blocks.append("\n".join(["```python", *(line.removeprefix(">>> ") for line in lines), "```"]))
        else:
            blocks.append(two_columns(lines) or (block if lines[0].startswith("    ") else escape(block)))
    return "\n\n".join(blocks)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
