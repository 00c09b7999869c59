"""Writing a trace: the file, its counters and the names of its lanes, around the slices.

Which spans and intervals are slices, and in which order, `ordered` says; `slices` has their text.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice, starmap
from pathlib import Path

from instrument.chrome.arrows import Arrows
from instrument.chrome.batch_marks import BatchMarks
from instrument.chrome.interval_events import IntervalEvents
from instrument.chrome.lanes import DEVICE_PIDS, Board
from instrument.chrome.ordered import BATCH, OrderedIntervals, Spans, batches
from instrument.chrome.shown_processes import ShownProcesses
from instrument.chrome.span_events import SpanEvents
from instrument.errors import TraceError
from instrument.recording.spans import GAUGES, HOST, Gpu, Sample, Trace
from instrument.recording.tally import Tally
from instrument.runtime import atomic, compression
from instrument.trace import columns
from instrument.trace.metadata import Sites, metadata
from instrument.trace.of_spans import columns_of_spans
from instrument.trace.text import clean, encode, is_number, microseconds, safe

ZLIB_LEVEL = 4
"""Files a tenth smaller than with level 3 in a quarter more time; level 6 is a sixth smaller in twice the time."""

NO_UNIT = '"value"'

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or record less"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a directory that this user may write to"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "give the name of a file"),
}


# The file


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
            file.writelines(_packed(_document(columns, facts, tally), target.suffix == ".gz"))
    except OSError as problem:
        advice = _ADVICE.get(problem.errno or 0, "give a path that can be written")
        raise TraceError(f"cannot write the trace {target}: {problem.strerror or problem}; {advice}") from problem
    return target


def _packed(texts: Iterable[str], gzipped: bool) -> Iterator[bytes]:
    packer = compression.compressor(ZLIB_LEVEL) if gzipped else None
    for text in texts:
        data = text.encode(errors="replace")
        yield packer.compress(data) if packer else data
    if packer:
        yield packer.flush()


def _document(columns: columns.Trace, trace: Trace, tally: Tally | None) -> Iterator[str]:
    """The file's text in pieces of some thousand events."""
    processes = ShownProcesses(trace, DEVICE_PIDS)
    since_ns = min([trace.start_ns, *(sample.at_ns for sample in trace.samples)])
    base_ns = min(int(its.min(initial=since_ns)) for its in (columns.start_ns, columns.device.start_ns))
    spans = Spans.of(columns, base_ns, processes)
    intervals, marks, board = OrderedIntervals.of(spans, base_ns), BatchMarks(spans), Board(processes)
    arrows = Arrows(spans, intervals, marks)
    sites = Sites(spans.sites)
    head = metadata(trace, base_ns, sites, tally, arrows.left_out)
    yield '{"displayTimeUnit":"ms","instrument":'
    yield from head
    yield ',"traceEvents":[\n'
    named = (_process_names(one.pid, one.name, 0, one.label) for one in processes.all)
    yield ",\n".join(chain.from_iterable(named))
    of_sites = [sites.texts[site] for site in spans.sites]
    of_spans = SpanEvents(spans, board, arrows.binds, of_sites)
    yield from starmap(of_spans.text, batches(len(spans.row)))
    of_intervals = IntervalEvents(spans, intervals, board, of_sites)
    yield from (of_intervals.text(first, end, arrows.ties) for first, end in batches(len(intervals.row)))
    yield from arrows.texts(of_spans, of_intervals)
    yield from marks.texts(of_spans, of_sites, arrows.marked)
    counted: set[int] = set()
    names = _lane_names(board, counted, trace, spans.threads_of_batches())
    events = chain(_counter_events(trace.samples, base_ns, processes.first.pid, counted), names)
    while batch := list(islice(events, BATCH)):
        yield "".join([f",\n{event}" for event in batch])
    yield "\n]}\n"


# Counters


def _counter_events(samples: Iterable[Sample], base_ns: int, pid: int, counted: set[int]) -> Iterator[str]:
    """The samples that are numbers; `counted` gets their processes. Their unit is the key of the number, which viewers
    add to the track's name."""
    units = {name: encode(gauge.unit) for name, gauge in GAUGES.items()}
    for sample in samples:
        if is_number(sample.value):
            of = pid if sample.device == HOST else DEVICE_PIDS + sample.device % DEVICE_PIDS
            counted.add(of)
            yield (
                f'{{"ph":"C","pid":{of},"name":{encode(clean(sample.name))}'
                f',"args":{{{units.get(sample.name, NO_UNIT)}:{encode(sample.value)}}}'
                f',"ts":{microseconds(sample.at_ns - base_ns)}}}'
            )


# Names


def _lane_names(board: Board, counted: set[int], trace: Trace, of_batches: set[int]) -> Iterator[str]:
    """The names of all lanes, threads in the order in which they are known but that those of batches come first, and of
    the devices."""
    order = sorted(trace.threads, key=lambda thread_id: thread_id not in of_batches)
    known = {thread_id: position for position, thread_id in enumerate(order)}
    gpus = {DEVICE_PIDS + gpu.device % DEVICE_PIDS: gpu for gpu in trace.gpus}
    positions = count()
    hosts = {one.pid for one in board.processes.all}
    seen = set(hosts)
    for of in sorted(counted - seen):
        seen.add(of)
        yield from _device_names(of, gpus.get(of))
    for of, known_id, lanes in sorted(board.rows(), key=lambda row: (row[0], known.get(row[1], len(known)), row[1])):
        if of not in seen:
            seen.add(of)
            yield from _device_names(of, gpus.get(of))
        name = board.processes.thread_name(known_id) if of in hosts else f"stream {known_id}"
        for number, tid in lanes:
            place = f'{of},"tid":{tid}'
            yield _name_event("thread_name", name if number == 1 else f"{name} ({number})", place)
            yield _name_event("thread_sort_index", next(positions), place)


def _device_names(pid: int, gpu: Gpu | None) -> Iterator[str]:
    device = pid - DEVICE_PIDS
    label = " ".join(filter(None, (gpu.model, gpu.uuid))) if gpu is not None else ""
    yield from _process_names(pid, f"GPU {device}", 1 + device, label)


def _process_names(pid: int, name: str, position: int, label: str = "") -> Iterator[str]:
    yield _name_event("process_name", name, f"{pid}")
    yield _name_event("process_sort_index", position, f"{pid}")
    if label:
        yield _name_event("process_labels", label, f"{pid}")


def _name_event(what: str, value: str | int, place: str) -> str:
    key = "sort_index" if isinstance(value, int) else "labels" if what == "process_labels" else "name"
    return f'{{"ph":"M","name":"{what}","pid":{place},"args":{{"{key}":{encode(safe(value))}}}}}'
