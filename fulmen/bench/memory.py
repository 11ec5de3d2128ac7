"""Where the memory of a call goes: inputs, output, what is saved for the backward, workspaces, gradients, the peak.

On a GPU by the allocator's counters, on a CPU by the profiler's record of allocations; what is saved by autograd's own
hooks, without the inputs and the output, which are counted already. Bytes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

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
        storage = x.untyped_storage()
        if x.device.type != "meta":
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outs = outputs_of(problem, attend)
    known = [*problem.tensors().values(), *outs.values()]
    for x in known:
        kept.pop(x.untyped_storage().data_ptr(), None)
    return sum(kept.values())


class Use(NamedTuple):
    """What a call took above what was there before: at the most, and when it was over."""

    peak: int
    left: int
    result: Any


def cuda_use(work: Callable[[], Any], device: torch.device) -> Use:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return Use(peak - before, left - before, result)


def cpu_use(work: Callable[[], Any]) -> Use:
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it tells the terminal of every start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = work()
    record: Any = seen.profiler
    events = [e for e in record.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    running = list(itertools.accumulate(e.nbytes() for e in events)) or [0]
    return Use(max(0, *running), max(0, running[-1]), result)


def breakdown(
    problem: Problem, attend: Attend, device: torch.device, floors: dict[str, int], backward: bool = True
) -> dict[str, dict[str, dict[str, float]]]:
    """By pass, the memory of a call whose inputs and dO are there and nothing else of it."""

    def use(work: Callable[[], Any]) -> Use:
        return cuda_use(work, device) if device.type == "cuda" else cpu_use(work)

    def entry(size: float, floor: float) -> dict[str, float]:
        return {"bytes": float(max(size, 0)), "floor": float(floor)}

    given = bytes_of(*problem.leaves.values(), *problem.constants.values())
    inputs, least_out = entry(given, floors["inputs"]), floors["output"]
    if not backward:
        with torch.no_grad():
            forward = use(lambda: outputs_of(problem, attend))
        output = bytes_of(*forward.result.values())
        least = floors["inputs"] + least_out
        return {
            "forward": {
                "inputs": inputs, "output": entry(output, least_out),
                "workspace_forward": entry(forward.peak - forward.left, 0), "peak": entry(given + forward.peak, least),
            }
        }  # fmt: skip
    saved = saved_bytes(problem, attend)
    forward = use(lambda: outputs_of(problem, attend))
    output = bytes_of(*forward.result.values())
    outs = forward.result
    after = use(lambda: gradients_of(problem, outs))
    gradients = bytes_of(*after.result.values())
    least = floors["inputs"] + least_out + floors["gradients"]
    shared = {"inputs": inputs, "output": entry(output, least_out), "saved": entry(saved, 0)}
    work_forward = {"workspace_forward": entry(forward.peak - forward.left, 0)}
    work_backward = {
        "workspace_backward": entry(after.peak - gradients, 0), "gradients": entry(gradients, floors["gradients"]),
    }  # fmt: skip
    dout = bytes_of(*problem.douts.values())
    peak_backward = given + dout + forward.left + after.peak
    peak_forward = given + forward.peak
    return {
        "forward": shared | work_forward | {"peak": entry(peak_forward, floors["inputs"] + least_out)},
        "backward": shared | work_backward | {"peak": entry(peak_backward, least)},
        "total": shared | work_forward | work_backward | {"peak": entry(max(peak_forward, peak_backward), least)},
    }
