"""Instrumentation for inference services, selected by one `profile.yaml`.

In code: `profiled`, `scope` and `loader` name what the service's authors want to see, `annotate` says more of it;
`start`, `stop`, `summary` and `dump` run a session; `Profiler` looks at the steps of a loop. Without a change in the
service: ``instrument run --profile profile.yaml -- script.py``.

Importing this package starts nothing and changes nothing; what a session needs is imported by `start`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrument.errors import ExportError, InstrumentError, ProfileError, StateError, TargetError, TraceError
from instrument.instrumentors.functions import profiled
from instrument.instrumentors.loaders import loader
from instrument.recorder.scopes import (
    annotate,
    annotate_request,
    bind,
    rename_span,
    scope,
    scope_end,
    scope_start,
    set_status,
)

if TYPE_CHECKING:
    from instrument.instrumentors.requests.propagation import inject
    from instrument.sessions.handlers import export_chrome, export_otlp, print_summary
    from instrument.sessions.process import (
        disable,
        dump,
        enable,
        flush,
        prometheus,
        reload,
        session,
        start,
        stop,
        summary,
    )
    from instrument.sessions.profiler import Profiler
    from instrument.sessions.session import Session
    from instrument.sessions.window import schedule

__version__ = "0.1.0"

__all__ = [
    "ExportError",
    "InstrumentError",
    "ProfileError",
    "Profiler",
    "Session",
    "StateError",
    "TargetError",
    "TraceError",
    "annotate",
    "annotate_request",
    "bind",
    "disable",
    "dump",
    "enable",
    "export_chrome",
    "export_otlp",
    "flush",
    "inject",
    "loader",
    "print_summary",
    "profiled",
    "prometheus",
    "reload",
    "rename_span",
    "schedule",
    "scope",
    "scope_end",
    "scope_start",
    "session",
    "set_status",
    "start",
    "stop",
    "summary",
]

_OF_THE_SESSION = frozenset(
    {"Session", "disable", "dump", "enable", "flush", "prometheus", "reload", "session", "start", "stop", "summary"}
)

_ROOM_OF = {
    "Profiler": "sessions.profiler",
    "export_chrome": "sessions.handlers",
    "export_otlp": "sessions.handlers",
    "inject": "instrumentors.requests.propagation",
    "print_summary": "sessions.handlers",
    "schedule": "sessions.window",
}


def __getattr__(name: str) -> Any:
    # A service that only decorates its functions does not pay for the exporters.
    if name in _OF_THE_SESSION:
        from instrument.sessions import process

        return getattr(process, name)
    if name in _ROOM_OF:
        return getattr(import_module(f"instrument.{_ROOM_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
