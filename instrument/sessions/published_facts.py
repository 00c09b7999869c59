"""The values that a session publishes to other processes, in its recording and in messages to its agent.

The values are the process's identity, its export settings, the verdicts on its rules, and counts that only the session
has. A value is written again when it has changed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.verdict import write_check_report
from instrument.profile.model import Capture, FunctionRule, Recordings
from instrument.recorder.recorder import RECORDER
from instrument.recording.spans import BLOCKED_LOOP, Gpu
from instrument.runtime import agent_socket, environment, process_context
from instrument.runtime.environment import CHECK_FOLDER
from instrument.runtime.lazy_imports import LazyModule, asdict, replace
from instrument.sessions import window_files
from instrument.sessions.recorded import Recorded
from instrument.sessions.window_files import Saving, path_templates

if TYPE_CHECKING:
    from instrument.otlp import export_facts, packing
    from instrument.otlp.export_facts import MeteredFacts
    from instrument.recorder import request_meter
    from instrument.recording import distributions
else:
    distributions = LazyModule("instrument.recording.distributions")
    request_meter = LazyModule("instrument.recorder.request_meter")
    packing = LazyModule("instrument.otlp.packing")
    export_facts = LazyModule("instrument.otlp.export_facts")

COUNTS_INTERVAL_NS = 10 * 10**9
"""The time in ns between two writes of the session's losses and costs into the recording, for metrics."""

COST_FACTOR = 20
"""The minimum pause before a costly value is written again, as a multiple of the duration of its last write."""

VERDICTS_PAUSE_NS = 10_000_000_000
"""The maximum pause in ns between two writes of what each rule has found. After a slow write, it is longer."""

MOST_NOTES, NOTE_LENGTH, MOST_MARKS = 50, 500, 200
"""The maximum numbers of published notes, of characters per note, and of names of targets and rules."""


class PublishedFacts:
    """Writes a session's values into its recording and into messages to the agent.

    `gauges()` returns the settings with which the agent reads gauges. `has_begun()` is True once the session's threads
    have started.
    """

    def __init__(
        self,
        recorded: Recorded,
        saving: Saving,
        gauges: Callable[[], Mapping[str, Any] | None],
        has_begun: Callable[[], bool],
    ) -> None:
        self._recorded, self._saving = recorded, saving
        self._gauges, self._has_begun = gauges, has_begun
        self._is_member = bool(os.environ.get(agent_socket.VARIABLE))
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        self.is_scraped = False
        """True if this process reads its own recording only to answer scrapes."""
        self._gpus: Sequence[Gpu] = ()
        self._notes: tuple[str, ...] = ()
        self._own_notes: Mapping[str, Any] = {}
        self._resource: dict[str, object] = {}
        self._verdicts_until_ns = self._books_ns = self._marks_until_ns = 0
        self._books: MeteredFacts | None = None

    def publish(self) -> None:
        RECORDER.write_facts(self.gather_facts())

    def gather_facts(self) -> Mapping[str, Any]:
        recorded, profile = self._recorded, self._recorded.profile
        exporter = recorded.exporter
        facts: dict[str, Any] = {"origin": asdict(recorded.origin()), "gpus": [asdict(gpu) for gpu in self._gpus]}
        facts["notes"], facts["own_notes"] = self._notes, self._own_notes
        is_read = self.can_have_agent() and self.wants_agent  # and not only once a scrape has asked for it
        facts["is_awaited"] = exporter is not None or is_read
        if exporter is not None or self.has_metrics_reader:
            capture, spans_per_request = profile.capture, profile.limits.spans_per_request
            if exporter is None and capture.to is None and profile.export.parquet is None:
                capture = Capture(sample=0.0, errors=False)
                if not any(rule.key or rule.batch for rule in profile.functions):
                    spans_per_request = 1  # no metric needs the spans of a request
            resource = {} if exporter is None else exporter.resource()
            settings = recorded.id_generator(), resource, capture, spans_per_request, self._make_metered_facts()
            facts["export"] = export_facts.encode_facts(export_facts.ExportFacts(*settings))
        return facts

    def publish_gpus(self, gpus: Sequence[Gpu]) -> None:
        if self._gpus != gpus:
            self._gpus = gpus
            self.publish()

    def publish_resource(self) -> None:
        """Write the resource attributes of the service's OpenTelemetry SDK, so that our exports have the same
        attributes."""
        if self._recorded.exporter is None:
            return
        resource = dict(self._recorded.exporter.resource())
        if resource != self._resource:
            self._resource = resource
            self.publish()

    def publish_context(self) -> None:
        """Publish this process's resource attributes in its memory, where eBPF profilers find them (OTEP 4719)."""
        problem = process_context.publish_context(packing.pack_resource(self._recorded.resource()))
        if problem:
            why = f"process context: {problem}; profilers name this process on their own"
            self._recorded.account.complain(why, log=False)

    # ---------------------------------------------------------------- the agent's part

    def can_have_agent(self) -> bool:
        return self._is_member and self._recorded.profile.agent != "off" and RECORDER.memory_fd >= 0

    @property
    def wants_agent(self) -> bool:
        profile = self._recorded.profile
        return self.needs_agent_to_export or profile.export.parquet is not None

    @property
    def needs_agent_to_export(self) -> bool:
        profile = self._recorded.profile
        return profile.export.prometheus is not None or profile.capture.to is not None

    def export_settings(self) -> Mapping[str, Any] | None:
        profile = self._recorded.profile
        otlp, scraped, to = profile.export.otlp, profile.export.prometheus, profile.capture.to
        parquet = self._recorded.dataset_settings()
        if not (self.has_metrics_reader and self.can_have_agent()):
            return None
        has_otlp = otlp is not None and self._recorded.handover.has_agent
        return {
            "otlp": export_facts.encode_collector_settings(otlp) if otlp is not None and has_otlp else None,
            "prometheus": None if scraped is None else scraped.listen,
            "captures": None if to is None else str(environment.working_folder() / to),
            "parquet": None if parquet is None else asdict(parquet),
        }

    # ---------------------------------------------------------------- metrics

    @property
    def has_metrics_reader(self) -> bool:
        if self._recorded.exporter is not None or self.is_scraped:
            return True
        if self._recorded.profile.export.parquet is not None:
            return True
        return self.can_have_agent() and (self.asks_for_metrics or self.wants_agent)

    @property
    def asks_for_metrics(self) -> bool:
        profile = self._recorded.profile
        return bool(profile.requests) or any(rule.metrics or rule.gen_ai or rule.batch for rule in profile.functions)

    def _make_metered_facts(self) -> MeteredFacts:
        recorded, profile = self._recorded, self._recorded.profile
        return replace(
            self._books or export_facts.MeteredFacts(0),
            start_ns=recorded.start_ns,
            asks=self.asks_for_metrics or self.is_scraped,
            requests=bool(profile.requests),
            routes=tuple(route for rule in profile.requests for route in rule.gen_ai),
            by=recorded.request_grouping[0],
            at_most=recorded.request_grouping[1],
            watches=any(rule.gen_ai or rule.batch for rule in profile.functions),
            environ=environment.metrics_variables(),
        )

    def publish_marks(self) -> None:
        """Publish the identifiers of functions whose calls become metrics. Do nothing soon after the last time."""
        began_ns = time.monotonic_ns()
        if not self.has_metrics_reader or began_ns < self._marks_until_ns:
            return
        if any(rule.metrics or rule.gen_ai for rule in self._recorded.profile.functions):
            self._publish_metered_facts(self._books or export_facts.MeteredFacts(0))
            self._marks_until_ns = began_ns + COST_FACTOR * (time.monotonic_ns() - began_ns)

    def publish_losses_and_costs(self, *, at_once: bool = False) -> None:
        now_ns = time.monotonic_ns()
        if not self.has_metrics_reader:
            return
        if not (at_once or now_ns - self._books_ns >= COUNTS_INTERVAL_NS):
            self.publish_marks()
            return
        self._books_ns = now_ns
        recorded = self._recorded
        probes_ns = RECORDER.calls * recorded.account.compute_call_cost_ns()
        costs_ns = {"probes": probes_ns, **recorded.account.read_cpu_ns()}
        losses, queued = recorded.account.losses(), request_meter.count_queued_tasks()
        self._publish_metered_facts(export_facts.MeteredFacts(0, losses=losses, costs_ns=costs_ns, queued=queued))

    def _publish_metered_facts(self, books: MeteredFacts) -> None:
        calls = self._list_function_marks(lambda rule: rule.metrics)
        streams = self._list_function_marks(lambda rule: rule.gen_ai)
        if self._recorded.profile.requests:
            calls = (*calls, request_meter.make_site_id(BLOCKED_LOOP))
        before, self._books = self._books, replace(books, calls=calls, streams=streams)
        if self._books != before:
            self.publish()

    def _list_function_marks(self, is_wanted: Callable[[FunctionRule], bool]) -> tuple[str, ...]:
        rules = {rule.text for rule in self._recorded.profile.functions if is_wanted(rule)}
        sites = self._recorded.sites_of_rules(rules)
        return tuple(sorted(set(map(request_meter.make_site_id, sites))))[: distributions.SERIES_LIMIT] if sites else ()

    # ---------------------------------------------------------------- verdicts

    def shortened_notes(self, *, of_all: bool = False) -> tuple[str, ...]:
        return tuple(note[:NOTE_LENGTH] for note in self._recorded.account.notes(of_all=of_all)[:MOST_NOTES])

    def shortened_own_notes(self, *, of_all: bool = False) -> Mapping[str, Any]:
        """Return the rules and targets without effect in this process, cut to fit into one message."""
        own_notes = self._recorded.account.own_notes(of_all=of_all)
        waiting = tuple((mark, note[:NOTE_LENGTH]) for mark, note in own_notes.waiting[:MOST_NOTES])
        uncalled = own_notes.uncalled if len(own_notes.uncalled) <= MOST_MARKS else ()
        return asdict(replace(own_notes, at_work=own_notes.at_work[:MOST_MARKS], waiting=waiting, uncalled=uncalled))

    def publish_verdicts(self, *, at_once: bool = False) -> None:
        """Publish the effect of each profile rule in this process, also for `instrument check`.

        Without `at_once`, a call soon after the last one does nothing. This limits the cost to 5 percent of the time.
        """
        began_ns, recorded = time.monotonic_ns(), self._recorded
        if began_ns < self._verdicts_until_ns and not at_once:
            return
        if folder := os.environ.get(CHECK_FOLDER):
            write_check_report(folder, RECORDER.calls, recorded.profile, recorded.account.verdicts(of_all=False))
        notes = self.shortened_notes()
        if notes != self._notes:
            self._notes, self._own_notes = notes, self.shortened_own_notes()
            self.publish()
        rest_ns = min((began_ns - recorded.start_ns) // 10, VERDICTS_PAUSE_NS)
        self._verdicts_until_ns = began_ns + max(rest_ns, COST_FACTOR * (time.monotonic_ns() - began_ns))

    # ---------------------------------------------------------------- messages to the agent

    def make_join_message(self) -> dict[str, Any]:
        session, saving = self._recorded, self._saving
        recording = session.profile.export.recording or Recordings()
        costs_ns = session.account.costs.median_ns_by_shape()
        summary, report = session.profile.export.summary, None
        if summary is not None and summary.to in window_files.STREAMS:
            report = {"views": list(summary.views), "options": session.read_report_options()}
        return {
            "run": saving.run,
            "parent": os.getppid(),
            "memory": RECORDER.memory_path,
            "service": session.profile.service,
            "profile": session.profile.source,
            "digest": session.digest,
            "generation": session.generation,
            "recorder": "native",
            "call_ns": costs_ns.get("call", 0.0),
            "request_ns": costs_ns.get("request", 0.0),
            "is_first": "INSTRUMENT_RUN_PID" in os.environ and environment.is_first_process_of_run(),
            "records": self._has_begun(),
            "folder": str(saving.folder),
            "captures": str(saving.folder / saving.destination().make_path(recording.path)),
            "files": [
                str(saving.folder / saving.destination().make_path(path))
                for path in path_templates(session.profile.export)
            ],
            "disk_bytes": session.profile.limits.disk_bytes,
            "report": report,
            "asks_for_requests": bool(session.profile.requests),
            "export": self.export_settings(),
            "gauges": self._gauges(),
        }

    def make_goodbye_message(self) -> dict[str, Any]:
        timing = self._recorded.timing
        return {
            "calls": RECORDER.calls,
            "is_timed": timing is not None and timing.timer is not None,
            "losses": dict(self._recorded.account.losses()),
            "notes": self.shortened_notes(of_all=environment.is_first_process_of_run()),
            "own_notes": self.shortened_own_notes(of_all=environment.is_first_process_of_run()),
            "unmet": self._recorded.account.describe_unrecorded_requests(),
            "requests": self._recorded.selection.has_begun_request(),
            "cost": asdict(self._recorded.cost()),
            "files": [str(path) for path in self._saving.newest],
        }

    def save_recording(self, path: str) -> None:
        window_files.save_trace(
            path, replace(self._recorded.trace(), cost=self._recorded.cost()), self._recorded.tally()
        )
