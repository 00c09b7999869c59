"""The service's own numbers in a recording: gauges, counters and histograms.

A number has a cell with its value. A histogram has a cell with its sum, and a cell with the count of each bucket in
use. A reader adds the names of numbers to `GAUGES`, from which reports take units and descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ldexp

from instrument.recording.distributions import COUNTER, GAUGE, HISTOGRAM, MOST_SUM, Distribution, Metric, bucket
from instrument.recording.spans import GAUGES, HOST, Gauge, Sample
from instrument.runtime.cheap_start import NamedTuple

NAME_BYTES = 112
SUM = "sum"
OWN_GAUGES = 2_000
"""The maximum number of names in `GAUGES`, with those of the service's numbers."""

LARGEST = 9e9
"""The largest value of a bucket's middle: in units of 1e-9 it fits 64 bits."""

NANO = 10**9
"""The number 1 in a distribution, whose unit is 1e-9."""


class Cell(NamedTuple):
    """A value of a number, and the time at which it was written. `kind` is `gauge`, `counter`, `sum` or a bucket."""

    name: str
    unit: str
    kind: str
    at_ns: int
    value: float


def cell_name(name: str, unit: str, kind: str) -> bytes:
    """Return the key of a cell: name, unit and kind, each on a line."""
    return f"{name}\n{unit}\n{kind}".encode()


def fits(name: str, unit: str) -> bool:
    """Return True if a name and a unit fit into a cell."""
    is_text = bool(name) and name.isprintable() and unit.isprintable()
    return is_text and len(cell_name(name, unit, str(ZERO))) < NAME_BYTES


def middle_of(bucket: int) -> float:
    """Return the middle of a bucket: four for a factor of two, one for all up to 0."""
    return 0.0 if bucket == ZERO else ldexp(((bucket & 7) + 0.5) / 8, bucket >> 3)


ZERO = -(1 << 20)


def cell_of(name: bytes, at_ns: int, value: float) -> Cell | None:
    """Return a cell from its key, None for an invalid key."""
    parts = name.decode("utf-8", "replace").rstrip("\0").split("\n")
    if len(parts) != 3 or not parts[0] or at_ns <= 0 or value != value:
        return None
    return Cell(parts[0], parts[1], parts[2], at_ns, value)


def samples_of(
    former: Sequence[Cell], newest: Sequence[Cell], *, since_ns: int = 0, until_ns: int = 1 << 62
) -> list[Sample]:
    """Return the readings of gauges, counters and sums between two times, and add their names to `GAUGES`."""
    samples = []
    for cell in (*former, *newest):
        if cell.kind not in (GAUGE, COUNTER, SUM) or not since_ns <= cell.at_ns < until_ns:
            continue
        name = f"{cell.name}.sum" if cell.kind == SUM else cell.name
        if note_gauge(name, cell.unit, grows=cell.kind != GAUGE):
            samples.append(Sample(name, HOST, cell.at_ns, cell.value))
    return list(dict.fromkeys(samples))


def note_gauge(name: str, unit: str, *, grows: bool) -> bool:
    """Add a number to `GAUGES`. Return False if another gauge has the name, or if there are too many names."""
    if name not in GAUGES and len(GAUGES) < OWN_GAUGES:
        GAUGES[name] = Gauge(unit, GROWS if grows else ABOUT, grows)
    return is_own(name)


ABOUT, GROWS = "a number of the service's own", "a number of the service's own, which grows"


def learn_gauges(gauges: Mapping[object, object]) -> None:
    """Add the numbers of a file to `GAUGES`. Each has its unit and description in one text."""
    for name, text in gauges.items():
        for about in (ABOUT, GROWS):
            if isinstance(name, str) and isinstance(text, str) and text.endswith(f" {about}"):
                note_gauge(name, text.removesuffix(f" {about}"), grows=about == GROWS)


def is_own(name: str) -> bool:
    """Return True for the name of one of the service's numbers in `GAUGES`."""
    return name in GAUGES and GAUGES[name].about in (ABOUT, GROWS)


def metrics_of(cells: Iterable[Cell]) -> list[Metric]:
    """Return the counters and histograms of the newest cells."""
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
            index = bucket(int(min(middle_of(int(cell.kind)), LARGEST) * NANO))
            distributions.setdefault(key, Distribution()).add_buckets({index: int(cell.value)})
    for key, distribution in distributions.items():
        distribution.sum_ns = min(int(min(sums.get(key, distribution.sum_ns / NANO), MOST_SUM) * NANO), MOST_SUM)
    histograms = [Metric(*key, HISTOGRAM, ABOUT, {(): distribution}) for key, distribution in distributions.items()]
    return [*counters, *histograms]
