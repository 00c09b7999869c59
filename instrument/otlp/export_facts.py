"""What a process tells of itself to who exports its spans: what they are called, under which resource, which are kept.

It stands in the recording as JSON, but for the settings of the collector, which may hold secrets: these go by the
run's socket. Who reads it checks it, and takes what is not sound as not said.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from instrument.otlp.packing import Ids, plain
from instrument.profile.model import Capture, Otlp
from instrument.runtime.cheap_start import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class MeteredFacts:
    """The metrics that a process asks for since `start_ns`, and the facts of them that it alone knows.

    `asks` is True where it has metrics other than gauges, `requests` where requests are recorded. `routes` are the
    routes for which a model generates answers. `by` names the attribute that groups requests, in at most `at_most`
    groups. `watches` is True where the meter looks for functions with generated items or batches. `calls` are the
    marks of functions whose calls are metrics. `streams` are the marks of functions that generate items. `environ` has
    the variables that shape the metrics. The other fields are those of `instrument.recorder.meter.Books`.
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
        "run": ids.run,
        "resource": {str(name): plain(value) for name, value in resource.items()},
        "capture": asdict(capture),
        "spans_per_request": spans_per_request,
        "metered": asdict(metered),
    }


def facts_from(found: Any) -> ExportFacts | None:
    """What a process told, None where it told nothing that can be used."""
    import msgspec  # which a service that an agent exports for has no use for

    try:
        first, second, third = (int(seed) % (1 << 64) for seed in found["seeds"])
        ids = Ids((first, second, third), str(found["instance"]), str(found.get("run", "")))
        resource = {str(name): value for name, value in dict(found["resource"]).items()}
        capture = msgspec.convert(found["capture"], Capture, strict=False)
        metered = msgspec.convert(found["metered"], MeteredFacts, strict=False)
        if capture.limit is not None and capture.limit.per_ns < 1:
            return None
        return ExportFacts(ids, resource, capture, int(found["spans_per_request"]), metered)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def settings_told(settings: Otlp) -> dict[str, Any]:
    """The settings of a collector as JSON has them, for a process that works in another folder."""
    found = asdict(settings)
    for name in ("certificate", "client_certificate", "client_key"):
        if found[name] is not None:
            found[name] = str(Path(found[name]).absolute())
    return found


def settings_from(found: Mapping[str, Any]) -> Otlp:
    """The settings of a collector that a process told. Raises `ValueError` for what are none."""
    import msgspec

    return msgspec.convert(found, Otlp, strict=False)
