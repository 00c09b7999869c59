"""Record a method and its overrides in subclasses (a lineage) so that each call is one span.

Only the method that Python finds for an object is recorded. If it calls the overridden method by `super`, the inner
call has no span of its own.
"""

from __future__ import annotations

import dis
import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from instrument.instrumentors.function_patterns import iterate_decorated_parts, read_own_site
from instrument.instrumentors.profiled_functions import Undo, replace_attribute
from instrument.instrumentors.references import isinstance_of, type_attribute, type_namespace
from instrument.runtime.faults import FAULTS


class Lineage:
    """A method of a base class, and the overrides of the method. `subclassed(cls)` is called for each new subclass."""

    def __init__(self, base: type[Any], attribute: str, subclassed: Callable[[type[Any]], object]) -> None:
        self.base = base
        self.attribute = attribute
        self._members: weakref.WeakSet[type[Any]] = weakref.WeakSet()
        self._resolved: weakref.WeakKeyDictionary[type[Any], type[Any] | None] = weakref.WeakKeyDictionary()
        self._subclassed = subclassed
        self.undos: list[Undo] = []

    def contains_method(self, owner: Any, attribute: str) -> bool:
        is_class = attribute == self.attribute and isinstance_of(owner, type)
        return is_class and self.base in type.__dict__["__mro__"].__get__(owner)

    def overriding_classes(self) -> Iterator[type[Any]]:
        return (cls for cls in all_subclasses(self.base) if self.attribute in type_namespace(cls))

    def add_class(self, owner: type[Any]) -> LineageMember:
        self._members.add(owner)
        self._resolved.clear()
        return LineageMember(self, owner)

    def find_recording_class(self, cls: type[Any]) -> type[Any] | None:
        try:
            return self._resolved[cls]
        except KeyError:
            bases = type.__dict__["__mro__"].__get__(cls)
            owner = self._resolved[cls] = next((base for base in bases if base in self._members), None)
            return owner

    def watch_new_subclasses(self) -> None:
        if not self.undos:
            self.undos.append(watch_subclasses(self.base, self._subclassed))


class LineageMember:
    """A test for one class of a lineage. It returns True for a call that another class's probe records."""

    def __init__(self, lineage: Lineage, owner: type[Any]) -> None:
        self._lineage = lineage
        self._owner = weakref.ref(owner)

    def __call__(self, args: tuple[Any, ...]) -> bool:
        """Return True if another class's probe records the call. `args[0]` is the object or class."""
        if not args:
            return False
        cls = args[0] if isinstance_of(args[0], type) else type(args[0])
        resolved = self._lineage.find_recording_class(cls)
        return resolved is not None and resolved is not self._owner()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Pickle a substitute that always returns False."""
        return functools.partial, (operator.contains, ())


def is_method_recorded(cls: type[Any], attribute: str) -> bool:
    """Return True if a method has a probe, or always calls the method of `super`."""
    return any(
        read_own_site(function) is not None
        or hasattr(function, "__instrument_layers__")
        or _calls_super(function, attribute)
        for _, function, _ in iterate_decorated_parts(type_attribute(cls, attribute))
    )


def _calls_super(function: Any, attribute: str) -> bool:
    """Return True if each call of a function calls `super().attribute`, before any branch or return."""
    code = getattr(function, "__code__", None)
    has_super = False
    for instruction in dis.get_instructions(code) if type(code) is CodeType else ():
        if instruction.argval == "super":
            has_super = True
        elif has_super and instruction.argval == attribute:
            return True
        if "JUMP" in instruction.opname or instruction.opname in ("RETURN_VALUE", "RETURN_CONST", "FOR_ITER"):
            return False
    return False


def watch_subclasses(base: type[Any], defined: Callable[[type[Any]], object], description: str = "a subclass") -> Undo:
    """Call `defined(cls)` for each future subclass of `base`. Return the function that undoes this."""
    original = type_namespace(base).get("__init_subclass__")

    def __init_subclass__(cls: type[Any], /, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it is one
        if original is None:
            super(base, cls).__init_subclass__(*args, **kwargs)
        else:
            original.__get__(None, cls)(*args, **kwargs)
        FAULTS.attempt(f"definition of {description}", lambda: defined(cls))

    if isinstance(original, classmethod):
        functools.update_wrapper(__init_subclass__, original.__func__)
    return replace_attribute(base, "__init_subclass__", classmethod(__init_subclass__))


def all_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    visited: set[type[Any]] = set()
    waiting = [cls]
    while waiting:
        for below in type.__subclasses__(waiting.pop()):
            if below not in visited:
                visited.add(below)
                waiting.append(below)
                yield below
