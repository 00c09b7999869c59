"""Cheap substitutes for modules, patterns and dataclasses. They keep the start of a process short.

A substitute does its costly part only at first use.
"""

from __future__ import annotations

import dataclasses
import re
from collections import _tuplegetter, namedtuple  # type: ignore[attr-defined]
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = [
    "Field",
    "LazyModule",
    "NamedTuple",
    "asdict",
    "dataclass",
    "field",
    "fields",
    "fields_of",
    "late_pattern",
    "late_patterns",
    "replace",
]


CALLS_BEFORE_COMPILING = 32
"""The number of calls after which a class's `__init__` or `__new__` is compiled. Compiling takes as long as ten
calls."""


class LazyModule:
    """A proxy that imports its module at first use. Each access is slow, because it looks the module up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


@contextmanager
def late_patterns() -> Iterator[None]:
    """Delay the compilation of regular expressions until first use. This affects modules that the `with` block imports.
    The process must have a single thread."""
    compile_now = re.compile
    re.compile = late_pattern
    try:
        yield
    finally:
        re.compile = compile_now


if TYPE_CHECKING:
    from dataclasses import asdict as asdict
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
    from re import compile as late_pattern
    from typing import NamedTuple as NamedTuple
else:

    class _NamedTupleType(type):
        """A metaclass that makes a named tuple of a class. The class's annotated names become the names of the
        items."""

        def __new__(kind, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
            cls = type.__new__(type, name, (_Named,), {**namespace, "__slots__": ()})
            names = tuple(cls.__annotations__)
            cls._fields = cls.__match_args__ = names
            cls._field_defaults = {name: namespace[name] for name in names if name in namespace}
            for index, name in enumerate(names):
                setattr(cls, name, _tuplegetter(index, None))
            return cls

    class _Named(tuple):
        """The base class of the named tuples, with the methods of `typing.NamedTuple`."""

        __slots__ = ()
        _fields: tuple[str, ...] = ()
        _field_defaults: Mapping[str, Any] = {}
        _calls = 0

        def __new__(cls, *values: Any, **options: Any) -> Any:
            names = cls._fields
            cls._calls += 1
            if cls._calls < CALLS_BEFORE_COMPILING:
                items = cls._field_defaults | dict(zip(names, values, strict=False)) | options
                if len(items) == len(names) >= len(values) and options.keys().isdisjoint(names[: len(values)]):
                    return tuple.__new__(cls, map(items.__getitem__, names))
            cls.__new__ = namedtuple(cls.__name__, names, defaults=cls._field_defaults.values()).__new__
            return cls(*values, **options)

        @classmethod
        def _make(cls, values: Iterable[Any]) -> Any:
            result = tuple.__new__(cls, values)
            return result if len(result) == len(cls._fields) else cls(*result)

        def _replace(self, **changes: Any) -> Any:
            result = self._make(map(changes.pop, self._fields, self))
            if changes:
                raise ValueError(f"Got unexpected field names: {[*changes]!r}")
            return result

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self, strict=True))

        def __repr__(self) -> str:
            return f"{type(self).__name__}({', '.join(map('{}={!r}'.format, self._fields, self))})"

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

    NamedTuple = type.__new__(_NamedTupleType, "NamedTuple", (), {})

    class late_pattern:  # noqa: N801 - called as `re.compile`
        """A regular expression that is compiled at its first use."""

        def __init__(self, *arguments: Any) -> None:
            self._arguments = arguments

        def __getattr__(self, name: str) -> Any:
            method = self.__dict__[name] = getattr(re.compile(*self._arguments), name)
            return method

    def dataclass(cls: Any = None, /, *, frozen=False, slots=False, eq=True, kw_only=False) -> Any:
        """Make a class a dataclass. The options are those of `dataclasses.dataclass`. The class's annotations must be
        text."""
        if cls is None:
            return lambda decorated: dataclass(decorated, frozen=frozen, slots=slots, eq=eq, kw_only=kw_only)
        namespace = dict(vars(cls))
        added = {
            name: namespace.get(name, MISSING) for name, kind in cls.__annotations__.items() if kind[:8] != "ClassVar"
        }
        inherited: dict[str, Any] = {}
        for base in cls.__mro__[:0:-1]:
            facts = vars(base)
            inherited |= facts["_members"] if "_members" in facts else facts.get("__dataclass_fields__", {})
        if slots:
            base_slots = {name for base in cls.__mro__[1:] for name in vars(base).get("__slots__", ())}
            attributes = {
                name: value for name, value in namespace.items() if name not in {*added, "__dict__", "__weakref__"}
            }
            attributes |= {
                "__slots__": tuple(name for name in added if name not in base_slots),
                "__qualname__": cls.__qualname__,
            }
            result = type(cls)(cls.__name__, cls.__bases__, attributes)
        else:
            result = cls
            for name, value in added.items():
                if not isinstance(value, Field):
                    continue
                if value.default is MISSING:
                    delattr(cls, name)
                else:
                    setattr(cls, name, value.default)
        methods: dict[str, Any] = {"__init__": _make_uncompiled_init(result, kw_only), "__repr__": _repr}
        if eq:
            methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
        if frozen:
            methods |= {"__setattr__": _refuse_assignment, "__delattr__": _refuse_assignment}
            methods |= {"__getstate__": _get_state, "__setstate__": _set_state} if slots else {}
        for name, method in methods.items():
            if namespace.get(name) is None:
                setattr(result, name, method)
        result._members, result._compared_values = inherited | added, None
        result.__match_args__ = () if kw_only else tuple(result._members)
        result.__dataclass_fields__ = _LateFields(result, "__dataclass_fields__", frozen, kw_only)
        result.__dataclass_params__ = _LateFields(result, "__dataclass_params__", frozen, kw_only)
        return result

    def replace(thing: Any, /, **changes: Any) -> Any:
        same = {name: getattr(thing, name) for name, fact in fields_of(thing) if fact.init and name not in changes}
        return type(thing)(**same, **changes)

    def asdict(thing: Any) -> Any:
        if isinstance(thing, Mapping):
            return {name: asdict(value) for name, value in thing.items()}
        if type(thing) in (tuple, list):
            return type(thing)(map(asdict, thing))
        return {name: asdict(getattr(thing, name)) for name, _ in facts} if (facts := fields_of(thing)) else thing


def fields_of(thing: Any) -> list[tuple[str, Field[Any]]]:
    cls: Any = thing if isinstance(thing, type) else type(thing)
    facts: Any = vars(cls).get("_all_members")
    if facts is None:
        declared = cls._members if hasattr(cls, "_members") else getattr(cls, "__dataclass_fields__", {})
        facts = [(name, fact if isinstance(fact, Field) else field(default=fact)) for name, fact in declared.items()]
        if hasattr(cls, "_members"):
            cls._all_members = facts
    return facts  # type: ignore[no-any-return]


class _LateFields:
    """A placeholder for an attribute such as `__dataclass_fields__`. The first access computes the attribute."""

    def __init__(self, cls: Any, name: str, frozen: bool, kw_only: bool) -> None:
        self._cls, self._name = cls, name
        self._options: dict[str, Any] = {
            "frozen": frozen,
            "kw_only": kw_only,
            "init": False,
            "repr": False,
            "eq": False,
        }

    def __get__(self, instance: object, owner: type) -> Any:
        cls = self._cls
        kinds: dict[str, str] = {}
        for base in cls.__mro__[::-1]:
            kinds |= getattr(base, "__annotations__", {})
        declared = [(name, kinds[name], member) for name, member in fields_of(cls)]
        documented = {"__doc__": cls.__doc__ or cls.__name__}  # without, its signature is read and its text parsed
        twin: Any = dataclasses.make_dataclass(cls.__name__, declared, namespace=documented, **self._options)
        cls.__dataclass_fields__, cls.__dataclass_params__ = twin.__dataclass_fields__, twin.__dataclass_params__
        return getattr(twin, self._name)


def _make_uncompiled_init(cls: Any, kw_only: bool) -> Any:
    """Return a slow `__init__`, which needs no compilation. After `CALLS_BEFORE_COMPILING` calls, or an invalid call,
    it replaces itself with a compiled `__init__`."""
    calls = 0

    def initialise_fields(self: Any, *values: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        facts = cls._members
        arguments = dict(zip(facts, values, strict=False)) | options
        is_sound = len(arguments) == len(values) + len(options) and arguments.keys() <= facts.keys()
        if (
            is_sound
            and not (kw_only and values)
            and calls < CALLS_BEFORE_COMPILING
            and _set_fields(self, facts, arguments)
        ):
            return
        cls.__init__ = compiled = _compile_init(cls, kw_only)
        compiled(self, *values, **options)

    return initialise_fields


def _set_fields(self: Any, facts: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
    for name, fact in facts.items():
        value = arguments.get(name, MISSING)
        if isinstance(fact, Field):
            if not fact.init:
                return False
            if value is MISSING:
                make: Any = fact.default_factory
                value = fact.default if make is MISSING else make()
        elif value is MISSING:
            value = fact
        if value is MISSING:
            return False
        object.__setattr__(self, name, value)
    if hasattr(self, "__post_init__"):
        self.__post_init__()
    return True


def _compile_init(cls: Any, kw_only: bool) -> Any:
    names: dict[str, Any] = {"_set": object.__setattr__, "_missing": MISSING}
    parameters, lines = ["self", *["*"][:kw_only]], []
    for name, member in fields_of(cls):
        value = parameter = name
        if member.default is not MISSING:
            names[f"_of_{name}"] = member.default
            parameter = f"{name}=_of_{name}"
        elif member.default_factory is not MISSING:
            names[f"_of_{name}"] = member.default_factory
            parameter, value = f"{name}=_missing", f"_of_{name}() if {name} is _missing else {name}"
        if member.init:
            parameters.append(parameter)
        lines.append(f"_set(self, {name!r}, {value if member.init else f'_of_{name}'})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines or ["pass"]), names)  # noqa: S102 - names of fields
    function = names["__init__"]
    function.__qualname__, function.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return function


def _repr(self: Any) -> str:
    shown = (f"{name}={getattr(self, name)!r}" for name, member in fields_of(self) if member.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _compared_values(self: Any) -> Any:
    cls = type(self)
    if cls._compared_values is None:
        names = [name for name, member in fields_of(cls) if member.compare]
        cls._compared_values = staticmethod(attrgetter(*names) if names else lambda _: ())
    return cls._compared_values(self)


def _eq(self: Any, other: Any) -> Any:
    return _compared_values(self) == _compared_values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared_values(self))


def _refuse_assignment(self: Any, name: str, *value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _get_state(self: Any) -> list[object]:
    return [getattr(self, name) for name in self._members]


def _set_state(self: Any, state: list[object]) -> None:
    for name, value in zip(self._members, state, strict=True):
        object.__setattr__(self, name, value)
