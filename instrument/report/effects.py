"""The effect of a change on like work: the difference of two samples that are matched by their work, and its interval.

Calls are matched by strata of their covariates, such as sizes and the load at their begin: half a power of two each. A
stratum counts if both sides have calls of it, by the smaller of both counts. One slope per covariate removes the rest
of its influence within a stratum. Slopes are fitted within the sides, so that they do not absorb the sides' difference.
Effects are of logarithms, hence of typical calls: a slowdown by a share is equal for short and long calls, and a few
preempted calls count little. Tails show in percentiles.

Neighbouring calls are correlated, so calls are no units of a test. The units are blocks of calls in the order of time,
up to 16 per side, or runs if each side has three or more. Blocks are joined. The remaining correlation between them
widens the interval, by the variance of the mean of a first-order autoregression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import InstrumentError
from instrument.trace.columns import Int64s
from instrument.trace.groups import numbered

Floats = NDArray[np.float64]

LEAST_CALLS = 200
"""The least number of like calls per side. With fewer, blocks of correlated calls are too short to be units."""

LEAST_OF_STRATUM = 5
"""The least number of calls per side in a stratum."""

MOST_BLOCKS, LEAST_BLOCKS = 16, 8
LEAST_RUNS = 3
"""The least number of runs per side for runs as units."""

CORRELATED = 0.3
"""The correlation of neighbouring blocks above which two blocks become one."""

EXTRA = "instrument-sdk[compare]"

MOST_LOGARITHM = 50.0
"""The largest logarithm of a limit. Nothing is known beyond it."""

POWER = 0.9
"""The probability of detecting a change of the smallest detectable size."""


@dataclass(frozen=True, slots=True)
class CallSample:
    """Calls of one side in the order of their begins: `values_ns`, and per call its `covariates` and its `run`.

    `covariates` has a row per covariate, without negative values.
    """

    values_ns: Floats
    covariates: Floats
    run: Int64s

    def only(self, chosen: NDArray[np.bool_]) -> CallSample:
        """Return the sample of the chosen calls."""
        return CallSample(self.values_ns[chosen], self.covariates[:, chosen], self.run[chosen])


@dataclass(frozen=True, slots=True)
class Effect:
    """The change of like work: the difference of logarithms, its standard error, and the degrees of freedom.

    `calls` are the matched ones of each side, `matched_ratio` is their share of the time after.
    """

    difference: float
    error: float
    freedom: float
    calls: tuple[int, int]
    matched_ratio: float

    @property
    def ratio(self) -> float:
        """The change as a share of the work's time before."""
        return math.expm1(self.difference)

    def interval(self, level: float) -> tuple[float, float]:
        """Return the limits of the change. `level` is the probability that it is outside of them (Welch's t)."""
        width = -self.error * float(special().stdtrit(self.freedom, level / 2))
        return math.expm1(self.difference - width), math.expm1(min(self.difference + width, MOST_LOGARITHM))

    def detectable(self, level: float) -> float:
        """Return the smallest change that is detected with the probability `POWER`."""
        width = -self.error * float(sum(special().stdtrit(self.freedom, [level / 2, 1 - POWER])))
        return math.expm1(min(width, MOST_LOGARITHM))


def special() -> Any:
    """Return the functions of scipy, which load faster than its distributions. Raises `InstrumentError` without it."""
    try:
        from scipy import special as functions  # type: ignore[import-untyped]
    except ImportError as problem:
        raise InstrumentError(f"scipy is not installed; install it with: pip install '{EXTRA}'") from problem
    return functions


def _binomial_quantile(ratio: float, count: int, chance: float) -> int:
    """Return the smallest number of successes that is not exceeded with a probability of at least `ratio`."""
    functions = special()
    number: int = math.ceil(functions.bdtrik(ratio, count, chance))
    return number - 1 if number > 0 and functions.bdtr(number - 1, count, chance) >= ratio else number


def p99_limits(values: Int64s) -> tuple[int | None, int | None]:
    """Return two of the values, between which the 99th percentile is with 95 %, None if no value is a limit.

    The limits hold for values that are independent. There is no upper limit below some 370 values.
    """
    if not len(values):
        return None, None
    count, ordered = len(values), np.sort(values)
    low, high = _binomial_quantile(0.025, count, 0.99) - 1, _binomial_quantile(0.975, count, 0.99)
    return int(ordered[low]) if low >= 0 else None, int(ordered[high]) if high < count else None


class _Matched:
    """The like calls of both sides: by side the stratum and the value of each call, in the order of time."""

    def __init__(self, before: CallSample, after: CallSample) -> None:
        of_call, count = _strata(before, after)
        sizes = [np.bincount(places, minlength=count) for places in of_call]
        self.both = np.minimum(*sizes)
        is_common = self.both >= LEAST_OF_STRATUM
        self.samples = [sample.only(is_common[places]) for sample, places in zip((before, after), of_call, strict=True)]
        self.places = [places[is_common[places]] for places in of_call]
        self.sizes = [np.where(is_common, size, 0) for size in sizes]
        self.both = np.where(is_common, self.both, 0)

    def means(self, values: Sequence[Floats]) -> list[Floats]:
        """Return the mean of each stratum on each side, 0 for one without calls."""
        return [
            _means(places, numbers, size) for places, numbers, size in zip(self.places, values, self.sizes, strict=True)
        ]

    def centered(self, values: Sequence[Floats]) -> list[Floats]:
        """Return the values less the mean of their stratum on their side."""
        means = self.means(values)
        return [numbers - mean[places] for numbers, mean, places in zip(values, means, self.places, strict=True)]

    def without_slopes(self, values: list[Floats]) -> list[Floats]:
        """Return the values adjusted to the mean covariates of their stratum on both sides."""
        for_each = [
            [np.log1p(column) for column in columns]
            for columns in zip(*(s.covariates for s in self.samples), strict=True)
        ]
        columns = [np.concatenate(self.centered(columns)) for columns in for_each]
        some = [at for at, column in enumerate(columns) if float(column @ column) > 1e-6 * len(column)]
        if not some:
            return values
        explained = np.array([columns[at] for at in some]).T
        slopes = np.linalg.lstsq(explained, np.concatenate(self.centered(values)), rcond=None)[0]
        for slope, at in zip(slopes.tolist(), some, strict=True):
            first, second = self.means(for_each[at])
            values = [
                numbers - slope * (column - (first + second)[places] / 2)
                for numbers, column, places in zip(values, for_each[at], self.places, strict=True)
            ]
        return values


def effect(before: CallSample, after: CallSample) -> Effect | None:
    """Return the change of like work from one sample to the other, None with too few like calls on both sides."""
    matched = _Matched(before, after)
    calls = len(matched.places[0]), len(matched.places[1])
    spent_ns = float(after.values_ns.sum())
    if min(calls) < LEAST_CALLS or spent_ns <= 0:
        return None
    first, second = matched.means([sample.values_ns for sample in matched.samples])
    weight = matched.both * (first + second)
    if not weight.any():
        return None
    weight /= weight.sum()
    values = matched.without_slopes([np.log1p(sample.values_ns) for sample in matched.samples])
    first, second = matched.means(values)
    has_runs = min(len(np.unique(sample.run)) for sample in matched.samples) >= LEAST_RUNS
    variances, freedoms = [], []
    for side, numbers in enumerate(matched.centered(values)):
        influence = (weight / np.maximum(matched.sizes[side], 1))[matched.places[side]] * numbers
        run = np.unique(matched.samples[side].run, return_inverse=True)[1]
        variance, freedom = (
            _variance(np.bincount(run, influence).astype(np.float64)) if has_runs else _variance_by_blocks(influence)
        )
        variances.append(variance)
        freedoms.append(freedom)
    variance = sum(variances)
    freedom = variance**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True)) if variance else 1.0
    share = float(matched.samples[1].values_ns.sum()) / spent_ns
    return Effect(float(weight @ (second - first)), float(np.sqrt(variance)), freedom, calls, share)


def _strata(before: CallSample, after: CallSample) -> tuple[tuple[Int64s, Int64s], int]:
    """Return the stratum of each call of both sides, and the number of strata."""
    covariates = np.concatenate([before.covariates, after.covariates], axis=1)
    bins = np.floor(2 * np.log2(1 + covariates)).astype(np.int64)
    numbers, firsts = numbered(np.zeros(covariates.shape[1], dtype=np.int64), *bins)
    count = len(before.values_ns)
    return (numbers[:count], numbers[count:]), len(firsts)


def _means(places: Int64s, values: Floats, sizes: Int64s) -> Floats:
    sums = np.bincount(places, values, minlength=len(sizes)).astype(np.float64)
    return sums / np.maximum(sizes, 1)


def _variance(sums: Floats) -> tuple[float, float]:
    """Return the variance of the sum of independent parts, and its degrees of freedom."""
    deviations = sums - sums.mean()
    return len(sums) / (len(sums) - 1) * float(deviations @ deviations), len(sums) - 1.0


def _variance_by_blocks(influence: Floats) -> tuple[float, float]:
    """Return the same for calls in the order of time, with correlated neighbours."""
    blocks = MOST_BLOCKS
    while True:
        edges = np.linspace(0, len(influence), blocks + 1).astype(np.int64)[:-1]
        sums: Floats = np.add.reduceat(influence, edges).astype(np.float64)
        deviations = sums - sums.mean()
        squares = float(deviations @ deviations)
        alike = float(deviations[1:] @ deviations[:-1]) / squares + 1 / blocks if squares else 0.0
        if alike < CORRELATED or blocks <= LEAST_BLOCKS:
            break
        blocks //= 2
    variance, freedom = _variance(sums)
    alike = min(max(alike, 0.0), 0.8)
    return variance * (1 + alike) / (1 - alike), freedom
