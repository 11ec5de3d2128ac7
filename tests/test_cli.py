from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

import fulmen
from fulmen import dispatch
from fulmen.__main__ import main


def test_doctor_lists_versions_devices_and_every_backend() -> None:
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for word in ("python", "torch", "triton", "fulmen", fulmen.__version__, "backend", "why not"):
        assert word in result.output
    for op in dispatch.OPS:
        for name in dispatch.kernels(op):
            assert name in result.output


def test_doctor_prints_the_reason_word_for_word(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [("fast", None), ("other", "needs [sm_90] or newer")]
    monkeypatch.setattr(dispatch, "report", lambda op, device: answer)
    result = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "needs [sm_90] or newer" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["doctor", "--help"], ["--version"]])
def test_asking_for_help_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from fulmen.__main__ import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_python_dash_m_fulmen() -> None:
    done = subprocess.run([sys.executable, "-m", "fulmen", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"fulmen {fulmen.__version__}"


def test_unknown_command_fails() -> None:
    assert CliRunner().invoke(main, ["nonsense"]).exit_code == 2
