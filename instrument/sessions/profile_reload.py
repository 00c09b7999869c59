"""The reload of a running session's profile. Each loaded profile is numbered as a generation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instrument.clock import Deadline
from instrument.errors import InstrumentError, ProfileError, StateError
from instrument.instrumentors.selection import Selection
from instrument.profile.model import Profile
from instrument.profile.presets import ENGINES
from instrument.recorder.recorder import RECORDER
from instrument.recording import board
from instrument.runtime.cheap_start import NamedTuple, dataclass, replace
from instrument.runtime.faults import logger
from instrument.runtime.unpatched import RLock
from instrument.sessions import files
from instrument.sessions.recorded import Recorded

FORK_WAIT_S = 1.0
"""Seconds for which a fork waits for a reload on another thread, because the child would inherit a half-done reload."""

MOST_NAMES = 100
"""The maximum number of target names per list in the answer to the agent. Further targets are only counted."""

Answer = Mapping[str, Any]


class Request(NamedTuple):
    """A request to a process to reload its profile from `path`, None for its own file.

    With `service`, only processes of that service answer it. `switch` allows another file than the process's own. With
    `records`, no profile is read, and the recording is switched on or off.
    """

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

    `attached` and `undone` name the new and the removed targets of function rules, and the new and the removed rules
    for layers and copies. `refused` has a sentence per setting that could not be changed. `generation` counts profiles
    from 1. `digest` identifies the profile now in force.
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
        """Return the result as a JSON object, with at most `MOST_NAMES` targets in a list."""
        return {
            "generation": self.generation,
            "digest": self.digest,
            "attached": _clip_names(self.attached),
            "undone": _clip_names(self.undone),
            "refused": list(self.refused),
        }


def _clip_names(names: Sequence[str]) -> list[str]:
    more = len(names) - MOST_NAMES
    return [*names[:MOST_NAMES], *([f"and {more} more"] if more > 0 else [])]


def file_of(profile: Profile, folder: Path) -> Path | None:
    """Return the file from which a profile was read, None if it was made in code."""
    path = folder / profile.source
    return path if path.is_file() else None


def read(source: Profile | str | os.PathLike[str] | None, file: Path | None) -> tuple[Profile, Path | None]:
    """Return the profile at `source` and its file; for None read `file` again. Raises `ProfileError`."""
    folder = files.working_folder()
    if isinstance(source, Profile):
        return source, file_of(source, folder)
    path = folder / (source or file or "")
    return load_profile(path), path


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile from a file. The reader and YAML are imported here, because few processes need them."""
    from instrument.profile.keys import load

    return load(path)


def process_if_unaddressed(request: Request, now: Profile, file: Path | None) -> str:
    """Return a text that describes this process if a request is for other processes, else "".

    A request is for the processes whose own file it names. With `switch` it is for all processes of the service that
    the named profile is for. Raises `ProfileError`.
    """
    service, path = request.service, request.path
    if path is not None and not (file is not None and _is_same(Path(path), file)):
        if not request.switch:
            return _process_text(now)
        service = load_profile(path).service
    return "" if service in (None, now.service) else _process_text(now)


def _is_same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:  # one that is gone just now, as where a file is being replaced
        return first.resolve() == second.resolve()


def _process_text(profile: Profile) -> str:
    return f"it runs the service {profile.service} with {profile.source}"


def with_start_settings(profile: Profile, now: Profile) -> Profile:
    """Return a profile with the settings of `FIXED_SETTINGS` from the current profile, since a reload cannot change
    them."""
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


def refusals(profile: Profile, in_force: Profile) -> tuple[str, ...]:
    """Return a sentence per setting of `FIXED_SETTINGS` that differs between two profiles, with the reason."""
    from instrument.profile.keys import setting

    return tuple(
        f"{name} keeps its value until a restart: {why}"
        for name, why in FIXED_SETTINGS.items()
        if setting(profile, name) != setting(in_force, name)
    )


def change_rules(selection: Selection, now: Profile, to: Profile) -> tuple[list[str], list[str]]:
    """Attach the rules that are only in the profile `to`, and undo those that are only in `now`.

    Return the names of both. Raises `StateError` after a failure, which leaves the rules of `now` in force.
    """
    try:
        return selection.change(to)
    except Exception as fault:
        selection.change(now, anew=True)
        raise StateError(f"{to.source} could not be applied: {type(fault).__name__}: {fault}") from fault


class Generations:
    """The profiles of a session, one after the other, as code, the agent or a changed file replaces them.

    `enter(profile)` applies the settings of a profile whose rules are attached. `refine(profile)` applies the current
    profile with added rules. `has_ended()` returns True once the session has stopped. After a change, call `settle()`
    until it returns False.
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
        self.settle = session.selection.attach_unfinished
        self.file = file_of(session.profile, folder)
        self.lock = RLock()
        """The lock of the change from one profile to another."""
        self._engines: list[str] = []
        """The packages of engines whose rules were added."""

    def while_no_fork_comes(self, prepare: Callable[[], object]) -> None:
        """Call `prepare()` while forks wait. It imports modules, and a child would inherit a half-done import."""
        is_acquired = self.lock.acquire(timeout=FORK_WAIT_S)
        try:
            prepare()
        finally:
            if is_acquired:
                self.lock.release()

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a thread of the parent may have locked."""
        self.lock = RLock()

    def stop(self, deadline: Deadline) -> None:
        """Wait for the end of a reload on another thread."""
        if self.lock.acquire(timeout=deadline.left_s()):
            self.lock.release()  # it has ended; there is none from now on

    @property
    def watched(self) -> Path | None:
        """The profile's file if it is to be watched for changes, else None."""
        return self.file if self._session.profile.control.watch else None

    def prepare_to_watch(self) -> bool:
        """Import the reader of profiles if the profile's file is to be watched. Return True if so."""
        session = self._session
        if not session.profile.control.watch:
            return False
        from instrument.profile.keys import loads

        loads("")
        if self.file is None:
            source = session.profile.source
            session.account.complain(f"control.watch: the profile has no file to watch; it is {source}")
        return True

    def change(self, profile: Profile | str | os.PathLike[str] | None) -> Reload:
        """Change to another profile; see `Session.reload`."""
        session = self._session
        if profile is None and self.file is None:
            raise StateError(
                f"cannot reload: the profile of the session is no file ({session.profile.source}); give a file"
            )
        with self.lock:  # the file is read within, or of two callers the one that read first might be the last
            if self.has_ended():
                raise StateError("cannot reload: the session has been stopped; call instrument.start()")
            new_profile, file = read(profile, self.file)
            next_profile = self._with_engines(with_start_settings(new_profile, session.profile))
            attached: list[str] = []
            undone: list[str] = []
            if next_profile != session.profile:
                attached, undone = change_rules(session.selection, session.profile, next_profile)
            refused = session.account.refused = refusals(new_profile, next_profile)
            self.file = file
            self._apply(next_profile)
            return Reload(session.generation, session.digest, tuple(attached), tuple(undone), refused)

    def _with_engines(self, profile: Profile) -> Profile:
        from instrument.profile.keys import with_engine_preset

        for package in self._engines if profile.engines == "auto" else ():
            profile = with_engine_preset(profile, package)
        return profile

    def add_engine(self, package: str) -> None:
        """Add the rules of the preset for an engine, such as vLLM, before its modules are imported."""
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
        if len(to.functions) > len(now.functions) and mark not in board.marks():
            board.put([mark])
            logger.warning(
                "instrument: the service imports %s, so the rules of the preset %s apply, too (`instrument check "
                "--preset %s` prints them; `engines: off` leaves them out)",
                package, preset, preset,
            )  # fmt: skip

    def refuse(self, error: str) -> None:
        """Keep the reason why a profile was refused until another one is accepted."""
        self._session.account.refuse(f"the profile of generation {self._session.generation} stays in force: {error}")

    def answer(self, request: Request) -> Answer:
        """Fulfil a request of the agent or of a changed file. Return the answer as values for JSON."""
        session, path = self._session, request.path
        facts: dict[str, Any] = {"pid": os.getpid(), "service": session.profile.service}
        if request.records is not None:
            RECORDER.switch(on=request.records and not self.has_ended())
            return {**facts, "generation": session.generation, "records": RECORDER.on}
        try:
            if path is not None and Path(path).exists() and not Path(path).is_file():
                raise ProfileError([f"{path}: found no regular file; give the path of a profile"])
            with self.lock:  # reading may import YAML, and a fork in the middle would spoil it
                other_process = process_if_unaddressed(request, session.profile, self.file)
            if other_process:
                return {**facts, "generation": session.generation, "digest": session.digest, "other": other_process}
            result = self.change(path)
        except (InstrumentError, ValueError) as error:
            return {**facts, "generation": session.generation, "digest": session.digest, "error": str(error)}
        return {**facts, **result.facts()}
