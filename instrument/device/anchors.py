"""Anchors: readings of a device's clock against the host's, by which its events are placed on the host's clock.

An anchor is an event on a stream of its own that does nothing else: it happened between the host time before it was
recorded and the host time after it was seen to have happened (Cristian's algorithm; the tightest of a burst is kept).
Between two anchors the device's clock is taken to run evenly, which takes out what oscillators differ by. Elapsed times
come as 32-bit floats in ms, whose grain passes half a microsecond beyond 4.1 s, so no place is told from farther away.

The host's clock does not run evenly: NTP may slew CLOCK_MONOTONIC by 500 ppm at any moment. CLOCK_MONOTONIC_RAW is not
slewed, so both are read with each anchor and each place, and how far the one has bent against the other is part of what
is uncertain. Where there is no such clock, the most that NTP does is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from instrument.device.cuda import Reading

BURST = 5
POLLS = 200
READ_NS = 200_000
"""How often, or for how long, an anchor of a burst is asked for before it is given up: the device is too busy to be
read right now."""

ANCHORS_KEPT = 16
FARTHEST_NS = 4 * 10**9
RESOLUTION_NS = 500
"""What the driver promises of an event's time (cuEventElapsedTime)."""

OSCILLATORS = 100e-6
"""How far two oscillators may differ."""

SLEW = 500e-6
"""How much faster or slower than its oscillator NTP may let the host's clock run (adjtime(3))."""

DRIFT = OSCILLATORS + SLEW
"""How far a device's clock may run off the host's where no second anchor has told yet."""

WANDER = 10e-6
"""How far the rate of two oscillators may change within seconds, by temperature."""

JUMP = 2e-3
"""A rate so far from one is no drift: one of the clocks was set, or stood still."""

READINGS = 3

LOOSE_NS = 5 * 10**5
"""An anchor that is uncertain by more leaves nearly all places stale."""

_GRAINS_NS = (0.0, *(2.0 ** (bits - 24) * 1e6 for bits in range(1, 24)))


class AnchoredMoment(NamedTuple):
    """When an event happened on the host's clock, give or take; `near` tells whether an anchor lies near enough."""

    at_ns: int
    uncertainty_ns: int
    near: bool


class Ahead(NamedTuple):
    """How events after the newest anchor are placed: by `rate` host ns a device ns from `host_ns` on.

    `uncertainty_ns` is what the place of all of them is uncertain by, `wander` what each device ns adds.
    """

    host_ns: int
    rate: float
    uncertainty_ns: float
    wander: float

    def place(self, offset_ns: int) -> AnchoredMoment:
        """When an event happened that came so long after the newest anchor."""
        uncertainty_ns = self.uncertainty_ns + offset_ns * self.wander + grain_ns(offset_ns)
        return AnchoredMoment(
            self.host_ns + round(offset_ns * self.rate), round(uncertainty_ns), offset_ns <= FARTHEST_NS
        )


class Lead(NamedTuple):
    """How far the host's clock is ahead of the raw one, give or take, at a moment of the host's clock."""

    at_ns: int
    lead_ns: int
    uncertainty_ns: int


@dataclass(slots=True)
class Anchor:
    """`rate` is how many host ns pass in a device ns from here to the next anchor, 0 while there is none.

    `lead` tells how far the host's clock was ahead of the raw one, `lead_rate` how much it gained a ns until the next
    anchor, and `bend_ns` how much of that it had not gained at the same rate before.
    """

    event: Any
    host_ns: int
    uncertainty_ns: int
    lead: Lead
    rate: float = 0.0
    rate_error: float = DRIFT
    lead_rate: float | None = None
    bend_ns: float = 0.0


class Anchors:
    """The anchors of one context. Used by one thread, to which the context is bound.

    `now` is the host's clock, `raw` one that nothing slews, None where there is none. `reading` takes an anchor by the
    same clock without the interpreter's lock, None where nobody can.
    """

    def __init__(
        self,
        driver: Any,
        now: Callable[[], int],
        raw: Callable[[], int] | None = None,
        reading: Reading | None = None,
    ) -> None:
        self._driver = driver
        self._reading = reading
        self._now = now
        self._raw = raw
        self._change = SLEW if raw is None else WANDER
        self._stream: Any = None
        self._anchors: list[Anchor] = []
        self._spare: list[Any] = []

    @property
    def newest_ns(self) -> int | None:
        """When the newest was taken; None without any."""
        return self._anchors[-1].host_ns if self._anchors else None

    @property
    def is_loose(self) -> bool:
        """Whether the newest is known so badly that another one soon would be worth it."""
        return bool(self._anchors) and self._anchors[-1].uncertainty_ns > LOOSE_NS

    def renew(self) -> int:
        """Take another anchor. Returns the driver's error, 0 for none; a device that is too busy gives none.

        A burst ends with the first event that does not happen in time: its queue is busy, and more would wait there.
        """
        driver = self._driver
        if self._stream is None:
            error, self._stream = driver.new_stream()
            if error:
                return int(error)
        best: Anchor | None = None
        for _ in range(BURST):
            error, event = (0, self._spare.pop()) if self._spare else driver.new_event()
            if error:
                return int(error)
            error, before_ns, after_ns = self._read(event)
            if error:
                self._spare.append(event)
                if error == driver.NOT_READY:
                    break
                return int(error)
            half_ns = (after_ns - before_ns + 1) // 2
            if best is None or half_ns < best.uncertainty_ns:
                if best is not None:
                    self._spare.append(best.event)
                best = Anchor(event, before_ns + half_ns, half_ns, self._lead())
            else:
                self._spare.append(event)
        return self._keep(best) if best is not None else 0

    def _read(self, event: Any) -> tuple[int, int, int]:
        """Record an event and await it: the driver's error, the time before and the time after."""
        driver = self._driver
        if self._reading is not None:
            return self._reading(driver.handle(event), self._stream, READ_NS)
        before_ns = self._now()
        error = self._mark(event) or self._await(event)
        return error, before_ns, self._now()

    def _await(self, event: Any) -> int:
        """Ask for an event until it has happened, or often enough: the driver's error, its `NOT_READY` then."""
        driver = self._driver
        for _ in range(POLLS):
            error = int(driver.query(event))
            if error != driver.NOT_READY:
                return error
        return int(driver.NOT_READY)

    def adopt(self, event: Any, since_ns: int, until_ns: int) -> int:
        """Take an event of the service's own for an anchor, which happened between two host times; it is ours then."""
        half_ns = (until_ns - since_ns + 1) // 2
        return self._keep(Anchor(event, since_ns + half_ns, half_ns, self._lead()))

    def exchange(self) -> tuple[int, Any]:
        """The driver's error, and an event in place of one that was adopted."""
        return (0, self._spare.pop()) if self._spare else self._driver.new_event()

    def _mark(self, event: Any) -> int:
        """Record an event on the stream of ours: the driver's error, 0 for none."""
        return max(-int(self._driver.mark(self._driver.handle(event), self._stream)), 0)

    def _lead(self) -> Lead:
        """The tightest of some readings: another thread may come between two clocks."""
        best: Lead | None = None
        for _ in range(READINGS if self._raw is not None else 0):
            before_ns = self._now()
            raw_ns = self._raw() if self._raw is not None else 0
            half_ns = (self._now() - before_ns + 1) // 2
            if best is None or half_ns < best.uncertainty_ns:
                best = Lead(before_ns + half_ns, before_ns + half_ns - raw_ns, half_ns)
        return best or Lead(self._now(), 0, 0)

    def _keep(self, anchor: Anchor) -> int:
        if self._anchors and anchor.host_ns - self._anchors[-1].host_ns <= FARTHEST_NS:
            before = self._anchors[-1]
            error, device_ns = self._driver.elapsed_ns(before.event, anchor.event)
            if error:
                self._spare.append(anchor.event)
                return int(error)
            if device_ns > 0:
                rate = (anchor.host_ns - before.host_ns) / device_ns
                # Both anchors hold for certain, and so does this.
                rate_error = (anchor.uncertainty_ns + before.uncertainty_ns + RESOLUTION_NS) / device_ns
                if rate_error < DRIFT and abs(rate - 1) <= JUMP + rate_error:
                    before.rate, before.rate_error = rate, rate_error
            self._note_lead(before, anchor)
        self._anchors.append(anchor)
        if len(self._anchors) > ANCHORS_KEPT:
            self._spare.append(self._anchors.pop(0).event)
        return 0

    def _note_lead(self, before: Anchor, anchor: Anchor) -> None:
        """How the host's clock ran between two anchors, against the raw one and against the time before."""
        passed_ns = anchor.lead.at_ns - before.lead.at_ns
        if passed_ns <= 0:
            return
        gained_ns = anchor.lead.lead_ns - before.lead.lead_ns
        usual = self._anchors[-2].lead_rate if len(self._anchors) > 1 else None
        before.lead_rate = gained_ns / passed_ns
        before.bend_ns = abs(gained_ns - (usual or 0.0) * passed_ns) + before.lead.uncertainty_ns
        before.bend_ns += anchor.lead.uncertainty_ns

    @property
    def stream(self) -> Any:
        """The stream that nothing else uses, None before the first anchor."""
        return self._stream

    @property
    def newest_event(self) -> Any:
        """The event of the newest, None without any."""
        return self._anchors[-1].event if self._anchors else None

    def ahead(self) -> Ahead:
        """How events after the newest anchor are placed that have happened by now; raises IndexError without any."""
        newest = self._anchors[-1]
        rate, rate_error, _ = self._rate(len(self._anchors) - 1, 1)
        uncertainty_ns, wander = float(newest.uncertainty_ns + RESOLUTION_NS), rate_error
        if rate_error != DRIFT:
            uncertainty_ns, wander = uncertainty_ns + self._bent_ns(), rate_error + self._change
        return Ahead(newest.host_ns, rate, uncertainty_ns, wander)

    def place(self, event: Any, offset_ns: int) -> tuple[int, AnchoredMoment | None]:
        """The driver's error, and when an event happened; `offset_ns` is how long after the newest anchor it did."""
        if offset_ns > 0:
            return 0, self.ahead().place(offset_ns)
        anchors = self._anchors
        newest, index = anchors[-1], len(anchors) - 1
        anchor = newest
        at_ns = newest.host_ns + offset_ns
        if index and at_ns - anchors[index - 1].host_ns < -offset_ns:  # an older one lies nearer
            index = min(range(index), key=lambda i: abs(anchors[i].host_ns - at_ns))
            anchor = anchors[index]
            error, offset_ns = self._driver.elapsed_ns(anchor.event, event)
            if error:
                return int(error), None
        rate, rate_error, is_between = self._rate(index, offset_ns)
        uncertainty_ns = anchor.uncertainty_ns + RESOLUTION_NS + grain_ns(offset_ns)
        distance_ns = abs(offset_ns)
        if is_between:  # so it cannot be farther off than one of the two
            other = anchors[index + (1 if offset_ns > 0 else -1)]
            uncertainty_ns = max(uncertainty_ns, other.uncertainty_ns + RESOLUTION_NS)
            distance_ns = max(min(distance_ns, abs(other.host_ns - anchor.host_ns) - distance_ns), 0)
            uncertainty_ns += distance_ns * self._change + (anchor if offset_ns > 0 else other).bend_ns
        elif rate_error == DRIFT:
            uncertainty_ns += distance_ns * DRIFT
        else:
            uncertainty_ns += distance_ns * (rate_error + SLEW)
        place = AnchoredMoment(
            anchor.host_ns + round(offset_ns * rate), round(uncertainty_ns), abs(offset_ns) <= FARTHEST_NS
        )
        return 0, place

    def _bent_ns(self) -> float:
        """How far the host's clock has strayed since the newest anchor from the way that it went before."""
        if self._raw is None:
            return 0.0  # told by the distance
        then, now = self._anchors[-1].lead, self._lead()
        usual = self._anchors[-2].lead_rate if len(self._anchors) > 1 else None
        passed_ns = now.at_ns - then.at_ns
        bent_ns = abs(now.lead_ns - then.lead_ns - (usual or 0.0) * passed_ns)
        return bent_ns + then.uncertainty_ns + now.uncertainty_ns

    def _rate(self, index: int, offset_ns: int) -> tuple[float, float, bool]:
        """Host ns a device ns beside an anchor, how wrong that may be, and whether another anchor lies beyond."""
        after, before = self._anchors[index], self._anchors[index - 1] if index else None
        if offset_ns > 0 and after.rate:
            return after.rate, after.rate_error, True
        if before is not None and before.rate:
            return before.rate, before.rate_error, offset_ns <= 0
        if after.rate:
            return after.rate, after.rate_error, False
        return 1.0, DRIFT, False

    def least_ns(self) -> tuple[int, int]:
        """The driver's error, and the shortest time between two events with nothing in between."""
        driver = self._driver
        least_ns = 0
        while len(self._spare) < 2:
            error, event = driver.new_event()
            if error:
                return int(error), 0
            self._spare.append(event)
        first, second = self._spare[-2:]
        for _ in range(BURST):
            error = self._mark(first) or self._mark(second) or self._await(second)
            if error == driver.NOT_READY:
                continue
            if not error:
                error, elapsed_ns = driver.elapsed_ns(first, second)
            if error:
                return int(error), 0
            least_ns = min(least_ns or elapsed_ns, elapsed_ns)
        return 0, least_ns

    def close(self) -> None:
        """Give everything back to the driver, as far as it still takes it."""
        for event in [*self._spare, *(anchor.event for anchor in self._anchors)]:
            self._driver.destroy_event(event)
        self._spare.clear()
        self._anchors.clear()
        if self._stream is not None:
            self._driver.destroy_stream(self._stream)
            self._stream = None


def grain_ns(elapsed_ns: int) -> float:
    """The distance to the next 32-bit float of an elapsed time in ms, in ns."""
    bits = (abs(elapsed_ns) // 10**6).bit_length()
    return _GRAINS_NS[bits] if bits < len(_GRAINS_NS) else 2.0 ** (bits - 24) * 1e6
