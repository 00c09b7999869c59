"""mosec: each batch of requests that a worker serves, as one step from its arrival to the answers.

mosec takes requests in a front that is no Python, which hands each worker process batches of them over a socket. So
there are no requests to record, with a path or the caller's trace, but what each worker does for which of them, by the
numbers that the front gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from instrument.instrumentors.functions import Undo, takes_place
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.recorder.outcomes import FIRST_OF_SERVER, STATUS
from instrument.recording.spans import BATCH_KEYS, BATCH_LIMIT, ITEMS, Site
from instrument.runtime.faults import FAULTS

REQUESTS = "requests"
"""The attribute that says how many requests a batch is of."""

STATUSES: Mapping[str, int] = {
    "OK": 200,
    "BAD_REQUEST": 400,
    "VALIDATION_ERROR": 422,
    "INTERNAL_ERROR": 500,
    "TIMEOUT_ERROR": 408,
}
"""The status of the front's answer, by the flag of a worker."""


class _Batches:
    """The batches of one worker, one at a time."""

    def __init__(self, exchanges: Exchanges, protocol: Any) -> None:
        self._recorder = exchanges.recorder
        # The protocol's name is that of the coordinator, such as <Inference_1|2>, for the second worker of a stage.
        self._site = Site(f"mosec {protocol.name.strip('<>').partition('|')[0]}", "step")
        self._frame: Any = None
        self._events = 0

    def begin(self, ids: Sequence[bytes]) -> None:
        """Begin a batch of requests that the front has numbered. Ends one that was never answered."""
        self.end(None)
        self._events = 0
        keys = tuple(str(int.from_bytes(one, "big")) for one in ids[:BATCH_LIMIT])
        self._frame = self._recorder.open(self._site, {REQUESTS: len(ids), BATCH_KEYS: keys})

    def event(self, count: int) -> None:
        """Count parts of streamed answers, which another thread sends."""
        self._events += count

    def end(self, flag: Any) -> None:
        """End the batch, whose answers have gone to the front with a flag."""
        frame, self._frame = self._frame, None
        if frame is None:
            return
        status = STATUSES.get(getattr(flag, "name", None) or "")
        facts: dict[Any, Any] = {} if status is None else {STATUS: status}
        if self._events:
            facts[ITEMS] = self._events
        self._recorder.annotate(frame, facts)
        self._recorder.close(frame, str(status) if status is not None and status >= FIRST_OF_SERVER else None, True)


def _protocol(module: Any, exchanges: Exchanges) -> list[Undo]:
    protocol, event = module.Protocol, module.HTTPStatusCode.STREAM_EVENT
    receive, send = protocol.receive, protocol.send
    of: WeakKeyDictionary[Any, _Batches] = WeakKeyDictionary()

    @takes_place(protocol, "receive")
    def undo_receive(self: Any) -> Any:
        task = receive(self)
        if exchanges.is_on and exchanges.recorder.on:
            try:
                (of.get(self) or of.setdefault(self, _Batches(exchanges, self))).begin(task[1])
            except Exception as fault:
                FAULTS.note("batch of mosec", fault)
        return task

    @takes_place(protocol, "send")
    def undo_send(self: Any, flag: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return send(self, flag, ids, *args, **kwargs)
        finally:
            try:
                batches = of.get(self)
                if batches is not None and flag == event:
                    batches.event(len(ids))
                elif batches is not None:
                    batches.end(flag)
            except Exception as fault:
                FAULTS.note("batch of mosec", fault)

    return [undo_receive, undo_send]


MOSEC: Mapping[str, Callable[[Any, Exchanges], list[Undo]]] = {"mosec.protocol": _protocol}
