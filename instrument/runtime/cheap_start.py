"""The means by which each process of a service starts cheaply: modules that are loaded by use, and small dataclasses.

`dataclass` makes what `dataclasses.dataclass` makes and has Python compile one function of each class, not six: some
0.4 ms of a class, of which a process that records has seventy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import Field, asdict, field, fields, is_dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["Field", "LazyModule", "asdict", "dataclass", "field", "fields", "is_dataclass", "replace"]


class LazyModule:
    """Replaces a module by its name. Not for hot paths: each access looks the module up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: Any = None, /, *, frozen=False, slots=False, eq=True, kw_only=False) -> Any:
        """Make a class a dataclass. Options are those of `dataclasses.dataclass`."""
        if cls is None:
            return lambda decorated: dataclass(decorated, frozen=frozen, slots=slots, eq=eq, kw_only=kw_only)
        own = dict(vars(cls))
        made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
        methods = {"__init__": _init_of(made, kw_only), "__repr__": _repr}
        if eq:
            compared = [member.name for member in fields(made) if member.compare]
            made._compared = staticmethod(attrgetter(*compared) if compared else lambda _: ())
            methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
        if frozen:
            methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
            methods |= {"__getstate__": _state, "__setstate__": _set_state} if slots else {}
        for name, method in methods.items():
            if own.get(name) is None:
                setattr(made, name, method)
        return made


def _init_of(cls: Any, kw_only: bool) -> Any:
    """Compile `__init__`, which sets fields past the `__setattr__` of a frozen class."""
    known: dict[str, Any] = {"_set": object.__setattr__, "_missing": dataclasses.MISSING}
    parameters, lines = ["self", *["*"][:kw_only]], []
    for member in fields(cls):
        name = value = parameter = member.name
        if member.default is not dataclasses.MISSING:
            known[f"_of_{name}"] = member.default
            parameter = f"{name}=_of_{name}"
        elif member.default_factory is not dataclasses.MISSING:
            known[f"_of_{name}"] = member.default_factory
            parameter, value = f"{name}=_missing", f"_of_{name}() if {name} is _missing else {name}"
        if member.init:
            parameters.append(parameter)
        lines.append(f"_set(self, {name!r}, {value if member.init else f'_of_{name}'})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), known)  # noqa: S102 - names of fields
    made = known["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return made


def _repr(self: Any) -> str:
    shown = (f"{member.name}={getattr(self, member.name)!r}" for member in fields(self) if member.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _eq(self: Any, other: Any) -> Any:
    return self._compared(self) == self._compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _refuse(self: Any, name: str, *value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _state(self: Any) -> list[object]:
    return [getattr(self, member.name) for member in fields(self)]


def _set_state(self: Any, state: list[object]) -> None:
    for member, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, member.name, value)
