"""Writes the support matrix of docs/models.md from tests/integrations/families.py; with --check, fails if they differ.

The tests run every cell that says yes.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATH = ROOT / "docs" / "models.md"
START, END = "<!-- made by tools/models_table.py -->\n", "<!-- end -->\n"


def table() -> str:
    sys.path.insert(0, str(ROOT))
    from tests.integrations.families import CHECKS, FAMILIES

    lines = ["", f"| models | served by | {' | '.join(CHECKS)} |", "|---" * (2 + len(CHECKS)) + "|"]
    notes: list[str] = []
    for family in FAMILIES.values():
        cells = []
        for check in CHECKS:
            if check in family.limits:
                notes.append(f"{family.models}, {check}: {family.limits[check]}.")
            cells.append(f"no [{len(notes)}]" if check in family.limits else "yes")
        served = ", ".join(f"`{op}`" for op in family.served)
        served += f"; not `{family.remains}`" if family.remains else ""
        lines.append(f"| {family.models} | {served} | {' | '.join(cells)} |")
    lines += ["", *(f"[{i}] {note}" for i, note in enumerate(notes, 1)), ""]
    return "\n".join(lines)


def render() -> str:
    before, rest = PATH.read_text(encoding="utf-8").split(START)
    return before + START + table() + END + rest.split(END)[1]


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: models_table.py [--check]")
        return 2
    text = render()
    if not arguments:
        PATH.write_text(text, encoding="utf-8")
    elif PATH.read_text(encoding="utf-8") != text:
        print(f"{PATH} is out of date: run tools/models_table.py and commit the difference")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
