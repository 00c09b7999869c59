"""The export of one recording: sessions of one process, one after the other, and exporters that are killed."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from otlp_collectors import Collector, Handler, collecting, refuse_with, take
from readback import rows_in

from instrument.otlp import export_facts, recording_export, recording_reader
from instrument.otlp.delivery import Exporter
from instrument.otlp.export_facts import ExportFacts, Ids, MeteredFacts
from instrument.otlp.export_loop import ExportLoop
from instrument.otlp.recording_export import RecordingExport
from instrument.profile.model import Capture
from instrument.recording.export_checkpoint import METRICS_LOST, SENT, ExportCheckpoint, Progress
from instrument.recording.memory import IntervalRing
from instrument.recording.metric_definitions import COUNTER, HISTOGRAM
from instrument.recording.spans import Origin, Site

ALL = ("passed", "beyond", "kept", "unanswered", "abandoned")


MS = 10**6


UNMETERED = MeteredFacts(0)


class Service:
    """A process that records for a collector, which answers while it is `open`."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.open = threading.Event()
        self.open.set()
        self.begin("first")

    def behave(self, handler: Handler, _: int) -> None:
        self.open.wait(60)
        handler.answer(200)

    def begin(self, name: str, metered: MeteredFacts = UNMETERED) -> None:
        """Begin a session."""
        ids, resource = Ids(instance=name), {"service.name": name, "service.instance.id": name}
        told = export_facts.encode_facts(ExportFacts(ids, resource, Capture(sample=1.0), 1000, metered))
        origin = Origin(os.getpid(), name, time.monotonic_ns(), time.time_ns())
        self.recorder.begin_recording(1 << 20, {"origin": asdict(origin), "export": told})

    def serve(self, name: str, count: int) -> None:
        for _ in range(count):
            with self.recorder.scope(name, kind="request"):
                pass

    def handed_over(self, server: Collector) -> RecordingExport:
        """Its recording as an exporter is given it."""
        exporter = Exporter(server.settings, Origin(os.getpid(), "", 0, 0), dict, detects=False)
        exporter.start()
        self.run = ExportLoop(lambda *_: None, lambda _: None)
        self.exported = self.run.begin_export(0, self.recorder.memory_fd, exporter)
        self.exporter = exporter
        return self.exported

    def look(self, **how: Any) -> bool:
        """Read on, and settle what has ended."""
        return self.run.read_and_settle(at_once=True, **how)

    def progress(self) -> Progress:
        """Return the progress of the export, as it is written."""
        return self.exported._place.read_progress()

    def end(self) -> Counter[str]:
        """Have all be sent that there is, as of a process that has ended; the fates of all spans."""
        found, end = self.exported, time.monotonic() + 60
        while self.look() or not (found.has_ended and found.settle_remaining_spans()):
            assert time.monotonic() < end
            time.sleep(0.01)
        fates = Counter(found.finish_export())
        found.close()
        self.exporter.stop(0)
        return fates

    def kill(self) -> None:
        """Have who exports be ended in the middle of it."""
        self.exported._place.close()
        self.exported.mapped.close()
        self.exported.is_ours = False
        self.open.set()
        self.exporter.stop(0)


@pytest.fixture
def service(make_recorder: Any) -> Iterator[Service]:
    made = make_recorder()
    if made.memory_fd < 0:
        pytest.skip(f"no memory that others can read: {made.no_memory}")
    service = Service(made)
    yield service
    service.open.set()
    service.exporter.stop(0)


@pytest.fixture
def collector(service: Service) -> Iterator[Collector]:
    with collecting(service.behave) as server:
        yield server


def until(is_true: Callable[[], Any], found: Callable[[], object] = str) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end, f"it did not come true: {found()}"
        time.sleep(0.005)


def told(fates: Counter[str]) -> dict[str, int]:
    """The fates that are not none, after checking that they add up."""
    assert fates["seen"] + fates["intervals"] == sum(fates[name] for name in ALL)
    assert fates["kept"] == sum(fates[name] for name in SENT)
    return {name: count for name, count in fates.items() if count and name not in ("seen", "kept")}


def test_spans_of_a_session_are_its_own_though_another_one_has_begun_before_they_were_sent(
    service: Service, collector: Collector
) -> None:
    first = service.handed_over(collector)
    service.open.clear()
    for count in (5, 2):
        service.serve("one", count)
        service.look()
        first._exporter.send_soon()
        until(lambda: collector.tries == 1)
    service.begin("second")
    service.serve("another", 3)
    service.look()
    service.open.set()
    assert told(service.end()) == {"exported": 7}
    second = service.handed_over(collector)
    second.has_ended = True
    assert told(service.end()) == {"exported": 3}
    found = {instance: Counter(span.name for span in spans) for instance, spans in collector.spans.items()}
    assert found == {"first": {"one": 7}, "second": {"another": 3}}


def test_a_session_that_ends_while_the_collector_is_silent_on_the_one_before_is_exported_after_that_one(
    service: Service, collector: Collector
) -> None:
    first = service.handed_over(collector)
    service.open.clear()
    service.serve("one", 5)
    service.look()
    first._exporter.send_soon()
    until(lambda: collector.tries == 1)
    service.begin("second")
    service.serve("another", 3)
    second = service.run.begin_export(1, service.recorder.memory_fd, service.exporter)
    first.has_ended = second.has_ended = True
    for _ in range(2):
        service.look()
        service.run.end_settled_exports()
    assert set(service.run.recordings) == {0, 1}
    service.open.set()

    def has_ended_all() -> bool:
        service.look()
        service.run.end_settled_exports()
        return not service.run.recordings

    until(has_ended_all)
    found = {instance: Counter(span.name for span in spans) for instance, spans in collector.spans.items()}
    assert found == {"first": {"one": 5}, "second": {"another": 3}}


def test_an_export_that_has_paused_ends_though_another_session_has_begun(
    service: Service, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_export, "WAITING_SPANS", 0)
    service.open.clear()
    first = service.handed_over(collector)
    for _ in range(2):
        service.serve("one", 5)
        service.look()
    assert first.is_behind
    service.begin("second")
    service.open.set()

    def has_ended() -> bool:
        service.look()
        service.run.end_settled_exports()
        return not service.run.recordings

    until(has_ended)
    assert [*map(len, collector.spans.values())] == [5]


def test_spans_of_requests_that_had_not_ended_with_their_session_are_counted(
    service: Service, collector: Collector
) -> None:
    service.handed_over(collector)
    request = service.recorder.scope("one", kind="request")
    request.__enter__()
    with service.recorder.scope("inside"):
        pass
    service.look()
    service.begin("second")
    request.__exit__(None, None, None)
    assert told(service.end()) == {"abandoned": 1}


@pytest.mark.parametrize("is_followed", [False, True], ids=["at once", "by one who is killed, too"])
def test_spans_under_way_at_a_kill_of_the_exporter_are_reported_once(
    is_followed: bool, service: Service, collector: Collector
) -> None:
    service.handed_over(collector)
    service.open.clear()
    service.serve("one", 5)
    service.look()
    service.kill()
    service.begin("second")
    service.serve("another", 3)
    if is_followed:
        service.open.clear()
        service.handed_over(collector)
        service.look()
        service.kill()
    second = service.handed_over(collector)
    second.has_ended = True
    assert told(service.end()) == ({"abandoned": 8} if is_followed else {"abandoned": 5, "exported": 3})
    service.begin("third")
    service.serve("the last", 1)
    third = service.handed_over(collector)
    third.has_ended = True
    assert told(service.end()) == {"exported": 1}


def test_a_killed_exporters_spans_under_way_are_counted_apart_from_its_unsent_ones(
    service: Service, collector: Collector
) -> None:
    first = service.handed_over(collector)
    for count, tries in ((3, 1), (5, 2)):
        service.serve("one", count)
        service.look()
        service.exporter.send_soon()
        until(lambda tries=tries: collector.tries == tries)  # type: ignore[misc]
        if tries == 1:
            until(lambda: first._place.read_progress().fates["exported"] == 3)
            service.open.clear()
    service.serve("one", 2)
    service.look()
    service.kill()
    second = service.handed_over(collector)
    second.has_ended = True
    assert told(service.end()) == {"exported": 3, "unanswered": 5, "abandoned": 2}


class Device(Service):
    """A process whose spans are timed on a device, by the test."""

    intervals: IntervalRing

    def decode(self, count: int = 1) -> int:
        """Record some spans that ask for device times; when they had ended."""
        for _ in range(count):
            with self.recorder.scope("decode", device=True):
                pass
        ended_ns = time.monotonic_ns()
        time.sleep(0.001)
        return ended_ns

    def settle(self, until_ns: int, spans: int) -> None:
        """Settle the device times of the last spans that ended by then."""
        for row in [row for row in rows_in(self.recorder) if row[6] <= until_ns][-spans:]:
            self.intervals.add_all([(row[1], 0, 7, row[5], row[5] + MS, "exclusive", 0)])
        self.intervals.publish_settled_time(until_ns)


@pytest.fixture
def device(service: Service) -> Device:
    made = Device(service.recorder)
    made.intervals = IntervalRing(1 << 14, partial(service.recorder.find_part_memory, "intervals"))
    made.intervals.publish_settled_time(time.monotonic_ns())
    return made


@pytest.fixture
def timed(device: Device, service: Service) -> Iterator[Collector]:
    with collecting(device.behave) as server:
        service.exported = device.handed_over(server)
        service.exporter = device.exporter
        yield server


def test_spans_wait_until_their_device_times_have_come(device: Device, timed: Collector) -> None:
    first = device.decode(3)
    device.decode(2)
    device.look()
    assert device.progress().fates["kept"] == 0
    device.settle(first, 3)
    device.look()
    assert (device.progress().fates["seen"], device.progress().fates["kept"]) == (5, 6)
    device.kill()
    device.settle(device.decode(0), 2)
    device.handed_over(timed).has_ended = True
    assert told(device.end()) == {"intervals": 5, "abandoned": 6, "exported": 4}


@pytest.mark.parametrize("why", ["for long", "its process has ended"])
def test_spans_whose_device_times_do_not_come_are_sent_without_and_counted(
    why: str, device: Device, timed: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_reader, "DEVICE_WAIT_NS", 0 if why == "for long" else 10**15)
    device.settle(device.decode(2), 2)
    device.decode(3)
    found = device.exported
    found.has_ended = why == "its process has ended"
    until(lambda: not device.look() and device.progress().fates["kept"] == 7)
    found.has_ended = True
    assert told(device.end()) == {"intervals": 2, "exported": 7, "untimed": 3}


ROUTED = Site("GET /", "request", attributes=(("http.request.method", "GET"), ("http.route", "/")))


def test_requests_that_wait_for_their_device_times_are_counted_once_and_by_status(
    device: Device, service: Service
) -> None:
    device.begin("metered", MeteredFacts(time.monotonic_ns(), asks=True, requests=True))
    device.intervals = IntervalRing(1 << 14, partial(device.recorder.find_part_memory, "intervals"))
    device.intervals.publish_settled_time(time.monotonic_ns())
    with collecting(device.behave) as server:
        found = device.handed_over(server)
        service.exporter = device.exporter
        device.look()
        for _ in range(3):
            with device.recorder.new_scope(ROUTED, {"http.response.status_code": 200}):
                pass
        device.look(metered=found)
        assert device.progress().fates["kept"] == 0
        device.intervals.publish_settled_time(time.monotonic_ns())
        device.look(metered=found)
        assert device.progress().fates["kept"] == 3
        found.has_ended = True
        device.end()
        newest = [metric for metric in server.metrics if metric.name == "http.server.request.duration"][-1]
        (point,) = newest.exponential_histogram.data_points
        assert point.count == 3
        assert {one.key: one.value.int_value for one in point.attributes}["http.response.status_code"] == 200


def test_rows_left_in_a_recording_for_want_of_room_are_reported(
    service: Service, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_export, "WAITING_SPANS", 0)
    service.open.clear()
    found = service.handed_over(collector)
    for count in (5, 7):
        service.serve("one", count)
        service.look()
    assert found.is_behind
    found.has_ended = True
    fates = found.finish_export()
    assert (fates["seen"], fates["unread"]) == (5, 7)
    found.close()


@pytest.mark.slow
def test_fates_of_spans_are_written_while_metrics_wait(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[float] = []
    write = ExportCheckpoint.write_meter_state
    monkeypatch.setattr(
        ExportCheckpoint, "write_meter_state", lambda *arguments: written.append(0) or write(*arguments)
    )
    service.begin("metered", MeteredFacts(time.monotonic_ns(), asks=True, requests=True))
    service.recorder.wrap(lambda: None, ROUTED)()
    with collecting(service.behave, metrics=refuse_with(503)) as server:
        found = service.handed_over(server)
        for _ in range(2):
            service.look(metered=found)
        until(lambda: server.tries)
        before, metrics = len(written), found.source.metrics
        assert metrics is not None
        for count in range(1, 4):
            service.serve("one", 1)
            service.look()
            service.exporter.send_soon()
            until(lambda count=count: service.progress().fates["exported"] > count, service.progress)  # type: ignore[misc]
        assert metrics.has_waiting_metrics()
        assert len(written) <= before + 1
        found.close()


def test_the_last_metrics_of_a_process_are_sent_again_where_the_collector_was_silent(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.otlp.delivery.PATIENCE_NS", 10**8)
    tries: list[int] = []

    def be_silent_once(handler: Handler, points: int) -> None:
        tries.append(points)
        if len(tries) > 1:
            handler.answer(200)
            return
        handler.connection.recv(1)  # until the exporter gives up
        handler.close_connection = True

    service.begin("metered", MeteredFacts(time.monotonic_ns(), asks=True, requests=True))
    service.recorder.wrap(lambda: None, ROUTED)()
    with collecting(take, metrics=be_silent_once) as server:
        service.handed_over(server).has_ended = True
        fates = service.end()
    assert fates[METRICS_LOST] == 0
    durations = [metric for metric in server.metrics if metric.name == "http.server.request.duration"]
    assert [point.count for metric in durations for point in metric.exponential_histogram.data_points] == [1]


@pytest.mark.parametrize(("deltas", "retry_s"), [((), 0), ((COUNTER, HISTOGRAM), 60)])
def test_the_last_metrics_are_dropped_after_the_time_out_or_if_they_could_count_twice(
    service: Service, monkeypatch: pytest.MonkeyPatch, deltas: tuple[str, ...], retry_s: int
) -> None:
    monkeypatch.setattr("instrument.otlp.delivery.PATIENCE_NS", 10**8)
    monkeypatch.setattr(Exporter, "timeout_ns", retry_s * 10**9)
    monkeypatch.setattr("instrument.otlp.metrics_queue.DELTAS", {"cumulative": deltas})
    tries: list[int] = []

    def be_silent(handler: Handler, points: int) -> None:
        tries.append(points)
        handler.connection.recv(1)  # until the exporter gives up
        handler.close_connection = True

    service.begin("metered", MeteredFacts(time.monotonic_ns(), asks=True, requests=True))
    service.recorder.wrap(lambda: None, ROUTED)()
    with collecting(take, metrics=be_silent) as server:
        service.handed_over(server).has_ended = True
        assert service.end()[METRICS_LOST] > 0
    assert len(tries) == 1
