"""The readers of single values of `profile.yaml`, such as durations and patterns, and of `OTEL_*` variables.

A reader returns the value of a YAML node. It refuses an invalid node, and reports the allowed values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from instrument.profile import model
from instrument.profile.document import (
    Document,
    Read,
    Shape,
    YamlNode,
    clip_text,
    find_most_similar,
    list_or_item,
    make_choice_reader,
    make_text_schema,
    read_string,
    reader_or_off,
    text_reader,
    with_schema,
)
from instrument.profile.model import COMPRESSIONS, PROTOCOLS, Capture, PercentileThreshold, Profile, Rate, Where
from instrument.runtime.environment import measure_usable_memory_bytes
from instrument.runtime.lazy_imports import late_pattern, replace

DURATION_UNITS: Mapping[str, int] = {
    "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9,
}  # fmt: skip
SIZE_UNITS: Mapping[str, int] = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
DURATION: Shape = {"$ref": "#/$defs/duration"}
SIZE: Shape = {"$ref": "#/$defs/size"}
MOST_PORT = 65_535
RATE_UNITS: Mapping[str, int] = {"s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}

PERCENTS = r"(?=[0-9.]*[1-9])(?:100(?:\.0{1,18})?|0{0,2}[0-9]{1,2}(?:\.[0-9]{1,18})?)%"
"""The regular expression of a percentage above 0% and up to 100%."""
_SEGMENT = r"(?:\*\*?|\*?\w+(?:\*\w+)*\*?)"
_LAYER_SEGMENT = _SEGMENT.replace(r"\w", r"[\w-]")
NAME_SYNTAX = r"\w+(?:\.\w+)*:\w+(?:\.\w+)*"
FUNCTION_SYNTAX = rf"!?{_SEGMENT}(?:\.{_SEGMENT})*:{_SEGMENT}(?:\.{_SEGMENT})*|{NAME_SYNTAX}\+"
LAYER_SYNTAX = rf"!?{_LAYER_SEGMENT}(?:\.{_LAYER_SEGMENT})*"
KEYS_SYNTAX = r"[^\W\d]\w*(?:\.[^\W\d]\w*|\[\])*"
ARGUMENT_SYNTAX = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
CLASS_SYNTAX = r"[^\W\d]\w*"
CHROME_SYNTAX = r"(?:[^{}]|\{(?:service|run|pid|window)\})+"
RECORDING_SYNTAX = rf"{CHROME_SYNTAX}\.npz"
SUMMARY_SYNTAX = rf"stderr|stdout|(?=[\s\S]*[./\\]){CHROME_SYNTAX}"
PATH_SYNTAX = r"/[^\s*?#]*\*?"
REQUEST_NAME_SYNTAX = r"(?=.*\{(?:method|route)\})(?:[^{}]|\{(?:method|route)\})+"
REQUEST_ATTRIBUTE_SYNTAX = (
    r"http\.request\.header\.[a-z0-9-]+|url\.path|url\.query|client\.address|user_agent\.original"
)
FOLDER_SYNTAX = r"(?=[^{}]*/)[^{}]{1,1000}"
URL_SYNTAX = r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?][^\s#]*)?"
ADDRESS_SYNTAX = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"
USUAL_SYNTAX = r"p([1-9][0-9]?(?:\.[0-9]{1,3})?)\*([1-9][0-9]{0,2}(?:\.[0-9]{1,3})?)"
COMPARED_SYNTAX = r"([<>]=?) ?([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?)"
WHERE_SYNTAX = rf"{COMPARED_SYNTAX}|[^<>][\s\S]*"
ATTRIBUTE_SYNTAX = r"\S(?:[\s\S]{0,254}\S)?"
RATE_SYNTAX = r"([1-9][0-9]{0,8})/(s|min|h)"
HEADER_NAME_SYNTAX = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
HEADER_VALUE_SYNTAX = r"[\t -~]*"
_DECIMAL = late_pattern(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@with_schema({"type": "number", "minimum": 0, "maximum": 1})
def read_share(node: YamlNode) -> float:
    # Plain text too: YAML 1.1 takes 1e-3 for text.
    number = node.kind in ("int", "float") or (node.kind == "text" and node.plain)
    if not number or not _DECIMAL.fullmatch(node.text) or not 0 <= float(node.text) <= 1:
        node.refuse("a number from 0 to 1")
    return float(node.text)


@with_schema({"type": "string"})
def read_regex(node: YamlNode) -> str:
    text: str = read_string(node)
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as problem:
        node.refuse(f"a regular expression, and this is none: {problem}")
    return text


# At most 18 digits a side, as for other quantities: more mean a mistake.
_percent = text_reader(PERCENTS, "a percentage above 0%, up to 100%, such as 1%", lambda text: f"{text}%")


@with_schema(make_text_schema(PERCENTS))
def read_percent(node: YamlNode) -> float:
    return float(_percent(node)[:-1]) / 100


SMALL = 1024
"""From this number on, the message about a missing unit suggests bytes."""

_QUANTITY = late_pattern(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?([A-Za-z]+)")
_MEASURED = late_pattern(r"\s*([0-9.]+)\s*([^\W\d]*)\s*")


def parse_amount(text: str, units: Mapping[str, int]) -> int | None:
    """Parse a number with a unit into the smallest unit, rounded down. Return None for other text."""
    parts = _QUANTITY.fullmatch(text)
    if not parts or parts[3] not in units:
        return None
    fraction = parts[2] or ""
    return int(parts[1] + fraction) * units[parts[3]] // int("1" + "0" * len(fraction))


def make_quantity_reader(units: Mapping[str, int], example: str, least: str, also: str = "") -> Read:
    """Return a reader of a number with a unit, such as 64MiB, or of 0. The reader returns the amount in the smallest
    unit. `also` describes other allowed values in messages."""
    bound = f", from {least}" if least else ""
    allowed = f"{also}a number with a unit ({' '.join(units)}), such as {example}{bound}"
    floor = parse_amount(least, units) or 0
    unit = example.lstrip("0123456789")

    def suggest_quantity(text: str) -> str:
        parts = _MEASURED.fullmatch(text)
        if not parts:
            return ""
        # A bare number that is large is one of bytes, a small one has the unit of the example.
        bare = "B" if "B" in units and parts[1].isdecimal() and int(parts[1]) >= SMALL else unit
        near = parts[1] + (find_most_similar(parts[2], units, 0.5) if parts[2] else bare)
        return near if near != text and max(floor, 1) <= (parse_amount(near, units) or 0) < 2**63 else ""

    def read(node: YamlNode) -> int:
        bare_zero = node.kind == "int" and node.text == "0"
        value = 0 if bare_zero else parse_amount(node.text, units) if node.kind == "text" else None
        if value is None or not floor <= value < 2**63:
            node.refuse(allowed, near=suggest_quantity(node.text))
        return value

    return read


def make_duration_reader(example: str, least: str = "") -> Read:
    return with_schema(DURATION)(make_quantity_reader(DURATION_UNITS, example, least))


def make_size_reader(example: str, least: str = "") -> Read:
    return with_schema(SIZE)(make_quantity_reader(SIZE_UNITS, example, least))


_read_ring = make_size_reader("64MiB", least="64KiB")


@with_schema(SIZE)
def read_ring_size(node: YamlNode) -> int:
    """Read the size of the rings. A size above the process's memory is refused."""
    size_bytes: int = _read_ring(node)
    memory = measure_usable_memory_bytes()
    if memory is not None and size_bytes > memory:
        gib = max(memory / 2**30, 0.01)
        node.refuse(f"at most the memory that this machine has for the process, {gib:.2f} GiB")
    return size_bytes


_read_interval = make_quantity_reader(DURATION_UNITS, "1s", "10ms", also="auto, off, or ")


@with_schema({"anyOf": [DURATION, {"enum": ["auto", "off", False]}]})
def read_gauge_interval(node: YamlNode) -> int | None:
    """Read the interval of gauges in ns: `AUTO_NS` for auto, None for off."""
    if node.is_off:
        return None
    return model.AUTO_NS if node.kind == "text" and node.text == "auto" else _read_interval(node)


duration_or_off = reader_or_off(
    with_schema(DURATION)(make_quantity_reader(DURATION_UNITS, "5ms", "100us", also="off, or "))
)


def _as_rule_pattern(text: str) -> str:
    """Convert a dotted path to a rule's pattern, such as `chat.engine:Engine.step`. A capital letter marks the
    class."""
    segments = text.split(".")
    split = next((index for index, segment in enumerate(segments) if segment[:1].isupper()), len(segments) - 1)
    return ".".join(segments[:split]) + ":" + ".".join(segments[split:])


def _correct_field_names(text: str) -> str:
    return re.sub(
        r"\{(\w+)\}", lambda part: "{" + find_most_similar(part[1], ("service", "run", "pid", "window")) + "}", text
    )


_WILDCARDS = "no empty segment; * matches any part of a segment, ** alone any number of segments"
function_pattern = text_reader(
    FUNCTION_SYNTAX,
    f"module:qualname with one ':' and {_WILDCARDS}; + after the name of a method for its overrides in subclasses, too",
    _as_rule_pattern,
)
function_name = text_reader(NAME_SYNTAX, "module:qualname of one function, such as train:step", _as_rule_pattern)
layer_pattern = text_reader(LAYER_SYNTAX, f"a dotted path such as model.layers.*.mlp, {_WILDCARDS}")
class_name = text_reader(
    CLASS_SYNTAX, "a class name without its module, such as Linear", lambda text: text.rpartition(".")[2]
)
key_path = text_reader(
    ARGUMENT_SYNTAX,
    "a parameter's name or return, or a path below it such as request.request_id; several keys at once are a `batch`",
)
keys_path = text_reader(
    KEYS_SYNTAX, "a parameter's name or return, or a path below it such as request.request_id or batch.requests[].id"
)
argument_path = text_reader(ARGUMENT_SYNTAX, "a parameter's name, or a dotted path below it such as request.prompt")
chrome_path = text_reader(
    CHROME_SYNTAX, "a path, in braces only {service}, {run}, {pid} and {window}", _correct_field_names
)
recording_path = text_reader(
    RECORDING_SYNTAX,
    "a path that ends in .npz, in braces only {service}, {run}, {pid} and {window}",
    lambda text: f"{re.sub(r'(?:[.](?:json|gz|npz))*$', '', _correct_field_names(text))}.npz",
)
path_pattern = text_reader(
    PATH_SYNTAX, "a path such as /health, or /internal/* for all that begin so", lambda text: f"/{text}"
)
request_name = text_reader(
    REQUEST_NAME_SYNTAX, "text with {method} or {route} in it, and no other braces", lambda _: "{method} {route}"
)
request_attribute = text_reader(
    REQUEST_ATTRIBUTE_SYNTAX,
    "http.request.header.<name in small letters>, url.path, url.query, client.address or user_agent.original",
    lambda text: f"http.request.header.{text.lower()}",
)
_timing_header = text_reader(
    rf"header {HEADER_NAME_SYNTAX}", "true, off, or `header NAME`", lambda text: f"header {text.split()[-1]}"
)


@with_schema({"anyOf": [{"type": "boolean"}, {"enum": ["off"]}, make_text_schema(rf"header {HEADER_NAME_SYNTAX}")]})
def read_server_timing(node: YamlNode) -> str:
    """Read which answers have timings: "true" for all, "header NAME" for requests with this header, "" for none."""
    if node.is_off:
        return ""
    return "true" if node.kind == "bool" else str(_timing_header(node))


attribute_name = text_reader(ATTRIBUTE_SYNTAX, "the name of an attribute, of at most 256 characters")
number_name = text_reader(r"[!-~]{1,64}", "a name of at most 64 printable characters without spaces")
folder_path = text_reader(
    FOLDER_SYNTAX, "a folder, with a '/' in it, at most 1000 characters and no braces", lambda text: f"{text}/"
)
dataset_path = text_reader(
    rf"(?:s3|gs|gcs|hdfs|viewfs|abfss?)://[^/{{}}][^{{}}]{{0,999}}|(?![\w.+-]*://){FOLDER_SYNTAX}",
    "a folder, with a '/' in it, or a URL such as s3://bucket/traces; at most 1000 characters and no braces",
    lambda text: "s3://bucket/traces" if "://" in text else f"{text}/",
)
ring_folder_or_off = reader_or_off(
    text_reader(
        rf"off|{FOLDER_SYNTAX}",
        "off, or a folder, with a '/' in it, at most 1000 characters and no braces",
        lambda text: find_most_similar(text, ("off",)),
    )
)
summary_target = text_reader(
    SUMMARY_SYNTAX,
    "stderr, stdout, or a path as for chrome, with a '/' or '.' in it",
    lambda text: find_most_similar(text, ("stderr", "stdout")),
)


@with_schema({"$ref": "#/$defs/rate"})
def read_rate(node: YamlNode) -> Rate:
    parts = re.fullmatch(RATE_SYNTAX, node.text) if node.kind == "text" else None
    if not parts:
        near = f"{node.text}/min" if node.kind == "int" else ""
        allowed = "a count a second, minute or hour, such as 5/s, 30/min, 100/h"
        node.refuse(allowed, near=near if re.fullmatch(RATE_SYNTAX, near) else "")
    return Rate(int(parts[1]), RATE_UNITS[parts[2]])


_read_slow = make_quantity_reader(
    DURATION_UNITS, "250ms", "", also="a percentile of the endpoint's own such as p99*1.5, or "
)


@with_schema({"anyOf": [DURATION, {"$ref": "#/$defs/usual"}]})
def read_slow_limit(node: YamlNode) -> int | PercentileThreshold:
    text = node.text if node.kind == "text" else ""
    parts = re.fullmatch(USUAL_SYNTAX, text)
    if parts:
        return PercentileThreshold(round(float(parts[1]) / 100, 6), float(parts[2]))
    suggestion = re.fullmatch(USUAL_SYNTAX, re.sub(r"[ %]", "", text.lower()).replace("x", "*"))
    if suggestion:
        node.refuse("a percentile of the endpoint's own such as p99*1.5", near=suggestion[0])
    slow_ns: int = _read_slow(node)
    return slow_ns


def make_capture(**values: Any) -> Capture:
    slow = values.pop("slow", None)
    return Capture(**values, **{"slow_over" if isinstance(slow, PercentileThreshold) else "slow_ns": slow})


_COMPARED_SHAPES = [{"type": "number"}, {"type": "boolean"}, {"$ref": "#/$defs/compared"}]
_COMPARED = "text, a number, true or false, a comparison such as '>=500', or a list of them"


@with_schema({"anyOf": _COMPARED_SHAPES})
def _read_comparison(node: YamlNode) -> tuple[str, str | bool | int | float]:
    if node.kind == "bool":
        if node.text.lower() not in ("true", "false"):
            node.refuse("true or false; put text in quotes", near=f'"{node.text}"')
        return "=", node.text.lower() == "true"
    if node.kind in ("int", "float") and _DECIMAL.fullmatch(node.text):
        return "=", _parse_number(node.text)
    if node.kind != "text" or not re.fullmatch(WHERE_SYNTAX, node.text):
        node.refuse(_COMPARED)
    parts = re.fullmatch(COMPARED_SYNTAX, node.text)
    return (parts[1], _parse_number(parts[2])) if parts else ("=", node.text)


def _parse_number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else float(text)


_read_compared = list_or_item(_read_comparison)


def _make_mapping_schema(names: str, *values: Shape) -> Shape:
    items: Shape = {"anyOf": [*values, {"$ref": "#/$defs/left_out"}]}
    return {"type": "object", "propertyNames": {"pattern": f"^(?:{names})$"}, "additionalProperties": items}


_COMPARED_LIST = {"type": "array", "items": {"anyOf": _COMPARED_SHAPES}, "minItems": 1}


@with_schema(_make_mapping_schema(ATTRIBUTE_SYNTAX, *_COMPARED_SHAPES, _COMPARED_LIST))
def read_conditions(node: YamlNode) -> tuple[Where, ...]:
    if node.kind != "mapping":
        node.refuse("a mapping of attributes to what they must be, such as {tenant: x}")
    names = "an attribute's name of at most 256 characters"
    return tuple(Where(*pair) for pair in _read_pairs(node, ATTRIBUTE_SYNTAX, names, "name", _read_compared))


def _read_pairs(node: YamlNode, syntax: str, allowed: str, called: str, read: Read) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a mapping. Names must match `syntax`, and null values are skipped."""
    with node.document.refuse_incomplete_node():
        for name, (key, value) in node.pairs.items():
            if not re.fullmatch(syntax, name):
                key.note_problem(allowed, actual=f"the {called} {clip_text(name)!r}")
            elif value.kind != "null":
                yield name, value.attempt_read(read)


@with_schema(make_text_schema(f"(?:{URL_SYNTAX})?"))
def read_url(node: YamlNode) -> str:
    """Read a collector's URL. Empty text, as from an unset variable, means no URL."""
    if node.kind == "text" and not node.text:
        return ""
    allowed = "http://host:port or https://host:port, with or without a path, credentials only in headers"
    text = str(text_reader(URL_SYNTAX, allowed, lambda text: f"http://{text}")(node))
    try:
        _ = urlsplit(text).port
    except ValueError as error:
        node.refuse(allowed, actual=f"{node.message_text} ({error})")
    return text


@with_schema(make_text_schema(ADDRESS_SYNTAX))
def read_address(node: YamlNode) -> str:
    allowed = "host:port, such as 127.0.0.1:9464, 0.0.0.0:9464 or [::1]:9464"
    text: str = text_reader(ADDRESS_SYNTAX, allowed, lambda text: f"127.0.0.1:{text.removeprefix(':')}")(node)
    if int(text.rpartition(":")[2]) > MOST_PORT:
        node.refuse(f"{allowed}, the port at most {MOST_PORT}")
    return text


@with_schema({"type": "string", "minLength": 1})
def read_file_path(node: YamlNode) -> str:
    path = read_string(node)
    if not os.access(path, os.R_OK) or not Path(path).is_file():
        node.refuse("the path of a file that is there and that this process may read")
    return path


def read_timeout_seconds(node: YamlNode) -> int:
    """Read a timeout variable in seconds, the unit of OpenTelemetry's Python SDK. Return nanoseconds."""
    if not _DECIMAL.fullmatch(node.text) or not 0.001 <= float(node.text) < 2**33:
        node.refuse("a number of seconds, from 0.001")
    return int(float(node.text) * 10**9)


@with_schema(_make_mapping_schema(HEADER_NAME_SYNTAX, make_text_schema(HEADER_VALUE_SYNTAX)))
def read_headers(node: YamlNode) -> tuple[tuple[str, str], ...]:
    if node.kind != "mapping":
        node.refuse("a mapping of header names to texts", actual="no mapping (not shown)")
    names = "letters, digits and !#$%&'*+.^_`|~-"
    return tuple(_read_pairs(node, HEADER_NAME_SYNTAX, names, "header name", _header_value))


def _header_value(node: YamlNode) -> str:
    # Header values are usually secrets: no message shows one.
    if node.kind != "text":
        node.refuse("text; put the value in quotes", actual="a value that is no text (not shown)")
    if not re.fullmatch(HEADER_VALUE_SYNTAX, node.text):
        node.refuse("printable ASCII on one line", actual="a character that no header may hold")
    return node.text


def read_header_list(node: YamlNode) -> tuple[tuple[str, str], ...]:
    """Read headers from a variable: `name=value,name=value`, URL-encoded."""
    headers = []
    for part in filter(None, (part.strip() for part in node.text.split(","))):
        name, equals, value = (unquote(piece.strip()) for piece in part.partition("="))
        if not equals or not re.fullmatch(HEADER_NAME_SYNTAX, name) or not re.fullmatch(HEADER_VALUE_SYNTAX, value):
            node.refuse("name=value,name=value, URL-encoded", actual="a list of another form (not shown)")
        headers.append((name, value))
    return tuple(headers)


def public_texts(node: YamlNode, key: str) -> list[str]:
    """Return the distinct texts of a key, without secrets."""
    _, value = node.pairs.get(key, (node, node))
    return list(dict.fromkeys(text.public_text for text in value.items or (value,) if text.kind == "text"))


def split_patterns(patterns: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    match = tuple(pattern for pattern in patterns if not pattern.startswith("!"))
    return match, tuple(pattern[1:] for pattern in patterns if pattern.startswith("!"))


def traces_url(endpoint: str, *, prefix: bool) -> str:
    parts = urlsplit(endpoint)
    if parts.path.strip("/") and not prefix:
        return endpoint
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/v1/traces"))


def _otlp_variables(setting: str, read: Read) -> tuple[tuple[str, Read], ...]:
    return tuple((f"OTEL_EXPORTER_OTLP_{signal}{setting}", read) for signal in ("TRACES_", ""))


SERVICE = "INSTRUMENT_SERVICE"
"""The environment variable with the default service name of `instrument run`."""

VARIABLES: Mapping[str, tuple[tuple[str, Read], ...]] = {
    "service": (("OTEL_SERVICE_NAME", read_string), (SERVICE, read_string)),
    "export.otlp.endpoint": _otlp_variables("ENDPOINT", read_url),
    "export.otlp.protocol": _otlp_variables("PROTOCOL", make_choice_reader(*PROTOCOLS)),
    "export.otlp.headers": _otlp_variables("HEADERS", read_header_list),
    "export.otlp.timeout": _otlp_variables("TIMEOUT", read_timeout_seconds),
    "export.otlp.compression": _otlp_variables("COMPRESSION", make_choice_reader(*COMPRESSIONS)),
    "export.otlp.certificate": _otlp_variables("CERTIFICATE", read_file_path),
    "export.otlp.client_certificate": _otlp_variables("CLIENT_CERTIFICATE", read_file_path),
    "export.otlp.client_key": _otlp_variables("CLIENT_KEY", read_file_path),
}
"""The environment variables for settings that a profile may omit. The first valid variable counts."""

FOLLOWED: Mapping[str, tuple[str, str]] = {
    "OTEL_SDK_DISABLED": ("OpenTelemetry disabled", "true|false"),
    "OTEL_TRACES_EXPORTER": ("traces exporter", "otlp|none"),
    "OTEL_TRACES_SAMPLER": ("traces sampler", "always_off"),
    "OTEL_METRICS_EXPORTER": ("metrics exporter", "otlp|none"),
    "OTEL_LOGS_EXPORTER": ("logs exporter", "none"),
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": ("metrics temporality", "cumulative|delta|lowmemory"),
    "OTEL_RESOURCE_ATTRIBUTES": ("resource attributes", r"(?:\s*[^=,\s][^=,]*=[^,]*(?:,|$))*"),
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": ("resource detectors", ".*"),
    "OTEL_PROPAGATORS": ("propagators", ".*"),
}
"""Further OpenTelemetry variables that the export honours, each with a name and a pattern of honoured values."""

_OF_ITS_SDK = "OTEL_PYTHON_"
"""The prefix of variables that only OpenTelemetry's Python SDK and instrumentations read."""

_DISABLED = ("OTEL_SDK_DISABLED", "true")
_SWITCHES = {
    "traces": (("OTEL_TRACES_SAMPLER", "always_off"), ("OTEL_TRACES_EXPORTER", "none"), _DISABLED),
    "metrics": (("OTEL_METRICS_EXPORTER", "none"), _DISABLED),
}
"""The variables that can switch off traces or metrics, each with the value that does so."""


def _switched_off_signals(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return `NAME=value` of the variable that switches off traces or metrics, by signal."""
    return {
        signal: f"{name}={value}"
        for signal, switches in _SWITCHES.items()
        for name, value in switches
        if environ.get(name, "").strip().lower() == value
    }


def drop_switched_off_exports(profile: Profile, document: Document) -> Profile:
    """Return a profile without the exports that environment variables switch off."""
    remarks, environ = document.remarks, document.environ
    if profile.export.otlp is not None:
        remarks = [*remarks, *_describe_variables(environ)]
        off = _switched_off_signals(environ)
        if len(off) == len(_SWITCHES):
            profile = replace(profile, export=replace(profile.export, otlp=None))
        elif "traces" in off:
            profile = replace(profile, capture=Capture(sample=0.0, errors=False, is_off=True))
    return replace(profile, remarks=tuple(dict.fromkeys(remarks)))


def _describe_variables(environ: Mapping[str, str]) -> Iterator[str]:
    for signal, switch in _switched_off_signals(environ).items():
        yield f"no {signal} are sent to a collector: {switch}"
    valid = {name for names in VARIABLES.values() for name, _ in names}
    variables = [
        (name, value.strip().lower()) for name, value in sorted(environ.items()) if value and name not in valid
    ]
    missed = [name for name, value in variables if name.startswith("OTEL_") and not _is_variable_supported(name, value)]
    if missed:
        yield f"set without an effect: {', '.join(missed)}"


def _is_variable_supported(name: str, value: str) -> bool:
    _, followed = FOLLOWED.get(name, ("", "(?!)"))
    return name.startswith(_OF_ITS_SDK) or re.fullmatch(followed, value) is not None
