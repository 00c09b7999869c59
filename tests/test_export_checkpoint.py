"""The metrics of a recording are written, and read after an end in the middle of a write."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from instrument.recorder.request_meter import Meter
from instrument.recording import memory, memory_layout
from instrument.recording.export_checkpoint import DAMAGED, ExportCheckpoint, MeterState, Progress


@pytest.fixture
def place() -> Iterator[ExportCheckpoint]:
    made = memory.make_memory(1 << 16)
    found = ExportCheckpoint(made.fd)
    os.close(made.fd)
    yield found
    found.close()


def state(number: int, **meter: Any) -> MeterState:
    return MeterState(3, number, {"number": number, **meter}, {"values": []}, {1: number})


def test_the_next_reader_gets_the_last_write(place: ExportCheckpoint) -> None:
    assert place.read_meter_state() is None
    for number in range(1, 4):
        assert place.write_meter_state(state(number))
        assert place.read_meter_state() == state(number)


def test_counts_that_are_numbers_of_numpy_are_written_as_any_others(place: ExportCheckpoint) -> None:
    progress = Progress(7, {1: np.int64(5)}, {**Progress().fates, "seen": np.int64(9)})
    place.write_progress(progress)
    assert place.read_progress() == progress
    assert place.write_meter_state(state(np.int64(4)))
    assert place.read_meter_state() == state(4)


def test_a_killed_writer_leaves_the_earlier_state(place: ExportCheckpoint) -> None:
    place.write_meter_state(state(1))
    place.write_meter_state(state(2))
    at = os.fstat(place.fileno()).st_size - memory_layout.EXPORT_BYTES - memory_layout.METER_BYTES
    os.pwrite(place.fileno(), b"\xff", at + 50)
    assert place.read_meter_state() == state(1)


def test_a_state_without_room_leaves_the_one_before(place: ExportCheckpoint) -> None:
    place.write_meter_state(state(1))
    assert not place.write_meter_state(state(2, noise=random.Random(1).randbytes(1 << 20).hex()))
    assert place.read_meter_state() == state(1)


def test_a_meter_that_goes_on_reports_what_the_one_before_had_counted(make_recorder: Any) -> None:
    recorder = make_recorder()
    first = Meter(recorder, 7)
    one = first.snapshot(requests=True, losses={"spans": 1}, costs_ns={"probes": 2e9}, queued={})
    later = Meter(recorder, 9)
    later.restore(first.state())
    other = later.snapshot(requests=True, losses={}, costs_ns={}, queued={})
    assert (other.start_ns, [(metric.name, metric.series) for metric in other.metrics]) == (
        one.start_ns,
        [(metric.name, metric.series) for metric in one.metrics],
    )


@pytest.mark.parametrize(
    "what",
    [
        {"histograms": {"a": [[[["a", "b"]], [1, 2]]]}},
        {"histograms": {"a": [[[["a", []]], [1, 2, 3, 4]]]}},
        {"start_ns": "soon"},
        {"start_ns": float("inf")},
        {"histograms": {"a": [[[], [1, 2, 3, 4, 1 << 40, 1]]]}},
        {"histograms": {"a": [[[], [-1, 2, 3, 4]]]}},
        {"histograms": [3]},
        {"met": 3},
        {"met": [[[], [[1, "x"]]]]},
        {"counters": [["a", "b", []]]},
    ],
)
def test_a_meter_takes_no_state_that_is_damaged(make_recorder: Any, what: dict[str, Any]) -> None:
    meter = Meter(make_recorder(), 7)
    before = meter.state()
    with pytest.raises(DAMAGED):
        meter.restore({**before, **what})
    assert meter.state() == before
