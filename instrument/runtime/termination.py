"""The signal handler with which a session delivers its data before a signal ends the process.

Servers set their signal handlers after the session has set its own. So during a session `signal.signal` and
`signal.getsignal` are replaced. If the service sets the default handler, the session's handler is set instead.

Native code, such as tokio, calls our handler after its own. Our handler then does nothing.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

RESETTABLE_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""The signals that get our handler when the service replaces its own handler by the default.

If the service had no handler, the default remains. Unlike a handler in Python, the default ends a program even while
the main thread runs C code.
"""


class Termination:
    """A signal handler that calls `end(number, frame)` on the main thread. If `end` returns True, the handler then ends
    the process by the same signal."""

    def __init__(self, end: Callable[[int, FrameType | None], bool]) -> None:
        self._end = end
        self._set = signal.signal
        self._get = signal.getsignal
        self._handler = self._handle_signal  # one object, for comparisons
        self._is_active = False
        self._address: int | None = None
        """The address of CPython's function that the system calls for every handler in Python."""

    def install(self) -> Callable[[], None]:
        """Handle SIGTERM while the service has no handler of its own. Return the function that undoes this. Call
        `install` on the main thread."""
        if not _is_main_thread():
            return lambda: None
        bare_set, bare_get = self._set, self._get

        @functools.wraps(bare_set)
        def set_disposition(signalnum: Any, handler: Any) -> Any:
            before = (
                self._set_handler(signalnum)
                if self._must_replace_handler(signalnum, handler)
                else bare_set(signalnum, handler)
            )
            return signal.SIG_DFL if before is self._handler else before

        @functools.wraps(bare_get)
        def get_disposition(signalnum: Any) -> Any:
            disposition = bare_get(signalnum)
            return signal.SIG_DFL if disposition is self._handler else disposition

        def uninstall_handler() -> None:
            self._is_active = False
            # Others may have replaced them after us; ours then only call the originals.
            if signal.signal is set_disposition:
                signal.signal = bare_set
            if signal.getsignal is get_disposition:
                signal.getsignal = bare_get
            for number in (signal.SIGTERM, *RESETTABLE_SIGNALS) if _is_main_thread() else ():
                if bare_get(number) is self._handler and not self._is_handler_replaced(number):
                    bare_set(number, signal.SIG_DFL)

        self._is_active = True
        signal.signal, signal.getsignal = set_disposition, get_disposition
        if bare_get(signal.SIGTERM) == signal.SIG_DFL:
            self._set_handler(signal.SIGTERM)
        return uninstall_handler

    def _set_handler(self, number: int) -> Any:
        before = self._set(number, self._handler)
        self._address = _address_of_handler(number)
        return before

    def _is_handler_replaced(self, number: int) -> bool:
        return _address_of_handler(number) != self._address

    def _must_replace_handler(self, number: Any, handler: Any) -> bool:
        if not (self._is_active and isinstance(handler, int) and handler == signal.SIG_DFL):
            return False
        if number in RESETTABLE_SIGNALS:
            before = self._get(number)
            return callable(before) and before is not signal.default_int_handler
        return bool(number == signal.SIGTERM)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_handler_replaced(number) and self._end(number, frame):
            self._set(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def call_before_exit(action: Callable[[int], object]) -> Callable[[], None]:
    """Make `os._exit` call `action` with the exit code before the process exits. Forked workers exit by `os._exit`.
    Return the function that undoes this. The action must not wait."""
    bare_exit = os._exit

    @functools.wraps(bare_exit)
    def call_and_exit(status: int) -> NoReturn:
        try:
            action(status)
        finally:
            bare_exit(status)

    def restore_exit() -> None:
        if os._exit is call_and_exit:
            os._exit = bare_exit

    os._exit = call_and_exit
    return restore_exit


def _address_of_handler(number: int) -> int | None:
    try:
        from ctypes import c_void_p, pythonapi

        ask = pythonapi["PyOS_getsig"]  # a function object of our own, unlike the attribute
        ask.restype = c_void_p
        address: int | None = ask(number)
    except (ImportError, AttributeError):
        return None
    return address


def _is_main_thread() -> bool:
    """Return True on the native main thread, also in a greenlet."""
    return threading.get_native_id() == os.getpid()
