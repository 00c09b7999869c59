"""Snapshots of metrics on their way to a collector: the newest one, as totals or as what came since the last delivery.

A failed delivery loses nothing: the next snapshot repeats the totals, or has all that has come since the last delivered
one.

Wall times that were sent do not change. The start of a total stays when the wall clock is set or drifts, or a collector
would assume a restart. A delta begins at the end of the one before it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from instrument.otlp.points import Exponential, Point, Series, exponential
from instrument.recording.distributions import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    Distribution,
    Labels,
    Metric,
    Snapshot,
    labels_told,
    told_labels,
)
from instrument.recording.spans import Origin
from instrument.runtime.cheap_start import dataclass, replace
from instrument.runtime.environment import TEMPORALITY

DELTAS = {"cumulative": (), "delta": (COUNTER, HISTOGRAM), "lowmemory": (HISTOGRAM,)}
"""The kinds of metrics that are sent as deltas, by the preferred temporality, as in OpenTelemetry's exporters. Our
counters are read when they are sent, which `lowmemory` leaves as totals."""


@dataclass(slots=True)
class Piece:
    """The series of one request, the number of their points, and the value of each with its wall time."""

    series: list[Series]
    points: int
    told: dict[tuple[str, Labels], tuple[float | Distribution, int]]


class Snapshots:
    """The newest snapshot. `put` is for one thread, the rest for another; `state` for any.

    The preferred temporality is read from the environment of the process with the metrics.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        temporality = environ.get(TEMPORALITY, "").strip().lower() or "cumulative"
        self._deltas = DELTAS.get(temporality, ())
        self.problem = (
            "" if temporality in DELTAS else f"{TEMPORALITY}: found {temporality!r}; allowed: {', '.join(DELTAS)}"
        )
        self.forget()

    def forget(self) -> None:
        """Forget all that was sent."""
        self._newest: Snapshot | None = None
        self._tried: Snapshot | None = None
        self._delivered: Snapshot | None = None
        self._told: dict[tuple[str, Labels], tuple[float | Distribution, int]] = {}
        self._start_ns = self._start_realtime_ns = self.delivered_ns = 0

    def state(self) -> dict[str, Any]:
        """Return as JSON the state of the collector, for another process that goes on sending."""
        sent = [
            [name, told_labels(labels), value.told() if isinstance(value, Distribution) else value, at_ns]
            for (name, labels), (value, at_ns) in self._told.items()
        ]
        return {
            "start_ns": self._start_ns,
            "start_realtime_ns": self._start_realtime_ns,
            "delivered_ns": self.delivered_ns,
            "told": sent,
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of another exporter. Raise one of `export_checkpoint.DAMAGED` if it is malformed."""
        sent = {
            (str(name), labels_told(labels)): (
                Distribution.of(value) if isinstance(value, list) else float(value),
                int(at_ns),
            )
            for name, labels, value, at_ns in state["told"]
        }
        start_ns, start_realtime_ns = int(state["start_ns"]), int(state["start_realtime_ns"])
        self.delivered_ns = int(state["delivered_ns"])
        self._start_ns, self._start_realtime_ns, self._told = start_ns, start_realtime_ns, sent

    def put(self, snapshot: Snapshot) -> None:
        """Take one on, instead of any before."""
        self._newest = snapshot

    def waits(self) -> bool:
        """Return True if the newest snapshot has not been delivered."""
        return self._newest is not self._delivered

    def due(self) -> bool:
        """Return True if there is a snapshot that nobody has tried to deliver."""
        return self._newest is not self._tried

    def take(self) -> Snapshot | None:
        """Return the snapshot that is to be delivered now, None without one."""
        self._tried = self._newest
        return self._tried if self.waits() else None

    def pieces(self, snapshot: Snapshot, origin: Origin, most_points: int) -> Iterator[Piece]:
        """Yield the parts of a snapshot for a collector, in requests of at most `most_points` points."""
        if self._start_ns != snapshot.start_ns or not self._start_realtime_ns:
            self._start_ns, self._start_realtime_ns = snapshot.start_ns, origin.realtime_of(snapshot.start_ns)
        at_ns = origin.realtime_of(snapshot.at_ns)
        piece = Piece([], 0, {})
        for metric in snapshot.metrics:
            series: Series | None = None
            for labels, value in metric.series.items():
                point = self._point(metric, labels, value, at_ns, origin)
                if point is None:
                    continue
                if piece.points >= most_points:
                    yield piece
                    piece, series = Piece([], 0, {}), None
                if series is None:
                    is_delta = metric.kind in self._deltas
                    series = Series(metric.name, metric.unit, metric.kind, [], metric.description, is_delta)
                    piece.series.append(series)
                series.points.append(point)
                piece.points += 1
                piece.told[metric.name, labels] = value, point.at_ns
        if piece.points:
            yield piece

    def _point(
        self, metric: Metric, labels: Labels, value: float | Distribution, at_ns: int, origin: Origin
    ) -> Point | None:
        """Return a point, None for a delta without change since the last delivery."""
        start_ns = self._start_realtime_ns
        sent_value: float | Exponential
        if metric.kind in self._deltas:
            before, start_ns = self._told.get((metric.name, labels), (None, start_ns))
            if isinstance(value, Distribution):
                since = value.since(before) if isinstance(before, Distribution) else value
                if not since.count:
                    return None
                sent_value = exponential(since, has_extremes=before is None)
            else:
                sent_value = value - before if isinstance(before, int | float) else value
                if not sent_value:
                    return None
        else:
            sent_value = exponential(value, has_extremes=True) if isinstance(value, Distribution) else value
        since_ns = self.delivered_ns
        exemplars = tuple(
            replace(exemplar, at_ns=origin.realtime_of(exemplar.at_ns))
            for exemplar in metric.exemplars.get(labels, ())
            if exemplar.kept_ns > since_ns
        )
        # Not before its start, where the wall clock was set back.
        return Point(dict(labels), 0 if metric.kind == GAUGE else start_ns, max(at_ns, start_ns), sent_value, exemplars)

    def taken(self, piece: Piece) -> None:
        """The collector has a piece."""
        if self._deltas:
            self._told = {**self._told, **piece.told}  # another thread may read what was told

    def delivered(self, snapshot: Snapshot) -> None:
        """The collector has all of a snapshot."""
        self._delivered, self.delivered_ns = snapshot, snapshot.at_ns

    def drop(self) -> int:
        """Give up the newest one; returns how many series it was of."""
        newest, self._delivered = self._newest, self._newest
        self._tried = newest
        return sum(len(metric.series) for metric in newest.metrics) if newest is not None else 0
