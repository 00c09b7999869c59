"""Record the calls that servers of gRPC and grpclib handle, each as one span.

With gRPC, the span lasts from the handler's call to the last message. With grpclib, it lasts from the arrival of the
call to the trailers. A status that is the server's fault makes the span an error.

Names and attributes follow OpenTelemetry's conventions for RPC (stable since 1.45).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from instrument.instrumentors.profiled_functions import Undo, note_calls, replaces_attribute
from instrument.instrumentors.requests.exchange import (
    CURRENT,
    PORT,
    SERVER,
    SERVER_TIMING,
    Arrivals,
    Attach,
    Exchange,
    Exchanges,
    Reading,
    SteppedItems,
    current_exchange,
)
from instrument.recorder.wrapping import CANCELLED, RPC_STATUS
from instrument.recording.spans import OUTCOME
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import dataclass

SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""The statuses that are errors of the server. A span with any other status has no error."""

DEADLINE_SLACK_S = 0.05
"""A cancelled call counts as timed out if less than this number of seconds remains until its deadline."""

NOT_BEGUN = "gRPC calls that ended before their handler was called"
UNSEEN = "gRPC calls of handlers that do not block, not recorded"

_attached: list[Arrivals] = []
"""The `Arrivals` of all attached rules. Interceptors use the last item."""


_ArrivedCall = tuple[Any, Any, "str | None"]
"""A call's details, the context, and the endpoint's name. The name is None for a call with a handler."""


class _Service:
    """A gRPC server whose calls are recorded."""

    def __init__(self, grpc: Any) -> None:
        self.grpc = grpc
        self._names = {status.value[0]: status.name for status in grpc.StatusCode}

    def find_arrivals(self, details: Any) -> Arrivals | None:
        arrivals = _attached[-1] if _attached else None
        is_recorded = arrivals is not None and arrivals.exchanges.is_path_recorded(_decode_text(details.method))
        return arrivals if is_recorded else None

    def wrap_handler(self, handler: Any, details: Any, arrivals: Arrivals | None, *, is_async: bool) -> Any:
        if arrivals is None:
            return handler
        if handler is None:
            self.record_refusal(details, arrivals, "UNIMPLEMENTED")
            return None
        try:
            is_streamed = bool(handler.response_streaming)
            kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if is_streamed else 'unary'}"
            behaviour = getattr(handler, kind)
            if getattr(behaviour, "experimental_non_blocking", False):  # it may send and end from any thread
                arrivals.exchanges.recorder.count(UNSEEN)
                return handler
            call = _Call(self, arrivals, details, is_streamed, is_async)
            wrapped, deserialize = call.wrap_behaviour(behaviour), call.wrap_deserializer(handler.request_deserializer)
            serialize = call.wrap_serializer(handler.response_serializer)
            return getattr(self.grpc, f"{kind}_rpc_method_handler")(wrapped, deserialize, serialize)
        except Exception as fault:
            FAULTS.note("gRPC call", fault)
            return handler

    def record_refusal(self, details: Any, arrivals: Arrivals | None, error: BaseException | str) -> None:
        """Record a call that has no handler. All such calls share an endpoint. Never raises."""
        exchange = None if arrivals is None else arrivals.begin_exchange((details, None, ""))
        if exchange is not None:
            exchange.facts[RPC_STATUS] = error if isinstance(error, str) else "UNKNOWN"
            exchange.end(error)

    def read_status(self, context: Any) -> str:
        code = getattr(context, "code", lambda: None)()
        return "OK" if code is None else str(getattr(code, "name", None) or self._names.get(code, "UNKNOWN"))


@dataclass(slots=True, eq=False)
class _Call:
    """One call to a gRPC method. It wraps the method's handler, deserializer and serializer."""

    _service: _Service
    _arrivals: Arrivals
    _details: Any
    _is_streamed: bool
    _is_async: bool
    _is_begun: bool = False
    exchange: Exchange | None = None
    _broken: BaseException | None = None

    def wrap_behaviour(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(request: Any, context: Any) -> Any:
            if self._is_async:
                context = _NotedContext(context)
            token = CURRENT.set(self._begin_span(context))
            try:
                answer = behaviour(request, context)
                if self._is_streamed:
                    return _AnswerStream(self, answer, context)
            except BaseException as error:
                self.end(context, error)
                raise
            finally:
                CURRENT.reset(token)
            self._end_span_on_return(context)
            return answer

        async def call_coroutine(request: Any, context: Any) -> Any:
            exchange = self._begin_span(context)
            CURRENT.set(exchange)  # for good: a call has a task of its own
            try:
                coroutine = behaviour(request, context)
                answer = await (coroutine if exchange is None else exchange.track_waits(coroutine))
            except BaseException as error:
                self.end(context, error)
                raise
            self._end_span_on_return(context)
            return answer

        async def call_async_generator(request: Any, context: Any) -> AsyncIterator[Any]:
            exchange = self._begin_span(context)
            CURRENT.set(exchange)
            answers = behaviour(request, context)
            if exchange is not None:
                answers = SteppedItems(exchange, answers)
            try:
                async for answer in answers:
                    yield answer
            except BaseException as error:
                if isinstance(error, GeneratorExit):
                    await answers.aclose()
                self.end(context, error)
                raise
            self.end(context)

        wrapper: Callable[..., Any] = call_function
        if self._is_async and inspect.isasyncgenfunction(behaviour):
            wrapper = call_async_generator
        elif self._is_async and inspect.iscoroutinefunction(behaviour):
            wrapper = call_coroutine
        return functools.wraps(behaviour)(wrapper)

    def wrap_deserializer(self, deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
        """Wrap a deserializer. A request that it cannot read never gets to a handler, but is recorded."""
        if deserialize is None:
            return None

        def deserialize_noted(data: bytes) -> Any:
            try:
                return deserialize(data)
            except Exception as error:
                self._broken = error
                if not self._is_begun:
                    self._begin_span(None)
                    self.end(None, error)
                raise

        return deserialize_noted

    def wrap_serializer(self, serialize: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        def serialize_and_end(message: Any) -> Any:
            exchange = self.exchange
            try:
                data = message if serialize is None else serialize(message)
            except BaseException as error:
                if exchange is not None and not self._is_streamed:
                    self._close_span(exchange, "UNKNOWN" if self._is_async else "INTERNAL", error)
                self._broken = error
                raise
            if exchange is not None and self._is_streamed:
                exchange.note_sent_items()
            elif exchange is not None:
                self._close_span(exchange, "OK")
            return data

        return serialize_and_end

    def _begin_span(self, context: Any) -> Exchange | None:
        self._is_begun = True
        self.exchange = self._arrivals.begin_exchange((self._details, context, None))
        return self.exchange

    def _add_timings(self, context: Any) -> None:
        exchange = self.exchange
        try:
            if exchange is not None and exchange.timing is not None and exchange.is_open and context is not None:
                timing, exchange.timing = exchange.timing, None  # once
                metadata = context.trailing_metadata() or ()
                context.set_trailing_metadata((*metadata, (SERVER_TIMING.lower(), timing.make_header_value(exchange))))
        except Exception as fault:
            FAULTS.note("server timing", fault)

    def _end_span_on_return(self, context: Any) -> None:
        """End the span after the handler's return. A successful unary call ends later, after serialization."""
        self._add_timings(context)
        try:
            is_last = self._is_streamed or type(context) is _NotedContext or self._service.read_status(context) != "OK"
            is_last = is_last or _has_caller_disconnected(context)
        except Exception as fault:
            FAULTS.note("end of a gRPC call", fault)
            is_last = True
        if is_last:
            self.end(context)

    def end(self, context: Any, error: BaseException | None = None) -> None:
        exchange = self.exchange
        if exchange is None or not exchange.is_open:
            return
        self._add_timings(context)
        try:
            status = self._service.read_status(context)
            is_broken_off = error is not None and type(error).__name__ in ("CancelledError", "GeneratorExit")
            if self._broken is not None and not self._is_async:
                status, error = "INTERNAL", self._broken
            elif is_broken_off or _has_caller_disconnected(context):
                left_s = context.time_remaining()
                is_late = left_s is not None and left_s < DEADLINE_SLACK_S
                status = "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
                exchange.facts[OUTCOME] = "timed out" if is_late else CANCELLED
                error = None if is_broken_off or isinstance(error, self._service.grpc.RpcError) else error
            elif error is not None and status == "OK":
                status = "UNKNOWN"
            elif error is not None:
                is_abort = type(error).__name__ == "AbortError" or (type(error) is Exception and not error.args)
                error = None if is_abort or status not in SERVER_ERRORS else error
        except Exception as fault:
            FAULTS.note("status of a gRPC call", fault)
            status = "UNKNOWN"
        self._close_span(exchange, status, error)

    def _close_span(self, exchange: Exchange, status: str, error: BaseException | None = None) -> None:
        if not exchange.is_open:
            return
        exchange.facts[RPC_STATUS] = status
        exchange.end(error if error is not None else status if status in SERVER_ERRORS else None)

    def __del__(self) -> None:
        """Count a call whose handler was never called, for example because too many calls were open."""
        if not getattr(self, "_is_begun", True):
            self._arrivals.exchanges.recorder.count(NOT_BEGUN)


@dataclass(slots=True, eq=False)
class _AnswerStream:
    """A proxy of an iterator of answers. The call ends with the iterator."""

    _call: _Call
    _answers: Any
    _context: Any

    def __iter__(self) -> _AnswerStream:
        return self

    def __next__(self) -> Any:
        call = self._call
        token = CURRENT.set(call.exchange)
        try:
            return next(self._answers)
        except StopIteration:
            call.end(self._context)
            raise
        except BaseException as error:
            call.end(self._context, error)
            raise
        finally:
            CURRENT.reset(token)

    def __del__(self) -> None:
        """End a call if the server has dropped the stream, for example because the caller has disconnected."""
        self._answers = None
        self._call.end(self._context, GeneratorExit())


class _NotedContext:
    """A proxy of the context that grpc.aio passes to a plain function. The proxy makes the status code readable."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._status: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def set_code(self, code: Any) -> None:
        self._status = code
        self._context.set_code(code)

    def abort(self, code: Any, *args: Any, **kwargs: Any) -> Any:
        self._status = code
        return self._context.abort(code, *args, **kwargs)

    def code(self) -> Any:
        return self._status


def _has_caller_disconnected(context: Any) -> bool:
    """Return True if the caller of a sync server has disconnected. On asyncio, the handler is cancelled instead."""
    is_active = getattr(context, "is_active", None)
    return is_active is not None and not is_active()


def _decode_text(method: Any) -> str:
    return method.decode("latin-1") if isinstance(method, bytes) else str(method)


def _describe_call(method: str, host: Any, metadata: Any, names: tuple[str, ...]) -> Reading:
    headers = {}
    for name, value in metadata or ():  # gRPC has the names in lower case
        headers[name.encode("latin-1")] = value if isinstance(value, bytes) else value.encode("latin-1", "replace")
    facts: dict[Any, Any] = {}
    if host:
        address, _, port = _decode_text(host).rpartition(":")
        is_with_port = bool(address) and port.isdecimal()
        facts[SERVER] = (address if is_with_port else _decode_text(host)).strip("[]")
        facts |= {PORT: int(port)} if is_with_port else {}
    if "user_agent.original" in names and b"user-agent" in headers:
        facts["user_agent.original"] = headers[b"user-agent"].decode("latin-1")
    return (method.removeprefix("/"), None, None, None), headers, facts


def _read_call(call: _ArrivedCall, names: tuple[str, ...]) -> Reading:
    details, context, name = call
    event_details = getattr(getattr(context, "_rpc_event", None), "call_details", None)
    method = _decode_text(details.method) if name is None else name
    return _describe_call(method, getattr(event_details, "host", None), details.invocation_metadata, names)


def _make_interceptor(grpc: Any, is_async: bool) -> Any:
    service = _Service(grpc)

    def intercept(_: Any, continuation: Callable[[Any], Any], details: Any) -> Any:
        arrivals = service.find_arrivals(details)
        try:
            handler = continuation(details)
        except Exception as error:  # of an interceptor after ours
            service.record_refusal(details, arrivals, error)
            raise
        return service.wrap_handler(handler, details, arrivals, is_async=False)

    async def intercept_async(_: Any, continuation: Callable[[Any], Any], details: Any) -> Any:
        arrivals = service.find_arrivals(details)
        try:
            handler = await continuation(details)
        except Exception as error:
            service.record_refusal(details, arrivals, error)
            raise
        return service.wrap_handler(handler, details, arrivals, is_async=True)

    base = grpc.aio.ServerInterceptor if is_async else grpc.ServerInterceptor
    return type("Interceptor", (base,), {"intercept_service": intercept_async if is_async else intercept})()


def _attach_interceptor(class_name: str, is_async: bool, module: Any, exchanges: Exchanges) -> list[Undo]:
    server, grpc = getattr(module, class_name), module.grpc
    init = server.__init__
    signature = inspect.signature(init)
    if "interceptors" not in signature.parameters:
        raise TypeError(f"{class_name} takes no interceptors")

    @replaces_attribute(server, "__init__")
    def restore_init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.arguments["interceptors"] = (_make_interceptor(grpc, is_async), *(bound.arguments["interceptors"] or ()))
        init(*bound.args, **bound.kwargs)

    def detach_rule() -> None:
        if arrivals in _attached:
            _attached.remove(arrivals)

    arrivals = exchanges.get_arrivals("grpc", lambda call: _decode_text(call[0].method), None, _read_call)
    _attached.append(arrivals)
    return [detach_rule, restore_init]


# grpclib


def _attach_grpclib(module: Any, exchanges: Exchanges) -> list[Undo]:
    stream = module.Stream
    arrivals = exchanges.get_arrivals("grpc", lambda call: call[0][":path"], None, _read_grpclib_call)
    handle, send, send_trailers = module.request_handler, stream.send_message, stream.send_trailing_metadata

    @replaces_attribute(module, "request_handler")
    async def restore_request_handler(mapping: Any, h2_stream: Any, headers: Any, *args: Any, **kwargs: Any) -> None:
        exchange = arrivals.begin_exchange((dict(headers), mapping))
        call = handle(mapping, h2_stream, headers, *args, **kwargs)
        await (call if exchange is None else exchange.serve(call, functools.partial(_end_grpclib_call, exchange)))

    @replaces_attribute(stream, "send_message")
    async def restore_send_message(self: Any, message: Any) -> None:
        await send(self, message)
        exchange = current_exchange()
        if exchange is not None and self._cardinality.server_streaming:
            exchange.note_sent_items()

    @replaces_attribute(stream, "send_trailing_metadata")
    async def restore_send_trailers(
        self: Any, *, status: Any = module.Status.OK, metadata: Any = None, **kwargs: Any
    ) -> None:
        exchange = current_exchange()
        if exchange is not None:
            exchange.facts[RPC_STATUS] = status.name
            if exchange.timing is not None:
                pairs = metadata.items() if isinstance(metadata, Mapping) else metadata or ()
                metadata = [*pairs, (SERVER_TIMING.lower(), exchange.timing.make_header_value(exchange))]
        await send_trailers(self, status=status, metadata=metadata, **kwargs)

    def note_stream_exit(stream: Any, kind: Any, error: Any, traceback: Any) -> None:
        exchange = current_exchange()
        if exchange is not None:
            exchange.failure = error
            if stream.deadline is not None and stream.deadline.time_remaining() < DEADLINE_SLACK_S:
                exchange.facts[OUTCOME] = "timed out"

    def note_abort(h2_stream: Any, h2_status: int, grpc_status: Any = None, *args: Any, **kwargs: Any) -> None:
        if grpc_status is not None and (exchange := current_exchange()) is not None:
            exchange.facts[RPC_STATUS] = grpc_status.name

    undo_leave = note_calls(stream, "__aexit__", note_stream_exit)
    undo_abort = note_calls(module, "_abort", note_abort)
    return [restore_request_handler, restore_send_message, restore_send_trailers, undo_leave, undo_abort]


def _end_grpclib_call(exchange: Exchange, error: BaseException | None) -> None:
    error = error or getattr(exchange, "failure", None)
    status, kind = exchange.facts.get(RPC_STATUS), type(error).__name__
    exchange.failure = None
    is_broken_off = kind in ("CancelledError", "StreamTerminatedError")
    if is_broken_off and OUTCOME in exchange.facts:
        status = exchange.facts[RPC_STATUS] = "DEADLINE_EXCEEDED"
    elif is_broken_off:
        exchange.facts |= {RPC_STATUS: "CANCELLED", OUTCOME: CANCELLED}
        status = None
    elif status != "DEADLINE_EXCEEDED":
        exchange.facts.pop(OUTCOME, None)
    if is_broken_off or error is None or kind == "GRPCError":  # a status that the service has chosen
        exchange.end(status if status in SERVER_ERRORS else None)
    else:
        exchange.end(error)


def _read_grpclib_call(call: tuple[dict[str, str], Any], names: tuple[str, ...]) -> Reading:
    fields, mapping = call
    method = fields[":path"] if fields[":path"] in mapping else ""  # callers invent others, which are one endpoint
    return _describe_call(method, fields.get(":authority"), fields.items(), names)


SEAMS: Mapping[str, Mapping[str, Attach]] = {
    "grpc": {
        "grpc._server": functools.partial(_attach_interceptor, "_Server", False),
        "grpc.aio._server": functools.partial(_attach_interceptor, "Server", True),
    },
    "grpclib": {"grpclib.server": _attach_grpclib},
}
"""The functions that instrument the modules of servers, by kind of server and module name."""
