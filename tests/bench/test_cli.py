from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fulmen.__main__ import main
from fulmen.bench import environment, schema

TINY = ["--device", "cpu", "--shape", "B=1,H=2,N=32,D=16", "--backend", "eager", "--baseline", "none", "--seconds", "0"]


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ceilings", lambda *_: {})


def call(*arguments: str | Path):
    return CliRunner().invoke(main, [str(a) for a in arguments], env={"COLUMNS": "200"})


def test_run_writes_results_and_says_where(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run.jsonl"
    done = call("bench", "run", "quick", *TINY, "--out", out)
    assert done.exit_code == 0, done.output
    assert "results:" in done.output
    assert "fulmen eager" in done.output
    assert {c.status for c in schema.read([out]).cells} == {"ok"}
    again = call("bench", "run", "quick", *TINY, "--out", out)
    assert again.exit_code == 1
    assert "--resume" in again.output
    resumed = call("bench", "run", "quick", *TINY, "--out", out, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "0 cells to measure" in resumed.output


def test_list_names_suites_and_competitors() -> None:
    done = call("bench", "list")
    assert done.exit_code == 0, done.output
    for word in ("lightning", "flash-small", "quick", "fulmen eager", "sdpa-cudnn", "lightning-attention-2"):
        assert word in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "run", "nonsense"],
        ["bench", "run", "--device", "cuda:99"],
        ["bench", "run", "--base", "no-such-ref", *TINY],
        ["tune", "lightning"],
    ],
)
def test_errors_are_words(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if arguments[0] == "tune" and torch.cuda.is_available():
        pytest.skip("there is a GPU to tune for")
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert done.exit_code == 1, done.output
    assert "Error: " in done.output
    assert "Traceback" not in done.output
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("command", ["report", "compare", "audit"])
def test_unreadable_files_are_named(command: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"schema": "foreign/1"}\n')
    more = {"report": ["--out", tmp_path / "r"], "compare": [bad], "audit": []}[command]
    done = call("bench", command, bad, *more)
    assert done.exit_code == 1, done.output
    assert "bad.jsonl" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("arguments", [["bench", "run", "--help"], ["bench", "report", "--help"], ["tune", "--help"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom fulmen.__main__ import main\n"
        f"main({arguments!r}, standalone_mode=False)\nsys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_results_can_be_read_without_torch(tmp_path: Path) -> None:
    code = "import sys\nfrom fulmen.bench import schema\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.slow
def test_against_another_commit(tmp_path: Path) -> None:
    """The kernels of HEAD in turns with those of the working tree."""
    if environment._git("rev-parse", "HEAD") is None:
        pytest.skip("no git repository here")
    out = tmp_path / "run.jsonl"
    options = ["--pass", "forward", "--shape", "B=1,H=2,N=32,D=16,decay=yes"]
    done = call("bench", "run", "quick", *TINY[:2], "--backend", "eager", "--baseline", "none", *options,
                "--seconds", "0", "--out", out, "--base", "HEAD")  # fmt: skip
    assert done.exit_code == 0, done.output
    ours, theirs = schema.read([out]), schema.read([tmp_path / "run.base.jsonl"])
    assert {c.config_hash for c in ours.cells} == {c.config_hash for c in theirs.cells}
    assert all(c.status == "ok" for c in [*ours.cells, *theirs.cells])
    (base,) = theirs.runs.values()
    assert len(base.commit["sha"]) == 40
    listed = environment._git("worktree", "list", "--porcelain") or ""
    assert "fulmen-base-" not in listed
    assert json.dumps(base.commit)


@pytest.mark.parametrize(("name", "said"), [("numpy", True), ("fulmen.bench.cases", False)])
def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, said: bool) -> None:
    def gone(*arguments: object) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr("rich.console.Console", gone)
    done = call("bench", "list")
    assert done.exit_code == 1
    assert ("is not installed" in done.output and "fulmen[bench]" in done.output) == said
    assert isinstance(done.exception, SystemExit if said else ModuleNotFoundError)  # of ours: a fault, shown as one
