"""The core of the recorder: the C module or, if that is missing, a substitute that records nothing.

Functions off the hot path are in Python, such as the functions that read recorded spans and totals.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from instrument import native
from instrument.recorder import attribute_checks, wrapping
from instrument.recording.memory_layout import HEADER, OVERWRITTEN, REASONS, ROW_NODE, Row
from instrument.recording.paths import CallTree
from instrument.recording.spans import AttributeValue, Site
from instrument.runtime.faults import FAULTS

if TYPE_CHECKING:
    from instrument.native._recorder import Core as Core
    from instrument.native._recorder import Number as Number
    from instrument.native._recorder import Scope as Scope
    from instrument.recorder.own_recording import Cursor, OwnRecording
    from instrument.recording.tally import Tally
elif native.MODULE is not None:
    Core, Number, Scope = native.MODULE.Core, native.MODULE.Number, native.MODULE.Scope
else:

    class IdleCore:
        """A core that records nothing, for a recorder without the C module."""

        on = False
        memory = None
        node_count = 0

        def __init__(self, *_: Any) -> None:
            self.passes, self.user_sites = {}, {}

        def rings(self) -> list[Any]:
            return []

        def open_rows(self) -> list[Any]:
            return []

        def nodes_from(self, first: int) -> tuple[list[Any], bytes]:
            return [], b""

        def _nothing(self, *_: Any, **__: Any) -> None: ...

        annotate_innermost = annotate_request = bind = _nothing
        current_trace = innermost_manual = site_of_open = _reset = _nothing

    Core = IdleCore

    class Number:
        """A gauge, counter or histogram without a value."""

        __slots__ = ()

        def __init__(self, *_: Any) -> None: ...

        set = record = add = IdleCore._nothing

    class Scope:
        """A scope that times nothing."""

        __slots__ = ("_attributes", "_frame", "_recorder", "_site")

        def __init__(self, recorder: Any, site: Any, attributes: dict[Any, Any] | None = None) -> None:
            self._recorder, self._site, self._attributes, self._frame = recorder, site, attributes, None

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def annotate(self, attributes: Any = None, /, **more: Any) -> None: ...


MOST_SITE_SHAPES = 65_536
"""The maximum number of sites with a stored kind of probe, to bound the memory."""


class Readback(Core):
    """A recorder's core with methods that mute sites, annotate open spans, and read the process's own recording."""

    scope_name_limit: int
    irregular: Counter[str]
    renamed: dict[Site, dict[str, Site]]  # by the place's own site
    place_of: dict[Site, Site]
    shapes: dict[Site, str]
    _counters: dict[Site, Any]
    _mutable: dict[Site, weakref.WeakSet[Any] | None]
    _paths: CallTree
    _reading: Any

    def count(self, event: str) -> None:
        """Count an irregular event, such as a refused attribute."""
        with self._reading:
            self.irregular[event] += 1

    def note_shape(self, site: Site, shape: str) -> bool:
        """Store the kind of a site's probe, such as "call" or "method". Return False beyond `MOST_SITE_SHAPES`."""
        if len(self.shapes) >= MOST_SITE_SHAPES and site not in self.shapes:
            return False
        self.shapes[site] = shape
        return True

    def allow_muting(self, site: Site, function: Any = None, shape: str = "") -> None:
        """Allow a site to be muted. `function` is a wrapper made by `wrap`, or None for a probe that checks
        `Readback.passes` itself."""
        if not self.note_shape(site, shape or ("method" if function is None else "call")):
            return
        functions = self._mutable.setdefault(site, None)
        if function is None:
            return
        if functions is None:
            functions = self._mutable[site] = weakref.WeakSet()
        functions.add(function)
        if site in self.passes:
            wrapping.set_call_switch(function, self.passes[site])

    def mute(self, site: Site) -> bool:
        """Mute a site: count its calls without recording spans. Return False if it cannot be muted.

        Open spans still end. A generator's span ends when its body next resumes.
        """
        if site not in self._mutable or site in self.passes:
            return False
        if site not in self._counters:
            self._counters[site] = native.MODULE.Pass(self)
        self.passes[site] = self._counters[site]
        self.forget_names()  # also for scopes that were made and have not begun
        self._set_passing(site, self._counters[site])
        return True

    def unmute(self, site: Site) -> None:
        self.passes.pop(site, None)
        self._set_passing(site, None)

    def _set_passing(self, site: Site, passing: Any) -> None:
        """Make a site's functions count calls in `passing` instead of recording spans. If `passing` is None, record
        spans again."""
        for function in list(self._mutable.get(site) or ()):
            wrapping.set_call_switch(function, passing or self)

    def muted_calls(self) -> dict[Site, int]:
        """Return the number of calls without a span, by site."""
        return {site: calls for site, counter in list(self._counters.items()) if (calls := counter.calls)}

    def spans_cut_by_muting(self) -> dict[Site, int]:
        """Return the number of generators' spans that muting ended early, by site."""
        return {site: cut for site, counter in list(self._counters.items()) if (cut := counter.cut)}

    def current_span_id(self) -> int:
        """Return the id of the innermost open span, 0 without one."""
        trace = self.current_trace()
        return 0 if trace is None else trace[0]

    def bind_innermost(self, key: object) -> None:
        self.annotate_innermost(attribute_checks.make_key_attributes(key, None, self.complain))

    def _annotate_checked(self, attributes: object, more: dict[str, object]) -> dict[str, AttributeValue]:
        return attribute_checks.check_attributes(attributes, more, self.complain)

    def complain(self, event: str, words: str, kind: str = "") -> None:
        """Count a refused attribute, name or status. The first refusal of each kind is logged."""
        self.count(event)
        FAULTS.note_unreadable_value("annotate", words, kind)

    def paths(self) -> CallTree:
        with self._reading:
            paths = self._paths
            first = len(paths)
            sites, parents = self.nodes_from(first)
            if sites:
                number_of = {site: number for number, site in enumerate(paths.sites)}
                numbers = array("i", [number_of.setdefault(site, len(number_of)) for site in sites])
                paths.sites += list(number_of)[len(paths.sites) :]
                paths.add_nodes(first, numbers.tobytes(), parents)
            return paths

    def make_reader(self) -> OwnRecording:
        from instrument.recorder.own_recording import OwnRecording

        return OwnRecording(self, self.memory)

    def tally(self) -> Tally:
        return self.make_reader().tally()

    def find_site(self, row: Row) -> Site:
        paths = self._paths if row[ROW_NODE] < len(self._paths) else self.paths()
        return paths.site(row[ROW_NODE])

    def make_row_cursor(self) -> Cursor:
        """Return a reader of all rows from now on. Rows that are overwritten unread are lost."""
        from instrument.recorder.own_recording import Cursor

        return Cursor(self.make_reader)

    def read_thread_names(self) -> dict[int, str]:
        return {ring.thread_id: ring.name for ring in self.rings()}

    def losses(self) -> Mapping[str, int]:
        """Return the number of spans without rows, by the reason of the loss. The totals still count the spans."""
        overwritten = sum(max(ring.head - ring.capacity, 0) for ring in self.rings()) + self.ended_rows
        too_short = sum(ring.too_short for ring in self.rings()) + sum(self._read_header_field("ended_too_short"))
        losses = {OVERWRITTEN: overwritten, "spans shorter than their rule asks": too_short}
        return {reason: count for reason, count in losses.items() if count}

    def count_unusual_events(self) -> Mapping[str, int]:
        """Return the number of unusual events, such as a scope that was ended twice, by name."""
        reasons = zip(REASONS, self._read_header_field("reasons"), strict=False)
        return {**self.irregular, **{reason: count for reason, count in reasons if count}}

    def _read_header_field(self, field: str) -> tuple[int, ...]:
        return () if self.memory is None else HEADER.read(self.memory, field)

    @property
    def ended_rows(self) -> int:
        """The number of rows that were lost because another thread reused the ring of an ended thread."""
        return sum(self._read_header_field("ended_rows"))

    @property
    def calls(self) -> int:
        total: int = sum(ring.head + ring.too_short for ring in self.rings())
        return total + self.ended_rows + sum(self._read_header_field("ended_too_short"))


def calls_by_site(recorder: Readback) -> dict[Site, int]:
    """Return the number of calls of each site. Does not import numpy."""
    calls: Counter[Site] = Counter()
    calls_of, tree = recorder.calls_by_node(), recorder.paths()
    for number, count in zip(tree.site_of, calls_of, strict=False):
        if count:
            calls[tree.sites[number]] += count
    return calls
