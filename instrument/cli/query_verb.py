"""Saved traces by SQL: `instrument query`."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from typing import Any

from instrument.cli.inputs import add_files, files_of, merged_of
from instrument.cli.option_values import Verbs
from instrument.errors import InstrumentError

TABLES = {
    "spans": "span_id, parent_id (0: none), root_id, name, kind, thread_id, thread, task_id, start_ns, end_ns, "
    "total_ns, active_ns, self_ns, unix_ns (start_ns since 1970), error, clipped, level, site",
    "intervals": "span_id, device, stream, start_ns, end_ns, label, uncertainty_ns: what spans had on devices",
    "sites": "site, name, kind, module, qualname, file, line, instance, device, attributes (JSON)",
    "threads": "thread_id, name",
    "attributes": "span_id, name, value (text, or JSON of what is none), number",
    "samples": "name, device (-1: the host), at_ns, value: gauges",
}
"""The tables that `instrument.trace.tables` makes, with their columns."""


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "query",
        help="run SQL on saved traces, with DuckDB",
        usage='instrument query FILE [FILE ...] "select ..."',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="tables, times in ns on the monotonic clock:\n"
        + "\n".join(f"  {name:<11} {about}" for name, about in TABLES.items())
        + "\n\nStatements can read only these tables: no file and no network. Needs instrument-sdk[query].",
    )
    add_files(parser)
    parser.add_argument("statement", metavar="SQL", help="a statement in DuckDB's SQL")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print the rows as one JSON document")
    forms.add_argument("--csv", action="store_true", help="print the rows as CSV")
    parser.set_defaults(verb=query)


def query(options: argparse.Namespace, host: list[str]) -> int:
    """Print what a statement gives. Returns the exit code."""
    from instrument.trace import tables

    errors = tables.duckdb().Error
    saved = merged_of("query", files_of("query", options), options)
    asks_for_attributes = "attributes" in options.statement.lower()  # a second for a million of them
    connection = tables.closed_off(tables.opened(saved.trace, attributes=asks_for_attributes))
    try:
        connection.execute(options.statement)
        names = [column[0] for column in connection.description or ()]
        rows = connection.fetchall() if names else []
    except errors as problem:
        raise InstrumentError(f"query: {problem}") from problem
    finally:
        connection.close()
    _print(names, rows, options)
    return 0


def _print(names: Sequence[str], rows: Sequence[Sequence[Any]], options: argparse.Namespace) -> None:
    if options.json:
        json.dump([dict(zip(names, row, strict=True)) for row in rows], sys.stdout, indent=2, default=str)
        sys.stdout.write("\n")
    elif options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    else:
        from instrument.report.table import safe, table

        cells = [["-" if cell is None else safe(str(cell)) for cell in row] for row in rows]
        sys.stdout.writelines(
            f"{line.rstrip()}\n" for line in table([safe(name) for name in names], cells, [0] * len(names))
        )
