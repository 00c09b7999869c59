"""The queue of kept trees on their way to a collector, and the fate of every span in numbers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from instrument import clock
from instrument.otlp.metrics import Metrics
from instrument.otlp.packing import Ids
from instrument.otlp.senders import Response
from instrument.recording.spans import Origin, Span
from instrument.runtime.unpatched import Lock

QUEUE_SPANS = 65_536
"""Spans that may wait for delivery; beyond it the oldest whole trees go."""

QUEUE_BYTES = 16 << 20
"""Bytes of packed requests that may wait for delivery; beyond it the oldest go."""

CLOCK_RENEWAL_NS = 60 * 10**9
CLOCK_DRIFT_NS = 10**6
"""Nanoseconds: the least age of a reading of the wall clock, and the least drift, before a new reading is used.
Spans of one tree that two readings place nest a little less well, so new readings are rare."""

CLOCK_STEP_NS = 5 * 10**8
"""The difference that is no drift but a step, as of a machine that was suspended."""

PATIENCE_S = 0.1
"""How long the lock is waited for where a signal handler may have interrupted its holder."""

_OUTCOMES = ("exported", "rejected", "failed", "dropped")  # of a tree in several requests, the rightmost counts
_EXPORTED, _REJECTED, _FAILED, _DROPPED = range(4)
FATES = ("offered", *_OUTCOMES, "pending")
_INTERVALS, _SENDING = "intervals", "sending"


@dataclass(eq=False)
class Source:
    """One process whose spans are sent: what they are called, and what has become of them.

    `resource` tells the attributes of its resource, `threads` the names of its threads by native id. `counts` are its
    spans by fate, `metrics` its own on their way. `origin` has the clocks by which spans are sent; `before` is the time
    of the wall clock's last step, and the origin of what began earlier.
    """

    ids: Ids
    origin: Origin
    threads: Callable[[], Mapping[int, str]]
    resource: Callable[[], Mapping[str, object]]
    counts: Counter[str] = field(default_factory=Counter)
    metrics: Metrics | None = None
    before: tuple[int, Origin] | None = None
    looked_ns: int = field(default_factory=time.monotonic_ns)
    renewed_ns: int = field(default_factory=time.monotonic_ns)

    def look_at_clock(self) -> None:
        """Go by the wall clock as it is now, where it has stepped, or has drifted for a while."""
        monotonic_ns, realtime_ns = clock.pair()
        since_ns, self.looked_ns = self.looked_ns, monotonic_ns
        moved_ns = abs(realtime_ns - self.origin.realtime_of(monotonic_ns))
        if moved_ns > CLOCK_STEP_NS:
            self.before = since_ns, self.origin
        elif moved_ns <= CLOCK_DRIFT_NS or monotonic_ns - self.renewed_ns < CLOCK_RENEWAL_NS:
            return
        self.origin = replace(self.origin, monotonic_ns=monotonic_ns, realtime_ns=realtime_ns)
        self.renewed_ns = monotonic_ns

    def origin_at(self, monotonic_ns: int) -> Origin:
        """Return the origin by whose clocks a tree is sent that began then."""
        stepped_ns, before = self.before or (0, self.origin)
        return before if monotonic_ns < stepped_ns else self.origin


@dataclass(slots=True, eq=False)
class QueuedTree:
    """One kept tree, or one request, on its way. `size` counts its spans on the wire, `left` those of unknown fate."""

    spans: Sequence[Span]
    source: Source
    size: int
    left: int
    outcome: int = _EXPORTED
    number: int = 0  # in the order of being offered
    request: bytes = b""
    """The request, where the spans are packed."""


class SpanQueue:
    """Kept trees that wait to be sent, and those under way, within a bound; counts what became of each span.

    `lock` is held by whoever calls what says so. `reason` is why the last spans that were lost were lost.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.is_closed = False
        """Whether nothing more is sent: what is offered then is dropped."""
        self.reason = ""
        self._inbox: deque[QueuedTree] = deque()
        self._queue: deque[QueuedTree] = deque()
        self._queued_spans = self._queued_bytes = 0
        self._in_flight: set[QueuedTree] = set()
        self._counts = dict.fromkeys((*FATES, *(f"{fate}_trees" for fate in FATES), _INTERVALS, "requests"), 0)

    def offer(self, spans: Sequence[Span], source: Source) -> bool:
        """Hand over one kept tree, without waiting. True if it will be sent unless newer ones push it out."""
        size = len(spans) + sum([len(span.device) for span in spans])
        self._inbox.append(QueuedTree(spans, source, size, size))
        self._try_take_in()
        return size <= QUEUE_SPANS and not self.is_closed

    def submit(self, request: bytes, spans: int, source: Source) -> bool:
        """Hand over one packed request, likewise."""
        self._inbox.append(QueuedTree((), source, spans, spans, request=request))
        self._try_take_in()
        return not self.is_closed

    def _try_take_in(self) -> None:
        if self.lock.acquire(blocking=False):  # whoever holds it, or the thread's next round, takes it in instead
            try:
                self._take_in()
            finally:
                self.lock.release()

    @property
    def queued(self) -> int:
        """How many spans wait."""
        return self._queued_spans

    @property
    def pending(self) -> int:
        """How many spans are on their way."""
        return self._counts["pending"]

    def counts(self) -> Mapping[str, int]:
        """Spans by fate (``exported``), trees by fate (``exported_trees``) and settled ``requests``, since it was made.

        offered = exported + rejected + failed + dropped + pending, in both units. A device interval counts as a span,
        and among the ``intervals``, an offer as a tree, and a tree as exported only if all its spans surely were.
        """
        held = self.lock.acquire(timeout=PATIENCE_S)  # not for ever: a signal handler may have interrupted the holder
        try:
            if held:
                self._take_in()
            return dict(self._counts)
        finally:
            if held:
                self.lock.release()

    def is_pending(self, newest: int) -> bool:
        """Whether the fate of any of the trees up to this number is unknown, as far as that can be told."""
        held = self.lock.acquire(timeout=PATIENCE_S)
        try:
            return not held or any(tree.number <= newest for tree in (*self._in_flight, *self._queue))
        finally:
            if held:
                self.lock.release()

    def gather(self) -> int:
        """Put together what waits of each source; how many trees wait."""
        with self.lock:
            self._take_in()
            if len({id(tree.source) for tree in self._queue}) > 1:
                self._queue = deque(sorted(self._queue, key=lambda tree: id(tree.source)))
            return len(self._queue)

    def take(self) -> QueuedTree | None:
        """With the lock: the next tree, which is under way from now on."""
        if not self._queue:
            return None
        tree = self._queue.popleft()
        self._remove(tree)
        self._in_flight.add(tree)
        return tree

    def fail(self, tree: QueuedTree, reason: str) -> None:
        """A tree cannot be sent."""
        with self.lock:
            if tree in self._in_flight:
                self.reason = reason
                self._settle(tree, tree.left, _FAILED)

    def recount(self, tree: QueuedTree, size: int) -> None:
        """A tree has grown or shrunk since it was offered, for instance by a device interval that came late."""
        with self.lock:
            if tree in self._in_flight:
                self._counts[_INTERVALS] += size - tree.left
                for counts in (self._counts, tree.source.counts):
                    for fate in ("offered", "pending"):
                        counts[fate] += size - tree.left
                tree.left = tree.size = size
                self._settle(tree, 0, _EXPORTED)

    def note_sending(self, source: Source, spans: int) -> None:
        """So many spans of a source are about to be sent."""
        with self.lock:
            source.counts[_SENDING] = spans

    def settle_request(self, owners: Sequence[QueuedTree], verdict: Response) -> None:
        """With the lock: what became of a request, with the tree of each of its spans, all of one source."""
        outcome = _FAILED if not verdict.taken else _REJECTED if verdict.rejected else _EXPORTED
        source = owners[0].source
        source.counts[_SENDING] = 0
        # Who could not wait for the lock may have given some up already.
        found = {tree: spans for tree, spans in Counter(owners).items() if tree in self._in_flight}
        for tree, spans in found.items():
            self._settle(tree, spans, outcome)
        if outcome == _REJECTED:
            taken = max(sum(found.values()) - verdict.rejected, 0)
            for counts in (self._counts, source.counts):
                counts["rejected"] -= taken
                counts["exported"] += taken
        self._counts["requests"] += 1

    def give_up(self, reason: str) -> None:
        """With the lock: settle what is under way as failed and, once closed, what waits as dropped."""
        if self._in_flight or (self.is_closed and self._queue):
            self.reason = reason
        for tree in list(self._in_flight):
            tree.source.counts[_SENDING] = 0
            self._settle(tree, tree.left, _FAILED)
        self._take_in()
        while self.is_closed and self._queue:
            self._drop_oldest()

    def _take_in(self) -> None:
        """With the lock: move what was offered to the queue, and keep the queue within its bound."""
        counts = self._counts
        while self._inbox:
            tree = self._inbox.popleft()
            counts[_INTERVALS] += 0 if tree.request else tree.size - len(tree.spans)
            for fate in ("offered", "pending"):
                counts[fate] += tree.size
                counts[f"{fate}_trees"] += 1
                tree.source.counts[fate] += tree.size
            tree.number = counts["offered_trees"]
            if self.is_closed or (tree.size > QUEUE_SPANS and not tree.request):
                self._settle(tree, tree.size, _DROPPED)
                continue
            self._queue.append(tree)
            self._queued_spans += tree.size
            self._queued_bytes += len(tree.request)
            while self._queued_spans > QUEUE_SPANS or self._queued_bytes > QUEUE_BYTES:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        tree = self._queue.popleft()
        self._remove(tree)
        self._settle(tree, tree.size, _DROPPED)

    def _remove(self, tree: QueuedTree) -> None:
        """With the lock: forget the size of a tree that has left the queue."""
        self._queued_spans -= tree.size
        self._queued_bytes -= len(tree.request)

    def _settle(self, tree: QueuedTree, spans: int, outcome: int) -> None:
        """With the lock: some spans of a tree have met their fate."""
        tree.left -= spans
        tree.outcome = max(tree.outcome, outcome)
        for counts in (self._counts, tree.source.counts):
            counts[_OUTCOMES[outcome]] += spans
            counts["pending"] -= spans
        if not tree.left:
            self._counts[f"{_OUTCOMES[tree.outcome]}_trees"] += 1
            self._counts["pending_trees"] -= 1
            self._in_flight.discard(tree)
