"""Read values from a call's arguments and result, at the paths that a rule of the profile names.

A path such as `request.params.n` begins with a parameter, or with `return` for the result. The further parts are
attributes or keys of mappings. Unreadable values are counted and logged, and never raise.

The values become attributes of the span, or gauges, which are read at most once per interval.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from instrument.instrumentors.references import isinstance_of
from instrument.profile.model import FunctionRule, OwnGauge
from instrument.recorder.api import make_metric_writer
from instrument.recorder.wrapping import Attributes, Results
from instrument.recording.spans import VALUE_LIMIT, AttributeValue
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import NamedTuple

RETURN = "return"


class LEFT_OUT:  # noqa: N801 - a mark, and no class of anything
    """A marker for an argument that a call omits, and for a missing item of a mapping."""


class Parameter(NamedTuple):
    """A parameter of a function: its name, its position (-1 for a keyword-only parameter) and its default value."""

    name: str
    position: int
    default: Any

    def argument_in_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[self.position] if 0 <= self.position < len(args) else kwargs.get(self.name, self.default)


def parameter_of(function: Callable[..., Any], name: str) -> Parameter | str:
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return f"{function!r} has no known parameters"
    parameter = parameters.get(name)
    if parameter is None:
        if any(candidate.kind is candidate.VAR_KEYWORD for candidate in parameters.values()):
            return Parameter(name, -1, LEFT_OUT)
        return f"no argument {name}, found {', '.join(parameters) or 'none'}"
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return f"{name} takes many arguments; name one of them"
    position = -1 if parameter.kind is parameter.KEYWORD_ONLY else list(parameters).index(name)
    return Parameter(name, position, LEFT_OUT if parameter.default is parameter.empty else parameter.default)


class Result(Parameter):
    """A marker for the result of a call, in place of a parameter."""

    def argument_in_call(self, result: Any) -> Any:  # type: ignore[override]
        return result


RESULT = Result(RETURN, -1, LEFT_OUT)


class CallReader:
    """Reads values from the calls of a function, as a rule specifies.

    `of_call` reads a call's (args, kwargs), and `of_result` the result. Either is None if there is nothing to read.
    `missing` has a message for each parameter that the function lacks.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.of_call: Attributes | None = None
        self.of_result: Results | None = None
        self.missing: list[str] = []

    def find_path_parameter(self, path: str, *, in_result: bool = True) -> tuple[Parameter, ...]:
        """Return the first parameter of a path as a tuple. Return () if the function has no such parameter."""
        name = first_name_of_path(path)
        parameter = RESULT if name == RETURN and in_result else parameter_of(self.function, name)
        if isinstance(parameter, str):
            self.missing += [parameter] * (parameter not in self.missing)
            return ()
        return (parameter,)

    def add_value_reader(self, parameter: Parameter, read: Callable[..., Any]) -> None:
        if parameter is RESULT:
            self.of_result = join_readers([self.of_result, read])
        else:
            self.of_call = join_readers([self.of_call, read])


class AttributeRead(NamedTuple):
    """An attribute to read. `path` leads from the parameter to the value, and `take` converts the value."""

    name: str
    parameter: Parameter
    path: Sequence[str]
    take: Callable[[Any], AttributeValue]
    path_text: str


class ArgumentReader(NamedTuple):
    """Reads a call's arguments as attributes of the span. Unreadable arguments are left out and logged."""

    attributes: Sequence[AttributeRead]
    place: str

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        attributes = {}
        for name, parameter, path, take, path_text in self.attributes:
            value = parameter.argument_in_call(args, kwargs)
            if value is not LEFT_OUT:
                part = ""
                try:
                    for part in path:
                        value = read_key_or_attribute(value, part)
                    part = ""
                    attributes[name] = take(value)
                except Exception as error:  # its text may contain values that no rule names
                    subject = f"{part!r} of a {type(value).__name__}" if part else f"that of a {type(value).__name__}"
                    words = f"reading {subject} raised {type(error).__name__}"
                    FAULTS.note_unreadable_value(f"{self.place}: attribute {path_text}", words)
        return attributes


def add_attribute_reader(reader: CallReader, rule: FunctionRule) -> None:
    reads = [
        AttributeRead(item.name, parameter, split_path_steps(item.argument), READERS[item.record], item.argument)
        for item in rule.attributes
        for parameter in reader.find_path_parameter(item.argument, in_result=False)
    ]
    if reads:
        read: Any = ArgumentReader(tuple(reads), rule.place or rule.text)
        reader.add_value_reader(reads[0].parameter, read)


def read_key_or_attribute(value: Any, name: str) -> Any:
    """Return the item of a mapping, or the attribute of another object. A missing key adds no item to a
    `defaultdict`."""
    if not is_mapping(value):
        return getattr(value, name)
    if isinstance_of(value, dict):
        item = dict.get(value, name, LEFT_OUT)
        if item is not LEFT_OUT:
            return item
    elif name in value:
        return value[name]
    return getattr(value, name)


def _read_type(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def convert_to_attribute(value: Any) -> AttributeValue:
    if type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**63):
        number: AttributeValue = value
        return number
    text = value if type(value) is str else repr(value)
    return text if len(text) <= VALUE_LIMIT else text[: VALUE_LIMIT - 3] + "..."


READERS: dict[str, Callable[[Any], AttributeValue]] = {"size": len, "type": _read_type, "value": convert_to_attribute}


def first_name_of_path(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def split_path_steps(path: str) -> list[str]:
    return re.findall(r"\[\]|[^.\[\]]+", path)[1:]


def join_readers(readers: Sequence[Callable[..., dict[Any, Any] | None] | None]) -> Callable[..., Any] | None:
    reads = [read for read in readers if read is not None]
    if len(reads) < 2:
        return reads[0] if reads else None

    def read_all(*values: Any) -> dict[Any, Any]:
        return {name: value for read in reads for name, value in (read(*values) or {}).items()}

    return read_all


@lru_cache(maxsize=256)
def is_mapping_type(kind: type) -> bool:
    return issubclass(kind, Mapping)


def is_mapping(value: Any) -> bool:
    kind: Any = type(value)
    return is_mapping_type(kind)


def add_gauge_readers(reader: CallReader, rule: FunctionRule) -> None:
    for gauge in rule.gauges:
        for parameter in reader.find_path_parameter(gauge.argument):
            reader.add_value_reader(parameter, _Gauge(gauge, parameter, rule))


class _Gauge:
    """Reads the value of a rule's gauge from a parameter or the result of a call."""

    def __init__(self, gauge: OwnGauge, parameter: Parameter, rule: FunctionRule) -> None:
        self._parameter, self._steps = parameter, split_path_steps(gauge.argument)
        self._is_size = gauge.record == "size"
        self._place = f"{rule.place or rule.text}: gauge {gauge.name}"
        self._put = make_metric_writer(gauge.kind, gauge.name, gauge.unit, gauge.every_ns)
        self._every_ns = gauge.every_ns if gauge.kind == "gauge" else 0
        self._due_ns = 0

    def __call__(self, *call: Any) -> None:
        """Read a value from a call's (args, kwargs) or result, and store the value unless it is None. Never raises."""
        now_ns = time.monotonic_ns()
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + self._every_ns
        value = self._parameter.argument_in_call(*call)
        try:
            for step in self._steps:
                value = read_key_or_attribute(value, step)
            if value is not None and value is not LEFT_OUT:
                self._put(len(value) if self._is_size else value)
        except Exception as error:  # its text may contain values that no rule names
            FAULTS.note_unreadable_value(
                self._place, f"reading it raised {type(error).__name__} at a {type(value).__name__}"
            )
