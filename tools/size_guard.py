"""Fails when a file, function or kernel outgrows what a reader can hold in mind.

    file 600 lines, host function 80, kernel (anything under a `jit` decorator) 150

Counted from `def` to the last line, docstring included. Standard library only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("fulmen", "tests", "tools")
MAX_FILE = 600
MAX_FUNCTION = 80
MAX_KERNEL = 150


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """`@jit`, `@triton.jit`, `@gluon.jit`, each with or without arguments."""
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", None)
        if name == "jit":
            return True
    return False


def offences(path: Path) -> Iterator[str]:
    """One sentence for each limit that `path` breaks."""
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    if lines > MAX_FILE:
        yield f"{path}: {lines} lines, a file may have {MAX_FILE}"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        kind, limit = ("kernel", MAX_KERNEL) if is_kernel(node) else ("function", MAX_FUNCTION)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > limit:
            yield f"{path}:{node.lineno}: {node.name} has {lines} lines, a {kind} may have {limit}"


def sources(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h"))


def main(root: Path) -> int:
    found = [offence for path in sources(root) for offence in offences(path)]
    for offence in found:
        print(offence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent))
