"""The model of a profile: frozen classes for its rules, its limits, and its exports.

Times are in ns, sizes in bytes. `keys` reads a profile from a file and refuses invalid values. A profile that is made
in code is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from instrument.runtime.lazy_imports import dataclass, field, fields_of

KINDS: tuple[str, ...] = ("request", "step", "op", "layer", "phase", "copy", "loader", "comm", "user")

PREPARING: tuple[str, ...] = ("load", "compile")
"""The phases before a service's first request: a model is loaded and compiled."""

PHASES: tuple[str, ...] = ("prepare", "infer_shape", "compute", "post", "forward", "backward", "optimizer", *PREPARING)
"""The usual values of the attribute `phase`."""

TRACER_OPTIONS: tuple[str, ...] = ("Default", "OpDetail", "AllOpDetail")
STATES: tuple[str, ...] = ("CPU", "GPU", "All")
CLOCKS: tuple[str, ...] = ("monotonic", "tsc")
RECORDED: tuple[str, ...] = ("size", "type", "value")
NUMBERS: tuple[str, ...] = ("gauge", "counter", "histogram")
KEEPS: tuple[str, ...] = ("last", "sum", "max", "list")
DIRECTIONS: tuple[str, ...] = ("h2d", "d2h", "d2d", "p2p", "h2h")
DEVICE_DIRECTIONS: tuple[str, ...] = DIRECTIONS[:4]
COPY_FRAMEWORKS: tuple[str, ...] = ("torch", "cupy", "numba", "cuda", "onnxruntime", "jax", "numpy")
FRAMEWORKS: tuple[str, ...] = ("onnxruntime", "keras", "jax", "transformers", "sentence_transformers", "sklearn")
TRACEPARENT: tuple[str, ...] = ("follow", "link", "off")
SERVERS: Mapping[str, str] = {
    "asgi": "apps over ASGI",
    "wsgi": "apps over WSGI",
    "aiohttp": "applications of aiohttp.web",
    "grpc": "servers of gRPC",
    "grpclib": "servers of grpclib",
    "tornado": "applications of Tornado",
    "sanic": "apps of Sanic",
    "websockets": "connections of websockets' servers",
    "http_server": "handlers of http.server",
    "ray_serve": "replicas of Ray Serve",
    "litserve": "batches of LitServe's workers",
    "mosec": "requests and batches of mosec's workers",
    "triton": "models of Triton's Python backend",
    "bentoml": "adaptive batches of BentoML",
    "gradio": "events of Gradio's queue",
    "celery": "tasks of Celery's workers",
    "rq": "jobs of RQ's workers",
    "dramatiq": "messages of Dramatiq's workers",
    "arq": "jobs of arq's workers",
    "taskiq": "tasks of TaskIQ's workers",
    "faststream": "messages of FastStream's handlers",
}
"""The servers that `requests.servers` can name, with descriptions."""

VIEWS: Mapping[str, str] = {
    "brief": "one screen: requests or steps, where their time went, the device, the cost",
    "overview": "share of the time in which spans of each kind ran: requests, steps, layers, copies",
    "events": "calls below their callers, with sums, minima, maxima, p50, p99; detail by --tracer-option",
    "phases": "the phases of steps, or of requests; they add up to the whole",
    "operators": "operators and layers by name, on host and device, with the calls directly below them; FLOPs",
    "kernels": "kernels by name, from a trace of torch.profiler (--with)",
    "device": "each GPU: busy, idle, idle while requests wait; streams; the gauges of GPUs and of the process",
    "copies": "memory copies by direction and function: bytes, times, GB/s, pageable or pinned, sync or async",
    "memory": "peaks of memory; with a trace of torch.profiler (--with) also which functions allocate it",
    "distribution": "distributed work: communication, computation and their overlap, on host and devices",
    "user": "the scopes in the service's code, by name",
    "requests": "endpoints: count, errors, percentiles, where the time went; the slowest requests",
    "batches": "batches by name: sizes, times, time per request, padding",
    "neighbours": "which requests made which others wait, by endpoint, or by an attribute such as tenant (--by)",
    "classes": "self times by class; they add up to 100 %",
    "ops": "self times by function or layer",
    "instances": "self times by call path",
    "startup": "the time up to the first request: imports, loading, compiling, first calls",
    "benchmark": "steps of a loop: wait for input, time per step, samples per second",
    "cost": "the cost of the instrumentation, by function and thread; what was lost or not recorded",
}
"""The views of reports, with descriptions."""

TIME_UNITS: Mapping[str, int] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""The units of time for reports, in ns."""

SORT_KEYS: tuple[str, ...] = (
    "default", "calls", "total", "max", "min", "ave",
    "cpu_total", "cpu_max", "cpu_min", "cpu_ave", "gpu_total", "gpu_max", "gpu_min", "gpu_ave",
)  # fmt: skip
PROTOCOLS: tuple[str, ...] = ("http/protobuf", "grpc")
COMPRESSIONS: tuple[str, ...] = ("gzip", "none")
AUTO_NS = 0
"""The interval in ns that means `auto` in a profile."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An attribute to record from each call. `record` is the recorded property: `size`, `type` or `value`.

    `argument` is a parameter's name, or a dotted path that begins with one. `name` is the attribute's name.
    """

    argument: str
    record: str = "size"
    name: str = ""


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """The path (`argument`) to a request's key, or to the keys of a batch, in the arguments of a call.

    `weights` is the path to the weights of a batch's members. Matches of the regular expression `cut` are removed from
    keys. The module `instrument.instrumentors.call_values` explains paths.
    """

    argument: str
    weights: str = ""
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of a request, such as a token count, that is read from calls. It becomes the request's attribute `name`.

    `argument` is the path to the value. A path with `[]` has the values of several requests, and `key` or the rule's
    `batch` has their keys. `keep`, a word of `KEEPS`, decides between several values. `record` is as in `Argument`.
    """

    argument: str
    name: str
    record: str = "value"
    keep: str = "last"
    key: RequestKeys | None = None


@dataclass(frozen=True, slots=True)
class OwnGauge:
    """A gauge, counter or histogram (`kind`) of the service, whose values are read from calls.

    `argument` is the path to the value. A gauge is read at most once in `every_ns`, a counter or histogram at each
    call. `record` is `value` or `size`.
    """

    argument: str
    name: str
    unit: str = "1"
    kind: str = "gauge"
    record: str = "value"
    every_ns: int = 10**9


@dataclass(frozen=True, slots=True)
class FunctionRule:
    """A rule that selects functions to instrument by `module:qualname` patterns (`match`, without `exclude`).

    In a pattern, `*` matches any part of a dotted segment, and `**` any number of segments.

    - `name` replaces the function's own name. It may have {module}, {qualname}, {class} and {function}.
    - `device` also asks for device time. Calls shorter than `min_ns` are only in the tally.
    - `phase` is a part of the work. With a phase, the default kind is `phase`.
    - `attributes` are read from the arguments. With `metrics`, the times of calls are a metric.
    - With `gen_ai`, the items that the function yields count as generated by a model.
    - With `first_request`, the first call is the first request of the view `startup`.
    - `key` reads the key of the request that a call serves, `batch` the keys of several requests.
    - `facts` are facts of requests, and `gauges` numbers of the service.
    - `counted` marks the rule of `schedule.step`. Its functions get the kind `step`, even if another rule gives them
      `op`.
    - `engine` is the package of the engine whose preset has the rule.
    - `text` is the rule's name in messages, and `line` and `place` are its place in the file.

    Rules that differ only in their place are equal.
    """

    match: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    name: str | None = None
    kind: str = "op"
    phase: str | None = None
    device: bool = False
    min_ns: int = 0
    attributes: tuple[Argument, ...] = ()
    counted: bool = False
    first_request: bool = False
    metrics: bool = False
    gen_ai: bool = False
    key: RequestKeys | None = None
    batch: RequestKeys | None = None
    facts: tuple[Fact, ...] = ()
    gauges: tuple[OwnGauge, ...] = ()
    engine: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)
    place: str = field(default="", compare=False)
    text: str = ""


@dataclass(frozen=True, slots=True)
class LayerRule:
    """A rule that selects layers of a model to instrument, by path in the module tree and by class name (`types`).

    An empty `match` means every path, and empty `types` every class. The other fields are as in `FunctionRule`.
    """

    kind: ClassVar[str] = "layer"
    match: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    name: str | None = None
    device: bool = False
    line: int = field(default=0, compare=False)
    text: str = ""


@dataclass(frozen=True, slots=True)
class CopyRule:
    """A rule that selects memory copies to record, by framework, direction and size (at least `min_bytes`).

    A framework has the name of its package; `cuda` is cuda-python. Copies from host to host (`h2h`) are recorded only
    if a rule names them.
    """

    directions: tuple[str, ...] = DEVICE_DIRECTIONS
    min_bytes: int = 0
    frameworks: tuple[str, ...] = COPY_FRAMEWORKS
    line: int = field(default=0, compare=False)
    text: str = ""


@dataclass(frozen=True, slots=True)
class FrameworkRule:
    """A rule for a framework, whose functions are instrumented after its import.

    With `auto`, the profile asks for all frameworks, and no report mentions a missing framework.
    """

    name: str
    auto: bool = False
    line: int = field(default=0, compare=False)

    @property
    def text(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class RequestsRule:
    """A rule that records all requests of web and RPC servers (`servers`), by endpoint.

    - Requests to a path of `ignore`, exact or ending in `*`, are not recorded.
    - `name` is the name of spans, with {method} and {route}.
    - `attributes` names further attributes of OpenTelemetry to record. They may have data of a caller.
    - `traceparent` is `follow`, `link` or `off`, for the caller's trace.
    - Reports and metrics group requests `by` an attribute, such as a tenant's name, with up to `at_most` values.
    - `gen_ai` has the routes whose answers a model generates item by item. `provider` is the model's provider.
    - `server_timing` selects the answers with timings in a header: "true" for all, "header NAME" if the request has
      that header, "" for none.
    - `blocked_ns` is as in `Limits`.
    """

    servers: tuple[str, ...] = tuple(SERVERS)
    ignore: tuple[str, ...] = ()
    name: str = "{method} {route}"
    attributes: tuple[str, ...] = ()
    traceparent: str = "follow"
    gen_ai: tuple[str, ...] = ()
    provider: str = ""
    by: str = ""
    at_most: int = 50
    server_timing: str = ""
    blocked_ns: int | None = None
    line: int = field(default=0, compare=False)
    text: str = "requests"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of windows. After `skip_first` steps it repeats `closed`, `ready` and `record` steps, and records only
    the `record` steps.

    `repeat` is the number of repetitions, 0 for no end. A step is a call of the function `step` (`module:qualname`), by
    default a request. ``[start, end]`` in a file records steps from `start` up to `end`, once.
    """

    record: int
    skip_first: int = 0
    closed: int = 0
    ready: int = 0
    repeat: int = 0
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit of `count` events in `per_ns` nanoseconds."""

    count: int
    per_ns: int


@dataclass(frozen=True, slots=True)
class PercentileThreshold:
    """A time limit: the percentile `fraction` of an endpoint's times, multiplied by `factor`."""

    fraction: float
    factor: float


Comparison = tuple[str, str | bool | int | float]
"""A comparison: an operator (`=`, `>=`, `>`, `<=` or `<`) and a value."""


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on an attribute. It is true if any of the comparisons is true."""

    attribute: str
    any_of: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """The settings of tail sampling, which selects the requests to keep with all their spans.

    - A share `sample` of all requests is kept, and requests that failed (`errors`), were slow, or match all conditions
      of `where` at their end.
    - A request is slow if it takes longer than `slow_ns`, or longer than its endpoint's limit by `slow_over`.
    - `limit` bounds the number of kept requests.
    - Other requests that end during a kept request, or up to `before_ns` before it, are kept, too.
    - The agent writes kept requests into the folder `to`, unless that is None.
    - With `is_off`, which a variable of OpenTelemetry sets, no request is kept, even if its caller asks for it.
    """

    sample: float = 1.0
    slow_ns: int | None = None
    errors: bool = True
    limit: Rate | None = None
    before_ns: int = 0
    slow_over: PercentileThreshold | None = None
    where: tuple[Where, ...] = ()
    to: str | None = None
    is_off: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the instrumentation: the memory of rings, the spans per request, and the disk space of files.

    With `ring_folder`, recordings are files in that folder, which outlive their processes. Otherwise the memory of a
    recording is freed when the last process that uses it ends.

    `disk_bytes` bounds the disk space of trace and summary files. Processes with the same paths share it. `blocked_ns`
    is the minimum duration of a recorded garbage collection or blocked event loop, None for never.
    """

    ring_bytes: int = 64 * 2**20
    spans_per_request: int = 10_000
    disk_bytes: int = 2**30
    blocked_ns: int | None = 5_000_000
    ring_folder: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """The settings for devices. `cuda` is `auto` or `off`. `nvml_ns` and `host_ns` are intervals in ns between readings
    of gauges.

    `nvml_ns` is for gauges of GPUs, None for never. `AUTO_NS` means every second if there is an NVIDIA driver.
    `host_ns` is for gauges of process, machine and torch's allocator. `AUTO_NS` means as often as GPUs are read.

    `gil` is `hold` if a thread keeps the interpreter's lock while it records a CUDA event, else `release`.
    """

    cuda: str = "auto"
    nvml_ns: int | None = AUTO_NS
    host_ns: int | None = AUTO_NS
    gil: str = "release"


@dataclass(frozen=True, slots=True)
class Control:
    """The settings for changes of a running process's profile. With `watch`, the file is checked every 100 ms."""

    watch: bool = False


@dataclass(frozen=True, slots=True)
class Chrome:
    """The export of Chrome traces, one file per window. `path` may have `{service}`, `{run}`, `{pid}` and
    `{window}`."""

    path: str = "traces/{service}-{run}-{window}.json.gz"


@dataclass(frozen=True, slots=True)
class Recordings:
    """The export of recordings, one file per window. `path` ends in `.npz`, and may have the fields of
    `Chrome.path`."""

    path: str = "traces/{service}-{run}-{window}.npz"


@dataclass(frozen=True, slots=True)
class Otlp:
    """The export of spans to an OpenTelemetry collector, whose complete URL is `endpoint`.

    `certificate` is a file that verifies the collector. The collector verifies this client by `client_certificate` and
    `client_key`. These PEM files are used only for https.
    """

    endpoint: str = "http://localhost:4318/v1/traces"
    protocol: str = "http/protobuf"
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_ns: int = 10 * 10**9
    compression: str = "gzip"
    certificate: str | None = None
    client_certificate: str | None = None
    client_key: str | None = None


@dataclass(frozen=True, slots=True)
class Prometheus:
    """The export of a run's metrics to Prometheus. The agent answers HTTP at `listen`, a host and a port."""

    listen: str = "127.0.0.1:9464"


@dataclass(frozen=True, slots=True)
class Parquet:
    """The export to a dataset of Parquet files in a folder or at a URL (`path`). A new file begins every `every_ns`."""

    path: str = "dataset/"
    every_ns: int = 5 * 60 * 10**9


@dataclass(frozen=True, slots=True)
class Summary:
    """The export of a text report to `stderr`, `stdout` or a file, whose path may have `{service}` and `{pid}`.

    The other fields are those of `instrument.report.view.Options`.
    """

    to: str = "stderr"
    views: tuple[str, ...] = ("brief",)
    sorted_by: str = "default"
    rows: int | None = None
    least_ns: int = 0
    unit: str = "ms"
    per_thread: bool = False
    corrected: bool = False
    skip_first: int = 0


@dataclass(frozen=True, slots=True)
class Export:
    """The exports of a profile, each None if it is off."""

    recording: Recordings | None = None
    chrome: Chrome | None = None
    otlp: Otlp | None = None
    prometheus: Prometheus | None = None
    parquet: Parquet | None = None
    summary: Summary | None = None

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, name) is None for name, _ in fields_of(self))


@dataclass(frozen=True, slots=True)
class Profile:
    """The settings of a `profile.yaml`. `Profile()` has those of an empty file.

    - Without a `schedule`, recording is always on.
    - `loaders` is `auto` or `off`, for data loaders of imported frameworks.
    - `phases` is `auto` or `off`, for torch's training loops (forward, backward, optimizer).
    - `comm` is `auto` or `off`, for torch.distributed.
    - `startup` is `auto` to record imports, and the loading and compiling of models, or `off`.
    - `logs` is `auto` to add trace ids to log records, or `off`.
    - With `engines: auto`, an imported engine's preset adds its rules.
    - `agent` is `auto` for one agent per run, or `off`.
    - `preset` is the preset that the file names. Its values are in the other fields.
    - `source` is the file's path, or the name passed to `loads`.
    - `origins` has the source of each setting that a variable can give: ``profile``, the variable's name, or
      ``default``. A setting from the preset has ``preset``.
    - `shown` has the text of a value for messages, if the value may be secret or is from the preset.
    - `remarks` are sentences on environment variables that are ignored, or that switch a part off.

    Profiles with the same settings are equal, even from different files.
    """

    service: str = "unknown_service"
    preset: str | None = field(default=None, compare=False)
    tracer_option: str = "Default"
    state: str = "All"
    clock: str = "monotonic"
    budget: float | None = None
    functions: tuple[FunctionRule, ...] = ()
    layers: tuple[LayerRule, ...] = ()
    copies: tuple[CopyRule, ...] = ()
    loaders: str = "off"
    phases: str = "off"
    comm: str = "off"
    engines: str = "off"
    frameworks: tuple[FrameworkRule, ...] = ()
    requests: tuple[RequestsRule, ...] = ()
    logs: str = "off"
    startup: str = "off"
    schedule: Schedule | None = None
    capture: Capture = field(default_factory=Capture)
    limits: Limits = field(default_factory=Limits)
    device: Device = field(default_factory=Device)
    agent: str = "auto"
    control: Control = field(default_factory=Control)
    export: Export = field(default_factory=Export)
    source: str = field(default="<profile>", compare=False)
    remarks: tuple[str, ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    shown: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def exports_nothing(self) -> bool:
        """True if nothing is written or sent automatically."""
        return self.export.is_empty and self.capture.to is None

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that are the same for equal profiles. Headers of exports do not affect it."""
        from hashlib import sha256  # it loads OpenSSL

        return sha256(repr(_compared_fields(self)).encode()).hexdigest()[:12]


def _compared_fields(thing: Any) -> Any:
    if isinstance(thing, tuple):
        return tuple(map(_compared_fields, thing))
    shown = [name for name, member in fields_of(thing) if member.compare and member.repr]
    return (
        (type(thing).__name__, [(name, _compared_fields(getattr(thing, name))) for name in shown]) if shown else thing
    )


EVERYTHING = Profile(
    layers=(LayerRule(match=("", "**"), device=True, text="every layer"),),
    copies=(CopyRule(text="every copy"),),
    loaders="auto",
    phases="auto",
    comm="auto",
    device=Device(host_ns=10**9),
    source="the default of a Profiler",
)
"""The default profile of a `Profiler`."""
