"""Histograms of times: the definition of their buckets and percentiles.

A histogram maps the index of a bucket to the number of calls in it, without empty buckets.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence


def bucket(value_ns: int) -> int:
    """Return the index of the histogram bucket of a value.

    Each integer below 128 has a bucket of its own. From 128 on, each power of two has 64 buckets of equal width. A
    bucket's middle is at most 1/128 (0.78 %) away from any value in it.
    """
    exponent = value_ns.bit_length() - 7
    return value_ns if exponent <= 0 else (exponent << 6) + (value_ns >> exponent)


LONGEST_NS = (1 << 63) - 1
"""The largest time that a histogram counts, in ns: the largest signed 64-bit number."""

LAST_BUCKET = bucket(LONGEST_NS)


def bucket_start(index: int) -> int:
    """Return the lowest value of a bucket."""
    if index < 128:
        return index
    exponent = (index >> 6) - 1
    return (index - (exponent << 6)) << exponent


def bucket_middle(index: int) -> int:
    """Return the middle of a bucket, rounded down."""
    return bucket_start(index) + (0 if index < 128 else 1 << ((index >> 6) - 1) >> 1)


def percentiles(
    histogram: Mapping[int, int], fractions: Sequence[float], calls: int, min_ns: int, max_ns: int
) -> list[int | None]:
    """Return the percentiles of a histogram in ns, for instance p50, p90 and p99; None without calls.

    A percentile is the middle of the bucket with the nearest rank, clipped to the exact extremes. So it is within 0.78
    % of the exact percentile by nearest rank.
    """
    buckets = sorted(histogram)
    ranks = list(itertools.accumulate(map(histogram.__getitem__, buckets)))
    times_ns: list[int | None] = []
    for fraction in fractions:
        at = bisect.bisect_left(ranks, _rank(fraction, calls))
        middle_ns = bucket_middle(buckets[at]) if at < len(buckets) else max_ns
        times_ns.append(min(max(middle_ns, min_ns), max_ns) if calls else None)
    return times_ns


def percentiles_of(values: Sequence[int], fractions: Sequence[float]) -> list[int]:
    """Return the percentiles of sorted times, at least one, without a histogram."""
    middles_ns = (bucket_middle(bucket(values[_rank(fraction, len(values)) - 1])) for fraction in fractions)
    return [min(max(middle_ns, values[0]), values[-1]) for middle_ns in middles_ns]


def _rank(fraction: float, calls: int) -> int:
    """Return the rank, from 1, of the call at a fraction. Rounding removes the noise of floats."""
    return max(1, math.ceil(round(fraction * calls, 6)))
