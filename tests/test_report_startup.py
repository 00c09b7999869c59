"""The `startup` view: the way to serving, part by part, and what first calls cost, counted once."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from golden_views import is_golden, text_of
from hypothesis import given
from hypothesis import strategies as st
from tallies import Tally, Totals, made

from instrument import chrome, clock
from instrument.recording.distributions import bucket_of
from instrument.recording.spans import FirstCall, ImportTime, Origin, Site, Span, Startup
from instrument.report.startup_view import StartupView, startup
from instrument.report.table import LINE, measure_width
from instrument.report.view import Options, Recording, make_json_values
from instrument.trace.trace import Trace

MS = 1_000_000
LOAD = Site("torch.load", "phase", attributes=(("phase", "load"),))
MODEL = Site("from_pretrained (model)", "phase", attributes=(("phase", "load"),))
COMPILE = Site("torch.compile", "phase", attributes=(("phase", "compile"),))
HANDLE = Site("handle", "request")
UP, DOWN = (Site("Linear", "layer", instance=f"model.{name}") for name in ("up", "down"))


def count(tally: Tally, path: tuple[Site, ...], *calls_ms: float, first_ms: float = 0, thread: int = 1) -> None:
    for took_ms in calls_ms:
        took_ns = round(took_ms * MS)
        tally.totals(path, thread).merge(
            Totals(
                calls=1, total_ns=took_ns, self_ns=took_ns // 2, elapsed_ns=took_ns, min_ns=took_ns, max_ns=took_ns,
                first_ns=round(first_ms * MS), histogram={bucket_of(took_ns): 1},
            )
        )  # fmt: skip


def first(site: Site, start_ms: float, took_ms: float) -> FirstCall:
    return FirstCall(site, round(start_ms * MS), round(took_ms * MS))


def recording(tally: Tally, facts: Startup | None) -> Recording:
    return Recording(lambda: made(tally), lambda: Trace(Origin(1, "chat", 0, 0), 0, 1, []), make_startup=lambda: facts)


def view_of(tally: Tally, facts: Startup | None, **options: Any) -> StartupView:
    return startup(recording(tally, facts), Options(**options))


def a_service() -> tuple[Tally, Startup]:
    """1 s to the session, 5 s to the first request: imports, a model loaded by parts, one compiled in the request."""
    tally = Tally()
    count(tally, (MODEL,), 2_000, first_ms=3_500)
    count(tally, (MODEL, LOAD), 600, 700, first_ms=3_600)
    count(tally, (LOAD,), 100, first_ms=5_600)
    count(tally, (LOAD,), 90, 90, first_ms=9_000, thread=2)
    count(tally, (HANDLE,), 900, *[20] * 40, first_ms=6_000)
    count(tally, (HANDLE, COMPILE), 700, first_ms=6_100)
    count(tally, (HANDLE, UP), 80, *[10] * 40, first_ms=6_000)
    count(tally, (HANDLE, DOWN), 4, *[5] * 40, first_ms=6_800)
    imports = (
        ImportTime("torch", 20, 2_000 * MS, 1_500 * MS, 200 * MS),
        ImportTime("numpy", 3, 300 * MS, 300 * MS),
        ImportTime("chat", 1, 2_100 * MS, 50 * MS),
    )
    firsts = (
        first(MODEL, 3_500, 2_000), first(LOAD, 3_600, 600), first(HANDLE, 6_000, 900), first(COMPILE, 6_100, 700),
        first(UP, 6_000, 80), first(DOWN, 6_800, 4),
    )  # fmt: skip
    return tally, Startup(1_000 * MS, 0, imports, firsts)


def test_late_loading_counts_unless_it_is_within_a_request() -> None:
    mine, tally = Site("mine"), Tally()
    count(tally, (LOAD,), 10, 10, 10, 10, first_ms=0)
    spans = [
        Span(HANDLE, 1, 0, 1, 1, 0, 20 * MS, 30 * MS, 10 * MS, 0),
        Span(mine, 2, 0, 2, 1, 0, 40 * MS, 90 * MS, 50 * MS, 0),
        Span(mine, 3, 2, 2, 1, 0, 40 * MS, 90 * MS, 50 * MS, 0),
        Span(LOAD, 4, 2, 2, 1, 0, 50 * MS, 60 * MS, 10 * MS, 0),
        Span(LOAD, 5, 3, 2, 1, 0, 70 * MS, 80 * MS, 10 * MS, 0),
        Span(mine, 6, 1, 1, 1, 0, 22 * MS, 29 * MS, 7 * MS, 0),
        Span(LOAD, 7, 6, 1, 1, 0, 23 * MS, 28 * MS, 5 * MS, 0),
    ]
    trace, facts = Trace(Origin(1, "chat", 0, 0), 0, 100 * MS, spans), Startup(0, firsts=(first(HANDLE, 20, 10),))
    found = startup(Recording(lambda: made(tally), lambda: trace, make_startup=lambda: facts), Options())
    assert {part.name: part.total_ns // MS for part in found.late}["Loading"] == 20


def test_the_layout() -> None:
    assert is_golden("startup", text_of(view_of(*a_service())))


def test_the_parts_of_the_way_are_counted_once_and_add_up() -> None:
    view = view_of(*a_service())
    assert (view.before_ns, view.way_ns) == (1_000 * MS, 5_000 * MS)
    # The parts of a model are in its load, what threads load later is not on the way, and the request compiled.
    assert {part.name: part.total_ns // MS for part in view.way} == {
        "Imports, outside of spans": 1_650, "Loading": 2_100, "Compiling": 0, "Anything else": 1_250,
    }  # fmt: skip
    assert {one.name: one.total_ns // MS for one in view.preparations} == {
        "from_pretrained (model)": 2_000, "torch.load": 1_580, "torch.compile": 700,
    }  # fmt: skip
    assert {one.name: one.in_requests_ns // MS for one in view.preparations if one.in_requests_ns} == {
        "torch.compile": 700
    }


def test_later_spans_are_not_part_of_the_way_to_the_first_request() -> None:
    tally, facts = a_service()
    count(tally, (LOAD,), 400, 300, first_ms=5_650)
    count(tally, (HANDLE, LOAD), 30, 30, first_ms=6_050)
    spans = [
        Span(site, number, parent, 1, 1, 0, begin * MS, end * MS, 0, 0)
        for number, (site, parent, begin, end) in enumerate([
            (LOAD, 0, 5_650, 6_050), (HANDLE, 0, 6_000, 6_900), (LOAD, 2, 6_050, 6_080), (LOAD, 0, 7_000, 7_300),
            (LOAD, 0, 9_000, 9_090), (LOAD, 0, 9_100, 9_190),
        ], 1)
    ]  # fmt: skip
    imports = (*(facts.imports or ()), ImportTime("later", 1, 80 * MS, 80 * MS, 10 * MS, 70 * MS))
    facts = replace(facts, imports=imports)

    def view(held_from_ns: int) -> StartupView:
        trace = Trace(Origin(1, "chat", 0, 0), 0, 9_500 * MS, spans, held_from_ns=held_from_ns)
        return startup(Recording(lambda: made(tally), lambda: trace, make_startup=lambda: facts), Options())

    whole = view(0)
    assert {part.name: part.total_ns // MS for part in whole.way} == {
        "Imports, outside of spans": 1_650, "Loading": 2_100 + 400, "Compiling": 0, "Anything else": 850,
    }  # fmt: skip
    assert {part.name: part.total_ns // MS for part in whole.late} == {
        "Imports, outside of spans": 70, "Loading": 480,
    }  # fmt: skip
    text = text_of(whole)
    assert "Imports, outside of spans 70 Loading 480" in " ".join(text.split())
    assert "are on the way here" not in text
    assert "are on the way here" in text_of(view(6_500 * MS))


def test_first_calls_are_compared_with_the_median_of_the_others() -> None:
    view = view_of(*a_service())
    assert [(one.name, one.calls, one.first_ns // MS) for one in view.warm_ups] == [
        ("handle", 41, 900), ("Linear (model.up)", 41, 80),
    ]  # fmt: skip
    for one, median_ms in zip(view.warm_ups, (20, 10), strict=True):
        assert one.median_ns == pytest.approx(median_ms * MS, rel=0.008)
        assert one.extra_ns == one.first_ns - one.median_ns
    assert view.request is not None
    assert (view.request.after_ns, view.request.first_ns) == (6_000 * MS, 900 * MS)
    assert (view.ran_ns, view.ran_last) == (6_900 * MS, "handle")


def test_threads_that_load_side_by_side_leave_no_negative_rest() -> None:
    tally, facts = a_service()
    count(tally, (LOAD,), 4_000, first_ms=1_500, thread=3)
    view = view_of(tally, facts)
    assert "Anything else" not in {part.name for part in view.way}
    assert "Anything else" not in text_of(view)


def test_unknown_facts_are_named() -> None:
    tally, facts = a_service()
    assert "only a session's own trace has it" in text_of(view_of(tally, None))
    text = text_of(view_of(tally, replace(facts, process_ns=None, imports=None)))
    assert "Process began, until the session did - -" in " ".join(text.split())
    assert "`startup: auto` in the profile" in text
    text = text_of(view_of(Tally(), Startup(5 * MS, 0, ())))
    for told in ("No request has ended.", "Nothing was imported", "Nothing was seen to load", "No first call"):
        assert told in text


def test_a_part_of_the_way_that_nothing_watched_is_not_said_to_have_taken_no_time() -> None:
    tally, facts = a_service()
    # Loading and compiling are named by rules here.
    view = view_of(tally, replace(facts, imports=None))
    assert {part.name: part.total_ns and part.total_ns // MS for part in view.way} == {
        "Imports, outside of spans": None, "Loading": 2_100, "Compiling": 0, "Anything else": 2_900,
    }  # fmt: skip
    tally = Tally()
    count(tally, (HANDLE,), 900, 20, first_ms=6_000)
    unwatched = view_of(tally, replace(facts, imports=None))
    assert {part.name: (part.total_ns, part.ratio) for part in unwatched.way} == {
        **dict.fromkeys(("Imports, outside of spans", "Loading", "Compiling"), (None, None)),
        "Anything else": (5_000 * MS, 1.0),
    }
    lines = [line.split() for line in unwatched.lines()]
    assert ["Loading", "-", "-"] in lines
    assert ["Compiling", "-", "-"] in lines
    assert {part.name: part.total_ns for part in view_of(tally, replace(facts, imports=())).way}["Loading"] == 0


def test_imports_of_the_instrumentation_are_said_to_be_its_own() -> None:
    tally, facts = a_service()
    note = "instrument (package): imports of the instrumentation itself"
    assert note not in text_of(view_of(tally, facts))
    own = ImportTime("instrument (cuda)", 1, 9 * MS, 9 * MS)
    assert note in text_of(view_of(tally, replace(facts, imports=(*(facts.imports or ()), own))))


def test_options_bound_the_tables_and_scale_the_times() -> None:
    lines = view_of(*a_service(), rows=1, unit="s").lines()
    rest = [line.split() for line in lines if line.startswith("(remaining")]
    assert rest == [
        ["(remaining", "2)", "4", "-", "0.35", "18.9%"],
        ["(remaining", "2)", "-", "6", "-", "1.14", "0.7", "-"],
        ["(remaining", "1)", "-", "41", "-", "-", "-", "0.06997"],
    ]
    assert "(remaining 2)" in text_of(view_of(*a_service(), least_ns=1_000 * MS))


def test_it_is_saved_with_the_trace(tmp_path: Path) -> None:
    tally, facts = a_service()
    trace = Trace(Origin(1, "chat", 0, 0), 1_000 * MS, 9_000 * MS, [], startup=facts)
    loaded, again = chrome.load(chrome.dump(tmp_path / "trace.json.gz", trace, made(tally)))
    ours = startup(Recording.from_trace(loaded, lambda: again), Options())
    assert make_json_values(ours) == make_json_values(view_of(tally, facts))
    assert loaded.startup is not None
    assert (loaded.startup.imports, len(loaded.startup.firsts)) == (facts.imports, 6)
    trace.startup = Startup(5)
    assert chrome.load(chrome.dump(tmp_path / "trace.json.gz", trace))[0].startup == Startup(5)


@pytest.mark.parametrize("name", ["x" * 300, "名前" * 80, "a\nb\x1b[31m", "", "%s {}"])
def test_names_of_any_kind_keep_the_lines_whole(name: str) -> None:
    tally = Tally()
    site = Site(name, "request", instance=name)
    load = Site(name, "phase", attributes=(("phase", "load"),))
    count(tally, (site,), 90, 1, 1, first_ms=5)
    count(tally, (load,), 9, first_ms=2)
    facts = Startup(MS, 0, (ImportTime(name, 1, MS, MS),), (first(site, 5, 90), first(load, 2, 9)))
    lines = view_of(tally, facts).lines()
    assert all(line.isprintable() and measure_width(line) <= LINE for line in lines), lines


def test_the_process_began_before_this_and_after_the_machine() -> None:
    began_ns = clock.process_start_ns()
    assert began_ns is not None
    assert 0 < began_ns < clock.read_clocks()[0]


def test_a_child_began_after_its_parent_asked_for_it() -> None:
    program = "from instrument import clock; print(clock.process_start_ns())"
    before_ns = clock.read_clocks()[0]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert before_ns - 20 * MS < int(done.stdout) < clock.read_clocks()[0]


@pytest.mark.parametrize("text", ["", "1 (a) R", "1 (a) b) R " + "x " * 30])
def test_a_system_that_does_not_report_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(clock, "STAT", tmp_path / "stat")
    assert clock.process_start_ns() is None
    (tmp_path / "stat").write_text(text)
    assert clock.process_start_ns() is None


SITES = [HANDLE, LOAD, MODEL, COMPILE, UP, Site("step", "step")]
PATHS = st.lists(st.sampled_from(range(len(SITES))), min_size=1, max_size=4).map(
    lambda places: tuple(SITES[place] for place in places)
)
CALLS = st.lists(st.tuples(PATHS, st.integers(1, 3), st.lists(st.integers(1, 60), min_size=1, max_size=4)), max_size=8)


@given(CALLS, st.integers(10, 90), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=4))
def test_every_number_is_that_of_a_count_by_hand(
    calls: list[tuple[tuple[Site, ...], int, list[int]]], request_ms: int, imported: list[tuple[str, int]]
) -> None:
    tally = Tally()
    for path, thread, times in calls:
        count(tally, path, *times, first_ms=thread * 30, thread=thread)
    firsts = [first(HANDLE, request_ms, 5), first(HANDLE, request_ms + 50, 1), first(UP, 3, 2)]
    packages = {name: ImportTime(name, 1, took * MS, took * MS, took * MS // 2) for name, took in imported}
    view = view_of(tally, Startup(2 * MS, MS, tuple(packages.values()), tuple(firsts)))
    assert view.way_ns == (request_ms - 2) * MS

    def is_preparing(site: Site, phase: str = "") -> bool:
        return dict(site.attributes).get("phase") in ((phase,) if phase else ("load", "compile"))

    parts = {part.name: part.total_ns for part in view.way}
    for phase, name in (("load", "Loading"), ("compile", "Compiling")):
        assert parts[name] == sum(
            row.totals.total_ns
            for row in made(tally).iterate_totals()
            if is_preparing(row.path[-1], phase)
            and not any(is_preparing(site) or site.kind == "request" for site in row.path[:-1])
            and row.totals.first_ns < request_ms * MS
        )
    assert parts["Imports, outside of spans"] == view.imports_ns - view.imports_in_spans_ns
    if "Anything else" in parts:
        assert sum(parts.values()) == view.way_ns
    for part in view.way:
        assert part.ratio == part.total_ns / view.way_ns
    assert view.before_ns == MS
    assert view.imports_ns == sum(one.self_ns for one in packages.values())
    assert view.imports_in_spans_ns == sum(one.in_spans_ns for one in packages.values())
    assert view.ran_ns == max(request_ms + 5, 3 + 2) * MS - MS  # the second `handle` is the same place
    assert view.request is not None
    assert (view.request.after_ns, view.request.first_ns) == (request_ms * MS - MS, 5 * MS)
    for one in view.preparations:
        own = [row for row in made(tally).iterate_totals() if row.path[-1].name == one.name]
        outermost = [row for row in own if all(site.name != one.name for site in row.path[:-1])]
        assert one.calls == sum(row.totals.calls for row in own)
        assert one.total_ns == sum(row.totals.total_ns for row in outermost)
        assert one.self_ns == sum(row.totals.self_ns for row in own)
        assert one.in_requests_ns == sum(
            row.totals.total_ns for row in outermost if any(site.kind == "request" for site in row.path[:-1])
        )
        assert 0 <= one.in_requests_ns <= one.total_ns
        assert one.max_ns == max(row.totals.max_ns for row in own)
    for warm in view.warm_ups:
        own = [row.totals for row in made(tally).iterate_totals() if row.path[-1].name == warm.name.partition(" ")[0]]
        assert warm.calls == sum(totals.calls for totals in own) >= 2
        assert warm.extra_ns == warm.first_ns - warm.median_ns > 0
    assert json.dumps(make_json_values(view))
