"""`instrument merge`: several saved traces as one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instrument.cli.convert_verb import refuse_to_replace_input, write
from instrument.cli.inputs import add_files, expanded, merged_of
from instrument.cli.option_values import Verbs


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser("merge", help="write several saved traces as one file, every span once")
    add_files(parser)
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="what to write: .json or .json.gz is Chrome JSON, .pftrace Perfetto's, .parquet Parquet, or a recording",
    )
    parser.set_defaults(verb=merge)


def merge(options: argparse.Namespace, host: list[str]) -> int:
    """Write the file, and say which one it is. Returns the exit code."""
    paths, target = expanded(options.traces), Path(options.output)
    refuse_to_replace_input(target, paths)
    forms = {".json": "chrome", ".gz": "chrome", ".pftrace": "perfetto", ".parquet": "parquet"}
    write(target, forms.get(target.suffix, "recording"), merged_of("merge", paths, options.clock, options.memory))
    sys.stdout.write(f"{target}\n")
    return 0
