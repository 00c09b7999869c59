"""Interprets the events of `paddle.profiler` in Chrome traces: kinds, names, lanes, times and allocations.

In a file of Paddle, the category of an event is its type, and the name ends with the duration. A thread has one lane
for Python and one for C++. Exact times are in the event's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from instrument.recording.spans import HOST, AttributeValue
from instrument.trace.text import check_type, convert_to_ns
from instrument.trace.trace import Allocation

Attributes = tuple[tuple[str, AttributeValue], ...]


class Meaning(NamedTuple):
    """The meaning of an event category of Paddle.

    - `kind`: the kind of the spans
    - `attributes`: the attributes of the spans
    - `work`: the kind of device work, or None for work of the host
    """

    kind: str
    attributes: Attributes = ()
    work: str | None = None


_PART = Meaning("phase", (("phase", False),))
"""The meaning of events for parts of an operator. These parts are not phases of training."""

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
"""The categories of events that reserve memory. Counts of reserved bytes already include these events."""

_TOOK = re.compile(r"(.*)\[[0-9.]+ (?:ns|us|ms|s)\]", re.DOTALL)
_LANE = re.compile(r"([0-9]{1,18})\((?:Python|C\+\+)\)")
_THREAD = re.compile(r"(thread [0-9]+:.*)\((?:Python|C\+\+)\)", re.DOTALL)
_SINCE_FIRST = re.compile(r"([0-9]{1,15})\.([0-9]{3}) us")
_COPIES = ("memcpy", "memorycopy", "memset")
"""Words that mark a memory copy if the lower-case name of a range contains them."""
_COPY = re.compile(r"GpuMemcpy(Sync|Async)(?:\(same_gpu\))?:(CPU|GPU)->(CPU|GPU)")
_WAYS = {("CPU", "GPU"): "h2d", ("GPU", "CPU"): "d2h", ("GPU", "GPU"): "d2d"}
_PLACE = re.compile(r"Place\(([a-z_]+)(?::([0-9]{1,9}))?\)")
_IN_HOST = ("cpu", "gpu_pinned")
_ROUNDED_NS = 2_000
"""The maximum nanoseconds between an event's start time and the start time in the arguments. Arguments with a larger
difference are ignored."""


def interpret_event(category: str, name: str) -> tuple[str, Meaning] | None:
    """Return an event's name and meaning. The duration that Paddle appends to the name is removed.

    Return None if the category is not Paddle's.
    """
    base = _MEANINGS.get(category)
    took = None if base is None else _TOOK.fullmatch(name)
    if base is None or (base.work is not None and took is None):
        return None  # other profilers have this category, too
    name = name if took is None else took[1]
    if base.kind == "user" and category != "CudaRuntime" and any(word in name.lower() for word in _COPIES):
        copy = _COPY.fullmatch(name)
        way = _WAYS.get((copy[2], copy[3])) if copy is not None else None
        facts: Attributes = () if copy is None or way is None else (("direction", way), ("sync", copy[1] == "Sync"))
        return name, Meaning("copy", facts)
    return name, base


def parse_thread_id(lane: object) -> object:
    """Return the thread id in the name of a lane, such as `123(Python)`. Any other name is returned unchanged."""
    match = _LANE.fullmatch(lane) if isinstance(lane, str) else None
    return lane if match is None else int(match[1])


def strip_thread_language(name: str) -> str:
    match = _THREAD.fullmatch(name)
    return name if match is None else match[1]


class EventClock:
    """Computes exact times of Paddle's events from their arguments, which have the time since the first event."""

    def __init__(self) -> None:
        self._first_ns: int | None = None

    def pop_times(self, start_ns: int, args: dict[str, Any]) -> tuple[int, int] | None:
        """Remove the start and end time from an event's arguments. Return both times in nanoseconds, or None if a time
        is invalid."""
        start, end = (args.pop(key, None) for key in ("start_time", "end_time"))
        if not isinstance(start, str) or not isinstance(end, str):
            return None
        parts = [_SINCE_FIRST.fullmatch(text) for text in (start, end)]
        since, until = (None if match is None else int(match[1]) * 1_000 + int(match[2]) for match in parts)
        if since is None or until is None or until < since:
            return None
        if self._first_ns is None:
            self._first_ns = start_ns - since
        if abs(self._first_ns + since - start_ns) > _ROUNDED_NS:
            return None  # the arguments are of another file or clock
        return self._first_ns + since, self._first_ns + until


def read_allocation(event: Mapping[str, Any], thread_id: int) -> Allocation | None:
    args = event.get("args")
    if event.get("cat") not in ("Allocate", "Free") or not isinstance(args, dict):
        return None
    place = _PLACE.match(str(args.get("place")))
    if place is None or "increase_bytes" not in args:
        return None
    address = str(args.get("addr", ""))
    return Allocation(
        device=HOST if place[1] in _IN_HOST else int(place[2] or 0),
        at_ns=convert_to_ns(event.get("ts")),
        thread_id=thread_id,
        size_bytes=check_type(args["increase_bytes"], int),
        address=int(address) if address.isdecimal() and len(address) < 19 else 0,
        allocated_bytes=check_type(args.get("current_allocated", 0), int),
        reserved_bytes=check_type(args.get("current_reserved", 0), int),
    )
