"""The facts of several saved recordings as one: totals, losses, notes, costs, gauges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from instrument.recording.spans import HOST, Cost, FirstCall, Interval, Sample, Startup, never_called
from instrument.recording.tally import Tally
from instrument.trace.apart import ApartFile, Numbers
from instrument.trace.call_tree import tally_of
from instrument.trace.columns import Columns
from instrument.trace.file import Saved
from instrument.trace.metadata import LIMIT_LINKS
from instrument.trace.trace import MergedProcess, Trace
from instrument.trace.watched import moved_watched

DEATHS_TOLD = 3
"""Processes without a goodbye that are named one by one."""

NOTED_BY = 2
"""Processes of a note that are named."""

OF_ALL = ("system_cpu",)
"""Gauges of the host that are no process's own."""


def called(saved: Saved) -> str:
    """Return the name of a process among others."""
    origin = saved.trace.origin
    return f"{origin.service or 'process'} {origin.pid or ''}".rstrip()


def _processes(parts: Sequence[ApartFile]) -> Iterator[list[ApartFile]]:
    for _, its in groupby(parts, attrgetter("process")):
        yield list(its)


def _counting(parts: Sequence[ApartFile]) -> list[ApartFile]:
    """Return the files of a process whose totals count every call once; none where they overlap in part."""
    found: list[ApartFile] = []
    for part in sorted(parts, key=lambda part: (part.saved.trace.start_ns, -part.saved.trace.end_ns)):
        if not found or part.saved.trace.end_ns > found[-1].saved.trace.end_ns:
            found.append(part)
    edges = [(part.saved.trace.start_ns, part.saved.trace.end_ns) for part in found]
    is_apart = all(end_ns <= start_ns for (_, end_ns), (start_ns, _) in pairwise(edges))
    return found if is_apart else []


def merged_tally(parts: Sequence[ApartFile], numbers: Numbers, columns: Columns, threads: Mapping[int, str]) -> Tally:
    """Return the totals of all calls: those that were saved; where there are none, or they overlap, by the spans."""
    counted, names = list[Tally](), dict(threads)
    for its in _processes(parts):
        for part in its:
            if part.saved.tally is not None and 0 in part.saved.tally.threads:
                names.setdefault(0, part.saved.tally.threads[0])
        counting = _counting(its)
        if not counting or any(part.saved.tally is None for part in counting):
            mine = np.zeros(len(columns), dtype=np.bool_)
            for part in its:
                mine[part.row[part.is_kept]] = True
            counted.append(tally_of(columns.only(mine), threads, limit_links=LIMIT_LINKS))
            continue
        counted += (
            part.saved.counted().placed(
                lambda path: tuple(map(numbers.site, path)), partial(numbers.thread, part=part), {}, part.moved_ns
            )
            for part in counting
        )
    return Tally.together(counted, names)


def merged_facts(parts: Sequence[ApartFile], numbers: Numbers) -> Trace:
    """A trace without spans that knows what all of them know.

    Gauges of processes, and what torch.profiler saw in more than one, are left out; a note says so.
    """
    processes = list(_processes(parts))
    newest = [max(its, key=lambda part: part.saved.trace.end_ns) for its in processes]
    watched = list(filter(None, map(_watched, processes)))
    seen: dict[str, Any] = {}
    if len(watched) == 1:
        part = watched[0]
        devices, threads = partial(numbers.devices, part=part), partial(numbers.threads, part=part)
        seen = moved_watched(part.saved.trace, devices, threads, part.moved_ns)
    losses: dict[str, int] = {}
    for part in newest:
        for reason, count in part.saved.trace.losses.items():
            losses[reason] = losses.get(reason, 0) + count
    services = dict.fromkeys(part.saved.trace.origin.service for part in parts)
    held = [part.saved.trace.held_from_ns + part.moved_ns for part in parts if part.saved.trace.held_from_ns]
    samples, left_out = _samples(parts, numbers, is_one=len(processes) == 1)
    notes = _notes(processes)
    if left_out or len(watched) > 1:
        notes.append("gauges of single processes, and what torch.profiler saw in several, are shown with --by process")
    start_ns = min(part.saved.trace.start_ns + part.moved_ns for part in parts)
    end_ns = max(part.saved.trace.end_ns + part.moved_ns for part in parts)
    gpus = {numbers.device(gpu.device, part): gpu for part in parts for gpu in part.saved.trace.gpus}
    return Trace(
        origin=replace(parts[0].saved.trace.origin, service=", ".join(services)),
        start_ns=start_ns,
        end_ns=end_ns,
        spans=[],
        threads=_threads(parts, numbers),
        losses=losses,
        notes=notes,
        window=parts[0].saved.trace.window,
        cost=_cost(processes, end_ns - start_ns),
        held_from_ns=max(held, default=0),
        samples=samples,
        gpus=[replace(gpu, device=device) for device, gpu in gpus.items()],
        startup=_startup(newest[0], numbers) if len(processes) == 1 else None,
        died=_deaths([part.saved.trace for part in newest]),
        **seen,
    )


def _watched(parts: Sequence[ApartFile]) -> ApartFile | None:
    """The file of a process that has most of what torch.profiler saw, None where it saw nothing."""

    def length_ns(part: ApartFile) -> int:
        first_ns, last_ns = part.saved.trace.watched or (0, -1)
        return last_ns - first_ns

    some = [part for part in parts if part.saved.trace.watched is not None or part.saved.trace.flops]
    return max(some, key=length_ns, default=None)


def merged_processes(
    parts: Sequence[ApartFile], numbers: Numbers, absent: Mapping[tuple[int, int], int]
) -> Sequence[MergedProcess]:
    """Return each process as a merged trace knows it.

    `absent` has the new ids of spans that no file has, by process and own id.
    """
    found = []
    processes = list(_processes(parts))
    watched = [part.process for part in filter(None, map(_watched, processes))]
    for its in processes:
        newest = max((part.saved.trace for part in its), key=attrgetter("end_ns"))
        windows = list[Interval]()
        for start_ns, end_ns in sorted((part.saved.trace.start_ns, part.saved.trace.end_ns) for part in its):
            if windows and start_ns < windows[-1][1]:
                windows[-1] = windows[-1][0], max(windows[-1][1], end_ns)
            else:
                windows.append((start_ns, end_ns))
        process = its[0].process
        found.append(
            MergedProcess(
                replace(
                    newest, spans=[], samples=(), gpus=(), kernels=(), allocations=(), watched=None, flops=(),
                    startup=None, start_ns=windows[0][0], processes=(),
                    threads={own: name for part in its for own, name in part.saved.trace.threads.items()},
                ),
                windows,
                **numbers.of_process(process),
                absent={new: own for (whose, own), new in absent.items() if whose == process},
                moved_ns=its[0].moved_ns,
                is_watched=watched == [process],
            )
        )  # fmt: skip
    return tuple(found)


def _deaths(of_each: Sequence[Trace]) -> str:
    """Return the ends of processes without a goodbye: the first and the newest, and the number of others."""
    told = [facts.died for facts in sorted(of_each, key=attrgetter("end_ns")) if facts.died]
    more = len(told) - DEATHS_TOLD
    if more <= 0:
        return " ".join(told)
    words = f"{more} more ended without a goodbye" if more > 1 else "One more ended without a goodbye"
    return " ".join([*told[: DEATHS_TOLD - 1], f"{words}.", told[-1]])


def _before(its: Sequence[ApartFile], parts: Sequence[ApartFile]) -> str:
    """The name of a process as the names of its threads begin with it, "" where there is no other process."""
    origin = its[0].saved.trace.origin
    is_of_several = not origin.pid and origin.recorder != "other"  # whose threads are named by process already
    return f"{called(its[0].saved)} " if parts[0].process != parts[-1].process and not is_of_several else ""


def _threads(parts: Sequence[ApartFile], numbers: Numbers) -> dict[int, str]:
    names: dict[int, str] = {}
    for its in _processes(parts):
        before = _before(its, parts)
        for part in its:
            named = part.saved.trace.threads
            for own in dict.fromkeys([*named, *np.unique(part.trace.thread_id).tolist()]):
                names.setdefault(numbers.thread(own, part), before + (named.get(own) or f"thread {own}"))
    return names


def _notes(processes: Sequence[Sequence[ApartFile]]) -> list[str]:
    """Return all notes, each once. A note that not all processes have begins with the names of the first that do.

    A note is left out where another process has met its rule, or called its target.
    """
    parts = [part for its in processes for part in its]
    at_work = {mark for part in parts for mark in part.saved.trace.own_notes.at_work}
    called_sites = {f"{site.module}:{site.qualname}" for part in parts for site in part.called_sites()}
    said: dict[str, list[str]] = {}
    uncalled: dict[str, None] = {}
    for its in processes:
        void = set[str]()
        for own_notes in (part.saved.trace.own_notes for part in its):
            void |= {note for mark, note in own_notes.waiting if mark in at_work}
            if own_notes.uncalled:
                void.add(never_called(own_notes.uncalled))
                uncalled |= dict.fromkeys(target for target in own_notes.uncalled if target not in called_sites)
        for note in dict.fromkeys(note for part in its for note in part.saved.trace.notes if note not in void):
            said.setdefault(note, []).append(called(its[0].saved))
    notes = [note if len(who) == len(processes) else f"{_few(who)}: {note}" for note, who in said.items()]
    return [*notes, *([never_called([*uncalled])] if uncalled else [])]


def _few(names: Sequence[str]) -> str:
    more = len(names) - NOTED_BY
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:NOTED_BY])} and {more} more"


def _cost(processes: Sequence[Sequence[ApartFile]], window_ns: int) -> Cost | None:
    """Return the cost of all, of the time on the clock: the mean cost of a call, by their number. A
    call of a process without a known cost counts as one of the others."""
    costs, untold = list[Cost](), 0
    for its in processes:
        for part in _counting(its) or [max(its, key=lambda part: len(part.trace))]:
            if part.saved.trace.cost is not None:
                costs.append(part.saved.trace.cost)
            elif part.saved.trace.origin.recorder != "other" and part.saved.tally is not None:
                untold += part.saved.tally.calls  # of one that ended without a goodbye
    if not costs:
        return None
    known = sum(cost.calls for cost in costs)
    return Cost(
        calls=known + untold,
        per_call_ns=sum(cost.calls * cost.per_call_ns for cost in costs) / max(known, 1),
        window_ns=window_ns,
        thread_ns=sum(cost.thread_ns for cost in costs),
        cold_call_ns=sum(cost.calls * cost.cold_call_ns for cost in costs) / max(known, 1),
    )


def _samples(parts: Sequence[ApartFile], numbers: Numbers, *, is_one: bool) -> tuple[list[Sample], bool]:
    """Readings by time, each once, and whether some were left out."""
    found: dict[tuple[str, int, int], Sample] = {}
    left_out = False
    for part in parts:
        for sample in part.saved.trace.samples:
            if sample.device == HOST and not is_one and sample.name not in OF_ALL:
                left_out = True
                continue
            device = numbers.device(sample.device, part)
            moved = replace(sample, device=device, at_ns=sample.at_ns + part.moved_ns)
            found.setdefault((moved.name, moved.device, moved.at_ns), moved)
    return sorted(found.values(), key=lambda one: (one.at_ns, one.device, one.name)), left_out


def _startup(part: ApartFile, numbers: Numbers) -> Startup | None:
    found = part.saved.trace.startup
    if found is None:
        return None

    def moved(call: FirstCall) -> FirstCall:
        return replace(call, site=numbers.site(call.site))

    return replace(
        found, firsts=tuple(map(moved, found.firsts)), request=None if found.request is None else moved(found.request)
    )
