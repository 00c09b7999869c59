"""The environment as this process was given it, before a `sitecustomize` changed it for its own ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

INIT_FOLDER = "INSTRUMENT_INIT_FOLDER"
"""The variable by which `instrument init` asks the processes of a command to leave what they did."""

PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


def given() -> dict[str, str]:
    """What the process began with; what it has now where that cannot be told."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    return {
        os.fsdecode(name): os.fsdecode(value) for name, equals, value in (x.partition(b"=") for x in lines) if equals
    }


def settings() -> Mapping[str, str]:
    """What settings are read from: the present environment, but for what OpenTelemetry's distribution adds to it.

    That makes gRPC the protocol where nobody has named one, for its own exporters alone.
    """
    if "opentelemetry.distro" not in sys.modules or PROTOCOL not in os.environ or PROTOCOL in given():
        return os.environ
    return {name: value for name, value in os.environ.items() if name != PROTOCOL}
