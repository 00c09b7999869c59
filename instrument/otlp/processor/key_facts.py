"""What a recording tells of requests with keys, and of the batches that serve them, as its rows are read.

All requests are told, whether they are kept or not, and all batches: which request a key names, and what its time went
to, is told by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.processor.own_work import PHASES
from instrument.recording.mapped_facts import OpenSpan, Records, RingRows, detail_of, facts_in
from instrument.recording.remote_parents import REMOTE, RemoteParent, remote_of
from instrument.recording.rows import REQUEST_BIT
from instrument.recording.spans import BATCH_KEYS, BATCH_WEIGHTS, KEY, Site
from instrument.trace.joined import batch_keys, batch_weights
from instrument.trace.ledger import phase_of

_KEY, _BATCH_KEYS, _REMOTE = KEY.encode(), BATCH_KEYS.encode(), REMOTE.encode()
_PHASE, _REQUEST = 1, 2

_Above = Mapping[int, tuple[int, bool]]

Details = Mapping[int, tuple[int, bytes]]
"""What few spans have beside their numbers, by their ids, as it was written."""


class Batch(NamedTuple):
    """A batch: the keys of those that it serves, and how much of it each one takes, if it `says_weight`."""

    name: str
    thread_id: int
    start_ns: int
    end_ns: int
    keys: Sequence[str]
    weights: Sequence[int]
    says_weight: bool


class BorneKey(NamedTuple):
    """A key that spans of a request's tree bear, the first of which began then.

    `above` are the other keys of the spans above each of them, where these are not the same.
    """

    root_id: int
    key: str
    start_ns: int
    above: frozenset[frozenset[str]] = frozenset([frozenset()])


class KeyedSpan(NamedTuple):
    """A span that bears a key, in whatever tree, which may have handed a request over; `end_ns` is None while it is
    open."""

    span_id: int
    root_id: int
    key: str
    start_ns: int
    end_ns: int | None


class WorkBelow(NamedTuple):
    """A phase in a request's tree that lies below a key which was not the first one there."""

    root_id: int
    key: str
    start_ns: int
    end_ns: int


class KeyedRoot(NamedTuple):
    """A request that bears keys; `end_ns` is None while it is open. `remote` is its caller's span.

    `within` is the root of the request in whose tree it began, 0 without one, and `remote_around` that one's caller.
    """

    root_id: int
    start_ns: int
    end_ns: int | None
    remote: RemoteParent | None
    within: int = 0
    remote_around: RemoteParent | None = None


@dataclass(slots=True)
class KeyFacts:
    """What has been told since the last time.

    `keys` are borne by spans of requests, in the order of their begins; `gone` are those requests that are open no
    more, and whose rows nobody will read. `work` are the phases of requests' own trees, but for those `below_others`,
    `around_others` the roots of those in whose tree there are others with keys, and `opened` of those that are open
    now. `spans` are all that bear keys: as they are seen open first, and as they have ended.
    """

    roots: list[KeyedRoot] = field(default_factory=list)
    keys: list[BorneKey] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    work: list[NDArray[Any]] = field(default_factory=list)
    below_others: list[WorkBelow] = field(default_factory=list)
    around_others: set[int] = field(default_factory=set)
    opened: Set[int] = frozenset()
    spans: list[KeyedSpan] = field(default_factory=list)


class KeyFactsReader:
    """Goes through the rows of one recording. `site_of` tells the site of a call path's number. Used by one thread."""

    def __init__(self, site_of: Callable[[int], Site]) -> None:
        self._site_of = site_of
        self._open: dict[int, KeyedRoot] = {}
        """All requests that are open, by their roots' ids."""
        self._keyed: set[int] = set()
        """Those that bear keys, and have not ended."""
        self._missing: set[int] = set()
        """Those of them that were not among the open ones the last time."""
        self._ended: list[Records] = []
        """The requests that ended the last time: a row with a key may come after its root's, of another ring."""
        self._facts = KeyFacts()
        self._parts: dict[int, int] = {}
        """By a call path's number what spans of it are of a request: `_PHASE`, `_REQUEST` or nothing."""
        self._borne: list[tuple[int, BorneKey]] = []
        """Spans that bear keys."""
        self._bearing: list[tuple[int, BorneKey]] = []
        """Those that were just read."""
        self._told_open: set[int] = set()
        """Open spans with keys that were told."""
        self._first_keys: dict[int, str] = {}
        """A key of each request that bears any, and had not ended for long."""
        self._several: set[int] = set()
        """Those of them that bear several."""
        self._over: tuple[list[int], list[int]] = [], []
        """Those that have ended since the last time, and since the one before: phases of theirs may come after that."""

    def taken(self) -> KeyFacts:
        """What has been told since the last time."""
        found, self._facts = self._facts, KeyFacts()
        found.opened = self._open.keys()
        borne = [*self._borne, *self._bearing]
        found.keys = [one for _, one in sorted(borne, key=lambda one: (one[1].start_ns, one[0]))]
        self._borne, self._bearing = [], []
        return found

    def have_several(self, root_id: int) -> bool:
        """Whether a request that has just ended bears several keys, so that there may be strays in its tree."""
        return root_id in self._several

    def read(
        self, opened: Mapping[int, OpenSpan], rings: Sequence[RingRows], details: Details, *, has_more: bool
    ) -> None:
        """Go through what was open, and through the rows that were read right after that."""
        facts = self._facts
        for root_id in self._over[1]:
            self._first_keys.pop(root_id, None)
        self._several.difference_update(self._over[1])
        self._over = [], self._over[0]
        before, self._open = self._open, {}
        told_open, self._told_open = self._told_open, set()
        for span in opened.values():
            if isinstance(key := span.attributes.get(KEY), str) and key:
                self._told_open.add(span.span_id)
                if span.span_id not in told_open:
                    facts.spans.append(KeyedSpan(span.span_id, span.root_id, key, span.start_ns, None))
            if not span.root_id & REQUEST_BIT:
                continue
            if span.span_id == span.root_id:
                known = before.get(span.span_id)
                remote = None if known is None else known.remote
                if remote is None:  # it is noted of a trace that is handed on, too
                    remote = _remote_of(span.attributes, details.get(span.span_id))
                within = known.within if known is not None else _root_around(span.parent_id, opened, ())
                around = self._open.get(within) or before.get(within)
                remote_around = None if around is None else around.remote
                self._open[span.span_id] = KeyedRoot(
                    span.span_id, span.start_ns, None, remote, within, remote_around
                )  # fmt: skip
            if isinstance(key, str) and key:
                self._bears(span.span_id, span.root_id, key, span.start_ns)
        self.read_rows([(ring.rows, ring.thread_id) for ring in rings], details)
        key_of = self._look_above(opened, [ring.rows for ring in rings])
        self._read_work(opened, [ring.rows for ring in rings], details, key_of)
        ended = [
            rows[(rows["root_id"] == rows["span_id"]) & _are_in_requests(rows)] for rows in (one.rows for one in rings)
        ]
        self._keyed.update(one.root_id for _, one in self._borne)
        root_around = partial(_root_around, opened=opened, rings=rings)
        self._tell_ended([*self._ended, *ended], details, before, root_around)
        facts.roots += [one for root_id, one in self._open.items() if root_id in self._keyed]
        self._ended = ended if rings else self._ended
        missing = self._keyed - self._open.keys()
        if not has_more:
            facts.gone += missing & self._missing
            self._keyed -= missing & self._missing
            self._over[0].extend(missing & self._missing)
            self._missing = missing - self._missing

    def read_rows(self, of_threads: Iterable[tuple[Records, int]], details: Details) -> None:
        """Note the keys that rows of requests bear, and batches. Rows come with the native id of their thread."""
        bearing = [span_id for span_id, (_, text) in details.items() if _KEY in text]
        serving = [span_id for span_id, (_, text) in details.items() if _BATCH_KEYS in text]
        for rows, thread_id in of_threads if bearing or serving else ():
            self._read_keys(rows, bearing, details)
            self._read_batches(rows, serving, thread_id, details)

    def _read_keys(self, rows: Records, bearing: Sequence[int], details: Details) -> None:
        its = rows[_are_among(rows["span_id"], bearing)]
        columns = (its[name].tolist() for name in ("span_id", "root_id", "start_ns", "end_ns"))
        for span_id, root_id, start_ns, end_ns in zip(*columns, strict=True):
            key = _told(details[span_id]).get(KEY)
            if not isinstance(key, str) or not key:
                continue
            self._facts.spans.append(KeyedSpan(span_id, root_id, key, start_ns, end_ns))
            if root_id & REQUEST_BIT:
                self._bears(span_id, root_id, key, start_ns)

    def _bears(self, span_id: int, root_id: int, key: str, start_ns: int) -> None:
        self._bearing.append((span_id, BorneKey(root_id, key, start_ns)))
        if self._first_keys.setdefault(root_id, key) != key:
            self._several.add(root_id)

    def _read_batches(self, rows: Records, serving: Sequence[int], thread_id: int, details: Details) -> None:
        its = rows[_are_among(rows["span_id"], serving)]
        columns = (its[name].tolist() for name in ("span_id", "start_ns", "end_ns", "node"))
        for span_id, start_ns, end_ns, node in zip(*columns, strict=True):
            told = _told(details[span_id])
            if keys := batch_keys(told.get(BATCH_KEYS)):
                weights = batch_weights(told.get(BATCH_WEIGHTS), len(keys))
                name, says_weight = self._site_of(node).name, BATCH_WEIGHTS in told
                self._facts.batches.append(Batch(name, thread_id, start_ns, end_ns, keys, weights, says_weight))

    def _read_work(
        self, opened: Mapping[int, OpenSpan], of_rings: Sequence[Records], details: Details, key_of: Mapping[int, str]
    ) -> None:
        serving = [span_id for span_id, (_, text) in details.items() if _BATCH_KEYS in text]
        several = self._several
        above = self._above(of_rings, several) if several else {}
        for rows in of_rings:
            below = rows[_are_in_requests(rows) & (rows["root_id"] != rows["span_id"])]
            if not len(below):
                continue
            nodes, of = np.unique(below["node"], return_inverse=True)
            parts = np.array([self._part_of(node) for node in nodes.tolist()])[of]
            its = below[(parts == _PHASE) & ~_are_among(below["span_id"], serving)]
            if several:
                its = its[~self._find_below_others(its, several, opened, above, key_of)]
            if len(its):
                work = np.empty(len(its), PHASES)
                for name in PHASES.names or ():
                    work[name] = its[name]
                self._facts.work.append(work)

    def _find_below_others(
        self, rows: Records, several: Set[int], opened: Mapping[int, OpenSpan], above: _Above, key_of: Mapping[int, str]
    ) -> NDArray[np.bool_]:
        """Note the phases below keys that were not the first ones of their requests; returns which they are."""
        found = np.zeros(len(rows), np.bool_)
        for at in np.flatnonzero(_are_among(rows["root_id"], set(several))).tolist():
            span_id, root_id, start_ns, end_ns = (
                int(rows[name][at]) for name in ("span_id", "root_id", "start_ns", "end_ns")
            )
            key = next((key_of[one] for one, _ in _way_up(span_id, root_id, opened, above) if one in key_of), None)
            if key is not None and key != self._first_keys[root_id]:
                found[at] = True
                self._facts.below_others.append(WorkBelow(root_id, key, start_ns, end_ns))
        return found

    def _look_above(self, opened: Mapping[int, OpenSpan], of_rings: Sequence[Records]) -> Mapping[int, str]:
        """Find which keys lie below others, and the requests in whose trees there are others that bear keys: what is
        around these is open, or was just read. Returns the keys of spans."""
        bearing, self._bearing = self._bearing, []
        key_of = {span_id: one.key for span_id, one in bearing}
        above = self._above(of_rings, {one.root_id for _, one in bearing}) if bearing else {}
        for span_id, borne in bearing:
            keys = set[str]()
            for at, is_request in _way_up(span_id, borne.root_id, opened, above):
                keys.add(key_of.get(at, borne.key))
                if is_request:
                    self._facts.around_others.add(borne.root_id)
            self._borne.append((span_id, borne._replace(above=frozenset([frozenset(keys - {borne.key})]))))
        return key_of

    def _above(self, of_rings: Sequence[Records], roots: Set[int]) -> _Above:
        """Of rows of these requests their parents, and whether they are requests themselves."""
        found: dict[int, tuple[int, bool]] = {}
        for rows in of_rings:
            its = rows[_are_among(rows["root_id"], set(roots))]
            columns = (its[name].tolist() for name in ("span_id", "parent_id", "node"))
            for span_id, parent_id, node in zip(*columns, strict=True):
                found[span_id] = parent_id, self._part_of(node) == _REQUEST
        return found

    def _part_of(self, node: int) -> int:
        found = self._parts.get(node)
        if found is None:
            site = self._site_of(node)
            found = _REQUEST if site.kind == "request" else _PHASE if phase_of(site) is not None else 0
            self._parts[node] = found
        return found

    def _tell_ended(
        self,
        ended: Sequence[Records],
        details: Details,
        before: Mapping[int, KeyedRoot],
        root_around: Callable[[int], int],
    ) -> None:
        for rows in ended:
            its = rows[_are_among(rows["root_id"], self._keyed)]
            columns = (its[name].tolist() for name in ("root_id", "parent_id", "start_ns", "end_ns"))
            for root_id, parent_id, start_ns, end_ns in zip(*columns, strict=True):
                known = before.get(root_id)
                if known is None:
                    within = root_around(parent_id)
                    around = self._open.get(within) or before.get(within)
                    remote_around = _remote_of({}, details.get(within)) if around is None else around.remote
                    known = KeyedRoot(root_id, start_ns, None, None, within, remote_around)
                remote = _remote_of({}, details.get(root_id)) if known.remote is None else known.remote
                self._facts.roots.append(known._replace(end_ns=end_ns, remote=remote))
                self._keyed.discard(root_id)
                self._over[0].append(root_id)
                self._open.pop(root_id, None)


def _way_up(span_id: int, root_id: int, opened: Mapping[int, OpenSpan], above: _Above) -> Iterator[tuple[int, bool]]:
    """The spans from one up to its root, which is not among them, and whether each is a request."""
    at, seen = span_id, set[int]()
    while at and at != root_id and at not in seen:  # parents of another process may go in a circle
        seen.add(at)
        one = opened.get(at)
        parent_id, is_request = (
            above.get(at, (0, False)) if one is None else (one.parent_id, one.site.kind == "request")
        )
        yield at, is_request
        at = parent_id


def _told(detail: tuple[int, bytes]) -> Mapping[str, Any]:
    active_ns, text = detail
    return detail_of(active_ns, facts_in(text)).attributes


def _remote_of(attributes: Mapping[str, Any], detail: tuple[int, bytes] | None) -> RemoteParent | None:
    """The caller of a request, which stands in its details where its attributes were too many."""
    found = attributes.get(REMOTE)
    if found is None and detail is not None and _REMOTE in detail[1]:
        found = _told(detail).get(REMOTE)
    return remote_of(tuple(found) if isinstance(found, list) else found)


def _root_around(parent_id: int, opened: Mapping[int, OpenSpan], rings: Sequence[RingRows]) -> int:
    """The request that a span is of which is open, or has just ended."""
    above = opened.get(parent_id) if parent_id else None
    found = 0 if above is None else above.root_id
    if parent_id and above is None:
        for rows in (ring.rows for ring in rings):
            its = rows["root_id"][rows["span_id"] == parent_id]
            found = int(its[0]) if len(its) else found
    return found if found & REQUEST_BIT else 0


def _are_in_requests(rows: Records) -> NDArray[np.bool_]:
    return np.asarray(rows["root_id"] & np.uint64(REQUEST_BIT) != 0)


def _are_among(column: NDArray[np.uint64], ids: Sequence[int] | set[int]) -> NDArray[np.bool_]:
    if not ids:
        return np.zeros(len(column), np.bool_)
    return np.isin(column, np.fromiter(ids, np.uint64, len(ids)))
