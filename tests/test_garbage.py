"""Garbage collections that take long: recorded as what they are, on no other account, and named as causes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from readback import spans_in

import instrument
from instrument.profile.model import Limits, Profile, RequestsRule
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import Span, is_collection
from instrument.report.self_times_view import ops
from instrument.report.view import Options


def begin(limit_ns: int | None) -> instrument.Session:
    found = instrument.start(Profile(requests=(RequestsRule(),), limits=Limits(blocked_ns=limit_ns)))
    assert isinstance(found, instrument.Session)
    return found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No collection but those that are asked for."""
    before = list(gc.callbacks)
    gc.disable()
    yield
    gc.enable()
    instrument.stop()
    assert gc.callbacks == before


def collections() -> list[Span]:
    return [span for span in spans_in(RECORDER) if is_collection(span.site)]


def test_a_collection_that_takes_longer_is_recorded_with_its_generation() -> None:
    session = begin(1)
    with instrument.scope("work"):
        begun_ns = RECORDER.now_ns()
        gc.collect()
        ended_ns = RECORDER.now_ns()
    [found] = collections()
    assert begun_ns <= found.start_ns < found.end_ns <= ended_ns
    assert found.attributes["cpython.gc.generation"] == 2
    assert found.parent_id == 0
    [work] = [span for span in spans_in(RECORDER) if span.site.name == "work"]
    assert work.self_ns == work.total_ns, "its time is also that of whom it interrupted"
    told = "\n".join(ops(session.recording(), Options()).lines())
    assert "work" in told
    assert "garbage" not in told


@pytest.mark.parametrize("limit_ns", [10**12, None])
def test_others_are_not(limit_ns: int | None) -> None:
    begin(limit_ns)
    gc.collect()
    assert collections() == []


def test_nothing_is_recorded_while_recording_is_switched_off() -> None:
    begin(1)
    instrument.disable()
    gc.collect()
    instrument.enable()
    assert collections() == []
