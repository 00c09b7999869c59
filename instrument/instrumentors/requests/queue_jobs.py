"""Jobs of queues: a job that a worker of Celery, RQ or Dramatiq takes is a request with the name of its task.

A job is in its caller's trace, by the `traceparent` of its message: of Celery's headers, of the `meta` of an RQ job,
and of the options of a Dramatiq message. RQ and Dramatiq say when a job came into its queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timezone
from typing import Any

from instrument.instrumentors.functions import Undo, takes_place
from instrument.instrumentors.requests.exchange import Exchanges
from instrument.recording.spans import Site
from instrument.runtime.faults import FAULTS

TIME_IN_QUEUE = "instrument.time_in_queue"
"""The attribute with the seconds from a job's entry into its queue to its begin."""


class _Jobs:
    """Opens and closes the requests of jobs of one kind of queue."""

    def __init__(self, system: str, exchanges: Exchanges) -> None:
        self._system, self._exchanges = system, exchanges
        self._sites: dict[tuple[str, str], Site] = {}

    def begin(self, task: object, queue: object, job_id: object, carrier: object, queued_s: float | None) -> Any:
        """Return the open frame of a job, None where nothing is recorded. Never raises."""
        exchanges = self._exchanges
        if not exchanges.is_on or not exchanges.recorder.on:
            return None
        try:
            key = str(task), str(queue)
            site = self._sites.get(key)
            if site is None:
                facts = ("messaging.system", self._system), ("messaging.destination.name", key[1])
                site = self._sites.setdefault(key, Site(key[0], "request", attributes=facts))
            attributes: dict[Any, Any] = {"messaging.message.id": str(job_id)[:256]}
            if queued_s is not None:
                attributes[TIME_IN_QUEUE] = max(time.time() - queued_s, 0.0)
            caller = exchanges.caller_in(_headers_in(carrier), attributes)
            return exchanges.recorder.open_request(site, attributes, caller, None)
        except Exception as fault:
            FAULTS.note(f"job of {self._system}", fault)
            return None

    def end(self, frame: Any, error: BaseException | None) -> None:
        """Close the frame of a job."""
        if frame is not None:
            self._exchanges.recorder.close(frame, error, True)


def _celery(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record each task by Celery's signals, which its workers send around one."""
    signals = module.signals
    jobs = _Jobs("celery", exchanges)
    open_frames: dict[str, Any] = {}
    errors: dict[str, BaseException] = {}

    def begun(sender: Any = None, task_id: str = "", task: Any = None, **_: Any) -> None:
        request = task.request
        queue = (request.delivery_info or {}).get("routing_key") or ""
        open_frames[task_id] = jobs.begin(task.name, queue, task_id, request.headers or vars(request), None)

    def failed(sender: Any = None, task_id: str = "", exception: Any = None, **_: Any) -> None:
        errors[task_id] = exception

    def ended(sender: Any = None, task_id: str = "", **_: Any) -> None:
        jobs.end(open_frames.pop(task_id, None), errors.pop(task_id, None))

    handlers = ((signals.task_prerun, begun), (signals.task_failure, failed), (signals.task_postrun, ended))
    for signal, handler in handlers:
        signal.connect(handler, weak=False)

    def undo() -> None:
        for signal, handler in handlers:
            signal.disconnect(handler)

    return [undo]


def _rq(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record each job of RQ, in the process that performs it."""
    jobs, perform = _Jobs("rq", exchanges), module.Job.perform

    @takes_place(module.Job, "perform")
    def undo(self: Any) -> Any:
        frame = None
        try:
            queued = self.enqueued_at
            queued_s = queued and (queued if queued.tzinfo else queued.replace(tzinfo=timezone.utc)).timestamp()
            frame = jobs.begin(self.func_name, self.origin, self.id, self.meta, queued_s)
        except Exception as fault:
            FAULTS.note("job of rq", fault)
        return _run(jobs, frame, perform, self)

    return [undo]


def _dramatiq(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record each message of Dramatiq by the signals that its workers give their middleware."""
    jobs, current = _Jobs("dramatiq", exchanges), threading.local()
    before, after = module.Broker.emit_before, module.Broker.emit_after

    @takes_place(module.Broker, "emit_before")
    def undo_before(self: Any, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal == "process_message" and args:
            message = args[0]
            queued_s = message.message_timestamp / 1000
            name, queue, options = message.actor_name, message.queue_name, message.options
            current.frame = jobs.begin(name, queue, message.message_id, options, queued_s)
        before(self, signal, *args, **kwargs)

    @takes_place(module.Broker, "emit_after")
    def undo_after(self: Any, signal: str, *args: Any, **kwargs: Any) -> None:
        after(self, signal, *args, **kwargs)
        if signal in ("process_message", "skip_message"):
            frame, current.frame = getattr(current, "frame", None), None
            jobs.end(frame, kwargs.get("exception"))

    return [undo_before, undo_after]


def _headers_in(carrier: object) -> Mapping[bytes, bytes]:
    """Return the headers of a trace in a message, with names in lower case."""
    if not isinstance(carrier, Mapping):
        return {}
    pairs = [(str(name).lower().encode(), value) for name, value in carrier.items() if isinstance(value, str | bytes)]
    return {name: value.encode("latin-1", "replace") if isinstance(value, str) else value for name, value in pairs}


def _run(jobs: _Jobs, frame: Any, perform: Callable[..., Any], *args: Any) -> Any:
    try:
        result = perform(*args)
    except BaseException as error:
        jobs.end(frame, error)
        raise
    jobs.end(frame, None)
    return result


CELERY, RQ, DRAMATIQ = {"celery.app.trace": _celery}, {"rq.job": _rq}, {"dramatiq.broker": _dramatiq}
