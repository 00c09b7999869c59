"""Chrome trace JSON, the file that Perfetto shows: written from a trace, and read back into one.

How a trace becomes slices and lanes:

* A span that no task ran is a complete event (`X`) on the lane of its thread.
* Requests, and all that tasks ran, are async slices (`b`, `e`), one lane for each task of a tree: tasks interleave on
  their thread, so they do not nest by time. The lane of a request has category `request`, others have `task`, and
  `args.kind` says what a slice is, because Perfetto nests async slices of one category only.
* A device interval is a complete event of the process `GPU n`, on the lane of its stream.
* Slices of a lane must nest, or viewers drop them in silence. One that crosses another, or lies deeper than viewers
  show, goes to a further lane such as `MainThread (2)` and has the lane's number in `args.lane`; nothing is cut.
* Arrows lead from a span to what it started in another lane, and to its device intervals. One that would point into
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
from itertools import count, pairwise
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
# start after their children, characters of one value, microseconds that a float holds to the nanosecond.
LIMIT_SPANS, LIMIT_LINKS, LIMIT_BACKWARD, LIMIT_VALUE, LIMIT_US = 10_000_000, 20_000_000, 1000, 256 << 20, 1 << 42

DEVICE_PIDS = SPARE_TIDS = 1 << 31
"""No process or thread of a host has an id from here on: devices are processes, further lanes are threads there."""

SPARE_BINDS = 1 << 63
"""Set in every bind id, because Perfetto numbers the `s` and `f` arrows from 0 in the same space."""

DEEPEST = 511
"""Most slices in one another on a lane. Perfetto draws the 513th at the top, and the 512th looks the same."""

COMPRESSION = 1
"""zlib level; level 6 takes three times as long for a file that is a seventh smaller."""

BATCH, BLOCK_BYTES, FOREVER_NS = 4096, 1 << 20, 1 << 64
KIND_OF_CATEGORY = {**{kind: kind for kind in KINDS}, "cpu_op": "op", "kernel": "op", "gpu_memcpy": "copy"}

_MILLI = tuple(f".{thousandths:03d}" for thousandths in range(1000))
_BLANKS = re.compile(r"[ \t\n\r]*")
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
    replaces an older one; directories above it are made. The text is never in memory as a whole.

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
            raise TraceError(f"the path {template!r} asks for {{{name}}}; give only {{service}}, {{pid}} and {{window}}")
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
    spans = _outer_first(trace.spans)
    owners = [span for span in spans if span.device]
    first_ns = [interval.start_ns for owner in owners for interval in owner.device]
    base_ns = min([trace.start_ns, *(span.start_ns for span in spans[:1]), *first_ns])
    arrows = _plan_arrows(spans, owners)
    sites = _Sites({span.site: None for span in spans})
    head = _metadata(trace, base_ns, sites, tally, arrows.left_out)
    board = _Board(trace, base_ns)
    names = ",\n".join(_process_names(board.pid, trace.origin.service or f"process {trace.origin.pid}", 0))
    yield f'{{"displayTimeUnit":"ms","instrument":{head},"traceEvents":[\n{names}'
    for first in range(0, len(spans), BATCH):
        yield ",\n".join(["", *_span_events(spans[first : first + BATCH], board, sites, arrows.binds)])
    yield from _batches(board.closings(FOREVER_NS))
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


def _outer_first(spans: Sequence[Span]) -> list[Span]:
    """By start, the longer first, and parents before their children where both are equal."""
    ordered = sorted(spans, key=attrgetter("start_ns"))
    last = 0
    for first in [at for at, (one, next_one) in enumerate(pairwise(ordered)) if one.start_ns == next_one.start_ns]:
        if first >= last:
            last = first + 2
            while last < len(ordered) and ordered[last].start_ns == ordered[first].start_ns:
                last += 1
            ordered[first:last] = _parents_first(sorted(ordered[first:last], key=lambda s: (-s.end_ns, s.span_id)))
    return ordered


def _parents_first(ordered: list[Span]) -> Iterable[Span]:
    """Spans of one start by falling end; where ends are equal too, a parent comes before its children."""
    by_id = {span.span_id: span for span in ordered}
    placed: dict[int, Span] = {}
    for span in ordered:
        chain: dict[int, Span] = {}
        link: Span | None = span
        while link and link.end_ns == span.end_ns and link.span_id not in placed and link.span_id not in chain:
            chain[link.span_id] = link
            link = by_id.get(link.parent_id)
        placed.update(reversed(chain.items()))
    return placed.values()


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
    if isinstance(value, numbers.Integral):
        whole = int(value)
        if -(1 << 63) <= whole < 1 << 63:
            return whole
        return str(whole) if whole.bit_length() <= 4096 else f"<int of {whole.bit_length()} bits>"
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (list, tuple)) and depth < 4:
        return [_safe(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < 4:
        return {_clean(key): _safe(item, depth + 1) for key, item in value.items() if isinstance(key, str)}
    return f"<{_clean(type(value).__name__)}>"


def _facts(thing: Any) -> dict[str, Any]:
    """The fields of a flat dataclass that are not at their default; `_made` is the way back."""
    values = {known.name: (getattr(thing, known.name), known.default) for known in fields(thing)}
    return {name: _safe(value) for name, (value, default) in values.items() if value != default}


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
    return _encode(facts)[:-1] + ',"sites":[\n' + ",\n".join(sites.entries) + f'],\n"tally":{counted}}}'


def _tally_text(tally: Tally, base_ns: int, sites: _Sites) -> str:
    """A tally: its nodes as [parent or -1, site], and its rows, whose `first_ns` counts from the base."""
    places = {site: sites.index(site) for row in tally.rows() for site in row.path}
    nodes: dict[tuple[int, int], int] = {}
    rows = []
    for row in tally.rows():
        node = -1
        for site in row.path:
            node = nodes.setdefault((node, places[site]), len(nodes))
        t = row.totals
        sums = [t.calls, t.errors, t.total_ns, t.self_ns, t.device_ns, t.elapsed_ns, t.min_ns, t.max_ns, t.moved_bytes]
        histogram = [number for bucket in sorted(t.histogram.items()) for number in bucket]
        rows.append(_encode([node, row.thread_id, *sums, t.first_ns - base_ns, histogram]))
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
    task. `moved` are the lanes of spans that the first lane of their thread did not take."""

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

    def lane(self, pid: int, thread_or_stream: int, start_ns: int, end_ns: int) -> _Lane:
        """The first lane of a thread or stream that takes a slice."""
        lanes = self.rows.setdefault((pid, thread_or_stream), [])
        for lane in lanes:
            if lane.takes(start_ns, end_ns):
                return lane
        # Perfetto folds tid 0 into the main thread, and takes none beyond 32 bits.
        own = not lanes and 0 < thread_or_stream < SPARE_TIDS
        tid = thread_or_stream if own else next(self._spare_tids)
        mark = "" if own else f'"thread":{thread_or_stream},'
        lanes.append(_Lane(f',"pid":{pid},"tid":{tid}', len(lanes) + 1, mark, tid))
        return lanes[-1]

    def task_lane(self, span: Span, events: list[str]) -> _Lane:
        """The first lane of a span's task that takes it; what ended there by now is added to the events."""
        lanes = self.tasks.setdefault((span.root_id, span.task_id), [])
        for lane in lanes:
            events += lane.close(span.start_ns)
            if lane.takes(span.start_ns, span.end_ns):
                return lane
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
    append, texts, base_ns, firsts = events.append, sites.texts, board.base_ns, dict[int, _Lane]()
    for span in spans:
        start_ns, end_ns, site, thread_id = span.start_ns, span.end_ns, span.site, span.thread_id
        if span.task_id or site.kind == "request":
            _add_task_events(span, texts[site], board, binds, events)
            continue
        lane = firsts.get(thread_id) or firsts.setdefault(thread_id, board.thread(thread_id))
        ends = lane.ends
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if ends and (ends[-1] < end_ns or len(ends) >= DEEPEST):
            lane = board.moved[span.span_id] = board.lane(board.pid, thread_id, start_ns, end_ns)
            ends = lane.ends
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
    slice_text = f"{lane.address}{text.name}{thread.address}"
    lane.ends.append(span.end_ns)
    lane.closings.append(f'{{"ph":"e",{slice_text},{board.time(span.end_ns)}}}')
    events.append(
        f'{{"ph":"b",{slice_text},{board.time(span.start_ns)},"args":{{{thread.mark}{lane.mark}"kind":{text.kind}'
        f',"id":{span.span_id},"parent":{span.parent_id},"root":{span.root_id},"total_ns":{span.total_ns}'
        f',"self_ns":{span.self_ns}{_more_args(span)}{text.tail}{binds.get(span.span_id, "")}}}'
    )


def _more_args(span: Span) -> str:
    """The arguments that only some spans have."""
    more: dict[str, Any] = {"task": span.task_id} if span.task_id else {}
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
        keys.append("enclosing_stream" if next_ns.get(stream, FOREVER_NS) < interval.end_ns else "stream")
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
        if parent is None:
            continue
        if span.task_id or parent.task_id or span.site.kind == "request" or parent.site.kind == "request":
            if _lane_key(parent) != _lane_key(span):
                ties.append((parent, span))
        elif parent.thread_id != span.thread_id:
            if _may_lead(parent, span.start_ns):
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


def _lane_key(span: Span) -> tuple[int, int] | int:
    """What the spans of one lane share: tree and task, or thread."""
    return (span.root_id, span.task_id) if _is_async(span) else span.thread_id


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
    source = Path(path)
    try:
        return _load(source, limit_bytes)
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
    raise TraceError(f"cannot read the trace {source}: {why}") from cause


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
