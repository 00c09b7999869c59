"""Writing a trace: the file, its metadata and counters, and the names of its lanes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from pathlib import Path

import msgspec

from instrument.chrome.drawing import Drawing, DrawnEvent
from instrument.chrome.lanes import BATCH, DEVICE_PIDS, Board, OrderedIntervals, ShownProcesses, Spans
from instrument.errors import TraceError
from instrument.recording.spans import GAUGES, HOST, Gpu, Sample, Trace
from instrument.recording.tally import Tally
from instrument.runtime import atomic, compression
from instrument.trace import columns
from instrument.trace.metadata import Sites, metadata
from instrument.trace.of_spans import columns_of_spans
from instrument.trace.text import clean, is_number, safe

ZLIB_LEVEL = 4
"""Files a tenth smaller than with level 3 in a quarter more time; level 6 is a sixth smaller in twice the time."""

NO_UNIT = "value"

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or record less"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a directory that this user may write to"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "give the name of a file"),
}
_encoder = msgspec.json.Encoder(decimal_format="number")


def dump(path: str | os.PathLike[str], trace: Trace, tally: Tally | None = None) -> Path:
    """Write a trace as Chrome JSON, packed with gzip if the name ends in `.gz`.

    As `write`. Raises `TraceError` for spans that are no sound trace, too.
    """
    try:
        columns = columns_of_spans(trace.spans)
    except ValueError as problem:
        raise TraceError(f"cannot write the trace {os.fspath(path)}: {problem}") from problem
    return write(path, columns, trace, tally)


def write(path: str | os.PathLike[str], columns: columns.Trace, facts: Trace, tally: Tally | None = None) -> Path:
    """Write columns; `facts` are what the trace knows beside its spans.

    The tally, if given, is saved beside the spans. The file appears complete and with mode 0600 or not at all, and
    replaces an older one; directories above it are made. A process killed while it writes leaves the older file, and
    a part as `atomic` names it, which the next process to make room removes. The text is never in memory as a whole.

    Raises `TraceError` when the file cannot be written.
    """
    target = Path(path)
    try:
        with atomic.replacing(target) as file:
            packer = compression.compressor(ZLIB_LEVEL) if target.suffix == ".gz" else None
            for data in _document(columns, facts, tally):
                file.write(packer.compress(data) if packer else data)
            if packer:
                file.write(packer.flush())
    except OSError as problem:
        advice = _ADVICE.get(problem.errno or 0, "give a path that can be written")
        raise TraceError(f"cannot write the trace {target}: {problem.strerror or problem}; {advice}") from problem
    return target


def _document(columns: columns.Trace, trace: Trace, tally: Tally | None) -> Iterator[bytes]:
    """Yield the file in pieces of some thousand events."""
    processes = ShownProcesses(trace)
    since_ns = min([trace.start_ns, *(sample.at_ns for sample in trace.samples)])
    base_ns = min(int(its.min(initial=since_ns)) for its in (columns.start_ns, columns.device.start_ns))
    spans, board = Spans(columns, base_ns, processes), Board(processes)
    sites = Sites(spans.sites)
    drawing = Drawing(spans, OrderedIntervals(spans, base_ns), board, sites.place)
    yield b'{"displayTimeUnit":"ms","instrument":'
    for text in metadata(trace, base_ns, sites, tally, drawing.left_out):
        yield text.encode(errors="replace")
    yield b',"traceEvents":[\n'
    named = (_process_names(one.pid, one.name, 0, one.label) for one in processes.all)
    yield _lines(list(chain.from_iterable(named)))[:-2]
    for events in drawing.events():
        if events:
            yield b",\n" + _lines(events)[:-2]
    counted: set[int] = set()
    names = _lane_names(board, counted, trace, spans.threads_of_batches())
    rest = chain(_counters(trace.samples, base_ns, processes.first.pid, counted), names)
    while events := list(islice(rest, BATCH)):
        yield b",\n" + _lines(events)[:-2]
    yield b"\n]}\n"


def _lines(events: list[DrawnEvent]) -> bytes:
    """Return events as JSON, a line each, with a comma behind each."""
    return _encoder.encode_lines(events).replace(b"\n", b",\n")


def _counters(samples: Iterable[Sample], base_ns: int, pid: int, counted: set[int]) -> Iterator[DrawnEvent]:
    """Yield the samples that are numbers; `counted` gets their processes. Their unit is the key of the number, which
    viewers add to the track's name."""
    for sample in samples:
        if is_number(sample.value):
            its = pid if sample.device == HOST else DEVICE_PIDS + sample.device % DEVICE_PIDS
            counted.add(its)
            unit = GAUGES[sample.name].unit if sample.name in GAUGES else NO_UNIT
            args = {unit: sample.value}
            yield DrawnEvent("C", its, name=clean(sample.name), args=args, ts=(sample.at_ns - base_ns) / 1000)


# Names


def _lane_names(board: Board, counted: set[int], trace: Trace, of_batches: set[int]) -> Iterator[DrawnEvent]:
    """Yield the names of all lanes, threads in the order in which they are known but that those of batches come first,
    and the names of devices."""
    order = sorted(trace.threads, key=lambda thread_id: thread_id not in of_batches)
    known = {thread_id: position for position, thread_id in enumerate(order)}
    gpus = {DEVICE_PIDS + gpu.device % DEVICE_PIDS: gpu for gpu in trace.gpus}
    positions = count()
    hosts = {one.pid for one in board.processes.all}
    rows = sorted(board.rows(), key=lambda row: (row[0], known.get(row[1], len(known)), row[1]))
    seen = set(hosts)
    for pid, known_id, tids in chain(((pid, 0, []) for pid in sorted(counted - seen)), rows):
        if pid not in seen:
            seen.add(pid)
            yield from _device_names(pid, gpus.get(pid))
        name = board.processes.thread_name(known_id) if pid in hosts else f"stream {known_id}"
        for number, tid in enumerate(tids, 1):
            yield _name("thread_name", name if number == 1 else f"{name} ({number})", pid, tid)
            yield _name("thread_sort_index", next(positions), pid, tid)


def _device_names(pid: int, gpu: Gpu | None) -> Iterator[DrawnEvent]:
    device = pid - DEVICE_PIDS
    label = " ".join(filter(None, (gpu.model, gpu.uuid))) if gpu is not None else ""
    yield from _process_names(pid, f"GPU {device}", 1 + device, label)


def _process_names(pid: int, name: str, position: int, label: str = "") -> Iterator[DrawnEvent]:
    yield _name("process_name", name, pid)
    yield _name("process_sort_index", position, pid)
    if label:
        yield _name("process_labels", label, pid)


def _name(what: str, value: str | int, pid: int, tid: int | msgspec.UnsetType = msgspec.UNSET) -> DrawnEvent:
    key = "sort_index" if isinstance(value, int) else "labels" if what == "process_labels" else "name"
    return DrawnEvent("M", pid, tid, name=what, args={key: safe(value)})
