"""An exchange: one request that a server handles and the answer to it, as one span from the call of the app to the last
byte of the answer.

The servers' adapters begin and end it and tell what they see go by; the frameworks' routers tell the route. Nothing of
headers, query or body is recorded but what the rule names, and the length of the bodies.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from instrument.errors import FAULTS
from instrument.http_status import FIRST_OF_SERVER, STATUS
from instrument.probes.requests.endpoints import Endpoints
from instrument.probes.requests.traceparent import Extract, extractor
from instrument.profile import RequestsRule
from instrument.recorder import RECORDER, Recorder
from instrument.spans import FIRST_ITEM, ITEMS, LAST_ITEM, LINK_REMOTE, LONGEST_GAP, MEDIAN_GAP, RemoteParent, remote_of

HEADER = "http.request.header."
"""How attributes begin that hold a header of a request."""

SCHEME, SERVER, PORT = "url.scheme", "server.address", "server.port"
REQUEST_BYTES = "http.request.body.size"
ANSWER_BYTES = "http.response.body.size"
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

PLACES_KNOWN = 100
"""Addresses of servers whose attributes are kept ready."""

CURRENT: ContextVar[Exchange | None] = ContextVar("instrument_exchange", default=None)
"""The exchange that this context works for."""

OPEN: set[Exchange] = set()
"""Those that an event loop has open."""

_now = time.monotonic_ns
_running_loop: Callable[[], Any] | None = None


def _loop() -> Any:
    """The event loop that runs on this thread, or None. Never imports asyncio."""
    global _running_loop
    if _running_loop is None:
        _running_loop = getattr(sys.modules.get("asyncio.events"), "_get_running_loop", None)
        if _running_loop is None:
            return None
    return _running_loop()


class Exchanges:
    """What begins the exchanges of one rule. `is_on` is false once the rule is gone."""

    def __init__(self, rule: RequestsRule, recorder: Recorder = RECORDER) -> None:
        self.recorder = recorder
        self.endpoints = Endpoints(rule, recorder)
        self.is_on = True
        self._exact = frozenset(path for path in rule.ignore if not path.endswith("*"))
        self._begins = tuple(path[:-1] for path in rule.ignore if path.endswith("*"))
        self._headers = {
            name.removeprefix(HEADER).encode(): name for name in rule.attributes if name.startswith(HEADER)
        }
        self.named = tuple(name for name in rule.attributes if not name.startswith(HEADER))
        """What else of the caller's request is to be recorded, by OpenTelemetry's names."""
        self._extract: Extract | None = None if rule.traceparent == "off" else extractor()
        self._links = rule.traceparent == "link"
        self._at: dict[Any, dict[str, Any]] = {}

    def wanted(self, path: str) -> bool:
        """Whether a request to a path is to be recorded now."""
        if not self.is_on:
            return False
        current = CURRENT.get()
        if current is not None and current.frame is not None:
            return False  # an app within an app: its request is one already
        return path not in self._exact and not (self._begins and path.startswith(self._begins))

    def at(self, scheme: str, server: tuple[str, int | None] | None) -> dict[str, Any]:
        """The attributes that say where a request has come to."""
        known = self._at.get((scheme, server))
        if known is None:
            known = {SCHEME: scheme}
            if server is not None:
                known[SERVER] = server[0]
                if server[1] is not None:
                    known[PORT] = server[1]
            if len(self._at) < PLACES_KNOWN:
                self._at[scheme, server] = known
        return known.copy()

    def begin(self, protocol: str, method: str, headers: Mapping[bytes, bytes], facts: dict[Any, Any]) -> Exchange:
        """Begin the span of a request with these headers, whose names are in small letters, and these attributes."""
        attributes: dict[Any, Any] | None = None
        if self._extract is not None and (caller := self._extract(headers)) is not None:
            if self._links:
                if (span := remote_of(caller)) is not None:
                    facts[LINK_REMOTE] = f"{span.trace_id:032x}-{span.span_id:016x}"
            else:
                attributes = {RemoteParent: caller}
        length = headers.get(b"content-length")
        if length is not None and length.isdigit() and len(length) < 19:
            facts[REQUEST_BYTES] = int(length)
        if self._headers:
            for header, name in self._headers.items():
                if (value := headers.get(header)) is not None:
                    facts[name] = [value.decode("latin-1")]
        frame = self.recorder.open(self.endpoints.site(protocol, method), attributes)
        exchange = Exchange(self, protocol, method, facts, frame)
        CURRENT.set(exchange)
        return exchange


class Stream:
    """The items of an answer that comes in parts."""

    __slots__ = ("first_ns", "gaps", "items", "last_ns")

    def __init__(self) -> None:
        self.first_ns = self.last_ns = self.items = 0
        self.gaps: list[int] = []

    def item(self, count: int) -> None:
        """So many have been handed to the server at once."""
        now_ns = _now()
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

    `frame` is that of its span, None once the last byte has gone; its `facts` belong to the span then, and must not be
    changed any more. `loop` is the event loop that it waits on until then, None without one. `stream` is there once the
    answer comes in parts.
    """

    # Of the class until they differ: most requests set few of them, and each costs.
    route = ""
    status = answer_bytes = 0
    stream: Stream | None = None
    _prefix = ""

    def __init__(self, of: Exchanges, protocol: str, method: str, facts: dict[Any, Any], frame: Any) -> None:
        self._of = of
        self._endpoint = protocol, method
        self._begun_ns = _now()
        self.facts = facts
        self.frame = frame
        self.loop = _loop()
        if self.loop is not None:
            OPEN.add(self)

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
            self._of.recorder.rename(self.frame, self._of.endpoints.site(*self._endpoint, route))

    def item(self, count: int = 1) -> None:
        """Items of an answer that comes in parts have been handed to the server."""
        if self.stream is None:
            self.stream = Stream()
        self.stream.item(count)

    def end(self, error: BaseException | str | None = None) -> None:
        """The last byte has gone to the server, or nothing more will come: with an exception, or an error's name."""
        frame, self.frame = self.frame, None
        if frame is None:
            return
        if self.loop is not None:
            OPEN.discard(self)
            self.loop = None
        of, facts, status = self._of, self.facts, self.status
        try:
            if self._prefix and not self.route:
                route = self._prefix + "/{path}"
                of.recorder.rename(frame, of.endpoints.site(*self._endpoint, route))
            if status:
                facts[STATUS] = status
            if self.answer_bytes:
                facts[ANSWER_BYTES] = self.answer_bytes
            if self.stream is not None and self.stream.items:
                facts.update(self.stream.facts(self._begun_ns))
            if error is not None and (outcome := OUTCOMES.get(type(error).__name__)) is not None:
                facts[OUTCOME] = outcome
        except Exception as fault:
            FAULTS.note("end of a request", fault)
        failed = error if error is not None else str(status) if status >= FIRST_OF_SERVER else None
        of.recorder.close(frame, failed, True, facts)  # by whichever task or middleware sends the last part

    def broken_off(self) -> None:
        """Nobody takes the rest of the answer."""
        if self.frame is not None:
            self.facts[OUTCOME] = CLIENT_GONE
            self.end()
