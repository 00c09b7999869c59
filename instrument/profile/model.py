"""The model of a profile: the functions, layers and copies to instrument, and the data to keep and export.

A `Profile` and its parts are frozen and have plain values, times in ns and sizes in bytes. `keys` reads a profile from
a file, and refuses bad values. A profile made in code is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from instrument.runtime.cheap_start import dataclass, field, members

KINDS: tuple[str, ...] = ("request", "step", "op", "layer", "phase", "copy", "loader", "comm", "user")
"""The kinds of spans."""

PREPARING: tuple[str, ...] = ("load", "compile")
"""The phases that prepare a service: loading a model, and compiling it."""

PHASES: tuple[str, ...] = ("prepare", "infer_shape", "compute", "post", "forward", "backward", "optimizer", *PREPARING)
"""The usual phases of a request or a step, as values of a site's attribute `phase`."""

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
"""The servers that `requests:` can name, with a description of their requests or batches."""

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
"""The views, with a description of each."""

TIME_UNITS: Mapping[str, int] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""The units of times in text, in nanoseconds."""

SORT_KEYS: tuple[str, ...] = (
    "default", "calls", "total", "max", "min", "ave",
    "cpu_total", "cpu_max", "cpu_min", "cpu_ave", "gpu_total", "gpu_max", "gpu_min", "gpu_ave",
)  # fmt: skip
PROTOCOLS: tuple[str, ...] = ("http/protobuf", "grpc")
COMPRESSIONS: tuple[str, ...] = ("gzip", "none")
AUTO_NS = 0
"""The value for an interval that a profile gives as `auto`."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An attribute of a call's span: the `size`, `type` or `value` (`record`) of an argument, or of a part of it.

    `argument` is a parameter's name, or a dotted path that begins with one; `name` is the attribute's name.
    """

    argument: str
    record: str = "size"
    name: str = ""


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """The path to a call's key, or to its batch's keys: `argument`, see `instrument.instrumentors.arguments`.

    `weights` is the path of the members' weights, perhaps in another parameter, or by key. Matches of the regular
    expression `cut` are removed from keys.
    """

    argument: str
    weights: str = ""
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of a request, read from a call: the path of its value (`argument`), and the attribute's `name`.

    A path with `[]` has the values of several requests, whose keys are at `key`, or else at the rule's `batch`. `keep`,
    a word of `KEEPS`, selects one of several values. `record` is as in `Argument`.
    """

    argument: str
    name: str
    record: str = "value"
    keep: str = "last"
    key: RequestKeys | None = None


@dataclass(frozen=True, slots=True)
class OwnGauge:
    """A number of the service, read from calls: the path of its value (`argument`), its `name` and `unit`.

    `kind` is one of `NUMBERS`. A gauge is read at most once in `every_ns`; of a counter and a histogram each value
    counts. `record` is `value` or `size`.
    """

    argument: str
    name: str
    unit: str = "1"
    kind: str = "gauge"
    record: str = "value"
    every_ns: int = 10**9


@dataclass(frozen=True, slots=True)
class FunctionRule:
    """A rule of functions to instrument: the `module:qualname` patterns that select functions or exclude them.

    In a pattern `*` matches any part of a dotted segment and `**`, a segment of its own, any number of segments. `name`
    replaces the function's own name, with its fields {module}, {qualname}, {class} and {function}. `device` also asks
    for device time. `phase` is a part of the work, and makes the kind `phase` if a file gives none. Calls shorter than
    `min_ns` are in the tally alone. `attributes` are read from the arguments. `text` is the rule's name in messages.
    `line` (from 1) and `place` are its place in the file, and are not compared: a rule that only moved is equal.
    `counted` marks the rule of `schedule.step`: if another rule of kind `op` has the function, it records it as `step`.
    The first call of a function with `first_request` is the first request of the view `startup`. A function with
    `metrics` has a metric of its calls' times. The items of a function with `gen_ai` are generated. `key` reads the key
    of a span's request, `batch` those of a span that serves several. `facts` are of
    requests, `gauges` of the service. `engine` is the imported engine's package whose preset has the rule.
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
    """A rule of layers to instrument: by path in the module tree, by class name, or by both, which must both match.

    An empty `match` means every path, an empty `types` every class. The other fields are as in `FunctionRule`.
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
    """A rule of memory copies to instrument: of `frameworks`, in one of `directions`, of at least `min_bytes`.

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
    """A framework whose entry points are instrumented once the service has imported it.

    `auto` is True if the profile asks for all frameworks. Then the absence of this one is not reported.
    """

    name: str
    auto: bool = False
    line: int = field(default=0, compare=False)

    @property
    def text(self) -> str:
        """The rule's name in messages."""
        return self.name


@dataclass(frozen=True, slots=True)
class RequestsRule:
    """A rule of the requests of servers that the service imports, by endpoint, without a rule for each.

    `servers` are of `SERVERS`. Requests to a path of `ignore`, exact or with a `*` at its end, are not recorded. `name`
    is the name of spans, with {method} and {route}. `attributes` names those of OpenTelemetry's attributes to record
    that may have data of a caller. The caller's trace is followed, linked to, or left alone (`traceparent`). Reports
    and metrics group requests `by` an attribute, such as one that names a tenant: by up to `at_most` values, and the
    others together. Answers of the routes `gen_ai`, exact or with a `*` at the end, are generated, item by item, by
    what is called `provider`. Answers have their timings (`server_timing`): all, those whose requests have a header, or
    none ("").
    `blocked_ns` is that of the profile's `Limits`, added when the rule is attached.
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
    """The recorded steps: after `skip_first` once, the last of `closed`, `ready` and `record` steps, `repeat` times.

    `repeat` 0 means for ever. In a file ``[start, end]`` is short for skipping `start` steps and recording up to
    `end`, once. A call of the function `step` (`module:qualname`) is a step, or a request where it is left out.
    """

    record: int
    skip_first: int = 0
    closed: int = 0
    ready: int = 0
    repeat: int = 0
    step: str | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """A bound: `count` in each `per_ns` nanoseconds."""

    count: int
    per_ns: int


@dataclass(frozen=True, slots=True)
class PercentileThreshold:
    """A limit relative to an endpoint's usual times: the percentile at `fraction`, multiplied by `factor`."""

    fraction: float
    factor: float


Comparison = tuple[str, str | bool | int | float]
"""An operator (`=`, `>=`, `>`, `<=` or `<`) and the value to compare with. Only `=` takes texts and booleans."""


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on an attribute: one of the comparisons is true."""

    attribute: str
    any_of: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """The requests that are kept in full: a share of all, and the slow, failed and matching ones.

    A request is slow that takes longer than `slow_ns`, or than `slow_over` of its endpoint. It matches if every
    condition of `where` is true for its own span when it ends. `limit` bounds the number of kept requests, `before_ns`
    adds the requests before each. The agent of the run writes kept requests into the folder `to` while the service
    runs; None for no folder. If a variable of OpenTelemetry sets `is_off` none is kept, even if a caller asks.
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
    """The bounds of the instrumentation: memory of the rings, spans of a request, disk of its files.

    `ring_folder` is the folder for recordings in files, which outlive their processes; None for memory that is freed
    with its last process. `disk_bytes` bounds the trace and summary files that the profile's paths name, of all
    processes that share them. `blocked_ns` is the least recorded time for which a callback blocks an event loop with
    open requests, or a garbage collection all threads; None for none.
    """

    ring_bytes: int = 64 * 2**20
    spans_per_request: int = 10_000
    disk_bytes: int = 2**30
    blocked_ns: int | None = 5_000_000
    ring_folder: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """The settings of devices: `cuda` is `auto` or `off`; gauges have intervals, None for never.

    `gil` is `hold` if a thread of the service keeps the interpreter's lock while it records an event, else `release`.
    `nvml_ns` is for gauges of GPUs: `AUTO_NS` is every second with an NVIDIA driver, and no message without one.
    `host_ns` is for those of process, machine and torch's allocator: `AUTO_NS` is the interval of GPUs, if these are
    read.
    """

    cuda: str = "auto"
    nvml_ns: int | None = AUTO_NS
    host_ns: int | None = AUTO_NS
    gil: str = "release"


@dataclass(frozen=True, slots=True)
class Control:
    """The ways to change a running process's profile: `watch` checks the file every 100 ms."""

    watch: bool = False


@dataclass(frozen=True, slots=True)
class Chrome:
    """Chrome traces, one file per window. `path` may contain `{service}`, `{run}`, `{pid}` and `{window}`."""

    path: str = "traces/{service}-{run}-{window}.json.gz"


@dataclass(frozen=True, slots=True)
class Recordings:
    """Recordings, one file per window. `path` ends in `.npz` and may contain the same fields as that of `Chrome`."""

    path: str = "traces/{service}-{run}-{window}.npz"


@dataclass(frozen=True, slots=True)
class Otlp:
    """The export of spans to an OpenTelemetry collector. `endpoint` is the final URL, `headers` are not in the repr.

    `certificate` is a file that verifies the collector. `client_certificate` and `client_key` are files by which the
    collector verifies us. All are in PEM, and only for https.
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
    """The metrics of the run for Prometheus: the agent answers HTTP at `listen`, a host and a port."""

    listen: str = "127.0.0.1:9464"


@dataclass(frozen=True, slots=True)
class Parquet:
    """A dataset of Parquet files in the folder or at the URL `path`. Its files are closed every `every_ns`."""

    path: str = "dataset/"
    every_ns: int = 5 * 60 * 10**9


@dataclass(frozen=True, slots=True)
class Summary:
    """Text reports to `stderr`, `stdout` or a file, whose path may contain `{service}` and `{pid}`.

    The options are those of `instrument.report.view.Options`; `per_thread` is for the view `events`.
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
    """The exports. An export that is None is off."""

    recording: Recordings | None = None
    chrome: Chrome | None = None
    otlp: Otlp | None = None
    prometheus: Prometheus | None = None
    parquet: Parquet | None = None
    summary: Summary | None = None

    @property
    def is_empty(self) -> bool:
        """True if all exports are off, so that nothing is written automatically."""
        return all(getattr(self, name) is None for name, _ in members(self))


@dataclass(frozen=True, slots=True)
class Profile:
    """A `profile.yaml`. `Profile()` is the profile of an empty file; `schedule` None means always on.

    `loaders` is `auto`, for the data loaders of the frameworks that the service imports, or `off`. So are `phases`, for
    torch's training loops (forward, backward, optimizer), and `comm`, for torch.distributed. `startup` is `auto` for
    imports and the loading and compiling of models, `logs` for trace ids in log records. With `engines: auto` the rules
    of an engine's preset are added when the service imports it. `agent` is `auto`, for one per run, or `off`.

    `preset` is the preset that the file names; its values are in the other fields, as if they were in the file.
    `source` is the file's path, or the name passed to `loads`. `origins` has the source of each setting that a variable
    can give: ``profile``, the variable's name, or ``default``, and ``preset`` for each of the preset. `shown` has the
    text of a value for messages, if it may have a secret or comes from the preset. `remarks` are sentences on variables
    of the environment that are not followed, or that switch a part off. Two profiles are equal if they ask for the
    same, in any file.
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
        """Twelve hexadecimal digits that equal profiles share. Headers of exports do not count."""
        from hashlib import sha256  # it loads OpenSSL

        return sha256(repr(_compared(self)).encode()).hexdigest()[:12]


def _compared(thing: Any) -> Any:
    """Return those fields of a dataclass that are both compared and in its repr, as plain values."""
    if isinstance(thing, tuple):
        return tuple(map(_compared, thing))
    shown = [name for name, member in members(thing) if member.compare and member.repr]
    return (type(thing).__name__, [(name, _compared(getattr(thing, name))) for name in shown]) if shown else thing


EVERYTHING = Profile(
    layers=(LayerRule(match=("", "**"), device=True, text="every layer"),),
    copies=(CopyRule(text="every copy"),),
    loaders="auto",
    phases="auto",
    comm="auto",
    device=Device(host_ns=10**9),
    source="the default of a Profiler",
)
"""The profile of a training loop without a profile. The path "" means the whole model."""
