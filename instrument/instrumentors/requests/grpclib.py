"""Record the calls of grpclib's servers like those of `grpc`: each is one span, from its arrival to its trailers.

The outcome of a call is `cancelled` if its caller has cancelled it, or if the connection is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from instrument.instrumentors.functions import Undo, replaces
from instrument.instrumentors.requests.exchange import CURRENT, SERVER_TIMING, Arrival, Exchange, Exchanges
from instrument.instrumentors.requests.grpc import DEADLINE_SLACK_S, SERVER_ERRORS, address_in, headers_in
from instrument.recorder.wrapping import CANCELLED, RPC_STATUS
from instrument.recording.spans import OUTCOME


def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the calls of all servers of grpclib."""
    stream, arrivals = module.Stream, exchanges.get_arrivals("grpc", lambda call: call[0][":path"], None, _read_call)
    handle, abort = module.request_handler, module._abort
    send, send_trailers, leave = stream.send_message, stream.send_trailing_metadata, stream.__aexit__

    @replaces(module, "request_handler")
    async def undo_handle(mapping: Any, h2_stream: Any, headers: Any, *args: Any, **kwargs: Any) -> None:
        exchange = arrivals.begin((dict(headers), mapping))
        if exchange is None:
            await handle(mapping, h2_stream, headers, *args, **kwargs)
            return
        error: BaseException | None = None
        try:
            await exchange.track_waits(handle(mapping, h2_stream, headers, *args, **kwargs))
        except BaseException as raised:
            error = raised
            raise
        finally:
            _end_call(exchange, error or getattr(exchange, "failure", None))

    @replaces(stream, "send_message")
    async def undo_send(self: Any, message: Any) -> None:
        await send(self, message)
        exchange = CURRENT.get()
        if exchange is not None and exchange.is_open and self._cardinality.server_streaming:
            exchange.add_items()

    @replaces(stream, "send_trailing_metadata")
    async def undo_trailers(self: Any, *, status: Any = module.Status.OK, metadata: Any = None, **kwargs: Any) -> None:
        exchange = CURRENT.get()
        if exchange is not None and exchange.is_open:
            exchange.facts[RPC_STATUS] = status.name
            if exchange.timing is not None:
                pairs = metadata.items() if isinstance(metadata, Mapping) else metadata or ()
                metadata = [*pairs, (SERVER_TIMING.lower(), exchange.timing.text(exchange))]
        await send_trailers(self, status=status, metadata=metadata, **kwargs)

    @replaces(stream, "__aexit__")
    async def undo_leave(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
        exchange = CURRENT.get()
        if exchange is not None and exchange.is_open:
            exchange.failure = error
            if self.deadline is not None and self.deadline.time_remaining() < DEADLINE_SLACK_S:
                exchange.facts[OUTCOME] = "timed out"
        return await leave(self, kind, error, traceback)

    @replaces(module, "_abort")
    async def undo_abort(h2_stream: Any, h2_status: int, grpc_status: Any = None, *args: Any, **kwargs: Any) -> None:
        exchange = CURRENT.get()
        if exchange is not None and exchange.is_open and grpc_status is not None:
            exchange.facts[RPC_STATUS] = grpc_status.name
        await abort(h2_stream, h2_status, grpc_status, *args, **kwargs)

    return [undo_handle, undo_send, undo_trailers, undo_leave, undo_abort]


def _end_call(exchange: Exchange, error: BaseException | None) -> None:
    """End a call with the status that its caller got, and with the handler's exception, if any."""
    status, kind = exchange.facts.get(RPC_STATUS), type(error).__name__
    exchange.failure = None
    is_broken_off = isinstance(error, asyncio.CancelledError) or kind == "StreamTerminatedError"
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


def _read_call(
    call: tuple[dict[str, str], Any], names: tuple[str, ...]
) -> tuple[Arrival, dict[bytes, bytes], dict[Any, Any]]:
    fields, mapping = call
    facts = address_in(fields.get(":authority"))
    if "user_agent.original" in names and "user-agent" in fields:
        facts["user_agent.original"] = fields["user-agent"]
    method = fields[":path"] if fields[":path"] in mapping else ""  # callers invent others, which are one endpoint
    return (method.removeprefix("/"), None, None, None), headers_in(fields.items()), facts
