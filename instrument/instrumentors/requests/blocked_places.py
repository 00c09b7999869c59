"""Places at which event loops are blocked, seen by a thread that looks at a loop's frames while a callback runs on.

There is no such thread until a callback has been too slow, and none any more once none has been for a while: who blocks
a loop does so again and again. Until then a callback costs a look at one variable.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import Counter
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any

from instrument.recorder.recorder import Recorder
from instrument.recording.spans import BLOCKED_AT
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import get_ident, sleep

STACK = "code.stacktrace"
"""OpenTelemetry's attribute of a stack (semantic conventions, code)."""

LONGEST_LOOK_S = 0.05
"""The most seconds between two looks."""

REST_NS = 60_000_000_000
"""Nanoseconds without a slow callback after which the looks stop."""

FRAMES = 32
"""The innermost frames that are looked through for one of the service's own."""


class LoopPlaces:
    """The places of one recorder's loops, for callbacks that take longer than `limit_ns`.

    While it `is_on` each callback is announced by `begin` and `end`, on the loop's thread.
    """

    def __init__(self, recorder: Recorder, limit_ns: int) -> None:
        self._recorder = recorder
        self._look_s = min(limit_ns / 2e9, LONGEST_LOOK_S)
        self._begun: dict[int, int] = {}
        self._seen: dict[tuple[int, int], Counter[tuple[str, ...]]] = {}
        self._slow_ns = 0
        self._thread: Thread | None = None
        self.is_on = False

    def begin(self, begun_ns: int) -> None:
        """A callback begins on this thread."""
        self._begun[get_ident()] = begun_ns

    def end(self) -> None:
        """The callback has ended."""
        self._begun[get_ident()] = 0

    def met(self, begun_ns: int) -> tuple[str, ...]:
        """Return where the slow callback that began then mostly was, the innermost place first; nothing if unseen.

        From now on somebody looks.
        """
        self._slow_ns = self._recorder.now_ns()
        if self._thread is None or not self._thread.is_alive():
            self._begun.clear()
            self.is_on = True
            self._thread = Thread(self._run, "instrument-loops", lambda: self.is_on)
            self._thread.start()
        seen = self._seen.pop((get_ident(), begun_ns), None)
        return seen.most_common(1)[0][0] if seen else ()

    def stop(self) -> None:
        """Look no more."""
        self.is_on = False

    def _run(self) -> None:
        while self.is_on:
            sleep(self._look_s)
            now_ns = self._recorder.now_ns()
            slow = [(ident, ns) for ident, ns in list(self._begun.items()) if ns and now_ns - ns > self._look_s * 1e9]
            if slow:
                self._look(slow)
            elif now_ns - self._slow_ns > REST_NS:
                self.is_on = False
                self._seen.clear()

    def _look(self, slow: list[tuple[int, int]]) -> None:
        """Note the present places of slow callbacks. Forget the callbacks that are slow no more."""
        frames = sys._current_frames()
        for key in [key for key in self._seen if key not in slow]:
            del self._seen[key]
        for ident, begun_ns in slow:
            frame = frames.get(ident)
            if frame is not None:
                stack = stack_of(frame)
                if self._begun.get(ident) == begun_ns:  # else it is one of the next callback
                    self._seen.setdefault((ident, begun_ns), Counter())[stack] += 1


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """The places of a stack from the innermost frame of the service's own code outwards; of all where none is its own.

    A frame of ours ends it, which runs the callback.
    """
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < FRAMES and not _is_ours(frame):
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    own = next((number for number, (code, _) in enumerate(found) if _is_own(code)), 0)
    return tuple(_place(code, line) for code, line in found[own:])


def _place(code: CodeType, line: int) -> str:
    return f"{PurePath(code.co_filename).name}:{line} {getattr(code, 'co_qualname', code.co_name)}"


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("instrument.")


_own: dict[CodeType, bool] = {}
"""The code objects that were met, and whether they are of the service's own code."""


def _is_own(code: CodeType) -> bool:
    found = _own.get(code)
    if found is None:
        found = not code.co_filename.startswith(("<", *_INSTALLED))
        if len(_own) < 10_000:
            _own[code] = found
    return found


_INSTALLED: tuple[str, ...] = tuple(
    {path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
)
"""The folders of the standard library and of what is installed."""


def attributes_of(stack: tuple[str, ...], limit: int) -> dict[Any, str]:
    """The attributes of a stretch that say where it was: as many places of the stack as there is room for."""
    if not stack:
        return {}
    text = stack[0][:limit]
    for place in stack[1:]:
        if len(text) + len(place) + 1 > limit:
            break
        text += f"\n{place}"
    return {BLOCKED_AT: stack[0][:limit], STACK: text}
