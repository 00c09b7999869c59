"""Histograms of durations, with the definition of their buckets and percentiles, and the metrics made from them.

A histogram maps the index of a bucket to the number of calls in it. The middle of a bucket is at most 1/128 (0.78 %)
away from any value in it. A `Distribution` is a histogram with the exact count, sum, minimum and maximum. A `Metric`
has a value or a distribution for each set of labels.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from instrument.runtime.lazy_imports import dataclass, field, replace


def bucket_of(value_ns: int) -> int:
    """Return the index of the histogram bucket that counts a value.

    Each integer below 128 has its own bucket. From there on, each power of two has 64 buckets of equal width. So the
    middle of a bucket is at most 1/128 (0.78 %) away from any value in it.
    """
    exponent = value_ns.bit_length() - 7
    return value_ns if exponent <= 0 else (exponent << 6) + (value_ns >> exponent)


LONGEST_NS = (1 << 63) - 1

LAST_BUCKET = bucket_of(LONGEST_NS)


def bucket_start(index: int) -> int:
    if index < 128:
        return index
    exponent = (index >> 6) - 1
    return (index - (exponent << 6)) << exponent


def bucket_middle(index: int) -> int:
    return bucket_start(index) + (0 if index < 128 else 1 << ((index >> 6) - 1) >> 1)


def percentiles(
    histogram: Mapping[int, int], fractions: Sequence[float], calls: int, min_ns: int, max_ns: int
) -> list[int | None]:
    """Return the percentiles of a histogram in ns, for fractions such as 0.5, 0.9 and 0.99. They are None without
    calls. A percentile is the middle of the bucket at its nearest rank, but at least `min_ns` and at most `max_ns`."""
    buckets = sorted(histogram)
    ranks = list(itertools.accumulate(map(histogram.__getitem__, buckets)))
    times_ns: list[int | None] = []
    for fraction in fractions:
        at = bisect.bisect_left(ranks, _nearest_rank(fraction, calls))
        middle_ns = bucket_middle(buckets[at]) if at < len(buckets) else max_ns
        times_ns.append(min(max(middle_ns, min_ns), max_ns) if calls else None)
    return times_ns


def percentiles_of_times(values: Sequence[int], fractions: Sequence[float]) -> list[int]:
    """Return the percentiles of sorted times, rounded to the middles of histogram buckets."""
    middles_ns = (bucket_middle(bucket_of(values[_nearest_rank(fraction, len(values)) - 1])) for fraction in fractions)
    return [min(max(middle_ns, values[0]), values[-1]) for middle_ns in middles_ns]


def _nearest_rank(fraction: float, calls: int) -> int:
    """Return the rank of a percentile among sorted calls, from 1. Rounding removes floating-point errors."""
    return max(1, math.ceil(round(fraction * calls, 6)))


Value = str | int | bool
Labels = tuple[tuple[str, Value], ...]
"""The labels of a metric's series: pairs of an OpenTelemetry attribute name and a value."""

SERIES_LIMIT = 2_000
"""The maximum number of series per metric, as in OpenTelemetry's SDKs. Further label sets share one series."""

OVERFLOW: Labels = (("otel.metric.overflow", True),)
"""The labels of the series for all label sets beyond `SERIES_LIMIT`."""

OTHER = "other"
"""The group of requests beyond the maximum number of groups."""

ONE = 10**9
"""The number 1 in units of 1e-9, the unit of a distribution's values."""

LARGEST_SUM = 10**200
"""The largest sum in a distribution, in units of 1e-9."""


@dataclass(slots=True)
class Distribution:
    """A histogram of durations with their exact count and sum. If `count` is 0, `least_ns` and `most_ns` are
    invalid."""

    count: int = 0
    sum_ns: int = 0
    least_ns: int = 0
    most_ns: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value_ns: int) -> None:
        self.least_ns = min(self.least_ns, value_ns) if self.count else value_ns
        self.most_ns = max(self.most_ns, value_ns)
        self.count += 1
        self.sum_ns += value_ns
        index = bucket_of(value_ns)
        self.buckets[index] = self.buckets.get(index, 0) + 1

    def add_buckets(self, more: Mapping[int, int]) -> None:
        """Count durations from buckets alone. Each duration counts as the lowest value of its bucket."""
        for index, count in more.items():
            start_ns = bucket_start(index)
            self.add_distribution(Distribution(count, count * start_ns, start_ns, start_ns, {index: count}))

    def add_later_calls(self, now: Distribution) -> None:
        """Add the new calls in `now`, a later state of this distribution."""
        calls_left = now.count - self.count
        for index, count in now.buckets.items():
            more = min(count - self.buckets.get(index, 0), calls_left)
            if more > 0:
                calls_left -= more
                self.count += more
                self.buckets[index] = self.buckets.get(index, 0) + more
        self.sum_ns = max(self.sum_ns, now.sum_ns)
        self.least_ns, self.most_ns = now.least_ns, now.most_ns

    def add_distribution(self, other: Distribution) -> None:
        if other.count:
            self.least_ns = min(self.least_ns, other.least_ns) if self.count else other.least_ns
            self.most_ns = max(self.most_ns, other.most_ns)
            self.count += other.count
            self.sum_ns += other.sum_ns
            for index, count in other.buckets.items():
                self.buckets[index] = self.buckets.get(index, 0) + count

    def copy(self) -> Distribution:
        return Distribution(self.count, self.sum_ns, self.least_ns, self.most_ns, dict(self.buckets))

    def subtract_state(self, before: Distribution) -> Distribution:
        """Return the calls since the earlier state `before`. Their minimum and maximum are unknown."""
        more = {index: count - before.buckets.get(index, 0) for index, count in self.buckets.items()}
        return Distribution(
            self.count - before.count,
            self.sum_ns - before.sum_ns,
            buckets={index: count for index, count in more.items() if count},
        )


def group_name_of(value: object) -> str | None:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return str(value) if isinstance(value, str | int | float) else None


MOST_EXEMPLARS = 8
"""The maximum number of exemplars per series. Those of the longest calls are kept."""


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A call whose trace was sampled, as an example in a histogram. `at_ns` is the call's end, `kept_ns` the time of
    the sampling decision."""

    value_ns: int
    at_ns: int
    kept_ns: int
    trace_id: int
    span_id: int


class Exemplars:
    """The exemplars of one series, at most one per range of durations. A range begins at a power of two. The newest
    call in a range is kept."""

    __slots__ = ("_newest",)

    def __init__(self) -> None:
        self._newest: dict[int, Exemplar] = {}

    def add(self, exemplar: Exemplar) -> None:
        self._newest[exemplar.value_ns.bit_length()] = exemplar
        if len(self._newest) > MOST_EXEMPLARS:
            del self._newest[min(self._newest)]

    def all(self) -> tuple[Exemplar, ...]:
        return tuple(self._newest[length] for length in sorted(self._newest))


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, with a value for each set of labels (series). `kind` is `counter`, `updown`, `gauge` or `histogram`.
    The values of a histogram are distributions, which may have exemplars."""

    name: str
    unit: str
    kind: str
    description: str
    series: Mapping[Labels, float | Distribution]
    exemplars: Mapping[Labels, tuple[Exemplar, ...]] = field(default_factory=dict)


def sum_metrics(metrics: Iterable[Metric]) -> list[Metric]:
    sums_by_name: dict[str, tuple[Metric, dict[Labels, float | Distribution], dict[Labels, Exemplars]]] = {}
    for metric in metrics:
        _, series, exemplars = sums_by_name.setdefault(metric.name, (metric, {}, {}))
        for labels, value in metric.series.items():
            place = labels if labels in series or len(series) < SERIES_LIMIT else OVERFLOW
            total = series.get(place)
            if isinstance(value, Distribution):
                if not isinstance(total, Distribution):
                    total = series[place] = Distribution()
                total.add_distribution(value)
            else:
                series[place] = value + (total if isinstance(total, int | float) else 0)
            for exemplar in metric.exemplars.get(labels, ()):
                exemplars.setdefault(place, Exemplars()).add(exemplar)
    return [
        replace(metric, series=series, exemplars={labels: candidates.all() for labels, candidates in exemplars.items()})
        for metric, series, exemplars in sums_by_name.values()
    ]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The metrics of a process, counted from `start_ns` to `at_ns` on the monotonic clock."""

    start_ns: int
    at_ns: int
    metrics: tuple[Metric, ...]


class Histograms:
    """The distributions of a process by metric name and labels, with their exemplars."""

    series_limit = SERIES_LIMIT

    def __init__(self) -> None:
        self._series: dict[str, dict[Labels, Distribution]] = {}
        self._exemplars: dict[str, dict[Labels, Exemplars]] = {}

    def limit_series(self, name: str, labels: Labels) -> Labels:
        """Return the labels under which to count a value. Return `OVERFLOW` if the metric has too many series."""
        series = self._series.setdefault(name, {})
        if labels not in series and len(series) >= self.series_limit:
            labels = OVERFLOW
        series.setdefault(labels, Distribution())
        return labels

    def distribution_of(self, name: str, labels: Labels) -> Distribution:
        place = self.limit_series(name, labels)
        return self._series[name][place]

    def add(self, name: str, labels: Labels, value: int) -> None:
        """Count one value: a time in ns, or another number in units of 1e-9."""
        self.distribution_of(name, labels).add(max(value, 0))

    def add_exemplar(self, name: str, labels: Labels, exemplar: Exemplar) -> bool:
        series = self.series(name)
        place = labels if labels in series else OVERFLOW
        if place in series:
            self._exemplars.setdefault(name, {}).setdefault(place, Exemplars()).add(exemplar)
        return place in series

    def series(self, name: str) -> Mapping[Labels, Distribution]:
        return self._series.get(name, {})

    def copy_series(self, name: str) -> tuple[dict[Labels, Distribution], dict[Labels, tuple[Exemplar, ...]]]:
        exemplars = {labels: of_series.all() for labels, of_series in self._exemplars.get(name, {}).items()}
        return {labels: distribution.copy() for labels, distribution in self.series(name).items()}, exemplars

    def state(self) -> dict[str, list[tuple[Labels, Distribution]]]:
        """Return all distributions, without exemplars."""
        return {name: [*series.items()] for name, series in self._series.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Iterable[tuple[Labels, Distribution]]]) -> Histograms:
        histograms = cls()
        histograms._series = {name: dict(series) for name, series in state.items()}
        return histograms
