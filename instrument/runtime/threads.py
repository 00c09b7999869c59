"""Our own threads, which are real threads even if gevent patches `threading`, and which restart after a crash."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from instrument.runtime.faults import FAULTS
from instrument.runtime.unpatched import Event, get_ident, is_threading_patched, sleep, start_new_thread

RESTART_S = 0.2
"""Seconds after which a dead thread starts again."""

WORK_SLICE_S, PAUSE_S = 0.001, 0.0005
"""The seconds for which our thread works without a pause, and the seconds of a pause.

Without pauses, a server would wait for the GIL several times per request, 5 ms each time.
"""

_own_threads: dict[int, tuple[str, int]] = {}
"""The name and process id of each of our running threads, by thread id."""


class Thread:
    """A daemon thread that calls `run`. While `is_needed()` returns True, it calls `run` again after a return or an
    error. Errors are counted as faults."""

    def __init__(self, run: Callable[[], object], name: str, is_needed: Callable[[], bool] = lambda: False) -> None:
        self.name = name
        self._run = run
        self._is_needed = is_needed
        self._ident = 0
        self._pid = 0
        self._ended = Event()
        self._listed: threading.Thread | None = None

    def start(self, *, is_listed: bool = True) -> None:
        """Start the thread. Raises `RuntimeError` if it cannot start. With `is_listed`, `threading.enumerate()` lists
        the thread, unless `threading` is patched."""
        self._pid = os.getpid()
        try:
            if is_threading_patched() or not is_listed:
                start_new_thread(self._run_while_needed, ())
            else:
                self._listed = threading.Thread(target=self._run_while_needed, name=self.name, daemon=True)
                self._listed.start()
        except BaseException:
            self._pid = 0
            raise

    def is_alive(self) -> bool:
        return self._pid == os.getpid() and not self._ended.is_set()

    def join(self, timeout_s: float | None = None) -> None:
        if self._ident == get_ident() or self._pid != os.getpid():
            return
        if self._ended.wait(timeout_s) and self._listed is not None and not is_threading_patched():
            self._listed.join(timeout_s)  # until it is no longer listed

    def _run_while_needed(self) -> None:
        self._ident = ident = get_ident()
        _own_threads[ident] = self.name, self._pid
        try:
            while True:
                fault: BaseException | None = None
                try:
                    self._run()
                except BaseException as error:
                    fault = error
                is_needed = self._is_needed()
                if fault is None and is_needed:
                    fault = RuntimeError(f"the thread {self.name} ended, though it is needed")
                if isinstance(fault, Exception) or is_needed:
                    with suppress(BaseException):
                        FAULTS.note(f"thread {self.name}", fault or RuntimeError())
                if not is_needed:
                    return
                sleep(RESTART_S)
        finally:
            _own_threads.pop(ident, None)
            if self._listed is not None and is_threading_patched():
                # Patched meanwhile, `threading` looks for it under the number that gevent gives it.
                active: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
                active[threading.get_ident()] = active.pop(ident, self._listed)
            self._ended.set()


class Pace:
    """Inserts pauses into long work on one of our threads."""

    def __init__(self) -> None:
        self._until = time.monotonic() + WORK_SLICE_S

    def pause_if_due(self) -> None:
        if time.monotonic() > self._until:
            sleep(PAUSE_S)
            self._until = time.monotonic() + WORK_SLICE_S


_library_threads: dict[int, int] = {}
"""The number of threads that our libraries have started, by process id."""


@contextmanager
def count_library_threads() -> Iterator[None]:
    """Treat threads that start in the `with` block as ours. For example, numpy starts threads of OpenBLAS."""
    before = _count_threads()
    try:
        yield
    finally:
        _library_threads[os.getpid()] = _library_threads.get(os.getpid(), 0) + _count_threads() - before


def _count_threads() -> int:
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return 0


class _ForkWarning:
    """A pattern for Python's warning about forks with threads. At the first match it removes its own warning filter."""

    def match(self, text: str) -> bool:
        is_it = text.startswith("This process ") and "is multi-threaded" in text
        if is_it:
            restore_fork_warning()
        return is_it


_QUIET: Any = ("ignore", _ForkWarning(), DeprecationWarning, None, 0)
_PYTHON_WARNS = sys.version_info >= (3, 12)


def silence_fork_warning() -> None:
    """Suppress Python's warning about threads at the next fork, if all other threads are ours."""
    ours = sum(pid == os.getpid() for _, pid in list(_own_threads.values())) + _library_threads.get(os.getpid(), 0)
    if ours and _PYTHON_WARNS and _count_threads() == ours + 1 and _QUIET not in warnings.filters:
        # Not by `filterwarnings`, which would make Python forget its warnings.
        warnings.filters.insert(0, _QUIET)  # type: ignore[attr-defined]


def restore_fork_warning() -> None:
    """Remove the warning filter of `silence_fork_warning`."""
    with suppress(ValueError):
        warnings.filters.remove(_QUIET)  # type: ignore[attr-defined]


_pid = 0
_child_begins: Callable[[], None] | None = None


def hook_forks(before: Callable[[], None], in_parent: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Call functions before and after each fork by Python. After a fork by C code, `catch_up_with_fork` calls `before`
    and `in_child`."""
    global _child_begins

    def begin_child() -> None:
        global _pid
        _pid = os.getpid()
        in_child()

    def call_missed_hooks() -> None:
        before()
        begin_child()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=begin_child)
    globals().update(_pid=os.getpid(), _child_begins=call_missed_hooks)


def catch_up_with_fork() -> None:
    """Call the functions of `hook_forks` if C code forked this process, as uWSGI does."""
    if _child_begins is not None and os.getpid() != _pid:
        _child_begins()


def will_server_fork() -> bool:
    """Return True if uWSGI will fork its workers later. A fork while a thread of ours has the GIL would block the child
    forever."""
    uwsgi = sys.modules.get("uwsgi")
    try:
        return uwsgi is not None and uwsgi.worker_id() == 0 and bool(uwsgi.masterpid() or uwsgi.numproc > 1)
    except Exception:  # a module of that name that is none of the server's
        return False


def own_thread_name() -> str | None:
    name, pid = _own_threads.get(get_ident(), ("", 0))
    return name if pid == os.getpid() else None
