from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import sanitize


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, says: str, status: int, *arguments: str) -> int:
    """The tool's exit status beside a compute-sanitizer that prints `says`."""
    command = folder / "compute-sanitizer"
    command.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(sys, "argv", ["sanitize.py", *arguments])
    monkeypatch.setattr(sanitize, "LOGS", folder / "logs")
    return sanitize.main()


@pytest.mark.parametrize(
    ("says", "status", "exits", "prints"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0, "nothing found"),
        ("========= ERROR SUMMARY: 1 error", 0, 1, "1 found"),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0, "nothing found"),
        ("========= RACECHECK SUMMARY: 12 hazards displayed (12 errors, 0 warnings)", 0, 1, "12 found"),
        ("========= ERROR SUMMARY: 0 errors", 1, 1, "failed with exit status 1"),
        ("killed", 0, 1, "failed"),
    ],
)
def test_counts_what_the_sanitizer_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    says: str,
    status: int,
    exits: int,
    prints: str,
) -> None:
    assert run(monkeypatch, tmp_path, says, status, "lightning", "--tool", "racecheck") == exits
    assert prints in capsys.readouterr().out
    assert says in (tmp_path / "logs" / "lightning-racecheck.txt").read_text()


def test_every_operation_unless_one_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, tmp_path, "ERROR SUMMARY: 0 errors", 0) == 0
    assert capsys.readouterr().out.count("nothing found") == len(sanitize.OPERATIONS)
