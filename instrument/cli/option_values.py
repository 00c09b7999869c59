"""Read the values of command line options, refuse invalid values, and choose the profile."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

from instrument.errors import InstrumentError
from instrument.profile.document import find_most_similar
from instrument.profile.model import TIME_UNITS, VIEWS
from instrument.profile.presets import PRESETS, preset_path
from instrument.profile.values import SIZE_UNITS, parse_amount

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The argparse object to which each verb adds its own parser."""


def read_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: 1 or more")
    return int(text)


ALL = 0
"""The value of a row limit for the word `all`."""


MOST = 15
"""The default maximum number of rows of a printed table."""


def read_count_or_all(text: str) -> int:
    """Parse a number of at least 1, or the word `all`, which returns 0."""
    return ALL if text == "all" else read_count(text)


def read_count_or_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: 0 or more")
    return int(text)


def read_time_ns(text: str) -> int:
    """Parse a time with a unit, such as 50us. Returns nanoseconds."""
    return _read_amount(text, TIME_UNITS, "such as 50us")


def read_size_bytes(text: str) -> int:
    """Parse a size with a unit, such as 2GiB. Returns bytes."""
    return _read_amount(text, SIZE_UNITS, "such as 2GiB")


def _read_amount(text: str, units: Mapping[str, int], example: str) -> int:
    value = parse_amount(text, units)
    if value is None or value >= 2**63:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number and one of {' '.join(units)}, {example}")
    return value


def read_view_names(text: str) -> list[str]:
    views = text.split(",")
    for view in views:
        _refuse_unknown_name(view, VIEWS)
    return views


def choice_arguments(names: Iterable[str]) -> dict[str, Any]:
    choices = tuple(names)

    def parse_choice(text: str) -> str:
        _refuse_unknown_name(text, choices)
        return text

    return {"type": parse_choice, "choices": choices}


def _refuse_unknown_name(text: str, names: Collection[str]) -> None:
    if text not in names:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: {', '.join(names)}{suggest_name(text, names)}")


def suggest_name(word: str, names: Iterable[str]) -> str:
    """Return a suggestion for the end of an error message, or an empty string if no name is similar."""
    name = find_most_similar(word, names)
    return f"; did you mean {name!r}?" if name else ""


def read_seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number of seconds")
    return float(text)


PROCESSES = "RUN|SERVICE|PID"
RUN = (
    "a run (its first letters are enough), a service, a process id, or the path of an agent's socket, as in the "
    "variable INSTRUMENT_AGENT"
)

WAIT_S = 5.0
"""The default number of seconds to wait for the answers of all processes."""


def add_run_argument(parser: argparse.ArgumentParser, default: str = "the only one") -> None:
    parser.add_argument("run", nargs="?", metavar=PROCESSES, help=f"{RUN} (default: {default})")


def add_wait_option(parser: argparse.ArgumentParser) -> None:
    about = f"seconds to wait for the answers (default: {WAIT_S:g})"
    parser.add_argument("--wait", type=read_seconds, default=WAIT_S, metavar="S", help=about)


def add_table_options(parser: argparse.ArgumentParser) -> None:
    about = f"most rows of each table (default: {MOST} in text)"
    parser.add_argument("--rows", type=read_count_or_all, metavar="N|all", help=about)
    parser.add_argument(
        "--unit", **choice_arguments(TIME_UNITS), default="ms", help="unit of times in text (default: ms)"
    )
    about = "print the same numbers as one JSON document, with times in ns"
    parser.add_argument("--json", action="store_true", help=about)


def read_table_options(options: argparse.Namespace) -> dict[str, Any]:
    most = None if options.json or options.rows == ALL else MOST
    return {"unit": options.unit, "rows": options.rows or None, "most": most}


DEFAULT = f"default: the variable INSTRUMENT_PROFILE, else the preset {PRESETS[0]}"

WITHOUT_PROFILE = (
    f"no profile, so the preset {PRESETS[0]} (`instrument check --preset {PRESETS[0]}` prints it; "
    f"for training loops: --preset {PRESETS[1]})"
)


def choose_profile_file(options: argparse.Namespace) -> tuple[str, bool]:
    """Return the path of the profile, and True if the user has chosen no profile."""
    if options.profile and options.preset:
        raise InstrumentError(
            f"the profile {options.profile} and --preset {options.preset} exclude each other; give one, or add the "
            f"line `preset: {options.preset}` to the profile"
        )
    of_variable = os.environ.get("INSTRUMENT_PROFILE", "")
    if of_variable and not (options.preset or options.profile or os.access(of_variable, os.R_OK)):
        print(f"instrument: INSTRUMENT_PROFILE: found {of_variable!r}, which cannot be read", file=sys.stderr)
        of_variable = ""
    path = preset_path(options.preset) if options.preset else options.profile or of_variable
    return path or preset_path(PRESETS[0]), not path
