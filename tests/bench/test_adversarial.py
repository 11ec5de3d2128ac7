"""Kernels that cheat, one each: none of them may get a time. And honest ones, which always must."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import fulmen
from fulmen.bench import adapters, verify_and_time
from fulmen.bench.gate import Formula, gate
from fulmen.bench.verify import Outcome

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
CPU = torch.device("cpu")


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


def inputs(seed: int, odd: bool = False) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    N = 33 if odd else 48
    return tuple(torch.randn(1, 2, N, 16, generator=g).requires_grad_() for _ in range(3))


def judge(fn: Attention, **options: Any) -> Outcome:
    return verify_and_time(fn, plain, inputs, **{"seconds": 0.05, "samples": (5, 8)} | options)


def rejected(fn: Attention, reason: str, **options: Any) -> None:
    outcome = judge(fn, **options)
    assert not outcome.ok
    assert reason in outcome.reason, outcome.reason
    for cell in outcome.cells:
        if cell.status != "ok":
            assert cell.status == "failed"
            assert not cell.samples_ms
            assert cell.stats == {}
            assert (cell.device_ms, cell.host_ms) == (None, None)
    assert any(cell.status == "failed" for cell in outcome.cells)


def with_true_gradients(forward: Attention) -> Attention:
    """`forward`, whatever it returns, with a backward nobody can object to."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            return forward(q, k, v)

        @staticmethod
        def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                return torch.autograd.grad(plain(*leaves), leaves, do)

    return Function.apply


def test_an_honest_kernel_gets_its_times() -> None:
    outcome = judge(with_true_gradients(plain))
    assert outcome.ok, outcome.reason
    assert [cell.pass_ for cell in outcome.cells] == ["forward", "backward", "total"]
    assert all(len(cell.samples_ms) >= 5 and cell.median_ms for cell in outcome.cells)
    assert "ms (95 %" in str(outcome)


# ------------------------------------------------------------------------------------------------ no gradient


def test_no_gradient() -> None:
    rejected(lambda q, k, v: plain(q.detach(), k.detach(), v.detach()), "o: is cut off")


def test_no_gradient_of_one_input() -> None:
    rejected(lambda q, k, v: plain(q, k.detach(), v), "dk: no gradient")


def test_a_gradient_of_zeros() -> None:
    rejected(lambda q, k, v: plain(q, k.detach() + 0 * k, v), "dk: ")


def test_a_gradient_twice_as_large() -> None:
    rejected(lambda q, k, v: plain(q, k, 2 * v - v.detach()), "dv: ")


# ----------------------------------------------------------------------------------- memory nobody wrote


def test_stale_output() -> None:
    last: list[Tensor] = []

    def stale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        last.append(plain(q, k, v))
        before = last[-2] if len(last) > 1 and last[-2].shape == q.shape else torch.empty_like(q)
        del last[:-1]
        return before

    rejected(with_true_gradients(stale), "o: ")


def test_memory_that_is_never_written() -> None:
    rejected(with_true_gradients(lambda q, k, v: torch.empty_like(q)), "o: not finite")


def test_partial_write() -> None:
    def partial(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = torch.empty_like(q)
        rows = q.shape[2] // 16 * 16  # whole tiles only
        o[:, :, :rows] = plain(q, k, v)[:, :, :rows]
        return o

    rejected(with_true_gradients(partial), "o: not finite")


# ------------------------------------------------------------------------------------------ remembered results


def test_cached_by_pointer() -> None:
    known: dict[Any, Tensor] = {}

    def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape)
        if key not in known:
            known[key] = plain(q, k, v)
        return known[key].clone()

    rejected(with_true_gradients(cached), "o: ")


def test_batch_and_skip() -> None:
    """Does the work of fifteen calls in one and then returns what it has."""
    kept: dict[Any, tuple[int, Tensor]] = {}

    def skip(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        left, o = kept.get((q.data_ptr(), q.shape), (0, None))
        if o is None or left == 0:
            left, o = 15, plain(q, k, v)
        kept[q.data_ptr(), q.shape] = (left - 1, o)
        return o.clone()

    rejected(with_true_gradients(skip), "o: ")


def test_honest_until_it_is_timed() -> None:
    """Passes every gate, then remembers: only a look at the results of timed calls finds it."""
    known: dict[Any, Tensor] = {}
    calls = 0

    def late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += q.shape[2] == 48
        if calls < 7:
            return plain(q, k, v)
        key = (q.data_ptr(), q.shape)
        known.setdefault(key, plain(q, k, v))
        return known[key].clone()

    rejected(with_true_gradients(late), "in a timed call", passes=("forward",), samples=(8, 8))


# -------------------------------------------------------------------------------------------------- the clock


def test_patched_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("perf_counter_ns", "perf_counter"):  # so that they come back whatever happens here
        monkeypatch.setattr(time, name, getattr(time, name))

    def patching(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        time.perf_counter_ns = lambda: 0
        return plain(q, k, v)

    rejected(patching, "time.perf_counter_ns was replaced")
    assert time.perf_counter_ns() > 0


@pytest.mark.gpu
def test_side_stream() -> None:
    stream = torch.cuda.Stream()

    def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4_000_000)
            return plain(q, k, v)

    def on_gpu(seed: int) -> tuple[Tensor, ...]:
        return tuple(x.detach().cuda().requires_grad_() for x in inputs(seed))

    outcome = verify_and_time(hidden, plain, on_gpu, passes=("forward",), seconds=0.1)
    assert not outcome.ok  # seen by the device's silence, or by results that were not there yet
    assert not outcome.cells[0].samples_ms


# ------------------------------------------------------------------------------------------------- wrong values


def test_mutated_input() -> None:
    def mutates(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = plain(q, k, v)
        with torch.no_grad():
            k.data.mul_(1.0001)
        return o

    rejected(mutates, "k: the call changed its argument")


def test_constant_output() -> None:
    rejected(with_true_gradients(lambda q, k, v: torch.zeros_like(q)), "o: ")


def test_lower_precision_inside() -> None:
    rejected(lambda q, k, v: plain(q.bfloat16(), k.bfloat16(), v.bfloat16()).float(), "o: ")


def test_half_precision_only_in_the_backward() -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        low = plain(q.half(), k.half(), v.half()).float()
        return low + (plain(q, k, v) - low).detach()

    rejected(forward, "dq: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_percent_off(dtype: torch.dtype) -> None:
    def make(seed: int) -> tuple[Tensor, ...]:  # rows enough to tell 1 % from bf16's roundings
        g = torch.Generator().manual_seed(seed)
        return tuple(torch.randn(2, 4, 128, 16, generator=g).to(dtype).requires_grad_() for _ in range(3))

    def off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (1.01 * plain(q.float(), k.float(), v.float())).to(dtype)

    outcome = verify_and_time(off, plain, make, seconds=0.05, samples=(5, 5))
    assert not outcome.ok
    assert outcome.reason.startswith("o: ")


def test_wrong_only_for_odd_n() -> None:
    def odd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = plain(q, k, v)
        return torch.cat([o[:, :, :-1], 1.5 * o[:, :, -1:]], dim=2) if q.shape[2] % 2 else o

    rejected(odd, "o: ")


def test_a_tensor_that_computes_later() -> None:
    class Lazy(Tensor):
        pass

    rejected(lambda q, k, v: plain(q, k, v).as_subclass(Lazy), "o: is a Lazy")


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda q, k, v: plain(q, k, v)[:, :, :-1], "o: has shape"),
        (lambda q, k, v: plain(q, k, v).double(), "o: is torch.float64"),
        (lambda q, k, v: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_other_nonsense(fn: Attention, reason: str) -> None:
    rejected(fn, reason)


# ---------------------------------------------------------------------------------------------------- control


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("who", ["lightning eager", "lightning reference", "flash eager", "flash sdpa"])
def test_honest_kernels_are_never_rejected(who: str, dtype: str) -> None:
    op, backend = who.split()
    adapter = adapters.of(op)
    for seed in range(24 if dtype == "bfloat16" else 60):
        case = adapter.complete({"H": 2, "N": (15, 33, 64)[seed % 3], "D": 16, "dtype": dtype, "causal": True})
        gate([adapter.small(case, CPU, seed)], adapter.attend(backend))


def test_plain_sdpa_is_never_rejected() -> None:
    from fulmen.bench.gate import YARDSTICKS

    for seed in range(60):
        formula = Formula(plain)
        for other in range(YARDSTICKS):
            x = inputs(1000 + 7 * seed + other, odd=True)
            formula.problem(x, x, ("q", "k", "v"), seed).expected()
        x = inputs(seed, odd=seed % 2 == 0)
        gate([formula.problem(x, x, ("q", "k", "v"), seed)], lambda x: scaled_dot_product_attention(*x))


def test_lightning_in_ten_lines() -> None:
    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).tril() @ v

    outcome = verify_and_time(fulmen.lightning_attention, reference, inputs, seconds=0.05, samples=(5, 8))
    assert outcome.ok, outcome.reason
