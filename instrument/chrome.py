"""Chrome trace JSON, the file that Perfetto shows: written from a trace, and read back into one.

How a trace becomes slices and lanes:

* A span that no task ran is a complete event (``X``) on the lane of its thread.
* Requests, and all that tasks ran, are async slices (``b`` and ``e``), one lane for each task of a tree: tasks
  interleave on their thread, so they do not nest by time. A request's own lane has category ``request``, other
  lanes ``task``, and ``args.kind`` says what a slice is, because Perfetto nests async slices of one category only.
* A device interval is a complete event of the process ``GPU n``, on the lane of its stream.
* Slices of a lane must nest, or viewers drop them in silence. One that crosses another, or lies deeper than viewers
  show, goes to a further lane, ``MainThread (2)``, whose number is in its ``args.lane``; nothing is cut or left out.
* Arrows lead from a span to what it started in another lane, and to its device intervals. One that would point into
  the past, or that the format has no room for, is left out and counted in ``instrument.arrows_left_out``.

Viewers need nothing but the events. What else a trace knows stands in the top-level key ``instrument``, which they
ignore, so that `load` gives back what `dump` was given, to the nanosecond. Four things change on the way: lone
surrogates become replacement characters, infinite and huge numbers in attributes become text, sequences become
tuples, and an attribute of a type that JSON does not have becomes the type's name in angle brackets.
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
from dataclasses import dataclass, field
from itertools import count, pairwise
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from instrument.errors import TraceError
from instrument.spans import (
    KINDS,
    Cost,
    DeviceInterval,
    Origin,
    RemoteParent,
    Site,
    Span,
    Trace,
    assign_self_times,
)
from instrument.tally import Row, Tally, Totals

FORMAT = 1
"""Version of what stands in the key `instrument`."""

LIMIT_BYTES = 2 << 30
"""Most bytes of text that `load` reads unless told otherwise; browsers give up far below."""

LIMIT_SPANS = 10_000_000
LIMIT_PATHS = 20_000_000
"""Most links of all call paths together, so that a small hostile file cannot ask for endless memory."""

LIMIT_VALUE = 256 << 20
"""Most characters that one value of the file may take."""

DEVICE_PIDS = 1 << 31
"""Process ids from here on are devices: no host process has one."""

SPARE_TIDS = 1 << 31
"""Thread ids from here on are overflow lanes, and streams and threads whose own id no lane may have."""

DEEPEST = 511
"""Most slices in one another on a lane; Perfetto puts the 513th at the top, and the 512th cannot be told from it."""

SPARE_BINDS = 1 << 63
"""Set in every bind id: Perfetto numbers `s`/`f` arrows from 0 in the same space."""

BATCH = 4096
COMPRESSION = 1
"""zlib level: level 6 takes three times as long for a file that is a seventh smaller."""

FOREVER = 1 << 64
KIND_OF_CATEGORY = {**{kind: kind for kind in KINDS}, "cpu_op": "op", "kernel": "op", "gpu_memcpy": "copy"}

_MILLI = tuple(f".{part:03d}" for part in range(1000))
_encode: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


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
            raise FileExistsError(errno.EISDIR, "it exists and is not a regular file")
        descriptor, part = tempfile.mkstemp(prefix=".trace-", suffix=".part", dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            for block in _packed(_document_text(trace, tally), target.suffix == ".gz"):
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


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or record less"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a directory that this user may write to"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "give the name of a file in a directory"),
    errno.ENAMETOOLONG: "give a shorter name",
}


def file_name(template: str, *, service: str, pid: int, window: int) -> str:
    """Fill `{service}`, `{pid}` and `{window}` of a path; the service becomes one safe part of a file name.

    Raises `TraceError` for any other name in braces.
    """
    safe = re.sub(r"[^\w.-]+", "_", _text(service)).encode()[:96].decode(errors="ignore").lstrip(".")
    values = {"service": safe or "service", "pid": str(pid), "window": str(window)}
    unknown = sorted({name for name in re.findall(r"\{([^{}]*)\}", template) if name not in values})
    if unknown:
        raise TraceError(f"the path {template!r} asks for {{{unknown[0]}}}; known are {{service}}, {{pid}}, {{window}}")
    return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], template)


def _packed(texts: Iterable[str], gzipped: bool) -> Iterator[bytes]:
    if not gzipped:
        yield from (text.encode(errors="replace") for text in texts)
        return
    squeeze = zlib.compressobj(COMPRESSION, zlib.DEFLATED, 31)
    for text in texts:
        yield squeeze.compress(text.encode(errors="replace"))
    yield squeeze.flush()


def _document_text(trace: Trace, tally: Tally | None) -> Iterator[str]:
    """The file's text in pieces of some thousand events."""
    spans = _outer_first(trace.spans)
    owners = [span for span in spans if span.device]
    starts = [trace.start_ns, *(span.start_ns for span in spans[:1])]
    base_ns = min(starts + [interval.start_ns for span in owners for interval in span.device])
    arrows = _Arrows()
    _plan_arrows(arrows, spans, owners)
    sites = _SiteTable()
    for site in {span.site: None for span in spans}:
        sites.index(site)
    head = _metadata(trace, base_ns, sites, tally, arrows.left_out)
    board = _Board(trace, base_ns)
    yield f'{{"displayTimeUnit":"ms","instrument":{head},"traceEvents":[\n{board.process_events(owners)}'
    for first in range(0, len(spans), BATCH):
        yield ",\n".join(["", *_host_events(spans[first : first + BATCH], board, sites, arrows)])
    for events in (board.closing_events(FOREVER), _device_events(owners, board, sites, arrows)):
        yield from _batches(events)
    yield from _batches(_arrow_events(arrows, board))
    yield from _batches(board.lane_events())
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
    ties = [at for at, (left, right) in enumerate(pairwise(ordered)) if left.start_ns == right.start_ns]
    done = -1
    for first in ties:
        if first < done:
            continue
        last = first + 1
        while last < len(ordered) and ordered[last].start_ns == ordered[first].start_ns:
            last += 1
        ordered[first:last] = _parents_first(sorted(ordered[first:last], key=lambda s: (-s.end_ns, s.span_id)))
        done = last
    return ordered


def _parents_first(ordered: list[Span]) -> list[Span]:
    """Spans of one start by falling end, in which a parent comes before a child of the same end."""
    by_id = {span.span_id: span for span in ordered}
    placed: dict[int, Span] = {}
    for span in ordered:
        chain: dict[int, Span] = {}
        link: Span | None = span
        while link is not None and link.end_ns == span.end_ns and link.span_id not in placed | chain:
            chain[link.span_id] = link
            link = by_id.get(link.parent_id)
        placed.update(reversed(chain.items()))
    return list(placed.values())


# Text


def _text(text: str) -> str:
    """The text with lone surrogates, which UTF-8 does not have, replaced."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _safe(value: object, depth: int = 0) -> Any:
    """The value as strict JSON and viewers take it. Never fails, and runs no code of the value: a tensor's own
    text would wait for the device, and could hold what must not leave."""
    if isinstance(value, str):
        return _text(value)
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
        return {_text(key): _safe(item, depth + 1) for key, item in value.items() if isinstance(key, str)}
    return f"<{_text(type(value).__name__)}>"


def _us(time_ns: int) -> str:
    """Nanoseconds as microseconds with three decimals, exactly."""
    return f"{time_ns // 1000}{_MILLI[time_ns % 1000]}"


class _SiteText(NamedTuple):
    """What every event of a site shares: its start, the last part of `args`, the name and the kind."""

    head: str
    tail: str
    name: str
    kind: str


class _SiteTable:
    """The sites of a file in order of first sight, each once, and the constant text of their events."""

    def __init__(self) -> None:
        self.entries: dict[str, int] = {}
        self.texts: dict[Site, _SiteText] = {}

    def index(self, site: Site) -> int:
        facts = {
            "kind": site.kind,
            "module": site.module,
            "qualname": site.qualname,
            "file": site.file,
            "line": site.line,
            "instance": site.instance,
            "device": site.device,
            "attributes": [[key, value] for key, value in site.attributes],
        }
        entry = _encode(_safe({"name": site.name} | {key: value for key, value in facts.items() if value}))
        index = self.entries.setdefault(entry, len(self.entries))
        name = _encode(_text(site.instance if site.kind == "layer" and site.instance else site.name))
        kind = _encode(_text(site.kind))
        code = f',"code":{_encode(_text(site.function))}' if site.function else ""
        head = f'{{"ph":"X","name":{name},"cat":{kind},"ts":'
        self.texts[site] = _SiteText(head, f',"site":{index}{code}}}', name, kind)
        return index


def _metadata(trace: Trace, base_ns: int, sites: _SiteTable, tally: Tally | None, arrows_left_out: int) -> str:
    """The value of the key `instrument`."""
    origin, cost = trace.origin, trace.cost
    counted = None if tally is None else _tally_parts(tally, base_ns, sites)
    facts = {
        "format": FORMAT,
        "about": "A device slice is the stretch of a stream between two events, not a kernel. Times in ns.",
        "origin": {
            "pid": origin.pid,
            "service": _text(origin.service),
            "recorder": _text(origin.recorder),
            "profile": _text(origin.profile),
            "host": _text(origin.host),
            "monotonic_ns": origin.monotonic_ns,
            "realtime_ns": origin.realtime_ns,
        },
        "window": trace.window,
        "base_ns": base_ns,
        "base_epoch_ns": origin.realtime_of(base_ns),
        "start_ns": trace.start_ns,
        "end_ns": trace.end_ns,
        "threads": [[thread_id, _text(name)] for thread_id, name in trace.threads.items()],
        "losses": {_text(reason): lost for reason, lost in trace.losses.items()},
        "notes": [_text(note) for note in trace.notes],
        "cost": cost and {"calls": cost.calls, "per_call_ns": _safe(cost.per_call_ns), "window_ns": cost.window_ns},
        "arrows_left_out": arrows_left_out,
    }
    text = _encode(facts)[:-1] + ',\n"sites":[\n' + ",\n".join(sites.entries) + "]"
    return f'{text},\n"tally":{counted}}}' if counted else text + "}"


def _tally_parts(tally: Tally, base_ns: int, sites: _SiteTable) -> str:
    """The tally: nodes as [parent, site], -1 for none, and rows whose `first_ns` counts from the base."""
    nodes: dict[tuple[int, int], int] = {}
    known = {site: sites.index(site) for row in tally.rows() for site in row.path}
    rows: list[str] = []
    for row in tally.rows():
        node = -1
        for site in row.path:
            node = nodes.setdefault((node, known[site]), len(nodes))
        t = row.totals
        counts = [t.calls, t.errors, t.total_ns, t.self_ns, t.device_ns, t.elapsed_ns, t.min_ns, t.max_ns]
        histogram = [part for pair in sorted(t.histogram.items()) for part in pair]
        rows.append(_encode([node, row.thread_id, *counts, t.moved_bytes, t.first_ns - base_ns, histogram]))
    threads = _encode([[thread_id, _text(name)] for thread_id, name in tally.threads.items()])
    return f'{{"threads":{threads},"nodes":{_encode(list(nodes))},"rows":[\n' + ",\n".join(rows) + "]}"


# Arrows


@dataclass(slots=True)
class _Arrows:
    """The arrows of a file.

    `binds` holds, by span id, the text that ties a slice to an arrow by itself, the only way that async slices
    have; it has room for one tie, so a span cannot be bound as a start and as an end. Between complete events arrows
    are events of their own: `starts` are their sources by (name, span id), `ends` lie on (thread or pid, lane, time).
    """

    binds: dict[int, str] = field(default_factory=dict)
    calls: list[tuple[Span, Span]] = field(default_factory=list)
    launches: list[tuple[Span, DeviceInterval, _Lane]] = field(default_factory=list)
    left_out: int = 0


def _is_async(span: Span) -> bool:
    return span.task_id != 0 or span.site.kind == "request"


def _plan_arrows(arrows: _Arrows, spans: Sequence[Span], owners: Sequence[Span]) -> None:
    """Decide which arrows the file can have. A bind's end must begin later than its start: at one and the same
    time Perfetto sees complete events before async ones, and an end before its start is no arrow."""
    by_id = {span.span_id: span for span in spans}
    ties: list[tuple[Span, Span]] = []
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is None:
            continue
        if not (parent.task_id or span.task_id) and parent.site.kind != "request" != span.site.kind:
            if parent.thread_id != span.thread_id:
                if parent.start_ns <= span.start_ns:
                    arrows.calls.append((parent, span))
                else:
                    arrows.left_out += 1
        elif _lane_key(parent) != _lane_key(span):
            ties.append((parent, span))
    tied = {o.span_id: o.span_id for o in owners if _is_async(o) and any(d.start_ns > o.start_ns for d in o.device)}
    for parent, span in reversed(ties):
        free = span.span_id not in tied and tied.get(parent.span_id, parent.span_id) == parent.span_id
        if free and parent.start_ns < span.start_ns:
            tied[span.span_id] = tied[parent.span_id] = parent.span_id
        else:
            arrows.left_out += 1
    for owner in owners:
        earliest_ns = owner.start_ns + _is_async(owner)
        arrows.left_out += sum(interval.start_ns < earliest_ns for interval in owner.device)
    arrows.binds = {span_id: _bind(source, span_id == source) for span_id, source in tied.items()}


def _lane_key(span: Span) -> tuple[int, int] | int:
    """What the spans of one lane share: their tree and task, or their thread."""
    return (span.root_id, span.task_id) if _is_async(span) else span.thread_id


def _bind(source_id: int, is_start: bool) -> str:
    return f',"bind_id":"{SPARE_BINDS | source_id:#x}","flow_{"out" if is_start else "in"}":true'


def _arrow_events(arrows: _Arrows, board: _Board) -> Iterator[str]:
    """The arrows between complete events. A start and an end attach to the innermost slice at their time."""
    started: set[tuple[str, int]] = set()
    ends = [
        *(("call", parent, board.address(span), span.start_ns) for parent, span in arrows.calls),
        *(("ac2g", owner, lane.address, interval.start_ns) for owner, interval, lane in arrows.launches),
    ]
    for name, source, address, end_ns in ends:
        arrow = f'"name":"{name}","cat":"{name}","id":{source.span_id},"ts":'
        if (name, source.span_id) not in started:
            started.add((name, source.span_id))
            yield f'{{"ph":"s",{arrow}{_us(source.start_ns - board.base_ns)}{board.address(source)}}}'
        yield f'{{"ph":"f","bp":"e",{arrow}{_us(end_ns - board.base_ns)}{address}}}'


# Lanes


class _Lane:
    """One row of the viewer, in which slices nest: `ends` are the ends of those now open, outermost first.

    `address` is the constant text that puts an event on it, `number` its place among the lanes of one thread,
    stream or task. `closings` are the events that will end the open slices of an async lane.
    """

    __slots__ = ("address", "closings", "ends", "mark", "number", "tid")

    def __init__(self, address: str, number: int, mark: str, tid: int = 0) -> None:
        self.address = address
        self.number = number
        self.mark = mark
        self.tid = tid
        self.ends: list[int] = []
        self.closings: list[str] = []

    def takes(self, start_ns: int, end_ns: int) -> bool:
        """Whether a slice nests here, after those that end by its start are closed. Starts must not fall."""
        ends = self.ends
        while ends and ends[-1] <= start_ns:
            ends.pop()
        return len(ends) < DEEPEST and (not ends or ends[-1] >= end_ns)

    def close(self, until_ns: int) -> Iterator[str]:
        """The events that end the async slices which end by then, innermost first."""
        while self.ends and self.ends[-1] <= until_ns:
            self.ends.pop()
            yield self.closings.pop()


class _Board:
    """The lanes of a file, made when the first slice needs them."""

    def __init__(self, trace: Trace, base_ns: int) -> None:
        self.trace = trace
        self.base_ns = base_ns
        pid = trace.origin.pid
        self.pid = pid if 0 <= pid < DEVICE_PIDS else 0
        self.threads: dict[int, list[_Lane]] = {}
        self.streams: dict[tuple[int, int], list[_Lane]] = {}
        self.tasks: dict[tuple[int, int], list[_Lane]] = {}
        self.moved: dict[int, _Lane] = {}
        self._spare_tids = count(SPARE_TIDS)

    def thread(self, thread_id: int) -> list[_Lane]:
        """The lanes of a thread."""
        lanes = self.threads.get(thread_id)
        if lanes is None:
            lanes = self.threads[thread_id] = []
            self._add(lanes, self.pid, thread_id, f'"thread":{thread_id},')
        return lanes

    def thread_lane(self, thread_id: int, span: Span) -> _Lane:
        """The lane of a thread for a span that the first lane does not take."""
        lanes = self.thread(thread_id)
        lane = next((lane for lane in lanes if lane.takes(span.start_ns, span.end_ns)), None)
        if lane is None:
            lane = self._add(lanes, self.pid, None, f'"thread":{thread_id},')
        if lane.number > 1:
            self.moved[span.span_id] = lane
        return lane

    def stream_lane(self, interval: DeviceInterval) -> _Lane:
        """The lane of a stream that takes an interval."""
        lanes = self.streams.setdefault((interval.device, interval.stream), [])
        lane = next((lane for lane in lanes if lane.takes(interval.start_ns, interval.end_ns)), None)
        return lane or self._add(lanes, _device_pid(interval.device), None if lanes else interval.stream, "")

    def _add(self, lanes: list[_Lane], pid: int, tid: int | None, mark: str) -> _Lane:
        """Add a lane; without an id, or with one that viewers fold into another lane, it gets a spare id."""
        if tid is not None and 0 < tid < SPARE_TIDS:
            own_tid, mark = tid, ""
        else:
            own_tid = next(self._spare_tids)
        number = len(lanes) + 1
        mark += f'"lane":{number},' if number > 1 else ""
        lane = _Lane(f',"pid":{pid},"tid":{own_tid}', number, f',"args":{{{mark}"id":', own_tid)
        lanes.append(lane)
        return lane

    def task_lane(self, span: Span) -> tuple[_Lane, list[str]]:
        """The async lane that takes a span, and the events that ended there before."""
        lanes = self.tasks.setdefault((span.root_id, span.task_id), [])
        ended: list[str] = []
        for lane in lanes:
            ended += lane.close(span.start_ns)
            if lane.takes(span.start_ns, span.end_ns):
                return lane, ended
        category = "request" if span.site.kind == "request" else "task"
        number = len(lanes) + 1
        mark = f'"lane":{number},' if number > 1 else ""
        lane = _Lane(f'"cat":"{category}","id2":{{"local":"{span.span_id:#x}"}},"name":', number, mark)
        lanes.append(lane)
        return lane, ended

    def closing_events(self, until_ns: int) -> Iterator[str]:
        """End the async slices that are over by then, and forget the lanes that are empty."""
        for key, lanes in list(self.tasks.items()):
            for lane in lanes:
                yield from lane.close(until_ns)
            if not any(lane.ends for lane in lanes):
                del self.tasks[key]

    def address(self, span: Span) -> str:
        """Where the complete event of a span lies."""
        return (self.moved.get(span.span_id) or self.thread(span.thread_id)[0]).address

    def process_events(self, owners: Sequence[Span]) -> str:
        """The names of the host's process and of the devices."""
        origin = self.trace.origin
        names = [(self.pid, _text(origin.service) or f"process {origin.pid}", _text(origin.host), 0)]
        for device in sorted({interval.device for owner in owners for interval in owner.device}):
            names.append((_device_pid(device), f"GPU {device}", "", 1 + device % DEVICE_PIDS))
        events = []
        for pid, name, labels, place in names:
            events += [_name_event("process_name", "name", name, pid), _name_event("process_sort_index", "sort_index", place, pid)]
            if labels:
                events.append(_name_event("process_labels", "labels", labels, pid))
        return ",\n".join(events)

    def lane_events(self) -> Iterator[str]:
        """The names of the lanes, in the order in which the threads are known."""
        threads = self.trace.threads
        known = [*threads, *(thread_id for thread_id in self.threads if thread_id not in threads)]
        named = [(self.pid, threads.get(i) or f"thread {i}", self.threads[i]) for i in known if i in self.threads]
        for (device, stream), lanes in sorted(self.streams.items()):
            named.append((_device_pid(device), f"stream {stream}", lanes))
        places = count()
        for pid, name, lanes in named:
            for lane in lanes:
                full = _text(name) if lane.number == 1 else f"{_text(name)} ({lane.number})"
                yield _name_event("thread_name", "name", full, pid, lane.tid)
                yield _name_event("thread_sort_index", "sort_index", next(places), pid, lane.tid)


def _device_pid(device: int) -> int:
    return DEVICE_PIDS + device % DEVICE_PIDS


def _name_event(what: str, key: str, value: str | int, pid: int, tid: int | None = None) -> str:
    place = f'"pid":{pid}' if tid is None else f'"pid":{pid},"tid":{tid}'
    return f'{{"ph":"M","name":"{what}",{place},"args":{{"{key}":{_encode(value)}}}}}'


# Slices


def _host_events(spans: Sequence[Span], board: _Board, sites: _SiteTable, arrows: _Arrows) -> list[str]:
    """The slices of spans, which come by start. The hot loop of writing: about a microsecond a span."""
    lines: list[str] = []
    append, texts, threads, binds, base_ns = lines.append, sites.texts, board.threads, arrows.binds, board.base_ns
    for span in spans:
        start_ns, end_ns, site, thread_id = span.start_ns, span.end_ns, span.site, span.thread_id
        head, tail, _, kind = texts[site]
        if span.task_id or site.kind == "request":
            _task_events(span, texts[site], board, binds, lines)
            continue
        lane = threads[thread_id][0] if thread_id in threads else board.thread(thread_id)[0]
        ends = lane.ends
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if ends and (ends[-1] < end_ns or len(ends) >= DEEPEST):
            lane = board.thread_lane(thread_id, span)
            ends = lane.ends
        ends.append(end_ns)
        at_ns, total_ns = start_ns - base_ns, end_ns - start_ns
        more = bind = ""
        if span.active_ns != total_ns or span.error is not None or span.attributes or span.clipped or span.remote:
            more = _more_args(span)
        if binds:
            bind = binds.get(span.span_id, "")
        append(
            f'{head}{at_ns // 1000}{_MILLI[at_ns % 1000]},"dur":{total_ns // 1000}{_MILLI[total_ns % 1000]}'
            f'{lane.address}{lane.mark}{span.span_id},"parent":{span.parent_id},"root":{span.root_id}'
            f',"self_ns":{span.self_ns}{more}{tail}{bind}}}'
        )
    if board.tasks:
        lines += board.closing_events(spans[-1].start_ns)
    return lines


def _task_events(span: Span, text: _SiteText, board: _Board, binds: Mapping[int, str], lines: list[str]) -> None:
    """The async slice of a span. Its end is written when the lane is next used, so that ends come innermost first."""
    lane, ended = board.task_lane(span)
    lines += ended
    first = board.thread(span.thread_id)[0]
    thread = "" if first.tid == span.thread_id else f'"thread":{span.thread_id},'
    where = f"{lane.address}{text.name}{first.address}"
    lane.ends.append(span.end_ns)
    lane.closings.append(f'{{"ph":"e",{where},"ts":{_us(span.end_ns - board.base_ns)}}}')
    lines.append(
        f'{{"ph":"b",{where},"ts":{_us(span.start_ns - board.base_ns)},"args":{{{thread}{lane.mark}'
        f'"id":{span.span_id},"parent":{span.parent_id},"root":{span.root_id},"self_ns":{span.self_ns}'
        f'{_more_args(span)},"kind":{text.kind}{text.tail}{binds.get(span.span_id, "")}}}'
    )


def _more_args(span: Span) -> str:
    """The arguments that only some spans have."""
    more = f',"task":{span.task_id}' if span.task_id else ""
    if span.active_ns != span.end_ns - span.start_ns:
        more += f',"active_ns":{span.active_ns}'
    if span.error is not None:
        more += f',"error":{_encode(_text(span.error))}'
    if span.clipped:
        more += ',"clipped":true'
    if span.remote is not None:
        remote = span.remote
        more += f',"remote":{{"trace_id":"{remote.trace_id:032x}","span_id":"{remote.span_id:016x}","flags":{remote.flags}}}'
    if span.attributes:
        more += f',"attributes":{_encode(_safe(dict(span.attributes)))}'
    return more
