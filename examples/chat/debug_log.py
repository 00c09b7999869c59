"""A log of the service itself: with CHAT_DEBUG_LOG=FILE each of its processes adds lines to the file.

A line has a time in nanoseconds (CLOCK_MONOTONIC), the process, the thread, `begin` or `end`, the work, and the ids of
its requests. Each call is logged twice, by the caller and inside. Its begin and its end are between the two lines.
Lines stay in memory until `save`: a write would yield the processor.
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
    """A block that is not logged. As a decorator it returns the function itself."""

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
    """Log the begin and the end of this block, if there is a log.

    As a decorator of a function that awaits nothing, it logs the ids of the caller.
    """
    return _Logged((what, *ids)) if _PATH else _NOTHING


def task_logged(what: str, *ids: str) -> _Logged | _Nothing:
    """Log a block that began when the current task was made."""
    task = asyncio.current_task() if _PATH else None
    return _Logged((what, *ids), _tasks[task]) if task is not None else _NOTHING


def watch_tasks() -> None:
    """Keep the time at which each task of the running event loop is made, if there is a log."""
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
