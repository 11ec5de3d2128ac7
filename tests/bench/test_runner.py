from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fulmen import cuda, dispatch, hardware
from fulmen.bench import (
    Refused,
    adapters,
    cases,
    competitors,
    environment,
    kernels,
    runner,
    schema,
    screen,
    timing,
)
from fulmen.bench.cases import Line
from fulmen.bench.runner import Selection

TINY = ("B=1,H=2,N=32,D=16",)
QUICK: dict[str, Any] = {
    "device": "cpu",
    "shapes": TINY,
    "backends": ("eager",),
    "baselines": ("none",),
    "seconds": 0.0,
}


@pytest.fixture(autouse=True)
def no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, and judge nothing here."""
    monkeypatch.setattr(environment, "ceilings", lambda *_: {})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def cells(path: Path) -> list[schema.Cell]:
    return schema.read([path]).cells


Spoil = Callable[[competitors.Competitor, dict[str, Any]], None]


def spoiled(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """Changes who competes."""
    true = competitors.of

    def of(line: Line, device: torch.device, *more: Any) -> list[competitors.Competitor]:
        found = true(line, device, *more)
        for competitor in found:
            spoil(competitor, line.case)
        return found

    monkeypatch.setattr(competitors, "of", of)


# ---------------------------------------------------------------------------------------------- what is measured


def test_a_run_writes_every_cell_with_all_it_knows(out: Path) -> None:
    selection = Selection(("quick",), device="cpu", shapes=TINY, backends=("auto",), baselines=("sdpa",), seconds=0.0)
    record = runner.run(selection, out)
    results = schema.read([out])
    assert results.runs == {record.run_id: record}
    assert record.environment["torch"] == torch.__version__
    assert record.commit["source"]
    found = {(c.op, c.competitor, c.pass_) for c in results.cells}
    assert ("lightning", "fulmen auto", "total") in found
    assert ("flash", "sdpa", "backward") in found
    for cell in results.cells:
        assert cell.status == "ok", cell.reason
        assert len(cell.samples_ms) >= 5
        assert cell.stats["n"] == len(cell.samples_ms)
        assert cell.host_ms is not None
        assert {"o", "dq", "dk", "dv"} <= set(cell.correctness) or cell.case.get("grad") is False
        assert cell.memory["peak"]["bytes"] >= cell.memory["peak"]["floor"] > 0
        assert cell.backend
        assert f"--pass {cell.pass_}" in cell.command
        assert cell.seed == record.environment["seed"]
    softmax = [c for c in results.cells if c.suite == "quick" and "decay" in c.case and c.competitor == "sdpa"]
    assert softmax
    assert all(c.function == "causal softmax attention" and "ANOTHER-FUNCTION" in c.flags() for c in softmax)


def test_the_command_of_a_cell_finds_that_cell_alone(out: Path) -> None:
    runner.run(Selection(("quick",), **QUICK), out)
    for cell in cells(out)[:2]:
        words = cell.command.split()
        selection = Selection(
            (words[3],), words[words.index("--device") + 1], None, (words[words.index("--backend") + 1],),
            (words[words.index("--baseline") + 1],), (words[words.index("--pass") + 1],),
            (words[words.index("--shape") + 1],), 0.0, int(words[words.index("--seed") + 1]),
        )  # fmt: skip
        again = out.with_name(f"{cell.pass_}.jsonl")
        runner.run(selection, again)
        assert [c.config_hash for c in cells(again)] == [cell.config_hash]
        assert {c.seed for c in cells(again)} == {cell.seed}


def test_rounds_interleave_and_shuffle(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def spoil(competitor: competitors.Competitor, case: dict[str, Any]) -> None:
        attend = competitor.attend

        def spied(x: Any) -> Any:
            order.append(competitor.name)
            return attend(x)

        competitor.attend = spied

    spoiled(monkeypatch, spoil)
    selection = Selection(("quick",), **QUICK | {"baselines": ("sdpa",), "passes": ("forward",), "seconds": 1.0})
    runner.run(selection, out)
    names = {c.competitor for c in cells(out)}
    last = order[-42:-2]  # where pairs begin is not known, and one may end earlier: how often the turn changes is
    assert len(names) == 2
    assert sum(x != y for x, y in itertools.pairwise(last)) >= 10


def test_the_first_call_of_a_process_and_a_loop_of_calls(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'backends = ["eager"]\nfirst_call = true\nloop = 2\ncases = [{op = "flash", N = 32, D = 16}]'
    monkeypatch.setattr(cases, "text_of", lambda suite: text)
    runner.run(Selection(("startup",), device="cpu", passes=("forward",), seconds=0.0), out)
    (cell,) = cells(out)
    assert cell.status == "ok", cell.reason
    assert cell.stats["first_call_s"] > 0
    assert cell.stats["loop"] > 0


# ---------------------------------------------------------------------------------------------------- statuses


def test_a_wrong_kernel_is_a_row_without_a_time(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(competitor: competitors.Competitor, case: dict[str, Any]) -> None:
        attend = competitor.attend
        competitor.attend = lambda x: 1.01 * attend(x)
        competitor.fully = None

    spoiled(monkeypatch, spoil)
    runner.run(Selection(("quick",), **QUICK), out)
    for cell in cells(out):
        assert cell.status == "failed"
        assert cell.reason.startswith("o: ")
        assert not cell.correctness["o"]["ok"]
        assert not cell.samples_ms
        assert not cell.stats


def test_larger_n_are_skipped_after_running_out_of_memory(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(competitor: competitors.Competitor, case: dict[str, Any]) -> None:
        attend = competitor.attend

        def greedy(x: Any) -> Any:
            if x.q.shape[2] == 48:
                raise torch.OutOfMemoryError("tried to allocate 7 GiB")
            return attend(x)

        competitor.attend = greedy

    spoiled(monkeypatch, spoil)
    shapes = tuple(f"B=1,H=2,N={n},D=16" for n in (32, 48, 64, 80))
    selection = Selection(("lightning",), dtype="fp32", **QUICK | {"shapes": shapes, "passes": ("forward",)})
    runner.run(selection, out)
    found = {(c.case["N"], c.case["decay"]): (c.status, c.reason) for c in cells(out)}
    assert [found[n, True][0] for n in (32, 48, 64, 80)] == ["ok", "oom", "skipped", "skipped"]
    assert "7 GiB" in found[48, True][1]
    assert "N=48" in found[80, False][1]


def test_a_call_that_takes_too_long_is_a_timeout(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'op = "lightning"\nbackends = ["eager"]\nlimit = 0.001\nwarmup = 1\ncases = [{B = 1, H = 4, N = 512, D = 64}]'
    )
    monkeypatch.setattr(cases, "text_of", lambda suite: text)
    runner.run(Selection(("quick",), device="cpu"), out)
    assert {c.status for c in cells(out)} == {"timeout"}
    assert "more than 0.001" in cells(out)[0].reason


def test_what_a_backend_cannot_do_is_a_row_with_its_sentence(out: Path) -> None:
    selection = Selection(
        ("quick",), **QUICK | {"backends": ("none",), "baselines": ("sdpa-cudnn", "fla-chunk", "flash-attn")}
    )
    runner.run(selection, out)
    assert {c.status for c in cells(out)} == {"unsupported"}
    assert all(c.reason for c in cells(out))


def test_absent_packages_are_reasons() -> None:
    absent, there = (competitors.installed(name, "that package") for name in ("no_such_package_anywhere", "torch"))
    assert absent({}, torch.device("cpu")) == "that package is not installed"
    assert there({}, torch.device("cpu")) is None
    case = {"B": 1, "H": 2, "H_KV": 2, "N": 8, "D": 16, "E": 16, "dtype": "bfloat16", "causal": True, "decay": True}
    for name, baseline in competitors.BASELINES.items():
        assert baseline.refusal(case, torch.device("cpu")) is None or name != "sdpa"
        assert isinstance(baseline.version(), str)


# ---------------------------------------------------------------------------------------- interrupts and resuming


def interrupting(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    seen = 0

    def spoil(competitor: competitors.Competitor, case: dict[str, Any]) -> None:
        attend = competitor.attend

        def interrupted(x: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == calls:
                raise KeyboardInterrupt
            return attend(x)

        competitor.attend = interrupted

    spoiled(monkeypatch, spoil)


@pytest.mark.parametrize("calls", [3, 60])
def test_an_interrupt_keeps_what_is_done_and_resume_goes_on(
    out: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    selection = Selection(("quick",), **QUICK)
    with monkeypatch.context() as patch:
        interrupting(patch, calls)
        with pytest.raises(KeyboardInterrupt):
            runner.run(selection, out)
    before = cells(out)
    assert "interrupted" in {c.status for c in before}
    with pytest.raises(Refused, match="--resume"):
        runner.run(selection, out)
    runner.run(selection, out, resume=True)
    after = schema.read([out])
    assert len(after.runs) == 1
    assert {c.status for c in after.cells} == {"ok"}
    kept = {c.config_hash: c.samples_ms for c in before if c.status == "ok"}
    assert all(c.samples_ms == kept[c.config_hash] for c in after.cells if c.config_hash in kept)
    size = out.stat().st_size
    runner.run(selection, out, resume=True)
    assert out.stat().st_size == size


def test_a_line_cut_off_is_dropped_when_resuming(out: Path) -> None:
    selection = Selection(("quick",), **QUICK | {"passes": ("forward",)})
    runner.run(selection, out)
    whole = out.read_text()
    out.write_text(whole[:-200])
    runner.run(selection, out, resume=True)
    assert len(cells(out)) == len(whole.splitlines()) - 1


def test_resuming_elsewhere_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selection = Selection(("quick",), **QUICK | {"passes": ("forward",)})
    runner.run(selection, out)
    monkeypatch.setattr(environment, "source_hash", lambda: "another")
    with pytest.raises(Refused, match="another source"):
        runner.run(selection, out, resume=True)


# ------------------------------------------------------------------------------------------------------ suites


@pytest.mark.parametrize("suite", cases.names())
def test_suites_are_well_formed(suite: str) -> None:
    assert cases.description(suite)
    for line in runner.lines_of(Selection((suite,)), torch.device("cpu")):
        assert any(competitors.rivals(line))
        assert set(line.settings.passes) <= set(schema.PASSES)


def test_a_new_backend_competes_without_an_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    from fulmen import dispatch

    line = next(line for line in cases.read("lightning"))
    kernel = dispatch.kernels("lightning")["eager"]._replace(name="brand_new")
    monkeypatch.setitem(dispatch._kernels["lightning"], "brand_new", kernel)
    names, _ = competitors.rivals(line)
    assert "brand_new" in names
    assert "eager" not in names
    assert "reference" not in names
    assert competitors.rivals(line, ["triton"], ["none"]) == (["triton"], [])


def test_a_backend_is_not_the_baseline_of_its_name() -> None:
    line = runner.lines_of(Selection(("flash",)), torch.device("cpu"))[0]
    ours, baseline = (
        competitors.of(line, torch.device("cpu"), *names)[0] for names in ((["sdpa"], ["none"]), (["none"], ["sdpa"]))
    )
    assert (ours.name, baseline.name) == ("fulmen sdpa", "sdpa")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"suites": ("nonsense",)}, "there are decode, flash"),
        ({"backends": ("trion",)}, "no backend 'trion'"),
        ({"baselines": ("nobody",)}, "no baseline 'nobody'"),
        ({"shapes": ("N",)}, "must be key=value"),
        ({"shapes": ("Q=3",)}, "a case says"),
        ({"shapes": ("N=abc",)}, "N=abc: must be a whole number above 0"),
        ({"shapes": ("N=0",)}, "N=0: must be a whole number above 0"),
        ({"shapes": ("B=yes",)}, "B=True: must be a whole number above 0"),
        ({"shapes": ("causal=banana",)}, "causal=banana: must be yes or no"),
        ({"shapes": ("grad=0",)}, "grad=0: must be yes or no"),
        ({"shapes": ("N=128,N=256",)}, "N is given twice; several values are several --shape"),
        ({"shapes": ("",)}, "must be key=value"),
        ({"shapes": ("B=1,H=3,H_KV=2",)}, "H=3 is no multiple of H_KV=2"),
        ({"dtype": "bf17"}, "dtype=bf17: must be one of bf16, fp16, fp32, fp64"),
        ({"dtype": "int8"}, "must be one of bf16"),
        ({"device": "spoon"}, "must be cpu, cuda"),
        ({"device": "mps"}, "runs on cpu and cuda"),
        ({"backends": ("none",), "baselines": ("none",)}, "nobody competes"),
    ],
)
def test_what_is_wrong_is_said_and_leaves_no_file(out: Path, more: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {"suites": ("quick",)} | QUICK | more
    with pytest.raises(Refused, match=re.escape(why)):
        runner.run(Selection(**given), out)
    assert not out.exists()


def test_yes_and_no_in_any_case() -> None:
    assert cases.shape("causal=False,decay=YES") == {"causal": False, "decay": True}


def test_cases_whose_heads_do_not_divide_those_asked_for_are_left_out() -> None:
    lines = runner.lines_of(Selection(("quick",), shapes=("op=flash,B=1,H=3,N=128",)), torch.device("cpu"))
    assert lines
    assert all(line.case["H"] == line.case["H_KV"] == 3 for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flash B", "line 1"),
        ('op = "flash"', "cases must be a list of tables"),
        ("cases = [{N = 8}]", "case 1: op is missing"),
        ('cases = [{op = "flash", seconds = "many"}]', "case 1: seconds = 'many': must be like 0.4"),
        ('cases = [{op = "flash", samples = 9}]', "case 1: samples = 9: must be like"),
    ],
)
def test_a_bad_suite_says_where(text: str, words: str) -> None:
    with pytest.raises(Refused, match=f"suite x.*{words}"):
        cases.parse(text, "x")


@pytest.mark.parametrize(
    ("case", "words"), [('op = "flsh"', "must be one of flash"), ('op = "flash", speed = 9', "flash has no speed")]
)
def test_a_case_that_no_operation_has(case: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "text_of", lambda suite: f"cases = [{{{case}}}]")
    with pytest.raises(Refused, match=words):
        runner.lines_of(Selection(("quick",)), torch.device("cpu"))


def test_a_list_of_values_makes_a_case_of_each() -> None:
    text = 'op = "flash"\ncausal = [true, false]\nseconds = 2\ncases = [{N = [8, 16], passes = ["forward"]}, {N = 8}]'
    lines = cases.parse(text, "x")
    assert [(line.case["causal"], line.case["N"]) for line in lines] == [
        (True, 8), (True, 16), (False, 8), (False, 16), (True, 8), (False, 8),
    ]  # fmt: skip
    assert [line.settings.passes for line in lines[3:5]] == [("forward",), ("forward", "backward", "total")]
    assert {line.settings.seconds for line in lines} == {2}


def test_a_shape_selects_or_makes_cases() -> None:
    lines, keys = cases.read("lightning"), {"lightning": {"B", "H", "H_KV", "N", "D", "dtype", "decay"}}
    assert {line.case["N"] for line in cases.select(lines, [{"N": 2048}], keys)} == {2048}
    made = cases.select(lines, [{"N": 77}], keys)
    assert {line.case["N"] for line in made} == {77}
    assert len(made) == 4  # two head dims, with decay and without


# ------------------------------------------------------------------------------------- as on a GPU, without one


class Elsewhere:
    """Another process that fails before our group has begun."""

    done = False

    def prepare(self, line: Line) -> None:
        raise Refused("--base HEAD: the process ended")


def test_a_base_that_dies_first_leaves_rows_where_nvml_is_asked(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvml(timing.Nvml):
        def __init__(self, device: torch.device) -> None:
            self.nvml, self.handle = object(), None

        def clock_mhz(self) -> float:
            return 1980.0

        def facts(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(timing, "Nvml", Nvml)
    with pytest.raises(Refused, match="the process ended"):
        runner.run(Selection(("quick",), **QUICK), out, other=Elsewhere())
    assert {(c.status, c.reason) for c in cells(out)} == {("interrupted", "before it began")}


HOPPER = hardware.TARGETS[90]


def jobs_of(suite: str) -> list[kernels.Job]:
    lines = runner.lines_of(Selection((suite,)), torch.device("cuda"))
    return [job for jobs in kernels.jobs_of([(line, ["cuda"]) for line in lines], HOPPER) for job in jobs]


def test_kernels_in_cuda_are_found_before_anybody_is_asked() -> None:
    for suite, least in (("flash", 6), ("flash-small", 4), ("layers", 4), ("lightning", 4)):
        recorded = [kernels.launches(*job[:2], HOPPER, job.backend, "total", job.fully) for job in jobs_of(suite)]
        found = {x.variant for every in recorded for x in every if isinstance(x, cuda.Launch)}
        assert len(found) >= least
        ops = {"lightning": {"lightning"}, "layers": {"flash", "lightning"}}.get(suite, {"flash"})
        assert {v.source.split("/")[0] for v in found} == ops


def test_what_cannot_be_compiled_ahead_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(variant: Any) -> bytes:
        raise cuda.Unavailable("no compiler")

    jobs = jobs_of("flash-small")
    monkeypatch.setattr(kernels, "compiled", gone)
    monkeypatch.setattr(cuda, "cubin", gone)
    assert kernels.compile_jobs(jobs, HOPPER) == 0
    monkeypatch.setattr(cuda, "cubin", lambda variant: b"code")
    assert kernels.compile_jobs(jobs, HOPPER) >= 4


def test_resources_of_cuda_and_of_its_backward() -> None:
    """Our own: two launches. cuDNN's, of which nothing is known, where few tiles of keys serve many queries."""
    case = runner.lines_of(Selection(("flash",)), torch.device("cuda"))[0].case | {"causal": True}
    own, name = HOPPER._replace(cudnn=0), "cuda (cuda_sm90.cu, some tiles)"
    for D in (128, 256):
        launches = kernels.launches("flash", case | {"D": D, "E": D}, HOPPER, name, "total")
        assert [type(x) for x in launches] == [cuda.Launch] * 3
    assert launches[0].threads % 128 == 0
    assert 0 < launches[0].shared <= HOPPER.smem_bytes
    assert 0 < launches[0].grid[0] <= 2 * HOPPER.sm_count
    case |= {"B": 1, "H": 40, "H_KV": 8, "N": 2048, "N_Q": 2048, "D": 128, "E": 128}
    assert [type(x) for x in kernels.launches("flash", case, HOPPER, name, "total")] == [cuda.Launch]
    assert [type(x) for x in kernels.launches("flash", case, own, name, "total")] == [cuda.Launch] * 3
    assert not kernels.launches("flash", case, HOPPER, "sdpa (cuDNN)", "total")


def test_a_backend_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether `cuda` serves a case takes it a compilation: who asks for triton need not wait for that."""
    asked: list[str] = []
    for name, kernel in dispatch.kernels("flash").items():
        spied = kernel._replace(supports=lambda spec, name=name: asked.append(name))
        monkeypatch.setitem(dispatch._kernels["flash"], name, spied)
    monkeypatch.setattr(dispatch, "choose", lambda op, spec, name: dispatch.Choice(name, name, None, 1, name))
    case = adapters.of("flash").complete({"dtype": "bfloat16"})
    assert adapters.taken("flash", case, torch.device("cuda"), "triton") == "triton"
    assert set(asked) == {"triton"}
    with pytest.raises(NotImplementedError, match="no backend 'warp'"):
        adapters.taken("flash", case, torch.device("cuda"), "warp")


# -------------------------------------------------------------------------------------------------- on screen


@pytest.mark.parametrize("terminal", [True, False])
def test_the_screen_shows_verdicts(out: Path, terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=terminal)
    selection = Selection(("quick",), **QUICK | {"passes": ("forward",), "baselines": ("sdpa-cudnn",)})
    with screen.Screen(console) as watched:
        runner.run(selection, out, monitor=watched)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "fulmen eager" in text
    assert "unsupported" in text
    assert "ok" in text
    assert "cells to measure" in text


@pytest.mark.gpu
def test_a_run_on_a_gpu(out: Path) -> None:
    selection = Selection(("quick",), shapes=("B=2,H=4,N=256,D=64",), seconds=0.05, kernels=True)
    runner.run(selection, out)
    found = cells(out)
    assert {c.status for c in found} <= {"ok", "unsupported", "withheld"}, [c.reason for c in found]
    assert {c.cache for c in found} == {"cold", "hot"}
    assert any(c.device_ms for c in found)
    timed = [c for c in found if c.status == "ok"]
    assert all(c.kernels and c.kernels_ms for c in timed), [(c.competitor, c.kernels) for c in timed]
    ours = [c for c in found if c.backend.startswith(("triton", "cuda")) and c.status != "unsupported"]
    assert {c.backend.partition(" ")[0] for c in ours} >= {"triton"}
    assert all(c.resources for c in ours)


def test_a_shape_of_one_kind_of_layer_is_made_of_its_lines() -> None:
    for shape, count in (("layer=gqa,B=1,N=64,H=4,H_KV=2,D=32", 1), ("layer=mla,B=1,N=64,H=4,D=48,E=32,rank=32", 1)):
        lines = runner.lines_of(Selection(("layers",), shapes=(shape,)), torch.device("cpu"))
        assert len(lines) == count
