"""Ray Serve: each request that a replica has taken, as one span from the call of the deployment to its last answer.

We stand where a replica hands a request to the deployment's code, after it has decided to take it: a try that it
rejects is no request. Requests over HTTP are named by method and route, prefix included; calls through a handle by
deployment and method. The servers of proxies, of Ray's agent and of its dashboard record nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from instrument.instrumentors.functions import Undo, takes_place
from instrument.instrumentors.requests import asgi
from instrument.instrumentors.requests.exchange import Arrival, Exchanges, SteppedItems
from instrument.runtime.faults import FAULTS


def _replica(module: Any, exchanges: Exchanges) -> list[Undo]:
    wrapper = module.UserCallableWrapper
    http, call, stream = wrapper.call_http_entrypoint, wrapper.call_user_method, wrapper.call_user_generator

    arrivals = asgi.arrivals(exchanges)
    calls = exchanges.arrivals("ray_serve", lambda told: "/" + _method(told), None, _read)

    @takes_place(wrapper, "call_http_entrypoint")
    async def undo_http(self: Any, metadata: Any, told: Any, scope: Any, receive: Any) -> AsyncIterator[Any]:
        batches = http(self, metadata, told, scope, receive)
        exchange = arrivals["websocket" if scope["type"] == "websocket" else "http"].begun(scope)
        if exchange is None:
            async for messages in batches:
                yield messages
            return
        try:
            if self.get_user_method_info(metadata.call_method).is_asgi_app:
                exchange.enter(scope.get("root_path", ""))  # within it the app's router finds the route
            elif metadata.route:
                exchange.found(metadata.route)
        except Exception as fault:
            FAULTS.note("route of a request of Ray Serve", fault)
        talk = _Answer() if scope["type"] == "http" else asgi.Websocket()
        talk.exchange, talk.server_receive, talk.server_send = exchange, receive, _sent
        batches = SteppedItems(exchange, batches)
        try:
            async for messages in batches:
                await told_of(talk, messages)
                yield messages
        except BaseException as error:
            if isinstance(error, GeneratorExit) and isinstance(talk, _Answer) and talk.is_complete:
                talk.end()
            exchange.fail(error)
            if isinstance(error, GeneratorExit):
                await batches.aclose()
            raise
        if isinstance(talk, _Answer) and talk.is_complete:
            talk.end()
        exchange.end()

    async def told_of(talk: asgi.Talk, messages: Any) -> None:
        try:
            for message in messages:
                await talk.send(message)
        except Exception as fault:
            FAULTS.note("answer of Ray Serve", fault)

    @takes_place(wrapper, "call_user_method")
    def undo_call(self: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_local_testing_mode", False):
            return call(self, metadata, *args, **kwargs)
        return called(self, metadata, *args, **kwargs)

    async def called(self: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = calls.begun((self, metadata))
        if exchange is None:
            return await call(self, metadata, *args, **kwargs)
        try:
            answer = await exchange.stepped(call(self, metadata, *args, **kwargs))
        except BaseException as error:
            exchange.end(error)
            raise
        exchange.end()
        return answer

    @takes_place(wrapper, "call_user_generator")
    async def undo_stream(self: Any, metadata: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        answers = stream(self, metadata, *args, **kwargs)
        exchange = calls.begun((self, metadata))
        if exchange is None:
            async for answer in answers:
                yield answer
            return
        answers = SteppedItems(exchange, answers)
        try:
            async for answer in answers:
                exchange.item()
                yield answer
        except BaseException as error:
            exchange.end(error)
            if isinstance(error, GeneratorExit):
                await answers.aclose()
            raise
        exchange.end()

    return [undo_http, undo_call, undo_stream]


def _batching(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Have the loop of `@serve.batch`, which the first request begins, be no part of that one, as Ray itself has it."""
    queue = module._BatchQueue
    loop = queue._process_batches

    @takes_place(queue, "_process_batches")
    async def undo(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchanges.recorder.forget_current()
        return await loop(self, *args, **kwargs)

    return [undo]


def _silent(class_name: str) -> Callable[[Any, Exchanges], list[Undo]]:
    """Switch off the servers of a process that makes an object of a class."""

    def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
        owner = getattr(module, class_name)
        init = owner.__init__

        @takes_place(owner, "__init__")
        def undo(self: Any, *args: Any, **kwargs: Any) -> None:
            exchanges.is_on = False
            init(self, *args, **kwargs)

        return [undo]

    return attach


def _method(told: tuple[Any, Any]) -> str:
    wrapper, metadata = told
    return f"{wrapper._deployment_id.name}/{metadata.call_method}"


def _read(told: tuple[Any, Any], _: Any) -> tuple[Arrival, dict[bytes, bytes], dict[Any, Any]]:
    context = getattr(told[1], "tracing_context", None) or {}  # a handle sends it where Ray's own tracing is on
    headers = {name.encode(): text.encode() for name, text in context.items() if isinstance(text, str)}
    return (_method(told), None, None, None), headers, {}


class _Answer(asgi.Http):
    """An answer of a replica. It is over with the replica's own work, which goes on after the last message."""

    __slots__ = ()

    def __init__(self) -> None:
        self.is_complete = False

    async def _send_last(self, message: asgi.Message) -> None:
        self.is_complete = True


async def _sent(_: Any) -> None:
    """Nothing: the replica sends the messages itself."""


RAY_SERVE: Mapping[str, Callable[[Any, Exchanges], list[Undo]]] = {
    "ray.serve._private.replica": _replica,
    "ray.serve.batching": _batching,
    "ray.serve._private.proxy": _silent("GenericProxy"),  # the actor itself is sent to its process by value
    "ray.dashboard.modules.reporter.reporter_agent": _silent("ReporterAgent"),
    "ray.dashboard.http_server_head": _silent("HttpServerDashboardHead"),
    "ray.dashboard.subprocesses.module": _silent("SubprocessModule"),  # the dashboard asks each twice a second
}
