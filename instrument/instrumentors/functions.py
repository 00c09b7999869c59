"""Functions: how `@profiled` and the profile's function rules make a function record, and the way back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, TypeVar, overload

from instrument.errors import TargetError
from instrument.instrumentors import decorated, holders
from instrument.instrumentors.holders import isinstance_of, namespace, own_names, type_namespace
from instrument.instrumentors.targets import Target, find, is_public, parts_of, qualname_of, site_of
from instrument.instrumentors.work import CallWork
from instrument.profile.kinds import KINDS, PHASES
from instrument.recorder.recorder import RECORDER, Recorder
from instrument.recorder.scopes import OFF
from instrument.recorder.wrapping import Attributes, Passes, Results
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

Undo = Callable[[], None]
T = TypeVar("T")


class Probe:
    """One target made to record, and the way back: `undo` leaves alone what somebody else has set since."""

    __slots__ = ("_place", "is_set", "site", "target", "wrapped")

    def __init__(
        self,
        target: Target,
        site: Site,
        recorder: Recorder = RECORDER,
        attributes: Attributes | None = None,
        passes: Passes | None = None,
        results: Results | None = None,
    ) -> None:
        self.target = target
        self.site = site
        works = CallWork.of(recorder, target.function) if site.device else None
        self.wrapped: Any = recorder.wrap(target.function, site, attributes, passes, works, results)
        self._place: Assignment | None = None
        self.is_set = False

    def set(self) -> None:
        """Put it where the target lies. Raises what the owner raises that lets nothing be set."""
        target, made = self.target, self.wrapped
        self.is_set = True
        if target.raw is None:
            return
        if target.raw is not target.function:
            made = holders.change(target.raw, target.function, self.wrapped)
            self._name_property()
        if made is not target.raw:
            self._place = Assignment(target.owner, target.attribute, made)

    def undo(self) -> None:
        """Put the very object that lay there back."""
        if not self.is_set:
            return
        raw, place = self.target.raw, self._place
        self._place, self.is_set = None, False
        if place is not None:
            place.undo()
        elif raw is not None:
            holders.change(raw, self.wrapped, self.target.function)
            self._name_property()

    @property
    def parts(self) -> Iterator[Any]:
        """What holds the function in what was made of it."""
        if type(self.wrapped) is FunctionType:
            yield vars(self.wrapped)
            yield from self.wrapped.__closure__ or ()

    def _name_property(self) -> None:
        """A property that gets another function forgets its name, which stands in its error messages."""
        if isinstance_of(self.target.raw, property):
            property.__set_name__(self.target.raw, self.target.owner, self.target.attribute)  # type: ignore[attr-defined]


class Assignment:
    """An attribute of a module or class that has been set, and what it was before."""

    __slots__ = ("_attribute", "_before", "_new", "_own", "_owner")

    def __init__(self, owner: Any, attribute: str, new: Any) -> None:
        self._owner, self._attribute, self._new = owner, attribute, new
        self._own = attribute in self._names()
        self._before = self._names().get(attribute)
        setattr(owner, attribute, new)

    def _names(self) -> Any:
        return type_namespace(self._owner) if isinstance_of(self._owner, type) else vars(self._owner)

    def undo(self) -> None:
        """Set what was there before, unless somebody else has set something since."""
        if self._names().get(self._attribute) is not self._new:
            return
        if self._own:
            setattr(self._owner, self._attribute, self._before)
        else:
            delattr(self._owner, self._attribute)


def attach(target: Target, site: Site, recorder: Recorder = RECORDER) -> tuple[Any, Undo]:
    """Replace the function where it lies by one that records. Returns that and the way back.

    Copies of it that others hold are the business of `holders.Swap`.
    """
    probe = Probe(target, site, recorder)
    probe.set()
    return probe.wrapped, probe.undo


def replace(owner: Any, attribute: str, new: Any) -> Undo:
    """Set an attribute of a module or class; the way back leaves alone what somebody else has set since."""
    return Assignment(owner, attribute, new).undo


def undo_all(undos: list[Undo]) -> None:
    """Go every way back, last first. One that fails keeps none of the others from being gone."""
    while undos:
        try:
            undos.pop()()
        except Exception as fault:
            FAULTS.note("way back of a probe", fault)


def is_held_elsewhere(target: Target) -> bool:
    """Whether something besides the target's own place holds its function. Costs a look at the reference count.

    A name that a class inherits means the class alone, so the function stays where it is defined.
    """
    if target.raw is None:
        return True
    names = type_namespace(target.owner) if isinstance_of(target.owner, type) else own_names(target.owner)
    if names is None or names.get(target.attribute) is not target.raw:
        return False
    return _references(target) > _usual_references()


def is_still_held(probe: Probe) -> bool:
    """Whether somebody holds what a probe that is off had put in a function's place."""
    return sys.getrefcount(probe.wrapped) > _references_left()


@lru_cache(maxsize=1)
def _references_left() -> int:
    """References to what a probe had made and nobody else holds, as `is_still_held` meets it."""
    module = ModuleType("usual")
    namespace(module)["usual"] = FunctionType((lambda: None).__code__, {"__name__": "usual"})
    (target,) = find(module, "usual:usual")
    return sys.getrefcount(Probe(target, Site("usual"), Recorder(1 << 16)).wrapped) if isinstance(target, Target) else 0


def _references(target: Target) -> int:
    return sys.getrefcount(target.function) - (target.raw is target.function)


@lru_cache(maxsize=1)
def _usual_references() -> int:
    """References to a function that nobody but its module holds, as `is_held_elsewhere` meets it."""
    module = ModuleType("usual")
    namespace(module)["usual"] = FunctionType((lambda: None).__code__, {"__name__": "usual"})
    (target,) = find(module, "usual:usual")
    return _references(target) if isinstance(target, Target) else sys.maxsize


@overload
def profiled(
    name: str | None = None, *, kind: str | None = None, device: bool = False, phase: str | None = None
) -> Callable[[T], T]: ...


@overload
def profiled(name: T, *, kind: str | None = None, device: bool = False, phase: str | None = None) -> T: ...


def profiled(name: Any = None, *, kind: str | None = None, device: bool = False, phase: str | None = None) -> Any:
    """Record each call of a function, or of each public method of a class.

        @profiled  # named after the function
        @profiled("conv_layer")
        @profiled(phase="compute", device=True)

    `kind` (left out: "op"), `phase` and `device` are those of `scope`. Works on functions, coroutines, generators,
    async generators and methods; above or below `classmethod`, `staticmethod`, `property`, `cached_property`,
    `lru_cache`, `singledispatchmethod` and `contextmanager`. Returns the very same object when `INSTRUMENT=off`. Raises
    `TargetError` for what cannot be recorded.
    """
    if kind is not None and kind not in KINDS:
        raise TargetError(f"profiled: found kind {kind!r}; allowed: {', '.join(KINDS)}")
    if phase is not None and (not isinstance(phase, str) or not phase):
        raise TargetError(f"profiled: found phase {phase!r}; allowed: a name, such as {', '.join(PHASES)}")
    if name is None or isinstance(name, str):
        return lambda target: _profile(target, name, kind, device, phase)
    return _profile(name, None, kind, device, phase)


def _profile(target: Any, name: str | None, kind: str | None, device: bool, phase: str | None) -> Any:
    if OFF:
        return target
    if isinstance_of(target, type):
        for attribute, raw in list(vars(target).items()):
            function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
            if is_public(attribute) and isinstance(function, FunctionType):
                label = f"{name}.{attribute}" if name else None
                setattr(target, attribute, _profile(raw, label, kind, device, phase))
        return target
    parts = list(parts_of(target))
    for suffix, function in parts:
        own = name + suffix if name else qualname_of(function) + suffix if suffix else None
        site = site_of(function, name=own, kind=kind, device=device, phase=phase)
        wrapped = RECORDER.wrap(function, site, works=CallWork.of(RECORDER, function) if device else None)
        decorated.note(site, wrapped)
        if function is target:
            return wrapped
        target = holders.change(target, function, wrapped)
    if not parts:
        raise TargetError(
            f"profiled takes a function, method or class; found {target!r} of type {type(target).__name__}. "
            "Put it below the decorator that returns such an object."
        )
    return target
