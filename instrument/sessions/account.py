"""The diagnostics of a session, which end each report: losses, unobserved targets, and the cost of recording."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from instrument.device.gauge_thread import Gauges
from instrument.device.timing import Ranges, Timing
from instrument.instrumentors.probe_cost import Costs
from instrument.instrumentors.selection import Selection
from instrument.instrumentors.startup import ImportTimes
from instrument.instrumentors.verdict import Verdict, drop_recorded_elsewhere, make_rule_marks
from instrument.recorder.core import calls_by_site
from instrument.recorder.governor import Budget
from instrument.recorder.recorder import Recorder
from instrument.recording import board
from instrument.recording.spans import Cost, OwnNotes, Site, describe_uncalled_targets
from instrument.runtime.faults import FAULTS, logger
from instrument.runtime.lazy_imports import LazyModule, dataclass, field
from instrument.sessions.handover import Handover
from instrument.sessions.window import WindowReader

if TYPE_CHECKING:
    from instrument.otlp.delivery import Exporter
    from instrument.report import view
else:
    view = LazyModule("instrument.report.view")

MOST_COMPLAINTS = 20

MOST_UNCALLED = 500
"""The maximum number of uncalled targets that the run's report names. If there are more, the report names none."""

SUB_INTERPRETER_MODULES = {"_interpreters", "_xxsubinterpreters"}
"""The modules that a program imports to make sub-interpreters, in which nothing is recorded."""

_UNSENT = ("failed", "rejected", "dropped")


@dataclass(eq=False, kw_only=True)
class SessionDiagnostics:
    """The losses, costs and notes of a session, collected from its components.

    `timing` is None if no device is timed, and `exporter` is None if no spans are sent. If `has_waiting_notes` is True,
    `notes` includes rules without a target. `refused` has the reasons why the last reload refused a profile or
    settings. `thread_ns` is the processor time of the session's thread.
    """

    recorder: Recorder
    selection: Selection
    windows: WindowReader
    costs: Costs
    budget: Budget
    gauges: Gauges
    ranges: Ranges
    imports: ImportTimes
    timing: Timing | None
    exporter: Exporter | None
    handover: Handover
    has_waiting_notes: bool = True
    refused: tuple[str, ...] = ()
    thread_ns: int = 0
    _losses: Counter[str] = field(default_factory=Counter)
    _complaints: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_COMPLAINTS))

    def after_fork_in_child(self) -> None:
        self.thread_ns = 0
        self._losses.clear()
        self._complaints.clear()

    # ---------------------------------------------------------------- what the session takes down

    def complain(self, message: str, *, log: bool = True) -> None:
        """Log an error message, and keep the newest `MOST_COMPLAINTS` messages for `notes`."""
        self._complaints.append(message)
        if log:
            logger.warning(message)

    def note_refused_profile(self, message: str) -> None:
        """Log the reason why a profile was refused, and keep it until the next successful reload."""
        if (message,) != self.refused:
            logger.warning("reload: %s", message)
        self.refused = (message,)

    def count_loss(self, reason: str, count: int) -> None:
        """Add to the count of lost records with this reason. Only one thread may call this at a time."""
        self._losses[reason] += count

    # ---------------------------------------------------------------- its readings

    def cost(self, window_ns: int) -> Cost:
        mean_ns = self.compute_call_cost_ns()
        cold_ns = mean_ns + self.costs.cold_cost_ns if mean_ns else 0.0
        return Cost(self.recorder.calls, mean_ns, window_ns, sum(self.read_cpu_ns().values()), cold_ns)

    def compute_call_cost_ns(self) -> float:
        calls = calls_by_site(self.recorder)
        probes_ns, counted = self.costs.sum_cost_ns(calls), sum(calls.values())
        return (probes_ns + self.measure_event_cost_ns()) / counted if counted else 0.0

    def compute_cost_of_window(self, calls: Mapping[Site, int], timed: int, window_ns: int, session_ns: int) -> Cost:
        """Return the instrumentation's cost in a window. `calls` has the number of calls by site. `timed` is the number
        of calls with device times. The processor time of our threads is spread evenly over `session_ns`."""
        spans = sum(calls.values())
        probes_ns = self.costs.sum_cost_ns(calls) + (timed * self.timing.pair_cost_ns if timed and self.timing else 0.0)
        mean_ns = probes_ns / spans if spans else 0.0
        threads_ns = sum(self.read_cpu_ns().values()) * window_ns // max(session_ns, 1)
        return Cost(spans, mean_ns, window_ns, threads_ns, mean_ns + self.costs.cold_cost_ns if spans else 0.0)

    def measure_event_cost_ns(self) -> float:
        return 0.0 if self.timing is None else self.timing.cost_ns()[0]

    def read_cpu_ns(self) -> dict[str, int]:
        ns_by_work = {"looking through spans": self.thread_ns, "reading gauges": self.gauges.thread_ns}
        if self.exporter is not None:
            ns_by_work["sending to the collector"] = self.exporter.thread_ns
        if self.timing is not None:
            ns_by_work["resolving device times"] = self.timing.cost_ns()[1]
        return {name: spent_ns for name, spent_ns in ns_by_work.items() if spent_ns}

    def make_stats(self, clock: str, ring_bytes: int) -> view.InstrumentationStats:
        rings = self.recorder.rings()
        return view.InstrumentationStats(
            clock=clock,
            added_ns=lambda sites: [self.costs.find_site_cost(site).added_ns for site in sites],
            pairs_ns=self.measure_event_cost_ns(),
            threads_ns=self.read_cpu_ns(),
            passed=self.recorder.muted_calls(),
            muted=set(self.recorder.passes),
            held_rows=sum(min(ring.head, ring.capacity) for ring in rings),
            ring_rows=sum(ring.capacity for ring in rings),
            ring_bytes=ring_bytes,
            notes=self.notes(with_muted=False),
        )

    def losses(self) -> Mapping[str, int]:
        counts: Counter[str] = Counter(self._losses)
        counts.update(self.recorder.losses())
        if self.timing is not None:
            counts.update(self.timing.losses())
        counts.update(self.gauges.losses())
        counts["spans overwritten before the steps in them were counted"] = self.windows.lost_rows
        if self.exporter is not None:
            counts.update(metrics.losses() if (metrics := self.handover.restore_metrics()) is not None else {})
            sent_counts = self.exporter.own.counts  # the recording counts what it sends
            counts.update({f"spans {name} by the OTLP export": sent_counts.get(name, 0) for name in _UNSENT})
        counts.update(self.handover.losses())
        return {name: count for name, count in counts.items() if count}

    def notes(self, *, with_muted: bool = True, of_all: bool = True) -> list[str]:
        """Return a sentence for each target that was not observed, and for each fault. `with_muted` adds muted sites.
        `of_all` adds rules whose modules are not imported here. The run's first process reports such rules."""
        verdicts = drop_recorded_elsewhere(self.verdicts(of_all=of_all), board.read_marks())
        unreported = ("attached", "uncalled") if self.has_waiting_notes else ("attached", "uncalled", "waiting")
        idle = self.selection.idle_preset_rules()
        notes = [
            str(verdict)
            for verdict in verdicts
            if (verdict.state not in unreported or _is_idle_rule(verdict))
            and not (verdict.rule in idle and verdict.state in ("waiting", "partly"))
        ]
        if uncalled := _uncalled_targets(verdict for verdict in verdicts if verdict.rule not in idle):
            notes.append(describe_uncalled_targets(uncalled))
        notes.extend(f"{event}: {count} times" for event, count in self.recorder.count_unusual_events().items())
        notes.extend(FAULTS.describe_unreadable_values())
        notes.extend(
            f"fault of instrument in the {place}: {count} times" for place, count in FAULTS.count_by_place().items()
        )
        if self.selection.late:
            notes.append(
                "started after the import of "
                + ", ".join(self.selection.late)
                + ": names in modules and classes record; other references are named with their rule: start earlier"
            )
        if not SUB_INTERPRETER_MODULES.isdisjoint(sys.modules):
            notes.append("sub-interpreters: the main interpreter of each process is recorded, and no other")
        if self.timing is not None:
            notes.extend(self.timing.notes())
        notes.extend(filter(None, (self.ranges.reason, self.imports.why_not)))
        notes.extend(self.budget.notes(with_muted=with_muted))
        notes.extend(self.gauges.notes())
        if (metrics := self.handover.restore_metrics()) is not None:
            notes.extend(metrics.notes())
        notes.extend(f"reload: {refused}" for refused in self.refused)
        notes.extend(self._complaints)
        return notes

    def describe_unrecorded_requests(self) -> str:
        self.selection.attach_family("requests")
        verdicts = drop_recorded_elsewhere(self.verdicts(of_all=False), board.read_marks())
        return "; ".join(str(verdict) for verdict in verdicts if verdict.state == "unmet")

    def own_notes(self, *, of_all: bool = True) -> OwnNotes:
        """Return the rules and targets without effect in this process. Other processes of the run may use them."""
        verdicts = self.verdicts(of_all=of_all)
        idle_verdicts = (verdict for verdict in verdicts if verdict.state in ("waiting", "nothing"))
        waiting = [(board.attached_mark(verdict.rule), str(verdict)) for verdict in idle_verdicts]
        unmet = (verdict for verdict in verdicts if verdict.state == "unmet" or _is_idle_rule(verdict))
        waiting += [(board.called_mark(verdict.rule), str(verdict)) for verdict in unmet]
        idle = self.selection.idle_preset_rules()
        own_verdicts = drop_recorded_elsewhere(verdicts, board.read_marks())
        uncalled = sorted(_uncalled_targets(verdict for verdict in own_verdicts if verdict.rule not in idle))
        listed = uncalled if len(uncalled) <= MOST_UNCALLED else []
        return OwnNotes(tuple(sorted(make_rule_marks(verdicts))), tuple(waiting), tuple(listed))

    def verdicts(self, *, of_all: bool = True) -> list[Verdict]:
        """Return the verdict on each rule and target, with the number of calls. `of_all` adds rules whose modules are
        not imported."""
        verdicts = self.selection.verdicts(of_all=of_all)
        calls: Counter[object] = Counter()
        for site, called in calls_by_site(self.recorder).items() if verdicts else ():
            calls[site.key] += called
        for site, passed in self.recorder.muted_calls().items():
            calls[site.key] += passed
        # A call that has not ended is one too: a server's main loop never does.
        calls.update(self.recorder.find_site(row).key for _, row in self.recorder.open_rows())
        return [verdict.with_call_count(lambda site: calls[site.key]) for verdict in verdicts]


def _is_idle_rule(verdict: Verdict) -> bool:
    return verdict.state == "uncalled" and verdict.target == verdict.rule and verdict.site is None


def _uncalled_targets(verdicts: Iterable[Verdict]) -> list[str]:
    uncalled = (verdict for verdict in verdicts if verdict.state == "uncalled" and not _is_idle_rule(verdict))
    return [verdict.target or verdict.rule for verdict in uncalled]
