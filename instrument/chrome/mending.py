"""Events that are not as they should be: what is sound of each is taken, the rest is left out, counted and named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import numpy as np

from instrument.chrome.events import EXACT_US, NO_ARGUMENTS, TraceEvent, decoded_events
from instrument.trace.gathering import written
from instrument.trace.json_blocks import Depths, Json, LeftOut
from instrument.trace.text import INT64

FARTHEST_US = 1 << 52
"""Microseconds that no clock reads."""

LONGEST_TIME = 64
"""Characters of a number that may be a time."""

_ESCAPE = re.compile(
    rb"(\\(?:[\"\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))"
    rb"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|(\\)"
)
_decode_one = msgspec.json.Decoder(TraceEvent).decode
_decode_any = json.JSONDecoder(strict=False).decode
"""JSON in which texts may have line ends and other control characters."""


def next_events(text: Json, first: int) -> list[TraceEvent]:
    """The events of a list that come next: as many as are at hand. `first` is the number of the first."""
    found = text.values("{")
    events = decoded_events(found)
    if events is None:
        events = _mended_events(found, first, text.left_out)
    elif any(type(one.ts) is float and abs(one.ts) >= EXACT_US for one in events):
        _tell_exact_times(found, events)
    return events


def _mended_events(found: bytes, first: int, left_out: LeftOut) -> list[TraceEvent]:
    """The events of a text in which not all are sound; `first` is the number of the first. One that is none is void."""
    events: list[TraceEvent] = []
    for chunk, is_whole in _chunks(found):
        number = first + len(events)
        try:
            events.append(_decode_one(chunk))
            continue
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        events.append((_mended(chunk, number, left_out) if is_whole else None) or TraceEvent())
        if not is_whole:
            left_out.add("events that are cut off", f"event {number}")
    return events


def _chunks(found: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of each event, and True where the event has an end. Text between two events counts as an event."""
    places, depth = Depths().follow(found)
    begin = 0
    for end in (places[np.flatnonzero(depth == 0)] + 1).tolist():
        opening = min(at for mark in b"{[" if (at := found.find(mark, begin)) >= 0)
        yield from ((one, True) for one in found[begin:opening].split(b",") if one.strip())
        yield found[opening:end], True
        begin = end
    if rest := found[begin:].strip(b", \t\r\n"):
        yield rest, False


def _mended(chunk: bytes, number: int, left_out: LeftOut) -> TraceEvent | None:
    place = f"event {number}"
    try:
        found = _decode_any(_with_sound_escapes(chunk).decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        left_out.add("events that are no JSON", place)
        return None
    if not isinstance(found, dict):
        left_out.add("events that are no object", place)
        return None
    if not isinstance(found.get("ph", ""), str):
        left_out.add("events without a phase", place)
        return None
    its = {key: found[key] for key in ("ph", "ts", "dur", "id", "id2") if key in found}
    its |= {key: text_of(found[key]) for key in ("cat", "name") if key in found}
    its |= {key: lane_of(found[key]) for key in ("pid", "tid") if key in found}
    args = found.get("args", {})
    return TraceEvent(**its, args=msgspec.Raw(written(args)) if isinstance(args, dict) else msgspec.Raw(b"0"))


def _with_sound_escapes(text: bytes) -> bytes:
    """The text in which a backslash that escapes nothing is one, and half of a character is a mark for that."""
    return _ESCAPE.sub(lambda known: known[1] or (rb"\\" if known[2] else rb"\ufffd"), text)


def _tell_exact_times(found: bytes, events: Sequence[TraceEvent]) -> None:
    """Put the times of events that a float does not hold to the nanosecond as they were written."""
    for event, text in zip(events, _decode_times(b"[%b]" % found), strict=True):
        if type(event.ts) is float and len(bytes(text.ts)) <= LONGEST_TIME:
            event.ts = Decimal(bytes(text.ts).decode())


class _Times(msgspec.Struct, gc=False):
    ts: msgspec.Raw = NO_ARGUMENTS
    dur: msgspec.Raw = NO_ARGUMENTS


_decode_times = msgspec.json.Decoder(list[_Times]).decode


# Slices

_NUMBERS = frozenset((int, float, Decimal))


def are_sound(slices: Sequence[TraceEvent]) -> bool:
    """Return True where no slice needs mending. The check is quick, because most files need none."""
    starts, lengths = [one.ts for one in slices], [one.dur for one in slices if one.ph == "X"]
    if not _NUMBERS.issuperset(map(type, [*starts, *lengths])) or {bytes(one.args)[:1] for one in slices} != {b"{"}:
        return False
    try:
        at_us = np.array(starts, dtype=np.float64)
        are_complete = slice(None) if len(lengths) == len(starts) else [one.ph == "X" for one in slices]
        ends_us = at_us[are_complete] + np.array(lengths, dtype=np.float64)
    except OverflowError:
        return False
    are_within = (np.abs(at_us) < FARTHEST_US).all() and (ends_us < FARTHEST_US).all()
    return bool(are_within and min(lengths, default=0) >= 0)


def sound_slices(slices: Sequence[tuple[int, TraceEvent]], left_out: LeftOut) -> list[tuple[int, TraceEvent]]:
    """Return the slices that have a time, each with its number in the file. Unsound parts of them are left out."""
    found = []
    for number, event in slices:
        place = f"event {number}"
        event.ts = _time(event.ts)
        if event.ts is None:
            left_out.add("slices without a time", place)
            continue
        if event.ph == "X":
            event.dur = _time(event.dur)
            if event.dur is None or event.dur < 0:
                why = "no" if event.dur is None else "a negative"
                left_out.add(f"slices of {why} length", place)
                continue
            if float(event.ts) + float(event.dur) >= FARTHEST_US:
                left_out.add("slices that end later than any clock reads", place)
                continue
        if bytes(event.args)[:1] != b"{":
            if bytes(event.args) != b"null":
                left_out.add("arguments of events that are no object", place)
            event.args = NO_ARGUMENTS
        found.append((number, event))
    return found


def _time(value: Any) -> Any:
    """A time in microseconds, also where it is a text; None for what no clock reads."""
    if isinstance(value, str):
        try:
            value = Decimal(value) if len(value) <= LONGEST_TIME else None
        except InvalidOperation:
            return None
    try:
        return value if type(value) in _NUMBERS and abs(float(value)) < FARTHEST_US else None
    except OverflowError:
        return None


def text_of(value: Any) -> str | None:
    """A name or a category, which some write as a number."""
    if value is None or isinstance(value, str):
        return value
    return written({"": value})[4:-1].decode("utf-8", "replace")


def lane_of(value: Any) -> int | str | None:
    """The number or the name of a process or a thread."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return int(value) if -INT64 <= value < INT64 else f"{value:x}"[:40]
    return text_of(value)
