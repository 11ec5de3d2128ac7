from __future__ import annotations

from pathlib import Path

import pytest

from tools import size_guard

ROOT = Path(__file__).parents[2]


def write(root: Path, name: str, source: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path


def function(lines: int, decorator: str = "") -> str:
    """A function of exactly `lines` lines, docstring included, the decorator not."""
    return f'{decorator}\ndef f(x):\n    """Says nothing."""\n' + "    x += 1\n" * (lines - 2)


@pytest.mark.parametrize(
    ("decorator", "limit"),
    [
        ("", size_guard.MAX_FUNCTION),
        ("@functools.lru_cache", size_guard.MAX_FUNCTION),
        ("@triton.jit", size_guard.MAX_KERNEL),
        ("@triton.heuristics({})\n@triton.jit(do_not_specialize=['n'])", size_guard.MAX_KERNEL),
        ("@jit", size_guard.MAX_KERNEL),
    ],
)
def test_function_limit_is_exact(tmp_path: Path, decorator: str, limit: int) -> None:
    assert not list(size_guard.offences(write(tmp_path, "a.py", function(limit, decorator))))
    (offence,) = size_guard.offences(write(tmp_path, "b.py", function(limit + 1, decorator)))
    assert f"f has {limit + 1} lines" in offence


def test_parameter_limit_is_exact(tmp_path: Path) -> None:
    names = ", ".join(f"p{i}" for i in range(size_guard.MAX_PARAMETERS))
    kernel = "@triton.jit\ndef f_kernel({}, C: tl.constexpr):\n    pass\n"
    assert not list(size_guard.offences(write(tmp_path, "a.py", kernel.format(names))))
    (offence,) = size_guard.offences(write(tmp_path, "b.py", kernel.format(f"{names}, one_more")))
    assert f"{size_guard.MAX_PARAMETERS + 1} parameters" in offence


def test_methods_and_nested_functions_count(tmp_path: Path) -> None:
    method = "class A:\n    def f(self):\n" + "        self.x = 1\n" * size_guard.MAX_FUNCTION
    (offence,) = size_guard.offences(write(tmp_path, "a.py", method))
    assert "a.py:2:" in offence


@pytest.mark.parametrize(
    ("name", "limit"),
    [("a.py", size_guard.MAX_FILE), ("a.cu", size_guard.MAX_FILE), ("docs/notes/a.md", size_guard.MAX_NOTE)],
)
def test_file_limit_is_exact(tmp_path: Path, name: str, limit: int) -> None:
    path = write(tmp_path, name, "x = 1\n" * limit)
    assert not list(size_guard.offences(path))
    path.write_text(path.read_text() + "x = 1\n")
    (offence,) = size_guard.offences(path)
    assert f"{limit + 1} lines" in offence


def test_results_limit_is_exact(tmp_path: Path) -> None:
    path = write(tmp_path, "results/gpu/suite.jsonl", "x" * size_guard.MAX_RESULTS)
    assert not list(size_guard.results(tmp_path))
    path.write_text(path.read_text() + "x")
    (offence,) = size_guard.results(tmp_path)
    assert f"{size_guard.MAX_RESULTS + 1} bytes" in offence


def test_exit_code_and_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "fulmen/small.py", "x = 1\n")
    write(tmp_path, "elsewhere/large.py", "x = 1\n" * 1000)
    assert size_guard.main(tmp_path) == 0
    write(tmp_path, "tests/deep/large.py", "x = 1\n" * 1000)
    assert size_guard.main(tmp_path) == 1
    assert "large.py: 1000 lines" in capsys.readouterr().out


def test_this_repository_keeps_to_the_limits() -> None:
    assert [o for path in size_guard.sources(ROOT) for o in size_guard.offences(path)] == []
    assert not list(size_guard.results(ROOT))
