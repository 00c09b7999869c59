"""The reader of the rings: what it keeps, which windows it cuts, and how it follows another profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from instrument.profile.keys import loads
from instrument.profile.model import Profile
from instrument.recording.spans import Origin, Span
from instrument.sessions.reader import Reader

ORIGIN = Origin(1, "shop", 0, 0)

Make = Callable[[str], tuple[Reader, list[Span]]]


def profile(text: str) -> Profile:
    return loads(text, environ={})


@pytest.fixture
def make(recorder: Any, select: Any) -> Make:
    """Makes a reader of a profile, and the list of what it keeps."""

    def made(text: str) -> tuple[Reader, list[Span]]:
        kept: list[Span] = []
        reader = Reader(recorder, select(text), kept.extend, lambda: ORIGIN)
        reader.begin(profile(text), time.monotonic_ns())
        return reader, kept

    return made


def requests(recorder: Any, count: int = 1) -> None:
    for _ in range(count):
        with recorder.scope("request", kind="request"), recorder.scope("work"):
            pass


def cut(reader: Reader) -> list[int]:
    """The numbers of the windows that have ended since the last time."""
    found = []
    while reader.cut:
        (index, start_ns, end_ns), origin = reader.cut.popleft()
        assert (start_ns < end_ns, origin) == (True, ORIGIN)
        found.append(index)
    return found


def test_trees_are_kept_and_windows_cut_when_it_looks(recorder: Any, make: Make) -> None:
    reader, kept = make("schedule: {record: 2}")
    requests(recorder, 5)
    assert (kept, cut(reader)) == ([], [])
    reader.look()
    assert ([span.site.name for span in kept], cut(reader)) == (["request", "work"] * 5, [0, 1])
    last = reader.stop(time.monotonic_ns())
    assert last is not None
    assert last[0] == 2


def test_a_window_that_is_open_ends_with_a_change_of_the_schedule_alone(recorder: Any, make: Make) -> None:
    reader, _ = make("schedule: {record: 2}")
    requests(recorder)
    reader.look()
    reader.change(profile("schedule: {record: 2}\ncapture: {sample: 0.5}"), time.monotonic_ns())
    assert cut(reader) == []
    reader.change(profile("schedule: {record: 1}"), time.monotonic_ns())
    assert cut(reader) == [0]
    requests(recorder, 2)
    reader.look()
    assert cut(reader) == [1, 2]


def test_what_is_skipped_is_neither_kept_nor_lost(recorder: Any, make: Make) -> None:
    reader, kept = make("capture: {sample: 1.0}")
    requests(recorder)
    reader.skip()
    requests(recorder)
    reader.look()
    assert [span.site.name for span in kept] == ["request", "work"]
    assert (reader.lost, reader.steps_lost, dict(reader.losses())) == (0, 0, {})


def test_what_it_never_keeps_is_left_to_whoever_asks(recorder: Any, make: Make) -> None:
    reader, kept = make("capture: {sample: 0.0}")
    requests(recorder)
    passed = recorder.spans()
    assert (len(reader.unsent(passed)), kept) == (2, [])
    reader, kept = make("capture: {sample: 1.0}")
    requests(recorder)
    known = {span.span_id for span in passed}
    assert reader.unsent([span for span in recorder.spans() if span.span_id not in known]) == []
    assert len(kept) == 2


def test_what_it_reads_again_is_kept_again_and_told_of_once(recorder: Any, select: Any) -> None:
    kept: list[Span] = []
    ended: list[Any] = []
    reader = Reader(recorder, select("schedule: {record: 2}"), kept.extend, lambda: ORIGIN, ended.extend)
    reader.begin(profile("schedule: {record: 2}"), time.monotonic_ns())
    requests(recorder, 3)
    with recorder.scope("request", kind="request"):
        with recorder.scope("work"):
            pass
        reader.look()
        assert (len(kept), len(ended), cut(reader), reader.held) == (6, 3, [0], 1)
        kept.clear()
        places = {thread: row - 3 for thread, row in reader.places.items()}
        reader.go_on(places, time.monotonic_ns())
        reader.look()
        assert [span.site.name for span in kept] == ["request", "work"]
        assert (len(ended), cut(reader), reader.held) == (3, [], 1)
    reader.look()
    assert [span.site.name for span in kept] == ["request", "work"] * 2
    assert (len(ended), cut(reader), reader.lost) == (4, [1], 0)
