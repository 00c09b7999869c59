"""Defines a trace: its spans as columns, with facts about their process. Span objects are made from rows on access."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, groupby
from operator import attrgetter, eq, itemgetter
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import (
    Cost,
    DeviceInterval,
    Flops,
    Gpu,
    Interval,
    Kernel,
    Origin,
    OwnNotes,
    Sample,
    Site,
    Span,
    Startup,
)
from instrument.trace.columns import (
    FARTHEST_NS,
    Attributes,
    Columns,
    DeviceIntervals,
    Int32s,
    Int64s,
)
from instrument.trace.indices import NONE


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of torch's allocator, or a release with a negative `size_bytes`.

    `device` is `HOST` for host memory. `allocated_bytes` is the memory in use afterwards. `reserved_bytes` is the
    memory that the allocator has from the driver.
    """

    device: int
    at_ns: int
    thread_id: int
    size_bytes: int
    address: int
    allocated_bytes: int
    reserved_bytes: int = 0


ALLOCATION = np.dtype([(member.name, np.int64) for member in fields(Allocation)])
"""The numpy type of a packed allocation, with the fields of `Allocation`."""

ROWS_AT_ONCE = 20_000
"""The maximum number of rows that become objects at once, to bound the memory."""

Thing = TypeVar("Thing")


class Views(Sequence[Thing]):
    """A sequence of objects, which are made from columns on access. It equals any sequence of equal objects."""

    @abstractmethod
    def _make_items(self, rows: slice) -> Iterable[Thing]: ...

    @overload
    def __getitem__(self, place: int) -> Thing: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Thing]: ...
    def __getitem__(self, place: int | slice) -> Thing | Sequence[Thing]:
        if isinstance(place, slice):
            return self._select_slice(place)
        row = range(len(self))[place]
        (thing,) = self._make_items(slice(row, row + 1))
        return thing

    def _select_slice(self, rows: slice) -> Sequence[Thing]:
        return [self[row] for row in range(*rows.indices(len(self)))]

    def __iter__(self) -> Iterator[Thing]:
        for first in range(0, len(self), ROWS_AT_ONCE):
            yield from self._make_items(slice(first, first + ROWS_AT_ONCE))

    def __eq__(self, sequence: object) -> bool:
        if not isinstance(sequence, Sequence) or isinstance(sequence, (str, bytes)):
            return NotImplemented
        return len(self) == len(sequence) and all(map(eq, self, sequence))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"


class Allocations(Views[Allocation]):
    """Allocations as packed `rows` of 56 bytes. Times count from `base_ns`. The rows must not change."""

    FACTS = attrgetter(*(member.name for member in fields(Allocation)))

    def __init__(self, rows: NDArray[Any] | None = None, base_ns: int = 0) -> None:
        self.rows, self.base_ns = np.zeros(0, ALLOCATION) if rows is None else rows, base_ns

    @classmethod
    def from_objects(cls, allocations: Iterable[Allocation]) -> Allocations:
        if isinstance(allocations, Allocations):
            return allocations
        try:
            return cls(np.array(list(map(cls.FACTS, allocations)), ALLOCATION))
        except OverflowError as problem:
            raise OverflowError("an allocation has a number beyond 64 bits") from problem

    def shift_times(self, by_ns: int) -> Allocations:
        return Allocations(self.rows, self.base_ns + by_ns)

    @property
    def times_ns(self) -> Int64s:
        limits = np.iinfo(np.int64)
        edges = max(-FARTHEST_NS - self.base_ns, int(limits.min)), min(FARTHEST_NS - self.base_ns, int(limits.max))
        return np.asarray(self.rows["at_ns"].clip(*edges) + self.base_ns)

    def sort_by_time(self) -> Allocations:
        return Allocations(self.rows[np.argsort(self.rows["at_ns"], kind="stable")], self.base_ns)

    def __len__(self) -> int:
        return len(self.rows)

    def _select_slice(self, rows: slice) -> Allocations:
        return Allocations(self.rows[rows], self.base_ns)

    def _make_items(self, rows: slice) -> Iterable[Allocation]:
        base_ns = self.base_ns
        return [Allocation(device, base_ns + since_ns, *more) for device, since_ns, *more in self.rows[rows].tolist()]


def columns_of_spans(spans: Sequence[Span]) -> Columns:
    """Return the columns of spans, in the same order. Raises `ValueError` for inconsistent spans."""
    sites: dict[Site, int] = {}
    errors: dict[str | None, int] = {None: NONE}
    site_numbers = _number_values(map(attrgetter("site"), spans), sites)
    error_numbers = _number_values(map(attrgetter("error"), spans), errors)
    columns = {name: _make_numbers(map(attrgetter(name), spans), len(spans)) for name in _NUMBERS}
    return Columns(
        sites=tuple(sites),
        errors=tuple(error for error in errors if error is not None),
        **columns,
        site=site_numbers,
        error=error_numbers,
        clipped=np.fromiter(map(attrgetter("clipped"), spans), np.bool_, len(spans)),
        device=_make_intervals(spans),
        attributes=Attributes.from_dicts(len(spans), {
            row: attributes for row, attributes in enumerate(map(attrgetter("attributes"), spans)) if attributes
        }),
        remote={
            row: remote for row, remote in enumerate(map(attrgetter("remote"), spans)) if remote is not None
        },
    )  # fmt: skip


def append_spans(trace: Columns, spans: Sequence[Span]) -> Columns:
    """Return the trace with additional spans. Their device intervals and remote parents are left out."""
    if not spans:
        return trace
    more = columns_of_spans(spans)
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name), getattr(more, name)]) for name in (*_NUMBERS, "clipped", "own_id")
    }
    error = np.where(more.error == NONE, NONE, more.error + len(trace.errors))
    return replace(
        trace,
        sites=(*trace.sites, *more.sites),
        errors=(*trace.errors, *more.errors),
        **columns,
        site=np.concatenate([trace.site, more.site + len(trace.sites)]).astype(np.int32),
        error=np.concatenate([trace.error, error]).astype(np.int32),
        attributes=Attributes.concatenate([trace.attributes, more.attributes]),
    )


_NUMBERS = (
    "span_id", "parent_id", "root_id", "thread_id", "task_id", "start_ns", "end_ns", "active_ns", "self_ns",
)  # fmt: skip


def _make_numbers(values: Iterable[int], count: int) -> Int64s:
    try:
        return np.fromiter(values, np.int64, count)
    except OverflowError as problem:
        raise ValueError("it has a number of more than 64 bits; it is damaged") from problem


def _number_values(values: Iterable[Any], numbers: dict[Any, int]) -> Int32s:
    all_values, first = list(values), min(numbers.values(), default=0)
    for value in dict.fromkeys(all_values):
        numbers.setdefault(value, len(numbers) + first)
    return np.fromiter(map(numbers.__getitem__, all_values), np.int32, len(all_values))


def _make_intervals(spans: Sequence[Span]) -> DeviceIntervals:
    intervals = [*chain.from_iterable(map(attrgetter("device"), spans))]
    rows = np.repeat(np.arange(len(spans), dtype=np.int32), [len(span.device) for span in spans])
    labels: dict[str, int] = {}
    device, stream, start_ns, end_ns, uncertainty_ns = (
        _make_numbers(map(attrgetter(name), intervals), len(intervals))
        for name in ("device", "stream", "start_ns", "end_ns", "uncertainty_ns")
    )
    label = _number_values(map(attrgetter("label"), intervals), labels)
    # An end may be before its begin if the clock was calibrated again in between.
    end_ns = np.maximum(start_ns, end_ns)
    return DeviceIntervals(rows, device, stream, start_ns, end_ns, label, uncertainty_ns, tuple(labels))


def make_spans(trace: Columns, rows: Int64s | None = None) -> list[Span]:
    names: list[str | None] = [*trace.errors, None]
    make: Callable[..., Span] = Span
    rows = np.arange(len(trace)) if rows is None else rows
    spans: list[Span] = []
    for at in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[at : at + ROWS_AT_ONCE]
        columns: list[Iterable[Any]] = [map(trace.sites.__getitem__, trace.site[some].tolist())]
        columns += [getattr(trace, name)[some].tolist() for name in _NUMBERS]
        columns.append(map(names.__getitem__, trace.error[some].tolist()))
        spans += map(make, *columns)
        for place, intervals in _group_intervals(trace, some):
            spans[at + place].device = intervals
    for place in np.flatnonzero(trace.clipped[rows]).tolist():
        spans[place].clipped = True
    numbers, sets = trace.attributes.distinct_sets(rows)
    for place in np.flatnonzero(numbers != NONE).tolist():
        spans[place].attributes = dict(sets[numbers[place]])
    if trace.remote:
        for place, row in enumerate(rows.tolist()):
            if row in trace.remote:
                spans[place].remote = trace.remote[row]
    return spans


def _group_intervals(trace: Columns, rows: Int64s) -> Iterator[tuple[int, tuple[DeviceInterval, ...]]]:
    device = trace.device
    begins, ends = np.searchsorted(device.row, rows), np.searchsorted(device.row, rows, side="right")
    counts = ends - begins
    places = np.repeat(np.arange(len(rows)), counts)
    some = np.arange(len(places)) + (begins - np.cumsum(counts) + counts)[places]
    numbers = (column[some].tolist() for column in (device.device, device.stream, device.start_ns, device.end_ns))
    labels = map(device.labels.__getitem__, device.label[some].tolist())
    intervals = map(DeviceInterval, *numbers, labels, device.uncertainty_ns[some].tolist())
    for place, group in groupby(zip(places.tolist(), intervals, strict=True), itemgetter(0)):
        yield place, tuple(interval for _, interval in group)


class SpanViews(Views[Span]):
    """A sequence of span objects, which are made from columns on access.

    Access by one index makes one object. Any other access makes and keeps all objects. Changes to objects do not change
    `columns`.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._made: list[Span] | None = None

    def _make_items(self, rows: slice) -> Iterable[Span]:
        return make_spans(self.columns, np.arange(len(self))[rows])

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> list[Span]: ...
    def __getitem__(self, place: int | slice) -> Span | list[Span]:
        if self._made is None and not isinstance(place, slice):
            return super().__getitem__(place)
        iter(self)
        return (self._made or [])[place]

    def __iter__(self) -> Iterator[Span]:
        spans = self._made
        if spans is None:  # two threads may make a list, and one list is kept
            spans = self._made = make_spans(self.columns)
        return iter(spans)

    def __len__(self) -> int:
        return len(self.columns)


NO_NOTES = OwnNotes()


@dataclass(frozen=True, slots=True)
class MergedProcess:
    """A process of a merged trace. `facts` is a trace without spans, on the process's own clock.

    `windows` are the intervals of the process's files. `threads`, `devices` and `streams` map merged numbers to the
    process's own numbers. `absent` maps merged ids to the process's ids, for spans that have no row.

    The times of the process were moved by `moved_ns`. `is_watched` is True if torch.profiler's data is from this
    process.
    """

    facts: Trace
    windows: Sequence[Interval]
    threads: Mapping[int, int]
    devices: Mapping[int, int] = field(default_factory=dict)
    streams: Mapping[int, int] = field(default_factory=dict)
    absent: Mapping[int, int] = field(default_factory=dict)
    moved_ns: int = 0
    is_watched: bool = False


@dataclass(slots=True)
class Trace:
    """Saved or collected spans as columns, with the facts that are needed to interpret them.

    - `spans` are views of the rows of `columns`. A list of spans becomes columns, at 1.2 us per span.
    - `threads` maps native thread ids to names.
    - `losses` counts lost data by reason. `notes` are sentences on data that could not be observed. `own_notes` are
      notes that are true only for this process.
    - `window` is the index of the recording window. After `held_from_ns`, no span is missing. `held_from_ns` is 0 if no
      span is missing at all.
    - `samples` are ordered by time, device and name. `gpus` are the GPUs of the samples.
    - `kernels`, `allocations` and `flops` are data from torch.profiler. `watched` is the interval in which
      torch.profiler ran. Kernels and allocations are ordered by time.
    - `startup` is the start-up of the process, or None without a session. `died` describes an abnormal end of the
      process.
    - `processes` are the processes of a merged trace. `apart_ns` is the largest difference of their clocks.
    """

    origin: Origin
    start_ns: int
    end_ns: int
    spans: Sequence[Span]
    threads: Mapping[int, str] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    window: int = 0
    cost: Cost | None = None
    samples: Sequence[Sample] = ()
    gpus: Sequence[Gpu] = ()
    held_from_ns: int = 0
    kernels: Sequence[Kernel] = ()
    allocations: Sequence[Allocation] = ()
    watched: Interval | None = None
    startup: Startup | None = None
    flops: Sequence[Flops] = ()
    died: str = ""
    apart_ns: int = 0
    processes: Sequence[MergedProcess] = ()
    own_notes: OwnNotes = NO_NOTES
    columns: Columns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        views = self.spans if isinstance(self.spans, SpanViews) else SpanViews(columns_of_spans(self.spans))
        self.spans, self.columns = views, views.columns

    def with_columns(self, columns: Columns) -> Trace:
        return replace(self, spans=SpanViews(columns))

    def iterate_samples(self) -> Iterator[tuple[int, Sample]]:
        """Yield the samples of all gauges, each with the pid of its process. Times are on the trace's clock. The pid is
        0 for a gauge that all processes share."""
        pid = 0 if self.processes else self.origin.pid
        yield from ((pid, sample) for sample in self.samples)
        for process in self.processes:
            for sample in process.facts.samples:
                yield process.facts.origin.pid, replace(sample, at_ns=sample.at_ns + process.moved_ns)

    @property
    def coverage(self) -> Interval:
        """The part of the window in which no span is missing. Reports give shares of time relative to this part."""
        first = max(self.start_ns, self.held_from_ns)
        return first, max(self.end_ns, first)
