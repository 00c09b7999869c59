"""Which exceptions say that a span was broken off from outside, and not that anything has failed.

A client that goes away, a stream that is closed early and a process that is stopped end what was running with an
exception that is no `Exception`. OpenTelemetry's API does not take these for errors either, nor do its conventions take
the status CANCELLED of gRPC for one of the server. So such a span has no error, and says as an attribute how it ended.
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
"""By the names of classes, those of asyncio, trio, gevent and Python, how what they end was broken off."""

_classes, _name = (vars(type)[name].__get__ for name in ("__mro__", "__name__"))
_code = vars(SystemExit)["code"].__get__


def outcome_of(error: BaseException) -> str | None:
    """How a span was broken off that ended with an exception, None where it has failed. No code of the class is run.

    An exit with a code other than 0 is a failure. Its twin is `outcome_of` in `_recorder_span.h`.
    """
    kind = type(error)
    if issubclass(kind, Exception):
        return None
    if issubclass(kind, SystemExit):
        code = _code(error)
        return STOPPED if code is None or code is False or (type(code) is int and not code) else None
    return next((BROKEN_OFF[name] for name in map(_name, _classes(kind)) if name in BROKEN_OFF), None)
