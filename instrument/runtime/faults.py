"""The counter of faults in our own code. A fault is logged once and never raised into the service."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from instrument.runtime.unpatched import RLock

logger = logging.getLogger("instrument")

Result = TypeVar("Result")

MOST_KINDS, OTHER_KINDS = 20, "others"
"""The maximum number of kinds of unreadable values to count per rule, and the name for further kinds."""


class Faults:
    """A thread-safe counter of faults in our own code, by place. A place is a short text such as "import hook". The
    first fault of each place is logged. Under pytest, each fault is raised again."""

    def __init__(self) -> None:
        self._lock = RLock()  # a finaliser may come in while its thread holds it
        self._counts: dict[str, int] = {}
        self._of_rules: dict[str, tuple[str, Counter[str]]] = {}

    def __reduce__(self) -> str:
        """Pickle the global name, because functions that are pickled by value refer to the counter."""
        return "FAULTS"

    def note(self, place: str, fault: BaseException) -> None:
        """Count a fault of our own code. `place` is a short noun phrase such as ``"import hook"``."""
        with self._lock:
            first = place not in self._counts
            self._counts[place] = self._counts.get(place, 0) + 1
        if "PYTEST_CURRENT_TEST" in os.environ:
            raise fault
        if first:
            _warn(
                f"a fault of instrument itself in the {place}; the service is not affected, later ones are only "
                "counted",
                fault,
            )

    def attempt(self, place: str, action: Callable[[], Result]) -> Result | None:
        """Call an action and return its result. An exception is counted as our fault, and the result is None."""
        with self.guard(place):
            return action()
        return None

    def guard(self, place: str) -> _Guard:
        """Return a context manager that suppresses exceptions, and counts them as our faults."""
        return _Guard(place)

    def note_unreadable_value(self, place: str, words: str, kind: str = "") -> None:
        """Count a failure to read a value that a rule names. Never raises. `place` is the rule's place in the profile.
        One line is logged per place and kind."""
        with self._lock:
            _, kinds = self._of_rules.setdefault(place, (words, Counter()))
            kind = kind if kind in kinds or len(kinds) < MOST_KINDS else OTHER_KINDS
            kinds[kind] += 1
            count = kinds[kind]
        if count == 1:
            _warn(f"{place}: {words}; it is left out, later ones are only counted")

    def count_by_place(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)

    def describe_unreadable_values(self) -> list[str]:
        with self._lock:
            return [
                f"{place}: not read: {sum(kinds.values())} times{_counts_text(kinds)}; {first}"
                for place, (first, kinds) in self._of_rules.items()
            ]

    def clear(self) -> None:
        """Reset all counts, for tests and forked children."""
        self._lock = RLock()
        self._counts = {}
        self._of_rules = {}


class _Guard:
    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, fault: BaseException | None, __: object) -> bool:
        if isinstance(fault, Exception):
            FAULTS.note(self._place, fault)
        return isinstance(fault, Exception)


def _warn(message: str, fault: BaseException | None = None) -> None:
    """Log a warning. Errors of the service's log handlers are ignored, because the summary also has the counts."""
    with suppress(Exception):
        logger.warning("%s", message, exc_info=fault)


def _counts_text(kinds: Counter[str]) -> str:
    return f" ({', '.join(f'{kind} {count}' for kind, count in kinds.most_common())})" if len(kinds) > 1 else ""


FAULTS = Faults()
