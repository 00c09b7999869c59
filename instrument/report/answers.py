"""How the requests of an endpoint were answered: statuses by their class, how fast, and the times of streamed answers.

All of it is in the attributes of request spans, for which `requests:` in the profile sees to. A stream is an answer in
parts: its items are events of server-sent events, messages, or chunks. The time of an item is that from the first item
to the last one, shared evenly by those after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from instrument.recorder.http_status import STATUS
from instrument.recording.histogram import percentiles_of
from instrument.recording.spans import FIRST_ITEM, ITEMS, LAST_ITEM, LONGEST_GAP
from instrument.trace.columns import Attributes, Int64s
from instrument.trace.forest import NONE

CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")

TOLD = (STATUS, FIRST_ITEM, ITEMS, LAST_ITEM, LONGEST_GAP)


@dataclass(frozen=True, slots=True)
class StreamedAnswers:
    """The streamed answers of an endpoint: how many, their items in all, percentiles of the time to the first item, and
    of the time of an item over the streams that had more than one. None where no stream had."""

    count: int
    items: int
    first_p50_ns: int
    first_p99_ns: int
    item_p50_ns: int | None
    item_p99_ns: int | None
    longest_gap_ns: int | None


@dataclass(frozen=True, slots=True)
class Answers:
    """What the spans of requests say of their answers, a row for each request, `NONE` where one does not say it."""

    status: Int64s
    first_ns: Int64s
    items: Int64s
    last_ns: Int64s
    longest_gap_ns: Int64s

    @classmethod
    def of(cls, attributes: Attributes, rows: Int64s) -> Answers:
        """Those of the requests in some rows, which are in order."""
        return cls(*(_numbers(attributes, name, rows) for name in TOLD))

    def only(self, places: Int64s) -> Answers:
        """Those of some of the requests."""
        columns = self.status, self.first_ns, self.items, self.last_ns, self.longest_gap_ns
        return Answers(*(column[places] for column in columns))

    def told(self) -> Int64s:
        """The places of requests of which anything is known."""
        return np.flatnonzero((self.status != NONE) | (self.first_ns != NONE))

    def statuses(self) -> dict[str, int]:
        """How many answers there were of each class, in their order."""
        counts = np.bincount(self.status.clip(0, 600) // 100, minlength=7)[1:6].tolist()
        return {name: count for name, count in zip(CLASSES, counts, strict=True) if count}

    def streams(self) -> StreamedAnswers | None:
        """Those in parts, None without any."""
        its = self.only(np.flatnonzero((self.first_ns != NONE) & (self.items > 0)))
        if not len(its.items):
            return None
        has_more = (its.last_ns != NONE) & (its.items > 1)
        per_item_ns = np.maximum(its.last_ns - its.first_ns, 0)[has_more] // (its.items[has_more] - 1)
        first_p50_ns, first_p99_ns = percentiles_of(np.sort(its.first_ns).tolist(), (0.5, 0.99))
        longest_ns = int(its.longest_gap_ns.max())
        return StreamedAnswers(
            len(its.items),
            sum(its.items.tolist()),
            first_p50_ns,
            first_p99_ns,
            *_both(np.sort(per_item_ns).tolist()),
            None if longest_ns == NONE else longest_ns,
        )


def _both(times: Sequence[int]) -> tuple[int | None, int | None]:
    if not times:
        return None, None
    p50_ns, p99_ns = percentiles_of(times, (0.5, 0.99))
    return p50_ns, p99_ns


def _numbers(attributes: Attributes, name: str, rows: Int64s) -> Int64s:
    """An attribute that is a number, as no file need have it."""
    found = np.full(len(rows), NONE, dtype=np.int64)
    places = np.flatnonzero(np.isin(rows, attributes.having(name)))
    for place, value in zip(places.tolist(), attributes.values(name, rows[places]), strict=True):
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
            found[place] = value
    return found
