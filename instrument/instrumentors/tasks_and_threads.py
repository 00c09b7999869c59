"""Follow spans into asyncio tasks and other threads.

Each `contextvars` context has its own chain of open spans. Before a task copies its context, a context variable is set
to the innermost open span. That span becomes the parent of the task's spans. Work that a request passes to another
thread belongs to the request.
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

from instrument.instrumentors.profiled_functions import Undo, replace_attribute, undo_all
from instrument.instrumentors.references import rebind_objects
from instrument.recorder import wrapping
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recorder.wrapping import FORMS
from instrument.recording.spans import EXECUTOR_QUEUE, Site
from instrument.runtime import imports

LOOPS = (("asyncio.base_events", "BaseEventLoop"), ("uvloop", "Loop"))
"""The module and class of each event loop that reports its tasks to the recorder."""


def report_context_copies(recorder: Recorder = RECORDER) -> Undo:
    """Report each copy of a `contextvars` context to the recorder. Return the function that stops this."""
    undos: list[Undo] = []
    original, copy_context = contextvars.copy_context, recorder.copy_context
    publish, share = recorder.publish, recorder.share
    contexts: WeakValueDictionary[int, Context] = WeakValueDictionary()
    wrappers: dict[Any, Any] = {}  # the informing `create_task` by class of loop

    def wrap_create_task(kind: Any) -> Any:
        original = kind.create_task

        @functools.wraps(original)
        def create_task(self: Any, *args: Any, **kwargs: Any) -> Any:
            publish()
            context = kwargs.get("context")
            if type(context) is Context:
                share(context, id(context) in contexts)
                contexts[id(context)] = context
            return original(self, *args, **kwargs)

        undos.append(replace_attribute(kind, "create_task", create_task))
        return create_task

    def wrap_loops() -> None:
        for module, name in LOOPS:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and kind not in wrappers:
                wrappers[kind] = wrap_create_task(kind)

    def loop_reports_tasks() -> bool:
        loop = sys.modules["asyncio.events"]._get_running_loop()
        method = type(loop).create_task
        if method not in wrappers.values():
            wrap_loops()
            method = type(loop).create_task
        # A class or an instance with another `create_task` does not.
        return method in wrappers.values() and "create_task" not in vars(loop)

    def stop_reporting() -> None:
        rebind_objects([(copy_context, original)])
        recorder.reports_tasks = None
        undo_all(undos)

    wrap_loops()
    recorder.reports_tasks = loop_reports_tasks
    rebind_objects([(original, copy_context)])
    return stop_reporting


POOL_MODULE = "concurrent.futures.thread"

QUEUE = Site(EXECUTOR_QUEUE, "phase")
"""The site of a request's waits in the queue of a thread pool executor."""

STARTS = ("_start_new_thread", "_start_joinable_thread")
"""The functions of `threading` that start a thread. The second replaces the first from Python 3.13 on."""


def watch_thread_handovers(recorder: Recorder = RECORDER) -> Undo:
    """Link each new thread and each call in a thread pool to the current request. Return the function that stops
    this."""
    undos: list[Undo] = []

    def wrap_handover(owner: Any, name: str, form: str) -> None:
        function = wrapping.make_wrapper(recorder, getattr(owner, name), QUEUE, form=FORMS.index(form))
        undos.append(replace_attribute(owner, name, function))

    def attach_to(module: ModuleType) -> None:
        wrap_handover(module.ThreadPoolExecutor, "submit", "submit")

    for name in STARTS:
        if hasattr(threading, name):
            wrap_handover(threading, name, "start")
    if POOL_MODULE in sys.modules:
        attach_to(sys.modules[POOL_MODULE])
    else:
        undos.append(imports.install_import_hook(lambda name: name == POOL_MODULE, attach_to))
    return lambda: undo_all(undos)
