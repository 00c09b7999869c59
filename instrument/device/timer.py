"""Measures the device time of spans by pairs of CUDA events. No thread of the service waits for the device.

An event is recorded on the current stream at the begin and at the end of a span. The interval between them includes all
work of the stream between the two events. The resolver, a thread of ours, polls for the events and reads the interval.

Nothing is recorded on a stream that is captured into a graph. After a fatal error, a device is no longer timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_native_id
from typing import Any

from instrument.device import cuda
from instrument.device.clock_anchors import Anchors
from instrument.device.cuda import Current, Stream
from instrument.device.event_pairs import STREAMS_KNOWN, Context, Pair, Untimed
from instrument.device.resolver import FIRST, INTERRUPTED, LOW, Resolver
from instrument.device.torch_events import Driver
from instrument.recorder.recorder import Recorder
from instrument.recording.memory import IntervalRing
from instrument.recording.memory_layout import STREAM
from instrument.recording.spans import Site, Work
from instrument.runtime.unpatched import Lock

NO_STREAM_YET = "spans that began before their thread had used numba, whose streams are known by their use"
NO_CONTEXT_YET = "spans that began before their device had a context"


class Timer:
    """Times spans on the devices of one driver. A method takes one to two microseconds on a thread of the service."""

    def __init__(
        self,
        driver: Driver,
        intervals: IntervalRing,
        recorder: Recorder,
        now: Callable[[], int],
        raw: Callable[[], int],
    ) -> None:
        self.driver = driver
        self._raw = raw
        self.sources: list[Current] = []
        self.frameworks: dict[str, Current] = {}
        self.resolver = Resolver(self, driver, intervals, recorder, now)
        self._now = now
        self._reading = driver.make_event_reader(recorder, now)
        self._mark = driver.mark
        self._meeting = Lock()
        self._devices: dict[int, int] = {}
        """The device of each stream that the service passed to a call, by the stream's handle."""
        self._contexts = self.resolver.contexts

    def begin(self, site: Site | None, attributes: Any, span_id: int) -> Pair | Untimed | None:
        """Record a span's first event. Return None if no device is in use, or if the device has been abandoned."""
        places = self._find_streams(site, attributes)
        if not places:
            return None
        pair = (
            self._begin_on_stream(places[0], span_id) if len(places) == 1 else self._begin_on_streams(places, span_id)
        )
        if pair.__class__ is Pair:
            pair.site, pair.attributes = site, attributes
        return pair

    def _begin_on_streams(self, places: Sequence[Stream], span_id: int) -> Pair | Untimed | None:
        marks: list[Pair | Untimed] = []
        try:
            for place in places:
                pair = self._begin_on_stream(place, span_id)
                if pair is not None:
                    marks.append(pair)
        except BaseException:  # of a signal handler
            for pair in marks:
                pair.cancel()
            raise
        pairs = [pair for pair in marks if isinstance(pair, Pair)]
        if len(pairs) > 1:
            whole = pairs[0]
            whole.deferred, whole.begun, whole.side_pairs = [], len(pairs), pairs[1:]
            for pair in whole.side_pairs:
                pair.whole, pair.running, pair.is_side = whole, None, True
        return pairs[0] if pairs else next(iter(marks), None)

    def _begin_on_stream(self, place: Stream, span_id: int) -> Pair | Untimed | None:
        device, stream = place
        if stream == cuda.UNREPORTED:
            self.resolver.counts[NO_STREAM_YET] += 1
            return Untimed(self, (device, 0), "dropped", self._now())
        context = self._contexts.get(device)
        if context is None:
            captured = self.driver.check_capture(stream)
            is_captured = captured == cuda.CAPTURING or captured in cuda.CAPTURE_ERRORS
            context = None if is_captured else self.driver.run_relaxed(partial(self._find_context, device))
            if context is None:
                self.resolver.start()
                if not is_captured:  # the service is about to make one
                    self.resolver.counts[NO_CONTEXT_YET] += 1
                return Untimed(self, place, "captured" if is_captured else "dropped", self._now())
        if not context.alive:
            return None
        try:
            pair = context.free.pop()
        except IndexError:
            self.resolver.wake()
            return Untimed(self, place, "dropped", self._now())
        try:
            pair.handle = stream
            pair.begin_ns = self._now()
            number = self._mark(pair.begin_key, stream)
            if number < 0:
                number = self._retry_record_in_context(context, pair.begin_key, stream, number)
                if number < 0:
                    if number == -cuda.BAD_HANDLE:  # the handle may now be of a stream of another device
                        self._devices.pop(stream, None)
                    label = self.resolver.choose_failure_label(context, -number)
                    refused = Untimed(self, place, label, pair.begin_ns) if label else None
                    context.free.append(pair)
                    return refused
            pair.stream = number
            if stream == cuda.PER_THREAD:
                pair.thread_id = get_native_id()
            if context.numbers.get(stream) != number:
                context.note_stream_number(stream, number)
            pair.span_id = span_id
            pair.whole = pair.running = pair
            pair.begun = 1
            context.begun.append(pair)
            if len(context.free) == LOW:  # or spans would get no pair until the next poll
                self.resolver.wake()
            return pair
        except BaseException:  # probably of a signal handler: no call will end this pair
            pair.cancel()
            if not pair.begun:
                pair.begun = 1
                context.begun.append(pair)
            raise

    def _find_streams(self, site: Site | None, attributes: Any) -> Sequence[Stream]:
        """Return the streams on which a span's work may run.

        A span with a known framework and devices uses that framework's current streams. Any other span uses the current
        stream of each framework.
        """
        work = None if attributes is None else attributes.get(STREAM)
        if work is not None and work.__class__ is not Work:
            device = self._find_device(work)
            return () if device < 0 else ((device, work),)
        if work is None and site is not None and site.work is not None:
            work = site.work()
        if work is not None and (current := self.frameworks.get(work.framework)) is not None:
            places = [place for device in work.devices or (None,) if (place := current(device)) is not None]
        else:
            places = [place for source in self.sources if (place := source()) is not None and place[0] >= 0]
        return places if len(places) < 2 else cuda.select_streams(places)

    def _find_device(self, stream: int) -> int:
        device = self._devices.get(stream)
        if device is None:
            driver = self.driver
            current = driver.current_device()
            # A query for the device of a captured stream would end the capture.
            if current < 0 or stream <= cuda.PER_THREAD or driver.check_capture(stream):
                return current
            device = driver.find_device(stream)
            if len(self._devices) >= STREAMS_KNOWN:
                self._devices.clear()
            self._devices[stream] = device
        return device

    def begin_next_step(self, whole: Pair) -> None:
        pair = self.begin(whole.site, whole.attributes, whole.span_id)
        if isinstance(pair, Pair):
            # The resolver does not read a pair before it has ended.
            for stretch in (pair, *pair.side_pairs):
                stretch.whole, stretch.running = whole, None
                whole.begun += 1
            if whole.deferred is None and pair.side_pairs:
                whole.deferred = []
            whole.running = pair
        elif pair is not None:
            self.resolver.counts["steps of generators without device time"] += 1

    def end_pair(self, pair: Pair) -> None:
        try:
            self._record_end(pair)
        finally:
            for side_pair in pair.side_pairs:
                self._record_end(side_pair)
        self.wake()

    def _record_end(self, pair: Pair) -> None:
        context = pair.context
        try:
            if context.alive:
                if pair.thread_id and pair.thread_id != get_native_id():
                    # The default stream of this thread is not the one on which the pair began.
                    pair.error = INTERRUPTED
                    self.resolver.counts["spans that left the thread of their per-thread stream"] += 1
                else:
                    number = self._mark(pair.end_key, pair.handle)
                    if number < 0:
                        number = self._retry_record_in_context(context, pair.end_key, pair.handle, number)
                        pair.error = max(-number, 0)
            pair.end_ns = self._now()
        except BaseException:  # of a signal handler: without an end the pair would stay open for ever
            pair.error = pair.error or INTERRUPTED
            pair.end_ns = pair.begin_ns
            raise

    def wake(self) -> None:
        if self.resolver.asleep:
            self.resolver.wake()

    def pass_pair_to_resolver(self, pair: Pair) -> None:
        self.resolver.finished.append(pair)
        self.wake()

    def _retry_record_in_context(self, context: Context, event: Any, stream: int, refused: int) -> int:
        """Record an event again, in the event's own context. Return the driver's answer.

        Return `refused`, the answer to the first attempt, if another context would not help.
        """
        driver = self.driver
        is_other = -refused == cuda.BAD_HANDLE and stream <= cuda.PER_THREAD
        if -refused != cuda.NO_CONTEXT and not (is_other and driver.current_device() != context.device):
            return refused
        error = driver.push_context(context.handle)
        if error:
            return -error
        try:
            return driver.mark(event, stream)
        finally:
            driver.pop_context()

    def _find_context(self, device: int) -> Context | None:
        driver = self.driver
        with self._meeting:
            context = self._contexts.get(device)
            if context is not None or self.resolver.stopping.is_set():
                return context
            handle = driver.primary_context(device)
            # The current context may be another device's: torch changes it when it uses this device.
            if not handle and driver.current_device() == device:
                handle = driver.find_context()
            if not handle:
                return None
            context = Context(handle, device, Anchors(driver, self._now, self._raw, self._reading))
            error = driver.push_context(handle)
            if not error:
                try:
                    error = context.add_pairs(self, driver, FIRST)
                finally:
                    driver.pop_context()
            if error:
                self.resolver.count_error(context, error)
            self._contexts[device] = context
            self.resolver.start()
            return context

    def note_untimed(self, span_id: int, place: Stream, at_ns: int, label: str) -> None:
        self.resolver.untimed.append((span_id, place, at_ns, label))
        self.wake()
