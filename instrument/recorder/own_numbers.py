"""Numbers that the service sets in its code or by rules: gauges, counters and histograms.

Each has a slot in the recording with its newest value, which a call overwrites. Once per interval a value also goes
into a ring, for timelines. A session counts from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from time import monotonic_ns
from typing import Any

from instrument.recorder.recorder import RECORDER
from instrument.recording.distributions import COUNTER, GAUGE
from instrument.recording.memory_layout import NEWEST_NUMBERS, NUMBER, NUMBERS
from instrument.recording.numbers import SUM, bucket_of, cell_name, fits
from instrument.runtime.unpatched import Lock

EVERY_NS = 10**9
"""The default ns between two values of a number that are kept for timelines."""

NEVER_NS = 1 << 62
REFUSED = "metrics not kept: no number, or too many names"
"""The count of values that are not kept."""

VALUES_KNOWN = 1_000
"""The most whole numbers whose bucket a histogram knows without computing it, which takes half of its time."""

_PLACES = NUMBER.size // 8
_VALUE = NUMBER.fields["value"][0] // 8
_PACK = NUMBER.packer()
_COUNT = Struct("<Q")
_lock = Lock()


class _Room:
    """The part of a recording for the numbers of one session. Calls have the lock of all numbers."""

    def __init__(self) -> None:
        self.session_ns = RECORDER.session_ns
        room = RECORDER.room_for("numbers")
        is_there = room is not None and len(room.part) >= (NUMBERS + NEWEST_NUMBERS) * NUMBER.size
        self._room = room if is_there else None
        self._taken_count = self._kept_count = 0
        self.times: Any = [0] * _PLACES
        self.values: Any = [0.0] * _PLACES
        if self._room is not None:
            self.times, self.values = self._room.part.cast("q"), self._room.part.cast("d")
            for slot in range(NUMBERS, NUMBERS + NEWEST_NUMBERS):  # of a session before
                self.times[slot * _PLACES] = 0

    def take(self, name: bytes) -> int:
        """Return the place of a new slot. Without room it is outside of the recording."""
        if self._room is None or self._taken_count == NEWEST_NUMBERS:
            RECORDER.complain(REFUSED, "the recording has no room for another number")
            return -1
        slot = NUMBERS + self._taken_count
        self._taken_count += 1
        _PACK.pack_into(self._room.part, slot * NUMBER.size, 0, 0.0, name)
        return slot * _PLACES

    def keep(self, name: bytes, at_ns: int, value: float) -> None:
        """Add a value to the ring, in place of the oldest if need be."""
        if self._room is not None:
            _PACK.pack_into(self._room.part, self._kept_count % NUMBERS * NUMBER.size, at_ns, value, name)
            self._kept_count += 1
            _COUNT.pack_into(self._room.head, self._room.used_at(), self._kept_count)


class _NoRoom(_Room):
    """A place for numbers that a recording has no room for."""

    def __init__(self, session_ns: int) -> None:
        self.session_ns, self._room = session_ns, None
        self.times, self.values = [0] * _PLACES, [0.0] * _PLACES


_rooms: list[_Room] = []
"""The room of the newest session that had a number."""


class _Number:
    """A number by its name, unit and kind, with the place of its newest value in the recording."""

    __slots__ = ("_at", "_due_ns", "_every_ns", "_name", "_room", "_session_ns", "_times", "_total", "_values", "name")

    def __init__(self, name: str, unit: str, every_ns: int, kind: str) -> None:
        is_sound = isinstance(name, str) and isinstance(unit, str) and fits(name, unit)
        if not is_sound:
            RECORDER.complain(REFUSED, f"a number cannot be named {name!r:.60}; allowed: 90 bytes of text")
        self.name = name
        self._name, self._every_ns = cell_name(name, unit, kind) if is_sound else b"", every_ns
        self._session_ns, self._at, self._due_ns, self._total = -1, 0, 0, 0.0

    def _begin(self) -> None:
        """Take a slot in the recording of the session that runs now."""
        with _lock:
            session_ns = RECORDER.session_ns
            if not _rooms or _rooms[0].session_ns != session_ns:
                _rooms[:] = [_Room()]
            at = _rooms[0].take(self._name) if self._name else -1
            room = _rooms[0] if at >= 0 else _NoRoom(session_ns)
            self._room, self._times, self._values, self._at = room, room.times, room.values, max(at, 0)
            self._due_ns, self._total, self._session_ns = 0, 0.0, session_ns

    def _keep(self, at_ns: int, value: float) -> None:
        """Keep a value for timelines."""
        self._due_ns = at_ns + self._every_ns
        with _lock:
            self._room.keep(self._name, at_ns, value)

    def _refuse(self, value: object) -> None:
        RECORDER.complain(REFUSED, f"{self.name:.60} cannot be {type(value).__name__}")


class GaugeNumber(_Number):
    """A number that goes up and down."""

    __slots__ = ()

    def set(self, value: float) -> None:
        """Set the value. Never raises."""
        if RECORDER.on:
            if self._session_ns != RECORDER.session_ns:
                self._begin()
            now_ns = monotonic_ns()
            try:
                self._values[self._at + _VALUE] = value
            except TypeError:
                self._refuse(value)
                return
            self._times[self._at] = now_ns
            if now_ns >= self._due_ns:
                self._keep(now_ns, value)


class CounterNumber(_Number):
    """A number that only grows."""

    __slots__ = ()

    def add(self, value: float = 1) -> None:
        """Add an amount from 0 on. Never raises."""
        if RECORDER.on:
            if self._session_ns != RECORDER.session_ns:
                self._begin()
            now_ns = monotonic_ns()
            try:
                if value > 0:  # no call from here to the store: no other thread of the interpreter comes between
                    self._values[self._at + _VALUE] = self._total = self._total + value
            except TypeError:
                self._refuse(value)
                return
            self._times[self._at] = now_ns
            if now_ns >= self._due_ns:
                self._keep(now_ns, self._total)


class HistogramNumber(_Number):
    """A distribution of values from 0 on, in four buckets for each factor of two. Its own slot has the sum."""

    __slots__ = ("_buckets", "_by_value", "_unit")

    def __init__(self, name: str, unit: str, every_ns: int) -> None:
        super().__init__(name, unit, every_ns, SUM)
        self._unit = unit
        self._buckets: dict[int, _Number] = {}
        self._by_value: dict[float, _Number] = {}

    def record(self, value: float) -> None:
        """Count a value. Never raises."""
        if RECORDER.on:
            session_ns = RECORDER.session_ns
            if self._session_ns != session_ns:
                self._begin()
            now_ns = monotonic_ns()
            try:
                is_whole = type(value) is int
                bucket = self._by_value.get(value) if is_whole else self._buckets.get(bucket_of(value))
                if bucket is None or bucket._session_ns != session_ns:
                    bucket = self._bucket(value, now_ns)
            except (TypeError, ValueError, OverflowError):
                self._refuse(value)
                return
            bucket._values[bucket._at + _VALUE] = bucket._total = bucket._total + 1
            if value > 0:
                self._values[self._at + _VALUE] = self._total = self._total + value
            self._times[self._at] = now_ns
            if now_ns >= self._due_ns:
                self._keep(now_ns, self._total)

    def _bucket(self, value: float, at_ns: int) -> _Number:
        """Return the bucket of a value, with a slot in the recording of the session that runs now."""
        number = bucket_of(value)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets.setdefault(number, _Number(self.name, self._unit, NEVER_NS, str(number)))
        if bucket._session_ns != RECORDER.session_ns:
            bucket._begin()
            bucket._times[bucket._at] = at_ns
        if isinstance(value, int) and len(self._by_value) < VALUES_KNOWN:
            self._by_value[value] = bucket
        return bucket


_KINDS: dict[type[Any], tuple[str, ...]] = {GaugeNumber: (GAUGE,), CounterNumber: (COUNTER,)}
_numbers: dict[tuple[type[Any], str], Any] = {}


def _number(kind: type[Any], name: str, unit: str, every_ns: int = EVERY_NS) -> Any:
    """Return the number of a name, the same at each call."""
    number = _numbers.get((kind, name))
    return number or _numbers.setdefault((kind, name), kind(name, unit, every_ns, *_KINDS.get(kind, ())))


def number_of(kind: str, name: str, unit: str, every_ns: int) -> Callable[[float], None]:
    """Return the function that records a value of a number: a `gauge`, a `counter` or a `histogram`."""
    if kind == "gauge":
        return _number(GaugeNumber, name, unit, every_ns).set  # type: ignore[no-any-return]
    if kind == "counter":
        return _number(CounterNumber, name, unit, every_ns).add  # type: ignore[no-any-return]
    return _number(HistogramNumber, name, unit, every_ns).record  # type: ignore[no-any-return]


def gauge(name: str, unit: str = "1") -> GaugeNumber:
    """Return a gauge of the service: ``instrument.gauge("kv.usage").set(0.5)``.

    `unit` is of UCUM, such as "By", "s" or "{request}"; 1 for a share. Gauges, counters and histograms are in
    recordings, captures, traces, `instrument live`, and at collectors. A call of `set` or `add` costs one to two
    scopes, one of `record` three for a whole number, and five for another.
    """
    return _number(GaugeNumber, name, unit)  # type: ignore[no-any-return]


def counter(name: str, unit: str = "1") -> CounterNumber:
    """Return a counter of the service: ``instrument.counter("cache.hits").add()``. Otherwise as `gauge`."""
    return _number(CounterNumber, name, unit)  # type: ignore[no-any-return]


def histogram(name: str, unit: str = "1") -> HistogramNumber:
    """Return a histogram of the service: ``instrument.histogram("prompt.tokens").record(17)``. Otherwise as `gauge`."""
    return _number(HistogramNumber, name, unit)  # type: ignore[no-any-return]
