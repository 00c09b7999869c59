"""The metrics that requests tell once they are joined with the batches that served them, for who scrapes a session.

They are those that a collector gets, counted by the same class, of a session that has no agent. Where it exports it
reads its own recording, if requests have keys; else it does so for a scrape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from instrument.profile.model import Capture, Otlp
from instrument.recording.distributions import Metric
from instrument.recording.spans import Origin
from instrument.runtime.faults import FAULTS
from instrument.runtime.lazy import LazyModule
from instrument.sessions.keyed_export import KeyedExport

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp import export_facts
else:
    otlp, export_facts = LazyModule("instrument.otlp"), LazyModule("instrument.otlp.export_facts")

SPANS_PER_REQUEST = 1
"""No request is kept: of each one its own row is enough."""

KEEPS_NONE = Capture(sample=0.0, errors=False)


class JoinedMetrics:
    """Reads a recording of which nothing is exported, from the first scrape on. For one thread at a time."""

    def __init__(self, threads: Callable[[], Mapping[int, str]]) -> None:
        self._threads = threads
        self._reading: KeyedExport | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it reads, or could not."""
        return self._reading is not None

    def prepare(self, origin: Origin, ids: otlp.Ids, start_ns: int) -> None:
        """Import what is needed, while no fork can come in."""
        facts = export_facts.told(
            ids, {}, KEEPS_NONE, SPANS_PER_REQUEST, export_facts.MeteredFacts(start_ns, asks=True)
        )
        # The exporter is never started: nothing is kept, so nothing comes to it.
        reading = KeyedExport(otlp.Exporter(Otlp(), origin, self._threads, detects=False, sends=False), lambda: facts)
        self._reading = reading
        try:
            reading.prepare()
        except Exception:  # numpy is not installed
            reading.is_broken = True
            raise

    def look(self, memory_fd: int) -> None:
        """Read on what was recorded, if it is to be read."""
        reading = self._reading
        if reading is None or reading.is_broken:
            return
        try:
            reading.begin(memory_fd)
            reading.look()
        except Exception as fault:
            reading.is_broken = True
            FAULTS.attempt("end of reading for a scrape", reading.release)
            FAULTS.note("reading of the recording for a scrape", fault)

    def metrics(self, exporting: KeyedExport | None) -> Sequence[Metric]:
        """Return the metrics that are known by what the session is `exporting`, or by its own reading."""
        counting = exporting or self._reading
        return () if counting is None else counting.joined()

    def release(self) -> None:
        """The session has ended, or another process's recording is read: let go of it."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.release()

    def after_fork_in_child(self) -> None:
        """What is read is the parent's."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.after_fork_in_child()
