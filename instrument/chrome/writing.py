"""Writes a trace as Chrome trace JSON: events for spans, device intervals, arrows and counters, and metadata."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from instrument.chrome.lanes import (
    BATCH,
    DEVICE_PIDS,
    Arrows,
    Board,
    OrderedIntervals,
    ShownProcesses,
    Spans,
    split_into_batches,
)
from instrument.chrome.slice_arguments import EXACT_US, Arguments, Remote
from instrument.errors import TraceError
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import HOST, Sample, Site
from instrument.recording.tally import Tally
from instrument.runtime import file_writing
from instrument.trace.columns import Bools, Int64s
from instrument.trace.indices import NONE, make_mask, number_by_first_occurrence, rank_distinct
from instrument.trace.intervals import are_innermost
from instrument.trace.metadata import Sites, encode_metadata
from instrument.trace.text import encode_rows, is_json_number, make_json_value, remove_surrogates
from instrument.trace.trace import Trace

# Events: fields that many events share come first, because this order compresses best


SPARE_BINDS = 1 << 63
"""A bit that is set in all our bind ids. The ids of `s` and `f` arrows do not have this bit."""


NOT = repeat(UNSET)
"""An endless sequence of `UNSET`, for a field that is missing in all events."""


class DrawnEvent(msgspec.Struct, gc=False):
    ph: str
    pid: int
    tid: int | UnsetType = UNSET
    cat: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    args: Any = UNSET
    bp: str | UnsetType = UNSET
    id: int | UnsetType = UNSET
    id2: Mapping[str, str] | UnsetType = UNSET
    ts: float | Decimal | UnsetType = UNSET
    dur: float | Decimal | UnsetType = UNSET
    bind_id: str | UnsetType = UNSET
    flow_out: bool | UnsetType = UNSET
    flow_in: bool | UnsetType = UNSET


def choose_shown_name(site: Site) -> str:
    return remove_surrogates(site.instance if site.kind == "layer" and site.instance else site.name)


def convert_to_us(times_ns: Int64s) -> list[Any]:
    """Convert nanoseconds to microseconds, exactly, with three decimals."""
    if not len(times_ns) or int(times_ns.max()) < EXACT_US * 1000:
        return (times_ns / 1000).tolist()  # type: ignore[no-any-return]
    return [Decimal(time_ns).scaleb(-3) for time_ns in times_ns.tolist()]


def _mask_values(has: Bools, values: NDArray[Any]) -> Iterable[Any]:
    if not has.any():
        return NOT
    objects = values.astype(object)
    objects[~has] = UNSET
    return objects.tolist()  # type: ignore[no-any-return]


def _split_columns(rows: Sequence[Sequence[Any]]) -> list[NDArray[Any]]:
    table = np.empty((len(rows), len(rows[0])), dtype=object) if rows else np.empty((0, 0), dtype=object)
    for number, row in enumerate(rows):
        table[number] = row
    return list(table.T)


class Drawing:
    """Makes the events of a trace: spans, device intervals, marks and arrows.

    `place_of` returns the index of a site in the metadata.
    """

    def __init__(
        self, spans: Spans, intervals: OrderedIntervals, board: Board, place_of: Callable[[Site], int]
    ) -> None:
        self._spans, self._intervals = spans, intervals
        self._arrows = Arrows(spans, intervals)
        self.left_out = self._arrows.left_out
        self._names = np.array([choose_shown_name(site) for site in spans.sites], dtype=object)
        groups, number, around = spans.assign_lanes()
        slices = np.flatnonzero(spans.is_async)
        lanes, firsts = number_by_first_occurrence(groups[slices], number[slices])
        openers = slices[firsts]
        self._lane = np.zeros(len(groups), dtype=np.int64)
        self._lane[slices] = lanes
        are_requests = spans.is_request[openers]
        first_pid = board.processes.all[0].pid
        # The ids of async lanes: a local one in the process, and a global one for a request.
        ids = [
            {"local": f"{lane:#x}", **({"global": f"{first_pid << 32 | lane:#x}"} if is_request else {})}
            for lane, is_request in enumerate(are_requests.tolist(), 1)
        ]
        self._ids = np.array([*ids, None], dtype=object)
        of_request = np.zeros(len(groups), dtype=np.bool_)
        of_request[slices] = are_requests[lanes]
        self._kind, self._shared = self._number_lanes_with_sites(number, of_request, board, place_of)
        self._facts = self._collect_span_facts(around, openers)
        self._has_attributes = make_mask(spans.trace.attributes.rows(), len(groups))
        # An end comes after the begins before its time. Ends at one time come innermost first.
        before = np.maximum(np.searchsorted(spans.start_ns, spans.end_ns[slices]), slices + 1)
        order = np.lexsort((-slices, spans.end_ns[slices], before))
        self._ended, self._ended_before = slices[order], before[order]
        self._number_streams_with_sites(board)

    def iterate_events(self) -> Iterator[list[DrawnEvent]]:
        for first, end in split_into_batches(len(self._spans.row)):
            yield self._make_span_events(first, end)
        for first, end in split_into_batches(len(self._intervals.row)):
            yield self._make_interval_events(slice(first, end))
        spans, intervals, arrows = self._spans, self._intervals, self._arrows
        kinds, streams = self._shared[:2], self._on_stream[:2]
        to = kinds, self._kind[arrows.called], spans.start_ns[arrows.called]
        yield from self._make_arrow_events("call", spans.parent[arrows.called], *to)
        to = streams, self._stream[arrows.launched], intervals.start_ns[arrows.launched]
        yield from self._make_arrow_events("ac2g", intervals.owner[arrows.launched], *to)
        yield from self._make_mark_events()

    # ---------------------------------------------------------------- spans

    def _number_lanes_with_sites(
        self, number: Int64s, of_request: Bools, board: Board, place_of: Callable[[Site], int]
    ) -> tuple[Int64s, list[NDArray[Any]]]:
        spans = self._spans
        thread = rank_distinct(spans.thread_id)[1]
        kind, examples = number_by_first_occurrence(spans.is_async, thread, number, of_request, spans.site)
        rows = []
        for place in examples.tolist():
            site, thread_id, lane = spans.sites[spans.site[place]], int(spans.thread_id[place]), int(number[place])
            is_async, site_kind = spans.is_async[place], remove_surrogates(site.kind)
            pid, tid = board.find_thread_lane(thread_id, 1 if is_async else lane)
            category = ("request" if of_request[place] else "task") if is_async else site_kind
            code = remove_surrogates(site.function) if site.function else UNSET
            marks = (
                UNSET if tid == thread_id else thread_id,
                lane if lane > 1 else UNSET,
                site_kind if is_async else UNSET,
            )
            rows.append((pid, tid, category, choose_shown_name(site), *marks, place_of(site), code))
        return kind, _split_columns(rows)

    def _collect_span_facts(self, around: NDArray[np.int32], openers: Int64s) -> list[tuple[Bools, Int64s]]:
        """Return a mask and a column for each event argument. The mask is False where readers can compute the
        number."""
        spans = self._spans
        trace, row = spans.trace, spans.row
        parent_id, root_id, total_ns = trace.parent_id[row], trace.root_id[row], trace.total_ns[row]
        own_id, self_ns, active_ns = trace.own_id[row], trace.self_ns[row], trace.active_ns[row]
        around_id, root_above = (
            np.where(above == NONE, otherwise, ids[above]) if len(row) else ids
            for above, otherwise, ids in (
                (around, 0, spans.span_id),
                (spans.parent, np.where(parent_id == 0, spans.span_id, parent_id), root_id),
            )
        )
        is_opener = make_mask(openers, len(row))
        return [
            (root_id != root_above, root_id),
            (parent_id != around_id, parent_id),
            (own_id != spans.span_id, own_id),
            (is_opener & (spans.task_id != 0), spans.task_id),
            (self_ns != total_ns, self_ns),
            (active_ns != total_ns, active_ns),
            (spans.is_async, spans.end_ns - spans.start_ns),
        ]

    def _make_arguments(self, some: slice, shared: Iterable[Iterable[Any]]) -> Iterator[Arguments]:
        spans, trace = self._spans, self._spans.trace
        row = spans.row[some]
        errors = np.array([*(remove_surrogates(error) for error in trace.errors), UNSET], dtype=object)
        numbers = [_mask_values(has[some], column[some]) for has, column in self._facts]
        attributes: list[Any] = [UNSET] * len(row)
        remote: Iterable[Any] = NOT
        if trace.remote:
            parents = map(trace.remote.get, row.tolist())
            remote = [UNSET if parent is None else Remote.make_remote(parent) for parent in parents]
        having = np.flatnonzero(self._has_attributes[row])
        texts = encode_rows(trace.attributes, row[having].tolist())
        for index, text in zip(having.tolist(), texts, strict=True):
            attributes[index] = msgspec.Raw(text.encode())
        return map(
            Arguments,
            *shared,
            spans.span_id[some].tolist(),
            *numbers,
            errors[trace.error[row]].tolist(),
            _mask_values(trace.clipped[row], trace.clipped[row]),
            remote,
            attributes,
        )

    def _make_span_events(self, first: int, end: int) -> list[DrawnEvent]:
        """Return the events in the time from the start of span `first` to the start of span `end`. For the last spans,
        these include all remaining ends."""
        spans, some = self._spans, slice(first, end)
        kind, is_async = self._kind[some], spans.is_async[some]
        pid, tid, category, name, *shared = (column[kind].tolist() for column in self._shared)
        lengths_us = np.array(convert_to_us(spans.end_ns[some] - spans.start_ns[some]), dtype=object)
        ids, at_us = _mask_values(is_async, self._ids[self._lane[some]]), convert_to_us(spans.start_ns[some])
        times = at_us, _mask_values(~is_async, lengths_us)
        fields = np.where(is_async, "b", "X").tolist(), pid, tid, category, name, self._make_arguments(some, shared)
        sources = self._arrows.binds[some]
        flows = self._make_flow_fields(sources, sources == np.arange(first, end))
        events = list(map(DrawnEvent, *fields, NOT, NOT, ids, *times, *flows))
        last = end + (end == len(spans.row))
        ends = slice(*np.searchsorted(self._ended_before, [first, last]))
        if ends.start == ends.stop:
            return events
        ended = self._ended[ends]
        pid, tid, category = (column[self._kind[ended]].tolist() for column in self._shared[:3])
        ids, at_us = self._ids[self._lane[ended]].tolist(), convert_to_us(spans.end_ns[ended])
        events += map(DrawnEvent, repeat("e"), pid, tid, category, NOT, NOT, NOT, NOT, ids, at_us)
        order = np.argsort(np.concatenate([2 * np.arange(first, end) + 1, 2 * self._ended_before[ends]]), kind="stable")
        return [events[at] for at in order.tolist()]

    def _make_flow_fields(self, sources: Int64s, are_sources: Bools) -> tuple[Iterable[Any], ...]:
        """Return the columns `bind_id`, `flow_out` and `flow_in` of slices. `sources` has the span where each slice's
        arrow begins, or `NONE`. `are_sources` is True for slices that are their own source."""
        are_bound = sources != NONE
        if not are_bound.any():
            return NOT, NOT, NOT
        binds = [UNSET if source == NONE else self._make_bind_id(source) for source in sources.tolist()]
        return binds, _mask_values(are_sources, are_bound), _mask_values(are_bound & ~are_sources, are_bound)

    def _make_bind_id(self, source: int) -> str:
        return f"{SPARE_BINDS | int(self._spans.span_id[source]):#x}"

    # ---------------------------------------------------------------- intervals, arrows and marks

    def _number_streams_with_sites(self, board: Board) -> None:
        """Number the distinct pairs of lane and site of the device intervals, and set the event fields of each pair.

        An interval that encloses other intervals has no field `stream`, because HolisticTraceAnalysis adds up all
        events with this field.
        """
        spans, intervals = self._spans, self._intervals
        work, row = spans.trace.device, intervals.row
        streams, number, _ = intervals.assign_lanes(work)
        self._encloses = ~are_innermost(streams, intervals.start_ns, intervals.end_ns)
        self._stream, some = number_by_first_occurrence(streams, number, spans.site[intervals.owner])
        facts = (work.device[row[some]], work.stream[row[some]], number[some], spans.site[intervals.owner[some]])
        rows = []
        for device, stream, lane, site in zip(*(column.tolist() for column in facts), strict=True):
            place = board.find_stream_lane(device, stream, lane)
            rows.append((*place, self._names[site], lane if lane > 1 else UNSET, device, stream))
        self._on_stream = _split_columns(rows)

    def _make_interval_events(self, some: slice) -> list[DrawnEvent]:
        spans, intervals = self._spans, self._intervals
        work, row, owner = spans.trace.device, intervals.row[some], intervals.owner[some]
        pid, tid, name, lane, device, stream = (column[self._stream[some]].tolist() for column in self._on_stream)
        labels = np.array([remove_surrogates(label) for label in work.labels], dtype=object)
        args = [
            Arguments(lane=lane, owner=owner, device=device, label=label, uncertainty_ns=uncertainty_ns,
                      place=place or UNSET, **{"enclosing_stream" if encloses else "stream": stream})
            for lane, owner, device, label, uncertainty_ns, place, encloses, stream in zip(
                lane, spans.span_id[owner].tolist(), device, labels[work.label[row]].tolist(),
                work.uncertainty_ns[row].tolist(), intervals.number[some].tolist(), self._encloses[some].tolist(),
                stream, strict=True,
            )
        ]  # fmt: skip
        begins, lengths = intervals.start_ns[some], intervals.end_ns[some] - intervals.start_ns[some]
        times, ties = (convert_to_us(begins), convert_to_us(lengths)), self._arrows.ties[some]
        fields = repeat("X"), pid, tid, repeat("device"), name, args
        flows = self._make_flow_fields(ties, np.zeros(len(ties), dtype=np.bool_))
        return list(map(DrawnEvent, *fields, NOT, NOT, NOT, *times, *flows))

    def _make_arrow_events(
        self, name: str, sources: NDArray[Any], lanes: Sequence[NDArray[Any]], to: Int64s, to_ns: Int64s
    ) -> Iterator[list[DrawnEvent]]:
        """Yield arrows as pairs of events. Viewers attach each end to the innermost slice at that time."""
        spans = self._spans
        begins = make_mask(number_by_first_occurrence(sources)[1], len(sources))
        for first, end in split_into_batches(len(sources)):
            source, targets = sources[first:end], to[first:end]
            events: list[DrawnEvent] = []
            columns = (
                begins[first:end], *(column[self._kind[source]] for column in self._shared[:2]), spans.span_id[source],
                *(column[targets] for column in lanes),
            )  # fmt: skip
            times = convert_to_us(spans.start_ns[source]), convert_to_us(to_ns[first:end])
            for is_first, pid, tid, span_id, to_pid, to_tid, from_us, to_us in zip(
                *(column.tolist() for column in columns), *times, strict=True
            ):
                if is_first:
                    events.append(DrawnEvent("s", pid, tid, name, name, id=span_id, ts=from_us))
                events.append(DrawnEvent("f", to_pid, to_tid, name, name, bp="e", id=span_id, ts=to_us))
            yield events

    def _make_mark_events(self) -> Iterator[list[DrawnEvent]]:
        spans, arrows = self._spans, self._arrows
        for first, end in split_into_batches(len(arrows.batch)):
            batch, request = arrows.batch[first:end], arrows.request[first:end]
            lanes = [column[self._kind[request]].tolist() for column in self._shared[:3]]
            names, ids = self._names[spans.site[batch]].tolist(), self._ids[self._lane[request]].tolist()
            args = [{"batch": span_id} for span_id in spans.span_id[batch].tolist()]
            at_us, binds = convert_to_us(spans.start_ns[batch]), map(self._make_bind_id, batch.tolist())
            bound = binds, NOT, repeat(True)
            yield list(map(DrawnEvent, repeat("n"), *lanes, names, args, NOT, NOT, ids, at_us, NOT, *bound))


ZLIB_LEVEL = 4
"""The level of gzip compression. Files are a tenth smaller than at level 3, in 1.25 times the time."""

NO_UNIT = "value"

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or record less"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a directory that this user may write to"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "give the name of a file"),
}
_encoder = msgspec.json.Encoder(decimal_format="number")


def dump(path: str | os.PathLike[str], trace: Trace, tally: Tally | None = None) -> Path:
    """Write a trace as Chrome JSON. The file is packed with gzip if the name ends in `.gz`.

    An older file is replaced, and missing folders are made. The file has mode 0600. On an error no file is written.
    Only a part of the text is in memory at a time. Raises `TraceError` if the file cannot be written.
    """
    return write_whole_file(path, _make_document_chunks(trace, tally))


def write_whole_file(path: str | os.PathLike[str], parts: Iterable[bytes]) -> Path:
    """Write a file from parts. It is packed with gzip if the name ends in `.gz`. On an error no file is written."""
    target = Path(path)
    try:
        with file_writing.open_replacement(target) as file:
            packer = file_writing.compressor(ZLIB_LEVEL) if target.suffix == ".gz" else None
            for data in parts:
                file.write(packer.compress(data) if packer else data)
            if packer:
                file.write(packer.flush())
    except OSError as problem:
        advice = _ADVICE.get(problem.errno or 0, "give a path that can be written")
        raise TraceError(f"cannot write the trace {target}: {problem.strerror or problem}; {advice}") from problem
    return target


def _make_document_chunks(trace: Trace, tally: Tally | None) -> Iterator[bytes]:
    columns, processes = trace.columns, ShownProcesses(trace)
    since_ns = min([trace.start_ns, *(sample.at_ns for sample in trace.samples)])
    base_ns = min(int(starts.min(initial=since_ns)) for starts in (columns.start_ns, columns.device.start_ns))
    spans, board = Spans(columns, base_ns, processes), Board(processes)
    sites = Sites(spans.sites)
    drawing = Drawing(spans, OrderedIntervals(spans, base_ns), board, sites.find_or_add_index)
    yield b'{"displayTimeUnit":"ms","instrument":'
    for text in encode_metadata(trace, base_ns, sites, tally, drawing.left_out):
        yield text.encode(errors="replace")
    yield b',"traceEvents":['
    process_names = (_make_process_names(process.pid, process.name, 0, process.label) for process in processes.all)
    counted: set[int] = set()
    names = _make_lane_names(board, counted, trace, spans.find_batch_threads())
    last_events = chain(_make_counters(trace.samples, base_ns, processes.all[0].pid, counted), names)
    last_batches = iter(lambda: list(islice(last_events, BATCH)), [])
    separator = b"\n"
    for events in chain(
        [list(chain.from_iterable(process_names))], filter(None, drawing.iterate_events()), last_batches
    ):
        yield separator + _encoder.encode_lines(events).replace(b"\n", b",\n")[:-2]
        separator = b",\n"
    yield b"\n]}\n"


def _make_counters(samples: Iterable[Sample], base_ns: int, pid: int, counted: set[int]) -> Iterator[DrawnEvent]:
    """Yield a counter event for each sample with a number. The argument's name is the unit, which viewers show."""
    for sample in samples:
        if is_json_number(sample.value):
            process_id = pid if sample.device == HOST else DEVICE_PIDS + sample.device % DEVICE_PIDS
            counted.add(process_id)
            unit = GAUGES[sample.name].unit if sample.name in GAUGES else NO_UNIT
            args = {unit: sample.value}
            yield DrawnEvent(
                "C", process_id, name=remove_surrogates(sample.name), args=args, ts=(sample.at_ns - base_ns) / 1000
            )


# Names


def _make_lane_names(board: Board, counted: set[int], trace: Trace, of_batches: set[int]) -> Iterator[DrawnEvent]:
    order = sorted(trace.threads, key=lambda thread_id: thread_id not in of_batches)
    rank_by_id = {thread_id: position for position, thread_id in enumerate(order)}
    gpus = {DEVICE_PIDS + gpu.device % DEVICE_PIDS: gpu for gpu in trace.gpus}
    positions = count()
    hosts = {process.pid for process in board.processes.all}
    rows = sorted(board.tids, key=lambda row: (row[0], rank_by_id.get(row[1], len(rank_by_id)), row[1]))
    named_pids = set(hosts)
    for pid, known_id in chain(((pid, 0) for pid in sorted(counted - named_pids)), rows):
        if pid not in named_pids:
            named_pids.add(pid)
            gpu = gpus.get(pid)
            label = " ".join(filter(None, (gpu.model, gpu.uuid))) if gpu is not None else ""
            yield from _make_process_names(pid, f"GPU {pid - DEVICE_PIDS}", 1 + pid - DEVICE_PIDS, label)
        name = board.processes.thread_name(known_id) if pid in hosts else f"stream {known_id}"
        for number, tid in enumerate(board.tids.get((pid, known_id), ()), 1):
            yield _make_name_event("thread_name", name if number == 1 else f"{name} ({number})", pid, tid)
            yield _make_name_event("thread_sort_index", next(positions), pid, tid)


def _make_process_names(pid: int, name: str, position: int, label: str = "") -> Iterator[DrawnEvent]:
    yield _make_name_event("process_name", name, pid)
    yield _make_name_event("process_sort_index", position, pid)
    if label:
        yield _make_name_event("process_labels", label, pid)


def _make_name_event(
    event_name: str, value: str | int, pid: int, tid: int | msgspec.UnsetType = msgspec.UNSET
) -> DrawnEvent:
    key = "sort_index" if isinstance(value, int) else "labels" if event_name == "process_labels" else "name"
    return DrawnEvent("M", pid, tid, name=event_name, args={key: make_json_value(value)})
