from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from fulmen.__main__ import main
from fulmen.bench import Refused, base, environment, schema

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


def test_a_run_without_a_time_fails(tmp_path: Path) -> None:
    shape = ["--device", "cpu", "--shape", "B=1,H=2,N=32,D=16", "--backend", "cuda", "--baseline", "none"]
    done = call("bench", "run", "quick", *shape, "--out", tmp_path / "run.jsonl")
    assert done.exit_code == 1
    assert "nothing was measured" in done.output


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


@pytest.mark.parametrize(
    ("ms", "fail_on", "code"),
    [("0.0001", [], 0), ("0.0001", ["--fail-on", "wrong"], 1), ("0.0001", ["--fail-on", "doubtful"], 1),
     ("20", ["--fail-on", "doubtful"], 0), ("20", ["--fail-on", "nonsense"], 2)],
)  # fmt: skip
def test_an_audit_fails_only_if_asked_to(tmp_path: Path, ms: str, fail_on: list[str], code: int) -> None:
    """0.1 us for attention over 8192 tokens is impossible, 20 ms is not."""
    page = tmp_path / "page.csv"
    page.write_text(f"Kernel,GPU,B,H,N,D,dtype,causal,Fwd (ms)\nflash,H200,4,32,8192,128,bf16,no,{ms}\n")
    done = call("bench", "audit", page, *fail_on)
    assert done.exit_code == code, done.output
    assert ("IMPOSSIBLE" in done.output) == (ms != "20")


@pytest.mark.parametrize("dtype", ["int8", "fp7", "bool"])
def test_a_dtype_that_is_none_is_refused(dtype: str) -> None:
    done = call("bench", "run", "quick", "--device", "cpu", "--dtype", dtype)
    assert done.exit_code == 1, done.output
    assert "must be one of bf16, fp16, fp32, fp64" in done.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["run", "quick", "--seconds", "nan"], "--seconds nan: must be a number of seconds"),
        (["run", "quick", "--seconds", "inf"], "--seconds inf"),
        (["scaling", "--heads", "0"], "--heads"),
        (["scaling", "--samples", "0"], "--samples"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], why: str) -> None:
    done = call("bench", *arguments)
    assert done.exit_code in (1, 2), done.output
    assert why in done.output
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
    if not environment.git("rev-parse", "HEAD")[0]:
        pytest.skip("no git repository here")
    _, before = environment.git("worktree", "list", "--porcelain")
    out, done = against(tmp_path, "HEAD")
    assert done.exit_code == 0, done.output
    ours, baseline = schema.read([out]), schema.read([tmp_path / "run.base.jsonl"])
    assert {c.config_hash for c in ours.cells} == {c.config_hash for c in baseline.cells}
    assert all(c.status == "ok" for c in [*ours.cells, *baseline.cells])
    (run,) = baseline.runs.values()
    assert len(run.commit["sha"]) == 40
    _, listed = environment.git("worktree", "list", "--porcelain")
    assert listed.count("fulmen-base-") == before.count("fulmen-base-")
    assert json.dumps(run.commit)


def against(tmp_path: Path, ref: str | Path, *more: str | Path):
    options = ["--pass", "forward", "--shape", "B=1,H=2,N=32,D=16,decay=yes", "--seconds", "0"]
    out = tmp_path / "run.jsonl"
    device = ["--device", "cpu", "--backend", "eager", "--baseline", "none"]
    return out, call("bench", "run", "quick", *device, *options, "--out", out, "--base", ref, *more)


@pytest.mark.slow
def test_against_a_folder_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has two trees of `git archive` and no git."""
    folder = tmp_path / "other"
    shutil.copytree(environment.PACKAGE, folder / "fulmen", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".git_archival.txt").write_text("0123456789" * 4 + "\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    out, done = against(tmp_path, folder)
    assert done.exit_code == 0, done.output
    (run,) = schema.read([tmp_path / "run.base.jsonl"]).runs.values()
    assert run.commit["sha"] == "0123456789" * 4
    assert run.commit["source"]
    assert {c.status for c in schema.read([out]).cells} == {"ok"}


@pytest.mark.parametrize("why", ["no git", "no repository", "no such commit", "an empty folder"])
def test_a_base_that_cannot_be_had_is_one_sentence(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, words = "HEAD", {"no git": "git cannot be run", "no repository": "not a git repository"}.get(why, "")
    if why == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif why == "no repository":
        monkeypatch.setattr(environment, "PACKAGE", tmp_path)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    elif why == "no such commit":
        ref, words = "no-such-ref", "no such commit"
        if not environment.git("rev-parse", "HEAD")[0]:
            pytest.skip("no git repository here")
    else:
        ref, words = str(tmp_path), "no package fulmen in that folder"
    _, done = against(tmp_path, ref)
    assert done.exit_code == 1
    errors = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert why == "an empty folder" or "git archive" in errors[0]
    assert "Traceback" not in done.output
    assert not list(tmp_path.glob("*.jsonl"))


class Told:
    """A pipe whose other end has said all it will say."""

    def __init__(self, *messages: object) -> None:
        self.messages, self.sent = list(messages), list[object]()

    def send(self, message: object) -> None:
        self.sent.append(message)

    def recv(self) -> object:
        if not self.messages:
            raise EOFError
        return self.messages.pop(0)


def test_the_other_process_goes_on_when_it_is_asked_to() -> None:
    """It stops at each case and sample; unasked, as after Ctrl-C, it is interrupted; without an answer it has ended."""
    answered = Told(None, None)
    turns = base.Turns(answered)
    turns.group({"N": 8}, "quick")
    turns.sampled(None)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        turns.group({"N": 16}, "quick")
    other, line = base.Base("HEAD", Told(*answered.sent)), SimpleNamespace(suite="quick", case={"N": 8})
    other.prepare(line)  # type: ignore[arg-type]
    assert other.done, "it has not said that it is there"
    other.advance()
    other.prepare(line)  # type: ignore[arg-type]
    assert not other.done
    other.sample()
    assert other.done, "it is at the next case"
    with pytest.raises(Refused, match="the process ended"):
        other.sample()


@pytest.mark.parametrize(("name", "said"), [("numpy", True), ("fulmen.bench.cases", False)])
def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, said: bool) -> None:
    def gone(*arguments: object) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr("rich.console.Console", gone)
    done = call("bench", "list")
    assert done.exit_code == 1
    assert ("is not installed" in done.output and "fulmen[bench]" in done.output) == said
    assert isinstance(done.exception, SystemExit if said else ModuleNotFoundError)  # of ours: a fault, shown as one
