"""Copied contexts: the recorder is told when one is copied, so that what runs in the copy finds its parent.

To know the current span of each context at any time, the recorder would have to write a context variable twice a call,
which costs more than the rest of the call. Contexts are copied by `contextvars.copy_context`, and by asyncio in C where
it makes a task: by `loop.create_task`, which all of asyncio's own ways to a task and those of its users go through. So
both tell the recorder. A loop that is not asyncio's, such as uvloop's, does not: there each call is written down as it
begins and ends. What makes a task past its loop, by `asyncio.Task` itself, finds the nearest scope, coroutine or
request, for those are written down wherever a loop runs.

A context that is given to two tasks is one to its variables as well: a span of one task may hang below one of the
other. Which task it ran in is asked for at each step there, for self times go by that.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from contextvars import Context
from typing import Any
from weakref import WeakValueDictionary

from instrument.instrumentors.functions import Undo, replace
from instrument.instrumentors.holders import rebind
from instrument.recorder.recorder import RECORDER, Recorder


def watch(recorder: Recorder = RECORDER) -> Undo:
    """Tell the recorder of copies from now on; returns the way back."""
    original = contextvars.copy_context
    undos: list[Undo] = []
    if recorder.native:
        copy_context: Any = recorder.copy_context
        recorder.tells_of_tasks = _Tasks(recorder, undos).are_told

        def forget() -> None:
            recorder.tells_of_tasks = None

        undos.append(forget)
    else:
        publish_to = recorder.publish_to

        @functools.wraps(original)
        def copy_context() -> Context:
            context = original()
            publish_to(context)
            return context

    rebind([(original, copy_context)])

    def undo() -> None:
        rebind([(copy_context, original)])
        while undos:
            undos.pop()()

    return undo


class _Tasks:
    """Has asyncio's loops tell of the tasks that they make, from the first span under one on."""

    def __init__(self, recorder: Recorder, undos: list[Undo]) -> None:
        self._publish, self._share = recorder.publish, recorder.share
        self._given: WeakValueDictionary[int, Context] = WeakValueDictionary()
        self._undos = undos
        self._create_task: Any = None
        if "asyncio.base_events" in sys.modules:
            self._attach()

    def are_told(self) -> bool:
        """Whether the loop that runs now tells of its tasks."""
        if self._create_task is None:
            self._attach()
        # Of a class that makes its tasks in another way, or of an instance, nothing is known.
        loop = sys.modules["asyncio.events"]._get_running_loop()
        return type(loop).create_task is self._create_task and "create_task" not in vars(loop)

    def _attach(self) -> None:
        base = sys.modules["asyncio.base_events"].BaseEventLoop
        original, publish, share, given = base.create_task, self._publish, self._share, self._given

        @functools.wraps(original)
        def create_task(self: Any, *args: Any, **kwargs: Any) -> Any:
            publish()
            context = kwargs.get("context")
            if type(context) is Context:
                share(context, id(context) in given)
                given[id(context)] = context
            return original(self, *args, **kwargs)

        self._undos.append(replace(base, "create_task", create_task))
        self._create_task = create_task
