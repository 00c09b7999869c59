"""Saved traces by SQL and as data frames: `instrument query` and `instrument.load`."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from instrument.cli.inputs import add_files, files_in, files_of, merged_of, one_trace, saved_in
from instrument.cli.option_values import Verbs
from instrument.errors import InstrumentError

if TYPE_CHECKING:
    from instrument.trace.file import Saved


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
        help="ask saved traces by SQL, with DuckDB",
        usage='instrument query FILE [FILE ...] "select ..."',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="tables, times in ns on the monotonic clock:\n"
        + "\n".join(f"  {name:<11} {about}" for name, about in TABLES.items())
        + "\n\nStatements reach these tables alone: no file and no network. Wants instrument-sdk[query].",
    )
    add_files(parser)
    parser.add_argument("statement", metavar="SQL", help="a statement, as DuckDB takes it")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="rows as one JSON document")
    forms.add_argument("--csv", action="store_true", help="rows as CSV")
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


FRAMES = ("pandas", "polars", "pyarrow")
"""The libraries of data frames. The first that is installed makes the frames."""


class LoadedTrace:
    """Saved traces as one, with one tree per request. `saved` has the columns of which the frames are made.

    A frame is made on its first access. It needs `instrument-sdk[query]` and pandas, polars or pyarrow.
    """

    def __init__(self, saved: Saved, frames: str | None = None) -> None:
        self.saved = saved
        self._frames = frames

    @cached_property
    def spans(self) -> Any:
        """The spans, a row each: name, thread, times in ns, error, attributes, intervals on devices."""
        from instrument.trace import tables

        return self._frame_of(tables.frame(self.saved.trace))

    @cached_property
    def requests(self) -> Any:
        """The requests, a row each, with its key, and its wall by parts in ns, as the report has them."""
        from instrument.trace import tables
        from instrument.trace.joined import join
        from instrument.trace.ledger import ledger

        trace, facts = self.saved.trace.columns, self.saved.trace
        joined = join(trace, facts.apart_ns)
        return self._frame_of(tables.frame_of_requests(facts, joined, ledger(trace, joined)))

    def _frame_of(self, relation: Any) -> Any:
        from instrument.trace import tables

        kind = self._frames or next((name for name in FRAMES if importlib.util.find_spec(name)), None)
        if kind == "pandas":
            return tables.as_pandas(relation)
        if kind == "polars":
            return relation.pl()
        if kind == "pyarrow":
            return relation.to_arrow_table()
        state = "none of them is installed" if kind is None else f"asked for {kind}"
        raise InstrumentError(f"load: data frames are of {', '.join(FRAMES)}; {state}: pip install pandas")


def load(
    *paths: str | os.PathLike[str],
    run: str | None = None,
    all_runs: bool = False,
    clock: str = "monotonic",
    frames: str | None = None,
) -> LoadedTrace:
    """Read recordings and Chrome traces, or a folder of them, as one: `instrument.load("traces").spans`.

    Of a folder the files of one `run` are taken, else of the newest, or of `all_runs`. `clock` and files are as with
    `instrument report`. `frames` names the library of data frames: pandas where it is installed, else polars or
    pyarrow. Raises `TraceError` for what cannot be read.
    """
    if not paths:
        raise InstrumentError("load: found no path; give a file or a folder")
    names = [os.fspath(path) for path in paths]
    read = list(map(saved_in, files_in(names, run, all_runs, lambda sentence: warnings.warn(sentence, stacklevel=4))))
    return LoadedTrace(one_trace(read, clock), frames)
