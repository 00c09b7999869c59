"""The `benchmark` view: what the steps of a loop cost, how long they waited for input, and how many a second.

A step is a span of kind `step`, with the wait of its loop for its input right before it, or what is between two calls
of `Profiler.step`. Its batch cost is its host time; the reader cost is the part of it in which a loader of its thread
(and of its task, where it has one) was asked for the next item. Averages divide by the steps that were timed: those
from the index `skip` on, counted from 0. A rate is over the time on the clock: of steps side by side, their union.

`paddle.profiler` divides by one step less than it times, so that twelve steps of 10 ms read as 15 ms, prints a least of
`inf` where each step is longer than the one before, and counts samples by hand only. Here 10 ms is 10 ms.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np

from instrument.recording.spans import Interval
from instrument.report.loops import Loops, counted
from instrument.report.section import Coverage
from instrument.report.step_counts import Benchmark, LoopTimes
from instrument.report.units import LOADER, PROFILERS, begins_of, step_number, waits_of
from instrument.report.view import Options, Recording
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.groups import numbered, ranked
from instrument.trace.intervals import Unions, union


def benchmark(recording: Recording, options: Options) -> Loops:
    """The view: of all steps of a `Profiler` that runs, else from the spans that are held.

    `skip_first` leaves out the first steps of each loop, by the number that a step bears or else by their begin; where
    they were counted as they went by, whoever has them counted leaves them out.
    """
    if recording.benchmark is not None:
        return counted(recording.benchmark, options)
    loops = _loops(recording.columns, recording.trace.held, options.skip_first)
    return Loops(Coverage.of_recording(recording), loops, options)


class _Steps(NamedTuple):
    """Steps by their rows: when each begins and ends, how long it waited for loaders, and whether it is cut."""

    row: Int64s
    start_ns: Int64s
    end_ns: Int64s
    reader_ns: Int64s
    is_cut: Bools

    def at(self, places: Int64s) -> _Steps:
        """Return the steps at some places."""
        return _Steps(
            self.row[places], self.start_ns[places], self.end_ns[places], self.reader_ns[places], self.is_cut[places]
        )


def _loops(trace: Columns, held: Interval, skip: int) -> tuple[LoopTimes, ...]:
    """The loops by the name of their steps, in the order in which these are first seen."""
    rows = np.flatnonzero(trace.of_kind("step"))
    if not len(rows):
        return ()
    steps = _steps(trace, rows, held)
    names, number_of = trace.numbered_sites(attrgetter("name"))
    number = number_of[trace.site[steps.row]]
    order = np.lexsort((trace.span_id[steps.row], trace.start_ns[steps.row], number))
    of_names = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
    its = {int(number[places[0]]): steps.at(places) for places in of_names}
    seen = dict.fromkeys(number_of[trace.site[rows]].tolist())
    return tuple(_loop(names[key], trace, its[key], skip) for key in seen)


def _steps(trace: Columns, rows: Int64s, held: Interval) -> _Steps:
    """These steps. One of a task waits for loaders of that task, another one for those of its thread."""
    thread = ranked(trace.thread_id)[1]
    line, some = numbered(thread, trace.task_id)
    line = np.where(trace.task_id == 0, len(some) + thread, line)
    loaders = np.flatnonzero(trace.of_kind(LOADER))
    of_tasks = loaders[trace.task_id[loaders] != 0]
    of_waits = np.concatenate([loaders, of_tasks])
    lines = np.concatenate([len(some) + thread[loaders], line[of_tasks]])
    waits = waits_of(lines, trace.start_ns[of_waits], trace.end_ns[of_waits])
    rows = rows[np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows], line[rows]))]
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    is_profilers = trace.of_sites([site.function == PROFILERS for site in trace.sites])
    begins = begins_of(steps, is_profilers[rows], waits)
    is_cut = trace.clipped[rows] | (begins < held[0]) | (steps.ends > held[1])
    return _Steps(rows, begins, steps.ends, waits.within(steps.groups, begins, steps.ends), is_cut)


def _loop(name: str, trace: Columns, steps: _Steps, skip: int) -> LoopTimes:
    """The loop of steps in their order."""
    found, timed = Benchmark(skip=0), list[int]()
    told = (trace.attributes.values(key, steps.row) for key in ("step", "samples"))
    columns = (one.tolist() for one in (steps.end_ns - steps.start_ns, steps.reader_ns, steps.is_cut))
    for place, (number, samples, batch_ns, reader_ns, is_cut) in enumerate(zip(*told, *columns, strict=True)):
        known = step_number(number)
        if (place if known is None else known) < skip:
            found.skipped += 1
        elif is_cut:
            found.cut += 1
        else:
            is_count = isinstance(samples, (int, float)) and not isinstance(samples, bool) and samples >= 0
            found.add(batch_ns, reader_ns, samples if is_count else None)
            timed.append(place)
    return found.loop(name, union(steps.start_ns[timed], steps.end_ns[timed]).length_ns())
