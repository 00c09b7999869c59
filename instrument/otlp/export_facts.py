"""Passes facts about a process to the exporter: ids, resource attributes, capture rules and settings of metrics.

A process writes these facts as JSON into its recording. The collector's settings may contain secrets, so the process
sends them through the run's socket instead.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument.profile.model import Capture, Otlp
from instrument.runtime.lazy_imports import LazyModule, asdict, dataclass, field

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from instrument.otlp import packing
    from instrument.recording.spans import Span
else:
    packing = LazyModule("instrument.otlp.packing")

_MASK = (1 << 64) - 1


class Ids:
    """Converts the recorder's numbers to random-looking span and trace ids, unique in the process and never zero.

    The finaliser of splitmix64 maps 64 bits one to one, so different numbers have different ids. A number whose id
    would be zero gets the id of number 0 instead. No span has number 0. Device intervals have numbers from 2**63 up.

    `instance` is the process's service.instance.id. `run` names the run, "" for none.
    """

    __slots__ = ("_device_number", "_seed", "_trace_seeds", "instance", "run")

    def __init__(self, seeds: Sequence[int] = (), instance: str = "", run: str = "") -> None:
        parts: Sequence[int] = seeds or struct.unpack("<3Q", os.urandom(24))
        self._seed, self._trace_seeds = parts[0], (parts[1], parts[2])
        # Another process that sends with the same seeds has other numbers.
        self._device_number = (1 << 63) + (int.from_bytes(os.urandom(7), "big") if seeds else 0)
        self.instance = instance or _make_uuid()
        self.run = run

    @property
    def seeds(self) -> tuple[int, int, int]:
        """The seeds from which another process makes the same ids."""
        return self._seed, *self._trace_seeds

    def span_id(self, number: int) -> int:
        span_id: int = mix_bits(self._seed + number) or mix_bits(self._seed)
        return span_id

    def reserve_numbers(self, count: int) -> int:
        first = self._device_number
        self._device_number += count
        return first

    def make_root_ids(self, span: Span) -> tuple[int, int]:
        trace_id = self.trace_id(span.root_id) if span.remote is None else span.remote.trace_id
        return trace_id, self.span_id(span.span_id)

    def trace_id(self, number: int) -> int:
        high, low = self._trace_seeds
        trace_id: int = (mix_bits(high + number) or mix_bits(high)) << 64 | (mix_bits(low + number) or mix_bits(low))
        return trace_id

    def make_ids(self, numbers: NDArray[np.uint64], part: int) -> NDArray[np.uint64]:
        """Return the span ids of numbers. With `part` 1 or 2, return the upper or lower halves of trace ids."""
        return mix_span_ids(self.seeds[part], numbers)


def _make_uuid() -> str:
    """Return a random UUID, version 4, without importing `uuid`."""
    number = int.from_bytes(os.urandom(16), "big") & ~(0xF << 76 | 0x3 << 62) | 0x4 << 76 | 0x2 << 62
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def mix_bits(value: Any) -> Any:
    """Mix the bits of a 64-bit number, or of each number in an array, by splitmix64's finaliser."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def mix_span_ids(seed: Any, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    import numpy as np

    with np.errstate(over="ignore"):
        ids: NDArray[np.uint64] = mix_bits(numbers + seed)
        is_none = ids == 0
        if is_none.any():
            ids[is_none] = np.broadcast_to(mix_bits(np.asarray(seed, dtype=np.uint64).reshape(-1)), ids.shape)[is_none]
    return ids


@dataclass(frozen=True, slots=True)
class MeteredFacts:
    """The metrics that a process wants from `start_ns` on, and the values that only this process knows.

    - `asks` is True if metrics other than gauges are wanted.
    - `requests` is True if requests are recorded.
    - `routes` are the routes for which a model generates answers.
    - `by` is the attribute that groups requests, in at most `at_most` groups.
    - `watches` is True if spans of generators and batches are needed.
    - `calls` has the ids (`make_site_id`) of functions with metrics.
    - `streams` has the ids of functions that generate answers.
    - `environ` has the environment variables that shape the metrics.
    - `losses` and `queued` have counts by name.
    - `costs_ns` has times by name.
    """

    start_ns: int
    asks: bool = False
    requests: bool = False
    routes: tuple[str, ...] = ()
    by: str = ""
    at_most: int = 0
    watches: bool = False
    calls: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    costs_ns: Mapping[str, float] = field(default_factory=dict)
    queued: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportFacts:
    ids: Ids
    resource: Mapping[str, object]
    capture: Capture
    spans_per_request: int
    metered: MeteredFacts


def encode_facts(facts: ExportFacts) -> dict[str, Any]:
    return {
        "seeds": list(facts.ids.seeds),
        "instance": facts.ids.instance,
        "run": facts.ids.run,
        "resource": {str(name): packing.convert_value(value) for name, value in facts.resource.items()},
        "capture": asdict(facts.capture),
        "spans_per_request": facts.spans_per_request,
        "metered": asdict(facts.metered),
    }


def decode_facts(document: Any) -> ExportFacts | None:
    import msgspec  # which a service that an agent exports for has no use for

    try:
        first, second, third = (int(seed) % (1 << 64) for seed in document["seeds"])
        ids = Ids((first, second, third), str(document["instance"]), str(document.get("run", "")))
        resource = {str(name): value for name, value in dict(document["resource"]).items()}
        capture = msgspec.convert(document["capture"], Capture, strict=False)
        metered = msgspec.convert(document["metered"], MeteredFacts, strict=False)
        if capture.limit is not None and capture.limit.per_ns < 1:
            return None
        return ExportFacts(ids, resource, capture, int(document["spans_per_request"]), metered)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def encode_collector_settings(settings: Otlp) -> dict[str, Any]:
    """Return the settings of a collector as JSON. Paths are absolute, because the reading process may have another
    working directory."""
    document = asdict(settings)
    for name in ("certificate", "client_certificate", "client_key"):
        if document[name] is not None:
            document[name] = str(Path(document[name]).absolute())
    return document


def decode_collector_settings(document: Mapping[str, Any]) -> Otlp:
    import msgspec

    return msgspec.convert(document, Otlp, strict=False)
