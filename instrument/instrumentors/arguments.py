"""Arguments: the parts of a call's arguments and result that a rule records, as attributes and keys of its span.

A path below an argument leads through attributes, and through the keys of mappings. Nothing is recorded that no rule
names. A size is what `len` says, a type is a class's name; a value is text of at most `VALUE_LIMIT` characters, or a
number. Only what the rule asks for runs code of the arguments' classes.

A key is read by a path that begins with a parameter, or with `return` for the result. `[]` means each item of a
sequence, or each value of a mapping. Where a path for several keys ends at a mapping its keys are meant, and its values
are their weights if they are numbers. Other weights, perhaps of another parameter, are in the order of the keys, or in
a mapping by key. Keys are text, whole numbers, UUIDs or bytes, or objects of the service's own, which are keys within
their process. Reading never raises: a value that cannot be read is left out, counted and named.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from instrument import native
from instrument.instrumentors.references import isinstance_of
from instrument.profile.model import Argument, FunctionRule, RequestKeys
from instrument.recorder.span_attributes import (
    ALLOWED_KEYS,
    KEY_PART,
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
    KEY,
    KEY_LIMIT,
    VALUE_LIMIT,
    AttributeValue,
)
from instrument.runtime.cheap_start import replace
from instrument.runtime.faults import FAULTS


class LEFT_OUT:  # noqa: N801 - a mark, and no class of anything
    """A mark in place of an argument that a call leaves out, and of a part that an argument has not."""


class Parameter(NamedTuple):
    """The place of one parameter in calls of a function: by its position, -1 for none, else by its name."""

    name: str
    position: int
    default: Any

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument of a call for it, `LEFT_OUT` for none."""
        return args[self.position] if 0 <= self.position < len(args) else kwargs.get(self.name, self.default)


def parameter_of(function: Callable[..., Any], name: str) -> Parameter | str:
    """Return a parameter of the function by its name, or the reason in words why it has none."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return f"{function!r} does not tell its parameters"
    found = parameters.get(name)
    if found is None:
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return Parameter(name, -1, LEFT_OUT)
        return f"no argument {name}, found {', '.join(parameters) or 'none'}"
    if found.kind in (found.VAR_POSITIONAL, found.VAR_KEYWORD):
        return f"{name} stands for many arguments; name one of them"
    position = -1 if found.kind is found.KEYWORD_ONLY else list(parameters).index(name)
    return Parameter(name, position, LEFT_OUT if found.default is found.empty else found.default)


class _Wanted(NamedTuple):
    """An attribute: its name, its parameter, the path below that, and the call that takes a value of the part."""

    name: str
    parameter: Parameter
    path: tuple[str, ...]
    take: Callable[[Any], AttributeValue]
    asked: str


class ArgumentReader:
    """A reader of the wanted arguments of a call. It never raises: an unreadable one is left out, counted and named.

    A copy of it goes with a function that is pickled by value.
    """

    def __init__(self, wanted: Sequence[_Wanted], place: str) -> None:
        self._wanted = tuple(wanted)
        self._place = place

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        attributes = {}
        for wanted in self._wanted:
            value = wanted.parameter.of(args, kwargs)
            if value is not LEFT_OUT:
                part = ""
                try:
                    for part in wanted.path:
                        value = part_of(value, part)
                    part = ""
                    attributes[wanted.name] = wanted.take(value)
                except Exception as error:  # whose text may hold what nobody asked for
                    asked = f"{part!r} of a {type(value).__name__}" if part else f"that of a {type(value).__name__}"
                    words = f"asked for {asked}, found {type(error).__name__}"
                    FAULTS.note_of_rule(f"{self._place}: attribute {wanted.asked}", words)
        return attributes


def reader(
    function: Callable[..., Any], wanted: Sequence[Argument], place: str = ""
) -> tuple[Attributes | None, list[str]]:
    """Return a reader of the wanted arguments of a call of the function, and in words each that it has not.

    `place` is that of the rule, for the log.
    """
    found: list[_Wanted] = []
    missing: dict[str, None] = {}  # each once: a function without known parameters says so of all
    for one in wanted:
        name, *path = one.argument.split(".")
        parameter = parameter_of(function, name)
        if isinstance(parameter, str):
            missing[parameter] = None
        else:
            found.append(_Wanted(one.name, parameter, tuple(path), _TAKEN[one.record], one.argument))
    return (ArgumentReader(found, place) if found else None), list(missing)


def part_of(value: Any, name: str) -> Any:
    """Return the value of a mapping for a name, else the attribute. Asking inserts nothing (`defaultdict`)."""
    if isinstance_of(value, dict):
        found = dict.get(value, name, LEFT_OUT)
        if found is not LEFT_OUT:
            return found
    elif isinstance_of(value, Mapping) and name in value:
        return value[name]
    return getattr(value, name)


def _size(value: Any) -> int:
    return len(value)


def _type(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _value(value: Any) -> AttributeValue:
    if type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**63):
        number: AttributeValue = value
        return number
    text = value if type(value) is str else repr(value)
    return text if len(text) <= VALUE_LIMIT else text[: VALUE_LIMIT - 3] + "..."


_TAKEN: dict[str, Callable[[Any], AttributeValue]] = {"size": _size, "type": _type, "value": _value}


RETURN = "return"
EACH = "[]"

TEXTS_KNOWN = 4096
"""The most texts of which the rest is remembered without the match of an expression."""

Values = dict[Any, Any]
ReadResult = Callable[[Any], Values]
_Read = TypeVar("_Read", bound=Callable[..., Values])
_native = native.MODULE


class KeyReader:
    """A reader of the keys that a rule wants of calls of one function: of their arguments, and of their results.

    `missing` has in words what the function has not. `of_call` and `of_result` are None where nothing is to be read.
    """

    def __init__(self, function: Callable[..., Any], rule: FunctionRule) -> None:
        self.missing: list[str] = []
        self._place = rule.place or rule.text
        wanted = [(KEY, rule.key), (BATCH_KEYS, rule.batch)]
        of_call = [self._read_of_call(function, name, one) for name, one in wanted if one and not _is_of_result(one)]
        of_result = [self._read_of_result(name, one) for name, one in wanted if one and _is_of_result(one)]
        self.of_call: Attributes | None = _all_of(list(filter(None, of_call)))
        self.of_result: ReadResult | None = _all_of(of_result)

    def with_attributes(self, attributes: Attributes | None) -> Attributes | None:
        """Return a reader of the keys of a call's arguments, and of the attributes that others read."""
        return _all_of([one for one in (attributes, self.of_call) if one is not None])

    def _read_of_call(self, function: Callable[..., Any], name: str, wanted: RequestKeys) -> Attributes | None:
        parameter = parameter_of(function, _first(wanted.argument))
        if isinstance(parameter, str):
            self.missing.append(parameter)
            return None
        weighed: Parameter | None = None
        if wanted.weights and _first(wanted.weights) != _first(wanted.argument):
            found = parameter_of(function, _first(wanted.weights))
            if isinstance(found, str):
                wanted = self._without_weights(wanted, found)
            else:
                weighed = found

        def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
            value = parameter.of(args, kwargs)
            try:
                if value is LEFT_OUT:
                    return {}
                return read(value) if weighed is None else read(value, weighed.of(args, kwargs))
            except Exception as error:
                return complain(value, error)

        read, complain = self._reader(name, wanted), self._complainer(wanted)
        return _in_one_step(parameter, name, wanted, read_call, weighed)

    def _without_weights(self, wanted: RequestKeys, missing: str) -> RequestKeys:
        """Return a batch whose members count alike, and note the missing weights."""
        self.missing.append(f"weights: {missing}")
        return replace(wanted, weights="")

    def _read_of_result(self, name: str, wanted: RequestKeys) -> ReadResult:
        if wanted.weights and _first(wanted.weights) != RETURN:
            wanted = self._without_weights(wanted, f"{_first(wanted.weights)} is not of what the call gives")
        read, complain = self._reader(name, wanted), self._complainer(wanted)

        def read_result(value: Any) -> Values:
            try:
                return read(value)
            except Exception as error:
                return complain(value, error)

        return _in_one_step(None, name, wanted, read_result)

    def _reader(self, name: str, wanted: RequestKeys) -> Callable[..., Values]:
        """Return a reader of one wanted object below a value."""
        return _key_of(wanted) if name == KEY else _batch_of(wanted, f"{self._place}: {wanted.argument}")

    def _complainer(self, wanted: RequestKeys) -> Callable[[Any, Exception], Values]:
        """Return a note of a failed read, without its text, which may have values that nobody asked for."""
        place = f"{self._place}: {wanted.argument}"

        def complain(value: Any, error: Exception) -> Values:
            found = error if type(error) is UnreadError else f"{type(error).__name__} below a {type(value).__name__}"
            FAULTS.note_of_rule(place, f"asked for keys, found {found}")
            return {}

        return complain


def _in_one_step(
    parameter: Parameter | None, name: str, wanted: RequestKeys, otherwise: _Read, weighed: Parameter | None = None
) -> _Read:
    """Return a native reader of texts and numbers in attributes and in Python's own containers, as most keys are.

    All else is left to `otherwise`. Amid a service's own work each function that runs here takes microseconds, for the
    processor's caches have lost its code meanwhile.
    """
    paths = [_steps(path) for path in (wanted.argument, wanted.weights)]
    if _native is None or any(steps.count(EACH) > (name != KEY) for steps in paths):
        return otherwise
    steps, of_each = zip(*map(_parted, paths), strict=True)
    made: _Read = _native.Keys(
        sys.intern(parameter.name) if parameter else None, parameter.position if parameter else -1, name != KEY,
        steps[0], of_each[0], steps[1] if wanted.weights else None, of_each[1],
        sys.intern(weighed.name) if weighed else None, weighed.position if weighed else -1,
        _Without(wanted.cut) if wanted.cut else None, otherwise,
    )  # fmt: skip
    return made


def _parted(steps: list[str]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the steps to a container, and those from each item; None without a container."""
    at = steps.index(EACH) if EACH in steps else len(steps)
    steps = list(map(sys.intern, steps))
    return tuple(steps[:at]), tuple(steps[at + 1 :]) if at < len(steps) else None


def _first(path: str) -> str:
    """Return the begin of a path: a parameter, or `return`."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _is_of_result(wanted: RequestKeys) -> bool:
    return _first(wanted.argument) == RETURN


def _all_of(reads: Sequence[Callable[..., Values | None]]) -> Callable[..., Any] | None:
    if len(reads) < 2:
        return reads[0] if reads else None

    def read_all(*given: Any) -> Values:
        return {name: value for read in reads for name, value in (read(*given) or {}).items()}

    return read_all


def _steps(path: str) -> list[str]:
    """Return the steps of a path below its first name."""
    return re.findall(r"\[\]|[^.\[\]]+", path)[1:]


def _key_of(wanted: RequestKeys) -> ReadResult:
    steps, text = _steps(wanted.argument), _text_of(wanted.cut)

    def read(value: Any) -> Values:
        for step in steps:
            value = part_of(value, step)
        key = text(value)
        if not key and value is not None and not (issubclass(type(value), str) and not len(value)):
            raise UnreadError(f"{type(value).__name__}; {ALLOWED_KEYS}")
        return {KEY: key} if key else {}

    return read


def _batch_of(wanted: RequestKeys, place: str) -> Callable[..., Values]:
    of_keys, texts = _values_of(_steps(wanted.argument)), _texts_of(wanted.cut)
    of_weights = _values_of(_steps(wanted.weights)) if wanted.weights else None

    def read(value: Any, *weighed: Any) -> Values:
        found = of_keys(value)
        if found is None:
            return {}
        if isinstance(found, (str, bytes, int)) or not hasattr(type(found), "__iter__"):
            found = (found,)  # a batch of one
        keys = _items(found, BATCH_LIMIT + 1)
        weights: Any = None
        if of_weights is not None:
            around = weighed[0] if weighed else value
            weights = None if around is None or around is LEFT_OUT else of_weights(around)
            if _is_mapping(weights):
                weights = [weights.get(key) for key in keys]
        elif _is_mapping(found):
            weights = found.values()
        if len(keys) > BATCH_LIMIT:
            FAULTS.note_of_rule(f"{place}: keys", f"allowed: {BATCH_LIMIT}, found more")
            del keys[BATCH_LIMIT:]
        values: dict[str, AttributeValue] = {BATCH_KEYS: (found := texts(keys))}
        if refused := refused_keys(keys, found):
            FAULTS.note_of_rule(place, f"asked for keys, found {refused} among them; {ALLOWED_KEYS}")
        if weights is not None:
            its = _items(weights, len(keys))
            numbers = weights_of(its) if len(its) == len(keys) else None
            if numbers is not None:
                values[BATCH_WEIGHTS] = numbers
            elif of_weights is not None or are_amounts(its):
                where = f"{place}: {wanted.weights or 'weights'}"
                FAULTS.note_of_rule(where, f"asked for {len(keys)} weights, {NO_WEIGHTS}")
        return values

    return read


def _items(found: Any, most: int) -> list[Any]:
    """Return the first items of an iterable.

    Raises `UnreadError` where that would take them from the service, as of generators and files, or wait for a device.
    """
    if hasattr(type(found), "__next__"):
        raise UnreadError(f"{type(found).__name__}, whose items can be taken only once")
    return items_of(found, most)


def _values_of(steps: Sequence[str]) -> Callable[[Any], Any]:
    """Return the path to the sequence or mapping with several keys."""
    if EACH not in steps:

        def plain(value: Any) -> Any:
            for step in steps:
                value = part_of(value, step)
            return value

        return plain
    at = len(steps) - 1 - steps[::-1].index(EACH)
    before, after = _values_of(steps[:at]), steps[at + 1 :]
    attributes = [(step, attrgetter(step)) for step in after]

    def each(value: Any) -> Any:
        found = before(value)
        some = _items(found.values() if _is_mapping(found) else found, BATCH_LIMIT + 1)
        for step, attribute in attributes:
            kinds = set(map(type, some))
            has_keys = any(map(_is_mapping_type, kinds))
            some = [part_of(item, step) for item in some] if has_keys else list(map(attribute, some))
        return some

    return each


@lru_cache(maxsize=256)
def _is_mapping_type(kind: type) -> bool:
    return issubclass(kind, Mapping)


def _is_mapping(value: Any) -> bool:
    kind: Any = type(value)
    return _is_mapping_type(kind)


def _text_of(cut: str) -> Callable[[Any], str]:
    """Return a call for a key's text, of `KEY_LIMIT` characters, without matches of an expression; "" for no key."""

    def plain(value: Any) -> str:
        return value if type(value) is str and len(value) <= KEY_LIMIT else key_text(value)

    if not cut:
        return plain
    without, expression = _Without(cut), re.compile(cut)

    def shorter(value: Any) -> str:
        if type(value) is str and KEY_LIMIT < len(value) <= KEY_PART:
            return key_text(expression.sub("", value))  # what is kept of a long one depends on its end
        return without[plain(value)]

    return shorter


def _texts_of(cut: str) -> Callable[[list[Any]], tuple[str, ...]]:
    """Return a call for the texts of many keys."""
    text = _text_of(cut)

    def texts(keys: list[Any]) -> tuple[str, ...]:
        if not cut and set(map(type, keys)) <= {str} and max(map(len, keys), default=0) <= KEY_LIMIT:
            return tuple(keys)
        return tuple(map(text, keys))

    return texts


class _Without(dict[str, str]):
    """Texts without the matches of an expression, remembered."""

    def __init__(self, cut: str) -> None:
        self._expression = re.compile(cut)

    def __missing__(self, text: str) -> str:
        if len(self) >= TEXTS_KNOWN:
            self.clear()
        self[text] = found = self._expression.sub("", text)
        return found

    def __reduce__(self) -> tuple[type[_Without], tuple[str]]:
        return type(self), (self._expression.pattern,)
