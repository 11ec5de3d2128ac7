"""Reads disassembled machine code for hazards the assembler does not see.

A product (HGMMA) whose first operand lies in registers reads them while it runs. To the assembler they are free as soon
as it was started, and it may give them to whatever comes next: the product then multiplies that. `overwritten` follows
every path from such products to the wait that ends them.

A kernel launched early must not read what the kernel before it writes until that one is over: `read_early` finds loads
ahead of the wait (ACQBULK), and those of memory said to be constant, which the compiler may move there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests import builds

PRODUCT = re.compile(r"HGMMA\.\S+ R\d+, R(\d+), gdesc.*")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
BRANCH = re.compile(r"BRA(?:\.\S+)?\s+(.*)`\((\.L_\w+)\)")  # what it depends on, if no predicate; where to
STORES = (
    "ST",
    "RED",
    "BAR",
    "SYNCS.ARRIVE",
    "UTMA",
    "MEMBAR",
    "EXIT",
    "WARPGROUP",
    "CCTL",
    "ERRBAR",
    "NOP",
    "R2UR",
    "VOTEU",
)


def disassemble(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"

    def make(file: Path) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as code, file.open("w") as text:
            code.write(cubin)
            code.flush()
            subprocess.run([tool, "-c", "-ndf", code.name], stdout=text, stderr=subprocess.DEVNULL, check=True)

    return builds.once(("nvdisasm", triton.__version__, cubin), make).read_text()


class Instruction(NamedTuple):
    text: str  # without its predicate
    predicated: bool


def written(text: str) -> set[int]:
    """The registers an instruction writes; of one whose width is not known, as many as any has."""
    if text.startswith(STORES) or not (found := re.match(r"(\S+)\s+(?:U?P\w+, )*R(\d+)\b", text)):
        return set()
    name, first = found[1], int(found[2])
    if "SETP" in name:  # writes predicates alone
        return set()
    if shape := re.match(r"HGMMA\.64x(\d+)x", name):
        width = int(shape[1]) // 2
    elif re.search(r"\.(128|4)$|\.(128|4)\.", name):
        width = 4
    elif "64" in name or "WIDE" in name or name.startswith(("D", "F2F.F64")):
        width = 2
    else:
        width = 1
    return set(range(first, first + width))


def parsed(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and which of them each label stands before."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if found := re.match(r"\s*(\.L_\w+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;", line):
            code.append(Instruction(found[2], found[1] is not None))
    return code, labels


def overwritten(sass: str) -> list[str]:
    """Instructions that write a register which a product under way may still read."""
    code, labels = parsed(sass)
    bad: dict[int, str] = {}
    seen: set[tuple[int, tuple[frozenset[int], ...]]] = set()
    todo: list[tuple[int, tuple[frozenset[int], ...]]] = [(0, (frozenset(),))]  # closed groups, then the open one
    while todo:
        at, groups = todo.pop()
        while at < len(code) and (at, groups) not in seen:
            seen.add((at, groups))
            text, predicated = code[at]
            if found := WAIT.match(text):
                keep = int(found[1], 16)
                groups = (*groups[:-1][len(groups) - 1 - keep :], groups[-1]) if keep < len(groups) - 1 else groups
            busy = frozenset().union(*groups)
            if hit := written(text) & busy:
                bad[at] = f"{text}  overwrites {sorted(hit)}"
            if text.startswith("HGMMA"):
                mine = (
                    frozenset(range(int(found[1]), int(found[1]) + 4))
                    if (found := PRODUCT.match(text))
                    else frozenset()
                )
                groups = (*groups[:-1], groups[-1] | mine)
                if "gsb0" in text:
                    groups = (*groups, frozenset())[-5:]
            if found := BRANCH.search(text):
                if predicated or found[1]:
                    todo.append((at + 1, groups))
                at = labels[found[2]]
            elif text.startswith(("EXIT", "BPT.TRAP")) and not predicated:
                break
            else:
                at += 1
    return list(bad.values())


def following(sass: str) -> list[list[int]]:
    """For each instruction, those that may come after it."""
    code, labels = parsed(sass)
    assert "BRX" not in sass, "a jump by a table, which is not followed here"
    after = []
    for at, (text, predicated) in enumerate(code):
        branch = BRANCH.search(text)
        ends = text.startswith(("EXIT", "BPT.TRAP")) or (branch is not None and not branch[1])
        after.append([at + 1] if at + 1 < len(code) and (predicated or not ends) else [])
        if branch:
            after[at].append(labels[branch[2]])
    return after


def loops(sass: str) -> list[list[int]]:
    """The instructions of each loop that lies in no other: those that lead back to themselves (Tarjan's components)."""
    after = following(sass)
    number, low = [-1] * len(after), [0] * len(after)
    path: list[int] = []
    inside: set[int] = set()
    found: list[list[int]] = []
    count, todo = 0, [(0, 0)]
    while todo:
        at, turn = todo.pop()
        if turn == 0:
            number[at] = low[at] = count
            count += 1
            path.append(at)
            inside.add(at)
        else:
            low[at] = min(low[at], low[after[at][turn - 1]])
        for i, other in enumerate(after[at][turn:], turn):
            if number[other] < 0:
                todo += [(at, i + 1), (other, 0)]
                break
            if other in inside:
                low[at] = min(low[at], number[other])
        else:
            if low[at] == number[at]:
                begin = path.index(at)
                found += [sorted(path[begin:])] if begin + 1 < len(path) else []
                inside.difference_update(path[begin:])
                del path[begin:]
    return found


def hot_bytes(sass: str) -> int:
    """Bytes of code in loops: the warps of a block run through all of it, each through a loop of its own."""
    return 16 * sum(map(len, loops(sass)))


def read_early(sass: str) -> list[str]:
    """Loads that do not wait for the kernel before, or need not."""
    before, wait, after = sass.partition("ACQBULK")
    assert wait, "the kernel waits for nobody"
    return re.findall(r"\bLDG.*", before) + re.findall(r"\bLDG\S*CONSTANT.*", after)


def product_loops(sass: str) -> list[list[str]]:
    """The instructions of loops with products in them: of nested loops the inner one."""
    code, labels = parsed(sass)
    found: list[list[str]] = []
    last = -1  # instruction of a loop
    for end, (text, _) in enumerate(code):
        back = BRANCH.match(text)
        start = labels.get(back[2], end + 1) if back else end + 1
        body = [one.text for one in code[start : end + 1]]
        if start > last and any("HGMMA" in one for one in body):
            found.append(body)
            last = end
    return found
