"""Declares each of our metrics once, for OTLP, Prometheus and the documentation, and reads metrics that a service
defines itself.

A total is a metric that a process counts, such as a request's duration. A gauge, such as a GPU's power, is read at
intervals. Names, units and kinds follow OpenTelemetry's conventions (version 1.44). The name of a metric without a
convention begins with `instrument.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ldexp
from typing import TYPE_CHECKING, Any

from instrument.recording.spans import FIRST_ITEM, HOST, ITEMS, LAST_ITEM, Sample
from instrument.runtime.lazy_imports import LazyModule, NamedTuple, dataclass

if TYPE_CHECKING:
    from instrument.recording import distributions
    from instrument.recording.distributions import Distribution, Exemplar, Labels, Metric
else:
    distributions = LazyModule("instrument.recording.distributions")  # a process that counts nothing needs none

COUNTER, UPDOWN, GAUGE, HISTOGRAM = "counter", "updown", "gauge", "histogram"
"""The kinds of metrics. An `updown` is a sum that can rise and fall."""


class MetricDefinition(NamedTuple):
    """The declaration of a metric.

    - `needs`: the key of the profile that turns on the metric, "" for none
    - `bounds`: the bucket bounds of a histogram in Prometheus's text format, in the metric's unit
    - `scale`: the factor that converts a gauge's value into the metric
    - `per`: the gauge whose newest value divides the metric, "" for none
    - `attributes`: attributes of all series
    """

    name: str
    unit: str
    kind: str = GAUGE
    description: str = ""
    needs: str = ""
    bounds: Sequence[float] = ()
    scale: float = 1
    per: str = ""
    attributes: tuple[tuple[str, str], ...] = ()

    def make_metric(
        self,
        series: Mapping[Labels, float | Distribution],
        exemplars: Mapping[Labels, tuple[Exemplar, ...]] | None = None,
    ) -> Metric:
        return distributions.Metric(self.name, self.unit, self.kind, self.description, series, exemplars or {})


DEFINITIONS: dict[str, MetricDefinition] = {}
"""The definitions of metrics by name, see `_define_metric`."""


def _define_metric(*facts: Any) -> MetricDefinition:
    definition = MetricDefinition(*facts)
    return DEFINITIONS.setdefault(definition.name, definition)


BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bucket bounds in seconds that OpenTelemetry's conventions advise for `http.server.request.duration`."""

BOUNDS_ITEMS = (1.5, 2.5, 4.5, 8.5, 16.5, 32.5, 64.5, 128.5, 256.5, 512.5, 1024.5)
"""The bucket bounds of histograms of counts. No bound is a whole number, so no count equals a bound."""

_GENERATION_S = tuple(round(0.01 * 2**power, 2) for power in range(14))
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_CALL_S = tuple(round(1e-5 * 4**power, 5) for power in range(13))  # from 10 us to some minutes

HTTP_DURATION = _define_metric(
    "http.server.request.duration", "s", HISTOGRAM, "Duration of HTTP server requests.", "requests", BOUNDS_S
)
RPC_DURATION = _define_metric(
    "rpc.server.call.duration", "s", HISTOGRAM, "Duration of incoming remote procedure calls.", "requests", BOUNDS_S
)
ACTIVE_REQUESTS = _define_metric(
    "http.server.active_requests", "{request}", UPDOWN, "Number of active HTTP server requests.", "requests"
)
QUEUED_TASKS = _define_metric(
    "instrument.executor.queue.length", "{task}", UPDOWN, "Number of tasks that wait for a thread of an executor.",
    "requests",
)  # fmt: skip
REQUEST_DURATION = _define_metric(
    "gen_ai.server.request.duration", "s", HISTOGRAM,
    "Generative AI server request duration such as time-to-last byte or last output token.", "gen_ai", _GENERATION_S,
)  # fmt: skip
FIRST_TOKEN = _define_metric(
    "gen_ai.server.time_to_first_token", "s", HISTOGRAM, "Time to generate first token for successful responses.",
    "gen_ai", _FIRST_TOKEN_S,
)  # fmt: skip
OUTPUT_TOKEN = _define_metric(
    "gen_ai.server.time_per_output_token", "s", HISTOGRAM,
    "Time per output token generated after the first token for successful responses.", "gen_ai", _TOKEN_S,
)  # fmt: skip
QUEUE_TIME = _define_metric(
    "instrument.request.queue.duration", "s", HISTOGRAM, "Time of a request in the queue, up to its first batch.",
    "key` and `batch", (0.001, 0.005, *_GENERATION_S),
)  # fmt: skip
REQUEST_BATCH_SIZE = _define_metric(
    "instrument.request.batch.size", "{request}", HISTOGRAM,
    "Requests of a batch, on average over those that served the request.", "key` and `batch", BOUNDS_ITEMS,
)  # fmt: skip
BATCH_SIZE = _define_metric(
    "instrument.batch.size", "{request}", HISTOGRAM, "Requests of a batch.", "batch", BOUNDS_ITEMS
)
CALL_DURATION = _define_metric(
    "instrument.call.duration", "s", HISTOGRAM, "Time of a call, of the device's work, too, where it is timed.",
    "metrics", _CALL_S,
)  # fmt: skip
LOSSES = _define_metric("instrument.losses", "{loss}", COUNTER, "What was recorded and not kept, by reason.")
COST = _define_metric(
    "instrument.cost", "s", COUNTER, "Processor time of the instrumentation itself, as measured on this machine."
)
RECORDING_MEMORY = _define_metric(
    "instrument.recording.memory", "By", UPDOWN, "Memory that the recordings of living processes take."
)
LIVE_SPANS = _define_metric("otel.sdk.span.live", "{span}", UPDOWN, "Recorded spans that are open.")
STARTED_SPANS = _define_metric("otel.sdk.span.started", "{span}", COUNTER, "Recorded spans that have begun.")
PROCESSED_SPANS = _define_metric(
    "otel.sdk.processor.span.processed", "{span}", COUNTER, "Spans that sampling kept, or that were lost before."
)
INFLIGHT_SPANS = _define_metric(
    "otel.sdk.exporter.span.inflight", "{span}", UPDOWN, "Kept spans that wait for their export."
)
EXPORTED_SPANS = _define_metric(
    "otel.sdk.exporter.span.exported", "{span}", COUNTER, "Kept spans whose export has finished."
)
PROCESSES = _define_metric(
    "instrument.processes", "{process}", GAUGE,
    "Living processes that these metrics are of. Totals include the processes that have ended.",
)  # fmt: skip

# ---------------------------------------------------------------- gauges


OF_PROCESSES = ("process.", "instrument.process.", "instrument.gpu.process.", "instrument.torch.")
"""The name prefixes of metrics that measure one process."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge in reports, and its metrics for a collector. A gauge that `grows` is a counter with an arbitrary start,
    so only differences of its values have a meaning. A gauge that `is_own` is a metric of the service itself."""

    unit: str
    about: str
    metrics: tuple[MetricDefinition, ...] = ()
    grows: bool = False
    is_own: bool = False

    @property
    def is_process_gauge(self) -> bool:
        return self.is_own or any(metric.name.startswith(OF_PROCESSES) for metric in self.metrics)


def _make_gauge_metric(name: str, unit: str, kind: str = GAUGE, **facts: Any) -> tuple[MetricDefinition, ...]:
    return (MetricDefinition(name, unit, kind, **facts),)


def _make_percent_metric(name: str, **facts: Any) -> tuple[MetricDefinition, ...]:
    return _make_gauge_metric(name, "1", scale=0.01, **facts)


def _make_transfer_metric(name: str, direction: str) -> tuple[MetricDefinition, ...]:
    return _make_gauge_metric(name, "By/s", attributes=(("network.io.direction", direction),))


GAUGES: dict[str, Gauge] = {
    "cores": Gauge("cores", "that the process may use, by its affinity and the limits of its control groups",
                   _make_gauge_metric("instrument.process.cpu.limit", "{cpu}")),
    "process_cpu": Gauge("%", "of one core, by all threads of the process since the reading before",
                         _make_percent_metric("process.cpu.utilization", per="cores")),
    "process_memory": Gauge("bytes", "resident memory of the process",
                            _make_gauge_metric("process.memory.usage", "By", UPDOWN)),
    "process_memory_peak": Gauge("bytes", "most resident memory that the process ever had, as the system counts it",
                                 _make_gauge_metric("instrument.process.memory.peak", "By")),
    "cpu_wait": Gauge("%", "of one thread's time since the reading before, by all threads that waited for a processor",
                      _make_percent_metric("instrument.process.cpu.wait")),
    "memory_pressure": Gauge(
        "%", "of the time since the reading before, in which a thread of the group waited for memory",
        _make_percent_metric("instrument.process.memory.pressure")),
    "system_cpu": Gauge("%", "of all cores of the machine, by all that runs on it since the reading before",
                        _make_percent_metric("system.cpu.utilization")),
    "utilization": Gauge("%", "of NVML's last sample period (1/6 s to 1 s), in which any kernel ran",
                         _make_percent_metric("hw.gpu.utilization", attributes=(("hw.gpu.task", "general"),))),
    "memory_active": Gauge("%", "of NVML's last sample period, in which device memory was read or written",
                           _make_percent_metric("instrument.gpu.memory.active")),
    "memory_used": Gauge("bytes", "of device memory, by all processes",
                         _make_gauge_metric("hw.gpu.memory.usage", "By", UPDOWN)
                         + _make_gauge_metric("hw.gpu.memory.utilization", "1", per="memory_total")),
    "memory_total": Gauge("bytes", "of device memory that there is",
                          _make_gauge_metric("hw.gpu.memory.limit", "By", UPDOWN)),
    "memory_of_process": Gauge("bytes", "of device memory, by this process",
                               _make_gauge_metric("instrument.gpu.process.memory.usage", "By", UPDOWN)),
    "torch_allocated": Gauge("bytes", "of device memory, by tensors, as torch's allocator counts them",
                             _make_gauge_metric("instrument.torch.memory.allocated", "By", UPDOWN)),
    "torch_allocated_peak": Gauge("bytes", "of device memory, the most that tensors had, since torch began to count",
                                  _make_gauge_metric("instrument.torch.memory.allocated_peak", "By")),
    "torch_reserved": Gauge("bytes", "of device memory, that torch's allocator holds, for tensors or in its cache",
                            _make_gauge_metric("instrument.torch.memory.reserved", "By", UPDOWN)),
    "torch_reserved_peak": Gauge("bytes", "of device memory, the peak of torch's allocator, counted in the same way",
                                 _make_gauge_metric("instrument.torch.memory.reserved_peak", "By")),
    "power": Gauge("W", "mean since the reading before, where the device counts its energy; else as NVML says it",
                   _make_gauge_metric("hw.power", "W")),
    "energy": Gauge("J", "since the first reading", _make_gauge_metric("hw.energy", "J", COUNTER), grows=True),
    "temperature": Gauge("C", "of the GPU", _make_gauge_metric("hw.temperature", "Cel")),
    "sm_clock": Gauge("MHz", "of the streaming multiprocessors",
                      _make_gauge_metric("instrument.gpu.sm.clock", "Hz", scale=1e6)),
    "memory_clock": Gauge("MHz", "of device memory",
                          _make_gauge_metric("instrument.gpu.memory.clock", "Hz", scale=1e6)),
    "sm_active": Gauge("%", "of the streaming multiprocessors, busy on average since the reading before",
                       _make_percent_metric("instrument.gpu.sm.active")),
    "sm_occupancy": Gauge("%", "of the warps that the device has room for, on average since the reading before",
                          _make_percent_metric("instrument.gpu.sm.occupancy")),
    "tensor_active": Gauge("%", "of the time since the reading before, in which tensor cores worked",
                           _make_percent_metric("instrument.gpu.tensor.active")),
    "dram_active": Gauge("%", "of the bandwidth of device memory, used since the reading before",
                         _make_percent_metric("instrument.gpu.dram.active")),
    "pcie_sent": Gauge("bytes/s", "over PCIe from the device, mean since the reading before",
                       _make_transfer_metric("instrument.gpu.pcie.io", "transmit")),
    "pcie_received": Gauge("bytes/s", "over PCIe to the device, mean since the reading before",
                           _make_transfer_metric("instrument.gpu.pcie.io", "receive")),
    "nvlink_sent": Gauge("bytes/s", "over all NVLinks from the device, mean since the reading before",
                         _make_transfer_metric("instrument.gpu.nvlink.io", "transmit")),
    "nvlink_received": Gauge("bytes/s", "over all NVLinks to the device, mean since the reading before",
                             _make_transfer_metric("instrument.gpu.nvlink.io", "receive")),
}  # fmt: skip
"""All known gauges by name, including the service's own metrics from recordings that were read."""

# ---------------------------------------------------------------- labels of generations

NAMESPACE, OPERATION = "gen_ai.", "gen_ai.operation.name"

PROVIDER = "gen_ai.provider.name"
GENERATION = (OPERATION, PROVIDER, "gen_ai.request.model")
"""The attributes of a generative model's span that become labels of metrics."""


def add_generation_labels(labels: Labels, attributes: Mapping[Any, Any]) -> Labels:
    usual = operation_of_route(str(dict(labels).get("http.route", "")))
    return tuple({OPERATION: usual, **dict(labels), **dict(read_generation_labels(attributes))}.items())


def operation_of_route(route: str) -> str:
    return "chat" if route.endswith("/chat/completions") else "text_completion"


def matches_route(route: str, patterns: Sequence[str]) -> bool:
    """Return True if an HTTP route matches one of the patterns, which are exact or end in `*`."""
    return any(route.startswith(pattern[:-1]) if pattern.endswith("*") else route == pattern for pattern in patterns)


def has_gen_ai_names(names: Iterable[object]) -> bool:
    """Return True if an attribute name begins with `gen_ai.`. A span with such an attribute is a call of a generative
    model."""
    return any(isinstance(name, str) and name.startswith(NAMESPACE) for name in names)


def read_generation_labels(attributes: Mapping[Any, Any]) -> Labels:
    return tuple((name, value) for name in GENERATION if isinstance(value := attributes.get(name), str))


def token_times(attributes: Mapping[Any, Any]) -> tuple[int, int | None] | None:
    """Return the time to the first item of a stream, and the mean time per later item, in ns. Return None without
    items."""
    first_ns, last_ns, items = (attributes.get(name) for name in (FIRST_ITEM, LAST_ITEM, ITEMS))
    if not (isinstance(first_ns, int) and isinstance(last_ns, int) and isinstance(items, int)):
        return None  # missing, or the service's own attributes of the same names
    each_ns = max(last_ns - first_ns, 0) // (items - 1) if items > 1 else None
    return max(first_ns, 0), each_ns


# ---------------------------------------------------------------- the service's own metrics

NAME_BYTES = 112
SUM = "sum"
MOST_GAUGES = 2_000
"""The maximum number of names in `GAUGES`. Further metrics of the service are not reported."""

LARGEST_MIDDLE = 9e9
"""The largest middle of a histogram bucket. In units of 1e-9, it still fits into 64 bits."""


class Cell(NamedTuple):
    """A value of one of the service's own metrics, written at `at_ns`. `kind` is `gauge`, `counter`, `sum` or the
    number of a histogram's bucket."""

    name: str
    unit: str
    kind: str
    at_ns: int
    value: float


def encode_cell_name(name: str, unit: str, kind: str) -> bytes:
    return f"{name}\n{unit}\n{kind}".encode()


def is_valid_cell_name(name: str, unit: str) -> bool:
    is_text = bool(name) and name.isprintable() and unit.isprintable()
    return is_text and len(encode_cell_name(name, unit, str(ZERO))) < NAME_BYTES


ZERO = -(1 << 20)
"""The bucket of all values up to 0."""

BUCKETS_END = 1 << 13
"""The first invalid bucket number. The middle of each bucket with a lower number fits into a float."""

MOST_VALUES = 1 << 53
"""The largest valid number of values in a bucket. A float cannot count further values exactly."""


def parse_cell(name: bytes, at_ns: int, value: float) -> Cell | None:
    parts = name.decode("utf-8", "replace").rstrip("\0").split("\n")
    if len(parts) != 3 or not parts[0] or not _is_valid_value(parts[2], value):
        return None
    return Cell(parts[0], parts[1], parts[2], at_ns, value)


def _is_valid_value(kind: str, value: float) -> bool:
    if kind in (GAUGE, COUNTER, SUM):
        return value >= 0 or kind == GAUGE
    try:
        return ZERO <= int(kind) < BUCKETS_END and 0 <= value <= MOST_VALUES
    except ValueError:
        return False


def make_samples(former: Sequence[Cell], newest: Sequence[Cell], *, since_ns: int = 0) -> list[Sample]:
    """Return the readings of gauges, counters and sums since `since_ns`. Add new names to `GAUGES`."""
    samples = []
    for cell in (*former, *newest):
        if cell.kind not in (GAUGE, COUNTER, SUM) or cell.at_ns < since_ns:
            continue
        name = f"{cell.name}.sum" if cell.kind == SUM else cell.name
        if add_service_gauge(name, cell.unit, grows=cell.kind != GAUGE):
            samples.append(Sample(name, HOST, cell.at_ns, cell.value))
    return list(dict.fromkeys(samples))


def add_service_gauge(name: str, unit: str, *, grows: bool) -> bool:
    """Add a metric of the service to `GAUGES`. Return False if a built-in gauge has the name, or if `GAUGES` is
    full."""
    if name not in GAUGES and len(GAUGES) < MOST_GAUGES:
        metrics = () if grows else (MetricDefinition(name, unit),)  # counters and sums are in snapshots
        GAUGES[name] = Gauge(unit, GROWS if grows else ABOUT, metrics, grows, is_own=True)
    return name in GAUGES and GAUGES[name].is_own


ABOUT, GROWS = "a number of the service's own", "a number of the service's own, which grows"


def add_gauges_of_file(gauges: Mapping[object, object]) -> None:
    """Add the metrics of a file to `GAUGES`. `gauges` maps each name to a text: a unit, a space and a description."""
    for name, text in gauges.items():
        for about in (ABOUT, GROWS):
            if isinstance(name, str) and isinstance(text, str) and text.endswith(f" {about}"):
                add_service_gauge(name, text.removesuffix(f" {about}"), grows=about == GROWS)


def make_metrics(cells: Iterable[Cell]) -> list[Metric]:
    from instrument.recording.distributions import LARGEST_SUM, ONE, Distribution, Metric, bucket_of

    counters: list[Metric] = []
    sums: dict[tuple[str, str], float] = {}
    histograms: dict[tuple[str, str], Distribution] = {}
    for cell in cells:
        key = cell.name, cell.unit
        if cell.kind == COUNTER:
            counters.append(Metric(*key, COUNTER, ABOUT, {(): cell.value}))
        elif cell.kind == SUM:
            sums[key] = cell.value
        elif cell.kind != GAUGE:
            bucket = int(cell.kind)  # each power of two has four buckets
            middle = 0.0 if bucket == ZERO else ldexp(((bucket & 7) + 0.5) / 8, bucket >> 3)
            index = bucket_of(int(min(middle, LARGEST_MIDDLE) * ONE))
            histograms.setdefault(key, Distribution()).add_buckets({index: int(cell.value)})
    for key, histogram in histograms.items():
        if key in sums:
            histogram.sum_ns = min(int(min(sums[key], LARGEST_SUM) * ONE), LARGEST_SUM)
    return [*counters, *(Metric(*key, HISTOGRAM, ABOUT, {(): histogram}) for key, histogram in histograms.items())]
