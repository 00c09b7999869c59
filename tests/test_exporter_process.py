"""The child that exports for an agent: what ends it, or keeps it from one recording, costs the others nothing."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fuzz_recordings import copied
from otlp_collectors import Handler, collecting
from test_agent import children_of

from instrument.agent.exporter_process import Exports
from instrument.agent.loop import Connection, EventLoop
from instrument.agent.processes import Process, Run
from instrument.errors import TraceError
from instrument.otlp.delivery import Exporter
from instrument.otlp.export_facts import ExportFacts, Ids, MeteredFacts, decode_collector_settings, encode_facts
from instrument.otlp.export_loop import ExportLoop
from instrument.otlp.recording_export import RecordingExport
from instrument.profile.model import Capture
from instrument.recording import export_checkpoint
from instrument.recording.export_checkpoint import ExportCheckpoint
from instrument.recording.mapped import Mapped
from instrument.recording.spans import Origin, Site
from instrument.runtime import agent_socket

SETTINGS = {"endpoint": "http://127.0.0.1:9", "protocol": "http/protobuf"}


class Table:
    """An agent's exports, with a loop around them that turns until something has come true."""

    def __init__(self, folder: Path) -> None:
        listener = agent_socket.listen_on_socket(Path("agent.sock"))  # short: a socket's path has an end
        self.loop = EventLoop(listener, self._hear, lambda _: self.exports.handle_end(), None)
        self.said: list[str] = []
        self.left: list[Process] = []
        self.exports = Exports(self.loop, folder, lambda: None, self.said.append, self.leave)
        self._folder = folder

    def _hear(self, _: Connection, message: agent_socket.Message, descriptors: list[int]) -> list[int]:
        self.exports.handle_message(message)
        return []

    def leave(self, process: Process, message: agent_socket.Message) -> None:
        """Note that a process was informed of no export."""
        assert message == {"unexported": True}
        self.left.append(process)

    def add(self, settings: dict[str, Any] | None = None, memory: int = -1) -> Process:
        """A process; where nothing else is given its recording is none, so that the exporter is soon done with it."""
        facts = {"export": {"otlp": SETTINGS if settings is None else settings}}
        if memory < 0:
            path = self._folder / f"{time.monotonic_ns()}"
            path.write_bytes(bytes(100))
            memory = os.open(path, os.O_RDWR)
        process = Process(run=Run("one"), pid=1, started=1, facts=facts, joined_ns=0, memory=memory)
        self.exports.export_if_wanted(process)
        return process

    def until(self, is_true: Callable[[], Any]) -> None:
        end = time.monotonic() + 240
        while not is_true():
            assert time.monotonic() < end, "it did not come true"
            self.turn()

    def turn(self) -> None:
        self.loop.call_later(0.05, lambda: None)  # for which it waits at most
        self.loop.run_once()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    monkeypatch.chdir(tmp_path)
    found = Table(tmp_path)
    yield found
    found.exports.stop()
    found.loop.close()


def exporters() -> list[int]:
    return children_of(os.getpid())


def stop(child: int) -> None:
    """Have a child do nothing from now on, until it is continued."""
    os.kill(child, signal.SIGSTOP)
    while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


def test_an_exporter_that_hears_nothing_for_long_has_another_one_in_its_place(table: Table) -> None:
    before = set(exporters())
    table.add()
    (child,) = set(exporters()) - before
    stop(child)
    process = table.add()
    for _ in range(3000):
        table.exports.note_process_end(process)
    process.ended_ns = 1
    table.until(lambda: not table.exports.is_exporting(process.run))
    assert set(exporters()) - before != {child}


def test_one_recording_that_is_cut_short_keeps_no_other_from_its_export(table: Table, make_recorder: Any) -> None:
    recorder = make_recorder()
    if recorder.memory_fd < 0:
        pytest.skip(f"no memory that others can read: {recorder.no_memory}")
    before = set(exporters())
    process = table.add(memory=copied(recorder))
    (child,) = set(exporters()) - before
    until_taken(process.memory)
    stop(child)
    os.ftruncate(process.memory, 0)
    table.exports.flush(process)
    os.kill(child, signal.SIGCONT)
    process.ended_ns = 1
    table.until(lambda: not table.exports.is_exporting(process.run))
    assert table.exports.problem
    assert set(exporters()) - before == {child}


def test_unread_rows_of_an_ended_exporter_are_counted(table: Table, make_recorder: Any) -> None:
    recorder = make_recorder()
    if recorder.memory_fd < 0:
        pytest.skip(f"no memory that others can read: {recorder.no_memory}")
    before = set(exporters())
    table.add()
    (child,) = set(exporters()) - before
    stop(child)
    process = table.add(memory=copied(recorder))
    process.ended_ns = 1
    lives = table.add(memory=copied(recorder))
    table.exports.stop()
    with closing(Mapped(process.memory)) as mapped:
        assert table.exports.fates["unread"] == sum(mapped.count_written_rows().values()) + mapped.ended_rows > 0
    assert process in table.left
    assert lives in table.left


def test_unsent_spans_of_an_ended_process_are_counted_after_a_kill_of_its_agent(
    tmp_path: Path, table: Table, make_recorder: Any
) -> None:
    recorder = make_recorder()
    if recorder.memory_fd < 0:
        pytest.skip(f"no memory that others can read: {recorder.no_memory}")
    before = set(exporters())
    table.add()
    (child,) = set(exporters()) - before
    stop(child)
    process = table.add(memory=copied(recorder))
    assert not agent_socket.read_unsent_count(tmp_path)
    process.ended_ns = 1
    table.exports.note_process_end(process)
    with closing(Mapped(process.memory)) as mapped:
        recorded = sum(mapped.count_written_rows().values()) + mapped.ended_rows
    (tmp_path / "next").mkdir()
    os.link(tmp_path / agent_socket.UNSENT, tmp_path / "next" / agent_socket.UNSENT)  # where this agent is killed now
    taken_over = Exports(table.loop, tmp_path / "next", lambda: None, table.said.append, table.leave)
    assert export_checkpoint.losses_by_name(taken_over.fates) == {
        "spans that may not have been sent when an agent was killed": recorded
    }
    assert agent_socket.read_unsent_count(tmp_path) == recorded
    os.kill(child, signal.SIGCONT)
    table.until(lambda: not table.exports.is_exporting(process.run))
    assert not agent_socket.read_unsent_count(tmp_path)


def test_messages_of_an_exporter_before_its_end_are_read(table: Table) -> None:
    before = set(exporters())
    table.add()
    (child,) = set(exporters()) - before
    with selectors.DefaultSelector() as told:
        assert table.exports.connection is not None
        told.register(table.exports.connection.fileno(), selectors.EVENT_READ)
        assert told.select(240)
    stop(child)
    table.exports.stop()
    assert table.exports.problem


def test_spans_that_a_collector_does_not_take_wait_in_the_recording_which_keeps_the_newest(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 20)
    if recorder.memory_fd < 0:
        pytest.skip(f"no memory that others can read: {recorder.no_memory}")
    recorder.write_facts({"export": encode_facts(ExportFacts(Ids(), {}, Capture(sample=1.0), 100, MeteredFacts(0)))})
    exporter = Exporter(decode_collector_settings(SETTINGS), Origin(os.getpid(), "", 0, 0), dict, detects=False)
    loop = ExportLoop(lambda *_: None, lambda _: None)
    exported = loop.begin_export(0, recorder.memory_fd, exporter)

    def look() -> bool:
        return loop.read_and_settle(at_once=True)

    call = recorder.wrap(lambda: None, Site("f"))
    try:
        for _ in range(10):
            for _ in range(4_000):
                call()
            look()
        assert exporter.count_fates()["dropped"] == 0
        assert exported.is_behind
        exporter.stop(0)
        while look():
            pass
    finally:
        exported.close()
    with closing(ExportCheckpoint(recorder.memory_fd)) as place:
        fates = place.read_progress().fates
        assert place.count_unread_rows() == 0
    assert fates["missed"] > 0
    assert fates["seen"] + fates["missed"] == 40_000


def test_a_silent_collector_does_not_slow_the_reading_of_other_recordings(make_recorder: Any) -> None:
    silent, other = make_recorder(1 << 20), make_recorder(1 << 23)
    loop = ExportLoop(lambda *_: None, lambda _: None)
    facts = encode_facts(ExportFacts(Ids(), {}, Capture(sample=1.0), 100, MeteredFacts(0)))
    exports = []
    for number, recorder in enumerate((silent, other)):
        recorder.write_facts({"export": facts})
        exporter = Exporter(decode_collector_settings(SETTINGS), Origin(os.getpid(), "", 0, 0), dict, detects=False)
        exports.append(loop.begin_export(number, recorder.memory_fd, exporter, sends=recorder is silent))
    loop.read_and_settle()
    try:
        call = silent.wrap(lambda: None, Site("f"))
        while not exports[0].is_behind:
            for _ in range(4_000):
                call()
            loop.read_and_settle(at_once=True)
        call = other.wrap(lambda: None, Site("f"))
        for _ in range(30_000):
            call()
        for _ in range(20):
            loop.read_and_settle()
        reading = exports[1].current_reading
        assert reading is not None
        assert (reading.reader.seen, reading.reader.missed) == (30_000, 0)
    finally:
        for export in exports:
            export.close()


def until_taken(memory: int) -> None:
    with closing(ExportCheckpoint(memory)) as place:
        end = time.monotonic() + 240
        while not place.is_taken():
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_recording_that_cannot_be_read_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb+") as damaged:
        before = len([*Path("/proc/self/fd").iterdir()])
        for _ in range(3):
            with pytest.raises((TraceError, OSError)):
                RecordingExport(damaged.fileno(), Any)
        assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("settings", [{"headers": [["one"]]}, {"endpoint": 7}, {"headers": 5}], ids=str)
def test_settings_that_are_none_keep_no_other_recording_from_its_export(table: Table, settings: dict[str, Any]) -> None:
    before = set(exporters())
    table.add(settings)
    later = table.add()
    children = set(exporters()) - before
    later.ended_ns = 1
    table.until(lambda: not table.exports.is_exporting(later.run))
    assert set(exporters()) - before == children


def test_a_process_hears_that_its_recording_cannot_be_exported(table: Table) -> None:
    process = table.add()
    table.until(lambda: table.left)
    assert table.left == [process]
    assert table.exports.problem


def test_processes_hear_that_the_exporter_has_ended_too_often(table: Table, make_recorder: Any) -> None:
    recorder = make_recorder()
    if recorder.memory_fd < 0:
        pytest.skip(f"no memory that others can read: {recorder.no_memory}")
    before = set(exporters())
    process = table.add(memory=copied(recorder))  # with which no exporter is done before its kill
    ended = set()
    while not table.left:
        children = set(exporters()) - before
        for child in children - ended:
            os.kill(child, signal.SIGKILL)
        ended |= children
        table.turn()
    assert table.left == [process]
    assert "6 times in 600 s" in table.exports.problem
    later = table.add()
    assert table.left == [process, later]


def test_a_process_hears_that_its_agent_has_no_descriptor_left_for_its_export(table: Table) -> None:
    table.until(lambda: table.add() and table.left)
    table.left.clear()
    memory = os.memfd_create("recording")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(memory)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        process = table.add(memory=memory)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process in table.left
    assert "could not be kept: Too many open files" in table.exports.problem
    later = table.add()
    table.until(lambda: later in table.left)


def test_rows_of_a_process_that_ended_without_an_agent_are_counted(table: Table, make_recorder: Any) -> None:
    recorder = make_recorder()
    gone = Process(
        run=Run("one"), pid=1, started=1, facts={"exports": True}, joined_ns=0, ended_ns=1, memory=copied(recorder)
    )
    table.exports.count_unread_rows(gone, gone.memory, is_reported=False)
    with closing(Mapped(gone.memory)) as mapped:
        assert table.exports.fates["unread"] == sum(mapped.count_written_rows().values()) + mapped.ended_rows > 0


def test_the_exporter_keeps_few_threads_for_collectors_that_no_process_has_any_more(table: Table) -> None:
    before = set(exporters())
    for port in range(1, 31):
        table.add({**SETTINGS, "endpoint": f"http://127.0.0.1:{port}"})
    (child,) = set(exporters()) - before
    table.until(lambda: len(table.left) == 30)
    table.until(lambda: len(list(Path(f"/proc/{child}/task").iterdir())) <= 10)  # a thread ends after its last word


def test_messages_of_a_process_are_read_even_if_it_closed_before_the_answer() -> None:
    ours, theirs = socket.socketpair(agent_socket.FAMILY, agent_socket.KIND)
    connection = Connection(ours)
    agent_socket.send(theirs, {"goodbye": {}})
    theirs.close()
    for _ in range(2):
        connection.send({"gauges": {"ended": True}})
    assert not connection.is_broken
    assert not connection.has_waiting_packets
    assert [connection.receive()[0] for _ in range(2)] == [{"goodbye": {}}, None]
    connection.close()


@pytest.mark.parametrize(
    ("limit_s", "answers_in_time"),
    [(0.0, True), (60.0, True), (2.0, False)],
    ids=["the agent goes on", "the agent ends", "the agent ends before the collector answers"],
)
def test_spans_of_a_session_are_counted_once_though_the_one_before_waits_for_its_collector(
    limit_s: float, answers_in_time: bool, table: Table, make_recorder: Any
) -> None:
    recorder = make_recorder()
    if recorder.memory_fd < 0:
        pytest.skip(f"no memory that others can read: {recorder.no_memory}")
    answers = threading.Event()

    def behave(handler: Handler, _: int) -> None:
        answers.wait(240)
        handler.answer(200)

    def begin_session(name: str, spans: int) -> Process:
        export = encode_facts(ExportFacts(Ids(), {}, Capture(sample=1.0), 100, MeteredFacts(0)))
        recorder.begin_recording(1 << 20, {"origin": {"pid": 1, "service": name}, "export": export})
        for _ in range(spans):
            recorder.wrap(lambda: None, Site(name))()
        return table.add({**SETTINGS, "endpoint": server.settings.endpoint}, memory=os.dup(recorder.memory_fd))

    with collecting(behave) as server:
        first = begin_session("first", 5)
        table.exports.flush(first)
        table.until(lambda: server.tries)
        second = begin_session("second", 3)
        for process in (first, second):
            process.ended_ns = 1
            table.exports.note_process_end(process)
        if limit_s:
            table.exports.end_exports(limit_s)
        if answers_in_time:
            answers.set()
        table.until(lambda: not table.exports.is_exporting(first.run) and not table.exports.is_exporting(second.run))
        answers.set()
    fates = {fate: count for fate, count in table.exports.fates.items() if count and fate not in ("seen", "kept")}
    assert fates == ({"exported": 8} if answers_in_time else {"failed": 5, "unread": 3})
