"""Writes a trace in Perfetto's own format, for Perfetto's viewer and trace processor.

The slices, their names and their lanes are those of the Chrome trace (see `lanes`). Perfetto shows requests first, then
processes with their threads, other tasks, gauges and devices. Times are on the monotonic clock. A clock snapshot
relates them to the time of day.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from instrument.chrome.lanes import BATCH, BatchMarks, OrderedIntervals, ShownProcesses, Spans, iterate_rows
from instrument.chrome.writing import write_whole_file
from instrument.errors import InstrumentError
from instrument.recording.metric_definitions import GAUGES
from instrument.recording.spans import HOST, Sample, Site
from instrument.trace.columns import Int32s, Int64s
from instrument.trace.indices import NONE, invert_order, make_mask, number_combinations
from instrument.trace.text import INT64, is_json_number, make_json_value, remove_surrogates

if TYPE_CHECKING:
    from instrument.trace.trace import Trace

EXTRA = "instrument-sdk[perfetto]"

SEQUENCE = 1
"""The id of the file's only packet sequence. Packets of a sequence share interned names, so each name is written
once."""

PROCESS = 1
"""The uuid of the first process's track."""

REQUESTS = 2
"""The uuid of the parent track of requests. It has no process, so Perfetto shows it before all processes."""

FURTHER_THREADS, OTHER_TASKS, HOST_COUNTERS, DEVICES = range(4)
"""The order in which Perfetto shows further tracks below the threads of a process."""

LIMIT_PID = 1 << 31
"""The first number above all process and thread ids."""


def import_perfetto_messages() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as problem:
        raise InstrumentError(f"perfetto is not installed; install it with: pip install '{EXTRA}'") from problem
    return perfetto_trace_pb2


def write_perfetto(path: str | os.PathLike[str], trace: Trace) -> Path:
    """Write a trace in Perfetto's format, packed if the name ends in `.gz`. The file appears complete or not at all."""
    return write_whole_file(path, _Packets(import_perfetto_messages(), trace).iterate_parts())


class _Packets:
    """Makes the packets of a trace in Perfetto's format. Only some thousand packets are in memory at a time."""

    def __init__(self, pb: Any, facts: Trace) -> None:
        self._pb, self._facts, trace = pb, facts, facts.columns
        times = trace.start_ns, trace.device.start_ns, np.array([row.at_ns for row in facts.samples], dtype=np.int64)
        self._base_ns = min(0, *(int(starts.min(initial=0)) for starts in times))
        self._processes = ShownProcesses(facts)
        self._spans = Spans(trace, self._base_ns, self._processes)
        self._intervals = OrderedIntervals(self._spans, self._base_ns)
        self._arrows = _Arrows(self._spans, self._intervals, BatchMarks.make_batch_marks(self._spans))
        self._uuids = count(REQUESTS + 1)
        self._of_process = [PROCESS, *(next(self._uuids) for _ in self._processes.all[1:])]
        self._threads: dict[int, int] = {}
        self._devices: dict[int, int] = {}
        self._numbers: dict[str, dict[Any, int]] = {}
        self._errors = [remove_surrogates(error) for error in trace.errors]
        self._part = pb.Trace()
        self._needs_names = pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        self._begun = [self._make_begin_template(site) for site in self._spans.sites]
        self._on_device = [self._make_begin_template(site, on_device=True) for site in self._spans.sites]

    def iterate_parts(self) -> Iterator[bytes]:
        self._write_head()
        for _ in self._add_span_slices():
            yield from self._pop_full_part()
        for _ in self._add_interval_slices():
            yield from self._pop_full_part()
        for sample in self._facts.samples:
            if is_json_number(sample.value):
                self._add_counter(sample)
                yield from self._pop_full_part()
        yield self._part.SerializeToString()

    def _pop_full_part(self) -> Iterator[bytes]:
        if len(self._part.packet) >= BATCH:
            yield self._part.SerializeToString()
            self._part = self._pb.Trace()

    def _add_packet(self, **facts: Any) -> Any:
        return self._part.packet.add(trusted_packet_sequence_id=SEQUENCE, **facts)

    # ---------------------------------------------------------------- parts that occur once

    def _write_head(self) -> None:
        pb, origin = self._pb, self._facts.origin
        first = self._part.packet[0] if self._part.packet else self._add_packet()  # it has the names of sites
        first.sequence_flags = pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        first.trace_packet_defaults.timestamp_clock_id = pb.BUILTIN_CLOCK_MONOTONIC
        at_ns = max(origin.monotonic_ns - self._base_ns, 0)
        snapshot = self._add_packet().clock_snapshot
        snapshot.primary_trace_clock = pb.BUILTIN_CLOCK_MONOTONIC
        snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_MONOTONIC, timestamp=at_ns)
        if origin.realtime_ns > 0:
            snapshot.clocks.add(clock_id=pb.BUILTIN_CLOCK_REALTIME, timestamp=origin.realtime_ns)
        for uuid, process in zip(self._of_process, self._processes.all, strict=True):
            track, facts = self._add_packet().track_descriptor, process.facts
            track.uuid, track.process.pid, track.child_ordering = uuid, process.pid, pb.TrackDescriptor.EXPLICIT
            track.process.process_name = remove_surrogates(process.name)
            lost = [f"not kept: {number} ({reason})" for reason, number in facts.losses.items() if number]
            notes = [f"not observed: {note}" for note in facts.notes]
            labels = filter(None, (process.label, *lost, *notes, facts.died))
            track.process.process_labels.extend(map(remove_surrogates, labels))
        if self._spans.is_request.any():
            track = self._add_packet().track_descriptor
            track.uuid, track.name, track.child_ordering = REQUESTS, "requests", pb.TrackDescriptor.EXPLICIT

    def _intern_text(self, table: str, entry: Any, **facts: Any) -> int:
        """Return the number of an interned text. A new text is defined in the current packet."""
        numbers = self._numbers.setdefault(table, {})
        number = numbers.get(entry)
        if number is None:
            number = numbers[entry] = len(numbers) + 1
            packet = self._part.packet[-1] if self._part.packet else self._add_packet()
            getattr(packet.interned_data, table).add(iid=number, **(facts or {"name": entry}))
        return number

    def _make_begin_template(self, site: Site, *, on_device: bool = False) -> Any:
        is_layer = site.kind == "layer" and site.instance
        name, kind = (
            remove_surrogates(site.instance if is_layer else site.name),
            "device" if on_device else remove_surrogates(site.kind),
        )
        event = self._pb.TrackEvent(
            type=self._pb.TrackEvent.TYPE_SLICE_BEGIN,
            name_iid=self._intern_text("event_names", name),
            category_iids=[self._intern_text("event_categories", kind)],
        )
        if on_device:
            return event
        if site.function or site.file:
            source = {"file_name": remove_surrogates(site.file), "function_name": remove_surrogates(site.function)}
            line = max(site.line, 0) % (1 << 32)
            event.source_location_iid = self._intern_text(
                "source_locations", (*source.values(), line), **source, line_number=line
            )
        details = {"type": site.name} if is_layer else {"instance": site.instance} if site.instance else {}
        self._annotate(event, {**details, **dict(site.attributes)})
        return event

    # ---------------------------------------------------------------- tracks

    def _add_track(self, **facts: Any) -> int:
        uuid = next(self._uuids)
        self._add_packet().track_descriptor.MergeFrom(self._pb.TrackDescriptor(uuid=uuid, **facts))
        return uuid

    def _find_thread_track(self, thread_id: int) -> int:
        if thread_id not in self._threads:
            name, pid = self._find_thread_name(thread_id), self._processes.process_of_thread(thread_id).pid
            tid, parent = self._processes.original_thread_id_of(thread_id), self._find_process_track(thread_id)
            facts: dict[str, Any] = {"name": name}
            if pid and 0 < tid < LIMIT_PID:
                facts = {"thread": self._pb.ThreadDescriptor(pid=pid, tid=tid, thread_name=name)}
            self._threads[thread_id] = self._add_track(parent_uuid=parent, **facts)
        return self._threads[thread_id]

    def _find_process_track(self, thread_id: int) -> int:
        return self._of_process[self._processes.find_process_number(thread_id)]

    def _find_thread_name(self, thread_id: int) -> str:
        return remove_surrogates(self._processes.thread_name(thread_id))

    def _find_device_track(self, device: int) -> int:
        if device == HOST:
            return PROCESS
        if device not in self._devices:
            gpu = next((item for item in self._facts.gpus if item.device == device), None)
            about = " ".join(filter(None, (gpu.model, gpu.uuid))) if gpu else ""
            owners = [number for number, process in enumerate(self._facts.processes) if device in process.devices]
            self._devices[device] = self._add_track(
                parent_uuid=self._of_process[owners[0] if owners else 0],
                name=f"GPU {device}",
                description=remove_surrogates(about),
                sibling_order_rank=DEVICES + device % (LIMIT_PID >> 1),
            )
        return self._devices[device]

    def _add_counter(self, sample: Sample) -> None:
        counters = self._numbers.setdefault("counters", {})
        key = sample.name, sample.device
        if key not in counters:
            gauge = GAUGES.get(sample.name)
            unit = self._pb.CounterDescriptor(unit_name=gauge.unit if gauge else "")
            counters[key] = self._add_track(
                parent_uuid=self._find_device_track(sample.device),
                name=remove_surrogates(sample.name),
                counter=unit,
                sibling_order_rank=HOST_COUNTERS,
            )
        event = self._add_packet(timestamp=sample.at_ns - self._base_ns).track_event
        event.type, event.track_uuid = self._pb.TrackEvent.TYPE_COUNTER, counters[key]
        event.double_counter_value = sample.value

    # ---------------------------------------------------------------- slices

    def _add_span_slices(self) -> Iterator[None]:
        spans = self._spans
        trace, row = spans.trace, spans.row
        groups, number, around = spans.assign_lanes()
        has_any = make_mask(trace.attributes.rows(), len(trace))
        tracks, track = self._make_track_chooser(number), 0
        parent_id, root_id, total_ns = trace.parent_id[row], trace.root_id[row], trace.total_ns[row]
        active_ns, self_ns = trace.active_ns[row], trace.self_ns[row]
        numbers = [
            (name, *_convert_to_buffers(has, column))
            for name, has, column in (
                ("parent", parent_id != 0, parent_id),
                ("root", root_id != spans.span_id, root_id),
                ("task", spans.task_id != 0, spans.task_id),
                ("thread", spans.is_async, spans.thread_id),
                ("active_ns", active_ns != total_ns, active_ns),
                ("self_ns", self_ns != total_ns, self_ns),
                ("clipped", trace.clipped[row], trace.clipped[row]),
            )
        ]
        starts, ends, ids, sites, rows, is_target, errors, has_attributes = _convert_to_buffers(
            spans.start_ns, spans.end_ns, spans.span_id, spans.site, row, self._arrows.into_spans, trace.error, has_any
        )
        for place, is_begin, is_first in _iterate_begins_and_ends(*number_combinations(groups, number), around):
            if not is_begin:
                self._add_end(ends[place], track)
                yield
                continue
            track = tracks(place) if is_first else track
            span_row = rows[place]
            event = self._add_begin(starts[place], track, self._begun[sites[place]])
            facts: dict[str, Any] = {"id": ids[place]}
            facts |= {name: column[place] for name, has, column in numbers if has[place]}
            if errors[span_row] != NONE:
                facts["error"] = self._errors[errors[span_row]]
            if has_attributes[span_row]:
                facts |= {name: value for name, value in trace.attributes[span_row].items() if name not in facts}
            self._annotate(event, facts)
            event.flow_ids.extend(self._arrows.find_arrows_from(place))
            if is_target[place]:
                event.terminating_flow_ids.append(is_target[place])
            event.terminating_flow_ids.extend(self._arrows.into_batches.get(place, ()))
            yield

    def _make_track_chooser(self, number: Int64s) -> Any:
        spans, sites = self._spans, [remove_surrogates(site.name) for site in self._spans.sites]
        requests = spans.span_id[spans.is_request]
        of_requests = spans.is_request | np.isin(spans.trace.root_id[spans.row], requests)

        def choose_track(place: int) -> int:
            lane_number, thread_id = int(number[place]), int(spans.thread_id[place])
            further, process = f" ({lane_number})" if lane_number > 1 else "", self._find_process_track(thread_id)
            if spans.is_async[place]:
                name = f"{sites[spans.site[place]]}{further}"
                if of_requests[place]:
                    rank = int(not spans.is_request[place])
                    return self._add_track(parent_uuid=REQUESTS, name=name, sibling_order_rank=rank)
                return self._add_track(parent_uuid=process, name=name, sibling_order_rank=OTHER_TASKS)
            thread = self._find_thread_track(thread_id)
            if not further:
                return thread
            name = f"{self._find_thread_name(thread_id)}{further}"
            return self._add_track(parent_uuid=process, name=name, sibling_order_rank=FURTHER_THREADS)

        return choose_track

    def _add_interval_slices(self) -> Iterator[None]:
        spans, intervals = self._spans, self._intervals
        device, row = spans.trace.device, intervals.row
        groups, number, around = intervals.assign_lanes(device)
        labels, track = [remove_surrogates(label) for label in device.labels], 0
        for place, is_begin, is_first in _iterate_begins_and_ends(*number_combinations(groups, number), around):
            if not is_begin:
                self._add_end(int(intervals.end_ns[place]), track)
                yield
                continue
            at, owner = row[place], int(intervals.owner[place])
            if is_first:
                name = f"stream {device.stream[at]}" + (f" ({number[place]})" if number[place] > 1 else "")
                track = self._add_track(parent_uuid=self._find_device_track(int(device.device[at])), name=name)
            event = self._add_begin(int(intervals.start_ns[place]), track, self._on_device[spans.site[owner]])
            facts = {"label": labels[device.label[at]], "uncertainty_ns": int(device.uncertainty_ns[at])}
            self._annotate(event, {**facts, "owner": int(spans.span_id[owner])})
            if arrow := int(self._arrows.into_intervals[place]):
                event.terminating_flow_ids.append(arrow)
            yield

    def _add_begin(self, at_ns: int, track: int, common: Any) -> Any:
        event = self._add_packet(timestamp=at_ns, sequence_flags=self._needs_names).track_event
        event.MergeFrom(common)
        event.track_uuid = track
        return event

    def _add_end(self, at_ns: int, track: int) -> None:
        event = self._add_packet(timestamp=at_ns).track_event
        event.type, event.track_uuid = self._pb.TrackEvent.TYPE_SLICE_END, track

    def _annotate(self, event: Any, facts: Mapping[str, Any]) -> None:
        add = event.debug_annotations.add
        for name, value in facts.items():
            number = self._intern_text("debug_annotation_names", remove_surrogates(name))
            if type(value) is int and -INT64 <= value < INT64:
                add(name_iid=number, int_value=value)
            else:
                _set_annotation_value(add(name_iid=number), make_json_value(value, finite=False))


def _convert_to_buffers(*columns: NDArray[Any]) -> list[Any]:
    """Return columns as buffers, because a buffer returns a single number three times as fast as a numpy array."""
    return [np.ascontiguousarray(column).data for column in columns]


def _set_annotation_value(annotation: Any, value: Any) -> None:
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int) and -INT64 <= value < INT64:
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    elif isinstance(value, list):
        for item in value:
            _set_annotation_value(annotation.array_values.add(), item)
    elif isinstance(value, dict):
        for name, item in value.items():
            _set_annotation_value(annotation.dict_entries.add(name=name), item)
    else:
        annotation.string_value = "" if value is None else str(value)


def _iterate_begins_and_ends(lane: Int64s, firsts: Int64s, around: Int32s) -> Iterator[tuple[int, bool, bool]]:
    """Yield the begin and end events of slices, lane by lane, in the order of nesting.

    An event has the index of the slice and two booleans. The first marks a begin, and the second the first event of a
    lane.
    """
    is_first = make_mask(firsts, len(lane))
    order = np.argsort(lane, kind="stable")
    stack: list[int] = []
    for place, outer, opens in iterate_rows(order, around[order], is_first[order]):
        while stack and (opens or stack[-1] != outer):
            yield stack.pop(), False, False
        yield place, True, bool(opens)
        stack.append(place)
    while stack:
        yield stack.pop(), False, False


class _Arrows:
    """Arrows from spans to work on another thread, task or device, and from requests to their batches.

    Arrows have numbers from 1. An arrow to an earlier time is left out.
    """

    def __init__(self, spans: Spans, intervals: OrderedIntervals, marks: BatchMarks) -> None:
        called, callers = spans.find_cross_thread_calls()
        is_later = spans.start_ns[callers] < spans.start_ns[called]
        called, callers = called[is_later], callers[is_later]
        launched = np.flatnonzero(spans.start_ns[intervals.owner] <= intervals.start_ns)
        serves = spans.start_ns[marks.request] < spans.start_ns[marks.batch]
        sources = np.concatenate([callers, intervals.owner[launched], marks.request[serves]])
        order = np.argsort(sources, kind="stable")
        numbers = invert_order(order).astype(np.int64) + 1
        self._firsts = np.searchsorted(sources[order], np.arange(len(spans.row) + 1)) + 1
        self.into_spans = np.zeros(len(spans.row), dtype=np.int64)
        self.into_spans[called] = numbers[: len(called)]
        self.into_intervals = np.zeros(len(intervals.row), dtype=np.int64)
        of_batches = len(called) + len(launched)
        self.into_intervals[launched] = numbers[len(called) : of_batches]
        self.into_batches: dict[int, list[int]] = {}
        for place, number in zip(marks.batch[serves].tolist(), numbers[of_batches:].tolist(), strict=True):
            self.into_batches.setdefault(place, []).append(number)

    def find_arrows_from(self, place: int) -> range:
        return range(int(self._firsts[place]), int(self._firsts[place + 1]))
