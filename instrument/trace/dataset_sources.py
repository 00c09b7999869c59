"""Makes the tables of a dataset from merged files, or from the ended requests of running processes.

For running processes, the tables `requests`, `batches` and `members` have rows for all requests and batches. The tables
`spans` and `intervals` have rows only for requests that tail sampling keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import KEY
from instrument.recording.trace_context import RemoteParent
from instrument.trace.columns import Bools, Columns, DeviceIntervals, Int64s
from instrument.trace.dataset_tables import (
    DatasetProcess,
    SpanKeys,
    TraceRows,
    make_span_keys,
    make_table,
)
from instrument.trace.decisions import OPEN, Decisions, RememberedTraces
from instrument.trace.indices import NONE, find_rows
from instrument.trace.joined import join_requests
from instrument.trace.merge import Merged
from instrument.trace.merged_facts import group_by_process, restore_numbers
from instrument.trace.request_trees import build_request_trees, derive_traces_from_keys
from instrument.trace.text import remove_surrogates
from instrument.trace.trace import MergedProcess, Trace
from instrument.trace.unsettled import WAITING

if TYPE_CHECKING:
    from instrument.trace.trace import MergedProcess


class DatasetRows(TraceRows):
    """Makes the tables of a dataset from merged recordings. `ids` has the span ids of rows that were read from a
    dataset."""

    def __init__(self, merged: Merged, ids: Sequence[SpanKeys] | None = None) -> None:
        self.merged = merged
        self._facts = facts = merged.saved.trace
        joined = join_requests(facts.columns, facts.apart_ns)
        trace = build_request_trees(facts.columns, joined, facts.origin.run)
        base_ns = facts.origin.realtime_of(0)
        process = merged.find_row_processes()
        members: list[DatasetProcess] = []
        self._parts = group_by_process(merged.parts)
        for number, parts in enumerate(self._parts):
            newest = max((part.saved.trace for part in parts), key=attrgetter("end_ns"))
            numbers = facts.processes[number] if facts.processes else None
            threads, gpus = (facts.threads, facts.gpus) if numbers is None else (numbers.facts.threads, newest.gpus)
            own_facts = replace(newest, threads=threads, gpus=gpus)
            members.append(DatasetProcess(own_facts, base_ns + parts[0].moved_ns, numbers))
        keys = make_span_keys(trace, process, members) if ids is None else _collect_original_ids(trace, process, ids)
        thread_id, device = trace.thread_id.copy(), trace.device.device.copy()
        for number, member in enumerate(members):
            if member.numbers is not None:
                rows, places = process == number, process[trace.device.row] == number
                thread_id[rows] = restore_numbers(thread_id[rows], member.numbers.threads)
                device[places] = restore_numbers(device[places], member.numbers.devices)
        bases = np.full(len(members), base_ns, dtype=np.int64)
        super().__init__(trace, joined, process, members, keys, bases, thread_id, device)

    def make_tables(self) -> Iterator[tuple[str, Any]]:
        trace, joined = self.trace, self._joined
        first, last = self._facts.coverage
        is_complete = (trace.start_ns >= first) & (trace.end_ns <= last) & ~trace.clipped
        order = np.lexsort((np.arange(len(trace)), trace.start_ns, trace.root_id))
        numbers = {
            "spans": order,
            "requests": np.arange(len(joined.rows)),
            "batches": np.unique(joined.served.batch),
            "members": np.arange(len(joined.served.batch)),
            "intervals": np.arange(len(trace.device)),
        }
        yield from self._make_row_tables(numbers, is_complete)
        windows = [
            ProcessWindow(number, part.saved.trace, self.members[number].offset_ns, self._facts.apart_ns)
            for number, parts in enumerate(self._parts)
            for part in parts
        ]
        yield from make_window_tables(windows, self.members)


class ProcessWindow(NamedTuple):
    """A process in one window. `offset_ns` converts the process's times to ns since 1970."""

    process: int
    facts: Trace
    offset_ns: int
    apart_ns: int = 0


def make_window_tables(
    windows: Sequence[ProcessWindow], members: Sequence[DatasetProcess]
) -> Iterator[tuple[str, Any]]:
    gauges: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    losses: list[tuple[Any, ...]] = []
    processes: list[tuple[Any, ...]] = []
    for number, facts, offset_ns, apart_ns in windows:
        origin = facts.origin
        uuid_of = {gpu.device: gpu.uuid or None for gpu in facts.gpus}
        for sample in facts.samples:
            if sample.value is not None and sample.value == sample.value:
                key = number, sample.at_ns + offset_ns, remove_surrogates(sample.name), sample.device
                unit = GAUGES[sample.name].unit if sample.name in GAUGES else None
                gauges[key] = uuid_of.get(sample.device), float(sample.value), unit
        begin_ns = facts.start_ns + offset_ns
        losses += [(number, begin_ns, remove_surrogates(reason), count) for reason, count in facts.losses.items()]
        processes.append((
            number, begin_ns, facts.end_ns - facts.start_ns,
            facts.held_from_ns + offset_ns if facts.held_from_ns else None, origin.pid, origin.boot,
            remove_surrogates(origin.profile), origin.generation, origin.recorder,
            remove_surrogates(facts.died) or None, apart_ns, list(map(remove_surrogates, facts.notes)),
        ))  # fmt: skip
    columns: dict[str, tuple[Sequence[str], Sequence[Sequence[Any]]]] = {
        "gauges": (("start_unix_ns", "name", "device", "device_uuid", "value", "unit"),
                   [(*key, *values) for key, values in gauges.items()]),
        "losses": (("start_unix_ns", "reason", "count"), losses),
        "processes": (("start_unix_ns", "duration_ns", "held_from_unix_ns", "pid", "boot", "profile", "generation",
                       "recorder", "died", "apart_ns", "notes"), processes),
    }  # fmt: skip
    for name, (names, rows) in columns.items():
        process, *values = zip(*rows, strict=True) if rows else [()] * (len(names) + 1)
        yield name, make_table(name, dict(zip(names, values, strict=True)), np.array(process, np.int64), members)


def _collect_original_ids(trace: Columns, process: Int64s, ids: Sequence[SpanKeys]) -> SpanKeys:
    firsts = np.cumsum([0, *(len(keys.span) for keys in ids)])[:-1]
    places = firsts[process] + trace.own_id - 1
    high, low, span, parent, root = (np.concatenate(columns)[places] for columns in zip(*ids, strict=True))
    roots, parents = find_rows(trace.span_id, trace.root_id), trace.parent
    has_root, has_parent = roots != NONE, parents != NONE
    return SpanKeys(
        np.where(has_root, high[roots], high),
        np.where(has_root, low[roots], low),
        span,
        np.where(has_parent, span[parents], parent),
        np.where(has_root, span[roots], root),
    )


IntervalsOf = Callable[[Int64s, Int64s, Int64s], DeviceIntervals]
"""A function that returns the device intervals of a process's wanted rows. Its arguments are the ids of all spans, the
wanted rows, and the start times of all spans."""


class SettledRows(TraceRows):
    """Makes the tables of a dataset from the rows that a round of tail sampling has settled. `members` and
    `intervals_of` have an item per recorded process. `remembered` has the keys of earlier rounds. Open spans end at
    `now_ns`."""

    def __init__(
        self,
        decisions: Decisions,
        members: Sequence[DatasetProcess],
        intervals_of: Sequence[IntervalsOf],
        remembered: RememberedTraces,
        now_ns: int,
    ) -> None:
        gathered, trace = decisions.gathered, decisions.found
        self._out, self._unsettled = decisions.out, decisions.members
        self._is_new = (decisions.out | decisions.gone) & (gathered.state == WAITING)
        ends = np.where(gathered.state == OPEN, np.maximum(trace.start_ns, now_ns), trace.end_ns)
        process = gathered.member.astype(np.int64)
        device = _join_device_intervals(trace, gathered.own, process, intervals_of)
        trace = replace(trace, own_id=gathered.own, end_ns=ends, device=device)
        runs = {member.facts.origin.run for member in members}
        if not decisions.run and len(runs) == 1 and all(member.ids is None for member in members):
            trace = _add_trace_ids_of_keys(trace, decisions, remembered, runs.pop())
        absent: list[dict[int, int]] = [{} for _ in members]
        """The numbers that each process gave to missing parents and roots, by their ids in this trace."""
        above = (trace.parent_id, trace.parent, gathered.own_parent), (trace.root_id, decisions.unit, gathered.own_root)
        for ids, rows, numbers in above:
            for row in np.flatnonzero((rows == NONE) & (ids != 0)).tolist():
                absent[gathered.member[row]][int(ids[row])] = int(numbers[row])
        members = [
            member._replace(numbers=MergedProcess(member.facts, (), {}, absent=of_member))
            for member, of_member in zip(members, absent, strict=True)
        ]
        callers: dict[int, RemoteParent] = {}
        """The callers of requests that were released before their last rows came, by their ids in this trace."""
        for row in np.flatnonzero((decisions.unit == NONE) & decisions.out).tolist():
            if (remote := decisions.find_remembered_caller(row)) is not None:
                callers[int(trace.root_id[row])] = remote
        keys = make_span_keys(trace, process, members, callers)
        base_ns = np.array([member.offset_ns for member in members], dtype=np.int64)
        super().__init__(
            trace, decisions.joined, process, members, keys, base_ns, gathered.own_thread, trace.device.device
        )

    def make_tables(self, is_wanted: Bools) -> Iterator[tuple[str, Any]]:
        trace, joined, of_wanted = self.trace, self._joined, is_wanted[self.process]
        is_new, out = self._is_new & of_wanted, self._out & of_wanted
        order = np.flatnonzero(out)
        order = order[np.lexsort((order, trace.start_ns[order], trace.root_id[order]))]
        batches = np.unique(joined.served.batch)
        numbers = {
            "spans": order,
            "requests": np.flatnonzero(is_new[joined.rows]),
            "batches": batches[is_new[batches]],
            "members": np.flatnonzero(is_new[joined.served.batch]),
            "intervals": np.flatnonzero(out[trace.device.row]),
        }
        filled = {name: rows for name, rows in numbers.items() if len(rows)}
        yield from self._make_row_tables(filled, np.ones(len(trace), dtype=np.bool_))

    def _find_linked_span(self, row: int, link: tuple[int, int]) -> tuple[int, int, int]:
        process = int(self.process[row])
        (cause,) = np.flatnonzero((self.trace.own_id == link[0]) & (self.process == process))[:1].tolist() or [NONE]
        if cause != NONE:
            high, low, span = (int(ids[cause]) for ids in self.keys[:3])
            return high, low, span
        numbers, ids = np.array(link, dtype=np.int64).astype(np.uint64), self.members[process].id_converter
        span, high, low = (int(ids.make_ids(numbers, part)[min(part, 1)]) for part in range(3))
        trace_id = self._unsettled[process].traces.get(link[1], high << 64 | low)
        return trace_id >> 64, trace_id & (1 << 64) - 1, span


def _add_trace_ids_of_keys(trace: Columns, decisions: Decisions, remembered: RememberedTraces, run: str) -> Columns:
    """Return the trace with trace ids made from request keys. Only the first request with a key gets the trace id."""
    remotes = derive_traces_from_keys(trace, decisions.joined, run, trace.root_id, dict(trace.remote)) if run else {}
    rows = decisions.joined.rows
    for place, keys in decisions.joined.keys.items():
        row = int(rows[place])
        request = int(decisions.gathered.member[row]), int(decisions.gathered.own[row])
        are_first = [remembered.is_first_of_key(key, request) for key in keys]
        if not are_first[0]:
            remotes.pop(row, None)
    requests = set(rows.tolist())
    for row in [row for row in remotes if row not in requests]:
        if str(trace.attributes[row][KEY]) in remembered.first_of_key:
            del remotes[row]
    return trace.with_remote({**trace.remote, **remotes})


def _join_device_intervals(
    trace: Columns, own_id: Int64s, process: Int64s, intervals_of: Sequence[IntervalsOf]
) -> DeviceIntervals:
    asking = trace.are_of_sites([bool(site.device) for site in trace.sites])
    parts = []
    for number in np.unique(process[asking]).tolist():
        rows = np.flatnonzero(process == number)
        intervals = intervals_of[number](own_id[rows], np.flatnonzero(asking[rows]), trace.start_ns[rows])
        parts.append(replace(intervals, row=rows[intervals.row].astype(np.int32)))
    if not parts:
        return DeviceIntervals.make_empty()
    names = ("row", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return DeviceIntervals(**columns, labels=parts[0].labels).sort_by_row()
