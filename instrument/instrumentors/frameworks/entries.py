"""Record each call of a framework's entry points: the methods by which a service uses the framework.

A method is replaced in the class that defines it, after the import of its module. The name and the attributes of a span
are read once per object, or once per class. If the framework's version lacks an entry point, a verdict names it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from instrument.instrumentors.compilers import get_compiling_test
from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.instrumentors.references import loaded_modules, namespace
from instrument.instrumentors.targets import site_of
from instrument.instrumentors.verdict import Verdict
from instrument.profile.model import FrameworkRule
from instrument.recorder import wrapping
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recording.spans import AttributeValue, Site
from instrument.runtime.faults import FAULTS

Facts = tuple[str, tuple[tuple[str, AttributeValue], ...]]
"""A description of an object: the `instance` and the attributes of its site."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """An entry point: a method of the class `owner`, which is in one of the modules, depending on the version.

    The class or a base class defines the method. `name` is the name of its spans.
    """

    modules: tuple[str, ...]
    owner: str
    method: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.owner}.{self.method}"


class Entries:
    """The instrumentor of one framework's entry points.

    `facts_of` describes an object. It is called once per object, or once per class if `by_class` is True.
    """

    def __init__(
        self,
        rule: FrameworkRule,
        entries: Sequence[Entry],
        facts_of: Callable[[Any], Facts],
        *,
        by_class: bool = False,
        recorder: Recorder = RECORDER,
    ) -> None:
        self.rule = rule
        self._entries = tuple(entries)
        self._facts_of = facts_of
        self._by_class = by_class
        self._recorder = recorder
        self._modules = frozenset(name for entry in entries for name in entry.modules)
        self._verdicts: dict[str, Verdict] = {}
        self._shared: dict[tuple[str, Facts], Any] = {}
        self._undos: list[Undo] = []

    def may_match(self, module_name: str) -> bool:
        """Return True if a module may define an entry point."""
        return module_name in self._modules

    def attach_to(self, module: ModuleType) -> bool:
        """Record the entry points that an imported module defines."""
        for entry in self._entries:
            if module.__name__ in entry.modules:
                self._verdicts[entry.label] = self._attach_entry(entry, namespace(module).get(entry.owner))
        return False

    def undo(self) -> None:
        """Restore the methods of all classes."""
        undo_all(self._undos)
        self._shared.clear()

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on all entry points, with one on missing modules unless the rule is `auto`."""
        verdicts = list(self._verdicts.values())
        waiting = {entry.modules for entry in self._entries if entry.label not in self._verdicts}
        if waiting and not self.rule.auto:
            ready = {name for name, _ in loaded_modules()}
            names = sorted(" or ".join(modules) for modules in waiting) if self.rule.name in ready else [self.rule.name]
            verdicts.append(Verdict(self.rule.text, "waiting", why=f"{', '.join(names)} not imported"))
        return verdicts

    def _attach_entry(self, entry: Entry, owner: Any) -> Verdict:
        bases = owner.__mro__ if isinstance(owner, type) else ()
        owner = next((base for base in bases if entry.method in vars(base)), None)
        if owner is None:
            return missing_verdict(self.rule, entry.label)
        method = vars(owner)[entry.method]
        if hasattr(method, "__instrument_framework__"):  # a second name of the same module
            return Verdict(self.rule.text, "attached", entry.label)
        if (verdict := recorded_verdict(self.rule, entry.label, method)) is not None:
            return verdict
        if not isinstance(method, FunctionType):
            return not_a_function(self.rule, entry.label, method)
        return replace_method(self.rule, entry.label, owner, entry.method, self._wrap(entry, method), self._undos)

    def _wrap(self, entry: Entry, method: FunctionType) -> Any:
        recorder, by_class, decide = self._recorder, self._by_class, self._decide
        is_compiling = get_compiling_test(sys.modules.get("torch"))
        recordings: dict[int, Any] = {}

        @functools.wraps(method)
        def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not recorder.on:
                return method(self, *args, **kwargs)
            subject = type(self) if by_class else self
            recording = recordings.get(id(subject)) or decide(entry, method, self, subject, recordings)
            return recording(self, *args, **kwargs)

        wrapper.__instrument_framework__ = self.rule.name  # type: ignore[attr-defined]
        return wrapper

    def _decide(self, entry: Entry, method: FunctionType, thing: Any, subject: Any, recordings: dict[int, Any]) -> Any:
        """Make the recording method for an object or class at its first call. Equal descriptions share a method."""
        try:
            facts = self._facts_of(thing)
        except Exception as fault:
            FAULTS.note(f"description of a call of {entry.label}", fault)
            facts = ("", ())
        recording = self._shared.get((entry.label, facts))
        if recording is None:
            site = dataclasses.replace(site_of(method, name=entry.name), instance=facts[0], attributes=facts[1])
            recording = record_once(self._recorder, method, site, self._shared, (entry.label, facts))
        weakref.finalize(subject, recordings.pop, id(subject), None)
        recordings[id(subject)] = recording
        return recording


def missing_verdict(rule: FrameworkRule, label: str) -> Verdict:
    """Return the verdict on an entry point that the imported version of a framework lacks."""
    version = next((namespace(m).get("__version__") for name, m in loaded_modules() if name == rule.name), None)
    return Verdict(rule.text, "unreachable", label, f"{rule.name} {version or '(of unknown version)'} has none")


def not_a_function(rule: FrameworkRule, label: str, value: Any) -> Verdict:
    """Return the verdict on an entry point that is not a Python function."""
    return Verdict(rule.text, "unreachable", label, f"it is a {type(value).__name__}, not a function")


def replace_method(rule: FrameworkRule, label: str, owner: Any, name: str, new: Any, undos: list[Undo]) -> Verdict:
    """Replace a method of a class, and return the verdict on it."""
    try:
        undos.append(replace(owner, name, new))
    except Exception as error:  # a metaclass that refuses changes
        why = f"it cannot be replaced: {type(error).__name__}: {error}"
        return Verdict(rule.text, "unreachable", label, why)
    return Verdict(rule.text, "attached", label)


def record_once(recorder: Recorder, method: Any, site: Site, recordings: dict[Any, Any], key: Any) -> Any:
    """Return the function that records calls of a method at a site. It is made once for all threads."""
    new_recording = wrapping.make_function(recorder, method, site)
    recording = recordings.setdefault(key, new_recording)
    if recording is new_recording:
        recorder.allow_muting(site, new_recording)
    return recording


def recorded_verdict(rule: FrameworkRule, label: str, function: Any) -> Verdict | None:
    """Return the verdict on an entry point that a function rule or a decorator records already, else None."""
    site = getattr(function, "__instrument__", None)
    if not isinstance(site, Site):
        return None
    return Verdict(rule.text, "attached", label, f"it is recorded as {site.name!r} already")
