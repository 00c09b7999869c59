"""The HTML page of a report: one file with the numbers of the views, which no name breaks, and which stays small."""

from __future__ import annotations

import base64
import hashlib
import re
import stat
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import Elements, document_of, engine_trace, page_of, summed
from test_report_views import TRACES

from instrument.cli import main
from instrument.errors import TraceError
from instrument.profile.model import KINDS
from instrument.recording.spans import KEY, Origin, Site, Span
from instrument.report import html_page, kept_spans
from instrument.report.html_page import ON_PAGE, SCRIPTS, write_page
from instrument.report.kept_spans import successive_differences
from instrument.report.requests_view import requests
from instrument.report.section import VIEW_OF
from instrument.report.table import printable
from instrument.report.view import Options, Recording
from instrument.trace import file
from instrument.trace.trace import Trace

ASSETS = resources.files("instrument.report").joinpath("page")
HOSTILE = [
    "</script><script>document.title='broken'</script>", "<img src=x onerror=alert(1)>", "a\u2028b\u2029c", "]]>",
    "<!--<script>", "&lt;b&gt;&amp;", '"quoted" \'single\'', "${1+1} `tick` {{data}} {{style}}", "\ud800", "</style>",
    "\x00\x1b",
]  # fmt: skip


def hostile() -> Trace:
    """A trace in which everything that has a name has one that would break markup."""
    spans = []
    for number, name in enumerate(HOSTILE):
        site = Site(name, "request", name, name, name, 1, name)
        span = Span(site, number + 1, 0, number + 1, 1, 0, number * 1000, number * 1000 + 900, 900, 900)
        span.attributes = {name: name, KEY: name}
        span.error = name
        spans.append(span)
    about = Origin(1, HOSTILE[0], 0, 10**18, HOSTILE[1], host=HOSTILE[0])
    losses = dict.fromkeys(HOSTILE, 5)
    return Trace(about, 0, 10**6, spans, {1: HOSTILE[0]}, losses=losses, notes=HOSTILE, died=HOSTILE[0])


def test_a_column_by_differences_reads_back() -> None:
    numbers = [1_000_000 + 3 * number for number in range(1000)]
    assert summed(successive_differences(np.array(numbers, dtype=np.int64))) == numbers


# It stands alone


def test_a_page_asks_for_nothing_and_its_policy_allows_what_is_in_it_alone() -> None:
    page = page_of(engine_trace(5))
    elements = Elements(page)
    policy = next(
        dict(attrs)["content"] for tag, attrs in elements.tags if ("http-equiv", "Content-Security-Policy") in attrs
    )
    assert policy is not None
    _, *scripts = (text for tag, text in elements.texts if tag == "script")
    (style,) = (text for tag, text in elements.texts if tag == "style")

    def digest(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    directives = dict(one.strip().split(" ", 1) for one in policy.split(";"))
    assert directives == {
        "default-src": "'none'", "script-src": " ".join(map(digest, scripts)), "style-src": digest(style),
        "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    for tag, attrs in elements.tags:
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "srcset", "action", "style", "ping"), (tag, name)
            assert name != "href" or str(value).startswith(("#", "data:,")), (tag, value)
    assert "@import" not in style
    assert "url(" not in style


def test_our_scripts_make_text_of_what_they_show_never_markup_or_code() -> None:
    for name in SCRIPTS:
        source = ASSETS.joinpath(name).read_text("utf-8")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch(",
                    "XMLHttpRequest", "import(", ".html(", "setTimeout(\"", "srcdoc"):  # fmt: skip
            assert way not in source, (name, way)


def test_every_kind_of_spans_has_a_colour_of_its_own_in_both_themes() -> None:
    style = ASSETS.joinpath("page.css").read_text("utf-8")
    kinds = [*KINDS, "batch"]  # as which a span that serves others is drawn
    themes = re.findall(r"(?ms)^(?:@media \(prefers-color-scheme: dark\) \{ )?:root \{(.*?)^\}", style)
    assert len(themes) == 2
    for theme in themes:
        colours = dict(re.findall(r"--([\w-]+): (#\w+);", theme))
        of_kinds = [colours.get(kind) for kind in kinds]
        assert None not in of_kinds, [kind for kind in kinds if kind not in colours]
        assert len({*of_kinds}) == len(kinds)


def test_the_library_is_the_one_that_is_named_next_to_it_and_its_licence_is_in_each_page() -> None:
    about = ASSETS.joinpath("d3.md").read_text("utf-8")
    library = ASSETS.joinpath("d3.min.js").read_bytes()
    assert f"SHA-256: {hashlib.sha256(library).hexdigest()}" in about
    version = re.search(r"Version: (\S+)", about)
    assert version is not None
    assert library.startswith(f"// https://d3js.org v{version[1]} ".encode())
    page = page_of(engine_trace(1))
    assert about.partition("## Licence")[2].strip().splitlines()[0] in page
    assert library.decode() in page
    assert b"</script" not in library


# No name breaks it


def test_no_name_ends_an_element_or_begins_one() -> None:
    page, benign = Elements(page_of(hostile())), Elements(page_of(engine_trace(2)))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in benign.tags]
    data = next(text for tag, text in page.texts if tag == "script")
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", data)
    for name in HOSTILE:
        assert printable(name) in {site[0] for site in page.document["sites"]}
    assert "\\u2028" in page.document["sites"][2][0]  # as in every text view: what does not print is told


@pytest.mark.parametrize(
    "options", [Options(), Options(rows=1, unit="ns", tracer_option="AllOpDetail", state="GPU")], ids=str
)
@pytest.mark.parametrize("trace", TRACES)
def test_no_trace_breaks_a_page(trace: str, options: Options) -> None:
    document = document_of(TRACES[trace], options)
    assert [view["name"] for view in document["views"]] == list(ON_PAGE)
    for view in document["views"]:
        assert bool(view["tables"]) != bool(view.get("why")), view["name"]
        for table in view["tables"]:
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_every_view_but_the_brief_one_has_tables_and_their_columns_are_there() -> None:
    assert set(ON_PAGE) == set(VIEW_OF) - {"brief"}
    shown = document_of(TRACES["a service beside torch"])
    full = [view["name"] for view in shown["views"] if view["tables"]]
    assert set(full) >= {"requests", "events", "ops", "kernels", "device", "copies", "memory", "startup", "cost"}


def test_an_empty_trace_says_of_each_part_why_it_is_empty() -> None:
    document = document_of(TRACES["an empty recording"])
    whys = {view["name"]: view["why"] for view in document["views"]}
    assert whys["batches"] == "No batch was recorded: a rule with `batch:` says which requests a call serves."
    assert whys["requests"].startswith("No request was recorded.")
    assert document["device"]["why"].startswith("No device time was recorded")
    assert document["listed"]["ids"] == []


# Its numbers are those of the views


def cells(document: dict[str, Any], view: str, title: str) -> list[list[Any]]:
    tables = next(one for one in document["views"] if one["name"] == view)["tables"]
    rows: list[list[Any]] = next(table for table in tables if table["title"] == title)["rows"]
    return rows


def test_tables_have_the_numbers_and_the_texts_of_the_views() -> None:
    trace = engine_trace(40)
    recording = Recording.from_trace(trace)
    document, view = document_of(trace), requests(recording, Options(rows=200))
    text = "\n".join(view.lines())
    for row, endpoint in zip(cells(document, "requests", "Endpoints"), view.endpoints, strict=True):
        assert row[0] == endpoint.name
        assert [cell[0] for cell in row[1:]] == [
            endpoint.requests, endpoint.errors, endpoint.mean_ns, endpoint.p50_ns, endpoint.p90_ns, endpoint.p99_ns,
            endpoint.max_ns, endpoint.wall_ns, endpoint.ratio,
        ]  # fmt: skip
        for cell in row[3:8]:
            assert re.search(rf"(?<![\d.]){re.escape(cell[1])}(?![\d.])", text), cell
    parts = Counter[str]()
    for part, endpoint_name, _, _, _, _, sum_cell, _ in cells(document, "requests", "Where the time went"):
        parts[endpoint_name] += sum_cell[0] if part != endpoint_name else 0
    assert parts == {endpoint.name: endpoint.wall_ns for endpoint in view.endpoints}
    calls = VIEW_OF["ops"](recording, Options(rows=200))
    shown = [row[0] for row in cells(document, "ops", "All functions")]
    assert shown == [row.names[0] for row in calls.functions[0].rows]  # type: ignore[attr-defined]


def test_the_figures_at_the_top_are_those_of_the_brief_view() -> None:
    document = document_of(engine_trace(40))
    figures = {figure["label"]: figure["value"] for figure in document["figures"]}
    endpoint = requests(Recording.from_trace(engine_trace(40)), Options()).endpoints[0]
    assert figures["Requests"] == "40"
    assert figures["p99"] == f"{endpoint.p99_ns / 1e6:.4g} ms"
    assert document["text"].splitlines()[0].strip("-<> ") == "Summary of chat-7b"


def test_each_span_of_the_page_has_the_times_and_the_parent_of_the_trace() -> None:
    trace = engine_trace(30)
    columns, document = Recording.from_trace(trace).columns, document_of(trace)
    its = document["spans"]
    starts, lengths, parents = summed(its["start"]), its["length"], its["parent"]
    sites, children = its["site"], its["children"]
    order = np.lexsort((columns.span_id, -columns.end_ns, columns.start_ns))
    place = {row: at for at, row in enumerate(order.tolist())}
    assert len(starts) == len(trace.spans)
    for at, row in enumerate(order.tolist()):
        span = trace.spans[row]
        assert (starts[at], lengths[at], lengths[at] - children[at]) == (span.start_ns, span.total_ns, span.self_ns)
        assert document["sites"][sites[at]][0] == span.site.name
        parent = int(columns.parent[row])
        assert parents[at] == (0 if parent < 0 else at - place[parent])


def test_parts_and_turns_of_each_request_add_up_to_its_wall_as_in_the_ledger() -> None:
    trace = engine_trace(30)
    recording, document = Recording.from_trace(trace), document_of(trace)
    joined, its = recording.joined, document["listed"]
    walls, names = its["wall"], its["part_names"]
    parts = iter(zip(its["part"], its["part_ns"], strict=True))
    turns = document["turns"]
    told = iter(zip(*(turns[name] for name in ("part", "after", "length")), strict=True))
    assert walls == recording.columns.total_ns[joined.rows].tolist()
    for place, (count, of_turns) in enumerate(zip(its["part_count"], turns["count"], strict=True)):
        shown = {names[part]: time_ns for part, time_ns in (next(parts) for _ in range(count))}
        assert shown == recording.ledger.times_of_request(place)
        assert sum(shown.values()) == walls[place]
        sums, gaps = Counter[str](), 0
        for part, after, length in (next(told) for _ in range(of_turns)):
            assert after >= 0
            sums[turns["names"][part]] += length
            gaps += after
        sums["share of batches"] -= shown.get("waiting in batches", 0)
        assert dict(sums) == {
            name: time_ns for name, time_ns in shown.items() if name not in ("unknown", "waiting in batches")
        }
        assert gaps <= shown.get("unknown", 0)


def test_a_box_of_the_call_tree_is_as_wide_as_the_self_times_at_and_below_it() -> None:
    trace = engine_trace(30)
    calls = document_of(trace)["calls"]
    names = [calls["names"][name][0] for name in calls["name"]]
    widths, running = calls["width"], calls["running"]
    top = [at for at, depth in enumerate(calls["depth"]) if depth == 0]
    assert sum(widths[at] for at in top) == sum(span.self_ns for span in trace.spans)
    assert running[names.index("POST /v1/chat")] == sum(
        span.self_ns
        for span in trace.spans
        if span.site.name == "tokenise" and trace.spans[span.parent_id - 1].site.name == "POST /v1/chat"
    )
    step = names.index("engine.step")
    assert (
        widths[step] == running[step] == sum(span.total_ns for span in trace.spans if span.site.name == "engine.step")
    )


# It stays small, and says what it leaves out


def test_a_full_page_has_spans_of_the_slowest_and_the_median_request_and_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(html_page, "MOST_SPANS", 120)
    monkeypatch.setattr(html_page, "MOST_STRETCHES", 50)
    monkeypatch.setattr(kept_spans, "MOST_LISTED", 30)
    document = document_of(engine_trace(40))
    its = document["listed"]
    walls, has_spans = its["wall"], its["has_spans"]
    assert len(walls) == 30
    assert 0 < sum(has_spans) < 30
    assert len(document["spans"]["start"]) <= 120
    assert has_spans[walls.index(max(walls))]
    said = " ".join(document["left_out"])
    assert "Of 40 requests the 30 longest are listed." in said
    assert f"{30 - sum(has_spans)} of the listed requests have no spans here" in said
    assert "stretches on devices are not drawn: the shortest" in said
    assert len(document["device"]["start"]) == 50


def test_a_selected_request_has_its_spans_with_any_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = engine_trace(40)
    monkeypatch.setattr(html_page, "MOST_SPANS", 100)
    monkeypatch.setattr(kept_spans, "MOST_LISTED", 5)
    joined = Recording.from_trace(trace).joined
    fastest = min(range(40), key=lambda place: int(trace.spans[int(joined.rows[place])].total_ns))
    (key,) = joined.keys[fastest]
    its = document_of(trace, request=key)["listed"]
    assert its["keys"][str(its["first"])] == [key]
    assert its["has_spans"][its["first"]] == 1
    with pytest.raises(TraceError, match="there is no request 'nobody'"):
        document_of(trace, request="nobody")


def test_one_request_of_more_spans_than_fit_has_its_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_page, "MOST_SPANS", 10)
    root = Span(Site("train", "step"), 1, 0, 1, 1, 0, 0, 1000, 1000, 0)
    below = [Span(Site("op", "op"), n, 1, 1, 1, 0, n, n + n, n, n) for n in range(2, 40)]
    document = document_of(Trace(Origin(1, "shop", 5, 5), 0, 1000, [root, *below]))
    assert sorted(document["spans"]["length"]) == [*range(31, 40), 1000]
    assert document["what"] == "step"


@pytest.mark.slow
def test_a_page_of_a_hundred_thousand_spans_has_at_most_five_megabytes(tmp_path: Path) -> None:
    trace = engine_trace(7500, layers=16)
    assert len(trace.spans) > 100_000
    page = write_page(tmp_path / "page.html", Recording.from_trace(trace), Options())
    assert 1_000_000 < page.stat().st_size <= html_page.MOST_BYTES == 5_000_000
    document = Elements(page.read_text("utf-8")).document
    assert len(document["spans"]["start"]) == len(trace.spans)
    assert document["left_out"] == []


@pytest.mark.slow
def test_a_page_that_is_too_large_has_fewer_spans_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording.from_trace(engine_trace(300))
    whole = write_page(tmp_path / "whole.html", recording, Options())
    for name in ("MOST_SPANS", "MOST_STRETCHES"):
        monkeypatch.setattr(html_page, name, 4000)
    monkeypatch.setattr(html_page, "MOST_BYTES", whole.stat().st_size - 20_000)
    less = write_page(tmp_path / "less.html", recording, Options())
    assert less.stat().st_size <= whole.stat().st_size - 20_000
    assert "have no spans here" in " ".join(Elements(less.read_text()).document["left_out"])


def test_rows_that_a_table_leaves_out_are_said_where_there_are_any() -> None:
    assert document_of(engine_trace(6))["left_out"] == []
    (said,) = document_of(engine_trace(6), Options(rows=1))["left_out"]
    assert said.startswith("Tables have at most ")


def test_readings_of_gauges_are_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_page, "MOST_READINGS", 1)
    trace = TRACES["a service"]
    document = document_of(trace)
    assert all(len(gauge["values"]) == 1 for gauge in document["device"]["gauges"])
    assert "Of gauges with more than 1 readings every few are drawn." in " ".join(document["left_out"])


# The command


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return file.dump(tmp_path / "run.npz", engine_trace(6))


def test_the_command_writes_one_file_for_its_owner_alone(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "page.html"
    assert main(["report", str(saved), "--html", str(page), "--unit", "us", "--request", "req-3"]) == 0
    assert capsys.readouterr().out == f"HTML page: {page}\n"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
    document = Elements(page.read_text("utf-8")).document
    assert (document["about"]["unit"], document["about"]["unit_ns"]) == ("us", 1000)
    assert document["listed"]["keys"][str(document["listed"]["first"])] == ["req-3"]


def test_several_files_are_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = engine_trace(6)
    other = replace(trace, origin=replace(trace.origin, pid=99), spans=trace.spans[:5])
    paths = [str(file.dump(tmp_path / f"{n}.npz", one)) for n, one in enumerate((trace, other))]
    assert main(["report", *paths, "--html", str(tmp_path / "page.html"), "--clock", "wall"]) == 0
    assert "2 processes" in Elements((tmp_path / "page.html").read_text("utf-8")).document["about"]["header"]
    capsys.readouterr()


@pytest.mark.parametrize("more", [["--json"], ["--view", "ops"], ["--by", "process"]], ids=" ".join)
def test_a_page_refuses_options_of_text_reports(saved: Path, tmp_path: Path, more: list[str], capsys: Any) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(saved), "--html", str(page), *more]) == 2
    assert f"--html writes all views on one page, so {more[0]} does not apply" in capsys.readouterr().err
    assert not page.exists()


def test_a_page_that_cannot_be_written_says_where_and_why(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved), "--html", "/proc/none/page.html"]) == 2
    assert "cannot write the page /proc/none/page.html: " in capsys.readouterr().err


def test_the_slowest_at_the_top_is_that_of_all_endpoints() -> None:
    often, once = Site("GET /often", "request"), Site("GET /once", "request")
    spans = [Span(often, n, 0, n, 1, 0, n * 10**9, n * 10**9 + 2 * 10**8, 2 * 10**8, 0) for n in range(1, 21)]
    spans.append(Span(once, 99, 0, 99, 1, 0, 30 * 10**9, 31 * 10**9, 10**9, 0))
    figures = {
        one["label"]: one for one in document_of(Trace(Origin(1, "shop", 0, 0), 0, 40 * 10**9, spans))["figures"]
    }
    assert (figures["p99"]["note"], figures["p99"]["value"]) == ("GET /often", "200 ms")
    assert (figures["Slowest"]["note"], figures["Slowest"]["value"]) == ("GET /once", "1000 ms")
