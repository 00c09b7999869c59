"""The gauges, counters and histograms that a service defines itself, as cells in its recording.

A gauge or counter has one cell with its value. A histogram has one cell for its sum, and one for the count of each used
bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ldexp

from instrument.recording.distributions import LARGEST_SUM, ONE, Distribution, Metric, bucket_of
from instrument.recording.metric_definitions import COUNTER, GAUGE, GAUGES, HISTOGRAM, Gauge, MetricDefinition
from instrument.recording.spans import HOST, Sample
from instrument.runtime.cheap_start import NamedTuple

NAME_BYTES = 112
SUM = "sum"
MOST_GAUGES = 2_000
"""The maximum number of names in `GAUGES`. Further metrics of the service are not reported."""

LARGEST_MIDDLE = 9e9
"""The largest middle of a bucket. In units of 1e-9, a larger one would not fit into 64 bits."""


class Cell(NamedTuple):
    """A value of one of the service's own metrics, written at `at_ns`. `kind` is `gauge`, `counter`, `sum` or the
    number of a histogram's bucket."""

    name: str
    unit: str
    kind: str
    at_ns: int
    value: float


def cell_name(name: str, unit: str, kind: str) -> bytes:
    """Return the key of a cell: the metric's name, unit and kind, each on a line."""
    return f"{name}\n{unit}\n{kind}".encode()


def is_valid_cell_name(name: str, unit: str) -> bool:
    """Return True if the name and unit of a metric are valid and fit into a cell."""
    is_text = bool(name) and name.isprintable() and unit.isprintable()
    return is_text and len(cell_name(name, unit, str(ZERO))) < NAME_BYTES


def middle_of(bucket: int) -> float:
    """Return the middle of a histogram's bucket. Each power of two has four buckets. All values up to 0 share one
    bucket."""
    return 0.0 if bucket == ZERO else ldexp(((bucket & 7) + 0.5) / 8, bucket >> 3)


ZERO = -(1 << 20)


def cell_of(name: bytes, at_ns: int, value: float) -> Cell | None:
    parts = name.decode("utf-8", "replace").rstrip("\0").split("\n")
    if len(parts) != 3 or not parts[0] or at_ns <= 0 or value != value:
        return None
    return Cell(parts[0], parts[1], parts[2], at_ns, value)


def samples_of(former: Sequence[Cell], newest: Sequence[Cell], *, since_ns: int = 0) -> list[Sample]:
    """Return the readings of gauges, counters and sums from a time on. Their names are added to `GAUGES`."""
    samples = []
    for cell in (*former, *newest):
        if cell.kind not in (GAUGE, COUNTER, SUM) or cell.at_ns < since_ns:
            continue
        name = f"{cell.name}.sum" if cell.kind == SUM else cell.name
        if add_service_gauge(name, cell.unit, grows=cell.kind != GAUGE):
            samples.append(Sample(name, HOST, cell.at_ns, cell.value))
    return list(dict.fromkeys(samples))


def add_service_gauge(name: str, unit: str, *, grows: bool) -> bool:
    """Add a metric of the service to `GAUGES`. Return False if a gauge of the host or a GPU has that name, or if there
    are too many names."""
    if name not in GAUGES and len(GAUGES) < MOST_GAUGES:
        metrics = () if grows else (MetricDefinition(name, unit),)  # counters and sums are in snapshots
        GAUGES[name] = Gauge(unit, GROWS if grows else ABOUT, metrics, grows, is_own=True)
    return is_service_metric(name)


ABOUT, GROWS = "a number of the service's own", "a number of the service's own, which grows"


def learn_gauges(gauges: Mapping[object, object]) -> None:
    """Add the service's metrics in a file to `GAUGES`. `gauges` maps each metric's name to one text with its unit and
    description."""
    for name, text in gauges.items():
        for about in (ABOUT, GROWS):
            if isinstance(name, str) and isinstance(text, str) and text.endswith(f" {about}"):
                add_service_gauge(name, text.removesuffix(f" {about}"), grows=about == GROWS)


def is_service_metric(name: str) -> bool:
    return name in GAUGES and GAUGES[name].is_own


def metrics_of(cells: Iterable[Cell]) -> list[Metric]:
    """Return the service's counters and histograms as metrics, from the newest cells."""
    counters: list[Metric] = []
    sums: dict[tuple[str, str], float] = {}
    distributions: dict[tuple[str, str], Distribution] = {}
    for cell in cells:
        key = cell.name, cell.unit
        if cell.kind == COUNTER:
            counters.append(Metric(*key, COUNTER, ABOUT, {(): cell.value}))
        elif cell.kind == SUM:
            sums[key] = cell.value
        elif cell.kind.lstrip("-").isdecimal():
            index = bucket_of(int(min(middle_of(int(cell.kind)), LARGEST_MIDDLE) * ONE))
            distributions.setdefault(key, Distribution()).add_buckets({index: int(cell.value)})
    for key, distribution in distributions.items():
        distribution.sum_ns = min(int(min(sums.get(key, distribution.sum_ns / ONE), LARGEST_SUM) * ONE), LARGEST_SUM)
    histograms = [Metric(*key, HISTOGRAM, ABOUT, {(): distribution}) for key, distribution in distributions.items()]
    return [*counters, *histograms]
