"""The `benchmark` view: the durations of a loop's steps, their waits for input, and their rate.

A step is a span of kind `step` with the loop's wait for input right before it, or the time between two calls of
`Profiler.step`. The batch cost is the step's host time. The reader cost is the part of that time that loaders took. The
first `skip` steps are left out. Rates are per second of elapsed time, even if steps run in parallel.

`paddle.profiler` divides the time of n steps by n - 1, so its mean is too large. Its minimum is `inf` if each step is
longer than the step before. This view has neither fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from instrument.recording.spans import Interval
from instrument.report.section import Coverage, Section, View, explain_empty, value_of
from instrument.report.step_counts import SECOND_NS, Benchmark, LoopTimes, Spread
from instrument.report.table import MISSING, number, tenths
from instrument.report.units import LOADER, PROFILERS, include_waits, merge_waits, step_number
from instrument.report.view import UNITS, Options, Recording
from instrument.trace.columns import Bools, Columns, Int64s
from instrument.trace.groups import numbered, ranked
from instrument.trace.intervals import Unions, union

NO_STEP = (
    "No step was recorded. A step is the time between two calls of `Profiler.step()`, or a span of kind `step`: "
    'with scope("train", kind="step").'
)
FIELDS = ("mean", "p50", "p99", "least", "most")


@dataclass(frozen=True, slots=True)
class Loops(View):
    """The `benchmark` view: the loops by the name of their steps. `coverage` is None for a loop that still runs."""

    coverage: Coverage | None
    loops: tuple[LoopTimes, ...]
    _options: Options

    TITLE = "Benchmark"

    def head(self) -> list[str]:
        coverage = [] if self.coverage is None else self.coverage.lines()
        return [*coverage, f"Time unit: {self._options.unit}; ips: items per second"]

    def nothing(self) -> list[str]:
        complete = self.coverage is None or self.coverage.complete
        return [] if self.loops else explain_empty("step", NO_STEP, complete=complete)

    def sections(self) -> list[Section]:
        """Return a table for each loop, with a row for each measure."""
        columns = "name=|spread.mean=Ave.|spread.p50=p50|spread.p99=p99|spread.least=Min.|spread.most=Max."
        texts = {field: partial(_spread_cell, field) for field in (f"spread.{name}" for name in FIELDS)}
        return [
            Section(
                loop.name or "(no name)", _spread_rows(loop), columns, (), texts, (16, *[10] * 5), _count_lines(loop)
            )
            for loop in self.loops
        ]

    def foot(self) -> list[str]:
        return ["p50, p99: within 0.8 %. Averages are over the steps that were timed."]


def show_benchmark(steps: Benchmark, options: Options) -> Loops:
    """Return the view of the steps that a running loop has counted."""
    loop = steps.loop()
    return Loops(None, (loop,) if loop.steps or loop.skipped else (), options)


def benchmark_line(steps: Benchmark, unit: str | None = None) -> str:
    """Return the mean costs and the mean rate as one line, in seconds. `unit` is the name of the samples."""
    loop = steps.loop()
    of = "steps" if loop.samples is None else unit or "samples"
    reader = "" if loop.reader is None else f"reader_cost: {loop.reader.mean / SECOND_NS:.5f} s "
    batch = MISSING if loop.batch is None else f"{loop.batch.mean / SECOND_NS:.5f}"
    rate = MISSING if loop.rate is None else f"{loop.rate.mean:.3f}"
    return f"{reader}batch_cost: {batch} s ips: {rate} {of}/s"


# The text.


class SpreadRow(NamedTuple):
    """A row of a loop's table: the spread of a cost or, if `is_rate`, of the rate in steps or samples per second."""

    name: str
    spread: Spread | None
    is_rate: bool = False


def _spread_rows(loop: LoopTimes) -> list[SpreadRow]:
    reader = [] if loop.reader is None else [SpreadRow("reader_cost", loop.reader)]
    return [*reader, SpreadRow("batch_cost", loop.batch), SpreadRow(f"ips ({loop.rate_of})", loop.rate, is_rate=True)]


def _spread_cell(field: str, row: SpreadRow, unit: str) -> str:
    value = value_of(row, field)
    return number(value if row.is_rate or value is None else value / UNITS[unit])


def _count_lines(loop: LoopTimes) -> list[str]:
    """Return the lines on the number of steps."""
    cut = f", {loop.cut} cut by an edge of the window" if loop.cut else ""
    lines = [f"{loop.steps} steps timed, the first {loop.skipped} skipped{cut}"]
    if loop.samples is not None:
        lines.append(f"Samples: {number(loop.samples)}")
    if loop.reader_ratio is not None:
        lines.append(f"Reader: {tenths(loop.reader_ratio, 1)} of batch_cost")
    return [*lines, ""]


def benchmark(recording: Recording, options: Options) -> Loops:
    """Return the view of the steps that a running `Profiler` has counted or, without one, of the kept spans.

    `skip_first` leaves out the first steps of each loop, by the step's own number or else by its begin. It does not
    apply to the steps of a running `Profiler`.
    """
    if recording.benchmark is not None:
        return show_benchmark(recording.benchmark, options)
    loops = _measure_loops(recording.columns, recording.trace.coverage, options.skip_first)
    return Loops(Coverage.of_recording(recording), loops, options)


class _Steps(NamedTuple):
    """Steps as columns: rows in the trace, begins, ends and waits for input in ns, and True for cut steps."""

    row: Int64s
    start_ns: Int64s
    end_ns: Int64s
    reader_ns: Int64s
    is_cut: Bools

    def at(self, places: Int64s) -> _Steps:
        """Return the steps with the given indices."""
        return _Steps(
            self.row[places], self.start_ns[places], self.end_ns[places], self.reader_ns[places], self.is_cut[places]
        )


def _measure_loops(trace: Columns, interval: Interval, skip: int) -> tuple[LoopTimes, ...]:
    """Return the times of each loop, by the name of its steps, in the order in which the names first occur."""
    rows = np.flatnonzero(trace.of_kind("step"))
    if not len(rows):
        return ()
    steps = _find_steps(trace, rows, interval)
    names, number_of = trace.numbered_sites(attrgetter("name"))
    number = number_of[trace.site[steps.row]]
    order = np.lexsort((trace.span_id[steps.row], trace.start_ns[steps.row], number))
    of_names = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
    steps_by_name = {int(number[places[0]]): steps.at(places) for places in of_names}
    first_seen = dict.fromkeys(number_of[trace.site[rows]].tolist())
    return tuple(_measure_loop(names[key], trace, steps_by_name[key], skip) for key in first_seen)


def _find_steps(trace: Columns, rows: Int64s, interval: Interval) -> _Steps:
    """Return the steps in the given rows, with the waits for loaders in the step's task or on its thread."""
    thread = ranked(trace.thread_id)[1]
    line, firsts = numbered(thread, trace.task_id)
    line = np.where(trace.task_id == 0, len(firsts) + thread, line)
    loaders = np.flatnonzero(trace.of_kind(LOADER))
    of_tasks = loaders[trace.task_id[loaders] != 0]
    of_waits = np.concatenate([loaders, of_tasks])
    lines = np.concatenate([len(firsts) + thread[loaders], line[of_tasks]])
    waits = merge_waits(lines, trace.start_ns[of_waits], trace.end_ns[of_waits])
    rows = rows[np.lexsort((trace.span_id[rows], -trace.end_ns[rows], trace.start_ns[rows], line[rows]))]
    steps = Unions(line[rows], trace.start_ns[rows], trace.end_ns[rows])
    is_profilers = trace.of_sites([site.function == PROFILERS for site in trace.sites])
    begins = include_waits(steps, is_profilers[rows], waits)
    is_cut = trace.clipped[rows] | (begins < interval[0]) | (steps.ends > interval[1])
    return _Steps(rows, begins, steps.ends, waits.within(steps.groups, begins, steps.ends), is_cut)


def _measure_loop(name: str, trace: Columns, steps: _Steps, skip: int) -> LoopTimes:
    """Return the times of one loop, from its steps in order."""
    counts, timed = Benchmark(skip=0), list[int]()
    attributes = (trace.attributes.values(key, steps.row) for key in ("step", "samples"))
    columns = (column.tolist() for column in (steps.end_ns - steps.start_ns, steps.reader_ns, steps.is_cut))
    for place, (step_of_call, samples, batch_ns, reader_ns, is_cut) in enumerate(
        zip(*attributes, *columns, strict=True)
    ):
        step = step_number(step_of_call)
        if (place if step is None else step) < skip:
            counts.skipped += 1
        elif is_cut:
            counts.cut += 1
        else:
            is_count = isinstance(samples, (int, float)) and not isinstance(samples, bool) and samples >= 0
            counts.add(batch_ns, reader_ns, samples if is_count else None)
            timed.append(place)
    return counts.loop(name, union(steps.start_ns[timed], steps.end_ns[timed]).length_ns())
