"""The kernels of another commit, interleaved with those at hand: `fulmen bench run --base REF`.

Two versions of one package cannot live in one process. So the other commit is checked out beside us and gets today's
`bench` and `testing`, so that both are measured alike. Its process runs the same lines into a file of its own. Its
monitor is `Turns`: at each case and after each sample it says where it is, one line of JSON, and waits for a line.
Where there is no git, REF is a folder that holds the other version.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from fulmen.bench import Refused, environment, runner
from fulmen.bench.cases import Line
from fulmen.bench.environment import git
from fulmen.bench.group import Group
from fulmen.bench.runner import Selection

WAYS_OUT = "give a folder that holds the other version (`git archive REF | tar -x -C FOLDER`), or run in a clone"
UNUSED = shutil.ignore_patterns("__pycache__")


@contextmanager
def checked_out(ref: str) -> Iterator[tuple[Path, str | None]]:
    """A tree of the commit or folder `ref` with today's bench and testing, and the commit's hash where it is known."""
    with tempfile.TemporaryDirectory(prefix="fulmen-base-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        try:
            sha = copy(Path(ref), tree) if Path(ref).is_dir() else check_out(ref, tree)
            if not (tree / "fulmen" / "__init__.py").is_file():
                where = "folder" if Path(ref).is_dir() else "commit"
                raise Refused(f"--base {ref}: there is no package fulmen in that {where}")
            for part in ("bench", "testing"):
                shutil.rmtree(tree / "fulmen" / part, ignore_errors=True)
                shutil.copytree(environment.PACKAGE / part, tree / "fulmen" / part, ignore=UNUSED)
            (tree / "fulmen" / "testing.py").unlink(missing_ok=True)
            yield tree, sha
        finally:
            if (tree / ".git").exists():
                git("worktree", "remove", "--force", str(tree))


def copy(folder: Path, tree: Path) -> str | None:
    """A version that lies in a folder."""
    if (folder / "fulmen").is_dir():
        shutil.copytree(folder / "fulmen", tree / "fulmen", ignore=UNUSED)
    return environment.archived(folder)


def check_out(ref: str, tree: Path) -> str:
    found, sha = git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if not found:
        works, why = git("rev-parse", "HEAD")
        why = "git knows no such commit, and there is no such folder" if works else f"no commit can be had here, {why}"
        raise Refused(f"--base {ref}: {why}; {WAYS_OUT}")
    done, why = git("worktree", "add", "--detach", str(tree), sha.strip())
    if not done:
        raise Refused(f"--base {ref}: git says {why}")
    return sha.strip()


@contextmanager
def started(ref: str, selection: Selection, out: Path) -> Iterator[Base]:
    """The other commit's process; its results go to `out`."""
    with checked_out(ref) as (tree, sha):
        command = [sys.executable, "-m", "fulmen.bench.base"]
        where: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": str(tree)}, "cwd": tree}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **where) as process:
            base = Base(ref, process)
            try:
                base.advance(pickle.dumps((selection, out.resolve(), tree / "fulmen", sha)))
                yield base
            finally:
                base.end()


class Base:
    """What `runner.run` takes turns with."""

    def __init__(self, ref: str, process: Any) -> None:
        self.ref, self.process, self.at = ref, process, ""
        self.done = True  # with the case at hand

    def advance(self, message: bytes = b"\n") -> None:
        """Lets the process go on to its next stop."""
        try:
            self.process.stdin.write(message)
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline() or "{}")
        except (BrokenPipeError, ValueError):
            answer = {}
        if "at" not in answer:
            raise Refused(f"--base {self.ref}: {answer.get('wrong', 'the process ended')}")
        self.at = answer["at"]

    def prepare(self, line: Line) -> None:
        """Of a case in which none of ours competes the process knows nothing."""
        self.done = self.at != place(line.suite, line.case)
        if not self.done:
            self.sample()

    def sample(self) -> None:
        self.advance()
        self.done = self.at != "sampled"

    def end(self) -> None:
        """Without an answer the process writes what it has as interrupted, and ends."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def place(suite: str, case: dict[str, Any]) -> str:
    return f"{suite}: {json.dumps(case, sort_keys=True)}"


# ------------------------------------------------------------------------------------------- in the process
class Turns(runner.Monitor):
    """Says where the run is, and waits for its turn."""

    def __init__(self, turns: IO[bytes], answers: IO[bytes]) -> None:
        self.turns, self.answers = turns, answers

    def stop(self, **answer: str) -> None:
        self.answers.write(json.dumps(answer).encode() + b"\n")
        self.answers.flush()
        if not self.turns.readline():
            raise KeyboardInterrupt  # whoever asks was interrupted

    def group(self, case: dict[str, Any], suite: str) -> None:
        self.stop(at=place(suite, case))

    def sampled(self, group: Group) -> None:
        self.stop(at="sampled")


def main(questions: IO[bytes], answers: IO[bytes]) -> None:
    turns = Turns(questions, answers)
    selection, out, package, sha = pickle.load(questions)
    try:
        if package.resolve() != environment.PACKAGE.resolve():
            raise RuntimeError(f"its process took {environment.PACKAGE}, which is not that commit")
        clean = {"dirty": None, "diff": None} if sha is None else {"dirty": False, "diff": ""}
        commit = {"sha": sha, "source": environment.source_hash()} | clean
        runner.run(replace(selection, baselines=("none",)), out, monitor=turns, commit=commit)
        turns.stop(at="end")
    except Exception as error:
        turns.stop(wrong=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: whoever asks decides
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints must not be an answer
    with suppress(KeyboardInterrupt):
        main(sys.stdin.buffer, own)
