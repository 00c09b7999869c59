"""A background thread that sends metrics, and the span trees that tail sampling keeps, to a collector."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from instrument.otlp.export_facts import Ids
from instrument.otlp.metrics_queue import DELAY_NS, PATIENCE_NS, Metrics
from instrument.otlp.packing import REQUEST_BYTES, Body, split_request
from instrument.otlp.resource import detect_attributes, drop_parent_id, merge_resource_attributes, provider_attributes
from instrument.otlp.senders import THREAD_NAME, Response, Sender, import_once, make_metrics_url, make_sender
from instrument.otlp.service_sdk import suppress_instrumentation
from instrument.otlp.span_queue import FATES, SENDING, QueuedRequest, RequestQueue, Source
from instrument.recording.spans import Origin
from instrument.runtime.environment import parse_resource_attributes
from instrument.runtime.faults import FAULTS, logger
from instrument.runtime.threads import Pace, Thread
from instrument.runtime.unpatched import TIMEOUT_MAX, Empty, SimpleQueue

if TYPE_CHECKING:
    from instrument.profile.model import Otlp
    from instrument.trace.columns import Columns, Int64s

LEAST_REQUEST_BYTES = 64 << 10
"""The lowest size limit in bytes after refusals of large requests. A queue of this size is sent at once."""
HALVINGS = 12
"""The maximum number of consecutive halvings of a request that the collector refuses as too large."""

LONGEST_RETRY_PAUSE_S = 300.0
"""The longest pause in seconds that a collector can request. Spans wait in the queue meanwhile."""

_BATCH_DELAY_S = 1.0
_PACKING = ("instrument.otlp.span_forms", "instrument.trace.trace")
_QUIET_NS = 60 * 10**9
_LOOK_S = 0.005
_RETRY_S = _JOIN_S = 0.1
_NEVER_NS = 1 << 63


@dataclass(frozen=True, slots=True)
class Delivery:
    """The numbers of spans by outcome since an exporter's start. `settled` is True if a flush sent or lost all earlier
    spans within its time limit. `reason` explains the last loss."""

    offered: int
    exported: int
    rejected: int
    failed: int
    dropped: int
    pending: int
    settled: bool
    reason: str = ""

    @property
    def complete(self) -> bool:
        """True if all spans were sent in time."""
        return self.settled and not (self.rejected or self.failed or self.dropped)


SILENCE_NS = 1_500_000_000
"""Nanoseconds without an answer to a request after which a warning is logged."""


class Exporter:
    """Sends spans to a collector on one daemon thread, and counts them by outcome. Every method except
    `after_fork_in_child` may be called from any thread, also from a signal handler.

    - `threads` returns the names of threads by native id.
    - `settled` is called with a process (`Source`) before its spans are sent, and after its spans or metrics were sent
      or lost. The sending thread calls it.
    - `detects` is True for an exporter in the service, which detects resource attributes.
    - Without `sends`, there are no metrics.

    Raises `ExportError` for settings that cannot work, such as grpc without its extra.
    """

    def __init__(
        self,
        settings: Otlp,
        origin: Origin,
        threads: Callable[[], Mapping[int, str]],
        settled: Callable[[Source], object] = lambda _: None,
        *,
        detects: bool = True,
        sends: bool = True,
    ) -> None:
        self._settings = settings
        self._sends = sends
        self._threads = threads
        self.settled = settled
        self._sender = make_sender(settings)
        self._detected: Mapping[str, object] | None = None if detects else {}
        self._is_in_service = detects
        self._reset_sources(origin)

    def _reset_sources(self, origin: Origin) -> None:
        self.own = Source(Ids(), origin, self._threads, self.resource)
        self._metered: tuple[Source, ...] = ()
        self._metrics_source: Source | None = None
        self._are_metrics_late = False
        self._queue = RequestQueue()
        self._wake: SimpleQueue[SimpleQueue[bool] | None] = SimpleQueue()
        self._halt: SimpleQueue[None] = SimpleQueue()
        self._thread: Thread | None = None
        self._stop_at_ns = _NEVER_NS
        self.request_bytes = REQUEST_BYTES
        """The current maximum size of a request in bytes before compression. A collector's refusals reduce it."""
        self._halvings = 0
        self._is_patient = True
        self._deferred_until_ns = self._metrics_deferred_until_ns = self._sent_at_ns = 0
        self._failing = False
        self._quiet_until_ns = 0
        self.thread_ns = 0
        """Processor time of the export thread so far, in ns."""

    @property
    def component_type(self) -> str:
        return f"otlp_{'grpc' if self._settings.protocol == 'grpc' else 'http'}_span_exporter"

    @property
    def timeout_ns(self) -> int:
        return self._settings.timeout_ns

    def make_metrics_queue(self, environ: Mapping[str, str]) -> Metrics:
        endpoint = self._settings.endpoint
        url = endpoint if self._settings.protocol == "grpc" else make_metrics_url(endpoint)
        return Metrics(url if self._sends else None, environ)

    def add_metrics(self, source: Source) -> None:
        with self._queue.lock:
            if source not in self._metered:
                self._metered = (*self._metered, source)

    def remove_metrics(self, source: Source, limit_s: float) -> None:
        """Send no more metrics of a source. Wait at most `limit_s` seconds for a running request."""
        with self._queue.lock:
            self._metered = tuple(metered for metered in self._metered if metered is not source)
        end = time.monotonic() + limit_s
        while self._metrics_source is source and time.monotonic() < end:
            time.sleep(_LOOK_S)

    def is_sending_metrics(self, source: Source) -> bool:
        return self._metrics_source is source

    def resource(self) -> dict[str, object]:
        detected = parse_resource_attributes() if self._detected is None else self._detected
        return merge_resource_attributes(self.own.origin, self.own.ids.instance, detected, provider_attributes())

    def start(self) -> None:
        """Start the export thread unless it runs. The thread also sends spans that were offered before.

        The first start imports modules on the calling thread, in about 0.1 s. A child forked during an import on the
        export thread could never import that module.
        """
        self.import_sending_modules()
        for name in _PACKING:
            import_module(name)
        with self._queue.lock:
            if self._thread is not None and self._thread.is_alive():
                return
            sender = self._open_sender()
            thread = Thread(partial(self._run_thread, sender), THREAD_NAME, partial(self._is_sender_current, sender))
            self._thread, self._is_patient = thread, True
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is about to exit
            self._thread = None
            raise

    def import_sending_modules(self) -> None:
        for name in self._sender.modules:
            import_once(name)
        if self._detected is None:
            self._detected = detect_attributes()

    def _is_sender_current(self, sender: Sender) -> bool:
        return self._sender is sender and not self._queue.is_closed

    def _open_sender(self) -> Sender:
        """Open the queue and a new sender. The caller has the lock."""
        self._queue.is_closed, self._stop_at_ns, self._halt = False, _NEVER_NS, SimpleQueue()
        self._sender = make_sender(self._settings)
        return self._sender

    def send(self, bodies: Iterable[Body]) -> Delivery:
        """Send packed requests on the calling thread, without the export thread. Stops at the first request that
        fails."""
        self.import_sending_modules()
        with self._queue.lock:
            sender = self._open_sender()
            self._is_patient = False
        before = self.count_fates()
        try:
            for body in bodies:
                self._queue.offer_request(body, self.own)
                self._send_queue(sender)
                counts = self.count_fates()
                if any(counts[fate] > before[fate] for fate in ("rejected", "failed", "dropped")):
                    break
        except BaseException as fault:
            self._queue.give_up_requests(f"{type(fault).__name__}: {fault}")
            raise
        finally:
            sender.close()
        return self.flush(0)

    def submit_rows(self, source: Source, trace: Columns, rows: Int64s, **facts: Any) -> None:
        """Pack rows into OTLP requests, and queue the requests. Never raises: rows that cannot be packed are counted as
        failed."""
        pace = Pace() if self._is_in_service else None
        bodies = []
        try:
            for body in source.pack_requests(trace, rows, self.request_bytes, **facts):
                bodies.append(body)
                if pace is not None and self._stop_at_ns == _NEVER_NS:
                    pace.pause_if_due()
        except Exception as fault:  # our own fault is counted, not raised into the service
            if (half := len(rows) // 2) > 0:
                self.submit_rows(source, trace, rows[:half], **facts)
                self.submit_rows(source, trace, rows[half:], **facts)
                return
            spans = len(rows) + sum(row in rows for row in trace.device.row.tolist())
            self._queue.count_failed(spans, source, f"{type(fault).__name__}: {fault}")
            FAULTS.note("packing of spans", fault)
        self.submit(bodies, source)

    def submit(self, bodies: Iterable[Body], source: Source | None = None) -> None:
        """Queue packed OTLP requests of a source, by default of this process."""
        for body in bodies:
            self._queue.offer_request(body, source or self.own)
        if self._queue.queued_bytes >= LEAST_REQUEST_BYTES:
            self.send_soon()

    @property
    def pending_spans(self) -> int:
        return self._queue.pending_span_count

    def send_soon(self) -> None:
        if self._wake.empty():
            self._wake.put(None)

    def flush(self, timeout_ns: int) -> Delivery:
        """Send the offered spans, and wait up to `timeout_ns`. Does not wait if the collector has asked for a longer
        pause."""
        thread, end_ns = self._thread, time.monotonic_ns() + timeout_ns
        waits = bool(self._queue.pending_span_count) or self._have_waiting_metrics()
        settled = not waits and self._metrics_source is None  # in this order: what is just being sent waits no more
        while not settled and thread is not None and thread.is_alive() and not self._is_sending_deferred(end_ns):
            reply: SimpleQueue[bool] = SimpleQueue()
            self._wake.put(reply)
            try:
                settled = reply.get(timeout=min(max(0, end_ns - time.monotonic_ns()) / 1e9, TIMEOUT_MAX))
            except Empty:
                break  # the time is up; the counts say how far it came
            if self._stop_at_ns != _NEVER_NS or not (self._are_metrics_late and self._have_waiting_metrics()):
                break
            settled = False  # metrics that the collector was too slow for are sent again
            time.sleep(min(_RETRY_S, max(0, end_ns - time.monotonic_ns()) / 1e9))
        counts = self.count_fates()
        fates = {fate: counts[fate] for fate in FATES}
        return Delivery(**fates, settled=settled, reason=self._queue.reason)

    def _have_waiting_metrics(self) -> bool:
        return any(metered.metrics is not None and metered.metrics.has_waiting_metrics() for metered in self._metered)

    def _is_sending_deferred(self, time_ns: int) -> bool:
        metrics_ns = 0 if self._queue.pending_span_count else self._metrics_deferred_until_ns
        return self._stop_at_ns == _NEVER_NS and max(self._deferred_until_ns, metrics_ns) > time_ns

    def stop(self, timeout_ns: int) -> Delivery:
        """Flush within `timeout_ns` and end the thread, even if the collector never answers. `start` begins again.

        Returns at most 0.2 s after `timeout_ns`. Spans in the queue then count as dropped. Spans of the running request
        count as failed.
        """
        self._stop_at_ns = time.monotonic_ns() + timeout_ns
        self._halt.put(None)
        settled = self.flush(timeout_ns).settled
        sender, thread = self._sender, self._thread
        with self._queue.lock:
            self._queue.is_closed, self._thread = True, None
            self._queue.give_up_requests(sender.obstacle or "stopped before the collector had answered")
        for metered in self._metered:
            if metered.metrics is not None:
                metered.metrics.drop_waiting_metrics()
        self._wake.put(None)
        if thread is not None:
            sender.abort()
            thread.join(_JOIN_S)
        delivery = replace(self.flush(0), settled=settled)
        if delivery.failed or delivery.dropped:
            self._log_outcome(Response(False, reason=delivery.reason))
        return delivery

    def log_collector_silence(self) -> None:
        began_ns = self._sent_at_ns
        if began_ns and time.monotonic_ns() - began_ns > SILENCE_NS:
            self._log_outcome(Response(False, reason=self._sender.obstacle or "no answer yet"))

    def count_fates(self) -> Mapping[str, int]:
        return self._queue.count_fates()

    def after_fork_in_child(self) -> None:
        self._sender.after_fork_in_child()
        self._reset_sources(self.own.origin)
        if self._detected is not None:
            self._detected = drop_parent_id(self._detected)

    def _run_thread(self, sender: Sender) -> None:
        while self._is_sender_current(sender):
            try:
                reply = self._wake.get(timeout=_BATCH_DELAY_S)
            except Empty:
                reply = None
            settled = True
            try:
                self._send_queue(sender)
            except BaseException as fault:  # the thread has to outlive what it did not expect
                settled = False
                with self._queue.lock:
                    if self._is_sender_current(sender):
                        self._queue.give_up_requests(f"{type(fault).__name__}: {fault}")
                FAULTS.note("OTLP export", fault)
            try:
                self._send_metrics(sender, at_once=reply is not None)
            except Exception as fault:  # likewise
                FAULTS.note("OTLP export of metrics", fault)
            self.thread_ns = time.thread_time_ns()
            if reply is not None:
                reply.put(settled)
        sender.close()

    def _send_queue(self, sender: Sender) -> None:
        while True:
            with self._queue.lock:
                request = self._queue.take_next_request() if self._is_sender_current(sender) else None
            if request is None:
                return
            self._deliver_request(sender, request)

    def _send_metrics(self, sender: Sender, at_once: bool) -> None:
        """Send the due metrics of each process. After a failure, the next attempt begins with other processes, because
        the collector may refuse only the metrics of one process."""
        for source in self._metered:
            metrics, now_ns = source.metrics, time.monotonic_ns()
            deferred_ns = max(self._deferred_until_ns, self._metrics_deferred_until_ns)
            if metrics is None or not (metrics.is_due(now_ns) or (at_once and metrics.has_waiting_metrics())):
                continue
            if now_ns < deferred_ns:
                return
            self._metrics_source = source
            try:
                is_taken = self._send_process_metrics(sender, source, metrics)
                self.settled(source)
            finally:
                self._metrics_source = None
            if not is_taken and len(self._metered) > 1 and self._stop_at_ns == _NEVER_NS:
                self._metrics_deferred_until_ns = max(self._metrics_deferred_until_ns, time.monotonic_ns() + DELAY_NS)
                with self._queue.lock:  # the source may have been removed meanwhile
                    self._metered = tuple(sorted(self._metered, key=lambda metered: metered is source))

    def _send_process_metrics(self, sender: Sender, source: Source, metrics: Metrics) -> bool:
        """Send a process's metrics. Return False if a failure also delays the metrics of other processes.

        If the collector asks for a pause, later metrics wait, and spans do not.
        """
        suppress_instrumentation()
        timeout_ns = self._settings.timeout_ns
        patience_ns = timeout_ns if self._stop_at_ns != _NEVER_NS else min(timeout_ns, PATIENCE_NS)
        try:
            for request in metrics.make_requests(source.origin) if source in self._metered else ():
                left_s = partial(self._remaining_s, sender, time.monotonic_ns() + patience_ns)
                verdict = sender.send_metrics(source.resource(), request.series, left_s, self._pause_sending)
                self._are_metrics_late = verdict.is_late
                if verdict.wait_s:
                    self._metrics_deferred_until_ns = _end_of_pause_ns(verdict)
                metrics.settle_request(request, verdict)
                if not (verdict.taken and self._is_sender_current(sender)):
                    return bool(metrics.off)
        except Exception as fault:
            metrics.drop_waiting_metrics()
            FAULTS.note("OTLP export of metrics", fault)
        return True

    def _deliver_request(self, sender: Sender, request: QueuedRequest) -> None:
        """Send one request. Split the request into halves if the collector finds it too large. If the collector asks
        for a pause, all spans wait."""
        timeout_ns = self._settings.timeout_ns
        last_ns = time.monotonic_ns() + timeout_ns
        suppress_instrumentation()
        while True:
            if not self._await_retry(sender, last_ns):
                verdict = Response(False, reason=self._queue.reason)
                break
            request.source.counts[SENDING] = request.spans
            self.settled(request.source)  # who hears what is settled hears it before it is sent, too
            self._sent_at_ns = time.monotonic_ns()
            left_s = partial(self._remaining_s, sender, self._sent_at_ns + timeout_ns)
            verdict = sender.send(request.data, request.spans, left_s, self._pause_sending)
            self._sent_at_ns = 0
            if not verdict.wait_s:
                break
            self._log_outcome(verdict)
            self._deferred_until_ns = _end_of_pause_ns(verdict)
        if verdict.taken:
            self._halvings = 0
        if verdict.too_large and request.spans > 1 and self._halvings < HALVINGS:
            self._halvings += 1
            self.request_bytes = min(self.request_bytes, max(LEAST_REQUEST_BYTES, len(request.data) // 2))
            halves = [QueuedRequest(*half, request.source) for half in split_request(request.data)]
            self._queue.replace_request(request, halves)
            for half in halves:
                self._deliver_request(sender, half)
            return
        with self._queue.lock:
            if not self._is_sender_current(sender):
                return
            self._queue.settle_request(request, verdict)
        self.settled(request.source)
        self._log_outcome(verdict)

    def _remaining_s(self, sender: Sender, deadline_ns: int) -> float:
        until_ns = min(deadline_ns, self._stop_at_ns)
        return (until_ns - time.monotonic_ns()) / 1e9 if self._is_sender_current(sender) else 0.0

    def _await_retry(self, sender: Sender, deadline_ns: int) -> bool:
        while (left_ns := self._deferred_until_ns - time.monotonic_ns()) > 0:
            end_ns = self._stop_at_ns if self._is_patient else deadline_ns
            if not self._is_sender_current(sender) or self._deferred_until_ns >= end_ns:
                return False
            self._pause_sending(left_ns / 1e9)
        return True

    def _pause_sending(self, seconds: float) -> None:
        try:
            self._halt.get(timeout=min(seconds, TIMEOUT_MAX))
        except Empty:
            pass  # waited in full

    def _log_outcome(self, verdict: Response) -> None:
        """Log the first failure, and the recovery from it. After a recovery, no failure is logged for a while."""
        if verdict.reason:
            self._queue.reason = verdict.reason if verdict.reason.isprintable() else repr(verdict.reason)
        lost = not verdict.taken or verdict.rejected > 0
        if lost and not self._failing and time.monotonic_ns() >= self._quiet_until_ns:
            self._failing = True
            logger.warning(
                "spans do not reach the OpenTelemetry collector (%s); the service is not affected, losses are counted",
                self._queue.reason if verdict.reason else f"{verdict.rejected} spans rejected",
            )
        elif self._failing and not lost:
            self._failing = False
            self._quiet_until_ns = time.monotonic_ns() + _QUIET_NS
            logger.warning("spans reach the OpenTelemetry collector again")


def _end_of_pause_ns(verdict: Response) -> int:
    return time.monotonic_ns() + round(min(verdict.wait_s, LONGEST_RETRY_PAUSE_S) * 1e9)
