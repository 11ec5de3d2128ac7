"""The kernels of another commit, measured in turns with those at hand: `fulmen bench run --base REF`.

Two versions of one package cannot live in one process. So the other commit is checked out beside us, given the
measuring part of today (`bench` and `testing`, so that both are measured alike), and run as a process that is told over
its standard input when it is its turn: while it samples we wait, and the other way round. Where there is no git, as on
a machine that only has what `git archive` made, REF is a folder with the other version in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fulmen.bench import schema
from fulmen.bench.environment import PACKAGE, archived
from fulmen.bench.runner import BadRun, Choice, Journal

WAYS_OUT = "give a folder that holds the other version (`git archive REF | tar -x -C FOLDER`), or run in a clone"


def _git(*arguments: str) -> tuple[bool, str]:
    """Whether git did it, and what it says, on one line."""
    try:
        done = subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True)
    except OSError as error:
        return False, f"git cannot be run ({error.strerror})"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    return done.returncode == 0, said[0 if "dubious" in said[0] else -1]


class Base:
    """The other commit's process; its results go to a file of their own."""

    def __init__(self, ref: str, choice: Choice, out: Path) -> None:
        self.ref, self.choice, self.out = ref, choice, out
        self.journal = Journal(out)
        self.run: schema.Run | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="fulmen-base-"))
        self.asked = 0

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    def __enter__(self) -> Base:
        try:
            self.sha = self._copy() if Path(self.ref).is_dir() else self._check_out()
            self._lend()
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _copy(self) -> str | None:
        """Another version that lies in a folder."""
        if not (Path(self.ref) / "fulmen" / "__init__.py").is_file():
            raise BadRun(f"--base {self.ref}: there is no package fulmen in that folder")
        leave = shutil.ignore_patterns("__pycache__", "bench")
        shutil.copytree(Path(self.ref) / "fulmen", self.tree / "fulmen", ignore=leave)
        return archived(Path(self.ref))

    def _check_out(self) -> str:
        found, sha = _git("rev-parse", "--verify", "--quiet", f"{self.ref}^{{commit}}")
        if not found:
            works, why = _git("rev-parse", "HEAD")
            if not works:
                raise BadRun(f"--base {self.ref}: no commit can be had here, {why}; {WAYS_OUT}")
            raise BadRun(f"--base {self.ref}: git knows no such commit, and there is no such folder; {WAYS_OUT}")
        done, why = _git("worktree", "add", "--detach", str(self.tree), sha)
        if not done:
            raise BadRun(f"--base {self.ref}: git says {why}")
        if not (self.tree / "fulmen").is_dir():
            raise BadRun(f"--base {self.ref}: there is no package fulmen in that commit")
        return sha

    def _lend(self) -> None:
        """The measuring part of today."""
        theirs = self.tree / "fulmen"
        for part in ("bench", "testing"):
            shutil.rmtree(theirs / part, ignore_errors=True)
            shutil.copytree(PACKAGE / part, theirs / part, ignore=shutil.ignore_patterns("__pycache__"))
        (theirs / "testing.py").unlink(missing_ok=True)

    def _start(self) -> None:
        env = os.environ | {"PYTHONPATH": str(self.tree)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fulmen.bench.base"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=env, cwd=self.tree,
        )  # fmt: skip
        answer = self.ask("start", choice=dataclasses.asdict(self.choice))
        if Path(answer["package"]) != (self.tree / "fulmen").resolve():
            raise BadRun(f"--base {self.ref}: its process took {answer['package']}, which is not that commit")
        run = schema.parse(answer["run"], f"--base {self.ref}")
        assert isinstance(run, schema.Run)
        known = self.sha is not None  # of a folder without a note nothing is
        run.commit = {
            "sha": self.sha, "dirty": False if known else None, "diff": "" if known else None,
            "source": run.commit.get("source"),
        }  # fmt: skip
        self.run = run
        self.journal.write(run)

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """One question, one answer; those to questions that an interrupt cut off come first, and are dropped."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.asked += 1
        answer: dict[str, Any] = {}
        try:
            print(json.dumps({"do": do, "number": self.asked} | more), file=self.process.stdin, flush=True)
            while answer.get("number") != self.asked:
                line = self.process.stdout.readline()
                answer = json.loads(line) if line else {"error": "the process ended", "number": self.asked}
        except (BrokenPipeError, json.JSONDecodeError) as error:
            answer = {"error": f"the process ended ({error})"}
        if "error" in answer:
            raise BadRun(f"--base {self.ref}: {answer['error']}")
        return answer

    def __call__(self, plan: Any) -> Turn:
        """The same case there, as what `runner.run` takes turns with."""
        return Turn(self, {"suite": plan.line.suite, "case": plan.case})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = getattr(self, "process", None)
        if process is not None:
            process.stdin.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        if (self.tree / ".git").exists():
            _git("worktree", "remove", "--force", str(self.tree))
        shutil.rmtree(self.folder, ignore_errors=True)


class Turn:
    """One group of the other process."""

    def __init__(self, base: Base, what: dict[str, Any]) -> None:
        self.base, self.what, self.done, self.begun = base, what, False, False

    def prepare(self) -> None:
        self.begun = True
        self.done = self.base.ask("prepare", **self.what)["done"]

    def sample(self) -> None:
        self.done = self.base.ask("sample")["done"]

    def finish(self) -> None:
        if self.begun:
            for text in self.base.ask("finish")["cells"]:
                self.base.journal.write(schema.parse(text, f"--base {self.base.ref}"))


# -------------------------------------------------------------------------------- inside the other process


class Server:
    """Answers one line with one line."""

    def __init__(self) -> None:
        self.passed: dict[Any, dict[str, Any]] = {}

    def start(self, choice: dict[str, Any]) -> dict[str, Any]:
        from fulmen.bench import environment, runner
        from fulmen.bench.group import Machine

        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in choice.items()}
        chosen = Choice(**given)
        self.machine = Machine.of(environment.device_of(chosen.device))
        self.machine.burn_in()
        seed = 1 if chosen.seed is None else chosen.seed
        self.run = runner.new_run(chosen, self.machine, seed)
        self.plans = runner.compiled_plans(chosen, self.machine, self.run.run_id, seed, runner.Watcher())
        return {"run": schema.dumps(self.run), "package": str(PACKAGE.resolve())}

    def prepare(self, suite: str, case: dict[str, Any]) -> dict[str, Any]:
        from fulmen.bench.competitors import OURS
        from fulmen.bench.group import Group

        plan, who = next(p for p in self.plans if p[0].line.suite == suite and p[0].case == case)
        own = [competitor for competitor in who if competitor.name.startswith(OURS)]
        self.group = Group(plan, own, self.machine, passed=self.passed)
        self.group.prepare()
        return {"done": self.group.done}

    def sample(self) -> dict[str, Any]:
        self.group.sample()
        return {"done": self.group.done}

    def finish(self) -> dict[str, Any]:
        return {"cells": [schema.dumps(cell) for cell in self.group.finish(self.run)]}


def serve(stdin: IO[str], stdout: IO[str]) -> None:
    server = Server()
    for line in stdin:
        asked = json.loads(line)
        number = asked.pop("number", None)
        try:
            answer = getattr(server, asked.pop("do"))(**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer | {"number": number}), file=stdout, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: whoever asks decides, and has its answer
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    serve(sys.stdin, answers)
