"""The names that modules and classes have for functions, and the other objects that refer to functions.

Namespaces are read without running code of the service: no attribute hook, property or `__class__` of its classes.
A probe replaces its function under the names of modules and classes. Other objects keep the bare function: tables that
decorators fill, tuples, closures, defaults. The verdict on the rule names them with their place.
"""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from linecache import getlines
from pathlib import Path
from traceback import walk_stack
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    ModuleType,
)
from typing import Any

from instrument.runtime.cheap_start import NamedTuple
from instrument.runtime.main_module import MAINS, spawned_main

DEPTH = 4
"""The maximum number of steps from a function back through the objects that refer to it, such as lists and closures."""

WIDTH = 200
"""The maximum number of objects at one depth whose referrers are sought."""

MANY = 200
"""The maximum number of objects for which `gc.get_referrers` is used, which compares the whole heap with each object.
More objects are sought by a set of their ids."""

HIDDEN = "something that Python does not show, such as a local variable or an object made in C"

_SUSPENDED = (GeneratorType, CoroutineType, AsyncGeneratorType)
_FRAMES = ("gi_frame", "cr_frame", "ag_frame")


class Kept(list[Any]):
    """A list of this package's own, which is not reported as a reference."""


class Name(NamedTuple):
    """A name of an object in a module or class, the `owner`. `key` is the object's `id`."""

    owner: Any
    name: str
    key: int


def names_in_modules(things: Iterable[Any], spared: Collection[str] = ()) -> list[Name]:
    """Return the names of objects in the imported modules, but not in `spared` packages."""
    ids, spared = set(map(id, things)), {"instrument", *spared}
    result: list[Name] = []
    spawned = spawned_main()
    for module in [*sys.modules.copy().values(), *([] if spawned is None else [spawned])] if ids else ():
        # One loop in C, as hardly any module has such a name.
        if issubclass(type(module), ModuleType) and not ids.isdisjoint(map(id, list(namespace(module).values()))):
            names = namespace(module)
            name = MAINS[1] if module is spawned else names.get("__name__")
            if isinstance(name, str) and name.partition(".")[0] not in spared:
                result += [Name(module, bound, id(value)) for bound, value in list(names.items()) if id(value) in ids]
    return result


def rebind(pairs: Iterable[tuple[Any, Any]], *, spared: Collection[str] = ()) -> bool:
    """Rebind the names of each pair's first object to the second, in all imported modules.

    Modules of this package and of the packages in `spared` are left out. Returns True if there was such a name.
    """
    pairs = list(pairs)
    seconds = {id(first): second for first, second in pairs}
    names = names_in_modules((first for first, _ in pairs), spared)
    for module, bound, key in names:
        if id(namespace(module).get(bound)) == key:
            namespace(module)[bound] = seconds[key]
    return bool(names)


class Search:
    """A search of the heap for references to objects, except names in modules.

    `in_classes` has the names in classes, `others` descriptions of the other referrers by the object's identity.
    `counts` has the expected references per object's identity, without names in modules. `is_ours` returns True for
    objects of this package. It reads the heap once per depth, about 70 ns an object.
    """

    def __init__(self, things: Kept, counts: Mapping[int, int], is_ours: Callable[[Any], bool]) -> None:
        self.in_classes: list[Name] = []
        self.others: dict[int, list[str]] = {}
        roots = {id(thing): {id(thing)} for thing in things}
        kinds: dict[int, str] = {}
        visited, level = Kept(things), things
        running = {None, *_running_codes()} if things else set()
        unknown = {id(thing) for thing in things if getattr(thing, "__code__", None) in running}
        shown: Counter[int] = Counter()
        for depth in range(DEPTH + 1) if things else ():
            level_ids, above = set(map(id, level)), Kept()
            for holder in _referrers(level):
                if type(holder) is Kept or _is_frame_of_ours(holder):
                    continue
                parts = Kept(part for part in gc.get_referents(holder) if id(part) in level_ids)
                shown.update(map(id, parts if depth or not _is_namespace(holder) else ()))
                if is_ours(holder) or not parts:
                    continue
                if _is_namespace(holder) or (depth and _is_of_class(holder)):
                    for part in parts if depth else ():
                        self._note(roots[id(part)], _describe_name(holder, part))
                    continue
                if id(holder) in roots:
                    continue
                reached = set().union(*(roots[id(part)] for part in parts))
                if isinstance_of(holder, type) and depth == 1:
                    names = type_namespace(holder).items()
                    self.in_classes += [Name(holder, name, id(value)) for name, value in names if id(value) in reached]
                    continue
                words = _describe_holder(holder, parts)
                kinds[id(holder)] = kinds.get(id(parts[0]), _kind(holder))
                if words is not None or depth == DEPTH or len(above) == WIDTH:
                    self._note(reached, kinds[id(holder)] if words is None else words)
                    continue
                roots[id(holder)] = reached
                above.append(holder)
                visited.append(holder)
            for key in level_ids:
                if shown[key] < counts.get(key, 1) and key not in unknown:
                    self._note(roots[key], kinds.get(key, HIDDEN))
            level = above
            if not level:
                break

    def _note(self, reached: Iterable[int], words: str) -> None:
        for key in reached if words else ():
            if words not in (descriptions := self.others.setdefault(key, [])):
                descriptions.append(words)


def _referrers(things: Kept) -> list[Any]:
    """Return the objects that refer to the things, except the tuple of arguments that Python 3.13 also finds."""
    arguments = tuple(things)
    if len(arguments) <= MANY:
        return [holder for holder in gc.get_referrers(*arguments) if holder is not arguments and holder is not things]
    ids = set(map(id, arguments))
    return [
        thing
        for thing in gc.get_objects()
        if thing is not arguments and not ids.isdisjoint(map(id, gc.get_referents(thing)))
    ]


def _is_namespace(holder: Any) -> bool:
    return type(holder) is dict and "__name__" in holder and "__spec__" in holder


def _is_of_class(holder: Any) -> bool:
    return type(holder) is dict and "__module__" in holder and "__doc__" in holder


def _describe_name(names: dict[str, Any], part: Any) -> str:
    """Describe an object by the name that a module or class has for it."""
    name = next((name for name, value in list(names.items()) if value is part), "")
    module = sys.modules.get(names.get("__module__", ""))
    of_module = names if module is None else namespace(module)
    file = str(of_module.get("__file__") or of_module.get("__name__"))
    line = line_of(name, getlines(file, of_module), is_indented=module is not None)
    return f"{_kind(part)} in {_shown(file, line)} ({name})"


def _kind(thing: Any) -> str:
    name = type(thing).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _describe_holder(holder: Any, parts: Kept) -> str | None:
    """Describe an object that refers to a function. Return None to describe its referrers instead, "" to omit it."""
    if type(holder) is FunctionType:
        code = holder.__code__
        return f"the function {holder.__qualname__} in {_shown(code.co_filename, code.co_firstlineno)}"
    if isinstance_of(holder, type):
        return f"the class {type.__dict__['__qualname__'].__get__(holder)}"
    if isinstance_of(holder, _SUSPENDED):
        holder = next((frame for name in _FRAMES if (frame := getattr(holder, name, None)) is not None), None)
    if type(holder) is not FrameType:
        return "" if holder is None else None
    is_own = any(getattr(part, "__code__", None) is holder.f_code for part in parts)  # a call of the function itself
    return (
        "" if is_own else f"a call of {holder.f_code.co_name} in {_shown(holder.f_code.co_filename, holder.f_lineno)}"
    )


def _shown(file: str, line: int) -> str:
    folder = f"{Path.cwd()}/"
    return file.removeprefix(folder) + (f":{line}" if line else "")


def line_of(name: str, lines: list[str], *, is_indented: bool) -> int:
    """Return the number of the first line that begins with a name or defines it, 0 if there is none."""
    indent = r"[ \t]+" if is_indented else ""
    begins = re.compile(rf"{indent}(?:async def |def |class |[\w, ]+, )?{re.escape(name)}\b")
    return next((number for number, line in enumerate(lines, 1) if begins.match(line)), 0)


def _running_codes() -> set[Any]:
    """Return the code objects of all running calls. Each call refers to its own function."""
    return {frame.f_code for top in sys._current_frames().values() for frame, _ in walk_stack(top)}


def _is_frame_of_ours(holder: Any) -> bool:
    name = str(holder.f_globals.get("__name__")) if type(holder) is FrameType else ""
    return name.partition(".")[0] in ("instrument", "importlib")


def is_of_package(holder: Any) -> bool:
    """Return True for an object of a class of this package, or the namespace of a module of it."""
    if isinstance_of(holder, ModuleType):
        return False
    home = type.__dict__["__module__"].__get__(type(holder))
    name = holder.get("__name__") if _is_namespace(holder) else home
    return type(name) is str and name.partition(".")[0] == "instrument"


def isinstance_of(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Test like `isinstance`, but by the object's type. Its `__class__` might run foreign code."""
    return issubclass(type(thing), kinds)


def own_names(thing: Any) -> dict[str, Any] | None:
    """Return the object's own `__dict__`, or None."""
    if issubclass(type(thing), ModuleType):
        return namespace(thing)
    descriptor = type_attribute(type(thing), "__dict__")
    names = descriptor.__get__(thing) if type(descriptor) is GetSetDescriptorType else None
    return names if type(names) is dict else None


def type_namespace(kind: type) -> Mapping[str, Any]:
    """Return a class's own names."""
    names: Mapping[str, Any] = type.__dict__["__dict__"].__get__(kind)
    return names


def type_attribute(kind: type, name: str) -> Any:
    """Return the raw value of a name in a class or its bases, None if there is none."""
    for base in type.__dict__["__mro__"].__get__(kind):
        if name in type_namespace(base):
            return type_namespace(base)[name]
    return None


def loaded_modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the name and the module of each entry of `sys.modules` that is a module."""
    for module in sys.modules.copy().values():
        if issubclass(type(module), ModuleType):
            name = namespace(module).get("__name__")
            if isinstance(name, str):
                yield name, module


def namespace(module: ModuleType) -> dict[str, Any]:
    """Return a module's own names. `vars` would load a lazy module."""
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names
