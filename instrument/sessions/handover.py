"""The handover: who exports what this process records, the agent of its run or the session itself.

A process that has joined an agent leaves it to that one: it reads the recording, and the session has neither a reader
nor an export thread for spans. Without an agent, and where it has gone for good, the session does so: by its reader of
the rings or, where requests have keys, by its recording as an agent would. Where an agent comes again it goes on where
the session stops. A lock on the recording says who does, so there is one at a time, and what is written in it how far
that one has come.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from instrument.recording import export_place
from instrument.recording.export_place import SENT, ExportPlace, Progress
from instrument.recording.meter_place import DAMAGED, MeterPlace, MeterState, read_meter
from instrument.runtime.unpatched import RLock
from instrument.sessions.deadline import Deadline
from instrument.sessions.keyed_export import KeyedExport

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp.metrics import Metrics

ALONE_S, NEGLECTED_S = 2.0, 15.0
"""How long nobody must have exported what this process records before it does so itself: where there is no agent, and
where there is one. Meanwhile spans wait in the recording."""

LOCK_S = 1.0
"""The longest that who is to export a recording waits for the one before to let go of it."""

PATIENCE_S = 0.1

LAST_READ_S = 5.0
"""The longest that a session waits at its begin for the agent to read what the one before it has recorded."""

UNREAD = "spans of the session before this one that its agent had not read"

LOOK_S = 0.005


class Standing(NamedTuple):
    """How far the session has read: the next row of each thread by its native id.

    `taken` and `kept` count rows since it exports. `missed` counts the other rows in all. `held` counts those of
    requests that have not ended.
    `meter` is what it has counted for metrics up to these rows, where it has.
    """

    rows: Mapping[int, int]
    taken: int
    missed: int
    held: int
    kept: int
    meter: Mapping[str, Any] | None = None


class Handover:
    """Decides who exports: the session by its reader (`is_own`), by its recording (`is_read_back`), or the agent.

    `memory` returns the descriptor of the recording, -1 for none. `begin(rows, done, metered)` makes the session read
    and export from `rows`, by the native ids of threads. `done` counts the rows that others have read, and `metered`
    has the metrics up to there. `end()` makes it stop. Both set `is_own` while no other reader is at work. `keyed`
    reads the recording where it `is_keyed()`. Then `begin_back()` and `end_back()` start and stop that, and set
    `is_read_back`.
    """

    def __init__(
        self,
        exporter: otlp.Exporter | None,
        memory: Callable[[], int],
        begin: Callable[[Mapping[int, int], int, MeterState | None], object],
        end: Callable[[], Standing],
        keyed: KeyedExport | None,
        is_keyed: Callable[[], bool],
        begin_back: Callable[[], object],
        end_back: Callable[[], object],
    ) -> None:
        self._exporter = exporter
        self._memory = memory
        self._begin_own = begin
        self._end_own = end
        self._keyed = keyed
        self._is_keyed = is_keyed
        self._begin_back = begin_back
        self._end_back = end_back
        self._place: ExportPlace | None = None
        self._reset()

    def _reset(self) -> None:
        self._lock = RLock()
        self.is_own = True
        self.is_read_back = False
        self.has_agent = False
        """Whether the process is one of a run, whose agent exports what it can read."""
        self.undelivered = 0
        """Spans that were still on their way as the session ended."""
        self._insists = self._is_ending = False
        self._joined = 0
        self._since = 0.0
        self._found = Progress()
        self._fates: dict[str, int] = {}
        self._noting = RLock()
        self._noted: tuple[Standing, Mapping[str, int]] | None = None
        self._counted: Mapping[str, int] = {}
        self._written: Counter[str] = Counter()
        """What of the fates that are written is the session's own, whose losses it tells itself."""

    def after_fork_in_child(self) -> None:
        """The recording is another one, and nobody has looked at it."""
        if self._place is not None:
            self._place.close()
        self._place = None
        self._reset()

    def leave_to_agent(self) -> None:
        """The session begins in a process that has an agent."""
        if self._exporter is not None and self._memory() >= 0:
            self.is_own, self.has_agent = False, True
            self._since = time.monotonic()

    @property
    def is_here(self) -> bool:
        """Whether this process exports, in whatever way."""
        return self.is_own or self.is_read_back

    def read_back(self) -> None:
        """The session begins in a process without an agent, and requests have keys."""
        self.is_own, self.is_read_back = False, True

    def go_over(self, standing: Standing, metered_rows: Mapping[int, int]) -> bool:
        """From here on the session exports by its recording, and no more by its reader. Returns whether that is so.

        What the reader has handed over is still sent, and told of by the session itself. The standing's `meter` is
        what was counted up to the `metered_rows`.
        """
        try:
            place = self._opened()
        except OSError:
            return False
        with closing(place):
            if self.has_agent or self._exporter is None or not place.take():
                return False
            generation, ended_rows = export_place.counted(place)
            rings = export_place.threads(place)
            read = {ring: standing.rows[thread] for ring, thread in rings.items() if thread in standing.rows}
            progress, seen = Progress(generation, read), sum(read.values()) + ended_rows
            progress.fates.update(seen=seen, passed=max(seen - standing.held, 0))
            place.write(progress)
            if standing.meter is not None:
                places = {ring: metered_rows[thread] for ring, thread in rings.items() if thread in metered_rows}
                self._write_meter(place, self._exporter, standing.meter, places)
            self.is_own, self.is_read_back = False, True
        return True

    def look(self, joined: int) -> None:
        """Take over where nobody exports for long; give back where there is another agent. For one thread, now and
        then. `joined` is the number of the connection to an agent, 0 for none.
        """
        if not self.has_agent:
            return
        if self.is_here:
            if joined not in (0, self._joined) and not self._insists:
                self.give_back()
            return
        self._joined = joined  # of an agent that did not export nothing more is expected
        if self.is_taken():
            self._since = time.monotonic()
        elif self._insists or time.monotonic() - self._since > (NEGLECTED_S if joined else ALONE_S):
            self.take_over()

    def insist(self) -> bool:
        """Export here from now on, whoever may do so; the agent has been told. Returns whether that is so."""
        self._insists = True
        return self.take_over()

    def _opened(self) -> ExportPlace:
        memory = self._memory()
        if memory < 0:
            raise OSError("the service has closed the recording")
        return ExportPlace(memory)

    def is_taken(self) -> bool:
        """Return True where any reader exports what is recorded."""
        try:
            with closing(self._opened()) as place:
                return place.is_taken()
        except OSError:
            return False

    def await_reader(self, recorded: int, *, metered: bool, is_left: Callable[[], bool]) -> int:
        """Wait until the agent has read so many rows of a session that has ended: they go as the next one begins.

        Where it `metered`, also until their metrics were taken. `is_left` tells whether there is an agent that it has
        left them to, which may not have come to them yet. Returns how many rows have not been read by then.
        """
        end = time.monotonic() + LAST_READ_S
        while True:
            is_taken, found = self.is_taken(), self.progress()
            left = recorded - found.fates["seen"] - found.fates["missed"]
            awaits_metrics = metered and recorded > 0 and not found.is_told and self._metered_rows() < recorded
            if found.is_told or (left <= 0 and not awaits_metrics):
                return 0
            if not is_taken and (found.generation or not is_left()):
                return max(left, 0) if found.generation else 0
            if time.monotonic() > end:
                return max(left, 0)
            time.sleep(LOOK_S)

    def _metered_rows(self) -> int:
        """Up to how many rows of what is recorded now metrics were taken, by whoever does so."""
        try:
            with closing(self._opened()) as place:
                state, (generation, ended_rows) = read_meter(place), export_place.counted(place)
        except OSError:
            return 0
        return ended_rows + sum(state.places.values()) if state is not None and state.generation == generation else 0

    def progress(self) -> Progress:
        """How far the export of this session has come, where another process does it."""
        try:
            with closing(self._opened()) as place:
                return _of_session(place)
        except OSError:
            return Progress()

    def take_over(self) -> bool:
        """Export from where whoever did so before has come to. Returns whether the session exports now."""
        with self._lock:
            if self._is_ending:
                return self.is_here
            return self._take_over(Deadline(LOCK_S), by_recording=self._is_keyed())

    def end(self, deadline: Deadline) -> None:
        """The session is about to end: nobody but `take_over_at_end` changes anything from now on.

        Not for one who holds the session's lock, for which others may be waiting here; such a one is not held up long.
        """
        self._is_ending = True
        if self._lock.acquire(timeout=deadline.left_s(2 * LOCK_S)):
            self._lock.release()

    def take_over_at_end(self, deadline: Deadline) -> None:
        """Export what nobody exports, after `end`."""
        if self._lock.acquire(timeout=deadline.left_s(LOCK_S)):
            try:
                self._take_over(deadline, by_recording=False)
            finally:
                self._lock.release()

    def is_left(self) -> bool:
        """Whether somebody has exported what is recorded, and nobody does so now."""
        try:
            with closing(self._opened()) as place:
                return _of_session(place).generation > 0 and not place.is_taken()
        except OSError:
            return False

    def read_by_rings(self) -> None:
        """The recording cannot be read: have the session go on by its reader. For one who holds the session's lock."""
        if self._lock.acquire(timeout=LOCK_S):
            try:
                self.is_read_back = False
                self._take_over(Deadline(LOCK_S), by_recording=False)
            finally:
                self._lock.release()

    def _take_over(self, deadline: Deadline, *, by_recording: bool) -> bool:
        if self.is_here:
            return True
        try:
            place = self._opened()
        except OSError:
            place = None  # nobody else can read it either
        deadline = Deadline(deadline.left_s(LOCK_S))
        while place is not None and not place.take():
            if not deadline.left_s():
                place.close()
                return False
            time.sleep(LOOK_S)
        if place is not None and by_recording:
            place.close()
            self._begin_back()
            return True
        found = self._found = Progress() if place is None else _of_session(place)
        rows: Mapping[int, int] = {}
        if place is not None:
            threads = export_place.threads(place)
            rows = {threads[ring]: row for ring, row in found.places.items() if ring in threads}
        fates = self._fates = dict(found.fates)
        fates["unanswered"] += found.unanswered
        fates["abandoned"] += found.unsettled - found.unanswered
        fates["kept"], fates["sending"] = sum(fates[fate] for fate in SENT), 0
        export_place.give_up(fates)
        self._noted, self._place = None, place
        if place is not None:
            generation, _ = export_place.counted(place)
            place.write(Progress(generation, found.places, fates, found.details, found.before))
        self._counted = dict(self._exporter.counts()) if self._exporter is not None else {}
        metered = None if place is None else _metered_of_session(place)
        self._begin_own(rows, found.fates["seen"] + found.fates["missed"], metered)
        return True

    def give_back(self) -> None:
        """Have the agent export from here on."""
        with self._lock:
            place, exporter = self._place, self._exporter
            if self.is_read_back and not self._is_ending:
                self._end_back()
                self._since = time.monotonic()
                return
            if not self.is_own or self._is_ending or place is None or exporter is None:
                return
            standing = self._end_own()
            with self._noting:
                self._place = None
                self._written.update(self._write(place, exporter, standing))
            place.close()
            self._since = time.monotonic()

    def close(self, standing: Standing | None = None) -> None:
        """The session has ended: let go of the recording, which a later one of this process records into, too.

        Where that is known, what is written is how far it has come.
        """
        with self._noting:
            place, self._place = self._place, None
            if place is None:
                return
            try:
                if standing is not None and self._exporter is not None and self.is_own:
                    own = self._write(place, self._exporter, standing, is_told=True)
                    self._written.update(own)
                    for fate, count in own.items():  # what is written is of both, and told without its own
                        self._fates[fate] += count
            finally:
                place.close()

    def note(self, standing: Standing) -> None:
        """Write how far the session has come, before it sends what it has read: where it is killed another goes on."""
        place, exporter = self._place, self._exporter
        if place is None or exporter is None:
            return
        noted = standing, exporter.counts()
        if noted != self._noted:
            with self._noting, suppress(OSError):  # the service has closed it
                self._noted = noted
                self._write(place, exporter, standing)

    def note_sent(self) -> None:
        """Write which spans are about to be sent, and what has become of those that were. By the thread that sends."""
        if not self._noting.acquire(timeout=PATIENCE_S):
            return  # a signal handler has interrupted who writes, and waits for what is being sent
        try:
            place, exporter, noted = self._place, self._exporter, self._noted
            if place is not None and exporter is not None and noted is not None:
                with suppress(OSError):
                    self._write(place, exporter, noted[0])
        finally:
            self._noting.release()

    def _write(
        self, place: ExportPlace, exporter: otlp.Exporter, standing: Standing, *, is_told: bool = False
    ) -> Counter[str]:
        """Write how far the session has come; returns the fates that are its own."""
        rings = export_place.threads(place)
        places = {ring: standing.rows[thread] for ring, thread in rings.items() if thread in standing.rows}
        fates, sent = dict(self._fates), exporter.counts()
        own = Counter({fate: sent[fate] - self._counted[fate] for fate in (*SENT, "intervals")})
        own["missed"] = standing.missed - self._written["missed"]  # which tells of all times that it has read
        for fate, count in own.items():
            fates[fate] += count
        on_their_way = standing.kept + own["intervals"] - sum(own[fate] for fate in SENT)
        fates["kept"] = sum(fates[fate] for fate in SENT) + max(on_their_way, 0)
        fates["seen"] = fates.get("seen", 0) + standing.taken
        fates["sending"] = exporter.own.counts["sending"]
        known = sum(fates[fate] for fate in ("kept", "beyond", "unanswered", "abandoned"))
        fates["passed"] = max(fates["seen"] + fates["intervals"] - known - standing.held, 0)
        generation, _ = export_place.counted(place)
        place.write(Progress(generation, places, fates, self._found.details, self._found.before, is_told))
        if standing.meter is not None:
            self._write_meter(place, exporter, standing.meter, places)
        return own

    def _write_meter(
        self, place: ExportPlace, exporter: otlp.Exporter, meter: Mapping[str, Any], places: Mapping[int, int]
    ) -> None:
        generation, _ = export_place.counted(place)
        told = exporter.metrics.state()
        MeterPlace(place).write(MeterState(generation, exporter.metrics.snapshots.delivered_ns, meter, told, places))

    def note_meter(self, meter: Mapping[str, Any], rows: Mapping[int, int]) -> None:
        """Note what was counted for metrics up to these rows: another one may go on from there."""
        place, exporter = self._place, self._exporter
        if place is not None and exporter is not None and self.is_own:
            rings = export_place.threads(place)
            places = {ring: rows[thread] for ring, thread in rings.items() if thread in rows}
            self._write_meter(place, exporter, meter, places)

    def metered(self) -> MeterState | None:
        """What was counted and told of metrics where another process does so, by the native ids of threads."""
        try:
            with closing(self._opened()) as place:
                return _metered_of_session(place)
        except OSError:
            return None

    def metrics(self) -> Metrics | None:
        """What became of metrics, whoever tells them; None where nobody does."""
        exporter = self._exporter
        if exporter is None or self.is_own:
            return None if exporter is None else exporter.metrics
        from instrument.otlp.metrics import asked_of_metrics

        found, state = exporter.new_metrics(asked_of_metrics()), self.metered()
        if state is not None:
            with suppress(*DAMAGED):
                found.go_on(state.told)
        return found

    def losses(self) -> Mapping[str, int]:
        """What was lost while the session did not export by its reader."""
        if self.is_here:
            fates = self._fates if self.is_own or self._keyed is None else self._keyed.fates
        else:
            fates = self.progress().fates if self.has_agent else {}
        found = dict(export_place.told({fate: count - self._written[fate] for fate, count in fates.items()}))
        if self.undelivered:
            found["spans on their way by the agent of the run, which tells of those that it loses"] = self.undelivered
        return found


def _metered_of_session(place: ExportPlace) -> MeterState | None:
    """What was counted and told of metrics of what is recorded now, by the native ids of threads."""
    found = read_meter(place)
    if found is None or found.generation != export_place.counted(place)[0]:
        return None
    threads = export_place.threads(place)
    return replace(found, places={threads[ring]: row for ring, row in found.places.items() if ring in threads})


def _of_session(place: ExportPlace) -> Progress:
    """How far the export of what is recorded now has come: what is written may be of an earlier session."""
    found = place.read()
    return found if found.generation == export_place.counted(place)[0] else Progress(before=found.untold())
