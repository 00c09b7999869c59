"""Batches and whom they served, as columns, for as long as it is not settled what became of their requests.

Of a request that is open for long the batches are many. What is remembered of one are a few numbers, and of each key in
it sixteen bytes. Where there are too many the requests that have most of them lose theirs, and are named `lost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.otlp.processor.key_facts import Batch
from instrument.trace.groups import firsts_of

MOST_PAIRS = 500_000
"""Pairs of a batch and a key in it that are remembered, and as many batches at most: 23 MB, and half as much again as
they are copied."""

FEW = 4_096
"""So many pairs are not looked through for what is not needed any more."""

_BATCH = np.dtype([
    ("start_ns", np.int64), ("end_ns", np.int64), ("thread", np.int32), ("name", np.int32), ("says_weight", np.bool_),
    ("size", np.int32),
])  # fmt: skip
PAIR = np.dtype([("batch", np.int32), ("key", np.int32), ("weight", np.int64)])


class Needed(NamedTuple):
    """What is still needed: batches that serve these keys, those since a time, and all since another one.

    Those `since_ns` may serve requests that nobody has heard of yet. All that ended since `around_ns` may have run
    while a request waited.
    """

    keys: Set[str]
    since_ns: int
    around_ns: int


class _Records:
    """Records of one kind, one after another, with room for more."""

    def __init__(self, kind: np.dtype[np.void]) -> None:
        self._data: NDArray[np.void] = np.zeros(64, kind)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> NDArray[Any]:
        return self._data[: self._count]

    def extend(self, more: Sequence[tuple[Any, ...]]) -> None:
        if self._count + len(more) > len(self._data):
            larger = np.zeros(max(self._count + len(more), len(self._data) * 3 // 2), self._data.dtype)
            larger[: self._count] = self.rows
            self._data = larger
        self._data[self._count : self._count + len(more)] = more
        self._count += len(more)

    def replace(self, rows: NDArray[Any]) -> None:
        self._data, self._count = rows.copy(), len(rows)


class ServedBatches:
    """Used by one thread. `needed` tells what is needed now."""

    def __init__(self, needed: Callable[[], Needed]) -> None:
        self._needed = needed
        self._batches, self._pairs = _Records(_BATCH), _Records(PAIR)
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[str, int], int] = {}
        self._keys: dict[str, int] = {}
        self._looked_through = 0
        self.lost: set[str] = set()
        """Keys of requests that are not settled, and of whose batches some have been forgotten."""

    def __len__(self) -> int:
        """How many pairs of a batch and a key are remembered."""
        return len(self._pairs)

    def add(self, instance: str, batches: Iterable[Batch]) -> None:
        """Remember batches of a process."""
        rows: list[tuple[Any, ...]] = []
        pairs: list[tuple[Any, ...]] = []
        first = len(self._batches)
        for one in batches:
            thread = self._threads.setdefault((instance, one.thread_id), len(self._threads))
            name = self._names.setdefault(one.name, len(self._names))
            for key, weight in zip(one.keys, one.weights, strict=True):
                pairs.append((first + len(rows), self._keys.setdefault(key, len(self._keys)), weight))
            rows.append((one.start_ns, one.end_ns, thread, name, one.says_weight, len(one.keys)))
        if not rows:
            return
        self._batches.extend(rows)
        self._pairs.extend(pairs)
        if len(self._pairs) > 2 * self._looked_through + FEW or self._is_full:
            self._forget()
            self._looked_through = len(self._pairs)

    @property
    def _is_full(self) -> bool:
        return max(len(self._pairs), len(self._batches)) > MOST_PAIRS

    # ---------------------------------------------------------------- forgetting

    def _forget(self) -> None:
        """Forget what is not needed, and where that is not enough what most is remembered of."""
        needed = self._needed()
        self.lost &= needed.keys
        batches, pairs = self._batches.rows, self._pairs.rows
        names = list(self._keys)
        is_wanted = np.fromiter((key in needed.keys and key not in self.lost for key in names), np.bool_, len(names))
        stays = is_wanted[pairs["key"]]
        if needed.since_ns:
            is_lost = np.fromiter((key in self.lost for key in names), np.bool_, len(names))
            stays |= (batches["end_ns"][pairs["batch"]] >= needed.since_ns) & ~is_lost[pairs["key"]]
        counts = np.bincount(pairs["key"][stays], minlength=len(names))
        room, left = MOST_PAIRS, int(counts.sum())
        for key in np.argsort(counts, kind="stable")[::-1].tolist() if left > room else ():
            if left <= room * 3 // 4:
                break
            left -= int(counts[key])
            stays &= pairs["key"] != key
            if is_wanted[key]:
                self.lost.add(names[key])
        served = np.zeros(len(batches), np.bool_)
        served[pairs["batch"][stays]] = True
        all_around = served | (batches["end_ns"] >= needed.around_ns)
        self._keep(served if all_around.sum() > room * 3 // 4 else all_around, stays)

    def _keep(self, batches: NDArray[np.bool_], pairs: NDArray[np.bool_]) -> None:
        place = np.cumsum(batches) - 1
        its = self._pairs.rows[pairs]
        its["batch"] = place[its["batch"]]
        used, its["key"] = np.unique(its["key"], return_inverse=True)
        names = list(self._keys)
        self._keys = {names[key]: number for number, key in enumerate(used.tolist())}
        rows = self._batches.rows[batches]
        threads, rows["thread"] = np.unique(rows["thread"], return_inverse=True)
        known = list(self._threads)
        self._threads = {known[thread]: number for number, thread in enumerate(threads.tolist())}
        self._pairs.replace(its)
        self._batches.replace(rows)

    # ---------------------------------------------------------------- asking

    @property
    def names(self) -> Mapping[str, int]:
        """The names of batches by their numbers."""
        return self._names

    def weights(self) -> tuple[Sequence[str], NDArray[Any], NDArray[Any]]:
        """Return the names of batches, and the place of the name and the weight of each pair that has a weight."""
        pairs = self._pairs.rows
        its = self.batches[pairs["batch"]]
        says = its["says_weight"]
        return list(self._names), its["name"][says], pairs["weight"][says]

    def of(self, keys: Iterable[str]) -> Mapping[str, NDArray[Any]]:
        """The pairs that have these keys, by the key, each with its batch's place: of those that have any."""
        numbers = {self._keys[key]: key for key in keys if key in self._keys}
        is_wanted = np.zeros(len(self._keys), np.bool_)
        is_wanted[list(numbers)] = True
        pairs = self._pairs.rows[is_wanted[self._pairs.rows["key"]]]
        pairs = pairs[np.argsort(pairs["key"], kind="stable")]
        firsts = firsts_of(pairs["key"])
        return {numbers[int(its["key"][0])]: its for its in np.split(pairs, firsts[1:]) if len(its)}

    @property
    def batches(self) -> NDArray[Any]:
        """All that are remembered."""
        return self._batches.rows
