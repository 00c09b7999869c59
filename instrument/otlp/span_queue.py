"""Queues packed export requests for a collector, and counts how many of their spans are delivered or lost."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from instrument import clock
from instrument.otlp.export_facts import Ids
from instrument.otlp.metrics_queue import Metrics
from instrument.otlp.packing import Body, pack_resource
from instrument.otlp.senders import Response
from instrument.recording.spans import Origin
from instrument.runtime.unpatched import RLock

if TYPE_CHECKING:
    from instrument.otlp.packed_spans import SpanIds
    from instrument.trace.columns import Columns, Int64s

QUEUE_BYTES = 16 << 20
"""The maximum number of bytes of requests that wait for delivery. Above it, the oldest requests are dropped."""

CLOCK_RENEWAL_NS = 60 * 10**9
CLOCK_DRIFT_NS = 10**6
"""The drift of the wall clock in ns above which the drift is corrected."""

CLOCK_STEP_NS = 5 * 10**8
"""The maximum change of the wall clock in ns that counts as drift. A larger change is a step."""

FATES = ("offered", "exported", "rejected", "failed", "dropped", "pending")
SENDING = "sending"


@dataclass(eq=False)
class Source:
    """A process whose spans are sent. `counts` has its spans by fate, `metrics` its metrics for the collector.

    `resource` returns the attributes of its resource, `threads` the names of its threads by native id. `origin`
    converts times to the wall clock. `before` has the time of the wall clock's last step, and the origin for spans from
    before the step.
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

    def update_clock_origin(self) -> None:
        monotonic_ns, realtime_ns = clock.read_clocks()
        since_ns, self.looked_ns = self.looked_ns, monotonic_ns
        moved_ns = abs(realtime_ns - self.origin.realtime_of(monotonic_ns))
        if moved_ns > CLOCK_STEP_NS:
            self.before = since_ns, self.origin
        elif moved_ns <= CLOCK_DRIFT_NS or monotonic_ns - self.renewed_ns < CLOCK_RENEWAL_NS:
            return
        self.origin = replace(self.origin, monotonic_ns=monotonic_ns, realtime_ns=realtime_ns)
        self.renewed_ns = monotonic_ns

    def pack_requests(
        self, trace: Columns, rows: Int64s, most_bytes: int, ids: SpanIds | None = None, **facts: Any
    ) -> Iterator[Body]:
        from instrument.otlp.packed_spans import SpanIds, SpanPacker
        from instrument.otlp.span_forms import PROTOBUF, split_into_requests
        from instrument.trace.indices import Groups, rank_distinct

        resource, threads, ids = pack_resource(self.resource()), self.threads(), ids or SpanIds(trace, self.ids)
        parts = [(self.origin, rows)]
        if self.before is not None:
            stepped_ns, before = self.before
            roots, trees = rank_distinct(trace.root_id[rows])
            is_before = Groups(trees, len(roots)).min_by_group(trace.start_ns[rows], 0)[trees] < stepped_ns
            parts = [(before, rows[is_before]), (self.origin, rows[~is_before])]
        for origin, tree_rows in parts:
            packer = SpanPacker(PROTOBUF, trace, ids, origin, threads, **facts)
            yield from split_into_requests(packer.pack(tree_rows), resource, most_bytes)


class QueuedRequest(NamedTuple):
    """A packed request in the queue, or a part of it."""

    data: bytes
    spans: int
    source: Source


class RequestQueue:
    """A bounded queue of requests to send, and the requests in flight: the request that is being sent, or its parts.

    The queue counts spans by fate. `reason` is the cause of the latest loss. Any thread may call any method. The lock
    is reentrant, because a signal handler may interrupt its owner.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.is_closed = False
        """True once sending has ended. Offered spans are then dropped."""
        self.reason = ""
        self._waiting: deque[QueuedRequest] = deque()
        self._in_flight: list[QueuedRequest] = []
        self.queued_bytes = 0
        self._counts = dict.fromkeys((*FATES, "requests"), 0)

    def offer_request(self, body: Body, source: Source) -> None:
        """Queue one request. If the queue exceeds `QUEUE_BYTES`, drop the oldest requests."""
        with self.lock:
            self._count_offered_spans(source, body.spans)
            self._waiting.append(QueuedRequest(*body, source))
            self.queued_bytes += len(body.data)
            self._drop_excess_requests()

    @property
    def pending_span_count(self) -> int:
        return self._counts["pending"]

    def count_fates(self) -> Mapping[str, int]:
        """Return the number of spans per fate, such as ``exported``, and the number of settled ``requests``.

        offered = exported + rejected + failed + dropped + pending. A device interval counts as a span.
        """
        with self.lock:
            return dict(self._counts)

    def take_next_request(self) -> QueuedRequest | None:
        """Move the oldest request into flight, and return it."""
        with self.lock:
            if not self._waiting:
                return None
            self._in_flight.append(self._remove_oldest())
            return self._in_flight[-1]

    def replace_request(self, request: QueuedRequest, parts: Sequence[QueuedRequest]) -> None:
        with self.lock:
            if request in self._in_flight:
                self._in_flight[:] = [*(peer for peer in self._in_flight if peer is not request), *parts]

    def settle_request(self, request: QueuedRequest, verdict: Response) -> None:
        """Count the spans of a request in flight by fate, unless the request was given up."""
        with self.lock:
            request.source.counts[SENDING] = 0
            if request in self._in_flight:
                self._in_flight.remove(request)
                rejected = min(verdict.rejected, request.spans) if verdict.taken else 0
                self._count_spans(request.source, "rejected", rejected)
                self._count_spans(request.source, "exported" if verdict.taken else "failed", request.spans - rejected)
            self._counts["requests"] += 1

    def count_failed(self, spans: int, source: Source, reason: str) -> None:
        with self.lock:
            self._count_offered_spans(source, spans)
            self.reason = reason
            self._count_spans(source, "failed", spans)

    def give_up_requests(self, reason: str) -> None:
        """Count the spans in flight as failed. If the queue is closed, count the waiting spans as dropped."""
        with self.lock:
            if self._in_flight or (self.is_closed and self._waiting):
                self.reason = reason
            while self._in_flight:
                request = self._in_flight.pop()
                request.source.counts[SENDING] = 0
                self._count_spans(request.source, "failed", request.spans)
            self._drop_excess_requests()

    def _drop_excess_requests(self) -> None:
        while self._waiting and (self.is_closed or self.queued_bytes > QUEUE_BYTES):
            request = self._remove_oldest()
            self._count_spans(request.source, "dropped", request.spans)

    def _remove_oldest(self) -> QueuedRequest:
        request = self._waiting.popleft()
        self.queued_bytes -= len(request.data)
        return request

    def _count_offered_spans(self, source: Source, spans: int) -> None:
        for counts in (self._counts, source.counts):
            counts["offered"] += spans
            counts["pending"] += spans

    def _count_spans(self, source: Source, fate: str, spans: int) -> None:
        if spans:
            for counts in (self._counts, source.counts):
                counts[fate] += spans
                counts["pending"] -= spans
