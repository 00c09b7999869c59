"""The function rules of a profile: which targets each has matched, and how they are made to record.

The first rule that matches a target has it. A function that carries a probe already, for instance by `@profiled`,
keeps that one.
"""

from __future__ import annotations

import difflib
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from instrument.probes import functions
from instrument.probes.functions import Target, Undo, Unreachable, matches
from instrument.probes.verdict import Verdict
from instrument.profile import FunctionRule
from instrument.recorder import RECORDER, Recorder
from instrument.spans import Site


@dataclass(frozen=True, slots=True)
class _Probe:
    """One function that was replaced by `wrapped`. `bound` is a module's function and what stands for it now."""

    label: str
    rule: FunctionRule
    site: Site
    undo: Undo
    wrapped: Any
    bound: tuple[Any, Any] | None

    def serves(self, rule: FunctionRule) -> bool:
        """Whether a rule would make the very same probe."""
        return (rule.name, rule.kind, rule.device) == (self.rule.name, self.rule.kind, self.rule.device)


class Functions:
    """The function rules of one session at work."""

    def __init__(self, rules: Sequence[FunctionRule], recorder: Recorder = RECORDER) -> None:
        self._recorder = recorder
        self._probes: list[_Probe] = []
        self._undone: list[tuple[str, weakref.ref[Any]]] = []
        self._modules: dict[str, ModuleType] = {}
        self._take_on(rules)

    def _take_on(self, rules: Sequence[FunctionRule]) -> None:
        self.rules: tuple[FunctionRule, ...] = tuple(rules)
        self._found: dict[int, dict[str, Verdict]] = {i: {} for i in range(len(self.rules))}
        self._taken: dict[str, int] = {}
        self._module_patterns = sorted({text.partition(":")[0] for rule in self.rules for text in rule.match})

    def change(self, rules: Sequence[FunctionRule], modules: Iterable[ModuleType]) -> None:
        """Take on other rules: what the same probe serves stays as it is, the rest is undone or attached.

        `modules` are those that are imported now.
        """
        before = {label: verdict for found in self._found.values() for label, verdict in found.items() if verdict.site}
        self._take_on(rules)
        modules = [module for module in modules if self.wants(module.__name__)]
        self._modules = {module.__name__: module for module in modules}
        owners: dict[str, int] = {}
        for module in modules:
            for index, label in sorted(self._selected(module), key=lambda found: found[0]):
                owners.setdefault(label, index)
        stay, gone = [], []
        for probe in self._probes:
            owner = owners.get(probe.label)
            if owner is None or not probe.serves(self.rules[owner]):
                gone.append(probe)
                continue
            stay.append(probe)
            self._taken[probe.label] = owner
            known = before.get(probe.label) or Verdict("", "attached", probe.label, site=probe.site)
            self._found[owner][probe.label] = replace(known, rule=self.rules[owner].text)
        # In this order, for a fork in between: the child must know of every probe that is there.
        self._take_off(gone)
        self._probes = stay
        held = [(probe.label, weakref.ref(getattr(probe.wrapped, "__func__", probe.wrapped))) for probe in gone]
        self._undone = [(label, wrapped) for label, wrapped in [*self._undone, *held] if wrapped() is not None]
        for module in modules:
            self.imported(module)

    def lingering(self) -> list[str]:
        """What was undone because its rule is gone, while something else still holds the probe and calls it."""
        return sorted({label for label, wrapped in self._undone if wrapped() is not None})

    def probed(self) -> Mapping[str, Any]:
        """What carries a probe: labels, with the site that each records as."""
        return {probe.label: probe.site for probe in self._probes}

    def wants(self, module_name: str) -> bool:
        """Whether a rule could have a target in that module."""
        return any(matches(text, module_name) for text in self._module_patterns)

    def imported(self, module: ModuleType) -> bool:
        """Attach what the rules name in a module. Whether there was anything that others may hold, too."""
        self._modules[module.__name__] = module
        probes_before, taken_before = len(self._probes), len(self._taken)
        found = self._selected(module)
        held = functions.held_elsewhere([thing for thing in found.values() if isinstance(thing, Target)])
        for (index, _), thing in found.items():
            holder = held.get(id(thing.function)) if isinstance(thing, Target) else None
            self._attach(index, self.rules[index], thing, holder)
        functions.rebind(probe.bound for probe in self._probes[probes_before:] if probe.bound is not None)
        return len(self._taken) > taken_before

    def _selected(self, module: ModuleType) -> dict[tuple[int, str], Target | Unreachable]:
        """What the rules name in a module, by index of the rule and label."""
        return {
            (index, thing.label): thing
            for index, rule in enumerate(self.rules)
            for text in rule.match
            if matches(text.partition(":")[0], module.__name__)
            for thing in functions.find(module, text)
            if not any(_excludes(text, thing.label) for text in rule.exclude)
        }

    def undo(self) -> None:
        """Take every probe off, last first."""
        self._take_off(self._probes)
        self._probes = []

    @staticmethod
    def _take_off(probes: Sequence[_Probe]) -> None:
        functions.undo_all([probe.undo for probe in probes])
        # Also the names that modules imported meanwhile have bound.
        bound = [probe.bound for probe in probes if probe.bound is not None]
        functions.rebind((wrapped, original) for original, wrapped in bound)

    def _attach(self, index: int, rule: FunctionRule, found: Target | Unreachable, holder: str | None) -> None:
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
            if found.label not in self._found[index]:
                owners = (probe.label for probe in self._probes if probe.site is existing)
                alias = next(owners, None)
                why = f"{alias} is the same" if alias else f"its own decorator names it {existing.name!r}"
                self._found[index][found.label] = Verdict(rule.text, "attached", found.label, why, existing)
            return
        try:
            wrapped, undo = functions.attach(found, site, self._recorder)
        except Exception as error:  # a metaclass or module of the host that lets nothing be set
            why = f"it cannot be replaced: {type(error).__name__}: {error}"
            self._found[index].setdefault(found.label, Verdict(rule.text, "unreachable", found.label, why))
            return
        bound = (found.function, wrapped) if isinstance(found.owner, ModuleType) else None
        self._probes.append(_Probe(found.label, rule, site, undo, wrapped, bound))
        state, why = "attached", ""
        if holder is not None:
            state = "partly"
            why = f"a {holder} held it before we came, calls through that are not seen; use @profiled in the source"
        self._found[index][found.label] = Verdict(rule.text, state, found.label, why, site)

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
