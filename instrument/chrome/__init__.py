"""Writes traces as Chrome trace JSON, which Perfetto shows, and reads the Chrome traces of any profiler.

To write a file, `lanes` assigns slices to lanes and selects arrows, and `writing` makes the events. To read a file,
`events` decodes the events, `slices` makes trees of slices, and `foreign_slices` reads slices of other profilers.
`reading` uses all three. `perfetto_writing` writes the same slices in Perfetto's own format.

Viewers need only the events. All other facts are under the top-level key `instrument`, which viewers ignore. From these
facts, `load` restores the trace that `dump` wrote, exact to the nanosecond. An attribute value without a JSON form
becomes text.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instrument.chrome.perfetto_writing import write_perfetto
    from instrument.chrome.reading import join_torch_trace, load, read
    from instrument.chrome.writing import dump

__all__ = ["dump", "join_torch_trace", "load", "read", "write_perfetto"]

_MODULE_OF = {
    "dump": "writing",
    **dict.fromkeys(("join_torch_trace", "load", "read"), "reading"),
    "write_perfetto": "perfetto_writing",
}


def __getattr__(name: str) -> Any:
    # These modules import numpy, which a service that only records does not need.
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
