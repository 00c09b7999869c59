"""What a recording tells of requests with keys, and of the batches that serve them, as its rows are read.

All requests are told, whether they are kept or not, and all batches: which request a key names, and what its time went
to, is told by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
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

    `keys` are borne by spans of requests, each with the id of its root, in the order of their begins; `gone` are those
    that are open no more, and whose rows nobody will read. `work` are the phases of requests' own trees,
    `around_others` the roots of those in whose tree there are others with keys, and `opened` of those that are open
    now.
    """

    roots: list[KeyedRoot] = field(default_factory=list)
    keys: list[tuple[int, str]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    work: list[NDArray[Any]] = field(default_factory=list)
    around_others: set[int] = field(default_factory=set)
    opened: Set[int] = frozenset()


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
        self._borne: list[tuple[int, int, str]] = []
        """When spans began that bear keys, the roots of their requests, and their keys."""
        self._bearing: list[tuple[int, int]] = []
        """The spans whose keys were just told, and their roots."""

    def taken(self) -> KeyFacts:
        """What has been told since the last time."""
        found, self._facts = self._facts, KeyFacts()
        found.opened = self._open.keys()
        found.keys = [(root_id, key) for _, root_id, key in sorted(self._borne)]
        self._borne = []
        return found

    def read(
        self, opened: Mapping[int, OpenSpan], rings: Sequence[RingRows], details: Details, *, has_more: bool
    ) -> None:
        """Go through what was open, and through the rows that were read right after that."""
        facts = self._facts
        before, self._open = self._open, {}
        for span in opened.values():
            if not span.root_id & REQUEST_BIT:
                continue
            if span.span_id == span.root_id:
                known = before.get(span.span_id)
                remote = _remote_of(span.attributes, details.get(span.span_id)) if known is None else known.remote
                within = known.within if known is not None else _root_around(span.parent_id, opened, ())
                around = self._open.get(within) or before.get(within)
                remote_around = None if around is None else around.remote
                self._open[span.span_id] = KeyedRoot(
                    span.span_id, span.start_ns, None, remote, within, remote_around
                )  # fmt: skip
            if isinstance(key := span.attributes.get(KEY), str) and key:
                self._borne.append((span.start_ns, span.root_id, key))
                self._bearing.append((span.span_id, span.root_id))
        self.read_rows([(ring.rows, ring.thread_id) for ring in rings], details)
        self._read_work([ring.rows for ring in rings], details)
        self._find_others(opened, [ring.rows for ring in rings])
        ended = [
            rows[(rows["root_id"] == rows["span_id"]) & _are_in_requests(rows)] for rows in (one.rows for one in rings)
        ]
        self._keyed.update(root_id for _, root_id, _ in self._borne)
        root_around = partial(_root_around, opened=opened, rings=rings)
        self._tell_ended([*self._ended, *ended], details, before, root_around)
        facts.roots += [one for root_id, one in self._open.items() if root_id in self._keyed]
        self._ended = ended if rings else self._ended
        missing = self._keyed - self._open.keys()
        if not has_more:
            facts.gone += missing & self._missing
            self._keyed -= missing & self._missing
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
        columns = (its[name].tolist() for name in ("span_id", "root_id", "start_ns"))
        for span_id, root_id, start_ns in zip(*columns, strict=True):
            key = _told(details[span_id]).get(KEY) if root_id & REQUEST_BIT else None
            if isinstance(key, str) and key:
                self._borne.append((start_ns, root_id, key))
                self._bearing.append((span_id, root_id))

    def _read_batches(self, rows: Records, serving: Sequence[int], thread_id: int, details: Details) -> None:
        its = rows[_are_among(rows["span_id"], serving)]
        columns = (its[name].tolist() for name in ("span_id", "start_ns", "end_ns", "node"))
        for span_id, start_ns, end_ns, node in zip(*columns, strict=True):
            told = _told(details[span_id])
            if keys := batch_keys(told.get(BATCH_KEYS)):
                weights = batch_weights(told.get(BATCH_WEIGHTS), len(keys))
                name, says_weight = self._site_of(node).name, BATCH_WEIGHTS in told
                self._facts.batches.append(Batch(name, thread_id, start_ns, end_ns, keys, weights, says_weight))

    def _read_work(self, of_rings: Iterable[Records], details: Details) -> None:
        serving = [span_id for span_id, (_, text) in details.items() if _BATCH_KEYS in text]
        for rows in of_rings:
            below = rows[_are_in_requests(rows) & (rows["root_id"] != rows["span_id"])]
            if not len(below):
                continue
            nodes, of = np.unique(below["node"], return_inverse=True)
            parts = np.array([self._part_of(node) for node in nodes.tolist()])[of]
            its = below[(parts == _PHASE) & ~_are_among(below["span_id"], serving)]
            if len(its):
                work = np.empty(len(its), PHASES)
                for name in PHASES.names or ():
                    work[name] = its[name]
                self._facts.work.append(work)

    def _find_others(self, opened: Mapping[int, OpenSpan], of_rings: Sequence[Records]) -> None:
        """Find the requests in whose trees others bear keys: what is around these is open, or was just read."""
        bearing, self._bearing = self._bearing, []
        above: dict[int, tuple[int, bool]] = {}
        if not bearing:
            return
        for rows in of_rings:
            its = rows[_are_among(rows["root_id"], {root_id for _, root_id in bearing})]
            columns = (its[name].tolist() for name in ("span_id", "parent_id", "node"))
            for span_id, parent_id, node in zip(*columns, strict=True):
                above[span_id] = parent_id, self._part_of(node) == _REQUEST
        for span_id, root_id in bearing:
            at, seen = span_id, set[int]()
            while at and at != root_id and at not in seen:  # parents of another process may go in a circle
                seen.add(at)
                one = opened.get(at)
                at, is_request = (
                    above.get(at, (0, False)) if one is None else (one.parent_id, one.site.kind == "request")
                )
                if is_request:
                    self._facts.around_others.add(root_id)

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
                    remote = _remote_of({}, details.get(root_id))
                    within = root_around(parent_id)
                    around = self._open.get(within) or before.get(within)
                    remote_around = _remote_of({}, details.get(within)) if around is None else around.remote
                    known = KeyedRoot(root_id, start_ns, None, remote, within, remote_around)
                self._facts.roots.append(known._replace(end_ns=end_ns))
                self._keyed.discard(root_id)
                self._open.pop(root_id, None)


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
