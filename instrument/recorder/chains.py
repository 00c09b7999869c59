"""The tasks that the recorder in Python runs in, and the chains of open spans that contexts have.

A context variable holds the innermost span. An open span is a *frame*, a list that only the modules of this recorder
touch:

    0 node   1 span id   2 parent id   3 root id   4 time of the children ns   5 ring   6 frame above
    7 start ns   8 task   9 counted against the frame above from ns   10 attributes or None   11 state
    12 what of the time of the children they waited; None for a function's   13 what times the span on a device, or None
    14 the request that it is in, of which it is not itself the span: the frame of its tree's root, or None
    15 the frame that the context held before, where that had ended   16 the index of the node that it is counted under
    17 what is awaited around it, or None   18 how long that had been suspended when the span began

The frame above is the nearest one that is open, also above a frame that has ended: so whoever came from that finds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from instrument.recording.rows import REQUEST_BIT, Row


class Frame(list[Any]):
    """An open span. It goes with the context, scope or generator that holds it, also where nobody has ended it."""

    __slots__ = ("__weakref__",)

    @property
    def request(self) -> Frame | None:
        """The request that it is in: itself, or the frame of its tree's root; None without one."""
        return self if self[1] & REQUEST_BIT else self[14]


CLOSED, OPEN, MANUAL = 0, 1, 2


def ended_row(frame: Frame, end_ns: int, active_ns: int, error: str | None) -> Row:
    """The row of a span that has ended, as `row_of` makes it: a call of that would be felt here."""
    return frame[16], frame[1], frame[2], frame[3], frame[8], frame[7], end_ns, frame[4], active_ns, error, frame[10]


modules = sys.modules
running_loop: Callable[[], Any] | None = None
_current_task: Callable[[Any], Any]


def _watch_tasks() -> None:
    """Begin to tell tasks apart. Called once asyncio has been imported, never importing it ourselves."""
    global running_loop, _current_task
    asyncio = modules["asyncio"]
    tasks = getattr(asyncio, "tasks", None)
    events = getattr(asyncio, "events", None)
    if tasks is None or events is None or not hasattr(tasks, "current_task"):
        return  # asyncio is being imported right now
    # Up to 3.11 current_task is a Python function around this dict; reading the dict halves the cost.
    _current_task = tasks._current_tasks.get if sys.version_info < (3, 12) else tasks.current_task
    running_loop = events._get_running_loop


def task_probe() -> int:
    """Identity of the running asyncio task; 0 under a loop without one, -1 where no loop runs."""
    if running_loop is None:
        if "asyncio" not in modules:
            return -1
        _watch_tasks()
        if running_loop is None:
            return -1
    loop = running_loop()
    if loop is None:
        return -1
    task = _current_task(loop)
    return 0 if task is None else id(task) >> 4 & 0xFFFFFFFF  # as rows have it


def task_readers() -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What gives the running loop, and the task that runs on one; None until asyncio has been imported."""
    task_probe()
    return None if running_loop is None else (running_loop, _current_task)


def task_id() -> int:
    found = task_probe()
    return max(found, 0)


def nearest_open(frame: Frame | None) -> Frame | None:
    """The nearest frame that is open, from this one upwards."""
    if frame is None or frame[11] != CLOSED:
        return frame
    return next((above for above in upwards(frame) if above[11] != CLOSED), None)


DEEPEST = 100_000
"""No chain is as long: one that seems so goes round, and is cut."""


def upwards(frame: Frame | None) -> Iterator[Frame]:
    """A frame and those above it.

    From CPython 3.12 on, the collector and signal handlers come in between any two lines of ours, and what they end or
    reset may leave two frames above each other. The span tree is wrong there; the service must not stand still.
    """
    for _ in range(DEEPEST):
        if frame is None:
            return
        yield frame
        last, frame = frame, frame[6]
    last[6] = None
