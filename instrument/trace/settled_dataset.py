"""Converts settled requests of running processes to dataset tables, the same tables as those of saved recordings.

`requests`, `batches` and `members` have all requests and batches. `spans` and `intervals` have only kept requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import KEY
from instrument.trace.columns import Bools, Columns, DeviceIntervals, Int64s
from instrument.trace.dataset import DatasetProcess, TraceRows, Values, make_keys, make_texts, pyarrow
from instrument.trace.decisions import OPEN, Decisions, RememberedTraces
from instrument.trace.forest import NONE
from instrument.trace.groups import numbered
from instrument.trace.joined import make_remotes_by_key
from instrument.trace.trace import MergedProcess
from instrument.trace.unsettled import WAITING

IntervalsOf = Callable[[Int64s, Int64s, Int64s], DeviceIntervals]
"""A function that returns device intervals by row. Its arguments are the span ids of all rows, the rows that ask for
device times, and the begins of all spans."""


class SettledRows(TraceRows):
    """Makes tables of the rows that one round of settling has decided. `members` and `intervals_of` are by recording.

    `remembered` has the keys of earlier rounds. Open spans end at `now_ns`.
    """

    def __init__(
        self,
        decisions: Decisions,
        members: Sequence[DatasetProcess],
        intervals_of: Sequence[IntervalsOf],
        remembered: RememberedTraces,
        now_ns: int,
    ) -> None:
        gathered, trace = decisions.gathered, decisions.found
        self._thread_id, self._out, self._unsettled = gathered.own_thread, decisions.out, decisions.members
        self._is_new = (decisions.out | decisions.gone) & (gathered.state == WAITING)
        ends = np.where(gathered.state == OPEN, np.maximum(trace.start_ns, now_ns), trace.end_ns)
        process = gathered.member.astype(np.int64)
        device = _join_device_intervals(trace, gathered.own, process, intervals_of)
        trace = replace(trace, own_id=gathered.own, end_ns=ends, device=device)
        runs = {member.facts.origin.run for member in members}
        if not decisions.run and len(runs) == 1 and all(member.ids is None for member in members):
            trace = _add_key_traces(trace, decisions, remembered, runs.pop())
        absent = _map_absent(decisions)
        members = [
            member._replace(numbers=MergedProcess(member.facts, (), {}, absent=absent.get(number, {})))
            for number, member in enumerate(members)
        ]
        keys = make_keys(trace, process, members, _find_absent_callers(decisions))
        base_ns = np.array([member.offset_ns for member in members], dtype=np.int64)
        super().__init__(trace, decisions.joined, process, members, keys, base_ns)

    def tables(self, is_wanted: Bools) -> Iterator[tuple[str, Any]]:
        """Yield the name and the rows of each table with rows, for the processes in `is_wanted`."""
        trace, joined, of_wanted = self.trace, self._joined, is_wanted[self.process]
        is_new, out = self._is_new & of_wanted, self._out & of_wanted
        order = np.flatnonzero(out)
        order = order[np.lexsort((order, trace.start_ns[order], trace.root_id[order]))]
        batches = np.unique(joined.served.batch)
        whole = np.ones(len(trace), dtype=np.bool_)
        parts: tuple[tuple[str, Int64s, Callable[[Int64s], Any]], ...] = (
            ("spans", order, self.spans),
            ("requests", np.flatnonzero(is_new[joined.rows]), lambda places: self.requests(places, whole)),
            ("batches", batches[is_new[batches]], self.batches),
            ("members", np.flatnonzero(is_new[joined.served.batch]), self.batch_members),
            ("intervals", np.flatnonzero(out[trace.device.row]), self.intervals),
        )
        for name, numbers, part in parts:
            if len(numbers):
                yield from self._make_parts(name, numbers, part)

    def _link_of(self, row: int, link: tuple[int, int]) -> tuple[int, int, int]:
        process = int(self.process[row])
        (cause,) = np.flatnonzero((self.trace.own_id == link[0]) & (self.process == process))[:1].tolist() or [NONE]
        if cause != NONE:
            high, low, span = (int(ids[cause]) for ids in self.keys[:3])
            return high, low, span
        numbers, ids = np.array(link, dtype=np.int64).astype(np.uint64), self.members[process].numbered
        span, high, low = (int(ids.many(numbers, part)[min(part, 1)]) for part in range(3))
        trace_id = self._unsettled[process].traces.get(link[1], high << 64 | low)
        return trace_id >> 64, trace_id & (1 << 64) - 1, span

    def _threads(self, rows: Int64s) -> Values:
        threads = self._thread_id[rows]
        places, firsts = numbered(self.process[rows], threads)
        names = [
            self.members[process].facts.threads.get(thread) or None
            for process, thread in zip(self.process[rows][firsts].tolist(), threads[firsts].tolist(), strict=True)
        ]
        return {"thread_id": threads, "thread": make_texts(places, names)}

    def _devices(self, devices: Int64s, process: Int64s) -> tuple[Int64s, Any]:
        uuids = [{gpu.device: gpu.uuid for gpu in member.facts.gpus} for member in self.members]
        names = [uuids[at].get(device) or None for at, device in zip(process.tolist(), devices.tolist(), strict=True)]
        return devices, pyarrow().array(names, pyarrow().string())


def _add_key_traces(trace: Columns, decisions: Decisions, remembered: RememberedTraces, run: str) -> Columns:
    """Return the trace with trace ids made from keys. Over all rounds, only the first request with a key gets the key's
    id."""
    remotes = make_remotes_by_key(trace, decisions.joined, run, trace.root_id, dict(trace.remote)) if run else {}
    rows = decisions.joined.rows
    for place, keys in decisions.joined.keys.items():
        row = int(rows[place])
        request = int(decisions.gathered.member[row]), int(decisions.gathered.own[row])
        are_first = [remembered.has_trace_of_key(key, request) for key in keys]
        if not are_first[0]:
            remotes.pop(row, None)
    requests = set(rows.tolist())
    for row in [row for row in remotes if row not in requests]:
        if remembered.has_key(str(trace.attributes[row][KEY])):
            del remotes[row]
    return replace(trace, remote={**trace.remote, **remotes})


def _join_device_intervals(
    trace: Columns, own_id: Int64s, process: Int64s, intervals_of: Sequence[IntervalsOf]
) -> DeviceIntervals:
    """Return the device intervals of all rows, including rows settled in earlier rounds."""
    asking = trace.of_sites([bool(site.device) for site in trace.sites])
    parts = []
    for number in np.unique(process[asking]).tolist():
        rows = np.flatnonzero(process == number)
        intervals = intervals_of[number](own_id[rows], np.flatnonzero(asking[rows]), trace.start_ns[rows])
        parts.append(replace(intervals, row=rows[intervals.row].astype(np.int32)))
    if not parts:
        return DeviceIntervals.none()
    names = ("row", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    order = np.lexsort((columns["start_ns"], columns["row"]))
    return DeviceIntervals(**{name: column[order] for name, column in columns.items()}, labels=parts[0].labels)


def _map_absent(decisions: Decisions) -> Mapping[int, Mapping[int, int]]:
    """Return, for each process, a map from the ids of missing parents and roots to the numbers that the process gave
    them."""
    gathered, trace = decisions.gathered, decisions.found
    absent: dict[int, dict[int, int]] = {}
    above = (trace.parent_id, trace.parent, gathered.own_parent), (trace.root_id, decisions.unit, gathered.own_root)
    for ids, rows, numbers in above:
        for row in np.flatnonzero((rows == NONE) & (ids != 0)).tolist():
            absent.setdefault(int(gathered.member[row]), {})[int(ids[row])] = int(numbers[row])
    return absent


def _find_absent_callers(decisions: Decisions) -> Mapping[int, RemoteParent]:
    """Return the callers of requests that were released before their last rows came, by the request's id in this
    trace."""
    trace = decisions.found
    callers: dict[int, RemoteParent] = {}
    for row in np.flatnonzero((decisions.unit == NONE) & decisions.out).tolist():
        if (remote := decisions.find_absent_caller(row)) is not None:
            callers[int(trace.root_id[row])] = remote
    return callers
