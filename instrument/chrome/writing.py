"""Writing a trace: the file, and the text of its slices."""

from __future__ import annotations

import errno
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from instrument.chrome.lanes import DEEPEST, Arrows, Board, Lane
from instrument.chrome.metadata import Sites, SiteText, metadata
from instrument.chrome.text import INT64, MILLI, clean, encode, is_number, microseconds, safe
from instrument.errors import TraceError
from instrument.spans import GAUGES, Sample, Span, Trace
from instrument.tally import Tally

COMPRESSION = 1
"""zlib level; level 6 takes three times as long for a file that is a seventh smaller."""

BATCH = 4096
"""How many events are in memory as text."""

NO_UNIT = '"value"'

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room, or record less"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a directory that this user may write to"),
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), "give the name of a file"),
}


# The file


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
            file.writelines(_packed(_document(trace, tally), target.suffix == ".gz"))
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
    safe_service = re.sub(r"[^\w.-]+", "_", clean(service)).encode()[:96].decode(errors="ignore").lstrip(".")
    values = {"service": safe_service or "service", "pid": str(pid), "window": str(window)}

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name not in values:
            raise TraceError(f"the path {template!r} asks for {{{name}}}; known are {{service}}, {{pid}}, {{window}}")
        return values[name]

    return re.sub(r"\{(.*?)\}", value, template)


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
    starts += [sample.at_ns for sample in trace.samples]
    base_ns = min(starts + [interval.start_ns for owner in owners for interval in owner.device])
    arrows = Arrows(spans)
    sites = Sites({span.site: None for span in spans})
    board = Board(trace, base_ns)
    batches = (spans[first : first + BATCH] for first in range(0, len(spans), BATCH))
    events = chain(
        board.process_names(),
        chain.from_iterable(_span_events(batch, board, sites, arrows.binds) for batch in batches),
        board.closings(INT64),
        _device_events(owners, board, sites, arrows),
        arrows.events(board),
        _counter_events(trace.samples, board),
        board.lane_names(),
    )
    head = metadata(trace, base_ns, sites, tally, arrows.left_out)
    yield f'{{"displayTimeUnit":"ms","instrument":{head},"traceEvents":[\n{next(events)}'
    while lines := list(islice(events, BATCH)):
        yield ",\n".join(["", *lines])
    yield "\n]}\n"


# Slices


def _span_events(spans: Sequence[Span], board: Board, sites: Sites, binds: Mapping[int, str]) -> list[str]:
    """The slices of spans that come by start. This loop is the cost of writing: about a microsecond a span."""
    events: list[str] = []
    append, texts, base_ns, moved = events.append, sites.texts, board.base_ns, board.moved
    firsts: dict[int, Lane] = {}
    for span in spans:
        start_ns, end_ns, site, thread_id = span.start_ns, span.end_ns, span.site, span.thread_id
        if span.task_id or site.kind == "request":
            _add_task_events(span, texts[site], board, binds, events)
            continue
        lane = firsts.get(thread_id) or firsts.setdefault(thread_id, board.first_lane(thread_id))
        ends = lane.ends
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if (ends and (ends[-1] < end_ns or len(ends) >= DEEPEST)) or (moved and span.parent_id in moved):
            lane = board.thread_lane(thread_id, start_ns, end_ns, span.parent_id)
            ends = lane.ends
            if lane.number > 1:
                moved[span.span_id] = lane
        ends.append(end_ns)
        head, tail, _, _ = texts[site]
        since_ns, total_ns = start_ns - base_ns, end_ns - start_ns
        append(
            f'{head}{since_ns // 1000}{MILLI[since_ns % 1000]},"dur":{total_ns // 1000}{MILLI[total_ns % 1000]}'
            f'{lane.address},"args":{{{lane.mark}"id":{span.span_id},"parent":{span.parent_id},"root":{span.root_id}'
            f',"self_ns":{span.self_ns}{_more_args(span, total_ns)}{tail}'
            f"{binds.get(span.span_id, '') if binds else ''}}}"
        )
    events += board.closings(spans[-1].start_ns)
    return events


def _add_task_events(span: Span, text: SiteText, board: Board, binds: Mapping[int, str], events: list[str]) -> None:
    """The async slice of a span. Its end is written when its lane is next used, so that ends come innermost first."""
    lane, thread = board.task_lane(span, events), board.first_lane(span.thread_id)
    if lane.number > 1:
        board.moved[span.span_id] = lane
    slice_text = f"{lane.address}{text.name}{thread.address}"
    task = f',"task":{span.task_id}' if span.task_id else ""
    lane.ends.append(span.end_ns)
    lane.closings.append(f'{{"ph":"e",{slice_text},{board.time(span.end_ns)}}}')
    events.append(
        f'{{"ph":"b",{slice_text},{board.time(span.start_ns)},"args":{{{thread.mark}{lane.mark}"kind":{text.kind}'
        f',"id":{span.span_id},"parent":{span.parent_id},"root":{span.root_id},"total_ns":{span.total_ns}'
        f',"self_ns":{span.self_ns}{task}{_more_args(span, span.total_ns)}{text.tail}{binds.get(span.span_id, "")}}}'
    )


def _more_args(span: Span, total_ns: int) -> str:
    """The arguments that only some spans have, and none of them is usual."""
    if span.active_ns == total_ns and span.error is None and not (span.attributes or span.clipped or span.remote):
        return ""
    more: dict[str, Any] = {}
    if span.active_ns != total_ns:
        more["active_ns"] = span.active_ns
    if span.error is not None:
        more["error"] = safe(span.error)
    if span.clipped:
        more["clipped"] = True
    if span.remote is not None:
        trace_id, span_id = f"{span.remote.trace_id:032x}", f"{span.remote.span_id:016x}"
        more["remote"] = {"trace_id": trace_id, "span_id": span_id, "flags": span.remote.flags}
    if span.attributes:
        more["attributes"] = safe(dict(span.attributes))
    return "," + encode(more)[1:-1]


def _device_events(owners: Sequence[Span], board: Board, sites: Sites, arrows: Arrows) -> Iterator[str]:
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
        lane = board.stream_lane(interval)
        lane.ends.append(interval.end_ns)
        bind = arrows.launch(owner, interval, lane.address)
        yield (
            f'{{"ph":"X","name":{sites.texts[owner.site].name},"cat":"device",{board.time(interval.start_ns)}'
            f',"dur":{microseconds(interval.end_ns - interval.start_ns)}{lane.address},"args":{{{lane.mark}'
            f'"owner":{owner.span_id},"place":{place},"device":{interval.device},"{key}":{interval.stream}'
            f',"label":{encode(clean(interval.label))},"uncertainty_ns":{interval.uncertainty_ns}}}{bind}}}'
        )


# Counters


def _counter_events(samples: Iterable[Sample], board: Board) -> Iterator[str]:
    """The samples that are numbers. Their unit is the key of the number, which viewers add to the track's name."""
    units = {name: encode(gauge.unit) for name, gauge in GAUGES.items()}
    for sample in samples:
        if is_number(sample.value):
            yield (
                f'{{"ph":"C","name":{encode(clean(sample.name))},{board.time(sample.at_ns)}'
                f"{board.counter_address(sample.device)}"
                f',"args":{{{units.get(sample.name, NO_UNIT)}:{encode(sample.value)}}}}}'
            )
