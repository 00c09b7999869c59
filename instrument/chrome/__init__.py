"""Chrome trace JSON, the file that Perfetto shows: written from a trace, and read back into one.

To write one: `lanes` finds the place of every slice, and the arrows between them, `writing` makes the events and
the file. To read one, of any writer: `events` takes the events from the text, `slices` makes trees of
them, `others` knows the names and arguments of other profilers, `reading` puts it together, and joins a trace of ours
with one of torch.profiler. `track_events` writes the same slices in Perfetto's own format.

Viewers need only the events. All else that a trace knows is in the top-level key `instrument`, which they ignore, so
that `load` returns what `dump` was given, to the nanosecond. What changes on the way: a lone surrogate becomes the
replacement character and, in attributes, a sequence becomes a tuple, a number that JSON or int64 does not have becomes
text, and a value of any other type becomes the type's name in angle brackets.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrument.chrome.reading import join, load, read
    from instrument.chrome.track_events import write_track_events
    from instrument.chrome.writing import dump

__all__ = ["dump", "join", "load", "read", "write_track_events"]

_MODULE_OF = {
    "dump": "writing",
    **dict.fromkeys(("join", "load", "read"), "reading"),
    "write_track_events": "track_events",
}


def __getattr__(name: str) -> Any:
    # What reads and writes wants numpy, which a service that only records has no use for.
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
