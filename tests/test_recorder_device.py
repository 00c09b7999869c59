"""The recorder reports spans that are to be timed on a device to the timer, in every shape of a span."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from readback import spans_in

from instrument.recorder import wrapping
from instrument.recorder.recorder import Recorder
from instrument.recording.memory_layout import STREAM
from instrument.recording.spans import Site

SITE, PLAIN = Site("timed", device=True), Site("plain")


class Log:
    """A timer that logs the reports of the recorder, in words."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.lines: list[str] = []
        recorder.on = True
        recorder.begin_device = self.begin

    def begin(self, site: Site, attributes: Any, span_id: int) -> Any:
        assert span_id == self.recorder.current_span_id()
        self.lines.append(" ".join(["begin", site.name, *map(str, (attributes or {}).values())]))
        return Pair(self, site)


class Pair:
    def __init__(self, log: Log, site: Site) -> None:
        self.log, self.site = log, site

    def pause(self) -> None:
        self.log.lines.append(f"pause {self.site.name}")

    def resume(self) -> None:
        self.log.lines.append(f"resume {self.site.name}")

    def cancel(self) -> None:
        self.log.lines.append(f"cancel {self.site.name}")

    def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
        host_ns = end_ns - start_ns
        counted = self.log.recorder.count_device(ring, index, host_ns, 5, host_ns + 10)
        self.log.lines.append(f"end {self.site.name}{'' if counted else ' uncounted'}")


@pytest.fixture
def log(make_recorder: Any) -> Log:
    return Log(make_recorder())


def works(log: Log, *lines: str) -> None:
    """Assert the reports of the recorder. Each end was of a call that had been counted."""
    assert log.lines == list(lines)
    ends = sum(line.startswith("end") for line in lines)
    assert sum(row.totals.device_ns for row in log.recorder.tally().iterate_totals()) == 5 * ends


def test_functions_are_timed_where_their_site_asks_for_it(log: Log) -> None:
    log.recorder.wrap(lambda: None, PLAIN)()
    assert log.recorder.wrap(lambda x: x + 1, SITE)(1) == 2
    works(log, "begin timed", "end timed")


def test_nested_spans_begin_outside_in_and_end_inside_out(log: Log) -> None:
    inner = log.recorder.wrap(lambda: None, Site("inner", device=True))
    log.recorder.wrap(inner, SITE)()
    works(log, "begin timed", "begin inner", "end inner", "end timed")


def test_a_call_that_raises_is_ended(log: Log) -> None:
    def fail() -> None:
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        log.recorder.wrap(fail, SITE)()
    works(log, "begin timed", "end timed")


def test_scopes_hand_over_their_attributes_and_their_stream(log: Log) -> None:
    with log.recorder.make_scope("timed", device=True, attributes={"batch": 8}):
        pass
    with log.recorder.make_scope("named", stream=7, attributes={"batch": 9}):
        pass
    works(log, "begin timed 8", "end timed", "begin named 9 7", "end named")
    assert [span.attributes for span in spans_in(log.recorder)] == [{"batch": 8}, {"batch": 9}]
    assert STREAM is not None


def test_a_scope_ended_by_hand_is_ended(log: Log) -> None:
    opened = log.recorder.make_scope("timed", device=True).start()
    opened.end()
    works(log, "begin timed", "end timed")


def test_a_generator_pauses_between_its_steps(log: Log) -> None:
    def steps() -> Iterator[int]:
        yield 1
        yield 2

    assert list(log.recorder.wrap(steps, SITE)()) == [1, 2]
    pause, resume = "pause timed", "resume timed"
    works(log, "begin timed", pause, resume, pause, resume, pause, "end timed")


def test_a_generator_that_is_closed_early_is_ended(log: Log) -> None:
    def steps() -> Iterator[int]:
        yield 1
        yield 2

    running = log.recorder.wrap(steps, SITE)()
    next(running)
    running.close()
    works(log, "begin timed", "pause timed", "resume timed", "pause timed", "end timed")


def test_coroutines_and_async_generators_are_timed(log: Log) -> None:
    async def steps() -> Any:
        yield 1
        await asyncio.sleep(0)
        yield 2

    async def main() -> None:
        await log.recorder.wrap(asyncio.sleep, Site("task", device=True))(0)
        async for _ in log.recorder.wrap(steps, SITE)():
            pass

    asyncio.run(main())
    pause, resume = "pause timed", "resume timed"
    works(log, "begin task", "end task", "begin timed", pause, resume, pause, resume, pause, "end timed")


def test_a_method_is_timed_by_the_site_of_its_instance(log: Log) -> None:
    class Layer:
        def forward(self, x: int) -> int:
            return x

    timed, plain, none = Layer(), Layer(), Layer()
    sites: dict[int, Site | None] = {id(timed): SITE, id(plain): PLAIN, id(none): None}
    method = wrapping.wrap_method(log.recorder, Layer.forward, sites, lambda _: None)
    assert [method(layer, 3) for layer in (timed, plain, none)] == [3, 3, 3]
    works(log, "begin timed", "end timed")


def test_spans_recorded_afterwards_may_have_a_pair_of_events(log: Log) -> None:
    log.recorder.record(SITE, log.recorder.now_ns(), {"bytes": 3}, Pair(log, SITE))
    log.recorder.record(SITE, log.recorder.now_ns(), None)
    works(log, "end timed")


def test_a_tool_may_watch_every_span(log: Log) -> None:
    log.recorder.watches_all = True
    log.recorder.wrap(lambda: None, PLAIN)()
    with log.recorder.make_scope("scope"):
        pass
    works(log, "begin plain", "end plain", "begin scope", "end scope")


def test_without_a_timer_a_device_site_is_a_site_like_any_other(log: Log) -> None:
    log.recorder.begin_device = None
    log.recorder.wrap(lambda: None, SITE)()
    log.recorder.begin_device = lambda site, attributes, span_id: None
    log.recorder.wrap(lambda: None, SITE)()
    works(log)
    assert len(spans_in(log.recorder)) == 2


@pytest.mark.parametrize("place", ["begin", "end", "pause", "resume"])
def test_a_signal_handler_that_raises_in_the_timer_interrupts_the_service_and_nothing_else(
    log: Log, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def steps() -> Iterator[int]:
        yield 1

    if place == "begin":
        log.recorder.begin_device = interrupted
    else:
        monkeypatch.setattr(Pair, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(log.recorder.wrap(steps, SITE)())
    if place in ("begin", "end"):
        with pytest.raises(KeyboardInterrupt):
            log.recorder.wrap(lambda: None, SITE)()
        with pytest.raises(KeyboardInterrupt), log.recorder.make_scope("timed", device=True):
            pass
    assert log.recorder.current_span_id() == 0
    monkeypatch.undo()
    log.recorder.begin_device = log.begin
    log.lines.clear()
    log.recorder.wrap(lambda: None, SITE)()
    assert log.lines == ["begin timed", "end timed"]


RECORD, QUERY = (ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count) for count in (2, 1))
NOT_READY = 600


@pytest.mark.parametrize("by_ticks", [False, True])
@pytest.mark.parametrize(
    ("answers", "error", "asked"),
    [([NOT_READY, NOT_READY, 0], 0, 3), ([700], 700, 1), ([NOT_READY], NOT_READY, None)],
    ids=["happens", "fails", "does not happen"],
)
def test_an_event_is_recorded_and_awaited_by_the_recorders_clock(
    by_ticks: bool, answers: list[int], error: int, asked: int | None
) -> None:
    """The two functions replace the driver's. They want the interpreter's lock, so a caller with it would hang."""
    recorder, seen = Recorder(1 << 16), []
    if by_ticks and not recorder.start_ticks():
        pytest.skip("the processor has no counter to be trusted")

    def told(what: tuple[Any, ...]) -> None:
        seen.append((what, recorder.now_ns()))

    @RECORD
    def record(event: int, stream: int) -> int:
        told(("record", event, stream))
        return 0

    @QUERY
    def query(event: int) -> int:
        told(("query", event))
        return answers[min(sum(what[0] == "query" for what, _ in seen), len(answers)) - 1]

    addresses = (ctypes.cast(one, ctypes.c_void_p).value or 0 for one in (record, query))
    before_ns = recorder.now_ns()
    found, begin_ns, end_ns = recorder.read_event(*addresses, 7, 8, 10**6)
    after_ns = recorder.now_ns()
    recorder.stop_ticks()
    assert found == error
    assert seen[0][0] == ("record", 7, 8)
    assert {what for what, _ in seen[1:]} == {("query", 7)}
    assert asked is None or len(seen) == 1 + asked
    assert asked is not None or end_ns - begin_ns >= 10**6
    slack_ns = 1000 if by_ticks else 0  # between two clocks
    assert before_ns - slack_ns <= begin_ns <= seen[0][1] + slack_ns
    assert seen[-1][1] - slack_ns <= end_ns <= after_ns + slack_ns


def test_an_event_that_cannot_be_recorded_is_not_awaited() -> None:
    @RECORD
    def record(event: int, stream: int) -> int:
        return 400

    address = ctypes.cast(record, ctypes.c_void_p).value or 0
    assert Recorder(1 << 16).read_event(address, 0, 7, 8, 10**6)[0] == 400
