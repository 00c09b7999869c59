"""The fake CUDA driver by itself, through the real bindings: the facts on which the tests of device time depend.

The comment of a test names the source of its fact. A source is the comment of a function in cuda.h, a section of the
CUDA documents, or a user's report.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from driver import FakeDriver, environment, value
from fake_torch_cuda import fake_torch
from hypothesis import given, settings
from hypothesis import strategies as st

cuda = pytest.importorskip("cuda.bindings.driver")
pytestmark = pytest.mark.fake_driver

BLOCKING, NON_BLOCKING = 0, 1
LEGACY, PER_THREAD = 0, 2
MS = 10**6
GLOBAL, THREAD_LOCAL, RELAXED = (cuda.CUstreamCaptureMode(mode) for mode in range(3))
UNSAFE, INVALIDATED, IMPLICIT, CAPTURED_EVENT = 900, 901, 906, 907
NOT_READY, INVALID_HANDLE, INVALID_CONTEXT, IS_DESTROYED = 600, 400, 201, 709


def code(result: tuple[Any, ...]) -> int:
    return int(result[0])


def start(device: int = 0) -> Any:
    value(cuda.cuInit(0))
    context = value(cuda.cuDevicePrimaryCtxRetain(device))
    value(cuda.cuCtxSetCurrent(context))
    return context


def stream(flags: int = NON_BLOCKING) -> Any:
    return value(cuda.cuStreamCreate(flags))


def event(flags: int = 0) -> Any:
    return value(cuda.cuEventCreate(flags))


def recorded(on: Any) -> Any:
    made = event()
    value(cuda.cuEventRecord(made, on))
    return made


def elapsed_ns(first: Any, second: Any) -> int:
    return round(value(cuda.cuEventElapsedTime(first, second)) * 1e6)


def status(on: Any) -> int:
    return int(value(cuda.cuStreamIsCapturing(on)))


def elsewhere(function: Callable[[], Any]) -> Any:
    """Return the result of a function on a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    assert found, "the thread died"
    return found[0]


# Initialisation and contexts


def test_nothing_works_before_the_driver_is_initialised(fake_driver: FakeDriver) -> None:
    # cuda.h: cuInit
    assert code(cuda.cuDeviceGetCount()) == 3
    assert code(cuda.cuEventCreate(0)) == 3
    assert code(cuda.cuCtxGetCurrent()) == 3
    assert value(cuda.cuDriverGetVersion()) == 13000


def test_a_machine_without_a_device_says_so_when_it_is_initialised(fake_driver: FakeDriver) -> None:
    # cuda.h: CUDA_ERROR_NO_DEVICE
    fake_driver.reset(devices=0)
    assert code(cuda.cuInit(0)) == 100


def test_each_thread_has_a_current_context_of_its_own(fake_driver: FakeDriver) -> None:
    # CUDA Programming Guide, driver API: contexts
    context = start()
    assert int(value(cuda.cuCtxGetCurrent())) == int(context)
    assert elsewhere(lambda: int(value(cuda.cuCtxGetCurrent()))) == 0
    value(cuda.cuCtxSetCurrent(None))
    assert int(value(cuda.cuCtxGetCurrent())) == 0


def test_a_thread_without_a_context_is_refused(fake_driver: FakeDriver) -> None:
    # cuda.h: CUDA_ERROR_INVALID_CONTEXT. The fake is strict in asking it of cuEventQuery, too.
    start()
    on, made = stream(), event()
    calls: dict[str, Callable[[], Any]] = {
        "create": lambda: cuda.cuEventCreate(0),
        "record": lambda: cuda.cuEventRecord(made, on),
        "record on stream 0": lambda: cuda.cuEventRecord(made, 0),
        "query": lambda: cuda.cuEventQuery(made),
        "elapsed": lambda: cuda.cuEventElapsedTime(made, made),
        "destroy": lambda: cuda.cuEventDestroy(made),
        "capturing": lambda: cuda.cuStreamIsCapturing(on),
        "stream": lambda: cuda.cuStreamCreate(0),
    }
    for name, call in calls.items():
        assert elsewhere(lambda call=call: code(call())) == INVALID_CONTEXT, name
    assert elsewhere(lambda: code(cuda.cuThreadExchangeStreamCaptureMode(RELAXED))) == 0


def test_contexts_are_a_stack(fake_driver: FakeDriver) -> None:
    # cuda.h: cuCtxPushCurrent, cuCtxPopCurrent
    first = start(0)
    second = value(cuda.cuDevicePrimaryCtxRetain(1))
    value(cuda.cuCtxPushCurrent(second))
    assert int(value(cuda.cuCtxGetDevice())) == 1
    assert int(value(cuda.cuCtxPopCurrent())) == int(second)
    assert int(value(cuda.cuCtxGetCurrent())) == int(first)


def test_a_primary_context_lives_while_somebody_retains_it(fake_driver: FakeDriver) -> None:
    # cuda.h: cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxGetState
    value(cuda.cuInit(0))
    assert value(cuda.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    first = value(cuda.cuDevicePrimaryCtxRetain(0))
    assert int(value(cuda.cuDevicePrimaryCtxRetain(0))) == int(first)
    assert fake_driver.counts().contexts_created == 1
    value(cuda.cuDevicePrimaryCtxRelease(0))
    assert value(cuda.cuDevicePrimaryCtxGetState(0)) == (0, 1)
    value(cuda.cuDevicePrimaryCtxRelease(0))
    assert value(cuda.cuDevicePrimaryCtxGetState(0)) == (0, 0)
    assert fake_driver.counts().live_contexts == 0


def test_streams_know_their_context_device_and_flags(fake_driver: FakeDriver) -> None:
    # cuda.h: cuStreamGetCtx, cuStreamGetDevice, cuStreamGetFlags, cuStreamGetId
    context = start(1)
    one, other = stream(), stream(BLOCKING)
    found = value(cuda.cuStreamGetCtx(one))
    assert int(found[0] if isinstance(found, tuple) else found) == int(context)
    assert int(value(cuda.cuStreamGetDevice(one))) == 1
    assert value(cuda.cuStreamGetFlags(one)) == NON_BLOCKING
    assert value(cuda.cuStreamGetFlags(other)) == BLOCKING
    assert len({int(value(cuda.cuStreamGetId(each))) for each in (one, other, LEGACY, PER_THREAD)}) == 4
    assert fake_driver.counts().live_streams == 2
    value(cuda.cuStreamDestroy(one))
    assert code(cuda.cuStreamGetFlags(one)) == INVALID_HANDLE
    assert fake_driver.counts().live_streams == 1


# Events


def test_an_event_is_done_when_its_stream_reaches_it(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventRecord, cuEventQuery
    start()
    on = stream()
    begin = recorded(on)
    done_ns = fake_driver.launch(on, 100_000)
    end = recorded(on)
    assert (code(cuda.cuEventQuery(begin)), code(cuda.cuEventQuery(end))) == (0, NOT_READY)
    assert code(cuda.cuEventElapsedTime(begin, end)) == NOT_READY
    assert fake_driver.done_ns(end) == done_ns == fake_driver.now_ns() + 100_000
    fake_driver.advance(99_999)
    assert code(cuda.cuEventQuery(end)) == NOT_READY
    fake_driver.advance(1)
    assert code(cuda.cuEventQuery(end)) == 0
    assert elapsed_ns(begin, end) == 100_000


def test_an_event_never_recorded_is_done_and_has_no_time(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventRecord ("represents an empty set of work"), cuEventElapsedTime
    start()
    never, once = event(), recorded(stream())
    assert code(cuda.cuEventQuery(never)) == 0
    assert code(cuda.cuEventElapsedTime(never, once)) == INVALID_HANDLE
    assert code(cuda.cuEventElapsedTime(once, never)) == INVALID_HANDLE


def test_an_event_without_timing_has_no_time(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventElapsedTime
    start()
    on, silent = stream(), event(2)
    value(cuda.cuEventRecord(silent, on))
    assert code(cuda.cuEventQuery(silent)) == 0
    assert code(cuda.cuEventElapsedTime(silent, recorded(on))) == INVALID_HANDLE


def test_recording_again_overwrites(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventRecord
    start()
    on = stream()
    begin, end = recorded(on), recorded(on)
    fake_driver.launch(on, 50_000)
    value(cuda.cuEventRecord(end, on))
    assert code(cuda.cuEventQuery(end)) == NOT_READY
    fake_driver.advance(50_000)
    assert elapsed_ns(begin, end) == 50_000


def test_the_time_back_to_an_earlier_event_is_negative(fake_driver: FakeDriver) -> None:
    start()
    on = stream()
    begin = recorded(on)
    fake_driver.advance(3_000)
    assert elapsed_ns(recorded(on), begin) == -3_000


def test_event_and_stream_are_of_one_context(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventRecord
    other = value(cuda.cuInit(0)) or value(cuda.cuDevicePrimaryCtxRetain(1))
    start(0)
    here = event()
    value(cuda.cuCtxSetCurrent(other))
    there = stream()
    assert code(cuda.cuEventRecord(here, there)) == INVALID_HANDLE
    assert code(cuda.cuEventRecord(here, LEGACY)) == INVALID_HANDLE  # of the current context
    assert code(cuda.cuEventRecord(recorded(there), there)) == 0


def test_there_is_no_time_between_two_devices(fake_driver: FakeDriver) -> None:
    # pytorch 3754
    start(0)
    here = recorded(stream())
    start(1)
    assert code(cuda.cuEventElapsedTime(here, recorded(stream()))) == INVALID_HANDLE


def test_elapsed_time_is_a_float32_of_milliseconds_in_steps_of_half_a_microsecond(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventElapsedTime. A float32 of 9 s is 1 us off by its spacing alone.
    start()
    on = stream()
    begin = recorded(on)
    fake_driver.launch(on, 1_300)
    short = recorded(on)
    fake_driver.launch(on, 9_000_000_000 - 1_300 + 500)
    far = recorded(on)
    fake_driver.advance(10_000_000_000)
    assert elapsed_ns(begin, short) == 1_000
    found = value(cuda.cuEventElapsedTime(begin, far))
    assert found == struct.unpack("f", struct.pack("f", 9000.0005))[0] != 9000.0005
    fake_driver.set_device(tick_ns=100)
    assert elapsed_ns(begin, short) == 1_300


def test_two_records_in_a_row_differ_by_what_a_record_costs_the_device(fake_driver: FakeDriver) -> None:
    # cudarc 335: order 1 us
    start()
    on = stream()
    fake_driver.set_device(event_ns=1_500)
    begin, end = recorded(on), recorded(on)
    fake_driver.advance(3_000)
    assert elapsed_ns(begin, end) == 1_500


def test_a_destroyed_event_is_no_handle_even_if_another_takes_its_place(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventDestroy
    start()
    gone = event()
    value(cuda.cuEventDestroy(gone))
    assert int(event()) != int(gone)
    assert code(cuda.cuEventQuery(gone)) == INVALID_HANDLE
    assert code(cuda.cuEventDestroy(gone)) == INVALID_HANDLE
    assert code(cuda.cuEventQuery(cuda.CUevent(12345))) == INVALID_HANDLE


def test_events_run_out(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventCreate
    start()
    fake_driver.limit_events(2)
    first, _ = event(), event()
    assert code(cuda.cuEventCreate(0)) == 2
    value(cuda.cuEventDestroy(first))
    assert code(cuda.cuEventCreate(0)) == 0
    assert fake_driver.counts()[:2] == (2, 3)


def test_an_external_record_is_for_capture_only(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventRecordWithFlags
    start()
    on = stream()
    assert code(cuda.cuEventRecordWithFlags(event(), on, 0)) == 0
    assert code(cuda.cuEventRecordWithFlags(event(), on, 1)) == 1


def test_any_number_of_pairs_leaves_nothing_behind(fake_driver: FakeDriver) -> None:
    start()
    on = stream()
    slots = set()
    for _ in range(3):
        pairs = [(event(), event()) for _ in range(5_000)]
        for pair in pairs:
            for each in pair:
                value(cuda.cuEventRecord(each, on))
                slots.add(int(each) & 0xFFFFFFF)  # the lower bits of a handle, see `take`
                value(cuda.cuEventDestroy(each))
    assert fake_driver.counts()[:2] == (0, 30_000)
    assert len(slots) == 10_000


# Streams


def test_streams_overtake_each_other(fake_driver: FakeDriver) -> None:
    # CUDA Programming Guide: asynchronous concurrent execution
    start()
    slow, fast = stream(), stream()
    fake_driver.launch(slow, 900_000)
    first = recorded(slow)
    fake_driver.launch(fast, 100_000)
    second = recorded(fast)
    fake_driver.advance(100_000)
    assert (code(cuda.cuEventQuery(first)), code(cuda.cuEventQuery(second))) == (NOT_READY, 0)
    fake_driver.advance(800_000)
    assert elapsed_ns(second, first) == 800_000


def test_a_pair_in_a_shared_device_spans_the_work_of_others(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventElapsedTime ("any number of other different stream operations could execute in between")
    start()
    fake_driver.set_device(shared=True)
    ours, theirs = stream(), stream()
    begin = recorded(ours)
    for _ in range(3):
        fake_driver.launch(theirs, 40_000)
        fake_driver.launch(ours, 10_000)
    end = recorded(ours)
    fake_driver.advance(200_000)
    assert elapsed_ns(begin, end) == 150_000


def test_a_pair_spans_the_gaps_between_launches(fake_driver: FakeDriver) -> None:
    start()
    on = stream()
    begin = recorded(on)
    for _ in range(2):
        fake_driver.launch(on, 10_000)
        fake_driver.advance(70_000)
    end = recorded(on)
    assert elapsed_ns(begin, end) == 140_000


def test_a_stream_waits_for_an_event_of_another(fake_driver: FakeDriver) -> None:
    # cuda.h: cuStreamWaitEvent; velox 18562: what begins before the wait counts the wait
    start()
    first, second = stream(), stream()
    fake_driver.launch(first, 500_000)
    before = recorded(second)
    value(cuda.cuStreamWaitEvent(second, recorded(first), 0))
    begin = recorded(second)
    fake_driver.launch(second, 100_000)
    end = recorded(second)
    fake_driver.advance(600_000)
    assert elapsed_ns(before, end) == 600_000
    assert elapsed_ns(begin, end) == 100_000


def test_a_stream_waits_for_an_event_of_another_device(fake_driver: FakeDriver) -> None:
    # cuda.h: cuStreamWaitEvent ("may be from a different context or device")
    start(0)
    first = stream()
    done_ns = fake_driver.launch(first, 500_000)
    there = recorded(first)
    start(1)
    second = stream()
    value(cuda.cuStreamWaitEvent(second, there, 0))
    assert fake_driver.done_ns(recorded(second)) == done_ns


def test_the_legacy_stream_joins_those_that_block(fake_driver: FakeDriver) -> None:
    # CUDA Programming Guide: default stream
    start()
    blocking, apart = stream(BLOCKING), stream(NON_BLOCKING)
    now = fake_driver.now_ns()
    fake_driver.launch(blocking, 100_000)
    fake_driver.launch(apart, 700_000)
    joined = recorded(LEGACY)
    assert fake_driver.done_ns(joined) == now + 100_000
    assert fake_driver.launch(stream(BLOCKING), 10_000) == now + 110_000  # behind the record
    assert fake_driver.launch(stream(NON_BLOCKING), 10_000) == now + 10_000


def test_each_thread_has_a_default_stream_of_its_own(fake_driver: FakeDriver) -> None:
    # cuda.h: CU_STREAM_PER_THREAD
    context = start()
    now = fake_driver.now_ns()
    assert fake_driver.launch(PER_THREAD, 100_000) == now + 100_000

    def there() -> int:
        value(cuda.cuCtxSetCurrent(context))
        return fake_driver.launch(PER_THREAD, 100_000)

    assert elsewhere(there) == now + 100_000
    assert fake_driver.launch(PER_THREAD, 100_000) == now + 200_000


# Clocks


def test_devices_have_clocks_of_their_own(fake_driver: FakeDriver) -> None:
    # torchcomms 2422: tens of ppm, each its own
    start()
    fake_driver.set_clock(0, offset_ns=5_000, drift_ppm=100)
    fake_driver.set_clock(1, offset_ns=-5_000, drift_ppm=-20)
    now = fake_driver.now_ns()
    fake_driver.advance(1_000_000_000)
    assert fake_driver.device_now_ns(0) - now == 1_000_105_000
    assert fake_driver.device_now_ns(1) - now == 999_975_000
    before = fake_driver.device_now_ns(0)
    fake_driver.set_clock(0, drift_ppm=0)
    assert fake_driver.device_now_ns(0) == before


def test_elapsed_time_is_counted_by_the_clock_of_the_device(fake_driver: FakeDriver) -> None:
    start()
    fake_driver.set_clock(drift_ppm=100)
    on = stream()
    begin = recorded(on)
    fake_driver.advance(1_000_000_000)
    assert elapsed_ns(begin, recorded(on)) == pytest.approx(1_000_100_000, abs=100)


@settings(max_examples=50)
@given(
    drift_ppm=st.integers(-200, 200),
    offset_ns=st.integers(-(10**12), 10**15),
    steps=st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**9)), min_size=1, max_size=5),
)
def test_an_event_is_done_at_the_reported_nanosecond(
    fake_driver: FakeDriver, drift_ppm: int, offset_ns: int, steps: list[tuple[int, int]]
) -> None:
    fake_driver.reset()
    start()
    fake_driver.set_clock(offset_ns=offset_ns, drift_ppm=drift_ppm)
    on = stream()
    for pause, work in steps:
        fake_driver.advance(pause)
        fake_driver.launch(on, work)
        made = recorded(on)
        left = fake_driver.done_ns(made) - fake_driver.now_ns()
        if left > 0:
            fake_driver.advance(left - 1)
            assert code(cuda.cuEventQuery(made)) == NOT_READY
            fake_driver.advance(1)
        assert code(cuda.cuEventQuery(made)) == 0


def test_calls_take_time(fake_driver: FakeDriver) -> None:
    start()
    on = stream()
    fake_driver.cost("cuEventRecord", 2_000)
    fake_driver.set_device(latency_ns=6_000)
    before = fake_driver.now_ns()
    made = recorded(on)
    assert fake_driver.now_ns() == before + 2_000
    assert fake_driver.done_ns(made) == before + 8_000


def test_to_synchronise_is_to_let_time_pass(fake_driver: FakeDriver) -> None:
    # cuda.h: cuEventSynchronize, cuStreamSynchronize, cuCtxSynchronize
    start()
    on = stream()
    before = fake_driver.now_ns()
    fake_driver.launch(on, 100_000)
    value(cuda.cuEventSynchronize(recorded(on)))
    assert fake_driver.now_ns() == before + 100_000
    fake_driver.launch(on, 100_000)
    value(cuda.cuStreamSynchronize(on))
    fake_driver.launch(on, 100_000)
    value(cuda.cuCtxSynchronize())
    assert fake_driver.now_ns() == before + 300_000
    assert fake_driver.synchronised() == 3


def test_real_time_passes_by_itself(fake_driver: FakeDriver) -> None:
    fake_driver.reset(virtual=False)
    start()
    on = stream()
    fake_driver.launch(on, 2_000_000)
    fake_driver.launch(on, 1_000_000_000_000)
    never = recorded(on)
    begin = recorded(other := stream())
    fake_driver.launch(other, 2_000_000)
    end = recorded(other)
    while code(cuda.cuEventQuery(end)) == NOT_READY:
        pass
    assert elapsed_ns(begin, end) >= 2_000_000
    assert code(cuda.cuEventQuery(never)) == NOT_READY
    fake_driver.launch(other, 1_000_000)
    last = recorded(other)
    value(cuda.cuEventSynchronize(last))
    assert code(cuda.cuEventQuery(last)) == 0


# Capture


def capture(on: Any, mode: Any = GLOBAL) -> None:
    value(cuda.cuStreamBeginCapture(on, mode))


def test_a_stream_that_captures_does_nothing_until_the_graph_is_launched(fake_driver: FakeDriver) -> None:
    # CUDA Programming Guide: stream capture
    start()
    on = stream()
    capture(on)
    assert status(on) == 1
    assert fake_driver.launch(on, 100_000) == 0
    fake_driver.launch(on, 200_000)
    graph = value(cuda.cuStreamEndCapture(on))
    assert status(on) == 0
    executable = value(cuda.cuGraphInstantiate(graph, 0))
    value(cuda.cuGraphDestroy(graph))
    for _ in range(2):  # a pair around a launch is a pair as any other
        begin = recorded(on)
        value(cuda.cuGraphLaunch(executable, on))
        end = recorded(on)
        fake_driver.advance(300_000)
        assert elapsed_ns(begin, end) == 300_000
    value(cuda.cuGraphExecDestroy(executable))


@pytest.mark.parametrize("ask", ["query", "elapsed", "synchronise"])
def test_to_ask_about_an_event_recorded_in_a_capture_is_illegal_and_kills_it(fake_driver: FakeDriver, ask: str) -> None:
    # cuda.h: CUDA_ERROR_CAPTURED_EVENT; CUDA Programming Guide: prohibited and unhandled operations
    start()
    on, plain = stream(), recorded(stream())
    value(cuda.cuThreadExchangeStreamCaptureMode(RELAXED))
    capture(on)
    made = recorded(on)
    asked = {
        "query": lambda: cuda.cuEventQuery(made),
        "elapsed": lambda: cuda.cuEventElapsedTime(plain, made),
        "synchronise": lambda: cuda.cuEventSynchronize(made),
    }[ask]
    assert code(asked()) == CAPTURED_EVENT
    assert status(on) == 2
    assert code(cuda.cuEventRecord(event(), on)) == INVALIDATED
    assert code(cuda.cuStreamEndCapture(on)) == INVALIDATED
    assert status(on) == 0
    assert code(asked()) == CAPTURED_EVENT  # until it is recorded anew
    value(cuda.cuEventRecord(made, on))
    assert code(asked()) == 0
    counts = fake_driver.counts()
    assert (counts.captured_records, counts.captures_killed) == (1, 1)


@pytest.mark.parametrize(
    ("asking", "capturing", "survives"),
    [
        (GLOBAL, GLOBAL, False),
        (THREAD_LOCAL, GLOBAL, True),
        (RELAXED, GLOBAL, True),
        (GLOBAL, THREAD_LOCAL, True),
        (GLOBAL, RELAXED, True),
    ],
)
def test_a_query_from_any_thread_kills_a_capture_unless_one_of_the_two_minds_its_own(
    fake_driver: FakeDriver, asking: Any, capturing: Any, survives: bool
) -> None:
    # cuda.h: cuThreadExchangeStreamCaptureMode; pytorch 104487, 148594
    context = start()
    on, plain = stream(), recorded(stream())
    capture(on, capturing)

    def ask() -> int:
        value(cuda.cuCtxSetCurrent(context))
        assert int(value(cuda.cuThreadExchangeStreamCaptureMode(asking))) == int(GLOBAL)
        return code(cuda.cuEventQuery(plain))

    assert elsewhere(ask) == (0 if survives else UNSAFE)
    assert status(on) == (1 if survives else 2)
    assert code(cuda.cuStreamEndCapture(on)) == (0 if survives else INVALIDATED)


@pytest.mark.parametrize(("mode", "survives"), [(GLOBAL, False), (THREAD_LOCAL, False), (RELAXED, True)])
def test_the_thread_that_captures_may_not_query_unless_relaxed(
    fake_driver: FakeDriver, mode: Any, survives: bool
) -> None:
    # cuda.h: cuThreadExchangeStreamCaptureMode
    start()
    on, plain = stream(), recorded(stream())
    capture(on, mode)
    assert code(cuda.cuEventQuery(plain)) == (0 if survives else UNSAFE)
    assert status(on) == (1 if survives else 2)


def test_the_legacy_stream_is_unusable_while_a_blocking_stream_captures(fake_driver: FakeDriver) -> None:
    # cuda.h: cuStreamIsCapturing
    start()
    apart, blocking = stream(NON_BLOCKING), stream(BLOCKING)
    capture(apart)
    assert status(LEGACY) == 0
    value(cuda.cuStreamEndCapture(apart))
    capture(blocking)
    assert code(cuda.cuStreamIsCapturing(LEGACY)) == IMPLICIT
    assert status(blocking) == 1  # to look does no harm
    assert code(cuda.cuEventRecord(event(), LEGACY)) == IMPLICIT
    assert status(blocking) == 2


@pytest.mark.parametrize("ask", [cuda.cuStreamGetId, cuda.cuStreamGetCtx, cuda.cuStreamGetDevice, cuda.cuStreamQuery])
def test_a_stream_that_captures_may_be_asked_for_nothing_else(
    fake_driver: FakeDriver, ask: Callable[[Any], Any]
) -> None:
    # cccl 11118; CUDA Programming Guide: prohibited and unhandled operations
    start()
    on = stream()
    capture(on, RELAXED)
    assert code(ask(on)) == UNSAFE
    assert status(on) == 2
    assert code(cuda.cuStreamEndCapture(on)) == INVALIDATED
    assert code(ask(on)) == 0


def test_the_legacy_stream_cannot_capture(fake_driver: FakeDriver) -> None:
    # cuda.h: cuStreamBeginCapture
    start()
    assert code(cuda.cuStreamBeginCapture(LEGACY, GLOBAL)) == UNSAFE


def test_an_external_record_fires_at_every_launch(fake_driver: FakeDriver) -> None:
    # cuda.h: CU_EVENT_RECORD_EXTERNAL
    start()
    on, first, second = stream(), event(), event()
    capture(on)
    value(cuda.cuEventRecordWithFlags(first, on, 1))
    fake_driver.launch(on, 30_000)
    value(cuda.cuEventRecordWithFlags(second, on, 1))
    executable = value(cuda.cuGraphInstantiate(value(cuda.cuStreamEndCapture(on)), 0))
    assert code(cuda.cuEventElapsedTime(first, second)) == INVALID_HANDLE
    value(cuda.cuGraphLaunch(executable, on))
    fake_driver.advance(30_000)
    assert elapsed_ns(first, second) == 30_000


def test_other_streams_join_a_capture_by_events_and_must_be_joined_again(fake_driver: FakeDriver) -> None:
    # cuda.h: CUDA_ERROR_STREAM_CAPTURE_UNJOINED; CUDA Programming Guide: cross-stream dependencies
    start()
    origin, side = stream(), stream()
    capture(origin)
    value(cuda.cuStreamWaitEvent(side, recorded(origin), 0))
    assert status(side) == 1
    fake_driver.launch(side, 1_000)
    assert code(cuda.cuStreamEndCapture(origin)) == 904
    capture(origin)
    value(cuda.cuStreamWaitEvent(side, recorded(origin), 0))
    fake_driver.launch(side, 1_000)
    value(cuda.cuStreamWaitEvent(origin, recorded(side), 0))
    value(cuda.cuStreamEndCapture(origin))
    assert status(side) == 0


def test_a_capture_cannot_wait_for_what_is_outside_of_it(fake_driver: FakeDriver) -> None:
    # cuda.h: CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    start()
    on, outside = stream(), recorded(stream())
    capture(on)
    assert code(cuda.cuStreamWaitEvent(on, outside, 0)) == 905
    assert status(on) == 2


def test_a_capture_ends_where_it_began(fake_driver: FakeDriver) -> None:
    # cuda.h: cuStreamEndCapture
    context = start()
    on = stream()
    assert code(cuda.cuStreamEndCapture(on)) == 401
    capture(on)

    def end() -> int:
        value(cuda.cuCtxSetCurrent(context))
        return code(cuda.cuStreamEndCapture(on))

    assert elsewhere(end) == 908
    assert end() == 0
    capture(on, RELAXED)
    assert elsewhere(end) == 0


# Trouble


def test_an_error_that_sticks_is_the_answer_to_everything(fake_driver: FakeDriver) -> None:
    # cuda.h: CUDA_ERROR_ILLEGAL_ADDRESS ("the process must be terminated and relaunched")
    start(1)
    there = event()
    start(0)
    on, made = stream(), event()
    fake_driver.break_device(700, after_ns=1_000)
    value(cuda.cuEventRecord(made, on))
    fake_driver.advance(1_000)
    for result in (
        cuda.cuEventRecord(made, on),
        cuda.cuEventQuery(made),
        cuda.cuEventCreate(0),
        cuda.cuEventQuery(made),
    ):
        assert code(result) == 700
    start(1)
    assert code(cuda.cuEventQuery(there)) == 0  # another device
    assert code(cuda.cuEventQuery(made)) == 700


@pytest.mark.parametrize("how", ["destroyed by this thread", "by another part", "reset", "released"])
def test_a_context_may_be_destroyed_under_us(fake_driver: FakeDriver, how: str) -> None:
    # cuda.h: cuCtxDestroy, CUDA_ERROR_CONTEXT_IS_DESTROYED
    value(cuda.cuInit(0))
    if how == "destroyed by this thread":
        context = value(cuda.cuDevicePrimaryCtxRetain(0))
        size = [None] * (len(cuda.cuCtxCreate.__doc__.splitlines()[0].split(",")) - 2)
        context = value(cuda.cuCtxCreate(*size, 0, 0))
    else:
        context = start()
    on, made = stream(), event()
    assert fake_driver.counts().live_events == 1
    {
        "destroyed by this thread": lambda: cuda.cuCtxDestroy(context),
        "by another part": lambda: fake_driver.destroy_context(context),
        "reset": lambda: cuda.cuDevicePrimaryCtxReset(0),
        "released": lambda: cuda.cuDevicePrimaryCtxRelease(0),
    }[how]()
    gone = INVALID_CONTEXT if how == "destroyed by this thread" else IS_DESTROYED
    assert code(cuda.cuEventRecord(made, on)) == gone
    assert code(cuda.cuEventQuery(made)) == gone
    assert code(cuda.cuCtxSetCurrent(context)) == IS_DESTROYED
    assert fake_driver.counts().live_events == 0
    start()
    assert code(cuda.cuEventQuery(made)) == INVALID_HANDLE
    assert int(value(cuda.cuCtxGetCurrent())) != int(context)


def test_a_function_fails_as_often_as_is_asked(fake_driver: FakeDriver) -> None:
    start()
    on, made = stream(), event()
    fake_driver.fail("cuEventRecord", 999, times=2, skip=1)
    assert [code(cuda.cuEventRecord(made, on)) for _ in range(5)] == [0, 999, 999, 0, 0]
    fake_driver.fail("cuEventQuery", 700, times=-1)
    assert [code(cuda.cuEventQuery(made)) for _ in range(3)] == [700] * 3
    with pytest.raises(KeyError, match="cuEventTypo"):
        fake_driver.fail("cuEventTypo", 1)


def test_a_forked_child_can_use_nothing(fake_driver: FakeDriver) -> None:
    # torch.cuda._is_in_bad_fork: "Cannot re-initialize CUDA in forked subprocess"
    start()
    on, made = stream(), event()
    child = os.fork()
    if child == 0:
        found = [cuda.cuInit(0), cuda.cuEventRecord(made, on), cuda.cuEventQuery(made), cuda.cuEventDestroy(made)]
        counted = fake_driver.calls("cuEventQuery") == 1
        os._exit(0 if [code(each) for each in found] == [3] * 4 and counted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fake_driver.counts().forked_calls == 4
    assert code(cuda.cuEventRecord(made, on)) == 0


def test_a_child_of_a_process_that_did_not_initialise_may(fake_driver: FakeDriver) -> None:
    child = os.fork()
    if child == 0:
        start()
        os._exit(code(cuda.cuEventRecord(event(), stream())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fake_driver.counts().forked_calls == 0


def test_a_call_may_block_its_thread_and_no_other(fake_driver: FakeDriver) -> None:
    # A record can wait for room in the launch queue
    fake_driver.reset(virtual=False)
    context = start()
    on, made = stream(), event()

    def block() -> None:
        value(cuda.cuCtxSetCurrent(context))
        value(cuda.cuEventRecord(made, on))

    thread = threading.Thread(target=block)
    with fake_driver.closed("cuEventRecord"):
        thread.start()
        while fake_driver.calls("cuEventRecord") == 0:
            pass
        for _ in range(10):
            assert code(cuda.cuEventQuery(made)) == 0
        assert thread.is_alive()
    thread.join()
    assert fake_driver.done_ns(made) <= fake_driver.now_ns()


def test_a_full_launch_queue_makes_its_callers_wait(fake_driver: FakeDriver) -> None:
    # CUDA Programming Guide: a launch waits while the queue has no room
    fake_driver.limit_queue(4)
    start()
    one, other = stream(), stream()
    begun_ns = fake_driver.now_ns()
    for _ in range(4):
        fake_driver.launch(one, 10 * MS)
    assert fake_driver.now_ns() == begun_ns
    recorded(one)
    assert fake_driver.now_ns() == begun_ns + 10 * MS
    recorded(other)
    assert fake_driver.now_ns() == begun_ns + 10 * MS


def test_a_stream_waits_for_its_host_functions_and_so_may_its_callers(fake_driver: FakeDriver) -> None:
    # cuda.h: cuLaunchHostFunc; that calls may wait for it is what LMCache (2823, 2952) met
    fake_driver.reset(virtual=False)
    start()
    one, other = stream(), stream()
    called, go_on = threading.Event(), threading.Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(_: Any) -> None:
        called.set()
        go_on.wait(60)

    fake_driver.launch(one, 5 * MS)
    assert fake_driver.library.cuLaunchHostFunc(ctypes.c_void_p(int(one)), function, None) == 0
    assert called.wait(60)
    recorded(other)
    answers: list[Any] = []

    def record() -> None:
        start()
        answers.append(recorded(one))

    thread = threading.Thread(target=record)
    thread.start()
    while fake_driver.calls("cuEventRecord") < 2:
        time.sleep(0.001)
    assert not answers
    go_on.set()
    thread.join()
    value(cuda.cuEventSynchronize(answers[0]))


def test_errors_have_the_names_of_the_real_ones(fake_driver: FakeDriver) -> None:
    for result in cuda.CUresult:
        found, name = cuda.cuGetErrorName(result)
        assert name == result.name.encode() if int(found) == 0 else int(result) not in (0, 3, 400, 600, 700, 901)


# Counts


def test_calls_are_counted_for_each_thread(fake_driver: FakeDriver) -> None:
    context = start()
    on = stream()

    def there() -> int:
        value(cuda.cuCtxSetCurrent(context))
        recorded(on)
        return threading.get_native_id()

    thread = elsewhere(there)
    recorded(on)
    assert fake_driver.calls("cuEventRecord") == 2
    assert fake_driver.called(thread) == {"cuCtxSetCurrent": 1, "cuEventCreate": 1, "cuEventRecord": 1}
    assert fake_driver.calls("cuInit", threading.get_native_id()) == 1
    assert fake_driver.synchronised() == 0
    fake_driver.forget_calls()
    assert fake_driver.called() == {}


def test_threads_may_call_at_once(fake_driver: FakeDriver) -> None:
    context = start()
    started = threading.Barrier(4)

    def work() -> None:
        value(cuda.cuCtxSetCurrent(context))
        on = stream()
        started.wait()
        for _ in range(500):
            begin = recorded(on)
            fake_driver.launch(on, 1_000)
            end = recorded(on)
            fake_driver.advance(10)
            code(cuda.cuEventQuery(end))
            value(cuda.cuEventDestroy(begin))
            value(cuda.cuEventDestroy(end))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake_driver.calls("cuEventRecord") == 4_000
    assert fake_driver.counts().live_events == 0


# How it is found


def test_ctypes_finds_the_same_driver_by_its_soname(fake_driver: FakeDriver) -> None:
    start()
    on = stream()
    library = ctypes.PyDLL("libcuda.so.1")
    record = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(("cuEventRecord", library))
    begin, end = event(), event()
    assert record(int(begin), int(on)) == 0
    fake_driver.launch(on, 5_000)
    assert record(int(end), int(on)) == 0
    fake_driver.advance(5_000)
    milliseconds = ctypes.c_float()
    elapsed = library.cuEventElapsedTime_v2
    assert elapsed(ctypes.byref(milliseconds), ctypes.c_void_p(int(begin)), ctypes.c_void_p(int(end))) == 0
    assert milliseconds.value == pytest.approx(0.005)
    assert fake_driver.calls("cuEventRecord") == 2


def cuda_bindings_version() -> str:
    import cuda.bindings

    return str(cuda.bindings.__version__)


def run(program: str, **settings: Any) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "from cuda.bindings import driver as cuda\n" + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={**os.environ, **settings.pop("environ", {}), **environment(**settings)},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"missing": ("cuEventElapsedTime_v2",)}, {"version": 12040}],
    ids=["missing function", "driver older than the bindings"],
)
def test_the_bindings_raise_where_the_driver_lacks_a_function(settings: Any) -> None:
    # cuda.h: cuGetProcAddress; cuda.bindings
    program = """
        print(int(cuda.cuInit(0)[0]), int(cuda.cuDriverGetVersion()[1]))
        try:
            cuda.cuEventElapsedTime(1, 2)
        except RuntimeError as error:  # the sentence differs between versions of the bindings
            print("cuEventElapsedTime_v2" in str(error) and str(error).endswith("not found"))
        else:
            print("found")
    """
    knows_both = cuda_bindings_version().startswith("12.")
    assert run(program, **settings) == f"0 {settings.get('version', 13000)}\n{'found' if knows_both else True}"


def test_stream_0_is_the_threads_own_where_the_environment_says_so() -> None:
    # cuda.bindings: CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM
    program = """
        cuda.cuInit(0)
        cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
        ids = {stream: int(cuda.cuStreamGetId(stream)[1]) for stream in (0, 1, 2)}
        print(ids[0] == ids[1], ids[0] == ids[2])
    """
    assert run(program) == "True False"
    assert run(program, environ={"CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}) == "False True"


def test_a_machine_without_devices_is_one_by_the_environment_alone() -> None:
    assert run("print(int(cuda.cuInit(0)[0]))", devices=0) == "100"


# The part of torch that device time rests on


def test_torch_initialises_nothing_before_it_is_used(fake_driver: FakeDriver) -> None:
    torch = fake_torch(fake_driver)
    assert not torch.cuda.is_initialized()
    assert (torch._C._cuda_getDevice(), torch._C._cuda_getCurrentRawStream(0)) == (0, 0)
    assert fake_driver.called() == {}
    torch.work(1_000)
    assert torch.cuda.is_initialized()
    assert int(value(cuda.cuCtxGetDevice())) == 0
    assert elsewhere(lambda: int(value(cuda.cuCtxGetCurrent()))) == 0


def test_torch_has_a_current_stream_for_each_thread_and_device(fake_driver: FakeDriver) -> None:
    torch = fake_torch(fake_driver)
    side, other = torch.cuda.Stream(), torch.cuda.Stream(1)
    with torch.cuda.stream(side):
        assert torch._C._cuda_getCurrentRawStream(0) == side.cuda_stream
        assert elsewhere(lambda: torch._C._cuda_getCurrentRawStream(0)) == 0
        with torch.cuda.stream(other):
            assert torch._C._cuda_getDevice() == 1
            assert torch._C._cuda_getCurrentRawStream(1) == other.cuda_stream
            assert int(value(cuda.cuCtxGetDevice())) == 1
        assert torch._C._cuda_getDevice() == 0
    assert torch._C._cuda_getCurrentRawStream(0) == 0
    assert value(cuda.cuStreamGetFlags(side.cuda_stream)) == NON_BLOCKING


def test_torch_captures_and_replays(fake_driver: FakeDriver) -> None:
    torch = fake_torch(fake_driver)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        torch.work(40_000)
    assert not torch.cuda.is_current_stream_capturing()
    begin = recorded(torch._C._cuda_getCurrentRawStream(0))
    graph.replay()
    end = recorded(0)
    torch.cuda.synchronize()
    assert elapsed_ns(begin, end) == 40_000


def test_torch_loses_its_capture_to_a_query(fake_driver: FakeDriver) -> None:
    torch = fake_torch(fake_driver)
    torch.work(1)
    plain = recorded(0)
    with pytest.raises(RuntimeError, match="cuStreamEndCapture returned 901"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert code(cuda.cuEventQuery(plain)) == UNSAFE
