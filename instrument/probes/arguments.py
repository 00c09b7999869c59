"""Arguments: what a rule asks to be recorded of a call's arguments, as attributes of its span.

Nothing is recorded that no rule names. A size is what `len` says, a type is a class's name; a value is text of at most
`VALUE_LIMIT` characters, or a number. Only what the rule asks for runs code of the arguments' classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from instrument.errors import FAULTS
from instrument.profile import Argument
from instrument.spans import AttributeValue
from instrument.wrapping import Attributes

VALUE_LIMIT = 256

_LEFT_OUT = object()


def reader(function: Callable[..., Any], wanted: Sequence[Argument]) -> tuple[Attributes | None, list[str]]:
    """What reads the wanted arguments of a call of the function, and in words each that it has not.

    The reader never raises: what fails is left out and counted as a fault.
    """
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None, [f"{function!r} does not tell its parameters"] if wanted else []
    found: list[tuple[str, str, int, Any, list[str], Callable[[Any], AttributeValue]]] = []
    missing = []
    places = {name: place for place, name in enumerate(parameters)}
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
        default, place = _LEFT_OUT, -1
        if parameter is not None and parameter.default is not parameter.empty:
            default = parameter.default
        if parameter is not None and parameter.kind is not parameter.KEYWORD_ONLY:
            place = places[name]
        found.append((one.name, name, place, default, path, _TAKEN[one.record]))

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        attributes = {}
        for name, argument, place, default, path, take in found:
            value = args[place] if 0 <= place < len(args) else kwargs.get(argument, default)
            if value is not _LEFT_OUT:
                try:
                    for part in path:
                        value = getattr(value, part)
                    attributes[name] = take(value)
                except Exception as fault:
                    FAULTS.note(f"attribute {name} of a rule", fault)
        return attributes

    return (read if found else None), missing


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
