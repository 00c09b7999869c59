"""Merges the metadata of several saved recordings, such as tallies, losses, notes, costs and gauges.

The threads, streams and devices of merged processes get distinct numbers, and equal sites become one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording import board
from instrument.recording.spans import (
    HOST,
    Cost,
    FirstCall,
    Interval,
    Sample,
    Site,
    Startup,
    describe_uncalled_targets,
    is_request,
)
from instrument.recording.tally import Tally
from instrument.trace.call_tree import tally_spans
from instrument.trace.columns import Columns, Int64s
from instrument.trace.file import Saved
from instrument.trace.indices import rank_distinct
from instrument.trace.layout import shift_torch_data
from instrument.trace.metadata import LIMIT_LINKS
from instrument.trace.trace import MergedProcess, Trace


class DistinctNumbers:
    """Renumbers threads, streams or devices, so that no two processes share a number. Unique numbers stay the same."""

    def __init__(self) -> None:
        self._given: dict[tuple[Hashable, int], int] = {}
        self._taken: set[int] = set()
        self._next = 0

    def assign_number(self, own_number: int, owner: Hashable) -> int:
        number = self._given.get((owner, own_number))
        if number is None:
            number = self._next if own_number in self._taken else own_number
            self._given[owner, own_number] = number
            self._taken.add(number)
            self._next = max(self._next, number + 1)
        return number

    def assign_numbers(self, numbers: NDArray[Any], owner: Hashable) -> Int64s:
        return _map_distinct_numbers(numbers, lambda number: self.assign_number(number, owner))

    def map_to_own_numbers(self, owner: Hashable) -> dict[int, int]:
        return {number: own_number for (of, own_number), number in self._given.items() if of == owner}


def _map_distinct_numbers(numbers: NDArray[Any], become: Callable[[int], int]) -> Int64s:
    """Apply a function to each number. It is called once per distinct number."""
    distinct, places = rank_distinct(numbers)
    return np.array(list(map(become, distinct.tolist())), dtype=np.int64)[places]


def restore_numbers(numbers: NDArray[Any], own_numbers: Mapping[int, int]) -> Int64s:
    """Convert merged numbers to the numbers of one process. An unknown number is returned unchanged."""
    return _map_distinct_numbers(numbers, lambda number: own_numbers.get(number, number))


_FLAGS = [item.name for item in fields(Site) if item.type == "bool"]


class MergedFile:
    """One of the files of a merge, and the rows of its spans in the merged trace."""

    def __init__(self, saved: Saved, process: int, first: int, moved_ns: int) -> None:
        self.saved, self.process, self.first, self.moved_ns = saved, process, first, moved_ns
        self.trace = saved.trace.columns
        self.row = np.zeros(0, dtype=np.int64)
        """The row in the merged trace of each row of this file. Another file may have provided the same span."""
        self.is_kept = np.ones(len(self.trace), dtype=np.bool_)

    @property
    def slice_of_all_rows(self) -> slice:
        return slice(self.first, self.first + len(self.trace))


class Numbers:
    """The merged sites, and the merged numbers of threads, streams and devices of all files.

    Sites with the same `Site.key` become one site in `sites`. Only their common attributes are kept.
    """

    def __init__(self, parts: Sequence[MergedFile]) -> None:
        self.threads, self.streams, self._devices = DistinctNumbers(), DistinctNumbers(), DistinctNumbers()
        self.own_devices: dict[int, dict[int, int]] = {}
        variants: dict[tuple[object, ...], list[Site]] = {}
        for part in parts:
            tally, startup = part.saved.tally, part.saved.trace.startup
            calls = () if startup is None else (*startup.firsts, *filter(None, [startup.request]))
            for site in (*part.trace.sites, *(() if tally is None else tally.sites()), *(call.site for call in calls)):
                same_key = variants.setdefault(site.key, [])
                if not any(site is variant or site.attributes == variant.attributes for variant in same_key):
                    same_key.append(site)
        self._places = {key: place for place, key in enumerate(variants)}
        joined = []
        for first, *more in variants.values():
            shared = [pair for pair in first.attributes if all(pair in site.attributes for site in more)]
            flags: dict[str, Any] = {name: any(getattr(site, name) for site in (first, *more)) for name in _FLAGS}
            joined.append(replace(first, attributes=tuple(shared), **flags))
        self.sites: tuple[Site, ...] = tuple(joined)

    def find_merged_site(self, site: Site) -> Site:
        return self.sites[self._places[site.key]]

    def find_site_indices(self, sites: Sequence[Site]) -> Int64s:
        return np.array([self._places[site.key] for site in sites], dtype=np.int64)

    def merged_threads(self, numbers: NDArray[Any], part: MergedFile) -> Int64s:
        """Return the merged numbers of threads. The number 0 means no thread and remains 0."""
        return _map_distinct_numbers(
            numbers, lambda number: number and self.threads.assign_number(number, part.process)
        )

    def merged_devices(self, numbers: NDArray[Any], part: MergedFile) -> Int64s:
        return _map_distinct_numbers(numbers, lambda number: self.merged_device(number, part))

    def merged_device(self, number: int, part: MergedFile) -> int:
        """Return the merged number of a device. A GPU with a known UUID has one number in all processes."""
        if number == HOST:
            return number
        uuid = next((gpu.uuid for gpu in part.saved.trace.gpus if gpu.device == number), "")
        joined = self._devices.assign_number(number, uuid or part.process)
        self.own_devices.setdefault(part.process, {})[joined] = number
        return joined


MOST_DEATHS = 3
"""The maximum number of abnormal process ends that the merged text describes one by one."""

NOTED_BY = 2
"""The maximum number of processes that a merged note names at its beginning."""

OF_ALL = ("system_cpu",)
"""The gauges that measure the whole host. A merge keeps one sample per gauge and time."""


def make_process_label(saved: Saved) -> str:
    origin = saved.trace.origin
    return f"{origin.service or 'process'} {origin.pid or ''}".rstrip()


def group_by_process(parts: Sequence[MergedFile]) -> list[list[MergedFile]]:
    return [list(files) for _, files in groupby(parts, attrgetter("process"))]


def _choose_files(parts: Sequence[MergedFile]) -> list[MergedFile]:
    """Return files that together count every call of a process once. Return [] if two files partly overlap in time."""
    counting: list[MergedFile] = []
    for part in sorted(parts, key=lambda part: (part.saved.trace.start_ns, -part.saved.trace.end_ns)):
        if not counting or part.saved.trace.end_ns > counting[-1].saved.trace.end_ns:
            counting.append(part)
    edges = [(part.saved.trace.start_ns, part.saved.trace.end_ns) for part in counting]
    is_apart = all(end_ns <= start_ns for (_, end_ns), (start_ns, _) in pairwise(edges))
    return counting if is_apart else []


def merge_tally(parts: Sequence[MergedFile], numbers: Numbers, columns: Columns, threads: Mapping[int, str]) -> Tally:
    """Return the totals of all calls. The calls of a process without usable totals are counted from its spans."""
    counted, names = list[Tally](), dict(threads)
    for files in group_by_process(parts):
        for part in files:
            if part.saved.tally is not None and 0 in part.saved.tally.threads:
                names.setdefault(0, part.saved.tally.threads[0])
        counting = _choose_files(files)
        if not counting or any(part.saved.tally is None for part in counting):
            rows = np.sort(np.concatenate([part.row[part.is_kept] for part in files]))
            counted.append(tally_spans(columns.take_rows(rows), threads, limit_links=LIMIT_LINKS))
            continue
        counted += (
            part.saved.read_or_count_totals().change_paths(
                lambda path: tuple(map(numbers.find_merged_site, path)),
                partial(numbers.threads.assign_number, owner=part.process),
                {},
                part.moved_ns,
            )
            for part in counting
        )
    return Tally.sum_tallies(counted, names)


def merge_facts(parts: Sequence[MergedFile], numbers: Numbers) -> Trace:
    """Return the merged metadata of all files, without spans. If the files have several processes, gauges of single
    processes are left out."""
    processes = group_by_process(parts)
    newest = [max(files, key=lambda part: part.saved.trace.end_ns) for files in processes]
    watched = list(filter(None, map(_find_file_with_torch_data, processes)))
    profiled: dict[str, Any] = {}
    if len(watched) == 1:
        part = watched[0]
        devices, threads = partial(numbers.merged_devices, part=part), partial(numbers.merged_threads, part=part)
        profiled = shift_torch_data(part.saved.trace, devices, threads, part.moved_ns)
    losses = Counter[str]()
    for part in newest:
        losses.update(part.saved.trace.losses)
    services = dict.fromkeys(part.saved.trace.origin.service for part in parts)
    edges_ns = [part.saved.trace.held_from_ns + part.moved_ns for part in parts if part.saved.trace.held_from_ns]
    notes = _merge_notes(processes)
    if len(watched) > 1 or (len(processes) > 1 and any(map(_select_samples, processes))):
        notes.append("gauges of single processes, and what torch.profiler saw in several, are shown with --by process")
    start_ns = min(part.saved.trace.start_ns + part.moved_ns for part in parts)
    end_ns = max(part.saved.trace.end_ns + part.moved_ns for part in parts)
    gpus = {numbers.merged_device(gpu.device, part): gpu for part in parts for gpu in part.saved.trace.gpus}
    return Trace(
        origin=replace(parts[0].saved.trace.origin, service=", ".join(services)),
        start_ns=start_ns,
        end_ns=end_ns,
        spans=[],
        threads=_merge_threads(parts, numbers),
        losses=dict(losses),
        notes=notes,
        window=parts[0].saved.trace.window,
        cost=_merge_cost(processes, end_ns - start_ns),
        held_from_ns=max(edges_ns, default=0),
        samples=_merge_samples(parts, numbers, is_one_process=len(processes) == 1),
        gpus=[replace(gpu, device=device) for device, gpu in gpus.items()],
        startup=_merge_startup(newest[0], numbers) if len(processes) == 1 else None,
        died=_describe_deaths([part.saved.trace for part in newest]),
        **profiled,
    )


def _find_file_with_torch_data(parts: Sequence[MergedFile]) -> MergedFile | None:
    windows = [(part, part.saved.trace.watched or (0, -1)) for part in parts]
    profiled = [(part, window) for part, window in windows if window != (0, -1) or part.saved.trace.flops]
    part, _ = max(profiled, key=lambda pair: pair[1][1] - pair[1][0], default=(None, None))
    return part


def merge_processes(
    parts: Sequence[MergedFile], numbers: Numbers, absent: Mapping[tuple[int, int], int]
) -> Sequence[MergedProcess]:
    merged = []
    processes = group_by_process(parts)
    watched = [part.process for part in filter(None, map(_find_file_with_torch_data, processes))]
    for files in processes:
        newest = max((part.saved.trace for part in files), key=attrgetter("end_ns"))
        windows = list[Interval]()
        for start_ns, end_ns in sorted((part.saved.trace.start_ns, part.saved.trace.end_ns) for part in files):
            if windows and start_ns < windows[-1][1]:
                windows[-1] = windows[-1][0], max(windows[-1][1], end_ns)
            else:
                windows.append((start_ns, end_ns))
        process = files[0].process
        merged.append(
            MergedProcess(
                replace(
                    newest, spans=[], samples=_select_samples(files) if len(processes) > 1 else (), gpus=(), kernels=(),
                    allocations=(), watched=None, flops=(), startup=None, start_ns=windows[0][0], processes=(),
                    threads={thread: name for part in files for thread, name in part.saved.trace.threads.items()},
                ),
                windows,
                threads=numbers.threads.map_to_own_numbers(process),
                devices=numbers.own_devices.get(process, {}),
                streams=numbers.streams.map_to_own_numbers(process),
                absent={new_id: own_id for (owner, own_id), new_id in absent.items() if owner == process},
                moved_ns=files[0].moved_ns,
                is_watched=watched == [process],
            )
        )  # fmt: skip
    return tuple(merged)


def _describe_deaths(newest: Sequence[Trace]) -> str:
    deaths = [facts.died for facts in sorted(newest, key=attrgetter("end_ns")) if facts.died]
    if (unnamed_count := len(deaths) - MOST_DEATHS) > 0:
        words = f"{unnamed_count if unnamed_count > 1 else 'One'} more ended without a goodbye."
        deaths = [*deaths[: MOST_DEATHS - 1], words, deaths[-1]]
    return " ".join(deaths)


def _merge_threads(parts: Sequence[MergedFile], numbers: Numbers) -> dict[int, str]:
    names: dict[int, str] = {}
    for files in group_by_process(parts):
        origin = files[0].saved.trace.origin
        is_of_several = not origin.pid and origin.recorder != "other"  # its thread names have the prefix already
        has_others = parts[0].process != parts[-1].process
        prefix = f"{make_process_label(files[0].saved)} " if has_others and not is_of_several else ""
        for part in files:
            labels = part.saved.trace.threads
            for thread in dict.fromkeys([*labels, *np.unique(part.trace.thread_id).tolist()]):
                name = labels.get(thread) or f"thread {thread}"
                names.setdefault(numbers.threads.assign_number(thread, part.process), prefix + name)
    return names


def _merge_notes(processes: Sequence[Sequence[MergedFile]]) -> list[str]:
    """Return all notes without duplicates. Process names precede a note unless all processes have the note."""
    parts = [part for files in processes for part in files]
    at_work = {mark for part in parts for mark in part.saved.trace.own_notes.at_work}
    sites = {part.trace.sites[place] for part in parts for place in np.unique(part.trace.site).tolist()}
    for tally in (part.saved.tally for part in parts):
        sites.update(row.path[-1] for row in (tally.iterate_totals() if tally is not None else ()) if row.totals.calls)
    called_sites = {f"{site.module}:{site.qualname}" for site in sites}
    if any(map(is_request, sites)):  # also of a process that ended without notes of its own
        at_work.add(board.called_mark("requests"))
    users: dict[str, list[str]] = {}
    uncalled: dict[str, None] = {}
    for files in processes:
        refuted = set[str]()
        for own_notes in (part.saved.trace.own_notes for part in files):
            refuted |= {note for mark, note in own_notes.waiting if mark in at_work}
            if own_notes.uncalled:
                refuted.add(describe_uncalled_targets(own_notes.uncalled))
                uncalled |= dict.fromkeys(target for target in own_notes.uncalled if target not in called_sites)
        for note in dict.fromkeys(note for part in files for note in part.saved.trace.notes if note not in refuted):
            users.setdefault(note, []).append(make_process_label(files[0].saved))
    notes = []
    for note, names in users.items():
        more = f" and {len(names) - NOTED_BY} more" if len(names) > NOTED_BY else ""
        prefix = f"{', '.join(names[:NOTED_BY])}{more}: " if len(names) < len(processes) else ""
        notes.append(prefix + note)
    return [*notes, *([describe_uncalled_targets([*uncalled])] if uncalled else [])]


def _merge_cost(processes: Sequence[Sequence[MergedFile]], window_ns: int) -> Cost | None:
    costs, uncosted_calls = list[Cost](), 0
    for files in processes:
        for part in _choose_files(files) or [max(files, key=lambda part: len(part.trace))]:
            if part.saved.trace.cost is not None:
                costs.append(part.saved.trace.cost)
            elif part.saved.trace.origin.recorder != "other" and part.saved.tally is not None:
                uncosted_calls += part.saved.tally.calls  # the process ended without notice
    if not costs:
        return None
    known_calls = sum(cost.calls for cost in costs)
    return Cost(
        calls=known_calls + uncosted_calls,
        per_call_ns=sum(cost.calls * cost.per_call_ns for cost in costs) / max(known_calls, 1),
        window_ns=window_ns,
        thread_ns=sum(cost.thread_ns for cost in costs),
        cold_call_ns=sum(cost.calls * cost.cold_call_ns for cost in costs) / max(known_calls, 1),
    )


def _is_process_gauge(sample: Sample) -> bool:
    return sample.device == HOST and sample.name not in OF_ALL


def _select_samples(files: Sequence[MergedFile]) -> tuple[Sample, ...]:
    return _sort_by_time(sample for part in files for sample in part.saved.trace.samples if _is_process_gauge(sample))


def _merge_samples(parts: Sequence[MergedFile], numbers: Numbers, *, is_one_process: bool) -> tuple[Sample, ...]:
    return _sort_by_time(
        replace(sample, device=numbers.merged_device(sample.device, part), at_ns=sample.at_ns + part.moved_ns)
        for part in parts
        for sample in part.saved.trace.samples
        if is_one_process or not _is_process_gauge(sample)
    )


def _sort_by_time(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    first_by_key = dict[tuple[int, int, str], Sample]()
    for sample in samples:
        first_by_key.setdefault((sample.at_ns, sample.device, sample.name), sample)
    return tuple(first_by_key[key] for key in sorted(first_by_key))


def _merge_startup(part: MergedFile, numbers: Numbers) -> Startup | None:
    startup = part.saved.trace.startup

    def replace_site(call: FirstCall) -> FirstCall:
        return replace(call, site=numbers.find_merged_site(call.site))

    return startup and replace(
        startup,
        firsts=tuple(map(replace_site, startup.firsts)),
        request=startup.request and replace_site(startup.request),
    )
