"""The span model that recorders and readers share.

A `Site` is an instrumented place in code, and a `Span` is one timed execution of it. All classes are plain data. Times
are integer nanoseconds on the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from sys import intern
from typing import Any, ClassVar

from instrument.recording.trace_context import LinkedSpan, RemoteParent, parse_parent
from instrument.runtime.lazy_imports import Field, NamedTuple, dataclass, field, fields

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float] | Sequence[bool]
Interval = tuple[int, int]


KEY_ATTRIBUTES = ("phase", "direction", "sync")
"""The attributes that are part of a site's `key`. Other attributes, such as a rank, may differ between processes."""


class Work(NamedTuple):
    """The framework that launches the device work of a span, and the devices. Without devices, the work is on the
    framework's current device."""

    framework: str
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """An instrumented place in code, such as a function, with the values that all its spans share.

    Sites are compared by identity, because they are keys of the tally on the hot path. `key` compares sites by value.

    - `name`: the name in reports; for a layer the class name
    - `instance`: what distinguishes sites of one name; for a layer the path in the module tree
    - `attributes`: the attributes of every span
    - `min_ns`: the length below which a span without children and error is only counted
    - `suspends`: True for a coroutine or an async generator, which may wait while it is open
    - `work`: a function that returns the framework and the devices of a new span
    """

    fields: ClassVar[tuple[str, ...]]

    name: str
    kind: str = "user"
    module: str = ""
    qualname: str = ""
    file: str = ""
    line: int = 0
    instance: str = ""
    device: bool = False
    attributes: tuple[tuple[str, AttributeValue], ...] = ()
    min_ns: int = 0
    suspends: bool = False
    work: Callable[[], Work] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """A value that identifies the site's place in code in all processes."""
        facts = [fact for fact in self.attributes if fact[0] in KEY_ATTRIBUTES and isinstance(fact[1], (str, bool))]
        return (self.name, self.kind, self.module, self.qualname, self.file, self.line, self.instance, *facts)

    @property
    def function(self) -> str:
        """The full name of the function, `module.qualname`. It is empty for a site outside of functions."""
        return f"{self.module}.{self.qualname}" if self.module and self.qualname else self.qualname


def storable_fields(kind: type) -> list[Field[Any]]:
    return [member for member in fields(kind) if not str(member.type).startswith("Callable")]


Site.fields = tuple(key for key, kind in Site.__annotations__.items() if not kind.startswith(("Callable", "ClassVar")))

NO_DEVICE_TIME = "no device time: "
"""The first words of every note that says why no device time was measured."""


@dataclass(frozen=True, slots=True)
class DeviceInterval:
    """The time of a span's work on a device stream, on the host's clock. `label` is one of `memory.LABELS`.
    `uncertainty_ns` is the uncertainty of the begin and the end."""

    device: int
    stream: int
    start_ns: int
    end_ns: int
    label: str = "exclusive"
    uncertainty_ns: int = 0


UNTIMED: frozenset[str] = frozenset({"captured", "dropped"})
"""The labels of device intervals that have the time of their submission, but no length."""


VALUE_LIMIT = 256
"""The maximum number of characters of an attribute's name and of its value. A longer text is cut."""

ATTRIBUTE_LIMIT = 128
"""The maximum number of attributes of a span (OpenTelemetry's limit), and of items of a list in an attribute."""

STATUS_CODE, STATUS_DESCRIPTION, ERROR_TYPE = "otel.status_code", "otel.status_description", "error.type"
"""OpenTelemetry's attributes for the status of a span: `OK` or `ERROR`, its reason, and the kind of error."""

OUTCOME = "instrument.outcome"
"""The attribute with the cause of a span's interruption, such as `cancelled`. An interrupted span has not failed."""

FIRST_ITEM, LAST_ITEM = "first_item_ns", "last_item_ns"
"""The attributes with the ns from a streaming span's begin to its first item and to its last item."""

ITEMS, LONGEST_GAP, MEDIAN_GAP = "items", "longest_gap_ns", "median_gap_ns"
"""The attributes with a streaming span's number of items, and the longest and median ns between two items."""

KEY = intern("instrument.key")
"""The attribute with the key of the request that a span serves. All processes use the same key for a request."""

BATCH_KEYS, BATCH_WEIGHTS = intern("instrument.batch.keys"), intern("instrument.batch.weights")
"""The attributes of a batch, a span that serves several requests: the requests' keys, and the weight of each."""

FACTS, FACT_KEYS = intern("instrument.facts"), ".keys"
"""The attribute that lists the facts of requests in a span, such as token counts.

- An entry is a word of `profile.model.KEEPS`, a space and the name of another attribute.
- If a fact is a list, it has one item per request. The requests' keys are in an attribute with the suffix `FACT_KEYS`.
"""

KEY_LIMIT, BATCH_LIMIT = 128, 1024
"""The maximum number of characters in a key, and of keys in a batch. A longer key is cut and ends in a checksum."""

BLOCKED_BY, BLOCKED_AT = "instrument.blocked_by", "instrument.blocked_at"
"""The attributes of a span in which an event loop was blocked: the blocking span or function, and the line."""


@dataclass(slots=True)
class Span:
    """A timed execution of a site.

    - `parent_id`: the span around this span, or the span that started its task or thread; 0 for a root
    - `root_id`: the root of the tree
    - `task_id`: 0 outside of asyncio tasks
    - `active_ns`: the time in which the body ran; less than the total for generators and suspended coroutines
    - `self_ns`: the time outside of children on the same thread and task, including waits
    - `clipped`: True if the span was open at the edge of the window
    - `links`: the known requests that a batch serves
    """

    site: Site
    span_id: int
    parent_id: int
    root_id: int
    thread_id: int
    task_id: int
    start_ns: int
    end_ns: int
    active_ns: int
    self_ns: int
    error: str | None = None
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    device: tuple[DeviceInterval, ...] = ()
    clipped: bool = False
    remote: RemoteParent | None = None
    links: Sequence[LinkedSpan] = ()

    @property
    def total_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def device_ns(self) -> int:
        """The time on devices. Overlapping device intervals count once."""
        return covered_ns((d.start_ns, d.end_ns) for d in self.device) if self.device else 0


@dataclass(frozen=True, slots=True)
class Origin:
    """The process that recorded spans. `monotonic_ns` and `realtime_ns` are simultaneous readings of the monotonic and
    the wall clock.

    - `profile`, `digest`: the source of the profile, and the hash of its content
    - `generation`: the number of the profile in the process, from 1 (0: unknown)
    - `boot`: the id of the machine's boot; processes of one boot share the monotonic clock
    - `wall_error_ns`: the largest error of `realtime_ns`, 0 if unknown
    - `run`: the name of the run, which may have several hosts, "" for none; request keys are unique in a run
    - `start_ticks`: the start of the process in ticks since boot (0: unknown), because containers may share process ids
    - `version`: the version of the service, "" for none
    - `caller`: `traceparent`, a space and `tracestate` from the process's environment, "" for none
    """

    pid: int
    service: str
    monotonic_ns: int
    realtime_ns: int
    recorder: str = "native"
    profile: str = ""
    host: str = ""
    generation: int = 0
    digest: str = ""
    boot: str = ""
    wall_error_ns: int = 0
    run: str = ""
    start_ticks: int = 0
    version: str = ""
    caller: str = ""

    @property
    def remote(self) -> RemoteParent | None:
        return parse_parent(tuple(self.caller.split(" ", 1)))

    def realtime_of(self, monotonic_ns: int) -> int:
        """Convert a monotonic time to wall-clock nanoseconds since 1970."""
        return self.realtime_ns + (monotonic_ns - self.monotonic_ns)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of the instrumentation in `window_ns` of wall time.

    - `calls`: the number of recorded calls
    - `per_call_ns`: the cost of a call if the probe's memory is in the processor's caches
    - `cold_call_ns`: the largest cost of a call if that memory is not in the caches, 0 if unknown
    - `thread_ns`: the processor time of the threads that read and send spans
    """

    calls: int
    per_call_ns: float
    window_ns: int
    thread_ns: int = 0
    cold_call_ns: float = 0.0

    @property
    def total_ns(self) -> int:
        """The cost in ns if the memory of probes is always in the processor's caches."""
        return round(self.calls * self.per_call_ns) + self.thread_ns

    @property
    def most_ns(self) -> int:
        """The cost in ns if the memory of probes is never in the processor's caches."""
        return round(self.calls * max(self.cold_call_ns, self.per_call_ns)) + self.thread_ns


HOST = -1
"""The value of `device` in a sample of the host."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of the gauge `name` of a device or of the host.

    `value` is None if the device does not report the gauge; a gauge that is never reported has one such sample.
    `device` is the index that CUDA has for the device in this process (see `Gpu`), or `HOST`.
    """

    name: str
    device: int
    at_ns: int
    value: float | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG instance of a GPU. `uuid` is the name in NVML, and begins with `GPU-` or `MIG-`.

    `device` is the index among `CUDA_VISIBLE_DEVICES`, in the order of PCI buses. CUDA has the same indices if
    `CUDA_DEVICE_ORDER` is `PCI_BUS_ID`, or if all GPUs are of one model.
    """

    device: int
    model: str = ""
    uuid: str = ""


class Kernel(NamedTuple):
    """A kernel, copy or fill on a stream of a device, as torch.profiler recorded it. `launched_ns` is the start of the
    host's call that launched it, and `thread_id` is the thread of that call. Both are 0 if unknown."""

    name: str
    kind: str
    device: int
    stream: int
    start_ns: int
    end_ns: int
    thread_id: int = 0
    launched_ns: int = 0


WORK: tuple[str, ...] = ("kernel", "copy", "fill")


class Flops(NamedTuple):
    """The number of floating-point operations in a call of an operator, as torch.profiler counted them. `thread_id` and
    `at_ns` are the thread and the start time of the call."""

    thread_id: int
    at_ns: int
    flops: int


FLOPS = "flops"
"""The attribute with the number of floating-point operations of a span, without those of its children."""


OPERATORS = "torch.profiler"
"""The `module` of the sites of torch operators that torch.profiler recorded."""


def is_operator(site: Site) -> bool:
    return site.module == OPERATORS and site.kind == "op"


BLOCKED_LOOP = Site("loop blocked", "user", module="asyncio.events", qualname="Handle._run")
"""The site of spans in which one callback blocked an event loop while requests were open."""


COLLECTION = Site("garbage collection", "user", module="gc", qualname="collect")
"""The site of garbage collections, each of which stopped all threads of the process."""


EXECUTOR_QUEUE = "queue (executor)"
"""The name of the spans in which a request's work waits for a free thread of an executor."""


TIME_IN_QUEUE = "instrument.time_in_queue"
"""The attribute with the seconds for which a job, such as a Celery task, waited in its queue."""

LATE_FAILURE = Site("failed after its answer", "user", module="instrument", qualname="requests")
"""The site of failures in a web application that has already sent its complete answer."""


def _make_site_check(model: Site) -> Callable[[Site], bool]:
    """Return a function that compares sites with `model` by name and module."""
    return lambda site: site.module == model.module and site.name == model.name


is_blocked_loop, is_collection, is_late_failure = map(_make_site_check, (BLOCKED_LOOP, COLLECTION, LATE_FAILURE))


def is_request(site: Site) -> bool:
    return site.kind == "request"


def is_interruption(site: Site) -> bool:
    """Return True for a blocked event loop or a garbage collection. The time of such a span is part of the interrupted
    spans."""
    return is_blocked_loop(site) or is_collection(site)


def read_flops(attributes: Mapping[str, object]) -> int:
    count = attributes.get(FLOPS)
    return count if type(count) is int and 0 < count < 1 << 63 else 0


@dataclass(frozen=True, slots=True)
class ImportTime:
    """The time to import one top-level package, and the number of its imports by other code.

    - `total_ns`: includes packages that this package imported
    - `self_ns`: the time of the package's own modules, so it adds up over packages and threads
    - `in_spans_ns`: the part of `self_ns` in which the thread had an open span
    - `late_ns`: the part of `self_ns` without an open span, in imports that began after the first request
    """

    package: str
    entries: int
    total_ns: int
    self_ns: int
    in_spans_ns: int = 0
    late_ns: int = 0


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first completed call of a site, with its start and its time on the host."""

    site: Site
    start_ns: int
    total_ns: int


FIRSTS: Mapping[str, str] = {
    "": "It is the request that began first.",
    "named": "A rule of the profile names it, with first_request: true.",
    "passed": "Requests before it have the name of a health probe, or called nothing that is recorded, and do not "
    "count: a rule with `first_request: true` can name the right one.",
}
"""The reason why a request counts as the first, by the value of `Startup.why`."""


@dataclass(frozen=True, slots=True)
class Startup:
    """The startup of a process. It is kept even if the first spans are overwritten.

    - `process_ns`: the start of the process, None if unknown
    - `imports`: None if imports were not timed
    - `firsts`: the first call of each site, in no order
    - `request`: the request that counts as the first, None for the earliest; its length is 0 if unknown
    - `why`: a key of `FIRSTS`
    """

    session_ns: int
    process_ns: int | None = None
    imports: tuple[ImportTime, ...] | None = None
    firsts: tuple[FirstCall, ...] = ()
    request: FirstCall | None = None
    why: str = ""

    @property
    def first_request(self) -> FirstCall | None:
        """The request that counts as the first. By default, this is the completed request that began first."""
        if self.request is not None:
            return self.request
        requests = [call for call in self.firsts if call.site.kind == "request"]
        return min(requests, key=lambda call: call.start_ns, default=None)


@dataclass(frozen=True, slots=True)
class OwnNotes:
    """The rules and targets of a profile that one process did not use. Other processes of the run may have used them.

    - `at_work`: the ids (see `board`) of the rules that the process used
    - `waiting`: the notes on unused rules, by the ids of the rules
    - `uncalled`: the names of the targets that the process did not call
    """

    at_work: tuple[str, ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    uncalled: tuple[str, ...] = ()


UNCALLED_NAMED, UNCALLED_COLUMNS = 4, 60
"""The maximum number of names in a note on uncalled targets, and of characters in a name."""


def describe_uncalled_targets(targets: Sequence[str]) -> str:
    some = sorted(targets)[:UNCALLED_NAMED]
    half = UNCALLED_COLUMNS // 2
    names = [name if len(name) <= UNCALLED_COLUMNS else f"{name[: half - 2]}...{name[1 - half :]}" for name in some]
    many = f"{len(targets)} targets were" if len(targets) > 1 else "1 target was"
    unnamed = len(targets) - UNCALLED_NAMED
    more = f", and {unnamed} more (`instrument check` names all)" if unnamed > 0 else ""
    return f"{many} never called: {', '.join(names)}{more}"


def covered_ns(parts: Iterable[Interval]) -> int:
    """Return the time that intervals cover. For many intervals, `instrument.trace.intervals` is faster."""
    total_ns, reached_ns = 0, -1 << 63
    for start_ns, end_ns in sorted(parts):
        total_ns += max(end_ns - max(start_ns, reached_ns), 0)
        reached_ns = max(end_ns, reached_ns)
    return total_ns
