"""The drain of a recording: what is read of it a piece at a time, and what is left for later."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from instrument.otlp.processor import drain as drain_module
from instrument.otlp.processor.drain import Drain
from instrument.recording.export_place import Progress
from instrument.recording.mapped import Mapped


class Reading:
    """A recording that is drained of all spans."""

    def __init__(self, recorder: Any) -> None:
        if recorder.memory_fd < 0:
            pytest.skip(f"no memory that others can read: {recorder.no_memory}")
        self.mapped = Mapped(recorder.memory_fd)
        self.drain = Drain(self.mapped, Progress())
        self.cursor = self.drain.cursor(self.drain.shelf(1.0, 1_000_000).sort)

    def numbers(self) -> list[int | None]:
        """What the spans of one piece bear."""
        return [(row[10] or {}).get("number") for _, rows in self.cursor.read() for row in rows]


@pytest.fixture
def recorder(make_recorder: Any) -> Any:
    made = make_recorder()
    made.begin(1 << 20, {})
    return made


def record(recorder: Any, *numbers: int) -> int:
    """Record spans that bear these; when they had ended."""
    for number in numbers:
        with recorder.scope("span", attributes={"number": number}):
            pass
    ended_ns = time.monotonic_ns()
    time.sleep(0.001)
    return ended_ns


def test_what_is_read_in_many_pieces_bears_its_attributes(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "ROWS_AT_ONCE", 10)
    record(recorder, *range(45))
    reading, found = Reading(recorder), []
    while not found or reading.drain.has_more:
        found += reading.numbers()
    assert found == list(range(45))


def test_what_is_left_for_later_comes_then_with_its_attributes(recorder: Any) -> None:
    until_ns = record(recorder, 1, 2)
    record(recorder, 3)
    reading = Reading(recorder)
    drain = reading.drain
    drain.left = until_ns, time.monotonic_ns()
    assert reading.numbers() == [1, 2]
    assert (drain.lag_ns > 0, drain.seen, drain.missed) == (True, 2, 0)
    for number in (4, 5):
        record(recorder, number)
        drain.left = until_ns, time.monotonic_ns()
        assert reading.numbers() == []
    other = Drain(reading.mapped, Progress(1, dict(drain.places), {**Progress().fates, "seen": 2}, drain.details_at))
    for one, cursor in ((drain, reading.cursor), (other, other.cursor(other.shelf(1.0, 100).sort))):
        one.left = 0, 0
        rows = [row for _, rows in cursor.read() for row in rows]
        assert [row[10]["number"] for row in rows] == [3, 4, 5]
        assert (one.lag_ns, one.seen, one.missed) == (0, 5, 0)


def test_no_thread_is_left_unread_because_another_one_records_more(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "ROWS_AT_ONCE", 10)
    record(recorder, *range(45))
    thread = threading.Thread(target=record, args=(recorder, *range(100, 107)))
    thread.start()
    thread.join()
    reading = Reading(recorder)
    assert sorted(number for number in reading.numbers() if number is not None) == [*range(5), *range(100, 105)]
    found = reading.numbers()
    assert {105, 106} < set(found)
    assert len(found) == 10
    assert reading.drain.has_more


def test_what_is_remembered_of_attributes_is_bounded_though_there_is_always_more_to_read(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "ROWS_AT_ONCE", 10)
    monkeypatch.setattr(drain_module, "DETAILS_HELD", 1)
    reading, most = Reading(recorder), 0
    for _ in range(25):
        for number in range(200):
            texts = {f"text {place}": "x" * 250 for place in range(16)}
            with recorder.scope("span", attributes={"number": number, **texts}):
                pass
        reading.numbers()
        assert reading.drain.has_more
        most = max(most, sum(len(text) for _, text in reading.drain._shelves[0].details.values()))
    room = reading.mapped.details_bytes
    assert room // 2 < most < 2 * room < 25 * 200 * 4000
