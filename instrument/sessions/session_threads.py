"""The start and end of a session's threads: the exporter, the reader of gauges, and the reader of the recording."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from instrument.clock import Deadline
from instrument.recorder.governor import Budget
from instrument.recorder.recorder import RECORDER, await_first_span
from instrument.runtime.cheap_start import dataclass
from instrument.runtime.faults import FAULTS
from instrument.runtime.threads import Thread, is_server_to_fork, start_unlisted
from instrument.runtime.unpatched import Event
from instrument.sessions.account import SessionDiagnostics

if TYPE_CHECKING:
    from instrument import otlp

READ_INTERVAL_S = 0.2
"""Seconds between two reads of the recording. The ring of each thread must hold the spans of that time."""

BUSY_READ_INTERVAL_S = 0.05
"""Seconds between two reads of the recording while the probes cost more than their budget."""

START_DELAY_S = 0.2
"""Seconds from the first span to the start of the session's threads. Earlier threads would take the GIL from a starting
service."""

TOUCHED_BYTES, AHEAD_BYTES = 4 << 20, 2 << 20
"""Bytes of ring memory to touch at the start, and to touch ahead of the writing threads. A span costs 50 ns more in
untouched memory, because of page faults."""

START_WAIT_S = 1.0
"""Seconds for which `stop` waits for threads that are just starting."""


@dataclass(eq=False)
class SessionThreads:
    """The threads of a session. Its own thread calls `look` repeatedly, and runs only if `is_needed()`.

    `begin_gauges` starts the reading of gauges. `sends()` is True if this process sends to a collector. If `waits`, the
    threads start with the first recorded span. `follow` is called once they run, then `announce` if a span started
    them.
    """

    account: SessionDiagnostics
    budget: Budget
    exporter: otlp.Exporter | None
    waits: bool
    look: Callable[[], object]
    begin_gauges: Callable[[], object]
    is_needed: Callable[[], bool]
    sends: Callable[[], bool]
    follow: Callable[[], None]
    announce: Callable[[], None]

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.stopping = Event()
        self.own: Thread | None = None
        self._begun: Event | None = None
        self.have_begun = self._is_over = False

    def after_fork_in_child(self) -> None:
        """Begin anew, because a forked child has none of its parent's threads."""
        self._begin()

    @property
    def has_met_span(self) -> bool:
        """True if the first span, for which the threads waited, has begun."""
        return self._begun is not None

    def stop(self, deadline: Deadline) -> None:
        """Start no more threads, and wait for the end of the session's own thread."""
        await_first_span(None)
        self.stopping.set()
        if self._begun is not None:
            self._begun.wait(deadline.left_s(START_WAIT_S))  # what has just begun to record is sent, too
        self._is_over = True
        if self.own is not None:
            self.own.join(deadline.left_s())

    def start_when_needed(self) -> None:
        """Start the threads at once, or with the first recorded span if the session `waits` for it.

        Every process of `instrument run` begins a session, but many record no span, such as launchers and helpers. The
        modules that the threads need have been imported before.
        """
        if self.waits:
            await_first_span(self._start_at_first_span)
        else:
            self._start_threads()

    def _start_at_first_span(self) -> None:
        """Start the threads because a first span begins. This delays the service's thread by some 0.1 ms."""
        if is_server_to_fork():
            return  # those of the workers begin there
        has_begun = self._begun = Event()
        rests = Event()

        def start() -> None:
            rests.set()
            self.stopping.wait(START_DELAY_S)
            try:
                FAULTS.attempt("start of threads", self._start_threads)
            finally:
                has_begun.set()
            FAULTS.attempt("board of the run", self.announce)

        try:
            start_unlisted(start, "instrument-start")
            rests.wait(START_DELAY_S)
        except BaseException:
            has_begun.set()
            raise

    def _start_threads(self) -> None:
        if self._is_over or is_server_to_fork():
            return  # the session sends what there is at its end
        self.have_begun = True
        FAULTS.attempt("first touch of pages", lambda: RECORDER.touch_ahead(TOUCHED_BYTES))
        if self.exporter is not None and self.sends():
            self.exporter.start()
        self.begin_gauges()
        self.start()
        self.follow()

    def start(self) -> None:
        """Start the session's own thread, if it is needed and the other threads have started."""
        if self.have_begun and self.is_needed() and self.own is None:
            stopping = self.stopping
            self.own = Thread(self._run, "instrument", lambda: not stopping.is_set())
            self.own.start()

    def _run(self) -> None:
        while not self.stopping.wait(BUSY_READ_INTERVAL_S if self.budget.is_busy else READ_INTERVAL_S):
            try:
                self.look()
                RECORDER.touch_ahead(AHEAD_BYTES)
            except Exception as fault:
                FAULTS.note("export thread", fault)
            self.account.thread_ns = time.thread_time_ns()
