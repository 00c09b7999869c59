"""Read facts about requests from a call's arguments and result, such as the keys that identify requests.

Keys are text, integers, UUIDs, bytes or, within a process, objects of the service. A batch has a key, and perhaps a
weight, per request. Paths to values are written as in the module `call_values`, and `[]` in a path means each item.
Unreadable values are counted and logged, and never raise.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from typing import Any

from instrument import native
from instrument.instrumentors.call_values import (
    LEFT_OUT,
    READERS,
    RESULT,
    CallReader,
    Parameter,
    add_attribute_reader,
    add_gauge_readers,
    convert_to_attribute,
    first_name_of_path,
    is_mapping,
    is_mapping_type,
    parameter_of,
    read_key_or_attribute,
    split_path_steps,
)
from instrument.profile.model import FunctionRule, RequestKeys
from instrument.recorder.attribute_checks import (
    ALLOWED_KEYS,
    CHECKSUM_CHARACTERS,
    NO_WEIGHTS,
    UnreadError,
    check_weights,
    contains_number,
    encode_key,
    find_refused_key_class,
    read_first_items,
)
from instrument.recording.spans import (
    BATCH_KEYS,
    BATCH_LIMIT,
    BATCH_WEIGHTS,
    FACT_KEYS,
    FACTS,
    KEY,
    KEY_LIMIT,
    AttributeValue,
)
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import NamedTuple, replace

EACH = "[]"
FACTS_OF_REQUEST = 2
"""The mode in which the reader in C reads facts of requests instead of keys."""

TEXTS_KNOWN = 4096
"""The maximum number of key texts whose shortened form is cached. At the limit the cache is emptied."""

Values = dict[Any, Any]
ReadResult = Callable[[Any], Values]
_native = native.MODULE


def make_call_reader(function: Callable[..., Any], rule: FunctionRule) -> CallReader:
    reader = CallReader(function)
    add_attribute_reader(reader, rule)
    for name, keys in ((KEY, rule.key), (BATCH_KEYS, rule.batch)):
        if keys:
            _add_key_readers(reader, name, keys, f"{rule.place or rule.text}: {keys.argument}")
    if rule.facts:
        _add_fact_readers(reader, rule)
    add_gauge_readers(reader, rule)
    return reader


def _add_key_readers(reader: CallReader, name: str, keys: RequestKeys, place: str) -> None:
    first, weights = first_name_of_path(keys.argument), first_name_of_path(keys.weights)
    for parameter in reader.find_path_parameter(keys.argument):
        weighed: Parameter | None = None
        if keys.weights and weights != first:
            of_weights = "" if parameter is RESULT else parameter_of(reader.function, weights)
            if isinstance(of_weights, str):  # all members of the batch weigh the same
                reader.missing.append(f"weights: {of_weights or f'{weights} is not part of the result'}")
                keys = replace(keys, weights="")
            else:
                weighed = of_weights
        reader.add_value_reader(parameter, _make_keys_reader(parameter, name, keys, weighed, place))


def _make_keys_reader(
    parameter: Parameter, name: str, keys: RequestKeys, weighed: Parameter | None, place: str
) -> Callable[..., Values]:
    """Return a function that reads request keys from a call's arguments, in C if possible.

    C reads texts and numbers in attributes and built-in containers, and calls Python for other values. A call of Python
    takes microseconds.
    """
    read: Callable[..., Values] = _make_key_reader(keys) if name == KEY else _make_batch_reader(keys, place)

    def read_values(*call: Any) -> Values:
        value = parameter.argument_in_call(*call)
        try:
            if value is LEFT_OUT:
                return {}
            return read(value) if weighed is None else read(value, weighed.argument_in_call(*call))
        except Exception as error:  # its text may contain values
            is_unread = type(error) is UnreadError
            reason = error if is_unread else f"{type(error).__name__} below a {type(value).__name__}"
            FAULTS.note_unreadable_value(place, f"the keys cannot be read: {reason}")
            return {}

    paths = [split_path_steps(path) for path in (keys.argument, keys.weights)]
    if _native is None or any(steps.count(EACH) > (name != KEY) for steps in paths):
        return read_values
    steps, of_each = zip(*map(_split_at_container, paths), strict=True)
    native_reader: Callable[..., Values] = _native.Keys(
        *_name_and_position(parameter), name != KEY,
        steps[0], of_each[0], steps[1] if keys.weights else None, of_each[1], *_name_and_position(weighed or RESULT),
        _ShortenedTexts(keys.cut) if keys.cut else None, read_values,
    )  # fmt: skip
    return native_reader


def _name_and_position(parameter: Parameter) -> tuple[str | None, int]:
    return None if parameter is RESULT else sys.intern(parameter.name), parameter.position


def _split_at_container(steps: list[str]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    at = steps.index(EACH) if EACH in steps else len(steps)
    steps = list(map(sys.intern, steps))
    return tuple(steps[:at]), tuple(steps[at + 1 :]) if at < len(steps) else None


class _FactPath(NamedTuple):
    """The path from a call's parameter or result to a fact of the request. `take` converts the value."""

    name: str
    place: str
    parameter: Parameter
    steps: Sequence[str]
    take: Callable[[Any], AttributeValue]

    def read_fact(self, value: Any) -> AttributeValue | None:
        for step in self.steps:
            if value is None:
                return None
            value = read_key_or_attribute(value, step)
        return None if value is None else self.take(value)


class _FactsReader(NamedTuple):
    """A fallback in Python for a facts reader in C.

    C passes a value that it cannot read, and the index of the fact. If a call omits the argument, C passes the call's
    arguments instead. Then the parameter's default is read.
    """

    facts: Sequence[_FactPath]
    names: Values
    before: Callable[..., Any] | None

    def __call__(self, value: Any, place: Any) -> Any:
        if type(place) is int:
            return self._read_fact(value, self.facts[place])
        attributes: Values = self.before(value, place) or {} if self.before else {}
        default = self.facts[0].parameter.default
        reads = [(fact.name, self._read_fact(default, fact)) for fact in self.facts if default is not LEFT_OUT]
        facts = {name: fact for name, fact in reads if fact is not None}
        return {**attributes, **facts, **self.names} if facts else attributes

    def _read_fact(self, value: Any, fact: _FactPath) -> AttributeValue | None:
        try:
            return fact.read_fact(value)
        except Exception as error:
            _log_failed_fact(fact.place, value, error)
            return None


class _FactsOfSeveral(NamedTuple):
    """A reader of one fact for several requests. One path leads to the values, another to the keys of the requests."""

    fact: _FactPath
    of_keys: Parameter
    values: Callable[[Any], Any]
    keys: Callable[[Any], Any]
    texts: Callable[[list[Any]], tuple[str, ...]]
    names: Values

    def read_facts_and_keys(self, *call: Any) -> Values:
        of_values = self.fact.parameter.argument_in_call(*call)
        try:
            texts = self.texts(_take_items(self.keys(self.of_keys.argument_in_call(*call)), BATCH_LIMIT))
            facts = map(self.fact.read_fact, _take_items(self.values(of_values), BATCH_LIMIT))
            pairs = [(text, fact) for text, fact in zip(texts, facts, strict=False) if text and fact is not None]
        except Exception as error:
            _log_failed_fact(self.fact.place, of_values, error)
            return {}
        keys, values = zip(*pairs, strict=True) if pairs else ((), ())
        return {self.fact.name + FACT_KEYS: keys, self.fact.name: values, **self.names} if pairs else {}


def _log_failed_fact(place: str, value: Any, error: Exception) -> None:
    """Log that a fact cannot be read. The error's text is left out, because it may contain data of the service."""
    FAULTS.note_unreadable_value(place, f"reading it raised {type(error).__name__} at a {type(value).__name__}")


def _add_fact_readers(reader: CallReader, rule: FunctionRule) -> None:
    names: Values = {FACTS: tuple(f"{fact.keep} {fact.name}" for fact in rule.facts)}
    singles: dict[str, list[_FactPath]] = {}
    for fact in rule.facts:
        steps, keys = split_path_steps(fact.argument), fact.key or rule.batch
        paths = [fact.argument, keys.argument if keys and EACH in steps else fact.argument]
        parameters = [parameter for path in paths for parameter in reader.find_path_parameter(path)]
        if len(parameters) == 2 and (parameters[0] is RESULT) != (parameters[1] is RESULT):
            reader.missing.append(f"{paths[0]} and {paths[1]} are not both of the call, or of its result")
        elif len(parameters) == 2:
            take = convert_to_fact if fact.record == "value" else READERS[fact.record]
            at = len(steps) - steps[::-1].index(EACH) if EACH in steps else 0
            place = f"{rule.place or rule.text}: fact {fact.name}"
            path = _FactPath(sys.intern(fact.name), place, parameters[0], steps[at:], take)
            if at:
                readers = _make_path_reader(steps[:at]), _make_path_reader(split_path_steps(paths[1]))
                texts = _make_texts_converter(keys.cut if keys else "")
                reader.add_value_reader(
                    path.parameter, _FactsOfSeveral(path, parameters[1], *readers, texts, names).read_facts_and_keys
                )
            else:
                singles.setdefault(path.parameter.name, []).append(path)
    for facts in singles.values():
        if facts[0].parameter is RESULT:
            reader.of_result = _make_facts_reader(facts, names, reader.of_result)
        else:
            reader.of_call = _make_facts_reader(facts, names, reader.of_call)


def _make_facts_reader(facts: Sequence[_FactPath], names: Values, before: Callable[..., Any] | None) -> Any:
    """Return a reader in C that reads facts from a parameter or the result. It calls the reader `before` first."""
    steps = tuple(tuple(map(sys.intern, fact.steps)) if fact.take is convert_to_fact else None for fact in facts)
    return native.MODULE.Keys(
        *_name_and_position(facts[0].parameter), FACTS_OF_REQUEST, steps, tuple(fact.name for fact in facts),
        None, None, before, -1, names, _FactsReader(facts, names, before),
    )  # fmt: skip


def convert_to_fact(value: Any) -> AttributeValue:
    """Convert a value to a fact: a number, a bool or a text. A member of an enumeration becomes its name."""
    kind: Any = type(value)
    if kind is int or kind is str or not issubclass(kind, Enum):
        return convert_to_attribute(value)
    return convert_to_attribute(str(value) if _defines_str(kind) else value.name)


@lru_cache(maxsize=256)
def _defines_str(kind: type) -> bool:
    return any("__str__" in vars(base) and base.__module__ not in ("enum", "builtins") for base in kind.__mro__)


def _make_key_reader(keys: RequestKeys) -> ReadResult:
    of_key, text = _make_path_reader(split_path_steps(keys.argument)), _make_text_converter(keys.cut)

    def read_key(value: Any) -> Values:
        value = of_key(value)
        key = text(value)
        if not key and value is not None and not (issubclass(type(value), str) and not len(value)):
            raise UnreadError(f"{type(value).__name__}; {ALLOWED_KEYS}")
        return {KEY: key} if key else {}

    return read_key


def _make_batch_reader(request_keys: RequestKeys, place: str) -> Callable[..., Values]:
    of_keys = _make_path_reader(split_path_steps(request_keys.argument))
    texts = _make_texts_converter(request_keys.cut)
    of_weights = _make_path_reader(split_path_steps(request_keys.weights)) if request_keys.weights else None

    def read_batch(value: Any, *weighed: Any) -> Values:
        batch = of_keys(value)
        if batch is None:
            return {}
        if isinstance(batch, (str, bytes, int)) or not hasattr(type(batch), "__iter__"):
            batch = (batch,)  # a batch of one
        keys = _take_items(batch, BATCH_LIMIT + 1)
        weights: Any = None
        if of_weights is not None:
            around = weighed[0] if weighed else value
            weights = None if around is None or around is LEFT_OUT else of_weights(around)
            if is_mapping(weights):
                weights = [weights.get(key) for key in keys]
        elif is_mapping(batch):
            weights = batch.values()
        if len(keys) > BATCH_LIMIT:
            FAULTS.note_unreadable_value(f"{place}: keys", f"allowed: {BATCH_LIMIT}, found more")
            del keys[BATCH_LIMIT:]
        values: dict[str, AttributeValue] = {BATCH_KEYS: (batch := texts(keys))}
        if refused := find_refused_key_class(keys, batch):
            FAULTS.note_unreadable_value(place, f"{refused} cannot be a key; {ALLOWED_KEYS}")
        if weights is not None:
            weight_items = _take_items(weights, len(keys))
            numbers = check_weights(weight_items) if len(weight_items) == len(keys) else None
            if numbers is not None:
                values[BATCH_WEIGHTS] = numbers
            elif of_weights is not None or contains_number(weight_items):
                weights_place = f"{place}: {request_keys.weights or 'weights'}"
                FAULTS.note_unreadable_value(weights_place, f"{len(keys)} keys need as many weights, {NO_WEIGHTS}")
        return values

    return read_batch


def _take_items(iterable: Any, most: int) -> list[Any]:
    """Return up to `most` items of an iterable. Raises `UnreadError` for generators, files, and arrays on a device."""
    if hasattr(type(iterable), "__next__"):
        raise UnreadError(f"{type(iterable).__name__}, whose items can be taken only once")
    return read_first_items(iterable, most)


def _make_path_reader(steps: Sequence[str]) -> Callable[[Any], Any]:
    if EACH not in steps:

        def follow_steps(value: Any) -> Any:
            for step in steps:
                value = read_key_or_attribute(value, step)
            return value

        return follow_steps
    at = len(steps) - 1 - steps[::-1].index(EACH)
    before, after = _make_path_reader(steps[:at]), steps[at + 1 :]
    attributes = [(step, attrgetter(step)) for step in after]

    def read_each(value: Any) -> Any:
        items = before(value)
        some = _take_items(items.values() if is_mapping(items) else items, BATCH_LIMIT + 1)
        for step, attribute in attributes:
            kinds = set(map(type, some))
            has_keys = any(map(is_mapping_type, kinds))
            some = [read_key_or_attribute(item, step) for item in some] if has_keys else list(map(attribute, some))
        return some

    return read_each


def _make_text_converter(cut: str) -> Callable[[Any], str]:
    """Return a function that converts a key to text and removes the matches of `cut`. An invalid key becomes ""."""

    def make_plain_text(value: Any) -> str:
        return value if type(value) is str and len(value) <= KEY_LIMIT else encode_key(value)

    if not cut:
        return make_plain_text
    text_cache, expression = _ShortenedTexts(cut), re.compile(cut)

    def shorten(value: Any) -> str:
        if type(value) is str and KEY_LIMIT < len(value) <= CHECKSUM_CHARACTERS:
            return encode_key(expression.sub("", value))  # the end of a long text decides its shortened form
        return text_cache[make_plain_text(value)]

    return shorten


def _make_texts_converter(cut: str) -> Callable[[list[Any]], tuple[str, ...]]:
    text = _make_text_converter(cut)

    def make_texts(keys: list[Any]) -> tuple[str, ...]:
        if not cut and set(map(type, keys)) <= {str} and max(map(len, keys), default=0) <= KEY_LIMIT:
            return tuple(keys)
        return tuple(map(text, keys))

    return make_texts


class _ShortenedTexts(dict[str, str]):
    def __init__(self, cut: str) -> None:
        self._expression = re.compile(cut)

    def __missing__(self, text: str) -> str:
        if len(self) >= TEXTS_KNOWN:
            self.clear()
        self[text] = shortened = self._expression.sub("", text)
        return shortened

    def __reduce__(self) -> tuple[type[_ShortenedTexts], tuple[str]]:
        return type(self), (self._expression.pattern,)
