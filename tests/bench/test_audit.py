from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from fulmen.bench import audit, floors, schema

SOFTMAX, LINEAR = "causal softmax attention", "causal linear attention with decay"
CASE = {"B": 4, "H": 32, "N": 8192, "D": 64, "dtype": "bf16", "causal": True}
H200 = {"device": "NVIDIA H200", "arch": 90, "sm_count": 132, "l2_bytes": 60 << 20}
CEILINGS = {
    "flops_hard": 1070.5e12, "flops_nominal": 989e12, "flops_measured": 790e12, "bytes_hard": 4.8e12,
    "bytes_measured": 4.25e12, "clock_max_mhz": 1980.0,
}  # fmt: skip


def make_run(**changes: Any) -> schema.Run:
    values: dict[str, Any] = {
        "run_id": "r", "time": "", "command": "", "environment": dict(H200), "commit": {}, "ceilings": dict(CEILINGS)
    }  # fmt: skip
    return schema.Run(**{**values, **changes})


def make_cell(median: float, op: str = "lightning", **changes: Any) -> schema.Cell:
    noise = random.Random(1)
    samples = [median * (1 + noise.gauss(0, 0.003)) for _ in range(40)]
    values: dict[str, Any] = {
        "run_id": "r", "suite": "s", "op": op, "function": SOFTMAX if op == "flash" else LINEAR, "case": dict(CASE),
        "competitor": "fulmen triton", "pass_": "forward", "samples_ms": samples,
        "stats": {"median": median, "low": 0.998 * median, "high": 1.002 * median, "n": 40},
    }  # fmt: skip
    return schema.Cell(**{**values, **changes})


def judged(cell: schema.Cell, run: schema.Run | None = None) -> schema.Cell:
    audit.judge(cell, run or make_run())
    return cell


# ------------------------------------------------------------------------------------------------ one cell


def test_an_honest_number_has_no_flag_and_its_efficiency() -> None:
    cell = judged(make_cell(0.139))  # measured: 91 % of the copy's bandwidth
    assert cell.flags() == []
    assert cell.status == "ok"
    assert cell.audit["efficiency"] == pytest.approx(0.91, abs=0.01)
    assert cell.audit["floor_ms"] == pytest.approx(4 * 134_217_728 / 4.8e12 * 1e3)
    for part in ("536.9 MB", "4.8 TB/s", "0.1118 ms", "0.139 ms"):
        assert part in cell.audit["arithmetic"]


def test_an_impossible_time_is_withheld_with_its_arithmetic() -> None:
    cell = judged(make_cell(0.5, "flash", device_ms=0.4, host_ms=0.6))
    assert cell.status == "withheld"
    assert cell.flags() == ["IMPOSSIBLE"]
    assert cell.stats == {}
    assert cell.samples_ms == []
    assert cell.device_ms is cell.host_ms is None
    assert "1.1 TFLOP / 1.071 PFLOP/s = 1.027 ms" in cell.reason
    before = copy.deepcopy(cell)
    assert judged(cell) == before


@pytest.mark.parametrize("median", [0.0, -1.0, 5e-324, 1e300])
def test_what_is_no_time_is_withheld(median: float) -> None:
    cell = judged(make_cell(median))
    assert cell.status == "withheld"
    assert "is no time" in cell.reason


def test_above_the_measured_ceiling_is_suspect() -> None:
    work = floors.of_case("flash", SOFTMAX, CASE, "forward")
    assert work is not None
    cell = judged(make_cell(1e3 * work.flops / 900e12, "flash"))
    assert cell.flags() == ["SUSPECT"]
    assert cell.status == "ok"


def test_saved_scores_are_possible_where_recomputed_ones_are_not() -> None:
    work = floors.of_case("flash", SOFTMAX, CASE, "backward")
    assert work is not None
    cell = judged(make_cell(1e3 * work.flops / 1000e12, "flash", pass_="backward"))
    assert cell.flags() == ["SUSPECT"]


def test_a_small_call_may_leave_its_output_in_the_cache() -> None:
    case = {**CASE, "N": 1024}  # 50 MB in, 17 MB out
    quick = 1e3 * 4 * 16_777_216 / 4.7e12
    assert judged(make_cell(quick, case=case)).flags() == ["WARM-L2"]
    hot = judged(make_cell(quick / 4, case=case, cache="hot"))
    assert hot.flags() == ["WARM-L2"]
    assert judged(make_cell(quick / 4, case=case)).status == "withheld"  # cold: the inputs had to come


def test_precision_sets_the_ceiling() -> None:
    work = floors.of_case("flash", SOFTMAX, CASE, "forward")
    assert work is not None
    t = 1e3 * work.flops / 700e12
    assert judged(make_cell(t, "flash")).status == "ok"
    cell = judged(make_cell(t, "flash", case={**CASE, "dtype": "float32"}))
    assert cell.status == "withheld"  # not even with TF32


def test_host_bound() -> None:
    small = {**CASE, "B": 1, "H": 1, "N": 128}
    cell = judged(make_cell(0.005, "flash", case=small, host_ms=0.03))
    assert "HOST-BOUND" in cell.flags()
    cell = judged(make_cell(0.005, "flash", case=small, host_ms=0.03, stats={"median": 0.005, "enqueue": 0.02}))
    assert "HOST-BOUND" in cell.flags()
    cell = judged(make_cell(0.05, "flash", case=small, host_ms=0.08, stats={"median": 0.05, "enqueue": 0.02}))
    assert "HOST-BOUND" not in cell.flags()  # a loop keeps the device busy
    cell = judged(make_cell(1.8, "flash", device_ms=1.2))
    assert "HOST-BOUND" in cell.flags()
    assert "HOST-BOUND" not in judged(make_cell(1.8, "flash", device_ms=1.7, host_ms=1.85)).flags()


def test_throttled_and_noisy() -> None:
    assert "THROTTLED" in judged(make_cell(0.2, clocks_mhz=[1200.0] * 40)).flags()
    assert "THROTTLED" not in judged(make_cell(0.2, clocks_mhz=[1200.0] + [1900.0] * 39)).flags()
    stats = {"median": 0.2, "low": 0.19, "high": 0.21, "throttle": ["SW power cap"]}
    cell = judged(make_cell(0.2, stats=stats))
    assert set(cell.flags()) == {"THROTTLED", "NOISY"}
    assert "SW power cap" in str(cell.audit["flags"])
    stats = {"median": 0.2, "throttle": ["SW power cap"]}
    assert judged(make_cell(0.2, stats=stats, clocks_mhz=[1800.0] * 40)).flags() == []  # busy, and fast enough
    stats = {"median": 0.2, "throttle": ["HW thermal slowdown"]}
    assert judged(make_cell(0.2, stats=stats, clocks_mhz=[1800.0] * 40)).flags() == ["THROTTLED"]
    assert "NOISY" in judged(make_cell(0.2, samples_ms=[0.2, 0.2])).flags()


def test_what_is_not_known_is_unaudited() -> None:
    cell = judged(make_cell(0.2, op="matmul", function="product"))
    assert cell.flags() == ["UNAUDITED"]
    cpu = make_run(environment={"device": "cpu", "arch": 0, "cpu": "x"}, ceilings={})
    cell = judged(make_cell(50.0, case={**CASE, "dtype": "float32"}), cpu)
    assert cell.flags() == ["UNAUDITED"]
    assert cell.status == "ok"
    assert "efficiency" not in cell.audit


def test_a_cpu_with_measured_ceilings_has_an_efficiency() -> None:
    run = make_run(environment={"device": "cpu", "arch": 0}, ceilings={"flops_measured": 100e9, "bytes_measured": 10e9})
    cell = judged(make_cell(200.0, case={**CASE, "dtype": "float32"}), run)
    assert cell.flags() == ["UNAUDITED"]
    assert 0 < cell.audit["efficiency"] < 1.1
    cell = judged(make_cell(0.01, case={**CASE, "dtype": "float32"}), run)
    assert "SUSPECT" in cell.flags()


def test_a_time_above_the_roof_is_never_without_a_flag() -> None:
    case = {**CASE, "dtype": "float32"}
    cpu = {"device": "cpu", "arch": 0}
    slow_memory = make_run(environment=cpu, ceilings={"flops_measured": 100e9, "bytes_measured": 1e9})
    assert "WARM-L2" in judged(make_cell(200.0, case=case), slow_memory).flags()
    slow_products = make_run(environment=cpu, ceilings={"flops_measured": 80e9, "bytes_measured": 10e9})
    cell = judged(make_cell(200.0, case=case), slow_products)  # 1.07 times as fast
    assert "SUSPECT" in cell.flags()
    assert "above the roof of 80 GFLOP/s" in str(cell.audit["flags"])
    sheet = make_run(ceilings={"bytes_hard": 4.8e12})
    cell = judged(make_cell(0.98 * 1e3 * 4 * 134_217_728 / 4.8e12), sheet)  # what was written may still be in the cache
    assert cell.flags() == ["WARM-L2"]


def test_flags_of_others_stay_and_judging_twice_changes_nothing() -> None:
    cell = make_cell(0.139, audit={"flags": [{"flag": "SIDE-STREAM", "why": "x"}, {"flag": "SUSPECT", "why": "old"}]})
    assert judged(cell).flags() == ["SIDE-STREAM"]
    cell = make_cell(0.139, memory={"gradients": {"bytes": 0.0}}, pass_="backward", op="lightning")
    judged(cell)
    again = copy.deepcopy(cell)
    assert judged(again) == cell


def test_memory_below_its_floor() -> None:
    memory = {
        "gradients": {"bytes": 0.0},
        "peak": {"bytes": 1e12},
        "saved": {"bytes": 0.0},
        "output": {"bytes": 1.0, "floor": 0.0},
    }
    cell = judged(make_cell(0.5, pass_="backward", memory=memory))
    assert cell.flags() == ["IMPOSSIBLE"]
    assert "402.7 MB" in cell.audit["flags"][0]["why"]
    assert set(cell.memory) == {"peak", "saved", "output"}
    assert cell.status == "ok"
    assert "gradients" in judged(make_cell(0.2, memory={"gradients": {"bytes": 0.0}})).memory  # a forward has none


def test_failed_cells_are_left_alone() -> None:
    cell = judged(make_cell(1e-9, status="failed", reason="dq is wrong"))
    assert cell.status == "failed"
    assert cell.flags() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"stats": {}}, {"stats": {"median": "fast"}}, {"stats": {"median": float("nan")}}, {"case": {}},
        {"case": {"N": "x", "dtype": []}}, {"clocks_mhz": ["a", None]}, {"memory": {"peak": {"bytes": "much"}}},
        {"audit": {"flags": "IMPOSSIBLE"}}, {"audit": {"flags": [3]}}, {"stats": {"median": 0.2, "throttle": 3}},
    ],
)  # fmt: skip
def test_odd_cells_do_not_crash(changes: dict[str, Any]) -> None:
    cell = make_cell(0.2, **changes)
    for run in (make_run(), make_run(environment={}, ceilings={}), make_run(ceilings={"flops_hard": "x"})):
        audit.judge(cell, run)
    audit.judge_group([cell], {"r": make_run()})


# ----------------------------------------------------------------------------------------------- together


def passes(forward: float, backward: float, total: float, **changes: Any) -> list[schema.Cell]:
    times = {"forward": forward, "backward": backward, "total": total}
    return [make_cell(t, pass_=p, **changes) for p, t in times.items()]


def test_parts_that_do_not_add_up() -> None:
    cells = passes(0.9185, 0.3675, 0.9707)
    audit.judge_group(cells)
    assert all(c.flags() == ["INCONSISTENT"] for c in cells)
    assert "-25 %" in cells[0].audit["flags"][0]["why"]
    audit.judge_group(cells)
    assert all(c.flags() == ["INCONSISTENT"] for c in cells)


def test_parts_that_do() -> None:
    for total in (1.0, 1.08, 0.93):
        cells = passes(0.4, 0.6, total)
        audit.judge_group(cells)
        assert all(c.flags() == [] for c in cells)
    noisy = passes(0.4, 0.6, 1.2, stats={"median": 0.4, "low": 0.1, "high": 1.0})
    for cell, t in zip(noisy, (0.4, 0.6, 1.2), strict=True):
        cell.stats = {"median": t, "low": 0.5 * t, "high": 1.5 * t}
    audit.judge_group(noisy)
    assert all(c.flags() == [] for c in noisy)


def test_a_backward_may_find_the_forwards_inputs_in_the_cache() -> None:
    case = {**CASE, "N": 512}
    cells = passes(0.010, 0.018, 0.022, case=case)
    audit.judge_group(cells, {"r": make_run()})
    assert all(c.flags() == [] for c in cells)
    audit.judge_group(cells)
    assert all(c.flags() == ["INCONSISTENT"] for c in cells)


def test_another_function_is_said_to_be_one() -> None:
    ours, baseline = make_cell(0.14), make_cell(2.5, "flash", competitor="sdpa-cudnn")
    audit.judge_group([ours, baseline])
    assert ours.flags() == []
    assert baseline.flags() == ["ANOTHER-FUNCTION"]
    assert LINEAR in baseline.audit["flags"][0]["why"]


def series(name: str, times: dict[int, float], op: str = "lightning", memory: float = 1.0) -> list[schema.Cell]:
    return [
        make_cell(t, op, competitor=name, case={**CASE, "N": n}, memory={"peak": {"bytes": 1e6 * n**memory}})
        for n, t in times.items()
    ]


LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def test_scaling_and_crossover() -> None:
    linear = series("fulmen triton", {n: 0.03 + 6e-5 * n for n in LENGTHS})
    softmax = series("sdpa", {n: 0.01 + 3.7e-8 * n * n for n in LENGTHS}, "flash")
    found = audit.judge_group(linear + softmax, {"r": make_run()})
    ours, baseline = found.scaling
    assert ours.cell.competitor == "fulmen triton"
    assert [n for n, _ in ours.points] == list(LENGTHS)
    assert ours.time is not None
    assert 0.85 < ours.time.exponent < 1
    assert ours.growth == "O(n)"
    assert "a constant one" in ours.verdict
    assert baseline.time is not None
    assert baseline.time.exponent == pytest.approx(2, abs=0.1)
    assert baseline.growth == "above O(n)"
    (cross,) = found.crossovers
    assert cross.N is not None
    assert 1024 < cross.N < 2048


def test_order_n_needs_time_and_memory() -> None:
    good = audit.scaling(series("x", {n: 2e-4 * n for n in LENGTHS}), make_run())
    assert good is not None
    assert good.growth == "O(n)"
    assert good.verdict.startswith("O(n): ")
    hungry = audit.scaling(series("x", {n: 2e-4 * n for n in LENGTHS}, memory=2.0), make_run())
    assert hungry is not None
    assert hungry.growth == "above O(n)"
    flat = audit.scaling(series("x", dict.fromkeys(LENGTHS, 14.3)), make_run())
    assert flat is not None
    assert flat.growth == "sublinear"
    assert "too slowly" in flat.verdict
    for grows in (flat, audit.scaling(series("x", {n: 1e-3 * n**0.85 for n in LENGTHS}), make_run())):
        assert grows is not None
        assert grows.growth == "sublinear"
        assert "not O(n)" not in grows.verdict
    few = audit.scaling(series("x", {n: 2e-4 * n for n in LENGTHS[:3]}), make_run())
    assert few is not None
    assert few.growth == "open"
    tiny = audit.scaling(series("x", {n: 1e-3 * n / 1024 for n in LENGTHS}), make_run())
    assert tiny is not None
    assert len(tiny.points) == 1  # the others are shorter than five launches


def test_interval_of_the_exponent_covers_the_truth() -> None:
    rng, hits = random.Random(0), 0
    for _ in range(300):
        found = audit.fit((n, n**1.5 * 2.718 ** rng.gauss(0, 0.05)) for n in LENGTHS)
        assert found is not None
        hits += found.low <= 1.5 <= found.high
    assert 0.91 <= hits / 300 <= 0.99


def test_odd_bounds_do_not_stop_a_crossover() -> None:
    a, b = series("fulmen a", {n: 1e-4 * n for n in LENGTHS}), series("b", dict.fromkeys(LENGTHS, 0.3))
    for cell in a:
        cell.stats |= {"low": -1.0, "high": 5e-324}
    cross = audit.crossover(a, b)
    assert cross is not None
    assert "not faster" in cross.words


def test_never_faster_and_always_faster() -> None:
    fast, slow = series("fulmen a", {n: 1e-4 * n for n in LENGTHS}), series("b", {n: 2e-4 * n for n in LENGTHS})
    cross = audit.crossover(fast, slow)
    assert cross is not None
    assert cross.N is None
    assert "at every N measured, 2.00 times" in cross.words
    cross = audit.crossover(slow, fast)
    assert cross is not None
    assert "not faster" in cross.words


def test_a_thousand_cells() -> None:
    cells = [
        make_cell(0.2 + 1e-4 * i, competitor=f"c{i % 7}", case={**CASE, "N": 1024 * (1 + i // 7)}) for i in range(1000)
    ]
    run = make_run()
    for cell in cells:
        audit.judge(cell, run)
    assert len(audit.judge_group(cells, {"r": run}).scaling) == 7
