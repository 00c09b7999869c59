"""The export of a session by the agent of its run, played by the test: who reads the recording.

What a real agent makes of it is in `test_agent_export`.
"""

from __future__ import annotations

import math
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from otlp_collectors import Collector, collecting, take

import instrument
from instrument import scope
from instrument.errors import ExportError
from instrument.profile.keys import loads
from instrument.recorder.recorder import RECORDER
from instrument.recording import export_checkpoint
from instrument.recording.export_checkpoint import ExportCheckpoint, Progress
from instrument.recording.memory_layout import read_generation
from instrument.runtime import agent_socket
from instrument.sessions import handover, leaving
from instrument.sessions import session as sessions
from instrument.sessions.profile_reload import ControlThread
from instrument.sessions.session import Session, SessionThreads


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[socket.socket]:
    """Listen at the place where sessions of the test join."""
    monkeypatch.chdir(tmp_path)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        socket.socket(agent_socket.FAMILY, agent_socket.KIND) as listener,
    ):
        path = Path(folder) / "agent.sock"
        listener.bind(os.fspath(path))
        listener.listen()
        monkeypatch.setenv(agent_socket.VARIABLE, os.fspath(path))
        yield listener
        instrument.stop()


@pytest.fixture
def agent(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The same of an agent that is not heard: tests look after the export themselves, and nobody else does."""
    monkeypatch.setattr(ControlThread, "hear_agent", lambda _: None)
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


def taken() -> ExportCheckpoint:
    """The recording, whose export the agent has taken."""
    place = ExportCheckpoint(RECORDER.memory_fd)
    assert place.acquire()
    place.read_progress()  # what is written goes on from there
    return place


def write(place: ExportCheckpoint, generation: int = 0, **fates: int) -> None:
    """Have the agent say how far it has come."""
    progress = Progress(generation or read_generation(place.fileno()))
    progress.fates.update(fates)
    progress.settled_ns = time.monotonic_ns() + 60 * 10**9
    place.write_progress(progress)


def test_flush_takes_no_word_on_another_session_for_one_on_this(collector: Collector, agent: socket.socket) -> None:
    session = begin(collector)
    place = taken()
    serve(3)
    write(place, read_generation(place.fileno()) + 1, seen=9, kept=9, exported=9)
    found = session.flush(0)
    assert found is not None
    assert (found.settled, found.exported) == (False, 0)
    write(place, seen=3, kept=3, exported=3)
    found = session.flush(100)
    assert found is not None
    assert (found.complete, found.exported, session.losses()) == (True, 3, {})
    place.close()


def test_spans_that_the_agent_has_passed_are_not_reported_as_on_their_way(
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
    waiting = threading.Thread(
        target=lambda: found.append(session.exporting.flush_by_agent(math.inf, 0.05)), daemon=True
    )
    waiting.start()
    waiting.join(120)
    assert [(delivery.settled, unsettled) for delivery, unsettled in found] == [(False, 2)]
    place.close()


def test_the_end_waits_for_an_agent_whose_exporter_has_yet_to_begin(collector: Collector, agent: socket.socket) -> None:
    session = begin(collector)
    serve(3)
    found: list[Any] = []
    waiting = threading.Thread(
        target=lambda: found.append(session.exporting.flush_by_agent(math.inf, 0.05)), daemon=True
    )
    waiting.start()
    waiting.join(0.2)
    assert not found
    place = ExportCheckpoint(RECORDER.memory_fd)
    write(place, seen=3, kept=3, exported=3)  # first, for it waits for one that has begun no longer than that
    assert place.acquire()
    waiting.join(120)
    assert [(delivery.settled, unsettled) for delivery, unsettled in found] == [(True, 0)]
    place.close()


def test_the_end_waits_for_no_agent_that_has_gone(collector: Collector, agent: socket.socket) -> None:
    session = begin(collector)
    serve(3)
    connection, _ = agent.accept()
    connection.close()
    assert session.exporting.flush_by_agent(math.inf, 0.05)[1] == 3


@pytest.mark.parametrize(("stderr", "reason"), [("/log", handover.UNDELIVERED), ("pipe:[1]", handover.UNREPORTED)])
def test_a_run_without_a_summary_says_what_was_unsent_at_its_end(
    collector: Collector,
    agent: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stderr: str,
    reason: str,
) -> None:
    monkeypatch.setattr(leaving, "file_of_descriptor", lambda _: stderr)
    monkeypatch.setenv("INSTRUMENT_RUN_PID", str(os.getpid()))
    monkeypatch.setattr(leaving, "STALLED_AGENT_S", 0.01)
    monkeypatch.setattr(sessions, "START_DELAY_S", 0)
    begin(collector)
    place = taken()
    serve(3)
    write(place, seen=1)
    instrument.stop()
    place.close()
    assert f"at its end: 2 {reason}" in caplog.text


def test_a_session_whose_threads_begin_as_it_ends_does_not_join_again(
    collector: Collector, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin, have_begun, begin_threads = threading.Event(), threading.Event(), SessionThreads._start_threads

    def begin_late(self: SessionThreads) -> None:
        begin_threads(self)
        have_begun.set()

    monkeypatch.setattr(SessionThreads, "_start_threads", begin_late)
    monkeypatch.setattr(SessionThreads, "start_reader_thread", lambda _: may_begin.wait(60))
    monkeypatch.setattr(sessions, "START_WAIT_S", 0.0)
    monkeypatch.setattr(sessions, "START_DELAY_S", 0.0)
    monkeypatch.setenv("INSTRUMENT_RUN_PID", "1")  # as in a process that begins them with its first span
    session = begin(collector)
    serve(1)
    while not session.threads.have_begun:
        time.sleep(0.001)
    session.stop()
    may_begin.set()
    assert have_begun.wait(60)
    assert session._membership.joins == 1
    assert session.control._thread is None


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
    places: list[ExportCheckpoint] = []

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


def test_unexported_spans_are_one_sentence_if_no_agent_can_start(collector: Collector, agent: socket.socket) -> None:
    session = begin(collector)
    place = taken()
    serve(7)
    write(place, seen=2, kept=2, exported=1)
    agent.accept()[0].close()
    agent.close()
    place.close()
    instrument.stop()
    assert session.losses() == {handover.ABANDONED: 6}
    assert not collector.taken


def test_a_session_that_finds_no_agent_exports_by_itself(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(agent_socket.VARIABLE, str(tmp_path / "nobody.sock"))
    session = begin(collector)
    serve(3)
    with scope("open", kind="request"):
        found = session.flush(100)
        progress = session.handover.progress()
    assert found is not None
    assert (found.complete, found.exported) == (True, 3)
    assert (sum(progress.places.values()), progress.fates["exported"]) == (3, 3)
    instrument.stop()
    assert session.losses() == {}


def test_spans_of_a_window_are_sent_by_the_agent_or_counted(collector: Collector, listener: socket.socket) -> None:
    session = begin(collector)
    joined, _ = listener.accept()
    with joined:
        serve(2)
        session.exporting.send_window(5, 9)
        while "window" not in (message := agent_socket.receive(joined)[0] or {}):
            pass
        assert message == {"window": [5, 9]}
    session._membership.close()
    with pytest.raises(ExportError, match="a window was not sent, because the agent of the run does not answer"):
        session.exporting.send_window(5, 9)
    assert session.losses()["windows of which only spans that `capture` keeps are sent"] == 1


def test_read_and_unsent_rows_are_counted_if_the_agent_gives_up_the_export(
    collector: Collector, agent: socket.socket
) -> None:
    session = begin(collector)
    place = taken()
    serve(7)
    write(place, seen=4, kept=3, exported=1, sending=1)
    place.close()
    session.exporting.handle_agent_message({"unexported": True})
    instrument.stop()
    assert session.losses() == export_checkpoint.losses_by_name({"unread": 3, "unanswered": 1, "abandoned": 2})
