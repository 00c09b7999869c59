"""An exchange: one request that a server handles and the answer to it, as one span from the call of the app to the last
byte of the answer.

The servers' adapters begin and end it and tell what they see go by; the frameworks' routers tell the route. Nothing of
headers, query or body is recorded but what the rule names, and the length of the bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from instrument.instrumentors.requests.endpoints import METHODS, Endpoints, Method
from instrument.instrumentors.requests.traceparent import Caller, Extract, extractor, w3c
from instrument.profile.model import RequestsRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import (
    FIRST_ITEM,
    ITEMS,
    LAST_ITEM,
    LINK_REMOTE,
    LINK_STATE,
    LONGEST_GAP,
    MEDIAN_GAP,
    AttributeValue,
    remote_of,
)
from instrument.runtime.faults import FAULTS

HEADER = "http.request.header."
"""How attributes begin that hold a header of a request."""

PLAIN = (b"traceparent", b"tracestate", b"content-length")
"""The headers that are asked for each time."""

SCHEME, SERVER, PORT = "url.scheme", "server.address", "server.port"
OUTCOME = "instrument.outcome"
"""How a request ended that was not answered in full: one of `OUTCOMES`, by what broke it off."""

CLIENT_GONE = "client gone"
OUTCOMES: Mapping[str, str] = {
    "CancelledError": "cancelled",
    "TimeoutError": "timed out",
    "GeneratorExit": CLIENT_GONE,
    "ClientDisconnect": CLIENT_GONE,
}

GAPS_KEPT = 10_000
"""Items of one answer whose distances the median is of: the first so many."""

ADDRESSES_KNOWN = 8
"""Addresses of a server whose endpoints are told apart. A server may take its address from what its callers send."""

CURRENT: ContextVar[Exchange | None] = ContextVar("instrument_exchange", default=None)
"""The exchange that this context works for."""


Arrival = tuple[str, str, str, "str | None", "int | str | None"]
"""Protocol and method of a request, and the scheme, address and port where it has arrived."""


class Exchanges:
    """What begins the exchanges of one rule. `is_on` is false once the rule is gone."""

    def __init__(self, rule: RequestsRule, recorder: Recorder = RECORDER) -> None:
        self._rule = rule
        self.recorder = recorder
        self.endpoints = Endpoints(rule, recorder)
        """Those of requests whose address is not told, or not told apart."""
        self.is_on = True
        self.ignores = bool(rule.ignore)
        self._exact = frozenset(path for path in rule.ignore if not path.endswith("*"))
        self._begins = tuple(path[:-1] for path in rule.ignore if path.endswith("*"))
        self._headers = {
            name.removeprefix(HEADER).encode(): name for name in rule.attributes if name.startswith(HEADER)
        }
        self.named = tuple(name for name in rule.attributes if not name.startswith(HEADER))
        """What else of the caller's request is to be recorded, by OpenTelemetry's names."""
        self._extract: Extract | None = None if rule.traceparent == "off" else extractor()
        self._follows = rule.traceparent == "follow"
        self._links = rule.traceparent == "link"
        self.is_plain = not rule.attributes and self._extract in (None, w3c)
        """Whether nothing of requests is asked for but where they have arrived, and the headers `PLAIN`."""
        self._at: dict[Any, Endpoints] = {}
        self._methods: dict[Arrival, Method] = {}

    def ignored(self, path: str) -> bool:
        """Whether requests to a path are never recorded. To be asked where the rule `ignores` any."""
        return path in self._exact or path.startswith(self._begins)

    def wanted(self, path: str) -> bool:
        """Whether a request to a path is to be recorded now."""
        current = CURRENT.get()
        if not self.is_on or (current is not None and current.frame is not None):
            return False  # an app within an app: its request is one already
        return not self.ignored(path)

    def begin_plain(self, arrival: Arrival, caller: Caller | None, length: bytes | str | None) -> Exchange | None:
        """Begin the span of a request with these `PLAIN` headers, where `is_plain`; None where it is not wanted.

        Whether its path is ignored has been asked before.
        """
        current = CURRENT.get()
        if not self.is_on or (current is not None and current.frame is not None):
            return None
        method = self._methods.get(arrival) or self._first_by(arrival)
        facts: dict[Any, Any] = method.facts.copy() if method.facts else {}
        if caller is not None and not self._follows:
            self._link(caller, facts)
            caller = None
        return Exchange(method, facts, caller, length)

    def begin_at(self, arrival: Arrival, headers: Mapping[bytes, bytes], facts: dict[Any, Any]) -> Exchange | None:
        """The same with all headers, by their names in small letters, and attributes that the rule names."""
        if not self.wanted(""):
            return None
        method = self._methods.get(arrival) or self._first_by(arrival)
        return self._begin(method, headers, {**method.facts, **facts})

    def begin(self, protocol: str, name: str, headers: Mapping[bytes, bytes], facts: dict[Any, Any]) -> Exchange:
        """Begin the span of a request by a method without an address, with these headers and attributes."""
        return self._begin(Method(self.endpoints, protocol, name), headers, facts)

    def _begin(self, method: Method, headers: Mapping[bytes, bytes], facts: dict[Any, Any]) -> Exchange:
        for header, name in self._headers.items():
            if (value := headers.get(header)) is not None:
                facts[name] = [value.decode("latin-1")]
        caller = None if self._extract is None else self._extract(headers)
        if caller is not None and not self._follows:
            self._link(caller, facts)
            caller = None
        return Exchange(method, facts, caller, headers.get(b"content-length"))

    def _link(self, caller: Caller, facts: dict[Any, Any]) -> None:
        """Link to the caller's span at most, where it is not to be followed."""
        if self._links and (span := remote_of(caller)) is not None:
            facts[LINK_REMOTE] = f"{span.trace_id:032x}-{span.span_id:016x}"
            if span.state:
                facts[LINK_STATE] = span.state

    def _first_by(self, arrival: Arrival) -> Method:
        protocol, name, scheme, address, port = arrival
        facts: dict[str, AttributeValue] = {SCHEME: scheme}
        if address is not None:
            facts[SERVER] = address
        if isinstance(port, int) or (port is not None and port.isdecimal()):
            facts[PORT] = int(port)
        endpoints = self._at.get(arrival[2:])
        if endpoints is None:
            if len(self._at) >= ADDRESSES_KNOWN:
                return Method(self.endpoints, protocol, name, facts)
            endpoints = self._at.setdefault(arrival[2:], Endpoints(self._rule, self.recorder, facts))
        method = Method(endpoints, protocol, name)
        if name in METHODS:  # callers make up others
            self._methods[arrival] = method
        return method


class Stream:
    """The items of an answer that comes in parts."""

    __slots__ = ("_now_ns", "first_ns", "gaps", "items", "last_ns")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self.first_ns = self.last_ns = self.items = 0
        self.gaps: list[int] = []

    def item(self, count: int) -> None:
        """So many have been handed to the server at once."""
        now_ns = self._now_ns()
        if not self.items:
            self.first_ns = now_ns
        elif len(self.gaps) < GAPS_KEPT:
            self.gaps.append(now_ns - self.last_ns)
        self.last_ns = now_ns
        self.items += count

    def facts(self, begun_ns: int) -> dict[str, Any]:
        """What is known of them, as attributes."""
        found = {FIRST_ITEM: self.first_ns - begun_ns, LAST_ITEM: self.last_ns - begun_ns, ITEMS: self.items}
        if self.gaps:
            found[LONGEST_GAP] = max(self.gaps)
            found[MEDIAN_GAP] = sorted(self.gaps)[(len(self.gaps) - 1) // 2]
        return found


class Exchange:
    """One request and its answer. Used by one context at a time; what comes after its end changes nothing.

    `frame` is that of its span, None once the last byte has gone. `facts` are attributes of the span, and must not be
    changed any more then. `stream` is there once the answer comes in parts.
    """

    __slots__ = ("_method", "_prefix", "answer_bytes", "facts", "frame", "route", "status", "stream")

    def __init__(
        self,
        method: Method,
        facts: dict[Any, Any],
        caller: Caller | None,
        length: bytes | str | None,
    ) -> None:
        """Begin it in this context, with its caller's span and the length of its body, as headers tell them."""
        self._method = method
        self._prefix = self.route = ""
        self.status = self.answer_bytes = 0
        self.stream: Stream | None = None
        self.facts = facts
        self.frame = method.recorder.open_request(method.site, facts, caller, length)
        CURRENT.set(self)

    @property
    def is_open(self) -> bool:
        """Whether the last byte is still to come."""
        return self.frame is not None

    def enter(self, prefix: str) -> None:
        """An app that is mounted below a prefix has been found; the route lies within it."""
        self._prefix += prefix.rstrip("/")

    def found(self, route: str) -> None:
        """The route has been found: from here on the span is one of its endpoint."""
        route = self._prefix + route
        if self.frame is not None and route != self.route:
            self.route = route
            self._method.recorder.rename(self.frame, self._method.routed(route))

    def item(self, count: int = 1) -> None:
        """Items of an answer that comes in parts have been handed to the server."""
        if self.stream is None:
            self.stream = Stream(self._method.recorder.now_ns)
        self.stream.item(count)

    def end_of_parts(self) -> None:
        """The answer is complete. One that came in a single part was no stream, however it was handed on."""
        if self.stream is not None and self.stream.items == 1:
            self.stream = None
        self.end()

    def end(self, error: BaseException | str | None = None) -> None:
        """The last byte has gone to the server, or nothing more will come: with an exception, or an error's name."""
        frame, self.frame = self.frame, None
        if frame is None:
            return
        if error is not None or self.stream is not None or self._prefix:
            self._tell_rest(frame, error)
        self._method.recorder.close_request(frame, self.facts, self.status, self.answer_bytes, error)

    def _tell_rest(self, frame: Any, error: BaseException | str | None) -> None:
        """Tell what most requests have nothing of. Never raises."""
        try:
            if self._prefix and not self.route:
                self._method.recorder.rename(frame, self._method.routed(self._prefix + "/{path}"))
            if self.stream is not None and self.stream.items:
                self.facts.update(self.stream.facts(self._method.recorder.begun_ns(frame)))
            if (outcome := OUTCOMES.get(type(error).__name__)) is not None:
                self.facts[OUTCOME] = outcome
        except Exception as fault:
            FAULTS.note("end of a request", fault)

    def broken_off(self) -> None:
        """Nobody takes the rest of the answer."""
        if self.frame is not None:
            self.facts[OUTCOME] = CLIENT_GONE
            self.end()
