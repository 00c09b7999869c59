"""Stretches of time in bulk, and the loops over all spans that find them: each with its twin in C.

A union of stretches, or many of them in any order, is one piece of memory: start and end as numbers of 64 bits by
turns. A million device intervals so take 16 MB, which are 150 as tuples, and their union takes a tenth of the time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from instrument import native
from instrument.recording.spans import UNTIMED, Interval, Site, Span, length, union

_native = native.find("_stretches")

NO_PIECE = -1
"""What stands for no piece of a unit."""

FARTHEST_NS = 1 << 62
"""No clock reads more; the twin takes windows beyond it."""


def packed(intervals: Iterable[Interval]) -> bytes:
    """Intervals in one piece of memory."""
    return array("q", chain.from_iterable(intervals)).tobytes()


def unpacked(stretches: bytes) -> list[Interval]:
    """The intervals again."""
    numbers = array("q", stretches)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def sites(spans: Sequence[Span]) -> list[Site]:
    """The sites of the spans, each once, by first sight."""
    found: list[Site] | None = None if _native is None else _native.sites(spans)
    return list({span.site: None for span in spans}) if found is None else found


def grouped(spans: Sequence[Span], labels: Mapping[Site, int], count: int) -> tuple[list[Span], ...]:
    """The spans of sites by the label of the site, from 1 to `count`, as lists; `labels` has 0 for those of none."""
    found: tuple[list[Span], ...] | None = None if _native is None else _native.grouped(spans, dict(labels), count)
    if found is None:
        found = tuple([] for _ in range(count))
        add = {site: found[label - 1].append for site, label in labels.items() if label}
        for span in spans:
            if span.site in add:
                add[span.site](span)
    return found


class Line(NamedTuple):
    """Units that follow one another, numbered from `first_unit`, and pieces of them: each a start, an end and a number.

    Both are in the order of time, in one piece of memory each, and none reaches into the next.
    """

    first_unit: int
    units: bytes
    pieces: bytes


class Placed(NamedTuple):
    """Spans with device time, and of each the number of the unit in which it began, and of the piece, `NO_PIECE` for
    none, in one piece of memory each."""

    spans: Sequence[Span]
    units: bytes
    pieces: bytes


def placed(
    spans: Sequence[Span],
    names: Mapping[tuple[int, int], int],
    by_root: bool,
    line_of: Callable[[Span], int | None],
    lines: Sequence[Line],
) -> Placed:
    """The spans with device time that begin in a unit of their line.

    `names` has the number of a line by the thread and the task of a span, or `by_root` by the id of its root and 0.
    `line_of` is asked for that of a span whose line has no such name.
    """
    found = None if _native is None else _native.placed(spans, dict(names), by_root, line_of, tuple(lines))
    if found is not None:
        return Placed(*found)
    of_lines = [(first, unpacked(units), array("q", pieces)) for first, units, pieces in lines]
    begins = [([start for start, _ in units], pieces[::3].tolist()) for _, units, pieces in of_lines]
    kept, in_unit, in_piece = list[Span](), array("q"), array("q")
    for span in spans:
        name = (span.root_id, 0) if by_root else (span.thread_id, span.task_id)
        number = (names[name] if name in names else line_of(span)) if span.device else None
        if number is None:
            continue
        first, units, pieces = of_lines[number]
        unit, piece = (bisect_right(its, span.start_ns) - 1 for its in begins[number])
        if unit >= 0 and span.start_ns < units[unit][1]:
            kept.append(span)
            in_unit.append(first + unit)
            is_in = piece >= 0 and span.start_ns < pieces[3 * piece + 1]
            in_piece.append(pieces[3 * piece + 2] if is_in else NO_PIECE)
    return Placed(kept, in_unit.tobytes(), in_piece.tobytes())


def summed(spans: Sequence[Span], wanted: Sequence[tuple[bytes, array[int]]]) -> list[list[int | None]]:
    """The time of what spans put on streams, once for each of `wanted`: by key the sum over streams, unions of each.

    Each of `wanted` has a number of 64 bits for each span, a negative one for none, and the key of each number, from 0
    on. None is for keys whose spans put nothing on a stream. Raises IndexError for a number without a key.
    """
    found: list[list[int | None]] | None = None
    if _native is not None:
        found = _native.summed(spans, tuple((numbers, keys.tobytes()) for numbers, keys in wanted), UNTIMED)
    return [_summed(spans, array("q", numbers), keys) for numbers, keys in wanted] if found is None else found


def _summed(spans: Sequence[Span], numbers: Sequence[int], keys: Sequence[int]) -> list[int | None]:
    stretches: dict[int, dict[tuple[int, int], list[Interval]]] = {}
    for span, number in zip(spans, numbers, strict=True):
        for one in span.device if number >= 0 else ():
            if one.label not in UNTIMED:
                on_stream = stretches.setdefault(keys[number], {}).setdefault((one.device, one.stream), [])
                on_stream.append((one.start_ns, max(one.start_ns, one.end_ns)))
    sums = {key: sum(length(union(its)) for its in streams.values()) for key, streams in stretches.items()}
    return [sums.get(key) for key in range(max(keys, default=-1) + 1)]


class Timeline:
    """Disjoint sorted intervals, and how much of a stretch they cover, in logarithmic time."""

    def __init__(self, disjoint: Sequence[Interval]) -> None:
        self._starts = [start for start, _ in disjoint]
        self._ends = [end for _, end in disjoint]
        self._before = [0, *accumulate(end - start for start, end in disjoint)]

    def _until(self, at_ns: int) -> int:
        index = bisect_right(self._starts, at_ns)
        return self._before[index] - max(self._ends[index - 1] - at_ns, 0) if index else 0

    def within(self, start_ns: int, end_ns: int) -> int:
        return self._until(end_ns) - self._until(start_ns)
