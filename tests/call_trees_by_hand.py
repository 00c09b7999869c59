"""The call tree of span objects, one span at a time: what the columns' is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from interval_lists import length, union

from instrument.recording.spans import UNTIMED, DeviceInterval, Interval, Site, Span

NEVER = 1 << 62
"""Later, and longer, than any time of a span."""


class Place:
    """Sums over the calls of one site below its callers on one line. `inside` is True if a call of the asked `kinds` is
    around it, `again` if one of the same name and kind is.
    """

    __slots__ = (
        "again", "calls", "children", "device_calls", "device_max_ns", "device_min_ns", "device_ns", "elsewhere",
        "first_ns", "host_max_ns", "host_min_ns", "host_ns", "inside", "parent", "site", "streams", "thread_id",
        "wanted",
    )  # fmt: skip

    def __init__(self, site: Site, thread_id: int, parent: Place | None, kinds: Collection[str]) -> None:
        """`parent` is the place around it on its line, None for the first of the line."""
        self.site = site
        self.thread_id = thread_id
        self.parent = parent
        self.children: dict[Site, Place] = {}
        self.elsewhere: dict[tuple[Site, int], Place] = {}
        of_kinds = parent is not None and parent.site.kind in kinds
        self.wanted = site.kind in kinds or of_kinds
        self.inside: bool = of_kinds or (parent is not None and parent.inside)
        self.again = False
        above = parent if self.inside else None
        while above is not None and not self.again:
            self.again = above.site.name == site.name and above.site.kind == site.kind
            above = above.parent
        self.calls = self.host_ns = self.host_max_ns = 0
        self.device_calls = self.device_ns = self.device_max_ns = 0
        self.first_ns = self.host_min_ns = self.device_min_ns = NEVER
        self.streams: dict[tuple[int, int], list[int]] = {}

    def took(self, device_ns: int) -> None:
        """Count the device time of one call."""
        self.device_calls += 1
        self.device_ns += device_ns
        if device_ns > self.device_max_ns:
            self.device_max_ns = device_ns
        if device_ns < self.device_min_ns:
            self.device_min_ns = device_ns


def call_tree(spans: Sequence[Span], kinds: Collection[str], window: Interval | None = None) -> Place:
    """The root above the places of all spans, which may come in any order."""
    return _Reader(spans, kinds, window or (-NEVER, NEVER)).root


def every_place(root: Place) -> Iterator[Place]:
    """All places with calls below the root, a parent before those below it."""
    pending = [*reversed([*root.children.values(), *root.elsewhere.values()])]
    while pending:
        place = pending.pop()
        if place.calls:
            yield place
        pending += [*place.children.values(), *place.elsewhere.values()]


class _Below:
    """The intervals of calls and of the spans below the calls on the same line, each interval once, at any depth.

    `above` maps ids to the spans that may be calls or around calls. `is_call` returns True for the id of a call.
    """

    def __init__(self, above: Mapping[int, Span], is_call: Callable[[int], bool]) -> None:
        self._above = above
        self._is_call = is_call
        self._nearest: dict[int, int | None] = {}
        self._held: dict[int, list[Interval]] = {}

    def around(self, span: Span) -> int | None:
        """The id of the span right around one on its line."""
        up = self._above.get(span.parent_id)
        return up.span_id if up is not None and (up.thread_id, up.task_id) == (span.thread_id, span.task_id) else None

    def _call_at(self, span_id: int | None) -> int | None:
        """The nearest call at a span or around it."""
        way: list[int] = []
        while span_id is not None and span_id not in self._nearest:
            if self._is_call(span_id):
                self._nearest[span_id] = span_id
                break
            self._nearest[span_id] = None  # which it stays where parents run in a circle without a call
            way.append(span_id)
            span_id = self.around(self._above[span_id])
        found = None if span_id is None else self._nearest[span_id]
        self._nearest.update(dict.fromkeys(way, found))
        return found

    def add(self, span_id: int, stretches: Iterable[Interval]) -> None:
        """Hold stretches for the calls at and around a span."""
        call = self._call_at(span_id)
        if call is not None:
            self._held.setdefault(call, []).extend(stretches)

    def lengths_ns(self) -> dict[int, int]:
        """Return the length of each call's intervals together, and forget the intervals."""
        ups: dict[int, int | None] = {}
        pending = [*self._held]
        while pending:
            call = pending.pop()
            if call not in ups:
                up = ups[call] = self._call_at(self.around(self._above[call]))
                if up is not None:
                    pending.append(up)
        waiting = Counter(ups.values())
        ready = [call for call in ups if not waiting[call]]
        found: dict[int, int] = {}
        while ready:
            call = ready.pop()
            its = union(self._held.pop(call))
            found[call] = length(its)
            up = ups[call]
            if up is not None:
                self._held.setdefault(up, []).extend(its)
                waiting[up] -= 1
                ready += [up] * (not waiting[up])
        # What is left lies in one another, where parents run in a circle: each has what all of them have.
        for call in ups:
            if call in found:
                continue
            circle = dict.fromkeys([call])
            while (up := ups[next(reversed(circle))]) is not None and up not in circle:
                circle[up] = None
            its = union(part for one in circle for part in self._held.get(one, ()))
            found.update(dict.fromkeys(circle, length(its)))
        return found


class _Reader:
    """Finds the place of each span.

    `_above` holds the spans that are parents, by id, and `_placed` their places.
    """

    def __init__(self, spans: Sequence[Span], kinds: Collection[str], window: Interval) -> None:
        self.root = Place(Site("(root)"), 0, None, ())
        self._kinds = kinds
        self._window = window
        parent_ids = {span.parent_id for span in spans}
        self._above = {span.span_id: span for span in spans if span.span_id in parent_ids}
        self._placed: dict[int, Place] = {}
        self._below = _Below(self._above, lambda span_id: span_id in self._placed and self._placed[span_id].wanted)
        self._held: list[tuple[int, list[Interval]]] = []
        self._count(spans, parent_ids, any(span.task_id for span in spans))
        for span_id, stretches in self._held:  # now that each has its place
            self._below.add(span_id, stretches)
        for span_id, device_ns in self._below.lengths_ns().items():
            if not lies_outside(self._above[span_id], window):
                self._placed[span_id].took(device_ns)

    def _count(self, spans: Sequence[Span], parent_ids: Collection[int], has_tasks: bool) -> None:
        placed, above = self._placed, self._above
        first_ns, last_ns = self._window
        for span in spans:
            start_ns, end_ns = span.start_ns, span.end_ns
            if start_ns < first_ns or end_ns > last_ns:
                if lies_outside(span, self._window):
                    continue
                start_ns, end_ns = max(start_ns, first_ns), min(end_ns, last_ns)
            span_id, parent_id = span.span_id, span.parent_id
            place, parent = None, placed.get(parent_id)
            if (
                parent is not None
                and parent.thread_id == span.thread_id
                and (not has_tasks or above[parent_id].task_id == span.task_id)
            ):
                place = parent.children.get(span.site)
            if place is None:
                place = self._place(span)
            if span_id in parent_ids:
                placed[span_id] = place
            host_ns = end_ns - start_ns
            place.calls += 1
            place.host_ns += host_ns
            if host_ns > place.host_max_ns:
                place.host_max_ns = host_ns
            if host_ns < place.host_min_ns:
                place.host_min_ns = host_ns
            if start_ns < place.first_ns:
                place.first_ns = start_ns
            if span.device and (place.wanted or place.inside):
                self._took(span, place, span_id in parent_ids)

    def _place(self, span: Span) -> Place:
        """The place of a span, made on first sight, and those of its ancestors. Damaged files may run in a circle."""
        chain = {span.span_id: span}
        up = self._above.get(span.parent_id)
        while up is not None and up.span_id not in self._placed and up.span_id not in chain:
            chain[up.span_id] = up
            up = self._above.get(up.parent_id)
        place = self.root
        for one in reversed(chain.values()):
            above = self._above.get(one.parent_id)
            around = self._placed.get(one.parent_id, self.root)
            if above is not None and (above.thread_id, above.task_id) == (one.thread_id, one.task_id):
                found = around.children.get(one.site)
                if found is None:
                    inner = around if around is not self.root else None
                    found = around.children[one.site] = Place(one.site, one.thread_id, inner, self._kinds)
            else:
                key = one.site, one.thread_id
                found = around.elsewhere.get(key)
                if found is None:
                    found = around.elsewhere[key] = Place(one.site, one.thread_id, None, self._kinds)
            place = found
            if one is not span:
                self._placed[one.span_id] = place
        return place

    def _took(self, span: Span, place: Place, is_parent: bool) -> None:
        """Count a span's device intervals by stream, and hold them for its call and those around it."""
        first_ns, last_ns = self._window
        stretches: list[Interval] = []
        for interval in span.device:
            if interval.label in UNTIMED:
                continue
            start_ns, end_ns = interval.start_ns, interval.end_ns
            if start_ns < first_ns or end_ns > last_ns:
                if lies_outside(interval, self._window):
                    continue
                start_ns, end_ns = max(start_ns, first_ns), min(end_ns, last_ns)
            stretches.append((start_ns, end_ns))
            of_stream = place.streams.get((interval.device, interval.stream))
            took_ns = end_ns - start_ns
            if of_stream is None:
                place.streams[interval.device, interval.stream] = [1, took_ns, took_ns, took_ns]
            else:
                of_stream[0] += 1
                of_stream[1] += took_ns
                if took_ns > of_stream[2]:
                    of_stream[2] = took_ns
                if took_ns < of_stream[3]:
                    of_stream[3] = took_ns
        if not stretches:
            return
        if is_parent:
            self._held.append((span.span_id, stretches))
            return
        if place.wanted:
            place.took(stretches[0][1] - stretches[0][0] if len(stretches) == 1 else length(union(stretches)))
        around = self._below.around(span)
        up = None if around is None else self._above[around]
        if up is not None and (lies_outside(up, self._window) or not _encloses(up, stretches)):
            self._held.append((up.span_id, stretches))


def lies_outside(one: Span | DeviceInterval, window: Interval) -> bool:
    """Return True if all of a part is outside the window. A part without length on an edge is inside the window."""
    first_ns, last_ns = window
    start_ns, end_ns = one.start_ns, one.end_ns
    return (end_ns <= first_ns and start_ns < first_ns) or (start_ns >= last_ns and end_ns > last_ns)


def _encloses(span: Span, stretches: Sequence[Interval]) -> bool:
    """Return True if one device interval of the span covers all the intervals, so that they add nothing to it."""
    if len(span.device) != 1 or span.device[0].label in UNTIMED:
        return False
    own = span.device[0]
    return all(own.start_ns <= start_ns and end_ns <= own.end_ns for start_ns, end_ns in stretches)
