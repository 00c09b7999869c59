"""Endpoints: what the requests to one route are recorded as. Their number is bounded, whatever callers ask for.

A request span is named by its method and the template of its route, such as `GET /items/{id}`, never by its path. Until
the route is found, and where there is none, it is named by its method alone; a method that HTTP does not know is
`_OTHER`, and `HTTP` in the name (OpenTelemetry, semantic conventions for HTTP spans). Over gRPC the method is all there
is, `package.Service/Method`; methods that no server has are `_OTHER`, and `grpc` in the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from instrument.profile.model import RequestsRule
from instrument.recorder.recorder import RECORDER, REQUEST, Recorder
from instrument.recording.generations import OPERATION, is_among, operation_of
from instrument.recording.spans import AttributeValue, Site

METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})

ENDPOINT_LIMIT = 1_000
"""Endpoints that are told apart; requests to further ones are counted under their method."""

BEYOND = "endpoints beyond the limit, counted by their method"

CALLED = frozenset({"grpc", "ray_serve", "triton"})
"""Protocols that call a method by its name, which has no route."""

Key = tuple[str, str, str]
"""Protocol (`http` or `websocket` of ASGI, `wsgi`, or one of `CALLED`), method and route of an endpoint."""


class Endpoints:
    """The endpoints of one rule at one address. Thread-safe: one that two threads meet at once has one site.

    The address is part of what the sites say.
    """

    def __init__(
        self,
        rule: RequestsRule,
        recorder: Recorder = RECORDER,
        address: Mapping[str, AttributeValue] = MappingProxyType({}),
    ) -> None:
        self._format = rule.name
        self._generations = rule.gen_ai
        self.recorder = recorder
        self._address = address
        self._sites: dict[Key, Site] = {}

    def site(self, protocol: str, method: str, route: str = "") -> Site:
        """What requests to an endpoint are recorded as."""
        key = (protocol, method, route)
        return self._sites.get(key) or self._made(key)

    def sites(self) -> list[Site]:
        """Return the sites of all endpoints so far."""
        return list(self._sites.values())

    def _made(self, key: Key) -> Site:
        protocol, method, route = key
        if protocol not in CALLED and method not in METHODS and method != "_OTHER":
            return self.site(protocol, "_OTHER", route)
        if (route or protocol in CALLED) and method and len(self._sites) >= ENDPOINT_LIMIT:
            self.recorder.count(BEYOND)
            return self.site(protocol, "" if protocol in CALLED else method)
        site = self._sites.setdefault(key, self._described(protocol, method, route))
        self.recorder.note_shape(site, REQUEST)
        return site

    def _described(self, protocol: str, method: str, route: str) -> Site:
        facts: dict[str, AttributeValue]
        if protocol in CALLED:
            facts = {"rpc.system.name": protocol, "rpc.method": method or "_OTHER", **self._address}
            return Site(method or protocol, "request", attributes=tuple(facts.items()))
        facts = {"http.request.method": method}
        if route:
            facts["http.route"] = route
            if is_among(route, self._generations):
                facts[OPERATION] = operation_of(route)
        if protocol == "websocket":
            facts["network.protocol.name"] = "websocket"
        facts.update(self._address)
        told = "HTTP" if method == "_OTHER" else method
        name = self._format.replace("{method}", told).replace("{route}", route).strip() or told
        # An app of WSGI has its thread for itself; one of ASGI waits between its steps.
        return Site(name, "request", attributes=tuple(facts.items()), suspends=protocol != "wsgi")


class Method:
    """Requests by one method at one address: their site until their route is found, and the one that it has then.

    `facts` are what their spans have to say themselves of the address.
    """

    __slots__ = ("_endpoints", "_name", "_protocol", "close_request", "facts", "open_request", "recorder", "site")

    def __init__(
        self, endpoints: Endpoints, protocol: str, name: str, facts: Mapping[str, AttributeValue] = MappingProxyType({})
    ) -> None:
        self._endpoints = endpoints
        self._protocol = protocol
        self._name = name
        self.facts = dict(facts)
        self.recorder = endpoints.recorder
        self.open_request, self.close_request = self.recorder.open_request, self.recorder.close_request
        self.site = endpoints.site(protocol, name)

    def routed(self, route: str) -> Site:
        """The site of the endpoint at a route."""
        return self._endpoints.site(self._protocol, self._name, route)
