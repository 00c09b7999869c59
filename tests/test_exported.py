"""The export of one recording: sessions of one process, one after the other, and exporters that are killed."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from otlp_collectors import Collector, Handler, collecting

from instrument.agent.exported import Exported
from instrument.agent.keyed_trees import KeyedRequests
from instrument.otlp import export_facts
from instrument.otlp.exporter import Exporter
from instrument.otlp.packing import Ids
from instrument.profile.model import Capture
from instrument.recorder.shared_decisions import Decisions
from instrument.recording.export_place import SENT
from instrument.recording.spans import Origin

ALL = ("passed", "beyond", "kept", "unanswered", "abandoned")


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

    def begin(self, name: str) -> None:
        """Begin a session."""
        ids = Ids(instance=name)
        told = export_facts.told(ids, {"service.name": name, "service.instance.id": name}, Capture(sample=1.0), 1000)
        origin = Origin(os.getpid(), name, time.monotonic_ns(), time.time_ns())
        self.recorder.begin(1 << 20, {"origin": asdict(origin), "export": told})

    def serve(self, name: str, count: int) -> None:
        for _ in range(count):
            with self.recorder.scope(name, kind="request"):
                pass

    def handed_over(self, server: Collector) -> Exported:
        """Its recording as an exporter is given it."""
        decisions = Decisions()
        exporter = Exporter(server.settings, Origin(os.getpid(), "", 0, 0), dict, self._note_sent, detects=False)
        exporter.start()
        self.exported = Exported(os.dup(self.recorder.memory_fd), exporter, decisions, KeyedRequests())
        self.exporter = exporter
        return self.exported

    def _note_sent(self, source: Any) -> None:
        if self.exported.source is source:
            self.exported.note_sent()

    def end(self) -> Counter[str]:
        """Have all be sent that there is, as of a process that has ended; the fates of all spans."""
        found, end = self.exported, time.monotonic() + 60
        while found.look() or not (found.has_ended and found.is_settled()):
            assert time.monotonic() < end
            time.sleep(0.01)
        fates = Counter(found.finish())
        found.close()
        self.exporter.stop(0)
        return fates

    def kill(self) -> None:
        """Have who exports be ended in the middle of it."""
        self.exported._place.close()
        self.exported._mapped.close()
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


def until(is_true: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end, "it did not come true"
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
        first.look()
        first._exporter.hurry()
        until(lambda: collector.tries == 1)
    service.begin("second")
    service.serve("another", 3)
    first.look()
    service.open.set()
    assert told(service.end()) == {"exported": 7}
    second = service.handed_over(collector)
    second.has_ended = True
    assert told(service.end()) == {"exported": 3}
    found = {instance: Counter(span.name for span in spans) for instance, spans in collector.spans.items()}
    assert found == {"first": {"one": 7}, "second": {"another": 3}}


def test_spans_of_requests_that_had_not_ended_with_their_session_are_counted(
    service: Service, collector: Collector
) -> None:
    first = service.handed_over(collector)
    request = service.recorder.scope("one", kind="request")
    request.__enter__()
    with service.recorder.scope("inside"):
        pass
    first.look()
    service.begin("second")
    request.__exit__(None, None, None)
    assert told(service.end()) == {"abandoned": 1}


@pytest.mark.parametrize("is_followed", [False, True], ids=["at once", "by one who is killed, too"])
def test_what_was_on_its_way_as_an_exporter_was_killed_is_told_once_whatever_has_begun_since(
    is_followed: bool, service: Service, collector: Collector
) -> None:
    first = service.handed_over(collector)
    service.open.clear()
    service.serve("one", 5)
    first.look()
    service.kill()
    service.begin("second")
    service.serve("another", 3)
    if is_followed:
        service.open.clear()
        service.handed_over(collector).look()
        service.kill()
    second = service.handed_over(collector)
    second.has_ended = True
    assert told(service.end()) == ({"abandoned": 8} if is_followed else {"abandoned": 5, "exported": 3})
    service.begin("third")
    service.serve("the last", 1)
    third = service.handed_over(collector)
    third.has_ended = True
    assert told(service.end()) == {"exported": 1}


def test_of_an_exporter_that_was_killed_what_it_was_sending_is_told_apart_from_what_it_never_sent(
    service: Service, collector: Collector
) -> None:
    first = service.handed_over(collector)
    for count, tries in ((3, 1), (5, 2)):
        service.serve("one", count)
        first.look()
        service.exporter.hurry()
        until(lambda tries=tries: collector.tries == tries)  # type: ignore[misc]
        if tries == 1:
            until(lambda: first._place.read().fates["exported"] == 3)
            service.open.clear()
    service.serve("one", 2)
    first.look()
    service.kill()
    second = service.handed_over(collector)
    second.has_ended = True
    assert told(service.end()) == {"exported": 3, "unanswered": 5, "abandoned": 2}
