"""Child processes of the agent. A slow task, a hang or a crash in one of them does not reach the agent itself."""

from __future__ import annotations

import gc
import math
import os
import select
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from instrument.agent.loop import Connection
from instrument.runtime import packets

MOST_RESTARTS, RESTART_WINDOW_S = 5, 600.0
"""The most starts of a child within this many seconds. With more starts, the next one waits until they have passed."""

REAP_S, LOOK_S = 2.0, 0.001
"""The most seconds of waiting for the end of a killed child, and the seconds between two checks of it."""

PIPE_BYTES = 1 << 16

_SET_PARENT_DEATH_SIGNAL = 1

_MALLOC_OPTIONS = {-1: 128 << 10, -3: 64 << 10, -8: 1}
"""The options of glibc's allocator (malloc.h): it returns free memory beyond 128 KiB (M_TRIM_THRESHOLD) and each array
of 64 KiB (M_MMAP_THRESHOLD), and threads share one arena (M_ARENA_MAX)."""


@dataclass(eq=False)
class Child:
    """A child process, started on its first task, and the agent's end of the connection to it.

    `selector` is the agent's own. `serve` runs in the child until the child ends. `ps` shows the first 15 characters of
    `name`. `heard` is called with each message of the child, `has_ended` at its end, and `has_sent_all` once all
    waiting messages are sent.
    """

    selector: selectors.BaseSelector
    serve: Callable[[socket.socket], object]
    name: str
    heard: Callable[[packets.Message], object]
    has_ended: Callable[[], object]
    has_sent_all: Callable[[], object]

    def __post_init__(self) -> None:
        self._connection: Connection | None = None
        self._pid = 0
        self._begun: deque[float] = deque(maxlen=MOST_RESTARTS + 1)

    @property
    def is_there(self) -> bool:
        """Return True from the child's start until its end is noticed."""
        return self._connection is not None

    @property
    def has_waiting(self) -> bool:
        """Return True while messages wait to be sent to the child."""
        return self._connection is not None and self._connection.has_waiting

    def begin(self) -> str:
        """Start a child unless one runs. Return the reason of a failure, "" after success."""
        if self._connection is not None:
            return ""
        now = time.monotonic()
        if len(self._begun) > MOST_RESTARTS and now - self._begun[0] < RESTART_WINDOW_S:
            return f"has ended {len(self._begun)} times in {RESTART_WINDOW_S:g} s"
        self._begun.append(now)
        try:
            self._connection, self._pid = _fork_child(self.serve, self.name)
        except OSError as problem:
            return f"could not be made: {problem.strerror}"
        self.selector.register(self._connection.fileno(), selectors.EVENT_READ, self._receive_answers)
        return ""

    def send(self, message: packets.Message, *descriptors: int) -> None:
        """Send the child a message, now or once there is room. A hanging child does not block the caller."""
        if self._connection is not None:
            self._connection.send(message, descriptors)
            self._watch(self._connection)

    def _watch(self, connection: Connection) -> None:
        """Read from a connection, and write to it while messages wait.

        Kill a child whose queue is full, so that another child starts.
        """
        if connection.is_broken:
            os.kill(self._pid, signal.SIGKILL)
        waits = selectors.EVENT_WRITE if connection.has_waiting and not connection.is_broken else 0
        self.selector.modify(connection.fileno(), selectors.EVENT_READ | waits, self._receive_answers)

    def _receive_answers(self, _: int) -> None:
        connection = self._connection
        if connection is None:
            return
        connection.flush()
        if not connection.has_waiting:
            self.has_sent_all()
        self._watch(connection)
        try:
            message = _receive_next(connection)
        except BlockingIOError:
            return
        if message is None:
            self.end()
            self.has_ended()
        else:
            self.heard(message)

    def end(self) -> None:
        """Kill the child, reap it, and handle the messages that it sent before.

        After `REAP_S` leave a child that hangs in a driver.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self.selector.unregister(connection.fileno())
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        until = time.monotonic() + REAP_S
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
            time.sleep(LOOK_S)
        with suppress(BlockingIOError):  # it hangs in a driver
            while (message := _receive_next(connection)) is not None:
                self.heard(message)
        connection.close()


def _receive_next(connection: Connection) -> packets.Message | None:
    """Return the next message of a child, None after its last one. Raises `BlockingIOError` if there is none yet."""
    try:
        message, descriptors = connection.receive()
    except packets.PacketError:
        return None
    for descriptor in descriptors:
        os.close(descriptor)
    return message


class AgentEnd:
    """The child's end of the connection to the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._waiting = select.poll()
        self._waiting.register(connection, select.POLLIN)
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._waiting.register(self._woken, select.POLLIN)
        self.has_gone = False

    def receive(self, wait_s: float) -> Iterator[tuple[packets.Message, list[int]]]:
        """Wait at most `wait_s` for messages of the agent. Yield all that are there, with their descriptors."""
        if not self._waiting.poll(None if wait_s == math.inf else math.ceil(1000 * wait_s)):
            return
        with suppress(BlockingIOError):
            os.read(self._woken, PIPE_BYTES)
        while not self.has_gone:
            try:
                message, descriptors = packets.receive(self._connection)
            except BlockingIOError:
                return
            except packets.PacketError:
                continue  # what a process says is handed on, and may be too long
            except OSError:
                message, descriptors = None, []
            if message is None:
                self.has_gone = True
            else:
                yield message, descriptors

    def wake(self) -> None:
        """End the wait in `receive`, from another thread."""
        with suppress(BlockingIOError):
            os.write(self._waker, b".")

    def send(self, message: packets.Message) -> None:
        """Send the agent a message. Ignore errors: `receive` notices the end of the connection."""
        with suppress(OSError):
            packets.send(self._connection, message)


def run_in_child(work: Callable[[], object]) -> int:
    """Fork a child that calls `work` and ends. Return its process id. Raises `OSError`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _fork_child(serve: Callable[[socket.socket], object], name: str) -> tuple[Connection, int]:
    """Fork a child. Return the agent's end of the connection to it, and its process id. Raises `OSError`."""
    ours, theirs = socket.socketpair(packets.FAMILY, packets.KIND)
    with theirs:
        try:
            pid = run_in_child(partial(_serve_in_child, theirs, serve, name, os.getpid()))
        except OSError:
            ours.close()
            raise
    return Connection(ours), pid


def _serve_in_child(connection: socket.socket, serve: Callable[[socket.socket], object], name: str, agent: int) -> None:
    """Serve in the child, with all other descriptors of the agent closed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the agent, which ends this one in its time
    descriptor = 3
    os.dup2(connection.fileno(), descriptor)
    os.closerange(descriptor + 1, min(1 << 16, os.sysconf("SC_OPEN_MAX")))
    _prepare(agent)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name, "ascii")
    gc.freeze()
    serve(socket.socket(packets.FAMILY, packets.KIND, fileno=descriptor))


def _prepare(agent: int) -> None:
    """Have the kernel kill this child when the agent dies, so that its locks are freed. Have its allocator return
    unused memory."""
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        library = ctypes.CDLL(None)
        library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        for option, value in _MALLOC_OPTIONS.items():
            library.mallopt(option, value)
    if os.getppid() != agent:
        os._exit(1)
