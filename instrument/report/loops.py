"""The tables of the `benchmark` view, for steps from spans and for steps that a running loop has counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from instrument.report.section import Coverage, Section, View, explain_empty, value_of
from instrument.report.step_counts import SECOND_NS, Benchmark, LoopTimes, Spread
from instrument.report.table import MISSING, number, tenths
from instrument.report.view import UNITS, Options

NO_STEP = (
    "No step was recorded. A step is the time between two calls of `Profiler.step()`, or a span of kind `step`: "
    'with scope("train", kind="step").'
)
FIELDS = ("mean", "p50", "p99", "least", "most")


@dataclass(frozen=True, slots=True)
class Loops(View):
    """The loops by the name of their steps. `coverage` is None for steps that a running loop has counted."""

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
        """Return a table per loop, with a row per measure."""
        columns = "name=|spread.mean=Ave.|spread.p50=p50|spread.p99=p99|spread.least=Min.|spread.most=Max."
        texts = {field: partial(_cell, field) for field in (f"spread.{name}" for name in FIELDS)}
        return [
            Section(loop.name or "(no name)", _rows(loop), columns, (), texts, (16, *[10] * 5), _counts(loop))
            for loop in self.loops
        ]

    def foot(self) -> list[str]:
        return ["p50, p99: within 0.8 %. Averages are over the steps that were timed."]


def loops_of_benchmark(steps: Benchmark, options: Options) -> Loops:
    """Return the view of the steps that a running loop has counted."""
    loop = steps.loop()
    return Loops(None, (loop,) if loop.steps or loop.skipped else (), options)


def line_of(steps: Benchmark, unit: str | None = None) -> str:
    """Return the mean costs and rate in one line, in seconds. `unit` is the name of the samples."""
    loop = steps.loop()
    of = "steps" if loop.samples is None else unit or "samples"
    reader = "" if loop.reader is None else f"reader_cost: {loop.reader.mean / SECOND_NS:.5f} s "
    batch = MISSING if loop.batch is None else f"{loop.batch.mean / SECOND_NS:.5f}"
    rate = MISSING if loop.rate is None else f"{loop.rate.mean:.3f}"
    return f"{reader}batch_cost: {batch} s ips: {rate} {of}/s"


# The text.


class SpreadRow(NamedTuple):
    """A row of a loop: the spread of a cost or, if `is_rate`, of the rate in steps or samples per second."""

    name: str
    spread: Spread | None
    is_rate: bool = False


def _rows(loop: LoopTimes) -> list[SpreadRow]:
    reader = [] if loop.reader is None else [SpreadRow("reader_cost", loop.reader)]
    return [*reader, SpreadRow("batch_cost", loop.batch), SpreadRow(f"ips ({loop.rate_of})", loop.rate, is_rate=True)]


def _cell(field: str, row: SpreadRow, unit: str) -> str:
    value = value_of(row, field)
    return number(value if row.is_rate or value is None else value / UNITS[unit])


def _counts(loop: LoopTimes) -> list[str]:
    """Return the lines on the numbers of steps."""
    cut = f", {loop.cut} cut by an edge of the window" if loop.cut else ""
    lines = [f"{loop.steps} steps timed, the first {loop.skipped} skipped{cut}"]
    if loop.samples is not None:
        lines.append(f"Samples: {number(loop.samples)}")
    if loop.reader_ratio is not None:
        lines.append(f"Reader: {tenths(loop.reader_ratio, 1)} of batch_cost")
    return [*lines, ""]
