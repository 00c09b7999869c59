"""Profiler: steps of a loop become windows with the right content, and handlers get them in time."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import functools
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument import (
    Profiler,
    StateError,
    TargetError,
    chrome,
    export_chrome,
    print_summary,
    profiled,
    schedule,
    scope,
)
from instrument.compat import paddle
from instrument.errors import ProfileError, TraceError
from instrument.profile.keys import loads
from instrument.profile.model import Schedule
from instrument.recorder.recorder import RECORDER
from instrument.sessions import torch_profiler
from instrument.sessions.handlers import Window
from instrument.sessions.window import RECORDING_STATES, State, Step, Windows, clip_steps, find_state

GOLDEN = Path(__file__).parent / "golden"
LETTERS = {State.CLOSED: "-", State.READY: "w", State.RECORD: "R", State.RECORD_AND_RETURN: "S"}


@pytest.fixture(autouse=True)
def stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test works in a folder of its own; a session that a failing test left running is stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INSTRUMENT_PROFILE", raising=False)
    monkeypatch.setattr(torch_profiler, "is_torch_imported", lambda: False)  # it has tests of its own
    yield
    instrument.stop()


def golden_schedules() -> list[tuple[dict[str, int], str]]:
    cases = []
    for name in ("paddle_schedule_enumeration.txt", "torch_schedule_enumeration.txt"):
        for line in (GOLDEN / name).read_text().splitlines():
            arguments, _, states = line.partition("}: ")
            named = ast.literal_eval(arguments + "}")
            words = {"wait": "closed", "warmup": "ready", "active": "record"}
            named = {words.get(word, word): count for word, count in named.items()}
            if "skip_first_wait" not in named:  # torch alone has it
                cases.append((named, states))
    return cases


@pytest.mark.parametrize(("arguments", "states"), golden_schedules(), ids=str)
def test_a_schedule_says_of_each_step_what_paddle_and_torch_say(arguments: dict[str, int], states: str) -> None:
    state_of = schedule(**arguments)
    assert " ".join(LETTERS[state_of(step)] for step in range(len(states.split()))) == states


COUNT = st.integers(0, 4)
STATES_OF_STEPS = st.lists(st.sampled_from(list(State)), max_size=30)


@given(st.builds(Schedule, record=st.integers(1, 4), closed=COUNT, ready=COUNT, skip_first=COUNT, repeat=COUNT))
def test_the_windows_of_a_schedule_are_those_of_its_list_of_steps(wanted: Schedule) -> None:
    cycle = [False] * (wanted.closed + wanted.ready) + [True] * wanted.record
    steps = ([False] * wanted.skip_first + cycle * (wanted.repeat or 40))[:40]
    expected, first = [], None
    for step, records in enumerate([*steps, *([False] * 40)][:40]):
        if records and first is None:
            first = step
        if first is not None and records and step - first == wanted.record - 1:
            expected.append((len(expected), first, step + 1))
            first = None
    windows = Windows(wanted, 0)
    assert [found for end in range(1, 41) if (found := windows.advance_step(end))] == expected


@given(STATES_OF_STEPS)
def test_any_function_of_steps_gives_windows_that_hold_each_recorded_step_once(states: list[State]) -> None:
    windows = Windows(lambda step: states[step] if step < len(states) else "CLOSED", 0)
    found = []
    for end in range(1, len(states) + 2):
        first = windows.first_step
        window = windows.end_step(end * 10)
        if window is not None:
            assert window[1] // 10 == first
            found.append(range(first, end))
        windows.begin_window(end * 10 + 5)
    assert [step for steps in found for step in steps] == [
        n for n, state in enumerate(states) if state in RECORDING_STATES
    ]
    for steps in found:
        assert State.RECORD_AND_RETURN not in [states[step] for step in steps[:-1]]


@profiled("work")
def work() -> None: ...


def edges(window: Window) -> tuple[int, int, int, bool, int]:
    calls = sum(span.site.name == "work" for span in window.trace.spans)
    return window.index, window.first_step, window.last_step, window.partial, calls


@pytest.mark.parametrize(
    ("wanted", "steps", "windows"),
    [
        ((2, 5), 8, [(0, 2, 4, False, 3)]),
        ((0, 1), 3, [(0, 0, 0, False, 1)]),
        ((2, 10), 5, [(0, 2, 4, True, 3)]),
        ((2, 10), 2, []),
        ((2, 10), 0, []),
        (None, 0, []),
        (None, 3, [(0, 0, 2, True, 3)]),
        (schedule(record=1), 3, [(0, 0, 0, False, 1), (1, 1, 1, False, 1), (2, 2, 2, False, 1)]),
        (schedule(closed=1, ready=1, record=2), 8, [(0, 2, 3, False, 2), (1, 6, 7, False, 2)]),
        (schedule(closed=1, ready=1, record=2), 7, [(0, 2, 3, False, 2), (1, 6, 6, True, 1)]),
        (schedule(record=2, skip_first=1, repeat=1), 9, [(0, 1, 2, False, 2)]),
        (lambda step: "RECORD" if step == 1 else "CLOSED", 4, [(0, 1, 1, False, 1)]),
        (lambda step: "RECORD" if step == 1 else State.READY, 4, [(0, 1, 1, False, 1)]),
    ],
)
def test_each_window_holds_its_steps_and_no_other(wanted: Any, steps: int, windows: list[Any]) -> None:
    found: list[Window] = []
    with Profiler(schedule=wanted, on_trace_ready=found.append) as profiler:
        for _ in range(steps):
            work()
            profiler.step()
    assert list(map(edges, found)) == windows


def test_a_step_that_an_exception_ends_is_the_last_one_of_a_partial_window() -> None:
    found: list[Window] = []

    def loop() -> None:
        with Profiler(on_trace_ready=found.append) as profiler:
            work()
            profiler.step()
            work()
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert list(map(edges, found)) == [(0, 0, 1, True, 2)]


def test_work_of_a_handler_is_in_no_window_and_in_no_step() -> None:
    found: list[Window] = []

    def handler(window: Window) -> None:
        for _ in range(100):
            work()
        found.append(window)

    with Profiler(schedule=schedule(record=1), on_trace_ready=handler) as profiler:
        for _ in range(4):
            work()
            profiler.step()
    assert [edges(window)[-1] for window in found] == [1, 1, 1, 1]
    assert all(a.trace.end_ns < b.trace.start_ns for a, b in pairwise(found))


def test_a_handler_that_fails_is_noted_and_the_next_ones_run(caplog: pytest.LogCaptureFixture) -> None:
    found: list[Window] = []

    def broken(window: Window) -> None:
        raise OSError("disk full")

    with Profiler(schedule=schedule(record=1), on_trace_ready=[broken, found.append]) as profiler:
        for _ in range(3):
            profiler.step()
    assert profiler.failures == 3
    assert len(found) == 3
    assert "on_trace_ready failed for window 0, steps 0 to 0: OSError: disk full" in found[1].trace.notes
    assert caplog.text.count("on_trace_ready failed for") == 1
    assert "on_trace_ready or the schedule of a Profiler failed 3 times" in caplog.text


@pytest.mark.parametrize("ends", ["profiler", "session"])
def test_a_handler_may_end_it_and_the_windows_are_written_and_the_loop_goes_on(ends: str) -> None:
    found: list[Window] = []

    def handler(window: Window) -> None:
        (profiler if ends == "profiler" else instrument).stop()
        found.append(window)

    own = loads("service: shop", environ={})
    with Profiler(own, schedule=schedule(record=2), on_trace_ready=[handler, export_chrome("traces")]) as profiler:
        for _ in range(6):
            work()
            profiler.step()
        with pytest.raises(StateError, match="no session runs"):
            instrument.session()
    assert (profiler.failures, [edges(window)[:3] for window in found]) == (0, [(0, 0, 1)])
    assert chrome.load(f"traces/shop-{os.getpid()}-0.json.gz")[1].calls == 4
    assert len(list(Path("traces").iterdir())) == 1
    assert profiler.benchmark().skipped == (2 if ends == "profiler" else 6)
    with profiler:
        profiler.step()
    assert profiler.benchmark().skipped == 1


def test_the_function_schedule_itself_gets_the_advice_to_call_it() -> None:
    with pytest.raises(ProfileError, match=r"call it: schedule\(record=3\)"):
        Profiler(schedule=schedule)  # type: ignore[arg-type]


def test_a_schedule_that_fails_later_closes_the_step_and_at_once_is_loud() -> None:
    def fails(step: int) -> str:
        return "RECORD" if step < 2 else "NEVER"

    with Profiler(schedule=fails) as profiler:
        for _ in range(3):
            work()
            profiler.step()
    assert profiler.window is not None
    assert edges(profiler.window) == (0, 0, 1, False, 2)
    assert profiler.failures == 2
    with pytest.raises(ProfileError, match="found 'NEVER' for step 0; allowed: CLOSED, READY, RECORD, RECORD_AND"):
        Profiler(schedule=lambda step: "NEVER").start()


def test_a_span_open_at_an_edge_is_clipped_and_marked_in_every_window_it_reaches_into() -> None:
    found: list[Window] = []
    with Profiler(schedule=schedule(closed=1, record=1), on_trace_ready=found.append) as profiler, scope("epoch"):
        for _ in range(4):
            profiler.step()
    for window in found:
        span, step = window.trace.spans
        assert step.parent_id == span.span_id
        assert not step.clipped
        assert span.clipped
        assert (span.start_ns, span.end_ns) == (window.trace.start_ns, window.trace.end_ns)
    assert len(found) == 2


def test_ranges_that_overlap_without_nesting_and_cross_steps_are_all_there() -> None:
    found: list[Window] = []

    async def crossed(profiler: Profiler) -> None:
        async def one(name: str, steps: int) -> None:
            async with scope(name):
                for _ in range(steps):
                    await asyncio.sleep(0)
                    profiler.step()

        await asyncio.gather(one("a", 2), one("b", 3))

    with Profiler(on_trace_ready=found.append) as profiler:
        first = instrument.scope_start("first")
        second = instrument.scope_start("second")
        profiler.step()
        instrument.scope_end(first)
        profiler.step()
        instrument.scope_end(second)
        asyncio.run(crossed(profiler))
    names = sorted(span.site.name for span in found[0].trace.spans)
    assert names == ["a", "b", "first", "second", *["step"] * 7]
    chrome.dump("crossed.json", found[0].trace)
    assert sorted(span.site.name for span in chrome.load("crossed.json")[0].spans) == names
    assert profiler.failures == 0


def windows_by_hand(wanted: Schedule, ended: int, begun_in_last: bool) -> list[tuple[int, int, int, bool]]:
    """Index, first and last step, and whether partial, of each window of a loop: its steps written out one by one."""
    steps = ["-"] * wanted.skip_first
    cycle = ["-"] * (wanted.closed + wanted.ready) + ["R"] * (wanted.record - 1) + ["S"]
    while len(steps) <= ended:
        if wanted.repeat and len(steps) >= wanted.skip_first + wanted.repeat * len(cycle):
            cycle = ["-"]
        steps += cycle
    found: list[tuple[int, int, int, bool]] = []
    first = None
    for step in range(ended):
        if steps[step] != "-" and first is None:
            first = step
        if steps[step] == "S" and first is not None:
            found.append((len(found), first, step, False))
            first = None
    if first is None and steps[ended] != "-":
        first = ended
    last = ended if begun_in_last else ended - 1
    if first is not None and first <= last:
        found.append((len(found), first, last, True))
    return found


@given(
    st.builds(Schedule, record=st.integers(1, 4), closed=COUNT, ready=COUNT, skip_first=COUNT, repeat=COUNT),
    st.integers(0, 25),
    st.booleans(),
)
def test_the_windows_of_a_loop_are_those_of_its_steps_written_out(wanted: Schedule, ended: int, more: bool) -> None:
    asked = {name: getattr(wanted, name) for name in ("record", "closed", "ready", "skip_first", "repeat")}
    found: list[Window] = []
    with shared_session(), Profiler(schedule=schedule(**asked), on_trace_ready=found.append) as profiler:
        for step in range(ended):
            with scope("mark", attributes={"at": step}):
                pass
            profiler.step()
        if more:
            with scope("mark", attributes={"at": ended}):
                pass
    expected = windows_by_hand(wanted, ended, more)
    assert [(window.index, window.first_step, window.last_step, window.partial) for window in found] == expected
    for window, (_, first, last, _) in zip(found, expected, strict=True):
        marks = [span.attributes["at"] for span in window.trace.spans if span.site.name == "mark"]
        assert sorted(marks) == list(range(first, last + 1))


@contextmanager
def shared_session() -> Iterator[None]:
    """One that runs for all examples of a property; the fixture stops it."""
    try:
        instrument.session()
    except StateError:
        instrument.start()
    yield


@given(
    st.dictionaries(
        st.sampled_from(["record", "closed", "ready", "repeat", "skip_first"]),
        st.one_of(st.integers(-3, 3), st.booleans(), st.floats(), st.none(), st.text(max_size=3), st.just(10**30)),
    )
)
def test_any_argument_of_a_schedule_that_is_no_such_number_is_named(asked: dict[str, Any]) -> None:
    def is_right(name: str, value: Any) -> bool:
        return type(value) is int and value >= (1 if name == "record" else 0)

    wrong = {name for name, value in asked.items() if not is_right(name, value)}
    if wrong:
        with pytest.raises(ProfileError) as told:
            schedule(**{"record": 1, **asked})
        assert {problem.split(": ")[1] for problem in told.value.problems} == wrong
        assert all(
            f"found {asked[problem.split(': ')[1]]!r}; allowed: a whole number" in problem
            for problem in told.value.problems
        )
    else:
        assert schedule(**{"record": 1, **asked})(10**40) in list(State)


OPEN_CLOSE_STEP = st.lists(st.sampled_from(["open", "close first", "close last", "step"]), max_size=40)


@given(OPEN_CLOSE_STEP, st.integers(1, 3), st.integers(0, 2))
def test_ranges_that_cross_each_other_and_steps_are_in_every_window_that_they_reach_into(
    deeds: list[str], record: int, closed: int
) -> None:
    found: list[Window] = []
    opened: list[tuple[int, Any]] = []
    ranges: dict[int, list[int]] = {}
    with shared_session():
        with Profiler(schedule=schedule(record=record, closed=closed), on_trace_ready=found.append) as profiler:
            steps = 0
            for number, deed in enumerate(deeds):
                if deed == "open":
                    opened.append((number, instrument.scope_start("range", attributes={"number": number})))
                    ranges[number] = [steps, steps]
                elif deed == "step":
                    profiler.step()
                    steps += 1
                elif opened:
                    key, range_ = opened.pop(0 if deed == "close first" else -1)
                    instrument.scope_end(range_)
                    ranges[key][1] = steps
        for key, range_ in opened:
            instrument.scope_end(range_)
            ranges[key][1] = steps
        assert set(RECORDER.count_unusual_events()) <= {"scope closed before a scope inside it"}
    for window in found:
        spans = {span.attributes["number"]: span for span in window.trace.spans if span.site.name == "range"}
        first, last = window.first_step, window.last_step
        assert set(spans) == {key for key, (begun, ended) in ranges.items() if begun <= last and ended >= first}
        for key, span in spans.items():
            begun, ended = ranges[key]
            goes_on = key in dict(opened) if window.partial else ended > last
            assert span.clipped == (begun < first or goes_on)
            assert window.trace.start_ns <= span.start_ns <= span.end_ns <= window.trace.end_ns
            assert (span.start_ns == window.trace.start_ns) == (begun < first)


def test_profilers_side_by_side_on_threads_have_windows_of_their_own() -> None:
    found: dict[int, list[Window]] = {record: [] for record in range(1, 5)}
    barrier = threading.Barrier(4)
    sessions = set()

    def loop(record: int) -> None:
        with Profiler(schedule=schedule(record=record), on_trace_ready=found[record].append) as profiler:
            sessions.add(instrument.session())
            barrier.wait(240)
            for _ in range(12):
                with scope(f"of {record}"):
                    pass
                profiler.step()
            barrier.wait(240)

    threads = [threading.Thread(target=loop, args=(record,)) for record in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sessions) == 1
    with pytest.raises(StateError, match="no session runs"):
        instrument.session()
    for record, windows in found.items():
        whole = [window for window in windows if not window.partial]
        steps = [(window.first_step, window.last_step) for window in whole]
        assert steps == [(first, first + record - 1) for first in range(0, 12, record)]
        own = [sum(span.site.name == f"of {record}" for span in window.trace.spans) for window in whole]
        assert own == [record] * (12 // record)


def test_steps_of_many_threads_are_each_counted_once() -> None:
    found: list[Window] = []

    def loop(profiler: Profiler) -> None:
        for _ in range(50):
            work()
            profiler.step()

    with Profiler(schedule=schedule(record=10), on_trace_ready=found.append) as profiler:
        threads = [threading.Thread(target=loop, args=(profiler,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    whole = [window for window in found if not window.partial]
    assert [(window.first_step, window.last_step) for window in whole] == [(n, n + 9) for n in range(0, 200, 10)]


def test_a_step_that_waits_for_a_handler_on_another_thread_begins_before_it_ends() -> None:
    found: list[Window] = []
    called = threading.Event()

    def step() -> None:
        called.set()
        profiler.step()

    def handler(window: Window) -> None:
        if window.index == 0:
            another.start()
            called.wait(240)
            time.sleep(0.05)
        found.append(window)

    another = threading.Thread(target=step)
    with Profiler(schedule=schedule(record=1), on_trace_ready=handler) as profiler:
        profiler.step()
        another.join()
    steps = [step for window in found for step in window.steps]
    assert [step.number for step in steps] == [0, 1]
    assert all(step.start_ns <= step.end_ns for step in steps)


def test_nested_profilers_look_at_one_session_that_ends_with_the_last() -> None:
    outer: list[Window] = []
    inner: list[Window] = []
    first = Profiler(on_trace_ready=outer.append)
    second = Profiler(schedule=(1, 2), on_trace_ready=inner.append)
    first.start()
    session = instrument.session()
    second.start()
    for _ in range(3):
        work()
        first.step()
        second.step()
    first.stop()
    assert instrument.session() is session
    second.stop()
    with pytest.raises(StateError, match="no session runs"):
        instrument.session()
    assert [edges(window) for window in (*outer, *inner)] == [(0, 0, 2, True, 3), (0, 1, 1, False, 1)]


def test_a_profiler_looks_at_a_running_session_and_leaves_it_as_it_was() -> None:
    session = instrument.start(loads("service: shop\nstate: CPU", environ={}))
    with Profiler() as profiler:
        work()
        profiler.step()
    assert instrument.session() is session
    assert profiler.window is not None
    assert profiler.window.trace.origin.service == "shop"
    work()
    assert instrument.session().tally().calls == 2
    with pytest.raises(StateError, match=r"a session with .* runs; leave the profile out"):
        Profiler(loads("", environ={})).start()
    with pytest.raises(StateError, match=r"a Profiler with state GPU cannot start: .* has state CPU"):
        Profiler(state="GPU").start()
    assert instrument.session() is session


def test_the_sessions_own_trace_and_summary_have_the_steps_of_the_first_profiler() -> None:
    session = instrument.start(loads("", environ={}))
    with Profiler() as outer:
        for _ in range(3):
            with Profiler() as inner:
                for _ in range(2):
                    work()
                    inner.step()
            outer.step(num_samples=4)
    with Profiler() as later:
        work()
        later.step()
    work()  # in no step
    trace = session.trace()
    steps = sorted((span for span in trace.spans if span.site.kind == "step"), key=lambda span: span.start_ns)
    assert [(span.attributes["step"], span.attributes.get("samples")) for span in steps] == [
        (0, 4), (1, 4), (2, 4), (0, None),
    ]  # fmt: skip
    numbers = {span.span_id: span.attributes["step"] for span in steps}
    found = [numbers.get(span.parent_id) for span in trace.spans if span.site.name == "work"]
    assert found == [0, 0, 1, 1, 2, 2, 0, None]
    assert session.views(["benchmark"], skip_first=0)["benchmark"].loops[0].steps == 4  # type: ignore[attr-defined]
    count = len(trace.spans)
    assert f"Spans: all {count} that were kept" in session.summary(views=["cost"])
    instrument.stop()
    assert len(session.trace().spans) == count
    assert "4 steps timed" in session.summary(views=["benchmark"], skip_first=0)


def test_a_profiler_that_never_steps_hides_no_steps_of_another() -> None:
    session = instrument.start(loads("", environ={}))
    with Profiler() as outer:
        with Profiler() as inner:
            for _ in range(3):
                inner.step()
        assert session.views(["benchmark"], skip_first=0)["benchmark"].loops[0].steps == 3  # type: ignore[attr-defined]
        outer.step(num_samples=4)
    steps = [span.attributes for span in session.trace().spans if span.site.kind == "step"]
    assert steps == [{"step": 0, "samples": 4}]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=30))
def test_of_steps_that_overlap_on_a_thread_the_one_that_ends_last_is_in_the_trace(ends: list[tuple[int, int]]) -> None:
    now, begun, added = 0, [0] * 3, list[Step]()
    for number, (which, lasts) in enumerate(ends):
        now += lasts
        added.append(Step(number, begun[which], now, which // 2))  # two loops are on one thread, and the third is not
        begun[which] = now
    found = clip_steps(added, 0, now)
    for thread_id in range(2):
        kept = [step for step in found if step.thread_id == thread_id]
        assert all(one.end_ns <= after.start_ns for one, after in pairwise(kept))
        for step in added:
            is_over = any(one.start_ns < step.end_ns <= one.end_ns for one in kept)
            assert is_over or step.thread_id != thread_id


def test_a_step_that_reaches_over_the_edge_of_a_trace_is_clipped_and_an_older_one_is_not_there() -> None:
    steps = [Step(0, 2, 4, 1), Step(0, 0, 10, 1), Step(1, 10, 20, 1), Step(7, 15, 25, 2), Step(8, 25, 30, 1)]
    assert clip_steps(steps, 0, 30) == steps[1:]
    assert clip_steps(steps, 10, 26) == [steps[2], steps[3], Step(8, 25, 26, 1, clipped=True)]
    assert clip_steps(steps, 12, 14) == [Step(1, 12, 14, 1, clipped=True)]
    assert clip_steps(steps, 40, 50) == []


def test_a_session_that_ends_under_a_profiler_does_not_stop_the_loop() -> None:
    found: list[Window] = []
    with Profiler(schedule=schedule(record=1), on_trace_ready=found.append) as profiler:
        work()
        profiler.step()
        instrument.stop()
        work()
        profiler.step()
    assert [edges(window)[-1] for window in found][:1] == [1]


def test_several_windows_are_several_files_and_none_is_written_over() -> None:
    for _ in range(2):
        handlers = [export_chrome("traces")]
        own = loads("service: shop", environ={})
        with Profiler(own, schedule=schedule(record=2), on_trace_ready=handlers) as profiler:
            for _ in range(4):
                work()
                profiler.step()
    names = sorted(path.name for path in Path("traces").iterdir())
    assert names == [f"shop-{os.getpid()}-{window}.json.gz" for window in range(4)]
    trace, tally = chrome.load(Path("traces") / names[1])
    assert (trace.window, tally.calls) == (1, 4)


def test_summary_and_export_are_of_the_newest_window(capsys: pytest.CaptureFixture[str]) -> None:
    shown = print_summary(views=["events"], tracer_option="OpDetail")
    with Profiler(schedule=(1, 3), on_trace_ready=shown) as profiler:
        with pytest.raises(StateError, match=r"no window has ended yet that could be exported to x.json"):
            profiler.export("x.json")
        assert profiler.summary().startswith("No window has ended yet.")
        for _ in range(4):
            work()
            profiler.step(num_samples=4)
    assert "Window 0, steps 1 to 2\n" in capsys.readouterr().out
    text = profiler.summary(views=["benchmark", "events"], unit="us")
    assert "work" in text
    assert text.index("Benchmark Report") < text.index("Profiling Report")
    assert text.count("Benchmark Report") == profiler.summary().count("Benchmark Report") == 1
    assert chrome.load(profiler.export("x.json"))[1].calls == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state": "gpu"}, "Profiler: state: found 'gpu'; allowed: CPU, GPU, All"),
        ({"tracer_option": "Full"}, "Profiler: tracer_option: found 'Full'; allowed: Default, OpDetail, AllOpDetail"),
        ({"schedule": (5, 5)}, r"Profiler: schedule: found \(5, 5\); allowed: \(first, end\) with 0 <= first < end"),
        ({"schedule": (True, 5)}, r"schedule: found \(True, 5\)"),
        ({"schedule": 3}, "schedule: found 3"),
        ({"on_trace_ready": "traces"}, "on_trace_ready: found 'traces'; allowed: a function of a window"),
    ],
)
def test_bad_arguments_are_reported(arguments: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Profiler(**arguments)


def test_a_handler_that_nobody_would_await_is_refused() -> None:
    async def handle(window: Window) -> None: ...

    class Sends:
        async def __call__(self, window: Window) -> None: ...

    for handler in (handle, functools.partial(handle), Sends()):
        for make in (Profiler, paddle.Profiler):
            with pytest.raises(ProfileError, match=r"found the asynchronous .*; allowed: a function of a window"):
                make(on_trace_ready=handler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sorted_by": "bogus"}, "sorted_by is 'bogus'; allowed: default, calls"),
        ({"views": ["event"]}, r"view is 'event'; allowed: .* nearest is events"),
        ({"views": "events"}, r"views is 'events'; allowed: a list of their names, such as \['events'\]"),
        ({"bogus": 1}, r"there is no option 'bogus'; allowed: tracer_option, state, sorted_by, rows, "),
    ],
)
def test_a_summary_that_cannot_be_made_is_refused_before_the_first_window(options: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        print_summary(**options)
    assert print_summary(views=["events"], rows=None, torch_trace=None)


def test_a_pair_is_the_schedule_that_says_the_same() -> None:
    found: list[Any] = [Profiler(schedule=wanted)._schedule for wanted in (schedule(record=3, repeat=1), (0, 3))]
    assert [(one.func, one.args) for one in found] == [(find_state, (Schedule(record=3, repeat=1),))] * 2


def test_bad_schedules_are_reported_all_at_once() -> None:
    with pytest.raises(ProfileError) as told:
        schedule(record=0, closed=-1)
    assert told.value.problems == (
        "schedule: closed: found -1; allowed: a whole number from 0",
        "schedule: record: found 0; allowed: a whole number from 1",
    )


def test_verbs_at_the_wrong_time_are_reported() -> None:
    profiler = Profiler(on_trace_ready=lambda window: profiler.step(), schedule=schedule(record=1))
    with pytest.raises(StateError, match="cannot step a Profiler that does not run"):
        profiler.step()
    with profiler:
        with pytest.raises(StateError, match="the Profiler already runs"):
            profiler.start()
        profiler.step()
        assert profiler.failures == 1
    profiler.stop()


def test_the_timer_alone_records_nothing_and_starts_no_session() -> None:
    with Profiler(timer_only=True) as profiler:
        for _ in profiler.loader(range(12)):
            work()
            profiler.step(num_samples=3)
        with pytest.raises(StateError, match="no session runs"):
            instrument.session()
        line = profiler.step_info("images")
        assert line.startswith("reader_cost: ")
        assert line.endswith(" images/s")
        assert profiler.step_info() == "batch_cost: - s ips: - steps/s"
    loop = profiler.benchmark()
    assert (loop.steps, loop.skipped, loop.samples, loop.rate_of) == (2, 10, 6, "samples")
    assert "2 steps timed, the first 10 skipped" in profiler.summary()


def test_a_summary_has_the_views_that_are_asked_for_alone() -> None:
    with Profiler() as profiler:
        for _ in range(3):
            with scope("forward", phase="forward"):
                pass
            profiler.step()
    assert "Benchmark Report" in profiler.summary()
    text = profiler.summary(views=["phases"])
    assert "Phases Report" in text
    assert text.count("Report") == 1
    assert "Steps: 1 whole, 2 skipped before" in profiler.summary(views=["phases"], skip_first=2)


@pytest.mark.parametrize("steps", [15, 1_020])
def test_a_summary_leaves_out_the_first_steps_that_it_is_asked_to(steps: int) -> None:
    with Profiler(timer_only=True) as profiler:
        for _ in range(steps):
            profiler.step()
    for asked, skipped in ((None, 10), (0, 0), (3, 3), (12, 12), (5_000, min(steps, 1_000))):
        text = profiler.summary(views=["benchmark"], skip_first=asked)
        assert f"{steps - skipped} steps timed, the first {skipped} skipped" in text
    with pytest.raises(ValueError, match="skip_first is -1"):
        profiler.summary(skip_first=-1)
    assert profiler.benchmark().steps == steps - 10


@pytest.mark.slow
def test_a_training_loop_prints_its_steps(capsys: pytest.CaptureFixture[str], torch: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = torch.utils.data.DataLoader(data, batch_size=4)
    own = loads("layers: [{type: Linear}]", environ={})
    with Profiler(own, schedule=(2, 5), on_trace_ready=print_summary(tracer_option="AllOpDetail")) as profiler:
        for inputs, wanted in profiler.loader(batches, "read"):
            with scope("forward"):
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
            with scope("backward"):
                loss.backward()
            with scope("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step(num_samples=len(inputs))
    window = profiler.window
    assert window is not None
    calls = {row.path[-1].name: 0 for row in window.tally().iterate_totals()}
    for row in window.tally().iterate_totals():
        calls[row.path[-1].name] += row.totals.calls
    assert calls == {"step": 3, "read": 3, "forward": 3, "Linear": 6, "backward": 3, "optimizer": 3}
    printed = capsys.readouterr().out
    assert "Window 0, steps 2 to 4" in printed
    assert "Linear" in printed


def test_a_wait_for_any_loader_on_the_thread_of_the_steps_is_reader_cost(torch: Any) -> None:
    class Slow(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 12

        def __getitem__(self, at: int) -> int:
            time.sleep(0.004)
            return range(12)[at]

    def read(batches: Any) -> None:
        for _ in batches:
            pass

    def validate(window: Window) -> None:
        read(instrument.loader(Slow(), "validation"))  # a handler's work is in no step

    batches = torch.utils.data.DataLoader(Slow())
    with Profiler(loads("loaders: auto", environ={}), schedule=(2, 4), on_trace_ready=validate) as profiler:
        another = threading.Thread(target=read, args=(instrument.loader(Slow()),))
        another.start()
        for _ in profiler.loader(instrument.loader(batches), "outer"):  # three in one another count once
            time.sleep(0.002)
            profiler.step()
        another.join()
        loop = profiler.benchmark()
        assert loop.steps == 2
        assert loop.reader is not None
        assert loop.batch is not None
        assert 4e6 <= loop.reader.mean <= loop.batch.mean - 2e6
        reader, batch = profiler.step_info().replace("reader_cost: ", "").split(" s batch_cost: ")
        assert 0.004 <= float(reader) < float(batch.split()[0])
        for _ in batches:
            profiler.step()
            break
        assert profiler.step_info().startswith("reader_cost: ")
        read(batches)
    assert profiler.step_info() == "batch_cost: - s ips: - steps/s"


@pytest.mark.slow
def test_the_record_of_torch_profiler_is_in_the_views_of_a_window(torch: Any) -> None:
    kept = []
    watching = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with Profiler(loads("", environ={})) as profiler, watching:
        for step in range(3):
            with scope("grow"):
                kept.append(torch.empty(1_000_000 * (step + 1), dtype=torch.uint8))
            profiler.step()
    watching.export_chrome_trace("theirs.json")
    assert profiler.window is not None
    (memory,) = profiler.window.views(["memory"], torch_trace="theirs.json").values()
    grown = {place.name: place.increase_bytes for place in memory.places}  # type: ignore[attr-defined]
    assert grown["grow"] == 6_000_000
    assert "grow" in profiler.summary(views=["memory"], torch_trace="theirs.json", unit="us")
    assert "torch.profiler did not run" in profiler.summary(views=["memory"])
    Path("ours.json").write_text("[]")
    with pytest.raises(TraceError, match="the trace of torch"):
        profiler.window.views(["kernels"], torch_trace="ours.json")


def test_the_profilers_loader_counts_on_any_thread_and_without_recording() -> None:
    items: queue.Queue[int | None] = queue.Queue()

    def read() -> None:
        for item in profiler.loader(map(slowly, range(4))):
            items.put(item)
        items.put(None)

    def slowly(item: int) -> int:
        time.sleep(0.004)
        return item

    with Profiler(timer_only=True) as profiler:
        reading = threading.Thread(target=read)
        reading.start()
        while items.get() is not None:
            pass
        profiler.step()
        reading.join()
        found = profiler.step_info()
    assert float(found.removeprefix("reader_cost: ").partition(" s")[0]) >= 0.016


def test_a_profilers_loader_is_iterated_as_often_as_its_source_and_refuses_what_is_none() -> None:
    async def read() -> AsyncIterator[int]:
        yield 1

    with Profiler(timer_only=True) as profiler:
        batches = profiler.loader([1, 2, 3])
        assert (len(batches), [list(batches) for _ in range(2)]) == (3, [[1, 2, 3]] * 2)  # type: ignore[arg-type]
        once = profiler.loader(item for item in "ab")
        assert (next(once), list(once), list(once)) == ("a", ["b"], [])
        assert not hasattr(once, "__len__")
        assert bool(once)
        with pytest.raises(TargetError, match="loader needs an iterable, not 7 of type int"):
            profiler.loader(7)
        with pytest.raises(TargetError, match="it cannot take the asynchronous <async_generator"):
            profiler.loader(read())


def test_a_step_has_waited_no_longer_than_it_took_however_many_threads_have() -> None:
    def read() -> None:
        for _ in profiler.loader(iter(lambda: time.sleep(0.02), None)):
            pass  # nothing comes

    with Profiler(timer_only=True) as profiler:
        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        profiler.step()
        found = profiler._since.measure_loop_times()
    assert found.reader is not None
    assert found.batch is not None
    assert 0 < found.reader.mean <= found.batch.mean


def test_making_the_iterator_is_reader_cost() -> None:
    class Slow:
        def __iter__(self) -> Iterator[int]:
            time.sleep(0.02)
            return iter([1])

    with Profiler(timer_only=True) as profiler:
        for _ in profiler.loader(Slow()):
            profiler.step()
        found = profiler._since.measure_loop_times()
    assert found.reader is not None
    assert found.reader.mean >= 2e7


def test_waiting_for_an_asynchronous_loader_is_reader_cost() -> None:
    async def read() -> AsyncIterator[int]:
        for item in range(3):
            await asyncio.sleep(0.02)
            yield item

    async def train() -> None:
        async for _ in instrument.loader(read()):
            profiler.step()

    with Profiler() as profiler:
        asyncio.run(train())
        found = profiler._since.measure_loop_times()
    assert (found.steps, found.reader is not None) == (3, True)
    assert found.reader is not None
    assert found.reader.mean >= 1.9e7


@pytest.mark.slow
def test_an_asynchronous_wait_that_nobody_awaits_any_more_is_closed_in_silence(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def read() -> AsyncIterator[int]:
        await never
        yield 1

    loop = asyncio.new_event_loop()
    never = loop.create_future()
    with Profiler():
        waiting = instrument.loader(read()).__anext__()
        contextvars.copy_context().run(waiting.send, None)
        del waiting
        gc.collect()
    loop.close()
    assert capfd.readouterr().err == ""


def test_the_loop_of_the_documentation_writes_and_prints_its_windows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(instrument.__file__).parent / "docs" / "training.md").read_text()
    section = page.partition("## With changes to the loop\n")[2]
    program = section.partition("```python\n")[2].partition("```")[0]
    Path("profile.yaml").write_text("service: trainer")
    exec(program, {"batches": [[1, 2]] * 12, "train": profiled("train")(lambda batch: None)})
    printed = capsys.readouterr().out
    assert "Window 0, steps 2 to 5\n" in printed
    assert "Window 1, steps 8 to 11\n" in printed
    assert " images/s\n" in printed
    assert sorted(path.name for path in Path("traces").iterdir()) == [
        f"trainer-{os.getpid()}-{window}.json.gz" for window in range(2)
    ]


def test_switched_off_by_the_environment_the_steps_are_timed_and_no_profile_is_read() -> None:
    program = """
from instrument import Profiler
with Profiler("there is none.yaml", on_trace_ready=lambda window: 1 / 0) as profiler:
    for _ in range(12):
        profiler.step()
print(profiler.failures, profiler.window, profiler.summary(), profiler.export("window.json"))
"""
    environ = {**os.environ, "INSTRUMENT": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("0 None instrument is off (INSTRUMENT=off)\n\n-----")
    assert "2 steps timed, the first 10 skipped" in done.stdout
    assert done.stdout.endswith(" window.json\n")
    assert not Path("window.json").exists()


def test_switched_off_by_the_environment_the_verbs_of_a_session_do_nothing_and_say_so_once() -> None:
    program = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
import instrument
instrument.start("there is none.yaml")
print(instrument.dump("trace.json"), instrument.flush(), instrument.reload("none.yaml").refused)
instrument.enable(); instrument.disable(); instrument.stop()
"""
    environ = {**os.environ, "INSTRUMENT": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.splitlines()) == (
        "",
        [
            "INFO instrument is off (INSTRUMENT=off): nothing is recorded, and nothing is written",
            "trace.json None ('instrument is off (INSTRUMENT=off)',)",
        ],
    )
    assert not list(Path.cwd().iterdir())


def test_next_to_instrument_run_the_windows_are_the_loops_and_the_files_of_the_profile_stay_whole() -> None:
    Path("profile.yaml").write_text("service: shop\nexport: {chrome: {path: whole.json}}")
    Path("train.py").write_text(
        """
from instrument import Profiler, profiled
@profiled("work")
def work(): ...
with Profiler(schedule=(2, 4), on_trace_ready=lambda window: print(window, window.tally().calls)) as profiler:
    for _ in range(6):
        work()
        profiler.step()
work()
"""
    )
    command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "window 0, steps 2 to 3 4\n"), done.stderr
    assert chrome.load("whole.json")[1].calls == 7


def test_the_interpreters_exit_delivers_the_partial_window() -> None:
    program = """
from instrument import Profiler
profiler = Profiler(on_trace_ready=print)
profiler.start()
profiler.step()
profiler.step()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "window 0, steps 0 to 1, partial\n"), done.stderr


@pytest.mark.parametrize("where", ["between steps", "in a step", "in a handler that waits"])
@pytest.mark.slow
def test_a_sigterm_delivers_the_partial_window_before_the_session_ends(where: str) -> None:
    Path("profile.yaml").write_text("export: {chrome: {path: whole.json}}\n")
    Path("train.py").write_text(
        f"""
import os, signal, sys, time
from instrument import Profiler, export_chrome, scope
from instrument.sessions.window import State

where = {where!r}

def kill():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def told(window):
    print(window, flush=True)
    if "waits" in where and window.index == 0:
        kill()

def plan(step):
    return State.RECORD_AND_RETURN if step == 1 else State.RECORD

def slowly(window):
    time.sleep(1.5 * (window.index == 0))  # so that it still waits to be written when the signal comes

from instrument.sessions.handlers import InBackground
with Profiler(schedule=plan, on_trace_ready=[told, InBackground(slowly), export_chrome("traces")]) as profiler:
    for number in range(4):
        with scope("work"):
            pass
        if where == "in a step" and number == 3:
            with profiler._lock:  # as the main thread has it within `step`
                kill()
        profiler.step()
    kill()
"""
    )
    command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == -signal.SIGTERM, done.stderr
    told = {
        "between steps": ["window 0, steps 0 to 1", "window 1, steps 2 to 3, partial"],
        "in a step": ["window 0, steps 0 to 1"],
        "in a handler that waits": ["window 0, steps 0 to 1"],
    }
    assert done.stdout.splitlines() == told[where]
    trace, _ = chrome.load("whole.json")
    assert len(list(Path("traces").iterdir())) == len(told[where])
    open_one = {"windows of loops that were not written": 1} if where == "in a step" else {}
    assert trace.losses == open_one


def test_the_end_of_the_session_ends_those_who_look_at_it() -> None:
    edges_seen: list[tuple[int, int]] = []
    instrument.start(loads("{}"))
    profiler = Profiler(on_trace_ready=lambda window: edges_seen.append((window.first_step, window.last_step)))
    profiler.start()
    work()
    profiler.step()
    instrument.stop()
    assert edges_seen == [(0, 0)]
    profiler.step()  # the loop goes on
    profiler.stop()
    assert edges_seen == [(0, 0)]
    own = Profiler(on_trace_ready=lambda window: edges_seen.append((window.first_step, window.last_step)))
    own.start()
    own.step()
    work()
    instrument.stop()
    own.stop()
    assert edges_seen == [(0, 0), (0, 1)]


def test_a_forked_child_delivers_nothing_of_its_parents_window() -> None:
    with Profiler(on_trace_ready=export_chrome("traces")) as profiler:
        work()
        profiler.step()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                profiler.step()
                profiler.stop()
                code = 2 if Path("traces").exists() else 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        profiler.step()
    (path,) = Path("traces").iterdir()
    assert path.name.endswith(f"-{os.getpid()}-0.json.gz")
    assert profiler.window is not None
    assert edges(profiler.window) == (0, 0, 1, True, 1)


def test_a_folder_that_cannot_be_made_stops_nothing() -> None:
    Path("blocked").write_text("a file")
    with Profiler(on_trace_ready=export_chrome("blocked")) as profiler:
        profiler.step()
    assert profiler.failures == 1
    assert Path("blocked").read_text() == "a file"


def test_samples_that_are_no_number_are_reported() -> None:
    with Profiler(timer_only=True) as profiler:
        with pytest.raises(ProfileError, match="num_samples: found 'many'; allowed: a number from 0"):
            profiler.step(num_samples="many")  # type: ignore[arg-type]
        assert profiler.benchmark().skipped == 0
