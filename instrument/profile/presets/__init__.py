"""The presets, which are named profiles in files of this folder.

A profile selects a preset with the key `preset`. The mappings of the profile and the preset are merged key by key. Any
other value of the profile, such as a list, replaces the preset's value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from instrument.runtime.lazy_imports import replace

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
"""The preset for each inference engine, by the engine's package."""

PRESETS: tuple[str, ...] = ("serving", "training", *ENGINES.values(), "fastapi", "transformers")

_FOLDER = Path(__file__).parent


def preset_path(preset: str) -> str:
    return str(_FOLDER / f"{preset}.yaml")


def read_preset(preset: str) -> str:
    return Path(preset_path(preset)).read_text("utf-8")


def preset_of_file(path: str | os.PathLike[str]) -> str | None:
    return next((preset for preset in PRESETS if os.fspath(path) == preset_path(preset)), None)


def merge_preset(profile: YamlNode) -> tuple[YamlNode, dict[str, str]]:
    """Merge a profile's preset into the root node. The second result has the YAML text of each preset value, by key
    path."""
    from instrument.profile.document import Document

    key, value = profile.pairs.get("preset", (profile, profile))
    if value.kind != "text" or value.text not in PRESETS:
        return profile, {}
    preset = Document(read_preset(value.text), name=preset_path(value.text), environ=profile.document.environ)
    preset_texts: dict[str, str] = {}
    return _merge_mappings(profile, _move_node(preset.read_root(lambda node: node), key), preset_texts), preset_texts


def _move_node(node: YamlNode, at: YamlNode) -> YamlNode:
    items = tuple(_move_node(item, at) for item in node.items)
    pairs = {name: (_move_node(key, at), _move_node(value, at)) for name, (key, value) in node.pairs.items()}
    return replace(node, document=at.document, line=at.line, column=at.column, items=items, pairs=pairs)


def _merge_mappings(mapping: YamlNode, preset: YamlNode, preset_texts: dict[str, str]) -> YamlNode:
    pairs = dict(mapping.pairs)
    for name, (key, value) in preset.pairs.items():
        place, mine = mapping.pairs.get(name, (key, None))
        if mine is None or mine.kind == "null":
            pairs[name] = (place, value)
            _collect_preset_texts(value, preset_texts)
        elif mine.kind == value.kind == "mapping":
            pairs[name] = (place, _merge_mappings(mine, value, preset_texts))
    return replace(mapping, pairs=pairs)


def _collect_preset_texts(value: YamlNode, preset_texts: dict[str, str]) -> None:
    if value.kind != "mapping":
        preset_texts[value.key_path] = _as_yaml(value)
    for _, inner in value.pairs.values():
        _collect_preset_texts(inner, preset_texts)


def _as_yaml(value: YamlNode) -> str:
    if value.kind == "list":
        return f"[{', '.join(map(_as_yaml, value.items))}]"
    if value.kind == "mapping":
        return f"{{{', '.join(f'{name}: {_as_yaml(inner)}' for name, (_, inner) in value.pairs.items())}}}"
    return value.public_text
