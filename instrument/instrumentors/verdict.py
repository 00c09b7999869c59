"""Verdicts on a rule of the profile, or on one target of it, in one process or in those of a command."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from instrument.profile.model import Profile
from instrument.recording import board
from instrument.recording.spans import Site
from instrument.runtime.cheap_start import dataclass, field, replace

CHECK_FOLDER = "INSTRUMENT_CHECK_FOLDER"
"""The variable by which `instrument check` asks the processes of a command to report to it."""

STATES: Mapping[str, str] = {
    "attached": "it records",
    "partly": "it records, but not all calls: other objects refer to the function, or a subclass overrides it",
    "uncalled": "it would record, but nothing has called it",
    "unmet": "requests or jobs came, and none of them was recorded",
    "compiled": "it lies inside a region that torch.compile has compiled, where no probe is left",
    "waiting": "nothing to attach to yet: its module is not imported, or no layer that it selects has run",
    "unreachable": "it is there and cannot be observed",
    "not found": "its module is imported and has nothing of that name",
}
"""The states with their meanings."""

RECORDING = ("attached", "partly", "uncalled")
"""The states of a target that carries a probe."""

_BY_KNOWLEDGE = ("partly", "attached", "compiled", "uncalled", "unmet", "unreachable", "not found", "waiting")
"""States in the order of knowledge of several processes: the one of a process that saw more comes first."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one rule, or on one target of it.

    `state` is one of `STATES`, `why` says more in words. `target` is "" for a rule as a whole. `site` is what the
    target records as; `calls` how many calls of it were recorded, None where nobody has counted.
    """

    rule: str
    state: str
    target: str = ""
    why: str = ""
    site: Site | None = field(default=None, compare=False)
    calls: int | None = None

    def __str__(self) -> str:
        subject = f"{self.rule}: {self.target}" if self.target not in ("", self.rule) else self.rule
        counted = "" if not self.calls else "1 call" if self.calls == 1 else f"{self.calls} calls"
        more = "; ".join(filter(None, (counted, self.why)))
        return f"{subject}: {self.state}" + (f" ({more})" if more else "")

    def counted(self, calls_of: Callable[[Site], int]) -> Verdict:
        """Add the calls of its site; `uncalled` where it is attached and there were none."""
        if self.site is None or self.state not in RECORDING:
            return self
        calls = calls_of(self.site)
        return replace(self, calls=calls, state="uncalled" if self.state == "attached" and not calls else self.state)

    def facts(self) -> dict[str, Any]:
        """Return all but the site as JSON takes it; `Verdict(**facts)` is the way back."""
        return {name: getattr(self, name) for name in ("rule", "state", "target", "why", "calls")}

    def merged(self, other: Verdict) -> Verdict:
        """Merge the verdicts of two processes on a target: the one that says more, with the calls of both."""
        first, second = sorted((self, other), key=lambda verdict: _BY_KNOWLEDGE.index(verdict.state))
        counts = [verdict.calls for verdict in (first, second) if verdict.calls is not None]
        return replace(first, calls=sum(counts) if counts else None)


def over_processes(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Merge the verdicts of several processes into one per target, in the order of first sight.

    A process that found targets of a rule knows better than one that speaks of the rule as a whole.
    """
    whole: dict[tuple[str, str], Verdict] = {}
    for verdict in verdicts:
        key = (verdict.rule, verdict.target)
        whole[key] = whole[key].merged(verdict) if key in whole else verdict
    found = {rule for rule, target in whole if target}
    called = {verdict.rule for verdict in whole.values() if verdict.calls}
    return [
        verdict
        for (rule, target), verdict in whole.items()
        if (target or rule not in found) and not (verdict.state == "unmet" and rule in called)
    ]


def marks_of(verdicts: Iterable[Verdict]) -> set[str]:
    """Return the marks on the board of the run of the rules that are at work in this process."""
    found = [verdict for verdict in verdicts if verdict.state in RECORDING]
    return {board.attached(one.rule) for one in found} | {board.called(one.rule) for one in found if one.calls}


def without_others(verdicts: Sequence[Verdict], marks: Set[str]) -> list[Verdict]:
    """Drop verdicts on rules with nothing to do here that are at work in another process, by the board.

    Rules that do something here keep all that is said of them.
    """
    here = marks_of(verdicts)

    def is_of_others(verdict: Verdict) -> bool:
        mark = (board.called if verdict.state in ("uncalled", "unmet") else board.attached)(verdict.rule)
        return mark in marks and mark not in here and verdict.state in ("waiting", "nothing", "uncalled", "unmet")

    return [verdict for verdict in verdicts if not is_of_others(verdict)]


def report_to_check(folder: str, calls: int, profile: Profile, verdicts: Iterable[Verdict]) -> None:
    """Leave what became of the rules to `instrument check`, which has started this process or one above it."""
    facts = {
        "pid": os.getpid(),
        "calls": calls,
        "verdicts": [_with_nearest_module(verdict, profile).facts() for verdict in verdicts],
    }
    path = Path(folder, f"{os.getpid()}.{time.monotonic_ns()}")
    try:
        path.write_text(json.dumps(facts), encoding="utf-8")
        path.rename(path.with_suffix(".json"))
    except FileNotFoundError:
        pass  # the command has ended before this process, a server of multiprocessing's, and nobody asks any more


def reports_to_check(folder: str) -> list[dict[str, Any]]:
    """Return the reports of the processes of a command in a folder, by their ids."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(Path(folder).glob("*.json"))]


def _with_nearest_module(verdict: Verdict, profile: Profile) -> Verdict:
    """Name the imported module that a waiting function rule perhaps means."""
    texts = [text for rule in profile.functions if rule.text == verdict.rule for text in rule.match]
    if verdict.state != "waiting":
        return verdict
    for text in texts:
        from instrument.profile.document import nearest

        meant = nearest(text.partition(":")[0], sys.modules, 0.8)
        if meant:
            return replace(verdict, why=f"{verdict.why}; nearest is {meant}")
    return verdict
