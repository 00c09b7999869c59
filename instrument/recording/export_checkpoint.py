"""The checkpoint of an export, written into the exported recording so that another exporter can continue from it.

Only one process exports at a time, and locks the recording. The checkpoint has one state for the export of spans, and
one for the export of metrics. Each state is stored twice, so one copy is valid even if the exporter is killed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from struct import Struct
from typing import Any

from instrument.recording import memory_layout as layout
from instrument.recording.memory_layout import EXPORT, Claim, RecordingHead
from instrument.runtime.lazy_imports import dataclass, field

EXPORT_COUNTERS = (
    "seen", "intervals", "missed", "untimed",
    "passed", "beyond", "kept", "sending", "exported", "rejected", "failed", "dropped", "unanswered", "abandoned",
    "derived lost", "deriving", "unqueued", "queueing", "unwritten", "unstored",
)  # fmt: skip
"""The counters of a recording's spans by fate.

- `seen`, `missed`: spans that were read, and spans that were overwritten before they were read
- `intervals`: device intervals of kept spans; a collector gets each interval as a span
- `passed`: spans that the tail sampler dropped
- `beyond`: spans beyond a limit
- `kept`: all other spans that were read
- `sending`: kept spans in the current OTLP request
- `exported`: kept spans that a collector accepted, or that are in a complete file
- `rejected`, `failed`, `dropped`: kept spans that no collector has accepted
- `unwritten`, `unstored`: spans in no complete file, and lost rows of a dataset
- `untimed`: exported spans without their device times
- `unanswered`: spans in an OTLP request that had no answer when the exporter was killed
- `abandoned`: the remaining spans that were read, but neither sent nor dropped, when the exporter was killed
- `derived lost`: lost spans of stages such as queue and prefill
- `deriving`: spans of stages for which it is not yet known whether they are lost
- `unqueued`: requests whose queue time is missing in the metrics
- `queueing`: requests whose queue time may still be lost
"""

SENT = ("exported", "rejected", "failed", "dropped")
"""The counters for the final fate of a kept span in an export to a collector."""

ENDS = (*SENT, "unwritten")
"""The counters for the final fate of a kept span in any export."""

UNTIMED = "spans exported before their device times were known"
"""The words with which reports name `untimed` spans."""

UNREAD = "spans that nobody had read as their export ended"

DERIVED_LOST, UNQUEUED = "derived lost", "unqueued"
OPEN_FATES = {"deriving": DERIVED_LOST, "queueing": UNQUEUED}
"""A map from the counters of possible losses to the counters of final losses."""

METRICS_LOST = "metrics lost"
"""The counter of metric data points that a collector did not accept."""

DAMAGED = (TypeError, ValueError, KeyError, AttributeError, OverflowError)
"""The exceptions that reading a damaged checkpoint may raise."""

LARGEST_BYTES = 16 << 20
"""The maximum size in bytes of the metrics' state after decompression."""


@dataclass(slots=True)
class Progress:
    """The state of the export of one session's spans.

    - `generation`: the number of the session
    - `places`: the next row to read of each ring, by the ring's number
    - `settled_ns`: the monotonic time up to which ended requests were kept or dropped
    - `fates`: the counts of this session's spans, by `EXPORT_COUNTERS`
    - `before`: the unreported counts of earlier sessions
    - `is_reported`: True once the losses of this session are reported
    """

    generation: int = 0
    places: dict[int, int] = field(default_factory=dict)
    fates: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EXPORT_COUNTERS, 0))
    settled_ns: int = 0
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EXPORT_COUNTERS, 0))
    is_reported: bool = False

    @property
    def unsettled_spans(self) -> int:
        """The number of spans that the exporter has read, but neither sent nor dropped."""
        decided = sum(self.fates[name] for name in ("passed", "beyond", "unanswered", "abandoned", *ENDS))
        return max(self.fates["seen"] + self.fates["intervals"] - decided, 0)

    @property
    def unanswered_spans(self) -> int:
        """The number of spans in the last OTLP request, if the collector has not answered it."""
        return min(self.fates["sending"], self.unsettled_spans)

    def unreported_counts(self) -> dict[str, int]:
        if self.is_reported:
            return dict(self.before)
        fates = {fate: count + self.before[fate] for fate, count in self.fates.items()}
        fates["unanswered"] += self.unanswered_spans
        fates["abandoned"] += self.unsettled_spans - self.unanswered_spans
        fates["sending"] = 0
        fates["kept"] = sum(fates[fate] for fate in ENDS)
        count_undecided_as_lost(fates)
        return fates


def count_undecided_as_lost(fates: MutableMapping[str, int]) -> None:
    for fate, lost in OPEN_FATES.items():
        fates[lost] += fates[fate]
        fates[fate] = 0


@dataclass(frozen=True, slots=True)
class MeterState:
    """The state of the export of one session's metrics.

    - `settled_ns`: the monotonic time up to which metrics have been sent or dropped
    - `places`: the next row to read of each ring, by the ring's number
    - `meter`: the counts from the rows before `places`
    - `delivered`: the values that the collector has accepted, and the losses
    """

    generation: int
    settled_ns: int
    meter: Mapping[str, Any]
    delivered: Mapping[str, Any]
    places: Mapping[int, int]


class _TwoCopies:
    """A text with two copies in a file. Each write replaces the older copy. If a writer is killed, the other copy is
    valid."""

    _HEAD = Struct("<QII")

    def __init__(self, claim: Claim, at: int, size_bytes: int) -> None:
        self._claim, self._at, self._room = claim, at, size_bytes // 2
        self._turn = -1

    def read_newest_copy(self) -> bytes:
        newest, newest_turn = b"", 0
        for copy in (0, 1):
            data = os.pread(self._claim.fileno(), self._room, self._at + copy * self._room)
            turn, crc, length = self._HEAD.unpack_from(data) if len(data) == self._room else (0, 0, 0)
            text = data[self._HEAD.size :][:length]
            if turn > newest_turn and zlib.crc32(text, turn & 0xFFFFFFFF) == crc:
                newest, newest_turn = text, turn
        self._turn = max(self._turn, newest_turn)  # another thread may have written meanwhile
        return newest

    def write_older_copy(self, text: bytes) -> bool:
        if self._turn < 0:
            self.read_newest_copy()
        if self._HEAD.size + len(text) > self._room:
            return False
        self._turn += 1
        head = self._HEAD.pack(self._turn, zlib.crc32(text, self._turn & 0xFFFFFFFF), len(text))
        with suppress(OSError):
            os.pwrite(self._claim.fileno(), head + text, self._at + self._turn % 2 * self._room)
        return True


class ExportCheckpoint(Claim):
    """The reader and writer of the checkpoint in a recording.

    Raises `OSError` for a file that cannot be written or is no recording.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(fd, EXPORT)
        at = os.fstat(self._fd).st_size - layout.EXPORT_BYTES
        self._progress = _TwoCopies(self, at, layout.EXPORT_BYTES)
        self._meter = _TwoCopies(self, at - layout.METER_BYTES, layout.METER_BYTES)

    def read_progress(self) -> Progress:
        """Return the checkpoint of the spans. It is empty if the recording was never exported."""
        try:
            return Progress(**_decode_checkpoint(self._progress.read_newest_copy()))
        except DAMAGED:
            return Progress()

    def write_progress(self, progress: Progress) -> None:
        self._progress.write_older_copy(_encode_checkpoint(progress))

    def read_meter_state(self) -> MeterState | None:
        try:
            return MeterState(
                **_decode_checkpoint(zlib.decompressobj().decompress(self._meter.read_newest_copy(), LARGEST_BYTES))
            )
        except (zlib.error, RecursionError, *DAMAGED):
            return None

    def write_meter_state(self, state: MeterState) -> bool:
        return self._meter.write_older_copy(zlib.compress(_encode_checkpoint(state), 1))

    def count_unread_rows(self) -> int:
        progress, head = self.read_progress(), RecordingHead(self.fileno())
        is_of_now = progress.generation == head.generation
        if is_of_now and progress.is_reported:
            return 0
        recorded = sum(ring.head for ring in head.read_rings() if ring.thread_id) + head.header_number("ended_rows")
        return max(recorded - (progress.fates["seen"] + progress.fates["missed"] if is_of_now else 0), 0)


def _encode_checkpoint(state: Progress | MeterState) -> bytes:
    facts = {name: getattr(state, name) for name in state.__slots__} | {"places": [*state.places.items()]}
    return json.dumps(facts, separators=(",", ":"), default=int).encode()


def _decode_checkpoint(text: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(text)
    return {**facts, "places": {int(ring): int(row) for ring, row in facts["places"]}}


def losses_by_name(fates: Mapping[str, int]) -> Mapping[str, int]:
    return {name: fates[fate] for name, fate in _FATE_BY_LOSS.items() if fates.get(fate)}


_FATE_BY_LOSS = {
    "spans rejected by the OTLP export": "rejected",
    "spans failed by the OTLP export": "failed",
    "spans dropped by the OTLP export": "dropped",
    "spans overwritten before the export read them": "missed",
    "spans beyond limits.spans_per_request, or beyond 200,000 that wait": "beyond",
    "spans sent to a collector that did not confirm them": "unanswered",
    "spans that were read but not sent when the exporter ended": "abandoned",
    UNTIMED: "untimed",
    "spans that may not have been sent when an agent was killed": "perhaps",
    UNREAD: "unread",
    "points of metrics that the collector did not accept": METRICS_LOST,
    "spans of queue, prefill, decode and stalls lost by the OTLP export": DERIVED_LOST,
    "spans that could not be written to files": "unwritten",
    "rows of the dataset that were not written": "unstored",
    "requests whose time in the queue is missing in the metrics": UNQUEUED,
}
"""The counter for each loss, by the loss's name in reports."""

NO_LOSSES = {name: 0 for name, fate in _FATE_BY_LOSS.items() if fate in (*ENDS[1:], "missed", "unstored")}
"""The usual losses of an export, all 0. They are in the metrics from the start, so that alerts can see an increase."""
