"""A recording in another process's memory as a trace: what it holds now, for reports, files and viewers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording.mapped import ROWS, Mapped
from instrument.recording.mapped_facts import Detail, Header, OpenSpan
from instrument.recording.remote_parents import REMOTE, RemoteParent, remote_of
from instrument.recording.spans import Origin, Site
from instrument.trace.columns import Columns, Int64s, device_intervals
from instrument.trace.file import Saved
from instrument.trace.forest import NONE
from instrument.trace.layout import GatheredAttributes, written
from instrument.trace.of_rows import has_more, numbers_in
from instrument.trace.trace import Trace

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
