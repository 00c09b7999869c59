"""Reading a trace: a file that `dump` wrote, exactly, or that of another profiler, by its slices."""

from __future__ import annotations

import json
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from instrument.chrome.events import Int64, TraceEvent, next_events
from instrument.chrome.json_text import JsonText
from instrument.chrome.slices import Slices
from instrument.errors import TraceError
from instrument.recording.allocations import Allocations
from instrument.recording.spans import Trace
from instrument.recording.tally import Tally
from instrument.runtime import compression
from instrument.trace import columns
from instrument.trace.file import Saved, without_endless
from instrument.trace.metadata import Metadata, rows_of_allocations
from instrument.trace.text import LIMIT_BYTES, LIMIT_SPANS, LIMIT_VALUE, checked

LIMIT_UNPACKED, LEAST_UNPACKED = 100, 64 << 20
"""Most times its size that a packed file unpacks to, beyond so many bytes. Traces pack to a tenth, at times a
thirtieth: their times do not repeat."""

LIMIT_KEYS = 1000
"""More keys beside the events, or in that of ours, are in no trace."""

LIMIT_VOID, VOID_BESIDE = 1_000_000, 4
"""Most events that say nothing of a trace, beyond so many for each that does: flows and the like."""

LIMIT_BACKWARD = 1000
"""More parents that start after their children are in no program's trace; what they ask for has no end."""

_decode_allocations = msgspec.json.Decoder(
    list[Annotated[list[Int64], msgspec.Meta(min_length=6, max_length=7)]]
).decode


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
    saved = load_columns(path, limit_bytes=limit_bytes)
    return saved.trace(), saved.counted


def load_columns(path: str | os.PathLike[str], *, limit_bytes: int = LIMIT_BYTES) -> Saved:
    """As `load`, with the spans as columns, and no object for any of them."""
    with _refusals(path):
        with _opened(Path(path), limit_bytes) as text:
            saved = _content(text)
        _refuse_backward(saved.columns)
        return without_endless(saved)


@contextmanager
def _refusals(path: str | os.PathLike[str]) -> Iterator[None]:
    """Everything that a file may raise, as a `TraceError`."""
    why: str
    cause: Exception
    try:
        yield
        return
    except TraceError as problem:
        why, cause = f"{problem}", problem
    except json.JSONDecodeError as problem:
        why, cause = f"it is no JSON, or cut off ({problem.msg}); write or copy it again", problem
    except RecursionError as problem:
        why, cause = "it nests deeper than any trace; give a Chrome trace in JSON", problem
    except compression.damages() as problem:
        why, cause = "its gzip data is cut off or damaged; write or copy it again", problem
    except OSError as problem:
        why, cause = f"{problem.strerror or problem}; give a trace file that may be read", problem
    except ValueError as problem:
        why, cause = str(problem), problem
    except (LookupError, TypeError, AttributeError, ArithmeticError) as problem:
        why, cause = f"a part is missing or of a wrong type ({problem!r:.80}); write or copy it again", problem
    raise TraceError(f"cannot read the trace {os.fspath(path)}: {why}") from cause


def facts_of(path: str | os.PathLike[str]) -> Trace | None:
    """Read the facts of a file that `dump` wrote, without its events. Return None for another profiler's file.

    Raises `TraceError`.
    """
    with _refusals(path), _opened(Path(path), LIMIT_BYTES) as text:
        for key, value in _members(text):
            if key == "instrument" and isinstance(value, dict) and "format" in value:
                return Metadata(value).trace([], [])
            if key is None:
                return None
    return None


@contextmanager
def _opened(source: Path, limit_bytes: int) -> Iterator[JsonText]:
    facts = source.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError("it is not a regular file; give a trace file")
    if not facts.st_size:
        raise ValueError("it is empty; write it again")
    with source.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    with compression.opened(source) if gzipped else source.open("rb") as file:
        packed_bytes = facts.st_size if gzipped else None
        text = JsonText(file.read if packed_bytes is None else _unpacking(file.read, packed_bytes), limit_bytes)
        if not gzipped:
            text.refuse_beyond_limit(facts.st_size)
        yield text


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


def _content(text: JsonText) -> Saved:
    slices, ours = Slices(text.left_out), None
    void = 0
    for key, value in _members(text):
        if key is None:
            before = slices.taken
            slices.add(value)
            void += max(len(value) - (slices.taken - before), 0)
            if void > LIMIT_VOID + VOID_BESIDE * slices.taken:
                raise ValueError("most of its events say nothing of any call; give a Chrome trace in JSON")
        elif key == "instrument" and isinstance(value, dict) and "format" in value:
            if slices.count:
                raise ValueError("its key 'instrument' comes after its events; put its keys in order (`jq -S .`)")
            ours = Metadata(value)
            slices = Slices(text.left_out, ours)
        else:
            slices.others.add_fact(key, value)
    found, facts = slices.trace()
    if (ours or not len(found)) and (losses := text.left_out.losses()):
        why = ", ".join(f"{count} {what}" for what, count in losses.items())
        raise ValueError(f"it is damaged, or no Chrome trace in JSON: {why:.250}; write or copy it again")
    return Saved(found, facts, ours.tally() if ours else None)


def _members(text: JsonText) -> Iterator[tuple[str | None, Any]]:
    """The file's top-level keys and values; events many at once, with None for a key."""
    if text.begins_with_mark():
        raise ValueError("it starts with a byte order mark, which viewers refuse; remove its first three bytes")
    if text.take("{[") == "[":
        yield from _events(text)
    else:
        has_events, keys = False, 0
        while (mark := text.peek()) != "}" and (mark or not has_events):
            if mark == "," and keys:
                text.take(",")
                continue
            keys = _counted_key(keys)
            key = checked(text.value(), str)
            text.take(":")
            if key == "traceEvents":
                text.take("[")
                yield from _events(text)
                has_events = True
            else:
                yield key, _facts(text) if key == "instrument" and text.peek() == "{" else text.value()
        _take_end(text, "}")
        if not has_events:
            raise ValueError("it has no list 'traceEvents'; give a Chrome trace in JSON")
    if text.peek():
        text.left_out.add("what follows its end", f"byte {text.passed}")


def _take_end(text: JsonText, bracket: str) -> None:
    """Pass over the bracket at the end, which a writer that was killed leaves out."""
    if text.peek():
        text.take(bracket)
    else:
        text.left_out.add("closing brackets that are missing", f"byte {text.passed}")


def _facts(text: JsonText) -> dict[str, Any]:
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
            facts[key] = _next_allocations(text)
        else:
            facts[key] = text.value()
            held += text.passed - before
        if held > LIMIT_VALUE:
            raise ValueError("its key 'instrument' is longer than in any trace; give a Chrome trace in JSON")
        end = text.take(",}")
    return facts


def _next_allocations(text: JsonText) -> bytearray:
    """Return the rows of `Allocations` from a list of lists that comes next."""
    rows = bytearray()
    text.take("[")
    end = text.take("]") if text.peek() == "]" else ","
    while end == ",":
        if text.peek() != "[":
            checked(text.value(), list)
        lists, found = text.values(_decode_allocations, b"]")
        if lists is None:
            rows += rows_of_allocations(json.loads(b"[%b]" % found))
        else:
            rows += array("q", chain.from_iterable(one if len(one) > 6 else [*one, 0] for one in lists)).tobytes()
        if len(rows) > LIMIT_SPANS * Allocations.ROW.size:
            raise ValueError(f"it has more than {LIMIT_SPANS} allocations; record less into one file")
        end = text.take(",]")
    return rows


def _counted_key(keys: int) -> int:
    if keys == LIMIT_KEYS:
        raise ValueError(f"it has more than {LIMIT_KEYS} keys beside its events; give a Chrome trace in JSON")
    return keys + 1


def _events(text: JsonText) -> Iterator[tuple[None, list[TraceEvent]]]:
    count = 0
    while (mark := text.peek()) not in ("]", ""):
        if mark == ",":
            text.take(",")
        elif mark == "{":
            events = next_events(text, count + 1)
            count += len(events)
            yield None, events
        else:
            text.value()
            count += 1
            text.left_out.add("events that are no object", f"event {count}")
            yield None, [TraceEvent()]
    _take_end(text, "]")


def _refuse_backward(found: columns.Trace) -> None:
    """Raise for parents that begin after their children, beyond a few, for which views would take endless time."""
    if np.count_nonzero(found.parent > np.arange(len(found))) > LIMIT_BACKWARD:
        raise ValueError("parents in it begin after their children; it is damaged")
