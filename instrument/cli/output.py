"""The standard streams of the command."""

from __future__ import annotations

import io
from typing import TextIO


def escape(stream: TextIO | None) -> None:
    """Have a stream write what its encoding lacks, such as names on an ASCII terminal, as escapes."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
        stream.reconfigure(errors="backslashreplace")


def flush(stream: TextIO | None) -> None:
    """Write out what waits in a stream."""
    if stream is not None:  # as it is where a daemon was started with it closed
        stream.flush()
