"""Tensor parallelism: several processes compute what one does. The comparison itself is `tensor_parallel.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_process_does(ranks):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "tensor_parallel.py"), str(ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout.count(f"{ranks} ranks: ") == 7, done.stdout
