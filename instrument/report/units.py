"""Units, of which phases are: the steps of each line, else the requests, else the window; and what ran beside them.

A line is what one thread, or one task on it, runs. Of requests each is a line of its own, of the window all is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from instrument.recording.spans import AttributeValue, Interval, Site
from instrument.report.table import name_of_site
from instrument.report.view import Recording
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.forest import NONE, nearest_above, rows_of
from instrument.trace.groups import distinct, numbered, ranked
from instrument.trace.intervals import Unions, successive, union_by_group
from instrument.trace.self_times import innermost

LOADER = "loader"
OPTIMIZER = "optimizer"

PROFILERS = "instrument.Profiler.step"
"""The function of the steps that a `Profiler` makes."""


def phase_of(site: Site) -> str | None:
    """The phase that spans of a site are, None where they are none: also one that is declared to be none of a step."""
    if site.kind == LOADER:
        return LOADER
    declared = dict(site.attributes).get("phase")
    if declared is False:
        return None
    if isinstance(declared, str) and declared:
        return declared
    return site.name if site.kind == "phase" else None


def number_told(told: AttributeValue | None) -> int | None:
    """The number that a step bears by its attribute `step`."""
    return told if isinstance(told, int) and not isinstance(told, bool) else None


def waits_of(lines: Int64s, starts: Int64s, ends: Int64s) -> Unions:
    """The waits for loaders of each line. One without length says when a step began, too, and stays one."""
    found = union_by_group(lines, 2 * starts, 2 * ends + 1)
    return Unions(found.groups, found.starts // 2, found.ends // 2)


def begins_of(steps: Unions, is_profilers: Bools, waits: Unions) -> Int64s:
    """Return the begin of each step of a line: that of the wait for its input, if there is one.

    That is the last of `waits` since a step before it ended or one around it began. Where a `Profiler` says that a step
    has ended the next one begins, and what it waits for is in it. Steps are in the order of their line and begin, and
    may lie in one another.
    """
    lines, starts, ends = steps
    filled = np.flatnonzero(starts < ends)
    filled = filled[np.lexsort((ends[filled], lines[filled]))]
    ended = Unions(lines[filled], ends[filled], ends[filled])
    last = ended.begun(lines, starts)
    since = np.where(last != NONE, np.append(ended.starts, 0)[last], 0)
    since[1:] = np.maximum(since[1:], np.where(lines[1:] == lines[:-1], starts[:-1], 0))
    place = waits.begun(lines, starts)
    place -= (place != NONE) & (np.append(waits.ends, 0)[place] > starts)
    is_told = (np.append(waits.groups, NONE)[place] == lines) & ~is_profilers
    began = np.append(waits.starts, NONE)[place]
    return np.where(is_told & (began >= np.maximum(since, 0)), began, starts)


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a trace: steps, requests or the window, by line and the order of time, clipped to what is held.

    `of` says which they are, `is_whole` which reach over no edge. `line_of` is the line beside which each row of the
    trace ran, `NONE` for none, and `is_aside` which rows ran on another one that worked for it. `steps` are those of
    all lines, the skipped ones too, None where there are none. `skipped` is how many first steps were left out,
    `before` how many came before the first that is left, by the number that it bears.
    """

    of: str
    its: Unions
    is_whole: Bools
    line_of: Int64s
    is_aside: Bools
    steps: Unions | None = None
    skipped: int = 0
    before: int = 0


def units_of(trace: Columns, held: Interval, skip_first: int) -> Units:
    """The units of a trace, as far as they lie in the part of the window of which every span is held."""
    reaches_into = (trace.start_ns < held[1]) & (trace.end_ns > held[0])
    kinds = [site.kind if phase_of(site) is None else "" for site in trace.sites]
    steps = np.flatnonzero(trace.of_sites([kind == "step" for kind in kinds]) & reaches_into)
    if len(steps):
        return _steps(trace, steps, held, skip_first)
    is_request = trace.of_sites([kind == "request" for kind in kinds]) & (trace.root_id == trace.span_id)
    requests = np.flatnonzero(is_request & reaches_into)
    is_aside = np.zeros(len(trace), dtype=np.bool_)
    if not len(requests):
        window = Unions(np.array([0]), np.array([held[0]]), np.array([held[1]]))
        return Units("window", window, np.array([True]), np.zeros(len(trace), dtype=np.int64), is_aside)
    lines = np.arange(len(requests))
    line_of = np.full(len(trace) + 1, NONE, dtype=np.int64)
    line_of[requests] = lines
    its, is_whole = _clipped(trace, requests, lines, trace.start_ns[requests], held)
    return Units("request", its, is_whole, line_of[rows_of(trace.span_id, trace.root_id)], is_aside)


def _clipped(trace: Columns, rows: Int64s, lines: Int64s, begins: Int64s, held: Interval) -> tuple[Unions, Bools]:
    """Steps or requests from their begins on, as far as they lie in what is held, and which lie in it as a whole."""
    first, last = held
    ends = trace.end_ns[rows]
    is_whole = ~trace.clipped[rows] & (first <= begins) & (ends <= last)
    return Unions(lines, np.maximum(begins, first), np.minimum(ends, last)), is_whole


def _steps(trace: Columns, found: Int64s, held: Interval, skip_first: int) -> Units:
    """The steps that begin in no other one of their line, nor in one that a task of its own is in."""
    thread = ranked(trace.thread_id)[1]
    line, some = numbered(thread, trace.task_id)
    rows = found[successive(line[found], trace.start_ns[found], trace.end_ns[found])]
    of_thread = np.full(int(thread.max()) + 1, NONE, dtype=np.int64)
    of_no_task = some[trace.task_id[some] == 0]
    of_thread[thread[of_no_task]] = line[of_no_task]
    if len(distinct(thread[rows])) < len(distinct(line[rows])):  # tasks, which may have steps at the same time
        rows = _topmost(trace, rows, line, of_thread[thread])
    its = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    loaders = np.flatnonzero(trace.of_kind(LOADER))
    waits = waits_of(line[loaders], trace.start_ns[loaders], trace.end_ns[loaders])
    is_profilers = trace.of_sites([site.function == PROFILERS for site in trace.sites])[rows]
    begins = begins_of(its, is_profilers, waits)
    numbers = [number_told(one) for one in trace.attributes.values("step", rows)]
    skipped = np.zeros(len(rows), dtype=np.bool_)
    if skip_first:
        first_of = np.full(len(some), len(trace))
        np.minimum.at(first_of, line[found], found)
        skipped = _first_of_threads(thread[rows], trace.start_ns[rows], first_of[its.groups], numbers, skip_first)
    kept = np.flatnonzero(~skipped)
    units, is_whole = _clipped(trace, rows[kept], its.groups[kept], begins[kept], held)
    has_steps = np.zeros(len(some) + 1, dtype=np.bool_)
    has_steps[its.groups] = True
    line_of = np.where(has_steps[line], line, NONE)
    is_aside = ~has_steps[line]
    line_of = np.where(is_aside & has_steps[of_thread[thread]], of_thread[thread], line_of)
    # A task that has no steps of its own works for those of its thread, or for the one that it was begun in.
    lost = np.flatnonzero(line_of == NONE)
    if len(lost):
        line_of[lost] = np.append(line, NONE)[nearest_above(trace.parent, _among(trace, rows))[lost]]
    return Units(
        of="step",
        its=units,
        is_whole=is_whole,
        line_of=line_of,
        is_aside=is_aside,
        steps=Unions(its.groups, begins, its.ends),
        skipped=int(skipped.sum()),
        before=min((numbers[place] or 0 for place in kept.tolist()), default=0),
    )


def _among(trace: Columns, rows: Int64s) -> Bools:
    found = np.zeros(len(trace), dtype=np.bool_)
    found[rows] = True
    return found


def _topmost(trace: Columns, rows: Int64s, line: Int64s, line_without_task: Int64s) -> Int64s:
    """Return the steps in none of another line, as tasks' steps are where a `Profiler` counts those of the thread."""
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    of_tasks = np.flatnonzero((trace.task_id[rows] != 0) & (line_without_task[rows] != NONE))
    is_below = nearest_above(trace.parent, _among(trace, rows))[rows] != NONE
    around = steps.at(line_without_task[rows[of_tasks]], steps.starts[of_tasks])
    is_below[of_tasks] |= ~np.append(is_below, True)[around]  # a step below a task's own does not hold it
    return np.asarray(rows[~is_below])


def _first_of_threads(
    thread: Int64s, starts: Int64s, seen: Int64s, numbers: Sequence[int | None], count: int
) -> Bools:  # fmt: skip
    """Return the steps before the one of this number on their thread, by the number that a step bears, else by their
    begin."""
    order = np.lexsort((seen, starts, thread))
    its = thread[order]
    firsts = np.flatnonzero(np.diff(its, prepend=NONE))
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order)) - np.repeat(firsts, np.diff(firsts, append=len(order)))
    told = zip(numbers, places.tolist(), strict=True)
    return np.array([(place if number is None else number) < count for number, place in told], dtype=np.bool_)


# Places of times


UNKNOWN = "(not known)"
"""The place of what cannot be told from the file: no call of the host is known."""

NOWHERE = "(no span was open)"
"""The place of what happened on a thread without an open span."""

SHARED = "(several tasks were open)"
"""The place of what happened while several tasks had spans open on the thread."""

NOT_TOLD = 0
"""The number of `UNKNOWN` among places, which those of the others follow."""


class NumberedPlaces(NamedTuple):
    """The places of many events: `number` is a place in `names`, each the name of a site and its kind."""

    number: Int64s
    names: tuple[tuple[str, str], ...]


def rows_open(recording: Recording, thread_ids: Int64s, times_ns: Int64s, wanted: Bools | None = None) -> Int64s:
    """The row of the innermost of the wanted spans, as `innermost` finds it. Of another profiler's trace the calls that
    ask a device for work are no places."""
    trace = recording.columns
    wanted = np.ones(len(trace), dtype=np.bool_) if wanted is None else wanted.copy()
    if recording.trace.origin.recorder == "other":
        wanted[trace.attributes.having("correlation")] = False
    return innermost(trace, wanted, thread_ids, times_ns)


def places(recording: Recording, thread_ids: Int64s, times_ns: Int64s, wanted: Bools | None = None) -> NumberedPlaces:
    """The places of what happened on threads at times, in any order."""
    trace = recording.columns
    names = {(UNKNOWN, ""): NOT_TOLD, (NOWHERE, ""): 1, (SHARED, ""): 2}
    of_site = [names.setdefault((name_of_site(site), site.kind), len(names)) for site in trace.sites]
    rows = rows_open(recording, thread_ids, times_ns, wanted)
    told = np.array([*of_site, NONE])[trace.site[rows]] if len(trace) else rows
    number = np.where(rows < 0, -rows, told)
    number[times_ns < recording.trace.held[0]] = NOT_TOLD
    return NumberedPlaces(number, tuple(names))
