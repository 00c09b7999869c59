"""Chrome trace JSON, the file that Perfetto shows: written from a trace, and read back into one.

`lanes` finds the place of every slice, `arrows` what leads from one to another, `writing` makes the file, `reading`
takes it back, as it does the files of other profilers. Both ways share `text`, the JSON, and `metadata`, the facts
beside the events. `joining` puts what torch.profiler saw beside our spans. `track_events` writes the same slices in
Perfetto's own format.

Viewers need only the events. What else a trace knows stands in the top-level key `instrument`, which they ignore, so
that `load` returns what `dump` was given, to the nanosecond. What changes on the way: a lone surrogate becomes the
replacement character and, in attributes, a sequence becomes a tuple, a number that JSON or int64 does not have becomes
text, and a value of any other type becomes the type's name in angle brackets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from instrument.chrome.joining import join, join_saved
from instrument.trace.text import LIMIT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from instrument.recording.spans import Trace
    from instrument.recording.tally import Tally
    from instrument.trace.columns import Trace as Columns
    from instrument.trace.file import Saved

__all__ = ["dump", "join", "join_saved", "load", "load_columns", "read", "write", "write_track_events"]

# What reads and writes wants numpy, which a service that only records has no use for.


def dump(path: str | os.PathLike[str], trace: Trace, tally: Tally | None = None) -> Path:
    """See `instrument.chrome.writing.dump`."""
    from instrument.chrome import writing

    return writing.dump(path, trace, tally)


def write(path: str | os.PathLike[str], columns: Columns, facts: Trace, tally: Tally | None = None) -> Path:
    """See `instrument.chrome.writing.write`."""
    from instrument.chrome import writing

    return writing.write(path, columns, facts, tally)


def write_track_events(path: str | os.PathLike[str], columns: Columns, facts: Trace) -> Path:
    """See `instrument.chrome.track_events.write_track_events`."""
    from instrument.chrome import track_events

    return track_events.write_track_events(path, columns, facts)


def load(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> tuple[Trace, Tally]:
    """See `instrument.chrome.reading.load`."""
    from instrument.chrome import reading

    return reading.load(path, limit_bytes=limit_bytes)


def read(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> tuple[Trace, Callable[[], Tally]]:
    """See `instrument.chrome.reading.read`."""
    from instrument.chrome import reading

    return reading.read(path, limit_bytes=limit_bytes)


def load_columns(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> Saved:
    """See `instrument.chrome.reading.load_columns`."""
    from instrument.chrome import reading

    return reading.load_columns(path, limit_bytes=limit_bytes)
