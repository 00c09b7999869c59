"""Stretches: what is in one when it is taken, and from when on nothing is missing in it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from readback import spans_in

from instrument.native import MODULE
from instrument.recording.mapped import INTERVALS, ROWS
from instrument.recording.memory_layout import PACKED_ROW, STRIDES
from instrument.recording.spans import Origin, Site
from instrument.recording.trace_context import REMOTE, RemoteParent
from instrument.sessions.window import WINDOWS_THREAD, Stretch
from instrument.trace.columns import Columns, DeviceIntervals
from instrument.trace.of_recording import RowSnapshot
from instrument.trace.trace import make_spans

ORIGIN = Origin(1, "shop", 0, 0)


def taken(recorder: Any, start_ns: int = 0, end_ns: int | None = None) -> Stretch:
    threads = recorder.make_reader().read_thread_names()
    writing = frozenset(thread_id for thread_id, name in threads.items() if name == WINDOWS_THREAD)
    snapshot = RowSnapshot.copy_from(recorder.make_reader(), start_ns, writing)
    return Stretch(snapshot, threads, start_ns, end_ns or time.monotonic_ns(), 3, ORIGIN)


def columns(stretch: Stretch) -> Columns:
    found, _ = stretch.snapshot.make_columns(
        stretch.end_ns, lambda _: DeviceIntervals.make_empty(), start_ns=stretch.start_ns
    )
    return found


def calls(recorder: Any, name: str, count: int) -> None:
    for _ in range(count):
        with recorder.scope(name):
            pass


def on_a_thread(action: Callable[[], object], name: str) -> None:
    thread = threading.Thread(target=action, name=name)
    thread.start()
    thread.join()


def test_a_stretch_stays_what_it_was_when_newer_rows_overwrite_its_own(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 12)
    calls(recorder, "old", 3)
    stretch = taken(recorder)
    calls(recorder, "new", 5_000)
    assert [span.site.name for span in make_spans(columns(stretch))] == ["old"] * 3
    assert stretch.held_from_ns == 0
    assert (stretch.window, stretch.origin) == (3, ORIGIN)


def test_a_row_is_the_same_64_bytes_in_the_recorder_and_for_its_readers() -> None:
    assert ROWS.itemsize == PACKED_ROW.size == MODULE.ROW_BYTES == 64
    assert INTERVALS.itemsize == STRIDES["intervals"]


def test_columns_say_of_each_span_what_its_row_does(recorder: Any) -> None:
    """Among them errors, attributes, times of generators, callers, tasks, and what is open."""
    request = Site("request", "request")

    def fail() -> None:
        with recorder.scope("fails", attributes={"n": 1}):
            raise KeyError

    async def task(number: int) -> None:
        with recorder.scope("in a task"):
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*map(task, range(3)))

    for _ in range(2):
        frame = recorder.open(request, {REMOTE: f"00-{5:032x}-{7:016x}-01", "http.route": "/x"})
        with contextlib.suppress(KeyError):
            fail()
        recorder.close(frame)
    asyncio.run(main())
    on_a_thread(lambda: calls(recorder, "worker", 3), "worker")
    recorder.scope("open").start()
    expected = {span.span_id: span for span in spans_in(recorder)}
    found = {span.span_id: span for span in make_spans(columns(taken(recorder)))}
    assert len(found) == 11
    assert found[max(found)].clipped
    for one in (expected, found):  # but for when those that are open were looked at
        one[max(one)] = dataclasses.replace(one[max(one)], end_ns=0, active_ns=0, self_ns=0)
    assert found == expected
    assert {span.remote for span in found.values()} == {None, RemoteParent(5, 7)}
    assert {span.error for span in found.values()} == {None, "KeyError"}


def test_self_time_of_a_clipped_span_is_its_part_of_the_window_without_its_children(recorder: Any) -> None:
    with recorder.scope("around"):
        time.sleep(0.002)
        with recorder.scope("inside"):
            time.sleep(0.002)
    inside = next(span for span in spans_in(recorder) if span.site.name == "inside")
    window = inside.start_ns - 1_000, inside.end_ns - 1_000
    cut = {span.site.name: span for span in make_spans(columns(taken(recorder, *window)))}
    assert (cut["around"].start_ns, cut["around"].end_ns) == window
    assert (cut["around"].self_ns, cut["around"].clipped) == (1_000, True)
    assert cut["inside"].self_ns == cut["inside"].total_ns == inside.total_ns - 1_000


def test_rows_of_a_ring_that_has_wrapped_are_copied_in_their_order(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 12)
    for number in range(3_000):
        with recorder.scope("work", attributes={"n": number} if number % 3 == 0 else None):
            pass
    found = columns(taken(recorder))
    assert (found.end_ns[1:] >= found.end_ns[:-1]).all()
    assert found.span_id.tolist() == [span.span_id for span in spans_in(recorder)]
    numbers = [span.attributes.get("n") for span in make_spans(found)]
    assert numbers == [span.attributes.get("n") for span in spans_in(recorder)]
    assert numbers[-3:] == [2997, None, None]


def test_spans_of_threads_that_write_windows_are_left_out(recorder: Any) -> None:
    calls(recorder, "service", 2)
    on_a_thread(lambda: calls(recorder, "writing", 2), WINDOWS_THREAD)
    on_a_thread(lambda: calls(recorder, "worker", 2), "worker")
    assert sorted({span.site.name for span in make_spans(columns(taken(recorder)))}) == ["service", "worker"]


def test_it_is_whole_from_the_end_of_the_oldest_span_that_a_wrapped_ring_still_holds(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 12)
    calls(recorder, "work", 5_000)
    stretch = taken(recorder)
    spans = make_spans(columns(stretch))
    assert 0 < len(spans) < 5_000
    assert stretch.held_from_ns == min(span.end_ns for span in spans)
    later = taken(recorder, sorted(span.end_ns for span in spans)[len(spans) // 2])
    assert later.held_from_ns == 0


def test_it_knows_whether_a_span_has_begun_in_it_since(recorder: Any) -> None:
    calls(recorder, "before", 1)
    at_ns = time.monotonic_ns()
    assert not taken(recorder).has_span_since(at_ns)
    opened = recorder.scope("open").start()
    assert taken(recorder).has_span_since(at_ns)
    assert not taken(recorder, end_ns=at_ns).has_span_since(at_ns)
    opened.end()
    assert taken(recorder).has_span_since(at_ns)
    assert not taken(recorder).has_span_since(time.monotonic_ns())
