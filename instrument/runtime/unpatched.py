"""The real locks, queues, threads and sockets of the system, even if gevent or eventlet has patched Python's.

A real lock blocks its whole thread with all greenlets. So no code of the service may run while our code has a lock.
"""

from __future__ import annotations

import _queue
import _socket
import _thread
import select
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from threading import local as local
    from types import TracebackType


def _find_original(module: str, name: str) -> Any:
    monkey, patcher = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if monkey is not None and monkey.is_object_patched(module, name):
        return monkey.get_original(module, name)
    if patcher is not None and any(patcher.already_patched.values()):
        return getattr(patcher.original(module), name)
    return getattr(sys.modules[module], name)


Empty = _queue.Empty
SimpleQueue = _queue.SimpleQueue
TIMEOUT_MAX = _thread.TIMEOUT_MAX

Lock = _find_original(_thread.__name__, "allocate_lock")
RLock = _find_original(_thread.__name__, "RLock")
start_new_thread = _find_original(_thread.__name__, "start_new_thread")
get_ident = _find_original(_thread.__name__, "get_ident")
sleep = _find_original(time.__name__, "sleep")
poll = _find_original(select.__name__, "poll")
if not TYPE_CHECKING:
    local = _find_original(_thread.__name__, "_local")


def is_threading_patched() -> bool:
    """Return True if gevent or eventlet has replaced threads by greenlets."""
    return _thread.start_new_thread is not start_new_thread


class Event:
    """An event like `threading.Event`. Its `set` never blocks, so signal handlers may call it."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: deque[Any] = deque()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while True:
            try:
                self._waiters.popleft().release()
            except IndexError:
                return

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._is_set:
            return True
        waiter = Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            if not self._is_set:  # or `set` came before it could see this waiter
                waiter.acquire(timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), TIMEOUT_MAX))
        finally:
            try:
                self._waiters.remove(waiter)
            except (ValueError, IndexError):
                pass  # `set` has taken it, or is about to
        return self._is_set


class Socket(_socket.socket):
    """A real socket, even if gevent or eventlet has patched Python's."""

    def accept(self) -> tuple[Socket, Any]:
        descriptor, address = self._accept()  # type: ignore[attr-defined]
        return Socket(fileno=descriptor), address

    def __enter__(self) -> Socket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(host: str, port: int, timeout_s: float) -> Socket:
    """Connect by TCP to the first address of the host that accepts the connection. Raises `OSError`."""
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in _socket.getaddrinfo(host, port, 0, _socket.SOCK_STREAM):
        sock = None
        try:
            sock = Socket(family, kind, protocol)
            sock.settimeout(timeout_s)
            sock.connect(address)
            return sock
        except OSError as error:
            failure = error
            if sock is not None:
                sock.close()
    raise failure
