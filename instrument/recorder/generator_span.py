"""The spans of generators, as the recorder in Python times them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from instrument.recorder.chains import CLOSED, Frame, nearest_open, task_id, upwards
from instrument.recorder.stepped import Stepped
from instrument.recording.spans import FIRST_ITEM, ITEMS, LAST_ITEM, LONGEST_GAP, Site

if TYPE_CHECKING:
    from instrument.recorder.pure import Core

_clock = time.monotonic_ns


class Stretch:
    """A generator's span: current only while the body runs, its active time against whoever resumed it."""

    __slots__ = (
        "_active_ns", "_attributes", "_caller", "_core", "_first_item_ns", "_inner", "_items", "_last_item_ns",
        "_longest_gap_ns", "_parent", "_resumed_ns", "_site", "_stepped", "_suspended_ns", "_waited_told_ns", "frame",
    )  # fmt: skip

    def __init__(self, core: Core, site: Site, attributes: dict[Any, Any] | None = None) -> None:
        self._core = core
        self._site = site
        self._attributes = attributes
        self.frame: Frame | None = None
        self._caller: Frame | None = None
        self._inner: Frame | None = None
        self._parent: Frame | None = None
        self._active_ns = 0
        self._resumed_ns = 0
        self._suspended_ns = 0
        self._stepped: Stepped | None = None
        self._waited_told_ns = 0
        self._items = self._first_item_ns = self._last_item_ns = self._longest_gap_ns = 0

    def resume(self) -> bool | None:
        """The body goes on. True where its site is muted: it has begun no span then, or has ended the one that it had.

        One that has scopes open inside waits until they are closed.
        """
        core, frame = self._core, self.frame
        if core.passes and (frame is None or self._inner is frame):
            passing = core.passes.get(self._site)
            if passing is not None:
                if frame is None:
                    passing.count()
                else:
                    passing.cut += 1
                self.finish(None)
                return True
        if frame is None:
            self._caller = core._current.get()
            frame = self.frame = core.open(self._site, self._attributes)
            frame[17] = None  # who resumes it may wait while it stands still
            self._parent = frame[6]
            frame[15] = None
            core._begun_in[frame[1]] = frame[6]
            self._resumed_ns = frame[7]
            return None
        inner = self._inner
        if inner is None:
            return None
        now = _clock()
        gap_ns = now - self._suspended_ns
        ring, task = core._ring(), task_id()
        self._caller = core._current.get()
        self._inner = None
        core._current.set(inner)
        frame[6] = nearest_open(self._caller)
        for own in () if inner is frame else upwards(inner):
            if own is frame:
                break
            # A scope left open across a yield did not work meanwhile.
            core._renew(own)
            own[4] += gap_ns
            own[9] += gap_ns
            own[5], own[8] = ring, task
            if own[17] is None and (around := ring.stepping) is not None and around.is_running and own[12] is not None:
                own[17], own[18] = around, around.waited_ns - own[18]
        frame[5], frame[8] = ring, task
        if core._writer is not None:
            core._writer.begin(frame)
        ring.steps[frame[16]] = ring.steps.get(frame[16], 0) + 1
        self._resumed_ns = now
        if frame[13] is not None:
            frame[13].resume()
        return None

    def suspend(self) -> None:
        """The body stands still, or has ended."""
        core, frame = self._core, self.frame
        if frame is None or self._inner is not None:
            return
        now = _clock()
        step_ns = now - self._resumed_ns
        self._active_ns += step_ns
        self._suspended_ns = now
        inner = core._current.get()
        if inner is not frame and all(above is not frame for above in upwards(inner)):
            return  # ended elsewhere
        self._inner = inner
        if self._stepped is None and inner is not None and inner is not frame:
            self._leave_steps(inner, now)
        caller, self._caller = self._caller, None
        above, frame[6] = frame[6], None
        core._current.set(caller)
        if above is not None and above[5] is frame[5] and above[8] == frame[8]:
            above[4] += step_ns
            if self._stepped is not None and above[12] is not None:
                above[12] += self._stepped.waited_ns - self._waited_told_ns
                self._waited_told_ns = self._stepped.waited_ns
        if frame[13] is not None:
            frame[13].pause()

    def _leave_steps(self, inner: Frame, now_ns: int) -> None:
        """Scopes stand still with it: what is awaited around them meanwhile is none of their waiting."""
        for own in upwards(inner):
            if own is self.frame:
                break
            if own[17] is not None:
                own[18] = own[17].waited_ns - own[18] + (now_ns - (own[17].suspended_ns or now_ns))
                own[17] = None

    def stepped(self, awaitable: Any) -> Any:
        """What awaits a step of the body, which may be suspended in it."""
        frame = self.frame
        if frame is None or frame[11] == CLOSED:
            return awaitable
        if self._stepped is None:
            self._stepped = frame[17] = Stepped(self._core, awaitable)
            frame[18] = 0
        return self._stepped.of(awaitable)

    def yielded(self) -> None:
        """The body stands still, for it has yielded an item."""
        self.suspend()
        if self._inner is None:
            return
        now = self._suspended_ns
        if not self._items:
            self._first_item_ns = now
        else:
            self._longest_gap_ns = max(self._longest_gap_ns, now - self._last_item_ns)
        self._last_item_ns = now
        self._items += 1

    def _tell_items(self, frame: Frame) -> None:
        """Tell of its items, but for what the service has set by the same names."""
        begun = frame[7]
        facts = {ITEMS: self._items, FIRST_ITEM: self._first_item_ns - begun, LAST_ITEM: self._last_item_ns - begun}
        if self._items > 1:
            facts[LONGEST_GAP] = self._longest_gap_ns
        self._core.annotate(frame, {**facts, **(frame[10] or {})})

    def finish(self, error: BaseException | None) -> None:
        """The generator has ended, with this exception or None."""
        frame = self.frame
        if frame is None or frame[11] == CLOSED:
            return
        core = self._core
        if self._inner is None:  # a signal handler has ended it in the middle of a step
            pair, frame[13] = frame[13], None
            self.suspend()
            frame[13] = pair
        end = _clock()
        if self._items:
            self._tell_items(frame)
        core._open.pop(frame[1], None)
        core._begun_in.pop(frame[1], None)
        frame[11] = CLOSED
        frame[6], self._parent = nearest_open(self._parent), None
        self._inner = None
        ring = core._ring()
        waited_ns = 0 if self._stepped is None else min(self._stepped.waited_ns, self._active_ns)
        frame[17] = None
        name = None if error is None else core._error_of(frame, error)
        core._store(ring, frame, end, self._active_ns - waited_ns, name, waited_ns)
        if frame[13] is not None:
            core._end_on_device(ring, frame, end)
