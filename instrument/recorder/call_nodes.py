"""The call tree of the recorder in Python, and the rings of its threads: what calls are counted in."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from instrument.recorder.chains import CLOSED, Frame, upwards
from instrument.recording.ring import First, Ring, Rings
from instrument.recording.spans import Site
from instrument.recording.tally import Node, Totals

if TYPE_CHECKING:
    from instrument.recorder.memory_writer import MemoryWriter

NODE_LIMIT = 16_384
OVERFLOW_SITES = 4_096
"""Sites that have a line of their own below that of what came after the node limit."""
EDGE_LIMIT = 8 * NODE_LIMIT
"""Steps to nodes that are not below; those beyond are looked for each time."""

_clock = time.monotonic_ns


class Counted:
    """Call paths, and the rings and totals of threads."""

    node_limit: int
    irregular: Counter[str]
    _lock: Any
    _rings: Rings
    _writer: MemoryWriter | None

    def _begin_tree(self, overflow: Site, frames: Iterable[Frame]) -> None:
        """Begin a new call tree, which has the paths of the frames and no other."""
        self._nodes: list[Node] = []
        self._edges = 0
        self._root = Node(-1, Site("(root)"), None)
        self._overflow = self._new_node(self._root, overflow)
        for frame in frames:
            self._renew(frame)

    def _renew(self, frame: Frame) -> None:
        """Count a span at its path in the call tree of now, if it began before a reset."""
        nodes, node, index = self._nodes, frame[0], frame[16]
        if index < len(nodes) and (nodes[index] is node or nodes[index] is node.inner):
            return
        is_inner, path, node = index != node.index, node.path(), self._root
        for site in path:
            node = self._node(node, site)
        if is_inner:
            self._let_recur(node)
        frame[0], frame[16] = node, (node.inner or node).index if is_inner else node.index

    def _new_node(self, parent: Node, site: Site) -> Node:
        nodes = self._nodes
        node = Node(len(nodes), site, parent)
        nodes.append(node)
        while nodes[node.index] is not node:  # a finaliser or signal handler came in between and made one as well
            node.index += 1
        parent.children.setdefault(site, node)
        if self._writer is not None:
            self._writer.add_node(node)
        return node

    def _node(self, parent: Node, site: Site) -> Node:
        """The node of a site called under a parent.

        On first sight that of the parent's path which is of the site, where there is one, so that recursion makes no
        nodes; else a new one, as long as the tally has room.
        """
        with self._lock:
            node = parent.children.get(site)
            if node is not None:
                return node
            again: Node | None = parent
            while again is not None and again.site is not site:
                again = again.parent
            if again is not None:
                between = parent
                while between is not again and between.parent is not None:
                    self._let_recur(between)
                    between = between.parent
                self._let_recur(again)
                node = again
            elif len(self._nodes) < self.node_limit:
                return self._new_node(parent, site)
            else:
                node = self._overflow_of(site)
            if self._edges < EDGE_LIMIT:
                parent.children[site] = node
                self._edges += 1
            return node

    def _overflow_of(self, site: Site) -> Node:
        """Where calls of a site are counted that come when the tally is full."""
        node = self._overflow.children.get(site)
        if node is None and len(self._overflow.children) < OVERFLOW_SITES:
            node = self._new_node(self._overflow, site)
            self._let_recur(node)
        return node or self._overflow

    def _let_recur(self, node: Node) -> None:
        """Count calls of a node that run inside a call of it apart from now on."""
        if node.inner is None and node.parent is not None:
            inner = self._new_node(node.parent, node.site)
            inner.inner = node.inner = inner

    def _index(self, node: Node, above: Frame | None, ring: Ring) -> int:
        """Under which index a call of a node that may recur counts, which begins below a frame."""
        for frame in upwards(above):
            if frame[0] is node and frame[5].thread_id == ring.thread_id and frame[11] != CLOSED:
                node = node.inner or node
                break
        index: int = node.index
        return index

    def _ring(self) -> Ring:
        try:
            return self._rings.local.ring
        except AttributeError:
            return self._rings.new()

    @property
    def node_count(self) -> int:
        """Call paths known."""
        return len(self._nodes)

    def nodes_from(self, first: int) -> tuple[list[Site], bytes]:
        """Of the nodes from a number on their sites, and the numbers of their parents in 32 bits, -1 for none."""
        nodes = self._nodes[first:]
        parents = array("i", [node.parent.index if node.parent else -1 for node in nodes])
        return [node.site for node in nodes], parents.tobytes()

    def rings(self) -> list[Ring]:
        """The rings in the order in which their threads first recorded."""
        return self._rings.all()

    @property
    def ended_rows(self) -> int:
        """Rows of rings that were given up."""
        return self._rings.ended_rows

    @property
    def ended_too_short(self) -> int:
        """The same of `Ring.too_short`."""
        return self._rings.ended_too_short

    def ended_totals(self) -> dict[int, Totals]:
        """Totals of threads whose rings were given up."""
        with self._rings.lock:
            return {index: totals.copy() for index, totals in self._rings.ended_totals.items()}

    def calls_by(self, groups: Sequence[int], count: int) -> list[int]:
        """How often the nodes of each group were called, on all threads together."""
        calls = [0] * count
        for book in (self.ended_totals(), *(ring.copied_totals() for ring in self.rings())):
            for index, totals in book.items():
                if index < len(groups):
                    calls[groups[index]] += totals.calls
        return calls

    def ended_firsts(self) -> dict[int, First]:
        """Their first calls, as `Ring.firsts` has them."""
        with self._rings.lock:
            return dict(self._rings.ended_firsts)

    def now_ns(self) -> int:
        """The clock that spans are timed with."""
        return _clock()

    def count(self, what: str) -> None:
        """Count an irregular event."""
        self.irregular[what] += 1

    def count_device(self, ring: Ring, index: int, host_ns: int, device_ns: int, elapsed_ns: int) -> bool:
        """Add the device time of a call that was counted: False where no such call was."""
        counted = ring.count_device(index, host_ns, device_ns, elapsed_ns)
        if counted and self._writer is not None:
            self._writer.count_device(ring, index, host_ns, device_ns, elapsed_ns)
        return counted
