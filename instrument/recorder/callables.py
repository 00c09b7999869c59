"""What calls and blocks become that the recorder in Python times, or lets pass while they are muted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

from instrument.recorder.chains import OPEN, Frame
from instrument.recording.spans import Site


class Pass:
    """Counts the calls of a muted site. To a wrapper it is a recorder that is off, which counts who asks."""

    __slots__ = ("_by_thread", "_core", "cut")

    def __init__(self, core: Any) -> None:
        self._core = core
        self.cut = 0  # spans of generators that were ended early
        self._by_thread: dict[int, int] = {}  # each thread adds to its own, or some would be lost

    @property
    def calls(self) -> int:
        """Calls that passed."""
        return sum(self._by_thread.copy().values())

    @property
    def on(self) -> bool:
        """False, whoever asks; it is counted as a call."""
        self.count()
        return False

    def count(self) -> None:
        """Count a call."""
        if self._core.on:
            thread, by_thread = threading.get_ident(), self._by_thread
            by_thread[thread] = by_thread.get(thread, 0) + 1


class Scope:
    """A span around a block."""

    __slots__ = ("_attributes", "_frame", "_recorder", "_site")

    def __init__(self, recorder: Any, site: Site, attributes: dict[Any, Any] | None = None) -> None:
        self._recorder = recorder
        self._site = site
        self._attributes = attributes
        self._frame: Frame | None = None

    def __enter__(self) -> Scope:
        recorder = self._recorder
        if recorder.on and self._frame is None:
            if recorder.passes and (passing := recorder.passes.get(self._site)) is not None:
                passing.count()
            else:
                self._frame = recorder.open(self._site, self._attributes)
        return self

    def annotate(self, attributes: Any = None, /, **more: Any) -> None:
        """Set attributes of the span; see `instrument.annotate`."""
        if self._frame is not None:
            self._recorder.annotate(self._frame, self._recorder._annotate_checked(attributes, more))

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        frame, self._frame = self._frame, None
        if frame is not None:
            self._recorder.close(frame, error)

    def __del__(self) -> None:
        """End what was entered and dropped: nobody is left who could."""
        frame = getattr(self, "_frame", None)
        if frame is not None and frame[11] == OPEN:
            self._recorder.close(frame)


def make_function(
    core: Any,
    function: Callable[..., Any],
    site: Site,
    works: Callable[[tuple[Any, ...], dict[str, Any]], dict[Any, Any] | None] | None = None,
) -> Any:
    """A function with a span around each call. `works` is asked of those whose device time is."""
    open_, close = core.open, core.close
    switch = core  # what counts the calls while the site is muted, see `instrument.recorder.wrapping.turn`

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.on:
            return function(*args, **kwargs)
        told = None if works is None or not (site.device or core.watches_all) else works(args, kwargs)
        frame: Frame | None = None
        # All of it in one `try`: a signal handler may raise after any call.
        try:
            frame = open_(site, told)
            frame[12] = frame[17] = None  # a function cannot be suspended, whatever it calls
            result = function(*args, **kwargs)
            close(frame)
            return result
        except BaseException as error:
            if frame is not None and frame[11] == OPEN:
                close(frame, error)
            raise

    return wrapper


def make_method(
    core: Any,
    function: Any,
    sites: dict[int, Site | None],
    decide: Callable[[Any], Site | None],
    is_traced: Callable[[], bool],
) -> Any:
    """A method around the method, which records where the instance has a site."""
    open_, close, passes = core.open, core.close, core.passes

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        # First of all, for it is all that a compiler may see of us: a graph must not break here.
        if is_traced() or not core.on:
            return function(self, *args, **kwargs)
        key = id(self)
        site = sites[key] if key in sites else decide(self)
        if site is None:
            return function(self, *args, **kwargs)
        if passes and (passing := passes.get(site)) is not None:
            passing.count()
            return function(self, *args, **kwargs)
        frame = open_(site)
        try:
            result = function(self, *args, **kwargs)
        except BaseException as error:
            close(frame, error)
            raise
        close(frame)
        return result

    # With the globals of the original (the body needs none of ours), torch.jit.script resolves names as before.
    return FunctionType(wrapper.__code__, function.__globals__, function.__name__, None, wrapper.__closure__)
