"""The rows and totals of a recorder, read back as spans, as lines and as a tally, with their call paths."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    """A core whose recording can be read in its own process."""

    shapes: dict[Site, str]
    _shapes_noted: int
    _shapes_of_nodes: tuple[int, int, array[int], tuple[str, ...]]
    _paths: CallTree
    _reading: Any

    def usage(self) -> Iterator[tuple[int, Site, int, int, int]]:
        """Yield thread id, site, calls, total ns and steps of every recorded call path.

        The steps are those of generators after their first, also of open ones.
        """
        for ring in self.rings():
            cells = ring.usage()
            site = self.paths().site
            for index, calls, total_ns, steps in cells:
                yield ring.thread_id, site(index), calls, total_ns, steps

    def site_calls(self) -> dict[Site, int]:
        """Return the calls of each site, on all threads together."""
        tree = self.paths()
        site_of, count = tree.site_of, len(tree.sites)
        return {site: calls for site, calls in zip(tree.sites, self.calls_by(site_of, count), strict=False) if calls}

    def shape_calls(self) -> dict[str, int]:
        """Return the calls of probes by shape, as `measure_costs` names them."""
        of_nodes, names = self._shapes_by_node()
        return dict(zip(names, self.calls_by(of_nodes, len(names)), strict=False))

    def _shapes_by_node(self) -> tuple[array[int], tuple[str, ...]]:
        """Return the number of each call path's shape, and the names of shapes."""
        tree, noted = self.paths(), self._shapes_noted
        if self._shapes_of_nodes[:2] != (noted, len(tree)):
            site_of = tree.site_of
            numbers, names = shaped(tree.sites, self.shapes, "scope", site_of)
            self._shapes_of_nodes = noted, len(site_of), numbers, names
        return self._shapes_of_nodes[2:]

    def paths(self) -> CallTree:
        """Return the call paths as columns, brought up to the core's."""
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
        """Compute the facts of new call paths before a report needs them, at 1 us each.

        It waits until they are an eighth more than the known ones, which are copied each time.
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
        """Return True where any called site asks for device time."""
        return any(self.paths().by_site(_asks_for_device_time))

    def lines(self, *, merged: bool = False) -> Lines:
        """Return all totals up to now as columns, by call path and thread, or of all threads `merged` into thread 0.

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
        """Return the histogram of places on a thread of theirs, or on all."""
        return unpacked([self.histogram_of(self._paths.nodes(nodes), thread_id)])

    def tally(self) -> Tally:
        """Return a copy of all totals up to now, by call path and thread, at 3 us for each pair of both."""
        books = [(ring.thread_id, ring.name, _as_totals(ring.copied_totals())) for ring in self.rings()]
        books.append((0, "(ended threads)", _as_totals(self.ended_totals())))
        return tally_of(self.paths(), books)

    def firsts(self) -> dict[Site, tuple[int, int]]:
        """Return the begin of each site's first ended call, and its length on the host, in ns."""
        site_of = self.paths().site
        found: dict[Site, tuple[int, int]] = {}
        for index, first in self.firsts_by_node().items():
            site = site_of(index)
            found[site] = min(first, found.get(site, first))
        return found

    def firsts_by_node(self) -> dict[int, tuple[int, int]]:
        """Return the begin and length of the first ended call of each call node of `paths`."""
        found: dict[int, tuple[int, int]] = {}
        for book in [*(ring.firsts() for ring in self.rings()), self.ended_firsts()]:
            for index, first in book.items():
                found[index] = min(first, found.get(index, first))
        return found

    def span(self, row: Row, thread_id: int) -> Span:
        """Return the span of a row."""
        return span_of(row, self.site_of(row), thread_id)

    def site_of(self, row: Row) -> Site:
        """Return the site of a row."""
        return self._paths_with(row).site(row[NODE])

    def spans(self) -> list[Span]:
        """Return the spans in the rings, and the open ones as far as they have come. Unordered.

        An object takes 2 us: it is for a few spans. `take` is for many.
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
        """Copy the rows of spans from a time on, at 10 ns a row. Newer rows do not overwrite the copy."""
        open_rows = self.open_rows()
        blocks = [Block(ring.thread_id, *ring.copied(ring.first_after(start_ns))) for ring in self.rings()]
        return Taken(blocks, open_rows, self.paths())

    def held(self, start_ns: int, leave_out: Collection[int]) -> Held:
        """Count the spans in the rings that ended after a time, and the open ones, without making them.

        Ended spans of the threads in `leave_out` do not count. A row of a site that asks for device time takes 5 ns;
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

    def cursor(self) -> Cursor:
        """Return a reader of every row from now on, once, if it comes before the ring wraps."""
        return Cursor(self.rings, lambda: self.ended_rows)

    def threads(self) -> dict[int, str]:
        """Return ids and names of the threads whose rows are still there."""
        return {ring.thread_id: ring.name for ring in self.rings()}

    def losses(self) -> Mapping[str, int]:
        """Count the spans that timelines do not have, by reason. The tally has counted them."""
        overwritten = sum(max(ring.head - ring.capacity, 0) for ring in self.rings()) + self.ended_rows
        losses = {"spans overwritten by newer ones": overwritten, "spans shorter than their rule asks": self._too_short}
        return {reason: count for reason, count in losses.items() if count}

    def counts(self) -> Mapping[str, int]:
        """Return the irregular events with their counts."""
        return dict(self.irregular)

    @property
    def calls(self) -> int:
        """The number of spans finished since the start. It is cheap."""
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
