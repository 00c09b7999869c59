"""Reads Chrome trace files. A file of `dump` is restored exactly. In files of other profilers, slices become spans."""

from __future__ import annotations

import json
import os
import stat
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from instrument.chrome.event_reading import EventBatch, JsonText, OwnDecoder, TraceEvent, read_next_events
from instrument.chrome.slice_reading import Slices
from instrument.errors import TraceError
from instrument.recording.spans import FLOPS, Flops, read_flops
from instrument.recording.tally import Tally
from instrument.runtime import file_writing
from instrument.trace.file import Saved, check_call_depth
from instrument.trace.layout import shift_torch_data
from instrument.trace.metadata import Metadata
from instrument.trace.text import LIMIT_BYTES, check_type
from instrument.trace.trace import Trace

LIMIT_UNPACKED, LEAST_UNPACKED = 100, 64 << 20
"""The maximum size of an unpacked file: 100 times its packed size, or `LEAST_UNPACKED` bytes if that is more. Real
traces unpack to 10 to 30 times their size."""

LIMIT_KEYS = 1000
"""The maximum number of a trace's top-level keys besides its events."""

LIMIT_BACKWARD = 1000
"""The maximum number of spans that begin before their parent. A file with more counts as damaged."""


def load(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> tuple[Trace, Tally]:
    """Read a trace and its tally from a file of Chrome JSON. The file may be packed with gzip.

    A file of `dump` is restored exactly. In the files of other profilers, each lane becomes a thread, and a slice
    becomes the parent of the slices within it. If the file has no tally, the spans are counted.

    Raises `TraceError` if the file cannot be read, or has more than `limit_bytes` of text.
    """
    saved = read(path, limit_bytes=limit_bytes)
    return saved.trace, saved.read_or_count_totals()


def read(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> Saved:
    """Read a trace from a file, like `load`. A missing tally is counted at the first use of the tally."""
    with _convert_file_errors(path):
        with _open_text(Path(path), limit_bytes) as text:
            saved = _read_content(text)
        # Views would take unbounded time for many such parents.
        if np.count_nonzero((parent := saved.trace.columns.parent) > np.arange(len(parent))) > LIMIT_BACKWARD:
            raise ValueError("parents in it begin after their children; it is damaged")
        return check_call_depth(saved)


@contextmanager
def _convert_file_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    cause: Exception
    try:
        yield
        return
    except json.JSONDecodeError as problem:
        why, cause = f"it is no JSON, or cut off ({problem.msg}); write or copy it again", problem
    except RecursionError as problem:
        why, cause = "it nests deeper than any trace; give a Chrome trace in JSON", problem
    except file_writing.list_gzip_errors() as problem:
        why, cause = "its gzip data is cut off or damaged; write or copy it again", problem
    except OSError as problem:
        why, cause = f"{problem.strerror or problem}; give a trace file that may be read", problem
    except ValueError as problem:
        why, cause = str(problem), problem
    except (LookupError, TypeError, AttributeError, ArithmeticError, struct.error) as problem:
        why, cause = f"a part is missing or of a wrong type ({problem!r:.80}); write or copy it again", problem
    raise TraceError(f"cannot read the trace {os.fspath(path)}: {why}") from cause


def read_metadata(path: str | os.PathLike[str]) -> Trace | None:
    """Read the metadata of a file that `dump` has written. Return None for the file of another profiler. Raises
    `TraceError`."""
    with _convert_file_errors(path), _open_text(Path(path), LIMIT_BYTES) as text:
        for key, value in _iterate_top_level_values(text):
            if _is_own_metadata(key, value):
                return Metadata(value).make_trace([], [])
            if key is None:
                return None
    return None


@contextmanager
def _open_text(source: Path, limit_bytes: int) -> Iterator[JsonText]:
    facts = source.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError("it is not a regular file; give a trace file")
    if not facts.st_size:
        raise ValueError("it is empty; write it again")
    with source.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    with file_writing.open_gzip(source) if is_packed else source.open("rb") as file:
        # A file that unpacks to more is hostile.
        unpacked_bytes = max(LIMIT_UNPACKED * facts.st_size, LEAST_UNPACKED) if is_packed else limit_bytes
        text = JsonText(file.read, limit_bytes, unpacked_bytes)
        if not is_packed:
            text.refuse_large_text(facts.st_size)
        yield text


def _read_content(text: JsonText) -> Saved:
    slices, ours = Slices(text.left_out), None
    for key, value in _iterate_top_level_values(text):
        if key is None:
            slices.add_events(value)
        elif _is_own_metadata(key, value):
            if slices.count:
                raise ValueError("its key 'instrument' comes after its events; put its keys in order (`jq -S .`)")
            ours = Metadata(value)
            slices = Slices(text.left_out, ours)
        else:
            slices.others.read_metadata(key, value)
    trace = slices.build_trace()
    if (ours or not len(trace.columns)) and (losses := text.left_out.losses()):
        why = ", ".join(f"{count} {reason}" for reason, count in losses.items())
        raise ValueError(f"it is damaged, or no Chrome trace in JSON: {why:.250}; write or copy it again")
    return Saved(trace, ours.read_tally() if ours else None)


def _is_own_metadata(key: str | None, value: Any) -> bool:
    return key == "instrument" and isinstance(value, dict) and "format" in value


def _iterate_top_level_values(text: JsonText) -> Iterator[tuple[str | None, Any]]:
    """Yield the keys and values of the file. Events are yielded in batches, with None as the key."""
    if text.begins_with_bom():
        raise ValueError("it starts with a byte order mark, which viewers refuse; remove its first three bytes")
    if text.take_character("{[") == "[":
        yield from _read_events(text, are_ours=False)
    else:
        has_events, are_ours, keys = False, False, 0
        while (mark := text.peek_character()) != "}" and (mark or not has_events):
            if mark == "," and keys:
                text.take_character(",")
                continue
            keys += 1
            if keys > LIMIT_KEYS:
                raise ValueError(f"it has more than {LIMIT_KEYS} keys next to its events; give a Chrome trace in JSON")
            key = check_type(text.take_value(), str)
            text.take_character(":")
            if key == "traceEvents":
                text.take_character("[")
                yield from _read_events(text, are_ours)
                has_events = True
            else:
                value = text.take_value()
                are_ours |= _is_own_metadata(key, value)
                yield key, value
        _take_closing_bracket(text, "}")
        if not has_events:
            raise ValueError("it has no list 'traceEvents'; give a Chrome trace in JSON")
    if text.peek_character():
        text.left_out.count_omission("what follows its end", f"byte {text.bytes_read}")


def _take_closing_bracket(text: JsonText, bracket: str) -> None:
    """Read a closing bracket. A missing bracket is counted, because the writer may have been killed."""
    if text.peek_character():
        text.take_character(bracket)
    else:
        text.left_out.count_omission("closing brackets that are missing", f"byte {text.bytes_read}")


def _read_events(text: JsonText, are_ours: bool) -> Iterator[tuple[None, EventBatch]]:
    count, decode_own = 0, OwnDecoder().decode if are_ours else None
    while (mark := text.peek_character()) not in ("]", ""):
        if mark == ",":
            text.take_character(",")
        elif mark == "{":
            events = read_next_events(text, count + 1, decode_own)
            count += len(events.events)
            yield None, events
        else:
            text.take_value()
            count += 1
            text.left_out.count_omission("events that are no object", f"event {count}")
            yield None, EventBatch([TraceEvent()])
    _take_closing_bracket(text, "]")


# Join with a trace of torch.profiler

OURS = "trace of instrument"
TORCHS = "trace of torch.profiler"


def join_torch_trace(trace: Trace, profiled: Trace) -> Trace:
    """Return a trace with the kernels, allocations and floating-point operations of a torch.profiler trace.

    Raises `TraceError` if the traces are of different processes or times, or `profiled` is not of torch.profiler.
    """
    if trace.origin.recorder == "other" or profiled.origin.recorder != "other":
        kinds = [TORCHS if side.origin.recorder == "other" else OURS for side in (trace, profiled)]
        raise TraceError(
            f"to join them, one file must be a {OURS} and the other a {TORCHS}; these are a {kinds[0]} and a "
            f"{kinds[1]}; give ours first"
        )
    spans = profiled.columns
    rows = spans.attributes.rows_with_attribute(FLOPS)
    counts = [read_flops({FLOPS: value}) for value in spans.attributes.values(FLOPS, rows)]
    calls = zip(spans.thread_id[rows].tolist(), spans.start_ns[rows].tolist(), counts, strict=True)
    flops = sorted((Flops(*call) for call in calls if call[2]), key=attrgetter("at_ns"))
    if profiled.watched is None and not flops:
        raise TraceError(
            "the trace of torch.profiler has no kernels, no allocations and no shapes of operators; record it with "
            "ProfilerActivity.CUDA, profile_memory=True or record_shapes=True"
        )
    ours, theirs = trace.origin.pid, profiled.origin.pid
    if ours and theirs and ours != theirs:
        raise TraceError(f"the two traces must be of one process; they are of {ours} and {theirs}")
    moved_ns = profiled.origin.realtime_of(0) - trace.origin.realtime_of(0)
    first, last = (at_ns + moved_ns for at_ns in profiled.watched or (profiled.start_ns, profiled.end_ns))
    if first >= trace.end_ns or last <= trace.start_ns:
        raise TraceError(
            f"the two traces must be of one time; ours is from {_format_times(trace, trace.start_ns, trace.end_ns)} "
            f"and that of torch.profiler from {_format_times(trace, first, last)}; give a window that torch.profiler "
            "recorded"
        )
    first, last = max(first, trace.start_ns), min(last, trace.end_ns)
    try:
        moved = shift_torch_data(replace(profiled, flops=flops), np.asarray, np.asarray, moved_ns)
    except (OverflowError, ValueError) as problem:
        raise TraceError(f"cannot join the traces: {problem}") from problem
    allocations, at_ns = moved["allocations"], attrgetter("at_ns")
    moved["allocations"] = allocations[
        bisect_left(allocations, first, key=at_ns) : bisect_right(allocations, last, key=at_ns)
    ]
    moved["flops"] = [launch for launch in moved["flops"] if first <= launch.at_ns < last]
    moved["watched"] = None if profiled.watched is None else (first, last)
    return replace(trace, **moved)


def _format_times(trace: Trace, *times_ns: int) -> str:
    return " to ".join(
        datetime.fromtimestamp(trace.origin.realtime_of(at_ns) / 1e9, timezone.utc).strftime("%F %T.%f")
        for at_ns in times_ns
    )
