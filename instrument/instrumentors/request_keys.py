"""Read the keys, batches and facts of requests from a call's arguments and result.

Paths to values are written as in the module `arguments`. `[]` in a path means each item of a sequence, or each value of
a mapping. A batch has a path to its keys, and perhaps one to their weights. Reading never raises: unreadable values are
counted and logged.

Keys are text, integers, UUIDs or bytes. Within a process, an object of the service may be a key.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeVar

from instrument import native
from instrument.instrumentors.arguments import (
    LEFT_OUT,
    READERS,
    RETURN,
    Parameter,
    first_of,
    is_mapping,
    is_mapping_type,
    join_readers,
    parameter_of,
    read_part,
    read_value,
    split_steps,
)
from instrument.profile.model import FunctionRule, RequestKeys
from instrument.recorder.attribute_checks import (
    ALLOWED_KEYS,
    CHECKSUM_CHARACTERS,
    NO_WEIGHTS,
    UnreadError,
    are_amounts,
    items_of,
    key_text,
    refused_keys,
    weights_of,
)
from instrument.recorder.wrapping import Attributes
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
from instrument.runtime.cheap_start import NamedTuple, replace
from instrument.runtime.faults import FAULTS

EACH = "[]"
FACTS_OF_REQUEST = 2
"""The mode in which the C reader reads facts of requests, and no keys."""

TEXTS_KNOWN = 4096
"""The maximum number of key texts whose shortened form is cached. At the limit the cache is emptied."""

Values = dict[Any, Any]
ReadResult = Callable[[Any], Values]
_Read = TypeVar("_Read", bound=Callable[..., Values])
_native = native.MODULE


class KeyReader:
    """A reader of a rule's key and batch. `of_call` reads a call's arguments, `of_result` its result.

    Either is None if it has nothing to read. `missing` has a message for each parameter that the function lacks.
    """

    def __init__(self, function: Callable[..., Any], rule: FunctionRule) -> None:
        self.missing: list[str] = []
        self._place = rule.place or rule.text
        pairs = [(name, keys) for name, keys in ((KEY, rule.key), (BATCH_KEYS, rule.batch)) if keys]
        readers = [(first_of(keys.argument) == RETURN, self._make_reader(function, name, keys)) for name, keys in pairs]
        self.of_call: Attributes | None = join_readers([reader for is_of_result, reader in readers if not is_of_result])
        self.of_result: ReadResult | None = join_readers([reader for is_of_result, reader in readers if is_of_result])

    def _make_reader(self, function: Callable[..., Any], name: str, keys: RequestKeys) -> Callable[..., Values] | None:
        """Return a reader of the key or the batch. It gets a call's (args, kwargs), or its result."""
        first, weights = first_of(keys.argument), first_of(keys.weights)
        parameter = None if first == RETURN else parameter_of(function, first)
        if isinstance(parameter, str):
            self.missing.append(parameter)
            return None
        weighed: Parameter | None = None
        if keys.weights and weights != first:
            of_weights = "" if parameter is None else parameter_of(function, weights)
            if isinstance(of_weights, str):  # all members of the batch weigh the same
                self.missing.append(f"weights: {of_weights or f'{weights} is not of what the call gives'}")
                keys = replace(keys, weights="")
            else:
                weighed = of_weights
        place = f"{self._place}: {keys.argument}"
        read: Callable[..., Values] = _make_key_reader(keys) if name == KEY else _make_batch_reader(keys, place)

        def read_values(*call: Any) -> Values:
            value = call[0] if parameter is None else parameter.of(*call)
            try:
                if value is LEFT_OUT:
                    return {}
                return read(value) if weighed is None else read(value, weighed.of(*call))
            except Exception as error:  # its text may contain values
                is_unread = type(error) is UnreadError
                reason = error if is_unread else f"{type(error).__name__} below a {type(value).__name__}"
                FAULTS.note_of_rule(place, f"the keys cannot be read: {reason}")
                return {}

        return _make_native_reader(parameter, name, keys, read_values, weighed)


def _make_native_reader(
    parameter: Parameter | None, name: str, keys: RequestKeys, otherwise: _Read, weighed: Parameter | None = None
) -> _Read:
    """Return a reader in C for keys that are texts or numbers. It calls `otherwise` for any other key.

    A reader in Python would take microseconds, because the service's work evicts its code from the processor's caches.
    """
    paths = [split_steps(path) for path in (keys.argument, keys.weights)]
    if _native is None or any(steps.count(EACH) > (name != KEY) for steps in paths):
        return otherwise
    steps, of_each = zip(*map(_split_at_container, paths), strict=True)
    native_reader: _Read = _native.Keys(
        sys.intern(parameter.name) if parameter else None, parameter.position if parameter else -1, name != KEY,
        steps[0], of_each[0], steps[1] if keys.weights else None, of_each[1],
        sys.intern(weighed.name) if weighed else None, weighed.position if weighed else -1,
        _ShortenedTexts(keys.cut) if keys.cut else None, otherwise,
    )  # fmt: skip
    return native_reader


def _split_at_container(steps: list[str]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Split a path at `[]` into the steps before and after. Without `[]`, the second part is None."""
    at = steps.index(EACH) if EACH in steps else len(steps)
    steps = list(map(sys.intern, steps))
    return tuple(steps[:at]), tuple(steps[at + 1 :]) if at < len(steps) else None


class _FactPath(NamedTuple):
    """A path to a fact of a call's request, from a parameter or the result, and `take`, which converts the value."""

    name: str
    place: str
    steps: Sequence[str]
    take: Callable[[Any], AttributeValue]

    def read_below(self, value: Any) -> AttributeValue | None:
        """Follow the path from a value to the fact. Return None if any object on the path is None."""
        for step in self.steps:
            if value is None:
                return None
            value = read_part(value, step)
        return None if value is None else self.take(value)


class _FactsReader(NamedTuple):
    """A reader of facts of a call's request, from one parameter or from the result.

    C code calls it with a value and the index of a fact that C cannot read. If a call omits the argument, C code passes
    the call's arguments, and the parameter's default is read.
    """

    parameter: Parameter | None
    facts: Sequence[_FactPath]
    names: Values
    before: Callable[..., Any] | None

    def __call__(self, value: Any, place: Any) -> Any:
        if type(place) is int:
            return self._read(value, place)
        attributes: Values = self.before(value, place) or {} if self.before else {}
        default = LEFT_OUT if self.parameter is None else self.parameter.default
        reads = (
            [] if default is LEFT_OUT else [(fact.name, self._read(default, at)) for at, fact in enumerate(self.facts)]
        )
        facts = {name: fact for name, fact in reads if fact is not None}
        return {**attributes, **facts, **self.names} if facts else attributes

    def _read(self, value: Any, place: int) -> AttributeValue | None:
        fact = self.facts[place]
        try:
            return fact.read_below(value)
        except Exception as error:
            _log_failed_fact(fact.place, value, error)
            return None


class _FactsOfSeveral(NamedTuple):
    """A reader of one fact for several requests. The values are at one path, the requests' keys at another."""

    fact: _FactPath
    parameters: Sequence[Parameter | None]
    values: Callable[[Any], Any]
    keys: Callable[[Any], Any]
    texts: Callable[[list[Any]], tuple[str, ...]]
    names: Values

    def read(self, *call: Any) -> Values:
        """Read the facts of several requests, and the requests' keys, from a call's (args, kwargs) or its result."""
        of_values, of_keys = (call[0] if parameter is None else parameter.of(*call) for parameter in self.parameters)
        try:
            texts = self.texts(_take_items(self.keys(of_keys), BATCH_LIMIT))
            facts = map(self.fact.read_below, _take_items(self.values(of_values), BATCH_LIMIT))
            pairs = [(text, fact) for text, fact in zip(texts, facts, strict=False) if text and fact is not None]
        except Exception as error:
            _log_failed_fact(self.fact.place, of_values, error)
            return {}
        keys, values = zip(*pairs, strict=True) if pairs else ((), ())
        return {self.fact.name + FACT_KEYS: keys, self.fact.name: values, **self.names} if pairs else {}


def _log_failed_fact(place: str, value: Any, error: Exception) -> None:
    """Log that a fact cannot be read. The error's text is left out, because it may contain data of the service."""
    FAULTS.note_of_rule(place, f"reading it raised {type(error).__name__} at a {type(value).__name__}")


class FactReader:
    """A reader of a rule's facts of requests. `of_call` reads a call's arguments, `of_result` its result. Either is
    None if there is nothing to read.

    Both first call the reader of the same name that the constructor gets, if any. `missing` has a message for each fact
    that the function lacks.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        rule: FunctionRule,
        of_call: Attributes | None = None,
        of_result: ReadResult | None = None,
    ) -> None:
        self.missing: list[str] = []
        self.of_call, self.of_result = of_call, of_result
        names: Values = {FACTS: tuple(f"{fact.keep} {fact.name}" for fact in rule.facts)}
        singles: dict[Parameter | None, list[_FactPath]] = {}
        for fact in rule.facts:
            steps, keys = split_steps(fact.argument), fact.key or rule.batch
            paths = [fact.argument, keys.argument if keys and EACH in steps else fact.argument]
            parameters = self._find_parameters(function, paths)
            if not parameters:
                continue
            take = fact_value if fact.record == "value" else READERS[fact.record]
            at = len(steps) - steps[::-1].index(EACH) if EACH in steps else 0
            single = _FactPath(sys.intern(fact.name), f"{rule.place or rule.text}: fact {fact.name}", steps[at:], take)
            if not at:
                singles.setdefault(parameters[0], []).append(single)
                continue
            texts = _texts_maker(keys.cut if keys else "")
            several = _FactsOfSeveral(
                single, parameters, _values_reader(steps[:at]), _values_reader(split_steps(paths[1])), texts, names
            )
            if parameters[0] is None:
                self.of_result = join_readers([self.of_result, several.read])
            else:
                self.of_call = join_readers([self.of_call, several.read])
        for parameter, facts in singles.items():
            if parameter is None:
                self.of_result = _make_facts_reader(parameter, facts, names, self.of_result)
            else:
                self.of_call = _make_facts_reader(parameter, facts, names, self.of_call)

    def _find_parameters(self, function: Callable[..., Any], paths: Sequence[str]) -> list[Parameter | None] | None:
        """Return the parameter of a fact's values and that of its keys, each None for the result. Return None if one is
        missing."""
        parameters = [None if first_of(path) == RETURN else parameter_of(function, first_of(path)) for path in paths]
        missing = [parameter for parameter in parameters if isinstance(parameter, str)]
        if not missing and (parameters[0] is None) != (parameters[1] is None):
            missing = [f"{paths[0]} and {paths[1]} are not both of the call, or of its result"]
        self.missing += missing[:1]
        return None if missing else [parameter for parameter in parameters if not isinstance(parameter, str)]


def _make_facts_reader(
    parameter: Parameter | None, facts: Sequence[_FactPath], names: Values, before: Callable[..., Any] | None
) -> Any:
    """Return a reader of facts, in C if possible. It first calls the reader `before`."""
    reader = _FactsReader(parameter, facts, names, before)
    if _native is None:
        return reader
    steps = [tuple(map(sys.intern, fact.steps)) if fact.take is fact_value else None for fact in facts]
    return _native.Keys(
        sys.intern(parameter.name) if parameter else None, parameter.position if parameter else -1, FACTS_OF_REQUEST,
        tuple(steps), tuple(fact.name for fact in facts), None, None, before, -1, names, reader,
    )  # fmt: skip


def fact_value(value: Any) -> AttributeValue:
    """Convert a value to a fact: a number, a bool or a text. A member of an enumeration becomes its name."""
    kind: Any = type(value)
    if kind is int or kind is str or not issubclass(kind, Enum):
        return read_value(value)
    return read_value(str(value) if _defines_str(kind) else value.name)


@lru_cache(maxsize=256)
def _defines_str(kind: type) -> bool:
    return any("__str__" in vars(base) and base.__module__ not in ("enum", "builtins") for base in kind.__mro__)


def _make_key_reader(keys: RequestKeys) -> ReadResult:
    steps, text = split_steps(keys.argument), _text_maker(keys.cut)

    def read(value: Any) -> Values:
        for step in steps:
            value = read_part(value, step)
        key = text(value)
        if not key and value is not None and not (issubclass(type(value), str) and not len(value)):
            raise UnreadError(f"{type(value).__name__}; {ALLOWED_KEYS}")
        return {KEY: key} if key else {}

    return read


def _make_batch_reader(request_keys: RequestKeys, place: str) -> Callable[..., Values]:
    of_keys, texts = _values_reader(split_steps(request_keys.argument)), _texts_maker(request_keys.cut)
    of_weights = _values_reader(split_steps(request_keys.weights)) if request_keys.weights else None

    def read(value: Any, *weighed: Any) -> Values:
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
            FAULTS.note_of_rule(f"{place}: keys", f"allowed: {BATCH_LIMIT}, found more")
            del keys[BATCH_LIMIT:]
        values: dict[str, AttributeValue] = {BATCH_KEYS: (batch := texts(keys))}
        if refused := refused_keys(keys, batch):
            FAULTS.note_of_rule(place, f"{refused} cannot be a key; {ALLOWED_KEYS}")
        if weights is not None:
            weight_items = _take_items(weights, len(keys))
            numbers = weights_of(weight_items) if len(weight_items) == len(keys) else None
            if numbers is not None:
                values[BATCH_WEIGHTS] = numbers
            elif of_weights is not None or are_amounts(weight_items):
                weights_place = f"{place}: {request_keys.weights or 'weights'}"
                FAULTS.note_of_rule(weights_place, f"{len(keys)} keys need as many weights, {NO_WEIGHTS}")
        return values

    return read


def _take_items(iterable: Any, most: int) -> list[Any]:
    """Return up to `most` items of an iterable. Raises `UnreadError` for generators, files, and arrays on a device."""
    if hasattr(type(iterable), "__next__"):
        raise UnreadError(f"{type(iterable).__name__}, whose items can be taken only once")
    return items_of(iterable, most)


def _values_reader(steps: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function that follows `steps` from a value. With `[]` among the steps, it returns a list."""
    if EACH not in steps:

        def plain(value: Any) -> Any:
            for step in steps:
                value = read_part(value, step)
            return value

        return plain
    at = len(steps) - 1 - steps[::-1].index(EACH)
    before, after = _values_reader(steps[:at]), steps[at + 1 :]
    attributes = [(step, attrgetter(step)) for step in after]

    def read_each(value: Any) -> Any:
        items = before(value)
        some = _take_items(items.values() if is_mapping(items) else items, BATCH_LIMIT + 1)
        for step, attribute in attributes:
            kinds = set(map(type, some))
            has_keys = any(map(is_mapping_type, kinds))
            some = [read_part(item, step) for item in some] if has_keys else list(map(attribute, some))
        return some

    return read_each


def _text_maker(cut: str) -> Callable[[Any], str]:
    """Return a function that makes the text of a key, without matches of `cut`, "" for a value that cannot be a key."""

    def make_plain_text(value: Any) -> str:
        return value if type(value) is str and len(value) <= KEY_LIMIT else key_text(value)

    if not cut:
        return make_plain_text
    text_cache, expression = _ShortenedTexts(cut), re.compile(cut)

    def shorten(value: Any) -> str:
        if type(value) is str and KEY_LIMIT < len(value) <= CHECKSUM_CHARACTERS:
            return key_text(expression.sub("", value))  # the end of a long text decides its shortened form
        return text_cache[make_plain_text(value)]

    return shorten


def _texts_maker(cut: str) -> Callable[[list[Any]], tuple[str, ...]]:
    text = _text_maker(cut)

    def make_texts(keys: list[Any]) -> tuple[str, ...]:
        if not cut and set(map(type, keys)) <= {str} and max(map(len, keys), default=0) <= KEY_LIMIT:
            return tuple(keys)
        return tuple(map(text, keys))

    return make_texts


class _ShortenedTexts(dict[str, str]):
    """A cache of the texts of keys without the matches of a regular expression."""

    def __init__(self, cut: str) -> None:
        self._expression = re.compile(cut)

    def __missing__(self, text: str) -> str:
        if len(self) >= TEXTS_KNOWN:
            self.clear()
        self[text] = shortened = self._expression.sub("", text)
        return shortened

    def __reduce__(self) -> tuple[type[_ShortenedTexts], tuple[str]]:
        return type(self), (self._expression.pattern,)
