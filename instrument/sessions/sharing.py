"""The session that loops share: a loop joins a running session or begins one, and the last loop to leave ends it.

Without a profile, in its call or in the environment, a loop records with `EVERYTHING`: phases, the wait for batches,
communication, every layer, copies, and the use of process and machine.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from instrument.errors import StateError
from instrument.native import OFF
from instrument.profile.keys import load
from instrument.profile.model import EVERYTHING, Profile
from instrument.runtime.cheap_start import replace
from instrument.sessions import process
from instrument.sessions.session import Session
from instrument.sessions.torch_profiler import TorchOptions, TorchProfiler


def records_everything(session: Session) -> bool:
    """Return True if a loop began the session without a profile."""
    return session.profile.source == EVERYTHING.source


def torch_profiler_for(session: Session, options: TorchOptions, state: str | None = None) -> TorchProfiler | None:
    """Return a driver of torch.profiler for a loop; None if it is not wanted. By default only `EVERYTHING` wants it."""
    if options.is_wanted is False or (options.is_wanted is None and not records_everything(session)):
        return None
    is_of_host = (state or session.profile.state) == "CPU"
    return TorchProfiler(options, session.account.complain, host_only=is_of_host)


_guests: dict[Session, int] = {}
_guests_lock = threading.RLock()


def join(profile: Profile | str | os.PathLike[str] | None, **overrides: str | None) -> Session | None:
    """Return the session for a loop: the running one, else one that begins here. Return None with `INSTRUMENT=off`."""
    if OFF:
        return None
    settings: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    with _guests_lock:
        try:
            running = process.session()
        except StateError:
            source = profile or os.environ.get("INSTRUMENT_PROFILE") or EVERYTHING
            chosen = source if isinstance(source, Profile) else load(source)
            session = process.start(replace(chosen, **settings))
            if session is not None:
                _guests[session] = 1
            return session
        if profile is not None:
            source = profile.source if isinstance(profile, Profile) else os.fspath(profile)
            raise StateError(
                f"a Profiler with the profile {source} cannot start: a session with {running.profile.source} runs; "
                "leave the profile out, or stop the session"
            )
        if settings.get("state", "CPU") != "CPU" and running.profile.state == "CPU":
            raise StateError(
                f"a Profiler with state {settings['state']} cannot start: the session with {running.profile.source} "
                "has state CPU, without device times; leave the state out, or change the profile"
            )
        if running in _guests:
            _guests[running] += 1
        return running


def leave(session: Session) -> None:
    """End the session with its last loop, if a loop began it."""
    with _guests_lock:
        if session not in _guests:
            return
        _guests[session] -= 1
        if not _guests[session]:
            del _guests[session]
            session.stop()
