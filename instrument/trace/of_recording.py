"""Rows of a recording as a trace: those taken from the rings of this process, or all that a mapped memory has now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording import memory_layout
from instrument.recording.mapped import ROWS, Mapped
from instrument.recording.mapped_facts import Detail, Header, OpenSpan
from instrument.recording.remote_parents import REMOTE, RemoteParent, remote_of
from instrument.recording.rows import SPAN_ID, START_NS, STREAM, Taken, more_of, packed_row
from instrument.recording.spans import AttributeValue, Origin, Site
from instrument.trace.columns import AttributesOfRows, Bools, Columns, DeviceIntervals, Int32s, Int64s, device_intervals
from instrument.trace.file import Saved
from instrument.trace.forest import NONE
from instrument.trace.layout import GatheredAttributes, written
from instrument.trace.self_times import self_times_of
from instrument.trace.trace import Trace

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
    taken: Taken, start_ns: int, end_ns: int, device_of: Callable[[Int64s], DeviceIntervals] | None = None
) -> Columns:
    """The spans that lie in or reach into the window, clipped to it; open ones end with it.

    `device_of` tells the device intervals of spans by their ids. What a clipped span was by itself is what remains of
    it less its children within the window: its row tells of all of it, of which a part may have lain outside.
    """
    parts = [*_finished(taken, start_ns, end_ns)]
    finished = sum(len(part.rows) for part in parts)
    parts += _still_open(taken, parts, end_ns)
    columns = {name: np.concatenate([_NO_ROWS[name], *(part.rows[name] for part in parts)]) for name in _WANTED}
    starts, ends = columns["start_ns"], columns["end_ns"]
    more = _More(parts)
    active_ns = ends - starts
    active_ns[more.active_rows] = more.active_ns
    self_ns = np.clip(active_ns - columns["children_ns"], 0, ends - starts)
    clipped = (starts < start_ns) | (ends > end_ns)
    clipped[finished:], ends[finished:] = True, end_ns
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

_NOTHING = Detail(-1, None, {})


def saved_of(mapped: Mapped, since_ns: int = 0, end_ns: int | None = None) -> Saved:
    """The spans that a recording holds, the open ones cut at the end and marked, and its tally.

    Those that ended before `since_ns` are left out, and the tally is, where it has calls from before. `end_ns` is when
    it was read, on the monotonic clock: the newest time in it where it is not given, which is nearly when a process
    ended that has gone.
    Raises `TraceError` for a recording that is damaged.
    """
    header, rings, open_spans = mapped.header, mapped.rows(), mapped.open_spans()
    tree = mapped.tree()  # of all of these: the process goes on
    intervals, samples = mapped.intervals(), mapped.samples(since_ns)
    rows = np.concatenate([np.zeros(0, ROWS), *(ring.rows for ring in rings)])
    threads = np.repeat([ring.thread_id for ring in rings], [len(ring.rows) for ring in rings]).astype(np.int64)
    _, first = np.unique(rows["span_id"], return_index=True)
    kept = np.sort(first)
    kept = kept[(rows["end_ns"][kept] > since_ns) & (rows["node"][kept] < len(tree))]
    rows, threads = rows[kept], threads[kept]
    ended = set(rows["span_id"].tolist())
    open_spans = [span for span in open_spans if span.span_id not in ended]  # it may have ended since
    if end_ns is None:
        newest = [int(times.max()) for times in (rows["end_ns"], intervals["end_ns"]) if len(times)]
        newest += [sample.at_ns for sample in samples[-1:]]
        end_ns = max([*newest, *(span.start_ns for span in open_spans)], default=time.monotonic_ns())
    open_spans = [span for span in open_spans if span.start_ns <= end_ns]
    held = [int(ring.rows["end_ns"][0]) for ring in rings if ring.first and len(ring.rows)]
    begin_ns = min(header.begun_ns, end_ns)
    details, losses = mapped.details(), mapped.losses()
    lacking = sum(span_id not in details for span_id in rows["span_id"][has_more(rows)].tolist())
    if lacking:
        losses[NO_DETAIL] = lacking
    facts = Trace(
        origin=origin_of(header),
        start_ns=max(begin_ns, since_ns),
        end_ns=max(begin_ns, since_ns, end_ns),
        spans=[],
        threads=mapped.threads(),
        losses=losses,
        notes=header.notes,
        held_from_ns=max(held, default=0),
        gpus=header.gpus,
        samples=[sample for sample in samples if since_ns <= sample.at_ns <= end_ns],
    )
    columns = _Columns(rows, threads, open_spans, end_ns)
    try:
        tally = mapped.tally() if since_ns <= begin_ns else None  # which is of all the time
        site_of = np.array(tree.site_of, np.int32)
        return Saved(facts.with_columns(columns.trace(tree.sites, site_of, details, intervals)), tally)
    except (ValueError, OverflowError) as problem:
        raise TraceError(f"cannot read the recording of process {header.pid}: {problem}") from problem


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


class _Columns:
    """Rows, and open spans behind them."""

    def __init__(self, rows: Any, threads: Int64s, open_spans: list[OpenSpan], end_ns: int) -> None:
        self._rows, self._threads, self._open, self._end_ns = rows, threads, open_spans, end_ns

    def _column(self, name: str, of_open: list[int]) -> Int64s:
        return np.concatenate([self._rows[name].astype(np.int64), np.array(of_open, np.int64)])

    def trace(
        self, sites: list[Site], site_of: Any, details: Mapping[int, Detail], intervals: NDArray[np.void]
    ) -> Columns:
        end_ns, count = self._end_ns, len(self._rows)
        span_id = self._column("span_id", [span.span_id for span in self._open])
        start_ns = self._column("start_ns", [span.start_ns for span in self._open])
        ends = self._column("end_ns", [end_ns] * len(self._open))
        active_ns = ends - start_ns
        places, told_ns = numbers_in(self._rows)
        active_ns[places] = np.minimum(told_ns, active_ns[places])
        children_ns = self._column("children_ns", self._children_ns())
        node = self._column("node", [span.node for span in self._open])
        error = np.full(len(span_id), NONE, np.int32)
        errors: dict[str, int] = {}
        remote: dict[int, RemoteParent] = {}
        attributes = GatheredAttributes()
        for row, own in enumerate(span_id.tolist()):
            detail = details.get(own, _NOTHING if row >= count else None)
            if detail is None:
                continue
            if detail.active_ns >= 0:
                active_ns[row] = min(detail.active_ns, int(active_ns[row]))
            if detail.error is not None:
                error[row] = errors.setdefault(detail.error, len(errors))
            told = {**detail.attributes, **(self._open[row - count].attributes if row >= count else {})}
            noted = told.pop(REMOTE, None)
            caller = remote_of(tuple(noted) if isinstance(noted, list) else noted)
            if caller is not None:
                remote[row] = caller
            if row >= count:
                told[OPEN] = True
            if told:
                attributes.add(row, written(told))
        return Columns(
            sites=tuple(sites),
            errors=tuple(errors),
            span_id=span_id,
            parent_id=self._column("parent_id", [span.parent_id for span in self._open]),
            root_id=self._column("root_id", [span.root_id for span in self._open]),
            thread_id=np.concatenate([self._threads, np.array([span.thread_id for span in self._open], np.int64)]),
            task_id=self._column("task", [span.task_id >> 4 & (1 << 32) - 1 for span in self._open]),
            start_ns=start_ns,
            end_ns=ends,
            active_ns=active_ns,
            self_ns=np.clip(active_ns - children_ns, 0, ends - start_ns),
            site=site_of[node] if len(node) else np.zeros(0, np.int32),
            error=error,
            clipped=np.arange(len(span_id)) >= count,
            device=device_intervals(intervals, span_id),
            attributes=attributes.packed(np.arange(len(span_id), dtype=np.int32)),
            remote=remote,
        )

    def _children_ns(self) -> list[int]:
        """Return the time of the children of open spans, those that are open with them."""
        taken = {span.span_id: span.children_ns for span in self._open}
        line = {span.span_id: (span.thread_id, span.task_id) for span in self._open}
        for span in self._open:
            if line.get(span.parent_id) == line[span.span_id]:
                taken[span.parent_id] += self._end_ns - span.start_ns
        return list(taken.values())
