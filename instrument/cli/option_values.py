"""What arguments of the command may be: each reader gives the value of a text, or says what is allowed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

from instrument.profile.document import nearest
from instrument.profile.model import VIEWS
from instrument.profile.values import SIZE_UNITS
from instrument.report.view import UNITS

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What a verb is added to."""


def count(text: str) -> int:
    """A number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: 1 or more")
    return int(text)


ALL = 0
"""The number that means all."""


def count_or_all(text: str) -> int:
    """A number from 1, or `ALL`."""
    return ALL if text == "all" else count(text)


def whole(text: str) -> int:
    """A number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: 0 or more")
    return int(text)


def time_ns(text: str) -> int:
    """A time with its unit, in ns."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ns|us|ms|s)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number and one of ns, us, ms, s, such as 50us")
    return round(float(found[1]) * UNITS[found[2]])


def size_bytes(text: str) -> int:
    """A size with its unit, in bytes."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([A-Za-z]+)", text)
    if not found or found[2] not in SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number and one of {' '.join(SIZE_UNITS)}")
    return round(float(found[1]) * SIZE_UNITS[found[2]])


def view_names(text: str) -> list[str]:
    """Names of views with commas between them."""
    views = text.split(",")
    for view in views:
        _require(view, VIEWS)
    return views


def one_of(names: Iterable[str]) -> dict[str, Any]:
    """What has an argument take one of these names."""
    choices = tuple(names)

    def name(text: str) -> str:
        _require(text, choices)
        return text

    return {"type": name, "choices": choices}


def _require(text: str, names: Collection[str]) -> None:
    if text not in names:
        meant = nearest(text, names)
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: {', '.join(names)}{hint}")


def seconds(text: str) -> float:
    """A number of seconds."""
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number of seconds")
    return float(text)
