"""Control: how a running process learns of a changed profile, by a Unix socket of its own or by watching the file.

Only where the profile opts in. One daemon thread serves both; watching costs it one `os.stat` each `POLL_S`, listening
nothing until somebody calls. Each process listens on `<folder>/<pid>.sock`, mode 0600, in a folder that nobody else can
write to, and only its own user and root are answered. One request a connection, a line of JSON, and a line back:
``{"reload": "/path/of/profile.yaml"}``, or null for the file that the process has. Sockets of all services of a user
lie in one folder: a process takes no notice of a file that is not its own, unless the caller means it by name
(``"switch": true``), nor of one that is meant for another service (``"service": "..."``). Bytes, time and number of
connections are bounded, so that no caller can hold the thread up or make it grow.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from instrument.runtime.cheap_start import dataclass, field
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import Socket
from instrument.sessions.control_client import Answer, Request, poll_selector, remove_stale, sockets
from instrument.sessions.membership import Membership

POLL_S = 0.1
"""Seconds between two looks at the watched file."""

SETTLE_S = 0.02
"""Seconds that a changed file must stay the same before it is read: it may be written in place, a part at a time."""

GRACE_S = 1.0
"""Seconds for which a file must be unusable before that is reported; it may be half-written until then."""

REQUEST_BYTES = 8_192
CALLERS = 16
CALL_S = 1.0
"""The longest request, the most connections at a time (the oldest goes for a new one), and how long each may take."""

MAIN_S = 0.2
"""Seconds between two checks that the main thread lives, in a process that may end with that thread."""

EXPORT_S = 1.0
"""Seconds between two checks that an exporter reads what this process records."""

AGENT_S = 1.0
"""Seconds between two attempts to find another agent, once that of the process has gone."""


@dataclass(slots=True)
class _Caller:
    """A connection: the bytes received, and the part of the answer that is still to be sent."""

    until: float
    received: bytearray = field(default_factory=bytearray)
    answer: bytes = b""


class ControlServer:
    """A thread that serves reload requests to one process, between `start` and `stop`.

    `reload(request)` does what a caller or a changed file asks for. It returns the result, with `error` where it was
    refused and `other` where another process was meant. `watched()` returns the file to watch, None for none.
    `settle()` is called after a reload until it returns False. `complain(message)` reports a file that stays unusable.
    `end()` is called when the process's main thread has ended.
    """

    def __init__(
        self,
        folder: Path | None,
        watched: Callable[[], Path | None],
        reload: Callable[[Request], Answer],
        settle: Callable[[], bool],
        complain: Callable[[str], object],
        membership: Membership | None = None,
        end: Callable[[], object] | None = None,
        look_after_export: Callable[[bool], object] = lambda _: None,
        hear_agent: Callable[[Mapping[str, Any]], object] = lambda _: None,
    ) -> None:
        self._end = end
        self._look_after_export = look_after_export
        self._hear = hear_agent
        self._membership = membership
        self._folder = folder
        self._watched = watched
        self._reload = reload
        self._settle = settle
        self._complain = complain
        self._seen: tuple[int, ...] | None = (-1,)  # the file as it was when it was read last
        self._changed: tuple[int, ...] | None = None
        self._read_again = False
        self._error = ""
        self._error_at = 0.0
        self._unsettled = False
        self._begin()

    def _begin(self) -> None:
        self._thread: Thread | None = None
        self._listener: Socket | None = None
        self._path: Path | None = None
        self._inode: tuple[int, int] = (0, 0)
        self._callers: dict[Socket, _Caller] = {}
        self._selector = poll_selector()
        self._wake = -1
        self._agent_fd = -1
        self._agent_at = 0.0
        self._joins = 0
        self._stopping = False

    @property
    def is_for_agent_alone(self) -> bool:
        """True where the thread serves the agent alone, with no file to watch and no socket to listen on."""
        return self._folder is None and self._watched() is None

    def start(self) -> str:
        """Listen, and begin to watch, unless that has begun. Returns why it cannot listen, "" where it does or need
        not; it watches anyway."""
        problem = ""
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)  # it looks for the agent
            return problem
        if self._folder is not None:
            try:
                problem = self._listen(self._folder)
            except OSError as error:
                problem = f"control.socket: {self._folder}: {error.strerror or error}"
        hears = self._membership is not None and self._membership.joins > 0
        if self._path is not None or self._watched() is not None or hears:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector.register(self._wake, selectors.EVENT_READ)
            thread = Thread(self._run, "instrument-control", lambda: not self._stopping)
            thread.start()
            self._thread = thread
        return problem

    def stop(self, timeout_s: float) -> None:
        """End the thread, after the reload that it is about, and remove the socket."""
        thread, self._thread, self._stopping = self._thread, None, True
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(timeout_s)
        if self._path is not None:
            _attempt(self._remove)
        if thread is None or not thread.is_alive():
            self._close()

    def _remove(self) -> None:
        """Remove the socket's name, unless a later process of the same id has taken it."""
        path, self._path = self._path, None
        facts = path.stat() if path is not None and path.exists() else None
        if path is not None and facts is not None and (facts.st_dev, facts.st_ino) == self._inode:
            path.unlink(missing_ok=True)

    def after_fork_in_child(self) -> None:
        """Leave the parent's socket and callers to the parent; `start` begins the child's own."""
        self._close()
        self._begin()

    def _listen(self, folder: Path) -> str:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
            owner = f"mode {stat.filemode(facts.st_mode)} of user {facts.st_uid}"
            return (
                f"control.socket: asked to listen in {folder}, found {owner}; give a folder of this user that nobody "
                "else can write to"
            )
        listener = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener = listener
        listener.setblocking(False)
        os.fchmod(listener.fileno(), 0o600)  # before it has a name, under any umask
        # A name that can be seen is a socket that listens, or one of a process that is gone: so it gets its own last.
        unseen, path = folder / f".{os.getpid()}.sock", folder / f"{os.getpid()}.sock"
        unseen.unlink(missing_ok=True)
        listener.bind(os.fspath(unseen))
        listener.listen(CALLERS)
        unseen.rename(path)
        facts = path.stat()
        self._path, self._inode = path, (facts.st_dev, facts.st_ino)
        self._selector.register(listener, selectors.EVENT_READ)
        return ""

    def _close(self) -> None:
        self._selector.close()
        for connection in [*self._callers, *([self._listener] if self._listener is not None else [])]:
            connection.close()
        self._callers.clear()
        self._listener = None
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        folder = self._folder
        if folder is not None:
            _attempt(lambda: remove_stale(sockets(folder)))
        look_at = 0.0
        while not self._stopping:
            now = time.monotonic()
            if self._watched() is not None:
                if now >= look_at:
                    _attempt(self._look)
                    now = time.monotonic()
                    look_at = now + (SETTLE_S if self._changed is not None else POLL_S)
            else:
                look_at = now + 3600.0
            if self._unsettled:
                self._unsettled = _attempt(self._settle) is True
                look_at = min(look_at, now + POLL_S)
            if self._end is not None:
                look_at = min(look_at, now + MAIN_S)
                if _has_main_thread_ended():
                    self._stopping = True
                    _attempt(self._end)
                    return
            look_at = min(look_at, _attempt(lambda: self._find_agent(now)) or look_at)  # noqa: B023 - called at once
            waits = [look_at, *(caller.until for caller in self._callers.values())]
            for key, _ in self._selector.select(max(min(waits) - now, 0.0)):
                ready = key.fileobj
                if ready == self._agent_fd:
                    _attempt(self._hear_agent)
                    continue
                if ready == self._wake:
                    os.eventfd_read(self._wake)  # the word to stop, or to look for the agent
                if not isinstance(ready, Socket):
                    continue
                if ready is self._listener:
                    self._accept(ready)
                elif ready in self._callers:
                    self._serve(ready)
            now = time.monotonic()
            for connection in [caller_socket for caller_socket, caller in self._callers.items() if caller.until <= now]:
                self._drop(connection)

    def _find_agent(self, now: float) -> float | None:
        """Hear the run's agent; where it has gone, look for another one now and then. Returns when to look again."""
        membership = self._membership
        if membership is None or not membership.joins:
            return None  # the session joins first
        if membership.joins != self._joins or membership.fileno() != self._agent_fd:
            if self._agent_fd >= 0:
                self._selector.unregister(self._agent_fd)  # closed by the service, or connected anew
            self._agent_fd = -1
        if self._agent_fd < 0 and (now >= self._agent_at or membership.joins != self._joins):
            self._agent_at = now + AGENT_S
            is_joined = membership.is_joined or not membership.join(begins=True)
            self._joins = membership.joins
            if is_joined:
                self._agent_fd = membership.fileno()
                self._selector.register(self._agent_fd, selectors.EVENT_READ)
                membership.send({"hears": True})
        self._look_after_export(self._agent_fd >= 0)
        return now + EXPORT_S if self._agent_fd >= 0 else self._agent_at

    def _hear_agent(self) -> None:
        membership = self._membership
        message = None if membership is None else membership.heard()
        if membership is None or message is None:
            self._selector.unregister(self._agent_fd)
            self._agent_fd = -1
            if membership is not None:
                membership.close()
            return
        self._hear(message)
        if "do" not in message:
            return
        request = Request.parsed(json.dumps(message["do"]).encode())
        refused = {"error": "asked for something that this version does not do"}
        answer = refused if request is None else self._ask(request)
        membership.send({"answer": answer, "number": message.get("number", 0)})

    def _accept(self, listener: Socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return  # it went away again, or this process has no descriptor left
        if not _is_trusted(connection):
            connection.close()
            return
        connection.setblocking(False)
        if len(self._callers) >= CALLERS:
            self._drop(next(iter(self._callers)))
        self._callers[connection] = _Caller(time.monotonic() + CALL_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: Socket) -> None:
        caller = self._callers[connection]
        try:
            if not caller.answer:
                data = connection.recv(REQUEST_BYTES + 1 - len(caller.received))
                caller.received += data
                line, newline, _ = bytes(caller.received).partition(b"\n")
                if not newline and data and len(caller.received) <= REQUEST_BYTES:
                    return
                if not newline and not caller.received:
                    self._drop(connection)
                    return
                answer = self._answer(line) if newline else {"error": f"no line of at most {REQUEST_BYTES} bytes"}
                caller.answer = json.dumps(answer).encode() + b"\n"
                self._selector.modify(connection, selectors.EVENT_WRITE)
            sent_bytes = connection.send(caller.answer)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        caller.answer = caller.answer[sent_bytes:]
        if not caller.answer:
            self._drop(connection)

    def _answer(self, line: bytes) -> Answer:
        request = Request.parsed(line)
        if request is None:
            return {"error": 'found no request; allowed: {"reload": "/path/of/profile.yaml"} or {"reload": null}'}
        answer = self._ask(request)
        if answer.get("error"):
            self._complain(str(answer["error"]))
        return answer

    def _ask(self, request: Request) -> Answer:
        answer = self._reload(request)
        self._unsettled = True
        return answer

    def _drop(self, connection: Socket) -> None:
        self._selector.unregister(connection)
        del self._callers[connection]
        connection.close()

    # ---------------------------------------------------------------- the file

    def _look(self) -> None:
        """Follow the file when it has changed and stays as it is; read it once more after that.

        What is written within the clock tick of its own modification time, in the same size, looks unchanged.
        """
        stamp = _stamp(self._watched())
        if stamp == self._seen:
            self._changed = None
            again, self._read_again = self._read_again, False
            if again:
                self._follow(stamp)
            elif self._error and time.monotonic() - self._error_at >= GRACE_S:
                error, self._error = self._error, ""
                self._complain(error)
        elif stamp != self._changed:
            self._changed = stamp
        else:
            self._read_again = True
            self._follow(stamp)

    def _follow(self, stamp: tuple[int, ...] | None) -> None:
        error = str(self._ask(Request()).get("error", ""))
        if _stamp(self._watched()) != stamp:  # it was being written: neither a success nor an error counts
            self._changed, self._seen = None, (-1,)
            return
        self._changed, self._seen = None, stamp
        self._error, self._error_at = error, time.monotonic()


def _attempt(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as fault:
        FAULTS.note("control thread", fault)
        return None


def _has_main_thread_ended() -> bool:
    try:
        return Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return False


def _stamp(path: Path | None) -> tuple[int, ...] | None:
    """Return the modification time, size and identity of a file; None where there is no file."""
    try:
        facts = os.stat(path) if path is not None else None  # noqa: PTH116 - the plain call, ten times a second
    except OSError:
        return None
    return facts and (facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_dev)


def _is_trusted(connection: Socket) -> bool:
    """Return True where the peer is this user or root. A mode of 0600 alone would leave that to the file system."""
    try:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return False
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (os.geteuid(), 0)
