"""LitServe: its workers' batches, by the ids under which its API servers wait for their answers.

Requests are met over ASGI. A worker takes some of them, and says so of each to its transport before it calls the
service's `decode_request`, `predict` and `encode_response`; those calls are batches of what has been taken and not yet
answered. What a stream is made of is computed while its parts are asked for, so there the last of them is the batch.
Loops of coroutines, which serve many at a time on one thread, are not met: which of them a call serves is not told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from instrument.instrumentors.functions import Undo, takes_place
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.recording.spans import BATCH_KEYS, BATCH_LIMIT, KEY, Site
from instrument.runtime.faults import FAULTS

STREAM = "encode_response"
"""The call whose answer is gone through to its end where answers are streams."""


class _Taken(threading.local):
    """The ids of the requests that a thread has taken and not answered."""

    def __init__(self) -> None:
        self.ids: list[str] = []


def _server(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Add the id under which a request is handed to the workers to its span."""
    handler = module.BaseRequestHandler
    submit = handler._submit_request

    @takes_place(handler, "_submit_request")
    async def undo(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = await submit(self, *args, **kwargs)
        try:
            if exchanges.is_on and exchanges.recorder.on:
                exchanges.recorder.annotate_innermost({KEY: found[0]})
        except Exception as fault:
            FAULTS.note("request of LitServe", fault)
        return found

    return [undo]


def _worker(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record the calls of the service by a worker, with the requests that it has taken."""
    recorder, taken = exchanges.recorder, _Taken()
    sites: dict[str, Site] = {}
    put, inject = module.LitLoop.put_response, module._inject_context
    start, parts = module.LitAPIStatus.START, module.LitAPIStatus.OK
    streaming = module.LoopResponseType.STREAMING

    @takes_place(module.LitLoop, "put_response")
    def undo_put(
        self: Any, transport: Any, response_queue_id: Any, uid: Any, response_data: Any, status: Any, response_type: Any
    ) -> None:
        try:
            if status == start:
                if len(taken.ids) < BATCH_LIMIT:
                    taken.ids.append(uid)
            elif not (status == parts and response_type == streaming) and uid in taken.ids:
                taken.ids.remove(uid)
        except Exception as fault:
            FAULTS.note("batch of LitServe", fault)
        put(self, transport, response_queue_id, uid, response_data, status, response_type)

    @takes_place(module, "_inject_context")
    def undo_inject(context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if not taken.ids or not exchanges.is_on or not recorder.on:
            return inject(context, func, *args, **kwargs)
        name = getattr(func, "__name__", "call")
        site = sites.get(name) or sites.setdefault(name, Site(f"litserve {name}", "op"))
        frame = recorder.open(site, {BATCH_KEYS: tuple(taken.ids)})
        try:
            answer = inject(context, func, *args, **kwargs)
        except BaseException as error:
            recorder.close(frame, error, True)
            raise
        if name == STREAM and isinstance(answer, Iterator):
            return _to_its_end(answer, frame)
        recorder.close(frame, None, True)
        return answer

    def _to_its_end(items: Iterator[Any], frame: Any) -> Iterator[Any]:
        error: BaseException | None = None
        try:
            yield from items
        except BaseException as raised:
            error = raised
            raise
        finally:
            recorder.close(frame, error, True)

    return [undo_put, undo_inject]


LITSERVE: Mapping[str, Callable[[Any, Exchanges], list[Undo]]] = {
    "litserve.server": _server,
    "litserve.loops.base": _worker,
}
