"""Instrumentation for inference services: records the functions, layers and copies that a `profile.yaml` selects.

``instrument run --profile profile.yaml -- script.py`` records a service without a change in its code. In code,
`profiled`, `scope` and `loader` open spans, and `annotate` adds attributes to them. `start`, `stop`, `summary` and
`dump` control a session. `Profiler` records the steps of a loop. `load` and `compare` read traces in a notebook.

Importing this package starts nothing and changes nothing. The first use of a name loads the module that defines it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is not loaded for a process that only starts
if TYPE_CHECKING:
    from typing import Any

    from instrument.cli.notebook import LoadedTrace, compare, load
    from instrument.errors import ExportError, InstrumentError, ProfileError, StateError, TargetError, TraceError
    from instrument.instrumentors.loaders import loader
    from instrument.instrumentors.profiled_functions import profiled
    from instrument.instrumentors.requests.propagation import inject
    from instrument.recorder.api import (
        annotate,
        annotate_request,
        bind,
        counter,
        gauge,
        histogram,
        rename_span,
        scope,
        scope_end,
        scope_start,
        set_status,
    )
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
    "LoadedTrace",
    "ProfileError",
    "Profiler",
    "Session",
    "StateError",
    "TargetError",
    "TraceError",
    "annotate",
    "annotate_request",
    "bind",
    "compare",
    "counter",
    "disable",
    "dump",
    "enable",
    "export_chrome",
    "export_otlp",
    "flush",
    "gauge",
    "histogram",
    "inject",
    "load",
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

_NAMES_OF = {
    "cli.notebook": "LoadedTrace compare load",
    "errors": "ExportError InstrumentError ProfileError StateError TargetError TraceError",
    "instrumentors.profiled_functions": "profiled",
    "instrumentors.loaders": "loader",
    "instrumentors.requests.propagation": "inject",
    "recorder.api": (
        "annotate annotate_request bind counter gauge histogram rename_span scope scope_end scope_start set_status"
    ),
    "sessions.handlers": "export_chrome export_otlp print_summary",
    "sessions.process": "Session disable dump enable flush prometheus reload session start stop summary",
    "sessions.profiler": "Profiler",
    "sessions.window": "schedule",
}
_ROOM_OF = {name: room for room, names in _NAMES_OF.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(__import__(f"instrument.{_ROOM_OF[name]}", fromlist=(name,)), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
