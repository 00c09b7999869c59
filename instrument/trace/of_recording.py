"""Converts a recording in memory, of this process or another one, into a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording.mapped import ROWS, Mapped, parse_details
from instrument.recording.mapped_facts import Header, OpenSpan, Records, RingRows, parse_detail, parse_facts
from instrument.recording.memory_layout import REQUEST_BIT
from instrument.recording.paths import CallTree
from instrument.recording.spans import BATCH_KEYS, KEY, AttributeValue, Origin, OwnNotes, is_request
from instrument.recording.trace_context import REMOTE, RemoteParent, parse_parent
from instrument.trace.columns import Bools, Columns, DeviceIntervals, Int64s, device_intervals
from instrument.trace.indices import NONE
from instrument.trace.metadata import read_own_notes
from instrument.trace.self_times import self_times_of
from instrument.trace.text import GatheredAttributes, attributes_to_json
from instrument.trace.trace import Trace

if TYPE_CHECKING:
    from instrument.trace.file import Saved

OPEN = "instrument.open"
"""The attribute that marks a span that was open when its recording was read."""

NEVER_NS = 1 << 62
"""The time in ns that replaces the first request's begin if a process has served no request."""

NO_DETAIL = "errors and attributes of spans overwritten by newer ones"


class RowDetail(NamedTuple):
    """The values of a span that most spans do not have. `active_ns` is -1 if the span was active all the time. `remote`
    is the remote parent."""

    active_ns: int = -1
    error: str | None = None
    attributes: Mapping[str, AttributeValue] = MappingProxyType({})
    remote: RemoteParent | None = None

    @classmethod
    def from_recorded(cls, active_ns: int, text: bytes) -> RowDetail:
        active_ns, error, attributes = parse_detail(active_ns, parse_facts(text))
        return cls(active_ns, error, *split_remote_parent(attributes))


def split_remote_parent(attributes: Mapping[str, Any]) -> tuple[Mapping[str, AttributeValue], RemoteParent | None]:
    if REMOTE not in attributes:
        return attributes, None
    noted = attributes[REMOTE]
    remote = parse_parent(tuple(noted) if isinstance(noted, list) else noted)
    return {name: value for name, value in attributes.items() if name != REMOTE}, remote


def read_spans_and_tally(mapped: Mapped, since_ns: int = 0, end_ns: int | None = None) -> Saved:
    """Return the spans and totals of a recording. Open spans end at `end_ns` and have the attribute `OPEN`.

    Spans that ended before `since_ns` are left out. The totals are left out if they include earlier calls. `end_ns` is
    by default the newest time in the recording. Raises `TraceError` for a damaged recording.
    """
    header = mapped.header
    snapshot = RowSnapshot.copy_from(mapped, since_ns, remote=read_origin(header).remote)
    intervals, samples = mapped.read_intervals(), mapped.read_samples(since_ns)
    if end_ns is None:
        newest = [int(ring.rows["end_ns"].max()) for ring in snapshot.rings if len(ring.rows)]
        newest += [int(intervals["end_ns"].max())] if len(intervals) else []
        newest += [sample.at_ns for sample in samples[-1:]]
        end_ns = max([*newest, *(span.start_ns for span in snapshot.open_spans)], default=time.monotonic_ns())
    begin_ns, own_notes = min(header.begun_ns, end_ns), OwnNotes()
    with suppress(AttributeError, TypeError, ValueError):  # a damaged header has no notes
        own_notes = read_own_notes(header.facts.get("own_notes") or {})
    try:
        columns, lacking = snapshot.make_columns(
            end_ns, lambda span_id: device_intervals(intervals, span_id), marks=True
        )
        losses = {**mapped.losses(), **({NO_DETAIL: lacking} if lacking else {})}
        facts = Trace(
            origin=read_origin(header),
            start_ns=max(begin_ns, since_ns),
            end_ns=max(begin_ns, since_ns, end_ns),
            spans=[],
            threads=mapped.read_thread_names(),
            losses=losses,
            notes=header.notes,
            own_notes=own_notes,
            held_from_ns=snapshot.find_complete_from(since_ns, end_ns),
            gpus=header.gpus,
            samples=[sample for sample in samples if since_ns <= sample.at_ns <= end_ns],
        )
        tally = mapped.tally() if since_ns <= begin_ns else None  # it covers the whole time
        from instrument.trace.file import Saved  # an exporter reads no files

        return Saved(facts.with_columns(columns), tally)
    except (ValueError, OverflowError) as problem:
        raise TraceError(f"cannot read the recording of process {header.pid}: {problem}") from problem


def find_first_request_ns(mapped: Mapped) -> int:
    tree = mapped.read_tree()
    begins = [begin_ns for node, (begin_ns, _) in mapped.first_calls().items() if is_request(tree.site(node))]
    return min(begins, default=NEVER_NS)


def read_origin(header: Header) -> Origin:
    kinds = {item.name: int if item.type == "int" else str for item in fields(Origin)}
    values: dict[str, Any] = {
        name: value for name, value in header.origin.items() if isinstance(value, kinds.get(name, ()))
    }
    values.update(pid=header.pid, monotonic_ns=header.monotonic_ns, realtime_ns=header.realtime_ns, boot=header.boot_id)
    return Origin(**{"service": "", **values})


def have_details(rows: Records) -> Bools:
    return np.asarray((rows["rare"] != 0) & (rows["rare"] & 1 == 0))


_SHARED = ("span_id", "parent_id", "root_id", "start_ns", "children_ns", "node")
"""The fields of a row that an open span also has, under the same names."""


def columns_of_rows(
    rows: Records | Mapping[str, NDArray[Any]], thread_id: Int64s, opened: Sequence[OpenSpan], end_ns: int
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Return rows and open spans as columns. Open spans come last and end at `end_ns`. An active time of -1 means the
    whole span."""
    names = (*_SHARED, "task_id", "thread_id", "active_ns")
    of_open = {name: np.array([getattr(span, name) for span in opened], np.int64) for name in names}
    columns = {name: np.concatenate([rows[name].astype(np.int64), of_open[name]]) for name in _SHARED}
    columns["task_id"] = np.concatenate([rows["task"].astype(np.int64), of_open["task_id"]])
    columns["thread_id"] = np.concatenate([thread_id, of_open["thread_id"]])
    columns["end_ns"] = np.concatenate([rows["end_ns"].astype(np.int64), np.maximum(of_open["start_ns"], end_ns)])
    active_ns = np.where(rows["rare"] & np.uint64(1), (rows["rare"] >> np.uint64(1)).astype(np.int64), -1)
    columns["active_ns"] = np.concatenate([active_ns, of_open["active_ns"]])
    return columns


class RowDetails:
    """Collects the values that few rows have, such as errors. `columns` is a result of `columns_of_rows`. `store` is
    called with the attributes of each row."""

    def __init__(
        self, columns: Mapping[str, Int64s], store: Callable[[int, Mapping[str, AttributeValue]], object]
    ) -> None:
        self.lengths: Int64s = columns["end_ns"] - columns["start_ns"]
        self.active_ns = np.where(
            columns["active_ns"] < 0, self.lengths, np.minimum(columns["active_ns"], self.lengths)
        )
        self.error = np.full(len(self.lengths), NONE, np.int32)
        self.errors: dict[str, int] = {}
        self.remote: dict[int, RemoteParent] = {}
        self._children_ns, self._store = columns["children_ns"], store

    def add(self, row: int, detail: RowDetail) -> None:
        if detail.attributes:
            self._store(row, detail.attributes)
        if detail.remote is not None:
            self.remote[row] = detail.remote
        if detail.error is not None:
            self.error[row] = self.errors.setdefault(detail.error, len(self.errors))
        if detail.active_ns >= 0:
            self.active_ns[row] = min(detail.active_ns, int(self.active_ns[row]))

    @property
    def self_ns(self) -> Int64s:
        return np.asarray(np.clip(self.active_ns - self._children_ns, 0, self.lengths))


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """A copy of the rows and open spans of a recording at one moment. A copy takes about 10 ns per row.

    `details` are as `Mapped.copy_details` returns them. Rows may be missing for two groups of threads. The rings of
    threads in `wrapped` have overwritten rows. Threads in `given_up` have ended.

    Trees that began before the first request have the parent `remote`.
    """

    tree: CallTree
    rings: Sequence[RingRows]
    open_spans: Sequence[OpenSpan]
    details: Sequence[bytes]
    wrapped: frozenset[int]
    given_up: frozenset[int]
    read_ns: int
    remote: RemoteParent | None = None
    served_from_ns: int = NEVER_NS

    @classmethod
    def copy_from(
        cls,
        mapped: Mapped,
        since_ns: int = 0,
        leave_out: frozenset[int] = frozenset(),
        details_from: int = 0,
        remote: RemoteParent | None = None,
    ) -> RowSnapshot:
        open_spans, read_ns = mapped.open_spans(), time.monotonic_ns()
        rings = mapped.read_rows(mapped.find_first_rows_after(since_ns)) if since_ns else mapped.read_rows()
        rings = [ring for ring in rings if ring.thread_id not in leave_out]
        has_details = any(bool(have_details(ring.rows).any()) for ring in rings) or open_spans
        details, _ = mapped.copy_details(details_from) if has_details else ([], 0)
        wrapped, given_up = map(frozenset, mapped.find_threads_with_losses(since_ns))
        served_from_ns = NEVER_NS if remote is None else find_first_request_ns(mapped)
        return cls(mapped.read_tree(), rings, open_spans, details, wrapped, given_up, read_ns, remote, served_from_ns)

    @property
    def size(self) -> int:
        return sum(len(ring.rows) for ring in self.rings) + len(self.open_spans)

    def find_complete_from(self, start_ns: int, end_ns: int) -> int:
        """Return the time from which on a window is complete. Return 0 if the whole window is complete."""
        if not (self.wrapped or self.given_up):
            return 0
        # The earliest end of a span in the window, by thread, at most the window's end.
        oldest: dict[int, int] = {}
        for ring in self.rings:  # each in the order of ends
            ends = ring.rows["end_ns"][(ring.rows["end_ns"] > start_ns) & (ring.rows["start_ns"] < end_ns)]
            if len(ends):
                oldest[ring.thread_id] = min(int(ends[0]), end_ns, oldest.get(ring.thread_id, end_ns))
        for span in self.open_spans:
            if span.start_ns < end_ns:
                oldest.setdefault(span.thread_id, end_ns)
        edges_ns = [at_ns for thread_id, at_ns in oldest.items() if thread_id in self.wrapped]
        edges_ns += sorted(at_ns for thread_id, at_ns in oldest.items() if thread_id in self.given_up)[:1]
        return max(edges_ns, default=0)

    def has_span_begun(self, after_ns: int, before_ns: int) -> bool:
        starts = [ring.rows["start_ns"] for ring in self.rings]
        starts.append(np.array([span.start_ns for span in self.open_spans], np.int64))
        return any(bool(((after_ns < ring_starts) & (ring_starts < before_ns)).any()) for ring_starts in starts)

    def make_columns(
        self,
        end_ns: int,
        device_of: Callable[[Int64s], DeviceIntervals],
        *,
        start_ns: int | None = None,
        marks: bool = False,
    ) -> tuple[Columns, int]:
        """Return the spans, and the number of rows whose details were overwritten. Open spans end at `end_ns`.

        With a `start_ns`, spans are clipped to the window, and spans outside of it are left out. `device_of` returns
        the device intervals of spans by their ids. With `marks`, open spans have the attribute `OPEN`.
        """
        rows = np.concatenate([np.zeros(0, ROWS), *(ring.rows for ring in self.rings)])
        threads = np.repeat([ring.thread_id for ring in self.rings], [len(ring.rows) for ring in self.rings])
        _, first = np.unique(rows["span_id"], return_index=True)
        order = np.sort(first)
        order = order[rows["node"][order] < len(self.tree)]
        if start_ns is not None:
            order = order[(rows["end_ns"][order] > start_ns) & (rows["start_ns"][order] < end_ns)]
        rows, threads = rows[order], threads[order].astype(np.int64)
        ended = set(rows["span_id"][np.isin(rows["span_id"], [span.span_id for span in self.open_spans])].tolist())
        opened = [span for span in self.open_spans if span.span_id not in ended]  # a span may have ended since the copy
        opened = [span for span in opened if span.start_ns < end_ns + (start_ns is None)]
        read_ns = end_ns if start_ns is None else self.read_ns
        columns = columns_of_rows(rows, threads, opened, read_ns)
        count, starts, ends, span_id = len(rows), columns["start_ns"], columns["end_ns"], columns["span_id"]
        # The children of an open span may be open themselves.
        children_ns = {span.span_id: span.children_ns for span in opened}
        line = {span.span_id: (span.thread_id, span.task_id) for span in opened}
        for span in opened:
            if line.get(span.parent_id) == line[span.span_id]:
                children_ns[span.parent_id] += max(read_ns - span.start_ns, 0)
        columns["children_ns"][count:] = list(children_ns.values())
        gathered, lacking = GatheredAttributes(), 0
        further = RowDetails(columns, lambda row, attributes: gathered.add(row, attributes_to_json(attributes)))
        details = parse_details(self.details)
        for row in [*np.flatnonzero(have_details(rows)).tolist(), *range(count, len(span_id))]:
            written_detail = details.get(int(span_id[row]))
            detail = RowDetail() if written_detail is None else RowDetail.from_recorded(*written_detail)
            if row >= count:
                attributes, remote = split_remote_parent({**detail.attributes, **opened[row - count].attributes})
                attributes = {**attributes, OPEN: True} if marks else attributes
                detail = detail._replace(attributes=attributes, remote=remote or detail.remote)
            else:
                lacking += written_detail is None
            further.add(row, detail)
        active_ns, self_ns = further.active_ns, further.self_ns
        begins, clipped = starts, np.arange(len(span_id)) >= count
        ends[count:] = np.maximum(np.minimum(ends[count:], end_ns), starts[count:])
        if start_ns is not None:
            clipped |= (starts < start_ns) | (ends > end_ns)
            starts = np.maximum(starts, start_ns)
            ends = np.where(clipped, np.maximum(np.minimum(ends, end_ns), starts), ends)
            active_ns = np.where(clipped, np.minimum(active_ns, ends - starts), active_ns)
            self_ns = np.where(clipped, np.minimum(self_ns, ends - starts), self_ns)
        of_node = np.array(self.tree.site_of, dtype=np.int64)[columns["node"]]
        used = np.bincount(of_node, minlength=len(self.tree.sites)) > 0
        snapshot = Columns(
            sites=tuple(self.tree.sites[number] for number in np.flatnonzero(used).tolist()),
            errors=tuple(further.errors),
            **{name: columns[name] for name in ("span_id", "parent_id", "root_id", "thread_id", "task_id")},
            start_ns=starts,
            end_ns=ends,
            active_ns=active_ns,
            self_ns=self_ns,
            site=(np.cumsum(used) - 1).astype(np.int32)[of_node],
            error=further.error,
            clipped=clipped,
            device=device_of(span_id),
            attributes=gathered.pack_attributes(np.arange(len(span_id), dtype=np.int32)),
            remote=further.remote,
        )
        if self.remote is not None:
            serves = snapshot.root_id & REQUEST_BIT != 0
            for name in (KEY, BATCH_KEYS):
                serves[snapshot.attributes.rows_with_attribute(name)] = True
            is_first = begins < min([self.served_from_ns, *begins[serves].tolist()])
            first = np.flatnonzero(is_first & ~serves & (span_id == snapshot.root_id))
            further.remote.update({row: self.remote for row in first.tolist() if row not in further.remote})
        cut = np.flatnonzero(clipped) if start_ns is not None else ()
        if len(cut):
            snapshot.self_ns[cut] = np.minimum(snapshot.self_ns[cut], self_times_of(snapshot, np.asarray(cut)))
        return snapshot, lacking
