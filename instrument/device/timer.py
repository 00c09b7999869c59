"""The timer: device time of spans by pairs of events, without a wait on a thread of the service.

A span that asks for device time records an event on the current stream when it begins and one when it ends. A thread
of ours, the resolver, asks for events that have happened, puts the stretch between them on the host's clock and adds it
to the tally. The pair spans a stretch of the stream, not a kernel: whatever else ran in between is in it, which is what
the labels (`instrument.recording.interval_ring.LABELS`) are about.

Events come from a pool for each context, filled outside of the calls that use it. Nothing is recorded on a stream that
is being captured into a graph. An error of the driver costs its device times, counted; one after which the driver says
nothing else costs all of them from there on, and is told.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_native_id
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrument.device import cuda, streams
from instrument.device.anchors import Anchors
from instrument.device.nvtx import Ranges
from instrument.device.pairs import STREAMS_KNOWN, Context, Driver, Pair, Untimed
from instrument.device.resolver import FIRST, INTERRUPTED, LOW, Resolver
from instrument.device.streams import Current, Stream
from instrument.device.torch_events import TorchDriver
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.interval_ring import LABELS, IntervalRing
from instrument.recording.rows import STREAM
from instrument.recording.spans import NO_DEVICE_TIME, Site, Work
from instrument.runtime import imports
from instrument.runtime.unpatched import Lock

if TYPE_CHECKING:
    from instrument.trace.columns import DeviceIntervals, Int64s

LOOK_S = 0.002
"""How often it is looked whether device times have come that somebody waits for."""

NO_STREAM_YET = "spans that began before their thread had used numba, whose streams are told by their use"
NO_CONTEXT_YET = "spans that began before their device had a context"


raw_clock: Callable[[], int] | None = None
if hasattr(time, "CLOCK_MONOTONIC_RAW"):
    raw_clock = partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC_RAW)


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
        """Of streams that were named in the code: the device of each."""
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
        if stream == streams.UNKNOWN:
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
        """On which streams of which devices the work of a span goes that begins now; none where none is in use.

        The framework that works is asked for its current stream on each device that it will work on, where the span
        tells the two, else every framework for its current one.
        """
        work = None if attributes is None else attributes.get(STREAM)
        if work is not None and work.__class__ is not Work:
            device = self._device_of(work)
            return () if device < 0 else ((device, work),)
        if work is None and site is not None and site.work is not None:
            work = site.work()
        if work is not None and (tell := self.frameworks.get(work.framework)) is not None:
            found = [place for device in work.devices or (None,) if (place := tell(device)) is not None]
        else:
            found = [place for source in self.sources if (place := source()) is not None and place[0] >= 0]
        return found if len(found) < 2 else streams.likely(found)

    def _device_of(self, stream: int) -> int:
        """The index of the device of a stream that the code names, whichever is current; -1 where none is."""
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
        """The label of a span whose first event was not taken, "" for a device that has been given up by it."""
        if error == cuda.BAD_HANDLE:  # the stream may be another one by now, of another device
            self._devices.pop(stream, None)
        return self.resolver.refused(context, error)

    def begin_again(self, whole: Pair) -> None:
        """Another stretch of a span, in a pair of its own. One that cannot be timed is counted."""
        pair = self.begin(whole.site, whole.attributes, whole.span_id)
        if isinstance(pair, Pair):
            # No look of the resolver's comes to a pair in between that has not ended.
            for one in (pair, *pair.beside):
                one.whole, one.running = whole, None
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
        """A span has ended whose last stretch had ended before it."""
        self.resolver.finished.append(pair)
        self.wake()

    def _mark_again(self, context: Context, event: Any, stream: int, refused: int) -> int:
        """On a thread on which another device is current, or none yet: its default stream would be that one's.

        `refused` is what `mark` has answered, and the answer now.
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
        """A device's context at first sight: a few events at once, the resolver makes the rest."""
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
                    error = self.resolver.grow(context, FIRST)
                finally:
                    driver.pop()
            if error:
                self.resolver.fail(context, error)
            self._contexts[device] = context
            self.resolver.start()
            return context

    def refuse(self, span_id: int, place: Stream, at_ns: int, label: str) -> None:
        """A span has ended that could not be timed."""
        self.resolver.untimed.append((span_id, place, at_ns, label))
        self.wake()


class Timing:
    """Device time for one session: sees to a timer as soon as the host has imported something that uses a device.

    `reason` says in one line why there is no device time, or a dearer one, "" where nothing stands against it.
    """

    def __init__(
        self,
        memory_bytes: int,
        recorder: Recorder = RECORDER,
        make_driver: Callable[[], Driver] = cuda.CudaDriver,
        now: Callable[[], int] | None = None,
        ranges: Ranges | None = None,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._recorder = recorder
        self._ranges = ranges or Ranges(recorder)
        self._make_driver = make_driver
        self._now: Callable[[], int] = recorder.now_ns if now is None else now
        self._raw = raw_clock if now is None else None
        self._undo_imports: Callable[[], None] | None = None
        self._inherited: list[Timer] = []
        self._hosts: list[ModuleType] = []
        self._numba = streams.NumbaStreams(0)
        self._undos: list[Callable[[], None]] = []
        self.intervals = self._new_intervals()
        self.timer: Timer | None = None
        self.reason = ""

    def _new_intervals(self) -> IntervalRing:
        return IntervalRing(self._memory_bytes, partial(self._recorder.room_for, "intervals"))

    def install(self) -> Callable[[], None]:
        """Time spans from now on, or from when there is something to time; returns the way back."""
        self._undo_imports = imports.install(streams.MODULES.__contains__, self.imported)
        for name in streams.MODULES:
            module = sys.modules.get(name)
            if isinstance(module, ModuleType) and not imports.is_asleep(module):
                self.imported(module)
        return self.uninstall

    def imported(self, module: ModuleType) -> None:
        """The host has imported a framework: learn its current stream, if there can be a device at all."""
        version = getattr(module, "version", None)
        if module.__name__ == "torch" and not (getattr(version, "cuda", None) or getattr(version, "hip", None)):
            self.reason = self.reason or f"{NO_DEVICE_TIME}this torch is built without a device"
            return
        self._hosts.append(module)
        hosts = [module]
        if self.timer is None:
            driver = self._driver_for(module)
            if driver is None:
                return
            hosts = self._hosts  # those before this one may have had no driver
            self.timer = Timer(driver, self.intervals, self._recorder, self._now, self._raw)
            self._numba = streams.NumbaStreams(driver.default_stream)
        for host in hosts:
            if host.__name__ == "numba.cuda":
                self._undos.append(self._numba.install(host))
            source = streams.current_of(host, self.timer.driver, self._numba)
            if source is not None:
                name = host.__name__.partition(".")[0]
                self.timer.frameworks[name] = source
                # Where streams tell nothing, the first one's are told: torch, if it is there.
                self.timer.sources.insert(0 if name == "torch" else len(self.timer.sources), source)
        self._ranges.time_by(self.timer.begin)

    def _driver_for(self, module: ModuleType) -> Driver | None:
        """cuda-python's where it can be had, else torch's own events; `reason` says why not the one or not both."""
        is_torch = module.__name__ == "torch"
        is_rocm = is_torch and not getattr(module.version, "cuda", None)
        absent = "" if is_rocm else cuda.why_absent()
        self.reason = f"{NO_DEVICE_TIME}{absent}" if absent else ""
        if absent:
            return None
        try:
            if not is_rocm:
                return self._make_driver()
        except (ImportError, OSError) as error:
            if not is_torch:
                self.reason = f"{NO_DEVICE_TIME}{error}"
                return None
            self.reason = f"device times are taken by torch's own events, at a higher cost: {error}"
        try:
            return TorchDriver(module)
        except (ImportError, OSError) as error:
            self.reason = f"{NO_DEVICE_TIME}{error}"
            return None

    def uninstall(self, limit_s: float = math.inf) -> None:
        """Begin no more pairs, take in those under way in that time, give everything back. Idempotent."""
        if self._undo_imports is not None:
            self._undo_imports()
            self._undo_imports = None
        self._ranges.time_by(None)
        while self._undos:
            self._undos.pop()()
        if self.timer is not None:
            self.timer.resolver.stop(limit_s)

    def after_fork_in_child(self) -> None:
        """The child of a process that uses CUDA cannot use it, and what it inherits is not its own to give back."""
        self.intervals = self._new_intervals()
        if self.timer is not None:
            before = self.timer
            self._inherited.append(before)
            before.resolver.disown()
            self.timer = Timer(before.driver, self.intervals, self._recorder, self._now, self._raw)
            self.timer.sources.extend(before.sources)
            self.timer.frameworks.update(before.frameworks)
            if self._undo_imports is not None:
                self._ranges.time_by(self.timer.begin)

    def columns_of(self, span_id: Int64s) -> DeviceIntervals:
        """The intervals that are known by now of spans by their ids, as columns."""
        from instrument.trace.interval_columns import cells_in, device_intervals

        return device_intervals(cells_in(self.intervals.packed()), span_id)

    def is_settled(self, at_ns: int) -> bool:
        """Whether the device time of every span that had ended by then is known, or never will be."""
        return self.settled_ns() >= at_ns

    def settled_ns(self) -> int:
        """Up to when that is so. Takes time by the number of open spans: ask once for many."""
        return self._now() if self.timer is None else self.timer.resolver.settled_ns()

    def await_settled(self, at_ns: int, end_s: float) -> None:
        """Wait until that is so of a time, as `time.monotonic` has it until `end_s`, and let others know."""
        resolver = None if self.timer is None else self.timer.resolver
        while resolver is not None and resolver.is_running and time.monotonic() < end_s:
            settled_ns = resolver.settled_ns()
            if settled_ns >= at_ns:
                self.intervals.tell_settled(settled_ns)
                return
            resolver.wake()
            time.sleep(LOOK_S)

    @property
    def pair_ns(self) -> float:
        """What a pair costs the thread that records it."""
        return 0.0 if self.timer is None else self.timer.resolver.pair_ns

    def cost_ns(self) -> tuple[float, int]:
        """What pairs have cost the threads of the service up to now, and the resolver's thread."""
        if self.timer is None:
            return 0.0, 0
        resolver = self.timer.resolver
        return resolver.pairs * resolver.pair_ns, resolver.thread_ns

    def losses(self) -> Mapping[str, int]:
        """Spans that asked for device time and have none, by reason."""
        counts = self.timer.resolver.counts if self.timer is not None else {}
        return {
            "device times not taken while a graph was captured": counts.get("captured", 0),
            "device times dropped": counts.get("dropped", 0),
            "device intervals overwritten by newer ones": self.intervals.overwritten,
        }

    def notes(self) -> list[str]:
        """What stands against device time, in sentences; nothing where no span has asked for any."""
        notes = [self.reason] if self.reason and self._recorder.asks_for_device_time() else []
        if self.timer is not None:
            resolver, misfit = self.timer.resolver, self.timer.driver.misfit
            notes += [f"device time: {misfit}"] if misfit else []
            notes += resolver.faults.values()
            notes += [f"{what}: {count} times" for what, count in resolver.counts.items() if what not in LABELS]
        return notes
