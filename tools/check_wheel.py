"""Builds the wheel into build/wheel and tries it in a clean venv with core dependencies alone: `make wheel`.

The venv is outside the tree, so nothing but the wheel can be imported. What needs an extra must say which.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHEELS = ROOT / "build" / "wheel"
DATA = {".py", ".typed", ".cu", ".cuh", ".toml", ".html", ".css", ".js"}  # what the package is made of

TRY = """
import importlib.util, subprocess, sys
import torch, fulmen
from fulmen.layers import GroupedQueryAttention, KVCache, LightningAttention

assert not any(map(importlib.util.find_spec, ("click", "rich", "matplotlib", "transformers"))), "more than the core"
q, k, v = (torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3))
o = fulmen.flash_attention(q, k, v, causal=True) + fulmen.lightning_attention(q, k, v, fulmen.decay.alibi(2))
o.sum().backward()
with torch.no_grad():
    GroupedQueryAttention(32, 4, 2, causal=True)(torch.randn(1, 5, 32), cache=KVCache())
    LightningAttention(32, 4, layer=0, num_layers=1)(torch.randn(1, 5, 32))
print(fulmen.explain("flash", q, k, v))
bench = subprocess.run([sys.executable, "-m", "fulmen", "bench", "list"], capture_output=True, text=True)
assert bench.returncode != 0 and "fulmen[bench]" in bench.stderr + bench.stdout, bench
"""


def package_files() -> set[str]:
    files = (ROOT / "fulmen").rglob("*")
    return {p.relative_to(ROOT).as_posix() for p in files if p.suffix in DATA and "__pycache__" not in p.parts}


def build() -> Path:
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(WHEELS), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = WHEELS.glob("fulmen-*.whl")
    return wheel


def main() -> int:
    wheel = build()
    with zipfile.ZipFile(wheel) as archive:
        missing = package_files() - set(archive.namelist())
    if missing:
        print(f"{wheel.name} lacks {', '.join(sorted(missing))}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "Scripts" if sys.platform == "win32" else "bin", "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
        for command in (["-c", TRY], ["-m", "fulmen", "doctor"]):
            subprocess.run([python, *command], cwd=folder, check=True)
    print(f"{wheel.name} works in a clean venv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
