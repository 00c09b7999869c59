"""Nothing that a variable holds, no credential and no query of a URL, is in what `check` prints or errors say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from instrument.errors import ExportError, ProfileError
from instrument.otlp.senders import make_sender
from instrument.profile.keys import KEYS, loads
from instrument.profile.model import Otlp
from instrument.profile.values import VARIABLES

CANARY = "c4n4ry"
SHAPES = [
    CANARY,
    f"5{CANARY}",
    f"All{CANARY}",
    f"{CANARY}:4318/v1?token={CANARY}",
    f"http://user:{CANARY}@host/",
    f"http://host/{CANARY}/?{CANARY}",
    f"http://host:99999/{CANARY}",
    f"chat.{CANARY}.Engine.step",
    f"traces/{{{CANARY}}}.json",
    f"{CANARY}/min",
    f"\n{CANARY}",
]
NUMBER = "7470617"  # a secret may be a number, too
ELSEWHERE = {
    "functions": "match: 'a:b'",
    "functions.attributes": "argument: a",
    "functions.key": "argument: a",
    "functions.batch": "argument: a",
    "frameworks": "name: onnxruntime",
}


def text_of(section: str, key: str, value: str) -> str:
    """Return a profile with this value at this key, below its sections and lists."""
    lists = {"functions", "layers", "copies", "frameworks"}
    text, indent = "", 0
    path = ""
    for name in filter(None, section.split(".")):
        path = f"{path}.{name}" if path else name
        text += " " * indent + f"{name}:\n"
        indent += 2
        if path in lists:
            text += " " * indent + "-\n"
            indent += 2
    beside = ELSEWHERE.get(section, "")
    if beside and not beside.startswith(f"{key}:"):
        text += " " * indent + beside + "\n"
    return text + " " * indent + f"{key}: {value}\n"


def told_of(text: str, environ: dict[str, str]) -> str:
    """Return the fault of a profile, or else the names of its rules in messages."""
    try:
        profile = loads(text, environ=environ)
    except ProfileError as error:
        return str(error)
    return " ".join(rule.text for rule in (*profile.functions, *profile.layers))


@pytest.mark.parametrize("section", KEYS)
def test_no_message_about_a_profile_shows_what_a_variable_holds(section: str) -> None:
    refused = 0
    for key in KEYS[section]:
        for held in [*SHAPES, NUMBER]:
            for written in ("${SECRET}", '"${SECRET}"', '"x${SECRET}"', '["${SECRET}", "${SECRET}"]', "{a: ${SECRET}}"):
                if section == "" and key == "service" and "[" not in written and "{a" not in written:
                    continue
                with_braces = written.replace("${SECRET}}", '"${SECRET}"}')
                told = told_of(text_of(section, key, with_braces), {"SECRET": held})
                assert CANARY not in told
                assert NUMBER not in told
                refused += "found" in told
    assert refused


@pytest.mark.parametrize("variable", sorted({name for names in VARIABLES.values() for name, _ in names}))
def test_no_message_about_a_variable_shows_credentials_or_queries(variable: str) -> None:
    shapes = ["http://user:{}@host:x/", "htt://host/?{}", "host:x/v1?token={}", "host?token={}", "{}\t\n{}=\x00{}"]
    for shape in shapes if variable.endswith("HEADERS") else shapes[:4]:
        assert CANARY not in told_of("export: {otlp: {}}", {variable: shape.replace("{}", CANARY)})


def check(*arguments: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "instrument", "check", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **environ},
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.slow
def test_check_shows_the_reference_and_not_its_value(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(
        "service: ${SECRET}\nfunctions: [{match: 'json:${SECRET}*'}]\n"
        "export:\n  otlp:\n    endpoint: 'https://${SECRET}.example/${SECRET}/v1/traces?key=${SECRET}'\n"
        "    headers: {authorization: 'Bearer ${SECRET}'}\n  summary: {to: '/nowhere/${SECRET}.txt'}\n"
    )
    told = check(str(path), SECRET=CANARY)
    assert "export.otlp.endpoint = https://${SECRET}.example/${SECRET}/v1/traces?*** (from profile)" in told
    assert "service ${SECRET}, digest" in told
    assert CANARY not in told + check("--json", str(path), SECRET=CANARY)
    assert CANARY not in check(str(path), "--", "-c", "pass", SECRET=CANARY)


def test_check_shows_no_query_and_no_default_that_was_not_written_there(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("export: {otlp: {}}")
    told = check("--json", str(path), OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"http://host/v1/traces?key={CANARY}")
    settings = {entry["setting"]: entry["value"] for entry in json.loads(told)["settings"]}
    assert settings["export.otlp.endpoint"] == "http://host/v1/traces?***"
    path.write_text("service: ${NAME:-chat}\nexport: {otlp: {endpoint: '${OTEL_EXPORTER_OTLP_ENDPOINT:-http://h:1}'}}")
    told = check(str(path), OTEL_EXPORTER_OTLP_ENDPOINT="http://collector:4318")
    assert "service = chat (from profile)" in told
    assert "export.otlp.endpoint = http://collector:4318/v1/traces (from profile)" in told


@pytest.mark.parametrize(
    "endpoint", [f"ftp://user:{CANARY}@host/?{CANARY}", f"http://[{CANARY}?{CANARY}/", f"http://host:x/?a={CANARY}"]
)
def test_a_collector_that_cannot_be_used_is_named_without_secrets(endpoint: str) -> None:
    with pytest.raises(ExportError) as raised:
        make_sender(Otlp(endpoint=endpoint))
    assert CANARY not in str(raised.value).replace(f"[{CANARY}", "")
