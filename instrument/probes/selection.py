"""The profile's rules at work in this process: what each has matched so far, and what it cannot reach.

Targets are found when their module is imported, before the importer can bind their names, or at once where the module
is there already. The first rule that matches a target has it. A function that carries a probe already, for instance
by `@profiled`, keeps that one.
"""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from instrument import imports
from instrument.errors import FAULTS
from instrument.probes import functions
from instrument.probes.copies import Copies, has_device
from instrument.probes.functions import Target, Undo, Unreachable, matches
from instrument.probes.layers import Layers
from instrument.profile import FunctionRule, Profile
from instrument.recorder import RECORDER, Recorder
from instrument.spans import Site


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


class Selection:
    """Attaches the probes of a profile and takes them off again. One for each session.

    `late` names the modules with targets that had been imported before.
    """

    def __init__(self, profile: Profile, recorder: Recorder = RECORDER) -> None:
        self.profile = profile
        self._recorder = recorder
        self._lock = threading.RLock()
        self._undos: list[Undo] = []
        self._bound: list[tuple[Any, Any]] = []  # functions of modules and what stands for them now
        self._found: dict[int, dict[str, Verdict]] = {i: {} for i in range(len(profile.functions))}
        self._taken: dict[str, int] = {}
        self._modules: dict[str, ModuleType] = {}
        self._module_patterns = sorted({text.partition(":")[0] for rule in profile.functions for text in rule.match})
        self._layers = Layers(profile.layers, recorder) if profile.layers else None
        self._copies = Copies(profile.copies, recorder) if profile.copies else None
        self._torch: ModuleType | None = None
        self.late: list[str] = []

    def attach(self) -> Undo:
        """Attach to what is imported, watch for the rest; returns the way back."""
        loaded = [module for name, module in functions.loaded_modules() if self.wants(name)]
        self._undos.append(imports.install(self.wants, self.imported))
        for module in loaded:
            before = len(self._taken)
            self.imported(module)
            if len(self._taken) > before:
                self.late.append(module.__name__)
        return self.undo

    def after_fork_in_child(self) -> None:
        """Replace a lock that another thread of the parent may have held."""
        self._lock = threading.RLock()

    def undo(self) -> None:
        """Take every probe off, last first."""
        with self._lock:
            while self._undos:
                try:
                    self._undos.pop()()
                except Exception as fault:
                    FAULTS.note("way back of a probe", fault)
            # Also the names that modules imported meanwhile have bound.
            functions.rebind((wrapped, original) for original, wrapped in self._bound)
            self._bound.clear()

    def wants(self, module_name: str) -> bool:
        """Whether a rule could have a target in that module."""
        if module_name == "torch":
            return self._layers is not None or self._copies is not None or self._is_named(module_name)
        return self._is_named(module_name)

    def _is_named(self, module_name: str) -> bool:
        return any(matches(text, module_name) for text in self._module_patterns)

    def imported(self, module: ModuleType) -> None:
        """A module's code has run: attach what the rules name in it."""
        with self._lock:
            self._modules[module.__name__] = module
            bound_before = len(self._bound)
            if module.__name__ == "torch":
                self._attach_torch(module)
            found = {
                (index, thing.label): thing
                for index, rule in enumerate(self.profile.functions)
                for text in rule.match
                if matches(text.partition(":")[0], module.__name__)
                for thing in functions.find(module, text)
            }
            held = functions.held_elsewhere([thing for thing in found.values() if isinstance(thing, Target)])
            for (index, _), thing in found.items():
                holder = held.get(id(thing.function)) if isinstance(thing, Target) else None
                self._attach_function(index, self.profile.functions[index], thing, holder)
            functions.rebind(self._bound[bound_before:])

    def _attach_function(self, index: int, rule: FunctionRule, found: Target | Unreachable, holder: str | None) -> None:
        if any(_excludes(text, found.label) for text in rule.exclude):
            return
        if isinstance(found, Unreachable):
            self._found[index].setdefault(found.label, Verdict(rule.text, "unreachable", found.label, found.why))
            return
        owner = self._taken.get(found.label)
        if owner is not None and owner != index:
            why = f"{self.profile.functions[owner].text} has it"
            self._found[index].setdefault(found.label, Verdict(rule.text, "attached", found.label, why))
            return
        site = functions.site_of(found.function, name=rule.name, kind=rule.kind, device=rule.device)
        self._taken[found.label] = index
        existing = getattr(found.function, "__instrument__", None)
        if isinstance(existing, Site):
            why = f"its own decorator names it {existing.name!r}"
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

    def _attach_torch(self, torch: ModuleType) -> None:
        if self._torch is torch:
            return
        self._torch = torch
        if self._layers is not None:
            self._undos.append(self._layers.attach(torch))
        if self._copies is not None and has_device(torch):
            self._undos.append(self._copies.attach(torch))

    # ---------------------------------------------------------------- what has been found

    def verdicts(self) -> list[Verdict]:
        """What became of every rule up to now, in the order of the profile."""
        with self._lock:
            verdicts: list[Verdict] = []
            for index, rule in enumerate(self.profile.functions):
                found = list(self._found[index].values())
                verdicts.extend(found or [self._missed(rule)])
            verdicts.extend(self._layer_verdicts())
            verdicts.extend(self._copy_verdicts())
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

    def _layer_verdicts(self) -> list[Verdict]:
        if self._layers is None:
            return []
        if self._torch is None:
            return [Verdict(rule.text, "waiting", why="torch not imported") for rule in self._layers.rules]
        verdicts = []
        known = self._layers.known_types()
        for rule, hits in zip(self._layers.rules, self._layers.hits, strict=True):
            unknown = [name for name in rule.types if name not in known]
            if hits:
                verdicts.append(Verdict(rule.text, "attached", f"{hits} layers"))
            elif rule.types and len(unknown) == len(rule.types):
                close = difflib.get_close_matches(unknown[0], known, n=1)
                why = f"no class of that name is defined: {', '.join(unknown)}"
                verdicts.append(Verdict(rule.text, "nothing", why=why + (f"; nearest is {close[0]}" if close else "")))
            else:
                verdicts.append(Verdict(rule.text, "waiting", why="no layer that it selects has run"))
        return verdicts

    def _copy_verdicts(self) -> list[Verdict]:
        if self._copies is None:
            return []
        if self._torch is None:
            return [Verdict(rule.text, "waiting", why="torch not imported") for rule in self._copies.rules]
        if not has_device(self._torch):
            why = "this torch is built without a device: no copy to or from one can happen"
            return [Verdict(rule.text, "waiting", why=why) for rule in self._copies.rules]
        return [
            Verdict(rule.text, "attached", f"{hits} copies")
            if hits
            else Verdict(rule.text, "waiting", why="no such copy was made")
            for rule, hits in zip(self._copies.rules, self._copies.hits, strict=True)
        ]


def _excludes(text: str, label: str) -> bool:
    module, _, qualname = label.partition(":")
    return matches(text.partition(":")[0], module) and matches(text.partition(":")[2], qualname)
