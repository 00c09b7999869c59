"""The handover: who exports what this process records, the agent of its run or the session itself.

A process that has joined an agent leaves it to that one: it reads the recording, and the session has neither a reader
nor an export thread. Without an agent, and where it has gone for good, the session reads its own recording, by the same
classes. Where an agent comes again it goes on where the session stops. A lock on the recording says who does, so there
is one at a time, and what is written in it how far that one has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from instrument.recording import export_place
from instrument.recording.export_place import ExportPlace, Progress
from instrument.recording.meter_place import DAMAGED, MeterState, read_meter
from instrument.runtime.unpatched import RLock
from instrument.sessions.deadline import Deadline
from instrument.sessions.own_export import OwnExport

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp.metrics import Metrics

ALONE_S, NEGLECTED_S = 2.0, 15.0
"""Seconds without anybody who exports what this process records after which it does so itself: where there is no agent,
and where there is one. Meanwhile spans wait in the recording."""

LOCK_S = 1.0
"""The longest that who is to export a recording waits for the one before to let go of it."""

LAST_READ_S = 5.0
"""The longest that a session waits at its begin for the agent to read what the one before it has recorded."""

UNREAD = "spans of the session before this one that its agent had not read"

LOOK_S = 0.005


class Handover:
    """Decides who exports: the session (`is_here`), or the agent.

    `memory` returns the descriptor of the recording, -1 for none. `own` reads the recording in this process.
    `begin_here()` and `end_here()` start and stop that, and set `is_here`.
    """

    def __init__(
        self,
        exporter: otlp.Exporter | None,
        memory: Callable[[], int],
        own: OwnExport | None,
        begin_here: Callable[[], object],
        end_here: Callable[[], object],
    ) -> None:
        self._exporter = exporter
        self._memory = memory
        self._own = own
        self._begin_here = begin_here
        self._end_here = end_here
        self._reset()

    def _reset(self) -> None:
        self._lock = RLock()
        self.is_here = True
        """True where this process exports."""
        self.has_agent = False
        """True where the process is one of a run, whose agent exports what it can read."""
        self.undelivered = 0
        """Spans that were still on their way as the session ended."""
        self._insists = self._is_ending = False
        self._joined = 0
        self._since = 0.0

    def after_fork_in_child(self) -> None:
        """Begin anew: the recording is another one, and nobody has looked at it."""
        self._reset()

    def leave_to_agent(self) -> None:
        """The session begins in a process that has an agent."""
        if self._exporter is not None and self._memory() >= 0:
            self.is_here, self.has_agent = False, True
            self._since = time.monotonic()

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
        """Export here from now on, whoever may do so; the agent has been told. Returns True where that is so."""
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
        """Export from where whoever did so before has come to. Returns True where the session exports now."""
        with self._lock:
            if self._is_ending:
                return self.is_here
            return self._take_over(Deadline(LOCK_S))

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
                self._take_over(deadline)
            finally:
                self._lock.release()

    def is_left(self) -> bool:
        """Return True where somebody has exported what is recorded, and nobody does so now."""
        try:
            with closing(self._opened()) as place:
                return _of_session(place).generation > 0 and not place.is_taken()
        except OSError:
            return False

    def _take_over(self, deadline: Deadline) -> bool:
        if self.is_here:
            return True
        try:
            with closing(self._opened()) as place:
                deadline = Deadline(deadline.left_s(LOCK_S))
                while not place.take():
                    if not deadline.left_s():
                        return False
                    time.sleep(LOOK_S)
        except OSError:
            return False  # nobody can read it
        self._begin_here()
        return True

    def give_back(self) -> None:
        """Have the agent export from here on."""
        with self._lock:
            if self.is_here and not self._is_ending:
                self._end_here()
                self._since = time.monotonic()

    def metered(self) -> MeterState | None:
        """What was counted and told of metrics where another process does so, by the native ids of threads."""
        try:
            with closing(self._opened()) as place:
                return _metered_of_session(place)
        except OSError:
            return None

    def metrics(self) -> Metrics | None:
        """Return the state of the metrics on their way, whoever sends them; None where nobody does."""
        exporter = self._exporter
        if exporter is None:
            return None
        from instrument.otlp.metrics import asked_of_metrics

        found, state = exporter.new_metrics(asked_of_metrics()), self.metered()
        if state is not None:
            with suppress(*DAMAGED):
                found.go_on(state.told)
        return found

    def losses(self) -> Mapping[str, int]:
        """Return the losses of the export, whoever exports."""
        if self.is_here:
            fates = {} if self._own is None else self._own.fates
        else:
            fates = self.progress().fates if self.has_agent else {}
        found = dict(export_place.told(fates))
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
