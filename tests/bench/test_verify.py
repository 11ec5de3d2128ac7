from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fulmen.bench
from fulmen.bench import verify, verify_and_time

FAST: dict[str, Any] = {"seconds": 0.02, "samples": (5, 6)}


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 4, -1) @ v


def inputs(seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, 32, 16, generator=g).requires_grad_() for _ in range(3)]


def test_one_cell_a_pass() -> None:
    outcome = verify_and_time(plain, plain, inputs, name="mine", **FAST)
    assert outcome.ok
    assert outcome.reason == ""
    assert [c.pass_ for c in outcome.cells] == ["forward", "backward", "total"]
    assert {c.competitor for c in outcome.cells} == {"mine"}
    assert set(outcome.cells[0].correctness) == {"o", "dq", "dk", "dv"}
    assert outcome.cells[2].memory["gradients"]["bytes"] == 3 * 4096


def test_without_leaves_only_the_forward() -> None:
    outcome = verify_and_time(plain, plain, lambda seed: [x.detach() for x in inputs(seed)], **FAST)
    assert outcome.ok, outcome.reason
    assert [c.pass_ for c in outcome.cells] == ["forward"]
    assert set(outcome.cells[0].correctness) == {"o"}


def test_several_outputs_and_arguments_that_are_no_tensors() -> None:
    def both(x: Tensor, scale: float, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x * scale).sin() @ y, y.cos()

    def make(seed: int) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        return torch.randn(8, 8, generator=g).requires_grad_(), 0.5, torch.randn(8, 8, generator=g).requires_grad_()

    outcome = verify_and_time(both, both, make, passes=("forward",), **FAST)
    assert outcome.ok, outcome.reason
    assert set(outcome.cells[0].correctness) == {"o", "o1", "dx", "dy"}
    wrong = verify_and_time(
        lambda x, scale, y: (both(x, scale, y)[0], y.sin()), both, make, passes=("forward",), **FAST
    )
    assert wrong.reason.startswith("o1: ")
    assert "failed" in str(wrong)


def test_physics_judges_where_the_case_is_said() -> None:
    case = {"B": 1, "H": 2, "N": 32, "D": 16, "dtype": "float32", "causal": False}
    outcome = verify_and_time(plain, plain, inputs, case=case, op="flash", function="softmax attention", **FAST)
    assert outcome.ok
    assert outcome.cells[0].audit.get("flops", 0) > 0
    for dtype in ({}, {"dtype": "fp32"}):  # the tensors' own, or by its short name
        short = verify_and_time(plain, plain, inputs, case=case | dtype, op="flash", passes=("forward",), **FAST)
        assert short.cells[0].case["dtype"] == "float32"


@pytest.mark.parametrize(
    ("op", "case", "why"),
    [
        ("flsh", {"B": 1}, "op='flsh': must be 'flash' or 'lightning'"),
        ("flash", None, "op='flash' needs case"),
        ("custom", {"B": 1}, "once op says of what"),
        ("flash", {"Q": 2}, "case: flash has no Q; a case says B, H"),
        ("flash", {"B": 1, "H": 2, "N": 32, "D": 16, "dtype": "bf17"}, "dtype=bf17: must be one of bf16"),
        ("flash", {"B": 1, "H": 2, "N": "32", "D": 16}, "N=32: must be a whole number above 0"),
        ("flash", {"B": 1, "H": 2, "N": 16384, "D": 16}, r"case says that q is \(1, 2, 16384, 16\), and no argument"),
    ],
)
def test_a_case_that_is_none(op: str, case: dict[str, Any] | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        verify_and_time(plain, plain, inputs, case=case, op=op, **FAST)


def test_a_leaf_must_be_a_leaf() -> None:
    with pytest.raises(ValueError, match="q must be a leaf"):
        verify_and_time(plain, plain, lambda seed: [2 * x for x in inputs(seed)], **FAST)


def test_it_is_exported() -> None:
    assert fulmen.bench.verify_and_time is verify.verify_and_time
    assert "verify_and_time(my_kernel, plain, inputs)" in (verify.__doc__ or "")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fulmen.bench.nonsense  # noqa: B018


def test_a_built_in_function_has_no_signature_and_is_measured() -> None:
    def one(seed: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(1, 2, 8, 8, generator=torch.Generator().manual_seed(seed + i)) for i in range(3))

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT / 8**0.5, -1) @ v

    fn = torch.nn.functional.scaled_dot_product_attention
    assert (
        verify_and_time(fn, plain, one, seconds=0.01, samples=(5, 5)).cells[0].competitor
        == "scaled_dot_product_attention"
    )
