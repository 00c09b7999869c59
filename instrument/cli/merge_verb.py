"""`instrument merge`: several saved traces as one file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from instrument.cli.convert_verb import FORM_OF_END, form_of, refuse_to_replace_input, write
from instrument.cli.inputs import add_files, files_of, merged_of
from instrument.cli.option_values import Verbs


def add(verbs: Verbs) -> None:
    parser = verbs.add_parser("merge", help="write several saved traces as one file, every span once")
    add_files(parser)
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help=f"what to write: {', '.join(f'{end} is {form}' for end, form in FORM_OF_END.items())}, or a recording",
    )
    parser.set_defaults(verb=merge)


def merge(options: argparse.Namespace, host: list[str]) -> int:
    """Write the file, and say which one it is. Returns the exit code."""
    paths, target = files_of("merge", options), Path(options.output)
    refuse_to_replace_input(target, paths)
    write(target, form_of(target), merged_of("merge", paths, options))
    sys.stdout.write(f"{target}\n")
    return 0
