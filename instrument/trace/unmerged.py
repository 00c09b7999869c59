"""The processes of a merged trace, each as a recording of its own again: with its clock and the numbers that it gave.

So a span that a merged file has, and another file of its process, is known to be one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.allocations import Allocations
from instrument.recording.remote_parents import LINK
from instrument.recording.spans import HOST, AttributeValue, MergedProcess, Sample
from instrument.recording.spans import Trace as Facts
from instrument.recording.tally import Tally
from instrument.trace.apart import linked_ids
from instrument.trace.columns import AttributesOfSome, Bools, Int64s, Trace
from instrument.trace.file import Saved
from instrument.trace.forest import NONE, rows_of, tops
from instrument.trace.groups import ranked
from instrument.trace.kernel_columns import KernelColumns
from instrument.trace.watched import ROW


def process_key(saved: Saved) -> Hashable:
    """A value that files of one process share. A file of an unknown process, or of another profiler, is alone."""
    origin = saved.facts.origin
    is_known = origin.pid > 0 and origin.recorder != "other"
    return (origin.host, origin.boot, origin.pid, origin.service, origin.start_ticks) if is_known else id(saved)


def processes_of(files: Sequence[Saved]) -> list[list[Saved]]:
    """The recordings of each process, by which came first; a merged file counts as those that it was made of."""
    found: dict[Hashable, list[Saved]] = {}
    for saved in files:
        for part in unmerged(saved):
            found.setdefault(process_key(part), []).append(part)
    return list(found.values())


def unmerged(saved: Saved) -> list[Saved]:
    """The recordings that a merged one was made of, one for each process; a file of one process as it is."""
    processes = saved.facts.processes
    if not processes:
        return [saved]
    of_thread = {thread: number for number, one in enumerate(processes) for thread in one.threads}
    tallies = _tallies(saved, of_thread)
    known, places = ranked(saved.columns.thread_id)
    of_row = np.array([of_thread.get(thread, 0) for thread in known.tolist()], dtype=np.int64)[places]
    tallies = _tallies(saved, of_thread)
    found = []
    for number, process in enumerate(processes):
        # One id may be in several windows: a span that was open at their edges. Totals are of all of them together.
        starts = np.array([start_ns for start_ns, _ in process.windows], dtype=np.int64) + process.moved_ns
        window = np.searchsorted(starts, saved.columns.start_ns, side="right").clip(min=1) - 1
        facts, is_one = _facts(saved.facts, number), len(starts) == 1
        for at, (start_ns, end_ns) in enumerate(process.windows):
            columns = _columns(saved.columns, of_row, (of_row == number) & (window == at), process)
            samples = facts.samples if at == 0 else ()
            its = replace(facts, start_ns=start_ns, end_ns=end_ns, samples=samples)
            found.append(Saved(columns, its, tallies[number] if is_one and tallies is not None else None))
    return found


def _own(numbers: NDArray[Any], known: Mapping[int, int]) -> Int64s:
    """The numbers that a process gave, by the merged ones; an unknown number stays."""
    its, places = ranked(numbers)
    return np.array([known.get(one, one) for one in its.tolist()], dtype=np.int64)[places]


def _columns(trace: Trace, of_row: Int64s, wanted: Bools, process: MergedProcess) -> Trace:
    """The wanted rows of a process with the numbers that it gave; `of_row` are the processes of all rows."""
    rows = np.flatnonzero(wanted)
    its, moved_ns = trace.with_attributes(wanted), process.moved_ns
    # A parent or a root in another process was not known to this one, which had the topmost of its own spans instead.
    is_apart = trace.parent != NONE
    is_apart &= of_row != of_row[trace.parent] if len(trace) else is_apart
    top = tops(np.where(is_apart, np.int32(NONE), trace.parent).astype(np.int32))
    root = rows_of(trace.span_id, trace.root_id)
    has_root = (root != NONE) & (of_row[root] == of_row) if len(trace) else is_apart
    root_id = np.where(has_root | (root == NONE), trace.root_id, trace.span_id[top] if len(trace) else trace.root_id)
    device = replace(
        its.device,
        device=_own(its.device.device, process.devices),
        stream=_own(its.device.stream, process.streams),
        start_ns=its.device.start_ns - moved_ns,
        end_ns=its.device.end_ns - moved_ns,
    )
    return replace(
        its,
        span_id=its.own_id,
        parent_id=_own_ids(trace, np.where(is_apart, 0, trace.parent_id)[rows], process),
        root_id=_own_ids(trace, root_id[rows], process),
        thread_id=_own(its.thread_id, process.threads),
        start_ns=its.start_ns - moved_ns,
        end_ns=its.end_ns - moved_ns,
        device=device,
        attributes=_OwnAttributes(trace, rows, process),
    )


def _own_ids(trace: Trace, ids: Int64s, process: MergedProcess) -> Int64s:
    rows = rows_of(trace.span_id, ids)
    absent = _own(ids, process.absent)
    return np.where(rows == NONE, absent, trace.own_id[rows]) if len(trace) else absent


class _OwnAttributes(AttributesOfSome):
    """The attributes of the rows of a process, with links by the ids that it gave."""

    def __init__(self, trace: Trace, rows: Int64s, process: MergedProcess) -> None:
        super().__init__(trace.attributes, rows, len(trace))
        self._trace, self._process = trace, process

    def __getitem__(self, row: int, /) -> Mapping[str, AttributeValue]:
        its = super().__getitem__(row)
        return {**its, LINK: self._own_link(its[LINK])} if LINK in its else its

    def values(self, name: str, rows: Int64s) -> list[AttributeValue | None]:
        found = super().values(name, rows)
        return [value and self._own_link(value) for value in found] if name == LINK else found

    def distinct(self, rows: Int64s) -> tuple[Int64s, Sequence[Mapping[str, AttributeValue]]]:
        numbers, sets = super().distinct(rows)
        return numbers, [{**one, LINK: self._own_link(one[LINK])} if LINK in one else one for one in sets]

    def _own_link(self, link: Any) -> Any:
        ids = linked_ids(link)
        return link if ids is None else tuple(_own_ids(self._trace, ids, self._process).tolist())


def _tallies(saved: Saved, of_thread: Mapping[int, int]) -> list[Tally] | None:
    """The totals of each process, by whose thread they are of; None where the file has none."""
    if saved.tally is None:
        return None
    found = [Tally({}) for _ in saved.facts.processes]
    for thread, name in saved.tally.threads.items():
        process = saved.facts.processes[of_thread.get(thread, 0)]
        own = process.threads.get(thread, thread)
        found[of_thread.get(thread, 0)].threads[own] = process.facts.threads.get(own, name)
    for row in saved.tally.rows():
        number = of_thread.get(row.thread_id, 0)
        own = saved.facts.processes[number].threads.get(row.thread_id, row.thread_id)
        totals = row.totals.copy()
        totals.first_ns -= saved.facts.processes[number].moved_ns
        found[number].totals(row.path, own).merge(totals)
    return found


def _facts(facts: Facts, number: int) -> Facts:
    """The facts of a process, with the devices that it has, and readings of a device that no process before it has."""
    process = facts.processes[number]
    before = {device for one in facts.processes[:number] for device in one.devices}
    its, moved_ns = process.devices, process.moved_ns

    def is_first(sample: Sample) -> bool:
        return (number == 0) if sample.device not in its else sample.device not in before

    return replace(
        process.facts,
        samples=[
            replace(one, device=its.get(one.device, one.device), at_ns=one.at_ns - moved_ns)
            for one in facts.samples
            if (one.device != HOST or number == 0) and is_first(one)
        ],
        gpus=[replace(gpu, device=its[gpu.device]) for gpu in facts.gpus if gpu.device in its],
        **(_watched(facts, process) if process.is_watched else {}),
    )


def _watched(facts: Facts, process: MergedProcess) -> dict[str, Any]:
    moved_ns = process.moved_ns
    kernels, allocations = KernelColumns.of(facts.kernels).moved(-moved_ns), Allocations.of(facts.allocations)
    rows = np.frombuffer(allocations.rows, dtype=ROW).copy()
    rows["device"], rows["thread_id"] = _own(rows["device"], process.devices), _own(rows["thread_id"], process.threads)
    return {
        "kernels": replace(
            kernels, device=_own(kernels.device, process.devices), thread_id=_own(kernels.thread_id, process.threads)
        ),
        "allocations": Allocations(rows.tobytes(), allocations.base_ns).moved(-moved_ns),
        "watched": facts.watched and (facts.watched[0] - moved_ns, facts.watched[1] - moved_ns),
        "flops": [
            one._replace(thread_id=process.threads.get(one.thread_id, one.thread_id), at_ns=one.at_ns - moved_ns)
            for one in facts.flops
        ],
    }
