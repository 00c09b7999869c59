"""Merges saved recordings into one recording on a common clock, with unique ids and each span once.

Spans are renumbered in the order of their start times. Equal sites become one. Threads, streams and devices of
different processes stay distinct, except devices with the same UUID. If several files have the same span, the longest
version is kept.

`fold_recordings` makes one recording of processes that have ended, with all totals and the newest spans.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording.paths import OVERFLOW, CallPath
from instrument.recording.spans import HOST, Sample
from instrument.recording.tally import Tally
from instrument.trace.columns import Attributes, Bools, Columns, DeviceIntervals, Int64s
from instrument.trace.file import Saved
from instrument.trace.indices import NONE, find_rows, index_rows, rank_distinct, topmost_rows
from instrument.trace.layout import shift_torch_data
from instrument.trace.merged_facts import (
    MergedFile,
    Numbers,
    make_process_label,
    merge_facts,
    merge_processes,
    merge_tally,
    restore_numbers,
)
from instrument.trace.trace import MergedProcess, Trace

MONOTONIC, WALL = "monotonic", "wall"
"""The clocks that a merged trace can use: the monotonic clock of one machine, or the time of day, which differs
slightly between machines."""


@dataclass(frozen=True)
class Merged:
    """The result of a merge, with the counts of files, processes and runs. `clock` is `MONOTONIC` or `WALL`."""

    saved: Saved
    files: int
    processes: int
    runs: int
    clock: str
    apart_ns: int | None
    """The maximum difference in ns between the clocks of two processes, None if unknown."""
    parts: Sequence[MergedFile] = field(repr=False)
    """The files with the merged rows of their spans. Files of one process are consecutive."""

    def find_row_processes(self) -> Int64s:
        """Return the index of each merged row's process."""
        process = np.zeros(len(self.saved.trace.columns), dtype=np.int64)
        for part in self.parts:
            process[part.row[part.is_kept]] = part.process
        return process

    @property
    def header(self) -> str:
        """The line that reports show about the merge: the counts of files, processes and runs, and the clock."""
        text = f"{self.files} file{'s' * (self.files != 1)} of {self.processes} process{'es' * (self.processes != 1)}"
        text += f" in {self.runs} runs" * (self.runs > 1)
        if self.clock == MONOTONIC:
            return f"{text}, on the monotonic clock of one machine"
        if self.apart_ns is None:
            return f"{text}, by their wall clocks, of which nobody knows how far they are apart"
        return f"{text}, by their wall clocks, which are at most {self.apart_ns / 1e6:.3g} ms apart"


_AS_THEY_ARE = ("task_id", "active_ns", "self_ns", "clipped", "own_id")


def merge_recordings(files: Sequence[Saved], *, by_wall_clock: bool = False) -> Merged:
    """Return the files as one recording. Files of different machines or boots are merged by their wall clocks.

    Raises `TraceError` if the files do not make a valid trace, or if the error of a wall clock is unknown.
    `by_wall_clock` permits an unknown error.
    """
    try:
        groups = group_by_process(files)
    except ValueError as problem:
        raise TraceError(f"cannot merge the files: {problem}") from problem
    parts = [saved for group in groups for saved in group]
    boots = {saved.trace.origin.boot for saved in parts}
    if len(parts) == 1:
        part = MergedFile(parts[0], 0, 0, 0)
        part.row = np.arange(len(part.trace))
        return Merged(part.saved, 1, 1, int(bool(part.saved.trace.origin.run)), MONOTONIC, 0, [part])
    clock = MONOTONIC if len(groups) == 1 or (len(boots) == 1 and "" not in boots) else WALL
    apart_ns = 0 if clock == MONOTONIC else _bound_clock_error(parts)
    if apart_ns is None and not by_wall_clock:
        raise TraceError(
            f"cannot put {len(files)} files of {len(groups)} processes on one clock: they are of several machines "
            "or do not name their machine, and the accuracy of the clocks is unknown; use --clock wall, which may be "
            "seconds off, or --by process"
        )
    if clock == WALL and (undated := [saved for saved in parts if not saved.trace.origin.realtime_ns]):
        raise TraceError(
            f"the file of {make_process_label(undated[0])} has no time of day; see each process with --by process"
        )
    try:
        before_ns = max(saved.trace.apart_ns for saved in parts)  # of files that were merged before
        merged = _merge_groups(groups, clock, max(before_ns, SECONDS_NS if apart_ns is None else apart_ns))
        runs = len({saved.trace.origin.run for saved in parts} - {""})
        return Merged(merged[0], len(files), len(groups), runs, clock, apart_ns, merged[1])
    except ValueError as problem:
        raise TraceError(f"cannot merge the files: {problem}") from problem


SECONDS_NS = 10**9
"""The assumed difference in ns between two wall clocks of unknown error."""

SLEW = 500e-6
"""The largest drift of a clock while NTP adjusts it, in seconds per second."""


def _bound_clock_error(files: Sequence[Saved]) -> int | None:
    """Return the largest difference between two files' wall clocks in ns, or None if it is unknown."""
    bounds = []
    for facts in (saved.trace for saved in files):
        origin = facts.origin
        if not origin.wall_error_ns or not origin.realtime_ns:
            return None
        since_ns = max(abs(edge_ns - origin.monotonic_ns) for edge_ns in (facts.start_ns, facts.end_ns))
        bounds.append(origin.wall_error_ns + round(since_ns * SLEW))
    return sum(sorted(bounds)[-2:])


def _relink_to_merged(part: MergedFile, link: Any) -> Any:
    """Return a link with merged ids. An unknown id becomes 0."""
    ids = parse_link(link)
    return link if ids is None else tuple(np.maximum(_find_merged_ids(part, ids), 0).tolist())


def _merge_groups(groups: Sequence[Sequence[Saved]], clock: str, apart_ns: int) -> tuple[Saved, list[MergedFile]]:
    base_ns = groups[0][0].trace.origin.realtime_of(0)
    absent: dict[tuple[int, int], int] = {}
    parts: list[MergedFile] = []
    first = 0
    for process, group in enumerate(groups):
        newest = max((saved.trace for saved in group), key=attrgetter("end_ns"))
        moved_ns = 0 if clock == MONOTONIC else newest.origin.realtime_of(0) - base_ns
        for saved in group:
            parts.append(MergedFile(saved, process, first, moved_ns))
            first += len(saved.trace.columns)
    numbers = Numbers(parts)
    columns = _merge_columns(parts, numbers, absent)
    facts = replace(merge_facts(parts, numbers), apart_ns=apart_ns)
    tally = merge_tally(parts, numbers, columns, facts.threads)
    processes = merge_processes(parts, numbers, absent) if len(groups) > 1 else ()
    return Saved(replace(facts, processes=processes).with_columns(columns), tally), parts


def _merge_columns(parts: Sequence[MergedFile], numbers: Numbers, absent: dict[tuple[int, int], int]) -> Columns:
    site = _join_columns(numbers.find_site_indices(part.trace.sites)[part.trace.site] for part in parts)
    start_ns = _join_columns(part.trace.start_ns + part.moved_ns for part in parts)
    end_ns = _join_columns(part.trace.end_ns + part.moved_ns for part in parts)
    thread_id = _join_columns(numbers.threads.assign_numbers(part.trace.thread_id, part.process) for part in parts)
    span_id = _join_columns(part.trace.span_id for part in parts)
    chosen = _choose_rows(parts, span_id, site, thread_id, start_ns, end_ns)
    kept_rows = np.flatnonzero(chosen == np.arange(len(span_id)))
    order = kept_rows[np.lexsort((kept_rows, -end_ns[kept_rows], start_ns[kept_rows]))]
    row_of = index_rows(order, len(span_id))[chosen]
    for part in parts:
        part.row = row_of[part.slice_of_all_rows]
        part.is_kept = chosen[part.slice_of_all_rows] == np.arange(part.first, part.first + len(part.trace))
    errors, error = _join_tables([(part.trace.errors, part.trace.error) for part in parts])
    parent_id, root_id = _merge_parent_ids(parts, absent)
    columns = {name: np.concatenate([getattr(part.trace, name) for part in parts])[order] for name in _AS_THEY_ARE}
    attributes = [part.trace.attributes.convert_links(partial(_relink_to_merged, part)) for part in parts]
    return Columns(
        sites=numbers.sites,
        errors=errors,
        span_id=np.arange(1, len(order) + 1),
        parent_id=parent_id[order],
        root_id=root_id[order],
        thread_id=thread_id[order],
        start_ns=start_ns[order],
        end_ns=end_ns[order],
        site=site[order].astype(np.int32),
        error=error[order].astype(np.int32),
        **columns,
        device=_merge_intervals(parts, numbers),
        attributes=Attributes.concatenate(attributes).take_rows(order),
        remote={
            int(part.row[row]): remote
            for part in parts
            for row, remote in part.trace.remote.items()
            if part.is_kept[row]
        },
    )


def _choose_rows(
    parts: Sequence[MergedFile], span_id: Int64s, site: Int64s, thread_id: Int64s, start_ns: Int64s, end_ns: Int64s
) -> Int64s:
    """Map each row to the row that is kept. Copies of a span in several files of a process are mapped to one row."""
    chosen = np.arange(len(span_id))
    processes = [part.process for part in parts]
    process = np.repeat(processes, [len(part.trace) for part in parts])
    rows = np.flatnonzero((np.bincount(processes) > 1)[process])  # of processes with several files
    rows = rows[np.lexsort((-end_ns[rows], start_ns[rows], site[rows], thread_id[rows], span_id[rows], process[rows]))]
    while len(rows):  # once per non-overlapping part of the same span
        is_first = np.ones(len(rows), dtype=np.bool_)
        is_first[1:] = False
        for column in (process, span_id, thread_id, site):
            is_first[1:] |= column[rows[1:]] != column[rows[:-1]]
        leader = rows[is_first][np.cumsum(is_first) - 1]
        same = (start_ns[rows] < end_ns[leader]) | (start_ns[rows] == start_ns[leader])
        chosen[rows[same]] = leader[same]
        rows = rows[~same]
    return chosen


def _merge_parent_ids(parts: Sequence[MergedFile], absent: dict[tuple[int, int], int]) -> tuple[Int64s, Int64s]:
    """Return the merged ids of parents and of roots. A missing parent or root gets a new id, which is added to
    `absent`."""
    above = 1 + sum(len(part.trace) for part in parts)
    columns = []
    for part in parts:
        process_ids = np.concatenate([part.trace.parent_id, part.trace.root_id])
        ids = _find_merged_ids(part, process_ids)
        for file in parts:
            if file.process == part.process and file is not part:
                unknown = ids == NONE
                ids[unknown] = _find_merged_ids(file, process_ids[unknown])
        ids[process_ids == 0] = 0
        for row in np.flatnonzero(ids == NONE).tolist():
            ids[row] = absent.setdefault((part.process, int(process_ids[row])), above + len(absent))
        columns.append(ids.reshape(2, -1))
    parent_id, root_id = np.concatenate(columns, axis=1)
    return parent_id, root_id


def _merge_intervals(parts: Sequence[MergedFile], numbers: Numbers) -> DeviceIntervals:
    masks = [part.is_kept[part.trace.device.row] for part in parts]
    row = _join_columns(part.row[part.trace.device.row[mask]] for part, mask in zip(parts, masks, strict=True))
    labels, label = _join_tables(
        [(part.trace.device.labels, part.trace.device.label[mask]) for part, mask in zip(parts, masks, strict=True)]
    )
    moved = [
        replace(
            device := part.trace.device.select(mask),
            device=numbers.merged_devices(device.device, part),
            stream=numbers.streams.assign_numbers(device.stream, part.process),
            start_ns=device.start_ns + part.moved_ns,
            end_ns=device.end_ns + part.moved_ns,
        )
        for part, mask in zip(parts, masks, strict=True)
    ]
    names = ("device", "stream", "start_ns", "end_ns", "uncertainty_ns")
    columns = {name: _join_columns(getattr(device, name) for device in moved) for name in names}
    return DeviceIntervals(
        row=row.astype(np.int32), label=label.astype(np.int32), labels=labels, **columns
    ).sort_by_row()


def _join_columns(columns: Iterable[NDArray[Any]]) -> Int64s:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(column.astype(np.int64) for column in columns)])


def _join_tables(pairs: Sequence[tuple[Sequence[str], NDArray[Any]]]) -> tuple[tuple[str, ...], Int64s]:
    table: dict[str, int] = {}
    columns = []
    for names, places in pairs:
        numbers = np.array([*(table.setdefault(name, len(table)) for name in names), NONE], dtype=np.int64)
        columns.append(numbers[places])
    return tuple(table), _join_columns(columns)


def _find_merged_ids(part: MergedFile, ids: NDArray[np.int64]) -> Int64s:
    return np.append(part.row + 1, NONE)[find_rows(part.trace.span_id, ids)]


SPANS_KEPT = 20_000
SAMPLES_KEPT = 20_000
"""The maximum number of gauge samples kept of ended processes. The oldest are dropped first."""

PATHS_KEPT = 16_384
"""The maximum number of call paths kept of ended processes. Further paths of a site share one row."""

NOTES_KEPT = 100
MORE_NOTES = f"processes that ended long before the run did had more than {NOTES_KEPT} notes; the rest is not shown"

LEFT_OUT = "spans of processes that ended long before the run did"

ENDED_THREADS = 0, "(ended threads)"
"""The thread number and name under which recorders count the calls of ended threads."""


def fold_recordings(files: Sequence[Saved]) -> Saved:
    """Merge the recordings of ended processes into one of bounded size. Earlier results may be merged again. Raises
    `TraceError`."""
    saved = merge_recordings(files).saved
    facts, losses, since_ns = saved.trace, dict(saved.trace.losses), 0
    is_kept, lost = np.ones(len(facts.columns), dtype=np.bool_), len(facts.columns) - SPANS_KEPT
    if lost > 0:  # the oldest are dropped, and from `since_ns` on no span is missing
        in_order = np.argsort(facts.columns.end_ns, kind="stable")
        is_kept[in_order[:lost]] = False
        since_ns = int(facts.columns.end_ns[in_order[lost - 1]]) + 1
        losses[LEFT_OUT] = losses.get(LEFT_OUT, 0) + lost
    columns, samples = _drop_unused_sites(facts.columns, is_kept), facts.samples[-SAMPLES_KEPT:]
    # The original notes: a prefix per process would make them more and longer with each fold.
    notes = [*dict.fromkeys(note for file in files for note in file.trace.notes if note != MORE_NOTES)]
    devices = {*columns.device.device.tolist(), *(sample.device for sample in samples)}
    threads = {*columns.thread_id.tolist(), *(flops.thread_id for flops in facts.flops)}
    facts = replace(
        facts,
        origin=replace(facts.origin, pid=0),  # the pid may be reused by now
        threads={thread: name for thread, name in facts.threads.items() if thread in threads},
        losses=losses,
        notes=notes if len(notes) <= NOTES_KEPT else [*notes[:NOTES_KEPT], MORE_NOTES],
        held_from_ns=max(facts.held_from_ns, since_ns),
        samples=samples,
        gpus=[gpu for gpu in facts.gpus if gpu.device in devices],
        startup=None,
        processes=(),
        died="",  # each was reported when it happened; the run's report counts them
    )
    return Saved(facts.with_columns(columns), _join_ended_threads(saved.read_or_count_totals()))


def _drop_unused_sites(trace: Columns, is_kept: Bools) -> Columns:
    kept_spans = trace.select(is_kept)
    sites, site = np.unique(kept_spans.site, return_inverse=True)
    used_errors = np.unique(kept_spans.error[kept_spans.error >= 0])
    error = np.where(kept_spans.error >= 0, np.searchsorted(used_errors, kept_spans.error), kept_spans.error)
    return replace(
        kept_spans,
        sites=tuple(trace.sites[place] for place in sites.tolist()),
        site=site.astype(np.int32),
        errors=tuple(trace.errors[place] for place in used_errors.tolist()),
        error=error.astype(np.int32),
    )


def _join_ended_threads(tally: Tally) -> Tally:
    """Move all calls to the thread `ENDED_THREADS`, and keep at most `PATHS_KEPT` call paths."""
    thread, name = ENDED_THREADS
    kept_paths = set[CallPath]()

    def limit_path(path: CallPath) -> CallPath:
        if path not in kept_paths and len(kept_paths) >= PATHS_KEPT:
            path = (OVERFLOW, path[-1]) if len(kept_paths) < 2 * PATHS_KEPT else (OVERFLOW,)
        kept_paths.add(path)
        return path

    return tally.change_paths(limit_path, lambda _: thread, {thread: name})


def parse_link(link: Any) -> Int64s | None:
    if not isinstance(link, (tuple, list)) or len(link) != 2 or set(map(type, link)) != {int}:
        return None
    return np.array(link, dtype=np.int64) if all(-1 << 63 <= number < 1 << 63 for number in link) else None


def group_by_process(files: Sequence[Saved]) -> list[list[Saved]]:
    """Return the recordings of each process, in the order of first appearance. Merged files are split by process."""
    groups: dict[Hashable, list[Saved]] = {}
    for saved in files:
        for part in split_by_process(saved):
            origin = part.trace.origin
            is_known = origin.pid > 0 and origin.recorder != "other"  # an unknown process has one file
            key = (origin.host, origin.boot, origin.pid, origin.service, origin.start_ticks) if is_known else id(part)
            groups.setdefault(key, []).append(part)
    return list(groups.values())


def split_by_process(saved: Saved) -> list[Saved]:
    """Return the recordings of each process in a merged recording. A recording of one process is returned unchanged."""
    processes = saved.trace.processes
    if not processes:
        return [saved]
    of_thread = {thread: number for number, process in enumerate(processes) for thread in process.threads}
    threads, places = rank_distinct(saved.trace.columns.thread_id)
    of_row = np.array([of_thread.get(thread, 0) for thread in threads.tolist()], dtype=np.int64)[places]
    recordings = []
    for number, process in enumerate(processes):

        def find_own_thread(thread: int, number: int = number, process: MergedProcess = process) -> int | None:
            return process.threads.get(thread, thread) if of_thread.get(thread, 0) == number else None

        # One id may be in several windows: a span that was open at their edges. Totals are of all of them together.
        starts = np.array([start_ns for start_ns, _ in process.windows], dtype=np.int64) + process.moved_ns
        window = np.searchsorted(starts, saved.trace.columns.start_ns, side="right").clip(min=1) - 1
        facts, is_one = _select_facts_of_process(saved.trace, number), len(starts) == 1
        for at, (start_ns, end_ns) in enumerate(process.windows):
            columns = _select_rows_of_process(saved.trace.columns, of_row, (of_row == number) & (window == at), process)
            samples = facts.samples if at == 0 else ()
            part = replace(facts, start_ns=start_ns, end_ns=end_ns, samples=samples)
            tally = None
            if is_one and saved.tally is not None:
                names = {
                    own_thread: process.facts.threads.get(own_thread, name)
                    for thread, name in saved.tally.threads.items()
                    if (own_thread := find_own_thread(thread)) is not None
                }
                tally = saved.tally.change_paths(thread_of=find_own_thread, threads=names, moved_ns=-process.moved_ns)
            recordings.append(Saved(part.with_columns(columns), tally))
    return recordings


def _select_rows_of_process(trace: Columns, of_row: Int64s, is_wanted: Bools, process: MergedProcess) -> Columns:

    def restore_link(link: Any) -> Any:
        ids = parse_link(link)
        return link if ids is None else tuple(_restore_ids(trace, ids, process).tolist())

    rows = np.flatnonzero(is_wanted)
    columns, moved_ns = trace.select(is_wanted), process.moved_ns
    # The process did not know parents and roots of other processes. Its own topmost span was the root.
    is_apart = (trace.parent != NONE) & (of_row != of_row[trace.parent])
    top = topmost_rows(np.where(is_apart, np.int32(NONE), trace.parent).astype(np.int32))
    root = find_rows(trace.span_id, trace.root_id)
    is_own_root = (root == NONE) | (of_row[root] == of_row)
    root_id = np.where(is_own_root, trace.root_id, trace.span_id[top])
    device = replace(
        columns.device,
        device=restore_numbers(columns.device.device, process.devices),
        stream=restore_numbers(columns.device.stream, process.streams),
        start_ns=columns.device.start_ns - moved_ns,
        end_ns=columns.device.end_ns - moved_ns,
    )
    return replace(
        columns,
        span_id=columns.own_id,
        parent_id=_restore_ids(trace, np.where(is_apart, 0, trace.parent_id)[rows], process),
        root_id=_restore_ids(trace, root_id[rows], process),
        thread_id=restore_numbers(columns.thread_id, process.threads),
        start_ns=columns.start_ns - moved_ns,
        end_ns=columns.end_ns - moved_ns,
        device=device,
        attributes=columns.attributes.convert_links(restore_link),
    )


def _restore_ids(trace: Columns, ids: Int64s, process: MergedProcess) -> Int64s:
    rows = find_rows(trace.span_id, ids)
    return np.where(rows == NONE, restore_numbers(ids, process.absent), np.append(trace.own_id, 0)[rows])


def _select_facts_of_process(facts: Trace, number: int) -> Trace:
    """Return the metadata of one process, with its devices' gauges. If processes share a device, only the first one
    gets the gauges."""
    process = facts.processes[number]
    before = {device for other_process in facts.processes[:number] for device in other_process.devices}
    devices, moved_ns = process.devices, process.moved_ns

    def is_first_of_device(sample: Sample) -> bool:
        return (number == 0) if sample.device not in devices else sample.device not in before

    return replace(
        process.facts,
        samples=[
            *process.facts.samples,
            *(
                replace(sample, device=devices.get(sample.device, sample.device), at_ns=sample.at_ns - moved_ns)
                for sample in facts.samples
                if (sample.device != HOST or number == 0) and is_first_of_device(sample)
            ),
        ],
        gpus=[replace(gpu, device=devices[gpu.device]) for gpu in facts.gpus if gpu.device in devices],
        **(
            shift_torch_data(
                facts,
                lambda numbers: restore_numbers(numbers, process.devices),
                lambda numbers: restore_numbers(numbers, process.threads),
                -moved_ns,
            )
            if process.is_watched
            else {}
        ),
    )
