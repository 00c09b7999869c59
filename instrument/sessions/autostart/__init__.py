"""The folder that `instrument run` puts on PYTHONPATH, so that each interpreter starts its session by itself."""

from __future__ import annotations

import os
import sys


def start() -> None:
    """Start the session that `INSTRUMENT_PROFILE` asks for, until SIGTERM at the latest. Raises nothing."""
    try:
        from instrument.sessions import process

        if process.start() is not None:
            process.stop_on_sigterm()
    except Exception as error:
        why = str(error) or type(error).__name__
        sys.stderr.write(f"instrument: this process is not instrumented: {why}\n")


def start_beside_opentelemetry() -> None:
    """What OpenTelemetry's own autostart calls before it instruments anything (`opentelemetry_pre_instrument`).

    `instrument run -- opentelemetry-instrument python service.py` starts the service with OpenTelemetry's
    `sitecustomize` before ours on PYTHONPATH, and that one does not hand over.
    """
    if not (os.environ.get("INSTRUMENT_PROFILE") and os.environ.get("INSTRUMENT_RUN_PID")):
        return
    from instrument.sessions import process

    if process.is_running():
        return
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - as `sitecustomize` does
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]  # noqa: PTH100
    start()
