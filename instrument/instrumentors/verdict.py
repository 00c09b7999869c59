"""The verdicts that `instrument check` prints: whether a rule of the profile records its targets, and if not, why."""

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
from instrument.runtime.lazy_imports import dataclass, field, replace

STATES: Mapping[str, str] = {
    "attached": "its calls are recorded",
    "partly": "some calls are not recorded: other objects refer to the function, or a subclass overrides it",
    "uncalled": "its calls would be recorded, but nothing has called it",
    "unmet": "requests or jobs arrived, but none was recorded",
    "compiled": "it is inside a region that torch.compile has compiled, where nothing is recorded",
    "waiting": "its module is not imported yet, or no layer that the rule selects has run yet",
    "unreachable": "it exists, but its calls cannot be recorded",
    "not found": "its module has no such function or class",
}
"""The states of a verdict, and their meanings as printed."""

RECORDING = ("attached", "partly", "uncalled")
"""The states of a target whose calls are recorded."""

_BY_KNOWLEDGE = ("partly", "attached", "compiled", "uncalled", "unmet", "unreachable", "not found", "waiting")
"""The states by precedence, for a rule with verdicts from several processes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state of a rule of the profile, or of one target of the rule. `state` is a key of `STATES`.

    `why` explains the state. `target` is "" for the whole rule. `calls` counts recorded calls, None before they are
    counted.
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

    def with_call_count(self, calls_of: Callable[[Site], int]) -> Verdict:
        """Return the verdict with the number of calls. An `attached` target without calls becomes `uncalled`."""
        if self.site is None or self.state not in RECORDING:
            return self
        calls = calls_of(self.site)
        return replace(self, calls=calls, state="uncalled" if self.state == "attached" and not calls else self.state)

    def fields_as_json(self) -> dict[str, Any]:
        """Return all fields except `site` as JSON values, for `Verdict(**facts)`."""
        return {name: getattr(self, name) for name in ("rule", "state", "target", "why", "calls")}

    def merge(self, peer: Verdict) -> Verdict:
        first, second = sorted((self, peer), key=lambda verdict: _BY_KNOWLEDGE.index(verdict.state))
        counts = [verdict.calls for verdict in (first, second) if verdict.calls is not None]
        return replace(first, calls=sum(counts) if counts else None)


def merge_verdicts(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Merge the verdicts of several processes into one per target, in order of appearance.

    Drop the verdict on a whole rule if any process has a target of the rule.
    """
    whole: dict[tuple[str, str], Verdict] = {}
    for verdict in verdicts:
        key = (verdict.rule, verdict.target)
        whole[key] = whole[key].merge(verdict) if key in whole else verdict
    rules_with_targets = {rule for rule, target in whole if target}
    called = {verdict.rule for verdict in whole.values() if verdict.calls}
    return [
        verdict
        for (rule, target), verdict in whole.items()
        if (target or rule not in rules_with_targets) and not (verdict.state == "unmet" and rule in called)
    ]


def make_rule_marks(verdicts: Iterable[Verdict]) -> set[str]:
    recording = [verdict for verdict in verdicts if verdict.state in RECORDING]
    marks = {board.attached_mark(verdict.rule) for verdict in recording}
    return marks | {board.called_mark(verdict.rule) for verdict in recording if verdict.calls}


def drop_recorded_elsewhere(verdicts: Sequence[Verdict], marks: Set[str]) -> list[Verdict]:
    """Drop the verdicts on rules that only other processes of the run record. `marks` has the rule marks of all
    processes."""
    own_marks = make_rule_marks(verdicts)

    def is_recorded_elsewhere(verdict: Verdict) -> bool:
        mark = (board.called_mark if verdict.state in ("uncalled", "unmet") else board.attached_mark)(verdict.rule)
        return mark in marks and mark not in own_marks and verdict.state in ("waiting", "uncalled", "unmet")

    return [verdict for verdict in verdicts if not is_recorded_elsewhere(verdict)]


def write_check_report(folder: str, calls: int, profile: Profile, verdicts: Iterable[Verdict]) -> None:
    """Write this process's verdicts for the command `instrument check`. The verdict on a missing module suggests the
    most similar name."""

    def add_nearest_module(verdict: Verdict) -> Verdict:
        texts = [text for rule in profile.functions if rule.text == verdict.rule for text in rule.match]
        hints = (suggest_nearest(text.partition(":")[0], sys.modules, 0.8) for text in texts)
        hint = next(filter(None, hints), "") if verdict.state == "waiting" else ""
        return replace(verdict, why=verdict.why + hint) if hint else verdict

    described = [add_nearest_module(verdict).fields_as_json() for verdict in verdicts]
    publish_report(Path(folder, f"{os.getpid()}.json"), {"pid": os.getpid(), "calls": calls, "verdicts": described})


def publish_report(target: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON. A reader of the folder sees the complete file or no file."""
    path = target.with_suffix(f".{time.monotonic_ns()}")
    try:
        path.write_text(json.dumps(report), encoding="utf-8")
        path.rename(target)
    except FileNotFoundError:
        pass  # the command has ended before this process, such as a server of multiprocessing


def read_check_reports(folder: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(Path(folder).glob("*.json"))]


def suggest_nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a suggestion of the most similar name, for the end of a message. Return "" if no name is similar."""
    from instrument.profile.document import find_most_similar

    name = find_most_similar(word, names, cutoff)
    return f"; nearest is {name}" if name else ""
