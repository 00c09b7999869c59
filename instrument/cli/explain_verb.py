"""`instrument explain`: print the cause of a slow request or period, with the evidence."""

from __future__ import annotations

import argparse
import json
import sys

from instrument.cli.inputs import add_files, find_files, limit_memory, load_libraries, merge_saved, read_saved
from instrument.cli.option_values import Verbs, count_or_all, one_of, read_count, time_ns
from instrument.report.view import UNITS

INCONCLUSIVE = 3
"""The exit code if the evidence does not determine the cause."""

MOST = 15
"""The default maximum number of rows of a printed table."""


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "explain",
        help="find the cause of a slow request or of a slow period",
        usage="instrument explain FILE ... [options]",
        description="Compares a slow request with similar ones, and names what took the additional time. Exit code: 0, "
        "or 3 if the evidence does not determine the cause. `instrument help explain` lists the causes.",
    )
    add_files(parser)
    parser.add_argument("--request", metavar="KEY", help="explain the request of this key or span number")
    parser.add_argument("--slowest", type=read_count, metavar="N", help="explain the N slowest requests (default: 1)")
    parser.add_argument("--endpoint", metavar="NAME", help="only requests of this endpoint")
    parser.add_argument(
        "--since", type=time_ns, metavar="T", help="only requests that began this long after the start, or later"
    )
    parser.add_argument(
        "--until", type=time_ns, metavar="T", help="only requests that began this long after the start, or earlier"
    )
    parser.add_argument(
        "--by", metavar="NAME", help="attribute by which a burst of requests is counted (default: tenant)"
    )
    parser.add_argument(
        "--rows", type=count_or_all, metavar="N|all", help=f"most rows of a table (default: {MOST} in text)"
    )
    parser.add_argument("--unit", **one_of(UNITS), default="ms", help="unit of times in text (default: ms)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, with times in ns")
    parser.set_defaults(verb=explain)


def explain(options: argparse.Namespace, host: list[str]) -> int:
    """Print the explanations. Returns the exit code."""
    options.traces = find_files("explain", options)
    load_libraries()
    from instrument.report import explanation
    from instrument.report.view import Options, Recording, document

    most = None if options.json else MOST
    chosen = Options(unit=options.unit, rows=options.rows or None, most=most, requests_by=options.by or "")
    choice = explanation.RequestChoice(
        options.request, options.slowest, options.endpoint or "", options.since, options.until
    )
    with limit_memory("explain", options.traces, options.memory):
        recording = Recording.of_saved(merge_saved(list(map(read_saved, options.traces)), options.clock))
        explanations = explanation.explain(recording, choice, chosen)
    is_inconclusive = any(item.verdict == explanation.INCONCLUSIVE for item in explanations)
    code = INCONCLUSIVE if is_inconclusive else 0
    if options.json:
        json.dump({"exit_code": code, "explanations": document(explanations)}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.writelines(f"{line.rstrip()}\n" for item in explanations for line in item.lines())
    return code
