"""`instrument explain`: print the cause of a slow request or period, with the evidence."""

from __future__ import annotations

import argparse

from instrument.cli import print_json, print_lines
from instrument.cli.inputs import (
    add_file_arguments,
    find_files,
    import_file_libraries,
    limit_memory,
    merge_saved,
    read_saved,
)
from instrument.cli.option_values import Verbs, add_table_options, read_count, read_time_ns, table_options

INCONCLUSIVE = 3
"""The exit code if the evidence does not determine the cause."""


def add_verbs(verbs: Verbs) -> None:
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
    """Print the explanations. Returns the exit code."""
    options.traces = find_files("explain", options)
    import_file_libraries()
    from instrument.report import explanation
    from instrument.report.view import Options, Recording, make_json_values

    chosen = Options(**table_options(options), requests_by=options.by or "")
    choice = explanation.RequestChoice(
        options.request, options.slowest, options.endpoint or "", options.since, options.until
    )
    with limit_memory("explain", options.traces, options.memory):
        recording = Recording.of_saved(merge_saved(list(map(read_saved, options.traces)), options.clock))
        explanations = explanation.explain(recording, choice, chosen)
    is_inconclusive = any(item.verdict == explanation.INCONCLUSIVE for item in explanations)
    code = INCONCLUSIVE if is_inconclusive else 0
    if options.json:
        print_json({"exit_code": code, "explanations": make_json_values(explanations)})
    else:
        print_lines(line for item in explanations for line in item.lines())
    return code
