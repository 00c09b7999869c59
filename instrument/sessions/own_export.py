"""The export of a session where there is no agent: it reads its own recording with the classes of the agent.

What that needs, numpy among it, is imported where a session does so, and nowhere else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instrument.errors import ExportError
from instrument.recording.spans import Span
from instrument.runtime.cheap_start import LazyModule

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp.exposition import Metered
    from instrument.otlp.recording_export import ExportedRun, RecordingExport
    from instrument.otlp.span_queue import Source
else:
    otlp = LazyModule("instrument.otlp")

LOOKS = 20
"""The most times that the recording is read on in one go, by some thousand rows each."""

ROOM_S = 0.02
"""Seconds between two looks whether the exporter has room for what waits in the recording."""

UNREAD_S = 1.0
"""Seconds for which a window waits at most for all that it has to be read."""


class OwnExport:
    """Reads what this process records, and hands it to the session's exporter. One thread at a time uses it.

    Without `sends` it counts metrics for scrapes alone. `facts` say how, where the recording does not. Another thread
    may call `note_sent` meanwhile, and nothing else.
    """

    def __init__(self, exporter: otlp.Exporter, facts: Callable[[], Any] | None = None, *, sends: bool = True) -> None:
        self._exporter = exporter
        exporter.settled = self.note_sent
        self._facts = facts
        self.sends = sends
        self._exported: RecordingExport | None = None
        self._run: ExportedRun | None = None
        self._fates: Mapping[str, int] = {}
        self.is_over = False
        """True where the session has ended, and its recording was released."""
        self.is_broken = False
        """True where the recording could not be read."""

    def prepare(self) -> None:
        """Import what is needed, where no fork can come in: a child would be left with half of it."""
        import instrument.otlp.recording_export  # noqa: F401

    def begin(self, memory_fd: int) -> None:
        """Prepare to read this recording, from the row at which its last exporter stopped. Raises `OSError`."""
        if self._exported is not None or self.is_over:
            return
        from instrument.otlp.recording_export import ExportedRun, RecordingExport

        self._exported = RecordingExport(memory_fd, self._exporter, sends=self.sends, facts=self._facts)
        self._run = ExportedRun({0: self._exported})

    def after_fork_in_child(self) -> None:
        """Release the parent's recording."""
        exported, self._exported, self._run, self._fates = self._exported, None, None, {}
        self.is_over = self.is_broken = False
        if exported is not None:
            exported.after_fork_in_child()

    # ---------------------------------------------------------------- while it records

    def look(self, *, at_once: bool = False, is_last: bool = False, meters: bool = False) -> bool:
        """Read on, offer what is kept, and take metrics where it is time to, or it `meters`.

        Requests that have ended are settled `at_once`, the last time all. Returns True where there is more.
        """
        exported, run = self._exported, self._run
        if exported is None or run is None:
            return False
        for _ in range(LOOKS):
            metered = exported if meters else None
            if not run.look(_attempt, at_once=at_once, is_last=is_last, metered=metered):
                return False
        return True

    def send_now(self) -> bool:
        """Have the exporter send what has been recorded until now; returns True where all of it was read."""
        exported = self._exported
        if exported is None:
            return True
        has_more = self.look(at_once=True, meters=True)
        exported.is_settled()
        return not (has_more or exported.is_behind or exported.reading is None)

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Return the spans that neither are sent nor will be; a request that is undecided is kept.

        Raises `ExportError` where what was recorded until now cannot be read, for want of room in the exporter.
        """
        exported, end = self._exported, time.monotonic() + UNREAD_S
        if exported is None:
            return list(spans)
        exported.keep_open(spans)
        while self.look(at_once=True) or exported.is_behind:
            if time.monotonic() > end:
                raise ExportError(
                    f"{len(spans)} spans of a window were not sent, because the collector has not accepted earlier "
                    "ones; those that `capture` keeps are sent later"
                )
            time.sleep(ROOM_S)
        return exported.unsent(spans)

    def metered(self) -> Metered | None:
        """Return all metrics for a scrape, as they were read last."""
        return None if self._exported is None else self._exported.metered()

    def before_scrape(self) -> None:
        """Note what has ended, before it is read on for a scrape."""
        if self._exported is not None:
            self._exported.before_scrape()

    def note_sent(self, source: Source) -> None:
        """Note that the exporter has sent something of a source, or is about to."""
        exported = self._exported
        if exported is not None and exported.is_of(source):
            exported.note_sent()

    @property
    def fates(self) -> Mapping[str, int]:
        """The fates of what was recorded."""
        return self._fates if self._exported is None else self._exported.fates

    # ---------------------------------------------------------------- the end

    def end(self, end: float) -> bool:
        """Offer all that there is by `end`, on the monotonic clock: the session records no more.

        Returns True where there is more than the exporter had room for.
        """
        exported = self._exported
        if exported is None:
            return False
        exported.has_ended = True
        while (self.look() or exported.is_behind) and time.monotonic() < end:
            time.sleep(ROOM_S if exported.is_behind else 0)
        self.look(is_last=True)
        exported.is_settled()
        return not exported.is_over

    def finish(self) -> None:
        """Count what could not be sent, and release the recording."""
        exported, self.is_over = self._exported, True
        if exported is None:
            return
        try:
            unread = exported.finish().get("unread", 0)
            self._fates = Counter({**exported.fates, "unread": unread})
        finally:
            self.release()

    def release(self) -> None:
        """Release the recording, for another session to go on from here."""
        exported, self._exported, self._run = self._exported, None, None
        if exported is not None:
            exported.close()


def _attempt(_: int, action: Callable[[], object]) -> None:
    """Call the action on the recording; the caller handles its exceptions."""
    action()
