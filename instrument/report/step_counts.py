"""The steps of a loop, counted in constant memory while it runs: their costs, and their waits for input.

`report.loops` shows the counts, and `report.benchmark_view` counts the steps of a saved trace in the same way.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field

from instrument.recording.distributions import Distribution, percentiles

FIRST_KEPT = 1000
"""The number of first steps of a running loop that a later report may still leave out. They take 0.1 MB."""

SKIPPED_STEPS = 10
"""The number of first steps that a `Profiler`'s benchmark leaves out by default, as `paddle.profiler` does."""

SECOND_NS = 10**9
MOST_SAMPLES = 10**18
"""The largest number of samples of a step. Larger numbers, such as infinity, are ignored."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean, least, most and percentiles of counted values. Percentiles are within 0.8 %, or None."""

    mean: float
    least: float
    most: float
    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """The costs of the steps of one loop, in ns. `reader` is None if no step waited for a loader.

    `rate` is in samples per second, or in steps per second if any step had no samples (`samples` is None). Its mean is
    all samples divided by all time. `cut` steps cross an edge of the window; no other field counts them. `batch` and
    `rate` are None without any timed step.
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
    """The counts of a running loop's steps, in constant memory. `cut` counts steps that are not complete.

    With `keeps`, the first `FIRST_KEPT` steps are kept, so that `skipping` can leave out another number of them.
    `batch` and `reader` are times in ns. `reader` counts each timed step, with 0 for a step without a wait.
    """

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

    def add(self, batch_ns: int, reader_ns: int, num_samples: float | None) -> None:
        """Count a step that has ended. Its reader time is included in its batch time."""
        if self.keeps:
            self._keep(batch_ns, reader_ns, num_samples)
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

    def _keep(self, batch_ns: int, reader_ns: int, num_samples: float | None) -> None:
        if len(self._firsts) < FIRST_KEPT:
            self._firsts.append((batch_ns, reader_ns, num_samples))
            return
        if self._later is None:
            self._later = Benchmark(skip=0)
        self._later.add(batch_ns, reader_ns, num_samples)

    def skipping(self, skip: int) -> Benchmark:
        """Return the counts without the first `skip` steps, at most `FIRST_KEPT`. `keeps` must be set."""
        benchmark = Benchmark(skip=0) if self._later is None else deepcopy(self._later)
        benchmark.skip = min(skip, FIRST_KEPT)
        for first in self._firsts:
            benchmark.add(*first)
        return benchmark

    def loop(self, name: str = "steps", lasted_ns: int = 0) -> LoopTimes:
        """Return the costs so far. `lasted_ns` is the elapsed time of all steps, by default the sum of their times."""
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
            reader=_spread(self.reader) if self.reader.sum_ns else None,
            batch=_spread(batch),
            rate=rate,
        )


def _spread(times: Distribution) -> Spread | None:
    if not times.count:
        return None
    p50_ns, p99_ns = percentiles(times.buckets, (0.5, 0.99), times.count, times.least_ns, times.most_ns)
    return Spread(times.sum_ns / times.count, times.least_ns, times.most_ns, p50_ns, p99_ns)
