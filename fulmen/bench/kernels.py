"""Our kernels without running them: recorded, compiled ahead on all cores, and what they take of a multiprocessor.

A recorded backend runs on tensors without data while its launches are written down: no GPU is needed, and nothing here
knows a kernel. Triton keeps binaries in its cache on disk, CUDA C++ in $FULMEN_CACHE_DIR, where the run finds them.
What cannot be compiled here is left to the run, which says why. `first_call` times the wait for the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from fulmen import cuda, dispatch, hardware
from fulmen.bench import adapters, schema
from fulmen.bench.cases import Line
from fulmen.bench.environment import PACKAGE

MAX_WORKERS = 14


# -------------------------------------------------------------------------------------------------- recording
@contextlib.contextmanager
def recording(hw: hardware.Hardware) -> Iterator[list[Any]]:
    """Every launch is added to the list instead of being made, and every device is `hw`.

    Of Triton's it is a function, a grid, arguments and options; of CUDA C++ a `cuda.Launch` that was never loaded.
    """
    from triton.runtime.jit import KernelInterface

    seen: list[Any] = []
    choose, gpu = dispatch.choose, torch.device("cuda")

    def of_triton(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: seen.append(
            SimpleNamespace(kernel=kernel, grid=grid, args=args, options=options)
        )

    def of_cuda(
        launch: Any, variant: Any, device: Any, grid: Any, threads: int, shared: int, *_: Any, **__: Any
    ) -> None:
        launch.variant, launch.grid, launch.threads, launch.shared = variant, grid, threads, shared
        launch.empty = 0 in grid

    with contextlib.ExitStack() as replaced:
        for owner, name, value in (
            (hardware, "of", lambda device: hw), (KernelInterface, "__getitem__", of_triton),
            (dispatch, "choose", lambda op, spec, backend="auto": choose(op, spec._replace(device=gpu), backend)),
            (cuda, "problem", lambda *_: None), (cuda.TensorMaps, "__call__", lambda *_: b""),
            (cuda.Launch, "__init__", of_cuda), (cuda.Launch, "__call__", lambda launch, *_: seen.append(launch)),
            (cuda.Launch, "at", lambda launch, *_: seen.append(launch)),
        ):  # fmt: skip
            replaced.enter_context(patch.object(owner, name, value))
        yield seen


def launches(
    op: str, case: dict[str, Any], hw: hardware.Hardware, backend: str, pass_: str, fully: bool = False
) -> list[Any]:
    """The launches of our kernels in a pass, in order; [] for a backend that has none or does not serve the case."""
    kernel = dispatch.kernels(adapters.backends_of(op, case)).get(backend.partition(" ")[0])  # of "cuda (sm90 ...)"
    if kernel is None or not kernel.name.startswith(("triton", "cuda")):
        return []
    operation, own = adapters.of(op).within(case)
    spec, x, given = operation.call(own, fully)
    with recording(hw) as seen:
        if kernel.supports(spec._replace(device=torch.device("cuda"))) is not None:
            return []
        if kernel.saves is not None and (shape := kernel.saves(spec)) is not None:
            x = x._replace(saved=x.q.new_empty(shape))
        results = kernel.forward(spec, x)
        forward = seen.copy()
        if pass_ != "forward" and case.get("grad", True) and kernel.backward is not None:
            kernel.backward(spec, x, *given(*results))
    return seen if pass_ == "total" else forward if pass_ == "forward" else seen[len(forward) :]


# -------------------------------------------------------------------------------------------------- compiling
def compiled(launch: Any, arch: int) -> Any:
    """What running a Triton launch would compile on a GPU of `arch`; from Triton's cache where it has been run."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound = bind(*launch.args, debug=False, **launch.options)
    options, signature, constants, attributes = launch.kernel._pack_args(backend, launch.options, *bound)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


class Job(NamedTuple):
    """The kernels of a backend at a shape; `fully`: with every output the operation has."""

    op: str
    case: dict[str, Any]
    backend: str
    fully: bool


def jobs_of(plans: Iterable[tuple[Line, Sequence[str]]], hw: hardware.Hardware) -> list[list[Job]]:
    """What some of our backends need for lines: the kernels of the timed shapes and of the gate's.

    Jobs of one list share most of their kernels, so one process does them.
    """
    alike: dict[str, dict[str, Job]] = {}
    for line, backends in plans:
        op, small = adapters.backends_of(line.op, line.case), adapters.of(line.op).small_case(line.case)
        for name in backends:
            if name == "auto":
                spec = adapters.of(line.op).spec(line.case, torch.device("cuda"))
                name = dispatch.policy(op).choose(spec, hw).backend
            if name.startswith(("triton", "cuda")):
                fully = [(small, True)] if adapters.of(line.op).attend_fully(name) else []
                for case, whole in [(line.case, False), (small, False), *fully]:
                    sizes = {"B": 0, "H": case["H"] // case["H_KV"], "H_KV": 0, "N": case["N"] % 16 == 0}
                    job = Job(line.op, case, name, whole)
                    alike.setdefault(repr(job._replace(case=case | sizes)), {})[repr(job)] = job
    return [list(jobs.values()) for jobs in alike.values()]


def compile_jobs(jobs: Sequence[Job], hw: hardware.Hardware) -> int:
    """How many launches one process compiled or found compiled."""
    done = 0
    for job in jobs:
        every: list[Any] = []
        with contextlib.suppress(Exception):
            every = launches(job.op, job.case, hw, job.backend, "total", job.fully)
        for launch in every:
            with contextlib.suppress(Exception):
                cuda.cubin(launch.variant) if isinstance(launch, cuda.Launch) else compiled(launch, hw.arch)
                done += 1
    return done


def workers() -> int:
    return max(1, min(os.cpu_count() or 1, MAX_WORKERS))


def new_pool(count: int) -> ProcessPoolExecutor:
    """Processes that end silently at Ctrl-C."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, signal.signal, (signal.SIGINT, signal.SIG_DFL))


def compile_ahead(plans: Iterable[tuple[Line, Sequence[str]]], hw: hardware.Hardware) -> int:
    """How many launches were compiled or found compiled.

    Called before backends are asked whether they serve a case, since `cuda` compiles to answer.
    """
    jobs = jobs_of(plans, hw)
    if workers() < 2 or len(jobs) < 2:
        return 0
    pool = new_pool(min(workers(), len(jobs)))
    try:
        return sum(pool.map(compile_jobs, jobs, [hw] * len(jobs)))
    except (OSError, RuntimeError):  # no processes to be had: the run compiles for itself
        return 0
    finally:
        pool.shutdown(cancel_futures=True)


# -------------------------------------------------------------------------------------------------- resources
@functools.lru_cache(maxsize=512)
def counts(binary: bytes) -> tuple[int, int]:
    """(registers a thread, spilled bytes a thread), by the cuobjdump that Triton carries."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump said {text[:200]!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def resources(recorded: Iterable[Any], hw: hardware.Hardware) -> list[dict[str, Any]]:
    """One record a launch; [] where Triton does not compile here (its interpreter stands in for it)."""
    import triton

    if triton.knobs.runtime.interpret:
        return []
    rows = []
    for launch in recorded:
        if isinstance(launch, cuda.Launch):
            name, shared, warps = launch.variant.kernel, launch.shared, launch.threads // 32
            macros = dict(launch.variant.macros)
            stages = macros.get("STAGES", macros.get("PARTS", 1))
            registers, stack = counts(cuda.cubin(launch.variant))
        else:
            kernel = compiled(launch, hw.arch)
            about = kernel.metadata
            name, shared, warps, stages = about.name, about.shared, about.num_warps, about.num_stages
            registers, stack = counts(kernel.asm["cubin"])
        rows.append({
            "kernel": name, "registers": registers, "shared": shared, "stack": stack, "warps": warps, "stages": stages,
            "programs": math.prod(launch.grid),
        })  # fmt: skip
    return rows


# ------------------------------------------------------------------------------------------------- first calls
def first_call(cell: schema.Cell, device: torch.device) -> float:
    """Seconds of the pass of one of our cells in a fresh process with empty kernel caches."""
    given = json.dumps([cell.op, cell.case, cell.competitor.partition(" ")[2], cell.pass_, str(device)])
    with tempfile.TemporaryDirectory() as caches:
        path = {"TRITON_CACHE_DIR": caches, "FULMEN_CACHE_DIR": caches, "PYTHONPATH": str(PACKAGE.parent)}
        command = [sys.executable, "-m", "fulmen.bench.kernels", given]
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
