"""The timer: device time of spans by pairs of events, without a wait on a thread of the service.

A span that asks for device time records an event on the current stream when it begins and one when it ends. A thread
of ours, the resolver, asks for events that have happened, puts the stretch between them on the host's clock and adds it
to the tally. The pair spans a stretch of the stream, not a kernel: whatever else ran in between is in it, which is what
the labels (`instrument.recording.slot_ring.LABELS`) mark.

Events come from a pool for each context, filled outside of the calls that use it. Nothing is recorded on a stream that
is being captured into a graph. An error of the driver costs its device times, counted; one after which the driver says
nothing else costs all of them from there on, and is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_native_id
from typing import Any

from instrument.device import cuda
from instrument.device.anchors import Anchors
from instrument.device.cuda import Current, Stream
from instrument.device.pairs import STREAMS_KNOWN, Context, Driver, Pair, Untimed
from instrument.device.resolver import FIRST, INTERRUPTED, LOW, Resolver
from instrument.recorder.recorder import Recorder
from instrument.recording.rows import STREAM
from instrument.recording.slot_ring import IntervalRing
from instrument.recording.spans import Site, Work
from instrument.runtime.unpatched import Lock

NO_STREAM_YET = "spans that began before their thread had used numba, whose streams are known by their use"
NO_CONTEXT_YET = "spans that began before their device had a context"


class Timer:
    """Times spans on the devices that one driver drives. `begin` is what the recorder calls.

    Everything but `stop` and `after_fork_in_child` runs on threads of the service and takes a microsecond or two.
    """

    def __init__(
        self,
        driver: Driver,
        intervals: IntervalRing,
        recorder: Recorder,
        now: Callable[[], int],
        raw: Callable[[], int] | None = None,
    ) -> None:
        self.driver = driver
        self._raw = raw
        self.sources: list[Current] = []
        self.frameworks: dict[str, Current] = {}
        self.resolver = Resolver(self, driver, intervals, recorder, now)
        self._now = now
        self._reading = driver.reading(recorder, now)
        self._mark = driver.mark
        self._meeting = Lock()
        self._devices: dict[int, int] = {}
        """The devices of streams that were named in the code."""
        self._contexts = self.resolver.contexts

    def begin(self, site: Site | None, attributes: Any, span_id: int) -> Pair | Untimed | None:
        """Record the first event of a span. None where the host does not use a device, or it has been given up."""
        places = self._places(site, attributes)
        if not places:
            return None
        begun = self._begin_at(places[0], span_id) if len(places) == 1 else self._begin_on(places, span_id)
        if begun.__class__ is Pair:
            begun.site, begun.attributes = site, attributes
        return begun

    def _begin_on(self, places: Sequence[Stream], span_id: int) -> Pair | Untimed | None:
        """Record an event on each of some streams."""
        begun: list[Pair | Untimed] = []
        try:
            for place in places:
                pair = self._begin_at(place, span_id)
                if pair is not None:
                    begun.append(pair)
        except BaseException:  # of a signal handler
            for pair in begun:
                pair.cancel()
            raise
        pairs = [pair for pair in begun if isinstance(pair, Pair)]
        if len(pairs) > 1:
            whole = pairs[0]
            whole.held, whole.begun, whole.beside = [], len(pairs), pairs[1:]
            for pair in whole.beside:
                pair.whole, pair.running, pair.is_beside = whole, None, True
        return pairs[0] if pairs else next(iter(begun), None)

    def _begin_at(self, place: Stream, span_id: int) -> Pair | Untimed | None:
        device, stream = place
        if stream == cuda.UNKNOWN:
            self.resolver.counts[NO_STREAM_YET] += 1
            return Untimed(self, (device, 0), "dropped", self._now())
        context = self._contexts.get(device)
        if context is None:
            captured = self.driver.capture(stream)
            is_captured = captured == cuda.CAPTURING or captured in cuda.CAPTURE_ERRORS
            context = None if is_captured else self.driver.relaxed(partial(self._meet, device))
            if context is None:
                self.resolver.start()
                if not is_captured:  # the host is about to make one
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
                number = self._mark_again(context, pair.begin_key, stream, number)
                if number < 0:
                    label = self._refused(context, stream, -number)
                    refused = Untimed(self, place, label, pair.begin_ns) if label else None
                    context.free.append(pair)
                    return refused
            pair.stream = number
            if stream == cuda.PER_THREAD:
                pair.thread_id = get_native_id()
            if context.numbers.get(stream) != number:
                context.learn(stream, number)
            pair.span_id = span_id
            pair.whole = pair.running = pair
            pair.begun = 1
            context.begun.append(pair)
            if len(context.free) == LOW:  # or spans would go without until the next look
                self.resolver.wake()
            return pair
        except BaseException:  # of a signal handler, most likely: nobody will end this pair
            pair.cancel()
            if not pair.begun:
                pair.begun = 1
                context.begun.append(pair)
            raise

    def _places(self, site: Site | None, attributes: Any) -> Sequence[Stream]:
        """Return the streams for the work of a span that begins now; none where no device is in use.

        A span with a known framework and devices has that framework's current streams there. Any other has the current
        stream of each framework.
        """
        work = None if attributes is None else attributes.get(STREAM)
        if work is not None and work.__class__ is not Work:
            device = self._device_of(work)
            return () if device < 0 else ((device, work),)
        if work is None and site is not None and site.work is not None:
            work = site.work()
        if work is not None and (current := self.frameworks.get(work.framework)) is not None:
            places = [place for device in work.devices or (None,) if (place := current(device)) is not None]
        else:
            places = [place for source in self.sources if (place := source()) is not None and place[0] >= 0]
        return places if len(places) < 2 else cuda.likely(places)

    def _device_of(self, stream: int) -> int:
        """Return the device of a stream that the code names; -1 where none is in use."""
        device = self._devices.get(stream)
        if device is None:
            driver = self.driver
            current = driver.current_device()
            # To ask whose a stream is that is being captured would end the capture.
            if current < 0 or stream <= cuda.PER_THREAD or driver.capture(stream):
                return current
            device = driver.device_of(stream)
            if len(self._devices) >= STREAMS_KNOWN:
                self._devices.clear()
            self._devices[stream] = device
        return device

    def _refused(self, context: Context, stream: int, error: int) -> str:
        """Return the label of a span whose first event failed, "" where the device is given up."""
        if error == cuda.BAD_HANDLE:  # the stream may be another one by now, of another device
            self._devices.pop(stream, None)
        return self.resolver.refused(context, error)

    def begin_again(self, whole: Pair) -> None:
        """Begin another stretch of a span, in a pair of its own. A stretch that cannot be timed is counted."""
        pair = self.begin(whole.site, whole.attributes, whole.span_id)
        if isinstance(pair, Pair):
            # No look of the resolver's comes to a pair in between that has not ended.
            for stretch in (pair, *pair.beside):
                stretch.whole, stretch.running = whole, None
                whole.begun += 1
            if whole.held is None and pair.beside:
                whole.held = []
            whole.running = pair
        elif pair is not None:
            self.resolver.counts["steps of generators without device time"] += 1

    def end_pair(self, pair: Pair) -> None:
        """Record the second event. The resolver takes over from here."""
        try:
            self._end(pair)
        finally:
            for other in pair.beside:
                self._end(other)
        self.wake()

    def _end(self, pair: Pair) -> None:
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
                        number = self._mark_again(context, pair.end_key, pair.handle, number)
                        pair.error = max(-number, 0)
            pair.end_ns = self._now()
        except BaseException:  # of a signal handler: without an end the pair would be under way for ever
            pair.error = pair.error or INTERRUPTED
            pair.end_ns = pair.begin_ns
            raise

    def wake(self) -> None:
        """Let the resolver look, if it sleeps."""
        if self.resolver.asleep:
            self.resolver.wake()

    def finish(self, pair: Pair) -> None:
        """Hand over a span that has ended after its last stretch."""
        self.resolver.finished.append(pair)
        self.wake()

    def _mark_again(self, context: Context, event: Any, stream: int, refused: int) -> int:
        """Mark in the pair's context, on a thread with another current device or none. Returns the new answer.

        `refused` is the first answer, which is returned where another context would not help.
        """
        driver = self.driver
        is_other = -refused == cuda.BAD_HANDLE and stream <= cuda.PER_THREAD
        if -refused != cuda.NO_CONTEXT and not (is_other and driver.current_device() != context.device):
            return refused
        error = driver.push(context.handle)
        if error:
            return -error
        try:
            return driver.mark(event, stream)
        finally:
            driver.pop()

    def _meet(self, device: int) -> Context | None:
        """Make the context of a device with a few events; the resolver makes the rest."""
        driver = self.driver
        with self._meeting:
            context = self._contexts.get(device)
            if context is not None or self.resolver.is_stopping:
                return context
            handle = driver.primary(device)
            # A context that is current may be that of another device: torch leaves it so until it uses this one.
            if not handle and driver.current_device() == device:
                handle = driver.current()
            if not handle:
                return None
            context = Context(handle, device, Anchors(driver, self._now, self._raw, self._reading))
            error = driver.push(handle)
            if not error:
                try:
                    error = context.grow(self, driver, FIRST)
                finally:
                    driver.pop()
            if error:
                self.resolver.fail(context, error)
            self._contexts[device] = context
            self.resolver.start()
            return context

    def refuse(self, span_id: int, place: Stream, at_ns: int, label: str) -> None:
        """Hand over a span that could not be timed."""
        self.resolver.untimed.append((span_id, place, at_ns, label))
        self.wake()
