"""The kernels of another commit, interleaved with those at hand: `fulmen bench run --base REF`.

Two versions of one package cannot live in one process. So the other commit is unpacked beside us and gets today's
`bench` and `testing`, so that both are measured alike. Its process runs the same lines into a file of its own. Its
monitor is `Turns`: at each case and after each sample it says through a pipe where it is, and waits for an answer.
Where there is no git, REF is a folder that holds the other version.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fulmen.bench import Refused, environment, runner
from fulmen.bench.cases import Line
from fulmen.bench.environment import git
from fulmen.bench.group import Group
from fulmen.bench.runner import Selection

WAYS_OUT = "give a folder that holds the other version (`git archive REF | tar -x -C FOLDER`), or run in a clone"
UNUSED = shutil.ignore_patterns("__pycache__")


def unpack(ref: str, tree: Path) -> str | None:
    """Puts the package of the commit or folder `ref` into `tree`; returns the commit's hash where it is known."""
    folder, package = Path(ref), tree / "fulmen"
    if folder.is_dir():
        if not (folder / "fulmen" / "__init__.py").is_file():
            raise Refused(f"--base {ref}: there is no package fulmen in that folder")
        shutil.copytree(folder / "fulmen", package, ignore=UNUSED)
        return environment.archived(folder)
    found, sha = git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if not found:
        works, why = git("rev-parse", "HEAD")
        why = "git knows no such commit, and there is no such folder" if works else f"no commit can be had here, {why}"
        raise Refused(f"--base {ref}: {why}; {WAYS_OUT}")
    done, why = git("archive", "--prefix=fulmen/", f"--output={tree / 'package.zip'}", sha.strip())  # of our own folder
    if not done:
        raise Refused(f"--base {ref}: git says {why}")
    shutil.unpack_archive(tree / "package.zip", tree)
    return sha.strip()


@contextmanager
def started(ref: str, selection: Selection, out: Path) -> Iterator[Base]:
    """The other commit's process, with today's bench and testing; its results go to `out`."""
    with tempfile.TemporaryDirectory(prefix="fulmen-base-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder)
        sha = unpack(ref, tree)
        for part in ("bench", "testing"):
            shutil.rmtree(tree / "fulmen" / part, ignore_errors=True)
            shutil.copytree(environment.PACKAGE / part, tree / "fulmen" / part, ignore=UNUSED)
        (tree / "fulmen" / "testing.py").unlink(missing_ok=True)
        pipe, theirs = Pipe()
        command = [sys.executable, "-m", "fulmen.bench.base", str(theirs.fileno())]
        where: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": folder}, "cwd": tree, "pass_fds": [theirs.fileno()]}
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, **where) as process:
            theirs.close()
            base = Base(ref, pipe)
            try:
                base.advance((selection, out.resolve(), tree / "fulmen", sha))
                yield base
            finally:
                pipe.close()  # without an answer the process writes what it has as interrupted, and ends
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
                process.kill()


class Base:
    """What `runner.run` takes turns with."""

    def __init__(self, ref: str, pipe: Any) -> None:
        self.ref, self.pipe, self.at = ref, pipe, None
        self.done = True  # with the case at hand

    def advance(self, message: Any = None) -> None:
        """Lets the process go on to its next stop."""
        try:
            self.pipe.send(message)
            self.at, wrong = self.pipe.recv()
        except (EOFError, OSError):
            wrong = "the process ended"
        if wrong:
            raise Refused(f"--base {self.ref}: {wrong}")

    def prepare(self, line: Line) -> None:
        """Of a case in which none of ours competes the process knows nothing."""
        self.done = self.at != (line.suite, line.case)
        if not self.done:
            self.sample()

    def sample(self) -> None:
        self.advance()
        self.done = self.at != "sampled"


# ------------------------------------------------------------------------------------------- in the process
class Turns(runner.Monitor):
    """Says where the run is, and waits for its turn."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def stop(self, at: Any, wrong: str = "") -> None:
        try:
            self.pipe.send((at, wrong))
            self.pipe.recv()
        except (EOFError, OSError):  # whoever asks was interrupted
            raise KeyboardInterrupt from None

    def group(self, case: dict[str, Any], suite: str) -> None:
        self.stop((suite, case))

    def sampled(self, group: Group) -> None:
        self.stop("sampled")


def main(pipe: Any) -> None:
    turns = Turns(pipe)
    selection, out, package, sha = pipe.recv()
    try:
        if package.resolve() != environment.PACKAGE.resolve():
            raise RuntimeError(f"its process took {environment.PACKAGE}, which is not that commit")
        clean = {"dirty": None, "diff": None} if sha is None else {"dirty": False, "diff": ""}
        commit = {"sha": sha, "source": environment.source_hash()} | clean
        runner.run(replace(selection, baselines=("none",)), out, monitor=turns, commit=commit)
        turns.stop("end")
    except Exception as error:
        turns.stop(None, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: whoever asks decides
    with suppress(KeyboardInterrupt):
        main(Connection(int(sys.argv[1])))
