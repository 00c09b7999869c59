"""What is open in the recorder in Python: its attributes, other names for it, and who asks what it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from instrument.recorder.call_nodes import Counted
from instrument.recorder.chains import CLOSED, DEEPEST, MANUAL, Frame, nearest_open, upwards
from instrument.recorder.stepped import waited_of
from instrument.recording.rows import TASK, Row, is_request_root, row_of
from instrument.recording.spans import ATTRIBUTE_LIMIT, Site
from instrument.recording.tally import Node

if TYPE_CHECKING:
    from instrument.recorder.memory_writer import MemoryWriter


class Opened(Counted):
    """The open spans of every context."""

    on: bool
    _remote_key: Any
    _current: ContextVar[Frame | None]
    _writer: MemoryWriter | None
    _open: WeakValueDictionary[int, Frame]
    """Every open frame by its id."""
    _begun_in: dict[int, Frame | None]
    """The span above that of a generator, by the id of that."""

    def annotate(self, frame: Frame | None, attributes: Mapping[Any, Any], /) -> None:
        """Set attributes of an open span. They are taken as they are, so long as there is room."""
        if frame is None:
            return
        if frame[11] == CLOSED:
            self.irregular["span annotated that is not open"] += 1
            return
        known = dict(frame[10] or {})  # a copy, since rows and other spans may have it
        for name, value in attributes.items():
            if len(known) < ATTRIBUTE_LIMIT or name in known:
                known[name] = value
            else:
                self.irregular["attributes beyond the limit of a span"] += 1
        frame[10] = known
        if self._writer is not None:
            self._writer.tell_attributes(frame)

    def _innermost(self) -> Frame | None:
        """The innermost open span of this context."""
        return nearest_open(self._current.get())

    def annotate_innermost(self, attributes: Any = None, /, **more: Any) -> None:
        """Set attributes of the innermost open span; see `instrument.recorder.scopes.annotate`."""
        frame = self._innermost() if self.on else None
        if frame is not None:
            self.annotate(frame, self._annotate_checked(attributes, more))

    def annotate_request(self, attributes: Any = None, /, **more: Any) -> None:
        """Set attributes of the open request; see `instrument.recorder.scopes.annotate_request`."""
        frame = self._innermost() if self.on else None
        request = None if frame is None else frame.request
        if request is not None and request[11] != CLOSED:
            self.annotate(request, self._annotate_checked(attributes, more))

    def _annotate_checked(self, attributes: Any, more: dict[str, Any]) -> dict[Any, Any]:
        raise NotImplementedError

    def site_of_open(self, frame: Frame | None) -> Site | None:
        """The site of an open span, or with None of the innermost one; None where there is none."""
        found = self._innermost() if frame is None else frame
        return None if found is None or found[11] == CLOSED else found[0].site

    def rename_innermost(self, site: Site) -> None:
        """Rename the innermost open span of this context."""
        self.rename(self._innermost(), site)

    def rename(self, frame: Frame | None, site: Site) -> None:
        """Let an open span be one of another site of its kind from now on, and never raise.

        It counts at the call path of the new site, and so does what is open below it, in any context, and what begins
        there later. What has ended below it stays counted where it was. A frame that has ended, or one of another kind,
        is counted.
        """
        if frame is None:
            return
        if frame[11] == CLOSED:
            self.irregular["span renamed that is not open"] += 1
        elif getattr(site, "kind", None) != frame[0].site.kind:
            self.irregular["span not renamed to a site of another kind"] += 1
        elif frame[0].site is not site:
            with self._lock:
                self._rename(frame, site)

    def _rename(self, frame: Frame, site: Site) -> None:
        open_ = {each[1]: each for each in self._open_frames()}
        if frame[1] not in open_:
            self.irregular["span renamed that is not open"] += 1
            return
        for each in open_.values():
            self._renew(each)
        below: set[int] = {frame[1]}
        apart: set[int] = set()
        order = [frame]
        for each in open_.values():
            path: list[Frame] = []
            above: Frame | None = each
            while above is not None and above[1] not in below and above[1] not in apart:
                path.append(above)
                above = self._above(above)
            if above is not None and above[1] in below:
                below.update(member[1] for member in path)
                order += reversed(path)
            else:
                apart.update(member[1] for member in path)
        old = {each[1]: each[0] for each in order}
        for each in order:
            above = self._above(each)
            from_ = None if above is None else old.get(above[1], above[0])
            each[0] = self._moved(each[0], above, from_, site if each is frame else each[0].site)
        for each in order:
            node = each[0]
            is_inner = node.inner is not None and any(
                above[0] is node and above[5].thread_id == each[5].thread_id for above in self._all_above(each)
            )
            each[16] = node.inner.index if is_inner else node.index
            if self._writer is not None:
                self._writer.begin(each)

    def _moved(self, old: Node, above: Frame | None, from_: Node | None, site: Site) -> Node:
        """The node of a site below the frame above, by the path that led from there, at `from_`, to the old node."""
        full = self._overflow
        between: list[Site] = []
        at = old.parent
        if above is None:  # all above it have ended
            return self._node(self._root if at is None or full in (old, at) else at, site)
        while at is not None and at is not from_:
            between.append(at.site)
            at = at.parent
        node = above[0]
        # Where it is not below its calls fold into one around it, or the tally is full.
        for step in reversed(between) if at is not None and old is not from_ else ():
            node = self._node(node, step)  # of a span that has ended
        return self._node(node, site)

    def _above(self, frame: Frame) -> Frame | None:
        """The nearest open frame above; of a generator's span that below which it began, whoever has resumed it."""
        return nearest_open(self._begun_in[frame[1]] if frame[1] in self._begun_in else frame[6])

    def _all_above(self, frame: Frame) -> Iterator[Frame]:
        above = self._above(frame)
        for _ in range(DEEPEST):
            if above is None:
                return
            yield above
            above = self._above(above)

    def _open_frames(self) -> list[Frame]:
        """The frames that are open, of every context."""
        found = [reference() for reference in self._open.valuerefs()]
        return [frame for frame in found if frame is not None and frame[11] != CLOSED]

    def current_id(self) -> int:
        """Identity of the current span, 0 if there is none."""
        frame = self._innermost()
        return 0 if frame is None else int(frame[1])

    def current_trace(self) -> tuple[int, int, Any] | None:
        """Identities of the innermost open span and its tree's root, and what its request noted of another tracer."""
        frame = self._innermost()
        if frame is None:
            return None
        request = frame.request
        return frame[1], frame[3], None if request is None else (request[10] or {}).get(self._remote_key)

    def forget_current(self) -> None:
        """Forget what is open in this context."""
        self._current.set(None)

    def _forget_all(self) -> None:
        """Forget what is open in every context: in a forked child, where the other threads are gone."""
        self._open.clear()
        self._begun_in.clear()
        self._current.set(None)
        if self._writer is not None:
            self._writer.end_all()

    def innermost_manual(self, name: str | None) -> Frame | None:
        """The innermost open frame of this context that was opened as manual, by name where one is given."""
        for frame in upwards(self._current.get()):
            if frame[11] == MANUAL and (name is None or frame[0].site.name == name):
                return frame
        return None

    def open_requests(self, thread_id: int) -> int:
        """How many requests are open that tasks have begun on a thread."""
        rows = (row for begun_on, row in self.open_rows() if begun_on == thread_id)
        return sum(row[TASK] != 0 and is_request_root(row) for row in rows)

    def open_rows(self) -> list[tuple[int, Row]]:
        """Thread id and row of each span that is open now, ending now."""
        now = self.now_ns()
        found: list[tuple[int, Row]] = []
        for frame in self._open_frames():
            if frame[7]:
                end = max(now, frame[7])
                waited_ns = waited_of(frame, end)
                row = row_of(
                    frame[0].index, frame[1], frame[2], frame[3], frame[8], frame[7], end, frame[4] - waited_ns,
                    end - frame[7] - waited_ns if waited_ns else -1,
                    attributes=None if frame[10] is None else dict(frame[10]),
                )  # fmt: skip
                found.append((frame[5].thread_id, row))
        return found
