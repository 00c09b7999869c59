"""The profiles in configs/: each loads, follows the schema, and `everything.yaml` leaves nothing out."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import instrument.profile.keys
from instrument.profile.keys import KEYS, load, loads
from instrument.profile.model import Chrome, Export, Otlp, Profile, Recordings, Summary
from instrument.trace.tail_sampler import LEAST_CALLS

CONFIGS = Path(__file__).parent.parent / "configs"
EVERYTHING = CONFIGS / "everything.yaml"
SCHEMA = json.loads(Path(instrument.profile.keys.__file__).with_name("profile.schema.json").read_text("utf-8"))


def uncommented(path: Path) -> str:
    """The file with its switched-off keys switched on: they stand behind a `#` without a blank."""
    return re.sub(r"(?m)^#(?=[a-z]|  +\w+:)", "", path.read_text("utf-8"))


def keys_of(value: Any, section: str = "") -> set[tuple[str, str]]:
    """Every (section, key) that a parsed profile holds, sections named as in `KEYS`."""
    if isinstance(value, list):
        return set().union(*(keys_of(item, section) for item in value)) if section in KEYS else set()
    if not isinstance(value, dict) or section not in KEYS:
        return set()
    found = {(section, key) for key in value}
    return found.union(*(keys_of(child, f"{section}.{key}" if section else key) for key, child in value.items()))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
class TestEveryConfig:
    def test_it_loads_in_an_empty_environment(self, path: Path) -> None:
        assert load(path, environ={}).source == str(path)

    def test_it_follows_the_schema(self, path: Path) -> None:
        Draft202012Validator(SCHEMA).validate(yaml.safe_load(path.read_text("utf-8")))

    def test_it_explains_itself(self, path: Path) -> None:
        lines = path.read_text("utf-8").splitlines()
        assert lines[0].startswith("# ")
        assert any(len(line) > 60 for line in lines[:5])
        assert max(map(len, lines)) <= 120


def test_everything_holds_the_default_of_every_key() -> None:
    default = Profile(export=Export(recording=Recordings(), chrome=Chrome(), otlp=Otlp(), summary=Summary()))
    loaded = load(EVERYTHING, environ={})
    assert dataclasses.replace(loaded, functions=(), layers=(), copies=(), frameworks=()) == default


def test_everything_says_from_how_many_requests_on_it_is_known_what_is_slow() -> None:
    assert f"once an endpoint has had {LEAST_CALLS} requests" in EVERYTHING.read_text("utf-8")


def test_everything_shows_the_defaults_of_a_rule() -> None:
    loaded = load(EVERYTHING, environ={})
    function, layer, copy = loaded.functions[0], loaded.layers[0], loaded.copies[0]
    assert function == type(function)(function.match, function.exclude, text=function.text)
    assert layer == type(layer)(layer.match, layer.exclude, layer.types, text=layer.text)
    assert copy == type(copy)(text=copy.text)
    assert [framework == type(framework)(framework.name) for framework in loaded.frameworks] == [True, True]


def test_everything_names_every_key() -> None:
    wanted = {(section, key) for section, keys in KEYS.items() for key in keys}
    assert keys_of(yaml.safe_load(uncommented(EVERYTHING))) == wanted


def test_parts_that_the_profile_everything_leaves_off_load_when_switched_on() -> None:
    schedule = loads(uncommented(EVERYTHING), environ={}).schedule
    assert schedule == type(schedule)(record=4)  # type: ignore[misc]


def test_everything_takes_the_collector_from_the_environment() -> None:
    environ = {"OTEL_SERVICE_NAME": "chat", "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector/otlp"}
    loaded = load(EVERYTHING, environ=environ)
    assert loaded.service == "chat"
    assert loaded.export.otlp == Otlp("https://collector/otlp/v1/traces")
