"""Links from batches to the requests that they serve, of what one process sends to a collector while it runs.

A batch ends before its requests do, and whether one of these is kept is known at its end. So what has a batch in it
waits until then, for some seconds at most, and is sent with the links that are known by then.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from instrument.recording.remote_parents import LinkedRequest
from instrument.recording.spans import BATCH_KEYS, KEY, Span

WAIT_NS = 5 * 10**9
"""How long a batch waits for the ends of its requests."""

MOST_SPANS = 20_000
"""How many spans wait; of more the oldest go on."""

KEYS_KNOWN = 10_000
"""How many keys are remembered: those that ended last."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """Spans with batches in them, since when they wait, and for which keys."""

    spans: list[Span]
    since_ns: int
    missing: set[str]


class BatchLinks:
    """Takes kept trees, and hands them on to `send`: those with batches later, with their links. For one thread."""

    def __init__(self, send: Callable[[list[Span]], object]) -> None:
        self._send = send
        self.begin()

    def begin(self) -> None:
        """Begin anew, with nothing known and nothing waiting."""
        self._requests: OrderedDict[str, tuple[int, int, LinkedRequest]] = OrderedDict()
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self._by_key: dict[str, set[int]] = {}
        self._number = self._spans = 0

    def put(self, spans: list[Span]) -> None:
        """Take in one tree, or a part of it. A request comes first among its spans."""
        first = spans[0]
        if first.site.kind == "request" and first.span_id == first.root_id:
            self._note(spans)
        missing = {key for span in spans for key in _keys(span) if not self._of(key, span.start_ns)}
        if missing:
            self._wait(_Waiting(spans, time.monotonic_ns(), missing))
        else:
            self._go_on(spans)

    def _note(self, spans: Sequence[Span]) -> None:
        request = spans[0]
        its = request.start_ns, request.end_ns, LinkedRequest(request.span_id, request.root_id, request.remote)
        for key in {key for span in spans if isinstance(key := span.attributes.get(KEY), str)}:
            self._requests[key] = its
            self._requests.move_to_end(key)
            if len(self._requests) > KEYS_KNOWN:
                self._requests.popitem(last=False)
            for number in self._by_key.pop(key, ()):
                waiting = self._waiting[number]
                waiting.missing.discard(key)
                if not waiting.missing:
                    self._release(number)

    def _wait(self, one: _Waiting) -> None:
        self._number += 1
        self._waiting[self._number] = one
        self._spans += len(one.spans)
        for key in one.missing:
            self._by_key.setdefault(key, set()).add(self._number)
        while self._spans > MOST_SPANS:
            self._release(next(iter(self._waiting)))

    def send_due(self, *, is_last: bool) -> None:
        """Send what has waited long enough; the last time, all."""
        before_ns = time.monotonic_ns() - WAIT_NS
        while self._waiting:
            number = next(iter(self._waiting))
            if not is_last and self._waiting[number].since_ns > before_ns:
                return
            self._release(number)

    def _release(self, number: int) -> None:
        one = self._waiting.pop(number)
        self._spans -= len(one.spans)
        for key in one.missing:
            waiting = self._by_key.get(key, set())
            waiting.discard(number)
            if not waiting:
                self._by_key.pop(key, None)
        self._go_on(one.spans)

    def _go_on(self, spans: list[Span]) -> None:
        for span in spans:
            found = dict.fromkeys(filter(None, (self._of(key, span.start_ns) for key in _keys(span))))
            if found:
                span.links = tuple(found)
        self._send(spans)

    def _of(self, key: str, at_ns: int) -> LinkedRequest | None:
        """The request that a key named at a time, if it has been kept."""
        start_ns, end_ns, request = self._requests.get(key, (0, -1, None))
        return request if start_ns <= at_ns <= end_ns else None


def _keys(span: Span) -> Sequence[str]:
    found = span.attributes.get(BATCH_KEYS) if span.attributes else None
    return [key for key in found if isinstance(key, str)] if isinstance(found, list | tuple) else ()
