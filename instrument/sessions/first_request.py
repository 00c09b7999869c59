"""Which request was the first: not the health probe that asks a service from its first moment whether it is there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set

from instrument.recording.paths import CallTree
from instrument.recording.spans import FirstCall, Site, Startup

PROBES = re.compile(
    r"(?<![a-z])(?:health(?:[_-]?checks?)?|healthz|live|livez|liveness|ready|readyz|readiness|ping|heartbeat|probe"
    r"|metrics)(?![a-z])",
    re.IGNORECASE,
)
"""What health probes, and what asks for metrics, are called by, as a word of a request's name."""

Firsts = Mapping[int, tuple[int, int]]
"""By call node, when its first call that has ended began, and how long it took, in ns."""


def taken_for_first(firsts: Firsts, tree: CallTree, named: Set[Site]) -> tuple[FirstCall | None, str]:
    """The first request, and why, as `Startup` has them; None where it is simply the one that began first.

    That is the first call of a site in `named`. Else the first request below which anything recorded began, of those
    that are not called after a health probe: a probe has nothing to do. A request that is not the first of its site is
    known by what began in it, and its length is not.
    """
    calls = {node: FirstCall(tree.site(node), *first) for node, first in firsts.items()}
    wanted = _earliest(call for call in calls.values() if call.site in named)
    if wanted is not None:
        return wanted, "named"
    plain = Startup(0, firsts=tuple(calls.values())).first_request
    above = {node: call for node in calls if (call := _request_above(node, calls, tree)) is not None}
    at_work = [node for node, call in above.items() if not _is_probe(call.site)]
    if at_work:
        node = min(at_work, key=lambda node: calls[node].start_ns)
        work, request = calls[node], above[node]
        if not request.start_ns <= work.start_ns <= request.start_ns + request.total_ns:
            request = FirstCall(request.site, work.start_ns, 0)
    else:
        others = (call for call in calls.values() if call.site.kind == "request" and not _is_probe(call.site))
        found = _earliest(others)
        if found is None:
            return None, ""
        request = found
    return (None, "") if plain is None or request.start_ns <= plain.start_ns else (request, "passed")


def _earliest(calls: Iterable[FirstCall]) -> FirstCall | None:
    return min(calls, key=lambda call: call.start_ns, default=None)


def _request_above(node: int, calls: Mapping[int, FirstCall], tree: CallTree) -> FirstCall | None:
    """The first call of the topmost request that a node lies below."""
    found = None
    at = tree.parent(node)
    while at >= 0:
        if tree.site(at).kind == "request" and at in calls:
            found = calls[at]
        at = tree.parent(at)
    return found


def _is_probe(site: Site) -> bool:
    return PROBES.search(site.name) is not None
