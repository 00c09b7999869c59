"""The units that the `phases` view averages over, and the places (open spans) in which events happen.

The units are the steps of each track. Without steps they are the requests, and without requests the whole window. A
track (`line` in the code) is one thread, or one task on a thread. Each request is a track, too, and so is the window.
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
"""The function name under which a `Profiler` records its steps."""


def phase_of(site: Site) -> str | None:
    """Return the phase that a site declares, None if its spans are no phase, for example after `phase: false`."""
    if site.kind == LOADER:
        return LOADER
    declared = dict(site.attributes).get("phase")
    if declared is False:
        return None
    if isinstance(declared, str) and declared:
        return declared
    return site.name if site.kind == "phase" else None


def step_number(value: AttributeValue | None) -> int | None:
    """Return the value of a span's attribute `step` if it is an integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def merge_waits(lines: Int64s, starts: Int64s, ends: Int64s) -> Unions:
    """Return the merged waits for loaders on each track. Waits of length 0 are kept: they mark the begin of a step."""
    unions = union_by_group(lines, 2 * starts, 2 * ends + 1)
    return Unions(unions.groups, unions.starts // 2, unions.ends // 2)


def include_waits(steps: Unions, is_profilers: Bools, waits: Unions) -> Int64s:
    """Return the begin of each step. If the track waited for the step's input right before it, that wait is its begin.

    Such a wait is the last one after an earlier step ended and after an outer step began. A `Profiler`'s step begins
    when the previous one ends, so the wait is already within it. Steps are ordered by track and begin, and may be
    nested.
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
    """The units of a trace, ordered by track and time and clipped to the interval in which no span is missing.

    `of` is `step`, `request` or `window`. `is_whole` is True for units that were not clipped. `line_of` is the track of
    each row of the trace, `NONE` for a row without one. `is_aside` is True for rows that worked for a track from
    another one. `steps` are all steps, also the skipped ones, or None without steps. `skipped` counts the first steps
    that were left out, and `before` is the number of the first step after them.
    """

    of: str
    intervals: Unions
    is_whole: Bools
    line_of: Int64s
    is_aside: Bools
    steps: Unions | None = None
    skipped: int = 0
    before: int = 0


def find_units(trace: Columns, interval: Interval, skip_first: int) -> Units:
    """Return the steps of a trace, else its requests, else one window, clipped to an interval without missing spans."""
    reaches_into = (trace.start_ns < interval[1]) & (trace.end_ns > interval[0])
    kinds = [site.kind if phase_of(site) is None else "" for site in trace.sites]
    steps = np.flatnonzero(trace.of_sites([kind == "step" for kind in kinds]) & reaches_into)
    if len(steps):
        return _step_units(trace, steps, interval, skip_first)
    is_request = trace.of_sites([kind == "request" for kind in kinds]) & (trace.root_id == trace.span_id)
    requests = np.flatnonzero(is_request & reaches_into)
    is_aside = np.zeros(len(trace), dtype=np.bool_)
    if not len(requests):
        window = Unions(np.array([0]), np.array([interval[0]]), np.array([interval[1]]))
        return Units("window", window, np.array([True]), np.zeros(len(trace), dtype=np.int64), is_aside)
    lines = np.arange(len(requests))
    line_of = np.full(len(trace) + 1, NONE, dtype=np.int64)
    line_of[requests] = lines
    clipped_units, is_whole = _cut_units(trace, requests, lines, trace.start_ns[requests], interval)
    return Units("request", clipped_units, is_whole, line_of[rows_of(trace.span_id, trace.root_id)], is_aside)


def _cut_units(trace: Columns, rows: Int64s, lines: Int64s, begins: Int64s, interval: Interval) -> tuple[Unions, Bools]:
    """Return steps or requests clipped to an interval, and True for each one that was already within it."""
    first, last = interval
    ends = trace.end_ns[rows]
    is_whole = ~trace.clipped[rows] & (first <= begins) & (ends <= last)
    return Unions(lines, np.maximum(begins, first), np.minimum(ends, last)), is_whole


def _step_units(trace: Columns, step_rows: Int64s, interval: Interval, skip_first: int) -> Units:
    """Return the outermost steps as units: those in no step of their track, nor in a step that contains their task."""
    thread = ranked(trace.thread_id)[1]
    line, firsts = numbered(thread, trace.task_id)
    rows = step_rows[successive(line[step_rows], trace.start_ns[step_rows], trace.end_ns[step_rows])]
    of_thread = np.full(int(thread.max()) + 1, NONE, dtype=np.int64)
    of_no_task = firsts[trace.task_id[firsts] == 0]
    of_thread[thread[of_no_task]] = line[of_no_task]
    if len(distinct(thread[rows])) < len(distinct(line[rows])):  # tasks, which may have steps at the same time
        rows = _drop_inner_steps(trace, rows, line, of_thread[thread])
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    loaders = np.flatnonzero(trace.of_kind(LOADER))
    waits = merge_waits(line[loaders], trace.start_ns[loaders], trace.end_ns[loaders])
    is_profilers = trace.of_sites([site.function == PROFILERS for site in trace.sites])[rows]
    begins = include_waits(steps, is_profilers, waits)
    numbers = [step_number(value) for value in trace.attributes.values("step", rows)]
    skipped = np.zeros(len(rows), dtype=np.bool_)
    if skip_first:
        first_of = np.full(len(firsts), len(trace))
        np.minimum.at(first_of, line[step_rows], step_rows)
        skipped = _mark_first_steps(thread[rows], trace.start_ns[rows], first_of[steps.groups], numbers, skip_first)
    remaining = np.flatnonzero(~skipped)
    units, is_whole = _cut_units(trace, rows[remaining], steps.groups[remaining], begins[remaining], interval)
    has_steps = np.zeros(len(firsts) + 1, dtype=np.bool_)
    has_steps[steps.groups] = True
    line_of = np.where(has_steps[line], line, NONE)
    is_aside = ~has_steps[line]
    line_of = np.where(is_aside & has_steps[of_thread[thread]], of_thread[thread], line_of)
    # A task without steps works for the steps of its thread, or for the step in which it began.
    lost = np.flatnonzero(line_of == NONE)
    if len(lost):
        line_of[lost] = np.append(line, NONE)[nearest_above(trace.parent, _mask_rows(trace, rows))[lost]]
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


def _mask_rows(trace: Columns, rows: Int64s) -> Bools:
    is_among = np.zeros(len(trace), dtype=np.bool_)
    is_among[rows] = True
    return is_among


def _drop_inner_steps(trace: Columns, rows: Int64s, line: Int64s, line_without_task: Int64s) -> Int64s:
    """Return the steps inside no step of another track. A `Profiler`'s step may contain the steps of tasks."""
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    of_tasks = np.flatnonzero((trace.task_id[rows] != 0) & (line_without_task[rows] != NONE))
    is_below = nearest_above(trace.parent, _mask_rows(trace, rows))[rows] != NONE
    around = steps.at(line_without_task[rows[of_tasks]], steps.starts[of_tasks])
    is_below[of_tasks] |= ~np.append(is_below, True)[around]  # a step below a task's own does not hold it
    return np.asarray(rows[~is_below])


def _mark_first_steps(
    thread: Int64s, starts: Int64s, first_rows: Int64s, numbers: Sequence[int | None], count: int
) -> Bools:  # fmt: skip
    """Return True for the first `count` steps of each thread, by a step's own number or, without one, by its begin."""
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
"""The place of an event at a time when no span was open on its thread."""

SHARED = "(several tasks were open)"
"""The place of an event at a time when several tasks of its thread had open spans."""

UNKNOWN_NUMBER = 0
"""The index of `UNKNOWN` among the places. It is the smallest."""


class NumberedPlaces(NamedTuple):
    """The innermost open span of each event: `number` is an index into `names`, pairs of a site's name and kind."""

    number: Int64s
    names: tuple[tuple[str, str], ...]


def innermost_rows(recording: Recording, thread_ids: Int64s, times_ns: Int64s, mask: Bools | None = None) -> Int64s:
    """Return the row of the innermost span that is open at each time on each thread (see `innermost`).

    Only rows of the `mask` count. In a trace from another profiler, calls that launch device work do not count.
    """
    trace = recording.columns
    mask = np.ones(len(trace), dtype=np.bool_) if mask is None else mask.copy()
    if recording.trace.origin.recorder == "other":
        mask[trace.attributes.having("correlation")] = False
    return innermost(trace, mask, thread_ids, times_ns)


def find_places(
    recording: Recording, thread_ids: Int64s, times_ns: Int64s, mask: Bools | None = None
) -> NumberedPlaces:
    """Return the place (the innermost open span) of each event, given by its thread and time, in any order."""
    trace = recording.columns
    names = {(UNKNOWN, ""): UNKNOWN_NUMBER, (NOWHERE, ""): 1, (SHARED, ""): 2}
    of_site = [names.setdefault((name_of_site(site), site.kind), len(names)) for site in trace.sites]
    rows = innermost_rows(recording, thread_ids, times_ns, mask)
    place_of_row = np.array([*of_site, NONE])[trace.site[rows]] if len(trace) else rows
    number = np.where(rows < 0, -rows, place_of_row)
    number[times_ns < recording.trace.coverage[0]] = UNKNOWN_NUMBER
    return NumberedPlaces(number, tuple(names))
