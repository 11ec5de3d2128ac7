"""Processes that form a group and run checks, many in turn: `python ranks.py SIZE FOLDER DEVICE TIMEOUT TRANSPORT`.

torch is imported once and the ranks are forked from that process. A line of JSON on stdin names a module beside this
file, a function in it and its arguments; every rank calls it, and the answer is a line with one entry for each rank:
null, or what went wrong. After an error the group is of no more use, and the one who asked starts another.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT = 30.0  # seconds a rank is waited for


class Pool:
    """The ranks, seen from the tests."""

    def __init__(self, size: int, device: str = "cpu", timeout: float = TIMEOUT, transport: str = "gloo") -> None:
        self.size, self.device = size, device
        self.folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "ranks.py"), str(size), self.folder.name, device, str(timeout), transport]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, module: str, function: str, **arguments) -> list[str | None]:
        """What went wrong on each rank."""
        print(json.dumps([module, function, arguments]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            return ["the ranks ended without an answer"]
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.folder.cleanup()


# ---------------------------------------------------------------------------------- inside the processes


def rank_main(rank: int, size: int, folder: str, timeout: float, transport: str, pipe) -> None:
    sys.path.insert(0, str(HERE))  # not there yet where processes are spawned, as CUDA needs it
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # and uninitialised memory is NaN, as in conftest.py
    torch.utils.deterministic.fill_uninitialized_memory = True
    if transport == "nccl":
        torch.cuda.set_device(rank)
    meeting, limit = f"file://{folder}/meeting", timedelta(seconds=timeout)
    dist.init_process_group(transport, init_method=meeting, rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            module, function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            getattr(importlib.import_module(module), function)(**arguments)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())


def main(size: int, folder: str, device: str, timeout: float, transport: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    sys.path.insert(0, str(HERE))
    import torch

    for path in sorted(HERE.glob("check_*.py")):  # before the fork, so that all they need is imported once
        importlib.import_module(path.stem)
    torch.set_num_threads(1)
    start = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    pipes, children = [], []
    for rank in range(size):
        ours, theirs = start.Pipe()
        child = start.Process(target=rank_main, args=(rank, size, folder, timeout, transport, theirs), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    for line in sys.stdin:
        command = json.loads(line)
        for pipe in pipes:
            pipe.send(command)
        told = []
        for child, pipe in zip(children, pipes, strict=True):
            try:
                told.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                child.join()
                told.append(f"the process ended with {child.exitcode}")
        print(json.dumps(told), file=answers, flush=True)
    for child in children:
        child.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])
