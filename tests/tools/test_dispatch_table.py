from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools import dispatch_table


def test_the_committed_table_is_what_the_code_picks() -> None:
    assert dispatch_table.PATH.read_text(encoding="utf-8") == dispatch_table.render()


def test_check_fails_on_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_table, "PATH", tmp_path / "docs" / "dispatch.md")
    assert dispatch_table.main(["--check"]) == 1
    assert dispatch_table.main([]) == 0
    assert dispatch_table.main(["--check"]) == 0
    dispatch_table.PATH.write_text(dispatch_table.render().replace("64", "65", 1))
    assert dispatch_table.main(["--check"]) == 1
    assert dispatch_table.main(["--chekc"]) == 2
