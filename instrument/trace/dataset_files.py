"""Writes a dataset as Parquet files into a folder or an object store, and converts its rows into recordings again.

Each combination of table, service, day and hour has a folder, such as
`requests/service=s-chat/date=d2026-11-29/hour=h07`. The values begin with a letter, because some query engines read
`07` as a number. A file has a temporary name until it is complete.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from instrument.errors import TraceError
from instrument.recording.spans import AttributeValue, Gpu, Origin, Sample
from instrument.recording.trace_context import LINK, RemoteParent
from instrument.trace.columns import Attributes, Columns, DeviceIntervals, Int64s
from instrument.trace.dataset_tables import ATTRIBUTES, SpanKeys, UInt64s, arrow_schema, import_pyarrow, read_definition
from instrument.trace.file import Saved
from instrument.trace.indices import NONE, count_ancestors, find_rows, topmost_rows
from instrument.trace.metadata import read_site
from instrument.trace.text import convert_to_tuples, remove_surrogates
from instrument.trace.trace import SpanViews, Trace

FILE_BYTES = 128 << 20
"""The size in bytes at which a file is closed and the next file begins."""

HOUR_NS = 3600 * 10**9

NAME_LENGTH = 200
"""The maximum number of characters of a service's name in a folder's name. File systems refuse names over 255 bytes."""

PLAIN = frozenset({
    "span_id", "parent_span_id", "start_unix_ns", "duration_ns", "children_ns", "waiting_ns", "link_span_id", "own_ns",
    "share_ns", "request_span_id", "queue_ns", "stall_ns", "transport_ns", "unknown_ns", "value",
})  # fmt: skip
"""The columns that Parquet stores without a dictionary, because most of their values are distinct."""


def make_folder_path(service: str, hour: int) -> str:
    """Return the path of the folder for a service's rows of one hour. `hour` is the number of hours since 1970."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", remove_surrogates(service))[:NAME_LENGTH] or "_"
    return time.strftime(f"service=s-{name}/date=d%Y-%m-%d/hour=h%H", time.gmtime(hour * 3600))


class Folder:
    """A folder on a disk or in an object store. `path` is a path, or a URL such as `s3://bucket/traces`. Raises
    `TraceError` if the folder cannot be opened."""

    def __init__(self, path: str) -> None:
        import_pyarrow()
        from pyarrow import fs

        self.is_local = "://" not in path
        try:
            if self.is_local:
                self.files, self.path = fs.LocalFileSystem(), os.path.abspath(path)  # noqa: PTH100 - not resolved
            else:
                self.files, self.path = fs.FileSystem.from_uri(path)
        except (OSError, ValueError) as problem:
            raise TraceError(f"cannot write to {path}: {problem}") from problem

    def explain_unwritable(self) -> str:
        """Return the reason why a local folder cannot be written to, or an empty text."""
        path = self.path
        while self.is_local and not os.path.lexists(path):
            path = os.path.dirname(path)  # noqa: PTH120
        is_usable = not self.is_local or (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK))  # noqa: PTH112
        return "" if is_usable else f"cannot write to {self.path}: {path} is no folder in which this user may write"

    def create(self, name: str) -> Any:
        """Return a new file for writing. Only the owner can read a local file."""
        path = f"{self.path}/{name}"
        if self.is_local:
            self.files.create_dir(path.rpartition("/")[0], recursive=True)
            return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")
        return self.files.open_output_stream(path)

    def rename(self, name: str, new_name: str) -> None:
        self.files.move(f"{self.path}/{name}", f"{self.path}/{new_name}")

    def size_bytes(self, name: str) -> int:
        return int(self.files.get_file_info(f"{self.path}/{name}").size or 0)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            self.files.delete_file(f"{self.path}/{name}")


class _OpenFile:
    """A Parquet file that is being written. It has the name `part` until it is complete."""

    def __init__(self, folder: Folder, table: str, name: str) -> None:
        from pyarrow import parquet

        self.name, self._folder = name, folder
        directory, slash, base = name.rpartition("/")
        self.part = f"{directory}{slash}.{base}.part"
        self.is_complete = False
        self._sink = folder.create(self.part)
        types = arrow_schema(table)
        self._writer = parquet.ParquetWriter(
            self._sink, types, compression="zstd", compression_level=6,
            use_dictionary=[field.name for field in types if field.name not in PLAIN],
        )  # fmt: skip

    def write(self, rows: Any) -> int:
        """Write rows, and return the size of the file in bytes."""
        self._writer.write_table(rows)
        return int(self._sink.tell())

    def close(self) -> None:
        self._writer.close()
        self._sink.close()
        self.is_complete = True

    def discard(self) -> None:
        for closing in (self._writer.close, self._sink.close):
            with suppress(Exception):  # the store may have gone
                closing()
        self._writer.is_open = False  # or its end would try once more, and print that it cannot
        self._folder.remove(self.part)


def write_spans(path: str, rows: Iterable[Any]) -> str:
    """Write rows of the table `spans` as one file. Return its name. The caller handles `OSError`."""
    directory, slash, name = path.rpartition("/")
    folder = Folder(directory or slash or ".")
    file = _OpenFile(folder, "spans", name)
    try:
        for some in rows:
            file.write(some)
        file.close()
    except BaseException:
        file.discard()
        raise
    folder.rename(file.part, name)
    return f"{folder.path}/{name}"


class DatasetWriter:
    """Writes tables to the files of a dataset. File names begin with `name`. The caller handles `OSError`.

    Files get their final names in `close`, and replace older ones. After an error, call `discard`. With `fills`, a
    table without rows also gets a file, because query engines refuse a folder that does not exist.
    """

    def __init__(self, folder: Folder, name: str, *, fills: bool = True) -> None:
        self._folder, self._name, self._fills = folder, name, fills
        self._files: dict[tuple[str, str], list[_OpenFile]] = {}
        """The files of each table and folder. Only the last file may be incomplete."""

    def write(self, table: str, rows: Any) -> None:
        for folder, some in _split_by_folder(rows):
            self._write_to_folder(table, folder, some)

    def _write_to_folder(self, table: str, folder: str, rows: Any) -> None:
        files = self._files.setdefault((table, folder), [])
        if not files or files[-1].is_complete:
            name = f"{table}/{folder}/{self._name}-{len(files)}.parquet"
            files.append(_OpenFile(self._folder, table, name))
        if files[-1].write(rows) >= FILE_BYTES:
            files[-1].close()

    def close(self) -> list[str]:
        """Complete and rename all files. Return their names."""
        tables = {table for table, _ in self._files}
        for _, folder in list(self._files)[-1:] if self._fills else ():
            for table in set(read_definition()["tables"]) - tables:
                self._write_to_folder(table, folder, arrow_schema(table).empty_table())
        files = [*chain(*self._files.values())]
        for file in files:
            if not file.is_complete:
                file.close()
        for file in files:
            self._folder.rename(file.part, file.name)
        self._files = {}
        return [f"{self._folder.path}/{file.name}" for file in files]

    @property
    def part_names(self) -> list[str]:
        return [file.part for file in chain(*self._files.values())]

    def discard(self) -> None:
        for file in chain(*self._files.values()):
            file.discard()
        self._files = {}


def _split_by_folder(rows: Any) -> Iterator[tuple[str, Any]]:
    from pyarrow import compute

    if not len(rows):
        return
    hours = np.floor_divide(rows.column("start_unix_ns").to_numpy(), HOUR_NS)
    services = compute.dictionary_encode(rows.column("service_name")).combine_chunks()
    pairs, places = np.unique(np.stack([services.indices.to_numpy(), hours]), axis=1, return_inverse=True)
    for number, (service, hour) in enumerate(pairs.T.tolist()):
        some = np.flatnonzero(places.reshape(-1) == number)
        folder = make_folder_path(services.dictionary[service].as_py(), hour)
        yield folder, rows if len(some) == len(rows) else rows.take(some)


class ReadProcess(NamedTuple):
    """The recording of a process, and the ids of its spans. Span `n` has the id at index `n - 1`."""

    saved: Saved
    ids: SpanKeys


def read_processes(tables: Mapping[str, Any]) -> list[ReadProcess]:
    """Return the recordings of all processes in the tables of a dataset, ordered by their first span.

    `tables` must have `spans`, and may have `intervals`, `gauges`, `losses` and `processes`. The order of rows and the
    type of ids do not matter.
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
    arrow, types = import_pyarrow(), arrow_schema(name)
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else arrow.nulls(len(table), field.type)
        for field in types
    ]
    return arrow.Table.from_arrays(columns, schema=types).combine_chunks()


def _split_by_process(table: Any) -> Iterator[tuple[str, Any]]:
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


def _align_clock_offsets(table: Any, offset_ns: int) -> Any:
    """Convert the start times of a process to one clock offset. The wall clock may have been set between rows."""
    starts = _read_ints(table, "start_unix_ns") - _read_ints(table, "clock_offset_ns") + offset_ns
    return table.set_column(
        table.schema.get_field_index("start_unix_ns"), "start_unix_ns", import_pyarrow().array(starts)
    )


def _read_recording(spans: Any, tables: Mapping[str, Any], everywhere: UInt64s) -> ReadProcess:
    offset_ns = int(_read_ints(spans, "clock_offset_ns")[_read_ints(spans, "start_unix_ns").argmax()])
    spans = _align_clock_offsets(spans, offset_ns)
    tables = {name: _align_clock_offsets(table, offset_ns) for name, table in tables.items() if table is not None}
    trace_id, span, above, root = (
        _read_ids(spans.column(name)) for name in ("trace_id", "span_id", "parent_span_id", "root_span_id")
    )
    ids = SpanKeys(trace_id[:, 0], trace_id[:, 1], span[:, 0], above[:, 0], root[:, 0])
    order, columns = _order_and_number_rows(spans, ids, everywhere)
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
        attributes=Attributes.from_dicts(
            len(spans), dict(_read_attributes(spans, [dict(place.attributes) for place in places], site, ids))
        ),
        remote=remote,
    )
    names = zip(spans.column("thread_id").to_pylist(), spans.column("thread").to_pylist(), strict=True)
    threads = {thread: name for thread, name in names if name}
    facts = _read_facts(spans.slice(0, 1).to_pylist()[0], trace, offset_ns, tables)
    facts.threads = threads
    return ReadProcess(Saved(facts, None), ids)


def _order_and_number_rows(spans: Any, ids: SpanKeys, everywhere: UInt64s) -> tuple[Int64s, dict[str, Int64s]]:
    """Return the order of rows by start time, and new numbers of spans, parents and roots.

    A parent or root in another process becomes 0. A parent or root that was not recorded gets an unused number.
    """
    count = len(ids.span)
    by_id = np.argsort(ids.span, kind="stable")

    def find_span_rows(span: UInt64s) -> Int64s:
        places = np.searchsorted(ids.span, span, sorter=by_id).clip(max=count - 1)
        rows = by_id[places]
        return np.where(ids.span[rows] == span, rows, NONE)

    parent, root = find_span_rows(ids.parent), find_span_rows(ids.root)
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
    encoded = column.combine_chunks().dictionary_encode()
    indices = encoded.indices.fill_null(NONE).to_numpy(zero_copy_only=False)
    return encoded.dictionary.to_pylist(), indices.astype(np.int32)


def _read_attributes(
    spans: Any, of_sites: list[dict[str, Any]], site: Any, ids: SpanKeys
) -> Iterator[tuple[int, dict[str, AttributeValue]]]:
    attributes_by_row: dict[int, dict[str, AttributeValue]] = {}
    for name in ATTRIBUTES:
        column = spans.column(name).combine_chunks()
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        for row, items in zip(rows.tolist(), column.take(rows).to_pylist(), strict=True):
            static = of_sites[site[row]]
            for key, value in items:
                stored = convert_to_tuples(json.loads(value)) if name == "attributes_json" else value
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
        return DeviceIntervals.make_empty()
    table = table.sort_by("start_unix_ns").combine_chunks()
    row = find_rows(ids.span.view(np.int64), _read_ids(table.column("span_id"))[:, 0].view(np.int64))
    start_ns = _read_ints(table, "start_unix_ns") - offset_ns
    labels, label = _number_values(table.column("label"))
    numbers = {name: _read_ints(table, name) for name in ("device", "stream", "uncertainty_ns")}
    end_ns = start_ns + _read_ints(table, "duration_ns")
    intervals = DeviceIntervals(row, start_ns=start_ns, end_ns=end_ns, label=label, labels=tuple(labels), **numbers)
    return intervals.sort_by_row()


def _read_facts(row: Mapping[str, Any], trace: Columns, offset_ns: int, tables: Mapping[str, Any]) -> Trace:
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
