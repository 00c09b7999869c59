"""The numbers of several processes together: threads, streams and devices stay apart, sites are joined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import HOST, Site
from instrument.trace.columns import Int64s
from instrument.trace.file import Saved
from instrument.trace.groups import ranked


class Apart:
    """Numbers that each process has of its own: the same where nobody else has it, else the next that is free."""

    def __init__(self) -> None:
        self._given: dict[tuple[Hashable, int], int] = {}
        self._taken: set[int] = set()
        self._next = 0

    def number(self, own: int, owner: Hashable) -> int:
        """Return the new number of an owner's number."""
        found = self._given.get((owner, own))
        if found is None:
            found = self._next if own in self._taken else own
            self._given[owner, own] = found
            self._taken.add(found)
            self._next = max(self._next, found + 1)
        return found

    def column(self, its: NDArray[Any], owner: Hashable) -> Int64s:
        """Return the new numbers of one owner's numbers."""
        return _each(its, lambda own: self.number(own, owner))

    def owned(self, owner: Hashable) -> dict[int, int]:
        """The own numbers of an owner by what they are now."""
        return {number: own for (whose, own), number in self._given.items() if whose == owner}


def _each(its: NDArray[Any], become: Callable[[int], int]) -> Int64s:
    """Return the new numbers, each distinct one asked for once."""
    known, places = ranked(its)
    return np.array(list(map(become, known.tolist())), dtype=np.int64)[places]


class JoinedSites:
    """Sites by what they mean; of attributes, what all of one place agree on."""

    def __init__(self) -> None:
        self._places: dict[tuple[object, ...], int] = {}
        self._found: list[list[Site]] = []

    def place(self, site: Site) -> int:
        """The place of what a site has become."""
        place = self._places.setdefault(site.key, len(self._found))
        if place == len(self._found):
            self._found.append([])
        if not any(site is one or site.attributes == one.attributes for one in self._found[place]):
            self._found[place].append(site)
        return place

    @cached_property
    def joined(self) -> tuple[Site, ...]:
        """All of them, when the last one has been given."""
        return tuple(map(_joined, self._found))


def _joined(same: Sequence[Site]) -> Site:
    first = same[0]
    shared = [one for one in first.attributes if all(one in other.attributes for other in same)]
    flags: dict[str, Any] = {name: any(getattr(site, name) for site in same) for name in _FLAGS}
    return replace(first, attributes=tuple(shared), **flags)


_FLAGS = [known.name for known in fields(Site) if known.type == "bool"]


def linked_ids(link: Any) -> Int64s | None:
    """The ids of the span and of the root to which a root is linked, None for a value that is no such link."""
    if not isinstance(link, (tuple, list)) or len(link) != 2 or set(map(type, link)) != {int}:
        return None
    return np.array(link, dtype=np.int64) if all(-1 << 63 <= one < 1 << 63 for one in link) else None


class ApartFile:
    """One file among those that are merged: what becomes of its numbers."""

    def __init__(self, saved: Saved, process: int, first: int, moved_ns: int) -> None:
        self.saved, self.process, self.first, self.moved_ns = saved, process, first, moved_ns
        self.trace = saved.columns
        self.row = np.zeros(0, dtype=np.int64)
        """The new row of each row, also where another file's was taken for it."""
        self.is_kept = np.ones(len(self.trace), dtype=np.bool_)

    def sites(self) -> list[Site]:
        """All that it names: those of its spans, of its totals and of its start-up."""
        found = [*self.trace.sites]
        if self.saved.tally is not None:
            found += dict.fromkeys(site for row in self.saved.tally.rows() for site in row.path)
        startup = self.saved.facts.startup
        if startup is not None:
            found += [call.site for call in (*startup.firsts, *filter(None, [startup.request]))]
        return found

    def called_sites(self) -> set[Site]:
        """The sites of its spans and of its totals, which were called."""
        found = {self.trace.sites[place] for place in np.unique(self.trace.site).tolist()}
        if self.saved.tally is not None:
            found |= {row.path[-1] for row in self.saved.tally.rows() if row.path and row.totals.calls}
        return found

    @property
    def of_all(self) -> slice:
        """Its rows among those of all files."""
        return slice(self.first, self.first + len(self.trace))


class Numbers:
    """The new numbers of all files."""

    def __init__(self, parts: Sequence[ApartFile]) -> None:
        self._threads, self._streams, self._devices = Apart(), Apart(), Apart()
        self._own_devices: dict[int, dict[int, int]] = {}
        self._sites = JoinedSites()
        for part in parts:
            for site in part.sites():
                self._sites.place(site)

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites, each once."""
        return self._sites.joined

    def site(self, site: Site) -> Site:
        """Return the new site of a site."""
        return self.sites[self._sites.place(site)]

    def sites_of(self, part: ApartFile) -> Int64s:
        """The place of the site of each row."""
        places = [self._sites.place(site) for site in part.trace.sites]
        return np.array(places, dtype=np.int64)[part.trace.site]

    def thread(self, own: int, part: ApartFile) -> int:
        """Return the number of a thread in the joined trace. Number 0 is for threads of its process that have ended."""
        return self._threads.number(own, part.process)

    def threads_of(self, part: ApartFile) -> Int64s:
        """The thread of each row."""
        return self._threads.column(part.trace.thread_id, part.process)

    def threads(self, its: NDArray[Any], part: ApartFile) -> Int64s:
        """Return the new numbers of threads; 0, which stands for none, stays."""
        found = np.zeros(len(its), dtype=np.int64)
        of_some = its != 0
        found[of_some] = self._threads.column(its[of_some], part.process)
        return found

    def streams(self, its: NDArray[Any], part: ApartFile) -> Int64s:
        """Return the new numbers of streams."""
        return self._streams.column(its, part.process)

    def devices(self, its: NDArray[Any], part: ApartFile) -> Int64s:
        """Return the new numbers of devices."""
        return _each(its, lambda own: self.device(own, part))

    def device(self, own: int, part: ApartFile) -> int:
        """The number of a device: one GPU has one, whichever processes use it, where its UUID is known."""
        if own == HOST:
            return own
        uuid = next((gpu.uuid for gpu in part.saved.facts.gpus if gpu.device == own), "")
        number = self._devices.number(own, uuid or part.process)
        self._own_devices.setdefault(part.process, {})[number] = own
        return number

    def of_process(self, process: int) -> dict[str, dict[int, int]]:
        """The threads, devices and streams of a process as it calls them, by what they are now."""
        return {
            "threads": self._threads.owned(process),
            "devices": self._own_devices.get(process, {}),
            "streams": self._streams.owned(process),
        }
