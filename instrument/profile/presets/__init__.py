"""Presets: profiles by name, each a file of this folder, with the lines that most profiles need.

A profile names one with `preset:` and refines it: mappings are merged key by key, and any other value that the profile
gives takes the place of the preset's, a list as a whole. Null counts as left out, as everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from instrument.profile.document import YamlNode

ENGINES: Mapping[str, str] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "mlserver": "mlserver",
    "ray.serve": "ray-serve",
    "mosec": "mosec",
    "litserve": "litserve",
}
"""The presets for engines, by the package of each that a service imports."""

PRESETS: tuple[str, ...] = ("serving", "training", *ENGINES.values(), "fastapi", "transformers")

_FOLDER = Path(__file__).parent


def path_of(preset: str) -> str:
    """Return the path of a preset's file, which is a profile like any other."""
    return str(_FOLDER / f"{preset}.yaml")


def text_of(preset: str) -> str:
    """Return the YAML of a preset."""
    return Path(path_of(preset)).read_text("utf-8")


def named_by(path: str | os.PathLike[str]) -> str | None:
    """Return the preset with that file, None for any other file."""
    return next((preset for preset in PRESETS if os.fspath(path) == path_of(preset)), None)


def refined(profile: YamlNode) -> tuple[YamlNode, dict[str, str]]:
    """Merge the preset that a profile names into its root. Returns both the root and the preset's texts by path."""
    from instrument.profile.document import Document

    key, named = profile.pairs.get("preset", (profile, profile))
    if named.kind != "text" or named.text not in PRESETS:
        return profile, {}
    preset = Document(text_of(named.text), name=path_of(named.text), environ=profile.document.environ)
    given: dict[str, str] = {}
    return _merged(profile, _placed(preset.read(lambda node: node), key), given), given


def _placed(node: YamlNode, at: YamlNode) -> YamlNode:
    """Give a node of a preset the place at which the profile names the preset, for messages."""
    items = tuple(_placed(item, at) for item in node.items)
    pairs = {name: (_placed(key, at), _placed(value, at)) for name, (key, value) in node.pairs.items()}
    return replace(node, document=at.document, line=at.line, column=at.column, items=items, pairs=pairs)


def _merged(own: YamlNode, preset: YamlNode, given: dict[str, str]) -> YamlNode:
    pairs = dict(own.pairs)
    for name, (key, value) in preset.pairs.items():
        place, mine = own.pairs.get(name, (key, None))
        if mine is None or mine.kind == "null":
            pairs[name] = (place, value)
            _note(value, given)
        elif mine.kind == value.kind == "mapping":
            pairs[name] = (place, _merged(mine, value, given))
    return replace(own, pairs=pairs)


def _note(value: YamlNode, given: dict[str, str]) -> None:
    if value.kind != "mapping":
        given[value.where] = _written(value)
    for _, inner in value.pairs.values():
        _note(inner, given)


def _written(value: YamlNode) -> str:
    if value.kind == "list":
        return f"[{', '.join(map(_written, value.items))}]"
    if value.kind == "mapping":
        return f"{{{', '.join(f'{name}: {_written(inner)}' for name, (_, inner) in value.pairs.items())}}}"
    return value.public_text
