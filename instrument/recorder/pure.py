"""The recorder's hot path in Python: the twin of `_recorder.c`, with the same classes and the same behaviour.

A call goes: parent from the context, clock, the host's own work, clock, one tuple into this thread's ring. Parentage
lives in one context variable, so it follows threads, asyncio tasks, and executors that copy the context.

Under a running event loop the variable holds the innermost frame, for tasks copy their context behind our back.
Elsewhere to write it twice a call would cost a fifth of the call: there it holds a `Chain`, which knows the innermost
frame, and `publish_to` tells a copied context the frame instead. A copy that nobody told us of shares the chain: on the
same thread its calls still nest as they run, on another one they begin at the chain's base.

An open span is a *frame*, a list that only this module touches:

    0 node   1 span id   2 parent id   3 root id   4 time of the children ns   5 ring   6 frame above
    7 start ns   8 task   9 counted against the frame above from ns   10 attributes or None   11 state
    12 the chain that the context variable held before, or None   13 what times the span on a device, or None
    14 the request that it is in: the frame of its tree's root, or None
    15 the frame that the context held before, where that had ended   16 the index of the node that it is counted under

The frame above is the nearest one that is open, also above a frame that has ended: so whoever came from that finds it.

A finished span is a *row*: see `instrument.recording.ring`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from types import FunctionType
from typing import Any

from instrument.errors import error_name
from instrument.recorder.http_status import ANSWER_BYTES, FIRST_OF_SERVER, REQUEST_BYTES, STATUS, status_of
from instrument.recording.ring import REQUEST_BIT, First, Ring, Rings, Row, is_request_root
from instrument.recording.spans import (
    ATTRIBUTE_LIMIT,
    ERROR_TYPE,
    FIRST_ITEM,
    ITEMS,
    LAST_ITEM,
    LONGEST_GAP,
    OTHER_ERROR,
    STATUS_CODE,
    Site,
)
from instrument.recording.tally import Node, Totals
from instrument.runtime.faults import FAULTS
from instrument.runtime.unpatched import RLock

Frame = list[Any]

NODE_LIMIT = 16_384
OVERFLOW_SITES = 4_096
"""Sites that have a line of their own below that of what came after the node limit."""
EDGE_LIMIT = 8 * NODE_LIMIT
"""Steps to nodes that are not below; those beyond are looked for each time."""

LENGTH_DIGITS = 18
"""Digits of a length that is taken: what fits into 63 bits, however large."""

CLOSED, OPEN, MANUAL = 0, 1, 2

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


def task_probe() -> int:
    """Identity of the running asyncio task; 0 under a loop without one, -1 where no loop runs."""
    if _running_loop is None:
        if "asyncio" not in _modules:
            return -1
        _watch_tasks()
        if _running_loop is None:
            return -1
    loop = _running_loop()
    if loop is None:
        return -1
    task = _current_task(loop)
    return 0 if task is None else id(task)


def task_readers() -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """What gives the running loop, and the task that runs on one; None until asyncio has been imported."""
    task_probe()
    return None if _running_loop is None else (_running_loop, _current_task)


def _task_id() -> int:
    found = task_probe()
    return max(found, 0)


def error_told(attributes: Mapping[Any, Any], error: str | None) -> str | None:
    """The error of a span that has ended: what its status says, where somebody has set one, else what it was."""
    status = attributes.get(STATUS_CODE)
    if status == "OK":
        return None
    if status != "ERROR":
        return error
    told = attributes.get(ERROR_TYPE)
    return told if isinstance(told, str) and told else error or OTHER_ERROR


def header_values(headers: Iterable[tuple[bytes, bytes]], names: tuple[bytes, ...]) -> tuple[bytes | None, ...]:
    """The values of headers by their names, of pairs of both: of several by one name the last."""
    found = dict(headers)
    return tuple(found.get(name) for name in names)


class Chain:
    """The frames that a context opened without an event loop. `base` is the frame that the variable held before."""

    __slots__ = ("__weakref__", "base", "ring", "thread", "top")

    def __init__(self, base: Frame | None, ring: Ring) -> None:
        self.base = self.top = base
        self.ring = ring
        self.thread = threading.get_ident()


def _open(frame: Frame | None) -> Frame | None:
    """The nearest frame that is open, from this one upwards."""
    if frame is None or frame[11] != CLOSED:
        return frame
    return next((above for above in _upwards(frame) if above[11] != CLOSED), None)


def _top(place: Chain | Frame | None) -> Frame | None:
    """The innermost frame of a context, of what its variable holds."""
    if place.__class__ is Chain:
        return place.top if place.thread == threading.get_ident() else place.base
    return place  # type: ignore[return-value]


DEEPEST = 100_000
"""No chain is as long: one that seems so goes round, and is cut."""


def _upwards(frame: Frame | None) -> Iterator[Frame]:
    """A frame and those above it.

    From CPython 3.12 on, the collector and signal handlers come in between any two lines of ours, and what they end or
    reset may leave two frames above each other. The span tree is wrong there; the service must not stand still.
    """
    for _ in range(DEEPEST):
        if frame is None:
            return
        yield frame
        last, frame = frame, frame[6]
    last[6] = None


class Pass:
    """Counts the calls of a muted site. To a wrapper it is a recorder that is off, which counts who asks."""

    __slots__ = ("_by_thread", "_core", "cut")

    def __init__(self, core: Core) -> None:
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


class Core:
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
        self.passes: dict[Site, Pass] = {}
        self.node_limit = NODE_LIMIT
        self._ring_bytes = ring_bytes
        self._remote_key = remote_key
        self._link_of = link_of
        self._thread_name = thread_name
        self._current: ContextVar[Chain | Frame | None] = ContextVar("instrument_current", default=None)
        self._next_id = itertools.count(2, 2).__next__
        self._lock = RLock()
        self._chains: weakref.WeakSet[Chain] = weakref.WeakSet()
        self._begin_tree(overflow, [])
        self._reset(None)

    def _reset(self, ring_bytes: int | None) -> None:
        if ring_bytes is not None:
            self._ring_bytes = ring_bytes
        self._lock = RLock()
        before: Rings | None = getattr(self, "_rings", None)
        if before is not None:
            # Not `rings()`: in a forked child a thread that is gone may hold the lock.
            self._begin_tree(self._overflow.site, self._open_frames(before.unlocked()))
        self._rings = Rings(self._ring_bytes, self._nodes, self._thread_name)
        self._apart: dict[int, Frame] = {}  # open frames that are in no chain, and innermost ones of suspended bodies
        self._begun_in: dict[int, Frame | None] = {}  # the span above that of a generator, by the id of that
        self.irregular: Counter[str] = Counter()

    # ---------------------------------------------------------------- nodes and rings

    def _begin_tree(self, overflow: Site, frames: Iterable[Frame]) -> None:
        """Begin a new call tree, which has the paths of the frames and no other."""
        self._nodes: list[Node] = []
        self._edges = 0
        self._root = Node(-1, Site("(root)"), None)
        self._overflow = self._new_node(self._root, overflow)
        for frame in frames:
            self._renew(frame)

    def _renew(self, frame: Frame) -> None:
        """Count a span at its path in the call tree of now, if it began before a reset."""
        nodes, node, index = self._nodes, frame[0], frame[16]
        if index < len(nodes) and (nodes[index] is node or nodes[index] is node.inner):
            return
        is_inner, path, node = index != node.index, node.path(), self._root
        for site in path:
            node = self._node(node, site)
        if is_inner:
            self._let_recur(node)
        frame[0], frame[16] = node, (node.inner or node).index if is_inner else node.index

    def _new_node(self, parent: Node, site: Site) -> Node:
        nodes = self._nodes
        node = Node(len(nodes), site, parent)
        nodes.append(node)
        while nodes[node.index] is not node:  # a finaliser or signal handler came in between and made one as well
            node.index += 1
        parent.children.setdefault(site, node)
        return node

    def _node(self, parent: Node, site: Site) -> Node:
        """The node of a site called under a parent.

        On first sight that of the parent's path which is of the site, where there is one, so that recursion makes no
        nodes; else a new one, as long as the tally has room.
        """
        with self._lock:
            node = parent.children.get(site)
            if node is not None:
                return node
            again: Node | None = parent
            while again is not None and again.site is not site:
                again = again.parent
            if again is not None:
                between = parent
                while between is not again and between.parent is not None:
                    self._let_recur(between)
                    between = between.parent
                self._let_recur(again)
                node = again
            elif len(self._nodes) < self.node_limit:
                return self._new_node(parent, site)
            else:
                node = self._overflow_of(site)
            if self._edges < EDGE_LIMIT:
                parent.children[site] = node
                self._edges += 1
            return node

    def _overflow_of(self, site: Site) -> Node:
        """Where calls of a site are counted that come when the tally is full."""
        node = self._overflow.children.get(site)
        if node is None and len(self._overflow.children) < OVERFLOW_SITES:
            node = self._new_node(self._overflow, site)
            self._let_recur(node)
        return node or self._overflow

    def _let_recur(self, node: Node) -> None:
        """Count calls of a node that run inside a call of it apart from now on."""
        if node.inner is None and node.parent is not None:
            inner = self._new_node(node.parent, node.site)
            inner.inner = node.inner = inner

    def _index(self, node: Node, above: Frame | None, ring: Ring) -> int:
        """Under which index a call of a node that may recur counts, which begins below a frame."""
        for frame in _upwards(above):
            if frame[0] is node and frame[5].thread_id == ring.thread_id and frame[11] != CLOSED:
                node = node.inner or node
                break
        index: int = node.index
        return index

    def _ring(self) -> Ring:
        try:
            return self._rings.local.ring
        except AttributeError:
            return self._rings.new()

    @property
    def node_count(self) -> int:
        """Call paths known."""
        return len(self._nodes)

    def nodes_from(self, first: int, sites: list[Site]) -> tuple[bytes, bytes]:
        """Of the nodes from a number on, where their sites are in a list, and their parents, -1 for none: 32 bits each.

        Sites that the list has not are added to it.
        """
        nodes = self._nodes[first:]
        number_of = {site: number for number, site in enumerate(sites)} if nodes else {}
        for node in nodes:
            if node.site not in number_of:
                sites.append(node.site)
                number_of[node.site] = len(number_of)
        parents = array("i", [node.parent.index if node.parent else -1 for node in nodes])
        return array("i", [number_of[node.site] for node in nodes]).tobytes(), parents.tobytes()

    def rings(self) -> list[Ring]:
        """The rings in the order in which their threads first recorded."""
        return self._rings.all()

    @property
    def ended_rows(self) -> int:
        """Rows of rings that were given up."""
        return self._rings.ended_rows

    @property
    def ended_too_short(self) -> int:
        """The same of `Ring.too_short`."""
        return self._rings.ended_too_short

    def ended_totals(self) -> dict[int, Totals]:
        """Totals of threads whose rings were given up."""
        return self._rings.copied_ended_totals()

    def calls_by(self, groups: Sequence[int], count: int) -> list[int]:
        """How often the nodes of each group were called, on all threads together."""
        calls = [0] * count
        for book in (self.ended_totals(), *(ring.copied_totals() for ring in self.rings())):
            for index, totals in book.items():
                if index < len(groups):
                    calls[groups[index]] += totals.calls
        return calls

    def ended_firsts(self) -> dict[int, First]:
        """Their first calls, as `Ring.firsts` has them."""
        return self._rings.copied_ended_firsts()

    def now_ns(self) -> int:
        """The clock that spans are timed with."""
        return _clock()

    def count(self, what: str) -> None:
        """Count an irregular event."""
        self.irregular[what] += 1

    def count_device(self, ring: Ring, index: int, host_ns: int, device_ns: int, elapsed_ns: int) -> bool:
        """Add the device time of a call that was counted: False where no such call was."""
        return ring.count_device(index, host_ns, device_ns, elapsed_ns)

    # ---------------------------------------------------------------- spans, opened and closed

    def _chain(self, place: Chain | Frame | None, ring: Ring) -> Chain:
        """The chain of this context, which holds none yet, one of another thread, or one from before a reset."""
        if isinstance(place, Chain) and place.thread == threading.get_ident():
            place.ring = ring
            return place
        chain = Chain(_top(place), ring)
        with self._lock:
            self._chains.add(chain)
        self._current.set(chain)
        return chain

    def open(self, site: Site, attributes: dict[Any, Any] | None = None, state: int = OPEN) -> Frame:
        """Begin a span under the current one and make it current."""
        place = self._current.get()
        ring = self._ring()
        chain = held = None
        task = 0
        # What is opened by hand may be closed by another thread in this context, so the variable must tell it.
        if state != MANUAL and (
            ("asyncio" not in _modules or task_probe() < 0) if _running_loop is None else _running_loop() is None
        ):
            chain = place if place.__class__ is Chain and place.ring is ring else self._chain(place, ring)
            parent = chain.top
        else:
            parent = _top(place)
            task = _task_id()
            if place.__class__ is Chain:
                held = place
        span_id = self._next_id()
        frame = self._new_frame(site, span_id, parent, ring, task, attributes, state, held)
        request = frame[14]
        if site.kind == "request" and (request is None or request[11] == CLOSED):
            frame[1] = frame[3] = span_id = span_id | REQUEST_BIT
            frame[14] = frame
            if self.remote_parent is not None:
                self._note_remote(frame)
        # A signal handler may raise after any call, and then nobody has the frame to end it.
        try:
            if chain is not None:
                chain.top = frame
            else:
                self._apart[span_id] = frame
                self._current.set(frame)
            ring.top = frame
            frame[7] = frame[9] = _clock()
            if (site.device or self.watches_all) and self.begin_device is not None:
                self._begin_on_device(frame)
            return frame
        except BaseException:
            self._abandon(frame)
            raise

    def _abandon(self, frame: Frame) -> None:
        """End a span whose begin was broken off, if it is open."""
        self._apart.pop(frame[1], None)
        if _top(self._current.get()) is frame:
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
        held: Chain | None,
    ) -> Frame:
        """A frame below the nearest that is open. Where all have ended it is a root and says what it came from."""
        ended = place if place is not None and place[11] == CLOSED else None
        parent = place if ended is None else _open(ended)
        above = self._root if parent is None else parent[0]
        node = above.children.get(site) or self._node(above, site)
        index = node.index if node.inner is None else self._index(node, parent, ring)
        start = _clock()
        if parent is not None:
            parent_id, root_id, request = parent[1], parent[3], parent[14]
            return [
                node, span_id, parent_id, root_id, 0, ring, parent, start, task, start, attributes, state, held, None,
                request, ended, index,
            ]  # fmt: skip
        if ended is not None:
            remote = ((ended[14] or ended)[10] or {}).get(self._remote_key)
            attributes = {**(attributes or {}), **self._link_of(ended[1], ended[3], remote)}
        return [
            node, span_id, 0, span_id, 0, ring, None, start, task, start, attributes, state, held, None, None, ended,
            index,
        ]  # fmt: skip

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
        self._apart.pop(frame[1], None)
        place = self._current.get()
        current = place.top if isinstance(place, Chain) else place
        owner = frame[6]
        above = frame[6] = _open(owner)  # or tasks that start one another would hold a chain of all that ever were
        if current is frame:
            if place.__class__ is Chain and place.base is not frame:
                place.top = frame[15] or owner
            else:
                self._current.set(frame[12] or frame[15] or owner)
            frame[12] = frame[15] = None
        elif current is not None:
            self._cross(frame, current, end, anywhere)
        if frame[14] is frame:
            frame[14] = None  # the collector alone could free it
        ring = self._ring()
        ring.top = above
        if owner is not None and owner[5] is ring and owner[8] == frame[8]:
            owner[4] += end - frame[9]
        self._store(ring, frame, end, -1, None if error is None else self._error_of(frame, error))
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

    def annotate(self, frame: Frame | None, attributes: Mapping[Any, Any], /) -> None:
        """Set attributes of an open span. They are taken as they are, so long as there is room."""
        if frame is None:
            return
        if frame[11] == CLOSED:
            self.irregular["span annotated that is not open"] += 1
            return
        known = dict(frame[10] or {})  # a copy, since rows and other spans may have it
        for name, value in attributes.items():
            if len(known) < ATTRIBUTE_LIMIT or name in known:
                known[name] = value
            else:
                self.irregular["attributes beyond the limit of a span"] += 1
        frame[10] = known

    def _innermost(self) -> Frame | None:
        """The innermost open span of this context."""
        return _open(_top(self._current.get()))

    def annotate_innermost(self, attributes: Any = None, /, **more: Any) -> None:
        """Set attributes of the innermost open span; see `instrument.recorder.scopes.annotate`."""
        frame = self._innermost() if self.on else None
        if frame is not None:
            self.annotate(frame, self._annotate_checked(attributes, more))

    def annotate_request(self, attributes: Any = None, /, **more: Any) -> None:
        """Set attributes of the open request; see `instrument.recorder.scopes.annotate_request`."""
        frame = self._innermost() if self.on else None
        request = None if frame is None else frame[14]
        if request is not None and request[11] != CLOSED:
            self.annotate(request, self._annotate_checked(attributes, more))

    def _annotate_checked(self, attributes: Any, more: dict[str, Any]) -> dict[Any, Any]:
        raise NotImplementedError

    def site_of_open(self, frame: Frame | None) -> Site | None:
        """The site of an open span, or with None of the innermost one; None where there is none."""
        found = self._innermost() if frame is None else frame
        return None if found is None or found[11] == CLOSED else found[0].site

    def rename_innermost(self, site: Site) -> None:
        """Rename the innermost open span of this context."""
        self.rename(self._innermost(), site)

    def rename(self, frame: Frame | None, site: Site) -> None:
        """Let an open span be one of another site of its kind from now on, and never raise.

        It counts at the call path of the new site, and so does what is open below it, in any context, and what begins
        there later. What has ended below it stays counted where it was. A frame that has ended, or one of another kind,
        is counted.
        """
        if frame is None:
            return
        if frame[11] == CLOSED:
            self.irregular["span renamed that is not open"] += 1
        elif getattr(site, "kind", None) != frame[0].site.kind:
            self.irregular["span not renamed to a site of another kind"] += 1
        elif frame[0].site is not site:
            with self._lock:
                self._rename(frame, site)

    def _rename(self, frame: Frame, site: Site) -> None:
        open_ = {each[1]: each for each in self._open_frames(self.rings())}
        if frame[1] not in open_:
            self.irregular["span renamed that is not open"] += 1
            return
        for each in open_.values():
            self._renew(each)
        below: set[int] = {frame[1]}
        apart: set[int] = set()
        order = [frame]
        for each in open_.values():
            path: list[Frame] = []
            above: Frame | None = each
            while above is not None and above[1] not in below and above[1] not in apart:
                path.append(above)
                above = self._above(above)
            if above is not None and above[1] in below:
                below.update(member[1] for member in path)
                order += reversed(path)
            else:
                apart.update(member[1] for member in path)
        old = {each[1]: each[0] for each in order}
        for each in order:
            above = self._above(each)
            from_ = None if above is None else old.get(above[1], above[0])
            each[0] = self._moved(each[0], above, from_, site if each is frame else each[0].site)
        for each in order:
            node = each[0]
            is_inner = node.inner is not None and any(
                above[0] is node and above[5].thread_id == each[5].thread_id for above in self._all_above(each)
            )
            each[16] = node.inner.index if is_inner else node.index

    def _moved(self, old: Node, above: Frame | None, from_: Node | None, site: Site) -> Node:
        """The node of a site below the frame above, by the path that led from there, at `from_`, to the old node."""
        full = self._overflow
        between: list[Site] = []
        at = old.parent
        if above is None:  # all above it have ended
            return self._node(self._root if at is None or full in (old, at) else at, site)
        while at is not None and at is not from_:
            between.append(at.site)
            at = at.parent
        node = above[0]
        # Where it is not below its calls fold into one around it, or the tally is full.
        for step in reversed(between) if at is not None and old is not from_ else ():
            node = self._node(node, step)  # of a span that has ended
        return self._node(node, site)

    def _above(self, frame: Frame) -> Frame | None:
        """The nearest open frame above; of a generator's span that below which it began, whoever has resumed it."""
        return _open(self._begun_in[frame[1]] if frame[1] in self._begun_in else frame[6])

    def _all_above(self, frame: Frame) -> Iterator[Frame]:
        above = self._above(frame)
        for _ in range(DEEPEST):
            if above is None:
                return
            yield above
            above = self._above(above)

    def _open_frames(self, rings: Iterable[Ring]) -> list[Frame]:
        """The frames that are open, of every context."""
        with self._lock:
            chains = list(self._chains)
        tops = [*(ring.top for ring in rings), *self._apart.copy().values(), *(chain.top for chain in chains)]
        found: dict[int, Frame] = {}
        for top in tops:
            for frame in _upwards(top):
                if frame[1] in found:
                    break
                found[frame[1]] = frame
        return [frame for frame in found.values() if frame[11] != CLOSED]

    def record(self, site: Site, start_ns: int, attributes: dict[Any, Any] | None, pair: Any = None) -> None:
        """Store a span that has just ended and had no children, for what turns out only afterwards to be worth one."""
        end = _clock()
        place = _top(self._current.get())
        ring = self._ring()
        task = _task_id()
        frame = self._new_frame(site, self._next_id(), place, ring, task, attributes, CLOSED, None)
        frame[7] = frame[9] = start_ns
        frame[13] = pair
        parent = frame[6]
        if parent is not None and parent[5] is ring and parent[8] == task:
            parent[4] += end - start_ns
        self._store(ring, frame, end, -1, None)
        if pair is not None:
            self._end_on_device(ring, frame, end)

    def _cross(self, frame: Frame, current: Frame, end: int, anywhere: bool) -> None:
        """End `frame` while `current`, opened inside it, goes on: what follows counts against the frame above."""
        for below in _upwards(current):
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
        held = below[12]
        if held is None:
            below[12] = frame[12]
        elif held.top is frame:
            held.top = frame[6]

    @staticmethod
    def _error_of(frame: Frame, error: BaseException | str) -> str | None:
        """The error's name. An exception that is an answer below 500 is none; a request bears the answer's status."""
        if isinstance(error, str):
            return error
        status = status_of(error)
        if status is not None and frame[0].site.kind == "request":
            frame[10] = {**(frame[10] or {}), STATUS: status}
        return error_name(error) if status is None or status >= FIRST_OF_SERVER else None

    def _store(self, ring: Ring, frame: Frame, end: int, active_ns: int, error: str | None) -> None:
        if frame[10]:
            error = error_told(frame[10], error)
        if ring is not frame[5]:
            self._renew(frame)
        head = ring.head
        ring.rows[head & ring.mask] = (
            frame[16], frame[1], frame[2], frame[3], frame[8], frame[7], end, frame[4], active_ns, error,
            frame[10],
        )  # fmt: skip
        ring.head = head = head + 1
        if not head & ring.fold_mask:
            ring.fold(self._nodes)

    # ---------------------------------------------------------------- what is open

    def current_id(self) -> int:
        """Identity of the current span, 0 if there is none."""
        frame = _open(_top(self._current.get()))
        return 0 if frame is None else int(frame[1])

    def current_trace(self) -> tuple[int, int, Any] | None:
        """Identities of the innermost open span and its tree's root, and what its request noted of another tracer."""
        frame = self._innermost()
        if frame is None:
            return None
        request = frame[14]
        return frame[1], frame[3], None if request is None else (request[10] or {}).get(self._remote_key)

    def publish_to(self, context: Context) -> None:
        """Make the current span known to a context that has just been copied from this one."""
        place = self._current.get()
        if place.__class__ is Chain:
            context.run(self._current.set, _top(place))

    def forget_current(self) -> None:
        """Forget what is open in this context."""
        self._current.set(None)

    def _forget_all(self) -> None:
        """Forget what is open in every context: in a forked child, where the other threads are gone."""
        self._apart.clear()
        self._begun_in.clear()
        self._chains.clear()
        self._current.set(None)

    def innermost_manual(self, name: str | None) -> Frame | None:
        """The innermost open frame of this context that was opened as manual, by name where one is given."""
        for frame in _upwards(_top(self._current.get())):
            if frame[11] == MANUAL and (name is None or frame[0].site.name == name):
                return frame
        return None

    def open_requests(self, thread_id: int) -> int:
        """How many requests are open that tasks have begun on a thread."""
        rows = (row for begun_on, row in self.open_rows() if begun_on == thread_id)
        return sum(row[4] != 0 and is_request_root(row) for row in rows)

    def open_rows(self) -> list[tuple[int, Row]]:
        """Thread id and row of each span that is open now, ending now."""
        now = _clock()
        found: list[tuple[int, Row]] = []
        for frame in self._open_frames(self.rings()):
            if frame[7]:
                row: Row = (
                    frame[0].index, frame[1], frame[2], frame[3], frame[8], frame[7], max(now, frame[7]), frame[4],
                    -1, None, None if frame[10] is None else dict(frame[10]),
                )  # fmt: skip
                found.append((frame[5].thread_id, row))
        return found


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
        if ("asyncio" not in _modules or task_probe() < 0) if _running_loop is None else (_running_loop() is None):
            chain = place if place.__class__ is Chain and place.ring is ring else core._chain(place, ring)
            parent = chain.top
            task = 0
            held = None
        else:
            chain = None
            parent = _top(place)
            task = _task_id()
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
            ]  # fmt: skip
        elif parent[11]:
            above = parent[0]
            node = above.children.get(site) or core._node(above, site)
            index = node.index if node.inner is None else core._index(node, parent, ring)
            frame = [
                node, span_id, parent[1], parent[3], 0, ring, parent, start, task, start, None, 1, held, None,
                parent[14], None, index,
            ]  # fmt: skip
        else:
            frame = core._new_frame(site, span_id, parent, ring, task, None, 1, held)
            node, parent, index = frame[0], frame[6], frame[16]
        # All of it in one `try`: a signal handler may raise after any call.
        try:
            if chain is None:
                core._apart[span_id] = frame
                set_(frame)
            else:
                chain.top = frame
            ring.top = frame
            frame[7] = frame[9] = start = clock()
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
            frame[6] = parent if parent[11] else _open(parent)
            if parent[5] is ring and parent[8] == task:
                parent[4] += end - start
        if ring.ended:  # by a reset
            ring = core._ring()
            core._renew(frame)
        head = ring.head
        ring.rows[head & ring.mask] = (
            frame[16], span_id, frame[2], frame[3], task, start, end, frame[4], -1,
            error_told(frame[10], None) if frame[10] else None, frame[10],
        )  # fmt: skip
        ring.head = head = head + 1
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


class Stretch:
    """A generator's span: current only while the body runs, its active time against whoever resumed it."""

    __slots__ = (
        "_active_ns", "_attributes", "_caller", "_chain", "_core", "_first_item_ns", "_inner", "_items",
        "_last_item_ns", "_longest_gap_ns", "_parent", "_place", "_resumed_ns", "_site", "_suspended_ns", "frame",
    )  # fmt: skip

    def __init__(self, core: Core, site: Site, attributes: dict[Any, Any] | None = None) -> None:
        self._core = core
        self._site = site
        self._attributes = attributes
        self.frame: Frame | None = None
        self._caller: Frame | None = None
        self._chain: Chain | None = None
        self._place: Chain | Frame | None = None
        self._inner: Frame | None = None
        self._parent: Frame | None = None
        self._active_ns = 0
        self._resumed_ns = 0
        self._suspended_ns = 0
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
            self._place = core._current.get()
            frame = self.frame = core.open(self._site, self._attributes)
            self._parent = frame[6]
            self._caller = frame[15] or frame[6]
            frame[15] = None
            place = core._current.get()
            self._chain = place if isinstance(place, Chain) else None
            core._apart[frame[1]] = frame
            core._begun_in[frame[1]] = frame[6]
            self._resumed_ns = frame[7]
            return None
        inner = self._inner
        if inner is None:
            return None
        now = _clock()
        gap_ns = now - self._suspended_ns
        ring, task = core._ring(), task_probe()
        self._place = place = core._current.get()
        self._inner = None
        if task < 0:
            chain = self._chain = core._chain(place, ring)
            self._caller = chain.top
            chain.top = inner
            task = 0
        else:
            self._chain = None
            self._caller = _top(place)
            core._current.set(inner)
        frame[6] = _open(self._caller)
        ring.top = inner
        for own in () if inner is frame else _upwards(inner):
            if own is frame:
                break
            # A scope left open across a yield did not work meanwhile.
            core._renew(own)
            own[4] += gap_ns
            own[9] += gap_ns
            own[5], own[8], own[12] = ring, task, None
        frame[5], frame[8], frame[12] = ring, task, None
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
        top = inner = _top(core._current.get())
        if inner is not frame and all(above is not frame for above in _upwards(inner)):
            return  # ended elsewhere
        self._inner = core._apart[frame[1]] = top  # type: ignore[assignment]
        caller, self._caller = self._caller, None
        above, frame[6] = frame[6], None
        place, self._place = self._place, None
        chain, self._chain = self._chain, None
        if chain is not None:
            chain.top = caller
            place = chain
        if core._current.get() is not place:
            core._current.set(place)
        frame[5].top = caller
        if above is not None and above[5] is frame[5] and above[8] == frame[8]:
            above[4] += step_ns
        if frame[13] is not None:
            frame[13].pause()

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
        core._apart.pop(frame[1], None)
        core._begun_in.pop(frame[1], None)
        frame[11] = CLOSED
        frame[6], self._parent = _open(self._parent), None
        self._inner = None
        ring = core._ring()
        core._store(ring, frame, end, self._active_ns, None if error is None else core._error_of(frame, error))
        if frame[13] is not None:
            core._end_on_device(ring, frame, end)


class Scope:
    """A span around a block."""

    __slots__ = ("_attributes", "_frame", "_recorder", "_site")

    def __init__(self, recorder: Core, site: Site, attributes: dict[Any, Any] | None = None) -> None:
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
