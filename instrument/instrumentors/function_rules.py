"""Find the functions that the profile's function rules select, and replace them by recording functions (probes).

A function belongs to the first rule that selects it. A function that is already recorded is not replaced again. A probe
replaces the function under all its names in modules and classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from instrument.instrumentors import function_patterns, profiled_functions
from instrument.instrumentors.function_patterns import Target, Unreachable, matches_pattern
from instrument.instrumentors.lineages import Lineage, all_subclasses, is_method_recorded
from instrument.instrumentors.profiled_functions import Instrumentor, Probe, undo_all
from instrument.instrumentors.references import (
    Kept,
    Name,
    Search,
    find_names_in_modules,
    instance_dict,
    is_own_object,
    isinstance_of,
    module_namespace,
    rebind_objects,
    type_namespace,
)
from instrument.instrumentors.request_keys import make_call_reader
from instrument.instrumentors.verdict import RECORDING, Verdict, suggest_nearest
from instrument.profile.model import FunctionRule
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.metric_definitions import OPERATION, operation_of_route
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import replace
from instrument.runtime.main_module import MAINS, is_main_module, list_names_of_module, script_name
from instrument.runtime.unpatched import RLock

if TYPE_CHECKING:
    from instrument.instrumentors.argument_watch import ArgumentWatch


class Functions(Instrumentor):
    """The instrumentor of a session's function rules."""

    def __init__(self, rules: Sequence[FunctionRule], recorder: Recorder = RECORDER, watches: bool = False) -> None:
        super().__init__(rules, recorder)
        self.watch: ArgumentWatch | None = None
        if watches:
            from instrument.instrumentors.argument_watch import ArgumentWatch  # for `instrument init` alone

            self.watch = ArgumentWatch(self.has_module_pattern)
        self._probes: dict[Probe, FunctionRule] = {}
        self._early: dict[int, Probe] = {}  # of functions that no module has a name for yet, by their identity
        self._pickling: list[profiled_functions.Undo] = []
        self._modules: dict[str, ModuleType] = {}
        self._lineages: dict[tuple[int, str], Lineage] = {}  # by identity of the class, and attribute
        self._lock = RLock()  # classes are defined on threads of the host
        self._set_rules(rules)

    def _set_rules(self, rules: Sequence[FunctionRule]) -> None:
        self.rules = tuple(rules)
        self._found: dict[int, dict[str, Verdict]] = {i: {} for i in range(len(self.rules))}
        self._taken: dict[str, int] = {}
        self._wanting: dict[tuple[int, str], set[int]] = {}  # the rules that want each lineage
        self._counted = {label for rule in self.rules if rule.counted for label in rule.match}
        self._module_patterns = sorted({text.partition(":")[0] for rule in self.rules for text in rule.match})

    def change_rules(self, rules: Sequence[FunctionRule], modules: Iterable[ModuleType]) -> None:
        """Apply other rules to the imported modules. Probes that are the same under the new rules remain."""
        with self._lock:
            self._change_rules(rules, modules)

    def _change_rules(self, rules: Sequence[FunctionRule], modules: Iterable[ModuleType]) -> None:
        before = {label: verdict for table in self._found.values() for label, verdict in table.items() if verdict.site}
        self._set_rules(rules)
        undo_all(self._undos)
        modules = list(modules)
        for module in modules if rules else ():
            self._watch_handler_registrations(module)
        before_lineages, self._lineages = self._lineages, {}
        modules = [module for module in modules if any(map(self.has_module_pattern, list_names_of_module(module)))]
        self._modules = {list_names_of_module(module)[-1]: module for module in modules}
        owners: dict[str, int] = {}
        for module in modules:
            for index, label in sorted(self._find_targets(module), key=lambda table: table[0]):
                owners.setdefault(label, index)
        stay: dict[Probe, FunctionRule] = {}
        obsolete = []
        for probe, rule in self._probes.items():
            label = probe.target.label
            owner = owners.get(label)
            second = rule if owner is None else self.rules[owner]
            if (
                owner is None
                or replace(rule, match=second.match, exclude=second.exclude, text=second.text) != second
                or probe.site.kind != self._find_span_kind(label, self.rules[owner])
                or self._is_in_lineage(probe, before_lineages) != self._is_in_lineage(probe, self._lineages)
            ):
                obsolete.append(probe)
                continue
            stay[probe] = self.rules[owner]
            self._taken[label] = owner
            known_verdict = before.get(label) or Verdict("", "attached", label, site=probe.site)
            self._found[owner][label] = replace(known_verdict, rule=self.rules[owner].text)
        # In this order, as a fork may happen in between: the child must know of every probe.
        self._remove_probes(obsolete)
        self._probes = stay
        for key, lineage in before_lineages.items():
            if key in self._lineages:
                self._lineages[key] = lineage
            else:
                undo_all(lineage.undos)
        for module in modules:
            self.attach_to(module)

    @staticmethod
    def _is_in_lineage(probe: Probe, lineages: Mapping[tuple[int, str], Lineage]) -> bool:
        return any(lineage.contains_method(probe.target.owner, probe.target.attribute) for lineage in lineages.values())

    def probes_by_name(self) -> Mapping[str, Any]:
        return {probe.target.label: probe.site for probe in self._probes}

    def find_sites(self, label: str) -> set[Site]:
        verdicts = (verdict_by_label.get(label) for verdict_by_label in list(self._found.values()))
        return {verdict.site for verdict in verdicts if verdict is not None and verdict.site is not None}

    def may_match(self, module_name: str) -> bool:
        return module_name in profiled_functions.SEAMS or self.has_module_pattern(module_name)

    def has_module_pattern(self, module_name: str) -> bool:
        return any(matches_pattern(text, module_name) for text in self._module_patterns)

    def attach_to(self, module: ModuleType) -> bool:
        with self._lock:
            self._watch_handler_registrations(module)
            return any(map(self.has_module_pattern, list_names_of_module(module))) and self._attach_to_targets(module)

    def _watch_handler_registrations(self, module: ModuleType) -> None:
        if list_names_of_module(module)[0] in profiled_functions.SEAMS:
            self._undos += profiled_functions.intercept_registrations(module, self._record_registered_handler)

    def _attach_to_targets(self, module: ModuleType) -> bool:
        self._modules[list_names_of_module(module)[-1]] = module
        attachable = list(self._pick_targets(self._find_targets(module)))
        shared = [target for _, target in attachable if profiled_functions.count_other_references(target) > 0]
        names = find_names_in_modules(target.function for target in shared)
        count = profiled_functions.count_other_references
        ref_counts = [(target, count(target) - _count_aliases(target, names)) for target in shared]
        # A target's own module or class refers to it, too.
        counts = {
            id(thing.function): count + 1 + (thing.raw is thing.function) for thing, count in ref_counts if count > 0
        }
        tied = [target for target, count in ref_counts if count > 0]
        raws = {id(target.raw) for target in tied}
        search = Search(
            Kept(target.function for target in tied), counts, lambda obj: id(obj) in raws or _is_sdk_object(obj)
        )
        probes: dict[int, tuple[int, Probe]] = {}
        for index, target in attachable:
            holders = search.others.get(id(target.function), ())
            is_early = id(target.function) in self._early
            if holders and not is_early and self._is_selected_by_module_wildcard(index, target):
                why = f"{_describe_references(holders)}, which may compare it; "
                why += "a rule that names its module without * records it"
                self._note_verdict(index, "unreachable", target.label, why)
            elif (probe := self._attach_target(index, target)) is not None:
                probes.setdefault(id(target.function), (index, probe))
        for owner, name, key in names:
            if key in probes and id(module_namespace(owner).get(name)) == key:
                module_namespace(owner)[name] = probes[key][1].wrapped
        for owner, name, key in search.in_classes:
            if key in probes:
                probes[key][1].attach_alias(owner, name)
        for key in probes.keys() & search.others.keys():
            self._note_references(*probes[key], search.others[key])
        return bool(probes)

    def _record_registered_handler(self, function: FunctionType) -> Any:
        module: Any = sys.modules.get(function.__module__)
        with self._lock:
            probe_of_function = next((probe for probe in self._probes if probe.target.function is function), None)
            if probe_of_function is not None or not self._undos or not isinstance_of(module, ModuleType):
                return function if probe_of_function is None else probe_of_function.wrapped
            selected = {}
            for index, rule in enumerate(self.rules):
                for text in rule.match:
                    for name in _match_module_name(text, module):
                        target = Target(module, function.__name__, None, function, name, function.__qualname__)
                        qualname = text.partition(":")[2].removesuffix(function_patterns.SUBCLASSES)
                        if matches_pattern(qualname, target.qualname) and not _is_excluded(rule, target):
                            selected[index, target.label] = target
            for index, target in list(self._pick_targets(selected)):
                self._found[index].pop(target.label, None)  # it was out of reach inside an object up to now
                if (probe := self._attach_target(index, target)) is not None:
                    self._early[id(function)] = probe
                    return probe.wrapped
            return function

    def undo(self) -> None:
        """Restore all functions. A wrapper that is still referenced only calls the original function."""
        with self._lock:
            super().undo()
            undo_all(self._pickling)
            lineages, self._lineages = self._lineages, {}
            for lineage in lineages.values():
                undo_all(lineage.undos)
            probes, self._probes = list(self._probes), {}
            self._remove_probes(probes)

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread may have locked at the fork."""
        self._lock = RLock()
        if self.watch is not None:
            self.watch.clear()

    def detach(self, site: Site) -> Callable[[], None] | None:
        """Restore a site's original functions under their names. Other references to a wrapper still record. Return a
        function that attaches the probes again, or None if the site has no probes."""
        probes = [probe for probe in self._probes if probe.site is site and probe.is_set]
        for probe in probes:
            probe.undo()
        rebind_objects((probe.wrapped, probe.target.function) for probe in probes)

        def reattach_probes() -> None:
            off = [probe for probe in probes if not probe.is_set and probe in self._probes]  # else the rules changed
            for probe in off:
                probe.attach()
            rebind_objects((probe.target.function, probe.wrapped) for probe in off if probe.target.raw is not None)

        return reattach_probes if probes else None

    def _remove_probes(self, probes: Sequence[Probe]) -> None:
        for probe in reversed(probes):
            FAULTS.attempt("way back of a probe", probe.undo)
            self._recorder.retire_wrapper(probe.wrapped)
        rebind_objects((probe.wrapped, probe.target.function) for probe in probes)
        self._early = {key: probe for key, probe in self._early.items() if probe not in set(probes)}

    def _find_targets(self, module: ModuleType) -> dict[tuple[int, str], Target | Unreachable]:
        selected: dict[tuple[int, str], Target | Unreachable] = {}
        for index, rule in enumerate(self.rules):
            for text in rule.match:
                for name in _match_module_name(text, module):
                    things = list(function_patterns.find_functions(module, text, name))
                    if text.endswith(function_patterns.SUBCLASSES):
                        things += [thing for base_thing in things for thing in self._find_overrides(index, base_thing)]
                    selected.update(((index, thing.label), thing) for thing in things if not _is_excluded(rule, thing))
        return selected

    def _find_overrides(self, index: int, thing: Target | Unreachable) -> Iterator[Target | Unreachable]:
        if not isinstance(thing, Target) or not isinstance_of(thing.owner, type):
            return
        key = (id(thing.owner), thing.attribute)
        if key not in self._lineages:
            lineage = self._lineages[key] = Lineage(thing.owner, thing.attribute, self._attach_overrides_of_class)
            for target in [probe.target for probe in self._probes]:
                if lineage.contains_method(target.owner, target.attribute):
                    lineage.add_class(target.owner)
        self._wanting.setdefault(key, set()).add(index)
        for cls in self._lineages[key].overriding_classes():
            yield from function_patterns.find_override_targets(cls, thing.attribute)

    def _attach_overrides_of_class(self, cls: type[Any]) -> None:
        with self._lock:
            names = type_namespace(cls)
            lineages = [
                (lineage, self._wanting.get(key, ()))
                for key, lineage in self._lineages.items()
                if cls is not lineage.base and lineage.contains_method(cls, lineage.attribute)
            ]
            selected = {
                (index, thing.label): thing
                for index, rule in enumerate(self.rules)
                for lineage, wanting in lineages
                if index in wanting and lineage.attribute in names
                for thing in function_patterns.find_override_targets(cls, lineage.attribute)
                if not _is_excluded(rule, thing)
            }
            for index, target in list(self._pick_targets(selected)):
                self._attach_target(index, target)

    def _pick_targets(self, selected: Mapping[tuple[int, str], Target | Unreachable]) -> Iterator[tuple[int, Target]]:
        labels: dict[tuple[int, int], str] = {}
        for (index, label), thing in selected.items():
            state, site = "attached", None
            if isinstance(thing, Unreachable):
                state, why = "unreachable", thing.why
            elif (owner := self._taken.setdefault(label, index)) != index:
                why = f"{self.rules[owner].text} has it"
            elif isinstance(framework := getattr(thing.function, "__instrument_framework__", None), str):
                why = f"frameworks: {framework} has it"
            elif site := function_patterns.read_own_site(thing.function) or self._find_wrapped_site(thing):
                ours = [probe.target.label for probe in self._probes if probe.wrapped is thing.function]
                why = f"it is the same function as {ours[0]}" if ours else f"its own decorator names it {site.name!r}"
            # A class that inherits a function gets a probe of its own; a second name of the same owner does not.
            elif (first := labels.setdefault((id(thing.function), id(thing.owner)), label)) != label:
                why = f"it is the same function as {first}"
            else:
                yield index, thing
                continue
            self._note_verdict(index, state, label, why, site)

    def _find_wrapped_site(self, target: Target) -> Site | None:
        probes = {id(probe.wrapped): probe for probe in self._probes if probe.target.label == target.label}
        inner: Any = target.function
        for _ in range(function_patterns.INSIDE if probes else 0):
            inner = (instance_dict(inner) or {}).get("__wrapped__")
            if id(inner) in probes:
                return probes[id(inner)].site
        return None

    def _attach_target(self, index: int, target: Target) -> Probe | None:
        early = self._early.get(id(target.function))
        if early is not None and early.target.label == target.label:
            del self._early[id(target.function)]
            early.target = target
            early.attach()
            return early
        rule = self.rules[index]
        name = target.fill_span_name(rule.name) if rule.name else target.span_name
        kind = self._find_span_kind(target.label, rule)
        options: Any = {"device": rule.device, "phase": rule.phase, "min_ns": rule.min_ns}
        site = function_patterns.make_site(target.function, name=name, kind=kind, **options)
        if rule.gen_ai:
            site = replace(site, attributes=(*site.attributes, (OPERATION, operation_of_route(""))))
        reader = make_call_reader(target.function, rule)
        attributes, results, missing = reader.of_call, reader.of_result, reader.missing
        if self.watch is not None and not (rule.key or rule.batch or rule.facts):
            attributes, results = self.watch.make_examiners(target.function, target.label)
        try:
            lineages = self._lineages.values()
            lineage = next((line for line in lineages if line.contains_method(target.owner, target.attribute)), None)
            if lineage is not None and target.owner is lineage.base:
                lineage.watch_new_subclasses()
            passes = None if lineage is None else lineage.add_class(target.owner)
            probe = Probe(target, site, self._recorder, attributes, passes, results)
            probe.attach()
        except Exception as error:  # a metaclass or module of the host that lets nothing be set
            why = f"it cannot be replaced: {type(error).__name__}: {error}"
            self._note_verdict(index, "unreachable", target.label, why)
            return None
        self._probes[probe] = rule
        if results is not None and self.watch is None and self._recorder.shapes.get(site) == "generator":
            missing += ["keys cannot be read from the value that a generator returns"]
        why = "; ".join(filter(None, [target.note, *missing]))
        state = "partly" if missing else "attached"
        self._found[index][target.label] = Verdict(rule.text, state, target.label, why, site)
        return probe

    def _find_span_kind(self, label: str, rule: FunctionRule) -> str:
        return "step" if rule.kind == "op" and label in self._counted else rule.kind

    def _note_verdict(self, index: int, state: str, label: str, why: str, site: Site | None = None) -> None:
        self._found[index].setdefault(label, Verdict(self.rules[index].text, state, label, why, site))

    def _is_selected_by_module_wildcard(self, index: int, target: Target) -> bool:
        texts = [text for text in self.rules[index].match if _matches_label(text, target.label)]
        return isinstance_of(target.owner, ModuleType) and all("*" in text.partition(":")[0] for text in texts)

    def _note_references(self, index: int, probe: Probe, users: Sequence[str]) -> None:
        if not self._pickling:
            self._pickling.append(profiled_functions.keep_functions_picklable())
        they = "it" if len(users) == 1 else "them"
        why = f"{_describe_references(users)}, and calls through {they} are not recorded: "
        why += "use @profiled where it is defined, or a rule for a function that it calls"
        verdict = self._found[index][probe.target.label]
        why = "; ".join(filter(None, [why, verdict.why]))
        self._found[index][probe.target.label] = replace(verdict, state="partly", why=why)

    def verdicts(self) -> list[Verdict]:
        with self._lock:
            for lineage in list(self._lineages.values()):
                for cls in list(lineage.overriding_classes()):
                    self._attach_overrides_of_class(cls)  # in case its base has not reported it
            verdicts: list[Verdict] = []
            for index, rule in enumerate(self.rules):
                rows = [self._add_overrides(index, verdict) for verdict in self._found[index].values()]
                of_main = [text for text in rule.match if text.partition(":")[0] in MAINS and "*" not in text]
                missing = [text for text in of_main if rows and text not in self._found[index]]
                rows += [
                    replace(self._explain_missing_functions(replace(rule, match=(text,))), target=text)
                    for text in missing
                ]
                verdicts += rows or [self._explain_missing_functions(rule)]
            return verdicts

    def _add_overrides(self, index: int, verdict: Verdict) -> Verdict:
        rule = self.rules[index]
        probe = next((probe for probe in self._probes if probe.target.label == verdict.target), None)
        if verdict.state not in RECORDING or probe is None or probe.target.label not in rule.match:
            return verdict
        owner, attribute = probe.target.owner, probe.target.attribute
        if not isinstance_of(owner, type) or attribute in ("__init__", "__init_subclass__"):
            return verdict
        overriding = [cls for cls in all_subclasses(owner) if attribute in type_namespace(cls)]
        labels = sorted(
            function_patterns.make_method_label(cls, attribute)
            for cls in overriding
            if not is_method_recorded(cls, attribute)
        )
        missed = [label for label in labels if not any(_matches_label(text, label) for text in rule.exclude)]
        if not missed:
            return verdict
        shown = ", ".join(missed[:3]) + (f" and {len(missed) - 3} more" if len(missed) > 3 else "")
        why = f"not seen: {shown}, which overrid{'es' if len(missed) == 1 else 'e'} it; "
        why += f"{verdict.target}{function_patterns.SUBCLASSES} takes subclasses, too"
        return replace(verdict, state="partly", why="; ".join(filter(None, [verdict.why, why])))

    def _explain_missing_functions(self, rule: FunctionRule) -> Verdict:
        names = list(dict.fromkeys(text.partition(":")[0] for text in rule.match))
        modules = [
            module for module in self._modules.values() if any(_match_module_name(text, module) for text in rule.match)
        ]
        if not modules and set(names) <= set(MAINS):
            state, why = "waiting", "__main__ is the program that runs; instrument check P -- script.py runs one"
        elif not modules:
            state, why = "waiting", f"{' and '.join(names)} not imported"
            if (script := script_name()) in names:
                why += f", but run as the program: a rule calls it __main__, not {script}"
        elif main := next(
            (module for module in modules if is_main_module(module) and self._has_selected_functions(rule, module)),
            None,
        ):
            state, program = "unreachable", list_names_of_module(main)[0]
            why = "__main__" if program == "__main__" else f"{program} runs as __main__, and"
            why += " defined it where nobody looked; start the program with `instrument run -- script.py`, or use "
            why += "@profiled, or put it into a module of its own"
        else:
            hints = (suggest_nearest(text, function_patterns.list_labels(modules)) for text in rule.match)
            state, why = "not found", "matched no function" + next(filter(None, hints), "")
        return Verdict(rule.text, state, why=why)

    def _has_selected_functions(self, rule: FunctionRule, module: ModuleType) -> bool:
        things = (thing for text in rule.match for thing in function_patterns.find_functions(module, text))
        return any(isinstance(thing, Target) for thing in things)


def _count_aliases(target: Target, names: Sequence[Name]) -> int:
    space = None if isinstance_of(target.owner, type) else instance_dict(target.owner)
    of_function = [name for name in names if name.key == id(target.function)]
    return sum(module_namespace(name.owner) is not space or name.name != target.attribute for name in of_function)


def _is_sdk_object(holder: Any) -> bool:
    return is_own_object(holder) and getattr(holder, "__instrument_pass__", None) is not False


def _describe_references(references: Sequence[str]) -> str:
    more = f" and {len(references) - 3} more" if len(references) > 3 else ""
    return f"also referenced by {' and '.join(sorted(references)[:3])}{more}"


def _match_module_name(text: str, module: ModuleType) -> tuple[str, ...]:
    return tuple(name for name in list_names_of_module(module) if matches_pattern(text.partition(":")[0], name))[:1]


def _is_excluded(rule: FunctionRule, thing: Target | Unreachable) -> bool:
    return any(_matches_label(text, thing.label) for text in rule.exclude)


def _matches_label(text: str, label: str) -> bool:
    module, _, qualname = label.partition(":")
    return matches_pattern(text.partition(":")[0], module) and matches_pattern(text.partition(":")[2], qualname)
