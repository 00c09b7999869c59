"""The `benchmark` view: the durations of a loop's steps, their waits for input, and their rate.

A step is a span of kind `step`, or the time between two calls of `Profiler.step`. The wait for input right before a
step belongs to the step. The first `skip` steps are left out.

`find_steps_or_requests` returns the units for the `phases` view: the steps or, without steps, the requests or the
whole window.
"""

from __future__ import annotations

import math
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from instrument.recording.distributions import Distribution, percentiles
from instrument.recording.spans import Interval, Site
from instrument.report.request_groups import read_integer_attribute
from instrument.report.section import Coverage, Section, View, field_value
from instrument.report.table import MISSING, format_percent, number_text, wrap_text
from instrument.report.view import UNITS, Options, Recording
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.indices import (
    NONE,
    find_ancestor,
    find_distinct,
    find_rows,
    make_mask,
    number_combinations,
    rank_distinct,
)
from instrument.trace.intervals import Unions, make_union, select_successive, union_by_group

LOADER = "loader"
OPTIMIZER = "optimizer"

PROFILERS = "instrument.Profiler.step"
"""The function name of the steps that a `Profiler` records."""


def find_phase(site: Site) -> str | None:
    if site.kind == LOADER:
        return LOADER
    declared = dict(site.attributes).get("phase")
    if declared is False:
        return None
    if isinstance(declared, str) and declared:
        return declared
    return site.name if site.kind == "phase" else None


def merge_loader_waits(lines: Int64s, starts: Int64s, ends: Int64s) -> Unions:
    """Merge overlapping waits for loaders on each track. Waits of length 0 are kept."""
    unions = union_by_group(lines, 2 * starts, 2 * ends + 1)
    return Unions(unions.groups, unions.starts // 2, unions.ends // 2)


def find_step_starts(steps: Unions, is_profilers: Bools, waits: Unions) -> Int64s:
    """Return the start time of each step. A wait for input right before a step, on the same track, belongs to the step.
    `steps` must be sorted by track and start time."""
    lines, starts, ends = steps
    filled = np.flatnonzero(starts < ends)
    filled = filled[np.lexsort((ends[filled], lines[filled]))]
    ended = Unions(lines[filled], ends[filled], ends[filled])
    last = ended.find_last_begun(lines, starts)
    since = np.where(last != NONE, np.append(ended.starts, 0)[last], 0)
    since[1:] = np.maximum(since[1:], np.where(lines[1:] == lines[:-1], starts[:-1], 0))
    place = waits.find_last_begun(lines, starts)
    place -= (place != NONE) & (np.append(waits.ends, 0)[place] > starts)
    has_wait = (np.append(waits.groups, NONE)[place] == lines) & ~is_profilers
    began = np.append(waits.starts, NONE)[place]
    return np.where(has_wait & (began >= np.maximum(since, 0)), began, starts)


@dataclass(frozen=True, slots=True)
class Units:
    """The steps, requests or window of a trace, within the interval in which no span is missing.

    - `line_of`: for each row of the trace, the track of its unit, or `NONE`
    - `is_aside`: True for rows on a track without steps
    - `before`: the number of the first step that was not skipped
    """

    of: str
    intervals: Unions
    is_whole: Bools
    line_of: Int64s
    is_aside: Bools
    steps: Unions | None = None
    skipped: int = 0
    before: int = 0


def find_steps_or_requests(trace: Columns, interval: Interval, skip_first: int) -> Units:
    """Return the units of a trace: steps if there are any, else requests, else the window."""
    reaches_into = (trace.start_ns < interval[1]) & (trace.end_ns > interval[0])
    kinds = [site.kind if find_phase(site) is None else "" for site in trace.sites]
    steps = np.flatnonzero(trace.are_of_sites([kind == "step" for kind in kinds]) & reaches_into)
    if len(steps):
        return _find_step_units(trace, steps, interval, skip_first)
    is_request = trace.are_of_sites([kind == "request" for kind in kinds]) & (trace.root_id == trace.span_id)
    requests = np.flatnonzero(is_request & reaches_into)
    is_aside = np.zeros(len(trace), dtype=np.bool_)
    if not len(requests):
        window = Unions(np.array([0]), np.array([interval[0]]), np.array([interval[1]]))
        return Units("window", window, np.array([True]), np.zeros(len(trace), dtype=np.int64), is_aside)
    lines = np.arange(len(requests))
    line_of = np.full(len(trace) + 1, NONE, dtype=np.int64)
    line_of[requests] = lines
    clipped_units, is_whole = _clip_units(trace, requests, lines, trace.start_ns[requests], interval)
    return Units("request", clipped_units, is_whole, line_of[find_rows(trace.span_id, trace.root_id)], is_aside)


def _clip_units(
    trace: Columns, rows: Int64s, lines: Int64s, begins: Int64s, interval: Interval
) -> tuple[Unions, Bools]:
    first, last = interval
    ends = trace.end_ns[rows]
    is_whole = ~trace.clipped[rows] & (first <= begins) & (ends <= last)
    return Unions(lines, np.maximum(begins, first), np.minimum(ends, last)), is_whole


def _find_step_units(trace: Columns, step_rows: Int64s, interval: Interval, skip_first: int) -> Units:
    thread = rank_distinct(trace.thread_id)[1]
    line, firsts = number_combinations(thread, trace.task_id)
    rows = step_rows[select_successive(line[step_rows], trace.start_ns[step_rows], trace.end_ns[step_rows])]
    of_thread = np.full(int(thread.max()) + 1, NONE, dtype=np.int64)
    of_no_task = firsts[trace.task_id[firsts] == 0]
    of_thread[thread[of_no_task]] = line[of_no_task]
    if len(find_distinct(thread[rows])) < len(find_distinct(line[rows])):  # tasks may have steps at the same time
        rows = _drop_inner_steps(trace, rows, line, of_thread[thread])
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    loaders = np.flatnonzero(trace.are_of_kind(LOADER))
    waits = merge_loader_waits(line[loaders], trace.start_ns[loaders], trace.end_ns[loaders])
    is_profilers = trace.are_of_sites([site.function == PROFILERS for site in trace.sites])[rows]
    begins = find_step_starts(steps, is_profilers, waits)
    numbers = read_integer_attribute(trace.attributes, "step", rows)
    skipped = np.zeros(len(rows), dtype=np.bool_)
    if skip_first:
        first_of = np.full(len(firsts), len(trace))
        np.minimum.at(first_of, line[step_rows], step_rows)
        counted, threads = Counter[int](), thread[rows].tolist()
        for step in np.lexsort((first_of[steps.groups], trace.start_ns[rows])).tolist():
            number = counted[threads[step]] if numbers[step] == NONE else numbers[step]
            skipped[step] = number < skip_first
            counted[threads[step]] += 1
    remaining = np.flatnonzero(~skipped)
    units, is_whole = _clip_units(trace, rows[remaining], steps.groups[remaining], begins[remaining], interval)
    has_steps = make_mask(steps.groups, len(firsts) + 1)
    line_of = np.where(has_steps[line], line, NONE)
    is_aside = ~has_steps[line]
    line_of = np.where(is_aside & has_steps[of_thread[thread]], of_thread[thread], line_of)
    # A task without steps works for the steps of its thread, or for the step in which it began.
    lost = np.flatnonzero(line_of == NONE)
    if len(lost):
        line_of[lost] = np.append(line, NONE)[find_ancestor(trace.parent, make_mask(rows, len(trace)))[lost]]
    return Units(
        of="step",
        intervals=units,
        is_whole=is_whole,
        line_of=line_of,
        is_aside=is_aside,
        steps=Unions(steps.groups, begins, steps.ends),
        skipped=int(skipped.sum()),
        before=int(numbers[remaining].clip(0).min()) if len(remaining) else 0,
    )


def _drop_inner_steps(trace: Columns, rows: Int64s, line: Int64s, line_without_task: Int64s) -> Int64s:
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    of_tasks = np.flatnonzero((trace.task_id[rows] != 0) & (line_without_task[rows] != NONE))
    is_below = find_ancestor(trace.parent, make_mask(rows, len(trace)))[rows] != NONE
    around = steps.interval_at(line_without_task[rows[of_tasks]], steps.starts[of_tasks])
    is_below[of_tasks] |= ~np.append(is_below, True)[around]  # a step below a task's own does not hold it
    return np.asarray(rows[~is_below])


# Counters


FIRST_KEPT = 1000
"""The number of first steps that are stored separately, so that a report can leave them out."""

SKIPPED_STEPS = 10
"""The default number of first steps that averages leave out, as in `paddle.profiler`."""

SECOND_NS = 10**9
MOST_SAMPLES = 10**18
"""The largest accepted number of samples in a step. Larger numbers, such as infinity, are ignored."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean, minimum, maximum and percentiles of values. Percentiles have an error of at most 0.8 %, and are None if
    unknown."""

    mean: float
    least: float
    most: float
    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """The times of a loop's steps, in ns.

    - `reader`: the waits for input, None if no step waited
    - `rate`: samples per second, or steps per second if `samples` is None
    - `cut`: the number of steps that are left out because they cross an edge of the window
    """

    name: str
    steps: int
    skipped: int
    cut: int
    samples: float | None
    reader: Spread | None
    batch: Spread | None
    rate: Spread | None

    @property
    def reader_ratio(self) -> float | None:
        return self.reader.mean / self.batch.mean if self.reader is not None and self.batch is not None else None

    @property
    def rate_of(self) -> str:
        return "steps" if self.samples is None else "samples"


@dataclass(slots=True)
class Benchmark:
    """The times of a running loop's steps. `batch` has the lengths of steps, and `reader` the waits for input within
    steps. With `keeps`, the first `FIRST_KEPT` steps are also stored separately."""

    skip: int = SKIPPED_STEPS
    skipped: int = 0
    cut: int = 0
    batch: Distribution = field(default_factory=Distribution)
    reader: Distribution = field(default_factory=Distribution)
    keeps: bool = False
    _firsts: list[tuple[int, int, float | None]] = field(default_factory=list)
    _later: Benchmark | None = None
    _samples: float = 0.0
    _with_samples: int = 0
    _least_rate: float = math.inf
    _most_rate: float = 0.0

    def add_step(self, batch_ns: int, reader_ns: int, num_samples: float | None) -> None:
        """Count a complete step. `reader_ns` is the part of `batch_ns` in which the step waited for input."""
        if self.keeps and len(self._firsts) < FIRST_KEPT:
            self._firsts.append((batch_ns, reader_ns, num_samples))
        elif self.keeps:
            self._later = self._later or Benchmark(skip=0)
            self._later.add_step(batch_ns, reader_ns, num_samples)
        if self.skipped < self.skip:
            self.skipped += 1
            return
        batch_ns = max(batch_ns, 1)
        self.batch.add(batch_ns)
        self.reader.add(reader_ns)
        if num_samples is not None and num_samples < MOST_SAMPLES:
            samples = float(num_samples)
            rate = samples * SECOND_NS / batch_ns
            self._samples += samples
            self._with_samples += 1
            self._least_rate, self._most_rate = min(self._least_rate, rate), max(self._most_rate, rate)

    def without_first_steps(self, skip: int) -> Benchmark:
        """Return the times without the first `skip` steps. At most `FIRST_KEPT` steps are left out. Call this only if
        `keeps` is True."""
        benchmark = Benchmark(skip=0) if self._later is None else deepcopy(self._later)
        benchmark.skip = min(skip, FIRST_KEPT)
        for first in self._firsts:
            benchmark.add_step(*first)
        return benchmark

    def measure_loop_times(self, name: str = "steps", lasted_ns: int = 0) -> LoopTimes:
        """Return the times so far. `lasted_ns` is the length of the loop, by default the sum of its steps."""
        batch, steps = self.batch, self.batch.count
        lasted_ns = lasted_ns or batch.sum_ns
        samples, rate = None, None
        if steps and self._with_samples == steps:
            samples = self._samples
            rate = Spread(samples * SECOND_NS / lasted_ns, self._least_rate, self._most_rate)
        elif steps:
            rate = Spread(steps * SECOND_NS / lasted_ns, SECOND_NS / batch.most_ns, SECOND_NS / batch.least_ns)
        return LoopTimes(
            name=name,
            steps=steps,
            skipped=self.skipped,
            cut=self.cut,
            samples=samples,
            reader=_spread_of_times(self.reader) if self.reader.sum_ns else None,
            batch=_spread_of_times(batch),
            rate=rate,
        )


def _spread_of_times(times: Distribution) -> Spread | None:
    if not times.count:
        return None
    p50_ns, p99_ns = percentiles(times.buckets, (0.5, 0.99), times.count, times.least_ns, times.most_ns)
    return Spread(times.sum_ns / times.count, times.least_ns, times.most_ns, p50_ns, p99_ns)


# The view


NO_STEP = (
    "No step was recorded. A step is the time between two calls of `Profiler.step()`, or a span of kind `step`: "
    'with scope("train", kind="step").'
)


@dataclass(frozen=True, slots=True)
class Loops(View):
    """The `benchmark` view, with one row for each loop. `coverage` is None for a loop that still runs."""

    coverage: Coverage | None
    loops: tuple[LoopTimes, ...]
    _options: Options

    TITLE = "Benchmark"

    def header_lines(self) -> list[str]:
        coverage = [] if self.coverage is None else self.coverage.lines()
        return [*coverage, f"Time unit: {self._options.unit}; ips: items per second"]

    def reasons_if_empty(self) -> list[str]:
        if self.loops:
            return []
        return wrap_text(NO_STEP) if self.coverage is None else self.coverage.explain_no_spans("step", NO_STEP)

    def sections(self) -> list[Section]:
        columns = "name=|spread.mean=Ave.|spread.p50=p50|spread.p99=p99|spread.least=Min.|spread.most=Max."

        def format_field(name: str, row: SpreadRow, unit: str) -> str:
            value = field_value(row, name)
            return number_text(value if row.is_rate or value is None else value / UNITS[unit])

        texts = {f"spread.{name}": partial(format_field, f"spread.{name}") for name in Spread.__slots__}
        sections = []
        for loop in self.loops:
            rows = [SpreadRow("reader_cost", loop.reader)] if loop.reader is not None else []
            rows += [SpreadRow("batch_cost", loop.batch), SpreadRow(f"ips ({loop.rate_of})", loop.rate, is_rate=True)]
            cut = f", {loop.cut} cut by an edge of the window" if loop.cut else ""
            lines = [f"{loop.steps} steps timed, the first {loop.skipped} skipped{cut}"]
            if loop.samples is not None:
                lines.append(f"Samples: {number_text(loop.samples)}")
            if loop.reader_ratio is not None:
                lines.append(f"Reader: {format_percent(loop.reader_ratio, 1)} of batch_cost")
            name = loop.name or "(no name)"
            sections.append(Section(name, rows, columns, (), texts, (16, *[10] * 5), [*lines, ""]))
        return sections

    def footnotes(self) -> list[str]:
        return ["p50, p99: within 0.8 %. Averages are over the steps that were timed."]


def make_view(steps: Benchmark, options: Options) -> Loops:
    loop = steps.measure_loop_times()
    return Loops(None, (loop,) if loop.steps or loop.skipped else (), options)


def format_benchmark_line(steps: Benchmark, unit: str | None = None) -> str:
    """Return the mean costs in seconds and the mean rate as a line of text. `unit` is the name of the samples."""
    loop = steps.measure_loop_times()
    of = "steps" if loop.samples is None else unit or "samples"
    reader = "" if loop.reader is None else f"reader_cost: {loop.reader.mean / SECOND_NS:.5f} s "
    batch = MISSING if loop.batch is None else f"{loop.batch.mean / SECOND_NS:.5f}"
    rate = MISSING if loop.rate is None else f"{loop.rate.mean:.3f}"
    return f"{reader}batch_cost: {batch} s ips: {rate} {of}/s"


# The text.


class SpreadRow(NamedTuple):
    """A row of a loop's table: a cost in ns, or with `is_rate` a rate per second."""

    name: str
    spread: Spread | None
    is_rate: bool = False


def find_profiler_steps(recording: Recording) -> Benchmark | None:
    """Return None, unless `Profiler` has stored the steps of a running loop as the result."""
    return None


def benchmark(recording: Recording, options: Options) -> Loops:
    """Return the steps of a running `Profiler`, otherwise the steps among the kept spans. The option `skip_first`
    leaves out the first steps of each loop, but not of a running `Profiler`."""
    if (steps := recording.compute_once(find_profiler_steps)) is not None:
        return make_view(steps, options)
    loops = _measure_loops(recording.columns, recording.trace.coverage, options.skip_first)
    return Loops(Coverage.measure_coverage(recording), loops, options)


class _Steps(NamedTuple):
    row: Int64s
    start_ns: Int64s
    end_ns: Int64s
    reader_ns: Int64s
    is_cut: Bools


def _measure_loops(trace: Columns, interval: Interval, skip: int) -> tuple[LoopTimes, ...]:
    rows = np.flatnonzero(trace.are_of_kind("step"))
    if not len(rows):
        return ()
    steps = _find_all_steps(trace, rows, interval)
    names, number_of = trace.describe_sites(attrgetter("name"))
    number = number_of[trace.site[steps.row]]
    order = np.lexsort((trace.span_id[steps.row], trace.start_ns[steps.row], number))
    of_names = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
    steps_by_name = {int(number[places[0]]): _Steps._make(column[places] for column in steps) for places in of_names}
    first_seen = dict.fromkeys(number_of[trace.site[rows]].tolist())
    return tuple(_measure_loop(names[key], trace, steps_by_name[key], skip) for key in first_seen)


def _find_all_steps(trace: Columns, rows: Int64s, interval: Interval) -> _Steps:
    thread = rank_distinct(trace.thread_id)[1]
    line, firsts = number_combinations(thread, trace.task_id)
    line = np.where(trace.task_id == 0, len(firsts) + thread, line)
    loaders = np.flatnonzero(trace.are_of_kind(LOADER))
    of_tasks = loaders[trace.task_id[loaders] != 0]
    of_waits = np.concatenate([loaders, of_tasks])
    lines = np.concatenate([len(firsts) + thread[loaders], line[of_tasks]])
    waits = merge_loader_waits(lines, trace.start_ns[of_waits], trace.end_ns[of_waits])
    rows = rows[np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows], line[rows]))]
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    is_profilers = trace.are_of_sites([site.function == PROFILERS for site in trace.sites])
    begins = find_step_starts(steps, is_profilers[rows], waits)
    is_cut = trace.clipped[rows] | (begins < interval[0]) | (steps.ends > interval[1])
    return _Steps(rows, begins, steps.ends, waits.length_within(steps.groups, begins, steps.ends), is_cut)


def _measure_loop(name: str, trace: Columns, steps: _Steps, skip: int) -> LoopTimes:
    counts, timed = Benchmark(skip=0), list[int]()
    numbers = read_integer_attribute(trace.attributes, "step", steps.row)
    samples_of_steps = trace.attributes.values("samples", steps.row)
    columns = (numbers, steps.end_ns - steps.start_ns, steps.reader_ns, steps.is_cut)
    for place, (samples, number, batch_ns, reader_ns, is_cut) in enumerate(
        zip(samples_of_steps, *(column.tolist() for column in columns), strict=True)
    ):
        if (place if number == NONE else number) < skip:
            counts.skipped += 1
        elif is_cut:
            counts.cut += 1
        else:
            is_count = isinstance(samples, (int, float)) and not isinstance(samples, bool) and samples >= 0
            counts.add_step(batch_ns, reader_ns, samples if is_count else None)
            timed.append(place)
    return counts.measure_loop_times(name, make_union(steps.start_ns[timed], steps.end_ns[timed]).length_ns())
