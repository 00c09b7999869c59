"""The effect of a change on similar work: the difference between two samples of calls, with its error limits.

Calls are grouped into strata, in which a covariate, such as the size or load, varies by at most a factor of 1.4. Linear
regression removes the differences that remain. Effects are differences of logarithms, so 10 % counts the same for short
and long calls.

Successive calls are not independent. So the test compares runs, not calls. With fewer than three runs, it compares up
to 16 blocks of successive calls. Blocks that are still correlated are joined, which widens the error limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.errors import InstrumentError
from instrument.trace.columns import Int64s
from instrument.trace.indices import number_combinations, rank_distinct

Floats = NDArray[np.float64]

LEAST_CALLS = 200
"""The minimum number of similar calls in each sample to compare blocks of calls."""

LEAST_OF_STRATUM = 5
"""The minimum number of calls that a stratum must have in each sample to be used."""

ROUNDING = 1e-9
"""The tolerance for rounding errors of logarithms at the edges of strata."""

MOST_BLOCKS, LEAST_BLOCKS = 16, 8
LEAST_RUNS = 3
"""The minimum number of runs in each sample to compare runs instead of blocks of calls."""

CORRELATED = 0.3
"""The correlation of neighbouring blocks above which the blocks are joined in pairs."""

EXTRA = "instrument-sdk[compare]"

MOST_LOGARITHM = 50.0
"""The maximum logarithm of a change, which prevents an overflow of the exponential function."""

POWER = 0.9
"""The probability with which the test detects a change of the smallest detectable size."""


class CallSample(NamedTuple):
    """The calls before or after a change, sorted by start time. `covariates` has a row for each covariate, with the
    `log1p` of a nonnegative number per call."""

    values_ns: Floats
    covariates: Floats
    run: Int64s


@dataclass(frozen=True, slots=True)
class Effect:
    """The change for similar work: a difference of mean logarithms, with its standard error and its degrees of freedom.

    `calls` are the numbers of matched calls before and after. `matched_ratio` is the time of the matched calls after
    the change, as a share of the time of all calls after the change.
    """

    difference: float
    error: float
    freedom: float
    calls: tuple[int, int]
    matched_ratio: float

    @property
    def ratio(self) -> float:
        return math.expm1(self.difference)

    def confidence_limits(self, level: float) -> tuple[float, float]:
        """Return the limits of the change by Welch's t-test. `level` is the probability that the true change is outside
        of the limits."""
        width = -self.error * float(import_scipy_special().stdtrit(self.freedom, level / 2))
        return math.expm1(self.difference - width), math.expm1(min(self.difference + width, MOST_LOGARITHM))

    def smallest_detectable_change(self, level: float) -> float:
        """Return the smallest change that the test detects with the probability `POWER`."""
        width = -self.error * float(sum(import_scipy_special().stdtrit(self.freedom, [level / 2, 1 - POWER])))
        return math.expm1(min(width, MOST_LOGARITHM))


def import_scipy_special() -> Any:
    try:
        from scipy import special as functions  # type: ignore[import-untyped]
    except ImportError as problem:
        raise InstrumentError(f"scipy is not installed; install it with: pip install '{EXTRA}'") from problem
    return functions


def _binomial_quantile(ratio: float, count: int, chance: float) -> int:
    functions = import_scipy_special()
    number: int = math.ceil(functions.bdtrik(ratio, count, chance))
    return number - 1 if number > 0 and functions.bdtr(number - 1, count, chance) >= ratio else number


def estimate_p99_limits(values: Int64s) -> tuple[int | None, int | None]:
    """Return the 95 % confidence limits of the 99th percentile. Values must be independent. With fewer than 370 values,
    the upper limit is None."""
    if not len(values):
        return None, None
    count, ordered = len(values), np.sort(values)
    low, high = _binomial_quantile(0.025, count, 0.99) - 1, _binomial_quantile(0.975, count, 0.99)
    return int(ordered[low]) if low >= 0 else None, int(ordered[high]) if high < count else None


class _LikeCalls:
    """The calls in strata that have calls both before and after a change. `cells` has the number of each call's
    stratum, plus `strata` for calls after the change."""

    def __init__(self, before: CallSample, after: CallSample) -> None:
        covariates = np.concatenate([before.covariates, after.covariates], axis=1)
        covariates = covariates[covariates.min(axis=1) < covariates.max(axis=1)]
        count = len(before.values_ns)
        bins = np.floor(covariates * (2 / math.log(2)) + ROUNDING).astype(np.int64)
        stratum, firsts = number_combinations(np.zeros(covariates.shape[1], dtype=np.int64), *bins)
        self.strata = len(firsts)
        cells = stratum + self.strata * (np.arange(len(stratum)) >= count)
        sizes = np.bincount(cells, minlength=2 * self.strata).reshape(2, -1)
        self.both = np.where(sizes.min(axis=0) < LEAST_OF_STRATUM, 0, sizes.min(axis=0))
        is_like = self.both[stratum] > 0
        self.cells, self.covariates = cells[is_like], covariates[:, is_like]
        self.values = np.concatenate([before.values_ns, after.values_ns])[is_like]
        self.run = np.concatenate([before.run, after.run])[is_like]
        self.sizes = np.maximum(sizes * (self.both > 0), 1)
        first = int(np.count_nonzero(is_like[:count]))
        self.sides = slice(0, first), slice(first, None)

    def mean_by_stratum(self, values: Floats) -> Floats:
        sums = np.bincount(self.cells, values, minlength=2 * self.strata).reshape(2, -1)
        return np.asarray(sums / self.sizes)

    def subtract_means(self, values: Floats) -> Floats:
        return np.asarray(values - self.mean_by_stratum(values).ravel()[self.cells])

    def subtract_covariate_effects(self, values: Floats) -> Floats:
        """Subtract the part of the values that depends linearly on the covariates within each stratum."""
        centered = np.array([self.subtract_means(column) for column in self.covariates])
        squares = centered @ centered.T if len(centered) else centered
        some = np.flatnonzero(np.diagonal(squares) > 1e-6 * len(values)) if len(centered) else ()
        if not len(some):
            return values
        products = centered[some] @ self.subtract_means(values)
        slopes = np.linalg.lstsq(squares[np.ix_(some, some)], products, rcond=1e-12)[0]
        for slope, column in zip(slopes.tolist(), self.covariates[some], strict=True):
            of_stratum = np.tile(self.mean_by_stratum(column).mean(axis=0), 2)
            values = values - slope * (column - of_stratum[self.cells])
        return values


def measure_effect(before: CallSample, after: CallSample) -> Effect | None:
    """Return the change for similar work between two samples. Return None if too few calls are similar."""
    like = _LikeCalls(before, after)
    calls = len(like.values[like.sides[0]]), len(like.values[like.sides[1]])
    spent_ns = float(after.values_ns.sum())
    runs = [rank_distinct(like.run[side]) for side in like.sides]
    has_runs = min(len(numbers) for numbers, _ in runs) >= LEAST_RUNS
    if (min(calls) < LEAST_CALLS and not has_runs) or spent_ns <= 0:
        return None
    weight = like.both * like.mean_by_stratum(like.values).sum(axis=0)
    if not weight.any():
        return None
    weight /= weight.sum()
    values = like.subtract_covariate_effects(np.log1p(like.values))
    means = like.mean_by_stratum(values)
    influence = (weight / like.sizes).ravel()[like.cells] * like.subtract_means(values)
    variances, freedoms = zip(
        *(
            _variance_of_sum(np.bincount(run, part).astype(np.float64)) if has_runs else _variance_by_blocks(part)
            for part, (_, run) in zip([influence[side] for side in like.sides], runs, strict=True)
        ),
        strict=True,
    )
    variance = sum(variances)
    freedom = variance**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True)) if variance else 1.0
    share = float(like.values[like.sides[1]].sum()) / spent_ns
    return Effect(float(weight @ (means[1] - means[0])), float(np.sqrt(variance)), freedom, calls, share)


def _variance_of_sum(sums: Floats) -> tuple[float, float]:
    """Return the variance of a sum of independent terms, and its degrees of freedom."""
    deviations = sums - sums.mean()
    return len(sums) / (len(sums) - 1) * float(deviations @ deviations), len(sums) - 1.0


def _variance_by_blocks(influence: Floats) -> tuple[float, float]:
    """Estimate the variance of a sum over correlated calls from blocks of calls. Return the variance and the degrees of
    freedom."""
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
    variance, freedom = _variance_of_sum(sums)
    alike = min(max(alike, 0.0), 0.8)
    return variance * (1 + alike) / (1 - alike), freedom
