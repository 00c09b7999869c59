"""Rows of a recording as a trace: those taken from the rings of this process, or all that a mapped memory has now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording import memory_layout
from instrument.recording.mapped import Mapped
from instrument.recording.mapped_facts import Detail, Header, OpenSpan, RingRows
from instrument.recording.remote_parents import REMOTE, RemoteParent, remote_of
from instrument.recording.rows import SPAN_ID, START_NS, STREAM, Block, Row, Taken, more_of, packed_row, row_of
from instrument.recording.spans import AttributeValue, Origin, OwnNotes, Site
from instrument.trace.columns import (
    FARTHEST_NS,
    AttributesOfRows,
    Bools,
    Columns,
    DeviceIntervals,
    Int32s,
    Int64s,
    device_intervals,
)
from instrument.trace.forest import NONE
from instrument.trace.layout import as_tuples
from instrument.trace.metadata import own_notes_of
from instrument.trace.self_times import self_times_of
from instrument.trace.trace import Trace

if TYPE_CHECKING:
    from instrument.trace.file import Saved

_SIGNED = {"Q": "i8", "q": "i8", "I": "u4"}
ROW = np.dtype([(name, _SIGNED[code]) for name, (_, code) in memory_layout.ROW.fields.items()])
"""A row, as `instrument.recording.rows.PACKED_ROW` has it. No recorder reaches ids beyond 63 bits."""

Rows = NDArray[Any]


def numbers_in(rows: Rows) -> tuple[Int64s, Int64s]:
    """The places of the rows that tell their active time as a number, and these times."""
    places = np.flatnonzero(rows["rare"] & 1)
    return places, (rows["rare"][places] >> 1).astype(np.int64)


def has_more(rows: Rows) -> Bools:
    """Return True for rows that have more beside their numbers."""
    return np.asarray((rows["rare"] != 0) & (rows["rare"] & 1 == 0))


class _Part(NamedTuple):
    """Rows of one thread, and what some of them have more: the places of these, and of each what recorders note."""

    thread_id: int
    rows: Rows
    places: Int64s
    more: Sequence[Any]


def columns_of(
    taken: Taken,
    start_ns: int,
    end_ns: int,
    device_of: Callable[[Int64s], DeviceIntervals] | None = None,
    open_until_ns: int | None = None,
) -> Columns:
    """Return the spans in the window, or reaching into it, clipped to it; open ones end with it, or at their own time.

    `device_of` returns the device intervals of spans by their ids. The self time of a clipped span is the rest of it
    without its children within the window, because its row has that of all of it.
    """
    parts = [*_finished(taken, start_ns, end_ns)]
    finished = sum(len(part.rows) for part in parts)
    parts += _still_open(taken, parts, end_ns)
    columns = {name: np.concatenate([_NO_ROWS[name], *(part.rows[name] for part in parts)]) for name in _WANTED}
    starts, ends = columns["start_ns"], columns["end_ns"]
    more = _More(parts)
    active_ns = ends - starts
    active_ns[more.active_rows] = np.minimum(more.active_ns, active_ns[more.active_rows])
    self_ns = np.clip(active_ns - columns["children_ns"], 0, ends - starts)
    clipped = (starts < start_ns) | (ends > end_ns)
    clipped[finished:], ends[finished:] = True, end_ns if open_until_ns is None else open_until_ns
    starts = np.maximum(starts, start_ns)
    ends = np.where(clipped, np.maximum(np.minimum(ends, end_ns), starts), ends)
    sites, site = _sites(taken, columns["node"])
    found = Columns(
        sites=sites,
        errors=tuple(more.errors),
        span_id=columns["span_id"],
        parent_id=columns["parent_id"],
        root_id=columns["root_id"],
        thread_id=np.repeat([part.thread_id for part in parts], [len(part.rows) for part in parts]).astype(np.int64),
        task_id=columns["task"].astype(np.int64),
        start_ns=starts,
        end_ns=ends,
        active_ns=np.where(clipped, np.minimum(active_ns, ends - starts), active_ns),
        self_ns=np.where(clipped, np.minimum(self_ns, ends - starts), self_ns),
        site=site,
        error=more.error,
        clipped=clipped,
        device=DeviceIntervals.none() if device_of is None else device_of(columns["span_id"]),
        attributes=AttributesOfRows(more.attributes),
        remote=more.remote,
    )
    cut = np.flatnonzero(clipped)
    if len(cut):
        found.self_ns[cut] = np.minimum(found.self_ns[cut], self_times_of(found, cut))
    return found


class _More:
    """The further facts of rows, by the row among all."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self.errors: dict[str, int] = {}
        self.error = np.full(sum(len(part.rows) for part in parts), NONE, dtype=np.int32)
        active_rows: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        active_ns: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        self._rows: list[int] = []
        self._active_ns: list[int] = []
        self.attributes: dict[int, Mapping[str, AttributeValue]] = {}
        self.remote: dict[int, RemoteParent] = {}
        first = 0
        for part in parts:
            for row, its in zip((part.places + first).tolist(), part.more, strict=True):
                self._take(row, *(its if isinstance(its, tuple) else (-1, None, its)))
            its_rows, its_active_ns = numbers_in(part.rows)
            active_rows.append(its_rows + first)
            active_ns.append(its_active_ns)
            first += len(part.rows)
        self.active_rows = np.concatenate([*active_rows, np.array(self._rows, dtype=np.int64)])
        self.active_ns = np.concatenate([*active_ns, np.array(self._active_ns, dtype=np.int64)])

    def _take(self, row: int, active_ns: int, error: str | None, attributes: Mapping[Any, Any] | None) -> None:
        if active_ns >= 0:
            self._rows.append(row)
            self._active_ns.append(active_ns)
        if error is not None:
            self.error[row] = self.errors.setdefault(error, len(self.errors))
        if attributes and (REMOTE in attributes or STREAM in attributes):
            remote = remote_of(attributes.get(REMOTE))
            if remote is not None:
                self.remote[row] = remote
            attributes = {name: value for name, value in attributes.items() if name is not STREAM and name != REMOTE}
        if attributes:
            self.attributes[row] = attributes


def _finished(taken: Taken, start_ns: int, end_ns: int) -> Iterator[_Part]:
    for block in taken.blocks:
        rows = np.frombuffer(block.rows, dtype=ROW)
        kept = (rows["end_ns"] > start_ns) & (rows["start_ns"] < end_ns)
        says_more = has_more(rows)
        rare: Sequence[Any] = block.rare
        if not kept.all():
            rare = [its for its, is_kept in zip(rare, kept[says_more].tolist(), strict=True) if is_kept]
            rows, says_more = rows[kept], says_more[kept]
        yield _Part(block.thread_id, rows, np.flatnonzero(says_more), rare)


def _still_open(taken: Taken, finished: Sequence[_Part], end_ns: int) -> Iterator[_Part]:
    """Yield the spans that were open and have not ended since; ended ones are among the finished."""
    rows = {row[SPAN_ID]: (thread_id, row) for thread_id, row in taken.open_rows if row[START_NS] < end_ns}
    ids = np.array([*rows], dtype=np.int64)
    for part in finished if rows else ():
        for span_id in part.rows["span_id"][np.isin(part.rows["span_id"], ids)].tolist():
            rows.pop(span_id, None)
    for thread_id, row in rows.values():
        yield _Part(thread_id, np.frombuffer(packed_row(row), dtype=ROW), np.zeros(1, dtype=np.int64), [more_of(row)])


def _sites(taken: Taken, node: NDArray[Any]) -> tuple[tuple[Site, ...], Int32s]:
    """The sites of rows, and of each row its place among them."""
    of_nodes, sites = np.array(taken.tree.site_of, dtype=np.int64), taken.tree.sites
    numbers = of_nodes[node]
    used = np.bincount(numbers, minlength=len(sites)) > 0
    places = (np.cumsum(used) - 1).astype(np.int32)
    return tuple(sites[number] for number in np.flatnonzero(used).tolist()), places[numbers]


def oldest_ns(taken: Taken, start_ns: int, end_ns: int) -> dict[int, int]:
    """The first end on each thread of a span that lies in or reaches into the window, at most the window's end."""
    found: dict[int, int] = {}
    for part in _finished(taken, start_ns, end_ns):
        if len(part.rows):  # each in the order of ends
            first_ns = int(part.rows["end_ns"][0])
            found[part.thread_id] = min(first_ns, end_ns, found.get(part.thread_id, end_ns))
    for thread_id, row in taken.open_rows:
        if row[START_NS] < end_ns:
            found.setdefault(thread_id, end_ns)
    return found


def has_begun(taken: Taken, after_ns: int, before_ns: int) -> bool:
    """Return True where a span began between two times."""
    starts = [np.frombuffer(block.rows, dtype=ROW)["start_ns"] for block in taken.blocks]
    of_rings = any(bool(((after_ns < its) & (its < before_ns)).any()) for its in starts)
    return of_rings or any(after_ns < row[START_NS] < before_ns for _, row in taken.open_rows)


_NO_ROWS = np.zeros(0, dtype=ROW)
_WANTED = ("span_id", "parent_id", "root_id", "start_ns", "end_ns", "children_ns", "node", "task")


# The memory of another process

OPEN = "instrument.open"
"""The attribute of a span that had not ended when its recording was read: true."""

NO_DETAIL = "errors and attributes of spans overwritten by newer ones"

NO_MORE = Detail(-1, None, {})
"""The details of a row whose own were overwritten."""


def saved_of(mapped: Mapped, since_ns: int = 0, end_ns: int | None = None) -> Saved:
    """The spans that a recording holds, the open ones cut at the end and marked, and its tally.

    Those that ended before `since_ns` are left out, and the tally is, where it has calls from before. `end_ns` is when
    it was read, on the monotonic clock: the newest time in it where it is not given, which is nearly when a process
    ended that has gone.
    Raises `TraceError` for a recording that is damaged.
    """
    header, rings, open_spans = mapped.header, mapped.rows(), mapped.open_spans()
    tree = mapped.tree()  # of all of these: the process goes on
    intervals, samples, losses = mapped.intervals(), mapped.samples(since_ns), mapped.losses()
    blocks = list(_blocks(rings, mapped.details(), since_ns, len(tree)))
    rows = np.concatenate([_NO_ROWS, *(np.frombuffer(block.rows, dtype=ROW) for block in blocks)])
    lacking = sum(more is NO_MORE for block in blocks for more in block.rare)
    if lacking:
        losses[NO_DETAIL] = lacking
    ended = set(rows["span_id"].tolist())
    open_spans = [span for span in open_spans if span.span_id not in ended]  # it may have ended since
    if end_ns is None:
        newest = [int(times.max()) for times in (rows["end_ns"], intervals["end_ns"]) if len(times)]
        newest += [sample.at_ns for sample in samples[-1:]]
        end_ns = max([*newest, *(span.start_ns for span in open_spans)], default=time.monotonic_ns())
    open_spans = [span for span in open_spans if span.start_ns <= end_ns]
    overwritten = [int(ring.rows["end_ns"][0]) for ring in rings if ring.first and len(ring.rows)]
    begin_ns = min(header.begun_ns, end_ns)
    facts = Trace(
        origin=origin_of(header),
        start_ns=max(begin_ns, since_ns),
        end_ns=max(begin_ns, since_ns, end_ns),
        spans=[],
        threads=mapped.threads(),
        losses=losses,
        notes=header.notes,
        own_notes=_own_notes(header),
        held_from_ns=max(overwritten, default=0),
        gpus=header.gpus,
        samples=[sample for sample in samples if since_ns <= sample.at_ns <= end_ns],
    )
    taken = Taken(blocks, [(span.thread_id, _open_row(span)) for span in open_spans], tree)
    try:
        tally = mapped.tally() if since_ns <= begin_ns else None  # which is of all the time
        columns = columns_of(taken, -FARTHEST_NS, FARTHEST_NS, partial(device_intervals, intervals), end_ns)
        if open_spans:  # whose time is known to that of their children
            columns.self_ns[-len(open_spans) :] = _self_times(open_spans, end_ns)
        from instrument.trace.file import Saved  # an exporter reads no files

        return Saved(facts.with_columns(columns), tally)
    except (ValueError, OverflowError) as problem:
        raise TraceError(f"cannot read the recording of process {header.pid}: {problem}") from problem


def _blocks(rings: Sequence[RingRows], details: Mapping[int, Detail], since_ns: int, nodes: int) -> Iterator[Block]:
    """Yield the rows of each ring that ended after a time, on known call paths and each once, with their details."""
    ids = np.zeros(0, dtype=np.uint64)
    for ring in rings:
        rows = ring.rows[(ring.rows["end_ns"] > since_ns) & (ring.rows["node"] < nodes)]
        _, firsts = np.unique(rows["span_id"], return_index=True)
        rows = rows[np.sort(firsts)]
        rows = rows[~np.isin(rows["span_id"], ids)]
        ids = np.concatenate([ids, rows["span_id"]])
        more = [details.get(span_id, NO_MORE) for span_id in rows["span_id"][has_more(rows)].tolist()]
        yield Block(ring.thread_id, rows.tobytes(), list(map(_with_tuples, more)))


def _with_tuples(detail: Detail) -> Detail:
    if detail is NO_MORE:
        return detail
    return detail._replace(attributes={name: as_tuples(value) for name, value in detail.attributes.items()})


def _own_notes(header: Header) -> OwnNotes:
    """Return the notes that are true of this process alone, none where they are damaged."""
    try:
        return own_notes_of(header.facts.get("own_notes") or {})
    except (AttributeError, TypeError, ValueError):
        return OwnNotes()


def _open_row(span: OpenSpan) -> Row:
    attributes = {name: as_tuples(value) for name, value in span.attributes.items()} | {OPEN: True}
    task = span.task_id >> 4 & (1 << 32) - 1
    ids = span.span_id, span.parent_id, span.root_id
    return row_of(span.node, *ids, task, span.start_ns, span.start_ns, span.children_ns, attributes=attributes)


def _self_times(spans: Sequence[OpenSpan], end_ns: int) -> list[int]:
    """Return the self times of open spans up to a time, without the time of their open children on their lines."""
    self_ns = {span.span_id: end_ns - span.start_ns - span.children_ns for span in spans}
    line = {span.span_id: (span.thread_id, span.task_id) for span in spans}
    for span in spans:
        if line.get(span.parent_id) == line[span.span_id]:
            self_ns[span.parent_id] -= end_ns - span.start_ns
    return [min(max(self_ns[span.span_id], 0), end_ns - span.start_ns) for span in spans]


def origin_of(header: Header) -> Origin:
    """Return the process, as far as it described itself."""
    said: dict[str, Any] = {}
    for one in fields(Origin):
        kind = int if one.type == "int" else str
        found = header.origin.get(one.name)
        if isinstance(found, kind):
            said[one.name] = found
    said.update(pid=header.pid, monotonic_ns=header.monotonic_ns, realtime_ns=header.realtime_ns, boot=header.boot_id)
    return Origin(**{"service": "", **said})
