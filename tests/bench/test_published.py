"""The tables of five published reports (numbers only, under `data/`) and what is wrong with each of them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from fulmen.__main__ import main
from fulmen.bench import published, published_tables, schema
from fulmen.bench.published import Finding, audit_file
from fulmen.bench.published_tables import Number, parse_number

DATA = Path(__file__).parent / "data"


def found(findings: list[Finding], flag: str) -> list[Finding]:
    return [f for f in findings if f.flag == flag]


def wrong(findings: list[Finding]) -> set[str]:
    return {f.flag for f in findings if f.flag in (*published.BAD, *published.DOUBTFUL)}


# ---------------------------------------------------------------------------------------------- five reports


def test_000_gradients_that_take_no_memory_and_one_kernel_with_two_names() -> None:
    findings = audit_file(DATA / "000.md")
    assert wrong(findings) == {"IMPOSSIBLE", "SAME-KERNEL"}
    impossible = found(findings, "IMPOSSIBLE")
    assert all("memory backward" in f.what for f in impossible)
    assert {f.what.split(",")[0] for f in impossible} >= {"LA3-Original", "LA3-Chunked"}
    first = next(f for f in impossible if "LA3-Original" in f.what and "N=1024" in f.what)
    assert "50.33 MB" in first.why
    (same,) = found(findings, "SAME-KERNEL")  # and not FlashAttention-2 with SDPA
    assert same.what == "LA3-Original and LA3-Chunked"


def test_001_numbers_that_differ_between_summary_and_detail() -> None:
    findings = audit_file(DATA / "001.md")
    assert wrong(findings) == {"INCONSISTENT", "SUSPECT"}
    twice = [f for f in found(findings, "INCONSISTENT") if "000.md" not in f.why]
    assert all(f.what.startswith("LA3-Chunked") for f in twice)
    assert any("7.52x" in f.why and "7.31x" in f.why for f in twice)
    assert any("7.52x" in f.why and "7.36x" in f.why for f in twice)
    assert any("2.44 ms" in f.why and "2.506 ms" in f.why for f in twice)


def test_001_above_the_rated_peak_is_suspect_and_not_impossible() -> None:
    suspect = found(audit_file(DATA / "001.md"), "SUSPECT")
    assert {f.what for f in suspect} == {
        "PyTorch-SDPA, forward, B=4 H=32 N=8192 D=64",
        "FlashAttn-2, forward, B=4 H=32 N=8192 D=64",
    }
    (sdpa,) = (f for f in suspect if "SDPA" in f.what)
    assert "220.6 TFLOP/s" in sdpa.why
    assert "209.5 TFLOP/s" in sdpa.why


def test_001_the_same_kernel_took_half_the_time_in_000() -> None:
    other = [f for f in found(audit_file(DATA / "001.md"), "INCONSISTENT") if "000.md" in f.why]
    assert {f.what.split(",")[0] for f in other} == {"LA3-Original"}
    assert any("0.599 ms here, 0.32 ms" in f.why for f in other)


def test_002_labels_and_memory() -> None:
    findings = audit_file(DATA / "002.md")
    assert wrong(findings) == {"IMPOSSIBLE", "MISLABELLED"}
    (label,) = found(findings, "MISLABELLED")
    assert "all 12 times equal those for B=4 H=32 D=64 in 001.md" in label.why
    assert "B=2 H=32 D=128" in label.what
    chunked, sdpa = found(findings, "IMPOSSIBLE")
    assert chunked.what == "LA3-Chunked, memory peak, B=2 H=32 N=8192 D=128"
    assert "939.5 MB" in chunked.why
    assert sdpa.what.startswith("PyTorch-SDPA, memory peak")  # 740 MB: less than six tensors, too


def test_002_is_linear_as_it_says() -> None:
    notes = {f.what: f.why for f in found(audit_file(DATA / "002.md"), "NOTE")}
    assert "N^1.054" in notes["LA3-Chunked, total"]
    assert "N^1.776" in notes["PyTorch-SDPA, total"]
    assert notes["PyTorch-SDPA, total"].endswith("1.86")


def test_003_backward_faster_than_the_gpu() -> None:
    findings = audit_file(DATA / "003.csv")
    assert wrong(findings) == {"IMPOSSIBLE", "INCONSISTENT"}
    lines = (DATA / "003.csv").read_text().splitlines()
    impossible = found(findings, "IMPOSSIBLE")
    assert all(f.what.startswith("Triton, backward") for f in impossible)
    rows = [lines[int(f.where.rpartition(":")[2]) - 1].split(",") for f in impossible]
    # The others of its kind are slow enough: only their gradients would show that they are missing.
    assert [(r[0], r[2], r[3], r[4]) for r in rows] == [
        ("MHSA", "1", "4096", "32"), ("MHSA", "1", "2048", "40"),
        ("MHA", "1", "4096", "32"), ("MHA", "1", "2048", "40"),
        ("GQA", "2", "2048", "32"), ("GQA", "1", "4096", "32"), ("GQA", "1", "2048", "40"),
        ("MQA", "1", "4096", "32"), ("MQA", "1", "2048", "40"),
    ]  # fmt: skip
    assert "0.9097 ms" in impossible[0].why
    assert "311.9 TFLOP/s" in impossible[0].why


def test_003_totals_that_are_no_sums() -> None:
    sums = found(audit_file(DATA / "003.csv"), "INCONSISTENT")
    assert any(f.why.endswith("= 1.286 ms, total 0.9707 ms: -25 %") for f in sums)
    assert not any("H=32 H_KV=32 N=4096" in f.what for f in sums)  # 8.9353 + 0.9097 = 9.845 against 9.6654


def test_004_warm_cache_launches_and_a_sparse_peak() -> None:
    findings = audit_file(DATA / "004.jsonl")
    assert wrong(findings) == {"WARM-L2", "HOST-BOUND", "WRONG-CEILING"}
    warm = found(findings, "WARM-L2")
    assert [f.where for f in warm] == [f"004.jsonl:{n}" for n in (3, 4, 7, 8)]
    assert "393.8 GB/s" in warm[0].why
    assert "342.4 GB/s" in warm[1].why
    flat = found(findings, "HOST-BOUND")
    assert [f.where for f in flat] == ["004.jsonl:1", "004.jsonl:5"]
    assert "256 times the work" in flat[0].why
    (peak,) = found(findings, "WRONG-CEILING")
    assert peak.why == "242 TFLOP/s is the peak with sparsity; dense it is 121"


def test_speedups_of_the_reports_agree_with_their_times() -> None:
    for name in ("000.md", "001.md", "002.md", "003.csv"):
        assert not [f for f in audit_file(DATA / name) if "the times say" in f.why]


def test_002_is_read_without_a_map_and_against_001_the_labels_differ(tmp_path: Path) -> None:
    """Kernels are the columns, the unit is in the heading, the shape in a line of text."""
    for name in ("001.md", "002.md"):
        (tmp_path / name).write_text((DATA / name).read_text())
    # The summary of 001 does not say which pass it is of.
    (tmp_path / "001.toml").write_text('[[where]]\nheading = "*Summary*"\nfacts = { pass = "total" }\n')
    findings = audit_file(tmp_path / "002.md", against=[tmp_path / "001.md"])
    (label,) = found(findings, "MISLABELLED")
    assert "all 12 times equal those for B=4 H=32 D=64 in 001.md" in label.why
    assert "B=2 H=32 D=128" in label.what
    notes = {f.what: f.why for f in found(findings, "NOTE")}
    assert "N^1.776" in notes["PyTorch-SDPA, total"]
    assert "LA3-Chunked, backward" in notes


# ------------------------------------------------------------------------------------------------ small ones

HONEST = """\
# A report

- **GPU**: NVIDIA H200

| Kernel | B | H | SeqLen | D | dtype | causal | Fwd (ms) | Bwd (ms) | Total (ms) | Speedup | Peak (MB) |
|---|---|---|---|---|---|---|---|---|---|---|---|
| FA2 | 2 | 16 | 8192 | 128 | bf16 | yes | 3.50 | 9.79 | 13.20 | 1.00x | 1100 |
| flash ours | 2 | 16 | 8192 | 128 | bf16 | yes | 1.79 | 4.71 | 6.47 | 2.04x | 1100 |
"""


def write(tmp_path: Path, text: str, name: str = "report.md") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_an_honest_table_without_a_map(tmp_path: Path) -> None:
    findings = audit_file(write(tmp_path, HONEST + "\n"))
    assert wrong(findings) == set()
    assert not found(findings, "UNAUDITED")
    assert any("SeqLen = N" in f.why for f in found(findings, "NOTE"))


@pytest.mark.parametrize(
    ("old", "new", "flag"),
    [
        ("| 1.79 |", "| 0.50 |", "IMPOSSIBLE"),
        ("| 6.47 |", "| 5.00 |", "INCONSISTENT"),
        ("| 2.04x | 1100 |", "| 2.04x | 300 |", "IMPOSSIBLE"),
        ("| 1.79 |", "| 1.00 |", "INCONSISTENT"),
    ],
)
def test_a_table_with_one_wrong_number(tmp_path: Path, old: str, new: str, flag: str) -> None:
    assert flag in wrong(audit_file(write(tmp_path, HONEST.replace(old, new))))


def test_a_speedup_that_is_not_the_quotient(tmp_path: Path) -> None:
    toml = write(tmp_path, '[options]\nbaseline = "FA2"\n[columns]\n"Speedup" = "speedup pass=total"\n', "map.toml")
    assert wrong(audit_file(write(tmp_path, HONEST), toml)) == set()
    (only,) = found(audit_file(write(tmp_path, HONEST.replace("2.04x", "2.40x")), toml), "INCONSISTENT")
    assert only.why == "2.4x published, but the times say 2.04x"


def test_csv_with_semicolons_microseconds_and_tflops(tmp_path: Path) -> None:
    head = "gpu;provider;batch;heads;seqlen_q;headdim;precision;causal;mode;time_us;tflops\n"
    row = "NVIDIA H200;flash;1;32;4096;128;bf16;no;fwd;{};{}\n"
    assert wrong(audit_file(write(tmp_path, head + row.format(451, 610), "a.csv"))) == set()
    assert wrong(audit_file(write(tmp_path, head + row.format(45.1, ""), "b.csv"))) == {"IMPOSSIBLE"}
    assert wrong(audit_file(write(tmp_path, head + row.format("", 1500), "c.csv"))) == {"IMPOSSIBLE"}
    assert wrong(audit_file(write(tmp_path, head + row.format("", 1041), "d.csv"))) == {"SUSPECT"}


def test_times_that_are_none(tmp_path: Path) -> None:
    """Below 0 or 0 is wrong; a cell without a number is told of."""
    path = tmp_path / "t.csv"
    times = ["-1", "0", "nan", "", "OOM", "20"]
    rows = "".join(f"H100,flash,4,32,8192,64,bf16,yes,{t}\n" for t in times)
    path.write_text(f"gpu,op,B,H,N,D,dtype,causal,forward_ms\n{rows}")
    found = published.audit_file(path)
    assert [f.where for f in found if f.flag == "IMPOSSIBLE"] == ["t.csv:2", "t.csv:3"]
    (blank,) = (f.why for f in found if f.flag == "UNAUDITED")
    assert blank == "3 cells of columns of times hold no number: t.csv:4, t.csv:5, t.csv:6"


def test_a_column_called_op(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("gpu,op,B,H,N,D,dtype,causal,forward_ms\nH100,flash,4,32,8192,64,bf16,yes,0.1\n")
    assert [f.flag for f in published.audit_file(path) if f.flag in published.BAD] == ["IMPOSSIBLE"]


def test_iterations_per_second_against_the_time(tmp_path: Path) -> None:
    text = "kernel,N,total (ms),throughput\nflash,1024,0.32,{} iter/s\n"
    assert wrong(audit_file(write(tmp_path, text.format(3080.7), "a.csv"))) == set()
    assert wrong(audit_file(write(tmp_path, text.format(2000), "b.csv"))) == {"INCONSISTENT"}


KERNELS = """\
# H200, B=4, H=32, D=64

- GPU: NVIDIA H200

{} Forward + Backward Time (ms){}

| Sequence Length | LA3-Chunked | PyTorch-SDPA | Remark |
|---|---|---|---|
| 4096 | {} | 4.06 | fine |
| 8192 | 2.44 | 13.33 | fine |
"""


@pytest.mark.parametrize(("before", "after"), [("##", ""), ("**", "**"), ("", "")])
def test_columns_of_kernels_under_a_heading_with_the_unit(tmp_path: Path, before: str, after: str) -> None:
    findings = audit_file(write(tmp_path, KERNELS.format(before, after, "1.19")))
    assert wrong(findings) == set()
    (audited,) = found(findings, "AUDITED")
    assert audited.why == "4 of 4 times and sizes were compared with the hardware"
    assert not found(findings, "UNAUDITED")
    (only,) = found(audit_file(write(tmp_path, KERNELS.format(before, after, "0.01"))), "IMPOSSIBLE")
    assert only.what == "LA3-Chunked, total, B=4 H=32 N=4096 D=64"


@pytest.mark.parametrize(("mean", "times"), [("1.4", 2), ("1.4 ms", 4)])
def test_a_mean_is_a_time_only_if_a_unit_says_so(tmp_path: Path, mean: str, times: int) -> None:
    table = "| Kernel | Pass | Time (ms) | Mean |\n|---|---|---|---|\n"
    table += f"| flash, N=4096 | forward | 1.0 | {mean} |\n| flash, N=4096 | backward | 2.0 | {mean} |\n"
    assert len(published_tables.read(write(tmp_path, table)).rows) == times
    said = write(tmp_path, '[columns]\nMean = "time"\n', "map.toml")
    assert len(published_tables.read(write(tmp_path, table), said).rows) == 4


def shown(findings: list[Finding]) -> str:
    console = Console(file=io.StringIO(), width=240)
    published.render(findings, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_was_not_checked_is_not_called_right(tmp_path: Path) -> None:
    unknown = "| Kernel | Time (ms) |\n|---|---|\n| flash | 1.0 |\n"
    text = shown(audit_file(write(tmp_path, unknown)))
    assert "nothing wrong found" not in text
    assert text.splitlines()[-1].startswith("nothing audited; 1 could not be audited")
    other = "\n# Quality\n\n| Kernel | Grade | Mark |\n|---|---|---|\n| flash | 3 | 4 |\n"
    findings = audit_file(write(tmp_path, HONEST + other))
    (unread,) = found(findings, "UNAUDITED")
    assert unread.what == "table 2 (Quality)"
    assert unread.why.startswith("not read")
    assert "nothing wrong found; 1 could not be audited" in shown(findings)


def test_two_files_on_the_command_line_are_held_against_each_other(tmp_path: Path) -> None:
    one = write(tmp_path, KERNELS.format("##", "", "1.19"), "one.md")
    two = write(tmp_path, KERNELS.replace("D=64", "D=128").format("##", "", "1.19"), "two.md")
    alone = CliRunner().invoke(main, ["bench", "audit", str(one), "--fail-on", "wrong"])
    assert alone.exit_code == 0, alone.output
    both = CliRunner().invoke(main, ["bench", "audit", str(one), str(two), "--fail-on", "wrong"])
    assert both.exit_code == 1
    assert "MISLABELLED" in both.output


def test_an_unknown_gpu_is_unaudited(tmp_path: Path) -> None:
    findings = audit_file(write(tmp_path, HONEST.replace("NVIDIA H200", "Abacus 3000")))
    assert len(found(findings, "UNAUDITED")) == 6
    assert "Abacus 3000" in found(findings, "UNAUDITED")[0].why


def test_own_results_are_judged_again(tmp_path: Path) -> None:
    run = schema.Run(
        "r", "", "", {"device": "NVIDIA H200", "arch": 90, "sm_count": 132}, {},
        {"bytes_hard": 4.8e12, "clock_max_mhz": 1980.0},
    )  # fmt: skip
    case = {"B": 4, "H": 32, "N": 8192, "D": 64, "dtype": "bf16"}
    cell = schema.Cell("r", "s", "lightning", "linear attention", case, "fast", "forward", samples_ms=[0.01] * 9)
    cell.stats = {"median": 0.01}
    path = write(tmp_path, schema.dumps(run) + "\n" + schema.dumps(cell) + "\n", "own.jsonl")
    assert wrong(audit_file(path)) == {"IMPOSSIBLE"}


@pytest.mark.parametrize(
    ("text", "value", "half", "rest"),
    [
        ("**0.27 ms**", 0.27, 0.005, "ms"),
        ("1,024", 1024, 0.5, ""),
        ("7.47x (Triton)", 7.47, 0.005, "x (Triton)"),
        ("3.04M", 3.04, 0.005, "M"),
        ("~0.5", 0.5, 0.05, ""),
        (0.0421, 0.0421, 0.00005, ""),
        ("1.5e-3", 0.0015, 0.00005, ""),
    ],
)
def test_numbers(text: object, value: float, half: float, rest: str) -> None:
    parsed = parse_number(text)
    assert parsed is not None
    assert parsed[0] == pytest.approx(Number(value, half))
    assert parsed[1] == rest


@pytest.mark.parametrize("text", ["", "-", "OOM", "n/a", "1e999", "9" * 999])
def test_no_numbers(text: str) -> None:
    assert parse_number(text) is None


# ------------------------------------------------------------------------------------------- unreadable files


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.md", b"", "no times"),
        ("a.csv", b"", "no times"),
        ("a.jsonl", b"", "no times"),
        ("a.md", b"# nothing\n\nto see\n", "no times"),
        ("a.csv", b"\xff\xfe\x00\x01", "cannot be read"),
        ("a.csv", b"kernel,time\0\n", "binary"),
        ("a.jsonl", b'{"kernel": "x", "time_ms": 1.0}\n{"kernel": "x", "ti', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"[1, 2]\n", "must be an object"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
        ("a.jsonl", b'{"schema": "fulmen-bench/9", "kind": "run"}\n', "schema 'fulmen-bench/9'"),
    ],
)
def test_one_clear_error(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(schema.BadResults, match=words):
        audit_file(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[facts", "cannot be read"),
        ("[colums]\n", "unknown section colums"),
        ('facts = "x"\n', "must be a table"),
        ("where = [1]\n", "list of tables"),
        ('[columns]\n"Fwd (ms)" = "quickness"\n', "'quickness', must be one of"),
        ('[options]\nagainst = "x.md"\n', "list of files"),
        ("[options]\nbanana = 3\n", "unknown option banana; there are time_unit"),
    ],
)
def test_bad_maps(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(schema.BadResults, match=words):
        audit_file(write(tmp_path, HONEST), write(tmp_path, text, "map.toml"))


def test_absent_files(tmp_path: Path) -> None:
    with pytest.raises(schema.BadResults, match="cannot be read"):
        audit_file(tmp_path / "absent.md")
    with pytest.raises(schema.BadResults, match="cannot be read"):
        audit_file(write(tmp_path, HONEST), tmp_path / "absent.toml")


def test_render_prints_names_as_they_are(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=240)
    text = HONEST.replace("flash ours", "[bold]flash[/bold] <script>").replace("| 1.79 |", "| 0.50 |")
    findings = audit_file(write(tmp_path, text))
    published.render(findings, console)
    assert isinstance(console.file, io.StringIO)
    out = console.file.getvalue()
    assert "IMPOSSIBLE" in out
    assert "[bold]flash[/bold]" in out
    published.render([], console)
    assert "nothing wrong found" in console.file.getvalue()
    evil = audit_file(write(tmp_path, HONEST.replace("flash ours", "\x1b[2Jflash").replace("| 1.79 |", "| 0.50 |")))
    published.render(evil, console)
    assert "\x1b" not in console.file.getvalue()


def test_a_thousand_rows(tmp_path: Path) -> None:
    head, *rows = (DATA / "003.csv").read_text().splitlines()
    many = [row.replace(",", f"{i},", 1) for i in range(23) for row in rows][:1000]
    path = write(tmp_path, "\n".join([head, *many]), "many.csv")
    findings = audit_file(path, DATA / "003.toml")
    assert len(found(findings, "IMPOSSIBLE")) > 190
    page = published_tables.read(path, DATA / "003.toml")
    assert len(page.rows) == 4000
