"""The export state of a recording, which its exporter writes into it so that the next exporter can continue.

One process at a time exports: it has a lock on the recording, which the system releases as that process ends. The state
has two copies, written in turns, so that an exporter killed while it writes leaves the earlier copy.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from instrument.recording import memory_layout as layout
from instrument.recording.claim import EXPORT, Claim
from instrument.runtime.cheap_start import dataclass, field

EXPORT_COUNTERS = (
    "seen", "intervals", "missed", "untimed",
    "passed", "beyond", "kept", "sending", "exported", "rejected", "failed", "dropped", "unanswered", "abandoned",
    "derived lost", "deriving", "unqueued", "queueing",
)  # fmt: skip
"""The counters of a recording's spans by their fate. `seen` spans were read, `missed` ones overwritten before that.
The tail sampler has `passed` over some seen spans, others were `beyond` its limits, and it `kept` the rest. Device
`intervals` of kept spans count, too: a collector gets them as spans. A kept span is `exported`, `rejected`, `failed`,
`dropped`, waiting, or in the batch that is `sending` now. `untimed` spans were exported before their device times came.
If the exporter is killed, the spans it was sending are `unanswered`: the collector may have them. `abandoned` spans had
not been sent by then, or belong to requests that had not ended as their process did.

The others count no recorded spans: lost spans of stages, requests without their time in the queue, and those of both
whose fate is not known yet, as in `OPEN_FATES`."""

SENT = ("exported", "rejected", "failed", "dropped")
"""The fates of kept spans."""

UNTIMED = "spans exported before their device times were known"
"""The note on `untimed` spans."""

UNREAD = "spans that nobody had read as their export ended"

DERIVED_LOST, UNQUEUED = "derived lost", "unqueued"
OPEN_FATES = {"deriving": DERIVED_LOST, "queueing": UNQUEUED}
"""The final counter of each undecided one if the exporter is killed."""

METRICS_LOST = "metrics lost"
"""The counter of metric points that the collector did not take, in addition to the fates of spans."""

_HEAD = struct.Struct(f"<QQQQQQ{2 * len(EXPORT_COUNTERS)}Q")
_PLACE = struct.Struct("<QQ")
_SLOT_BYTES = layout.EXPORT_BYTES // 2
_MOST_PLACES = (_SLOT_BYTES - _HEAD.size) // _PLACE.size


@dataclass(slots=True)
class Progress:
    """The export state of one generation of a recording. `places` is the next row of each ring, by its number.

    Requests that had ended by `settled_ns`, on the monotonic clock, are settled. `before` counts unreported spans of
    earlier generations by fate. `is_told` is True if this generation's have been reported.
    """

    generation: int = 0
    places: dict[int, int] = field(default_factory=dict)
    fates: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EXPORT_COUNTERS, 0))
    settled_ns: int = 0
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EXPORT_COUNTERS, 0))
    is_told: bool = False

    @property
    def unsettled(self) -> int:
        """Return the number of spans that were read and whose fate is not known."""
        decided = sum(self.fates[name] for name in ("passed", "beyond", "unanswered", "abandoned", *SENT))
        return max(self.fates["seen"] + self.fates["intervals"] - decided, 0)

    @property
    def unanswered(self) -> int:
        """Return the number of spans in the batch that was being sent."""
        return min(self.fates["sending"], self.unsettled)

    def untold(self) -> dict[str, int]:
        """Return all unreported fates, after the exporter has ended."""
        if self.is_told:
            return dict(self.before)
        fates = {fate: count + self.before[fate] for fate, count in self.fates.items()}
        fates["unanswered"] += self.unanswered
        fates["abandoned"] += self.unsettled - self.unanswered
        fates["sending"] = 0
        fates["kept"] = sum(fates[fate] for fate in SENT)
        give_up(fates)
        return fates


def give_up(fates: MutableMapping[str, int]) -> None:
    """Count the undecided ones as lost: nobody will decide them any more."""
    for fate, lost in OPEN_FATES.items():
        fates[lost] += fates[fate]
        fates[fate] = 0


class ExportCheckpoint(Claim):
    """The reader and writer of a recording's export state. Raises `OSError` for a file that cannot be written."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, EXPORT)
        self._at = os.fstat(self._fd).st_size - layout.EXPORT_BYTES
        self._turn = 0

    def read(self) -> Progress:
        """Return the last written state, an empty one if nobody has exported the recording."""
        newest, newest_state = 0, Progress()
        for turn in (0, 1):
            data = os.pread(self.fileno(), _SLOT_BYTES, self._at + turn * _SLOT_BYTES)
            number, progress = _unpacked(data)
            if number > newest:
                newest, newest_state, self._turn = number, progress, number
        return newest_state

    def write(self, progress: Progress) -> None:
        """Write the state over the older of the two copies."""
        self._turn += 1
        data = _packed(self._turn, progress)
        with suppress(OSError):
            os.pwrite(self.fileno(), data, self._at + self._turn % 2 * _SLOT_BYTES)


def generation_of(fd: int) -> int:
    """Return the generation of a recording now, 0 if it cannot be read."""
    try:
        return _number(os.pread(fd, layout.HEADER.size, 0), layout.HEADER, "generation")
    except (OSError, struct.error):
        return 0


def counted(place: ExportCheckpoint) -> tuple[int, int]:
    """Return the generation of a recording, and the number of rows of rings that were given up."""
    head = os.pread(place.fileno(), layout.HEADER.size, 0)
    return _number(head, layout.HEADER, "generation"), _number(head, layout.HEADER, "ended_rows")


def threads(place: ExportCheckpoint) -> dict[int, int]:
    """Return the native ids of the threads whose rows a recording has, by the numbers of their rings."""
    return {number: thread for number, thread, _ in _rings(place)}


def unread(place: ExportCheckpoint) -> int:
    """Return the number of rows that no exporter has read; 0 if the exporter has reported the losses itself."""
    progress, (generation, ended_rows) = place.read(), counted(place)
    if progress.generation == generation and progress.is_told:
        return 0
    recorded = sum(head for _, _, head in _rings(place)) + ended_rows
    read = progress.fates["seen"] + progress.fates["missed"] if progress.generation == generation else 0
    return max(recorded - read, 0)


def _rings(place: ExportCheckpoint) -> list[tuple[int, int, int]]:
    """Return number, thread and head of each ring that is in use."""
    head = os.pread(place.fileno(), layout.HEADER.size, 0)
    parts = struct.unpack_from("<50Q", head, layout.HEADER.fields["parts"][0])
    offset, stride, slots, used, _ = parts[5 * layout.PARTS.index("rings") :][:5]
    size = min(stride * min(used, slots), os.fstat(place.fileno()).st_size)
    data = os.pread(place.fileno(), size, offset)
    before, rings = _number(head, layout.HEADER, "object_bytes"), []
    for at in range(0, len(data) - stride + 1, stride):
        ring = data[at + before : at + stride]
        number, thread = _number(ring, layout.RING, "number"), _number(ring, layout.RING, "thread_id")
        if number and thread and _number(ring, layout.RING, "generation") == _number(head, layout.HEADER, "generation"):
            rings.append((number, thread, _number(ring, layout.RING, "head")))
    return rings


def _number(data: bytes, record: layout.Record, name: str) -> int:
    at, code = record.fields[name]
    return int(struct.unpack_from(f"<{code}", data, at)[0])


def _packed(turn: int, progress: Progress) -> bytes:
    places = sorted(progress.places.items())[-_MOST_PLACES:]
    body = b"".join([
        _HEAD.pack(
            turn, 0, progress.generation, len(places), progress.settled_ns, progress.is_told,
            *(max(fates[name], 0) for fates in (progress.fates, progress.before) for name in EXPORT_COUNTERS),
        ),
        *(_PLACE.pack(*place) for place in places),
    ])  # fmt: skip
    return body[:8] + zlib.crc32(body).to_bytes(8, "little") + body[16:]


def _unpacked(data: bytes) -> tuple[int, Progress]:
    if len(data) < _HEAD.size:
        return 0, Progress()
    turn, crc, generation, count, settled_ns, is_told, *fates = _HEAD.unpack_from(data)
    body = data[: _HEAD.size + min(count, _MOST_PLACES) * _PLACE.size]
    if not turn or count > _MOST_PLACES or zlib.crc32(body[:8] + bytes(8) + body[16:]) != crc:
        return 0, Progress()
    places = dict(_PLACE.iter_unpack(body[_HEAD.size :]))
    now, before = (
        dict(zip(EXPORT_COUNTERS, some, strict=True))
        for some in (fates[: len(EXPORT_COUNTERS)], fates[len(EXPORT_COUNTERS) :])
    )
    return turn, Progress(generation, places, now, settled_ns, before, bool(is_told))


def told(fates: Mapping[str, int]) -> Mapping[str, int]:
    """Return the losses of an export by the names that reports give them; `fates` may have `unread` and `perhaps`."""
    names = {
        "spans rejected by the OTLP export": "rejected",
        "spans failed by the OTLP export": "failed",
        "spans dropped by the OTLP export": "dropped",
        "spans overwritten before the export read them": "missed",
        "spans sent to a collector whose answer nobody has heard": "unanswered",
        "spans that had been read and not sent as their exporter was ended": "abandoned",
        UNTIMED: "untimed",
        "spans that an agent had perhaps not sent as it was killed": "perhaps",
        UNREAD: "unread",
        "points of metrics that the collector did not take": METRICS_LOST,
        "spans of queue, prefill, decode and stalls lost by the OTLP export": DERIVED_LOST,
        "requests that batches served without their time in the queue among the metrics": UNQUEUED,
    }
    return {name: fates[fate] for name, fate in names.items() if fates.get(fate)}
