"""What a profile is: which functions, layers and copies are instrumented, what is kept, and where it goes.

A `Profile` and its parts are frozen and hold plain values, times in ns and sizes in bytes. `keys` reads one from a
file, and refuses what is no value of it; one made in code is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import sha256
from typing import Any, ClassVar

TRACER_OPTIONS: tuple[str, ...] = ("Default", "OpDetail", "AllOpDetail")
STATES: tuple[str, ...] = ("CPU", "GPU", "All")
CLOCKS: tuple[str, ...] = ("monotonic", "tsc")
RECORDED: tuple[str, ...] = ("size", "type", "value")
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
    "ray_serve": "replicas of Ray Serve",
    "litserve": "batches of LitServe's workers",
    "mosec": "batches of mosec's workers",
    "triton": "models of Triton's Python backend",
}
"""What `requests:` meets, and whose requests or batches these are."""

VIEWS: Mapping[str, str] = {
    "brief": "one screen: requests or steps with their parts, where the time went, the device, the cost",
    "overview": "how much of the time anything of each kind ran, as unions of time",
    "events": "calls by path with sums, least, most, p50 and p99; what was computation; --tracer-option says how deep",
    "phases": "what steps, or requests, consist of, each instant counted once",
    "operators": "operators and layers by name, on host and device, with what is right below them; FLOPs",
    "kernels": "kernels by name, from a trace of torch.profiler (--with)",
    "device": "what each GPU did: busy, starved, idle; streams; what the gauges of process and GPUs read",
    "copies": "by direction and call: bytes, times, GB/s, pageable or pinned, sync or async",
    "memory": "peaks and when; with a trace of torch.profiler (--with) which places hold how much",
    "distribution": "communication beside computation, on the host and on each device",
    "user": "scopes of the service's own, by name",
    "requests": "by endpoint: count, errors, percentiles, what the time went to; the slowest requests",
    "batches": "by name: sizes, times, time per item, how uneven; what requests share",
    "classes": "self times by class, in parts that add up to 100 %",
    "ops": "self times by function or layer",
    "instances": "self times by place in the tree of calls",
    "startup": "the way to the first request: imports, loading, compiling, first calls",
    "benchmark": "steps of a loop: reader cost, batch cost, how many a second",
    "cost": "what the instrumentation cost, by probe and thread; what was lost and what was not observed",
}
"""The reports that there are, and what each shows."""

TIME_UNITS: Mapping[str, int] = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
"""In ns: what times in text may be in."""

SORT_KEYS: tuple[str, ...] = (
    "default", "calls", "total", "max", "min", "ave",
    "cpu_total", "cpu_max", "cpu_min", "cpu_ave", "gpu_total", "gpu_max", "gpu_min", "gpu_ave",
)  # fmt: skip
PROTOCOLS: tuple[str, ...] = ("http/protobuf", "grpc")
COMPRESSIONS: tuple[str, ...] = ("gzip", "none")
AUTO_NS = 0
"""The interval that a profile writes as `auto`."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One attribute of a call's span: the `size`, `type` or `value` (`record`) of an argument, or of a part of it.

    `argument` is a parameter's name, or a dotted path that begins with one; `name` is what the attribute is called.
    """

    argument: str
    record: str = "size"
    name: str = ""


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """Where a call says which request its span serves, or which ones: `argument` is a path, see
    `instrument.instrumentors.request_keys`. `weights` is where it says how much of it each takes, perhaps in another
    parameter, or by key. What the regular expression `cut` finds in a key is taken out of it.
    """

    argument: str
    weights: str = ""
    cut: str = ""


@dataclass(frozen=True, slots=True)
class FunctionRule:
    """Functions to instrument: the `module:qualname` patterns that select and that exclude them.

    In a pattern `*` stands for any part of one dotted segment and `**`, a segment of its own, for any number of them.
    `name` replaces the function's own name, its fields {module}, {qualname}, {class} and {function} filled in;
    `device` asks for device time too. `phase` says what part of the work it is, and where a file gives no kind makes it
    `phase`. Of calls shorter than `min_ns` only the tally knows. `attributes` name what is recorded of the
    arguments. `text` is how messages call the rule, `line` (from 1) is where it stands, `place` the file's name, line
    and column; neither place is compared, so a rule that only moved is the same rule. `counted` is that of the function
    that `schedule.step` names: another rule may have it, but one of kind `op` records it as `step`. The first call of
    one with `first_request` is what the view `startup` takes for the first request. How long calls take is a metric of
    each function with `metrics`. What those with `gen_ai` yield is generated, item by item. `key` names the request
    that a span serves, `batch` the requests of one that serves several. `engine` is the package of an engine that the
    host has imported, and whose preset has the rule.
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
    engine: str = field(default="", compare=False)
    line: int = field(default=0, compare=False)
    place: str = field(default="", compare=False)
    text: str = ""


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Layers of a model to instrument: by path in the module tree, by class name, or by both, which must both hold.

    An empty `match` means every path, an empty `types` every class. The rest is as in `FunctionRule`.
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
    """Memory copies to instrument: those of `frameworks` in one of `directions` that move at least `min_bytes`.

    A framework is called by the name of its package; `cuda` is cuda-python. Copies from host to host (`h2h`) are seen
    only by a rule that names them.
    """

    directions: tuple[str, ...] = DEVICE_DIRECTIONS
    min_bytes: int = 0
    frameworks: tuple[str, ...] = COPY_FRAMEWORKS
    line: int = field(default=0, compare=False)
    text: str = ""


@dataclass(frozen=True, slots=True)
class FrameworkRule:
    """A framework whose own entry points are instrumented once the service has imported it.

    `auto` is true where the profile took all frameworks and did not name this one, so that its absence is no complaint.
    """

    name: str
    auto: bool = False
    line: int = field(default=0, compare=False)

    @property
    def text(self) -> str:
        """How messages call the rule."""
        return self.name


@dataclass(frozen=True, slots=True)
class RequestsRule:
    """Requests of the servers that the host imports, by endpoint and without a rule for any of them.

    `servers` are of `SERVERS`. Requests to a path of `ignore`, exact or with a `*` at its end, are not recorded. `name`
    is what spans are called, {method} and {route} filled in. `attributes` are those of OpenTelemetry's that may hold
    what a caller sent, recorded because they are named. The caller's trace is followed, linked to, or left alone
    (`traceparent`). Reports and metrics group requests `by` an attribute, such as one that names a tenant:
    by up to `at_most` values, and the others together. Answers of the routes `gen_ai`, exact or with a `*` at the end,
    are generated, item by item. `blocked_ns` is that of the profile's `Limits`, filled in where the rule is put to
    work.
    """

    servers: tuple[str, ...] = tuple(SERVERS)
    ignore: tuple[str, ...] = ()
    name: str = "{method} {route}"
    attributes: tuple[str, ...] = ()
    traceparent: str = "follow"
    gen_ai: tuple[str, ...] = ()
    by: str = ""
    at_most: int = 50
    blocked_ns: int | None = None
    line: int = field(default=0, compare=False)
    text: str = "requests"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which steps are recorded: `skip_first` once, then `closed`, `ready` and `record` steps, `repeat` times.

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
    """At most `count` in each `per_ns` nanoseconds."""

    count: int
    per_ns: int


@dataclass(frozen=True, slots=True)
class Usual:
    """A time by what is usual: `factor` times that below which a `fraction` of an endpoint's requests lie."""

    fraction: float
    factor: float


Comparison = tuple[str, str | bool | int | float]
"""How an attribute must be to a value: `=`, `>=`, `>`, `<=` or `<`, all but the first for numbers alone."""


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on an attribute: that any of the comparisons holds."""

    attribute: str
    any_of: tuple[Comparison, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """Which requests are kept in full: a share of all, those that are slow, those that failed, and those that bear
    attributes.

    A request is slow that takes longer than `slow_ns`, or than `slow_over` says of its endpoint. It bears attributes
    when every condition of `where` holds for its own span as it ends, whatever the spans below it bear. `limit` bounds
    how many are kept, `before_ns` adds what came before the request. What is kept is written into the folder `to`, by
    the agent of the run while the service runs; None for nowhere. Where it `is_off` by a variable of OpenTelemetry
    none is kept, whatever callers ask for.
    """

    sample: float = 1.0
    slow_ns: int | None = None
    errors: bool = True
    limit: Rate | None = None
    before_ns: int = 0
    slow_over: Usual | None = None
    where: tuple[Where, ...] = ()
    to: str | None = None
    is_off: bool = field(default=False, repr=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the instrumentation may use at most: memory of the rings, spans of one request, disk of its files.

    `ring_folder` is where each process has its recording in a file, which outlives it without anybody's help; None for
    memory that lives as long as some process has it.
    `disk_bytes` is for the trace and summary files that the profile's paths name, of all processes that share them.
    `blocked_ns` is how long a callback may keep an event loop from open requests, or a garbage collection all threads
    from going on, before it is recorded; None for any time.
    """

    ring_bytes: int = 64 * 2**20
    spans_per_request: int = 10_000
    disk_bytes: int = 2**30
    blocked_ns: int | None = 5_000_000
    ring_folder: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """What is asked of the device: `cuda` is `auto` or `off`; gauges are read every so many ns, or never if None.

    `gil` says whether a thread of the service keeps the interpreter's lock while it records an event: `hold` or
    `release`.
    `nvml_ns` is for those of GPUs: `AUTO_NS` means every second where there is an NVIDIA driver, without a word where
    there is none. `host_ns` is for those of process and machine, and of torch's allocator: `AUTO_NS` means whenever
    GPUs are read, as often.
    """

    cuda: str = "auto"
    nvml_ns: int | None = AUTO_NS
    host_ns: int | None = AUTO_NS
    gil: str = "release"


@dataclass(frozen=True, slots=True)
class Control:
    """How a running process learns of a changed profile: neither way unless it is asked for.

    `watch` looks at the file every 100 ms. `socket` is the folder in which each process listens on `<pid>.sock`, or
    `auto` for the user's own.
    """

    watch: bool = False
    socket: str | None = None


@dataclass(frozen=True, slots=True)
class Chrome:
    """Chrome traces, one file a window; `path` may hold `{service}`, `{run}`, `{pid}` and `{window}`."""

    path: str = "traces/{service}-{run}-{window}.json.gz"


@dataclass(frozen=True, slots=True)
class Recordings:
    """Recordings, one file a window; `path` ends in `.npz` and may hold what that of `Chrome` may."""

    path: str = "traces/{service}-{run}-{window}.npz"


@dataclass(frozen=True, slots=True)
class Otlp:
    """Spans to an OpenTelemetry collector; `endpoint` is the final URL, `headers` stay out of the repr.

    `certificate` is a file of those that the collector is trusted by, `client_certificate` and `client_key` are those
    by which it trusts us; all in PEM, and only for https.
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
    """Metrics of the run for scrapes by Prometheus: its agent answers HTTP at `listen`, a host and a port."""

    listen: str = "127.0.0.1:9464"


@dataclass(frozen=True, slots=True)
class Summary:
    """Text reports to `stderr`, `stdout` or a file, whose path may hold `{service}` and `{pid}`.

    Its options are those of `instrument.report.view.Options`; `per_thread` is of `events`.
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
    """The ways out; one that is None is off."""

    recording: Recordings | None = None
    chrome: Chrome | None = None
    otlp: Otlp | None = None
    prometheus: Prometheus | None = None
    summary: Summary | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is none, so that nothing is written by itself."""
        return all(getattr(self, way.name) is None for way in fields(self))


@dataclass(frozen=True, slots=True)
class Profile:
    """One `profile.yaml`. `Profile()` is what an empty file gives; `schedule` None means always on.

    `loaders` is `auto`, for the data loaders of the frameworks that the host imports, or `off`; so are `phases`, for
    what a training loop does with torch (forward, backward, optimizer), `comm`, for what torch.distributed does, and
    `startup`, for the time of imports and what loads and compiles models. With `engines: auto` the rules of the preset
    that is made for an engine are added where the host imports it. `agent` is `auto`, for one of each run, or
    `off`.

    `preset` is the one that the file named; what that gave stands in the other fields, as if the file had said it.
    `source` is the file's path, or the name that `loads` was given. `origins` tells, for each setting that a variable
    can give, where its value came from: ``profile``, the variable's name, or ``default``, and for each that the preset
    gave ``preset``. `told` has how it is shown, where its value may hold a secret or is of the preset. `remarks` are
    sentences on variables of the environment that are not followed, or that switch something off. Two profiles are
    equal when they ask for the same, wherever they were written.
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
    told: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def leaves_nothing(self) -> bool:
        """Return True where nothing is written or sent by itself."""
        return self.export.is_empty and self.capture.to is None

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits: the same for profiles that ask for the same, headers of exports left out."""
        return sha256(repr(_compared(self)).encode()).hexdigest()[:12]


def _compared(thing: Any) -> Any:
    """The fields of a dataclass that count when it is compared and that its repr shows, as plain values."""
    if isinstance(thing, tuple):
        return tuple(map(_compared, thing))
    if not is_dataclass(thing):
        return thing
    shown = [known.name for known in fields(thing) if known.compare and known.repr]
    return type(thing).__name__, [(name, _compared(getattr(thing, name))) for name in shown]


EVERYTHING = Profile(
    layers=(LayerRule(match=("", "**"), device=True, text="every layer"),),
    copies=(CopyRule(text="every copy"),),
    loaders="auto",
    phases="auto",
    comm="auto",
    device=Device(host_ns=10**9),
    source="the default of a Profiler",
)
"""What a loop records whose author gave no profile. The path "" is that of a whole model."""
