"""Namespaces: the names of modules, classes and objects, read without running code of the host.

No attribute hook, property or `__class__` of its classes is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import GetSetDescriptorType, ModuleType
from typing import Any


def isinstance_of(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Do as `isinstance`, by the thing's own type: its `__class__` may be foreign code."""
    return issubclass(type(thing), kinds)


def own_names(thing: Any) -> dict[str, Any] | None:
    """Return the thing's own `__dict__`, or None."""
    if issubclass(type(thing), ModuleType):
        return namespace(thing)
    found = type_attribute(type(thing), "__dict__")
    names = found.__get__(thing) if type(found) is GetSetDescriptorType else None
    return names if type(names) is dict else None


def type_namespace(kind: type) -> Mapping[str, Any]:
    """Return a class's own names."""
    names: Mapping[str, Any] = type.__dict__["__dict__"].__get__(kind)
    return names


def type_attribute(kind: type, name: str) -> Any:
    """Return the raw value that a class or its bases have for a name; None where there is none."""
    for base in type.__dict__["__mro__"].__get__(kind):
        if name in type_namespace(base):
            return type_namespace(base)[name]
    return None


def loaded_modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield name and module of everything in `sys.modules` now that is a module."""
    for module in sys.modules.copy().values():
        if issubclass(type(module), ModuleType):
            name = namespace(module).get("__name__")
            if isinstance(name, str):
                yield name, module


def namespace(module: ModuleType) -> dict[str, Any]:
    """Return a module's own names. `vars` would wake a module that loads itself when it is first touched."""
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names
