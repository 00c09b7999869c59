"""Functions that analyse a dataset with the spans of many hosts, for use in PySpark, Ray Data or DuckDB.

Each function takes Arrow tables with the rows of one run, and returns an Arrow table. A request that several hosts
served is joined by its key. The numbers are those of `instrument report`, `explain` and `compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from instrument.report.comparison import compare
from instrument.report.explanation import RequestChoice, explain
from instrument.report.view import Options, Recording
from instrument.trace import dataset_tables
from instrument.trace.dataset_files import read_processes
from instrument.trace.dataset_sources import DatasetRows
from instrument.trace.dataset_tables import import_pyarrow, make_ids
from instrument.trace.indices import find_rows
from instrument.trace.merge import merge_recordings
from instrument.trace.request_trees import join_request_trees

RESULTS = {
    "explanations": {
        "run": "text", "service_version": "text", "trace_id": "binary(16)", "span_id": "binary(8)", "name": "text",
        "duration_ns": "int64", "typical_ns": "int64", "verdict": "text", "cause": "text", "sentence": "text",
    },
    "changes": {
        "path": "list<text>", "verdict": "text", "calls_before": "int64", "calls_after": "int64",
        "mean_before_ns": "double", "mean_after_ns": "double", "ratio": "double", "low_ratio": "double",
        "high_ratio": "double", "cost_ns": "double",
    },
}  # fmt: skip
"""The columns and types of the tables that `explanations` and `changes` return."""


def _column_types_of(table: str) -> dict[str, str]:
    if table in RESULTS:
        return RESULTS[table]
    document = dataset_tables.read_definition()
    columns = document["process"] | document["tables"][table]["columns"]
    return {name: kind for name, (kind, _) in columns.items()}


def spark_schema(table: str) -> str:
    """Return the schema of a table for Spark's `applyInArrow`.

    `table` is the name of a table of the dataset, or a key of `RESULTS`.
    """
    names = {"text": "string", "int64": "bigint", "bool": "boolean", "list": "array", "binary(8)": "binary",
             "binary(16)": "binary"}  # fmt: skip

    def spark_type_of(kind: str) -> str:
        outer, _, inner = kind.partition("<")
        types = f"<{', '.join(map(spark_type_of, inner[:-1].split(',')))}>" if inner else ""
        return names.get(outer, outer) + types

    return ", ".join(f"{name} {spark_type_of(kind)}" for name, kind in _column_types_of(table).items())


def in_spark(function: Callable[..., Any], tables: int = 1) -> Callable[..., Any]:
    """Wrap a function of Arrow tables for Spark's `applyInArrow`.

    `tables` is the number of tables that Spark passes: 1 for a group, or 2 for a cogroup. The wrapper converts bytes of
    fixed length to plain bytes, because Spark has no such type.
    """
    arrow = import_pyarrow()

    def to_plain_bytes(result: Any) -> Any:
        is_fixed = arrow.types.is_fixed_size_binary
        types = [(field.name, arrow.binary() if is_fixed(field.type) else field.type) for field in result.schema]
        return result.cast(arrow.schema(types))

    if tables == 1:
        return lambda table: to_plain_bytes(function(table))
    return lambda first, second: to_plain_bytes(function(first, second))


def _merge_tables(**tables: Any) -> DatasetRows:
    processes = read_processes({name: table for name, table in tables.items() if table is not None})
    merged = merge_recordings([process.saved for process in processes], by_wall_clock=True)
    return DatasetRows(merged, [process.ids for process in processes])


def joined(table: str, spans: Any, intervals: Any = None, processes: Any = None) -> Any:
    """Compute the table `requests`, `batches` or `members` from the spans of all hosts.

    `spans`, `intervals` and `processes` are Arrow tables of the dataset. The last two are optional.
    """
    if not len(spans):
        return dataset_tables.arrow_schema(table).empty_table()
    rows = _merge_tables(spans=spans, intervals=intervals, processes=processes)
    return import_pyarrow().concat_tables([part for name, part in rows.make_tables() if name == table])


def requests(spans: Any, intervals: Any = None) -> Any:
    """Return an Arrow table with a row per request. Its columns divide the request's time into parts and stages."""
    return joined("requests", spans, intervals)


def recording(spans: Any, **tables: Any) -> Recording:
    """Make a recording from Arrow tables of the dataset, for views and `explain`. `tables` are further tables, such as
    `intervals`."""
    return Recording.from_file(join_request_trees(_merge_tables(spans=spans, **tables).merged.saved))


def explanations(spans: Any, most: int = 10) -> Any:
    """Return an Arrow table with the causes of the `most` slowest requests, as `instrument explain` finds them."""
    rows = _merge_tables(spans=spans)
    causes = explain(Recording.from_file(join_request_trees(rows.merged.saved)), RequestChoice(slowest=most), Options())
    places = find_rows(rows.trace.span_id, np.array([item.span_id for item in causes], dtype=np.int64))
    identities = [rows.members[process].identity for process in rows.process[places].tolist()]
    columns = {
        "run": [item["run"] for item in identities],
        "service_version": [item["service_version"] for item in identities],
        "trace_id": make_ids(rows.keys.high[places], rows.keys.low[places]),
        "span_id": make_ids(rows.keys.span[places]),
        "name": [item.name for item in causes],
        "duration_ns": [item.wall_ns for item in causes],
        "typical_ns": [item.typical_ns for item in causes],
        "verdict": [item.verdict for item in causes],
        "cause": [item.causes[0].title() if item.causes else None for item in causes],
        "sentence": [item.sentence() for item in causes],
    }
    return _make_table("explanations", columns)


def changes(before: Iterable[Any], after: Iterable[Any]) -> Any:
    """Return an Arrow table of the call paths whose time changed between two versions.

    `instrument compare` finds the same changes. `before` and `after` are the two versions: a table of spans for each
    run.
    """
    recordings = [[recording(spans) for spans in side] for side in (before, after)]
    rows = compare(recordings[0], recordings[1], Options()).changes if all(recordings) else ()
    return _make_table("changes", {name: [getattr(row, name) for row in rows] for name in RESULTS["changes"]})


def _make_table(name: str, columns: dict[str, Any]) -> Any:
    arrow = import_pyarrow()
    types = arrow.schema([(column, dataset_tables.arrow_type(kind)) for column, kind in RESULTS[name].items()])
    return arrow.Table.from_arrays(
        [arrow.array(values, field.type) if isinstance(values := columns[field.name], list) else values
         for field in types], schema=types,
    )  # fmt: skip
