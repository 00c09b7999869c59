"""The slices and arrows of a trace as text, event by event, in the order in which they stand in its file.

`Slices` has a twin in C (`_slices.c`), which writes the same bytes in a tenth of the time; `slices_of` makes the one or
the other. The order of keys is the one that packs best: what many events share comes first, what differs comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from instrument import native
from instrument.chrome.lanes import DEEPEST, Arrows, Board, Lane, Row
from instrument.recording.spans import Site, Span
from instrument.trace.metadata import SiteText
from instrument.trace.text import INT64, MILLI, clean, encode, microseconds, safe

BATCH = 4096
"""How many spans are in memory as text."""

_native = native.find("_slices")


class Slices:
    """The slices of spans and their device intervals, and the arrows between them.

    `sites` are theirs, by first sight, `base_ns` the time from which the file counts: `since_ns`, or the first event
    where that is earlier. `left_out` counts the arrows that are not drawn. `pid` is the process of the spans.
    """

    def __init__(self, spans: Sequence[Span], since_ns: int, pid: int) -> None:
        # By start, and since ids rise from span to span, parents before children that start with them.
        self._spans = sorted(sorted(spans, key=attrgetter("span_id")), key=attrgetter("start_ns"))
        self._owners = [span for span in self._spans if span.device]
        starts = [since_ns, *(span.start_ns for span in self._spans[:1])]
        self.base_ns = min(starts + [interval.start_ns for owner in self._owners for interval in owner.device])
        self.sites: Sequence[Site] = list({span.site: None for span in self._spans})
        self._arrows = Arrows(self._spans)
        self.left_out = self._arrows.left_out
        self._board = Board(pid, self.base_ns)

    def texts(self, of_sites: Sequence[SiteText]) -> Iterator[str]:
        """The text of some thousand events at a time, each behind a comma; `of_sites` is by the order of `sites`."""
        texts = dict(zip(self.sites, of_sites, strict=True))
        for first in range(0, len(self._spans), BATCH):
            yield _joined(_span_events(self._spans[first : first + BATCH], self._board, texts, self._arrows.binds))
        yield _joined(self._board.closings(INT64))
        for events in (
            _device_events(self._owners, self._board, texts, self._arrows),
            self._arrows.events(self._board),
        ):
            while batch := list(islice(events, BATCH)):
                yield _joined(batch)

    def rows(self) -> list[Row]:
        """The lanes of threads and streams, once all is written."""
        return self._board.rows()


class NativeSlices:
    """The same, in C."""

    def __init__(self, slices: Any) -> None:
        self._slices = slices
        self.base_ns: int = slices.base_ns
        self.sites: Sequence[Site] = slices.sites
        self.left_out: int = slices.left_out

    def texts(self, of_sites: Sequence[SiteText]) -> Iterator[bytes]:
        self._slices.start(list(of_sites))
        while text := self._slices.next():
            yield text

    def rows(self) -> list[Row]:
        rows: list[Row] = self._slices.rows()
        return rows


def slices_of(spans: Sequence[Span], since_ns: int, pid: int) -> Slices | NativeSlices:
    """The slices of spans, in C where that can be: every span one of ours, which ends after it begins."""
    if _native is not None:
        found = _native.slices(spans, since_ns, pid, BATCH, _more_args, _text_of)
        if found is not None:
            return NativeSlices(found)
    return Slices(spans, since_ns, pid)


def _joined(events: Iterable[str]) -> str:
    return "".join([f",\n{event}" for event in events])


def _text_of(text: str) -> str:
    return encode(clean(text))


def _span_events(
    spans: Sequence[Span], board: Board, texts: Mapping[Site, SiteText], binds: Mapping[int, str]
) -> list[str]:
    """The slices of spans that come by start. This loop is the cost of writing: some two microseconds a span."""
    events: list[str] = []
    append, base_ns, moved = events.append, board.base_ns, board.moved
    firsts: dict[int, Lane] = {}
    for span in spans:
        start_ns, end_ns, site, thread_id = span.start_ns, span.end_ns, span.site, span.thread_id
        if span.task_id or site.kind == "request":
            _add_task_events(span, texts[site], board, binds, events)
            continue
        lane = firsts.get(thread_id) or firsts.setdefault(thread_id, board.first_lane(thread_id))
        ends = lane.ends
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if (ends and (ends[-1] < end_ns or len(ends) >= DEEPEST)) or (moved and span.parent_id in moved):
            lane = board.thread_lane(thread_id, start_ns, end_ns, span.parent_id)
            ends = lane.ends
            if lane.number > 1:
                moved[span.span_id] = lane
        del lane.open[len(ends) :]
        ids = _ids(span, lane.open[-1] if ends else None)
        ends.append(end_ns)
        lane.open.append(span)
        head, args, _, _ = texts[site]
        since_ns, total_ns = start_ns - base_ns, end_ns - start_ns
        append(
            f'{{"ph":"X"{lane.address}{head}{lane.mark}{args}{ids}{_more_args(span, total_ns)}}}'
            f',"ts":{since_ns // 1000}{MILLI[since_ns % 1000]},"dur":{total_ns // 1000}{MILLI[total_ns % 1000]}'
            f"{binds.get(span.span_id, '') if binds else ''}}}"
        )
    events += board.closings(spans[-1].start_ns)
    return events


def _add_task_events(span: Span, text: SiteText, board: Board, binds: Mapping[int, str], events: list[str]) -> None:
    """The async slice of a span. Its end is written when its lane is next used, so that ends come innermost first."""
    lane, thread = board.task_lane(span, events), board.first_lane(span.thread_id)
    if lane.number > 1:
        board.moved[span.span_id] = lane
    place = f"{thread.address}{lane.category}"
    ids = _ids(span, lane.innermost(), with_root=span.span_id == lane.opener)
    lane.ends.append(span.end_ns)
    lane.open.append(span)
    lane.closings.append(f'{{"ph":"e"{place}{lane.address},{board.time(span.end_ns)}}}')
    task = f',"task":{span.task_id}' if span.task_id and span.span_id == lane.opener else ""
    events.append(
        f'{{"ph":"b"{place}{text.name},"args":{{{thread.mark}{lane.mark}"kind":{text.kind},{text.args}{task}'
        f"{ids}{_more_args(span, span.total_ns)}}}{lane.address}"
        f",{board.time(span.start_ns)}{binds.get(span.span_id, '')}}}"
    )


def _ids(span: Span, around: Span | None, *, with_root: bool = True) -> str:
    """Who a span is and its own time. Left out is what readers know: parent and tree where the slice lies in that of
    its parent, which is the innermost `around` it, no parent where it lies in none, its tree where that is the parent
    or itself, or that of the first slice of an async lane, and all of its time."""
    parent_id, root, parent = span.parent_id, "", ""
    if around is None or around.span_id != parent_id or around.root_id != span.root_id:
        root = f',"root":{span.root_id}' if with_root and span.root_id != (parent_id or span.span_id) else ""
        parent = f',"parent":{parent_id}' if parent_id or around is not None else ""
    own = f',"self_ns":{span.self_ns}' if span.self_ns != span.end_ns - span.start_ns else ""
    return f'{root}{parent},"id":{span.span_id}{own}'


def _more_args(span: Span, total_ns: int) -> str:
    """The arguments that only some spans have, and none of them is usual."""
    if span.active_ns == total_ns and span.error is None and not (span.attributes or span.clipped or span.remote):
        return ""
    more: dict[str, Any] = {}
    if span.active_ns != total_ns:
        more["active_ns"] = span.active_ns
    if span.error is not None:
        more["error"] = safe(span.error)
    if span.clipped:
        more["clipped"] = True
    if span.remote is not None:
        trace_id, span_id = f"{span.remote.trace_id:032x}", f"{span.remote.span_id:016x}"
        remote = more["remote"] = {"trace_id": trace_id, "span_id": span_id, "flags": span.remote.flags}
        if span.remote.is_local:
            remote.update(is_local=True, in_server_span=span.remote.in_server_span)
    if span.attributes:
        more["attributes"] = safe(dict(span.attributes))
    return "," + encode(more)[1:-1]


def _device_events(
    owners: Sequence[Span], board: Board, texts: Mapping[Site, SiteText], arrows: Arrows
) -> Iterator[str]:
    """The device intervals of the spans. Only those that enclose no other have the argument `stream`, because
    HolisticTraceAnalysis takes what has it for a kernel and adds all kernels up."""
    found = [(interval, place, owner) for owner in owners for place, interval in enumerate(owner.device)]
    found.sort(key=lambda item: (item[0].start_ns, -item[0].end_ns))
    next_ns: dict[tuple[int, int], int] = {}
    keys = []
    for interval, _, _ in reversed(found):
        stream = interval.device, interval.stream
        keys.append("enclosing_stream" if next_ns.get(stream, INT64) < interval.end_ns else "stream")
        next_ns[stream] = interval.start_ns
    for (interval, place, owner), key in zip(found, reversed(keys), strict=True):
        lane = board.stream_lane(interval)
        lane.ends.append(interval.end_ns)
        bind = arrows.launch(owner, interval, lane.address)
        further = f',"place":{place}' if place else ""
        yield (
            f'{{"ph":"X"{lane.address}{texts[owner.site].name},"cat":"device","args":{{{lane.mark}'
            f'"device":{interval.device},"{key}":{interval.stream},"label":{_text_of(interval.label)}'
            f',"uncertainty_ns":{interval.uncertainty_ns}{further},"owner":{owner.span_id}}}'
            f',{board.time(interval.start_ns)},"dur":{microseconds(interval.end_ns - interval.start_ns)}{bind}}}'
        )
