"""The calls of a trace by their place in the call tree: host and device time of each place, in one pass.

A line is what one thread, or one task on it, runs. A call on another line than its parent's begins one of its own, as
for self times: it is not part of the parent's time. Device time of a call is the union of its own device intervals and
of those of the calls below it on its line, so that a stretch around the stretches of inner calls counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from instrument.recording.spans import Interval, Site
from instrument.report.table import share
from instrument.trace.call_tree import call_tree
from instrument.trace.columns import FARTHEST_NS, Bools, Trace


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Sum, greatest and least of the times of some calls; `ave_ns` divides the sum by all calls of the row."""

    total_ns: int
    ave_ns: float | None
    max_ns: int
    min_ns: int


class PlaceCalls:
    """One site below its callers on one line: sums over its calls. `inside` tells whether a call of the `kinds` asked
    for is around it on its line, `again` whether one of the same name and kind is."""

    __slots__ = (
        "again", "calls", "children", "device_calls", "device_max_ns", "device_min_ns", "device_ns", "elsewhere",
        "first_ns", "host_max_ns", "host_min_ns", "host_ns", "inside", "parent", "site", "streams", "thread_id",
    )  # fmt: skip

    def __init__(self, site: Site, thread_id: int, parent: PlaceCalls | None, kinds: Collection[str]) -> None:
        """`parent` is the place around it on its line, None for the first of the line."""
        self.site = site
        self.thread_id = thread_id
        self.parent = parent
        self.children: dict[Site, PlaceCalls] = {}
        self.elsewhere: dict[tuple[Site, int], PlaceCalls] = {}
        of_kinds = parent is not None and parent.site.kind in kinds
        self.inside: bool = of_kinds or (parent is not None and parent.inside)
        self.again = False
        self.calls = self.host_ns = self.host_max_ns = 0
        self.device_calls = self.device_ns = self.device_max_ns = 0
        self.first_ns = self.host_min_ns = self.device_min_ns = FARTHEST_NS
        self.streams: dict[tuple[int, int], tuple[int, ...]] = {}


def host_times(places: Iterable[PlaceCalls]) -> CallTimes:
    """Host times of all calls of the places, at least one."""
    found = list(places)
    total_ns = sum(place.host_ns for place in found)
    return CallTimes(
        total_ns,
        share(total_ns, sum(place.calls for place in found)),
        max(place.host_max_ns for place in found),
        min(place.host_min_ns for place in found),
    )


def device_times(places: Iterable[PlaceCalls]) -> CallTimes | None:
    """Device times of all calls of the places, 0 for a call without any; None where no call has any."""
    found = list(places)
    if not any(place.device_calls for place in found):
        return None
    calls = sum(place.calls for place in found)
    total_ns = sum(place.device_ns for place in found)
    every = calls == sum(place.device_calls for place in found)
    return CallTimes(
        total_ns,
        share(total_ns, calls),
        max(place.device_max_ns for place in found),
        min(place.device_min_ns for place in found) if every else 0,
    )


def place_tree(
    trace: Trace, kinds: Collection[str], window: Interval | None = None, among: Bools | None = None
) -> PlaceCalls:  # fmt: skip
    """The root above the places of all spans, or of those `among` them as if there were no others.

    Device time is counted for calls of `kinds` and for those right below. With a `window`, only what lies in it counts.
    """
    tree = call_tree(trace, kinds, window, among)
    root = PlaceCalls(Site("(root)"), 0, None, ())
    places: list[PlaceCalls] = []
    host, device = tree.host, tree.device
    columns = (tree.parent, tree.site, tree.thread_id, tree.is_elsewhere, tree.first_ns, host.calls, host.total_ns,
               host.most_ns, host.least_ns, device.calls, device.total_ns, device.most_ns, device.least_ns)  # fmt: skip
    for around, site_place, thread_id, is_elsewhere, *times in zip(*(one.tolist() for one in columns), strict=True):
        above, site = root if around < 0 else places[around], trace.sites[site_place]
        place = PlaceCalls(site, thread_id, None if is_elsewhere else above, kinds)
        if is_elsewhere:
            above.elsewhere[site, thread_id] = place
        else:
            above.children[site] = place
        place.first_ns, place.calls, place.host_ns, place.host_max_ns, place.host_min_ns, *of_device = times
        place.device_calls, place.device_ns, place.device_max_ns, place.device_min_ns = of_device
        places.append(place)
    for number, on_device, stream, *sums in tree.streams:
        places[number].streams[on_device, stream] = tuple(sums)
    for place in places:
        if place.parent is None:
            _mark_again(place)
    return root


def _mark_again(first: PlaceCalls) -> None:
    """Note of the places of a line which have one of their name and kind around them."""
    around = Counter[tuple[str, str]]()
    pending = [(first, False)]
    while pending:
        place, is_left = pending.pop()
        key = place.site.name, place.site.kind
        if is_left:
            around[key] -= 1
            continue
        place.again = place.inside and around[key] > 0
        around[key] += 1
        pending.append((place, True))
        pending += [(child, False) for child in place.children.values()]


def every_place(root: PlaceCalls) -> Iterator[PlaceCalls]:
    """All places with calls below the root, a parent before those below it."""
    pending = [*reversed([*root.children.values(), *root.elsewhere.values()])]
    while pending:
        place = pending.pop()
        if place.calls:
            yield place
        pending += [*place.children.values(), *place.elsewhere.values()]
