"""Groups of ranks that run checks, many in turn. `Nursery` starts this file as a program that forks them.

torch is imported once, and every group and its ranks are forked from that process. A group is asked for a module beside
this file, a function in it and its arguments; every rank calls it, and the answer has one entry for each rank: None, or
what went wrong. After an error the group is of no more use, and the one who asked starts another.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT = 30.0  # seconds a rank is waited for


class Nursery:
    """The process that groups on a device are forked from. Kernels on a CPU are interpreted."""

    def __init__(self, device: str) -> None:
        self.device = device
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        self.control, theirs = socket.socketpair()
        command = [sys.executable, str(HERE / "ranks.py"), str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=environment, stdout=2, pass_fds=[theirs.fileno()])
        theirs.close()

    def fork(self, connection: socket.socket, *group: object) -> int:
        """Starts a group that answers on `connection`; returns the id of its process."""
        socket.send_fds(self.control, [json.dumps(group).encode()], [connection.fileno()])
        return int(self.control.recv(64))

    def close(self) -> None:
        self.control.close()
        self.process.wait()


class Pool:
    """A group of ranks, seen from the tests."""

    def __init__(self, nursery: Nursery, size: int, timeout: float = TIMEOUT, transport: str = "gloo") -> None:
        self.folder = tempfile.TemporaryDirectory()
        ours, theirs = socket.socketpair()
        self.process = nursery.fork(theirs, size, self.folder.name, nursery.device, timeout, transport)
        theirs.close()
        self.connection = Connection(ours.detach())

    def run(self, module: str, function: str, **arguments) -> list[str | None]:
        """What went wrong on each rank."""
        try:
            self.connection.send((module, function, arguments))
            return self.connection.recv()
        except (EOFError, OSError):
            return ["the ranks ended without an answer"]

    def close(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self.connection.send(None)
            if not self.connection.poll(20):  # until all of its processes have ended
                os.kill(self.process, signal.SIGKILL)
        self.connection.close()
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


def group_main(connection: Connection, size: int, folder: str, device: str, timeout: float, transport: str) -> None:
    start = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    pipes, children = [], []
    for rank in range(size):
        ours, theirs = start.Pipe()
        child = start.Process(target=rank_main, args=(rank, size, folder, timeout, transport, theirs), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    with contextlib.suppress(EOFError):
        while (command := connection.recv()) is not None:
            for pipe in pipes:
                pipe.send(command)
            told = []
            for child, pipe in zip(children, pipes, strict=True):
                try:
                    told.append(pipe.recv())
                except (EOFError, ConnectionResetError):
                    child.join()
                    told.append(f"the process ended with {child.exitcode}")
            connection.send(told)
    for child in children:
        child.kill()
        child.join()


def main(control: socket.socket) -> None:
    sys.path.insert(0, str(HERE))
    import torch

    from fulmen import dispatch
    from tests import interpreter

    for path in sorted(HERE.glob("check_*.py")):  # before any fork, so that all they need is imported once
        importlib.import_module(path.stem)
    for op in ("flash", "latent", "lightning"):  # their backends, too
        dispatch.kernels(op)
    sys.modules["check_layers"].hybrid()
    importlib.import_module("torch.distributed.checkpoint.filesystem")
    if os.environ.get("TRITON_INTERPRET") == "1":
        quick = contextlib.ExitStack()
        quick.enter_context(interpreter.faster())
    torch.set_num_threads(1)
    gc.freeze()
    while True:
        group, descriptors, *_ = socket.recv_fds(control, 4096, 1)
        if not group:
            break
        if process := os.fork():
            os.close(descriptors[0])
            control.send(str(process).encode())
        else:
            control.close()
            group_main(Connection(descriptors[0]), *json.loads(group))
            os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()  # for groups, which have ended


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
