"""Rows and totals of a recorder read back: as spans, as lines and as a tally, with the call paths that they are of."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from instrument.recorder.core import Core
from instrument.recording.histogram import unpacked
from instrument.recording.lines import Lines, Numbers
from instrument.recording.paths import CallTree, shaped, tally_of
from instrument.recording.ring import Cursor
from instrument.recording.rows import NODE, SPAN_ID, Block, Held, Row, Taken, span_of
from instrument.recording.spans import Site, Span
from instrument.recording.tally import Tally, Totals


class Readback(Core):
    """What is known of all that was recorded."""

    shapes: dict[Site, str]
    _shapes_noted: int
    _shapes_of_nodes: tuple[int, int, array[int], tuple[str, ...]]
    _paths: CallTree
    _reading: Any

    def usage(self) -> Iterator[tuple[int, Site, int, int, int]]:
        """Thread id, site, calls, total ns and steps of every call path that was recorded: for a look at the load.

        The steps are those of generators after their first, also of such as go on.
        """
        for ring in self.rings():
            cells = ring.usage()
            site = self.paths().site
            for index, calls, total_ns, steps in cells:
                yield ring.thread_id, site(index), calls, total_ns, steps

    def site_calls(self) -> dict[Site, int]:
        """How often each site was called, on all threads together: what a report of the tally needs beside it."""
        tree = self.paths()
        site_of, count = tree.site_of, len(tree.sites)
        return {site: calls for site, calls in zip(tree.sites, self.calls_by(site_of, count), strict=False) if calls}

    def shape_calls(self) -> dict[str, int]:
        """How often probes of each shape were called, as `measure_costs` names them."""
        of_nodes, names = self._shapes_by_node()
        return dict(zip(names, self.calls_by(of_nodes, len(names)), strict=False))

    def _shapes_by_node(self) -> tuple[array[int], tuple[str, ...]]:
        """Of each call path the number of its probe's shape, and the shapes."""
        tree, noted = self.paths(), self._shapes_noted
        if self._shapes_of_nodes[:2] != (noted, len(tree)):
            site_of = tree.site_of
            numbers, names = shaped(tree.sites, self.shapes, "scope", site_of)
            self._shapes_of_nodes = noted, len(site_of), numbers, names
        return self._shapes_of_nodes[2:]

    def paths(self) -> CallTree:
        """The call paths as columns, kept up with the core's."""
        with self._reading:
            paths = self._paths
            first = len(paths)
            sites, parents = self.nodes_from(first)
            if sites:
                number_of = {site: number for number, site in enumerate(paths.sites)}
                numbers = array("i", [number_of.setdefault(site, len(number_of)) for site in sites])
                paths.sites += list(number_of)[len(paths.sites) :]
                paths.extend(first, numbers.tobytes(), parents)
            return paths

    def learn_paths(self) -> None:
        """Ask ahead what every report needs to know of new call paths, so that the first one need not: 1 us each.

        That is done where they are an eighth more than those asked for, which are copied each time that any come.
        """
        _, asked, *_ = self._shapes_of_nodes
        if self.node_count - asked > asked // 8:
            tree = self.paths()
            tree.located()
            tree.facts()
            self._shapes_by_node()

    def _paths_with(self, row: Row) -> CallTree:
        return self._paths if row[NODE] < len(self._paths) else self.paths()

    def asks_for_device_time(self) -> bool:
        """Whether a site that was called asks for device time."""
        return any(self.paths().by_site(_asks_for_device_time))

    def lines(self, *, merged: bool = False) -> Lines:
        """All totals up to now as columns, by call path and thread, or of all threads `merged` into thread 0.

        It takes some 0.2 us for each call path, and for each thread that it ran on.
        """
        tree = self.paths()
        threads: dict[int, str] = {}
        books: dict[int, list[Numbers]] = {}
        for thread_id, name, packed in self.lines_by_place(tree.located().places, merged):
            if packed:
                threads.setdefault(thread_id, name)
                books.setdefault(thread_id, []).append(memoryview(packed).cast("q"))
        return Lines(tree, threads, books, self._histogram)

    def _histogram(self, nodes: Iterable[int], thread_id: int | None) -> dict[int, int]:
        """The histogram of places on a thread of theirs, or of all."""
        return unpacked([self.histogram_of(self._paths.nodes(nodes), thread_id)])

    def tally(self) -> Tally:
        """A copy of all totals up to now, by call path and thread: 3 us for each pair of both."""
        books = [(ring.thread_id, ring.name, _as_totals(ring.copied_totals())) for ring in self.rings()]
        books.append((0, "(ended threads)", _as_totals(self.ended_totals())))
        return tally_of(self.paths(), books)

    def firsts(self) -> dict[Site, tuple[int, int]]:
        """When the first call of each site began that has ended, and how long it took on the host, in ns."""
        site_of = self.paths().site
        found: dict[Site, tuple[int, int]] = {}
        for index, first in self.firsts_by_node().items():
            site = site_of(index)
            found[site] = min(first, found.get(site, first))
        return found

    def firsts_by_node(self) -> dict[int, tuple[int, int]]:
        """The same of each call node of `paths`."""
        found: dict[int, tuple[int, int]] = {}
        for book in [*(ring.firsts() for ring in self.rings()), self.ended_firsts()]:
            for index, first in book.items():
                found[index] = min(first, found.get(index, first))
        return found

    def span(self, row: Row, thread_id: int) -> Span:
        """The span that a row stands for."""
        return span_of(row, self.site_of(row), thread_id)

    def site_of(self, row: Row) -> Site:
        """The site of a row."""
        return self._paths_with(row).site(row[NODE])

    def spans(self) -> list[Span]:
        """The spans that the rings still hold, and those that are open as far as they have come. Unordered.

        An object for each, at 2 us: for a look at a few. `take` is for many.
        """
        open_rows = self.open_rows()
        found = [self.span(row, ring.thread_id) for ring in self.rings() for row in ring.newest(0)[0]]
        ended = {span.span_id for span in found}
        for thread_id, row in open_rows:
            if row[SPAN_ID] not in ended:  # or it has ended since
                found.append(self.span(row, thread_id))
                found[-1].clipped = True
        return found

    def take(self, start_ns: int = 0) -> Taken:
        """The rows that spans from that time on are made of: 10 ns a row, where the spans are made later.

        They stay what they are when newer ones overwrite them in the rings.
        """
        open_rows = self.open_rows()
        blocks = [Block(ring.thread_id, *ring.copied(ring.first_after(start_ns))) for ring in self.rings()]
        return Taken(blocks, open_rows, self.paths())

    def held(self, start_ns: int, leave_out: Collection[int]) -> Held:
        """What spans the rings hold that ended after a time, and those that are open now, without making them.

        Ended ones of the threads to `leave_out` are left out. Each row of a site that asks for device time takes 5 ns;
        other rows are not read.
        """
        tree, marks = self.paths(), b""
        if self.asks_for_device_time():
            marks = bytes(map(tree.by_site(_asks_for_device_time).__getitem__, tree.site_of))
        now_ns, open_rows = self.now_ns(), self.open_rows()
        spans, oldest, asking = 0, dict[int, int](), array("Q")
        still_open = {row[SPAN_ID]: (thread_id, row[NODE]) for thread_id, row in open_rows}
        for ring in self.rings():
            if ring.thread_id in leave_out:
                continue
            count, first_end_ns, ids = ring.held(start_ns, marks)
            for row in ring.newest(ring.first_after(now_ns))[0] if still_open else ():
                still_open.pop(row[SPAN_ID], None)  # one that has ended since is there already
            if count:
                oldest[ring.thread_id] = min(first_end_ns, oldest.get(ring.thread_id, first_end_ns))
            spans += count
            asking.frombytes(ids)
        for span_id, (thread_id, node) in still_open.items():
            oldest.setdefault(thread_id, now_ns)
            if self.paths().site(node).device:
                asking.append(span_id)
        return Held(spans + len(still_open), oldest, asking)

    def cursor(self, read_on: Callable[[Any, int], tuple[list[Row], int, int]] | None = None) -> Cursor:
        """A reader that sees every row from now on once, as long as it comes before the ring wraps.

        `read_on` reads a ring from a row number on: all of its rows where it is left out.
        """
        return Cursor(self.rings, lambda: self.ended_rows, read_on or (lambda ring, since: ring.newest(since)))

    def threads(self) -> dict[int, str]:
        """Native thread ids and names of the threads that recorded and whose rows are still held."""
        return {ring.thread_id: ring.name for ring in self.rings()}

    def losses(self) -> Mapping[str, int]:
        """What timelines cannot show, by reason. The tally has counted all of it."""
        overwritten = sum(max(ring.head - ring.capacity, 0) for ring in self.rings()) + self.ended_rows
        losses = {"spans overwritten by newer ones": overwritten, "spans shorter than their rule asks": self._too_short}
        return {reason: count for reason, count in losses.items() if count}

    def counts(self) -> Mapping[str, int]:
        """Irregular events, by what happened."""
        return dict(self.irregular)

    @property
    def calls(self) -> int:
        """Spans finished since the start, cheap to read."""
        total: int = sum(ring.head for ring in self.rings()) + self.ended_rows
        return total + self._too_short

    @property
    def _too_short(self) -> int:
        total: int = sum(ring.too_short for ring in self.rings()) + self.ended_too_short
        return total


def _asks_for_device_time(site: Site) -> bool:
    return site.device


def _as_totals(book: dict[int, Any]) -> list[tuple[int, Totals]]:
    """Return a book's totals by the number of their node."""
    return [(index, Totals.of_core(cell)) for index, cell in book.items()]
