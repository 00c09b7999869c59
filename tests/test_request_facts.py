"""`facts:` on rules: values that are read at calls become attributes of the requests that the calls serve."""

from __future__ import annotations

import csv
import enum
import json
import subprocess
import sys
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from otlp_collectors import collecting, take
from otlp_receiver import read_until
from readback import spans_in
from simulated_engine import Service

from instrument.errors import ProfileError
from instrument.instrumentors.request_keys import make_call_reader
from instrument.profile.keys import loads
from instrument.recorder.recorder import Recorder
from instrument.recording.distributions import percentiles_of_times
from instrument.recording.spans import BATCH_KEYS, FACT_KEYS, FACTS, KEY, Site, Span
from instrument.report.requests_view import requests
from instrument.report.view import Options, Recording
from instrument.runtime.faults import FAULTS
from instrument.trace.request_trees import CACHED_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS


class Reason(enum.IntEnum):
    LENGTH = 1


class NamedReason(enum.IntEnum):
    STOP = 0

    def __str__(self) -> str:
        return "stop"


def of(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**values)


def read(rule: str, function: Any, *args: object, **kwargs: object) -> dict[str, object]:
    """The attributes of a call that a rule with facts selects."""
    (parsed,) = loads(f'functions: [{{match: "m:f", {rule}}}]').functions
    facts = make_call_reader(function, parsed)
    assert facts.missing == []
    recorder = Recorder()
    recorder.begin_recording(1 << 20, {})
    recorder.on = True
    try:
        recorder.wrap(function, Site("f"), facts.of_call, results=facts.of_result)(*args, **kwargs)
        (span,) = spans_in(recorder)
    finally:
        recorder.on = False
    return dict(span.attributes)


def finish(request: Any, outputs: Any = None, limit: Any = 16) -> Any:
    return request


VALUES: list[tuple[str, Any, object]] = [
    ("request.n", of(n=3), 3),
    ("request.n", of(n=0.25), 0.25),
    ("request.n", of(n=True), True),
    ("request.n", of(n="stop"), "stop"),
    ("request.n", of(n="x" * 300), "x" * 253 + "..."),
    ("request.n", of(n=Reason.LENGTH), "LENGTH"),
    ("request.n", of(n=NamedReason.STOP), "stop"),
    ("request.n", of(n=None), None),
    ("request.n", of(), None),
    ("request.a.n", of(a={"n": 4}), 4),
    ("request.a.n", of(a=UserDict(n=5)), 5),
    ("request.items", {"items": 6}, 6),
    ("return.n", of(n=7), 7),
    ("limit", of(), 16),
]


@pytest.mark.parametrize(("path", "request_", "value"), VALUES)
def test_a_fact_is_a_number_a_text_or_a_bool_below_an_argument_or_the_result(
    path: str, request_: Any, value: object
) -> None:
    attributes = read(f"facts: {{argument: {path}, name: n}}", finish, request_)
    assert attributes == ({} if value is None else {"n": value, FACTS: ("last n",)})


def test_facts_of_a_call_come_with_its_key_and_one_that_fails_spoils_no_other() -> None:
    class Request:
        request_id, tokens = "r1", [1, 2, 3]

        @property
        def broken(self) -> int:
            raise ValueError("secret")

    FAULTS.clear()
    facts = "{argument: request.tokens, name: t, record: size, keep: sum}, {argument: request.broken, name: b}"
    facts += ", {argument: limit, name: l}, {argument: return.request_id, name: id}"
    attributes = read(f"key: request.request_id, facts: [{facts}]", finish, Request(), limit=2)
    listed = ("sum t", "last b", "last l", "last id")
    assert attributes == {KEY: "r1", "t": 3, "l": 2, "id": "r1", FACTS: listed}
    assert "secret" not in str(FAULTS.describe_unreadable_values())
    FAULTS.clear()


def test_a_path_of_several_values_has_the_key_of_each_next_to_it() -> None:
    outputs = [of(id="a-1", n=2), of(id="b-1", n=None), of(id="c-1", n=4)]
    fact = '{argument: "outputs[].n", name: n, key: {argument: "outputs[].id", cut: "-1$"}}'
    assert read(f"facts: {fact}", finish, 0, outputs) == {"n": (2, 4), f"n{FACT_KEYS}": ("a", "c"), FACTS: ("last n",)}
    batch = 'batch: "outputs[].id", facts: {argument: "outputs[].n", name: n}'
    assert read(batch, finish, 0, outputs)[f"n{FACT_KEYS}"] == ("a-1", "c-1")


def test_a_path_of_several_values_needs_their_keys() -> None:
    with pytest.raises(ProfileError, match="the path of each item's key"):
        loads('functions: [{match: "m:f", facts: {argument: "outputs[].n", name: n}}]')
    with pytest.raises(ProfileError, match="a path of several values"):
        loads('functions: [{match: "m:f", facts: {argument: n, name: n, key: k}}]')


SERVICE = """
import multiprocessing, instrument

def finish(request_id, tokens, reason):
    pass

def step(outputs):
    pass

def engine(inbox, outbox):
    for request_id in iter(inbox.get, None):
        step({request_id: 2, "nobody": 1})
        step({request_id: 3})
        finish(request_id, 5, "stop")
        finish(request_id, 4, "length")
        outbox.put(request_id)

def serve(request_id, inbox, outbox):
    inbox.put(request_id)
    outbox.get(timeout=240)

def main():
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=engine, args=(inbox, outbox))
    process.start()
    for number in range(4):
        serve(f"r{number}", inbox, outbox)
    inbox.put(None)
    process.join()

if __name__ == "__main__":
    main()
"""

PROFILE = """
functions:
  - {match: "*:serve", kind: request, key: request_id}
  - match: "*:step"
    kind: step
    batch: outputs
    facts: {argument: "outputs[]", key: outputs, name: gen_ai.usage.output_tokens, keep: sum}
  - match: "*:finish"
    key: request_id
    facts:
      - {argument: tokens, name: tokens.most, keep: max}
      - {argument: tokens, name: tokens.newest}
      - {argument: reason, name: gen_ai.response.finish_reasons, keep: list}
capture: {sample: 1}
export:
  recording: {path: "traces/{service}-{pid}.npz"}
  otlp: {endpoint: "http://127.0.0.1:%d"}
"""


@pytest.mark.slow
def test_facts_of_another_process_are_attributes_of_the_request_in_files_reports_and_at_a_collector(
    tmp_path: Path,
) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    command = [sys.executable, "-m", "instrument"]
    with collecting(take) as collector:
        (tmp_path / "profile.yaml").write_text(PROFILE % collector.server_port)
        run = [*command, "run", "--profile", "profile.yaml", "--", "service.py"]
        subprocess.run(run, cwd=tmp_path, check=True, timeout=240, capture_output=True)
        sent = read_until(
            lambda: [span for spans in collector.spans.values() for span in spans if span.name == "serve"],
            lambda sent: len(sent) == 4,
        )
    facts = {
        "gen_ai.usage.output_tokens": 5,
        "tokens.most": 5,
        "tokens.newest": 4,
        "gen_ai.response.finish_reasons": ["stop", "length"],
    }
    assert len(sent) == 4
    for span in sent:
        attributes = {one.key: one.value for one in span.attributes}
        assert {name: attributes[name].int_value for name in facts if "finish" not in name} == {
            name: value for name, value in facts.items() if "finish" not in name
        }
        reasons = attributes["gen_ai.response.finish_reasons"].array_value.values
        assert [reason.string_value for reason in reasons] == ["stop", "length"]

    def ask(*words: str) -> str:
        done = subprocess.run([*command, *words], cwd=tmp_path, check=True, timeout=240, capture_output=True, text=True)
        return done.stdout

    query = "select a.name, value from attributes a join spans s using (span_id) where s.name = 'serve' order by all"
    rows = [row for row in csv.reader(ask("query", "traces", query, "--csv").splitlines()) if row[0] in facts]
    expected = [[name, str(value) if type(value) is int else '["stop","length"]'] for name, value in facts.items()]
    assert sorted(rows) == sorted(expected * 4)
    by = ["--view", "batches", "--by", "gen_ai.response.finish_reasons", "--json"]
    (group,) = json.loads(ask("report", "traces", *by))["views"]["batches"]["shares"]
    assert (group["name"], group["requests"], group["output_tokens"]) == ("stop, length", 4, 20)


def test_the_view_of_requests_has_times_by_tokens_and_by_the_cached_part_of_prompts() -> None:
    trace = Service(1, requests=80).run()
    steps: dict[str, list[Span]] = {}
    for span in sorted(trace.spans, key=lambda span: span.start_ns):
        for key in span.attributes.get(BATCH_KEYS, ()):
            steps.setdefault(str(key), []).append(span)
    facts = {
        key: {OUTPUT_TOKENS: len(steps[key]), INPUT_TOKENS: 100, CACHED_TOKENS: 100 if int(key[1:]) % 2 else 0}
        for key in steps
    }
    spans = [
        replace(span, attributes={**span.attributes, **facts[str(span.attributes[KEY])]})
        if span.site.kind == "request"
        else span
        for span in trace.spans
    ]
    view = requests(Recording.from_trace(replace(trace, spans=spans)), Options())
    rows = {(row.by, row.range): row for row in view.tokens}
    of_cached = {range_: row.requests for (by, range_), row in rows.items() if by == CACHED_TOKENS}
    assert of_cached == {"below 1%": 40, "from 90%": 40}
    all_of_them = rows[INPUT_TOKENS, "64 to 255"]
    assert (all_of_them.requests, all_of_them.input_tokens, all_of_them.cached_ratio) == (80, 8_000, 0.5)
    few = [at for at in steps.values() if len(at) < 16]
    tokens_ns = sorted((at[-1].end_ns - at[0].end_ns) // (len(at) - 1) for at in few if len(at) > 1)
    prefills_ns = sorted(at[0].end_ns - at[0].start_ns for at in steps.values() if len(at) > 1)
    by_tokens = rows[OUTPUT_TOKENS, "below 16"]
    assert by_tokens.requests == len(few)
    assert (by_tokens.token_p50_ns, by_tokens.token_p99_ns) == tuple(percentiles_of_times(tokens_ns, (0.5, 0.99)))
    assert (all_of_them.prefill_p50_ns, all_of_them.prefill_p99_ns) == tuple(
        percentiles_of_times(prefills_ns, (0.5, 0.99))
    )
    text = "\n".join(view.lines())
    assert all(title in text for title in ("By output tokens", "By input tokens", "By cached prompt"))
