"""The control thread of a process: it follows messages of the agent, and changes of the profile's file.

It watches the file if the profile has `control.watch`, at one `os.stat` per `POLL_S`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from instrument.runtime.cheap_start import NamedTuple
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import poll
from instrument.sessions.membership import Membership

POLL_S = 0.1
"""Seconds between two looks at the watched file."""

SETTLE_S = 0.02
"""Seconds that a changed file must stay the same before it is read: it may be written in place, a part at a time."""

GRACE_S = 1.0
"""Seconds for which a file must be unusable before that is reported; it may be half-written until then."""

MAIN_S = 0.2
"""Seconds between two checks that the main thread lives, in a process that may end with that thread."""

EXPORT_S = 1.0
"""Seconds between two checks that an exporter reads what this process records."""

AGENT_S = 1.0
"""Seconds between two attempts to find another agent, once that of the process has gone."""

Answer = Mapping[str, Any]


class Request(NamedTuple):
    """A request to read the profile at `path`, or the process's own file again (None).

    `service` limits it to processes of that service; `switch` allows another file than the process's own. With
    `records` it asks instead to record, or to stop recording until asked again.
    """

    path: str | None = None
    service: str | None = None
    switch: bool = False
    records: bool | None = None


class ControlThread:
    """A thread that serves reload requests to one process, between `start` and `stop`.

    `reload(request)` does what the agent or a changed file asks for. It returns the result, with `error` where it was
    refused and `other` where another process was meant. `watched()` returns the file to watch, None for none.
    `settle()` is called after a reload until it returns False. `complain(message)` reports a file that stays unusable.
    `end()` is called when the process's main thread has ended.
    """

    def __init__(
        self,
        watched: Callable[[], Path | None],
        reload: Callable[[Request], Answer],
        settle: Callable[[], bool],
        complain: Callable[[str], object],
        membership: Membership,
        end: Callable[[], object] | None,
        look_after_export: Callable[[bool], object],
        hear_agent: Callable[[Mapping[str, Any]], object],
    ) -> None:
        self._end = end
        self._look_after_export = look_after_export
        self._hear = hear_agent
        self._membership = membership
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
        self._wake = -1
        self._agent_fd = -1
        self._agent_at = 0.0
        self._joins = 0
        self._stopping = False

    @property
    def is_for_agent_alone(self) -> bool:
        """True if the thread serves the agent alone, with no file to watch."""
        return self._watched() is None

    def start(self) -> None:
        """Begin to hear the agent and to watch, unless that has begun."""
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)  # it looks for the agent
        elif self._watched() is not None or self._membership.joins:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            thread = Thread(self._run, "instrument-control", lambda: not self._stopping)
            thread.start()
            self._thread = thread

    def stop(self, timeout_s: float) -> None:
        """End the thread, after the reload that it is about."""
        thread, self._thread, self._stopping = self._thread, None, True
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(timeout_s)
        if thread is None or not thread.is_alive():
            self._close()

    def after_fork_in_child(self) -> None:
        """Leave the parent's thread to the parent; `start` begins the child's own."""
        self._close()
        self._begin()

    def _close(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
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
            for descriptor, _ in self._wait(max(look_at - now, 0.0)):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)  # the word to stop, or to look for the agent
                else:
                    _attempt(self._hear_agent)

    def _wait(self, wait_s: float) -> list[tuple[int, int]]:
        """Wait for the agent, or to be woken. A forked child would share an epoll with its parent."""
        waiting = poll()
        for descriptor in (self._wake, self._agent_fd):
            if descriptor >= 0:
                waiting.register(descriptor, select.POLLIN)
        return list(waiting.poll(1000 * wait_s))

    def _find_agent(self, now: float) -> float | None:
        """Hear the run's agent; where it has gone, look for another one now and then. Returns when to look again."""
        membership = self._membership
        if not membership.joins:
            return None  # the session joins first
        if membership.joins != self._joins or membership.fileno() != self._agent_fd:
            self._agent_fd = -1  # closed by the service, or connected anew
        if self._agent_fd < 0 and (now >= self._agent_at or membership.joins != self._joins):
            self._agent_at = now + AGENT_S
            is_joined = membership.is_joined or not membership.join(begins=True)
            self._joins = membership.joins
            if is_joined:
                self._agent_fd = membership.fileno()
                membership.send({"hears": True})
        self._look_after_export(self._agent_fd >= 0)
        return now + EXPORT_S if self._agent_fd >= 0 else self._agent_at

    def _hear_agent(self) -> None:
        membership = self._membership
        message = membership.heard()
        if message is None:
            self._agent_fd = -1
            membership.close()
            return
        self._hear(message)
        if "do" not in message:
            return
        try:
            request = Request(**message["do"])
        except TypeError:
            answer: Answer = {"error": "this version does not know the request"}
        else:
            answer = self._ask(request)
        membership.send({"answer": answer, "number": message.get("number", 0)})

    def _ask(self, request: Request) -> Answer:
        answer = self._reload(request)
        self._unsettled = True
        return answer

    # ---------------------------------------------------------------- the file

    def _look(self) -> None:
        """Follow the file when it has changed and stays as it is; read it once more after that.

        What is written within the clock tick of its own modification time, in the same size, looks unchanged.
        """
        stamp = _identity_of_file(self._watched())
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
        if _identity_of_file(self._watched()) != stamp:  # it was being written: neither a success nor an error counts
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


def _identity_of_file(path: Path | None) -> tuple[int, ...] | None:
    """Return the modification time, size and identity of a file; None if there is no file."""
    try:
        facts = os.stat(path) if path is not None else None  # noqa: PTH116 - the plain call, ten times a second
    except OSError:
        return None
    return facts and (facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_dev)
