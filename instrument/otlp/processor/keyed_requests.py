"""The requests of all processes of a run by their keys, from their begins on: whose a key is at a time, and was.

What is known of keys comes from rows as they are read, see `instrument.otlp.processor.key_facts`: of all requests, for
those that are not kept have their keys, too. A request that lies within another one of its key, in another process, is
a part of that one. Of those that have not ended the ones of other processes than the first one's count as parts.
What bears the key of one request in the tree of another one, a stray, makes it no key of that other one; it is the
rule of `instrument.trace.sub_requests`.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from instrument.otlp.packing import Ids
from instrument.otlp.processor.handed_over import SpansWithKeys, SpanWithKey
from instrument.otlp.processor.key_facts import BorneKey, KeyedRoot, KeyFacts
from instrument.otlp.processor.key_traces import KeyTraces
from instrument.otlp.processor.known_request import OPEN_NS, Edges, Giver, KeyedRequest, is_phase
from instrument.otlp.processor.own_work import NO_PHASES, OwnPhases
from instrument.otlp.processor.served_batches import Needed, ServedBatches
from instrument.recorder.shelf import is_sampled
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import BATCH_KEYS, Span
from instrument.trace.step_kinds import StepKinds
from instrument.trace.sub_requests import are_strays

KEYS_KNOWN = 20_000
"""Keys of requests that are remembered; the oldest go first, of requests that have ended before others."""

UNDER_ONE_KEY = 512
"""Requests that are known by one key, for keys come again, such as the slots of an engine."""

NEAR = 8
"""The newest of them at a time, which are looked at."""

ENDED_NS = 10**10
"""How long a request is remembered that has ended, and that nobody has kept yet."""


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


class KeyedRequests:
    """Used by one thread. `members` are the processes."""

    def __init__(self) -> None:
        self.members: dict[int, ReadProcess] = {}
        self._by_key: OrderedDict[str, list[KeyedRequest]] = OrderedDict()
        self._by_root: OrderedDict[tuple[tuple[int, ...], int], KeyedRequest] = OrderedDict()
        self._ended: deque[tuple[int, tuple[tuple[int, ...], int], KeyedRequest]] = deque()
        self._staged: dict[KeyedRequest, None] = {}
        self._nested: dict[KeyedRequest, None] = {}
        self.batches = ServedBatches(self._needed)
        self.kinds = StepKinds()
        self._spans = SpansWithKeys()
        self._read_ns: dict[str, int] = {}
        """To which time each process has been read."""
        self._forgotten = self._misplaced = self._left_out = 0
        self.traces = KeyTraces()
        self.known_since_ns = 0
        """What was done for requests before was read by another one."""

    # ---------------------------------------------------------------- what rows tell

    def learn(self, ids: Ids, facts: KeyFacts, sample: float) -> None:
        """Take in what a process's rows tell, of which this share of requests is kept in any case."""
        now_ns = time.monotonic_ns()
        self._read_ns[ids.instance] = now_ns - self.lag_ns
        for root in sorted(facts.roots, key=lambda one: one.start_ns):  # what one began within comes before it
            self._learn_root(ids, root, sample, now_ns)
        for borne in facts.keys:
            request = self._by_root.get((ids.seeds, borne.root_id))
            if request is not None:
                self._bear(request, borne)
        for below in facts.below_others:
            request = self._by_root.get((ids.seeds, below.root_id))
            if request is not None and request.is_astray(below.key):
                self._note_work(below.key, [(below.start_ns, below.end_ns)])
            elif request is not None:
                request.note_below(below.key, (below.start_ns, below.end_ns))
        for root_id in facts.gone:
            self._end((ids.seeds, root_id), now_ns, now_ns)
        self.batches.add(ids.instance, facts.batches)
        self._spans.note(ids, facts.spans, self._by_root, now_ns, KEYS_KNOWN)
        self._spans.forget_old(now_ns, lambda key: any(one.is_open for one in self._by_key.get(key, ())))
        while self._ended and (self._ended[0][0] < now_ns - ENDED_NS or len(self._ended) > KEYS_KNOWN):
            _, root_of, request = self._ended.popleft()
            if self._by_root.get(root_of) is request:
                del self._by_root[root_of]
            if (whole := self.whole_of(request)) is not None:
                whole.note_elsewhere(self.work_of(request))
                whole.givers += self._handing_over(request)
                request.own, request.elsewhere, request.below_others = NO_PHASES, {}, {}
            if not request.is_kept:
                self._unbind(request)

    def leave(self, ids: Ids) -> None:
        """A process, or a session of it, records no more: its requests that have not ended never will."""
        now_ns = time.monotonic_ns()
        self._read_ns.pop(ids.instance, None)
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
            request.run = ids.run
            self._by_root[root_of] = request
            if root.within:
                unknown = KeyedRequest(ids.instance, 0, OPEN_NS, _caller_of(root.within, root.remote_around, ids))
                request.within = self._by_root.get((ids.seeds, root.within), unknown)
        if root.remote is not None:  # which may be its own, as that was handed on
            request.has_caller, request.run = True, ""
        if root.end_ns is not None:
            self._end(root_of, root.end_ns, now_ns)

    def _end(self, root_of: tuple[tuple[int, ...], int], end_ns: int, now_ns: int) -> None:
        request = self._by_root.get(root_of)
        if request is not None and request.is_open:
            request.end_ns = end_ns
            self._ended.append((now_ns, root_of, request))

    # ---------------------------------------------------------------- which keys are whose

    def _bear(self, request: KeyedRequest, borne: BorneKey) -> None:
        """A span of a request's own tree bears a key."""
        key = borne.key
        request.bear(borne)
        if request.is_astray(key):
            if key not in request.strays:
                self._give_up(request, key)
        elif key not in request.keys:
            self._bind(key, request)
            self._find_strays(key)

    def _find_strays(self, key: str) -> None:
        """Find the requests that bear a key by which another one is known first."""
        found = self._by_key.get(key, ())
        named = [one for one in found if one.first_key == key] if len(found) > 1 else ()
        for one in list(found) if named else ():
            borne = one.borne.get(key)
            if borne is not None and one not in named:
                its = borne.start_ns, one.start_ns
                if any(are_strays(*its, other.start_ns, other.end_ns) for other in named):
                    one.strays.add(key)
                    for further in [
                        key,
                        *(its.key for its in one.borne.values() if any(key in keys for keys in its.above)),
                    ]:
                        if one.is_astray(further):
                            self._give_up(one, further)

    def _give_up(self, request: KeyedRequest, key: str) -> None:
        """A key that a request bears is of another one: by itself, or by what lies above it."""
        self._release(key, request)
        if key not in request.strays:
            start_ns = request.borne[key].start_ns
            above = frozenset().union(*request.borne[key].above) & request.strays
            for one in above:
                self.note_names(one, start_ns, [key])
            found = self.of(key, start_ns)
            if found is not None and all(found is not self.of(one, start_ns) for one in above):
                request.below_strays.add(key)  # of a third one, which may be forgotten before this one ends
        if sent := request.sent.pop(key, 0):
            self._misplaced += sent
            self._spans.forget(key, request)
        self._note_work(key, request.below_others.pop(key, ()))

    def _note_work(self, key: str, edges: Iterable[tuple[int, int]]) -> None:
        """Phases in the tree of another one were done for the request of a key."""
        for edge in edges:
            request = self.of(key, edge[0])
            if request is not None:
                request.note_elsewhere(OwnPhases([edge]), key)

    def is_known_first(self, key: str, at_ns: int, start_ns: int, but: KeyedRequest | None) -> bool:
        """Whether a request is known by a key first that one bore at a time which began at `start_ns`."""
        found = (one for one in self._by_key.get(key, ()) if one is not but and one.first_key == key)
        return any(are_strays(at_ns, start_ns, one.start_ns, one.end_ns) for one in found)

    def note_misplaced(self, count: int) -> None:
        """So many spans are not sent in the trace of their request, for it was not known in time."""
        self._misplaced += count

    def misplaced(self) -> int:
        """How many spans were not sent in the traces of their requests since the last time."""
        found, self._misplaced = self._misplaced, 0
        return found

    def note_left_out(self, count: int) -> None:
        """So many batches are not sent, though requests in them may yet be kept."""
        self._left_out += count

    def left_out(self) -> int:
        """How many batches that may have served kept requests were not sent since the last time."""
        found, self._left_out = self._left_out, 0
        return found

    def _bind(self, key: str, request: KeyedRequest, above: str = "") -> None:
        request.keys[key] = above
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
        for other in others if request is not None else ():
            self.note_name(other, at_ns, request, key)

    def note_name(self, key: str, at_ns: int, request: KeyedRequest | None, above: str = "") -> None:
        """What is done for a request, by the key `above`, bears one, which is its name where it names no other then."""
        if request is not None and self.of(key, at_ns) is None and not request.is_astray(key):
            self._bind(key, request, above)

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
        asked = [*self._by_root.values(), *self._staged, *self._nested]
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
        for borne in list(request.take_in(spans, ids, is_own=True)):
            self._bear(request, borne)
        for key in list(request.keys):
            if request not in self._by_key.get(key, ()):
                self._bind(key, request)
        return request

    def note_within(self, request: KeyedRequest, first: Span, spans: Sequence[Span], ids: Ids) -> KeyedRequest:
        """One in the tree of a request is a request of its own, and kept if that is; `spans` are its own."""
        caller = replace(request.caller, span_id=ids.span_id(first.span_id))
        found = KeyedRequest(
            ids.instance, first.start_ns, first.end_ns, caller, is_kept=request.is_kept, within=request, is_apart=True
        )
        if request.is_kept and request.work is not None:
            found.work = []
            self._staged[found] = None
        for borne in list(found.take_in(spans, ids, is_own=True)):
            self._release(borne.key, request)
            self._bear(found, borne)
            found.note_elsewhere(OwnPhases(request.elsewhere.pop(borne.key, ())), borne.key)
        for name, above in list(request.keys.items()):  # each after what it came below
            if above in found.keys:
                self._release(name, request)
                self._bind(name, found, above)
                found.note_elsewhere(OwnPhases(request.elsewhere.pop(name, ())), name)
        found.own = OwnPhases([(span.start_ns, span.end_ns) for span in spans if span is not first and is_phase(span)])
        self._nested[found] = None
        if not found.is_kept:
            self._ended.append((time.monotonic_ns(), (ids.seeds, first.span_id), found))
        return found

    def note_apart(self, request: KeyedRequest, spans: Sequence[Span]) -> None:
        """What these spans tell is a request's own, and not of others in its tree that are requests of their own."""
        edges = [(span.start_ns, span.end_ns) for span in spans if span.span_id != span.root_id and is_phase(span)]
        request.own = OwnPhases(edges, request.own.missing_ns)
        request.below_others = {}

    def settle_nested(self, request: KeyedRequest) -> None:
        """How long one was in the queue that lies in the tree of another one is known, or never will be."""
        self._nested.pop(request, None)

    def add(self, request: KeyedRequest, spans: Sequence[Span], ids: Ids, *, is_own: bool = False) -> None:
        """Spans have come below a request, or more of its own tree: their keys are the request's, too."""
        for borne in list(request.take_in(spans, ids, is_own=is_own)):
            if is_own:
                self._bear(request, borne)
            else:
                self.note_name(borne.key, borne.start_ns, request)

    def settle(self, request: KeyedRequest) -> None:
        """What became of a request's time is known: nothing of that is needed any more."""
        request.work = None
        self._staged.pop(request, None)

    # ---------------------------------------------------------------- whose a key is

    def of(self, key: str, at_ns: int) -> KeyedRequest | None:
        """The request that a key names at a time: of those that it named by then, and are no parts, the last one."""
        found = self._of(key, at_ns)
        if found is None or found.has_caller:
            return found
        for other in found.keys if len(found.keys) > 1 else ():  # by another key it may be a part of one
            whole = self._of(other, found.start_ns) if other != key else None
            if whole is not None and whole.instance != found.instance and (whole.is_open or whole.is_around(found)):
                return whole
        return found

    def _of(self, key: str, at_ns: int) -> KeyedRequest | None:
        before = [one for one in self._by_key.get(key, ()) if one.start_ns <= at_ns]
        if len(before) > NEAR:
            before = sorted(before, key=_start_of)[-NEAR:]
        is_open = [one.is_open and not any(self._may_be_around(other, one) for other in before) for one in before]
        first = min((one for one, its in zip(before, is_open, strict=True) if its), key=_start_of, default=None)
        whole = [
            one
            for one, its in zip(before, is_open, strict=True)
            if (its and first is not None and one.instance == first.instance and one.within not in before)
            or not (one.is_open or any(other.is_around(one) for other in before))
        ]
        named = [(from_ns, one.start_ns, one) for one in whole if (from_ns := self._names_from(key, one)) <= at_ns]
        return max(named, key=lambda one: one[:2])[-1] if named else None

    def _may_be_around(self, other: KeyedRequest, request: KeyedRequest) -> bool:
        """Whether one that is known to be open may have ended within another one of its key that has just ended: its
        process may not be read to that time yet."""
        if other.is_open or other.instance == request.instance or not other.start_ns <= request.start_ns < other.end_ns:
            return False
        return self._read_ns.get(request.instance, 0) < other.end_ns

    def _names_from(self, key: str, request: KeyedRequest) -> int:
        """When a key begins to name a request that bears it: with that, or where another one is known by it first that
        went on after that, and had begun by the time that it was borne, right after that time."""
        borne, start_ns = request.borne.get(key), request.start_ns
        if borne is None or request.first_key == key:
            return start_ns
        found = (one for one in self._by_key[key] if one.first_key == key and not request.is_around(one))
        is_theirs = any(
            one.start_ns <= borne.start_ns and max(one.end_ns, one.start_ns + 1) > start_ns for one in found
        )
        return borne.start_ns + 1 if is_theirs else start_ns

    def givers(self, request: KeyedRequest, start_ns: int, key: str) -> list[Giver]:
        """Spans outside of a request's own tree that may have handed it over by then, by a key, or any of its keys: of
        those that go on `end_ns` is that of what is open."""
        return [
            Giver(one.start_ns, one.end_ns, one.span_id, is_own=False, key=its)
            for its in ([key] if key else request.keys)
            for one in self._spans.of(its)
            if one.start_ns < start_ns < one.end_ns and self._is_done_for(request, its, one)
        ]

    def _is_done_for(self, request: KeyedRequest, key: str, one: SpanWithKey) -> bool:
        around = one.around
        if around is None or around.is_astray(key):
            return self.of(key, one.start_ns) is request
        return around is not request and self.whole_of(around) is request

    def linked(self, key: str, at_ns: int, *, is_sure: bool) -> KeyedRequest | None:
        """The request that a batch served which began then, if it `is_sure` that it is kept, or it may be."""
        found = self.of(key, at_ns)
        if found is None or found.is_kept or found.is_sure:
            return found
        return found if found.is_open and not is_sure else None

    def is_used_again(self, key: str) -> bool:
        """Return True where several requests have had the key, so that another may get it soon."""
        return len(self._by_key.get(key, ())) > 1

    def decided(self, key: str, at_ns: int) -> bool | None:
        """Whether a request is kept that has this key and was open then, None where one that is open has it."""
        found = self.of(key, at_ns)
        if found is not None and (found.is_kept or found.is_wanted) and at_ns <= found.end_ns:
            return True
        return None if any(one.is_open for one in self._by_key.get(key, ())) else False

    def around(self, root: Span, ids: Ids, keys: Iterable[str]) -> KeyedRequest | None:
        """The request within which one lies that has ended, by one of its keys: of several the outermost."""
        own = self._by_root.get((ids.seeds, root.root_id)) or _ended_as(root, ids)
        return self._around(own, [key for key in keys if not own.is_astray(key)])

    def _around(self, request: KeyedRequest, keys: Iterable[str]) -> KeyedRequest | None:
        found = [
            one for key in keys for one in self._by_key.get(key, ()) if one is not request and one.is_around(request)
        ]
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
        near = {one: None for key in request.keys for one in self._by_key.get(key, ())}
        its = [request, *(one for one in near if request.is_around(one) and self.whole_of(one) is request)]
        edges = [edge for one in its for edge in (*one.own.edges, *one.done_elsewhere())]
        edges += [edge for one in its for below in one.below_others.values() for edge in below]
        return OwnPhases(edges, min(at_ns for one in its for at_ns in (one.own.missing_ns, one.missing_ns)))

    def handing_over(self, request: KeyedRequest) -> Edges:
        """Begin and end of the spans that handed a request over, in whatever process, but for the request's own."""
        found = {one.span_id: one for one in self._handing_over(request)}
        found.pop(request.caller.span_id, None)
        return [(one.start_ns, one.end_ns) for one in found.values()]

    def _handing_over(self, request: KeyedRequest) -> list[Giver]:
        found = [
            Giver(one.start_ns, one.end_ns, one.span_id, is_own=False, key=key)
            for key in request.keys
            for one in self._spans.of(key)
            if one.around is request or self._is_done_for(request, key, one)
        ]
        return [*request.givers, *found]

    def began_within(self, root: Span, ids: Ids) -> KeyedRequest | None:
        """The request in whose own tree another one began."""
        known = self._by_root.get((ids.seeds, root.root_id))
        return None if known is None else known.within

    def followers(self, request: KeyedRequest, key: str) -> list[int]:
        """When others began, and were no parts of it, that a request's key named from then on."""
        found = (one for one in self._by_key.get(key, ()) if one is not request)
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


def _start_of(request: KeyedRequest) -> int:
    return request.start_ns


def _ended_as(root: Span, ids: Ids) -> KeyedRequest:
    return KeyedRequest(ids.instance, root.start_ns, root.end_ns, RemoteParent(*ids.of(root)))


def batch_of(attributes: Mapping[str, object]) -> Sequence[str]:
    """The keys of a batch, none of what is none."""
    found = attributes.get(BATCH_KEYS) if attributes else None
    return [key for key in found if isinstance(key, str)] if isinstance(found, list | tuple) else ()
