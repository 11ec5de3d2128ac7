"""The kernels of another commit, measured in turns with those at hand: `fulmen bench run --base REF`.

Two versions of one package cannot live in one process. So the other commit is checked out beside us, given the
measuring part of today (`bench` and `testing`, so that both are measured alike), and run as a process that is told over
its standard input when it is its turn: while it samples we wait, and the other way round.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fulmen.bench import schema
from fulmen.bench.runner import BadRun, Choice, Journal

PACKAGE = Path(__file__).parents[1]


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=PACKAGE, capture_output=True, text=True)


class Base:
    """The other commit's process; its results go to a file of their own."""

    def __init__(self, ref: str, choice: Choice, out: Path) -> None:
        self.ref, self.choice, self.out = ref, choice, out
        self.journal = Journal(out)
        self.run: schema.Run | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="fulmen-base-"))

    def __enter__(self) -> Base:
        try:
            self._check_out()
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _check_out(self) -> None:
        added = _git("worktree", "add", "--detach", str(self.folder / "tree"), self.ref)
        if added.returncode:
            raise BadRun(f"--base {self.ref}: git says {added.stderr.strip().splitlines()[-1]}")
        theirs = self.folder / "tree" / "fulmen"
        if not theirs.is_dir():
            raise BadRun(f"--base {self.ref}: there is no package fulmen in that commit")
        for part in ("bench", "testing"):
            shutil.rmtree(theirs / part, ignore_errors=True)
            shutil.copytree(PACKAGE / part, theirs / part, ignore=shutil.ignore_patterns("__pycache__"))
        (theirs / "testing.py").unlink(missing_ok=True)

    def _start(self) -> None:
        env = os.environ | {"PYTHONPATH": str(self.folder / "tree"), "PYTHONNOUSERSITE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fulmen.bench.base"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=env, cwd=self.folder / "tree",
        )  # fmt: skip
        answer = self.ask("start", choice=dataclasses.asdict(self.choice))
        run = schema.parse(answer["run"], f"--base {self.ref}")
        assert isinstance(run, schema.Run)
        run.commit = {"sha": _git("rev-parse", self.ref).stdout.strip(), "dirty": False, "diff": ""} | {
            "source": run.commit.get("source")
        }
        self.run = run
        self.journal.write(run)

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps({"do": do} | more), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() or '{"error": "the process ended"}')
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
        _git("worktree", "remove", "--force", str(self.folder / "tree"))
        shutil.rmtree(self.folder, ignore_errors=True)


class Turn:
    """One group of the other process."""

    def __init__(self, base: Base, what: dict[str, Any]) -> None:
        self.base, self.what, self.done = base, what, False

    def prepare(self) -> None:
        self.done = self.base.ask("prepare", **self.what)["done"]

    def sample(self) -> None:
        self.done = self.base.ask("sample")["done"]

    def finish(self) -> None:
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
        seed = 1 if chosen.seed is None else chosen.seed
        self.run = runner.new_run(chosen, self.machine, seed)
        self.plans = runner.plans_of(chosen, self.machine, self.run.run_id, seed)
        return {"run": schema.dumps(self.run)}

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
        try:
            answer = getattr(server, asked.pop("do"))(**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=stdout, flush=True)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not answer
    serve(sys.stdin, answers)
