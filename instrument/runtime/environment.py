"""The environment variables of instrument and OpenTelemetry that several modules read."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

CHECK_FOLDER = "INSTRUMENT_CHECK_FOLDER"
"""The environment variable with the folder in which processes report to `instrument check`, which has set it."""

INIT_FOLDER = "INSTRUMENT_INIT_FOLDER"
"""The environment variable with the folder in which processes report to `instrument init`, which has set it."""

PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
METRICS_EXPORTER = "OTEL_METRICS_EXPORTER"
TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"


def initial_environment() -> dict[str, str]:
    """Return the environment with which this process was started, or the current one if that is unknown."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    return {
        os.fsdecode(name): os.fsdecode(value) for name, equals, value in (x.partition(b"=") for x in lines) if equals
    }


def settings(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the environment variables that count as the user's settings.

    OpenTelemetry's distribution sets `PROTOCOL` to gRPC for its own exporters. That value is left out.
    """
    if "opentelemetry.distro" not in sys.modules or PROTOCOL not in environ or PROTOCOL in initial_environment():
        return environ
    return {name: value for name, value in environ.items() if name != PROTOCOL}


def metrics_variables() -> dict[str, str]:
    """Return the environment variables that change how metrics are sent."""
    return {name: os.environ[name] for name in (TEMPORALITY, METRICS_EXPORTER) if name in os.environ}


def environment_attributes() -> dict[str, object]:
    """Parse `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` into attributes, without OpenTelemetry's SDK."""
    text, name = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""), os.environ.get("OTEL_SERVICE_NAME", "")
    pairs = [pair.partition("=") for pair in text.split(",") if "=" in pair]
    if "%" in text:
        from urllib.parse import unquote  # which few services have a use for

        pairs = [(unquote(key), equals, unquote(value)) for key, equals, value in pairs]
    attributes: dict[str, object] = {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
    return {**attributes, "service.name": name} if name else attributes
