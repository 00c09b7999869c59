"""The verbs on files: `convert` changes the format, `merge` joins files, `query` runs SQL on them, and `recover` saves
the spans of killed processes."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.cli import print_lines, print_remark
from instrument.cli.inputs import WALL, add_file_arguments, find_files, read_merged, read_within_memory_limit
from instrument.cli.option_values import Verbs, choice_arguments
from instrument.errors import InstrumentError, TraceError
from instrument.recording import memory

if TYPE_CHECKING:
    from instrument.trace.file import Saved


def add_verbs(verbs: Verbs) -> None:
    _add_convert(verbs)
    _add_merge(verbs)
    _add_query(verbs)
    _add_recover(verbs)


FORMS = {
    "recording": (".npz", "what report, query and numpy.load read"),
    "chrome": (".json.gz", "Chrome JSON, which https://ui.perfetto.dev and chrome://tracing open"),
    "perfetto": (".pftrace", "Perfetto's own format; wants instrument-sdk[perfetto]"),
    "otlp": (".otlp.jsonl", "OTLP in JSON, a line per request, as a collector's otlpjsonfile receiver reads it"),
    "parquet": (
        "",
        "a dataset: a folder of Parquet files, local or s3://..., or a file OUT.parquet with the spans "
        "alone; wants instrument-sdk[parquet]",
    ),
}
"""The formats of a converted trace, each with the suffix of its files and its use."""

FORM_OF_END = {
    ".json": "chrome",
    **{Path(f"any{end}").suffix: form for form, (end, _) in FORMS.items() if form not in ("otlp", "parquet")},
}
"""The format of a merged trace for each suffix of the output file. Other suffixes mean a recording."""


def _add_convert(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "convert",
        help="convert saved files to a recording, Chrome JSON, a Perfetto trace, Parquet or OTLP",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="forms:\n" + "\n".join(f"  {form:<10} {suffix:<12} {about}" for form, (suffix, about) in FORMS.items()),
    )
    add_file_arguments(parser)
    parser.add_argument("--to", required=True, **choice_arguments(FORMS), help="the form to write, from the list below")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="the file to write (default: the name of the input with another suffix), or the folder of a dataset",
    )
    parser.set_defaults(verb=convert, last_word="output")


def convert(options: argparse.Namespace, host: list[str]) -> int:
    paths = find_files("convert", options)
    if options.to == "parquet":
        return _write_dataset(options, paths)
    if options.output is None and len(paths) > 1:
        raise InstrumentError(f"convert: there are {len(paths)} files; name the file to write with -o OUT")
    target = Path(options.output or re.sub(r"(\.json\.gz|\.npz|\.json)?\Z", FORMS[options.to][0], paths[0], count=1))
    refuse_to_replace_input(target, paths)
    if options.to == "otlp":
        _write_otlp(target, read_within_memory_limit("convert", paths, options.memory))
    else:
        write_trace(target, options.to, read_merged("convert", paths, options))
    sys.stdout.write(f"{target}\n")
    return 0


def refuse_to_replace_input(target: Path, paths: Sequence[str]) -> None:
    if any(target.exists() and target.samefile(path) for path in paths if os.path.exists(path)):  # noqa: PTH110
        raise InstrumentError(f"{target} is one of the files to read; give another name with -o")


def write_trace(target: Path, form: str, saved: Saved) -> None:
    from instrument import chrome
    from instrument.trace import file

    ways: dict[str, Callable[[], object]] = {
        "recording": lambda: file.dump(target, saved.trace, saved.read_or_count_totals()),
        "chrome": lambda: chrome.dump(target, saved.trace, saved.read_or_count_totals()),
        "perfetto": lambda: chrome.write_perfetto(target, saved.trace),
    }
    convert_write_errors(target, ways[form])


def choose_format(target: Path) -> str:
    return FORM_OF_END.get(target.suffix, "recording")


def convert_write_errors(target: Path, action: Callable[[], object]) -> None:
    """Call `action`, which writes a file. An `OSError` becomes a `TraceError` with the name of the file."""
    try:
        action()
    except OSError as problem:
        raise TraceError(f"cannot write {target}: {problem.strerror or problem}") from problem


def _write_dataset(options: argparse.Namespace, paths: Sequence[str]) -> int:
    """Write a dataset, and print the paths of its files. An output with the suffix `.parquet` gets only the table of
    spans."""
    from hashlib import blake2b

    from instrument.trace.dataset_files import DatasetWriter, Folder, write_spans
    from instrument.trace.dataset_sources import DatasetRows
    from instrument.trace.dataset_tables import process_name
    from instrument.trace.merge import merge_recordings

    if options.output is None:
        raise InstrumentError("convert: a dataset needs a folder; name it: --to parquet FOLDER")
    is_file = options.output.endswith(".parquet") and not Path(options.output).is_dir()
    folder = Folder("." if is_file else options.output)
    merged = merge_recordings(
        read_within_memory_limit("convert", paths, options.memory), by_wall_clock=options.clock == WALL
    )
    parts = [part.saved.trace for part in merged.parts]
    if not all(facts.origin.realtime_ns for facts in parts):
        raise TraceError("a file has no time of day, which a dataset needs; choose another form")
    windows = sorted((process_name(facts.origin), facts.start_ns, len(facts.columns)) for facts in parts)
    writer = DatasetWriter(folder, blake2b(repr(windows).encode(), digest_size=8).hexdigest())
    tables = DatasetRows(merged).make_tables()
    try:
        if is_file:
            names = [write_spans(options.output, (rows for name, rows in tables if name == "spans"))]
        else:
            for name, rows in tables:
                writer.write(name, rows)
            names = writer.close()
    except OSError as problem:
        raise TraceError(f"cannot write to {options.output}: {problem}") from problem
    finally:
        writer.discard()
    sys.stdout.writelines(f"{name}\n" for name in names)
    return 0


def _write_otlp(target: Path, files: Sequence[Saved]) -> None:
    """Write files as OTLP. Times are in wall clock time, and each process is a resource."""
    from instrument.otlp.export_facts import Ids
    from instrument.otlp.packed_spans import SpanIds, SpanPacker
    from instrument.otlp.resource import make_resource
    from instrument.otlp.span_forms import JSON, make_json_lines
    from instrument.runtime import file_writing
    from instrument.trace.joined import join_requests
    from instrument.trace.merge import merge_recordings
    from instrument.trace.request_trees import build_request_trees, rows_by_process
    from instrument.trace.stages import make_stage_spans
    from instrument.trace.trace import append_spans

    if not all(saved.trace.origin.realtime_ns for saved in files):
        raise TraceError("a file has no time of day, which OTLP needs; choose another form")
    merged = merge_recordings(files, by_wall_clock=True)
    facts, columns = merged.saved.trace, merged.saved.trace.columns
    joined = join_requests(columns, facts.apart_ns)
    grafted_columns = build_request_trees(columns, joined, facts.origin.run)
    trace = append_spans(grafted_columns, [*chain.from_iterable(make_stage_spans(grafted_columns, joined).values())])
    ids = SpanIds(trace, Ids())
    links = ids.make_links_by_row(joined)

    def iterate_lines() -> Iterator[bytes]:
        for process, part, rows, interruptions in rows_by_process(merged, trace):
            packer = SpanPacker(
                JSON, trace, ids, process.origin, process.threads, part=part, links=links, interruptions=interruptions
            )
            resource = make_resource(process.origin, Ids().instance)
            yield from make_json_lines(packer.pack(rows), resource, trace.root_id[rows])

    def write_lines() -> None:
        with file_writing.open_replacement(target) as file:
            file.writelines(iterate_lines())

    convert_write_errors(target, write_lines)


def _add_merge(verbs: Verbs) -> None:
    parser = verbs.add_parser("merge", help="join several saved files in one file, with each span once")
    add_file_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="the file to write; its suffix decides the form: "
        + ", ".join(f"{end} ({form})" for end, form in FORM_OF_END.items()),
    )
    parser.set_defaults(verb=write_merged_file)


def write_merged_file(options: argparse.Namespace, host: list[str]) -> int:
    paths, target = find_files("merge", options), Path(options.output)
    refuse_to_replace_input(target, paths)
    write_trace(target, choose_format(target), read_merged("merge", paths, options))
    sys.stdout.write(f"{target}\n")
    return 0


TABLES = {
    "spans": "span_id, parent_id (0: none), root_id, name, kind, thread_id, thread, task_id, start_ns, end_ns, "
    "total_ns, active_ns, self_ns, unix_ns (start_ns since 1970), error, clipped, level, site",
    "intervals": "span_id, device, stream, start_ns, end_ns, label, uncertainty_ns: what spans had on devices",
    "sites": "site, name, kind, module, qualname, file, line, instance, device, attributes (JSON)",
    "threads": "thread_id, name",
    "attributes": "span_id, name, value (text, or JSON of what is none), number",
    "samples": "process (its pid; 0: of several), name, device (-1: the host), at_ns, value: gauges",
}
"""The tables of `instrument.trace.tables`, with their columns."""


def _add_query(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "query",
        help="run SQL on saved files, with DuckDB",
        usage='instrument query FILE [FILE ...] "select ..."',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="tables, times in ns on the monotonic clock:\n"
        + "\n".join(f"  {name:<11} {about}" for name, about in TABLES.items())
        + "\n\nStatements can read only these tables: no file and no network. Needs instrument-sdk[query].",
    )
    add_file_arguments(parser)
    parser.add_argument("statement", metavar="SQL", help="a statement in DuckDB's SQL")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print the rows as one JSON document")
    forms.add_argument("--csv", action="store_true", help="print the rows as CSV")
    parser.set_defaults(verb=query)


def query(options: argparse.Namespace, host: list[str]) -> int:
    from instrument.trace import tables

    errors = tables.import_duckdb().Error
    saved = read_merged("query", find_files("query", options), options)
    asks_for_attributes = "attributes" in options.statement.lower()  # a second for a million of them
    connection = tables.restrict_access(tables.open_database(saved.trace, attributes=asks_for_attributes))
    try:
        connection.execute(options.statement)
        names = [column[0] for column in connection.description or ()]
        rows = connection.fetchall() if names else []
    except errors as problem:
        raise InstrumentError(f"query: {problem}") from problem
    finally:
        connection.close()
    _print_rows(names, rows, options)
    return 0


def _print_rows(names: Sequence[str], rows: Sequence[Sequence[Any]], options: argparse.Namespace) -> None:
    if options.json:
        json.dump([dict(zip(names, row, strict=True)) for row in rows], sys.stdout, indent=2, default=str)
        sys.stdout.write("\n")
    elif options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    else:
        from instrument.report.table import make_table_lines, printable

        cells = [["-" if cell is None else printable(str(cell)) for cell in row] for row in rows]
        print_lines(make_table_lines([printable(name) for name in names], cells, [0] * len(names)))


WHICH = "give the folder of limits.ring_dir in the profile"


def _add_recover(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "recover",
        help="make recordings from the files of killed processes in limits.ring_dir",
        description="Writes a recording (.npz) next to each file of a process that was killed, for `instrument "
        "report`. Files of processes that run, or that ended in order, remain as they are.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder that limits.ring_dir names")
    parser.add_argument(
        "--remove", action="store_true", help="afterwards remove the files of all processes that have ended"
    )
    parser.set_defaults(verb=recover_files)


def recover_files(options: argparse.Namespace, host: list[str]) -> int:
    """Save the recordings of ring files, and print the results. Returns the exit code, which is 2 if a file cannot be
    read."""
    try:
        files = sorted(path for path in Path(options.folder).iterdir() if path.suffix == memory.SUFFIX)
    except OSError as error:
        raise InstrumentError(f"recover: cannot read {options.folder}: {error.strerror}; {WHICH}") from error
    if not files:
        raise InstrumentError(f"recover: the folder {options.folder} has no file *{memory.SUFFIX}; {WHICH}")
    failed = False
    for path in files:
        try:
            outcome, is_gone = _recover_file(path)
            print(f"{path}: {outcome}")
            if is_gone and options.remove:
                path.unlink()
        except (TraceError, OSError) as problem:
            print_remark("recover", path, problem)
            failed = True
    return 2 if failed else 0


def _recover_file(path: Path) -> tuple[str, bool]:
    """Save the recording of a process from its ring file. Return a sentence, and True if the process has ended."""
    from instrument.agent import crash_capture
    from instrument.recording.mapped import Mapped

    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with closing(Mapped(fd)) as mapped:
            header = mapped.header
        if memory.has_live_writer(path):
            return f"process {header.pid} runs", False
        if header.state == "goodbye":
            return f"process {header.pid} has ended in order", True
        answer = crash_capture.save_recording(fd, str(path.with_suffix(".npz")), end_kind="ended without a goodbye")
    finally:
        os.close(fd)
    return f"process {header.pid} {answer['died']}; saved as {answer['path']}", True
