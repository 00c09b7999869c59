"""Parses and checks the JSON values of a recording: the process, sites, open spans, and details of ended spans.

Another process wrote the values, so they may be invalid. A value of the wrong type counts as missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from instrument.recording.spans import Gpu, Site, storable_fields
from instrument.runtime.lazy_imports import NamedTuple

Records = NDArray[np.void]
Fact = TypeVar("Fact", dict[str, Any], list[Any])

FARTHEST_NS = 1 << 62
"""The largest valid time in a recording, in ns."""
MOST_DEVICES = 1 << 16
"""The number of valid device indexes, which begin at 0."""
UNKNOWN = "(unknown)"


class Header(NamedTuple):
    """The header of a recording. `facts` describes the recorded process and its session. `monotonic_ns` and
    `realtime_ns` are the time of the header's last update, on the monotonic and the wall clock."""

    pid: int
    started: int
    boot_id: str
    state: str
    generation: int
    monotonic_ns: int
    realtime_ns: int
    memory_bytes: int
    facts: Mapping[str, Any]

    @property
    def begun_ns(self) -> int:
        """The monotonic time at which the session began. If it is unknown, this is the time of the header's last
        update."""
        begun_ns = self.facts.get("begun_ns")
        return begun_ns if isinstance(begun_ns, int) and 0 < begun_ns <= self.monotonic_ns else self.monotonic_ns

    def read_fact(self, name: str, kind: type[Fact]) -> Fact:
        """Return the fact `name`, or an empty value if it is missing or not of the type `kind`."""
        value = self.facts.get(name)
        return value if isinstance(value, kind) else kind()

    @property
    def service(self) -> str:
        return str(self.origin.get("service", ""))

    @property
    def resource(self) -> Mapping[str, Any]:
        return self.read_fact("resource", dict)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        entries = [entry for entry in self.read_fact("gpus", list) if isinstance(entry, dict)]
        return tuple(
            Gpu(device, str(entry.get("model", "")), str(entry.get("uuid", "")))
            for entry in entries
            if isinstance(device := entry.get("device"), int) and 0 <= device < MOST_DEVICES
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(map(str, self.read_fact("notes", list)))

    @property
    def origin(self) -> Mapping[str, Any]:
        return self.read_fact("origin", dict)


class OpenSpan(NamedTuple):
    """A span that has begun but not ended. `node` is the number of its call path. `active_ns` is its active time so
    far, -1 if unknown."""

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
    """The rows from one thread's ring, from the number `first` on. `missed` rows were overwritten before they could be
    read."""

    ring: int
    thread_id: int
    rows: Records
    first: int
    head: int
    missed: int


def iterate_records(data: bytes, packer: Struct) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yield each record with the text after it, up to the first invalid record. The last two fields of a record are its
    size and the size of its text."""
    at, least = 0, packer.size
    while at + least <= len(data):
        record = packer.unpack_from(data, at)
        size, text = record[-2:]
        if size < least + text or size % 8 or at + size > len(data):
            return
        yield record, data[at + least : at + least + text]
        at += size


def parse_facts(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Return an empty dictionary for any other text."""
    try:
        facts = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def parse_site(facts: Mapping[str, Any]) -> Site:
    sound: dict[str, Any] = {
        name: value
        for name, kind in _SITE.items()
        if isinstance(value := facts.get(name), kind) and (kind is not int or 0 <= facts[name] < FARTHEST_NS)
    }
    return Site(
        **{"name": UNKNOWN, **sound, "attributes": tuple(drop_invalid_attributes(facts.get("attributes")).items())}
    )


_TYPES = {"str": str, "int": int, "bool": bool}
_SITE = {member.name: _TYPES[str(member.type)] for member in storable_fields(Site) if str(member.type) in _TYPES}


def drop_invalid_attributes(attributes: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in (attributes.items() if isinstance(attributes, dict) else ())
        if all(isinstance(item, (str, int, float)) for item in (value if isinstance(value, list) else (value,)))
    }


def parse_detail(active_ns: int, facts: Mapping[str, Any]) -> tuple[int, str | None, dict[str, Any]]:
    """Return a row's active time, error and attributes. The active time is -1 if it equals the total time."""
    error = facts.get("error")
    active_ns = active_ns if -1 <= active_ns < FARTHEST_NS else -1
    return active_ns, error if isinstance(error, str) else None, drop_invalid_attributes(facts.get("attributes"))


def parse_thread_name(label: bytes) -> str:
    """Parse the JSON of a thread's name. In a long name, the closing quote is missing."""
    for text in (label, label + b'"'):
        try:
            name = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(name, str):
            return name
    return UNKNOWN
