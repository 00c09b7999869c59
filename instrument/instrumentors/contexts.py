"""Copied contexts, and work that is handed over to other threads, of which the recorder learns.

To know the current span of each context at any time, the recorder would have to write a variable twice a span, which
costs more than the rest of it. Contexts are copied by `contextvars.copy_context`, and by asyncio in C where it makes a
task: by `loop.create_task`, which all of asyncio's own ways to a task and those of its users go through. So both inform
the recorder, of asyncio's loops and of uvloop's. A loop of another kind does not: there each span is written down as it
begins and ends. What copies a context past these, as `asyncio.Task` itself and uvloop's `call_soon` do, has the copy
find the nearest request, for those are written down wherever a loop runs.

A context that is given to two tasks is one to its variables as well: a span of one task may hang below one of the
other. Which task it ran in is asked for at each step there, for self times go by that.

Work for other threads has its spans below the request that was open where it was handed over.
`ThreadPoolExecutor.submit`, by which `loop.run_in_executor` goes, and the start of a thread are met. The work runs in
the context of its own thread, as without us. The wait in the pool is a phase of the request. A thread of an executor
belongs to no request, whichever was the first to use it.
"""

from __future__ import annotations

import contextvars
import functools
import sys
import threading
from contextvars import Context
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.instrumentors.references import rebind
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recorder.wrapping import FORMS
from instrument.recording.spans import Site
from instrument.runtime import imports


def watch(recorder: Recorder = RECORDER) -> Undo:
    """Inform the recorder of copies from now on. Return the detach."""
    undos: list[Undo] = []
    original, copy_context = contextvars.copy_context, recorder.copy_context
    recorder.tells_of_tasks = _Tasks(recorder, undos).are_known
    rebind([(original, copy_context)])

    def undo() -> None:
        rebind([(copy_context, original)])
        recorder.tells_of_tasks = None
        undo_all(undos)

    return undo


LOOPS = (("asyncio.base_events", "BaseEventLoop"), ("uvloop", "Loop"))
"""The kinds of loop that are made to inform the recorder, each by its module."""


class _Tasks:
    """The loops that inform the recorder of their tasks, from the first span under one of their kind on."""

    def __init__(self, recorder: Recorder, undos: list[Undo]) -> None:
        self._publish, self._share = recorder.publish, recorder.share
        self._given: WeakValueDictionary[int, Context] = WeakValueDictionary()
        self._undos = undos
        self._informing: dict[Any, Any] = {}  # by kind of loop: the function that makes its tasks, and informs
        self._attach()

    def are_known(self) -> bool:
        """Return True where the running loop informs the recorder of its tasks."""
        loop = sys.modules["asyncio.events"]._get_running_loop()
        # Of a class that makes its tasks in another way, or of an instance, nothing is known.
        return self._informs(type(loop)) and "create_task" not in vars(loop)

    def _informs(self, kind: Any) -> bool:
        if kind.create_task not in self._informing.values():
            self._attach()
        return kind.create_task in self._informing.values()

    def _attach(self) -> None:
        for module, name in LOOPS:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and kind not in self._informing:
                self._informing[kind] = self._make_informing(kind)

    def _make_informing(self, kind: Any) -> Any:
        original, publish, share, given = kind.create_task, self._publish, self._share, self._given

        @functools.wraps(original)
        def create_task(self: Any, *args: Any, **kwargs: Any) -> Any:
            publish()
            context = kwargs.get("context")
            if type(context) is Context:
                share(context, id(context) in given)
                given[id(context)] = context
            return original(self, *args, **kwargs)

        self._undos.append(replace(kind, "create_task", create_task))
        return create_task


MODULE = "concurrent.futures.thread"

QUEUE = Site("queue (executor)", "phase")
"""The wait of a request's work in a pool."""

STARTS = ("_start_new_thread", "_start_joinable_thread")
"""The functions by which `threading` starts threads: up to Python 3.12, and from 3.13 on."""


def watch_handovers(recorder: Recorder = RECORDER) -> Undo:
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
