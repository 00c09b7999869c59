"""Find all references to a function: names in modules and classes, and other objects.

A recording function replaces the original only under its names. Tables, closures and defaults still refer to the
original, so calls through them are not recorded, and `instrument check` lists them. The search runs no code of the
service.
"""

from __future__ import annotations

import gc
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from linecache import getlines
from pathlib import Path
from traceback import walk_stack
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from instrument.runtime.lazy_imports import NamedTuple
from instrument.runtime.main_module import MAINS, find_spawned_namespace

DEPTH = 4
"""The maximum length of a chain of objects, such as lists and closures, that leads to a function."""

WIDTH = 200
"""The maximum number of objects per depth for which referrers are searched."""

MANY = 200
"""The maximum number of objects for `gc.get_referrers`. With more objects, comparing ids is faster."""

HIDDEN = "something that Python does not show, such as a local variable or an object made in C"

_SUSPENDED = (GeneratorType, CoroutineType, AsyncGeneratorType)
_FRAMES = ("gi_frame", "cr_frame", "ag_frame")


class Kept(list[Any]):
    """A list of this package. Its references to functions are not reported to the user."""


class Name(NamedTuple):
    """A name of an object in `owner`, a module or class. `key` is the object's `id`."""

    owner: Any
    name: str
    key: int


def find_names_in_modules(things: Iterable[Any], spared: Collection[str] = ()) -> list[Name]:
    ids, spared = set(map(id, things)), {"instrument", *spared}
    result: list[Name] = []
    spawned = find_spawned_namespace()
    for module in [*sys.modules.copy().values(), *([] if spawned is None else [spawned])] if ids else ():
        # One loop in C, as hardly any module has such a name.
        if issubclass(type(module), ModuleType) and not ids.isdisjoint(
            map(id, list(module_namespace(module).values()))
        ):
            names = module_namespace(module)
            name = MAINS[1] if module is spawned else names.get("__name__")
            if isinstance(name, str) and name.partition(".")[0] not in spared:
                result += [Name(module, bound, id(value)) for bound, value in list(names.items()) if id(value) in ids]
    return result


def rebind_objects(pairs: Iterable[tuple[Any, Any]], *, spared: Collection[str] = ()) -> bool:
    """Replace the first object of each pair by the second, under all names in modules. Return True if a module had such
    a name.

    Modules of this package and of the `spared` packages are left out.
    """
    pairs = list(pairs)
    seconds = {id(first): second for first, second in pairs}
    names = find_names_in_modules((first for first, _ in pairs), spared)
    for module, bound, key in names:
        if id(module_namespace(module).get(bound)) == key:
            module_namespace(module)[bound] = seconds[key]
    return bool(names)


class Search:
    """A search of memory for all references to `things`, except names in modules.

    - `in_classes`: the names in classes
    - `others`: descriptions of the other referrers, by the id of the thing
    - `counts`: the expected number of references to each thing, by its id
    """

    def __init__(self, things: Kept, counts: Mapping[int, int], is_ours: Callable[[Any], bool]) -> None:
        self.in_classes: list[Name] = []
        self.others: dict[int, list[str]] = {}
        roots = {id(thing): {id(thing)} for thing in things}
        kinds: dict[int, str] = {}
        visited, level = Kept(things), things
        # A running call refers to its function.
        tops = list(sys._current_frames().values()) if things else []
        running = {None, *(frame.f_code for top in tops for frame, _ in walk_stack(top))}
        unknown = {id(thing) for thing in things if getattr(thing, "__code__", None) in running}
        shown: Counter[int] = Counter()
        for depth in range(DEPTH + 1) if things else ():
            level_ids, above = set(map(id, level)), Kept()
            for holder in _find_referrers(level):
                module = str(holder.f_globals.get("__name__")) if type(holder) is FrameType else ""
                if type(holder) is Kept or module.partition(".")[0] in ("instrument", "importlib"):
                    continue
                parts = Kept(part for part in gc.get_referents(holder) if id(part) in level_ids)
                shown.update(map(id, parts if depth or not _is_namespace(holder) else ()))
                if is_ours(holder) or not parts:
                    continue
                is_of_class = type(holder) is dict and "__module__" in holder and "__doc__" in holder
                if _is_namespace(holder) or (depth and is_of_class):
                    for part in parts if depth else ():
                        self._add_description(roots[id(part)], _describe_name(holder, part))
                    continue
                if id(holder) in roots:
                    continue
                reached = set().union(*(roots[id(part)] for part in parts))
                if isinstance_of(holder, type) and depth == 1:
                    names = type_namespace(holder).items()
                    self.in_classes += [Name(holder, name, id(value)) for name, value in names if id(value) in reached]
                    continue
                words = _describe_referrer(holder, parts)
                kinds[id(holder)] = kinds.get(id(parts[0]), _format_type_name(holder))
                if words is not None or depth == DEPTH or len(above) == WIDTH:
                    self._add_description(reached, kinds[id(holder)] if words is None else words)
                    continue
                roots[id(holder)] = reached
                above.append(holder)
                visited.append(holder)
            for key in level_ids:
                if shown[key] < counts.get(key, 1) and key not in unknown:
                    self._add_description(roots[key], kinds.get(key, HIDDEN))
            level = above
            if not level:
                break

    def _add_description(self, reached: Iterable[int], words: str) -> None:
        for key in reached if words else ():
            if words not in (descriptions := self.others.setdefault(key, [])):
                descriptions.append(words)


def _find_referrers(things: Kept) -> list[Any]:
    arguments = tuple(things)
    if len(arguments) <= MANY:
        return [holder for holder in gc.get_referrers(*arguments) if holder is not arguments and holder is not things]
    ids = set(map(id, arguments))
    things_of_memory = (thing for thing in gc.get_objects() if thing is not arguments)
    return [thing for thing in things_of_memory if not ids.isdisjoint(map(id, gc.get_referents(thing)))]


def _is_namespace(holder: Any) -> bool:
    return type(holder) is dict and "__name__" in holder and "__spec__" in holder


def _describe_name(names: dict[str, Any], part: Any) -> str:
    name = next((name for name, value in list(names.items()) if value is part), "")
    module = sys.modules.get(names.get("__module__", ""))
    of_module = names if module is None else module_namespace(module)
    file = str(of_module.get("__file__") or of_module.get("__name__"))
    line = find_definition_line(name, getlines(file, of_module), is_indented=module is not None)
    return f"{_format_type_name(part)} in {_format_place(file, line)} ({name})"


def _format_type_name(thing: Any) -> str:
    name = type(thing).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _describe_referrer(holder: Any, parts: Kept) -> str | None:
    """Describe an object that refers to a function. Return "" to omit the object, or None to describe its referrers
    instead."""
    if type(holder) is FunctionType:
        code = holder.__code__
        return f"the function {holder.__qualname__} in {_format_place(code.co_filename, code.co_firstlineno)}"
    if isinstance_of(holder, type):
        return f"the class {type.__dict__['__qualname__'].__get__(holder)}"
    if isinstance_of(holder, _SUSPENDED):
        holder = next((frame for name in _FRAMES if (frame := getattr(holder, name, None)) is not None), None)
    if type(holder) is not FrameType:
        return "" if holder is None else None
    if any(getattr(part, "__code__", None) is holder.f_code for part in parts):
        return ""  # a call of the function itself
    return f"a call of {holder.f_code.co_name} in {_format_place(holder.f_code.co_filename, holder.f_lineno)}"


def _format_place(file: str, line: int) -> str:
    folder = f"{Path.cwd()}/"
    return file.removeprefix(folder) + (f":{line}" if line else "")


def find_definition_line(name: str, lines: list[str], *, is_indented: bool) -> int:
    indent = r"[ \t]+" if is_indented else ""
    begins = re.compile(rf"{indent}(?:async def |def |class |[\w, ]+, )?{re.escape(name)}\b")
    return next((number for number, line in enumerate(lines, 1) if begins.match(line)), 0)


def is_own_object(holder: Any) -> bool:
    if isinstance_of(holder, ModuleType):
        return False
    home = type.__dict__["__module__"].__get__(type(holder))
    name = holder.get("__name__") if _is_namespace(holder) else home
    return type(name) is str and name.partition(".")[0] == "instrument"


def isinstance_of(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Test `type(thing)`, because `isinstance` may run code of the service in a `__class__` property."""
    return issubclass(type(thing), kinds)


def instance_dict(thing: Any) -> dict[str, Any] | None:
    if issubclass(type(thing), ModuleType):
        return module_namespace(thing)
    descriptor = type_attribute(type(thing), "__dict__")
    names = descriptor.__get__(thing) if type(descriptor) is types.GetSetDescriptorType else None
    return names if type(names) is dict else None


def type_namespace(kind: type) -> Mapping[str, Any]:
    names: Mapping[str, Any] = type.__dict__["__dict__"].__get__(kind)
    return names


def type_attribute(kind: type, name: str) -> Any:
    for base in type.__dict__["__mro__"].__get__(kind):
        if name in type_namespace(base):
            return type_namespace(base)[name]
    return None


def loaded_modules() -> Iterator[tuple[str, ModuleType]]:
    for module in sys.modules.copy().values():
        if issubclass(type(module), ModuleType):
            name = module_namespace(module).get("__name__")
            if isinstance(name, str):
                yield name, module


def module_namespace(module: ModuleType) -> dict[str, Any]:
    """Return a module's names. Unlike `vars`, this does not load a lazy module."""
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names
