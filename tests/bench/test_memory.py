from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fulmen import cuda, dispatch, hardware
from fulmen.bench import adapters, floors, gate, kernels
from fulmen.bench.gate import Problem

CPU = torch.device("cpu")
MB = 1 << 20


class Wasteful(torch.autograd.Function):
    """Takes 2 MB to compute, keeps 3 MB, and takes 4 MB on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scratch = torch.ones(2 * MB, dtype=torch.int8)
        ctx.save_for_backward(x, torch.ones(3 * MB, dtype=torch.int8))
        return x * float(scratch[0])

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Tensor:
        scratch = torch.ones(4 * MB, dtype=torch.int8)
        return do * float(scratch[0])


def wasteful(device: torch.device = CPU) -> tuple[Problem, Any]:
    x = torch.randn(MB // 4, device=device).requires_grad_()
    return Problem((x,), {"x": x}, {"o": torch.randn_like(x)}, dict), lambda given: Wasteful.apply(*given)


FLOORS = {"inputs": MB, "output": MB, "gradients": MB}


def test_every_part_is_found() -> None:
    problem, attend = wasteful()
    parts = gate.breakdown(problem, attend, CPU, FLOORS)
    total = {name: entry["bytes"] / MB for name, entry in parts["total"].items()}
    assert total["inputs"] == total["output"] == total["gradients"] == 1
    assert total["saved"] == 3
    assert 2 <= total["workspace_forward"] < 2.1
    assert 4 <= total["workspace_backward"] < 4.1
    assert total["peak"] >= 1 + 1 + 1 + 3 + 4 + 1  # inputs, dO, output, saved, workspace, gradient
    assert set(parts["forward"]) == {"inputs", "output", "saved", "workspace_forward", "peak"}
    assert set(parts["backward"]) == {"inputs", "output", "saved", "workspace_backward", "gradients", "peak"}
    for entries in parts.values():
        for name, entry in entries.items():
            assert entry["bytes"] >= entry["floor"], name


def test_without_gradients_nothing_is_saved() -> None:
    problem, attend = wasteful()
    parts = gate.breakdown(problem, attend, CPU, FLOORS, backward=False)
    assert set(parts) == {"forward"}
    assert set(parts["forward"]) == {"inputs", "output", "workspace_forward", "peak"}


@pytest.mark.parametrize("op", ["lightning", "flash"])
def test_our_ops_stay_above_their_floors(op: str) -> None:
    adapter = adapters.of(op)
    case = adapter.complete({"H": 2, "N": 256, "D": 32, "dtype": "float32"})
    least = floors.memory(op, case)
    assert least is not None
    parts = gate.breakdown(adapter.problem(case, CPU, 1), adapter.attend("eager"), CPU, least)
    for entries in parts.values():
        for name, entry in entries.items():
            assert entry["bytes"] >= entry["floor"], name


@pytest.mark.gpu
def test_every_part_is_found_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    q = torch.randn(MB, device=device).requires_grad_()
    problem = Problem((q,), {"q": q}, {"o": torch.randn_like(q)}, dict)
    parts = gate.breakdown(problem, lambda x: torch.exp(x[0]), device, {"inputs": 0, "output": 0, "gradients": 0})
    assert parts["total"]["output"]["bytes"] == 4 * MB
    assert parts["total"]["saved"]["bytes"] == 0  # exp keeps its output
    assert parts["total"]["peak"]["bytes"] >= 16 * MB


# -------------------------------------------------------------------------------------------- resources


def test_under_the_interpreter_there_are_no_binaries() -> None:
    import triton

    if not triton.knobs.runtime.interpret:
        pytest.skip("the compiler is here")
    case, hw = adapters.of("lightning").complete({"dtype": "bfloat16"}), hardware.TARGETS[90]
    assert kernels.resources(kernels.launches("lightning", case, hw, "triton", "total"), hw) == []


@pytest.mark.parametrize(
    ("op", "more", "backward"),
    [("lightning", {}, 2), ("flash", {"N": 8192}, 2), ("flash", {"N": 128}, 1)],  # of small calls one launch
)
def test_launches_of_forward_and_backward(op: str, more: dict[str, int], backward: int) -> None:
    case, hw = adapters.of(op).complete({"dtype": "bfloat16"} | more), hardware.TARGETS[90]
    for fully in (False, True):
        assert len(kernels.launches(op, case, hw, "triton", "total", fully)) == 1 + backward
    parts = [kernels.launches(op, case, hw, "triton", pass_) for pass_ in ("forward", "backward")]
    assert [len(part) for part in parts] == [1, backward]
    assert kernels.launches(op, case, hw, "eager", "total") == []


def test_recording_leaves_no_trace() -> None:
    before = hardware.of(CPU), cuda.Launch.__init__, dispatch.choose
    with contextlib.suppress(ZeroDivisionError), kernels.recording(hardware.TARGETS[90]):
        assert hardware.of(CPU).arch == 90
        1 / 0  # noqa: B018
    assert (hardware.of(CPU), cuda.Launch.__init__, dispatch.choose) == before


def test_what_a_run_compiles_before_it_measures() -> None:
    from fulmen.bench import runner

    line = runner.lines_of(runner.Selection(("lightning",)), CPU)[0]
    jobs = kernels.jobs_of([(line, ["triton", "eager"])], hardware.TARGETS[90])
    assert [[(job.backend, job.case["N"], job.fully) for job in alike] for alike in jobs] == [
        [("triton", 1024, False)], [("triton", 333, False)], [("triton", 333, True)],
    ]  # fmt: skip
    longer = replace(line, case=line.case | {"N": 2048})
    assert list(map(len, kernels.jobs_of([(line, ["triton"]), (longer, ["triton"])], hardware.TARGETS[90]))) == [
        2,
        1,
        1,
    ]
    auto = kernels.jobs_of([(line, ["auto"])], hardware.TARGETS[90])
    assert {job.backend for alike in auto for job in alike} == {"cuda"}
