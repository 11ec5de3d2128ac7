"""Where the memory of a call goes: inputs, output, what is saved for the backward, workspaces, gradients, the peak.

Bytes: by the allocator's counters on a GPU, by the profiler's record of allocations on a CPU. What is saved comes from
autograd's hooks, without inputs and outputs, which are counted already.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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
