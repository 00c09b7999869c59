"""`requests: auto` in Triton's Python backend, against a stand-in for what the backend makes in C++.

The stand-in does what the documented interface says: a model is imported as `1.model` and given lists of requests.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from readback import spans_in

from instrument import chrome
from instrument.instrumentors.requests.servers_and_routers import Requests
from instrument.profile.model import RequestsRule
from instrument.recording.spans import Site, Span, is_interruption
from instrument.runtime.faults import FAULTS

FINAL = 1


class InferenceTrace:
    __slots__ = ("_context",)

    def __init__(self, context: str | None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        return self._context


class InferenceResponse:
    __slots__ = ("error", "output")

    def __init__(self, output: str = "", error: str | None = None) -> None:
        self.output = output
        self.error = error

    def has_error(self) -> bool:
        return self.error is not None


class ResponseSender:
    __slots__ = ("__weakref__", "_to")

    def __init__(self, to: list[Any]) -> None:
        self._to = to

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        self._to.append((response and response.output, flags))


class InferenceRequest:
    __slots__ = ("_cancelled", "_sender", "_trace_id", "item", "received")

    def __init__(self, item: str, trace_id: int = 0, cancelled: bool = False) -> None:
        self.item = item
        self.received: list[Any] = []
        self._trace_id = trace_id
        self._cancelled = cancelled
        self._sender = ResponseSender(self.received)

    def model_name(self) -> str:
        return "shop"

    def is_cancelled(self) -> bool:
        return self._cancelled

    def trace(self) -> InferenceTrace:
        told = {"traceparent": f"00-{self._trace_id:032x}-{1:016x}-01"}
        return InferenceTrace(json.dumps(told) if self._trace_id else None)

    def get_response_sender(self) -> ResponseSender:
        return self._sender


MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pb_utils.work()
        if any(request.item == "crash" for request in requests):
            raise ValueError("as asked")
        return [
            pb_utils.InferenceResponse(error="no price" if request.item == "stone" else None) for request in requests
        ]
"""
ASYNC_MODEL = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0)
        pb_utils.work()
        return [pb_utils.InferenceResponse() for _ in requests]
"""
DECOUPLED_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    later = []

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for part in request.item:
                sender.send(pb_utils.InferenceResponse(part))
            self.later.append(sender)

    def finish(self):
        for sender in self.later:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.later.clear()
"""
ASYNC_DECOUPLED_MODEL = """
import asyncio
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    go = threading.Event()

    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        while not self.go.is_set():
            await asyncio.sleep(0.001)
        pb_utils.work()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
RETURNING_MODEL = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return self.answer(len(requests), requests[0].item == "crash")

    async def answer(self, count, fails):
        await asyncio.sleep(0)
        if fails:
            raise ValueError("as asked")
        return [pb_utils.InferenceResponse(error="no price") for _ in range(count)]
"""
EMPTYING_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        while requests:
            requests.pop()
            answers.append(pb_utils.InferenceResponse())
        return answers
"""

Load = Callable[[str], Any]


@pytest.fixture
def load(recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Loads a model as the backend does, its requests recorded: the model and the request rule at work."""
    utils: Any = ModuleType("triton_python_backend_utils")
    utils.InferenceResponse, utils.InferenceRequest = InferenceResponse, InferenceRequest
    utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    utils.work = lambda: recorder.close(recorder.open(Site("work", "phase")))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    rules = Requests([RequestsRule()], recorder)

    def loaded(text: str) -> Any:
        module: Any = ModuleType("1.model")
        exec(textwrap.dedent(text), vars(module))
        assert rules.may_match("1.model")
        rules.attach_to(module)
        model = module.TritonPythonModel()
        model.rules = rules
        return model

    yield loaded
    rules.undo()


def of_kind(recorder: Any, kind: str) -> list[Span]:
    return [span for span in spans_in(recorder) if span.site.kind == kind]


def test_a_request_alone_is_one_with_what_is_done_for_it_in_the_trace_of_its_caller(load: Load, recorder: Any) -> None:
    model = load(MODEL)
    for number in range(200):
        (response,) = model.execute([InferenceRequest("one", number + 1)])
        assert not response.has_error()
    requests, work = of_kind(recorder, "request"), of_kind(recorder, "phase")
    assert Counter(span.site.name for span in requests) == {"shop": 200}
    assert {span.remote.trace_id for span in requests if span.remote} == set(range(1, 201))
    assert Counter(span.parent_id for span in work) == dict.fromkeys((span.span_id for span in requests), 1)
    assert of_kind(recorder, "step") == []


def test_requests_that_come_at_once_are_side_by_side_and_their_work_is_a_step(load: Load, recorder: Any) -> None:
    load(MODEL).execute([InferenceRequest(item, number + 1) for number, item in enumerate(("one", "stone", "two"))])
    requests, (step,), (work,) = (of_kind(recorder, kind) for kind in ("request", "step", "phase"))
    assert Counter(span.error for span in requests) == {None: 2, "TritonError": 1}
    assert {span.parent_id for span in requests} == {0}
    assert {span.remote.trace_id for span in requests if span.remote} == {1, 2, 3}
    assert (step.site.name, step.attributes["requests"], step.parent_id) == ("shop batch", 3, 0)
    assert work.parent_id == step.span_id
    recorder.close(recorder.open(Site("after", "op")))
    assert [span.parent_id for span in of_kind(recorder, "op")] == [0]


def test_an_exception_fails_all_requests_of_its_batch(load: Load, recorder: Any) -> None:
    model = load(MODEL)
    with pytest.raises(ValueError, match="as asked"):
        model.execute([InferenceRequest("one"), InferenceRequest("crash")])
    assert [span.error for span in of_kind(recorder, "request")] == ["ValueError"] * 2


def test_a_model_that_is_a_coroutine_records_until_it_is_done(load: Load, recorder: Any) -> None:
    model = load(ASYNC_MODEL)
    for count in (1, 2):
        assert len(asyncio.run(model.execute([InferenceRequest("one") for _ in range(count)]))) == count
    assert len(of_kind(recorder, "request")) == 3
    assert not recorder.open_rows()


def test_a_decoupled_request_ends_with_its_final_response(load: Load, recorder: Any) -> None:
    model = load(DECOUPLED_MODEL)
    requests = [InferenceRequest("ab"), InferenceRequest("abc")]
    assert model.execute(requests) is None
    assert [span for span in of_kind(recorder, "request") if not span.clipped] == []
    model.finish()
    assert not recorder.open_rows()
    assert sorted(span.attributes["items"] for span in of_kind(recorder, "request")) == [2, 3]
    assert [request.received for request in requests] == [
        [("a", 0), ("b", 0), (None, FINAL)],
        [("a", 0), ("b", 0), ("c", 0), (None, FINAL)],
    ]


def test_a_request_whose_response_sender_is_dropped_before_its_final_response_ends_there(
    load: Load, recorder: Any
) -> None:
    model = load(DECOUPLED_MODEL)
    requests = [InferenceRequest("ab"), InferenceRequest("c")]
    model.execute(requests)
    assert len(recorder.open_rows()) == 2
    model.later.clear()
    requests.clear()
    gc.collect()
    assert recorder.open_rows() == []
    found = [(span.attributes["items"], span.attributes["instrument.outcome"]) for span in of_kind(recorder, "request")]
    assert sorted(found) == [(1, "dropped"), (2, "dropped")]


@pytest.mark.parametrize("count", [1, 2])
def test_requests_end_with_the_coroutine_that_a_model_which_is_none_returns(
    load: Load, recorder: Any, count: int
) -> None:
    model = load(RETURNING_MODEL)
    begun = model.execute([InferenceRequest("one") for _ in range(count)])
    assert asyncio.iscoroutine(begun)
    assert recorder.current_span_id() == 0
    assert [span for span in spans_in(recorder) if not span.clipped] == []
    assert len(asyncio.run(begun)) == count
    with pytest.raises(ValueError, match="as asked"):
        asyncio.run(model.execute([InferenceRequest("crash") for _ in range(count)]))
    assert recorder.open_rows() == []
    errors = [span.error for span in of_kind(recorder, "request")]
    assert sorted(errors) == sorted(["TritonError", "ValueError"] * count)


@pytest.mark.filterwarnings("ignore:coroutine 'TritonPythonModel.answer' was never awaited")
def test_requests_end_with_a_coroutine_that_is_never_awaited(load: Load, recorder: Any) -> None:
    begun = load(RETURNING_MODEL).execute([InferenceRequest("one")])
    begun.close()
    del begun
    gc.collect()
    assert recorder.open_rows() == []


def test_decoupled_requests_that_are_open_have_nothing_of_the_ones_after_them(load: Load, recorder: Any) -> None:
    model = load(DECOUPLED_MODEL)
    for item in ("a", "b", "c"):
        model.execute([InferenceRequest(item)])
    model.finish()
    spans = of_kind(recorder, "request")
    assert [(span.parent_id, span.clipped, span.attributes["items"]) for span in spans] == [(0, False, 1)] * 3


def test_decoupled_requests_of_a_coroutine_are_one_each_though_they_overlap(load: Load, recorder: Any) -> None:
    model = load(ASYNC_DECOUPLED_MODEL)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    # As the backend does it, which waits for none of them.
    begun = [asyncio.run_coroutine_threadsafe(model.execute([InferenceRequest("one")]), loop) for _ in range(3)]
    assert recorder.current_span_id() == 0
    model.go.set()
    for one in begun:
        one.result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    requests, work = of_kind(recorder, "request"), of_kind(recorder, "phase")
    assert [span.parent_id for span in requests] == [0] * 3
    assert sorted(span.parent_id for span in work) == sorted(span.span_id for span in requests)


@pytest.mark.parametrize("context", ["{nope", "[1]", '"text"'])
def test_a_trace_context_that_is_none_counts_for_none(load: Load, recorder: Any, context: str) -> None:
    class Odd(InferenceRequest):
        __slots__ = ()

        def trace(self) -> InferenceTrace:
            return InferenceTrace(context)

    load(MODEL).execute([InferenceRequest("one"), Odd("two")])
    assert [span.error for span in of_kind(recorder, "request")] == [None, None]
    assert (recorder.open_rows(), recorder.current_span_id()) == ([], 0)


def test_a_fault_of_ours_in_the_midst_of_a_batch_leaves_nothing_open(
    load: Load, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(InferenceRequest):
        __slots__ = ()

        def trace(self) -> InferenceTrace:
            raise RuntimeError("no trace")

    model = load(MODEL)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert len(model.execute([InferenceRequest("one"), Broken("two")])) == 2
    assert FAULTS.count_by_place() == {"begin of a request": 1}
    FAULTS.clear()
    assert (recorder.open_rows(), recorder.current_span_id()) == ([], 0)


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_may_empty_the_list_of_its_requests(load: Load, recorder: Any, count: int) -> None:
    load(EMPTYING_MODEL).execute([InferenceRequest("one") for _ in range(count)])
    assert len(of_kind(recorder, "request")) == count
    assert (recorder.open_rows(), recorder.current_span_id()) == ([], 0)


def test_while_nothing_is_recorded_no_request_is(load: Load, recorder: Any) -> None:
    model = load(MODEL)
    recorder.on = False
    model.execute([InferenceRequest("one")])
    recorder.on = True
    assert of_kind(recorder, "request") == []


def test_a_request_that_was_cancelled_is_named(load: Load, recorder: Any) -> None:
    load(MODEL).execute([InferenceRequest("one", cancelled=True)])
    (span,) = of_kind(recorder, "request")
    assert span.attributes["instrument.outcome"] == "cancelled"


def test_a_model_is_left_as_it_was_once_the_rule_is_gone(load: Load, recorder: Any) -> None:
    model = load(DECOUPLED_MODEL)
    model.execute([InferenceRequest("a")])
    model.finish()
    model.rules.undo()
    model.execute([InferenceRequest("a")])
    model.finish()
    assert len(of_kind(recorder, "request")) == 1
    assert InferenceRequest.get_response_sender.__module__ == __name__
    assert ResponseSender.send.__module__ == __name__


def test_a_request_that_is_answered_through_a_sender_ends_with_the_rule(load: Load, recorder: Any) -> None:
    model = load(DECOUPLED_MODEL)
    model.execute([InferenceRequest("a"), InferenceRequest("b")])
    model.rules.undo()
    assert recorder.open_rows() == []
    assert ["instrument.outcome" in span.attributes for span in of_kind(recorder, "request")] == [False, False]
    model.finish()


STUB = """
import importlib, sys
sys.path += [".", "backend"]
module = importlib.import_module("1.model")
import triton_python_backend_utils as pb_utils
model = module.TritonPythonModel()
for number in range(5):
    model.execute([pb_utils.InferenceRequest() for _ in range(2)])
"""
UTILS = """
class InferenceRequest:
    item = "one"
    def model_name(self):
        return "shop"

class InferenceResponse:
    def __init__(self, error=None):
        pass

def work():
    pass
"""


def test_a_model_is_met_under_the_name_that_the_backend_imports_it_by(tmp_path: Path) -> None:
    for path, text in {"1/model.py": MODEL, "backend/triton_python_backend_utils.py": UTILS, "stub.py": STUB}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    profile = 'requests: {servers: triton}\nexport: {chrome: {path: "traces/{pid}.json"}}\n'
    (tmp_path / "profile.yaml").write_text(profile)
    command = [sys.executable, "-m", "instrument", "run", "--profile", "profile.yaml", "--", "stub.py"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("INSTRUMENT")}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=240)
    (path,) = (tmp_path / "traces").glob("*.json")
    sites = [span.site for span in chrome.load(path)[0].spans]
    names = Counter(site.name for site in sites if not is_interruption(site))  # a collection may take long
    assert names == {"shop": 10, "shop batch": 5}
