"""Holders: who else holds a function, how each is made to hold another one in its place, and the way back.

Code binds functions in many places before a probe comes: names of other modules, tables that decorators fill, bound
methods, `functools.partial`, defaults, closures, slots. The garbage collector knows them all. What is mutable is
changed in place; what is not (a tuple, a frozenset, a bound method) is made anew and put where the old one was held.
The way back is the same walk in the other direction, so it also reaches what was bound while the probe was there, and
the old tuple or bound method itself returns.

No code of the host runs: no attribute hook, property, `__eq__`, `__hash__` or `__setitem__` of its classes. What
cannot be changed so is named.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from types import (
    AsyncGeneratorType,
    CellType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

DEPTH = 5
"""How many containers that cannot be changed (a tuple in a tuple in ...) are made anew around one function."""

MANY = 200
"""The collector compares each thing on the heap with each one looked for; beyond so many a set is faster."""

IMMORTAL = 1 << 28
"""Reference counts beyond this count nothing: the thing is never freed."""

_SUSPENDED = (GeneratorType, CoroutineType, AsyncGeneratorType)
_REBUILT = (tuple, frozenset, MethodType, staticmethod, classmethod)

_NOTHING = object()


class Kept(list[Any]):
    """A list of ours, which is no holder."""


_KEPT: list[Any] = []
"""Arguments that were put into partial objects: a call under way reads them without holding them."""


class Swap:
    """Puts second things in the place of first ones wherever these are held, and goes back.

    `Swap(firsts)` looks for the holders: one pass over the heap, about 70 ns an object (20 ms for the 280 000 of a
    process with torch) and three times that for a hundred firsts; none where there are no firsts. Made before the
    second things are, so that nothing of ours is among the holders. `to` changes them, with one more pass for each
    level of containers that had to be made anew: `made` are those, `olds` the host's that they stand for. The way back
    is a new `Swap` of the seconds and `made` to the firsts and `olds`. Call from one thread; the host's threads may run
    meanwhile, and each of them sees either the one or the other.

    What a caller keeps of firsts, seconds and `made` must lie in a `Kept` or in an object of a class of this package;
    `ours` are other holders to be left alone.
    """

    __slots__ = ("_classes", "_firsts", "_hidden", "_holders", "_ours", "made", "olds")

    def __init__(self, firsts: Iterable[Any], ours: Iterable[Any] = ()) -> None:
        self._firsts = Kept(firsts)
        self._ours = {id(thing) for thing in ours}
        self.olds = Kept()
        self.made = Kept()
        self._firsts.append(_unheld())
        found = _referrers(self._firsts) if len(self._firsts) > 1 else []
        self._hidden = _hidden_references(self._firsts, found)
        del self._firsts[-1]
        self._sort(found)

    @property
    def has_found(self) -> bool:
        """Whether anything of the host's holds one of the firsts, before `to` is called."""
        return bool(self._holders)

    def _sort(self, found: list[Any]) -> None:
        """Take over those of the holders found that are the host's."""
        if sys.version_info < (3, 11):  # where the frame of a suspended call holds its variables, not the call
            frames = [holder for holder in found if type(holder) is FrameType]
            found += [holder for holder in _referrers(frames) if isinstance_of(holder, _SUSPENDED)]
        self._holders = Kept(holder for holder in found if id(holder) not in self._ours and not _is_ours(holder))
        self._classes = _class_namespaces(self._holders)

    def to(self, seconds: Iterable[Any]) -> dict[int, list[str]]:
        """Change every holder. Returns what could not be changed, in words, by identity of the first thing."""
        new = {id(first): second for first, second in zip(self._firsts, seconds, strict=True)}
        roots = {id(first): {id(first)} for first in self._firsts}
        fixed = Kept()
        for level in range(DEPTH + 1):
            rebuilt = Kept()
            for holder in self._holders:
                if id(holder) in new:
                    continue  # it is being replaced itself
                made = None
                try:
                    if level < DEPTH and isinstance_of(holder, _REBUILT):
                        made = _made_anew(holder, new)
                    if made is None:
                        _change(holder, new, self._classes.get(id(holder)))
                except Exception:  # what lets nothing be set, such as a read-only slot or a class made in C
                    fixed.append(holder)
                    continue
                if made is not None:
                    roots[id(holder)] = set().union(*(roots[id(thing)] for thing in _held(holder, new)))
                    rebuilt.append(holder)
                    self.olds.append(holder)
                    self.made.append(made)
                elif any(True for _ in _held(holder, new)) and not _runs(holder, new):
                    fixed.append(holder)
            new.update((id(old), made) for old, made in zip(self.olds, self.made, strict=True))
            if not rebuilt:
                break
            self._sort(_referrers(rebuilt))
        escaped: dict[int, list[str]] = {}
        for holder in fixed:
            words = _described(holder)
            for thing in _held(holder, new):
                for root in roots.get(id(thing), ()):
                    if words not in (known := escaped.setdefault(root, [])):
                        known.append(words)
        self._name_hidden(escaped)
        self._holders, self._classes = Kept(), {}
        return escaped

    def _name_hidden(self, escaped: dict[int, list[str]]) -> None:
        """Name what the collector does not show: local variables of running calls, and whatever else there is."""
        hidden, firsts = self._hidden, set(map(id, self._firsts))
        codes = {first.__code__: id(first) for first in self._firsts if type(first) is FunctionType}
        for frame in _running_frames() if self._firsts else ():
            # A call under way holds its function once or twice, by how it was called.
            hidden.pop(codes.get(frame.f_code, 0), None)
            for root, words in _local_variables(frame, firsts):
                if root in hidden:
                    hidden[root] -= sys.version_info >= (3, 11)  # before, the collector shows running frames
                escaped.setdefault(root, []).append(words)
        for root, references in hidden.items():
            if references > 0:
                words = "something that the collector does not show (of an extension, or a call under way)"
                escaped.setdefault(root, []).append(words)


def _unheld() -> Any:
    """A function that nothing else holds, to compare with."""
    return FunctionType((lambda: None).__code__, {})


def _hidden_references(things: Kept, found: Iterable[Any]) -> dict[int, int]:
    """By identity, how many references to each thing none of the holders found accounts for; the last is our own."""
    wanted = set(map(id, things))
    # No variable here may be left with one of the things.
    shown = Counter(key for holder in found for key in map(id, gc.get_referents(holder)) if key in wanted)
    counts = [sys.getrefcount(thing) - shown[id(thing)] for thing in things]
    usual = counts.pop()
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return {}  # references are counted elsewhere, too
    return {id(thing): count - usual for thing, count in zip(things, counts, strict=False) if count < IMMORTAL}


def isinstance_of(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance` by the thing's own type: what `__class__` claims may be foreign code."""
    return issubclass(type(thing), kinds)


def _held(holder: Any, new: Mapping[int, Any]) -> Iterator[Any]:
    parts = gc.get_referents(holder)
    if sys.version_info < (3, 11) and isinstance_of(holder, _SUSPENDED):
        parts = gc.get_referents(*(part for part in parts if type(part) is FrameType))
    return (thing for thing in parts if id(thing) in new)


def _runs(holder: Any, new: Mapping[int, Any]) -> bool:
    """Whether the holder is a call of the function itself, which goes on as it began."""
    if not isinstance_of(holder, _SUSPENDED):
        return False
    names = ("gi_code", "cr_code", "ag_code")
    code = next(found for name in names if (found := getattr(holder, name, None)) is not None)
    return all(getattr(thing, "__code__", None) is code for thing in _held(holder, new) if type(thing) is FunctionType)


def change(holder: Any, first: Any, second: Any) -> Any:
    """Put the second thing in the first one's place in one holder. Returns a holder made anew, or the same changed.

    Raises `TypeError` where it cannot be done.
    """
    new = {id(first): second}
    if isinstance_of(holder, _REBUILT):
        return _made_anew(holder, new)
    _change(holder, new, None)
    if any(True for _ in _held(holder, new)):
        raise TypeError(f"a {type(holder).__name__} lets nothing be set")
    return holder


def _made_anew(holder: Any, new: Mapping[int, Any]) -> Any:
    """A holder that cannot be changed, made anew with the second things in it; None where it holds no first one."""
    kind = type(holder)
    if kind is MethodType:
        function, instance = new.get(id(holder.__func__)), new.get(id(holder.__self__))
        if function is None and instance is None:
            return None
        return MethodType(function or holder.__func__, holder.__self__ if instance is None else instance)
    if issubclass(kind, (staticmethod, classmethod)):
        function = new.get(id(holder.__func__))
        return None if function is None else kind(function)
    if not any(True for _ in _held(holder, new)):
        return None
    if kind is frozenset:
        members = set(holder)  # a copy takes the hashes over, it asks nothing of the members
        for member in holder:
            if id(member) in new:
                members.discard(member)
                members.add(new[id(member)])
        return frozenset(members)
    if kind is not tuple and type_attribute(kind, "__dictoffset__"):
        raise TypeError("a kind of tuple with attributes of its own")
    items = [new.get(id(item), item) for item in tuple.__iter__(holder)]
    return tuple.__new__(kind, items)


def _change(holder: Any, new: Mapping[int, Any], of_class: type | None) -> None:
    """Put second things in the place of first ones in a holder that can be changed."""
    kind = type(holder)
    if of_class is not None:
        for name, value in list(dict.items(holder)):
            if id(value) in new:
                type.__setattr__(of_class, name, new[id(value)])
        return
    if issubclass(kind, dict):
        _change_dict(holder, new)
    elif issubclass(kind, list):
        for index in range(list.__len__(holder)):
            if id(list.__getitem__(holder, index)) in new:
                list.__setitem__(holder, index, new[id(list.__getitem__(holder, index))])
    elif issubclass(kind, deque):
        for index in range(deque.__len__(holder)):
            if id(deque.__getitem__(holder, index)) in new:
                deque.__setitem__(holder, index, new[id(deque.__getitem__(holder, index))])
    elif issubclass(kind, set):
        for member in [member for member in set.__iter__(holder) if id(member) in new]:
            set.add(holder, new[id(member)])
            set.discard(holder, member)
    elif kind is CellType:
        if id(holder.cell_contents) in new:
            holder.cell_contents = new[id(holder.cell_contents)]
        return
    elif kind is FunctionType:
        _change_function(holder, new)
        return
    elif issubclass(kind, property):
        _change_property(holder, new)
    elif issubclass(kind, functools.partial):
        _change_partial(holder, new)
    elif issubclass(kind, functools.singledispatchmethod):
        dispatcher = (own_names(holder) or {})["dispatcher"]
        for dispatched, part in list(dispatcher.registry.items()):
            if id(part) in new:
                dispatcher.register(dispatched, new[id(part)])
    if kind not in (dict, list, set, deque):
        _change_attributes(holder, new)


def _change_dict(holder: dict[Any, Any], new: Mapping[int, Any]) -> None:
    items = list(dict.items(holder))
    for key, value in items:
        if id(value) in new and _hashes_without_the_host(key):
            dict.__setitem__(holder, key, new[id(value)])
    moved = next((index for index, (key, _) in enumerate(items) if id(key) in new), None)
    if moved is None or not _is_plain(holder) or not all(_hashes_without_the_host(key) for key, _ in items[moved:]):
        return
    # A key is changed by taking it out; what came after it is taken out, too, so that the order stays.
    for key, _ in items[moved:]:
        value = dict.pop(holder, key, _NOTHING)
        if value is not _NOTHING:
            dict.__setitem__(holder, new.get(id(key), key), value)


def _is_plain(holder: dict[Any, Any]) -> bool:
    """Whether the keys may be changed: C code keeps dicts whose keys it knows by heart (`functools.lru_cache`)."""
    if type(holder) is not dict:
        return False
    owners = [owner for owner in _referrers([holder]) if type(owner) is not FrameType and not _is_ours(owner)]
    plain = (dict, list, tuple, CellType)
    return all(isinstance_of(owner, plain) or _is_made_in_python(type(owner)) for owner in owners)


def _is_made_in_python(kind: type) -> bool:
    flags: int = type.__dict__["__flags__"].__get__(kind)
    return bool(flags & 1 << 9) and type_attribute(kind, "__new__") is object.__new__


def _change_function(holder: FunctionType, new: Mapping[int, Any]) -> None:
    for cell in holder.__closure__ or ():
        try:
            found = cell.cell_contents
        except ValueError:
            continue  # an empty cell
        if id(found) in new:
            cell.cell_contents = new[id(found)]
    if id(holder.__defaults__) in new:
        holder.__defaults__ = new[id(holder.__defaults__)]
    for name, value in list(holder.__dict__.items()):
        if id(value) in new:
            holder.__dict__[name] = new[id(value)]


def _change_property(holder: property, new: Mapping[int, Any]) -> None:
    parts = (holder.fget, holder.fset, holder.fdel)
    if not any(id(part) in new for part in parts):
        return
    named = property.__dict__.get("__name__")  # from 3.13; before, nobody can read the name that error messages show
    name = None if named is None else named.__get__(holder)
    fget, fset, fdel = (new.get(id(part), part) for part in parts)
    property.__init__(holder, fget, fset, fdel, property.__dict__["__doc__"].__get__(holder))
    if isinstance(name, str):
        property.__set_name__(holder, object, name)  # type: ignore[attr-defined]


def _change_partial(holder: functools.partial[Any], new: Mapping[int, Any]) -> None:
    state: Any = functools.partial.__reduce__(holder)[2]
    function, arguments, words, names = state
    if id(function) in new or id(arguments) in new:
        arguments = new.get(id(arguments), arguments)
        _KEPT.append(arguments)
        functools.partial.__setstate__(  # type: ignore[attr-defined]
            holder, (new.get(id(function), function), arguments, words, names)
        )


def _change_attributes(holder: Any, new: Mapping[int, Any]) -> None:
    """Change what lies in an instance's slots and in its own names, past whatever its class makes of setting them."""
    proxied = wrapped_slot(type(holder))
    for base in type.__dict__["__mro__"].__get__(type(holder)):
        for found in list(type_namespace(base).values()):
            if type(found) is MemberDescriptorType or found is proxied:
                try:
                    value = found.__get__(holder)
                except (AttributeError, ValueError):
                    continue  # an empty slot
                if id(value) in new:
                    found.__set__(holder, new[id(value)])
    names = own_names(holder)
    for name, value in list((names or {}).items()):
        if names is not None and id(value) in new and type(name) is str:
            dict.__setitem__(names, name, new[id(value)])


def wrapped_slot(kind: type) -> Any:
    """Where a function wrapper of wrapt keeps what it wraps. Another proxy of it may run code to find that."""
    if type_attribute(kind, "_self_wrapper") is None:
        return None
    found = type_attribute(kind, "__wrapped__")
    return found if type(found) in (GetSetDescriptorType, MemberDescriptorType) else None


def own_names(thing: Any) -> dict[str, Any] | None:
    """The thing's own `__dict__`, or None. Runs no code of the host."""
    if issubclass(type(thing), ModuleType):
        return namespace(thing)
    found = type_attribute(type(thing), "__dict__")
    names = found.__get__(thing) if type(found) is GetSetDescriptorType else None
    return names if type(names) is dict else None


def type_namespace(kind: type) -> Mapping[str, Any]:
    """A class's own names. Runs no code of its metaclass."""
    names: Mapping[str, Any] = type.__dict__["__dict__"].__get__(kind)
    return names


def type_attribute(kind: type, name: str) -> Any:
    """What a class or its bases hold under a name, as it lies there; None where there is none."""
    if name == "__dictoffset__":
        return type.__dict__[name].__get__(kind)
    for base in type.__dict__["__mro__"].__get__(kind):
        if name in type_namespace(base):
            return type_namespace(base)[name]
    return None


def _hashes_without_the_host(key: Any) -> bool:
    """Whether setting an existing key runs no code of the host: its hash is made in C, or the enum module's."""
    if type(key) is tuple:
        return all(_hashes_without_the_host(part) for part in key)
    found = type_attribute(type(key), "__hash__")
    return type(found) is WrapperDescriptorType or (type(found) is FunctionType and found.__module__ == "enum")


def _class_namespaces(holders: Iterable[Any]) -> dict[int, type]:
    """The class of each holder that is a class's own dict, which must be changed by setting the class's attributes."""
    spaces = {id(space): space for space in holders if type(space) is dict and "__module__" in space}
    found: dict[int, type] = {}

    def ask(owners: Iterable[Any]) -> None:
        for owner in owners:
            if isinstance_of(owner, type):
                found.update((id(part), owner) for part in gc.get_referents(owner) if id(part) in spaces)

    # Most classes are where their methods' names say; only for the others is the heap worth another look.
    ask(_likely_owners(spaces.values()))
    ask(_referrers(space for key, space in spaces.items() if key not in found))
    return found


def _likely_owners(spaces: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """What the names that functions in classes tell of their class lead to."""
    for space in spaces:
        for part in list(space.values()):
            if type(part) is FunctionType:
                owner: Any = sys.modules.get(part.__module__)
                for name in part.__qualname__.split(".")[:-1]:
                    inner = isinstance_of(owner, type)
                    owner = type_attribute(owner, name) if inner else (own_names(owner) or {}).get(name)
                yield owner


def _referrers(things: Iterable[Any]) -> list[Any]:
    """What holds the things. From 3.13 the collector shows the tuple that it gets them in, too."""
    arguments = tuple(things)
    if len(arguments) > MANY:
        wanted = set(map(id, arguments))
        found = gc.get_objects()
        return [
            thing
            for thing in found
            if thing is not arguments and not wanted.isdisjoint(map(id, gc.get_referents(thing)))
        ]
    return [holder for holder in gc.get_referrers(*arguments) if holder is not arguments] if arguments else []


def _is_ours(holder: Any) -> bool:
    if type(holder) is FrameType:
        return True
    home = type.__dict__["__module__"].__get__(type(holder))
    if type(home) is str and home.partition(".")[0] == "instrument":
        return True
    name = holder.get("__name__") if type(holder) is dict else None
    return type(name) is str and name.partition(".")[0] == "instrument"


# ---------------------------------------------------------------- in words


def _described(holder: Any) -> str:
    """A holder in words: its type, and its name where a module has one for it."""
    kind = type(holder)
    words = f"a {kind.__name__}"
    if isinstance_of(holder, _SUSPENDED):
        return f"a local variable of {holder.__qualname__}, which is suspended"
    for name, module in loaded_modules():
        for bound, value in list(namespace(module).items()):
            if value is holder:
                return f"{words} in module {name}: {bound}"
    return words


def _running_frames() -> Iterator[FrameType]:
    """The frames of the host's running functions, in all threads."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            module = at.f_globals.get("__name__")
            ours = isinstance(module, str) and module.partition(".")[0] in ("instrument", "importlib")
            if at.f_code.co_flags & 2 and not ours:  # CO_NEWLOCALS: a function's, not a module's or class's names
                yield at
            at = at.f_back


def _local_variables(frame: FrameType, wanted: Container[int]) -> Iterator[tuple[int, str]]:
    """Local variables of a running call that hold one of the things."""
    for name, value in frame.f_locals.items():
        if id(value) in wanted:
            yield id(value), f"a local variable {name} of {frame.f_globals.get('__name__')}.{_qualname(frame.f_code)}"


def _qualname(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)


# ---------------------------------------------------------------- names of modules


def rebind(pairs: Iterable[tuple[Any, Any]], *, spared: Collection[str] = ()) -> None:
    """In all modules imported so far, bind the names that mean the first thing of a pair to the second instead.

    Modules of the packages in `spared`, and our own, keep theirs. One pass over all names for all pairs: some
    milliseconds in a large process.
    """
    second = {id(first): second for first, second in pairs}
    if not second:
        return
    spared = {"instrument", *spared}
    for name, module in loaded_modules():
        names = namespace(module)
        # One loop in C, for hardly any module has such a name.
        if second.keys().isdisjoint(map(id, list(names.values()))) or name.partition(".")[0] in spared:
            continue
        for bound, value in list(names.items()):
            new = second.get(id(value))
            if new is not None:
                names[bound] = new


def loaded_modules() -> Iterator[tuple[str, ModuleType]]:
    """Name and module of everything in `sys.modules` now that is a module. Runs no code of theirs."""
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            name = namespace(module).get("__name__")
            if isinstance(name, str):
                yield name, module


def namespace(module: ModuleType) -> dict[str, Any]:
    """A module's own names. `vars` would wake a module that loads itself when it is first touched."""
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names
