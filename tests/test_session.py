"""The session in this process: start, stop, windows, files, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chrome_rules
import pytest
from otlp_receiver import receiver
from readback import spans_in
from trees import outline, tree_of

import instrument
from instrument import Profiler, StateError, chrome, profiled, scope
from instrument.errors import ProfileError
from instrument.profile.keys import loads
from instrument.profile.model import Schedule
from instrument.recorder.own_recording import Cursor
from instrument.recorder.recorder import CHECK_NS, RECORDER, Ticks
from instrument.recording.spans import Cost
from instrument.sessions.account import MOST_COMPLAINTS
from instrument.sessions.session import Session
from instrument.sessions.window import Windows


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test works in a folder of its own; a session that a failing test left running is stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INSTRUMENT_PROFILE", raising=False)
    yield
    instrument.stop()


def begin(text: str = "") -> Session:
    session = instrument.start(loads(text, environ={}))
    assert session is not None
    return session


@profiled("work")
def work() -> None: ...


def request(count: int = 1) -> None:
    for _ in range(count):
        with scope("request", kind="request"):
            work()


CHROME = "export: {chrome: {path: 'traces/{service}-{pid}-{window}.json'}}\nservice: shop"


def test_a_session_without_a_profile_records_decorators_and_scopes() -> None:
    instrument.start()
    request(3)
    text = instrument.summary()
    assert "request" in text
    assert "work" in text
    instrument.stop()
    work()
    assert RECORDER.tally().calls == 6


def test_the_profile_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.yaml").write_text("service: from-environment")
    monkeypatch.setenv("INSTRUMENT_PROFILE", str(tmp_path / "p.yaml"))
    session = instrument.start()
    assert session is not None
    assert session.profile.service == "from-environment"


def test_a_second_start_is_refused_and_says_what_runs(tmp_path: Path) -> None:
    begin()
    with pytest.raises(StateError, match="runs; call"):
        instrument.start()


def test_a_bad_profile_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("servce: x")
    with pytest.raises(ProfileError, match="did you mean 'service'"):
        instrument.start(tmp_path / "p.yaml")
    with pytest.raises(StateError, match="no session runs"):
        instrument.session()


def test_stop_twice_and_without_a_session_is_nothing() -> None:
    instrument.stop()
    session = begin()
    session.stop()
    session.stop()
    instrument.stop()


def test_recording_can_be_switched_off_and_on_at_run_time() -> None:
    begin()
    work()
    instrument.disable()
    work()
    instrument.enable()
    work()
    assert instrument.session().tally().calls == 2


def test_a_session_without_an_export_or_a_schedule_has_no_thread() -> None:
    before = {*threading.enumerate()}
    begin(CHROME)
    assert {*threading.enumerate()} <= before


def test_stop_writes_one_trace_of_the_whole_session_for_its_owner_only() -> None:
    begin(CHROME)
    request(2)
    instrument.stop()
    path = Path(f"traces/shop-{os.getpid()}-0.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert chrome_rules.problems(json.loads(path.read_text())) == []
    trace, tally = chrome.load(path)
    assert tree_of(trace.spans) == outline(
        """
        request
          work
        request
          work
        """
    )
    assert tally.calls == 4
    assert trace.cost is not None
    assert trace.cost.calls == 4


def test_dump_writes_what_is_kept_at_any_time_and_resets_nothing(tmp_path: Path) -> None:
    begin()
    request()
    first, _ = chrome.load(instrument.dump(tmp_path / "a.json.gz"))
    request()
    second, _ = chrome.load(instrument.dump(tmp_path / "b.json.gz"))
    assert (len(first.spans), len(second.spans)) == (2, 4)


def test_the_cost_in_a_dump_is_over_the_time_of_its_trace(tmp_path: Path) -> None:
    begin()
    request(1000)
    trace, _ = chrome.load(instrument.dump(tmp_path / "now.json"))
    assert trace.cost is not None
    assert trace.cost.window_ns == trace.end_ns - trace.start_ns


def test_the_summary_goes_where_the_profile_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for to in ("stderr", "stdout", "summary.txt"):
        begin(f"export: {{summary: {{to: {to}}}}}")
        request()
        instrument.stop()
    captured = capsys.readouterr()
    for text in (captured.err, captured.out, Path("summary.txt").read_text()):
        assert "Summary of " in text
        assert "request" in text


@pytest.mark.parametrize(
    "text",
    [
        "export: {summary: {to: 'blocked/summary.txt'}}",
        "export: {chrome: {path: 'blocked/trace.json'}}",
    ],
)
def test_a_place_that_cannot_be_written_is_logged_and_harmless(text: str, caplog: pytest.LogCaptureFixture) -> None:
    Path("blocked").write_text("a file where a folder should be")
    begin(text)
    request()
    instrument.stop()
    assert "blocked" in caplog.text
    assert Path("blocked").read_text().startswith("a file")


def test_unobserved_targets_are_named_in_the_summary_and_in_the_trace(tmp_path: Path) -> None:
    begin('functions: [{match: "no.such.module:f"}]\nexport: {chrome: {path: t.json}}')
    instrument.scope_end()
    request()
    assert "no.such.module not imported" in instrument.summary()
    assert "scope_end without an open scope" in instrument.summary()
    instrument.stop()
    trace, _ = chrome.load("t.json")
    assert any("no.such.module" in note for note in trace.notes)


def test_every_report_states_its_own_cost_and_the_recorder() -> None:
    begin()
    request(10)
    for views, said in (["brief"], "Cost: "), (["events"], "Cost of the instrumentation: "):
        text = instrument.summary(views=views)
        assert said in text
        assert "native recorder" in text


def test_the_cost_counts_the_threads_that_look_through_spans() -> None:
    begin("schedule: {record: 1, repeat: 1}")
    for _ in range(20):
        request(50)
        instrument.flush(100)
    deadline = time.monotonic() + 240
    while not (cost := instrument.session().cost()).thread_ns and time.monotonic() < deadline:
        time.sleep(0.05)
    assert cost.total_ns == round(cost.calls * cost.per_call_ns) + cost.thread_ns
    assert "on threads of its own" in " ".join(instrument.summary().split())


def test_the_cost_has_a_second_end_for_calls_whose_memory_other_work_has_taken_out_of_the_caches() -> None:
    begin("")
    for _ in range(50):
        with instrument.scope("work"):
            pass
    cost = instrument.session().cost()
    assert cost.cold_call_ns >= cost.per_call_ns
    assert cost.most_ns == round(cost.calls * cost.cold_call_ns)
    told = " ".join(instrument.summary(views=["events"]).split())
    assert ("if other work uses the processor's caches between the calls" in told) == (cost.most_ns > cost.total_ns)
    instrument.dump("saved.json")
    saved = chrome.load("saved.json")[0].cost
    assert saved is not None
    assert saved.cold_call_ns == pytest.approx(cost.cold_call_ns)


def test_a_saved_cost_without_the_second_end_has_one_end() -> None:
    assert Cost(5, 10.0, 1000).most_ns == Cost(5, 10.0, 1000).total_ns == 50


def test_a_corrected_summary_shows_self_times_without_the_cost_of_the_probes(tmp_path: Path) -> None:
    begin(CHROME)
    with instrument.scope("parent"):
        for _ in range(2_000):
            with instrument.scope("child"):
                pass
    session = instrument.session()
    before = {row.path[-1].name: row.totals.self_ns for row in session.tally().iterate_totals()}
    after = {row.path[-1].name: row.totals.self_ns for row in session.tally().correct_self_times().iterate_totals()}
    assert 0 <= after["parent"] < before["parent"]
    assert after["child"] == before["child"]
    assert "Self" not in instrument.summary(views=["events"])
    text = session.summary(views=["events"], corrected=True)
    instrument.stop()
    assert "less what their probes cost" in text
    (path,) = tmp_path.glob("traces/*.json")
    _, tally = chrome.load(path)
    assert {row.path[-1].name: row.totals.self_ns for row in tally.correct_self_times().iterate_totals()}[
        "parent"
    ] < before["parent"]


def test_the_views_come_in_the_order_asked_and_each_once() -> None:
    session = begin("export: {summary: {to: out.txt, views: [copies, events, device]}}")
    with scope("upload", kind="copy", attributes={"bytes": 4096}):
        pass
    request()
    titles = ["Copies Report", "Profiling Report", "Device Report"]
    whole, one, two = session.summary(), session.summary(views=["device"]), session.summary(views=["device"] * 2)
    instrument.stop()
    for text in (whole, Path("out.txt").read_text()):
        assert sorted(titles, key=text.index) == titles
        assert text.count("Cost of the instrumentation") == 1
    assert [title in one for title in titles] == [False, False, True]
    assert "Cost of the instrumentation" in one
    assert two.count("Device Report") == 1
    with pytest.raises(ValueError, match=r"view is 'devices'; allowed: .*; nearest is device"):
        session.summary(views=["devices"])


def test_events_count_every_call_while_the_views_of_spans_say_what_the_rings_hold() -> None:
    session = begin("limits: {ring: 64KiB}")
    request(3_000)
    text = session.summary(views=["events", "device"])
    held = session.trace().coverage
    assert next(line for line in text.splitlines() if line.startswith("request")).split()[1] == "3000"
    assert re.search(r"Spans: the newest \d+ are kept, none is missing from [\d.]+ s to [\d.]+ s; of all that", text)
    assert session.recorded.start_ns < held[0] < held[1]


def test_a_session_whose_rings_hold_everything_says_so() -> None:
    session = begin()
    request(5)
    assert session.trace().held_from_ns == 0
    assert "Spans: all 10 that were kept, from 0 s to" in session.summary(views=["copies"])


@pytest.mark.parametrize("threads", [1, 60])
def test_no_span_is_missing_from_the_complete_part_of_a_trace(threads: int) -> None:
    session = begin("limits: {ring: 64KiB}")
    ends: list[int] = []

    def serve() -> None:
        for _ in range(40 if threads > 1 else 2_000):
            with scope("request", kind="request"):
                pass
            ends.append(time.monotonic_ns())

    request()  # a thread that hardly records does not make the window longer
    for _ in range(threads):
        one = threading.Thread(target=serve)
        one.start()
        one.join()
    trace = session.trace()
    assert trace.losses["spans overwritten by newer ones"] > 0
    assert session.recorded.start_ns < trace.held_from_ns < trace.end_ns
    later = [span for span in trace.spans if span.end_ns > trace.held_from_ns]
    # The clock was read just after each end: of the span that ends at the edge it may lie on the other side.
    assert sum(end_ns > trace.held_from_ns for end_ns in ends) - len(later) in (0, 1)
    assert len(later) > 20
    late = session.trace(start_ns=trace.held_from_ns + 1)
    assert (late.held_from_ns, len(late.spans)) == (0, len(later))


def test_old_trace_files_go_when_the_disk_limit_is_reached(tmp_path: Path) -> None:
    begin("limits: {disk: 1B}\nschedule: {record: 1}\n" + CHROME)
    for _ in range(3):
        request()
        instrument.flush(100)
    losses = instrument.session().losses()
    instrument.stop()
    assert len(list(Path("traces").iterdir())) == 1
    assert losses["files removed to stay within limits.disk"] == 2


def test_trace_files_of_other_processes_count_too_and_what_is_not_ours_stays() -> None:
    Path("traces").mkdir()
    for age, name in enumerate(
        ["shop-77-0.json", "shop-78-12.json", "mine.json", "shop-x-0.json", "shop-79-0.json.gz"]
    ):
        Path("traces", name).write_text("x" * 10_000)
        os.utime(Path("traces", name), (1_000_000 - age, 1_000_000 - age))
    begin("limits: {disk: 18kB}\n" + CHROME)
    request()
    instrument.stop()
    left = {path.name for path in Path("traces").iterdir()}
    assert left == {"shop-77-0.json", "mine.json", "shop-x-0.json", "shop-79-0.json.gz", f"shop-{os.getpid()}-0.json"}


def test_a_session_that_complains_for_weeks_keeps_the_newest_complaints() -> None:
    Path("blocked").write_text("a file where a folder should be")
    session = begin("schedule: {record: 1}\nexport: {chrome: {path: 'blocked/{window}.json'}}")
    request(30)
    session.flush(100)
    notes = [note for note in session.notes() if "blocked" in note]
    assert 0 < len(notes) <= MOST_COMPLAINTS
    assert "29.json" in notes[-1]


def test_capture_loses_nothing_where_nothing_is_sent() -> None:
    session = begin("capture: {errors: true, limit: 1/min}\nlimits: {spans_per_request: 1}\n" + CHROME)
    for _ in range(5):
        opened = instrument.scope_start("request", kind="request")
        work()
        work()
        instrument.scope_end(opened, error=ZeroDivisionError())
    session.stop()
    assert session.losses() == {}


def test_flush_keeps_its_time_while_the_session_is_busy() -> None:
    session = begin("schedule: {record: 1}")
    busy, done = threading.Event(), threading.Event()

    def hold() -> None:
        with session.exporting.lock.acquire_within():
            busy.set()
            done.wait(240)

    holder = threading.Thread(target=hold)
    holder.start()
    busy.wait()
    session.flush(0.05)
    assert holder.is_alive()
    done.set()
    holder.join()


def test_the_wall_clock_that_spans_are_sent_by_is_renewed_when_it_has_drifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.otlp.span_queue.CLOCK_RENEWAL_NS", 0)
    session = begin("export: {otlp: {endpoint: 'http://127.0.0.1:9'}}")
    exporter = session.recorded.exporter
    assert exporter is not None
    before = exporter.own.origin
    session.flush(0)
    assert exporter.own.origin is before
    exporter.own.origin = replace(before, realtime_ns=before.realtime_ns - 10**8)
    session.flush(0)
    assert abs(exporter.own.origin.realtime_of(0) - before.realtime_of(0)) < 5 * 10**7


def test_stop_inside_a_span_and_a_new_start_record_each_session_by_itself() -> None:
    begin()
    with scope("across", kind="request"):
        work()
        instrument.stop()
        begin()
        work()
    assert instrument.session().tally().calls == 2
    request()
    assert [span.site.name for span in instrument.session().trace().spans if not span.parent_id] == [
        "across",
        "request",
    ]


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        begin("schedule: {record: 1}\nfunctions: [{match: 'json:loads'}]")
    assert not hasattr(json.loads, "__instrument__")


@pytest.mark.parametrize(
    ("schedule", "windows"),
    [
        (Schedule(record=2), [(0, 0, 2), (1, 2, 4), (2, 4, 6)]),
        (Schedule(record=1, skip_first=2, repeat=1), [(0, 2, 3)]),
        (Schedule(record=2, closed=1, ready=1, repeat=1), [(0, 2, 4)]),
        (Schedule(record=1, closed=1, skip_first=1, repeat=2), [(0, 2, 3), (1, 4, 5)]),
        (Schedule(record=8, skip_first=2, repeat=1), []),
        (None, []),
    ],
)
def test_a_schedule_cuts_windows_at_the_ends_of_steps(schedule: Any, windows: list[tuple[int, int, int]]) -> None:
    cuts = Windows(schedule, 0)
    assert [window for end in range(1, 8) if (window := cuts.advance_step(end)) is not None] == windows


def test_a_partial_window_is_delivered_at_stop_and_an_empty_one_is_not() -> None:
    cuts = Windows(Schedule(record=4, skip_first=1, repeat=1), 0)
    assert cuts.advance_step(5) is None
    assert cuts.advance_step(8) is None
    assert cuts.stop(9) == (0, 5, 9)
    assert Windows(Schedule(record=1, skip_first=1), 0).stop(9) is None


def test_a_schedule_writes_one_file_a_window_while_the_service_runs() -> None:
    begin("schedule: {skip_first: 1, record: 2, repeat: 1}\n" + CHROME)
    for _ in range(5):
        request()
    instrument.flush(100)
    path = Path(f"traces/shop-{os.getpid()}-0.json")
    assert path.exists()
    instrument.stop()
    trace, _ = chrome.load(path)
    assert [span.site.name for span in trace.spans if not span.clipped].count("request") == 2
    assert len(list(Path("traces").iterdir())) == 1


def test_the_file_of_a_window_reports_the_calls_and_the_cost_of_that_window_alone() -> None:
    begin("schedule: {skip_first: 3, record: 2, repeat: 1}\n" + CHROME)
    for _ in range(9):
        request()
        time.sleep(0.002)
    instrument.stop()
    trace, tally = chrome.load(f"traces/shop-{os.getpid()}-0.json")
    assert sum(row.totals.calls for row in tally.iterate_totals() if row.path[-1].name == "request") == 2
    assert sum(row.totals.total_ns for row in tally.iterate_totals()) == sum(
        span.end_ns - span.start_ns for span in trace.spans
    )
    assert trace.cost is not None
    assert trace.cost.calls == len(trace.spans)
    assert trace.cost.window_ns == trace.end_ns - trace.start_ns


def test_the_file_of_a_whole_session_has_all_calls_even_of_overwritten_spans() -> None:
    begin("limits: {ring: 64KiB}\n" + CHROME)
    for _ in range(3_000):
        request()
    instrument.stop()
    trace, tally = chrome.load(f"traces/shop-{os.getpid()}-0.json")
    assert trace.cost is not None
    assert sum(row.totals.calls for row in tally.iterate_totals()) == trace.cost.calls > len(trace.spans)


def test_the_summary_at_exit_takes_the_options_of_one_on_call() -> None:
    begin("export: {summary: {to: out/said.txt, least: 1s, unit: us, rows: 3}}")
    request(2)
    instrument.stop()
    said = Path("out/said.txt").read_text("utf-8")
    assert "Mean, us" in said
    assert "(remaining 1)" in said


def test_a_forked_child_starts_clean_and_writes_a_file_of_its_own() -> None:
    begin(CHROME)
    request(2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            calls = RECORDER.tally().calls
            request()
            instrument.stop()
            code = 0 if calls == 0 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    request()
    instrument.stop()
    mine, _ = chrome.load(f"traces/shop-{os.getpid()}-0.json")
    theirs, _ = chrome.load(f"traces/shop-{child}-0.json")
    assert (len(mine.spans), len(theirs.spans)) == (6, 2)
    assert theirs.origin.pid == child


def test_a_child_that_records_nothing_writes_nothing() -> None:
    begin(CHROME + "\n")
    child = os.fork()
    if child == 0:
        instrument.stop()
        os._exit(0)
    os.waitpid(child, 0)
    instrument.stop()
    assert [path.name for path in Path("traces").iterdir()] == [f"shop-{os.getpid()}-0.json"]


def exit_code(child: int) -> int:
    """Return the exit code of a child. One that hangs is killed, and fails the test."""
    deadline = time.monotonic() + 240
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def test_a_child_never_writes_over_its_parents_file_though_the_path_has_no_process_number() -> None:
    begin("export: {chrome: {path: out/one.json.gz}, summary: {to: out/one.txt}}")
    request(2)
    child = os.fork()
    if child == 0:
        request(3)
        instrument.stop()
        os._exit(0)
    os.waitpid(child, 0)
    instrument.stop()
    assert sorted(path.name for path in Path("out").iterdir()) == [
        f"one-{child}.json.gz", f"one-{child}.txt", "one.json.gz", "one.txt",
    ]  # fmt: skip
    names = [span.site.name for span in chrome.load("out/one.json.gz")[0].spans]
    assert names.count("request") == 2


def test_a_fork_while_another_thread_stops_the_session_leaves_the_child_without_one() -> None:
    session = begin(CHROME)
    request()
    session.threads.stopping.set()
    child = os.fork()
    if child == 0:
        request()
        clean = not RECORDER.on and not RECORDER.tally().calls
        instrument.stop()
        os._exit(0 if clean and instrument.start() is not None else 1)
    assert exit_code(child) == 0
    instrument.stop()
    assert [path.name for path in Path("traces").iterdir()] == [f"shop-{os.getpid()}-0.json"]


def test_forked_children_send_their_own_spans_under_their_own_process_id() -> None:
    with receiver() as collector:
        begin(f"service: shop\ncapture: {{sample: 1}}\nexport: {{otlp: {{endpoint: '{collector.endpoint}'}}}}")
        request()
        children = []
        for _ in range(2):
            children.append(os.fork())
            if not children[-1]:
                request(3)
                instrument.stop()
                os._exit(0)
        assert [exit_code(child) for child in children] == [0, 0]
        request()
        instrument.stop()
        sent = Counter((span.name, span.resource["process.pid"]) for span in collector.spans())
    wanted = {("request", os.getpid()): 2} | {("request", child): 3 for child in children}
    assert sent == wanted | {("work", pid): count for (_, pid), count in wanted.items()}


@pytest.mark.slow
def test_a_fork_while_threads_record_does_not_deadlock_the_child() -> None:
    begin("schedule: {record: 1000}\n" + CHROME)
    going = threading.Event()
    going.set()

    def busy() -> None:
        while going.is_set():
            request(50)
            time.sleep(0.001)

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    codes = []
    for _ in range(10):
        child = os.fork()
        if child == 0:
            request()
            os._exit(0 if RECORDER.tally().calls == 2 else 1)
        codes.append(exit_code(child))
    going.clear()
    for thread in threads:
        thread.join()
    assert codes == [0] * 10


def test_a_compressed_trace_is_compressed(tmp_path: Path) -> None:
    begin()
    request(100)
    path = instrument.dump(tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_check_imports_what_the_rules_name_and_undoes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from instrument.sessions.process import check

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "checked_ok.py").write_text("def f(): return 1")
    (tmp_path / "checked_bad.py").write_text("raise RuntimeError('at import')")
    verdicts, problems = check(loads('functions: [{match: "checked_ok:f"}, {match: "checked_ok:g"}]'))
    assert problems == []
    assert [verdict.state for verdict in verdicts] == ["attached", "not found"]
    assert not hasattr(sys.modules["checked_ok"].f, "__instrument__")
    verdicts, (problem,) = check(loads('functions: [{match: "checked_bad:f"}, {match: "checked_ok:f"}]'))
    assert problem == "<profile>: module checked_bad fails to import: RuntimeError: at import"
    assert [(verdict.state, verdict.why) for verdict in verdicts] == [
        ("waiting", "checked_bad fails to import: RuntimeError: at import"),
        ("attached", ""),
    ]
    _, (problem,) = check(loads(""), ["checked_missing"])
    assert "checked_missing fails to import" in problem


def test_check_of_a_service_that_starts_a_session_itself_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from instrument.sessions.process import check

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "checked_start.py").write_text("import instrument\nstarted = instrument.start()\ndef f(): return 1")
    (verdict,), _ = check(loads('functions: [{match: "checked_start:f"}]'))
    assert (verdict.state, sys.modules["checked_start"].started) == ("attached", None)
    with pytest.raises(StateError, match="no session runs"):
        instrument.session()


@pytest.mark.parametrize(
    ("profile", "are_read"),
    [("budget: 1%", False), ("schedule: {record: 5}", True), ("{budget: 1%, schedule: {record: 5}}", True)],
)
def test_spans_that_nobody_wants_are_not_read_while_the_service_runs(
    profile: str, are_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    looks: list[None] = []
    monkeypatch.setattr(Cursor, "read_new_rows", lambda _: looks.append(None) or [])
    session = begin(profile)
    request(3)
    session.exporting.export_new_rows()
    assert bool(looks) == are_read


def test_the_time_stamp_counter_is_used_where_it_is_sound_and_named_where_it_is_not() -> None:
    session = begin("clock: tsc")
    request(3)
    reason = Ticks(RECORDER).use_tick_counter(0)
    text = instrument.summary()
    assert ("clock: tsc is not used" in text) == bool(reason)
    session.recorded.ticks.check_counter(time.monotonic_ns() + CHECK_NS)
    instrument.stop()
    before_ns = time.monotonic_ns()
    now_ns = RECORDER.now_ns()
    assert before_ns - 10**6 < now_ns < time.monotonic_ns() + 10**6
    spans = spans_in(RECORDER)
    assert len(spans) == 6
    assert all(session.recorded.start_ns - 50_000 < span.start_ns <= span.end_ns for span in spans)


def test_a_request_inside_a_span_of_the_services_own_tracer_becomes_its_child_at_the_collector() -> None:
    from opentelemetry import trace as opentelemetry_trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    caller = SpanContext(trace_id=0xABC << 64, span_id=0xDEF, is_remote=False, trace_flags=TraceFlags(1))
    with receiver() as collector:
        begin(f"export: {{otlp: {{endpoint: 'http://127.0.0.1:{collector.http_port}'}}}}")
        with opentelemetry_trace.use_span(NonRecordingSpan(caller)):
            request()
        request()
        instrument.stop()
        spans = collector.spans()
    requests = [span for span in spans if span.name == "request"]
    children = {span.parent_id: span for span in spans if span.name == "work"}
    assert [(span.trace_id, span.parent_id) for span in requests if span.parent_id] == [(0xABC << 64, 0xDEF)]
    assert len(requests) == 2
    for span in requests:
        assert children[span.span_id].trace_id == span.trace_id


@pytest.mark.parametrize("sample", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_request_within_other_work_is_the_root_of_a_trace_of_its_own_at_the_collector(sample: int) -> None:
    from opentelemetry import trace as opentelemetry_trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    caller = SpanContext(trace_id=0xABC << 64, span_id=0xDEF, is_remote=False, trace_flags=TraceFlags(1))
    with receiver() as collector:
        begin(
            f"capture: {{sample: {sample}, slow: 1ns}}\n"
            f"export: {{otlp: {{endpoint: 'http://127.0.0.1:{collector.http_port}'}}}}"
        )
        with Profiler(schedule=(0, 2)) as profiler:
            with scope("serve", kind="step"):
                request()
                with opentelemetry_trace.use_span(NonRecordingSpan(caller)):
                    request()
            profiler.step()
        instrument.stop()
        spans = {span.span_id: span for span in collector.spans()}
    names = Counter(span.name for span in spans.values())
    assert names == {"request": 2, "work": 2} | ({"serve": 1} if sample else {})
    # Without their tree around them, which may not be kept, nobody finds what a request that names a parent hangs on.
    roots = {(span.trace_id == 0xABC << 64, span.parent_id) for span in spans.values() if span.name == "request"}
    assert roots == {(False, 0), (True, 0xDEF)}
    for span in spans.values():
        if span.name == "work":
            assert (spans[span.parent_id].name, spans[span.parent_id].trace_id) == ("request", span.trace_id)
    assert len({span.trace_id for span in spans.values()}) == 2 + sample


STEPPED = """
class Trainer:
    def step(self, number): return number
    def other(self): ...
async def serve(number): return number
"""


@pytest.mark.parametrize(
    ("rules", "name"),
    [("", "stepped:Trainer.step"), ("functions: [{match: 'stepped:**', name: trained}]", "stepped:Trainer.step")],
    ids=["no rule of its own", "another rule has it"],
)
def test_the_calls_of_a_named_function_are_the_steps_of_a_schedule(
    rules: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stepped.py").write_text(STEPPED)
    monkeypatch.delitem(sys.modules, "stepped", raising=False)
    session = begin(f"schedule: {{skip_first: 1, closed: 1, record: 2, repeat: 2, step: '{name}'}}\n{rules}\n{CHROME}")
    import stepped  # type: ignore[import-not-found]

    trainer = stepped.Trainer()
    for number in range(9):
        request()  # is none of the steps
        with scope("mark", attributes={"at": number}):
            assert trainer.step(number) == number
        if number % 2:
            session.flush(100)
    instrument.stop()
    (verdict,) = (verdict for verdict in session.verdicts() if verdict.rule == f"schedule.step {name}")
    assert verdict.state in ("attached", "uncalled")
    windows = []
    for index in range(2):
        trace, _ = chrome.load(f"traces/shop-{os.getpid()}-{index}.json")
        windows.append(sorted(span.attributes["at"] for span in trace.spans if span.site.name == "mark"))
        kinds = {span.site.kind for span in trace.spans if span.site.qualname == "Trainer.step"}
        assert kinds == {"step"}, "views of steps are of these"
    # A window begins when the step before it has ended, with that step's mark still open.
    assert windows == [[1, 2, 3], [4, 5, 6]]
    assert len(list(Path("traces").iterdir())) == 2


def test_a_step_that_is_not_there_is_named_and_one_that_comes_by_reload_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stepped.py").write_text(STEPPED)
    monkeypatch.delitem(sys.modules, "stepped", raising=False)
    import stepped

    session = begin(f"schedule: {{record: 1, step: 'stepped:Trainer.stop'}}\n{CHROME}")
    assert any(
        "schedule.step stepped:Trainer.stop" in note and "nearest is stepped:Trainer.step" in note
        for note in session.notes()
    )
    for _ in range(3):
        request()
        stepped.Trainer().step(1)
    session.flush(100)
    assert not Path("traces").exists()
    session.reload(loads(f"schedule: {{record: 2, step: 'stepped:serve'}}\n{CHROME}", environ={}))

    async def loop() -> None:
        for number in range(4):
            assert await stepped.serve(number) == number

    asyncio.run(loop())
    session.flush(100)
    calls = [chrome.load(path)[0] for path in sorted(Path("traces").iterdir())]
    assert [sum(span.site.name == "serve" for span in trace.spans) for trace in calls] == [0, 2, 2]


def test_a_budget_never_mutes_what_a_schedule_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stepped.py").write_text(STEPPED)
    monkeypatch.delitem(sys.modules, "stepped", raising=False)
    begin("schedule: {record: 1, step: 'stepped:Trainer.step'}\nfunctions: [{match: 'stepped:Trainer.other'}]")
    import stepped

    stepped.Trainer().step(1)
    assert not RECORDER.mute(stepped.Trainer.step.__instrument__)
    assert RECORDER.mute(stepped.Trainer.other.__instrument__)


@pytest.mark.parametrize("used", [False, True])
def test_unobserved_targets_are_named_alike_before_and_after_the_end(used: bool, torch: Any) -> None:
    text = "phases: auto\nloaders: auto\ncomm: auto\ncopies: [{directions: [h2h]}, {directions: [h2d]}]"
    session = instrument.start(loads(text, environ={}))
    try:
        if used:
            for (batch,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2, 2))):
                torch.nn.Linear(2, 2)(batch.to(torch.float64).to(torch.float32))
        before = session.notes()
    finally:
        instrument.stop()
    assert session.notes() == before
    assert any("loaders: waiting" in note for note in before) is not used
