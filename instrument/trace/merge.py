"""Saved recordings of several processes, or several of one, as one: on one clock, each span once, and ids unique.

Spans are numbered anew, in the order of their begins. Sites that mean the same place become one. Threads stay apart by
process, and so do streams and devices that nobody says are the same. Several files of a
process may have one span, such as a dump and the file of the end. It is taken from the file that has most of it.

`folded` makes one recording of processes that have ended, which grows no further: it has all totals and the newest
spans. A service whose workers are recycled for months has thousands of them, so threads, call paths, readings and notes
are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.recording.paths import OVERFLOW, CallPath
from instrument.recording.tally import Tally
from instrument.trace.apart import ApartFile, Numbers, linked_ids, processes_of
from instrument.trace.columns import Attributes, Bools, Columns, ComposedAttributes, DeviceIntervals, Int64s
from instrument.trace.file import Saved
from instrument.trace.forest import NONE, rows_of
from instrument.trace.groups import places_of
from instrument.trace.merged_facts import called, merged_facts, merged_processes, merged_tally

MONOTONIC, WALL = "monotonic", "wall"
"""The clocks on which files may be put: the one that all processes of a machine have until it is started anew, and the
time of day, which two machines never have alike."""


@dataclass(frozen=True)
class Merged:
    """The merged files, with the numbers of files, processes and runs, and the clock: `MONOTONIC` or `WALL`."""

    saved: Saved
    files: int
    processes: int
    runs: int
    clock: str
    apart_ns: int | None
    """The distance of the clocks of two processes at most, None where nobody knows."""
    parts: Sequence[ApartFile] = field(repr=False)
    """The new places of each file's rows; files of one process follow each other."""

    @property
    def header(self) -> str:
        """The line that a reader needs before the numbers."""
        of = f"{self.files} file{'s' * (self.files != 1)} of {self.processes} process{'es' * (self.processes != 1)}"
        of += f" in {self.runs} runs" * (self.runs > 1)
        if self.clock == MONOTONIC:
            return f"{of}, on the monotonic clock of one machine"
        if self.apart_ns is None:
            return f"{of}, by their wall clocks, of which nobody knows how far they are apart"
        return f"{of}, by their wall clocks, which are at most {self.apart_ns / 1e6:.3g} ms apart"


_AS_THEY_ARE = ("task_id", "active_ns", "self_ns", "clipped", "own_id")


def merge(files: Sequence[Saved], *, by_wall_clock: bool = False) -> Merged:
    """Return the files as one.

    Raises `TraceError` for files that cannot be put on one clock, or are no sound trace together.

    Files of different machines are put together by their wall clocks, and so are those of a machine that was started
    anew in between. All must say how exact these are, unless `by_wall_clock`.
    """
    try:
        groups = processes_of(files)
    except ValueError as problem:
        raise TraceError(f"cannot merge the files: {problem}") from problem
    parts = [saved for group in groups for saved in group]
    boots = {saved.trace.origin.boot for saved in parts}
    if len(parts) == 1:
        return _only(parts[0])
    clock = MONOTONIC if len(groups) == 1 or (len(boots) == 1 and "" not in boots) else WALL
    apart_ns = 0 if clock == MONOTONIC else _apart_ns(parts)
    if apart_ns is None and not by_wall_clock:
        raise TraceError(
            f"asked to put {len(files)} files of {len(groups)} processes on one clock, found that they are not of one "
            "machine, or do not tell, nor how exact its wall clock was; take these with --clock wall, which may be "
            "seconds apart, or see each with --by process"
        )
    if clock == WALL and (untold := [one for one in parts if not one.trace.origin.realtime_ns]):
        raise TraceError(f"the file of {called(untold[0])} does not tell the time of day; see each with --by process")
    try:
        before_ns = max(saved.trace.apart_ns for saved in parts)  # of files that are of several themselves
        made = _Merge(groups, clock, max(before_ns, SECONDS_NS if apart_ns is None else apart_ns))
        runs = len({saved.trace.origin.run for saved in parts} - {""})
        return Merged(made.saved, len(files), len(groups), runs, clock, apart_ns, made.parts)
    except ValueError as problem:
        raise TraceError(f"cannot merge the files: {problem}") from problem


def _only(saved: Saved) -> Merged:
    """One file, which stays as it is."""
    part = ApartFile(saved, 0, 0, 0)
    part.row = np.arange(len(saved.trace.columns))
    return Merged(saved, 1, 1, int(bool(saved.trace.origin.run)), MONOTONIC, 0, [part])


SECONDS_NS = 10**9
"""The distance of wall clocks where nobody knows it."""

SLEW = 500e-6
"""The deviation from true time of a clock while it is set, at most (man 2 adjtimex)."""


def _apart_ns(files: Sequence[Saved]) -> int | None:
    """Return the distance of the wall clocks of two files at most, None where one is unknown."""
    bounds = []
    for facts in (saved.trace for saved in files):
        origin = facts.origin
        if not origin.wall_error_ns or not origin.realtime_ns:
            return None
        since_ns = max(abs(edge_ns - origin.monotonic_ns) for edge_ns in (facts.start_ns, facts.end_ns))
        bounds.append(origin.wall_error_ns + round(since_ns * SLEW))
    return sum(sorted(bounds)[-2:])


def _joined_attributes(parts: Sequence[ApartFile], count: int) -> Attributes:
    """Return the attributes of the spans of several files, which are decoded when they are asked for."""
    part, own = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int64)
    for number, file in enumerate(parts):
        rows = np.flatnonzero(file.is_kept)
        part[file.row[rows]], own[file.row[rows]] = number, rows

    def relink(number: int, link: Any) -> Any:
        ids = linked_ids(link)
        if ids is None:
            return link
        rows = rows_of(parts[number].trace.span_id, ids)
        return tuple(0 if row == NONE else int(parts[number].row[row]) + 1 for row in rows.tolist())

    return ComposedAttributes([file.trace.attributes for file in parts], part, own, relink)


class _Merge:
    """The work of `merge`, file after file and column after column."""

    def __init__(self, groups: Sequence[Sequence[Saved]], clock: str, apart_ns: int) -> None:
        self._groups = groups
        base_ns = groups[0][0].trace.origin.realtime_of(0)
        self._absent: dict[tuple[int, int], int] = {}
        self._parts: list[ApartFile] = []
        first = 0
        for process, group in enumerate(groups):
            newest = max((saved.trace for saved in group), key=attrgetter("end_ns"))
            moved_ns = 0 if clock == MONOTONIC else newest.origin.realtime_of(0) - base_ns
            for saved in group:
                self._parts.append(ApartFile(saved, process, first, moved_ns))
                first += len(saved.trace.columns)
        self.parts: Sequence[ApartFile] = self._parts
        self._numbers = Numbers(self._parts)
        columns = self._merged_columns(first)
        facts = replace(merged_facts(self._parts, self._numbers), apart_ns=apart_ns)
        tally = merged_tally(self._parts, self._numbers, columns, facts.threads)
        processes = merged_processes(self._parts, self._numbers, self._absent) if len(groups) > 1 else ()
        self.saved = Saved(replace(facts, processes=processes).with_columns(columns), tally)

    # ------------------------------------------------------------ spans

    def _merged_columns(self, count: int) -> Columns:
        parts = self._parts
        site = _joined_columns(self._numbers.sites_of(part) for part in parts)
        start_ns = _joined_columns(part.trace.start_ns + part.moved_ns for part in parts)
        end_ns = _joined_columns(part.trace.end_ns + part.moved_ns for part in parts)
        thread_id = _joined_columns(self._numbers.threads_of(part) for part in parts)
        span_id = _joined_columns(part.trace.span_id for part in parts)
        taken = self._taken_for(span_id, site, thread_id, start_ns, end_ns)
        kept = np.flatnonzero(taken == np.arange(count))
        order = kept[np.lexsort((kept, -end_ns[kept], start_ns[kept]))]
        row_of = places_of(order, count)[taken]
        for part in parts:
            part.row = row_of[part.of_all]
            part.is_kept = taken[part.of_all] == np.arange(part.first, part.first + len(part.trace))
        errors, error = _tables([(part.trace.errors, part.trace.error) for part in parts])
        parent_id, root_id = self._ids_above()
        columns = {name: np.concatenate([getattr(part.trace, name) for part in parts])[order] for name in _AS_THEY_ARE}
        return Columns(
            sites=self._numbers.sites,
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
            device=self._intervals(),
            attributes=_joined_attributes(parts, len(order)),
            remote={
                int(part.row[row]): remote
                for part in parts
                for row, remote in part.trace.remote.items()
                if part.is_kept[row]
            },
        )

    def _taken_for(self, span_id: Int64s, site: Int64s, thread_id: Int64s, start_ns: Int64s, end_ns: Int64s) -> Int64s:
        """Return the row that is taken for each row of all files: itself, or what another file has of the same span."""
        taken = np.arange(len(span_id))
        process = np.repeat([part.process for part in self._parts], [len(part.trace) for part in self._parts])
        many = {process for process, group in enumerate(self._groups) if len(group) > 1}
        rows = np.flatnonzero(np.isin(process, list(many)))
        rows = rows[
            np.lexsort((-end_ns[rows], start_ns[rows], site[rows], thread_id[rows], span_id[rows], process[rows]))
        ]
        while len(rows):  # as often as one span is in several parts that do not overlap
            is_first = np.ones(len(rows), dtype=np.bool_)
            is_first[1:] = False
            for column in (process, span_id, thread_id, site):
                is_first[1:] |= column[rows[1:]] != column[rows[:-1]]
            leader = rows[is_first][np.cumsum(is_first) - 1]
            same = (start_ns[rows] < end_ns[leader]) | (start_ns[rows] == start_ns[leader])
            taken[rows[same]] = leader[same]
            rows = rows[~same]
        return taken

    def _ids_above(self) -> tuple[Int64s, Int64s]:
        """The ids of the parents and of the roots; of those that no file has, ids that nobody else has."""
        absent = self._absent
        above = 1 + sum(len(part.trace) for part in self._parts)
        found: dict[str, list[Int64s]] = {"parent_id": [], "root_id": []}
        for part in self._parts:
            others = [one for one in self._parts if one.process == part.process and one is not part]
            for name, columns in found.items():
                asked = getattr(part.trace, name)
                ids = _ids_in(part, asked)
                for other in others:
                    unknown = ids == NONE
                    ids[unknown] = _ids_in(other, asked[unknown])
                ids[asked == 0] = 0
                for row in np.flatnonzero(ids == NONE).tolist():
                    ids[row] = absent.setdefault((part.process, int(asked[row])), above + len(absent))
                columns.append(ids)
        return _joined_columns(found["parent_id"]), _joined_columns(found["root_id"])

    def _intervals(self) -> DeviceIntervals:
        parts = self._parts
        kept = [part.is_kept[part.trace.device.row] for part in parts]
        row = _joined_columns(part.row[part.trace.device.row[its]] for part, its in zip(parts, kept, strict=True))
        order = np.argsort(row, kind="stable")
        labels, label = _tables(
            [(part.trace.device.labels, part.trace.device.label[its]) for part, its in zip(parts, kept, strict=True)]
        )
        columns: dict[str, Int64s] = {}
        for name in ("device", "stream", "start_ns", "end_ns", "uncertainty_ns"):
            its_columns = []
            for part, its in zip(parts, kept, strict=True):
                column = getattr(part.trace.device, name)[its]
                if name == "device":
                    column = self._numbers.devices(column, part)
                elif name == "stream":
                    column = self._numbers.streams(column, part)
                elif name != "uncertainty_ns":
                    column = column + part.moved_ns
                its_columns.append(column)
            columns[name] = _joined_columns(its_columns)[order]
        return DeviceIntervals(
            row=row[order].astype(np.int32), label=label[order].astype(np.int32), labels=labels, **columns
        )


def _joined_columns(columns: Iterable[NDArray[Any]]) -> Int64s:
    found = [column.astype(np.int64) for column in columns]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _tables(pairs: Sequence[tuple[Sequence[str], NDArray[Any]]]) -> tuple[tuple[str, ...], Int64s]:
    """Tables of names and places in them as one."""
    known: dict[str, int] = {}
    columns = []
    for names, places in pairs:
        numbers = np.array([*(known.setdefault(name, len(known)) for name in names), NONE], dtype=np.int64)
        columns.append(numbers[places])
    return tuple(known), _joined_columns(columns)


def _ids_in(part: ApartFile, ids: NDArray[np.int64]) -> Int64s:
    """Return the new ids of a process's ids, `NONE` for those that the file does not have."""
    rows = rows_of(part.trace.span_id, ids)
    if not len(part.row):
        return np.full(len(ids), NONE, dtype=np.int64)
    return np.where(rows == NONE, NONE, part.row[rows] + 1)


SPANS_KEPT = 20_000
SAMPLES_KEPT = 20_000
"""Newest readings of gauges that are kept."""

PATHS_KEPT = 16_384
"""Call paths that have a line of their own, as many as in one process; then each site has one."""

NOTES_KEPT = 100
MORE_NOTES = f"processes that ended long before the run did had more than {NOTES_KEPT} notes; the rest is not told"

LEFT_OUT = "spans of processes that ended long before the run did"

ENDED_THREADS = 0, "(ended threads)"
"""The number and name under which the calls of threads count that have ended, as recorders have it."""


def folded(files: Sequence[Saved]) -> Saved:
    """Recordings of processes that have ended, or what has been made of such before, as one. Raises `TraceError`."""
    saved = merge(files).saved
    facts = saved.trace
    columns, since_ns = _newest(saved.trace.columns, SPANS_KEPT)
    losses, lost = dict(facts.losses), len(saved.trace.columns) - len(columns)
    if lost:
        losses[LEFT_OUT] = losses.get(LEFT_OUT, 0) + lost
    samples = facts.samples[-SAMPLES_KEPT:]
    devices = {*columns.device.device.tolist(), *(sample.device for sample in samples)}
    threads = {*columns.thread_id.tolist(), *(one.thread_id for one in facts.flops)}
    facts = replace(
        facts,
        origin=replace(facts.origin, pid=0),  # of none: the number may be another process's by now
        threads={thread: name for thread, name in facts.threads.items() if thread in threads},
        losses=losses,
        # As they were said: named by process they would be more with each fold, and the names before them too.
        notes=_few(list(dict.fromkeys(note for one in files for note in one.trace.notes if note != MORE_NOTES))),
        held_from_ns=max(facts.held_from_ns, since_ns),
        samples=samples,
        gpus=[gpu for gpu in facts.gpus if gpu.device in devices],
        startup=None,
        processes=(),
        died="",  # each was said as it happened; the run's report counts them
    )
    return Saved(facts.with_columns(columns), _of_ended_threads(saved.counted()))


def _few(notes: list[str]) -> list[str]:
    return notes if len(notes) <= NOTES_KEPT else [*notes[:NOTES_KEPT], MORE_NOTES]


def _newest(trace: Columns, count: int) -> tuple[Columns, int]:
    """The spans that ended last, with the sites and errors of them alone, and since when none is missing (0: ever)."""
    wanted, since_ns = np.ones(len(trace), dtype=np.bool_), 0
    if len(trace) > count:
        in_order = np.argsort(trace.end_ns, kind="stable")
        wanted[in_order[:-count]] = False
        since_ns = int(trace.end_ns[in_order[-count - 1]]) + 1
    return _with_used_sites(trace, wanted), since_ns


def _with_used_sites(trace: Columns, wanted: Bools) -> Columns:
    few = trace.with_attributes(wanted)
    sites, site = np.unique(few.site, return_inverse=True)
    known = np.unique(few.error[few.error >= 0])
    error = np.where(few.error >= 0, np.searchsorted(known, few.error), few.error)
    return replace(
        few,
        sites=tuple(trace.sites[place] for place in sites.tolist()),
        site=site.astype(np.int32),
        errors=tuple(trace.errors[place] for place in known.tolist()),
        error=error.astype(np.int32),
    )


def _of_ended_threads(tally: Tally) -> Tally:
    """The same totals without the threads, in as many call paths as one process may have."""
    thread, name = ENDED_THREADS
    known = set[CallPath]()

    def kept(path: CallPath) -> CallPath:
        if path not in known and len(known) >= PATHS_KEPT:
            path = (OVERFLOW, path[-1]) if len(known) < 2 * PATHS_KEPT else (OVERFLOW,)
        known.add(path)
        return path

    return tally.placed(kept, lambda _: thread, {thread: name})
