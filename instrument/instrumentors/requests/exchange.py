"""Record a request and its answer (an exchange) as one span, from the server's call of the app to the last byte.

A server's adapter begins and ends the exchange. A framework's router reports the route. The span is named by method and
route, such as `GET /items/{id}`, or by `package.Service/Method` for gRPC.

Headers and the query are recorded only if the rule names them. Bodies are never recorded, only their length.
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrument.errors import error_name
from instrument.instrumentors.profiled_functions import Undo
from instrument.instrumentors.requests.propagation import (
    Caller,
    Extract,
    choose_extractor,
    pair_with_tracestate,
    read_w3c_caller,
)
from instrument.profile.model import RequestsRule
from instrument.recorder.recorder import RECORDER, REQUEST, Recorder
from instrument.recorder.wrapping import FIRST_OF_SERVER, STATUS, find_outcome
from instrument.recording.spans import (
    ERROR_TYPE,
    FIRST_ITEM,
    ITEMS,
    LAST_ITEM,
    LATE_FAILURE,
    LONGEST_GAP,
    MEDIAN_GAP,
    OUTCOME,
    STATUS_CODE,
    AttributeValue,
    Site,
)
from instrument.recording.trace_context import LINK_REMOTE, LINK_STATE, parse_parent
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import LazyModule

if TYPE_CHECKING:
    from instrument.instrumentors.requests import server_timing
    from instrument.recording import metric_definitions
else:
    metric_definitions = LazyModule("instrument.recording.metric_definitions")
    server_timing = LazyModule("instrument.instrumentors.requests.server_timing")

HEADER = "http.request.header."
"""The prefix of attributes for request headers."""

SERVER_TIMING = "Server-Timing"

SCHEME, SERVER, PORT = "url.scheme", "server.address", "server.port"
CLIENT_GONE = "client gone"
OUTCOMES: Mapping[str, str] = {
    "TimeoutError": "timed out",
    **dict.fromkeys(("GeneratorExit", "ClientDisconnect", "ClientDisconnected", "WebSocketDisconnect"), CLIENT_GONE),
}
"""The outcome of a request that ends with an exception, by the exception's class."""


def outcome_of_exception(error: BaseException | str | None) -> str | None:
    """Return the outcome of a request that an exception ended, such as `timed out`, or None for a plain failure. An
    exception group has an outcome only if all members share it."""
    members = getattr(error, "exceptions", None)
    if isinstance(members, tuple) and members:
        outcomes = {outcome_of_exception(member) for member in members}
        return outcomes.pop() if len(outcomes) == 1 else None
    return OUTCOMES.get(type(error).__name__)


BEGIN = "begin of a request"
"""The name under which faults at the start of a request are counted."""

GAPS_KEPT = 10_000
"""The maximum number of gaps between items that a streamed answer keeps. The median gap is computed from them."""

ADDRESSES_KNOWN = 8
"""The maximum number of addresses with sites of their own. This limits memory, as callers can invent addresses."""

CURRENT: ContextVar[Exchange | None] = ContextVar("instrument_exchange", default=None)
"""The exchange (a request and its answer) that the current context serves."""

Arrival = tuple[str, "str | None", "str | None", "int | str | None"]
"""A request's method, and the scheme, address and port to which it was sent.

Scheme, address and port are None for a call by name, as in gRPC.
"""

Reading = tuple[Arrival, Mapping[bytes, bytes], dict[Any, Any]]
"""A request's `Arrival`, headers with names in lower case, and attributes that the rule names."""

UNREAD = "messages of apps that could not be read"

CLOSE_CODE, ABNORMAL = "websocket.close_code", 1006
"""The attribute for a websocket's close code, and the code of a lost connection (RFC 6455)."""

EXCHANGE = "_instrument_exchange"
"""The attribute of a connection or handler object that refers to its exchange."""

Attach = Callable[[Any, "Exchanges"], list[Undo]]
"""A function that patches a server's module to record its requests. It returns the functions that undo this."""


class Exchanges:
    """The settings and the sites of a rule for requests. `is_on` is False after the rule's removal."""

    def __init__(self, rule: RequestsRule, recorder: Recorder = RECORDER) -> None:
        self.recorder = recorder
        self._format, self._generations, self._provider = rule.name, rule.gen_ai, rule.provider
        self.sites: dict[Key, Site] = {}
        """The sites of all endpoints and jobs."""
        self._addresses: set[Address] = {()}
        self.is_on = True
        self.ignores = bool(rule.ignore)
        self._exact = frozenset(path for path in rule.ignore if not path.endswith("*"))
        self._begins = tuple(path[:-1] for path in rule.ignore if path.endswith("*"))
        self._headers = {
            name.removeprefix(HEADER).encode(): name for name in rule.attributes if name.startswith(HEADER)
        }
        self.named = tuple(name for name in rule.attributes if not name.startswith(HEADER))
        """The attributes to record, by OpenTelemetry's names, without headers."""
        self._extract: Extract | None = None if rule.traceparent == "off" else choose_extractor()
        self._follows = rule.traceparent == "follow"
        self.timed_by = rule.server_timing.removeprefix("header ").lower().encode() if rule.server_timing else None
        self.times_all = rule.server_timing == "true"
        """True if every answer has timings, False if only answers to requests with a certain header have them."""
        if self.timed_by is not None:
            import_module(server_timing.__name__)  # numpy takes long, and no request may wait for it
        asks = self.timed_by is not None and not self.times_all
        self.is_plain = not rule.attributes and self._follows and self._extract is read_w3c_caller and not asks
        """True if the rule reads nothing of a request but its address and its caller's trace."""
        self._arrivals: dict[Any, Arrivals] = {}
        self.next: Exchanges | None = None
        """The settings that have replaced these at a reload. Apps that a server keeps from before the reload use the
        new settings."""

    def get_arrivals(self, protocol: str, *reads: Any) -> Arrivals:
        """Return the `Arrivals` that all apps of a protocol share. The functions `reads` read a request."""
        key = (protocol, *reads)
        return self._arrivals.get(key) or self._arrivals.setdefault(key, Arrivals(self, protocol, *reads))

    def knows_address(self, address: Address) -> bool:
        """Return True if the endpoints at a server address have sites of their own. Only the first addresses do."""
        if len(self._addresses) <= ADDRESSES_KNOWN:
            self._addresses.add(address)
        return address in self._addresses

    def site_of_endpoint(self, address: Address, protocol: str, method: str, route: str = "") -> Site:
        """Return the site of an endpoint, which all threads share. Beyond `ENDPOINT_LIMIT` sites, the routes of a
        method share a site."""
        return self.sites.get((address, protocol, method, route)) or self._make_site(address, protocol, method, route)

    def _make_site(self, address: Address, protocol: str, method: str, route: str) -> Site:
        if protocol not in CALLED and method not in METHODS and method != "_OTHER":
            return self.site_of_endpoint(address, protocol, "_OTHER", route)
        if (route or protocol in CALLED) and method and len(self.sites) >= ENDPOINT_LIMIT:
            self.recorder.count(BEYOND)
            return self.site_of_endpoint(address, protocol, "" if protocol in CALLED else method)
        # An app of WSGI has a thread for itself; an app of ASGI waits between its steps.
        name, facts, suspends = method or protocol, dict(address), protocol not in ("wsgi", *CALLED)
        if protocol in CALLED:
            facts = {"rpc.system.name": protocol, "rpc.method": method or "_OTHER", **facts}
        else:
            parts: dict[str, AttributeValue] = {"http.request.method": method}
            if route:
                parts["http.route"] = route
                if self._generations and metric_definitions.matches_route(route, self._generations):
                    parts[metric_definitions.OPERATION] = metric_definitions.operation_of_route(route)
                    parts |= {metric_definitions.PROVIDER: self._provider} if self._provider else {}
            parts |= {"network.protocol.name": "websocket"} if protocol == "websocket" else {}
            facts = parts | facts
            verb = "HTTP" if method == "_OTHER" else method
            name = self._format.replace("{method}", verb).replace("{route}", route).strip() or verb
        new = Site(name, "request", attributes=tuple(facts.items()), suspends=suspends)
        site = self.sites.setdefault((address, protocol, method, route), new)
        self.recorder.note_shape(site, REQUEST)
        return site

    def is_path_recorded(self, path: str) -> bool:
        current = CURRENT.get()
        if not self.is_on or not self.recorder.on or (current is not None and current.frame is not None):
            return False  # an app inside an app: the request has a span already
        return not self.ignores_path(path)

    def ignores_path(self, path: str) -> bool:
        return self.ignores and (path in self._exact or path.startswith(self._begins))

    def read_caller(self, headers: Mapping[bytes, bytes], facts: dict[Any, Any]) -> Caller | None:
        """Return the caller's span, or None if the rule does not continue the caller's trace. Add the recorded headers
        to `facts`."""
        for header, name in self._headers.items():
            if (value := headers.get(header)) is not None:
                facts[name] = [value.decode("latin-1")]
        caller = None if self._extract is None else self._extract(headers)
        if caller is None or self._follows:
            return caller
        if (span := parse_parent(caller)) is not None:  # the rule links to the caller
            facts[LINK_REMOTE] = f"{span.trace_id:032x}-{span.span_id:016x}"
            if span.state:
                facts[LINK_STATE] = span.state
        return None


class Stream:
    """The times in ns at which the items of a streamed answer were sent."""

    __slots__ = ("_now_ns", "first_ns", "gaps", "items", "last_ns")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self.first_ns = self.last_ns = self.items = 0
        self.gaps: list[int] = []

    def note_sent_items(self, count: int) -> None:
        now_ns = self._now_ns()
        if not self.items:
            self.first_ns = now_ns
        elif len(self.gaps) < GAPS_KEPT:
            self.gaps.append(now_ns - self.last_ns)
        self.last_ns = now_ns
        self.items += count

    def make_attributes(self, begun_ns: int) -> dict[str, Any]:
        attributes = {FIRST_ITEM: self.first_ns - begun_ns, LAST_ITEM: self.last_ns - begun_ns, ITEMS: self.items}
        if self.gaps:
            attributes[LONGEST_GAP] = max(self.gaps)
            attributes[MEDIAN_GAP] = sorted(self.gaps)[(len(self.gaps) - 1) // 2]
        return attributes


class _HandedItem:
    """An awaitable that passes an asynchronous generator's item to `SteppedItems`."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item

    def __await__(self) -> Any:
        return iter((self,))  # one of a generator takes longer


async def _yield_items(items: AsyncIterator[Any]) -> None:
    async for item in items:
        await _HandedItem(item)


class SteppedItems:
    """A proxy of an asynchronous generator. While the generator is suspended, the request's span counts as waiting."""

    __slots__ = ("_exchange", "_items", "_steps")

    def __init__(self, exchange: Exchange, items: Any) -> None:
        self._exchange = exchange
        self._items = items
        self._steps = exchange.track_waits(_yield_items(items)).__await__()  # one for all items, with the times between

    def __aiter__(self) -> SteppedItems:
        return self

    @types.coroutine
    def __anext__(self) -> Generator[Any, Any, Any]:
        step, value = self._steps.send, None
        try:
            while type(handed := step(value)) is not _HandedItem:
                try:
                    step, value = self._steps.send, (yield handed)
                except BaseException as error:
                    step, value = self._steps.throw, error
        except StopIteration:
            raise StopAsyncIteration from None
        finally:
            value = None  # a thrown exception would refer to itself by its traceback
        return handed.item

    async def aclose(self) -> None:
        self._steps.close()
        await self._exchange.track_waits(self._items.aclose())


class Exchange:
    """A request and the answer. Only one context at a time may use it. Calls after the end have no effect.

    `frame` is the open span, None after the last byte. `facts` are the span's attributes, which must not change later.
    `stream` is None unless the answer is streamed.

    Some servers set `failure`, the exception behind the answer, and `is_events`, which is True for server-sent events.
    """

    __slots__ = (
        *("answer_bytes", "facts", "failure", "frame", "is_events", "method", "prefix", "route", "status", "stream"),
        "timing",
    )

    answer_bytes: int
    facts: dict[Any, Any]
    failure: BaseException | None
    frame: Any
    is_events: bool
    method: Method
    prefix: str
    route: str
    status: int
    stream: Stream | None
    timing: server_timing.AnswerTimings | None

    @property
    def is_open(self) -> bool:
        return self.frame is not None

    def add_route_prefix(self, prefix: str) -> None:
        self.prefix += prefix.rstrip("/")

    def set_route(self, route: str) -> None:
        route = self.prefix + route
        if self.frame is not None and route != self.route:
            self.route = route
            self.method.recorder.rename(self.frame, self.method.site_of_route(route))

    def track_waits(self, awaitable: Any) -> Any:
        """Wrap an awaitable of the app. While it is suspended, the span counts as waiting."""
        return self.method.recorder.stepped_in(self.frame, awaitable)

    async def serve(self, awaitable: Any, end: Callable[[BaseException | None], object]) -> Any:
        """Await the app's work, and record the waits in it. Then call `end` with the exception or None."""
        try:
            answer = await self.track_waits(awaitable)
        except BaseException as error:
            end(error)
            raise
        end(None)
        return answer

    def set_status(self, status: Any) -> None:
        """Store the answer's status as an attribute of the span. A status that is not a number becomes 0."""
        self.status = status if type(status) is int else int(status) if isinstance(status, int) else 0
        if self.status and self.frame is not None:
            self.facts[STATUS] = self.status

    def note_sent_items(self, count: int = 1) -> None:
        if self.stream is None:
            self.stream = Stream(self.method.recorder.now_ns)
        self.stream.note_sent_items(count)

    def begin_answer(self, status: Any, content_type: str | None) -> None:
        self.set_status(status)
        self.is_events = content_type is not None and content_type.startswith("text/event-stream")
        if self.status < FIRST_OF_SERVER:
            self.failure = None

    def add_part(self, body: Any, *, is_last: bool = False) -> None:
        try:
            self.answer_bytes += len(body)
            if self.timing is not None:
                self.timing.note_body_part(bytes(body))
            if len(body) and (self.stream is not None or not is_last):
                is_events = getattr(self, "is_events", False)
                self.note_sent_items((bytes(body).count(b"\n\n") or 1) if is_events else 1)
        except Exception:
            self.count_unread()

    def end_after_server(
        self, error: BaseException | None = None, *, is_gone: bool = False, in_parts: bool = True
    ) -> None:
        """End the exchange after the server has finished, with `error` or the stored failure.

        `is_gone` is True if the client has closed the connection. `in_parts` is False for a websocket.
        """
        failure = error or getattr(self, "failure", None)
        self.failure = None  # the exception's traceback refers to the exchange
        is_broken_off = isinstance(failure, OSError) and not isinstance(failure, TimeoutError)
        if is_gone and failure is not None and (is_broken_off or not isinstance(failure, Exception)):
            self._drop_unsent_status()
            self.end_incomplete()
        elif failure is not None:
            self.end_with_exception(failure)
        elif not in_parts or getattr(self, "is_events", False):
            self.end()
        else:
            self.end_after_parts()

    def end_after_parts(self) -> None:
        if self.stream is not None and self.stream.items == 1:
            self.stream = None
        self.end()

    def end_with_exception(self, error: BaseException) -> None:
        if outcome_of_exception(error) == CLIENT_GONE:
            self._drop_unsent_status()
        elif find_outcome(error) is None:
            self.set_status(self.status or 500)
        self.end(error)

    def _drop_unsent_status(self) -> None:
        """Drop a status of 500 or above, because the client had disconnected and never got the answer."""
        if self.frame is not None and self.status >= FIRST_OF_SERVER:
            self.status = 0
            self.facts.pop(STATUS, None)

    def end(self, error: BaseException | str | None = None) -> None:
        """End the span. An exception after the end is recorded separately."""
        frame, self.frame = self.frame, None
        try:
            if frame is None:
                if isinstance(error, BaseException):
                    self._record_late_failure(error)
                return
            if error is not None or self.stream is not None or self.prefix:
                error = self._add_final_attributes(frame, error)
            self.method.close_request(frame, self.facts, self.status, self.answer_bytes, error)
        except Exception as fault:
            if frame is not None:
                self.method.recorder.close(frame, error, True)  # without its attributes
            FAULTS.note("end of a request", fault)

    def _add_final_attributes(self, frame: Any, error: BaseException | str | None) -> BaseException | str | None:
        if self.prefix and not self.route:
            self.method.recorder.rename(frame, self.method.site_of_route(self.prefix + "/{path}"))
        if self.stream is not None and self.stream.items:
            self.facts.update(self.stream.make_attributes(frame.start_ns))
        if (outcome := outcome_of_exception(error)) is not None:
            self.facts[OUTCOME] = outcome
        return None if outcome == CLIENT_GONE else error

    def _record_late_failure(self, error: BaseException) -> None:
        recorder = self.method.recorder
        if find_outcome(error) is not None or outcome_of_exception(error) == CLIENT_GONE or not recorder.on:
            return
        facts: dict[Any, Any] = {STATUS_CODE: "ERROR", ERROR_TYPE: error_name(error)}
        facts.update(self.method.site_of_route(self.route).attributes)
        recorder.record(LATE_FAILURE, recorder.now_ns(), facts)

    def end_incomplete(self, outcome: str = CLIENT_GONE) -> None:
        if self.frame is not None:
            self.facts[OUTCOME] = outcome
            self.end()

    def count_unread(self) -> None:
        self.method.recorder.count(UNREAD)


def current_exchange() -> Exchange | None:
    exchange = CURRENT.get()
    return exchange if exchange is not None and exchange.frame is not None else None


def exchange_of(holder: Any) -> Exchange | None:
    exchange: Exchange | None = getattr(holder, EXCHANGE, None)
    return exchange if exchange is not None and exchange.frame is not None else None


def count_part(connection: Any, part: Any, *_: Any, **__: Any) -> None:
    """Count a part of an answer. A task or thread of the service has sent the part over the connection."""
    if hasattr(part, "__len__") and (exchange := exchange_of(connection)) is not None:
        exchange.add_part(part)


class Arrivals:
    """A factory for the exchanges of one protocol.

    Three functions read a server's request. `read_path` reads the path, `read_plain` the method, address, caller and
    body length. `read_all` is called instead if `read_plain` is None, or if the rule needs more.
    """

    __slots__ = ("_is_plain", "_key", "_methods", "_protocol", "_read_all", "_read_path", "_read_plain", "exchanges")

    def __init__(
        self,
        exchanges: Exchanges,
        protocol: str,
        read_path: Callable[[Any], str],
        read_plain: Callable[[Any], tuple[Arrival, Caller | None, bytes | str | None]] | None,
        read_all: Callable[[Any, tuple[str, ...]], Reading],
    ) -> None:
        self.exchanges = exchanges
        self._protocol = protocol
        self._is_plain = exchanges.is_plain and read_plain is not None
        self._read_path = read_path
        self._read_plain: Any = read_plain
        self._read_all = read_all
        self._key = protocol, read_path, read_plain, read_all
        self._methods: dict[Arrival, Method] = {}

    def begin_exchange(self, request: Any) -> Exchange | None:
        """Begin the span of a request. Return None for a request that is not recorded. Never raises."""
        exchanges = self.exchanges
        current = CURRENT.get()  # the same test as `is_path_recorded`, whose call would take 0.05 us
        if not exchanges.is_on or not exchanges.recorder.on or (current is not None and current.frame is not None):
            successor = None if exchanges.is_on else exchanges.next
            return None if successor is None else successor.get_arrivals(*self._key).begin_exchange(request)
        try:
            if exchanges.ignores and exchanges.ignores_path(self._read_path(request)):
                return None
            if self._is_plain:
                arrival, caller, length = self._read_plain(request)
                method = self._methods.get(arrival) or self._find_or_make_method(arrival)
                facts: dict[Any, Any] = method.facts.copy() if method.facts else {}
            else:
                arrival, headers, attributes = self._read_all(request, exchanges.named)
                method = self._methods.get(arrival) or self._find_or_make_method(arrival)
                facts = {**method.facts, **attributes}
                caller, length = exchanges.read_caller(headers, facts), headers.get(b"content-length")
            exchange = Exchange()  # with an `__init__` it would take 0.06 us more
            exchange.method = method
            exchange.facts = facts
            exchange.prefix = exchange.route = ""
            exchange.status = exchange.answer_bytes = 0
            exchange.stream = None
            exchange.timing = None
            exchange.frame = method.open_request(method.site, facts, caller, length)
            if exchanges.times_all or (not self._is_plain and exchanges.timed_by in headers):
                exchange.timing = server_timing.AnswerTimings(exchanges.recorder)
            CURRENT.set(exchange)
            return exchange
        except Exception as fault:
            FAULTS.note(BEGIN, fault)
            return None

    def _find_or_make_method(self, arrival: Arrival) -> Method:
        name, scheme, host, port = arrival
        facts: dict[str, AttributeValue] = {}
        if scheme is not None:
            facts[SCHEME] = scheme
            if host is not None:
                facts[SERVER] = host
            if isinstance(port, int) or (port is not None and port.isdecimal()):
                facts[PORT] = int(port)
        address = tuple(facts.items())
        if not self.exchanges.knows_address(address):
            return Method(self.exchanges, (), self._protocol, name, facts)
        method = Method(self.exchanges, address, self._protocol, name, {})
        if name in METHODS:  # callers invent others
            self._methods[arrival] = method
        return method


def make_request_readers(
    arrival: Callable[[Any], tuple[str, str, Any]],
    headers: Callable[[Any], Any],
    path: Callable[[Any], str],
    query: Callable[[Any], str | None],
    client: Callable[[Any], str | None],
) -> tuple[Any, Any, Any]:
    """Return the three functions that `Arrivals` needs. `headers` returns a case-insensitive mapping."""

    def read_arrival(request: Any) -> Arrival:
        method, scheme, address = arrival(request)
        return (method, scheme, *address[:2]) if isinstance(address, tuple) else (method, scheme, address or None, None)

    def read_plain(request: Any) -> tuple[Arrival, Caller | None, str | None]:
        fields = headers(request)
        caller, state = fields.get("traceparent"), fields.get("tracestate")
        caller = caller if state is None else pair_with_tracestate(caller, state)
        return read_arrival(request), caller, fields.get("content-length")

    def read_all(request: Any, names: tuple[str, ...]) -> Reading:
        fields = {name.lower(): value for name, value in headers(request).items()}
        values = {"url.path": path, "url.query": query, "client.address": client}
        attributes = {name: values[name](request) if name in values else fields.get("user-agent") for name in names}
        encoded = {name.encode(): value.encode("latin-1", "replace") for name, value in fields.items()}
        return read_arrival(request), encoded, {name: value for name, value in attributes.items() if value}

    return path, read_plain, read_all


class ServedApp:
    """A proxy of an app that records the app's requests."""

    def __init__(self, app: Any, exchanges: Exchanges) -> None:
        self.app = app
        self.instrument_exchanges = exchanges

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)


METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})

ENDPOINT_LIMIT = 1_000
"""The maximum number of endpoints. Requests to other endpoints are named by their method alone."""

BEYOND = "endpoints beyond the limit, counted by their method"

CALLED = frozenset({"grpc", "ray_serve", "triton"})
"""The protocols that call a method by name. Their requests have no route."""

Address = tuple[tuple[str, AttributeValue], ...]
"""The span attributes of a server address. Empty if requests at the address share the sites of other addresses."""

Key = tuple[object, str, str, str]
"""An endpoint's address, protocol, method and route, or a job's system, task and queue."""


class Method:
    """The sites of one request method at one server address. `facts` has the address if the sites are shared with other
    addresses."""

    __slots__ = ("_key", "_site_of", "close_request", "facts", "open_request", "recorder", "site")

    def __init__(
        self, exchanges: Exchanges, address: Address, protocol: str, name: str, facts: dict[str, AttributeValue]
    ) -> None:
        self._site_of, self._key = exchanges.site_of_endpoint, (address, protocol, name)
        self.facts = facts
        self.recorder = exchanges.recorder
        self.open_request, self.close_request = self.recorder.open_request, self.recorder.close_request
        self.site = self.site_of_route("")

    def site_of_route(self, route: str) -> Site:
        return self._site_of(*self._key, route)
