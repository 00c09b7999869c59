"""The count of our own faults, which are not raised: silent and counted between the edges, where errors are loud.

A fault of ours on the service's own path goes to `FAULTS.note`, which never raises there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from instrument.runtime.unpatched import RLock

logger = logging.getLogger("instrument")


class Faults:
    """Counts our own faults by place and logs the first of each place.

    Thread-safe. Under pytest the fault is raised again, so that a test cannot pass over it.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # a finaliser may come in while its thread holds it
        self._counts: dict[str, int] = {}
        self._of_rules: dict[str, tuple[int, str]] = {}

    def __reduce__(self) -> str:
        """By name, where a function that is pickled by value takes what counts along."""
        return "FAULTS"

    def note(self, place: str, fault: BaseException) -> None:
        """Count one fault at `place` (a short noun phrase such as ``"import hook"``)."""
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
                pass  # a log handler of the service that raises; the fault stands in the summary

    def attempt(self, place: str, action: Callable[[], object]) -> None:
        """One of several things to do of which none may keep the others from being done."""
        try:
            action()
        except Exception as fault:
            self.note(place, fault)

    def note_of_rule(self, place: str, words: str) -> None:
        """Count what a rule of the profile asks for and cannot be had; `place` is the rule's. Never raises.

        No fault of ours: the log gets one line at the first of each place, without a traceback.
        """
        with self._lock:
            count, first = self._of_rules.get(place, (0, words))
            self._of_rules[place] = count + 1, first
        if not count:
            try:
                logger.warning("%s: %s; it is left out, later ones are only counted", place, words)
            except Exception:
                pass  # a log handler of the service that raises; the summary has the count

    def counts(self) -> Mapping[str, int]:
        """How many faults each place has had so far."""
        with self._lock:
            return dict(self._counts)

    def counts_of_rules(self) -> Mapping[str, int]:
        """How often each rule could not have what it asks for, by its place."""
        with self._lock:
            return {place: count for place, (count, _) in self._of_rules.items()}

    def notes_of_rules(self) -> list[str]:
        """The same in words, with what was found the first time."""
        with self._lock:
            return [f"{place}: not read: {count} times; {first}" for place, (count, first) in self._of_rules.items()]

    def clear(self) -> None:
        """Forget all counts (tests, and a forked child)."""
        self._lock = RLock()
        self._counts = {}
        self._of_rules = {}


FAULTS = Faults()
