"""The first call in a fresh process with empty kernel caches: what a user waits for the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from fulmen.bench import adapters, schema
from fulmen.bench.environment import PACKAGE


def first_call(cell: schema.Cell, device: torch.device) -> float:
    """Seconds of the pass of one of our cells."""
    given = json.dumps([cell.op, cell.case, cell.competitor.partition(" ")[2], cell.pass_, str(device)])
    with tempfile.TemporaryDirectory() as caches:
        path = {"TRITON_CACHE_DIR": caches, "FULMEN_CACHE_DIR": caches, "PYTHONPATH": str(PACKAGE.parent)}
        command = [sys.executable, "-m", "fulmen.bench.startup", given]
        done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"in a fresh process: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return float(done.stdout.split()[-1])


def measure(op: str, case: dict[str, Any], backend: str, pass_: str, device: str) -> float:
    problem = adapters.of(op).problem(case, torch.device(device), 1)
    synchronize = torch.cuda.synchronize if device != "cpu" else lambda: None
    synchronize()
    begin = time.perf_counter()
    o = adapters.of(op).attend(backend)(problem.x)
    if pass_ != "forward":
        torch.autograd.grad(o, list(problem.leaves.values()), list(problem.douts.values()))
    synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    print(measure(*json.loads(sys.argv[1])))
