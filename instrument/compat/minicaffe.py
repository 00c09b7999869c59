"""The profiler of Mini-Caffe: `enable`, `disable`, `open_scope`, `close_scope`, `dump`.

The states are those of Mini-Caffe: scopes do nothing while it is off, it cannot be disabled with open scopes, and each
thread closes its own scopes. Differences: `dump` is allowed at any time and drops nothing. It writes slices in lanes of
their threads, in nanoseconds. Each thread has scopes of its own, which end with the thread at the latest. A name is the
argument itself, not the path. The end of the session disables it, even with open scopes.

If no session runs, `enable` begins one by the profile in `INSTRUMENT_PROFILE`, else one that also records the layers of
torch's models, each by its class. A session that ran before continues after `disable`.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from instrument.errors import StateError
from instrument.native import OFF
from instrument.profile.model import LayerRule, Profile
from instrument.recorder.recorder import RECORDER, Scope
from instrument.sessions import process
from instrument.sessions.profiler import join
from instrument.sessions.session import Session

EVERY_LAYER = Profile(layers=(LayerRule(match=("**",), text="every layer"),), source="instrument.compat.minicaffe")


class _Opened(threading.local):
    """The open scopes of a thread, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        with _lock:
            _scopes_of[threading.current_thread()] = self.scopes


_lock = threading.RLock()
_scopes_of: dict[threading.Thread, list[Scope]] = {}
_opened = _Opened()
_is_on = False
_looked_at: Session | None = None
_own: Session | None = None


def enable() -> None:
    """Start or resume recording. Raises `StateError` if it is on."""
    global _is_on, _looked_at, _own
    with _lock:
        if _is_on and not _has_ended():
            raise StateError("the profiler is already on; call disable() first")
        _forget_scopes()
        running = _running()
        if running is None:
            _own = join(None if os.environ.get("INSTRUMENT_PROFILE") or OFF else EVERY_LAYER)
        elif running is _own:
            process.enable()
        _looked_at = running or _own
        _is_on = True


def disable() -> None:
    """Stop recording. The spans can still be dumped. Raises `StateError` if it is off or scopes are open."""
    global _is_on
    with _lock:
        if not _is_on:
            raise StateError("the profiler is off; call enable() first")
        if _has_ended():
            _forget_scopes()
        count = sum(len(scopes) for thread, scopes in _scopes_of.items() if thread.is_alive())
        if count:
            raise StateError(f"the profiler has {count} open scopes; call close_scope() first")
        if _own is not None and _running() is _own:
            process.disable()
        _is_on = False


def open_scope(name: str) -> None:
    """Begin a scope within this thread's open one. Does nothing while the profiler is off."""
    if _is_on:
        _opened.scopes.append(RECORDER.make_scope(name).start())


def close_scope() -> None:
    """End this thread's innermost scope. Does nothing while the profiler is off. Raises `StateError` without one."""
    if not _is_on:
        return
    if not _opened.scopes:
        raise StateError("this thread has no open scope to close; call open_scope(name) first")
    _opened.scopes.pop().end()


def dump(path: str | os.PathLike[str]) -> Path:
    """Write all spans recorded so far as a Chrome trace. Raises `StateError`, `TraceError`."""
    return process.dump(path)


def now() -> int:
    """Return the time in microseconds on the clock of the spans."""
    return time.monotonic_ns() // 1000


def _has_ended() -> bool:
    """Return True if the session of the profiler has ended."""
    return _looked_at is not None and _running() is not _looked_at


def _forget_scopes() -> None:
    """Drop the scopes of ended threads, and end the open scopes of an ended session."""
    for thread, scopes in list(_scopes_of.items()):
        if not thread.is_alive():
            del _scopes_of[thread]
            continue
        while scopes:
            scopes.pop().end()


def _running() -> Session | None:
    try:
        return process.session()
    except StateError:
        return None
