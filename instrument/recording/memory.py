"""Creates the memory into which a process records, and writes its header, device intervals and gauges.

Other processes read this memory. It is a file without a name (`memfd_create`), or a file in the profile's
`limits.ring_dir`. Only a file in that folder outlives the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instrument import clock
from instrument.recording import memory_layout as layout
from instrument.recording.memory_layout import GAUGES as CLAIMED
from instrument.recording.memory_layout import Claim, RecordingHead, duplicate_descriptor, read_generation
from instrument.recording.spans import Sample
from instrument.runtime import file_writing
from instrument.runtime.lazy_imports import NamedTuple

MFD_NOEXEC_SEAL = 8
"""The `memfd_create` flag for a file that cannot be executed. Some systems require this flag."""


class Memory(NamedTuple):
    """The file of a recording. `path` is "" for a file without a name."""

    fd: int
    size_bytes: int
    path: str


SUFFIX = ".recording"

_NAME = re.compile(r"([0-9]+)-([0-9]+)\.recording")


def make_memory(ring_bytes: int, directory: str = "", disk_bytes: int = 1 << 30) -> Memory:
    """Make the memory of a recording, and write its header. The caller must close it. Raises `OSError`.

    The memory is a file in `directory`, or a file without a name. Old recordings of ended processes are removed to keep
    the directory within `disk_bytes`.

    A file in a directory gets all its blocks at once. Otherwise a write to a mapped file on a full disk would kill the
    process. A lock on the file shows that its process is alive.
    """
    parts, size_bytes = layout.plan_parts(ring_bytes, is_sparse=not directory)
    _refuse_unavailable_memory(size_bytes, is_sparse=not directory)
    path = ""
    if directory:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        sizes = []
        for abandoned in find_abandoned_recordings(Path(directory)):
            with contextlib.suppress(OSError):
                sizes.append((abandoned, abandoned.stat().st_size))
        file_writing.remove_files_until_freed(sizes, sum(size for _, size in sizes) - (disk_bytes - size_bytes))
        path = str(Path(directory) / f"{os.getpid()}-{clock.read_process_start_ticks(clock.STAT)}{SUFFIX}")
        with contextlib.suppress(OSError):
            Path(path).unlink()  # an earlier session's, whose file may still be mapped
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    elif hasattr(os, "memfd_create"):
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create("instrument", flags | MFD_NOEXEC_SEAL)
        except OSError:  # a kernel before 6.3
            fd = os.memfd_create("instrument", flags)
    else:
        raise OSError("this system has no memory to share with other processes")
    try:
        fd, low_fd = duplicate_descriptor(fd), fd
        os.close(low_fd)
        if path:
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.posix_fallocate(fd, 0, size_bytes)
        else:
            os.ftruncate(fd, size_bytes)
            # No other process can then truncate it while it is mapped. On old kernels, readers check the length.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.pwrite(fd, _pack_header(parts, size_bytes), 0)
    except BaseException:
        os.close(fd)
        if path:
            Path(path).unlink()
        raise
    return Memory(fd, size_bytes, path)


def find_abandoned_recordings(directory: Path) -> list[Path]:
    files = []
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            if _NAME.fullmatch(path.name) and not has_live_writer(path):
                files.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(files)]


def has_live_writer(path: Path) -> bool:
    """Return True if the process that writes a recording is alive. Such a process has a lock on the file. Without a
    lock, the process id and start time in the file's name decide."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    match = _NAME.fullmatch(path.name)
    return (
        match is not None
        and match[2] != "0"
        and clock.read_process_start_ticks(Path(f"/proc/{match[1]}/stat")) == int(match[2])
    )


def _refuse_unavailable_memory(size_bytes: int, *, is_sparse: bool) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < size_bytes:
        raise OSError(f"files are limited to {limit} bytes (ulimit -f), and a recording needs {size_bytes}")
    # Where memory is promised strictly, what is not there when it is touched would end the process.
    if is_sparse and _read_text("/proc/sys/vm/overcommit_memory") == "2":
        raise OSError("this system does not overcommit memory (vm.overcommit_memory = 2), which a recording needs")


def make_private_header(ring_bytes: int) -> bytes:
    is_sparse = _read_text("/proc/sys/vm/overcommit_memory") != "2"
    return _pack_header(*layout.plan_parts(ring_bytes, is_sparse=is_sparse))


def _pack_header(parts: Mapping[str, layout.Part], size_bytes: int) -> bytes:
    head = bytearray(layout.HEADER.size)
    layout.HEADER.write(
        head, magic=layout.MAGIC, version=layout.VERSION, size_bytes=size_bytes, state=layout.NEW,
        boot_id=_read_text("/proc/sys/kernel/random/boot_id").encode(),
        parts=[number for name in layout.PARTS for number in parts[name]], **_describe_process(),
    )  # fmt: skip
    return bytes(head)


def _describe_process() -> dict[str, int]:
    times = {"monotonic_ns": time.monotonic_ns(), "realtime_ns": time.time_ns()}
    return {"pid": os.getpid(), "start_ticks": clock.read_process_start_ticks(clock.STAT), **times}


def write_process_facts(view: memoryview, state: int, facts: Mapping[str, Any] | None = None) -> None:
    """Write the process, the state of its session, and `facts` into a recording. Facts are left out if their JSON is
    too long. The header's time is written last. Its change shows readers that there are new facts."""
    if facts is not None:
        room, text = SlotRoom.from_part(view, "text"), json.dumps(facts, default=str).encode()
        if len(text) + 4 <= room.slots:
            struct.pack_into("<I", room.part, 0, 0)
            room.part[4 : 4 + len(text)] = text
            struct.pack_into("<I", room.part, 0, len(text))
            struct.pack_into("<Q", view, room.used_slots_offset(), len(text) + 4)
    layout.HEADER.write(view, **_describe_process(), state=state)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text("ascii", "replace").strip()
    except OSError:
        return ""


# ---------------------------------------------------------------- rings that Python code writes

_U64 = struct.Struct("<Q")


class SlotRoom(NamedTuple):
    """The memory of one part of a recording, with the recording's header and the number of the part's slots."""

    head: memoryview
    name: str
    part: memoryview
    slots: int

    @classmethod
    def from_part(cls, memory: memoryview, name: str) -> SlotRoom:
        part = layout.Part(*layout.PART.make_struct().unpack_from(memory, layout.part_header_offset(name)))
        return cls(memory, name, memory[part.offset : part.offset + part.slots * part.stride], part.slots)

    def count_used_slots(self) -> int:
        return int(_U64.unpack_from(self.head, self.used_slots_offset())[0])

    def used_slots_offset(self) -> int:
        return layout.part_header_offset(self.name) + layout.PART.fields["used"][0]

    def add_all(self, cells: struct.Struct, records: Iterable[Sequence[Any]], slots: int) -> None:
        """Add records to a ring of `slots` slots. The oldest records are overwritten."""
        used, used_at = self.count_used_slots(), self.used_slots_offset()
        for values in records:
            cells.pack_into(self.part, used % slots * cells.size, *values)
            used += 1
            _U64.pack_into(self.head, used_at, used)  # after each, for a reader expects at most one half-written slot


FindRoom = Callable[[], "SlotRoom | None"]
"""A function that returns a part's memory in the current recording, or None before the first recording."""


# Device intervals


LABELS = ("exclusive", "overlapped", "launch-bound", "captured", "stale", "dropped")
"""The labels of a device interval, which say how far its time can be trusted.

- `exclusive`: no other timed interval overlaps it on the device.
- `overlapped`: a timed interval of another stream overlaps it, so each may have slowed the other.
- `launch-bound`: the work is very short or ended soon after the span, so the length may be that of the launch.
- `stale`: the length is exact, but the begin and the end are uncertain.
- `captured`: there is no length, because the stream was being captured into a graph.
- `dropped`: there is no length, because no event was available.
"""

_NUMBERS = {label: number for number, label in enumerate(LABELS)}

_CELLS = layout.INTERVAL.make_struct()

NOTHING_TO_COME = 1 << 62
"""The value of `settled_ns` in a recording's header once no more device intervals can follow."""


class IntervalRing:
    """The ring of device intervals in a recording. One thread at a time may write it. `find_room` returns its
    memory."""

    def __init__(self, memory_bytes: int, find_room: FindRoom) -> None:
        self._most_slots = max(memory_bytes // _CELLS.size, 64)
        self._find_room = find_room

    def add_all(self, intervals: Iterable[tuple[int, int, int, int, int, str, int]]) -> None:
        """Add intervals: span id, device, stream, begin, end, label and uncertainty."""
        if (room := self._find_room()) is not None:
            slots = min(self._most_slots, room.slots)
            layout.HEADER.write(room.head, interval_slots=slots)
            cells = [(*place, _NUMBERS[label], uncertainty_ns) for *place, label, uncertainty_ns in intervals]
            room.add_all(_CELLS, cells, slots)

    def publish_settled_time(self, until_ns: int) -> None:
        """Publish the time up to which all ended spans have their device times."""
        if (room := self._find_room()) is not None:
            layout.HEADER.write(room.head, settled_ns=until_ns)

    @property
    def overwritten_count(self) -> int:
        room = self._find_room()
        return 0 if room is None else max(room.count_used_slots() - min(self._most_slots, room.slots), 0)


# Readings of gauges


_SAMPLE = layout.SAMPLE.make_struct()


def _sample_values(sample: Sample) -> tuple[int, int, bool, float, bytes]:
    return sample.at_ns, sample.device, sample.value is not None, sample.value or 0.0, sample.name.encode()


def add_samples(room: SlotRoom | None, samples: Iterable[Sample]) -> None:
    """Add readings of gauges to a recording. One thread at a time may add."""
    if room is not None:
        room.add_all(_SAMPLE, map(_sample_values, samples), room.slots)


class GaugePlace(Claim):
    """The claim to read the gauges for another process's recording, and to write the readings into its current session.
    Only one process can have the claim. Raises `OSError`."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, CLAIMED)
        self._generation = read_generation(fd)

    def add_readings(self, samples: Iterable[Sample]) -> bool:
        """Add readings. Return False if the recorded process has begun another session."""
        fd = self.fileno()
        try:
            head = RecordingHead(fd)
            part = head.find_part("samples")
        except OSError:
            return False
        end = part.offset + part.slots * part.stride
        if (
            head.generation != self._generation
            or not 0 < part.slots <= layout.MOST_SAMPLES
            or end > os.fstat(fd).st_size
        ):
            return False
        used = part.used
        for sample in samples:
            os.pwrite(fd, _SAMPLE.pack(*_sample_values(sample)), part.offset + used % part.slots * part.stride)
            used += 1
        os.pwrite(fd, _U64.pack(used), layout.part_header_offset("samples") + layout.PART.fields["used"][0])
        return True
