"""Converts times of a device to the host's clock, by anchors: events whose time is known on both clocks.

For an anchor, the host's clock is read before an event is recorded and after a poll observes the event. The event
happened between these two times (Cristian's algorithm). The device's clock is assumed to run evenly between anchors.

NTP may slew CLOCK_MONOTONIC, but not CLOCK_MONOTONIC_RAW. So both clocks are read. A change of the difference between
them adds to the uncertainty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from instrument.device.cuda import Reading
from instrument.runtime.lazy_imports import NamedTuple

BURST = 5
POLLS = 200
READ_NS = 200_000
"""The maximum ns for one reading of a device's clock. A slower device counts as busy."""

ANCHOR_NS = 10**9
ANCHOR_PAUSE_NS = 10**7
"""The first pause in ns between two attempts to take an anchor on a busy device. Each further failure doubles the
pause."""

ANCHORS_KEPT = 16
FARTHEST_NS = 4 * 10**9
RESOLUTION_NS = 500
"""The documented resolution of an event's time in ns (cuEventElapsedTime)."""

OSCILLATORS = 100e-6
"""The assumed maximum difference between the rates of two oscillators (100 ppm)."""

SLEW = 500e-6
"""The maximum rate at which NTP slews the host's clock, 500 ppm (adjtime(3))."""

DRIFT = OSCILLATORS + SLEW
"""The assumed drift between a device's clock and the host's clock, until two anchors give a measurement."""

WANDER = 10e-6
"""The assumed maximum change of a clock's relative rate within seconds."""

JUMP = 2e-3
"""The maximum deviation of a clock's rate from 1. A larger deviation means that a clock was set or stopped."""

READINGS = 3

LOOSE_NS = 5 * 10**5
"""The maximum uncertainty of an anchor in ns. If an anchor is less certain, another anchor is taken soon."""

_GRAINS_NS = (0.0, *(2.0 ** (bits - 24) * 1e6 for bits in range(1, 24)))


class AnchoredMoment(NamedTuple):
    """The host time of a device event, with its uncertainty. `near` is True if an anchor (an event with a known host
    time) is at most `FARTHEST_NS` away."""

    at_ns: int
    uncertainty_ns: int
    near: bool


class Ahead(NamedTuple):
    """A linear clock for device events after the newest anchor, which is an event with a known host time.

    - `host_ns`: the host time of the anchor
    - `rate`: host nanoseconds per device nanosecond
    - `uncertainty_ns`: the uncertainty at the anchor
    - `wander`: the growth of the uncertainty per device nanosecond
    """

    host_ns: int
    rate: float
    uncertainty_ns: float
    wander: float

    def convert_to_host_time(self, offset_ns: int) -> AnchoredMoment:
        uncertainty_ns = self.uncertainty_ns + offset_ns * self.wander + compute_time_resolution_ns(offset_ns)
        host_ns = self.host_ns + round(offset_ns * self.rate)
        return AnchoredMoment(host_ns, round(uncertainty_ns), offset_ns <= FARTHEST_NS)


class Lead(NamedTuple):
    """The host's clock minus CLOCK_MONOTONIC_RAW at the host time `at_ns`, and the uncertainty of this difference."""

    at_ns: int
    lead_ns: int
    uncertainty_ns: int


@dataclass(slots=True)
class Anchor:
    """A device event with a known host time.

    - `rate`: host nanoseconds per device nanosecond up to the next anchor, 0 without a next anchor
    - `lead`: the host's clock minus CLOCK_MONOTONIC_RAW
    - `lead_rate`: the growth of `lead` per nanosecond up to the next anchor
    - `bend_ns`: the maximum error of predicting the next anchor's `lead` from the earlier growth
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
    """The anchors of a CUDA context: device events with known host times. Only the thread of the context may use them.

    - `now`: reads the host's clock
    - `raw`: reads CLOCK_MONOTONIC_RAW, which NTP does not slew
    - `reading`: records an event and polls for it without the GIL. None if the driver has no such function
    """

    def __init__(
        self, driver: Any, now: Callable[[], int], raw: Callable[[], int], reading: Reading | None = None
    ) -> None:
        self._driver = driver
        self._reading = reading
        self._now = now
        self._raw = raw
        self._stream: Any = None
        self._anchors: list[Anchor] = []
        self._spare: list[Any] = []

    @property
    def newest_ns(self) -> int | None:
        return self._anchors[-1].host_ns if self._anchors else None

    @property
    def needs_anchor_soon(self) -> bool:
        return bool(self._anchors) and self._anchors[-1].uncertainty_ns > LOOSE_NS

    def take_anchor(self) -> int:
        """Record an event as a further anchor, unless the device is busy. Return the driver's error code, or 0."""
        driver = self._driver
        if self._stream is None:
            error, self._stream = driver.new_stream()
            if error:
                return int(error)
        best: Anchor | None = None
        for _ in range(BURST):
            error, event = self.take_spare_event()
            if error:
                return int(error)
            error, before_ns, after_ns = self._measure_event_times(event)
            if error:
                self._spare.append(event)
                if error == driver.NOT_READY:
                    break
                return int(error)
            half_ns = (after_ns - before_ns + 1) // 2
            if best is None or half_ns < best.uncertainty_ns:
                if best is not None:
                    self._spare.append(best.event)
                best = Anchor(event, before_ns + half_ns, half_ns, self._measure_clock_difference())
            else:
                self._spare.append(event)
        return self._add_anchor(best) if best is not None else 0

    def _measure_event_times(self, event: Any) -> tuple[int, int, int]:
        driver = self._driver
        if self._reading is not None:
            return self._reading(driver.read_handle(event), self._stream, READ_NS)
        before_ns = self._now()
        error = self._record_event(event) or self._poll_until_happened(event)
        return error, before_ns, self._now()

    def _poll_until_happened(self, event: Any) -> int:
        driver = self._driver
        for _ in range(POLLS):
            error = int(driver.query_event(event))
            if error != driver.NOT_READY:
                return error
        return int(driver.NOT_READY)

    def adopt_event_as_anchor(self, event: Any, since_ns: int, until_ns: int) -> int:
        """Use an event of the service's stream as an anchor. The event happened between the host times `since_ns` and
        `until_ns`."""
        half_ns = (until_ns - since_ns + 1) // 2
        return self._add_anchor(Anchor(event, since_ns + half_ns, half_ns, self._measure_clock_difference()))

    def take_spare_event(self) -> tuple[int, Any]:
        return (0, self._spare.pop()) if self._spare else self._driver.new_event()

    def _record_event(self, event: Any) -> int:
        return max(-int(self._driver.mark(self._driver.read_handle(event), self._stream)), 0)

    def _measure_clock_difference(self) -> Lead:
        readings = []
        for _ in range(READINGS):
            before_ns, raw_ns = self._now(), self._raw()
            half_ns = (self._now() - before_ns + 1) // 2
            readings.append(Lead(before_ns + half_ns, before_ns + half_ns - raw_ns, half_ns))
        return min(readings, key=lambda lead: lead.uncertainty_ns)

    def _add_anchor(self, anchor: Anchor) -> int:
        if self._anchors and anchor.host_ns - self._anchors[-1].host_ns <= FARTHEST_NS:
            before = self._anchors[-1]
            error, device_ns = self._driver.elapsed_ns(before.event, anchor.event)
            if error:
                self._spare.append(anchor.event)
                return int(error)
            if device_ns > 0:
                rate = (anchor.host_ns - before.host_ns) / device_ns
                # The bounds of both anchors are certain, and so is this one.
                rate_error = (anchor.uncertainty_ns + before.uncertainty_ns + RESOLUTION_NS) / device_ns
                if rate_error < DRIFT and abs(rate - 1) <= JUMP + rate_error:
                    before.rate, before.rate_error = rate, rate_error
            passed_ns = anchor.lead.at_ns - before.lead.at_ns
            if passed_ns > 0:
                bend_ns = self._measure_rate_change(anchor.lead)
                before.lead_rate = (anchor.lead.lead_ns - before.lead.lead_ns) / passed_ns
                before.bend_ns = bend_ns
        self._anchors.append(anchor)
        if len(self._anchors) > ANCHORS_KEPT:
            self._spare.append(self._anchors.pop(0).event)
        return 0

    @property
    def stream(self) -> Any:
        return self._stream

    @property
    def newest_event(self) -> Any:
        return self._anchors[-1].event if self._anchors else None

    def make_clock_after_newest(self) -> Ahead:
        """Return a clock for events after the newest anchor. Raises `IndexError` if there is no anchor."""
        newest = self._anchors[-1]
        rate, rate_error, _ = self._find_rate(len(self._anchors) - 1, 1)
        uncertainty_ns, wander = float(newest.uncertainty_ns + RESOLUTION_NS), rate_error
        if rate_error != DRIFT:
            uncertainty_ns += self._measure_rate_change(self._measure_clock_difference())
            wander = rate_error + WANDER
        return Ahead(newest.host_ns, rate, uncertainty_ns, wander)

    def convert_event_time(self, event: Any, offset_ns: int) -> tuple[int, AnchoredMoment | None]:
        """Return the driver's error code and the host time of an event.

        `offset_ns` is the device time from the newest anchor to the event.
        """
        if offset_ns > 0:
            return 0, self.make_clock_after_newest().convert_to_host_time(offset_ns)
        anchors = self._anchors
        newest, index = anchors[-1], len(anchors) - 1
        anchor = newest
        at_ns = newest.host_ns + offset_ns
        if index and at_ns - anchors[index - 1].host_ns < -offset_ns:  # an older one is nearer
            index = min(range(index), key=lambda i: abs(anchors[i].host_ns - at_ns))
            anchor = anchors[index]
            error, offset_ns = self._driver.elapsed_ns(anchor.event, event)
            if error:
                return int(error), None
        rate, rate_error, is_between = self._find_rate(index, offset_ns)
        uncertainty_ns = anchor.uncertainty_ns + RESOLUTION_NS + compute_time_resolution_ns(offset_ns)
        distance_ns = abs(offset_ns)
        if is_between:  # its error cannot exceed that of one of the two
            next_anchor = anchors[index + (1 if offset_ns > 0 else -1)]
            uncertainty_ns = max(uncertainty_ns, next_anchor.uncertainty_ns + RESOLUTION_NS)
            distance_ns = max(min(distance_ns, abs(next_anchor.host_ns - anchor.host_ns) - distance_ns), 0)
            uncertainty_ns += distance_ns * WANDER + (anchor if offset_ns > 0 else next_anchor).bend_ns
        elif rate_error == DRIFT:
            uncertainty_ns += distance_ns * DRIFT
        else:
            uncertainty_ns += distance_ns * (rate_error + SLEW)
        host_ns, is_near = anchor.host_ns + round(offset_ns * rate), abs(offset_ns) <= FARTHEST_NS
        return 0, AnchoredMoment(host_ns, round(uncertainty_ns), is_near)

    def _measure_rate_change(self, lead: Lead) -> float:
        """Return the maximum ns by which `lead` differs from the earlier anchors' prediction."""
        before, usual = self._anchors[-1].lead, self._anchors[-2].lead_rate if len(self._anchors) > 1 else None
        bent_ns = abs(lead.lead_ns - before.lead_ns - (usual or 0.0) * (lead.at_ns - before.at_ns))
        return bent_ns + before.uncertainty_ns + lead.uncertainty_ns

    def _find_rate(self, index: int, offset_ns: int) -> tuple[float, float, bool]:
        after, before = self._anchors[index], self._anchors[index - 1] if index else None
        if offset_ns > 0 and after.rate:
            return after.rate, after.rate_error, True
        if before is not None and before.rate:
            return before.rate, before.rate_error, offset_ns <= 0
        if after.rate:
            return after.rate, after.rate_error, False
        return 1.0, DRIFT, False

    def measure_shortest_interval(self) -> tuple[int, int]:
        """Measure the shortest time between two events that are recorded directly after each other. Return the driver's
        error code and the time."""
        driver = self._driver
        least_ns = 0
        while len(self._spare) < 2:
            error, event = driver.new_event()
            if error:
                return int(error), 0
            self._spare.append(event)
        first, second = self._spare[-2:]
        for _ in range(BURST):
            error = self._record_event(first) or self._record_event(second) or self._poll_until_happened(second)
            if error == driver.NOT_READY:
                continue
            if not error:
                error, elapsed_ns = driver.elapsed_ns(first, second)
            if error:
                return int(error), 0
            least_ns = min(least_ns or elapsed_ns, elapsed_ns)
        return 0, least_ns

    def close(self) -> None:
        for event in [*self._spare, *(anchor.event for anchor in self._anchors)]:
            self._driver.destroy_event(event)
        self._spare.clear()
        self._anchors.clear()
        if self._stream is not None:
            self._driver.destroy_stream(self._stream)
            self._stream = None


def compute_time_resolution_ns(elapsed_ns: int) -> float:
    """Return the resolution of an elapsed time in nanoseconds. CUDA returns elapsed times as 32-bit floats in
    milliseconds."""
    bits = (abs(elapsed_ns) // 10**6).bit_length()
    return _GRAINS_NS[bits] if bits < len(_GRAINS_NS) else 2.0 ** (bits - 24) * 1e6
