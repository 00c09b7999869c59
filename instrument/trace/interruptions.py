"""Interruptions as a collector gets them: events of the spans that they hit, in place of traces of one span.

A blocked event loop hits the requests and the roots that were open on its thread, a garbage collection those of its
process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from instrument.recording.spans import Span, is_blocked_loop, is_interruption

NEWEST = 1_000
"""Interruptions of a process that are kept for the spans that end after them."""


class Interruptions:
    """The newest interruptions of one process."""

    def __init__(self) -> None:
        self._newest: list[Span] = []

    def attach(self, trees: Iterable[list[Span]]) -> list[list[Span]]:
        """Return the trees without interruptions, those in their spans and those before noted as what hit these."""
        found: list[list[Span]] = []
        left: list[list[Span]] = []
        for spans in trees:
            (found if len(spans) == 1 and is_interruption(spans[0].site) else left).append(spans)
        self.note(spans[0] for spans in found)
        if self._newest:
            for spans in left:
                self.hit(spans)
        return left

    def note(self, spans: Iterable[Span]) -> None:
        """Keep interruptions, the newest of all."""
        found = list(spans)
        if found:
            self._newest = sorted([*self._newest, *found], key=attrgetter("end_ns"))[-NEWEST:]

    def hit(self, spans: Sequence[Span]) -> None:
        """Note at requests and at roots what interrupted them."""
        for span in spans:
            if span.site.kind == "request" or span.span_id == span.root_id:
                span.interruptions = self._hitting(span)

    def _hitting(self, span: Span) -> tuple[Span, ...]:
        found = []
        for one in reversed(self._newest):
            if one.end_ns <= span.start_ns:
                break
            if one.start_ns < span.end_ns and (one.thread_id == span.thread_id or not is_blocked_loop(one.site)):
                found.append(one)
        return tuple(reversed(found))
