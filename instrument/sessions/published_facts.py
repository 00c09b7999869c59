"""The facts that a session writes into its recording for readers: the process, its export settings, and its counts.

They are written after a change. Costly facts are written at most in a fixed share of the time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instrument.instrumentors.verdict import marks_of, write_check_report
from instrument.profile.model import Capture, FunctionRule
from instrument.recorder.recorder import RECORDER
from instrument.recording import board
from instrument.recording.spans import BLOCKED_LOOP, Gpu
from instrument.runtime import environment, process_context
from instrument.runtime.cheap_start import LazyModule, asdict, replace
from instrument.runtime.environment import CHECK_FOLDER
from instrument.sessions import files
from instrument.sessions.recorded import Recorded

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp import export_facts
    from instrument.otlp.export_facts import MeteredFacts
    from instrument.recorder import meter
    from instrument.recording import distributions
else:
    distributions = LazyModule("instrument.recording.distributions")
    meter = LazyModule("instrument.recorder.meter")
    otlp = LazyModule("instrument.otlp")
    export_facts = LazyModule("instrument.otlp.export_facts")

BOOKS_NS = 10 * 10**9
"""Nanoseconds between two writes of the session's losses and costs into the recording, for its metrics."""

SHARE = 20
"""The minimum interval between two publications of a fact, as a multiple of the time of one publication."""

VERDICTS_EVERY_NS = 10_000_000_000
"""The maximum number of nanoseconds between two publications of the verdicts on the rules."""

MOST_NOTES, NOTE_LENGTH, MOST_MARKS = 50, 500, 200
"""The most notes for other processes, the most characters of a note, and the most marks of rules and targets."""


class PublishedFacts:
    """Writes the facts of a session into its recording. `is_member()` is True if the process has an agent's path."""

    def __init__(self, recorded: Recorded, is_member: Callable[[], bool]) -> None:
        self._recorded = recorded
        self._is_member = is_member
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Begin with nothing published, for a new session or a forked child."""
        self.is_scraped = False
        """True if the process reads its own recording for scrapes alone."""
        self._gpus: Sequence[Gpu] = ()
        self._notes: tuple[str, ...] = ()
        self._own_notes: Mapping[str, Any] = {}
        self._resource: dict[str, object] = {}
        self._verdicts_until_ns = self._books_ns = self._marks_until_ns = 0
        self._books: MeteredFacts | None = None

    def publish(self) -> None:
        """Write the facts as they are now."""
        RECORDER.write_facts(self.read())

    def read(self) -> Mapping[str, Any]:
        """Return the facts as they are now."""
        recorded, profile = self._recorded, self._recorded.profile
        exporter = recorded.exporter
        facts: dict[str, Any] = {"origin": asdict(recorded.origin()), "gpus": [asdict(gpu) for gpu in self._gpus]}
        facts["notes"], facts["own_notes"] = self._notes, self._own_notes
        is_read = self.has_agent() and self.wants_agent  # and not only once a scrape has asked for it
        facts["is_awaited"] = exporter is not None or is_read
        if exporter is not None or self.is_metered_elsewhere:
            capture, spans_per_request = profile.capture, profile.limits.spans_per_request
            if exporter is None and capture.to is None and profile.export.parquet is None:
                capture = Capture(sample=0.0, errors=False)
                if not any(rule.key or rule.batch for rule in profile.functions):
                    spans_per_request = 1  # no metric needs the spans of a request
            resource = {} if exporter is None else exporter.resource()
            facts["export"] = export_facts.facts_as_json(
                recorded.ids(), resource, capture, spans_per_request, self._metered_facts()
            )
        return facts

    def keep_gpus(self, gpus: Sequence[Gpu]) -> None:
        """Publish the GPUs whose gauges are read."""
        if self._gpus != gpus:
            self._gpus = gpus
            self.publish()

    def publish_resource(self) -> None:
        """Publish the resource of the service's own tracer provider, so that both exports have the same resource."""
        if self._recorded.exporter is None:
            return
        resource = dict(self._recorded.exporter.resource())
        if resource != self._resource:
            self._resource = resource
            self.publish()

    def publish_context(self) -> None:
        """Publish this process's resource for profilers in other processes."""
        problem = process_context.publish(otlp.pack_resource(self._recorded.resource()))
        if problem:
            why = f"process context: {problem}; profilers name this process on their own"
            self._recorded.account.complain(why, log=False)

    def mark_board(self, *, has_recorded: bool) -> None:
        """Publish this process's targets to the other processes of the run."""
        marks = [board.RECORDED] if has_recorded else []
        board.put([*marks_of(self._recorded.account.verdicts(of_all=False)), *marks])

    # ---------------------------------------------------------------- the agent's part

    def has_agent(self) -> bool:
        """Return True if an agent can read this recording."""
        return self._is_member() and self._recorded.profile.agent != "off" and RECORDER.memory_fd >= 0

    @property
    def wants_agent(self) -> bool:
        """True if the profile asks an agent for scrapes, or for files while it runs."""
        profile = self._recorded.profile
        return self.asks_agent_alone or profile.export.parquet is not None

    @property
    def asks_agent_alone(self) -> bool:
        """True if the profile asks for an export that only an agent does."""
        profile = self._recorded.profile
        return profile.export.prometheus is not None or profile.capture.to is not None

    def export_settings(self) -> Mapping[str, Any] | None:
        """Return the settings by which the run's agent exports this recording; None without an export by the agent."""
        profile = self._recorded.profile
        otlp, scraped, to = profile.export.otlp, profile.export.prometheus, profile.capture.to
        parquet = profile.export.parquet
        if not (self.is_metered_elsewhere and self.has_agent()):
            return None
        has_otlp = otlp is not None and self._recorded.handover.has_agent
        return {
            "otlp": export_facts.settings_as_json(otlp) if otlp is not None and has_otlp else None,
            "prometheus": None if scraped is None else scraped.listen,
            "captures": None if to is None else str(files.working_folder() / to),
            "parquet": None if parquet is None else asdict(files.dataset_settings(parquet)),
        }

    # ---------------------------------------------------------------- metrics

    @property
    def is_metered_elsewhere(self) -> bool:
        """True if metrics are counted from the recording, by this process or by an agent."""
        if self._recorded.exporter is not None or self.is_scraped:
            return True
        if self._recorded.profile.export.parquet is not None:
            return True
        return self.has_agent() and (self.asks_for_metrics or self.wants_agent)

    @property
    def asks_for_metrics(self) -> bool:
        """True if the profile asks for any metric other than gauges."""
        profile = self._recorded.profile
        return bool(profile.requests) or any(rule.metrics or rule.gen_ai or rule.batch for rule in profile.functions)

    def _metered_facts(self) -> MeteredFacts:
        """Return the facts on this process's metrics, with the losses and costs that were published last."""
        recorded, profile = self._recorded, self._recorded.profile
        return replace(
            self._books or export_facts.MeteredFacts(0),
            start_ns=recorded.start_ns,
            asks=self.asks_for_metrics or self.is_scraped,
            requests=bool(profile.requests),
            routes=tuple(route for rule in profile.requests for route in rule.gen_ai),
            by=recorded.requests_by[0],
            at_most=recorded.requests_by[1],
            watches=any(rule.gen_ai or rule.batch for rule in profile.functions),
            environ=environment.metrics_variables(),
        )

    def publish_marks(self) -> None:
        """Publish the marks of functions with metrics. Takes at most a 20th of the time."""
        began_ns = time.monotonic_ns()
        if not self.is_metered_elsewhere or began_ns < self._marks_until_ns:
            return
        if any(rule.metrics or rule.gen_ai for rule in self._recorded.profile.functions):
            self._publish_books(self._books or export_facts.MeteredFacts(0))
            self._marks_until_ns = began_ns + SHARE * (time.monotonic_ns() - began_ns)

    def publish_books(self, *, at_once: bool = False) -> None:
        """Publish losses, costs and queued tasks, which only the session counts; every `BOOKS_NS` unless `at_once`."""
        now_ns = time.monotonic_ns()
        if not self.is_metered_elsewhere:
            return
        if not (at_once or now_ns - self._books_ns >= BOOKS_NS):
            self.publish_marks()
            return
        self._books_ns = now_ns
        recorded = self._recorded
        costs_ns = {"probes": RECORDER.calls * recorded.account.mean_ns(), **recorded.account.threads_ns()}
        losses, queued = recorded.account.losses(), meter.queued_tasks()
        self._publish_books(export_facts.MeteredFacts(0, losses=losses, costs_ns=costs_ns, queued=queued))

    def _publish_books(self, books: MeteredFacts) -> None:
        calls, streams = self._marks(lambda rule: rule.metrics), self._marks(lambda rule: rule.gen_ai)
        if self._recorded.profile.requests:
            calls = (*calls, meter.mark_of(BLOCKED_LOOP))
        before, self._books = self._books, replace(books, calls=calls, streams=streams)
        if self._books != before:
            self.publish()

    def _marks(self, is_wanted: Callable[[FunctionRule], bool]) -> tuple[str, ...]:
        """Return the marks by which the calls of some rules' targets are counted in the recording."""
        rules = {rule.text for rule in self._recorded.profile.functions if is_wanted(rule)}
        sites = self._recorded.sites_of(rules)
        return tuple(sorted(set(map(meter.mark_of, sites))))[: distributions.SERIES_LIMIT] if sites else ()

    # ---------------------------------------------------------------- verdicts

    def notes_in_short(self, *, of_all: bool = False) -> tuple[str, ...]:
        """Return the notes for other processes: the first 50, each cut at 500 characters."""
        return tuple(note[:NOTE_LENGTH] for note in self._recorded.account.notes(of_all=of_all)[:MOST_NOTES])

    def own_notes_in_short(self, *, of_all: bool = False) -> Mapping[str, Any]:
        """Return the notes that hold in this process alone, as a mapping, cut to fit into one packet."""
        own_notes = self._recorded.account.own_notes(of_all=of_all)
        waiting = tuple((mark, note[:NOTE_LENGTH]) for mark, note in own_notes.waiting[:MOST_NOTES])
        uncalled = own_notes.uncalled if len(own_notes.uncalled) <= MOST_MARKS else ()
        return asdict(replace(own_notes, at_work=own_notes.at_work[:MOST_MARKS], waiting=waiting, uncalled=uncalled))

    def publish_verdicts(self, *, at_once: bool = False) -> None:
        """Publish the verdicts on the rules, also for `instrument check`, so that they outlive this process.

        Unless `at_once`, takes at most a 20th of the time, at intervals that grow to `VERDICTS_EVERY_NS`.
        """
        began_ns, recorded = time.monotonic_ns(), self._recorded
        if began_ns < self._verdicts_until_ns and not at_once:
            return
        if folder := os.environ.get(CHECK_FOLDER):
            write_check_report(folder, RECORDER.calls, recorded.profile, recorded.account.verdicts(of_all=False))
        notes = self.notes_in_short()
        if notes != self._notes:
            self._notes, self._own_notes = notes, self.own_notes_in_short()
            self.publish()
        rest_ns = min((began_ns - recorded.start_ns) // 10, VERDICTS_EVERY_NS)
        self._verdicts_until_ns = began_ns + max(rest_ns, SHARE * (time.monotonic_ns() - began_ns))
