"""Our kernels without running them: compiled ahead on all cores, and what their binaries take of a multiprocessor.

No GPU is needed: a binary can be made for one that is not here. Triton keeps binaries in its cache on disk, CUDA C++ in
$FULMEN_CACHE_DIR, where the run finds them. What cannot be compiled here is left to the run, which will say why.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fulmen import hardware
from fulmen.bench import adapters
from fulmen.bench.cases import Line

if TYPE_CHECKING:
    from fulmen.bench.competitors import Competitor

MAX_WORKERS = 14
RESERVED_SHARED = 1024  # bytes of each block, for the system
REGISTERS_AT_ONCE = 256  # a warp gets multiples of this


class Native(NamedTuple):
    """A launch of one of our CUDA C++ kernels, as far as its resources go."""

    variant: Any  # fulmen.cuda.Variant
    grid: int
    threads: int
    shared: int
    stages: int


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


def workers() -> int:
    return max(1, min(os.cpu_count() or 1, MAX_WORKERS))


def new_pool(count: int) -> ProcessPoolExecutor:
    """Processes that end silently at Ctrl-C."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, context, signal.signal, (signal.SIGINT, signal.SIG_DFL))


def natives_of(lines: Sequence[Line], hw: hardware.Hardware) -> list[Any]:
    """The CUDA C++ variants of some cases: of the timed shapes and the gate's."""
    found: dict[Any, None] = {}
    for line in lines:
        for shape in (line.case, adapters.small_case(line.case)):
            with contextlib.suppress(Exception):  # sizes or a GPU it does not serve
                for pass_ in ("forward", "total"):
                    launches = adapters.of(line.op).launches(shape, hw, "cuda", pass_)
                    found |= dict.fromkeys(x.variant for x in launches if isinstance(x, Native))
    return list(found)


def compile_natives(lines: Sequence[Line], hw: hardware.Hardware) -> int:
    """How many CUDA C++ variants were compiled or found compiled.

    Called before backends are asked whether they serve a case, since `cuda` compiles to answer. The compiler releases
    Python's lock, so threads are enough.
    """
    from fulmen import cuda

    def made(variant: Any) -> bool:
        try:
            return bool(cuda.cubin(variant))
        except cuda.Unavailable:
            return False

    with ThreadPoolExecutor(workers()) as pool:
        return sum(pool.map(made, natives_of(lines, hw) if hw.arch >= 80 else []))


class Job(NamedTuple):
    """The Triton kernels of a backend at a shape."""

    op: str
    case: dict[str, Any]
    backend: str
    fully: bool

    def bucket(self) -> str:
        """Jobs of one bucket share most of their kernels, so one process does them."""
        rest = {k: v for k, v in self.case.items() if k not in ("B", "H", "H_KV", "N")}
        group = self.case["H"] // self.case["H_KV"]
        return repr((self.op, sorted(rest.items(), key=str), group, self.case["N"] % 16 == 0, self.backend, self.fully))


def jobs_of(plans: Sequence[tuple[Line, Sequence[Competitor]]]) -> list[Job]:
    found: list[Job] = []
    for line, who in plans:
        small = adapters.small_case(line.case)
        for competitor in who:
            backend = competitor.backend
            if backend.startswith("cuda") and adapters.backends_of(line.op) == "flash":
                backend = "triton"  # whose backward it takes where that is not cuDNN's
            if competitor.op == line.op and not competitor.refusal and backend.startswith("triton"):
                kinds = [(line.case, False), (small, False), *([(small, True)] if competitor.fully else [])]
                found += [Job(line.op, case, backend, fully) for case, fully in kinds]
    return [job for i, job in enumerate(found) if job not in found[:i]]


def compile_jobs(jobs: Sequence[Job], hw: hardware.Hardware) -> int:
    """How many launches one process compiled or found compiled."""
    done = 0
    for job in jobs:
        with contextlib.suppress(Exception):
            for launch in adapters.of(job.op).launches(job.case, hw, job.backend, "total", job.fully):
                compiled(launch, hw.arch)
                done += 1
    return done


def compile_ahead(plans: Sequence[tuple[Line, Sequence[Competitor]]], hw: hardware.Hardware) -> int:
    """How many Triton launches were compiled or found compiled."""
    buckets: dict[str, list[Job]] = {}
    for job in jobs_of(plans):
        buckets.setdefault(job.bucket(), []).append(job)
    count = min(workers(), len(buckets))
    if count < 2:
        return 0
    pool = new_pool(count)
    try:
        return sum(pool.map(compile_jobs, buckets.values(), [hw] * len(buckets)))
    except (OSError, RuntimeError):  # no processes to be had: the run compiles for itself
        return 0
    finally:
        pool.shutdown(cancel_futures=True)


# -------------------------------------------------------------------------------------------------- resources


class Multiprocessor(NamedTuple):
    """What one holds; CUDA programming guide, table of technical specifications."""

    warps: int
    blocks: int
    shared: int
    registers: int = 65536


MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 167_936), 86: Multiprocessor(48, 16, 102_400), 89: Multiprocessor(48, 24, 102_400),
    90: Multiprocessor(64, 32, 233_472), 100: Multiprocessor(64, 32, 233_472), 120: Multiprocessor(48, 24, 102_400),
}  # fmt: skip


def occupancy(arch: int, registers: int, shared: int, warps: int) -> float | None:
    """The share of a multiprocessor's warps that fit; None for an architecture we have no table of."""
    sm = MULTIPROCESSORS.get(arch)
    if sm is None or warps < 1:
        return None
    per_warp = -(-registers * 32 // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
    fitting = [sm.blocks, sm.warps // warps, sm.shared // (shared + RESERVED_SHARED)]
    if per_warp:
        fitting.append(sm.registers // per_warp // warps)
    return min(fitting) * warps / sm.warps


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


def resources(launches: list[Any], hw: hardware.Hardware) -> list[dict[str, Any]]:
    """One record a launch; [] where Triton does not compile here (its interpreter stands in for it)."""
    import triton

    if triton.knobs.runtime.interpret:
        return []
    rows = []
    for launch in launches:
        if isinstance(launch, Native):
            from fulmen import cuda

            name, shared, warps, stages = launch.variant.kernel, launch.shared, launch.threads // 32, launch.stages
            registers, stack = counts(cuda.cubin(launch.variant))
        else:
            kernel = compiled(launch, hw.arch)
            about = kernel.metadata
            name, shared, warps, stages = about.name, about.shared, about.num_warps, about.num_stages
            try:
                registers, stack = counts(kernel.asm["cubin"])
            except (OSError, subprocess.CalledProcessError):  # no such tool here: the driver knows, if there is one
                kernel._init_handles()
                registers, stack = kernel.n_regs, kernel.n_spills
        rows.append({
            "kernel": name, "registers": registers, "shared": shared, "stack": stack, "warps": warps, "stages": stages,
            "programs": launch.grid, "occupancy": occupancy(hw.arch, registers, shared, warps),
        })  # fmt: skip
    return rows
