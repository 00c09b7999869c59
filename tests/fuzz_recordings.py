"""A reader of damaged recordings: `python tests/fuzz_recordings.py [inputs] [seed]`.

Another process may find any bytes in memory. The reader must read such bytes as far as it can, or raise a `TraceError`,
in bounded memory and processor time. If it does not, the program prints the input and exits with 1. The seed determines
the inputs. Each input is a small recording, of the native recorder or of its twin. Some of its bytes are changed in
place, and restored afterwards.

No two runs record the same times and ids, so the program prints a failed input as text. To read it once more, run
`python tests/fuzz_recordings.py again TEXT`.
"""

from __future__ import annotations

import array
import base64
import contextlib
import faulthandler
import lzma
import mmap
import os
import random
import resource
import sys
import threading
import time
from functools import partial
from typing import Any

from readback import rows_in

from instrument.errors import TraceError
from instrument.recorder.recorder import Recorder
from instrument.recording import memory_layout
from instrument.recording.mapped import Mapped
from instrument.recording.memory import IntervalRing, add_samples
from instrument.recording.spans import Sample, Site
from instrument.trace.of_recording import read_spans_and_tally

MOST_BYTES = 600 << 20
SLOWEST_S = 10.0
"""Processor time for one input at most, in seconds."""
HANGS_S = 200.0
"""An input that has not been read by then never will be."""


def copied(recorder: Any, times: int = 40) -> int:
    """The descriptor of a copy of a recording with spans, threads, details and open spans: of what is used of it."""

    @lambda f: recorder.wrap(f, Site("function"))
    def function(depth: int) -> None:
        with recorder.scope("scope", attributes={"depth": depth}):
            if depth:
                function(depth - 1)

    for _ in range(times):
        function(3)
    intervals = IntervalRing(1 << 14, partial(recorder.find_part_memory, "intervals"))
    for row in rows_in(recorder):
        intervals.add_all([(row[1], 0, 7, row[5], row[6], "exclusive", 0)])
    add_samples(recorder.find_part_memory("samples"), [Sample("power", 0, 5 + at_ns, 1.5) for at_ns in range(50)])
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
    """Return the offset and the size of the used part of each part of a recording."""
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
        assert mapped.header.memory_bytes >= 0
        mapped.open_spans()
        mapped.sites()
        with contextlib.suppress(TraceError):
            read_spans_and_tally(mapped)
    finally:
        mapped.close()


def as_text(fd: int) -> str:
    """Return the content of a recording as text, for `from_text`."""
    size_bytes = os.fstat(fd).st_size
    found, at = [size_bytes.to_bytes(8, "little")], 0
    with contextlib.suppress(OSError):  # at the last hole
        while at < size_bytes:
            at = os.lseek(fd, at, os.SEEK_DATA)
            length = os.lseek(fd, at, os.SEEK_HOLE) - at
            found += [at.to_bytes(8, "little"), length.to_bytes(8, "little"), os.pread(fd, length, at)]
            at += length
    return base64.urlsafe_b64encode(lzma.compress(b"".join(found))).decode()


def from_text(text: str) -> int:
    """Return the descriptor of a recording with the content of such a text."""
    found, at = lzma.decompress(base64.urlsafe_b64decode(text)), 8
    fd = os.memfd_create("again")
    os.ftruncate(fd, int.from_bytes(found[:8], "little"))
    while at < len(found):
        offset, length = (int.from_bytes(found[begin : begin + 8], "little") for begin in (at, at + 8))
        os.pwrite(fd, found[at + 16 : at + 16 + length], offset)
        at += 16 + length
    return fd


def recorded() -> list[int]:
    """Return the descriptor of a recording."""
    recorder = Recorder(1 << 16)
    recorder.begin_recording(1 << 16, {"origin": {"service": "fuzzed"}})
    if recorder.memory_fd < 0:
        sys.exit(f"no memory to read: {recorder.no_memory}")
    recorder.on = True
    return [copied(recorder, 5)]


class Inputs:
    """Reads damaged recordings, and puts each right again that was read as it is to be."""

    def __init__(self, fds: list[int], seed: int) -> None:
        self._recordings = [(fd, used_of(fd)) for fd in fds]
        self._rng = random.Random(seed)
        self.slowest_s = 0.0
        self.refused = 0

    def read(self, number: int) -> None:
        """Read one. Ends the process where that takes too long."""
        fd, used = self._recordings[number % len(self._recordings)]
        changes = _changes(fd, used, self._rng)
        before = [(at, os.pread(fd, len(other), at)) for at, other in changes.items()]
        for at, other in changes.items():
            os.pwrite(fd, other, at)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        begin_s = time.process_time()
        try:
            look_at_all(fd)
        except TraceError:
            self.refused += 1
        faulthandler.cancel_dump_traceback_later()
        took_s = time.process_time() - begin_s
        if took_s > SLOWEST_S:
            sys.exit(f"it took {took_s:.1f} s")
        most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if most_bytes > MOST_BYTES and "INSTRUMENT_SANITISED" not in os.environ:  # it keeps what is freed
            sys.exit(f"it took {most_bytes >> 20} MiB")
        self.slowest_s = max(self.slowest_s, took_s)
        for at, own in reversed(before):
            os.pwrite(fd, own, at)


def read_all(inputs: Inputs, count: int, reached: mmap.mmap) -> None:
    """Read `count` inputs, and write the number of the current input to `reached`.

    The process ends at the first input that is not read as expected.
    """
    begin_s = time.monotonic()
    for number in range(count):
        reached[:8] = number.to_bytes(8, "little")
        inputs.read(number)
    most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(
        f"recordings: {count} inputs, {inputs.refused} refused, the slowest took {1e3 * inputs.slowest_s:.0f} ms of "
        f"processor time, at most {most_bytes >> 20} MiB, {time.monotonic() - begin_s:.0f} s"
    )
    if inputs.refused > count / 2:
        sys.exit("more than half of them were refused")


def main(count: int, seed: int) -> int:
    """Read inputs in a child, so that the number of the current input survives its crash. Return the exit code."""
    fds, reached = recorded(), mmap.mmap(-1, 8)
    child = os.fork()
    if not child:
        read_all(Inputs(fds, seed), count, reached)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        number = int.from_bytes(reached[:8], "little")
        print(f"input {number} of seed {seed}: exit code {code}; again {as_text(fds[number % len(fds)])}")
    return 1 if code else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["again"]:
        look_at_all(from_text(sys.argv[2]))
    else:
        numbers = [*map(int, sys.argv[1:]), *(1000, 7)[len(sys.argv) - 1 :]]
        sys.exit(main(*numbers))
