"""Instruments everything that a profile selects, in modules imported already and in later imports.

A reload of the profile changes the instrumentation. A module's functions are replaced right after the module has run.
The rules under one top-level key of the profile are a family. A family's code is loaded only when the service imports a
package that the family can instrument.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.known_packages import FAMILIES, KEEPING, rules_under_key, selectable_packages
from instrument.instrumentors.profiled_functions import Instrumentor, Undo
from instrument.instrumentors.references import loaded_modules, module_namespace
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import Profile
from instrument.profile.presets import ENGINES
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import Site
from instrument.runtime import environment, imports, main_module
from instrument.runtime.environment import CHECK_FOLDER
from instrument.runtime.main_module import list_names_of_module
from instrument.runtime.unpatched import RLock

if TYPE_CHECKING:
    from instrument.instrumentors.argument_watch import ArgumentWatch
    from instrument.instrumentors.function_rules import Functions
    from instrument.instrumentors.layers import Layers

LOOKS = 2
"""The number of searches for new modules after a change of rules. The second search covers modules whose import was in
progress."""

_ASKED = {environment.INIT_FOLDER, CHECK_FOLDER}
"""The environment variables that `init` and `check` set. If either is set, all families are loaded at once."""


class Selection:
    """The probes of a session's profile. `late` has the names of modules that were imported before their probes were
    attached.

    `noted` is called after a module was instrumented, `begun` when the import of an inference engine begins.
    """

    def __init__(self, profile: Profile, recorder: Recorder = RECORDER) -> None:
        self.profile = profile
        self._recorder = recorder
        self._lock = RLock()
        self._undo_imports: Undo | None = None
        self._watch: main_module.Watch | None = None
        self._families: dict[str, Any] = {}
        """The instrumentor of each loaded family, in the order of `FAMILIES`."""
        self._unloaded: dict[str, frozenset[str]] = {}
        """The families that are not loaded yet, with the packages whose import loads them."""
        self._loading_packages: frozenset[str] = frozenset()
        """All packages whose import loads a family, also a family that is loaded already."""
        for key in FAMILIES:
            self._load_or_defer_family(key)
        self._unfinished: list[ModuleType] = []
        self._seen: set[str] = set()
        self._looks_left = 0
        self._ports: frozenset[int] = frozenset()
        self.late: list[str] = []
        self.noted: Callable[[], object] = lambda: None
        self.begun: Callable[[str], object] = lambda _: None

    def _load_or_defer_family(self, key: str) -> None:
        if not rules_under_key(self.profile, key):
            self._unloaded.pop(key, None)
            return
        packages = selectable_packages(self.profile, key)
        if packages is None or _ASKED & os.environ.keys():
            self._load_family(key)
        else:
            # The requests family also watches event loops.
            packages |= {"asyncio"} if key == "requests" else set()
            self._loading_packages |= packages  # first: another thread may be importing
            self._unloaded[key] = packages

    def _load_family(self, key: str) -> Instrumentor:
        rules = rules_under_key(self.profile, key)
        options: list[Any] = []
        if key == "frameworks":
            options.append(lambda: self.attach_family("layers"))
        if key == "functions":
            options.append(environment.INIT_FOLDER in os.environ)
        module, name, _ = FAMILIES[key]
        family: Instrumentor = getattr(import_module(module), name)(rules, self._recorder, *options)
        awake = {**self._families, key: family}
        self._families = {name_of_key: awake[name_of_key] for name_of_key in FAMILIES if name_of_key in awake}
        self._unloaded.pop(key, None)  # last: a thread that imports a module meanwhile finds the key in one of both
        return family

    def attach_family(self, key: str) -> Any:
        """Return the instrumentor for a key of the profile, and load the instrumentor if necessary. Return None if the
        key has no rules."""
        if key in self._unloaded:
            import_module(FAMILIES[key].module)  # not under our lock: another thread that imports may wait for it
        with self._lock:
            if key not in self._unloaded:
                return self._families.get(key)
            family = self._load_family(key)
            for _, module in loaded_modules() if self._undo_imports is not None else ():
                if _is_module_wanted(family, module) and not imports.is_unloaded_lazy_module(module):
                    if _is_being_imported(module):
                        self._unfinished.append(module)
                    elif family.attach_to(module):
                        self.late.append(list_names_of_module(module)[0])
            return family

    def _families_to_load(self, module_name: str) -> list[str]:
        """Return the keys of the instrumentors that a module needs. A package whose name is a number belongs to
        Triton."""
        package = module_name.partition(".")[0]
        is_of_triton = package.isdigit()
        if not is_of_triton and package not in self._loading_packages and module_name not in self._loading_packages:
            return []
        return [
            key
            for key, packages in list(self._unloaded.items())
            if package in packages or module_name in packages or (key == "requests" and is_of_triton)
        ]

    def attach(self, *, main: bool = True) -> Undo:
        """Attach the probes in imported modules and at later imports. Return the function that removes them.

        With `main=False`, the module that runs as `__main__` is left out.
        """
        with self._lock:
            for _, module in loaded_modules():
                for key in {key for name in list_names_of_module(module) for key in self._families_to_load(name)}:
                    self._load_family(key)
        loaded = [module for _, module in loaded_modules() if any(map(self.may_match, list_names_of_module(module)))]
        watch = main_module.Watch(self.may_match, self.attach_to)
        expect = watch.await_body if main else lambda: None
        self._undo_imports = imports.install_import_hook(
            lambda name: self.may_match(name) or name in ENGINES or name in self._loading_packages,
            *(self.attach_to, expect, lambda name: self.begun(name) if name in ENGINES else None, watch),
        )
        for module in loaded:
            is_left_out = imports.is_unloaded_lazy_module(module) or not (
                main or not main_module.is_main_module(module)
            )
            if not is_left_out and self.attach_to(module):
                self.late.append(list_names_of_module(module)[0])
        if main:
            self._watch = watch
            watch.begin()
        return self.detach_all

    def change(self, profile: Profile, *, anew: bool = False) -> tuple[list[str], list[str]]:
        """Apply another profile's rules. Return the names of the attached and of the detached probes.

        Targets that both profiles record in the same way keep their probes and totals. With `anew`, unchanged rules are
        applied, too. Thread-safe. Takes tens of ms.
        """
        with self._lock:
            before = self._list_probes()
            loaded = [module for _, module in loaded_modules()]
            self.profile = profile
            for key in FAMILIES:
                rules, family = rules_under_key(profile, key), self._families.get(key)
                if family is not None and not anew and rules == family.rules:
                    continue
                if family is not None and key in KEEPING:
                    family.change_rules(rules, loaded)
                    continue
                if family is not None:
                    family.undo()
                    self._families = {name: awake for name, awake in self._families.items() if name != key}
                self._load_or_defer_family(key)
                names = (name for module in loaded for name in list_names_of_module(module))
                is_loaded = key in self._families or any(key in self._families_to_load(name) for name in names)
                if rules and (family is not None or is_loaded):
                    family = self._families.get(key) or self._load_family(key)
                    for module in loaded:
                        if _is_module_wanted(family, module):
                            family.attach_to(module)
            # Modules whose import began before a rule wanted them: no hook will report its end.
            self._unfinished = [
                module
                for module in loaded
                if _is_being_imported(module) and any(map(self.may_match, list_names_of_module(module)))
            ]
            self._seen, self._looks_left = {name for module in loaded for name in list_names_of_module(module)}, LOOKS
            after = self._list_probes()
        attached = [name for name, probe in after.items() if before.get(name) != probe]
        late = {name.partition(":")[0] for name in attached if ":" in name}
        self.late += sorted(late.difference(self.late))
        return attached, [name for name, probe in before.items() if after.get(name) != probe]

    def attach_pending_modules(self) -> bool:
        """Attach the probes in modules that another thread was importing during a change. Return True if a later call
        is necessary."""
        with self._lock:
            waiting, self._unfinished = self._unfinished, []
            if self._looks_left:
                self._looks_left -= 1
                waiting += [module for name, module in loaded_modules() if name not in self._seen]
            for module in waiting:
                if _is_being_imported(module):
                    self._unfinished.append(module)
                elif any(map(self.may_match, list_names_of_module(module))):
                    self.attach_to(module)
            return bool(self._unfinished or self._looks_left)

    def _list_probes(self) -> dict[str, Any]:
        return {name: probe for family in self._families.values() for name, probe in family.probes_by_name().items()}

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread may have locked at the fork."""
        self._lock = RLock()
        if (functions := self._families.get("functions")) is not None:
            functions.after_fork_in_child()
        self._ports = frozenset()

    def detach_all(self) -> None:
        with self._lock:
            if self._undo_imports is not None:
                self._undo_imports()
                self._undo_imports = None
            if self._watch is not None:
                self._watch.end()
            self._unfinished.clear()
            for family in reversed(self._families.values()):
                family.undo()

    def may_match(self, module_name: str) -> bool:
        """Return True if a rule may select something in a module. This may load instrumentors."""
        for key in self._families_to_load(module_name):
            self.attach_family(key)
        return any(family.may_match(module_name) for family in list(self._families.values()))

    def attach_to(self, module: ModuleType) -> bool:
        copied = False
        with self._lock:
            for family in list(self._families.values()):
                if _is_module_wanted(family, module):
                    copied = family.attach_to(module) or copied
            functions = self._families.get("functions")
            has_functions = functions is not None and _is_module_wanted(functions, module)
        if has_functions:
            self.noted()
        return copied

    def verdicts(self, *, of_all: bool = True) -> list[Verdict]:
        """Return the verdicts on all rules. With `of_all=False`, instrumentors that are not loaded are left out."""
        for key in list(self._unloaded) if of_all else ():
            self.attach_family(key)
        with self._lock:
            self.attach_pending_modules()
            if (requests := self._families.get("requests")) is not None:
                requests.ports = self._ports
            return [verdict for family in self._families.values() for verdict in family.verdicts()]

    def idle_preset_rules(self) -> set[str]:
        """Return the names of the preset's rules that may be idle. These are the function rules of engines, and all
        rules of a family with a waiting rule. Rules for requests are left out."""
        names = {rule.text for rule in self.profile.functions if rule.engine}
        with self._lock:
            for key, family in self._families.items():
                if self.profile.origins.get(key) == "preset" and key != "requests":
                    verdicts = family.verdicts()
                    if any(verdict.state == "waiting" for verdict in verdicts):
                        names.update(verdict.rule for verdict in verdicts)
        return names

    def has_begun_request(self) -> bool:
        family = self._families.get("requests")
        return family is not None and bool(family.has_begun_request())

    def blockers(self) -> Mapping[Site, tuple[int, int]]:
        family = self._families.get("requests")
        return {} if family is None else family.blockers()

    def note_connections(self, ports: Iterable[int]) -> None:
        self._ports |= frozenset(ports)

    def note_current_connections(self) -> None:
        is_asked = "socket" in sys.modules and self.profile.requests and not self.has_begun_request()
        if is_asked and environment.has_listening_socket():
            connections = environment.list_connections(Path("/proc/self"))
            self.note_connections(connections.open | connections.closed)

    def argument_watch(self) -> ArgumentWatch | None:
        functions: Functions | None = self._families.get("functions")
        return None if functions is None else functions.watch

    def find_sites(self, label: str) -> set[Site]:
        functions: Functions | None = self._families.get("functions")
        with self._lock:
            return set() if functions is None else functions.find_sites(label)

    def detach(self, site: Site) -> Undo | None:
        with self._lock:
            for key in ("functions", "layers"):
                family: Functions | Layers | None = self._families.get(key)
                if family is not None and (attach := family.detach(site)) is not None:
                    return partial(self._attach_with_lock, attach)
        return None

    def _attach_with_lock(self, attach: Callable[[], object]) -> None:
        with self._lock:
            attach()


def _is_module_wanted(family: Instrumentor, module: ModuleType) -> bool:
    return any(map(family.may_match, list_names_of_module(module)))


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module_namespace(module).get("__spec__"), "_initializing", False))
