"""Record the requests and batches of model servers with worker processes: LitServe, mosec, BentoML and Ray Serve.

- LitServe: requests are recorded by the ASGI app. Each call of `decode_request`, `predict` or `encode_response` in a
  worker is recorded as a batch of all unanswered requests. Calls in asynchronous loops are not recorded.
- mosec: a batch is a span from its arrival at a worker to its answers. A request is a span from its arrival at the
  first stage to the answer of the last stage.
- BentoML: an adaptive batch is a span, and each of its requests gets a key.
- Ray Serve: a request is a span from the call of a deployment in its replica to the end of the answer.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from mmap import mmap
from struct import Struct
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from instrument.instrumentors.profiled_functions import Undo, note_calls, replaces_attribute
from instrument.instrumentors.requests import asgi_wsgi_apps
from instrument.instrumentors.requests.exchange import Attach, Exchanges, Reading, SteppedItems
from instrument.recorder.wrapping import FIRST_OF_SERVER, STATUS
from instrument.recording.spans import BATCH_KEYS, BATCH_LIMIT, ITEMS, KEY, Site
from instrument.runtime.agent_socket import find_shared_file
from instrument.runtime.faults import FAULTS

LITSERVE_STREAM = "encode_response"
"""The method of LitServe that returns a streamed answer. The method's span ends with the stream."""


class _LitServeRequests(threading.local):
    """The ids of the requests that the current thread has taken and not yet answered."""

    def __init__(self) -> None:
        self.ids: list[str] = []


def _attach_litserve_server(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Use LitServe's id of a request as the key of the request's span."""
    handler = module.BaseRequestHandler
    submit = handler._submit_request

    @replaces_attribute(handler, "_submit_request")
    async def restore_submit_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        submitted = await submit(self, *args, **kwargs)
        with FAULTS.guard("request of LitServe"):
            if exchanges.is_on and exchanges.recorder.on:
                exchanges.recorder.annotate_innermost({KEY: submitted[0]})
        return submitted

    return [restore_submit_request]


def _attach_litserve_worker(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record each call of the service's code in a LitServe worker as a batch of the open requests."""
    recorder, open_requests = exchanges.recorder, _LitServeRequests()
    sites: dict[str, Site] = {}
    put, inject = module.LitLoop.put_response, module._inject_context
    start, parts = module.LitAPIStatus.START, module.LitAPIStatus.OK
    streaming = module.LoopResponseType.STREAMING

    @replaces_attribute(module.LitLoop, "put_response")
    def restore_put_response(
        self: Any, transport: Any, response_queue_id: Any, uid: Any, response_data: Any, status: Any, response_type: Any
    ) -> None:
        with FAULTS.guard("batch of LitServe"):
            if status == start:
                if len(open_requests.ids) < BATCH_LIMIT:
                    open_requests.ids.append(uid)
            elif not (status == parts and response_type == streaming) and uid in open_requests.ids:
                open_requests.ids.remove(uid)
        put(self, transport, response_queue_id, uid, response_data, status, response_type)

    @replaces_attribute(module, "_inject_context")
    def restore_inject_context(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if not open_requests.ids or not exchanges.is_on or not recorder.on:
            return inject(context, func, *args, **kwargs)
        name = getattr(func, "__name__", "call")
        site = sites.get(name) or sites.setdefault(name, Site(f"litserve {name}", "op"))
        frame = recorder.open(site, {BATCH_KEYS: tuple(open_requests.ids)})
        try:
            answer = inject(context, func, *args, **kwargs)
        except BaseException as error:
            recorder.close(frame, error, True)
            raise
        if name == LITSERVE_STREAM and isinstance(answer, Iterator):
            return _record_stream_items(answer, frame)
        recorder.close(frame, None, True)
        return answer

    def _record_stream_items(items: Iterator[Any], frame: Any) -> Iterator[Any]:
        error: BaseException | None = None
        try:
            yield from items
        except BaseException as raised:
            error = raised
            raise
        finally:
            recorder.close(frame, error, True)

    return [restore_put_response, restore_inject_context]


BATCH_SIZE = "requests"
"""The attribute with the number of requests in a batch."""

INGRESS, EGRESS, OK = 1, 2, 200
"""The bits that mark the first and the last stage in mosec's request state, and the HTTP status of success."""

MOSEC_STATUSES = {"OK": 200, "BAD_REQUEST": 400, "VALIDATION_ERROR": 422, "INTERNAL_ERROR": 500, "TIMEOUT_ERROR": 408}
"""The HTTP status of an answer, by a mosec worker's flag."""

MOSEC_SLOTS = 1 << 14
"""The maximum number of open requests per mosec server. With more, some requests' spans begin only at the last
stage."""

_MOSEC_BEGIN = Struct("<qq")
_MOSEC_REQUEST = Site("mosec", "request")


class _MosecBegins:
    """The start times of a mosec server's requests, by request number. All processes of a run share the memory."""

    def __init__(self, folder: str) -> None:
        self._memory: Any = bytearray(MOSEC_SLOTS * _MOSEC_BEGIN.size)
        path = find_shared_file(f"mosec-{crc32(folder.encode()):08x}")
        if path is not None:
            with suppress(OSError):  # the disk is full: this process knows the begins that it has noted itself
                file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    # A write to a page without room on the disk would end the service by SIGBUS.
                    os.posix_fallocate(file, 0, len(self._memory))
                    self._memory = mmap(file, len(self._memory))
                finally:
                    os.close(file)

    def note_begin(self, number: int, at_ns: int) -> None:
        _MOSEC_BEGIN.pack_into(self._memory, number % MOSEC_SLOTS * _MOSEC_BEGIN.size, number, at_ns)

    def begin_ns(self, number: int, otherwise_ns: int) -> int:
        noted_number, at_ns = _MOSEC_BEGIN.unpack_from(self._memory, number % MOSEC_SLOTS * _MOSEC_BEGIN.size)
        return at_ns if noted_number == number and 0 < at_ns <= otherwise_ns else otherwise_ns


class _MosecBatches:
    """The batches of one mosec worker, which handles one batch at a time."""

    def __init__(self, exchanges: Exchanges, protocol: Any) -> None:
        self._recorder = exchanges.recorder
        # The protocol has the coordinator's name, such as <Inference_1|2> for the second worker of a stage.
        self._site = Site(f"mosec {protocol.name.strip('<>').partition('|')[0]}", "step")
        self._begins = _MosecBegins(getattr(protocol, "addr", "").rpartition("/")[0])
        self._frame: Any = None
        self._events = self._begin_ns = 0

    def begin_batch(self, ids: Sequence[bytes], states: Sequence[int]) -> None:
        self.end_batch(None, (), ())
        self._events = 0
        numbers = [int.from_bytes(request_id, "big") for request_id in ids]
        keys = tuple(map(str, numbers[:BATCH_LIMIT]))
        self._begin_ns = self._recorder.now_ns()
        for number, state in zip(numbers, states, strict=False):
            if state & INGRESS:
                self._begins.note_begin(number, self._begin_ns)
        self._frame = self._recorder.open(self._site, {BATCH_SIZE: len(ids), BATCH_KEYS: keys})

    def count_answer_parts(self, count: int) -> None:
        """Count parts of streamed answers. Another thread calls this."""
        self._events += count

    def end_batch(self, flag: Any, ids: Sequence[bytes], states: Sequence[int]) -> None:
        """End the batch with the status `flag`. Also end the requests that are complete.

        A request is complete after its last stage or after an error.
        """
        frame, self._frame = self._frame, None
        if frame is None:
            return
        status = MOSEC_STATUSES.get(getattr(flag, "name", None) or "")
        facts: dict[Any, Any] = {} if status is None else {STATUS: status}
        error = str(status) if status is not None and status >= FIRST_OF_SERVER else None
        self._recorder.annotate(frame, {**facts, ITEMS: self._events} if self._events else facts)
        self._recorder.close(frame, error, True)
        for request_id, state in zip(ids, states, strict=False):
            if state & EGRESS or status != OK:
                number = int.from_bytes(request_id, "big")
                begin_ns = self._begins.begin_ns(number, self._begin_ns)
                self._recorder.record(_MOSEC_REQUEST, begin_ns, {KEY: str(number), **facts}, None, False, error)


def _attach_mosec(module: Any, exchanges: Exchanges) -> list[Undo]:
    protocol, event = module.Protocol, module.HTTPStatusCode.STREAM_EVENT
    receive, send = protocol.receive, protocol.send
    of: WeakKeyDictionary[Any, _MosecBatches] = WeakKeyDictionary()

    @replaces_attribute(protocol, "receive")
    def restore_receive(self: Any) -> Any:
        task = receive(self)
        if exchanges.is_on and exchanges.recorder.on:
            with FAULTS.guard("batch of mosec"):
                (of.get(self) or of.setdefault(self, _MosecBatches(exchanges, self))).begin_batch(task[1], task[2])
        return task

    @replaces_attribute(protocol, "send")
    def restore_send(self: Any, flag: Any, ids: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return send(self, flag, ids, states, *args, **kwargs)
        finally:
            with FAULTS.guard("batch of mosec"):
                batches = of.get(self)
                if batches is not None and flag == event:
                    batches.count_answer_parts(len(ids))
                elif batches is not None:
                    batches.end_batch(flag, ids, states)

    return [restore_receive, restore_send]


def _attach_bento(module: Any, exchanges: Exchanges) -> list[Undo]:
    dispatcher, recorder = module.CorkDispatcher, exchanges.recorder
    wait, compute = dispatcher.inbound_call, dispatcher.outbound_call
    key_by_input: dict[int, str] = {}
    numbers, site = itertools.count(1), Site("bentoml batch", "step")

    @replaces_attribute(dispatcher, "inbound_call")
    async def restore_inbound_call(self: Any, data: Any) -> Any:
        if not exchanges.is_on or not recorder.on:
            return await wait(self, data)
        key = key_by_input[id(data)] = f"{os.getpid()}.{next(numbers)}"
        recorder.annotate_innermost({KEY: key})
        try:
            return await wait(self, data)
        finally:
            key_by_input.pop(id(data), None)

    @replaces_attribute(dispatcher, "outbound_call")
    async def restore_outbound_call(self: Any, jobs: Any, *args: Any, **kwargs: Any) -> None:
        keys = tuple(key for job in jobs[:BATCH_LIMIT] if (key := key_by_input.get(id(job.data))) is not None)
        if not keys or not exchanges.is_on or not recorder.on:
            await compute(self, jobs, *args, **kwargs)
            return
        recorder.forget_current()  # the first request has started the loop that makes all batches
        frame = recorder.open(site, {BATCH_SIZE: len(jobs), BATCH_KEYS: keys})
        try:
            await recorder.stepped_in(frame, compute(self, jobs, *args, **kwargs))
        finally:
            recorder.close(frame, None, True)

    return [restore_inbound_call, restore_outbound_call]


def _attach_ray_replica(module: Any, exchanges: Exchanges) -> list[Undo]:
    wrapper = module.UserCallableWrapper
    http, call, stream = wrapper.call_http_entrypoint, wrapper.call_user_method, wrapper.call_user_generator

    arrivals = asgi_wsgi_apps.get_arrivals(exchanges)
    calls = exchanges.get_arrivals("ray_serve", lambda call: "/" + _ray_method_name(call), None, _read_ray_call)

    @replaces_attribute(wrapper, "call_http_entrypoint")
    async def restore_call_http_entrypoint(
        self: Any, metadata: Any, request: Any, scope: Any, receive: Any
    ) -> AsyncIterator[Any]:
        batches = http(self, metadata, request, scope, receive)
        exchange = arrivals["websocket" if scope["type"] == "websocket" else "http"].begin_exchange(scope)
        if exchange is None:
            async for messages in batches:
                yield messages
            return
        with FAULTS.guard("route of a request of Ray Serve"):
            if self.get_user_method_info(metadata.call_method).is_asgi_app:
                exchange.add_route_prefix(scope.get("root_path", ""))  # within it the app's router finds the route
            elif metadata.route:
                exchange.set_route(metadata.route)
        channel = _RayAnswer() if scope["type"] == "http" else asgi_wsgi_apps.Websocket()
        channel.exchange, channel.server_receive, channel.server_send = exchange, receive, _send_nothing
        batches = SteppedItems(exchange, batches)
        try:
            async for messages in batches:
                await forward_messages(channel, messages)
                yield messages
        except BaseException as error:
            if isinstance(error, GeneratorExit) and isinstance(channel, _RayAnswer) and channel.is_complete:
                channel.end()
            exchange.end_with_exception(error)
            if isinstance(error, GeneratorExit):
                await batches.aclose()
            raise
        if isinstance(channel, _RayAnswer) and channel.is_complete:
            channel.end()
        exchange.end()

    async def forward_messages(channel: asgi_wsgi_apps.AsgiChannel, messages: Any) -> None:
        with FAULTS.guard("answer of Ray Serve"):
            for message in messages:
                await channel.send(message)

    @replaces_attribute(wrapper, "call_user_method")
    def restore_call_user_method(self: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        answer = call(self, metadata, *args, **kwargs)
        return answer if getattr(self, "_local_testing_mode", False) else call_and_record(self, metadata, answer)

    async def call_and_record(self: Any, metadata: Any, answer: Any) -> Any:
        exchange = calls.begin_exchange((self, metadata))
        return await (answer if exchange is None else exchange.serve(answer, exchange.end))

    @replaces_attribute(wrapper, "call_user_generator")
    async def restore_call_user_generator(self: Any, metadata: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        answers = stream(self, metadata, *args, **kwargs)
        exchange = calls.begin_exchange((self, metadata))
        if exchange is None:
            async for answer in answers:
                yield answer
            return
        answers = SteppedItems(exchange, answers)
        try:
            async for answer in answers:
                exchange.note_sent_items()
                yield answer
        except BaseException as error:
            exchange.end(error)
            if isinstance(error, GeneratorExit):
                await answers.aclose()
            raise
        exchange.end()

    return [restore_call_http_entrypoint, restore_call_user_method, restore_call_user_generator]


def _attach_ray_batching(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Clear the current request in the loop of `@serve.batch`. The loop has inherited the context of the request that
    started it."""
    queue = module._BatchQueue
    loop = queue._process_batches

    @replaces_attribute(queue, "_process_batches")
    async def restore_process_batches(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchanges.recorder.forget_current()
        return await loop(self, *args, **kwargs)

    return [restore_process_batches]


def _mute_process(class_name: str, module: Any, exchanges: Exchanges) -> list[Undo]:
    def stop_recording(*_: Any, **__: Any) -> None:
        exchanges.is_on = False

    return [note_calls(getattr(module, class_name), "__init__", stop_recording)]


def _ray_method_name(call: tuple[Any, Any]) -> str:
    wrapper, metadata = call
    return f"{wrapper._deployment_id.name}/{metadata.call_method}"


def _read_ray_call(call: tuple[Any, Any], _: Any) -> Reading:
    context = getattr(call[1], "tracing_context", None) or {}  # a handle sends it if Ray's own tracing is on
    headers = {name.encode(): text.encode() for name, text in context.items() if isinstance(text, str)}
    return (_ray_method_name(call), None, None, None), headers, {}


class _RayAnswer(asgi_wsgi_apps.Http):
    """The messages of a replica's answer. The request ends with the replica's work, not with the last message."""

    __slots__ = ()

    def __init__(self) -> None:
        self.is_complete = False

    async def _send_last_message(self, message: asgi_wsgi_apps.Message) -> None:
        self.is_complete = True


async def _send_nothing(_: Any) -> None:
    """Do nothing. The replica itself sends the messages."""


SEAMS: Mapping[str, Mapping[str, Attach]] = {
    "litserve": {"litserve.server": _attach_litserve_server, "litserve.loops.base": _attach_litserve_worker},
    "mosec": {"mosec.protocol": _attach_mosec},
    "bentoml": {"bentoml._internal.marshal.dispatcher": _attach_bento},
    "ray_serve": {
        "ray.serve._private.replica": _attach_ray_replica,
        "ray.serve.batching": _attach_ray_batching,
        # The proxy's actor itself is sent to its process by value. The dashboard asks twice a second.
        "ray.serve._private.proxy": partial(_mute_process, "GenericProxy"),
        "ray.dashboard.modules.reporter.reporter_agent": partial(_mute_process, "ReporterAgent"),
        "ray.dashboard.http_server_head": partial(_mute_process, "HttpServerDashboardHead"),
        "ray.dashboard.subprocesses.module": partial(_mute_process, "SubprocessModule"),
    },
}
"""The functions that instrument the modules of servers, by kind of server and module name."""
