"""Handlers of windows: what reaches a collector, and that the loop does not wait for files and collectors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from otlp_collectors import Collector, collecting, first, refuse_with, reject_two, take
from otlp_receiver import Receiver, free_port, receiver

import instrument
from instrument import Profiler, chrome, export_chrome, export_otlp, print_summary, profiled, schedule, scope
from instrument.errors import ProfileError
from instrument.profile.keys import loads
from instrument.sessions.handlers import WINDOWS_LIMIT, InBackground, Window
from instrument.sessions.recorded import Recorded


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test works in a folder of its own; a session that a failing test left running is stopped."""
    monkeypatch.chdir(tmp_path)
    for name in ("INSTRUMENT_PROFILE", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    yield
    instrument.stop()


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture
def received(collector: Receiver) -> Receiver:
    collector.clear()
    return collector


@profiled("work")
def work() -> None: ...


def steps(profiler: Profiler, count: int) -> None:
    for _ in range(count):
        with scope("batch"):
            work()
        profiler.step()


def test_each_window_reaches_the_collector_with_its_tree_and_its_times(received: Receiver) -> None:
    found: list[Window] = []
    handlers = [found.append, export_otlp(received.endpoint)]
    own = loads("service: trainer", environ={})
    with Profiler(own, schedule=schedule(closed=1, record=2, repeat=2), on_trace_ready=handlers) as profiler:
        steps(profiler, 8)
    assert profiler.failures == 0
    sent = {span.span_id: span for span in received.spans()}
    assert Counter(span.name for span in sent.values()) == {"step": 4, "batch": 4, "work": 4}
    assert {span.resource["service.name"] for span in sent.values()} == {"trainer"}
    assert len({span.resource["service.instance.id"] for span in sent.values()}) == 1
    for span in sent.values():
        assert (span.name == "step") == (not span.parent_id)
        if span.parent_id:
            assert sent[span.parent_id].name == {"work": "batch", "batch": "step"}[span.name]
            assert sent[span.parent_id].trace_id == span.trace_id
    wanted = {
        (span.site.name, window.trace.origin.realtime_of(span.start_ns), window.trace.origin.realtime_of(span.end_ns))
        for window in found
        for span in window.trace.spans
    }
    assert {(span.name, span.start_ns, span.end_ns) for span in sent.values()} == wanted


@pytest.mark.slow
def test_handlers_are_combined_and_each_does_its_work(received: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = [export_otlp(received.endpoint), export_chrome("traces"), print_summary()]
    with Profiler(schedule=schedule(record=2, repeat=2), on_trace_ready=handlers) as profiler:
        steps(profiler, 4)
    assert len(received.spans()) == 12
    assert [chrome.load(path)[1].calls for path in Path("traces").iterdir()] == [6, 6]
    assert "Window 1, steps 2 to 3" in capsys.readouterr().out


def test_summaries_go_where_they_are_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "windows.txt"
    handlers = [print_summary(to="stderr"), print_summary(to=path)]
    with Profiler(schedule=schedule(record=2, repeat=2), on_trace_ready=handlers) as profiler:
        steps(profiler, 4)
    for text in (capsys.readouterr().err, path.read_text()):
        assert text.index("Window 0, steps 0 to 1\n") < text.index("Window 1, steps 2 to 3\n")
        assert text.count("Profiling Report") == 2


def test_a_span_that_is_open_at_edges_is_sent_with_the_first_window_that_it_reaches_into(received: Receiver) -> None:
    with Profiler(schedule=schedule(record=2), on_trace_ready=export_otlp(received.endpoint)) as profiler:
        opened = instrument.scope_start("epoch")
        steps(profiler, 5)
        instrument.scope_end(opened)
        steps(profiler, 1)
    spans = received.spans()
    assert Counter(span.name for span in spans) == {"epoch": 1, "step": 6, "batch": 6, "work": 6}
    (epoch,) = (span for span in spans if span.name == "epoch")
    assert epoch.attributes["instrument.clipped"] is True
    assert sum(span.parent_id == epoch.span_id for span in spans) == 5


PROFILE = "capture: {{sample: {sample}, errors: false}}\nexport: {{otlp: {{endpoint: '{endpoint}'}}}}"


@pytest.mark.parametrize("sample", [0, 0.5, 1])
def test_next_to_the_sessions_own_export_every_span_of_a_window_arrives_once(received: Receiver, sample: float) -> None:
    found: list[Window] = []
    instrument.start(loads(PROFILE.format(sample=sample, endpoint=received.endpoint), environ={}))
    handlers = [found.append, export_otlp()]
    with Profiler(schedule=schedule(closed=2, record=4), on_trace_ready=handlers) as profiler:
        across = instrument.scope_start("across", kind="request")
        for step in range(20):
            with scope(f"request {step}", kind="request"):
                work()
            with scope(f"loose {step}"):
                work()
            if step % 3 == 0:
                instrument.scope_end(across)
                across = instrument.scope_start("across", kind="request")
            profiler.step()
        instrument.scope_end(across)
    instrument.stop()
    sent = received.spans()
    ids = Counter(span.span_id for span in sent)
    assert set(ids.values()) == {1}
    names = Counter(span.name for span in sent)
    of_windows = {step for window in found for step in range(window.first_step, window.last_step + 1)}
    for step in range(20):
        for name in (f"request {step}", f"loose {step}"):
            if step in of_windows or sample == 1:
                assert names[name] == 1, name
            elif sample == 0 and "loose" in name and step - 1 not in of_windows:  # else in a request of the window
                assert not [span for span in sent if span.name == name], [window.recorded for window in found]
    windows = {span.span_id for window in found for span in window.trace.spans if span.site.kind != "step"}
    assert sum(names.values()) >= len(windows)
    if sample == 1:
        assert names["across"] == 8
    assert profiler.failures == 0


def test_a_request_that_is_open_when_its_window_is_sent_follows_whole_after_its_end() -> None:
    sent = threading.Semaphore(0)
    with collecting(take) as other:
        endpoint = f"http://127.0.0.1:{other.server_port}"
        instrument.start(loads(PROFILE.format(sample=0, endpoint=endpoint), environ={}))
        handlers = [export_otlp(), InBackground(lambda window: sent.release())]
        with Profiler(schedule=schedule(closed=1, record=1), on_trace_ready=handlers) as profiler:
            for number in range(3):
                opened = instrument.scope_start(f"request {number}", kind="request")
                profiler.step()
                work()
                profiler.step()
                assert sent.acquire(timeout=20)
                with scope(f"after {number}"):
                    pass
                instrument.scope_end(opened)
        instrument.stop()
        assert profiler.failures == 0
        whole = {name: 1 for number in range(3) for name in (f"request {number}", f"after {number}")}
        assert Counter(other.taken) == {**whole, "work": 3}


def test_batches_of_a_window_are_linked_to_the_requests_in_it(received: Receiver) -> None:
    with Profiler(schedule=schedule(record=1), on_trace_ready=export_otlp(received.endpoint)) as profiler:
        with scope("request", kind="request", key="r1"), scope("batch", batch=["r1", "gone"]):
            pass
        profiler.step()
    spans = {span.name: span for span in received.spans()}
    assert spans["batch"].links == ((spans["request"].trace_id, spans["request"].span_id),)


def test_another_collector_than_the_sessions_gets_the_whole_window(received: Receiver) -> None:
    with collecting(take) as other:
        profile = loads(PROFILE.format(sample=1, endpoint=received.endpoint), environ={})
        handler = export_otlp(f"http://127.0.0.1:{other.server_port}")
        with Profiler(profile, schedule=schedule(record=2, repeat=1), on_trace_ready=handler) as profiler:
            steps(profiler, 3)
        assert Counter(other.taken) == {"step": 2, "batch": 2, "work": 2}
    assert Counter(span.name for span in received.spans()) == {"batch": 3, "work": 3}


def test_a_dead_collector_is_counted_and_stops_neither_the_loop_nor_the_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    session = instrument.start(loads("", environ={}))
    assert session is not None
    handlers = [export_otlp(f"http://127.0.0.1:{free_port()}"), export_chrome("traces")]
    with Profiler(schedule=schedule(record=2), on_trace_ready=handlers) as profiler:
        steps(profiler, 6)
    assert profiler.failures == 3
    assert session.losses()["spans of windows that did not reach the OpenTelemetry collector"] == 18
    assert any(
        "on_trace_ready failed for window 0, steps 0 to 1: ExportError: 6 of 6 spans did not reach the "
        "OpenTelemetry collector (ConnectionRefusedError" in note
        for note in session.notes()
    )
    assert caplog.text.count("spans do not reach the OpenTelemetry collector") == 1
    assert len(list(Path("traces").iterdir())) == 3


@pytest.mark.parametrize(
    ("behave", "taken", "lost", "failures"),
    [(refuse_with(400), 0, 12, 2), (reject_two, 12, 4, 2), (first(1, refuse_with(400)), 6, 6, 1)],
    ids=["refused", "rejected in part", "refused once"],
)
def test_spans_that_a_collector_does_not_take_are_counted(behave: Any, taken: int, lost: int, failures: int) -> None:
    session = instrument.start(loads("", environ={}))
    assert session is not None
    with collecting(behave) as other:
        handler = export_otlp(f"http://127.0.0.1:{other.server_port}")
        with Profiler(schedule=schedule(record=2), on_trace_ready=handler) as profiler:
            steps(profiler, 4)
        assert len(other.taken) == taken
    assert session.losses()["spans of windows that did not reach the OpenTelemetry collector"] == lost
    assert profiler.failures == failures


@pytest.mark.slow
def test_a_window_larger_than_any_queue_arrives_whole() -> None:
    with collecting(take) as other:
        own = loads("limits: {ring: 256MiB}", environ={})
        with Profiler(own, on_trace_ready=export_otlp(f"http://127.0.0.1:{other.server_port}")) as profiler:
            with scope("one tree"):
                for _ in range(40_000):
                    work()
            for _ in range(30_000):
                work()
            profiler.step()
        assert Counter(other.taken) == {"step": 1, "one tree": 1, "work": 70_000}
        assert profiler.failures == 0
        assert profiler.window is not None
        assert profiler.window.trace.losses == {}


def sent_with(other: Collector) -> list[dict[str, str]]:
    return [{name.lower(): value for name, value in headers.items()} for headers in other.headers]


def test_settings_come_from_the_argument_then_the_profile_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(take) as asked, collecting(take) as of_profile, collecting(take) as of_environment:

        def loop(handler: Any, profile: str = "") -> None:
            with Profiler(loads(profile, environ={}), schedule=(0, 1), on_trace_ready=handler) as profiler:
                steps(profiler, 1)

        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{of_environment.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "who=environment")
        endpoint = f"http://127.0.0.1:{of_profile.server_port}"
        written = f"capture: {{sample: 0}}\nexport: {{otlp: {{endpoint: '{endpoint}', headers: {{who: profile}}}}}}"
        loop(export_otlp())
        loop(export_otlp(), written)
        loop(export_otlp(headers={"who": "argument"}), written)
        loop(export_otlp(f"http://127.0.0.1:{asked.server_port}"), written)
        who = [[headers["who"] for headers in sent_with(other)] for other in (of_environment, of_profile, asked)]
    assert who == [["environment"], ["profile", "argument"], ["environment"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"endpoint": "localhost:4318"}, "export_otlp:1:.*endpoint: found 'localhost:4318'"),
        ({"endpoint": ""}, "export_otlp: endpoint: found ''; allowed: the http:// or https:// URL of a collector"),
        ({"headers": {"bad name": "x"}}, "export_otlp:1:.*headers"),
    ],
)
def test_an_endpoint_and_headers_that_cannot_be_are_reported(arguments: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        export_otlp(**arguments)


# -------------------------------------------------------------------- beside the loop


def test_slow_handlers_run_next_to_the_loop_in_the_order_of_the_windows() -> None:
    go, seen = threading.Event(), []

    def slow(window: Window) -> None:
        assert go.wait(60)
        seen.append((window.index, len(window.trace.spans), threading.current_thread().name))

    with Profiler(schedule=schedule(record=1), on_trace_ready=InBackground(slow)) as profiler:
        steps(profiler, 5)  # ends, although no handler has
        assert seen == []
        go.set()
    assert seen == [(index, 3, "instrument-windows") for index in range(5)]


def test_work_of_handlers_next_to_the_loop_is_in_no_window() -> None:
    found: list[Window] = []
    went = threading.Semaphore(0)

    def busy(window: Window) -> None:
        for _ in range(100):
            work()
        went.release()

    with Profiler(schedule=schedule(record=1), on_trace_ready=[InBackground(busy), found.append]) as profiler:
        for _ in range(4):
            steps(profiler, 1)
            assert went.acquire(timeout=240)
    assert [len(window.trace.spans) for window in found] == [3] * 4


def test_windows_that_come_faster_than_they_are_written_are_given_up_oldest_first_and_counted() -> None:
    go, seen = threading.Event(), []
    session = instrument.start(loads("", environ={}))
    assert session is not None

    def slow(window: Window) -> None:
        assert go.wait(60)
        seen.append(window.index)

    with Profiler(schedule=schedule(record=1), on_trace_ready=InBackground(slow)) as profiler:
        steps(profiler, 1)
        while profiler._backlog._waiting:
            pass  # the first one is under way
        steps(profiler, WINDOWS_LIMIT + 3)
        go.set()
    assert seen == [0, *range(4, WINDOWS_LIMIT + 4)]
    assert profiler.failures == 3
    assert session.losses()["windows of loops that were not written"] == 3
    (note,) = (note for note in session.notes() if "given up" in note)
    assert note.startswith("window 1, steps 1 to 1 was given up: ExportError: newer windows came faster than they can")


def test_large_windows_that_wait_are_bounded_by_their_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.sessions.handlers.ROWS_LIMIT", 5)
    go, seen = threading.Event(), []

    def slow(window: Window) -> None:
        assert go.wait(60)
        seen.append((window.index, len(window.trace.spans)))

    with Profiler(schedule=lambda step: "RECORD_AND_RETURN", on_trace_ready=InBackground(slow)) as profiler:
        steps(profiler, 1)
        while profiler._backlog._waiting:
            pass
        for calls in (1, 3, 4, 8):
            for _ in range(calls):
                work()
            profiler.step()
        go.set()
    assert seen == [(0, 3), (4, 9)]
    assert profiler.failures == 3


def test_stop_waits_only_so_long_and_says_what_was_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("instrument.sessions.profiler.WAIT_LIMIT_NS", 10**7)
    begun, go, seen = threading.Event(), threading.Event(), []

    def stuck(window: Window) -> None:
        begun.set()
        go.wait(60)
        seen.append(window.index)

    with Profiler(schedule=schedule(record=1), on_trace_ready=InBackground(stuck)) as profiler:
        steps(profiler, 3)
        assert begun.wait(60)
        thread = profiler._backlog._thread
        assert thread is not None
    assert profiler.failures == 2
    assert "a handler of a Profiler still runs after" in caplog.text
    assert "window 1, steps 1 to 1 was given up: ExportError: they were not written within 0.01 s" in caplog.text
    go.set()
    thread.join(60)
    assert (seen, thread.is_alive()) == ([0], False)


def test_a_handler_that_fails_next_to_the_loop_is_noted_and_the_next_ones_run() -> None:
    seen: list[int] = []
    session = instrument.start(loads("", environ={}))
    assert session is not None

    def broken(window: Window) -> None:
        raise OSError("disk full")

    handlers = [InBackground(broken), InBackground(lambda window: seen.append(window.index))]
    with Profiler(schedule=schedule(record=1), on_trace_ready=handlers) as profiler:
        steps(profiler, 3)
    assert (profiler.failures, seen) == (3, [0, 1, 2])
    assert "on_trace_ready failed for window 0, steps 0 to 0: OSError: disk full" in session.notes()


def test_a_window_that_is_kept_reports_the_same_when_its_session_has_ended_and_another_runs() -> None:
    found: list[Window] = []
    with Profiler(loads("service: first", environ={}), schedule=(0, 2), on_trace_ready=found.append) as profiler:
        steps(profiler, 3)
        instrument.scope_end()
    instrument.start(loads("service: second", environ={}))
    work()
    trace = found[0].trace
    assert (trace.origin.service, len(trace.spans)) == ("first", 6)
    assert any("scope_end without an open scope" in note for note in trace.notes)
    assert "work" in found[0].summary()


def test_windows_that_nobody_keeps_are_never_made_into_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = Recorded.make_stretch_trace
    monkeypatch.setattr(
        "instrument.sessions.recorded.Recorded.make_stretch_trace",
        lambda recorded, stretch: (made.append(stretch.window), real(recorded, stretch))[1],
    )
    with Profiler(schedule=schedule(record=1), on_trace_ready=lambda window: None) as profiler:
        steps(profiler, 5)
    assert made == [4]  # `Profiler.window` is the newest


def test_a_fork_while_windows_are_written_leaves_the_child_without_them() -> None:
    go, seen = threading.Event(), []

    def slow(window: Window) -> None:
        assert go.wait(60)
        seen.append(window.index)

    with Profiler(schedule=schedule(record=1), on_trace_ready=InBackground(slow)) as profiler:
        steps(profiler, 3)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                profiler.step()
                profiler.stop()
                code = 2 if seen or "instrument-windows" in {thread.name for thread in threading.enumerate()} else 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        go.set()
    assert seen == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 0), (2, 1)], ids=["the thread begins at exit", "the thread is there"])
def test_the_interpreters_exit_writes_and_sends_what_is_left(counts: tuple[int, int]) -> None:
    with collecting(take) as other:
        program = f"""
from instrument import Profiler, export_chrome, export_otlp, profiled, schedule
work = profiled("work")(lambda: None)
handlers = [export_otlp("http://127.0.0.1:{other.server_port}"), export_chrome("traces")]
profiler = Profiler(schedule=schedule(record=2), on_trace_ready=handlers)
profiler.start()
for _ in range({counts[0]} + {counts[1]}):
    work()
    profiler.step()
work()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert Counter(other.taken) == dict.fromkeys(("step", "work"), sum(counts) + 1)
    assert len(list(Path("traces").iterdir())) == 1 + counts[1]
