"""Defines pairs of CUDA events that time a span on a stream, and the contexts that own the pairs.

`Placing` converts their times to the host's clock. A converted time is uncertain, but the order of events on a stream
is known. With that order, intervals nest in the trace as they did on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Protocol

from instrument.device.clock_anchors import RESOLUTION_NS, Ahead, AnchoredMoment, Anchors
from instrument.device.cuda import Stream
from instrument.device.torch_events import Driver
from instrument.runtime.lazy_imports import NamedTuple

STREAMS_KNOWN = 1024

STREAMS_KEPT = 256
"""The number of streams per context above which the state of idle streams is dropped."""


class Times(Protocol):
    """The part of the timer's interface that a pair uses."""

    def begin(self, site: Any, attributes: Any, span_id: int, /) -> Pair | Untimed | None: ...
    def begin_next_step(self, whole: Pair, /) -> None: ...
    def end_pair(self, pair: Pair, /) -> None: ...
    def pass_pair_to_resolver(self, pair: Pair, /) -> None: ...
    def wake(self) -> None: ...
    def note_untimed(self, span_id: int, place: Stream, at_ns: int, label: str, /) -> None: ...


class DeferredTimes(NamedTuple):
    """The device interval of one pair, stored until the span ends. Only spans with pairs on several streams need
    this."""

    context: Context
    stream: int
    start_ns: int
    end_ns: int
    label: str
    uncertainty_ns: int
    is_side: bool


class Pair:
    """A pair of events, recorded before and after a span's work on a stream.

    A span's first pair is the `whole`, to which the recorder refers. Each later step of a generator has another pair,
    which refers to the `whole`. The `whole` returns to the context's pool last.

    - `stream`: the number of the stream. The driver reuses the `handle`, but never the number
    - `thread_id`: set for a handle that means a different stream on each thread
    - `side_pairs`: the span's pairs on other streams
    """

    __slots__ = (
        "attributes", "begin", "begin_key", "begin_ns", "begun", "beyond_ns", "context", "deferred", "device_ns",
        "end_event", "end_key", "end_ns", "error", "handle", "is_side", "last_ns", "place", "row", "running",
        "side_pairs", "site", "span_id", "stream", "taken", "thread_id", "timer", "whole",
    )  # fmt: skip

    def __init__(self, timer: Times, context: Context, begin: Any, end: Any, begin_key: Any, end_key: Any) -> None:
        self.timer = timer
        self.context = context
        self.begin, self.end_event = begin, end
        self.begin_key, self.end_key = begin_key, end_key
        self.clear()

    def clear(self) -> None:
        self.handle = self.stream = self.thread_id = self.begin_ns = self.end_ns = self.error = 0
        self.place: AnchoredMoment | None = None
        self.whole: Pair | None = None
        self.running: Pair | None = None
        self.row: tuple[Any, int, int, int] | None = None
        self.span_id = self.begun = self.taken = 0
        self.device_ns = self.beyond_ns = self.last_ns = 0
        self.site: Any = None
        self.attributes: Any = None
        self.side_pairs: Sequence[Pair] = ()
        self.is_side = False
        self.deferred: list[DeferredTimes] | None = None

    def pause(self) -> None:
        pair, self.running = self.running, None
        if pair is not None:
            self.timer.end_pair(pair)

    def resume(self) -> None:
        """Begin another step when a generator continues. The current stream may be a different one."""
        if self.running is None:
            self.timer.begin_next_step(self)

    def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
        """Note the end of the span. An `index` of -1 means that the time counts for another span."""
        self.span_id = span_id
        self.row = (ring, index, start_ns, end_ns)
        pair = self.running
        if pair is not None:
            self.running = None
            self.timer.end_pair(pair)
        else:
            self.timer.pass_pair_to_resolver(self)

    def cancel(self) -> None:
        for side_pair in self.side_pairs:
            side_pair.cancel()
        self.whole = self.running = None
        self.end_ns = -1
        self.timer.wake()  # or calls that do nothing would empty the pool

    def add_interval(self, start_ns: int, end_ns: int) -> None:
        """Add an interval to the span's device time. Intervals must be added in the order of their begins."""
        if start_ns < self.last_ns:
            start_ns = self.last_ns
        if end_ns > start_ns:
            self.device_ns += end_ns - start_ns
            if self.row is not None and end_ns > self.row[3]:  # else it ended before it did on the host
                self.beyond_ns += end_ns - max(start_ns, self.row[3])
            self.last_ns = end_ns


class Untimed:
    """A substitute for the pair of a span that cannot be timed. The label is the reason."""

    __slots__ = ("_at_ns", "_label", "_place", "_timer")

    def __init__(self, timer: Times, place: Stream, label: str, at_ns: int) -> None:
        self._timer, self._place, self._label, self._at_ns = timer, place, label, at_ns

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def cancel(self) -> None: ...

    def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
        self._timer.note_untimed(span_id, self._place, self._at_ns, self._label)


class Context:
    """A driver's context on a device, with a pool of event pairs, the pairs in flight, and a clock."""

    def __init__(self, handle: int, device: int, anchors: Anchors) -> None:
        self.handle = handle
        self.device = device
        self.anchors = anchors
        self.alive = True
        self.free: list[Pair] = []
        self.made = 0
        self.begun: deque[Pair] = deque()
        self.under_way: dict[int, list[Pair]] = {}
        self.recent: dict[int, deque[tuple[int, int]]] = {}
        self.floors: dict[int, tuple[int, int, int]] = {}
        """The host times, by stream, of the last begin, of the record of the last end's event, and of the last end."""
        self.numbers: dict[int, int] = {}
        """The numbers of streams by handle."""
        self.shortest_ns = 0
        self.pending: dict[int, int] = {}
        """The host time in ns, by stream, of the last poll before the oldest end in flight happens."""
        self.next_anchor_ns = self.anchor_pause_ns = 0
        """The time in ns of the next try for an anchor on a busy device, and the pause in ns before that try."""
        self.next_watch_ns = 0
        self.watched: int | None = None
        """The stream on which an end was last observed, if the device is too busy for anchors."""

    def note_stream_number(self, stream: int, number: int) -> None:
        """Note a stream's number under the stream's handle. The driver reuses handles, but not numbers."""
        if len(self.numbers) >= STREAMS_KNOWN:
            self.numbers.clear()
        self.numbers[stream] = number

    def add_pairs(self, timer: Times, driver: Driver, pairs: int) -> int:
        """Add pairs to the pool. The context must be current on the calling thread. Return the driver's error."""
        for _ in range(pairs):
            error, begin = driver.new_event()
            if not error:
                error, end = driver.new_event()
                if error:
                    driver.destroy_event(begin)
            if error:
                return error
            self.free.append(Pair(timer, self, begin, end, driver.read_handle(begin), driver.read_handle(end)))
            self.made += 1
        return 0

    def forget_idle_streams(self, now_ns: int) -> None:
        """Drop the state of idle streams. A stream is idle if no later interval can overlap the stream's intervals."""
        for stream in [stream for stream, pairs in self.under_way.items() if not pairs]:
            del self.under_way[stream]
            self.pending.pop(stream, None)
        if len(self.recent) > 1:
            horizon_ns = min((pair.begin_ns for pairs in self.under_way.values() for pair in pairs), default=None)
            if horizon_ns is None:
                horizon_ns = min((pair.begin_ns for pair in list(self.begun)), default=now_ns)
            idle = [stream for stream, intervals in self.recent.items() if intervals[-1][1] <= horizon_ns]
            beyond = len(self.recent) - len(idle) - STREAMS_KEPT
            if beyond > 0:
                idle += [stream for stream in self.recent if stream not in self.under_way][:beyond]
            for stream in idle:
                self.recent.pop(stream, None)
                if stream not in self.under_way:
                    self.floors.pop(stream, None)

    def drop_all_pairs(self) -> None:
        for pair in [*self.begun, *(pair for pairs in self.under_way.values() for pair in pairs)]:
            pair.whole = None
        for state in (self.recent, self.floors, self.begun, self.under_way, self.pending, self.free):
            state.clear()


STALE_NS = 10**6
"""The uncertainty in ns above which an interval may be `stale`.

A `stale` interval's uncertainty also exceeds a tenth of the interval.
"""

LAUNCH_NS = 20_000
"""A device interval is labelled launch-bound if it ends at most this many ns after the span's end."""

SHORT = 20
"""A device interval is labelled launch-bound if it is shorter than this multiple of the shortest measurable
interval."""

RECENT = 256
"""The maximum number of intervals per stream that are kept for comparison with other streams."""

Answer = tuple[int, int, "int | None"]
"""The measurement of an event pair: error code, length in ns, and start in ns after the newest anchor.

The start is None if unknown.
"""

_by_begin = attrgetter("begin_ns")


class Placing:
    """Converts the times of event pairs to the host's clock, on the resolver's thread."""

    def __init__(self, driver: Driver, now: Callable[[], int]) -> None:
        self._driver = driver
        self._now = now

    def compute_host_begins(
        self, context: Context, stream: int, pairs: list[Pair], answered: list[tuple[Pair, Answer]]
    ) -> None:
        times = {id(pair): (device_ns, offset_ns) for pair, (error, device_ns, offset_ns) in answered if not error}
        if not times:
            return
        last_ns = max(pair.begin_ns for pair, _ in answered)
        begun_pairs = [
            pair
            for pair in pairs
            if id(pair) in times or (pair.place is None and 0 < pair.begin_ns <= last_ns and pair.whole is not None)
        ]
        begun_pairs.sort(key=_by_begin)
        anchors, now_ns = context.anchors, self._now()  # later than all that has happened
        ahead = anchors.make_clock_after_newest() if anchors.newest_event is not None else None
        ended = deque(pair for pair, (error, _, _) in answered if not error)
        floor_ns, last_end_ns, last_at_ns = context.floors.get(stream, (0, 0, 0))
        for pair in begun_pairs:
            if last_end_ns < pair.begin_ns:
                floor_ns = max(floor_ns, last_at_ns)
            while ended and ended[0].end_ns < pair.begin_ns:
                before = ended.popleft()
                if before.place is not None:
                    floor_ns = max(floor_ns, before.place.at_ns + times[id(before)][0])
            if pair.place is not None:
                continue
            _, offset_ns = times.get(id(pair), (0, None))
            place = self._compute_host_begin(context, pair, offset_ns, ahead, now_ns)
            if place is not None:
                if place.at_ns < floor_ns:
                    place = AnchoredMoment(floor_ns, place.uncertainty_ns, place.near)
                floor_ns = place.at_ns
                pair.place = place
        last = next((pair for pair, (error, _, _) in reversed(answered) if not error), None)
        if last is not None and last.place is not None:
            last_end_ns, last_at_ns = last.end_ns, last.place.at_ns + times[id(last)][0]
        context.floors[stream] = floor_ns, last_end_ns, last_at_ns

    def label_interval(
        self, context: Context, stream: int, pair: Pair, place: AnchoredMoment, device_ns: int, is_alone: bool
    ) -> tuple[int, int, str]:
        """Return begin, end and label of a pair's interval. `is_alone` is True if the context uses no other stream."""
        start_ns = place.at_ns
        end_ns = start_ns + device_ns if device_ns > 0 else start_ns
        recent = context.recent.get(stream)
        if recent and start_ns < recent[-1][1] and end_ns < recent[-1][1] <= end_ns + place.uncertainty_ns:
            end_ns = recent[-1][1]  # an enclosed interval cannot end after it
        uncertainty_ns = place.uncertainty_ns
        if not place.near or (uncertainty_ns > STALE_NS and uncertainty_ns > device_ns // 10):
            label = "stale"
        elif not is_alone and self._overlaps_other_stream(context, stream, start_ns, end_ns):
            label = "overlapped"
        elif device_ns < SHORT * context.shortest_ns or end_ns - pair.end_ns < uncertainty_ns + LAUNCH_NS:
            label = "launch-bound"
        else:
            label = "exclusive"
        return start_ns, end_ns, label

    def add_recent_interval(self, context: Context, stream: int, start_ns: int, end_ns: int) -> None:
        stretches = context.recent.get(stream)
        if stretches is None:
            stretches = context.recent[stream] = deque(maxlen=RECENT)
        while stretches and stretches[-1][1] >= start_ns:
            before = stretches.pop()
            start_ns, end_ns = min(start_ns, before[0]), max(end_ns, before[1])
        stretches.append((start_ns, end_ns))

    def _overlaps_other_stream(self, context: Context, stream: int, start_ns: int, end_ns: int) -> bool:
        start_ns, end_ns = start_ns + RESOLUTION_NS, end_ns - RESOLUTION_NS
        if start_ns >= end_ns:
            return False
        for other_stream, stretches in context.recent.items():
            if other_stream == stream:
                continue
            for begin, end in reversed(stretches):  # they do not touch, so earlier ones ended earlier
                if end <= start_ns:
                    break
                if begin < end_ns:
                    return True
        for other_stream, pairs in context.under_way.items():
            for pair in () if other_stream == stream else pairs:
                if pair.begin_ns >= end_ns or pair.stream != other_stream or pair.whole is None or pair.error:
                    continue
                if pair.whole.deferred is not None:  # the stream may have no work of it
                    continue
                begun_ns = self._find_begin(context, pair)
                if begun_ns is None:
                    break  # nor have later pairs of its stream
                if begun_ns < end_ns and self._pair_ends_after(pair, begun_ns, start_ns):
                    return True
        return False

    def _find_begin(self, context: Context, pair: Pair) -> int | None:
        place = pair.place
        if place is None:
            if self._driver.query_event(pair.begin):
                return None
            place = self._compute_host_begin(context, pair, None, None, self._now())
        return None if place is None else place.at_ns

    def _pair_ends_after(self, pair: Pair, begun_ns: int, start_ns: int) -> bool:
        driver = self._driver
        if not pair.end_ns or driver.query_event(pair.end_event):
            return True
        error, device_ns = driver.elapsed_ns(pair.begin, pair.end_event)
        return not error and begun_ns + device_ns > start_ns

    def _compute_host_begin(
        self, context: Context, pair: Pair, offset_ns: int | None, ahead: Ahead | None, now_ns: int
    ) -> AnchoredMoment | None:
        """Return the host time at which a pair began, or None after an error of the driver.

        `offset_ns` is the device time since the newest anchor. `now_ns` must be later than all past events.
        """
        anchors = context.anchors
        anchor = anchors.newest_event
        if anchor is None:  # the device has been too busy to be read
            return AnchoredMoment(pair.begin_ns, now_ns - pair.begin_ns, near=False)
        error = 0
        if offset_ns is None:
            error, offset_ns = self._driver.elapsed_ns(anchor, pair.begin)
        place: AnchoredMoment | None = None
        if not error:
            if ahead is not None and offset_ns > 0:
                place = ahead.convert_to_host_time(offset_ns)
            else:
                error, place = anchors.convert_event_time(pair.begin, offset_ns)
        if error or place is None:
            return None
        if place.at_ns < pair.begin_ns:
            return AnchoredMoment(pair.begin_ns, place.uncertainty_ns, place.near)
        # It has happened. A later place means that the device's clock ran while the host's was stopped.
        return place if place.at_ns <= now_ns else AnchoredMoment(now_ns, place.uncertainty_ns, near=False)
