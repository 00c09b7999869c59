"""Functions: how `@profiled` and the profile's function rules make a function record, and the way back.

A rule names `module:qualname`, where `*` stays within a segment and `**` crosses dots. What a pattern with a
wildcard finds must have been defined in the module itself, so that `text:*` does not reach into what `text` imports;
a name without wildcards is taken wherever it comes from. Of the names that Python itself calls a wildcard finds
`__init__` and `__call__`; a pattern that begins with two underscores, such as `Engine.__*`, finds them all.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from re import Pattern, escape
from re import compile as compile_pattern
from types import BuiltinFunctionType, BuiltinMethodType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar, overload

from instrument.errors import FAULTS, TargetError
from instrument.probes.scopes import OFF
from instrument.recorder import RECORDER, Recorder
from instrument.spans import KINDS, Site

Undo = Callable[[], None]
T = TypeVar("T")

_FUNCTIONS = (FunctionType, BuiltinFunctionType, BuiltinMethodType)


@dataclass(frozen=True, slots=True)
class Target:
    """A function where it can be replaced: an attribute of a module or class."""

    owner: Any
    attribute: str
    raw: Any
    function: Callable[..., Any]
    module: str
    qualname: str

    @property
    def label(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A thing that a rule names and that cannot be observed, with the reason."""

    label: str
    why: str


@lru_cache(maxsize=4096)
def pattern(text: str) -> Pattern[str]:
    """The regular expression of a dotted pattern: `*` within a segment, `**` for any number of segments."""
    segments = text.split(".")
    last = len(segments) - 1
    made = ""
    for i, segment in enumerate(segments):
        if segment == "**":
            made += r"(?:[^.]+\.)*" if i < last else r"[^.]+(?:\.[^.]+)*"
        else:
            made += escape(segment).replace(r"\*", "[^.]*") + (r"\." if i < last else "")
    return compile_pattern(made + r"\Z")


def matches(text: str, name: str) -> bool:
    """Whether a dotted name fits a dotted pattern."""
    return pattern(text).match(name) is not None


def site_of(function: Any, *, name: str | None = None, kind: str = "op", device: bool = False) -> Site:
    """The site of a function: its own names and place, or the name that is given."""
    inner = inspect.unwrap(function, stop=lambda f: hasattr(f, "__instrument__")) if callable(function) else function
    code = getattr(inner, "__code__", None)
    qualname = getattr(function, "__qualname__", getattr(function, "__name__", type(function).__name__))
    return Site(
        name=name or qualname.rpartition("<locals>.")[2],
        kind=kind,
        module=getattr(function, "__module__", None) or "",
        qualname=qualname,
        file=code.co_filename if code is not None else "",
        line=code.co_firstlineno if code is not None else 0,
        device=device,
    )


def find(module: ModuleType, match: str) -> Iterator[Target | Unreachable]:
    """What the qualname part of a pattern names in a module that has been imported."""
    wanted = match.partition(":")[2]
    if "*" in wanted:
        yield from _walk(module, module, "", wanted, set())
        return
    owner: Any = module
    segments = wanted.split(".")
    for depth, segment in enumerate(segments):
        found = _raw(owner, segment)
        if found is None:
            return
        if depth < len(segments) - 1:
            owner = getattr(owner, segment, None)
            continue
        label = f"{module.__name__}:{wanted}"
        thing = getattr(owner, segment, None)
        if isinstance(thing, type):
            yield from _walk(module, thing, wanted + ".", wanted + ".*", {id(thing)}, methods_of=thing.__module__)
        else:
            yield _target(module, owner, segment, found, label)


def _raw(owner: Any, attribute: str) -> Any:
    """The attribute as it lies in the namespace, descriptors unbound; None where there is none."""
    if isinstance(owner, type):
        for base in owner.__mro__:
            if attribute in vars(base):
                return vars(base)[attribute]
        return None
    return vars(owner).get(attribute) if hasattr(owner, "__dict__") else None


def _walk(
    module: ModuleType, owner: Any, prefix: str, wanted: str, seen: set[int], *, methods_of: str | None = None
) -> Iterator[Target | Unreachable]:
    """What a pattern finds below an owner; with `methods_of` the public methods of a class of that module alone."""
    home = methods_of or module.__name__
    for attribute, raw in list(vars(owner).items()):
        name = prefix + attribute
        if isinstance(raw, type):
            if raw.__module__ == home and id(raw) not in seen and methods_of is None:
                seen.add(id(raw))
                yield from _walk(module, raw, name + ".", wanted, seen)
            continue
        if not matches(wanted, name) or (methods_of is not None and not _is_public(attribute)):
            continue
        if _is_called_by_python(attribute) and not wanted.rpartition(".")[2].startswith("__"):
            continue
        function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
        if (isinstance(function, FunctionType) or _records(function)) and function.__module__ == home:
            yield _target(module, owner, attribute, raw, f"{module.__name__}:{name}")


def _records(function: Any) -> bool:
    """Whether it carries a probe already. The native recorder's are no Python functions."""
    try:
        own = object.__getattribute__(function, "__dict__")  # runs no code of an object of the host
    except AttributeError:
        return False
    return isinstance(own.get("__instrument__"), Site)


def _is_called_by_python(method: str) -> bool:
    return method.startswith("__") and method.endswith("__") and method not in ("__init__", "__call__")


def _is_public(method: str) -> bool:
    return not method.startswith("_") or method == "__call__"


def _target(module: ModuleType, owner: Any, attribute: str, raw: Any, label: str) -> Target | Unreachable:
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    qualname = label.partition(":")[2]
    if not isinstance(function, _FUNCTIONS) and not _records(function):
        return Unreachable(label, f"it is a {type(raw).__name__}, not a function")
    if isinstance(owner, type) and not isinstance(function, FunctionType) and not _records(function):
        return Unreachable(label, "it is a method made in C")
    return Target(owner, attribute, raw, function, module.__name__, qualname)


def attach(target: Target, site: Site, recorder: Recorder = RECORDER) -> tuple[Any, Undo]:
    """Replace the function where it lies by one that records. Returns what lies there now and the way back.

    Names that other modules bound by ``from module import name`` are the business of `rebind`.
    """
    wrapped: Any = recorder.wrap(target.function, site)
    if isinstance(target.raw, (staticmethod, classmethod)):
        wrapped = type(target.raw)(wrapped)
    return wrapped, replace(target.owner, target.attribute, wrapped)


def replace(owner: Any, attribute: str, new: Any) -> Undo:
    """Set an attribute of a module or class; the way back leaves alone what somebody else has set since."""
    own = attribute in vars(owner)
    before = vars(owner).get(attribute)
    setattr(owner, attribute, new)

    def undo() -> None:
        if vars(owner).get(attribute) is not new:
            return
        if own:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)

    return undo


def undo_all(undos: list[Undo]) -> None:
    """Go every way back, last first. One that fails keeps none of the others from being gone."""
    while undos:
        try:
            undos.pop()()
        except Exception as fault:
            FAULTS.note("way back of a probe", fault)


def held_elsewhere(targets: Sequence[Target]) -> dict[int, str]:
    """What else holds a module's functions now, such as a table of routes that decorators fill: type names by identity.

    Calls through it go past whatever replaces the module's name. Looks through the heap only where a function has more
    references than usual, which costs some ten milliseconds.
    """
    usual = _usual_references()
    suspects = {
        id(target.function): target.function
        for target in targets
        if isinstance(target.owner, ModuleType) and not _records(target.function) and _references(target) > usual
    }
    if not suspects:
        return {}
    ours = {id(suspects), *map(id, targets), *(id(namespace(module)) for _, module in loaded_modules())}
    held: dict[int, str] = {}
    for holder in gc.get_referrers(*suspects.values()):
        if id(holder) not in ours and not isinstance(holder, FrameType):
            for thing in gc.get_referents(holder):
                if id(thing) in suspects:
                    held.setdefault(id(thing), type(holder).__name__)
    return held


def _references(target: Target) -> int:
    return sys.getrefcount(target.function)


def _usual_references() -> int:
    """References to a function that nobody but its module holds, as `held_elsewhere` meets it."""
    module = ModuleType("usual")
    namespace(module)["usual"] = FunctionType((lambda: None).__code__, {"__name__": "usual"})
    (target,) = find(module, "usual:usual")
    return _references(target) if isinstance(target, Target) else sys.maxsize


def rebind(pairs: Iterable[tuple[Any, Any]], *, spared: Collection[str] = ()) -> None:
    """In all modules imported so far, bind the names that mean the first thing of a pair to the second instead.

    Modules of the packages in `spared`, and our own, keep theirs. One pass over all names for all pairs: some
    milliseconds in a large process.
    """
    second = {id(first): second for first, second in pairs}
    if not second:
        return
    for name, module in loaded_modules():
        package = name.partition(".")[0]
        if package == "instrument" or package in spared:
            continue
        names = namespace(module)
        for bound, value in list(names.items()):
            new = second.get(id(value))
            if new is not None:
                names[bound] = new


def loaded_modules() -> list[tuple[str, ModuleType]]:
    """Name and module of everything in `sys.modules` that is a module. Runs no code of theirs."""
    modules = [module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)]
    named = [(namespace(module).get("__name__"), module) for module in modules]
    return [(name, module) for name, module in named if isinstance(name, str)]


def namespace(module: ModuleType) -> dict[str, Any]:
    """A module's own names. `vars` would wake a module that loads itself when it is first touched."""
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names


@overload
def profiled(name: str | None = None, *, kind: str = "op", device: bool = False) -> Callable[[T], T]: ...


@overload
def profiled(name: T, *, kind: str = "op", device: bool = False) -> T: ...


def profiled(name: Any = None, *, kind: str = "op", device: bool = False) -> Any:
    """Record each call of a function: ``@profiled``, ``@profiled("conv_layer")``, ``@profiled(kind="phase")``.

    Works on functions, coroutines, generators, async generators, methods, classmethods, staticmethods (above or below
    those decorators), and on a class, where it takes the public methods. Without a name the qualified name is used.
    Returns the very same object when `INSTRUMENT=off`. Raises `TargetError` for anything else.
    """
    if kind not in KINDS:
        raise TargetError(f"profiled: found kind {kind!r}; allowed: {', '.join(KINDS)}")
    if name is None or isinstance(name, str):
        return lambda target: _profile(target, name, kind, device)
    return _profile(name, None, kind, device)


def _profile(target: Any, name: str | None, kind: str, device: bool) -> Any:
    if OFF:
        return target
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(_profile(target.__func__, name, kind, device))
    if isinstance(target, type):
        for attribute, raw in list(vars(target).items()):
            function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
            if _is_public(attribute) and isinstance(function, FunctionType):
                label = f"{name}.{attribute}" if name else None
                setattr(target, attribute, _profile(raw, label, kind, device))
        return target
    if not isinstance(target, _FUNCTIONS) and not _records(target):
        raise TargetError(
            f"profiled takes a function, method or class; found {target!r} of type {type(target).__name__}. "
            "Put it below decorators that return other objects (property, functools.lru_cache)."
        )
    return RECORDER.wrap(target, site_of(target, name=name, kind=kind, device=device))


def unmatched(wanted: str, modules: Iterable[ModuleType]) -> list[str]:
    """Labels of all functions in the modules that a rule could have meant, to name the nearest."""
    found = (thing for module in modules for thing in _walk(module, module, "", "**", set()))
    return [thing.label for thing in found if isinstance(thing, Target)]
