"""The recording part of a session: the components that record, and the traces, totals and reports from their data.

`Session` starts the components, changes their profile, and stops them.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

from instrument import chrome, clock
from instrument.device.gauge_thread import Gauges
from instrument.device.timing import Ranges, Timing
from instrument.instrumentors.probe_cost import Costs
from instrument.instrumentors.selection import Selection
from instrument.instrumentors.startup import ImportTimes
from instrument.profile.model import EVERYTHING, Parquet, Profile, Summary
from instrument.recorder.governor import Budget
from instrument.recorder.recorder import RECORDER, Ticks
from instrument.recording.memory_layout import INTERVAL_SHARE, REQUEST_BIT
from instrument.recording.paths import CallTree
from instrument.recording.spans import (
    Cost,
    FirstCall,
    Gpu,
    Origin,
    Site,
    Span,
    Startup,
    is_request,
)
from instrument.recording.trace_context import (
    OWN_TRACE_FLAGS,
    REMOTE,
    RemoteParent,
    encode_parent,
    is_sampled,
    make_tracestate,
    parse_parent,
)
from instrument.runtime import environment
from instrument.runtime.lazy_imports import LazyModule, late_pattern, replace
from instrument.sessions.account import SessionDiagnostics
from instrument.sessions.handover import Handover
from instrument.sessions.window import MOST_STEPS, WINDOWS_THREAD, Step, Stretch, WindowReader, clip_steps

if TYPE_CHECKING:
    from instrument.otlp import delivery as sending
    from instrument.otlp import export_facts, metrics_queue
    from instrument.otlp import resource as own_resource
    from instrument.recording.tally import Tally
    from instrument.report import section as report
    from instrument.report import view
    from instrument.report.section import View
    from instrument.trace.trace import Trace
else:
    sending, own_resource = LazyModule("instrument.otlp.delivery"), LazyModule("instrument.otlp.resource")
    export_facts = LazyModule("instrument.otlp.export_facts")
    metrics_queue = LazyModule("instrument.otlp.metrics_queue")
    view = LazyModule("instrument.report.view")
    report = LazyModule("instrument.report.section")

HEALTH_PROBES = late_pattern(
    r"(?<![a-z])(?:health(?:[_-]?checks?)?|healthz|live|livez|liveness|ready|readyz|readiness|ping|heartbeat|probe"
    r"|metrics)(?![a-z])",
    re.IGNORECASE,
)
"""A pattern for the names of health probes and metrics endpoints."""

Firsts = Mapping[int, tuple[int, int]]
"""A map from a call node to the start time and duration in ns of its first completed call."""


class Recorded:
    """The part of a session that records by a profile, and reads the recorded data. All methods may be called from any
    thread.

    `keep_gpus` is called with the GPUs whose gauges are read.
    """

    def __init__(self, profile: Profile, keep_gpus: Callable[[Sequence[Gpu]], object]) -> None:
        self.profile = profile
        self.generation = 1
        self.digest = profile.digest
        self.ticks = Ticks(RECORDER)
        self._ids: export_facts.Ids | None = None
        self._caller = _find_caller_in_environment()
        self._remote = parse_parent(tuple(self._caller.split(" ", 1)))
        self.selection = Selection(profile)
        # To ask for the current span is to begin recording on a thread: not where nothing has been recorded.
        self.imports = ImportTimes(lambda: RECORDER.rings() and RECORDER.current_span_id())
        self.ranges = Ranges(RECORDER)
        room = partial(RECORDER.find_part_memory, "samples")
        self.gauges = Gauges(profile.device, room, lambda samples, gpus: keep_gpus(gpus))
        self.timing: Timing | None = None
        if profile.device.cuda != "off" and profile.state != "CPU":
            interval_bytes = profile.limits.ring_bytes // INTERVAL_SHARE
            self.timing = Timing(interval_bytes, self.ranges, holds_gil=profile.device.gil == "hold")
        self.exporter: sending.Exporter | None = None
        if profile.export.otlp is not None:
            self.exporter = sending.Exporter(profile.export.otlp, self.origin(), RECORDER.read_thread_names)
        self.handover = Handover(self.exporter)
        self.costs = Costs(RECORDER)
        self.budget = Budget(
            RECORDER, self.costs.median_ns_by_shape, lambda: self.costs.passed_ns, self.selection.detach
        )
        self.windows = WindowReader(RECORDER, self.selection, self.origin)
        self.account = SessionDiagnostics(
            recorder=RECORDER,
            selection=self.selection,
            windows=self.windows,
            costs=self.costs,
            budget=self.budget,
            gauges=self.gauges,
            ranges=self.ranges,
            imports=self.imports,
            timing=self.timing,
            exporter=self.exporter,
            handover=self.handover,
            has_waiting_notes=profile.source != EVERYTHING.source,
        )
        self.reset_recording()

    def reset_recording(self) -> None:
        self.start_ns = time.monotonic_ns()
        self.end_ns: int | None = None
        self.steps: deque[Step] = deque(maxlen=MOST_STEPS)
        """The newest steps of all loops, in order of their ends."""
        self.windows.begin_schedule(self.profile, self.start_ns)

    def after_fork_in_child(self) -> None:
        self._ids = None
        self.account.after_fork_in_child()
        self.ranges.after_fork_in_child()
        self.imports.after_fork_in_child()
        if self.timing is not None:
            self.timing.after_fork_in_child()
        self.gauges.after_fork_in_child(begins=False)
        self.reset_recording()

    def apply_settings(self, profile: Profile) -> None:
        self.windows.change_schedule(profile, time.monotonic_ns())
        if profile.budget != self.profile.budget:
            self.budget.change(profile.budget)
        self.profile = profile
        self.generation += 1
        self.digest = profile.digest
        if self.exporter is not None:
            self.exporter.own.origin = self.origin()

    # ---------------------------------------------------------------- the process, as others know it

    @property
    def request_grouping(self) -> tuple[str, int]:
        """The attribute that groups requests, and the maximum number of groups."""
        return next(((rule.by, rule.at_most) for rule in self.profile.requests), ("", 0))

    def dataset_settings(self) -> Parquet | None:
        """Return the settings of the dataset. The path is absolute, because the agent runs in another folder."""
        settings = self.profile.export.parquet
        if settings is None or "://" in settings.path:
            return settings
        return replace(settings, path=str(environment.working_folder() / settings.path))

    def id_generator(self) -> export_facts.Ids:
        if self.exporter is not None:
            return self.exporter.own.ids
        if self._ids is None:
            self._ids = export_facts.Ids()
        return self._ids

    def resource(self) -> dict[str, object]:
        """Return the OpenTelemetry attributes that identify this process for collectors and profilers."""
        if self.exporter is not None:
            return self.exporter.resource()
        attributes, provider = environment.parse_resource_attributes(), own_resource.provider_attributes()
        return own_resource.merge_resource_attributes(self.origin(), self.id_generator().instance, attributes, provider)

    def trace_context_of_span(self, span_id: int, root_id: int, remote_value: Any) -> tuple[int, int, int, str]:
        """Return the trace id, span id, flags and trace state of a span. A span below a remote caller has the trace id
        of the caller."""
        ids, remote = self.id_generator(), parse_parent(remote_value)
        may_be_below = remote is None and self._remote is not None and not root_id & REQUEST_BIT
        if may_be_below and not any(RECORDER.paths().map_sites(is_request)):
            remote = self._remote
        if remote is not None:
            return remote.trace_id, ids.span_id(span_id), remote.flags, remote.state
        trace_id, sample = ids.trace_id(root_id), self.profile.capture.sample
        is_kept = is_sampled(trace_id, sample)
        parent = RemoteParent(
            trace_id, 0, OWN_TRACE_FLAGS ^ (not is_kept), state=make_tracestate(sample) if is_kept else ""
        )
        if ids.run or self._remote is not None:  # its exporter must keep the trace id, which others know now
            annotate = RECORDER.annotate_request if root_id & REQUEST_BIT else RECORDER.annotate_innermost
            annotate({REMOTE: encode_parent(parent)})
        return trace_id, ids.span_id(span_id), parent.flags, parent.state

    def _find_exported_ids(self, span: Span, key: str) -> tuple[int, int]:
        from instrument.trace.request_trees import make_trace_id_of_key

        trace_id, span_id = self.id_generator().make_root_ids(span)
        run = self.id_generator().run if key and span.remote is None else ""
        return make_trace_id_of_key(run, key) if run else trace_id, span_id

    def origin(self) -> Origin:
        monotonic_ns, realtime_ns = clock.read_clocks()
        return Origin(
            pid=os.getpid(),
            service=self.profile.service,
            monotonic_ns=monotonic_ns,
            realtime_ns=realtime_ns,
            recorder="native",
            profile=self.profile.source,
            host=socket.gethostname(),
            generation=self.generation,
            digest=self.digest,
            boot=clock.boot_id(),
            wall_error_ns=clock.read_wall_clock_error_ns(),
            run=environment.shared_run_name() or environment.read_run_name(),
            start_ticks=clock.read_process_start_ticks(clock.STAT),
            version=str(environment.parse_resource_attributes().get("service.version", "")),
            caller=self._caller,
        )

    # ---------------------------------------------------------------- the readings

    def cost(self) -> Cost:
        """Return the cost of the instrumentation so far."""
        return self.account.cost(self.measure_length_ns())

    def measure_length_ns(self) -> int:
        return (self.end_ns or time.monotonic_ns()) - self.start_ns

    def tally(self) -> Tally:
        """Return the totals of all calls so far. The totals are exact."""
        return self.add_probe_costs(RECORDER.tally())

    def add_probe_costs(self, tally: Tally) -> Tally:
        tally.set_probe_costs(lambda site: self.costs.find_site_cost(site).outside_ns)
        return tally

    def trace(
        self, start_ns: int | None = None, end_ns: int | None = None, window: int = 0, origin: Origin | None = None
    ) -> Trace:
        """Return the spans of an interval that are still in memory. Open spans are clipped and marked.

        The steps of a `Profiler` are spans, too. Without a `Profiler`, steps are derived from the phases and loaders of
        a training loop. `origin` is the identity of the process at the end of the interval.
        """
        from instrument.sessions.step_columns import derive_training_steps, insert_step_spans

        first = self.start_ns if start_ns is None else start_ns
        last = (self.end_ns or time.monotonic_ns()) if end_ns is None else end_ns
        trace = self.make_stretch_trace(self.copy_rows(first, last, window, origin))
        profile = self.profile
        are_steps_found = profile.phases == profile.loaders == "auto" and profile.schedule is None
        if are_steps_found and not self.steps:
            trace = insert_step_spans(trace, derive_training_steps(trace.columns))
        else:
            steps = clip_steps(self.steps.copy(), max(first, trace.held_from_ns), last)
            trace = insert_step_spans(trace, steps)
        if start_ns is None and end_ns is None:
            trace.cost = self.account.cost(last - first)  # of the very time that the trace says to be its own
        return trace

    def copy_rows(self, start_ns: int, end_ns: int, window: int = 0, origin: Origin | None = None) -> Stretch:
        """Copy the rows of an interval, at 10 ns per row. `make_stretch_trace` later makes a trace of the copy."""
        from instrument.trace.of_recording import RowSnapshot

        mapped = RECORDER.make_reader()
        threads = mapped.read_thread_names()
        writing = frozenset(thread_id for thread_id, name in threads.items() if name == WINDOWS_THREAD)
        snapshot = RowSnapshot.copy_from(mapped, start_ns, writing, remote=self._remote)
        return Stretch(snapshot, threads, start_ns, end_ns, window, origin or self.origin())

    def make_stretch_trace(self, stretch: Stretch) -> Trace:
        """Return the trace of copied rows.

        Takes 0.3 us per span. May run on any thread while the session runs.
        """
        from instrument.trace.columns import device_intervals
        from instrument.trace.of_recording import NO_DETAIL
        from instrument.trace.trace import SpanViews, Trace

        mapped = RECORDER.make_reader()
        columns, lacking = stretch.snapshot.make_columns(
            stretch.end_ns,
            lambda span_id: device_intervals(mapped.read_intervals(), span_id),
            start_ns=stretch.start_ns,
        )
        window_ns, startup = stretch.end_ns - stretch.start_ns, self.startup()
        return Trace(
            origin=stretch.origin,
            start_ns=stretch.start_ns,
            end_ns=stretch.end_ns,
            spans=SpanViews(columns),
            threads=stretch.threads,
            losses={**self.account.losses(), **({NO_DETAIL: lacking} if lacking else {})},
            notes=self.account.notes(),
            window=stretch.window,
            cost=self.account.compute_cost_of_window(
                columns.count_calls(), columns.count_rows_with_device_time(), window_ns, self.measure_length_ns()
            ),
            held_from_ns=stretch.held_from_ns,
            samples=[sample for sample in mapped.read_samples(stretch.start_ns) if sample.at_ns < stretch.end_ns],
            gpus=self.gauges.gpus(),
            startup=None if any(first.start_ns < stretch.start_ns for first in startup.firsts) else startup,
            own_notes=self.account.own_notes(),
        )

    def startup(self) -> Startup:
        """Return the times of the process's start-up, even after the first spans have been overwritten."""
        by_node, tree = RECORDER.make_reader().first_calls(), RECORDER.paths()
        by_site: dict[Site, tuple[int, int]] = {}
        for node, call in by_node.items():
            by_site[tree.site(node)] = min(call, by_site.get(tree.site(node), call))
        firsts = tuple(FirstCall(site, *call) for site, call in by_site.items())
        named_first = {rule.text for rule in self.profile.functions if rule.first_request}
        request, why = choose_first_request(by_node, tree, self.sites_of_rules(named_first))
        facts = Startup(self.start_ns, clock.process_start_ns(), firsts=firsts, request=request, why=why)
        if self.profile.startup != "auto":
            return facts
        first = facts.first_request
        return replace(facts, imports=self.imports.times_by_package(None if first is None else first.start_ns))

    def sites_of_rules(self, rules: Set[str]) -> set[Site]:
        verdicts = self.selection.verdicts() if rules else ()
        return {verdict.site for verdict in verdicts if verdict.rule in rules and verdict.site is not None}

    def make_report_input(self, torch_trace: str | os.PathLike[str] | None = None) -> view.Recording:
        """Return the input of reports. The totals and the trace are made when they are first read."""
        window_ns = self.measure_length_ns()
        return view.Recording(
            self.tally,
            self.trace
            if torch_trace is None
            else lambda: chrome.join_torch_trace(self.trace(), chrome.read(torch_trace).trace),
            make_totals=_read_totals,
            make_cost=lambda: self.account.cost(window_ns),
            losses=self.account.losses(),
            notes=tuple(self.account.notes()),
            window_ns=window_ns,
            recorder="native",
            make_stats=lambda: self.account.make_stats(self.ticks.clock, self.profile.limits.ring_bytes),
            collector_ids=None if self.exporter is None else self._find_exported_ids,
            make_startup=self.startup,
        )

    def summary(
        self,
        *,
        views: Sequence[str] | None = None,
        torch_trace: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> str:
        """Return a report on everything since the start.

        `views` are the names of the views, in order. The default views are those of the profile. If the profile names
        none, the default is `brief`. The options `tracer_option` and `threads`, and a `state` of `CPU` or `GPU`, change
        this default to `events`. `options` are those of `instrument.report.view.Options`.

        Views of totals cover all calls. Views of spans cover the spans in memory. Views of spans also report the time
        from which on no span is missing.

        `torch_trace` is a trace file of `torch.profiler` from the same time. The view `kernels` shows the file's
        kernels, `memory` the allocations, and `operators` the FLOPs.

        Raises `ValueError` for an unknown view or value, and `TraceError` for a file of another process or time.

        `brief` and `cost` take about 1.3 us of CPU time per span in memory. Views of totals take at most 30 ms.
        """
        return report.format_summary(
            self._chosen_views(views, options), self.make_report_input(torch_trace), self._report_options(options)
        )

    def views(
        self, views: Sequence[str] | None = None, *, torch_trace: str | os.PathLike[str] | None = None, **options: Any
    ) -> dict[str, View]:
        """Return views as objects with numbers, by name. The options and errors are those of `summary`."""
        return report.make_views(
            self._chosen_views(views, options), self.make_report_input(torch_trace), self._report_options(options)
        )

    def _chosen_views(self, names: Sequence[str] | None, options: Mapping[str, Any]) -> Sequence[str]:
        if names is not None:
            return names
        of_profile = (self.profile.export.summary or Summary()).views
        return report.default_views(options) if of_profile == Summary().views else of_profile

    def _report_options(self, options: Mapping[str, Any]) -> view.Options:
        return view.Options.from_mapping(options, self.read_report_options())

    def read_report_options(self) -> dict[str, Any]:
        settings = self.profile.export.summary or Summary()
        return {
            "tracer_option": self.profile.tracer_option,
            "state": self.profile.state,
            "sorted_by": settings.sorted_by,
            "rows": settings.rows,
            "threads": "both" if settings.per_thread else "merged",
            "least_ns": settings.least_ns,
            "unit": settings.unit,
            "corrected": settings.corrected,
            "skip_first": settings.skip_first,
            "requests_by": self.request_grouping[0],
            "at_most": self.request_grouping[1] or None,
        }


def _read_totals(merged: bool) -> Tally:
    """Return the totals of all calls without histograms, which is faster than the tally."""
    totals = RECORDER.make_reader().read_totals()
    return totals.merge_threads() if merged else totals


def _find_caller_in_environment() -> str:
    """Return the caller's span from the environment variables, encoded as text. Return "" if there is none."""
    if not {"TRACEPARENT", "OTEL_PROPAGATORS"} & os.environ.keys():
        return ""
    from instrument.instrumentors.requests.propagation import read_caller_from_environment

    return read_caller_from_environment()


def choose_first_request(firsts: Firsts, tree: CallTree, sites: Set[Site]) -> tuple[FirstCall | None, str]:
    """Return the first request that did work, and the reason for the choice.

    The earliest call of a site in `sites` has precedence. Requests with a recorded call below them come next. Health
    probes are left out. The request is None if no earlier request was skipped.
    """
    calls = {node: FirstCall(tree.site(node), *first) for node, first in firsts.items()}
    named_call = _earliest_call(call for call in calls.values() if call.site in sites)
    if named_call is not None:
        return named_call, "named"
    plain = Startup(0, firsts=tuple(calls.values())).first_request
    above = {node: call for node in calls if (call := _find_topmost_request(node, calls, tree)) is not None}
    at_work = [node for node, call in above.items() if not _is_health_probe(call.site)]
    if at_work:
        node = min(at_work, key=lambda node: calls[node].start_ns)
        work, request = calls[node], above[node]
        if not request.start_ns <= work.start_ns <= request.start_ns + request.total_ns:
            request = FirstCall(request.site, work.start_ns, 0)
    else:
        requests = (call for call in calls.values() if call.site.kind == "request" and not _is_health_probe(call.site))
        earliest = _earliest_call(requests)
        if earliest is None:
            return None, ""
        request = earliest
    return (None, "") if plain is None or request.start_ns <= plain.start_ns else (request, "passed")


def _earliest_call(calls: Iterable[FirstCall]) -> FirstCall | None:
    return min(calls, key=lambda call: call.start_ns, default=None)


def _find_topmost_request(node: int, calls: Mapping[int, FirstCall], tree: CallTree) -> FirstCall | None:
    request = None
    at = tree.parent(node)
    while at >= 0:
        if tree.site(at).kind == "request" and at in calls:
            request = calls[at]
        at = tree.parent(at)
    return request


def _is_health_probe(site: Site) -> bool:
    return HEALTH_PROBES.search(site.name) is not None
