from __future__ import annotations

import os
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
    assert [
        line.split()[:2] for line in result.output.splitlines() if line.endswith('only by name, never by "auto"')
    ] == [[op, name] for op in dispatch.OPS for name, kernel in dispatch.kernels(op).items() if kernel.backward is None]


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


WITHOUT_EXTRAS = """
import runpy
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"click", "rich", "numpy", "scipy", "matplotlib", "tomli", "pynvml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Refuse())
"""
CORE = """
import torch
import fulmen
import fulmen.layers

for name in fulmen.__all__:
    getattr(fulmen, name)
q = torch.randn(1, 2, 8, 16, requires_grad=True)
(fulmen.lightning_attention(q, q, q) + fulmen.flash_attention(q, q, q)).sum().backward()
assert q.grad is not None
"""


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # which needs numpy
    return subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS + code], capture_output=True, text=True, env=env)


def without_extras_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return without_extras(f"sys.argv = {['fulmen', *arguments]!r}\nrunpy.run_module('fulmen', run_name='__main__')")


def test_the_core_needs_no_extra() -> None:
    done = without_extras(CORE)
    assert done.returncode == 0, done.stderr


def test_doctor_needs_no_extra() -> None:
    done = without_extras_run("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("torch", "devices", "lightning", "flash", "eager", "why not"):
        assert word in done.stdout


@pytest.mark.parametrize("arguments", [["bench", "run"], ["tune", "flash"], []])
def test_without_the_extra_there_is_one_sentence(arguments: list[str]) -> None:
    done = without_extras_run(*arguments)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith('pip install "fulmen[bench]"')
    assert "Traceback" not in done.stderr
