"""Log records with the ids of the trace and the span that made them, under OpenTelemetry's names for log formats.

`logs: auto` gives each record of `logging` the attributes `trace_id` and `span_id`, which formatters name. They are
empty outside of spans. Events of structlog have both keys within spans. The ids are the exported ones.
"""

from __future__ import annotations

from typing import Any

from instrument.instrumentors.functions import Switch, replaces
from instrument.instrumentors.requests.propagation import current
from instrument.instrumentors.verdict import Verdict
from instrument.runtime.faults import FAULTS

TRACE_ID, SPAN_ID = "trace_id", "span_id"

_CLASSES = {"logging": ("Logger", "makeRecord"), "structlog._base": ("BoundLoggerBase", "_process_event")}
"""The class and the method that make log records or events, by module."""


class LogRecords(Switch):
    """The instrumentor of `logs: auto`."""

    key = "logs"
    module = "logging"

    def wants(self, module_name: str) -> bool:
        """Return True for the modules that make records."""
        return module_name in _CLASSES

    def imported(self, module: Any) -> bool:
        """Have the imported module make records with ids."""
        class_name, name = _CLASSES[module.__name__]
        owner = getattr(module, class_name, None)
        if hasattr(owner, name):
            self._attach()
            self._undos.append((self._tag_records if class_name == "Logger" else self._tag_events)(owner, name))
        return False

    def _ids(self) -> dict[str, str]:
        try:
            trace = current(self._recorder) if self._recorder.on else None
        except Exception as fault:  # the record is the service's
            FAULTS.note("ids of a log record", fault)
            trace = None
        return {} if trace is None else {TRACE_ID: f"{trace[0]:032x}", SPAN_ID: f"{trace[1]:016x}"}

    def _tag_records(self, owner: Any, name: str) -> Any:
        make_record = getattr(owner, name)

        @replaces(owner, name)
        def undo(logger: Any, *args: Any, **kwargs: Any) -> Any:
            record = make_record(logger, *args, **kwargs)
            record.__dict__ = {TRACE_ID: "", SPAN_ID: "", **self._ids(), **record.__dict__}
            return record

        return undo

    def _tag_events(self, owner: Any, name: str) -> Any:
        process_event = getattr(owner, name)

        @replaces(owner, name)
        def undo(logger: Any, method: str, event: Any, event_kw: Any) -> Any:
            return process_event(logger, method, event, {**self._ids(), **event_kw})

        return undo

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on the modules that make records."""
        if not self._met:
            return [Verdict("logs", "waiting", why="logging not imported")]
        return [Verdict("logs", "attached", "logging")]
