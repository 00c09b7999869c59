"""What a recording in memory says, as others take it: whose it is, its sites, its open spans, and what few rows have.

It is told by another process, in JSON behind numbers, and may be anything: what is not what it should be counts as not
said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import Gpu, Site, told_fields

Records = NDArray[np.void]

FARTHEST_NS = 1 << 62
"""No clock reads more."""
MOST_DEVICES = 1 << 16
"""No machine has more."""
UNKNOWN = "(unknown)"


class Header(NamedTuple):
    """The process of a recording and its state. `facts` is what its process says of itself and its session.

    `monotonic_ns` and `realtime_ns` are one moment on both clocks: that at which it said so last.
    """

    pid: int
    started: int
    boot_id: str
    state: str
    generation: int
    monotonic_ns: int
    realtime_ns: int
    size_bytes: int
    facts: Mapping[str, Any]

    @property
    def begun_ns(self) -> int:
        """Since when it records, on the monotonic clock; where it does not say, when it last said anything."""
        found = self.facts.get("begun_ns")
        return found if isinstance(found, int) and 0 < found <= self.monotonic_ns else self.monotonic_ns

    @property
    def service(self) -> str:
        """The name of the service, "" where it is not known."""
        return str(self.origin.get("service", ""))

    @property
    def resource(self) -> Mapping[str, Any]:
        """Attributes of the resource that it said it is, none where it said nothing."""
        found = self.facts.get("resource")
        return found if isinstance(found, dict) else {}

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs whose gauges are read, as far as they are said."""
        found = self.facts.get("gpus")
        told = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        return tuple(
            Gpu(device, str(one.get("model", "")), str(one.get("uuid", "")))
            for one in told
            if isinstance(device := one.get("device"), int) and 0 <= device < MOST_DEVICES
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The last notes of the process on what it could not observe, none where it left none."""
        found = self.facts.get("notes")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    @property
    def origin(self) -> Mapping[str, Any]:
        """Return the fields of `spans.Origin` that are there."""
        found = self.facts.get("origin")
        return found if isinstance(found, dict) else {}


class OpenSpan(NamedTuple):
    """A span that has begun and not ended, of the call path with the number `node`. It ran for `active_ns`."""

    site: Site
    node: int
    span_id: int
    parent_id: int
    root_id: int
    task_id: int
    thread_id: int
    start_ns: int
    children_ns: int
    attributes: Mapping[str, Any]
    active_ns: int = -1


class RingRows(NamedTuple):
    """Newest rows of one thread, from number `first` on. `missed` were overwritten before they were read."""

    ring: int
    thread_id: int
    rows: Records
    first: int
    head: int
    missed: int


class Detail(NamedTuple):
    """The further facts of a row: the time in which the span was active (-1: all of it), its error, its attributes."""

    active_ns: int
    error: str | None
    attributes: Mapping[str, Any]


def records(data: bytes, kind: np.dtype[np.void]) -> Iterator[tuple[Any, bytes]]:
    """Records one after another, each with the text behind it, up to the first that is none."""
    at, least = 0, kind.itemsize
    while at + least <= len(data):
        record = np.frombuffer(data, kind, 1, at)[0]
        size, text = int(record["size_bytes"]), int(record["text_bytes"])
        if size < least + text or size % 8 or at + size > len(data):
            return
        yield record, data[at + least : at + least + text]
        at += size


def facts_in(text: bytes) -> dict[str, Any]:
    """An object, empty for what is none."""
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def attributes_in(text: bytes) -> dict[str, Any]:
    """Attributes, as far as they are such as spans have."""
    return _told(facts_in(text))


def site_of(facts: Mapping[str, Any]) -> Site:
    """The site that these are told of, with those of its fields that are sound."""
    told = {"name": UNKNOWN, **{name: facts[name] for name, kind in _SITE.items() if _is_sound(facts.get(name), kind)}}
    return Site(**{**told, "attributes": tuple(_told(facts.get("attributes")).items())})


_TYPES = {"str": str, "int": int, "bool": bool}
_SITE = {known.name: _TYPES[str(known.type)] for known in told_fields(Site) if str(known.type) in _TYPES}


def _is_sound(value: Any, kind: type) -> bool:
    return 0 <= value < FARTHEST_NS if kind is int and isinstance(value, int) else isinstance(value, kind)


def _told(attributes: Any) -> dict[str, Any]:
    """The attributes whose values are such as attributes have."""
    if not isinstance(attributes, dict):
        return {}
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, (str, bool, int, float)) or _is_flat(value)
    }


def _is_flat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, (str, bool, int, float)) for one in value)


def detail_of(active_ns: int, facts: Mapping[str, Any]) -> Detail:
    error = facts.get("error")
    active_ns = active_ns if -1 <= active_ns < FARTHEST_NS else -1
    return Detail(active_ns, error if isinstance(error, str) else None, _told(facts.get("attributes")))


def label_of(label: bytes) -> str:
    """A thread's name, which is cut where it is long, and then has no end."""
    for text in (label, label + b'"'):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, str):
            return found
    return UNKNOWN
