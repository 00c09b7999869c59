"""How the requests of an endpoint were answered: statuses by their class, how fast, and the times of streamed answers.

All of it is in the attributes of request spans, for which `requests:` in the profile sees to. A stream is an answer in
parts: its items are events of server-sent events, messages, or chunks. The time of an item is that from the first item
to the last one, shared evenly by those after the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from instrument.recorder.http_status import STATUS
from instrument.recording.histogram import percentiles_of
from instrument.recording.spans import FIRST_ITEM, ITEMS, LAST_ITEM, LONGEST_GAP

CLASSES = ("1xx", "2xx", "3xx", "4xx", "5xx")


@dataclass(frozen=True, slots=True)
class Streams:
    """The streamed answers of an endpoint: how many, their items in all, percentiles of the time to the first item, and
    of the time of an item over the streams that had more than one. None where no stream had."""

    count: int
    items: int
    first_p50_ns: int
    first_p99_ns: int
    item_p50_ns: int | None
    item_p99_ns: int | None
    longest_gap_ns: int | None


@dataclass(slots=True)
class Answers:
    """What the spans of an endpoint's requests say of their answers, as they come."""

    classes: dict[str, int] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=list)
    per_item: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    items: int = 0

    def add(self, attributes: Mapping[str, object]) -> None:
        """A request has ended, whose span has these."""
        if not attributes:
            return
        status = _number(attributes, STATUS)
        if status is not None and 100 <= status < 600:
            name = CLASSES[status // 100 - 1]
            self.classes[name] = self.classes.get(name, 0) + 1
        first_ns, items = _number(attributes, FIRST_ITEM), _number(attributes, ITEMS)
        if first_ns is None or not items:
            return
        self.firsts.append(first_ns)
        self.items += items
        last_ns, gap_ns = _number(attributes, LAST_ITEM), _number(attributes, LONGEST_GAP)
        if last_ns is not None and items > 1:
            self.per_item.append(max(last_ns - first_ns, 0) // (items - 1))
        if gap_ns is not None:
            self.gaps.append(gap_ns)

    def merge(self, other: Answers) -> None:
        """Take those of another endpoint on."""
        for name, count in other.classes.items():
            self.classes[name] = self.classes.get(name, 0) + count
        self.firsts += other.firsts
        self.per_item += other.per_item
        self.gaps += other.gaps
        self.items += other.items

    def statuses(self) -> dict[str, int]:
        """How many answers there were of each class, in their order."""
        return {name: self.classes[name] for name in CLASSES if name in self.classes}

    def streams(self) -> Streams | None:
        """Those in parts, None without any."""
        if not self.firsts:
            return None
        first_p50_ns, first_p99_ns = percentiles_of(sorted(self.firsts), (0.5, 0.99))
        item = _both(sorted(self.per_item))
        longest_ns = max(self.gaps, default=None)
        return Streams(len(self.firsts), self.items, first_p50_ns, first_p99_ns, *item, longest_ns)


def _both(times: Sequence[int]) -> tuple[int | None, int | None]:
    if not times:
        return None, None
    p50_ns, p99_ns = percentiles_of(times, (0.5, 0.99))
    return p50_ns, p99_ns


def _number(attributes: Mapping[str, object], name: str) -> int | None:
    """An attribute that is a number, as no file need have it."""
    found = attributes.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 1 << 63 else None
