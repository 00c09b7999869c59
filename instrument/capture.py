"""Which trees are kept: each request's spans are held until it ends, and its end decides.

A request is kept when it is sampled, slow or failed. Trees without a request (an engine's steps, background work) are
kept by the sample alone, and at once, because such a root may stay open for the life of the process.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from instrument.profile import Capture, Rate
from instrument.recorder import Recorder
from instrument.ring import Row
from instrument.spans import RemoteParent, Span

Held = tuple[Row, int]
"""A row and the native id of its thread."""

HELD_ROWS = 200_000
KEPT_ROOTS = 10_000


class Trees:
    """Groups rows by tree as they finish and hands the trees that are kept to `keep`. Used by one thread.

    `keep(spans)` gets the spans of one tree. Spans of a kept request that end after it are handed over as they come;
    they bear the `remote` of their root, so that they still find its trace.
    """

    def __init__(
        self,
        recorder: Recorder,
        capture: Capture,
        spans_per_request: int,
        keep: Callable[[list[Span]], None],
    ) -> None:
        self._recorder = recorder
        self._capture = capture
        self._spans_per_request = spans_per_request
        self._keep = keep
        self._requests: OrderedDict[int, list[Held]] = OrderedDict()
        self._held_rows = 0
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._recent: deque[tuple[int, list[Held]]] = deque()
        self._recent_rows = 0
        self._allowance = _Allowance(capture.limit)
        self._counts: Counter[str] = Counter()

    def change(self, capture: Capture, spans_per_request: int) -> None:
        """Decide by other settings from now on."""
        if capture.limit != self._capture.limit:
            self._allowance = _Allowance(capture.limit)
        self._capture, self._spans_per_request = capture, spans_per_request

    def take(self, batches: list[tuple[int, list[Row]]]) -> list[tuple[int, int]]:
        """Sort new rows into their trees. Returns start and end of each request that ended, in the order of ends."""
        loose: dict[int, list[Span]] = {}
        ended: list[tuple[Row, int]] = []
        for thread_id, rows in batches:
            for row in rows:
                site = self._recorder.site_of(row)
                if row[1] == row[3] and site.kind == "request":
                    ended.append((row, thread_id))
                elif row[3] in self._kept:
                    if self._kept[row[3]].takes_one(self._spans_per_request):
                        loose.setdefault(row[3], []).append(self._recorder.span(row, thread_id))
                    else:
                        self._counts["spans beyond spans_per_request"] += 1
                elif self._recorder.in_request(row):
                    self._hold(row, thread_id)
                elif self._sampled(row[3]):
                    loose.setdefault(row[3], []).append(self._recorder.span(row, thread_id))
        # A request's children may lie in the ring of another thread, read after its own: decide when all are sorted.
        ended.sort(key=lambda held: held[0][6])
        for row, thread_id in ended:
            self._end_request(row, thread_id)
        for root_id, spans in loose.items():
            kept = self._kept.get(root_id)
            for span in spans:
                span.remote = kept.remote if kept is not None else None
            self._keep(spans)
        return [(row[5], row[6]) for row, _ in ended]

    def _hold(self, row: Row, thread_id: int) -> None:
        if row[3] in self._passed:
            return
        held = self._requests.setdefault(row[3], [])
        if len(held) >= self._spans_per_request:
            self._counts["spans beyond spans_per_request"] += 1
            return
        held.append((row, thread_id))
        self._held_rows += 1
        while self._held_rows > HELD_ROWS:
            _, oldest = self._requests.popitem(last=False)
            self._held_rows -= len(oldest)
            self._counts["spans of requests that stayed open too long"] += len(oldest)

    def _end_request(self, row: Row, thread_id: int) -> None:
        held = self._requests.pop(row[3], [])
        self._held_rows -= len(held)
        held.append((row, thread_id))
        self._counts["requests"] += 1
        remote = (row[10] or {}).get(RemoteParent)
        if self._asked_for(row, remote):
            self._hand_over(held, remote)
        elif self._stands_out(row):
            if self._allowance.take(row[6]):
                self._keep_before(row[5])
                self._hand_over(held, remote)
            else:
                self._counts["requests beyond the capture limit"] += 1
        else:
            self._pass(row, held)

    def _asked_for(self, row: Row, remote: RemoteParent | None) -> bool:
        """A caller that traces has decided already; otherwise the sample does."""
        return bool(remote.flags & 1) if remote is not None else self._sampled(row[3])

    def _stands_out(self, row: Row) -> bool:
        slow_ns = self._capture.slow_ns
        return (self._capture.errors and row[9] is not None) or (slow_ns is not None and row[6] - row[5] >= slow_ns)

    def _sampled(self, root_id: int) -> bool:
        """The same answer for every span of a tree: the id, scrambled by Knuth's multiplicative hash."""
        return (root_id * 0x9E3779B97F4A7C15 & (1 << 64) - 1) < self._capture.sample * (1 << 64)

    def _hand_over(self, held: list[Held], remote: RemoteParent | None) -> None:
        root_id = held[-1][0][3]
        self._kept[root_id] = _Kept(remote, len(held) - 1)
        if len(self._kept) > KEPT_ROOTS:
            self._kept.popitem(last=False)
        self._counts["requests kept"] += 1
        # Root first, the rest in the order in which they ended.
        self._keep([self._recorder.span(row, thread_id) for row, thread_id in (held[-1], *held[:-1])])

    def _pass(self, row: Row, held: list[Held]) -> None:
        """Leave a request to the ring, held a while longer where a later one may want what came before it."""
        self._passed[row[3]] = None
        if len(self._passed) > KEPT_ROOTS:
            self._passed.popitem(last=False)
        if not self._capture.before_ns:
            return
        self._recent.append((row[6], held))
        self._recent_rows += len(held)
        while self._recent and (self._recent[0][0] < row[6] - self._capture.before_ns or self._recent_rows > HELD_ROWS):
            self._recent_rows -= len(self._recent.popleft()[1])

    def _keep_before(self, start_ns: int) -> None:
        while self._recent:
            end_ns, held = self._recent.popleft()
            self._recent_rows -= len(held)
            if end_ns >= start_ns - self._capture.before_ns:
                self._hand_over(held, (held[-1][0][10] or {}).get(RemoteParent))

    def counts(self) -> Mapping[str, Any]:
        """Requests seen and kept, and what was not kept, by reason."""
        return dict(self._counts)


@dataclass(slots=True)
class _Kept:
    """A request that was handed over, and how many spans below it. A task that it has left behind may add to them."""

    remote: RemoteParent | None
    spans: int

    def takes_one(self, limit: int) -> bool:
        self.spans += 1
        return self.spans <= limit


class _Allowance:
    """A token bucket: at most `count` in any `per_ns`, refilled evenly. None allows everything."""

    def __init__(self, rate: Rate | None) -> None:
        self._rate = rate
        self._tokens = float(rate.count) if rate is not None else 0.0
        self._at_ns = 0

    def take(self, now_ns: int) -> bool:
        if self._rate is None:
            return True
        if self._at_ns:
            refill = (now_ns - self._at_ns) * self._rate.count / self._rate.per_ns
            self._tokens = min(self._tokens + max(refill, 0.0), float(self._rate.count))
        self._at_ns = now_ns
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
