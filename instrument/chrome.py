"""Chrome trace JSON, the file that Perfetto shows: written from a trace, and read back into one.

How a trace becomes slices and lanes:

* A span that no task ran is a complete event (`X`) on the lane of its thread.
* Requests, and all that tasks ran, are async slices (`b`, `e`), one lane for each task of a tree: tasks interleave on
  their thread, so they do not nest by time. The lane of a request has category `request`, others have `task`, and
  `args.kind` says what a slice is, because Perfetto nests async slices of one category only.
* A device interval is a complete event of the process `GPU n`, on the lane of its stream.
* Slices of a lane must nest, or viewers drop them in silence. One that crosses another, or lies deeper than viewers
  show, goes to a further lane such as `MainThread (2)` and has the lane's number in `args.lane`; nothing is cut.
* Arrows lead from a span to what it started on another thread or task and on the device. One that would point into
  the past, or that the format has no room for, is left out and counted in `instrument.arrows_left_out`.

Viewers need only the events. What else a trace knows stands in the top-level key `instrument`, which they ignore, so
that `load` returns what `dump` was given, to the nanosecond. What changes on the way: a lone surrogate becomes the
replacement character and, in attributes, a sequence becomes a tuple, a number that JSON or int64 does not have becomes
text, and a value of any other type becomes the type's name in angle brackets.
"""

from __future__ import annotations

import codecs
import errno
import gzip
import json
import math
import numbers
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from instrument.errors import TraceError
from instrument.spans import KINDS, Cost, DeviceInterval, Origin, RemoteParent, Site, Span, Trace, assign_self_times
from instrument.tally import Tally, Totals

FORMAT = 1
"""Version of what stands in the key `instrument`."""

LIMIT_BYTES = 2 << 30
"""Most bytes of text that `load` reads unless told otherwise; browsers give up far below."""

# What else bounds the memory that a hostile file can ask for: spans, links of all call paths together, parents that
# start after their children, characters of one value, microseconds of a time (ns since 1970 still are in int64).
LIMIT_SPANS, LIMIT_LINKS, LIMIT_BACKWARD, LIMIT_VALUE, LIMIT_US = 10_000_000, 20_000_000, 1000, 128 << 20, 1 << 53

DEVICE_PIDS = SPARE_TIDS = 1 << 31
"""No process or thread of a host has an id from here on: devices are processes, further lanes are threads there."""

SPARE_BINDS = 1 << 63
"""Set in every bind id, because Perfetto numbers the `s` and `f` arrows from 0 in the same space."""

DEEPEST = 511
"""Most slices in one another on a lane. Perfetto draws the 513th at the top, and the 512th looks the same."""

COMPRESSION = 1
"""zlib level; level 6 takes three times as long for a file that is a seventh smaller."""

BATCH, BLOCK_BYTES, INT64 = 4096, 1 << 20, 1 << 63
KIND_OF_CATEGORY = {**{kind: kind for kind in KINDS}, "cpu_op": "op", "kernel": "op", "gpu_memcpy": "copy"}

_MILLI = tuple(f".{thousandths:03d}" for thousandths in range(1000))
_BLANKS = re.compile(r"[ \t\n\r]*")
_SUMS = (*(known.name for known in fields(Totals) if known.name not in ("first_ns", "histogram")), "first_ns")
_JSON_TYPES = {"int": (int,), "str": (str,), "bool": (bool,), "float": (float, int)}
_encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or record less"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a directory that this user may write to"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "give the name of a file"),
}


# Writing


def dump(path: str | os.PathLike[str], trace: Trace, tally: Tally | None = None) -> Path:
    """Write a trace as Chrome JSON, packed with gzip if the name ends in `.gz`.

    The tally, if given, is saved beside the spans. The file appears complete and with mode 0600 or not at all, and
    replaces an older one; directories above it are made. A process killed while it writes leaves the older file, and
    a `.trace-*.part` beside it. The text is never in memory as a whole, only an index of the spans.

    Raises `TraceError` when the file cannot be written.
    """
    target = Path(path)
    part: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():
            raise FileExistsError(errno.EEXIST, "something that is no file has this name")
        descriptor, part = tempfile.mkstemp(prefix=".trace-", suffix=".part", dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            for block in _packed(_document(trace, tally), target.suffix == ".gz"):
                file.write(block)
        Path(part).replace(target)
        part = None
    except OSError as problem:
        advice = _ADVICE.get(problem.errno or 0, "give a path that can be written")
        raise TraceError(f"cannot write the trace {target}: {problem.strerror or problem}; {advice}") from problem
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)
    return target


def file_name(template: str, *, service: str, pid: int, window: int) -> str:
    """Fill `{service}`, `{pid}` and `{window}` of a path; the service becomes one safe part of a file name.

    Raises `TraceError` for any other name in braces.
    """
    safe = re.sub(r"[^\w.-]+", "_", _clean(service)).encode()[:96].decode(errors="ignore").lstrip(".")
    values = {"service": safe or "service", "pid": str(pid), "window": str(window)}
    for name in re.findall(r"\{(.*?)\}", template):
        if name not in values:
            raise TraceError(f"the path {template!r} asks for {{{name}}}; known are {{service}}, {{pid}}, {{window}}")
    return re.sub(r"\{(.*?)\}", lambda found: values[found[1]], template)


def _packed(texts: Iterable[str], gzipped: bool) -> Iterator[bytes]:
    squeeze = zlib.compressobj(COMPRESSION, zlib.DEFLATED, 16 + zlib.MAX_WBITS) if gzipped else None
    for text in texts:
        data = text.encode(errors="replace")
        yield squeeze.compress(data) if squeeze else data
    if squeeze:
        yield squeeze.flush()


def _document(trace: Trace, tally: Tally | None) -> Iterator[str]:
    """The file's text in pieces of some thousand events."""
    # By start, and since ids rise from span to span, parents before children that start with them.
    spans = sorted(sorted(trace.spans, key=attrgetter("span_id")), key=attrgetter("start_ns"))
    owners = [span for span in spans if span.device]
    starts = [trace.start_ns, *(span.start_ns for span in spans[:1])]
    base_ns = min(starts + [interval.start_ns for owner in owners for interval in owner.device])
    arrows = _plan_arrows(spans, owners)
    sites = _Sites({span.site: None for span in spans})
    head = _metadata(trace, base_ns, sites, tally, arrows.left_out)
    board = _Board(trace, base_ns)
    names = ",\n".join(_process_names(board.pid, trace.origin.service or f"process {trace.origin.pid}", 0))
    yield f'{{"displayTimeUnit":"ms","instrument":{head},"traceEvents":[\n{names}'
    for first in range(0, len(spans), BATCH):
        yield ",\n".join(["", *_span_events(spans[first : first + BATCH], board, sites, arrows.binds)])
    yield from _batches(board.closings(INT64))
    yield from _batches(_device_events(owners, board, sites, arrows))
    yield from _batches(_arrow_events(arrows, board))
    yield from _batches(_lane_names(board, trace.threads))
    yield "\n]}\n"


def _batches(events: Iterator[str]) -> Iterator[str]:
    lines = [""]
    for event in events:
        lines.append(event)
        if len(lines) > BATCH:
            yield ",\n".join(lines)
            lines = [""]
    yield ",\n".join(lines)


# Text of what a file says besides slices


def _clean(text: str) -> str:
    """The text without lone surrogates, which UTF-8 does not have."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _safe(value: object, depth: int = 0) -> Any:
    """The value as strict JSON and viewers take it. It never fails and runs no code of a foreign type: a tensor
    asked for its text would wait for the device and show what must not leave."""
    if isinstance(value, str):
        return _clean(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return _safe_number(value)
    if isinstance(value, (list, tuple)) and depth < 4:
        return [_safe(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < 4:
        return {_clean(key): _safe(item, depth + 1) for key, item in value.items() if isinstance(key, str)}
    return f"<{_clean(type(value).__name__)}>"


def _safe_number(value: numbers.Real) -> int | float | str:
    """The number, or its text if JSON or int64 does not have it."""
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
    except (ArithmeticError, TypeError, ValueError):
        return f"<{_clean(type(value).__name__)}>"
    if isinstance(number, float):
        return number if math.isfinite(number) else str(number)
    if -INT64 <= number < INT64:
        return number
    return str(number) if number.bit_length() <= 4096 else f"<int of {number.bit_length()} bits>"


def _facts(thing: Any) -> dict[str, Any]:
    """The fields of a flat dataclass, without those that are empty by default; `_made` is the way back."""
    values = {known.name: (getattr(thing, known.name), known.default) for known in fields(thing)}
    return {name: _safe(value) for name, (value, default) in values.items() if value or value != default}


class _SiteText(NamedTuple):
    """What the events of a site share: the start, the end of `args`, the name to show, the kind."""

    head: str
    tail: str
    name: str
    kind: str


class _Sites:
    """The sites of a file, each once, by order of first sight; `texts` is what their events share."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self.entries: dict[str, int] = {}
        self.texts: dict[Site, _SiteText] = {}
        for site in sites:
            index = self.index(site)
            code = f',"code":{_encode(_clean(site.function))}' if site.function else ""
            name = _encode(_clean(site.instance if site.kind == "layer" and site.instance else site.name))
            kind = _encode(_clean(site.kind))
            head = f'{{"ph":"X","name":{name},"cat":{kind},"ts":'
            self.texts[site] = _SiteText(head, f',"site":{index}{code}}}', name, kind)

    def index(self, site: Site) -> int:
        return self.entries.setdefault(_encode(_facts(site)), len(self.entries))


def _metadata(trace: Trace, base_ns: int, sites: _Sites, tally: Tally | None, arrows_left_out: int) -> str:
    """The value of the key `instrument`."""
    counted = "null" if tally is None else _tally_text(tally, base_ns, sites)
    facts = {
        "format": FORMAT,
        "about": "Times in ns. A device slice is the stretch of a stream between two events, not a kernel.",
        "origin": _facts(trace.origin),
        "window": trace.window,
        "base_ns": base_ns,
        "base_epoch_ns": trace.origin.realtime_of(base_ns),
        "start_ns": trace.start_ns,
        "end_ns": trace.end_ns,
        "threads": _safe(list(trace.threads.items())),
        "losses": _safe(dict(trace.losses)),
        "notes": _safe(list(trace.notes)),
        "cost": trace.cost and _facts(trace.cost),
        "arrows_left_out": arrows_left_out,
    }
    text = _encode(facts)[:-1] + ',"sites":[\n' + ",\n".join(sites.entries) + f'],\n"tally":{counted}}}'
    # JSON allows DEL as it is, but Perfetto 52 and 55 refuse a file that has it outside of the events.
    return text.replace("\x7f", "\\u007f")


def _tally_text(tally: Tally, base_ns: int, sites: _Sites) -> str:
    """A tally: its nodes as [parent or -1, site], and its rows, whose `first_ns` counts from the base."""
    places = {site: sites.index(site) for row in tally.rows() for site in row.path}
    nodes: dict[tuple[int, int], int] = {}
    rows = []
    for row in tally.rows():
        node = -1
        for site in row.path:
            node = nodes.setdefault((node, places[site]), len(nodes))
        sums = [getattr(row.totals, name) for name in _SUMS]
        sums[-1] -= base_ns
        histogram = [number for bucket in sorted(row.totals.histogram.items()) for number in bucket]
        rows.append(_encode([node, row.thread_id, *sums, histogram]))
    threads = _encode(_safe(list(tally.threads.items())))
    return f'{{"threads":{threads},"nodes":{_encode(list(nodes))},"rows":[\n' + ",\n".join(rows) + "]}"


# Lanes


class _Lane:
    """One row of the viewer, in which slices nest: `ends` are the ends of those now open, outermost first.

    `address` is the text that puts an event there, `mark` the arguments that its place needs. `number` counts the
    lanes of one thread, stream or task. `closings` are the events that will end the open slices of an async lane.
    """

    __slots__ = ("address", "closings", "ends", "mark", "number", "tid")

    def __init__(self, address: str, number: int, mark: str, tid: int = 0) -> None:
        self.address = address
        self.number = number
        self.mark = mark if number == 1 else f'{mark}"lane":{number},'
        self.tid = tid
        self.ends: list[int] = []
        self.closings: list[str] = []

    def takes(self, start_ns: int, end_ns: int) -> bool:
        """Whether a slice nests here, after those over by its start are closed. Starts must not fall."""
        ends = self.ends
        while ends and ends[-1] <= start_ns:
            ends.pop()
        return len(ends) < DEEPEST and (not ends or ends[-1] >= end_ns)

    def close(self, until_ns: int) -> Iterator[str]:
        """The events that end the async slices which are over by then, innermost first."""
        while self.ends and self.ends[-1] <= until_ns:
            self.ends.pop()
            yield self.closings.pop()


class _Board:
    """The lanes of a file, made as slices need them: `rows` by process and thread or stream, `tasks` by tree and
    task. `moved` are the lanes of spans that the first lane of their thread or task did not take."""

    def __init__(self, trace: Trace, base_ns: int) -> None:
        self.base_ns = base_ns
        self.pid = trace.origin.pid if 0 <= trace.origin.pid < DEVICE_PIDS else 0
        self.rows: dict[tuple[int, int], list[_Lane]] = {}
        self.tasks: dict[tuple[int, int], list[_Lane]] = {}
        self.moved: dict[int, _Lane] = {}
        self._spare_tids = count(SPARE_TIDS)

    def time(self, time_ns: int) -> str:
        """A time as microseconds since the base, with three decimals, exactly."""
        since_ns = time_ns - self.base_ns
        return f'"ts":{since_ns // 1000}{_MILLI[since_ns % 1000]}'

    def thread(self, thread_id: int) -> _Lane:
        """The first lane of a thread."""
        lanes = self.rows.get((self.pid, thread_id))
        return lanes[0] if lanes else self.lane(self.pid, thread_id, 0, 0)

    def _fitting(self, lanes: list[_Lane], start_ns: int, end_ns: int, parent_id: int) -> _Lane | None:
        """The one of these lanes that takes a slice: where its parent was moved to if it can be, else the first."""
        beside = self.moved.get(parent_id)
        wanted = lanes if beside is None or beside not in lanes else [beside, *lanes]
        return next((lane for lane in wanted if lane.takes(start_ns, end_ns)), None)

    def lane(self, pid: int, thread_or_stream: int, start_ns: int, end_ns: int, parent_id: int = 0) -> _Lane:
        """The lane of a thread or stream that takes a slice."""
        lanes = self.rows.setdefault((pid, thread_or_stream), [])
        lane = self._fitting(lanes, start_ns, end_ns, parent_id)
        if lane is not None:
            return lane
        # Perfetto folds tid 0 into the main thread, and takes none beyond 32 bits.
        own = not lanes and 0 < thread_or_stream < SPARE_TIDS
        tid = thread_or_stream if own else next(self._spare_tids)
        mark = "" if own or pid != self.pid else f'"thread":{thread_or_stream},'
        lanes.append(_Lane(f',"pid":{pid},"tid":{tid}', len(lanes) + 1, mark, tid))
        return lanes[-1]

    def task_lane(self, span: Span, events: list[str]) -> _Lane:
        """The lane of a span's task that takes it; what ended there by now is added to the events."""
        lanes = self.tasks.setdefault((span.root_id, span.task_id), [])
        for lane in lanes:
            events += lane.close(span.start_ns)
        fitting = self._fitting(lanes, span.start_ns, span.end_ns, span.parent_id)
        if fitting is not None:
            return fitting
        category = "request" if span.site.kind == "request" else "task"
        lanes.append(_Lane(f'"cat":"{category}","id2":{{"local":"{span.span_id:#x}"}},"name":', len(lanes) + 1, ""))
        return lanes[-1]

    def closings(self, until_ns: int) -> Iterator[str]:
        """The ends of the async slices that are over by then. Lanes left empty are forgotten, to save memory."""
        for key, lanes in list(self.tasks.items()):
            for lane in lanes:
                yield from lane.close(until_ns)
            if not any(lane.ends for lane in lanes):
                del self.tasks[key]

    def address(self, span: Span) -> str:
        """Where the complete event of a span lies."""
        return (self.moved.get(span.span_id) or self.thread(span.thread_id)).address


def _device_pid(device: int) -> int:
    return DEVICE_PIDS + device % DEVICE_PIDS


def _name_event(what: str, value: str | int, place: str) -> str:
    key = "sort_index" if isinstance(value, int) else "name"
    return f'{{"ph":"M","name":"{what}","pid":{place},"args":{{"{key}":{_encode(_safe(value))}}}}}'


def _process_names(pid: int, name: str, position: int) -> list[str]:
    return [_name_event("process_name", name, f"{pid}"), _name_event("process_sort_index", position, f"{pid}")]


def _lane_names(board: _Board, threads: Mapping[int, str]) -> Iterator[str]:
    """The names of all lanes, threads in the order in which they are known, and of the devices."""
    known = {thread_id: position for position, thread_id in enumerate(threads)}
    positions = count()
    seen = {board.pid}
    for pid, own_id in sorted(board.rows, key=lambda row: (row[0], known.get(row[1], len(known)), row[1])):
        if pid not in seen:
            seen.add(pid)
            yield from _process_names(pid, f"GPU {pid - DEVICE_PIDS}", 1 + pid - DEVICE_PIDS)
        name = f"stream {own_id}" if pid != board.pid else threads.get(own_id) or f"thread {own_id}"
        for lane in board.rows[pid, own_id]:
            place = f'{pid},"tid":{lane.tid}'
            yield _name_event("thread_name", name if lane.number == 1 else f"{name} ({lane.number})", place)
            yield _name_event("thread_sort_index", next(positions), place)


# Slices


def _is_async(span: Span) -> bool:
    return span.task_id != 0 or span.site.kind == "request"


def _span_events(spans: Sequence[Span], board: _Board, sites: _Sites, binds: Mapping[int, str]) -> list[str]:
    """The slices of spans that come by start. This loop is the cost of writing: about a microsecond a span."""
    events: list[str] = []
    append, texts, base_ns, moved = events.append, sites.texts, board.base_ns, board.moved
    firsts: dict[int, _Lane] = {}
    for span in spans:
        start_ns, end_ns, site, thread_id = span.start_ns, span.end_ns, span.site, span.thread_id
        if span.task_id or site.kind == "request":
            _add_task_events(span, texts[site], board, binds, events)
            continue
        lane = firsts.get(thread_id) or firsts.setdefault(thread_id, board.thread(thread_id))
        ends = lane.ends
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if (ends and (ends[-1] < end_ns or len(ends) >= DEEPEST)) or (moved and span.parent_id in moved):
            lane = board.lane(board.pid, thread_id, start_ns, end_ns, span.parent_id)
            ends = lane.ends
            if lane.number > 1:
                moved[span.span_id] = lane
        ends.append(end_ns)
        head, tail, _, _ = texts[site]
        since_ns, total_ns = start_ns - base_ns, end_ns - start_ns
        more = ""
        if span.active_ns != total_ns or span.error is not None or span.attributes or span.clipped or span.remote:
            more = _more_args(span)
        append(
            f'{head}{since_ns // 1000}{_MILLI[since_ns % 1000]},"dur":{total_ns // 1000}{_MILLI[total_ns % 1000]}'
            f'{lane.address},"args":{{{lane.mark}"id":{span.span_id},"parent":{span.parent_id},"root":{span.root_id}'
            f',"self_ns":{span.self_ns}{more}{tail}{binds.get(span.span_id, "") if binds else ""}}}'
        )
    events += board.closings(spans[-1].start_ns)
    return events


def _add_task_events(span: Span, text: _SiteText, board: _Board, binds: Mapping[int, str], events: list[str]) -> None:
    """The async slice of a span. Its end is written when its lane is next used, so that ends come innermost first."""
    lane, thread = board.task_lane(span, events), board.thread(span.thread_id)
    if lane.number > 1:
        board.moved[span.span_id] = lane
    slice_text = f"{lane.address}{text.name}{thread.address}"
    more = f',"task":{span.task_id}' if span.task_id else ""
    if span.active_ns != span.total_ns or span.error is not None or span.attributes or span.clipped or span.remote:
        more += _more_args(span)
    lane.ends.append(span.end_ns)
    lane.closings.append(f'{{"ph":"e",{slice_text},{board.time(span.end_ns)}}}')
    events.append(
        f'{{"ph":"b",{slice_text},{board.time(span.start_ns)},"args":{{{thread.mark}{lane.mark}"kind":{text.kind}'
        f',"id":{span.span_id},"parent":{span.parent_id},"root":{span.root_id},"total_ns":{span.total_ns}'
        f',"self_ns":{span.self_ns}{more}{text.tail}{binds.get(span.span_id, "")}}}'
    )


def _more_args(span: Span) -> str:
    """The arguments that only some spans have, and none of them is usual."""
    more: dict[str, Any] = {}
    if span.active_ns != span.total_ns:
        more["active_ns"] = span.active_ns
    if span.error is not None:
        more["error"] = _safe(span.error)
    if span.clipped:
        more["clipped"] = True
    if span.remote is not None:
        trace_id, span_id = f"{span.remote.trace_id:032x}", f"{span.remote.span_id:016x}"
        more["remote"] = {"trace_id": trace_id, "span_id": span_id, "flags": span.remote.flags}
    if span.attributes:
        more["attributes"] = _safe(dict(span.attributes))
    return "," + _encode(more)[1:-1] if more else ""


def _device_events(owners: Sequence[Span], board: _Board, sites: _Sites, arrows: _Arrows) -> Iterator[str]:
    """The device intervals of the spans. Only those that enclose no other have the argument `stream`, because
    HolisticTraceAnalysis takes what has it for a kernel and adds all kernels up."""
    found = [(interval, place, owner) for owner in owners for place, interval in enumerate(owner.device)]
    found.sort(key=lambda item: (item[0].start_ns, -item[0].end_ns))
    next_ns: dict[tuple[int, int], int] = {}
    keys = []
    for interval, _, _ in reversed(found):
        stream = interval.device, interval.stream
        keys.append("enclosing_stream" if next_ns.get(stream, INT64) < interval.end_ns else "stream")
        next_ns[stream] = interval.start_ns
    for (interval, place, owner), key in zip(found, reversed(keys), strict=True):
        lane = board.lane(_device_pid(interval.device), interval.stream, interval.start_ns, interval.end_ns)
        lane.ends.append(interval.end_ns)
        bind = arrows.launch(owner, interval, lane.address)
        total_ns = interval.end_ns - interval.start_ns
        yield (
            f'{{"ph":"X","name":{sites.texts[owner.site].name},"cat":"device",{board.time(interval.start_ns)}'
            f',"dur":{total_ns // 1000}{_MILLI[total_ns % 1000]}{lane.address},"args":{{{lane.mark}'
            f'"owner":{owner.span_id},"place":{place},"device":{interval.device},"{key}":{interval.stream}'
            f',"label":{_encode(_clean(interval.label))},"uncertainty_ns":{interval.uncertainty_ns}}}{bind}}}'
        )


# Arrows


@dataclass(slots=True)
class _Arrows:
    """The arrows of a file.

    Async slices can only be tied by a bind id, of which a slice has room for one: `binds` are those texts by span
    id. Complete events have arrows of their own: `flows` are their name, source span, target's lane and time.
    """

    binds: dict[int, str] = field(default_factory=dict)
    flows: list[tuple[str, Span, Span | str, int]] = field(default_factory=list)
    left_out: int = 0

    def launch(self, owner: Span, interval: DeviceInterval, address: str) -> str:
        """Add the arrow to a device interval; returns the text that ties the interval, if a bind does it."""
        if not _may_lead(owner, interval.start_ns):
            return ""
        if _is_async(owner):
            return _bind(owner.span_id, "in")
        self.flows.append(("ac2g", owner, address, interval.start_ns))
        return ""


def _may_lead(source: Span, target_ns: int, bound: bool = False) -> bool:
    """Whether an arrow can lead to what starts then. The end of a bind must start later than its source: at the
    same time Perfetto sees complete events before async ones, and what it sees first cannot be an end."""
    return source.start_ns < target_ns or (source.start_ns == target_ns and not (bound or _is_async(source)))


def _bind(source_id: int, direction: str) -> str:
    return f',"bind_id":"{SPARE_BINDS | source_id:#x}","flow_{direction}":true'


def _plan_arrows(spans: Sequence[Span], owners: Sequence[Span]) -> _Arrows:
    """Decide which arrows the file can have. Where a span would need two binds, its own targets win."""
    arrows = _Arrows()
    by_id = {span.span_id: span for span in spans}
    ties: list[tuple[Span, Span]] = []
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is None or (parent.thread_id == span.thread_id and parent.task_id == span.task_id):
            continue
        if _is_async(parent) or _is_async(span):
            ties.append((parent, span))
        elif _may_lead(parent, span.start_ns):
            arrows.flows.append(("call", parent, span, span.start_ns))
        else:
            arrows.left_out += 1
    bound: dict[int, int] = {}
    for owner in owners:
        legal = [_may_lead(owner, interval.start_ns) for interval in owner.device]
        arrows.left_out += legal.count(False)
        if _is_async(owner) and any(legal):
            bound[owner.span_id] = owner.span_id
    for parent, span in reversed(ties):
        room = span.span_id not in bound and bound.get(parent.span_id, parent.span_id) == parent.span_id
        if room and _may_lead(parent, span.start_ns, bound=True):
            bound[span.span_id] = bound[parent.span_id] = parent.span_id
        else:
            arrows.left_out += 1
    arrows.binds = {i: _bind(source_id, "out" if i == source_id else "in") for i, source_id in bound.items()}
    return arrows


def _arrow_events(arrows: _Arrows, board: _Board) -> Iterator[str]:
    """The arrows between complete events. Both ends attach to the innermost slice at their time."""
    started: set[tuple[str, int]] = set()
    for name, source, target, target_ns in arrows.flows:
        arrow = f'"name":"{name}","cat":"{name}","id":{source.span_id}'
        if (name, source.span_id) not in started:
            started.add((name, source.span_id))
            yield f'{{"ph":"s",{arrow},{board.time(source.start_ns)}{board.address(source)}}}'
        address = target if isinstance(target, str) else board.address(target)
        yield f'{{"ph":"f","bp":"e",{arrow},{board.time(target_ns)}{address}}}'


# Reading


def load(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> tuple[Trace, Tally]:
    """Read a trace and its tally from Chrome JSON, plain or packed with gzip.

    What `dump` wrote comes back exactly, spans by start. Other profilers' traces are read by their slices: lanes
    become threads, containment makes the trees, and self times follow from these. A file without a tally has it
    counted from its spans. At most `limit_bytes` of unpacked text are read, one event at a time.

    Raises `TraceError` for whatever cannot be read.
    """
    why: str
    cause: Exception
    try:
        return _load(Path(path), limit_bytes)
    except RecursionError as problem:
        why, cause = "it nests deeper than any trace; give a Chrome trace in JSON", problem
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        why, cause = "its gzip data is cut off or damaged; write or copy it again", problem
    except OSError as problem:
        why, cause = f"{problem.strerror or problem}; give a trace file that may be read", problem
    except UnicodeDecodeError as problem:
        why, cause = "it is not UTF-8 text; give a Chrome trace in JSON", problem
    except ValueError as problem:
        why, cause = str(problem), problem
    except (LookupError, TypeError, AttributeError, ArithmeticError) as problem:
        why, cause = f"a part is missing or of a wrong type ({problem!r:.80}); write or copy it again", problem
    raise TraceError(f"cannot read the trace {os.fspath(path)}: {why}") from cause


def _load(source: Path, limit_bytes: int) -> tuple[Trace, Tally]:
    facts = source.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError("it is not a regular file; give a trace file")
    if not facts.st_size:
        raise ValueError("it is empty; write it again")
    with source.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    with gzip.open(source) if gzipped else source.open("rb") as text:
        json_text = _JsonText(text.read, limit_bytes)
        if not gzipped:
            json_text.refuse_beyond_limit(facts.st_size)
        return _content(_members(json_text))


class _JsonText:
    """JSON text that is taken value by value, so that one value and one block of it are in memory."""

    def __init__(self, read: Callable[[int], bytes], limit_bytes: int) -> None:
        self._read = read
        self._limit_bytes = limit_bytes
        self._seen_bytes = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._decode = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode
        self._text = ""
        self._at = 0
        self._passed = 0

    def refuse_beyond_limit(self, size_bytes: int) -> None:
        if size_bytes > self._limit_bytes:
            raise ValueError(f"it holds more than {self._limit_bytes} bytes of text; record less, or raise limit_bytes")

    def _more(self) -> bool:
        """Read on, the further the longer the value at hand is already; False at the end of the text."""
        held = len(self._text) - self._at
        if held > LIMIT_VALUE:
            raise ValueError("one value in it is longer than in any trace; give a Chrome trace in JSON")
        block = self._read(max(BLOCK_BYTES, held))
        self._seen_bytes += len(block)
        self.refuse_beyond_limit(self._seen_bytes)
        self._passed += self._at
        self._text = self._text[self._at :] + self._utf8.decode(block, final=not block)
        self._at = 0
        return bool(block)

    def peek(self) -> str:
        """The next character that is not blank, or "" at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            self._at = blanks.end() if blanks else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, expected: str) -> str:
        """Pass over the next character that is not blank, which must be one of those expected."""
        found = self.peek()
        if not found or found not in expected:
            what = f"{found!r} stands" if found else "it ends"
            raise self._wrong(f"{what} where one of {expected} belongs", 0)
        self._at += 1
        return found

    def value(self) -> Any:
        """The next value."""
        self.peek()
        failed_at = -1
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as problem:
                # Cut off by the block's end, or wrong: with more text the first kind fails elsewhere or not at all.
                at = problem.pos - self._at
                if (at == failed_at and not problem.msg.startswith("Unterminated")) or not self._more():
                    raise self._wrong(problem.msg, at) from problem
                failed_at = at
                continue
            length = end - self._at
            # A number at the very end may go on in the next block.
            if end < len(self._text) or isinstance(value, (dict, list, str)) or not self._more():
                self._at += length
                return value

    def _wrong(self, why: str, further: int) -> ValueError:
        at = self._passed + self._at + further
        return ValueError(f"it is no JSON, or cut off ({why}, at character {at}); write or copy it again")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is not JSON; write it with finite numbers")


def _members(text: _JsonText) -> Iterator[tuple[str | None, Any]]:
    """The file's top-level keys and values; each event by itself, with None for a key."""
    if text.peek() == "\ufeff":
        raise ValueError("it starts with a byte order mark, which viewers refuse; remove its first three bytes")
    if text.take("{[") == "[":
        yield from _elements(text)
    else:
        end, has_events = text.take("}") if text.peek() == "}" else ",", False
        while end == ",":
            key = _checked(text.value(), str)
            text.take(":")
            if key == "traceEvents":
                text.take("[")
                yield from _elements(text)
                has_events = True
            else:
                yield key, text.value()
            end = text.take(",}")
        if not has_events:
            raise ValueError("it has no list 'traceEvents'; give a Chrome trace in JSON")
    if text.peek():
        raise ValueError("something follows its end; write or copy it again")


def _elements(text: _JsonText) -> Iterator[tuple[None, dict[str, Any]]]:
    end = text.take("]") if text.peek() == "]" else ","
    while end == ",":
        yield None, _checked(text.value(), dict)
        end = text.take(",]")


def _content(members: Iterator[tuple[str | None, Any]]) -> tuple[Trace, Tally]:
    foreign = _Foreign()
    own: _Own | None = None
    for key, value in members:
        if key is None:
            (own or foreign).add(value)
        elif key == "instrument" and isinstance(value, dict) and "format" in value:
            if foreign.spans or foreign.marks:
                raise ValueError("its key 'instrument' comes after its events; put its keys in order (`jq -S .`)")
            own = _Own(value)
        elif key == "baseTimeNanoseconds":
            foreign.epoch_ns = _checked(value, int)
        elif key == "host_name":
            foreign.host = _checked(value, str)
    trace, tally = (own or foreign).content()
    return trace, _counted(trace) if tally is None else tally


def _counted(trace: Trace) -> Tally:
    """The tally of a trace's spans, unless call paths are so long that it would take endless memory or time."""
    span_ids = {span.span_id for span in trace.spans}
    depths: dict[int, int] = {}
    links = backward = 0
    for span in trace.spans:
        depth = depths[span.span_id] = 1 + depths.get(span.parent_id, 0)
        links += depth
        backward += depth == 1 and span.parent_id in span_ids
        if links > LIMIT_LINKS or backward > LIMIT_BACKWARD:
            raise ValueError("its calls lie in one another deeper than any program's; it is damaged")
    return Tally.of_spans(trace.spans, trace.threads)


def _checked(value: object, *kinds: type) -> Any:
    """The value, which must be of just one of these types, and no whole number beyond int64."""
    if type(value) not in kinds or (isinstance(value, int) and not -INT64 <= value < INT64):
        raise ValueError(f"it has {value!r:.40} where {kinds[0].__name__} belongs; give a Chrome trace in JSON")
    return value


def _place(value: object) -> int:
    """An index, which must not count from the end."""
    place: int = _checked(value, int)
    if place < 0:
        raise ValueError(f"it has {place} for a place in a list; it is damaged")
    return place


def _ns(time_us: object) -> int:
    """Microseconds as nanoseconds, exact for three decimals."""
    time: float = _checked(time_us, float, int)
    if not -LIMIT_US < time < LIMIT_US:
        raise ValueError(f"it has {time} for a time in microseconds; write times relative to the start")
    return round(time * 1000)


def _attribute(value: Any) -> Any:
    return tuple(map(_attribute, value)) if isinstance(value, list) else value


def _made(kind: type, facts: Mapping[str, Any], **more: Any) -> Any:
    """A flat dataclass from those of its fields that are there, each checked to be of the field's type."""
    found = [known for known in fields(kind) if known.name in facts and known.name not in more]
    return kind(**{known.name: _checked(facts[known.name], *_JSON_TYPES[str(known.type)]) for known in found}, **more)


def _site(facts: dict[str, Any]) -> Site:
    pairs = tuple((_checked(key, str), _attribute(value)) for key, value in facts.get("attributes", ()))
    site: Site = _made(Site, facts, attributes=pairs)
    return site


def _names(pairs: Any) -> dict[int, str]:
    return {_checked(thread_id, int): _checked(name, str) for thread_id, name in pairs}


class _Own:
    """Reads what `dump` wrote."""

    def __init__(self, facts: dict[str, Any]) -> None:
        if facts["format"] != FORMAT:
            found = f"its format is {facts['format']!r:.20}, and this version reads {FORMAT}"
            raise ValueError(f"{found}; read it with the version of instrument that wrote it")
        self.facts = facts
        self.base_ns: int = _checked(facts["base_ns"], int)
        self.sites = [_site(entry) for entry in facts["sites"]]
        self.spans: list[Span] = []
        self.intervals: dict[int, list[tuple[int, DeviceInterval]]] = {}

    def add(self, event: dict[str, Any]) -> None:
        phase = _checked(event.get("ph", ""), str)
        if phase not in ("X", "b"):
            return
        args = event["args"]
        start_ns = self.base_ns + _ns(event["ts"])
        end_ns = start_ns + (_ns(event["dur"]) if phase == "X" else _checked(args["total_ns"], int))
        if end_ns < start_ns:
            raise ValueError("a slice in it ends before it starts; it is damaged")
        if "owner" in args:
            stream = _checked(args["stream"] if "stream" in args else args["enclosing_stream"], int)
            interval = _made(DeviceInterval, args, stream=stream, start_ns=start_ns, end_ns=end_ns)
            self.intervals.setdefault(args["owner"], []).append((_place(args["place"]), interval))
            return
        error, remote = args.get("error"), args.get("remote")
        self.spans.append(
            Span(
                site=self.sites[_place(args["site"])],
                span_id=_checked(args["id"], int),
                parent_id=_checked(args["parent"], int),
                root_id=_checked(args["root"], int),
                thread_id=_checked(args.get("thread", event["tid"]), int),
                task_id=_checked(args.get("task", 0), int),
                start_ns=start_ns,
                end_ns=end_ns,
                active_ns=_checked(args.get("active_ns", end_ns - start_ns), int),
                self_ns=_checked(args["self_ns"], int),
                error=None if error is None else _checked(error, str),
                attributes={key: _attribute(value) for key, value in args.get("attributes", {}).items()},
                clipped=_checked(args.get("clipped", False), bool),
                remote=None if remote is None else _remote(remote),
            )
        )
        if len(self.spans) > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} spans; record less into one file")

    def content(self) -> tuple[Trace, Tally | None]:
        facts = self.facts
        self.spans.sort(key=lambda s: (s.start_ns, -s.end_ns, s.span_id))
        for span in self.spans:
            span.device = tuple(map(itemgetter(1), sorted(self.intervals.get(span.span_id, ()), key=itemgetter(0))))
        trace = Trace(
            origin=_made(Origin, facts["origin"]),
            start_ns=_checked(facts["start_ns"], int),
            end_ns=_checked(facts["end_ns"], int),
            spans=self.spans,
            threads=_names(facts["threads"]),
            losses={reason: _checked(lost, int) for reason, lost in facts["losses"].items()},
            notes=tuple(_checked(note, str) for note in facts["notes"]),
            window=_checked(facts["window"], int),
            cost=None if facts["cost"] is None else _made(Cost, facts["cost"]),
        )
        return trace, None if facts["tally"] is None else self._tally(facts["tally"])

    def _tally(self, saved: dict[str, Any]) -> Tally:
        tally = Tally(_names(saved["threads"]))
        paths: list[tuple[Site, ...]] = []
        links = 0
        for parent, site in saved["nodes"]:
            paths.append((*(() if parent == -1 else paths[_place(parent)]), self.sites[_place(site)]))
            links += len(paths[-1])
            if links > LIMIT_LINKS:
                raise ValueError("its call paths are longer than any program's; it is damaged")
        for node, thread_id, *numbers_of_row, histogram in saved["rows"]:
            sums = dict(zip(_SUMS, (_checked(number, int) for number in numbers_of_row), strict=True))
            sums["first_ns"] += self.base_ns
            pairs = zip(map(_place, histogram[::2]), map(_place, histogram[1::2]), strict=True)
            path = () if node == -1 else paths[_place(node)]
            tally.totals(path, _checked(thread_id, int)).merge(Totals(**sums, histogram=dict(pairs)))
        return tally


def _remote(facts: dict[str, Any]) -> RemoteParent:
    return RemoteParent(int(facts["trace_id"], 16), int(facts["span_id"], 16), _checked(facts["flags"], int))


class _Foreign:
    """Reads other profilers' traces: slices, whether complete, of begins and ends, or async, and names.

    `marks` are the begins by lane or async key, each a time and a span, and the ends, each a time and None.
    """

    def __init__(self) -> None:
        self.epoch_ns = 0
        self.host = ""
        self.spans: list[Span] = []
        self.marks: dict[tuple[Any, ...], list[tuple[int, Span | None]]] = {}
        self.tasks: dict[tuple[Any, ...], int] = {}
        self.sites: dict[tuple[str, str], Site] = {}
        self.names: dict[tuple[Any, ...], str] = {}
        self.thread_ids: dict[tuple[Any, ...], int] = {}
        self._taken: set[Any] = set()
        self._spare_ids = count(SPARE_TIDS)
        self._count = 0

    def add(self, event: dict[str, Any]) -> None:
        phase = _checked(event.get("ph", ""), str)
        row = tuple(_checked(event.get(key), int, str, type(None)) for key in ("pid", "tid"))
        if phase == "M" and event.get("name") in ("process_name", "thread_name"):
            self.names[row if event["name"] == "thread_name" else (row[0], None)] = _checked(event["args"]["name"], str)
        if phase not in ("X", "B", "E", "b", "e"):
            return
        self._count += 1
        if self._count > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} events; record less into one file")
        start_ns = _ns(event.get("ts"))
        key = (row[0], *(f"{event.get(part)}" for part in ("cat", "id", "id2"))) if phase in "be" else row
        if phase in "Ee":
            self.marks.setdefault(key, []).append((start_ns, None))
            return
        end_ns = _ns(event["ts"] + _checked(event.get("dur"), float, int)) if phase == "X" else start_ns
        if end_ns < start_ns:
            raise ValueError("a slice in it ends before it starts; it is damaged")
        span = Span(self._site(event), 0, 0, 0, self._thread_id(row), 0, start_ns, end_ns, 0, 0)
        span.attributes = {k: v for k, v in event.get("args", {}).items() if isinstance(v, (str, int, float))}
        if phase == "X":
            self.spans.append(span)
        else:
            marks = self.marks.setdefault(key, [])
            span.task_id = self.tasks.setdefault(key, 1 + len(self.tasks)) if phase == "b" else 0
            marks.append((start_ns, span))

    def _thread_id(self, row: tuple[Any, ...]) -> int:
        if row not in self.thread_ids:
            usable = type(row[1]) is int and 0 <= row[1] < SPARE_TIDS and row[1] not in self._taken
            self.thread_ids[row] = row[1] if usable else next(self._spare_ids)
            self._taken.add(row[1])
        return self.thread_ids[row]

    def _site(self, event: dict[str, Any]) -> Site:
        name = _checked(event.get("name", "(no name)"), str)
        kind = KIND_OF_CATEGORY.get(_checked(event.get("cat") or "", str), "user")
        return self.sites.setdefault((name, kind), Site(name, kind))

    def content(self) -> tuple[Trace, None]:
        strays = self._close_marks()
        self._nest()
        assign_self_times(self.spans)
        pids = [pid for pid, _ in self.thread_ids]
        threads = {}
        for row, thread_id in self.thread_ids.items():
            name = self.names.get(row) or (row[1] if isinstance(row[1], str) else f"thread {row[1]}")
            process = self.names.get((row[0], None), f"process {row[0]}")
            threads[thread_id] = name if len(set(pids)) == 1 else f"{process}: {name}"
        origin = Origin(
            pid=next((pid for pid in pids if isinstance(pid, int)), 0),
            service=self.names.get((pids[0], None), "") if pids else "",
            monotonic_ns=0,
            realtime_ns=self.epoch_ns,
            recorder="other",
            host=self.host,
        )
        first_ns = min((span.start_ns for span in self.spans), default=0)
        last_ns = max((span.end_ns for span in self.spans), default=0)
        losses = {"slice ends without a begin": strays} if strays else {}
        return Trace(origin, first_ns, last_ns, self.spans, threads, losses), None

    def _close_marks(self) -> int:
        """Make spans of begins and ends, by time like a stack; returns how many ends had no begin."""
        times = [span.end_ns for span in self.spans] + [at_ns for marks in self.marks.values() for at_ns, _ in marks]
        last_ns = max(times, default=0)
        strays = 0
        for marks in self.marks.values():
            opened: list[Span] = []
            for at_ns, span in sorted(marks, key=itemgetter(0)):
                if span is not None:
                    opened.append(span)
                    self.spans.append(span)
                elif opened:
                    opened.pop().end_ns = at_ns
                else:
                    strays += 1
            for span in opened:
                span.end_ns, span.clipped = last_ns, True
        return strays

    def _nest(self) -> None:
        """Make each span a child of the innermost of its lane that holds it. One that crosses another holds none."""
        opened: dict[tuple[int, int], list[Span]] = {}
        self.spans.sort(key=lambda s: (s.start_ns, -s.end_ns))
        for span_id, span in enumerate(self.spans, start=1):
            stack = opened.setdefault((span.thread_id, span.task_id), [])
            while stack and stack[-1].end_ns <= span.start_ns:
                stack.pop()
            parent = next((above for above in reversed(stack) if above.end_ns >= span.end_ns), None)
            span.span_id = span.root_id = span_id
            span.active_ns = span.total_ns
            if parent is not None:
                span.parent_id, span.root_id = parent.span_id, parent.root_id
            if not stack or stack[-1] is parent:
                stack.append(span)
