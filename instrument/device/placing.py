"""Placing: where on the host's clock a pair lay on its stream, and what ran beside it.

The time of an event on a device is known by what lies between it and an anchor, to a microsecond or so; the order of
events on a stream is known for certain. Both are held together here, so that stretches nest in a trace as they did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter

from instrument.device.anchors import RESOLUTION_NS, Ahead, AnchoredMoment
from instrument.device.pairs import Context, Driver, Pair

STALE_NS = 10**6
"""A place that is known no better, nor to a tenth of the interval's length, is said to be stale."""

LAUNCH_NS = 20_000
"""A stream that reaches the end of a span so soon after the host had run dry: 3 to 10 us is what launching takes."""

SHORT = 20
"""A stretch must be as many times as long as one with nothing in it, or events alone make 5 % of it and more."""

RECENT = 256
"""Stretches of a stream, merged where they touch, that later ones of other streams are held against."""

Answer = tuple[int, int, "int | None"]
"""The driver's error, the length of a pair, and how long after the newest anchor it began, None if not asked."""

_by_begin = attrgetter("begin_ns")


class Placing:
    """Places the pairs of all contexts, on the resolver's thread. What it knows of a stream lies in its context."""

    def __init__(self, driver: Driver, now: Callable[[], int]) -> None:
        self._driver = driver
        self._now = now

    def put_in_order(
        self, context: Context, stream: int, pairs: list[Pair], answered: list[tuple[Pair, Answer]]
    ) -> None:
        """Place what has begun on a stream, each on the host's clock as it lay on the stream.

        Places are known to a microsecond or so, the order of events on a stream for certain: none begins before one
        that was recorded earlier, whether that began or ended something. So stretches nest in the trace as they did.
        """
        found = {id(pair): (device_ns, offset_ns) for pair, (error, device_ns, offset_ns) in answered if not error}
        if not found:
            return
        last_ns = max(pair.begin_ns for pair, _ in answered)
        begun = [
            pair
            for pair in pairs
            if id(pair) in found or (pair.place is None and 0 < pair.begin_ns <= last_ns and pair.whole is not None)
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
                    floor_ns = max(floor_ns, before.place.at_ns + found[id(before)][0])
            if pair.place is not None:
                continue
            _, offset_ns = found.get(id(pair), (0, None))
            place = self._place(context, pair, offset_ns, ahead, now_ns)
            if place is not None:
                if place.at_ns < floor_ns:
                    place = AnchoredMoment(floor_ns, place.uncertainty_ns, place.near)
                floor_ns = place.at_ns
                pair.place = place
        last = next((pair for pair, (error, _, _) in reversed(answered) if not error), None)
        if last is not None and last.place is not None:
            last_end_ns, last_at_ns = last.end_ns, last.place.at_ns + found[id(last)][0]
        context.floors[stream] = floor_ns, last_end_ns, last_at_ns

    def labelled(
        self, context: Context, stream: int, pair: Pair, place: AnchoredMoment, device_ns: int, is_alone: bool
    ) -> tuple[int, int, str]:
        """When a stretch that is over began and ended on the host's clock, and its label.

        `is_alone`: nothing is known of another stream, so that nobody has to look.
        """
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
        """A stretch of a stream is over: later ones of other streams are held against it."""
        stretches = context.recent.get(stream)
        if stretches is None:
            stretches = context.recent[stream] = deque(maxlen=RECENT)
        while stretches and stretches[-1][1] >= start_ns:
            before = stretches.pop()
            start_ns, end_ns = min(start_ns, before[0]), max(end_ns, before[1])
        stretches.append((start_ns, end_ns))

    def _is_overlapped(self, context: Context, stream: int, start_ns: int, end_ns: int) -> bool:
        """Whether a stretch of another stream shares time with this one, more than events can tell apart.

        Decided for good: what had not begun on the device by now begins after this has ended.
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
        """When a pair that nobody has taken yet began on the device; None where it has not, or nobody can tell."""
        place = pair.place
        if place is None:
            if self._driver.query(pair.begin):
                return None
            place = self._place(context, pair, None, None, self._now())
        return None if place is None else place.at_ns

    def _reaches(self, pair: Pair, begun_ns: int, start_ns: int) -> bool:
        """Whether a pair that has begun on the device had not ended there before a time."""
        driver = self._driver
        if not pair.end_ns or driver.query(pair.end_event):
            return True
        error, device_ns = driver.elapsed_ns(pair.begin, pair.end_event)
        return not error and begun_ns + device_ns > start_ns

    def _place(
        self, context: Context, pair: Pair, offset_ns: int | None, ahead: Ahead | None, now_ns: int
    ) -> AnchoredMoment | None:
        """When a pair began on the device, which lies `offset_ns` after the newest anchor: not before it was asked to.

        `ahead` is what all of a stream have in common, if it is known; `now_ns` is later than what has happened. None
        where the driver does not tell.
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
        # It has happened. Who says otherwise is a device whose clock went on while the host's stood still.
        return place if place.at_ns <= now_ns else AnchoredMoment(now_ns, place.uncertainty_ns, near=False)
