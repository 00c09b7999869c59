"""Find the functions (targets) that a pattern of a profile selects in a module.

In a pattern `module:qualname`, `*` matches within a segment and `**` crosses dots. `+` after a method's name also
selects its overrides in subclasses. A function inside the object of a known decorator is selected, too.

A pattern with a wildcard selects only functions that the module itself defines. It skips properties, partial objects,
and special methods except `__init__` and `__call__`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from re import Pattern, escape
from re import compile as compile_pattern
from types import BuiltinFunctionType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from instrument import native
from instrument.instrumentors.references import (
    Kept,
    instance_dict,
    isinstance_of,
    module_namespace,
    type_attribute,
    type_namespace,
)
from instrument.recording.spans import Site
from instrument.runtime.lazy_imports import NamedTuple, dataclass, field, late_pattern
from instrument.runtime.main_module import list_names_of_module

Put = Callable[[Any], Any]
"""A function that puts a new function into a decorator's object, and returns the changed object or a new object."""

_NATIVE = native.MODULE
_CACHED = type(lru_cache(lambda: None))
_MADE_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
_DECORATORS = (contextlib.contextmanager, contextlib.asynccontextmanager)
_CONSTANTS = [constant for decorator in _DECORATORS for constant in decorator.__code__.co_consts]
_CONTEXT_MANAGERS = tuple(constant for constant in _CONSTANTS if isinstance(constant, CodeType))
"""The code objects of the functions that `contextlib` makes from generators."""

_FIELD = late_pattern(r"\{(module|qualname|class|function)\}")

SUBCLASSES = "+"
"""The suffix of a pattern that also selects a method's overrides in subclasses."""

INSIDE = 200
"""The maximum number of objects to examine inside a decorator's object to find its function."""


@dataclass(frozen=True, slots=True)
class Target:
    """A function that a rule selects, in the attribute `attribute` of `owner`.

    `raw` is the attribute's value: the function, or a decorator's object around it. It is None if the attribute is
    never replaced. `put` exchanges the function in `raw`, and returns the new value.
    """

    owner: Any
    attribute: str
    raw: Any
    function: Callable[..., Any]
    module: str
    qualname: str
    note: str = ""
    put: Put = field(default=lambda new: new, compare=False, repr=False)

    @property
    def label(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def span_name(self) -> str | None:
        """The qualified name if the function's own name says nothing, such as `<lambda>`. Otherwise None."""
        own_name = getattr(self.function, "__name__", "")
        part = self.qualname.rpartition(".")[2]
        return self.qualname if own_name in ("<lambda>", "_") or part in ("setter", "deleter") or "[" in part else None

    def fill_span_name(self, name: str) -> str:
        """Replace `{module}`, `{qualname}`, `{class}` and `{function}` in a rule's span name."""
        owner, _, function_name = self.qualname.rpartition(".")
        value_by_field = {"module": self.module, "qualname": self.qualname, "class": owner, "function": function_name}
        return _FIELD.sub(lambda field: value_by_field[field[1]], name)


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A selected function that cannot be recorded, and the reason."""

    label: str
    why: str


@lru_cache(maxsize=4096)
def compile_dotted_pattern(text: str) -> Pattern[str]:
    """Compile a dotted pattern. `*` matches within a segment, and `**` any number of segments."""
    segments = text.split(".")
    last = len(segments) - 1
    expression = ""
    for i, segment in enumerate(segments):
        if segment == "**":
            expression += r"(?:[^.]+\.)*" if i < last else r"[^.]+(?:\.[^.]+)*"
        else:
            expression += escape(segment).replace(r"\*", "[^.]*") + (r"\." if i < last else "")
    return compile_pattern(expression + r"\Z")


def matches_pattern(text: str, name: str) -> bool:
    return compile_dotted_pattern(text).match(name) is not None


def make_site(
    function: Any,
    *,
    name: str | None = None,
    kind: str | None = None,
    device: bool = False,
    phase: str | None = None,
    min_ns: int = 0,
) -> Site:
    """Make a site for a function, with its names, file and line. `name` replaces the function's name."""
    inner = inspect.unwrap(function, stop=lambda f: hasattr(f, "__instrument__")) if callable(function) else function
    code = getattr(inner, "__code__", None)
    qualname = getattr(function, "__qualname__", getattr(function, "__name__", type(function).__name__))
    name, kind = name or qualname_of(function), kind or ("phase" if phase else "op")
    file, line = ("", 0) if code is None else (code.co_filename, code.co_firstlineno)
    facts = (("phase", phase),) if phase else ()
    suspends = inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)
    module = getattr(function, "__module__", None) or ""
    return Site(name, kind, module, qualname, file, line, "", device, facts, min_ns, suspends=suspends)


def qualname_of(function: Any) -> str:
    qualname: str = getattr(function, "__qualname__", getattr(function, "__name__", type(function).__name__))
    return qualname.rpartition("<locals>.")[2]


def find_functions(module: ModuleType, match: str, name: str = "") -> Iterator[Target | Unreachable]:
    """Yield the functions of a module that a pattern selects, without running code of the module.

    `name` is the module's name in labels, by default `module.__name__`.
    """
    qualname = match.partition(":")[2].removesuffix(SUBCLASSES)
    name = name or module.__name__
    label = f"{name}:{qualname}"
    if "*" in qualname:
        for thing in _find_matching_functions(module, module, "", qualname, set(), called=name):
            is_made_in_c = isinstance(thing, Target) and type(thing.function) is BuiltinFunctionType
            if not (is_made_in_c and "*" in match.partition(":")[0]):
                yield thing
        first = qualname.partition(".")[0]
        holder = module_namespace(module).get(first)
        inner_class = None if "*" in first else _find_decorated_class(holder, module.__name__, first)
        if inner_class is not None:
            things = _find_matching_functions(
                module, inner_class, first + ".", qualname, {id(inner_class)}, called=name
            )
            yield from _add_decorator_notes(things, holder)
        return
    owner: Any = module
    holder = None
    *path, last = qualname.split(".")
    for index, segment in enumerate(path):
        if type(owner) is FunctionType:
            break
        owner = _read_raw_attribute(owner, segment)
        if owner is None:
            return
        inner_class = _find_decorated_class(owner, module.__name__, ".".join(path[: index + 1]))
        if inner_class is not None and type_attribute(inner_class, [*path, last][index + 1]) is not None:
            owner, holder = inner_class, owner
    yield from _add_decorator_notes(_find_named_functions(module, owner, last, qualname, label), holder)


def _find_named_functions(
    module: ModuleType, owner: Any, last: str, qualname: str, label: str
) -> Iterator[Target | Unreachable]:
    if type(owner) is FunctionType:
        if any(isinstance(const, CodeType) and const.co_name == last for const in owner.__code__.co_consts):
            why = f"it is made anew at each call of {owner.__qualname__}; use @profiled in the source"
            yield Unreachable(label, why)
        return
    value = _read_raw_attribute(owner, last)
    if value is None:
        if owner is module and "__getattr__" in module_namespace(module):
            why = "the module makes names when they are asked for (__getattr__); name the module that defines it"
            yield Unreachable(label, why)
        return
    inner_class = _find_decorated_class(value, module.__name__, qualname)
    if inner_class is not None:
        yield from _add_decorator_notes(_find_public_methods(module, inner_class, qualname, label), value)
    elif isinstance_of(value, type):
        yield from _find_public_methods(module, value, qualname, label)
    else:
        is_own = isinstance_of(owner, type) or last in (instance_dict(owner) or ())
        yield from _find_functions_in_value(module.__name__, owner if is_own else type(owner), last, value, label)


def _find_public_methods(
    module: ModuleType, cls: type[Any], qualname: str, label: str
) -> Iterator[Target | Unreachable]:
    home, called = type_attribute(cls, "__module__"), label.partition(":")[0]
    below = _find_matching_functions(
        module, cls, qualname + ".", qualname + ".*", {id(cls)}, methods_of=home, called=called
    )
    yield from list(below) or [Unreachable(label, "the class has no public method made in Python")]


def _add_decorator_notes(things: Iterable[Target | Unreachable], holder: Any) -> Iterator[Target | Unreachable]:
    for thing in things:
        if holder is None or isinstance(thing, Unreachable):
            yield thing
        else:
            note = f"inside a {type(holder).__module__}.{type(holder).__name__}"
            yield dataclasses.replace(thing, note="; ".join(filter(None, [note, thing.note])))


def _read_raw_attribute(owner: Any, attribute: str) -> Any:
    if isinstance_of(owner, type):
        return type_attribute(owner, attribute)
    names = instance_dict(owner) or {}
    if attribute in names or isinstance_of(owner, ModuleType):
        return names.get(attribute)
    return type_attribute(type(owner), attribute)


def _find_matching_functions(
    module: ModuleType, owner: Any, prefix: str, qualname: str, visited: set[int], *, called: str, methods_of: str = ""
) -> Iterator[Target | Unreachable]:
    home = methods_of or module.__name__
    names = module_namespace(owner) if isinstance_of(owner, ModuleType) else type_namespace(owner)
    for attribute, raw in list(names.items()):
        name = prefix + attribute
        if isinstance_of(raw, type):
            if raw.__module__ == home and id(raw) not in visited and not methods_of:
                visited.add(id(raw))
                yield from _find_matching_functions(module, raw, name + ".", qualname, visited, called=called)
            continue
        if not matches_pattern(qualname, name) or (methods_of and not is_public_method(attribute)):
            continue
        is_special = attribute[:2] == attribute[-2:] == "__" and attribute not in ("__init__", "__call__")
        if is_special and not qualname.rpartition(".")[2].startswith("__"):
            continue
        if isinstance_of(raw, (property, functools.cached_property, partial, functools.partialmethod)):
            continue
        for thing in _find_functions_in_value(
            module.__name__, owner, attribute, raw, f"{called}:{name}", explicit=False
        ):
            if isinstance(thing, Target) and getattr(thing.function, "__module__", None) == home:
                yield thing


def read_own_site(function: Any) -> Site | None:
    if _NATIVE is not None and isinstance_of(function, _NATIVE.Function):
        site = getattr(function, "__instrument__", None)
    else:
        site = (instance_dict(function) or {}).get("__instrument__")
    return site if type(site) is Site else None


def is_public_method(method: str) -> bool:
    return not method.startswith("_") or method == "__call__"


def _is_function(thing: Any) -> bool:
    kind = type(thing)
    made_by_cython = kind.__name__ == "cython_function_or_method"
    return kind in (FunctionType, BuiltinFunctionType, _CACHED) or made_by_cython or read_own_site(thing) is not None


def find_override_targets(cls: type[Any], attribute: str) -> Iterator[Target | Unreachable]:
    home: str = type_attribute(cls, "__module__")
    yield from _find_functions_in_value(
        home, cls, attribute, type_namespace(cls)[attribute], make_method_label(cls, attribute)
    )


def make_method_label(cls: type[Any], attribute: str) -> str:
    """Return the label `module:qualname` by which a rule can select a method of a class."""
    return f"{type_attribute(cls, '__module__')}:{type.__dict__['__qualname__'].__get__(cls)}.{attribute}"


def _find_functions_in_value(
    home: str, owner: Any, attribute: str, raw: Any, label: str, *, explicit: bool = True
) -> Iterator[Target | Unreachable]:
    module, _, qualname = label.partition(":")
    parts = list(iterate_decorated_parts(raw))
    for part in parts:
        if isinstance(owner, type) and type(part.function) is BuiltinFunctionType and raw is part.function:
            yield Unreachable(label + part.suffix, "it is a method made in C")
        else:
            yield Target(owner, attribute, raw, part.function, module, qualname + part.suffix, put=part.put)
    if parts or not explicit:
        return
    if isinstance_of(raw, _MADE_IN_C) or (isinstance(owner, type) and isinstance_of(raw, BuiltinFunctionType)):
        yield Unreachable(label, "it is a method made in C")
        return
    inside, put = _find_decorated_object(raw, home, qualname)
    if inside is not None:
        note = f"inside a {type(raw).__module__}.{type(raw).__name__}"
        if put is None:
            yield Unreachable(label, f"{note}, which has no name for it: use @profiled below its decorator")
        else:
            yield Target(owner, attribute, None, inside, module, qualname, note, put)
        return
    kind = next((base for base in type(raw).__mro__ if "__call__" in type_namespace(base)), None)
    call = None if kind is None else type_namespace(kind)["__call__"]
    package = home.partition(".")[0]
    if kind is not None and call is not None and _is_function(call) and kind.__module__.partition(".")[0] == package:
        note = f"as {kind.__name__}.__call__, for all objects of that class"
        yield Target(kind, "__call__", call, call, module, qualname, note)
        return
    yield Unreachable(label, f"it is a {type(raw).__name__}, not a function")


class DecoratedPart(NamedTuple):
    """A function inside a decorator's object. `put` replaces the function in the object. `suffix` is the end of the
    function's label, such as `.setter`."""

    suffix: str
    function: Any
    put: Put


def iterate_decorated_parts(raw: Any) -> Iterator[DecoratedPart]:
    kind = type(raw)
    parts: list[tuple[str, Any, Put]] = []
    if kind is FunctionType and raw.__code__ in _CONTEXT_MANAGERS and read_own_site(raw) is None:
        cell = dict(zip(raw.__code__.co_freevars, raw.__closure__ or (), strict=True))["func"]
        parts = [("", cell.cell_contents, partial(_put_function, raw, setattr, cell, "cell_contents"))]
    elif _is_function(raw):
        parts = [("", raw, lambda new: new)]
    elif issubclass(kind, (staticmethod, classmethod)):
        parts = [("", raw.__func__, kind)]
    elif issubclass(kind, property):
        sides = ((0, "", raw.fget), (1, ".setter", raw.fset), (2, ".deleter", raw.fdel))
        parts = [(suffix, side, partial(_set_accessor, raw, index)) for index, suffix, side in sides]
    elif issubclass(kind, partial):
        state: Any = partial.__reduce__(raw)[2]
        parts = [("", state[0], partial(_set_partial_function, raw))]
    elif issubclass(kind, (functools.cached_property, functools.partialmethod)):
        names = instance_dict(raw) or {}
        parts = [("", names.get("func"), partial(_put_function, raw, dict.__setitem__, names, "func"))]
    elif issubclass(kind, functools.singledispatchmethod):
        dispatcher = (instance_dict(raw) or {})["dispatcher"]
        parts = [
            ("" if of is object else f"[{of.__name__}]", part, partial(_put_function, raw, dispatcher.register, of))
            for of, part in dict(dispatcher.registry).items()
        ]
    elif type_attribute(kind, "_self_wrapper") is not None:  # wrapt's wrapper has a slot for the function
        slot = type_attribute(kind, "__wrapped__")
        if type(slot) in (GetSetDescriptorType, MemberDescriptorType):
            parts = [("", slot.__get__(raw), partial(_put_function, raw, type(slot).__set__, slot, raw))]
    yield from (DecoratedPart(*part) for part in parts if _is_function(part[1]))


def _put_function(raw: Any, put: Callable[..., object], *arguments: Any) -> Any:
    put(*arguments)
    return raw


def _set_partial_function(raw: Any, new: Any) -> Any:
    state: Any = partial.__reduce__(raw)[2]
    partial.__setstate__(raw, (new, *state[1:]))  # type: ignore[attr-defined]
    return raw


def _set_accessor(raw: property, index: int, new: Any) -> property:
    sides: list[Any] = [raw.fget, raw.fset, raw.fdel]
    sides[index] = new
    property.__init__(raw, sides[0], sides[1], sides[2], property.__dict__["__doc__"].__get__(raw))
    return raw


def _find_decorated_class(raw: Any, module: str, qualname: str) -> type[Any] | None:
    if raw is None or isinstance_of(raw, (type, ModuleType, FunctionType, str, int, float, tuple, list, dict, set)):
        return None
    cls: type[Any] | None = _find_decorated_object(raw, module, qualname, type)[0]
    return cls


def _find_decorated_object(
    raw: Any, module: str, qualname: str, kind: type[Any] = FunctionType
) -> tuple[Any, Put | None]:
    """Find the function or class inside the object that a framework's decorator has made. Also return a function that
    replaces it there (None if impossible)."""
    visited, near = {id(raw)}, Kept([raw])
    function: Any = None
    for thing in near:
        for part in gc.get_referents(thing):
            if id(part) in visited or len(near) > INSIDE:
                continue
            visited.add(id(part))
            if type(part) is FunctionType:
                if kind is FunctionType and (part.__module__, part.__qualname__) == (module, qualname):
                    function = part
            elif isinstance_of(part, type):
                if type_attribute(part, "__module__") != module:
                    continue
                if kind is type and type.__dict__["__qualname__"].__get__(part) == qualname:
                    return part, lambda new: new
                near.append(part)  # a class that was made for the function
            elif not (
                isinstance_of(part, (ModuleType, CodeType, str)) or (type(part) is dict and "__builtins__" in part)
            ):
                near.append(part)
    has_place = function is not None and any(_find_containers(near, function))
    return function, partial(_replace_function, near, Kept([function])) if has_place else None


def _find_containers(near: Kept, function: Any) -> Iterator[tuple[Any, str, DecoratedPart]]:
    for thing in near:
        names = (
            type_namespace(thing)
            if isinstance_of(thing, type)
            else thing
            if type(thing) is dict
            else instance_dict(thing)
        )
        for name, value in list((names or {}).items()):
            if type(name) is str:
                yield from ((thing, name, part) for part in iterate_decorated_parts(value) if part.function is function)


def _replace_function(near: Kept, now: Kept, new: Any) -> None:
    for thing, name, part in Kept(_find_containers(near, now[0])):
        if isinstance_of(thing, type):
            type.__setattr__(thing, name, part.put(new))
        else:
            names = thing if type(thing) is dict else instance_dict(thing)
            names[name] = part.put(new)  # type: ignore[index]
    now[0] = new


def list_labels(modules: Iterable[ModuleType]) -> list[str]:
    things = (
        thing
        for module in modules
        for thing in _find_matching_functions(module, module, "", "**", set(), called=list_names_of_module(module)[-1])
    )
    return [thing.label for thing in things if isinstance(thing, Target)]
