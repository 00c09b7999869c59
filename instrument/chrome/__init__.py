"""Writes traces as Chrome trace JSON, which Perfetto shows, and reads the Chrome traces of any profiler.

`writing` writes files, and `reading` reads them. `perfetto_writing` writes Perfetto's own format instead.

Data that Chrome's events cannot express is under the top-level key `instrument`, which viewers ignore. With this data,
`load` restores the trace that `dump` wrote, exact to the nanosecond. Attribute values without a JSON form become text.
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
