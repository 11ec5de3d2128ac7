from __future__ import annotations

from pathlib import Path

import pytest

from tools import models_table


def test_the_committed_matrix_is_what_the_tests_run() -> None:
    assert models_table.main(["--check"]) == 0


def test_check_fails_on_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "models.md"
    changed.write_text(models_table.PATH.read_text("utf-8").replace("| yes |", "| no |", 1), "utf-8")
    monkeypatch.setattr(models_table, "PATH", changed)
    assert models_table.main(["--check"]) == 1
    assert models_table.main([]) == 0
    assert models_table.main(["--check"]) == 0
    assert models_table.main(["--chekc"]) == 2
