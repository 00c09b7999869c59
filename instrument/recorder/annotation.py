"""What a service says of an open span: which attributes, names and states can be kept, and what is said of the others.

The values are those that OpenTelemetry has. Whatever else is given is left out, counted, and named in the log once:
nothing here raises into the service, and no code of a value's class is run but that of numbers.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

from instrument.recording.spans import (
    ATTRIBUTE_LIMIT,
    ERROR_TYPE,
    STATUS_CODE,
    STATUS_DESCRIPTION,
    VALUE_LIMIT,
    AttributeValue,
)

REFUSED = "attributes of a kind that no span has"
"""What is counted where a value cannot be kept."""

Complain = Callable[[str, str], None]
"""Counts what is left out under a text, and tells in words what was asked and found."""


def checked(attributes: object, more: Mapping[str, object], complain: Complain) -> dict[str, AttributeValue]:
    """Of what was given as a mapping, and by name, what a span keeps: long texts cut, numbers as Python's own."""
    kept: dict[str, AttributeValue] = {}
    if attributes is not None and not isinstance(attributes, Mapping):
        complain(REFUSED, f"asked for attributes, found {_kind(attributes)}; give a mapping, or name=value")
        attributes = None
    try:
        given = {**(attributes or {}), **more}
    except Exception as error:  # a mapping of the service's own
        complain(REFUSED, f"asked for attributes, found {_kind(error)} when reading them")
        given = dict(more)
    for name, value in given.items():
        if type(name) is not str or not name:
            complain(REFUSED, f"asked for an attribute, found {_kind(name)} for its name; allowed: text, not empty")
            continue
        found = _value(value)
        if found is None:
            allowed = "text, a bool, a number of 64 bits, or a list of one of these"
            complain(REFUSED, f"asked for attribute {name:.60}, found {_kind(value)}; allowed: {allowed}")
        else:
            kept[_cut(name)] = found
    return kept


def name_of(name: object) -> str | None:
    """The name that a span is to have, or None for what cannot be one."""
    return _cut(str.__str__(name)) if isinstance(name, str) and name else None


def status_attributes(code: object, description: object, error_type: object) -> dict[str, AttributeValue] | None:
    """The attributes that say how a span ended; None for what is no status.

    `code` is `ok` or `error`, in any case, or a member of OpenTelemetry's `StatusCode`.
    """
    word = code if isinstance(code, str) else getattr(code, "name", None)
    word = word.upper() if isinstance(word, str) else word
    if word not in ("OK", "ERROR"):
        return None
    found: dict[str, AttributeValue] = {STATUS_CODE: word}
    if word == "ERROR" and isinstance(description, str) and description:
        found[STATUS_DESCRIPTION] = _cut(description)
    if word == "ERROR" and isinstance(error_type, str) and error_type:
        found[ERROR_TYPE] = _cut(error_type)
    return found


def _value(value: object) -> AttributeValue | None:
    if not isinstance(value, (list, tuple)):
        return _scalar(value)
    items = [_scalar(item) for item in value[:ATTRIBUTE_LIMIT]]
    kinds = {type(item) for item in items}
    if kinds == {int, float}:
        return tuple(float(item) for item in items if item is not None)
    found: Any = tuple(items)
    return None if len(kinds) > 1 or type(None) in kinds else found


def _scalar(value: object) -> str | bool | int | float | None:
    if isinstance(value, str):
        return _cut(str.__str__(value))
    if isinstance(value, bool):
        return value
    try:
        if isinstance(value, numbers.Integral):
            number = int(value)
            return number if -(2**63) <= number < 2**63 else None
        return float(value) if isinstance(value, numbers.Real) else None
    except Exception:  # of a number of the service's own
        return None


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_LIMIT else text[: VALUE_LIMIT - 3] + "..."


def _kind(value: object) -> str:
    return type(value).__name__
