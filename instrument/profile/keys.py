"""The schema of `profile.yaml`: every key, how it is read, and which variable stands in for one that is left out.

`load` and `loads` give a frozen `Profile` or raise one `ProfileError` that holds every mistake of the file, each as
``file:line:column: where: found ...; allowed: ...``. `configs/everything.yaml` shows and explains every key;
`profile.schema.json`, beside this file, lets editors complete them. `KEYS` is the table that drives the reading.

A key whose value is null counts as left out (for an export: on, with its defaults). Values may hold references to
variables, as `document` tells. What the profile leaves out comes from the `OTEL_*` variable of `VARIABLES`, then from
the default; `Profile.origins` says which it was. `presets` tells what a preset gives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from instrument.errors import ProfileError
from instrument.profile.document import (
    Document,
    Node,
    Read,
    clip,
    each,
    flag,
    nearest,
    one_of,
    one_or_more,
    quantity,
    spelled,
    string,
    whole,
)
from instrument.profile.kinds import KINDS
from instrument.profile.model import (
    AUTO_NS,
    CLOCKS,
    COMPRESSIONS,
    COPY_FRAMEWORKS,
    DIRECTIONS,
    FRAMEWORKS,
    PROTOCOLS,
    RECORDED,
    SERVERS,
    SORT_KEYS,
    STATES,
    TIME_UNITS,
    TRACEPARENT,
    TRACER_OPTIONS,
    VIEWS,
    Argument,
    Capture,
    Chrome,
    Control,
    CopyRule,
    Device,
    Export,
    FrameworkRule,
    FunctionRule,
    LayerRule,
    Limits,
    Otlp,
    Profile,
    Rate,
    Recordings,
    RequestKeys,
    RequestsRule,
    Schedule,
    Summary,
    Usual,
    Where,
)
from instrument.profile.presets import PRESETS, named_by, refined
from instrument.runtime.control_groups import memory_bytes
from instrument.runtime.environment import settings

DURATION_UNITS: Mapping[str, int] = {
    "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9,
}  # fmt: skip
SIZE_UNITS: Mapping[str, int] = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
RATE_UNITS: Mapping[str, int] = {"s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}

FILE_BYTES = 2**20
"""The largest file that is read."""


def load(path: str | os.PathLike[str], *, environ: Mapping[str, str] | None = None) -> Profile:
    """Read a profile from a file. `environ` stands in for `os.environ`.

    The file of a preset is read as a profile that names it and says no more.
    Raises `ProfileError` with every mistake of the file, or with the reason why it cannot be read.
    """
    given: object = path
    if not isinstance(given, (str, os.PathLike)):
        raise ProfileError(
            [f"profile: found {given!r:.60}; allowed: a Profile, or the path of a file as str or PathLike"]
        )
    name = os.fspath(path)
    if preset := named_by(path):
        return loads(f"preset: {preset}", name=name, environ=environ)
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except FileNotFoundError as error:
        advice = f"create it or give another path (relative ones start at {Path.cwd()})"
        raise _unreadable(name, f"no such file; {advice}") from error
    except IsADirectoryError as error:
        raise _unreadable(name, "a directory; give the path of the file in it") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _unreadable(name, f"{reason}; give the path of a file that this process may read") from error
    if len(data) > FILE_BYTES:
        raise _unreadable(name, _TOO_LARGE)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        found = f"the byte 0x{data[error.start]:02x}, which is not UTF-8; allowed: text; save the file as UTF-8"
        raise ProfileError([f"{name}:{line}:{column}: encoding: found {found}"]) from error
    return loads(text, name=name, environ=environ)


def loads(text: str, *, name: str = "<profile>", environ: Mapping[str, str] | None = None) -> Profile:
    """Read a profile from text; `name` stands for the file in messages, `environ` stands in for `os.environ`.

    Raises `ProfileError` with every mistake of the text.
    """
    if len(text) > FILE_BYTES:
        raise _unreadable(name, _TOO_LARGE)
    document = Document(text, name=name, environ=settings() if environ is None else environ)
    given: dict[str, str] = {}

    def read(root: Node) -> dict[str, Any]:
        whole, of_preset = refined(root)
        given.update(of_preset)
        return _fields(whole, "")

    values = document.read(read)
    if document.problems:
        raise ProfileError(document.problems)
    origins = {**document.origins, **dict.fromkeys(given, "preset")}
    profile = Profile(**values, source=name, origins=origins, told={**document.told, **given})
    schedule = profile.schedule
    if schedule is None or schedule.step is None:
        return profile
    # The last rule, so that one of the file's own that names the function says how it is recorded.
    counted = FunctionRule((schedule.step,), kind="step", counted=True, text=f"schedule.step {schedule.step}")
    return replace(profile, functions=(*profile.functions, counted))


_TOO_LARGE = "more than 1 MiB; is this the right file?"


def _unreadable(name: str, found: str) -> ProfileError:
    return ProfileError([f"{name}: asked to read a profile, found {found}"])


PERCENT_SYNTAX = r"[0-9]{1,3}(?:\.[0-9]{1,18})?%"
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _share(node: Node) -> float:
    # Plain text too: YAML 1.1 takes 1e-3 for text.
    number = node.kind in ("int", "float") or (node.kind == "text" and node.plain)
    if not number or not _DECIMAL.fullmatch(node.text) or not 0 <= float(node.text) <= 1:
        node.refuse("a number from 0 to 1")
    return float(node.text)


def _percent(node: Node) -> float:
    # At most 18 digits a side, as for other quantities: more mean a mistake.
    text = spelled(PERCENT_SYNTAX, "a percentage above 0%, up to 100%, such as 1%", _with_percent)(node)
    share = float(text[:-1]) / 100
    if not 0 < share <= 1:
        node.refuse("a percentage above 0%, up to 100%, such as 1%")
    return share


def _with_percent(text: str) -> str:
    return text + "%"


def _duration(example: str, least: str = "") -> Read:
    return quantity(DURATION_UNITS, example, least)


def _size(example: str, least: str = "") -> Read:
    return quantity(SIZE_UNITS, example, least)


_read_ring = _size("64MiB", least="64KiB")


def _ring(node: Node) -> int:
    """The size of the rings, which this machine must have: they are written round and round, so all of it is used."""
    size_bytes: int = _read_ring(node)
    memory = memory_bytes()
    if memory is not None and size_bytes > memory:
        gib = max(memory / 2**30, 0.01)
        node.refuse(f"at most the memory that this machine has for the process, {gib:.2f} GiB")
    return size_bytes


_read_interval = quantity(DURATION_UNITS, "1s", "10ms", also="auto, off, or ")


def _interval(node: Node) -> int | None:
    """How often gauges are read, in ns."""
    if node.is_off:
        return None
    return AUTO_NS if node.kind == "text" and node.text == "auto" else _read_interval(node)


_read_blocked = quantity(DURATION_UNITS, "5ms", "100us", also="off, or ")


def _duration_or_off(node: Node) -> int | None:
    return None if node.is_off else _read_blocked(node)


def _folder_or_off(node: Node) -> str | None:
    return None if node.is_off else _socket_folder(node)


def _with_colon(text: str) -> str:
    """`chat.engine.Engine.step` as `chat.engine:Engine.step`; a class starts with a capital, as a rule."""
    segments = text.split(".")
    split = next((index for index, segment in enumerate(segments) if segment[:1].isupper()), len(segments) - 1)
    return ".".join(segments[:split]) + ":" + ".".join(segments[split:])


def _with_fields(text: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda part: "{" + nearest(part[1], ("service", "run", "pid", "window")) + "}", text)


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
SOCKET_SYNTAX = r"auto|off|(?=[^{}]*/)[^{}]{1,80}"
URL_SYNTAX = r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:[/?][^\s#]*)?"
USUAL_SYNTAX = r"p([1-9][0-9]?(?:\.[0-9]{1,3})?)\*([1-9][0-9]{0,2}(?:\.[0-9]{1,3})?)"
COMPARED_SYNTAX = r"([<>]=?) ?([+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?)"
WHERE_SYNTAX = rf"{COMPARED_SYNTAX}|[^<>][\s\S]*"
ATTRIBUTE_SYNTAX = r"\S(?:[\s\S]{0,254}\S)?"
RATE_SYNTAX = r"([1-9][0-9]{0,8})/(s|min|h)"
HEADER_NAME_SYNTAX = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
HEADER_VALUE_SYNTAX = r"[\t -~]*"

_WILDCARDS = "no empty segment; * stands for any part of a segment, ** alone for any number of segments"
_function_pattern = spelled(
    FUNCTION_SYNTAX,
    f"module:qualname with one ':' and {_WILDCARDS}; + after the name of a method for its overrides in subclasses, too",
    _with_colon,
)
_function_name = spelled(NAME_SYNTAX, "module:qualname of one function, such as train:step", _with_colon)
_layer_pattern = spelled(LAYER_SYNTAX, f"a dotted path such as model.layers.*.mlp, {_WILDCARDS}")
_class_name = spelled(
    CLASS_SYNTAX, "a class name without its module, such as Linear", lambda text: text.rpartition(".")[2]
)
_keys_path = spelled(
    KEYS_SYNTAX,
    "a parameter's name or return, or a path below it such as request.request_id or batch.requests[].id",
)
_argument_path = spelled(ARGUMENT_SYNTAX, "a parameter's name, or a dotted path below it such as request.prompt")
_chrome_path = spelled(CHROME_SYNTAX, "a path, in braces only {service}, {run}, {pid} and {window}", _with_fields)
_recording_path = spelled(
    RECORDING_SYNTAX,
    "a path that ends in .npz, in braces only {service}, {run}, {pid} and {window}",
    lambda text: f"{re.sub(r'(?:[.](?:json|gz|npz))*$', '', _with_fields(text))}.npz",
)
_path_pattern = spelled(
    PATH_SYNTAX, "a path such as /health, or /internal/* for all that begin so", lambda text: f"/{text}"
)
_request_name = spelled(
    REQUEST_NAME_SYNTAX, "text with {method} or {route} in it, and no other braces", lambda _: "{method} {route}"
)
_request_attribute = spelled(
    REQUEST_ATTRIBUTE_SYNTAX,
    "http.request.header.<name in small letters>, url.path, url.query, client.address or user_agent.original",
    lambda text: f"http.request.header.{text.lower()}",
)
_socket_folder = spelled(
    SOCKET_SYNTAX,
    "off, auto, or a folder of the user's, with a '/' in it, at most 80 characters and no braces",
    lambda text: nearest(text, ("auto", "off")),
)
_summary_target = spelled(
    SUMMARY_SYNTAX,
    "stderr, stdout, or a path as for chrome, with a '/' or '.' in it",
    lambda text: nearest(text, ("stderr", "stdout")),
)


def _rate(node: Node) -> Rate:
    parts = re.fullmatch(RATE_SYNTAX, node.text) if node.kind == "text" else None
    if not parts:
        near = f"{node.text}/min" if node.kind == "int" else ""
        allowed = "a count a second, minute or hour, such as 5/s, 30/min, 100/h"
        node.refuse(allowed, near=near if re.fullmatch(RATE_SYNTAX, near) else "")
    return Rate(int(parts[1]), RATE_UNITS[parts[2]])


_read_slow = quantity(DURATION_UNITS, "250ms", "", also="a percentile of the endpoint's own such as p99*1.5, or ")


def _slow(node: Node) -> int | Usual:
    """A time in ns, or one by what is usual."""
    text = node.text if node.kind == "text" else ""
    parts = re.fullmatch(USUAL_SYNTAX, text)
    if parts:
        return Usual(round(float(parts[1]) / 100, 6), float(parts[2]))
    meant = re.fullmatch(USUAL_SYNTAX, re.sub(r"[ %]", "", text.lower()).replace("x", "*"))
    if meant:
        node.refuse("a percentile of the endpoint's own such as p99*1.5", near=meant[0])
    found: int = _read_slow(node)
    return found


def _capture(**values: Any) -> Capture:
    slow = values.pop("slow", None)
    return Capture(**values, **{"slow_over" if isinstance(slow, Usual) else "slow_ns": slow})


_COMPARED = "text, a number, true or false, a comparison such as '>=500', or a list of these"


def _compared(node: Node) -> tuple[str, str | bool | int | float]:
    """How an attribute must be: the operator, and the value that it is compared with."""
    if node.kind == "bool":
        if node.text.lower() not in ("true", "false"):
            node.refuse("true or false; put text in quotes", near=f'"{node.text}"')
        return "=", node.text.lower() == "true"
    if node.kind in ("int", "float") and _DECIMAL.fullmatch(node.text):
        return "=", _number(node.text)
    if node.kind != "text" or not re.fullmatch(WHERE_SYNTAX, node.text):
        node.refuse(_COMPARED)
    parts = re.fullmatch(COMPARED_SYNTAX, node.text)
    return (parts[1], _number(parts[2])) if parts else ("=", node.text)


def _number(text: str) -> int | float:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else float(text)


_read_compared = one_or_more(_compared)


def _where(node: Node) -> tuple[Where, ...]:
    if node.kind != "mapping":
        node.refuse("a mapping of attributes to what they must be, such as {tenant: x}")
    found = []
    with node.document.all_or_nothing():
        for name, (key, value) in node.pairs.items():
            if not re.fullmatch(ATTRIBUTE_SYNTAX, name):
                key.note("an attribute's name of at most 256 characters", found=f"the name {clip(name)!r}")
            elif value.kind != "null":
                found.append(Where(name, value.attempt(_read_compared)))
    return tuple(found)


def _url(node: Node) -> str:
    """A collector's URL, or empty text for none, which a quoted reference to an unset variable gives."""
    if node.kind == "text" and not node.text:
        return ""
    text = string(node)
    allowed = "http://host:port or https://host:port, with or without a path, credentials only in headers"
    if not re.fullmatch(URL_SYNTAX, text):
        near = f"http://{text}"
        node.refuse(allowed, near=near if re.fullmatch(URL_SYNTAX, near) else "")
    try:
        _ = urlsplit(text).port
    except ValueError as error:
        node.refuse(allowed, found=f"{node.shown} ({error})")
    return text


def _file(node: Node) -> str:
    """The path of a file that is there and may be read."""
    path = string(node)
    if not os.access(path, os.R_OK) or not Path(path).is_file():
        node.refuse("the path of a file that is there and that this process may read")
    return path


def _seconds(node: Node) -> int:
    """A timeout variable in seconds, as OpenTelemetry's Python SDK takes it, in nanoseconds."""
    if not _DECIMAL.fullmatch(node.text) or not 0.001 <= float(node.text) < 2**33:
        node.refuse("a number of seconds, from 0.001")
    return int(float(node.text) * 10**9)


def _headers(node: Node) -> tuple[tuple[str, str], ...]:
    if node.kind != "mapping":
        node.refuse("a mapping of header names to texts", found="no mapping (not shown)")
    headers = []
    with node.document.all_or_nothing():
        for name, (key, value) in node.pairs.items():
            if not re.fullmatch(HEADER_NAME_SYNTAX, name):
                key.note("letters, digits and !#$%&'*+.^_`|~-", found=f"the header name {clip(name)!r}")
            elif value.kind != "null":
                headers.append((name, value.attempt(_header_value)))
    return tuple(headers)


def _header_value(node: Node) -> str:
    # Header values are secrets as a rule: no message shows one.
    if node.kind != "text":
        node.refuse("text; put the value in quotes", found="a value that is no text (not shown)")
    if not re.fullmatch(HEADER_VALUE_SYNTAX, node.text):
        node.refuse("printable ASCII on one line", found="a character that no header may hold")
    return node.text


def _header_list(node: Node) -> tuple[tuple[str, str], ...]:
    """A headers variable: `name=value,name=value`, URL-encoded."""
    headers = []
    for part in filter(None, (part.strip() for part in node.text.split(","))):
        name, equals, value = (unquote(piece.strip()) for piece in part.partition("="))
        if not equals or not re.fullmatch(HEADER_NAME_SYNTAX, name) or not re.fullmatch(HEADER_VALUE_SYNTAX, value):
            node.refuse("name=value,name=value, URL-encoded", found="a list of another form (not shown)")
        headers.append((name, value))
    return tuple(headers)


def _fields(node: Node, section: str) -> dict[str, Any]:
    """The fields that one mapping gives to its type, once all its keys are read and none was refused."""
    keys = KEYS[section]
    if node.kind != "mapping":
        node.refuse(f"a mapping of {', '.join(keys)}")
    values = {}
    with node.document.all_or_nothing():
        for name, (place, _) in node.pairs.items():
            if name not in keys:
                place.note(", ".join(keys), found=f"the unknown key {clip(name)!r}", near=nearest(name, keys))
        for name, key in keys.items():
            path, read, source = node.path(name), key.read, "profile"
            value = node.pairs[name][1] if name in node.pairs else None
            if value and value.kind == "null" and key.blank:
                value = replace(value, kind="mapping")
            elif value is None or value.kind == "null":
                source, read, value = _variable(node, path)
            if path in VARIABLES:
                node.document.origins[path] = source
                if value is not None and value.told != value.text:
                    node.document.told[path] = value.told
            if value:
                values[key.field] = value.attempt(read)
            elif key.required:
                replace(node, where=path).note(key.required, found="nothing")
    return values


def _variable(node: Node, path: str) -> tuple[str, Read, Node | None]:
    """The variable that gives a setting which the mapping leaves out, how to read it, and its value."""
    for variable, read in VARIABLES.get(path, ()):
        if text := node.document.environ.get(variable):
            value = Node(node.document, f"{path} (from {variable})", node.line, node.column, "text", text)
            return variable, read, value
    return "default", string, None


def _unless_off(read: Read, section: str) -> Read:
    """Reads an export, or the word `off`, which takes away what a preset has."""

    def read_unless_off(node: Node) -> Any:
        if node.is_off:
            return None
        if node.kind != "mapping":
            node.refuse(f"off, or a mapping of {', '.join(KEYS[section])}")
        return read(node)

    return read_unless_off


def _part(section: str, build: Callable[..., Any]) -> Read:
    return lambda node: build(**_fields(node, section))


def _function_rule(node: Node) -> FunctionRule:
    values = _fields(node, "functions")
    written = values.pop("match")
    match, exclude = _sides(written)
    if not match:
        node.pairs["match"][1].refuse("at least one pattern without '!'", found="only patterns with '!'")
    if "kind" not in values and "phase" in values:
        values["kind"] = "phase"
    values.update(values.pop("where", {}))
    told = ", ".join(_texts_told(node, "match"))
    return FunctionRule(match, exclude, line=node.line, place=node.place, text=told, **values)


def _argument(node: Node) -> Argument:
    one = Argument(**_fields(node, "functions.attributes"))
    return one if one.name else replace(one, name=one.argument + ("" if one.record == "value" else f".{one.record}"))


def _request_keys(section: str) -> Read:
    """A path, or a mapping that has one."""

    def read(node: Node) -> RequestKeys:
        if node.kind == "mapping":
            return RequestKeys(**_fields(node, section))
        return RequestKeys(_keys_path(node))

    return read


def _expression(node: Node) -> str:
    text: str = string(node)
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as problem:
        node.refuse(f"a regular expression, and this is none: {problem}")
    return text


def _layer_rule(node: Node) -> LayerRule:
    values = _fields(node, "layers")
    written, types = values.pop("match", ()), values.get("types", ())
    match, exclude = _sides(written)
    if not match and not types:
        found = "only patterns with '!' and no type" if written else "neither match nor type"
        node.refuse("a match, a type, or both", found=found)
    text = ", ".join(_texts_told(node, "match") + [f"type {' '.join(_texts_told(node, 'type'))}"] * bool(types))
    return LayerRule(match, exclude, line=node.line, text=text, **values)


def _texts_told(node: Node, key: str) -> list[str]:
    """One text of a rule or several, as messages call the rule by them, each once."""
    _, found = node.pairs.get(key, (node, node))
    return list(dict.fromkeys(text.told for text in found.items or (found,) if text.kind == "text"))


def _sides(patterns: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns that select, and those that exclude without their '!'."""
    match = tuple(pattern for pattern in patterns if not pattern.startswith("!"))
    return match, tuple(pattern[1:] for pattern in patterns if pattern.startswith("!"))


def _copy_rule(node: Node) -> CopyRule:
    rule = CopyRule(**_fields(node, "copies"))
    of = "" if rule.frameworks == COPY_FRAMEWORKS else f" of {' '.join(rule.frameworks)}"
    return replace(rule, line=node.line, text=f"{' '.join(rule.directions)} from {rule.min_bytes} B{of}")


_FRAMEWORKS = f"auto, off, or a list of {', '.join(FRAMEWORKS)}"
_framework = one_of(*FRAMEWORKS)


def _framework_rule(node: Node) -> FrameworkRule:
    if node.kind != "mapping":
        return FrameworkRule(_framework(node), line=node.line)
    rule = FrameworkRule(**_fields(node, "frameworks"), line=node.line)
    if rule.nodes and rule.name != "onnxruntime":
        node.pairs["nodes"][1].refuse("true for onnxruntime alone", found=f"true for {rule.name}")
    return rule


def _frameworks(node: Node) -> tuple[FrameworkRule, ...]:
    if node.kind == "text" and node.text == "auto":
        return tuple(FrameworkRule(name, auto=True, line=node.line) for name in FRAMEWORKS)
    if node.is_off:
        return ()
    if node.kind != "list":
        node.refuse(_FRAMEWORKS, near=nearest(node.text, ("auto", "off", *FRAMEWORKS)))
    rules: tuple[FrameworkRule, ...] = each(_framework_rule, _FRAMEWORKS)(node)
    first: dict[str, int] = {}
    with node.document.all_or_nothing():
        for rule, item in zip(rules, node.items, strict=True):
            if rule.name in first:
                item.note(f"each framework once (first in line {first[rule.name]})", found=f"{rule.name} twice")
            first.setdefault(rule.name, rule.line)
    return rules


def _requests(node: Node) -> tuple[RequestsRule, ...]:
    if node.kind == "text" and node.text == "auto":
        return (RequestsRule(line=node.line),)
    if node.is_off:
        return ()
    if node.kind != "mapping":
        node.refuse(
            f"auto, off, or a mapping of {', '.join(KEYS['requests'])}", near=nearest(node.text, ("auto", "off"))
        )
    return (RequestsRule(**_fields(node, "requests"), line=node.line),)


def _schedule(node: Node) -> Schedule:
    if node.kind != "list":
        return Schedule(**_fields(node, "schedule"))
    steps = each(whole(0), "a list")(node)
    if len(steps) != 2 or steps[0] >= steps[1]:
        found = f"[{', '.join(item.told for item in node.items[:5])}{', ...' * (len(steps) > 5)}]"
        node.refuse("[start, end] with 0 <= start < end, or a mapping", found=found)
    return Schedule(record=steps[1] - steps[0], skip_first=steps[0], repeat=1)


_BASE_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def _otlp(node: Node) -> Otlp | None:
    values = _fields(node, "export.otlp")
    origin = node.document.origins[node.path("endpoint")]
    http = values.get("protocol") != "grpc"
    endpoint = values.pop("endpoint", "http://localhost:4318" if http else "http://localhost:4317")
    if not endpoint:
        return None
    if values.get("client_key") and not values.get("client_certificate"):
        where = replace(node, where=node.path("client_key"))
        where.refuse("a key with its client_certificate", found="a key alone")
    # A profile that only hands on the base variable means what the variable means: its path is a prefix.
    handed_on = origin == "profile" and node.pairs["endpoint"][1].variable == _BASE_VARIABLE
    if http and origin != "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT":
        endpoint = _traces_url(endpoint, prefix=handed_on or origin == _BASE_VARIABLE)
    return Otlp(endpoint, **values)


def _traces_url(endpoint: str, *, prefix: bool) -> str:
    parts = urlsplit(endpoint)
    if parts.path.strip("/") and not prefix:
        return endpoint
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/v1/traces"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the file: the field that it fills, how it is read, and what a missing one should have been.

    With `blank`, a null value is not the same as leaving the key out.
    """

    field: str
    read: Read
    required: str = ""
    blank: bool = False


_RULES = "a list of rules, each with a '-' of its own"

KEYS: Mapping[str, Mapping[str, Key]] = {
    "": {
        "service": Key("service", string),
        "preset": Key("preset", one_of(*PRESETS)),
        "tracer_option": Key("tracer_option", one_of(*TRACER_OPTIONS)),
        "state": Key("state", one_of(*STATES)),
        "clock": Key("clock", one_of(*CLOCKS)),
        "budget": Key("budget", _percent),
        "functions": Key("functions", each(_function_rule, _RULES)),
        "layers": Key("layers", each(_layer_rule, _RULES)),
        "copies": Key("copies", each(_copy_rule, _RULES)),
        "loaders": Key("loaders", one_of("auto", "off")),
        "phases": Key("phases", one_of("auto", "off")),
        "comm": Key("comm", one_of("auto", "off")),
        "frameworks": Key("frameworks", _frameworks),
        "requests": Key("requests", _requests),
        "startup": Key("startup", one_of("auto", "off")),
        "schedule": Key("schedule", _schedule),
        "capture": Key("capture", _part("capture", _capture)),
        "limits": Key("limits", _part("limits", Limits)),
        "device": Key("device", _part("device", Device)),
        "control": Key("control", _part("control", Control)),
        "export": Key("export", _part("export", Export)),
    },
    "functions": {
        "match": Key("match", one_or_more(_function_pattern), required="module:qualname, or a list of such patterns"),
        "name": Key("name", string),
        "kind": Key("kind", one_of(*KINDS)),
        "phase": Key("phase", string),
        "device": Key("device", flag),
        "first_request": Key("first_request", flag),
        "metrics": Key("metrics", flag),
        "gen_ai": Key("gen_ai", flag),
        "where": Key("where", _part("functions.where", dict)),
        "attributes": Key("attributes", one_or_more(_argument)),
        "key": Key("key", _request_keys("functions.key")),
        "batch": Key("batch", _request_keys("functions.batch")),
    },
    "functions.key": {
        "argument": Key("argument", _keys_path, required="where the key is, such as request.request_id"),
        "cut": Key("cut", _expression),
    },
    "functions.batch": {
        "argument": Key("argument", _keys_path, required="where the keys are, such as requests[].request_id"),
        "weights": Key("weights", _keys_path),
        "cut": Key("cut", _expression),
    },
    "functions.where": {
        "min_duration": Key("min_ns", _duration("50us")),
    },
    "functions.attributes": {
        "argument": Key("argument", _argument_path, required="a parameter of the function, such as prompt"),
        "record": Key("record", one_of(*RECORDED)),
        "name": Key("name", string),
    },
    "layers": {
        "match": Key("match", one_or_more(_layer_pattern)),
        "type": Key("types", one_or_more(_class_name)),
        "name": Key("name", string),
        "device": Key("device", flag),
    },
    "copies": {
        "directions": Key("directions", one_or_more(one_of(*DIRECTIONS))),
        "min_bytes": Key("min_bytes", _size("64KiB")),
        "frameworks": Key("frameworks", one_or_more(one_of(*COPY_FRAMEWORKS))),
    },
    "frameworks": {
        "name": Key("name", _framework, required=f"one of {', '.join(FRAMEWORKS)}"),
        "nodes": Key("nodes", flag),
    },
    "requests": {
        "servers": Key("servers", one_or_more(one_of(*SERVERS))),
        "ignore": Key("ignore", one_or_more(_path_pattern)),
        "name": Key("name", _request_name),
        "attributes": Key("attributes", one_or_more(_request_attribute)),
        "traceparent": Key("traceparent", one_of(*TRACEPARENT)),
        "gen_ai": Key("gen_ai", one_or_more(_path_pattern)),
    },
    "schedule": {
        "skip_first": Key("skip_first", whole(0)),
        "closed": Key("closed", whole(0)),
        "ready": Key("ready", whole(0)),
        "record": Key("record", whole(1), required="how many steps to record, from 1"),
        "repeat": Key("repeat", whole(0)),
        "step": Key("step", _function_name),
    },
    "capture": {
        "sample": Key("sample", _share),
        "slow": Key("slow", _slow),
        "errors": Key("errors", flag),
        "where": Key("where", _where),
        "limit": Key("limit", _rate),
        "before": Key("before_ns", _duration("2s")),
    },
    "limits": {
        "ring": Key("ring_bytes", _ring),
        "spans_per_request": Key("spans_per_request", whole(1)),
        "disk": Key("disk_bytes", _size("1GiB")),
        "blocked": Key("blocked_ns", _duration_or_off),
    },
    "device": {
        "cuda": Key("cuda", one_of("auto", "off")),
        "gil": Key("gil", one_of("hold", "release")),
        "nvml": Key("nvml_ns", _interval),
        "host": Key("host_ns", _interval),
    },
    "control": {
        "watch": Key("watch", flag),
        "socket": Key("socket", _folder_or_off),
    },
    "export": {
        "recording": Key(
            "recording", _unless_off(_part("export.recording", Recordings), "export.recording"), blank=True
        ),
        "chrome": Key("chrome", _unless_off(_part("export.chrome", Chrome), "export.chrome"), blank=True),
        "otlp": Key("otlp", _unless_off(_otlp, "export.otlp"), blank=True),
        "summary": Key("summary", _unless_off(_part("export.summary", Summary), "export.summary"), blank=True),
    },
    "export.recording": {
        "path": Key("path", _recording_path),
    },
    "export.chrome": {
        "path": Key("path", _chrome_path),
    },
    "export.otlp": {
        "endpoint": Key("endpoint", _url),
        "protocol": Key("protocol", one_of(*PROTOCOLS)),
        "headers": Key("headers", _headers),
        "timeout": Key("timeout_ns", _duration("10s", least="1ms")),
        "compression": Key("compression", one_of(*COMPRESSIONS)),
        "certificate": Key("certificate", _file),
        "client_certificate": Key("client_certificate", _file),
        "client_key": Key("client_key", _file),
    },
    "export.summary": {
        "to": Key("to", _summary_target),
        "views": Key("views", one_or_more(one_of(*VIEWS))),
        "sorted_by": Key("sorted_by", one_of(*SORT_KEYS)),
        "rows": Key("rows", whole(1)),
        "least": Key("least_ns", _duration("50us")),
        "unit": Key("unit", one_of(*TIME_UNITS)),
        "per_thread": Key("per_thread", flag),
        "corrected": Key("corrected", flag),
        "skip_first": Key("skip_first", whole(0)),
    },
}
"""Every key that a profile may hold, by section."""


def _otlp_variables(setting: str, read: Read) -> tuple[tuple[str, Read], ...]:
    return tuple((f"OTEL_EXPORTER_OTLP_{signal}{setting}", read) for signal in ("TRACES_", ""))


VARIABLES: Mapping[str, tuple[tuple[str, Read], ...]] = {
    "service": (("OTEL_SERVICE_NAME", string),),
    "export.otlp.endpoint": _otlp_variables("ENDPOINT", _url),
    "export.otlp.protocol": _otlp_variables("PROTOCOL", one_of(*PROTOCOLS)),
    "export.otlp.headers": _otlp_variables("HEADERS", _header_list),
    "export.otlp.timeout": _otlp_variables("TIMEOUT", _seconds),
    "export.otlp.compression": _otlp_variables("COMPRESSION", one_of(*COMPRESSIONS)),
    "export.otlp.certificate": _otlp_variables("CERTIFICATE", _file),
    "export.otlp.client_certificate": _otlp_variables("CLIENT_CERTIFICATE", _file),
    "export.otlp.client_key": _otlp_variables("CLIENT_KEY", _file),
}
"""The variables that give a setting which the profile leaves out, the first that is set and not empty."""


BESIDE: Mapping[str, str] = {
    "OTEL_RESOURCE_ATTRIBUTES": "resource attributes",
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": "resource detectors",
    "OTEL_METRICS_EXPORTER": "metrics exporter",
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "metrics temporality",
    "OTEL_PROPAGATORS": "propagators",
}
"""The other variables of OpenTelemetry that what is sent to a collector follows, and what they say. `none` for the
metrics exporter means that no metrics are sent; the propagators are those by which requests find their caller's trace.
These and `VARIABLES` are all of its variables that are honoured."""


def setting(profile: Profile, path: str) -> Any:
    """The value of a setting by its path in the file, such as `limits.ring`; None where its section is off."""
    value: Any = profile
    section = ""
    for name in path.split("."):
        value = getattr(value, KEYS[section][name].field, None)
        section = f"{section}.{name}" if section else name
    return value
