"""The meaning of events in Chrome traces of `paddle.profiler`: kinds, names, lanes, times and allocations.

Its category is the type of an event. A name ends with how long the call took, a thread has a lane for Python and one
for C++, and the time of an event is cut to microseconds, while its arguments have it to the nanosecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from instrument.recording.allocations import Allocation
from instrument.recording.spans import HOST, AttributeValue
from instrument.trace.text import checked, nanoseconds

Attributes = tuple[tuple[str, AttributeValue], ...]


class Meaning(NamedTuple):
    """The kind of span that events of a category are, the attributes of their sites, and what work of a device."""

    kind: str
    attributes: Attributes = ()
    work: str | None = None


_PART = Meaning("phase", (("phase", False),))
"""A part of an operator, which is no phase of a step."""

_MEANINGS: Mapping[str, Meaning] = {
    "Backward": Meaning("phase", (("phase", "backward"),)),
    "Communication": Meaning("comm"),
    "CudaRuntime": Meaning("user"),
    "Dataloader": Meaning("loader"),
    "DygraphKernelLaunch": _PART,
    "Forward": Meaning("phase", (("phase", "forward"),)),
    "Kernel": Meaning("op", (), "kernel"),
    "Memcpy": Meaning("copy", (), "copy"),
    "Memset": Meaning("op", (), "fill"),
    "Operator": Meaning("op"),
    "OperatorInner": _PART,
    "Optimization": Meaning("phase", (("phase", "optimizer"),)),
    "ProfileStep": Meaning("step"),
    "PythonOp": Meaning("op"),
    "PythonUserDefined": Meaning("user"),
    "StaticKernelLaunch": _PART,
    "UserDefined": Meaning("user"),
}

RESERVING = ("ReservedAllocate", "ReservedFree")
"""Categories of what its allocator takes from the driver: that is in what the allocator has in all."""

_TOOK = re.compile(r"(.*)\[[0-9.]+ (?:ns|us|ms|s)\]", re.DOTALL)
_LANE = re.compile(r"([0-9]{1,18})\((?:Python|C\+\+)\)")
_THREAD = re.compile(r"(thread [0-9]+:.*)\((?:Python|C\+\+)\)", re.DOTALL)
_SINCE_FIRST = re.compile(r"([0-9]{1,15})\.([0-9]{3}) us")
_COPIES = ("memcpy", "memorycopy", "memset")
"""Words in the name of a range about memory, in small letters."""
_COPY = re.compile(r"GpuMemcpy(Sync|Async)(?:\(same_gpu\))?:(CPU|GPU)->(CPU|GPU)")
_WAYS = {("CPU", "GPU"): "h2d", ("GPU", "CPU"): "d2h", ("GPU", "GPU"): "d2d"}
_PLACE = re.compile(r"Place\(([a-z_]+)(?::([0-9]{1,9}))?\)")
_IN_HOST = ("cpu", "gpu_pinned")
_ROUNDED_NS = 2_000
"""Nanoseconds by which the two times of an event may differ."""


def meaning(category: str, name: str) -> tuple[str, Meaning] | None:
    """Return the name of an event without its time, and its meaning; None for a category that is not Paddle's."""
    known = _MEANINGS.get(category)
    took = None if known is None else _TOOK.fullmatch(name)
    if known is None or (known.work is not None and took is None):
        return None  # others call their kernels so, too
    name = name if took is None else took[1]
    if known.kind == "user" and category != "CudaRuntime" and any(word in name.lower() for word in _COPIES):
        said = _COPY.fullmatch(name)
        way = _WAYS.get((said[2], said[3])) if said is not None else None
        facts: Attributes = () if said is None or way is None else (("direction", way), ("sync", said[1] == "Sync"))
        return name, Meaning("copy", facts)
    return name, known


def thread_of(lane: object) -> object:
    """Return the thread whose lane for Python or C++ this is; any other lane as it is."""
    found = _LANE.fullmatch(lane) if isinstance(lane, str) else None
    return lane if found is None else int(found[1])


def thread_name(name: str) -> str:
    """Return the name of a thread without the language of its lane."""
    found = _THREAD.fullmatch(name)
    return name if found is None else found[1]


class EventClock:
    """Times of events to the nanosecond, which their arguments count from the first of them."""

    def __init__(self) -> None:
        self._first_ns: int | None = None

    def times(self, start_ns: int, args: dict[str, Any]) -> tuple[int, int] | None:
        """Take begin and end out of the arguments. Return None where these do not have them."""
        start, end = (args.pop(key, None) for key in ("start_time", "end_time"))
        if not isinstance(start, str) or not isinstance(end, str):
            return None
        parts = [_SINCE_FIRST.fullmatch(text) for text in (start, end)]
        since, until = (None if one is None else int(one[1]) * 1_000 + int(one[2]) for one in parts)
        if since is None or until is None or until < since:
            return None
        if self._first_ns is None:
            self._first_ns = start_ns - since
        if abs(self._first_ns + since - start_ns) > _ROUNDED_NS:
            return None  # of another file, or another clock
        return self._first_ns + since, self._first_ns + until


def allocation(event: Mapping[str, Any], thread_id: int) -> Allocation | None:
    """Return the allocation that an event is, None for another event."""
    args = event.get("args")
    if event.get("cat") not in ("Allocate", "Free") or not isinstance(args, dict):
        return None
    place = _PLACE.match(str(args.get("place")))
    if place is None or "increase_bytes" not in args:
        return None
    address = str(args.get("addr", ""))
    return Allocation(
        device=HOST if place[1] in _IN_HOST else int(place[2] or 0),
        at_ns=nanoseconds(event.get("ts")),
        thread_id=thread_id,
        size_bytes=checked(args["increase_bytes"], int),
        address=int(address) if address.isdecimal() and len(address) < 19 else 0,
        allocated_bytes=checked(args.get("current_allocated", 0), int),
        reserved_bytes=checked(args.get("current_reserved", 0), int),
    )
