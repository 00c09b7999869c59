"""The reader of `profile.yaml`, driven by `KEYS`, a table of every key with the reader of its value.

`load` and `loads` return a frozen `Profile`, or raise one `ProfileError` with every mistake. An omitted setting may
come from an environment variable (`values.VARIABLES`). A null value counts as omitted, but under `export` it switches
the export on with its defaults. `configs/everything.yaml` explains every key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from instrument.errors import ProfileError
from instrument.profile import model
from instrument.profile import values as readers
from instrument.profile.document import (
    REFERENCE,
    SHAPES,
    Document,
    Read,
    Shape,
    YamlNode,
    clip_text,
    find_most_similar,
    list_or_item,
    list_reader,
    make_choice_reader,
    make_whole_number_reader,
    read_flag,
    read_string,
    read_text,
    reader_or_off,
    with_schema,
)
from instrument.profile.presets import ENGINES, PRESETS, merge_preset, preset_of_file, preset_path
from instrument.profile.values import (
    REQUEST_ATTRIBUTE_SYNTAX,
    VARIABLES,
    drop_switched_off_exports,
    public_texts,
    split_patterns,
    traces_url,
)
from instrument.runtime.environment import user_settings
from instrument.runtime.lazy_imports import dataclass, fields_of, replace


def load(path: str | os.PathLike[str], *, environ: Mapping[str, str] | None = None) -> model.Profile:
    """Read a profile from a file. `environ` replaces `os.environ`. The file of a preset gives a profile with this
    preset.

    Raises `ProfileError` with every mistake of the file, or with the reason why the file cannot be read.
    """
    argument: object = path
    if not isinstance(argument, (str, os.PathLike)):
        raise ProfileError(
            [f"profile: found {argument!r:.60}; allowed: a Profile, or the path of a file as str or PathLike"]
        )
    name = os.fspath(path)
    if preset := preset_of_file(path):
        return loads(f"preset: {preset}", name=name, environ=environ)
    return loads(read_text(path), name=name, environ=environ)


def loads(text: str, *, name: str = "<profile>", environ: Mapping[str, str] | None = None) -> model.Profile:
    """Read a profile from text. `name` is the file's name in messages, and `environ` replaces `os.environ`. Raises
    `ProfileError` with every mistake."""
    document = Document(text, name=name, environ=user_settings() if environ is None else environ)
    preset_texts: dict[str, str] = {}

    def read(root: YamlNode) -> dict[str, Any]:
        whole, of_preset = merge_preset(root)
        preset_texts.update(of_preset)
        return _read_fields(whole, "")

    values = document.read_root(read)
    if document.problems:
        raise ProfileError(document.problems)
    origins = {**document.origins, **dict.fromkeys(preset_texts, "preset")}
    profile = model.Profile(**values, source=name, origins=origins, shown={**document.shown, **preset_texts})
    profile = drop_switched_off_exports(profile, document)
    schedule = profile.schedule
    if schedule is None or schedule.step is None:
        return profile
    # The last rule, so that a rule of the file for the same function has precedence.
    counted = model.FunctionRule((schedule.step,), kind="step", counted=True, text=f"schedule.step {schedule.step}")
    return replace(profile, functions=(*profile.functions, counted))


_NODES = "SessionOptions.enable_profiling in the service; `report FILE --view events` reads its file"
_SOCKET = "`instrument reload`, which asks the agent of a run; without an agent `watch: true`"
REMOVED: Mapping[tuple[str, str], str] = {("frameworks", "nodes"): _NODES, ("control", "socket"): _SOCKET}
"""The messages for keys of earlier versions, by section and name."""


def with_engine_preset(profile: model.Profile, package: str) -> model.Profile:
    """Add an engine's preset to a profile. The preset's function rules come last. The request rules are merged."""
    preset = load(preset_path(ENGINES[package]))
    requests = profile.requests
    for more in preset.requests:
        requests = tuple(
            replace(
                rule,
                ignore=tuple(dict.fromkeys((*rule.ignore, *more.ignore))),
                gen_ai=tuple(dict.fromkeys((*rule.gen_ai, *more.gen_ai))),
                provider=rule.provider or more.provider,
            )
            for rule in requests
        )
    functions = tuple(replace(rule, engine=package) for rule in preset.functions)
    return replace(profile, functions=(*profile.functions, *functions), requests=requests)


def _read_fields(node: YamlNode, section: str, also: str = "") -> dict[str, Any]:
    keys = KEYS[section]
    if node.kind != "mapping":
        node.refuse(f"{also}a mapping of {', '.join(keys)}")
    values = {}
    with node.document.refuse_incomplete_node():
        for name, (place, _) in node.pairs.items():
            if (section, name) in REMOVED:
                place.note_problem(REMOVED[section, name], actual=f"the key {name!r}, which was removed")
            elif name not in keys:
                place.note_problem(
                    ", ".join(keys), actual=f"the unknown key {clip_text(name)!r}", near=find_most_similar(name, keys)
                )
        for name, key in keys.items():
            path, read, source = node.path_of_key(name), key.read, "profile"
            value = node.pairs[name][1] if name in node.pairs else None
            if value and value.unset is not None and not value.is_readable(read, "it counts as not set"):
                value = value.unset if value.unset.text else None
            if value and value.kind == "null" and key.blank:
                value = replace(value, kind="mapping")
            elif value is None or value.kind == "null":
                source, read, value = _find_variable(node, path)
            if path in VARIABLES:
                node.document.origins[path] = source
                if value is not None and value.public_text != value.text:
                    node.document.shown[path] = value.public_text
            if value:
                values[key.field] = value.attempt_read(read)
            elif key.required:
                replace(node, key_path=path).note_problem(key.required, actual="nothing")
    return values


def _find_variable(node: YamlNode, path: str) -> tuple[str, Read, YamlNode | None]:
    for variable, read in VARIABLES.get(path, ()):
        if text := node.document.environ.get(variable):
            value = YamlNode(node.document, f"{path} (from {variable})", node.line, node.column, "text", text)
            if value.is_readable(read, _INSTEAD.get(path, "it is not followed")):
                return variable, read, value
    return "default", read_string, None


_INSTEAD = {"export.otlp.protocol": "http/protobuf is used"}


def make_section_schema(section: str) -> Shape:
    return {"$ref": f"#/$defs/{section}"}


PAIR_OF_STEPS: Shape = {
    "description": "[start, end]: skip start steps, record up to end, once; 0 <= start < end.",
    "type": "array",
    "minItems": 2,
    "maxItems": 2,
    "items": {"anyOf": [SHAPES[make_whole_number_reader(0)], REFERENCE]},
}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of `profile.yaml`: the field that it sets, and the reader of its value.

    `required` describes the allowed values in the message for a missing key, "" for an optional key. `blank` is True if
    null has another meaning than an omitted key.
    """

    field: str
    read: Read
    required: str = ""
    blank: bool = False


class Keys(dict[str, Key]):
    """The keys of a section by name. `kind` is the class of the model that the section sets."""

    def __init__(self, kind: type, /, **keys: Key | Read) -> None:
        self.kind = kind
        super().__init__((name, key if isinstance(key, Key) else Key(name, key)) for name, key in keys.items())


def _section_reader(section: str, build: Callable[..., Any] | None = None, also: str = "") -> Read:
    @with_schema(make_section_schema(section))
    def read(node: YamlNode) -> Any:
        return (build or KEYS[section].kind)(**_read_fields(node, section, also))

    return read


def _make_export_key(way: str) -> Key:
    """Return the key of an export. The value `off` removes the preset's export."""
    return Key(way, reader_or_off(_section_reader(f"export.{way}", also="off, or ")), blank=True)


@with_schema(make_section_schema("functions"))
def _read_function_rule(node: YamlNode) -> model.FunctionRule:
    values = _read_fields(node, "functions")
    written = values.pop("match")
    match, exclude = split_patterns(written)
    if not match:
        node.pairs["match"][1].refuse("at least one pattern without '!'", actual="only patterns with '!'")
    if "kind" not in values and "phase" in values:
        values["kind"] = "phase"
    values.update(values.pop("where", {}))
    for fact in values.get("facts", ()):
        if "[]" in fact.argument and not fact.key and "batch" not in values:
            node.pairs["facts"][1].refuse("the path of each item's key as `key`", actual=fact.argument)
    text = ", ".join(public_texts(node, "match"))
    return model.FunctionRule(match, exclude, line=node.line, place=node.location, text=text, **values)


@with_schema(make_section_schema("functions.attributes"))
def _read_argument(node: YamlNode) -> model.Argument:
    argument = model.Argument(**_read_fields(node, "functions.attributes"))
    suffix = "" if argument.record == "value" else f".{argument.record}"
    return argument if argument.name else replace(argument, name=argument.argument + suffix)


@with_schema(make_section_schema("functions.facts"))
def _read_fact(node: YamlNode) -> model.Fact:
    fact = model.Fact(**_read_fields(node, "functions.facts"))
    if fact.key and "[]" not in fact.argument:
        node.refuse(
            "a `key` with a path of several values, such as outputs[].tokens", actual=f"a key of {fact.argument}"
        )
    return fact


def _make_request_keys_reader(section: str, path: Read) -> Read:
    @with_schema({"anyOf": [SHAPES[path], make_section_schema(section)]})
    def read(node: YamlNode) -> model.RequestKeys:
        if node.kind == "mapping":
            return model.RequestKeys(**_read_fields(node, section))
        return model.RequestKeys(path(node))

    return read


@with_schema(make_section_schema("layers"))
def _read_layer_rule(node: YamlNode) -> model.LayerRule:
    values = _read_fields(node, "layers")
    written, types = values.pop("match", ()), values.get("types", ())
    match, exclude = split_patterns(written)
    if not match and not types:
        missing = "only patterns with '!' and no type" if written else "neither match nor type"
        node.refuse("a match, a type, or both", actual=missing)
    text = ", ".join(public_texts(node, "match") + [f"type {' '.join(public_texts(node, 'type'))}"] * bool(types))
    return model.LayerRule(match, exclude, line=node.line, text=text, **values)


@with_schema(make_section_schema("copies"))
def _read_copy_rule(node: YamlNode) -> model.CopyRule:
    rule = model.CopyRule(**_read_fields(node, "copies"))
    of = "" if rule.frameworks == model.COPY_FRAMEWORKS else f" of {' '.join(rule.frameworks)}"
    return replace(rule, line=node.line, text=f"{' '.join(rule.directions)} from {rule.min_bytes} B{of}")


_FRAMEWORKS = f"auto, off, or a list of {', '.join(model.FRAMEWORKS)}"
_framework = make_choice_reader(*model.FRAMEWORKS)


@with_schema(make_section_schema("frameworks"))
def _read_framework_rule(node: YamlNode) -> model.FrameworkRule:
    if node.kind != "mapping":
        return model.FrameworkRule(_framework(node), line=node.line)
    return model.FrameworkRule(**_read_fields(node, "frameworks"), line=node.line)


@with_schema(
    {
        "anyOf": [
            {"enum": ["auto", "off", False]},
            {"type": "array", "items": {"anyOf": [SHAPES[_framework], make_section_schema("frameworks"), REFERENCE]}},
        ]
    }
)
def _read_frameworks(node: YamlNode) -> tuple[model.FrameworkRule, ...]:
    if node.kind == "text" and node.text == "auto":
        return tuple(model.FrameworkRule(name, auto=True, line=node.line) for name in model.FRAMEWORKS)
    if node.is_off:
        return ()
    if node.kind != "list":
        node.refuse(_FRAMEWORKS, near=find_most_similar(node.text, ("auto", "off", *model.FRAMEWORKS)))
    rules: tuple[model.FrameworkRule, ...] = list_reader(_read_framework_rule, _FRAMEWORKS)(node)
    first: dict[str, int] = {}
    with node.document.refuse_incomplete_node():
        for rule, item in zip(rules, node.items, strict=True):
            if rule.name in first:
                item.note_problem(
                    f"each framework once (first in line {first[rule.name]})", actual=f"{rule.name} twice"
                )
            first.setdefault(rule.name, rule.line)
    return rules


@with_schema({"anyOf": [{"enum": ["auto", "off", False]}, make_section_schema("requests")]})
def _read_requests(node: YamlNode) -> tuple[model.RequestsRule, ...]:
    if node.kind == "text" and node.text == "auto":
        return (model.RequestsRule(line=node.line),)
    if node.is_off:
        return ()
    if node.kind != "mapping":
        node.refuse(
            f"auto, off, or a mapping of {', '.join(KEYS['requests'])}",
            near=find_most_similar(node.text, ("auto", "off")),
        )
    rule = model.RequestsRule(**_read_fields(node, "requests"), line=node.line)
    if re.fullmatch(REQUEST_ATTRIBUTE_SYNTAX, rule.by) and rule.by not in rule.attributes:
        rule = replace(rule, attributes=(*rule.attributes, rule.by))
    return (rule,)


@with_schema({"anyOf": [make_section_schema("schedule"), PAIR_OF_STEPS]})
def _read_schedule(node: YamlNode) -> model.Schedule:
    if node.kind != "list":
        return model.Schedule(**_read_fields(node, "schedule"))
    steps = list_reader(make_whole_number_reader(0), "a list")(node)
    if len(steps) != 2 or steps[0] >= steps[1]:
        shown = f"[{', '.join(item.public_text for item in node.items[:5])}{', ...' * (len(steps) > 5)}]"
        node.refuse("[start, end] with 0 <= start < end, or a mapping", actual=shown)
    return model.Schedule(record=steps[1] - steps[0], skip_first=steps[0], repeat=1)


_BASE_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


@with_schema({"anyOf": [make_section_schema("export.otlp"), {"enum": ["auto", "off", False]}]})
def _read_otlp(node: YamlNode) -> model.Otlp | None:
    """Read the settings of the collector, None without a collector. For `auto`, an environment variable names the
    collector."""
    if node.is_off:
        return None
    is_asked = node.kind == "mapping"
    if not is_asked and node.text != "auto":
        node.refuse(f"auto, off, or a mapping of {', '.join(KEYS['export.otlp'])}")
    values = _read_fields(replace(node, kind="mapping"), "export.otlp")
    document, place = node.document, node.path_of_key("endpoint")
    origin = document.origins[place]
    http = values.get("protocol") != "grpc"
    is_misnamed = any(place in remark for remark in document.remarks)
    if origin == "default" and (is_misnamed or not is_asked):
        document.remarks += ["no other endpoint is set: nothing is sent to a collector"] * is_misnamed
        return None
    if not http and not _is_in_profile(node, "protocol") and find_spec("grpc") is None:
        document.remarks.append("grpc needs instrument-sdk[grpc]: nothing is sent to a collector")
        return None
    endpoint = values.pop("endpoint", "http://localhost:4318" if http else "http://localhost:4317")
    if not endpoint:
        return None
    if values.get("client_key") and not values.get("client_certificate"):
        key_node = replace(node, key_path=node.path_of_key("client_key"))
        if _is_in_profile(node, "client_key"):
            key_node.refuse("a key with its client_certificate", actual="a key alone")
        document.remarks.append(f"{key_node.key_path}: found a key without its client_certificate; it is not followed")
        del values["client_key"]
    # In a profile that only refers to the base variable, the path is a prefix, as in the variable.
    handed_on = origin == "profile" and node.pairs["endpoint"][1].variable == _BASE_VARIABLE
    if http and origin != "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT":
        endpoint = traces_url(endpoint, prefix=handed_on or origin == _BASE_VARIABLE)
    return model.Otlp(endpoint, **values)


def _is_in_profile(node: YamlNode, name: str) -> bool:
    return node.document.origins[node.path_of_key(name)] == "profile" and node.pairs[name][1].unset is None


_exports = list_or_item(make_choice_reader(*(name for name, _ in fields_of(model.Export))))


@with_schema({"anyOf": [make_section_schema("export"), SHAPES[_exports]]})
def _read_export(node: YamlNode) -> model.Export:
    if node.kind in ("text", "list"):
        ways = {
            way: (node, replace(node, key_path=node.path_of_key(way), kind="mapping", items=()))
            for way in _exports(node)
        }
        node = replace(node, kind="mapping", pairs=ways)
    return model.Export(**_read_fields(node, "export"))


_RULES = "a list of rules, each with a '-' of its own"

KEYS: Mapping[str, Keys] = {
    "": Keys(
        model.Profile,
        service=read_string,
        preset=make_choice_reader(*PRESETS),
        tracer_option=make_choice_reader(*model.TRACER_OPTIONS),
        state=make_choice_reader(*model.STATES),
        clock=make_choice_reader(*model.CLOCKS),
        budget=readers.read_percent,
        functions=list_reader(_read_function_rule, _RULES),
        layers=list_reader(_read_layer_rule, _RULES),
        copies=list_reader(_read_copy_rule, _RULES),
        loaders=make_choice_reader("auto", "off"),
        phases=make_choice_reader("auto", "off"),
        comm=make_choice_reader("auto", "off"),
        engines=make_choice_reader("auto", "off"),
        frameworks=_read_frameworks,
        requests=_read_requests,
        logs=make_choice_reader("auto", "off"),
        startup=make_choice_reader("auto", "off"),
        schedule=_read_schedule,
        capture=_section_reader("capture", readers.make_capture),
        limits=_section_reader("limits"),
        device=_section_reader("device"),
        agent=make_choice_reader("auto", "off"),
        control=_section_reader("control"),
        export=_read_export,
    ),
    "functions": Keys(
        model.FunctionRule,
        match=Key(
            "match", list_or_item(readers.function_pattern), required="module:qualname, or a list of such patterns"
        ),
        name=read_string,
        kind=make_choice_reader(*model.KINDS),
        phase=read_string,
        device=read_flag,
        first_request=read_flag,
        metrics=read_flag,
        gen_ai=read_flag,
        where=_section_reader("functions.where", dict),
        attributes=list_or_item(_read_argument),
        key=_make_request_keys_reader("functions.key", readers.key_path),
        batch=_make_request_keys_reader("functions.batch", readers.keys_path),
        facts=list_or_item(_read_fact),
        gauges=list_or_item(_section_reader("functions.gauges")),
    ),
    "functions.key": Keys(
        model.RequestKeys,
        argument=Key("argument", readers.key_path, required="where the key is, such as request.request_id"),
        cut=readers.read_regex,
    ),
    "functions.batch": Keys(
        model.RequestKeys,
        argument=Key("argument", readers.keys_path, required="where the keys are, such as requests[].request_id"),
        weights=readers.keys_path,
        cut=readers.read_regex,
    ),
    "functions.where": Keys(model.FunctionRule, min_duration=Key("min_ns", readers.make_duration_reader("50us"))),
    "functions.attributes": Keys(
        model.Argument,
        argument=Key("argument", readers.argument_path, required="a parameter of the function, such as prompt"),
        record=make_choice_reader(*model.RECORDED),
        name=read_string,
    ),
    "functions.facts": Keys(
        model.Fact,
        argument=Key("argument", readers.keys_path, required="where the value is, such as request.num_tokens"),
        name=Key("name", readers.attribute_name, required="the name of the attribute"),
        record=make_choice_reader(*model.RECORDED),
        keep=make_choice_reader(*model.KEEPS),
        key=_make_request_keys_reader("functions.facts.key", readers.keys_path),
    ),
    "functions.facts.key": Keys(
        model.RequestKeys,
        argument=Key("argument", readers.keys_path, required="where the keys are, such as requests[].request_id"),
        cut=readers.read_regex,
    ),
    "functions.gauges": Keys(
        model.OwnGauge,
        argument=Key("argument", readers.key_path, required="where the value is, such as self.cache.usage"),
        name=Key("name", readers.number_name, required="the name of the number, such as cache.usage"),
        unit=readers.number_name,
        kind=make_choice_reader(*model.NUMBERS),
        record=make_choice_reader("value", "size"),
        every=Key("every_ns", readers.make_duration_reader("1s", least="10ms")),
    ),
    "layers": Keys(
        model.LayerRule,
        match=list_or_item(readers.layer_pattern),
        type=Key("types", list_or_item(readers.class_name)),
        name=read_string,
        device=read_flag,
    ),
    "copies": Keys(
        model.CopyRule,
        directions=list_or_item(make_choice_reader(*model.DIRECTIONS)),
        min_bytes=readers.make_size_reader("64KiB"),
        frameworks=list_or_item(make_choice_reader(*model.COPY_FRAMEWORKS)),
    ),
    "frameworks": Keys(
        model.FrameworkRule, name=Key("name", _framework, required=f"one of {', '.join(model.FRAMEWORKS)}")
    ),
    "requests": Keys(
        model.RequestsRule,
        servers=list_or_item(make_choice_reader(*model.SERVERS)),
        ignore=list_or_item(readers.path_pattern),
        name=readers.request_name,
        attributes=list_or_item(readers.request_attribute),
        traceparent=make_choice_reader(*model.TRACEPARENT),
        gen_ai=list_or_item(readers.path_pattern),
        provider=read_string,
        by=readers.attribute_name,
        at_most=make_whole_number_reader(1),
        server_timing=readers.read_server_timing,
    ),
    "schedule": Keys(
        model.Schedule,
        skip_first=make_whole_number_reader(0),
        closed=make_whole_number_reader(0),
        ready=make_whole_number_reader(0),
        record=Key("record", make_whole_number_reader(1), required="how many steps to record, from 1"),
        repeat=make_whole_number_reader(0),
        step=readers.function_name,
    ),
    "capture": Keys(
        model.Capture,
        sample=readers.read_share,
        slow=readers.read_slow_limit,
        errors=read_flag,
        where=readers.read_conditions,
        limit=readers.read_rate,
        before=Key("before_ns", readers.make_duration_reader("2s")),
        to=readers.folder_path,
    ),
    "limits": Keys(
        model.Limits,
        ring=Key("ring_bytes", readers.read_ring_size),
        ring_dir=Key("ring_folder", readers.ring_folder_or_off),
        spans_per_request=make_whole_number_reader(1),
        disk=Key("disk_bytes", readers.make_size_reader("1GiB")),
        blocked=Key("blocked_ns", readers.duration_or_off),
    ),
    "device": Keys(
        model.Device,
        cuda=make_choice_reader("auto", "off"),
        gil=make_choice_reader("hold", "release"),
        nvml=Key("nvml_ns", readers.read_gauge_interval),
        host=Key("host_ns", readers.read_gauge_interval),
    ),
    "control": Keys(model.Control, watch=read_flag),
    "export": Keys(
        model.Export,
        recording=_make_export_key("recording"),
        chrome=_make_export_key("chrome"),
        otlp=Key("otlp", _read_otlp, blank=True),
        prometheus=_make_export_key("prometheus"),
        parquet=_make_export_key("parquet"),
        summary=_make_export_key("summary"),
    ),
    "export.recording": Keys(model.Recordings, path=readers.recording_path),
    "export.chrome": Keys(model.Chrome, path=readers.chrome_path),
    "export.otlp": Keys(
        model.Otlp,
        endpoint=readers.read_url,
        protocol=make_choice_reader(*model.PROTOCOLS),
        headers=readers.read_headers,
        timeout=Key("timeout_ns", readers.make_duration_reader("10s", least="1ms")),
        compression=make_choice_reader(*model.COMPRESSIONS),
        certificate=readers.read_file_path,
        client_certificate=readers.read_file_path,
        client_key=readers.read_file_path,
    ),
    "export.prometheus": Keys(model.Prometheus, listen=readers.read_address),
    "export.parquet": Keys(
        model.Parquet, path=readers.dataset_path, every=Key("every_ns", readers.make_duration_reader("5m", least="1s"))
    ),
    "export.summary": Keys(
        model.Summary,
        to=readers.summary_target,
        views=list_or_item(make_choice_reader(*model.VIEWS)),
        sorted_by=make_choice_reader(*model.SORT_KEYS),
        rows=make_whole_number_reader(1),
        least=Key("least_ns", readers.make_duration_reader("50us")),
        unit=make_choice_reader(*model.TIME_UNITS),
        per_thread=read_flag,
        corrected=read_flag,
        skip_first=make_whole_number_reader(0),
    ),
}
"""All keys of `profile.yaml`, by section and name."""


def get_setting(profile: model.Profile, path: str) -> Any:
    """Return a setting by its path in the file, such as `limits.ring`. Return None if its section is off."""
    value: Any = profile
    section = ""
    for name in path.split("."):
        value = getattr(value, KEYS[section][name].field, None)
        section = f"{section}.{name}" if section else name
    return value
