"""Arguments and results that look as if they named requests, of calls as they come by. For `instrument init` alone.

The first calls of each function are looked at: numbers and texts under names such as `request_id`, objects that have
such an attribute, objects of the service's own classes, and sequences and mappings of such. Each is noted by
the path by which a rule of a profile would read it. Values leave as keyed digests, by which the same request is known
again in another function or process, and as nothing else. No code of the service runs: neither properties,
`__getattr__` nor iterators of its classes.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import os
import re
import time
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from types import FunctionType, MemberDescriptorType
from typing import Any, TypeGuard

from instrument.instrumentors.arguments import RETURN
from instrument.recorder.span_attributes import key_text
from instrument.recorder.wrapping import Attributes, Results
from instrument.runtime.faults import FAULTS

SALT_VARIABLE = "INSTRUMENT_INIT_SALT"
"""The variable with the key of the digests, new for each run of `instrument init`."""

LOOKS = 1000
"""The first calls of a function that are looked at: each of them, or functions would see different requests."""

ITEMS = 64
"""The most items of a sequence or mapping that are looked at."""

DIGESTS = 4096
"""The most digests of one path, and the most objects that are distinguished at a time."""

ATTRIBUTES = 60
"""The most attributes of an object that are looked at."""

NAME_LENGTH = 64
"""A longer key of a mapping is no name but data."""

ID = re.compile(
    r"^(?:.*_)?(?:request|req|job|task|call|sequence|seq|message|msg|query|prompt|correlation)_?(?:id|key)s?$"
)
"""Names of values that identify a request."""

WEAK_ID = re.compile(r"^(?:id|ids|uid|uids|uuid|uuids|rid|rids|key|keys|qid|.*_uid|.*_uuid)$")
"""Names of values that may do so, where there is no better one."""

WEIGHT = re.compile(r"^(?!max_|min_)(?:num_|n_)?(?:\w+_)?(?:tokens|length)$")
"""Names of numbers that say how much of a batch is one request's; a limit says nothing of that."""

_BUILTINS = frozenset(dir(builtins))
_SEQUENCES = (list, tuple, deque, set, frozenset)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SKIPPED = {"__init__", "__new__", "__post_init__", "forward"}


@dataclass(slots=True)
class SeenPath:
    """The values at one path: keys of one request a call, or of `many`; `looks` is how often there was anything."""

    many: bool
    looks: int = 0
    items: int = 0
    largest: int = 0
    weights: str = ""
    of_class: str = ""
    digests: set[str] = field(default_factory=set)

    def facts(self) -> dict[str, Any]:
        """Return the values as JSON takes them."""
        facts = {name: getattr(self, name) for name in ("many", "looks", "items", "largest", "weights", "of_class")}
        return {**facts, "digests": sorted(self.digests)}


class ArgumentWatch:
    """The values of the calls in this process, and the time that reading them took.

    `is_own` says of a module whether it is the service's own.
    """

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._salt = os.environ.get(SALT_VARIABLE, "").encode()
        self._seen: dict[str, dict[str, SeenPath]] = {}
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = itertools.count()
        self.spent_ns = 0

    def clear(self) -> None:
        """Forget what was seen: a fork's child begins anew."""
        for paths in self._seen.values():
            paths.clear()
        self.spent_ns = 0

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the values of each function by its label and path, as JSON takes them."""
        return {
            label: {path: seen.facts() for path, seen in sorted(paths.items())}
            for label, paths in sorted(self._seen.items())
            if paths
        }

    def of(self, function: Callable[..., Any], label: str) -> tuple[Attributes | None, Results | None]:
        """Return a look at the arguments of a function's calls, and one at their results; None where there is none.

        Not of what reads no attribute and calls nothing but builtins: such are called most often, and to look at their
        calls would take several times as long as these.
        """
        if not isinstance(function, FunctionType) or label.rpartition(":")[2].rpartition(".")[2] in _SKIPPED:
            return None, None
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        read = frozenset(code.co_names)
        if read <= _BUILTINS and not any(map(_is_id, names)):
            return None, None
        paths = self._seen.setdefault(label, {})
        arguments: Attributes | None = None
        if names or code.co_kwonlyargcount:

            def look_at_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                for name, value in zip(names, args, strict=False):
                    if name == "self":
                        self._look_inside(paths, name, value, read)
                    else:
                        self._look(paths, name, value)
                for name, value in kwargs.items():
                    if _is_plain(name):
                        self._look(paths, name, value)

            looking = _Looking(look_at_call, self)
            arguments = looking.at_call
        if function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
            return arguments, None
        return arguments, _Looking(lambda value: self._look_at_result(paths, value), self).at_result

    def _look_at_result(self, paths: dict[str, SeenPath], value: Any) -> None:
        if type(value) is str:
            self._note(paths, RETURN, [value])
        elif type(value) not in _PLAIN:
            self._look(paths, RETURN, value)

    def _look(self, paths: dict[str, SeenPath], path: str, value: Any, *, inside: bool = True) -> None:
        """Note what a value at a path says of requests, and what its attributes say."""
        kind = type(value)
        if kind in (str, int):
            if _is_id(path) and len(str(value)) <= 256:
                self._note(paths, path, [value])
        elif kind in _MAPPINGS:
            self._look_at_mapping(paths, path, value)
        elif kind in _SEQUENCES:
            self._look_at_items(paths, path, list(islice(value, ITEMS)), size=len(value))
        elif kind not in _PLAIN:
            if not self._note_id(paths, path, [value], many=False) and self._is_own(kind.__module__):
                self._note(paths, path, [value])
            if inside:
                self._look_inside(paths, path, value, None)

    def _look_inside(self, paths: dict[str, SeenPath], path: str, value: Any, read: frozenset[str] | None) -> None:
        """Note the sequences and mappings that an object holds; of `self` those whose names the function has."""
        for name, held in islice(_attributes(value).items(), ATTRIBUTES):
            if _is_plain(name) and (read is None or name in read) and type(held) in (*_SEQUENCES, *_MAPPINGS):
                self._look(paths, f"{path}.{name}", held, inside=False)

    def _look_at_mapping(self, paths: dict[str, SeenPath], path: str, value: dict[Any, Any]) -> None:
        pairs = list(islice(value.items(), ITEMS))
        for name, held in pairs:
            if _is_id_key(name) and type(held) in (str, int):
                self._note(paths, f"{path}.{name}", [held])
        kinds = {type(name) for name, _ in pairs}
        is_of_numbers = {type(held) for _, held in pairs} <= {int, float}
        if kinds == {str} or (kinds == {int} and (_is_id(path) or is_of_numbers)):
            self._note(paths, path, [name for name, _ in pairs], many=True, size=len(value))
        elif pairs and all(type(held) not in _PLAIN for _, held in pairs):
            self._note_id(paths, path, [held for _, held in pairs], many=True, size=len(value))

    def _look_at_items(self, paths: dict[str, SeenPath], path: str, items: list[Any], *, size: int) -> None:
        kinds = {type(item) for item in items}
        if kinds == {str} or (kinds == {int} and _is_id(path)):
            self._note(paths, path, items, many=True, size=size)
        elif len(kinds) == 1 and (kinds.isdisjoint(_PLAIN) or kinds.issubset(_MAPPINGS)):
            kind = kinds.pop()
            if kind in _MAPPINGS:
                names = list(filter(_is_id_key, islice(items[0], ITEMS)))
                for name in sorted(names, key=_rank)[:1]:
                    found = [item[name] for item in items if type(item.get(name)) in (str, int)]
                    self._note(paths, f"{path}[].{name}", found, many=True, size=size)
            elif not self._note_id(paths, path, items, many=True, size=size) and self._is_own(kind.__module__):
                self._note(paths, path, items, many=True, size=size)

    def _note_id(self, paths: dict[str, SeenPath], path: str, things: list[Any], *, many: bool, size: int = 1) -> bool:
        """Note the attribute that names a request in each of the objects, where they have one."""
        attributes = [_attributes(thing) for thing in things]
        first = attributes[0] if attributes else {}
        names = [name for name, held in first.items() if type(held) in (str, int) and _is_id_key(name)]
        if not names:
            return False
        name = min(names, key=_rank)
        keys = [one[name] for one in attributes if type(one.get(name)) in (str, int)]
        deep = f"{path}[].{name}" if many else f"{path}.{name}"
        weights = sorted(each for each, held in first.items() if type(held) is int and _is_name(each, WEIGHT))
        self._note(paths, deep, keys, many=many, size=size)
        if many and weights:
            paths[deep].weights = f"{path}[].{weights[0]}"
        return True

    def _text(self, key: Any) -> str:
        """Return the text of a key to digest. An object has a number, for another one may have its address later."""
        text = key_text(key)
        if not text or type(key) in (str, int):
            return text
        try:
            known = self._numbers.get(id(key))
            if known is None or known[0]() is not key:
                if len(self._numbers) >= DIGESTS:
                    self._numbers.clear()
                known = self._numbers[id(key)] = weakref.ref(key), next(self._count)
        except TypeError:
            return text  # its class allows no weak references
        return f"{text}-{known[1]}"

    def _note(
        self, paths: dict[str, SeenPath], path: str, keys: Iterable[Any], *, many: bool = False, size: int = 1
    ) -> None:
        noted = [(key, text) for key in keys if (text := self._text(key))]
        if not noted:
            return
        seen = paths.setdefault(path, SeenPath(many))
        seen.looks += 1
        seen.items += size
        seen.largest = max(seen.largest, size)
        kind = type(noted[0][0])
        seen.of_class = "" if kind in (str, int) else f"{kind.__module__}:{kind.__qualname__}"
        if len(seen.digests) < DIGESTS:
            seen.digests.update(
                blake2b(text.encode("utf-8", "replace"), digest_size=6, key=self._salt).hexdigest() for _, text in noted
            )


class _Looking:
    """A look at the first calls of a function. It never raises."""

    def __init__(self, look: Callable[..., None], watch: ArgumentWatch) -> None:
        self._look = look
        self._watch = watch
        self._left = LOOKS

    def at_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._left:
            self._guarded(args, kwargs)

    def at_result(self, value: Any) -> None:
        if self._left:
            self._guarded(value)

    def _guarded(self, *given: Any) -> None:
        self._left -= 1
        begin_ns = time.perf_counter_ns()
        try:
            self._look(*given)
        except RuntimeError:
            pass  # another thread has changed what was gone through
        except Exception as fault:
            FAULTS.note("look at arguments", fault)
        self._watch.spent_ns += time.perf_counter_ns() - begin_ns


def _is_id(path: str) -> bool:
    name = re.split(r"[.\[\]]+", path)[-1]
    return bool(ID.match(name) or WEAK_ID.match(name))


def _is_id_key(key: object) -> bool:
    """Return True where a key of a mapping names a key of requests. One that is no plain name is data."""
    return _is_name(key, ID) or _is_name(key, WEAK_ID)


def _is_name(key: object, pattern: re.Pattern[str]) -> bool:
    return _is_plain(key) and pattern.match(key) is not None


def _is_plain(key: object) -> TypeGuard[str]:
    return type(key) is str and len(key) <= NAME_LENGTH and key.isidentifier()


def _rank(name: str) -> tuple[bool, int, str]:
    """Return the order of a name among those of requests, the likelier first."""
    return not ID.match(name), len(name), name


def _attributes(thing: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, without running any code of its class."""
    try:
        held = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        held = None
    found: dict[str, Any] = dict(islice(held.items(), ATTRIBUTES)) if type(held) is dict else {}
    for base in type.__getattribute__(type(thing), "__mro__")[:-1]:
        for name, slot in islice(type.__getattribute__(base, "__dict__").items(), ATTRIBUTES):
            if type(slot) is MemberDescriptorType and name not in found:
                try:
                    found[name] = slot.__get__(thing)
                except AttributeError:
                    pass  # a slot that is empty
    return found


_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, slice, type, range, type(len)}
    | {FunctionType, type(re), *_SEQUENCES, *_MAPPINGS}
)
"""Classes whose objects are no requests."""
