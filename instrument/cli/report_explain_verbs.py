"""The verbs that evaluate spans: `report` prints tables (views) of saved files or of a running service, and `explain`
prints the cause of a slow request or period."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.cli import print_json, print_lines
from instrument.cli.inputs import (
    WALL,
    add_file_arguments,
    find_files,
    import_file_libraries,
    limit_memory,
    memory_limit_bytes,
    merge_saved_files,
    read_file,
)
from instrument.cli.option_values import (
    Verbs,
    add_table_options,
    choice_arguments,
    read_count,
    read_count_or_zero,
    read_table_options,
    read_time_ns,
    read_view_names,
)
from instrument.cli.ps_live_dump_verbs import RunRead, read_run
from instrument.errors import InstrumentError
from instrument.profile.model import SORT_KEYS, STATES, TRACER_OPTIONS, VIEWS
from instrument.report.view import THREADS

if TYPE_CHECKING:
    from instrument.report.view import Options, Recording

PROCESS = "process"
"""The value of `--by` for a separate report per process."""

INCONCLUSIVE = 3
"""The exit code if the evidence does not determine the cause."""


def add_verbs(verbs: Verbs) -> None:
    _add_report(verbs)
    _add_explain(verbs)


def _add_report(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "report",
        help="print a report on saved files, or on a running service",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="views:\n" + "\n".join(f"  {view:<12}  {shows}" for view, shows in VIEWS.items()),
    )
    add_file_arguments(parser, "; or a run, service or process id that is still alive (default: the only run)")
    parser.add_argument(
        "--by",
        metavar="GROUP",
        help="divide the requests into groups by an attribute, such as tenant, or by endpoint: the views requests, "
        "batches, device and neighbours then print each group; `--by process` prints a report of each process",
    )
    parser.add_argument(
        "--with",
        dest="torch_trace",
        metavar="FILE",
        help="a trace that torch.profiler saved at the same time, for its kernels, allocations and FLOPs",
    )
    parser.add_argument(
        "--view",
        action="extend",
        type=read_view_names,
        metavar="V[,V]",
        help="the views to print, in this order (default: brief; events with --tracer-option, --threads or --state)",
    )
    parser.add_argument(
        "--request", metavar="KEY", help="print the parts and the timeline of one request, by its key or span number"
    )
    parser.add_argument("--at-most", type=read_count, default=50, metavar="N", help="most groups of --by (default: 50)")
    parser.add_argument(
        "--tracer-option", **choice_arguments(TRACER_OPTIONS), help="detail of the view events (default: Default)"
    )
    parser.add_argument(
        "--state", **choice_arguments(STATES), default="All", help="times in the view events (default: All)"
    )
    parser.add_argument(
        "--sorted-by", **choice_arguments(SORT_KEYS), default="default", help="column by which rows are sorted"
    )
    parser.add_argument(
        "--threads", **choice_arguments(THREADS), help="tables of all threads, of each thread, or both (default: both)"
    )
    add_table_options(parser)
    about = "join rows with less time than this, such as 50us, to one row"
    parser.add_argument("--least", dest="least_ns", type=read_time_ns, default=0, metavar="T", help=about)
    about = "number of first iterations that averages leave out"
    parser.add_argument("--skip-first", type=read_count_or_zero, default=0, metavar="N", help=about)
    parser.add_argument("--html", metavar="PAGE", help="write all views as one HTML file, which needs no network")
    parser.add_argument("--corrected", action="store_true", help="subtract the cost of recorded calls from self times")
    parser.set_defaults(verb=print_report)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause Python's garbage collection, which takes a fifth of a report's time and finds no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_pause_garbage_collection()
def print_report(options: argparse.Namespace, host: list[str]) -> int:
    run = _read_named_run(options)
    if run is None:
        options.traces = find_files("report", options)
        if len(options.traces) > 1 or options.by == PROCESS:
            options.memory = options.memory or memory_limit_bytes([*options.traces] * 2)  # apart, and as one
    if options.torch_trace and (run is not None or len(options.traces) > 1 or options.by == PROCESS):
        problem = "several" if run is None else "a run"
        raise InstrumentError(
            f"report: --with needs one file of ours, and there are {problem}; give the file of the same process"
        )
    import_file_libraries()
    from instrument.report.section import import_views

    import_views(tuple(VIEWS) if options.html is not None else options.view or ("brief", "events"))
    if run is not None:
        return _print_views(options, run)
    with limit_memory("report", [options.traces[0], *filter(None, [options.torch_trace])], options.memory):
        return _print_views(options)


def _read_named_run(options: argparse.Namespace) -> RunRead | None:
    names = options.traces or [options.run]
    if options.traces and (options.run or len(names) > 1 or "/" in names[0] or Path(names[0]).exists()):
        return None
    try:
        return read_run("report", names[0])
    except InstrumentError as problem:
        if not names[0]:
            raise InstrumentError(f"{problem}; name the files of a run that has ended") from None
        raise InstrumentError(f"report: there is no file {names[0]}, and {problem}") from None


def _print_views(options: argparse.Namespace, run: RunRead | None = None) -> int:
    from instrument.report.request_groups import refuse_unknown_group
    from instrument.report.section import default_views, format_summary, summary_document
    from instrument.report.view import Options, make_json_values

    values = {field.name: getattr(options, field.name, None) for field in fields(Options)} | read_table_options(options)
    values["requests_by"] = None if options.by == PROCESS else options.by
    values["most"] = None if options.html is not None else values["most"]
    views, chosen = options.view or default_views(values), Options.from_mapping(values)
    if options.html is not None:
        return _write_page(options, chosen, run)
    documents = []
    for place, (header, facts, recording) in enumerate(_load_recordings_to_report(options, run)):
        refuse_unknown_group(recording, chosen)
        if options.request is not None:
            from instrument.report.request_life import make_request_life

            life = make_request_life(recording, options.request, chosen)
            documents.append({**facts, "request": make_json_values(life)})
            text = "\n".join(life.lines())
        elif options.json:
            documents.append({**facts, **summary_document(views, recording, chosen)})
        else:
            text = format_summary(views, recording, chosen)
        if not options.json:
            if header:
                sys.stdout.write("\n" * (place > 0) + f"{header}\n\n")
            sys.stdout.write(text)
    if options.json:
        print_json({"processes": documents} if options.by == PROCESS else documents[0])
    return 0


def _write_page(options: argparse.Namespace, chosen: Options, run: RunRead | None) -> int:
    from instrument.report.html_page import write_page

    for name in ("json", "by", "view"):
        if getattr(options, name) and (name != "by" or options.by == PROCESS):
            raise InstrumentError(
                f"report: --html writes all views on one page, so --{name} does not apply; remove one of them"
            )
    for header, _, recording in _load_recordings_to_report(options, run):
        page = write_page(options.html, recording, chosen, request=options.request, header=header)
        sys.stdout.write(f"HTML page: {page}\n")
    return 0


def _load_recordings_to_report(
    options: argparse.Namespace, run: RunRead | None
) -> Iterator[tuple[str, dict[str, Any], Recording]]:
    if run is None and len(options.traces) == 1 and options.by != PROCESS:
        yield "", {}, _read_recording(options.traces[0], options.torch_trace)
        return
    from instrument.report.view import Recording
    from instrument.trace.merge import group_by_process, merge_recordings
    from instrument.trace.merged_facts import make_process_label

    files = list(map(read_file, options.traces)) if run is None else run.read
    if options.by == PROCESS:
        for of_process in group_by_process(files):
            origin = of_process[0].trace.origin
            facts = {"pid": origin.pid, "service": origin.service, "host": origin.host, "files": len(of_process)}
            recording = Recording.from_file(merge_recordings(of_process).saved)
            yield f"Process: {make_process_label(of_process[0])}", {"process": facts}, recording
        return
    merged = merge_recordings(files, by_wall_clock=options.clock == WALL)
    facts = {"merged": {name: getattr(merged, name) for name in ("files", "processes", "runs", "clock", "apart_ns")}}
    if run is not None:
        facts = {"run": run.name, "is_going": run.is_going, **facts}
    yield merged.header if run is None else run.header_line, facts, Recording.from_file(merged.saved)


def _read_recording(path: str, torch_trace: str | None) -> Recording:
    from instrument import chrome
    from instrument.report.view import Recording

    saved = read_file(path)
    if torch_trace:
        saved = replace(saved, trace=chrome.join_torch_trace(saved.trace, read_file(torch_trace).trace))
    return Recording.from_file(saved)


def _add_explain(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "explain",
        help="find the cause of a slow request or of a slow period",
        usage="instrument explain FILE ... [options]",
        description="Compares a slow request with similar ones, and names what took the additional time. Exit code: 0, "
        "or 3 if the evidence does not determine the cause. `instrument help explain` lists the causes.",
    )
    add_file_arguments(parser)
    parser.add_argument("--request", metavar="KEY", help="explain the request of this key or span number")
    parser.add_argument("--slowest", type=read_count, metavar="N", help="explain the N slowest requests (default: 1)")
    parser.add_argument("--endpoint", metavar="NAME", help="only requests of this endpoint")
    parser.add_argument(
        "--since", type=read_time_ns, metavar="T", help="only requests that began this long after the start, or later"
    )
    parser.add_argument(
        "--until", type=read_time_ns, metavar="T", help="only requests that began this long after the start, or earlier"
    )
    parser.add_argument(
        "--by", metavar="NAME", help="attribute by which a burst of requests is counted (default: tenant)"
    )
    add_table_options(parser)
    parser.set_defaults(verb=explain)


def explain(options: argparse.Namespace, host: list[str]) -> int:
    options.traces = find_files("explain", options)
    import_file_libraries()
    from instrument.report import explanation
    from instrument.report.view import Options, Recording, make_json_values

    chosen = Options(**read_table_options(options), requests_by=options.by or "")
    choice = explanation.RequestChoice(
        options.request, options.slowest, options.endpoint or "", options.since, options.until
    )
    with limit_memory("explain", options.traces, options.memory):
        recording = Recording.from_file(merge_saved_files(list(map(read_file, options.traces)), options.clock))
        explanations = explanation.explain(recording, choice, chosen)
    is_inconclusive = any(item.verdict == explanation.INCONCLUSIVE for item in explanations)
    code = INCONCLUSIVE if is_inconclusive else 0
    if options.json:
        print_json({"exit_code": code, "explanations": make_json_values(explanations)})
    else:
        print_lines(line for item in explanations for line in item.lines())
    return code
