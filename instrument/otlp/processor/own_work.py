"""What a process did itself for its requests while they are open: begin and end of each phase, as columns.

Most requests are not kept, and of their rows no Python object is made. Where there are too many phases the first ones
of each request stay, which tell when it was in the queue; of the others it is known from when on they are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.trace.groups import firsts_of

MOST_PHASES = 100_000
"""Phases of a process's open requests that are remembered: 2.4 MB."""

FEW = 4_096
"""So many are not looked through for those of requests that are open no more."""

NEVER_NS = 1 << 62

PHASES = np.dtype([("root_id", np.uint64), ("start_ns", np.int64), ("end_ns", np.int64)])
"""A phase of a request's own tree, whose root it names."""


class OwnPhases(NamedTuple):
    """Begin and end of each phase of a request; from `missing_ns` on there were others."""

    edges: Sequence[tuple[int, int]]
    missing_ns: int = NEVER_NS


NO_PHASES = OwnPhases(())


class OwnWork:
    """That of one process. Used by one thread."""

    def __init__(self) -> None:
        self._parts: list[NDArray[Any]] = []
        self._count = self._looked_through = 0
        self._missing_ns: dict[int, int] = {}

    def __len__(self) -> int:
        """How many phases are remembered."""
        return self._count

    def add(self, phases: Iterable[NDArray[Any]], opened: Collection[Set[int]]) -> None:
        """Remember more. Those of requests that are `opened`, by their roots, are still needed."""
        for part in phases:
            self._parts.append(part)
            self._count += len(part)
        if self._count > 2 * self._looked_through + FEW or self._count > MOST_PHASES:
            self._forget(set().union(*opened))
            self._looked_through = self._count

    def take(self, root_ids: Collection[int]) -> Mapping[int, OwnPhases]:
        """The phases of requests that have ended, in the order in which they did; they are not remembered any more."""
        whole = self._whole()
        is_theirs = np.isin(whole["root_id"], np.fromiter(root_ids, np.uint64, len(root_ids)))
        theirs = whole[is_theirs]
        if len(theirs):
            self._replace(whole[~is_theirs])
        theirs = theirs[np.argsort(theirs["root_id"], kind="stable")]
        missing = {root_id: self._missing_ns.pop(root_id) for root_id in root_ids if root_id in self._missing_ns}
        found = {root_id: OwnPhases((), at_ns) for root_id, at_ns in missing.items()}
        for its in np.split(theirs, firsts_of(theirs["root_id"])[1:]) if len(theirs) else ():
            root_id = int(its["root_id"][0])
            edges = list(zip(its["start_ns"].tolist(), its["end_ns"].tolist(), strict=True))
            found[root_id] = OwnPhases(edges, missing.get(root_id, NEVER_NS))
        return found

    def _whole(self) -> NDArray[Any]:
        if len(self._parts) != 1:
            self._parts = [np.concatenate(self._parts) if self._parts else np.zeros(0, PHASES)]
        return self._parts[0]

    def _replace(self, rows: NDArray[Any]) -> None:
        self._parts, self._count = [rows], len(rows)

    def _forget(self, opened: Set[int]) -> None:
        whole = self._whole()
        whole = whole[np.isin(whole["root_id"], np.fromiter(opened, np.uint64, len(opened)))]
        self._missing_ns = {root_id: at_ns for root_id, at_ns in self._missing_ns.items() if root_id in opened}
        if len(whole) > MOST_PHASES * 3 // 4:
            whole = self._first_ones(whole, MOST_PHASES // 2)
        self._replace(whole.copy())

    def _first_ones(self, whole: NDArray[Any], room: int) -> NDArray[Any]:
        """As many of the first ones of each request as there is room for."""
        _, of, counts = np.unique(whole["root_id"], return_inverse=True, return_counts=True)
        each = int(counts.max())
        while each and np.minimum(counts, each).sum() > room:
            each //= 2
        order = np.argsort(of, kind="stable")
        ranks = np.empty(len(whole), dtype=np.int64)
        ranks[order] = np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)
        left_out = whole[ranks >= each]
        roots, its = np.unique(left_out["root_id"], return_inverse=True)
        least = np.full(len(roots), NEVER_NS)
        np.minimum.at(least, its, left_out["start_ns"])
        for root_id, at_ns in zip(roots.tolist(), least.tolist(), strict=True):
            self._missing_ns[root_id] = min(self._missing_ns.get(root_id, NEVER_NS), at_ns)
        return whole[ranks < each]
