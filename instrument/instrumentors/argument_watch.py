"""Find request keys, such as ids, in calls' arguments and results, for the profile that `instrument init` proposes.

Only the first calls of each function are examined, without running code of the service. Values leave the process only
as keyed digests. Equal digests show that two functions or processes handle the same request.
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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import islice
from types import FunctionType, MemberDescriptorType
from typing import Any, TypeGuard

from instrument.instrumentors.call_values import RETURN
from instrument.instrumentors.references import instance_dict, type_namespace
from instrument.recorder.attribute_checks import encode_key
from instrument.recorder.wrapping import Attributes, Results
from instrument.runtime.faults import FAULTS

SALT_VARIABLE = "INSTRUMENT_INIT_SALT"
"""The environment variable with the secret key of the digests. Each `instrument init` makes a new key."""

LOOKS = 1000
"""The maximum number of calls to examine per function."""

ITEMS = 64
"""The maximum number of items to examine in a sequence or mapping."""

DIGESTS = 4096
"""The maximum number of digests per argument path."""

ATTRIBUTES = 60
"""The maximum number of attributes to examine in an object."""

NAME_LENGTH = 64
"""The maximum length of a name in characters. Longer keys of mappings are data, not names."""

ID = re.compile(
    r"^(?:.*_)?(?:request|req|job|task|call|sequence|seq|message|msg|query|prompt|correlation)_?(?:id|key)s?$"
)
"""The names of values that identify a request."""

WEAK_ID = re.compile(r"^(?:id|ids|uid|uids|uuid|uuids|rid|rids|key|keys|qid|.*_uid|.*_uuid)$")
"""The names of values that may identify a request. They count only if no value has a name that matches `ID`."""

WEIGHT = re.compile(r"^(?!max_|min_)(?:num_|n_)?(?:\w+_)?(?:tokens|length)$")
"""The names of numbers that may be a request's weight in a batch: `num_tokens`, for example, but not `max_tokens`."""

_BUILTINS = frozenset(dir(builtins))
_SEQUENCES = (list, tuple, deque, set, frozenset)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SKIPPED = {"__init__", "__new__", "__post_init__", "forward"}


@dataclass(slots=True)
class SeenPath:
    """The values at one path, such as `batch[].request_id`, in the arguments or results of calls.

    `looks` is the number of calls with a value, and `items` the number of values. `largest` is the maximum number of
    values in a call. `many` is True if a call has several values.
    """

    many: bool
    looks: int = 0
    items: int = 0
    largest: int = 0
    weights: str = ""
    of_class: str = ""
    digests: set[str] = field(default_factory=set)


class ArgumentWatch:
    """Searches the arguments and results of calls for keys of requests.

    `is_own` returns True for the name of a module of the service. `spent_ns` is the total time of the search.
    """

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._salt = os.environ.get(SALT_VARIABLE, "").encode()
        self._seen: dict[str, dict[str, SeenPath]] = {}
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = itertools.count()
        self.spent_ns = 0

    def clear(self) -> None:
        """Drop all observed values. A forked child calls this, because the values are the parent's."""
        for paths in self._seen.values():
            paths.clear()
        self.spent_ns = 0

    def make_summaries(self) -> dict[str, dict[str, Any]]:
        return {
            label: {
                path: {**asdict(values), "digests": sorted(values.digests)} for path, values in sorted(paths.items())
            }
            for label, paths in sorted(self._seen.items())
            if paths
        }

    def make_examiners(self, function: Callable[..., Any], label: str) -> tuple[Attributes | None, Results | None]:
        """Make two functions that examine the arguments and the result of a call. Either may be None.

        A function that only calls builtins is not examined, because a call would take several times as long.
        """
        if not isinstance(function, FunctionType) or label.rpartition(":")[2].rpartition(".")[2] in _SKIPPED:
            return None, None
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        read = frozenset(code.co_names)
        if read <= _BUILTINS and not any(map(_is_key_path, names)):
            return None, None
        paths = self._seen.setdefault(label, {})
        arguments: Attributes | None = None
        if names or code.co_kwonlyargcount:

            def examine_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                for name, value in zip(names, args, strict=False):
                    if name == "self":
                        self._examine_attributes(paths, name, value, read)
                    else:
                        self._examine_value(paths, name, value)
                for name, value in kwargs.items():
                    if _is_identifier(name):
                        self._examine_value(paths, name, value)

            arguments = self._limit_examinations(examine_call)
        if function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
            return arguments, None

        def examine_result(value: Any) -> None:
            if type(value) is str:
                self._note_keys(paths, RETURN, [value])
            elif type(value) not in _PLAIN:
                self._examine_value(paths, RETURN, value)

        return arguments, self._limit_examinations(examine_result)

    def _limit_examinations(self, look: Callable[..., None]) -> Callable[..., None]:
        looks_left = LOOKS

        def examine(*values: Any) -> None:
            nonlocal looks_left
            if not looks_left:
                return
            looks_left -= 1
            begin_ns = time.perf_counter_ns()
            try:
                look(*values)
            except RuntimeError:
                pass  # another thread has changed the container meanwhile
            except Exception as fault:
                FAULTS.note("look at arguments", fault)
            self.spent_ns += time.perf_counter_ns() - begin_ns

        return examine

    def _examine_value(self, paths: dict[str, SeenPath], path: str, value: Any, *, inside: bool = True) -> None:
        kind = type(value)
        if kind in (str, int):
            if _is_key_path(path) and len(str(value)) <= 256:
                self._note_keys(paths, path, [value])
        elif kind in _MAPPINGS:
            self._examine_mapping(paths, path, value)
        elif kind in _SEQUENCES:
            self._examine_items(paths, path, list(islice(value, ITEMS)), size=len(value))
        elif kind not in _PLAIN:
            if not self._note_identifying_attribute(paths, path, [value], many=False) and self._is_own(kind.__module__):
                self._note_keys(paths, path, [value])
            if inside:
                self._examine_attributes(paths, path, value, None)

    def _examine_attributes(
        self, paths: dict[str, SeenPath], path: str, value: Any, read: frozenset[str] | None
    ) -> None:
        for name, attribute in islice(_read_attributes(value).items(), ATTRIBUTES):
            if _is_identifier(name) and (read is None or name in read) and type(attribute) in (*_SEQUENCES, *_MAPPINGS):
                self._examine_value(paths, f"{path}.{name}", attribute, inside=False)

    def _examine_mapping(self, paths: dict[str, SeenPath], path: str, value: dict[Any, Any]) -> None:
        names, items = list(islice(value, ITEMS)), list(islice(value.values(), ITEMS))
        for name, item in zip(names, items, strict=False):
            if _is_key_name(name) and type(item) in (str, int):
                self._note_keys(paths, f"{path}.{name}", [item])
        kinds, is_of_numbers = set(map(type, names)), set(map(type, items)) <= {int, float}
        if kinds == {str} or (kinds == {int} and (_is_key_path(path) or is_of_numbers)):
            self._note_keys(paths, path, names, many=True, size=len(value))
        elif items and _PLAIN.isdisjoint(map(type, items)):
            self._note_identifying_attribute(paths, path, items, many=True, size=len(value))

    def _examine_items(self, paths: dict[str, SeenPath], path: str, items: list[Any], *, size: int) -> None:
        kinds = {type(item) for item in items}
        if kinds == {str} or (kinds == {int} and _is_key_path(path)):
            self._note_keys(paths, path, items, many=True, size=size)
        elif len(kinds) == 1 and (kinds.isdisjoint(_PLAIN) or kinds.issubset(_MAPPINGS)):
            kind = kinds.pop()
            if kind in _MAPPINGS:
                for name in sorted(filter(_is_key_name, islice(items[0], ITEMS)), key=_rank_name)[:1]:
                    keys = [item[name] for item in items if type(item.get(name)) in (str, int)]
                    self._note_keys(paths, f"{path}[].{name}", keys, many=True, size=size)
            elif not self._note_identifying_attribute(paths, path, items, many=True, size=size):
                self._note_keys(paths, path, items if self._is_own(kind.__module__) else (), many=True, size=size)

    def _note_identifying_attribute(
        self, paths: dict[str, SeenPath], path: str, things: list[Any], *, many: bool, size: int = 1
    ) -> bool:
        """Note the keys in an attribute such as `request_id`. Return False if the objects have no such attribute."""
        attributes = [_read_attributes(thing) for thing in things]
        first = attributes[0] if attributes else {}
        names = [name for name, value in first.items() if type(value) in (str, int) and _is_key_name(name)]
        if not names:
            return False
        name = min(names, key=_rank_name)
        keys = [values[name] for values in attributes if type(values.get(name)) in (str, int)]
        deep = f"{path}[].{name}" if many else f"{path}.{name}"
        weights = sorted(
            weight for weight, value in first.items() if type(value) is int and _matches_name_pattern(weight, WEIGHT)
        )
        self._note_keys(paths, deep, keys, many=many, size=size)
        if many and weights:
            paths[deep].weights = f"{path}[].{weights[0]}"
        return True

    def _make_digest_text(self, key: Any) -> str:
        """Return the text from which a key's digest is made. An object's text has a number, because the address may be
        reused."""
        text = encode_key(key)
        if not text or type(key) in (str, int):
            return text
        try:
            entry = self._numbers.get(id(key))
            if entry is None or entry[0]() is not key:
                if len(self._numbers) >= DIGESTS:
                    self._numbers.clear()
                entry = self._numbers[id(key)] = weakref.ref(key), next(self._count)
        except TypeError:
            return text  # the class allows no weak references
        return f"{text}-{entry[1]}"

    def _note_keys(
        self, paths: dict[str, SeenPath], path: str, keys: Iterable[Any], *, many: bool = False, size: int = 1
    ) -> None:
        noted = [(key, text) for key in keys if (text := self._make_digest_text(key))]
        if not noted:
            return
        values = paths.setdefault(path, SeenPath(many))
        values.looks += 1
        values.items += size
        values.largest = max(values.largest, size)
        kind = type(noted[0][0])
        values.of_class = "" if kind in (str, int) else f"{kind.__module__}:{kind.__qualname__}"
        if len(values.digests) < DIGESTS:
            texts = (text.encode("utf-8", "replace") for _, text in noted)
            values.digests.update(blake2b(text, digest_size=6, key=self._salt).hexdigest() for text in texts)


def _is_key_path(path: str) -> bool:
    name = re.split(r"[.\[\]]+", path)[-1]
    return bool(ID.match(name) or WEAK_ID.match(name))


def _is_key_name(key: object) -> bool:
    return _matches_name_pattern(key, ID) or _matches_name_pattern(key, WEAK_ID)


def _matches_name_pattern(key: object, pattern: re.Pattern[str]) -> bool:
    return _is_identifier(key) and pattern.match(key) is not None


def _is_identifier(key: object) -> TypeGuard[str]:
    return type(key) is str and len(key) <= NAME_LENGTH and key.isidentifier()


def _rank_name(name: str) -> tuple[bool, int, str]:
    return not ID.match(name), len(name), name


def _read_attributes(thing: Any) -> Mapping[str, Any]:
    """Return the attributes of an object without running code of its class."""
    attributes = dict(islice((instance_dict(thing) or {}).items(), ATTRIBUTES))
    for base in type.__getattribute__(type(thing), "__mro__")[:-1]:
        for name, slot in islice(type_namespace(base).items(), ATTRIBUTES):
            if type(slot) is MemberDescriptorType and name not in attributes:
                with suppress(AttributeError):  # a slot that is empty
                    attributes[name] = slot.__get__(thing)
    return attributes


_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, slice, type, range, type(len)}
    | {FunctionType, type(re), *_SEQUENCES, *_MAPPINGS}
)
"""The classes whose objects cannot identify a request by themselves."""
