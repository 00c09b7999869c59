"""Histograms of times, the one definition of them: which bucket holds a time, how they merge, what a percentile is.

A histogram is a mapping from the index of a bucket to the calls in it, without buckets that have none. Which
percentiles are shown, each table says for itself.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence


def bucket(value_ns: int) -> int:
    """Index of the histogram bucket that holds a value.

    Below 128 every integer has a bucket of its own; above, each power of two is cut into 64 buckets of equal
    width, so that a bucket's middle is at most 1/128 (0.78 %) away from any value in it.
    """
    exponent = value_ns.bit_length() - 7
    return value_ns if exponent <= 0 else (exponent << 6) + (value_ns >> exponent)


LONGEST_NS = (1 << 63) - 1
"""The longest time that there is."""

LAST_BUCKET = bucket(LONGEST_NS)


def bucket_start(index: int) -> int:
    """The lowest value of a bucket."""
    if index < 128:
        return index
    exponent = (index >> 6) - 1
    return (index - (exponent << 6)) << exponent


def bucket_middle(index: int) -> int:
    """The value that stands for a bucket: its middle, rounded down."""
    return bucket_start(index) + (0 if index < 128 else 1 << ((index >> 6) - 1) >> 1)


def percentiles(
    histogram: Mapping[int, int], fractions: Sequence[float], calls: int, min_ns: int, max_ns: int
) -> list[int | None]:
    """p50, p90, p99 and the like, of every table: the times in ns below which those fractions of the calls lie.

    Nearest rank over the log-bucketed histogram: the middle of the bucket in which the call of that rank lies, kept
    inside the exact minimum and maximum. So a percentile is within 0.78 % of the exact one by nearest rank. None
    without calls.
    """
    buckets = sorted(histogram)
    seen = list(itertools.accumulate(map(histogram.__getitem__, buckets)))
    found: list[int | None] = []
    for fraction in fractions:
        at = bisect.bisect_left(seen, _rank(fraction, calls))
        within = bucket_middle(buckets[at]) if at < len(buckets) else max_ns
        found.append(min(max(within, min_ns), max_ns) if calls else None)
    return found


def percentiles_of(values: Sequence[int], fractions: Sequence[float]) -> list[int]:
    """The `percentiles` of times that are at hand, at least one, in order; without a histogram of them."""
    at = (bucket_middle(bucket(values[_rank(fraction, len(values)) - 1])) for fraction in fractions)
    return [min(max(within, values[0]), values[-1]) for within in at]


def _rank(fraction: float, calls: int) -> int:
    """The rank, from 1, of the call at a fraction; a product that is whole but for the noise of floats is whole."""
    return max(1, math.ceil(round(fraction * calls, 6)))
