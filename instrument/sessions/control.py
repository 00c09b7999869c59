"""The control thread of a process: it answers messages of the agent, and applies changes of the profile's file.

It watches the file if the profile has `control.watch`, by one `os.stat` per `POLL_S`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import RLock, poll
from instrument.sessions.exporting import Exporting
from instrument.sessions.membership import Membership
from instrument.sessions.profile_reload import Answer, Generations, Request

POLL_S = 0.1
"""Seconds between two checks of the watched file."""

SETTLE_S = 0.02
"""Seconds without a change before a changed file is read: an editor may write it piece by piece."""

GRACE_S = 1.0
"""Seconds for which a file must be invalid before that is reported; it may be half-written until then."""

MAIN_S = 0.2
"""Seconds between two checks that the main thread lives, in a process that may end with that thread."""

EXPORT_S = 1.0
"""Seconds between two checks that an exporter reads what this process records."""

AGENT_S = 1.0
"""Seconds between two attempts to find another agent, once the process has lost its agent."""


class ControlThread:
    """A thread that serves reload requests to one process, from the agent or by a changed file, until `stop`.

    `generations` reloads the profile. `exporting` handles the agent's messages on the export. `end_of_main_thread()`
    returns a function to call as the main thread ends, if the process then ends; else None.
    """

    def __init__(
        self,
        generations: Generations,
        membership: Membership,
        exporting: Exporting,
        end_of_main_thread: Callable[[], Callable[[], object] | None],
    ) -> None:
        self._generations, self._membership, self._exporting = generations, membership, exporting
        self._end_of_main_thread = end_of_main_thread
        self._seen: tuple[int, ...] | None = (-1,)  # the file as it was when it was read last
        self._changed: tuple[int, ...] | None = None
        self._read_again = False
        self._error = ""
        self._error_at = 0.0
        self._unsettled = False
        self._begin()

    def _begin(self, *, has_begun: bool = False) -> None:
        self._lock = RLock()
        self._has_begun = has_begun
        self._thread: Thread | None = None
        self._wake = -1
        self._agent_fd = -1
        self._agent_at = 0.0
        self._joins = 0
        self._stopping = False

    def watch(self) -> None:
        """Watch the profile's file from now on, if the profile asks for it."""
        self._has_begun = self._generations.prepare_to_watch()
        self.go_on()

    def hear_agent(self) -> None:
        """Serve the agent's requests from now on. Start the thread unless it runs already."""
        with self._lock:
            if self._membership.joins and not self._generations.has_ended():
                self._has_begun = True  # there is an agent, and the session has not ended as its threads began
                self.go_on()

    def go_on(self) -> None:
        """Wake the thread to look for the agent, or start it. Do nothing before `watch` or `hear_agent`."""
        with self._lock:
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)  # it looks for the agent
            elif self._has_begun and (self._generations.watched is not None or self._membership.joins):
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                thread = Thread(self._run, "instrument-control", lambda: not self._stopping)
                thread.start()
                self._thread = thread

    def stop(self, timeout_s: float) -> None:
        """End the thread within `timeout_s` seconds, after a running reload."""
        with self._lock:
            thread, self._thread, self._stopping, self._has_begun = self._thread, None, True, False
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(timeout_s)
        if thread is None or not thread.is_alive():
            self._close()

    def after_fork_in_child(self) -> None:
        """Forget the parent's thread. `go_on` begins the child's thread, if there is a file to watch."""
        self._close()
        self._begin(has_begun=self._has_begun and self._generations.watched is not None)

    def _close(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        look_at, end = 0.0, self._end_of_main_thread()
        while not self._stopping:
            now = time.monotonic()
            if self._generations.watched is not None:
                if now >= look_at:
                    _attempt(self._check_file)
                    now = time.monotonic()
                    look_at = now + (SETTLE_S if self._changed is not None else POLL_S)
            else:
                look_at = now + 3600.0
            if self._unsettled:
                self._unsettled = _attempt(self._generations.settle) is True
                look_at = min(look_at, now + POLL_S)
            if end is not None:
                look_at = min(look_at, now + MAIN_S)
                if _has_main_thread_ended():
                    self._stopping = True
                    _attempt(end)
                    return
            look_at = min(look_at, _attempt(lambda: self._find_agent(now)) or look_at)  # noqa: B023 - called at once
            for descriptor, _ in self._wait(max(look_at - now, 0.0)):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)  # the word to stop, or to look for the agent
                else:
                    _attempt(self._handle_agent_message)

    def _wait(self, wait_s: float) -> list[tuple[int, int]]:
        """Wait for a message of the agent or a wake-up, by poll: a forked child would share an epoll with its
        parent."""
        waiting = poll()
        for descriptor in (self._wake, self._agent_fd):
            if descriptor >= 0:
                waiting.register(descriptor, select.POLLIN)
        return list(waiting.poll(1000 * wait_s))

    def _find_agent(self, now: float) -> float | None:
        """Check the connection to the agent, or try to find another one. Return the time of the next attempt or
        check."""
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
        self._exporting.publish_facts(is_joined=self._agent_fd >= 0)
        return now + EXPORT_S if self._agent_fd >= 0 else self._agent_at

    def _handle_agent_message(self) -> None:
        membership = self._membership
        message = membership.next_message()
        if message is None:
            self._agent_fd = -1
            membership.close()
            return
        self._exporting.hear_agent(message)
        if "do" not in message:
            return
        try:
            request = Request(**message["do"])
        except TypeError:
            answer: Answer = {"error": "this version does not know the request"}
        else:
            answer = self._request_reload(request)
        membership.send({"answer": answer, "number": message.get("number", 0)})

    def _request_reload(self, request: Request) -> Answer:
        answer = self._generations.answer(request)
        self._unsettled = True
        return answer

    # ---------------------------------------------------------------- the file

    def _check_file(self) -> None:
        """Apply the profile's file once a change is complete, and read it once more after that.

        Without the second read, a write of the same size in the same clock tick would remain unseen.
        """
        stamp = _identity_of_file(self._generations.watched)
        if stamp == self._seen:
            self._changed = None
            again, self._read_again = self._read_again, False
            if again:
                self._apply_file(stamp)
            elif self._error and time.monotonic() - self._error_at >= GRACE_S:
                error, self._error = self._error, ""
                self._generations.refuse(error)
        elif stamp != self._changed:
            self._changed = stamp
        else:
            self._read_again = True
            self._apply_file(stamp)

    def _apply_file(self, stamp: tuple[int, ...] | None) -> None:
        error = str(self._request_reload(Request()).get("error", ""))
        # A file that was being written counts neither as a success nor as an error.
        if _identity_of_file(self._generations.watched) != stamp:
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
    """Return the modification time, size, inode and device of a file; None if there is no file."""
    try:
        facts = os.stat(path) if path is not None else None  # noqa: PTH116 - the plain call, ten times a second
    except OSError:
        return None
    return facts and (facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_dev)
