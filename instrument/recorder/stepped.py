"""Coroutines whose calls are spans, as the recorder in Python steps them: each time that one is suspended is measured.

What is measured is for the span of the coroutine, and for those that begin inside of it; `_recorder_stepped.h` is the
twin.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any

from instrument.recorder.chains import CLOSED, Frame

if TYPE_CHECKING:
    from instrument.recording.spans import Site

_clock = time.monotonic_ns


class Stepped:
    """What a coroutine awaits, stepped and timed: it knows how long it was suspended.

    With a `site` its span begins with the first step and ends with the last; `results` gets what it gives before.
    """

    __slots__ = (
        "_attributes", "_awaited", "_core", "_results", "_site", "is_running", "own", "suspended_ns", "waited_ns",
    )  # fmt: skip

    def __init__(
        self,
        core: Any,
        awaited: Awaitable[Any],
        site: Site | None = None,
        attributes: dict[Any, Any] | None = None,
        results: Callable[[Any], object] | None = None,
    ) -> None:
        self._core = core
        self._awaited: Any = awaited
        self._site = site
        self._attributes = attributes
        self._results = results
        self.own: Frame | None = None
        self.waited_ns = self.suspended_ns = 0
        self.is_running = False

    def of(self, awaitable: Awaitable[Any]) -> Stepped:
        """The same for what is awaited next."""
        self._awaited = awaitable
        return self

    @property
    def has_ended(self) -> bool:
        """Whether nothing is awaited any more."""
        return self._awaited is None

    def __await__(self) -> Generator[Any, Any, Any]:
        core, site = self._core, self._site
        # As a coroutine: `throw` and `close` go to what is awaited.
        awaited = self._awaited.__await__()
        has_begun = False
        try:
            if site is not None and core.on:
                if core.passes and (passing := core.passes.get(site)) is not None:
                    passing.count()
                else:
                    self.own = core.open(site, self._attributes)
                    self.own[17], self.own[18] = self, 0
            value = thrown = None
            has_begun = True
            while True:
                ring = core._ring()
                around, ring.stepping = ring.stepping, self
                if self.suspended_ns:
                    self.waited_ns += _clock() - self.suspended_ns
                    self.suspended_ns = 0
                self.is_running = True
                try:
                    if thrown is None:
                        item = next(awaited) if value is None else awaited.send(value)
                    elif isinstance(thrown, GeneratorExit) or not hasattr(awaited, "throw"):
                        if hasattr(awaited, "close"):
                            awaited.close()
                        raise thrown
                    else:
                        item = awaited.throw(thrown)
                except StopIteration as done:
                    result = done.value
                    break
                finally:
                    self.is_running = False
                    ring.stepping = around
                self.suspended_ns = _clock()
                try:
                    value, thrown = (yield item), None
                except BaseException as error:
                    value, thrown = None, error
            if self._results is not None and (told := self._results(result)):
                self._core.annotate_innermost(told)
        except BaseException as error:
            if not has_begun and hasattr(self._awaited, "close"):
                self._awaited.close()  # a signal handler has raised: nobody awaits it any more
            self._end(error)
            raise
        else:
            self._end(None)
            return result
        finally:
            self._awaited = None  # an open span holds us, and is not to hold that
            thrown = None  # nor does what was thrown hold itself, by its traceback

    def _end(self, error: BaseException | None) -> None:
        own, self.own = self.own, None
        if own is not None and own[11] != CLOSED:
            self._core.close(own, error)


def waited_of(frame: Frame, now_ns: int) -> int:
    """How long an open span has waited: at least as long as its children, should nobody have seen it suspended."""
    around, waited_ns = frame[17], 0
    if around is not None:
        waited_ns = around.waited_ns - frame[18]
        if around.suspended_ns:
            waited_ns += now_ns - around.suspended_ns
    return int(max(min(max(waited_ns, frame[12] or 0), now_ns - frame[7]), 0))


def take_waited(frame: Frame, active_ns: int, waited_ns: int) -> int:
    """The span waited so long of its time; in `active_ns` it ran. Gives how much of that is of its own time.

    That is what its children have not waited; what they ran and it did not is theirs.
    """
    ran_ns = max(active_ns - (frame[4] - (frame[12] or 0)), 0)
    own_ns = active_ns + waited_ns - frame[4]
    frame[4] -= waited_ns
    return int(max(own_ns - ran_ns, 0))
