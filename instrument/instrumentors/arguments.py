"""Arguments: what a rule asks to be recorded of a call's arguments, as attributes of its span.

A path below an argument leads through attributes, and through the keys of mappings. Nothing is recorded that no rule
names. A size is what `len` says, a type is a class's name; a value is text of at most `VALUE_LIMIT` characters, or a
number. Only what the rule asks for runs code of the arguments' classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from instrument.instrumentors.namespaces import isinstance_of
from instrument.profile.model import Argument
from instrument.recorder.wrapping import Attributes
from instrument.recording.spans import VALUE_LIMIT, AttributeValue
from instrument.runtime.faults import FAULTS


class LEFT_OUT:  # noqa: N801 - a mark, and no class of anything
    """Stands for an argument that a call leaves out, and for a part that an argument has not."""


class Parameter(NamedTuple):
    """The place of one parameter in calls of a function: by its position, -1 for none, else by its name."""

    name: str
    position: int
    default: Any

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument of a call for it, `LEFT_OUT` for none."""
        return args[self.position] if 0 <= self.position < len(args) else kwargs.get(self.name, self.default)


def parameter_of(function: Callable[..., Any], name: str) -> Parameter | str:
    """A parameter of the function by its name, or in words why it has none."""
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
    """One attribute: how it is called, where its argument stands, the way from there, and what is taken of it."""

    name: str
    parameter: Parameter
    path: tuple[str, ...]
    take: Callable[[Any], AttributeValue]
    asked: str


class ArgumentReader:
    """Reads the wanted arguments of a call. It never raises: what cannot be read is left out, counted and named.

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
    missing: dict[str, None] = {}  # each once: a function that tells no parameters says so of all
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
