"""The generator of `profile.schema.json`. Editors use this JSON Schema to complete the keys of a `profile.yaml`.

    python -m instrument.profile.json_schema    # writes profile.schema.json, next to this file

Keys come from `keys.KEYS`, and their defaults from `model`. The descriptions in `profile.schema.json` are written by
hand, and the generator keeps them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from instrument.profile import model
from instrument.profile.document import REFERENCE, SHAPES, Shape, make_text_schema
from instrument.profile.keys import KEYS, Key
from instrument.profile.model import PHASES
from instrument.profile.values import (
    DURATION,
    DURATION_UNITS,
    FUNCTION_SYNTAX,
    LAYER_SYNTAX,
    RATE_SYNTAX,
    SIZE,
    SIZE_UNITS,
    USUAL_SYNTAX,
    WHERE_SYNTAX,
)

FILE = Path(__file__).with_name("profile.schema.json")

LEFT_OUT: Shape = {"$ref": "#/$defs/left_out"}

SELECTS: Shape = {"type": "string", "pattern": "^[^!]"}
"""The schema of a pattern that selects functions or layers."""

_PATTERN: Shape = {"$ref": "#/$defs/function_pattern"}
_SELECTING: Shape = {"allOf": [_PATTERN, {"pattern": SELECTS["pattern"]}]}
_PATTERNS = {"type": "array", "minItems": 1, "items": {"anyOf": [_PATTERN, REFERENCE]}, "contains": SELECTS}
SHAPES_OF_KEYS: Mapping[tuple[str, str], Shape] = {
    ("functions", "match"): {"anyOf": [_SELECTING, _PATTERNS]},
    ("functions", "phase"): {"anyOf": [{"enum": [*PHASES]}, {"type": "string", "minLength": 1}]},
}
"""The schemas that replace the schemas of the keys' readers, by section and key."""

_BY_TYPE: Shape = {"required": ["type"], "properties": {"type": {"not": {"type": "null"}}}}
_MATCH: Shape = {"anyOf": [SELECTS, {"type": "array", "contains": SELECTS}]}
SHAPES_OF_SECTIONS: Mapping[str, Shape] = {
    "layers": {"anyOf": [_BY_TYPE, {"required": ["match"], "properties": {"match": _MATCH}}]}
}
"""The schemas of sections that require a combination of keys."""

_SERVERS = " ".join(f"{name}: {owner}." for name, owner in model.SERVERS.items())

COMPUTED_DESCRIPTIONS: Mapping[tuple[str, str], str] = {("requests", "servers"): f"Servers to record. {_SERVERS}"}
"""The computed descriptions of keys. They replace the descriptions in the schema's file."""

TEXTS_OF_DEFAULTS: Mapping[tuple[str, str], str] = {("export.otlp", "endpoint"): "http://localhost:4318"}
"""The defaults in the schema that differ from the defaults of the model, by section and key."""


def make_schema() -> dict[str, Any]:
    old = json.loads(FILE.read_text("utf-8"))
    sections = {
        section: _section_schema(section, old["$defs"].get(section, {}) if section else old) for section in KEYS
    }
    texts = "Text with a ${VAR}, ${env:VAR} or ${VAR:-default} that is replaced when the file is read."
    usual = "A percentile of the endpoint's own times, times a factor from 1, such as p99*1.5."
    compared = "Text, or a comparison with a number, such as >=500."
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:instrument-sdk:profile",
        "title": "profile.yaml of instrument",
        "description": "What an inference service records, and where it goes. A key whose value is null counts as left "
        "out.",
        **sections.pop(""),
        "type": ["object", "null"],
        "$defs": {
            "reference": {"description": texts, "type": "string", "pattern": r"\$\{"},
            "left_out": {"anyOf": [{"type": "null"}, REFERENCE]},
            **sections,
            "function_pattern": make_text_schema(FUNCTION_SYNTAX),
            "layer_pattern": make_text_schema(LAYER_SYNTAX),
            "duration": _quantity_schema(DURATION_UNITS),
            "size": _quantity_schema(SIZE_UNITS),
            "usual": {"description": usual, **make_text_schema(USUAL_SYNTAX)},
            "compared": {"description": compared, **make_text_schema(WHERE_SYNTAX)},
            "rate": {
                "description": "A count a second, minute or hour, such as 30/min.",
                **make_text_schema(RATE_SYNTAX),
            },
        },
    }


def _quantity_schema(units: Mapping[str, int]) -> Shape:
    *names, last = units
    pattern = rf"^[0-9]{{1,18}}(?:\.[0-9]{{1,18}})?(?:{'|'.join(units)})$"
    alternatives = [{"const": 0}, {"type": "string", "pattern": pattern}]
    return {"description": f"A number with {', '.join(names)} or {last}.", "anyOf": alternatives}


def _section_schema(section: str, current: Mapping[str, Any]) -> dict[str, Any]:
    keys, described = KEYS[section], current.get("properties", {})
    required = [name for name, key in keys.items() if key.required]
    return {
        "type": "object",
        "additionalProperties": False,
        **({"required": required} if required else {}),
        "properties": {name: _key_schema(section, name, key, described.get(name, {})) for name, key in keys.items()},
        **SHAPES_OF_SECTIONS.get(section, {}),
    }


def _key_schema(section: str, name: str, key: Key, current: Mapping[str, Any]) -> dict[str, Any]:
    shape = SHAPES_OF_KEYS.get((section, name)) or SHAPES[key.read]
    section_of = str(shape.get("$ref")).removeprefix("#/$defs/")
    is_alone = section_of in KEYS or shape.get("type") in ("array", "object")
    otherwise: Shape = REFERENCE if key.required else {"type": "null"} if is_alone or key.blank else LEFT_OUT
    alternatives = shape["anyOf"] if [*shape] == ["anyOf"] else [shape]
    return {
        "description": COMPUTED_DESCRIPTIONS.get((section, name)) or current.get("description", ""),
        **_default_schema(section, name, key, shape),
        "anyOf": [*alternatives, otherwise],
    }


def _default_schema(section: str, name: str, key: Key, shape: Shape) -> dict[str, Any]:
    if text := TEXTS_OF_DEFAULTS.get((section, name)):
        return {"default": text}
    defaults = {class_field.name: class_field.default for class_field in fields(KEYS[section].kind) if class_field.init}
    value = defaults.get(key.field)
    choices = [shape, *shape.get("anyOf", ())]
    words = [word for choice in choices for word in choice.get("enum", ())]
    if value == model.AUTO_NS and "auto" in words:
        return {"default": "auto"}
    if value is None and False in words and not key.blank:
        return {"default": "off"}
    if isinstance(value, tuple):
        return {"default": [*value]} if value else {}
    for unit, units in ((DURATION, DURATION_UNITS), (SIZE, SIZE_UNITS)):
        if unit in choices and type(value) is int:
            return {"default": _quantity_text(value, units)}
    return {"default": value} if isinstance(value, (bool, int, float, str)) and value != "" else {}


def _quantity_text(value: int, units: Mapping[str, int]) -> str:
    if not value:
        return "0B" if "B" in units else "0s"
    name, unit = max((item for item in units.items() if value % item[1] == 0), key=lambda item: item[1])
    return f"{value // unit}{name}"


def format_schema() -> str:
    return json.dumps(make_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(format_schema(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
