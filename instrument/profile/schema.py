"""The JSON Schema of `profile.yaml`, which editors complete it by, made of what reads it.

    python -m instrument.profile.schema    # writes profile.schema.json, beside this file

Keys, and which of them are needed, come from `keys.KEYS`; words, patterns and bounds from the readers, as `shaped` says
of each; defaults from `model`. Only what a key means to whoever writes it stands here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from instrument.profile import model
from instrument.profile.document import REFERENCE, SHAPES, Shape, syntax_shape
from instrument.profile.keys import KEYS, Key
from instrument.profile.kinds import PHASES
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

FILLED_BY: Mapping[str, type] = {
    "": model.Profile,
    "functions": model.FunctionRule,
    "functions.key": model.RequestKeys,
    "functions.batch": model.RequestKeys,
    "functions.where": model.FunctionRule,
    "functions.attributes": model.Argument,
    "layers": model.LayerRule,
    "copies": model.CopyRule,
    "frameworks": model.FrameworkRule,
    "requests": model.RequestsRule,
    "schedule": model.Schedule,
    "capture": model.Capture,
    "limits": model.Limits,
    "device": model.Device,
    "control": model.Control,
    "export": model.Export,
    "export.recording": model.Recordings,
    "export.chrome": model.Chrome,
    "export.otlp": model.Otlp,
    "export.summary": model.Summary,
}
"""What the keys of each section fill, which has their defaults."""

SELECTS: Shape = {"type": "string", "pattern": "^[^!]"}
"""A pattern that takes something in."""

SHAPES_OF_KEYS: Mapping[tuple[str, str], Shape] = {
    ("functions", "match"): {
        "anyOf": [
            {"allOf": [{"$ref": "#/$defs/function_pattern"}, {"pattern": SELECTS["pattern"]}]},
            {
                "type": "array",
                "minItems": 1,
                "items": {"anyOf": [{"$ref": "#/$defs/function_pattern"}, REFERENCE]},
                "contains": SELECTS,
            },
        ]
    },
    ("functions", "phase"): {"anyOf": [{"enum": [*PHASES]}, {"type": "string", "minLength": 1}]},
}
"""Those of keys of which a rule says more than the reader of the key does."""

SHAPES_OF_SECTIONS: Mapping[str, Shape] = {
    "layers": {
        "anyOf": [
            {"required": ["type"], "properties": {"type": {"not": {"type": "null"}}}},
            {
                "required": ["match"],
                "properties": {"match": {"anyOf": [SELECTS, {"type": "array", "contains": SELECTS}]}},
            },
        ]
    },
    "frameworks": {
        "if": {"required": ["nodes"], "properties": {"nodes": {"const": True}}},
        "then": {"properties": {"name": {"anyOf": [{"const": "onnxruntime"}, REFERENCE]}}},
    },
}
"""Those of values against each other."""

TEXTS_OF_DEFAULTS: Mapping[tuple[str, str], str] = {("export.otlp", "endpoint"): "http://localhost:4318"}
"""Those that the reader of a section completes."""


def schema() -> dict[str, Any]:
    """The schema, as JSON takes it."""
    sections = {section: _section(section) for section in KEYS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:instrument-sdk:profile",
        "title": "profile.yaml of instrument",
        "description": "What an inference service records, and where it goes. A key whose value is null counts as left "
        "out.",
        **sections.pop(""),
        "type": ["object", "null"],
        "$defs": {
            "reference": {
                "description": "Text with a ${VAR}, ${env:VAR} or ${VAR:-default} that is replaced when the file is "
                "read.",
                "type": "string",
                "pattern": r"\$\{",
            },
            "left_out": {"anyOf": [{"type": "null"}, REFERENCE]},
            **sections,
            "function_pattern": syntax_shape(FUNCTION_SYNTAX),
            "layer_pattern": syntax_shape(LAYER_SYNTAX),
            "duration": _quantity(DURATION_UNITS),
            "size": _quantity(SIZE_UNITS),
            "usual": {
                "description": "A percentile of the endpoint's own times, times a factor from 1, such as p99*1.5.",
                **syntax_shape(USUAL_SYNTAX),
            },
            "compared": {
                "description": "Text, or a comparison with a number, such as >=500.",
                **syntax_shape(WHERE_SYNTAX),
            },
            "rate": {
                "description": "A count a second, minute or hour, such as 30/min.",
                **syntax_shape(RATE_SYNTAX),
            },
        },
    }


def _quantity(units: Mapping[str, int]) -> Shape:
    *names, last = units
    return {
        "description": f"A number with {', '.join(names)} or {last}.",
        "anyOf": [
            {"const": 0},
            {"type": "string", "pattern": rf"^[0-9]{{1,18}}(?:\.[0-9]{{1,18}})?(?:{'|'.join(units)})$"},
        ],
    }


def _section(section: str) -> dict[str, Any]:
    keys = KEYS[section]
    required = [name for name, key in keys.items() if key.required]
    return {
        "type": "object",
        "additionalProperties": False,
        **({"required": required} if required else {}),
        "properties": {name: _key(section, name, key) for name, key in keys.items()},
        **SHAPES_OF_SECTIONS.get(section, {}),
    }


def _key(section: str, name: str, key: Key) -> dict[str, Any]:
    shape = SHAPES_OF_KEYS.get((section, name)) or SHAPES[key.read]
    section_of = str(shape.get("$ref")).removeprefix("#/$defs/")
    is_alone = section_of in KEYS or shape.get("type") in ("array", "object")
    otherwise: Shape = REFERENCE if key.required else {"type": "null"} if is_alone or key.blank else LEFT_OUT
    alternatives = shape["anyOf"] if [*shape] == ["anyOf"] else [shape]
    return {
        "description": ABOUT[section][name],
        **_default(section, name, key, shape),
        "anyOf": [*alternatives, otherwise],
    }


def _default(section: str, name: str, key: Key, shape: Shape) -> dict[str, Any]:
    """The default of a key, as a profile says it; nothing where that is to leave it out."""
    if told := TEXTS_OF_DEFAULTS.get((section, name)):
        return {"default": told}
    found = {one.name: one.default for one in fields(FILLED_BY[section]) if one.init}
    value = found.get(key.field)
    choices = [shape, *shape.get("anyOf", ())]
    words = [word for one in choices for word in one.get("enum", ())]
    if value == model.AUTO_NS and "auto" in words:
        return {"default": "auto"}
    if value is None and False in words and not key.blank:
        return {"default": "off"}
    if isinstance(value, tuple):
        return {"default": [*value]} if value else {}
    for unit, units in ((DURATION, DURATION_UNITS), (SIZE, SIZE_UNITS)):
        if unit in choices and type(value) is int:
            return {"default": _told(value, units)}
    return {"default": value} if isinstance(value, (bool, int, float, str)) and value != "" else {}


def _told(value: int, units: Mapping[str, int]) -> str:
    """A number with the largest unit of which it is a whole number; 0 with that of the examples."""
    if not value:
        return "0B" if "B" in units else "0s"
    name, unit = max((one for one in units.items() if value % one[1] == 0), key=lambda one: one[1])
    return f"{value // unit}{name}"


ABOUT: Mapping[str, Mapping[str, str]] = {
    "": {
        "service": "Name of the service in every export. Left out: OTEL_SERVICE_NAME, else unknown_service.",
        "preset": (
            "The preset that this profile refines: what a service, or a training loop, usually records. Left out: none."
        ),
        "tracer_option": "How deep the events summary goes.",
        "state": "Whose time counts: the host's, the device's, or both.",
        "clock": (
            "What spans are timed with: CLOCK_MONOTONIC, or the processor's time stamp counter where it is sound."
        ),
        "budget": (
            "Share of each thread's time that the instrumentation may cost. Beyond it the sites that cost most "
            "and tell least are muted, counted and named; those whose counting is too much are taken off. Scopes "
            "cannot be taken off, and requests are never muted: they are named where they are over it. Left out: "
            "no limit."
        ),
        "functions": "Functions to instrument.",
        "layers": "Layers of the model to instrument.",
        "copies": "Memory copies to instrument.",
        "loaders": "Data loaders to instrument: those of the frameworks that the host imports, or none.",
        "phases": "What a training loop does with torch: forward, backward and optimizer, or none of it.",
        "comm": "Communication to instrument: collectives and point-to-point of torch.distributed, or none.",
        "frameworks": (
            "Frameworks whose own entry points are instrumented: auto for all that the service imports, or a "
            "list. Left out: none."
        ),
        "requests": (
            "Requests over HTTP and gRPC, by endpoint, without a rule for any: auto, a mapping that says more, or none."
        ),
        "startup": "Imports are timed, and what loads and compiles models is instrumented, or not.",
        "schedule": "Which steps are recorded. Left out: always on.",
        "capture": "Which requests are kept in full.",
        "limits": "What the instrumentation may use at most.",
        "device": "What is asked of the device.",
        "agent": (
            "The process that `instrument run` starts beside the service, which holds what all processes of the "
            "run record: one for each run, or none."
        ),
        "control": "How a running process learns of a changed profile; neither way unless it is asked for.",
        "export": "The ways out; one that is left out is off.",
    },
    "functions": {
        "match": (
            "Patterns module:qualname; * within a segment, ** as a segment across them, ! in front takes out; + "
            "after a method's name takes its overrides in subclasses, too."
        ),
        "name": (
            "Name of the spans; {module}, {qualname}, {class} and {function} are filled in. Left out: the "
            "function's own."
        ),
        "kind": "Kind of the spans. Left out: op, or phase where one is declared.",
        "phase": (
            "What part of the work it is, one of these or a name of your own; makes the kind phase where none is given."
        ),
        "device": "Also time what the call puts on the device.",
        "first_request": "Whether the view startup takes the first of its calls for the first request.",
        "metrics": "Whether the duration of its calls is a metric, instrument.call.duration.",
        "gen_ai": (
            "Whether it is a generator whose items are the tokens that a model generates: "
            "gen_ai.server.time_to_first_token and time_per_output_token are metrics of it."
        ),
        "where": "Which calls are worth a span of their own. The summary counts all.",
        "attributes": "What is recorded of the arguments, as attributes of the span: one or a list.",
        "key": "Where a call says which request its span serves: a parameter or return, or a path below it.",
        "batch": (
            "Where a call says which requests its span serves: of a mapping the keys, with weights where it holds "
            "numbers."
        ),
    },
    "functions.key": {
        "argument": "Where the key is, such as request.request_id.",
        "cut": "A regular expression: what it finds in a key is taken out of it.",
    },
    "functions.batch": {
        "argument": "Where the keys are, such as requests[].request_id.",
        "weights": "Where it says how much of the span each request takes, such as requests[].num_tokens.",
        "cut": "A regular expression: what it finds in a key is taken out of it.",
    },
    "functions.where": {
        "min_duration": "The shortest call without calls of its own that is kept in timelines, such as 50us.",
    },
    "functions.attributes": {
        "argument": "A parameter's name, or a dotted path below it such as request.prompt.",
        "record": "Its size (len), the name of its class, or its value (at most 256 characters).",
        "name": "Name of the attribute. Left out: the argument's, with .size or .type behind it.",
    },
    "layers": {
        "match": "Paths in the module tree; * within a segment, ** as a segment across them, ! in front takes out.",
        "type": "Class names; with match, both must hold.",
        "name": "Name of the spans. Left out: the class name.",
        "device": "Also time what the layer puts on the device.",
    },
    "copies": {
        "directions": (
            "Host to device, device to host, within a device, between devices; and host to host, which is seen "
            "only where it is named."
        ),
        "min_bytes": "The smallest copy that is recorded, such as 64KiB.",
        "frameworks": "Whose copies, by package; cuda is cuda-python.",
    },
    "frameworks": {
        "name": "The framework's module.",
        "nodes": "onnxruntime alone: time each node too; runs become several times slower.",
    },
    "requests": {
        "servers": f"Whose requests: {', '.join(f'{name} ({whose})' for name, whose in model.SERVERS.items())}.",
        "ignore": "Paths whose requests are not recorded, such as /health, or /internal/* for all that begin so.",
        "name": "What a request's span is called, {method} and {route} filled in; without a route the method alone.",
        "attributes": "What of the caller's request is recorded, by OpenTelemetry's names. Left out: nothing.",
        "traceparent": (
            "The caller's trace: the request is part of it (follow), is linked to it (link), or knows nothing of "
            "it (off)."
        ),
        "gen_ai": (
            "Routes whose streamed answers are generated, an item a token, such as /v1/completions, or /v1/* for "
            "all that begin so."
        ),
    },
    "schedule": {
        "skip_first": "Steps skipped once, at the start.",
        "closed": "Steps of each round that are not recorded.",
        "ready": "Steps of each round that warm up and are dropped.",
        "record": "Steps of each round that are recorded.",
        "repeat": "How many rounds; 0: for ever.",
        "step": "The function, as module:qualname, of which each call is a step. Left out: each request is one.",
    },
    "capture": {
        "sample": "Share of all requests, from 0 to 1.",
        "slow": (
            "Keep every request that takes longer: than a time such as 250ms, or than a percentile of its own "
            "endpoint's, such as p99*1.5."
        ),
        "errors": "Keep every request that fails.",
        "where": "Keep every request whose own span ends with all of these attributes.",
        "limit": "How many requests are kept at most, such as 30/min. Left out: no limit.",
        "before": "How much of the past to keep with a request, such as 2s.",
    },
    "limits": {
        "ring": "Memory of the rings, at least 64KiB.",
        "ring_dir": (
            "The folder in which each process has its recording in a file, which stays when it is killed, or off."
        ),
        "spans_per_request": "Spans kept of one request.",
        "disk": "Disk for captures and traces.",
        "blocked": (
            "With requests: a callback that keeps an event loop from open requests for longer is recorded, from "
            "100us; off: none is."
        ),
    },
    "device": {
        "cuda": "Device time by CUDA events, where there is a device.",
        "gil": "Whether a thread of the service keeps the interpreter's lock while it records an event.",
        "nvml": (
            "How often the gauges of GPUs are read, at least every 10ms; auto: every second where there is an "
            "NVIDIA driver."
        ),
        "host": (
            "How often processor time and memory of process and machine are read, at least every 10ms, and every "
            "10s what torch's allocator holds; auto: whenever GPUs are."
        ),
    },
    "control": {
        "watch": "Whether the profile's file is looked at every 100 ms and followed when it changes.",
        "socket": (
            "The folder in which each process listens on <pid>.sock for `instrument reload`, or auto for the "
            "user's own, or off."
        ),
    },
    "export": {
        "recording": "Recordings, one file a window, for report and numpy; off takes away what a preset has.",
        "chrome": "Chrome traces for Perfetto, one file a window; off takes away what a preset has.",
        "otlp": "Spans to an OpenTelemetry collector; off takes away what a preset has.",
        "summary": "Text reports; off takes away what a preset has.",
    },
    "export.recording": {
        "path": "Path of the files, which ends in .npz; {service}, {run}, {pid} and {window} are filled in.",
    },
    "export.chrome": {
        "path": "Path of the files; {service}, {run}, {pid} and {window} are filled in.",
    },
    "export.otlp": {
        "endpoint": "URL of the collector; /v1/traces is added where there is no path. Empty text: off.",
        "protocol": "How spans are sent.",
        "headers": "Headers of every request to the collector, such as an authorization.",
        "timeout": "Time for one delivery with all its tries, at least 1ms.",
        "compression": "How the bodies are packed.",
        "certificate": "File of the certificates that a collector at https:// is trusted by.",
        "client_certificate": "File of the certificate by which a collector trusts this service.",
        "client_key": "File of the key of that certificate.",
    },
    "export.summary": {
        "to": "stderr, stdout, or a file's path with a / or . in it; {service} and {pid} are filled in.",
        "views": (
            "Which reports, in this order: brief is one screen; events, classes, ops and instances of all calls, "
            "the others of the spans that are still held."
        ),
        "sorted_by": (
            "Which column sorts the rows, largest first (cpu_min and gpu_min: least first); default is the order "
            "of the view."
        ),
        "rows": "How many rows to show. Left out: all.",
        "least": "Rows with less time than this, such as 50us, are one row together.",
        "unit": "Unit of times in the tables.",
        "per_thread": "One table a thread instead of one for all.",
        "corrected": "Whether self times are shown without what the probes of the calls below cost.",
        "skip_first": "Iterations left out of averages over iterations, at the start.",
    },
}
"""What each key means, by section."""


def text() -> str:
    """The file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{FILE}\n")
