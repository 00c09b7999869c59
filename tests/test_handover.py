"""The handover of the export between a session and the agent of its run, played by the test: who reads the recording.

What a real agent makes of it is in `test_agent_export`.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from otlp_collectors import Collector, collecting, refuse_with, swallow, take

import instrument
from instrument import scope
from instrument.errors import ExportError
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.recording import export_place
from instrument.recording.export_place import ExportPlace, Progress
from instrument.runtime import packets, run_folder
from instrument.sessions import handover, session_threads
from instrument.sessions import session as session_module
from instrument.sessions.generation import Generations
from instrument.sessions.session import Session
from instrument.sessions.session_threads import SessionThreads


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """Where sessions of the test join."""
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(packets.FAMILY, packets.KIND) as listener:
        path = Path(folder) / "agent.sock"
        listener.bind(os.fspath(path))
        listener.listen()
        monkeypatch.setenv(run_folder.VARIABLE, os.fspath(path))
        yield listener
        instrument.stop()


@pytest.fixture
def agent(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The same of an agent that is not heard: tests look after the export themselves, and nobody else does."""
    monkeypatch.setattr(Generations, "hear_agent", lambda _: None)
    return listener


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting(take) as server:
        yield server


def begin(server: Collector, more: str = "", rules: str = "") -> Session:
    export = f'export: {{otlp: {{endpoint: "http://127.0.0.1:{server.server_port}"}}{more}}}'
    session = instrument.start(loads(f"{rules}\n{export}", environ={}))
    assert session is not None
    return session


def serve(count: int) -> None:
    for _ in range(count):
        with scope("serve", kind="request"):
            pass


def taken() -> ExportPlace:
    """The recording, whose export the agent has taken."""
    place = ExportPlace(RECORDER.memory_fd)
    assert place.take()
    place.read()  # what is written goes on from there
    return place


def write(place: ExportPlace, generation: int = 0, **fates: int) -> None:
    """Have the agent say how far it has come."""
    progress = Progress(generation or export_place.counted(place)[0])
    progress.fates.update(fates)
    progress.settled_ns = time.monotonic_ns() + 60 * 10**9
    place.write(progress)


def test_flush_takes_no_word_on_another_session_for_one_on_this(collector: Collector, agent: socket.socket) -> None:
    session = begin(collector)
    place = taken()
    serve(3)
    write(place, export_place.counted(place)[0] + 1, seen=9, kept=9, exported=9)
    found = session.flush(0)
    assert found is not None
    assert (found.settled, found.exported) == (False, 0)
    place.close()
    assert session.handover.take_over()
    found = session.flush(30)
    assert found is not None
    assert (found.complete, found.exported, session.losses()) == (True, 3, {})


def test_spans_that_the_agent_has_passed_are_not_told_as_on_their_way(
    agent: socket.socket, collector: Collector
) -> None:
    session = begin(collector, ", summary: {to: summary.txt}")
    place = taken()
    serve(10)
    write(place, seen=8, passed=5, kept=3, exported=1)
    session.stop()
    assert list(session.losses().values()) == [4]  # two that it has not read, and two that it has not sent
    place.close()


def test_the_end_waits_no_longer_for_an_agent_that_takes_no_notice(collector: Collector, agent: socket.socket) -> None:
    session = begin(collector)
    place = taken()
    serve(3)
    write(place, seen=1)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(session._flush_by_agent(math.inf, 0.05)), daemon=True)
    waiting.start()
    waiting.join(120)
    assert [(delivery.settled, unsettled) for delivery, unsettled in found] == [(False, 2)]
    place.close()


def test_the_end_waits_for_an_agent_whose_exporter_has_yet_to_begin(collector: Collector, agent: socket.socket) -> None:
    session = begin(collector)
    serve(3)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(session._flush_by_agent(math.inf, 0.05)), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert not found
    place = taken()
    write(place, seen=3, kept=3, exported=3)
    waiting.join(120)
    assert [(delivery.settled, unsettled) for delivery, unsettled in found] == [(True, 0)]
    place.close()


def test_the_end_waits_for_no_agent_that_has_gone(collector: Collector, agent: socket.socket) -> None:
    session = begin(collector)
    serve(3)
    connection, _ = agent.accept()
    connection.close()
    assert session._flush_by_agent(math.inf, 0.05)[1] == 3


def test_a_run_without_a_summary_says_what_was_unsent_at_its_end(
    collector: Collector, agent: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("INSTRUMENT_RUN_PID", str(os.getpid()))
    monkeypatch.setattr(session_module, "UNSEEN_S", 0.01)
    monkeypatch.setattr(session_threads, "START_DELAY_S", 0)
    begin(collector)
    place = taken()
    serve(3)
    write(place, seen=1)
    instrument.stop()
    place.close()
    assert "at its end: 2 spans on their way by the agent of the run" in caplog.text


def test_a_session_whose_threads_begin_too_late_sends_its_metrics_all_the_same(
    agent: socket.socket, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin, were_to_begin, begin_threads = threading.Event(), threading.Event(), SessionThreads._start_threads

    def begin_late(self: SessionThreads) -> None:
        may_begin.wait(60)
        begin_threads(self)
        were_to_begin.set()

    monkeypatch.setattr(SessionThreads, "_start_threads", begin_late)
    monkeypatch.setattr(session_threads, "START_LIMIT_S", 0.0)
    monkeypatch.setenv("INSTRUMENT_RUN_PID", "1")  # as in a process that begins them with its first span
    session = begin(collector, rules="requests: auto")
    serve(1)
    assert session.handover.take_over()
    session.stop()
    assert "instrument.cost" in {metric.name for metric in collector.metrics}
    assert session.losses() == {}
    may_begin.set()
    assert were_to_begin.wait(60)  # and have not, or they would stay for ever


def test_a_session_whose_agent_does_not_export_gives_nothing_back_to_that_one(
    collector: Collector, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "NEGLECTED_S", 0.0)
    session = begin(collector)
    found = []
    for _ in range(4):
        session.look_after_export(is_joined=True)
        found.append(session.handover.is_here)
    session._membership.join()  # another one
    session.look_after_export(is_joined=True)
    assert [*found, session.handover.is_here] == [True, True, True, True, False]


def test_a_session_is_of_use_while_it_gives_the_export_back(agent: socket.socket) -> None:
    with collecting(swallow) as silent:
        session = begin(silent)
        assert session.handover.take_over()
        serve(10)
        session.flush(0)
        giving = threading.Thread(target=session.handover.give_back)
        giving.start()
        while session.handover.is_here:
            time.sleep(0.001)
        session.count_loss("something", 1)
        assert session._exporter is not None
        assert session._exporter.waiting == 10  # what it has read is still on its way
        giving.join()
        instrument.stop()


def test_what_a_session_lost_is_told_once_before_and_after_it_gives_the_export_back(agent: socket.socket) -> None:
    with collecting(refuse_with(400)) as refusing:
        session = begin(refusing)
        found = []
        for _ in range(2):
            assert session.handover.take_over()
            serve(10)
            session.flush(30)
            found.append(dict(session.losses()))
            session.handover.give_back()
            found.append(dict(session.losses()))
        assert found == [{"spans failed by the OTLP export": count} for count in (10, 10, 20, 20)]
        instrument.stop()


def test_a_session_that_takes_over_counts_what_the_agent_had_not_told_of_requests(
    collector: Collector, agent: socket.socket
) -> None:
    session = begin(collector)
    place = taken()
    write(place, **{"derived lost": 1, "deriving": 2, "queueing": 40})
    assert list(session.losses().values()) == [1]
    place.close()
    assert session.handover.take_over()
    assert session.losses() == {
        "spans of queue, prefill, decode and stalls lost by the OTLP export": 3,
        "requests that batches served without their time in the queue among the metrics": 40,
    }
    instrument.stop()


def test_a_session_exports_at_its_end_what_the_agent_has_let_go_of(collector: Collector, agent: socket.socket) -> None:
    begin(collector)
    place = taken()
    serve(2)
    write(place, seen=0)
    place.close()
    instrument.stop()
    assert Counter(collector.taken) == {"serve": 2}


def test_what_a_session_that_has_taken_over_could_not_send_is_told_after_its_end(agent: socket.socket) -> None:
    with collecting(refuse_with(404)) as server:
        session = begin(server)
        place = taken()
        serve(2)
        write(place, seen=0, failed=5)
        place.close()
        instrument.stop()
    assert session.losses() == {"spans failed by the OTLP export": 7}


def test_a_session_takes_over_at_once_what_the_agent_says_to_be_its_own(
    collector: Collector, listener: socket.socket
) -> None:
    session = begin(collector)  # whose threads begin before it has joined
    taken().close()
    joined, _ = listener.accept()
    with joined:
        told = [list(packets.receive(joined)[0] or ()) for _ in range(3)]
        assert told == [["join"], ["records"], ["hears"]]
        packets.send(joined, {"yours": True})
        while not session.handover.is_here:
            time.sleep(0.001)
        serve(2)
        found = session.flush(30)
        assert found is not None
        assert (found.complete, found.exported) == (True, 2)


def test_who_flushes_as_the_session_takes_the_export_over_waits_until_that_is_done(
    collector: Collector, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = begin(collector, rules="requests: auto")
    exporter = session._exporter
    assert exporter is not None
    starts, may_start, start = threading.Event(), threading.Event(), exporter.start

    def start_late() -> None:
        starts.set()
        may_start.wait(60)
        start()

    monkeypatch.setattr(exporter, "start", start_late)
    serve(3)
    taking = threading.Thread(target=session.handover.take_over)
    taking.start()
    assert starts.wait(60)
    found: list[Any] = []
    flushing = threading.Thread(target=lambda: found.append(session.flush(60)))
    flushing.start()
    flushing.join(0.1)
    may_start.set()
    flushing.join(120)
    taking.join(120)
    assert [(one.settled, one.exported) for one in found] == [(True, 3)]


def test_a_session_whose_threads_begin_as_it_ends_does_not_join_again(
    collector: Collector, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin, have_begun, begin_threads = threading.Event(), threading.Event(), SessionThreads._start_threads

    def begin_late(self: SessionThreads) -> None:
        begin_threads(self)
        have_begun.set()

    monkeypatch.setattr(SessionThreads, "_start_threads", begin_late)
    monkeypatch.setattr(SessionThreads, "start", lambda _: may_begin.wait(60))
    monkeypatch.setattr(session_threads, "START_LIMIT_S", 0.0)
    monkeypatch.setattr(session_threads, "START_DELAY_S", 0.0)
    monkeypatch.setenv("INSTRUMENT_RUN_PID", "1")  # as in a process that begins them with its first span
    session = begin(collector)
    serve(1)
    while not session._threads.have_begun:
        time.sleep(0.001)
    session.stop()
    may_begin.set()
    assert have_begun.wait(60)
    assert session._membership.joins == 1
    assert session._generations.control is None


def test_one_who_takes_the_export_and_the_end_of_the_session_do_not_wait_for_each_other(
    collector: Collector, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "LOCK_S", 0.1)
    session = begin(collector)
    agent.close()
    begins, begin_here = threading.Event(), session.handover._begin_here
    monkeypatch.setattr(session.handover, "_begin_here", lambda: (begins.set(), begin_here()))
    taker = threading.Thread(target=session.handover.insist, daemon=True)

    def stop() -> None:
        with session._lock.held():
            taker.start()
            assert begins.wait(60)
            session.stop()

    ending = threading.Thread(target=stop, daemon=True)
    ending.start()
    ending.join(120)
    taker.join(120)
    assert not ending.is_alive()
    assert not taker.is_alive()


def test_a_window_is_not_sent_where_the_agent_may_send_the_same_spans(
    collector: Collector, agent: socket.socket
) -> None:
    session = begin(collector)
    place = taken()
    serve(2)
    with pytest.raises(ExportError, match="asked to send 2 spans of a window, found that the agent"):
        session.unsent(session.trace().spans)
    assert session.losses() == {"spans of windows that the agent of the run may not have kept": 2}
    place.close()


@pytest.mark.parametrize("is_read", [False, True], ids=["nobody reads it", "the agent reads it"])
def test_a_session_begins_once_what_the_one_before_recorded_is_read_or_counts_it(
    is_read: bool, collector: Collector, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "LAST_READ_S", 60.0 if is_read else 0.01)
    begin(collector)
    place = taken()
    serve(3)
    write(place, seen=1, passed=1)
    instrument.stop()
    reading = threading.Timer(0.1, lambda: write(place, seen=3, passed=3))
    if is_read:
        reading.start()
    session = begin(collector)
    assert session.losses() == ({} if is_read else {handover.UNREAD: 2})
    reading.cancel()
    place.close()


def test_a_session_begins_once_an_agent_that_came_late_has_read_the_one_before(
    collector: Collector, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "LAST_READ_S", 60.0)
    begin(collector)
    serve(3)
    instrument.stop()
    places: list[ExportPlace] = []

    def read() -> None:
        places.append(taken())
        write(places[0], seen=3, passed=3)

    reading = threading.Timer(0.1, read)
    reading.start()
    session = begin(collector)
    assert [place.is_taken() for place in places] == [False]  # by anybody else
    assert session.losses() == {}
    reading.join()
    places[0].close()


def test_a_session_counts_what_an_agent_that_never_came_has_not_read(
    collector: Collector, agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "LAST_READ_S", 0.01)
    begin(collector)
    serve(3)
    instrument.stop()
    assert begin(collector).losses() == {handover.UNREAD: 3}


def test_a_session_without_an_agent_waits_for_nobody_to_read_the_one_before(collector: Collector) -> None:
    begin(collector)
    serve(3)
    instrument.stop()
    assert begin(collector).losses() == {}
    instrument.stop()


def test_a_session_that_exports_says_how_far_it_has_come(agent: socket.socket, collector: Collector) -> None:
    session = begin(collector)
    assert session.handover.take_over()
    for count in (3, 7):
        serve(count)
        session.flush(30)
    with scope("open", kind="request"):
        with scope("inside"):
            pass
        session._pump()
        found = session.handover.progress()
    assert sum(found.places.values()) == found.fates["seen"] == 11
    assert (found.fates["exported"], found.fates["passed"], found.fates["missed"]) == (10, 0, 0)
    assert found.unsettled == 1  # of the request that is open


def test_rows_of_threads_that_nobody_had_read_as_their_rings_went_are_counted_each_time(
    collector: Collector, agent: socket.socket
) -> None:
    session, served = begin(collector), 0
    for _ in range(2):
        place = taken()
        for _ in range(1200):  # more than the rings of ended threads that are kept
            thread = threading.Thread(target=serve, args=(1,))
            thread.start()
            thread.join()
        served += 1200
        place.close()
        assert session.handover.take_over()
        found = session.flush(30)
        assert found is not None
        assert found.settled
        losses = session.losses()
        assert 0 < losses.pop("spans overwritten before the export read them") == served - found.exported
        session.handover.give_back()
    session.stop()
    progress = session.handover.progress()
    assert progress.fates["seen"] + progress.fates["missed"] == served
