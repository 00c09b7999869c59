"""Defines a trace as numpy columns. The constructor of `Columns` checks them, so a trace is always consistent.

Each row is a span. Rows are in the order of the input. Times are ns on the monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from instrument.recording.memory import LABELS
from instrument.recording.spans import UNTIMED, AttributeValue, Interval, Site
from instrument.recording.trace_context import LINK, RemoteParent
from instrument.trace.indices import NONE, count_ancestors, find_rows, index_rows, make_mask, rank_distinct, sort_stably
from instrument.trace.intervals import Union, are_in_window, clip_intervals, lengths_by_group, make_union

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]

Description = TypeVar("Description", bound=Hashable)
Read = TypeVar("Read")

FARTHEST_NS = 1 << 62
"""The lowest invalid time in ns."""


class AttributeSets(Protocol):
    """A table of attribute sets, which are decoded on access. Spans with equal attributes share a set."""

    def __len__(self) -> int: ...

    def mask_sets_by_name(self, name: str) -> Bools: ...

    def values(self, name: str, numbers: Sequence[int]) -> Sequence[AttributeValue | None]: ...

    def decode(self, numbers: Sequence[int]) -> Sequence[Mapping[str, AttributeValue]]: ...


class PlainSets(list[Mapping[str, AttributeValue]]):
    """Sets of attributes as dicts. The dicts must not change."""

    def mask_sets_by_name(self, name: str) -> Bools:
        return np.array([name in attributes for attributes in self], np.bool_)

    def values(self, name: str, numbers: Sequence[int]) -> Sequence[AttributeValue | None]:
        return [self[number].get(name) for number in numbers]

    def decode(self, numbers: Sequence[int]) -> Sequence[Mapping[str, AttributeValue]]:
        return [self[number] for number in numbers]


class RelinkedSets:
    """Sets of attributes in which `relink` converts the span ids that links refer to."""

    def __init__(self, sets: AttributeSets, relink: Callable[[Any], Any]) -> None:
        self._sets, self._relink = sets, relink

    def __len__(self) -> int:
        return len(self._sets)

    def mask_sets_by_name(self, name: str) -> Bools:
        return self._sets.mask_sets_by_name(name)

    def values(self, name: str, numbers: Sequence[int]) -> Sequence[AttributeValue | None]:
        values = self._sets.values(name, numbers)
        return [value and self._relink(value) for value in values] if name == LINK else values

    def decode(self, numbers: Sequence[int]) -> Sequence[Mapping[str, AttributeValue]]:
        return [
            {**attributes, LINK: self._relink(attributes[LINK])} if LINK in attributes else attributes
            for attributes in self._sets.decode(numbers)
        ]


class Attributes:
    """The attributes of spans by row, decoded on access.

    `number` is the index of each row's set in the concatenated `tables`, or `NONE`.
    """

    def __init__(self, number: NDArray[Any], tables: Sequence[AttributeSets] = ()) -> None:
        self._number, self._tables = number, tables
        self._firsts = [0, *accumulate(map(len, tables))]
        self._having: dict[str, Int64s] = {}

    @classmethod
    def from_dicts(cls, count: int, attributes_by_row: Mapping[int, Mapping[str, AttributeValue]]) -> Attributes:
        """Return the attributes of `count` rows from dicts by row. The dicts must not change."""
        return cls(np.full(count, NONE)).override_rows(attributes_by_row)

    @classmethod
    def concatenate(cls, parts: Sequence[Attributes]) -> Attributes:
        firsts = accumulate((part._firsts[-1] for part in parts), initial=0)
        pairs = zip(parts, firsts, strict=False)
        numbers = [np.where(part._number == NONE, NONE, part._number + first).astype(np.int32) for part, first in pairs]
        return cls(np.concatenate([np.zeros(0, dtype=np.int32), *numbers]), [*chain(*(part._tables for part in parts))])

    def take_rows(self, rows: NDArray[Any]) -> Attributes:
        return Attributes(self._number[rows], self._tables)

    def override_rows(self, attributes_by_row: Mapping[int, Mapping[str, AttributeValue]]) -> Attributes:
        """Return a copy in which the given rows have other attributes."""
        number = self._number.astype(np.int32)
        number[list(attributes_by_row)] = np.arange(len(attributes_by_row)) + self._firsts[-1]
        return Attributes(number, [*self._tables, PlainSets(attributes_by_row.values())])

    def convert_links(self, relink: Callable[[Any], Any]) -> Attributes:
        return Attributes(self._number, [RelinkedSets(table, relink) for table in self._tables])

    def __getitem__(self, row: int, /) -> Mapping[str, AttributeValue]:
        if (number := int(self._number[row])) == NONE:
            return {}
        place = bisect_right(self._firsts, number) - 1
        return self._tables[place].decode([number - self._firsts[place]])[0]

    @cached_property
    def _rows(self) -> Int64s:
        return np.flatnonzero(self._number != NONE)

    def rows(self) -> Int64s:
        """Return the rows with attributes, in order."""
        return self._rows

    def rows_with_attribute(self, name: str) -> Int64s:
        if (rows := self._having.get(name)) is None:
            is_wanted = np.concatenate(
                [np.zeros(0, np.bool_), *(table.mask_sets_by_name(name) for table in self._tables)]
            )
            rows = self._rows[is_wanted[self._number[self._rows]]] if is_wanted.any() else self._rows[:0]
            self._having[name] = rows
        return rows

    def values(self, name: str, rows: Int64s) -> list[AttributeValue | None]:
        numbers, values = self._read_sets(rows, lambda table, numbers: table.values(name, numbers))
        return list(map([*values, None].__getitem__, numbers.tolist()))

    def distinct_sets(self, rows: Int64s) -> tuple[Int64s, Sequence[Mapping[str, AttributeValue]]]:
        """Return the index of each row's set of attributes, and the distinct sets. The index is `NONE` for a row
        without attributes."""
        return self._read_sets(rows, lambda table, numbers: table.decode(numbers))

    def _read_sets(
        self, rows: Int64s, read: Callable[[AttributeSets, list[int]], Sequence[Read]]
    ) -> tuple[Int64s, list[Read]]:
        distinct, places = rank_distinct(self._number[rows])
        if len(distinct) and distinct[0] == NONE:
            distinct, places = distinct[1:], places - 1
        bounds = np.searchsorted(distinct, self._firsts)
        results = list[Read]()
        for table, first, (begin, end) in zip(self._tables, self._firsts, pairwise(bounds.tolist()), strict=False):
            if begin < end:
                results += read(table, (distinct[begin:end] - first).tolist())
        return places, results


@dataclass(frozen=True, slots=True)
class DeviceIntervals:
    """The device intervals of all spans. `row` is the row of the span, in ascending order. `label` is an index into
    `labels`."""

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
    def is_measured(self) -> Bools:
        return np.array([*(label not in UNTIMED for label in self.labels), False], dtype=np.bool_)[self.label]

    @property
    def total_ns(self) -> Int64s:
        return self.end_ns - self.start_ns

    def select(self, is_wanted: NDArray[Any]) -> DeviceIntervals:
        """Return some of the intervals. `is_wanted` is a mask or an array of indices."""
        if is_wanted.dtype == np.bool_ and is_wanted.all():
            return self
        columns = {item.name: getattr(self, item.name)[is_wanted] for item in fields(self) if item.name != "labels"}
        return DeviceIntervals(**columns, labels=self.labels)

    def sort_by_row(self) -> DeviceIntervals:
        """Return the intervals ordered by row. Intervals without a row are left out. The sort is stable."""
        order = sort_stably(self.row, int(self.row.max(initial=0)) + 1)
        return self.select(order[self.row[order] != NONE])

    def clip_to(self, window: Interval) -> DeviceIntervals:
        inner = self.select(are_in_window(self.start_ns, self.end_ns, window))
        start_ns, end_ns = clip_intervals(inner.start_ns, inner.end_ns, window)
        return replace(inner, start_ns=start_ns, end_ns=end_ns)

    def union(self) -> Union:
        return make_union(self.start_ns, self.end_ns)

    @classmethod
    def make_empty(cls) -> DeviceIntervals:
        rows, numbers = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        return cls(rows, numbers, numbers, numbers, numbers, rows, numbers, ())


@dataclass(frozen=True)
class Columns:
    """Spans as columns, with one row per span. The columns are named like the fields of
    `instrument.recording.spans.Span`.

    `site` and `error` are indices into `sites` and `errors`. `parent` is the row of the parent. `NONE` means no error
    or no parent. `remote` has the remote parents by row. `own_id` is the span's id in its process, which differs from
    `span_id` in merged traces.

    Raises `ValueError` for inconsistent columns, such as duplicate ids or cyclic parents.
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

    def __post_init__(self) -> None:
        if not len(self.own_id):
            object.__setattr__(self, "own_id", self.span_id)
        _check_columns(self)
        # Python 3.10 and 3.11 have one lock for all of a cached property's values, which a fork may catch.
        parent = self._find_parents()
        vars(self).update(parent=parent, level=count_ancestors(parent))

    @cached_property
    def parent(self) -> Int32s:
        return self._find_parents()

    def _find_parents(self) -> Int32s:
        parent = find_rows(self.span_id, self.parent_id)
        parent[self.parent_id == 0] = NONE
        return parent

    @cached_property
    def level(self) -> Int32s:
        """The number of ancestors per row."""
        return count_ancestors(self.parent)

    def __len__(self) -> int:
        return len(self.span_id)

    @cached_property
    def total_ns(self) -> Int64s:
        return self.end_ns - self.start_ns

    def are_of_kind(self, *kinds: str) -> Bools:
        return self.are_of_sites([site.kind in kinds for site in self.sites])

    def are_of_sites(self, is_wanted: Sequence[bool]) -> Bools:
        mask: Bools = np.array([*is_wanted, False], dtype=np.bool_)[self.site]
        return mask

    def describe_sites(self, describe: Callable[[Site], Description]) -> tuple[list[Description], Int64s]:
        numbers: dict[Description, int] = {}
        of_site = [numbers.setdefault(describe(site), len(numbers)) for site in self.sites]
        return list(numbers), np.array([*of_site, NONE], dtype=np.int64)

    def count_calls(self) -> dict[Site, int]:
        return dict(zip(self.sites, np.bincount(self.site, minlength=len(self.sites)).tolist(), strict=True))

    def count_rows_with_device_time(self) -> int:
        return int(np.count_nonzero(np.diff(self.device.row, prepend=NONE)))

    def count_rows_without_device_time(self) -> int:
        """Return the number of rows without device intervals. Rows of sites without device times are not counted."""
        is_missing = self.are_of_sites([site.device for site in self.sites])
        is_missing[self.device.row] = False
        return int(np.count_nonzero(is_missing))

    def select(self, is_wanted: Bools) -> Columns:
        return self.take_rows(np.flatnonzero(is_wanted))

    def take_rows(self, rows: Int64s, **changes: Any) -> Columns:
        """Return the given rows in this order. `changes` replaces columns. The columns are not checked again."""
        device, remote = self.device, self.remote
        if len(device):
            device = replace(device, row=index_rows(rows, len(self))[device.row].astype(np.int32)).sort_by_row()
        if remote and "remote" not in changes:
            remote = {place: remote[row] for place, row in enumerate(rows.tolist()) if row in remote}
        columns = {name: getattr(self, name)[rows] for name in _BY_ROW if name not in changes}
        more: dict[str, Any] = {"device": device, "attributes": self.attributes.take_rows(rows), "remote": remote}
        selected = object.__new__(Columns)
        vars(selected).update({"sites": self.sites, "errors": self.errors, **more, **columns, **changes})
        return selected

    def with_remote(self, remote: Mapping[int, RemoteParent]) -> Columns:
        """Return the trace with other remote parents, without another check of its columns."""
        trace = copy(self)
        object.__setattr__(trace, "remote", remote)
        return trace

    def find_topmost_wanted_rows(self, is_wanted: Bools) -> Int32s:
        """Return the topmost wanted row at or above each row, or `NONE`. Missing spans below a wanted root do not
        matter."""
        rows = np.arange(len(self), dtype=np.int32)
        owner = np.where(is_wanted, rows, np.int32(NONE)).astype(np.int32)
        above, open_rows = self.parent.copy(), np.flatnonzero(self.parent != NONE)
        while len(open_rows):  # by pointer doubling; the upper half of a path has precedence
            up = above[open_rows]
            higher, farther = owner[up], above[up]
            owner[open_rows] = np.where(higher != NONE, higher, owner[open_rows])
            above[open_rows] = farther
            open_rows = open_rows[farther != NONE]
        roots = find_rows(self.span_id, self.root_id)
        by_root = (roots != NONE) & is_wanted[roots]
        return np.where(by_root, roots, owner).astype(np.int32)

    def device_times(self, rows: Int64s) -> tuple[Int64s, Bools]:
        device = self.device
        numbers = index_rows(rows, len(self))[device.row]
        is_given = numbers != NONE
        lengths_ns = lengths_by_group(numbers[is_given], device.start_ns[is_given], device.end_ns[is_given], len(rows))
        timed = make_mask(numbers[is_given & device.is_measured], len(rows))
        return lengths_ns, timed

    @cached_property
    def is_on_track_of_parent(self) -> Bools:
        around = self.parent
        same = (self.thread_id == self.thread_id[around]) & (self.task_id == self.task_id[around])
        return np.asarray(same & (around != NONE))

    @cached_property
    def parent_on_same_track(self) -> Int32s:
        around: Int32s = np.where(self.is_on_track_of_parent, self.parent, np.int32(NONE)).astype(np.int32)
        return around


_BY_ROW = (
    "span_id", "parent_id", "root_id", "thread_id", "task_id", "start_ns", "end_ns", "active_ns", "self_ns", "site",
    "error", "clipped", "own_id",
)  # fmt: skip


def _check_columns(trace: Columns) -> None:
    count, work = len(trace.span_id), trace.device
    columns = [getattr(trace, name) for name in _BY_ROW]
    inner: list[NDArray[Any]] = [work.device, work.stream, work.start_ns, work.end_ns, work.label, work.uncertainty_ns]
    if any(len(column) != count for column in columns) or any(len(column) != len(work) for column in inner):
        raise ValueError("its columns are of different lengths; it is damaged")
    for starts, ends in ((trace.start_ns, trace.end_ns), (work.start_ns, work.end_ns)):
        if not all(are_in_range(times, -FARTHEST_NS, FARTHEST_NS) for times in (starts, ends)):
            raise ValueError("it has a time out of range; it is damaged")
        if (ends < starts).any():
            raise ValueError("a span in it ends before it begins; it is damaged")
    if not all(are_in_range(times, -FARTHEST_NS, FARTHEST_NS) for times in (trace.active_ns, trace.self_ns)):
        raise ValueError("it has a duration out of range; it is damaged")
    tables = (
        (trace.site, 0, len(trace.sites)), (trace.error, NONE, len(trace.errors)), (work.label, 0, len(work.labels)),
        (work.row, 0, count),
    )  # fmt: skip
    if not all(are_in_range(*table) for table in tables) or (work.row[1:] < work.row[:-1]).any():
        raise ValueError("it refers to a row that does not exist; it is damaged")
    # A duplicate id has one row for both. `np.unique` would take thirty times as long.
    is_ordered = (trace.span_id[1:] > trace.span_id[:-1]).all()
    if not is_ordered and (find_rows(trace.span_id, trace.span_id) != np.arange(count)).any():
        raise ValueError("two spans in it have one id; it is damaged")


def are_in_range(column: NDArray[Any], first: int, end: int) -> bool:
    return not len(column) or bool(first <= column.min() and column.max() < end)


def device_intervals(cells: NDArray[np.void], span_id: Int64s) -> DeviceIntervals:
    cells = cells[np.argsort(cells["start_ns"], kind="stable")]
    intervals = DeviceIntervals(
        row=find_rows(span_id, cells["span_id"].astype(np.int64)),
        device=cells["device"],
        stream=cells["stream"].astype(np.int64),
        start_ns=cells["start_ns"],
        # An end may be before its begin if the clock was calibrated again in between.
        end_ns=np.maximum(cells["start_ns"], cells["end_ns"]),
        label=cells["label"].astype(np.int32),
        uncertainty_ns=cells["uncertainty_ns"],
        labels=LABELS,
    )
    return intervals.sort_by_row()
