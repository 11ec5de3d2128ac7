"""The suite `train` and the lightning rows of `layers`, at sizes a CPU runs at once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from fulmen.bench import competitors, environment, floors, report, runner, schema, timing
from fulmen.bench.adapters import train as adapter
from fulmen.bench.runner import Selection
from tests.bench.test_report import data_of

TINY = "B=1,N=12,H=2,D=16,layers=2,pattern=LG,vocab=11,dtype=fp32"
CPU = torch.device("cpu")
train = adapter.train


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ceilings", lambda *_: {"flops_measured": 790e12, "bytes_measured": 4e12})


@pytest.mark.parametrize("compiled", ["no", pytest.param("yes", marks=pytest.mark.nightly)])
def test_a_training_step(tmp_path: Path, compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and torch's are right and timed, with the optimiser; fla is refused in words."""
    steps: list[Any] = []
    plain = adapter.adamw
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(adapter, "adamw", lambda given: lambda grads: (steps.append(len(grads)), plain(given)(grads)))
    shape = f"{TINY},compiled={compiled}"
    runner.run(Selection(("train",), device="cpu", shapes=(shape,), seconds=0.0), tmp_path / "run.jsonl")
    found = {cell.competitor: cell for cell in schema.read([tmp_path / "run.jsonl"]).cells}
    ours, torchs, flas = (found[name] for name in ("fulmen auto", "sdpa-stack", "fla-stack"))
    assert (ours.status, torchs.status) == ("ok", "ok"), (ours.reason, torchs.reason)
    assert flas.status == "unsupported"
    assert "GPU" in flas.reason
    assert ours.function == "a training step, linear and softmax attention"
    assert torchs.function == "a training step, softmax attention"
    assert {"o", "dembed.weight", "dblocks.0.attention.qkv_proj.weight", "dhead.weight"} <= set(ours.correctness)
    assert len(set(steps)) == 2
    assert min(steps) > 20, "each has all its gradients"
    assert ours.memory["peak"]["bytes"] > 0
    for cell in (ours, torchs):  # each has the floors of its own stack
        assert "IMPOSSIBLE" not in {flag["flag"] for flag in cell.audit["flags"]}, cell.audit["flags"]
    assert torchs.audit["flops"] < ours.audit["flops"]


def test_blocks_of_one_kind_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block has no y; each kind is compiled once more. Nothing is computed otherwise."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    sizes = {"B": 1, "N": 8, "H": 2, "D": 16, "layers": 6, "pattern": "LLG", "vocab": 7, "dtype": "float32"}
    stack = adapter.Stack(train.complete(sizes), CPU, torch.float32, "auto")
    ids, targets = torch.randint(0, 7, (2, 1, 8))
    want = stack(ids, targets, adapter.OURS)
    adapter.compile_blocks(stack)
    torch.testing.assert_close(stack(ids, targets, adapter.OURS), want)
    assert counter.frame_count == 3
    torch._dynamo.reset()


def test_a_step_leaves_the_parameters_as_they_are() -> None:
    case = train.complete(
        {"B": 1, "N": 8, "H": 2, "D": 16, "layers": 1, "pattern": "L", "vocab": 7, "dtype": "float32"}
    )
    made = train.small(case, CPU, 0)
    losses = train.attend("auto")(made.x)
    before = [p.detach().clone() for p in made.leaves.values()]
    grads = torch.autograd.grad(losses.sum(), list(made.leaves.values()))
    assert made.after is not None
    made.after(grads)
    assert all(torch.equal(p, old) for p, old in zip(made.leaves.values(), before, strict=True))
    assert all(p.grad is None for p in made.leaves.values())


def test_a_pattern_of_other_letters_is_refused() -> None:
    with pytest.raises(ValueError, match="pattern=LX: must be made of L"):
        train.complete({"pattern": "LX"})


def test_fla_is_asked_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(competitors.importlib.util, "find_spec", lambda module: None)
    why = competitors.BASELINES["fla-stack"].refusal({}, torch.device("cuda"))
    assert why == "flash-linear-attention is not installed"


def test_work_of_a_step() -> None:
    """Counted by hand for one block of each kind: dim 8, MLP 32, 10 letters, 3 tokens."""
    case = {"B": 1, "N": 3, "H": 2, "H_KV": 1, "D": 4, "layers": 2, "pattern": "LG", "vocab": 10, "dtype": "bf16"}
    matrices = 5 * 64 + (2 * 64 + 2 * 8 * 4) + 2 * 3 * 8 * 32 + 80
    stack = adapter.Stack(case, torch.device("meta"), torch.float32, "auto")
    assert sum(p.numel() for p in stack.parameters() if p.ndim == 2) == matrices + 80
    work = floors.of_case("train", train.function(case), case, "total")
    assert work is not None
    assert work.flops == 6 * 3 * matrices
    assert work.usual_flops == pytest.approx(6 * 3 * (matrices + 80))
    assert work.bytes == 2 * 10 * matrices


def test_kinds_of_kernels() -> None:
    spin = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    kernels = {
        "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "lightning_sweep_kernel": "attention",
        "flash_backward_kernel": "attention",
        "chunk_fwd_kernel_o": "attention",
        "multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimiser",
        "triton_poi_fused_lightning_forward_mul_0": "glue",
        "heads_backward_kernel": "glue",
        "Memset (Device)": "glue",
    }
    ran = [(spin, 1.0), *((name, 2.0) for name in kernels), (spin, 1.0)]
    found = timing.Ran.of(ran).kinds
    assert found == {kind: pytest.approx(2e-3 * list(kernels.values()).count(kind)) for kind in set(kernels.values())}
    assert timing.Ran.of(ran[:-1]).kinds == timing.Ran.of([]).kinds == {}


def test_the_report_shows_where_the_time_goes(tmp_path: Path) -> None:
    runner.run(
        Selection(("train",), device="cpu", shapes=(f"{TINY},compiled=no",), baselines=("none",), seconds=0.0),
        tmp_path / "run.jsonl",
    )
    results = schema.read([tmp_path / "run.jsonl"])
    results.cells[0].kinds = {"products": 1.5, "attention": 0.25, "optimiser": 0.125}
    report.write(results, tmp_path)
    lines = (tmp_path / "report.md").read_text().partition("## Where the time goes")[2].splitlines()
    row = next(line for line in lines if "| fulmen auto |" in line)
    assert "| 1.50 | 0.250 |  | 0.125 |" in row
    assert "Where the time goes" in str(data_of((tmp_path / "report.html").read_text()))
    assert (tmp_path / "plots" / "kinds-train.png").is_file()


@pytest.mark.parametrize("kind", ["minimax", "ring"])
def test_lightning_layers_and_their_parts(tmp_path: Path, kind: str) -> None:
    shape = f"layer={kind},B=1,N=24,H=4,D=16,dtype=fp32"
    selection = Selection(("layers",), device="cpu", shapes=(shape,), backends=("auto",), seconds=0.0)
    runner.run(selection, tmp_path / "run.jsonl")
    cells = [cell for cell in schema.read([tmp_path / "run.jsonl"]).cells if cell.pass_ == "total"]
    found = {cell.competitor: cell for cell in cells}
    assert found["fulmen auto"].status == found["layer-parts"].status == "ok"
    assert "linear attention" in found["fulmen auto"].function
    assert "doutput_gate.weight" in found["fulmen auto"].correctness
    work = floors.of_case("layer", found["fulmen auto"].function, found["fulmen auto"].case, "forward")
    assert work is not None
    assert work.flops > 2 * 24 * 5 * 64 * 64
