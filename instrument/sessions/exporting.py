"""How a session has what it records exported while it runs: by itself, or by the agent of its run.

`handover` says which of both. `Session` is one of these that begins, goes over to other profiles, and ends.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from instrument.errors import ExportError
from instrument.profile.model import Otlp, Profile
from instrument.recorder.recorder import RECORDER
from instrument.recording import export_place
from instrument.recording.spans import Span
from instrument.runtime.cheap_start import LazyModule
from instrument.runtime.faults import FAULTS
from instrument.runtime.unpatched import TIMEOUT_MAX
from instrument.sessions import files
from instrument.sessions.gauge_watch import GaugeWatch
from instrument.sessions.generation import FORK_WAIT_S, Generations
from instrument.sessions.handover import ABANDONED
from instrument.sessions.lock import SessionLock
from instrument.sessions.membership import Membership
from instrument.sessions.own_export import OwnExport
from instrument.sessions.recorded import Recorded
from instrument.sessions.saving import Saving
from instrument.sessions.session_threads import SessionThreads

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp import exposition, interval_join
else:
    otlp, interval_join = LazyModule("instrument.otlp"), LazyModule("instrument.otlp.interval_join")

FLUSH_S = 0.01
"""How often it is looked whether the agent has sent everything."""

SCRAPE_WAIT_S = 1.0
"""The longest that a scrape waits for the session, which may be writing a file; it is told what was known before."""

GAUGES_FOR_NS = 30 * 10**9
"""How old a gauge may be that a scrape is told."""


class Exporting(Recorded):
    """What one profile has recorded in one process, on its way out. All methods may be called from any thread."""

    _threads: SessionThreads
    _saving: Saving
    _membership: Membership
    _gauge_watch: GaugeWatch
    _generations: Generations

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._lock = SessionLock()
        self._stopped = False
        self._is_of_run = "INSTRUMENT_RUN_PID" in os.environ
        self._scraped_here: exposition.Metered | None = None
        """The last metrics of this process alone that a scrape got."""
        self._scraped: dict[bool, str] = {}
        """The last answers of the agent to scrapes, by whether they are OpenMetrics."""
        self._resource_told: dict[str, object] = {}

    # ---------------------------------------------------------------- who exports

    def _choose_who_exports(self) -> None:
        """Leave the export to the agent, where there is one or can be: for good, whatever becomes of that one."""
        if self.profile.agent != "off" and self._membership.has_agent():
            self.handover.leave_to_agent()
        if self._exporter is not None:  # an agent joins the requests of its run, and leaves them their own traces
            run = files.run_shared() or ("" if self.handover.has_agent else files.run_told())
            if run != self._exporter.ids.run:
                self._exporter.ids.run = run
                RECORDER.tell(self._facts())

    def _is_left_to_agent(self) -> bool:
        """Whether an agent is there that the session before this one has left its export to."""
        is_readable = RECORDER.memory_fd >= 0 and RECORDER.facts.get("is_awaited")
        return bool(is_readable) and self._membership.is_heard()

    def _has_agent(self) -> bool:
        return bool(self._membership.path) and self.profile.agent != "off" and RECORDER.memory_fd >= 0

    def _while_no_fork_comes(self, prepare: Callable[[], object]) -> None:
        """Do something of which a child would be left with half, such as an import, if that can be had."""
        lock = self._generations.lock
        held = lock.acquire(timeout=FORK_WAIT_S)
        try:
            prepare()
        finally:
            if held:
                lock.release()

    @property
    def _reading(self) -> OwnExport | None:
        """The reader of this process's own recording, None where nothing reads it here, or it has ended."""
        own = self._own if self.handover.is_here and self._own is not None else self._scrape
        return own if own is not None and not (own.is_over or own.is_broken) else None

    def _read_own(self, read: Callable[[], bool]) -> bool:
        """Read on in the recording, and return what `read` does. Of one that cannot be read nothing is exported."""
        own = self._reading
        if own is None or RECORDER.memory_fd < 0:
            return True
        try:
            own.begin(RECORDER.memory_fd)
            return read()
        except Exception as fault:
            own.is_broken = True
            FAULTS.attempt("end of the export", own.release)
            FAULTS.note("export of the recording", fault)
            return True

    def look_after_export(self, *, is_joined: bool) -> None:
        """Let the agent know what it needs to export what is recorded here: called now and then."""
        self._tell_resource()
        if self._is_metered_elsewhere:
            self._tell_books()
        joined = self._membership.joins if is_joined else 0
        self._gauge_watch.look()
        self.tell_verdicts()
        if joined != self._requests_told and joined and self.selection.has_requests():
            self._requests_told = joined
            self._membership.tell({"requests": True})

    def _hear_agent(self, message: Mapping[str, Any]) -> None:
        """Go by what the agent says of what it does in place of this process."""
        if "unexported" in message:
            self.handover.is_refused = True
        if "gauges" in message:
            self._gauge_watch.hear(message["gauges"])
        if isinstance(ports := message.get("connections"), list):
            self.selection.note_connections(ports)

    def _tell_resource(self) -> None:
        """Tell who exports of a tracer provider that the service has configured by now: both are the same service."""
        if self._exporter is None:
            return
        resource = dict(self._exporter.resource())
        if resource != self._resource_told:
            self._resource_told = resource
            RECORDER.tell(self._facts())

    def sends_to(self, endpoint: str) -> bool:
        """Whether the session itself sends what `capture` keeps to that collector."""
        wanted = self.profile.export.otlp
        return self._exporter is not None and wanted is not None and wanted.endpoint == endpoint

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Those spans of a window that the session neither has sent nor will send: the caller does.

        A request that has not ended is kept, for nobody else knows its fate. Where the agent exports, it sends them.
        Raises `ExportError` where it does not hear.
        """
        if not spans:
            return []
        if not self.handover.is_here:
            begin_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
            if self._membership.tell({"window": [begin_ns, end_ns]}):
                return []
            self.count_loss("spans of windows that the agent of the run may not have kept", len(spans))
            raise ExportError(
                f"asked the agent of the run to send {len(spans)} spans of a window, found that it does not hear; "
                "those that the profile's `capture` keeps are sent by the next one"
            )
        with self._lock.held():
            own = self._reading
            if own is None:
                return list(spans)
            self._read_own(own.look)
            return own.unsent(spans)

    def count_loss(self, what: str, count: int) -> None:
        """Have the reports tell of something that was recorded and not kept."""
        with self._lock.held():
            self.account.lose(what, count)

    def _find_agent_at_end(self) -> None:
        """Begin another agent where that of the run has gone, or count what none has exported."""
        if self.handover.is_here or self._membership.is_agent_there() or not self._membership.join(begins=True):
            return
        if count := self._flush_by_agent(0.0)[1]:
            self.handover.left = {ABANDONED: count}

    # ---------------------------------------------------------------- while it runs

    def _is_looked_after(self) -> bool:
        """Return True where anything is to be done while the service runs. Otherwise no thread does."""
        is_read = self._reading is not None or self.profile.schedule is not None
        return is_read or self.profile.budget is not None or self._ticks.are_used

    def _sends(self) -> bool:
        """Whether the session itself sends to a collector what no agent exports."""
        return self.handover.is_here

    def _pump(self, timeout_s: float = -1, *, meters: bool = False) -> None:
        """Look through what has been recorded since the last time. Where it `meters`, metrics are taken now."""
        with self._lock.held(timeout_s) as held:
            if not held or not (self._is_looked_after() or self._windows.cut):
                return
            if self._exporter is not None:
                self._exporter.own.look_at_clock()
            self._ticks.check(time.monotonic_ns())
            self._budget.step()
            RECORDER.learn_paths()
            self._windows.look()
            if (own := self._reading) is not None:
                self._tell_resource()
                self._tell_books(at_once=meters)
                self._read_own(partial(own.look, meters=meters))
            while self._windows.cut:
                window, origin = self._windows.cut.popleft()
                self._saving.write_window(*window, origin)

    def prometheus(self, *, openmetrics: bool = False) -> str:
        """The metrics of the run as they are now, in Prometheus's text format; see `instrument.prometheus`."""
        from instrument.otlp import exposition

        exposition.require_client()
        why_alone = "agent: off" if self.profile.agent == "off" else "for it has no agent"
        if self._has_agent():
            try:
                self._scraped[openmetrics] = self._membership.scraped(self._saving.run, openmetrics=openmetrics)
            except TimeoutError:
                pass  # the answer is the last one
            except OSError:
                self._scraped.clear()
            if openmetrics in self._scraped:
                return self._scraped[openmetrics]
            why_alone = "for its agent does not answer"
        if self._own is None and self._scrape is None and RECORDER.memory_fd >= 0:
            FAULTS.attempt("reading for a scrape", partial(self._while_no_fork_comes, self._begin_scrapes))
            self._threads.start()
        metered = self._metered_here() or self._scraped_here or exposition.Metered(self.origin(), None, [], ())
        self._scraped_here = metered
        return exposition.text_of(exposition.families_of_process(metered, why_alone), openmetrics=openmetrics)

    def _begin_scrapes(self) -> None:
        """From now on read the recording for scrapes alone, of which nothing is exported."""
        scrape = OwnExport(
            otlp.Exporter(Otlp(), self.origin(), RECORDER.threads, detects=False, sends=False), sends=False
        )
        scrape.prepare()
        self._scrape = scrape
        RECORDER.tell(self._facts())

    def _metered_here(self) -> exposition.Metered | None:
        """Return the metrics as they are now, None where the session is busy for long."""
        from instrument.otlp import exposition

        with self._lock.held(SCRAPE_WAIT_S) as held:
            if not held:
                return None
            found = None
            if (own := self._reading) is not None:
                self._tell_books(at_once=True)
                self._read_own(own.look)
                own.before_scrape()
                self._read_own(own.look)
                found = own.metered()
            now_ns = time.monotonic_ns()
            samples = self._gauges.samples(now_ns - GAUGES_FOR_NS, now_ns)
            snapshot = None if found is None else found.snapshot
            return exposition.Metered(self.origin(), snapshot, samples, self._gauges.gpus())

    # ---------------------------------------------------------------- what is still on its way

    def flush(self, timeout_s: float = 5.0) -> otlp.Delivery | None:
        """Hand over all that has finished and wait, at most so long, until the collector has it.

        Returns what was delivered and what was not; None where the profile exports to no collector.
        """
        end = time.monotonic() + timeout_s
        self._pump(min(max(timeout_s, 0.0), TIMEOUT_MAX), meters=True)
        if self._exporter is None:
            return None
        if (own := self._reading) is not None and self.handover.is_here:
            self._flush_here(own, end)
        elif not self.handover.is_here:
            return self._flush_by_agent(end)[0]
        return self._exporter.flush(round(max(min(end - time.monotonic(), TIMEOUT_MAX), 0.0) * 1e9))

    def _flush_here(self, own: OwnExport, end: float) -> None:
        """Offer all that has finished, as far as there is room in the exporter before the time is up."""
        if self._timing is not None:
            self._timing.await_settled(time.monotonic_ns(), min(end, time.monotonic() + interval_join.SETTLE_NS / 1e9))
        self._tell_books(at_once=True)
        is_done = False
        while not is_done:
            with self._lock.held(min(max(end - time.monotonic(), 0.0), TIMEOUT_MAX)) as held:
                is_done = not held or self._read_own(own.send_now) or time.monotonic() > end
            if not is_done:
                time.sleep(FLUSH_S)

    def _flush_by_agent(self, end: float, patience_s: float = math.inf) -> tuple[otlp.Delivery, int]:
        """Have the agent send all that has finished, and wait until it is settled or time is up.

        Returns what was delivered, and how many spans nobody has decided about yet or are on their way.

        Of an agent that exports, and for `patience_s` takes no notice of what it has not seen, and has nothing to send
        before that, nothing more is awaited. One whose exporter has yet to begin has all the time.
        """
        recorded, asked_ns = self._recorded(), time.monotonic_ns()
        if self._timing is not None:  # the agent waits for device times, too
            self._timing.await_settled(asked_ns, min(end, time.monotonic() + interval_join.SETTLE_NS / 1e9))
        self._tell_books(at_once=True)
        seen, seen_at, joins = -1, 0.0, -1
        while True:
            if joins != self._membership.joins:  # another agent may have come meanwhile
                joins = self._membership.joins
                self._membership.tell({"flush": True})
            progress = self.handover.progress()
            fates = progress.fates
            sent = {fate: fates[fate] for fate in export_place.SENT}
            pending = fates["kept"] - sum(sent.values())
            now, before, seen = time.monotonic(), seen, fates["seen"] + fates["missed"]
            is_awaited = seen != before or pending or self._is_agent_starting()
            seen_at = now if is_awaited else seen_at
            is_read = seen >= recorded and progress.settled_ns >= asked_ns
            settled = is_read and not pending and self._are_metrics_settled(asked_ns)
            if settled or now >= end or (seen < recorded and now - seen_at > patience_s):
                found = otlp.Delivery(offered=fates["kept"], pending=pending, settled=settled, **sent)  # type: ignore[arg-type]
                return found, max(recorded - seen, 0) + pending
            time.sleep(FLUSH_S)

    def _is_agent_starting(self) -> bool:
        """Return True where an agent is there that does not export yet what this process records."""
        is_taken, is_there = self.handover.is_taken(), self._membership.is_agent_there()
        return is_there and not (is_taken or self.handover.is_refused)

    def _are_metrics_settled(self, asked_ns: int) -> bool:
        """Return True where the agent has sent, or given up, what was counted and read by a time."""
        if not (self._asks_for_metrics or self._gauges.are_wanted):
            return True
        metered = self.handover.metered()
        return metered is not None and metered.settled_ns >= asked_ns

    def _is_first(self) -> bool:
        return self._is_of_run and files.is_main()

    def _recorded(self) -> int:
        recorded: int = sum(ring.head for ring in RECORDER.rings()) + RECORDER.ended_rows
        return recorded
