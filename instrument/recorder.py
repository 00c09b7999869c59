"""The recorder: what a call costs. Opens and closes spans, stores rows in per-thread rings, keeps the tally.

This is the pure-Python twin. A call goes: parent from the context, clock, the host's own work, clock, one tuple into
this thread's ring.

Parentage lives in one context variable, so it follows threads, asyncio tasks, and executors that copy the context.

An open span is a *frame*, a list that only this module touches:

    0 node   1 span id   2 parent id   3 root id   4 time of the children ns   5 ring   6 frame above
    7 start ns   8 task   9 counted against the frame above from ns   10 attributes or None   11 state

A finished span is a *row*: see `instrument.ring`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Any, TypeVar

from instrument.errors import FAULTS
from instrument.ring import Cursor, Ring, Rings, Row, self_ns
from instrument.spans import AttributeValue, RemoteParent, Site, Span
from instrument.tally import OVERFLOW, Node, Tally

Frame = list[Any]
Function = TypeVar("Function", bound=Callable[..., Any])
NODE_LIMIT = 16_384
SCOPE_NAME_LIMIT = 4_096
OPEN_SCOPE_LIMIT = 10_000

_CLOSED, _OPEN, _MANUAL = 0, 1, 2

_clock = time.monotonic_ns
_modules = sys.modules
_running_loop: Callable[[], Any] | None = None
_current_task: Callable[[Any], Any]


def _watch_tasks() -> None:
    """Begin to tell tasks apart. Called once asyncio has been imported, never importing it ourselves."""
    global _running_loop, _current_task
    asyncio = _modules["asyncio"]
    tasks = getattr(asyncio, "tasks", None)
    events = getattr(asyncio, "events", None)
    if tasks is None or events is None or not hasattr(tasks, "current_task"):
        return  # asyncio is being imported right now
    # Up to 3.11 current_task is a Python function around this dict; reading the dict halves the cost.
    _current_task = tasks._current_tasks.get if sys.version_info < (3, 12) else tasks.current_task
    _running_loop = events._get_running_loop


def _task_id() -> int:
    """Identity of the running asyncio task, 0 outside of one."""
    if _running_loop is None:
        if "asyncio" not in _modules:
            return 0
        _watch_tasks()
        if _running_loop is None:
            return 0
    loop = _running_loop()
    if loop is None:
        return 0
    task = _current_task(loop)
    return 0 if task is None else id(task)


class Recorder:
    """Rows and tally of one process. Threads need no set-up; a thread's ring is made at its first span.

    `ring_bytes` bounds the memory of all rings together (each thread has at least 64 rows of its own besides).
    `on` may be switched at any time: spans that are open are finished, no new one begins.
    """

    native = False

    def __init__(self, ring_bytes: int = 64 << 20) -> None:
        self.on = False
        self.remote_parent: Callable[[], RemoteParent | None] | None = None
        self._ring_bytes = ring_bytes
        self._current: ContextVar[Frame | None] = ContextVar("instrument_current", default=None)
        self._next_id = itertools.count(1).__next__
        self._nodes: list[Node] = []
        self._root = Node(-1, Site("(root)"), None)
        self._overflow = self._new_node(self._root, OVERFLOW)
        self._scope_sites: dict[tuple[str, str], Site] = {}
        self._begin_state()

    def _begin_state(self) -> None:
        self._lock = threading.RLock()
        self._rings = Rings(self._ring_bytes, self._nodes)
        self._suspended: dict[int, Frame] = {}
        self._manual_open = 0
        self._counts: Counter[str] = Counter()

    def _ring(self) -> Ring:
        try:
            return self._rings.local.ring
        except AttributeError:
            return self._rings.new()

    # ---------------------------------------------------------------- the tally

    def _new_node(self, parent: Node, site: Site) -> Node:
        node = Node(len(self._nodes), site, parent)
        self._nodes.append(node)
        parent.children[site] = node
        return node

    def _node(self, parent: Node, site: Site) -> Node:
        """The node of a site under a parent, made on first sight as long as the tally has room."""
        with self._lock:
            node = parent.children.get(site)
            if node is not None:
                return node
            if len(self._nodes) >= NODE_LIMIT:
                return self._overflow
            return self._new_node(parent, site)

    def tally(self) -> Tally:
        """A copy of all totals up to now, by call path and thread."""
        tally = Tally()
        paths = [node.path() for node in list(self._nodes)]
        for ring in self._rings.all():
            cells = ring.copied_totals(self._nodes)
            if cells:
                tally.threads.setdefault(ring.thread_id, ring.name)
            for index in sorted(cells, key=lambda i: (cells[i].first_ns, i)):
                tally.totals(paths[index], ring.thread_id).merge(cells[index])
        ended = self._rings.copied_ended_totals()
        if ended:
            tally.threads.setdefault(0, "(ended threads)")
        for index, totals in ended.items():
            tally.totals(paths[index], 0).merge(totals)
        return tally

    # ---------------------------------------------------------------- spans, opened and closed

    def open(self, site: Site, attributes: dict[Any, Any] | None = None, state: int = _OPEN) -> Frame:
        """Begin a span under the current one and make it current."""
        parent = self._current.get()
        ring = self._ring()
        span_id = self._next_id()
        above = self._root if parent is None else parent[0]
        node = above.children.get(site) or self._node(above, site)
        frame: Frame
        if parent is None:
            frame = [node, span_id, 0, span_id, 0, ring, None, 0, _task_id(), 0, attributes, state]
        else:
            frame = [node, span_id, parent[1], parent[3], 0, ring, parent, 0, _task_id(), 0, attributes, state]
        if site.kind == "request" and not self._in_request(parent):
            frame[3] = span_id
            if self.remote_parent is not None:
                self._note_remote(frame)
        self._current.set(frame)
        ring.top = frame
        frame[7] = frame[9] = _clock()
        return frame

    def _in_request(self, frame: Frame | None) -> bool:
        """Whether a request is open above. One that has ended does not adopt what a task of it serves next."""
        while frame is not None:
            if frame[11] != _CLOSED and frame[0].site.kind == "request":
                return True
            frame = frame[6]
        return False

    def _note_remote(self, frame: Frame) -> None:
        try:
            remote = self.remote_parent() if self.remote_parent is not None else None
        except Exception as fault:
            FAULTS.note("current OpenTelemetry span", fault)
            return
        if remote is not None:
            frame[10] = {**(frame[10] or {}), RemoteParent: remote}

    def close(self, frame: Frame, error: BaseException | None = None, active_ns: int = -1) -> None:
        """End a span. A frame that is not the current one was crossed or is ended elsewhere: counted, not fatal."""
        end = _clock()
        if frame[11] == _CLOSED:
            self._counts["scope ended twice"] += 1
            return
        frame[11] = _CLOSED
        current = self._current.get()
        above = frame[6]
        if current is frame:
            while above is not None and above[11] == _CLOSED:
                above = above[6]
            self._current.set(above)
        elif current is not None:
            self._cross(frame, current, end)
        ring = self._ring()
        ring.top = above
        owner = frame[6]
        if owner is not None and owner[5] is ring and owner[8] == frame[8] and active_ns < 0:
            owner[4] += end - frame[9]
        self._store(ring, frame, end, active_ns, None if error is None else type(error).__name__)

    def record(self, site: Site, start_ns: int, attributes: dict[Any, Any] | None) -> None:
        """Store a span that has just ended and had no children, for what turns out only afterwards to be worth one."""
        end = _clock()
        parent = self._current.get()
        ring = self._ring()
        task = _task_id()
        above = self._root if parent is None else parent[0]
        node = above.children.get(site) or self._node(above, site)
        span_id = self._next_id()
        parent_id, root_id = (0, span_id) if parent is None else (parent[1], parent[3])
        if parent is not None and parent[5] is ring and parent[8] == task:
            parent[4] += end - start_ns
        frame: Frame = [node, span_id, parent_id, root_id, 0, ring, None, start_ns, task, start_ns, attributes, _CLOSED]
        self._store(ring, frame, end, -1, None)

    def _cross(self, frame: Frame, current: Frame, end: int) -> None:
        """End `frame` while `current`, opened inside it, goes on: what follows counts against the frame above."""
        below = current
        while below is not None and below[6] is not frame:
            below = below[6]
        if below is None:
            self._counts["span ended outside the context that began it"] += 1
            return
        self._counts["scope closed before a scope inside it"] += 1
        if below[5] is frame[5] and below[8] == frame[8]:
            frame[4] += end - below[9]
        below[9] = end
        below[6] = frame[6]

    def _store(self, ring: Ring, frame: Frame, end: int, active_ns: int, error: str | None) -> None:
        head = ring.head
        ring.rows[head & ring.mask] = (
            frame[0].index, frame[1], frame[2], frame[3], frame[8], frame[7], end, frame[4], active_ns, error,
            frame[10],
        )  # fmt: skip
        ring.head = head = head + 1
        if not head & ring.fold_mask:
            ring.fold(self._nodes)

    # ---------------------------------------------------------------- functions

    def wrap(self, function: Function, site: Site) -> Function:
        """The function with a span around each call; generators and coroutines keep their kind.

        The returned function is of the same kind (`inspect.iscoroutinefunction` and the like agree), has the same
        signature, name, doc and attributes, and carries its site as `__instrument__`.
        """
        if inspect.isasyncgenfunction(function):
            wrapper = self._wrap_async_generator(function, site)
        elif inspect.iscoroutinefunction(function):
            wrapper = self._wrap_coroutine(function, site)
        elif inspect.isgeneratorfunction(function):
            wrapper = self._wrap_generator(function, site)
        elif site.kind == "request":
            wrapper = self._wrap_request(function, site)
        else:
            wrapper = self._wrap_call(function, site)
        functools.update_wrapper(wrapper, function)
        wrapper.__instrument__ = site
        return wrapper  # type: ignore[no-any-return]

    def _wrap_call(self, function: Callable[..., Any], site: Site) -> Any:
        """`open`, the call and `close` in one body: three Python calls fewer, about 250 ns."""
        recorder = self
        current = self._current
        get, set_ = current.get, current.set
        next_id = self._next_id
        clock = _clock

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not recorder.on:
                return function(*args, **kwargs)
            parent = get()
            try:
                ring = recorder._rings.local.ring
            except AttributeError:
                ring = recorder._rings.new()
            if _running_loop is None:
                task = _task_id() if "asyncio" in _modules else 0
            else:
                loop = _running_loop()
                task = 0 if loop is None else _task_id()
            span_id = next_id()
            frame: Frame
            if parent is None:
                node = recorder._root.children.get(site) or recorder._node(recorder._root, site)
                frame = [node, span_id, 0, span_id, 0, ring, None, 0, task, 0, None, 1]
            else:
                node = parent[0].children.get(site) or recorder._node(parent[0], site)
                frame = [node, span_id, parent[1], parent[3], 0, ring, parent, 0, task, 0, None, 1]
            set_(frame)
            ring.top = frame
            frame[7] = frame[9] = start = clock()
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                recorder.close(frame, error)
                raise
            end = clock()
            if get() is not frame or frame[6] is not parent:
                recorder.close(frame)
                return result
            set_(parent)
            ring.top = parent
            if parent is not None and parent[5] is ring and parent[8] == task:
                parent[4] += end - start
            head = ring.head
            ring.rows[head & ring.mask] = (
                node.index, span_id, frame[2], frame[3], task, start, end, frame[4], -1, None, None,
            )  # fmt: skip
            ring.head = head = head + 1
            if not head & ring.fold_mask:
                ring.fold(recorder._nodes)
            return result

        return wrapper

    def _wrap_request(self, function: Callable[..., Any], site: Site) -> Any:
        recorder = self

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not recorder.on:
                return function(*args, **kwargs)
            frame = recorder.open(site)
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                recorder.close(frame, error)
                raise
            recorder.close(frame)
            return result

        return wrapper

    def _wrap_coroutine(self, function: Callable[..., Any], site: Site) -> Any:
        recorder = self

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not recorder.on:
                return await function(*args, **kwargs)
            frame = recorder.open(site)
            recorder._suspended[frame[1]] = frame
            try:
                result = await function(*args, **kwargs)
            except BaseException as error:
                recorder.close(frame, error)
                raise
            else:
                recorder.close(frame)
            finally:
                recorder._suspended.pop(frame[1], None)
            return result

        return wrapper

    def _wrap_generator(self, function: Callable[..., Any], site: Site) -> Any:
        recorder = self

        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            generator = function(*args, **kwargs)
            if not recorder.on:
                return (yield from generator)
            stretch = _Stretch(recorder, site)
            value: Any = None
            thrown: BaseException | None = None
            try:
                while True:
                    stretch.resume()
                    try:
                        item = generator.send(value) if thrown is None else generator.throw(thrown)
                    except StopIteration as done:
                        return done.value
                    finally:
                        stretch.suspend()
                    try:
                        value, thrown = (yield item), None
                    except GeneratorExit:
                        stretch.resume()
                        try:
                            generator.close()
                        finally:
                            stretch.suspend()
                        raise
                    except BaseException as error:
                        value, thrown = None, error
            except GeneratorExit:
                stretch.finish(None)
                raise
            except BaseException as error:
                stretch.finish(error)
                raise
            finally:
                stretch.finish(None)

        return wrapper

    def _wrap_async_generator(self, function: Callable[..., Any], site: Site) -> Any:
        recorder = self

        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            generator = function(*args, **kwargs)
            stretch = _Stretch(recorder, site) if recorder.on else None
            value: Any = None
            thrown: BaseException | None = None
            try:
                while True:
                    if stretch is not None:
                        stretch.resume()
                    try:
                        item = await (generator.asend(value) if thrown is None else generator.athrow(thrown))
                    except StopAsyncIteration:
                        return
                    finally:
                        if stretch is not None:
                            stretch.suspend()
                    try:
                        value, thrown = (yield item), None
                    except GeneratorExit:
                        if stretch is not None:
                            stretch.resume()
                        try:
                            await generator.aclose()
                        finally:
                            if stretch is not None:
                                stretch.suspend()
                        raise
                    except BaseException as error:
                        value, thrown = None, error
            except GeneratorExit:
                raise
            except BaseException as error:
                if stretch is not None:
                    stretch.finish(error)
                raise
            finally:
                if stretch is not None:
                    stretch.finish(None)

        return wrapper

    # ---------------------------------------------------------------- scopes

    def scope_site(self, name: str, kind: str, device: bool = False) -> Site:
        """The site of a scope's name, made on first sight with the place of the code that opened it."""
        site = self._scope_sites.get((name, kind))
        if site is None:
            with self._lock:
                if len(self._scope_sites) >= SCOPE_NAME_LIMIT:
                    self._counts["scope names beyond the limit, counted together"] += 1
                    return OVERFLOW
                module, qualname, file, line = _caller()
                site = Site(name, kind, module, qualname, file, line, device=device)
                site = self._scope_sites.setdefault((name, kind), site)
        return site

    def start_manual(self, site: Site, attributes: dict[Any, Any] | None) -> Frame | None:
        """Open a span that `end_manual` will close; None when too many are open."""
        if self._manual_open >= OPEN_SCOPE_LIMIT:
            self._counts["scopes not begun because too many are open"] += 1
            return None
        frame = self.open(site, attributes, _MANUAL)
        self._manual_open += 1
        self._suspended[frame[1]] = frame
        return frame

    def innermost_manual(self, name: str | None) -> Frame | None:
        """The innermost open span of this context that `start_manual` opened, by name where one is given."""
        frame = self._current.get()
        while frame is not None:
            if frame[11] == _MANUAL and (name is None or frame[0].site.name == name):
                return frame
            frame = frame[6]
        return None

    def end_manual(self, frame: Frame | None, error: BaseException | None = None) -> None:
        """Close what `start_manual` opened. Nothing open is counted, not raised."""
        if frame is None:
            self._counts["scope_end without an open scope"] += 1
            return
        if self._suspended.pop(frame[1], None) is not None:
            self._manual_open -= 1
        self.close(frame, error)

    # ---------------------------------------------------------------- reading

    def span(self, row: Row, thread_id: int) -> Span:
        """The span that a row stands for."""
        total_ns = row[6] - row[5]
        attributes = row[10]
        remote: RemoteParent | None = None
        if attributes and RemoteParent in attributes:
            attributes = dict(attributes)
            remote = attributes.pop(RemoteParent)
        return Span(
            site=self._nodes[row[0]].site,
            span_id=row[1],
            parent_id=row[2],
            root_id=row[3],
            thread_id=thread_id,
            task_id=row[4],
            start_ns=row[5],
            end_ns=row[6],
            active_ns=row[8] if row[8] >= 0 else total_ns,
            self_ns=self_ns(row),
            error=row[9],
            attributes=attributes or {},
            remote=remote,
        )

    def site_of(self, row: Row) -> Site:
        """The site of a row."""
        return self._nodes[row[0]].site

    def in_request(self, row: Row) -> bool:
        """Whether the row's call path passes through a request."""
        node: Node | None = self._nodes[row[0]]
        while node is not None:
            if node.site.kind == "request":
                return True
            node = node.parent
        return False

    def spans(self, start_ns: int = 0, end_ns: int | None = None) -> list[Span]:
        """The spans that the rings still hold and that lie in or reach into the window, open ones clipped at its end.

        Unordered. Spans that began before the window are clipped at its start.
        """
        now = _clock()
        last = now if end_ns is None else end_ns
        found = [
            self.span(row, ring.thread_id)
            for ring in self._rings.all()
            for row in ring.newest(0)[0]
            if row[6] > start_ns and row[5] < last
        ]
        finished = {span.span_id for span in found}
        for span in found:
            if span.start_ns < start_ns or span.end_ns > last:
                _clip(span, start_ns, last)
        found.extend(self._open_spans(finished, start_ns, last))
        return found

    def _open_spans(self, finished: Iterable[int], start_ns: int, end_ns: int) -> Iterator[Span]:
        seen = set(finished)
        ends: list[Frame | None] = [ring.top for ring in self._rings.all()]
        ends.extend(list(self._suspended.values()))
        for end in ends:
            frame = end
            while frame is not None and frame[1] not in seen:
                seen.add(frame[1])
                if frame[11] != _CLOSED and 0 < frame[7] < end_ns:
                    row: Row = (
                        frame[0].index, frame[1], frame[2], frame[3], frame[8], frame[7], end_ns, frame[4], -1, None,
                        frame[10],
                    )  # fmt: skip
                    span = self.span(row, frame[5].thread_id)
                    _clip(span, start_ns, end_ns)
                    yield span
                frame = frame[6]

    def cursor(self) -> Cursor:
        """A reader that sees every row from now on once, as long as it comes before the ring wraps."""
        return Cursor(self._rings)

    def threads(self) -> dict[int, str]:
        """Native thread ids and names of the threads that recorded and whose rows are still held."""
        return {ring.thread_id: ring.name for ring in self._rings.all()}

    def losses(self) -> Mapping[str, int]:
        """What timelines cannot show, by reason. The tally has counted all of it."""
        overwritten = sum(max(ring.head - ring.capacity, 0) for ring in self._rings.all()) + self._rings.ended_rows
        return {"spans overwritten by newer ones": overwritten} if overwritten else {}

    def counts(self) -> Mapping[str, int]:
        """Irregular events, by what happened."""
        return dict(self._counts)

    @property
    def calls(self) -> int:
        """Spans finished since the start, cheap to read."""
        return sum(ring.head for ring in self._rings.all()) + self._rings.ended_rows

    # ---------------------------------------------------------------- life

    def reset(self, ring_bytes: int | None = None) -> None:
        """Forget every row and total. Call paths stay known; a span that is open now will be counted when it ends."""
        if ring_bytes is not None:
            self._ring_bytes = ring_bytes
        self._begin_state()

    def after_fork_in_child(self) -> None:
        """Start clean in a forked child: own rings, no parents from before the fork."""
        self._begin_state()
        self._current.set(None)


class _Stretch:
    """A generator's span: current only while the body runs, its active time against whoever resumed it."""

    __slots__ = ("active_ns", "caller", "frame", "recorder", "resumed_ns", "site")

    def __init__(self, recorder: Recorder, site: Site) -> None:
        self.recorder = recorder
        self.site = site
        self.frame: Frame | None = None
        self.caller: Frame | None = None
        self.active_ns = 0
        self.resumed_ns = 0

    def resume(self) -> None:
        recorder = self.recorder
        self.caller = recorder._current.get()
        frame = self.frame
        if frame is None:
            frame = self.frame = recorder.open(self.site)
            recorder._suspended[frame[1]] = frame
            self.resumed_ns = frame[7]
            return
        frame[5] = recorder._ring()
        frame[8] = _task_id()
        recorder._current.set(frame)
        frame[5].top = frame
        self.resumed_ns = _clock()

    def suspend(self) -> None:
        frame, caller, recorder = self.frame, self.caller, self.recorder
        self.caller = None
        if frame is None:
            return
        step_ns = _clock() - self.resumed_ns
        self.active_ns += step_ns
        if recorder._current.get() is frame:
            recorder._current.set(caller)
        frame[5].top = caller
        if caller is not None and caller[5] is frame[5] and caller[8] == frame[8]:
            caller[4] += step_ns

    def finish(self, error: BaseException | None) -> None:
        frame = self.frame
        if frame is None or frame[11] == _CLOSED:
            return
        self.recorder._suspended.pop(frame[1], None)
        frame[11] = _CLOSED
        ring = self.recorder._ring()
        self.recorder._store(ring, frame, _clock(), self.active_ns, None if error is None else type(error).__name__)


class Scope:
    """A span around a block: `with scope("x"):` or `async with scope("x"):`. One use at a time."""

    __slots__ = ("_attributes", "_frame", "_recorder", "_site")

    def __init__(self, recorder: Recorder, site: Site, attributes: dict[Any, Any] | None = None) -> None:
        self._recorder = recorder
        self._site = site
        self._attributes = attributes
        self._frame: Frame | None = None

    def __enter__(self) -> Scope:
        if self._recorder.on and self._frame is None:
            frame = self._frame = self._recorder.open(self._site, self._attributes)
            if frame[8]:
                self._recorder._suspended[frame[1]] = frame
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        frame, self._frame = self._frame, None
        if frame is not None:
            self._recorder._suspended.pop(frame[1], None)
            self._recorder.close(frame, error)

    async def __aenter__(self) -> Scope:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def start(self) -> Scope:
        """Begin, for handlers that cannot use `with`; `end` closes."""
        if self._recorder.on and self._frame is None:
            self._frame = self._recorder.start_manual(self._site, self._attributes)
        return self

    def end(self, error: BaseException | None = None) -> None:
        """Close what `start` opened, from any place; a scope that never began (switched off) is nothing."""
        frame, self._frame = self._frame, None
        if frame is not None:
            self._recorder.end_manual(frame, error)


def measure_cost_ns(calls: int = 2_000, rounds: int = 5) -> float:
    """Nanoseconds that a span around a function adds to a call on this machine: the best of several short rounds."""

    def nothing() -> None:
        pass

    def timed(function: Callable[[], None]) -> int:
        start = _clock()
        for _ in range(calls):
            function()
        return _clock() - start

    def best() -> float:
        recorder = Recorder(ring_bytes=1 << 20)
        recorder.on = True
        wrapped = recorder.wrap(nothing, Site("cost"))
        pairs = [(timed(wrapped), timed(nothing)) for _ in range(rounds)]
        return max(min(on for on, _ in pairs) - min(bare for _, bare in pairs), 0) / calls

    return copy_context().run(best)


def _clip(span: Span, start_ns: int, end_ns: int) -> None:
    """Cut a span to the window and mark it; its self time is cut in proportion to what remains at most."""
    span.start_ns = max(span.start_ns, start_ns)
    span.end_ns = max(min(span.end_ns, end_ns), span.start_ns)
    span.active_ns = min(span.active_ns, span.total_ns)
    span.self_ns = min(span.self_ns, span.total_ns)
    span.clipped = True


def _caller() -> tuple[str, str, str, int]:
    """Module, qualified name, file and line of the nearest frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "instrument":
        frame = frame.f_back
    code = frame.f_code
    qualname = getattr(code, "co_qualname", code.co_name)
    return frame.f_globals.get("__name__", ""), qualname, code.co_filename, frame.f_lineno


def attributes_of(values: Mapping[str, AttributeValue] | None) -> dict[Any, Any] | None:
    """A private copy of the attributes that a caller handed in, None where there are none."""
    return dict(values) if values else None


RECORDER = Recorder()
"""The recorder of this process."""
