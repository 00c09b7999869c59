"""Device time against the fake driver, in its virtual time: every interval and label to the nanosecond."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from driver import FakeDriver, value
from fake_torch_cuda import fake_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from readback import intervals_in, make_intervals

from instrument.device.clock_anchors import ANCHORS_KEPT
from instrument.device.cuda import FATAL, UNKNOWN, CudaDriver, NumbaStreams
from instrument.device.event_pairs import LAUNCH_NS, Pair
from instrument.device.resolver import ROW_NS, Resolver
from instrument.device.timer import NO_CONTEXT_YET, NO_STREAM_YET, Timer
from instrument.device.torch_events import Driver, TorchDriver
from instrument.recording.memory_layout import STREAM
from instrument.recording.spans import DeviceInterval, Site, Span, Work, covered_ns

cuda = pytest.importorskip("cuda.bindings.driver")
pytestmark = pytest.mark.fake_driver

MS, US = 10**6, 10**3
HOLDING, LETTING_GO, TORCH = "holding the lock", "letting go of it", "torch's events"
SITE = Site("work", device=True)


class Totals:
    """The recorder as far as the resolver needs it: what device time was counted, by span."""

    def __init__(self) -> None:
        self.counted: list[tuple[int, int, int, int]] = []

    def count_device(self, ring: Any, index: int, host_ns: int, device_ns: int, elapsed_ns: int) -> bool:
        self.counted.append((index, host_ns, device_ns, elapsed_ns))
        return True


class Bench:
    """A timer on the fake driver, looked after by the test instead of a thread."""

    def __init__(self, fake: FakeDriver, kind: str) -> None:
        self.fake = fake
        value(cuda.cuInit(0))
        self.contexts = [value(cuda.cuDevicePrimaryCtxRetain(device)) for device in (0, 1)]
        self.torch = fake_torch(fake, has_codes=False) if kind == TORCH else None
        self.use(1)
        self.use(0)
        self.totals = Totals()
        self.intervals = make_intervals(1 << 20)
        self.driver: Driver = TorchDriver(self.torch) if self.torch else CudaDriver(holds_gil=kind == HOLDING)
        self.slewed: Callable[[int], int] = int
        self.timer = Timer(self.driver, self.intervals, self.totals, self.now_ns, fake.now_ns)  # type: ignore[arg-type]
        self.place: tuple[int, int] | None = (0, 0)
        self.timer.sources.append(lambda: self.place)
        self.spans: list[Span] = []
        self.resolver = self.timer.resolver
        self.thread = ThreadPoolExecutor(1)

    def now_ns(self) -> int:
        """The host's clock as NTP slews it; the fake driver's is what nothing slews."""
        return self.slewed(self.fake.now_ns())

    def stream(self, device: int = 0, *, blocking: bool = False) -> int:
        self.use(device)
        made = int(value(cuda.cuStreamCreate(0 if blocking else 1)))
        self.use(0)
        return made

    def use(self, device: int) -> None:
        """Choose the device that the service's thread works on from now on."""
        if self.torch:
            self.torch.cuda.set_device(device)
        else:
            value(cuda.cuCtxSetCurrent(self.contexts[device]))

    def errors(self, code: int, device: int = 0) -> int:
        """Return the number of counted errors with the code on the device."""
        return self.resolver.counts[f"device {device}: {self.driver.error_name(code)}"]

    def begin(self, stream: int | None = None, device: int = 0) -> tuple[Any, Span]:
        if stream is not None:
            self.place = (device, stream)
        start_ns = self.fake.now_ns()
        span = Span(SITE, len(self.spans) + 1, 0, 0, 0, 0, start_ns, start_ns, 0, 0)
        self.spans.append(span)
        return self.timer.begin(SITE, None, span.span_id), span

    def end(self, pair: Any, span: Span) -> Span:
        span.end_ns = self.fake.now_ns()
        if pair is not None:
            pair.end(None, span.span_id, span.span_id, span.start_ns, span.end_ns)
        return span

    def span(self, work_ns: int, stream: int | None = None, host_ns: int = 0, device: int = 0) -> Span:
        """A span that launches one kernel and goes on for a while."""
        pair, span = self.begin(stream, device)
        assert self.place is not None
        self.fake.launch(self.place[1], work_ns)
        self.fake.advance(host_ns)
        return self.end(pair, span)

    def settle(self, ns: int = 0) -> None:
        """Let time pass, and the resolver look, on a thread that is not the service's."""
        self.fake.advance(ns)
        self.thread.submit(self.resolver.resolve_ended_pairs).result()

    def of(self, span: Span) -> tuple[DeviceInterval, ...]:
        span.device = intervals_in(self.intervals, {span.span_id}).get(span.span_id, ())
        return span.device

    def told(self, span: Span) -> tuple[str, int, int] | None:
        """Label, start after the span's, length of its one interval."""
        found = self.of(span)
        assert len(found) < 2
        return (
            (found[0].label, found[0].start_ns - span.start_ns, found[0].end_ns - found[0].start_ns) if found else None
        )


@pytest.fixture(params=[HOLDING, LETTING_GO, TORCH])
def bench(request: pytest.FixtureRequest, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(Resolver, "start", lambda self: None)
    monkeypatch.setattr("instrument.device.resolver.time.sleep", lambda _: None)
    made = Bench(fake_driver, request.param)
    yield made
    made.thread.shutdown()
    assert fake_driver.synchronised() == 0
    assert fake_driver.counts().captures_killed == 0
    assert fake_driver.counts().captured_records == 0


def test_a_kernel_is_timed_on_the_hosts_clock(bench: Bench) -> None:
    bench.fake.set_clock(0, offset_ns=123_456_789_000)
    span = bench.span(5 * MS)
    bench.settle(5 * MS)
    assert bench.told(span) == ("exclusive", 0, 5 * MS)
    assert bench.totals.counted == [(1, 0, 5 * MS, 5 * MS)]


def test_a_span_whose_kernel_still_runs_has_not_its_device_times(bench: Bench) -> None:
    first = bench.span(2 * ROW_NS)
    bench.fake.advance(ROW_NS + MS)
    later = bench.span(2 * ROW_NS)
    bench.settle(MS)
    assert bench.resolver.settled_ns() < first.end_ns
    bench.settle(ROW_NS - 2 * MS)
    assert first.end_ns <= bench.resolver.settled_ns() < later.end_ns
    bench.settle(2 * ROW_NS)
    assert bench.resolver.settled_ns() >= later.end_ns


# ---------------------------------------------------------------- what an interval is


def test_work_that_was_queued_before_comes_first(bench: Bench) -> None:
    bench.place = (0, bench.stream())
    bench.fake.launch(bench.place[1], 3 * MS)
    span = bench.span(5 * MS, host_ns=20 * US)
    bench.settle(10 * MS)
    assert bench.told(span) == ("exclusive", 3 * MS, 5 * MS)
    assert bench.totals.counted == [(1, 20 * US, 5 * MS, 20 * US + 8 * MS - 20 * US - (3 * MS - 20 * US))]


def test_elapsed_counts_time_once_that_host_and_device_share(bench: Bench) -> None:
    span = bench.span(5 * MS, host_ns=2 * MS)
    bench.settle(10 * MS)
    assert bench.told(span) == ("exclusive", 0, 5 * MS)
    assert bench.totals.counted == [(1, 2 * MS, 5 * MS, 5 * MS)]


def test_a_span_that_waits_for_its_kernel_is_as_long_as_it(bench: Bench) -> None:
    span = bench.span(5 * MS, host_ns=6 * MS)
    bench.settle(MS)
    assert bench.told(span) == ("launch-bound", 0, 6 * MS)
    assert bench.totals.counted == [(1, 6 * MS, 6 * MS, 6 * MS)]


def test_nested_spans_of_one_stream_do_not_overlap_each_other(bench: Bench) -> None:
    outer, outer_span = bench.begin(bench.stream())
    inner = [bench.span(2 * MS, host_ns=10 * US) for _ in range(3)]
    bench.end(outer, outer_span)
    bench.settle(10 * MS)
    assert bench.told(outer_span) == ("exclusive", 0, 6 * MS)
    assert [bench.told(span) for span in inner] == [
        ("exclusive", 0, 2 * MS),
        ("exclusive", 2 * MS - 10 * US, 2 * MS),
        ("exclusive", 4 * MS - 20 * US, 2 * MS),
    ]


def test_an_inner_span_is_reported_while_the_outer_one_is_open(bench: Bench) -> None:
    _, outer = bench.begin()
    inner = bench.span(2 * MS)
    bench.settle(3 * MS)
    assert bench.told(inner) == ("exclusive", 0, 2 * MS)
    assert bench.told(outer) is None


def test_streams_finish_in_any_order(bench: Bench) -> None:
    slow, quick = bench.stream(), bench.stream()
    first = bench.span(9 * MS, slow)
    second = bench.span(1 * MS, quick)
    bench.settle(2 * MS)
    assert bench.told(second) == ("overlapped", 0, 1 * MS)
    assert bench.told(first) is None
    bench.settle(8 * MS)
    assert bench.told(first) == ("overlapped", 0, 9 * MS)


def test_successive_work_on_two_streams_is_exclusive(bench: Bench) -> None:
    spans = []
    for stream in (bench.stream(), bench.stream(), bench.stream()):
        spans.append(bench.span(2 * MS, stream))
        bench.settle(3 * MS)
    assert [bench.told(span) for span in spans] == [("exclusive", 0, 2 * MS)] * 3


def test_an_open_span_of_another_stream_overlaps(bench: Bench) -> None:
    one, other = bench.stream(), bench.stream()
    pair, outer = bench.begin(one)
    bench.fake.launch(one, 50 * MS)
    inner = bench.span(2 * MS, other)
    bench.settle(3 * MS)
    assert bench.told(inner) == ("overlapped", 0, 2 * MS)
    bench.end(pair, outer)
    bench.settle(60 * MS)
    assert bench.told(outer) == ("overlapped", 0, 50 * MS)


def test_a_span_that_has_not_begun_on_the_device_overlaps_nothing(bench: Bench) -> None:
    one, other = bench.stream(), bench.stream()
    bench.fake.launch(one, 10 * MS)
    waiting = bench.span(4 * MS, one)
    done = bench.span(2 * MS, other)
    bench.settle(3 * MS)
    assert bench.told(done) == ("exclusive", 0, 2 * MS)
    bench.settle(20 * MS)
    assert bench.told(waiting) == ("exclusive", 10 * MS, 4 * MS)


def test_devices_do_not_overlap_each_other(bench: Bench) -> None:
    bench.fake.set_clock(1, offset_ns=77_000 * MS)
    first = bench.span(5 * MS, 0, device=0)
    bench.use(1)
    second = bench.span(4 * MS, 0, device=1)
    bench.settle(10 * MS)
    assert bench.told(first) == ("exclusive", 0, 5 * MS)
    assert bench.told(second) == ("exclusive", 0, 4 * MS)
    assert [bench.of(span)[0].device for span in (first, second)] == [0, 1]


def test_a_generator_has_a_stretch_for_each_step(bench: Bench) -> None:
    pair, span = bench.begin()
    for _ in range(3):
        bench.fake.launch(0, 2 * MS)
        pair.pause()
        bench.settle(5 * MS)
        pair.resume()
    bench.end(pair, span)
    bench.settle(MS)
    found = bench.of(span)
    assert [(part.start_ns - span.start_ns, part.end_ns - part.start_ns) for part in found] == [
        (0, 2 * MS),
        (5 * MS, 2 * MS),
        (10 * MS, 2 * MS),
        (15 * MS, 0),
    ]
    assert bench.totals.counted == [(1, 15 * MS, 6 * MS, 15 * MS)]


def test_a_generator_that_ends_between_its_steps_is_counted(bench: Bench) -> None:
    pair, span = bench.begin()
    bench.fake.launch(0, 2 * MS)
    pair.pause()
    bench.settle(5 * MS)
    bench.end(pair, span)
    bench.settle()
    assert bench.totals.counted == [(1, 5 * MS, 2 * MS, 5 * MS)]


def test_steps_on_two_streams_that_overlap_count_shared_time_once(bench: Bench) -> None:
    one, other = bench.stream(), bench.stream()
    pair, span = bench.begin(one)
    bench.fake.launch(one, 4 * MS)
    pair.pause()
    bench.place = (0, other)
    bench.fake.advance(MS)
    pair.resume()
    bench.fake.launch(other, 4 * MS)
    bench.end(pair, span)
    bench.settle(20 * MS)
    assert bench.totals.counted == [(1, MS, 5 * MS, 5 * MS)]


def test_a_call_that_was_no_span_after_all_costs_nothing(bench: Bench) -> None:
    pair, span = bench.begin()
    free = len(bench.timer._contexts[0].free)
    pair.cancel()
    bench.settle(MS)
    assert bench.told(span) is None
    assert len(bench.timer._contexts[0].free) > free
    assert not bench.totals.counted


# ---------------------------------------------------------------- labels


def test_a_stream_that_runs_dry_before_the_span_ends_is_launch_bound(bench: Bench) -> None:
    stream = bench.stream()
    pair, span = bench.begin(stream)
    for _ in range(10):
        bench.fake.launch(stream, 2 * US)
        bench.fake.advance(100 * US)
    bench.end(pair, span)
    bench.settle(MS)
    assert bench.told(span) == ("launch-bound", 0, MS)


def test_a_stretch_as_short_as_what_its_events_take_is_launch_bound(bench: Bench) -> None:
    bench.fake.set_device(0, event_ns=2 * US)
    bench.fake.cost("cuEventQuery", 500)
    stream = bench.stream()
    warm = bench.span(100 * US, stream)
    bench.settle(MS)
    bench.fake.launch(stream, MS)
    short, long = bench.span(10 * US, stream), bench.span(100 * US, stream)
    bench.settle(5 * MS)
    told = [bench.told(span) for span in (warm, short, long)]
    assert [label for label, _, _ in filter(None, told)] == ["exclusive", "launch-bound", "exclusive"]


def test_while_a_stream_is_captured_nothing_is_recorded_on_it(bench: Bench) -> None:
    stream = bench.stream()
    value(cuda.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    span = bench.span(5 * MS, stream)
    bench.settle(10 * MS)
    value(cuda.cuStreamEndCapture(stream))
    assert bench.told(span) == ("captured", 0, 0)
    assert not bench.totals.counted


def test_a_span_in_which_a_capture_begins_or_ends_is_not_timed(bench: Bench) -> None:
    stream = bench.stream()
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    pair, outer = bench.begin(stream)
    value(cuda.cuStreamBeginCapture(stream, mode))
    bench.end(pair, outer)
    pair, inner = bench.begin(stream)
    value(cuda.cuStreamEndCapture(stream))
    bench.end(pair, inner)
    bench.settle(10 * MS)
    assert bench.told(outer) == ("captured", 0, 0)
    assert bench.told(inner) == ("captured", 0, 0)
    after = bench.span(5 * MS, stream)
    bench.settle(10 * MS)
    assert bench.told(after) == ("exclusive", 0, 5 * MS)


def test_the_resolver_looks_on_while_a_graph_is_captured(bench: Bench) -> None:
    """A query from a thread in the mode `global` would end the capture: the driver counts it, the fixture looks."""
    work, captured = bench.stream(), bench.stream()
    span = bench.span(5 * MS, work)
    value(cuda.cuStreamBeginCapture(captured, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    bench.settle(10 * MS)
    value(cuda.cuStreamEndCapture(captured))
    assert bench.told(span) == ("exclusive", 0, 5 * MS)


def test_on_the_default_stream_a_capture_elsewhere_is_left_alone(bench: Bench) -> None:
    captured = bench.stream(blocking=True)
    value(cuda.cuStreamBeginCapture(captured, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    pair, span = bench.begin(0)
    bench.end(pair, span)
    bench.settle(10 * MS)
    value(cuda.cuStreamEndCapture(captured))
    assert bench.told(span) == ("captured", 0, 0)


def test_an_empty_pool_drops_the_time_and_not_the_span(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.device.resolver.POOL_LIMIT", 0)
    pairs = [bench.begin() for _ in range(68)]
    for pair, span in pairs:
        bench.end(pair, span)
    bench.settle(10 * MS)
    told = [bench.told(span) for _, span in pairs]
    assert [found[0] for found in told if found].count("dropped") == 4
    assert bench.resolver.counts["dropped"] == 4


def test_a_pool_grows_and_stays_within_its_limit(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.device.resolver.POOL_LIMIT", 1000)
    open_spans = []
    for _ in range(40):
        open_spans += [bench.begin() for _ in range(50)]
        bench.settle()
    assert bench.timer._contexts[0].made <= 1000 + 256
    assert sum(type(pair).__name__ == "Pair" for pair, _ in open_spans) == bench.timer._contexts[0].made
    for pair, span in open_spans:
        bench.end(pair, span)
    bench.settle(10 * MS)
    bench.settle()
    assert len(bench.timer._contexts[0].free) == bench.timer._contexts[0].made


def test_a_driver_without_room_for_events_drops_times(bench: Bench) -> None:
    bench.fake.limit_events(0)
    pair, span = bench.begin()
    bench.end(pair, span)
    bench.settle(MS)
    assert bench.told(span) == ("dropped", 0, 0)
    assert bench.errors(2) >= 1
    bench.fake.limit_events(1000)
    bench.settle()
    later = bench.span(5 * MS)
    bench.settle(10 * MS)
    assert bench.told(later) == ("exclusive", 0, 5 * MS)


# ---------------------------------------------------------------- the device's clock


def test_a_clock_that_runs_off_is_followed(bench: Bench) -> None:
    """100 ppm are 100 us a second; between two anchors nothing of it remains but what the driver rounds."""
    bench.fake.set_clock(0, offset_ns=5 * 10**12, drift_ppm=100)
    spans = []
    for _ in range(30):
        spans.append(bench.span(5 * MS))
        bench.settle(500 * MS)
    for number, span in enumerate(spans):
        (found,) = bench.of(span)
        error_ns = found.start_ns - span.start_ns
        assert abs(error_ns) <= found.uncertainty_ns, number
        assert found.label == "exclusive"
    late = [found.uncertainty_ns for span in spans[4:] for found in bench.of(span)]
    assert max(late) < 10 * US


@pytest.mark.parametrize("drift_ppm", [50, 200, 450, -600])
def test_a_place_is_within_its_uncertainty_however_the_clocks_drift(bench: Bench, drift_ppm: int) -> None:
    bench.fake.set_device(0, latency_ns=2000)
    bench.fake.cost("cuEventQuery", 1000)
    bench.fake.cost("cuEventRecord", 1000)
    bench.fake.set_clock(0, drift_ppm=drift_ppm)
    for number in range(20):
        bench.fake.advance(900 * MS if number % 2 else 300 * MS)
        pair, span = bench.begin(0)
        bench.fake.launch(0, 60 * MS)
        bench.end(pair, span)
        truth_ns = span.start_ns + 3000  # it is asked whether the stream is captured, recorded, and heard of
        bench.fake.advance(600 * MS)
        bench.settle(100 * MS)
        bench.settle(MS)
        (found,) = bench.of(span)
        assert abs(found.start_ns - truth_ns) <= found.uncertainty_ns, number
        assert found.label == "exclusive"


@pytest.mark.parametrize("slew_ppm", [500, -500])
def test_a_slewed_host_clock_is_part_of_the_uncertainty(bench: Bench, slew_ppm: int) -> None:
    """NTP slews the host's clock for some seconds, from one moment to the next, while spans go on."""
    zero_ns, begin_ns, end_ns = bench.fake.now_ns(), bench.fake.now_ns() + 3_300 * MS, bench.fake.now_ns() + 8_700 * MS

    def slewed(now_ns: int) -> int:
        return now_ns + max(min(now_ns, end_ns) - begin_ns, 0) * slew_ppm // 10**6

    bench.slewed = slewed
    found = []
    while bench.fake.now_ns() < zero_ns + 12_000 * MS:
        bench.fake.advance(90 * MS)
        truth_ns = bench.now_ns()
        span = bench.span(20 * MS)
        bench.settle(25 * MS)
        found.append((*bench.of(span), truth_ns))
    assert len(found) > 80
    for interval, truth_ns in found:
        assert abs(interval.start_ns - truth_ns) <= interval.uncertainty_ns
    steady = [interval.uncertainty_ns for interval, truth_ns in found if truth_ns < begin_ns]
    assert max(steady[20:]) < 15 * US  # nothing is charged for what did not happen


def test_a_device_too_busy_for_an_anchor_is_asked_at_a_walk(bench: Bench) -> None:
    """An event of the recorder waits behind the service's work if streams share a queue."""
    bench.fake.set_device(0, shared=True)
    stream = bench.stream()
    bench.driver.new_stream = lambda: (0, stream)  # type: ignore[method-assign]
    span = bench.span(4_000 * MS, stream)
    marks, queries = bench.fake.calls("cuEventRecord"), bench.fake.calls("cuEventQuery")
    for _ in range(399):
        bench.settle(10 * MS)
    assert bench.fake.calls("cuEventRecord") - marks < 25
    assert bench.fake.calls("cuEventQuery") - queries < 5_000
    bench.settle(20 * MS)
    (found,) = bench.of(span)
    assert (found.label, found.end_ns - found.start_ns) == ("exclusive", 4_000 * MS)
    assert abs(found.start_ns - span.start_ns) <= found.uncertainty_ns < 20 * MS


def test_the_first_span_after_a_pause_is_compared_with_a_fresh_anchor(bench: Bench) -> None:
    bench.fake.set_clock(0, drift_ppm=-80)
    first = bench.span(MS)
    bench.settle(2 * MS)
    bench.fake.advance(3600 * 10**9)
    second = bench.span(MS)
    bench.settle(2 * MS)
    assert bench.told(first) is not None
    (found,) = bench.of(second)
    assert abs(found.start_ns - second.start_ns) <= found.uncertainty_ns < 2 * US
    assert found.label == "exclusive"


def test_a_span_longer_than_the_anchors_reach_has_its_length(bench: Bench) -> None:
    bench.fake.set_clock(0, drift_ppm=50)
    span = bench.span(60 * 10**9)
    for _ in range(70):
        bench.settle(10**9)
    (found,) = bench.of(span)
    assert abs(found.end_ns - found.start_ns - 60 * 10**9) < 4 * MS
    assert found.label == "stale"


def test_a_span_that_nobody_could_look_at_for_long_is_stale(bench: Bench) -> None:
    bench.settle()
    pair, span = bench.begin()
    bench.fake.launch(0, 5 * MS)
    bench.end(pair, span)
    bench.fake.advance(30 * 10**9)
    bench.settle()
    (found,) = bench.of(span)
    assert (found.label, found.end_ns - found.start_ns) == ("stale", 5 * MS)


def test_an_interval_never_begins_before_the_host_had_asked_for_it(bench: Bench) -> None:
    bench.fake.set_device(0, latency_ns=0)
    bench.fake.cost("cuEventQuery", 7 * US)
    for _ in range(20):
        span = bench.span(MS)
        bench.settle(2 * MS)
        (found,) = bench.of(span)
        assert found.start_ns >= span.start_ns
        assert found.start_ns - span.start_ns <= found.uncertainty_ns


# ---------------------------------------------------------------- threads, contexts, streams


def test_a_thread_without_a_context_is_lent_one_for_the_moment(bench: Bench) -> None:
    """The context stays if torch records the event, as with any other call of torch on a thread."""
    bench.span(MS)
    found: list[Any] = []

    def work() -> None:
        pair, span = bench.begin()
        bench.end(pair, span)
        found.append((span, int(value(cuda.cuCtxGetCurrent()))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    bench.settle(5 * MS)
    span, context = found[0]
    assert context == (int(bench.contexts[0]) if bench.torch else 0)
    told = bench.told(span)
    assert told is not None
    assert told[0] in ("exclusive", "launch-bound")


def test_no_context_is_made_for_a_host_without_one(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resolver, "start", lambda self: None)
    timer = Timer(CudaDriver(), make_intervals(4096), Totals(), fake_driver.now_ns, fake_driver.now_ns)  # type: ignore[arg-type]
    timer.sources.append(lambda: (0, 0))
    pair = timer.begin(SITE, None, 1)
    assert pair is not None
    pair.end(None, 1, 1, 5, 6)
    timer.resolver.resolve_ended_pairs()
    assert timer.resolver.counts == {NO_CONTEXT_YET: 1, "dropped": 1}
    assert fake_driver.counts().contexts_created == 0
    assert fake_driver.calls("cuInit") == 0


@pytest.mark.parametrize("is_asked_on_stream_0", [True, False])
def test_a_thread_without_a_context_is_never_said_to_be_captured(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, is_asked_on_stream_0: bool
) -> None:
    monkeypatch.setattr(Resolver, "start", lambda self: None)
    value(cuda.cuInit(0))
    value(cuda.cuCtxSetCurrent(value(cuda.cuDevicePrimaryCtxRetain(0))))
    stream = 0 if is_asked_on_stream_0 else int(value(cuda.cuStreamCreate(1)))
    timer = Timer(CudaDriver(), make_intervals(4096), Totals(), fake_driver.now_ns, fake_driver.now_ns)  # type: ignore[arg-type]
    timer.sources.append(lambda: (0, stream))
    with ThreadPoolExecutor(1) as pool:
        pair = pool.submit(timer.begin, SITE, None, 1).result()
        assert isinstance(pair, Pair)  # the primary context is the host's, and is lent for the moment
        pool.submit(pair.end, None, 1, 1, 5, fake_driver.now_ns()).result()
        fake_driver.advance(MS)
        pool.submit(timer.resolver.resolve_ended_pairs).result()
    assert timer.resolver.counts["captured"] == timer.resolver.counts["dropped"] == 0


def test_the_context_of_another_device_is_not_taken_for_a_devices_own(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch names device 0 while the context of device 1 is still current: it goes back when it uses a device."""
    monkeypatch.setattr(Resolver, "start", lambda self: None)
    value(cuda.cuInit(0))
    value(cuda.cuCtxSetCurrent(value(cuda.cuDevicePrimaryCtxRetain(1))))
    intervals = make_intervals(1 << 16)
    timer = Timer(CudaDriver(), intervals, Totals(), fake_driver.now_ns, fake_driver.now_ns)  # type: ignore[arg-type]
    timer.sources.append(lambda: (0, 0))
    early = timer.begin(SITE, None, 1)
    assert early is not None
    early.end(None, 1, 1, 0, fake_driver.now_ns())
    first = value(cuda.cuDevicePrimaryCtxRetain(0))
    value(cuda.cuCtxSetCurrent(first))
    with ThreadPoolExecutor(1) as pool:
        pair = timer.begin(SITE, None, 2)
        assert isinstance(pair, Pair)
        assert pair.context.handle == int(first)
        fake_driver.launch(0, 5 * MS)
        pair.end(None, 2, 2, 0, fake_driver.now_ns())
        for _ in range(2):
            fake_driver.advance(10 * MS)
            pool.submit(timer.resolver.resolve_ended_pairs).result()
    found = intervals_in(intervals, {1, 2})
    assert [(one.label, one.end_ns - one.start_ns) for span in (1, 2) for one in found[span]] == [
        ("dropped", 0),
        ("exclusive", 5 * MS),
    ]
    assert timer.resolver.counts == {NO_CONTEXT_YET: 1, "dropped": 1, "exclusive": 1}


def test_a_named_stream_is_timed_on_its_own_device(bench: Bench) -> None:
    """The current device does not matter: the driver knows the device of a stream."""
    if bench.torch:
        pytest.skip("torch does not tell whose a handle is that it has not made")
    stream = bench.stream(device=1)
    span = Span(SITE, 1, 0, 0, 0, 0, bench.fake.now_ns(), 0, 0, 0)
    for _ in range(2):
        pair = bench.timer.begin(SITE, {STREAM: stream}, 1)
        bench.use(1)
        bench.fake.launch(stream, 5 * MS)
        bench.use(0)
        bench.end(pair, span)
        bench.settle(10 * MS)
    assert [(one.device, one.label, one.end_ns - one.start_ns) for one in bench.of(span)] == [
        (1, "exclusive", 5 * MS)
    ] * 2


def test_a_handle_that_is_used_again_is_another_stream(bench: Bench) -> None:
    if bench.torch:
        pytest.skip("torch does not tell the numbers of streams")
    bench.fake.reuse_streams()
    spans, handles = [], []
    for _ in range(2):
        handles.append(bench.stream())
        spans.append(bench.span(5 * MS, handles[-1]))
        bench.settle(10 * MS)
        value(cuda.cuStreamDestroy(handles[-1]))
    assert handles[0] == handles[1]
    first, second = (bench.of(span)[0].stream for span in spans)
    assert first != second


def test_both_names_of_the_default_stream_are_one_stream(bench: Bench) -> None:
    if bench.torch:
        pytest.skip("torch has one name for it")
    spans = [bench.span(5 * MS, stream) for stream in (0, 1)]
    bench.settle(20 * MS)
    assert [bench.told(span) for span in spans] == [("exclusive", 0, 5 * MS), ("exclusive", 5 * MS, 5 * MS)]
    assert {bench.of(span)[0].stream for span in spans} == {0}


def test_per_thread_default_streams_are_a_stream_for_each_thread(bench: Bench) -> None:
    if bench.torch:
        pytest.skip("torch uses none")
    bench.span(MS, 0)
    bench.settle(10 * MS)
    bench.place = (0, 2)

    def work(work_ns: int) -> tuple[Any, Span]:
        value(cuda.cuCtxSetCurrent(bench.contexts[0]))
        pair, span = bench.begin()
        bench.fake.launch(2, work_ns)
        bench.end(pair, span)
        return pair, span

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        _, long = one.submit(work, 100 * MS).result()
        bench.fake.advance(MS)
        _, short = other.submit(work, 2 * MS).result()
        bench.settle(10 * MS)
        assert bench.told(short) == ("overlapped", 0, 2 * MS)
        bench.settle(100 * MS)
        assert bench.told(long) == ("overlapped", 0, 100 * MS)
        assert bench.of(long)[0].stream != bench.of(short)[0].stream


def test_a_span_that_ends_on_another_threads_default_stream_is_dropped(bench: Bench) -> None:
    if bench.torch:
        pytest.skip("torch uses no per-thread streams")
    pair, span = bench.begin(2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bench.end, pair, span).result()
    bench.settle(MS)
    assert bench.told(span) == ("dropped", 0, 0)
    assert bench.resolver.counts["spans that left the thread of their per-thread stream"] == 1


def test_a_record_that_waits_stops_no_other_thread(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is full until a host function has run, which is written in Python: who kept the lock would hang."""
    monkeypatch.setattr(Resolver, "start", lambda self: None)
    fake_driver.reset(virtual=False)
    value(cuda.cuInit(0))
    context = value(cuda.cuDevicePrimaryCtxRetain(0))
    value(cuda.cuCtxSetCurrent(context))
    timer = Timer(CudaDriver(), make_intervals(4096), Totals(), fake_driver.now_ns, fake_driver.now_ns)  # type: ignore[arg-type]
    timer.sources.append(lambda: (0, 0))
    pair = timer.begin(SITE, None, 1)
    assert pair is not None

    def begin_and_end() -> None:
        value(cuda.cuCtxSetCurrent(context))
        second = timer.begin(SITE, None, 2)
        assert second is not None
        second.end(None, 2, 2, 5, 6)

    with ThreadPoolExecutor(1) as pool:
        with fake_driver.closed("cuEventRecord"):
            before = fake_driver.calls("cuEventRecord")
            waiting = pool.submit(begin_and_end)
            while fake_driver.calls("cuEventRecord") == before:
                time.sleep(0.001)
            assert not waiting.done()  # and here the host function has the lock of the interpreter
        waiting.result()
    pair.end(None, 1, 1, 5, 6)


def test_a_thread_that_has_not_used_numba_puts_no_barrier_into_the_default_stream(bench: Bench) -> None:
    """A record there would wait for every stream that blocks, and keep them waiting."""
    if bench.torch:
        pytest.skip("numba's calls go through the bindings")
    numba = NumbaStreams(bench.driver)
    bench.timer.sources[:] = [numba.find_last_stream]
    busy, own = bench.stream(blocking=True), bench.stream(blocking=True)
    bench.fake.launch(busy, 100 * MS)
    bench.fake.advance(MS)
    begun_ns = bench.fake.now_ns()
    pair, span = bench.begin()
    assert bench.fake.launch(own, 2 * MS) - begun_ns == 2 * MS
    bench.end(pair, span)
    bench.settle(MS)
    assert bench.told(span) == ("dropped", 0, 0)
    assert bench.resolver.counts[NO_STREAM_YET] == 1


@pytest.mark.parametrize(
    ("symbol", "ask"),
    [
        ("cuEventCreate", lambda driver: driver.new_event()[0]),
        ("cuEventQuery", lambda driver: driver.query_event(driver.new_event()[1])),
        ("cuStreamIsCapturing", lambda driver: driver.check_capture(0)),
        ("cuCtxPushCurrent", lambda driver: driver.push_context(driver.find_context())),
    ],
)
def test_a_code_that_the_bindings_do_not_know_is_an_error_like_any_other(
    fake_driver: FakeDriver, symbol: str, ask: Callable[[CudaDriver], int]
) -> None:
    value(cuda.cuInit(0))
    value(cuda.cuCtxSetCurrent(value(cuda.cuDevicePrimaryCtxRetain(0))))
    driver = CudaDriver()
    fake_driver.fail(symbol, 1234)
    assert ask(driver) == 1234
    assert driver.error_name(1234) == "error 1234"


def test_an_error_of_the_bindings_without_a_code_ends_device_times_as_an_unknown_error_does(
    fake_driver: FakeDriver,
) -> None:
    def fail() -> tuple[int]:
        raise ValueError("not a valid CUresult")

    assert CudaDriver()._call_driver(fail) == (UNKNOWN, None)
    assert UNKNOWN in FATAL


def test_a_stream_of_another_context_drops_the_time(bench: Bench) -> None:
    foreign = bench.stream(device=1)
    pair, span = bench.begin(foreign, device=0)
    bench.end(pair, span)
    bench.settle(MS)
    assert bench.told(span) == ("dropped", 0, 0)
    assert bench.errors(400) == 1
    assert bench.span(5 * MS, 0)
    bench.settle(10 * MS)
    assert bench.told(bench.spans[-1]) == ("exclusive", 0, 5 * MS)


def test_a_stream_that_is_destroyed_under_a_span_drops_the_time(bench: Bench) -> None:
    stream = bench.stream()
    pair, span = bench.begin(stream)
    value(cuda.cuStreamDestroy(stream))
    bench.end(pair, span)
    bench.settle(MS)
    told = bench.told(span)
    assert told is not None
    assert told[0] == "dropped"


def test_lanes_bear_the_drivers_numbers_of_streams(bench: Bench) -> None:
    streams = [bench.stream() for _ in range(3)]
    spans = [bench.span(MS, stream) for stream in streams]
    bench.settle(5 * MS)
    numbers = [int(value(cuda.cuStreamGetId(stream))) for stream in streams]
    assert [bench.of(span)[0].stream for span in spans] == (streams if bench.torch else numbers)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("code", [700, 719, 999, 4])
def test_a_device_that_fails_for_good_is_given_up(bench: Bench, code: int) -> None:
    before = bench.span(5 * MS)
    bench.settle(10 * MS)
    during, span = bench.begin()
    bench.fake.break_device(code)
    bench.end(during, span)
    bench.settle(10 * MS)
    assert bench.told(before) == ("exclusive", 0, 5 * MS)
    assert bench.timer.begin(SITE, None, 99) is None
    calls = bench.fake.called()
    bench.timer.begin(SITE, None, 99)
    bench.settle(MS)
    assert bench.fake.called() == calls, "the driver is left alone"
    (fault,) = bench.resolver.faults.values()
    assert fault == f"device 0 is no longer timed: the driver reports {bench.driver.error_name(code)}"


def test_the_other_device_goes_on(bench: Bench) -> None:
    bench.span(MS)
    bench.settle(2 * MS)
    bench.fake.break_device(700, device=0)
    bench.settle()
    bench.use(1)
    span = bench.span(5 * MS, 0, device=1)
    bench.settle(10 * MS)
    assert bench.told(span) == ("exclusive", 0, 5 * MS)


def test_a_context_that_is_destroyed_under_us_is_given_up(bench: Bench) -> None:
    pair, span = bench.begin()
    bench.fake.destroy_context(bench.contexts[0])
    bench.end(pair, span)
    bench.settle(MS)
    assert not bench.timer._contexts[0].alive
    assert list(bench.resolver.faults) == [0]


@pytest.mark.parametrize(
    "symbol", ["cuEventRecord", "cuStreamIsCapturing", "cuEventQuery", "cuEventElapsedTime", "cuCtxSetCurrent"]
)
def test_an_error_that_passes_costs_one_time_at_most(bench: Bench, symbol: str) -> None:
    bench.span(MS)
    bench.settle(5 * MS)
    bench.fake.fail(symbol, 1)
    failed = bench.span(MS)
    bench.settle(5 * MS)
    bench.settle(5 * MS)
    after = bench.span(MS)
    bench.settle(5 * MS)
    told = bench.told(failed)
    assert told is not None
    assert told[0] in ("dropped", "exclusive")
    assert bench.told(after) == ("exclusive", 0, MS)
    assert bench.errors(1) == (symbol != "cuCtxSetCurrent")  # a thread that has its device is not given it again


def test_a_thread_that_was_not_given_its_device_is_given_it_at_the_next_look(bench: Bench) -> None:
    span = bench.span(MS)
    bench.fake.fail("cuCtxSetCurrent", 1)
    bench.settle(5 * MS)
    bench.settle(5 * MS)
    (found,) = bench.of(span)
    assert (found.label in ("exclusive", "stale"), found.end_ns - found.start_ns) == (True, MS)


def test_stopping_takes_in_what_has_happened_and_gives_everything_back(bench: Bench) -> None:
    events = bench.fake.counts().live_events
    streams = bench.fake.counts().live_streams
    span = bench.span(5 * MS)
    bench.settle()
    bench.fake.advance(10 * MS)
    bench.resolver.stopping.set()
    bench.resolver._resolve_until_stopped()
    assert bench.told(span) == ("exclusive", 0, 5 * MS)
    assert bench.fake.counts().live_events == events
    assert bench.fake.counts().live_streams == streams + bool(bench.torch)  # that has a pool of them


def test_intervals_keep_the_newest_in_the_memory_that_they_have() -> None:
    ring = make_intervals(64 * 56)
    for number in range(1, 1001):
        ring.add_all([(number, 0, 7, number, number + 1, "exclusive", 3)])
    spans = [Span(SITE, number, 0, 0, 0, 0, 0, 0, 0, 0) for number in range(1, 1001)]
    found = intervals_in(ring, {span.span_id for span in spans})
    assert sorted(found) == list(range(937, 1001))
    assert found[1000] == (DeviceInterval(0, 7, 1000, 1001, "exclusive", 3),)
    assert ring.overwritten_count == 936


# ---------------------------------------------------------------- any timeline


@st.composite
def timelines(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Draw the steps of a host: open a span on one of three streams, launch work, close the newest span, wait."""
    steps = []
    for _ in range(draw(st.integers(1, 40))):
        what = draw(st.sampled_from(["open", "open", "launch", "launch", "close", "wait", "look"]))
        steps.append((what, draw(st.integers(0, 2)), draw(st.integers(1, 400)) * 5 * US))
    return steps


@pytest.mark.parametrize("kind", [HOLDING, LETTING_GO, TORCH])
@given(steps=timelines())
@settings(max_examples=2 * settings.default.max_examples)
def test_any_timeline_equals_a_sweep(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, kind: str, steps: list[tuple[str, int, int]]
) -> None:
    """Each stream is a queue: where its events lie is known beforehand, and which stretches share time by a sweep."""
    monkeypatch.setattr(Resolver, "start", lambda self: None)
    fake_driver.reset()
    bench = Bench(fake_driver, kind)
    streams = [bench.stream() for _ in range(3)]
    ready_ns = [0, 0, 0]
    opened: list[tuple[Any, Span, int, int]] = []
    true: dict[int, tuple[int, int, int, int]] = {}
    for what, lane, ns in steps:
        now_ns = fake_driver.now_ns()
        if what == "open":
            pair, span = bench.begin(streams[lane])
            opened.append((pair, span, lane, max(ready_ns[lane], now_ns)))
        elif what == "launch":
            fake_driver.launch(streams[lane], ns)
            ready_ns[lane] = max(ready_ns[lane], now_ns) + ns
        elif what == "close" and opened:
            pair, span, lane, start_ns = opened.pop()
            bench.end(pair, span)
            true[span.span_id] = (lane, start_ns, max(ready_ns[lane], now_ns), now_ns)
        elif what == "wait":
            fake_driver.advance(ns)
        else:
            bench.settle()
    while opened:
        pair, span, lane, start_ns = opened.pop()
        bench.end(pair, span)
        true[span.span_id] = (lane, start_ns, max(ready_ns[lane], fake_driver.now_ns()), fake_driver.now_ns())
    bench.settle()
    bench.settle(100 * MS)
    bench.thread.shutdown()
    for span in bench.spans:
        lane, start_ns, end_ns, closed_ns = true[span.span_id]
        (found,) = bench.of(span)
        # What the driver tells is a 32-bit float in ms.
        assert round(found.start_ns, -2) == start_ns
        # Of those that were closed at one reading of the host's clock nobody can tell which was first.
        ends = [end for other, _, end, closed in true.values() if (other, closed) == (lane, closed_ns)]
        assert round(found.end_ns, -2) in ends
        end_ns = int(round(found.end_ns, -2))
        shares = (
            any(other != lane and begin < end_ns and end > start_ns for other, begin, end, _ in true.values())
            and start_ns < end_ns
        )
        bound = found.end_ns - closed_ns < found.uncertainty_ns + LAUNCH_NS
        assert found.label == ("overlapped" if shares else "launch-bound" if bound else "exclusive")
    device_ns = {index: device for index, _, device, _ in bench.totals.counted}
    for span_id, (_, start_ns, end_ns, closed_ns) in true.items():
        assert round(device_ns.get(span_id, 0), -2) == end_ns - start_ns
        if end_ns > start_ns:
            (elapsed_ns,) = [elapsed for index, _, _, elapsed in bench.totals.counted if index == span_id]
            span = bench.spans[span_id - 1]
            assert round(elapsed_ns, -2) == covered_ns([(span.start_ns, closed_ns), (start_ns, end_ns)])
    assert fake_driver.synchronised() == 0


@pytest.mark.slow
def test_a_hundred_thousand_spans_leave_nothing_behind(bench: Bench) -> None:
    """Ten million of them: `python tests/bench/device.py --spans 10000000`."""
    streams = [bench.stream() for _ in range(4)]

    def some(count: int) -> None:
        for number in range(count):
            pair = bench.timer.begin(SITE, {STREAM: streams[number % 4]}, number + 1)
            bench.fake.launch(streams[number % 4], 10 * US)
            pair.end(None, 1, number + 1, 0, 1)
            if number % 50 == 49:
                bench.settle(MS)
            if number % 1000 == 999:
                bench.totals.counted.clear()

    some(2_000)
    made, events = bench.timer._contexts[0].made, bench.fake.counts().live_events
    tracemalloc.start()
    some(2_000)
    before, _ = tracemalloc.get_traced_memory()
    some(10_000 if bench.torch else 100_000)  # the fake of torch is slow
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000
    assert bench.timer._contexts[0].made == made
    assert bench.fake.counts().live_events <= events + 2 * ANCHORS_KEPT
    assert bench.resolver.counts["dropped"] == 0


# ---------------------------------------------------------------- what must not happen


def test_a_clock_that_jumped_ahead_moves_no_later_span(bench: Bench) -> None:
    """The clock of a suspended machine's device may have gone on."""
    bench.span(MS)
    bench.settle(2 * MS)
    bench.fake.set_clock(0, offset_ns=3600 * 10**9)
    across = bench.span(MS)
    bench.settle(2 * MS)
    (found,) = bench.of(across)
    assert found.start_ns <= bench.fake.now_ns()
    bench.settle(2 * 10**9)
    after = bench.span(MS)
    bench.settle(2 * MS)
    assert bench.told(after) == ("exclusive", 0, MS)


def test_streams_that_come_and_go_leave_nothing_behind(bench: Bench) -> None:
    outer, outermost = bench.begin(0)
    for _ in range(600):
        stream = bench.stream()
        bench.span(MS, stream)
        bench.settle(2 * MS)
        value(cuda.cuStreamDestroy(stream))
    context = bench.resolver.contexts[0]
    assert len(context.under_way) == 1
    assert len(context.recent) <= 300
    assert len(context.floors) <= 300
    bench.end(outer, outermost)
    bench.settle(2 * MS)
    assert len(context.under_way) == 0
    assert len(context.recent) == len(context.floors) <= 1


def test_a_fault_while_a_span_is_taken_spoils_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ring: Any, index: int, *_: int) -> bool:
        if index == 2:
            raise MemoryError
        return True

    for _ in range(3):
        bench.span(MS)
    with monkeypatch.context() as broken:
        broken.setattr(bench.totals, "count_device", fail)
        with pytest.raises(MemoryError):
            bench.settle(5 * MS)
    for _ in range(3):
        bench.settle(2 * MS)
    context = bench.resolver.contexts[0]
    assert len({id(pair) for pair in context.free}) == len(context.free) == context.made
    assert not any(context.under_way.values())
    after = bench.span(MS)
    bench.settle(2 * MS)
    assert bench.told(after) == ("exclusive", 0, MS)


class Interruption(BaseException):
    """An exception that a signal handler of the host raises."""


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_an_interrupted_begin_leaves_no_pair_under_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    bench.span(MS)
    bench.settle(2 * MS)
    name, owner = {
        1: ("_now", bench.timer),
        2: ("_mark", bench.timer),
        3: ("note_stream_number", bench.resolver.contexts[0]),
    }[calls]
    stream = bench.stream()

    def interrupt(*_: Any) -> int:
        raise Interruption

    with monkeypatch.context() as signalled:
        signalled.setattr(owner, name, interrupt)
        with pytest.raises(Interruption):
            bench.begin(stream)
    bench.settle(MS)
    bench.settle(MS)
    context = bench.resolver.contexts[0]
    assert not any(context.under_way.values())
    assert len(context.free) == context.made


@pytest.mark.parametrize("name", ["_now", "_mark"])
def test_an_interrupted_end_leaves_no_pair_under_way(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bench.span(MS)
    bench.settle(2 * MS)
    pair, span = bench.begin()

    def interrupt(*_: Any) -> int:
        raise Interruption

    with monkeypatch.context() as signalled:
        signalled.setattr(bench.timer, name, interrupt)
        with pytest.raises(Interruption):
            bench.end(pair, span)
    bench.settle(MS)
    bench.settle(MS)
    context = bench.resolver.contexts[0]
    assert not any(context.under_way.values())
    assert len(context.free) == context.made
    assert bench.told(span) == ("dropped", 0, 0)


def test_after_the_stop_no_event_is_recorded(bench: Bench) -> None:
    bench.span(MS)
    bench.settle(2 * MS)
    bench.resolver.stopping.set()
    bench.resolver._resolve_until_stopped()
    bench.fake.forget_calls()
    assert bench.timer.begin(SITE, None, 99) is None
    assert bench.fake.calls("cuEventRecord") == 0


def test_a_long_queue_on_another_stream_is_asked_about_once(bench: Bench) -> None:
    """Only the first of it can have begun: the rest of the queue costs nothing at each stretch that is taken in."""
    queue, stream = bench.stream(), bench.stream()
    bench.settle()
    for _ in range(200):
        bench.span(50 * MS, queue)
    bench.settle(60 * MS)
    for _ in range(20):
        bench.span(MS, stream)
    bench.settle(30 * MS)
    bench.fake.forget_calls()
    bench.settle(10 * MS)
    spans = [bench.span(MS, stream) for _ in range(10)]
    bench.settle(15 * MS)
    assert [label for label, _, _ in filter(None, map(bench.told, spans))] == ["overlapped"] * 10
    assert bench.fake.calls("cuEventQuery") < 200


# ---------------------------------------------------------------- whose work, and where


def intervals_of(bench: Bench, span: Span) -> list[tuple[str, int, int]]:
    """Label, device and length of each interval of a span."""
    return [(one.label, one.device, one.end_ns - one.start_ns) for one in bench.of(span)]


@pytest.mark.parametrize("other_stream", [0, 7], ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("other_comes_first", [True, False])
def test_both_of_two_active_frameworks_are_asked(bench: Bench, other_comes_first: bool, other_stream: int) -> None:
    """torch works on a side stream, another framework has one that is current and does nothing on it."""
    side, idle = bench.stream(), bench.stream() if other_stream else 0
    sources = [lambda: (0, idle), lambda: (0, side)]
    bench.timer.sources[:] = sources if other_comes_first else reversed(sources)
    pair, span = bench.begin()
    bench.fake.launch(side, 50 * MS)
    bench.fake.advance(MS)
    bench.end(pair, span)
    bench.settle(100 * MS)
    bench.settle(MS)
    assert intervals_of(bench, span) == [("exclusive", 0, 50 * MS)]
    assert [device_ns for _, _, device_ns, _ in bench.totals.counted] == [50 * MS]


def test_work_on_two_streams_of_one_span_is_reported_both(bench: Bench) -> None:
    one, other = bench.stream(), bench.stream()
    bench.timer.sources[:] = [lambda: (0, one), lambda: (0, other)]
    pair, span = bench.begin()
    bench.fake.launch(one, 20 * MS)
    bench.fake.launch(other, 30 * MS)
    bench.end(pair, span)
    bench.settle(100 * MS)
    assert intervals_of(bench, span) == [("overlapped", 0, 20 * MS), ("overlapped", 0, 30 * MS)]
    assert [device_ns for _, _, device_ns, _ in bench.totals.counted] == [30 * MS]  # time that both share counts once


def test_the_first_of_several_idle_streams_is_reported(bench: Bench) -> None:
    one, other = bench.stream(), bench.stream()
    bench.timer.sources[:] = [lambda: (0, one), lambda: (0, other)]
    pair, span = bench.begin()
    bench.fake.advance(MS)
    bench.end(pair, span)
    bench.settle(100 * MS)
    assert intervals_of(bench, span) == [("launch-bound", 0, MS)]
    assert bench.of(span)[0].stream == bench.resolver.contexts[0].numbers[one]


def test_a_span_that_names_its_framework_and_devices_is_timed_there(bench: Bench) -> None:
    """A model is on both devices, and is called while device 0 is current."""
    streams = {0: bench.stream(0), 1: bench.stream(1)}
    bench.timer.sources[:] = [lambda: (0, bench.stream())]
    bench.timer.frameworks["torch"] = lambda device=None: (device or 0, streams[device or 0])
    site = Site("layer", device=True, work=lambda: Work("torch", (0, 1)))
    span = Span(site, 1, 0, 0, 0, 0, bench.fake.now_ns(), 0, 0, 0)
    pair = bench.timer.begin(site, None, 1)
    bench.fake.launch(streams[0], 10 * MS)
    bench.use(1)
    bench.fake.launch(streams[1], 50 * MS)
    bench.use(0)
    bench.end(pair, span)
    bench.settle(100 * MS)
    bench.settle(MS)
    assert intervals_of(bench, span) == [("exclusive", 0, 10 * MS), ("exclusive", 1, 50 * MS)]


def test_a_generator_on_two_streams_that_never_ends_holds_no_more_than_the_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.device.resolver.DEFERRED_LIMIT", 8)
    one, other = bench.stream(), bench.stream()
    bench.timer.sources[:] = [lambda: (0, one), lambda: (0, other)]
    pair, span = bench.begin()
    for _ in range(50):
        bench.fake.launch(other, 5 * MS)
        pair.pause()
        bench.settle(20 * MS)
        assert len(pair.deferred) < 8
        pair.resume()
    bench.end(pair, span)
    bench.settle(20 * MS)
    bench.settle(MS)
    assert [one for one in intervals_of(bench, span) if one[0] == "exclusive"] == [("exclusive", 0, 5 * MS)] * 50
    assert [device_ns for _, _, device_ns, _ in bench.totals.counted] == [250 * MS]


def test_a_generator_on_two_streams_has_a_stretch_on_each_for_each_step(bench: Bench) -> None:
    one, other = bench.stream(), bench.stream()
    bench.timer.sources[:] = [lambda: (0, one), lambda: (0, other)]
    pair, span = bench.begin()
    for _ in range(3):
        bench.fake.launch(other, 5 * MS)
        pair.pause()
        bench.settle(20 * MS)
        pair.resume()
    bench.end(pair, span)
    bench.settle(20 * MS)
    bench.settle(MS)
    told = intervals_of(bench, span)
    assert told == [("exclusive", 0, 5 * MS)] * 3
    context = bench.resolver.contexts[0]
    assert not any(context.under_way.values())
    assert len(context.free) == context.made


def test_a_call_on_two_streams_that_was_no_span_after_all_costs_nothing(bench: Bench) -> None:
    one, other = bench.stream(), bench.stream()
    bench.timer.sources[:] = [lambda: (0, one), lambda: (0, other)]
    pair, _ = bench.begin()
    pair.cancel()
    bench.settle(MS)
    bench.settle(MS)
    context = bench.resolver.contexts[0]
    assert not any(context.under_way.values())
    assert len(context.free) == context.made
    assert bench.totals.counted == []
