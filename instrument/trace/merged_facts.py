"""Merges the facts of several saved recordings, such as tallies, losses, notes, costs and gauges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from instrument.recording import board
from instrument.recording.spans import HOST, Cost, FirstCall, Interval, Sample, Startup, is_request, never_called
from instrument.recording.tally import Tally
from instrument.trace.apart import MergedFile, Numbers
from instrument.trace.call_tree import tally_of
from instrument.trace.columns import Columns
from instrument.trace.file import Saved
from instrument.trace.metadata import LIMIT_LINKS
from instrument.trace.trace import MergedProcess, Trace
from instrument.trace.watched import move_watched

MOST_DEATHS = 3
"""The maximum number of abnormal process ends that the merged text describes one by one."""

NOTED_BY = 2
"""The maximum number of processes that a merged note names at its beginning."""

OF_ALL = ("system_cpu",)
"""The gauges of the whole host. All of its processes record the same values, so these are merged into one gauge."""


def label_of(saved: Saved) -> str:
    """Return the name of a process: its service and its pid."""
    origin = saved.trace.origin
    return f"{origin.service or 'process'} {origin.pid or ''}".rstrip()


def _group_by_process(parts: Sequence[MergedFile]) -> Iterator[list[MergedFile]]:
    for _, files in groupby(parts, attrgetter("process")):
        yield list(files)


def _choose_files(parts: Sequence[MergedFile]) -> list[MergedFile]:
    """Return files of a process whose tallies together count every call once, [] if two files overlap in part."""
    counting: list[MergedFile] = []
    for part in sorted(parts, key=lambda part: (part.saved.trace.start_ns, -part.saved.trace.end_ns)):
        if not counting or part.saved.trace.end_ns > counting[-1].saved.trace.end_ns:
            counting.append(part)
    edges = [(part.saved.trace.start_ns, part.saved.trace.end_ns) for part in counting]
    is_apart = all(end_ns <= start_ns for (_, end_ns), (start_ns, _) in pairwise(edges))
    return counting if is_apart else []


def merge_tally(parts: Sequence[MergedFile], numbers: Numbers, columns: Columns, threads: Mapping[int, str]) -> Tally:
    """Return the tally of all calls. A process without usable saved tallies is counted from its spans."""
    counted, names = list[Tally](), dict(threads)
    for files in _group_by_process(parts):
        for part in files:
            if part.saved.tally is not None and 0 in part.saved.tally.threads:
                names.setdefault(0, part.saved.tally.threads[0])
        counting = _choose_files(files)
        if not counting or any(part.saved.tally is None for part in counting):
            is_of_process = np.zeros(len(columns), dtype=np.bool_)
            for part in files:
                is_of_process[part.row[part.is_kept]] = True
            counted.append(tally_of(columns.only(is_of_process), threads, limit_links=LIMIT_LINKS))
            continue
        counted += (
            part.saved.counted().with_paths(
                lambda path: tuple(map(numbers.site, path)), partial(numbers.thread, part=part), {}, part.moved_ns
            )
            for part in counting
        )
    return Tally.together(counted, names)


def merged_facts(parts: Sequence[MergedFile], numbers: Numbers) -> Trace:
    """Return a trace without spans that has the facts of all files. Gauges of single processes and torch.profiler's
    data of several processes are not merged. A note reports that."""
    processes = list(_group_by_process(parts))
    newest = [max(files, key=lambda part: part.saved.trace.end_ns) for files in processes]
    watched = list(filter(None, map(_find_watched, processes)))
    profiled: dict[str, Any] = {}
    if len(watched) == 1:
        part = watched[0]
        devices, threads = partial(numbers.devices, part=part), partial(numbers.threads, part=part)
        profiled = move_watched(part.saved.trace, devices, threads, part.moved_ns)
    losses: dict[str, int] = {}
    for part in newest:
        for reason, count in part.saved.trace.losses.items():
            losses[reason] = losses.get(reason, 0) + count
    services = dict.fromkeys(part.saved.trace.origin.service for part in parts)
    edges_ns = [part.saved.trace.held_from_ns + part.moved_ns for part in parts if part.saved.trace.held_from_ns]
    notes = _merge_notes(processes)
    if len(watched) > 1 or (len(processes) > 1 and any(map(_own_samples_of, processes))):
        notes.append("gauges of single processes, and what torch.profiler saw in several, are shown with --by process")
    start_ns = min(part.saved.trace.start_ns + part.moved_ns for part in parts)
    end_ns = max(part.saved.trace.end_ns + part.moved_ns for part in parts)
    gpus = {numbers.device(gpu.device, part): gpu for part in parts for gpu in part.saved.trace.gpus}
    return Trace(
        origin=replace(parts[0].saved.trace.origin, service=", ".join(services)),
        start_ns=start_ns,
        end_ns=end_ns,
        spans=[],
        threads=_merge_threads(parts, numbers),
        losses=losses,
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


def _find_watched(parts: Sequence[MergedFile]) -> MergedFile | None:
    """Return the file with the longest record of torch.profiler, None without any."""

    def length_ns(part: MergedFile) -> int:
        first_ns, last_ns = part.saved.trace.watched or (0, -1)
        return last_ns - first_ns

    profiled = [part for part in parts if part.saved.trace.watched is not None or part.saved.trace.flops]
    return max(profiled, key=length_ns, default=None)


def merged_processes(
    parts: Sequence[MergedFile], numbers: Numbers, absent: Mapping[tuple[int, int], int]
) -> Sequence[MergedProcess]:
    """Return the processes of a merged trace. `absent` has the merged ids of spans that no file has, by process and own
    id."""
    merged = []
    processes = list(_group_by_process(parts))
    watched = [part.process for part in filter(None, map(_find_watched, processes))]
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
                    newest, spans=[], samples=_own_samples_of(files) if len(processes) > 1 else (), gpus=(), kernels=(),
                    allocations=(), watched=None, flops=(), startup=None, start_ns=windows[0][0], processes=(),
                    threads={thread: name for part in files for thread, name in part.saved.trace.threads.items()},
                ),
                windows,
                **numbers.of_process(process),
                absent={new_id: own_id for (owner, own_id), new_id in absent.items() if owner == process},
                moved_ns=files[0].moved_ns,
                is_watched=watched == [process],
            )
        )  # fmt: skip
    return tuple(merged)


def _describe_deaths(newest: Sequence[Trace]) -> str:
    """Describe the abnormal ends of processes: the first ones, the number of others, and the newest."""
    deaths = [facts.died for facts in sorted(newest, key=attrgetter("end_ns")) if facts.died]
    unnamed_count = len(deaths) - MOST_DEATHS
    if unnamed_count <= 0:
        return " ".join(deaths)
    words = f"{unnamed_count} more ended without a goodbye" if unnamed_count > 1 else "One more ended without a goodbye"
    return " ".join([*deaths[: MOST_DEATHS - 1], f"{words}.", deaths[-1]])


def _make_thread_prefix(files: Sequence[MergedFile], parts: Sequence[MergedFile]) -> str:
    """Return the prefix of a process's thread names, "" if it is the only process."""
    origin = files[0].saved.trace.origin
    is_of_several = not origin.pid and origin.recorder != "other"  # its thread names have the prefix already
    return f"{label_of(files[0].saved)} " if parts[0].process != parts[-1].process and not is_of_several else ""


def _merge_threads(parts: Sequence[MergedFile], numbers: Numbers) -> dict[int, str]:
    names: dict[int, str] = {}
    for files in _group_by_process(parts):
        prefix = _make_thread_prefix(files, parts)
        for part in files:
            labels = part.saved.trace.threads
            for thread in dict.fromkeys([*labels, *np.unique(part.trace.thread_id).tolist()]):
                names.setdefault(numbers.thread(thread, part), prefix + (labels.get(thread) or f"thread {thread}"))
    return names


def _merge_notes(processes: Sequence[Sequence[MergedFile]]) -> list[str]:
    """Return all notes, each once. A note that not all processes have begins with names of processes. A note on a rule
    is left out if the rule matched, or its target was called, in another process."""
    parts = [part for files in processes for part in files]
    at_work = {mark for part in parts for mark in part.saved.trace.own_notes.at_work}
    sites = [site for part in parts for site in part.called_sites()]
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
                refuted.add(never_called(own_notes.uncalled))
                uncalled |= dict.fromkeys(target for target in own_notes.uncalled if target not in called_sites)
        for note in dict.fromkeys(note for part in files for note in part.saved.trace.notes if note not in refuted):
            users.setdefault(note, []).append(label_of(files[0].saved))
    notes = [note if len(names) == len(processes) else f"{_list_names(names)}: {note}" for note, names in users.items()]
    return [*notes, *([never_called([*uncalled])] if uncalled else [])]


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - NOTED_BY
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:NOTED_BY])} and {more} more"


def _merge_cost(processes: Sequence[Sequence[MergedFile]], window_ns: int) -> Cost | None:
    """Return the cost of all processes: costs per call are means weighted by calls. A process of unknown cost gets the
    mean."""
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


def _is_own(sample: Sample) -> bool:
    """Return True if a gauge belongs to a single process."""
    return sample.device == HOST and sample.name not in OF_ALL


def _own_samples_of(files: Sequence[MergedFile]) -> tuple[Sample, ...]:
    """Return the samples of gauges that belong to a single process, from the process's files."""
    return _sort_by_time(sample for part in files for sample in part.saved.trace.samples if _is_own(sample))


def _merge_samples(parts: Sequence[MergedFile], numbers: Numbers, *, is_one_process: bool) -> tuple[Sample, ...]:
    """Return the samples of all files. If several processes are merged, gauges of single processes are left out."""
    return _sort_by_time(
        replace(sample, device=numbers.device(sample.device, part), at_ns=sample.at_ns + part.moved_ns)
        for part in parts
        for sample in part.saved.trace.samples
        if is_one_process or not _is_own(sample)
    )


def _sort_by_time(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Return the samples sorted by time, each once."""
    first_by_key = dict[tuple[int, int, str], Sample]()
    for sample in samples:
        first_by_key.setdefault((sample.at_ns, sample.device, sample.name), sample)
    return tuple(first_by_key[key] for key in sorted(first_by_key))


def _merge_startup(part: MergedFile, numbers: Numbers) -> Startup | None:
    facts = part.saved.trace.startup
    if facts is None:
        return None

    def moved(call: FirstCall) -> FirstCall:
        return replace(call, site=numbers.site(call.site))

    return replace(
        facts, firsts=tuple(map(moved, facts.firsts)), request=None if facts.request is None else moved(facts.request)
    )
