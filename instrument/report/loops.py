"""The loops of the `benchmark` view and their text, whether steps were counted as they went by or from spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from instrument.report.section import Coverage, Section, View, none_held
from instrument.report.step_counts import SECOND_NS, Benchmark, LoopTimes, Spread
from instrument.report.table import MISSING, number, safe, section_title, shorten, table, tenths
from instrument.report.view import UNITS, Options

NO_STEP = (
    "No step was recorded. A step is what lies between two calls of `Profiler.step()`, or a span of kind `step`: "
    'with scope("train", kind="step").'
)
NAME_WIDTH = 25


@dataclass(frozen=True, slots=True)
class Loops(View):
    """The loops by the name of their steps. `coverage` is None where the steps were counted as they went by."""

    coverage: Coverage | None
    loops: tuple[LoopTimes, ...]
    _options: Options

    TITLE = "Benchmark"

    def head(self) -> list[str]:
        held = [] if self.coverage is None else self.coverage.lines()
        return [*held, f"Time unit: {self._options.unit}; ips: in a second"]

    def nothing(self) -> list[str]:
        complete = self.coverage is None or self.coverage.complete
        return [] if self.loops else none_held("step", NO_STEP, complete=complete)

    def sections(self) -> list[Section]:
        columns = (
            "name=Loop|steps=Steps|skipped=Skipped|batch.mean=Mean|batch.p50=p50|batch.p99=p99|batch.least=Min|"
            "batch.most=Max|reader_ratio=Reader|rate.mean=A second|rate_of=Of"
        )
        return [Section("Steps", self.loops, columns)]

    def table_lines(self) -> list[str]:
        """Return a table for each loop: the spread of both costs and of the rate is more than a row has room for."""
        lines, unit = list[str](), self._options.unit
        for loop in self.loops:
            lines += [*section_title(shorten(safe(loop.name) or "(no name)", NAME_WIDTH)), *_loop_lines(loop, unit), ""]
        return lines

    def foot(self) -> list[str]:
        return ["p50, p99: within 0.8 %. Averages are over the steps that were timed."]


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


# The text.


def _loop_lines(loop: LoopTimes, unit: str) -> list[str]:
    cut = f", {loop.cut} cut by an edge of the window" if loop.cut else ""
    lines = [f"{loop.steps} steps timed, the first {loop.skipped} skipped{cut}"]
    if loop.samples is not None:
        lines.append(f"Samples: {number(loop.samples)}")
    if loop.reader_ratio is not None:
        lines.append(f"Reader: {tenths(loop.reader_ratio, 1)} of batch_cost")
    rows = [("batch_cost", loop.batch, UNITS[unit]), (f"ips ({loop.rate_of})", loop.rate, 1)]
    if loop.reader is not None:
        rows.insert(0, ("reader_cost", loop.reader, UNITS[unit]))
    cells = [[name, *_cells(spread, scale)] for name, spread, scale in rows]
    return [*lines, "", *table(["", "Ave.", "p50", "p99", "Min.", "Max."], cells, [16, *[10] * 5])]


def _cells(spread: Spread | None, scale: int) -> Iterable[str]:
    values: Sequence[float | None] = [None] * 5
    if spread is not None:
        values = [spread.mean, spread.p50, spread.p99, spread.least, spread.most]
    return [MISSING if value is None else number(value / scale) for value in values]
