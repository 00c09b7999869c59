"""Arguments: what a rule asks to be recorded of a call's arguments, as attributes of its span.

A path below an argument leads through attributes, and through the keys of mappings. Nothing is recorded that no rule
names. A size is what `len` says, a type is a class's name; a value is text of at most `VALUE_LIMIT` characters, or a
number. Only what the rule asks for runs code of the arguments' classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from instrument.instrumentors.holders import isinstance_of
from instrument.profile.model import Argument
from instrument.recorder.wrapping import Attributes
from instrument.recording.spans import VALUE_LIMIT, AttributeValue
from instrument.runtime.faults import FAULTS


class _LeftOut:
    """Stands for an argument that a call leaves out, and for a part that an argument has not."""


class _Wanted(NamedTuple):
    """One attribute: how it is called, where its argument stands, the way from there, and what is taken of it."""

    name: str
    argument: str
    place: int
    default: Any
    path: tuple[str, ...]
    take: Callable[[Any], AttributeValue]
    asked: str


class Reader:
    """Reads the wanted arguments of a call. It never raises: what cannot be read is left out, counted and named.

    A copy of it goes with a function that is pickled by value.
    """

    def __init__(self, wanted: Sequence[_Wanted], place: str) -> None:
        self._wanted = tuple(wanted)
        self._place = place

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        attributes = {}
        for wanted in self._wanted:
            place = wanted.place
            value = args[place] if 0 <= place < len(args) else kwargs.get(wanted.argument, wanted.default)
            if value is not _LeftOut:
                part = ""
                try:
                    for part in wanted.path:
                        value = _part(value, part)
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
    """What reads the wanted arguments of a call of the function, and in words each that it has not.

    `place` is that of the rule, for the log.
    """
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None, [f"{function!r} does not tell its parameters"] if wanted else []
    found: list[_Wanted] = []
    missing = []
    places = {name: index for index, name in enumerate(parameters)}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for one in wanted:
        name, *path = one.argument.split(".")
        parameter = parameters.get(name)
        if parameter is None and not takes_any:
            missing.append(f"no argument {name}, found {', '.join(parameters) or 'none'}")
            continue
        if parameter is not None and parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            missing.append(f"{name} stands for many arguments; name one of them")
            continue
        default, index = _LeftOut, -1
        if parameter is not None and parameter.default is not parameter.empty:
            default = parameter.default
        if parameter is not None and parameter.kind is not parameter.KEYWORD_ONLY:
            index = places[name]
        found.append(_Wanted(one.name, name, index, default, tuple(path), _TAKEN[one.record], one.argument))
    return (Reader(found, place) if found else None), missing


def _part(value: Any, name: str) -> Any:
    """What a mapping holds under a name, else the attribute of that name. Asking inserts nothing (`defaultdict`)."""
    if isinstance_of(value, dict):
        found = dict.get(value, name, _LeftOut)
        if found is not _LeftOut:
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
