"""What a process tells of itself to who exports its spans: what they are called, under which resource, which are kept.

It stands in the recording as JSON, but for the settings of the collector, which may hold secrets: these go by the
run's socket. Who reads it checks it, and takes what is not sound as not said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from instrument.otlp.packing import Ids, plain
from instrument.profile.model import Capture, Otlp, Rate, Usual, Where


@dataclass(frozen=True, slots=True)
class MeteredFacts:
    """What of a process are metrics, since `start_ns`, and what it alone knows of these.

    `asks` is whether there are any beside gauges, `requests` whether requests are recorded, `routes` are those whose
    answers a model generates, and `watches` is whether functions do so or have batches. `calls` and `streams` are the
    marks of functions whose calls are metrics, and of those whose items are generated. `environ` are the variables that
    say how metrics are to be told. The rest is what `instrument.recorder.meter.Books` has.
    """

    start_ns: int
    asks: bool = False
    requests: bool = False
    routes: tuple[str, ...] = ()
    watches: bool = False
    calls: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    costs_ns: Mapping[str, float] = field(default_factory=dict)
    queued: Mapping[str, int] = field(default_factory=dict)


UNMETERED = MeteredFacts(0)
"""Of a process that has none."""


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """What a process's spans are called, under which resource they go, which are kept, and what is metered."""

    ids: Ids
    resource: Mapping[str, object]
    capture: Capture
    spans_per_request: int
    metered: MeteredFacts


def told(
    ids: Ids,
    resource: Mapping[str, object],
    capture: Capture,
    spans_per_request: int,
    metered: MeteredFacts = UNMETERED,
) -> dict[str, Any]:
    """The facts as JSON has them."""
    return {
        "seeds": list(ids.seeds),
        "instance": ids.instance,
        "resource": {str(name): plain(value) for name, value in resource.items()},
        "capture": asdict(capture),
        "spans_per_request": spans_per_request,
        "metered": asdict(metered),
    }


def facts_from(found: Any) -> ExportFacts | None:
    """What a process told, None where it told nothing that can be used."""
    try:
        seeds = [int(seed) % (1 << 64) for seed in found["seeds"]]
        first, second, third = seeds
        resource = {str(name): value for name, value in dict(found["resource"]).items()}
        ids = Ids((first, second, third), str(found["instance"]))
        metered = _metered_from(found["metered"])
        return ExportFacts(ids, resource, _capture_from(found["capture"]), int(found["spans_per_request"]), metered)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _metered_from(found: Mapping[str, Any]) -> MeteredFacts:
    return MeteredFacts(
        start_ns=int(found["start_ns"]),
        asks=bool(found["asks"]),
        requests=bool(found["requests"]),
        routes=tuple(map(str, found["routes"])),
        watches=bool(found["watches"]),
        calls=tuple(map(str, found["calls"])),
        streams=tuple(map(str, found["streams"])),
        environ={str(name): str(value) for name, value in found["environ"].items()},
        losses={str(reason): int(count) for reason, count in found["losses"].items()},
        costs_ns={str(part): float(spent_ns) for part, spent_ns in found["costs_ns"].items()},
        queued={str(name): int(count) for name, count in found["queued"].items()},
    )


def _capture_from(found: Mapping[str, Any]) -> Capture:
    limit, usual = found["limit"], found["slow_over"]
    return Capture(
        sample=float(found["sample"]),
        slow_ns=None if found["slow_ns"] is None else int(found["slow_ns"]),
        errors=bool(found["errors"]),
        limit=None if limit is None else Rate(int(limit["count"]), max(int(limit["per_ns"]), 1)),
        before_ns=int(found["before_ns"]),
        slow_over=None if usual is None else Usual(float(usual["fraction"]), float(usual["factor"])),
        where=tuple(
            Where(str(one["attribute"]), tuple((str(how), value) for how, value in one["any_of"]))
            for one in found["where"]
        ),
    )


def settings_told(settings: Otlp) -> dict[str, Any]:
    """The settings of a collector as JSON has them, for a process that works in another folder."""
    found = asdict(settings)
    for name in ("certificate", "client_certificate", "client_key"):
        if found[name] is not None:
            found[name] = str(Path(found[name]).absolute())
    return found


def settings_from(found: Mapping[str, Any]) -> Otlp:
    """The settings of a collector that a process told. Raises `TypeError` or `ValueError` for what are none."""
    known = {one.name: found[one.name] for one in fields(Otlp) if one.name in found}
    headers = tuple((str(name), str(value)) for name, value in known.pop("headers", ()))
    if "timeout_ns" in known:
        known["timeout_ns"] = int(known["timeout_ns"])
    return Otlp(**known, headers=headers)
