from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from fulmen import dispatch
from fulmen.bench import adapters, floors, gate
from fulmen.bench.competitors import BASELINES
from fulmen.testing import Expected

CPU = torch.device("cpu")
CASE = {"B": 2, "H": 4, "H_KV": 2, "N": 40, "D": 16, "dtype": "float32"}


@pytest.fixture(params=["lightning", "flash"])
def adapter(request: pytest.FixtureRequest):
    return adapters.of(request.param)


@pytest.mark.parametrize("fully", [False, True])
def test_every_result_and_gradient_is_compared(adapter, fully: bool) -> None:
    case = adapter.complete(CASE)
    attend = (adapter.attend_fully if fully else adapter.attend)("eager")
    report = gate.gate([adapter.small(case, CPU, seed, fully) for seed in (1, 2)], attend)
    assert set(report) >= {"o", "dq", "dk", "dv"}
    if fully:
        assert set(report) >= ({"state", "dinitial_state"} if adapter.backends == "lightning" else {"lse"})
    for row in report.values():
        assert row["ok"]
        assert 0 < row["error"] <= row["bound"] < 1e-4


@pytest.mark.parametrize("options", [{"window": 7}, {"softcap": 3}, {"sinks": True, "causal": False, "window": 9}])
def test_options_of_softmax_attention(options: dict) -> None:
    """A kernel that leaves one out is found; the gradient of sinks is compared where all rows are."""
    adapter = adapters.of("flash")
    case = adapter.complete(CASE | options)
    assert all(word in adapter.function(case) for word in options if word != "causal")
    for fully in (False, True):
        attend = (adapter.attend_fully if fully else adapter.attend)("eager")
        report = gate.gate([adapter.small(case, CPU, seed, fully) for seed in (1, 2)], attend)
        assert ("dsinks" in report) == ("sinks" in options)
    without = {"sinks": None} if "sinks" in options else {"window": None, "softcap": None}
    with pytest.raises(gate.Wrong):
        gate.gate([adapter.small(case, CPU, 1)], lambda x: adapter.attend("eager")(x._replace(**without)))
    assert adapter.spec(case, CPU).has_sinks == ("sinks" in options)
    problem = adapter.problem(case, CPU, 3)
    assert set(gate.evaluate(problem, adapter.attend("eager"))) == {"o", "dq", "dk", "dv"}
    assert BASELINES["sdpa"].refusal(case, CPU) == "is called without window, softcap, sinks"


def test_the_timed_shape_is_compared_in_one_head(adapter) -> None:
    problem = adapter.problem(adapter.complete(CASE), CPU, 3)
    assert set(gate.evaluate(problem, adapter.attend("eager"))) == {"o", "dq", "dk", "dv"}
    assert problem.pick("o", problem.leaves["q"]).shape == (1, 2, 40, 16)
    assert problem.pick("dk", problem.leaves["k"]).shape == (1, 1, 40, 16)

    def wrong_there(x) -> Tensor:
        o = adapter.attend("eager")(x)
        there = problem.pick("o", torch.arange(8).view(2, 4, 1, 1)).flatten()
        o.view(8, -1).data[there[-1]] *= 1.001
        return o

    with pytest.raises(gate.Wrong, match=r"^o: "):
        gate.evaluate(problem, wrong_there)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_of_the_other_heads_none_may_be_missing(adapter, seed: int) -> None:
    problem = adapter.problem(adapter.complete(CASE), CPU, seed)
    there = int(problem.pick("o", torch.arange(8).view(2, 4, 1, 1)).flatten()[0])

    def missing(x) -> Tensor:
        o = adapter.attend("eager")(x)
        o.view(8, -1).data[(there + 4) % 8] = 0.0  # the same head of the other batch
        return o

    with pytest.raises(gate.Wrong, match=r"^o: nothing but zeros in batch"):
        gate.evaluate(problem, missing)


def test_which_head_is_compared_depends_on_the_seed(adapter) -> None:
    picked = [adapter.problem(adapter.complete(CASE), CPU, seed).pick for seed in range(12)]
    assert len({int(pick("k", torch.arange(4).view(2, 2, 1, 1))) for pick in picked}) > 1


def test_long_sequences_are_checked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = adapters.of("lightning")
    case = lightning.complete(CASE | {"N": 50})
    whole = lightning.problem(case, CPU, 4).expected()
    monkeypatch.setattr(lightning, "ROWS", 16)
    pieces = lightning.problem(case, CPU, 4).expected()
    for name, wanted in pieces.items():
        torch.testing.assert_close(wanted.exact, whole[name].exact, rtol=1e-12, atol=1e-12)
    gate.evaluate(lightning.problem(case, CPU, 4), lightning.attend("eager"))


def test_a_matrix_that_does_not_fit_leaves_the_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = adapters.of("flash")
    monkeypatch.setattr(flash, "free_bytes", lambda device: 0)
    monkeypatch.setattr(flash, "LAST_QUERIES", 8)
    report = gate.evaluate(flash.problem(flash.complete(CASE), CPU, 5), flash.attend("eager"))
    assert set(report) == {"o"}


def test_exchange_swaps_values_and_truths_without_a_trace(adapter) -> None:
    case = adapter.complete(CASE)
    a, b = (adapter.small(case, CPU, seed) for seed in (1, 2))
    q, version, truth = a.leaves["q"].detach().clone(), a.leaves["q"]._version, a.expected()
    gate.exchange(a, b)
    assert torch.equal(b.leaves["q"], q)
    assert a.leaves["q"]._version == version
    assert b.expected() is truth
    gate.evaluate(a, adapter.attend("eager"))
    gate.exchange(a, b)
    assert torch.equal(a.leaves["q"], q)


def test_poison_fills_what_nobody_wrote_and_is_taken_away() -> None:
    was = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    with gate.poisoned():
        assert torch.empty(7).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory is was


def test_a_changed_argument_is_named_and_put_back() -> None:
    flash = adapters.of("flash")
    problem = flash.small(flash.complete(CASE), CPU, 1)
    v = problem.leaves["v"].detach().clone()

    def mutates(x) -> Tensor:
        x.v.data[0, 0, 0, 0] += 1
        return flash.attend("eager")(x)

    with pytest.raises(gate.Wrong, match=r"^v: the call changed its argument"):
        gate.evaluate(problem, mutates)
    assert torch.equal(problem.leaves["v"], v)


def test_without_gradients_only_the_forward_is_called() -> None:
    flash = adapters.of("flash")
    report = gate.gate([flash.small(flash.complete(CASE), CPU, 1)], flash.attend("eager"), backward=False)
    assert set(report) == {"o"}


@pytest.mark.parametrize("scale", [1.004, 0.996])
def test_a_bf16_result_that_is_too_large_everywhere(scale: float) -> None:
    flash = adapters.of("flash")
    case = flash.complete(CASE | {"dtype": "bfloat16", "N": 333, "D": 64})
    problem = flash.small(case, CPU, 1)
    exact = problem.expected()["o"].exact
    gate.compare(problem, {"o": exact.bfloat16()})
    with pytest.raises(gate.Wrong, match=r"^o: .*times what it must be"):
        gate.compare(problem, {"o": (scale * exact).bfloat16()})


def test_rounding_of_one_token_is_not_taken_for_a_scale() -> None:
    """A token whose norm is near 0 makes a weight's gradient of rank 1: all its rows are off together."""
    dy, x = torch.randn(2, 200, 64, dtype=torch.float64)
    spread = dy.T @ x
    one = 1e4 * dy[:1].T @ x[:1] + spread
    assert gate._independent(spread) > 20
    assert gate._independent(one) == pytest.approx(1, abs=0.01)
    assert gate._independent(torch.cat([1e4 * x[None, :1], x[None, 1:]], 1)) == pytest.approx(1, abs=0.01)
    assert gate._independent(x[None]) > 150
    for exact, fine in ((one, True), (spread, False)):
        wrong = gate._wrong((exact * (1 - 2.8e-4)).float(), Expected(exact * (1 + 1e-4), exact, 3.0), {})
        assert (wrong == "") is fine, wrong


def test_not_finite_anywhere() -> None:
    flash = adapters.of("flash")
    problem = flash.small(flash.complete(CASE), CPU, 1)
    o = problem.expected()["o"].exact.float()
    o[0, 0, 3, 3] = torch.inf
    with pytest.raises(gate.Wrong, match=r"^o: not finite in 1 of") as wrong:
        gate.compare(problem, {"o": o})
    assert wrong.value.correctness["o"]["ok"] is False


def test_every_op_has_an_adapter() -> None:
    assert set(dispatch.OPS) <= set(adapters.OPS)
    for op in adapters.OPS:
        adapter = adapters.of(op)
        case = adapter.complete({})
        options = "N_Q", "window", "softcap", "sinks", "per_token", "groups"  # said where they are not as usual
        implied = {name for name in options if not adapter.KEYS.get(name)}
        assert set(case) == set(adapter.KEYS) - implied
        assert None not in case.values()
        assert dataclasses.is_dataclass(gate.Problem)
        least = floors.memory(op, case | {"dtype": "float32"})
        assert least is not None
        assert least["output"] == 4 * (4096 if op.startswith("layer_step") else 8 * 1024 * 64)


@pytest.mark.parametrize("causal", [False, True])
def test_fewer_queries_than_keys(causal: bool) -> None:
    adapter = adapters.of("flash")
    case = adapter.complete({"N": 90, "N_Q": 5, "H": 4, "H_KV": 2, "D": 16, "dtype": "float32", "causal": causal})
    assert adapter.spec(case, CPU)[3:5] == (5, 90)
    problems = [adapter.small(case, CPU, 1), adapter.problem(case, CPU, 3)]
    assert [p.x.q.shape[2] for p in problems] == [5, 5]
    assert set(gate.gate(problems, adapter.attend("eager"))) == {"o", "dq", "dk", "dv"}
    with pytest.raises(gate.Wrong):
        gate.gate(problems, lambda x: adapter.attend("eager")(x) * 1.01)
    assert (BASELINES["sdpa"].refusal(case, CPU) is not None) == causal
    assert "N_Q" not in adapter.complete({"N": 90, "N_Q": 90})


LAYERS = [
    {"layer": "mhsa"}, {"layer": "mha"}, {"layer": "gqa", "H": 8, "H_KV": 2}, {"layer": "mqa"},
    {"layer": "mla", "D": 48, "E": 32, "rank": 32},
]  # fmt: skip


@pytest.mark.parametrize("options", LAYERS, ids=lambda o: o["layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_pass_with_every_parameter(options: dict, dtype: str) -> None:
    adapter = adapters.of("layer")
    case = adapter.complete({"B": 1, "N": 64, "H": 4, "D": 32, "dtype": dtype} | options)
    problems = [adapter.small(case, CPU, 1), adapter.small(case, CPU, 2), adapter.problem(case, CPU, 3)]
    for attend in (adapter.attend("auto"), adapter.attend("eager"), BASELINES["sdpa-layer"].call):
        found = gate.gate(problems, attend)
        assert set(found) == {"o", "dx", *(f"d{name}" for name, _ in problems[0].x.layer.named_parameters())}


@pytest.mark.parametrize("options", LAYERS, ids=lambda o: o["layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_of_a_layer_pass_with_every_gradient(options: dict, dtype: str) -> None:
    adapter = adapters.of("layer_parts")
    case = adapter.complete({"B": 1, "N": 64, "H": 4, "D": 32, "dtype": dtype} | options)
    problems = [adapter.small(case, CPU, 1), adapter.small(case, CPU, 2), adapter.problem(case, CPU, 3)]
    found = gate.gate(problems, BASELINES["layer-parts"].call)
    products = {"mhsa": 2, "mla": 5}.get(options["layer"], 4)
    outs = {f"y{i or ''}" for i in range(products)}
    assert set(found) == outs | {"o", "dq", "dk", "dv"} | {f"d{name}{i}" for name in "xw" for i in range(products)}


def test_parts_that_are_wrong_in_one_product_or_in_attention_are_red() -> None:
    adapter = adapters.of("layer_parts")
    problem = adapter.small(adapter.complete({"N": 64, "H": 4, "D": 32, "dtype": "float32"}), CPU, 1)
    for i, name in ((0, "y"), (-1, "o")):

        def wrong(given, i: int = i) -> list[Tensor]:
            outs = adapter.attend("eager")(given)
            outs[i] = 1.001 * outs[i]
            return outs

        with pytest.raises(gate.Wrong, match=f"^{name}: "):
            gate.gate([problem], wrong)


def test_a_layer_that_forgets_a_parameter_is_red() -> None:
    """What the report this suite comes from timed: the projections before the kernel get no gradient."""
    adapter = adapters.of("layer")
    problem = adapter.small(adapter.complete({"N": 64, "H": 4, "D": 32, "dtype": "float32"}), CPU, 1)

    def detached(p):
        with torch.no_grad():
            q, k, v = p.layer._project(p.x, p.x)
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return p.layer.o_proj(o.transpose(1, 2).flatten(2))

    with pytest.raises(gate.Wrong, match=r"^dx: no gradient comes back to x"):
        gate.gate([problem], detached)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": "mlp"}, "must be one of mhsa"),
        ({"layer": "mha", "rank": 8}, "the others none"),
        ({"layer": "mla"}, "mla has a rank"),
        ({"layer": "mla", "rank": 8}, "must be less than D"),
        ({"layer": "gqa"}, "H_KV=None must be given"),
        ({"layer": "mqa", "H_KV": 2}, "H_KV=2 must be 1"),
        ({"E": 32}, "E=32 must be D=64"),
    ],
)
def test_layers_that_cannot_be(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        adapters.of("layer").complete(options)
