"""What was done when, as the service itself knows it: with CHAT_DEBUG_LOG=FILE each of its processes adds to the file.

A line has a time in nanoseconds (CLOCK_MONOTONIC), the process, the thread, `begin` or `end`, what was done, and the
ids of the requests that it was done for. Each call is logged twice, by who calls and inside: it begins and ends between
the two, however long the processor is taken away there. Lines are kept in memory until `save`: a write would give the
processor away.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PATH = os.environ.get("CHAT_DEBUG_LOG")
_lines: list[tuple[int, int, tuple[str, ...]]] = []
_tasks: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()


class _Nothing(AbstractContextManager[None]):
    """Stands for a block that is not logged, and leaves a function that it decorates as it is."""

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, function: _Function) -> _Function:
        return function


class _Logged(ContextDecorator, AbstractContextManager[None]):
    def __init__(self, words: tuple[str, ...], begin_ns: int = 0) -> None:
        self._words = words
        self._begin_ns = begin_ns

    def __enter__(self) -> None:
        _lines.append((self._begin_ns or time.monotonic_ns(), threading.get_ident(), ("begin", *self._words)))

    def __exit__(self, *_: object) -> None:
        _lines.append((time.monotonic_ns(), threading.get_ident(), ("end", *self._words)))


_NOTHING = _Nothing()


def logged(what: str, *ids: str) -> _Logged | _Nothing:
    """Log when this block begins and ends, if there is a log. Inside of a function that awaits nothing, which it may
    decorate, the ids are those that its caller logs.
    """
    return _Logged((what, *ids)) if _PATH else _NOTHING


def task_logged(what: str, *ids: str) -> _Logged | _Nothing:
    """The same from when the current task was made, which was before anything of it ran."""
    task = asyncio.current_task() if _PATH else None
    return _Logged((what, *ids), _tasks[task]) if task is not None else _NOTHING


def watch_tasks() -> None:
    """Note when each task of the running event loop is made, if there is a log."""
    if _PATH:
        asyncio.get_running_loop().set_task_factory(_noted)


def _noted(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **more: Any) -> asyncio.Task[Any]:
    made_ns = time.monotonic_ns()
    task = asyncio.Task(coroutine, loop=loop, **more)
    _tasks[task] = made_ns
    return task


def save() -> None:
    """Add the lines of this process to the file, if there is a log."""
    if _PATH:
        with Path(_PATH).open("a", encoding="utf-8") as file:
            file.write("".join(f"{at} {os.getpid()} {thread} {' '.join(words)}\n" for at, thread, words in _lines))
        _lines.clear()
