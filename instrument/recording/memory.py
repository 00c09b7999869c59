"""Creates the memory into which a process records, and writes the memory's header. Other processes read this memory.

The memory is a file without a name (`memfd_create`), or a file in the profile's `limits.ring_dir`. Only a file in that
folder outlives the process.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instrument import clock
from instrument.recording import memory_layout as layout
from instrument.recording.memory_layout import duplicate
from instrument.recording.slot_ring import SlotRoom
from instrument.runtime import file_writing
from instrument.runtime.cheap_start import NamedTuple

MFD_NOEXEC_SEAL = 8
"""The flag of a memory file that cannot be executed. With vm.memfd_noexec, systems refuse or log files without it."""


class Memory(NamedTuple):
    """The file of a recording. `path` is "" for a file without a name."""

    fd: int
    size_bytes: int
    path: str


SUFFIX = ".recording"

_NAME = re.compile(r"([0-9]+)-([0-9]+)\.recording")


def make_memory(ring_bytes: int, directory: str = "", disk_bytes: int = 1 << 30) -> Memory:
    """Make the memory of a recording with rings of `ring_bytes`, and write its header. The caller must close it. Raises
    `OSError`.

    The oldest recordings of ended processes in `directory` are removed, so that the folder's size remains within
    `disk_bytes`. A file there gets all its blocks at once, because a write to a mapped file on a full disk would kill
    the process. A lock on the file shows that its process lives.
    """
    parts, size_bytes = layout.plan_parts(ring_bytes, is_sparse=not directory)
    _refuse_beyond_limits(size_bytes, is_sparse=not directory)
    path = ""
    if directory:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        sizes = []
        for abandoned in abandoned_recordings(Path(directory)):
            with contextlib.suppress(OSError):
                sizes.append((abandoned, abandoned.stat().st_size))
        file_writing.remove_until_freed(sizes, sum(size for _, size in sizes) - (disk_bytes - size_bytes))
        path = str(Path(directory) / f"{os.getpid()}-{clock.start_ticks(clock.STAT)}{SUFFIX}")
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
        fd, low_fd = duplicate(fd), fd
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


def abandoned_recordings(directory: Path) -> list[Path]:
    """Return the paths of the recordings in a directory whose processes have ended, the oldest first."""
    files = []
    for path in directory.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            if _NAME.fullmatch(path.name) and not is_alive(path):
                files.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(files)]


def is_alive(path: Path) -> bool:
    """Return True if the process that writes the recording at a path is alive.

    This is known from the process's lock on the file, else from its id and start time.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    match = _NAME.fullmatch(path.name)
    return match is not None and match[2] != "0" and clock.start_ticks(Path(f"/proc/{match[1]}/stat")) == int(match[2])


def _refuse_beyond_limits(size_bytes: int, *, is_sparse: bool) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < size_bytes:
        raise OSError(f"files are limited to {limit} bytes (ulimit -f), and a recording needs {size_bytes}")
    # Where memory is promised strictly, what is not there when it is touched would end the process.
    if is_sparse and _read("/proc/sys/vm/overcommit_memory") == "2":
        raise OSError("this system does not overcommit memory (vm.overcommit_memory = 2), which a recording needs")


def private_head(ring_bytes: int) -> bytes:
    """Return the header for a recording in private memory."""
    is_sparse = _read("/proc/sys/vm/overcommit_memory") != "2"
    return _pack_header(*layout.plan_parts(ring_bytes, is_sparse=is_sparse))


def _pack_header(parts: Mapping[str, layout.Part], size_bytes: int) -> bytes:
    head = bytearray(layout.HEADER.size)
    layout.HEADER.write(
        head, magic=layout.MAGIC, version=layout.VERSION, size_bytes=size_bytes, state=layout.NEW,
        boot_id=_read("/proc/sys/kernel/random/boot_id").encode(),
        parts=[number for name in layout.PARTS for number in parts[name]], **_describe_process(),
    )  # fmt: skip
    return bytes(head)


def _describe_process() -> dict[str, int]:
    times = {"monotonic_ns": time.monotonic_ns(), "realtime_ns": time.time_ns()}
    return {"pid": os.getpid(), "start_ticks": clock.start_ticks(clock.STAT), **times}


def write_owner(view: memoryview, state: int, facts: Mapping[str, Any] | None = None) -> None:
    """Write the recorded process, the state of its session, and `facts` about both into the header of a recording.
    Facts are left out if their JSON is too long."""
    layout.HEADER.write(view, **_describe_process())
    if facts is not None:
        room, text = SlotRoom.from_part(view, "text"), json.dumps(facts, default=str).encode()
        if len(text) + 4 <= room.slots:
            struct.pack_into("<I", room.part, 0, 0)
            room.part[4 : 4 + len(text)] = text
            struct.pack_into("<I", room.part, 0, len(text))
            struct.pack_into("<Q", view, room.offset_of_used(), len(text) + 4)
    layout.HEADER.write(view, state=state)


def _read(path: str) -> str:
    try:
        return Path(path).read_text("ascii", "replace").strip()
    except OSError:
        return ""
