"""A trace as numpy columns. One that exists is sound: what its columns say is checked where it is made, and only there.

Rows are spans, in the order in which they were given. Times are ns on the monotonic clock, in 64 bits, of which one is
left: so sums and differences of two do not wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from instrument.recording.remote_parents import LINK, RemoteParent
from instrument.recording.slot_ring import LABELS
from instrument.recording.spans import UNTIMED, AttributeValue, Interval, Site
from instrument.trace.forest import NONE, levels, rows_of
from instrument.trace.groups import places_of
from instrument.trace.intervals import Union, clipped, lengths_by_group, lie_in, union

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

Told = TypeVar("Told", bound=Hashable)

FARTHEST_NS = 1 << 62
"""No clock reads more."""


class Attributes(Protocol):
    """The attributes of spans by their row, decoded when they are asked for."""

    def __getitem__(self, row: int, /) -> Mapping[str, AttributeValue]:
        """The attributes of a row."""

    def rows(self) -> Int64s:
        """The rows that have any, in order."""

    def having(self, name: str) -> Int64s:
        """The rows that have one of that name, in order."""

    def values(self, name: str, rows: Int64s) -> list[AttributeValue | None]:
        """The values of some rows under a name, None for a row without one."""

    def distinct(self, rows: Int64s) -> tuple[Int64s, Sequence[Mapping[str, AttributeValue]]]:
        """Return the number of the set of attributes of each row, `NONE` for a row without any, and the sets."""
        numbers = np.full(len(rows), NONE, dtype=np.int64)
        places = np.flatnonzero(np.isin(rows, self.rows()))
        numbers[places] = np.arange(len(places))
        return numbers, list(map(self.__getitem__, rows[places].tolist()))


class AttributesOfRows(Attributes):
    """The attributes of spans by their row, of dicts that nobody changes."""

    def __init__(self, found: Mapping[int, Mapping[str, AttributeValue]]) -> None:
        self._found = found

    def __getitem__(self, row: int, /) -> Mapping[str, AttributeValue]:
        return self._found.get(row, {})

    def rows(self) -> Int64s:
        return np.array([*self._found], dtype=np.int64)

    def having(self, name: str) -> Int64s:
        return np.array([row for row, its in self._found.items() if name in its], dtype=np.int64)

    def values(self, name: str, rows: Int64s) -> list[AttributeValue | None]:
        return [self._found.get(row, {}).get(name) for row in rows.tolist()]


class ComposedAttributes(Attributes):
    """The attributes of rows that come from several `parts`: a row's part is in `part`, and its row there in `own`.

    `relink` returns the link of a root by the ids of the composed trace, by the number of its part.
    """

    def __init__(
        self,
        parts: Sequence[Attributes],
        part: NDArray[Any],
        own: Int64s,
        relink: Callable[[int, Any], Any] = lambda _, link: link,
    ) -> None:
        self._parts, self._part, self._own, self._relink = parts, part, own, relink

    def __getitem__(self, row: int, /) -> Mapping[str, AttributeValue]:
        number = int(self._part[row])
        return self._relinked(number, self._parts[number][int(self._own[row])])

    def _relinked(self, number: int, attributes: Mapping[str, AttributeValue]) -> Mapping[str, AttributeValue]:
        if LINK not in attributes:
            return attributes
        return {**attributes, LINK: self._relink(number, attributes[LINK])}

    def rows(self) -> Int64s:
        return self._composed([part.rows() for part in self._parts])

    def having(self, name: str) -> Int64s:
        return self._composed([part.having(name) for part in self._parts])

    def _composed(self, rows: Sequence[Int64s]) -> Int64s:
        """Return the composed rows, in order, of rows of each part."""
        composed = [np.zeros(0, dtype=np.int64)]
        for number, rows_of_part in enumerate(rows):
            composed_rows = np.flatnonzero(self._part == number)
            own = self._own[composed_rows]
            count = max(int(own.max(initial=0)), int(rows_of_part.max(initial=0))) + 1
            places = places_of(own, count)[rows_of_part]
            composed.append(composed_rows[places[places != NONE]])
        return np.sort(np.concatenate(composed))

    def values(self, name: str, rows: Int64s) -> list[AttributeValue | None]:
        values: list[AttributeValue | None] = [None] * len(rows)
        of_rows = self._part[rows]
        for number, part in enumerate(self._parts):
            places = np.flatnonzero(of_rows == number)
            for place, value in zip(places.tolist(), part.values(name, self._own[rows[places]]), strict=True):
                values[place] = value if name != LINK or value is None else self._relink(number, value)
        return values

    def distinct(self, rows: Int64s) -> tuple[Int64s, Sequence[Mapping[str, AttributeValue]]]:
        numbers = np.full(len(rows), NONE, dtype=np.int64)
        sets: list[Mapping[str, AttributeValue]] = []
        of_rows = self._part[rows]
        for number, part in enumerate(self._parts):
            places = np.flatnonzero(of_rows == number)
            numbers_of_part, sets_of_part = part.distinct(self._own[rows[places]])
            numbers[places] = np.where(numbers_of_part == NONE, NONE, numbers_of_part + len(sets))
            sets += [self._relinked(number, attributes) for attributes in sets_of_part]
        return numbers, sets


def extended(attributes: Attributes, count: int, more: Sequence[Mapping[str, AttributeValue]]) -> Attributes:
    """Return the attributes of `count` rows, and of further rows behind them."""
    own = np.concatenate([np.arange(count), np.arange(len(more))])
    part = np.repeat(np.array([0, 1], dtype=np.int32), [count, len(more)])
    return ComposedAttributes([attributes, AttributesOfRows(dict(enumerate(more)))], part, own)


@dataclass(frozen=True, slots=True)
class DeviceIntervals:
    """The device intervals of all spans, those of a span one after another: `row` is the span's, and never falls.

    `label` is a place in `labels`.
    """

    row: Int32s
    device: Int64s
    stream: Int64s
    start_ns: Int64s
    end_ns: Int64s
    label: Int32s
    uncertainty_ns: Int64s
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def timed(self) -> Bools:
        """True for intervals that are lengths of work."""
        return np.array([*(label not in UNTIMED for label in self.labels), False], dtype=np.bool_)[self.label]

    @property
    def total_ns(self) -> Int64s:
        """The length of each."""
        return self.end_ns - self.start_ns

    def only(self, wanted: Bools) -> DeviceIntervals:
        """The wanted ones alone."""
        if wanted.all():
            return self
        columns = {one.name: getattr(self, one.name)[wanted] for one in fields(self) if one.name != "labels"}
        return DeviceIntervals(**columns, labels=self.labels)

    def within(self, window: Interval) -> DeviceIntervals:
        """Return the parts of intervals that are in a window."""
        its = self.only(lie_in(self.start_ns, self.end_ns, window))
        start_ns, end_ns = clipped(its.start_ns, its.end_ns, window)
        return replace(its, start_ns=start_ns, end_ns=end_ns)

    def union(self) -> Union:
        """Return the union of the intervals."""
        return union(self.start_ns, self.end_ns)

    @classmethod
    def none(cls) -> DeviceIntervals:
        """Return the columns of spans without any."""
        rows, numbers = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        return cls(rows, numbers, numbers, numbers, numbers, rows, numbers, ())


@dataclass(frozen=True)
class Columns:
    """Spans as columns, a row each, with the names of `instrument.recording.spans.Span`.

    `site` and `error` are places in `sites` and `errors` (`NONE`: no error). `parent` is the row of the parent, `NONE`
    for a span without one among these. `remote` is by row, of the few that have one. `own_id` is the id by which
    the process knows a span: another one than `span_id` in a merged trace alone.

    Raises `ValueError` for columns that are not sound: of different lengths, with times or numbers that no clock and no
    table has, with an id twice, or with parents that run in a circle.
    """

    sites: tuple[Site, ...]
    errors: tuple[str, ...]
    span_id: Int64s
    parent_id: Int64s
    root_id: Int64s
    thread_id: Int64s
    task_id: Int64s
    start_ns: Int64s
    end_ns: Int64s
    active_ns: Int64s
    self_ns: Int64s
    site: Int32s
    error: Int32s
    clipped: Bools
    device: DeviceIntervals
    attributes: Attributes = field(repr=False)
    remote: Mapping[int, RemoteParent]
    own_id: Int64s = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)
    parent: Int32s = field(init=False)
    level: Int32s = field(init=False)
    """The number of spans around a row, by its parents."""

    def __post_init__(self) -> None:
        if not len(self.own_id):
            object.__setattr__(self, "own_id", self.span_id)
        _refuse_unsound(self)
        parent = rows_of(self.span_id, self.parent_id)
        parent[self.parent_id == 0] = NONE
        object.__setattr__(self, "parent", parent)
        object.__setattr__(self, "level", levels(parent))

    def __len__(self) -> int:
        return len(self.span_id)

    @cached_property
    def total_ns(self) -> Int64s:
        """The host interval's length."""
        return self.end_ns - self.start_ns

    def of_kind(self, *kinds: str) -> Bools:
        """Return True for rows of one of the kinds."""
        return self.of_sites([site.kind in kinds for site in self.sites])

    def of_sites(self, wanted: Sequence[bool]) -> Bools:
        """Return True for rows of the sites that are wanted, by the site's place."""
        found: Bools = np.array([*wanted, False], dtype=np.bool_)[self.site]
        return found

    def numbered_sites(self, tell: Callable[[Site], Told]) -> tuple[list[Told], Int64s]:
        """Return a function's distinct results for sites, and each site's number of them; behind these `NONE`."""
        numbers: dict[Told, int] = {}
        of_site = [numbers.setdefault(tell(site), len(numbers)) for site in self.sites]
        return list(numbers), np.array([*of_site, NONE], dtype=np.int64)

    def calls(self) -> dict[Site, int]:
        """Count the rows of each site."""
        return dict(zip(self.sites, np.bincount(self.site, minlength=len(self.sites)).tolist(), strict=True))

    def timed(self) -> int:
        """Count the rows with device intervals."""
        return int(np.count_nonzero(np.diff(self.device.row, prepend=NONE)))

    def untimed(self) -> int:
        """Count the rows that asked for device time and have none."""
        asked = self.of_sites([site.device for site in self.sites])
        asked[self.device.row] = False
        return int(np.count_nonzero(asked))

    def only(self, wanted: Bools) -> Columns:
        """The wanted rows alone, without their attributes."""
        rows = np.flatnonzero(wanted)
        device = self.device.only(wanted[self.device.row])
        number_of = np.cumsum(wanted, dtype=np.int32) - 1
        columns = {name: getattr(self, name)[rows] for name in _BY_ROW}
        return Columns(
            sites=self.sites,
            errors=self.errors,
            **columns,
            device=replace(device, row=number_of[device.row]),
            attributes=AttributesOfRows({}),
            remote={},
        )

    def with_attributes(self, wanted: Bools) -> Columns:
        """The wanted rows alone, with their attributes."""
        rows = np.flatnonzero(wanted)
        remote = {at: self.remote[row] for at, row in enumerate(rows.tolist()) if row in self.remote}
        attributes = ComposedAttributes([self.attributes], np.zeros(len(rows), dtype=np.int32), rows)
        return replace(self.only(wanted), attributes=attributes, remote=remote)

    def owners(self, wanted: Bools) -> Int32s:
        """The row of the topmost wanted span at or above each, `NONE` where there is none.

        The root that a span names is asked first: its parents may be among the spans that were not kept.
        """
        rows = np.arange(len(self), dtype=np.int32)
        found = np.where(wanted, rows, np.int32(NONE)).astype(np.int32)
        above, open_rows = self.parent.copy(), np.flatnonzero(self.parent != NONE)
        while len(open_rows):  # of ever longer ways up, whose upper part comes first
            up = above[open_rows]
            higher, farther = found[up], above[up]
            found[open_rows] = np.where(higher != NONE, higher, found[open_rows])
            above[open_rows] = farther
            open_rows = open_rows[farther != NONE]
        roots = rows_of(self.span_id, self.root_id)
        by_root = (roots != NONE) & wanted[roots] if len(self) else np.zeros(0, dtype=np.bool_)
        return np.where(by_root, roots, found).astype(np.int32)

    def device_times(self, rows: Int64s) -> tuple[Int64s, Bools]:
        """Return the device time of some rows, and True where any of it was timed."""
        its = self.device
        numbers = places_of(rows, len(self))[its.row]
        wanted = numbers != NONE
        lengths_ns = lengths_by_group(numbers[wanted], its.start_ns[wanted], its.end_ns[wanted], len(rows))
        timed = np.zeros(len(rows), dtype=np.bool_)
        timed[numbers[wanted & its.timed]] = True
        return lengths_ns, timed

    @cached_property
    def on_line_of_parent(self) -> Bools:
        """True for rows whose parent ran on the same thread and task: they are part of its time."""
        around = self.parent
        same = (self.thread_id == self.thread_id[around]) & (self.task_id == self.task_id[around])
        return np.asarray(same & (around != NONE)) if len(self) else np.zeros(0, dtype=np.bool_)

    @cached_property
    def around(self) -> Int32s:
        """The row of the span around each on its line, `NONE` for the first of a line."""
        found: Int32s = np.where(self.on_line_of_parent, self.parent, np.int32(NONE)).astype(np.int32)
        return found


_BY_ROW = (
    "span_id", "parent_id", "root_id", "thread_id", "task_id", "start_ns", "end_ns", "active_ns", "self_ns", "site",
    "error", "clipped", "own_id",
)  # fmt: skip


def _refuse_unsound(trace: Columns) -> None:
    count, its = len(trace.span_id), trace.device
    columns = [getattr(trace, name) for name in _BY_ROW]
    of_device: list[NDArray[Any]] = [its.device, its.stream, its.start_ns, its.end_ns, its.label, its.uncertainty_ns]
    if any(len(one) != count for one in columns) or any(len(one) != len(its) for one in of_device):
        raise ValueError("its columns are of different lengths; it is damaged")
    for starts, ends in ((trace.start_ns, trace.end_ns), (its.start_ns, its.end_ns)):
        if not lie_within(starts, -FARTHEST_NS, FARTHEST_NS) or not lie_within(ends, -FARTHEST_NS, FARTHEST_NS):
            raise ValueError("it has a time that no clock reads; it is damaged")
        if (ends < starts).any():
            raise ValueError("something in it ends before it starts; it is damaged")
    if not lie_within(trace.active_ns, -FARTHEST_NS, FARTHEST_NS) or not lie_within(
        trace.self_ns, -FARTHEST_NS, FARTHEST_NS
    ):
        raise ValueError("it has a length of time that no clock reads; it is damaged")
    tables = (
        (trace.site, 0, len(trace.sites)), (trace.error, NONE, len(trace.errors)), (its.label, 0, len(its.labels)),
        (its.row, 0, count),
    )  # fmt: skip
    if not all(lie_within(*each) for each in tables) or (its.row[1:] < its.row[:-1]).any():
        raise ValueError("it names what is in none of its tables; it is damaged")
    # Of an id that is there twice one of the rows is found for both; `np.unique` takes thirty times as long.
    if (rows_of(trace.span_id, trace.span_id) != np.arange(count)).any():
        raise ValueError("two spans in it have one id; it is damaged")


def lie_within(column: NDArray[Any], first: int, end: int) -> bool:
    """Return True if all numbers are from the first to before the end."""
    return not len(column) or bool(first <= column.min() and column.max() < end)


CELL = np.dtype(
    [(name, "i8") for name in ("span_id", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")]
)
"""One, as `instrument.recording.slot_ring` packs it. A stream is an address, or a small number."""


def cells_in(packed: bytes) -> NDArray[np.void]:
    """Return the intervals that a ring has packed."""
    return np.frombuffer(packed, dtype=CELL)


def device_intervals(cells: NDArray[np.void], span_id: Int64s) -> DeviceIntervals:
    """Return the intervals of spans by their ids, each span's by time, without those of other spans."""
    rows = rows_of(span_id, cells["span_id"])
    order = np.lexsort((cells["start_ns"], rows))
    order = order[rows[order] != NONE]
    its = cells[order]
    return DeviceIntervals(
        row=rows[order],
        device=its["device"].copy(),
        stream=its["stream"].copy(),
        start_ns=its["start_ns"].copy(),
        # Where a clock was placed anew between the two, an end may lie before its begin.
        end_ns=np.maximum(its["start_ns"], its["end_ns"]),
        label=its["label"].astype(np.int32),
        uncertainty_ns=its["uncertainty_ns"].copy(),
        labels=LABELS,
    )
