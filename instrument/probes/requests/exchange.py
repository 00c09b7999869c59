"""An exchange: one request that a server handles and the answer to it, as one span from the call of the app to the last
byte of the answer.

The servers' adapters begin and end it and tell what they see go by; the frameworks' routers tell the route. Nothing of
headers, query or body is recorded but what the rule names, and the length of the bodies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from instrument.http_status import FIRST_OF_SERVER, STATUS
from instrument.probes.requests.endpoints import Endpoints
from instrument.probes.requests.traceparent import Extract, extractor
from instrument.profile import RequestsRule
from instrument.recorder import RECORDER, Recorder
from instrument.spans import LINK_REMOTE, RemoteParent

HEADER = "http.request.header."
"""How attributes begin that hold a header of a request."""

SCHEME, SERVER, PORT = "url.scheme", "server.address", "server.port"
REQUEST_BYTES = "http.request.body.size"
ANSWER_BYTES = "http.response.body.size"
FIRST_ITEM = "first_item_ns"
ITEMS = "items"
LONGEST_GAP = "longest_gap_ns"
MEDIAN_GAP = "median_gap_ns"
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

CURRENT: ContextVar[Exchange | None] = ContextVar("instrument_exchange", default=None)
"""The exchange that this context works for."""

_now = time.monotonic_ns


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

    def wanted(self, path: str) -> bool:
        """Whether a request to a path is to be recorded now."""
        if not self.is_on or not self.recorder.on:
            return False
        current = CURRENT.get()
        if current is not None and current.is_open:
            return False  # an app within an app: its request is one already
        return path not in self._exact and not (self._begins and path.startswith(self._begins))

    def begin(
        self, protocol: str, method: str, headers: Mapping[bytes, bytes], facts: dict[Any, Any] | None = None
    ) -> Exchange:
        """Begin the span of a request with these headers, whose names are in small letters, and these attributes."""
        attributes: dict[Any, Any] = {}
        if self._extract is not None and (remote := self._extract(headers)) is not None:
            if self._links:
                attributes[LINK_REMOTE] = f"{remote.trace_id:032x}-{remote.span_id:016x}"
            else:
                attributes[RemoteParent] = remote
        length = headers.get(b"content-length")
        if length is not None and length.isdigit() and len(length) < 19:
            attributes[REQUEST_BYTES] = int(length)
        for header, name in self._headers.items():
            if header in headers:
                attributes[name] = [headers[header].decode("latin-1")]
        return Exchange(self, protocol, method, attributes, facts if facts is not None else {})


class Exchange:
    """One request and its answer. Used by one context at a time; what comes after its end changes nothing."""

    __slots__ = (
        "_begun_ns", "_facts", "_first_ns", "_frame", "_gaps", "_items", "_last_ns", "_method", "_of", "_prefix",
        "_protocol", "_recorder", "answer_bytes", "is_streamed", "route", "status",
    )  # fmt: skip

    def __init__(
        self, of: Exchanges, protocol: str, method: str, attributes: dict[Any, Any], facts: dict[Any, Any]
    ) -> None:
        self._of = of
        self._recorder = of.recorder
        self._protocol, self._method = protocol, method
        self._prefix = self.route = ""
        self._facts = facts
        self.status = self.answer_bytes = self._items = self._first_ns = self._last_ns = 0
        self._gaps: list[int] | None = None
        self.is_streamed = False
        self._begun_ns = _now()
        self._frame = of.recorder.open(of.endpoints.site(protocol, method), attributes or None)

    @property
    def is_open(self) -> bool:
        """Whether the last byte is still to come."""
        return self._frame is not None

    @property
    def items(self) -> int:
        """Items of the answer so far."""
        return self._items

    def enter(self, prefix: str) -> None:
        """An app that is mounted below a prefix has been found; the route lies within it."""
        self._prefix += prefix.rstrip("/")

    def found(self, route: str) -> None:
        """The route has been found: from here on the span is one of its endpoint."""
        route = self._prefix + route
        if self._frame is not None and route != self.route:
            self.route = route
            self._recorder.rename(self._frame, self._of.endpoints.site(self._protocol, self._method, route))

    def note(self, name: str, value: Any) -> None:
        """Let the span have an attribute."""
        self._facts[name] = value

    def item(self, count: int = 1) -> None:
        """Items of a streamed answer have been handed to the server."""
        now_ns = _now()
        if not self._items:
            self._first_ns = now_ns
        elif self._gaps is None:
            self._gaps = [now_ns - self._last_ns]
        elif len(self._gaps) < GAPS_KEPT:
            self._gaps.append(now_ns - self._last_ns)
        self._last_ns = now_ns
        self._items += count

    def end(self, error: BaseException | None = None) -> None:
        """The last byte has gone to the server, or nothing more will come."""
        frame, self._frame = self._frame, None
        if frame is None:
            return
        facts = self._facts
        if self.status:
            facts[STATUS] = self.status
        if self.answer_bytes:
            facts[ANSWER_BYTES] = self.answer_bytes
        if self.is_streamed and self._items:
            facts[FIRST_ITEM] = self._first_ns - self._begun_ns
            facts[ITEMS] = self._items
            if self._gaps:
                facts[LONGEST_GAP] = max(self._gaps)
                facts[MEDIAN_GAP] = sorted(self._gaps)[(len(self._gaps) - 1) // 2]
        if not self.route and self._prefix:
            self._recorder.rename(
                frame, self._of.endpoints.site(self._protocol, self._method, self._prefix + "/{path}")
            )
        if error is not None and OUTCOME not in facts:
            outcome = OUTCOMES.get(type(error).__name__)
            if outcome is not None:
                facts[OUTCOME] = outcome
        if facts:
            self._recorder.annotate(frame, facts)
        failed = error if error is not None else str(self.status) if self.status >= FIRST_OF_SERVER else None
        self._recorder.close(frame, failed, True)  # by whichever task or middleware sends the last part

    def __del__(self) -> None:
        """End what its server has dropped."""
        if getattr(self, "_frame", None) is not None:
            self.note(OUTCOME, CLIENT_GONE)
            self.end()
