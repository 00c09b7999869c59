"""Spans that wait for requests: which these are by what is known of them, and since when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from instrument.otlp.processor.known_request import KeyedRequest
from instrument.recording.spans import Span

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
