"""The standard streams of the command."""

from __future__ import annotations

from typing import TextIO


def flush(stream: TextIO | None) -> None:
    """Write out what waits in a stream."""
    if stream is not None:  # as it is where a daemon was started with it closed
        stream.flush()
