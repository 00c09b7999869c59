"""The names of threads that record, and an action at the first span of any."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import current_name

_awaited: Callable[[], object] | None = None


def await_first_span(action: Callable[[], object] | None) -> None:
    """Have an action called once, by the next thread that records its first span; None for none.

    It runs within the service's own call, perhaps under a lock: it must be short and wait for nothing.
    """
    global _awaited
    _awaited = action


def thread_name() -> str:
    """Return the name of this thread, once, when it records its first span."""
    global _awaited
    action, _awaited = _awaited, None
    if action is not None:
        try:
            action()
        except Exception as fault:  # such as a thread that cannot begin
            FAULTS.note("first span", fault)
    ours = current_name()
    if ours is not None:
        return ours
    # Not current_thread(), which leaves a dummy behind for threads that Python did not start.
    thread = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    native_id = threading.get_native_id()
    if thread is None and native_id == os.getpid():
        thread = threading.main_thread()  # a greenlet of it
    return thread.name if thread is not None else f"thread {native_id}"
