"""Lineages: a method together with its overrides in subclasses, each call of an object recorded once.

An override may call what it overrides or not, and may do either in different calls. So a call is recorded by the one
that the object's own class resolves to, and what that calls by `super` passes as a part of it. Subclasses that are
defined later tell of themselves through `__init_subclass__` of the class that the rule names.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from instrument.instrumentors.functions import Undo, replace
from instrument.instrumentors.references import isinstance_of, type_attribute, type_namespace
from instrument.instrumentors.targets import parts_of, site_on
from instrument.runtime.faults import FAULTS


class Lineage:
    """A method from a class on downwards. `subclassed(cls)` is called when a class below it has been defined."""

    def __init__(self, base: type[Any], attribute: str, subclassed: Callable[[type[Any]], object]) -> None:
        self.base = base
        self.attribute = attribute
        self._members: weakref.WeakSet[type[Any]] = weakref.WeakSet()
        self._resolved: weakref.WeakKeyDictionary[type[Any], type[Any] | None] = weakref.WeakKeyDictionary()
        self._subclassed = subclassed
        self._undo: Undo | None = None

    def holds(self, owner: Any, attribute: str) -> bool:
        """Return True where an attribute of a class belongs here."""
        return (
            attribute == self.attribute
            and isinstance_of(owner, type)
            and self.base in type.__dict__["__mro__"].__get__(owner)
        )

    def overrides(self) -> Iterator[type[Any]]:
        """Return the classes below the first one that define the method themselves."""
        return (cls for cls in subclasses(self.base) if self.attribute in type_namespace(cls))

    def join(self, owner: type[Any]) -> LineageMember:
        """Return the test that a probe on that class's own function applies to each call."""
        self._members.add(owner)
        self._resolved.clear()
        return LineageMember(self, owner)

    def resolved(self, cls: type[Any]) -> type[Any] | None:
        """Return the class whose probe records calls on objects of a class."""
        try:
            return self._resolved[cls]
        except KeyError:
            bases = type.__dict__["__mro__"].__get__(cls)
            found = self._resolved[cls] = next((base for base in bases if base in self._members), None)
            return found

    def watch(self) -> None:
        """Hear of subclasses from now on. Raises what a class raises that lets nothing be set."""
        if self._undo is None:
            self._undo = watch_subclasses(self.base, self._subclassed)

    def end(self) -> None:
        """Hear of no more subclasses."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()


class LineageMember:
    """A test of the calls of one class's function: True where another class's probe records them."""

    def __init__(self, lineage: Lineage, owner: type[Any]) -> None:
        self._lineage = lineage
        self._owner = weakref.ref(owner)

    def __call__(self, args: tuple[Any, ...]) -> bool:
        """Return True where a call passes without a span. The first argument is the object or class."""
        if not args:
            return False
        cls = args[0] if isinstance_of(args[0], type) else type(args[0])
        resolved = self._lineage.resolved(cls)
        return resolved is not None and resolved is not self._owner()

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        """Pickle a test that is never True, for a function that is pickled by value takes it to another process."""
        return _member_of_none, ()


def _member_of_none() -> Callable[[tuple[Any, ...]], bool]:
    return _passes_none


def _passes_none(args: tuple[Any, ...]) -> bool:
    return False


def is_reached(cls: type[Any], attribute: str) -> bool:
    """Return True where a probe sees the calls of a method, its own or that of `super`, to which each goes on."""
    return any(
        site_on(function) is not None
        or hasattr(function, "__instrument_layers__")
        or _goes_to_super(function, attribute)
        for _, function, _ in parts_of(type_attribute(cls, attribute))
    )


def _goes_to_super(function: Any, attribute: str) -> bool:
    """Return True where a function asks `super` for the method before anything that could make it do without."""
    code = getattr(function, "__code__", None)
    asked = False
    for instruction in dis.get_instructions(code) if type(code) is CodeType else ():
        if instruction.argval == "super":
            asked = True
        elif asked and instruction.argval == attribute:
            return True
        if "JUMP" in instruction.opname or instruction.opname in ("RETURN_VALUE", "RETURN_CONST", "FOR_ITER"):
            return False
    return False


def watch_subclasses(base: type[Any], defined: Callable[[type[Any]], object], what: str = "a subclass") -> Undo:
    """Have `defined(cls)` called for each class that is defined below one from now on; returns the way back.

    `what` such a class is, for the log.
    """
    own = type_namespace(base).get("__init_subclass__")

    def __init_subclass__(cls: type[Any], /, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        if own is None:
            super(base, cls).__init_subclass__(*args, **kwargs)
        else:
            own.__get__(None, cls)(*args, **kwargs)
        try:
            defined(cls)
        except Exception as fault:
            FAULTS.note(f"definition of {what}", fault)

    if isinstance(own, classmethod):
        functools.update_wrapper(__init_subclass__, own.__func__)
    return replace(base, "__init_subclass__", classmethod(__init_subclass__))


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield every class below `cls`, each once."""
    seen: set[type[Any]] = set()
    waiting = [cls]
    while waiting:
        for below in type.__subclasses__(waiting.pop()):
            if below not in seen:
                seen.add(below)
                waiting.append(below)
                yield below
