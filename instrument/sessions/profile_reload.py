"""The reload of a running session's profile, requested by the service's code, by the agent, or by a change of the file.

Each loaded profile has a number, its generation. If the profile sets `control.watch`, the control thread checks the
profile's file for changes every `FILE_CHECK_S`.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from instrument.clock import Deadline
from instrument.errors import InstrumentError, ProfileError, StateError
from instrument.instrumentors.selection import Selection
from instrument.profile.model import Profile
from instrument.profile.presets import ENGINES
from instrument.recorder.recorder import RECORDER
from instrument.recording import board
from instrument.runtime import environment
from instrument.runtime.faults import FAULTS, logger
from instrument.runtime.lazy_imports import NamedTuple, dataclass, replace
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import RLock, poll
from instrument.sessions.exporting import Exporting
from instrument.sessions.membership import Membership
from instrument.sessions.recorded import Recorded

FORK_WAIT_S = 1.0
"""Seconds for which a fork waits for a reload on another thread."""

MOST_NAMES = 100
"""The maximum number of target names per list in the answer to the agent. Further targets are only counted."""

Answer = Mapping[str, Any]


class Request(NamedTuple):
    """A request to a process to reload its profile from `path`, by default the process's own file. `service` limits it
    to processes of that service. With `switch`, `path` may be any profile. A request with `records` switches the
    recording on or off, and reloads nothing."""

    path: str | None = None
    service: str | None = None
    switch: bool = False
    records: bool | None = None


FIXED_SETTINGS = {
    "clock": "spans that are open now were begun by the other one",
    "limits.ring": "the rings are made when the session starts",
    "limits.ring_dir": "the rings are made when the session starts",
    "device": "the device is set up when the session starts",
    "control": "it is set up when the session starts",
    "agent": "the run has one, or has none, from its start",
    "startup": "what it is about has begun by then",
    "export.otlp": "what sending needs is set up when the session starts",
}
"""The settings that a reload cannot change, each with the reason that is reported."""


@dataclass(frozen=True)
class Reload:
    """The result of a reload of a running session's profile.

    `attached` has the names of new targets of function rules, and of new rules for layers and copies. `undone` has the
    names of removed targets and rules. `refused` has a sentence per setting that could not be changed. `generation` is
    the number of the profile in this session, from 1. `digest` identifies the current profile.
    """

    generation: int
    digest: str
    attached: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = f"{len(self.attached)} attached, {len(self.undone)} undone"
        return "; ".join([f"generation {self.generation} ({self.digest}): {counts}", *self.refused])

    def facts(self) -> Mapping[str, Any]:
        """Return the result as a JSON object. Lists have at most `MOST_NAMES` targets."""
        return {
            "generation": self.generation,
            "digest": self.digest,
            "attached": _limit_names(self.attached),
            "undone": _limit_names(self.undone),
            "refused": list(self.refused),
        }


def _limit_names(names: Sequence[str]) -> list[str]:
    more = len(names) - MOST_NAMES
    return [*names[:MOST_NAMES], *([f"and {more} more"] if more > 0 else [])]


def find_profile_file(profile: Profile, folder: Path) -> Path | None:
    path = folder / profile.source
    return path if path.is_file() else None


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile from a file. The reader and YAML are imported here, because few processes need them."""
    from instrument.profile.keys import load

    return load(path)


def describe_exemption(request: Request, now: Profile, file: Path | None) -> str:
    """Return "" if a request applies to this process. Otherwise, return a description of the process. Raises
    `ProfileError`.

    A request with a `path` applies to processes that use this profile. With `switch`, it applies to all processes of
    the profile's service.
    """
    service, path = request.service, request.path
    is_own = path is None or (file is not None and _is_same_file(Path(path), file))
    if path is not None and request.switch and not is_own:
        service, is_own = load_profile(path).service, True
    is_addressed = is_own and service in (None, now.service)
    return "" if is_addressed else f"it runs the service {now.service} with {now.source}"


def _is_same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:  # one that is gone just now, as where a file is being replaced
        return first.resolve() == second.resolve()


def keep_fixed_settings(profile: Profile, now: Profile) -> Profile:
    return replace(
        profile,
        clock=now.clock,
        device=now.device,
        control=now.control,
        agent=now.agent,
        startup=now.startup,
        limits=replace(profile.limits, ring_bytes=now.limits.ring_bytes, ring_folder=now.limits.ring_folder),
        export=replace(profile.export, otlp=now.export.otlp),
    )


def refused_settings(profile: Profile, in_force: Profile) -> tuple[str, ...]:
    from instrument.profile.keys import get_setting

    return tuple(
        f"{name} keeps its value until a restart: {why}"
        for name, why in FIXED_SETTINGS.items()
        if get_setting(profile, name) != get_setting(in_force, name)
    )


def change_rules(selection: Selection, now: Profile, to: Profile) -> tuple[list[str], list[str]]:
    """Detach the rules of the profile `now`, and attach those of `to`. Return the names of the attached and of the
    undone targets. After a failure, `StateError` is raised, and the rules of `now` remain."""
    try:
        return selection.change(to)
    except Exception as fault:
        selection.change(now, anew=True)
        raise StateError(f"{to.source} could not be applied: {type(fault).__name__}: {fault}") from fault


class Generations:
    """The successive profiles of a session. A call, a request of the agent, or a changed file replaces the current
    profile.

    `enter(profile)` applies the settings of a profile whose rules are attached. `refine(profile)` applies the settings
    of the current profile after rules were added. `has_ended()` returns True once the session has stopped. After a
    change, call `settle()` until it returns False.
    """

    def __init__(
        self,
        session: Recorded,
        folder: Path,
        enter: Callable[[Profile], None],
        refine: Callable[[Profile], None],
        has_ended: Callable[[], bool],
    ) -> None:
        self._session = session
        self._apply = enter
        self._add_rules = refine
        self.has_ended = has_ended
        self.settle = session.selection.attach_pending_modules
        self.file = find_profile_file(session.profile, folder)
        self.lock = RLock()
        """The lock of the change from one profile to another."""
        self._engines: list[str] = []
        """The packages of engines whose rules were added."""

    def call_without_forks(self, prepare: Callable[[], object]) -> None:
        """Call `prepare()`, which imports modules, while forks wait. A child would inherit a half-done import."""
        is_acquired = self.lock.acquire(timeout=FORK_WAIT_S)
        try:
            prepare()
        finally:
            if is_acquired:
                self.lock.release()

    def await_reload(self, deadline: Deadline) -> None:
        if self.lock.acquire(timeout=deadline.seconds_left()):
            self.lock.release()  # it has ended; there is none from now on

    @property
    def watched(self) -> Path | None:
        return self.file if self._session.profile.control.watch else None

    def prepare_to_watch(self) -> bool:
        session = self._session
        if not session.profile.control.watch:
            return False
        from instrument.profile.keys import loads

        loads("")
        if self.file is None:
            source = session.profile.source
            session.account.complain(f"control.watch: the profile has no file to watch; it is {source}")
        return True

    def change_profile(self, profile: Profile | str | os.PathLike[str] | None) -> Reload:
        session = self._session
        if profile is None and self.file is None:
            raise StateError(
                f"cannot reload: the profile of the session is no file ({session.profile.source}); give a file"
            )
        with self.lock:  # the file is read within, or of two callers the one that read first might be the last
            if self.has_ended():
                raise StateError("cannot reload: the session has been stopped; call instrument.start()")
            folder = environment.working_folder()
            if isinstance(profile, Profile):
                new_profile, file = profile, find_profile_file(profile, folder)
            else:
                file = folder / (profile or self.file or "")
                new_profile = load_profile(file)
            next_profile = self._add_engine_rules(keep_fixed_settings(new_profile, session.profile))
            attached: list[str] = []
            undone: list[str] = []
            if next_profile != session.profile:
                attached, undone = change_rules(session.selection, session.profile, next_profile)
            refused = session.account.refused = refused_settings(new_profile, next_profile)
            self.file = file
            self._apply(next_profile)
            return Reload(session.generation, session.digest, tuple(attached), tuple(undone), refused)

    def _add_engine_rules(self, profile: Profile) -> Profile:
        from instrument.profile.keys import with_engine_preset

        for package in self._engines if profile.engines == "auto" else ():
            profile = with_engine_preset(profile, package)
        return profile

    def add_engine_rules(self, package: str) -> None:
        from instrument.profile.keys import with_engine_preset

        session = self._session
        with self.lock:
            now = session.profile
            if self.has_ended() or now.engines != "auto" or package in self._engines:
                return
            to = with_engine_preset(now, package)
            change_rules(session.selection, now, to)
            self._engines.append(package)
            self._add_rules(to)
        preset, mark = ENGINES[package], board.attached_mark(f"engine {package}")
        if len(to.functions) > len(now.functions) and mark not in board.read_marks():
            board.add_marks([mark])
            logger.warning(
                "instrument: the service imports %s, so the rules of the preset %s apply, too (`instrument check "
                "--preset %s` prints them; `engines: off` leaves them out)",
                package, preset, preset,
            )  # fmt: skip

    def note_refused_profile(self, error: str) -> None:
        self._session.account.note_refused_profile(
            f"the profile of generation {self._session.generation} stays in force: {error}"
        )

    def answer_request(self, request: Request) -> Answer:
        session, path = self._session, request.path
        facts: dict[str, Any] = {"pid": os.getpid(), "service": session.profile.service}
        if request.records is not None:
            RECORDER.switch_recording(on=request.records and not self.has_ended())
            return {**facts, "generation": session.generation, "records": RECORDER.on}
        try:
            if path is not None and Path(path).exists() and not Path(path).is_file():
                raise ProfileError([f"{path}: found no regular file; give the path of a profile"])
            with self.lock:  # reading may import YAML, and a fork in the middle would spoil it
                other_process = describe_exemption(request, session.profile, self.file)
            if other_process:
                return {**facts, "generation": session.generation, "digest": session.digest, "other": other_process}
            result = self.change_profile(path)
        except (InstrumentError, ValueError) as error:
            return {**facts, "generation": session.generation, "digest": session.digest, "error": str(error)}
        return {**facts, **result.facts()}


# The control thread


FILE_CHECK_S = 0.1

QUIET_S = 0.02
"""Seconds for which a changed file must stay unchanged before it is read, because an editor may still write it."""

INVALID_FILE_S = 1.0
"""Seconds after which an invalid file is reported. Until then, it may be half-written."""

MAIN_THREAD_CHECK_S = 0.2
"""Seconds between two checks whether the main thread has ended."""

EXPORT_CHECK_S = 1.0
"""Seconds between two checks whether an exporter reads this process's recording."""

AGENT_RETRY_S = 1.0
"""Seconds between two attempts to connect to an agent after the agent was lost."""


class ControlThread:
    """A thread that handles the agent's messages and changes of the profile's file. `end_of_main_thread()` returns a
    function to call after the main thread has ended. It returns None if the process does not end with the main
    thread."""

    def __init__(
        self,
        generations: Generations,
        membership: Membership,
        exporting: Exporting,
        end_of_main_thread: Callable[[], Callable[[], object] | None],
    ) -> None:
        self._generations, self._membership, self._exporting = generations, membership, exporting
        self._end_of_main_thread = end_of_main_thread
        self._stamp: tuple[int, ...] | None = (-1,)
        """The identity of the file at the last check. The file has been read `_reads` times since it changed."""
        self._reads = 0
        self._due_at = 0.0
        self._error = ""
        self._unsettled = False
        self._reset()

    def _reset(self, *, has_begun: bool = False) -> None:
        self._lock = RLock()
        self._has_begun = has_begun
        self._thread: Thread | None = None
        self._wake = -1
        self._agent_fd = -1
        self._agent_at = 0.0
        self._joins = 0
        self._stopping = False

    def watch_file(self) -> None:
        self._has_begun = self._generations.prepare_to_watch()
        self.start_or_wake()

    def hear_agent(self) -> None:
        with self._lock:
            if self._membership.joins and not self._generations.has_ended():
                self._has_begun = True  # there is an agent, and the session has not ended as its threads began
                self.start_or_wake()

    def start_or_wake(self) -> None:
        """Start the thread, or wake it to look for the agent. Does nothing before `watch_file` or `hear_agent` is
        called."""
        with self._lock:
            if self._thread is not None:
                os.eventfd_write(self._wake, 1)  # it looks for the agent
            elif self._has_begun and (self._generations.watched is not None or self._membership.joins):
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                thread = Thread(self._handle_events, "instrument-control", lambda: not self._stopping)
                thread.start()
                self._thread = thread

    def stop(self, timeout_s: float) -> None:
        """End the thread. Wait up to `timeout_s` seconds for its end."""
        with self._lock:
            thread, self._thread, self._stopping, self._has_begun = self._thread, None, True, False
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            thread.join(timeout_s)
        if thread is None or not thread.is_alive():
            self._close()

    def after_fork_in_child(self) -> None:
        """Drop the parent's thread. `start_or_wake` starts a new one if there is a file to watch."""
        self._close()
        self._reset(has_begun=self._has_begun and self._generations.watched is not None)

    def _close(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ---------------------------------------------------------------- the thread

    def _handle_events(self) -> None:
        end = self._end_of_main_thread()
        while not self._stopping:
            waits_s = [3600.0]
            if self._generations.watched is not None:
                waits_s.append(_attempt(self._check_file) or FILE_CHECK_S)
            if self._unsettled:
                self._unsettled = _attempt(self._generations.settle) is True
                waits_s.append(FILE_CHECK_S)
            if end is not None:
                waits_s.append(MAIN_THREAD_CHECK_S)
                if _has_main_thread_ended():
                    self._stopping = True
                    _attempt(end)
                    return
            if self._membership.joins:  # else the session joins first
                waits_s.append(_attempt(self._find_agent) or AGENT_RETRY_S)
            for descriptor, _ in self._wait_for_events(min(waits_s)):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)  # the word to stop, or to look for the agent
                else:
                    _attempt(self._handle_agent_message)

    def _wait_for_events(self, wait_s: float) -> list[tuple[int, int]]:
        """Wait for a message of the agent or a wake-up. A forked child would share an `epoll`, so `poll` is used."""
        waiting = poll()
        for descriptor in (self._wake, self._agent_fd):
            if descriptor >= 0:
                waiting.register(descriptor, select.POLLIN)
        return list(waiting.poll(1000 * wait_s))

    def _find_agent(self) -> float:
        """Connect to an agent if none is connected. Return the seconds until the next attempt."""
        membership, now = self._membership, time.monotonic()
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
        return EXPORT_CHECK_S if self._agent_fd >= 0 else max(self._agent_at - time.monotonic(), 0.0)

    def _handle_agent_message(self) -> None:
        membership = self._membership
        message = membership.next_message()
        if message is None:
            self._agent_fd = -1
            membership.close()
            return
        self._exporting.handle_agent_message(message)
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
        answer = self._generations.answer_request(request)
        self._unsettled = True
        return answer

    # ---------------------------------------------------------------- the file

    def _check_file(self) -> float:
        """Apply the profile's file if it has changed and its writer has finished. Return the seconds until the next
        check.

        The file is read twice, because two writes within one tick of the file system's clock look like one.
        """
        stamp, now = _identity_of_file(self._generations.watched), time.monotonic()
        if stamp != self._stamp:  # a file that was being written counts neither as a success nor as an error
            self._stamp, self._reads, self._due_at, self._error = stamp, 0, now + QUIET_S, ""
        elif now >= self._due_at and self._reads < 2:
            self._reads += 1
            self._error = str(self._request_reload(Request()).get("error", ""))
            self._due_at = time.monotonic() + (FILE_CHECK_S if self._reads < 2 else INVALID_FILE_S)
        elif now >= self._due_at and self._error:
            error, self._error = self._error, ""
            self._generations.note_refused_profile(error)
        return FILE_CHECK_S if self._reads else QUIET_S


_attempt: Callable[[Callable[[], Any]], Any] = partial(FAULTS.attempt, "control thread")


def _has_main_thread_ended() -> bool:
    try:
        return Path(f"/proc/self/task/{os.getpid()}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return False


def _identity_of_file(path: Path | None) -> tuple[int, ...] | None:
    try:
        facts = os.stat(path) if path is not None else None  # noqa: PTH116 - the plain call, ten times a second
    except OSError:
        return None
    return facts and (facts.st_mtime_ns, facts.st_size, facts.st_ino, facts.st_dev)
