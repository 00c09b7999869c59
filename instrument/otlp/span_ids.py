"""Computes the ids of many spans at once, as columns. `Ids` makes the same ids for one span at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.export_facts import Ids, mix_span_ids
from instrument.otlp.packing import HAS_IS_REMOTE, IS_REMOTE
from instrument.recording.remote_parents import OWN_TRACE_FLAGS, LinkedSpan, RemoteParent
from instrument.trace.by_process import find_outer_spans
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE
from instrument.trace.joined import Joined

UInt64s = NDArray[np.uint64]


class SpanIds:
    """The ids that a collector gets for the rows of a trace.

    `ids` has one entry per process, and `process` the index of each row's process if there are several. `trace.own_id`
    has the numbers by which the process knows its spans, `absent` those of parents and roots without a row.
    """

    def __init__(
        self,
        trace: Columns,
        ids: Ids | Sequence[Ids],
        process: Int64s | None = None,
        absent: Mapping[int, int] | None = None,
    ) -> None:
        self._trace, self._process, self._absent = trace, process, absent or {}
        self._ids = [ids] if isinstance(ids, Ids) else list(ids)
        self._order = np.argsort(trace.span_id) if process is not None and len(trace) else None
        self._seeds: UInt64s = np.array([remote.seeds for remote in self._ids], dtype=np.uint64)
        remotes = {int(trace.root_id[row]): remote for row, remote in trace.remote.items()}
        roots = sorted(remotes)
        self._remotes: list[RemoteParent] = list(map(remotes.__getitem__, roots))
        self._roots = np.array(roots, dtype=np.int64)
        remote_ids = [
            (remote.trace_id >> 64, remote.trace_id & _MASK, remote.span_id, HAS_IS_REMOTE | remote.flags & 0xFF)
            for remote in self._remotes
        ]
        self._of_remotes: UInt64s = np.array(remote_ids, dtype=np.uint64).reshape(-1, 4)
        self.have_states = np.array([*(bool(remote.state) for remote in self._remotes), False], dtype=np.bool_)
        """True for each remote parent with a `tracestate`, by number. The last entry is for no parent."""
        self._serving = np.array([remote.in_server_span for remote in self._remotes], dtype=np.bool_)
        self._local = np.array([remote.is_local for remote in self._remotes], dtype=np.bool_)

    def of(self, rows: Int64s) -> RowIds:
        """Return the ids of rows as columns."""
        trace = self._trace
        span, parent, root = trace.span_id[rows], trace.parent_id[rows], trace.root_id[rows]
        is_root = span == root
        is_top = is_root | (parent == 0)
        span_ids, above = self._mix_numbers(span, rows, 0), self._mix_numbers(parent, rows, 0)
        high, low = self._mix_numbers(root, rows, 1), self._mix_numbers(root, rows, 2)
        above[is_top] = 0
        flags = np.full(len(rows), HAS_IS_REMOTE | OWN_TRACE_FLAGS, dtype=np.uint32)
        remote = np.full(len(rows), NONE, dtype=np.int64)
        if len(self._roots):
            place = np.searchsorted(self._roots, root).clip(max=len(self._roots) - 1)
            with_remote = np.flatnonzero(self._roots[place] == root)
            place = remote[with_remote] = place[with_remote]
            high[with_remote], low[with_remote], parents, flags[with_remote] = self._of_remotes[place].T
            is_root[with_remote] &= ~self._serving[place]
            tops = is_top[with_remote]
            above[with_remote[tops]] = parents[tops]
            flags[with_remote[tops & (parents != 0) & ~self._local[place]]] |= IS_REMOTE
        return RowIds(high, low, span_ids, above, flags, is_root, remote)

    def state(self, remote: int) -> str:
        """Return the `tracestate` of a remote parent by its number, "" for none."""
        return "" if remote == NONE else self._remotes[remote].state

    def links(self, spans: Sequence[tuple[int, int]], row: int) -> list[LinkedSpan]:
        """Return links to spans, given by their numbers and their roots' numbers in the trace or in the process of
        `row`."""
        span_ids, root_ids = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        rows = np.full(len(spans), row)
        requests = ((span_ids, 0), (root_ids, 1), (root_ids, 2))
        own_ids, high, low = (self._mix_numbers(numbers, rows, part).tolist() for numbers, part in requests)
        linked = [
            LinkedSpan(upper << 64 | lower, span_id) for span_id, upper, lower in zip(own_ids, high, low, strict=True)
        ]
        if len(self._roots):
            place = np.searchsorted(self._roots, root_ids).clip(max=len(self._roots) - 1)
            for at in np.flatnonzero(self._roots[place] == root_ids).tolist():
                remote = self._remotes[int(place[at])]
                linked[at] = LinkedSpan(remote.trace_id, own_ids[at], remote.state)
        return linked

    def links_of(self, joined: Joined) -> Mapping[int, list[LinkedSpan]]:
        """Return links by row: from a batch to the requests that it serves, from a nested request to the outer span."""
        trace, served = self._trace, joined.served
        pairs = {row: [began] for row, began in find_outer_spans(trace, joined).items()}
        known_requests = np.flatnonzero(served.request != NONE)
        rows = joined.rows[served.request[known_requests]]
        request_pairs = zip(trace.span_id[rows].tolist(), trace.root_id[rows].tolist(), strict=True)
        for batch, pair in dict.fromkeys(zip(served.batch[known_requests].tolist(), request_pairs, strict=True)):
            pairs.setdefault(batch, []).append(pair)
        links = iter(self.links([*chain.from_iterable(pairs.values())], 0))
        return {row: list(islice(links, len(request_pairs))) for row, request_pairs in pairs.items()}

    def make_device_ids(self, count: int, row: int) -> UInt64s:
        """Return new ids for device intervals of a row's process."""
        number = 0 if self._process is None else int(self._process[row])
        first = self._ids[number].take_device_numbers(count)
        return mix_span_ids(self._seeds[number, 0], np.arange(count, dtype=np.uint64) + np.uint64(first))

    def _mix_numbers(self, numbers: Int64s, rows: Int64s, part: int) -> UInt64s:
        """Return the span ids, or one half of the trace ids, for the recorder's numbers."""
        process, trace = self._process, self._trace
        if process is None or self._order is None:
            return mix_span_ids(self._seeds[0, part], numbers.astype(np.uint64))
        at = self._order[np.searchsorted(trace.span_id, numbers, sorter=self._order).clip(max=len(trace) - 1)]
        is_known = trace.span_id[at] == numbers
        own_numbers = np.where(is_known, trace.own_id[at], numbers)
        for place in np.flatnonzero(~is_known).tolist():
            own_numbers[place] = self._absent.get(int(numbers[place]), int(numbers[place]))
        of_process = np.where(is_known, process[at], process[rows])
        return mix_span_ids(self._seeds[of_process, part], own_numbers.astype(np.uint64))


_MASK = (1 << 64) - 1


class RowIds(NamedTuple):
    """The ids of rows as columns.

    A trace id has 128 bits: `high` and `low`. `parent` is 0 for none. `is_server` marks spans that are server spans if
    they are requests. `remote` is the number of the remote parent of the row's tree, `NONE` for none.
    """

    high: UInt64s
    low: UInt64s
    own: UInt64s
    parent: UInt64s
    flags: NDArray[np.uint32]
    is_server: Bools
    remote: Int64s
