"""The folder that `instrument run` puts on PYTHONPATH. Its `sitecustomize` starts a session in each interpreter."""

from __future__ import annotations

import os
import sys


def start_beside_opentelemetry() -> None:
    """Start our session from OpenTelemetry's autostart, by its entry point `opentelemetry_pre_instrument`.

    With `instrument run -- opentelemetry-instrument python service.py`, OpenTelemetry's `sitecustomize` comes before
    ours on PYTHONPATH. It does not call ours.
    """
    if not (os.environ.get("INSTRUMENT_PROFILE") and os.environ.get("INSTRUMENT_RUN_PID")):
        return
    from instrument.sessions.autostart import waiting

    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as `sitecustomize` does
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != folder]  # noqa: PTH100
    process = sys.modules.get("instrument.sessions.process")
    if process is None or not process.is_running():
        waiting.begin_now()
