"""A request that bears keys, as the agent knows it from its begin on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from instrument.otlp.packing import Ids
from instrument.otlp.processor.key_facts import BorneKey
from instrument.otlp.processor.own_work import NEVER_NS, NO_PHASES, OwnPhases
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import BATCH_KEYS, KEY, Site, Span
from instrument.trace.ledger import phase_of

MOST_KEYS = 10_000
"""Keys of a request's own tree that are remembered: the first ones."""

MOST_ABOVE = 8
"""Different ways on which there are other keys above one that are remembered."""

GIVERS = 64
"""Spans of a request that may have handed it over: the newest."""

MOST_EDGES = 256
"""Phases of other processes that are remembered of a request: the first ones that were read."""

OPEN_NS = 1 << 62
"""When a request ends that is open."""

Edges = list[tuple[int, int]]
"""Begin and end of a request's own phases."""


class Giver(NamedTuple):
    """A span with a key that may have handed a request over, and whether it is of that one's own tree."""

    start_ns: int
    end_ns: int
    span_id: int
    is_own: bool
    key: str


@dataclass(slots=True, eq=False)
class KeyedRequest:
    """A request that bears keys. `caller` is its own span, as spans below it in other processes have it for a parent.

    `keys` are those that it is known by, each with the one below which it came elsewhere, "" of its own tree's.

    `is_sure` is whether it is kept whatever comes, and `is_kept` whether it has been; it `is_wanted` where a part of it
    is kept for what that was like. `givers` are its spans with keys. `work` are its own phases until its stages are
    known. It began in the tree of the one that it is `within`, and `is_around_others` in its own one; it `is_apart`
    from these once its tree was looked through. Also of one that is not kept there are its `own` phases, once it has
    ended, and those `elsewhere`, of which there are others that began after `missing_ns`.

    `borne` are the keys of its own tree, by the `first_key`
    of which it was known first. `strays` are those of other requests, and `below_strays` lie those of yet others;
    `sent` says how many spans have gone with it by keys that may turn out to be such, and `below_others` are its phases
    by these.

    Its trace is still to be that of its first key in a `run`, where nobody knows it by another one yet.
    """

    instance: str
    start_ns: int
    end_ns: int
    caller: RemoteParent
    is_sure: bool = False
    is_kept: bool = False
    is_wanted: bool = False
    keys: dict[str, str] = field(default_factory=dict)
    givers: list[Giver] = field(default_factory=list)
    work: Edges | None = None
    borne: dict[str, BorneKey] = field(default_factory=dict)
    first_key: str = ""
    strays: set[str] = field(default_factory=set)
    below_strays: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    within: KeyedRequest | None = None
    has_caller: bool = False
    is_around_others: bool = False
    is_apart: bool = False
    own: OwnPhases = NO_PHASES
    elsewhere: dict[str, Edges] = field(default_factory=dict)
    below_others: dict[str, Edges] = field(default_factory=dict)
    missing_ns: int = NEVER_NS
    run: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.end_ns == OPEN_NS

    def bear(self, borne: BorneKey) -> None:
        """A span of its own tree bears a key; of more keys than it has room for the first ones are remembered."""
        known = self.borne.get(borne.key)
        if known is not None:
            start_ns, above = min(known.start_ns, borne.start_ns), known.above | borne.above
            above = above if len(above) <= MOST_ABOVE else known.above
            if (start_ns, above) == (known.start_ns, known.above):
                return
            borne = borne._replace(start_ns=start_ns, above=above)
        elif len(self.borne) >= MOST_KEYS:
            return
        self.borne[borne.key] = borne
        if borne.start_ns < self.borne.get(self.first_key, borne).start_ns or not self.first_key:
            self.first_key = borne.key

    def is_astray(self, key: str) -> bool:
        """Whether what bears a key in its tree is done for another one."""
        if key in self.strays:
            return True
        above = self.borne[key].above if self.strays and key in self.borne else ()
        return bool(above) and not any(self.strays.isdisjoint(keys) for keys in above)

    def is_around(self, other: KeyedRequest) -> bool:
        """Whether another one of its key, which has ended, is a part of it."""
        if other is self or other.is_open or other.start_ns < self.start_ns:
            return False
        return other.end_ns <= self.end_ns and (self.start_ns, self.end_ns) != (other.start_ns, other.end_ns)

    def note_below(self, key: str, edge: tuple[int, int]) -> None:
        """A phase of its tree lies below a key that was not the first one there."""
        if sum(map(len, self.below_others.values())) < MOST_EDGES:
            self.below_others.setdefault(key, []).append(edge)
        else:
            self.missing_ns = min(self.missing_ns, edge[0])

    def note_elsewhere(self, phases: OwnPhases, key: str = "") -> None:
        """Other processes did this for it, by a key."""
        room = max(MOST_EDGES - sum(map(len, self.elsewhere.values())), 0)
        self.elsewhere.setdefault(key, []).extend(phases.edges[:room])
        missing = [phases.missing_ns, *(start_ns for start_ns, _ in phases.edges[room:])]
        self.missing_ns = min(self.missing_ns, *missing)

    def done_elsewhere(self) -> Edges:
        """What other processes did for it."""
        return [edge for edges in self.elsewhere.values() for edge in edges]

    def below(self, start_ns: int, instance: str, key: str = "", others: Iterable[Giver] = ()) -> RemoteParent:
        """What a span that began then lies below, by its key if it has one: of what is known to be sent with it, and of
        `others` that will be."""
        givers = {one.span_id: one for one in (*others, *self.givers)}.values()
        before = [one for one in givers if one.start_ns < start_ns and key in ("", one.key)]
        still_open = [one for one in before if one.end_ns > start_ns]
        ended = [one for one in before if one.is_own]
        span_id = self.caller.span_id
        if still_open:
            span_id = max(still_open, key=lambda one: (one.start_ns, -one.end_ns)).span_id
        elif ended:
            span_id = max(ended, key=lambda one: one.end_ns).span_id
        is_local, caller = instance == self.instance, self.caller
        return RemoteParent(caller.trace_id, span_id, caller.flags, is_local, is_local, caller.state)

    def take_in(self, spans: Sequence[Span], ids: Ids, *, is_own: bool) -> Iterator[BorneKey]:
        """Note what more is the request's: the keys that these spans bear come out, what they are of it stays."""
        for span in spans:
            if isinstance(key := span.attributes.get(KEY), str) and key:
                known = self.borne.get(key)
                borne = BorneKey(span.root_id, key, span.start_ns)
                yield borne if known is None else borne._replace(above=known.above)
                if not is_own or span.span_id != span.root_id:
                    self.givers.append(Giver(span.start_ns, span.end_ns, ids.span_id(span.span_id), is_own, key))
            if self.work is not None and is_phase(span):
                self.work.append((span.start_ns, span.end_ns))
        del self.givers[:-GIVERS]


def is_phase(span: Span) -> bool:
    """Whether a span is a phase of the request's own work that it is of, and no batch."""
    return _is_phase(span.site) and BATCH_KEYS not in span.attributes


@lru_cache(maxsize=4096)
def _is_phase(site: Site) -> bool:
    return phase_of(site) is not None
