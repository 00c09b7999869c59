"""Pairs: what times one span on a device, from its begin on a thread of the service to its last event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from instrument.device.anchors import AnchoredMoment, Anchors
from instrument.device.cuda import Reading
from instrument.device.streams import Stream

T = TypeVar("T")

STREAMS_KNOWN = 1024


class Driver(Protocol):
    """What times a device: `instrument.device.cuda.CudaDriver`, or torch's own events where that is missing."""

    CAPTURING: int
    NOT_READY: int
    default_stream: int
    mark: Callable[[Any, int], int]

    @property
    def misfit(self) -> str: ...
    def name(self, error: int) -> str: ...
    def current(self) -> int: ...
    def current_device(self) -> int: ...
    def primary(self, device: int) -> int: ...
    def capture(self, stream: int) -> int: ...
    def device_of(self, stream: int) -> int: ...
    def relaxed(self, make: Callable[[], T]) -> T: ...
    def push(self, context: int) -> int: ...
    def pop(self) -> None: ...
    def bind(self, context: int) -> int: ...
    def new_event(self) -> tuple[int, Any]: ...
    def handle(self, event: Any) -> Any: ...
    def destroy_event(self, event: Any) -> None: ...
    def new_stream(self) -> tuple[int, Any]: ...
    def destroy_stream(self, stream: Any) -> None: ...
    def query(self, event: Any) -> int: ...
    def elapsed_ns(self, first: Any, second: Any) -> tuple[int, int]: ...
    def reading(self, recorder: Any, now: Callable[[], int]) -> Reading | None: ...
    def measure(self, anchor: Any, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[int, int, int]]: ...


class Times(Protocol):
    """What pairs ask of the timer that has made them."""

    def begin(self, site: Any, attributes: Any, span_id: int, /) -> Pair | Untimed | None: ...
    def begin_again(self, whole: Pair, /) -> None: ...
    def end_pair(self, pair: Pair, /) -> None: ...
    def finish(self, pair: Pair, /) -> None: ...
    def wake(self) -> None: ...
    def refuse(self, span_id: int, place: Stream, at_ns: int, label: str, /) -> None: ...


class HeldTimes(NamedTuple):
    """What one of several pairs of a span has told."""

    context: Context
    stream: int
    start_ns: int
    end_ns: int
    label: str
    uncertainty_ns: int
    is_beside: bool


class Pair:
    """Two events of a context's pool, and what they time: one stretch of a stream.

    The recorder holds the first pair of a span while the span is open. It is the `whole`: where a span runs in several
    stretches (a generator), the others belong to it, and it is given back to the pool last. `begun` is written by the
    span's threads, `taken` by the resolver: with the last stretch of a span that has ended, its device time is counted.
    Times of the host are 0 until they are known. `handle` is what the stream is called by and may be another stream's
    later, `stream` its number, which is its own; `thread_id` is told where the handle means another stream to another
    thread.

    Where nobody can tell on which of several streams a span works, each has a pair: those `beside` the first one begin
    and end with it, and what all of them tell is `held` until the span is over.
    """

    __slots__ = (
        "attributes", "begin", "begin_key", "begin_ns", "begun", "beside", "beyond_ns", "context", "device_ns",
        "end_event", "end_key", "end_ns", "error", "handle", "held", "is_beside", "last_ns", "place", "row", "running",
        "site", "span_id", "stream", "taken", "thread_id", "timer", "whole",
    )  # fmt: skip

    def __init__(self, timer: Times, context: Context, begin: Any, end: Any, begin_key: Any, end_key: Any) -> None:
        self.timer = timer
        self.context = context
        self.begin, self.end_event = begin, end
        self.begin_key, self.end_key = begin_key, end_key
        self.clear()

    def clear(self) -> None:
        """As it lies in the pool."""
        self.handle = self.stream = self.thread_id = self.begin_ns = self.end_ns = self.error = 0
        self.place: AnchoredMoment | None = None
        self.whole: Pair | None = None
        self.running: Pair | None = None
        self.row: tuple[Any, int, int, int] | None = None
        self.span_id = self.begun = self.taken = 0
        self.device_ns = self.beyond_ns = self.last_ns = 0
        self.site: Any = None
        self.attributes: Any = None
        self.beside: Sequence[Pair] = ()
        self.is_beside = False
        self.held: list[HeldTimes] | None = None

    def pause(self) -> None:
        """A generator's body stands still."""
        pair, self.running = self.running, None
        if pair is not None:
            self.timer.end_pair(pair)

    def resume(self) -> None:
        """It goes on, wherever its work goes now."""
        if self.running is None:
            self.timer.begin_again(self)

    def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
        """The span has ended and lies in this ring, counted under this node: -1 where its time is that of another."""
        self.span_id = span_id
        self.row = (ring, index, start_ns, end_ns)
        pair = self.running
        if pair is not None:
            self.running = None
            self.timer.end_pair(pair)
        else:
            self.timer.finish(self)

    def cancel(self) -> None:
        """There is no span after all."""
        for other in self.beside:
            other.cancel()
        self.whole = self.running = None
        self.end_ns = -1
        self.timer.wake()  # or the pool runs dry by calls that do nothing

    def add(self, start_ns: int, end_ns: int) -> None:
        """One more stretch of the whole, in the order of time: time that two of them share counts once."""
        if start_ns < self.last_ns:
            start_ns = self.last_ns
        if end_ns > start_ns:
            self.device_ns += end_ns - start_ns
            if self.row is not None and end_ns > self.row[3]:  # else it ended before it did on the host
                self.beyond_ns += end_ns - max(start_ns, self.row[3])
            self.last_ns = end_ns


class Untimed:
    """Stands for the pair of a span that gets no device time, and tells why."""

    __slots__ = ("_at_ns", "_label", "_place", "_timer")

    def __init__(self, timer: Times, place: Stream, label: str, at_ns: int) -> None:
        self._timer, self._place, self._label, self._at_ns = timer, place, label, at_ns

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def cancel(self) -> None: ...

    def end(self, ring: Any, index: int, span_id: int, start_ns: int, end_ns: int) -> None:
        self._timer.refuse(span_id, self._place, self._at_ns, self._label)


class Context:
    """One context of a device: its pool, what is under way on its streams, and its clock."""

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
        """By stream: where the last begin lies that was placed; when the last end was recorded, and where it lies."""
        self.numbers: dict[int, int] = {}
        """By handle: the number of the stream that has it, or had it last."""
        self.shortest_ns = 0
        self.pending: dict[int, int] = {}
        """By stream: up to when the oldest end that is waited for had not happened."""
        self.next_anchor_ns = self.anchor_pause_ns = 0
        """When the device is asked for an anchor again, and how long after the last time, while it gives none."""
        self.next_watch_ns = 0
        self.watched: int | None = None
        """While it gives none: when an end is watched again, and the stream of which one was just seen to happen."""

    def learn(self, stream: int, number: int) -> None:
        """The number of the stream that a handle stands for now."""
        if len(self.numbers) >= STREAMS_KNOWN:
            self.numbers.clear()
        self.numbers[stream] = number
