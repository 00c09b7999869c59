"""The exceptions that break a span off from outside, and are no failures.

A client that goes away, a stream that is closed early and a process that is stopped end running code with an exception
that is no `Exception`. For OpenTelemetry's API these are no errors either, nor is gRPC's status CANCELLED one of the
server in its conventions. So such a span has no error, and an attribute with how it ended.
"""

from __future__ import annotations

from collections.abc import Mapping

CANCELLED, CLOSED_EARLY, STOPPED = "cancelled", "closed early", "stopped"

BROKEN_OFF: Mapping[str, str] = {
    "CancelledError": CANCELLED,
    "Cancelled": CANCELLED,
    "GreenletExit": CANCELLED,
    "GeneratorExit": CLOSED_EARLY,
    "KeyboardInterrupt": STOPPED,
    "SystemExit": STOPPED,
}
"""The outcomes of spans by the names of the exceptions' classes, of asyncio, trio, gevent and Python."""

_classes, _name = (vars(type)[name].__get__ for name in ("__mro__", "__name__"))
_code = vars(SystemExit)["code"].__get__


def outcome_of(error: BaseException) -> str | None:
    """Return the outcome of a span that an exception broke off, None for a failure. Runs no code of the class.

    An exit with a code other than 0 is a failure. Its twin is `outcome_of` in `_recorder_span.h`.
    """
    kind = type(error)
    if issubclass(kind, Exception):
        return None
    if issubclass(kind, SystemExit):
        code = _code(error)
        return STOPPED if code is None or code is False or (type(code) is int and not code) else None
    return next((BROKEN_OFF[name] for name in map(_name, _classes(kind)) if name in BROKEN_OFF), None)
