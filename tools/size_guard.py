"""Fails when a file, function, kernel or folder outgrows what a reader can hold in mind.

    file 600 lines, host function 80, kernel (anything under a `jit` decorator) 150, page of docs/notes 150
    kernel 25 parameters that are no constexpr
    tracked files of results/ 4 MB together

Counted from `def` to the last line, docstring included. Standard library only.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("fulmen", "tests", "tools")
MAX_FILE = 600
MAX_FUNCTION = 80
MAX_KERNEL = 150
MAX_NOTE = 150
MAX_PARAMETERS = 25
MORE_PARAMETERS = {"state_update_kernel": 45, "values_backward_kernel": 27}  # strides of tensors that users bring
MAX_RESULTS = 4_000_000  # bytes


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
    kind, limit = ("page of notes", MAX_NOTE) if path.suffix == ".md" else ("file", MAX_FILE)
    if lines > limit:
        yield f"{path}: {lines} lines, a {kind} may have {limit}"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        kind, limit = ("kernel", MAX_KERNEL) if is_kernel(node) else ("function", MAX_FUNCTION)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > limit:
            yield f"{path}:{node.lineno}: {node.name} has {lines} lines, a {kind} may have {limit}"
        at_run_time = [
            a for a in node.args.args if a.annotation is None or "constexpr" not in ast.unparse(a.annotation)
        ]
        limit = MORE_PARAMETERS.get(node.name, MAX_PARAMETERS)
        if kind == "kernel" and node.name.endswith("_kernel") and len(at_run_time) > limit:
            yield f"{path}:{node.lineno}: {node.name} has {len(at_run_time)} parameters, a kernel may have {limit}"


def sources(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted(p for p in (root / folder).rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h"))
    yield from sorted((root / "docs" / "notes").glob("*.md"))


def results(root: Path) -> Iterator[str]:
    """A sentence if the tracked files of results/ are too large; without git every file there counts."""
    listed = subprocess.run(["git", "ls-files", "-z", "results"], cwd=root, capture_output=True, text=True)
    if listed.returncode == 0:
        files = [root / name for name in listed.stdout.split("\0") if name]
    else:
        files = list((root / "results").rglob("*"))
    size = sum(path.stat().st_size for path in files if path.is_file())
    if size > MAX_RESULTS:
        yield f"{root / 'results'}: {size} bytes, tracked results may have {MAX_RESULTS}"


def main(root: Path) -> int:
    found = [offence for path in sources(root) for offence in offences(path)]
    found += results(root)
    for offence in found:
        print(offence)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent))
