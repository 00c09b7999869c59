"""Record the requests of models in Triton's Python backend: each is one span, which begins with `execute`.

A request ends when `execute` returns or, in a decoupled model, with the response that is marked as final. If a call has
several requests, a span of kind `step` records their common work.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary

from instrument.instrumentors.profiled_functions import Undo, replace_attribute, undo_all
from instrument.instrumentors.requests.exchange import CURRENT, Exchange, Exchanges, Reading
from instrument.recorder.wrapping import CANCELLED
from instrument.recording.spans import OUTCOME, Site
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy_imports import dataclass

TRITON_MODEL = re.compile(r"\d+\.\w+")
"""The pattern of the module name of a model: its version and file, such as `1.model`."""

FINAL = 1
"""The flag of a decoupled model's last response, `TRITONSERVER_RESPONSE_COMPLETE_FINAL`."""

DROPPED = "dropped"
"""The outcome of a request whose response sender was deleted before the final response."""


@dataclass(slots=True, eq=False)
class _Answer:
    """An open request, which a response sender will answer. The object is deleted together with the sender."""

    exchange: Exchange
    context: Context
    is_left: bool = False
    """True after `execute` has returned. From then on, only the sender can end the answer."""

    def __del__(self) -> None:
        """End the request if the sender is deleted without a final response."""
        if self.is_left:
            self.exchange.end_incomplete(DROPPED)


class _Batch:
    """The open requests of one call of `execute`."""

    def __init__(self, requests_of: _Requests, requests: list[Any]) -> None:
        self._of = requests_of
        self._requests = requests
        self._opened: dict[int, tuple[Exchange, Context]] = {}
        self._frame: Any = None
        if len(requests) > 1:
            name = f"{_model_name(requests[0])} batch"
            site = requests_of.steps.setdefault(name, Site(name, "step"))
            self._frame = requests_of.recorder.open(site, {"requests": len(requests)})
        for request in requests:
            context, begin = Context(), requests_of.arrivals.begin_exchange
            exchange = begin(request) if self._frame is None else context.run(begin, request)
            if exchange is not None:
                self._opened[id(request)] = requests_of.executing[id(request)] = exchange, context

    def end(self, responses: Any, error: BaseException | None = None) -> None:
        opened, self._opened = self._opened, {}
        is_alone = self._frame is None
        for index, request in enumerate(self._requests):
            exchange, context = opened.get(id(request)) or (None, None)
            self._of.executing.pop(id(request), None)
            if exchange is None:
                continue
            answers = [answer for answer in list(self._of.answers.values()) if answer.exchange is exchange]
            if error is None and answers:  # its sender answers it later, from any thread
                for answer in answers:
                    answer.is_left = True
                if is_alone:
                    self.clear_current_request()
                continue
            response = responses[index] if isinstance(responses, list) and index < len(responses) else None
            _end_request(request, exchange, None if is_alone else context, response, error)
        frame, self._frame = self._frame, None
        if frame is not None:
            self._of.recorder.close(frame, error, True)

    def clear_current_request(self) -> None:
        """Clear the thread's current request, so that later spans of the thread do not belong to it."""
        CURRENT.set(None)
        self._of.recorder.forget_current()

    async def await_and_end(self, coroutine: Awaitable[Any]) -> Any:
        try:
            responses = await coroutine
        except BaseException as error:
            self.end(None, error)
            raise
        self.end(responses)
        return responses

    def __del__(self) -> None:
        """End the requests if the coroutine was never awaited."""
        self.end(None)


class _Requests:
    """The open requests of one model, and the response senders that answer them later."""

    def __init__(self, exchanges: Exchanges) -> None:
        self.recorder = exchanges.recorder
        self.arrivals = exchanges.get_arrivals(
            "triton", lambda request: "/" + _model_name(request), None, _read_request
        )
        self.executing: dict[int, tuple[Exchange, Context]] = {}
        self.answers: WeakKeyDictionary[Any, _Answer] = WeakKeyDictionary()
        self.steps: dict[str, Site] = {}
        self._undos: list[Undo] = []
        self._watched: set[type] = set()

    def begin_batch(self, requests: Sequence[Any]) -> _Batch | None:
        with FAULTS.guard("requests of Triton"):
            if not requests or not self.arrivals.exchanges.is_path_recorded("/" + _model_name(requests[0])):
                return None
            self._watch_class(type(requests[0]))
            return _Batch(self, list(requests))  # the model may change its own list
        return None

    def detach_and_end(self) -> None:
        undo_all(self._undos)
        for answer in list(self.answers.values()):
            answer.is_left = False
            answer.exchange.end()

    def _watch_class(self, kind: type) -> None:
        if kind in self._watched or not hasattr(kind, "get_response_sender"):
            return
        self._watched.add(kind)
        get = kind.get_response_sender

        def get_response_sender(request: Any) -> Any:
            sender = get(request)
            with FAULTS.guard("response sender of Triton"):
                opened = self.executing.get(id(request))
                if opened is not None:
                    self.answers[sender] = _Answer(*opened)
                    self._watch_sender(type(sender))
            return sender

        self._undos.append(replace_attribute(kind, "get_response_sender", get_response_sender))

    def _watch_sender(self, kind: Any) -> None:
        if kind in self._watched:
            return
        self._watched.add(kind)
        send = kind.send

        def send_and_note_response(sender: Any, response: Any = None, flags: int = 0) -> Any:
            answer = self.answers.get(sender)
            if answer is not None and response is not None:
                answer.exchange.note_sent_items()
            try:
                return send(sender, response, flags) if response is not None else send(sender, flags=flags)
            finally:
                if answer is not None and isinstance(flags, int) and flags & FINAL:
                    self.answers.pop(sender, None)
                    _end_request(None, answer.exchange, answer.context, response)

        self._undos.append(replace_attribute(kind, "send", send_and_note_response))


def _end_request(
    request: Any, exchange: Exchange, context: Context | None, response: Any, error: BaseException | None = None
) -> None:
    failed: BaseException | str | None = error
    with FAULTS.guard("end of a request of Triton"):
        is_cancelled, has_error = getattr(request, "is_cancelled", None), getattr(response, "has_error", None)
        if is_cancelled is not None and exchange.is_open and is_cancelled():
            exchange.facts[OUTCOME] = CANCELLED
        if failed is None and has_error is not None and has_error():
            failed = "TritonError"
    exchange.end(failed) if context is None else context.run(exchange.end, failed)


def _model_name(request: Any) -> str:
    name = getattr(request, "model_name", None)
    return str(name()) if callable(name) else "model"


def _read_request(request: Any, _: Any) -> Reading:
    """Read a request and the caller's trace headers. Triton has these headers only if its OpenTelemetry tracing is
    enabled."""
    trace = getattr(request, "trace", None)
    context = trace().get_context() if trace is not None else None
    fields: Any = {}
    with suppress(ValueError):
        fields = json.loads(context or "{}")
    pairs = fields.items() if isinstance(fields, dict) else ()
    headers = {name.lower().encode(): text.encode() for name, text in pairs if isinstance(text, str)}
    return (_model_name(request), None, None, None), headers, {}


def attach_triton(module: Any, exchanges: Exchanges) -> list[Undo]:
    model = getattr(module, "TritonPythonModel", None)
    execute = getattr(model, "execute", None)
    if model is None or execute is None:
        return []
    requests_of = _Requests(exchanges)

    @functools.wraps(execute)
    def execute_and_record(self: Any, requests: Any) -> Any:
        batch = requests_of.begin_batch(requests)
        if batch is None:
            return execute(self, requests)
        try:
            responses = execute(self, requests)
        except BaseException as error:
            batch.end(None, error)
            raise
        if inspect.iscoroutine(responses):  # the backend awaits it on another thread
            batch.clear_current_request()
            return batch.await_and_end(responses)
        batch.end(responses)
        return responses

    @functools.wraps(execute)
    async def await_and_record(self: Any, requests: Any) -> Any:
        """Begin the requests in a separate task, because the calling thread continues with the next requests."""
        batch = requests_of.begin_batch(requests)
        coroutine = execute(self, requests)
        return await (coroutine if batch is None else batch.await_and_end(coroutine))

    recorded = await_and_record if inspect.iscoroutinefunction(execute) else execute_and_record
    return [requests_of.detach_and_end, replace_attribute(model, "execute", recorded)]
