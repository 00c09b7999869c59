"""Record callbacks that block an event loop longer than `limits.blocked` while a request is open.

asyncio's `Handle._run` is replaced by a method that also times the callback. uvloop runs callbacks in C, so its methods
that schedule callbacks are replaced. Protocol methods such as `data_received`, which uvloop calls directly, are not
timed. Long garbage collections are recorded, too, because they stop all threads of the process.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from pathlib import PurePath
from threading import get_native_id
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from instrument.instrumentors.profiled_functions import Undo, replaces_attribute
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.memory_layout import END_NS, SPAN_ID, START_NS, Row, is_request_root, unpack_rows
from instrument.recording.spans import BLOCKED_AT, BLOCKED_BY, BLOCKED_LOOP, COLLECTION, VALUE_LIMIT, Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import get_ident, sleep

ASYNCIO = "asyncio.events"
"""The module that defines asyncio's `Handle`, which runs the callbacks of a loop."""

UVLOOP = "uvloop"

NEWEST = 256
"""The number of a thread's newest rows among which the blocking span is searched."""

OPEN_LIMIT = 1_000
"""The number of open requests above which only the innermost open span is examined for a block."""

BLOCKERS_KNOWN = 100
"""The maximum number of sites in `BLOCKERS`. Blocks by further sites are recorded but not counted."""

NEVER_NS = 1 << 62


def attach_asyncio(module: ModuleType, limit_ns: int, recorder: Recorder = RECORDER) -> list[Undo]:
    """Record callbacks of asyncio's loops that take longer than `limit_ns`."""
    handle: Any = module.Handle
    run, now = handle._run, recorder.now_ns
    if not isinstance(run, FunctionType):
        raise TypeError(f"Handle._run is a {type(run).__name__}")

    places = LoopPlaces(recorder, limit_ns)

    @replaces_attribute(handle, "_run")
    def restore_run(self: Any) -> None:
        begun_ns = now()
        if places.is_on:
            places.begun[get_ident()] = begun_ns
        run(self)
        if now() - begun_ns > limit_ns:
            _note_slow_callback(recorder, self._callback, self._context.run, begun_ns, places)
        if places.is_on:
            places.begun[get_ident()] = 0

    def stop_timing_asyncio() -> None:
        nonlocal limit_ns
        limit_ns = NEVER_NS  # other code may keep a reference and call it
        places.is_on = False
        restore_run()

    return [stop_timing_asyncio]


def attach_uvloop(module: ModuleType, limit_ns: int, recorder: Recorder = RECORDER) -> list[Undo]:
    """Record callbacks of uvloop's loops that take longer than `limit_ns`."""
    owner: Any = module.Loop
    now = recorder.now_ns

    places = LoopPlaces(recorder, limit_ns)

    def run_timed(loop: Any, callback: Any, *args: Any) -> None:
        begun_ns = now()
        if places.is_on:
            places.begun[get_ident()] = begun_ns
        callback(*args)
        if now() - begun_ns > limit_ns:
            _note_slow_callback(recorder, callback, lambda call, *args: call(*args), begun_ns, places)
        if places.is_on:
            places.begun[get_ident()] = 0

    def wrap_scheduling_method(name: str) -> Undo:
        schedule = getattr(owner, name)

        @replaces_attribute(owner, name)
        def restore_method(self: Any, callback: Any, *args: Any, context: Any = None) -> Any:
            if type(callback) in _NAMED:
                return schedule(self, _NamedCallback(run_timed, self, callback), *args, context=context)
            return schedule(self, run_timed, self, callback, *args, context=context)

        return restore_method

    call_later = owner.call_later

    @replaces_attribute(owner, "call_later")  # `call_at` calls it
    def restore_call_later(self: Any, delay: Any, callback: Any, *args: Any, context: Any = None) -> Any:
        return call_later(self, delay, _NamedCallback(run_timed, self, callback), *args, context=context)

    def stop_timing_uvloop() -> None:
        nonlocal limit_ns
        limit_ns = NEVER_NS  # scheduled callbacks still run
        places.is_on = False

    undos = [wrap_scheduling_method(name) for name in ("call_soon", "call_soon_threadsafe")]
    return [*undos, restore_call_later, stop_timing_uvloop]


class _NamedCallback(functools.partial[None]):
    """A timed callback of a loop. In the loop's logs it appears as the original callback."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.args[1], name)

    def __repr__(self) -> str:
        return repr(self.args[1])


_NAMED = frozenset((FunctionType, MethodType, functools.partial))
"""The types of callbacks that an event loop names when it logs their exceptions."""

BLOCKERS: dict[Site, tuple[int, int]] = {}
"""The number of times that each site has blocked an event loop, and its longest block in ns."""


def _note_slow_callback(
    recorder: Recorder, callback: Any, run_in_context: Callable[..., Any], begun_ns: int, places: LoopPlaces
) -> None:
    ended_ns = recorder.now_ns()
    with FAULTS.guard("blocked event loop"):
        if not recorder.on:
            return
        # The newest spans of this thread that have ended since, by end time.
        rings = [ring for ring in recorder.rings() if ring.thread_id == get_native_id() and not ring.ended]
        newest = unpack_rows(rings[0].copied(max(rings[0].head - NEWEST, 0))) if rings else []
        rows = [row for row in newest if row[END_NS] >= begun_ns]
        if not recorder.open_requests(get_native_id()) and not any(map(is_request_root, rows)):
            return
        function, facts = _describe_function(callback)
        site = _find_blocking_site(recorder, run_in_context, rows, begun_ns, ended_ns)
        facts[BLOCKED_BY] = (function if site is None else site.name)[:VALUE_LIMIT]
        facts |= make_block_attributes(places.take_stack(begun_ns), VALUE_LIMIT)
        if site is not None and (site in BLOCKERS or len(BLOCKERS) < BLOCKERS_KNOWN):
            stretches, longest_ns = BLOCKERS.get(site, (0, 0))
            BLOCKERS[site] = stretches + 1, max(longest_ns, ended_ns - begun_ns)
        # Without a parent: it takes no self time from the span in which it is.
        Context().run(recorder.record, BLOCKED_LOOP, begun_ns, facts, None, True)


def _find_blocking_site(
    recorder: Recorder, run_in_context: Callable[..., Any], rows: list[Row], begun_ns: int, ended_ns: int
) -> Site | None:
    """Return the site of the innermost span that took more than half of a slow callback's time, or None."""
    least_ns = (ended_ns - begun_ns) // 2
    most = [row for row in rows if min(row[END_NS], ended_ns) - max(row[START_NS], begun_ns) > least_ns]
    for row in sorted(most, key=lambda row: -row[START_NS]):
        site = recorder.find_site(row)
        if site is not BLOCKED_LOOP:
            return site
    try:
        if recorder.open_requests(get_native_id()) > OPEN_LIMIT:
            innermost: Site | None = run_in_context(recorder.site_of_open, None)
            return innermost
        span_id = run_in_context(recorder.current_span_id)
    except RuntimeError:  # the context is entered: a loop runs within a callback
        return None
    if not span_id:
        return None
    open_ = {row[SPAN_ID]: row for _, row in recorder.open_rows()}
    while (open_row := open_.get(span_id)) is not None:
        if open_row[5] <= ended_ns - least_ns:
            return recorder.find_site(open_row)
        span_id = open_row[2]
    return None


def _describe_function(callback: Any) -> tuple[str, dict[Any, Any]]:
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
    code = next((candidate for candidate in codes if isinstance(candidate, CodeType)), None)
    if code is None or code.co_filename.startswith("<"):
        return name, facts
    facts |= {"code.file.path": code.co_filename, "code.line.number": code.co_firstlineno}
    return f"{name} ({PurePath(code.co_filename).name}:{code.co_firstlineno})", facts


COLLECTOR = "gc"


def attach_collector(module: ModuleType, limit_ns: int, recorder: Recorder = RECORDER) -> list[Undo]:
    """Record garbage collections that take longer than `limit_ns`. Collections before the process's first span are not
    recorded."""
    callbacks: Any = module.callbacks
    now = recorder.now_ns
    begun_ns = 0

    def note_collection(phase: str, counts: dict[str, int]) -> None:
        nonlocal begun_ns
        if phase == "start":
            begun_ns = now()
        elif begun_ns and now() - begun_ns > limit_ns and recorder.on and recorder.rings():
            with FAULTS.guard("garbage collection"):
                facts: dict[Any, Any] = {
                    "cpython.gc.generation": counts["generation"],
                    "instrument.gc.collected": counts["collected"],
                }
                # Without a parent: it takes no self time from the span that it interrupts.
                Context().run(recorder.record, COLLECTION, begun_ns, facts, None, True)

    def stop_noting_collections() -> None:
        with suppress(ValueError):  # others may have cleared the list
            callbacks.remove(note_collection)

    callbacks.append(note_collection)
    return [stop_noting_collections]


# The places of slow callbacks.

STACK = "code.stacktrace"

LONGEST_LOOK_S = 0.05
"""The maximum interval in seconds between two samples of a loop's stack."""

REST_NS = 60_000_000_000
"""The ns without a slow callback after which the sampling stops."""

FRAMES = 32
"""The maximum number of innermost frames that are searched for the service's own code."""


class LoopPlaces:
    """Samples the stacks of slow callbacks in event loops.

    A slow callback starts the sampling thread, which ends after `REST_NS` without a slow callback. While the thread
    runs, `begun` has the start time of each thread's current callback, or 0.
    """

    def __init__(self, recorder: Recorder, limit_ns: int) -> None:
        self._recorder = recorder
        self._look_s = min(limit_ns / 2e9, LONGEST_LOOK_S)
        self.begun: dict[int, int] = {}
        self._seen: dict[tuple[int, int], Counter[tuple[str, ...]]] = {}
        self._slow_ns = 0
        self._thread: Thread | None = None
        self.is_on = False

    def take_stack(self, begun_ns: int) -> tuple[str, ...]:
        """Return the most frequent sampled stack of the callback that began at `begun_ns`, innermost frame first. Start
        the sampling thread if none runs."""
        self._slow_ns = self._recorder.now_ns()
        if self._thread is None or not self._thread.is_alive():
            self.begun.clear()
            self.is_on = True
            self._thread = Thread(self._run, "instrument-loops", lambda: self.is_on)
            self._thread.start()
        stacks = self._seen.pop((get_ident(), begun_ns), None)
        return stacks.most_common(1)[0][0] if stacks else ()

    def _run(self) -> None:
        while self.is_on:
            sleep(self._look_s)
            now_ns = self._recorder.now_ns()
            slow = [(ident, ns) for ident, ns in list(self.begun.items()) if ns and now_ns - ns > self._look_s * 1e9]
            frames = sys._current_frames() if slow else {}
            if slow:  # drop the samples of ended callbacks
                self._seen = {key: stacks for key, stacks in self._seen.items() if key in slow}
            for ident, begun_ns in slow:
                stack = stack_of(frames.get(ident))
                if ident in frames and self.begun.get(ident) == begun_ns:  # else the sample is of the next callback
                    self._seen.setdefault((ident, begun_ns), Counter())[stack] += 1
            if not slow and now_ns - self._slow_ns > REST_NS:
                self.is_on = False
                self._seen.clear()


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """Return a stack as texts with file, line and function, from the innermost frame of the service's code outwards."""
    places: list[tuple[CodeType, int]] = []
    while frame is not None and len(places) < FRAMES:
        if str(frame.f_globals.get("__name__", "")).startswith("instrument."):
            break
        places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    installed = "<", *_list_installed()  # neither installed nor of the standard library is the service's own code
    first = next((at for at, (code, _) in enumerate(places) if not code.co_filename.startswith(installed)), 0)
    return tuple(
        f"{PurePath(code.co_filename).name}:{line} {getattr(code, 'co_qualname', code.co_name)}"
        for code, line in places[first:]
    )


@functools.cache
def _list_installed() -> tuple[str, ...]:
    import sysconfig

    paths = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple({path for path in paths if path})


def make_block_attributes(stack: tuple[str, ...], limit: int) -> dict[Any, str]:
    if not stack:
        return {}
    text = stack[0][:limit]
    for place in stack[1:]:
        if len(text) + len(place) + 1 > limit:
            break
        text += f"\n{place}"
    return {BLOCKED_AT: stack[0][:limit], STACK: text}
