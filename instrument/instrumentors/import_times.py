"""The durations of imports: each top-level package by itself, and with all that it imports in turn.

Python calls one function of its import system for every module that is not in `sys.modules` yet. While imports are
watched, that function is ours, and calls the real one; loaders, specs and modules are as they would be. A module that
its own package imports costs 0.3 us more, one of another package 2.6 us.

What we import ourselves, such as the bindings of a driver, is no doing of the service: it goes by the name of this
package, with its own in brackets.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

from instrument.recording.spans import ImportTime
from instrument.runtime.unpatched import Lock

Undo = Callable[[], None]

LIMIT = 2_000
"""The most packages with a row of their own; the rest are one more."""

OTHERS = "(other packages)"

NEWEST = 4_096
"""The most newest imports that are remembered by their begin; 0.1 KB each."""

OWN = __name__.partition(".")[0]

_IMPORTERS = frozenset({"importlib", "_frozen_importlib"})
"""The packages whose frames lie between who asks for an import and the function that is ours."""

_clock = time.monotonic_ns


class _Importing:
    """A package that a thread is importing; `others_ns` went into other packages' modules below it."""

    __slots__ = ("began_ns", "is_ours", "is_outermost", "others_ns", "package")

    def __init__(self, package: str, is_outermost: bool, is_ours: bool) -> None:
        self.package = package
        self.is_ours = is_ours
        self.is_outermost = is_outermost
        self.others_ns = 0
        self.began_ns = _clock()


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Importing] = []


class ImportTimes:
    """The imports since `install`. `is_inside` is True while a span of the recorder is open on the calling thread."""

    def __init__(self, is_inside: Callable[[], object]) -> None:
        self._is_inside = is_inside
        self.after_fork_in_child()
        self.why_not = ""

    def after_fork_in_child(self) -> None:
        """Begin anew: what the parent imported is there already."""
        self._local = _Local()
        self._lock = Lock()
        self._packages: dict[str, list[int]] = {}
        self._newest: deque[tuple[int, str, int]] = deque(maxlen=NEWEST)

    def install(self) -> Undo:
        """Watch imports from now on; returns the way back. Where Python has no such function, `why_not` says so."""
        bootstrap: Any = sys.modules.get("_frozen_importlib")
        original = getattr(bootstrap, "_find_and_load", None)
        if not isinstance(original, FunctionType):
            self.why_not = "imports are not timed: this Python does not import by _find_and_load"
            return lambda: None
        watching = True
        end = self._end

        def _find_and_load(name: str, *rest: Any) -> Any:
            stack = self._local.stack
            package = name.partition(".")[0]
            if (stack and stack[-1].package == package) or not watching:
                return original(name, *rest)
            is_ours = (bool(stack) and stack[-1].is_ours) or _asked_by_us(sys._getframe().f_back)
            importing = _Importing(package, all(above.package != package for above in stack), is_ours)
            stack.append(importing)
            try:
                return original(name, *rest)
            finally:
                end(stack, importing)

        # Python leaves frames of the import system out of tracebacks, which it knows by this name of their file.
        _find_and_load.__code__ = _find_and_load.__code__.replace(co_filename=original.__code__.co_filename)
        functools.update_wrapper(_find_and_load, original)
        bootstrap._find_and_load = _find_and_load

        def undo() -> None:
            nonlocal watching
            watching = False
            if bootstrap._find_and_load is _find_and_load:
                bootstrap._find_and_load = original

        return undo

    def _end(self, stack: list[_Importing], importing: _Importing) -> None:
        took_ns = _clock() - importing.began_ns
        stack.remove(importing)
        if stack:
            stack[-1].others_ns += took_ns
        self_ns = max(took_ns - importing.others_ns, 0)
        inside_ns = self_ns if self._is_inside() else 0
        package = importing.package
        if importing.is_ours and package != OWN:
            package = f"{OWN} ({package})"
        with self._lock:
            sums = self._packages.get(package)
            if sums is None:
                package = package if len(self._packages) < LIMIT else OTHERS
                sums = self._packages.setdefault(package, [0, 0, 0, 0])
            sums[0] += 1
            sums[1] += took_ns if importing.is_outermost else 0
            sums[2] += self_ns
            sums[3] += inside_ns
            self._newest.append((importing.began_ns, package, self_ns - inside_ns))

    def packages(self, request_ns: int | None = None) -> tuple[ImportTime, ...]:
        """Return the imports up to now, by package. Modules that are being imported are not in it.

        `request_ns` is when the first request began; of the imports after it the `NEWEST` are known.
        """
        late: Counter[str] = Counter()
        with self._lock:
            for began_ns, package, outside_ns in self._newest:
                if request_ns is not None and began_ns >= request_ns:
                    late[package] += outside_ns
            return tuple(
                ImportTime(package, entries, total_ns, self_ns, in_spans_ns, late[package])
                for package, (entries, total_ns, self_ns, in_spans_ns) in self._packages.items()
            )


def _asked_by_us(frame: FrameType | None) -> bool:
    """Return True where the frame that asked for an import, below those of the import system, runs a module of ours.

    There is none where the interpreter itself asks, for `python -m`.
    """
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _IMPORTERS:
            return package == OWN
        frame = frame.f_back
    return False
