"""Triton's Python backend: each request of those that a model's `execute` is given, as one span to its last response.

A model that takes one request at a time has what it does for it in its span. Several that come at once are requests of
their own, side by side, and what is done for all of them is in a step. A request that the model answers through a
response sender (a decoupled model) ends with the response that is marked as the final one.

Written against the documented interface, whose objects are made in C++ and refuse attributes of ours.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any
from weakref import WeakKeyDictionary

from instrument.instrumentors.functions import Undo, replace, undo_all
from instrument.instrumentors.requests.exchange import CURRENT, OUTCOME, Exchange, Exchanges
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

MODULE = re.compile(r"\d+\.\w+")
"""What the backend imports a model as: its version and its file, such as `1.model`."""

FINAL = 1
"""The flag of a decoupled request's last response, `TRITONSERVER_RESPONSE_COMPLETE_FINAL`."""


class _Requests:
    """The requests of one model."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._executing: dict[int, tuple[Exchange, Context]] = {}
        self._sent: WeakKeyDictionary[Any, tuple[Exchange, Context]] = WeakKeyDictionary()
        self._steps: dict[str, Site] = {}
        self._undos: list[Undo] = []
        self._watched: set[type] = set()

    def begin(self, requests: Sequence[Any]) -> Callable[[Any, BaseException | None], None] | None:
        """Begin their spans; what is given back ends them, with their responses or an exception. Never raises."""
        requests = list(requests)  # the model may take them out of its own
        recorder, frame = self._exchanges.recorder, None
        opened: list[tuple[Exchange, Context]] = []
        try:
            name = _model_name(requests[0])
            if not recorder.on or not self._exchanges.wanted("/" + name):
                return None
            self._watch(type(requests[0]))
            headers = [_headers(request) for request in requests]
            if len(requests) > 1:
                site = self._steps.setdefault(name, Site(f"{name} batch", "step"))
                frame = recorder.open(site, {"requests": len(requests)})
            for request, told in zip(requests, headers, strict=True):
                context = Context()
                if frame is None:
                    exchange = self._exchanges.begin("triton", name, told, {})
                else:
                    exchange = context.run(self._exchanges.begin, "triton", name, told, {})
                opened.append((exchange, context))
                self._executing[id(request)] = opened[-1]
        except Exception as fault:
            for request, (exchange, context) in zip(requests, opened, strict=False):
                self._executing.pop(id(request), None)
                exchange.end() if frame is None else context.run(exchange.end)
            if frame is not None:
                recorder.close(frame, None, True)
            FAULTS.note("requests of Triton", fault)
            return None

        def end(responses: Any, error: BaseException | None) -> None:
            for index, (request, (exchange, context)) in enumerate(zip(requests, opened, strict=True)):
                self._executing.pop(id(request), None)
                if error is None and any(one[0] is exchange for one in list(self._sent.values())):
                    if frame is None:  # what this thread does next is not for it
                        CURRENT.set(None)
                        recorder.forget_current()
                    continue  # it is answered through its sender, by whom and when it likes
                response = responses[index] if isinstance(responses, list) and index < len(responses) else None
                _end(request, exchange, None if frame is None else context, response, error)
            if frame is not None:
                recorder.close(frame, error, True)

        return end

    def undo(self) -> None:
        """Give the backend's classes their own methods back."""
        undo_all(self._undos)

    def _watch(self, kind: type) -> None:
        """See the senders that requests of a class give."""
        if kind in self._watched or not hasattr(kind, "get_response_sender"):
            return
        self._watched.add(kind)
        get = kind.get_response_sender

        def get_response_sender(request: Any) -> Any:
            sender = get(request)
            try:
                opened = self._executing.get(id(request))
                if opened is not None:
                    self._sent[sender] = opened
                    self._watch_sender(type(sender))
            except Exception as fault:
                FAULTS.note("response sender of Triton", fault)
            return sender

        self._undos.append(replace(kind, "get_response_sender", get_response_sender))

    def _watch_sender(self, kind: Any) -> None:
        if kind in self._watched:
            return
        self._watched.add(kind)
        send = kind.send

        def sent(sender: Any, response: Any = None, flags: int = 0) -> Any:
            opened = self._sent.get(sender)
            if opened is not None and response is not None:
                opened[0].item()
            try:
                return send(sender, response, flags) if response is not None else send(sender, flags=flags)
            finally:
                if opened is not None and isinstance(flags, int) and flags & FINAL:
                    self._sent.pop(sender, None)
                    _end(None, *opened, response)

        self._undos.append(replace(kind, "send", sent))


def _end(
    request: Any, exchange: Exchange, context: Context | None, response: Any, error: BaseException | None = None
) -> None:
    """End a request, with its last response or an exception. Never raises."""
    failed: BaseException | str | None = error
    try:
        is_cancelled = getattr(request, "is_cancelled", None)
        if is_cancelled is not None and exchange.is_open and is_cancelled():
            exchange.facts[OUTCOME] = "cancelled"
        failed = failed or _error_of(response)
    except Exception as fault:
        FAULTS.note("end of a request of Triton", fault)
    exchange.end(failed) if context is None else context.run(exchange.end, failed)


def _model_name(request: Any) -> str:
    name = getattr(request, "model_name", None)
    return str(name()) if callable(name) else "model"


def _headers(request: Any) -> dict[bytes, bytes]:
    """The caller's trace, which the server tells where it traces for OpenTelemetry."""
    trace = getattr(request, "trace", None)
    context = trace().get_context() if trace is not None else None
    try:
        found = json.loads(context) if context else {}
    except ValueError:
        found = {}
    told = found.items() if isinstance(found, dict) else ()
    return {name.lower().encode(): text.encode() for name, text in told if isinstance(text, str)}


def _error_of(response: Any) -> str | None:
    has_error = getattr(response, "has_error", None)
    return "TritonError" if has_error is not None and has_error() else None


def attach(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Have the model of a module record. One that is none is left alone."""
    model = getattr(module, "TritonPythonModel", None)
    execute = getattr(model, "execute", None)
    if model is None or execute is None:
        return []
    requests_of = _Requests(exchanges)

    @functools.wraps(execute)
    def executed(self: Any, requests: Any) -> Any:
        end = requests_of.begin(requests) if requests else None
        if end is None:
            return execute(self, requests)
        try:
            responses = execute(self, requests)
        except BaseException as error:
            end(None, error)
            raise
        end(responses, None)
        return responses

    @functools.wraps(execute)
    async def awaited(self: Any, requests: Any) -> Any:
        """Begins where the task runs, for the thread that has called goes on to the next requests."""
        end = requests_of.begin(requests) if requests else None
        if end is None:
            return await execute(self, requests)
        try:
            responses = await execute(self, requests)
        except BaseException as error:
            end(None, error)
            raise
        end(responses, None)
        return responses

    return [requests_of.undo, replace(model, "execute", awaited if inspect.iscoroutinefunction(execute) else executed)]
