"""The slices of spans as text: complete events, and the begins and ends of async ones.

What a lane and a site have in common is made into text once; so is what few spans have, for those alone. The order of
keys is the one that packs best: what many events share comes first, what differs comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from instrument.chrome.lanes import Board, lane_mark
from instrument.chrome.ordered import Spans
from instrument.trace.columns import Bools, Int32s, Int64s, Trace
from instrument.trace.forest import NONE
from instrument.trace.groups import by_first_sight, ranked
from instrument.trace.layout import attribute_texts
from instrument.trace.metadata import SiteText
from instrument.trace.text import MILLI, encode, safe


class Rare(NamedTuple):
    """What some spans have to say: their places, in order, and what makes the texts of some of these."""

    places: Int64s
    texts: Callable[[Int64s], Iterable[str]]


class SpanEvents:
    """The events of spans, which are asked for by their places.

    `kind` numbers the lane and site of each span, `addresses` are the texts of the lanes by that number.
    """

    def __init__(self, spans: Spans, board: Board, binds: Mapping[int, str], of_sites: Sequence[SiteText]) -> None:
        self._spans = spans
        tied = np.sort(np.array([*binds], dtype=np.int64))
        self._binds = [Rare(tied, lambda places: map(binds.__getitem__, places.tolist()))]
        groups, number, around = spans.lanes()
        slices = np.flatnonzero(spans.is_async)
        lanes, firsts = by_first_sight(groups[slices], number[slices])
        self._lane = np.zeros(len(groups), dtype=np.int64)  # the numbers of async lanes
        self._lane[slices] = lanes
        of_request = np.zeros(len(groups), dtype=np.bool_)
        of_request[slices] = spans.is_request[slices[firsts]][lanes]
        self._rare = self._rarities(around, slices[firsts])
        self._name_kinds(number, of_request, board, of_sites)
        self._board, self._of_request = board, of_request
        are_requests = spans.is_request[slices[firsts]].tolist()
        pid = board.processes.first.pid
        self._locals = [f'"id2":{{{_ids(lane, pid, its)}}},"ts":' for lane, its in enumerate(are_requests, 1)]
        thread = ranked(spans.thread_id[slices])[1]
        self._end_kind, some = by_first_sight(thread, of_request[slices], lanes)
        some = slices[some]
        columns = (spans.thread_id, of_request, self._lane)
        self._end_heads = [
            f',\n{{"ph":"e"{board.of_thread(thread_id).address}{_category(is_of_request)},{self._locals[lane]}'
            for thread_id, is_of_request, lane in zip(*(column[some].tolist() for column in columns), strict=True)
        ]
        # An end stands behind the begins before its time; those of one time come innermost first.
        before = np.maximum(np.searchsorted(spans.start_ns, spans.end_ns[slices]), slices + 1)
        order = np.lexsort((-slices, spans.end_ns[slices], before))
        self._end_kind, self._ended_ns, self._ended_before = (
            self._end_kind[order],
            spans.end_ns[slices][order],
            before[order],
        )

    def _rarities(self, around: Int32s, openers: Int64s) -> list[Rare]:
        """What spans have to say of themselves beside their ids, and what no reader knows.

        Known are parent and tree where the slice lies in that of its parent, which is the innermost `around` it, no
        parent where it lies in none, its tree where that is the parent or itself, the tree and task of an async lane by
        its first slice, and that all of its time is its own.
        """
        spans = self._spans
        trace, row = spans.trace, spans.row
        parent_id, root_id, total_ns = trace.parent_id[row], trace.root_id[row], trace.total_ns
        lies_in = around != NONE
        in_parent = (
            lies_in & (spans.span_id[around] == parent_id) & (root_id[around] == root_id) if len(row) else lies_in
        )
        other_tree = root_id != np.where(parent_id != 0, parent_id, spans.span_id)
        tells = ~spans.is_async
        tells[openers] = True
        errors = [f',"error":{encode(safe(error))}' for error in trace.errors]
        told = [
            self._numbers("root", ~in_parent & other_tree & tells, trace.root_id),
            self._numbers("parent", ~in_parent & (lies_in | (parent_id != 0)), trace.parent_id),
            self._numbers("own_id", trace.own_id[row] != spans.span_id, trace.own_id),
            self._numbers("task", tells & spans.is_async & (spans.task_id != 0), trace.task_id),
            self._numbers("self_ns", (trace.self_ns != total_ns)[row], trace.self_ns),
            self._numbers("active_ns", (trace.active_ns != total_ns)[row], trace.active_ns),
            Rare(
                np.flatnonzero(trace.error[row] != NONE),
                lambda places: map(errors.__getitem__, trace.error[row[places]].tolist()),
            ),
            Rare(np.flatnonzero(trace.clipped[row]), lambda places: repeat(',"clipped":true', len(places))),
            Rare(
                self._places(np.array([*trace.remote], dtype=np.int64)),
                lambda places: (_remote_text(trace, its) for its in row[places].tolist()),
            ),
            Rare(
                self._places(trace.attributes.rows()),
                lambda places: (f',"attributes":{text}' for text in attribute_texts(trace, row[places].tolist())),
            ),
        ]
        return [rare for rare in told if len(rare.places)]

    def _numbers(self, name: str, has: Bools, column: Int64s) -> Rare:
        row = self._spans.row
        return Rare(
            np.flatnonzero(has), lambda places: [f',"{name}":{number}' for number in column[row[places]].tolist()]
        )

    def _places(self, rows: Int64s) -> Int64s:
        return np.sort(self._spans.place_of[rows]).astype(np.int64)

    def _name_kinds(
        self, number: Int64s, of_request: Bools, board: Board, of_sites: Sequence[SiteText]
    ) -> None:  # fmt: skip
        """Make what the events of one lane and site share, up to their ids, and what the ends of async ones do."""
        spans = self._spans
        self.addresses: list[str] = []
        self._begins: list[str] = []
        thread = ranked(spans.thread_id)[1]
        self.kind, some = by_first_sight(spans.is_async, thread, number, of_request, spans.site)
        columns = (spans.is_async, spans.thread_id, number, of_request, spans.site)
        for is_async, thread_id, its_number, is_of_request, site in zip(
            *(column[some].tolist() for column in columns), strict=True
        ):
            its, lane = of_sites[site], board.of_thread(thread_id, 1 if is_async else its_number)
            self.addresses.append(lane.address)
            if is_async:
                head = f',\n{{"ph":"b"{lane.address}{_category(is_of_request)}{its.name},"args":{{{lane.mark}'
                self._begins.append(f'{head}{lane_mark(its_number)}"kind":{its.kind},{its.args},"id":')
            else:
                self._begins.append(f',\n{{"ph":"X"{lane.address}{its.head}{lane.mark}{its.args},"id":')

    # ---------------------------------------------------------------- texts

    def lane_text(self, place: int) -> str:
        """What puts an event on the lane of an async slice, up to its time."""
        address = self._board.of_thread(int(self._spans.thread_id[place])).address
        return f"{address}{_category(bool(self._of_request[place]))},{self._locals[self._lane[place]]}"

    def text(self, first: int, end: int) -> str:
        """The events from the begin of one span up to that of another, each behind a comma; or behind the last one."""
        is_async = self._spans.is_async[first:end]
        complete, begun = np.flatnonzero(~is_async) + first, np.flatnonzero(is_async) + first
        last = end + (end == len(self._spans.row))
        some = slice(*np.searchsorted(self._ended_before, [first, last]))
        more, binds = _filled(self._rare, first, end), _filled(self._binds, first, end)
        texts = self._complete(complete, _taken(more, complete - first), _taken(binds, complete - first))
        if len(begun) or some.start < some.stop:
            texts += self._begun(begun, _taken(more, begun - first), _taken(binds, begun - first))
            texts += self._ends(some)
            at = np.concatenate([2 * complete + 1, 2 * begun + 1, 2 * self._ended_before[some]])
            texts = _taken(texts, np.argsort(at, kind="stable"))
        return "".join(texts)

    def _complete(self, places: Int64s, more: Sequence[str], binds: Sequence[str]) -> list[str]:
        heads, spans = self._begins, self._spans
        us, ns = np.divmod(spans.start_ns[places], 1000)
        total_us, total_ns = np.divmod(spans.end_ns[places] - spans.start_ns[places], 1000)
        columns = (self.kind[places], spans.span_id[places], us, ns, total_us, total_ns)
        return [
            f'{heads[kind]}{span_id}{its}}},"ts":{at_us}{MILLI[at_ns]},"dur":{dur_us}{MILLI[dur_ns]}{bind}}}'
            for kind, span_id, at_us, at_ns, dur_us, dur_ns, its, bind in zip(
                *(column.tolist() for column in columns), more, binds, strict=True
            )
        ]

    def _begun(self, places: Int64s, more: Sequence[str], binds: Sequence[str]) -> list[str]:
        heads, lanes, spans = self._begins, self._locals, self._spans
        us, ns = np.divmod(spans.start_ns[places], 1000)
        columns = (self.kind[places], spans.span_id[places], self._lane[places], us, ns)
        return [
            f"{heads[kind]}{span_id}{its}}},{lanes[lane]}{at_us}{MILLI[at_ns]}{bind}}}"
            for kind, span_id, lane, at_us, at_ns, its, bind in zip(
                *(column.tolist() for column in columns), more, binds, strict=True
            )
        ]

    def _ends(self, some: slice) -> list[str]:
        heads = self._end_heads
        us, ns = np.divmod(self._ended_ns[some], 1000)
        columns = (self._end_kind[some], us, ns)
        return [
            f"{heads[kind]}{at_us}{MILLI[at_ns]}}}"
            for kind, at_us, at_ns in zip(*(column.tolist() for column in columns), strict=True)
        ]


def _filled(rarities: Sequence[Rare], first: int, end: int) -> list[str]:
    """What the spans from one to before another have to say; most nothing."""
    texts = [""] * (end - first)
    for rare in rarities:
        places = rare.places[slice(*np.searchsorted(rare.places, [first, end]))]
        for place, text in zip((places - first).tolist(), rare.texts(places), strict=True):
            texts[place] += text
    return texts


def _taken(texts: Sequence[str], places: Int64s) -> list[str]:
    return [*map(texts.__getitem__, places.tolist())]


def _ids(lane: int, pid: int, of_request: bool) -> str:
    """The ids of an async lane: one in its process, and that of a request one among all that a viewer has open."""
    return f'"local":"{lane:#x}"' + (f',"global":"{pid << 32 | lane:#x}"' if of_request else "")


def _category(of_request: bool) -> str:
    return f',"cat":"{"request" if of_request else "task"}"'


def _remote_text(trace: Trace, row: int) -> str:
    its = trace.remote[row]
    told = {"trace_id": f"{its.trace_id:032x}", "span_id": f"{its.span_id:016x}", "flags": its.flags}
    more = {"is_local": True, "in_server_span": its.in_server_span} if its.is_local else {}
    return f',"remote":{encode({**told, **more})}'
