"""The page in a real browser: Debian's chromium, without a head, from disk and without a network."""

from __future__ import annotations

import os
import re
import shutil

import pytest

from fulmen.bench import report, schema
from fulmen.bench.report import model
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
    (path / "report.html").write_text(report.html(model.read(results)), encoding="utf-8")
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
    at = texts(page, "#table thead th").index(name) + 1
    return texts(page, f"#table tbody tr:not([hidden]) > :nth-child({at})")


def choose(page, value):
    page.locator(f'label:has(> input[value="{value}"])').click()


def open_first(page):
    page.locator("#table tbody tr:not([hidden]) a").first.click()
    page.wait_for_selector("#drawer h2")


def test_renders(page):
    assert page.locator("#subject").text_content().endswith("311 of 324 cells proven right, then timed.")
    assert texts(page, "#tiles .word")[:3] == ["measured", "read with care", "wrong"]
    assert "NVIDIA H200" in page.locator("#environment").text_content()
    assert page.locator(".heatmap").count() == 2
    assert page.locator("#scaling svg.chart").count() == 2
    assert page.locator("#scaling [id='floor']").count() == 4  # linear and softmax, twice
    assert page.locator("#scaling [id='fit']").count() >= 10
    assert page.locator("#roofline [id='roof']").count() == 2
    assert page.locator("#memory .bar rect.s1").count() > 4
    assert "too far off" in page.locator("#correctness").text_content()
    assert "tried to allocate" in page.locator("#missing").text_content()
    assert page.locator("#table tbody tr").count() == 324
    assert page.locator("#trouble").is_hidden()


def test_a_training_step_shows_its_kernels_by_kind(watch, results, tmp_path):
    cells = [schema.parse(schema.dumps(c), "") for c in results.cells if c.suite == "flash" and c.pass_ == "total"][:4]
    for i, cell in enumerate(cells):
        cell.op, cell.kinds = "train", {"products": 1.0 + i, "attention": 0.5, "glue": 0.25, "optimiser": 0.25}
    (tmp_path / "report.html").write_text(
        report.html(model.read(schema.Results(results.runs, cells))), encoding="utf-8"
    )
    page = watch(tmp_path / "report.html").page
    assert texts(page, "#kinds [colspan]") == ["B1 H32 H_KV 8 D128 · bf16 · causal · N 1,024"]
    bars = page.locator("#kinds svg.bar").all()
    widths = [
        [round(float(rect.get_attribute("width").rstrip("%"))) for rect in bar.locator("rect").all()] for bar in bars
    ]
    assert widths == [[20, 10, 5, 5], [40, 10, 5, 5], [60, 10, 5, 5], [80, 10, 5, 5]]
    tokens = texts(page, "#kinds tbody td:nth-child(4)")
    assert tokens[0] == f"{1e3 * 1024 / model.times(cells[0])[0]:,.0f}"


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1400, "light"), (2500, "light")])
def test_the_first_screen_shows_the_result(watch, folder, width, scheme):
    page = watch(folder / "report.html", viewport={"width": width, "height": 900}, color_scheme=scheme).page
    speeds = texts(page, "#headlines .big")
    assert len(speeds) == 6  # two suites, three passes
    assert all(re.fullmatch(r"[\d.]+×", speed) for speed in speeds)
    assert page.locator("#speed .bar .s0").count() > 2
    for part in ("#headlines", "#speed figcaption"):
        box = page.locator(part).first.bounding_box()
        assert box["y"] + box["height"] < 900, part


def test_the_environment_comes_last_and_folded(page):
    sections = page.evaluate("[...document.querySelectorAll('main section')].map(section => section.id)")
    assert sections[0] == "result"
    assert sections[-1] == "environment"
    assert page.locator("#environment details").count() == 1  # one run
    assert page.locator("#environment details[open]").count() == 0
    assert page.locator("#environment dl").is_hidden()
    page.locator("#environment summary").click()
    assert page.locator("#environment dl").is_visible()


def test_a_card_without_the_baseline_says_so(watch, results, tmp_path):
    cells = [
        c
        for c in results.cells
        if c.suite == "lightning" and not (c.competitor.startswith("sdpa") and c.case["D"] == 64)
    ]
    (tmp_path / "report.html").write_text(
        report.html(model.read(schema.Results(results.runs, cells))), encoding="utf-8"
    )
    page = watch(tmp_path / "report.html").page
    first, second = texts(page, "#speed figcaption")[1:]
    assert "no baseline" in first
    assert "no baseline" not in second
    assert texts(page, ".heatmap >> nth=0 >> tbody tr:nth-child(6) td")[0].endswith(" ms")
    assert "no baseline" in page.locator("#scaling .plain").first.text_content()
    assert "no baseline" not in page.locator("#scaling .card:last-child .plain").first.text_content()


def test_growth_and_units_of_a_slow_machine(watch, results, tmp_path):
    cells = [schema.parse(schema.dumps(c), "") for c in results.cells if c.suite == "lightning" and c.case["D"] == 64]
    for cell in cells:  # a CPU whose times hardly grow
        t = 1e4 * cell.case["N"] ** 0.5
        cell.stats, cell.samples_ms, cell.clocks_mhz = {"median": t, "low": 0.99 * t, "high": 1.01 * t}, [t] * 8, []
    run = sample_results.run(
        environment={"device": "a CPU", "arch": 0}, ceilings={"flops_measured": 1e11, "bytes_measured": 1e10}
    )
    slow = model.read(schema.Results({run.run_id: run}, cells))
    (tmp_path / "report.html").write_text(report.html(slow), encoding="utf-8")
    page = watch(tmp_path / "report.html").page
    growth = texts(page, "#scaling .plain tbody td:nth-child(4)")
    assert "sublinear" in growth
    assert "not O(n)" not in page.locator("#scaling").text_content()
    assert any("GFLOP/s" in x for x in column(page, "Arithmetic"))
    assert "TFLOP/s" not in page.locator("body > main").text_content()


@pytest.mark.parametrize("width", [400, 1400])
def test_wide_tables_scroll_to_their_last_column(watch, folder, width):
    page = watch(folder / "report.html", viewport={"width": width, "height": 900}).page
    page.locator("#cells").scroll_into_view_if_needed()
    box = page.locator("#table .scroll").evaluate(
        "t => { t.scrollLeft = 1e6; return [t.scrollWidth - t.clientWidth, t.scrollLeft]; }"
    )
    assert box[0] > 0
    assert box[1] == pytest.approx(box[0], abs=1)
    table, last = (page.locator(x).bounding_box() for x in ("#table .scroll", "#table thead th:last-child"))
    assert last["x"] + last["width"] <= table["x"] + table["width"] + 1
    assert table["height"] <= 900  # so that its scrollbar is in sight
    for box in page.locator("#speed .scroll, #scaling .scroll").all():
        assert box.evaluate("e => e.scrollWidth <= e.clientWidth || getComputedStyle(e).overflowX === 'auto'")


def test_sorts(page):
    button = page.locator('#table th button:has-text("Median ms")')
    button.click()
    assert page.locator('th[aria-sort="ascending"]').count() == 1
    values = [float(x.replace(",", "")) for x in column(page, "Median ms") if x]
    assert values == sorted(values)
    assert len(values) == 311
    assert not any(column(page, "Median ms")[311:])  # what has no time comes last, either way
    button.click()
    values = [float(x.replace(",", "")) for x in column(page, "Median ms") if x]
    assert values == sorted(values, reverse=True)
    assert not any(column(page, "Median ms")[311:])
    button.click()
    assert page.locator('th[aria-sort="ascending"], th[aria-sort="descending"]').count() == 0


def test_filters(page):
    page.locator('[data-kind="unsupported"]').click()
    assert column(page, "Status") == ["– no support"] * 6
    assert page.locator("#shown").text_content().startswith("6 of 324")
    page.locator('[data-kind="unsupported"]').click()
    page.fill("#search", "THROTTLED")
    assert {x[1:] for x in column(page, "Implementation")} == {"sdpa-fa2"}
    page.fill("#search", "cudnn backward 8192 flash")
    assert len(column(page, "Status")) == 1
    page.fill("#search", "no such thing")
    assert column(page, "Status") == []


def test_drawer(page):
    from playwright.sync_api import expect

    page.locator('[data-kind="flagged"]').click()
    open_first(page)
    drawer = page.locator("#drawer")
    expect(drawer.locator(".strip circle")).to_have_count(SAMPLES)
    for text in (
        "95 % interval",
        "Audit against the hardware",
        "Correctness",
        "Memory",
        "registers",
        "host-bound",
        "floor",
    ):
        assert text in drawer.text_content()
    expect(page).to_have_url(re.compile("#row="))
    name = drawer.locator("h2").text_content()
    page.keyboard.press("ArrowRight")
    expect(drawer.locator("h2")).not_to_have_text(name)
    page.keyboard.press("Escape")
    expect(drawer).not_to_be_visible()
    assert page.locator("#table tbody a:focus").count() == 1
    expect(page).not_to_have_url(re.compile("#row="))


def test_a_wrong_cell_shows_its_tensor_and_no_time(page):
    page.locator('[data-kind="failed"]').click()
    open_first(page)
    drawer = page.locator("#drawer")
    assert "dk: error 4.1e-02" in drawer.text_content()
    assert drawer.locator(".strip circle").count() == 0
    assert " ms" not in drawer.locator(".big").text_content()


def test_linked_row_opens(watch, folder, results):
    cell = results.cells[5]
    page = watch(folder / "report.html").page
    page.evaluate(f"location.hash = 'row={cell.config_hash}'")
    page.wait_for_selector("#drawer h2")
    assert page.locator("#drawer h2").text_content() == cell.competitor


def test_pass_and_suite_switch(page):
    def first_line():
        return texts(page, ".heatmap >> nth=0 >> tbody tr:nth-child(6) td")

    before = first_line()
    choose(page, "total")
    assert first_line() != before
    assert "lightning, total" in page.locator("#speed figcaption").first.text_content()
    choose(page, "flash")
    assert page.locator(".heatmap").count() == 1
    assert "flash, total" in page.locator("#speed figcaption").first.text_content()
    assert page.locator(':focus[value="flash"]').count() == 1  # the selection keeps the focus


def test_charts_answer_to_the_pointer(page):
    point = page.locator("#scaling svg.chart >> nth=0 >> a").last  # sdpa-cudnn at the longest N
    point.scroll_into_view_if_needed()
    point.hover()
    assert page.locator("#tip").is_visible()
    assert "sdpa-cudnn" in page.locator("#tip").text_content()
    assert "N 32,768" in page.locator("#tip").text_content()
    point.click()
    assert page.locator("#drawer").is_visible()
    assert page.locator("#tip").is_hidden()


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


def test_hostile_names_are_inert(watch, tmp_path):
    evil = sample_results.hostile()
    (tmp_path / "report.html").write_text(report.html(model.read(evil)), encoding="utf-8")
    page = watch(tmp_path / "report.html").page
    open_first(page)
    assert "<img src=x" in page.locator("#drawer h2").text_content()
    page.keyboard.press("Escape")
    page.locator(".heatmap a").first.hover()
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
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.add(page.evaluate(
            "(a => a.id || a.name || a.getAttribute('class') || a.tagName)(document.activeElement)"
        ))  # fmt: skip
    assert {"theme", "suite", "pass_", "heat"} <= {str(x).split()[0] for x in seen if x}
    page.locator(".heatmap a").first.focus()
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Enter")
    page.wait_for_selector("#drawer h2")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    assert page.locator("#search:focus").count() == 1
    page.keyboard.type("cudnn")
    assert {x[1:] for x in column(page, "Implementation")} == {"sdpa-cudnn"}  # after its mark


def test_copies_the_command(page, results):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_first(page)
    page.locator("#drawer .copy").click()
    page.wait_for_selector("#drawer .copy:has-text('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == results.cells[0].command


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (360, "dark"), (820, "light"), (1600, "dark")])
def test_fits_the_screen_in_light_and_dark(watch, folder, width, scheme):
    page = watch(folder / "report.html", viewport={"width": width, "height": 800}, color_scheme=scheme).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(19, 20, 22)" if scheme == "dark" else "rgb(247, 247, 245)")
    open_first(page)
    assert page.locator("#drawer").bounding_box()["width"] <= width + 0.1


def test_theme(page):
    for wanted in ("light", "dark"):
        page.select_option("#theme", wanted)
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == wanted


def test_prints(watch, folder):
    page = watch(folder / "report.html", color_scheme="dark").page
    page.emulate_media(media="print")
    for gone in ("#controls", "#theme", "#search"):
        assert page.locator(gone).is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".heatmap").first.is_visible()
    assert len(page.pdf(print_background=True)) > 20_000


def test_a_thousand_rows(watch, tmp_path):
    many = sample_results.make(samples=60, repeat=4)
    many.cells = many.cells[:1000]
    (tmp_path / "report.html").write_text(report.html(model.read(many)), encoding="utf-8")
    page = watch(tmp_path / "report.html").page
    assert page.locator("#table tbody tr").count() == 1000
