"""The functions of `import instrument` that a service's own code calls.

They open, annotate, rename and end spans, and set gauges, counters and histograms. The recording has the current value
of each metric and, for timelines, one value per interval.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from instrument import native
from instrument.recorder import attribute_checks, core
from instrument.recorder.recorder import RECORDER, Scope
from instrument.recording.metric_definitions import (
    COUNTER,
    GAUGE,
    MOST_GAUGES,
    SUM,
    encode_cell_name,
    is_valid_cell_name,
)

Arguments = ParamSpec("Arguments")


scope = RECORDER.make_scope


def _make_scope_start(make: Callable[Arguments, Scope]) -> Callable[Arguments, Scope]:
    @functools.wraps(make, assigned=())
    def scope_start(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Scope:
        """Begin a span, and return its scope. The arguments are those of `scope`.

        Use it in a handler that cannot use ``with``. `scope_end` closes the scope, also in another callback.
        """
        return scope(*args, **kwargs).start()  # type: ignore[arg-type] # in C, if there is one

    return scope_start


scope_start = _make_scope_start(RECORDER.make_scope)


def scope_end(opened: Scope | str | None = None, *, error: BaseException | None = None) -> None:
    """Close a scope that `scope_start` opened. Never raises an error.

    - `opened`: the scope or its name; by default the innermost scope that was opened in this task or thread
    - `error`: the exception with which the span failed

    Reports count calls without an open scope, and scopes that were closed before their inner scopes.
    """
    if isinstance(opened, Scope):
        opened.end(error)
    elif RECORDER.on or opened is None or RECORDER.innermost_manual(opened) is not None:
        RECORDER.end_manual(RECORDER.innermost_manual(opened), error)


def annotate(attributes: Mapping[str, object] | None = None, /, **more: object) -> None:
    """Add facts to the innermost open span: ``annotate(tokens=3)`` or ``annotate({"usage.tokens": 3})``.

    The span may be a function's, a layer's, a scope's or a request's. The code that started this task or thread may
    have opened it. Values are text (cut after 256 characters), bools, 64-bit numbers, or lists of one type. A span has
    at most 128 values. Any other value is left out and counted. A name that is set again has the new value. Does
    nothing without an open span or a recording. Never raises.
    """
    RECORDER.annotate_innermost(attributes, **more)


def annotate_request(attributes: Mapping[str, object] | None = None, /, **more: object) -> None:
    """Add facts to the request that is open around the innermost span: ``annotate_request(tier="gold")``.

    Values, limits and errors are as in `annotate`.
    """
    RECORDER.annotate_request(attributes, **more)


def bind(key: str | int) -> None:
    """Set the key of the request that the innermost open span serves: an id that other processes use, too.

        bind(request_id)  # in the handler, and again where an engine works for it

    Reports join the spans with one key: text of at most 128 characters, or a whole number. Never raises.
    """
    RECORDER.bind_innermost(key)


def rename_span(name: str) -> None:
    """Rename the innermost open span. Never raises an error, and does nothing without an open span.

    Reports group spans by name, so use few different names. The spans of a site have up to 256 names. Further names are
    refused, and the span gets the name of the site.

    In reports, spans inside the renamed span appear below the new name. Inner spans that ended before the call remain
    below the old name.
    """
    attribute_checks.rename_span_of_frame(RECORDER, None, name)


def set_status(code: str, description: str | None = None, *, error_type: str | None = None) -> None:
    """Set the status of the innermost open span. The last call counts. Never raises an error.

    - `code`: ``"ok"`` or ``"error"``
    - `description`: a text for the reader of the span
    - `error_type`: the group of the failure in reports, by default the exception's class or ``_OTHER``; use few groups

    A span with ``"error"`` has failed, even without an exception. A span with ``"ok"`` has not failed, even if it
    raises an exception.
    """
    attribute_checks.set_status_of_frame(RECORDER, None, code, description, error_type)


if not TYPE_CHECKING and not native.WHY_MISSING:
    scope, bind = RECORDER.scope, RECORDER.bind  # the same in C: a Python call less, a third of the cost
    annotate, annotate_request = RECORDER.annotate_innermost, RECORDER.annotate_request


# ---------------------------------------------------------------- metrics

EVERY_NS = 10**9
"""The default minimum time in ns between two recorded values of a metric."""

REFUSED = "metrics not kept: no number, or too many names"
"""The name under which reports count refused values."""


class Number(core.Number):
    """A gauge, counter or histogram of the service. A gauge has the method `set`, a counter `add`, a histogram
    `record`."""

    __slots__ = ("_kind", "_settings", "name")

    def __init__(self, kind: str, name: str, unit: str, every_ns: int) -> None:
        is_sound = isinstance(name, str) and isinstance(unit, str) and is_valid_cell_name(name, unit)
        super().__init__(RECORDER, encode_cell_name(name, unit, kind) if is_sound else b"", every_ns)
        self.name, self._kind = name if is_sound else "", kind
        self._settings = name, unit, every_ns

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a metric by its name. Another process unpickles it as its own metric of that name."""
        return _find_or_make_metric, (self._kind, *self._settings)

    def refuse(self, value: object) -> None:
        """Count a value that the metric refuses. The first refusal of each kind is logged."""
        takes = {GAUGE: "`set` takes finite numbers", COUNTER: "`add` takes finite numbers from 0 on"}.get(
            self._kind, "`record` takes finite numbers"
        )
        message = f"{self.name:.60} kept no {type(value).__name__}: {takes}, and 1,024 numbers and buckets have room"
        RECORDER.complain(
            REFUSED, message if self.name else "a number needs a name of up to 90 bytes of text, and a unit"
        )


_numbers: dict[tuple[str, str], Number] = {}


def _find_or_make_metric(kind: str, name: str, unit: str, every_ns: int = EVERY_NS) -> Number:
    """Return the metric with a name. Beyond `MOST_GAUGES` names, return a shared metric without a value."""
    number = _numbers.get((kind, name))
    if number is None and len(_numbers) >= MOST_GAUGES:
        kind, name = "", ""
    return number or _numbers.setdefault((kind, name), Number(kind, name, unit, every_ns))


def make_metric_writer(kind: str, name: str, unit: str, every_ns: int) -> Callable[[float], None]:
    if kind == "gauge":
        return _find_or_make_metric(GAUGE, name, unit, every_ns).set
    return (
        _find_or_make_metric(COUNTER, name, unit).add
        if kind == "counter"
        else _find_or_make_metric(SUM, name, unit).record
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def _cache_newest_results(function: Function) -> Function:
    """Cache the newest results of a function. A cached call takes a fifth of the time."""
    return cast(Function, functools.lru_cache(MOST_GAUGES)(function))


@_cache_newest_results
def gauge(name: str, unit: str = "1") -> Number:
    """Return the gauge with a name: ``instrument.gauge("kv.usage").set(0.5)``. Setting a value costs no more than a
    scope.

    `unit` is a unit of UCUM, such as "By", "s" or "{request}", or "1" for a share. Gauges are shown in traces and
    `instrument live`. They are also sent to collectors.
    """
    return _find_or_make_metric(GAUGE, name, unit)


@_cache_newest_results
def counter(name: str, unit: str = "1") -> Number:
    """Return the counter with a name: ``instrument.counter("cache.hits").add()``. `add` takes an amount of at least 0,
    by default 1.

    `unit` is a unit of UCUM, such as "By", "s" or "{request}", or "1" for a share. Counters are shown in traces and
    `instrument live`. They are also sent to collectors.
    """
    return _find_or_make_metric(COUNTER, name, unit)


@_cache_newest_results
def histogram(name: str, unit: str = "1") -> Number:
    """Return the histogram with a name: ``instrument.histogram("prompt.tokens").record(17)``. `record` takes a finite
    number.

    `unit` is a unit of UCUM, such as "By", "s" or "{request}", or "1" for a share. Histograms are shown in traces and
    `instrument live`. They are also sent to collectors.
    """
    return _find_or_make_metric(SUM, name, unit)
