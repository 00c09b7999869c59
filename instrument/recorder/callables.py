"""What calls and blocks become that the recorder in Python times, or lets pass while they are muted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

from instrument.recorder import chains
from instrument.recorder.annotation import error_told
from instrument.recorder.chains import OPEN, Chain, Frame, ended_row, nearest_open, task_id, task_probe, top_of
from instrument.recording.spans import Site

_clock = time.monotonic_ns


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
    """A function around the function: `open`, the call and `close` in one body, three Python calls fewer."""
    current = core._current
    get, set_ = current.get, current.set
    next_id = core._next_id
    switch = core  # what counts the calls while the site is muted, see `instrument.recorder.wrapping.turn`
    clock = _clock
    device = site.device

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not switch.on:
            return function(*args, **kwargs)
        if device or core.watches_all:
            with Scope(core, site, None if works is None else works(args, kwargs)):
                return function(*args, **kwargs)
        try:
            ring = core._rings.local.ring
        except AttributeError:
            ring = core._rings.new()
        place = get()
        # What `task_probe` answers; its call would cost more than the rest of this branch.
        if (
            ("asyncio" not in chains.modules or task_probe() < 0)
            if chains.running_loop is None
            else (chains.running_loop() is None)
        ):
            chain = place if place.__class__ is Chain and place.ring is ring else core._chain(place, ring)
            parent = chain.top
            task = 0
            held = None
        else:
            chain = None
            parent = top_of(place)
            task = task_id()
            held = place if place.__class__ is Chain else None
        span_id = next_id()
        start = clock()
        frame: Frame
        top = parent
        if parent is None:
            node = core._root.children.get(site) or core._node(core._root, site)
            index = node.index
            frame = [
                node, span_id, 0, span_id, 0, ring, None, start, task, start, None, 1, held, None, None, None, index,
                None, 0, None,
            ]  # fmt: skip
        elif parent[11]:
            above = parent[0]
            node = above.children.get(site) or core._node(above, site)
            index = node.index if node.inner is None else core._index(node, parent, ring)
            frame = [
                node, span_id, parent[1], parent[3], 0, ring, parent, start, task, start, None, 1, held, None,
                parent[14], None, index, None, 0, None,
            ]  # fmt: skip
        else:
            frame = core._new_frame(site, span_id, parent, ring, task, None, 1, held)
            node, parent, index = frame[0], frame[6], frame[16]
            frame[17], frame[19] = None, None
        # All of it in one `try`: a signal handler may raise after any call.
        try:
            if chain is None:
                core._apart[span_id] = frame
                set_(frame)
            else:
                chain.top = frame
            ring.top = frame
            frame[7] = frame[9] = start = clock()
            if core._writer is not None:
                core._writer.begin(frame)
            result = function(*args, **kwargs)
            end = clock()
            if get() is not (chain or frame) or frame[6] is not parent:
                core.close(frame)
                return result
            if chain is None:
                core._apart.pop(span_id, None)
                set_(place)
            elif chain.top is frame:
                chain.top = top
            else:
                core.close(frame)
                return result
            frame[11] = 0
        except BaseException as error:
            if frame[11]:
                core.close(frame, error)
            raise
        ring.top = parent
        if parent is not None:
            frame[6] = parent if parent[11] else nearest_open(parent)
            if parent[5] is ring and parent[8] == task:
                parent[4] += end - start
                if core._writer is not None:
                    core._writer.add_children(parent)
        if ring.ended:  # by a reset
            ring = core._ring()
            core._renew(frame)
        head = ring.head
        error_name = error_told(frame[10], None) if frame[10] else None
        ring.rows[head & ring.mask] = row = ended_row(frame, end, -1, error_name)
        ring.head = head = head + 1
        if core._writer is not None:
            core._write(ring, frame, row)
        if not head & ring.fold_mask:
            ring.fold(core._nodes)
        return result

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
