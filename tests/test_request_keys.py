"""`key:` and `batch:` on rules, and the same in code: what is read of calls, and that reading harms nothing."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from fractions import Fraction
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
from readback import rows_in, unreadable_counts

import instrument
from instrument.instrumentors import request_keys
from instrument.instrumentors.request_keys import make_call_reader
from instrument.profile.keys import loads
from instrument.recorder.attribute_checks import encode_key
from instrument.recorder.recorder import Recorder
from instrument.recording.spans import BATCH_KEYS, BATCH_LIMIT, BATCH_WEIGHTS, KEY, Site, Span
from instrument.runtime.faults import FAULTS
from instrument.sessions.session import Session

ENGINE = """
async def generate(request_id, prompt="x"):
    return request_id

def tokens(request_id):
    yield 1
    yield 2

async def stream(request_id):
    yield 1

def spread(*parts, request_id="left out"):
    return parts

def add(request):
    return request

async def submit(prompt):
    return {"id": prompt}

def step(output):
    return output

def serve(ids, tokens=None, held=None):
    return ids
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of a service, which is imported once a session runs."""
    (tmp_path / "keyed_engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("keyed_engine", None)
    FAULTS.clear()


RULE_PLACE = "<profile>:1:13"
"""Where the rule stands that is given to `recorded`."""


@pytest.fixture
def recorded(engine: None) -> Callable[..., list[Span]]:
    """The spans of calls of the module's functions under some rules."""

    def run(rules: str, *calls: tuple[str, tuple[Any, ...]]) -> list[Span]:
        running = instrument.start(loads(f"functions: [{rules}]"))
        assert isinstance(running, Session)
        import keyed_engine

        async def drain(made: Any) -> None:
            async for _ in made:
                pass

        for name, given in calls:
            made = getattr(keyed_engine, name)(*given)
            if inspect.iscoroutine(made):
                asyncio.run(made)
            elif inspect.isasyncgen(made):
                asyncio.run(drain(made))
            elif inspect.isgenerator(made):
                list(made)
        found = sorted(running.trace().spans, key=lambda span: span.start_ns)
        instrument.stop()
        return found

    return run


@dataclass
class Asked:
    id: str
    tokens: int = 1


ASKED = Asked("r")


class DriversUUID(UUID):
    """A subclass of UUID, as drivers of databases have it."""


def of_asked(key: str) -> str:
    """The key that an object is, where that is meant."""
    return f"Asked-{os.getpid()}-{id(ASKED):x}" if key == "of ASKED" else key


def of(**values: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**values)


@pytest.mark.parametrize("kind", ["op", "request"])
@pytest.mark.parametrize(
    ("rule", "call", "key"),
    [
        ("match: 'keyed_engine:generate', key: request_id", ("generate", ("r1",)), "r1"),
        ("match: 'keyed_engine:tokens', key: request_id", ("tokens", ("r1",)), "r1"),
        ("match: 'keyed_engine:stream', key: request_id", ("stream", (7,)), "7"),
        ("match: 'keyed_engine:add', key: request.id", ("add", (Asked("r2"),)), "r2"),
        ("match: 'keyed_engine:add', key: request.body.id", ("add", ({"body": {"id": "r3"}},)), "r3"),
        ("match: 'keyed_engine:add', key: return.id", ("add", (Asked("r4"),)), "r4"),
        ("match: 'keyed_engine:submit', key: return.id", ("submit", ("r5",)), "r5"),
        ("match: 'keyed_engine:generate', key: {argument: request_id, cut: '^cmpl-|-[0-9]+$'}",
         ("generate", ("cmpl-r6-0",)), "r6"),
        ("match: 'keyed_engine:generate', key: request_id", ("generate", ("k" * 500,)), encode_key("k" * 500)),
        ("match: 'keyed_engine:generate', key: {argument: request_id, cut: '-[0-9]$'}",
         ("generate", ("k" * 500 + "-0",)), encode_key("k" * 500)),
        ("match: 'keyed_engine:spread', key: request_id", ("spread", ("a", "b", "c")), "left out"),
        ("match: 'keyed_engine:add', key: request", ("add", (ASKED,)), "of ASKED"),
        ("match: 'keyed_engine:add', key: request", ("add", (UUID(int=7),)), str(UUID(int=7))),
        ("match: 'keyed_engine:add', key: request", ("add", (DriversUUID(int=7),)), str(UUID(int=7))),
        ("match: 'keyed_engine:add', key: request", ("add", (b"r7",)), "r7"),
        ("match: 'keyed_engine:add', key: request", ("add", (b"\xff\n",)), "ff0a"),
        ("match: 'keyed_engine:add', key: request", ("add", (np.int32(7),)), "7"),
        ("match: 'keyed_engine:add', key: request", ("add", (HTTPStatus.OK,)), "200"),
    ],
)  # fmt: skip
def test_a_key_is_read_of_an_argument_or_a_result(
    kind: str, rule: str, call: tuple[str, tuple[Any, ...]], key: str, recorded: Callable[..., list[Span]]
) -> None:
    (span,) = recorded(f"{{{rule}, kind: {kind}}}", call)
    assert span.attributes[KEY] == of_asked(key)
    assert unreadable_counts() == {}


@pytest.mark.parametrize(
    ("rule", "given", "told"),
    [
        ("batch: output", ["a", "b"], {BATCH_KEYS: ("a", "b")}),
        ("batch: output", {"a": 3, "b": 1}, {BATCH_KEYS: ("a", "b"), BATCH_WEIGHTS: (3, 1)}),
        ("batch: output.num_tokens", of(num_tokens={"a": 3}), {BATCH_KEYS: ("a",), BATCH_WEIGHTS: (3,)}),
        ("batch: output", {"a": Asked("a")}, {BATCH_KEYS: ("a",)}),
        ("batch: 'output[].id'", [Asked("a"), Asked("b")], {BATCH_KEYS: ("a", "b")}),
        ("batch: {argument: 'output.requests[].id', weights: 'output.requests[].tokens'}",
         of(requests=[Asked("a", 5), Asked("b", 2)]), {BATCH_KEYS: ("a", "b"), BATCH_WEIGHTS: (5, 2)}),
        ("batch: {argument: 'output[]', cut: '-[0-9]$'}", ["a-1", "b-2"], {BATCH_KEYS: ("a", "b")}),
        ("batch: 'return[].id'", [Asked("a")], {BATCH_KEYS: ("a",)}),
        ("batch: output", [], {BATCH_KEYS: ()}),
        ("batch: output", "r1", {BATCH_KEYS: ("r1",)}),
        ("batch: output", ASKED, {BATCH_KEYS: ("of ASKED",)}),
        ("batch: output", b"r1", {BATCH_KEYS: ("r1",)}),
        ("batch: output", np.array([7, 8]), {BATCH_KEYS: ("7", "8")}),
        ("batch: output", {"a": np.int32(3), "b": 1}, {BATCH_KEYS: ("a", "b"), BATCH_WEIGHTS: (3, 1)}),
        ("batch: {argument: output.ids, weights: output.tokens}",
         of(ids=["a", "b"], tokens=np.array([1.5, 2], dtype=np.float32)),
         {BATCH_KEYS: ("a", "b"), BATCH_WEIGHTS: (1.5, 2.0)}),
    ],
)  # fmt: skip
def test_the_keys_of_a_batch_are_read_with_their_weights(
    rule: str, given: object, told: dict[str, object], recorded: Callable[..., list[Span]]
) -> None:
    (span,) = recorded(f"{{match: 'keyed_engine:step', {rule}}}", ("step", (given,)))
    if BATCH_KEYS in told:
        told = {**told, BATCH_KEYS: tuple(map(of_asked, told[BATCH_KEYS]))}  # type: ignore[call-overload]
    assert dict(span.attributes) == told
    assert unreadable_counts() == {}


class Hostile:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError("secret text of the service")


class Endless(list[str]):
    def __iter__(self) -> Iterator[str]:
        while True:
            yield "a"


@pytest.mark.parametrize("rule", ["key: output.id", "batch: output.ids", "batch: 'output[].id'", "key: return.id"])
@pytest.mark.parametrize(
    "make", [Hostile, lambda: None, lambda: 5, lambda: [Hostile()], lambda: {"id": [Hostile()], "ids": None}]
)
def test_an_unreadable_value_is_left_out_and_the_call_goes_on(
    rule: str, make: Callable[[], object], recorded: Callable[..., list[Span]], caplog: pytest.LogCaptureFixture
) -> None:
    given = make()
    (span,) = recorded(f"{{match: 'keyed_engine:step', {rule}}}", ("step", (given,)))
    assert KEY not in span.attributes
    assert BATCH_KEYS not in span.attributes
    assert "secret" not in caplog.text
    is_nothing = isinstance(given, dict) and rule == "batch: output.ids"  # None: there are no requests
    assert list(unreadable_counts().values()) == ([] if is_nothing else [1])


@pytest.mark.parametrize("keys", [["a", "b"], [7, 9], ("b", "a")])
@pytest.mark.parametrize("weights", ["tokens", "held.tokens", "held.of[].n"])
def test_weights_lie_in_another_parameter_than_the_keys(
    keys: Sequence[object], weights: str, recorded: Callable[..., list[Span]]
) -> None:
    rule = f"batch: {{argument: ids, weights: '{weights}'}}"
    held = {"tokens": {keys[1]: 3, keys[0]: 2, "nobody": 9}, "of": [of(n=2), of(n=3)]}
    (span,) = recorded(f"{{match: 'keyed_engine:serve', {rule}}}", ("serve", (keys, [2, 3], held)))
    assert dict(span.attributes) == {BATCH_KEYS: tuple(map(str, keys)), BATCH_WEIGHTS: (2, 3)}
    assert unreadable_counts() == {}


@pytest.mark.parametrize("keys", [["a", "b"], [7, 9]])
def test_weights_by_key_are_those_of_the_keys(keys: list[object], recorded: Callable[..., list[Span]]) -> None:
    given = of(ids=keys, tokens={keys[1]: 3, keys[0]: 2})
    rule = "batch: {argument: output.ids, weights: output.tokens}"
    (span,) = recorded(f"{{match: 'keyed_engine:step', {rule}}}", ("step", (given,)))
    assert dict(span.attributes) == {BATCH_KEYS: tuple(map(str, keys)), BATCH_WEIGHTS: (2, 3)}


@pytest.mark.parametrize("tokens", [None, "left out"])
def test_missing_weights_in_another_parameter_count_alike(tokens: object, recorded: Callable[..., list[Span]]) -> None:
    given = ([7, 9],) if tokens == "left out" else ([7, 9], tokens)
    rule = "batch: {argument: ids, weights: tokens}"
    (span,) = recorded(f"{{match: 'keyed_engine:serve', {rule}}}", ("serve", given))
    assert dict(span.attributes) == {BATCH_KEYS: ("7", "9")}


@pytest.mark.parametrize("rule", ["argument: ids, weights: absent.n", "argument: 'return[]', weights: ids"])
def test_weights_that_a_call_has_not_are_missing(rule: str) -> None:
    def serve(ids: list[str]) -> list[str]:
        return ids

    (parsed,) = loads(f'functions: [{{match: "m:f", batch: {{{rule}}}}}]').functions
    [missing] = make_call_reader(serve, parsed).missing
    assert missing.startswith("weights: ")


@pytest.mark.parametrize("tokens", [[1], ["one", "two"], [1, None], {"a": 1}, np.array([True, False])])
def test_weights_that_are_none_for_each_key_are_named_and_all_count_alike(
    tokens: object, recorded: Callable[..., list[Span]]
) -> None:
    rule = "batch: {argument: output.ids, weights: output.tokens}"
    (span,) = recorded(f"{{match: 'keyed_engine:step', {rule}}}", ("step", (of(ids=["a", "b"], tokens=tokens),)))
    assert dict(span.attributes) == {BATCH_KEYS: ("a", "b")}
    assert unreadable_counts() == {f"{RULE_PLACE}: output.ids: output.tokens": 1}


@pytest.mark.parametrize(
    "rule",
    ["batch: output", "batch: 'output[].id'", "batch: 'return[]'", "batch: {argument: 'output[].id', weights: output}"],
)
def test_iterators_are_left_to_the_service(rule: str, recorded: Callable[..., list[Span]]) -> None:
    given = iter([Asked("a"), Asked("b")])
    (span,) = recorded(f"{{match: 'keyed_engine:step', {rule}}}", ("step", (given,)))
    assert [one.id for one in given] == ["a", "b"]
    assert BATCH_KEYS not in span.attributes
    assert list(unreadable_counts().values()) == [1]


def test_keys_are_cut_the_same_however_many_there_are(
    recorded: Callable[..., list[Span]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_keys, "TEXTS_KNOWN", 3)
    keys = [f"r{number}-{part}" for part in (0, 1) for number in range(8)]
    rule = "{match: 'keyed_engine:add', key: {argument: request, cut: '-[0-9]$'}}"
    found = recorded(rule, *(("add", (key,)) for key in keys))
    assert [span.attributes[KEY] for span in found] == [key[:-2] for key in keys]


def test_a_batch_is_bounded_and_says_that_it_was(recorded: Callable[..., list[Span]]) -> None:
    (span,) = recorded("{match: 'keyed_engine:step', batch: output}", ("step", (Endless(),)))
    assert len(span.attributes[BATCH_KEYS]) == BATCH_LIMIT  # type: ignore[arg-type]
    assert unreadable_counts() == {f"{RULE_PLACE}: output: keys": 1}


ANY_WEIGHTS = [
    10**400, -(10**400), 2**63, -1, float("nan"), float("inf"), -float("inf"), True, Decimal("NaN"), 1j,
    Fraction(10**400), np.float64("nan"),
]  # fmt: skip


@pytest.mark.parametrize("rule", ["batch: output", "batch: {argument: output.ids, weights: output.tokens}"])
@pytest.mark.parametrize("weight", ANY_WEIGHTS, ids=lambda one: repr(one)[:12])
def test_numbers_that_are_no_amounts_are_named_and_all_requests_of_the_batch_count_alike(
    rule: str, weight: object, recorded: Callable[..., list[Span]]
) -> None:
    given = {"a": weight, "b": 2} if rule == "batch: output" else of(ids=["a", "b"], tokens=[weight, 2])
    (span,) = recorded(f"{{match: 'keyed_engine:step', {rule}}}", ("step", (given,)))
    assert dict(span.attributes) == {BATCH_KEYS: ("a", "b")}
    where = "output: weights" if rule == "batch: output" else "output.ids: output.tokens"
    assert unreadable_counts() == {f"{RULE_PLACE}: {where}": 1}


@pytest.mark.parametrize("weight", [Decimal(3), Fraction(6, 2), 3, 3.0, np.float16(3)], ids=repr)
def test_numbers_of_any_class_are_weights(weight: object, recorded: Callable[..., list[Span]]) -> None:
    (span,) = recorded("{match: 'keyed_engine:step', batch: output}", ("step", ({"a": weight, "b": 0},)))
    assert dict(span.attributes) == {BATCH_KEYS: ("a", "b"), BATCH_WEIGHTS: (3, 0)}
    assert unreadable_counts() == {}


@dataclass
class OnDevice:
    """A tensor on a GPU, as torch, jax and cupy have them: who reads it waits for the device."""

    ndim: int = 0

    def __dlpack__(self) -> None:
        raise AssertionError("the device was waited for")

    __array__ = __int__ = __index__ = __len__ = __iter__ = __getitem__ = item = tolist = __dlpack__


class Pair(NamedTuple):
    first: str


REFUSED = [OnDevice(), OnDevice(1), np.array([7, 8]), np.array(7.5), Decimal(7), np.float64(7), Pair("a"), date.min]


@pytest.mark.parametrize("rule", ["key: output", "batch: 'output[]'", "batch: {argument: 'output[]', cut: '-[0-9]$'}"])
@pytest.mark.parametrize("given", REFUSED, ids=lambda one: type(one).__name__)
def test_a_value_is_no_key_because_of_its_place(rule: str, given: object, recorded: Callable[..., list[Span]]) -> None:
    (span,) = recorded(
        f"{{match: 'keyed_engine:step', {rule}}}", ("step", (given if rule == "key: output" else [given, "b"],))
    )
    assert dict(span.attributes) == ({} if rule == "key: output" else {BATCH_KEYS: ("", "b")})
    (note,) = FAULTS.describe_unreadable_values()
    assert re.search(rf"not read: 1 times; (the keys cannot be read: )?{type(given).__name__}", note)


@pytest.mark.parametrize("rule", ["batch: output", "batch: 'output[]'", "batch: {argument: ids, weights: output}"])
def test_a_tensor_on_a_device_is_no_batch_and_is_never_read(rule: str, recorded: Callable[..., list[Span]]) -> None:
    given = OnDevice(1)
    rule = rule.replace("ids", "output.ids").replace("weights: output", "weights: output.held")
    value = given if "ids" not in rule else of(ids=["a"], held=given)
    (span,) = recorded(f"{{match: 'keyed_engine:step', {rule}}}", ("step", (value,)))
    assert BATCH_WEIGHTS not in span.attributes
    (note,) = FAULTS.describe_unreadable_values()
    assert "OnDevice that is on a device or has not one dimension, and is not read" in note


@pytest.mark.slow
def test_numbers_in_tensors_of_the_host_are_keys_and_weights(recorded: Callable[..., list[Span]]) -> None:
    torch = pytest.importorskip("torch")
    keyed = "{match: 'keyed_engine:add', key: request}"
    assert recorded(keyed, ("add", (torch.tensor(7),)))[0].attributes[KEY] == "7"
    (span,) = recorded(
        "{match: 'keyed_engine:step', batch: {argument: output.ids, weights: output.held}}",
        ("step", (of(ids=torch.tensor([7, 8]), held=torch.tensor([1.5, 2])),)),
    )
    assert dict(span.attributes) == {BATCH_KEYS: ("7", "8"), BATCH_WEIGHTS: (1.5, 2.0)}
    assert unreadable_counts() == {}
    for refused in (torch.tensor(7.5), torch.tensor([7]), torch.empty(1, device="meta")[0]):
        FAULTS.clear()
        assert KEY not in recorded(keyed, ("add", (refused,)))[0].attributes
        assert list(unreadable_counts().values()) == [1]


@pytest.mark.parametrize("path", ["output", "return"])
def test_a_large_batch_is_whole_wherever_it_is_read(path: str, recorded: Callable[..., list[Span]]) -> None:
    batch = {f"r{number}": number for number in range(500)}
    (span,) = recorded(f"{{match: 'keyed_engine:step', batch: {path}}}", ("step", (batch,)))
    assert span.attributes[BATCH_KEYS] == tuple(batch)
    assert span.attributes[BATCH_WEIGHTS] == tuple(batch.values())


@pytest.mark.parametrize("other", ["k" * 299 + "l", "k" * 301, "l" + "k" * 299, b"k" * 300 + b"l"])
def test_long_keys_that_begin_alike_are_of_several_requests(other: str | bytes) -> None:
    keys = encode_key("k" * 300), encode_key(other)
    assert keys[0] != keys[1]
    assert [len(key) for key in keys] == [128, 128]
    assert encode_key(b"k" * 300) == keys[0]


def test_scopes_and_bind_name_requests_in_code() -> None:
    running = instrument.start(loads(""))
    assert isinstance(running, Session)
    with instrument.scope("request", kind="request", key="r1"):
        pass
    with instrument.scope("request", kind="request"):
        instrument.bind("r2")
        instrument.bind(["no key"])  # type: ignore[arg-type]
    with instrument.scope("step", batch={"r1": 2, "r2": 1}):
        pass
    with instrument.scope("step", batch="r1"), instrument.scope("step", batch={"r1": np.int64(2)}):
        pass
    with instrument.scope("step", batch=iter(["r1", 2])), instrument.scope("odd", key=[], batch=7):  # type: ignore[arg-type]
        pass
    instrument.bind("outside of any span")
    found = [dict(span.attributes) for span in sorted(running.trace().spans, key=lambda span: span.start_ns)]
    instrument.stop()
    assert found == [
        {KEY: "r1"},
        {KEY: "r2"},
        {BATCH_KEYS: ("r1", "r2"), BATCH_WEIGHTS: (2, 1)},
        {BATCH_KEYS: ("r1",)},
        {BATCH_KEYS: ("r1",), BATCH_WEIGHTS: (2,)},
        {BATCH_KEYS: ("r1", "2")},
        {},
    ]


SERVICE = """
import multiprocessing as mp, threading, time, instrument

def submit(request_id):
    "To the engine."
    QUEUE.put(request_id)

def handle(request_id):
    with instrument.scope("tokenise", phase="prepare"):
        time.sleep(0.002)
    submit(request_id)
    ANSWERS[request_id].wait(240)
    with instrument.scope("detokenise", phase="post"):
        time.sleep(0.002)

def serve(request_id):
    with instrument.scope("POST /chat", kind="request", key=request_id):
        handle(request_id)

def accept(request_id):
    return [request_id, 3]

def step(batch):
    time.sleep(0.004)

def run(queue, answers):
    "The engine: of what is there at most two in each step, three steps for each."
    running = []
    while True:
        while not queue.empty() or not running:
            request_id = queue.get()
            if request_id is None:
                return
            running.append(accept(request_id))
        batch = running[:2]
        step({f"{request_id}-engine": 1 for request_id, _ in batch})
        for one in batch:
            one[1] -= 1
            if not one[1]:
                running.remove(one)
                answers.put(one[0])

def main():
    global QUEUE
    context = mp.get_context("spawn")
    QUEUE, answers = context.Queue(), context.Queue()
    engine = context.Process(target=run, args=(QUEUE, answers))
    engine.start()
    def listen():
        for _ in range(6):
            ANSWERS[answers.get()].set()
    threads = [threading.Thread(target=serve, args=(f"r{n}",)) for n in range(6)]
    ANSWERS.update({f"r{n}": threading.Event() for n in range(6)})
    for thread in [threading.Thread(target=listen), *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    QUEUE.put(None)
    engine.join()

ANSWERS = {}
if __name__ == "__main__":
    main()
"""

PROFILE = """
service: engine
functions:
  - {match: "*:step", kind: step, batch: {argument: batch, cut: "-engine$"}}
  - {match: "*:accept", phase: accept, key: request_id}
  - {match: "*:submit", phase: submit, key: request_id}
export:
  SUFFIX
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "export",
    [
        "recording: {path: 'traces/{service}-{pid}.npz'}",
        pytest.param("chrome: {path: 'traces/{service}-{pid}.json.gz'}", marks=pytest.mark.slow),
    ],
)
def test_a_request_is_followed_into_the_engine_of_another_process(export: str, tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "profile.yaml").write_text(PROFILE.replace("SUFFIX", export))
    command = [sys.executable, "-m", "instrument"]
    service = ["run", "--profile", "profile.yaml", "--", "service.py"]
    subprocess.run([*command, *service], cwd=tmp_path, check=True, timeout=240, capture_output=True)
    asked = [*command, "report", "traces", "--view", "requests", "--json"]
    told = subprocess.run(asked, cwd=tmp_path, check=True, timeout=240, capture_output=True).stdout
    view = json.loads(told)["views"]["requests"]
    (endpoint,) = view["endpoints"]
    parts = {phase["name"]: phase for phase in endpoint["phases"]}
    assert {"prepare", "accept", "queue", "share of batches", "waiting in batches", "transport", "post"} <= set(parts)
    assert sum(phase["summed_ns"] for phase in parts.values()) + endpoint["unknown_ns"] == endpoint["wall_ns"]
    assert parts["share of batches"]["requests"] == endpoint["requests"] == 6


REPLICA = """
class UserCallableWrapper:
    async def call_http_entrypoint(self, request_metadata, status_code_callback, scope, receive):
        yield []

    async def call_user_method(self, request_metadata, request_args, request_kwargs):
        return request_args

    async def call_user_generator(self, request_metadata, request_args, request_kwargs):
        yield request_args
"""


def test_a_rule_for_a_server_s_own_function_reports_the_request_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ray" / "serve" / "_private"
    folder.mkdir(parents=True)
    (folder / "replica.py").write_text(REPLICA)
    monkeypatch.syspath_prepend(str(tmp_path))
    rule = "match: 'ray.serve._private.replica:UserCallableWrapper.call_user_method', key: request_metadata.request_id"
    running = instrument.start(loads(f"requests: auto\nfunctions: [{{{rule}, name: replica}}]"))
    assert isinstance(running, Session)
    try:
        replica = importlib.import_module("ray.serve._private.replica")
        wrapper = replica.UserCallableWrapper()
        wrapper._deployment_id = types.SimpleNamespace(name="Prices")
        metadata = types.SimpleNamespace(call_method="of", request_id="r1", tracing_context=None)
        assert asyncio.run(wrapper.call_user_method(metadata, (1,), {})) == (1,)
        by_name = {span.site.name: span for span in running.trace().spans}  # on a busy machine with a blocked loop
        inner, request = by_name["replica"], by_name["Prices/of"]
    finally:
        instrument.stop()
        for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
            del sys.modules[name]
    assert (request.site.kind, inner.parent_id, inner.attributes[KEY]) == ("request", request.span_id, "r1")


class Holder:
    """A holder of one request or of a list of requests."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def step(self) -> None:
        pass


class Text(str):
    __slots__ = ()


Named = types.SimpleNamespace
HELD = [
    "a", "", "x" * 300, 7, None, Text("a"), object, [], ["a", "b"], [Text("a")], ["a", 7, None], ["x" * 300], ("a",),
    [Named(id="a"), Named(id="b")], [Named(id="a"), {"id": "b"}], [{"id": "a"}], [Named(id=7)], [Named(id="x" * 300)],
    UUID(int=1), b"a", b"\xff", [b"a"], np.int64(7), np.array(["a", "b"]), np.array([1, 2]), {"a": np.int64(2)},
    [Named(id="a", n=np.float32(1)), Named(id="b", n=2)], [Named(id=np.int64(1), n=True)], HTTPStatus.OK,
    [Named(id=["a"])], [Named()], {"a": Named(id="b")}, {"a": 2}, [Named(id=str(at)) for at in range(BATCH_LIMIT + 2)],
]  # fmt: skip


class Counted(dict[str, Any]):
    """A mapping that is no plain dict."""


class Raising:
    @property
    def id(self) -> str:
        raise ValueError("secret text of the service")


def something(draw: random.Random, depth: int = 3) -> Any:
    """A value such as services have, or one that nobody expects."""
    scalars: list[Any] = ["a", "b-1", "", "x" * 300, 7, -3, 2**70, True, 2.5, None, Text("a"), object, Raising(), b"a"]
    if depth == 0 or draw.random() < 0.4:
        return draw.choice(scalars)
    items = [something(draw, depth - 1) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    if draw.random() < 0.5:
        items = [draw.choice(items) for _ in items]
    kind = draw.randrange(7)
    if kind < 2:
        return items if kind else tuple(items)
    if kind == 2:
        return {f"k{number}": draw.choice([item, 3]) for number, item in enumerate(items)}
    parts = {"id": something(draw, depth - 1), "n": something(draw, depth - 1)}
    return (dict, Counted, lambda **parts: Named(**parts), lambda **_: deque(items))[kind - 3](**parts)


WANTED = [
    "key: self.held", "key: self.held.id", "key: self.held.id.n", "key: {argument: self.held, cut: '-[0-9]$'}",
    "batch: self.held", "batch: 'self.held[]'", "batch: 'self.held[].id'", "batch: 'self.held.id[].n'",
    "batch: 'self.held[].id[].n'", "batch: {argument: 'self.held', cut: '-[0-9]$'}",
    "batch: {argument: 'self.held[].id', weights: 'self.held[].n'}",
    "batch: {argument: self.held.id, weights: self.held.n}",
]  # fmt: skip


def read_by(rule: str, values: Sequence[Any]) -> list[Any]:
    """Return the keys below each value, of arguments and results, with the types and counts of unreadable values."""
    readers = []
    for text in (rule, rule.replace("self.", "return.")):
        (parsed,) = loads(f'functions: [{{match: "m:Holder.step", {text}}}]').functions
        readers.append(make_call_reader(Holder.step, parsed))
    found: list[Any] = []
    for value in values:
        FAULTS.clear()
        told = []
        for holder in (Holder(value), {"held": value}):
            for keys in readers:
                if keys.of_call is not None:
                    told += [keys.of_call((holder,), {}), keys.of_call((), {"self": holder})]
                if keys.of_result is not None:
                    told.append(keys.of_result(holder))
        pairs = [list(one.items()) for one in told if one is not None]
        found.append([pairs, [[*map(type, value)] for one in pairs for _, value in one], unreadable_counts()])
    FAULTS.clear()
    return found


@pytest.mark.parametrize("rule", WANTED)
def test_the_reader_in_c_reads_the_same_as_the_one_in_python(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(rule)
    values = [*HELD, *(something(draw) for _ in range(200))]
    natively = read_by(rule, values)
    monkeypatch.setattr(request_keys, "_native", None)
    assert natively == read_by(rule, values)


def test_keys_that_code_gives_are_the_same_in_c_and_past_it() -> None:
    draw = random.Random("given")
    values = [*HELD, *(something(draw) for _ in range(300))]

    def told(scope: str, bind: str) -> list[Any]:
        recorder = Recorder()
        recorder.begin_recording(1 << 20, {})
        recorder.on = True
        with recorder.scope("given"):
            pass
        for value in values:
            for given in ({"key": value}, {"batch": value}, {"key": value, "kind": "step"}):
                with getattr(recorder, scope)("given", **given):
                    getattr(recorder, bind)(value if "batch" in given else "bound")
        recorder.on = False
        rows = sorted(rows_in(recorder), key=lambda row: row[1])
        return [[(name, value, type(value)) for name, value in (row[10] or {}).items()] for row in rows]

    assert told("scope", "bind") == told("make_scope", "bind_innermost")
    FAULTS.clear()


class Busy:
    """An item whose key is read in another context, inside a span, and whose key clears a list."""

    def __init__(self, recorder: Any, held: list[Any]) -> None:
        self._recorder, self._held = recorder, held

    @property
    def id(self) -> str:
        def found() -> str:
            with self._recorder.scope("inside"):
                self._held.clear()
                return "r1"

        return contextvars.copy_context().run(found)


class Interrupted:
    @property
    def id(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("what", "path"), [("key", "held.id"), ("batch", "held[].id")])
@pytest.mark.parametrize("whence", ["argument", "return"])
def test_reading_may_run_code_of_the_service(what: str, path: str, whence: str) -> None:
    def work(held: Any) -> Any:
        return held

    recorder = Recorder()
    recorder.begin_recording(1 << 20, {})
    recorder.on = True
    path = path if whence == "argument" else path.replace("held", "return", 1)
    (rule,) = loads(f'functions: [{{match: "m:work", {what}: "{path}"}}]').functions
    keys = make_call_reader(work, rule)
    keyed = recorder.wrap(work, Site("work"), keys.of_call, results=keys.of_result)
    held: list[Any] = []
    for holder in (held, [Interrupted()]):
        if holder is held:
            held += [Busy(recorder, held), Busy(recorder, held)]
        given = holder if what == "batch" else holder[0]
        with recorder.scope("around"):
            if holder is held:
                assert keyed(given) is given
            else:
                with pytest.raises(KeyboardInterrupt):
                    keyed(given)
    names = {row[1]: recorder.find_site(row).name for row in rows_in(recorder)}
    rows = [row for row in rows_in(recorder) if recorder.find_site(row).name == "work"]
    told = {KEY: "r1"} if what == "key" else {BATCH_KEYS: ["r1", "r1"]}
    assert [names[row[2]] for row in rows] == ["around"] * (1 if whence == "argument" else 2)
    assert rows[0][10] == told
