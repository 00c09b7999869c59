"""How a session looks through what it records while it runs, and has it told: by itself, or by the agent of its run.

`handover` says which of both. `Session` is one of these that begins, goes over to other profiles, and ends.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from instrument.errors import ExportError
from instrument.profile.model import Profile
from instrument.recorder.meter import Ended
from instrument.recorder.recorder import RECORDER
from instrument.recording import export_place
from instrument.recording.distributions import Snapshot
from instrument.recording.meter_place import DAMAGED, MeterState
from instrument.recording.rows import END_NS
from instrument.recording.spans import Span
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy import LazyModule
from instrument.runtime.unpatched import TIMEOUT_MAX
from instrument.sessions import files
from instrument.sessions.deadline import Deadline
from instrument.sessions.gauge_watch import GaugeWatch
from instrument.sessions.generation import FORK_WAIT_S, Generations
from instrument.sessions.handover import Standing
from instrument.sessions.keyed_export import KeyedExport
from instrument.sessions.lock import SessionLock
from instrument.sessions.membership import Membership
from instrument.sessions.recorded import Recorded
from instrument.sessions.saving import Saving
from instrument.sessions.session_threads import SessionThreads

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp import interval_join
    from instrument.otlp.metrics import Metrics
    from instrument.sessions.outbox import Outbox
else:
    otlp, interval_join = LazyModule("instrument.otlp"), LazyModule("instrument.otlp.interval_join")

HAND_BACK_NS = 10**9
"""The longest that the session still sends what it has read for, as an agent takes over."""

METRICS_S = 0.5
"""The longest that metrics which are just being sent are waited for, as they are to be counted in another way."""

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
        self._is_scraped = False
        self._scraped: dict[bool, str] = {}
        """The last answers of the agent to scrapes, by whether they are OpenMetrics."""
        self._resource_told: dict[str, object] = {}

    # ---------------------------------------------------------------- who exports

    def _choose_who_exports(self) -> None:
        """Where there is an agent it exports what this process records, else the session: by what, goes by the keys."""
        if self._membership.path and self.profile.agent != "off":
            self.handover.leave_to_agent()
        elif self._reads_for_keys():
            self.handover.read_back()
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

    def _begin_export(self, rows: Mapping[int, int], done: int, metered: MeterState | None) -> None:
        self._start_exporter()  # before it is this one's to send: who flushes from then on waits for that
        with self._lock.held():
            until_ns = 0
            if self._is_read():
                self._reader.look()
                until_ns = RECORDER.now_ns()
            if metered is not None:
                until_ns = self._go_on_metering(metered)
            self._reader.go_on(rows, until_ns, done)
            self._kept_count = 0
            self.handover.is_own = True
            if self._exporter is not None:
                self._exporter.add_metrics(self._exporter.own)
                self._go_on_telling(self._exporter.metrics, metered)
        if self._start_exporter():  # threads may have begun meanwhile
            self._threads.start()

    def _start_exporter(self) -> bool:
        """Start it where it would run if the session had exported from its begin; whether that is so."""
        is_wanted = self._exporter is not None and not self._stopped and self._threads.have_begun
        if self._exporter is not None and is_wanted:
            self._exporter.start()
        return is_wanted

    def _go_on_metering(self, metered: MeterState) -> int:
        """Go on with what another process has counted, and count what has ended since; tells until when that is."""
        until_ns = RECORDER.now_ns()
        try:
            self._meter.go_on(metered.meter)
        except DAMAGED:
            return 0
        cursor = RECORDER.cursor(RECORDER.shelf(0.0, 0).sort)  # requests alone
        cursor.go_on(metered.places)
        ended = [row for _, rows in cursor.read() for row in rows if row[END_NS] <= until_ns]
        self._meter.count(sorted(ended, key=lambda row: row[END_NS]))
        self._meter.watch_from(metered.places)
        return until_ns

    def _go_on_telling(self, metrics: Metrics, metered: MeterState | None) -> None:
        """Go on from what another process has told, with the gauges that were read since."""
        if metered is not None:
            with suppress(*DAMAGED):
                metrics.go_on(metered.told)
        self._tell_readings(metrics)

    def _end_export(self) -> Standing:
        exporter, outbox = self._exporter, self._outbox
        with self._lock.held():
            if self._has_metrics():
                self._pump(meters=True)
            self._reader.look()
            self._send_kept()
            standing = self._last_standing()
            self.handover.is_own = False
        if outbox is not None:
            self._send_settled(outbox)
        if exporter is not None:
            exporter.stop(HAND_BACK_NS)
        return standing

    def _begin_back(self) -> None:
        self._prepare_keyed()
        with self._lock.held():
            self.handover.is_own, self.handover.is_read_back = False, True
            if self._keyed is not None:
                self._read_back(self._keyed.look)  # so that it knows all that begins from now on
        if self._exporter is not None and not self._stopped and self._threads.have_begun:
            self._exporter.start()
            self._threads.start()

    def _prepare_keyed(self) -> None:
        """Import what is needed to read the recording."""
        if self._keyed is not None:
            self._while_no_fork_comes(self._keyed.prepare)

    def _while_no_fork_comes(self, prepare: Callable[[], object]) -> None:
        """Import something, so that no child is left with half of it, if that can be had."""
        lock = self._generations.lock
        held = lock.acquire(timeout=FORK_WAIT_S)
        try:
            prepare()
        finally:
            if held:
                lock.release()

    def _go_over_where_keys_are_met(self) -> None:
        """Export by the recording from the first key on: what was read until then has none, and is sent as it is."""
        keyed, exporter, handover = self._keyed, self._exporter, self.handover
        if keyed is None or exporter is None or not handover.is_own or handover.has_agent:
            return
        if not self._reads_for_keys():
            return
        try:
            self._prepare_keyed()
            exporter.remove_metrics(exporter.own, METRICS_S)
            meter, rows = self._counted
            if handover.go_over(self._standing()._replace(meter=meter), rows):
                keyed.begin(RECORDER.memory_fd, knows_all=True)
        except Exception as fault:
            keyed.is_broken = True
            if handover.is_read_back:
                handover.read_by_rings()
            FAULTS.note("export by the recording", fault)
        finally:
            if handover.is_own:
                exporter.add_metrics(exporter.own)

    def _end_back(self) -> None:
        keyed, exporter = self._keyed, self._exporter
        if keyed is None or exporter is None:
            return
        with self._lock.held():
            self._read_back(partial(keyed.look, meters=True))
            keyed.send_waiting()
            self.handover.is_read_back = False
        exporter.stop(HAND_BACK_NS)
        keyed.release()

    @property
    def _reading_back(self) -> KeyedExport | None:
        """What exports by the recording; None where nothing does so, or it has ended."""
        keyed = self._keyed
        return keyed if keyed is not None and self.handover.is_read_back and not keyed.is_over else None

    def _read_back(self, read: Callable[[], bool]) -> bool:
        """Read on in the recording, and tell what `read` does; where it cannot be read the session's reader goes on."""
        keyed = self._reading_back
        if keyed is None:
            return True
        try:
            keyed.begin(RECORDER.memory_fd)
            return read()
        except Exception as fault:
            keyed.is_broken = True
            try:
                keyed.release()
            finally:
                self.handover.read_by_rings()
            FAULTS.note("export by the recording", fault)
            return True

    def _send_settled(self, outbox: Outbox) -> None:
        """Send what waits for its device times as they come, and after a while without."""
        end_ns = time.monotonic_ns() + HAND_BACK_NS
        is_last = False
        while not is_last:
            is_last = time.monotonic_ns() > end_ns or not outbox.waits
            with self._lock.held():
                outbox.send_settled(is_last=is_last)
            if not is_last:
                time.sleep(FLUSH_S)

    def _last_standing(self) -> Standing:
        return self._standing()._replace(meter=self._meter.state() if self._has_metrics() else None)

    def look_after_export(self, *, is_joined: bool) -> None:
        """Export here, or have the agent do so, as things stand: called now and then."""
        self._tell_resource()
        if self._is_metered_elsewhere:
            self._tell_books()
        joined = self._membership.joins if is_joined else 0
        self.handover.look(joined)
        self._gauge_watch.look(joined)
        self._tell_readings_of_agent()
        self.tell_verdicts()
        if joined != self._requests_told and joined and self.selection.has_requests():
            self._requests_told = joined
            self._membership.tell({"requests": True})

    def _hear_agent(self, message: Mapping[str, Any]) -> None:
        """Go by what the agent says of what it does in place of this process."""
        if "yours" in message:  # it exports no more what is recorded here
            self.handover.take_over()
        if "gauges" in message:
            self._gauge_watch.hear(message["gauges"])
        if isinstance(ports := message.get("connections"), list):
            self.selection.note_connections(ports)

    def _tell_readings_of_agent(self) -> None:
        """Tell gauges that the agent has read, where the session itself exports."""
        if self._exporter is not None and self.handover.is_own and not self._gauges.is_reading:
            self._tell_readings(self._exporter.metrics)

    def _tell_readings(self, metrics: Metrics) -> None:
        """Tell the gauges that were read since that was done last, by whoever read them."""
        now_ns = time.monotonic_ns()
        first_ns = now_ns - GAUGES_FOR_NS if metrics.off else metrics.taken_ns + 1
        samples = self._gauges.samples(first_ns, now_ns)
        if samples:
            metrics.offer(samples, self._gauges.gpus())

    def _tell_resource(self) -> None:
        """Tell who exports of a tracer provider that the service has configured by now: both are the same service."""
        if self._exporter is None or not (self.handover.has_agent or self.handover.is_read_back):
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

        A request that has not ended is kept, for nobody else could tell what becomes of it. Raises `ExportError` where
        the agent does not let go of the export: what that one keeps, nobody knows here.
        """
        self._membership.tell({"exports": True})
        if not self.handover.insist():
            self.count_loss("spans of windows that the agent of the run may not have kept", len(spans))
            raise ExportError(
                f"asked to send {len(spans)} spans of a window, found that the agent of the run still exports what "
                "this process records; those that the profile's `capture` keeps are sent by it"
            )
        with self._lock.held():
            if (keyed := self._reading_back) is not None:
                self._read_back(keyed.look)
            if (keyed := self._reading_back) is not None:
                return keyed.unsent(spans)
            found = self._reader.unsent(spans)
            self._send_kept()
            return found

    def count_loss(self, what: str, count: int) -> None:
        """Have the reports tell of something that was recorded and not kept."""
        with self._lock.held():
            self.account.lose(what, count)

    def _export_at_end(self, deadline: Deadline) -> None:
        """Export here where the agent has gone, or has let go of the recording: it ends before this process."""
        if self.handover.is_here or not self.handover.has_agent:
            return
        is_left = self.handover.is_left()
        while message := self._membership.heard():
            is_left = is_left or "yours" in message
        if message is None:  # it has gone, and perhaps there is another one
            is_left = bool(self._membership.join())
        if is_left:
            self.handover.take_over_at_end(deadline)

    # ---------------------------------------------------------------- while it runs

    def _is_read(self) -> bool:
        """Whether anybody wants spans while the service runs. To read them takes about 0.7 us each."""
        is_sent = self._exporter is not None and self.handover.is_own
        return is_sent or self._has_metrics() or self.profile.schedule is not None or self._is_scraped

    def _is_looked_after(self) -> bool:
        """Whether anything is to be done while the service runs. Otherwise no thread does."""
        is_read = self._is_read() or self.handover.is_read_back
        return is_read or self.profile.budget is not None or self._ticks.are_used

    def _sends(self) -> bool:
        """Whether the session itself sends to a collector what no agent exports."""
        return self.handover.is_here

    def _pump(self, timeout_s: float = -1, *, meters: bool = False) -> Snapshot | None:
        """Look through the spans that have finished since the last time.

        Where it `meters`, or it is time to, metrics are taken, for the collector and to be returned.
        """
        snapshot = None
        with self._lock.held(timeout_s) as held:
            if not held or not (self._is_looked_after() or self._reader.cut):
                return None
            if self._exporter is not None:
                self._exporter.own.look_at_clock()
            self._ticks.check(time.monotonic_ns())
            self._budget.step()
            RECORDER.learn_paths()
            self._go_over_where_keys_are_met()
            meters = self._has_metrics() and (meters or time.monotonic_ns() - self._metered_ns >= otlp.METRICS_EVERY_NS)
            ended = self._meter.ended() if meters else {}
            if self._is_read():
                self._reader.look()
                self._send_kept()
                self._meter.count_generators(self._generators)
            self._joined.look(RECORDER.memory_fd)
            if meters:
                snapshot = self._take_metrics(ended)
            if self._outbox is not None:
                self._outbox.send_settled(is_last=self._stopped)
            if (keyed := self._reading_back) is not None:
                self._tell_resource()
                self._tell_books()
                self._read_back(keyed.look)
            while self._reader.cut:
                window, origin = self._reader.cut.popleft()
                self._saving.write_window(*window, origin)
        return snapshot

    def _has_metrics(self) -> bool:
        """Whether the profile asks for any beside gauges, and there is somebody whom the session itself tells."""
        return self._is_scraped or (self._asks_for_metrics and self._exporter is not None and self.handover.is_own)

    def _take_metrics(self, ended: Ended) -> Snapshot:
        """Take all metrics, once the reader has met what had `ended` before."""
        self._metered_ns = time.monotonic_ns()
        self._meter.settle(ended)
        snapshot = self._meter.snapshot(requests=bool(self.profile.requests), marks=self._metered())
        if self._exporter is not None and self.handover.is_own:
            self._counted = self._meter.state(), dict(self._reader.places)
            self.handover.note_meter(*self._counted)
            self._exporter.metrics.put(snapshot)
        if self._is_scraped:
            joined = self._joined.metrics(self._reading_back)
            snapshot = replace(snapshot, metrics=(*snapshot.metrics, *joined))
        self._snapshot = snapshot
        return snapshot

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
        if not self._is_scraped:
            self._begin_scrapes()
            self._threads.start()  # from now on requests are told by status before the rings have lost them
        if self._exporter is None and not self._joined.has_begun and RECORDER.memory_fd >= 0 and self._has_keys():
            begin = partial(self._joined.prepare, self.origin(), self.ids(), self.start_ns)
            FAULTS.attempt("reading for a scrape", partial(self._while_no_fork_comes, begin))
        snapshot = self._pump(SCRAPE_WAIT_S, meters=True) or self._snapshot
        now_ns = time.monotonic_ns()
        samples = self._gauges.samples(now_ns - GAUGES_FOR_NS, now_ns)
        metered = exposition.Metered(self.origin(), snapshot, samples, self._gauges.gpus())
        return exposition.text_of(exposition.families_of_process(metered, why_alone), openmetrics=openmetrics)

    def _begin_scrapes(self) -> None:
        """From now on count metrics here, too: where another process does so, from what that one has counted."""
        with self._lock.held():
            metered = None if self.handover.is_own or self._is_read() else self.handover.metered()
            if metered is not None:
                heads = {ring.thread_id: ring.head for ring in RECORDER.rings()}
                self._reader.go_on(heads, self._go_on_metering(metered))
            self._is_scraped = True

    # ---------------------------------------------------------------- what is still on its way

    def flush(self, timeout_s: float = 5.0) -> otlp.Delivery | None:
        """Hand over all that has finished and wait, at most so long, until the collector has it.

        Returns what was delivered and what was not; None where the profile exports to no collector.
        """
        end = time.monotonic() + timeout_s
        self._pump(min(max(timeout_s, 0.0), TIMEOUT_MAX), meters=True)
        if self._exporter is None:
            return None
        if (keyed := self._reading_back) is not None:
            self._flush_back(keyed, end)
        elif not self.handover.is_here:
            found, _ = self._flush_by_agent(end)
            if found.settled or not self.handover.is_here:
                return found
            return self.flush(max(end - time.monotonic(), 0.0))  # it has come here meanwhile
        self._tell_readings_of_agent()
        return self._exporter.flush(round(max(min(end - time.monotonic(), TIMEOUT_MAX), 0.0) * 1e9))

    def _flush_back(self, keyed: KeyedExport, end: float) -> None:
        """Offer all that has finished, as far as there is room in the exporter before the time is up."""
        if self._timing is not None:
            self._timing.await_settled(time.monotonic_ns(), min(end, time.monotonic() + interval_join.SETTLE_NS / 1e9))
        self._tell_books(at_once=True)
        is_done = False
        while not is_done:
            with self._lock.held(min(max(end - time.monotonic(), 0.0), TIMEOUT_MAX)) as held:
                is_done = not held or self._read_back(keyed.send_now) or time.monotonic() > end
            if not is_done:
                time.sleep(FLUSH_S)

    def _flush_by_agent(self, end: float, patience_s: float = math.inf) -> tuple[otlp.Delivery, int]:
        """Have the agent send all that has finished, and wait until it is settled, the session exports or time is up.

        Returns what was delivered, and how many spans nobody has decided about yet or are on their way.

        Of an agent that exports, and for `patience_s` takes no notice of what it has not seen, and has nothing to send
        before that, nothing more is awaited. One whose exporter has yet to begin has all the time.
        """
        recorded, asked_ns = self._recorded(), time.monotonic_ns()
        if self._timing is not None:  # the agent waits for device times, too
            self._timing.await_settled(asked_ns, min(end, time.monotonic() + interval_join.SETTLE_NS / 1e9))
        self._tell_books(at_once=True)
        self._membership.tell({"flush": True})
        seen, seen_at = -1, 0.0
        while True:
            progress = self.handover.progress()
            fates = progress.fates
            sent = {fate: fates[fate] for fate in export_place.SENT}
            pending = fates["kept"] - sum(sent.values())
            now, before, seen = time.monotonic(), seen, fates["seen"] + fates["missed"]
            is_awaited = seen != before or pending or self._is_agent_starting()
            seen_at = now if is_awaited else seen_at
            settled = seen >= recorded and not pending and self._are_metrics_settled(asked_ns)
            is_over = now >= end or self.handover.is_here
            if settled or is_over or (seen < recorded and now - seen_at > patience_s):
                found = otlp.Delivery(offered=fates["kept"], pending=pending, settled=settled, **sent)  # type: ignore[arg-type]
                return found, max(recorded - seen, 0) + pending
            time.sleep(FLUSH_S)

    def _is_agent_starting(self) -> bool:
        """Return True where an agent is there that does not export yet what this process records."""
        return not self.handover.is_taken() and self._membership.is_agent_there()

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
