"""What a call costs beside its time: memory, and the wait for the compiler at the first call of a process.

Memory is inputs, output, what is saved for the backward, workspaces, gradients and the peak, in bytes: by the
allocator's counters on a GPU, by the profiler's record of allocations on a CPU. What is saved comes from autograd's
hooks, without inputs and outputs, which are counted already.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fulmen.bench import adapters, schema
from fulmen.bench.environment import PACKAGE
from fulmen.bench.gate import Attend, Problem, gradients_of, outputs_of


def bytes_of(*tensors: Tensor) -> int:
    """Of the storages beneath them, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def saved_bytes(problem: Problem, attend: Attend) -> int:
    """What autograd keeps between forward and backward, but for inputs and outputs."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.device.type != "meta":
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outs = outputs_of(problem, attend)
    for x in (*problem.tensors().values(), *outs.values()):
        kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def use_of(work: Callable[[], Any], device: torch.device) -> tuple[int, int, Any]:
    """What a call took above what was there before, at the most and when it was over; and its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        torch.cuda.synchronize(device)
        peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return peak - before, left - before, result
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it tells the terminal of every start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    record: Any = seen.profiler
    events = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    running = list(itertools.accumulate(e.nbytes() for e in events)) or [0]
    return max(0, *running), max(0, running[-1]), result


def breakdown(
    problem: Problem, attend: Attend, device: torch.device, floors: Mapping[str, float], backward: bool = True
) -> dict[str, dict[str, dict[str, float]]]:
    """By pass and kind, {"bytes": ..., "floor": ...}; only the inputs and dO are there when the call begins."""
    least = {name: floors.get(name, 0) for name in ("inputs", "output", "gradients")}
    given = bytes_of(*problem.leaves.values(), *problem.constants.values())

    def entries(peak: int, **sizes: int) -> dict[str, dict[str, float]]:
        lowest = sum(least[name] for name in sizes if name in least)
        rows = {name: (size, least.get(name, 0)) for name, size in sizes.items()} | {"peak": (peak, lowest)}
        return {name: {"bytes": float(max(size, 0)), "floor": float(floor)} for name, (size, floor) in rows.items()}

    saved = {"saved": saved_bytes(problem, attend)} if backward else {}
    with torch.set_grad_enabled(backward):
        peak, left, outs = use_of(lambda: outputs_of(problem, attend), device)
    shared = {"inputs": given, "output": bytes_of(*outs.values())} | saved
    going = {"workspace_forward": peak - left}
    parts = {"forward": entries(given + peak, **shared, **going)}
    if backward:
        peak_back, _, grads = use_of(lambda: gradients_of(problem, outs), device)
        gradients = bytes_of(*grads.values())
        coming = {"workspace_backward": peak_back - gradients, "gradients": gradients}
        peak_back += given + bytes_of(*problem.douts.values()) + left
        parts["backward"] = entries(peak_back, **shared, **coming)
        parts["total"] = entries(max(given + peak, peak_back), **shared, **going, **coming)
    return parts


def first_call(cell: schema.Cell, device: torch.device) -> float:
    """Seconds of the pass of one of our cells in a fresh process with empty kernel caches."""
    given = json.dumps([cell.op, cell.case, cell.competitor.partition(" ")[2], cell.pass_, str(device)])
    with tempfile.TemporaryDirectory() as caches:
        path = {"TRITON_CACHE_DIR": caches, "FULMEN_CACHE_DIR": caches, "PYTHONPATH": str(PACKAGE.parent)}
        command = [sys.executable, "-m", "fulmen.bench.costs", given]
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
