"""Counters of a running loop's steps, in constant memory: the duration of each step, and its wait for input.

`report.loops` prints them. `report.benchmark_view` counts the steps of a saved trace with the same counters.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field

from instrument.recording.distributions import Distribution, percentiles

FIRST_KEPT = 1000
"""The number of first steps that are kept one by one, so that a later report can leave them out. They take 0.1 MB."""

SKIPPED_STEPS = 10
"""The number of first steps that a `Profiler` leaves out of its averages by default, as `paddle.profiler` does."""

SECOND_NS = 10**9
MOST_SAMPLES = 10**18
"""The largest accepted number of samples of a step. Larger numbers, such as infinity, are ignored."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean, minimum, maximum and percentiles of some values. Percentiles are exact to 0.8 %, or None."""

    mean: float
    least: float
    most: float
    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """The times of the steps of one loop, in ns. `reader` is the wait for input, None if no step waited for a loader.

    `rate` is in samples per second, or in steps per second if a step had no samples (`samples` is None then). Its mean
    is all samples divided by all time. `cut` counts the steps that cross an edge of the window, which no other field
    includes. `batch` and `rate` are None if no step was timed.
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
    """The counters of a running loop's steps. `cut` counts steps that are not complete.

    `batch` has the times of steps in ns, and `reader` the waits for input within them, 0 for a step without a wait. If
    `keeps` is True, the first `FIRST_KEPT` steps are also kept one by one, so that `skipping` can leave some of them
    out.
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
        """Count a step that has ended. `reader_ns` is the part of `batch_ns` in which it waited for input."""
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
        """Return the counts without the first `skip` steps, up to `FIRST_KEPT`. This needs `keeps`."""
        benchmark = Benchmark(skip=0) if self._later is None else deepcopy(self._later)
        benchmark.skip = min(skip, FIRST_KEPT)
        for first in self._firsts:
            benchmark.add(*first)
        return benchmark

    def loop(self, name: str = "steps", lasted_ns: int = 0) -> LoopTimes:
        """Return the times so far. `lasted_ns` is the elapsed time of all steps, by default the sum of their times."""
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
