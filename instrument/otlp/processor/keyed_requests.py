"""The requests of all processes of a run by their keys, from their begins on: whose a key is at a time, and was.

What is known of keys comes from rows as they are read, see `instrument.otlp.processor.key_facts`: of all requests, for
those that are not kept have their keys, too. A request that lies within another one of its key, in another process, is
a part of that one. Of those that have not ended the ones of other processes than the first one's count as parts.
What bears the key of one request in the tree of another one of its process makes it no key of that other one.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from instrument.otlp.packing import Ids
from instrument.otlp.processor.key_facts import KeyedRoot, KeyFacts
from instrument.otlp.processor.own_work import NEVER_NS, NO_PHASES, OwnPhases
from instrument.otlp.processor.served_batches import Needed, ServedBatches
from instrument.recorder.shelf import is_sampled
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import BATCH_KEYS, KEY, Site, Span
from instrument.trace.ledger import phase_of
from instrument.trace.step_kinds import StepKinds

KEYS_KNOWN = 20_000
"""Keys of requests that are remembered; the oldest go first, of requests that have ended before others."""

UNDER_ONE_KEY = 8
"""Requests that are known by one key, for keys come again."""

GIVERS = 64
"""Spans of a request that may have handed it over: the newest."""

ENDED_NS = 10**10
"""How long a request is remembered that has ended, and that nobody has kept yet."""

MOST_EDGES = 256
"""Phases of other processes that are remembered of a request: the first ones that were read."""

OPEN_NS = 1 << 62
"""When a request ends that is open."""

Edges = list[tuple[int, int]]
"""Begin and end of a request's own phases."""


class ReadProcess(Protocol):
    """A process whose requests others may serve."""

    is_over: bool
    """Whether it has ended, and all that it recorded has been read."""

    is_behind: bool
    """Whether it has recorded what is not read at the moment."""

    @property
    def undecided(self) -> int:
        """Its kept requests that wait, for they may be parts of others."""

    @property
    def lag_ns(self) -> int:
        """How far it is behind."""

    def note_work(self, *, at_once: bool) -> None:
        """Note what it did for requests of others, as far as it is known whose these are."""


class _Giver(NamedTuple):
    """A span with a key that may have handed a request over, and whether it is of that one's own tree."""

    start_ns: int
    end_ns: int
    span_id: int
    is_own: bool
    key: str


@dataclass(slots=True, eq=False)
class KeyedRequest:
    """A request that bears keys. `caller` is its own span, as spans below it in other processes have it for a parent.

    `is_sure` is whether it is kept whatever comes, and `is_kept` whether it has been. `givers` are its
    spans with keys. `work` are its own phases until its stages are known. It began in the tree of the one that it is
    `within`, and `is_around_others` in its own one. Also of one that is not kept there are its `own` phases, once it
    has ended, and those `elsewhere`, of which there are others that began after `missing_ns`.
    """

    instance: str
    start_ns: int
    end_ns: int
    caller: RemoteParent
    is_sure: bool = False
    is_kept: bool = False
    keys: dict[str, None] = field(default_factory=dict)
    givers: list[_Giver] = field(default_factory=list)
    work: Edges | None = None
    within: KeyedRequest | None = None
    has_caller: bool = False
    is_around_others: bool = False
    own: OwnPhases = NO_PHASES
    elsewhere: Edges = field(default_factory=list)
    missing_ns: int = NEVER_NS

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.end_ns == OPEN_NS

    def is_around(self, other: KeyedRequest) -> bool:
        """Whether another one of its key, which has ended, is a part of it."""
        if other is self or other.is_open or other.start_ns < self.start_ns:
            return False
        return other.end_ns <= self.end_ns and (self.start_ns, self.end_ns) != (other.start_ns, other.end_ns)

    def note_elsewhere(self, phases: OwnPhases) -> None:
        """Other processes did this for it."""
        room = max(MOST_EDGES - len(self.elsewhere), 0)
        self.elsewhere += phases.edges[:room]
        missing = [phases.missing_ns, *(start_ns for start_ns, _ in phases.edges[room:])]
        self.missing_ns = min(self.missing_ns, *missing)

    def below(self, start_ns: int, instance: str, key: str = "") -> RemoteParent:
        """What a span that began then lies below, by its key if it has one."""
        before = [one for one in self.givers if one.start_ns < start_ns and key in ("", one.key)]
        still_open = [one for one in before if one.end_ns > start_ns]
        ended = [one for one in before if one.is_own]
        span_id = self.caller.span_id
        if still_open:
            span_id = max(still_open, key=lambda one: (one.start_ns, -one.end_ns)).span_id
        elif ended:
            span_id = max(ended, key=lambda one: one.end_ns).span_id
        is_local, caller = instance == self.instance, self.caller
        return RemoteParent(caller.trace_id, span_id, caller.flags, is_local, is_local, caller.state)

    def take_in(self, spans: Sequence[Span], ids: Ids, *, is_own: bool) -> Iterator[str]:
        """Note what more is the request's: the keys that these spans bear come out, what they are of it stays."""
        for span in spans:
            if isinstance(key := span.attributes.get(KEY), str) and key:
                yield key
                if not is_own or span.span_id != span.root_id:
                    self.givers.append(_Giver(span.start_ns, span.end_ns, ids.span_id(span.span_id), is_own, key))
            if self.work is not None and is_phase(span):
                self.work.append((span.start_ns, span.end_ns))
        del self.givers[:-GIVERS]


class KeyedRequests:
    """Used by one thread. `members` are the processes."""

    def __init__(self) -> None:
        self.members: dict[int, ReadProcess] = {}
        self._by_key: OrderedDict[str, list[KeyedRequest]] = OrderedDict()
        self._by_root: OrderedDict[tuple[tuple[int, ...], int], KeyedRequest] = OrderedDict()
        self._ended: deque[tuple[int, tuple[tuple[int, ...], int], KeyedRequest]] = deque()
        self._staged: dict[KeyedRequest, None] = {}
        self.batches = ServedBatches(self._needed)
        self.kinds = StepKinds()
        self._forgotten = 0
        self.known_since_ns = 0
        """What was done for requests before was read by another one."""

    # ---------------------------------------------------------------- what rows tell

    def learn(self, ids: Ids, facts: KeyFacts, sample: float) -> None:
        """Take in what a process's rows tell, of which this share of requests is kept in any case."""
        now_ns = time.monotonic_ns()
        for root in sorted(facts.roots, key=lambda one: one.start_ns):  # what one began within comes before it
            self._learn_root(ids, root, sample, now_ns)
        for root_id, key in facts.keys:
            request = self._by_root.get((ids.seeds, root_id))
            if request is not None and key not in request.keys:
                self._bind(key, request)
        for root_id in facts.gone:
            self._end((ids.seeds, root_id), now_ns, now_ns)
        self.batches.add(ids.instance, facts.batches)
        while self._ended and (self._ended[0][0] < now_ns - ENDED_NS or len(self._ended) > KEYS_KNOWN):
            _, root_of, request = self._ended.popleft()
            if self._by_root.get(root_of) is request:
                del self._by_root[root_of]
            if (whole := self.whole_of(request)) is not None:
                whole.note_elsewhere(self.work_of(request))
                request.own, request.elsewhere = NO_PHASES, []
            if not request.is_kept:
                self._unbind(request)

    def leave(self, ids: Ids) -> None:
        """A process, or a session of it, records no more: its requests that have not ended never will."""
        now_ns = time.monotonic_ns()
        for root_of in [one for one in self._by_root if one[0] == ids.seeds]:
            self._end(root_of, now_ns, now_ns)

    def _learn_root(self, ids: Ids, root: KeyedRoot, sample: float, now_ns: int) -> None:
        root_of = ids.seeds, root.root_id
        request = self._by_root.get(root_of)
        if request is None:
            remote = root.remote
            caller = _caller_of(root.root_id, remote, ids)
            is_sure = is_sampled(root.root_id, sample) if remote is None else bool(remote.flags & 1)
            request = KeyedRequest(ids.instance, root.start_ns, OPEN_NS, caller, is_sure)
            request.has_caller = remote is not None
            self._by_root[root_of] = request
            if root.within:
                unknown = KeyedRequest(ids.instance, 0, OPEN_NS, _caller_of(root.within, root.remote_around, ids))
                request.within = self._by_root.get((ids.seeds, root.within), unknown)
        if root.end_ns is not None:
            self._end(root_of, root.end_ns, now_ns)

    def _end(self, root_of: tuple[tuple[int, ...], int], end_ns: int, now_ns: int) -> None:
        request = self._by_root.get(root_of)
        if request is not None and request.is_open:
            request.end_ns = end_ns
            self._ended.append((now_ns, root_of, request))

    def _bind(self, key: str, request: KeyedRequest) -> None:
        request.keys[key] = None
        found = self._by_key.setdefault(key, [])
        found.append(request)
        if len(found) > UNDER_ONE_KEY:
            found.remove(next((one for one in found if not one.is_open), found[0]))
        self._by_key.move_to_end(key)
        looked = 0
        while len(self._by_key) > KEYS_KNOWN:
            oldest, its = self._by_key.popitem(last=False)
            looked += 1
            if any(one.is_open for one in its):
                if looked < KEYS_KNOWN:
                    self._by_key[oldest] = its
                else:
                    self._forgotten += 1

    def note_names(self, key: str, at_ns: int, others: Iterable[str]) -> None:
        """What is done for the request of a key bears other keys, too, and is not below it yet."""
        request = self.of(key, at_ns)
        for other in others:
            if request is not None and self.of(other, at_ns) is None:
                self._bind(other, request)

    def _unbind(self, request: KeyedRequest) -> None:
        for key in list(request.keys):
            self._release(key, request)

    def _release(self, key: str, request: KeyedRequest) -> None:
        request.keys.pop(key, None)
        found = self._by_key.get(key, [])
        if request in found:
            found.remove(request)
            if not found:
                del self._by_key[key]

    def _needed(self) -> Needed:
        asked = [*self._by_root.values(), *self._staged]
        keys = {key for one in asked for key in one.keys}
        since_ns = time.monotonic_ns() - ENDED_NS
        return Needed(keys, since_ns, min((one.start_ns for one in asked), default=since_ns))

    def forgotten(self) -> int:
        """How many keys of open requests have been forgotten since the last time, for they were too many."""
        found, self._forgotten = self._forgotten, 0
        return found

    # ---------------------------------------------------------------- what is kept

    def note(self, spans: Sequence[Span], ids: Ids) -> KeyedRequest:
        """A request is kept: its own span comes first. Its `work` is None where its batches are not remembered."""
        first = spans[0]
        caller = _caller_of(first.root_id, first.remote, ids)
        known = self._by_root.get((ids.seeds, first.root_id))
        request = KeyedRequest(ids.instance, first.start_ns, first.end_ns, caller) if known is None else known
        request.start_ns, request.end_ns, request.caller, request.is_kept = (
            first.start_ns, first.end_ns, caller, True,
        )  # fmt: skip
        if known is not None:
            request.work = []
            self._staged[request] = None
        for key in {**request.keys, **dict.fromkeys(request.take_in(spans, ids, is_own=True))}:
            if request not in self._by_key.get(key, ()):
                self._bind(key, request)
        return request

    def note_within(self, request: KeyedRequest, first: Span, spans: Sequence[Span], ids: Ids) -> KeyedRequest:
        """One in the tree of a request that has been noted is a request of its own; `spans` are its own."""
        caller = replace(request.caller, span_id=ids.span_id(first.span_id))
        found = KeyedRequest(ids.instance, first.start_ns, first.end_ns, caller, is_kept=True, within=request)
        if request.work is not None:
            found.work = []
            self._staged[found] = None
        for key in dict.fromkeys(found.take_in(spans, ids, is_own=True)):
            self._release(key, request)
            self._bind(key, found)
        return found

    def add(self, request: KeyedRequest, spans: Sequence[Span], ids: Ids, *, is_own: bool = False) -> None:
        """Spans have come below a request, or more of its own tree: their keys are the request's, too."""
        for key in dict.fromkeys(request.take_in(spans, ids, is_own=is_own)):
            if key not in request.keys:
                self._bind(key, request)

    def settle(self, request: KeyedRequest) -> None:
        """What became of a request's time is known: nothing of that is needed any more."""
        request.work = None
        self._staged.pop(request, None)

    # ---------------------------------------------------------------- whose a key is

    def _bearers(self, key: str) -> list[KeyedRequest]:
        """The requests that a key names, but those that bore it after another one of their process that was known by
        it first: what is done for that one lies in their trees. The same rule for files: `without_strays`."""
        found: list[KeyedRequest] = []
        named: set[str] = set()
        for one in self._by_key.get(key, ()):
            if next(iter(one.keys), key) == key:
                named.add(one.instance)
            elif one.instance in named:
                continue
            found.append(one)
        return found

    def of(self, key: str, at_ns: int) -> KeyedRequest | None:
        """The request that a key names at a time: of those that had begun, and are parts of none, the last one."""
        before = [one for one in self._bearers(key) if one.start_ns <= at_ns]
        first = min((one for one in before if one.is_open), key=lambda one: one.start_ns, default=None)
        whole = [
            one
            for one in before
            if (first is not None and one.is_open and one.instance == first.instance and one.within not in before)
            or not (one.is_open or any(other.is_around(one) for other in before))
        ]
        return max(whole, key=lambda one: one.start_ns, default=None)

    def linked(self, key: str, at_ns: int, *, is_sure: bool) -> KeyedRequest | None:
        """The request that a batch served which began then, if it `is_sure` that it is kept, or it may be."""
        found = self.of(key, at_ns)
        if found is None or found.is_kept or found.is_sure:
            return found
        return found if found.is_open and not is_sure else None

    def decided(self, key: str, at_ns: int) -> bool | None:
        """Whether a request is kept that has this key and was open then, None where one that is open has it."""
        found = self.of(key, at_ns)
        if found is not None and found.is_kept and at_ns <= found.end_ns:
            return True
        return None if any(one.is_open for one in self._bearers(key)) else False

    def around(self, root: Span, ids: Ids, keys: Iterable[str]) -> KeyedRequest | None:
        """The request within which one lies that has ended, by one of its keys: of several the outermost."""
        own = self._by_root.get((ids.seeds, root.root_id)) or _ended_as(root, ids)
        return self._around(own, keys)

    def _around(self, request: KeyedRequest, keys: Iterable[str]) -> KeyedRequest | None:
        found = [one for key in keys for one in self._bearers(key) if one is not request and one.is_around(request)]
        return min(found, key=lambda one: (one.start_ns, -one.end_ns), default=None)

    def whole_of(self, request: KeyedRequest) -> KeyedRequest | None:
        """The request that another one is a part of, which has ended: of one that its caller names there is none."""
        return None if request.has_caller else self._around(request, request.keys)

    def known(self, ids: Ids, root_id: int) -> KeyedRequest | None:
        """The request with a key that this is the root of."""
        return self._by_root.get((ids.seeds, root_id))

    def note_work(self, *, at_once: bool) -> None:
        """Have all processes note what they did for requests of others."""
        for one in self.members.values():
            one.note_work(at_once=at_once)

    def work_of(self, request: KeyedRequest) -> OwnPhases:
        """What was done for a request that has ended, in whatever process, but for what its batches did."""
        near = {one: None for key in request.keys for one in self._bearers(key)}
        its = [request, *(one for one in near if request.is_around(one) and self.whole_of(one) is request)]
        edges = [edge for one in its for edge in (*one.own.edges, *one.elsewhere)]
        return OwnPhases(edges, min(at_ns for one in its for at_ns in (one.own.missing_ns, one.missing_ns)))

    def began_within(self, root: Span, ids: Ids) -> KeyedRequest | None:
        """The request in whose own tree another one began."""
        known = self._by_root.get((ids.seeds, root.root_id))
        return None if known is None else known.within

    def followers(self, request: KeyedRequest, key: str) -> list[int]:
        """When others began, and were no parts of it, that a request's key named from then on."""
        found = (one for one in self._bearers(key) if one is not request)
        return [one.start_ns for one in found if one.start_ns > request.start_ns and not request.is_around(one)]

    @property
    def lag_ns(self) -> int:
        """How far the farthest of all processes is behind."""
        return max((one.lag_ns for one in self.members.values()), default=0)

    @property
    def are_over(self) -> bool:
        """Whether no process goes on."""
        return all(one.is_over for one in self.members.values())

    @property
    def are_behind(self) -> bool:
        """Whether any process has recorded what is not read at the moment."""
        return any(one.is_behind for one in self.members.values())

    @property
    def undecided(self) -> bool:
        """Whether there are kept requests that are not noted yet."""
        return any(one.undecided for one in self.members.values())


def _caller_of(root_id: int, remote: RemoteParent | None, ids: Ids) -> RemoteParent:
    """A request's own span as spans below it in other processes have it for a parent."""
    if remote is None:
        return RemoteParent(ids.trace_id(root_id), ids.span_id(root_id))
    return RemoteParent(remote.trace_id, ids.span_id(root_id), flags=remote.flags, state=remote.state)


def _ended_as(root: Span, ids: Ids) -> KeyedRequest:
    return KeyedRequest(ids.instance, root.start_ns, root.end_ns, RemoteParent(*ids.of(root)))


def is_phase(span: Span) -> bool:
    """Whether a span is a phase of the request's own work that it is of, and no batch."""
    return _is_phase(span.site) and BATCH_KEYS not in span.attributes


@lru_cache(maxsize=4096)
def _is_phase(site: Site) -> bool:
    return phase_of(site) is not None


def batch_of(attributes: Mapping[str, object]) -> Sequence[str]:
    """The keys of a batch, none of what is none."""
    found = attributes.get(BATCH_KEYS) if attributes else None
    return [key for key in found if isinstance(key, str)] if isinstance(found, list | tuple) else ()
