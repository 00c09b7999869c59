"""The function rules of a profile: which targets each has matched, and how they are made to record.

The first rule that matches a target has it. A function that carries a probe already, by `@profiled` or of a framework,
keeps that one. What else holds a function when its probe comes is changed with it; what cannot be changed is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrument.instrumentors import arguments, functions, holders, targets
from instrument.instrumentors.functions import Probe
from instrument.instrumentors.lineages import Lineage, is_reached, subclasses
from instrument.instrumentors.request_keys import KeyReader
from instrument.instrumentors.targets import Target, Unreachable, matches
from instrument.instrumentors.verdict import RECORDING, Verdict
from instrument.profile.model import FunctionRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recorder.wrapping import Passes, Results
from instrument.recording.generations import OPERATION, operation_of
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.main_module import MAINS, is_main, names_of, script_name, tracer_of_main
from instrument.runtime.unpatched import RLock

if TYPE_CHECKING:
    from instrument.instrumentors.argument_watch import ArgumentWatch

logger = logging.getLogger("instrument")


def _argument_watch(wants: Callable[[str], bool]) -> ArgumentWatch:
    from instrument.instrumentors.argument_watch import ArgumentWatch  # for `instrument init` alone

    return ArgumentWatch(wants)


class Functions:
    """The function rules of one session at work."""

    def __init__(self, rules: Sequence[FunctionRule], recorder: Recorder = RECORDER, watches: bool = False) -> None:
        self._recorder = recorder
        self.watch = _argument_watch(self.wants) if watches else None
        self._probes: dict[Probe, FunctionRule] = {}
        self._olds, self._made = holders.Kept(), holders.Kept()  # the host's containers, and what stands for each
        self._modules: dict[str, ModuleType] = {}
        self._lineages: dict[tuple[int, str], Lineage] = {}  # by identity of the class, and attribute
        self._lock = RLock()  # classes are defined on threads of the host
        self._take_on(rules)

    def _take_on(self, rules: Sequence[FunctionRule]) -> None:
        self.rules: tuple[FunctionRule, ...] = tuple(rules)
        self._found: dict[int, dict[str, Verdict]] = {i: {} for i in range(len(self.rules))}
        self._taken: dict[str, int] = {}
        self._wanting: dict[tuple[int, str], set[int]] = {}  # the rules that want each lineage
        self._counted = {label for rule in self.rules if rule.counted for label in rule.match}
        self._module_patterns = sorted({text.partition(":")[0] for rule in self.rules for text in rule.match})

    def change(self, rules: Sequence[FunctionRule], modules: Iterable[ModuleType]) -> None:
        """Take on other rules: what the same probe serves stays as it is, the rest is undone or attached.

        `modules` are those that are imported now.
        """
        with self._lock:
            self._change(rules, modules)

    def _change(self, rules: Sequence[FunctionRule], modules: Iterable[ModuleType]) -> None:
        before = {label: verdict for found in self._found.values() for label, verdict in found.items() if verdict.site}
        self._take_on(rules)
        before_lineages, self._lineages = self._lineages, {}
        modules = [module for module in modules if any(map(self.wants, names_of(module)))]
        self._modules = {names_of(module)[-1]: module for module in modules}
        owners: dict[str, int] = {}
        for module in modules:
            for index, label in sorted(self._selected(module), key=lambda found: found[0]):
                owners.setdefault(label, index)
        stay: dict[Probe, FunctionRule] = {}
        gone = []
        for probe, rule in self._probes.items():
            label = probe.target.label
            owner = owners.get(label)
            if (
                owner is None
                or not _serves(rule, self.rules[owner])
                or probe.site.kind != self._kind(label, self.rules[owner])
                or self._is_in_lineage(probe, before_lineages) != self._is_in_lineage(probe, self._lineages)
            ):
                gone.append(probe)
                continue
            stay[probe] = self.rules[owner]
            self._taken[label] = owner
            known = before.get(label) or Verdict("", "attached", label, site=probe.site)
            self._found[owner][label] = replace(known, rule=self.rules[owner].text)
        # In this order, for a fork in between: the child must know of every probe that is there.
        self._take_off(gone, restore=not stay)
        self._probes = stay
        for key, lineage in before_lineages.items():
            if key in self._lineages:
                self._lineages[key] = lineage
            else:
                lineage.end()
        for module in modules:
            self.imported(module)

    @staticmethod
    def _is_in_lineage(probe: Probe, lineages: Mapping[tuple[int, str], Lineage]) -> bool:
        return any(lineage.holds(probe.target.owner, probe.target.attribute) for lineage in lineages.values())

    def probed(self) -> Mapping[str, Any]:
        """What carries a probe: labels, with the site that each records as."""
        return {probe.target.label: probe.site for probe in self._probes}

    def sites_of(self, label: str) -> set[Site]:
        """What calls of a function are recorded as."""
        found = (targets.get(label) for targets in list(self._found.values()))
        return {verdict.site for verdict in found if verdict is not None and verdict.site is not None}

    def wants(self, module_name: str) -> bool:
        """Whether a rule could have a target in that module."""
        return any(matches(text, module_name) for text in self._module_patterns)

    def imported(self, module: ModuleType) -> bool:
        """Attach what the rules name in a module. Whether there was anything that others may hold, too."""
        with self._lock:
            return self._imported(module)

    def _imported(self, module: ModuleType) -> bool:
        self._modules[names_of(module)[-1]] = module
        attachable = list(self._attachable(self._selected(module)))
        shared = [target for _, target in attachable if functions.is_held_elsewhere(target)]
        # Looked for before the probes are made, which hold the functions, too.
        ours = (part for probe in self._probes for part in probe.parts) if shared else ()
        swap = holders.Swap((target.function for target in shared), ours)
        probes = {id(target): self._attach(index, target) for index, target in attachable}
        shown = holders.Kept(probe.wrapped if (probe := probes[id(target)]) else target.function for target in shared)
        escaped = swap.to(shown)
        self._olds.extend(swap.olds)
        self._made.extend(swap.made)
        for index, target in attachable:
            where = escaped.get(id(target.function))
            if where and probes[id(target)] and any(target is one for one in shared):
                self._note_escaped(index, target, where)
        return any(probes.values())

    def undo(self) -> None:
        """Take every probe off, last first, wherever it has got to meanwhile.

        What cannot be taken out of where it is behaves as the bare function from now on, and is named in the log.
        """
        with self._lock:
            lineages, self._lineages = self._lineages, {}
            for lineage in lineages.values():
                lineage.end()
            probes, self._probes = list(self._probes), {}
            self._take_off(probes, restore=True)

    def after_fork_in_child(self) -> None:
        """Replace a lock that another thread of the parent may have held."""
        self._lock = RLock()
        if self.watch is not None:
            self.watch.clear()

    def detach(self, site: Site) -> Callable[[], None] | None:
        """Take the probes of a site off for a while; gives what puts them on again, None where there are none.

        A copy of one that cannot be changed, such as a local variable of a call that runs, goes on calling it.
        """
        probes = [probe for probe in self._probes if probe.site is site and probe.is_set]
        for probe in probes:
            probe.undo()
            if functions.is_still_held(probe):
                holders.Swap(holders.Kept([probe.wrapped])).to(holders.Kept([probe.target.function]))
        return partial(self._put_on, probes) if probes else None

    def _put_on(self, probes: Sequence[Probe]) -> None:
        """Put probes on again that are off for a while, and that nobody has given up since."""
        for probe in probes:
            if probe.is_set or probe not in self._probes:
                continue
            swap = holders.Swap(holders.Kept([probe.target.function]), probe.parts)
            probe.set()
            swap.to(holders.Kept([probe.wrapped]))

    def _take_off(self, probes: Sequence[Probe], *, restore: bool) -> None:
        """Take these off; where no other is left, `restore` the host's own containers, too."""
        for probe in reversed(probes):
            try:
                probe.undo()
            except Exception as fault:
                FAULTS.note("way back of a probe", fault)
            self._recorder.retire(probe.wrapped)
        left = [probe for probe in probes if functions.is_still_held(probe)]
        made, olds = (self._made, self._olds) if restore else ((), ())
        try:
            swap = holders.Swap(holders.Kept([*(probe.wrapped for probe in left), *made]))
            escaped = swap.to(holders.Kept([*(probe.target.function for probe in left), *olds]))
        except Exception as fault:
            FAULTS.note("way back of a probe", fault)
            escaped = {}
        for probe in left:
            for words in escaped.get(id(probe.wrapped), ()):
                logger.info("the probe of %s is off; %s still holds what it has left", probe.target.label, words)
        if restore:
            self._olds.clear()
            self._made.clear()

    def _selected(self, module: ModuleType) -> dict[tuple[int, str], Target | Unreachable]:
        """What the rules name in a module, and below its classes, by index of the rule and label."""
        selected: dict[tuple[int, str], Target | Unreachable] = {}
        for index, rule in enumerate(self.rules):
            for text in rule.match:
                for name in _called_by(text, module):
                    found = list(targets.find(module, text, name))
                    if text.endswith(targets.SUBCLASSES):
                        found += [thing for one in found for thing in self._overrides(index, one)]
                    selected.update(((index, thing.label), thing) for thing in found if not _is_excluded(rule, thing))
        return selected

    def _overrides(self, index: int, thing: Target | Unreachable) -> Iterator[Target | Unreachable]:
        """What overrides a method in subclasses. The lineage of the method is made where it is new."""
        if not isinstance(thing, Target) or not holders.isinstance_of(thing.owner, type):
            return
        key = (id(thing.owner), thing.attribute)
        if key not in self._lineages:
            lineage = self._lineages[key] = Lineage(thing.owner, thing.attribute, self._subclassed)
            for target in [probe.target for probe in self._probes]:
                if lineage.holds(target.owner, target.attribute):
                    lineage.join(target.owner)
        self._wanting.setdefault(key, set()).add(index)
        for cls in self._lineages[key].overrides():
            yield from targets.override(cls, thing.attribute)

    def _subclassed(self, cls: type[Any]) -> None:
        """A class has been defined below one whose overrides a rule wants, or is found to have been."""
        with self._lock:
            found = {
                (index, thing.label): thing
                for index, rule in enumerate(self.rules)
                for attribute in self._wanted_below(index, cls)
                for thing in targets.override(cls, attribute)
                if not _is_excluded(rule, thing)
            }
            for index, target in list(self._attachable(found)):
                self._attach(index, target)

    def _wanted_below(self, index: int, cls: type[Any]) -> Iterator[str]:
        """The methods that a class defines itself and that a rule wants there, as overrides of what it names."""
        for key, lineage in self._lineages.items():
            is_below = cls is not lineage.base and lineage.holds(cls, lineage.attribute)
            if is_below and index in self._wanting.get(key, ()) and lineage.attribute in holders.type_namespace(cls):
                yield lineage.attribute

    def _attachable(self, selected: Mapping[tuple[int, str], Target | Unreachable]) -> Iterator[tuple[int, Target]]:
        """The targets that are to get a probe now, with the rule that each belongs to; what became of the others."""
        labels: dict[tuple[int, int], str] = {}
        for (index, label), thing in selected.items():
            if isinstance(thing, Unreachable):
                self._tell(index, "unreachable", label, thing.why)
                continue
            owner = self._taken.setdefault(label, index)
            if owner != index:
                self._tell(index, "attached", label, f"{self.rules[owner].text} has it")
                continue
            framework = getattr(thing.function, "__instrument_framework__", None)
            if isinstance(framework, str):
                self._tell(index, "attached", label, f"frameworks: {framework} has it")
                continue
            existing = targets.site_on(thing.function) or self._site_inside(thing)
            if existing is not None:
                ours = [probe.target.label for probe in self._probes if probe.wrapped is thing.function]
                why = (
                    f"it is the same function as {ours[0]}" if ours else f"its own decorator names it {existing.name!r}"
                )
                self._tell(index, "attached", label, why, existing)
                continue
            # A class that inherits a function gets a probe of its own; a second name for the same thing does not.
            first = labels.setdefault((id(thing.function), id(thing.owner)), label)
            if first != label:
                self._tell(index, "attached", label, f"it is the same function as {first}")
                continue
            yield index, thing

    def _site_inside(self, target: Target) -> Site | None:
        """The site of the target's own probe, around which somebody has put a function since (`functools.wraps`)."""
        probes = {id(probe.wrapped): probe for probe in self._probes if probe.target.label == target.label}
        inner: Any = target.function
        for _ in range(targets.INSIDE if probes else 0):
            inner = (holders.own_names(inner) or {}).get("__wrapped__")
            if id(inner) in probes:
                return probes[id(inner)].site
        return None

    def _attach(self, index: int, target: Target) -> Probe | None:
        rule = self.rules[index]
        site = targets.site_of(
            target.function,
            name=target.filled_in(rule.name) if rule.name else target.name,
            kind=self._kind(target.label, rule),
            device=rule.device,
            phase=rule.phase,
            min_ns=rule.min_ns,
        )
        if rule.gen_ai:
            site = replace(site, attributes=(*site.attributes, (OPERATION, operation_of(""))))
        place = rule.place or rule.text
        attributes, missing = (
            arguments.reader(target.function, rule.attributes, place) if rule.attributes else (None, [])
        )
        results: Results | None = None
        if rule.key or rule.batch:
            keys = KeyReader(target.function, rule)
            missing += keys.missing
            attributes, results = keys.with_attributes(attributes), keys.of_result
        elif self.watch is not None:
            attributes, results = self.watch.of(target.function, target.label)
        try:
            probe = Probe(target, site, self._recorder, attributes, self._passes(target), results)
            probe.set()
        except Exception as error:  # a metaclass or module of the host that lets nothing be set
            why = f"it cannot be replaced: {type(error).__name__}: {error}"
            self._tell(index, "unreachable", target.label, why)
            return None
        self._probes[probe] = rule
        if results is not None and self.watch is None and self._recorder.shapes.get(site) == "generator":
            missing += ["what a generator gives in the end is no result that has keys"]
        why = "; ".join(filter(None, [target.note, *missing]))
        state = "partly" if missing else "attached"
        self._found[index][target.label] = Verdict(rule.text, state, target.label, why, site)
        return probe

    def _passes(self, target: Target) -> Passes | None:
        """What tells the calls that another probe of the same lineage records, where the target is of one."""
        for lineage in self._lineages.values():
            if lineage.holds(target.owner, target.attribute):
                if target.owner is lineage.base:
                    lineage.watch()
                return lineage.join(target.owner)
        return None

    def _kind(self, label: str, rule: FunctionRule) -> str:
        return "step" if rule.kind == "op" and label in self._counted else rule.kind

    def _tell(self, index: int, state: str, label: str, why: str, site: Site | None = None) -> None:
        self._found[index].setdefault(label, Verdict(self.rules[index].text, state, label, why, site))

    def _note_escaped(self, index: int, target: Target, where: Sequence[str]) -> None:
        held = " and ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        why = f"{held} holds it as it was and cannot be changed, calls through that are not seen"
        why = "; ".join(filter(None, [why, self._found[index][target.label].why]))
        self._found[index][target.label] = replace(self._found[index][target.label], state="partly", why=why)

    def verdicts(self) -> list[Verdict]:
        """What became of every rule up to now, in the order of the profile."""
        with self._lock:
            for lineage in list(self._lineages.values()):
                for cls in list(lineage.overrides()):
                    self._subclassed(cls)  # one whose base does not tell of it
            verdicts: list[Verdict] = []
            for index, rule in enumerate(self.rules):
                found = [self._with_overrides(index, verdict) for verdict in self._found[index].values()]
                verdicts.extend([*found, *self._missed_of_main(rule, index)] if found else [self._missed(rule)])
            return verdicts

    def _with_overrides(self, index: int, verdict: Verdict) -> Verdict:
        """With what overrides the method in subclasses and carries no probe, where a rule names the one method."""
        rule = self.rules[index]
        probe = next((probe for probe in self._probes if probe.target.label == verdict.target), None)
        if verdict.state not in RECORDING or probe is None or probe.target.label not in rule.match:
            return verdict
        owner, attribute = probe.target.owner, probe.target.attribute
        if not holders.isinstance_of(owner, type) or attribute in ("__init__", "__init_subclass__"):
            return verdict
        labels = [
            targets.override_label(cls, attribute)
            for cls in subclasses(owner)
            if attribute in holders.type_namespace(cls) and not is_reached(cls, attribute)
        ]
        missed = [label for label in sorted(labels) if not any(_excludes(text, label) for text in rule.exclude)]
        if not missed:
            return verdict
        shown = ", ".join(missed[:3]) + (f" and {len(missed) - 3} more" if len(missed) > 3 else "")
        why = f"not seen: {shown}, which overrid{'es' if len(missed) == 1 else 'e'} it; "
        why += f"{verdict.target}{targets.SUBCLASSES} takes subclasses, too"
        return replace(verdict, state="partly", why="; ".join(filter(None, [verdict.why, why])))

    def _missed_of_main(self, rule: FunctionRule, index: int) -> Iterator[Verdict]:
        """Yield a verdict for each function of the main program that a rule names and that was not found."""
        for text in rule.match:
            if text.partition(":")[0] in MAINS and "*" not in text and text not in self._found[index]:
                yield replace(self._missed(replace(rule, match=(text,))), target=text)

    def _missed(self, rule: FunctionRule) -> Verdict:
        names = list(dict.fromkeys(text.partition(":")[0] for text in rule.match))
        there = [module for module in self._modules.values() if any(_called_by(text, module) for text in rule.match)]
        if not there and set(names) <= set(MAINS):
            why = "__main__ is the program that runs; instrument check P -- script.py runs one"
            return Verdict(rule.text, "waiting", why=why)
        if not there:
            why = f"{' and '.join(names)} not imported"
            if (script := script_name()) in names:
                why += f", but run as the program: a rule calls it __main__, not {script}"
            return Verdict(rule.text, "waiting", why=why)
        if main := next((module for module in there if is_main(module) and self._defined_unseen(rule, module)), None):
            own = names_of(main)[0]
            why = "__main__" if own == "__main__" else f"{own} runs as __main__, and"
            why += " defined it where nobody looked; start the program with `instrument run -- script.py`, or use "
            why += "@profiled, or put it into a module of its own"
            return Verdict(rule.text, "unreachable", why=why)
        if set(names) <= set(MAINS) and (tracer := tracer_of_main()):
            why = (
                f"`-m {tracer}` traces the program, which two can from Python 3.12 on; run it without, or use @profiled"
            )
            return Verdict(rule.text, "unreachable", why=why)
        from instrument.profile.document import nearest

        meant = next(filter(None, (nearest(text, targets.unmatched(text, there)) for text in rule.match)), "")
        return Verdict(rule.text, "not found", why="matched no function" + (f"; nearest is {meant}" if meant else ""))

    def _defined_unseen(self, rule: FunctionRule, module: ModuleType) -> bool:
        """Whether a module has by now what the rule names, without having told of it."""
        found = (thing for text in rule.match for thing in targets.find(module, text))
        return any(isinstance(thing, Target) for thing in found)


def _serves(rule: FunctionRule, other: FunctionRule) -> bool:
    """Whether two rules make the very same probe of a target."""
    return replace(rule, match=other.match, exclude=other.exclude, text=other.text) == other


def _called_by(text: str, module: ModuleType) -> tuple[str, ...]:
    """The name by which a pattern means a module; nothing if it does not."""
    return tuple(name for name in names_of(module) if matches(text.partition(":")[0], name))[:1]


def _is_excluded(rule: FunctionRule, thing: Target | Unreachable) -> bool:
    return any(_excludes(text, thing.label) for text in rule.exclude)


def _excludes(text: str, label: str) -> bool:
    module, _, qualname = label.partition(":")
    return matches(text.partition(":")[0], module) and matches(text.partition(":")[2], qualname)
