"""Reading what `dump` wrote: events into columns, with the ids and times that they leave out because readers know."""

from __future__ import annotations

import json
from array import array
from operator import add
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from instrument.chrome.events import NO_ARGUMENTS, Int64, TraceEvent, times_ns
from instrument.chrome.lanes import DEVICE_PIDS
from instrument.recording import spans
from instrument.recording.remote_parents import RemoteParent
from instrument.recording.spans import HOST, Sample
from instrument.trace import columns
from instrument.trace.columns import DeviceIntervals, Int32s
from instrument.trace.forest import NONE, rows_of
from instrument.trace.gathering import GatheredAttributes, column, rank_of, written
from instrument.trace.metadata import Metadata, attribute
from instrument.trace.text import LIMIT_SPANS, LONGEST_PLAIN, checked, end_of, index, nanoseconds, whole


class _Remote(msgspec.Struct):
    """The parent of a span in another process."""

    trace_id: str
    span_id: str
    flags: Int64
    is_local: bool = False
    in_server_span: bool = False


class _Arguments(msgspec.Struct, gc=False):
    """What a slice says of itself: that of a span, or with `owner` that of one of a span's device intervals."""

    id: Int64 | UnsetType = UNSET
    site: Int64 | UnsetType = UNSET
    parent: Int64 | UnsetType = UNSET
    root: Int64 | UnsetType = UNSET
    thread: Int64 | UnsetType = UNSET
    own_id: Int64 | UnsetType = UNSET
    task: Int64 | UnsetType = UNSET
    active_ns: Int64 | UnsetType = UNSET
    self_ns: Int64 | UnsetType = UNSET
    error: str | None = None
    clipped: bool = False
    attributes: msgspec.Raw = NO_ARGUMENTS
    remote: _Remote | None = None
    owner: Int64 | UnsetType = UNSET
    device: Int64 | UnsetType = UNSET
    stream: Int64 | UnsetType = UNSET
    enclosing_stream: Int64 | UnsetType = UNSET
    label: str = "exclusive"
    uncertainty_ns: Int64 = 0
    place: Int64 = 0


_decode_arguments = msgspec.json.Decoder(list[_Arguments]).decode


class _Async:
    """An async lane: the id, tree and task of its first span, and its open spans, innermost last: the row of each, and
    whether it was active all the time and whether all of that was its own."""

    __slots__ = ("open", "opener", "root_id", "task_id")

    def __init__(self, opener: int, root_id: int, task_id: int) -> None:
        self.opener, self.root_id, self.task_id = opener, root_id, task_id
        self.open: list[tuple[int, bool, bool]] = []


_Slice = tuple[TraceEvent, _Arguments, int, int]
"""An event with what it says of itself, and its begin and length."""

NEAREST_NS = 1 << 62
"""Times beyond are none, so that the sum of two is a number of 64 bits."""


class Own:
    """Reads the events of what `dump` wrote. A slice that names no parent has the one around it."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        if not -NEAREST_NS < metadata.base_ns < NEAREST_NS:
            raise ValueError("it has a time that no clock reads; it is damaged")
        self._numbers = {name: array("q") for name in _NUMBERS}
        self._errors: dict[str | None, int] = {None: NONE}
        self._clipped: list[int] = []
        self._remote: dict[int, RemoteParent] = {}
        self._attributes = GatheredAttributes(_refuse_attributes)
        self._samples: list[Sample] = []
        self._intervals = {name: array("q") for name in _OF_INTERVALS}
        self._labels: dict[str, int] = {}
        self._marks = 0
        self._async: dict[str, _Async] = {}
        # The slices of each lane of a thread in which those that come next may lie: end, id and tree.
        self._around: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}

    @property
    def taken(self) -> int:
        return len(self._numbers["span_id"]) + len(self._samples) + len(self._intervals["owner"]) + self._marks

    def add(self, events: list[TraceEvent]) -> None:
        """Read events, which come after those that have been read."""
        timed = [event for event in events if event.ph in _TIMED]
        start_ns = times_ns([event.ts for event in timed], NEAREST_NS) + self.metadata.base_ns
        total_ns = times_ns([0 if event.ph != "X" else event.dur for event in timed], NEAREST_NS)
        told = _decode_arguments(b"[%b]" % b",".join([event.args for event in timed]))
        slices = list(zip(timed, told, start_ns.tolist(), total_ns.tolist(), strict=True))
        self._add_spans([one for one in slices if one[1].owner is UNSET])
        self._add_intervals([one for one in slices if one[1].owner is not UNSET and one[0].ph != "e"])
        for event in events:
            if event.ph == "C":
                self._add_sample(event)
            self._marks += event.ph == "n"  # of a batch on the lane of a request, which keys say, too
        for what, count in (
            ("spans", len(self._numbers["span_id"])),
            ("device intervals", len(self._intervals["owner"])),
            ("samples", len(self._samples)),
        ):
            if count > LIMIT_SPANS:
                raise ValueError(f"it has more than {LIMIT_SPANS} {what}; record less into one file")

    def _add_intervals(self, slices: list[_Slice]) -> None:
        told = [args for _, args, _, _ in slices]
        start_ns = [start for _, _, start, _ in slices]
        total_ns = [total for _, _, _, total in slices]
        if min(total_ns, default=0) < 0:
            raise ValueError("a slice in it ends before it starts; it is damaged")
        labels = self._labels
        its: tuple[list[Any], ...] = (
            [args.owner for args in told],
            [args.place for args in told],
            [args.device for args in told],
            [args.enclosing_stream if args.stream is UNSET else args.stream for args in told],
            start_ns,
            list(map(add, start_ns, total_ns)),
            [labels.setdefault(args.label, len(labels)) for args in told],
            [args.uncertainty_ns for args in told],
        )
        index(min(its[1], default=0))
        for name, numbers in zip(_OF_INTERVALS, its, strict=True):
            self._intervals[name].extend(numbers)

    def _add_spans(self, slices: list[_Slice]) -> None:
        """Spans, and the ends of those that are async, which have an event of their own.

        What follows from the slices around one is found here, one by one; all else is taken as columns.
        """
        first = len(self._numbers["span_id"])
        spans: list[_Slice] = []
        parents, roots, tasks, totals = list[int](), list[Any](), list[Any](), list[int]()
        ends: list[tuple[int, int, bool, bool]] = []
        around = self._around
        for one in slices:
            event, args, start_ns, total_ns = one
            phase = event.ph
            if phase == "e":
                lane = self._async.get(_local(event))
                if lane is not None and lane.open:
                    row, is_active, is_self = lane.open.pop()
                    ends.append((row, start_ns, is_active, is_self))
                continue
            span_id: Any = args.id
            parent_id = 0 if args.parent is UNSET else args.parent
            root_id, task_id, lane = parent_id or span_id, 0, None
            is_open = phase == "b"
            if is_open:
                total_ns = 0
                lane = self._async.get(_local(event))
                if lane is not None and lane.opener != span_id:
                    root_id, task_id = lane.root_id, lane.task_id
                    if args.parent is UNSET and lane.open:
                        above = lane.open[-1][0] - first
                        its = spans[above][1].id if above >= 0 else self._numbers["span_id"][above + first]
                        parent_id = checked(its, int)
            else:
                lane_of: Any = event.pid, event.tid
                stack = around.get(lane_of) or around.setdefault(tuple(whole(lane_of)), [])
                while stack and stack[-1][0] <= start_ns:
                    stack.pop()
                if stack and args.parent is UNSET:
                    _, parent_id, root_id = stack[-1]
            if args.root is not UNSET:
                root_id = args.root
            if is_open:
                task_id = task_id if args.task is UNSET else args.task
                if lane is None or lane.opener == span_id:
                    lane = self._async[_local(event)] = _Async(span_id, root_id, task_id)
                lane.open.append((first + len(spans), args.active_ns is UNSET, args.self_ns is UNSET))
            else:
                stack.append((start_ns + total_ns, span_id, root_id))
            spans.append(one)
            parents.append(parent_id)
            roots.append(root_id)
            tasks.append(task_id)
            totals.append(total_ns)
        if min(totals, default=0) < 0:
            raise ValueError("a slice in it ends before it starts; it is damaged")
        self._add_columns(first, spans, parents, roots, tasks, totals)
        for row, end_ns, is_active, is_self in ends:
            self._end_span(row, end_ns, is_active, is_self)

    def _add_columns(
        self, first: int, spans: list[_Slice], parents: list[int], roots: list[int], tasks: list[int], totals: list[int]
    ) -> None:
        facts = [args for _, args, _, _ in spans]
        start_ns = [start for _, _, start, _ in spans]
        errors = self._errors
        its: tuple[list[Any], ...] = (
            [args.id for args in facts],
            parents,
            roots,
            [event.tid if args.thread is UNSET else args.thread for event, args, _, _ in spans],
            [task if args.task is UNSET else args.task for args, task in zip(facts, tasks, strict=True)],
            start_ns,
            list(map(add, start_ns, totals)),
            [total if args.active_ns is UNSET else args.active_ns for args, total in zip(facts, totals, strict=True)],
            [total if args.self_ns is UNSET else args.self_ns for args, total in zip(facts, totals, strict=True)],
            [args.site for args in facts],
            [NONE if args.error is None else errors.setdefault(args.error, len(errors) - 1) for args in facts],
            [args.id if args.own_id is UNSET else args.own_id for args in facts],
        )
        for name, numbers in zip(_NUMBERS, its, strict=True):
            self._numbers[name].extend(numbers)
        for row, args in enumerate(facts, first):
            if args.clipped:
                self._clipped.append(row)
            if args.attributes is not NO_ARGUMENTS:
                text = bytes(args.attributes)
                self._attributes.add(row, written(json.loads(text)) if b"\\" in text else text)
            if args.remote is not None:
                self._remote[row] = _remote(args.remote)

    def _end_span(self, row: int, end_ns: int, is_active: bool, is_self: bool) -> None:
        start_ns = self._numbers["start_ns"][row]
        self._numbers["end_ns"][row] = end_of(start_ns, end_ns)
        if is_active:
            self._numbers["active_ns"][row] = end_ns - start_ns
        if is_self:
            self._numbers["self_ns"][row] = end_ns - start_ns

    def _add_sample(self, event: TraceEvent) -> None:
        pid = checked(event.pid, int)
        (value,) = json.loads(bytes(event.args)).values()
        self._samples.append(
            Sample(
                name=checked(event.name, str),
                device=pid - DEVICE_PIDS if pid >= DEVICE_PIDS else HOST,
                at_ns=self.metadata.base_ns + nanoseconds(event.ts),
                value=checked(value, float, int),
            )
        )

    def trace(self) -> tuple[columns.Trace, spans.Trace]:
        """The spans as columns, by begin, and all else as a trace without spans."""
        if any(lane.open for lane in self._async.values()):
            raise ValueError("an async slice in it never ends; write or copy it again")
        numbers = {name: column(self._numbers.pop(name)) for name in _NUMBERS}
        order = np.lexsort((numbers["span_id"], -numbers["end_ns"], numbers["start_ns"]))
        rank = rank_of(order)
        clipped = np.zeros(len(order), dtype=np.bool_)
        clipped[rank[self._clipped]] = True
        for name in _NUMBERS:
            numbers[name] = numbers[name][order]
        sites = tuple(self.metadata.sites)
        site, error = (numbers.pop(name).astype(np.int32) for name in ("site", "error"))
        found = columns.Trace(
            sites=sites,
            errors=tuple(error for error in self._errors if error is not None),
            **numbers,
            site=site,
            error=error,
            clipped=clipped,
            device=self._device(numbers["span_id"]),
            attributes=self._attributes.packed(rank),
            remote={int(rank[row]): remote for row, remote in self._remote.items()},
        )
        return found, self.metadata.trace([], self._samples)

    def _device(self, span_id: columns.Int64s) -> DeviceIntervals:
        """The intervals of each span by their places; those of spans that are not there are left out."""
        its = {name: column(self._intervals.pop(name)) for name in _OF_INTERVALS}
        rows: Int32s = rows_of(span_id, its.pop("owner"))
        place = its.pop("place")
        order = np.lexsort((place, rows))
        order = order[rows[order] != NONE]
        kept = {name: numbers[order] for name, numbers in its.items()}
        label = kept.pop("label").astype(np.int32)
        return DeviceIntervals(row=rows[order], **kept, label=label, labels=tuple(self._labels))


_TIMED = frozenset(("X", "b", "e"))
_NUMBERS = (
    "span_id", "parent_id", "root_id", "thread_id", "task_id", "start_ns", "end_ns", "active_ns", "self_ns", "site",
    "error", "own_id",
)  # fmt: skip
_OF_INTERVALS = ("owner", "place", "device", "stream", "start_ns", "end_ns", "label", "uncertainty_ns")


def _local(event: TraceEvent) -> str:
    """What the events of an async lane share."""
    local: str = checked(event.id2["local"], str)
    return local


_PLAIN = bytes(set(range(0x20, 0x7F)) - {*b"[{"})
"""What may stand in JSON that is an object of texts and numbers alone, but for the brace that it begins with."""


def _refuse_attributes(text: bytes) -> None:
    # It has been read as JSON once: of what is plain and has no number too long for Python nothing is to be refused.
    if text.startswith(b"{") and len(text) < LONGEST_PLAIN and text.translate(None, _PLAIN) == b"{":
        return
    for value in checked(json.loads(text), dict).values():
        attribute(value)


def _remote(found: _Remote) -> RemoteParent:
    trace_id, span_id = int(found.trace_id, 16), int(found.span_id, 16)
    return RemoteParent(trace_id, span_id, found.flags, found.is_local, found.in_server_span)
