"""Placing: the interval of a pair on the host's clock, and its label by what ran at the same time.

The distance of an event to an anchor is known to a microsecond or so; the order of events on a stream is known for
certain. Both are combined here, so that intervals nest in a trace as they did on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter

from instrument.device.anchors import RESOLUTION_NS, Ahead, AnchoredMoment
from instrument.device.pairs import Context, Driver, Pair

STALE_NS = 10**6
"""An interval with a larger uncertainty, and one over a tenth of its length, is stale."""

LAUNCH_NS = 20_000
"""A stream that reaches a span's end this soon after the host had run dry, for a launch takes 3 to 10 us."""

SHORT = 20
"""The least length of an interval, in lengths of an empty one: events alone are 5 % of it."""

RECENT = 256
"""The most recent intervals of a stream, merged where they touch, which those of other streams are compared with."""

Answer = tuple[int, int, "int | None"]
"""The driver's error, a pair's length, and its begin from the newest anchor on, None if not asked."""

_by_begin = attrgetter("begin_ns")


class Placing:
    """Places the pairs of all contexts, on the resolver's thread. The state of a stream is in its context."""

    def __init__(self, driver: Driver, now: Callable[[], int]) -> None:
        self._driver = driver
        self._now = now

    def put_in_order(
        self, context: Context, stream: int, pairs: list[Pair], answered: list[tuple[Pair, Answer]]
    ) -> None:
        """Place the pairs that have begun on a stream, none before an event that was recorded earlier."""
        times = {id(pair): (device_ns, offset_ns) for pair, (error, device_ns, offset_ns) in answered if not error}
        if not times:
            return
        last_ns = max(pair.begin_ns for pair, _ in answered)
        begun = [
            pair
            for pair in pairs
            if id(pair) in times or (pair.place is None and 0 < pair.begin_ns <= last_ns and pair.whole is not None)
        ]
        begun.sort(key=_by_begin)
        anchors, now_ns = context.anchors, self._now()  # later than all that has happened
        ahead = anchors.ahead() if anchors.newest_event is not None else None
        ended = deque(pair for pair, (error, _, _) in answered if not error)
        floor_ns, last_end_ns, last_at_ns = context.floors.get(stream, (0, 0, 0))
        for pair in begun:
            if last_end_ns < pair.begin_ns:
                floor_ns = max(floor_ns, last_at_ns)
            while ended and ended[0].end_ns < pair.begin_ns:
                before = ended.popleft()
                if before.place is not None:
                    floor_ns = max(floor_ns, before.place.at_ns + times[id(before)][0])
            if pair.place is not None:
                continue
            _, offset_ns = times.get(id(pair), (0, None))
            place = self._place(context, pair, offset_ns, ahead, now_ns)
            if place is not None:
                if place.at_ns < floor_ns:
                    place = AnchoredMoment(floor_ns, place.uncertainty_ns, place.near)
                floor_ns = place.at_ns
                pair.place = place
        last = next((pair for pair, (error, _, _) in reversed(answered) if not error), None)
        if last is not None and last.place is not None:
            last_end_ns, last_at_ns = last.end_ns, last.place.at_ns + times[id(last)][0]
        context.floors[stream] = floor_ns, last_end_ns, last_at_ns

    def labelled(
        self, context: Context, stream: int, pair: Pair, place: AnchoredMoment, device_ns: int, is_alone: bool
    ) -> tuple[int, int, str]:
        """Return begin, end and label of an interval that is over. `is_alone` is True on the only stream."""
        start_ns = place.at_ns
        end_ns = start_ns + device_ns if device_ns > 0 else start_ns
        recent = context.recent.get(stream)
        if recent and start_ns < recent[-1][1] and end_ns < recent[-1][1] <= end_ns + place.uncertainty_ns:
            end_ns = recent[-1][1]  # what it encloses cannot end after it
        uncertainty_ns = place.uncertainty_ns
        if not place.near or (uncertainty_ns > STALE_NS and uncertainty_ns > device_ns // 10):
            label = "stale"
        elif not is_alone and self._is_overlapped(context, stream, start_ns, end_ns):
            label = "overlapped"
        elif device_ns < SHORT * context.shortest_ns or end_ns - pair.end_ns < uncertainty_ns + LAUNCH_NS:
            label = "launch-bound"
        else:
            label = "exclusive"
        return start_ns, end_ns, label

    def remember(self, context: Context, stream: int, start_ns: int, end_ns: int) -> None:
        """Note an interval of a stream, for comparison with those of other streams."""
        stretches = context.recent.get(stream)
        if stretches is None:
            stretches = context.recent[stream] = deque(maxlen=RECENT)
        while stretches and stretches[-1][1] >= start_ns:
            before = stretches.pop()
            start_ns, end_ns = min(start_ns, before[0]), max(end_ns, before[1])
        stretches.append((start_ns, end_ns))

    def _is_overlapped(self, context: Context, stream: int, start_ns: int, end_ns: int) -> bool:
        """Return True where an interval of another stream overlaps by more than the resolution of events.

        The answer is final: work that has not begun on the device by now begins after this has ended.
        """
        start_ns, end_ns = start_ns + RESOLUTION_NS, end_ns - RESOLUTION_NS
        if start_ns >= end_ns:
            return False
        for other, stretches in context.recent.items():
            if other == stream:
                continue
            for begin, end in reversed(stretches):  # none touches the next, so those before this one ended earlier
                if end <= start_ns:
                    break
                if begin < end_ns:
                    return True
        for other, pairs in context.under_way.items():
            for pair in () if other == stream else pairs:
                if pair.begin_ns >= end_ns or pair.stream != other or pair.whole is None or pair.error:
                    continue
                if pair.whole.held is not None:  # perhaps nothing of it is there
                    continue
                begun_ns = self._begun_at(context, pair)
                if begun_ns is None:
                    break  # nor has what comes after it on its stream
                if begun_ns < end_ns and self._reaches(pair, begun_ns, start_ns):
                    return True
        return False

    def _begun_at(self, context: Context, pair: Pair) -> int | None:
        """Return the begin on the device of a pair under way; None where it has not begun, or is not known."""
        place = pair.place
        if place is None:
            if self._driver.query(pair.begin):
                return None
            place = self._place(context, pair, None, None, self._now())
        return None if place is None else place.at_ns

    def _reaches(self, pair: Pair, begun_ns: int, start_ns: int) -> bool:
        """Return True where a pair that has begun on the device ends there after a time."""
        driver = self._driver
        if not pair.end_ns or driver.query(pair.end_event):
            return True
        error, device_ns = driver.elapsed_ns(pair.begin, pair.end_event)
        return not error and begun_ns + device_ns > start_ns

    def _place(
        self, context: Context, pair: Pair, offset_ns: int | None, ahead: Ahead | None, now_ns: int
    ) -> AnchoredMoment | None:
        """Place the begin of a pair, `offset_ns` after the newest anchor, and not before its record on the host.

        `ahead` is the line after that anchor, if it is known; `now_ns` is later than all that has happened. Returns
        None for an error of the driver.
        """
        anchors = context.anchors
        anchor = anchors.newest_event
        if anchor is None:  # the device has been too busy to be read
            return AnchoredMoment(pair.begin_ns, now_ns - pair.begin_ns, near=False)
        error = 0
        if offset_ns is None:
            error, offset_ns = self._driver.elapsed_ns(anchor, pair.begin)
        place: AnchoredMoment | None = None
        if not error:
            if ahead is not None and offset_ns > 0:
                place = ahead.place(offset_ns)
            else:
                error, place = anchors.place(pair.begin, offset_ns)
        if error or place is None:
            return None
        if place.at_ns < pair.begin_ns:
            return AnchoredMoment(pair.begin_ns, place.uncertainty_ns, place.near)
        # It has happened. A later place is of a device whose clock went on while the host's was stopped.
        return place if place.at_ns <= now_ns else AnchoredMoment(now_ns, place.uncertainty_ns, near=False)
