"""Spans that wait for requests: which these are by what is known of them, and since when.

And batches outside of the sample, which wait until it is known of all of their requests whether these are kept.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from instrument.otlp.processor.keyed_requests import KEYS_KNOWN, KeyedRequests, batch_of
from instrument.otlp.processor.known_request import KeyedRequest
from instrument.recording.spans import BATCH_KEYS, Span

MOST_KEYS = 300_000
"""Keys of batches of a process that wait, which are 9 MB; of more the oldest are decided about by what is known."""

OF_A_BATCH = 16
"""As so many keys counts a batch beside those that it has, for it takes as much memory."""

Top = tuple[int, str, int]
"""A span that goes below its request: its id, its key and when it began."""


@dataclass(slots=True, eq=False)
class WaitingSpans:
    """Spans that wait for requests: the one that they serve, or those of the batches among them.

    Of a request that is not kept, and of what is in no tree that is, those alone are sent whose own request is kept.
    """

    spans: list[Span]
    keys: set[str]
    top: Top | None = None
    is_request: bool = False
    is_kept: bool = True
    by_chance: bool = False
    """True where the sample alone keeps the request. Such a part does not keep the request around it."""
    is_stray: bool = False
    is_noted: bool = False
    has_several: bool = False
    """Whether spans of it bear several keys: these may be those of several requests once more is known of these."""
    since_ns: int = field(default_factory=lambda: time.monotonic_ns())
    was_known: bool = False
    kept_ns: int = 0
    came_ns: int = field(default_factory=lambda: time.monotonic_ns())
    around: KeyedRequest | None = None
    """The request that one is a part of, as was known when it was last looked at."""

    @property
    def key(self) -> str:
        """The key of the request that spans wait for."""
        return "" if self.top is None else self.top[1]

    @property
    def is_part(self) -> bool:
        """Whether it goes below a request, as far as is known."""
        return not self.is_request or self.around is not None

    @property
    def start_ns(self) -> int:
        """When what waits began."""
        return self.spans[0].start_ns if self.top is None else self.top[2]


class WaitingBatches:
    """The batches of one process that the sample leaves out: those are sent that serve a request which is kept.

    They wait for the ends of all of their requests, for each is to be linked to them. Used by one thread.
    """

    def __init__(self, requests: KeyedRequests) -> None:
        self._requests = requests
        self._waiting: list[tuple[Span, int]] = []
        """Each with when one of its requests was seen to be open last."""
        self._taken: OrderedDict[int, None] = OrderedDict()
        """Those that wait, or were sent."""
        self._size = self._asked_ns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, span: Span) -> bool:
        """Whether a span is sent, or may yet be."""
        return span.span_id in self._taken

    def add(self, batches: Iterable[Span]) -> None:
        """Have batches wait."""
        for span in batches:
            keys = list(map(sys.intern, batch_of(span.attributes)))  # which are the same in many batches
            span.attributes = {**span.attributes, BATCH_KEYS: keys}
            self._waiting.append((span, time.monotonic_ns()))
            self._size += _size_of(span)
            self._taken[span.span_id] = None
        while len(self._taken) > max(KEYS_KNOWN, len(self._waiting)):
            self._taken.popitem(last=False)

    def due(self, patience_ns: int, every_ns: int, *, is_over: bool, at_once: bool) -> Iterator[Span]:
        """Those that can be sent, each as the root of a trace: what is above them is not. Asks every so often."""
        now_ns = time.monotonic_ns()
        if now_ns - self._asked_ns < every_ns and self._size <= MOST_KEYS and not (is_over or at_once):
            return
        self._asked_ns = now_ns
        waiting, self._waiting = self._waiting, []
        for span, since_ns in waiting:
            keys, is_beyond = batch_of(span.attributes), self._size > MOST_KEYS
            is_open = any((one := self._requests.of(key, span.start_ns)) is not None and one.is_open for key in keys)
            seen_ns = now_ns if is_open else since_ns
            is_soon = is_open or (not at_once and now_ns - self._requests.lag_ns - seen_ns < patience_ns)
            if is_soon and not (is_over or is_beyond):
                self._waiting.append((span, seen_ns))
                continue
            self._size -= _size_of(span)
            requests = (self._requests.of(key, span.start_ns) for key in keys)
            if any(one is not None and one.is_kept for one in requests):
                span.parent_id, span.root_id, span.remote = 0, span.span_id, None
                yield span
            else:
                self._taken.pop(span.span_id, None)
                if is_soon and not is_over:
                    self._requests.note_left_out(1)


def _size_of(batch: Span) -> int:
    return OF_A_BATCH + len(batch_of(batch.attributes))
