"""The function rules of a profile: which targets each has matched, and how they are made to record.

The first rule that matches a target has it. A function that carries a probe already, by `@profiled` or of a framework,
keeps that one.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from instrument.probes import functions
from instrument.probes.functions import Target, Undo, Unreachable, matches
from instrument.probes.verdict import Verdict
from instrument.profile import FunctionRule
from instrument.recorder import RECORDER, Recorder
from instrument.spans import Site


class Functions:
    """The function rules of one session at work."""

    def __init__(self, rules: Sequence[FunctionRule], recorder: Recorder = RECORDER) -> None:
        self.rules = tuple(rules)
        self._recorder = recorder
        self._undos: list[Undo] = []
        self._bound: list[tuple[Any, Any]] = []  # functions of modules and what stands for them now
        self._found: dict[int, dict[str, Verdict]] = {i: {} for i in range(len(self.rules))}
        self._taken: dict[str, int] = {}
        self._modules: dict[str, ModuleType] = {}
        self._module_patterns = sorted({text.partition(":")[0] for rule in self.rules for text in rule.match})

    def wants(self, module_name: str) -> bool:
        """Whether a rule could have a target in that module."""
        return any(matches(text, module_name) for text in self._module_patterns)

    def imported(self, module: ModuleType) -> bool:
        """Attach what the rules name in a module. Whether there was anything that others may hold, too."""
        self._modules[module.__name__] = module
        bound_before, taken_before = len(self._bound), len(self._taken)
        found = {
            (index, thing.label): thing
            for index, rule in enumerate(self.rules)
            for text in rule.match
            if matches(text.partition(":")[0], module.__name__)
            for thing in functions.find(module, text)
        }
        held = functions.held_elsewhere([thing for thing in found.values() if isinstance(thing, Target)])
        for (index, _), thing in found.items():
            holder = held.get(id(thing.function)) if isinstance(thing, Target) else None
            self._attach(index, self.rules[index], thing, holder)
        functions.rebind(self._bound[bound_before:])
        return len(self._taken) > taken_before

    def undo(self) -> None:
        """Take every probe off, last first."""
        functions.undo_all(self._undos)
        # Also the names that modules imported meanwhile have bound.
        functions.rebind((wrapped, original) for original, wrapped in self._bound)
        self._bound.clear()

    def _attach(self, index: int, rule: FunctionRule, found: Target | Unreachable, holder: str | None) -> None:
        if any(_excludes(text, found.label) for text in rule.exclude):
            return
        if isinstance(found, Unreachable):
            self._found[index].setdefault(found.label, Verdict(rule.text, "unreachable", found.label, found.why))
            return
        owner = self._taken.get(found.label)
        if owner is not None and owner != index:
            why = f"{self.rules[owner].text} has it"
            self._found[index].setdefault(found.label, Verdict(rule.text, "attached", found.label, why))
            return
        site = functions.site_of(found.function, name=rule.name, kind=rule.kind, device=rule.device)
        self._taken[found.label] = index
        existing = getattr(found.function, "__instrument__", None)
        if isinstance(existing, Site):
            why = f"its own decorator names it {existing.name!r}"
            self._found[index].setdefault(found.label, Verdict(rule.text, "attached", found.label, why))
            return
        framework = getattr(found.function, "__instrument_framework__", None)
        if isinstance(framework, str):
            why = f"frameworks: {framework} has it"
            self._found[index].setdefault(found.label, Verdict(rule.text, "attached", found.label, why))
            return
        try:
            wrapped, undo = functions.attach(found, site, self._recorder)
        except Exception as error:  # a metaclass or module of the host that lets nothing be set
            why = f"it cannot be replaced: {type(error).__name__}: {error}"
            self._found[index].setdefault(found.label, Verdict(rule.text, "unreachable", found.label, why))
            return
        self._undos.append(undo)
        if isinstance(found.owner, ModuleType):
            self._bound.append((found.function, wrapped))
        state, why = "attached", ""
        if holder is not None:
            state = "partly"
            why = f"a {holder} held it before we came, calls through that are not seen; use @profiled in the source"
        self._found[index][found.label] = Verdict(rule.text, state, found.label, why)

    def verdicts(self) -> list[Verdict]:
        """What became of every rule up to now, in the order of the profile."""
        verdicts: list[Verdict] = []
        for index, rule in enumerate(self.rules):
            found = list(self._found[index].values())
            verdicts.extend(found or [self._missed(rule)])
        return verdicts

    def _missed(self, rule: FunctionRule) -> Verdict:
        names = [text.partition(":")[0] for text in rule.match]
        there = [module for name, module in self._modules.items() if any(matches(text, name) for text in names)]
        if not there:
            main = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", None)
            if main in names:
                why = f"{main} runs as __main__, whose functions no import hook can see; use @profiled there"
                return Verdict(rule.text, "unreachable", why=why)
            return Verdict(rule.text, "waiting", why=f"{' and '.join(names)} not imported")
        nearest = self._nearest(rule.match, there)
        return Verdict(rule.text, "nothing", why="matched no function" + (f"; nearest is {nearest}" if nearest else ""))

    @staticmethod
    def _nearest(wanted: Iterable[str], modules: Sequence[ModuleType]) -> str | None:
        for text in wanted:
            known = functions.unmatched(text, modules)
            close = difflib.get_close_matches(text, known, n=1, cutoff=0.6)
            if close:
                return close[0]
        return None


def _excludes(text: str, label: str) -> bool:
    module, _, qualname = label.partition(":")
    return matches(text.partition(":")[0], module) and matches(text.partition(":")[2], qualname)
