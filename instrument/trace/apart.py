"""Gives the threads, streams and devices of merged processes distinct numbers, and splits a merged file into its
processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import HOST, Sample, Site
from instrument.recording.tally import Tally
from instrument.trace.columns import Attributes, Bools, Columns, ComposedAttributes, Int64s
from instrument.trace.file import Saved
from instrument.trace.forest import NONE, rows_of, topmost_rows
from instrument.trace.groups import ranked
from instrument.trace.trace import MergedProcess, Trace
from instrument.trace.watched import move_watched


class DistinctNumbers:
    """Assigns a number that no other process has to each number of a process. A number stays if it is unique
    already."""

    def __init__(self) -> None:
        self._given: dict[tuple[Hashable, int], int] = {}
        self._taken: set[int] = set()
        self._next = 0

    def number(self, own_number: int, owner: Hashable) -> int:
        """Return the distinct number for a number of `owner`, such as a process."""
        number = self._given.get((owner, own_number))
        if number is None:
            number = self._next if own_number in self._taken else own_number
            self._given[owner, own_number] = number
            self._taken.add(number)
            self._next = max(self._next, number + 1)
        return number

    def column(self, numbers: NDArray[Any], owner: Hashable) -> Int64s:
        """Return the distinct number for each of an owner's numbers."""
        return _renumber(numbers, lambda number: self.number(number, owner))

    def map_to_own_numbers(self, owner: Hashable) -> dict[int, int]:
        """Return a map from distinct numbers to an owner's numbers."""
        return {number: own_number for (of, own_number), number in self._given.items() if of == owner}


def _renumber(numbers: NDArray[Any], become: Callable[[int], int]) -> Int64s:
    """Return the result of `become` for each number. The function is called once per distinct number."""
    distinct, places = ranked(numbers)
    return np.array(list(map(become, distinct.tolist())), dtype=np.int64)[places]


class JoinedSites:
    """Joins the sites of several files: one site per key, with the attributes that all sites of the key share."""

    def __init__(self) -> None:
        self._places: dict[tuple[object, ...], int] = {}
        self._found: list[list[Site]] = []

    def place(self, site: Site) -> int:
        """Return the index of a site's joined site."""
        place = self._places.setdefault(site.key, len(self._found))
        if place == len(self._found):
            self._found.append([])
        if not any(site is known_site or site.attributes == known_site.attributes for known_site in self._found[place]):
            self._found[place].append(site)
        return place

    @cached_property
    def joined(self) -> tuple[Site, ...]:
        """The joined sites by index, to be read after the last call of `place`."""
        return tuple(map(_join_sites, self._found))


def _join_sites(same: Sequence[Site]) -> Site:
    first = same[0]
    shared = [pair for pair in first.attributes if all(pair in site.attributes for site in same)]
    flags: dict[str, Any] = {name: any(getattr(site, name) for site in same) for name in _FLAGS}
    return replace(first, attributes=tuple(shared), **flags)


_FLAGS = [item.name for item in fields(Site) if item.type == "bool"]


def parse_link(link: Any) -> Int64s | None:
    """Return the ids of the linked span and of its root, None if the value is no link."""
    if not isinstance(link, (tuple, list)) or len(link) != 2 or set(map(type, link)) != {int}:
        return None
    return np.array(link, dtype=np.int64) if all(-1 << 63 <= number < 1 << 63 for number in link) else None


class MergedFile:
    """One of the files of a merge, and the rows of its spans in the merged trace."""

    def __init__(self, saved: Saved, process: int, first: int, moved_ns: int) -> None:
        self.saved, self.process, self.first, self.moved_ns = saved, process, first, moved_ns
        self.trace = saved.trace.columns
        self.row = np.zeros(0, dtype=np.int64)
        """The row in the merged trace of each row of this file. Another file may have provided the same span."""
        self.is_kept = np.ones(len(self.trace), dtype=np.bool_)

    def sites(self) -> list[Site]:
        """Return the sites of the file's spans, tally and start-up."""
        sites = [*self.trace.sites]
        if self.saved.tally is not None:
            sites += self.saved.tally.sites()
        startup = self.saved.trace.startup
        if startup is not None:
            sites += [call.site for call in (*startup.firsts, *filter(None, [startup.request]))]
        return sites

    def called_sites(self) -> set[Site]:
        """Return the sites of the file's spans and of the calls in its tally."""
        sites = {self.trace.sites[place] for place in np.unique(self.trace.site).tolist()}
        if self.saved.tally is not None:
            sites |= {row.path[-1] for row in self.saved.tally.rows() if row.totals.calls}
        return sites

    @property
    def of_all(self) -> slice:
        """The slice of this file's rows among the rows of all files."""
        return slice(self.first, self.first + len(self.trace))


class Numbers:
    """The merged sites and the merged numbers of threads, streams and devices of all files."""

    def __init__(self, parts: Sequence[MergedFile]) -> None:
        self._threads, self._streams, self._devices = DistinctNumbers(), DistinctNumbers(), DistinctNumbers()
        self._own_devices: dict[int, dict[int, int]] = {}
        self._sites = JoinedSites()
        for part in parts:
            for site in part.sites():
                self._sites.place(site)

    @property
    def sites(self) -> tuple[Site, ...]:
        """The joined sites, each once."""
        return self._sites.joined

    def site(self, site: Site) -> Site:
        """Return the joined site for a site."""
        return self.sites[self._sites.place(site)]

    def find_merged_sites(self, part: MergedFile) -> Int64s:
        """Return the index of the joined site of each row."""
        places = [self._sites.place(site) for site in part.trace.sites]
        return np.array(places, dtype=np.int64)[part.trace.site]

    def thread(self, number: int, part: MergedFile) -> int:
        """Return the merged number of a thread. Number 0 means the process's ended threads."""
        return self._threads.number(number, part.process)

    def threads_of(self, part: MergedFile) -> Int64s:
        """Return the merged thread number of each row."""
        return self._threads.column(part.trace.thread_id, part.process)

    def threads(self, numbers: NDArray[Any], part: MergedFile) -> Int64s:
        """Return the merged numbers of threads. The number 0 means no thread and remains 0."""
        threads = np.zeros(len(numbers), dtype=np.int64)
        of_some = numbers != 0
        threads[of_some] = self._threads.column(numbers[of_some], part.process)
        return threads

    def streams(self, numbers: NDArray[Any], part: MergedFile) -> Int64s:
        """Return the merged numbers of streams."""
        return self._streams.column(numbers, part.process)

    def devices(self, numbers: NDArray[Any], part: MergedFile) -> Int64s:
        """Return the merged numbers of a process's devices."""
        return _renumber(numbers, lambda number: self.device(number, part))

    def device(self, number: int, part: MergedFile) -> int:
        """Return the merged number of a device. A GPU with a known UUID has one number in all processes."""
        if number == HOST:
            return number
        uuid = next((gpu.uuid for gpu in part.saved.trace.gpus if gpu.device == number), "")
        joined = self._devices.number(number, uuid or part.process)
        self._own_devices.setdefault(part.process, {})[joined] = number
        return joined

    def of_process(self, process: int) -> dict[str, dict[int, int]]:
        """Return maps from merged numbers to a process's own numbers of threads, devices and streams."""
        return {
            "threads": self._threads.map_to_own_numbers(process),
            "devices": self._own_devices.get(process, {}),
            "streams": self._streams.map_to_own_numbers(process),
        }


# A merged file is split into its processes, so a span that another file of the process has too is recognised


def process_key(saved: Saved) -> Hashable:
    """Return a key that is equal for all files of one process. Files of unknown processes have a key of their own."""
    origin = saved.trace.origin
    is_known = origin.pid > 0 and origin.recorder != "other"
    return (origin.host, origin.boot, origin.pid, origin.service, origin.start_ticks) if is_known else id(saved)


def processes_of(files: Sequence[Saved]) -> list[list[Saved]]:
    """Return the recordings of each process, in the order of first appearance. Merged files are split by process."""
    groups: dict[Hashable, list[Saved]] = {}
    for saved in files:
        for part in split_by_process(saved):
            groups.setdefault(process_key(part), []).append(part)
    return list(groups.values())


def split_by_process(saved: Saved) -> list[Saved]:
    """Return a recording for each process in a merged recording. A recording of one process is returned unchanged."""
    processes = saved.trace.processes
    if not processes:
        return [saved]
    of_thread = {thread: number for number, process in enumerate(processes) for thread in process.threads}
    threads, places = ranked(saved.trace.columns.thread_id)
    of_row = np.array([of_thread.get(thread, 0) for thread in threads.tolist()], dtype=np.int64)[places]
    tallies = _split_tally(saved, of_thread)
    recordings = []
    for number, process in enumerate(processes):
        # One id may be in several windows: a span that was open at their edges. Totals are of all of them together.
        starts = np.array([start_ns for start_ns, _ in process.windows], dtype=np.int64) + process.moved_ns
        window = np.searchsorted(starts, saved.trace.columns.start_ns, side="right").clip(min=1) - 1
        facts, is_one = _select_facts(saved.trace, number), len(starts) == 1
        for at, (start_ns, end_ns) in enumerate(process.windows):
            columns = _select_columns(saved.trace.columns, of_row, (of_row == number) & (window == at), process)
            samples = facts.samples if at == 0 else ()
            part = replace(facts, start_ns=start_ns, end_ns=end_ns, samples=samples)
            tally = tallies[number] if is_one and tallies is not None else None
            recordings.append(Saved(part.with_columns(columns), tally))
    return recordings


def _restore_numbers(numbers: NDArray[Any], own_numbers: Mapping[int, int]) -> Int64s:
    """Return a process's own numbers for merged numbers. An unknown number is returned unchanged."""
    return _renumber(numbers, lambda number: own_numbers.get(number, number))


def _select_columns(trace: Columns, of_row: Int64s, is_wanted: Bools, process: MergedProcess) -> Columns:
    """Return the wanted rows of one process, with its own numbers and ids. `of_row` has the process of each row."""
    rows = np.flatnonzero(is_wanted)
    columns, moved_ns = trace.with_attributes(is_wanted), process.moved_ns
    # The process did not know parents and roots of other processes. Its own topmost span was the root.
    is_apart = trace.parent != NONE
    is_apart &= of_row != of_row[trace.parent] if len(trace) else is_apart
    top = topmost_rows(np.where(is_apart, np.int32(NONE), trace.parent).astype(np.int32))
    root = rows_of(trace.span_id, trace.root_id)
    has_root = (root != NONE) & (of_row[root] == of_row) if len(trace) else is_apart
    root_id = np.where(has_root | (root == NONE), trace.root_id, trace.span_id[top] if len(trace) else trace.root_id)
    device = replace(
        columns.device,
        device=_restore_numbers(columns.device.device, process.devices),
        stream=_restore_numbers(columns.device.stream, process.streams),
        start_ns=columns.device.start_ns - moved_ns,
        end_ns=columns.device.end_ns - moved_ns,
    )
    return replace(
        columns,
        span_id=columns.own_id,
        parent_id=_restore_ids(trace, np.where(is_apart, 0, trace.parent_id)[rows], process),
        root_id=_restore_ids(trace, root_id[rows], process),
        thread_id=_restore_numbers(columns.thread_id, process.threads),
        start_ns=columns.start_ns - moved_ns,
        end_ns=columns.end_ns - moved_ns,
        device=device,
        attributes=_restore_attributes(trace, rows, process),
    )


def _restore_ids(trace: Columns, ids: Int64s, process: MergedProcess) -> Int64s:
    rows = rows_of(trace.span_id, ids)
    absent = _restore_numbers(ids, process.absent)
    return np.where(rows == NONE, absent, trace.own_id[rows]) if len(trace) else absent


def _restore_attributes(trace: Columns, rows: Int64s, process: MergedProcess) -> Attributes:
    """Return the attributes of some rows of a process, with the process's own ids in links."""

    def relink(_: int, link: Any) -> Any:
        ids = parse_link(link)
        return link if ids is None else tuple(_restore_ids(trace, ids, process).tolist())

    return ComposedAttributes([trace.attributes], np.zeros(len(rows), dtype=np.int32), rows, relink)


def _split_tally(saved: Saved, of_thread: Mapping[int, int]) -> list[Tally] | None:
    """Return the tally of each process, None if the file has none. `of_thread` has the process of each thread."""
    if (tally := saved.tally) is None:
        return None
    return [_select_tally(tally, process, number, of_thread) for number, process in enumerate(saved.trace.processes)]


def _select_tally(tally: Tally, process: MergedProcess, number: int, of_thread: Mapping[int, int]) -> Tally:
    """Return the tally of one process, with its own thread numbers."""

    def own(thread: int) -> int | None:
        return process.threads.get(thread, thread) if of_thread.get(thread, 0) == number else None

    names = {
        own_thread: process.facts.threads.get(own_thread, name)
        for thread, name in tally.threads.items()
        if (own_thread := own(thread)) is not None
    }
    return tally.with_paths(thread_of=own, threads=names, moved_ns=-process.moved_ns)


def _select_facts(facts: Trace, number: int) -> Trace:
    """Return the facts of a process, with gauges of its devices. The first process with a device gets its gauges."""
    process = facts.processes[number]
    before = {device for other_process in facts.processes[:number] for device in other_process.devices}
    devices, moved_ns = process.devices, process.moved_ns

    def is_first(sample: Sample) -> bool:
        return (number == 0) if sample.device not in devices else sample.device not in before

    return replace(
        process.facts,
        samples=[
            *process.facts.samples,
            *(
                replace(sample, device=devices.get(sample.device, sample.device), at_ns=sample.at_ns - moved_ns)
                for sample in facts.samples
                if (sample.device != HOST or number == 0) and is_first(sample)
            ),
        ],
        gpus=[replace(gpu, device=devices[gpu.device]) for gpu in facts.gpus if gpu.device in devices],
        **(
            move_watched(
                facts,
                lambda numbers: _restore_numbers(numbers, process.devices),
                lambda numbers: _restore_numbers(numbers, process.threads),
                -moved_ns,
            )
            if process.is_watched
            else {}
        ),
    )
