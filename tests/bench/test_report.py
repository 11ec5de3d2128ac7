"""The report's files: what they say, that they say it every time, and what they refuse."""

from __future__ import annotations

import base64
import csv
import functools
import gzip
import io
import json
import re
import time
import zlib
from dataclasses import replace

import pytest
from click.testing import CliRunner

from fulmen.__main__ import main
from fulmen.bench import audit, comparing, report, schema, words
from fulmen.bench.report import content, model, plots
from tests.bench import sample_results


@pytest.fixture(scope="module")
def results():
    return sample_results.make(samples=20)


@pytest.fixture(scope="module")
def read(results):
    return model.read(results)


@pytest.fixture(scope="module")
def page(read):
    return report.html(read)


def data_of(page: str) -> dict:
    found = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def test_writes_all_files_and_the_same_twice(results, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "MAX_PANELS", 1)
    some = schema.Results(
        results.runs, [cell for cell in results.cells if (cell.suite, cell.pass_) == ("flash", "forward")]
    )
    first = report.write(some, tmp_path / "a")
    second = report.write(some, tmp_path / "b")
    names = [str(path.relative_to(tmp_path / "a")) for path in first]
    pictures = [f"plots/{kind}-flash.png" for kind in ("speedup", "scaling", "roofline", "memory")]
    assert names == ["report.html", "report.md", "results.csv", *pictures]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes(), a.name


def test_reading_changes_nothing(results):
    before = list(sample_results.lines(results))
    model.read(results)
    assert list(sample_results.lines(results)) == before


def test_the_page_asks_nothing_of_the_network(page):
    assert "default-src 'none'" in page
    assert "unsafe" not in page.split("</head>")[0].split("Content-Security-Policy")[1].split(">")[0]
    outside = re.sub(r'<script type="text/plain".*?</script>', "", page, flags=re.S).replace(
        "http://www.w3.org/2000/svg", ""
    )
    assert not re.search(r"https?://|//cdn|@import|url\((?!#)", outside)
    assert "innerHTML" not in outside
    assert "insertAdjacentHTML" not in outside


def test_no_time_of_a_cell_that_does_not_count(results):
    cells = [schema.parse(schema.dumps(cell), "test") for cell in results.cells[:30]]
    assert all(isinstance(cell, schema.Cell) for cell in cells)
    cells[4].status, cells[4].reason = "failed", "dk is wrong"  # the samples are still there
    cells[4].samples_ms, cells[4].stats, cells[4].device_ms = [0.123456], {"median": 0.123456}, 0.123456
    again = model.read(schema.Results(results.runs, cells))
    texts = {"html": json.dumps(data_of(report.html(again))), "md": report.markdown(again), "csv": report.table(again)}
    for name, text in texts.items():
        assert "0.12345" not in text, name
    assert "dk is wrong" in texts["md"]


def test_csv(read):
    lines = list(csv.DictReader(io.StringIO(report.table(read))))
    assert len(lines) == len(read.rows)
    first = lines[0]
    assert float(first["median_ms"]) == read.rows[0].median
    assert first["case_N"] == "1024"
    assert {line["status"] for line in lines} >= {"ok", "failed", "oom", "unsupported", "withheld", "timeout"}
    assert all(line["median_ms"] == "" for line in lines if line["status"] != "ok")


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\n=1", "|x", "%x"])
def test_csv_guards_against_formulas(text):
    assert report.guarded(text) == "'" + text
    assert report.guarded(-1.5) == -1.5
    assert report.guarded("a-1") == "a-1"


def test_markdown(read):
    text = report.markdown(read)
    assert "311 of 324 cells proven right" in text
    assert "### B4 H32 D64 · bf16 · causal · decay" in text
    for heading in ("Environment", "Scaling", "Memory", "Correctness", "Without a number", "What the words mean"):
        assert f"## {heading}" in text
    for table_ in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table_.splitlines()}
        assert len(widths) == 1, table_[:200]


def test_payload(read, page):
    data = data_of(page)
    assert len(data["rows"]) == len(data["cells"]["lines"]) == 324
    assert sum(tile[2] for tile in data["tiles"]) == 324
    assert data["tiles"][0][0] == "ok"
    assert data["rows"][7]["samples"] == pytest.approx(read.rows[7].cell.samples_ms, rel=2e-4)
    assert read.baselines == {"lightning": "sdpa-fa2", "flash": "sdpa-fa2"}
    assert any(fit.growth == "O(n)" for fit in read.fits.values())
    views = {(one["suite"], one["pass_"]) for one in data["sections"] if one["name"] == "speed"}
    assert views == {(suite, pass_) for suite in ("lightning", "flash") for pass_ in schema.PASSES}


def test_every_word_is_explained():
    statuses = {"ok", "failed", "oom", "unsupported", "timeout", "withheld", "interrupted", "skipped"}
    assert set(words.STATUSES) == set(schema.STATUSES) == statuses
    assert set(words.FLAGS) == {*audit.OURS, *audit.GROUPS, "SIDE-STREAM"}
    assert set(comparing.VERDICTS) == {"FASTER", "SLOWER", "SAME", "INCONCLUSIVE", "INCOMPARABLE"}


def test_hostile_text_stays_text(tmp_path):
    written = report.write(sample_results.hostile(), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script") == 2
    assert "<img" not in page
    outside_code = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", (tmp_path / "report.md").read_text())
    assert "<" not in outside_code
    lines = list(csv.reader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert not any(field.startswith("=") for line in lines for field in line)
    assert all(path.is_relative_to(tmp_path) for path in written)
    assert all(re.fullmatch(r"[a-z0-9-]+\.png", p.name) for p in written if p.suffix == ".png")


def test_odd_values_are_survived(tmp_path):
    """Lone surrogates, huge and tiny numbers, no stats, unknown flags, one sample, sizes nobody knows."""
    results = sample_results.make(samples=8)
    cells = [cell for cell in results.cells if cell.suite == "flash"][:24]
    cells[0].competitor = "\ud800 lone"
    cells[1].stats = {}
    cells[2].samples_ms, cells[2].stats = [1e-9], {"median": 1e-9}
    cells[3].samples_ms, cells[3].stats = [1e9, 1e9], {"median": 1e9, "low": None}
    cells[4].audit = {"flags": [{"flag": "NEW-FLAG"}, {}]}
    cells[5].memory = {"peak": {}}
    cells[6].correctness = {"o": {"error": float("nan"), "bound": 0.0}}
    cells[7].case = {"shape": [1, 2, 3], "x": None}
    cells[8].case = {}
    results.runs[cells[0].run_id].ceilings = {}
    report.write(schema.Results(results.runs, cells), tmp_path)
    data = data_of((tmp_path / "report.html").read_text())
    assert len(data["rows"]) == 24


def test_a_compressed_file_is_read_and_a_broken_one_refused(results, tmp_path):
    path = tmp_path / "run.jsonl.gz"
    data = gzip.compress("".join(sample_results.lines(results)).encode())
    path.write_bytes(data)
    assert schema.read([path]).cells == results.cells
    for broken in (b"no gzip", data[:-100], data[:200] + b"xxxx" + data[204:]):
        path.write_bytes(broken)
        with pytest.raises(schema.BadResults, match=r"run\.jsonl\.gz: cannot be read"):
            schema.read([path])


def bad_files():
    good = list(sample_results.lines(sample_results.make(samples=6)))[:4]
    yield "truncated", [*good[:2], good[2][:200] + "\n", good[3]], "cut off"
    yield "foreign", ['{"record": "environment", "time": "x"}\n'], "schema None"
    yield "newer", [good[0].replace("fulmen-bench/1", "fulmen-bench/9")], "fulmen-bench/9"
    yield "empty", [], "nothing was measured"
    yield "binary", ["\x00\x01"], "not JSON"
    yield "no run", good[1:], "before that run"
    cell = json.loads(good[1])
    for name, change, said in (
        ("flags", {"audit": {"flags": "x"}}, "audit.flags"),
        ("memory", {"memory": {"peak": 3}}, "memory is dict, must be"),
        ("clocks", {"clocks_mhz": ["x"]}, "clocks_mhz"),
        ("resources", {"resources": ["x"]}, "resources"),
        ("correctness", {"correctness": {"o": 1}}, "correctness"),
    ):
        yield name, [good[0], json.dumps(cell | change) + "\n"], said


@pytest.mark.parametrize(("lines", "said"), [pytest.param(*x[1:], id=x[0]) for x in bad_files()])
def test_bad_files_give_one_clear_error(lines, said, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(lines))
    with pytest.raises(schema.BadResults, match=re.escape(said)):
        report.write(schema.read([path]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_cut_off_at_the_end_is_reported_without_its_last_line(tmp_path):
    good = list(sample_results.lines(sample_results.make(samples=6)))[:4]
    path = tmp_path / "run.jsonl"
    path.write_text("".join([*good[:3], good[3][:200]]))
    done = CliRunner().invoke(main, ["bench", "report", str(path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "run.jsonl:4: not JSON" in done.output
    assert "It is skipped" in done.output
    assert "It is skipped" in (tmp_path / "out" / "report.md").read_text()
    data = data_of((tmp_path / "out" / "report.html").read_text())
    assert len(data["rows"]) == 2
    assert "run.jsonl:4" in data["notes"][0]


def test_what_is_no_time_is_withheld(tmp_path):
    """Negative and denormal numbers end in no traceback and in no table."""
    times = [-1.0, 5e-324, -5e-324, 0.0, 1e308]
    cells = [cell for cell in sample_results.make(samples=8).cells if cell.suite == "flash"]
    for i, cell in enumerate(cells[:60]):  # as the median, in the samples alone, or as the bounds of the median
        t = times[i // 12]
        cell.samples_ms = [t] * 8
        cell.stats = [{"median": t}, {}, {**cell.stats, "low": t, "high": t}][i % 3]
        cell.device_ms, cell.clocks_mhz = t, [t] * 8
        if i % 2:
            cell.audit = {}
    results = schema.Results(sample_results.make(samples=6).runs, cells)
    report.write(results, tmp_path)
    rows = data_of((tmp_path / "report.html").read_text())["rows"]
    assert [row["kind"] == "withheld" for row in rows[:60]] == [True, True, False] * 20
    assert all("median" not in row and not row["samples"] for row in rows if row["kind"] == "withheld")
    lines = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert all(line["median_ms"] == line["device_ms"] == "" for line in lines if line["status"] == "withheld")
    assert {line["device_ms"] for line in lines[:60]} == {""}


def test_no_time_above_the_roof_is_called_measured(read):
    results = sample_results.make(samples=8)
    run = next(iter(results.runs.values()))
    run.ceilings = {"bytes_measured": 1e12, "flops_measured": 1e12}
    run.environment |= {"arch": 0}
    over = model.read(results)
    assert all(row.flagged for row in over.rows if row.timed and (row.rate("bytes") or 0) > 1.01e12)
    assert sum(row.flagged for row in over.rows) > sum(row.flagged for row in read.rows)


def test_throughput_in_fitting_units(read):
    cells = [schema.parse(schema.dumps(row.cell), "") for row in read.rows[:9]]
    for cell in cells:
        cell.stats = {"median": 1e5}
    slow = model.read(schema.Results(read.results.runs, cells))
    for report_, unit in ((read, "TFLOP/s"), (slow, "MFLOP/s")):
        shown = content.shown(report_)
        column = [name for name, _ in shown["columns"]].index("Arithmetic")
        assert shown["lines"][0][column]["text"].endswith(unit)


def test_a_value_is_said_in_the_unit_of_its_name():
    values = {
        "l2_bytes": (62914560, "60.00 MiB"), "flops_hard": (1.07e15, "1.07 PFLOP/s"), "driver": (None, ""),
        "bytes_hard": (4.89e12, "4.89 TB/s"), "causal": (True, "yes"), "bytes_min": (2048.0, "2.000 KiB"),
        "flops_min": (2e9, "2 GFLOP"), "efficiency": (0.25, "25 %"),
        "error": (2.5e-3, "2.5e-03"), "seed": (1234567, "1234567"), "sm_count": (1320, "1,320"),
        "throttle": (["a", "b"], "a, b"),
    }  # fmt: skip
    for name, (value, said) in values.items():
        assert content.said(name, value) == said, name


def test_headlines(read):
    found = {(one.rows[0].cell.suite, one.rows[0].cell.pass_): one for one in model.headlines(read)}
    assert set(found) == {(suite, pass_) for suite in ("lightning", "flash") for pass_ in schema.PASSES}
    one = found["flash", "forward"]
    assert (one.name, len(one.rows)) == ("fulmen triton", 6)
    assert 1 < one.low < one.mean < one.high < 0.61 / 0.40 + 0.05
    assert found["lightning", "total"].name == "fulmen triton ≠"
    text = report.markdown(read)
    assert text.index("fulmen triton against sdpa-fa2") < text.index("proven right") < text.index("## Environment")


def test_the_figures_of_the_page_have_no_style_of_their_own(page):
    figures = [x["svg"] for one in data_of(page)["sections"] for block in one["blocks"][:1] if block["kind"] == "card"
               for x in block["blocks"] if x["kind"] == "figure"]  # fmt: skip
    assert len(figures) == 12  # scaling and roofline of three passes in two suites
    for figure in figures:
        assert " style=" not in figure
        assert "<style" not in figure
        assert 'class="s0"' in figure
        assert "#row=" in figure
        assert figure.count("<text") > 5


def test_families_without_the_baseline_say_so(results):
    cells = [
        c
        for c in results.cells
        if c.suite == "lightning" and not (c.competitor.startswith("sdpa") and c.case["D"] == 64)
    ]
    text = report.markdown(model.read(schema.Results(results.runs, cells)))
    assert "decay · no baseline" in text


def test_a_later_run_replaces_an_earlier_one():
    a = sample_results.make(samples=8)
    b = sample_results.make(samples=8, run_id="later", time="2026-11-16T06:00:00+00:00", seed=1)
    both = model.read(schema.Results({**b.runs, **a.runs}, [*b.cells[:3], *a.cells[:6]]))
    assert [row.replaced for row in both.rows] == [False] * 3 + [True] * 3 + [False] * 3
    assert "3 were measured again" in model.proven(both.rows)


def test_a_thousand_rows_are_small_and_soon_done(tmp_path, monkeypatch):
    """Of figures one of each kind is drawn; their number is that of the cases and passes."""
    monkeypatch.setattr(plots, "MAX_PANELS", 1)
    drawn = functools.lru_cache(lambda paint: svg(paint, *given[paint]))
    svg, given = plots.svg, {}
    monkeypatch.setattr(plots, "svg", lambda paint, *more: given.setdefault(paint, more) and drawn(paint))
    results = sample_results.make(samples=500)
    more = [replace(cell, case=cell.case | {"B": 10 * i}) for i in (1, 2, 3) for cell in results.cells]
    results.cells = [*results.cells, *more][:1000]
    begin = time.process_time()
    report.write(results, tmp_path)
    seconds = time.process_time() - begin
    assert (tmp_path / "report.html").stat().st_size < 6e6
    assert seconds < 15, f"{seconds:.1f} s of CPU time"  # 5 on idle cores, and CI's are not
