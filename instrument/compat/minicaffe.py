"""A substitute for the profiler of Mini-Caffe: `enable`, `disable`, `open_scope`, `close_scope`, `dump`.

Differences: `dump` is allowed at any time and keeps the spans. Its file has a track per thread, with times in
nanoseconds. A span has only the name that is passed to `open_scope`.

If no session runs, `enable` begins a session with the profile in `INSTRUMENT_PROFILE`. Without that variable, the
session records the scopes and every layer of torch models.
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
from instrument.sessions.profiler import join_or_begin_session
from instrument.sessions.session import Session

EVERY_LAYER = Profile(layers=(LayerRule(match=("**",), text="every layer"),), source="instrument.compat.minicaffe")


class _OpenScopes(threading.local):
    """The open scopes of a thread, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        with _lock:
            _scopes_by_thread[threading.current_thread()] = self.scopes


_lock = threading.RLock()
_scopes_by_thread: dict[threading.Thread, list[Scope]] = {}
_open_scopes = _OpenScopes()
_is_on = False
_session: Session | None = None
_own_session: Session | None = None


def enable() -> None:
    """Start or resume recording. Raises `StateError` if the profiler is on."""
    global _is_on, _session, _own_session
    with _lock:
        if _is_on and not _is_session_over():
            raise StateError("the profiler is already on; call disable() first")
        _close_scopes()
        session = process.running_session()
        if session is None:
            _own_session = join_or_begin_session(None if os.environ.get("INSTRUMENT_PROFILE") or OFF else EVERY_LAYER)
        elif session is _own_session:
            process.enable()
        _session = session or _own_session
        _is_on = True


def disable() -> None:
    """Stop recording. The spans are kept for `dump`. Raises `StateError` if the profiler is off, or if scopes are
    open."""
    global _is_on
    with _lock:
        if not _is_on:
            raise StateError("the profiler is off; call enable() first")
        if _is_session_over():
            _close_scopes()
        count = sum(len(scopes) for thread, scopes in _scopes_by_thread.items() if thread.is_alive())
        if count:
            raise StateError(f"the profiler has {count} open scopes; call close_scope() first")
        if _own_session is not None and process.running_session() is _own_session:
            process.disable()
        _is_on = False


def open_scope(name: str) -> None:
    """Begin a scope within the innermost open scope of this thread. If the profiler is off, nothing happens."""
    if _is_on:
        _open_scopes.scopes.append(RECORDER.make_scope(name).start())


def close_scope() -> None:
    """End the innermost open scope of this thread. If the profiler is off, nothing happens. Raises `StateError` if no
    scope is open."""
    if not _is_on:
        return
    if not _open_scopes.scopes:
        raise StateError("this thread has no open scope to close; call open_scope(name) first")
    _open_scopes.scopes.pop().end()


def dump(path: str | os.PathLike[str]) -> Path:
    """Write all spans recorded so far as a Chrome trace. Raises `StateError` if no session has begun, and `TraceError`
    if the file cannot be written."""
    return process.dump(path)


def now() -> int:
    """Return the current time in microseconds. Spans have the same clock, CLOCK_MONOTONIC."""
    return time.monotonic_ns() // 1000


def _is_session_over() -> bool:
    return _session is not None and process.running_session() is not _session


def _close_scopes() -> None:
    for thread, scopes in list(_scopes_by_thread.items()):
        if not thread.is_alive():
            del _scopes_by_thread[thread]
            continue
        while scopes:
            scopes.pop().end()
