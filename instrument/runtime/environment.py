"""The environment of this process before any `sitecustomize` changed it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

CHECK_FOLDER = "INSTRUMENT_CHECK_FOLDER"
"""The variable by which `instrument check` asks the processes of a command to report to it."""

INIT_FOLDER = "INSTRUMENT_INIT_FOLDER"
"""The variable by which `instrument init` asks the processes of a command to report to it."""

PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
METRICS_EXPORTER = "OTEL_METRICS_EXPORTER"
TEMPORALITY = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"


def initial_environment() -> dict[str, str]:
    """Return the environment with which the process began, or the current one if the system has no record."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    return {
        os.fsdecode(name): os.fsdecode(value) for name, equals, value in (x.partition(b"=") for x in lines) if equals
    }


def settings(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the environment for settings, without the protocol variable if OpenTelemetry's distribution set it.

    The distribution sets it to gRPC for its own exporters.
    """
    if "opentelemetry.distro" not in sys.modules or PROTOCOL not in environ or PROTOCOL in initial_environment():
        return environ
    return {name: value for name, value in environ.items() if name != PROTOCOL}


def metrics_variables() -> dict[str, str]:
    """Return this process's variables that change its metrics."""
    return {name: os.environ[name] for name in (TEMPORALITY, METRICS_EXPORTER) if name in os.environ}


def environment_attributes() -> dict[str, object]:
    """Return the attributes of `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME`, without OpenTelemetry's SDK."""
    text, name = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""), os.environ.get("OTEL_SERVICE_NAME", "")
    pairs = [pair.partition("=") for pair in text.split(",") if "=" in pair]
    if "%" in text:
        from urllib.parse import unquote  # which few services have a use for

        pairs = [(unquote(key), equals, unquote(value)) for key, equals, value in pairs]
    attributes: dict[str, object] = {key.strip(): value.strip() for key, _, value in pairs if key.strip()}
    return {**attributes, "service.name": name} if name else attributes
