"""LitServe's batches, at the places of the real package where its workers take requests, work for them and answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from readback import spans_in

from instrument.instrumentors.requests.servers_and_routers import Requests
from instrument.profile.model import RequestsRule
from instrument.recording.spans import BATCH_KEYS, KEY, Site

base = pytest.importorskip("litserve.loops.base")
server = pytest.importorskip("litserve.server")

STATUS, TYPE = base.LitAPIStatus, base.LoopResponseType


@pytest.fixture
def rules(recorder: Any) -> Iterator[Requests]:
    found = Requests([RequestsRule()], recorder)
    for module in (base, server):
        assert found.may_match(module.__name__)
        found.attach_to(module)
    yield found
    found.undo()


class Worker:
    """A loop of a worker with planned messages and answers."""

    def __init__(self) -> None:
        self.loop = base.LitLoop()
        self.sent: list[Any] = []
        self.transport = SimpleNamespace(send=lambda item, consumer_id: self.sent.append(item))

    def put(self, uid: str, status: str, kind: Any = TYPE.REGULAR) -> None:
        self.loop.put_response(self.transport, 0, uid, (), status=status, response_type=kind)


def batches(recorder: Any) -> list[tuple[str, Any]]:
    return [(span.site.name, span.attributes[BATCH_KEYS]) for span in spans_in(recorder)]


def predict(items: list[int]) -> list[int]:
    return [item + 1 for item in items]


def encode_response(items: Iterator[int]) -> Iterator[int]:
    yield from items


def test_a_call_serves_what_has_been_taken_and_not_answered(rules: Requests, recorder: Any) -> None:
    worker = Worker()
    base._inject_context({}, predict, [0])  # before anything was taken, as a warm-up is
    worker.put("a", STATUS.START)
    worker.put("late", STATUS.START)
    worker.put("late", STATUS.ERROR)
    worker.put("b", STATUS.START)
    assert base._inject_context([{}, {}], predict, [1, 2]) == [2, 3]
    worker.put("a", STATUS.OK)
    worker.put("b", STATUS.ERROR)
    worker.put("c", STATUS.START)
    with pytest.raises(TypeError):
        base._inject_context({}, predict, None)
    assert batches(recorder) == [("litserve predict", ("a", "b")), ("litserve predict", ("c",))]
    assert [uid for uid, _ in worker.sent] == ["late", "a", "b"]
    assert spans_in(recorder)[1].error


def test_a_stream_is_a_batch_until_its_last_part_has_gone(rules: Requests, recorder: Any) -> None:
    worker = Worker()
    worker.put("a", STATUS.START, TYPE.STREAMING)
    for _ in base._inject_context({}, encode_response, iter(range(3))):
        worker.put("a", STATUS.OK, TYPE.STREAMING)
        last_ns = time.monotonic_ns()
    worker.put("a", STATUS.FINISH_STREAMING, TYPE.STREAMING)
    base._inject_context({}, predict, [])
    assert batches(recorder) == [("litserve encode_response", ("a",))]
    assert spans_in(recorder)[0].end_ns >= last_ns


def test_a_request_is_known_by_the_id_that_waits_for_its_answer(rules: Requests, recorder: Any) -> None:
    app = SimpleNamespace(response_queue_id=0)
    queue = SimpleNamespace(put=lambda item: None)
    callbacks = SimpleNamespace(trigger_event=lambda *_, **__: None)
    owner = SimpleNamespace(
        app=app, active_requests=0, _callback_runner=callbacks, _get_request_queue=lambda path: queue
    )
    handler = SimpleNamespace(server=owner, lit_api=SimpleNamespace(api_path="/predict"))
    frame = recorder.open(Site("POST /predict", "request"))
    uid, _ = asyncio.run(server.BaseRequestHandler._submit_request(handler, {}))
    recorder.close(frame)
    (span,) = spans_in(recorder)
    assert span.attributes[KEY] == uid


def test_a_loop_whose_rule_is_gone_records_nothing(rules: Requests, recorder: Any) -> None:
    original = base._inject_context.__wrapped__
    rules.undo()
    assert base._inject_context is original
    Worker().put("a", STATUS.START)
    assert base._inject_context({}, predict, [1]) == [2]
    assert spans_in(recorder) == []
