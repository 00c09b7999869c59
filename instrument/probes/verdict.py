"""Verdicts: what became of a rule of the profile, or of one target of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one rule, or of one target of it.

    `state` is one of `attached`, `partly` (attached, but something else holds the function as it was), `waiting` (its
    module has not been imported, or no layer has run yet), `nothing` (the module is there and holds nothing of that
    name), `unreachable`. `target` is "" for a rule as a whole.
    """

    rule: str
    state: str
    target: str = ""
    why: str = ""

    def __str__(self) -> str:
        subject = f"{self.rule}: {self.target}" if self.target not in ("", self.rule) else self.rule
        return f"{subject}: {self.state}" + (f" ({self.why})" if self.why else "")
