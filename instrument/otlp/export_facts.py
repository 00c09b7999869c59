"""The facts of a process for the exporter of its spans: their ids, their resource, and the rules of capture.

They are JSON in the recording, except for the collector's settings, which may hold secrets: these go through the run's
socket. The reader checks them, and ignores malformed ones.
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
"""The facts of a process without metrics."""


@dataclass(frozen=True, slots=True)
class ExportFacts:
    """The facts of a process for an exporter: ids and resource of its spans, the rules of capture, and its metrics."""

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
    """Return the facts as JSON."""
    return {
        "seeds": list(ids.seeds),
        "instance": ids.instance,
        "run": ids.run,
        "resource": {str(name): plain(value) for name, value in resource.items()},
        "capture": asdict(capture),
        "spans_per_request": spans_per_request,
        "metered": asdict(metered),
    }


def facts_from(document: Any) -> ExportFacts | None:
    """Return the facts of a process, None if they are missing or malformed."""
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


def settings_told(settings: Otlp) -> dict[str, Any]:
    """Return the settings of a collector as JSON, with absolute paths for a process in another folder."""
    document = asdict(settings)
    for name in ("certificate", "client_certificate", "client_key"):
        if document[name] is not None:
            document[name] = str(Path(document[name]).absolute())
    return document


def settings_from(document: Mapping[str, Any]) -> Otlp:
    """Return the settings of a collector that a process sent. Raise `ValueError` for malformed ones."""
    import msgspec

    return msgspec.convert(document, Otlp, strict=False)
