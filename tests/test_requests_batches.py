"""Batches and events of servers that queue requests themselves, where BentoML and Gradio take them."""

from __future__ import annotations

import asyncio
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from readback import spans_in

from instrument.instrumentors.requests.queue_jobs import TIME_IN_QUEUE
from instrument.instrumentors.requests.servers_and_routers import Requests
from instrument.profile.model import RequestsRule
from instrument.recording.spans import BATCH_KEYS, KEY, Site


class CorkDispatcher:
    """A dispatcher as BentoML's: requests wait until as many are there as make a batch."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.loops: list[Any] = []

    async def inbound_call(self, data: Any) -> Any:
        job = SimpleNamespace(data=data, future=asyncio.get_running_loop().create_future())
        self.jobs.append(job)
        if len(self.jobs) == 2:
            jobs, self.jobs = tuple(self.jobs), []
            self.loops.append(asyncio.create_task(self.outbound_call(jobs)))
        return await job.future

    async def outbound_call(self, inputs_info: Any, training: bool = False) -> None:
        await asyncio.sleep(0)
        for job in inputs_info:
            job.future.set_result(job.data[0] * 2)


def test_an_adaptive_batch_of_bentoml_has_the_keys_of_its_requests(recorder: Any) -> None:
    module: Any = ModuleType("bentoml._internal.marshal.dispatcher")
    module.CorkDispatcher = type("CorkDispatcher", (CorkDispatcher,), dict(vars(CorkDispatcher)))
    rules = Requests([RequestsRule()], recorder)
    rules.attach_to(module)

    async def ask(dispatcher: Any, number: int) -> Any:
        frame = recorder.open_request(Site(f"POST /{number}", "request"), {}, None, None)
        answer = await dispatcher.inbound_call([number])
        recorder.close(frame, None, True)
        return answer

    async def main() -> list[Any]:
        dispatcher = module.CorkDispatcher()
        return await asyncio.gather(*(ask(dispatcher, number) for number in range(4)))

    assert asyncio.run(main()) == [0, 2, 4, 6]
    rules.undo()
    spans = spans_in(recorder)
    keys = {span.site.name: span.attributes[KEY] for span in spans if span.site.kind == "request"}
    batches = [span for span in spans if span.site.name == "bentoml batch"]
    wanted = [(keys["POST /0"], keys["POST /1"]), (keys["POST /2"], keys["POST /3"])]
    assert sorted(span.attributes[BATCH_KEYS] for span in batches) == sorted(wanted)
    assert {span.parent_id for span in batches} == {0}


class Queue:
    """A queue as Gradio's, which calls a function by way of its routes."""

    async def process_events(self, events: Any, batch: bool, begin_time: float, fn: Any) -> None:
        try:
            await self.routes.call_process_api(fn)  # type: ignore[attr-defined]
        except ValueError:
            events[0].is_failed = True


def test_an_event_of_gradio_is_a_request_named_by_its_function(recorder: Any) -> None:
    module: Any = ModuleType("gradio.queueing")

    async def call_process_api(fn: Any) -> None:
        await asyncio.sleep(0)
        fn.function()

    module.route_utils = SimpleNamespace(call_process_api=call_process_api)
    module.Queue = type("Queue", (Queue,), {**vars(Queue), "routes": module.route_utils})
    rules = Requests([RequestsRule()], recorder)
    rules.attach_to(module)

    def fail() -> None:
        raise ValueError("as asked")

    async def main() -> list[Any]:
        events = []
        for number, function in enumerate((lambda: None, fail), 1):
            fn = SimpleNamespace(api_name=("predict", "fail")[number - 1], function=function)
            headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
            event = SimpleNamespace(
                alive=True,
                fn=fn,
                request=SimpleNamespace(headers=headers),
                concurrency_id="shop",
                _id=str(number),
                enqueue_time=time.monotonic(),
                is_failed=False,
            )
            events.append(event)
            await module.Queue().process_events([event], False, 0.0, fn)
        return [event.is_failed for event in events]

    assert asyncio.run(main()) == [False, True]
    rules.undo()
    spans = sorted((span for span in spans_in(recorder) if span.site.kind == "request"), key=lambda span: span.start_ns)
    assert [(span.site.name, span.error) for span in spans] == [("/predict", None), ("/fail", "ValueError")]
    assert [span.remote.trace_id for span in spans if span.remote] == [1, 2]
    assert all(float(str(span.attributes[TIME_IN_QUEUE])) == pytest.approx(0, abs=600) for span in spans)
