"""Stretches: what is in one when it is taken, and from when on nothing is missing in it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from instrument.recording.spans import Origin
from instrument.sessions.stretch import WINDOWS_THREAD, Stretch

ORIGIN = Origin(1, "shop", 0, 0)


def taken(recorder: Any, start_ns: int = 0, end_ns: int | None = None) -> Stretch:
    return Stretch.of(recorder, start_ns, end_ns or time.monotonic_ns(), 3, ORIGIN)


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
    assert [span.site.name for span in stretch.spans()] == ["old"] * 3
    assert stretch.held_from_ns() == 0
    assert (stretch.window, stretch.origin) == (3, ORIGIN)


def test_what_the_threads_that_write_windows_have_recorded_is_left_out(recorder: Any) -> None:
    calls(recorder, "service", 2)
    on_a_thread(lambda: calls(recorder, "writing", 2), WINDOWS_THREAD)
    on_a_thread(lambda: calls(recorder, "worker", 2), "worker")
    assert sorted({span.site.name for span in taken(recorder).spans()}) == ["service", "worker"]


def test_it_is_whole_from_the_end_of_the_oldest_span_that_a_wrapped_ring_still_holds(make_recorder: Any) -> None:
    recorder = make_recorder(1 << 12)
    calls(recorder, "work", 5_000)
    stretch = taken(recorder)
    spans = stretch.spans()
    assert 0 < len(spans) < 5_000
    assert stretch.held_from_ns() == min(span.end_ns for span in spans)
    later = taken(recorder, sorted(span.end_ns for span in spans)[len(spans) // 2])
    assert later.held_from_ns() == 0


def test_it_knows_whether_a_span_has_begun_in_it_since(recorder: Any) -> None:
    calls(recorder, "before", 1)
    at_ns = time.monotonic_ns()
    assert not taken(recorder).begun_since(at_ns)
    opened = recorder.scope("open").start()
    assert taken(recorder).begun_since(at_ns)
    assert not taken(recorder, end_ns=at_ns).begun_since(at_ns)
    opened.end()
    assert taken(recorder).begun_since(at_ns)
    assert not taken(recorder).begun_since(time.monotonic_ns())
