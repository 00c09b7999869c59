"""Work that is handed over to other threads: its spans are parts of the request that was open where it was handed over.

`ThreadPoolExecutor.submit`, by which `loop.run_in_executor` goes, and the start of a thread are met. The work runs in
the context of its own thread, as without us. The wait in the pool is a phase of the request. A thread of an executor
belongs to no request, whichever was the first to use it.
"""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recorder.wrapping import FORMS
from instrument.recording.spans import Site
from instrument.runtime import imports

MODULE = "concurrent.futures.thread"

QUEUE = Site("queue (executor)", "phase")
"""The wait of a request's work in a pool."""

STARTS = ("_start_new_thread", "_start_joinable_thread")
"""The functions by which `threading` starts threads: up to Python 3.12, and from 3.13 on."""


def watch(recorder: Recorder = RECORDER) -> Undo:
    """Carry open requests over to other threads from now on; returns the way back."""
    undos: list[Undo] = []

    def meet(owner: Any, name: str, form: str) -> None:
        made = recorder.make_function(getattr(owner, name), QUEUE, form=FORMS.index(form))
        undos.append(replace(owner, name, made))

    def imported(module: ModuleType) -> None:
        meet(module.ThreadPoolExecutor, "submit", "submit")

    for name in STARTS:
        if hasattr(threading, name):
            meet(threading, name, "start")
    if MODULE in sys.modules:
        imported(sys.modules[MODULE])
    else:
        undos.append(imports.install(lambda name: name == MODULE, imported))
    return lambda: undo_all(undos)
