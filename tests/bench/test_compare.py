from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import Tensor

import fulmen
from fulmen import decay
from fulmen.__main__ import main
from fulmen.bench import compare

pytest.importorskip("scipy")

CPU = torch.device("cpu")
TINY = (8, 16, 32)


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lightning(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fulmen.lightning_attention(q, k, v, decay.alibi(q.shape[1]))


# ------------------------------------------------------------------------------------------- the fit


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5, 2.0])
def test_fit_recovers_an_exact_power(exponent: float) -> None:
    fit = compare.fit_exponent(compare.TOKENS, [3e-4 * n**exponent for n in compare.TOKENS])
    assert fit.value == pytest.approx(exponent, abs=1e-9)
    assert fit.high - fit.low < 1e-6


def test_fit_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(400):
        noise = (0.1 * torch.randn(len(compare.TOKENS), generator=generator)).exp().tolist()
        fit = compare.fit_exponent(compare.TOKENS, [n * x for n, x in zip(compare.TOKENS, noise, strict=True)])
        hits += fit.low <= 1.0 <= fit.high
    assert 0.91 <= hits / 400 <= 0.99  # 95 %, four standard errors either way


def test_fit_refuses_two_lengths() -> None:
    with pytest.raises(ValueError, match="at least three lengths"):
        compare.fit_exponent([512, 1024, 1024], [1.0, 2.0, 2.0])


# ------------------------------------------------------------------------------------------- the gate


def test_gate_passes_lightning_attention() -> None:
    assert compare.gate(lightning, CPU, torch.float32) < 1e-5


def one_percent_off(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return 1.01 * lightning(q, k, v)


def half_precision_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return lightning(q.half(), k.half(), v.half()).float()


def last_row_unwritten(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = lightning(q, k, v)
    return torch.cat([o[:, :, :-1], o[:, :, -1:] * torch.nan], dim=2)


def no_decay(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fulmen.lightning_attention(q, k, v)


def no_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return lightning(q.detach(), k.detach(), v.detach())


def no_gradient_of_k(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return lightning(q, k.detach(), v)


def twice_the_gradient_of_v(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return lightning(q, k, 2 * v - v.detach())


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (one_percent_off, "^o "),
        (half_precision_inside, "^o "),
        (last_row_unwritten, "^o is not finite"),
        (no_decay, "^o "),
        (no_gradient, "cut off"),
        (no_gradient_of_k, "^dk "),
        (twice_the_gradient_of_v, "^dv "),
    ],
)
def test_gate_rejects(attend: compare.Attention, reason: str) -> None:
    with pytest.raises(compare.WrongResult, match=reason):
        compare.gate(attend, CPU, torch.float32)


def test_a_wrong_kernel_is_not_timed(console: Console, tmp_path: Path) -> None:
    attends = {**compare.competitors(CPU), "lightning": one_percent_off}
    with pytest.raises(compare.WrongResult):
        compare.run(TINY, seconds=0, device=CPU, attends=attends, out=tmp_path / "x.jsonl", console=console)
    assert "speedup" not in printed(console)
    assert not (tmp_path / "x.jsonl").exists()


# -------------------------------------------------------------------------------------------- the run


def test_inputs_are_random_and_contiguous() -> None:
    for x in compare.make_inputs(64, CPU, torch.float32):
        assert x.is_contiguous()
        assert 0.9 < x.std().item() < 1.1


def test_run_returns_every_cell_and_prints_both_tables(console: Console) -> None:
    rows = compare.run(TINY, seconds=0, device=CPU, console=console)
    expected = {(n, p, c) for n in TINY for p in compare.PASSES for c in ("lightning", "sdpa")}
    assert {row[:3] for row in rows} == expected
    assert all(len(row.samples_ms) == compare.SWEEPS and min(row.samples_ms) > 0 for row in rows)
    text = printed(console)
    assert "speedup" in text
    assert "another function: linear against softmax" in text
    assert "95 % interval" in text


def test_competitors_take_turns_and_lengths_too(console: Console) -> None:
    order: list[tuple[str, int]] = []

    def spy(name: str, attend: compare.Attention) -> compare.Attention:
        def spied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            order.append((name, q.shape[2]))
            return attend(q, k, v)

        return spied

    attends = {name: spy(name, attend) for name, attend in compare.competitors(CPU).items()}
    compare.run(TINY, seconds=0, device=CPU, attends=attends, console=console)
    timed = order[-compare.SWEEPS * len(TINY) * len(compare.PASSES) * 2 :]
    sweeps = [timed[i : i + 12] for i in range(0, len(timed), 12)]
    assert all({n for _, n in sweep} == set(TINY) for sweep in sweeps)
    first = [sweep[0][0] for sweep in sweeps]
    assert set(first) == {"lightning", "sdpa"}


def test_an_interrupt_prints_what_is_done(console: Console, tmp_path: Path) -> None:
    calls = 0

    def interrupted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 2 * 3 * 20 + 3 * 2 * 2:  # past the warm-up and two sweeps
            raise KeyboardInterrupt
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    attends = {**compare.competitors(CPU), "sdpa": interrupted}
    with pytest.raises(KeyboardInterrupt):
        compare.run(TINY, seconds=1e3, device=CPU, attends=attends, out=tmp_path / "x.jsonl", console=console)
    assert "interrupted" in printed(console)
    assert "speedup" in printed(console)
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) > 1


def test_command_line_writes_well_formed_json_lines(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    arguments = ["bench", "--device", "cpu", "--seconds", "0", "--out", str(out)]
    result = CliRunner().invoke(main, arguments + [x for n in TINY for x in ("-n", str(n))])
    assert result.exit_code == 0, result.output
    environment, *rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert environment["record"] == "environment"
    assert environment["torch"] == torch.__version__
    assert {"triton", "device", "threads", "commit", "dtype", "time"} <= environment.keys()
    assert len(rows) == len(TINY) * 4
    assert {row["record"] for row in rows} == {"row"}
    assert {(r["tokens"], r["pass"], r["competitor"]) for r in rows} == {
        (n, p, c) for n in TINY for p in compare.PASSES for c in ("lightning", "sdpa")
    }
    assert all(len(row["samples_ms"]) == compare.SWEEPS for row in rows)


def test_command_line_names_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "competitors", lambda device: {"lightning": one_percent_off})
    result = CliRunner().invoke(main, ["bench", "--device", "cpu", "-n", "8"])
    assert result.exit_code == 1
    assert "not timed" in result.output
    assert "speedup" not in result.output


@pytest.mark.gpu
def test_runs_on_a_gpu(console: Console) -> None:
    rows = compare.run((128, 256, 512), seconds=0.1, device=torch.device("cuda"), console=console)
    assert len(rows) == 12
