"""The `benchmark` view: what the steps of a loop cost, how long they waited for input, and how many a second.

A step is a span of kind `step`, with the wait of its loop for its input right before it, or what lies between two calls
of `Profiler.step`. Its batch cost is its host time; the reader cost is the part of it in which a loader of its thread
(and of its task, where it has one) was asked for the next item. Averages divide by the steps that were timed: those
from the index `skip` on, counted from 0. A rate is over the time on the clock: of steps side by side, their union.

`paddle.profiler` divides by one step less than it times, so that twelve steps of 10 ms read as 15 ms, prints a least of
`inf` where each step is longer than the one before, and counts samples by hand only. Here 10 ms is 10 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from instrument.recording.spans import Interval, Span, Trace, length, union
from instrument.report.coverage import Coverage, none_held
from instrument.report.step_counts import SECOND_NS, Benchmark, Loop, Spread
from instrument.report.stretches import Timeline
from instrument.report.table import MISSING, WHOLE_DIGITS, compact, safe, section_title, shorten, table, tenths, title
from instrument.report.units import starts_of
from instrument.report.view import UNITS, Options, Recording

NO_STEP = (
    "No step was recorded. A step is what lies between two calls of `Profiler.step()`, or a span of kind `step`: "
    'with scope("train", kind="step").'
)
NAME_WIDTH = 25


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops by the name of their steps. `coverage` is None where the steps were counted as they went by."""

    coverage: Coverage | None
    loops: tuple[Loop, ...]
    _options: Options

    def lines(self) -> list[str]:
        """A table for each loop."""
        unit = self._options.unit
        lines = [*title("Benchmark Report"), *(self.coverage.lines() if self.coverage is not None else [])]
        lines += [f"Time unit: {unit}; ips: in a second", ""]
        if not self.loops:
            return [
                *lines,
                *none_held("step", NO_STEP, complete=self.coverage is None or self.coverage.complete),
                "",
            ]
        for loop in self.loops:
            lines += [*section_title(shorten(safe(loop.name) or "(no name)", NAME_WIDTH)), *_loop_lines(loop, unit), ""]
        return [*lines, "p50, p99: within 0.8 %. Averages are over the steps that were timed.", ""]


def benchmark(recording: Recording, options: Options) -> Loops:
    """The view: of all steps of a `Profiler` that runs, else from the spans that are held.

    `skip_first` leaves out the first steps of each loop, by the number that a step bears or else by their begin; where
    they were counted as they went by, whoever has them counted leaves them out.
    """
    if recording.benchmark is not None:
        return counted(recording.benchmark, options)
    trace = recording.trace
    return Loops(Coverage.of(trace), _loops(trace, options.skip_first), options)


def counted(steps: Benchmark, options: Options) -> Loops:
    """The view of steps that were counted as they went by."""
    loop = steps.loop()
    return Loops(None, (loop,) if loop.steps or loop.skipped else (), options)


def line_of(steps: Benchmark, unit: str | None = None) -> str:
    """Averages as one line, in seconds; `unit` names the samples."""
    loop = steps.loop()
    of = "steps" if loop.samples is None else unit or "samples"
    reader = "" if loop.reader is None else f"reader_cost: {loop.reader.mean / SECOND_NS:.5f} s "
    batch = MISSING if loop.batch is None else f"{loop.batch.mean / SECOND_NS:.5f}"
    rate = MISSING if loop.rate is None else f"{loop.rate.mean:.3f}"
    return f"{reader}batch_cost: {batch} s ips: {rate} {of}/s"


# From spans.


def _loops(trace: Trace, skip: int) -> tuple[Loop, ...]:
    steps: dict[tuple[int, int], list[Span]] = {}
    loads: dict[tuple[int, int | None], list[Interval]] = {}
    names: dict[str, list[tuple[Span, int, Sequence[Interval]]]] = {}
    for span in trace.spans:
        kind = span.site.kind
        if kind == "step":
            names.setdefault(span.site.name, [])
            steps.setdefault((span.thread_id, span.task_id), []).append(span)
        elif kind == "loader":
            part = span.start_ns, span.end_ns
            loads.setdefault((span.thread_id, None), []).append(part)
            loads.setdefault((span.thread_id, span.task_id), []).append(part)
    waits = {key: union(parts) for key, parts in loads.items()}
    for (thread_id, task_id), own in steps.items():
        own.sort(key=lambda span: (span.start_ns, -span.end_ns, span.span_id))
        its = waits.get((thread_id, task_id or None), [])
        for span, start_ns in zip(own, starts_of(own, its), strict=True):
            names[span.site.name].append((span, start_ns, its))
    for timed in names.values():
        timed.sort(key=lambda one: (one[0].start_ns, one[0].span_id))
    return tuple(_loop(name, timed, trace.held, skip) for name, timed in names.items())


def _loop(name: str, steps: list[tuple[Span, int, Sequence[Interval]]], held: Interval, skip: int) -> Loop:
    """The loop of steps, each with when it begins and the waits for loaders that it may have had."""
    found = Benchmark(skip=0)
    timelines: dict[int, Timeline] = {}
    took: list[Interval] = []
    for index, (span, start_ns, waits) in enumerate(steps):
        number = span.attributes.get("step")
        if (number if isinstance(number, int) and not isinstance(number, bool) else index) < skip:
            found.skipped += 1
            continue
        if span.clipped or start_ns < held[0] or span.end_ns > held[1]:
            found.cut += 1
            continue
        if id(waits) not in timelines:
            timelines[id(waits)] = Timeline(waits)
        samples = span.attributes.get("samples")
        is_count = isinstance(samples, (int, float)) and not isinstance(samples, bool) and samples >= 0
        reader_ns = timelines[id(waits)].within(start_ns, span.end_ns)
        found.add(span.end_ns - start_ns, reader_ns, samples if is_count else None)  # type: ignore[arg-type]
        took.append((start_ns, span.end_ns))
    return found.loop(name, length(union(took)))


# The text.


def _loop_lines(loop: Loop, unit: str) -> list[str]:
    cut = f", {loop.cut} cut by an edge of the window" if loop.cut else ""
    lines = [f"{loop.steps} steps timed, the first {loop.skipped} skipped{cut}"]
    if loop.samples is not None:
        lines.append(f"Samples: {compact(loop.samples, 15)}")
    if loop.reader_ratio is not None:
        lines.append(f"Reader: {tenths(loop.reader_ratio, 1)} of batch_cost")
    rows = [("batch_cost", loop.batch, UNITS[unit]), (f"ips ({loop.rate_of})", loop.rate, 1)]
    if loop.reader is not None:
        rows.insert(0, ("reader_cost", loop.reader, UNITS[unit]))
    room = WHOLE_DIGITS if unit == "ns" else 7
    cells = [[name, *_cells(spread, scale, room)] for name, spread, scale in rows]
    return [*lines, "", *table(["", "Ave.", "p50", "p99", "Min.", "Max."], cells, [16, *[10] * 5])]


def _cells(spread: Spread | None, scale: int, room: int) -> Iterable[str]:
    values: Sequence[float | None] = [None] * 5
    if spread is not None:
        values = [spread.mean, spread.p50, spread.p99, spread.least, spread.most]
    return [MISSING if value is None else compact(value / scale, room) for value in values]
