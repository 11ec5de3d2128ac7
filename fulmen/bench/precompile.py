"""Compiles the kernels that a run will need, on all cores, before it measures: one by one it would take minutes.

Binaries go to Triton's cache on disk, and those of CUDA C++ to $FULMEN_CACHE_DIR, where the run finds them. No GPU is
used, and what cannot be compiled here is left to the run, which will say why.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from fulmen import hardware
from fulmen.bench import adapters, competitors
from fulmen.bench.cases import Line
from fulmen.bench.competitors import OURS, Competitor
from fulmen.bench.resources import Native

WORKERS = 14


def natives_of(lines: Sequence[Line], device: torch.device, hw: hardware.Hardware) -> list[Any]:
    """The variants in CUDA C++ of some cases: of the timed shapes and the gate's."""
    found: dict[Any, None] = {}
    for line in lines:
        case = competitors.complete(line, device)
        for shape in (case, adapters.small_case(case)):
            with contextlib.suppress(Exception):  # sizes or a GPU it does not serve
                for pass_ in ("forward", "total"):
                    launches = adapters.of(line.op).launches(shape, hw, "cuda", pass_)
                    found |= dict.fromkeys(x.variant for x in launches if isinstance(x, Native))
    return list(found)


def precompile_native(lines: Sequence[Line], device: torch.device, hw: hardware.Hardware) -> int:
    """How many variants in CUDA C++ were compiled or found compiled.

    To be called before backends are asked whether they serve a case: `cuda` compiles to answer, 1.5 s each. The
    compiler runs without Python's lock, so threads are enough.
    """
    from fulmen import cuda

    def made(variant: Any) -> bool:
        try:
            return bool(cuda.cubin(variant))
        except cuda.Unavailable:
            return False

    variants = natives_of(lines, device, hw) if hw.arch >= 80 else []
    with ThreadPoolExecutor(max(1, min(os.cpu_count() or 1, WORKERS))) as pool:
        return sum(pool.map(made, variants))


class Job(NamedTuple):
    op: str
    case: dict[str, Any]
    backend: str
    fully: bool

    def bucket(self) -> str:
        """Jobs of one bucket share most of their kernels, so one process does them."""
        rest = {k: v for k, v in self.case.items() if k not in ("B", "H", "H_KV", "N")}
        group = self.case["H"] // self.case["H_KV"]
        return repr((self.op, sorted(rest.items(), key=str), group, self.case["N"] % 16 == 0, self.backend, self.fully))


def jobs_of(plans: Sequence[tuple[Any, Sequence[Competitor]]]) -> list[Job]:
    found: list[Job] = []
    for plan, who in plans:
        for competitor in who:
            if (
                not competitor.name.startswith(OURS)
                or competitor.refusal
                or not competitor.backend.startswith(("triton", "cuda"))
            ):
                continue
            backend = competitor.backend
            if backend.startswith("cuda"):
                if adapters.backends_of(competitor.op) == "lightning":  # all of it is in CUDA C++
                    continue
                backend = "triton"  # where its backward is not cuDNN's
            small = adapters.small_case(plan.case)
            kinds = [(plan.case, False), (small, False), *([(small, True)] if competitor.fully else [])]
            found += [Job(competitor.op, case, backend, fully) for case, fully in kinds]
    return [job for i, job in enumerate(found) if job not in found[:i]]


def compile_some(jobs: Sequence[Job], hw: hardware.Hardware) -> int:
    """In a process of its own."""
    from fulmen.bench import resources

    done = 0
    for job in jobs:
        with contextlib.suppress(Exception):
            for launch in adapters.of(job.op).launches(job.case, hw, job.backend, "total", job.fully):
                resources.compiled(launch, hw.arch)
                done += 1
    return done


def precompile(
    plans: Sequence[tuple[Any, Sequence[Competitor]]], hw: hardware.Hardware, workers: int | None = None
) -> int:
    """How many launches were compiled or found compiled."""
    buckets: dict[str, list[Job]] = {}
    for job in jobs_of(plans):
        buckets.setdefault(job.bucket(), []).append(job)
    count = min(workers or min(os.cpu_count() or 1, WORKERS), len(buckets))
    if count < 2:
        return 0
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, signal.signal, (signal.SIGINT, signal.SIG_DFL))  # Ctrl-C: no traces
    try:
        return sum(pool.map(compile_some, buckets.values(), [hw] * len(buckets)))
    except (OSError, RuntimeError):  # no processes to be had: the run compiles for itself
        return 0
    finally:
        pool.shutdown(cancel_futures=True)
