"""What a session records, as it can be read at any time: its parts, and the traces, totals and reports that they make.

`Session` is one of these that lives: it begins, goes over to other profiles, and ends.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument import chrome, clock
from instrument.device.gauges import Gauges
from instrument.device.nvtx import Ranges
from instrument.device.timing import Timing
from instrument.instrumentors.import_times import ImportTimes
from instrument.instrumentors.probe_cost import Costs
from instrument.instrumentors.selection import Selection
from instrument.instrumentors.verdict import CHECK_FOLDER, Verdict, report_to_check
from instrument.profile.model import EVERYTHING, Capture, Profile, Summary
from instrument.recorder.governor import Budget
from instrument.recorder.meter import mark_of, queued_tasks
from instrument.recorder.recorder import RECORDER, Ticks
from instrument.recording.distributions import SERIES_LIMIT
from instrument.recording.memory_layout import INTERVAL_SHARE
from instrument.recording.remote_parents import REMOTE, RemoteParent, noted, remote_of
from instrument.recording.rows import REQUEST_BIT, is_sampled
from instrument.recording.spans import UNTIMED, Cost, FirstCall, Gpu, Origin, Sample, Site, Span, Startup
from instrument.recording.tally import Tally
from instrument.runtime import environment
from instrument.runtime.cheap_start import LazyModule
from instrument.runtime.faults import FAULTS
from instrument.sessions import files
from instrument.sessions.account import Account
from instrument.sessions.first_request import taken_for_first
from instrument.sessions.handover import Handover
from instrument.sessions.own_export import OwnExport
from instrument.sessions.step_spans import Loop
from instrument.sessions.stretch import TakenStretch, held_now
from instrument.sessions.window_reader import WindowReader

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp import export_facts
    from instrument.otlp.export_facts import MeteredFacts
    from instrument.otlp.span_queue import Source
    from instrument.report import section, view
    from instrument.report import summary as report
    from instrument.report.section import View
    from instrument.trace.trace import Trace
else:
    otlp = LazyModule("instrument.otlp")
    export_facts = LazyModule("instrument.otlp.export_facts")
    section, view = LazyModule("instrument.report.section"), LazyModule("instrument.report.view")
    report = LazyModule("instrument.report.summary")

BOOKS_NS = 10 * 10**9
"""Nanoseconds after which the recording gets the facts on metrics that the session alone knows."""

MARKS_SHARE = 20
"""What takes a time to be told as modules are imported is not told again within so many times as long."""

VERDICTS_EVERY_NS = 10_000_000_000
"""Nanoseconds after which the verdicts on the rules are said again, at the longest."""

NOTES_TOLD, NOTE_TOLD = 50, 500
"""The most notes that other processes get, and the most characters of each."""


class Recorded:
    """What one profile has recorded in one process. All methods may be called from any thread."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.generation = 1
        self.digest = profile.digest
        self._ticks = Ticks(RECORDER)
        self._ids: otlp.Ids | None = None

        self.selection = Selection(profile)
        self.selection.noted = lambda: FAULTS.attempt("marks of metrics", self._tell_marks)
        # To ask for the current span is to begin recording on a thread: not where nothing has been recorded.
        self._imports = ImportTimes(lambda: RECORDER.rings() and RECORDER.current_id())
        self._ranges = Ranges(RECORDER)
        self._gauges = Gauges(profile.device, self._keep_samples, partial(RECORDER.room_for, "samples"))
        self._gpus_told: Sequence[Gpu] = ()
        self._timing: Timing | None = None
        if profile.device.cuda != "off" and profile.state != "CPU":
            interval_bytes = profile.limits.ring_bytes // INTERVAL_SHARE
            self._timing = Timing(interval_bytes, self._ranges, holds_gil=profile.device.gil == "hold")
        self._exporter: otlp.Exporter | None = None
        self._own: OwnExport | None = None
        if profile.export.otlp is not None:
            self._exporter = otlp.Exporter(profile.export.otlp, self.origin(), RECORDER.threads, self._note_sent)
            self._own = OwnExport(self._exporter)
        self._scrape: OwnExport | None = None
        """The reader of the recording for scrapes alone, where nothing else in this run reads it."""
        self.handover = Handover(self._exporter, lambda: RECORDER.memory_fd, self._own)
        self._costs = Costs(RECORDER)
        self._budget = Budget(RECORDER, self._costs.usual_ns, lambda: self._costs.passed_ns, self.selection.detach)
        self._windows = WindowReader(RECORDER, self.selection, self.origin)
        self.account = Account(
            recorder=RECORDER,
            selection=self.selection,
            windows=self._windows,
            costs=self._costs,
            budget=self._budget,
            gauges=self._gauges,
            ranges=self._ranges,
            imports=self._imports,
            timing=self._timing,
            exporter=self._exporter,
            handover=self.handover,
            tells_waiting=profile.source != EVERYTHING.source,
        )
        self._begin()

    def _begin(self) -> None:
        self._notes_told: tuple[str, ...] = ()
        self._verdicts_until_ns = 0
        self._requests_told = 0
        self.start_ns = time.monotonic_ns()
        self.end_ns: int | None = None
        self.loop = Loop()
        self._windows.begin(self.profile, self.start_ns)
        self._books_ns, self._marks_until_ns = 0, 0
        self._books_told: MeteredFacts | None = None

    # ---------------------------------------------------------------- while it records

    def _has_agent(self) -> bool:
        """Return True where an agent reads what is recorded here, if a reader asks for it."""
        return False

    def _note_sent(self, source: Source) -> None:
        """Note what has been sent of a source. By the thread that sends."""
        if self._own is not None:
            self._own.note_sent(source)

    def _keep_samples(self, samples: Sequence[Sample], gpus: Sequence[Gpu]) -> None:
        if self._gpus_told != gpus:
            self._gpus_told = gpus
            RECORDER.tell(self._facts())

    @property
    def _requests_by(self) -> tuple[str, int]:
        """The attribute that groups requests, "" for none, and the most values of it with a group of their own."""
        return next(((rule.by, rule.at_most) for rule in self.profile.requests), ("", 0))

    def _generators(self) -> set[str]:
        """The marks of what the rules with `gen_ai` are recorded as."""
        return set(map(mark_of, self._sites_of({rule.text for rule in self.profile.functions if rule.gen_ai})))

    def _metered(self) -> set[str]:
        """The marks of what the rules with `metrics` are recorded as."""
        return set(map(mark_of, self._sites_of({rule.text for rule in self.profile.functions if rule.metrics})))

    def _costs_ns(self) -> Mapping[str, float]:
        """What the instrumentation has cost so far, by what for."""
        cost = self.cost()
        return {"probes": cost.calls * cost.per_call_ns, **self.account.threads_ns()}

    # ---------------------------------------------------------------- what it tells

    def ids(self) -> otlp.Ids:
        """What the spans of this session are called at collectors."""
        if self._exporter is not None:
            return self._exporter.ids
        if self._ids is None:
            self._ids = otlp.Ids()
        return self._ids

    def resource(self) -> dict[str, object]:
        """What this process is to collectors and profilers, as attributes of OpenTelemetry."""
        if self._exporter is not None:
            return self._exporter.resource()
        given, provider = otlp.given_attributes(), otlp.provider_attributes()
        return otlp.resource_attributes(self.origin(), self.ids().instance, given, provider)

    def _trace_of(self, span_id: int, root_id: int, told: Any) -> tuple[int, int, int, str]:
        """Trace id, span id, flags and state of a span: those of the caller's trace, or of our own, by the sample."""
        ids, remote = self.ids(), remote_of(told)
        if remote is not None:
            return remote.trace_id, ids.span_id(span_id), remote.flags, remote.state
        own = RemoteParent(ids.trace_id(root_id), 0, int(is_sampled(root_id, self.profile.capture.sample)))
        if ids.run:  # whoever exports this is to leave it its trace, which others know now
            annotate = RECORDER.annotate_request if root_id & REQUEST_BIT else RECORDER.annotate_innermost
            annotate({REMOTE: noted(own)})
        return own.trace_id, ids.span_id(span_id), own.flags, ""

    def _ids_at_collector(self, span: Span, key: str) -> tuple[int, int]:
        """Trace id and span id of a request that is known by a key first, "" for none."""
        from instrument.trace.grafted import trace_id_of

        trace_id, span_id = self.ids().of(span)
        run = self.ids().run if key and span.remote is None else ""
        return trace_id_of(run, key) if run else trace_id, span_id

    @property
    def times_devices(self) -> bool:
        """Whether spans have had their times on a device taken."""
        return self._timing is not None and self._timing.timer is not None

    def origin(self) -> Origin:
        """Which process this is, with a fresh pair of monotonic and wall clock."""
        monotonic_ns, realtime_ns = clock.pair()
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
            wall_error_ns=clock.wall_error_ns(),
            run=files.run_of_keys(),
            start_ticks=clock.start_ticks(clock.STAT),
        )

    def _facts(self) -> Mapping[str, Any]:
        """What others are to know who read this process's recording."""
        facts: dict[str, Any] = {"origin": asdict(self.origin()), "gpus": [asdict(gpu) for gpu in self._gpus_told]}
        facts["notes"] = self._notes_told
        is_read = self._has_agent() and self._wants_agent  # and not only once a scrape has asked for it
        facts["is_awaited"] = self._exporter is not None or is_read
        if self._exporter is not None:
            of_profile = self.profile.capture, self.profile.limits.spans_per_request
            facts["export"] = export_facts.told(self.ids(), self._exporter.resource(), *of_profile, self._metered_facts)
        elif self._is_metered_elsewhere:
            capture, spans_per_request = Capture(sample=0.0, errors=False), 1
            if self.profile.capture.to is not None:
                capture, spans_per_request = self.profile.capture, self.profile.limits.spans_per_request
            facts["export"] = export_facts.told(self.ids(), {}, capture, spans_per_request, self._metered_facts)
        return facts

    @property
    def _is_metered_elsewhere(self) -> bool:
        """True where metrics come from the recording, read back here or by an agent, for scrapes at least."""
        if self._exporter is not None or self._scrape is not None:
            return True
        return self._has_agent() and (self._asks_for_metrics or self._wants_agent)

    @property
    def _wants_agent(self) -> bool:
        """True where the profile asks for what only an agent does: answer scrapes, or write what is kept."""
        return self.profile.export.prometheus is not None or self.profile.capture.to is not None

    @property
    def _metered_facts(self) -> MeteredFacts:
        """The facts on this process's metrics, and the state of the books that was reported last."""
        return replace(
            self._books_told or export_facts.MeteredFacts(0),
            start_ns=self.start_ns,
            asks=self._asks_for_metrics or self._scrape is not None,
            requests=bool(self.profile.requests),
            routes=tuple(route for rule in self.profile.requests for route in rule.gen_ai),
            by=self._requests_by[0],
            at_most=self._requests_by[1],
            watches=any(rule.gen_ai or rule.batch for rule in self.profile.functions),
            environ=environment.asked_of_metrics(),
        )

    @property
    def _asks_for_metrics(self) -> bool:
        """Whether the profile asks for any beside gauges."""
        return bool(self.profile.requests) or any(
            rule.metrics or rule.gen_ai or rule.batch for rule in self.profile.functions
        )

    def _tell_marks(self) -> None:
        """Where the metrics are told by the recording, tell there which functions they are of: for a 20th of the time.

        Called as modules are imported, of which there may be hundreds, and now and then.
        """
        began_ns = time.monotonic_ns()
        if not self._is_metered_elsewhere or began_ns < self._marks_until_ns:
            return
        if any(rule.metrics or rule.gen_ai for rule in self.profile.functions):
            self._tell_metered(self._books_told or export_facts.MeteredFacts(0))
            self._marks_until_ns = began_ns + MARKS_SHARE * (time.monotonic_ns() - began_ns)

    def _tell_books(self, *, at_once: bool = False) -> None:
        """Where the metrics are told by the recording, tell there now and then what only the session knows of them."""
        now_ns = time.monotonic_ns()
        if not (at_once or now_ns - self._books_ns >= BOOKS_NS):
            self._tell_marks()
            return
        self._books_ns = now_ns
        losses, costs_ns = self.losses(), self._costs_ns()
        self._tell_metered(export_facts.MeteredFacts(0, losses=losses, costs_ns=costs_ns, queued=queued_tasks()))

    def _tell_metered(self, books: MeteredFacts) -> None:
        calls, streams = (tuple(sorted(marks))[:SERIES_LIMIT] for marks in (self._metered(), self._generators()))
        before, self._books_told = self._books_told, replace(books, calls=calls, streams=streams)
        if self._books_told != before:
            RECORDER.tell(self._facts())

    def export_settings(self) -> Mapping[str, Any] | None:
        """Return what the run's agent needs to export what this process records. None for nothing."""
        otlp, scraped = self.profile.export.otlp, self.profile.export.prometheus
        if not (self._is_metered_elsewhere and self._has_agent()):
            return None
        return {
            "otlp": export_facts.settings_told(otlp) if otlp is not None and self.handover.has_agent else None,
            "prometheus": None if scraped is None else scraped.listen,
            "captures": None if (to := self.profile.capture.to) is None else str(files.working_folder() / to),
        }

    def cost(self) -> Cost:
        """What the instrumentation has cost so far: the spans of each shape of probe at its cost on this machine.

        A generator counts as one step, whatever it made. Device times add what a pair of events costs on this device.
        """
        return self.account.cost(self._lasted_ns())

    def _lasted_ns(self) -> int:
        return (self.end_ns or time.monotonic_ns()) - self.start_ns

    def losses(self) -> Mapping[str, int]:
        """Everything that was recorded and not kept, by reason."""
        return self.account.losses()

    def notes(self) -> list[str]:
        """Everything that could not be observed, and what went wrong, in sentences."""
        return self.account.notes()

    def notes_in_short(self, *, of_all: bool = False) -> tuple[str, ...]:
        """Return the notes as other processes get them: the first 50, each cut at 500 characters."""
        return tuple(note[:NOTE_TOLD] for note in self.account.notes(of_all=of_all)[:NOTES_TOLD])

    def tell_verdicts(self) -> None:
        """Say in the recording, and to `instrument check`, what became of the rules, so that it outlives this process.

        It is said for a 20th of the time, each second at first, each ten later on.
        """
        began_ns = time.monotonic_ns()
        if began_ns < self._verdicts_until_ns:
            return
        if asked := os.environ.get(CHECK_FOLDER):
            report_to_check(asked, RECORDER.calls, self.profile, self.account.verdicts(of_all=False))
        notes = self.notes_in_short()
        if notes != self._notes_told:
            self._notes_told = notes
            RECORDER.tell(self._facts())
        rest_ns = min((began_ns - self.start_ns) // 10, VERDICTS_EVERY_NS)
        self._verdicts_until_ns = began_ns + max(rest_ns, MARKS_SHARE * (time.monotonic_ns() - began_ns))

    def verdicts(self) -> list[Verdict]:
        """What became of every rule and target up to now, with the calls of each target."""
        return self.account.verdicts()

    def tally(self) -> Tally:
        """Exact totals of all calls up to now, with what their probes cost."""
        return self.charged(RECORDER.tally())

    def charged(self, tally: Tally) -> Tally:
        tally.charge(lambda site: self._costs.of(site).outside_ns)
        return tally

    def trace(
        self, start_ns: int | None = None, end_ns: int | None = None, window: int = 0, origin: Origin | None = None
    ) -> Trace:
        """The newest spans that the rings still hold, as they lie in the window; open ones are clipped and marked.

        Steps of the outermost `Profiler` that counts any are spans, too, and where nobody says what a step is and the
        profile wants the phases of training and its loaders, the steps that these show. `origin` is that of the
        window's end, where it has ended before now.
        """
        from instrument.sessions.step_columns import steps_of_batches, with_steps

        first = self.start_ns if start_ns is None else start_ns
        last = (self.end_ns or time.monotonic_ns()) if end_ns is None else end_ns
        trace = self.trace_of(self.take(first, last, window, origin))
        if self._finds_steps:
            trace = with_steps(trace, steps_of_batches(trace.columns))
        else:
            trace = with_steps(trace, self.loop.within(max(first, trace.held_from_ns), last))
        if start_ns is None and end_ns is None:
            trace.cost = self.account.cost(last - first)  # of the very time that the trace says to be its own
        return trace

    @property
    def _finds_steps(self) -> bool:
        """Whether the steps of a training loop are looked for in what is recorded."""
        profile = self.profile
        is_wanted = profile.phases == profile.loaders == "auto" and profile.schedule is None
        return is_wanted and self.loop.is_unused

    def take(self, start_ns: int, end_ns: int, window: int = 0, origin: Origin | None = None) -> TakenStretch:
        """What the rings hold of that time, at 10 ns a span; `trace_of` makes a trace of it later."""
        return TakenStretch.of(RECORDER, start_ns, end_ns, window, origin or self.origin())

    def trace_of(self, stretch: TakenStretch) -> Trace:
        """The trace of what was taken, with the device times that have come by now, and the cost of these spans.

        0.3 us a span; while the session runs, on any thread. Objects of the spans are made for whoever looks at them.
        """
        from instrument.trace.trace import SpanViews, Trace

        columns, window_ns = stretch.columns(self._timing), stretch.end_ns - stretch.start_ns
        return Trace(
            origin=stretch.origin,
            start_ns=stretch.start_ns,
            end_ns=stretch.end_ns,
            spans=SpanViews(columns),
            threads=stretch.threads,
            losses=self.losses(),
            notes=self.notes(),
            window=stretch.window,
            cost=self.account.cost_of(columns.calls(), columns.timed(), window_ns, self._lasted_ns()),
            held_from_ns=stretch.held_from_ns(),
            samples=self._gauges.samples(stretch.start_ns, stretch.end_ns),
            gpus=self._gauges.gpus(),
            startup=self._startup_in(stretch),
            own_notes=self.account.own_notes(),
        )

    def _startup_in(self, stretch: TakenStretch) -> Startup | None:
        """How the process came to serve, None where that began before the stretch: its calls do not tell of it."""
        found = self.startup()
        return None if any(first.start_ns < stretch.start_ns for first in found.firsts) else found

    def _held(self) -> view.HeldSpans | None:
        """What there is to say of the spans that the rings hold now, None where only they themselves tell."""
        if self.end_ns is not None or self._finds_steps:
            return None
        held, from_ns = held_now(RECORDER, self.start_ns)
        first_ns = max(from_ns, self.start_ns)
        timing = self._timing if held.asking else None
        intervals = {} if timing is None else timing.intervals.of(set(held.asking))
        until_ns = max(time.monotonic_ns(), first_ns)
        unanswered = Counter(its[0].label for its in intervals.values() if all(one.label in UNTIMED for one in its))
        unanswered[section.NO_EVENTS] += len(held.asking) - len(intervals)
        return view.HeldSpans(
            count=held.spans + len(self.loop.within(first_ns, until_ns)),
            complete=first_ns == self.start_ns,
            since_ns=first_ns - self.start_ns,
            until_ns=until_ns - self.start_ns,
            asked=len(held.asking),
            unanswered=+unanswered,
        )

    def startup(self) -> Startup:
        """How the process came to serve: kept for ever, whatever the rings have overwritten since."""
        firsts = tuple(FirstCall(site, *first) for site, first in RECORDER.firsts().items())
        request, why = taken_for_first(RECORDER.firsts_by_node(), RECORDER.paths(), self._named_first())
        facts = Startup(self.start_ns, clock.process_start_ns(), firsts=firsts, request=request, why=why)
        if self.profile.startup != "auto":
            return facts
        first = facts.first_request
        return replace(facts, imports=self._imports.packages(None if first is None else first.start_ns))

    def _named_first(self) -> set[Site]:
        """What the rules with `first_request` are recorded as."""
        return self._sites_of({rule.text for rule in self.profile.functions if rule.first_request})

    def _sites_of(self, rules: Set[str]) -> set[Site]:
        """What the targets of these rules are recorded as."""
        found = self.selection.verdicts() if rules else ()
        return {verdict.site for verdict in found if verdict.rule in rules and verdict.site is not None}

    def recording(self, beside: str | os.PathLike[str] | None = None) -> view.Recording:
        """Return what reports are made of: a tally and a trace. Each is taken when it is first read."""
        window_ns = self._lasted_ns()
        return view.Recording(
            self.tally,
            self.trace if beside is None else lambda: chrome.join(self.trace(), chrome.read(beside).trace),
            make_lines=lambda merged: RECORDER.lines(merged=merged),
            make_held=self._held,
            make_cost=lambda: self.account.cost(window_ns),
            losses=self.losses(),
            notes=tuple(self.notes()),
            window_ns=window_ns,
            recorder="native",
            make_upkeep=lambda: self.account.upkeep(self._ticks.clock, self.profile.limits.ring_bytes),
            collector_ids=None if self._exporter is None else self._ids_at_collector,
            make_startup=self.startup,
        )

    def summary(
        self,
        *,
        views: Sequence[str] | None = None,
        beside: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> str:
        """The views, in the order asked, of everything since the start; what is left out comes from the profile.

        Where neither names any, it is `brief`, one screen, or with `tracer_option` or `threads` given `events`.
        `options` are those of `instrument.report.view.Options`. Views that are made from the tally are exact for all
        calls; those of spans are of the ones that the rings still hold, and say from when on these are complete.
        `brief` takes some 1.3 us of processor time for each span that is held, a second where rings of 64 MiB are full.
        Those of the tally, and that of costs, with threads merged and some tens of `rows`, take some 5 ms of processor
        time for 1,500 call paths and 30 ms for as many as there may be (16,384), whatever the uptime; the first asks
        each path and site what it is, 1 us each, unless a thread of ours has done so before. A block for each thread
        adds some 30 us for each of its rows, and 1 us for each of its call paths. `beside` is a trace file of
        `torch.profiler`, recorded meanwhile, whose kernels and allocations the views `kernels` and `memory` are then
        of, and `operators` tells FLOPs by the shapes in it. Raises `ValueError` for a view or a value that there is
        not, and `TraceError` for a file that is not of this process and time.
        """
        return report.summary(self._views(views, options), self.recording(beside), self._options(options))

    def views(
        self, views: Sequence[str] | None = None, *, beside: str | os.PathLike[str] | None = None, **options: Any
    ) -> dict[str, View]:
        """The numbers of the same views, by name, as objects. Options and errors as for `summary`."""
        return report.made(self._views(views, options), self.recording(beside), self._options(options))

    def _views(self, asked: Sequence[str] | None, options: Mapping[str, Any]) -> Sequence[str]:
        if asked is not None:
            return asked
        of_profile = (self.profile.export.summary or Summary()).views
        return report.views_for(options) if of_profile == Summary().views else of_profile

    def _options(self, asked: Mapping[str, Any]) -> view.Options:
        of_profile = self._options_of_profile()
        return view.Options.of({**of_profile, **{name: value for name, value in asked.items() if value is not None}})

    def _options_of_profile(self) -> dict[str, Any]:
        wanted = self.profile.export.summary or Summary()
        return {
            "tracer_option": self.profile.tracer_option,
            "state": self.profile.state,
            "sorted_by": wanted.sorted_by,
            "rows": wanted.rows,
            "threads": "both" if wanted.per_thread else "merged",
            "least_ns": wanted.least_ns,
            "unit": wanted.unit,
            "corrected": wanted.corrected,
            "skip_first": wanted.skip_first,
            "requests_by": self._requests_by[0],
            "at_most": self._requests_by[1] or None,
        }

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Write what is held now, as a recording (`.npz`) or a Chrome trace; nothing is reset. Raises `TraceError`."""
        return files.save(path, self.trace(), self.tally())

    def report_of_run(self) -> dict[str, Any] | None:
        """Which views the run's report has, and their options; None where this process has no part in one."""
        wanted = self.profile.export.summary
        if wanted is None or wanted.to not in files.STREAMS:
            return None
        return {"views": list(wanted.views), "options": self._options_of_profile()}
