"""Decoding in the benchmark: adapters of steps, caches and latents, their floors, and the suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fulmen import hardware
from fulmen.bench import adapters, floors, gate, kernels, runner, schema
from fulmen.bench.competitors import BASELINES
from fulmen.bench.runner import Selection

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "results"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("step", {"B": 3, "H": 8, "H_KV": 4, "D": 16}),
    ("step", {"B": 3, "H": 4, "D": 16, "E": 32, "N": 3}),
    ("step", {"B": 2, "H": 16, "D": 16, "state_dtype": "bf16", "dtype": "bf16"}),
    ("flash_cache", {"B": 3, "H": 8, "H_KV": 4, "N": 50, "D": 16}),
    ("flash_cache", {"B": 3, "H": 4, "H_KV": 2, "N": 50, "D": 16, "E": 32, "N_Q": 3, "page": 16}),
    ("latent", {"B": 3, "H": 16, "N": 90, "D": 48, "E": 32}),
    ("latent", {"B": 2, "H": 16, "N": 90, "N_Q": 3, "D": 48, "E": 32, "dtype": "bf16"}),
    ("layer_step_gqa", {"B": 3, "H": 4, "H_KV": 2, "N": 90, "D": 16, "hidden": 256, "page": 32}),
    ("layer_step_mla", {"B": 3, "H": 4, "N": 90, "D": 24, "E": 16, "hidden": 256, "rank": 32, "q_rank": 24}),
    ("layer_step_lightning", {"B": 3, "H": 4, "D": 16, "hidden": 256}),
]


@pytest.fixture(params=CASES, ids=lambda given: "-".join([given[0], *given[1]]))
def given(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    op, case = request.param
    return adapters.of(op), adapters.complete(op, case, CPU)


@pytest.mark.parametrize("seed", [1, 5])
def test_both_shapes_pass_and_stay_as_they_are(given: Any, seed: int) -> None:
    adapter, case = given
    for make in (adapter.small, adapter.problem):
        problems = [make(case, CPU, seed), make(case, CPU, seed + 1)]
        found = gate.gate(problems, adapter.attend("eager"), backward=False)
        names = {"o", "state"} if make == adapters.of("step").small else {"o"}
        assert set(found) == names
        assert all(row["ok"] and row["error"] <= row["bound"] for row in found.values())


def test_what_is_a_little_off_is_red(given: Any) -> None:
    adapter, case = given
    for make in (adapter.small, adapter.problem):

        def wrong(x: Any) -> Any:
            outs = adapter.attend("eager")(x)
            return (outs[0] * 1.03, *outs[1:]) if isinstance(outs, tuple) else outs * 1.03

        with pytest.raises(gate.Wrong, match=r"^o: "):
            gate.gate([make(case, CPU, 2)], wrong, backward=False)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_timed_step_reads_its_states_and_changes_no_bit(state_dtype: str, dtype: str) -> None:
    adapter = adapters.of("step")
    case = adapter.complete({"B": 2, "H": 16, "H_KV": 8, "D": 32, "N": 2, "state_dtype": state_dtype, "dtype": dtype})
    problem = adapter.problem(case, CPU, 3)
    state = problem.constants["state"].clone()
    results = [adapter.attend("eager")(problem.x) for _ in range(50)]
    assert torch.equal(problem.constants["state"], state)
    assert all(torch.equal(o, results[0]) for o in results)
    problem.constants["state"].mul_(0.5)
    with pytest.raises(gate.Wrong, match=r"^o: "):
        gate.compare(problem, {"o": adapter.attend("eager")(problem.x)})


def test_a_step_that_does_not_write_its_state_is_red() -> None:
    adapter = adapters.of("step")
    problem = adapter.small(adapter.complete({"D": 16, "dtype": "fp32"}), CPU, 1)

    def forgets(given: Any) -> Any:
        return adapter.attend("eager")(given)[0], given.call.state

    with pytest.raises(gate.Wrong, match=r"^state: "):
        gate.gate([problem], forgets, backward=False)


@pytest.mark.parametrize("page", [0, 16])
def test_lengths_differ_in_the_small_shape_and_are_all_of_the_timed_one(page: int) -> None:
    adapter = adapters.of("flash_cache")
    case = adapter.complete({"B": 3, "H": 2, "H_KV": 2, "N": 200, "D": 16, "dtype": "fp32", "page": page})
    small, timed = adapter.small(case, CPU, 1).x, adapter.problem(case, CPU, 1).x
    assert len(set(small.kv_lengths.tolist())) > 1
    assert timed.kv_lengths.tolist() == [200] * 3
    assert tuple(timed.k.shape) == ((3 * 13, 2, 16, 16) if page else (3, 2, 200, 16))
    assert timed.spec() == adapter.spec(case, CPU)


@pytest.mark.parametrize("op", ["step", "latent"])
def test_the_spec_is_that_of_the_call(op: str) -> None:
    adapter = adapters.of(op)
    case = adapter.complete({"B": 2, "H": 2, "D": 24, "E": 16, "dtype": "fp32"} | ({"N": 5} if op == "latent" else {}))
    x = adapter.problem(case, CPU, 1).x
    if op == "latent":
        assert x.spec() == adapter.spec(case, CPU)
    else:
        from fulmen.step.spec import checked_spec

        assert checked_spec(*x.call[:5]) == adapter.spec(case, CPU)


def test_baselines_of_a_cache_run_at_the_fixed_shape() -> None:
    line = next(line for line in runner.lines_of(Selection(("decode",)), CPU) if line.case.get("page"))
    own = adapters.of("flash").complete({k: v for k, v in line.case.items() if k in adapters.of("flash").KEYS})
    small = own | {"B": 2, "N": 40}
    assert BASELINES["sdpa"].refusal(line.case, CPU) is None
    gate.gate([adapters.of("flash").problem(small, CPU, 1)], BASELINES["sdpa"].call, backward=False)
    assert adapters.of("flash").function(own) == adapters.of("flash_cache").function(line.case)


def test_fla_writes_states_in_fp32_only() -> None:
    case = adapters.of("step").complete({"state_dtype": "bf16"})
    assert "fp32" in str(BASELINES["fla-recurrent"].refusal(case, torch.device("cuda")))


@pytest.mark.parametrize(
    ("op", "case", "words"),
    [
        ("step", {"N": 9}, "1 to 8 tokens"),
        ("step", {"state_dtype": "fp16"}, "must be fp32 or bf16"),
        ("step", {"grad": True}, "no gradient"),
        ("latent", {"H_KV": 2}, "must be 1"),
        ("latent", {"E": 600}, "at most D=576"),
        ("latent", {"grad": True}, "no gradient"),
        ("flash_cache", {"page": 24}, "multiple of 16"),
        ("flash_cache", {"grad": True}, "no gradient"),
        ("layer_step_gqa", {"grad": True}, "no gradient"),
        ("layer_step_gqa", {"E": 64}, "must be D"),
        ("layer_step_mla", {"E": 192}, "less than D"),
        ("layer_step_lightning", {"N_Q": 2}, "one token"),
        ("layer_step_lightning", {"state_dtype": "bf16"}, "must be fp32"),
    ],
)
def test_cases_that_cannot_be(op: str, case: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        adapters.complete(op, case, CPU)


# ------------------------------------------------------------------------------------------------------ floors


@pytest.mark.parametrize(("state_dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_a_step_reads_and_writes_its_states(state_dtype: str, size: int) -> None:
    adapter = adapters.of("step")
    case = adapter.complete({"B": 64, "H": 64, "D": 128, "dtype": "bf16", "state_dtype": state_dtype})
    work, states = floors.of_case("step", adapter.function(case), case, "forward"), size * 64 * 64 * 128 * 128
    assert work is not None
    assert work.reads == states + 3 * 2 * 64 * 64 * 128
    assert work.writes == states + 2 * 64 * 64 * 128
    assert work.flops == 4 * 64 * 64 * 128 * 128
    assert floors.memory("step", case)["inputs"] == work.reads  # type: ignore[index]


def test_a_latent_cache_is_read_once() -> None:
    adapter = adapters.of("latent")
    case = adapter.complete({"B": 64, "H": 128, "N": 8192, "dtype": "bf16"})
    work = floors.of_case("latent", adapter.function(case), case, "forward")
    assert work is not None
    assert work.flops == 2 * 64 * 128 * 8192 * (576 + 512)
    assert work.reads == 2 * 64 * (8192 + 128) * 576
    assert work.writes == 2 * 64 * 128 * 512


@pytest.mark.parametrize(
    ("op", "weights", "cache"),
    [
        ("layer_step_gqa", 4096 * (2 * 4096 + 2 * 1024), 8192 * 2 * 1024),
        ("layer_step_mla", 4096 * (1536 + 576 + 4096) + 1536 * 32 * 192 + 512 * 32 * 256, 8192 * 576),
        ("layer_step_lightning", 5 * 4096 * 4096, 2 * 32 * 128 * 128 * 2),  # states are fp32, read and written
    ],
)
def test_a_step_of_a_layer_reads_weights_and_cache(op: str, weights: int, cache: int) -> None:
    adapter = adapters.of(op)
    case = adapters.complete(op, {"B": 16, "dtype": "bf16"}, CPU)
    work = floors.of_case(op, adapter.function(case), case, "forward")
    assert work is not None
    assert work.bytes == 2 * (weights + 16 * cache + 2 * 16 * 4096)
    parameters = adapter.made(case, torch.device("meta"), torch.bfloat16).parameters()
    assert sum(p.numel() for p in parameters if p.ndim == 2) == weights


def test_pages_do_not_change_the_floor() -> None:
    adapter = adapters.of("flash_cache")
    cases = [adapter.complete({"dtype": "bf16", "page": page}) for page in (0, 64)]
    plain, paged = (floors.of_case("flash_cache", adapter.function(c), c, "forward") for c in cases)
    assert plain == paged == floors.of_case("flash", "softmax attention", cases[0], "forward")


# ------------------------------------------------------------------------------------------------------- suite


def test_the_cases_of_earlier_results_are_in_the_suite() -> None:
    """`fulmen bench compare` finds cells by case and competitor, whatever the suite is called."""
    lines = runner.lines_of(Selection(("decode",), dtype="bf16"), torch.device("cuda"))
    cells = schema.read([RESULTS / "h200" / "decode.jsonl.gz"]).cells
    assert cells
    assert all(cell.case in [line.case for line in lines] for cell in cells)  # a baseline's op may be another


def test_kernels_of_the_suite_are_found_without_running_them() -> None:
    lines = runner.lines_of(Selection(("decode",)), torch.device("cuda"))
    for op, backend in (("step", "triton"), ("latent", "cuda"), ("flash_cache", "cuda"), ("flash_cache", "triton")):
        jobs = kernels.jobs_of([(line, [backend]) for line in lines if line.op == op], hardware.TARGETS[90])
        for job in (job for jobs in jobs for job in jobs):
            assert kernels.launches(op, job.case, hardware.TARGETS[90], backend, "forward"), job.case


def test_the_suite_runs_on_a_cpu(tmp_path: Path) -> None:
    shapes = ("op=step,B=2,H=4,D=16", "op=flash_cache,B=2,H=4,H_KV=2,N=48,D=16", "op=latent,B=2,H=16,N=90,D=48,E=32")
    selection = Selection(("decode",), "cpu", "fp32", ("auto",), ("sdpa",), shapes=shapes, seconds=0.01, seed=1)
    runner.run(selection, tmp_path / "run.jsonl")
    cells = schema.read([tmp_path / "run.jsonl"]).cells
    assert {cell.op for cell in cells} == {"step", "flash", "flash_cache", "latent"}
    assert {cell.case["page"] for cell in cells if cell.op == "flash_cache"} == {0, 16, 64, 256}
    assert {cell.case["state_dtype"] for cell in cells if cell.op == "step"} == {"float32", "bfloat16"}
    assert all(cell.status == "ok" and "bytes_min" in cell.audit for cell in cells if cell.competitor == "fulmen auto")
