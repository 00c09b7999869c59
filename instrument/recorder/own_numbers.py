"""The gauges, counters and histograms that a service sets in its code, or by rules of its profile.

The recording has the current value of each. Once per interval the value is also added to a ring, for timelines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

from instrument.recorder import core
from instrument.recorder.recorder import RECORDER
from instrument.recording.metrics import COUNTER, GAUGE, MOST_GAUGES, SUM, cell_name, is_valid_cell_name

EVERY_NS = 10**9
"""The default minimum ns between two values of a metric in timelines."""

REFUSED = "metrics not kept: no number, or too many names"
"""The name under which reports count refused values."""


class Number(core.Number):
    """A gauge, counter or histogram of the service. `set`, `add` or `record` writes a value."""

    __slots__ = ("_kind", "_settings", "name")

    def __init__(self, kind: str, name: str, unit: str, every_ns: int) -> None:
        is_sound = isinstance(name, str) and isinstance(unit, str) and is_valid_cell_name(name, unit)
        super().__init__(RECORDER, cell_name(name, unit, kind) if is_sound else b"", every_ns)
        self.name, self._kind = name if is_sound else "", kind
        self._settings = name, unit, every_ns

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a metric by its name. Another process unpickles it as its own metric of that name."""
        return _find_or_make_metric, (self._kind, *self._settings)

    def refuse(self, value: object) -> None:
        """Count a refused value, and log the first of its kind."""
        takes = {GAUGE: "`set` takes finite numbers", COUNTER: "`add` takes finite numbers from 0 on"}.get(
            self._kind, "`record` takes finite numbers"
        )
        message = f"{self.name:.60} kept no {type(value).__name__}: {takes}, and 1,024 numbers and buckets have room"
        RECORDER.complain(
            REFUSED, message if self.name else "a number needs a name of up to 90 bytes of text, and a unit"
        )


_numbers: dict[tuple[str, str], Number] = {}


def _find_or_make_metric(kind: str, name: str, unit: str, every_ns: int = EVERY_NS) -> Number:
    """Return the metric with a name, always the same one. Names beyond the limit share a metric without a value."""
    number = _numbers.get((kind, name))
    if number is None and len(_numbers) >= MOST_GAUGES:
        kind, name = "", ""
    return number or _numbers.setdefault((kind, name), Number(kind, name, unit, every_ns))


def make_metric_writer(kind: str, name: str, unit: str, every_ns: int) -> Callable[[float], None]:
    """Return the function that writes a metric's value. `kind` is `gauge`, `counter` or `histogram`."""
    if kind == "gauge":
        return _find_or_make_metric(GAUGE, name, unit, every_ns).set
    return (
        _find_or_make_metric(COUNTER, name, unit).add
        if kind == "counter"
        else _find_or_make_metric(SUM, name, unit).record
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def _cache_newest(function: Function) -> Function:
    """Cache the newest results of a function. A cached call takes a fifth of the time."""
    return cast(Function, lru_cache(MOST_GAUGES)(function))


@_cache_newest
def gauge(name: str, unit: str = "1") -> Number:
    """Return a gauge of the service: ``instrument.gauge("kv.usage").set(0.5)``. A value costs no more than a scope.

    `unit` is a unit of UCUM, such as "By", "s" or "{request}", or "1" for a share. Gauges, counters and histograms are
    shown in traces and `instrument live`, and sent to collectors.
    """
    return _find_or_make_metric(GAUGE, name, unit)


@_cache_newest
def counter(name: str, unit: str = "1") -> Number:
    """Return a counter of the service: ``instrument.counter("cache.hits").add()``. Otherwise as `gauge`."""
    return _find_or_make_metric(COUNTER, name, unit)


@_cache_newest
def histogram(name: str, unit: str = "1") -> Number:
    """Return a histogram of the service: ``instrument.histogram("prompt.tokens").record(17)``. Otherwise as `gauge`."""
    return _find_or_make_metric(SUM, name, unit)
