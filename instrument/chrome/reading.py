"""Reading a trace: a file that `dump` wrote, exactly, or that of another profiler, by its slices."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from instrument import native
from instrument.chrome.foreign import Foreign
from instrument.chrome.lanes import DEVICE_PIDS
from instrument.errors import TraceError
from instrument.recording.spans import HOST, DeviceInterval, RemoteParent, Sample, Span, Trace, by_start
from instrument.recording.tally import Tally
from instrument.runtime import compression
from instrument.trace import allocation_lists
from instrument.trace.metadata import LIMIT_LINKS, Metadata, attribute, made
from instrument.trace.text import INT64, LIMIT_SPANS, LIMIT_VALUE, Json, checked, end_of, index, nanoseconds

_native = native.find("_reading")
_native_spans = native.find("_spans")

LIMIT_BYTES = 2 << 30
"""Most bytes of text that `load` reads unless told otherwise; browsers give up far below."""

LIMIT_UNPACKED, LEAST_UNPACKED = 100, 64 << 20
"""Most times its size that a packed file unpacks to, beyond so many bytes. Traces pack to a tenth, at times a
thirtieth: their times do not repeat."""

LIMIT_KEYS = 1000
"""More keys beside the events, or in that of ours, are in no trace."""

LIMIT_VOID, VOID_BESIDE = 1_000_000, 4
"""Most events that say nothing of a trace, beyond so many for each that does: flows and the like."""

LIMIT_BACKWARD = 1000
"""More parents that start after their children are in no program's trace; what they ask for has no end."""


# The file


def load(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> tuple[Trace, Tally]:
    """Read a trace and its tally from Chrome JSON, plain or packed with gzip.

    What `dump` wrote comes back exactly, spans by start. Other profilers' traces are read by their slices: lanes
    become threads, containment makes the trees, and self times follow from these. A file without a tally has it
    counted from its spans. At most `limit_bytes` of unpacked text are read, one event at a time.

    Raises `TraceError` for whatever cannot be read.
    """
    trace, make_tally = read(path, limit_bytes=limit_bytes)
    return trace, make_tally()


def read(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> tuple[Trace, Callable[[], Tally]]:
    """As `load`, but a tally that the file does not have is counted when it is asked for: a fifth of the time."""
    with _refusals(path):
        trace, tally = _load(Path(path), limit_bytes)
        # Of a file with a tally too: what lies so deep takes views more time and memory than there is.
        if not _is_shallow(trace.spans) and (tally is None or _native_spans is not None):
            counted = _counted(trace)
            tally = counted if tally is None else tally

    def make_tally() -> Tally:
        with _refusals(path):
            return _counted(trace) if tally is None else tally

    return trace, make_tally


@contextmanager
def _refusals(path: str | os.PathLike[str]) -> Iterator[None]:
    """Everything that a file may raise, as a `TraceError`."""
    why: str
    cause: Exception
    try:
        yield
        return
    except RecursionError as problem:
        why, cause = "it nests deeper than any trace; give a Chrome trace in JSON", problem
    except compression.damages() as problem:
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


def _load(source: Path, limit_bytes: int) -> tuple[Trace, Tally | None]:
    facts = source.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError("it is not a regular file; give a trace file")
    if not facts.st_size:
        raise ValueError("it is empty; write it again")
    with source.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    with compression.opened(source) if gzipped else source.open("rb") as file:
        packed_bytes = facts.st_size if gzipped else None
        text = Json(file.read if packed_bytes is None else _unpacking(file.read, packed_bytes), limit_bytes)
        if not gzipped:
            text.refuse_beyond_limit(facts.st_size)
        return _content(text)


def _unpacking(read: Callable[[int], bytes], packed_bytes: int) -> Callable[[int], bytes]:
    """Reads what was packed, and refuses what only a file made to fill the memory unpacks to."""
    left = max(LIMIT_UNPACKED * packed_bytes, LEAST_UNPACKED)

    def unpack(size: int) -> bytes:
        nonlocal left
        block = read(size)
        left -= len(block)
        if left < 0:
            raise ValueError(
                f"it unpacks to more than {LIMIT_UNPACKED} times its size; if you trust it, unpack it first"
            )
        return block

    return unpack


def _content(text: Json) -> tuple[Trace, Tally | None]:
    foreign = Foreign()
    scanner = foreign.scanner()
    own: _Own | None = None

    def scan(text: Json) -> bool:
        if own is not None:
            return own.scan(text)
        return scanner is not None and foreign.scan(text, scanner)

    void = 0
    for key, value in _members(text, scan):
        if key is None:
            reader = own or foreign
            before = reader.taken
            reader.add(value)
            void += reader.taken == before
            if void > LIMIT_VOID + VOID_BESIDE * before:
                raise ValueError("most of its events say nothing of any call; give a Chrome trace in JSON")
        elif key == "instrument" and isinstance(value, dict) and "format" in value:
            if foreign.spans or foreign.marks:
                raise ValueError("its key 'instrument' comes after its events; put its keys in order (`jq -S .`)")
            own = _Own(Metadata(value))
        elif key == "baseTimeNanoseconds":
            foreign.epoch_ns = checked(value, int)
        elif key == "host_name":
            foreign.host = checked(value, str)
    trace = (own or foreign).trace()
    return trace, own.metadata.tally() if own else None


def _members(text: Json, scan: Callable[[Json], bool]) -> Iterator[tuple[str | None, Any]]:
    """The file's top-level keys and values; each event by itself, with None for a key, but for those that `scan` takes.

    `scan` is called where an event may begin, and tells whether it has taken any."""
    if text.peek() == "\ufeff":
        raise ValueError("it starts with a byte order mark, which viewers refuse; remove its first three bytes")
    if text.take("{[") == "[":
        yield from _elements(text, scan)
    else:
        end, has_events, keys = text.take("}") if text.peek() == "}" else ",", False, 0
        while end == ",":
            keys = _counted_key(keys)
            key = checked(text.value(), str)
            text.take(":")
            if key == "traceEvents":
                text.take("[")
                yield from _elements(text, scan)
                has_events = True
            else:
                yield key, _facts(text) if key == "instrument" and text.peek() == "{" else text.value()
            end = text.take(",}")
        if not has_events:
            raise ValueError("it has no list 'traceEvents'; give a Chrome trace in JSON")
    if text.peek():
        raise ValueError("something follows its end; write or copy it again")


def _facts(text: Json) -> dict[str, Any]:
    """An object value by value; of ours the allocations are taken one by one, as `Allocations.rows`."""
    text.take("{")
    facts: dict[str, Any] = {}
    held = keys = 0
    end = text.take("}") if text.peek() == "}" else ","
    while end == ",":
        before, keys = text.passed, _counted_key(keys)
        key = checked(text.value(), str)
        text.take(":")
        if key == "allocations" and "format" in facts and text.peek() == "[":
            facts[key] = allocation_lists.take(text, LIMIT_SPANS)
        else:
            facts[key] = text.value()
            held += text.passed - before
        if held > LIMIT_VALUE:
            raise ValueError("its key 'instrument' is longer than in any trace; give a Chrome trace in JSON")
        end = text.take(",}")
    return facts


def _counted_key(keys: int) -> int:
    if keys == LIMIT_KEYS:
        raise ValueError(f"it has more than {LIMIT_KEYS} keys beside its events; give a Chrome trace in JSON")
    return keys + 1


def _elements(text: Json, scan: Callable[[Json], bool]) -> Iterator[tuple[None, dict[str, Any]]]:
    end = text.take("]") if text.peek() == "]" else ","
    while end == ",":
        if not scan(text):
            yield None, checked(text.value(), dict)
        end = text.take(",]")


def _is_shallow(spans: Sequence[Span]) -> bool:
    """Whether it is known that call paths are no longer than those of programs."""
    links = None if _native_spans is None else _native_spans.links(spans)
    return links is not None and links <= LIMIT_LINKS


def _counted(trace: Trace) -> Tally:
    """The tally of a trace's spans, unless call paths are so long that it would take endless memory or time."""
    if _backward(trace.spans) > LIMIT_BACKWARD:
        raise ValueError("its calls lie in one another deeper than any program's; it is damaged")
    return Tally.of_spans(trace.spans, trace.threads, limit_links=LIMIT_LINKS)


def _backward(spans: Sequence[Span]) -> int:
    """How many spans come before their parents."""
    found: int | None = None if _native_spans is None else _native_spans.backward(spans)
    if found is None:
        known, seen, found = {span.span_id for span in spans}, set[int](), 0
        for span in spans:
            found += span.parent_id in known and span.parent_id not in seen
            seen.add(span.span_id)
    return found


# Slices


class _Row(NamedTuple):
    """An async lane: the id, tree and task of its first span, and its open spans, innermost last, each with whether it
    was active all the time and whether all of that was its own."""

    opener: int
    root_id: int
    task_id: int
    open: list[tuple[Span, bool, bool]]


def _local(event: dict[str, Any]) -> str:
    """What the events of an async lane share."""
    local: str = checked(event["id2"]["local"], str)
    return local


class _Lanes:
    """The slices of each lane of a thread, by its tid, in which those that come next may lie."""

    def __init__(self) -> None:
        self._open: dict[int, list[tuple[int, int, int]]] = {}

    def around(self, tid: int, start_ns: int) -> tuple[int, int] | None:
        """Id and tree of the slice in which one lies that starts on this lane now. Starts must not fall."""
        slices = self._open.get(tid)
        while slices and slices[-1][0] <= start_ns:
            slices.pop()
        return slices[-1][1:] if slices else None

    def open(self, tid: int, end_ns: int, span_id: int, root_id: int) -> None:
        """A slice begins on this lane."""
        self._open.setdefault(tid, []).append((end_ns, span_id, root_id))


class _Own:
    """Reads the events of what `dump` wrote. From format 4 on a slice that names no parent has the one around it."""

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self._spans: list[Span] = []
        self._samples: list[Sample] = []
        self._intervals: dict[int, list[tuple[int, DeviceInterval]]] = {}
        self._rows: dict[str, _Row] = {}
        self._nests = metadata.format >= 4
        self._reader = None
        if _native is not None and -INT64 // 2 < metadata.base_ns < INT64 // 2:
            state = self._spans, self._intervals, self._rows, _Row, metadata.sites, metadata.base_ns
            self._reader = _native.Reader(*state, self._nests)
        self._lanes = self._reader or _Lanes()

    def scan(self, text: Json) -> bool:
        """Take the plain events that come next, in C; whether there were any."""
        if self._reader is None or not text.advance(self._reader.scan):
            return False
        self._refuse_beyond_limit()
        return True

    @property
    def taken(self) -> int:
        """How many events have said something."""
        return len(self._spans) + len(self._samples)

    def _refuse_beyond_limit(self) -> None:
        if len(self._spans) > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} spans; record less into one file")

    def add(self, event: dict[str, Any]) -> None:
        phase = checked(event.get("ph", ""), str)
        if phase == "C":
            self._add_sample(event)
        if phase == "e":
            self._end_async(event)
        if phase not in ("X", "b"):
            return
        args = event["args"]
        start_ns = self.metadata.base_ns + nanoseconds(event["ts"])
        # An async slice ends with an event of its own, but for format 2.
        is_open = phase == "b" and "total_ns" not in args
        total_ns = 0 if is_open else nanoseconds(event["dur"]) if phase == "X" else checked(args["total_ns"], int)
        end_ns = end_of(start_ns, start_ns + total_ns)
        if "owner" in args:
            stream = checked(args["stream"] if "stream" in args else args["enclosing_stream"], int)
            interval = made(DeviceInterval, args, stream=stream, start_ns=start_ns, end_ns=end_ns)
            self._intervals.setdefault(args["owner"], []).append((index(args.get("place", 0)), interval))
            return
        error, remote = args.get("error"), args.get("remote")
        span_id, parent_id = checked(args["id"], int), checked(args.get("parent", 0), int)
        root_id, task_id = parent_id or span_id, 0
        tid = checked(event["tid"], int)
        row = self._rows.get(_local(event)) if is_open else None
        nests = self._nests and "parent" not in args
        if row is not None and row.opener != span_id:
            root_id, task_id = row.root_id, row.task_id
            if nests and row.open:
                parent_id = row.open[-1][0].span_id
        elif nests and not is_open:
            parent_id, root_id = self._lanes.around(tid, start_ns) or (parent_id, root_id)
        span = Span(
            site=self.metadata.sites[index(args["site"])],
            span_id=span_id,
            parent_id=parent_id,
            root_id=checked(args.get("root", root_id), int),
            thread_id=checked(args.get("thread", tid), int),
            task_id=checked(args.get("task", task_id), int),
            start_ns=start_ns,
            end_ns=end_ns,
            active_ns=checked(args.get("active_ns", total_ns), int),
            self_ns=checked(args.get("self_ns", total_ns), int),
            error=None if error is None else checked(error, str),
            attributes={key: attribute(value) for key, value in args.get("attributes", {}).items()},
            clipped=checked(args.get("clipped", False), bool),
            remote=None if remote is None else _remote(remote),
        )
        self._spans.append(span)
        if is_open:
            if row is None or row.opener == span_id:
                row = self._rows[_local(event)] = _Row(span_id, span.root_id, span.task_id, [])
            row.open.append((span, "active_ns" not in args, "self_ns" not in args))
        elif self._nests:
            self._lanes.open(tid, end_ns, span_id, span.root_id)
        self._refuse_beyond_limit()

    def _end_async(self, event: dict[str, Any]) -> None:
        row = self._rows.get(_local(event))
        if row is None or not row.open:
            return
        span, is_active, is_self = row.open.pop()
        span.end_ns = end_of(span.start_ns, self.metadata.base_ns + nanoseconds(event["ts"]))
        if is_active:
            span.active_ns = span.total_ns
        if is_self:
            span.self_ns = span.total_ns

    def _add_sample(self, event: dict[str, Any]) -> None:
        pid = checked(event["pid"], int)
        (value,) = event["args"].values()
        self._samples.append(
            Sample(
                name=checked(event["name"], str),
                device=pid - DEVICE_PIDS if pid >= DEVICE_PIDS else HOST,
                at_ns=self.metadata.base_ns + nanoseconds(event["ts"]),
                value=checked(value, float, int),
            )
        )
        if len(self._samples) > LIMIT_SPANS:
            raise ValueError(f"it has more than {LIMIT_SPANS} samples; record less into one file")

    def _share_intervals(self) -> None:
        """Give spans that come after device intervals those that were given at once to a span of the same id."""
        served = 0 if self._reader is None else self._reader.served
        self._reader, self._lanes = None, _Lanes()  # it holds a table of all ids
        if 0 < served < len(self._spans):
            given = {span.span_id: span.device for span in self._spans[:served] if span.device}
            for span in self._spans[served:]:
                span.device = given.get(span.span_id, ())

    def trace(self) -> Trace:
        if any(row.open for row in self._rows.values()):
            raise ValueError("an async slice in it never ends; write or copy it again")
        self._share_intervals()
        by_start(self._spans)
        for span in self._spans if self._intervals else ():
            more = self._intervals.get(span.span_id)
            if more is not None:
                placed = sorted([*enumerate(span.device), *more], key=itemgetter(0))
                span.device = tuple(interval for _, interval in placed)
        return self.metadata.trace(self._spans, self._samples)


def _remote(facts: dict[str, Any]) -> RemoteParent:
    return RemoteParent(
        int(facts["trace_id"], 16),
        int(facts["span_id"], 16),
        checked(facts["flags"], int),
        checked(facts.get("is_local", False), bool),
        checked(facts.get("in_server_span", False), bool),
    )
