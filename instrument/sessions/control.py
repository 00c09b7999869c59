"""The control thread of a process, which answers the agent's requests and applies changes of the profile's file.

If the profile sets `control.watch`, the thread checks the file for changes every `FILE_CHECK_S`.
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

FILE_CHECK_S = 0.1
"""Seconds between two checks of the profile's file for a change."""

QUIET_S = 0.02
"""Seconds for which a changed file must stay unchanged before it is read, because an editor may still write it."""

GRACE_S = 1.0
"""Seconds for which a file may be invalid before that is reported, because it may only be half-written."""

MAIN_THREAD_CHECK_S = 0.2
"""Seconds between two checks whether the main thread has ended, because then the process may have to end, too."""

EXPORT_CHECK_S = 1.0
"""Seconds between two checks whether an exporter reads this process's recording."""

AGENT_RETRY_S = 1.0
"""Seconds between two attempts of a process that has lost its agent to find another one."""


class ControlThread:
    """A thread that handles the agent's messages and changes of the profile's file until `stop`.

    `generations` reloads the profile, `exporting` handles messages on the export. `end_of_main_thread()` returns a
    function to call once the main thread has ended, None if the process does not end with that thread.
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
        """Begin to watch the profile's file, if the profile has `control.watch`."""
        self._has_begun = self._generations.prepare_to_watch()
        self.go_on()

    def hear_agent(self) -> None:
        """Begin to handle the agent's messages, and start the thread unless it runs."""
        with self._lock:
            if self._membership.joins and not self._generations.has_ended():
                self._has_begun = True  # there is an agent, and the session has not ended as its threads began
                self.go_on()

    def go_on(self) -> None:
        """Start the thread, or wake it to look for the agent. Do nothing before `watch` or `hear_agent` was called."""
        with self._lock:
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)  # it looks for the agent
            elif self._has_begun and (self._generations.watched is not None or self._membership.joins):
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                thread = Thread(self._run, "instrument-control", lambda: not self._stopping)
                thread.start()
                self._thread = thread

    def stop(self, timeout_s: float) -> None:
        """End the thread. Wait up to `timeout_s` seconds for a reload that it runs."""
        with self._lock:
            thread, self._thread, self._stopping, self._has_begun = self._thread, None, True, False
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(timeout_s)
        if thread is None or not thread.is_alive():
            self._close()

    def after_fork_in_child(self) -> None:
        """Drop the parent's thread. `go_on` starts a thread of the child if there is a file to watch."""
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
                    look_at = now + (QUIET_S if self._changed is not None else FILE_CHECK_S)
            else:
                look_at = now + 3600.0
            if self._unsettled:
                self._unsettled = _attempt(self._generations.settle) is True
                look_at = min(look_at, now + FILE_CHECK_S)
            if end is not None:
                look_at = min(look_at, now + MAIN_THREAD_CHECK_S)
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
        """Wait for a message of the agent or a wake-up. This uses poll because a forked child would share an epoll."""
        waiting = poll()
        for descriptor in (self._wake, self._agent_fd):
            if descriptor >= 0:
                waiting.register(descriptor, select.POLLIN)
        return list(waiting.poll(1000 * wait_s))

    def _find_agent(self, now: float) -> float | None:
        """Connect to an agent if there is no connection. Return the time of the next attempt, None if there is none."""
        membership = self._membership
        if not membership.joins:
            return None  # the session joins first
        if membership.joins != self._joins or membership.fileno() != self._agent_fd:
            self._agent_fd = -1  # closed by the service, or connected anew
        if self._agent_fd < 0 and (now >= self._agent_at or membership.joins != self._joins):
            self._agent_at = now + AGENT_RETRY_S
            is_joined = membership.is_joined or not membership.join(begins=True)
            self._joins = membership.joins
            if is_joined:
                self._agent_fd = membership.fileno()
                membership.send({"hears": True})
        self._exporting.publish_facts(is_joined=self._agent_fd >= 0)
        return now + EXPORT_CHECK_S if self._agent_fd >= 0 else self._agent_at

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
        """Apply the profile's file once it has changed and is complete. Read it a second time after that.

        Otherwise a second write of the same size within one tick of the file system's clock would be missed.
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
    """Return numbers that change with the file's content, None if there is no file."""
    try:
        facts = os.stat(path) if path is not None else None  # noqa: PTH116 - the plain call, ten times a second
    except OSError:
        return None
    return facts and (facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_dev)
