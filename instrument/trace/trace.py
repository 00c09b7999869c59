"""A trace: columns of spans, and the facts of the process that recorded them. A span is a view of a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any, overload

import numpy as np

from instrument.recording.allocations import Allocation
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
    AttributesOfRows,
    Columns,
    DeviceIntervals,
    Int32s,
    Int64s,
    extended,
)
from instrument.trace.forest import NONE


def columns_of_spans(spans: Sequence[Span]) -> Columns:
    """The columns of spans, in their order, at 1.2 us a span.

    Raises `ValueError` for spans that are no sound trace.
    """
    sites: dict[Site, int] = {}
    errors: dict[str | None, int] = {None: NONE}
    site_numbers = _numbered(map(attrgetter("site"), spans), sites)
    error_numbers = _numbered(map(attrgetter("error"), spans), errors)
    intervals, rows = _intervals(spans)
    columns = {name: _numbers(map(attrgetter(name), spans), len(spans)) for name in _NUMBERS}
    return Columns(
        sites=tuple(sites),
        errors=tuple(error for error in errors if error is not None),
        **columns,
        site=site_numbers,
        error=error_numbers,
        clipped=np.fromiter(map(attrgetter("clipped"), spans), np.bool_, len(spans)),
        device=_columns_of(intervals, rows),
        attributes=AttributesOfRows({
            row: its for row, its in enumerate(map(attrgetter("attributes"), spans)) if its
        }),
        remote={
            row: remote for row, remote in enumerate(map(attrgetter("remote"), spans)) if remote is not None
        },
    )  # fmt: skip


def with_spans(trace: Columns, spans: Sequence[Span]) -> Columns:
    """The trace with further spans behind its rows, which have no device intervals and no remote parents."""
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
        attributes=extended(trace.attributes, len(trace), [span.attributes for span in spans]),
    )


_NUMBERS = (
    "span_id", "parent_id", "root_id", "thread_id", "task_id", "start_ns", "end_ns", "active_ns", "self_ns",
)  # fmt: skip


def _numbers(values: Iterable[int], count: int) -> Int64s:
    try:
        return np.fromiter(values, np.int64, count)
    except OverflowError as problem:
        raise ValueError("it has a number of more than 64 bits; it is damaged") from problem


def _numbered(values: Iterable[Any], known: dict[Any, int]) -> Int32s:
    """Return the number of each value: new ones are counted on, by first sight."""
    found, first = list(values), min(known.values(), default=0)
    for value in dict.fromkeys(found):
        known.setdefault(value, len(known) + first)
    return np.fromiter(map(known.__getitem__, found), np.int32, len(found))


def _intervals(spans: Sequence[Span]) -> tuple[list[DeviceInterval], Int32s]:
    of_spans = list(map(attrgetter("device"), spans))
    counts = np.fromiter(map(len, of_spans), np.int32, len(spans))
    return list(chain.from_iterable(of_spans)), np.repeat(np.arange(len(spans), dtype=np.int32), counts)


def device_columns(found: Sequence[tuple[int, Sequence[DeviceInterval]]]) -> DeviceIntervals:
    """Return the intervals of rows as columns. The rows are in order."""
    rows = np.repeat(np.array([row for row, _ in found], np.int32), [len(its) for _, its in found])
    return _columns_of([*chain.from_iterable(its for _, its in found)], rows)


def _columns_of(intervals: Sequence[DeviceInterval], rows: Int32s) -> DeviceIntervals:
    labels: dict[str, int] = {}
    device, stream, start_ns, end_ns, uncertainty_ns = (
        _numbers(map(attrgetter(name), intervals), len(intervals))
        for name in ("device", "stream", "start_ns", "end_ns", "uncertainty_ns")
    )
    label = _numbered(map(attrgetter("label"), intervals), labels)
    # Where a clock was placed anew between the two, an end may lie before its begin.
    end_ns = np.maximum(start_ns, end_ns)
    return DeviceIntervals(rows, device, stream, start_ns, end_ns, label, uncertainty_ns, tuple(labels))


ROWS_AT_ONCE = 20_000
"""Rows of which objects are made together: each number is an object of its own meanwhile."""


def spans_of(trace: Columns, rows: Int64s | None = None) -> list[Span]:
    """Columns as objects, a span for each row, or for each of some, in their order."""
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
        for place, its in _devices_of(trace, some):
            spans[at + place].device = its
    for place in np.flatnonzero(trace.clipped[rows]).tolist():
        spans[place].clipped = True
    numbers, sets = trace.attributes.distinct(rows)
    for place in np.flatnonzero(numbers != NONE).tolist():
        spans[place].attributes = dict(sets[numbers[place]])
    if trace.remote:
        for place, row in enumerate(rows.tolist()):
            if row in trace.remote:
                spans[place].remote = trace.remote[row]
    return spans


def _devices_of(trace: Columns, rows: Int64s) -> Iterator[tuple[int, tuple[DeviceInterval, ...]]]:
    """The intervals of each of some rows that has any, by its place among these."""
    its = trace.device
    begins, ends = np.searchsorted(its.row, rows), np.searchsorted(its.row, rows, side="right")
    counts = ends - begins
    places = np.repeat(np.arange(len(rows)), counts)
    some = np.arange(len(places)) + (begins - np.cumsum(counts) + counts)[places]
    numbers = (one[some].tolist() for one in (its.device, its.stream, its.start_ns, its.end_ns))
    labels = map(its.labels.__getitem__, its.label[some].tolist())
    made = map(DeviceInterval, *numbers, labels, its.uncertainty_ns[some].tolist())
    for place, group in groupby(zip(places.tolist(), made, strict=True), itemgetter(0)):
        yield place, tuple(interval for _, interval in group)


class SpanViews(Sequence[Span]):
    """The spans of columns, as objects that are made when somebody looks at them: of one place that one, else all,
    which stay.

    Whoever wants columns takes `columns`, which know nothing of what becomes of the objects.
    """

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._made: list[Span] | None = None

    def _all(self) -> list[Span]:
        made = self._made
        if made is None:  # two threads may make them, and one of both lists stays
            made = self._made = spans_of(self.columns)
        return made

    @overload
    def __getitem__(self, place: int) -> Span: ...
    @overload
    def __getitem__(self, place: slice) -> list[Span]: ...
    def __getitem__(self, place: int | slice) -> Span | list[Span]:
        if self._made is not None or isinstance(place, slice):
            return self._all()[place]
        row = range(len(self))[place]
        return spans_of(self.columns, np.array([row]))[0]

    def __iter__(self) -> Iterator[Span]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self.columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, SpanViews)):
            return NotImplemented
        return self._all() == [*other]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())


NO_NOTES = OwnNotes()


@dataclass(frozen=True, slots=True)
class MergedProcess:
    """A process among those of a merged trace: its `facts`, which is a trace without spans, on its own clock.

    `windows` are the parts of time of its files. The numbers that it gave to threads, devices, streams and absent spans
    are by the merged ones. Times were moved by `moved_ns`. What torch.profiler saw is of the process that `is_watched`.
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
    """Columns of spans as saved or collected, with all that is needed to judge what they can and cannot say.

    `spans` are views of the rows of `columns`. A list of spans becomes columns here, at 1.2 us a span.
    `threads` maps native thread ids to names. `losses` counts, by reason, what was not kept. `notes` are sentences
    on what could not be observed. `window` is the index of the recording window. `samples` are in the order of time,
    device and name, `gpus` are the devices that they name. `held_from_ns` is the time since when no span was
    overwritten by a newer one, 0 where none was. `kernels` and `allocations`, each in the order of time, are
    what torch.profiler saw in the part of time that is `watched`, None where it saw nothing. `flops` are those of the
    operators that it saw with our spans. `startup` is of the process,
    None where the trace is not of a session. `died` says how a process ended that said no goodbye, and within what.
    `apart_ns` is how far the clocks of the processes in it are apart at most. `processes` are those of a merged trace,
    none where it is of one. `own_notes` says which `notes` hold for the process alone.
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
        """Make columns of a list of spans. Raises `ValueError` for spans that are no sound trace."""
        its = self.spans if isinstance(self.spans, SpanViews) else SpanViews(columns_of_spans(self.spans))
        self.spans, self.columns = its, its.columns

    def with_columns(self, columns: Columns) -> Trace:
        """Return the facts of this trace with other columns."""
        return replace(self, spans=SpanViews(columns))

    @property
    def held(self) -> Interval:
        """The part of the window of which every span is there that was kept: what shares of time can be told of."""
        first = max(self.start_ns, self.held_from_ns)
        return first, max(self.end_ns, first)
