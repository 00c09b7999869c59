"""Reports to the recorder on copies of contexts, and on work that is handed to other threads.

To keep each context's current span published, the recorder would write a variable twice per span, which costs more than
the rest of a span. Instead it publishes the span when a context is copied. `contextvars.copy_context` copies contexts,
and so does asyncio in C when it makes a task by `loop.create_task`, which all functions that make tasks call. Both
report to the recorder, for loops of asyncio and uvloop. With another loop each span is published at its begin and end.
Other copies, such as those of `asyncio.Task` itself and of uvloop's `call_soon`, find the nearest request, since
requests are always published while a loop runs.

Two tasks that share a context share its variables: a span of one task may be the child of a span of the other. Self
times need the task of each span, so the recorder reads the task at each step there.

Spans of work for other threads are children of the request that was open at the hand-off.
`ThreadPoolExecutor.submit`, which `loop.run_in_executor` calls, and the start of a thread are recorded. The work runs
in the context of its own thread, as it does without us. The wait in the pool is a phase of the request. A thread of an
executor belongs to no request.
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
from instrument.recorder import wrapping
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recorder.wrapping import FORMS
from instrument.recording.spans import EXECUTOR_QUEUE, Site
from instrument.runtime import imports


def watch(recorder: Recorder = RECORDER) -> Undo:
    """Report copies of contexts to the recorder from now on. Return the undo."""
    undos: list[Undo] = []
    original, copy_context = contextvars.copy_context, recorder.copy_context
    recorder.tells_of_tasks = _Tasks(recorder, undos).reports_tasks
    rebind([(original, copy_context)])

    def undo() -> None:
        rebind([(copy_context, original)])
        recorder.tells_of_tasks = None
        undo_all(undos)

    return undo


LOOPS = (("asyncio.base_events", "BaseEventLoop"), ("uvloop", "Loop"))
"""The module and class of each event loop that reports its tasks to the recorder."""


class _Tasks:
    """The event loops that report new tasks to the recorder. A class of loops does so from its first span on."""

    def __init__(self, recorder: Recorder, undos: list[Undo]) -> None:
        self._publish, self._share = recorder.publish, recorder.share
        self._given: WeakValueDictionary[int, Context] = WeakValueDictionary()
        self._undos = undos
        self._informing: dict[Any, Any] = {}  # the informing `create_task` by class of loop
        self._attach()

    def reports_tasks(self) -> bool:
        """Return True if the running loop reports its tasks to the recorder."""
        loop = sys.modules["asyncio.events"]._get_running_loop()
        # A class or an instance with another `create_task` does not.
        return self._copies_contexts(type(loop)) and "create_task" not in vars(loop)

    def _copies_contexts(self, kind: Any) -> bool:
        if kind.create_task not in self._informing.values():
            self._attach()
        return kind.create_task in self._informing.values()

    def _attach(self) -> None:
        for module, name in LOOPS:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and kind not in self._informing:
                self._informing[kind] = self._reporting_create_task(kind)

    def _reporting_create_task(self, kind: Any) -> Any:
        original, publish, share, contexts = kind.create_task, self._publish, self._share, self._given

        @functools.wraps(original)
        def create_task(self: Any, *args: Any, **kwargs: Any) -> Any:
            publish()
            context = kwargs.get("context")
            if type(context) is Context:
                share(context, id(context) in contexts)
                contexts[id(context)] = context
            return original(self, *args, **kwargs)

        self._undos.append(replace(kind, "create_task", create_task))
        return create_task


MODULE = "concurrent.futures.thread"

QUEUE = Site(EXECUTOR_QUEUE, "phase")
"""The site of spans for a request's wait in the queue of an executor."""

STARTS = ("_start_new_thread", "_start_joinable_thread")
"""The functions that start threads for `threading`: up to Python 3.12, and from 3.13 on."""


def watch_handovers(recorder: Recorder = RECORDER) -> Undo:
    """Link work for other threads to the request that handed it over, from now on. Return the undo."""
    undos: list[Undo] = []

    def meet(owner: Any, name: str, form: str) -> None:
        function = wrapping.make_function(recorder, getattr(owner, name), QUEUE, form=FORMS.index(form))
        undos.append(replace(owner, name, function))

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
