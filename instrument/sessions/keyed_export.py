"""The export of a session whose requests have keys, where there is no agent: as an agent's, by the recording.

Whose a key is, and what a request waited for, is told by all that was recorded, and not by what is kept alone. So the
session reads its recording by the very class by which an agent does. What that needs, numpy among it, is imported
where a session does so, and nowhere else.
"""

from __future__ import annotations

import fcntl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from instrument.errors import ExportError
from instrument.profile.model import Profile
from instrument.recording.claim import FIRST_FD
from instrument.recording.distributions import Metric
from instrument.recording.export_place import BATCHES_LEFT_OUT, MISPLACED, UNLINKED
from instrument.recording.slot_ring import SlotRoom
from instrument.recording.spans import BATCH_KEYS, KEY, Span
from instrument.runtime.lazy import LazyModule

if TYPE_CHECKING:
    from instrument import otlp
    from instrument.otlp.span_queue import Source
else:
    otlp = LazyModule("instrument.otlp")

if TYPE_CHECKING:
    from instrument.otlp.processor.exported import Exported

LOOKS = 20
"""So often at most the recording is read on in one go, by some thousand rows each."""

ROOM_S = 0.02
"""How often it is looked whether there is room for what waits in the recording."""

LAST_LOOKS = 3
"""What is known once all was read decides about what waits for that, and what follows from it."""

UNREAD_S = 1.0
"""The longest that a window waits for all that it has to be read."""


_KEY, _BATCH_KEYS = KEY.encode(), BATCH_KEYS.encode()


def has_keys(profile: Profile) -> bool:
    """Whether a profile tells of keys of requests, or of batches."""
    return any(rule.key is not None or rule.batch is not None for rule in profile.functions)


_TOLD_AT_THE_END = ("unread", UNLINKED, MISPLACED, BATCHES_LEFT_OUT)
"""What is known beside the fates once all was read."""


class KeysMet:
    """Tells whether anything that was recorded bears a key, or is a batch, as it is asked again and again."""

    def __init__(self, find_room: Callable[[], SlotRoom | None]) -> None:
        self._find_room = find_room
        self._until = 0

    def look(self) -> bool:
        """Look through what few rows have beside their numbers, as far as that was not done: a 0.1 ms for 1 MB."""
        room = self._find_room()
        if room is None:
            return False
        used, size = room.used(), len(room.part)
        first = max(self._until if self._until <= used else 0, used - size)
        while first < used:
            at, end = first % size, min(first - first % size + size, used)
            text = bytes(room.part[at : at + end - first])
            if _KEY in text or _BATCH_KEYS in text:
                return True
            first = end
        self._until = used
        return False


class KeyedExport:
    """Reads what this process records, and hands it to the session's exporter. One thread at a time uses it.

    `facts` tell how, where that is not told in the recording for whoever may export it.

    `note_sent` alone may be called by another one meanwhile.
    """

    def __init__(self, exporter: otlp.Exporter, facts: Callable[[], Any] | None = None) -> None:
        self._exporter = exporter
        self._facts = facts
        self._exported: Exported | None = None
        self._fates: Mapping[str, int] = {}
        self.is_over = False
        """Whether the session has ended, and its recording was let go of."""
        self.is_broken = False
        """Whether the recording could not be read."""

    def prepare(self) -> None:
        """Import what is needed, where no fork can come in: a child would be left with half of it."""
        import instrument.otlp.processor.exported  # noqa: F401

    def begin(self, memory_fd: int, *, knows_all: bool = False) -> None:
        """Be ready to read this recording on, from where whoever exported it before has come to. Raises `OSError`.

        It `knows_all` of requests with keys where nothing before had any.
        """
        if self._exported is not None or self.is_over:
            return
        from instrument.otlp.processor.exported import Exported
        from instrument.otlp.processor.keyed_requests import KeyedRequests
        from instrument.recorder.shared_decisions import Decisions

        requests = KeyedRequests()
        try:
            memory = fcntl.fcntl(memory_fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
        except OSError:
            memory = fcntl.fcntl(memory_fd, fcntl.F_DUPFD_CLOEXEC, 3)  # it may not have as many
        self._exported = Exported(
            memory, self._exporter, Decisions(requests.decided), requests, knows_all=knows_all, facts=self._facts
        )
        requests.members[0] = self._exported

    def after_fork_in_child(self) -> None:
        """What is read is the parent's."""
        exported, self._exported, self._fates = self._exported, None, {}
        self.is_over = self.is_broken = False
        if exported is not None:
            exported.after_fork_in_child()

    # ---------------------------------------------------------------- while it records

    def look(self, *, at_once: bool = False, is_last: bool = False, meters: bool = False) -> bool:
        """Read on and offer what is kept, and take metrics where it is time to, or it `meters`.

        What is to be sent `at_once` waits for open requests alone. Returns whether there is more.
        """
        exported, looks = self._exported, 0
        if exported is None:
            return False
        while exported.look(at_once=at_once, is_last=is_last, meters=meters):
            looks += 1
            if looks == LOOKS:
                return True
        return False

    def send_now(self) -> bool:
        """Have the exporter send what has been recorded until now; returns whether all of it was read."""
        exported = self._exported
        if exported is None:
            return True
        has_more = False
        for meters in (False, False, True):  # what waits is known by the second time, what follows from it by the third
            has_more = self.look(at_once=True, meters=meters)
        exported.is_settled()
        return not (has_more or exported.is_behind)

    def unsent(self, spans: Sequence[Span]) -> list[Span]:
        """Those of these spans that neither are sent nor will be; a request that has not ended is kept.

        Raises `ExportError` where what was recorded until now cannot be read, for want of room in the exporter.
        """
        exported, end = self._exported, time.monotonic() + UNREAD_S
        if exported is None:
            return list(spans)
        self.look()
        exported.keep_open(spans)
        while self.look() or exported.is_behind:
            if time.monotonic() > end:
                raise ExportError(
                    f"asked to send {len(spans)} spans of a window, found that the collector has not taken what was "
                    "recorded before them; what the profile's `capture` keeps is sent once it does"
                )
            time.sleep(ROOM_S)
        return exported.unsent(spans)

    def joined(self) -> Sequence[Metric]:
        """The metrics of requests and the batches that served them, as they are now."""
        return [] if self._exported is None else self._exported.joined()

    def note_sent(self, source: Source) -> None:
        """The exporter has sent something of a source, or is about to."""
        exported = self._exported
        if exported is not None and exported.is_of(source):
            exported.note_sent()

    @property
    def fates(self) -> Mapping[str, int]:
        """What has become of what was recorded."""
        return self._fates if self._exported is None else self._exported.fates

    # ---------------------------------------------------------------- the end

    def end(self, end: float) -> bool:
        """The session records no more: offer all that there is by then, while the exporter sends, or tell of more."""
        exported = self._exported
        if exported is None:
            return False
        exported.has_ended = True
        while (self.look() or exported.is_behind) and time.monotonic() < end:
            time.sleep(ROOM_S if exported.is_behind else 0)
        for _ in range(LAST_LOOKS):
            self.look(is_last=True)
        exported.is_settled()
        return not exported.is_over

    def finish(self) -> None:
        """What could be sent was: count the rest, and let go of the recording."""
        exported, self.is_over = self._exported, True
        if exported is None:
            return
        try:
            untold = exported.finish()
            self._fates = Counter({**exported.fates, **{name: untold.get(name, 0) for name in _TOLD_AT_THE_END}})
        finally:
            self.release()

    def send_waiting(self) -> None:
        """Offer what waits for requests, without them: another one exports from here on."""
        if self._exported is not None:
            self._exported.send_waiting()

    def release(self) -> None:
        """Let go of the recording, for another one to go on from here."""
        exported, self._exported = self._exported, None
        if exported is not None:
            exported.close()
