"""Predictions of how viewers show a Chrome trace, made from the parsed JSON alone.

The rules are those that Perfetto 52 and 55 were seen to follow, so that a run of the tests needs no browser: which
slices they drop, which arrows vanish, which values they misread. `problems` is empty for a file that shows whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

DEEPEST = 512
LANES = 1 << 32
PRECISE_US = 4.5e12
SLICES = "XBbni"


def problems(document: dict[str, Any]) -> list[str]:
    """Sentences on all that viewers would drop, refuse or misread."""
    events = document.get("traceEvents")
    if not isinstance(events, list):
        return ["traceEvents is no list: the file is refused"]
    found = [f"the file: {fault}" for fault in _bad_values(document)]
    lanes, marks, tracks, flows, binds = (defaultdict[Any, list[Any]](list) for _ in range(5))
    for index, event in enumerate(events):
        if not isinstance(event, dict):
            found.append(f"event {index} is no object: the file is refused")
            continue
        phase = event.get("ph")
        faults = list(_bad_event(event))
        found += [f"event {index} ({phase} {event.get('name')!r:.40}): {fault}" for fault in faults]
        if faults or phase == "M":
            continue
        row, start = (event.get("pid"), event.get("tid")), _ns(event["ts"])
        if phase == "X":
            lanes[row].append((start, start + _ns(event["dur"]), index))
        elif phase == "i" and event.get("s", "t") == "t":
            lanes[row].append((start, start, index))
        elif phase in "BE":
            marks[row].append((start, index, phase == "B", event.get("name")))
        elif phase in "bne":
            tracks[_track(event)].append((start, index, phase, event.get("name")))
        elif phase in "stf":
            flows[event.get("cat"), event.get("name"), event.get("id")].append((start, index, event))
        if phase in "XBbn" and (event.get("flow_in") or event.get("flow_out")):
            # At one time complete events are seen before all others, the longer first, and then the file's order.
            rank = (start, phase != "X", -_ns(event.get("dur", 0)), index)
            binds[str(event.get("bind_id"))].append((rank, bool(event.get("flow_in")), bool(event.get("flow_out"))))
    for row, slices in lanes.items():
        found += [f"lane {row}: {fault}" for fault in _crossings(slices)]
    for row, lane_marks in marks.items():
        found += [f"lane {row}: {fault}" for fault in _stack_faults(lane_marks)]
    for track, track_marks in tracks.items():
        stack = [(start, index, phase == "b", name) for start, index, phase, name in track_marks if phase != "n"]
        found += [f"async track {track}: {fault}" for fault in _stack_faults(stack)]
    for key, ends in flows.items():
        found += [f"flow {key}: {fault}" for fault in _flow_faults(ends, lanes)]
    for bind_id, ends in binds.items():
        found += [f"bind {bind_id}: {fault}" for fault in _bind_faults(bind_id, ends, bool(flows))]
    return found


def slices(document: dict[str, Any]) -> int:
    """Return the number of slices that a viewer must show."""
    return sum(event.get("ph") in SLICES for event in document["traceEvents"])


def arrows(document: dict[str, Any]) -> int:
    """Return the number of arrows that a viewer must show."""
    return sum(event.get("ph") in ("t", "f") or bool(event.get("flow_in")) for event in document["traceEvents"])


def _ns(time_us: float) -> int:
    """Microseconds as Perfetto turns them into nanoseconds."""
    return round(time_us * 1000) if isinstance(time_us, int) else math.floor(time_us * 1000 + 0.5)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _bad_values(value: object, within_args: bool = False) -> Iterator[str]:
    """Values anywhere in the file that JSON, UTF-8 or int64 does not have."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _bad_values(key)
            yield from _bad_values(item, within_args or key == "args")
    elif isinstance(value, list):
        for item in value:
            yield from _bad_values(item, within_args)
    elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        yield f"{value!r:.60} has a lone surrogate, which is not UTF-8"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{value} is not JSON: the file is refused"
    elif within_args and isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        yield f"the argument {value} is beyond int64: shown as 0.0"


def _bad_event(event: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of an event by itself."""
    phase = event.get("ph")
    if phase not in tuple("XBEbneistfCM"):
        yield "no phase that is shown"
        return
    if phase in "XBbnisC" and not isinstance(event.get("name"), str):
        yield "no name"
    for key in ("pid", "tid"):
        value = event.get(key)
        needed = phase not in "CM"
        if (value is not None or needed) and not (type(value) is int and 0 <= value < LANES):
            yield f"{key} {value!r} is no integer of 32 bits: folded into another lane"
    if not isinstance(event.get("args", {}), dict):
        yield "args is no object"
        return
    if phase == "M":
        yield from _bad_name(event)
        return
    ts, dur = event.get("ts"), event.get("dur")
    if not _is_number(ts):
        yield f"ts {ts!r} is no number: dropped"
    elif ts < 0:
        yield f"ts {ts} is negative: dropped"
    elif ts >= PRECISE_US:
        yield f"ts {ts} is so large that nanoseconds are lost"
    elif abs(ts * 1000 - round(ts * 1000)) > max(1e-3, ts * 1e-12):
        yield f"ts {ts} is no whole number of nanoseconds"
    if phase == "X" and not _is_number(dur):
        yield f"dur {dur!r} is no number: dropped"
    elif phase == "X" and dur < 0:
        yield f"dur {dur} is negative"
    if phase in "bne" and event.get("id") is None and not isinstance(event.get("id2"), dict):
        yield "no id: dropped"
    if phase in "stf" and not isinstance(event.get("id"), (int, str)):
        yield "no id: no arrow"
    if phase == "f" and event.get("bp") != "e":
        yield "an arrow's end without bp 'e' binds to the next slice"
    if phase == "C" and not (event.get("args") and all(map(_is_number, event["args"].values()))):
        yield "a counter needs numbers"


def _bad_name(event: dict[str, Any]) -> Iterator[str]:
    """Yield the faults of a metadata event."""
    wanted = {"name": str, "labels": str, "sort_index": int}
    key = str(event.get("name")).removeprefix("process_").removeprefix("thread_")
    if key not in wanted or type(event.get("args", {}).get(key)) is not wanted[key]:
        yield f"metadata {event.get('name')!r} without a {key} of its type"
    if str(event.get("name")).startswith("thread_") and event.get("tid") in (None, 0):
        yield "a thread's metadata without its tid; tid 0 is folded into the main thread"


def _track(event: dict[str, Any]) -> tuple[object, ...]:
    """Return the fields that the async events of one track share. All processes share `id` and a global id."""
    ids = event.get("id2") or {}
    everywhere = event.get("id", ids.get("global"))
    return event.get("cat"), everywhere or ids.get("local"), None if everywhere else event.get("pid")


def _crossings(slices: list[tuple[int, int, int]]) -> Iterator[str]:
    """Complete events that are dropped because they cross another, and those that lie too deep."""
    open_ends: list[int] = []
    for start, end, index in sorted(slices, key=lambda s: (s[0], -s[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        if open_ends and open_ends[-1] < end:
            yield f"event {index} from {start} to {end} ns crosses one that ends at {open_ends[-1]}: dropped"
            continue
        open_ends.append(end)
        if len(open_ends) > DEEPEST:
            yield f"event {index} lies in {len(open_ends) - 1} others: drawn at the top"


def _stack_faults(marks: list[tuple[int, int, bool, Any]]) -> Iterator[str]:
    """Begins and ends that do not pair like a stack."""
    opened: list[tuple[int, object]] = []
    for start, index, is_begin, name in sorted(marks, key=lambda m: (m[0], m[1])):
        if is_begin:
            opened.append((index, name))
            if len(opened) > DEEPEST:
                yield f"event {index} lies in {len(opened) - 1} others: drawn at the top"
        elif not opened:
            yield f"event {index} ends at {start} ns what never began"
        else:
            begun, begun_name = opened.pop()
            if name is not None and name != begun_name:
                yield f"event {index} ends {name!r:.40}, but event {begun} {begun_name!r:.40} is the innermost"
    for index, name in opened:
        yield f"event {index} {name!r:.40} never ends"


def _flow_faults(ends: list[Any], lanes: dict[Any, Any]) -> Iterator[str]:
    """Arrows that vanish, or begin elsewhere than meant."""
    starts = [start for start, _, event in ends if event["ph"] == "s"]
    if len(starts) != 1:
        yield f"{len(starts)} starts"
    if len(ends) == len(starts):
        yield "nothing ends it"
    for at, index, event in ends:
        if starts and at < min(starts):
            yield f"event {index} points into the past: no arrow"
        if not any(start <= at <= end for start, end, _ in lanes.get((event["pid"], event["tid"]), ())):
            yield f"event {index} lies in no slice: no arrow"


def _bind_faults(bind_id: str, ends: list[Any], has_flows: bool) -> Iterator[str]:
    """Tied slices that get no arrow."""
    if has_flows and bind_id.startswith("0x") and int(bind_id, 16) < LANES:
        yield "so small a bind id is also the number of another arrow"
    outs = [rank for rank, _, is_out in ends if is_out]
    if len(outs) != 1:
        yield f"{len(outs)} slices start it"
    if not any(is_in for _, is_in, _ in ends):
        yield "nothing ends it"
    for rank, is_in, _ in ends:
        if is_in and not any(out < rank for out in outs):
            yield f"the slice of event {rank[-1]} begins before its source: no arrow"
