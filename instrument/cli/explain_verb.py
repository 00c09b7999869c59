"""`instrument explain`: the cause of a slow request or of a slow time, with its evidence."""

from __future__ import annotations

import argparse
import json
import sys

from instrument.cli.inputs import add_files, files_of, load_libraries, one_trace, saved_in, within_memory
from instrument.cli.option_values import Verbs, count, count_or_all, one_of, time_ns
from instrument.report.view import UNITS

INCONCLUSIVE = 3
"""The exit code of an inconclusive explanation."""

MOST = 15
"""The default number of rows of a table in text."""


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser(
        "explain",
        help="name the cause of a slow request or of a slow time, with the spans that prove it",
        usage="instrument explain FILE ... [options]",
        description="Compares a request with requests like it, and accounts for its excess by a closed list of causes. "
        "Exit code: 0, or 3 where the evidence does not separate the causes. `instrument help explain` has the list.",
    )
    add_files(parser)
    parser.add_argument("--request", metavar="KEY", help="the request of this key, or of this span's number")
    parser.add_argument("--slowest", type=count, metavar="N", help="the N slowest requests (default: 1)")
    parser.add_argument("--endpoint", metavar="NAME", help="requests of this name only")
    parser.add_argument(
        "--since", type=time_ns, metavar="T", help="requests that began at this time after the start, or later"
    )
    parser.add_argument(
        "--until", type=time_ns, metavar="T", help="requests that began at this time after the start, or earlier"
    )
    parser.add_argument("--by", metavar="NAME", help="attribute by which to count a burst's requests (default: tenant)")
    parser.add_argument(
        "--rows", type=count_or_all, metavar="N|all", help=f"the most rows of a table (default: {MOST} in text)"
    )
    parser.add_argument("--unit", **one_of(UNITS), default="ms", help="of times in text (default: ms)")
    parser.add_argument("--json", action="store_true", help="the same numbers as one JSON document, times in ns")
    parser.set_defaults(verb=explain)


def explain(options: argparse.Namespace, host: list[str]) -> int:
    """Print the explanations. Returns the exit code."""
    options.traces = files_of("explain", options)
    load_libraries()
    from instrument.report import explanation
    from instrument.report.view import Options, Recording, document

    most = None if options.json else MOST
    chosen = Options(unit=options.unit, rows=options.rows or None, most=most, requests_by=options.by or "")
    choice = explanation.RequestChoice(
        options.request, options.slowest, options.endpoint or "", options.since, options.until
    )
    with within_memory("explain", options.traces, options.memory):
        recording = Recording.of_saved(one_trace(list(map(saved_in, options.traces)), options.clock))
        explanations = explanation.explain(recording, choice, chosen)
    is_inconclusive = any(item.verdict == explanation.INCONCLUSIVE for item in explanations)
    code = INCONCLUSIVE if is_inconclusive else 0
    if options.json:
        json.dump({"exit_code": code, "explanations": document(explanations)}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        sys.stdout.writelines(f"{line.rstrip()}\n" for item in explanations for line in item.lines())
    return code
