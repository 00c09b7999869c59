"""The recorder's hot path in Python: the twin of `_recorder.c`, with the same classes and the same behaviour.

A call goes: parent from the context, clock, the host's own work, clock, one tuple into this thread's ring. Parentage
lives in one context variable, so it follows threads, asyncio tasks, and executors that copy the context: see
`instrument.recorder.chains`. A finished span is a *row*: see `instrument.recording.ring`.

Here spans begin and end. Below it are the call tree (`call_nodes`) and what is done to open spans (`open_spans`);
`callables` and `generator_span` are what records with it.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from instrument.errors import error_name
from instrument.recorder.annotation import error_told
from instrument.recorder.call_nodes import NODE_LIMIT
from instrument.recorder.cancellation import outcome_of
from instrument.recorder.chains import (
    CLOSED,
    OPEN,
    Frame,
    ended_row,
    nearest_open,
    task_id,
    upwards,
)
from instrument.recorder.http_status import ANSWER_BYTES, FIRST_OF_SERVER, REQUEST_BYTES, STATUS, status_of
from instrument.recorder.open_spans import Opened
from instrument.recorder.stepped import take_waited, waited_of
from instrument.recording import memory_layout as layout
from instrument.recording.ring import Ring, Rings
from instrument.recording.rows import REQUEST_BIT, Row
from instrument.recording.spans import ATTRIBUTE_LIMIT, OUTCOME, Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.unpatched import RLock

if TYPE_CHECKING:
    from instrument.recorder.memory_writer import MemoryWriter

LENGTH_DIGITS = 18
"""Digits of a length that is taken: what fits into 63 bits, however large."""

_clock = time.monotonic_ns


def header_values(headers: Iterable[tuple[bytes, bytes]], names: tuple[bytes, ...]) -> tuple[bytes | None, ...]:
    """The values of headers by their names, of pairs of both: of several by one name the last."""
    found = dict(headers)
    return tuple(found.get(name) for name in names)


class Core(Opened):
    """Rows, totals and open spans of one process.

    `ring_bytes` bounds the memory of all rings together. `overflow` is the site that counts what comes after
    `node_limit` call paths, `remote_key` the key under which a frame's attributes hold what `remote_parent` told, and
    `link_of` makes the attributes of a root that came from an ended span: its id, its root's and what that one told.
    """

    def __init__(
        self,
        ring_bytes: int,
        overflow: Site,
        remote_key: Any,
        link_of: Callable[[int, int, Any], dict[Any, Any]],
        task_readers: Callable[[], tuple[Callable[[], Any], Callable[[Any], Any]] | None],
        thread_name: Callable[[], str],
    ) -> None:
        self.on = False
        self.remote_parent: Callable[[], Any] | None = None
        self.begin_device: Callable[[Site | None, Any, int], Any] | None = None
        self.watches_all = False
        self.passes: dict[Site, Any] = {}
        self.node_limit = NODE_LIMIT
        self._ring_bytes = ring_bytes
        self._remote_key = remote_key
        self._link_of = link_of
        self._thread_name = thread_name
        self._current: ContextVar[Frame | None] = ContextVar("instrument_current", default=None)
        self._next_id = itertools.count(2, 2).__next__
        self._lock = RLock()
        self._open: WeakValueDictionary[int, Frame] = WeakValueDictionary()
        self._writer: MemoryWriter | None = None
        self._begin_tree(overflow, [])
        self._reset(None)

    @property
    def memory_fd(self) -> int:
        """Descriptor of the memory that others can read, or -1."""
        return -1 if self._writer is None else self._writer.own_fd()

    @property
    def _memory_head(self) -> memoryview | None:
        """The memory's header and the text behind it, to be written."""
        return None if self._writer is None else memoryview(self._writer.map)[: layout.ALIGNED_BYTES]

    def _memory_part(self, number: int, /) -> memoryview | None:
        """A part of the memory to be written, by its number."""
        return None if self._writer is None else self._writer.part(layout.PARTS[number])

    def touch_ahead(self, most_bytes: int, /) -> int:
        """Have pages found for the rows that threads write next. Here a page is the least of what a span costs."""
        return 0

    def attach(self, fd: int, is_file: bool, /) -> None:
        """Record into a file from the next reset on, which is the recorder's from then on."""
        from instrument.recorder.memory_writer import MemoryWriter

        before, self._writer = self._writer, MemoryWriter(fd, is_file=is_file)
        if before is not None and before.own_fd() >= 0:
            os.close(before.fd)

    def _reset(self, ring_bytes: int | None) -> None:
        if ring_bytes is not None:
            self._ring_bytes = ring_bytes
        self._lock = RLock()
        if self._writer is not None:
            self._writer.begin_generation()
        open_frames = self._open_frames()
        self._begin_tree(self._overflow.site, open_frames)
        self._rings = Rings(self._ring_bytes, self._nodes, self._thread_name, self._writer)
        if self._writer is not None:
            for frame in open_frames:
                self._writer.begin(frame)
                self._writer.tell_attributes(frame)
        self._begun_in: dict[int, Frame | None] = {}  # the span above that of a generator, by the id of that
        self.irregular: Counter[str] = Counter() if self._writer is None else self._writer.counter()

    def open(self, site: Site, attributes: dict[Any, Any] | None = None, state: int = OPEN) -> Frame:
        """Begin a span under the current one and make it current."""
        span_id = self._next_id()
        frame = self._new_frame(site, span_id, self._current.get(), self._ring(), task_id(), attributes, state)
        request = frame[14]
        if site.kind == "request" and (request is None or request[11] == CLOSED):
            frame[1] = frame[3] = span_id = span_id | REQUEST_BIT
            if self.remote_parent is not None:
                self._note_remote(frame)
        # A signal handler may raise after any call, and then nobody has the frame to end it.
        try:
            self._open[span_id] = frame
            self._current.set(frame)
            frame[7] = frame[9] = _clock()
            if self._writer is not None:
                self._writer.begin(frame)
                if frame[10] and site.kind != "copy":
                    self._writer.tell_attributes(frame)
            if (site.device or self.watches_all) and self.begin_device is not None:
                self._begin_on_device(frame)
            return frame
        except BaseException:
            self._abandon(frame)
            raise

    def _abandon(self, frame: Frame) -> None:
        """End a span whose begin was broken off, if it is open."""
        self._open.pop(frame[1], None)
        if self._current.get() is frame:
            self.close(frame)

    def _new_frame(
        self,
        site: Site,
        span_id: int,
        place: Frame | None,
        ring: Ring,
        task: int,
        attributes: dict[Any, Any] | None,
        state: int,
    ) -> Frame:
        """A frame below the nearest that is open. Where all have ended it is a root and says what it came from."""
        ended = place if place is not None and place[11] == CLOSED else None
        parent = place if ended is None else nearest_open(ended)
        above = self._root if parent is None else parent[0]
        node = above.children.get(site) or self._node(above, site)
        index = node.index if node.inner is None else self._index(node, parent, ring)
        if parent is None and ended is not None:
            remote = ((ended.request or ended)[10] or {}).get(self._remote_key)
            attributes = {**(attributes or {}), **self._link_of(ended[1], ended[3], remote)}
        parent_id, root_id, request = (0, span_id, None) if parent is None else (parent[1], parent[3], parent.request)
        around, start = ring.stepping, _clock()
        awaited = (None, 0) if around is None or not around.is_running else (around, around.waited_ns)
        return Frame((
            node, span_id, parent_id, root_id, 0, ring, parent, start, task, start, attributes, state, 0, None, request,
            ended, index, *awaited,
        ))  # fmt: skip

    def _begin_on_device(self, frame: Frame) -> None:
        try:
            begin = self.begin_device
            frame[13] = None if begin is None else begin(frame[0].site, frame[10], frame[1])
        except Exception as fault:
            FAULTS.note("device timer", fault)

    def _end_on_device(self, ring: Ring, frame: Frame, end: int) -> None:
        """The span has been stored: its pair learns which it was."""
        pair, frame[13] = frame[13], None
        # The device time of an inner call is part of what is around it.
        index = frame[16] if frame[16] == frame[0].index else -1
        try:
            pair.end(ring, index, frame[1], frame[7], end)
        except Exception as fault:
            FAULTS.note("device timer", fault)
        except BaseException:  # a signal handler's, perhaps before anything was done: or the pair would never end
            pair.end(ring, index, frame[1], frame[7], end)
            raise

    def _note_remote(self, frame: Frame) -> None:
        try:
            remote = self.remote_parent() if self.remote_parent is not None else None
        except Exception as fault:
            FAULTS.note("current OpenTelemetry span", fault)
            return
        if remote is not None:
            frame[10] = {**(frame[10] or {}), self._remote_key: remote}

    def close(
        self,
        frame: Frame,
        error: BaseException | str | None = None,
        anywhere: bool = False,
        attributes: dict[Any, Any] | None = None,
    ) -> None:
        """End a span, with an exception or the name of an error, and attributes that the caller gives away.

        A frame that is not the current one was crossed or is ended elsewhere: counted but with `anywhere`, not fatal.
        """
        end = _clock()
        if frame[11] == CLOSED:
            self.irregular["scope ended twice"] += 1
            return
        if attributes is not None:
            self._take_attributes(frame, attributes)
        frame[11] = CLOSED
        waited_ns = waited_of(frame, end) if frame[17] is not None or frame[12] else 0
        self._open.pop(frame[1], None)
        current = self._current.get()
        owner = frame[6]
        frame[6] = nearest_open(owner)  # or tasks that start one another would hold all that were
        if current is frame:
            self._current.set(frame[15] or owner)
            frame[15] = None
        elif current is not None:
            self._cross(frame, current, end, anywhere)
        ring = self._ring()
        if owner is not None and owner[5] is ring and owner[8] == frame[8]:
            owner[4] += end - frame[9]
            if owner[12] is not None:
                owner[12] += waited_ns
            if self._writer is not None:
                self._writer.add_children(owner)
        self._store(ring, frame, end, -1, None if error is None else self._error_of(frame, error), waited_ns)
        frame[17] = None
        if frame[13] is not None:
            self._end_on_device(ring, frame, end)

    def begun_ns(self, frame: Frame) -> int:
        """When a span began."""
        begun_ns: int = frame[7]
        return begun_ns

    def open_request(self, site: Site, facts: dict[Any, Any], caller: Any, length: bytes | str | None) -> Frame:
        """Begin the span of a request with these attributes and what its headers tell.

        That is its caller's span, as `spans.remote_of` reads it, and the length of its body.
        """
        if caller is not None:
            facts[self._remote_key] = caller
        if length is not None and length.isascii() and length.isdigit() and len(length) <= LENGTH_DIGITS:
            facts[REQUEST_BYTES] = int(length)
        return self.open(site, facts)

    def close_request(
        self,
        frame: Frame | None,
        facts: dict[Any, Any],
        status: int,
        answer_bytes: int,
        error: BaseException | str | None,
    ) -> None:
        """End the span of a request in whatever context, with attributes that the caller gives away.

        A status and a number of bytes that are 0 are not known.
        """
        if status:
            facts[STATUS] = status
            if error is None and status >= FIRST_OF_SERVER:
                error = str(status)
        if answer_bytes:
            facts[ANSWER_BYTES] = answer_bytes
        if frame is not None:
            self.close(frame, error, True, facts)

    def _take_attributes(self, frame: Frame, given: dict[Any, Any]) -> None:
        """Let a dict that its caller gives away be the attributes of a span, with what that has of other names.

        And with the span of another tracer that the recorder has noted itself.
        """
        before, frame[10] = frame[10], given
        if not before or before is given:
            return
        for name, value in before.items():
            if name in given and name != self._remote_key:
                continue
            if len(given) < ATTRIBUTE_LIMIT or name in given:
                given[name] = value
            else:
                self.irregular["attributes beyond the limit of a span"] += 1

    def record(
        self,
        site: Site,
        start_ns: int,
        attributes: dict[Any, Any] | None,
        pair: Any = None,
        has_no_self: bool = False,
    ) -> None:
        """Store a span that has just ended and had no children, for what turns out only afterwards to be worth one.

        One that `has_no_self` is a part of others, which have its time.
        """
        end = _clock()
        ring = self._ring()
        task = task_id()
        frame = self._new_frame(site, self._next_id(), self._current.get(), ring, task, attributes, CLOSED)
        frame[7] = frame[9] = start_ns
        frame[13] = pair
        parent = frame[6]
        if parent is not None and parent[5] is ring and parent[8] == task:
            parent[4] += end - start_ns
        if has_no_self:
            frame[4] = end - start_ns
        self._store(ring, frame, end, -1, None)
        if pair is not None:
            self._end_on_device(ring, frame, end)

    def _cross(self, frame: Frame, current: Frame, end: int, anywhere: bool) -> None:
        """End `frame` while `current`, opened inside it, goes on: what follows counts against the frame above."""
        for below in upwards(current):
            if below[6] is frame:
                break
        else:
            if not anywhere:
                self.irregular["span ended outside the context that began it"] += 1
            return
        if not anywhere:
            self.irregular["scope closed before a scope inside it"] += 1
        if below[5] is frame[5] and below[8] == frame[8]:
            frame[4] += end - below[9]
        below[9] = end
        below[6] = frame[6]
        below[15] = frame[15]

    @staticmethod
    def _error_of(frame: Frame, error: BaseException | str) -> str | None:
        """The error's name. An exception that is an answer below 500 is none; a request bears the answer's status. Nor
        is one by which the span was broken off; it says so."""
        if isinstance(error, str):
            return error
        outcome = outcome_of(error)
        if outcome is not None:
            frame[10] = {OUTCOME: outcome, **(frame[10] or {})}
            return None
        status = status_of(error)
        if status is not None and frame[0].site.kind == "request":
            frame[10] = {**(frame[10] or {}), STATUS: status}
        return error_name(error) if status is None or status >= FIRST_OF_SERVER else None

    def _write(self, ring: Ring, frame: Frame, row: Row, own_waited_ns: int = 0) -> None:
        """Write the row of a span that has ended to the memory that others can read."""
        nodes = self._nodes
        if self._writer is not None and frame[16] < len(nodes):  # or another thread's reset has come in between
            self._writer.store(ring, row, nodes[frame[16]], own_waited_ns)
            self._writer.end(frame)

    def _store(self, ring: Ring, frame: Frame, end: int, active_ns: int, error: str | None, waited_ns: int = 0) -> None:
        own_waited_ns = 0
        if waited_ns:
            if active_ns < 0:
                active_ns = end - frame[7] - waited_ns
            own_waited_ns = take_waited(frame, active_ns, waited_ns)
        if frame[10]:
            error = error_told(frame[10], error)
        if ring is not frame[5]:
            self._renew(frame)
        if own_waited_ns:
            ring.waits[frame[16]] = ring.waits.get(frame[16], 0) + own_waited_ns
        row = ended_row(frame, end, active_ns, error)
        ring.put(row)
        if self._writer is not None:
            self._write(ring, frame, row, own_waited_ns)
