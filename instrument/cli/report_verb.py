"""`instrument report`: print the summary of a saved trace."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from instrument.cli.option_values import Verbs, count, size_bytes, time_ns, view_names, whole
from instrument.profile.model import SORT_KEYS, STATES, TRACER_OPTIONS, VIEWS
from instrument.report.view import THREADS, UNITS
from instrument.runtime.memory_limit import within_memory


def add(verbs: Verbs) -> None:
    """The verb `report` and its options."""
    parser = verbs.add_parser(
        "report",
        help="print the summary of a saved recording or Chrome trace",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="views:\n" + "\n".join(f"  {view:<12}  {shows}" for view, shows in VIEWS.items()),
    )
    parser.add_argument(
        "trace", metavar="FILE", help="a recording (.npz), or .json or .json.gz, ours or another profiler's"
    )
    parser.add_argument(
        "--with",
        dest="beside",
        metavar="FILE",
        help="a trace that torch.profiler saved of the same time: its kernels, allocations and FLOPs beside our spans",
    )
    parser.add_argument(
        "--view",
        action="extend",
        type=view_names,
        metavar="V[,V]",
        help="which reports, in this order (default: brief, or events where --tracer-option or --threads is given)",
    )
    parser.add_argument("--tracer-option", choices=TRACER_OPTIONS, help="default: Default")
    parser.add_argument("--state", choices=STATES, default="All")
    parser.add_argument("--sorted-by", choices=SORT_KEYS, default="default")
    parser.add_argument("--threads", choices=THREADS, help="tables of all, of each, or both (default: both)")
    parser.add_argument("--rows", type=count, metavar="N", help="the N heaviest rows of each table (default: all)")
    parser.add_argument(
        "--least", type=time_ns, default=0, metavar="T", help="leave out rows with less time, such as 50us"
    )
    parser.add_argument(
        "--skip-first", type=whole, default=0, metavar="N", help="iterations to leave out of means over iterations"
    )
    parser.add_argument("--unit", choices=tuple(UNITS), default="ms", help="of times in text (default: ms)")
    parser.add_argument("--json", action="store_true", help="the same numbers as one JSON document, times in ns")
    parser.add_argument(
        "--memory",
        type=size_bytes,
        metavar="SIZE",
        help="the most to use, such as 2GiB (default: 500MB, and more for files that are large themselves)",
    )
    parser.add_argument("--corrected", action="store_true", help="self times, less what the probes below them cost")
    parser.set_defaults(verb=report, takes_host=False)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Spans and rows are no cycles: to look for some each time that there are more takes a fifth of a report's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_without_collector()
def report(options: argparse.Namespace, host: list[str]) -> int:
    """Print the views of a saved trace. Returns the exit code."""
    files = [options.trace, *filter(None, [options.beside])]
    # Nothing here multiplies matrices, and each thread that OpenBLAS keeps for it takes memory that is bounded.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Before memory is bounded: the system would not load all of a library, and OpenBLAS would end the process.
    from instrument.report.summary import ON_COLUMNS, prepare
    from instrument.trace import file  # noqa: F401

    prepare(ON_COLUMNS)
    with within_memory(files, options.memory):
        return _reported(options)


def _reported(options: argparse.Namespace) -> int:
    from instrument import chrome
    from instrument.report.summary import summary, summary_document, views_for
    from instrument.report.view import Options, Recording
    from instrument.trace import file

    if file.is_recording(options.trace):
        saved = file.load(options.trace)
        recording, make_tally = Recording.of_saved(saved), saved.counted
    else:
        trace, make_tally = chrome.read(options.trace)
        recording = Recording.of_trace(trace, make_tally)
    if options.beside:
        joined = chrome.join(recording.trace, chrome.read(options.beside)[0])
        recording = Recording.of_trace(joined, make_tally)
    given = {
        "tracer_option": options.tracer_option,
        "state": options.state,
        "sorted_by": options.sorted_by,
        "rows": options.rows,
        "threads": options.threads,
        "corrected": options.corrected,
        "least_ns": options.least,
        "skip_first": options.skip_first,
        "unit": options.unit,
    }
    views, asked = options.view or views_for(given), Options.of(given)
    if options.json:
        json.dump(summary_document(views, recording, asked), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(summary(views, recording, asked))
    return 0
