"""Blocked event loops: callbacks of asyncio's loops that took longer than `limits.blocked` while a request was open.

`Handle._run` is what the loops of asyncio run each callback and each step of a task with. While this is at work it
reads the clock before and after, 0.2 us a callback; who it was is looked for after the slow ones alone. Where it was
`blocked_places` has seen.

uvloop's loops run their callbacks in C. There the ways to have one run soon or later are met, by which steps of tasks
go, too, and what is handed on reads the clock: 0.7 us a step, 1.2 us a function. What such a loop calls by itself is
not seen: methods of protocols, such as `data_received`, readers and writers.

Garbage collections of Python that took longer are recorded, too: no thread of the process goes on meanwhile. The
interpreter reports the begin and the end of each, on the thread that it interrupts: 0.8 us for both.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from pathlib import PurePath
from threading import get_native_id
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from instrument.instrumentors.functions import Undo, replace
from instrument.instrumentors.requests.blocked_places import LoopPlaces, attributes_of
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.rows import END_NS, SPAN_ID, START_NS, Row, is_request_root
from instrument.recording.spans import BLOCKED_BY, BLOCKED_LOOP, COLLECTION, VALUE_LIMIT, Site
from instrument.runtime.faults import FAULTS

MODULE = "asyncio.events"
"""Where the handles of asyncio's loops are."""

UVLOOP = "uvloop"
"""Where uvloop's loops are."""

NEWEST = 256
"""So many of a thread's newest rows are looked at for who it was: what covers most of a stretch ends near its end."""

OPEN_LIMIT = 1_000
"""With more open requests than these it costs too much to look through all that is open."""

BLOCKERS_KNOWN = 100
"""Sites that are counted which have blocked a loop, at most."""

NEVER_NS = 1 << 62


def attach(module: ModuleType, limit_ns: int, recorder: Recorder = RECORDER) -> list[Undo]:
    """`asyncio.events` is imported: record the callbacks that take longer than this from now on.

    Raises `AttributeError` or `TypeError` in a version that has no such place.
    """
    handle: Any = module.Handle
    run, now = handle._run, recorder.now_ns
    if not isinstance(run, FunctionType):
        raise TypeError(f"Handle._run is a {type(run).__name__}")

    places = LoopPlaces(recorder, limit_ns)

    @functools.wraps(run)
    def _run(self: Any) -> None:
        begun_ns = now()
        if places.is_on:
            places.begin(begun_ns)
        run(self)
        if now() - begun_ns > limit_ns:
            _note(recorder, self._callback, self._context.run, begun_ns, places)
        if places.is_on:
            places.end()

    restore = replace(handle, "_run", _run)

    def undo() -> None:
        nonlocal limit_ns
        limit_ns = NEVER_NS  # whoever has taken it for their own calls it on
        places.stop()
        restore()

    return [undo]


def attach_uvloop(module: ModuleType, limit_ns: int, recorder: Recorder = RECORDER) -> list[Undo]:
    """`uvloop` is imported: record the callbacks of its loops likewise.

    Raises `AttributeError` in a version that has no such place.
    """
    owner: Any = module.Loop
    now = recorder.now_ns

    places = LoopPlaces(recorder, limit_ns)

    def step(loop: Any, callback: Any, *args: Any) -> None:
        begun_ns = now()
        if places.is_on:
            places.begin(begun_ns)
        callback(*args)
        if now() - begun_ns > limit_ns:
            _note(recorder, callback, _run_here, begun_ns, places)
        if places.is_on:
            places.end()

    def timing(name: str) -> Undo:
        original = getattr(owner, name)

        @functools.wraps(original)
        def soon(self: Any, callback: Any, *args: Any, context: Any = None) -> Any:
            if type(callback) in _NAMED:
                return original(self, _Named(step, self, callback), *args, context=context)
            return original(self, step, self, callback, *args, context=context)

        return replace(owner, name, soon)

    def timing_later() -> Undo:
        original = owner.call_later

        @functools.wraps(original)
        def call_later(self: Any, delay: Any, callback: Any, *args: Any, context: Any = None) -> Any:
            return original(self, delay, _Named(step, self, callback), *args, context=context)

        return replace(owner, "call_later", call_later)  # by which `call_at` goes, too

    def undo() -> None:
        nonlocal limit_ns
        limit_ns = NEVER_NS  # what waits is called on
        places.stop()

    return [timing("call_soon"), timing("call_soon_threadsafe"), timing_later(), undo]


class _Named(functools.partial[None]):
    """A callback of a loop, with what times it, under its own name where the loop tells of it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args[1], name)

    def __repr__(self) -> str:
        return repr(self.args[1])


_NAMED = frozenset((FunctionType, MethodType, functools.partial))
"""Callbacks that may fail, of which a loop tells by name then. Steps of tasks are none, and cost less."""


def _run_here(function: Callable[..., Any], *args: Any) -> Any:
    """Run it in this context, which is that of the callback."""
    return function(*args)


BLOCKERS: dict[Site, tuple[int, int]] = {}
"""The count of blocks of an event loop and the nanoseconds of the longest, by the site of the span that blocked."""


def _note(
    recorder: Recorder, callback: Any, run_in_context: Callable[..., Any], begun_ns: int, places: LoopPlaces
) -> None:
    """A callback has been slow: record it, if it kept a request from going on."""
    ended_ns = recorder.now_ns()
    try:
        if not recorder.on:
            return
        rows = _ended_within(recorder, begun_ns)
        if not recorder.open_requests(get_native_id()) and not any(map(is_request_root, rows)):
            return
        function, facts = _function_of(callback)
        site = _span_over(recorder, run_in_context, rows, begun_ns, ended_ns)
        facts[BLOCKED_BY] = (function if site is None else site.name)[:VALUE_LIMIT]
        facts |= attributes_of(places.met(begun_ns), VALUE_LIMIT)
        if site is not None and (site in BLOCKERS or len(BLOCKERS) < BLOCKERS_KNOWN):
            stretches, longest_ns = BLOCKERS.get(site, (0, 0))
            BLOCKERS[site] = stretches + 1, max(longest_ns, ended_ns - begun_ns)
        # Below no span: it takes no time from what ran meanwhile, a part of which it is.
        Context().run(recorder.record, BLOCKED_LOOP, begun_ns, facts, None, True)
    except Exception as fault:
        FAULTS.note("blocked event loop", fault)


def _ended_within(recorder: Recorder, begun_ns: int) -> list[Row]:
    """The newest rows of this thread that ended since then, in the order of their ends."""
    thread_id = get_native_id()
    for ring in recorder.rings():
        if ring.thread_id == thread_id and not ring.ended:
            return [row for row in ring.newest(max(ring.head - NEWEST, 0))[0] if row[END_NS] >= begun_ns]
    return []


def _span_over(
    recorder: Recorder, run_in_context: Callable[..., Any], rows: list[Row], begun_ns: int, ended_ns: int
) -> Site | None:
    """The site of the innermost span that was there for most of the time; None without one.

    What has ended within it was inside of what is open in its context still.
    """
    least_ns = (ended_ns - begun_ns) // 2
    most = [row for row in rows if min(row[END_NS], ended_ns) - max(row[START_NS], begun_ns) > least_ns]
    for row in sorted(most, key=lambda row: -row[START_NS]):
        site = recorder.site_of(row)
        if site is not BLOCKED_LOOP:
            return site
    try:
        if recorder.open_requests(get_native_id()) > OPEN_LIMIT:
            innermost: Site | None = run_in_context(recorder.site_of_open, None)
            return innermost
        span_id = run_in_context(recorder.current_id)
    except RuntimeError:  # entered: a loop runs within a callback
        return None
    if not span_id:
        return None
    open_ = {row[SPAN_ID]: row for _, row in recorder.open_rows()}
    while (found := open_.get(span_id)) is not None:
        if found[5] <= ended_ns - least_ns:
            return recorder.site_of(found)
        span_id = found[2]
    return None


def _function_of(callback: Any) -> tuple[str, dict[Any, Any]]:
    """What to call a callback's function or a task's coroutine, and where that is defined, as attributes."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    tasks = sys.modules.get("asyncio.tasks")
    owner = getattr(callback, "__self__", None)
    if tasks is not None and isinstance(owner, tasks.Task):
        callback = owner.get_coro()
    name = getattr(callback, "__qualname__", None)
    if not isinstance(name, str):
        name = type(callback).__qualname__
    facts: dict[Any, Any] = {"code.function.name": name[:VALUE_LIMIT]}
    codes = (getattr(callback, attribute, None) for attribute in ("__code__", "cr_code", "gi_code"))
    code = next((one for one in codes if isinstance(one, CodeType)), None)
    if code is None or code.co_filename.startswith("<"):
        return name, facts
    facts |= {"code.file.path": code.co_filename, "code.line.number": code.co_firstlineno}
    return f"{name} ({PurePath(code.co_filename).name}:{code.co_firstlineno})", facts


COLLECTOR = "gc"
"""Where the interpreter says whom it tells."""


def attach_collector(module: ModuleType, limit_ns: int, recorder: Recorder = RECORDER) -> list[Undo]:
    """From now on record the collections that take longer than this."""
    callbacks: Any = module.callbacks
    now = recorder.now_ns
    begun_ns = 0

    def note(phase: str, told: dict[str, int]) -> None:
        nonlocal begun_ns
        if phase == "start":
            begun_ns = now()
        elif begun_ns and now() - begun_ns > limit_ns and recorder.on:
            try:
                facts: dict[Any, Any] = {
                    "cpython.gc.generation": told["generation"],
                    "instrument.gc.collected": told["collected"],
                }
                # Below no span: it takes no time from what it interrupts, a part of which it is.
                Context().run(recorder.record, COLLECTION, begun_ns, facts, None, True)
            except Exception as fault:
                FAULTS.note("garbage collection", fault)

    def undo() -> None:
        with suppress(ValueError):  # others may have cleared the list
            callbacks.remove(note)

    callbacks.append(note)
    return [undo]
