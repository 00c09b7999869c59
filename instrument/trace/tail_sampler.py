"""Decides which ended requests of one process are kept, by the rules of the profile's section `capture`.

A request is kept if it failed, was slow, or has the attributes in `capture.where`. A rate limits the kept requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import eq, ge, gt, le, lt
from typing import Any, NamedTuple

from instrument.profile.model import Capture, Rate, Where
from instrument.recording.distributions import LONGEST_NS, percentiles
from instrument.recording.spans import AttributeValue, Site
from instrument.recording.tally import Tally
from instrument.recording.trace_context import RemoteParent

LEAST_CALLS = 100
"""The number of requests after which the usual time of an endpoint is known."""

USUAL_FOR_NS = 10**9
"""The time in ns between two computations of the endpoints' usual times."""

_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {">=": ge, ">": gt, "<=": le, "<": lt, "=": eq}


class EndedRequest(NamedTuple):
    """A request that has ended, with all facts that decide whether it is kept."""

    root_id: int
    site: Site
    start_ns: int
    end_ns: int
    has_error: bool
    attributes: Mapping[str, AttributeValue]
    remote: RemoteParent | None


class TailSampler:
    """Decides which requests of one process are kept. Only one thread may use it.

    `totals` returns the current totals of the process, which give the usual times of endpoints.
    """

    def __init__(self, capture: Capture, totals: Callable[[], Tally]) -> None:
        self.capture, self._totals = capture, totals
        self.allowance = _Allowance(capture.limit)
        self._slow_ns: dict[object, int] = {}
        """The time above which a request of an endpoint is slow. An endpoint is a site of requests."""
        self._looked_ns = 0
        self.wanted: set[int] = set()
        """The roots of undecided requests that are kept in any case."""

    def change_settings(self, capture: Capture) -> None:
        if capture.limit != self.capture.limit:
            self.allowance = _Allowance(capture.limit)
        if capture.slow_over != self.capture.slow_over:
            self._slow_ns, self._looked_ns = {}, 0
        self.capture = capture

    def update_usual_times(self, ended: Collection[EndedRequest]) -> None:
        usual = self.capture.slow_over
        newest_ns = max((request.end_ns for request in ended), default=0)
        is_recent = newest_ns - self._looked_ns < USUAL_FOR_NS and not any(map(self.lacks_usual_time, ended))
        if usual is None or not newest_ns or is_recent:
            return
        self._looked_ns = newest_ns
        totals = self._totals()
        endpoints = totals.tree.map_sites(lambda site: site.key if site.kind == "request" else None)
        for endpoint, lines in totals.lines_by_key(endpoints).items():
            histogram = totals.histogram(totals.nodes_of_lines(lines))
            calls = sum(histogram.values())
            (time_ns,) = percentiles(histogram, (usual.fraction,), calls, 0, LONGEST_NS)
            if calls >= LEAST_CALLS and time_ns is not None:
                self._slow_ns[endpoint] = round(time_ns * usual.factor)

    def lacks_usual_time(self, request: EndedRequest) -> bool:
        return self.capture.slow_over is not None and request.site.key not in self._slow_ns

    def is_wanted(self, request: EndedRequest) -> bool:
        """Return True if the request is in `wanted`, or if the trace of its caller is kept."""
        is_callers = request.remote is not None and bool(request.remote.flags & 1) and not self.capture.is_off
        return is_callers or request.root_id in self.wanted

    def is_notable(self, request: EndedRequest) -> bool:
        """Return True for a request that failed, was slow, or has the attributes in `capture.where`."""
        capture = self.capture
        return (
            (capture.errors and request.has_error)
            or (capture.slow_ns is not None and request.end_ns - request.start_ns >= capture.slow_ns)
            or request.end_ns - request.start_ns > self._slow_ns.get(request.site.key, LONGEST_NS)
            or (bool(capture.where) and all(_condition_holds(condition, request) for condition in capture.where))
        )


def _condition_holds(condition: Where, request: EndedRequest) -> bool:
    """Return True if a condition holds for an attribute of the request. The site's attribute is the default."""
    value = request.attributes.get(condition.attribute)
    if value is None:
        value = dict(request.site.attributes).get(condition.attribute)
    values = value if isinstance(value, list | tuple) else (value,)
    return any(
        isinstance(value, bool) == isinstance(bound, bool)
        and (comparison == "=" or isinstance(value, int | float))
        and _COMPARED[comparison](value, bound)
        for value in values
        for comparison, bound in condition.any_of
    )


class _Allowance:
    """A token bucket. It allows `count` requests per `per_ns`, and is refilled evenly. Without a rate, it allows
    everything."""

    def __init__(self, rate: Rate | None) -> None:
        self._rate = rate
        self._tokens = float(rate.count) if rate is not None else 0.0
        self._at_ns = 0

    def take_token(self, now_ns: int) -> bool:
        if self._rate is None:
            return True
        if self._at_ns and now_ns > self._at_ns:
            refill = (now_ns - self._at_ns) * self._rate.count / self._rate.per_ns
            self._tokens = min(self._tokens + refill, float(self._rate.count))
        self._at_ns = max(now_ns, self._at_ns)  # delayed ones come late, and no time refills twice
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
