"""Threads of ours: of the operating system whatever the service has patched, named, and begun anew where they die."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from instrument.runtime.faults import FAULTS
from instrument.runtime.unpatched import Event, get_ident, is_patched, sleep, start_new_thread

RESTART_S = 0.2
"""How long a thread that died rests before it begins anew."""

WORK_S, REST_S = 0.001, 0.0005
"""The longest stretch of work beside the service, and the rest after it. A thread that wants Python's lock waits 5 ms
for one that works on: a server's threads want it several times for each request."""

_ours: dict[int, tuple[str, int]] = {}
"""Name and process by the number that the operating system gives a thread."""


class Thread:
    """A daemon thread that runs `run`, and runs it again where it ends while `is_needed()`.

    An end that nobody asked for is a fault of the thread, whatever brought it about: an error, or a `SystemExit` that
    the service has thrown into every thread that it found.
    """

    def __init__(self, run: Callable[[], object], name: str, is_needed: Callable[[], bool] = lambda: False) -> None:
        self.name = name
        self._run = run
        self._is_needed = is_needed
        self._ident = 0
        self._pid = 0
        self._ended = Event()
        self._listed: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Raises RuntimeError where no thread can: there are too many, or the interpreter is ending.

        Where `threading` is as it should be, `threading.enumerate()` lists it.
        """
        self._pid = os.getpid()
        try:
            if is_patched():
                start_new_thread(self._run_while_needed, ())
            else:
                self._listed = threading.Thread(target=self._run_while_needed, name=self.name, daemon=True)
                self._listed.start()
        except BaseException:
            self._pid = 0
            raise

    def is_alive(self) -> bool:
        """Whether it has been started in this process, and has not ended."""
        return self._pid == os.getpid() and not self._ended.is_set()

    def is_current(self) -> bool:
        """Whether it is the one that asks."""
        return self._ident == get_ident() and self.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end, at most so long."""
        if self.is_current() or self._pid != os.getpid():
            return
        if self._ended.wait(timeout_s) and self._listed is not None and not is_patched():
            self._listed.join(timeout_s)  # until it is no longer listed

    def _run_while_needed(self) -> None:
        self._ident = ident = get_ident()
        _ours[ident] = self.name, self._pid
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
                    _note(self.name, fault)
                if not is_needed:
                    return
                sleep(RESTART_S)
        finally:
            _ours.pop(ident, None)
            if self._listed is not None and is_patched():
                # Patched meanwhile, `threading` looks for it under the number that gevent gives it.
                active: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
                active[threading.get_ident()] = active.pop(ident, self._listed)
            self._ended.set()


class Pace:
    """The stretches and rests of one long piece of work on a thread of ours beside the service."""

    def __init__(self) -> None:
        self._until = time.monotonic() + WORK_S

    def rest(self) -> None:
        """Rest where the stretch is over."""
        if time.monotonic() > self._until:
            sleep(REST_S)
            self._until = time.monotonic() + WORK_S


def _note(name: str, fault: BaseException | None) -> None:
    try:
        FAULTS.note(f"thread {name}", fault or RuntimeError())
    except BaseException:
        pass


def current_name() -> str | None:
    """The name of the thread that asks, None for one of the service."""
    name, pid = _ours.get(get_ident(), ("", 0))
    return name if pid == os.getpid() else None
