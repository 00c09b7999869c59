"""Record the jobs of Celery, RQ, Dramatiq, arq, TaskIQ and FastStream, and the events of Gradio, as requests.

A request has the name of the job's task. A `traceparent` in the message continues the caller's trace. The time in the
queue is recorded if the message has the time at which it was queued.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

from instrument.instrumentors.profiled_functions import Undo, replaces_attribute
from instrument.instrumentors.requests.exchange import Attach, Exchanges
from instrument.recording.spans import TIME_IN_QUEUE, Site
from instrument.runtime.faults import FAULTS

NO_FAILURES = frozenset({"Retry", "RetryJob", "HandlerException", "NoResultError"})
"""The exceptions of arq, FastStream and TaskIQ that end a job but are no errors."""

Job = tuple[object, object, object, object, "float | None"]
"""A job's task, id, trace headers, queue, and queuing time in seconds since 1970 (None if unknown)."""


class _Jobs:
    """An adapter for one kind of queue. It opens and closes the requests of jobs."""

    def __init__(self, system: str, exchanges: Exchanges) -> None:
        self._system, self._exchanges = system, exchanges

    def begin_job(self, read: Callable[[], Job]) -> Any:
        exchanges = self._exchanges
        if not exchanges.is_on or not exchanges.recorder.on:
            return None
        with FAULTS.guard(f"job of {self._system}"):
            task, job_id, carrier, queue, queued_s = read()
            key = "job", self._system, str(task), str(queue)
            site = exchanges.sites.get(key)
            if site is None:
                facts = ("messaging.system", self._system), ("messaging.destination.name", str(queue))
                site = exchanges.sites.setdefault(key, Site(str(task), "request", attributes=facts))
            attributes: dict[Any, Any] = {"messaging.message.id": str(job_id)[:256]}
            if queued_s:
                attributes[TIME_IN_QUEUE] = max(time.time() - queued_s, 0.0)
            caller = exchanges.read_caller(_read_headers(carrier), attributes)
            return exchanges.recorder.open_request(site, attributes, caller, None)
        return None

    def end_job(self, frame: Any, error: BaseException | None) -> None:
        if frame is not None:
            is_no_failure = not NO_FAILURES.isdisjoint(kind.__name__ for kind in type(error).__mro__)
            self._exchanges.recorder.close(frame, None if is_no_failure else error, True)

    async def perform_job(self, read: Callable[[], Job], perform: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = self.begin_job(read)
        try:
            coroutine = perform(*args, **kwargs)
            result = await (coroutine if frame is None else self._exchanges.recorder.stepped_in(frame, coroutine))
        except BaseException as error:
            self.end_job(frame, error)
            raise
        self.end_job(frame, getattr(result, "error", None) if self._system == "taskiq" else None)
        return result


def _to_seconds(at: datetime) -> float:
    """Return a time in seconds since 1970. A time without a time zone is in UTC."""
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()


def _attach_celery(module: Any, exchanges: Exchanges) -> list[Undo]:
    signals = module.signals
    jobs = _Jobs("celery", exchanges)
    open_frames: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    # Both are by the task's request: a retry has the same task id, and may begin before the first attempt ends.

    def begin_task(sender: Any = None, task_id: str = "", task: Any = None, **_: Any) -> None:
        request = task.request
        queue = (request.delivery_info or {}).get("routing_key") or ""
        carrier = request.headers or vars(request)
        open_frames[id(request)] = jobs.begin_job(lambda: (task.name, task_id, carrier, queue, None))

    def note_error(sender: Any = None, exception: Any = None, **_: Any) -> None:
        if (key := id(getattr(sender, "request", None))) in open_frames:  # else a task of another process
            errors[key] = exception

    def end_task(sender: Any = None, task: Any = None, **_: Any) -> None:
        key = id(task.request)
        jobs.end_job(open_frames.pop(key, None), errors.pop(key, None))

    handlers = ((signals.task_prerun, begin_task), (signals.task_failure, note_error), (signals.task_postrun, end_task))
    for signal, handler in handlers:
        signal.connect(handler, weak=False)
    return [functools.partial(signal.disconnect, handler) for signal, handler in handlers]


def _attach_rq(module: Any, exchanges: Exchanges) -> list[Undo]:
    jobs, perform = _Jobs("rq", exchanges), module.Job.perform

    @replaces_attribute(module.Job, "perform")
    def restore_perform(self: Any) -> Any:
        queued, error = self.enqueued_at, None
        frame = jobs.begin_job(
            lambda: (self.func_name, self.id, self.meta, self.origin, queued and _to_seconds(queued))
        )
        try:
            return perform(self)
        except BaseException as raised:
            error = raised
            raise
        finally:
            jobs.end_job(frame, error)

    return [restore_perform]


def _attach_dramatiq(module: Any, exchanges: Exchanges) -> list[Undo]:
    jobs, current = _Jobs("dramatiq", exchanges), threading.local()
    before, after = module.Broker.emit_before, module.Broker.emit_after

    @replaces_attribute(module.Broker, "emit_before")
    def restore_emit_before(self: Any, signal: str, *args: Any, **kwargs: Any) -> None:
        if signal == "process_message" and args:
            job = args[0]
            current.frame = jobs.begin_job(
                lambda: (job.actor_name, job.message_id, job.options, job.queue_name, job.message_timestamp / 1000)
            )
        before(self, signal, *args, **kwargs)

    @replaces_attribute(module.Broker, "emit_after")
    def restore_emit_after(self: Any, signal: str, *args: Any, **kwargs: Any) -> None:
        after(self, signal, *args, **kwargs)
        if signal in ("process_message", "skip_message"):
            frame, current.frame = getattr(current, "frame", None), None
            jobs.end_job(frame, kwargs.get("exception"))

    return [restore_emit_before, restore_emit_after]


def _attach_arq(module: Any, exchanges: Exchanges) -> list[Undo]:
    jobs, init = _Jobs("arq", exchanges), module.Worker.__init__

    def wrap_function(name: str, queue: object, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def run_and_record(context: Any, *args: Any, **kwargs: Any) -> Any:
            read = lambda: (name, context["job_id"], kwargs, queue, context["enqueue_time"].timestamp())  # noqa: E731
            return await jobs.perform_job(read, function, context, *args, **kwargs)

        return run_and_record

    @replaces_attribute(module.Worker, "__init__")
    def restore_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        with FAULTS.guard("job of arq"):
            for name, function in self.functions.items():
                run = wrap_function(name, self.queue_name, function.coroutine)
                self.functions[name] = replace(function, coroutine=run)

    return [restore_init]


def _attach_taskiq(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record each task of TaskIQ. The exception of a failed task is in its result."""
    jobs, run_task = _Jobs("taskiq", exchanges), module.Receiver.run_task

    @replaces_attribute(module.Receiver, "run_task")
    async def restore_run_task(self: Any, target: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        queue = getattr(self.broker, "queue_name", "")
        read = lambda: (message.task_name, message.task_id, message.labels, queue, None)  # noqa: E731
        return await jobs.perform_job(read, run_task, self, target, message, *args, **kwargs)

    return [restore_run_task]


def _attach_faststream(module: Any, exchanges: Exchanges) -> list[Undo]:
    jobs, call = _Jobs("faststream", exchanges), module.HandlerItem.call

    @replaces_attribute(module.HandlerItem, "call")
    async def restore_call(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        def read_job() -> Job:
            return self.name, message.message_id, message.headers, *_read_queue_and_time(message.raw_message)

        return await jobs.perform_job(read_job, call, self, message, *args, **kwargs)

    return [restore_call]


def _read_queue_and_time(message: Any) -> tuple[object, float | None]:
    """Return the queue of a broker's message, and the time when it was queued (None if unknown). For a batch, read its
    first message."""
    while isinstance(message, (list, tuple)) and message:
        message = message[0]
    if isinstance(message, Mapping):  # of Redis: the id of a stream's message begins with ms
        ids = message.get("message_ids") or [b""]
        time_ms = str(ids[0], "latin-1").partition("-")[0]
        return message.get("channel") or "", int(time_ms) / 1000 if time_ms.isdecimal() else None
    places = (getattr(message, name, None) for name in ("topic", "routing_key", "subject"))
    stamp = getattr(getattr(message, "metadata", None), "timestamp", None) or getattr(message, "timestamp", None)
    place, stamp = (value() if callable(value) else value for value in (next(filter(None, places), ""), stamp))
    if isinstance(stamp, tuple):  # of Confluent: its kind, and ms
        stamp = stamp[-1]
    if isinstance(stamp, datetime):
        return place, _to_seconds(stamp)
    return place, stamp / 1000 if isinstance(stamp, (int, float)) and stamp > 0 else None


def _attach_gradio(module: Any, exchanges: Exchanges) -> list[Undo]:
    """Record each event that Gradio's queue passes to a function of the app.

    Each event of a batch is a request of its own, because each has its own caller.
    """
    jobs, recorder = _Jobs("gradio", exchanges), exchanges.recorder
    process, call = module.Queue.process_events, module.route_utils.call_process_api
    failures: ContextVar[list[BaseException]] = ContextVar("instrument_gradio_failures")

    def read_job(event: Any) -> Job:
        queued_s = time.time() - time.monotonic() + event.enqueue_time
        name, headers = event.fn.api_name or event.fn.name, event.request.headers
        return f"/{name}", event._id, headers, event.concurrency_id, queued_s

    @replaces_attribute(module.route_utils, "call_process_api")
    async def restore_call_process_api(*args: Any, **kwargs: Any) -> Any:
        try:
            return await call(*args, **kwargs)
        except Exception as error:
            failures.get([]).append(error)
            raise

    @replaces_attribute(module.Queue, "process_events")
    async def restore_process_events(self: Any, events: Any, *args: Any, **kwargs: Any) -> None:
        frames = [jobs.begin_job(partial(read_job, event)) for event in events if event.alive]
        frames = [frame for frame in frames if frame is not None]
        errors: list[BaseException] = []
        failures.set(errors)
        answer = process(self, events, *args, **kwargs)
        for frame in frames:
            answer = recorder.stepped_in(frame, answer)
        try:
            await answer
        except BaseException as raised:
            errors.append(raised)
            raise
        finally:
            for frame in reversed(frames):
                jobs.end_job(frame, errors[-1] if errors else None)

    return [restore_call_process_api, restore_process_events]


def _read_headers(carrier: object) -> Mapping[bytes, bytes]:
    if not isinstance(carrier, Mapping):
        return {}
    pairs = [(str(name).lower().encode(), value) for name, value in carrier.items() if isinstance(value, str | bytes)]
    return {name: value.encode("latin-1", "replace") if isinstance(value, str) else value for name, value in pairs}


SEAMS: Mapping[str, Mapping[str, Attach]] = {
    "celery": {"celery.app.trace": _attach_celery},
    "rq": {"rq.job": _attach_rq},
    "dramatiq": {"dramatiq.broker": _attach_dramatiq},
    "arq": {"arq.worker": _attach_arq},
    "taskiq": {"taskiq.receiver.receiver": _attach_taskiq},
    "faststream": {"faststream._internal.endpoint.subscriber.call_item": _attach_faststream},
    "gradio": {"gradio.queueing": _attach_gradio},
}
"""The functions that instrument the libraries of queues, by package and module name."""
