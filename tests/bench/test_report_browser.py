"""The page in a real browser: Debian's chromium, without a head, from disk and without a network."""

from __future__ import annotations

import gzip
import os
import re
import shutil

import pytest

from fulmen.bench import comparing, schema
from fulmen.bench.report import html, model
from tests.bench import sample_results

NAMES = ("chromium", "chromium-browser", "google-chrome")
SAMPLES = 24


def missing(what: str) -> None:
    """In continuous integration these tests run or fail; elsewhere they may be skipped."""
    sentence = f"the browser tests need {what}; `make test` as root installs it"
    if os.environ.get("CI"):
        pytest.fail(sentence)
    pytest.skip(sentence)


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright")
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def results():
    return sample_results.make(samples=SAMPLES)


@pytest.fixture(scope="module")
def folder(results, tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    (path / "report.html").write_text(html.render(model.read(results)), encoding="utf-8")
    return path


class Watched:
    """A page, what it complained of, and what it asked for."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(offline=True, **{"viewport": {"width": 1280, "height": 900}, **options})
        self.page = self.context.new_page()
        self.trouble, self.requests = [], []
        self.page.on("console", lambda message: self.trouble.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)


@pytest.fixture
def watch(browser):
    opened = []

    def open_(path, **options):
        opened.append(Watched(browser, path, **options))
        return opened[-1]

    yield open_
    for one in opened:
        one.context.close()
        assert one.trouble == []
        assert all(url.startswith(("file://", "blob:", "data:")) for url in one.requests), one.requests


@pytest.fixture
def page(watch, folder):
    return watch(folder / "report.html").page


def texts(page, selector):
    return [text.strip() for text in page.locator(selector).all_text_contents()]


def column(page, name):
    names = [x.rstrip("▾▴") for x in texts(page, "#table thead th")]
    return texts(page, f"#table tbody tr > :nth-child({names.index(name) + 1})")


def test_renders(page):
    assert page.locator("#proven").text_content() == "311 of 324 cells proven right, then timed."
    assert texts(page, "#tiles .word")[:3] == ["measured", "read with care", "wrong"]
    assert "NVIDIA H200" in page.locator("#facts").text_content()
    assert page.locator(".heatmap").count() == 2
    assert page.locator("#scaling-charts svg.chart").count() == 2
    assert page.locator("#scaling-charts .floor").count() == 4  # linear and softmax, twice
    assert page.locator("#scaling-charts .fit").count() >= 10
    assert page.locator("#roofline-charts .roof").count() == 2
    assert page.locator("#memory-charts .part.saved").count() > 4
    assert "too far off" in page.locator("#correctness-tables").text_content()
    assert page.locator("#table tbody tr").count() == 200
    page.locator("#more").click()
    assert page.locator("#table tbody tr").count() == 324
    assert page.locator("#trouble").is_hidden()


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1400, "light"), (2500, "light")])
def test_the_first_screen_shows_the_result(watch, folder, width, scheme):
    page = watch(folder / "report.html", viewport={"width": width, "height": 900}, color_scheme=scheme).page
    speeds = texts(page, "#headlines dd strong")
    assert len(speeds) == 6  # two suites, three passes
    assert all(re.fullmatch(r"[\d.]+×", speed) for speed in speeds)
    assert page.locator("#overview svg.chart .gain").count() > 2
    for part in ("#headlines", "#overview figcaption"):
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] < 900, part


def test_the_environment_comes_last_and_folded(page):
    sections = page.evaluate("[...document.querySelectorAll('main section')].map(section => section.id)")
    assert sections[0] == "result"
    assert sections[-1] == "environment"
    assert page.locator("#environment details").count() == 1  # one run
    assert page.locator("#environment details[open]").count() == 0
    assert page.locator("#facts dl").is_hidden()
    page.locator("#environment summary").click()
    assert page.locator("#facts dl").is_visible()


def test_a_card_without_the_baseline_says_so(watch, results, tmp_path):
    cells = [
        c
        for c in results.cells
        if c.suite == "lightning" and not (c.competitor.startswith("sdpa") and c.case["D"] == 64)
    ]
    (tmp_path / "report.html").write_text(
        html.render(model.read(schema.Results(results.runs, cells))), encoding="utf-8"
    )
    page = watch(tmp_path / "report.html").page
    first, second = page.locator("#heat figcaption").all_text_contents()
    assert "no baseline" in first
    assert "no baseline" not in second
    assert texts(page, ".heatmap >> nth=0 >> tbody tr:nth-child(6) td")[0].endswith(" ms")
    assert "no baseline" in page.locator("#scaling-charts .fits").first.text_content()
    assert "no baseline" not in page.locator("#scaling-charts .fits").last.text_content()


def test_growth_and_units_of_a_slow_machine(watch, results, tmp_path):
    cells = [schema.parse(schema.dumps(c), "") for c in results.cells if c.suite == "lightning" and c.case["D"] == 64]
    for cell in cells:  # a CPU whose times hardly grow
        t = 1e4 * cell.case["N"] ** 0.5
        cell.stats, cell.samples_ms, cell.clocks_mhz = {"median": t, "low": 0.99 * t, "high": 1.01 * t}, [t] * 8, []
    run = sample_results.run(
        environment={"device": "a CPU", "arch": 0}, ceilings={"flops_measured": 1e11, "bytes_measured": 1e10}
    )
    slow = model.read(schema.Results({run.run_id: run}, cells))
    (tmp_path / "report.html").write_text(html.render(slow), encoding="utf-8")
    page = watch(tmp_path / "report.html").page
    growth = texts(page, "#scaling-charts .fits tbody td:nth-child(4)")
    assert "sublinear" in growth
    assert "not O(n)" not in page.locator("#scaling").text_content()
    assert any(x.startswith("GFLOP/s") for x in texts(page, "#table thead th"))
    assert "TFLOP/s" not in page.locator("body > main").text_content()


@pytest.mark.parametrize("width", [400, 1400])
def test_wide_tables_scroll_to_their_last_column(watch, folder, width):
    page = watch(folder / "report.html", viewport={"width": width, "height": 900}).page
    page.locator("#cells").scroll_into_view_if_needed()
    box = page.locator("#table").evaluate(
        "t => { t.scrollLeft = 1e6; return [t.scrollWidth - t.clientWidth, t.scrollLeft]; }"
    )
    assert box[0] > 0
    assert box[1] == pytest.approx(box[0], abs=1)
    table, last = (page.locator(x).bounding_box() for x in ("#table", "#table thead th:last-child"))
    assert last["x"] + last["width"] <= table["x"] + table["width"] + 1
    assert table["height"] <= 900  # so that its scrollbar is in sight
    for box in page.locator("#heat .scroll, #scaling-charts .scroll").all():
        assert box.evaluate("e => e.scrollWidth <= e.clientWidth || getComputedStyle(e).overflowX === 'auto'")


def test_sorts(page):
    button = page.locator('[data-column="median"]')
    button.click()
    assert page.locator('th[aria-sort="ascending"]').count() == 1
    values = [float(x.replace(",", "")) for x in column(page, "Median ms") if x]
    assert values == sorted(values)
    assert len(values) == 200  # what has no time comes last, either way
    button.click()
    values = [float(x.replace(",", "")) for x in column(page, "Median ms") if x]
    assert values == sorted(values, reverse=True)
    assert len(values) == 200
    button.click()
    assert page.locator('th[aria-sort="ascending"], th[aria-sort="descending"]').count() == 0


def test_filters(page):
    page.locator('[data-kind="unsupported"]').click()
    assert column(page, "Status") == ["–no support"] * 6
    assert page.locator("#shown").text_content().startswith("6 of 324")
    page.locator("#clear").click()
    page.select_option("#filter-flag", "THROTTLED")
    assert set(column(page, "Implementation")) == {"sdpa-fa2"}
    page.locator("#clear").click()
    page.fill("#filter-search", "cudnn backward 8192 flash")
    assert len(column(page, "Status")) == 1
    page.fill("#filter-search", "no such thing")
    assert column(page, "Status") == []


def test_drawer(page):
    from playwright.sync_api import expect

    page.locator('[data-kind="flagged"]').click()
    page.locator("#table tbody button.link").first.click()
    drawer = page.locator("#drawer")
    expect(drawer.locator("circle.sample")).to_have_count(SAMPLES)
    assert drawer.locator(".bin").count() > 2
    for text in ("95 % interval", "Audit against the hardware", "Correctness", "Memory", "registers", "host-bound"):
        assert text in drawer.text_content()
    expect(page).to_have_url(re.compile("#row="))
    name = drawer.locator("h2").text_content()
    page.keyboard.press("ArrowRight")
    expect(drawer.locator("h2")).not_to_have_text(name)
    page.keyboard.press("Escape")
    expect(drawer).not_to_be_visible()
    assert page.locator("#table tbody button.link:focus").count() == 1
    expect(page).not_to_have_url(re.compile("#row="))


def test_a_wrong_cell_shows_its_tensor_and_no_time(page):
    page.locator('[data-kind="failed"]').click()
    page.locator("#table tbody button.link").first.click()
    drawer = page.locator("#drawer")
    assert "dk: error 4.1e-02" in drawer.text_content()
    assert drawer.locator("circle.sample").count() == 0
    assert drawer.locator(".big").count() == 0


def test_linked_row_opens(watch, folder, results):
    cell = results.cells[5]
    page = watch(folder / "report.html").page
    page.evaluate(f"location.hash = 'row={cell.config_hash}'")
    page.wait_for_selector("#drawer h2")
    assert page.locator("#drawer h2").text_content() == cell.competitor


def test_baseline_pass_and_suite_switch(page):
    def first_line():
        return texts(page, ".heatmap >> nth=0 >> tbody tr:nth-child(6) td")

    before = first_line()
    page.select_option("#baseline", "fulmen triton")
    after = first_line()
    assert before != after
    assert after[0] == "1.00×"
    assert "fulmen triton" in page.locator("#speed-lead").text_content()
    page.locator('label:has(> input[value="total"])').click()
    assert first_line() != after
    page.locator('label:has(> input[value="flash"])').click()
    assert page.locator(".heatmap").count() == 1
    assert page.locator("#baseline").input_value() == "sdpa-fa2"
    assert page.locator(':focus[value="flash"]').count() == 1  # the selection keeps the focus


def test_charts_answer_to_pointer_and_keys(page):
    chart = page.locator("#scaling-charts svg.chart").first
    chart.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").is_visible()
    assert "fulmen triton" in page.locator("#tip").text_content()
    page.keyboard.press("ArrowRight")
    assert "exponent since N" in page.locator("#tip").text_content()
    page.keyboard.press("Enter")
    assert page.locator("#drawer").is_visible()


def test_compares_a_second_file(page, results, tmp_path):
    changed = sample_results.make(
        samples=SAMPLES, seed=1, run_id="after", time="2026-11-16T06:00:00+00:00",
        slower={"fulmen triton": 0.9, "fla chunk": 1.08},
    )  # fmt: skip
    path = sample_results.save(changed, tmp_path / "after.jsonl")
    page.set_input_files("#file", path)
    page.wait_for_selector("#compare-result table")
    found = {tile.get_attribute("data-verdict"): int(tile.locator(".count").text_content())
             for tile in page.locator("#compare-result .tile").all()}  # fmt: skip
    verdicts = [v.verdict for v in comparing.compare(results, changed)]
    assert found == {name: verdicts.count(name) for name in comparing.VERDICTS}
    assert found["FASTER"] > 40
    assert found["SLOWER"] > 20
    said = page.locator("#compare-result .lead").text_content()
    assert said == f"{len(verdicts)} cells in both, those that changed by the most milliseconds first."
    assert texts(page, "#compare-result tbody td:nth-child(3)")[0].startswith("B")
    assert "·" in texts(page, "#compare-result tbody td:nth-child(3)")[0]  # a label, not the case's fields
    page.locator('[data-verdict="SLOWER"]').click()
    assert set(texts(page, "#compare-result tbody th")) == {"fla chunk"}


def test_two_runs_in_one_report_are_compared(watch, results, tmp_path):
    later = sample_results.make(samples=SAMPLES, seed=2, run_id="later", time="2026-11-17T06:00:00+00:00")
    both = schema.Results({**results.runs, **later.runs}, [*results.cells[:40], *later.cells[:40]])
    (tmp_path / "report.html").write_text(html.render(model.read(both)), encoding="utf-8")
    page = watch(tmp_path / "report.html").page
    assert int(page.locator('[data-verdict="SAME"] .count').text_content()) > 25
    assert page.locator("#compare-after option:checked").text_content().endswith("later")


def test_another_machine_is_incomparable(page, tmp_path):
    other = sample_results.make(samples=6, run_id="other", environment={"device": "NVIDIA A100", "arch": 80})
    page.set_input_files("#file", sample_results.save(other, tmp_path / "other.jsonl"))
    page.wait_for_selector("#compare-result table")
    count = page.locator('[data-verdict="INCOMPARABLE"] .count').text_content()
    assert count == "318"  # all but what neither could measure
    assert "NVIDIA A100" in page.locator("#compare-result tbody").text_content()


def test_dropped_file_is_compared(page, results):
    text = "".join(sample_results.lines(schema.Results(results.runs, results.cells[:4])))
    page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.items.add(new File([text], "dropped.jsonl"));
            for (const type of ["dragenter", "dragover", "drop"]) {
                window.dispatchEvent(new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true }));
            }
        }""",
        text,
    )
    page.wait_for_selector("#compare-result table")
    assert page.locator('[data-verdict="SAME"] .count').text_content() == "4"
    assert page.locator("#veil").is_hidden()


def test_a_second_file_that_was_cut_off_is_compared_without_its_last_line(page, results, tmp_path):
    lines = list(sample_results.lines(schema.Results(results.runs, results.cells[:4])))
    path = tmp_path / "cut.jsonl"
    path.write_text("".join(lines)[:-50])
    page.set_input_files("#file", path)
    page.wait_for_selector("#compare-result table")
    assert page.locator('[data-verdict="SAME"] .count').text_content() == "3"
    assert "cut.jsonl:5" in page.locator("#compare-error").text_content()


def test_a_compressed_second_file_is_compared(page, results, tmp_path):
    path = tmp_path / "run.jsonl.gz"
    text = "".join(sample_results.lines(schema.Results(results.runs, results.cells[:4])))
    path.write_bytes(gzip.compress(text.encode()))
    page.set_input_files("#file", path)
    page.wait_for_selector("#compare-result table")
    assert page.locator('[data-verdict="SAME"] .count').text_content() == "4"


def test_a_browser_that_cannot_inflate_is_told(browser, folder):
    context = browser.new_context(offline=True)
    context.add_init_script("delete globalThis.DecompressionStream")
    page = context.new_page()
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("#trouble:not([hidden])")
    said = page.locator("#trouble").text_content()
    assert "no DecompressionStream" in said
    assert "report.md" in said
    context.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "bad.jsonl:1: not JSON; was the file cut off?"),
        ('{"schema": "other/2"}', 'schema "other/2"'),
        ("[]", "this report reads"),
        ("", "no cell in it"),
        ('{"schema": "fulmen-bench/1", "kind": "cell", "run_id": "x"}', "before that run's record"),
    ],
)
def test_a_bad_second_file_is_one_sentence(page, tmp_path, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    page.set_input_files("#file", path)
    page.wait_for_selector("#compare-error:not([hidden])")
    assert said in page.locator("#compare-error").text_content()


def test_hostile_names_are_inert(watch, tmp_path):
    evil = sample_results.hostile()
    (tmp_path / "report.html").write_text(html.render(model.read(evil)), encoding="utf-8")
    page = watch(tmp_path / "report.html").page
    page.set_input_files("#file", sample_results.save(evil, tmp_path / "evil.jsonl"))
    page.wait_for_selector("#compare-result table")
    page.locator("#table tbody button.link").first.click()
    assert "<img src=x" in page.locator("#drawer h2").text_content()
    page.keyboard.press("Escape")
    page.locator(".heatmap button").first.hover()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_policy_stops_what_slips_through(browser, folder):
    """Even a script that got into the page would not run."""
    watched = Watched(browser, folder / "report.html")
    watched.page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.hacked = 2'>");
        }"""
    )
    watched.page.wait_for_timeout(100)
    assert watched.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in text for text in watched.trouble)
    watched.context.close()


def test_keyboard_reaches_everything(page):
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate(
            "(a => a.id || a.name || a.getAttribute('class') || a.tagName)(document.activeElement)"
        ))  # fmt: skip
    assert {"theme", "suite", "pass", "baseline", "chart", "filter-search"} <= {str(x).split()[0] for x in seen if x}
    page.locator(".heatmap button").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Enter")
    assert page.locator("#drawer").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    assert page.locator("#filter-search:focus").count() == 1
    page.keyboard.type("cudnn")
    assert len(set(column(page, "Implementation"))) == 1


def test_copies_the_command_and_saves_csv(page, results):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#table tbody .copy").first.click()
    page.wait_for_selector("#table tbody .copy:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == results.cells[0].command
    page.fill("#filter-search", "flash backward")
    with page.expect_download() as download:
        page.locator("#csv").click()
    lines = download.value.path().read_text().splitlines()
    assert len(lines) == 1 + 24
    assert lines[0].startswith("status,suite,competitor")


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (820, "light"), (1600, "dark")])
def test_fits_the_screen_in_light_and_dark(watch, folder, width, scheme):
    page = watch(folder / "report.html", viewport={"width": width, "height": 800}, color_scheme=scheme).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(19, 20, 22)" if scheme == "dark" else "rgb(247, 247, 245)")
    page.locator("#table tbody button.link").first.click()
    assert page.locator("#drawer").bounding_box()["width"] <= width + 0.1


def test_theme_button(page):
    for wanted in ("light", "dark"):
        page.locator("#theme").click()
        assert wanted in page.locator("#theme").text_content()
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == wanted


def test_prints(watch, folder):
    page = watch(folder / "report.html", color_scheme="dark").page
    page.emulate_media(media="print")
    for gone in ("#controls", "#compare", "#theme", "#filters"):
        assert page.locator(gone).is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".heatmap").first.is_visible()
    assert len(page.pdf(print_background=True)) > 20_000


def test_a_thousand_rows(watch, tmp_path):
    many = sample_results.make(samples=60, repeat=4)
    many.cells = many.cells[:1000]
    (tmp_path / "report.html").write_text(html.render(model.read(many)), encoding="utf-8")
    page = watch(tmp_path / "report.html").page
    page.locator("#more").click()
    assert page.locator("#table tbody tr").count() == 1000
