"""Samples of gauges as OTLP says them: which metric each is, the bytes of the wire, and what waits to be sent.

Names, units and kinds are those of OpenTelemetry's conventions where it has one (hardware, process and system metrics,
version 1.44); what it has no name for lies under `instrument.`. A value keeps the time at which it was read.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from instrument.otlp.packing import pack_attributes, pack_field, pack_text
from instrument.spans import HOST, Gpu, Origin, Sample
from instrument.unpatched import Lock

if TYPE_CHECKING:
    from instrument.otlp.senders import Verdict

QUEUE_SAMPLES = 65_536
"""Samples that may wait for delivery; beyond it the oldest go."""

DELAY_NS = 10 * 10**9
"""How long samples are gathered before they are sent, many in one request."""

REQUEST_SAMPLES, LEAST_REQUEST_SAMPLES = 1_000, 100
"""Samples of one request, some 200 bytes each, and what a collector that refuses sizes may bring that down to."""

PATIENCE_NS = 2 * 10**9
"""The longest that spans wait because metrics do not get through."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The metric that a gauge becomes: its value times `scale`, divided by the newest value of the gauge `per`.

    `kind` is `gauge`, `updown` (a sum that goes both ways) or `counter`.
    """

    gauge: str
    name: str
    unit: str
    kind: str = "gauge"
    scale: float = 1
    per: str = ""
    attributes: tuple[tuple[str, str], ...] = ()


MEASURES: tuple[Measure, ...] = (
    Measure("cores", "instrument.process.cpu.limit", "{cpu}"),
    Measure("process_cpu", "process.cpu.utilization", "1", scale=0.01, per="cores"),
    Measure("process_memory", "process.memory.usage", "By", "updown"),
    Measure("process_memory_peak", "instrument.process.memory.peak", "By"),
    Measure("system_cpu", "system.cpu.utilization", "1", scale=0.01),
    Measure("utilization", "hw.gpu.utilization", "1", scale=0.01, attributes=(("hw.gpu.task", "general"),)),
    Measure("memory_active", "instrument.gpu.memory.active", "1", scale=0.01),
    Measure("memory_used", "hw.gpu.memory.usage", "By", "updown"),
    Measure("memory_used", "hw.gpu.memory.utilization", "1", per="memory_total"),
    Measure("memory_total", "hw.gpu.memory.limit", "By", "updown"),
    Measure("memory_of_process", "instrument.gpu.process.memory.usage", "By", "updown"),
    Measure("torch_allocated", "instrument.torch.memory.allocated", "By", "updown"),
    Measure("torch_allocated_peak", "instrument.torch.memory.allocated_peak", "By"),
    Measure("torch_reserved", "instrument.torch.memory.reserved", "By", "updown"),
    Measure("torch_reserved_peak", "instrument.torch.memory.reserved_peak", "By"),
    Measure("power", "hw.power", "W"),
    Measure("energy", "hw.energy", "J", "counter"),
    Measure("temperature", "hw.temperature", "Cel"),
    Measure("sm_clock", "instrument.gpu.sm.clock", "Hz", scale=1e6),
    Measure("memory_clock", "instrument.gpu.memory.clock", "Hz", scale=1e6),
    Measure("sm_active", "instrument.gpu.sm.active", "1", scale=0.01),
    Measure("sm_occupancy", "instrument.gpu.sm.occupancy", "1", scale=0.01),
    Measure("tensor_active", "instrument.gpu.tensor.active", "1", scale=0.01),
    Measure("dram_active", "instrument.gpu.dram.active", "1", scale=0.01),
    Measure("pcie_sent", "instrument.gpu.pcie.io", "By/s", attributes=(("network.io.direction", "transmit"),)),
    Measure("pcie_received", "instrument.gpu.pcie.io", "By/s", attributes=(("network.io.direction", "receive"),)),
    Measure("nvlink_sent", "instrument.gpu.nvlink.io", "By/s", attributes=(("network.io.direction", "transmit"),)),
    Measure("nvlink_received", "instrument.gpu.nvlink.io", "By/s", attributes=(("network.io.direction", "receive"),)),
)
"""What a collector gets of each gauge."""

_OF_GAUGE: dict[str, list[Measure]] = {}
for _measure in MEASURES:
    _OF_GAUGE.setdefault(_measure.gauge, []).append(_measure)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric. `start_ns` is the wall time from which a sum counts, 0 for a gauge."""

    attributes: Mapping[str, str | int]
    start_ns: int
    at_ns: int
    value: float


@dataclass(slots=True)
class Series:
    """A metric with its points, as both protocols send it."""

    name: str
    unit: str
    kind: str
    points: list[Point] = field(default_factory=list)


class Metrics:
    """Samples on their way to a collector, and what became of them. All methods may be called from any thread.

    A collector that has no place for metrics says so once; from then on none are sent, and spans go on.
    """

    def __init__(self, endpoint: str | None) -> None:
        self.off = (
            "" if endpoint else "the endpoint for spans does not end in /v1/traces, so that of metrics is unknown"
        )
        if os.environ.get("OTEL_METRICS_EXPORTER", "").strip() == "none":
            self.off = "OTEL_METRICS_EXPORTER is none"
        self._told = False
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Forget what the parent gathered and counted."""
        self._lock = Lock()
        self._waiting: deque[Sample] = deque()
        self._oldest_ns = 0
        self._gpus: dict[int, Gpu] = {}
        self._newest: dict[tuple[str, int], float] = {}
        self._begun_ns: dict[int, int] = {}
        self._lost = {"dropped": 0, "failed": 0, "rejected": 0}
        self._reason = ""
        self._request_samples = REQUEST_SAMPLES
        self.sent = 0
        """Samples that the collector took."""

    def offer(self, samples: Sequence[Sample], gpus: Sequence[Gpu]) -> None:
        """Take samples on; some microseconds. Nothing happens where metrics are off."""
        if self.off:
            self._told = self._told or bool(samples)
            return
        with self._lock:
            if not self._waiting:
                self._oldest_ns = time.monotonic_ns()
            self._gpus.update({gpu.device: gpu for gpu in gpus})
            self._waiting.extend(samples)
            while len(self._waiting) > QUEUE_SAMPLES:
                self._waiting.popleft()
                self._lost["dropped"] += 1

    def waits(self) -> bool:
        """Whether anything is to be sent."""
        return bool(self._waiting)

    def due(self, now_ns: int) -> bool:
        """Whether it is time to send."""
        return bool(self._waiting) and now_ns - self._oldest_ns >= DELAY_NS

    def take(self, origin: Origin) -> tuple[list[Series], int]:
        """The next request's content, and how many samples it is made of."""
        with self._lock:
            samples = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._request_samples))]
            self._oldest_ns = time.monotonic_ns()
            gpus = dict(self._gpus)
        found: dict[str, Series] = {}
        for sample in samples:
            if sample.value is None:
                continue
            self._newest[sample.name, sample.device] = sample.value
            begun_ns = self._begun_ns.setdefault(sample.device, sample.at_ns)
            for measure in _OF_GAUGE.get(sample.name, ()):
                base = self._newest.get((measure.per, sample.device)) if measure.per else 1.0
                if base:
                    series = found.setdefault(measure.name, Series(measure.name, measure.unit, measure.kind))
                    series.points.append(
                        Point(
                            _attributes(measure, gpus.get(sample.device), sample.device),
                            origin.realtime_of(begun_ns) if measure.kind != "gauge" else 0,
                            origin.realtime_of(sample.at_ns),
                            sample.value * measure.scale / base,
                        )
                    )
        return list(found.values()), len(samples)

    def settle(self, samples: int, lost: int, verdict: Verdict) -> None:
        """Count what became of a request. A collector that has no place for metrics gets no more."""
        with self._lock:
            fate = "rejected" if verdict.taken else "failed"
            self.sent += samples - min(lost, samples)
            self._lost[fate] += min(lost, samples)
            if lost:
                self._reason = verdict.reason or "the collector did not say why"
            if verdict.too_large:
                self._request_samples = max(self._request_samples // 2, LEAST_REQUEST_SAMPLES)
            if verdict.refused:
                self.off, self._told = f"the collector takes none ({self._reason})", True
        if verdict.refused:
            self.drop()

    def drop(self) -> None:
        """Give up what waits."""
        with self._lock:
            self._lost["dropped"] += len(self._waiting)
            self._waiting.clear()

    def losses(self) -> dict[str, int]:
        """What did not reach the collector, by reason."""
        return {f"samples of gauges {fate} by the OTLP export": lost for fate, lost in self._lost.items() if lost}

    def notes(self) -> list[str]:
        """Why metrics are not sent, where samples were read in vain, or why some were lost."""
        if self.off:
            return [f"export.otlp: gauges are not sent: {self.off}"] if self._told else []
        return [f"export.otlp: gauges were lost on the way: {self._reason}"] if self._reason else []


def metrics_url(traces_url: str) -> str | None:
    """Where metrics go if spans go there; None where that cannot be told."""
    path, question, query = traces_url.partition("?")
    path = path.rstrip("/")
    return f"{path[: -len('/v1/traces')]}/v1/metrics{question}{query}" if path.endswith("/v1/traces") else None


def _attributes(measure: Measure, gpu: Gpu | None, device: int) -> dict[str, str | int]:
    if device == HOST:
        return dict(measure.attributes)
    named = gpu or Gpu(device)
    return {
        "hw.id": named.uuid or f"GPU {device}",
        "hw.type": "gpu",
        "hw.name": f"GPU {device}",
        **({"hw.model": named.model} if named.model else {}),
        # Without NVML's word it may be a GPU of another maker, of which torch alone told.
        **({"hw.vendor": "NVIDIA"} if gpu is not None else {}),
        "cuda.device.index": device,
        **dict(measure.attributes),
    }


# The wire: Metric {name 1, unit 3, gauge 5, sum 7}; Gauge {data_points 1}; Sum {data_points 1, temporality 2,
# is_monotonic 3}; NumberDataPoint {start_time 2, time 3, as_double 4, as_int 6, attributes 7}.
_pack_time = struct.Struct("<BQ").pack
_pack_double = struct.Struct("<Bd").pack
_pack_int = struct.Struct("<Bq").pack
_CUMULATIVE = b"\x10\x02"
_MONOTONIC = b"\x18\x01"


def pack_metric(series: Series) -> bytes:
    """One entry of `ScopeMetrics.metrics`. Whole numbers of bytes are sent as such."""
    points = b"".join([pack_field(b"\x0a", _pack_point(point, series.unit == "By")) for point in series.points])
    if series.kind == "gauge":
        data = pack_field(b"\x2a", points)
    else:
        data = pack_field(b"\x3a", points + _CUMULATIVE + (_MONOTONIC if series.kind == "counter" else b""))
    return pack_field(b"\x12", pack_text(b"\x0a", series.name) + pack_text(b"\x1a", series.unit) + data)


def _pack_point(point: Point, whole: bool) -> bytes:
    return b"".join(
        (
            _pack_time(0x11, point.start_ns) if point.start_ns else b"",
            _pack_time(0x19, point.at_ns),
            _pack_int(0x31, round(point.value)) if whole else _pack_double(0x21, point.value),
            pack_attributes(point.attributes, b"\x3a"),
        )
    )
