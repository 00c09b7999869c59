"""The count of our own faults, which are not raised into the service.

A fault of ours on the service's own path goes to `FAULTS.note`, which never raises there.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping

from instrument.runtime.unpatched import RLock

logger = logging.getLogger("instrument")

KINDS_NAMED, OTHER_KINDS = 20, "others"
"""The maximum number of kinds of values that are named per place, and the name of all further kinds."""


class Faults:
    """A counter of our own faults by place, which logs the first fault of each place.

    Thread-safe. Under pytest the fault is raised again, so that a test cannot pass over it.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # a finaliser may come in while its thread holds it
        self._counts: dict[str, int] = {}
        self._of_rules: dict[str, tuple[str, Counter[str]]] = {}

    def __reduce__(self) -> str:
        """Pickle the count by its name, because a function that is pickled by value includes it."""
        return "FAULTS"

    def note(self, place: str, fault: BaseException) -> None:
        """Count a fault at `place`, a short noun phrase such as ``"import hook"``."""
        with self._lock:
            first = place not in self._counts
            self._counts[place] = self._counts.get(place, 0) + 1
        if "PYTEST_CURRENT_TEST" in os.environ:
            raise fault
        if first:
            try:
                logger.warning(
                    "a fault of instrument itself in the %s; the service is not affected, later ones are only counted",
                    place,
                    exc_info=fault,
                )
            except Exception:
                pass  # a log handler of the service that raises; the summary has the fault

    def attempt(self, place: str, action: Callable[[], object]) -> None:
        """Run an action. Count an exception as our fault, so that later actions still run."""
        try:
            action()
        except Exception as fault:
            self.note(place, fault)

    def note_of_rule(self, place: str, words: str, kind: str = "") -> None:
        """Count a missing value of a rule of the profile.

        `place` is the rule's place. Never raises. It is no fault of ours: the log gets one line per place and kind.
        """
        with self._lock:
            _, kinds = self._of_rules.setdefault(place, (words, Counter()))
            kind = kind if kind in kinds or len(kinds) < KINDS_NAMED else OTHER_KINDS
            kinds[kind] += 1
            count = kinds[kind]
        if count == 1:
            try:
                logger.warning("%s: %s; it is left out, later ones are only counted", place, words)
            except Exception:
                pass  # a log handler of the service that raises; the summary has the count

    def counts(self) -> Mapping[str, int]:
        """Return the number of faults of each place."""
        with self._lock:
            return dict(self._counts)

    def counts_of_rules(self) -> Mapping[str, int]:
        """Return the number of missing values of each rule, by its place."""
        with self._lock:
            return {place: sum(kinds.values()) for place, (_, kinds) in self._of_rules.items()}

    def notes_of_rules(self) -> list[str]:
        """Return sentences on the missing values of rules, with the first value of each place."""
        with self._lock:
            return [
                f"{place}: not read: {sum(kinds.values())} times{_counts_of(kinds)}; {first}"
                for place, (first, kinds) in self._of_rules.items()
            ]

    def clear(self) -> None:
        """Reset all counts, for tests and forked children."""
        self._lock = RLock()
        self._counts = {}
        self._of_rules = {}


def _counts_of(kinds: Counter[str]) -> str:
    """Return the kinds with their counts as a text in brackets, "" for a single kind."""
    return f" ({', '.join(f'{kind} {count}' for kind, count in kinds.most_common())})" if len(kinds) > 1 else ""


FAULTS = Faults()
