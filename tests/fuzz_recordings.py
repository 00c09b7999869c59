"""Reads damaged recordings, as many as asked for: `python tests/fuzz_recordings.py [inputs] [seed]`.

Whatever another process finds in memory must be read as far as it goes or refused with a `TraceError`, in bounded
memory and time. Exits with 1 and says which input it was if not. The inputs are those of the seed: each is a small
recording, of the native recorder or of its twin, with some bytes changed where it lies, and put right again.
"""

from __future__ import annotations

import array
import contextlib
import os
import random
import resource
import sys
import threading
import time
import traceback
from functools import partial
from typing import Any

from instrument.errors import TraceError
from instrument.recorder.recorder import PureRecorder, Recorder
from instrument.recording import memory_layout
from instrument.recording.gauge_ring import Readings
from instrument.recording.interval_ring import IntervalRing
from instrument.recording.mapped import Mapped
from instrument.recording.spans import Sample, Site
from instrument.trace.of_memory import saved_of

MOST_BYTES = 600 << 20
SLOWEST_S = 10.0
EACH = 500
"""Inputs between two looks at the memory that this process takes."""


def copied(recorder: Any, times: int = 40) -> int:
    """The descriptor of a copy of a recording with spans, threads, details and open spans: of what is used of it."""

    @lambda f: recorder.wrap(f, Site("function"))
    def function(depth: int) -> None:
        with recorder.scope("scope", attributes={"depth": depth}):
            if depth:
                function(depth - 1)

    for _ in range(times):
        function(3)
    intervals = IntervalRing(1 << 14, partial(recorder.room_for, "intervals"))
    for ring in recorder.rings():
        for row in ring.newest(0)[0]:
            intervals.add(row[1], 0, 7, row[5], row[6], "exclusive")
    Readings(partial(recorder.room_for, "samples")).add([Sample("power", 0, 5 + at_ns, 1.5) for at_ns in range(50)])
    thread = threading.Thread(target=function, args=(2,))
    thread.start()
    thread.join()
    copy = os.memfd_create("copy")
    os.ftruncate(copy, os.fstat(recorder.memory_fd).st_size)
    with recorder.scope("open", kind="request", attributes={"request_id": "r-7"}):
        for offset, length in [(0, memory_layout.HEADER.size), *used_of(recorder.memory_fd)]:
            os.pwrite(copy, os.pread(recorder.memory_fd, length, offset), offset)
    return copy


def used_of(fd: int) -> list[tuple[int, int]]:
    """What is used of a recording's parts: where, and how much."""
    count = len(memory_layout.PARTS)
    table = array.array("Q", os.pread(fd, 40 * count, memory_layout.HEADER.fields["parts"][0]))
    parts = dict(zip(memory_layout.PARTS, _parts(table), strict=True))
    parts["attributes"] = parts["attributes"]._replace(used=parts["frames"].used)
    return [(part.offset, min(part.used, part.slots, 1 << 18) * part.stride) for part in parts.values() if part.used]


def _parts(table: array.array[int]) -> list[memory_layout.Part]:
    return [memory_layout.Part(*table[at : at + 5]) for at in range(0, len(table), 5)]


def _changes(fd: int, used: list[tuple[int, int]], rng: random.Random) -> dict[int, bytes]:
    """Places of a recording and what is to lie there instead: mostly where something lay."""
    changes = {}
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        offset, length = rng.choice([(0, memory_layout.HEADER.size), *used])
        at, kind = offset + rng.randrange(length), rng.randrange(4)
        if kind == 0:
            changes[at] = bytes([rng.randrange(256)])
        elif kind == 1:
            changes[at & ~7] = rng.choice((0, 1, (1 << 64) - 1, 1 << 63, rng.getrandbits(64))).to_bytes(8, "little")
        elif kind == 2:
            changes[at] = os.pread(fd, 16, offset + rng.randrange(length))
        else:
            near = int.from_bytes(os.pread(fd, 8, at & ~7), "little") + rng.randrange(-64, 65)
            changes[at & ~7] = (near & (1 << 64) - 1).to_bytes(8, "little")
    return changes


def look_at_all(fd: int) -> None:
    """Read everything that there is in a recording. Raises `TraceError` for one that is refused."""
    mapped = Mapped(fd)
    try:
        assert mapped.header.size_bytes >= 0
        mapped.open_spans()
        mapped.sites()
        with contextlib.suppress(TraceError):
            saved_of(mapped)
    finally:
        mapped.close()


def main(inputs: int, seed: int) -> int:
    """Read so many. Returns the exit code."""
    rng, refused, slowest_s, begin_s = random.Random(seed), 0, 0.0, time.monotonic()
    recordings = []
    for kind in dict.fromkeys((Recorder, PureRecorder)):
        recorder = kind(1 << 16)
        recorder.begin(1 << 16, {"origin": {"service": "fuzzed"}})
        if recorder.memory_fd < 0:
            print(f"no memory to read: {recorder.no_memory}", file=sys.stderr)
            return 1
        recorder.on = True
        fd = copied(recorder, 5)
        recordings.append((fd, used_of(fd)))
    for number in range(inputs):
        fd, used = recordings[number % len(recordings)]
        changes = _changes(fd, used, rng)
        before = [(at, os.pread(fd, len(other), at)) for at, other in changes.items()]
        for at, other in changes.items():
            os.pwrite(fd, other, at)
        read_s = time.monotonic()
        try:
            look_at_all(fd)
        except TraceError:
            refused += 1
        except BaseException:
            traceback.print_exc()
            print(f"input {number} of seed {seed}: no TraceError; changed: {changes}", file=sys.stderr)
            return 1
        took_s = time.monotonic() - read_s
        for at, own in reversed(before):
            os.pwrite(fd, own, at)
        slowest_s = max(slowest_s, took_s)
        most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 if number % EACH == 0 else 0
        if took_s > SLOWEST_S or most_bytes > MOST_BYTES:
            print(f"input {number} of seed {seed}: {took_s:.1f} s, {most_bytes >> 20} MiB", file=sys.stderr)
            return 1
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(
        f"recordings: {inputs} inputs of seed {seed}, {refused} refused, the slowest took {1e3 * slowest_s:.0f} ms, "
        f"at most {most_bytes >> 20} MiB, {time.monotonic() - begin_s:.0f} s"
    )
    return 1 if most_bytes > MOST_BYTES or refused > inputs / 2 else 0


if __name__ == "__main__":
    numbers = [*map(int, sys.argv[1:]), *(1000, 7)[len(sys.argv) - 1 :]]
    sys.exit(main(*numbers))
