"""Which spans a view is made from, and what it says where it found none of what it is about."""

from __future__ import annotations

from dataclasses import dataclass

from instrument.report.table import number, wrapped
from instrument.report.view import Recording

NO_EVENTS = "no events"
"""Why a span that asked for device time has none, where no interval says it."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which spans a report is made from, and of what time it can tell shares, counted from the trace's start.

    `complete` tells that no span was overwritten by a newer one.
    """

    spans: int
    complete: bool
    since_ns: int
    until_ns: int

    @classmethod
    def of_recording(cls, recording: Recording) -> Coverage:
        """That of the spans that are held."""
        facts = recording.facts
        first, last = facts.held
        return cls(len(recording.columns), first == facts.start_ns, first - facts.start_ns, last - facts.start_ns)

    def lines(self) -> list[str]:
        since, until = number(self.since_ns / 1e9), number(self.until_ns / 1e9)
        if self.complete:
            return [f"Spans: all {self.spans} that were kept, from {since} s to {until} s"]
        return [
            f"Spans: the newest {self.spans} are held, none is missing from {since} s to {until} s; of all that",
            "ended before there are totals",
        ]

    def none_held(self, what: str, otherwise: str) -> list[str]:
        """Return how to have some recorded, for a view that found none; or that older ones may be gone."""
        return none_held(what, otherwise, complete=self.complete)


def none_held(what: str, otherwise: str, *, complete: bool) -> list[str]:
    """The same where the spans are `complete`, or not."""
    if complete:
        return wrapped(otherwise)
    return wrapped(
        f"No {what} is among the spans that are still held; older ones were overwritten. Raise `limits.ring` in the "
        "profile, or look at the `events` view, which counts all."
    )
