"""Converts the rows of a dataset into recordings, one per process, as if each process had saved a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from instrument.recording.remote_parents import LINK, RemoteParent
from instrument.recording.spans import AttributeValue, Gpu, Origin, Sample
from instrument.trace.columns import AttributesOfRows, Columns, DeviceIntervals, Int64s
from instrument.trace.dataset import ATTRIBUTES, SpanKeys, UInt64s, pyarrow, schema
from instrument.trace.file import Saved
from instrument.trace.forest import NONE, count_ancestors, rows_of, topmost_rows
from instrument.trace.layout import convert_lists
from instrument.trace.metadata import read_site
from instrument.trace.trace import SpanViews, Trace


class ReadProcess(NamedTuple):
    """The recording of a process, and the ids of its spans by number from 1."""

    saved: Saved
    ids: SpanKeys


def processes_in(tables: Mapping[str, Any]) -> list[ReadProcess]:
    """Return the recordings of all processes in tables of a dataset, in the order of their first begin.

    `tables` must have `spans`, and may have `intervals`, `gauges`, `losses` and `processes`. The order of rows and the
    type of ids do not matter. The caller selects the rows, such as those of one run.
    """
    arrow = {name: _convert_types(name, table) for name, table in tables.items()}
    spans = arrow["spans"].sort_by([("start_unix_ns", "ascending"), ("duration_ns", "descending")])
    by_process = {name: dict(_split_by_process(table)) for name, table in {**arrow, "spans": spans}.items()}
    everywhere = np.unique(_read_ids(spans.column("span_id"))[:, 0])
    return [
        _read_recording(rows, {name: parts.get(process) for name, parts in by_process.items()}, everywhere)
        for process, rows in by_process["spans"].items()
    ]


def _convert_types(name: str, table: Any) -> Any:
    """Return a table with the columns and types of the definition. A missing column becomes NULLs."""
    arrow, types = pyarrow(), schema(name)
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else arrow.nulls(len(table), field.type)
        for field in types
    ]
    return arrow.Table.from_arrays(columns, schema=types).combine_chunks()


def _split_by_process(table: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the rows of each process."""
    names = table.column("process").to_pylist()
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    for name, some in places.items():
        yield name, table if len(some) == len(names) else table.take(some)


def _read_ids(column: Any) -> UInt64s:
    """Return ids as one or two 64-bit numbers per row, 0 for NULL."""
    array = column.combine_chunks()
    width = array.type.byte_width
    numbers = np.frombuffer(array.buffers()[1] or b"", ">u8", len(array) * width // 8, array.offset * width)
    numbers = numbers.reshape(-1, width // 8).astype(np.uint64)
    numbers[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return numbers


def _read_ints(table: Any, name: str) -> Int64s:
    return np.asarray(table.column(name).fill_null(0).to_numpy(), dtype=np.int64)


def _set_offset(table: Any, offset_ns: int) -> Any:
    """Return rows of a process with one offset between its clocks, because the wall clock may have been set."""
    starts = _read_ints(table, "start_unix_ns") - _read_ints(table, "clock_offset_ns") + offset_ns
    return table.set_column(table.schema.get_field_index("start_unix_ns"), "start_unix_ns", pyarrow().array(starts))


def _read_recording(spans: Any, tables: Mapping[str, Any], everywhere: UInt64s) -> ReadProcess:
    offset_ns = int(_read_ints(spans, "clock_offset_ns")[_read_ints(spans, "start_unix_ns").argmax()])
    spans = _set_offset(spans, offset_ns)
    tables = {name: _set_offset(table, offset_ns) for name, table in tables.items() if table is not None}
    trace_id, span, above, root = (
        _read_ids(spans.column(name)) for name in ("trace_id", "span_id", "parent_span_id", "root_span_id")
    )
    ids = SpanKeys(trace_id[:, 0], trace_id[:, 1], span[:, 0], above[:, 0], root[:, 0])
    order, columns = _sort_rows(spans, ids, everywhere)
    spans, ids = spans.take(order), SpanKeys(*(column[order] for column in ids))
    starts = _read_ints(spans, "start_unix_ns") - offset_ns
    durations = _read_ints(spans, "duration_ns")
    sites, site = _number_values(spans.column("site"))
    errors, error = _number_values(spans.column("error"))
    places = tuple(read_site(json.loads(text)) for text in sites)
    is_root = (columns["span_id"] == columns["root_id"]) & (ids.span == ids.root)
    remote = {
        row: RemoteParent(int(ids.high[row]) << 64 | int(ids.low[row]), int(ids.parent[row]))
        for row in np.flatnonzero(is_root & (ids.parent != 0)).tolist()
    }
    trace = Columns(
        sites=places,
        errors=tuple(errors),
        **columns,
        thread_id=_read_ints(spans, "thread_id"),
        task_id=_read_ints(spans, "task_id"),
        start_ns=starts,
        end_ns=starts + durations,
        active_ns=durations - _read_ints(spans, "waiting_ns"),
        self_ns=durations - _read_ints(spans, "children_ns"),
        site=site,
        error=error,
        clipped=spans.column("clipped").fill_null(False).to_numpy().astype(np.bool_),
        device=_read_intervals(tables.get("intervals"), ids, offset_ns),
        attributes=AttributesOfRows(
            dict(_read_attributes(spans, [dict(place.attributes) for place in places], site, ids))
        ),
        remote=remote,
    )
    names = zip(spans.column("thread_id").to_pylist(), spans.column("thread").to_pylist(), strict=True)
    threads = {thread: name for thread, name in names if name}
    facts = _read_facts(spans.slice(0, 1).to_pylist()[0], trace, offset_ns, tables)
    facts.threads = threads
    return ReadProcess(Saved(facts, None), ids)


def _sort_rows(spans: Any, ids: SpanKeys, everywhere: UInt64s) -> tuple[Int64s, dict[str, Int64s]]:
    """Return the order of rows by begin, the outer ones first, and in it the numbers of spans, parents and roots.

    A parent or root in another process becomes 0, because the process did not know it. A parent or root that no process
    has gets an unused number.
    """
    count = len(ids.span)
    by_id = np.argsort(ids.span, kind="stable")

    def row_of(span: UInt64s) -> Int64s:
        places = np.searchsorted(ids.span, span, sorter=by_id).clip(max=count - 1)
        rows = by_id[places]
        return np.where(ids.span[rows] == span, rows, NONE)

    parent, root = row_of(ids.parent), row_of(ids.root)
    level = count_ancestors(parent.astype(np.int32))
    starts, ends = _read_ints(spans, "start_unix_ns"), _read_ints(spans, "duration_ns")
    order = np.lexsort((level, -ends, starts))
    number = np.empty(count + 1, dtype=np.int64)
    number[order], number[-1] = np.arange(1, count + 1), 0
    absent, places = np.unique(np.concatenate([ids.parent, ids.root]), return_inverse=True)
    absent_number = count + 1 + places.reshape(2, -1)
    is_elsewhere = np.isin(absent, everywhere)[places].reshape(2, -1)
    is_top = (ids.span == ids.root) | (ids.parent == 0)
    parent_id = np.where(parent != NONE, number[parent], np.where(is_top | is_elsewhere[0], 0, absent_number[0]))
    top = topmost_rows(parent.astype(np.int32))
    root_id = np.where(root != NONE, number[root], np.where(is_elsewhere[1], number[top], absent_number[1]))
    return order, {"span_id": number[order], "parent_id": parent_id[order], "root_id": root_id[order]}


def _number_values(column: Any) -> tuple[list[Any], Any]:
    """Return the distinct values of a column, and the index of each row's value, `NONE` for NULL."""
    encoded = column.combine_chunks().dictionary_encode()
    indices = encoded.indices.fill_null(NONE).to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), indices.astype(np.int32)


def _read_attributes(
    spans: Any, of_sites: list[dict[str, Any]], site: Any, ids: SpanKeys
) -> Iterator[tuple[int, dict[str, AttributeValue]]]:
    """Yield each row that has other attributes than its site, with these attributes."""
    attributes_by_row: dict[int, dict[str, AttributeValue]] = {}
    for name in ATTRIBUTES:
        column = spans.column(name).combine_chunks()
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        for row, items in zip(rows.tolist(), column.take(rows).to_pylist(), strict=True):
            static = of_sites[site[row]]
            for key, value in items:
                stored = convert_lists(json.loads(value)) if name == "attributes_json" else value
                if key not in static or static[key] != stored:
                    attributes_by_row.setdefault(row, {})[key] = stored
    (linked,) = _read_ids(spans.column("link_span_id")).T
    for row in np.flatnonzero(linked).tolist():
        cause = np.flatnonzero(ids.span == linked[row])
        if len(cause):
            (root,) = np.flatnonzero(ids.span == ids.root[cause[0]])[:1].tolist() or [int(cause[0])]
            attributes_by_row.setdefault(row, {})[LINK] = (int(cause[0]) + 1, root + 1)
    yield from sorted(attributes_by_row.items())


def _read_intervals(table: Any, ids: SpanKeys, offset_ns: int) -> DeviceIntervals:
    if table is None or not len(table):
        return DeviceIntervals.none()
    rows = rows_of(ids.span.view(np.int64), _read_ids(table.column("span_id"))[:, 0].view(np.int64))
    starts = _read_ints(table, "start_unix_ns") - offset_ns
    order = np.lexsort((starts, rows))
    order = order[rows[order] != NONE]
    labels, label = _number_values(table.column("label"))
    device, stream, durations, uncertainty_ns = (
        _read_ints(table, name)[order] for name in ("device", "stream", "duration_ns", "uncertainty_ns")
    )
    starts = starts[order]
    return DeviceIntervals(
        rows[order], device, stream, starts, starts + durations, label[order], uncertainty_ns, tuple(labels)
    )


def _read_facts(row: Mapping[str, Any], trace: Columns, offset_ns: int, tables: Mapping[str, Any]) -> Trace:
    """Return the facts of a process, from all of its windows or, without any, from its spans."""
    boot, pid, start_ticks = row["process"].rsplit("/", 2)
    windows, gauges, losses = (
        [] if tables.get(name) is None else tables[name].to_pylist() for name in ("processes", "gauges", "losses")
    )
    newest: dict[str, Any] = max(windows, key=lambda window: window["start_unix_ns"], default={})
    origin = Origin(
        int(pid), row["service_name"], 0, offset_ns, newest.get("recorder") or "native", newest.get("profile") or "",
        row["host"], newest.get("generation") or 0, row["profile_digest"], "" if boot == row["host"] else boot,
        row["clock_bound_ns"] or 0, row["run"], int(start_ticks), row["service_version"] or "",
    )  # fmt: skip
    starts = [window["start_unix_ns"] - offset_ns for window in windows] or [int(trace.start_ns.min())]
    ends = [window["start_unix_ns"] + window["duration_ns"] - offset_ns for window in windows]
    counts: dict[str, int] = {}
    for loss in losses:
        counts[loss["reason"]] = counts.get(loss["reason"], 0) + loss["count"]
    uuids = {(gauge["device"], gauge["device_uuid"]) for gauge in gauges if gauge["device_uuid"]}
    return Trace(
        origin, min(starts), max(ends or [int(trace.end_ns.max())]), SpanViews(trace),
        losses=counts,
        notes=[note for window in windows for note in window["notes"] or ()],
        samples=sorted(
            (Sample(row["name"], row["device"], row["start_unix_ns"] - offset_ns, row["value"]) for row in gauges),
            key=attrgetter("at_ns", "device", "name"),
        ),
        gpus=[Gpu(device, uuid=uuid) for device, uuid in sorted(uuids)],
        held_from_ns=max([(window["held_from_unix_ns"] or 0) - window["clock_offset_ns"] for window in windows] + [0]),
        died=newest.get("died") or "",
        apart_ns=max([window["apart_ns"] or 0 for window in windows] or [0]),
    )  # fmt: skip
