"""Converts a recording in memory, of this process or another one, into a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from instrument.errors import TraceError
from instrument.recording.mapped import ROWS, Mapped, details_in
from instrument.recording.mapped_facts import Detail, Header, OpenSpan, Records, RingRows, detail_of, facts_in
from instrument.recording.paths import CallTree
from instrument.recording.remote_parents import REMOTE, RemoteParent, remote_of
from instrument.recording.rows import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, KEY, Origin, OwnNotes, Site, is_request
from instrument.trace.columns import Bools, Columns, DeviceIntervals, Int32s, Int64s, device_intervals
from instrument.trace.forest import NONE
from instrument.trace.layout import GatheredAttributes, to_json
from instrument.trace.metadata import own_notes_of
from instrument.trace.self_times import self_times_of
from instrument.trace.trace import Trace

if TYPE_CHECKING:
    from instrument.trace.file import Saved

OPEN = "instrument.open"
"""The attribute of a span that was still open when its recording was read. The value is true."""

NEVER_NS = 1 << 62
"""The time in ns of the first request of a process, if it never serves one."""

NO_DETAIL = "errors and attributes of spans overwritten by newer ones"

_NOTHING = Detail(-1, None, {})


def saved_of(mapped: Mapped, since_ns: int = 0, end_ns: int | None = None) -> Saved:
    """Return the spans and the tally of a recording. Open spans end at `end_ns` and have the attribute `OPEN`.

    Spans that ended before `since_ns` are left out, and so is the tally if it has earlier calls. `end_ns` is the time
    of reading on the monotonic clock. By default it is the newest time in the recording, which is close to the end of a
    dead process. Raises `TraceError` for a damaged recording.
    """
    header = mapped.header
    snapshot = RowSnapshot.of(mapped, since_ns, remote=read_origin(header).remote)
    intervals, samples = mapped.intervals(), mapped.samples(since_ns)
    if end_ns is None:
        newest = [int(ring.rows["end_ns"].max()) for ring in snapshot.rings if len(ring.rows)]
        newest += [int(intervals["end_ns"].max())] if len(intervals) else []
        newest += [sample.at_ns for sample in samples[-1:]]
        end_ns = max([*newest, *(span.start_ns for span in snapshot.open_spans)], default=time.monotonic_ns())
    begin_ns = min(header.begun_ns, end_ns)
    try:
        columns, lacking = snapshot.columns(end_ns, lambda span_id: device_intervals(intervals, span_id), marks=True)
        losses = {**mapped.losses(), **({NO_DETAIL: lacking} if lacking else {})}
        facts = Trace(
            origin=read_origin(header),
            start_ns=max(begin_ns, since_ns),
            end_ns=max(begin_ns, since_ns, end_ns),
            spans=[],
            threads=mapped.threads(),
            losses=losses,
            notes=header.notes,
            own_notes=_read_own_notes(header),
            held_from_ns=snapshot.held_from_ns(since_ns, end_ns),
            gpus=header.gpus,
            samples=[sample for sample in samples if since_ns <= sample.at_ns <= end_ns],
        )
        tally = mapped.tally() if since_ns <= begin_ns else None  # it covers the whole time
        from instrument.trace.file import Saved  # an exporter reads no files

        return Saved(facts.with_columns(columns), tally)
    except (ValueError, OverflowError) as problem:
        raise TraceError(f"cannot read the recording of process {header.pid}: {problem}") from problem


def _read_own_notes(header: Header) -> OwnNotes:
    """Return the notes that are true for this process alone, no notes if they are damaged."""
    try:
        return own_notes_of(header.facts.get("own_notes") or {})
    except (AttributeError, TypeError, ValueError):
        return OwnNotes()


def find_first_request(mapped: Mapped) -> int:
    """Return the begin of the first request of a recording that has ended, `NEVER_NS` if there is none."""
    tree = mapped.tree()
    begins = [begin_ns for node, (begin_ns, _) in mapped.firsts().items() if is_request(tree.site(node))]
    return min(begins, default=NEVER_NS)


def read_origin(header: Header) -> Origin:
    """Return the origin of a process from the fields of its recording's header."""
    values: dict[str, Any] = {}
    for item in fields(Origin):
        kind = int if item.type == "int" else str
        value = header.origin.get(item.name)
        if isinstance(value, kind):
            values[item.name] = value
    values.update(pid=header.pid, monotonic_ns=header.monotonic_ns, realtime_ns=header.realtime_ns, boot=header.boot_id)
    return Origin(**{"service": "", **values})


def find_active_times(rows: Records) -> tuple[Int64s, Int64s]:
    """Return the indices of rows that store their active time themselves, and these times in ns."""
    places = np.flatnonzero(rows["rare"] & 1)
    return places, (rows["rare"][places] >> 1).astype(np.int64)


def have_details(rows: Records) -> Bools:
    """Return True for rows whose details are stored outside of the rows."""
    return np.asarray((rows["rare"] != 0) & (rows["rare"] & 1 == 0))


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """A copy of the rows and open spans of a recording at one moment, at about 10 ns a row.

    `details` are as `Mapped.copied_details` returns them. Rows may be missing for threads in `wrapped`, whose rings
    have wrapped, and in `given_up`, which have ended. Trees that began before the process served are below `remote`,
    if it is given.
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
    def of(
        cls,
        mapped: Mapped,
        since_ns: int = 0,
        leave_out: frozenset[int] = frozenset(),
        details_from: int = 0,
        remote: RemoteParent | None = None,
    ) -> RowSnapshot:
        """Copy the open spans, and the rows that ended after a time. Rows of the threads in `leave_out` are left out.
        Only details from the offset `details_from` on are copied."""
        open_spans, read_ns = mapped.open_spans(), time.monotonic_ns()
        rings = mapped.rows(mapped.first_after(since_ns)) if since_ns else mapped.rows()
        rings = [ring for ring in rings if ring.thread_id not in leave_out]
        has_details = any(bool(have_details(ring.rows).any()) for ring in rings) or open_spans
        details, _ = mapped.copied_details(details_from) if has_details else ([], 0)
        wrapped, given_up = map(frozenset, mapped.overwritten_since(since_ns))
        served_from_ns = NEVER_NS if remote is None else find_first_request(mapped)
        return cls(mapped.tree(), rings, open_spans, details, wrapped, given_up, read_ns, remote, served_from_ns)

    @property
    def size(self) -> int:
        """The number of rows and open spans."""
        return sum(len(ring.rows) for ring in self.rings) + len(self.open_spans)

    def held_from_ns(self, start_ns: int, end_ns: int) -> int:
        """Return the time from which on no span of a window is missing, 0 if none is missing at all."""
        oldest = self._find_oldest(start_ns, end_ns) if self.wrapped or self.given_up else {}
        edges_ns = [at_ns for thread_id, at_ns in oldest.items() if thread_id in self.wrapped]
        edges_ns += sorted(at_ns for thread_id, at_ns in oldest.items() if thread_id in self.given_up)[:1]
        return max(edges_ns, default=0)

    def _find_oldest(self, start_ns: int, end_ns: int) -> dict[int, int]:
        """Return, for each thread with a span in the window, the first end of such a span, at most the window's end."""
        oldest: dict[int, int] = {}
        for ring in self.rings:  # each in the order of ends
            ends = ring.rows["end_ns"][(ring.rows["end_ns"] > start_ns) & (ring.rows["start_ns"] < end_ns)]
            if len(ends):
                oldest[ring.thread_id] = min(int(ends[0]), end_ns, oldest.get(ring.thread_id, end_ns))
        for span in self.open_spans:
            if span.start_ns < end_ns:
                oldest.setdefault(span.thread_id, end_ns)
        return oldest

    def has_begun(self, after_ns: int, before_ns: int) -> bool:
        """Return True if a span began between two times."""
        starts = [ring.rows["start_ns"] for ring in self.rings]
        starts.append(np.array([span.start_ns for span in self.open_spans], np.int64))
        return any(bool(((after_ns < ring_starts) & (ring_starts < before_ns)).any()) for ring_starts in starts)

    def columns(
        self,
        end_ns: int,
        device_of: Callable[[Int64s], DeviceIntervals],
        *,
        start_ns: int | None = None,
        marks: bool = False,
    ) -> tuple[Columns, int]:
        """Return the spans, the open ones cut at the end, and the number of rows whose details are overwritten.

        With a `start_ns`, spans are clipped to the window, and those outside of it are left out. The self time of a
        clipped span excludes its children within the window. `device_of` returns the device intervals of spans by their
        ids. With `marks`, open spans have the attribute `OPEN`.
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
        count, details = len(rows), details_in(self.details)

        def column(name: str, of_open: Sequence[int]) -> Int64s:
            return np.concatenate([rows[name].astype(np.int64), np.array(of_open, np.int64)])

        read_ns = end_ns if start_ns is None else self.read_ns
        span_id = column("span_id", [span.span_id for span in opened])
        starts = column("start_ns", [span.start_ns for span in opened])
        ends = column("end_ns", [max(read_ns, span.start_ns) for span in opened])
        active_ns = ends - starts
        places, numbers = find_active_times(rows)
        active_ns[places] = np.minimum(numbers, active_ns[places])
        for row, span in enumerate(opened, count):
            if span.active_ns >= 0:
                active_ns[row] = min(span.active_ns, int(active_ns[row]))
        children_ns = column("children_ns", _measure_children(opened, read_ns))
        further = _Further(len(span_id))
        for row in [*np.flatnonzero(have_details(rows)).tolist(), *range(count, len(span_id))]:
            further.add(row, details.get(int(span_id[row])), opened[row - count] if row >= count else None, marks=marks)
        for row, own_ns in further.active:
            active_ns[row] = min(own_ns, int(active_ns[row]))
        self_ns = np.clip(active_ns - children_ns, 0, ends - starts)
        begins, clipped = starts, np.arange(len(span_id)) >= count
        ends[count:] = np.maximum(np.minimum(ends[count:], end_ns), starts[count:])
        if start_ns is not None:
            clipped |= (starts < start_ns) | (ends > end_ns)
            starts = np.maximum(starts, start_ns)
            ends = np.where(clipped, np.maximum(np.minimum(ends, end_ns), starts), ends)
            active_ns = np.where(clipped, np.minimum(active_ns, ends - starts), active_ns)
            self_ns = np.where(clipped, np.minimum(self_ns, ends - starts), self_ns)
        sites, site = _number_sites(self.tree, column("node", [span.node for span in opened]))
        snapshot = Columns(
            sites=sites,
            errors=tuple(further.errors),
            span_id=span_id,
            parent_id=column("parent_id", [span.parent_id for span in opened]),
            root_id=column("root_id", [span.root_id for span in opened]),
            thread_id=np.concatenate([threads, np.array([span.thread_id for span in opened], np.int64)]),
            task_id=column("task", [span.task_id for span in opened]),
            start_ns=starts,
            end_ns=ends,
            active_ns=active_ns,
            self_ns=self_ns,
            site=site,
            error=further.error,
            clipped=clipped,
            device=device_of(span_id),
            attributes=further.attributes.packed(np.arange(len(span_id), dtype=np.int32)),
            remote=further.remote,
        )
        if self.remote is not None:
            serves = snapshot.root_id & REQUEST_BIT != 0
            for name in (KEY, BATCH_KEYS):
                serves[snapshot.attributes.having(name)] = True
            is_first = begins < min([self.served_from_ns, *begins[serves].tolist()])
            first = np.flatnonzero(is_first & ~serves & (span_id == snapshot.root_id))
            further.remote.update({row: self.remote for row in first.tolist() if row not in further.remote})
        cut = np.flatnonzero(clipped) if start_ns is not None else ()
        if len(cut):
            snapshot.self_ns[cut] = np.minimum(snapshot.self_ns[cut], self_times_of(snapshot, np.asarray(cut)))
        return snapshot, further.lacking


class _Further:
    """Collects the errors, attributes, active times and remote parents of rows from their details."""

    def __init__(self, count: int) -> None:
        self.error = np.full(count, NONE, np.int32)
        self.errors: dict[str, int] = {}
        self.active: list[tuple[int, int]] = []
        self.remote: dict[int, RemoteParent] = {}
        self.attributes = GatheredAttributes()
        self.lacking = 0

    def add(self, row: int, written_detail: tuple[int, bytes] | None, span: OpenSpan | None, *, marks: bool) -> None:
        """Add the details of a row, None if they were overwritten or if an open `span` has none."""
        self.lacking += written_detail is None and span is None
        detail = _NOTHING if written_detail is None else detail_of(written_detail[0], facts_in(written_detail[1]))
        if detail.active_ns >= 0:
            self.active.append((row, detail.active_ns))
        if detail.error is not None:
            self.error[row] = self.errors.setdefault(detail.error, len(self.errors))
        attributes = {**detail.attributes, **(span.attributes if span is not None else {})}
        remote_value = attributes.pop(REMOTE, None)
        caller = remote_of(tuple(remote_value) if isinstance(remote_value, list) else remote_value)
        if caller is not None:
            self.remote[row] = caller
        if span is not None and marks:
            attributes[OPEN] = True
        if attributes:
            self.attributes.add(row, to_json(attributes))


def _measure_children(opened: Sequence[OpenSpan], read_ns: int) -> list[int]:
    """Return the time of the children of each open span, including open children."""
    children_ns = {span.span_id: span.children_ns for span in opened}
    line = {span.span_id: (span.thread_id, span.task_id) for span in opened}
    for span in opened:
        if line.get(span.parent_id) == line[span.span_id]:
            children_ns[span.parent_id] += max(read_ns - span.start_ns, 0)
    return list(children_ns.values())


def _number_sites(tree: CallTree, node: Int64s) -> tuple[tuple[Site, ...], Int32s]:
    """Return the distinct sites of some nodes, and the index of each node's site."""
    numbers = np.array(tree.site_of, dtype=np.int64)[node]
    used = np.bincount(numbers, minlength=len(tree.sites)) > 0
    places = (np.cumsum(used) - 1).astype(np.int32)
    return tuple(tree.sites[number] for number in np.flatnonzero(used).tolist()), places[numbers]
