from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fulmen.bench import Refused, audit, comparing, schema

CASE = {"B": 4, "H": 32, "N": 8192, "D": 64, "dtype": "bf16"}


def make_run(run_id: str = "a", **changes: Any) -> schema.Run:
    values: dict[str, Any] = {
        "run_id": run_id, "time": "", "command": "", "environment": {"device": "NVIDIA H200", "arch": 90}, "commit": {}
    }  # fmt: skip
    return schema.Run(**{**values, **changes})


def make_cell(samples: Any, run_id: str = "a", **changes: Any) -> schema.Cell:
    samples = [float(x) for x in samples]
    values: dict[str, Any] = {
        "run_id": run_id, "suite": "s", "op": "lightning", "function": "linear", "case": dict(CASE),
        "competitor": "fulmen triton", "pass_": "forward", "samples_ms": samples,
        "stats": {"median": float(np.median(samples))} if samples else {},
    }  # fmt: skip
    return schema.Cell(**{**values, **changes})


def results(*cells: schema.Cell, **changes: Any) -> schema.Results:
    run_id = cells[0].run_id if cells else "a"
    return schema.Results({run_id: make_run(run_id, **changes)}, list(cells))


def one(a: schema.Cell, b: schema.Cell) -> comparing.Verdict:
    (verdict,) = comparing.compare(results(a), results(b))
    return verdict


def noise(seed: int, n: int = 40, middle: float = 0.14, sigma: float = 0.01) -> Any:
    """Skewed, as times are."""
    rng = np.random.default_rng(seed)
    return middle * np.exp(sigma * rng.standard_normal(n) + 0.3 * sigma * rng.exponential(1, n))


# ---------------------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("sigma", [0.003, 0.02, 0.1])
def test_equal_distributions_are_hardly_ever_told_apart(sigma: float) -> None:
    trials = 250
    found = [comparing.effect(noise(2 * i, sigma=sigma), noise(2 * i + 1, sigma=sigma)).verdict for i in range(trials)]
    assert sum(v in ("FASTER", "SLOWER") for v in found) < 0.01 * trials
    if sigma < 0.01:
        assert found.count("SAME") == trials


def test_five_percent_are_seen() -> None:
    trials = 120
    slower = [comparing.effect(noise(2 * i), noise(2 * i + 1, middle=0.147)).verdict for i in range(trials)]
    faster = [comparing.effect(noise(2 * i, middle=0.147), noise(2 * i + 1)).verdict for i in range(trials)]
    assert slower.count("SLOWER") > 0.99 * trials
    assert faster.count("FASTER") > 0.99 * trials


def test_one_and_a_half_percent_are_no_verdict() -> None:
    verdicts = {comparing.effect(noise(2 * i), noise(2 * i + 1, middle=0.14 * 1.015)).verdict for i in range(50)}
    assert not verdicts & {"FASTER", "SLOWER"}


def test_interval_of_the_ratio_covers_the_truth() -> None:
    hits = 0
    for i in range(400):
        e = comparing.effect(noise(2 * i, sigma=0.03), noise(2 * i + 1, middle=0.14 * 1.03, sigma=0.03))
        hits += e.low <= 1.03 <= e.high
    assert 0.91 <= hits / 400 <= 0.99


def test_interval_of_the_median_covers_the_truth() -> None:
    for n in (10, 31, 100):
        hits = 0
        for i in range(400):
            low, high = audit.median_interval(np.sort(np.random.default_rng(i).standard_normal(n)))
            hits += low <= 0 <= high
        assert hits / 400 >= 0.92


def test_p_is_that_of_scipy() -> None:
    from scipy import stats

    for i in range(50):
        a, b = noise(2 * i, n=10 + i), noise(2 * i + 1, middle=0.1405, n=60 - i)
        if i % 2:
            a, b = a.round(3), b.round(3)  # ties
        expected = stats.mannwhitneyu(a, b, alternative="two-sided", method="asymptotic").pvalue
        assert comparing.effect(a, b).p == pytest.approx(expected, rel=1e-6)


def test_identical_samples() -> None:
    e = comparing.effect(np.full(20, 0.5), np.full(20, 0.5))
    assert e.verdict == "SAME"
    assert math.isfinite(e.p)
    assert comparing.effect(np.full(20, 0.5), np.full(20, 0.6)).verdict == "SLOWER"


def test_wild_noise_is_never_called_the_same() -> None:
    e = comparing.effect(noise(1, n=10, sigma=0.5), noise(2, n=10, sigma=0.5))
    assert e.verdict == "INCONCLUSIVE"


# ------------------------------------------------------------------------------------------------- clocks


def test_a_slower_clock_is_not_a_slower_kernel() -> None:
    a = make_cell(noise(1), clocks_mhz=[1900.0] * 40)
    b = make_cell(noise(2) * 1.1, clocks_mhz=[1900.0 / 1.1] * 40)
    verdict = one(a, b)
    assert verdict.verdict == "SAME"
    assert verdict.why.startswith("in cycles ")
    assert "1900 to 1727 MHz" in verdict.why


def test_a_slower_kernel_is_one_in_cycles_too() -> None:
    a, b = make_cell(noise(1), clocks_mhz=[1900.0] * 8), make_cell(noise(2) * 1.1, clocks_mhz=[1890.0] * 4)
    verdict = one(a, b)
    assert verdict.verdict == "SLOWER"
    assert verdict.time is not None
    assert verdict.time.ratio == pytest.approx(1.1, abs=0.01)


def test_a_kernel_that_waits_for_memory_is_the_same_at_another_clock() -> None:
    a, b = make_cell(noise(1), clocks_mhz=[1900.0] * 40), make_cell(noise(2), clocks_mhz=[1700.0] * 40)
    assert one(a, b).verdict == "SAME"


def test_time_and_cycles_that_disagree_decide_nothing() -> None:
    a, b = make_cell(noise(1), clocks_mhz=[1500.0] * 40), make_cell(noise(2) * 0.95, clocks_mhz=[1900.0] * 40)
    assert one(a, b).verdict == "INCONCLUSIVE"  # 5 % less time, 20 % more cycles


# ------------------------------------------------------------------------------------------- what compares


def test_other_machines_and_protocols_do_not_compare() -> None:
    a, b = make_cell(noise(1)), make_cell(noise(2))
    for changes, word in (
        ({"environment": {"device": "NVIDIA A100", "arch": 80}}, "NVIDIA A100"),
        ({"protocol": "2"}, "protocol"),
    ):
        (verdict,) = comparing.compare(results(a), results(b, **changes))
        assert verdict.verdict == "INCOMPARABLE"
        assert word in verdict.why
    cpus = [{"environment": {"device": "cpu", "arch": 0, "cpu": name}} for name in ("one", "two")]
    (verdict,) = comparing.compare(results(a, **cpus[0]), results(b, **cpus[1]))
    assert verdict.verdict == "INCOMPARABLE"


def test_missing_cells_are_listed() -> None:
    common, gone, new = (make_cell(noise(1), case={**CASE, "N": n}) for n in (1, 2, 3))
    verdicts = {v.cell.case["N"]: v for v in comparing.compare(results(common, gone), results(common, new))}
    assert verdicts[1].verdict == "SAME"
    assert (verdicts[2].missing, verdicts[3].missing) == ("b", "a")
    assert verdicts[2].why == "only in the first file"
    assert comparing.failures(verdicts.values(), {"missing": 0.0})
    assert not comparing.failures(comparing.compare(results(common), results(common, new)), {"missing": 0.0})


def test_a_cell_that_broke() -> None:
    verdict = one(make_cell(noise(1)), make_cell([], status="failed", reason="dq is wrong"))
    assert verdict.verdict == "INCOMPARABLE"
    assert "dq is wrong" in verdict.why
    assert comparing.failures([verdict], {"broken": 0.0})
    assert not comparing.failures([verdict], {"slower": 0.05})


@pytest.mark.parametrize("samples", [[], [0.1, 0.2], [0.1] * 9 + [0.0], [0.1] * 9 + [math.nan], [-1.0] * 9])
def test_unusable_samples(samples: list[float]) -> None:
    assert one(make_cell(noise(1)), make_cell(samples)).verdict == "INCOMPARABLE"


def test_changes_that_cost_most_come_first() -> None:
    before = [make_cell(noise(i, middle=m), case={**CASE, "N": i}) for i, m in enumerate((0.1, 10.0, 1.0))]
    after = [make_cell(noise(9 + i, middle=1.1 * m), case={**CASE, "N": i}) for i, m in enumerate((0.1, 10.0, 1.0))]
    assert [v.cell.case["N"] for v in comparing.compare(results(*before), results(*after))] == [1, 2, 0]


# -------------------------------------------------------------------------------------------- rule, screen


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("slower:5%", {"slower": 0.05}),
        ("slower:0.05", {"slower": 0.05}),
        ("slower: 2.5 %", {"slower": 0.025}),
        ("slower", {"slower": 0.0}),
        ("SLOWER:5%, broken,missing", {"slower": 0.05, "broken": 0.0, "missing": 0.0}),
    ],
)
def test_rules(text: str, rule: dict[str, float]) -> None:
    assert comparing.parse_fail_on(text) == pytest.approx(rule)


@pytest.mark.parametrize("text", ["", "faster", "slower:", "slower:x", "slower:-5%", "slower:5", "slower:5%,oops"])
def test_bad_rules(text: str) -> None:
    with pytest.raises(Refused, match="fail-on"):
        comparing.parse_fail_on(text)


def test_exit_codes() -> None:
    verdict = one(make_cell(noise(1)), make_cell(noise(2) * 1.1))
    assert verdict.verdict == "SLOWER"
    assert not comparing.failures([verdict], {})
    assert comparing.failures([verdict], comparing.parse_fail_on("slower:5%"))
    assert not comparing.failures([verdict], comparing.parse_fail_on("slower:20%"))
    assert not comparing.failures([], comparing.parse_fail_on("slower:5%"))


def test_render_prints_names_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=200)
    name = "[red]evil[/red] <script>"
    cells = [make_cell(noise(1), competitor=name), make_cell(noise(2) * 1.1, competitor=name)]
    comparing.render(comparing.compare(results(cells[0]), results(cells[1])), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert name in text
    assert "1 SLOWER" in text
    comparing.render([], console)
    assert "nothing to compare" in console.file.getvalue()


def test_render_does_not_drive_the_terminal() -> None:
    evil = "\x1b]0;title\x07\x1b[2Jevil\r"
    cells = [make_cell(noise(i) * f, competitor=evil, suite=evil, case={evil: evil}) for i, f in ((1, 1.0), (2, 1.1))]
    cells.append(make_cell([], competitor="b" + evil, status="failed", reason=evil))
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    comparing.render(comparing.compare(results(cells[0]), results(*cells[1:])), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b]0" not in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert "\\x1b[2Jevil" in text


def test_a_thousand_cells() -> None:
    cells = [make_cell(noise(i, n=60), case={**CASE, "N": i}) for i in range(1000)]
    verdicts = comparing.compare(results(*cells), results(*cells))
    assert comparing.summary(verdicts) == "1000 SAME"
