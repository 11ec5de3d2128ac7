"""The kernels of another commit, measured in turns with those at hand: `fulmen bench run --base REF`.

Two versions of one package cannot live in one process. So the other commit is checked out beside us, gets today's
`bench` and `testing`, so that both are measured alike, and runs as a process that waits for its turn on standard input.
Where there is no git, REF is a folder that holds the other version.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fulmen.bench import Refused, environment, schema
from fulmen.bench.cases import Line
from fulmen.bench.runner import Journal, Selection, Session

WAYS_OUT = "give a folder that holds the other version (`git archive REF | tar -x -C FOLDER`), or run in a clone"
UNUSED = shutil.ignore_patterns("__pycache__")


def git(*arguments: str) -> tuple[bool, str]:
    """Whether git did it, and what it says, on one line."""
    done, text = environment.git(*arguments)
    lines = text.strip().splitlines() or [""]
    return done, lines[0 if "dubious" in lines[0] else -1]


@contextmanager
def checked_out(ref: str) -> Iterator[tuple[Path, str | None]]:
    """A tree of the commit or folder `ref` with today's bench and testing, and the commit's hash where it is known."""
    with tempfile.TemporaryDirectory(prefix="fulmen-base-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "tree"
        try:
            sha = copy(ref, tree) if Path(ref).is_dir() else check_out(ref, tree)
            for part in ("bench", "testing"):
                shutil.rmtree(tree / "fulmen" / part, ignore_errors=True)
                shutil.copytree(environment.PACKAGE / part, tree / "fulmen" / part, ignore=UNUSED)
            (tree / "fulmen" / "testing.py").unlink(missing_ok=True)
            yield tree, sha
        finally:
            if (tree / ".git").exists():
                git("worktree", "remove", "--force", str(tree))


def copy(ref: str, tree: Path) -> str | None:
    """A version that lies in a folder."""
    if not (Path(ref) / "fulmen" / "__init__.py").is_file():
        raise Refused(f"--base {ref}: there is no package fulmen in that folder")
    shutil.copytree(Path(ref) / "fulmen", tree / "fulmen", ignore=UNUSED)
    return environment.archived(Path(ref))


def check_out(ref: str, tree: Path) -> str:
    found, sha = git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if not found:
        works, why = git("rev-parse", "HEAD")
        why = "git knows no such commit, and there is no such folder" if works else f"no commit can be had here, {why}"
        raise Refused(f"--base {ref}: {why}; {WAYS_OUT}")
    done, why = git("worktree", "add", "--detach", str(tree), sha)
    if not done:
        raise Refused(f"--base {ref}: git says {why}")
    if not (tree / "fulmen").is_dir():
        raise Refused(f"--base {ref}: there is no package fulmen in that commit")
    return sha


@contextmanager
def started(ref: str, selection: Selection, out: Path) -> Iterator[Base]:
    """The other commit's process; its results go to a file of their own."""
    with checked_out(ref) as (tree, sha):
        command = [sys.executable, "-m", "fulmen.bench.base"]
        where: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": str(tree)}, "cwd": tree}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **where) as process:
            base = Base(ref, process, Journal(out))
            try:
                base.start(selection, tree, sha)
                yield base
            finally:
                base.end()


class Base:
    """What `runner.run` takes turns with. A question is (number, method of `Server`, arguments), an answer (number,
    result or None, what is wrong or None), both pickled."""

    def __init__(self, ref: str, process: subprocess.Popen[bytes], journal: Journal) -> None:
        self.ref, self.process, self.journal = ref, process, journal
        self.asked, self.begun, self.done = 0, False, False

    def ask(self, do: str, *arguments: Any) -> Any:
        """One question, one answer; those to questions that an interrupt cut off come first, and are dropped."""
        self.asked += 1
        number, result, wrong = 0, None, None
        try:
            _send(self.process.stdin, (self.asked, do, arguments))
            while number != self.asked:
                number, result, wrong = pickle.load(self.process.stdout)  # type: ignore[arg-type]
        except (BrokenPipeError, EOFError, pickle.UnpicklingError):
            wrong = "the process ended"
        if wrong:
            raise Refused(f"--base {self.ref}: {wrong}")
        return result

    def start(self, selection: Selection, tree: Path, sha: str | None) -> None:
        run, package = self.ask("start", selection)
        if package != (tree / "fulmen").resolve():
            raise Refused(f"--base {self.ref}: its process took {package}, which is not that commit")
        clean = {"dirty": None, "diff": None} if sha is None else {"dirty": False, "diff": ""}
        run.commit = {"sha": sha, "source": run.commit.get("source")} | clean
        self.journal.write(run)

    def prepare(self, line: Line) -> None:
        self.begun, self.done = True, self.ask("prepare", line)

    def sample(self) -> None:
        self.done = self.ask("sample")

    def finish(self) -> None:
        if self.begun:
            self.begun = False
            for cell in self.ask("finish"):
                self.journal.write(cell)

    def end(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Server:
    """The process of the other commit: each method answers one question."""

    def start(self, selection: Selection) -> tuple[schema.Run, Path]:
        self.session = Session(selection)
        self.plans = self.session.plans()
        return self.session.run, environment.PACKAGE.resolve()

    def prepare(self, asked: Line) -> bool:
        line, who = next(plan for plan in self.plans if plan[0] == asked)
        self.group = self.session.group(line, [(c, self.session.cells(line, c)) for c in who if c.ours])
        self.group.prepare()
        return self.group.done

    def sample(self) -> bool:
        self.group.sample()
        return self.group.done

    def finish(self) -> list[schema.Cell]:
        return self.group.finish(self.session.run)


def _send(pipe: Any, message: tuple[Any, ...]) -> None:
    pipe.write(pickle.dumps(message))
    pipe.flush()


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    server = Server()
    while True:
        try:
            number, do, arguments = pickle.load(questions)
        except EOFError:
            return
        try:
            _send(answers, (number, getattr(server, do)(*arguments), None))
        except Exception as error:
            _send(answers, (number, None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: whoever asks decides, and has its answer
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anybody prints must not be an answer
    serve(sys.stdin.buffer, own)
