"""The handlers for `Profiler(on_trace_ready=...)`: functions that write, send or print the trace of a `Window`.

`Profiler.step` calls `print_summary` and a user's own handlers directly. The handlers `export_chrome` and `export_otlp`
are slow and run on a thread.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument import chrome
from instrument.errors import ExportError, ProfileError
from instrument.profile.keys import loads
from instrument.profile.model import Otlp
from instrument.recording.spans import BATCH_KEYS, Sample, Span
from instrument.report.section import View, format_summary, make_views, refuse_unknown_views
from instrument.report.view import Options, Recording
from instrument.runtime import environment, file_writing
from instrument.runtime.faults import logger
from instrument.runtime.lazy_imports import LazyModule, dataclass, replace
from instrument.runtime.threads import Thread
from instrument.runtime.unpatched import Lock, RLock, SimpleQueue
from instrument.sessions import window_files
from instrument.sessions.session import Session
from instrument.sessions.torch_profiler import TorchRecord
from instrument.sessions.window import WINDOWS_THREAD, Step, Stretch

if TYPE_CHECKING:
    from instrument.otlp import delivery as sending
    from instrument.otlp import senders
    from instrument.otlp.packing import Body
    from instrument.recording.tally import Tally
    from instrument.trace.columns import Columns
    from instrument.trace.trace import Trace
else:
    sending, senders = LazyModule("instrument.otlp.delivery"), LazyModule("instrument.otlp.senders")

WINDOWS_LIMIT = 16
ROWS_LIMIT = 200_000
"""The maximum number of rows in all waiting windows. Beyond it, the oldest windows are dropped."""

WAIT_LIMIT_NS = 30 * 10**9
"""The time in ns for which `Profiler.stop` waits until all windows are written and sent."""

_FILE = "{service}-{pid}-{window}.json.gz"


@dataclass(eq=False, kw_only=True)
class Window:
    """A window of a loop, from `first_step` to `last_step` inclusive. It is the argument of `on_trace_ready` handlers.
    `index` counts the windows of a `Profiler` from 0. `partial` is True if `Profiler.stop` ended the window within its
    last step. `recorded` has the rows of the window. `steps` has the steps that become spans."""

    session: Session
    recorded: Stretch
    steps: Sequence[Step]
    first_step: int
    last_step: int
    partial: bool
    tracer_option: str
    state: str
    torch_record: TorchRecord | None = None
    samples: Sequence[Sample] = ()

    def __post_init__(self) -> None:
        self.index = self.recorded.window
        self._trace: Trace | None = None

    def __str__(self) -> str:
        return f"window {self.index}, steps {self.first_step} to {self.last_step}{', partial' * self.partial}"

    @property
    def trace(self) -> Trace:
        """The trace of the window. The first access takes some 2 us per span, and 15 us per operator of torch. If
        torch.profiler ran in the window, the trace also has torch's operators (as spans), kernels, allocations and
        floating-point operations."""
        if self._trace is None:  # two threads may make it, and neither waits for the other
            trace, torch_record = self._recorded_trace(), self.torch_record
            if torch_record is None:
                self._trace = trace
                return trace
            with torch_record.lock:
                if self._trace is None:
                    self._trace = torch_record.add_to_trace(trace)
        return self._trace

    def own_trace(self) -> Trace:
        """Return the trace without the records of torch.profiler."""
        return self.trace if self.torch_record is None else self._recorded_trace()

    def _recorded_trace(self) -> Trace:
        from instrument.sessions.step_columns import insert_step_spans

        trace = insert_step_spans(self.session.trace_of(self.recorded), self.steps)
        read = {(sample.device, sample.name) for sample in trace.samples}
        edges = [sample for sample in self.samples if (sample.device, sample.name) not in read]
        notes = list(trace.notes)
        if trace.held_from_ns > trace.start_ns:
            lost_ns = min(trace.held_from_ns, trace.end_ns) - trace.start_ns
            notes.append(
                f"window {self.index}: spans of its first {lost_ns / 1e6:.1f} ms were overwritten by newer ones and "
                "are not counted; raise limits.ring or record fewer steps"
            )
        late = trace.columns.count_rows_without_device_time()
        timing = self.session.account.timing
        if late and timing is not None and not timing.has_device_times_until(trace.end_ns):
            notes.append(
                f"window {self.index}: {late} spans have no device time, which had not come when the window was looked "
                "at, for no thread of the service waits for the device"
            )
        return replace(trace, samples=[*trace.samples, *edges], notes=notes)

    def tally(self) -> Tally:
        """Return the totals of the window's spans. An open span counts with its time in the window."""
        return Recording.from_trace(self.trace).tally

    def summary(
        self, *, views: Sequence[str] = ("events",), torch_trace: str | os.PathLike[str] | None = None, **options: Any
    ) -> str:
        """Return the text of views on this window alone. Arguments and errors are those of `Session.summary`."""
        return format_summary(views, self._recording(torch_trace), self._options(options))

    def views(
        self, views: Sequence[str] = ("events",), *, torch_trace: str | os.PathLike[str] | None = None, **options: Any
    ) -> dict[str, View]:
        """Return views on this window as objects with numbers, by name. The options and the errors are those of
        `summary`."""
        return make_views(views, self._recording(torch_trace), self._options(options))

    def _recording(self, torch_trace: str | os.PathLike[str] | None = None) -> Recording:
        trace = (
            self.trace
            if torch_trace is None
            else chrome.join_torch_trace(self.own_trace(), chrome.read(torch_trace).trace)
        )
        return Recording.from_trace(trace)

    def _options(self, options: Mapping[str, Any]) -> Options:
        defaults = {
            "tracer_option": self.tracer_option, "state": self.state, "sorted_by": "total", "threads": "merged",
        }  # fmt: skip
        return Options.from_mapping(options, defaults)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write this window to a file, and return the path. Raises `TraceError`. The file is a recording if the path
        ends in `.npz`, and a Chrome trace if it ends in `.json` or `.json.gz`."""
        return window_files.save_trace(path, self.trace, self.tally())


Handler = Callable[[Window], object]


class InBackground:
    """A handler that a `Profiler` runs on a separate thread. Direct calls run at once."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, window: Window) -> object:
        return self._handler(window)


def export_chrome(folder: str | os.PathLike[str]) -> Handler:
    """Return a handler for `on_trace_ready` that writes each window to a Chrome trace in `folder`. It runs on the
    thread of the `Profiler`. File names have the service, process and window. No file is overwritten, but the oldest
    ones are removed to stay within `limits.disk`."""
    return InBackground(make_chrome_handler(folder))


def make_chrome_handler(folder: str | os.PathLike[str], worker: str | None = None) -> Handler:
    """Return a handler that writes each window to a Chrome trace in `folder`. The handler runs within `step`. `worker`
    replaces the service in file names."""
    into = environment.working_folder() / folder

    def write_window(window: Window) -> None:
        place = window_files.Destination(into, worker or window.session.profile.service, "", is_first=True)
        index = window.index
        into.mkdir(parents=True, exist_ok=True)
        while True:
            path = place.make_path(_FILE, index)
            try:
                path.touch(0o600, exist_ok=False)  # reserves the name against other processes
                break
            except FileExistsError:
                index += 1
        try:
            window.export(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        place.remove_oldest_files((_FILE,), (path,), window.session.profile.limits.disk_bytes)

    return write_window


def print_summary(
    *, views: Sequence[str] = ("events",), to: str | os.PathLike[str] = "stdout", **options: Any
) -> Handler:
    """Return a handler for `on_trace_ready` that prints the summary of each window. `to` is `stdout`, `stderr`, or a
    file. Summaries are appended to the file. Only its owner can read a new file. `views` and the other options are
    those of `Window.summary`. Raises `ValueError` at once for an unknown view or value."""
    refuse_unknown_views(views)
    Options.from_mapping({name: value for name, value in options.items() if name != "torch_trace"})

    def print_window(window: Window) -> None:
        text = f"{str(window).capitalize()}\n{window.summary(views=views, **options)}"
        if to in window_files.STREAMS:
            print(text, file=sys.stderr if to == "stderr" else sys.stdout, flush=True)
            return
        file_writing.append_text(Path(to), f"{text}\n")

    return print_window


def is_asynchronous(handler: Any) -> bool:
    """Return True if a handler is asynchronous, so that a plain call would run nothing."""
    calls = handler, type(handler).__call__
    return any(inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call) for call in calls)


# -------------------------------------------------------------------- to a collector


def export_otlp(endpoint: str | None = None, *, headers: Mapping[str, str] | None = None) -> Handler:
    """Return a handler for `on_trace_ready` that sends each window's spans to an OpenTelemetry collector, on the
    `Profiler`'s thread.

    Missing arguments come from `export.otlp` of the profile, else from the `OTEL_*` variables. The default collector is
    at http://localhost:4318. `endpoint` has the syntax of a profile.

    Every span is sent once. A span that is open at a window's edge is sent with its first window, clipped and marked.
    If the session already exports to the same endpoint with the same headers, the session sends the window, without
    steps. Open requests are then sent after they have ended, and other open spans are not sent.

    After a failure the rest of the window is not sent. The spans count in the session's losses, and the window counts
    in `Profiler.failures`. Raises `ProfileError` for an invalid endpoint or headers.
    """
    settings: dict[str, Any] = {"endpoint": endpoint, "headers": None if headers is None else dict(headers)}
    settings = {name: value for name, value in settings.items() if value is not None}
    if endpoint == "":
        raise ProfileError(["export_otlp: endpoint: found ''; allowed: the http:// or https:// URL of a collector"])
    read_profile = loads(json.dumps({"export": {"otlp": settings}}), name="export_otlp")
    otlp_settings = read_profile.export.otlp
    if otlp_settings is None:
        logger.warning("export_otlp: %s", "; ".join(read_profile.remarks))
        return lambda window: None
    for name in senders.list_sender_modules(otlp_settings):
        import_module(name)  # not on the Profiler's thread: a fork in the middle would leave the child half a module
    return InBackground(_CollectorHandler(otlp_settings, frozenset(settings)))


class _CollectorHandler:
    """A handler that sends windows to a collector, on its own connection. It may be called on any thread."""

    def __init__(self, settings: Otlp, names: frozenset[str]) -> None:
        self._settings = settings
        self._argument_names = names
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._exporter: sending.Exporter | None = None
        self._sending_by: Otlp | None = None
        self._threads: Mapping[int, str] = {}
        self._sent_open: set[int] = set()

    def __call__(self, window: Window) -> None:
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            self._send_window(window)

    def _send_window(self, window: Window) -> None:
        session = window.session
        settings = self._choose_settings(session)
        if session.exporting.sends_spans_to(settings):
            session.exporting.send_window(window.recorded.start_ns, window.recorded.end_ns)
            return
        trace = window.own_trace()
        spans = [span for span in trace.spans if not (span.clipped and span.span_id in self._sent_open)]
        self._sent_open = {span.span_id for span in trace.spans if span.clipped and span.end_ns == trace.end_ns}
        if not spans:
            return
        exporter = self._exporter
        if exporter is None or settings != self._sending_by:
            exporter = self._exporter = sending.Exporter(settings, trace.origin, lambda: self._threads)
            self._sending_by = settings
        exporter.own.origin, exporter.own.ids = trace.origin, session.recorded.id_generator()
        self._threads = trace.threads
        before = exporter.count_fates()["exported"]
        size = sum(1 + len(span.device) for span in spans)
        delivery = exporter.send(_pack_window(spans, trace.columns, exporter))
        missing = size - (delivery.exported - before)
        if missing > 0:
            session.exporting.count_loss("spans of windows that did not reach the OpenTelemetry collector", missing)
            raise ExportError(
                f"{missing} of {size} spans did not reach the OpenTelemetry "
                f"collector{f' ({delivery.reason})' if delivery.reason else ''}"
            )

    def _choose_settings(self, session: Session) -> Otlp:
        of_profile = session.profile.export.otlp
        if of_profile is None or "endpoint" in self._argument_names:
            return self._settings
        return replace(of_profile, headers=self._settings.headers) if "headers" in self._argument_names else of_profile


def _pack_window(spans: Sequence[Span], trace: Columns, exporter: sending.Exporter) -> Iterator[Body]:
    import numpy as np

    from instrument.otlp.packed_spans import SpanIds
    from instrument.trace.joined import join_requests

    span_ids = np.array([span.span_id for span in spans])
    rows = np.flatnonzero(np.isin(trace.span_id, span_ids))
    rows = rows[np.argsort(trace.root_id[rows], kind="stable")]
    ids = SpanIds(trace, exporter.own.ids)
    links = ids.make_links_by_row(join_requests(trace)) if len(trace.attributes.rows_with_attribute(BATCH_KEYS)) else {}
    return exporter.own.pack_requests(trace, rows, exporter.request_bytes, ids, links=links)


# -------------------------------------------------------------------- the other thread


class Backlog:
    """A queue of windows, with a thread that runs their handlers in order. Beyond `WINDOWS_LIMIT` or `ROWS_LIMIT` it
    drops the oldest windows. Failed handlers and dropped windows are reported to `fail`, on any thread."""

    def __init__(self, fail: Callable[[str, Exception], None]) -> None:
        self._fail = fail
        self._lock = RLock()  # a signal handler may end a window, too
        self._news: SimpleQueue[None] = SimpleQueue()
        self._waiting: deque[tuple[Window, Sequence[Handler]]] = deque()
        self._is_ending = False
        self._thread: Thread | None = None

    def queue_window(self, window: Window, handlers: Sequence[Handler]) -> None:
        """Queue a window for its handlers. At interpreter exit, when no thread can start, run the handlers at once."""
        if self._thread is None:
            thread = Thread(self._run_handlers, WINDOWS_THREAD, lambda: not self._is_ending)
            try:
                thread.start()
            except RuntimeError:
                self._handle_window(window, handlers)
                return
            self._thread = thread
        with self._lock:
            self._waiting.append((window, handlers))
            sizes = [waiting.recorded.snapshot.size for waiting, _ in self._waiting]
            excess = max(len(sizes) - WINDOWS_LIMIT, 0)
            while excess < len(sizes) - 1 and sum(sizes[excess:]) > ROWS_LIMIT:
                excess += 1
            given_up = [self._waiting.popleft()[0] for _ in range(excess)]
        self._news.put(None)
        self._drop_windows(given_up, "newer windows came faster than they can be written")

    def stop(self, limit_ns: int) -> None:
        """Wait up to `limit_ns` until all windows are handled, drop the others, and end the thread."""
        thread = self._thread
        if thread is None:
            return
        self._is_ending = True
        self._news.put(None)
        try:
            thread.join(limit_ns / 1e9)
        finally:
            with self._lock:
                given_up = [window for window, _ in self._waiting]
                self._waiting.clear()
            self._thread = None
        if thread.is_alive():
            logger.warning(
                "a handler of a Profiler still runs after %d s, and the process does not wait for it", limit_ns // 10**9
            )
        self._drop_windows(given_up, f"they were not written within {limit_ns / 1e9:g} s")

    def _drop_windows(self, windows: Sequence[Window], why: str) -> None:
        for window in windows:
            window.session.exporting.count_loss("windows of loops that were not written", 1)
            self._fail(f"{window} was given up", ExportError(f"{why}; record fewer steps, or write to a faster place"))

    def _run_handlers(self) -> None:
        while True:
            with self._lock:
                entry = self._waiting.popleft() if self._waiting else None
            if entry is not None:
                self._handle_window(*entry)
                del entry
            elif self._is_ending:
                return
            else:
                self._news.get()  # one for each that was added, and one for the end

    def _handle_window(self, window: Window, handlers: Sequence[Handler]) -> None:
        for handler in handlers:
            try:
                handler(window)
            except Exception as error:
                self._fail(f"on_trace_ready failed for {window}", error)
