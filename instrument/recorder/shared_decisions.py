"""One decision for a request that several processes serve: what one of them keeps, the others keep, too.

Their parts of a request are of one trace. Each process's tail sampler decides as its own part ends, and tells here of
what it keeps; what it would let go it holds for a while, for another part may be slow or fail.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from instrument.recording.spans import Span

TRACES_KNOWN = 50_000
"""Traces that were kept and are remembered; the oldest go first."""

LINGER_NS = 2 * 10**9
"""How long after its end a request is held that nothing speaks for, where other processes may serve it, too."""


class Strays(Protocol):
    """What is done for other requests in the trees of those of one process."""

    def may_be_in(self, root_id: int) -> bool:
        """Whether there may be any in the tree of a request that has just ended."""

    def keys(self, root_id: int) -> Set[str]:
        """The keys that they bear in the tree of a request, as far as is known."""

    def take(self, spans: Sequence[Span]) -> None:
        """A request is let go, its own span first, or more comes of one that was."""


class Decisions:
    """The traces that are kept, for the tail samplers of several processes. Used by one thread.

    `members` is how many there are: where it is one, nobody else decides. `by_key(key, at_ns)` tells whether a request
    is kept that has this key and was open then, None where one has it that is open.
    """

    def __init__(self, by_key: Callable[[str, int], bool | None] = lambda key, at_ns: False) -> None:
        self.by_key = by_key
        self._kept: OrderedDict[int, None] = OrderedDict()
        self.members = 1
        self.lag_ns = 0
        """How far the farthest of them is behind."""

    @property
    def are_shared(self) -> bool:
        """Whether others decide, too."""
        return self.members > 1

    def keep(self, trace_id: int) -> None:
        """A part of this trace is kept."""
        self._kept[trace_id] = None
        if len(self._kept) > TRACES_KNOWN:
            self._kept.popitem(last=False)

    def is_kept(self, trace_id: int) -> bool:
        """Whether some part of it is kept."""
        return trace_id in self._kept
