"""Record the layers of torch models: each `forward` of a layer that a rule selects, by path or class, is a span.

The `forward` of the class is replaced, never that of an instance, so that instances can be copied and pickled. The
first call of an instance decides if that instance is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from instrument.instrumentors.function_patterns import make_site, matches_pattern
from instrument.instrumentors.layer_selection import (
    DYNAMO,
    Paths,
    Regions,
    Selected,
    SharedSites,
    class_name_for_rules,
    rule_selects_layer,
    torch_children,
)
from instrument.instrumentors.lineages import all_subclasses, watch_subclasses
from instrument.instrumentors.profiled_functions import Instrumentor, Undo, replace_attribute, undo_all
from instrument.instrumentors.verdict import Verdict, suggest_nearest
from instrument.instrumentors.work import find_tensor_nearby, list_tensors
from instrument.profile.model import LayerRule
from instrument.recorder import wrapping
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import replace as replace_fields


class Layers(Instrumentor):
    """The instrumentor of a session's layer rules in torch. Instrumentors of other frameworks also use it to select
    layers.

    `known` has a function per framework that returns the layer classes. The value is None before the framework's
    import. `left_out(cls)` returns True for classes that another instrumentor records.
    """

    def __init__(self, rules: Sequence[LayerRule], recorder: Recorder = RECORDER) -> None:
        super().__init__((), recorder)
        self._sites: dict[int, Site | None] = {}  # by identity of the module
        self._followed: set[int] = set()  # modules with a finalizer of ours
        self._shared = SharedSites(recorder)
        self._torch: ModuleType | None = None
        self.known: dict[str, Callable[[], Iterable[type[Any]]] | None] = {"torch": None}
        self.left_out: Callable[[type[Any]], bool] = lambda cls: False
        self._patches: dict[type[Any], Undo] = {}
        self._unseen: list[Verdict] | None = None
        self._regions = Regions(self._find_rule, lambda key: self._sites.pop(key, None), recorder)
        self._set_rules(rules)

    def _set_rules(self, rules: Sequence[LayerRule]) -> None:
        self.rules = tuple(rules)
        # Each rule with its selected sites. The list is replaced as a whole, as calls read it while rules change.
        self._at_work: list[Selected] = [(rule, {}) for rule in rules]
        self._patched: set[type[Any]] = set()
        self._types = frozenset(name for rule in rules for name in rule.types)
        self._last_segments = {text.rpartition(".")[2] for rule in rules for text in rule.match if not rule.types}

    def change_rules(self, rules: Sequence[LayerRule], modules: Iterable[ModuleType]) -> None:
        """Apply other rules. A layer that old and new rules select keeps its site. This takes tens of ms in a large
        process."""
        self._set_rules(rules)
        if not rules:
            self.undo()
            self._torch = None
            return
        if self._torch is None:
            for module in modules:
                if self.may_match(module.__name__):
                    self.attach_to(module)
            return
        decided = set(self._sites)
        self._sites.clear()
        self._regions.sites.clear()
        for cls in all_subclasses(self._module_type):
            self._patch_new_class(cls)
        for name, child in self._paths.note_modules_in_memory():
            self._patch_child_class(name, child)
            if id(child) in decided and id(child) not in self._sites:
                self._decide_site(child)
        for cls in [cls for cls in self._patches if cls not in self._patched]:
            undo_all([self._patches.pop(cls)])

    def probes_by_name(self) -> Mapping[str, Any]:
        return super().probes_by_name() if self._torch is not None else {}

    def may_match(self, module_name: str) -> bool:
        return module_name in ("torch", DYNAMO)

    def attach_to(self, module: ModuleType) -> None:
        if module.__name__ == DYNAMO and self._torch is not None:
            self._regions.record_calls(module.OptimizedModule)
        elif module.__name__ != DYNAMO and self._torch is None:
            self._torch = module
            self.attach(module)

    def attach(self, torch: Any) -> Undo:
        module_type = torch.nn.Module
        self._unseen = None
        self._module_type = module_type
        self.known["torch"] = lambda: all_subclasses(module_type)
        dynamo = getattr(getattr(torch, "_C", None), "_dynamo", None)
        self._evaluate = getattr(getattr(dynamo, "eval_frame", None), "set_eval_frame", None)
        self._paths = Paths(module_type, torch_children)
        handle = torch.nn.modules.module.register_module_module_registration_hook(self._note_child)
        self._undos.append(handle.remove)
        # A model without children is never registered anywhere.
        self._undos.append(watch_subclasses(module_type, self._patch_new_class, "a layer class"))
        for cls in all_subclasses(module_type):
            self._patch_new_class(cls)
        for name, child in self._paths.note_modules_in_memory():
            self._patch_child_class(name, child)
        self._regions.attach(torch, self._paths)
        return self.undo

    def undo(self) -> None:
        # The verdicts are read later, when a layer no longer shows that it was recorded.
        if self._unseen is None and self._torch is not None:
            with FAULTS.guard("layers that cannot be observed"):
                self._unseen = self._regions.explain_unseen_layers()
        self._regions.undo()
        undo_all([*self._undos, *self._patches.values()])
        self._undos.clear()
        self._patches.clear()
        self._patched.clear()
        self._sites.clear()
        self._shared.clear()

    def _patch_new_class(self, cls: type[Any]) -> None:
        if class_name_for_rules(cls) in self._types:
            self._patch_class(cls)

    def _note_child(self, parent: Any, name: str, child: Any) -> None:
        """Note a child that a module registers. This hook of torch returns None, so torch registers the child
        unchanged."""
        with FAULTS.guard("module registration hook"):
            if child is not None:
                self._paths.add_child(parent, name, child)
                self._patch_child_class(name, child)

    def _patch_child_class(self, name: str, child: Any) -> None:
        """Replace the `forward` of the child's class if a rule may select a child of this name."""
        if type(child) not in self._patched and any(matches_pattern(last, name) for last in self._last_segments):
            self._patch_class(type(child))

    def _patch_class(self, cls: type[Any]) -> None:
        if self.left_out(cls):
            return
        self._patched.add(cls)
        owner = next((base for base in cls.__mro__ if "forward" in vars(base)), None)
        if owner is None or owner is self._module_type or (owner in self._patched and owner is not cls):
            return
        forward = vars(owner)["forward"]
        if owner in self._patches:
            self._patched.add(owner)
            return
        if not isinstance(forward, FunctionType) or hasattr(forward, "__instrument_layers__"):
            return
        self._patched.add(owner)
        wrapper = wrapping.wrap_method(self._recorder, forward, self._sites, self._decide_site, self._evaluate)
        self._patches[owner] = replace_attribute(owner, "forward", wrapper)

    def _decide_site(self, module: Any) -> Site | None:
        at_work = self._at_work
        try:
            path = self._paths.path_of(module)
            is_region = id(module) in self._regions.roots
            site = None if is_region else self.find_or_make_site(type(module), path or "", module=module)
            if path is None and site is None and not is_region:
                return None
        except Exception as fault:
            FAULTS.note("layer selection", fault)
            site = None
        key = id(module)
        if key not in self._followed:
            self._followed.add(key)
            weakref.finalize(module, self._forget_layer, key)
        self._sites[key] = site
        if self._at_work is not at_work:  # they changed meanwhile: the next call decides anew
            self._sites.pop(key, None)
        return site

    def detach(self, site: Site) -> Undo | None:
        """Stop recording and counting the calls of a site's layers. Return the function that undoes this, or None if
        the site has no layers."""
        layers = [key for key, layer_site in list(self._sites.items()) if layer_site is site]
        self._sites.update(dict.fromkeys(layers))

        def resume_recording() -> None:
            self._sites.update({key: site for key in layers if self._sites.get(key, site) is None})

        return resume_recording if layers else None

    def _forget_layer(self, key: int) -> None:
        self._followed.discard(key)
        self._sites.pop(key, None)

    def _find_rule(self, class_name: str, path: str) -> Selected | None:
        return next(
            (selection for selection in self._at_work if rule_selects_layer(selection[0], class_name, path)), None
        )

    def find_or_make_site(self, cls: type[Any], path: str, method: str = "forward", module: Any = None) -> Site | None:
        selection = self._find_rule(class_name_for_rules(cls), path)
        if selection is None:
            return None
        rule = selection[0]
        tensors: Sequence[Any] = []
        if rule.device and module is not None:
            # The devices of the layer's own tensors count or, without any, that of a neighbour's tensor.
            tensors = list_tensors(module) or find_tensor_nearby(
                module, self._paths.parent_of, lambda parent: dict(torch_children(parent)).values()
            )

        def make_layer_site() -> Site:
            name = rule.name or class_name_for_rules(cls)
            site, qualname = make_site(getattr(cls, method), name=name, kind="layer"), f"{cls.__qualname__}.{method}"
            facts: dict[str, Any] = {"instance": path, "device": rule.device, "suspends": False}
            return replace_fields(site, module=cls.__module__, qualname=qualname, **facts)

        return self._shared.find_or_make_site(selection, (cls, path), tensors, make_layer_site)

    def verdicts(self) -> list[Verdict]:
        imported = [classes for classes in self.known.values() if classes is not None]
        if not imported:
            why = f"{' and '.join(self.known)} not imported"
            return [Verdict(rule.text, "waiting", why=why) for rule in self.rules]
        class_names = sorted({cls.__name__ for classes in imported for cls in classes()})
        unseen = self._unseen
        if unseen is None:
            unseen = self._regions.explain_unseen_layers() if self._torch is not None else []
        verdicts: list[Verdict] = []
        for rule, selected in self._at_work:
            targets = {
                site: site.instance or f"{site.qualname.rpartition('.')[0] or site.name} (root)"
                for site in list(selected)
            }
            attached = [Verdict(rule.text, "attached", target, site=site) for site, target in targets.items()]
            of_rule = attached + [verdict for verdict in unseen if verdict.rule == rule.text]
            verdicts += of_rule or [self._explain_missing_functions(rule, class_names)]
        return verdicts

    def _explain_missing_functions(self, rule: LayerRule, class_names: Sequence[str]) -> Verdict:
        unknown = [name for name in rule.types if name not in class_names]
        if rule.types and len(unknown) == len(rule.types):
            why = f"no class of that name is defined yet: {', '.join(unknown)}"
            return Verdict(rule.text, "waiting", why=why + suggest_nearest(unknown[0], class_names))
        why = "no layer that it selects has run"
        paths = self._paths.known_paths()
        if rule.match and paths and not any(matches_pattern(text, path) for text in rule.match for path in paths):
            why = f"no layer has such a path{suggest_nearest(rule.match[0], sorted(paths))}"
        return Verdict(rule.text, "waiting", why=why)
