"""The report's files: what they say, that they say it every time, and what they refuse."""

from __future__ import annotations

import csv
import io
import json
import re
import time

import pytest

from fulmen.bench import report, schema
from fulmen.bench.report import html, markdown, model, plots, table, words
from tests.bench import sample_results


@pytest.fixture(scope="module")
def results():
    return sample_results.make(samples=20)


@pytest.fixture(scope="module")
def read(results):
    return model.read(results)


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def test_writes_all_files_and_the_same_twice(results, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "MAX_PANELS", 1)
    some = schema.Results(results.runs, [cell for cell in results.cells if cell.suite == "flash"])
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


def test_the_page_asks_nothing_of_the_network(read):
    page = html.render(read)
    assert "default-src 'none'" in page
    assert "unsafe" not in page.split("</head>")[0].split("Content-Security-Policy")[1].split(">")[0]
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.S).replace(
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
    texts = {"html": html.render(again), "md": markdown.render(again), "csv": table.render(again)}
    for name, text in texts.items():
        assert "0.12345" not in text, name
    assert "dk is wrong" in texts["md"]


def test_csv(read):
    lines = list(csv.DictReader(io.StringIO(table.render(read))))
    assert len(lines) == len(read.rows)
    first = lines[0]
    assert float(first["median_ms"]) == read.rows[0].median
    assert first["case_N"] == "1024"
    assert {line["status"] for line in lines} >= {"ok", "failed", "oom", "unsupported", "withheld", "timeout"}
    assert all(line["median_ms"] == "" for line in lines if line["status"] != "ok")


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\n=1", "|x", "%x"])
def test_csv_guards_against_formulas(text):
    assert table.guarded(text) == "'" + text
    assert table.guarded(-1.5) == -1.5
    assert table.guarded("a-1") == "a-1"


def test_markdown(read):
    text = markdown.render(read)
    assert "311 of 324 cells proven right" in text
    assert "### B4 H32 D64 · bf16 · causal · decay" in text
    for heading in (
        "## Environment",
        "## Scaling",
        "## Memory",
        "## Correctness",
        "## Without a number",
        "## To measure",
    ):
        assert heading in text
    for table_ in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table_.splitlines()}
        assert len(widths) == 1, table_[:200]


def test_payload(read):
    data = data_of(html.render(read))
    assert len(data["rows"]) == 324
    assert sum(n for _, n in data["counts"]) == 324
    assert data["counts"][0][0] == "ok"
    row, cell = data["rows"][7], read.rows[7].cell
    unit, first, *rest = map(float, row["samples"].split())
    unpacked = [unit * first, *(unit * (first + x) for x in rest)]
    assert unpacked == pytest.approx(cell.samples_ms, rel=2e-4)
    assert any(fit["linear"] for fit in data["fits"])
    assert data["baselines"] == {"lightning": "sdpa-fa2", "flash": "sdpa-fa2"}


def test_every_word_is_explained():
    assert set(words.STATUSES) == set(schema.STATUSES)
    assert set(words.FLAGS) == set(schema.FLAGS)
    from fulmen.bench import comparing

    assert set(words.VERDICTS) == set(comparing.VERDICTS)


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


def bad_files():
    good = list(sample_results.lines(sample_results.make(samples=6)))[:4]
    yield "truncated", [*good[:3], good[3][:200]], "cut off"
    yield "foreign", ['{"record": "environment", "time": "x"}\n'], "schema None"
    yield "newer", [good[0].replace("fulmen-bench/1", "fulmen-bench/9")], "fulmen-bench/9"
    yield "empty", [], "nothing was measured"
    yield "binary", ["\x00\x01"], "not JSON"
    yield "no run", good[1:], "before that run"
    cell = json.loads(good[1])
    for name, change, said in (
        ("flags", {"audit": {"flags": "x"}}, "audit.flags"),
        ("memory", {"memory": {"peak": 3}}, "memory must"),
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


def test_a_later_run_replaces_an_earlier_one():
    a = sample_results.make(samples=8)
    b = sample_results.make(samples=8, run_id="later", time="2026-11-16T06:00:00+00:00", seed=1)
    both = model.read(schema.Results({**b.runs, **a.runs}, [*b.cells[:3], *a.cells[:6]]))
    assert [row.replaced for row in both.rows] == [False] * 3 + [True] * 3 + [False] * 3


def test_a_thousand_rows_are_small_and_soon_done(tmp_path):
    results = sample_results.make(samples=500, repeat=4)
    results.cells = results.cells[:1000]
    begin = time.process_time()
    report.write(results, tmp_path)
    seconds = time.process_time() - begin
    assert (tmp_path / "report.html").stat().st_size < 6e6
    assert seconds < 10, f"{seconds:.1f} s of CPU time"  # the bar is 8 on idle cores, and CI's are not
