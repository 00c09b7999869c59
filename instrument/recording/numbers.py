"""The service's own numbers in a recording: gauges, counters and histograms.

A cell has a name, a unit and a kind, each on a line. A histogram has a cell of its sum, and one for each bucket in use,
whose value is the count. A reader adds the names of gauges to `GAUGES`, with which all readings are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ldexp

from instrument.recording.distributions import COUNTER, GAUGE, HISTOGRAM, MOST_SUM, Distribution, Metric
from instrument.recording.histogram import bucket
from instrument.recording.spans import GAUGES, HOST, Gauge, Sample
from instrument.runtime.cheap_start import NamedTuple

NAME_BYTES = 112
SUM = "sum"
OWN_GAUGES = 2_000
"""The most names of numbers that a process knows."""

LARGEST = 9e9
"""The largest value of a bucket's middle, so that it fits 64 bits in units of 1e-9."""

NANO = 10**9
"""Distributions count values in units of 1e-9."""


class Cell(NamedTuple):
    """A cell: what it is of, when it was written, and its value. `kind` is `gauge`, `counter`, `sum` or a bucket."""

    name: str
    unit: str
    kind: str
    at_ns: int
    value: float


def cell_name(name: str, unit: str, kind: str) -> bytes:
    """Return the bytes by which a cell is known."""
    return f"{name}\n{unit}\n{kind}".encode()


def fits(name: str, unit: str) -> bool:
    """Return True for a name and a unit for which a cell has room."""
    is_text = bool(name) and name.isprintable() and unit.isprintable()
    return is_text and len(cell_name(name, unit, str(ZERO))) < NAME_BYTES


def middle_of(bucket: int) -> float:
    """Return the middle of a bucket: four for a factor of two, one for all up to 0."""
    return 0.0 if bucket == ZERO else ldexp(((bucket & 7) + 0.5) / 8, bucket >> 3)


ZERO = -(1 << 20)


def cell_of(name: bytes, at_ns: int, value: float) -> Cell | None:
    """Return a cell, None for one that no number of ours has written."""
    parts = name.decode("utf-8", "replace").rstrip("\0").split("\n")
    if len(parts) != 3 or not parts[0] or at_ns <= 0 or value != value:
        return None
    return Cell(parts[0], parts[1], parts[2], at_ns, value)


def samples_of(
    former: Sequence[Cell], newest: Sequence[Cell], *, since_ns: int = 0, until_ns: int = 1 << 62
) -> list[Sample]:
    """Return the readings of gauges, counters and sums between two times, with their names made known."""
    samples = []
    for cell in (*former, *newest):
        if cell.kind not in (GAUGE, COUNTER, SUM) or not since_ns <= cell.at_ns < until_ns:
            continue
        name = f"{cell.name}.sum" if cell.kind == SUM else cell.name
        if note_gauge(name, cell.unit, grows=cell.kind != GAUGE):
            samples.append(Sample(name, HOST, cell.at_ns, cell.value))
    return list(dict.fromkeys(samples))


def note_gauge(name: str, unit: str, *, grows: bool) -> bool:
    """Make a number's name known. Return False if another gauge has the name, or if too many names are known."""
    if name not in GAUGES and len(GAUGES) < OWN_GAUGES:
        GAUGES[name] = Gauge(unit, GROWS if grows else ABOUT, grows)
    return is_own(name)


ABOUT, GROWS = "a number of the service's own", "a number of the service's own, which grows"


def note_written(gauges: Mapping[object, object]) -> None:
    """Make the names of numbers known that a file has, with their units and descriptions as one text."""
    for name, text in gauges.items():
        for about in (ABOUT, GROWS):
            if isinstance(name, str) and isinstance(text, str) and text.endswith(f" {about}"):
                note_gauge(name, text.removesuffix(f" {about}"), grows=about == GROWS)


def is_own(name: str) -> bool:
    """Return True for the name of a number that a reader has met."""
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
