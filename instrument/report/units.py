"""The units of the `phases` view: the steps of each track, else the requests, else the window.

A track, here `line`, is one thread or one task on it. Each request counts as a track, and so does the window.
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
"""The function whose calls a `Profiler` records as steps."""


def phase_of(site: Site) -> str | None:
    """Return the phase of a site's spans. It is None if they are no phase, for example after `phase: false`."""
    if site.kind == LOADER:
        return LOADER
    declared = dict(site.attributes).get("phase")
    if declared is False:
        return None
    if isinstance(declared, str) and declared:
        return declared
    return site.name if site.kind == "phase" else None


def step_number(value: AttributeValue | None) -> int | None:
    """Return the value of the attribute `step` if it is an integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def waits_of(lines: Int64s, starts: Int64s, ends: Int64s) -> Unions:
    """Return the union of the waits for loaders on each track. Waits of length 0 are kept: they mark a step's begin."""
    unions = union_by_group(lines, 2 * starts, 2 * ends + 1)
    return Unions(unions.groups, unions.starts // 2, unions.ends // 2)


def begins_of(steps: Unions, is_profilers: Bools, waits: Unions) -> Int64s:
    """Return the begin of each step. It is the begin of the wait for its input, if there is one.

    That is the last wait since the end of an earlier step or the begin of an outer one. The step of a `Profiler` begins
    at the end of the one before, so its wait is within it. Steps are ordered by track and begin, and may be nested.
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
    has_wait = (np.append(waits.groups, NONE)[place] == lines) & ~is_profilers
    began = np.append(waits.starts, NONE)[place]
    return np.where(has_wait & (began >= np.maximum(since, 0)), began, starts)


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a trace by track and time, clipped to the interval without missing spans.

    `of` is their kind: step, request or window. `is_whole` is True for units that were not clipped. `line_of` has the
    track of each row of the trace, `NONE` without one. `is_aside` is True for rows on another track that worked for it.
    `steps` are all steps, including the skipped ones, None without any. `skipped` is the number of first steps that
    were left out. `before` is the number of the first remaining step.
    """

    of: str
    intervals: Unions
    is_whole: Bools
    line_of: Int64s
    is_aside: Bools
    steps: Unions | None = None
    skipped: int = 0
    before: int = 0


def units_of(trace: Columns, interval: Interval, skip_first: int) -> Units:
    """Return the units of a trace, clipped to the interval without missing spans."""
    reaches_into = (trace.start_ns < interval[1]) & (trace.end_ns > interval[0])
    kinds = [site.kind if phase_of(site) is None else "" for site in trace.sites]
    steps = np.flatnonzero(trace.of_sites([kind == "step" for kind in kinds]) & reaches_into)
    if len(steps):
        return _steps(trace, steps, interval, skip_first)
    is_request = trace.of_sites([kind == "request" for kind in kinds]) & (trace.root_id == trace.span_id)
    requests = np.flatnonzero(is_request & reaches_into)
    is_aside = np.zeros(len(trace), dtype=np.bool_)
    if not len(requests):
        window = Unions(np.array([0]), np.array([interval[0]]), np.array([interval[1]]))
        return Units("window", window, np.array([True]), np.zeros(len(trace), dtype=np.int64), is_aside)
    lines = np.arange(len(requests))
    line_of = np.full(len(trace) + 1, NONE, dtype=np.int64)
    line_of[requests] = lines
    clipped_units, is_whole = _clip(trace, requests, lines, trace.start_ns[requests], interval)
    return Units("request", clipped_units, is_whole, line_of[rows_of(trace.span_id, trace.root_id)], is_aside)


def _clip(trace: Columns, rows: Int64s, lines: Int64s, begins: Int64s, interval: Interval) -> tuple[Unions, Bools]:
    """Return steps or requests clipped to an interval, and True for each that was not clipped."""
    first, last = interval
    ends = trace.end_ns[rows]
    is_whole = ~trace.clipped[rows] & (first <= begins) & (ends <= last)
    return Unions(lines, np.maximum(begins, first), np.minimum(ends, last)), is_whole


def _steps(trace: Columns, step_rows: Int64s, interval: Interval, skip_first: int) -> Units:
    """Return the outermost steps: those in no other step of their track, nor in a step around their task."""
    thread = ranked(trace.thread_id)[1]
    line, firsts = numbered(thread, trace.task_id)
    rows = step_rows[successive(line[step_rows], trace.start_ns[step_rows], trace.end_ns[step_rows])]
    of_thread = np.full(int(thread.max()) + 1, NONE, dtype=np.int64)
    of_no_task = firsts[trace.task_id[firsts] == 0]
    of_thread[thread[of_no_task]] = line[of_no_task]
    if len(distinct(thread[rows])) < len(distinct(line[rows])):  # tasks, which may have steps at the same time
        rows = _topmost(trace, rows, line, of_thread[thread])
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    loaders = np.flatnonzero(trace.of_kind(LOADER))
    waits = waits_of(line[loaders], trace.start_ns[loaders], trace.end_ns[loaders])
    is_profilers = trace.of_sites([site.function == PROFILERS for site in trace.sites])[rows]
    begins = begins_of(steps, is_profilers, waits)
    numbers = [step_number(value) for value in trace.attributes.values("step", rows)]
    skipped = np.zeros(len(rows), dtype=np.bool_)
    if skip_first:
        first_of = np.full(len(firsts), len(trace))
        np.minimum.at(first_of, line[step_rows], step_rows)
        skipped = _mark_first_steps(thread[rows], trace.start_ns[rows], first_of[steps.groups], numbers, skip_first)
    remaining = np.flatnonzero(~skipped)
    units, is_whole = _clip(trace, rows[remaining], steps.groups[remaining], begins[remaining], interval)
    has_steps = np.zeros(len(firsts) + 1, dtype=np.bool_)
    has_steps[steps.groups] = True
    line_of = np.where(has_steps[line], line, NONE)
    is_aside = ~has_steps[line]
    line_of = np.where(is_aside & has_steps[of_thread[thread]], of_thread[thread], line_of)
    # A task without steps works for the steps of its thread, or for the step in which it began.
    lost = np.flatnonzero(line_of == NONE)
    if len(lost):
        line_of[lost] = np.append(line, NONE)[nearest_above(trace.parent, _row_mask(trace, rows))[lost]]
    return Units(
        of="step",
        intervals=units,
        is_whole=is_whole,
        line_of=line_of,
        is_aside=is_aside,
        steps=Unions(steps.groups, begins, steps.ends),
        skipped=int(skipped.sum()),
        before=min((numbers[place] or 0 for place in remaining.tolist()), default=0),
    )


def _row_mask(trace: Columns, rows: Int64s) -> Bools:
    is_among = np.zeros(len(trace), dtype=np.bool_)
    is_among[rows] = True
    return is_among


def _topmost(trace: Columns, rows: Int64s, line: Int64s, line_without_task: Int64s) -> Int64s:
    """Return the steps inside no step of another track. A `Profiler`'s step may contain the steps of tasks."""
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    of_tasks = np.flatnonzero((trace.task_id[rows] != 0) & (line_without_task[rows] != NONE))
    is_below = nearest_above(trace.parent, _row_mask(trace, rows))[rows] != NONE
    around = steps.at(line_without_task[rows[of_tasks]], steps.starts[of_tasks])
    is_below[of_tasks] |= ~np.append(is_below, True)[around]  # a step below a task's own does not hold it
    return np.asarray(rows[~is_below])


def _mark_first_steps(
    thread: Int64s, starts: Int64s, first_rows: Int64s, numbers: Sequence[int | None], count: int
) -> Bools:  # fmt: skip
    """Return an array over the steps, True for the first `count` of each thread, by their own number or by begin."""
    order = np.lexsort((first_rows, starts, thread))
    sorted_threads = thread[order]
    firsts = np.flatnonzero(np.diff(sorted_threads, prepend=NONE))
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order)) - np.repeat(firsts, np.diff(firsts, append=len(order)))
    pairs = zip(numbers, places.tolist(), strict=True)
    return np.array([(place if number is None else number) < count for number, place in pairs], dtype=np.bool_)


# Places of times


UNKNOWN = "(not known)"
"""The place of an event whose launching call is not in the file."""

NOWHERE = "(no span was open)"
"""The place of an event during which no span was open on its thread."""

SHARED = "(several tasks were open)"
"""The place of an event during which several tasks had open spans on its thread."""

UNKNOWN_NUMBER = 0
"""The number of `UNKNOWN` among places. All other places have larger numbers."""


class NumberedPlaces(NamedTuple):
    """The place of each event: `number` is an index into `names`, which are pairs of a site's name and kind."""

    number: Int64s
    names: tuple[tuple[str, str], ...]


def rows_open(recording: Recording, thread_ids: Int64s, times_ns: Int64s, mask: Bools | None = None) -> Int64s:
    """Return the row of the innermost open span at each time on each thread, as `innermost` does.

    Only rows of the `mask` count. In a trace of another profiler, calls that launch device work do not count.
    """
    trace = recording.columns
    mask = np.ones(len(trace), dtype=np.bool_) if mask is None else mask.copy()
    if recording.trace.origin.recorder == "other":
        mask[trace.attributes.having("correlation")] = False
    return innermost(trace, mask, thread_ids, times_ns)


def places(recording: Recording, thread_ids: Int64s, times_ns: Int64s, mask: Bools | None = None) -> NumberedPlaces:
    """Return the place of each event, given by its thread and time, in any order."""
    trace = recording.columns
    names = {(UNKNOWN, ""): UNKNOWN_NUMBER, (NOWHERE, ""): 1, (SHARED, ""): 2}
    of_site = [names.setdefault((name_of_site(site), site.kind), len(names)) for site in trace.sites]
    rows = rows_open(recording, thread_ids, times_ns, mask)
    place_of_row = np.array([*of_site, NONE])[trace.site[rows]] if len(trace) else rows
    number = np.where(rows < 0, -rows, place_of_row)
    number[times_ns < recording.trace.coverage[0]] = UNKNOWN_NUMBER
    return NumberedPlaces(number, tuple(names))
