"""Profiles: the meaning of each key, the message of each mistake, and the same rules in the shipped schema."""

import copy
import json
import math
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import instrument
from instrument.errors import InstrumentError, ProfileError
from instrument.profile import json_schema
from instrument.profile import keys as module
from instrument.profile.keys import KEYS, load, loads
from instrument.profile.model import (
    COMPRESSIONS,
    COPY_FRAMEWORKS,
    DEVICE_DIRECTIONS,
    DIRECTIONS,
    FRAMEWORKS,
    KINDS,
    PROTOCOLS,
    SORT_KEYS,
    STATES,
    TIME_UNITS,
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
    PercentileThreshold,
    Profile,
    Prometheus,
    Rate,
    Schedule,
    Summary,
    Where,
)
from instrument.profile.presets import PRESETS
from instrument.profile.values import DURATION_UNITS, SIZE_UNITS

SCHEMA = json.loads(Path(module.__file__).with_name("profile.schema.json").read_text("utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)


def read(text: str, environ: Mapping[str, str] | None = None) -> Profile:
    return loads(text, name="profile.yaml", environ=environ or {})


def problems(text: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ProfileError) as caught:
        read(text, environ)
    return caught.value.problems


def problem(text: str, environ: Mapping[str, str] | None = None) -> str:
    (only,) = problems(text, environ)
    return only


def refusals(text: str) -> tuple[str, ...]:
    """The problems of a text, none if it is a profile."""
    try:
        read(text)
    except ProfileError as error:
        return error.problems
    return ()


class TestWhatEachKeyGives:
    @pytest.mark.parametrize(
        "text", ["", "\n", "# only a comment\n", "---\n", "{}", "~", "\ufeff", "functions:\nexport:\n"]
    )
    def test_an_empty_profile_is_all_defaults(self, text: str) -> None:
        assert read(text) == Profile()

    def test_the_whole_language_reads_as_documented(self) -> None:
        text = """
            service: chat-7b
            tracer_option: OpDetail
            state: GPU
            functions:
              - match: "chat.server:handle"
                kind: request
              - match: "chat.engine:Engine.step"
                name: engine.step
                device: true
              - match: ["chat.text:*", "!chat.text:_*"]
                kind: phase
            layers:
              - match: "model.layers.*.mlp"
                type: [Linear, Conv2d]
              - {match: "!lm_head", type: Linear, device: yes, name: linear}
            copies:
              - directions: [h2d, d2h]
                min_bytes: 64KiB
              - {frameworks: [cupy, torch], directions: h2h}
              - {}
            loaders: auto
            phases: auto
            comm: auto
            frameworks: [sklearn, {name: onnxruntime}]
            schedule: {skip_first: 5, closed: 1, ready: 2, record: 4, repeat: 3}
            capture: {sample: 0.001, slow: 250ms, errors: false, limit: 30/min, before: 2s}
            limits: {ring: 1MiB, spans_per_request: 7, disk: 1GB}
            device: {cuda: off, gil: release, nvml: 100ms, host: 1m}
            control: {watch: true}
            export:
              chrome: {path: "{service}/{pid}/{window}.json"}
              otlp:
                endpoint: https://collector:4318
                headers: {authorization: "Bearer x", X-Tenant: "7"}
                timeout: 1.5s
                compression: none
              summary: {to: out/summary.txt, views: [events], sorted_by: total, rows: 50, least: 50us, unit: s,
                        per_thread: true, corrected: true, skip_first: 2}
        """
        profile = read(text)
        assert profile.service == "chat-7b"
        assert (profile.tracer_option, profile.state) == ("OpDetail", "GPU")
        assert profile.functions == (
            FunctionRule(("chat.server:handle",), kind="request", text="chat.server:handle"),
            FunctionRule(("chat.engine:Engine.step",), name="engine.step", device=True, text="chat.engine:Engine.step"),
            FunctionRule(("chat.text:*",), ("chat.text:_*",), kind="phase", text="chat.text:*, !chat.text:_*"),
        )
        assert profile.layers == (
            LayerRule(
                ("model.layers.*.mlp",), types=("Linear", "Conv2d"), text="model.layers.*.mlp, type Linear Conv2d"
            ),
            LayerRule((), ("lm_head",), ("Linear",), name="linear", device=True, text="!lm_head, type Linear"),
        )
        assert [rule.kind for rule in profile.layers] == ["layer", "layer"]
        assert profile.copies == (
            CopyRule(("h2d", "d2h"), 65536, text="h2d d2h from 65536 B"),
            CopyRule(("h2h",), frameworks=("cupy", "torch"), text="h2h from 0 B of cupy torch"),
            CopyRule(DEVICE_DIRECTIONS, 0, text="h2d d2h d2d p2p from 0 B"),
        )
        assert (profile.loaders, profile.phases, profile.comm) == ("auto", "auto", "auto")
        assert profile.frameworks == (FrameworkRule("sklearn"), FrameworkRule("onnxruntime"))
        assert [rule.line for rule in profile.functions] == [6, 8, 11]
        assert profile.schedule == Schedule(record=4, skip_first=5, closed=1, ready=2, repeat=3)
        assert profile.capture == Capture(0.001, 250_000_000, False, Rate(30, 60 * 10**9), 2 * 10**9)
        assert profile.limits == Limits(2**20, 7, 10**9)
        assert profile.device == Device("off", 10**8, 60 * 10**9, "release")
        assert profile.control == Control(True)
        assert profile.export.chrome == Chrome("{service}/{pid}/{window}.json")
        assert profile.export.otlp == Otlp(
            "https://collector:4318/v1/traces",
            headers=(("authorization", "Bearer x"), ("X-Tenant", "7")),
            timeout_ns=1_500_000_000,
            compression="none",
        )
        assert profile.export.summary == Summary(
            "out/summary.txt", ("events",), "total", 50, 50_000, "s", per_thread=True, corrected=True, skip_first=2
        )

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("export:\n  chrome:", (True, False, False)),
            ("export: {otlp: {}}", (False, True, False)),
            ("export: {summary: null, chrome: {}}", (True, False, True)),
            ("export: {otlp: {endpoint: ''}}", (False, False, False)),
            ("export: {}", (False, False, False)),
            ("export: {chrome: off, otlp: off, summary: off}", (False, False, False)),
        ],
    )
    def test_an_export_is_on_with_its_key_and_off_without(self, text: str, expected: tuple[bool, ...]) -> None:
        export = read(text).export
        assert (export.chrome is not None, export.otlp is not None, export.summary is not None) == expected

    def test_metrics_for_scrapes_have_an_address(self) -> None:
        default, given = read("export:\n  prometheus:"), read("export: {prometheus: {listen: '[::1]:80'}}")
        assert default.export.prometheus == Prometheus("127.0.0.1:9464")
        assert given.export.prometheus == Prometheus("[::1]:80")
        assert read("export: {prometheus: off}").export.is_empty

    def test_the_function_whose_calls_are_steps_is_recorded_as_one(self) -> None:
        profile = read("schedule: {record: 1, step: 'train:step'}\nfunctions: [{match: 'train:*'}]")
        assert profile.schedule == Schedule(record=1, step="train:step")
        assert [(rule.match, rule.kind) for rule in profile.functions] == [
            (("train:*",), "op"),
            (("train:step",), "step"),
        ]

    def test_two_steps_are_short_for_a_schedule(self) -> None:
        assert read("schedule: [2, 10]").schedule == Schedule(record=8, skip_first=2, repeat=1)

    def test_a_digest_is_the_same_for_profiles_that_ask_for_the_same(self) -> None:
        text = "functions: [{match: 'a:b'}]\nexport: {otlp: {headers: {authorization: %s}}}"
        assert read(text % "x").digest == read("# moved\n" + text % "secret").digest
        assert len({read(f"service: {name}").digest for name in "abc"} | {Profile().digest}) == 4

    @pytest.mark.parametrize("word", ["off", '"off"', "no", "false", "OFF"])
    def test_off_is_off_however_yaml_reads_it(self, word: str) -> None:
        assert read(f"device: {{cuda: {word}, nvml: {word}, host: {word}}}").device == Device("off", None, None)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("0s", 0),
            ("100ns", 100),
            ("10us", 10_000),
            ("250ms", 250_000_000),
            ("1s", 10**9),
            ("2m", 120 * 10**9),
            ("1h", 3600 * 10**9),
            ("1.5s", 1_500_000_000),
            ("0.0015us", 1),
            ("0.000000001s", 1),
            ('"3s"', 3 * 10**9),
        ],
    )
    def test_a_duration_is_in_nanoseconds(self, text: str, expected: int) -> None:
        assert read(f"capture: {{before: {text}}}").capture.before_ns == expected

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("4096B", 4096),
            ("10kB", 10_000),
            ("500MB", 5 * 10**8),
            ("64KiB", 65536),
            ("1.5MiB", 1572864),
            ("1GiB", 2**30),
            ("1GB", 10**9),
            ("2TB", 2 * 10**12),
            ("1TiB", 2**40),
        ],
    )
    def test_a_size_is_in_bytes(self, text: str, expected: int) -> None:
        assert read(f"limits: {{disk: {text}}}").limits.disk_bytes == expected

    @given(
        number=st.integers(0, 10**6),
        fraction=st.text("0123456789", max_size=9),
        unit=st.sampled_from([*DURATION_UNITS]),
    )
    def test_a_decimal_duration_is_exact_and_rounded_down(self, number: int, fraction: str, unit: str) -> None:
        text = f"{number}.{fraction}{unit}" if fraction else f"{number}{unit}"
        exact = int(f"{number}{fraction}") * DURATION_UNITS[unit]
        assert read(f"capture: {{before: {text}}}").capture.before_ns == exact // 10 ** len(fraction)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("5/s", Rate(5, 10**9)), ("30/min", Rate(30, 60 * 10**9)), ("1/h", Rate(1, 3600 * 10**9))],
    )
    def test_a_rate_counts_in_a_second_a_minute_or_an_hour(self, text: str, expected: Rate) -> None:
        assert read(f"capture: {{limit: {text}}}").capture.limit == expected

    @pytest.mark.parametrize("text", ["0", "1", "0.5", "1e-3", "5e-1", ".5", "1.", "+1"])
    def test_a_share_may_be_written_as_any_decimal(self, text: str) -> None:
        assert read(f"capture: {{sample: {text}}}").capture.sample == float(text)

    @pytest.mark.parametrize(
        "pattern",
        [
            "a:b",
            "a.b:C.d",
            "*:*",
            "**:**",
            "a.**:f",
            "a.*.c:*",
            "a_*_b:__init__",
            "a.**.c:**.f",
            "*b:*a*",
            "é:ü",
            "!a:b",
        ],
    )
    def test_a_function_pattern_is_a_module_and_a_qualname(self, pattern: str) -> None:
        assert read(f"functions: [{{match: ['x:y', '{pattern}']}}]").functions[0].match[0] == "x:y"

    @pytest.mark.parametrize("pattern", ["mlp", "layers.0.mlp", "layers.*.mlp", "**.attn", "h.**", "block-1.*", "**"])
    def test_a_layer_pattern_is_a_dotted_path(self, pattern: str) -> None:
        assert read(f"layers: [{{match: '{pattern}'}}]").layers[0].match == (pattern,)

    def test_one_of_a_list_may_stand_by_itself(self) -> None:
        profile = read("layers: [{type: Linear}]\ncopies: [{directions: h2d}]\nexport: {summary: {views: brief}}")
        assert profile.layers[0].types == ("Linear",)
        assert profile.copies[0].directions == ("h2d",)
        assert profile.export.summary == Summary()

    def test_auto_takes_every_framework_and_reports_that_none_was_named(self) -> None:
        rules = read("frameworks: auto").frameworks
        assert [rule.name for rule in rules] == list(FRAMEWORKS)
        assert all(rule.auto for rule in rules)
        assert not read("frameworks: [jax]").frameworks[0].auto

    def test_a_name_may_hold_what_messages_and_paths_are_made_of(self) -> None:
        name = 'a/b%s: "c"\n{pid} 漢字 🚀'
        assert (
            read(f"functions: [{{match: 'a:b', name: {json.dumps(name, ensure_ascii=False)}}}]").functions[0].name
            == name
        )

    def test_anchors_and_merge_keys_are_plain_yaml(self) -> None:
        text = """
            functions:
              - &base {match: "a:b", device: true, kind: phase}
              - {<<: *base, match: "a:c"}
              - {<<: [{kind: step}, *base], name: n}
        """
        assert read(text).functions == (
            FunctionRule(("a:b",), kind="phase", device=True, text="a:b"),
            FunctionRule(("a:c",), kind="phase", device=True, text="a:c"),
            FunctionRule(("a:b",), kind="step", device=True, name="n", text="a:b"),
        )


class TestFunctionRules:
    def test_a_declared_phase_makes_the_kind_where_none_is_given(self) -> None:
        text = "functions: [{match: 'a:b', phase: compute}, {match: 'a:c', phase: post, kind: op}]"
        assert [(rule.kind, rule.phase) for rule in read(text).functions] == [("phase", "compute"), ("op", "post")]

    def test_a_where_condition_selects_the_kept_calls(self) -> None:
        assert read("functions: [{match: 'a:b', where: {min_duration: 50us}}]").functions[0].min_ns == 50_000

    def test_attributes_are_one_argument_or_a_list_and_named_after_it(self) -> None:
        one = read("functions: [{match: 'a:b', attributes: {argument: prompt}}]").functions[0]
        assert one.attributes == (Argument("prompt", "size", "prompt.size"),)
        many = read(
            """
            functions:
              - match: "a:b"
                attributes:
                  - {argument: request.model, record: value}
                  - {argument: x, record: type}
                  - {argument: x, name: length}
            """
        ).functions[0]
        assert many.attributes == (
            Argument("request.model", "value", "request.model"),
            Argument("x", "type", "x.type"),
            Argument("x", "size", "length"),
        )

    @pytest.mark.parametrize(
        ("rule", "problem"),
        [
            ("phase: [queue]", "functions[0].phase: found a list; allowed: text"),
            ("where: {min_duration: 50}", "where.min_duration: found the number 50; allowed: a number with a unit"),
            ("where: {min: 5us}", "functions[0].where: found the unknown key 'min'; allowed: min_duration"),
            ("attributes: {record: size}", "functions[0].attributes.argument: found nothing; allowed: a parameter"),
            ("attributes: [{argument: 'x()'}]", "attributes[0].argument: found 'x()'; allowed: a parameter's"),
            ("attributes: [{argument: x, record: repr}]", "record: found 'repr'; allowed: size, type, value"),
            ("key: 'x[].id'", "functions[0].key: found 'x[].id'; allowed: a parameter's name or return"),
            ("key: {argument: 'return[]'}", "functions[0].key.argument: found 'return[]'; allowed: a parameter's name"),
        ],
    )  # fmt: skip
    def test_mistakes_say_what_is_allowed(self, rule: str, problem: str) -> None:
        with pytest.raises(ProfileError) as caught:
            read(f"functions: [{{match: 'a:b', {rule}}}]")
        assert problem in str(caught.value)


class TestProfiles:
    def test_two_that_ask_for_the_same_are_equal_wherever_they_stand(self) -> None:
        text = "functions:\n  - match: 'a:b'\n"
        moved = loads("# moved\n\n" + text, name="other.yaml", environ={"OTEL_SERVICE_NAME": "unknown_service"})
        assert moved == read(text)
        assert moved.functions[0].line != read(text).functions[0].line
        assert moved.source == "other.yaml"

    def test_one_may_be_copied_hashed_and_pickled(self) -> None:
        profile = read("functions: [{match: 'a:b'}]\nexport: {otlp: }")
        assert copy.deepcopy(profile) == profile
        assert pickle.loads(pickle.dumps(profile)) == profile
        assert hash(profile) == hash(read("functions: [{match: 'a:b'}]\nexport: {otlp: }"))

    def test_one_cannot_be_changed(self) -> None:
        with pytest.raises(AttributeError):
            read("").service = "x"  # type: ignore[misc]

    def test_the_repr_keeps_the_headers_to_itself(self) -> None:
        assert "secret" not in repr(read("export: {otlp: {headers: {authorization: secret}}}"))

    def test_importing_the_room_does_not_import_yaml(self) -> None:
        code = "import sys, instrument.profile.keys; sys.exit('yaml' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestReferences:
    ENVIRON: Mapping[str, str] = {
        "NAME": "chat",
        "EMPTY": "",
        "HALF": "0.5",
        "NUMBER": "7",
        "YES": "yes",
        "NEST": "${NAME}",
    }

    @pytest.mark.parametrize(
        ("written", "expected"),
        [
            ("${NAME}", "chat"),
            ("${env:NAME}", "chat"),
            ('"${NAME}"', "chat"),
            ("a-${NAME}-b-${NAME}", "a-chat-b-chat"),
            ("${UNSET:-other}", "other"),
            ("${EMPTY:-other}", "other"),
            ("${env:UNSET:-o t:h-er}", "o t:h-er"),
            ("${NAME:-other}", "chat"),
            ("x${UNSET}", "x"),
            ("x${UNSET:-}", "x"),
            ("$${NAME}", "${NAME}"),
            ("$$${NAME}", "$chat"),
            ("$$", "$"),
            ("a$b", "a$b"),
            ("$5", "$5"),
            ("${NEST}", "${NAME}"),
            ('"${NUMBER}"', "7"),
            ("v${NUMBER}", "v7"),
            ("${UNSET}", "unknown_service"),
            ("${EMPTY}", "unknown_service"),
        ],
    )
    def test_a_reference_is_replaced_by_its_variable(self, written: str, expected: str) -> None:
        assert read(f"service: {written}", self.ENVIRON).service == expected

    def test_a_lone_unquoted_reference_takes_the_type_of_its_value(self) -> None:
        text = """
            capture:
              sample: ${HALF}
              errors: ${YES}
              slow: ${UNSET:-0}
            limits:
              spans_per_request: ${NUMBER}
        """
        profile = read(text, self.ENVIRON)
        assert profile.capture == Capture(0.5, 0, True)
        assert profile.limits.spans_per_request == 7

    @pytest.mark.parametrize("written", ['"${NUMBER}"', "${NUMBER}${NUMBER}", "${NAME}"])
    def test_a_quoted_or_embedded_reference_stays_text(self, written: str) -> None:
        message = problem(f"limits:\n  spans_per_request: {written}", self.ENVIRON)
        found = written.strip('"')
        assert message.startswith(
            f"profile.yaml:2:22: limits.spans_per_request: found '{found}'; allowed: a whole number"
        )

    def test_a_value_cannot_bring_structure_of_its_own(self) -> None:
        environ = {"EVIL": "x\nstate: CPU"}
        assert read("service: ${EVIL}", environ) == Profile(service="x\nstate: CPU")

    def test_a_key_is_never_replaced(self) -> None:
        assert "the unknown key '${NAME}'" in problem("${NAME}: x", {"NAME": "service"})

    @pytest.mark.parametrize("written", ["${X:?e}", "${1X}", "${}", "${X", "${a b}", "${env:}", "a ${X-y} b", "${X:y}"])
    def test_a_malformed_reference_is_reported_with_its_place(self, written: str) -> None:
        message = problem(f"service: '{written}'")
        assert message.startswith("profile.yaml:1:10: service: found the malformed reference '${")
        assert message.endswith("allowed: ${VAR}, ${env:VAR}, ${VAR:-default}, and $$ for a dollar sign")


class TestPrecedence:
    def test_the_profile_wins_over_the_variable(self) -> None:
        profile = read("service: a", {"OTEL_SERVICE_NAME": "b"})
        assert (profile.service, profile.origins["service"]) == ("a", "profile")

    @pytest.mark.parametrize("text", ["", "service:", "service: ${UNSET}"])
    def test_the_variable_wins_over_the_default(self, text: str) -> None:
        profile = read(text, {"OTEL_SERVICE_NAME": "b"})
        assert (profile.service, profile.origins["service"]) == ("b", "OTEL_SERVICE_NAME")

    def test_an_empty_variable_counts_as_unset(self) -> None:
        profile = read("", {"OTEL_SERVICE_NAME": ""})
        assert (profile.service, profile.origins["service"]) == ("unknown_service", "default")

    def test_the_process_environment_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", "from-the-process")
        assert loads("").service == "from-the-process"

    @pytest.mark.parametrize(
        ("written", "environ", "expected", "origin"),
        [
            ("", {}, "http://localhost:4318/v1/traces", "default"),
            ("protocol: grpc", {}, "http://localhost:4317", "default"),
            ("endpoint: http://c:1", {}, "http://c:1/v1/traces", "profile"),
            ("endpoint: http://c:1/", {}, "http://c:1/v1/traces", "profile"),
            ("endpoint: http://c:1/own", {}, "http://c:1/own", "profile"),
            ("endpoint: 'http://c:1?k=v'", {}, "http://c:1/v1/traces?k=v", "profile"),
            ("endpoint: 'http://[::1]:4318'", {}, "http://[::1]:4318/v1/traces", "profile"),
            ("{endpoint: http://c:1, protocol: grpc}", {}, "http://c:1", "profile"),
            ("endpoint: http://c:1", {"TRACES_ENDPOINT": "http://t"}, "http://c:1/v1/traces", "profile"),
            ("", {"ENDPOINT": "http://e"}, "http://e/v1/traces", "OTEL_EXPORTER_OTLP_ENDPOINT"),
            ("", {"ENDPOINT": "http://e/p/"}, "http://e/p/v1/traces", "OTEL_EXPORTER_OTLP_ENDPOINT"),
            ("protocol: grpc", {"ENDPOINT": "http://e"}, "http://e", "OTEL_EXPORTER_OTLP_ENDPOINT"),
            (
                "",
                {"TRACES_ENDPOINT": "http://t", "ENDPOINT": "http://e"},
                "http://t",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            ),
            ("endpoint: '${OTEL_EXPORTER_OTLP_ENDPOINT:-http://l}'", {}, "http://l/v1/traces", "profile"),
            (
                "endpoint: '${OTEL_EXPORTER_OTLP_ENDPOINT}'",
                {"ENDPOINT": "http://e/p"},
                "http://e/p/v1/traces",
                "profile",
            ),
            ("endpoint: '${OTHER}'", {"OTHER": "http://e/p"}, "http://e/p", "profile"),
        ],
    )
    def test_the_endpoint_is_the_final_url(
        self, written: str, environ: dict[str, str], expected: str, origin: str
    ) -> None:
        named = {name if name == "OTHER" else f"OTEL_EXPORTER_OTLP_{name}": value for name, value in environ.items()}
        body = written if written.startswith("{") else f"{{{written}}}"
        profile = read(f"export:\n  otlp: {body}", named)
        assert profile.export.otlp is not None
        assert profile.export.otlp.endpoint == expected
        assert profile.origins["export.otlp.endpoint"] == origin

    @pytest.mark.parametrize(
        ("setting", "value", "key", "field", "expected"),
        [
            ("PROTOCOL", "grpc", "protocol", "protocol", "grpc"),
            ("HEADERS", "a=b%20c, d=e=f,", "headers", "headers", (("a", "b c"), ("d", "e=f"))),
            ("TIMEOUT", "2.5", "timeout", "timeout_ns", 2_500_000_000),
            ("COMPRESSION", "none", "compression", "compression", "none"),
        ],
    )
    @pytest.mark.parametrize("signal", ["", "TRACES_"])
    def test_the_other_variables_of_otlp_count_too(
        self, signal: str, setting: str, value: str, key: str, field: str, expected: Any
    ) -> None:
        variable = f"OTEL_EXPORTER_OTLP_{signal}{setting}"
        environ = {f"OTEL_EXPORTER_OTLP_{setting}": "not this one"} | {variable: value}
        profile = read("export: {otlp: }", environ)
        assert getattr(profile.export.otlp, field) == expected
        assert profile.origins[f"export.otlp.{key}"] == variable

    def test_a_variable_that_is_not_understood_is_named_and_the_next_source_counts(self) -> None:
        names = ("PROTOCOL", "TIMEOUT", "HEADERS", "COMPRESSION", "CERTIFICATE", "CLIENT_CERTIFICATE")
        environ = {f"OTEL_EXPORTER_OTLP_{name}": "secret!" for name in names}
        environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = "c:4317"
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://c"
        profile = read("export:\n  otlp: {}", environ)
        assert profile.export.otlp == Otlp("http://c/v1/traces")
        paths = ("endpoint", "protocol", "headers", "timeout", "compression", "certificate", "client_certificate")
        assert [remark.partition(" (from ")[0] for remark in profile.remarks] == [
            f"export.otlp.{path}" for path in paths
        ]
        assert "http/protobuf is used" in profile.remarks[1]
        assert "secret" not in profile.remarks[2]

    @pytest.mark.parametrize(
        "otlp",
        [
            "{}",
            "{endpoint: '${OTEL_EXPORTER_OTLP_ENDPOINT}'}",
            "{endpoint: '${OTEL_EXPORTER_OTLP_ENDPOINT:-}'}",
            "auto",
        ],
    )
    def test_an_endpoint_that_is_not_understood_means_that_nothing_is_sent(self, otlp: str) -> None:
        profile = read(f"export:\n  otlp: {otlp}", {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"})
        assert profile.export.otlp is None
        assert "did you mean 'http://collector:4318'" in profile.remarks[0]

    def test_a_reference_to_a_variable_that_is_not_understood_counts_as_not_set(self) -> None:
        text = "tracer_option: ${OTEL_X:-OpDetail}\ncapture: {sample: '${OTEL_X}'}"
        profile = read(text, {"OTEL_X": "7 %"})
        assert (profile.tracer_option, profile.capture) == ("OpDetail", Capture())
        assert [remark.partition(": found")[0] for remark in profile.remarks] == ["tracer_option", "capture.sample"]

    def test_an_impossible_setting_of_a_variable_is_not_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        profile = read("export: {otlp: }", {"OTEL_EXPORTER_OTLP_CLIENT_KEY": __file__})
        assert profile.export.otlp == Otlp()
        assert "without its client_certificate" in profile.remarks[0]
        monkeypatch.setattr("instrument.profile.keys.find_spec", lambda name: None)
        profile = read("export: {otlp: }", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
        assert profile.export.otlp is None
        assert "instrument-sdk[grpc]" in profile.remarks[0]

    @pytest.mark.parametrize(
        ("environ", "sends", "sample", "remarks"),
        [
            ({"OTEL_SDK_DISABLED": "True"}, False, 1.0, ("OTEL_SDK_DISABLED=true", "OTEL_SDK_DISABLED=true")),
            ({"OTEL_TRACES_EXPORTER": "none"}, True, 0.0, ("OTEL_TRACES_EXPORTER=none",)),
            ({"OTEL_TRACES_SAMPLER": "always_off"}, True, 0.0, ("OTEL_TRACES_SAMPLER=always_off",)),
            ({"OTEL_METRICS_EXPORTER": "none"}, True, 1.0, ("OTEL_METRICS_EXPORTER=none",)),
            ({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}, False, 1.0, ("none", "none")),
            ({"OTEL_SDK_DISABLED": "false", "OTEL_TRACES_EXPORTER": "otlp", "OTEL_PYTHON_X": "1"}, True, 1.0, ()),
            ({"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_X": "1"}, True, 1.0, ("OTEL_BSP_X, OTEL_TRACES_EXPORTER",)),
        ],
    )
    def test_the_switches_of_opentelemetry_are_followed_and_other_variables_of_it_are_named(
        self, environ: dict[str, str], sends: bool, sample: float, remarks: tuple[str, ...]
    ) -> None:
        profile = read("export: {otlp: }", environ)
        assert (profile.export.otlp is not None) == sends
        assert (profile.capture.sample, profile.capture.is_off) == (sample, not sample)
        assert len(profile.remarks) == len(remarks)
        assert all(remark.endswith(end) for remark, end in zip(profile.remarks, remarks, strict=True))

    def test_the_variables_of_otlp_do_not_matter_when_it_is_off(self) -> None:
        profile = read("", {"OTEL_EXPORTER_OTLP_TIMEOUT": "bad", "OTEL_SDK_DISABLED": "true"})
        assert (profile, profile.remarks) == (Profile(), ())

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("export: otlp", Export(otlp=Otlp())),
            ("export: [otlp, summary]", Export(otlp=Otlp(), summary=Summary())),
            ("export: {otlp: auto}", Export()),
        ],
    )
    def test_a_way_out_is_named_by_a_word(self, text: str, expected: Export) -> None:
        assert read(text, {}).export == expected

    def test_the_preset_of_servers_exports_where_a_variable_names_a_collector(self) -> None:
        assert read("preset: serving", {}).export.otlp is None
        named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}
        assert read("preset: serving", named).export.otlp == Otlp("http://c/v1/traces")
        assert read("preset: serving\nexport: {otlp: off}", named).export.otlp is None


class TestMistakes:
    def test_all_of_a_file_are_reported_at_once_in_their_order(self) -> None:
        text = """\
service: 007
tracer_opton: OpDetail
functions:
  - match: chat.engine.Engine.step
    kind: requst
  - kind: op
layers:
  - match: "a..b"
capture: {slow: 250, sample: 2}
export:
  otlp: {endpoint: collector}
"""
        assert [message.partition(": found")[0] for message in problems(text)] == [
            "profile.yaml:1:10: service",
            "profile.yaml:2:1: profile",
            "profile.yaml:4:12: functions[0].match",
            "profile.yaml:5:11: functions[0].kind",
            "profile.yaml:6:5: functions[1].match",
            "profile.yaml:8:12: layers[0].match",
            "profile.yaml:9:17: capture.slow",
            "profile.yaml:9:30: capture.sample",
            "profile.yaml:11:20: export.otlp.endpoint",
        ]

    def test_the_error_is_ours_and_a_value_error(self) -> None:
        with pytest.raises(InstrumentError) as caught:
            read("a: 1\nb: 2")
        assert isinstance(caught.value, ValueError)
        assert str(caught.value) == "\n".join(problems("a: 1\nb: 2"))

    @pytest.mark.parametrize(
        ("text", "near"),
        [
            ("servce: x", "service"),
            ("tracer_option: opdetail", "OpDetail"),
            ("state: all", "All"),
            ("functions: [{match: 'a:b', knd: op}]", "kind"),
            ("functions: [{match: 'a:b', kind: requst}]", "request"),
            ("functions: [{match: 'a:b', device: ture}]", "true"),
            ("functions: [{match: chat.server.handle}]", "chat.server:handle"),
            ("functions: [{match: chat.engine.Engine.step}]", "chat.engine:Engine.step"),
            ("layers: [{type: torch.nn.Linear}]", "Linear"),
            ("copies: [{directions: [H2D]}]", "h2d"),
            ("copies: [{frameworks: [pytorch]}]", "torch"),
            ("copies: [{framework: torch}]", "frameworks"),
            ("copies: [{min_bytes: 65536}]", "65536B"),
            ("copies: [{min_bytes: 64Kib}]", "64KiB"),
            ("copies: [{min_bytes: 64 KiB}]", "64KiB"),
            ("frameworks: [onnx-runtime]", "onnxruntime"),
            ("frameworks: [{name: sentence-transformers}]", "sentence_transformers"),
            ("frameworks: scikit-learn", "sklearn"),
            ("frameworks: Auto", "auto"),
            ("capture: {slow: 250}", "250ms"),
            ("capture: {slow: '250'}", "250ms"),
            ("capture: {slow: 5sec}", "5s"),
            ("capture: {slow: p99 x 1.5}", "p99*1.5"),
            ("capture: {where: {country: NO}}", '"NO"'),
            ("capture: {before: 1.5}", "1.5s"),
            ("capture: {limit: 30}", "30/min"),
            ("export: {chrome: {path: '{servise}.json'}}", "{service}.json"),
            ("export: {recording: {path: '{service}-{rum}.json.gz'}}", "{service}-{run}.npz"),
            ("export: {otlp: {endpoint: 'localhost:4318'}}", "http://localhost:4318"),
            ("export: {otlp: {compression: gzipp}}", "gzip"),
            ("export: {prometheus: {listen: ':9464'}}", "127.0.0.1:9464"),
            ("export: {summary: {to: stdrr}}", "stderr"),
            ("export: {summary: {views: [event]}}", "events"),
            ("export: {summary: {sorted_by: avg}}", "ave"),
            ("service: 007", '"007"'),
            ("service: off", '"off"'),
            ("service: 2024-01-01", '"2024-01-01"'),
        ],
    )
    def test_the_message_names_what_was_perhaps_meant(self, text: str, near: str) -> None:
        assert problem(text).endswith(f"; did you mean '{near}'?")

    @pytest.mark.parametrize(
        ("text", "known"),
        [
            ("functions: [{match: 'a:b', kind: x}]", KINDS),
            ("export: {summary: {views: [x]}}", VIEWS),
            ("export: {summary: {sorted_by: x}}", SORT_KEYS),
            ("copies: [{directions: [x]}]", DIRECTIONS),
            ("copies: [{frameworks: x}]", COPY_FRAMEWORKS),
            ("loaders: on", ("auto", "off")),
            ("frameworks: [x]", FRAMEWORKS),
            ("x: 1", tuple(KEYS[""])),
            ("limits: {x: 1}", tuple(KEYS["limits"])),
        ],
    )
    def test_the_message_names_all_that_is_allowed(self, text: str, known: tuple[str, ...]) -> None:
        assert problem(text).endswith(f"; allowed: {', '.join(known)}")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("- a", "1:1: profile: found a list; allowed: a mapping of service, "),
            ("just text", "1:1: profile: found 'just text'; allowed: a mapping of service, "),
            ("functions: {match: 'a:b'}", "1:12: functions: found a mapping; allowed: a list of rules"),
            ("functions: ['a:b']", "1:13: functions[0]: found 'a:b'; allowed: a mapping of match, "),
            ("functions: [null]", "1:13: functions[0]: found nothing"),
            ("frameworks: [null]", "1:14: frameworks[0]: found nothing; allowed: onnxruntime, "),
            ("frameworks: 1", "1:13: frameworks: found the number 1; allowed: auto, off, or a list of onnxruntime, "),
            ("frameworks: [{}]", "1:14: frameworks[0].name: found nothing; allowed: one of onnxruntime, "),
            ("frameworks: [jax, jax]", "1:19: frameworks[1]: found jax twice; allowed: each framework once (first in"),
            (
                "frameworks: [{name: onnxruntime, nodes: true}]",
                "1:34: frameworks[0]: found the key 'nodes', which was removed; allowed: SessionOptions",
            ),
            ("functions: [{match: []}]", "1:21: functions[0].match: found an empty list"),
            ("functions: [{match: [null]}]", "1:22: functions[0].match[0]: found nothing"),
            ("functions: [{match: '!a:b'}]", "1:21: functions[0].match: found only patterns with '!'"),
            ("functions: [{name: x}]", "1:13: functions[0].match: found nothing; allowed: module:qualname"),
            ("functions: [{match: {a: b}}]", "1:21: functions[0].match: found a mapping; allowed: text"),
            ("layers: [{name: x}]", "1:10: layers[0]: found neither match nor type"),
            ("layers: [{match: '!a'}]", "1:10: layers[0]: found only patterns with '!' and no type"),
            ("layers: [{type: Linear, kind: op}]", "1:25: layers[0]: found the unknown key 'kind'"),
            ("state: [All]", "1:8: state: found a list; allowed: CPU, GPU, All"),
            ("state: on", "1:8: state: found the boolean on"),
            ("service: ''", "1:10: service: found an empty text"),
            ("service: x\nservice: y", "2:1: profile: found the key 'service' twice; allowed: once (first in line 1)"),
            ("? [a]\n: b", "1:3: profile: found a list or mapping as a key"),
            ("service: !!python/name:os.system x", "1:10: service: found the tag"),
            ("service: !secret x", "1:10: service: found the tag '!secret'"),
            ("!x {service: y}", "1:1: profile: found the tag '!x'"),
            ("state: !!set {a}", "1:8: state: found the tag"),
            ("limits: {<<: 5}", "1:14: limits.<<: found the number 5; allowed: an alias of a mapping"),
            ("schedule: {ready: 1}", "1:11: schedule.record: found nothing; allowed: how many steps"),
            ("schedule: {record: 0}", "1:20: schedule.record: found the number 0; allowed: a whole number from 1"),
            ("schedule: [5, 5]", "1:11: schedule: found [5, 5]; allowed: [start, end] with 0 <= start < end"),
            ("schedule: [1, 2, 3]", "1:11: schedule: found [1, 2, 3]"),
            ("schedule: [-1, 2]", "1:12: schedule[0]: found the number -1"),
            (
                "schedule: {record: 1, step: train.Trainer.step}",
                "1:29: schedule.step: found 'train.Trainer.step'; allowed: module:qualname of one function, such as "
                "train:step; did you mean 'train:Trainer.step'?",
            ),
            ("schedule: {record: 1, step: 't:*'}", "1:29: schedule.step: found 't:*'; allowed: module:qualname"),
            ("schedule: 5", "1:11: schedule: found the number 5; allowed: a mapping of skip_first"),
            ("capture: {sample: 1.01}", "1:19: capture.sample: found the number 1.01; allowed: a number from 0 to 1"),
            ("capture: {sample: .nan}", "1:19: capture.sample: found the number .nan"),
            ("capture: {sample: '0.5'}", "1:19: capture.sample: found '0.5'"),
            ("capture: {errors: 1}", "1:19: capture.errors: found the number 1; allowed: true, false"),
            ("capture: {slow: -1s}", "1:17: capture.slow: found '-1s'"),
            ("capture: {slow: 1:30}", "1:17: capture.slow: found the number 1:30"),
            ("capture: {slow: 999999999h}", "1:17: capture.slow: found '999999999h'"),
            ("capture: {limit: 0/min}", "1:18: capture.limit: found '0/min'"),
            ("limits: {spans_per_request: 010}", "1:29: limits.spans_per_request: found the number 010"),
            ("limits: {spans_per_request: 1:30}", "1:29: limits.spans_per_request: found the number 1:30"),
            ("limits: {spans_per_request: 5.0}", "1:29: limits.spans_per_request: found the number 5.0"),
            ("limits: {ring: 1KiB}", "1:16: limits.ring: found '1KiB'; allowed: a number with a unit"),
            ("control: {socket: auto}", "1:11: control: found the key 'socket', which was removed"),
            ("control: {watch: 1s}", "1:18: control.watch: found '1s'"),
            ("device: {nvml: 1ms}", "1:16: device.nvml: found '1ms'; allowed: auto, off, or a number with a unit"),
            ("device: {host: often}", "1:16: device.host: found 'often'; allowed: auto, off, or a number with a unit"),
            ("device: {nvml: 0}", "1:16: device.nvml: found the number 0"),
            ("device: {nvml: on}", "1:16: device.nvml: found the boolean on"),
            (
                "export: {chrome: true}",
                "1:18: export.chrome: found the boolean true; allowed: off, or a mapping of path",
            ),
            ("export: {chrome: {path: 'x{host}'}}", "1:25: export.chrome.path: found 'x{host}'"),
            ("export: {chrome: {path: 'x{pid'}}", "1:25: export.chrome.path: found 'x{pid'"),
            ("export: {chrome: {path: '{pid!r}'}}", "1:25: export.chrome.path: found '{pid!r}'"),
            ("export: {otlp: {endpoint: 'ftp://c'}}", "1:27: export.otlp.endpoint: found 'ftp://c'; allowed: http://"),
            ("export: {otlp: {endpoint: 'http://'}}", "1:27: export.otlp.endpoint: found 'http://'"),
            (
                "export: {prometheus: {listen: '[::1]:70000'}}",
                "1:31: export.prometheus.listen: found '[::1]:70000'; allowed: host:port",
            ),
            (
                "export: {otlp: {endpoint: 'http://c:70000'}}",
                "1:27: export.otlp.endpoint: found 'http://c:70000' (Port",
            ),
            ("export: {otlp: {endpoint: 'http://c d'}}", "1:27: export.otlp.endpoint: found 'http://c d'"),
            ("export: {otlp: {headers: {'a b': c}}}", "1:27: export.otlp.headers: found the header name 'a b'"),
            ("export: {summary: {to: ''}}", "1:24: export.summary.to: found an empty text"),
            (r'service: "a\0b"', "1:10: service: found a NUL or half of a surrogate pair"),
            (r'service: "\ud800"', "1:10: service: found a NUL or half of a surrogate pair"),
        ],
    )
    def test_the_message_says_where_what_and_what_is_allowed(self, text: str, expected: str) -> None:
        assert problem(text).startswith(f"profile.yaml:{expected}")

    @pytest.mark.parametrize(
        "pattern", ["a", "a:", ":b", "a::b", "a:b:c", "a..b:c", ".a:b", "a.:b", "a:b.", "a b:c", "a:<locals>"]
    )
    @pytest.mark.parametrize("prefix", ["", "!"])
    def test_a_function_pattern_of_another_form_is_refused(self, prefix: str, pattern: str) -> None:
        assert "allowed: module:qualname with one ':'" in problem(
            f"functions: [{{match: ['x:y', '{prefix}{pattern}']}}]"
        )

    @pytest.mark.parametrize("pattern", ["***", "a**", "**a", "a.b**c", "!!a", "!"])
    def test_two_stars_are_a_segment_of_their_own(self, pattern: str) -> None:
        assert "** alone any number of segments" in problem(f"functions: [{{match: ['x:y', '{pattern}:f']}}]")
        assert "** alone any number of segments" in problem(f"layers: [{{match: ['x', '{pattern}']}}]")

    @pytest.mark.parametrize("pattern", ["a:b", "a..b", ".a", "a.", "a b", "a[0]", "a?"])
    def test_a_layer_pattern_of_another_form_is_refused(self, pattern: str) -> None:
        assert "allowed: a dotted path such as model.layers.*.mlp" in problem(f"layers: [{{match: '{pattern}'}}]")

    @pytest.mark.parametrize(
        "text",
        [
            "export: {otlp: {endpoint: 'http://user:secret@host:1'}}",
            "export: {otlp: {endpoint: 'ftp://user:secret@host:1'}}",
            "export: {otlp: {endpoint: 'http://user:se/secret@host:1'}}",
            'export: {otlp: {headers: {authorization: "secret\\nx: y"}}}',
            "export: {otlp: {headers: {authorization: [secret]}}}",
            "export: {otlp: {headers: secret}}",
            "export: {otlp: {headers: {pin: 1234}}}",
        ],
    )
    def test_no_message_shows_a_secret(self, text: str) -> None:
        assert not re.search("secret|1234", problem(text))

    def test_a_message_is_one_printable_line_for_any_file_content(self) -> None:
        told = problems('"a\\nb": ["${"]\n"c\\x1b[31m": "${"\nstate: "x\\ny"')
        assert len(told) == 5
        assert all(message.isprintable() for message in told)

    def test_a_long_value_is_cut(self) -> None:
        assert len(problem(f"state: {'x' * 10_000}")) < 250

    @pytest.mark.parametrize(
        ("text", "place"),
        [
            ("service: [a, b", "1:15"),
            ("service: x\n\tstate: All", "2:1"),
            ("service: 'x", "1:12"),
            ("service: x: y", "1:11"),
            ("service: *nowhere", "1:10"),
            ("service: x\n---\nservice: y", "2:1"),
            ("%YAML 9.9\n---\nservice: x", "1:1"),
            ("service: a\0b", "1:11"),
            ("service: x\nstate: \x1b[31m", "2:8"),
        ],
    )
    def test_broken_yaml_is_reported_once_with_its_place(self, text: str, place: str) -> None:
        assert problem(text).startswith(f"profile.yaml:{place}: YAML: found ")

    def test_a_reference_that_needs_quotes_is_named(self) -> None:
        assert problem("limits: {ring: ${RING}}").endswith("(inside [] and {} a ${...} needs quotes)")


class TestHostileYaml:
    LAUGHS = "\n".join(
        f"x{level}: &x{level} [{', '.join([f'*x{level - 1}' if level else 'lol'] * 10)}]" for level in range(10)
    )

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            (LAUGHS, "more than 10000 values"),
            ("- x\n" * 20_000, "more than 10000 values"),
            ("{" + "a," * 20_000 + "}", "more than 10000 values"),
            ("[" * 100_000, "nesting deeper than 32"),
            ("- " * 100_000 + "x", "nesting deeper than 32"),
            ("{a: " * 1_000 + "}" * 1_000, "nesting deeper than 32"),
            ("a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 99)), "nesting deeper than 32"),
            ("&a [*a]", "an alias to a value that it is part of"),
            ("functions: &a [{match: *a}]", "an alias to a value that it is part of"),
            ("&a {<<: *a}", "an alias to a value that it is part of"),
            ("x" * (2**20 + 1), "more than 1 MiB"),
        ],
    )
    def test_a_bomb_is_refused_soon(self, text: str, found: str) -> None:
        began = time.process_time()
        assert found in problem(text)
        assert time.process_time() - began < 5

    def test_a_real_profile_is_far_from_the_bounds(self) -> None:
        rules = "".join(f"  - {{match: 'm{n}:f', kind: op, device: true, name: n{n}}}\n" for n in range(500))
        assert len(read("functions:\n" + rules).functions) == 500

    @given(st.text(max_size=60) | st.text("{}[]:-,&*!|>'\"$ \n\tab<%@?#", max_size=40))
    def test_any_text_is_a_profile_or_a_profile_error(self, text: str) -> None:
        for message in refusals(text):
            assert re.match(r"profile\.yaml:\d+:\d+: ", message)
            assert "\n" not in message


class TestFiles:
    def test_a_file_reads_as_its_text_does(self, tmp_path: Path) -> None:
        path = tmp_path / "profile.yaml"
        path.write_text("service: ünïcode\n", "utf-8")
        assert load(path, environ={}) == read("service: ünïcode")
        assert load(str(path), environ={}).source == str(path)

    @pytest.mark.parametrize(
        ("data", "found"),
        [
            (b"service: x\nstate: \xff", ":2:8: encoding: found the byte 0xff, which is not UTF-8"),
            ("service: x".encode("utf-16"), ":1:1: encoding: found the byte 0xff"),
            (b"#" * (2**20 + 1), ": the profile cannot be read: more than 1 MiB"),
            (b"service: a\0", ":1:11: YAML: found the character '\\x00'"),
            (b"state: x", ":1:8: state: found 'x'"),
        ],
    )
    def test_a_bad_file_is_reported_by_its_path(self, tmp_path: Path, data: bytes, found: str) -> None:
        path = tmp_path / "profile.yaml"
        path.write_bytes(data)
        with pytest.raises(ProfileError) as caught:
            load(path, environ={})
        assert str(caught.value).startswith(f"{path}{found}")

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("missing.yaml", "no such file; create it or"),
            (".", "a directory; give"),
            ("a\0b", "embedded null byte; give"),
        ],
    )
    def test_an_unreadable_file_is_an_error_with_a_remedy(self, tmp_path: Path, name: str, found: str) -> None:
        with pytest.raises(ProfileError, match="the profile cannot be read:") as caught:
            load(f"{tmp_path}/{name}", environ={})
        assert f"cannot be read: {found}" in str(caught.value)

    @pytest.mark.parametrize("given", [5, b"profile.yaml", ["profile.yaml"]])
    def test_texts_that_are_no_paths_are_named(self, given: Any) -> None:
        with pytest.raises(ProfileError, match=re.escape(f"profile: found {given!r}; allowed: a Profile, or the path")):
            load(given, environ={})
        with pytest.raises(ProfileError, match="profile: found"):
            instrument.start(given)

    def test_a_file_of_the_largest_size_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "profile.yaml"
        path.write_bytes(b"#" * 2**20)
        assert load(path, environ={}) == Profile()


# ---------------------------------------------------------------- the schema and the loader


class TestSchema:
    def test_it_is_a_schema(self) -> None:
        Draft202012Validator.check_schema(SCHEMA)

    def test_the_file_is_what_the_keys_make(self) -> None:
        assert json_schema.FILE.read_text("utf-8") == json_schema.format_schema(), (
            "run: python -m instrument.profile.json_schema"
        )

    def test_it_explains_every_key(self) -> None:
        for section in KEYS:
            for name, key in (SCHEMA["$defs"][section] if section else SCHEMA)["properties"].items():
                assert key["description"].endswith("."), f"say in {json_schema.FILE.name} what {section}.{name} means"

    def test_its_defaults_are_those_of_the_loader(self) -> None:
        def defaults(section: str) -> dict[str, Any]:
            keys = (SCHEMA["$defs"][section] if section else SCHEMA)["properties"].items()
            return {name: key["default"] for name, key in keys if "default" in key}

        parts = {section: defaults(section) for section in KEYS if section.count(".") == 0}
        asked = {**parts[""], **{name: parts[name] for name in ("capture", "limits", "device", "control")}}
        asked["export"] = {name: defaults(f"export.{name}") for name in KEYS["export"]}
        exports = read("export: {recording: , chrome: , otlp: , prometheus: , parquet: , summary: }").export
        assert asked.keys() >= {"service", "tracer_option", "state", "clock"}
        assert read(json.dumps(asked)) == Profile(export=exports)
        rules = {section: [{**extra, **defaults(section)}] for section, extra in RULES.items()}
        bare = {section: [extra] for section, extra in RULES.items()}
        assert read(json.dumps(rules)) == read(json.dumps(bare))

    @pytest.mark.parametrize(
        "value",
        [
            {"service": "${A}"},
            {"capture": {"sample": "${A:-1}", "errors": "${B}"}},
            {"limits": {"ring": "${RING}"}},
            {"export": {"otlp": {"endpoint": "${E}", "headers": {"a": "b ${C}"}}}},
            {"schedule": {"record": "${N}"}},
            {"functions": [{"match": "${MODULE}:f", "kind": "${K}"}]},
            {"device": {"cuda": "${D}", "nvml": "${D}", "host": "${D}"}},
        ],
    )
    def test_it_lets_references_stand_for_values(self, value: dict[str, Any]) -> None:
        assert VALIDATOR.is_valid(value)


RULES: dict[str, dict[str, Any]] = {
    "functions": {"match": "a:b"},
    "layers": {"type": "Linear"},
    "copies": {},
    "frameworks": {"name": "jax"},
}

BEYOND_THE_SCHEMA = re.compile(
    # Amounts: a pattern knows a unit, not what a number times a unit comes to.
    r"limits\.ring: .*, from 64KiB$"
    r"|limits\.ring: .* at most the memory that this machine has"
    r"|limits\.blocked: .*, from 100us$"
    # What there is.
    r"|export\.otlp\.(certificate|client_certificate|client_key): .* (a file that is there|a key alone)"
    r"|device\.(nvml|host): .*, from 10ms$"
    r"|export\.otlp\.timeout: .*, from 1ms$"
    r"|: found '[0-9.]{7,}[A-Za-z]+'; allowed: (auto, off, or |a percentile .*, or )?a number with a unit"
    # Two values against each other.
    r"|schedule: .* 0 <= start < end"
    r"|frameworks\[\d+\]: .* allowed: each framework once"
    # A port of five digits may still be too large, and brackets may hold what is no address.
    r"|export\.otlp\.endpoint: .* \(.*\); allowed"
)
"""Problems that the loader finds and the schema cannot express.

Not generated below, because there the two part on purpose: references (the schema sees the text, the loader the
variable), whole numbers written 5.0 (equal to 5 for a schema), NUL and lone surrogates, and text that ends in a
newline, before which `$` of Python's regular expressions matches but that of JavaScript's does not.
"""

WORD = st.text("abcXYZ_0é", min_size=1, max_size=4)
TEXT = st.text("aZ09 _-./:*!{}[]\"'\\%#&|>@,é漢🚀", min_size=1, max_size=8)
SEGMENT = WORD | st.sampled_from(["*", "**", "a*", "*_b", "a*b*c"])
DOTTED = st.lists(SEGMENT, min_size=1, max_size=3).map(".".join)
FUNCTION = st.builds("{}{}:{}".format, st.sampled_from(["", "", "!"]), DOTTED, DOTTED)
LAYER = st.builds("{}{}".format, st.sampled_from(["", "", "!"]), DOTTED | st.sampled_from(["layers.0.mlp", "a-b.*"]))
AMOUNT = st.builds(
    lambda number, fraction: f"{number}{fraction}", st.integers(0, 10**7), st.sampled_from(["", ".5", ".25"])
)
DURATION = st.just(0) | st.builds("{}{}".format, AMOUNT, st.sampled_from([*DURATION_UNITS]))
SIZE = st.just(0) | st.builds("{}{}".format, AMOUNT, st.sampled_from([*SIZE_UNITS]))
COUNT = st.integers(0, 20) | st.sampled_from([10**18 - 1, 10**18])
COMPARED = (
    TEXT
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(-1e6, 1e6, allow_nan=False).map(lambda number: round(number, 3))
    | st.builds("{}{}".format, st.sampled_from([">=", ">", "< ", "<=", "=", "!="]), AMOUNT | st.just("x"))
)
URL = st.builds(
    "{}://{}{}{}".format,
    st.sampled_from(["http", "https"]),
    st.sampled_from(["c", "a.b-c", "127.0.0.1", "[::1]", "[1:2]"]),
    st.sampled_from(["", ":4318", ":99999"]),
    st.sampled_from(["", "/", "/v1/traces", "/a?b=c", "?x"]),
)


def list_or_item(item: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return item | st.lists(item, max_size=3)


def mapping(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: value | st.none() for name, value in keys.items()})


PROFILES = mapping(
    service=TEXT,
    preset=st.sampled_from(PRESETS),
    tracer_option=st.sampled_from(TRACER_OPTIONS),
    state=st.sampled_from(STATES),
    functions=st.lists(
        mapping(match=list_or_item(FUNCTION), name=TEXT, kind=st.sampled_from(KINDS), device=st.booleans()), max_size=2
    ),
    layers=st.lists(
        mapping(match=list_or_item(LAYER), type=list_or_item(WORD), name=TEXT, device=st.booleans()), max_size=2
    ),
    copies=st.lists(
        mapping(
            directions=list_or_item(st.sampled_from(DIRECTIONS)),
            min_bytes=SIZE,
            frameworks=list_or_item(st.sampled_from(COPY_FRAMEWORKS)),
        ),
        max_size=2,
    ),
    loaders=st.sampled_from(["auto", "off", False]),
    phases=st.sampled_from(["auto", "off", False]),
    comm=st.sampled_from(["auto", "off", False]),
    frameworks=st.sampled_from(["auto", "off", False, "all", *FRAMEWORKS])
    | st.lists(st.sampled_from(FRAMEWORKS) | mapping(name=st.sampled_from(FRAMEWORKS)), max_size=3),
    schedule=st.lists(COUNT, min_size=2, max_size=2)
    | mapping(skip_first=COUNT, closed=COUNT, ready=COUNT, record=COUNT, repeat=COUNT),
    capture=mapping(
        sample=st.sampled_from([0, 1, 0.5, 1e-7, 1.5, -1]),
        slow=DURATION | st.sampled_from(["p99*1.5", "p99.9*2", "p50*10", "p100*2", "p99*0.5", "p99", "p99 * 1.5"]),
        where=st.dictionaries(
            st.sampled_from(["tenant", "http.status", " x", "a" * 257]) | TEXT,
            list_or_item(COMPARED) | st.none(),
            max_size=2,
        ),
        errors=st.booleans(),
        limit=st.builds("{}/{}".format, COUNT, st.sampled_from(["s", "min", "h"])),
        before=DURATION,
    ),
    limits=mapping(
        ring=SIZE,
        ring_dir=st.sampled_from(["off", False, "auto", "rings", "./rings", "/dev/shm/rings", "/a/{pid}"]),
        spans_per_request=COUNT,
        disk=SIZE,
    ),
    device=mapping(
        cuda=st.sampled_from(["auto", "off", False]),
        nvml=DURATION | st.sampled_from(["auto", "off", False]),
        host=DURATION | st.sampled_from(["auto", "off", False]),
    ),
    control=mapping(watch=st.booleans()),
    export=mapping(
        chrome=st.sampled_from(["off", False, "on"])
        | mapping(path=st.lists(st.sampled_from(["a/", "{pid}", "{window}", "{service}", ".json"])).map("".join)),
        otlp=st.sampled_from(["off", False, True])
        | mapping(
            endpoint=URL,
            protocol=st.sampled_from(PROTOCOLS),
            headers=st.dictionaries(st.sampled_from(["a", "X-B", "c!"]), TEXT | st.none(), max_size=2),
            timeout=DURATION,
            compression=st.sampled_from(COMPRESSIONS),
        ),
        summary=st.sampled_from(["off", False, "stderr"])
        | mapping(
            to=st.sampled_from(["stderr", "stdout", "a.txt", "{pid}/b"]),
            views=list_or_item(st.sampled_from(list(VIEWS))),
            sorted_by=st.sampled_from(SORT_KEYS),
            rows=COUNT,
            least=DURATION,
            unit=st.sampled_from(tuple(TIME_UNITS)),
            per_thread=st.booleans(),
            corrected=st.booleans(),
            skip_first=COUNT,
        ),
    ),
)

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70000)
    # YAML 1.1 reads a number without a point, such as 1e-05, as text.
    | st.floats(-2, 2).filter(lambda number: not number.is_integer() and math.isfinite(number) and "." in repr(number))
    | TEXT
    | FUNCTION
    | DURATION
    | SIZE
    | URL
    | st.sampled_from(
        ["", "Default", "All", "h2d", "off", "on", "stderr", "1/s", "007", "1:30", "Linear", "a.b", "<<"]
    ),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(WORD, values, max_size=2),
    max_leaves=3,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a profile."""
    if isinstance(value, (dict, list)):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A profile with one place of it replaced, edited, renamed or taken out."""
    profile = copy.deepcopy(draw(PROFILES))
    found = list(places(profile))
    if not found:
        return draw(JUNK)
    container, key = draw(st.sampled_from(found))
    value = container[key]
    change = draw(st.sampled_from(["replace", "edit", "rename", "take out"]))
    if change == "take out":
        del container[key]
    elif change == "rename" and isinstance(container, dict):
        container[draw(WORD | st.sampled_from([name for keys in KEYS.values() for name in keys]))] = container.pop(key)
    elif change == "edit" and isinstance(value, str):
        at = draw(st.integers(0, len(value)))
        container[key] = (
            value[:at] + draw(st.sampled_from(["", *" .:*!{}/-0aé\t"])) + value[at + draw(st.integers(0, 1)) :]
        )
    else:
        container[key] = draw(JUNK)
    return profile


class TestTheSchemaAndTheLoaderAgree:
    @settings(max_examples=4 * settings.default.max_examples)
    @given(PROFILES | mutated() | mutated())
    def test_on_every_profile_but_for_what_a_schema_cannot_say(self, profile: Any) -> None:
        told = refusals(json.dumps(profile, ensure_ascii=False))
        if VALIDATOR.is_valid(profile):
            assert [message for message in told if not BEYOND_THE_SCHEMA.search(message)] == []
        else:
            assert told

    @pytest.mark.parametrize(
        "profile",
        [
            {"limits": {"ring": "1KiB"}},
            {"limits": {"ring": "100TB"}},
            {"export": {"otlp": {"certificate": "/nowhere"}}},
            {"device": {"nvml": 0}},
            {"export": {"otlp": {"timeout": "1ns"}}},
            {"capture": {"slow": "9999999999999h"}},
            {"schedule": [3, 3]},
            {"frameworks": ["jax", {"name": "jax"}]},
            {"export": {"otlp": {"endpoint": "http://c:99999"}}},
        ],
    )
    def test_on_what_a_schema_cannot_say_the_loader_is_stricter(self, profile: Any) -> None:
        assert VALIDATOR.is_valid(profile)
        (message,) = refusals(json.dumps(profile))
        assert BEYOND_THE_SCHEMA.search(message)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("limits: {ring: 64}", "64MiB"),
        ("limits: {ring: 67108864}", "67108864B"),
        ("limits: {ring: 1KB}", ""),  # less than a ring may have
        ("limits: {ring: 100KB}", "100kB"),
        ("limits: {disk: 1KB}", "1kB"),
        ("limits: {disk: 2}", "2GiB"),
        ("copies: [{min_bytes: 4}]", "4KiB"),
        ("copies: [{min_bytes: 4096}]", "4096B"),
        ("capture: {slow: 250}", "250ms"),
    ],
)
def test_a_suggested_quantity_is_one_that_is_accepted_in_its_place(text: str, meant: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read(text)
    message = str(caught.value)
    assert message.partition("did you mean ")[2] == (f"'{meant}'?" if meant else ""), message
    if meant:
        read(text.replace(text.split(": ")[-1].strip("}]"), meant))


@pytest.mark.parametrize(
    "text",
    [
        "functions: [{match: [a:b, !a:c]}]",
        "functions:\n- match:\n  - a:b\n  - !a:c\n",
        "functions:\n- match:\n  - a:b\n  - !a:_*\n",
        "functions: [{match: !a.*:c}]",
        "layers: [{match: !a}]",
    ],
)
def test_an_exclamation_mark_without_quotes_gets_the_advice_to_quote_it(text: str) -> None:
    with pytest.raises(ProfileError, match="a pattern that begins with ! needs quotes"):
        read(text)


def test_a_slow_request_may_be_reported_by_what_is_usual_for_its_endpoint() -> None:
    capture = read("capture: {slow: p99.9*1.5}").capture
    assert (capture.slow_ns, capture.slow_over) == (None, PercentileThreshold(0.999, 1.5))
    assert read("capture: {slow: 250ms}").capture == Capture(slow_ns=250_000_000)


def test_requests_may_be_kept_by_their_attributes() -> None:
    capture = read(
        """
        capture:
          where:
            tenant: x
            http.response.status_code: '>=500'
            tier: [gold, 1, 2.5, "< 3"]
            streamed: true
            nothing: null
        """
    ).capture
    assert capture.where == (
        Where("tenant", (("=", "x"),)),
        Where("http.response.status_code", ((">=", 500),)),
        Where("tier", (("=", "gold"), ("=", 1), ("=", 2.5), ("<", 3))),
        Where("streamed", (("=", True),)),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("capture: {slow: p100*2}", "1:17: capture.slow: found 'p100*2'"),
        ("capture: {slow: p99*0.5}", "1:17: capture.slow: found 'p99*0.5'"),
        ("capture: {where: tenant}", "1:18: capture.where: found 'tenant'"),
        ("capture: {where: {a: []}}", "1:22: capture.where.a: found an empty list"),
        ("capture: {where: {a: {b: c}}}", "1:22: capture.where.a: found a mapping"),
        ("capture: {where: {a: '>x'}}", "1:22: capture.where.a: found '>x'"),
        ("capture: {where: {a: [1, '<>5']}}", "1:26: capture.where.a[1]: found '<>5'"),
        ("capture: {where: {'': 5}}", "1:19: capture.where"),
    ],
)
def test_conditions_that_cannot_be_are_reported_with_their_place(text: str, told: str) -> None:
    assert told in problem(text)


def test_any_name_may_be_a_phase() -> None:
    (rule,) = read("functions: [{match: 'a:b', phase: queue}]").functions
    assert (rule.kind, rule.phase) == ("phase", "queue")
