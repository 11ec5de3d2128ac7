"""Runs programs in processes of their own, in which torch is imported and nothing of fulmen.

`Fresh()` starts this file as a program that imports torch once. It forks a process for each program it is given.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Fresh:
    """The process that programs are forked from."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )

    def at_once(self, *programs: str) -> list[Done]:
        """What programs that run at the same time did, in the environment of this call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([dict(os.environ), programs]), file=self.process.stdin, flush=True)
        return [Done(*one) for one in json.loads(self.process.stdout.readline())]

    def __call__(self, program: str) -> str:
        """What a program prints; it must not fail."""
        (done,) = self.at_once(program)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# -------------------------------------------------------------------------------- inside the other process


def run(program: str, environment: dict[str, str], stdout: int, stderr: int) -> None:
    """Does not return."""
    code: Any = None
    for file, descriptor in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
        os.dup2(file, descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = traceback.format_exc()
    if isinstance(code, str):  # as Python does
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def serve() -> None:
    import torch  # noqa: F401

    sys.path[0] = str(ROOT)  # not the folder of this file
    for line in sys.stdin:
        environment, programs = json.loads(line)
        started, answer = [], []
        with contextlib.ExitStack() as stack:
            for program in programs:
                told = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in ("stdout", "stderr")]
                if (process := os.fork()) == 0:
                    run(program, environment, *(file.fileno() for file in told))
                started.append((process, told))
            for process, told in started:
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                for file in told:
                    file.seek(0)
                answer.append((code, *(file.read() for file in told)))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
