"""Events of a Chrome trace: their fields, whoever wrote them, and the sound parts of events that are damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from instrument.chrome.json_text import JsonText, LeftOut, ends_of_values
from instrument.recording.remote_parents import RemoteParent
from instrument.trace.gathering import written
from instrument.trace.text import INT64, checked, nanoseconds

Int64 = Annotated[int, msgspec.Meta(ge=-INT64, le=INT64 - 1)]

EXACT_US = 1 << 42
"""Microseconds; a float above this limit cannot separate two neighbouring nanoseconds."""

NO_ARGUMENTS = msgspec.Raw(b"{}")

Scalar = int | str | float | bool | None


class TraceEvent(msgspec.Struct, gc=False):
    """One event; what it says of itself in `args` stays text, for what there is depends on what it is."""

    ph: str = ""
    ts: Any = None
    dur: Any = None
    pid: Scalar = None
    tid: Scalar = None
    cat: Scalar = None
    name: Scalar = None
    id: Any = None
    id2: Any = None
    args: msgspec.Raw = NO_ARGUMENTS


class Remote(msgspec.Struct, omit_defaults=True):
    """The parent of a span in another process."""

    trace_id: str
    span_id: str
    flags: Int64
    is_local: bool = False
    in_server_span: bool = False

    @classmethod
    def of(cls, its: RemoteParent) -> Remote:
        """Return the parent as it is written."""
        ids = f"{its.trace_id:032x}", f"{its.span_id:016x}"
        return cls(*ids, its.flags, its.is_local, its.is_local and its.in_server_span)

    def parent(self) -> RemoteParent:
        """Return the parent as it was before it was written."""
        ids = int(self.trace_id, 16), int(self.span_id, 16)
        return RemoteParent(*ids, self.flags, self.is_local, self.in_server_span)


Number = Int64 | UnsetType


class Arguments(msgspec.Struct, gc=False):
    """The arguments of a slice of ours: of a span, or with `owner` of a device interval of that span.

    A number that follows from other slices is left out. The order of fields is that of the file.
    """

    thread: Number = UNSET
    lane: Number = UNSET
    kind: str | UnsetType = UNSET
    site: Number = UNSET
    code: str | UnsetType = UNSET
    id: Number = UNSET
    root: Number = UNSET
    parent: Number = UNSET
    own_id: Number = UNSET
    task: Number = UNSET
    self_ns: Number = UNSET
    active_ns: Number = UNSET
    error: str | UnsetType | None = UNSET
    clipped: bool | UnsetType = UNSET
    remote: Remote | UnsetType | None = UNSET
    attributes: msgspec.Raw | UnsetType = UNSET
    device: Number = UNSET
    stream: Number = UNSET
    enclosing_stream: Number = UNSET
    label: str | UnsetType = UNSET
    uncertainty_ns: Number = UNSET
    place: Number = UNSET
    owner: Number = UNSET


_decode_allocations = msgspec.json.Decoder(
    list[Annotated[list[Int64], msgspec.Meta(min_length=6, max_length=7)]]
).decode
_decode = msgspec.json.Decoder(list[TraceEvent]).decode


_decode_arguments = msgspec.json.Decoder(list[Arguments]).decode
_decode = msgspec.json.Decoder(list[TraceEvent]).decode


def decoded_arguments(texts: Sequence[bytes | msgspec.Raw]) -> list[Arguments]:
    """Return the arguments of slices of ours. Raises for texts that are none."""
    return _decode_arguments(b"[%b]" % b",".join(texts))


def times_ns(times_us: Sequence[Any], limit_ns: int) -> NDArray[np.int64]:
    """Microseconds as nanoseconds, exact for three decimals, as `nanoseconds` has them; those of `limit_ns` and beyond
    are refused."""
    kinds = set(map(type, times_us))
    if not kinds <= {float, int, Decimal}:
        for time in times_us:
            checked(time, float, int)
    if Decimal not in kinds:
        times = np.array(times_us, dtype=np.float64)
        if not len(times) or np.abs(times).max() < EXACT_US:
            return np.asarray(np.rint(times * 1000).astype(np.int64))
    found = list(map(nanoseconds, times_us))
    if not -limit_ns < min(found) <= max(found) < limit_ns:
        raise ValueError("it has a time that no clock reads; write times relative to the start")
    return np.array(found, dtype=np.int64)


# Damaged events

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


def next_events(text: JsonText, first: int) -> list[TraceEvent]:
    """The events of a list that come next: as many as are at hand. `first` is the number of the first."""
    events, found = text.values(_decode, b"}")
    if events is None:
        return _mended_events(found, first, text.left_out)
    if any(type(time) is float and abs(time) >= EXACT_US for one in events for time in (one.ts, one.dur)):
        _take_exact_times(found, events)
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
    begin = 0
    for end in ends_of_values(found):
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


def _take_exact_times(found: bytes, events: Sequence[TraceEvent]) -> None:
    """Put the times of events that a float does not hold to the nanosecond as they were written."""
    for event, texts in zip(events, _decode_times(b"[%b]" % found), strict=True):
        for name in ("ts", "dur"):
            text = bytes(getattr(texts, name))
            if type(getattr(event, name)) is float and len(text) <= LONGEST_TIME:
                setattr(event, name, Decimal(text.decode()))


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
