"""The HTML page of a report in a real browser: what a click, a key, a pointer and a narrow screen do with it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import engine_trace
from test_report_page import HOSTILE, hostile
from test_report_views import TRACES

from instrument.report.html_page import write_page
from instrument.report.table import compact_number, printable
from instrument.report.view import Options, Recording
from instrument.trace.trace import Trace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no Chromium is on PATH (Debian: apt-get install chromium)", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
pytestmark = pytest.mark.slow  # each test opens a page in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page in the browser, with all that it said on the console and asked for."""

    def __init__(self, browser: Any, path: Path, **settings: Any) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        self.tab = self.context.new_page()
        self.tab.on("console", lambda said: self.complaints.append(said.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(path.as_uri())
        self.tab.wait_for_function("document.documentElement.dataset.ready")

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.tab.locator(selector).all_inner_texts()
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The page of a trace, written once."""
    folder, paths = tmp_path_factory.mktemp("pages"), dict[str, Path]()

    def page(name: str, trace: Trace) -> Path:
        if name not in paths:
            paths[name] = write_page(folder / f"{len(paths)}.html", Recording.from_trace(trace), Options())
        return paths[name]

    return page


@pytest.fixture
def opened(browser: Any, made: Any) -> Iterator[Any]:
    """Opens a page; at the end nothing may have been said on the console or asked for but the page itself."""
    pages: list[Opened] = []

    def open_page(name: str = "engine", trace: Trace | None = None, **settings: Any) -> Opened:
        pages.append(Opened(browser, made(name, trace or engine_trace(120)), **settings))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
        assert page.complaints == []
        assert [url for url in page.asked if not url.startswith("data:")] == page.asked[:1]
        assert page.asked[0].startswith("file:")


WALLS = "#request-list tbody td:nth-child(4)"


def test_a_click_on_a_heading_sorts_by_it_and_says_so(opened: Any) -> None:
    page = opened()
    heading = page.tab.locator("#request-list th", has_text="Wall")
    assert heading.get_attribute("aria-sort") == "descending"  # the slowest first, as the page opens
    walls = [float(text) for text in page.texts(WALLS)]
    assert walls == sorted(walls, reverse=True)
    assert len(walls) == 100
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    walls = [float(text) for text in page.texts(WALLS)]
    assert walls == sorted(walls)
    page.tab.get_by_role("button", name="Show 20 more").click()
    assert len(page.texts(WALLS)) == 120


def test_every_figure_names_its_base_in_full(opened: Any) -> None:
    trace, gone = engine_trace(120), {"instrument.outcome": "client gone"}
    spans = [replace(span, attributes={**span.attributes, **gone}) for span in trace.spans]
    page = opened("cancelled", replace(trace, spans=spans), viewport={"width": 1024, "height": 800})
    [note] = [text for text in page.texts(".figures .note") if "cancelled" in text]
    assert note.endswith(" cancelled")
    cut = "notes => notes.filter(note => note.scrollWidth > note.clientWidth).map(note => note.textContent)"
    assert page.tab.locator(".figures .note").evaluate_all(cut) == []


def test_a_key_sorts_a_table_of_a_view_and_arrows_go_from_view_to_view(opened: Any) -> None:
    page = opened()
    page.tab.locator("#tab-requests").focus()
    page.tab.keyboard.press("ArrowRight")
    assert page.tab.evaluate("document.activeElement.id") == "tab-batches"
    assert page.tab.locator("#tab-batches").get_attribute("aria-selected") == "true"
    page.tab.locator("#tab-events").click()
    heading = page.tab.locator("#view-panel th", has_text="Calls").first
    before = page.texts("#view-panel tbody th")
    heading.get_by_role("button").focus()
    for sorted_so in ("descending", "ascending", None):
        page.tab.keyboard.press("Enter")
        assert heading.get_attribute("aria-sort") == sorted_so
    assert page.texts("#view-panel tbody th") == before


def test_a_search_finds_a_request_by_its_key_and_enter_opens_it(opened: Any) -> None:
    page = opened()
    page.tab.fill("#request-search", "chat req-7")
    keys = page.texts("#request-list tbody td:nth-child(2)")
    assert keys
    assert all("req-7" in key for key in keys)
    page.tab.fill("#request-search", "req-77")
    assert page.tab.inner_text("#request-count") == "1 of 120 requests"
    page.tab.press("#request-search", "Enter")
    assert "key req-77" in page.tab.inner_text(".life .facts")
    page.tab.fill("#request-search", "no such request")
    assert page.texts(WALLS) == []


def test_a_pointer_over_a_span_shows_its_facts(opened: Any) -> None:
    page = opened()
    canvas = page.tab.locator(".life canvas:not(.axis)")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert page.tab.locator("#tip").is_hidden()
    page.tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 17 + 9)  # the lane of turns
    assert "of wall" in page.tab.inner_text("#tip")
    page.tab.mouse.move(box["x"] + 40, box["y"] + 17 + 18 + 7 + 17 + 9)  # the request itself, on the next lane
    told = page.tab.inner_text("#tip")
    assert told.startswith("POST /v1/")
    assert "http.response.status_code\n200" in told
    page.tab.mouse.click(box["x"] + 40, box["y"] + 17 + 18 + 7 + 17 + 9)
    assert page.tab.inner_text(".life .detail").startswith("POST /v1/")
    page.tab.mouse.move(5, 5)
    assert page.tab.locator("#tip").is_hidden()


def test_arrow_keys_go_from_span_to_span_and_a_search_goes_to_its_hits(opened: Any) -> None:
    page = opened()
    page.tab.locator(".life canvas:not(.axis)").focus()
    seen = []
    for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
        page.tab.keyboard.press(key)
        seen.append(page.tab.inner_text(".life .detail b"))
    assert seen[1].startswith("POST /v1/")
    assert seen[2] in ("tokenise", "generate")
    page.tab.fill(".life .find-span", "engine.step")
    page.tab.press(".life .find-span", "Enter")
    told = page.tab.inner_text(".life .detail")
    assert told.startswith("engine.step")
    assert "its share" in told
    page.tab.fill(".life .find-span", "in a batch")
    page.tab.press(".life .find-span", "Enter")
    told = page.tab.inner_text(".life .detail")
    assert "serves\n" in told
    assert "its share\n" in told
    page.tab.get_by_text("spans as a table").click()
    page.tab.wait_for_selector(".life tbody th")
    assert "engine.step" in page.texts(".life tbody th")


def test_the_theme_follows_the_system(opened: Any) -> None:
    page = opened(color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.tab.evaluate(ground) == "rgb(20, 23, 27)"
    page.tab.emulate_media(color_scheme="light")
    assert page.tab.evaluate(ground) == "rgb(255, 255, 255)"


def test_a_click_opens_a_call_path_and_the_path_leads_back(opened: Any) -> None:
    page = opened()
    canvas = page.tab.locator("#call-tree canvas:not(.axis)")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()

    def call_at(part: float) -> str:
        page.tab.mouse.move(box["x"] + part * box["width"], box["y"] + 9)
        name: str = page.tab.locator("#tip b").inner_text()
        return name

    before = [call_at(part) for part in (0.01, 0.5, 0.99)]
    assert set(before) > {"engine.step"}
    place = before.index("engine.step")
    page.tab.mouse.click(box["x"] + (0.01, 0.5, 0.99)[place] * box["width"], box["y"] + 9)
    assert page.texts("#call-tree .path button") == ["all", "engine.step"]
    assert page.tab.inner_text("#call-tree .detail").startswith("engine.step")
    assert {call_at(part) for part in (0.01, 0.5, 0.99)} == {"engine.step"}
    page.tab.fill("#call-tree input", "linear")
    assert page.tab.inner_text("#call-tree .tools [role=status]") == "1 call path"
    page.tab.press("#call-tree input", "Enter")
    assert page.tab.inner_text("#call-tree .detail").startswith("Linear")
    page.tab.locator("#call-tree .path button", has_text="all").click()
    assert [call_at(part) for part in (0.01, 0.5, 0.99)] == before
    page.tab.get_by_role("button", name="Device", exact=True).click()
    box = canvas.bounding_box()
    assert [call_at(part) for part in (0.01, 0.5, 0.99)] != before  # what never ran on a device has no width there


def test_numbers_read_as_in_the_text_views(opened: Any) -> None:
    values = [
        0,
        1,
        9.99951,
        0.00012345,
        1234.5,
        999.96,
        0.5,
        12345678,
        1e-7,
        123.25,
        123.35,
        0.00012345,
        2.5,
        1235.5,
        123456789,
        99999999999,
        1.5e300,
        1000,
        45.678,
        3e-12,
    ]
    page = opened()
    # Scripts of the page are a module, whose names nobody outside of it has: `compact` is read from its source.
    source = (Path(write_page.__code__.co_filename).parent / "page" / "page_parts.js").read_text("utf-8")
    begin = source.index("function halfToEven")
    function = source[begin : source.index("\n}\n", source.index("function compact")) + 3]
    assert page.tab.evaluate(f"values => {{ {function}; return values.map(compact); }}", values) == list(
        map(compact_number, values)
    )


def test_no_name_is_more_than_text(opened: Any) -> None:
    page = opened("hostile", hostile())
    assert page.tab.title() == f"{HOSTILE[0]} · instrument report"
    assert page.tab.locator("img").count() == 0
    assert page.tab.locator("script").count() == 3
    assert HOSTILE[1] in page.texts("#request-list tbody th")
    for name in page.texts("#view-tabs button"):
        page.tab.locator(f"#tab-{name}").click()
    page.tab.fill("#request-search", "onerror")
    page.tab.press("#request-search", "Enter")
    assert page.tab.inner_text(".life h3").startswith(HOSTILE[1])
    assert printable(HOSTILE[2]) == "a\\u2028b\\u2029c"


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_every_kind_of_trace_opens_without_a_complaint_also_on_a_narrow_screen(trace: str, opened: Any) -> None:
    page = opened(trace, TRACES[trace], viewport={"width": 400, "height": 800})
    assert page.tab.evaluate("document.documentElement.scrollWidth") == 400
    for section in ("summary", "requests", "calls", "devices", "tables", "about"):
        assert len(page.tab.inner_text(f"#{section}")) > 20


def test_device_work_is_found_by_name_and_zoomed_into(opened: Any) -> None:
    page = opened("torch", TRACES["a service beside torch"])
    page.tab.fill("#device-lanes input", "gemm_3")
    assert page.tab.inner_text("#device-lanes [role=status] >> nth=0") == "5 stretches"
    page.tab.fill("#device-lanes input", "")
    canvas = page.tab.locator("#device-lanes canvas:not(.axis)")
    before = canvas.screenshot()
    page.tab.locator("#device-lanes").get_by_role("button", name="Zoom in").click()
    page.tab.wait_for_timeout(50)
    assert canvas.screenshot() != before


@pytest.mark.slow
def test_a_hundred_thousand_spans_open_and_sort(opened: Any) -> None:
    page = opened("huge", engine_trace(7500, layers=16))
    page.tab.locator("#request-list th", has_text="Began").get_by_role("button").click()
    assert page.texts("#request-count") == ["7,500 requests"]
